//! Runs ahead of a copy from mapped sources, and hints cold pages to the kernel.

use std::time::Duration;

use super::queue::{AHEAD, AHEAD_BYTES, Hints, Ranged};
use super::warmth::is_slow;
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
    /// Set if a copy was slow although no page seemed cold: the file system does not report cold pages, so hint
    /// everything.
    blind: bool,
}

impl<'a, T: Ranged> Scout<'a, T> {
    /// A scout of these ranges, in copy order.
    pub fn new(sources: &'a [Option<&'a dyn Source>], ranges: &'a [T]) -> Scout<'a, T> {
        Scout { sources, ranges, seen: 0, ahead_bytes: 0, blind: false }
    }

    /// Checks and hints ranges after the first `copied`.
    pub fn run_ahead_of(&mut self, copied: usize) {
        // At least the next block, of any size.
        let wanted =
            |scout: &Self| scout.seen <= copied || (scout.seen < copied + AHEAD && scout.ahead_bytes < AHEAD_BYTES);
        while self.seen < self.ranges.len() && wanted(self) {
            let end = (self.seen + BLOCK).min(self.ranges.len());
            let block = &self.ranges[self.seen..end];
            let bytes = bytes_of(block);
            // Small ranges are sampled.
            let large = bytes / block.len() >= LARGE;
            let cold = self.blind || (!large && self.is_doubtful(block));
            let mut hints = Hints::new(self.sources);
            for each in block {
                if cold || (large && self.is_cold(each)) {
                    hints.add(each);
                }
            }
            hints.flush();
            self.ahead_bytes += bytes;
            self.seen = end;
        }
    }

    /// Whether a block of small ranges may contain cold ones: a sample is cold, or one was a few blocks ago. Sampled ranges of a
    /// file that is 90 % cached are all cached in 4 of 5 blocks, and a hint of a cached range costs less than a sample.
    fn is_doubtful(&self, block: &[T]) -> bool {
        let warmth = block.first().and_then(|r| self.sources[r.source()]?.warmth());
        let cold = block.iter().step_by(block.len().div_ceil(SAMPLES)).any(|r| self.is_cold(r));
        match warmth {
            Some(warmth) if cold => {
                warmth.found_cold();
                true
            }
            Some(warmth) => warmth.is_wary(),
            None => cold,
        }
    }

    fn is_cold(&self, each: &T) -> bool {
        let Some(source) = self.sources[each.source()] else { return false };
        let ByteRange { at, len } = each.range();
        source.is_ready(at) == Ready::No || (len > LARGE as u64 && source.is_ready(at + len - 1) == Ready::No)
    }

    /// Records the time that a block took to copy.
    pub fn block_took(&mut self, took: Duration, block: &[T]) {
        let bytes = bytes_of(block);
        self.ahead_bytes = self.ahead_bytes.saturating_sub(bytes);
        self.blind = is_slow(took, block.len(), bytes);
    }
}

fn bytes_of<T: Ranged>(ranges: &[T]) -> usize {
    ranges.iter().map(|r| r.range().len as usize).sum()
}

#[cfg(test)]
mod tests {
    use super::super::warmth::Warmth;
    use super::super::{RangeRead, Version};
    use super::*;
    use crate::error::Result;
    use crate::location::Location;
    use crate::threads::Lock;
    use crate::threads::Stop;

    /// A mapped file with cold bytes in one range.
    #[derive(Debug)]
    struct Partly {
        location: Location,
        cold: std::ops::Range<u64>,
        warmth: Warmth,
        hinted: Lock<Vec<ByteRange>>,
    }

    impl Source for Partly {
        fn location(&self) -> &Location {
            &self.location
        }

        fn size(&self) -> u64 {
            1 << 30
        }

        fn version(&self) -> Option<Version> {
            None
        }

        fn warmth(&self) -> Option<&Warmth> {
            Some(&self.warmth)
        }

        fn read_many(&self, _: &mut [RangeRead<'_>], _: &Stop) -> Result<()> {
            Ok(())
        }

        fn is_ready(&self, at: u64) -> Ready {
            if self.cold.contains(&at) { Ready::No } else { Ready::Yes }
        }

        fn will_need(&self, ranges: &[ByteRange]) {
            self.hinted.lock().extend_from_slice(ranges);
        }

        fn unchanged(&self) -> Result<()> {
            Ok(())
        }
    }

    struct Row(u64);

    impl Ranged for Row {
        fn source(&self) -> usize {
            0
        }

        fn range(&self) -> ByteRange {
            ByteRange { at: self.0 * 100, len: 100 }
        }
    }

    /// Rows that a scout hints, which runs ahead of a copy of `rows` rows, and its hints.
    fn hints(cold: std::ops::Range<u64>, rows: u64) -> (usize, usize) {
        let (location, hinted) = (Location::object("store", "a"), Lock::new(vec![]));
        let source = Partly { location, cold, warmth: Warmth::new(1 << 20), hinted };
        let sources: [Option<&dyn Source>; 1] = [Some(&source)];
        let ranges: Vec<Row> = (0..rows).map(Row).collect();
        let mut scout = Scout::new(&sources, &ranges);
        for copied in (0..ranges.len()).step_by(BLOCK) {
            scout.run_ahead_of(copied);
        }
        let hinted = source.hinted.into_inner();
        (hinted.iter().map(|range| range.len as usize / 100).sum(), hinted.len())
    }

    #[test]
    fn cached_rows_are_not_hinted_and_cold_ones_are() {
        assert_eq!(hints(0..0, 1000), (0, 0));
        assert_eq!(hints(0..u64::MAX, 1000), (1000, 1000usize.div_ceil(BLOCK)), "neighbours are one hint");
    }

    /// Otherwise the cold rows of a file that is mostly cached fault one by one.
    #[test]
    fn after_a_cold_sample_rows_are_hinted_without_samples_for_a_while() {
        assert_eq!(hints(0..100, 10 * BLOCK as u64).0, 10 * BLOCK);
        assert_eq!(hints(0..100, 1000 * BLOCK as u64).0, 65 * BLOCK);
    }
}
