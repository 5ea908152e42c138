//! Memory of the accesses of a mapped file: how often each window was accessed, the cost of first accesses, and whether cold
//! pages were found.
//!
//! The first access to a window of a mapping is a page fault. Its cost depends on the page cache: 4 us per row where
//! pages were cached one by one, 1 us where the kernel keeps them in large folios; a `pread` of a row takes 2 us
//! (16,384 random rows of 3 KiB on two cores: 27, 9 and 14 ms). Both ways are therefore timed for a few blocks of each
//! file, and the faster one is used. A window that is read is mapped after the third time: a fault costs about as much
//! as the extra cost of three reads over copies, so accesses cost at most twice the best choice in hindsight.
//!
//! The state is atomic and without locks: a forked child continues with its copy. A wrong value costs time only.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

/// Bytes that the kernel maps at one fault if they are cached (`fault_around_bytes`).
const WINDOW: u64 = 64 << 10;
/// Accesses of a window until it counts as warm; all bits of a count.
const OFTEN: u64 = 3;
/// Blocks of which the first [`TIMED`] are timed, alternately through the mapping and read.
const ROUND: u32 = 64;
const TIMED: u32 = 4;
/// Blocks of ranges that are hinted without a sample after a cold sample.
const WARY: u32 = 64;

/// A way to access cached bytes for the first time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Through the mapping.
    Fault,
    /// By a read.
    Read,
}

/// The memory of one file's accesses.
#[derive(Debug)]
pub struct Warmth {
    /// Two bits per window: the number of its accesses, at most 3.
    windows: Box<[AtomicU64]>,
    /// Whether the file can be read without waiting.
    reads: AtomicBool,
    /// Blocks of first accesses.
    blocks: AtomicU32,
    /// Time of first accesses through the mapping, and of reads, in ns per KiB; 0 is unknown.
    fault: AtomicU32,
    read: AtomicU32,
    /// Blocks left to hint.
    wary: AtomicU32,
}

impl Warmth {
    /// The memory of a file of `len` bytes.
    pub fn new(len: u64) -> Warmth {
        let words = usize::try_from(len.div_ceil(WINDOW).div_ceil(32)).unwrap_or(usize::MAX);
        let windows = (0..words).map(|_| AtomicU64::new(0)).collect();
        Warmth {
            windows,
            reads: AtomicBool::new(true),
            blocks: AtomicU32::new(0),
            fault: AtomicU32::new(0),
            read: AtomicU32::new(0),
            wary: AtomicU32::new(0),
        }
    }

    /// Whether `len` bytes from `at` should be copied from the mapping without further checks: all their windows have
    /// been accessed often. Otherwise records this access. Always true outside the file, and for a file that is never
    /// read.
    #[inline]
    pub fn is_warm(&self, at: u64, len: u64) -> bool {
        let (first, last) = (at / WINDOW, at.saturating_add(len.saturating_sub(1)) / WINDOW);
        let mut warm = true;
        for window in first..=last {
            let Some(word) = self.windows.get((window / 32) as usize) else { break };
            let shift = window % 32 * 2;
            // A cache line that is only read stays shared between processors.
            let counts = word.load(Ordering::Relaxed);
            if counts >> shift & OFTEN < OFTEN {
                // If another thread is faster, this access is not counted.
                let _ = word.compare_exchange(counts, counts + (1 << shift), Ordering::Relaxed, Ordering::Relaxed);
                warm = false;
            }
        }
        warm || !self.reads.load(Ordering::Relaxed)
    }

    /// The way to access ranges of windows that are not warm.
    pub fn faster(&self) -> Way {
        let (fault, read) = (self.fault.load(Ordering::Relaxed), self.read.load(Ordering::Relaxed));
        // A fault makes later accesses cheap, and the first ones also allocate page tables.
        if fault != 0 && read != 0 && fault <= read.saturating_mul(2) { Way::Fault } else { Way::Read }
    }

    /// The way to access the next block of such ranges, and whether to time it.
    pub fn next_way(&self) -> (Way, bool) {
        match self.blocks.fetch_add(1, Ordering::Relaxed) % ROUND {
            n if n >= TIMED => (self.faster(), false),
            n if n % 2 == 0 => (Way::Read, true),
            _ => (Way::Fault, true),
        }
    }

    /// Records the time of a block.
    pub fn took(&self, way: Way, took: Duration, ranges: usize, bytes: usize) {
        if is_slow(took, ranges, bytes) || bytes == 0 {
            return;
        }
        let known = if way == Way::Fault { &self.fault } else { &self.read };
        let now = u32::try_from(took.as_nanos() * 1024 / bytes as u128).unwrap_or(u32::MAX).max(1);
        let before = known.load(Ordering::Relaxed);
        known.store(if before == 0 { now } else { before / 2 + now / 2 }.max(1), Ordering::Relaxed);
    }

