//! Reads many ranges of slow sources in few large requests.
//!
//! Ranges are sorted by source and offset. Bytes that need no network are handed over first. Of the others, ranges closer than a
//! gap are read together, up to the sources' largest read; longer ranges are split. The gap is chosen for each call from the
//! offsets themselves ([`best_gap`]): a larger one saves waiting, and costs bytes. The number of reads in flight is the
//! sources' `parallel`. Long ranges go straight to their places; other bytes in flight are bounded for the whole process.

use std::ops::Range;

use super::{ByteRange, LinkPace, RangeRead, Source, Wishes};
use crate::error::{Error, Kind, Result};
use crate::memory::zeroed;
use crate::threads::shared::{SharedBytes, TakenBytes};
use crate::threads::{self, Stop, Watch};

/// Bytes decoded before rows are copied out, per call; and bytes of ranges that are read together.
pub const SCRATCH: u64 = 256 << 20;
/// Maximum bytes in memory, over all calls of this process, of reads that do not go directly to their destinations.
static HELD: SharedBytes = SharedBytes::new(SCRATCH);

/// Seconds that the two ends need to send, receive and hand over one read of any size: about 60 us were measured.
const PER_READ: f64 = 60e-6;
/// Bytes that one thread reads at a time if no network is needed, and the number of such threads, which may wait for a
/// disk.
const NEAR_PART: u64 = 1 << 20;
const NEAR_THREADS: usize = 8;
/// Up to this many parts are read by the calling thread.
const NEAR_INLINE: usize = 4;
/// Ranges of at least this many bytes, on average, are read directly into their destinations: for shorter ones, a copy
/// is faster.
const IN_PLACE: u64 = 32 << 10;

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

/// What to do with ranges.
pub struct Delivery<'a, T> {
    /// Takes a range's bytes, on threads that may block.
    pub each: &'a (dyn Fn(T, &[u8]) -> Result<()> + Sync),
    /// Memory of the range's length that receives its bytes unchanged; then `each` may not be called.
    pub place: fn(&mut T) -> Option<&mut [u8]>,
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
    deliver(sources, wanted, wishes, &Delivery { each, place: |_| None }, watch)
}

/// [`fetch`] for ranges that may have their own destinations.
pub fn deliver<T: Send>(
    sources: &[Option<&dyn Source>],
    mut wanted: Vec<WantedRange<T>>,
    wishes: &Wishes,
    delivery: &Delivery<'_, T>,
    watch: Watch<'_>,
) -> Result<()> {
    wanted.sort_by_key(|each| (each.source, each.range.at));
    let wanted = hand_over_near(sources, wanted, delivery, &mut *watch)?;
    let largest = wishes.largest.clamp(1, SCRATCH);
    let grain = Grain { sources, bytes: wishes.grain.max(1) };
    let gap = best_gap(&wanted, &grain, wishes, largest);
    let one = |_: usize, request: Request<T>, stop: &Stop| {
        let source = source_of(sources, request.source)?;
        request.read(source, largest, delivery, stop)
    };
    threads::for_each_waiting(requests(wanted, &grain, gap, largest), wishes.parallel.max(1), &one, watch)
}

/// Hands over ranges that need no network, such as those in a cache on disk; returns the others, in order.
#[expect(clippy::disallowed_methods, reason = "a few near parts take a moment")]
fn hand_over_near<T: Send>(
    sources: &[Option<&dyn Source>],
    wanted: Vec<WantedRange<T>>,
    delivery: &Delivery<'_, T>,
    watch: Watch<'_>,
) -> Result<Vec<WantedRange<T>>> {
    let mut parts: Vec<Vec<WantedRange<T>>> = vec![];
    let (mut lacking, mut filled) = (vec![], 0);
    for wanted in wanted {
        if wanted.range.len > SCRATCH || !source_of(sources, wanted.source)?.is_near(wanted.range.at) {
            lacking.push(wanted);
            continue;
        }
        filled += wanted.range.len;
        match parts.last_mut() {
            Some(part) if filled <= NEAR_PART => part.push(wanted),
            _ => {
                filled = wanted.range.len;
                parts.push(vec![wanted]);
            }
        }
    }
    let work = |_: usize, part: Vec<WantedRange<T>>, stop: &Stop| hand_over_part(sources, part, delivery, stop);
    let missed = match parts.len() {
        0 => return Ok(lacking),
        // Few bytes are read before threads have started; readers of streams are already separate threads.
        1..=NEAR_INLINE => {
            let here = |part| work(0, part, Stop::never());
            parts.into_iter().map(here).collect::<Result<Vec<_>>>()?
        }
        _ => threads::map_each_waiting(parts, NEAR_THREADS, &work, watch)?,
    };
    let before = lacking.len();
    lacking.extend(missed.into_iter().flatten());
    if lacking.len() > before {
        lacking.sort_by_key(|each| (each.source, each.range.at));
    }
    Ok(lacking)
}

