//! Packed rows: kernels give the bytes of naive loops, and blocks of any rows decode to them. A decoder written from the page of the
//! format is in the fuzz target `planes`.

use actshard_core::codec::planes::{HEADER, decode, encode, encoded_len};
use actshard_core::kernels::planes::{Plane, merge, split};
use actshard_core::kernels::prefix::{Stream, decode_together};
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
        merge(&parts, n, sign, &mut merged);
        prop_assert_eq!(&merged[3..], &values[..]);
    }

    #[test]
    fn streams_decoded_together_are_those_decoded_alone(
        bytes in prop::collection::vec(any::<u8>(), 0..800),
        starts in prop::array::uniform4(0usize..800),
        symbols in 0usize..600,
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
        let table: &[u64; 2048] = table.as_slice().try_into().unwrap();
        let bit = |at: usize| u64::from(bytes[at / 8] >> (7 - at % 8) & 1);
        let mut streams = [0, 1, 2, 3].map(|k| Stream {
            bit: starts[k].min(8 * bytes.len()),
            at: k * symbols,
            end: (k + 1) * symbols,
        });
        let begins = streams;
        let mut plane = vec![0; 4 * symbols];
        decode_together(&bytes, table, &mut streams, &mut plane);
        for (begin, end) in begins.iter().zip(&streams) {
            prop_assert!(end.at <= end.end && end.bit <= 8 * bytes.len());
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
        prop_assert_eq!(decode(&block, rows.len() as u64).unwrap(), rows);
    }
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
