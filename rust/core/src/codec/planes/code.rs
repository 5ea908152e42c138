//! Prefix codes of at most [`LONGEST`] bits: lengths by package-merge, canonical codes, and the encoder of a plane.
//!
//! A coded plane is: its smallest symbol; the number of symbols from it to the largest one, minus one; the code lengths of these,
//! four bits each, the first in the low half (0: no such symbol); the lengths of four streams, 32 bits each; the streams. Stream
//! `k` has the symbols from `k * q` on, at most `q`, where `q` is a quarter of the plane's length, rounded up. Bits fill bytes
//! from the highest down; the last byte is filled up with zeros.

use crate::error::{Error, Kind, Result};
use crate::kernels::wide;
use crate::memory;

/// The longest code, in bits.
pub const LONGEST: usize = 11;
/// A plane is coded if one byte of so many is saved: a raw plane needs no time to decode.
const LEAST_SAVED: usize = 16;
/// Streams of a plane.
pub const STREAMS: usize = 4;

/// The code length of each symbol; 0 for one that does not occur.
pub type CodeLengths = [u8; 256];

/// The error of a damaged block.
pub fn damaged(text: String) -> Error {
    Error::new(Kind::Format, format!("actshard.planes: {text}"))
}

/// The number in four bytes of `bytes`, which are there.
pub fn number(bytes: &[u8], at: usize) -> usize {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_le_bytes(*b) as usize)
}

/// How often each byte occurs.
pub fn count(plane: &[u8]) -> [u32; 256] {
    // Equal neighbours would wait for each other's sums in one table.
    let mut counts = [[0u32; 256]; 8];
    let (groups, rest) = plane.as_chunks::<8>();
    for group in groups {
        let bytes = u64::from_le_bytes(*group);
        for (counts, shift) in counts.iter_mut().zip((0..64).step_by(8)) {
            // Below 2^31, the length of a plane.
            let count = &mut counts[(bytes >> shift & 0xff) as usize];
            *count = count.wrapping_add(1);
        }
    }
    for byte in rest {
        counts[0][usize::from(*byte)] += 1;
    }
    let [first, others @ ..] = &mut counts;
    for other in others {
        first.iter_mut().zip(other).for_each(|(sum, n)| *sum += *n);
    }
    *first
}

/// The code of a plane of `n` symbols, and the most bytes of the coded plane, if it saves one byte of [`LEAST_SAVED`].
pub fn lengths_that_pay(counts: &[u32; 256], n: usize) -> Option<(CodeLengths, usize)> {
    // The entropy is at least log2(n^2 / sum of count^2), and 2^7.5 = 181: most planes of mantissas need no code to be rejected.
    let squares: u64 = counts.iter().map(|count| u64::from(*count).pow(2)).sum();
    if u128::from(squares) * 181 <= (n as u128).pow(2) {
        return None;
    }
    let lengths = lengths(counts);
    let bytes = coded_bytes(counts, &lengths);
    (bytes + n / LEAST_SAVED < n).then_some((lengths, bytes))
}

/// The lengths of an optimal code of at most [`LONGEST`] bits, for at least two symbols: the package-merge algorithm (Larmore and
/// Hirschberg, 1990). Among equal weights, single symbols come before packages, and smaller symbols first.
fn lengths(counts: &[u32; 256]) -> CodeLengths {
    let mut symbols: Vec<(u64, u8)> =
        (0..=255).zip(counts).filter(|(_, n)| **n > 0).map(|(symbol, n)| (u64::from(*n), symbol)).collect();
    symbols.sort_unstable();
    let n = symbols.len();
    // Of each level, which entries of its merged list are packages, and their weights.
    let mut levels: Vec<Vec<bool>> = vec![];
    let mut packages: Vec<u64> = vec![];
    for _ in 0..LONGEST {
        let (mut singles, mut pairs) =
            (symbols.iter().map(|(weight, _)| *weight).peekable(), packages.iter().copied().peekable());
        let mut merged: Vec<u64> = vec![];
        let mut is_package: Vec<bool> = vec![];
        loop {
            let package = match (singles.peek(), pairs.peek()) {
                (Some(single), Some(pair)) => pair < single,
                (Some(_), None) => false,
                (None, Some(_)) => true,
                (None, None) => break,
            };
            merged.extend(if package { pairs.next() } else { singles.next() });
            is_package.push(package);
        }
        packages = merged.as_chunks::<2>().0.iter().map(|[a, b]| a + b).collect();
        levels.push(is_package);
    }
    // The first 2n - 2 entries of the last list are in the code. A package contains two entries of the list before it.
    let mut lengths = [0; 256];
    let mut taken = 2 * n - 2;
    for level in levels.iter().rev() {
        let pairs = level[..taken].iter().filter(|package| **package).count();
        for (_, symbol) in &symbols[..taken - pairs] {
            lengths[usize::from(*symbol)] += 1;
        }
        taken = 2 * pairs;
    }
    lengths
}

/// Smallest and largest symbol.
fn range(lengths: &CodeLengths) -> (usize, usize) {
    let first = lengths.iter().position(|length| *length > 0).unwrap_or(0);
    (first, lengths.iter().rposition(|length| *length > 0).unwrap_or(0))
}

