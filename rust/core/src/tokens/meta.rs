//! The `zarr.json` of a token cache: chunk sizes, file names, codecs and the fill value.
//!
//! Levanter writes one kind only (`formats/levanter.md` 1.2). The other kinds that its reader accepts (1.6) are read here too.
//! Inner chunks of all other codecs are decoded by the `zarrs` crate, one at a time; shard indexes are always read here.

use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::arrays::index::{Endian, IndexForm, Numbers, endian, is_named};
use crate::dtype::DType;
use crate::error::{Error, Finding, Kind, Result};
use crate::source::descriptors::open_regular;

/// Largest `zarr.json` that is read; Levanter's has some hundreds of bytes.
const MOST: u64 = 1 << 20;
/// Most elements of an inner chunk: far more than Levanter's 262,144. Bounds the memory of decoding one.
const MOST_INNER: u64 = 1 << 24;
/// Most inner chunks of a file, whoever decodes them: Levanter's have 512. Bounds the memory of an index.
const MOST_PER_FILE: u64 = 1 << 20;
/// Elements an array may claim to have; Levanter's claim 2^54.
const MOST_ELEMENTS: u64 = 1 << 60;

/// How the inner chunks of an array are had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coding {
    /// Little-endian numbers in blosc frames.
    Blosc,
    /// Little-endian numbers.
    Plain,
    /// Something else: zarrs decodes it.
    Foreign,
}

/// An array of numbers in chunks of chunks.
#[derive(Clone, Debug)]
pub struct Meta {
    /// The type of its elements.
    pub dtype: DType,
    /// Columns: 1, or those of a table.
    pub width: u64,
    /// Elements per file.
    pub outer: u64,
    /// Elements per inner chunk; of as many rows as divide those of a file.
    pub inner: u64,
    /// How inner chunks are coded.
    pub coding: Coding,
    /// The index of files that are shards; `None` where files are chunks.
    pub index: Option<IndexForm>,
    /// The element of chunks that are not stored, little-endian; the first [`Meta::item`] bytes count.
    pub fill: [u8; 8],
    prefix: &'static str,
    separator: char,
    columns: bool,
}

impl Meta {
    /// Reads `zarr.json` in the array's folder.
    pub fn read(folder: &Path) -> Result<Meta> {
        Ok(Meta::read_with_text(folder)?.0)
    }

    /// Reads `zarr.json` in the array's folder; its text too.
    pub(super) fn read_with_text(folder: &Path) -> Result<(Meta, Vec<u8>)> {
        let path = folder.join("zarr.json");
        let (file, _) = open_regular(&path)?;
        let mut text = vec![];
        // The length that the file reports is not relied on: special files report 0.
        file.take(MOST + 1).read_to_end(&mut text).map_err(|e| Error::from_io(&e, &path, "read"))?;
        if text.len() as u64 > MOST {
            return Err(
                Error::new(Kind::Format, format!("expected at most {MOST} bytes of metadata, found more")).at(&path)
            );
        }
        let meta = Meta::parse(&text).map_err(|e| e.at(&path))?;
        Ok((meta, text))
    }

    /// Parses the text of a `zarr.json`.
    pub fn parse(text: &[u8]) -> Result<Meta> {
        let json: Value =
            serde_json::from_slice(text).map_err(|e| Error::new(Kind::Format, format!("expected JSON: {e}")))?;
        is(&json, "zarr_format", &Value::from(3))?;
        is(&json, "node_type", &Value::from("array"))?;
        let name = json["data_type"].as_str().unwrap_or_default();
        let dtype = numpy_dtype(name).ok_or_else(|| wrong(&json, "data_type", "an integer or floating type"))?;
        let shape = sizes(&json["shape"]).filter(|s| product(s).is_some_and(|n| n <= MOST_ELEMENTS));
        let shape = shape.ok_or_else(|| wrong(&json, "shape", "one or two sizes"))?;
        let grid = &json["chunk_grid"];
        is(grid, "name", &Value::from("regular"))?;
        let outer = sizes(&grid["configuration"]["chunk_shape"]).filter(|c| c.len() == shape.len() && c[0] > 0);
        let outer = outer.ok_or_else(|| wrong(grid, "configuration", "a chunk_shape of as many sizes"))?;
        let width = shape.get(1).copied().unwrap_or(1);
        if width == 0 || outer.get(1).is_some_and(|w| *w != width) {
            return Err(wrong(grid, "configuration", "chunks as wide as the array"));
        }
        let (prefix, separator) = naming(&json["chunk_key_encoding"])
            .ok_or_else(|| wrong(&json, "chunk_key_encoding", "the default encoding or that of version 2"))?;

        let codecs = json["codecs"].as_array().map_or(&[][..], Vec::as_slice);
        let fill = fill_value(dtype, &json["fill_value"])
            .ok_or_else(|| wrong(&json, "fill_value", &format!("a value of type {name}")))?;
        let sharding = match codecs {
            [only] if is_named(only, "sharding_indexed") => Some(&only["configuration"]),
            _ => None,
        };
        let elements = product(&outer).filter(|n| *n <= MOST_ELEMENTS);
        let elements = elements.ok_or_else(|| {
            wrong(grid, "configuration", &format!("a chunk_shape of at most {MOST_ELEMENTS} elements"))
        })?;
        let mut meta = Meta {
            dtype,
            width,
            outer: elements,
            inner: elements,
            coding: coding(codecs),
            index: None,
            fill,
            prefix,
            separator,
            columns: shape.len() == 2,
        };
        if let Some(sharding) = sharding {
            meta.take_sharding(sharding, &outer)?;
        }
        if !(1..=MOST_INNER).contains(&meta.inner) {
            return Err(wrong(&json, "chunk_grid", &format!("chunks of 1 to {MOST_INNER} elements")));
        }
        if meta.index.is_some() && meta.per_file() > MOST_PER_FILE {
            return Err(wrong(&json, "codecs", "at most 1,048,576 inner chunks in a file"));
        }
        Ok(meta)
    }

