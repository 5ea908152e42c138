//! Chunks that are not plain bytes: decoded by the `zarrs` crate, one chunk at a time.
//!
//! zarrs reads what Zarr v2 and v3 may hold (blosc, zstd, gzip, zlib, bz2, crc32c, F order, sharding, strings). Three things
//! are seen to here. It works on rayon's pool, so it is only called inside [`pool::inside`]: our own pool is the one that
//! survives a fork. It holds ordinary locks, so a forked child opens its own array. And it is given files not to be
//! trusted, so a panic of a codec becomes an error.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use zarrs::array::{Array, ArrayBytes, ArrayShardedReadableExt, ArrayShardedReadableExtCache, CodecOptions};
use zarrs::filesystem::FilesystemStore;

use super::decoded::try_briefly;
use crate::error::{Error, Kind, Result};
use crate::par::pool;

/// Who decodes an array's chunks.
pub trait Decode: std::fmt::Debug + Send + Sync {
    /// A chunk's bytes in C order and native byte order, of which there must be `len`; `None` if there is no such chunk.
    /// `path` is for the error.
    fn chunk(&self, indices: &[u64], len: u64, path: &Path) -> Result<Option<Vec<u8>>>;
}

/// An array that zarrs reads.
#[derive(Debug)]
pub struct CodedArray {
    store: PathBuf,
    node: String,
    /// Chunks are those inside shards.
    inner: bool,
    live: Mutex<Option<(u32, Live)>>,
}

#[derive(Clone)]
struct Live(Arc<(Array<FilesystemStore>, ArrayShardedReadableExtCache)>);

impl std::fmt::Debug for Live {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Live")
    }
}

/// A whole array.
#[derive(Debug)]
pub enum Whole {
    /// Elements of one size, native byte order, C order.
    Fixed(Vec<u8>),
    /// Strings or byte strings.
    Variable(Vec<Vec<u8>>),
}

impl CodedArray {
    /// The array `node` (`"/arrays/activations"`) of the store in a folder; `inner` if chunks are those inside shards.
    pub fn new(store: PathBuf, node: String, inner: bool) -> CodedArray {
        CodedArray { store, node, inner, live: Mutex::new(None) }
    }

    fn live(&self) -> Result<Live> {
        let pid = std::process::id();
        let mut slot = try_briefly(&self.live);
        if let Some((owner, live)) = slot.as_deref().and_then(Option::as_ref)
            && *owner == pid
        {
            return Ok(live.clone());
        }
        let array = open(&self.store, &self.node)?;
        let cache = ArrayShardedReadableExtCache::new(&array);
        let live = Live(Arc::new((array, cache)));
        if let Some(slot) = slot.as_deref_mut() {
            // What a fork left behind is not dropped: that could need a lock whose holder does not exist here.
            std::mem::forget(slot.replace((pid, live.clone())));
        }
        Ok(live)
    }
}

impl Decode for CodedArray {
    fn chunk(&self, indices: &[u64], len: u64, path: &Path) -> Result<Option<Vec<u8>>> {
        let found = guarded(path, || {
            let live = self.live()?;
            let (array, cache) = &*live.0;
            let options = CodecOptions::default().with_concurrent_target(1);
            let bytes: Option<ArrayBytes<'static>> = if self.inner {
                array.retrieve_subchunk_opt(cache, indices, &options).map(Some)
            } else {
                array.retrieve_chunk_if_exists_opt(indices, &options)
            }
            .map_err(|e| cannot_decode(path, &e))?;
            bytes
                .map(|b| b.into_fixed().map(std::borrow::Cow::into_owned).map_err(|e| cannot_decode(path, &e)))
                .transpose()
        })?;
        found.map(|bytes| of_length(bytes, len, path)).transpose()
    }
}

/// What was decoded, if it is as long as it must be.
pub fn of_length(bytes: Vec<u8>, len: u64, path: &Path) -> Result<Vec<u8>> {
    if bytes.len() as u64 == len {
        return Ok(bytes);
    }
    Err(Error::new(Kind::Format, format!("expected a chunk of {len} bytes, decoded {}", bytes.len())).at(path))
}

/// Why zarrs cannot read an array, if it cannot.
pub fn problem(store: &Path, node: &str) -> Option<String> {
    guarded(store, || open(store, node)).err().map(|e| e.detail)
}

/// Reads a whole array of at most `most` elements: the small ones beside the activations.
pub fn read_whole(store: &Path, node: &str, most: u64) -> Result<Whole> {
    let path = store.join(node.trim_start_matches('/'));
    guarded(&path, || {
        let array = open(store, node)?;
        let elements = array.shape().iter().try_fold(1u64, |n, d| n.checked_mul(*d));
        let chunk = array.chunk_shape(&vec![0; array.shape().len()]).map_err(|e| cannot_decode(&path, &e))?;
        let chunk = chunk.iter().try_fold(1u64, |n, d| n.checked_mul(d.get()));
        if elements.is_none_or(|n| n > most) || chunk.is_none_or(|n| n > most.max(1 << 24)) {
            return Err(Error::new(Kind::Format, format!("shape {:?} is too large to read", array.shape())).at(&path));
        }
        let options = CodecOptions::default().with_concurrent_target(1);
        let bytes: ArrayBytes<'static> =
            array.retrieve_array_subset_opt(&array.subset_all(), &options).map_err(|e| cannot_decode(&path, &e))?;
        if matches!(bytes, ArrayBytes::Fixed(_)) {
            return bytes.into_fixed().map(|b| Whole::Fixed(b.into_owned())).map_err(|e| cannot_decode(&path, &e));
        }
        let (bytes, offsets) = bytes.into_variable().map_err(|e| cannot_decode(&path, &e))?.into_parts();
        Ok(Whole::Variable(offsets.windows(2).map(|w| bytes[w[0]..w[1]].to_vec()).collect()))
    })
}

fn open(store: &Path, node: &str) -> Result<Array<FilesystemStore>> {
    let files = FilesystemStore::new(store).map_err(|e| cannot_decode(store, &e))?;
    Array::open(Arc::new(files), node).map_err(|e| {
        Error::new(Kind::Unsupported, format!("zarrs cannot open this array: {e}"))
            .at(&store.join(node.trim_start_matches('/')))
    })
}

fn cannot_decode(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::new(Kind::Format, format!("zarrs cannot decode this: {error}")).at(path)
}

/// Runs what may panic on bytes from a file, on our own threads.
pub(crate) fn guarded<T: Send>(path: &Path, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    pool::inside(|| {
        catch_unwind(AssertUnwindSafe(work))
            .unwrap_or_else(|_| Err(Error::new(Kind::Format, "zarrs gave up on these bytes (a panic)").at(path)))
    })
}
