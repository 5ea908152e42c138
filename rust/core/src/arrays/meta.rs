//! The metadata of Zarr arrays: `zarr.json` (version 3) and `.zarray` (version 2).
//!
//! One parser for 4-D stores, the small arrays in them and token arrays. It accepts what any of them accepts, and each user
//! rejects the rest. The `zarrs` crate parses the codecs when a chunk must be decoded.
//!
//! Sources: the Zarr storage specification 2.0; the Zarr core specification 3.0 with its regular grid, its default and v2 chunk
//! keys, and the `bytes` and `sharding_indexed` codecs.

use serde_json::Value;

use super::element::{ElementType, Fill};
use super::fields::{Fields, Limits, parse};
use super::index::{IndexForm, Numbers};
use super::naming::Naming;
use crate::dtype::Spelling;
use crate::error::Result;

/// Depth to which the names of nested codecs are listed.
const MOST_NESTED: usize = 8;
/// Maximum length of a codec's name in [`ArrayMeta::how`], in characters.
const MOST_NAME: usize = 40;

/// The metadata of an array.
#[derive(Clone, Debug)]
pub struct ArrayMeta {
    /// Elements per dimension.
    pub shape: Vec<u64>,
    /// The shape of a file: a chunk or a shard.
    pub outer: Vec<u64>,
    /// The shape of a unit decoded at once: a chunk or an inner chunk of a shard.
    pub inner: Vec<u64>,
    /// The element type.
    pub element: ElementType,
    /// Whether elements of plain chunks are big-endian.
    pub swapped: bool,
    /// The element of missing chunks.
    pub fill: Fill,
    /// The names of files.
    pub naming: Naming,
    /// The encoding of a unit.
    pub coding: Coding,
    /// The codecs of a file, for messages; empty if a file contains plain numbers in C order.
    pub how: String,
    /// Names of all codecs, including those inside shards.
    pub codecs: Vec<String>,
    /// The index of shards, or why it cannot be read directly; `None` if files are chunks.
    pub index: Option<Result<IndexForm>>,
}

/// The encoding of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Little-endian numbers.
    Plain,
    /// Little-endian numbers in a blosc frame.
    Blosc,
    /// Another encoding, decoded by zarrs.
    Foreign,
}

impl ArrayMeta {
    /// Parses the metadata of an array in a store of version 2 or 3. `place` precedes field names in errors.
    pub fn of_store(version: u8, text: &[u8], place: &str) -> Result<ArrayMeta> {
        let json = parse(text)?;
        let root = Fields::of(Some(&json), place.to_string())?;
        if version == 2 { ArrayMeta::v2(&root, &Limits::STORE) } else { ArrayMeta::v3(&root, &Limits::STORE) }
    }

    /// From a `.zarray`.
    pub fn v2(root: &Fields<'_>, limits: &Limits) -> Result<ArrayMeta> {
        root.is_version("zarr_format", 2.0, true)?;
        let shape = root.sizes("shape", 0, None, limits)?;
        let outer = root.sizes("chunks", 1, Some(shape.len()), limits)?;
        let (element, swapped) = v2_element(root)?;
        let fortran = match root.get("order") {
            None => false,
            Some(order) if order == "C" => false,
            Some(order) if order == "F" => true,
            Some(_) => return Err(root.wrong("order", "\"C\" or \"F\"")),
        };
        let slashes = match root.get("dimension_separator") {
            None => false,
            Some(separator) if separator == "." => false,
            Some(separator) if separator == "/" => true,
            Some(_) => return Err(root.wrong("dimension_separator", "\".\" or \"/\"")),
        };
        let mut codecs = vec![];
        for (name, list) in [("compressor", root.get("compressor")), ("filters", root.get("filters"))] {
            let list = match list {
                None | Some(Value::Null) => &[][..],
                Some(one) if name == "compressor" => std::slice::from_ref(one),
                Some(Value::Array(filters)) => filters,
                Some(other) if is_nothing(other) => &[],
                Some(_) => return Err(root.wrong(name, "codecs with an id")),
            };
            for codec in list {
                let id = codec.get("id").and_then(Value::as_str);
                codecs.push(id.ok_or_else(|| root.wrong(name, "codecs with an id"))?.to_string());
            }
        }
        let words = codecs.iter().map(|name| shortened(name)).chain(fortran.then(|| "F order".to_string()));
        let how = words.collect::<Vec<_>>().join(", ");
        let coding = if how.is_empty() && !swapped { Coding::Plain } else { Coding::Foreign };
        let fill = fill(root, &element, limits)?;
        let (inner, naming) = (outer.clone(), Naming::v2(slashes));
        Ok(ArrayMeta { shape, outer, inner, element, swapped, fill, naming, coding, how, codecs, index: None })
    }

