//! The safetensors header; the file is untrusted.
//!
//! ```text
//! 8 bytes    n, unsigned 64-bit little endian
//! n bytes    a JSON object, '{' first, padded with spaces at the end:
//!              "name": {"dtype": "F32", "shape": [rows, width], "data_offsets": [begin, end]}, ...
//!              "__metadata__": {"key": "value", ...}            (optional, strings only)
//! the rest   the tensors' bytes; offsets count from here, and tensors cover it without a gap or an overlap
//! ```
//!
//! Source: the format section of safetensors' README and its `tensor.rs` (0.8.0). This parser accepts the same files, except
//! for five inputs that safetensors accepts and this one rejects: a repeated tensor name (the last one wins there), white
//! space before the brace, a tensor described by an array instead of an object, more than 64 dimensions, and nesting deeper
//! than the format can have.

use std::cell::Cell;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::layout::row::{FindRows, FoundRows, Row};
use crate::memory;
use crate::source::local::open_to_jump;
use crate::source::{Io, Source};
use crate::threads::{Context, Stop};

/// The limit of safetensors itself.
pub const MAX_HEADER: u64 = 100_000_000;
const MAX_DIMS: usize = 64;
/// The format nests three levels; ignored fields of a tensor may nest somewhat deeper.
const MAX_DEPTH: u32 = 16;

/// Why a header is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Reason {
    TooShort,
    HeaderTooLarge,
    HeaderPastEnd,
    NotAnObject,
    NotUtf8,
    TooDeep,
    BadJson,
    DuplicateKey,
    BadMetadata,
    BadTensor,
    UnknownDType,
    TooManyDims,
    Overflow,
    SubByte,
    OffsetsReversed,
    Gap,
    Overlap,
    WrongSize,
    PastEnd,
    TrailingBytes,
}

impl Reason {
    /// Every reason.
    pub const ALL: [Reason; 20] = [
        Reason::TooShort,
        Reason::HeaderTooLarge,
        Reason::HeaderPastEnd,
        Reason::NotAnObject,
        Reason::NotUtf8,
        Reason::TooDeep,
        Reason::BadJson,
        Reason::DuplicateKey,
        Reason::BadMetadata,
        Reason::BadTensor,
        Reason::UnknownDType,
        Reason::TooManyDims,
        Reason::Overflow,
        Reason::SubByte,
        Reason::OffsetsReversed,
        Reason::Gap,
        Reason::Overlap,
        Reason::WrongSize,
        Reason::PastEnd,
        Reason::TrailingBytes,
    ];

    /// The stable name.
    pub fn name(self) -> &'static str {
        match self {
            Reason::TooShort => "too_short",
            Reason::HeaderTooLarge => "header_too_large",
            Reason::HeaderPastEnd => "header_past_end",
            Reason::NotAnObject => "not_an_object",
            Reason::NotUtf8 => "not_utf8",
            Reason::TooDeep => "too_deep",
            Reason::BadJson => "bad_json",
            Reason::DuplicateKey => "duplicate_key",
            Reason::BadMetadata => "bad_metadata",
            Reason::BadTensor => "bad_tensor",
            Reason::UnknownDType => "unknown_dtype",
            Reason::TooManyDims => "too_many_dims",
            Reason::Overflow => "overflow",
            Reason::SubByte => "sub_byte",
            Reason::OffsetsReversed => "offsets_reversed",
            Reason::Gap => "gap",
            Reason::Overlap => "overlap",
            Reason::WrongSize => "wrong_size",
            Reason::PastEnd => "past_end",
            Reason::TrailingBytes => "trailing_bytes",
        }
    }
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Its key.
    pub name: String,
    /// Its element type.
    pub dtype: DType,
    /// Its shape, outermost first.
    pub shape: Vec<u64>,
    /// Its first byte, counted from [`Header::data_start`].
    pub begin: u64,
    /// One past its last byte.
    pub end: u64,
}

/// A parsed and checked header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The tensors, by offset.
    pub tensors: Vec<Tensor>,
    /// The `__metadata__` map, in file order.
    pub metadata: Vec<(String, String)>,
    /// Offset of the first tensor byte in the file.
    pub data_start: u64,
}

impl Header {
    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&Tensor> {
        self.tensors.iter().find(|t| t.name == name)
    }
}

fn refuse(reason: Reason, detail: impl Into<String>) -> Error {
    let mut error = Error::new(Kind::Header, detail);
    error.reason = Some(reason.name());
    error
}

