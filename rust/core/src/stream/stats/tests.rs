#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use super::reading::part_rows;
use super::summary::Summary;
use super::*;
use crate::dtype::{Cast, DType};
use crate::layout::row::Row;
use crate::stream::rescale::norm_of;
use proptest::prelude::*;

/// Statistics of rows of a type, from values that it has.
fn sums_of(dtype: DType, values: &[f64], width: usize, ids: (&[i64], &[i64])) -> Stats {
    let row = Row::new(width as u64, dtype).unwrap();
    let mut raw = vec![0u8; values.len() * row.bytes / width];
    Cast::between(DType::F64, dtype).unwrap().apply(bytemuck::cast_slice(values), &mut raw);
    Summer::new(row).unwrap().sum(&raw, ids).unwrap()
}

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
            all.join(&sums_of(DType::F64, block, width, (&ids, &ids)));
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
        let leaf = |k: usize| {
            let row: Vec<f64> = values[k].iter().map(|x| f64::from(*x)).collect();
            sums_of(DType::F32, &row, 2, (&[k as i64], &[k as i64]))
        };
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

/// Values that float16, bfloat16, float32 and float64 all have, and some that no sum takes.
fn values() -> impl Strategy<Value = f64> {
    prop_oneof![
        8 => (-127i32..128).prop_map(|k| f64::from(k) / 8.0),
        1 => prop_oneof![Just(0.0), Just(-0.0)],
        1 => prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(f64::NEG_INFINITY)],
    ]
}

/// Rows of one width; every width has its own remainder of eight, every number of rows its own of [`TOGETHER`] and [`BLOCK`].
fn table() -> impl Strategy<Value = Vec<Vec<f64>>> {
    (1usize..20, 1usize..300).prop_flat_map(|(width, rows)| {
        let row = prop_oneof![
            4 => prop::collection::vec((-127i32..128).prop_map(|k| f64::from(k) / 8.0), width),
            1 => prop::collection::vec(values(), width),
        ];
        prop::collection::vec(row, rows)
    })
}

proptest! {
    /// Against counting and two plain passes over each column, for each type, which all have these values.
    #[test]
    fn a_part_is_what_plain_loops_find(rows in table()) {
        let (width, n) = (rows[0].len(), rows.len());
        let ids: (Vec<i64>, Vec<i64>) = (0..n as i64).map(|k| (k / 7, k % 7 * 30)).unzip();
        let of = |dtype| sums_of(dtype, &rows.concat(), width, (&ids.0, &ids.1));
        let (made, short) = (of(DType::F32), of(DType::BF16));
        for made in [&made, &short] {
            prop_assert_eq!(made.rows, n as u64);
            for k in 0..width {
                let column: Vec<f64> = rows.iter().map(|row| row[k]).collect();
                let finite: Vec<f64> = column.iter().copied().filter(|x| x.is_finite()).collect();
                let mean = finite.iter().sum::<f64>() / finite.len().max(1) as f64;
                let squares: f64 = finite.iter().map(|x| (x - mean) * (x - mean)).sum();
                prop_assert_eq!(made.finite[k], finite.len() as u64);
                prop_assert_eq!(made.nan[k], column.iter().filter(|x| x.is_nan()).count() as u64);
                prop_assert_eq!(made.infinite[k], column.iter().filter(|x| x.is_infinite()).count() as u64);
                prop_assert_eq!(made.summary.zeros[k], column.iter().filter(|x| **x == 0.0).count() as u64);
                prop_assert!((made.mean[k] - mean).abs() <= 1e-12);
                prop_assert!((made.squares[k] - squares).abs() <= 1e-10 * squares.max(1.0));
                prop_assert_eq!(made.min[k], finite.iter().copied().fold(f64::INFINITY, f64::min));
                prop_assert_eq!(made.max[k], finite.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            }
            let norms: Vec<f64> = rows.iter().map(|row| norm_of(&row[..])).filter(|norm| norm.is_finite()).collect();
            prop_assert_eq!(made.norms, (norms.iter().sum(), norms.len() as u64));
        }
        for (dtype, same) in [(DType::F64, &made), (DType::F16, &short)] {
            let other = of(dtype);
            prop_assert_eq!(bits(&other), bits(same), "{:?}", dtype);
            let hashes = same.summary.hashes.clone();
            prop_assert_eq!(Summary { hashes, ..other.summary }, same.summary.clone(), "{:?}", dtype);
        }
        prop_assert_eq!(&made.summary.bands, &short.summary.bands);
    }

    /// Values of 16 bits are summed without a shift: also at the limits of their digits and exponents.
    #[test]
    fn squares_of_short_values_are_exact(codes in prop::collection::vec(0u16..0x7f80, 2..128), near in any::<bool>(), base in 0u16..0x7f00) {
        // Values that are neighbours, or of any exponent below half of the largest.
        let values: Vec<f64> = codes
            .iter()
            .map(|code| f64::from(f32::from_bits(u32::from(if near { base + code % 3 } else { code % 0x5f00 }) << 16)))
            .collect();
        let ids: Vec<i64> = (0..values.len() as i64).collect();
        let made = sums_of(DType::BF16, &values, 1, (&ids, &ids));
        let mean = values.iter().map(|x| x / values.len() as f64).sum::<f64>();
        let squares: f64 = values.iter().map(|x| (x - mean) * (x - mean)).sum();
        prop_assert!((made.squares[0] - squares).abs() <= 1e-11 * squares, "{} {}", made.squares[0], squares);
    }

    /// A thread's memory has nothing of the part before.
    #[test]
    fn parts_do_not_depend_on_the_part_before(first in table(), second in table()) {
        let width = first[0].len().min(second[0].len());
        let [first, second] = [first, second].map(|rows| {
            rows.iter().flat_map(|row| row[..width].iter().map(|x| *x as f32)).collect::<Vec<f32>>()
        });
        let mut summer = Summer::new(Row::new(width as u64, DType::F32).unwrap()).unwrap();
        let ids = |rows: &[f32]| (0..(rows.len() / width) as i64).collect::<Vec<_>>();
        let mut of = |rows: &[f32]| summer.sum(bytemuck::cast_slice(rows), (&ids(rows), &ids(rows))).unwrap();
        of(&first);
        let again = of(&second);
        let wide: Vec<f64> = second.iter().map(|x| f64::from(*x)).collect();
        let fresh = sums_of(DType::F32, &wide, width, (&ids(&second), &ids(&second)));
        prop_assert_eq!(bits(&again), bits(&fresh));
        prop_assert_eq!(again.summary, fresh.summary);
    }

    /// The first value of a block may be far from the others, and their mean far from 0.
    #[test]
    fn squares_are_exact_where_values_are_far_from_their_mean(
        noise in prop::collection::vec(-1f64..1.0, 1..128), outlier in -1e7f64..1e7, mean in -1e7f64..1e7,
    ) {
        let values: Vec<f64> = std::iter::once(outlier).chain(noise.iter().map(|x| mean + x)).collect();
        let ids: Vec<i64> = (0..values.len() as i64).collect();
        let made = sums_of(DType::F64, &values, 1, (&ids, &ids));
        let centre = values.iter().map(|x| x - mean).sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|x| (x - mean - centre) * (x - mean - centre)).sum();
        prop_assert!((made.squares[0] - squares).abs() <= 1e-9 * squares, "{} {}", made.squares[0], squares);
    }

    #[test]
    fn bands_are_the_norms_and_the_positions(rows in table()) {
        let (width, n) = (rows[0].len(), rows.len());
        let ids: (Vec<i64>, Vec<i64>) = (0..n as i64).map(|k| (k / 7, k % 7 * 30)).unzip();
        let made = sums_of(DType::F32, &rows.concat(), width, (&ids.0, &ids.1)).summary;
        let sum = |each: &mut dyn Iterator<Item = (u32, u64)>| {
            let mut all = std::collections::BTreeMap::new();
            each.for_each(|(key, count)| *all.entry(key).or_insert(0u64) += count);
            all
        };
        let by_position = sum(&mut made.bands.iter().map(|((at, _), count)| (*at, *count)));
        prop_assert_eq!(by_position, sum(&mut made.positions.iter().map(|(at, (_, count))| (*at, *count))));
        let by_bin = sum(&mut made.bands.iter().map(|((_, bin), count)| (*bin, *count)));
        prop_assert_eq!(by_bin, sum(&mut made.norms.iter().map(|(bin, count)| (*bin >> 4, *count))));
    }
}

