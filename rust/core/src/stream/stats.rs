//! Statistics of all rows in one pass: mean, variance and extremes of each element.
//!
//! Rows are divided into blocks of fixed size, and blocks into leaves of fixed size. Each block is summed separately in float64,
//! the blocks of a leaf are combined in order, and leaves are combined pairwise
//! (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979):
//!
//! ```text
//! leaves   0   1   2   3   4   5   6
//! level 1  0 - 1   2 - 3   4 - 5
//! level 2  0 ----- 3
//! total    ((0 to 3) + (4 to 5)) + 6
//! ```
//!
//! A node of this tree begins at a multiple of its size. The sums of a range of leaves are the largest nodes in it ([`Sums`]), so
//! the result has the same bits for any number of threads, and for any ranges that tasks sum. NaN and infinite values are counted
//! and excluded.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::rescale::norm_of;
use super::select::Selection;
use super::summary::{Seen, Summary};
use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::gather::blocks::{BlockReader, READERS};
use crate::gather::{Ints, Out, Pick};
use crate::kernels::wide;
use crate::layout::row::Row;
use crate::memory::limit::memory_limit;
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::threads::{self, Stop, Turns, Watch, make_ahead};

/// Rows per block: a block is summed twice while it is in the cache.
const BLOCK: usize = 128;
/// Most rows per leaf; a leaf is also the amount between two calls of the watch and of `progress`.
const LEAF: u64 = 1 << 16;
/// Most bytes per leaf, unless one block is larger.
const LEAF_BYTES: u64 = 64 << 20;

/// Sums over rows, per element.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Rows.
    pub rows: u64,
    /// Finite values.
    pub finite: Vec<u64>,
    /// Mean of the finite values; 0 if there are none.
    pub mean: Vec<f64>,
    /// The sum of squared distances from the mean.
    pub squares: Vec<f64>,
    /// The smallest finite value; infinity if there are none.
    pub min: Vec<f64>,
    /// The largest finite value; negative infinity if there are none.
    pub max: Vec<f64>,
    /// NaN values.
    pub nan: Vec<u64>,
    /// Infinite values.
    pub infinite: Vec<u64>,
    /// The sum of the L2 norms of rows with finite norms, and the number of those rows.
    pub norms: (f64, u64),
    /// Zeros, norms, positions, and the largest.
    pub summary: Summary,
}

impl Stats {
    /// Statistics of no rows.
    pub fn new(width: usize) -> Result<Stats> {
        let of = |value: f64| -> Result<Vec<f64>> {
            let mut made = zeroed(width)?;
            made.fill(value);
            Ok(made)
        };
        Ok(Stats {
            rows: 0,
            finite: zeroed(width)?,
            mean: zeroed(width)?,
            squares: zeroed(width)?,
            min: of(f64::INFINITY)?,
            max: of(f64::NEG_INFINITY)?,
            nan: zeroed(width)?,
            infinite: zeroed(width)?,
            norms: (0.0, 0),
            summary: Summary::new(width)?,
        })
    }

    /// Statistics of these rows; `ids` are the example and the token of each.
    fn of(rows: &[f64], width: usize, ids: (&[i64], &[i64])) -> Result<Stats> {
        let mut made = Stats::new(width)?;
        made.rows = (rows.len() / width) as u64;
        let mut seen = Seen::new(width, rows.len() / width)?;
        wide(|| made.sum(rows, width, &mut seen));
        let largest: Vec<f64> =
            made.min.iter().zip(&made.max).map(|(a, b)| if a > b { 0.0 } else { b.max(-a) }).collect();
        made.summary = Summary::of(rows, &largest, ids, seen);
        Ok(made)
    }

