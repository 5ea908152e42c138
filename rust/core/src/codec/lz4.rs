//! LZ4 blocks, decoded only as far as needed. Only this module calls the C library.
//!
//! A block of a Levanter cache contains one byte of each of 131,072 numbers; a window needs a thousand of them. The library
//! can stop early (`LZ4_decompress_safe_partial`), which no Rust crate offers. lz4-sys builds the library without declaring
//! this function, so it is declared here as in `lz4.h` 1.10.
#![allow(unsafe_code, reason = "the C library is called here and nowhere else")]

use std::ffi::{c_char, c_int};

unsafe extern "C" {
    fn LZ4_decompress_safe_partial(
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        target_output_size: c_int,
        dst_capacity: c_int,
    ) -> c_int;
}

/// The end of a block, in bytes, where no match may begin, and which no match may reach: "The last match must start at least
/// 12 bytes before the end of block" and "The last 5 bytes of input are always literals" (`lz4_Block_format.md`).
const NO_MATCH_BEGINS: usize = 12;
const LITERALS_AT_END: usize = 5;

/// Decodes `block` into `out`; false if the block is invalid or decodes to another length.
pub fn decode(block: &[u8], out: &mut [u8]) -> bool {
    let (Ok(from), Ok(to)) = (c_int::try_from(block.len()), c_int::try_from(out.len())) else { return false };
    // SAFETY: both pointers come from live slices of the lengths passed. The function never reads outside the first nor
    // writes outside the second, for any bytes (lz4.h: "protected against malicious data packets").
    let made = unsafe { lz4_sys::LZ4_decompress_safe(block.as_ptr().cast(), out.as_mut_ptr().cast(), from, to) };
    made == to
}

/// Decodes the beginning of `block` into `out`; false if the block is invalid or too short. Does not check the rest: the
/// library does not apply the end-of-block rules to a part.
pub fn decode_prefix(block: &[u8], out: &mut [u8]) -> bool {
    let (Ok(from), Ok(to)) = (c_int::try_from(block.len()), c_int::try_from(out.len())) else { return false };
    // SAFETY: both pointers come from live slices of the lengths passed. The function never reads outside the first nor
    // writes outside the second, for any bytes (lz4.h: "protected against malicious data packets").
    let made = unsafe { LZ4_decompress_safe_partial(block.as_ptr().cast(), out.as_mut_ptr().cast(), from, to, to) };
    made == to
}