/// Hands over ranges that need no network; returns the others.
fn hand_over_part<T>(
    sources: &[Option<&dyn Source>],
    part: Vec<WantedRange<T>>,
    delivery: &Delivery<'_, T>,
    stop: &Stop,
) -> Result<Vec<WantedRange<T>>> {
    let (mut held, mut block, mut missed): (Option<TakenBytes<'_>>, _, _) = (None, vec![], vec![]);
    for mut wanted in part {
        let (source, at, len) = (source_of(sources, wanted.source)?, wanted.range.at, wanted.range.len as usize);
        if let Some(into) = (delivery.place)(&mut wanted.to) {
            if !source.read_if_near(RangeRead { at, into })? {
                missed.push(wanted);
            }
            continue;
        }
        if block.len() < len {
            // A thread never waits for a larger share while it holds one.
            drop(held.take());
            if len as u64 > NEAR_PART {
                held = Some(HELD.take(len as u64, stop)?);
            }
            block = zeroed::<u8>(len)?;
        }
        if source.read_if_near(RangeRead { at, into: &mut block[..len] })? {
            (delivery.each)(wanted.to, &block[..len])?;
        } else {
            missed.push(wanted);
        }
    }
    Ok(missed)
}

/// Fills buffers, each from an offset of a source. Long ones are split into several concurrent reads.
pub fn read_all<'a>(places: Vec<(&'a dyn Source, u64, &'a mut [u8])>, wishes: &Wishes, watch: Watch<'_>) -> Result<()> {
    let largest = wishes.largest.clamp(1, SCRATCH);
    let mut reads: Vec<(&dyn Source, RangeRead<'a>)> = vec![];
    for (source, at, into) in places {
        reads.extend(cut(at, into, largest).map(|read| (source, read)));
    }
    let one = |_: usize, (source, read): (&dyn Source, RangeRead<'_>), stop: &Stop| source.read_many(&mut [read], stop);
    threads::for_each_waiting(reads, wishes.parallel.max(1), &one, watch)
}

/// Reads of at most `largest` bytes.
fn cut(at: u64, into: &mut [u8], largest: u64) -> impl Iterator<Item = RangeRead<'_>> {
    let each = into.chunks_mut(largest as usize).enumerate();
    each.map(move |(i, into)| RangeRead { at: at + i as u64 * largest, into })
}

fn source_of<'a>(sources: &[Option<&'a dyn Source>], number: usize) -> Result<&'a dyn Source> {
    let source = sources.get(number).copied().flatten();
    source.ok_or_else(|| Error::new(Kind::Internal, "a range of a file that is not open"))
}

impl<T> Request<T> {
    /// Reads its ranges into their places; if they have none, into a block, from which they are handed over.
    fn read(mut self, source: &dyn Source, largest: u64, delivery: &Delivery<'_, T>, stop: &Stop) -> Result<()> {
        if let Some(gaps) = self.gaps(delivery.place) {
            return self.read_in_place(gaps, source, delivery.place, stop);
        }
        let _held = HELD.take(self.len, stop)?;
        let mut block = zeroed::<u8>(self.len as usize)?;
        let mut reads: Vec<_> = cut(self.at, &mut block, largest).collect();
        source.read_many(&mut reads, stop)?;
        self.hand_over(&block, delivery.each)
    }

    /// Bytes between its ranges, if these are long, do not overlap, and have places.
    fn gaps(&mut self, place: fn(&mut T) -> Option<&mut [u8]>) -> Option<u64> {
        if self.len < IN_PLACE * self.wanted.len() as u64 {
            return None;
        }
        let (mut end, mut gaps) = (self.at, self.len);
        for wanted in &mut self.wanted {
            let ByteRange { at, len } = wanted.range;
            let fits = at >= end && place(&mut wanted.to).is_some_and(|place| place.len() as u64 == len);
            gaps = gaps.checked_sub(len).filter(|_| fits)?;
            end = at + len;
        }
        Some(gaps)
    }