    /// Loops over columns are branch-free so that they vectorise. Most rows are finite, and need no look at each value.
    #[inline(always)]
    fn sum(&mut self, rows: &[f64], width: usize, seen: &mut Seen) {
        let mut finite_rows = 0;
        for row in rows.chunks_exact(width) {
            let norm = norm_of(row);
            let sums = self.mean.iter_mut().zip(&mut self.min).zip(&mut self.max);
            let mut zero = false;
            if norm.is_finite() {
                self.norms = (self.norms.0 + norm, self.norms.1 + 1);
                finite_rows += 1;
                for (x, ((mean, min), max)) in row.iter().zip(sums) {
                    *mean += x;
                    *min = if x < min { *x } else { *min };
                    *max = if x > max { *x } else { *max };
                    zero |= *x == 0.0;
                }
                seen.add(row, norm, zero);
                continue;
            }
            for (x, ((mean, min), max)) in row.iter().zip(sums) {
                let finite = x.is_finite();
                *mean += if finite { *x } else { 0.0 };
                let (low, high) = if finite { (*x, *x) } else { (*min, *max) };
                *min = if low < *min { low } else { *min };
                *max = if high > *max { high } else { *max };
            }
            let counts = self.finite.iter_mut().zip(&mut self.nan).zip(&mut self.infinite);
            for (x, ((finite, nan), infinite)) in row.iter().zip(counts) {
                *finite += u64::from(x.is_finite());
                *nan += u64::from(x.is_nan());
                *infinite += u64::from(x.is_infinite());
                zero |= *x == 0.0;
            }
            seen.add(row, norm, zero);
        }
        self.finite.iter_mut().for_each(|n| *n += finite_rows);
        for (mean, n) in self.mean.iter_mut().zip(&self.finite) {
            *mean /= (*n).max(1) as f64;
        }
        let all_finite = finite_rows == self.rows;
        for row in rows.chunks_exact(width) {
            let values = self.squares.iter_mut().zip(&self.mean).zip(row);
            if all_finite {
                values.for_each(|((squares, mean), x)| *squares += (x - mean) * (x - mean));
            } else {
                for ((squares, mean), x) in values {
                    let away = x - mean;
                    *squares += if x.is_finite() { away * away } else { 0.0 };
                }
            }
        }
    }

    /// Adds the statistics of the rows that follow.
    pub fn join(&mut self, next: &Stats) {
        self.rows += next.rows;
        self.summary.join(&next.summary);
        self.norms = (self.norms.0 + next.norms.0, self.norms.1 + next.norms.1);
        for k in 0..self.mean.len() {
            let (a, b) = (self.finite[k] as f64, next.finite[k] as f64);
            if next.finite[k] > 0 {
                let away = next.mean[k] - self.mean[k];
                self.mean[k] += away * (b / (a + b));
                self.squares[k] += next.squares[k] + away * away * (a * b / (a + b));
            }
            self.finite[k] += next.finite[k];
            // Not `f64::min`, which may return either of 0.0 and -0.0.
            self.min[k] = if next.min[k] < self.min[k] { next.min[k] } else { self.min[k] };
            self.max[k] = if next.max[k] > self.max[k] { next.max[k] } else { self.max[k] };
            self.nan[k] += next.nan[k];
            self.infinite[k] += next.infinite[k];
        }
    }
}

/// A node of the tree: the sums of `1 << level` leaves, or of fewer at the end.
#[derive(Clone, Debug)]
pub struct SumNode {
    /// The number of its first leaf, a multiple of `1 << level`.
    pub first: u64,
    /// 0 for a leaf.
    pub level: u32,
    /// Sums over its rows.
    pub sums: Stats,
}

/// The sums of a range of leaves: the largest nodes in it, in order.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    nodes: Vec<SumNode>,
}

impl Sums {
    /// The nodes, in order.
    pub fn nodes(&self) -> &[SumNode] {
        &self.nodes
    }

    /// Adds the node that follows, and combines nodes that are halves of a larger one. Errors if another one follows, or if its
    /// width differs.
    pub fn push(&mut self, next: SumNode) -> Result<()> {
        let size = 1u64.checked_shl(next.level).filter(|size| next.first.is_multiple_of(*size));
        let end = size.and_then(|size| next.first.checked_add(size));
        if end.is_none() {
            let detail =
                format!("sums: expected a node's first leaf to be a multiple of its size, found {}", next.first);
            return Err(Error::new(Kind::Argument, detail));
        }
        if let Some(last) = self.nodes.last() {
            let expected = last.first + (1 << last.level);
            if next.first != expected {
                let what = if next.first > expected { "a hole" } else { "an overlap" };
                let detail = format!("sums: expected leaf {expected} to follow, found {}: {what}", next.first);
                return Err(Error::new(Kind::Argument, detail));
            }
            if next.sums.mean.len() != last.sums.mean.len() {
                let detail =
                    format!("sums: expected sums of {} columns, found {}", last.sums.mean.len(), next.sums.mean.len());
                return Err(Error::new(Kind::Argument, detail));
            }
        }
        self.nodes.push(next);
        while let [.., left, right] = &mut self.nodes[..] {
            if left.level != right.level || !left.first.is_multiple_of(2 << left.level) {
                break;
            }
            left.sums.join(&right.sums);
            left.level += 1;
            self.nodes.pop();
        }
        Ok(())
    }

