//! What rows look like besides their sums: zeros, norms, norms by position, the largest rows and columns, repeated rows.
//!
//! Every part is an integer count, or a list of the largest or smallest of a fixed length, so that summaries of any parts, joined in
//! any order, are those of the whole:
//!
//! - *Norms*: counts in bins of equal bits: the exponent and [`MANTISSA_BITS`] bits of the mantissa of a float64 (as in the
//!   high dynamic range histogram, hdrhistogram.org). The middle of a bin is within 1/256 of each norm in it.
//! - *Largest columns*: a column whose largest magnitude is among the [`LARGEST`] of all rows is among those of the block where it is.
//! - *Repeated rows*: the [`HASHES`] smallest hashes and how often each came (bottom-k sampling: Cohen and Kaplan, "Summarizing
//!   data using bottom-k sketches", PODC 2007): a uniform sample of the different rows; all of them, if they are fewer.
//!
//! Norms by position are sums of floats: they have the same bits if parts are joined in the tree of [`super::stats`].

use std::collections::BTreeMap;

use crate::error::Result;
use crate::memory::zeroed;

/// Bits of the mantissa that tell the bin of a norm.
pub const MANTISSA_BITS: u32 = 7;
const SHIFT: u32 = f64::MANTISSA_DIGITS - 1 - MANTISSA_BITS;
/// Number of largest rows and columns that are kept.
pub const LARGEST: usize = 16;
/// Number of hashes that are kept.
pub const HASHES: usize = 1024;
/// Positions up to this are counted each; larger ones in 8 ranges for each power of two.
const EXACT_POSITIONS: u64 = 64;

/// The largest magnitude of a column, and where it is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LargestColumn {
    /// The column's number.
    pub column: u64,
    /// The magnitude.
    pub magnitude: f64,
    /// Example and token of the first row that has it.
    pub place: (u64, u64),
}

/// A row of a large norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LargestRow {
    /// The L2 norm.
    pub norm: f64,
    /// Example and token.
    pub place: (u64, u64),
}

/// A summary of rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Zeros of each column.
    pub zeros: Vec<u64>,
    /// Rows of finite norms, by bin.
    pub norms: BTreeMap<u32, u64>,
    /// Sum of the finite norms and number of their rows, by [`position`].
    pub positions: BTreeMap<u32, (f64, u64)>,
    /// The rows of the largest finite norms, the largest first; of equal ones the first in the dataset.
    pub largest_rows: Vec<LargestRow>,
    /// The columns of the largest finite magnitudes, the largest first.
    pub largest_columns: Vec<LargestColumn>,
    /// Rows by hash, for the smallest hashes.
    pub hashes: BTreeMap<u64, u64>,
}

/// The bin of a finite norm.
fn bin(norm: f64) -> u32 {
    (norm.to_bits() >> SHIFT) as u32
}

/// The number of a token's position: itself below [`EXACT_POSITIONS`], then 8 for each power of two.
fn position(token: u64) -> u32 {
    if token < EXACT_POSITIONS {
        return token as u32;
    }
    let power = token.ilog2();
    let eighth = (token >> (power - 3)) & 7;
    EXACT_POSITIONS as u32 + (power - EXACT_POSITIONS.ilog2()) * 8 + eighth as u32
}

/// A hash of a row whose smallest values are a uniform sample: four lanes of folded products, as in wyhash (Wang Yi), each of two
/// values, and MurmurHash3's finalizer.
#[inline]
fn hash(row: &[f64]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        product as u64 ^ (product >> 64) as u64
    };
    let keys = [1, 3, 5, 7].map(|k: u64| ODD.wrapping_mul(k));
    let mut lanes = keys;
    let (whole, rest) = row.as_chunks::<8>();
    for part in whole {
        let (pairs, _) = part.as_chunks::<2>();
        for ((lane, key), [a, b]) in lanes.iter_mut().zip(keys).zip(pairs) {
            *lane = fold(a.to_bits() ^ key, b.to_bits() ^ *lane);
        }
    }
    let all = rest.iter().fold(row.len() as u64, |all, x| fold(all ^ ODD, x.to_bits() ^ keys[3]));
    let mut all = lanes.iter().fold(all, |all, lane| (all.rotate_left(23) ^ lane).wrapping_mul(ODD));
    for odd in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        all = (all ^ (all >> 33)).wrapping_mul(odd);
    }
    all ^ (all >> 33)
}

/// What the sums of a block have found on their way, row by row.
pub(super) struct Seen {
    zeros: Vec<u64>,
    /// Of each row.
    norms: Vec<f64>,
    hashes: Vec<u64>,
}

impl Seen {
    pub(super) fn new(width: usize, rows: usize) -> Result<Seen> {
        Ok(Seen { zeros: zeroed(width)?, norms: Vec::with_capacity(rows), hashes: Vec::with_capacity(rows) })
    }

    /// Adds a row: its norm, and whether any of its values is 0.
    #[inline(always)]
    pub(super) fn add(&mut self, row: &[f64], norm: f64, zero: bool) {
        if zero {
            self.zeros.iter_mut().zip(row).for_each(|(n, x)| *n += u64::from(*x == 0.0));
        }
        self.norms.push(norm);
        self.hashes.push(hash(row));
    }
}

