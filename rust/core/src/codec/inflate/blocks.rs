//! Deflate blocks at any bit offset: finds where one begins, and inflates a little without the preceding window.
//!
//! Speed does not matter here: libdeflate inflates all but the first 32 KiB or so of each stretch (`parallel`).
//! Source: RFC 1951. Searching for dynamic block headers and marking copies from an unknown window follow pugz (Kerbiriou
//! and Chikhi, "Parallel decompression of gzip-compressed files and random access to DNA sequences", 2019) and rapidgzip
//! (Knespel and Brunst, 2023).

use crate::memory;
use crate::number::to_usize;

/// The largest distance of a match, in bytes.
pub const WINDOW: usize = 32 << 10;
/// Values from here on are offsets into the unknown window, counted from its oldest byte; smaller values are bytes.
pub const MARK: u16 = 256;

const MAX_BITS: usize = 15;
const CODE_LENGTH_ORDER: [usize; 19] = [16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15];
const LENGTH_BASE: [u16; 29] =
    [3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258];
const LENGTH_EXTRA: [u8; 29] = [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0];
const DISTANCE_BASE: [u16; 30] = [
    1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33, 49, 65, 97, 129, 193, 257, 385, 513, 769, 1025, 1537, 2049, 3073, 4097, 6145,
    8193, 12289, 16385, 24577,
];
const DISTANCE_EXTRA: [u8; 30] =
    [0, 0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13];

/// Bits of a byte string, the lowest of each byte first.
#[derive(Clone, Copy)]
pub struct BitReader<'a> {
    bytes: &'a [u8],
    /// The next bit.
    pub at: u64,
}

impl<'a> BitReader<'a> {
    /// Starts at a bit offset.
    pub fn new(bytes: &'a [u8], at: u64) -> BitReader<'a> {
        BitReader { bytes, at }
    }

    /// The next 56 or more bits; zeros past the end.
    #[inline]
    fn peek(&self) -> u64 {
        let byte = (self.at / 8) as usize;
        let word = match self.bytes.get(byte..byte + 8) {
            Some(eight) => u64::from_le_bytes(eight.try_into().unwrap_or_default()),
            None => {
                let mut last = [0; 8];
                let rest = self.bytes.get(byte..).unwrap_or_default();
                last[..rest.len()].copy_from_slice(rest);
                u64::from_le_bytes(last)
            }
        };
        word >> (self.at % 8)
    }

    /// The next bits, at most 16.
    fn take(&mut self, n: u32) -> Option<u32> {
        let value = self.peek() & ((1 << n) - 1);
        self.skip(n)?;
        u32::try_from(value).ok()
    }

    fn skip(&mut self, n: u32) -> Option<()> {
        self.at += u64::from(n);
        (self.at <= self.bytes.len() as u64 * 8).then_some(())
    }
}

/// A prefix code as a lookup table.
struct Code {
    /// Indexed by the next `bits` bits: symbol and length; length 0 for unused codes.
    table: Vec<(u16, u8)>,
    bits: u32,
}

impl Code {
    /// Builds the table from each symbol's code length. `None` unless the lengths use the whole code space, or, if `sparse`,
    /// there is at most one code (RFC 1951, 3.2.7: one distance code, or none).
    fn new(lengths: &[u8], sparse: bool, steps: &mut Steps) -> Option<Code> {
        let mut count = [0u32; MAX_BITS + 1];
        for length in lengths {
            count[usize::from(*length)] += 1;
        }
        count[0] = 0;
        let used: u32 = count.iter().sum();
        let filled: u32 = (1..=MAX_BITS).map(|n| count[n] << (MAX_BITS - n)).sum();
        if filled != 1 << MAX_BITS && !(sparse && used <= 1 && filled <= 1 << (MAX_BITS - 1)) {
            return None;
        }
        let bits = (1..=MAX_BITS).rev().find(|n| count[*n] > 0).unwrap_or(1);
        let bits = u32::try_from(bits).ok()?;
        let mut next = [0u32; MAX_BITS + 2];
        for n in 1..=MAX_BITS {
            next[n + 1] = (next[n] + count[n]) << 1;
        }
        steps.take(1 << bits)?;
        let mut table = memory::reserve(1 << bits).ok()?;
        table.resize_with(1 << bits, Default::default);
        for (symbol, length) in lengths.iter().enumerate().filter(|(_, n)| **n > 0) {
            let (n, symbol) = (u32::from(*length), u16::try_from(symbol).ok()?);
            let code = next[usize::from(*length)];
            next[usize::from(*length)] += 1;
            let reversed = code.reverse_bits() >> (32 - n);
            for entry in table.iter_mut().skip(reversed as usize).step_by(1 << n) {
                *entry = (symbol, *length);
            }
        }
        Some(Code { table, bits })
    }

