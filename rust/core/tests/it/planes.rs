//! Packed rows: kernels give the bytes of naive loops, and blocks of any rows decode to them. A decoder written from the page of the
//! format is in the fuzz target `planes`.

use actshard_core::codec::planes::{HEADER, PackedBlock, decode, encode, encoded_len};
use actshard_core::kernels::planes::{Plane, append_merged, merge, split};
use actshard_core::kernels::prefix::{Lookups, Stream, decode_portably, decode_together};
use proptest::prelude::*;

fn rotated(value: u64, typesize: usize, sign: u32) -> u64 {
    let top = 8 * typesize - 1;
    let rest = (value << 1) & (u64::MAX >> (63 - top));
    rest | (value >> top) << sign
}

fn word(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// Bytes of values of `typesize` bytes, with `zeros` low bits cleared.
fn cleared(bytes: &[u8], typesize: usize, zeros: u32) -> Vec<u8> {
    let values = bytes.chunks_exact(typesize);
    values.flat_map(|value| (word(value) >> zeros << zeros).to_le_bytes().into_iter().take(typesize)).collect()
}

proptest! {
    #[test]
    fn planes_have_the_bytes_of_a_naive_loop_and_merge_to_the_values(
        bytes in prop::collection::vec(any::<u8>(), 0..6000),
        log in 0usize..4,
        zeros in 0u32..16,
        part in prop::array::uniform2(any::<prop::sample::Index>()),
    ) {
        let typesize = 1 << log;
        let zeros = zeros.min(8 * typesize as u32 - 1);
        let values = cleared(&bytes, typesize, zeros);
        let n = values.len() / typesize;
        let mut planes = vec![0x55; values.len()];
        let sign = split(&values, typesize, &mut planes);
        let magnitudes = values.chunks_exact(typesize).map(|value| word(value) & (u64::MAX >> (65 - 8 * typesize)));
        let all = magnitudes.fold(0, |all, value| all | value);
        prop_assert_eq!(sign, if all == 0 { 0 } else { all.trailing_zeros() });
        for (i, value) in values.chunks_exact(typesize).enumerate() {
            let expected = rotated(word(value), typesize, sign);
            for k in 0..typesize {
                prop_assert_eq!(planes[k * n + i], expected.to_le_bytes()[k]);
            }
        }
        let parts: Vec<Plane<'_>> = (0..typesize)
            .map(|k| &planes[k * n..(k + 1) * n])
            .map(|plane| match plane.first() {
                Some(first) if plane.iter().all(|byte| byte == first) => Plane::Constant(*first),
                _ => Plane::Bytes(plane),
            })
            .collect();
        let mut merged = vec![1, 2, 3];
        append_merged(&parts, n, sign, &mut merged);
        prop_assert_eq!(&merged[3..], &values[..]);
        let [a, b] = part.map(|index| index.index(n + 1));
        let some = a.min(b)..a.max(b);
        let mut merged = vec![0x55; some.len() * typesize];
        merge(&parts, some.clone(), sign, &mut merged);
        prop_assert_eq!(&merged[..], &values[some.start * typesize..some.end * typesize]);
    }

    #[test]
    fn streams_decoded_together_are_those_decoded_alone(
        bytes in prop::collection::vec(any::<u8>(), 0..800),
        starts in prop::array::uniform4(0usize..800),
        symbols in 0usize..600,
        cuts in prop::array::uniform4(0usize..600),
    ) {
        // Codes 0, 10 and 11 for the symbols 7, 8 and 9, as entries of as many as fit.
        let table: Vec<u64> = (0..2048u64).map(|bits| {
            let (mut entry, mut used, mut count) = (0, 0, 0);
            while count < 5 {
                let length = 1 + (bits >> (10 - used) & 1);
                if used + length > 11 {
                    break;
                }
                let symbol = if length == 1 { 7 } else { 8 + (bits >> (9 - used) & 1) };
                entry |= symbol << (8 * (count + 1));
                (used, count) = (used + length, count + 1);
                if used == 11 {
                    break;
                }
            }
            entry | used | count << 56
        }).collect();
        let table = Lookups::new(table.as_slice().try_into().unwrap()).unwrap();
        let bit = |at: usize| u64::from(bytes[at / 8] >> (7 - at % 8) & 1);
        let mut streams = [0, 1, 2, 3].map(|k| Stream {
            bit: starts[k].min(8 * bytes.len()),
            at: k * symbols,
            // Some streams are short, or empty.
            end: k * symbols + if cuts[k] % 3 == 0 { cuts[k].min(symbols) } else { symbols },
        });
        let begins = streams;
        let mut plane = vec![0; 4 * symbols];
        decode_together(&bytes, table, &mut streams, &mut plane);
        let (mut portable, mut same) = (begins, vec![0; 4 * symbols]);
        decode_portably(&bytes, table, &mut portable, &mut same);
        prop_assert_eq!(&same, &plane);
        for ((begin, end), other) in begins.iter().zip(&streams).zip(&portable) {
            prop_assert!(end.at <= end.end && end.bit <= 8 * bytes.len());
            prop_assert_eq!((end.at, end.bit), (other.at, other.bit));
            // It stops near an end only.
            prop_assert!(end.end - end.at < 40 || bytes.len() - end.bit / 8 < 8);
            let mut at = begin.bit;
            for symbol in &plane[begin.at..end.at] {
                let length = 1 + bit(at) as usize;
                let expected = if length == 1 { 7 } else { 8 + bit(at + 1) };
                prop_assert_eq!(u64::from(*symbol), expected);
                at += length;
            }
            prop_assert_eq!(at, end.bit);
        }
    }

    #[test]
    fn any_rows_return_and_take_at_most_a_header_more(
        scale in prop::collection::vec(0u32..12, 1..40),
        seed in any::<u64>(),
        count in 0usize..80,
        log in 0usize..4,
        zeros in 0u32..30,
        repeats in 0usize..5,
        copies in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..20),
        copied in prop::bool::ANY,
        picks in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let (typesize, width) = (1usize << log, scale.len());
        let mut state = seed;
        let mut rows = vec![];
        for _ in 0..count {
            for scale in &scale {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // Few high bits are set if the scale is large.
                let value = state >> (64 - 8 * typesize) >> (*scale).min(8 * typesize as u32 - 1);
                rows.extend(value.to_le_bytes().into_iter().take(typesize));
            }
        }
        let mut rows = cleared(&rows, typesize, zeros.min(8 * typesize as u32 - 1));
        let row = width * typesize;
        if copied && count > 0 {
            for (from, to) in copies {
                let from = from.index(count) * row;
                rows.copy_within(from..from + row, to.index(count) * row);
            }
        }
        for _ in 0..repeats.min(count) {
            rows.extend_from_within(rows.len() - row..);
        }
        let block = encode(&rows, typesize, width).unwrap();
        prop_assert!(block.len() <= rows.len() + HEADER);
        prop_assert_eq!(encoded_len(&block[..HEADER]).unwrap(), block.len() as u64);
        prop_assert_eq!(&encode(&rows, typesize, width).unwrap(), &block);
        prop_assert_eq!(&decode(&block, rows.len() as u64).unwrap(), &rows);
        let all = rows.len() / row;
        let numbers: Vec<u64> = picks.iter().filter(|_| all > 0).map(|pick| pick.index(all.max(1)) as u64).collect();
        check_rows(&block, &rows, row, &numbers);
        check_rows(&block, &rows, row, &(0..all as u64).collect::<Vec<_>>());
    }
}