/// The byte value if all `len` bytes of a block are equal and its literals show it. The upper bytes of small numbers form
/// such blocks, and need no memory.
pub fn constant(block: &[u8], len: usize) -> Option<u8> {
    let mut at = 0usize;
    let mut made = 0usize;
    let mut value: Option<u8> = None;
    let long = |at: &mut usize, short: usize| -> Option<usize> {
        let mut n = short;
        if short == 15 {
            loop {
                let more = *block.get(*at)?;
                *at += 1;
                n = n.checked_add(usize::from(more))?;
                if more != 255 {
                    break;
                }
            }
        }
        Some(n)
    };
    while at < block.len() {
        let token = block[at];
        at += 1;
        let literals = long(&mut at, usize::from(token >> 4))?;
        for byte in block.get(at..at.checked_add(literals)?)? {
            if *value.get_or_insert(*byte) != *byte {
                return None;
            }
        }
        at += literals;
        made = made.checked_add(literals)?;
        if at == block.len() {
            break;
        }
        let offset = usize::from(u16::from_le_bytes([*block.get(at)?, *block.get(at + 1)?]));
        at += 2;
        if offset == 0 || offset > made || made.checked_add(NO_MATCH_BEGINS)? > len {
            return None;
        }
        made = made.checked_add(long(&mut at, usize::from(token & 15))?)?.checked_add(4)?;
        if made.checked_add(LITERALS_AT_END)? > len {
            return None;
        }
    }
    if made == len { value } else { None }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(bytes: &[u8]) -> Vec<u8> {
        let mut out = vec![0u8; bytes.len() + bytes.len() / 255 + 64];
        // SAFETY: as above; `out` is longer than LZ4_compressBound requires.
        let made = unsafe {
            lz4_sys::LZ4_compress_default(
                bytes.as_ptr().cast(),
                out.as_mut_ptr().cast(),
                bytes.len() as c_int,
                out.len() as c_int,
            )
        };
        out.truncate(made as usize);
        out
    }

    #[test]
    fn blocks_of_one_byte_are_told_from_others() {
        for len in [1usize, 5, 13, 64, 131_072] {
            for byte in [0u8, 7, 255] {
                assert_eq!(constant(&encode(&vec![byte; len]), len), Some(byte));
                assert_eq!(constant(&encode(&vec![byte; len]), len + 1), None);
            }
            let mut other = vec![3u8; len];
            other[len / 2] = 4;
            assert!(len == 1 || constant(&encode(&other), len).is_none());
        }
        assert_eq!(constant(&[], 0), None);
        assert_eq!(constant(&[0x10, 3, 1, 0], 5), None, "a block that ends in a match");
        assert!(!decode_prefix(&[0x10, 3, 1, 0], &mut [0; 5]));
    }

    /// A block of one-byte sequences (literals, then, except for the last, a match offset and length), and its decoded bytes.
    fn of_sequences(sequences: &[(usize, u16, usize)], last: usize) -> (Vec<u8>, usize) {
        let (mut block, mut made) = (vec![], 0);
        let ends = std::iter::once((last, None));
        for (literals, matched) in sequences.iter().map(|(a, o, n)| (*a, Some((*o, *n)))).chain(ends) {
            let more = matched.map_or(0, |(_, n)| n);
            block.push(((literals.min(15) as u8) << 4) | more.min(15) as u8);
            if literals >= 15 {
                block.push((literals - 15) as u8);
            }
            block.extend(std::iter::repeat_n(7u8, literals));
            made += literals;
            if let Some((offset, n)) = matched {
                block.extend(offset.to_le_bytes());
                if n >= 15 {
                    block.push((n - 15) as u8);
                }
                made += n + 4;
            }
        }
        (block, made)
    }

    #[test]
    fn no_match_lies_in_the_end_of_a_block() {
        // A literal, a match of 4 to 22 bytes, literals: the last five must be literals, and twelve follow a match's start.
        for n in 0..19 {
            for last in 0..9 {
                let (block, made) = of_sequences(&[(1, 1, n)], last);
                let allowed = last >= LITERALS_AT_END && n + 4 + last >= NO_MATCH_BEGINS;
                assert_eq!(constant(&block, made), allowed.then_some(7), "{n} {last}");
                let mut out = vec![0; made];
                assert_eq!(decode(&block, &mut out), allowed, "{n} {last}");
                assert!(!allowed || out.iter().all(|b| *b == 7));
            }
        }
    }

    /// If a block's bytes are derived without decoding, the library decodes it to the same bytes.
    fn read_alike(block: &[u8], len: usize) -> Result<(), TestCaseError> {
        let mut out = vec![0u8; len];
        let decoded = decode(block, &mut out);
        if let Some(byte) = constant(block, len) {
            prop_assert!(decoded, "{block:?} {len}");
            prop_assert!(out.iter().all(|b| *b == byte));
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn what_is_read_without_decoding_is_what_the_library_decodes(
            sequences in prop::collection::vec((0usize..18, 1u16..4, 0usize..30), 0..4), last in 0usize..20, more in -2isize..3,
        ) {
            let (block, made) = of_sequences(&sequences, last);
            let len = made.saturating_add_signed(if more.abs() == 2 { more / 2 } else { 0 });
            read_alike(&block, len)?;
        }

        #[test]
        fn rubbish_is_read_without_decoding_only_if_the_library_decodes_it(
            block in prop::collection::vec(prop_oneof![0u8..3, any::<u8>(), Just(0x1f), Just(0x50)], 0..40), len in 0usize..80,
        ) {
            read_alike(&block, len)?;
        }

        #[test]
        fn a_prefix_is_the_beginning(bytes in prop::collection::vec(0u8..4, 1..3000), part in 0.0f64..=1.0) {
            let block = encode(&bytes);
            let n = ((bytes.len() as f64) * part) as usize;
            let mut out = vec![9u8; n];
            prop_assert!(decode_prefix(&block, &mut out));
            prop_assert_eq!(&out[..], &bytes[..n]);
            prop_assert_eq!(decode(&block, &mut out), n == bytes.len());
            let mut more = vec![0u8; bytes.len() + 1];
            prop_assert!(!decode_prefix(&block, &mut more));
        }

        #[test]
        fn rubbish_is_refused_or_decoded_to_something(block in prop::collection::vec(any::<u8>(), 0..300), len in 0usize..2000) {
            let mut out = vec![0u8; len];
            let _ = decode_prefix(&block, &mut out);
            let _ = constant(&block, len);
        }
    }
}
