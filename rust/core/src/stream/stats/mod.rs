//! Statistics of all rows in one pass: mean, variance and extremes of each element, and a [`summary`] of the rows.
//!
//! Rows are divided into leaves of fixed size, leaves into parts, and parts into blocks. A thread reads and sums a [`part`]; parts of
//! a leaf are combined in order, and leaves in a [`tree`]. All sums are float64. Means and sums of squared distances are combined as
//! in Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979. These sizes depend
//! on the size of a row only, so the result has the same bits for any number of threads. NaN and infinite values are counted and
//! excluded.

mod moments;
mod part;
mod reading;
pub mod summary;
#[cfg(test)]
mod tests;
mod tree;

use std::ops::Range;

pub use self::moments::Stats;
use self::part::Summer;
pub use self::reading::leaf_rows;
use self::reading::{Picked, part_rows, readers};
pub use self::tree::{SumNode, Sums};
use super::select::Selection;
use crate::error::{Error, Kind, Result};
use crate::gather::blocks::BlockReader;
use crate::memory::limit::memory_limit;
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::threads::{self, Stop, Watch};

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
#[expect(clippy::disallowed_methods, reason = "a counting reader reads nothing")]
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
    let (mut reader, mut raw, stop) = (BlockReader::counting(past_cache)?, zeroed(source.part_bytes())?, Stop::never());
    for picks in source.parts() {
        source.read(picks, &mut raw, &mut reader, stop)?;
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
