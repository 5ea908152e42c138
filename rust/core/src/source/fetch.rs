//! Many ranges of sources that answer slowly, in few large requests.
//!
//! Ranges are sorted by source and place. Those that lie nearer than the gap that the sources wish for are read as one, up to
//! their largest read; a longer range becomes several reads. As many reads are on their way at once as they wish, as far as
//! their bytes fit [`SCRATCH`].

use std::ops::Range;

use super::{ByteRange, RangeRead, Source, Wishes};
use crate::error::{Error, Kind, Result};
use crate::memory::zeroed;
use crate::threads::{self, Stop, Watch};

/// Bytes that one call holds at once of what it reads, gaps included; and of what it decodes before rows are copied out. One
/// range that is longer is held all the same, by itself.
pub const SCRATCH: u64 = 256 << 20;

/// A range that is wanted.
#[derive(Debug)]
pub struct WantedRange<T> {
    /// Position of its source.
    pub source: usize,
    /// Its bytes.
    pub range: ByteRange,
    /// Where they go, in the words of the caller.
    pub to: T,
}

/// One read of a source, and the ranges that it brings.
struct Request<T> {
    source: usize,
    at: u64,
    len: u64,
    wanted: Vec<WantedRange<T>>,
}

/// Reads ranges and hands each over with its bytes as they arrive, to threads that wait. Of several errors that of the first range
/// is returned, in the order of sources and places.
pub fn fetch<T: Send>(
    sources: &[Option<&dyn Source>],
    wanted: Vec<WantedRange<T>>,
    wishes: &Wishes,
    each: &(dyn Fn(T, &[u8]) -> Result<()> + Sync),
    watch: Watch<'_>,
) -> Result<()> {
    let largest = wishes.largest.clamp(1, SCRATCH);
    let (long, together): (Vec<_>, Vec<_>) =
        requests(wanted, wishes.gap, largest).into_iter().partition(|request| request.len > largest);
    let most = together.iter().map(|request| request.len).max().unwrap_or(1).max(1);
    let at_once = usize::try_from(SCRATCH / most).unwrap_or(usize::MAX).min(wishes.parallel.max(1));
    threads::for_each_waiting(
        together,
        at_once,
        &|_, request: Request<T>, stop| {
            let source = source_of(sources, request.source)?;
            let mut block = zeroed::<u8>(request.len as usize)?;
            source.read_many(&mut [RangeRead { at: request.at, into: &mut block }], stop)?;
            if stop.is_set() { Ok(()) } else { request.hand_over(&block, each) }
        },
        &mut *watch,
    )?;
    for request in long {
        let mut block = zeroed::<u8>(request.len as usize)?;
        read_all(vec![(source_of(sources, request.source)?, request.at, &mut block)], wishes, &mut *watch)?;
        request.hand_over(&block, each)?;
    }
    Ok(())
}

/// Fills places, each from a byte of a source on: long ones by several reads, all of them at once as far as is wished for.
pub fn read_all<'a>(places: Vec<(&'a dyn Source, u64, &'a mut [u8])>, wishes: &Wishes, watch: Watch<'_>) -> Result<()> {
    let largest = wishes.largest.clamp(1, SCRATCH);
    let mut reads: Vec<(&dyn Source, RangeRead<'a>)> = vec![];
    for (source, at, into) in places {
        let cut = into.chunks_mut(largest as usize).enumerate();
        reads.extend(cut.map(|(i, into)| (source, RangeRead { at: at + i as u64 * largest, into })));
    }
    let one = |_: usize, (source, read): (&dyn Source, RangeRead<'_>), stop: &Stop| source.read_many(&mut [read], stop);
    threads::for_each_waiting(reads, wishes.parallel.max(1), &one, watch)
}

fn source_of<'a>(sources: &[Option<&'a dyn Source>], number: usize) -> Result<&'a dyn Source> {
    let source = sources.get(number).copied().flatten();
    source.ok_or_else(|| Error::new(Kind::Internal, "a range of a file that is not open"))
}

impl<T> Request<T> {
    fn hand_over(self, block: &[u8], each: &(dyn Fn(T, &[u8]) -> Result<()> + Sync)) -> Result<()> {
        for WantedRange { range, to, .. } in self.wanted {
            let from = (range.at - self.at) as usize;
            let bytes: Range<usize> = from..from + range.len as usize;
            each(to, &block[bytes])?;
        }
        Ok(())
    }
}

/// Ranges as requests, in the order of sources and places.
fn requests<T>(mut wanted: Vec<WantedRange<T>>, gap: u64, largest: u64) -> Vec<Request<T>> {
    wanted.sort_by_key(|each| (each.source, each.range.at));
    let mut made: Vec<Request<T>> = vec![];
    for each in wanted {
        let ByteRange { at, len } = each.range;
        match made.last_mut() {
            Some(last)
                if last.source == each.source
                    && (at + len <= last.at + last.len
                        || (at <= (last.at + last.len).saturating_add(gap) && at + len - last.at <= largest)) =>
            {
                last.len = last.len.max(at + len - last.at);
                last.wanted.push(each);
            }
            _ => made.push(Request { source: each.source, at, len, wanted: vec![each] }),
        }
    }
    made
}
