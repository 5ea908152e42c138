//! A blosc frame: its header, its blocks, and numbers as byte planes.
//!
//! The layout is c-blosc 1's (`README_CHUNK_FORMAT.rst` there): a header of 16 bytes; then the uncompressed numbers if the frame
//! is *stored*, else an offset per block and, in each block, the *planes* of its numbers (all lowest bytes, all second bytes,
//! ...), each compressed separately after its length. Planes stay separate here: a window reads a few numbers of each, and a
//! constant plane (token ids are small) costs neither time nor memory.

use std::borrow::Cow;

use crate::arrays::failing::Undecodable;
use crate::codec::cache::Cached;
use zarrs::array::codec::BloscCodec;

use crate::codec::lz4;
use crate::error::{self, Error, Kind};
use crate::memory;

/// Size of the header in bytes.
pub const HEADER: usize = 16;
/// Blocks with fewer numbers are never split (`MIN_BUFFERSIZE` in blosc.c; frames from before the flag rely on it).
const SPLIT_FROM: usize = 128;
/// Maximum bytes per number.
const WIDEST: usize = 8;
const SHUFFLED: u8 = 0x1;
const STORED: u8 = 0x2;
const BIT_SHUFFLED: u8 = 0x4;
const UNSPLIT: u8 = 0x10;
const LZ4: u8 = 1;

/// Maximum length of an encoded chunk that decodes to `bytes`. Codecs hardly expand data (c-blosc: by its header), so a longer
/// chunk is damaged, and reading it would allocate memory based only on a length in a file.
pub fn most_stored(bytes: usize) -> u64 {
    bytes as u64 * 2 + (64 << 10)
}

/// Levanter's blosc codec, for numbers of `item` bytes.
pub(super) fn blosc(item: usize) -> error::Result<BloscCodec> {
    use zarrs::metadata_ext::codec::blosc::{BloscCompressionLevel, BloscCompressor, BloscShuffleMode};
    let bad = |e: String| Error::new(Kind::Internal, format!("c-blosc rejects Levanter's own settings: {e}"));
    let level = BloscCompressionLevel::try_from(5u8).map_err(|_| bad("level 5".to_string()))?;
    BloscCodec::new(BloscCompressor::LZ4, level, Some(0), BloscShuffleMode::Shuffle, Some(item))
        .map_err(|e| bad(e.to_string()))
}

/// The kind of a frame, from its header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// The numbers follow the header uncompressed.
    Stored,
    /// Blocks decoded by this module.
    Blocks(Blocks),
    /// A frame that c-blosc must decode as a whole.
    Other,
}

/// Blocks of LZ4.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Blocks {
    /// Decoded bytes of all blocks.
    pub bytes: usize,
    /// Decoded bytes of a block, except the last.
    pub block: usize,
    /// Bytes per number.
    pub item: usize,
    shuffled: bool,
    split: bool,
}

impl Frame {
    /// Parses a header; `stored` is the frame's length, `bytes` its required decoded size, in numbers of `item` bytes.
    pub fn parse(header: &[u8; HEADER], stored: u64, bytes: usize, item: usize) -> Result<Frame, String> {
        let [version, _, flags, typesize] = [header[0], header[1], header[2], header[3]];
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (nbytes, block, cbytes) = (word(4) as usize, word(8) as usize, word(12));
        if version != 1 && version != 2 {
            return Err(format!("expected a blosc frame of version 1 or 2, found version {version}"));
        }
        if nbytes != bytes {
            return Err(format!("expected a blosc frame of {bytes} bytes, found one of {nbytes}"));
        }
        if u64::from(cbytes) != stored {
            return Err(format!("expected a blosc frame {stored} bytes long, found one of {cbytes}"));
        }
        if flags & STORED != 0 {
            return if stored == (HEADER + bytes) as u64 {
                Ok(Frame::Stored)
            } else {
                Err(format!("expected a stored frame of {} bytes, found {stored}", HEADER + bytes))
            };
        }
        let whole = block > 0 && block <= bytes && block.is_multiple_of(item) && bytes.is_multiple_of(item);
        let shuffled = flags & SHUFFLED != 0 && typesize > 1;
        if flags >> 5 != LZ4 || flags & BIT_SHUFFLED != 0 || !whole || (shuffled && usize::from(typesize) != item) {
            return Ok(Frame::Other);
        }
        let split = flags & UNSPLIT == 0 && typesize > 1 && block / usize::from(typesize) >= SPLIT_FROM;
        if (split && usize::from(typesize) != item) || item > WIDEST {
            return Ok(Frame::Other);
        }
        let count = bytes.div_ceil(block);
        if (HEADER + 4 * count) as u64 > stored {
            return Err(format!("expected the offsets of {count} blocks, found {stored} bytes in all"));
        }
        Ok(Frame::Blocks(Blocks { bytes, block, item, shuffled, split }))
    }
}

