//! The units of a cache, by key, on shelves that are locked one by one.

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;

use crate::threads::SharedLock;
use crate::threads::sync::{RwLockReadGuard, RwLockWriteGuard};

/// A power of two. With many shelves, a change rarely blocks a lookup.
const SHELVES: usize = if cfg!(actshard_loom) { 1 } else { 16 };

/// Units by key. Any number of threads can look them up at once; one at a time changes them.
#[derive(Debug)]
pub(super) struct Shelves<T, K>(Box<[LockedShelf<T, K>]>);

type LockedShelf<T, K> = CachePadded<SharedLock<Shelf<T, K>>>;

pub(super) type Shelf<T, K> = HashMap<K, CachedUnit<T>>;

/// A cached unit.
#[derive(Debug)]
pub(super) struct CachedUnit<T> {
    pub(super) unit: Arc<T>,
    /// The number of its last use.
    pub(super) used_at: AtomicU64,
    /// Its number in the list ordered by age; at most the number of its last use.
    pub(super) listed: u64,
}

impl<T> CachedUnit<T> {
    pub(super) fn new(unit: Arc<T>, now: u64) -> CachedUnit<T> {
        CachedUnit { unit, used_at: AtomicU64::new(now), listed: now }
    }

    pub(super) fn last_use(&self) -> u64 {
        self.used_at.load(Ordering::Relaxed)
    }
}

impl<T, K: Eq + Hash> Shelves<T, K> {
    pub(super) fn new() -> Shelves<T, K> {
        Shelves((0..SHELVES).map(|_| CachePadded::new(SharedLock::new(HashMap::new()))).collect())
    }

    /// The key's shelf, for looking up; `None` if it cannot be locked. Calls `waits` if it is not free at once.
    pub(super) fn read(&self, key: &K, waits: impl FnOnce()) -> Option<RwLockReadGuard<'_, Shelf<T, K>>> {
        self.0[number(key)].read_briefly(waits)
    }

    /// The key's shelf, for changing; `None` if it cannot be locked.
    pub(super) fn write(&self, key: &K) -> Option<RwLockWriteGuard<'_, Shelf<T, K>>> {
        self.0[number(key)].write_briefly()
    }

    /// Simulates a child forked while another thread changed the shelves.
    #[cfg(test)]
    pub(super) fn lose(&self) {
        self.0.iter().for_each(|shelf| std::mem::forget(shelf.write_briefly()));
    }
}

/// The number of a key's shelf.
fn number<K: Hash>(key: &K) -> usize {
    let mut mixed = Mixed(0);
    key.hash(&mut mixed);
    (mixed.finish() >> 32) as usize % SHELVES
}

/// Mixes a key's numbers. The map's own hash would cost as much as the lookup.
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, number: u64) {
        // 2^64 / golden ratio: Fibonacci hashing, Knuth, The Art of Computer Programming 3, 6.4.
        self.0 = (self.0.rotate_left(5) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }

    fn write_usize(&mut self, number: usize) {
        self.write_u64(number as u64);
    }
}
