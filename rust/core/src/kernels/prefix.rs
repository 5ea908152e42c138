//! Prefix codes decoded with a table of several symbols per lookup, up to four streams at a time. The `unsafe` here: reads and writes
//! of a round, whose bounds are checked once for many rounds.
#![allow(unsafe_code, reason = "bounds are checked once for many rounds")]

use super::wide;

/// Bits of a lookup.
const WINDOW: usize = 11;
/// Lookups of a round: of 64 bits that are read, at least 57 are next.
const LOOKUPS: usize = 5;
/// Symbols of a lookup, at most.
const MOST: u64 = 5;
/// Bytes of a stream's symbols that a round may change. A lookup takes at most five symbols, and writes 8 bytes from byte 20 at most.
const ROUND: usize = 40;

/// A table of lookups. An entry has the bits that it takes in the lowest byte, up to five symbols in the next ones, the bits of the
/// first symbol, and the number of symbols in the highest byte.
#[derive(Clone, Copy, Debug)]
pub struct Lookups<'a>(&'a [u64; 1 << WINDOW]);

impl<'a> Lookups<'a> {
    /// A table; `None` if an entry takes no bit or more than 11, or has more than five symbols.
    #[inline(always)]
    pub fn new(entries: &'a [u64; 1 << WINDOW]) -> Option<Lookups<'a>> {
        // Bit 7 of a number, or of its sum with 128 - n, is 1 if it is n or more.
        let wrong = entries.iter().fold(0, |wrong, entry| {
            let (bits, symbols) = ((entry & 0xff).wrapping_sub(1), entry >> 56);
            wrong | bits | bits.wrapping_add(128 - WINDOW as u64) | symbols | (symbols + (127 - MOST))
        });
        (wrong & 0x80 == 0).then_some(Lookups(entries))
    }

    /// The first symbol of the next bits, which are the lowest ones of `window`, and its number of bits.
    #[inline]
    pub fn first(&self, window: usize) -> (u8, usize) {
        let [_, symbol, .., bits, _] = self.0[window % (1 << WINDOW)].to_le_bytes();
        (symbol, usize::from(bits))
    }
}

/// A stream of codes: its next bit in all bytes, and the places of its next symbols.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// The next bit.
    pub bit: usize,
    /// Where the next symbol belongs.
    pub at: usize,
    /// Where the last symbol ends.
    pub end: usize,
}

impl Stream {
    /// Rounds for which bytes and places certainly suffice: a round takes less than 8 bytes and writes less than [`ROUND`] symbols.
    #[inline(always)]
    fn rounds(&self, bytes: &[u8], symbols: &[u8]) -> usize {
        (bytes.len().saturating_sub(self.bit / 8) / 8).min(self.end.min(symbols.len()).saturating_sub(self.at) / ROUND)
    }
}

/// Decodes streams until each of them is near the end of its symbols or of all bytes. Bytes between a stream's symbols and its end
/// may change.
pub fn decode_together(bytes: &[u8], table: Lookups<'_>, streams: &mut [Stream; 4], symbols: &mut [u8]) {
    wide(
        #[inline(always)]
        || decode_portably(bytes, table, streams, symbols),
    );
}

/// As [`decode_together`], with instructions that every processor has.
#[inline(always)]
pub fn decode_portably(bytes: &[u8], table: Lookups<'_>, streams: &mut [Stream; 4], symbols: &mut [u8]) {
    loop {
        let [a, b, c, d] = streams;
        let mut active = [a, b, c, d].map(Some);
        let mut count = 0;
        for i in 0..active.len() {
            if active[i].as_ref().is_some_and(|stream| stream.rounds(bytes, symbols) > 0) {
                active.swap(count, i);
                count += 1;
            }
        }
        match (count, active) {
            (4, [Some(a), Some(b), Some(c), Some(d)]) => decode_rounds(bytes, table, [a, b, c, d], symbols),
            (3, [Some(a), Some(b), Some(c), _]) => decode_rounds(bytes, table, [a, b, c], symbols),
            (2, [Some(a), Some(b), ..]) => decode_rounds(bytes, table, [a, b], symbols),
            (1, [Some(a), ..]) => decode_rounds(bytes, table, [a], symbols),
            _ => return,
        }
    }
}

/// As many rounds as all of these streams certainly have.
#[inline(always)]
fn decode_rounds<const N: usize>(
    bytes: &[u8],
    Lookups(table): Lookups<'_>,
    mut streams: [&mut Stream; N],
    symbols: &mut [u8],
) {
    let rounds = streams.iter().map(|stream| stream.rounds(bytes, symbols)).min().unwrap_or(0);
    let mut bit = streams.each_ref().map(|stream| stream.bit);
    let (from, to) = (bytes.as_ptr(), symbols.as_mut_ptr());
    // SAFETY: within the symbols, as `rounds` is 0 otherwise and nothing is written.
    let mut place = streams.each_ref().map(|stream| unsafe { to.add(if rounds > 0 { stream.at } else { 0 }) });
    for _ in 0..rounds {
        // The next bits, from the highest down, and a mark: a 1 in the lowest bit, which moves up as bits are taken.
        let mut next = bit.map(|bit| {
            // SAFETY: a round takes at most 55 bits, so 8 bytes from this one are within the bytes in each of the rounds.
            let word = unsafe { from.add(bit / 8).cast::<[u8; 8]>().read() };
            u64::from_be_bytes(word) << (bit % 8) | 1
        });
        for _ in 0..LOOKUPS {
            for k in 0..N {
                let entry = table[(next[k] >> (64 - WINDOW)) as usize];
                next[k] = next[k].wrapping_shl(entry as u32);
                // SAFETY: a round writes less than 40 bytes, and moves on by at most 25; each stream has 40 for each of the rounds.
                unsafe {
                    place[k].cast::<[u8; 8]>().write((entry >> 8).to_le_bytes());
                    place[k] = place[k].add((entry >> 56) as usize);
                }
            }
        }
        for k in 0..N {
            bit[k] = bit[k].wrapping_add(next[k].trailing_zeros() as usize);
        }
    }
    for (k, stream) in streams.iter_mut().enumerate() {
        stream.bit = bit[k];
        stream.at = if rounds > 0 { place[k].addr() - to.addr() } else { stream.at };
    }
}
