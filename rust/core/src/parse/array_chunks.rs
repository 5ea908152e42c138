//! Arrays in chunks, as HDF5 stores them: each chunk has its own place in the file, and passed through filters when it was written.
//!
//! A chunk at the edge of the array is stored whole; what extends past the array is ignored. A chunk that was never written is zeros.
//! The places come from an untrusted file.
//!
//! Source: HDF5 File Format Specification 3.0, "Data Layout Message" and "Filter Pipeline Message"; a deflated chunk is a zlib
//! stream.

use super::order::{advance, dense};
use crate::codec::inflate::DeflatedRange;
use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::Source;
use crate::threads::Context;

/// Deflate makes at most this many bytes of one.
const MOST_INFLATED: u64 = 1032;
/// Bytes of a zlib stream before and after its deflated data.
const ZLIB: (u64, u64) = (2, 4);
/// Bytes of a checksum at the end of a chunk.
const CHECKSUM: u64 = 4;
/// An array of few chunks may have this many bytes.
const ALWAYS: u64 = 64 << 20;

/// What was done to a chunk when it was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChunkFilter {
    /// The first bytes of all elements, then the second ones, and so on.
    Shuffle,
    /// A zlib stream.
    Deflate,
    /// A checksum of 4 bytes at the end, which is not compared.
    Checksum,
}

/// The place of a chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPlace {
    /// The array's index of the chunk's first element.
    pub first: Vec<u64>,
    /// Offset in the file.
    pub at: u64,
    /// Bytes in the file.
    pub stored: u64,
    /// Filters that were left out: bit `i` for the filter `i`.
    pub skipped: u32,
}

/// The chunks of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkList {
    /// Elements of the array along each axis.
    array: Vec<u64>,
    /// The same of a chunk.
    shape: Vec<u64>,
    filters: Vec<ChunkFilter>,
    chunks: Vec<ChunkPlace>,
}

impl ChunkList {
    /// Checks chunks of a shape against the shape of their array. `filters` are in the order in which they were applied.
    pub fn new(
        array: &[u64],
        shape: Vec<u64>,
        filters: Vec<ChunkFilter>,
        chunks: Vec<ChunkPlace>,
    ) -> Result<ChunkList> {
        let wrong = |what: &str| Error::new(Kind::Format, format!("chunks of shape {shape:?}: {what}"));
        if shape.len() != array.len() || shape.is_empty() || shape.contains(&0) {
            return Err(wrong(&format!("expected a chunk shape for the array shape {array:?}")));
        }
        if !filters.is_sorted_by(|a, b| a < b) {
            return Err(Error::new(Kind::Unsupported, "filters in another order than shuffle, deflate, checksum"));
        }
        let is_inside = |chunk: &ChunkPlace| {
            chunk.first.len() == array.len()
                && chunk.first.iter().zip(array).zip(&shape).all(|((first, n), size)| first < n && first % size == 0)
        };
        if !chunks.iter().all(is_inside) {
            return Err(wrong("a chunk that is not at a multiple of it inside the array"));
        }
        Ok(ChunkList { array: array.to_vec(), shape, filters, chunks })
    }

    /// The array's elements in C order and native byte order. `swapped`: stored in the other one.
    pub(super) fn read(
        &self,
        source: &dyn Source,
        (dtype, swapped): (DType, bool),
        context: &mut Context<'_>,
    ) -> Result<Vec<u8>> {
        let shape = self.array.as_slice();
        let item = dtype.bits() / 8;
        let bytes = shape.iter().try_fold(item, |n, d| n.checked_mul(*d));
        let stored = self.chunks.iter().fold(0u64, |n, chunk| n.saturating_add(chunk.stored)).min(source.size());
        let Some(bytes) = bytes.filter(|n| *n <= stored.saturating_mul(MOST_INFLATED).max(ALWAYS)) else {
            let detail = format!("an array of shape {:?}: far more than {stored} stored bytes", shape);
            return Err(Error::new(Kind::Unsupported, detail));
        };
        let mut elements = memory::bytes(bytes)?;
        for chunk in &self.chunks {
            let content = self.content(source, chunk, item, context)?;
            self.put(&content, chunk, (shape, item), &mut elements);
            context.check()?;
        }
        if !swapped {
            return Ok(elements);
        }
        let mut native = memory::bytes(bytes)?;
        Cast::between(dtype, dtype)?.swapped_if(true).apply(&elements, &mut native);
        Ok(native)
    }