    /// From a `zarr.json`.
    pub fn v3(root: &Fields<'_>, limits: &Limits) -> Result<ArrayMeta> {
        root.is_version("zarr_format", 3.0, false)?;
        let shape = root.sizes("shape", 0, None, limits)?;
        let grid = root.object("chunk_grid")?;
        if grid.get("name").is_none_or(|name| name != "regular") {
            return Err(grid.unsupported("name", "only regular grids are read, found"));
        }
        let outer = grid.object("configuration")?.sizes("chunk_shape", 1, Some(shape.len()), limits)?;
        let naming = v3_naming(root, limits)?;
        let element = match root.get("data_type").and_then(Value::as_str) {
            Some("string" | "bytes" | "variable_length_bytes" | "variable_length_utf8") => ElementType::Strings,
            name => match name.map_or(Spelling::Unknown, Spelling::of_name) {
                Spelling::Type(dtype) => ElementType::Number(dtype),
                Spelling::Unsupported(what) => {
                    return Err(root.unsupported("data_type", &format!("{what} are not read, found")));
                }
                Spelling::Bits(_) | Spelling::Unknown => return Err(root.unsupported("data_type", "not read:")),
            },
        };
        let list = root.get("codecs").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        if !limits.lenient {
            check_codecs(root, list)?;
        }
        let mut made = ArrayMeta {
            shape,
            inner: outer.clone(),
            outer,
            element,
            swapped: false,
            fill: Fill::Absent,
            naming,
            coding: coding(list),
            how: String::new(),
            codecs: vec![],
            index: None,
        };
        match list {
            [only] if is_named(only, "sharding_indexed") => {
                let within = format!("{}[0]", root.place("codecs"));
                made.take_sharding(&Fields::of(Some(only), within)?.object("configuration")?, limits)?;
                made.how = "sharding".to_string();
            }
            _ => {
                made.swapped = matches!(list, [bytes] if endian(bytes) == Some(Endian::Big));
                let words: Vec<_> =
                    list.iter().map(|c| shortened(&name_of(c))).filter(|name| name != "bytes").collect();
                made.how = words.join(", ");
            }
        }
        names(list, 0, &mut made.codecs);
        made.fill = fill(root, &made.element, limits)?;
        Ok(made)
    }

    fn take_sharding(&mut self, sharding: &Fields<'_>, limits: &Limits) -> Result<()> {
        self.inner = sharding.sizes("chunk_shape", 1, Some(self.outer.len()), limits)?;
        if self.outer.iter().zip(&self.inner).any(|(shard, chunk)| !shard.is_multiple_of(*chunk)) {
            let expected = format!("a divisor of the shard's shape {:?}", self.outer);
            return Err(sharding.wrong("chunk_shape", &expected));
        }
        self.coding = coding(sharding.get("codecs").and_then(Value::as_array).map_or(&[][..], Vec::as_slice));
        let counts = self.outer.iter().zip(&self.inner).map(|(shard, chunk)| shard / chunk);
        let chunks = product(counts).ok_or_else(|| sharding.wrong("chunk_shape", "fewer chunks in a shard"));
        self.index = Some(chunks.and_then(|chunks| index_form(sharding, chunks)));
        Ok(())
    }
}

