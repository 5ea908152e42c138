//! Mapped files: the only module that maps. (The other `unsafe` of this crate calls C libraries: `inflate`, `lz4`.)
//!
//! The limits of what mapping can promise. A Rust slice over mapped bytes assumes that no process changes or truncates the
//! file while the slice lives, and no program can force others to keep that promise. Files are opened read-only, and their
//! length is compared with the mapped length before each gather (`Source::unchanged`), so that a shard
//! truncated *before* a read is an error and not a SIGBUS. Rows are copied out as plain numbers: a concurrent overwrite gives
//! mixed values. Pickles, gzip members and compressed blocks are parsed in the mapping: their parsers are written for
//! hostile input, check every offset against the slice's length and rely on no byte being the same when read twice; libdeflate
//! and LZ4 (C) promise the same of their input. `io="pread"` never maps, and is safe against truncation *during* a read.
//!
//! The mapping is advised RANDOM: the default readahead (128 KiB to 8 MiB per fault) would read a hundred times what a
//! cold random row needs. What will be needed is hinted row by row instead ([`Map::will_need`]).
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::sync::Arc;

use memmap2::{Advice, Mmap, MmapOptions};

/// A whole file, mapped read-only. Clones share the mapping, which needs no descriptor once it is made.
#[derive(Clone, Debug)]
pub struct Map {
    inner: Arc<Mmap>,
}

impl Map {
    /// Maps the first `len` bytes of `file`; `len` is not zero.
    pub fn open(file: &File, len: usize) -> io::Result<Map> {
        // SAFETY: `file` is open for reading, and each caller (`Positioned::mapping`, `Shards::stored`) took
        // `len` from it or compared it with its length just before, so every page is backed. Truncation and overwriting by
        // others remain possible; the module header says what limits them.
        let inner = unsafe { MmapOptions::new().len(len).map(file)? };
        // Advice only: a kernel that refuses it still reads correctly.
        let _ = inner.advise(Advice::Random);
        Ok(Map { inner: Arc::new(inner) })
    }

    /// The mapped bytes.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        &self.inner
    }

    /// Starts reading a range into the page cache without waiting for it. A hint: out-of-range or refused hints do
    /// nothing.
    pub fn will_need(&self, offset: usize, len: usize) {
        if offset.checked_add(len).is_some_and(|end| end <= self.inner.len()) {
            let _ = self.inner.advise_range(Advice::WillNeed, offset, len);
        }
    }

    /// [`prefetch`] from `offset` on.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        prefetch(self.inner.get(offset..).unwrap_or_default());
    }
}

/// Asks the processor for the first cache lines: a random row's page walk and first misses then overlap with the copy of the
/// row before it (measured: 12.7 against 11.0 GB/s for 3 KiB rows on two cores).
#[inline]
pub fn prefetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        const LINES: usize = 6;
        for line in bytes.chunks_exact(64).take(LINES) {
            // SAFETY: the pointer comes from a live slice; prefetching never faults.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = bytes;
}
