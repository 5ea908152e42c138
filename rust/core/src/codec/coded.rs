//! Chunks that are not plain bytes, decoded one at a time.
//!
//! Metadata are parsed by the `zarrs` crate; files are opened and bytes decompressed here, within the bounds that a chunk's
//! shape sets (see [`chain`](super::chain)). No lock is held and no other thread is needed, so that a child forked beside a
//! decoding thread decodes as its parent does. A panic of a codec becomes an error.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use zarrs::array::{Array, ArrayMetadata, ArrayMetadataV2, ArrayMetadataV3};
use zarrs::storage::store::MemoryStore;

use crate::codec::cache::{Cache, Cached};
pub use crate::codec::chain::Elements;
use crate::codec::chain::{Chain, Shard, Undecodable, assemble, decoded_size, reserve};
use crate::error::{Error, Kind, Result};
use crate::source::descriptors::open_regular;

/// Bytes of shard indexes that an array keeps.
const INDEX_MEMORY: u64 = 32 << 20;

/// The largest metadata file; Python's half has the same limit.
const MOST_METADATA: u64 = 256 << 20;

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
    array: Result<Parsed>,
    indexes: Cache<Index>,
}

#[derive(Debug)]
struct Parsed {
    folder: PathBuf,
    array: Array<MemoryStore>,
    chain: Chain,
    chunk: Vec<u64>,
}

/// A shard's index, and the file that it was read from.
#[derive(Debug)]
struct Index {
    stamp: Stamp,
    entries: Vec<(u64, u64)>,
}

impl Cached for Index {
    fn size(&self) -> usize {
        self.entries.len() * 16 + 64
    }
}

/// What changes when a file is replaced or written again: length, inode, time of the last change.
type Stamp = (u64, u64, i64, i64);

impl Parsed {
    fn new(folder: &Path, metadata: &[u8]) -> Result<Parsed> {
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
            Ok(Parsed { folder: folder.to_path_buf(), array, chain, chunk })
        })
    }

    fn path(&self, indices: &[u64]) -> PathBuf {
        self.folder.join(self.array.chunk_key(indices).as_str())
    }

    /// A whole chunk, or shard.
    fn chunk(&self, indices: &[u64]) -> Result<Option<Elements>> {
        let path = self.path(indices);
        let Some((mut file, len)) = open_chunk(&path)? else { return Ok(None) };
        let most = self.chain.most_encoded();
        if len > most {
            let what = format!("expected an encoded chunk of at most {most} bytes, found {len}");
            return Err(Error::new(Kind::Format, what).at(&path));
        }
        let mut encoded = reserve(len).map_err(|e| cannot_decode(&path, e))?;
        let found = (&mut file).take(len).read_to_end(&mut encoded).map_err(|e| Error::from_io(&e, &path, "read"))?;
        if found as u64 != len {
            let what = format!("expected {len} bytes, found {found}");
            return Err(Error::new(Kind::Truncated, what).at(&path).byte(found as u64));
        }
        guarded(&path, || self.chain.decode(encoded).map(Some).map_err(|e| cannot_decode(&path, e)))
    }

    /// A chunk inside a shard.
    fn inner(&self, shard: &Shard, indices: &[u64], indexes: &Cache<Index>) -> Result<Option<Elements>> {
        let outer: Vec<u64> = indices.iter().zip(&shard.counts).map(|(i, n)| i / n).collect();
        let path = self.path(&outer);
        let Some((file, len)) = open_chunk(&path)? else { return Ok(None) };
        let said = |e: Undecodable| cannot_decode(&path, e);
        let meta = file.metadata().map_err(|e| Error::from_io(&e, &path, "look at"))?;
        let stamp = (len, meta.ino(), meta.mtime(), meta.mtime_nsec());
        let grid = self.array.chunk_grid_shape();
        let number = outer.iter().zip(grid).fold(0u64, |n, (i, g)| n.wrapping_mul(*g).wrapping_add(*i));
        let index = match indexes.get(number).filter(|kept| kept.stamp == stamp) {
            Some(index) => index,
            None => {
                let (at, n) = shard.index_range(len).map_err(said)?;
                let encoded = read_at(&file, at, n, &path)?;
                let entries = guarded(&path, || shard.index(encoded).map_err(said))?;
                let index = Arc::new(Index { stamp, entries });
                indexes.remove(number);
                indexes.put(number, &index);
                index
            }
        };
        let entry = index.entries.get(shard.number(indices)).copied().unwrap_or((u64::MAX, u64::MAX));
        let Some((at, n)) = shard.place(entry, len).map_err(said)? else { return Ok(None) };
        let encoded = read_at(&file, at, n, &path)?;
        guarded(&path, || shard.inner.decode(encoded).map(Some).map_err(|e| cannot_decode(&path, e)))
            .map_err(|e| e.byte(at))
    }
}

