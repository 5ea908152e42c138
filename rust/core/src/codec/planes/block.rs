//! Decoding: a whole block, or some of its rows. A row needs the part of each stream before its end only.

use std::ops::Range;

use super::code::{STREAMS, damaged};
use super::header::{BlockHeader, CODED_PLANE, CONSTANT_PLANE, HEADER, RAW, RAW_PLANE};
use super::repeats::{COPIES, INDEXED, RowIndex, ZEROS};
use super::scratch::with_scratch;
use super::table::Coded;
use crate::error::Result;
use crate::kernels::planes::{Plane, append_merged, merge};
use crate::memory;
use crate::number::to_usize;

/// A plane of a block, as it is stored.
#[derive(Debug)]
enum StoredPlane<'a> {
    Plain(Plane<'a>),
    Coded(Box<Coded>),
}

/// The stored rows of a block.
#[derive(Debug)]
enum StoredBody<'a> {
    Raw(&'a [u8]),
    /// As many planes as a value has bytes.
    Planes(Box<[StoredPlane<'a>]>),
}

/// A block whose structure is checked, apart from the symbols of its streams.
#[derive(Debug)]
pub struct PackedBlock<'a> {
    bytes: &'a [u8],
    header: BlockHeader,
    index: Option<RowIndex<'a>>,
    body: StoredBody<'a>,
}

/// A row of a block.
#[derive(Clone, Copy, Debug)]
pub enum BlockRow<'a> {
    /// Zeros.
    Zeros,
    /// Bytes in place.
    Bytes(&'a [u8]),
    /// Values in planes.
    Values {
        /// One for each byte of a value.
        planes: &'a [Plane<'a>],
        /// The first value.
        first: usize,
        /// The bit of the sign.
        sign: u32,
    },
}

impl BlockRow<'_> {
    /// Writes the row to memory of its length.
    pub fn write(self, to: &mut [u8]) {
        match self {
            BlockRow::Zeros => to.fill(0),
            BlockRow::Bytes(bytes) => to.copy_from_slice(bytes),
            BlockRow::Values { planes, first, sign } => merge(planes, first..first + to.len() / planes.len(), sign, to),
        }
    }
}