impl Blocks {
    /// Number of blocks.
    pub fn count(&self) -> usize {
        self.bytes.div_ceil(self.block)
    }

    /// Numbers per block.
    pub fn numbers(&self, block: usize) -> usize {
        (self.bytes - block * self.block).min(self.block) / self.item
    }

    /// The offset of a block's numbers in the frame, if they are stored uncompressed.
    pub fn stored(&self, frame: &[u8], block: usize) -> Option<usize> {
        if self.shuffled || (self.split && self.numbers(block) * self.item == self.block) {
            return None;
        }
        let start = self.start(frame, block).ok()?;
        let bytes = self.numbers(block) * self.item;
        let (length, at) = (word(frame, start)?, start + 4);
        (length == bytes && at + bytes <= frame.len()).then_some(at)
    }

    fn start(&self, frame: &[u8], block: usize) -> Result<usize, String> {
        word(frame, HEADER + 4 * block)
            .filter(|start| *start < frame.len())
            .ok_or_else(|| format!("block {block}: expected an offset below {}", frame.len()))
    }

    /// Decodes the first `numbers` numbers of a block.
    pub fn decode(&self, frame: &[u8], block: usize, numbers: usize) -> Result<Planes, Undecodable> {
        let held = self.numbers(block);
        let start = self.start(frame, block)?;
        let numbers = numbers.min(held);
        // A shorter last block is not split (blosc_c in blosc.c).
        let split = self.split && held * self.item == self.block;
        let mut streams = SplitStreams { frame, at: start, block };
        let item = self.item;
        if split {
            if !self.shuffled {
                // Parts of the block follow each other; numbers may span them.
                let part = held;
                let mut bytes = memory::bytes((held * item) as u64)?;
                for out in bytes.chunks_exact_mut(part) {
                    streams.next(part)?.fill(out)?;
                }
                return Ok(Planes::whole(bytes, item, held));
            }
            let mut made = Planes { item, numbers, varying: 0, constant: [0; WIDEST], memory: vec![] };
            let mut kinds: [Option<(SplitStream<'_>, Option<u8>)>; WIDEST] = Default::default();
            for (plane, kind) in kinds.iter_mut().enumerate().take(item) {
                let stream = streams.next(held)?;
                let constant = stream.constant();
                if constant.is_none() {
                    made.varying = plane + 1;
                }
                *kind = Some((stream, constant));
            }
            made.memory = memory::bytes((made.varying * numbers) as u64)?;
            for (plane, kind) in kinds.iter().enumerate().take(item) {
                let Some((stream, constant)) = kind else { continue };
                if let Some(byte) = constant {
                    made.constant[plane] = *byte;
                }
                if plane < made.varying && numbers > 0 {
                    let out = &mut made.memory[plane * numbers..(plane + 1) * numbers];
                    match constant {
                        Some(byte) => out.fill(*byte),
                        None => stream.fill(out)?,
                    }
                }
            }
            return Ok(made);
        }
        let mut bytes = memory::bytes((held * item) as u64)?;
        streams.next(held * item)?.fill(&mut bytes)?;
        if self.shuffled {
            return Ok(Planes { item, numbers: held, varying: item, constant: [0; WIDEST], memory: bytes });
        }
        Ok(Planes::whole(bytes, item, held))
    }
}

fn word(bytes: &[u8], at: usize) -> Option<usize> {
    let four = bytes.get(at..at.checked_add(4)?)?;
    // They are signed in the library, and never negative.
    u32::from_le_bytes(four.try_into().ok()?).try_into().ok().filter(|n: &usize| *n <= i32::MAX as usize)
}

/// The compressed streams of a block, in order.
struct SplitStreams<'a> {
    frame: &'a [u8],
    at: usize,
    block: usize,
}

/// A compressed stream of a block.
#[derive(Clone, Copy)]
struct SplitStream<'a> {
    bytes: &'a [u8],
    decoded: usize,
    block: usize,
}