    /// The sums of all rows, if these are the sums of all leaves; `None` without leaves.
    pub fn total(self) -> Option<Stats> {
        let mut nodes = self.nodes.into_iter().map(|node| node.sums);
        let mut all = nodes.next()?;
        nodes.for_each(|next| all.join(&next));
        Some(all)
    }
}

/// Rows per leaf. Blocks never cross the bounds of leaves, which decide the last bits of the result.
pub fn leaf_rows(row: Row) -> u64 {
    LEAF.min((LEAF_BYTES / row.bytes.max(1) as u64).max(BLOCK as u64))
}

/// Statistics of one group's picks. Calls `progress` regularly with the number of rows done.
pub fn stats(
    rows: &Rows,
    group: usize,
    selection: &Selection,
    progress: &mut dyn FnMut(u64),
    watch: Watch<'_>,
) -> Result<Stats> {
    let leaves = selection.len().div_ceil(leaf_rows(rows.row()));
    match sums(rows, group, (selection, 0..leaves), progress, watch)?.total() {
        Some(all) => Ok(all),
        None => Stats::new(rows.row().width),
    }
}

/// Sums of a range of leaves of one group's picks. Calls `progress` regularly with the number of rows done.
pub fn sums(
    rows: &Rows,
    group: usize,
    (selection, leaves): (&Selection, Range<u64>),
    progress: &mut dyn FnMut(u64),
    watch: Watch<'_>,
) -> Result<Sums> {
    let row = rows.row();
    let cast = Cast::between(row.dtype, DType::F64).map_err(|_| {
        Error::new(Kind::DType, format!("statistics: expected a floating type, found {}", row.dtype.name()))
    })?;
    let count = selection.len().div_ceil(leaf_rows(row));
    if leaves.start > leaves.end || leaves.end > count {
        let detail = format!("leaves {} to {} of {count} are out of range", leaves.start, leaves.end);
        return Err(Error::new(Kind::OutOfRange, detail));
    }
    let source = Picked { rows, group, selection, cast, leaves };
    if rows.reads_blocks() { source.in_blocks(progress, watch) } else { source.in_waves(progress, watch) }
}

/// What sums of a range of leaves take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SumNeeds {
    /// Bytes read from files; `None` if rows must be decoded, or come from far.
    pub read: Option<u64>,
    /// Bytes of memory, without decoded files that are kept.
    pub memory: u64,
}

/// What [`sums`] takes. Plans the same reads, and reads no rows. `total` are rows of all leaves that are summed together, of which
/// these may be a sample: they decide about the page cache and the number of threads that read.
pub fn needs(
    rows: &Rows,
    group: usize,
    (selection, leaves): (&Selection, Range<u64>),
    total: u64,
    watch: Watch<'_>,
) -> Result<SumNeeds> {
    let row = rows.row();
    let cast = Cast::between(row.dtype, row.dtype)?;
    let source = Picked { rows, group, selection, cast, leaves };
    let (threads, block) = (threads::num_threads() as u64, (BLOCK * row.width * 8) as u64);
    // Eight arrays and a list while they are summed; and hashes of a block.
    let sums = ((10 * row.width + 4 * BLOCK) * 8) as u64;
    if !rows.reads_blocks() {
        let held = leaf_rows(row).min(total);
        let floats = if rows.decodes() { held * row.width as u64 * 8 } else { threads * block };
        return Ok(SumNeeds { read: None, memory: floats + held * 16 + held.div_ceil(BLOCK as u64) * sums });
    }
    let (at_once, readers) = reading(row);
    let past_cache = total.saturating_mul(row.bytes as u64) > memory_limit() / 2;
    let (mut reader, mut raw, stop) =
        (BlockReader::counting(past_cache)?, zeroed(at_once * row.bytes)?, Stop::default());
    for picks in source.parts(at_once) {
        source.read(picks, &mut raw, &mut reader, &stop)?;
        if watch() {
            return Err(threads::interrupted());
        }
    }
    let (parts, counted) = (total.div_ceil(at_once as u64), reader.counted());
    let made = at_once.div_ceil(BLOCK) as u64 * sums;
    let memory = parts.min(readers as u64) * (raw.len() as u64 + counted.memory())
        + parts.min(2 * readers as u64) * made
        + parts.min(threads) * block;
    Ok(SumNeeds { read: Some(counted.bytes), memory })
}