    #[inline]
    fn read(&self, bits: &mut BitReader<'_>) -> Option<u16> {
        let (symbol, length) = self.table[to_usize(bits.peek() & ((1 << self.bits) - 1))];
        if length == 0 {
            return None;
        }
        bits.skip(u32::from(length))?;
        Some(symbol)
    }
}

/// The remaining work budget, roughly: values, table entries, bits searched.
pub struct Steps(u64);

impl Steps {
    fn take(&mut self, n: u64) -> Option<()> {
        self.0 = self.0.checked_sub(n)?;
        Some(())
    }
}

/// The codes of a block.
struct Codes {
    literals: Code,
    distances: Code,
}

/// A cheap test whether the header of a dynamic, non-final block can begin here; true for one bit offset in thousands.
#[inline]
fn may_begin(bits: &BitReader<'_>) -> bool {
    let v = bits.peek();
    if v & 7 != 4 || (v >> 3) & 31 > 29 || (v >> 8) & 31 > 29 {
        return false;
    }
    // The code of code lengths must be complete: the sum of 2^-length is 1.
    let n = ((v >> 13) & 15) as u32 + 4;
    let mut lengths = BitReader { bytes: bits.bytes, at: bits.at + 17 };
    let (first, mut sum) = (n.min(18), 0u32);
    let mut word = lengths.peek();
    for _ in 0..first {
        let length = (word & 7) as u32;
        word >>= 3;
        sum += if length > 0 { 128 >> length } else { 0 };
    }
    if n == 19 {
        lengths.at += 54;
        let length = (lengths.peek() & 7) as u32;
        sum += if length > 0 { 128 >> length } else { 0 };
    }
    sum == 128
}

/// Reads the codes of a dynamic block, after its three header bits.
fn dynamic_codes(bits: &mut BitReader<'_>, steps: &mut Steps) -> Option<Codes> {
    let literals = bits.take(5)? as usize + 257;
    let distances = bits.take(5)? as usize + 1;
    let n = bits.take(4)? as usize + 4;
    if literals > 286 || distances > 30 {
        return None;
    }
    let mut lengths = [0u8; 19];
    for place in &CODE_LENGTH_ORDER[..n] {
        lengths[*place] = u8::try_from(bits.take(3)?).ok()?;
    }
    let code = Code::new(&lengths, false, steps)?;
    let mut all: Vec<u8> = vec![];
    while all.len() < literals + distances {
        let (value, times) = match code.read(bits)? {
            symbol @ 0..=15 => (u8::try_from(symbol).ok()?, 1),
            16 => (*all.last()?, bits.take(2)? + 3),
            17 => (0, bits.take(3)? + 3),
            _ => (0, bits.take(7)? + 11),
        };
        all.resize(all.len() + times as usize, value);
    }
    if all.len() > literals + distances || all[256] == 0 {
        return None;
    }
    steps.take(all.len() as u64)?;
    let literals_code = Code::new(&all[..literals], false, steps)?;
    Some(Codes { literals: literals_code, distances: Code::new(&all[literals..], true, steps)? })
}

fn fixed_codes(steps: &mut Steps) -> Option<Codes> {
    let mut lengths = [8u8; 288];
    lengths[144..256].fill(9);
    lengths[256..280].fill(7);
    Some(Codes { literals: Code::new(&lengths, false, steps)?, distances: Code::new(&[5; 32], false, steps)? })
}

/// Values inflated without the preceding window.
#[derive(Debug)]
pub struct Warm {
    /// The bit at which it begins, the first of a block.
    pub begin: u64,
    /// The bit at which it ends, also the first of a block.
    pub end: u64,
    /// Bytes, and marks for bytes of the unknown window. The last [`WINDOW`] are bytes.
    pub values: Vec<u16>,
}

/// Searches for a block between two bits and inflates from there until the window is known. `None` if there is no such
/// block, the window is still unknown after about `most` values, or the work exceeds `steps`.
pub fn warm_up(bytes: &[u8], from: u64, to: u64, most: usize, steps: u64) -> Option<Warm> {
    let mut steps = Steps(steps);
    for at in from..to {
        let bits = BitReader::new(bytes, at);
        steps.take(1)?;
        if may_begin(&bits)
            && let Some(found) = inflate_from(bits, most, &mut steps)
        {
            return found;
        }
    }
    None
}

/// `None` if there is no block, `Some(None)` if there is one that is not useful.
fn inflate_from(mut bits: BitReader<'_>, most: usize, steps: &mut Steps) -> Option<Option<Warm>> {
    let begin = bits.at;
    let mut values: Vec<u16> = Vec::new();
    // The position after the last mark.
    let mut marked = 0;
    loop {
        let before = values.len();
        let last = bits.take(1)?;
        match bits.take(2)? {
            0 => {
                bits.at = bits.at.next_multiple_of(8);
                let (n, check) = (bits.take(16)?, bits.take(16)?);
                if n ^ check != 0xffff {
                    return None;
                }
                let first = (bits.at / 8) as usize;
                values.extend(bits.bytes.get(first..first + n as usize)?.iter().map(|b| u16::from(*b)));
                bits.at += u64::from(n) * 8;
            }
            kind @ (1 | 2) => {
                let codes = if kind == 1 { fixed_codes(steps)? } else { dynamic_codes(&mut bits, steps)? };
                let whole = block(&mut bits, &codes, &mut values, &mut marked, most);
                // Counts the work even if the block is invalid.
                steps.take((values.len() - before) as u64)?;
                whole?;
            }
            _ => return None,
        }
        steps.take(1 + (values.len() - before) as u64)?;
        // Nothing follows the final block, and the rest is not worth another thread.
        if last == 1 || values.len() > most {
            return Some(None);
        }
        if values.len() - marked >= WINDOW {
            return Some(Some(Warm { begin, end: bits.at, values }));
        }
    }
}

fn block(
    bits: &mut BitReader<'_>,
    codes: &Codes,
    values: &mut Vec<u16>,
    marked: &mut usize,
    most: usize,
) -> Option<()> {
    loop {
        match codes.literals.read(bits)? {
            literal @ 0..=255 => values.push(literal),
            256 => return Some(()),
            symbol => {
                let i = usize::from(symbol) - 257;
                let length = u32::from(*LENGTH_BASE.get(i)?) + bits.take(u32::from(LENGTH_EXTRA[i]))?;
                let i = usize::from(codes.distances.read(bits)?);
                let distance = usize::from(*DISTANCE_BASE.get(i)?) + bits.take(u32::from(DISTANCE_EXTRA[i]))? as usize;
                for _ in 0..length {
                    let value = match values.len().checked_sub(distance) {
                        Some(at) => values[at],
                        // In the unknown window, which ends where the values begin.
                        None => MARK + u16::try_from(WINDOW - (distance - values.len())).ok()?,
                    };
                    values.push(value);
                    if value >= MARK {
                        *marked = values.len();
                    }
                }
            }
        }
        if values.len() > most {
            return Some(());
        }
    }
}