/// Opens a file and reads its header.
#[expect(clippy::disallowed_methods, reason = "a header of a near file")]
pub fn read_header_at(path: &Path) -> Result<Header> {
    read_header(&*open_to_jump(path, Io::Pread)?, Stop::never())
}

/// Reads and checks a file's header.
pub fn read_header(source: &dyn Source, stop: &Stop) -> Result<Header> {
    read_header_of(source, stop, false)
}

/// As [`read_header`], for a file that may end before its tensors do.
pub fn read_header_of_partial(source: &dyn Source, stop: &Stop) -> Result<Header> {
    read_header_of(source, stop, true)
}

fn read_header_of(source: &dyn Source, stop: &Stop, is_partial: bool) -> Result<Header> {
    let (len, at) = (source.size(), source.location());
    let read = |buf: &mut [u8], from: u64| {
        source.read(from, buf, stop).map_err(|mut e| {
            e.detail = e.detail.replacen("cannot read:", "cannot read the header:", 1);
            Error { offset: None, ..e }
        })
    };
    let mut prefix = [0u8; 8];
    if len >= 8 {
        read(&mut prefix, 0)?;
    }
    // `header_len` keeps n within the file, so a false length cannot cause a larger allocation than the file.
    let n = header_len(prefix, len).map_err(|e| e.at(at))?;
    let mut json = memory::bytes(n as u64).map_err(|e| e.at(at))?;
    read(&mut json, 8)?;
    parse(&json, len, is_partial).map_err(|e| e.at(at))
}

/// The rows of a 2-D tensor with this name.
#[derive(Clone, Debug)]
pub struct TensorRows(pub String);

impl FindRows for TensorRows {
    fn find(&self, source: &dyn Source, row: &Row, context: &mut Context<'_>) -> Result<FoundRows> {
        let (key, at) = (&self.0, source.location());
        let header = read_header(source, context.stop())?;
        let Some(tensor) = header.tensor(key) else {
            let found: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).take(8).collect();
            return Err(Error::new(Kind::Format, format!("expected a tensor named '{key}', found {found:?}")).at(at));
        };
        if tensor.dtype != row.dtype {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "tensor '{key}' is {}, but the dataset's first file has {}; one dataset, one dtype",
                    tensor.dtype.name(),
                    row.dtype.name()
                ),
            )
            .at(at));
        }
        match tensor.shape[..] {
            [rows, width] if width == row.width as u64 => {
                Ok(FoundRows { start: header.data_start + tensor.begin, rows, swapped: false })
            }
            _ => Err(Error::new(
                Kind::Format,
                format!("tensor '{key}' has shape {:?}, expected (rows, {})", tensor.shape, row.width),
            )
            .at(at)),
        }
    }
}

/// Parses a whole file in memory.
pub fn parse_bytes(bytes: &[u8]) -> Result<Header> {
    let len = bytes.len() as u64;
    let mut prefix = [0u8; 8];
    if let Some(first) = bytes.first_chunk::<8>() {
        prefix = *first;
    }
    let n = header_len(prefix, len)?;
    parse(&bytes[8..8 + n], len, false)
}

/// The header's size, checked against the file's size.
fn header_len(prefix: [u8; 8], len: u64) -> Result<usize> {
    if len < 8 {
        return Err(
            refuse(Reason::TooShort, format!("expected a safetensors file of at least 8 bytes, found {len}")).byte(0)
        );
    }
    let n = u64::from_le_bytes(prefix);
    if n > MAX_HEADER {
        return Err(refuse(
            Reason::HeaderTooLarge,
            format!("expected a header of at most {MAX_HEADER} bytes, found {n}"),
        )
        .byte(0));
    }
    if n > len - 8 {
        return Err(refuse(
            Reason::HeaderPastEnd,
            format!("header of {n} bytes, but the file has {} after byte 8", len - 8),
        )
        .byte(0));
    }
    usize::try_from(n).map_err(|_| refuse(Reason::HeaderTooLarge, format!("header of {n} bytes")).byte(0))
}

