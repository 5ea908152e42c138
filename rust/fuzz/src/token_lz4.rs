//! Any bytes as an LZ4 block: the C library's output, in part or in full, equals that of a simple decoder, and a block reported as
//! constant is constant.

use actshard_core::codec::lz4::{constant, decode_prefix};

use crate::memory::counted;

/// A decoder written from `lz4_Block_format.md`, for at most `most` bytes; `None` for invalid blocks.
fn plainly(block: &[u8], most: usize) -> Option<Vec<u8>> {
    let (mut out, mut next) = (vec![], 0);
    let long = |next: &mut usize, short: usize| -> Option<usize> {
        let mut n = short;
        let mut goes_on = short == 15;
        while goes_on {
            let more = *block.get(*next)?;
            *next += 1;
            n += usize::from(more);
            goes_on = more == 255;
        }
        Some(n)
    };
    loop {
        let token = *block.get(next)?;
        next += 1;
        let literals = long(&mut next, usize::from(token >> 4))?;
        out.extend(block.get(next..next + literals)?);
        next += literals;
        if out.len() > most {
            return None;
        }
        if next == block.len() {
            return Some(out);
        }
        let offset = usize::from(u16::from_le_bytes([*block.get(next)?, *block.get(next + 1)?]));
        next += 2;
        let matched = long(&mut next, usize::from(token & 15))? + 4;
        if offset == 0 || offset > out.len() || out.len() + matched > most {
            return None;
        }
        for _ in 0..matched {
            out.push(out[out.len() - offset]);
        }
    }
}

const MOST: usize = 1 << 17;

pub fn token_lz4(data: &[u8]) {
    let Some((&[a, b], block)) = data.split_first_chunk::<2>() else { return };
    let want = plainly(block, MOST);
    // The decoded length, if there is one, else a guess, which may be too large.
    let len = want.as_ref().map_or(usize::from(u16::from_le_bytes([a, b])), Vec::len);
    for n in [len, len / 2, len.saturating_sub(1), len + 1, usize::from(a)] {
        let mut out = vec![0x55; n];
        let decoded = counted(|| decode_prefix(block, &mut out));
        if let (true, Some(want)) = (decoded, &want) {
            assert!(n <= want.len(), "more bytes than there are");
            assert_eq!(out, want[..n]);
        }
        match (counted(|| constant(block, n)), &want) {
            (Some(byte), Some(want)) => assert!(want.len() == n && want.iter().all(|b| *b == byte)),
            (Some(_), None) => assert!(n > MOST, "an invalid block"),
            (None, _) => {}
        }
    }
}
