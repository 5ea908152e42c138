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

mod block;
mod code;
mod header;
mod repeats;
mod scratch;
mod table;

pub use self::block::{BlockRow, PackedBlock};
pub use self::header::HEADER;
use self::header::{BlockHeader, CODED_PLANE, CONSTANT_PLANE, MAGIC, MOST, PLANES, RAW, RAW_PLANE};
use self::repeats::StoredRows;
use self::scratch::with_scratch;
use crate::error::{Error, Kind, Result};
use crate::kernels::planes::split;
use crate::memory;

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
    let mut block = memory::reserve((body + stored.bytes.len() + typesize + code::WRITTEN) as u64)?;
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
    with_scratch(rows.len(), |planes| {
        let sign = split(rows, typesize, planes);
        planes.chunks_exact(n).try_for_each(|plane| append_plane(block, plane)).map(|()| sign)
    })
}

fn append_plane(block: &mut Vec<u8>, plane: &[u8]) -> Result<()> {
    let counts = code::count(plane);
    if let Some(value) = counts.iter().position(|count| *count as usize == plane.len()) {
        // Below 256.
        block.extend([CONSTANT_PLANE, u8::try_from(value).unwrap_or(0)]);
        return Ok(());
    }
    if let Some((lengths, most)) = code::lengths_that_pay(&counts, plane.len()) {
        block.push(CODED_PLANE);
        return code::append(block, plane, &lengths, most);
    }
    block.push(RAW_PLANE);
    block.extend_from_slice(plane);
    Ok(())
}

/// Unpacks a block, which must be all of `block` and decode to at most `limit` bytes.
///
/// # Errors
/// [`Kind::Format`]: the block is damaged; the message has the byte offset. [`Kind::NoMemory`].
pub fn decode(block: &[u8], limit: u64) -> Result<Vec<u8>> {
    PackedBlock::parse(block, limit)?.decode()
}