fn fill(root: &Fields<'_>, element: &ElementType, limits: &Limits) -> Result<Fill> {
    let expected = || format!("a value of {}", element.numpy().unwrap_or_default());
    let found = Fill::of(element, root.get("fill_value"), limits.lenient);
    found.ok_or_else(|| root.wrong("fill_value", &expected()))
}

/// The element type of a version 2 array, and whether it is byte-swapped.
fn v2_element(root: &Fields<'_>) -> Result<(ElementType, bool)> {
    let wrong = || root.wrong("dtype", "an element type such as \"<f2\"");
    let code = match root.get("dtype") {
        Some(Value::Array(_)) => return Err(root.unsupported("dtype", "structured elements are not read, found")),
        code => code.and_then(Value::as_str).ok_or_else(wrong)?,
    };
    if code == "|O" {
        return Ok((ElementType::Strings, false));
    }
    let (spelling, swapped) = Spelling::of_code(code);
    match spelling {
        Spelling::Type(dtype) => return Ok((ElementType::Number(dtype), swapped)),
        Spelling::Bits(_) => {
            let text = "bytes of an unknown type are not read (write the name of the type: \"bfloat16\", \"float8_e4m3fn\"), found";
            return Err(root.unsupported("dtype", text));
        }
        Spelling::Unsupported(_) | Spelling::Unknown => {}
    }
    let mut letters = code.chars();
    let (order, kind, digits) = (letters.next(), letters.next(), letters.as_str());
    let n = Some(digits).filter(|d| (1..=6).contains(&d.len()) && d.bytes().all(|c| c.is_ascii_digit()));
    let n: Option<u32> = n.and_then(|digits| digits.parse().ok());
    let element = match (kind, n) {
        _ if !matches!(order, Some('<' | '>' | '|' | '=')) => None,
        (Some('S'), Some(n)) => Some(ElementType::Text('S', n)),
        (Some('U'), Some(n)) => Some(ElementType::Text('U', n)),
        (Some('f'), Some(16)) => Some(ElementType::Wide("f16")),
        (Some('c'), Some(16)) => Some(ElementType::Wide("c16")),
        (Some('c'), Some(32)) => Some(ElementType::Wide("c32")),
        _ => None,
    };
    match (element, spelling) {
        (Some(element), _) => {
            let of_bytes = matches!(element, ElementType::Text('S', _));
            Ok((element, order == Some('>') && !of_bytes))
        }
        (None, Spelling::Unsupported(what)) => Err(root.unsupported("dtype", &format!("{what} are not read, found"))),
        (None, _) => Err(wrong()),
    }
}

fn v3_naming(root: &Fields<'_>, limits: &Limits) -> Result<Naming> {
    let wrong = || root.wrong("chunk_key_encoding", "the encoding \"default\" or \"v2\"");
    if root.get("chunk_key_encoding").is_none() {
        return Ok(Naming::default_of(true));
    }
    let keys = root.object("chunk_key_encoding")?;
    let separator = match keys.get("configuration") {
        Some(Value::Object(configuration)) => configuration.get("separator"),
        Some(other) if !is_nothing(other) && !limits.lenient => return Err(wrong()),
        _ => None,
    };
    let slashes = match separator {
        Some(given) if given == "/" => Some(true),
        Some(given) if given == "." => Some(false),
        Some(Value::String(_)) => return Err(wrong()),
        Some(_) if !limits.lenient => return Err(wrong()),
        _ => None,
    };
    match keys.get("name") {
        None => Ok(Naming::default_of(slashes.unwrap_or(true))),
        Some(name) if name == "default" => Ok(Naming::default_of(slashes.unwrap_or(true))),
        Some(name) if name == "v2" => Ok(Naming::v2(slashes.unwrap_or(false))),
        Some(_) => Err(wrong()),
    }
}