impl<'a> PackedBlock<'a> {
    /// A block, which must be all of `bytes` and decode to at most `limit` bytes.
    ///
    /// # Errors
    /// [`Kind::Format`](crate::error::Kind): the block is damaged; the message has the byte offset.
    pub fn parse(bytes: &'a [u8], limit: u64) -> Result<PackedBlock<'a>> {
        let header = BlockHeader::parse(bytes)?;
        let BlockHeader { encoded, decoded, row, stored, .. } = header;
        if encoded != bytes.len() {
            return Err(damaged(format!("byte 4: expected a block of {} bytes, found {encoded}", bytes.len())));
        }
        if decoded as u64 > limit {
            return Err(damaged(format!("byte 8: expected at most {limit} decoded bytes, found {decoded}")));
        }
        let index = match header.repeats {
            INDEXED => Some(RowIndex::parse(bytes, HEADER, decoded / row, stored)?),
            _ => None,
        };
        let at = HEADER + index.map_or(0, |index| index.len());
        let (kept, rest) = (stored * row, bytes.get(at..).unwrap_or_default());
        let body = match header.way {
            RAW if rest.len() != kept => {
                return Err(damaged(format!("byte {at}: expected {kept} raw bytes, found {}", rest.len())));
            }
            RAW => StoredBody::Raw(rest),
            _ => StoredBody::Planes(parse_planes(bytes, at, &header)?),
        };
        Ok(PackedBlock { bytes, header, index, body })
    }

    /// Bytes of a row.
    pub fn row(&self) -> usize {
        self.header.row
    }

    /// Bytes of all rows.
    pub fn decoded(&self) -> usize {
        self.header.decoded
    }

    /// All rows.
    ///
    /// # Errors
    /// [`Kind::Format`](crate::error::Kind): a stream is damaged. `NoMemory`.
    pub fn decode(&self) -> Result<Vec<u8>> {
        let BlockHeader { decoded, row, stored, sign, typesize, .. } = self.header;
        let kept = stored * row;
        let mut rows = memory::reserve(decoded as u64)?;
        match &self.body {
            StoredBody::Raw(bytes) => rows.extend_from_slice(bytes),
            StoredBody::Planes(planes) => {
                let merge = |planes: &[Plane<'_>]| append_merged(planes, kept / typesize, sign, &mut rows);
                self.with_planes(planes, None, merge)?;
            }
        }
        if self.header.repeats == COPIES {
            for _ in stored..decoded / row {
                rows.extend_from_within(kept - row..kept);
            }
        }
        memory::resize(&mut rows, decoded as u64)?;
        if let Some(index) = self.index {
            index.expand(&mut rows, row);
        }
        Ok(rows)
    }

    /// Calls `each` with the position of each of these row numbers and its row. Streams are decoded up to these rows, and not checked
    /// beyond them.
    ///
    /// # Errors
    /// [`Kind::Format`](crate::error::Kind): a row is not in the block, or a stream is damaged. `NoMemory`.
    pub fn rows(&self, numbers: &[u64], each: &mut dyn FnMut(usize, BlockRow<'_>)) -> Result<()> {
        let BlockHeader { decoded, row, stored, sign, typesize, repeats, .. } = self.header;
        let count = decoded / row;
        if let Some(outside) = numbers.iter().find(|number| **number >= count as u64) {
            return Err(damaged(format!("byte 8: expected row {outside}, found {count} rows")));
        }
        let stored_row = |number: u64| match (repeats, &self.index) {
            (ZEROS, _) => Some(to_usize(number)).filter(|number| *number < stored),
            (COPIES, _) => Some(to_usize(number).min(stored - 1)),
            (_, Some(index)) => index.get(to_usize(number)),
            _ => Some(to_usize(number)),
        };
        match &self.body {
            StoredBody::Raw(bytes) => {
                for (i, number) in numbers.iter().enumerate() {
                    let row = stored_row(*number).and_then(|number| bytes.get(number * row..(number + 1) * row));
                    each(i, row.map_or(BlockRow::Zeros, BlockRow::Bytes));
                }
                Ok(())
            }
            StoredBody::Planes(planes) => {
                let values = |number: usize| number * (row / typesize)..(number + 1) * (row / typesize);
                let wanted = numbers.iter().filter_map(|number| stored_row(*number)).map(values);
                let ends = ends_of_streams(stored * row / typesize, wanted);
                self.with_planes(planes, Some(ends), |planes| {
                    for (i, number) in numbers.iter().enumerate() {
                        let values = |number| BlockRow::Values { planes, first: values(number).start, sign };
                        each(i, stored_row(*number).map_or(BlockRow::Zeros, values));
                    }
                })
            }
        }
    }

    /// Calls `work` with the planes, decoded up to these ends of their streams, or as a whole.
    fn with_planes(
        &self,
        stored: &[StoredPlane<'_>],
        ends: Option<[usize; STREAMS]>,
        work: impl FnOnce(&[Plane<'_>]),
    ) -> Result<()> {
        let BlockHeader { row, stored: rows, typesize, .. } = self.header;
        let n = rows * row / typesize;
        let coded = stored.iter().filter(|plane| matches!(plane, StoredPlane::Coded(_))).count();
        with_scratch(coded * n, |scratch| {
            let mut parts = scratch.chunks_exact_mut(n.max(1));
            let mut planes = [Plane::Constant(0); 8];
            for (plane, stored) in planes.iter_mut().zip(stored) {
                *plane = match stored {
                    StoredPlane::Plain(plane) => *plane,
                    StoredPlane::Coded(coded) => {
                        let part = parts.next().unwrap_or_default();
                        coded.decode(self.bytes, part, ends)?;
                        Plane::Bytes(part)
                    }
                };
            }
            work(&planes[..stored.len()]);
            Ok(())
        })
    }
}

/// Up to where the streams of a plane of `n` symbols have symbols of these ranges.
fn ends_of_streams(n: usize, wanted: impl Iterator<Item = Range<usize>>) -> [usize; STREAMS] {
    let quarter = n.div_ceil(STREAMS).max(1);
    let mut ends = [0, 1, 2, 3].map(|k| (k * quarter).min(n));
    for Range { start, end } in wanted {
        for (k, last) in ends.iter_mut().enumerate().skip(start / quarter) {
            if k * quarter >= end {
                break;
            }
            *last = end.min((k + 1) * quarter).max(*last);
        }
    }
    ends
}

/// The planes of the body, which begins at byte `at`.
fn parse_planes<'a>(block: &'a [u8], mut at: usize, header: &BlockHeader) -> Result<Box<[StoredPlane<'a>]>> {
    let BlockHeader { row, stored, typesize, .. } = *header;
    let n = stored * row / typesize;
    let mut planes = memory::reserve(typesize as u64)?;
    for number in 0..typesize {
        if n == 0 {
            planes.push(StoredPlane::Plain(Plane::Constant(0)));
            continue;
        }
        let short = |at: usize| damaged(format!("byte {at}: the block ends in plane {number} of {typesize}"));
        let kind = *block.get(at).ok_or_else(|| short(at))?;
        at += 1;
        planes.push(match kind {
            RAW_PLANE => {
                let bytes = block.get(at..).and_then(|rest| rest.get(..n)).ok_or_else(|| short(at))?;
                at += n;
                StoredPlane::Plain(Plane::Bytes(bytes))
            }
            CONSTANT_PLANE => {
                let value = *block.get(at).ok_or_else(|| short(at))?;
                at += 1;
                StoredPlane::Plain(Plane::Constant(value))
            }
            CODED_PLANE => {
                let coded = Coded::parse(block, at, n)?;
                at = coded.end();
                StoredPlane::Coded(Box::new(coded))
            }
            other => {
                let at = at - 1;
                return Err(damaged(format!("byte {at}: expected a plane of kind 0, 1 or 2, found {other}")));
            }
        });
    }
    if at != block.len() {
        let more = block.len().saturating_sub(at);
        return Err(damaged(format!("byte {at}: expected the end of the block, found {more} more bytes")));
    }
    Ok(planes.into())
}
