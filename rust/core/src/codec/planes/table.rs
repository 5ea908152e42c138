//! Decodes coded planes: up to five symbols per lookup, four streams at a time.
//!
//! The table of `b` bits has an entry for each value of the next `b` bits: the symbols whose codes are complete in them. It follows
//! from smaller tables: after a first symbol of `l` bits come those of the table of `b - l` bits. Codes are canonical, so that the
//! entries of a first symbol are a range, and the smaller table is copied to it with the symbol before each entry.

use super::code::{Canonical, CodeLengths, LONGEST, STREAMS, damaged, number};
use crate::error::Result;
use crate::kernels::prefix::{Lookups, Stream, decode_together};
use crate::kernels::wide;

/// Symbols of an entry, at most.
const MOST: u64 = 5;
/// An entry: the bits of all its symbols; five bytes of symbols, the first lowest; the bits of the first symbol; the number of symbols.
const SYMBOLS: u64 = 0xff_ffff_ffff << 8;
const FIRST_BITS: u32 = 48;
const COUNT: u32 = 56;
/// Bits and number: the fields that add up.
const SUMS: u64 = 0xff | 0xff << COUNT;

/// Entries of all tables up to [`LONGEST`] bits; that of `b` bits begins at `2^b`.
type Tables = [u64; 2 << LONGEST];

/// A coded plane in a block.
#[derive(Debug)]
pub struct Coded {
    lengths: CodeLengths,
    /// Where each stream begins, and the last one ends.
    streams: [usize; STREAMS + 1],
}

impl Coded {
    /// The plane of `n` symbols that begins at `at`.
    pub fn parse(block: &[u8], at: usize, n: usize) -> Result<Coded> {
        let short = || damaged(format!("byte {at}: the block ends in a coded plane"));
        let rest = block.get(at..).ok_or_else(short)?;
        let (&[first, more], rest) = rest.split_first_chunk::<2>().ok_or_else(short)?;
        let (first, count) = (usize::from(first), usize::from(more) + 1);
        if first + count > 256 {
            return Err(damaged(format!("byte {at}: expected symbols up to 255, found {}", first + count - 1)));
        }
        let halves = rest.get(..count.div_ceil(2)).ok_or_else(short)?;
        let mut lengths = [0; 256];
        for (pair, both) in lengths[first..first + count].chunks_mut(2).zip(halves) {
            pair[0] = both & 15;
            match pair.get_mut(1) {
                Some(second) => *second = both >> 4,
                None if both >> 4 == 0 => {}
                None => return Err(damaged(format!("byte {at}: expected 0 after the last code length"))),
            }
        }
        let mut sum = 0;
        for length in lengths[first..first + count].iter().map(|length| usize::from(*length)).filter(|l| *l > 0) {
            if length > LONGEST {
                return Err(damaged(format!("byte {at}: expected codes of at most {LONGEST} bits, found {length}")));
            }
            sum += 1 << (LONGEST - length);
        }
        let is_exact = lengths[first] > 0 && lengths[first + count - 1] > 0;
        if sum != 1 << LONGEST || !is_exact {
            return Err(damaged(format!("byte {at}: expected the lengths of a complete prefix code")));
        }
        let sizes_at = at + 2 + halves.len();
        let sizes = block.get(sizes_at..sizes_at + 4 * STREAMS).ok_or_else(short)?;
        let mut streams = [sizes_at + 4 * STREAMS; STREAMS + 1];
        for k in 0..STREAMS {
            streams[k + 1] = streams[k].saturating_add(number(sizes, 4 * k));
        }
        let end = streams[STREAMS];
        if end > block.len() {
            return Err(damaged(format!("byte {sizes_at}: expected streams up to byte {}, found {end}", block.len())));
        }
        // A symbol has at least one bit.
        if (end - streams[0]).saturating_mul(8) < n {
            return Err(damaged(format!(
                "byte {sizes_at}: expected streams of {n} symbols, found {} bytes",
                end - streams[0]
            )));
        }
        Ok(Coded { lengths, streams })
    }