    /// Takes the configuration of the sharding codec, for shards of a shape.
    fn take_sharding(&mut self, sharding: &Value, outer: &[u64]) -> Result<()> {
        let inner = sizes(&sharding["chunk_shape"]).filter(|c| {
            c.len() == outer.len() && c[0] > 0 && outer[0].is_multiple_of(c[0]) && c.get(1) == outer.get(1)
        });
        let inner = inner.and_then(|inner| product(&inner));
        self.inner = inner.ok_or_else(|| wrong(sharding, "chunk_shape", "a divisor of the outer chunk"))?;
        self.coding = coding(sharding["codecs"].as_array().map_or(&[][..], Vec::as_slice));
        let at_end = match sharding.get("index_location") {
            None => true,
            Some(place) if place == "end" => true,
            Some(place) if place == "start" => false,
            Some(_) => return Err(wrong(sharding, "index_location", "\"start\" or \"end\"")),
        };
        // The sharding codec allows only codecs of a fixed size here; other libraries write these two.
        let numbers = sharding["index_codecs"].as_array().and_then(|codecs| Numbers::of(codecs));
        let numbers = numbers.ok_or_else(|| wrong(sharding, "index_codecs", "bytes, or bytes and crc32c"))?;
        self.index = Some(IndexForm::numbers(self.per_file(), at_end, numbers));
        Ok(())
    }

    /// Bytes per element.
    pub fn item(&self) -> usize {
        self.dtype.size().unwrap_or(1)
    }

    /// Inner chunks per file.
    pub fn per_file(&self) -> u64 {
        self.outer / self.inner
    }

    /// Bytes of a file's index.
    pub fn index_bytes(&self) -> u64 {
        self.index.as_ref().map_or(0, IndexForm::bytes)
    }

    /// The folder of the files, and what file names (or those of folders of files) begin with there.
    fn files(&self, folder: &Path) -> (PathBuf, &'static str) {
        match self.prefix.strip_suffix('/') {
            Some(below) => (folder.join(below), ""),
            None => (folder.to_path_buf(), self.prefix),
        }
    }

    /// Numbers of the outer chunks that may have a file, in ascending order: from one look at the folder.
    pub fn existing(&self, folder: &Path) -> Result<Vec<u64>> {
        let (folder, begins) = self.files(folder);
        let entries = match std::fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
            Err(e) => return Err(Error::from_io(&e, &folder, "list")),
        };
        let mut found = vec![];
        for entry in entries {
            let name = entry.map_err(|e| Error::from_io(&e, &folder, "list"))?.file_name();
            let Some(rest) = name.to_str().and_then(|name| name.strip_prefix(begins)) else { continue };
            let digits = match self.columns {
                true if self.separator == '.' => rest.strip_suffix(".0"),
                _ => Some(rest),
            };
            let number = digits.and_then(|digits| digits.parse::<u64>().ok().filter(|n| n.to_string() == digits));
            found.extend(number);
        }
        found.sort_unstable();
        Ok(found)
    }

    /// The file of an outer chunk.
    pub fn file(&self, folder: &Path, number: u64) -> PathBuf {
        let mut name = format!("{}{number}", self.prefix);
        if self.columns {
            name.push(self.separator);
            name.push('0');
        }
        folder.join(name)
    }

    /// The position of an inner chunk among all, as zarrs counts them.
    pub fn indices(&self, chunk: u64) -> Vec<u64> {
        if self.columns { vec![chunk, 0] } else { vec![chunk] }
    }
}

