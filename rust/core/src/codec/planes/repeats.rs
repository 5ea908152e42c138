//! Rows that equal others of their block: the encoder leaves them out, the decoder copies them back.
//!
//! The stored rows are those before trailing zeros, or before copies of the last one, or the distinct rows in the order of their
//! first occurrence. Only the last form has an index: the number of the stored row of each row, in one byte if at most 256 rows
//! are stored, otherwise in two.

use std::borrow::Cow;

use super::code::damaged;
use crate::error::Result;
use crate::memory;

/// All rows are stored.
pub const NONE: u8 = 0;
/// Zeros follow the stored rows.
pub const ZEROS: u8 = 1;
/// Copies of the last stored row follow it.
pub const COPIES: u8 = 2;
/// Each row is one of the stored rows, by an index.
pub const INDEXED: u8 = 3;

/// The most stored rows of a block with an index, and the most rows among which the encoder looks for equal ones.
const MOST_INDEXED: usize = 1 << 16;
/// Shorter rows are not compared: it would take longer than packing them.
const LEAST_ROW: usize = 32;

/// Whether a block that stores `stored` of `count` rows can be of this kind.
pub fn is_possible(kind: u8, stored: usize, count: usize) -> bool {
    match kind {
        NONE => stored == count,
        ZEROS => stored < count,
        COPIES => (1..count).contains(&stored),
        INDEXED => (1..count).contains(&stored) && stored <= MOST_INDEXED,
        _ => false,
    }
}

fn number_bytes(stored: usize) -> usize {
    if stored <= 256 { 1 } else { 2 }
}

/// The rows that a block stores, and how its other rows follow from them.
#[derive(Debug)]
pub struct StoredRows<'a> {
    /// The stored rows.
    pub bytes: Cow<'a, [u8]>,
    /// Their number.
    pub count: usize,
    /// The kind of the other rows.
    pub kind: u8,
    /// Empty unless the rows are indexed.
    pub index: Vec<u8>,
}

impl<'a> StoredRows<'a> {
    /// All rows except for trailing zeros, or except for trailing copies.
    pub fn without_tail(rows: &'a [u8], row: usize) -> StoredRows<'a> {
        let mut count = rows.len() / row;
        let mut kind = NONE;
        if let Some(last) = rows.rchunks_exact(row).next() {
            let copies = rows.rchunks_exact(row).skip(1).take_while(|earlier| *earlier == last).count();
            if last.iter().all(|byte| *byte == 0) {
                count -= 1 + copies;
                kind = ZEROS;
            } else if copies > 0 {
                count -= copies;
                kind = COPIES;
            }
        }
        StoredRows { bytes: Cow::Borrowed(&rows[..count * row]), count, kind, index: vec![] }
    }

    /// The distinct rows of a block; `None` if none of the rows before its tail is repeated.
    pub fn distinct(&self, rows: &[u8], row: usize) -> Result<Option<StoredRows<'static>>> {
        let all = rows.len() / row;
        if row < LEAST_ROW || all > MOST_INDEXED {
            return Ok(None);
        }
        let Some(firsts) = first_occurrences(&self.bytes, row)? else { return Ok(None) };
        let mut bytes = memory::reserve((self.bytes.len() + row) as u64)?;
        let mut numbers: Vec<usize> = memory::reserve(all as u64)?;
        let mut count = 0;
        for (at, (first, contents)) in firsts.into_iter().zip(self.bytes.chunks_exact(row)).enumerate() {
            if first < at {
                numbers.push(numbers[first]);
            } else {
                numbers.push(count);
                bytes.extend_from_slice(contents);
                count += 1;
            }
        }
        if numbers.len() < all {
            let is_zero = |contents: &[u8]| contents.iter().all(|byte| *byte == 0);
            let last = match self.kind {
                ZEROS => bytes.chunks_exact(row).position(is_zero).unwrap_or(count),
                _ => numbers.last().copied().unwrap_or(0),
            };
            if last == count {
                bytes.resize(bytes.len() + row, 0);
                count += 1;
            }
            numbers.extend(std::iter::repeat_n(last, all - numbers.len())); // there is room for all
        }
        let width = number_bytes(count);
        let mut index = memory::reserve((all * width) as u64)?;
        for number in numbers {
            index.extend_from_slice(&number.to_le_bytes()[..width]);
        }
        Ok(Some(StoredRows { bytes: Cow::Owned(bytes), count, kind: INDEXED, index }))
    }
}

