//! The header of a block, and the values of its fields.

use super::code::{damaged, number};
use super::repeats;
use crate::error::Result;

/// Bytes of a block's header.
pub const HEADER: usize = 24;
pub const MAGIC: [u8; 4] = *b"APL1";

pub const RAW: u8 = 0;
pub const PLANES: u8 = 1;

pub const RAW_PLANE: u8 = 0;
pub const CONSTANT_PLANE: u8 = 1;
pub const CODED_PLANE: u8 = 2;

/// The largest block, as of every codec here.
pub const MOST: usize = i32::MAX as usize;

/// The header's fields, checked against each other.
#[derive(Clone, Copy, Debug)]
pub struct BlockHeader {
    pub encoded: usize,
    pub decoded: usize,
    pub row: usize,
    pub stored: usize,
    pub typesize: usize,
    pub way: u8,
    pub repeats: u8,
    pub sign: u32,
}

impl BlockHeader {
    pub fn parse(block: &[u8]) -> Result<BlockHeader> {
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
