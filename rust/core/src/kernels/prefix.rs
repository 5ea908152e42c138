//! Prefix codes decoded with a table of several symbols per lookup, four streams at a time.

/// Bits of a lookup.
const WINDOW: usize = 11;
/// Lookups of a round: of 64 bits that are read, at least 57 are next.
const LOOKUPS: usize = 5;
/// Bytes of a stream's symbols that a round may change. A lookup takes at most five symbols, and writes 8 bytes from byte 20 at most.
const ROUND: usize = 40;

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

/// Decodes streams until one of them is near the end of its symbols or of all bytes. An entry of the table has the bits that it
/// takes in the lowest byte, up to five symbols in the next ones, and their number in the highest one. Bytes between a stream's
/// symbols and its end may change.
pub fn decode_together(bytes: &[u8], table: &[u64; 1 << WINDOW], streams: &mut [Stream; 4], symbols: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("bmi2") {
        // SAFETY: the processor has BMI2.
        #[allow(unsafe_code, reason = "a call of a function for instructions that were found")]
        unsafe {
            with_bmi2(bytes, table, streams, symbols);
        }
        return;
    }
    decode_rounds(bytes, table, streams, symbols);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "bmi2")]
fn with_bmi2(bytes: &[u8], table: &[u64; 1 << WINDOW], streams: &mut [Stream; 4], symbols: &mut [u8]) {
    decode_rounds(bytes, table, streams, symbols);
}

#[inline(always)]
fn decode_rounds(bytes: &[u8], table: &[u64; 1 << WINDOW], streams: &mut [Stream; 4], symbols: &mut [u8]) {
    let [mut a, mut b, mut c, mut d] = *streams;
    loop {
        // A round takes less than 8 bytes and writes less than ROUND symbols.
        let rounds = |stream: &Stream| {
            (bytes.len().saturating_sub(stream.bit / 8) / 8).min(stream.end.saturating_sub(stream.at) / ROUND)
        };
        let rounds = rounds(&a).min(rounds(&b)).min(rounds(&c)).min(rounds(&d));
        if rounds == 0 {
            break;
        }
        for _ in 0..rounds {
            let (Some(mut w), Some(mut x), Some(mut y), Some(mut z)) =
                (next(bytes, a.bit), next(bytes, b.bit), next(bytes, c.bit), next(bytes, d.bit))
            else {
                return;
            };
            let Ok([p, q, r, s]) = symbols.get_disjoint_mut([
                a.at..a.at + ROUND,
                b.at..b.at + ROUND,
                c.at..c.at + ROUND,
                d.at..d.at + ROUND,
            ]) else {
                return;
            };
            let (Some(p), Some(q), Some(r), Some(s)) =
                (p.first_chunk_mut(), q.first_chunk_mut(), r.first_chunk_mut(), s.first_chunk_mut())
            else {
                return;
            };
            let [mut i, mut j, mut k, mut l] = [0; 4];
            for _ in 0..LOOKUPS {
                lookup(table, &mut w, &mut i, p);
                lookup(table, &mut x, &mut j, q);
                lookup(table, &mut y, &mut k, r);
                lookup(table, &mut z, &mut l, s);
            }
            a.at += i;
            b.at += j;
            c.at += k;
            d.at += l;
            a.bit += w.trailing_zeros() as usize;
            b.bit += x.trailing_zeros() as usize;
            c.bit += y.trailing_zeros() as usize;
            d.bit += z.trailing_zeros() as usize;
        }
    }
    *streams = [a, b, c, d];
}

/// The next bits, from the highest down, and a mark: a 1 in the lowest bit, which moves up as bits are taken.
#[inline(always)]
fn next(bytes: &[u8], bit: usize) -> Option<u64> {
    let next = bytes.get(bit / 8..)?.first_chunk()?;
    Some(u64::from_be_bytes(*next) << (bit % 8) | 1)
}

#[inline(always)]
fn lookup(table: &[u64; 1 << WINDOW], bits: &mut u64, at: &mut usize, symbols: &mut [u8; ROUND]) {
    let entry = table[(*bits >> (64 - WINDOW)) as usize];
    *bits = bits.wrapping_shl(entry as u32);
    // At most 20. The mask shows the compiler that 8 bytes follow.
    let begin = *at & 31;
    symbols[begin..begin + 8].copy_from_slice(&(entry >> 8).to_le_bytes());
    *at += (entry >> 56) as usize;
}
