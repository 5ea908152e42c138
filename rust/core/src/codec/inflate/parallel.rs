//! Inflates one gzip member with several threads.
//!
//! Deflate has no index: a block may begin at any bit and refers to the previous 32 KiB. The file is cut into stretches; for
//! each stretch
//!
//! 1. search for the beginning of a block, and inflate from there, with marks for bytes of the unknown window, until
//!    the output no longer refers to that window ([`blocks`](super::blocks));
//! 2. inflate the rest with libdeflate, up to the next stretch: the window is prepended as a stored block, the bits are
//!    shifted to begin at a byte, and an empty final block is appended;
//! 3. in file order, replace the marks by their bytes and copy everything to its place.
//!
//! A false beginning, by chance or by malice, gives wrong bytes. The checksum and length at the end of the file cover the
//! whole: if they or anything else differ, the result is `None` and one thread inflates the file from the start.

use std::collections::BTreeMap;

use crc32fast::Hasher;

use super::libdeflate::{Inflater, Outcome};
use crate::codec::inflate::blocks::{MARK, WINDOW, Warm, warm_up};
use crate::error::Result;
use crate::memory;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::threads::{self, Lock, Stop, Watch};

/// Compressed bytes per stretch: small relative to a cache, large relative to the cost of searching for a block.
const STRETCH: usize = 3 << 20;
/// How far to search for the beginning of a block.
const LOOK: usize = 256 << 10;
/// Values inflated with marks, at most.
const WARM: usize = 128 << 10;
/// Work for finding one beginning, in steps of [`warm_up`]: about 50 ms at most, and far more than usual encoders need. In a
/// malicious file every offset may look like a beginning.
const STEPS: u64 = 16 << 20;

/// Smaller files are inflated by one thread.
const WORTH: usize = 2 * STRETCH;

