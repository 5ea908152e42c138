//! What rows look like besides their sums: zeros, norms, norms by position, the largest rows and columns, repeated rows.
//!
//! Every part is an integer count, or a list of the largest or smallest of a fixed length, so that summaries of any parts, joined in
//! any order, are those of the whole:
//!
//! - *Norms*: counts in bins of equal bits: the exponent and [`MANTISSA_BITS`] bits of the mantissa of a float64 (as in the
//!   high dynamic range histogram, hdrhistogram.org). The middle of a bin is within 1/256 of each norm in it.
//! - *Norms by position*: counts in bins with [`BAND_BITS`] bits of the mantissa, whose middle is within 1/16, for each position.
//! - *Largest columns*: a column whose largest magnitude is among the [`LARGEST`] of all rows is among those of the block where it is.
//! - *Repeated rows*: of rows with finite norms, the [`HASHES`] smallest hashes and how often each came (bottom-k sampling: Cohen
//!   and Kaplan, "Summarizing data using bottom-k sketches", PODC 2007): a uniform sample of the different rows; all of them, if
//!   they are fewer.
//!
//! Norms by position are sums of floats: they have the same bits if parts are joined in the tree of [`super::tree`].

use crate::error::Result;
use crate::memory::zeroed;

/// Bits of the mantissa that decide the bin of a norm.
pub const MANTISSA_BITS: u32 = 7;
const SHIFT: u32 = f64::MANTISSA_DIGITS - 1 - MANTISSA_BITS;
/// Bits of the mantissa that decide the bin of a norm at a position.
pub const BAND_BITS: u32 = 3;
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

/// Values by ascending key.
pub type Sorted<K, V> = Vec<(K, V)>;

/// A summary of rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Summary {
    /// Zeros of each column.
    pub zeros: Vec<u64>,
    /// Rows of finite norms, by bin.
    pub norms: Sorted<u32, u64>,
    /// Sum of the finite norms and number of their rows, by [`position`].
    pub positions: Sorted<u32, (f64, u64)>,
    /// Rows of finite norms, by [`position`] and bin.
    pub bands: Sorted<(u32, u32), u64>,
    /// The rows of the largest finite norms, the largest first; of equal ones the first in the dataset.
    pub largest_rows: Vec<LargestRow>,
    /// The columns of the largest finite magnitudes, the largest first.
    pub largest_columns: Vec<LargestColumn>,
    /// Rows by hash, for the smallest hashes.
    pub hashes: Sorted<u64, u64>,
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

/// A hash of a stored row whose smallest values are a uniform sample: eight lanes of folded products, as in wyhash (Wang Yi), each
/// of 16 bytes, and MurmurHash3's finalizer.
#[inline(always)]
pub(super) fn hash(row: &[u8]) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    let fold = |a: u64, b: u64| {
        let product = u128::from(a) * u128::from(b);
        product as u64 ^ (product >> 64) as u64
    };
    let keys = [1, 3, 5, 7, 9, 11, 13, 15].map(|k: u64| ODD.wrapping_mul(k));
    let mut lanes = keys;
    let (whole, rest) = row.as_chunks::<128>();
    for part in whole {
        for ((lane, key), pair) in lanes.iter_mut().zip(keys).zip(part.as_chunks::<16>().0) {
            let [a, b] = bytemuck::must_cast::<[u8; 16], [u64; 2]>(*pair);
            *lane = fold(a ^ key, b ^ *lane);
        }
    }
    let all = rest.chunks(8).fold(row.len() as u64, |all, part| {
        let mut word = [0; 8];
        word[..part.len()].copy_from_slice(part);
        fold(all ^ ODD, u64::from_ne_bytes(word) ^ keys[3])
    });
    let mut all = lanes.iter().fold(all, |all, lane| (all.rotate_left(23) ^ lane).wrapping_mul(ODD));
    for odd in [0xff51_afd7_ed55_8ccd_u64, 0xc4ce_b9fe_1a85_ec53] {
        all = (all ^ (all >> 33)).wrapping_mul(odd);
    }
    all ^ (all >> 33)
}

/// What the sums of a part have found on their way, row by row.
#[derive(Default)]
pub(super) struct RowFacts {
    pub(super) norms: Vec<f64>,
    pub(super) hashes: Vec<u64>,
    /// Keys to sort and count.
    keys: Vec<u32>,
}