/// Parses the header `json` of a file of `len` bytes. The tensors of a partial file may end after it.
fn parse(json: &[u8], len: u64, is_partial: bool) -> Result<Header> {
    let text = std::str::from_utf8(json)
        .map_err(|e| refuse(Reason::NotUtf8, "the header is not UTF-8").byte(8 + e.valid_up_to() as u64))?;
    if !text.starts_with('{') {
        return Err(refuse(Reason::NotAnObject, "the header does not begin with '{'").byte(8));
    }
    if let Some(at) = too_deep(json) {
        return Err(refuse(Reason::TooDeep, format!("the header nests deeper than {MAX_DEPTH}")).byte(8 + at as u64));
    }
    let why = Cell::new(Reason::BadJson);
    let mut reader = serde_json::Deserializer::from_str(text);
    let parsed = HeaderSeed(&why).deserialize(&mut reader).and_then(|header| reader.end().map(|()| header));
    let data_start = 8 + json.len() as u64;
    let (mut tensors, metadata) = parsed.map_err(|e| {
        let detail = e.to_string();
        let detail = detail.rsplit_once(" at line ").map_or(detail.as_str(), |(d, _)| d).to_string();
        // Headers are one line in practice, so the column is the byte.
        let offset = if e.line() <= 1 { 8 + (e.column() as u64).saturating_sub(1) } else { 8 };
        let reason = if e.is_data() { why.get() } else { Reason::BadJson };
        refuse(reason, format!("invalid header: {detail}")).byte(offset)
    })?;

    let last = tensors.iter().map(|t| t.end).max().unwrap_or(0);
    let len = if is_partial { len.max(data_start.saturating_add(last)) } else { len };
    let data = len - data_start;
    tensors.sort_by_key(|t| (t.begin, t.end));
    let mut start = 0;
    for t in &tensors {
        check(t, start, data)?;
        start = t.end;
    }
    if start != data {
        return Err(refuse(
            Reason::TrailingBytes,
            format!("the tensors end at byte {}, the file at {len}", data_start + start),
        )
        .byte(data_start + start));
    }
    Ok(Header { tensors, metadata, data_start })
}

/// Checks one tensor's numbers against each other, the previous tensor and the size of the data.
fn check(t: &Tensor, start: u64, data: u64) -> Result<()> {
    let name = &t.name;
    if t.end < t.begin {
        return Err(refuse(
            Reason::OffsetsReversed,
            format!("tensor '{name}': data_offsets [{}, {}] run backwards", t.begin, t.end),
        ));
    }
    if t.begin != start {
        let (reason, what) =
            if t.begin > start { (Reason::Gap, "leaves a gap after") } else { (Reason::Overlap, "overlaps") };
        return Err(refuse(
            reason,
            format!("tensor '{name}' begins at data byte {}, which {what} the tensor that ends at {start}", t.begin),
        ));
    }
    let count = t.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    let Some(bits) = count.and_then(|n| n.checked_mul(t.dtype.bits())) else {
        return Err(refuse(
            Reason::Overflow,
            format!("tensor '{name}': shape {:?} of {} overflows", t.shape, t.dtype.name()),
        ));
    };
    if bits % 8 != 0 {
        return Err(refuse(
            Reason::SubByte,
            format!("tensor '{name}': {:?} of {} does not end on a byte", t.shape, t.dtype.name()),
        ));
    }
    if t.end - t.begin != bits / 8 {
        return Err(refuse(
            Reason::WrongSize,
            format!(
                "tensor '{name}': {:?} of {} needs {} bytes, data_offsets give {}",
                t.shape,
                t.dtype.name(),
                bits / 8,
                t.end - t.begin
            ),
        ));
    }
    if t.end > data {
        return Err(refuse(
            Reason::PastEnd,
            format!("tensor '{name}' ends at data byte {}, the file has {data}", t.end),
        ));
    }
    Ok(())
}

/// The byte at which brackets outside strings nest too deep.
fn too_deep(json: &[u8]) -> Option<usize> {
    let (mut depth, mut in_string, mut escaped) = (0u32, false, false);
    for (at, byte) in json.iter().enumerate() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => {
                depth += 1;
                if depth > MAX_DEPTH {
                    return Some(at);
                }
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

type Parsed = (Vec<Tensor>, Vec<(String, String)>);

/// The whole object. serde's derive would accept a repeated key, so maps are read by hand.
struct HeaderSeed<'a>(&'a Cell<Reason>);

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = Parsed;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Parsed, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = Parsed;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Parsed, A::Error> {
        let mut tensors: Vec<Tensor> = Vec::new();
        let mut metadata = None;
        let mut names = std::collections::HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                self.0.set(Reason::DuplicateKey);
                return Err(A::Error::custom(format!("'{name}' appears twice")));
            }
            if name == "__metadata__" {
                self.0.set(Reason::BadMetadata);
                metadata = map.next_value_seed(MetadataSeed)?;
            } else {
                self.0.set(Reason::BadTensor);
                tensors.push(map.next_value_seed(TensorSeed { why: self.0, name })?);
            }
            self.0.set(Reason::BadJson);
        }
        Ok((tensors, metadata.unwrap_or_default()))
    }
}

