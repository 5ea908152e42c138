//! Many reads of several sources by one thread. Cached ranges are read at once; others are hinted, and read after enough further
//! hints, so that a cold disk has a full queue.

use std::collections::VecDeque;

use super::{ByteRange, Ready, Source};
use crate::error::Result;
use crate::threads::Stop;

/// Ranges hinted ahead of reads.
pub const AHEAD: usize = 1024;
/// Bytes hinted ahead of reads.
pub const AHEAD_BYTES: usize = 16 << 20;

/// A range of one of several sources.
pub trait Ranged {
    /// Index of its source.
    fn source(&self) -> usize;
    /// The range.
    fn range(&self) -> ByteRange;
}

/// Bytes of a hint, at most, unless one range is longer; and its ranges, far fewer than are hinted ahead.
const HINT_BYTES: u64 = 256 << 10;
const HINT_RANGES: usize = AHEAD / 4;

/// Hints for ranges in reading order: neighbours are one hint. A hint costs as much as the copy of a small row.
pub struct Hints<'a> {
    sources: &'a [Option<&'a dyn Source>],
    waiting: Option<(usize, ByteRange)>,
    ranges: usize,
}

impl<'a> Hints<'a> {
    /// None yet.
    pub fn new(sources: &'a [Option<&'a dyn Source>]) -> Hints<'a> {
        Hints { sources, waiting: None, ranges: 0 }
    }

    /// Adds a range; it is hinted now, with a neighbour, or by [`flush`](Hints::flush).
    pub fn add<T: Ranged>(&mut self, each: &T) {
        let (source, range) = (each.source(), each.range());
        match &mut self.waiting {
            Some((same, last))
                if *same == source
                    && last.at.checked_add(last.len) == Some(range.at)
                    && last.len < HINT_BYTES
                    && self.ranges < HINT_RANGES =>
            {
                last.len = last.len.saturating_add(range.len);
                self.ranges += 1;
            }
            _ => {
                self.flush();
                (self.waiting, self.ranges) = (Some((source, range)), 1);
            }
        }
    }

    /// Gives the last hint.
    pub fn flush(&mut self) {
        if let Some((source, range)) = self.waiting.take()
            && let Some(source) = self.sources[source]
        {
            source.will_need(&[range]);
        }
    }
}

/// Calls `read` for each range, first without waiting; if the range is not ready, again later with waiting allowed.
pub fn read_all<T: Ranged>(
    sources: &[Option<&dyn Source>],
    ranges: &[T],
    stop: &Stop,
    mut read: impl FnMut(&T, bool) -> Result<Ready>,
) -> Result<()> {
    let mut coming: VecDeque<&T> = VecDeque::new();
    let mut coming_bytes = 0;
    let mut can_ask = true;
    let mut hints = Hints::new(sources);
    for each in ranges {
        stop.check()?;
        if can_ask {
            match read(each, false)? {
                Ready::Yes => continue,
                Ready::No => {}
                Ready::Unknown => can_ask = false,
            }
        }
        hints.add(each);
        coming.push_back(each);
        coming_bytes += each.range().len as usize;
        while coming.len() >= AHEAD || coming_bytes >= AHEAD_BYTES {
            let Some(oldest) = coming.pop_front() else { break };
            if coming.is_empty() {
                hints.flush(); // a range of 16 MiB is waited for at once
            }
            coming_bytes -= oldest.range().len as usize;
            read(oldest, true)?;
        }
    }
    hints.flush();
    for each in coming {
        stop.check()?;
        read(each, true)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::{RangeRead, Version};
    use super::*;
    use crate::location::Location;
    use crate::threads::Lock;

    #[derive(Debug)]
    struct Cold(Location, Lock<Vec<ByteRange>>);

    impl Source for Cold {
        fn location(&self) -> &Location {
            &self.0
        }

        fn size(&self) -> u64 {
            1 << 40
        }

        fn version(&self) -> Option<Version> {
            None
        }

        fn read_many(&self, _: &mut [RangeRead<'_>], _: &Stop) -> Result<()> {
            Ok(())
        }

        fn will_need(&self, ranges: &[ByteRange]) {
            self.1.lock().extend_from_slice(ranges);
        }

        fn unchanged(&self) -> Result<()> {
            Ok(())
        }
    }

    struct At(usize, u64, u64);

    impl Ranged for At {
        fn source(&self) -> usize {
            self.0
        }

        fn range(&self) -> ByteRange {
            ByteRange { at: self.1, len: self.2 }
        }
    }

    /// The hints of a cold read of these ranges, as (first byte, bytes) of each source; every range was hinted before it was waited for.
    fn hints_of(ranges: &[At]) -> Vec<Vec<(u64, u64)>> {
        let cold: Vec<Cold> = (0..2).map(|n| Cold(Location::object("store", n.to_string()), Lock::default())).collect();
        let sources: Vec<Option<&dyn Source>> = cold.iter().map(|source| Some(source as &dyn Source)).collect();
        let hinted = |source: usize| cold[source].1.lock().clone();
        let mut waited = 0;
        let done = read_all(&sources, ranges, &Stop::new(), |each, wait| {
            waited += usize::from(wait);
            let covers = |hint: &ByteRange| hint.at <= each.1 && each.1 + each.2 <= hint.at + hint.len;
            assert!(!wait || hinted(each.0).iter().any(covers), "{} is waited for without a hint", each.1);
            Ok(if wait { Ready::Yes } else { Ready::No })
        });
        assert!(done.is_ok() && waited == ranges.len());
        (0..2).map(|n| hinted(n).iter().map(|hint| (hint.at, hint.len)).collect()).collect()
    }

    #[test]
    fn neighbours_are_one_hint() {
        let ranges: Vec<At> =
            [(0, 0, 10), (0, 10, 5), (0, 15, 1), (1, 16, 4), (0, 16, 2), (0, 20, 2)].map(|r| At(r.0, r.1, r.2)).into();
        assert_eq!(hints_of(&ranges), [vec![(0, 16), (16, 2), (20, 2)], vec![(16, 4)]]);
    }

    #[test]
    fn hints_are_given_before_ranges_are_waited_for() {
        for (rows, bytes) in [(5000, 64), (3000, 2048), (200, HINT_BYTES), (3, AHEAD_BYTES as u64), (1, 3)] {
            let ranges: Vec<At> = (0..rows).map(|n| At(0, n * bytes, bytes)).collect();
            let hints = hints_of(&ranges).concat();
            assert_eq!(hints.iter().map(|hint| hint.1).sum::<u64>(), rows * bytes);
            assert!(hints.iter().all(|hint| hint.1 < HINT_BYTES + bytes && hint.1 <= bytes * HINT_RANGES as u64));
        }
    }
}