impl<'a> SplitStreams<'a> {
    fn next(&mut self, decoded: usize) -> Result<SplitStream<'a>, String> {
        let bytes = word(self.frame, self.at)
            .and_then(|len| self.frame.get(self.at + 4..(self.at + 4).checked_add(len)?))
            .ok_or_else(|| {
                format!("block {}: expected its streams inside the frame, found them beyond its end", self.block)
            })?;
        self.at += 4 + bytes.len();
        Ok(SplitStream { bytes, decoded, block: self.block })
    }
}

impl SplitStream<'_> {
    fn constant(&self) -> Option<u8> {
        if self.bytes.len() == self.decoded { None } else { lz4::constant(self.bytes, self.decoded) }
    }

    /// Decodes the first bytes into `out`.
    fn fill(&self, out: &mut [u8]) -> Result<(), String> {
        if self.bytes.len() == self.decoded {
            out.copy_from_slice(&self.bytes[..out.len()]);
            return Ok(());
        }
        // A whole block must obey the format's end-of-block rules; a part cannot be checked.
        let decode = if out.len() == self.decoded { lz4::decode } else { lz4::decode_prefix };
        if decode(self.bytes, out) {
            return Ok(());
        }
        Err(format!("block {}: expected LZ4 data of {} decoded bytes, found other data", self.block, self.decoded))
    }
}

/// Numbers as planes: all lowest bytes, all second bytes, and so on.
#[derive(Debug)]
pub struct Planes {
    item: usize,
    numbers: usize,
    /// Number of planes in memory, from the lowest; each plane above is constant.
    varying: usize,
    constant: [u8; WIDEST],
    memory: Vec<u8>,
}

impl Cached for Planes {
    fn size(&self) -> usize {
        self.memory.len() + size_of::<Planes>()
    }

    /// The longer beginning of a block replaces a shorter one.
    fn replaces(&self, kept: &Planes) -> bool {
        self.numbers > kept.numbers
    }
}

impl Planes {
    /// Numbers that are not split into planes.
    pub fn whole(memory: Vec<u8>, item: usize, numbers: usize) -> Planes {
        Planes { item, numbers, varying: 0, constant: [0; WIDEST], memory }
    }

    /// The count of numbers in it.
    pub fn numbers(&self) -> usize {
        self.numbers
    }

    fn is_whole(&self) -> bool {
        self.varying == 0 && !self.memory.is_empty()
    }

    fn plane(&self, plane: usize, first: usize, n: usize) -> &[u8] {
        &self.memory[plane * self.numbers + first..][..n]
    }

    /// `n` numbers from `first`, little endian.
    pub fn bytes(&self, first: usize, n: usize) -> Cow<'_, [u8]> {
        if self.is_whole() {
            return Cow::Borrowed(&self.memory[first * self.item..(first + n) * self.item]);
        }
        let mut out = vec![0u8; n * self.item];
        for plane in 0..self.item {
            if plane < self.varying {
                for (to, from) in out.chunks_exact_mut(self.item).zip(self.plane(plane, first, n)) {
                    to[plane] = *from;
                }
            } else if self.constant[plane] != 0 {
                for to in out.chunks_exact_mut(self.item) {
                    to[plane] = self.constant[plane];
                }
            }
        }
        Cow::Owned(out)
    }

    /// Writes integers of 4 or 8 bytes as int32, if the planes show that they fit; otherwise returns false.
    pub fn narrow(&self, first: usize, out: &mut [i32]) -> bool {
        let n = out.len();
        if self.is_whole()
            || self.item < 4
            || self.varying > 3
            || self.constant[self.varying.max(3)..self.item] != [0; 8][self.varying.max(3)..self.item]
        {
            return false;
        }
        let base = (self.varying..3).fold(0i32, |base, plane| base | i32::from(self.constant[plane]) << (8 * plane));
        match self.varying {
            0 => out.fill(base),
            1 => {
                for (to, a) in out.iter_mut().zip(self.plane(0, first, n)) {
                    *to = base | i32::from(*a);
                }
            }
            2 => {
                for ((to, a), b) in out.iter_mut().zip(self.plane(0, first, n)).zip(self.plane(1, first, n)) {
                    *to = base | i32::from(*a) | i32::from(*b) << 8;
                }
            }
            _ => {
                let planes = self.plane(0, first, n).iter().zip(self.plane(1, first, n)).zip(self.plane(2, first, n));
                for (to, ((a, b), c)) in out.iter_mut().zip(planes) {
                    *to = i32::from(*a) | i32::from(*b) << 8 | i32::from(*c) << 16;
                }
            }
        }
        true
    }
}

