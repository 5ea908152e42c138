//! What a `zarr.json` of a token cache says: where chunks lie, and who decodes them.
//!
//! Levanter writes one kind only (`formats/levanter.md` 1.2); what else its reader accepts (1.6) is read here too, and whatever
//! remains of Zarr is left to the `zarrs` crate, one inner chunk at a time.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};

/// Metadata of ours is some hundreds of bytes.
const MOST: u64 = 1 << 20;
/// Elements of an inner chunk that may be asked for: far more than Levanter's 262,144.
const MOST_INNER: u64 = 1 << 24;
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
    /// Whether files are shards, with an index.
    pub sharded: bool,
    /// Whether that index stands at the end of the file.
    pub index_at_end: bool,
    /// Whether it ends in a checksum.
    pub index_checked: bool,
    prefix: &'static str,
    separator: char,
    columns: bool,
}

impl Meta {
    /// Reads `zarr.json` in the array's folder.
    pub fn read(folder: &Path) -> Result<Meta> {
        let path = folder.join("zarr.json");
        let len = fs::metadata(&path).map_err(|e| Error::from_io(&e, &path, "look at"))?.len();
        if len > MOST {
            return Err(Error::new(Kind::Format, format!("expected metadata, found {len} bytes")).at(&path));
        }
        let text = fs::read(&path).map_err(|e| Error::from_io(&e, &path, "read"))?;
        Meta::parse(&text).map_err(|e| e.at(&path))
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
        let zero = match &json["fill_value"] {
            Value::Number(n) => n.as_f64() == Some(0.0),
            Value::Bool(b) => !b,
            _ => false,
        };
        let sharding = match codecs {
            [only] if only["name"] == "sharding_indexed" => Some(&only["configuration"]),
            _ => None,
        };
        let mut meta = Meta {
            dtype,
            width,
            outer: product(&outer).unwrap_or(0),
            inner: product(&outer).unwrap_or(0),
            coding: coding(codecs),
            sharded: false,
            index_at_end: true,
            index_checked: false,
            prefix,
            separator,
            columns: shape.len() == 2,
        };
        if let Some(sharding) = sharding {
            let inner = sizes(&sharding["chunk_shape"]).filter(|c| {
                c.len() == outer.len() && c[0] > 0 && outer[0].is_multiple_of(c[0]) && c.get(1) == outer.get(1)
            });
            let inner = inner.ok_or_else(|| wrong(sharding, "chunk_shape", "a divisor of the outer chunk"))?;
            meta.sharded = true;
            meta.inner = product(&inner).unwrap_or(0);
            meta.coding = coding(sharding["codecs"].as_array().map_or(&[][..], Vec::as_slice));
            let (at_end, understood) = match sharding.get("index_location").and_then(Value::as_str) {
                None | Some("end") => (true, true),
                Some("start") => (false, true),
                _ => (true, false),
            };
            meta.index_at_end = at_end;
            match sharding["index_codecs"].as_array().map(Vec::as_slice) {
                Some([bytes]) if little(bytes) && understood => {}
                Some([bytes, crc]) if little(bytes) && crc["name"] == "crc32c" && understood => {
                    meta.index_checked = true;
                }
                _ => meta.coding = Coding::Foreign,
            }
        }
        if !zero {
            meta.coding = Coding::Foreign;
        }
        if !(1..=MOST_INNER).contains(&meta.inner) {
            return Err(wrong(&json, "chunk_grid", &format!("chunks of 1 to {MOST_INNER} elements")));
        }
        if meta.sharded && meta.coding != Coding::Foreign && meta.outer / meta.inner > 1 << 20 {
            return Err(wrong(&json, "codecs", "at most 1,048,576 inner chunks in a file"));
        }
        Ok(meta)
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
        self.per_file() * 16 + if self.index_checked { 4 } else { 0 }
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

fn little(codec: &Value) -> bool {
    codec["name"] == "bytes"
        && codec.get("configuration").and_then(|c| c.get("endian")).is_none_or(|endian| endian == "little")
}

fn coding(codecs: &[Value]) -> Coding {
    match codecs {
        [bytes] if little(bytes) => Coding::Plain,
        [bytes, blosc] if little(bytes) && blosc["name"] == "blosc" => Coding::Blosc,
        _ => Coding::Foreign,
    }
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
    Error::new(Kind::Format, format!("field '{field}': expected {expected}, found {found}"))
}