    /// From now on the file is only accessed through its mapping: its file system has no reads that do not wait.
    pub fn never_read(&self) {
        self.reads.store(false, Ordering::Relaxed);
    }

    /// Records that a cold page was found: it is likely that others are cold too, and that a sample misses them.
    pub fn found_cold(&self) {
        if self.wary.load(Ordering::Relaxed) != WARY {
            self.wary.store(WARY, Ordering::Relaxed);
        }
    }

    /// Whether to hint the next block without a sample.
    pub fn is_wary(&self) -> bool {
        let left = self.wary.load(Ordering::Relaxed);
        if left > 0 {
            // A lost update of another thread changes only the number of hints.
            self.wary.store(left - 1, Ordering::Relaxed);
        }
        left > 0
    }
}

/// Whether a copy waited for a disk or a network: cached ranges are copied at gigabytes per second.
pub fn is_slow(took: Duration, ranges: usize, bytes: usize) -> bool {
    took > Duration::from_nanos((8_000 * ranges + 4 * bytes) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_warm_when_all_its_windows_were_accessed_often() {
        let warmth = Warmth::new(100 * WINDOW + 1);
        let reads = |at, len| (0..10).take_while(|_| !warmth.is_warm(at, len)).count();
        assert_eq!(reads(10, 20), 3);
        assert_eq!(reads(WINDOW - 1, 1), 0);
        assert_eq!(reads(WINDOW - 1, 2), 3);
        assert_eq!(reads(0, 2 * WINDOW), 0);
        assert_eq!(reads(60 * WINDOW, 40 * WINDOW), 3);
        assert_eq!(reads(59 * WINDOW, 40 * WINDOW), 3);
        assert_eq!(reads(58 * WINDOW, WINDOW), 3);
        assert_eq!(reads(59 * WINDOW, 41 * WINDOW), 0);
        assert_eq!(reads(100 * WINDOW, 1), 3);
    }

    #[test]
    fn ranges_outside_the_file_and_empty_ones_do_no_harm() {
        let warmth = Warmth::new(0);
        assert!(warmth.is_warm(0, 0));
        assert!(warmth.is_warm(u64::MAX, u64::MAX));
        let warmth = Warmth::new(64 * WINDOW);
        assert!(warmth.is_warm(64 * WINDOW, 1));
        assert!(warmth.is_warm(u64::MAX - 5, 1 << 40));
    }

    #[test]
    fn a_file_that_cannot_be_asked_is_never_read() {
        let warmth = Warmth::new(WINDOW);
        assert!(!warmth.is_warm(0, 1));
        warmth.never_read();
        assert!(warmth.is_warm(0, 1));
    }

    #[test]
    fn the_faster_way_is_used_and_both_are_timed_again() {
        let warmth = Warmth::new(WINDOW);
        let mut timed = [0, 0];
        for (fault, read, faster) in [(190, 100, Way::Fault), (900, 100, Way::Read), (50, 100, Way::Fault)] {
            for _ in 0..8 * ROUND {
                let (way, time) = warmth.next_way();
                if time {
                    timed[usize::from(way == Way::Fault)] += 1;
                    let us = if way == Way::Fault { fault } else { read };
                    warmth.took(way, Duration::from_micros(us), 64, 1 << 20);
                }
            }
            assert_eq!(warmth.faster(), faster);
            assert_eq!(warmth.next_way().0, Way::Read);
            assert_eq!((1..ROUND).filter(|_| !warmth.next_way().1).count(), (ROUND - TIMED) as usize);
        }
        assert_eq!(timed, [48, 48]);
    }

    #[test]
    fn a_block_that_waited_for_the_disk_is_not_compared() {
        let warmth = Warmth::new(WINDOW);
        warmth.took(Way::Read, Duration::from_micros(100), 64, 1 << 20);
        warmth.took(Way::Fault, Duration::from_millis(100), 64, 1 << 20);
        warmth.took(Way::Fault, Duration::ZERO, 0, 0);
        assert_eq!(warmth.faster(), Way::Read);
        warmth.took(Way::Fault, Duration::from_micros(50), 64, 1 << 20);
        assert_eq!(warmth.faster(), Way::Fault);
    }

    #[test]
    fn a_cold_page_makes_wary_for_a_while() {
        let warmth = Warmth::new(1);
        assert!(!warmth.is_wary());
        warmth.found_cold();
        assert_eq!((0..WARY * 2).filter(|_| warmth.is_wary()).count(), WARY as usize);
    }
}