/// The most bytes that a coded plane may have.
fn coded_bytes(counts: &[u32; 256], lengths: &CodeLengths) -> usize {
    let bits: u64 = counts.iter().zip(lengths).map(|(n, length)| u64::from(*n) * u64::from(*length)).sum();
    let (first, last) = range(lengths);
    // Below 2^32: a plane has less than 2^31 symbols.
    2 + (last - first + 2) / 2 + 5 * STREAMS + usize::try_from(bits / 8).unwrap_or(usize::MAX)
}

/// The symbols of a code in the order of their codes: by length, then by symbol.
#[derive(Debug)]
pub struct Canonical {
    symbols: [u8; 256],
    /// Where the symbols of each length end.
    ends: [usize; LONGEST + 1],
}

impl Canonical {
    /// The order for these lengths.
    pub fn new(lengths: &CodeLengths) -> Canonical {
        let mut ends = [0; LONGEST + 1];
        for length in lengths.iter().filter(|length| **length > 0) {
            ends[usize::from(*length)] += 1;
        }
        for length in 1..=LONGEST {
            ends[length] += ends[length - 1];
        }
        let mut symbols = [0; 256];
        let mut next = ends;
        next.rotate_right(1);
        for (symbol, length) in (0..=255).zip(lengths).filter(|(_, length)| **length > 0) {
            let at = &mut next[usize::from(*length)];
            symbols[*at] = symbol;
            *at += 1;
        }
        Canonical { symbols, ends }
    }

    /// The symbols whose codes have this length.
    pub fn of_length(&self, length: usize) -> &[u8] {
        &self.symbols[self.ends[length - 1]..self.ends[length]]
    }
}

/// Each symbol's code: its bits, and their number in the highest byte.
fn codes(lengths: &CodeLengths) -> [u64; 256] {
    let mut codes = [0; 256];
    let canonical = Canonical::new(lengths);
    let mut bits = 0;
    for (length, count) in (1..=LONGEST).zip(1..) {
        bits <<= 1;
        for symbol in canonical.of_length(length) {
            codes[usize::from(*symbol)] = bits | count << COUNT;
            bits += 1;
        }
    }
    codes
}

/// Where a code's number of bits begins.
const COUNT: u32 = 56;
/// Bytes of a write.
pub const WRITTEN: usize = 8;
/// Symbols between two writes: with the bits of an unfinished byte they fill less than 64.
const TOGETHER: usize = 5;

/// A place in a block where streams are written.
struct Writer<'a> {
    block: &'a mut [u8],
    at: usize,
    /// The bits of an unfinished byte, the lowest `count`; older ones above them are written.
    bits: u64,
    count: u32,
}

impl Writer<'_> {
    /// Writes a stream; returns where it ends.
    #[inline(always)]
    fn write_all(mut self, symbols: &[u8], codes: &[u64; 256]) -> usize {
        let (groups, rest) = symbols.as_chunks::<TOGETHER>();
        for group in groups {
            self.write(group.map(|symbol| codes[usize::from(symbol)]));
        }
        for symbol in rest {
            self.write([codes[usize::from(*symbol)]]);
        }
        self.at + usize::from(self.count > 0)
    }

    /// Appends codes of at most 55 bits in total.
    #[inline(always)]
    fn write<const N: usize>(&mut self, codes: [u64; N]) {
        // First without the bits before: only the last step waits for the codes before.
        let (mut bits, mut count) = (0u64, 0u32);
        for code in codes {
            let more = (code >> COUNT) as u32;
            bits = bits.wrapping_shl(more) | code & ((1 << COUNT) - 1);
            count = count.wrapping_add(more);
        }
        self.bits = self.bits.wrapping_shl(count) | bits;
        self.count = self.count.wrapping_add(count);
        // Never 0 bits: a symbol has at least one.
        let word = self.bits.wrapping_shl(64u32.wrapping_sub(self.count)).to_be_bytes();
        if let Some(place) = self.block.get_mut(self.at..).and_then(<[u8]>::first_chunk_mut) {
            *place = word;
        }
        self.at = self.at.wrapping_add((self.count / 8) as usize);
        self.count %= 8;
    }
}

/// Appends a plane in this code, which takes at most `most` bytes.
pub fn append(block: &mut Vec<u8>, plane: &[u8], lengths: &CodeLengths, most: usize) -> Result<()> {
    // A write has 8 bytes.
    let room = (block.len() + most + WRITTEN) as u64;
    let (first, last) = range(lengths);
    // Both are below 256.
    block.extend([u8::try_from(first).unwrap_or(0), u8::try_from(last - first).unwrap_or(0)]);
    block.extend(lengths[first..=last].chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 4));
    let header = block.len();
    let codes = codes(lengths);
    memory::resize(block, room)?;
    let mut sizes = [0; STREAMS];
    let mut end = header + 4 * STREAMS;
    for (size, symbols) in sizes.iter_mut().zip(plane.chunks(plane.len().div_ceil(STREAMS).max(1))) {
        let begin = end;
        end = wide(
            #[inline(always)]
            || Writer { block, at: begin, bits: 0, count: 0 }.write_all(symbols, &codes),
        );
        *size = end - begin;
    }
    for (field, size) in block[header..].chunks_exact_mut(4).zip(sizes) {
        // A stream has less than 2^32 bytes.
        field.copy_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_le_bytes());
    }
    block.truncate(end);
    Ok(())
}