/// The position of the first row that equals each row; `None` if all rows are distinct.
fn first_occurrences(rows: &[u8], row: usize) -> Result<Option<Vec<usize>>> {
    let count = rows.len() / row;
    let contents = |at: usize| &rows[at * row..(at + 1) * row];
    let word = |bytes: &[u8]| bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
    // Most rows already differ in their first or last values. Rows are at least as long as two words.
    let mut order: Vec<(u64, u64, usize)> = memory::reserve(count as u64)?;
    order.extend((0..count).map(|at| (word(contents(at)), word(&contents(at)[row - 8..]), at)));
    order.sort_unstable_by(|a, b| {
        (a.0, a.1).cmp(&(b.0, b.1)).then_with(|| contents(a.2).cmp(contents(b.2))).then(a.2.cmp(&b.2))
    });
    let mut firsts: Option<Vec<usize>> = None;
    for equal in order.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1) && contents(a.2) == contents(b.2)) {
        if equal.len() == 1 {
            continue;
        }
        let firsts = match &mut firsts {
            Some(firsts) => firsts,
            None => {
                let mut positions = memory::reserve(count as u64)?;
                positions.extend(0..count);
                firsts.insert(positions)
            }
        };
        for (_, _, at) in equal {
            firsts[*at] = equal[0].2;
        }
    }
    Ok(firsts)
}

/// The value of one or two bytes.
fn value_of(number: &[u8]) -> usize {
    usize::from(number[0]) | number.get(1).map_or(0, |high| usize::from(*high) << 8)
}

/// The stored row of each row of a block.
#[derive(Clone, Copy, Debug)]
pub struct RowIndex<'a> {
    numbers: &'a [u8],
    width: usize,
}

impl<'a> RowIndex<'a> {
    /// The index of `count` rows that begins at byte `at`: it mentions each of the `stored` rows, in the order of their numbers.
    pub fn parse(block: &'a [u8], at: usize, count: usize, stored: usize) -> Result<RowIndex<'a>> {
        let width = number_bytes(stored);
        let numbers = count.checked_mul(width).and_then(|len| block.get(at..)?.get(..len));
        let numbers = numbers.ok_or_else(|| damaged(format!("byte {at}: the block ends in the index of its rows")))?;
        let index = RowIndex { numbers, width };
        let mut next = 0;
        for (place, number) in index.iter().enumerate() {
            if number > next || number >= stored {
                let (at, most) = (at + place * width, next.min(stored - 1));
                return Err(damaged(format!("byte {at}: expected a stored row up to {most}, found {number}")));
            }
            next += usize::from(number == next);
        }
        if next < stored {
            return Err(damaged(format!("byte {at}: expected an index of {stored} stored rows, found {next}")));
        }
        Ok(index)
    }

    /// Bytes of the index.
    pub fn len(&self) -> usize {
        self.numbers.len()
    }

    /// The stored row of a row.
    pub fn get(&self, place: usize) -> Option<usize> {
        self.numbers.chunks_exact(self.width).nth(place).map(value_of)
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = usize> + ExactSizeIterator + 'a {
        self.numbers.chunks_exact(self.width).map(value_of)
    }

    /// Puts all rows in their places; the stored ones are the first of `rows`.
    pub fn expand(&self, rows: &mut [u8], row: usize) {
        // A row comes after the stored row that it equals, so from the last one on, none overwrites one that is still needed.
        for (place, number) in self.iter().enumerate().rev() {
            rows.copy_within(number * row..(number + 1) * row, place * row);
        }
    }
}