impl CodedArray {
    /// The array `node` (`"/arrays/activations"`) of a Zarr version 3 store in a folder; `inner` if chunks are those inside
    /// shards.
    pub fn new(store: PathBuf, node: String, inner: bool) -> CodedArray {
        let folder = store.join(node.trim_start_matches('/'));
        let path = folder.join("zarr.json");
        let array = open_regular(&path).and_then(|(file, len)| {
            if len > MOST_METADATA {
                return Err(Error::new(Kind::Format, format!("expected metadata, found {len} bytes")).at(&path));
            }
            let mut text = vec![];
            file.take(MOST_METADATA).read_to_end(&mut text).map_err(|e| Error::from_io(&e, &path, "read"))?;
            Parsed::new(&folder, &text)
        });
        CodedArray { inner, array, indexes: Cache::new(INDEX_MEMORY) }
    }

    /// The array whose chunks are in a folder, of metadata that were read already.
    pub fn of(folder: &Path, metadata: &[u8], inner: bool) -> CodedArray {
        CodedArray { inner, array: Parsed::new(folder, metadata), indexes: Cache::new(INDEX_MEMORY) }
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

    fn parsed(&self) -> Result<&Parsed> {
        self.array.as_ref().map_err(Clone::clone)
    }
}

impl Decode for CodedArray {
    fn chunk(&self, indices: &[u64], len: u64, path: &Path) -> Result<Option<Vec<u8>>> {
        let parsed = self.parsed()?;
        let found = match parsed.chain.shard() {
            Some(shard) if self.inner => parsed.inner(shard, indices, &self.indexes)?,
            _ => parsed.chunk(indices)?,
        };
        match found {
            None => Ok(None),
            Some(Elements::Fixed(bytes)) => of_length(bytes, len, path).map(Some),
            Some(Elements::Variable(_)) => Err(cannot_decode(path, "expected numbers, found strings".into())),
        }
    }
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
    Parsed::new(folder, metadata).err().map(|e| e.detail)
}

/// Reads a whole array of at most `most` bytes, or elements of variable size: the small ones beside the activations. Only the
/// chunks whose indices are listed are looked for; the others are not there, and hold the fill value.
pub fn read_whole(folder: &Path, metadata: &[u8], there: Vec<Vec<u64>>, most: u64) -> Result<Elements> {
    let parsed = Parsed::new(folder, metadata)?;
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
            Undecodable::default()
        })
    });
    made.map_err(|what| failed.unwrap_or_else(|| cannot_decode(folder, what)))
}

/// Fails unless data of a codec ("gzip", "zlib", "bz2" or "zstd") decode to at most `limit` bytes: for libraries whose
/// decoders have no limit.
pub fn check_decoded_size(codec: &str, data: &[u8], limit: u64, path: &Path) -> Result<()> {
    guarded(path, || decoded_size(codec, data, limit).map(|_| ()).map_err(|e| cannot_decode(path, e)))
}

/// A chunk's file, and its length; `None` if there is none.
fn open_chunk(path: &Path) -> Result<Option<(File, u64)>> {
    match open_regular(path) {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn read_at(file: &File, at: u64, n: u64, path: &Path) -> Result<Vec<u8>> {
    let mut bytes = reserve(n).map_err(|e| cannot_decode(path, e))?;
    bytes.resize(n as usize, 0);
    file.read_exact_at(&mut bytes, at).map_err(|e| Error::from_io(&e, path, "read"))?;
    Ok(bytes)
}

fn cannot_decode(path: &Path, why: Undecodable) -> Error {
    let mut error = Error::new(Kind::Format, format!("cannot decode this chunk: {}", why.text)).at(path);
    error.finding = why.finding;
    error
}

/// Runs codecs, which may panic on bytes from a file.
pub(crate) fn guarded<T>(path: &Path, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::new(Kind::Format, "cannot decode this: a codec gave up on these bytes (a panic)").at(path))
    })
}
