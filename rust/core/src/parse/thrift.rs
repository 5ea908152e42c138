//! Reads the compact protocol of Thrift, the encoding of Parquet's metadata; the bytes are untrusted.
//!
//! ```text
//! struct    fields, then 00
//! field     u4 step of the field number, u4 wire type; step 0: the number follows as a zigzag varint; then the value
//! value     true, false: in the wire type; byte: 1; integers: zigzag varint; double: 8; binary: varint length, bytes
//! list      u4 length (15: a varint follows), u4 wire type of the elements; then the elements, a boolean in one byte
//! map       varint length; unless it is 0, u4 wire type of keys, u4 of values; then keys and values in turn
//! ```
//!
//! Field numbers must increase, as all writers write them: then no field occurs twice, and two readers cannot disagree. Source:
//! Thrift's `thrift-compact-protocol.md`.

use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// Structures nested in a value that is skipped.
const MAX_NESTING: u32 = 24;

/// The type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ThriftType {
    /// A flag; its value is in the field's header.
    Flag(bool),
    /// One byte.
    Byte,
    /// 16 bits.
    I16,
    /// 32 bits.
    I32,
    /// 64 bits.
    I64,
    /// A float of 64 bits.
    Double,
    /// Bytes or a text.
    Binary,
    /// A list or a set.
    List,
    /// A map.
    Map,
    /// A structure.
    Struct,
}

/// A position in bytes, of which the first is at an offset in a file.
#[derive(Clone, Debug)]
pub struct ThriftReader<'a> {
    bytes: &'a [u8],
    at: usize,
    begin: u64,
}

/// Reads the value of a field with a number, or returns false: then it is skipped.
type FieldVisit<'v, 'a> = &'v mut dyn FnMut(&mut ThriftReader<'a>, i16, ThriftType) -> Result<bool>;

impl<'a> ThriftReader<'a> {
    /// At the start of `bytes`, which are at byte `begin` of a file.
    pub fn new(bytes: &'a [u8], begin: u64) -> ThriftReader<'a> {
        ThriftReader { bytes, at: 0, begin }
    }

    /// Offset in the file.
    pub fn offset(&self) -> u64 {
        self.begin + self.at as u64
    }

    /// Bytes that are not read yet.
    pub fn rest(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// An error at this position.
    pub fn refuse(&self, what: impl Into<String>) -> Error {
        Error::new(Kind::Format, what).byte(self.offset())
    }

    fn byte(&mut self) -> Result<u8> {
        let [byte] = *self.take(1)? else { return Err(self.ended(1)) };
        Ok(byte)
    }

    fn ended(&self, length: u64) -> Error {
        let what = format!("expected {length} more bytes of metadata, found {}", self.rest());
        Error::new(Kind::Truncated, what).byte(self.offset())
    }

    fn take(&mut self, length: u64) -> Result<&'a [u8]> {
        if length > self.rest() as u64 {
            return Err(self.ended(length));
        }
        let end = self.at + to_usize(length);
        let bytes = &self.bytes[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    /// An unsigned number.
    fn varint(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 127);
            if shift == 63 && bits > 1 {
                break;
            }
            value |= bits << shift;
            if byte < 128 {
                return Ok(value);
            }
        }
        Err(self.refuse("expected a number of at most 64 bits, found more"))
    }

    fn zigzag(&mut self) -> Result<i64> {
        let value = self.varint()?;
        Ok((value >> 1).cast_signed() ^ -(value & 1).cast_signed())
    }

    /// An integer field of 32 or 64 bits.
    pub fn integer(&mut self, expected: ThriftType, wire: ThriftType) -> Result<i64> {
        self.expect(expected, wire)?;
        let value = self.zigzag()?;
        if expected == ThriftType::I32 && i32::try_from(value).is_err() {
            return Err(self.refuse(format!("expected a number of 32 bits, found {value}")));
        }
        Ok(value)
    }

    /// An integer field that is at least 0.
    pub fn count(&mut self, expected: ThriftType, wire: ThriftType) -> Result<u64> {
        let value = self.integer(expected, wire)?;
        u64::try_from(value).map_err(|_| self.refuse(format!("expected a number of at least 0, found {value}")))
    }

    /// A field of bytes.
    pub fn binary(&mut self, wire: ThriftType) -> Result<&'a [u8]> {
        self.expect(ThriftType::Binary, wire)?;
        let length = self.varint()?;
        self.take(length)
    }

