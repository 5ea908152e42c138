//! Blocks of rows packed without loss, with their bytes in planes (docs/formats/planes.md specifies the format).
//!
//! Each value is rotated left by one bit: the highest byte of a bfloat16 or float32 is then its exponent. Its sign, now the lowest
//! bit, moves up over the bits that are 0 in all values, as in float32 values that were float16. The first bytes of all values form
//! a plane, then the second bytes, and so on. A plane is raw, one constant, or a prefix code in four streams
//! ([`code`], [`table`]). Repeated rows are stored once ([`repeats`]).
//!
//! A block is little-endian and begins with a header of 24 bytes:
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | `APL1` |
//! | 4..8 | length of the block, header included |
//! | 8..12 | length of the decoded rows |
//! | 12..16 | bytes of a row |
//! | 16..20 | stored rows |
//! | 20 | bytes of a value: 1, 2, 4 or 8 |
//! | 21 | way of the stored rows: 0 raw, 1 planes |
//! | 22 | rows that are not stored: 0 none, 1 zeros after the stored ones, 2 copies of the last stored one after it, 3 any copies |
//! | 23 | the bit of the sign in a rotated value |
//!
//! If any rows are copies, an index follows the header: the number of the stored row of each row.

mod code;
mod repeats;
mod table;

use std::cell::Cell;

use self::code::{damaged, number};
use self::repeats::{COPIES, INDEXED, RowIndex, StoredRows};
use crate::error::{Error, Kind, Result};
use crate::kernels::planes::{Plane, merge, split};
use crate::memory;

/// Bytes of a block's header.
pub const HEADER: usize = 24;
const MAGIC: [u8; 4] = *b"APL1";

const RAW: u8 = 0;
const PLANES: u8 = 1;

const RAW_PLANE: u8 = 0;
const CONSTANT_PLANE: u8 = 1;
const CODED_PLANE: u8 = 2;

/// The largest block, as of every codec here.
const MOST: usize = i32::MAX as usize;
/// A thread keeps at most this much memory for decoded planes.
const KEPT: usize = 1 << 20;