/// The header of a stored frame of `bytes` bytes, in numbers of `item` bytes.
pub fn stored_header(bytes: usize, item: usize) -> [u8; HEADER] {
    header(STORED | LZ4 << 5, item, bytes, bytes, HEADER + bytes)
}

fn header(flags: u8, item: usize, bytes: usize, block: usize, stored: usize) -> [u8; HEADER] {
    let mut out = [2, 1, flags, item as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for (at, n) in [(4, bytes), (8, block), (12, stored)] {
        out[at..at + 4].copy_from_slice(&(n as u32).to_le_bytes());
    }
    out
}

/// Minimum size of a block of zeros: smaller blocks would need a longer list of offsets than they save.
const SMALLEST_BLOCK: usize = 32 << 10;

/// A frame of `bytes` bytes that starts with `used` and continues with zeros, which are not stored: one block contains `used`
/// uncompressed, and all other offsets point to one block of zeros. c-blosc reads it like any other frame.
pub fn short_frame(used: &[u8], bytes: usize, item: usize) -> Vec<u8> {
    let block = used.len().next_multiple_of(item * 16).max(SMALLEST_BLOCK);
    if block * 2 > bytes {
        let mut out = stored_header(bytes, item).to_vec();
        out.extend_from_slice(used);
        out.resize(HEADER + bytes, 0);
        return out;
    }
    let count = bytes.div_ceil(block);
    let last = bytes - (count - 1) * block;
    let mut out = vec![0u8; HEADER];
    out.resize(HEADER + 4 * count, 0);
    // Numbers begin at a multiple of 16, for mapped reads.
    let first = (out.len() + 4).next_multiple_of(16) - 4;
    out.resize(first, 0);
    out.extend_from_slice(&(block as u32).to_le_bytes());
    out.extend_from_slice(used);
    out.resize(first + 4 + block, 0);
    let mut starts = vec![first; count];
    let put_zeros = |out: &mut Vec<u8>, len: usize| {
        let at = out.len();
        let zeros = zeros(len);
        out.extend_from_slice(&(zeros.len() as u32).to_le_bytes());
        out.extend_from_slice(&zeros);
        at
    };
    if count > 2 {
        let at = put_zeros(&mut out, block);
        starts[1..count - 1].fill(at);
    }
    starts[count - 1] = if last == block && count > 2 { starts[1] } else { put_zeros(&mut out, last) };
    for (to, start) in out[HEADER..].as_chunks_mut::<4>().0.iter_mut().zip(&starts) {
        *to = (*start as u32).to_le_bytes();
    }
    let head = header(LZ4 << 5 | UNSPLIT, item, bytes, block, out.len());
    out[..HEADER].copy_from_slice(&head);
    out
}

/// The LZ4 block of `len` zeros: one literal, one match of the rest, five literals at the end (`lz4_Block_format.md`).
fn zeros(len: usize) -> Vec<u8> {
    let matched = len - 6;
    let mut out = vec![0x1f, 0, 1, 0];
    let mut more = matched - 4 - 15;
    while more >= 255 {
        out.push(255);
        more -= 255;
    }
    out.push(more as u8);
    out.extend_from_slice(&[0x50, 0, 0, 0, 0, 0]);
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_whole_block_that_ends_in_a_match_is_refused() {
        // Two literals and a match of 14, then the required number of literals, or too few.
        for (last, allowed) in [(5u8, true), (4, false), (0, false)] {
            let mut bytes = vec![0x2a, 1, 2, 2, 0, last << 4];
            bytes.extend(std::iter::repeat_n(1, usize::from(last)));
            let stream = SplitStream { bytes: &bytes, decoded: 16 + usize::from(last), block: 0 };
            let mut whole = vec![0; stream.decoded];
            assert_eq!(stream.fill(&mut whole).is_ok(), allowed, "{last}");
            stream.fill(&mut [0; 8]).unwrap();
        }
    }
}