/// How often each value comes.
fn counts<T: Ord + Copy>(mut values: Vec<T>) -> BTreeMap<T, u64> {
    values.sort_unstable();
    values.chunk_by(|a, b| a == b).map(|each| (each[0], each.len() as u64)).collect()
}

impl Summary {
    /// The summary of no rows.
    pub fn new(width: usize) -> Result<Summary> {
        Ok(Summary { zeros: zeroed(width)?, ..Summary::default() })
    }

    /// The summary of a block of at most [`HASHES`] rows. `largest`: the largest finite magnitude of each column. `ids`: example and
    /// token of each row.
    pub(super) fn of(rows: &[f64], largest: &[f64], (examples, tokens): (&[i64], &[i64]), seen: Seen) -> Summary {
        let width = largest.len();
        let Seen { zeros, norms, hashes } = seen;
        let finite = norms.iter().filter(|norm| norm.is_finite());
        let (norm_bins, hashes) = (counts(finite.map(|norm| bin(*norm)).collect()), counts(hashes));
        let mut made = Summary { zeros, norms: norm_bins, hashes, ..Summary::default() };
        let place = |row: usize| (examples[row] as u64, tokens[row] as u64);
        for (number, norm) in norms.into_iter().enumerate() {
            if !norm.is_finite() {
                continue;
            }
            let (token_sum, count) = made.positions.entry(position(tokens[number] as u64)).or_default();
            (*token_sum, *count) = (*token_sum + norm, *count + 1);
            if made.largest_rows.len() < LARGEST || made.largest_rows.last().is_some_and(|last| norm >= last.norm) {
                made.largest_rows.push(LargestRow { norm, place: place(number) });
                made.keep_rows();
            }
        }
        let mut columns: Vec<usize> = (0..width).filter(|k| largest[*k] > 0.0).collect();
        if columns.len() > LARGEST {
            columns.select_nth_unstable_by(LARGEST - 1, |a, b| largest[*b].total_cmp(&largest[*a]).then(a.cmp(b)));
            columns.truncate(LARGEST);
        }
        for column in columns {
            let magnitude = largest[column];
            let first = rows.iter().skip(column).step_by(width).position(|x| x.abs() == magnitude);
            if let Some(row) = first {
                made.largest_columns.push(LargestColumn { column: column as u64, magnitude, place: place(row) });
            }
        }
        made.keep_columns();
        made
    }

    fn add_hash(&mut self, hash: u64, count: u64) {
        if self.hashes.len() >= HASHES && self.hashes.last_key_value().is_some_and(|(last, _)| hash > *last) {
            return;
        }
        *self.hashes.entry(hash).or_default() += count;
        if self.hashes.len() > HASHES {
            self.hashes.pop_last();
        }
    }

    fn keep_rows(&mut self) {
        self.largest_rows.sort_by(|a, b| b.norm.total_cmp(&a.norm).then(a.place.cmp(&b.place)));
        self.largest_rows.truncate(LARGEST);
    }

    /// One of each column, the largest first.
    fn keep_columns(&mut self) {
        self.largest_columns.sort_by(|a, b| {
            a.column.cmp(&b.column).then(b.magnitude.total_cmp(&a.magnitude)).then(a.place.cmp(&b.place))
        });
        self.largest_columns.dedup_by_key(|each| each.column);
        self.largest_columns.sort_by(|a, b| b.magnitude.total_cmp(&a.magnitude).then(a.column.cmp(&b.column)));
        self.largest_columns.truncate(LARGEST);
    }

