//! The `zarr.json` of a token cache: chunk sizes, file names, codecs and the fill value.
//!
//! Levanter writes only one kind (`formats/levanter.md` 1.2); the others that its reader accepts (1.6) are also supported.
//! The `zarrs` crate decodes inner chunks with other codecs, one at a time; shard indexes are always parsed here.

use serde_json::Value;

use crate::arrays::element::{ElementType, Fill};
use crate::arrays::fields::{Fields, Limits, parse};
use crate::arrays::index::IndexForm;
use crate::arrays::meta::{ArrayMeta, Coding, product};
use crate::arrays::naming::Naming;
use crate::dtype::DType;
use crate::error::{Error, Finding, Kind, Result};
use crate::location::Location;
use crate::memory::zeroed;
use crate::source::{Access, Store};
use crate::threads::Stop;

/// The file that describes an array.
pub(super) const METADATA: &str = "zarr.json";
/// Maximum size of `zarr.json`; Levanter's has a few hundred bytes.
const MOST: u64 = 1 << 20;
/// Maximum elements of an inner chunk, far more than Levanter's 262,144. Bounds the memory for decoding one.
const MOST_INNER: u64 = 1 << 24;
/// Maximum inner chunks per file; Levanter's have 512. Bounds the memory of an index.
const MOST_PER_FILE: u64 = 1 << 20;
/// Maximum elements in the metadata; Levanter's claim 2^54.
const MOST_ELEMENTS: u64 = 1 << 60;
/// The accepted metadata: everything that Levanter's reader accepts.
const LIMITS: Limits = Limits { size: u64::MAX, dimensions: 2, lenient: true };

/// An array of numbers in chunks of chunks.
#[derive(Clone, Debug)]
pub struct Meta {
    /// The dtype of the elements.
    pub dtype: DType,
    /// Number of columns; 1 unless the array is a table.
    pub width: u64,
    /// Elements per file.
    pub outer: u64,
    /// Elements per inner chunk; its rows divide the rows of a file.
    pub inner: u64,
    /// The encoding of inner chunks.
    pub coding: Coding,
    /// The index of shards; `None` if files are chunks.
    pub index: Option<IndexForm>,
    /// The element of missing chunks, little-endian; only the first [`Meta::item`] bytes are used.
    pub fill: [u8; 8],
    naming: Naming,
    columns: bool,
}

impl Meta {
    /// Reads `zarr.json` from the array's folder.
    pub fn read(store: &dyn Store, folder: &Location) -> Result<Meta> {
        Ok(Meta::read_with_text(store, folder)?.0)
    }

    /// Reads `zarr.json` from the array's folder; also returns its text.
    #[expect(
        clippy::disallowed_methods,
        reason = "a text of a few kilobytes, on a thread that is abandoned if it is far"
    )]
    pub(super) fn read_with_text(store: &dyn Store, folder: &Location) -> Result<(Meta, Vec<u8>)> {
        let path = folder.join(METADATA);
        let source = store.open(&path, Access::Once, Stop::never())?;
        if source.size() > MOST {
            return Err(
                Error::new(Kind::Format, format!("expected at most {MOST} bytes of metadata, found more")).at(&path)
            );
        }
        let mut text = zeroed(source.size() as usize)?;
        source.read(0, &mut text, Stop::never())?;
        let meta = Meta::parse(&text).map_err(|e| e.at(&path))?;
        Ok((meta, text))
    }

    /// Parses the text of a `zarr.json`.
    pub fn parse(text: &[u8]) -> Result<Meta> {
        let json = parse(text)?;
        let root = Fields::of(Some(&json), String::new())?;
        for (field, expected) in [("zarr_format", Value::from(3)), ("node_type", Value::from("array"))] {
            if root.get(field) != Some(&expected) {
                return Err(root.wrong(field, &expected.to_string()));
            }
        }
        if !json["chunk_key_encoding"]["name"].is_string() {
            return Err(root.wrong("chunk_key_encoding", "the encoding \"default\" or \"v2\""));
        }
        let found = ArrayMeta::v3(&root, &LIMITS);
        // A token cache never needs another release, so unsupported metadata is a format error.
        let found = found.map_err(|e| Error { kind: Kind::Format, ..e }.finds(Finding::Metadata))?;
        Meta::of(&root, found)
    }

    /// Checks that the array is supported in token caches.
    fn of(root: &Fields<'_>, found: ArrayMeta) -> Result<Meta> {
        let ElementType::Number(dtype) = found.element else {
            return Err(root.wrong("data_type", "an integer or floating type"));
        };
        if matches!(dtype, DType::C64 | DType::Bool) {
            return Err(root.wrong("data_type", "an integer or floating type"));
        }
        let columns = found.shape.len() == 2;
        if found.shape.is_empty() || product(found.shape.iter().copied()).is_none_or(|n| n > MOST_ELEMENTS) {
            return Err(root.wrong("shape", "one or two sizes"));
        }
        let width = found.shape.get(1).copied().unwrap_or(1);
        if width == 0 || found.outer.get(1).is_some_and(|w| *w != width) {
            return Err(root.wrong("chunk_grid", "chunks as wide as the array"));
        }
        if found.inner.get(1).is_some_and(|w| *w != width) {
            return Err(root.wrong("codecs", "a chunk_shape as wide as the array"));
        }
        let elements = product(found.outer.iter().copied()).filter(|n| *n <= MOST_ELEMENTS);
        let (Some(outer), Some(inner)) = (elements, product(found.inner.iter().copied())) else {
            return Err(root.wrong("chunk_grid", &format!("a chunk_shape of at most {MOST_ELEMENTS} elements")));
        };
        let fill = plain_fill(&found.fill, dtype).ok_or_else(|| {
            root.wrong("fill_value", &format!("a value of type {}", dtype.numpy_name().unwrap_or_default()))
        })?;
        if inner > MOST_INNER {
            return Err(root.wrong("chunk_grid", &format!("chunks of 1 to {MOST_INNER} elements")));
        }
        let index = found.index.transpose()?;
        if index.is_some() && outer / inner > MOST_PER_FILE {
            return Err(root.wrong("codecs", "at most 1,048,576 inner chunks in a file"));
        }
        let (coding, naming) = (found.coding, found.naming);
        Ok(Meta { dtype, width, outer, inner, coding, index, fill, naming, columns })
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

    /// Numbers of the outer chunks that may have a file, in ascending order, from one listing of the folder.
    pub fn existing(&self, store: &dyn Store, folder: &Location) -> Result<Vec<u64>> {
        let mut found = vec![];
        for name in store.list(&folder.join(self.naming.folder().0))? {
            found.extend(self.naming.first_index(&name, 1 + usize::from(self.columns)));
        }
        found.sort_unstable();
        Ok(found)
    }

    /// The file of an outer chunk.
    pub fn file(&self, folder: &Location, number: u64) -> Location {
        folder.join(&self.naming.file(&self.indices(number)))
    }

    /// The index of an inner chunk among all, in zarrs' order.
    pub fn indices(&self, chunk: u64) -> Vec<u64> {
        if self.columns { vec![chunk, 0] } else { vec![chunk] }
    }
}

/// The bytes of a fill value, if Levanter supports its kind: for integers an integer or 0.0, for floats any number.
fn plain_fill(fill: &Fill, dtype: DType) -> Option<[u8; 8]> {
    let float = matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64);
    match fill {
        Fill::Absent => None,
        Fill::Bits(_) if !float => None,
        Fill::Float(n) if !float && *n != 0.0 => None,
        fill => fill.bytes(dtype),
    }
}
