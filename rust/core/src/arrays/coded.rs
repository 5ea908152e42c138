//! Chunks that are not plain bytes, decoded one at a time.
//!
//! Metadata are parsed by the `zarrs` crate; files are opened and bytes decompressed here, within the bounds that a chunk's
//! shape sets (see [`chain`](super::chain)). No lock is held and no other thread is needed, so that a child forked beside a
//! decoding thread decodes as its parent does. A panic of a codec becomes an error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zarrs::array::{Array, ArrayMetadata, ArrayMetadataV2, ArrayMetadataV3};
use zarrs::storage::store::MemoryStore;

pub use super::chain::Elements;
use super::chain::{Chain, ShardCodec, assemble, decoded_size};
use super::failing::Undecodable;
use super::file::{Access, ChunkFile, StoredUnit};
use super::index::Entries;
use super::key::{UnitKey, WHOLE, new_array};
use crate::codec::cache::Cache;
use crate::error::{Error, Kind, Result, in_one_line};
use crate::source::{Source, Version};

/// Bytes of shard indexes that an array keeps.
const INDEX_MEMORY: u64 = 32 << 20;

/// Who decodes an array's chunks.
pub trait Decode: std::fmt::Debug + Send + Sync {
    /// A chunk's bytes in C order and native byte order, of which there must be `len`; `None` if there is no such chunk.
    /// `path` is for the error.
    fn chunk(&self, indices: &[u64], len: u64, path: &Path) -> Result<Option<Vec<u8>>>;
}

/// An array whose codecs are known here.
#[derive(Debug)]
pub struct CodedArray {
    /// Chunks are those inside shards.
    inner: bool,
    /// Or why it cannot be read.
    array: Result<ParsedArray>,
    number: u64,
    indexes: Cache<Entries, UnitKey>,
}

#[derive(Debug)]
struct ParsedArray {
    folder: PathBuf,
    array: Array<MemoryStore>,
    chain: Chain,
    chunk: Vec<u64>,
}

impl ParsedArray {
    fn new(folder: &Path, metadata: &[u8]) -> Result<ParsedArray> {
        let unsupported = |e: &dyn std::fmt::Display| {
            Error::new(Kind::Unsupported, format!("zarrs cannot open this array: {e}")).at(folder)
        };
        guarded(folder, || {
            let value: serde_json::Value = serde_json::from_slice(metadata).map_err(|e| unsupported(&e))?;
            let version = value.get("zarr_format").and_then(serde_json::Value::as_u64);
            let metadata = if version == Some(3) {
                let v3: ArrayMetadataV3 = serde_json::from_value(value).map_err(|e| unsupported(&e))?;
                if let Some((name, _)) = v3.additional_fields.iter().find(|(_, field)| field.must_understand()) {
                    return Err(unsupported(&format!("field '{name}' is unknown and must be understood")));
                }
                if !v3.storage_transformers.is_empty() {
                    return Err(unsupported(&"storage transformers are not read"));
                }
                ArrayMetadata::V3(v3)
            } else {
                let v2: ArrayMetadataV2 = serde_json::from_value(value).map_err(|e| unsupported(&e))?;
                ArrayMetadata::V2(v2)
            };
            let array =
                Array::new_with_metadata(Arc::new(MemoryStore::new()), "/", metadata).map_err(|e| unsupported(&e))?;
            let chunk = array.chunk_shape(&vec![0; array.shape().len()]).map_err(|e| unsupported(&e))?;
            let chain = Chain::new(&array.codecs(), &chunk, array.data_type(), array.fill_value())
                .map_err(|e| unsupported(&e.text))?;
            let chunk = chunk.iter().map(|n| n.get()).collect();
            Ok(ParsedArray { folder: folder.to_path_buf(), array, chain, chunk })
        })
    }

    fn path(&self, indices: &[u64]) -> PathBuf {
        self.folder.join(self.array.chunk_key(indices).as_str())
    }

    /// A whole chunk, or shard.
    fn chunk(&self, indices: &[u64]) -> Result<Option<Elements>> {
        let path = self.path(indices);
        let file = ChunkFile::open(&path, Access::Once, ChunkFile::one_unit)?;
        file.unit(0)?.map(|unit| decode_unit(unit, &self.chain, &path)).transpose()
    }
}

impl CodedArray {
    /// The array whose chunks are in a folder, of metadata that were read already; `inner` if chunks are those inside shards.
    pub fn of(folder: &Path, metadata: &[u8], inner: bool) -> CodedArray {
        let array = ParsedArray::new(folder, metadata);
        CodedArray { inner, array, number: new_array(), indexes: Cache::new(INDEX_MEMORY) }
    }

    /// A chunk inside a shard.
    fn inner(&self, parsed: &ParsedArray, shard: &ShardCodec, indices: &[u64]) -> Result<Option<Elements>> {
        let outer = shard.outer(indices);
        let path = parsed.path(&outer);
        let grid = parsed.array.chunk_grid_shape();
        let file = outer.iter().zip(grid).fold(0u64, |n, (i, g)| n.wrapping_mul(*g).wrapping_add(*i));
        let index = |source: &dyn Source, version: &Version| {
            let key = UnitKey { array: self.number, file, version: Some(version.clone()), chunk: 0, block: WHOLE };
            let index = self.indexes.get_or_load(
                key,
                |_| true,
                || {
                    let (_, raw) = shard.index.read(source, Kind::Format)?;
                    let entries = guarded(&path, || shard.index.parse(raw).map_err(|e| cannot_decode(&path, e)))?;
                    Ok::<_, Error>(Some(Entries(entries.into())))
                },
            )?;
            index.ok_or_else(|| Error::new(Kind::Internal, "an index that was not read").at(&path))
        };
        let file = ChunkFile::open(&path, Access::Once, index)?;
        let unit = file.unit(shard.number(indices))?;
        unit.map(|unit| decode_unit(unit, &shard.inner, &path).map_err(|e| e.byte(unit.offset))).transpose()
    }