/// Rejects version 3 codecs that are not a list of objects, and invalid byte orders.
fn check_codecs(root: &Fields<'_>, list: &[Value]) -> Result<()> {
    if list.is_empty() {
        return Err(root.wrong("codecs", "a non-empty list"));
    }
    let place = root.place("codecs");
    let mut objects = list.iter().enumerate().map(|(i, codec)| Fields::of(Some(codec), format!("{place}[{i}]")));
    let first = objects.next().transpose()?;
    objects.try_for_each(|object| object.map(|_| ()))?;
    let (Some(first), [only]) = (first, list) else { return Ok(()) };
    let configured = only.get("configuration").is_none_or(|c| c.is_object() || is_nothing(c));
    if is_named(only, "bytes") && !(configured && endian(only).is_some()) {
        return Err(first.wrong("configuration", "the endian \"little\" or \"big\""));
    }
    Ok(())
}

/// The index of shards, at either end, encoded with `bytes`, or `bytes` and `crc32c`, as other libraries write it. The
/// sharding codec also allows other codecs of fixed size, which zarrs decodes.
fn index_form(sharding: &Fields<'_>, chunks: u64) -> Result<IndexForm> {
    let at_end = match sharding.get("index_location") {
        None => true,
        Some(place) if place == "end" => true,
        Some(place) if place == "start" => false,
        Some(_) => return Err(sharding.wrong("index_location", "\"start\" or \"end\"")),
    };
    let numbers = sharding.get("index_codecs").and_then(Value::as_array).and_then(|codecs| index_numbers(codecs));
    let numbers = numbers.ok_or_else(|| sharding.wrong("index_codecs", "bytes, or bytes and crc32c"))?;
    Ok(IndexForm::numbers(chunks, at_end, numbers))
}

/// The form of an index with these codecs; `None` unless they are `bytes`, or `bytes` and `crc32c`.
pub fn index_numbers(codecs: &[Value]) -> Option<Numbers> {
    let (bytes, checked) = match codecs {
        [bytes] => (bytes, false),
        [bytes, crc] if is_named(crc, "crc32c") => (bytes, true),
        _ => return None,
    };
    Some(Numbers { big_endian: endian(bytes)? == Endian::Big, checked })
}

fn coding(codecs: &[Value]) -> Coding {
    match codecs {
        [bytes] if endian(bytes) == Some(Endian::Little) => Coding::Plain,
        [bytes, blosc] if endian(bytes) == Some(Endian::Little) && is_named(blosc, "blosc") => Coding::Blosc,
        _ => Coding::Foreign,
    }
}

/// The byte order of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Endian {
    Little,
    Big,
}

/// The byte order of a `bytes` codec; `None` for other codecs.
fn endian(codec: &Value) -> Option<Endian> {
    if !is_named(codec, "bytes") {
        return None;
    }
    match codec.get("configuration").and_then(|c| c.get("endian")) {
        None => Some(Endian::Little),
        Some(endian) if endian == "little" => Some(Endian::Little),
        Some(endian) if endian == "big" => Some(Endian::Big),
        Some(_) => None,
    }
}

/// Whether a codec has this name; codecs without a configuration may be given by name alone.
fn is_named(codec: &Value, name: &str) -> bool {
    codec == name || codec["name"] == name
}

fn name_of(codec: &Value) -> String {
    match (codec, codec.get("name")) {
        (Value::String(name), _) | (_, Some(Value::String(name))) => name.clone(),
        (_, name) => name.unwrap_or(&Value::Null).to_string(),
    }
}

/// Names of codecs, including those inside sharding.
fn names(codecs: &[Value], depth: usize, found: &mut Vec<String>) {
    for codec in codecs.iter().filter(|codec| codec.is_string() || codec.is_object()) {
        found.push(name_of(codec));
        for within in ["codecs", "index_codecs"] {
            let inner = codec.get("configuration").and_then(|c| c.get(within)).and_then(Value::as_array);
            if let Some(inner) = inner.filter(|_| depth + 1 < MOST_NESTED) {
                names(inner, depth + 1, found);
            }
        }
    }
}

fn shortened(name: &str) -> String {
    name.chars().take(MOST_NAME).collect()
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(n) => n.as_f64() == Some(0.0),
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) => false,
    }
}

/// The product of sizes; `None` if it overflows.
pub fn product(sizes: impl IntoIterator<Item = u64>) -> Option<u64> {
    sizes.into_iter().try_fold(1u64, u64::checked_mul)
}
