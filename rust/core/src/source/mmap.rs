//! Memory-mapped files; only this module maps. (The other `unsafe` of this crate: vector
//! code in `kernels`, and calls of C libraries in `inflate` and `lz4`.)
//!
//! The limits of mapping: a Rust slice over mapped bytes assumes that no process changes or truncates the file while the slice
//! lives, and no program can enforce that on others. Files are opened read-only, and their length is compared with the mapped
//! length before each gather (`Source::unchanged`), so that a shard truncated *before* a read is an error and not a SIGBUS.
//! Rows are copied as plain numbers: a concurrent overwrite gives mixed values. Pickles, gzip members and compressed blocks
//! are parsed in the mapping. Their parsers accept hostile input, check every offset against the slice's length, and do not
//! assume that two reads of a byte are equal; libdeflate and LZ4 (C) guarantee the same for their input. `io="pread"` never
//! maps, and is safe against truncation *during* a read.
//!
//! The mapping is advised RANDOM: the default readahead (128 KiB to 8 MiB per fault) would read a hundred times more
//! than a cold random row needs. Needed rows are hinted one by one instead ([`Map::will_need`]). A view of a whole
//! layer, which is read from beginning to end, has a separate mapping with the kernel's readahead ([`Paging::Ahead`]).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::{Arc, Weak};

use memmap2::{Advice, Mmap, MmapOptions};

use crate::kernels::prefetch;
use crate::threads::ForkSafe;

/// How the pages of a mapping are read from the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Paging {
    /// Only touched and hinted pages: for rows in any order.
    Hinted,
    /// With the kernel's readahead: for a range that is read from its beginning to its end.
    Ahead,
}

/// A whole file, mapped read-only. Clones share the mapping, which keeps no descriptor.
#[derive(Clone, Debug)]
pub struct Map {
    inner: Arc<Mmap>,
}

impl Map {
    /// Maps the first `len` bytes of `file`; `len` is not zero.
    pub fn open(file: &File, len: usize, paging: Paging) -> io::Result<Map> {
        // SAFETY: `file` is open for reading, and each caller (`Positioned::mapping`, `Shards::stored`) took `len` from it or
        // compared it with its length just before, so every page is backed. Others can still truncate or overwrite the file;
        // the module header describes the consequences.
        let inner = unsafe { MmapOptions::new().len(len).map(file)? };
        if paging == Paging::Hinted {
            // Only advice: if the kernel rejects it, reads are still correct.
            let _ = inner.advise(Advice::Random);
        }
        Ok(Map { inner: Arc::new(inner) })
    }

    /// The mapped bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.inner
    }

    /// Starts reading a range into the page cache without waiting for it. A hint: does nothing if it is out of range or
    /// rejected.
    pub fn will_need(&self, offset: usize, len: usize) {
        if offset.checked_add(len).is_some_and(|end| end <= self.inner.len()) {
            let _ = self.inner.advise_range(Advice::WillNeed, offset, len);
        }
    }

    /// [`prefetch`] from `offset`.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        prefetch(self.inner.get(offset..).unwrap_or_default());
    }
}

/// The last mapping of a file, shared while it is in use: the kernel limits the number of mappings, not of views.
#[derive(Debug, Default)]
pub struct LastMap {
    /// Only tried: where it is locked, the file is mapped once more.
    last: ForkSafe<Weak<Mmap>>,
}

impl LastMap {
    /// The last mapping if it is still in use, or the one that `open` makes.
    pub fn get_or_open<E>(&self, open: impl FnOnce() -> Result<Map, E>) -> Result<Map, E> {
        let mut last = self.last.try_lock();
        if let Some(inner) = last.as_ref().and_then(|last| last.upgrade()) {
            return Ok(Map { inner });
        }
        let map = open()?;
        if let Some(last) = &mut last {
            **last = Arc::downgrade(&map.inner);
        }
        Ok(map)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_is_shared_while_it_is_held_and_no_longer() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [7; 9]).unwrap();
        let file = File::open(&path).unwrap();
        let (maps, mut opened) = (LastMap::default(), 0);
        let mut get = || {
            maps.get_or_open(|| {
                opened += 1;
                Map::open(&file, 9, Paging::Hinted)
            })
            .unwrap()
        };
        let held = [get(), get(), get()];
        assert!(held.iter().all(|map| std::ptr::eq(map.bytes(), held[0].bytes())));
        drop(held);
        assert_eq!(get().bytes(), [7; 9]);
        assert_eq!(opened, 2);
    }

    /// As in a child that was forked while another thread mapped.
    #[test]
    fn a_held_lock_is_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [7; 9]).unwrap();
        let file = File::open(&path).unwrap();
        let maps = LastMap::default();
        let first = maps.get_or_open(|| Map::open(&file, 9, Paging::Hinted)).unwrap();
        let _held = maps.last.try_lock().unwrap();
        let second = maps.get_or_open(|| Map::open(&file, 9, Paging::Hinted)).unwrap();
        assert!(!std::ptr::eq(first.bytes(), second.bytes()));
        assert_eq!(first.bytes(), second.bytes());
    }
}