/// `__metadata__`: an object of strings, or null.
struct MetadataSeed;

impl<'de> DeserializeSeed<'de> for MetadataSeed {
    type Value = Option<Vec<(String, String)>>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_option(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed {
    type Value = Option<Vec<(String, String)>>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of strings")
    }
    fn visit_none<E>(self) -> Result<Self::Value, E> {
        Ok(None)
    }
    fn visit_some<D: Deserializer<'de>>(self, d: D) -> Result<Self::Value, D::Error> {
        d.deserialize_map(self)
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut pairs = Vec::new();
        // The last of two equal keys wins, as in safetensors: these strings are only displayed.
        while let Some(pair) = map.next_entry::<String, String>()? {
            pairs.push(pair);
        }
        Ok(Some(pairs))
    }
}

/// One tensor's object.
struct TensorSeed<'a> {
    why: &'a Cell<Reason>,
    name: String,
}

impl<'de> DeserializeSeed<'de> for TensorSeed<'_> {
    type Value = Tensor;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Tensor, D::Error> {
        d.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TensorSeed<'_> {
    type Value = Tensor;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor object with dtype, shape and data_offsets")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Tensor, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        let twice = |seen: bool, key: &str| {
            if seen {
                self.why.set(Reason::DuplicateKey);
                return Err(A::Error::custom(format!("tensor '{}': '{key}' appears twice", self.name)));
            }
            Ok(())
        };
        while let Some(key) = map.next_key::<String>()? {
            match key.as_str() {
                "dtype" => {
                    twice(dtype.is_some(), &key)?;
                    let name = map.next_value::<String>()?;
                    let Some(known) = DType::from_name(&name) else {
                        self.why.set(Reason::UnknownDType);
                        return Err(A::Error::custom(format!("tensor '{}': unknown dtype '{name}'", self.name)));
                    };
                    dtype = Some(known);
                }
                "shape" => {
                    twice(shape.is_some(), &key)?;
                    shape = Some(map.next_value_seed(ShapeSeed(self.why))?);
                }
                "data_offsets" => {
                    twice(offsets.is_some(), &key)?;
                    offsets = Some(map.next_value::<(u64, u64)>()?);
                }
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        let missing = |key: &str| A::Error::custom(format!("tensor '{}': '{key}' is missing", self.name));
        let (begin, end) = offsets.ok_or_else(|| missing("data_offsets"))?;
        Ok(Tensor {
            dtype: dtype.ok_or_else(|| missing("dtype"))?,
            shape: shape.ok_or_else(|| missing("shape"))?,
            begin,
            end,
            name: self.name,
        })
    }
}

/// A list of sizes, limited in length so that it cannot cause a large allocation.
struct ShapeSeed<'a>(&'a Cell<Reason>);

impl<'de> DeserializeSeed<'de> for ShapeSeed<'_> {
    type Value = Vec<u64>;
    fn deserialize<D: Deserializer<'de>>(self, d: D) -> Result<Vec<u64>, D::Error> {
        d.deserialize_seq(self)
    }
}