impl RowFacts {
    /// Bytes of memory for a row.
    pub(super) const BYTES: u64 = 8 + 8 + 4;

    pub(super) fn clear(&mut self) {
        self.norms.clear();
        self.hashes.clear();
    }

    /// How often each key comes.
    fn count<K>(&mut self, keys: impl Iterator<Item = u32>, key: impl Fn(u32) -> K) -> Sorted<K, u64> {
        self.keys.clear();
        self.keys.extend(keys);
        self.keys.sort_unstable();
        self.keys.chunk_by(|a, b| a == b).map(|each| (key(each[0]), each.len() as u64)).collect()
    }
}

/// Adds values to those of the same keys.
fn merge<K: Ord + Copy, V: Copy>(mine: &mut Sorted<K, V>, next: &[(K, V)], add: impl Fn(&mut V, V)) {
    let mut merged = Vec::with_capacity(mine.len() + next.len());
    let mut old = mine.iter().copied().peekable();
    for (key, value) in next {
        while let Some(each) = old.next_if(|(other, _)| other < key) {
            merged.push(each);
        }
        match old.next_if(|(other, _)| other == key) {
            Some((_, mut both)) => {
                add(&mut both, *value);
                merged.push((*key, both));
            }
            None => merged.push((*key, *value)),
        }
    }
    merged.extend(old);
    *mine = merged;
}

impl Summary {
    /// The summary of no rows.
    pub fn new(width: usize) -> Result<Summary> {
        Ok(Summary { zeros: zeroed(width)?, ..Summary::default() })
    }