#[test]
fn equal_values_have_no_variance() {
    let ids: Vec<i64> = (0..200).collect();
    let made = sums_of(DType::F64, &[0.1; 200], 1, (&ids, &ids));
    assert_eq!((made.squares[0], made.mean[0]), (0.0, 0.1));
    let huge = sums_of(DType::F64, &[1e300, 1e300, 2e300], 1, (&ids[..3], &ids[..3]));
    assert_eq!((huge.mean[0] / 1e300 * 3.0).round(), 4.0);
    assert_eq!((huge.squares[0], huge.norms.1), (f64::INFINITY, 3));
}

#[test]
fn finite_rows_of_any_size_have_their_norms() {
    for size in [1e-310, 1e-200, 1e200, 1e306] {
        let values = [3.0 * size, 4.0 * size, 1.0, 0.0, 0.0, 0.0, f64::INFINITY, 1.0, 12.0 * size, 5.0 * size];
        let ids: Vec<i64> = (0..5).collect();
        let stats = sums_of(DType::F64, &values, 2, (&ids, &ids));
        let expected = [13.0 * size, 5.0 * size, 1.0, 0.0];
        let total: f64 = expected.iter().sum();
        assert_eq!(stats.norms.1, 4);
        assert!((stats.norms.0 - total).abs() <= 1e-12 * total, "{} {total}", stats.norms.0);
        let mut largest: Vec<u64> = stats.summary.largest_rows.iter().map(|row| row.place.0).collect();
        if size < 1.0 {
            assert_eq!(largest.remove(0), 1);
        } else {
            assert_eq!(largest.remove(2), 1);
        }
        assert_eq!(largest, [4, 0, 2]);
    }
}

#[test]
fn parts_are_bounded_however_wide_rows_are() {
    for width in [1, 3000, 1 << 17, 1 << 20, 100 << 20] {
        let row = Row::new(width, DType::F32).unwrap();
        let rows = part_rows(row);
        assert!((1..=leaf_rows(row)).contains(&(rows as u64)), "{width}");
        assert!(rows * row.bytes <= row.bytes.max(64 << 20), "{width}");
    }
}