impl<'de> Visitor<'de> for ShapeSeed<'_> {
    type Value = Vec<u64>;
    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of sizes")
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let mut shape = Vec::new();
        while let Some(size) = seq.next_element::<u64>()? {
            if shape.len() == MAX_DIMS {
                self.0.set(Reason::TooManyDims);
                return Err(A::Error::custom(format!("more than {MAX_DIMS} dimensions")));
            }
            shape.push(size);
        }
        Ok(shape)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn file(json: &str, data: usize) -> Vec<u8> {
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(bytes.len() + data, 0);
        bytes
    }

    fn reason(bytes: &[u8]) -> &'static str {
        let error = parse_bytes(bytes).unwrap_err();
        assert_eq!(error.kind, Kind::Header);
        error.reason.unwrap()
    }

    macro_rules! refused {
        ($($name:ident: $bytes:expr;)*) => {
            $(#[test] fn $name() { assert_eq!(reason(&$bytes), stringify!($name)); })*

            #[test]
            fn every_reason_has_a_test() {
                let tested = [$(stringify!($name)),*];
                for reason in Reason::ALL {
                    assert!(tested.contains(&reason.name()), "{} has no test", reason.name());
                }
            }
        };
    }

    refused! {
        too_short: [1, 2, 3];
        header_too_large: { let mut b = file("{}", 0); b[..8].copy_from_slice(&(MAX_HEADER + 1).to_le_bytes()); b };
        header_past_end: { let mut b = file("{}", 0); b[0] = 3; b };
        not_an_object: file(" {}", 0);
        not_utf8: { let mut b = file("{\"a\":1}", 0); b[10] = 0xff; b };
        too_deep: file(&format!("{{\"a\":{}", "[".repeat(99)), 0);
        bad_json: file("{\"a\"", 0);
        duplicate_key: file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1);
        bad_metadata: file(r#"{"__metadata__":{"a":1}}"#, 0);
        bad_tensor: file(r#"{"a":["U8",[1],[0,1]]}"#, 1);
        unknown_dtype: file(r#"{"a":{"dtype":"F33","shape":[1],"data_offsets":[0,1]}}"#, 1);
        too_many_dims: file(&format!(r#"{{"a":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,1]}}}}"#, "1,".repeat(64)), 1);
        overflow: file(r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,4],"data_offsets":[0,0]}}"#, 0);
        sub_byte: file(r#"{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,2]}}"#, 2);
        offsets_reversed: file(r#"{"a":{"dtype":"U8","shape":[0],"data_offsets":[1,0]}}"#, 1);
        gap: file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#, 2);
        overlap: file(r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}"#, 3);
        wrong_size: file(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}"#, 4);
        past_end: file(r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 4);
        trailing_bytes: file(r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}   "#, 2);
    }

    #[test]
    fn other_ways_to_be_wrong_are_refused_too() {
        for (json, data, want) in [
            ("[]", 0, "not_an_object"),
            ("", 0, "not_an_object"),
            ("{}x", 0, "bad_json"),
            ("{}", 1, "trailing_bytes"),
            (r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, 1, "duplicate_key"),
            (r#"{"a":{"dtype":"U8","shape":[1]}}"#, 1, "bad_tensor"),
            (r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, 1, "bad_tensor"),
            (r#"{"a":{"dtype":"U8","shape":[1.0],"data_offsets":[0,1]}}"#, 1, "bad_tensor"),
            (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#, 1, "bad_json"),
            (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}}"#, 1, "bad_tensor"),
            (
                r#"{"a":{"dtype":"U8","shape":[9223372036854775808,9223372036854775808,0],"data_offsets":[0,0]}}"#,
                0,
                "overflow",
            ),
            (
                r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}}"#,
                3,
                "gap",
            ),
            (r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "duplicate_key"),
        ] {
            assert_eq!(reason(&file(json, data)), want, "{json}");
        }
    }

    #[test]
    fn valid_headers_are_understood() {
        let json = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16],"note":{"x":[1]}},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"z":{"dtype":"F4","shape":[0,7],"data_offsets":[16,16]}}     "#;
        let header = parse_bytes(&file(json, 16)).unwrap();
        assert_eq!(header.metadata, vec![("format".to_string(), "pt".to_string())]);
        assert_eq!(header.data_start, 8 + json.len() as u64);
        assert_eq!(header.tensors.iter().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["a", "b", "z"]);
        assert_eq!(header.tensor("b").unwrap().shape, [2, 3]);
        assert!(header.tensor("c").is_none());
        assert!(parse_bytes(&file("{}", 0)).unwrap().tensors.is_empty());
        assert!(parse_bytes(&file(r#"{"__metadata__":null}"#, 0)).unwrap().metadata.is_empty());
    }

    #[test]
    fn every_dtype_is_known_by_name() {
        for dtype in DType::ALL {
            let bytes = dtype.bits();
            let json = format!(r#"{{"a":{{"dtype":"{}","shape":[8],"data_offsets":[0,{bytes}]}}}}"#, dtype.name());
            assert_eq!(parse_bytes(&file(&json, bytes as usize)).unwrap().tensors[0].dtype, *dtype);
        }
    }

    #[test]
    fn errors_tell_the_byte() {
        let error = parse_bytes(&file("{\"a\":{\"dtype\":\"F33\"", 0)).unwrap_err();
        assert!(error.offset.unwrap() > 8 && error.to_string().contains("F33"), "{error}");
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_bytes(&bytes);
        }

        #[test]
        fn no_damaged_header_panics(at in 0usize..200, byte in any::<u8>(), data in 0usize..20) {
            let json = r#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
            let mut bytes = file(json, data);
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(header) = parse_bytes(&bytes) {
                // An accepted header covers the file exactly.
                let end = header.tensors.last().map_or(0, |t| t.end);
                prop_assert_eq!(header.data_start + end, bytes.len() as u64);
            }
        }
    }
}