    /// Fails unless a field has the expected type.
    fn expect(&self, expected: ThriftType, wire: ThriftType) -> Result<()> {
        if expected == wire {
            return Ok(());
        }
        Err(self.refuse(format!("expected a value of type {expected:?}, found {wire:?}")))
    }

    /// The number of elements of a list field of structures. Each takes at least a byte, so the number is at most [`Self::rest`].
    pub fn structs(&mut self, wire: ThriftType) -> Result<usize> {
        self.expect(ThriftType::List, wire)?;
        let (length, of) = self.list()?;
        if length > 0 {
            self.expect(ThriftType::Struct, of)?;
        }
        Ok(length)
    }

    fn list(&mut self) -> Result<(usize, ThriftType)> {
        let head = self.byte()?;
        let length = match head >> 4 {
            15 => self.varint()?,
            length => u64::from(length),
        };
        if length > self.rest() as u64 {
            return Err(self.ended(length));
        }
        if length == 0 {
            return Ok((0, ThriftType::Byte)); // some writers give no type
        }
        Ok((to_usize(length), self.wire(head & 15)?))
    }

    fn wire(&self, number: u8) -> Result<ThriftType> {
        Ok(match number {
            1 => ThriftType::Flag(true),
            2 => ThriftType::Flag(false),
            3 => ThriftType::Byte,
            4 => ThriftType::I16,
            5 => ThriftType::I32,
            6 => ThriftType::I64,
            7 => ThriftType::Double,
            8 => ThriftType::Binary,
            9 | 10 => ThriftType::List,
            11 => ThriftType::Map,
            12 => ThriftType::Struct,
            _ => return Err(self.refuse(format!("expected a Thrift type from 1 to 12, found {number}"))),
        })
    }

    /// Reads a field that is a structure.
    pub fn nested(&mut self, wire: ThriftType, visit: FieldVisit<'_, 'a>) -> Result<()> {
        self.expect(ThriftType::Struct, wire)?;
        self.fields(visit)
    }

    /// Reads a structure, field by field.
    pub fn fields(&mut self, visit: FieldVisit<'_, 'a>) -> Result<()> {
        self.fields_at(visit, MAX_NESTING)
    }

    fn fields_at(&mut self, visit: FieldVisit<'_, 'a>, depth: u32) -> Result<()> {
        let mut last: i16 = 0;
        loop {
            let head = self.byte()?;
            if head == 0 {
                return Ok(());
            }
            let wire = self.wire(head & 15)?;
            let number = match i16::from(head >> 4) {
                0 => i16::try_from(self.zigzag()?).ok(),
                step => last.checked_add(step),
            };
            let number = number.filter(|number| *number > last);
            let number = number.ok_or_else(|| self.refuse("expected increasing field numbers, found another order"))?;
            if !visit(self, number, wire)? {
                self.skip(wire, depth)?;
            }
            last = number;
        }
    }

    fn skip(&mut self, wire: ThriftType, depth: u32) -> Result<()> {
        match wire {
            ThriftType::Flag(_) => {}
            ThriftType::Byte => _ = self.byte()?,
            ThriftType::I16 | ThriftType::I32 | ThriftType::I64 => _ = self.varint()?,
            ThriftType::Double => _ = self.take(8)?,
            ThriftType::Binary => _ = self.binary(wire)?,
            ThriftType::List | ThriftType::Map | ThriftType::Struct => {
                let depth =
                    depth.checked_sub(1).ok_or_else(|| self.refuse("expected fewer structures inside each other"))?;
                self.skip_nested(wire, depth)?;
            }
        }
        Ok(())
    }

    fn skip_nested(&mut self, wire: ThriftType, depth: u32) -> Result<()> {
        match wire {
            ThriftType::List => {
                let (length, of) = self.list()?;
                for _ in 0..length {
                    self.skip_element(of, depth)?;
                }
            }
            ThriftType::Map => {
                let length = self.varint()?;
                if length > 0 {
                    let kinds = self.byte()?;
                    let (key, value) = (self.wire(kinds >> 4)?, self.wire(kinds & 15)?);
                    for _ in 0..length {
                        self.skip_element(key, depth)?;
                        self.skip_element(value, depth)?;
                    }
                }
            }
            _ => self.fields_at(&mut |_, _, _| Ok(false), depth)?,
        }
        Ok(())
    }

