//! LZ4 blocks, decoded as far as they are needed: the only room that calls the C library.
//!
//! A block of a Levanter cache holds one byte of each of 131,072 numbers, and a window wants a thousand of them. The library can
//! stop in the middle (`LZ4_decompress_safe_partial`), which no Rust crate offers; lz4-sys builds the library and does not
//! declare this function, so it is declared here as `lz4.h` of 1.10 has it.
#![allow(unsafe_code, reason = "the C library is called here and nowhere else")]

use std::ffi::{c_char, c_int};

use lz4_sys as _;

unsafe extern "C" {
    fn LZ4_decompress_safe_partial(
        src: *const c_char,
        dst: *mut c_char,
        src_size: c_int,
        target_output_size: c_int,
        dst_capacity: c_int,
    ) -> c_int;
}

/// Fills `out` with the first bytes that `block` decodes to; false if it is no block, or decodes to fewer.
pub fn decode_prefix(block: &[u8], out: &mut [u8]) -> bool {
    let (Ok(from), Ok(to)) = (c_int::try_from(block.len()), c_int::try_from(out.len())) else { return false };
    // SAFETY: both pointers are to live slices of the lengths given. The function never reads outside the first nor writes
    // outside the second, whatever the bytes are (lz4.h: "protected against malicious data packets").
    let made = unsafe { LZ4_decompress_safe_partial(block.as_ptr().cast(), out.as_mut_ptr().cast(), from, to, to) };
    made == to
}

/// The byte that all `len` bytes of a block are, if that can be told by looking at its literals: the upper bytes of small numbers
/// are such blocks, and need no memory.
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
        if offset == 0 || offset > made {
            return None;
        }
        made = made.checked_add(long(&mut at, usize::from(token & 15))?)?.checked_add(4)?;
        if at == block.len() {
            return None; // the last sequence has literals only: no decoder takes a block that ends in a match
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
        // SAFETY: as above; `out` is longer than LZ4_compressBound asks for.
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

    proptest! {
        #[test]
        fn a_prefix_is_the_beginning(bytes in prop::collection::vec(0u8..4, 1..3000), part in 0.0f64..=1.0) {
            let block = encode(&bytes);
            let n = ((bytes.len() as f64) * part) as usize;
            let mut out = vec![9u8; n];
            prop_assert!(decode_prefix(&block, &mut out));
            prop_assert_eq!(&out[..], &bytes[..n]);
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