    /// The summary of a part. `ids`: example and token of each row.
    pub(super) fn of(
        facts: &mut RowFacts,
        (examples, tokens): (&[i64], &[i64]),
        zeros: Vec<u64>,
        largest_columns: Vec<LargestColumn>,
    ) -> Summary {
        let mut made = Summary { zeros, largest_columns, ..Summary::default() };
        made.keep_columns();
        // Rows of NaN are often equal, and have a count of their own.
        let mut norms = facts.norms.iter();
        facts.hashes.retain(|_| norms.next().is_some_and(|norm| norm.is_finite()));
        facts.hashes.sort_unstable();
        let kinds = facts.hashes.chunk_by(|a, b| a == b).map(|each| (each[0], each.len() as u64));
        made.hashes = kinds.take(HASHES).collect();
        let norms = std::mem::take(&mut facts.norms);
        let finite = || norms.iter().enumerate().filter(|(_, norm)| norm.is_finite());
        made.norms = facts.count(finite().map(|(_, norm)| bin(*norm)), |bin| bin);
        let at = |row: usize| position(tokens[row] as u64);
        // 12 bits of exponent and BAND_BITS of the mantissa, below a position.
        let keys = finite().map(|(row, norm)| at(row) << 16 | bin(*norm) >> (MANTISSA_BITS - BAND_BITS));
        made.bands = facts.count(keys, |key| (key >> 16, key & 0xffff));
        // Rows of a position are added in order.
        let mut sums: Vec<(f64, u64)> = vec![];
        for (row, norm) in finite() {
            let at = at(row) as usize;
            if sums.len() <= at {
                sums.resize(at + 1, (0.0, 0));
            }
            sums[at] = (sums[at].0 + norm, sums[at].1 + 1);
            if made.largest_rows.len() < LARGEST || made.largest_rows.last().is_some_and(|last| *norm >= last.norm) {
                made.largest_rows.push(LargestRow { norm: *norm, place: (examples[row] as u64, tokens[row] as u64) });
                made.keep_rows();
            }
        }
        let seen = (0..).zip(sums).filter(|(_, (_, count))| *count > 0);
        made.positions = seen.collect();
        facts.norms = norms;
        made
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
        let count = |n: &mut u64, more: u64| *n += more;
        merge(&mut self.norms, &next.norms, count);
        merge(&mut self.bands, &next.bands, count);
        merge(&mut self.positions, &next.positions, |mine, (sum, count)| *mine = (mine.0 + sum, mine.1 + count));
        // Larger hashes would be cut off again.
        let last = self.hashes.last().map_or(0, |(last, _)| *last);
        let useful = if self.hashes.len() < HASHES {
            next.hashes.len()
        } else {
            next.hashes.partition_point(|(h, _)| *h <= last)
        };
        merge(&mut self.hashes, &next.hashes[..useful], count);
        self.hashes.truncate(HASHES);
        self.largest_rows.extend_from_slice(&next.largest_rows);
        self.keep_rows();
        self.largest_columns.extend_from_slice(&next.largest_columns);
        self.keep_columns();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::collections::BTreeMap;

    use super::super::part::Summer;
    use super::*;
    use crate::dtype::DType;
    use crate::layout::row::Row;
    use crate::stream::rescale::norm_of;
    use proptest::prelude::*;

    fn summary(rows: &[f64], width: usize, first: usize) -> Summary {
        let (examples, tokens): (Vec<i64>, Vec<i64>) =
            (first..first + rows.len() / width).map(|n| ((n / 5) as i64, (n % 5 * 40) as i64)).unzip();
        let mut summer = Summer::new(Row::new(width as u64, DType::F64).unwrap()).unwrap();
        summer.sum(bytemuck::cast_slice(rows), (&examples, &tokens)).unwrap().summary
    }

    fn of_hashes(values: impl Iterator<Item = (u64, u64)>) -> Summary {
        let mut made = Summary::default();
        let mut hashes: Vec<(u64, u64)> = values.map(|(x, n)| (hash(&x.to_le_bytes()), n)).collect();
        hashes.sort_unstable();
        for (hash, n) in hashes {
            match made.hashes.last_mut() {
                Some((last, count)) if *last == hash => *count += n,
                _ => made.hashes.push((hash, n)),
            }
        }
        made.hashes.truncate(HASHES);
        made
    }

    proptest! {
        /// Against plain sorting and counting of all rows at once.
        #[test]
        fn joined_blocks_are_what_counting_finds(
            rows in prop::collection::vec(prop_oneof![
                3 => prop::collection::vec(prop_oneof![20 => Just(0.0), 20 => Just(7.5), 20 => -1e3f64..1e3, 1 => Just(f64::NAN)], 20),
                1 => prop::sample::select(vec![0.0, 7.5, f64::NAN]).prop_map(|x| vec![x; 20]),
            ], 1..80),
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
            prop_assert_eq!(all.norms.iter().map(|(_, n)| n).sum::<u64>(), norms.len() as u64);
            prop_assert_eq!(all.positions.iter().map(|(_, (_, n))| n).sum::<u64>(), norms.len() as u64);
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
            for (n, _) in &norms {
                *kinds.entry(rows[*n].iter().map(|x| x.to_bits()).collect()).or_default() += 1;
            }
            let (mut found, mut expected): (Vec<u64>, Vec<u64>) = (all.hashes.into_iter().map(|(_, n)| n).collect(), kinds.into_values().collect());
            found.sort_unstable();
            expected.sort_unstable();
            prop_assert_eq!(found, expected);
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

    proptest! {
        #[test]
        fn hashes_are_those_of_the_whole_in_any_order(parts in prop::collection::vec(prop::collection::vec(0u64..3000, 0..2000), 1..5)) {
            let of = |values: &[u64]| of_hashes(values.iter().map(|x| (*x, 1)));
            let (mut forward, mut backward) = (Summary::default(), Summary::default());
            parts.iter().for_each(|part| forward.join(&of(part)));
            parts.iter().rev().for_each(|part| backward.join(&of(part)));
            prop_assert_eq!(&forward.hashes, &backward.hashes);
            prop_assert_eq!(&forward.hashes, &of(&parts.concat()).hashes);
        }
    }

    #[test]
    fn the_smallest_hashes_sample_rows_evenly() {
        // 40,000 different rows, every tenth twice: the sample finds a tenth of them repeated.
        let all = of_hashes((0..40_000).map(|k| (k, if k % 10 == 0 { 2 } else { 1 })));
        let repeated = all.hashes.iter().filter(|(_, n)| *n > 1).count();
        assert_eq!(all.hashes.len(), HASHES);
        assert!((70..140).contains(&repeated), "{repeated} of {HASHES}");
    }
}
