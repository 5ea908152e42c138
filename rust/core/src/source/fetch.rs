//! Reads many ranges of slow sources in few large requests.
//!
//! Ranges are sorted by source and offset. Ranges closer than the sources' gap are read together, up to their largest read;
//! longer ranges are split. The number of reads in flight is the sources' `parallel`, limited by [`SCRATCH`].

use std::ops::Range;

use super::{ByteRange, RangeRead, Source, Wishes};
use crate::error::{Error, Kind, Result};
use crate::memory::zeroed;
use crate::threads::{self, Stop, Watch};

/// Bytes in flight per call, gaps included, and separately bytes decoded before rows are copied out. A single longer range
/// is allowed.
pub const SCRATCH: u64 = 256 << 20;

/// A requested range.
#[derive(Debug)]
pub struct WantedRange<T> {
    /// Index of its source.
    pub source: usize,
    /// Its bytes in the source.
    pub range: ByteRange,
    /// Its destination, as the caller defines it.
    pub to: T,
}

/// One read of a source, and the ranges that it covers.
struct Request<T> {
    source: usize,
    at: u64,
    len: u64,
    wanted: Vec<WantedRange<T>>,
}

/// Reads ranges, and passes each with its bytes to `each` as they arrive, on threads that may block. Of several errors,
/// returns that of the first range, in order of source and offset.
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

/// Fills buffers, each from an offset of a source. Long ones are split into several concurrent reads.
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

/// Merges ranges into requests, in order of source and offset.
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