/// The element type of a Zarr name, if it is a plain number.
fn numpy_dtype(name: &str) -> Option<DType> {
    DType::ALL.iter().copied().find(|d| {
        d.numpy_name() == Some(name)
            && d.size().is_some()
            && !matches!(d, DType::C64 | DType::Bool)
            && !name.contains("float8")
    })
}

fn sizes(value: &Value) -> Option<Vec<u64>> {
    let found: Option<Vec<u64>> = value.as_array()?.iter().map(Value::as_u64).collect();
    found.filter(|s| matches!(s.len(), 1 | 2))
}

fn product(sizes: &[u64]) -> Option<u64> {
    sizes.iter().try_fold(1u64, |n, s| n.checked_mul(*s))
}

fn naming(encoding: &Value) -> Option<(&'static str, char)> {
    let separator = match encoding["configuration"]["separator"].as_str() {
        Some("/") => Some('/'),
        Some(".") => Some('.'),
        None => None,
        Some(_) => return None,
    };
    match encoding["name"].as_str()? {
        "default" => Some(match separator {
            Some('.') => ("c.", '.'),
            _ => ("c/", '/'),
        }),
        "v2" => Some(("", separator.unwrap_or('.'))),
        _ => None,
    }
}

fn coding(codecs: &[Value]) -> Coding {
    match codecs {
        [bytes] if endian(bytes) == Some(Endian::Little) => Coding::Plain,
        [bytes, blosc] if endian(bytes) == Some(Endian::Little) && is_named(blosc, "blosc") => Coding::Blosc,
        _ => Coding::Foreign,
    }
}

/// The bytes of a fill value, little-endian (Zarr 3, "Fill value": numbers, names of special floats, bits in hexadecimal).
fn fill_value(dtype: DType, value: &Value) -> Option<[u8; 8]> {
    macro_rules! integer {
        ($t:ty) => {{
            let whole = match value {
                Value::Bool(false) => 0,
                Value::Number(n) if n.as_f64() == Some(0.0) => 0,
                Value::Number(n) => n.as_u64().map(i128::from).or_else(|| n.as_i64().map(i128::from))?,
                _ => return None,
            };
            <$t>::try_from(whole).ok()?.to_le_bytes().to_vec()
        }};
    }
    macro_rules! float {
        ($t:ty, $from:expr, $bits:ty) => {{
            let from = $from;
            match value {
                Value::Bool(false) => from(0.0).to_le_bytes().to_vec(),
                Value::Number(n) => from(n.as_f64()?).to_le_bytes().to_vec(),
                Value::String(text) => match text.as_str() {
                    "NaN" => from(f64::NAN).to_le_bytes().to_vec(),
                    "Infinity" => from(f64::INFINITY).to_le_bytes().to_vec(),
                    "-Infinity" => from(f64::NEG_INFINITY).to_le_bytes().to_vec(),
                    hex => <$bits>::from_str_radix(hex.strip_prefix("0x")?, 16).ok()?.to_le_bytes().to_vec(),
                },
                _ => return None,
            }
        }};
    }
    let bytes = match dtype {
        DType::I64 => integer!(i64),
        DType::U64 => integer!(u64),
        DType::I32 => integer!(i32),
        DType::U32 => integer!(u32),
        DType::I16 => integer!(i16),
        DType::U16 => integer!(u16),
        DType::I8 => integer!(i8),
        DType::U8 => integer!(u8),
        DType::F64 => float!(f64, |x: f64| x, u64),
        DType::F32 => float!(f32, |x: f64| x as f32, u32),
        DType::F16 => float!(half::f16, half::f16::from_f64, u16),
        DType::BF16 => float!(half::bf16, half::bf16::from_f64, u16),
        _ => return None,
    };
    let mut fill = [0; 8];
    fill.get_mut(..bytes.len())?.copy_from_slice(&bytes);
    Some(fill)
}

fn is(json: &Value, field: &str, expected: &Value) -> Result<()> {
    if json.get(field) == Some(expected) { Ok(()) } else { Err(wrong(json, field, &expected.to_string())) }
}

fn wrong(json: &Value, field: &str, expected: &str) -> Error {
    let mut found = json.get(field).map_or("nothing".to_string(), Value::to_string);
    if found.len() > 60 {
        let end = (0..=57).rev().find(|at| found.is_char_boundary(*at)).unwrap_or(0);
        found.truncate(end);
        found.push_str("...");
    }
    Error::new(Kind::Format, format!("field '{field}': expected {expected}, found {found}")).finds(Finding::Metadata)
}