    /// Where the plane ends in its block.
    pub fn end(&self) -> usize {
        self.streams[STREAMS]
    }

    /// Decodes the plane: all of it, or each stream up to an end.
    pub fn decode(&self, block: &[u8], plane: &mut [u8], ends: Option<[usize; STREAMS]>) -> Result<()> {
        let mut tables = [0; 2 << LONGEST];
        let table = wide(
            #[inline(always)]
            || {
                fill(&mut tables, &self.lengths);
                tables.last_chunk().and_then(Lookups::new)
            },
        );
        let Some(table) = table else { return Ok(()) };
        let quarter = plane.len().div_ceil(STREAMS);
        let mut streams: [Stream; STREAMS] = [0, 1, 2, 3].map(|k| {
            let end = ((k + 1) * quarter).min(plane.len());
            Stream {
                bit: 8 * self.streams[k],
                at: (k * quarter).min(end),
                end: ends.map_or(end, |ends| ends[k].min(end)),
            }
        });
        decode_together(block, table, &mut streams, plane);
        for (k, stream) in streams.iter_mut().enumerate() {
            let (begin, end) = (self.streams[k], self.streams[k + 1]);
            decode_rest(&block[..end], table, stream, plane);
            let spent = stream.bit.div_ceil(8);
            let padding = 8 * spent - stream.bit;
            let is_clear = padding == 0 || block.get(spent - 1).is_some_and(|last| last & ((1 << padding) - 1) == 0);
            if spent > end || ends.is_none() && (spent != end || !is_clear) {
                return Err(damaged(format!(
                    "byte {begin}: expected a stream that ends at byte {end}, found one that ends at {spent}"
                )));
            }
        }
        Ok(())
    }
}

/// Decodes the rest of a stream, one symbol after the other. Bits after the end of `bytes` are 0.
fn decode_rest(bytes: &[u8], table: Lookups<'_>, stream: &mut Stream, plane: &mut [u8]) {
    for symbol in plane.get_mut(stream.at..stream.end).unwrap_or_default() {
        let rest = bytes.get(stream.bit / 8..).unwrap_or(&[]);
        let next = [0, 1, 2].map(|k| rest.get(k).copied().unwrap_or(0));
        let window = u32::from_be_bytes([next[0], next[1], next[2], 0]) << (stream.bit % 8);
        let (first, bits) = table.first((window >> (32 - LONGEST)) as usize);
        *symbol = first;
        stream.bit += bits;
    }
    stream.at = stream.end.max(stream.at);
}

/// Fills the tables of a complete code.
#[inline(always)]
fn fill(tables: &mut Tables, lengths: &CodeLengths) {
    // Of each table, the most symbols of an entry.
    let mut most = [0; LONGEST + 1];
    let canonical = Canonical::new(lengths);
    for bits in 1..=LONGEST {
        let (smaller, larger) = tables.split_at_mut(1 << bits);
        let mut at = 0;
        for length in 1..=bits {
            let rest = bits - length;
            let after = &smaller[1 << rest..2 << rest];
            for symbol in canonical.of_length(length) {
                let range = &mut larger[at..at + (1 << rest)];
                at += 1 << rest;
                let first = length as u64 | u64::from(*symbol) << 8 | (length as u64) << FIRST_BITS | 1 << COUNT;
                // The sums are below 2^64. A check of each would keep the compiler from adding several at once.
                let before =
                    |entry: u64| (entry << 8 & (SYMBOLS ^ 0xff00)).wrapping_add(entry & SUMS).wrapping_add(first);
                if most[rest] < MOST {
                    for (entry, after) in range.iter_mut().zip(after) {
                        *entry = before(*after);
                    }
                } else {
                    // Four bits have at most four symbols, which fit.
                    for (number, (entry, after)) in range.iter_mut().zip(after).enumerate() {
                        let fits = after >> COUNT < MOST;
                        *entry = before(if fits { *after } else { smaller[16 + (number >> (rest - 4))] });
                    }
                }
                most[bits] = MOST.min(most[bits].max(most[rest] + 1));
            }
        }
    }
}