thread_local! {
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The header's fields, checked against each other.
#[derive(Debug)]
struct BlockHeader {
    encoded: usize,
    decoded: usize,
    row: usize,
    stored: usize,
    typesize: usize,
    way: u8,
    repeats: u8,
    sign: u32,
}

impl BlockHeader {
    fn parse(block: &[u8]) -> Result<BlockHeader> {
        let Some((head, _)) = block.split_first_chunk::<HEADER>() else {
            return Err(damaged(format!("expected a header of {HEADER} bytes, found {} bytes", block.len())));
        };
        if !head.starts_with(&MAGIC) {
            return Err(damaged(format!("byte 0: expected 'APL1', found {:02x?}", &head[..4])));
        }
        let header = BlockHeader {
            encoded: number(head, 4),
            decoded: number(head, 8),
            row: number(head, 12),
            stored: number(head, 16),
            typesize: usize::from(head[20]),
            way: head[21],
            repeats: head[22],
            sign: u32::from(head[23]),
        };
        let BlockHeader { encoded, decoded, row, stored, typesize, way, repeats, sign } = header;
        let wrong = |at: usize, expected: &str, found: usize| {
            Err(damaged(format!("byte {at}: expected {expected}, found {found}")))
        };
        if !(HEADER..=MOST).contains(&encoded) {
            return wrong(4, "a length of the block from 24 to 2^31 - 1", encoded);
        }
        if decoded > MOST {
            return wrong(8, "a decoded length below 2^31", decoded);
        }
        if !matches!(typesize, 1 | 2 | 4 | 8) {
            return wrong(20, "values of 1, 2, 4 or 8 bytes", typesize);
        }
        if row == 0 || !row.is_multiple_of(typesize) || !decoded.is_multiple_of(row) {
            return wrong(12, &format!("bytes of a row of whole values, a divisor of {decoded}"), row);
        }
        if stored > decoded / row {
            return wrong(16, &format!("at most {} stored rows", decoded / row), stored);
        }
        if way > PLANES {
            return wrong(21, "way 0 or 1", usize::from(way));
        }
        if !repeats::is_possible(repeats, stored, decoded / row) {
            let rest = decoded / row - stored;
            return wrong(22, &format!("a kind of the {rest} rows beyond {stored} stored ones"), usize::from(repeats));
        }
        let most = if way == PLANES { 8 * typesize - 1 } else { 0 };
        if sign as usize > most {
            return wrong(23, &format!("a bit up to {most}"), sign as usize);
        }
        Ok(header)
    }
}

/// The length of a block, from its first bytes: at least [`HEADER`] of them.
///
/// # Errors
/// [`Kind::Format`]: the header is short or damaged.
pub fn encoded_len(prefix: &[u8]) -> Result<u64> {
    BlockHeader::parse(prefix).map(|header| header.encoded as u64)
}

/// Packs rows of `width` values of `typesize` bytes in one block. Equal rows give equal blocks.
///
/// # Errors
/// [`Kind::Argument`]: a value does not have 1, 2, 4 or 8 bytes, or the length is not one of whole rows, or 2 GiB or more.
pub fn encode(rows: &[u8], typesize: usize, width: usize) -> Result<Vec<u8>> {
    let invalid = |text: String| Error::new(Kind::Argument, format!("actshard.planes: {text}"));
    if !matches!(typesize, 1 | 2 | 4 | 8) {
        return Err(invalid(format!("typesize: expected 1, 2, 4 or 8, found {typesize}")));
    }
    let row = match width.checked_mul(typesize) {
        Some(row) if row > 0 && rows.len().is_multiple_of(row) && row <= MOST => row,
        _ => {
            let length = rows.len();
            return Err(invalid(format!("width: expected whole rows in {length} bytes, found {width} values a row")));
        }
    };
    if rows.len() > MOST - HEADER - 8 {
        return Err(invalid(format!("expected at most {} bytes, found {}", MOST - HEADER - 8, rows.len())));
    }
    let stored = StoredRows::without_tail(rows, row);
    let Some(distinct) = stored.distinct(rows, row)? else { return block_of(&stored, rows.len(), row, typesize) };
    let block = block_of(&distinct, rows.len(), row, typesize)?;
    // The other rows take as much as the distinct ones each, or almost nothing, if all rows are alike.
    if distinct.index.len() < (block.len() - HEADER) / 2 {
        return Ok(block);
    }
    let plain = block_of(&stored, rows.len(), row, typesize)?;
    Ok(if block.len() < plain.len() { block } else { plain })
}

/// The block of stored rows, which decode to `decoded` bytes.
fn block_of(stored: &StoredRows<'_>, decoded: usize, row: usize, typesize: usize) -> Result<Vec<u8>> {
    let body = HEADER + stored.index.len();
    let mut block = memory::reserve((body + stored.bytes.len() + typesize) as u64)?;
    block.resize(HEADER, 0);
    block.extend_from_slice(&stored.index);
    let (mut way, mut sign) = (PLANES, append_planes(&mut block, &stored.bytes, typesize)?);
    if block.len() >= body + stored.bytes.len() {
        (way, sign) = (RAW, 0);
        block.truncate(body);
        block.extend_from_slice(&stored.bytes);
    }
    let lengths = [block.len(), decoded, row, stored.count];
    block[..4].copy_from_slice(&MAGIC);
    for (field, length) in block[4..20].chunks_exact_mut(4).zip(lengths) {
        // All are at most 2^31.
        field.copy_from_slice(&u32::try_from(length).unwrap_or(u32::MAX).to_le_bytes());
    }
    // At most 8, and below 64.
    block[20] = u8::try_from(typesize).unwrap_or(0);
    block[21] = way;
    block[22] = stored.kind;
    block[23] = u8::try_from(sign).unwrap_or(0);
    Ok(block)
}

/// Appends the planes of rows; returns the bit of the sign.
fn append_planes(block: &mut Vec<u8>, rows: &[u8], typesize: usize) -> Result<u32> {
    let n = rows.len() / typesize;
    if n == 0 {
        return Ok(0);
    }
    let mut planes = memory::bytes(rows.len() as u64)?;
    let sign = split(rows, typesize, &mut planes);
    for plane in planes.chunks_exact(n) {
        let counts = code::count(plane);
        if let Some(value) = counts.iter().position(|count| *count as usize == n) {
            // Below 256.
            block.extend([CONSTANT_PLANE, u8::try_from(value).unwrap_or(0)]);
            continue;
        }
        match code::lengths_that_pay(&counts, n) {
            Some(lengths) => {
                block.push(CODED_PLANE);
                code::append(block, plane, &lengths)?;
            }
            None => {
                block.push(RAW_PLANE);
                block.extend_from_slice(plane);
            }
        }
    }
    Ok(sign)
}

/// A plane of a block.
#[derive(Clone, Copy, Debug)]
enum StoredPlane<'a> {
    Plain(Plane<'a>),
    /// Its number among the decoded planes.
    Decoded(usize),
}

/// Unpacks a block, which must be all of `block` and decode to at most `limit` bytes.
///
/// # Errors
/// [`Kind::Format`]: the block is damaged; the message has the byte offset. [`Kind::NoMemory`].
pub fn decode(block: &[u8], limit: u64) -> Result<Vec<u8>> {
    let header = BlockHeader::parse(block)?;
    let BlockHeader { encoded, decoded, row, stored, .. } = header;
    if encoded != block.len() {
        return Err(damaged(format!("byte 4: expected a block of {} bytes, found {encoded}", block.len())));
    }
    if decoded as u64 > limit {
        return Err(damaged(format!("byte 8: expected at most {limit} decoded bytes, found {decoded}")));
    }
    let index = match header.repeats {
        INDEXED => Some(RowIndex::parse(block, HEADER, decoded / row, stored)?),
        _ => None,
    };
    let body = HEADER + index.map_or(0, |index| index.len());
    let kept = stored * row;
    if header.way == RAW && block.len() - body != kept {
        return Err(damaged(format!("byte {body}: expected {kept} raw bytes, found {}", block.len() - body)));
    }
    let mut rows = memory::reserve(decoded as u64)?;
    if header.way == RAW {
        rows.extend_from_slice(&block[body..]);
    } else {
        SCRATCH.with(|kept_scratch| {
            let mut scratch = kept_scratch.take();
            let unpacked = unpack_planes(block, body, &header, &mut scratch, &mut rows);
            if scratch.capacity() <= KEPT {
                kept_scratch.set(scratch);
            }
            unpacked
        })?;
    }
    if header.repeats == COPIES {
        for _ in stored..decoded / row {
            rows.extend_from_within(kept - row..kept);
        }
    }
    memory::resize(&mut rows, decoded as u64)?;
    if let Some(index) = index {
        index.expand(&mut rows, row);
    }
    Ok(rows)
}

/// Appends the stored rows of a block in planes, which begin at byte `body`.
fn unpack_planes(
    block: &[u8],
    body: usize,
    header: &BlockHeader,
    scratch: &mut Vec<u8>,
    rows: &mut Vec<u8>,
) -> Result<()> {
    let BlockHeader { row, stored, typesize, sign, .. } = *header;
    let n = stored * row / typesize;
    let mut at = body;
    let mut planes = [StoredPlane::Plain(Plane::Constant(0)); 8];
    let mut used = 0;
    for (number, plane) in planes[..typesize].iter_mut().enumerate() {
        if n == 0 {
            break;
        }
        let short = |at: usize| damaged(format!("byte {at}: the block ends in plane {number} of {typesize}"));
        let kind = *block.get(at).ok_or_else(|| short(at))?;
        at += 1;
        *plane = match kind {
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
                let coded = table::Coded::parse(block, at, n)?;
                let end = (used + 1) * n;
                if scratch.len() < end {
                    memory::resize(scratch, end as u64)?;
                }
                coded.decode(block, &mut scratch[used * n..end])?;
                at = coded.end();
                used += 1;
                StoredPlane::Decoded(used - 1)
            }
            other => {
                let at = at - 1;
                return Err(damaged(format!("byte {at}: expected a plane of kind 0, 1 or 2, found {other}")));
            }
        };
    }
    if at != block.len() {
        return Err(damaged(format!(
            "byte {at}: expected the end of the block, found {} more bytes",
            block.len() - at
        )));
    }
    let planes = planes.map(|plane| match plane {
        StoredPlane::Plain(plane) => plane,
        StoredPlane::Decoded(number) => Plane::Bytes(&scratch[number * n..(number + 1) * n]),
    });
    merge(&planes[..typesize], n, sign, rows);
    Ok(())
}