/// Other work to do while a file is inflated; receives a watch.
pub type Beside<'a> = &'a (dyn Fn(Watch<'_>) -> Result<()> + Sync);

/// A part of the file that libdeflate inflates.
struct Stretch {
    /// Its first bit, and one past its last.
    begin: u64,
    end: u64,
    last: bool,
    /// The values before it; `None` for the first stretch.
    warm: Option<Warm>,
}

/// Output written in file order.
struct Ordered<'a> {
    next: usize,
    rest: &'a mut [u8],
    /// The last bytes written.
    window: Vec<u8>,
    written: u64,
    crc: Hasher,
    /// Finished before their turn.
    waiting: BTreeMap<usize, (Buffer, usize, Hasher)>,
    failed: bool,
}

/// How to inflate a file.
pub struct InflatePlan(Vec<Stretch>);

/// Cuts a file of one member into stretches; `None` if it is too small or cannot be cut well.
pub fn plan(gz: &[u8], watch: Watch<'_>) -> Result<Option<InflatePlan>> {
    let Some(body) = body(gz).filter(|_| gz.len() >= WORTH) else { return Ok(None) };
    let stretches = cut(&gz[..gz.len() - 8], body, watch)?;
    Ok((stretches.len() > 1).then_some(InflatePlan(stretches)))
}

/// Inflates one member to `size` bytes and calls `beside` at the same time. `None` if one thread must inflate it after all;
/// `beside` has been called then. Errors come only from `beside`.
pub fn inflate(
    gz: &[u8],
    InflatePlan(stretches): &InflatePlan,
    size: u64,
    beside: Beside<'_>,
    watch: Watch<'_>,
) -> Result<Option<Buffer>> {
    let Ok(mut out) = Buffer::new(to_usize(size)) else {
        beside(watch)?;
        return Ok(None);
    };
    let ordered = Lock::new(Ordered {
        next: 0,
        rest: out.bytes_mut(),
        window: vec![],
        written: 0,
        crc: Hasher::new(),
        waiting: BTreeMap::new(),
        failed: false,
    });
    let spare: Lock<Vec<Buffer>> = Lock::default();
    let usual = (STRETCH as u64 * size / gz.len() as u64 * 5 / 4) as usize + (1 << 16);
    let work = |part: usize, stop: &Stop| -> Result<()> {
        let Some(i) = part.checked_sub(1) else { return beside(&mut || stop.is_set()) };
        if ordered.lock().failed {
            return Ok(());
        }
        let recycled = spare.lock().pop();
        let made = stretch(gz, &stretches[i], recycled, usual, to_usize(size));
        let mut ordered = ordered.lock();
        match made {
            Some(made) => ordered.waiting.insert(i, made),
            None => {
                ordered.failed = true;
                return Ok(());
            }
        };
        while let Some((block, n, crc)) = {
            let next = ordered.next;
            ordered.waiting.remove(&next)
        } {
            let warm = stretches[ordered.next].warm.as_ref();
            if ordered.put(warm, &block[block.len().min(n_skip(warm))..][..n], &crc).is_none() {
                ordered.failed = true;
                return Ok(());
            }
            ordered.next += 1;
            spare.lock().push(block);
        }
        Ok(())
    };
    threads::run(stretches.len() + 1, &work, watch)?;
    let done = ordered.into_inner();
    let trailer: [u8; 8] = gz.last_chunk().copied().unwrap_or_default();
    let [a, b, c, d, ..] = trailer;
    let whole = !done.failed
        && done.next == stretches.len()
        && done.rest.is_empty()
        && done.crc.finalize() == u32::from_le_bytes([a, b, c, d]);
    Ok(whole.then_some(out))
}

/// Bytes of a stretch's output that belong to its window.
fn n_skip(warm: Option<&Warm>) -> usize {
    if warm.is_some() { WINDOW } else { 0 }
}

impl Ordered<'_> {
    fn put(&mut self, warm: Option<&Warm>, bytes: &[u8], crc: &Hasher) -> Option<()> {
        if let Some(warm) = warm {
            let made: Vec<u8> = warm
                .values
                .iter()
                .map(|v| u8::try_from(*v).ok().or_else(|| self.window.get(usize::from(v.checked_sub(MARK)?)).copied()))
                .collect::<Option<_>>()?;
            // Marks count from the oldest byte of a full window; in the first 32 KiB of the file they would be wrong.
            if self.window.len() < WINDOW {
                return None;
            }
            self.crc.update(&made);
            self.write(&made)?;
        }
        self.crc.combine(crc);
        self.write(bytes)
    }

    fn write(&mut self, bytes: &[u8]) -> Option<()> {
        let rest = std::mem::take(&mut self.rest);
        let (here, rest) = rest.split_at_mut_checked(bytes.len())?;
        here.copy_from_slice(bytes);
        self.rest = rest;
        self.written += bytes.len() as u64;
        if bytes.len() >= WINDOW {
            self.window.clear();
            self.window.extend_from_slice(&bytes[bytes.len() - WINDOW..]);
        } else {
            self.window.extend_from_slice(bytes);
            let surplus = self.window.len().saturating_sub(WINDOW);
            self.window.drain(..surplus);
        }
        Some(())
    }
}

/// The offset of the first member's deflate data (RFC 1952, 2.3).
fn body(gz: &[u8]) -> Option<usize> {
    let flags = *gz.get(3)?;
    if gz.get(..3)? != [0x1f, 0x8b, 8] || flags & 0xe0 != 0 {
        return None;
    }
    let mut at = 10;
    if flags & 4 != 0 {
        at += 2 + usize::from(u16::from_le_bytes([*gz.get(at)?, *gz.get(at + 1)?]));
    }
    for name in [8, 16] {
        if flags & name != 0 {
            at += gz.get(at..)?.iter().position(|b| *b == 0)? + 1;
        }
    }
    at += if flags & 2 != 0 { 2 } else { 0 };
    (at + 8 < gz.len()).then_some(at)
}