    /// Reads its ranges into their places, and the bytes between them into memory that is dropped.
    fn read_in_place(
        &mut self,
        gaps: u64,
        source: &dyn Source,
        place: fn(&mut T) -> Option<&mut [u8]>,
        stop: &Stop,
    ) -> Result<()> {
        let _held = HELD.take(gaps, stop)?;
        let mut dropped = zeroed::<u8>(gaps as usize)?;
        let (mut rest, mut at, end) = (&mut dropped[..], self.at, self.at + self.len);
        let mut reads = Vec::with_capacity(self.wanted.len() * 2 + 1);
        for wanted in &mut self.wanted {
            let (before, others) = std::mem::take(&mut rest).split_at_mut((wanted.range.at - at) as usize);
            reads.push(RangeRead { at, into: before });
            reads.extend(place(&mut wanted.to).map(|into| RangeRead { at: wanted.range.at, into }));
            (rest, at) = (others, wanted.range.at + wanted.range.len);
        }
        if at < end {
            reads.push(RangeRead { at, into: rest });
        }
        reads.retain(|read| !read.into.is_empty());
        source.read_many(&mut reads, stop)
    }

    fn hand_over(self, block: &[u8], each: &(dyn Fn(T, &[u8]) -> Result<()> + Sync)) -> Result<()> {
        for WantedRange { range, to, .. } in self.wanted {
            let from = (range.at - self.at) as usize;
            let bytes: Range<usize> = from..from + range.len as usize;
            each(to, &block[bytes])?;
        }
        Ok(())
    }
}

/// The offsets at which reads may begin and end.
struct Grain<'a> {
    sources: &'a [Option<&'a dyn Source>],
    bytes: u64,
}

impl Grain<'_> {
    /// The first byte of a read that contains a range, and the one after its last.
    fn around<T>(&self, wanted: &WantedRange<T>) -> (u64, u64) {
        let ByteRange { at, len } = wanted.range;
        if self.bytes == 1 {
            return (at, at + len);
        }
        let size = self.sources.get(wanted.source).copied().flatten().map_or(u64::MAX, Source::size);
        let end = (at + len).checked_next_multiple_of(self.bytes).unwrap_or(u64::MAX);
        (at / self.bytes * self.bytes, end.min(size).max(at + len))
    }
}

/// The gap below which sorted ranges are read together in the least time.
///
/// `n` reads of latency `l`, `p` at once, wait for `n * l / p`, and for `l` at least; their bytes take `bytes / rate`. The two
/// overlap, though not perfectly: each wave of reads ends with the slowest one. So the root of the sum of their squares is
/// compared, for every distance between neighbours.
fn best_gap<T>(wanted: &[WantedRange<T>], grain: &Grain<'_>, wishes: &Wishes, largest: u64) -> u64 {
    let Some(pace) = wishes.pace else { return wishes.gap };
    let (mut reads, mut bytes, mut gaps): (u64, u64, Vec<u64>) = (0, 0, vec![]);
    let mut last: Option<(usize, u64)> = None;
    for each in wanted {
        let (at, end) = grain.around(each);
        let before = last.filter(|(source, _)| *source == each.source).map(|(_, end)| end);
        match before.map(|before| at.saturating_sub(before)) {
            Some(0) => {}
            Some(gap) if gap <= wishes.gap => gaps.push(gap),
            _ => reads += 1,
        }
        bytes += end.saturating_sub(before.map_or(at, |before| before.max(at)));
        last = Some((each.source, before.map_or(end, |before| before.max(end))));
    }
    gaps.sort_unstable();
    let mut reads = reads + gaps.len() as u64;
    let (mut best, mut least) = (0, cost(&pace, wishes.parallel, reads, bytes, largest));
    for same in gaps.chunk_by(|a, b| a == b) {
        reads -= same.len() as u64;
        bytes += same.iter().sum::<u64>();
        let cost = cost(&pace, wishes.parallel, reads, bytes, largest);
        if cost < least {
            (best, least) = (same[0], cost);
        }
    }
    best
}