    /// A chunk's elements.
    fn content(
        &self,
        source: &dyn Source,
        chunk: &ChunkPlace,
        item: u64,
        context: &mut Context<'_>,
    ) -> Result<Vec<u8>> {
        let is_applied = |filter: ChunkFilter| {
            self.filters.iter().enumerate().any(|(i, applied)| *applied == filter && (chunk.skipped >> i) & 1 == 0)
        };
        let wrong = |detail: String| Error::new(Kind::Format, detail).byte(chunk.at);
        let size = self.shape.iter().try_fold(item, |n, d| n.checked_mul(*d));
        let size = size.ok_or_else(|| wrong(format!("a chunk of shape {:?}: its size overflows", self.shape)))?;
        if chunk.at.checked_add(chunk.stored).is_none_or(|end| end > source.size()) {
            let detail = format!("a chunk of {} bytes: it ends after the file", chunk.stored);
            return Err(Error::new(Kind::Truncated, detail).byte(chunk.at));
        }
        let checksum = if is_applied(ChunkFilter::Checksum) { CHECKSUM } else { 0 };
        let stored = chunk.stored.saturating_sub(checksum);
        let is_deflated = is_applied(ChunkFilter::Deflate);
        let content = if is_deflated {
            let deflated = stored.saturating_sub(ZLIB.0 + ZLIB.1);
            if size > deflated.saturating_mul(MOST_INFLATED) {
                return Err(wrong(format!("a chunk of {size} bytes: expected more than {stored} stored bytes")));
            }
            let content = DeflatedRange { source, at: chunk.at + ZLIB.0, stored: deflated, size }.content(context)?;
            let mut sum = [0; 4];
            source.read(chunk.at + ZLIB.0 + deflated, &mut sum, context.stop())?;
            if adler32(&content) != u32::from_be_bytes(sum) {
                return Err(wrong("a chunk whose content differs from its checksum".to_string()));
            }
            content
        } else {
            if stored != size {
                return Err(wrong(format!("a chunk: expected {size} bytes, found {stored}")));
            }
            let mut content = memory::bytes(size)?;
            source.read_long(chunk.at, &mut content, context)?;
            content
        };
        if !is_applied(ChunkFilter::Shuffle) || item == 1 {
            return Ok(content);
        }
        let (item, count) = (to_usize(item), content.len() / to_usize(item));
        let mut elements = memory::bytes(size)?;
        for (i, element) in elements.chunks_exact_mut(item).enumerate() {
            for (part, byte) in element.iter_mut().enumerate() {
                *byte = content[part * count + i];
            }
        }
        Ok(elements)
    }

    /// Copies the part of a chunk that is inside the array.
    fn put(&self, content: &[u8], chunk: &ChunkPlace, (shape, item): (&[u64], u64), elements: &mut [u8]) {
        let (from, to) = (dense(&self.shape), dense(shape));
        let counts: Vec<u64> =
            chunk.first.iter().zip(shape).zip(&self.shape).map(|((first, n), size)| (*size).min(n - first)).collect();
        let Some((run, outer)) = counts.split_last() else { return };
        let run = to_usize(run * item);
        let start: u64 = chunk.first.iter().zip(&to).map(|(first, step)| first * step).sum();
        let mut index = vec![0u64; outer.len()];
        loop {
            let at = |steps: &[u64]| index.iter().zip(steps).map(|(i, step)| i * step).sum::<u64>();
            let (a, b) = (to_usize(at(&from) * item), to_usize((start + at(&to)) * item));
            elements[b..b + run].copy_from_slice(&content[a..a + run]);
            if !advance(&mut index, outer.iter().copied()) {
                return;
            }
        }
    }
}

