//! Statistics of all rows in one pass: mean, variance and extremes of each element, and a [`summary`] of the rows.
//!
//! Rows are divided into leaves of fixed size, leaves into parts, and parts into blocks. A thread reads and sums a [`part`]; parts of
//! a leaf are combined in order, and leaves in a [`tree`]. All sums are float64. Means and sums of squared distances are combined as
//! in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979. These sizes depend
//! on the size of a row only, so the result has the same bits for any number of threads. NaN and infinite values are counted and
//! excluded.

mod part;
mod reading;
pub mod summary;
#[cfg(test)]
mod tests;
mod tree;

use std::ops::Range;

use self::part::Summer;
use self::reading::{Picked, part_rows, readers};
use self::summary::Summary;
pub use self::tree::{SumNode, Sums};
use super::select::Selection;
use crate::error::{Error, Kind, Result};
use crate::gather::blocks::BlockReader;
use crate::layout::row::Row;
use crate::memory::limit::memory_limit;
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::threads::{self, Stop, Watch};

/// Rows per block: their sums are relative to one of their values.
const BLOCK: usize = 128;
/// Bytes per part, unless one block is larger.
const PART_BYTES: usize = 2 << 20;
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

    /// Adds the statistics of the rows that follow.
    pub fn join(&mut self, next: &Stats) {
        self.rows += next.rows;
        self.summary.join(&next.summary);
        self.norms = (self.norms.0 + next.norms.0, self.norms.1 + next.norms.1);
        for k in 0..self.mean.len() {
            let weights = Weights::of(self.finite[k], next.finite[k]);
            weights.join((&mut self.mean[k], &mut self.squares[k]), (next.mean[k], next.squares[k]));
            self.finite[k] += next.finite[k];
            // Not `f64::min`, which may return either of 0.0 and -0.0.
            self.min[k] = if next.min[k] < self.min[k] { next.min[k] } else { self.min[k] };
            self.max[k] = if next.max[k] > self.max[k] { next.max[k] } else { self.max[k] };
            self.nan[k] += next.nan[k];
            self.infinite[k] += next.infinite[k];
        }
    }
}

/// The numbers of values in two sets, by which their means and sums of squared distances are combined.
#[derive(Clone, Copy)]
struct Weights {
    numbers: (u64, u64),
    /// The second set's part of all values.
    share: f64,
    /// The weight of the squared distance of the means.
    between: f64,
}

impl Weights {
    #[inline(always)]
    fn of(first: u64, second: u64) -> Weights {
        let (a, b) = (first as f64, second as f64);
        Weights { numbers: (first, second), share: b / (a + b), between: a * b / (a + b) }
    }

    /// Adds the second set to the first. Source: Chan, Golub and LeVeque, see the module.
    #[inline(always)]
    fn join(self, (mean, squares): (&mut f64, &mut f64), next: (f64, f64)) {
        match self.numbers {
            (_, 0) => (),
            (0, _) => (*mean, *squares) = next,
            _ => {
                let away = next.0 - *mean;
                *mean += away * self.share;
                *squares += next.1 + away * away * self.between;
            }
        }
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
    // Errors before rows are read.
    Summer::new(row)?;
    let count = selection.len().div_ceil(leaf_rows(row));
    if leaves.start > leaves.end || leaves.end > count {
        let detail = format!("leaves {} to {} of {count} are out of range", leaves.start, leaves.end);
        return Err(Error::new(Kind::OutOfRange, detail));
    }
    let source = Picked { rows, group, selection, leaves };
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
    let source = Picked { rows, group, selection, leaves };
    let (threads, at_once) = (threads::num_threads() as u64, part_rows(row));
    let of_part = total.min(at_once as u64);
    // Eight arrays, and lists of a few numbers for each row.
    let sums = (8 * row.width * 8) as u64 + of_part * 3 * 16;
    let summing = threads * Summer::memory(row, of_part);
    if !rows.reads_blocks() {
        let held = leaf_rows(row).min(total);
        let raw = if rows.decodes() { held } else { threads * of_part } * row.bytes as u64;
        return Ok(SumNeeds { read: None, memory: raw + held * 16 + summing + held.div_ceil(at_once as u64) * sums });
    }
    let past_cache = total.saturating_mul(row.bytes as u64) > memory_limit() / 2;
    let (mut reader, mut raw, stop) =
        (BlockReader::counting(past_cache)?, zeroed(at_once * row.bytes)?, Stop::default());
    for picks in source.parts() {
        source.read(picks, &mut raw, &mut reader, &stop)?;
        if watch() {
            return Err(threads::interrupted());
        }
    }
    let (parts, counted, readers) = (total.div_ceil(at_once as u64), reader.counted(), readers(row) as u64);
    let memory = parts.min(readers) * (raw.len() as u64 + counted.memory())
        + parts.min(2 * readers) * sums
        + parts.min(threads) * Summer::memory(row, of_part);
    Ok(SumNeeds { read: Some(counted.bytes), memory })
}