    /// Skips an element of a list or map, where a flag takes a byte.
    fn skip_element(&mut self, wire: ThriftType, depth: u32) -> Result<()> {
        let wire = if matches!(wire, ThriftType::Flag(_)) { ThriftType::Byte } else { wire };
        self.skip(wire, depth)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    /// The numbers of a structure's integers, binaries and structures.
    fn parse(bytes: &[u8]) -> Result<Vec<(i16, i64)>> {
        let mut values = Vec::new();
        ThriftReader::new(bytes, 100).fields(&mut |reader, number, wire| {
            match wire {
                ThriftType::I32 | ThriftType::I64 => values.push((number, reader.integer(wire, wire)?)),
                ThriftType::Binary => values.push((number, reader.binary(wire)?.len() as i64)),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(values)
    }

    #[test]
    fn values_of_all_types_are_read_or_skipped() {
        let bytes = [
            &[0x15, 0x03][..],                                                               // 1: i32 -2
            &[0x11, 0x12],                                                                   // 2, 3: flags
            &[0x13, 0x7f],                                                                   // 4: a byte
            &[0x14, 0x02],                                                                   // 5: i16
            &[0x17, 1, 2, 3, 4, 5, 6, 7, 8],                                                 // 6: a double
            &[0x18, 0x02, b'a', b'b'],                                                       // 7: binary
            &[0x19, 0x21, 1, 2],                                                             // 8: two flags in a list
            &[0x19, 0x1c, 0x15, 0x02, 0x00],                                                 // 9: a structure in a list
            &[0x1b, 0x01, 0x85, 0x01, b'k', 0x02],                                           // 10: a map
            &[0x1b, 0x00],                                                                   // 11: an empty map
            &[0x1c, 0x1c, 0x00, 0x00], // 12: structures in each other
            &[0x19, 0x00],             // 13: an empty list without a type
            &[0x06, 0xac, 0x02, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], // 150: i64, the least one
            &[0x00, 0xee],
        ]
        .concat();
        assert_eq!(parse(&bytes).unwrap(), [(1, -2), (7, 2), (150, i64::MIN)]);
    }

    #[test]
    fn every_rule_has_its_error() {
        let deep = [vec![0x1c; 40], vec![0; 41]].concat();
        for (bytes, kind, text) in [
            (&[][..], Kind::Truncated, "expected 1 more bytes"),
            (&[0x15, 0x80], Kind::Truncated, "expected 1 more bytes"),
            (&[0x18, 0x7f, 0x00], Kind::Truncated, "expected 127 more bytes of metadata, found 1"),
            (&[0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01], Kind::Truncated, "more bytes"),
            (&[0x19, 0xf5, 0xff, 0xff, 0xff, 0x7f], Kind::Truncated, "more bytes"),
            (&[0x1b, 0x7f, 0x55, 0x00], Kind::Truncated, "more bytes"),
            (&[0x16, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02], Kind::Format, "at most 64 bits"),
            (&[0x15, 0xff, 0xff, 0xff, 0xff, 0x7f, 0x00], Kind::Format, "32 bits"),
            (&[0x1d, 0x00], Kind::Format, "from 1 to 12, found 13"),
            (&[0x10, 0x00], Kind::Format, "from 1 to 12, found 0"),
            (&[0x15, 0x02, 0x05, 0x02, 0x02], Kind::Format, "increasing field numbers"),
            (&[0x05, 0x01, 0x02], Kind::Format, "increasing field numbers"),
            (&deep, Kind::Format, "fewer structures"),
        ] {
            let error = parse(bytes).unwrap_err();
            assert_eq!(error.kind, kind, "{bytes:02x?}: {error}");
            assert!(error.detail.contains(text), "{bytes:02x?}: {error}");
            assert!(error.offset.is_some_and(|at| (100..=100 + bytes.len() as u64).contains(&at)));
        }
    }
}