/// The checksum of zlib (RFC 1950).
fn adler32(content: &[u8]) -> u32 {
    const MODULUS: u32 = 65521;
    let (mut a, mut b) = (1u32, 0u32);
    // The longest run without an overflow.
    for run in content.chunks(5552) {
        for byte in run {
            a += u32::from(*byte);
            b += a;
        }
        (a, b) = (a % MODULUS, b % MODULUS);
    }
    b << 16 | a
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::dtype::DType;
    use crate::location::Location;
    use crate::parse::arrays;
    use crate::source::held::Held;
    use crate::threads::Stop;

    fn read(list: ChunkList, shape: &[u64], file: Vec<u8>) -> Result<Vec<u8>> {
        let strides = dense(shape);
        let place = arrays::ArrayPlace {
            dtype: DType::U16,
            swapped: false,
            shape: shape.to_vec(),
            strides,
            at: 0,
            inside: None,
            parts: Some(Arc::new(arrays::ArrayParts::Chunks(list))),
        };
        let source = Held::new(Location::object("test", "a.h5"), file.into());
        arrays::read(&source, &place, &mut Context::of_part(&Stop::new()))
    }

    fn chunk(first: &[u64], at: u64, stored: u64) -> ChunkPlace {
        ChunkPlace { first: first.to_vec(), at, stored, skipped: 0 }
    }

    #[test]
    fn chunks_at_the_edge_are_cut_and_missing_ones_are_zero() {
        let file: Vec<u8> = (0..16).map(|n: u16| n + 1).flat_map(u16::to_le_bytes).collect();
        let chunks = vec![chunk(&[0, 2], 0, 16), chunk(&[2, 0], 16, 16)];
        let list = ChunkList::new(&[3, 3], vec![2, 2], vec![], chunks);
        assert!(list.is_ok());
        let chunks = vec![chunk(&[0, 2], 0, 8), chunk(&[2, 0], 8, 8)];
        let list = ChunkList::new(&[3, 3], vec![2, 2], vec![], chunks).unwrap();
        let found = read(list, &[3, 3], file).unwrap();
        let found: Vec<u16> = found.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        assert_eq!(found, [0, 0, 1, 0, 0, 3, 5, 6, 0]);
    }

    #[test]
    fn shuffled_elements_are_put_together() {
        let list = ChunkList::new(&[2], vec![2], vec![ChunkFilter::Shuffle], vec![chunk(&[0], 0, 4)]).unwrap();
        assert_eq!(read(list, &[2], vec![1, 2, 3, 4]).unwrap(), [1, 3, 2, 4]);
    }

    #[test]
    fn each_wrong_chunk_is_refused() {
        let new = |filters: &[ChunkFilter], chunks: &[ChunkPlace]| {
            ChunkList::new(&[4, 4], vec![2, 2], filters.to_vec(), chunks.to_vec())
        };
        for first in [&[0][..], &[1, 0], &[4, 0], &[0, 1 << 63]] {
            assert_eq!(new(&[], &[chunk(first, 0, 8)]).unwrap_err().kind, Kind::Format);
        }
        assert_eq!(new(&[ChunkFilter::Deflate, ChunkFilter::Shuffle], &[]).unwrap_err().kind, Kind::Unsupported);
        assert_eq!(ChunkList::new(&[4], vec![0], vec![], vec![]).unwrap_err().kind, Kind::Format);
        let wrong = [
            (chunk(&[0, 0], 0, 7), vec![]),
            (chunk(&[0, 0], 60, 8), vec![]),
            (chunk(&[0, 0], u64::MAX, 8), vec![]),
            (chunk(&[0, 0], 0, 3), vec![ChunkFilter::Deflate]),
            (chunk(&[0, 0], 0, 20), vec![ChunkFilter::Deflate]),
        ];
        for (place, filters) in wrong {
            let list = new(&filters, std::slice::from_ref(&place)).unwrap();
            let error = read(list, &[4, 4], vec![7; 64]).unwrap_err();
            assert!(matches!(error.kind, Kind::Format | Kind::Truncated), "{place:?}: {error}");
        }
        let list = ChunkList::new(&[1 << 40, 1 << 20], vec![1 << 40, 1 << 20], vec![], vec![]).unwrap();
        assert_eq!(read(list, &[1 << 40, 1 << 20], vec![]).unwrap_err().kind, Kind::Unsupported);
    }
}