/// The square of the time of this many reads, in seconds.
fn cost(pace: &LinkPace, parallel: usize, reads: u64, bytes: u64, largest: u64) -> f64 {
    let reads = reads.max(bytes / largest) as f64;
    let waves = (reads / parallel.max(1) as f64).max(1.0);
    let wait = (waves * pace.latency.as_secs_f64()).max(reads * PER_READ);
    let move_all = bytes as f64 / pace.rate.max(1) as f64;
    wait * wait + move_all * move_all
}

/// Merges sorted ranges into requests, in order of source and offset.
fn requests<T>(wanted: Vec<WantedRange<T>>, grain: &Grain<'_>, gap: u64, largest: u64) -> Vec<Request<T>> {
    let mut made: Vec<Request<T>> = vec![];
    for each in wanted {
        let (at, end) = grain.around(&each);
        match made.last_mut() {
            Some(last)
                if last.source == each.source
                    && (end <= last.at + last.len
                        || (at <= (last.at + last.len).saturating_add(gap) && end - last.at <= largest)) =>
            {
                last.len = last.len.max(end - last.at);
                last.wanted.push(each);
            }
            _ => made.push(Request { source: each.source, at, len: end - at, wanted: vec![each] }),
        }
    }
    made
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::time::Duration;

    use super::*;

    fn wishes(latency: u64, parallel: usize) -> Wishes {
        let pace = Some(LinkPace { latency: Duration::from_millis(latency), rate: 200_000_000 });
        Wishes { gap: 1 << 20, grain: 1, pace, largest: 4 << 20, parallel, unit_bytes: 4 << 20 }
    }

    fn ranges(offsets: impl Iterator<Item = u64>, len: u64) -> Vec<WantedRange<u64>> {
        let mut made: Vec<_> =
            offsets.map(|at| WantedRange { source: 0, range: ByteRange { at, len }, to: at }).collect();
        made.sort_by_key(|each| each.range.at);
        made
    }

    fn planned(offsets: impl Iterator<Item = u64>, len: u64, wishes: &Wishes) -> (usize, u64) {
        let (wanted, grain) = (ranges(offsets, len), Grain { sources: &[], bytes: wishes.grain });
        let gap = best_gap(&wanted, &grain, wishes, wishes.largest);
        let made = requests(wanted, &grain, gap, wishes.largest);
        (made.len(), made.iter().map(|request| request.len).sum())
    }

    fn random(rows: u64, of: u64) -> impl Iterator<Item = u64> {
        let mut x = 88_172_645_463_325_252u64;
        (0..rows).map(move |_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            x % of * 8192
        })
    }

    #[test]
    fn the_gap_balances_waits_and_bytes() {
        let at = |latency, parallel| planned(random(4096, 32_768), 8192, &wishes(latency, parallel));
        let (slow, fast) = (at(100, 64), at(1, 64));
        // A row costs its bytes alone if answers are quick; almost everything is read if they are slow.
        assert!(fast.0 > 2_500 && fast.1 < 50 << 20, "{fast:?}");
        assert!(slow.0 < 500 && slow.1 > 128 << 20, "{slow:?}");
        assert!(at(100, 256).1 < slow.1);
        // Few reads cost one latency, whatever the gaps between them.
        assert_eq!(planned([0u64, 1 << 19].into_iter(), 8192, &wishes(100, 64)), (2, 16_384));
    }

    #[test]
    fn no_other_gap_is_cheaper() {
        let (wishes, grain) = (wishes(30, 64), Grain { sources: &[], bytes: 1 });
        let pace = wishes.pace.unwrap();
        let price = |gap: u64| {
            let made = requests(ranges(random(4096, 32_768), 8192), &grain, gap, u64::MAX);
            cost(&pace, wishes.parallel, made.len() as u64, made.iter().map(|each| each.len).sum(), wishes.largest)
        };
        let best = price(best_gap(&ranges(random(4096, 32_768), 8192), &grain, &wishes, wishes.largest));
        assert!((0..=64).all(|i| best <= price(i * (16 << 10))));
    }

    #[test]
    fn reads_of_a_cache_are_whole_pages() {
        let wishes = Wishes { grain: 64 << 10, ..wishes(1, 64) };
        assert_eq!(planned([8192u64, 24_576, 70_000].into_iter(), 8192, &wishes), (1, 128 << 10));
        assert_eq!(planned([8192u64, 10 << 20].into_iter(), 8192, &wishes), (2, 128 << 10));
    }
}
