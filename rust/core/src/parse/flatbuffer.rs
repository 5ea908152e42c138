//! Reads flatbuffers, the encoding of Arrow's metadata; every offset is checked before it is followed.
//!
//! ```text
//! root     u32 at byte 0: offset of the root table
//! table    i32: distance back to its vtable; then its fields
//! vtable   u16 bytes of the vtable, u16 bytes of the table, u16 per field: offset of the field in the table, 0: absent
//! vector   u32 length, then elements; a string is a vector of bytes
//! ```
//!
//! References (to tables, vectors, strings) are u32 offsets from their own position. Source: flatbuffers' internals page.

use crate::error::{Error, Kind, Result};

/// A table of a flatbuffer.
#[derive(Clone, Copy, Debug)]
pub struct FlatTable<'a> {
    bytes: &'a [u8],
    at: usize,
    vtable: usize,
    /// Bytes of the vtable.
    slots: usize,
    /// Bytes of the table.
    len: usize,
}

/// A vector of a flatbuffer.
#[derive(Clone, Copy, Debug)]
pub struct FlatVector<'a> {
    bytes: &'a [u8],
    /// Position of the first element.
    at: usize,
    /// Number of elements.
    pub len: usize,
    size: usize,
}

fn refuse(at: usize, what: &str) -> Error {
    Error::new(Kind::Format, format!("expected Arrow metadata, found {what}")).byte(at as u64)
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let end = at.checked_add(N);
    let found = end.and_then(|end| bytes.get(at..end)).and_then(|found| found.first_chunk::<N>());
    found.copied().ok_or_else(|| refuse(at, "an offset past its end"))
}

/// The position that the reference at `at` leads to.
fn follow(bytes: &[u8], at: usize) -> Result<usize> {
    let step = u32::from_le_bytes(get(bytes, at)?) as usize;
    let to = at.checked_add(step).filter(|to| step != 0 && *to < bytes.len());
    to.ok_or_else(|| refuse(at, "a reference past its end"))
}

impl<'a> FlatTable<'a> {
    /// The root table.
    pub fn root(bytes: &'a [u8]) -> Result<FlatTable<'a>> {
        FlatTable::at(bytes, follow(bytes, 0)?)
    }

    fn at(bytes: &'a [u8], at: usize) -> Result<FlatTable<'a>> {
        let back = i64::from(i32::from_le_bytes(get(bytes, at)?));
        let vtable = i64::try_from(at).ok().and_then(|at| usize::try_from(at - back).ok());
        let vtable = vtable.ok_or_else(|| refuse(at, "a vtable before its start"))?;
        let slots = usize::from(u16::from_le_bytes(get(bytes, vtable)?));
        let len = usize::from(u16::from_le_bytes(get(bytes, vtable.saturating_add(2))?));
        let ends = |from: usize, len: usize| from.checked_add(len).is_some_and(|end| end <= bytes.len());
        if slots < 4 || slots % 2 != 0 || len < 4 || !ends(vtable, slots) || !ends(at, len) {
            return Err(refuse(vtable, "a vtable of an invalid size"));
        }
        Ok(FlatTable { bytes, at, vtable, slots, len })
    }

    /// The position of a field of `size` bytes; `None` if it is absent.
    fn field(&self, number: usize, size: usize) -> Result<Option<usize>> {
        let slot = 4 + 2 * number;
        if slot + 2 > self.slots {
            return Ok(None);
        }
        let offset = usize::from(u16::from_le_bytes(get(self.bytes, self.vtable + slot)?));
        match offset {
            0 => Ok(None),
            _ if offset < 4 || offset + size > self.len => Err(refuse(self.vtable + slot, "a field outside its table")),
            _ => Ok(Some(self.at + offset)),
        }
    }

    /// An unsigned byte, or a boolean.
    pub fn u8(&self, number: usize, default: u8) -> Result<u8> {
        self.field(number, 1)?.map_or(Ok(default), |at| Ok(get::<1>(self.bytes, at)?[0]))
    }

    /// A 16-bit integer.
    pub fn i16(&self, number: usize, default: i16) -> Result<i16> {
        self.field(number, 2)?.map_or(Ok(default), |at| Ok(i16::from_le_bytes(get(self.bytes, at)?)))
    }

    /// A 32-bit integer.
    pub fn i32(&self, number: usize, default: i32) -> Result<i32> {
        self.field(number, 4)?.map_or(Ok(default), |at| Ok(i32::from_le_bytes(get(self.bytes, at)?)))
    }

    /// A 64-bit integer.
    pub fn i64(&self, number: usize, default: i64) -> Result<i64> {
        self.field(number, 8)?.map_or(Ok(default), |at| Ok(i64::from_le_bytes(get(self.bytes, at)?)))
    }

    /// A table.
    pub fn table(&self, number: usize) -> Result<Option<FlatTable<'a>>> {
        let at = self.field(number, 4)?;
        at.map(|at| FlatTable::at(self.bytes, follow(self.bytes, at)?)).transpose()
    }

    /// A vector of elements of `size` bytes.
    pub fn vector(&self, number: usize, size: usize) -> Result<Option<FlatVector<'a>>> {
        let Some(at) = self.field(number, 4)? else { return Ok(None) };
        let at = follow(self.bytes, at)?;
        let len = u32::from_le_bytes(get(self.bytes, at)?) as usize;
        let end = len.checked_mul(size).and_then(|n| n.checked_add(at + 4));
        if end.is_none_or(|end| end > self.bytes.len()) {
            return Err(refuse(at, "a vector past its end"));
        }
        Ok(Some(FlatVector { bytes: self.bytes, at: at + 4, len, size }))
    }

    /// A string.
    pub fn text(&self, number: usize) -> Result<Option<&'a str>> {
        let Some(found) = self.vector(number, 1)? else { return Ok(None) };
        let text = std::str::from_utf8(&found.bytes[found.at..found.at + found.len]);
        text.map(Some).map_err(|_| refuse(found.at, "a string that is not UTF-8"))
    }
}

impl<'a> FlatVector<'a> {
    /// The 64-bit integer at a byte of an element.
    pub fn i64(&self, element: usize, byte: usize) -> Result<i64> {
        let at = element.checked_mul(self.size).filter(|_| element < self.len && byte + 8 <= self.size);
        let at = at.ok_or_else(|| refuse(self.at, "an element past the end of a vector"))?;
        Ok(i64::from_le_bytes(get(self.bytes, self.at + at + byte)?))
    }

    /// The table that an element refers to.
    pub fn table(&self, element: usize) -> Result<FlatTable<'a>> {
        if element >= self.len || self.size != 4 {
            return Err(refuse(self.at, "an element past the end of a vector"));
        }
        FlatTable::at(self.bytes, follow(self.bytes, self.at + 4 * element)?)
    }
}