/// Cuts the body into stretches at the beginnings found; empty if fewer than half were found.
fn cut(body: &[u8], first: usize, watch: Watch<'_>) -> Result<Vec<Stretch>> {
    let count = (body.len() - first).div_ceil(STRETCH).max(1);
    let each = (body.len() - first) / count;
    let find = |i: usize| {
        let from = first + i * each;
        warm_up(body, from as u64 * 8, (from + LOOK).min(body.len()) as u64 * 8, WARM, STEPS)
    };
    // Most files are uniform: if the middle has no usable beginning (text, stored or fixed blocks), the rest has none
    // either.
    let probe = count / 2;
    let Some(middle) = (probe > 0).then(|| find(probe)).flatten() else { return Ok(vec![]) };
    let look = |i: usize, _: &Stop| Ok(if i == 0 || i == probe { None } else { find(i) });
    let mut found = threads::map(count, &look, watch)?;
    found[probe] = Some(middle);
    if found.iter().flatten().count() < probe {
        return Ok(vec![]);
    }
    let mut stretches = vec![Stretch { begin: first as u64 * 8, end: 0, last: false, warm: None }];
    for warm in found.into_iter().flatten() {
        if let Some(before) = stretches.last_mut() {
            before.end = warm.begin;
        }
        stretches.push(Stretch { begin: warm.end, end: 0, last: false, warm: Some(warm) });
    }
    if let Some(last) = stretches.last_mut() {
        last.end = body.len() as u64 * 8;
        last.last = true;
    }
    Ok(stretches)
}

/// Inflates a stretch. Returns the block with its output after the window, the length of the output, and its checksum.
fn stretch(
    gz: &[u8],
    stretch: &Stretch,
    spare: Option<Buffer>,
    usual: usize,
    most: usize,
) -> Option<(Buffer, usize, Hasher)> {
    let bits = stretch.end.checked_sub(stretch.begin)?;
    let mut input: Vec<u8> = memory::reserve(WINDOW as u64 + bits / 8 + 32).ok()?;
    let skip = n_skip(stretch.warm.as_ref());
    if let Some(warm) = &stretch.warm {
        // A stored block that is not the last: three zero bits, padding, its length, and the length's complement.
        input.push(0);
        let len = u16::try_from(WINDOW).ok()?;
        input.extend_from_slice(&len.to_le_bytes());
        input.extend_from_slice(&(!len).to_le_bytes());
        // No marks are in it: what follows does not refer to the unknown window.
        let window = warm.values[warm.values.len() - WINDOW..].iter().map(|v| u8::try_from(*v).ok());
        for byte in window {
            input.push(byte?);
        }
    }
    shift_copy(gz, stretch.begin, bits, &mut input);
    if !stretch.last {
        // An empty last block of the fixed code: bits 1, 1, 0, and seven zeros.
        let used = bits % 8;
        let [low, high] = (3u16 << used).to_le_bytes();
        match input.last_mut() {
            Some(byte) if used > 0 => {
                *byte = (*byte & ((1 << used) - 1)) | low;
                input.extend_from_slice(&[high, 0]);
            }
            _ => input.extend_from_slice(&[3, 0]),
        }
    }
    let mut out = match spare {
        Some(spare) if spare.len() >= usual => spare,
        _ => Buffer::new(usual + skip).ok()?,
    };
    let mut inflater = Inflater::new().ok()?;
    loop {
        match inflater.raw(&input, out.bytes_mut()) {
            Outcome::Done { made, read } => {
                let all = made >= skip && read + 2 >= input.len();
                let mut crc = Hasher::new();
                crc.update(out.get(skip..made)?);
                return all.then_some((out, made - skip, crc));
            }
            Outcome::Full if out.len() < most.saturating_add(WINDOW) => {
                out = Buffer::new((out.len() * 2).min(most.saturating_add(WINDOW))).ok()?;
            }
            _ => return None,
        }
    }
}

/// Appends `bits` bits starting at bit `begin`; the first becomes the lowest of a byte.
fn shift_copy(bytes: &[u8], begin: u64, bits: u64, out: &mut Vec<u8>) {
    let (first, shift) = ((begin / 8) as usize, begin % 8);
    let n = to_usize(bits.div_ceil(8));
    if shift == 0 {
        out.extend_from_slice(&bytes[first..(first + n).min(bytes.len())]);
        return;
    }
    let mut at = first;
    let end = first + n;
    // Seven bytes of each eight loaded.
    while at + 8 <= bytes.len() && at + 7 <= end {
        let word = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap_or_default());
        out.extend_from_slice(&(word >> shift).to_le_bytes()[..7]);
        at += 7;
    }
    for i in at..end {
        let low = bytes.get(i).copied().unwrap_or(0);
        let high = bytes.get(i + 1).copied().unwrap_or(0);
        out.push(low >> shift | high << (8 - shift));
    }
}
