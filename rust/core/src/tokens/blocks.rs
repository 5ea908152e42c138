//! Decoded blocks of many arrays, kept within one memory budget and decoded by one thread at a time.
//!
//! A key names a block completely: the array, the file, the state of that file when it was opened, the inner chunk and the block
//! within it. No number in it is computed from a frame's header, so frames with different block sizes cannot share a key, and a
//! file that was replaced cannot be answered from blocks of the old one.

use std::collections::HashSet;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::frame::Planes;
use crate::codec::cache::Cache;
use crate::threads::fork::try_briefly;

/// Which state of a file was opened: another file at the same path, or the same file written again, differs in one of these.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Stamp {
    device: u64,
    inode: u64,
    changed: (i64, i64),
    len: u64,
}

impl Stamp {
    /// Of an open file.
    pub fn of(meta: &Metadata) -> Stamp {
        Stamp { device: meta.dev(), inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()), len: meta.len() }
    }
}

/// A block: its array (numbered over the whole process), file, inner chunk and place in the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    /// Number of the array; see [`new_array`].
    pub array: u64,
    /// Number of the file in the array.
    pub file: u64,
    /// The file's state.
    pub stamp: Stamp,
    /// The inner chunk in the file.
    pub chunk: usize,
    /// The block in the chunk's frame; 0 for chunks that are decoded as a whole.
    pub block: usize,
}

/// A number that no other array of this process has.
pub fn new_array() -> u64 {
    static ARRAYS: AtomicU64 = AtomicU64::new(0);
    ARRAYS.fetch_add(1, Ordering::Relaxed)
}

/// Decoded blocks of many arrays, within one budget.
#[derive(Debug)]
pub struct BlockCache {
    blocks: Cache<Planes, Key>,
    /// Blocks that are being decoded now, and the process that decodes them: a forked child inherits the set, not the threads.
    decoding: Mutex<(u32, HashSet<Key>)>,
    done: Condvar,
    decoded: AtomicU64,
}

/// How often, and how long each time, a thread waits for another one that decodes the same block. One takes milliseconds; after
/// a second the waiting thread decodes by itself.
const WAITS: u32 = 50;
const WAIT: Duration = Duration::from_millis(20);

/// The right to decode a block; others wait until it is dropped.
#[derive(Debug)]
pub struct Turn<'a> {
    cache: &'a BlockCache,
    key: Option<Key>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.cache.decoding.lock().unwrap_or_else(PoisonError::into_inner).1.remove(&key);
            self.cache.done.notify_all();
        }
    }
}

impl BlockCache {
    /// Keeps at most `budget` bytes.
    pub fn new(budget: u64) -> BlockCache {
        BlockCache {
            blocks: Cache::new(budget),
            decoding: Mutex::new((std::process::id(), HashSet::new())),
            done: Condvar::new(),
            decoded: AtomicU64::new(0),
        }
    }

    /// Bytes kept now.
    pub fn used(&self) -> u64 {
        self.blocks.used()
    }

    /// Blocks decoded so far.
    pub fn decoded(&self) -> u64 {
        self.decoded.load(Ordering::Relaxed)
    }

    /// A block, if it is kept.
    pub(super) fn get(&self, key: Key) -> Option<Arc<Planes>> {
        self.blocks.get(key)
    }

    /// Keeps a block that was decoded, in place of a shorter beginning of the same block. Where another thread was first,
    /// returns what that one keeps, if it is as long.
    pub(super) fn put(&self, key: Key, planes: Planes) -> Arc<Planes> {
        self.decoded.fetch_add(1, Ordering::Relaxed);
        if let Some(kept) = self.blocks.get(key) {
            if kept.numbers() >= planes.numbers() {
                return kept;
            }
            self.blocks.remove(key);
        }
        let planes = Arc::new(planes);
        self.blocks.put(key, &planes);
        planes
    }

    /// Waits while another thread decodes this block, then takes the turn; the caller looks for the block once more.
    ///
    /// Only for decoding on the calling thread: a turn held by a thread that waits for the pool could be waited for by the pool.
    pub(super) fn turn(&self, key: Key) -> Turn<'_> {
        let none = Turn { cache: self, key: None };
        let Some(mut decoding) = try_briefly(&self.decoding) else { return none };
        let pid = std::process::id();
        if decoding.0 != pid {
            *decoding = (pid, HashSet::new());
        }
        for _ in 0..WAITS {
            if decoding.1.insert(key) {
                return Turn { cache: self, key: Some(key) };
            }
            decoding = self.done.wait_timeout(decoding, WAIT).unwrap_or_else(PoisonError::into_inner).0;
        }
        none
    }
}