    /// Adds the summary of other rows.
    pub fn join(&mut self, next: &Summary) {
        self.zeros.iter_mut().zip(&next.zeros).for_each(|(n, more)| *n += more);
        for (bin, count) in &next.norms {
            *self.norms.entry(*bin).or_default() += count;
        }
        for (position, (sum, count)) in &next.positions {
            let mine = self.positions.entry(*position).or_default();
            *mine = (mine.0 + sum, mine.1 + count);
        }
        let last = self.hashes.last_key_value().map_or(0, |(last, _)| *last);
        let full = self.hashes.len() >= HASHES;
        for (hash, count) in next.hashes.iter().take_while(|(hash, _)| !full || **hash <= last) {
            self.add_hash(*hash, *count);
        }
        self.largest_rows.extend_from_slice(&next.largest_rows);
        self.keep_rows();
        self.largest_columns.extend_from_slice(&next.largest_columns);
        self.keep_columns();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::rescale::norm_of;
    use super::*;
    use proptest::prelude::*;

    fn summary(rows: &[f64], width: usize, first: usize) -> Summary {
        let largest: Vec<f64> = (0..width)
            .map(|k| rows.iter().skip(k).step_by(width).filter(|x| x.is_finite()).fold(0.0, |a: f64, x| a.max(x.abs())))
            .collect();
        let (examples, tokens): (Vec<i64>, Vec<i64>) =
            (first..first + rows.len() / width).map(|n| ((n / 5) as i64, (n % 5 * 40) as i64)).unzip();
        let mut seen = Seen::new(width, rows.len() / width).unwrap();
        rows.chunks_exact(width).for_each(|row| seen.add(row, norm_of(row), row.contains(&0.0)));
        Summary::of(rows, &largest, (&examples, &tokens), seen)
    }

    proptest! {
        /// Against plain sorting and counting of all rows at once.
        #[test]
        fn joined_blocks_are_what_counting_finds(
            rows in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0.0), Just(7.5), -1e3f64..1e3, Just(f64::NAN)], 20), 1..80),
            cut in 1usize..30,
        ) {
            let width = 20;
            let flat: Vec<f64> = rows.concat();
            let mut all = Summary::new(width).unwrap();
            for (k, block) in flat.chunks(cut * width).enumerate() {
                all.join(&summary(block, width, k * cut));
            }
            let place = |n: usize| ((n / 5) as u64, (n % 5 * 40) as u64);
            let norms: Vec<(usize, f64)> =
                rows.iter().enumerate().map(|(n, row)| (n, norm_of(&row[..]))).filter(|(_, norm)| norm.is_finite()).collect();
            let mut largest: Vec<LargestRow> = norms.iter().map(|(n, norm)| LargestRow { norm: *norm, place: place(*n) }).collect();
            largest.sort_by(|a, b| b.norm.total_cmp(&a.norm).then(a.place.cmp(&b.place)));
            largest.truncate(LARGEST);
            prop_assert_eq!(&all.largest_rows, &largest);
            prop_assert_eq!(all.norms.values().sum::<u64>(), norms.len() as u64);
            prop_assert_eq!(all.positions.values().map(|(_, n)| n).sum::<u64>(), norms.len() as u64);
            for column in 0..width {
                let values = rows.iter().map(|row| row[column]);
                prop_assert_eq!(all.zeros[column], values.filter(|x| *x == 0.0).count() as u64);
            }
            let mut columns: Vec<LargestColumn> = (0..width).filter_map(|column| {
                let best = rows.iter().map(|row| row[column].abs()).filter(|x| x.is_finite()).fold(0.0, f64::max);
                let first = rows.iter().position(|row| row[column].abs() == best)?;
                (best > 0.0).then_some(LargestColumn { column: column as u64, magnitude: best, place: place(first) })
            }).collect();
            columns.sort_by(|a, b| b.magnitude.total_cmp(&a.magnitude).then(a.column.cmp(&b.column)));
            columns.truncate(LARGEST);
            prop_assert_eq!(&all.largest_columns, &columns);
            let mut kinds: BTreeMap<Vec<u64>, u64> = BTreeMap::new();
            for row in &rows {
                *kinds.entry(row.iter().map(|x| x.to_bits()).collect()).or_default() += 1;
            }
            let (mut found, mut expected): (Vec<u64>, Vec<u64>) = (all.hashes.into_values().collect(), kinds.into_values().collect());
            found.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(found, expected);
        }

        #[test]
        fn hashes_are_those_of_the_whole_in_any_order(parts in prop::collection::vec(prop::collection::vec(0u64..3000, 0..2000), 1..5)) {
            let of = |values: &[u64]| {
                let mut made = Summary::new(0).unwrap();
                values.iter().for_each(|x| made.add_hash(hash(&[*x as f64]), 1));
                made
            };
            let (mut forward, mut backward) = (Summary::new(0).unwrap(), Summary::new(0).unwrap());
            parts.iter().for_each(|part| forward.join(&of(part)));
            parts.iter().rev().for_each(|part| backward.join(&of(part)));
            prop_assert_eq!(&forward.hashes, &backward.hashes);
            prop_assert_eq!(&forward.hashes, &of(&parts.concat()).hashes);
        }

        #[test]
        fn bins_hold_norms_within_a_part_in_256_of_their_middle(norm in 1e-300f64..1e300) {
            let low = f64::from_bits(u64::from(bin(norm)) << SHIFT);
            let high = f64::from_bits(u64::from(bin(norm) + 1) << SHIFT);
            prop_assert!(low <= norm && norm < high);
            prop_assert!(((low + high) / 2.0 - norm).abs() <= norm / 256.0);
        }

        #[test]
        fn positions_are_ordered_and_at_most_an_eighth_wide(a in 0u64..1 << 40, b in 0u64..1 << 40) {
            prop_assert_eq!(position(a.min(b)) <= position(a.max(b)), true);
            if position(a) == position(b) {
                prop_assert!(a == b || a.abs_diff(b) * 8 <= a.max(b));
            }
        }
    }

    #[test]
    fn the_smallest_hashes_sample_rows_evenly() {
        // 40,000 different rows, every tenth twice: the sample finds a tenth of them repeated.
        let mut all = Summary::new(0).unwrap();
        for k in 0..40_000 {
            all.add_hash(hash(&[f64::from(k), 1.0]), if k % 10 == 0 { 2 } else { 1 });
        }
        let repeated = all.hashes.values().filter(|n| **n > 1).count();
        assert_eq!(all.hashes.len(), HASHES);
        assert!((70..140).contains(&repeated), "{repeated} of {HASHES}");
    }
}
