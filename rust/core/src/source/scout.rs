//! Runs ahead of a copy from mapped sources, and hints cold pages to the kernel.

use std::time::Duration;

use super::queue::{AHEAD, AHEAD_BYTES, Ranged};
use super::{ByteRange, Ready, Source};

/// Ranges per step, and the number of them that are sampled.
pub const BLOCK: usize = 64;
const SAMPLES: usize = 2;
/// Ranges of this size are all checked: 0.3 us each is negligible compared with the copy.
const LARGE: usize = 64 << 10;

/// The scout of one copy.
pub struct Scout<'a, T> {
    /// `None` for bytes that need no fetching.
    sources: &'a [Option<&'a dyn Source>],
    ranges: &'a [T],
    /// Ranges checked so far, and their bytes not yet copied.
    seen: usize,
    ahead_bytes: usize,
    /// Set if a copy was slow although nothing seemed cold: the file system cannot tell, so hint everything.
    blind: bool,
}

impl<'a, T: Ranged> Scout<'a, T> {
    /// A scout of these ranges, in copy order.
    pub fn new(sources: &'a [Option<&'a dyn Source>], ranges: &'a [T]) -> Scout<'a, T> {
        Scout { sources, ranges, seen: 0, ahead_bytes: 0, blind: false }
    }

    /// Checks and hints ranges after the first `copied`.
    pub fn run_ahead_of(&mut self, copied: usize) {
        // At least the next block, whatever its size.
        let wanted =
            |scout: &Self| scout.seen <= copied || (scout.seen < copied + AHEAD && scout.ahead_bytes < AHEAD_BYTES);
        while self.seen < self.ranges.len() && wanted(self) {
            let end = (self.seen + BLOCK).min(self.ranges.len());
            let block = &self.ranges[self.seen..end];
            let bytes = bytes_of(block);
            // Small ranges are sampled.
            let large = bytes / block.len() >= LARGE;
            let cold =
                self.blind || (!large && block.iter().step_by(block.len().div_ceil(SAMPLES)).any(|r| self.is_cold(r)));
            for each in block {
                if (cold || (large && self.is_cold(each)))
                    && let Some(source) = self.sources[each.source()]
                {
                    source.will_need(&[each.range()]);
                }
            }
            self.ahead_bytes += bytes;
            self.seen = end;
        }
    }

    fn is_cold(&self, each: &T) -> bool {
        let Some(source) = self.sources[each.source()] else { return false };
        let ByteRange { at, len } = each.range();
        source.is_ready(at) == Ready::No || (len > LARGE as u64 && source.is_ready(at + len - 1) == Ready::No)
    }

    /// Records the time that a block took to copy.
    pub fn block_took(&mut self, took: Duration, block: &[T]) {
        // A cached block is copied at gigabytes per second; page faults that wait for a disk or a network take far more than
        // 8 us per range plus 4 ns per byte.
        let bytes = bytes_of(block);
        self.ahead_bytes = self.ahead_bytes.saturating_sub(bytes);
        self.blind = took > Duration::from_nanos((8_000 * block.len() + 4 * bytes) as u64);
    }
}

fn bytes_of<T: Ranged>(ranges: &[T]) -> usize {
    ranges.iter().map(|r| r.range().len as usize).sum()
}