/// Rows decoded apart are those of the whole block.
fn check_rows(block: &[u8], rows: &[u8], row: usize, numbers: &[u64]) {
    let parsed = PackedBlock::parse(block, rows.len() as u64).unwrap();
    assert_eq!((parsed.row(), parsed.decoded()), (row, rows.len()));
    let (mut made, mut next) = (vec![0x55; row], 0);
    parsed
        .rows(numbers, &mut |i, found| {
            assert_eq!(i, next);
            next += 1;
            found.write(&mut made);
            let begin = numbers[i] as usize * row;
            assert_eq!(made, rows[begin..begin + row], "row {}", numbers[i]);
        })
        .unwrap();
    assert_eq!(next, numbers.len());
    let outside = [numbers, &[(rows.len() / row) as u64]].concat();
    assert!(parsed.rows(&outside, &mut |_, _| panic!("a row that is not there")).is_err());
}

#[test]
fn a_table_whose_lookups_would_leave_their_bounds_is_refused() {
    let sound = [3 | 2 << 56; 2048];
    assert!(Lookups::new(&sound).is_some());
    for wrong in [0, 12, 64, 128, 139, 255, 3 | 6 << 56, 3 | 64 << 56, 3 | 127 << 56, 3 | 128 << 56, 3 | 255 << 56] {
        let mut table = sound;
        table[700] = wrong;
        assert!(Lookups::new(&table).is_none(), "{wrong:x}");
    }
    for right in [1, 11, 11 | 5 << 56] {
        let mut table = sound;
        table[700] = right;
        assert!(Lookups::new(&table).is_some(), "{right:x}");
    }
}

#[test]
fn a_row_does_not_depend_on_streams_that_it_is_not_in() {
    let value = |i: u32| (i.wrapping_mul(2_654_435_761) >> 20) as u16;
    let (rows, row) = ((0..64 * 512).flat_map(|i| value(i).to_le_bytes()).collect::<Vec<u8>>(), 1024);
    let mut block = encode(&rows, 2, 512).unwrap();
    assert_eq!(block[21], 1, "planes");
    // The last bytes belong to the last stream of the plane of high bytes, which is coded.
    let end = block.len();
    block[end - 40..].fill(0xff);
    let wrong = decode(&block, rows.len() as u64);
    let parsed = PackedBlock::parse(&block, rows.len() as u64).unwrap();
    let mut made = vec![0; row];
    for number in [0, 15, 20, 47] {
        parsed.rows(&[number], &mut |_, found| found.write(&mut made)).unwrap();
        let begin = number as usize * row;
        assert_eq!(made, rows[begin..begin + row]);
    }
    assert!(wrong.is_err() || wrong.is_ok_and(|decoded| decoded != rows));
}

#[test]
fn codes_of_the_longest_length_and_all_symbols_return() {
    // Counts that double: a code without a limit would have lengths up to 18. And all 256 symbols.
    let mut skewed: Vec<u8> = (0..18u8).flat_map(|symbol| vec![symbol; 1 << (17 - symbol)]).collect();
    skewed.extend(0..=255);
    let block = encode(&skewed, 1, 1).unwrap();
    assert!(block.len() < skewed.len() / 2);
    assert_eq!(decode(&block, skewed.len() as u64).unwrap(), skewed);
}

#[test]
fn a_header_that_claims_memory_is_refused_before_it_is_used() {
    let mut block = encode(&[0; 64], 4, 4).unwrap();
    block[8..12].copy_from_slice(&((1u32 << 31) - 16).to_le_bytes());
    assert!(decode(&block, 64).unwrap_err().detail.contains("expected at most 64 decoded bytes"));
}