/// Rows that a thread reads at once: whole blocks of about 2 MiB; and the number of threads, fewer if a block is larger.
fn reading(row: Row) -> (usize, usize) {
    let at_once = ((2 << 20) / (row.bytes * BLOCK).max(1)).max(1) * BLOCK;
    (at_once, ((64 << 20) / (row.bytes * at_once).max(1)).clamp(2, READERS))
}

/// Example and token of each row.
type Ids = (Vec<i64>, Vec<i64>);

/// The rows to sum.
struct Picked<'a> {
    rows: &'a Rows,
    group: usize,
    selection: &'a Selection,
    /// To float64.
    cast: Cast<'a>,
    /// The leaves to sum.
    leaves: Range<u64>,
}

impl Picked<'_> {
    /// Leaves: the number of each, and its picks.
    fn waves(&self) -> impl Iterator<Item = (u64, Range<u64>)> + Clone + use<> {
        let (n, total) = (leaf_rows(self.rows.row()), self.selection.len());
        self.leaves.clone().map(move |leaf| (leaf, leaf * n..total.min((leaf + 1) * n)))
    }

    fn ids(&self, picks: Range<u64>) -> Ids {
        let of = |pick| {
            let (example, token) = self.selection.get(pick);
            (example as i64, token as i64)
        };
        picks.map(of).unzip()
    }

    /// Picks that a thread reads at once.
    fn parts(&self, at_once: usize) -> impl Iterator<Item = Range<u64>> + Clone + use<> {
        self.waves().flat_map(move |(_, picks)| {
            (picks.start..picks.end).step_by(at_once).map(move |from| from..picks.end.min(from + at_once as u64))
        })
    }

    /// Reads picks as stored to the beginning of `raw`; returns their examples and tokens.
    fn read(&self, picks: Range<u64>, raw: &mut [u8], reader: &mut BlockReader, stop: &Stop) -> Result<Ids> {
        let row = self.rows.row();
        let (examples, tokens) = self.ids(picks);
        let n = examples.len();
        let pick = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
        let as_is = Cast::between(row.dtype, row.dtype)?;
        let out = Out::Dense(&mut raw[..n * row.bytes]);
        self.rows.gather_in_blocks(Ints::One(self.group as i64), pick, n, as_is, out, (reader, stop))?;
        Ok((examples, tokens))
    }

    /// Rows that are read in blocks: each reading thread sums what it reads.
    fn in_blocks(&self, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Sums> {
        let row = self.rows.row();
        let (at_once, readers) = reading(row);
        let parts = self.parts(at_once);
        let total = self.waves().map(|(_, picks)| picks.end - picks.start).sum::<u64>();
        let past_cache = total.saturating_mul(row.bytes as u64) > memory_limit() / 2;
        let (turns, spare, values) = (Turns::new(threads::num_threads()), Mutex::new(vec![]), Mutex::new(vec![]));
        let sum = |picks: Range<u64>, stop: &Stop| -> Result<Vec<Stats>> {
            let taken = spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
            let mut mine: SummingThread = taken.map_or_else(|| SummingThread::new(past_cache, row, at_once), Ok)?;
            let SummingThread { reader, raw } = &mut mine;
            let (examples, tokens) = self.read(picks, raw, reader, stop)?;
            let n = examples.len();
            let raw = &raw[..n * row.bytes];
            let blocks = turns.take(|| {
                // As many blocks of float64 as threads with a turn.
                let taken = values.lock().unwrap_or_else(PoisonError::into_inner).pop();
                let mut floats: Vec<f64> = taken.map_or_else(|| zeroed(BLOCK * row.width), Ok)?;
                let mut blocks = vec![];
                for (k, block) in raw.chunks(BLOCK * row.bytes).enumerate() {
                    if stop.is_set() {
                        return Err(threads::interrupted());
                    }
                    let floats = &mut floats[..block.len() / row.bytes * row.width];
                    self.cast.apply(block, bytemuck::cast_slice_mut(floats));
                    let span = k * BLOCK..n.min((k + 1) * BLOCK);
                    blocks.push(Stats::of(floats, row.width, (&examples[span.clone()], &tokens[span]))?);
                }
                values.lock().unwrap_or_else(PoisonError::into_inner).push(floats);
                Ok(blocks)
            });
            spare.lock().unwrap_or_else(PoisonError::into_inner).push(mine);
            blocks
        };
        let mut all = Sums::default();
        make_ahead((readers, 2 * readers), parts, &sum, |next| {
            let mut done = 0;
            for (first, picks) in self.waves() {
                let mut sums = Stats::new(row.width)?;
                while sums.rows < picks.end - picks.start {
                    let Some(blocks) = next(&mut *watch)? else {
                        return Err(Error::new(Kind::Internal, "fewer blocks than rows"));
                    };
                    blocks.iter().for_each(|block| sums.join(block));
                }
                done += sums.rows;
                all.push(SumNode { first, level: 0, sums })?;
                progress(done);
                if watch() {
                    return Err(threads::interrupted());
                }
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Other rows: those that must be decoded are read by all threads together, in large parts.
    fn in_waves(&self, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Sums> {
        let width = self.rows.row().width;
        let mut all = Sums::default();
        let staged = self.rows.decodes();
        let mut done = 0;
        for (first, picks) in self.waves() {
            let (examples, tokens) = self.ids(picks);
            let read = |from: usize, to: usize, out: &mut [f64], watch: Watch<'_>| -> Result<()> {
                let pick =
                    Pick::Tokens { examples: Ints::Each(&examples[from..to]), tokens: Ints::Each(&tokens[from..to]) };
                let out = Out::Dense(bytemuck::cast_slice_mut(out));
                self.rows.gather(Ints::One(self.group as i64), pick, to - from, self.cast, out, watch)
            };
            let n = examples.len();
            let mut stage = zeroed::<f64>(if staged { n * width } else { 0 })?;
            if staged {
                read(0, n, &mut stage, &mut *watch)?;
            }
            let work = |b: usize, stop: &Stop| -> Result<Stats> {
                let (from, to) = (b * BLOCK, ((b + 1) * BLOCK).min(n));
                let ids = (&examples[from..to], &tokens[from..to]);
                if staged {
                    Stats::of(&stage[from * width..to * width], width, ids)
                } else {
                    let mut values = zeroed::<f64>((to - from) * width)?;
                    read(from, to, &mut values, &mut || stop.is_set())?;
                    Stats::of(&values, width, ids)
                }
            };
            let mut sums = Stats::new(width)?;
            for block in threads::map(n.div_ceil(BLOCK), &work, &mut *watch)? {
                sums.join(&block);
            }
            done += sums.rows;
            all.push(SumNode { first, level: 0, sums })?;
            progress(done);
        }
        Ok(all)
    }
}

/// A reading thread's memory.
struct SummingThread {
    reader: BlockReader,
    /// Rows as stored.
    raw: Vec<u8>,
}

impl SummingThread {
    fn new(past_cache: bool, row: Row, at_once: usize) -> Result<SummingThread> {
        Ok(SummingThread { reader: BlockReader::new(past_cache)?, raw: zeroed(at_once * row.bytes)? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares the blocks' combination with one plain pass over all values.
        #[test]
        fn blocks_join_to_the_whole(values in prop::collection::vec(-1e3f64..1e3, 3..400), cut in 1usize..50, shift in -1e9f64..1e9) {
            let width = 3;
            let mut values: Vec<f64> = values.iter().map(|v| v + shift).collect();
            values.truncate(values.len() / width * width);
            values[0] = f64::NAN;
            values[1] = f64::NEG_INFINITY;
            let mut all = Stats::new(width).unwrap();
            for block in values.chunks(cut * width) {
                let ids: Vec<i64> = (0..block.len() / width).map(|k| k as i64).collect();
                all.join(&Stats::of(block, width, (&ids, &ids)).unwrap());
            }
            let n = values.len() / width;
            prop_assert_eq!(all.rows, n as u64);
            prop_assert_eq!((all.nan[0], all.infinite[1], all.norms.1), (1, 1, n as u64 - 1));
            for k in 0..width {
                let column: Vec<f64> = values.iter().skip(k).step_by(width).copied().filter(|x| x.is_finite()).collect();
                let mean = column.iter().sum::<f64>() / column.len().max(1) as f64;
                let squares: f64 = column.iter().map(|x| (x - mean) * (x - mean)).sum();
                prop_assert_eq!(all.finite[k], column.len() as u64);
                prop_assert!((all.mean[k] - mean).abs() <= 1e-12 * mean.abs().max(1.0));
                prop_assert!((all.squares[k] - squares).abs() <= 1e-6 * squares.max(1.0), "{} {}", all.squares[k], squares);
                prop_assert_eq!(all.min[k], column.iter().copied().fold(f64::INFINITY, f64::min));
                prop_assert_eq!(all.max[k], column.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            }
        }
    }
    fn bits(stats: &Stats) -> (Vec<u64>, Vec<u64>, Vec<u64>, Vec<u64>, u64, u64) {
        let of = |values: &[f64]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        (
            of(&stats.mean),
            of(&stats.squares),
            of(&stats.min),
            [&stats.finite[..], &stats.nan, &stats.infinite].concat(),
            stats.norms.0.to_bits(),
            stats.rows,
        )
    }

    proptest! {
        /// Any ranges of leaves join to the tree of all leaves, which is written down once more here, from its definition.
        #[test]
        fn ranges_of_leaves_join_to_the_same_bits(
            values in prop::collection::vec(prop::collection::vec(any::<f32>(), 2), 1..70),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
        ) {
            let leaf = |k: usize| Stats::of(&values[k].iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 2, (&[k as i64], &[k as i64])).unwrap();
            fn node(leaf: &dyn Fn(usize) -> Stats, first: usize, level: u32) -> Stats {
                if level == 0 {
                    return leaf(first);
                }
                let mut left = node(leaf, first, level - 1);
                left.join(&node(leaf, first + (1 << (level - 1)), level - 1));
                left
            }
            let n = values.len();
            let mut expected: Option<Stats> = None;
            let mut at = 0;
            for level in (0..8).rev().filter(|level| n >> level & 1 == 1) {
                let next = node(&leaf, at, level);
                at += 1 << level;
                match &mut expected {
                    None => expected = Some(next),
                    Some(all) => all.join(&next),
                }
            }
            let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut.index(n + 1)).collect();
            bounds.extend([0, n]);
            bounds.sort_unstable();
            let mut all = Sums::default();
            for range in bounds.windows(2) {
                let mut part = Sums::default();
                for k in range[0]..range[1] {
                    part.push(SumNode { first: k as u64, level: 0, sums: leaf(k) }).unwrap();
                }
                prop_assert!(part.nodes().len() <= 2 * 7);
                for next in part.nodes() {
                    all.push(next.clone()).unwrap();
                }
            }
            prop_assert_eq!(all.nodes().len(), n.count_ones() as usize);
            let (all, expected) = (all.total().unwrap(), expected.unwrap());
            prop_assert_eq!(bits(&all), bits(&expected));
            prop_assert_eq!(all.summary, expected.summary);
        }

        /// Numbers of nodes come from files.
        #[test]
        fn holes_overlaps_and_odd_nodes_are_refused(
            first in prop_oneof![0u64..12, Just(u64::MAX), Just(1 << 63)],
            level in prop_oneof![0u32..3, 60u32..70],
            width in 0usize..3,
        ) {
            let mut all = Sums::default();
            all.push(SumNode { first: 4, level: 1, sums: Stats::new(1).unwrap() }).unwrap();
            let made = all.push(SumNode { first, level, sums: Stats::new(width).unwrap() });
            prop_assert_eq!(made.is_ok(), first == 6 && level <= 1 && width == 1);
            let expected: &[(u64, u32)] = match (made.is_ok(), level) {
                (true, 1) => &[(4, 2)],
                (true, _) => &[(4, 1), (6, 0)],
                (false, _) => &[(4, 1)],
            };
            prop_assert_eq!(all.nodes().iter().map(|node| (node.first, node.level)).collect::<Vec<_>>(), expected);
        }
    }
}