    /// Number of dimensions.
    pub fn dimensions(&self) -> Result<usize> {
        Ok(self.parsed()?.chunk.len())
    }

    /// Decodes a whole chunk (a shard) whose bytes were read already.
    pub fn decode(&self, encoded: Vec<u8>) -> Result<Elements> {
        let parsed = self.parsed()?;
        let path = &parsed.folder;
        guarded(path, || parsed.chain.decode(encoded).map_err(|e| cannot_decode(path, e)))
    }

    /// Decodes a unit of `len` bytes, a chunk inside a shard or a whole one, that was read already.
    pub fn decode_unit(&self, encoded: Vec<u8>, len: u64, path: &Path) -> Result<Vec<u8>> {
        let parsed = self.parsed()?;
        let chain = match parsed.chain.shard() {
            Some(shard) if self.inner => &shard.inner,
            _ => &parsed.chain,
        };
        chain.check_encoded(encoded.len() as u64).map_err(|e| cannot_decode(path, e))?;
        let made = guarded(path, || chain.decode(encoded).map_err(|e| cannot_decode(path, e)))?;
        numbers(made, len, path)
    }

    fn parsed(&self) -> Result<&ParsedArray> {
        self.array.as_ref().map_err(Clone::clone)
    }
}

impl Decode for CodedArray {
    fn chunk(&self, indices: &[u64], len: u64, path: &Path) -> Result<Option<Vec<u8>>> {
        let parsed = self.parsed()?;
        let found = match parsed.chain.shard() {
            Some(shard) if self.inner => self.inner(parsed, shard, indices)?,
            _ => parsed.chunk(indices)?,
        };
        found.map(|made| numbers(made, len, path)).transpose()
    }
}

fn numbers(made: Elements, len: u64, path: &Path) -> Result<Vec<u8>> {
    match made {
        Elements::Fixed(bytes) => of_length(bytes, len, path),
        Elements::Variable(_) => Err(cannot_decode(path, "expected numbers, found strings".into())),
    }
}

/// A unit, decoded.
fn decode_unit(unit: StoredUnit<'_>, chain: &Chain, path: &Path) -> Result<Elements> {
    chain.check_encoded(unit.len).map_err(|e| cannot_decode(path, e))?;
    let encoded = unit.read()?.into_owned();
    guarded(path, || chain.decode(encoded).map_err(|e| cannot_decode(path, e)))
}

/// What was decoded, if it is as long as it must be.
pub fn of_length(bytes: Vec<u8>, len: u64, path: &Path) -> Result<Vec<u8>> {
    if bytes.len() as u64 == len {
        return Ok(bytes);
    }
    Err(Error::new(Kind::Format, format!("expected a chunk of {len} bytes, decoded {}", bytes.len())).at(path))
}

/// Why an array's codecs are not known here, if they are not.
pub fn problem(folder: &Path, metadata: &[u8]) -> Option<String> {
    ParsedArray::new(folder, metadata).err().map(|e| in_one_line(&e.detail))
}

/// Reads a whole array of at most `most` bytes, or elements of variable size: the small ones beside the activations. Only the
/// chunks whose indices are listed are looked for; the others are not there, and hold the fill value.
pub fn read_whole(folder: &Path, metadata: &[u8], there: Vec<Vec<u64>>, most: u64) -> Result<Elements> {
    let parsed = ParsedArray::new(folder, metadata)?;
    let (shape, fill) = (parsed.array.shape(), parsed.array.fill_value().as_ne_bytes());
    let fixed = parsed.array.data_type().fixed_size();
    let bytes = shape.iter().try_fold(fixed.unwrap_or(1) as u64, |n, d| n.checked_mul(*d));
    if bytes.is_none_or(|n| n > most) {
        return Err(Error::new(Kind::Format, format!("shape {shape:?} is too large to read")).at(folder));
    }
    let mut failed = None;
    let made = assemble(shape, &parsed.chunk, fill, fixed.is_some(), there, |indices| {
        parsed.chunk(indices).map_err(|error| {
            failed = Some(error);
            String::new().into()
        })
    });
    made.map_err(|what| failed.unwrap_or_else(|| cannot_decode(folder, what)))
}

/// Fails unless data of a codec ("gzip", "zlib", "bz2" or "zstd") decode to at most `limit` bytes: for libraries whose
/// decoders have no limit.
pub fn check_decoded_size(codec: &str, data: &[u8], limit: u64, path: &Path) -> Result<()> {
    guarded(path, || decoded_size(codec, data, limit).map(|_| ()).map_err(|e| cannot_decode(path, e)))
}

fn cannot_decode(path: &Path, why: Undecodable) -> Error {
    let mut error = Error::new(why.kind, format!("cannot decode this chunk: {}", why.text)).at(path);
    error.finding = why.finding;
    error
}

/// Runs codecs, which may panic on bytes from a file.
pub(crate) fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::new(Kind::Format, "cannot decode this: a codec gave up on these bytes (a panic)").at(path))
    })
}
