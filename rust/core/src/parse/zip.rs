//! The directory of a zip file, in which torch and numpy store arrays; the file is untrusted.
//!
//! ```text
//! records       local header (30 bytes, name, extra), data [, descriptor of 16 or 24 bytes]
//! directory     per record 46 bytes, name, extra, comment: PK 1 2, method, CRC-32, sizes, offset of the local header
//! zip64 end     PK 6 6: counts and offsets of 64 bits, then its locator (20 bytes, PK 6 7)        (optional)
//! end           22 bytes, PK 5 6: counts and offsets of 32 bits, then a comment up to the end of the file
//! ```
//!
//! Sizes and methods are those of the directory; of a local header, only the lengths of its name and extra field are
//! used, because torch writes zeros for the rest. The directory must end where the end record begins and the first
//! record must be at byte 0: for a file of several archives, readers disagree about which one to use. Records must not
//! overlap, and no name may repeat.
//!
//! Source: PKWARE's APPNOTE.TXT 6.3.10; torch's caffe2/serialize/inline_container.cc.

use std::collections::HashSet;

use crate::codec::inflate::DeflatedRange;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::Source;
use crate::threads::Context;

const END: u64 = 22;
const LOCATOR: u64 = 20;
const END_64: u64 = 56;
const ENTRY: usize = 46;
const LOCAL: u64 = 30;
/// The longest comment of an archive.
const COMMENT: u64 = 65_535;
/// The largest directory that is read: two million records.
const MOST_DIRECTORY: u64 = 256 << 20;

/// A record, as the directory describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZipRecord {
    /// Its name, as stored.
    pub name: Vec<u8>,
    /// Whether its data are deflated; otherwise they are stored unchanged.
    pub deflated: bool,
    /// Bytes in the file.
    pub stored: u64,
    /// Bytes of the content.
    pub size: u64,
    /// CRC-32 of the content; 0 if the writer computed none.
    pub crc: u32,
    /// Offset of the local header.
    local: u64,
    /// The next record's local header, or the directory.
    end: u64,
    /// The reason why the data cannot be read, if any.
    refused: Option<&'static str>,
}

/// The records of an archive, in the directory's order.
#[derive(Clone, Debug)]
pub struct Archive {
    /// The records.
    pub records: Vec<ZipRecord>,
}

fn malformed(at: u64, detail: impl Into<String>) -> Error {
    Error::new(Kind::Format, detail).byte(at)
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u16::from_le_bytes(*b))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u32::from_le_bytes(*b))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..).and_then(<[u8]>::first_chunk).map_or(0, |b| u64::from_le_bytes(*b))
}

/// Bytes of a source; the range is within it.
fn bytes_at(source: &dyn Source, at: u64, len: u64, context: &mut Context<'_>) -> Result<Vec<u8>> {
    let mut made = memory::bytes(len)?;
    source.read_long(at, &mut made, context)?;
    Ok(made)
}

/// A name for messages.
pub fn shown(name: &[u8]) -> String {
    String::from_utf8_lossy(&name[..name.len().min(200)]).into_owned()
}

/// The end records' numbers.
struct ZipEnd {
    count: u64,
    size: u64,
    at: u64,
}

impl Archive {
    /// Reads the directory. Reads no record.
    pub fn read(source: &dyn Source, context: &mut Context<'_>) -> Result<Archive> {
        let len = source.size();
        let tail_at = len.saturating_sub(END + COMMENT + LOCATOR + END_64);
        let tail = bytes_at(source, tail_at, len - tail_at, context)?;
        let end = find_end(&tail, tail_at)?;
        if end.size > MOST_DIRECTORY || end.count > end.size / ENTRY as u64 {
            let detail = format!("a zip directory of {} records in {} bytes", end.count, end.size);
            return Err(malformed(end.at, detail));
        }
        let directory = bytes_at(source, end.at, end.size, context)?;
        let mut records = memory::reserve(end.count)?;
        let mut at = 0usize;
        for _ in 0..end.count {
            at += entry(&directory, at, end.at, &mut records)?;
        }
        if at as u64 != end.size {
            let detail =
                format!("the zip directory has {} records in {at} bytes, expected {} bytes", end.count, end.size);
            return Err(malformed(end.at + at as u64, detail));
        }
        check_order(&mut records, end.at)?;
        Ok(Archive { records })
    }
}

/// Finds the end record, and the zip64 end record before it.
fn find_end(tail: &[u8], tail_at: u64) -> Result<ZipEnd> {
    let found = |at: usize| {
        tail[at..].starts_with(b"PK\x05\x06") && at + to_usize(END) + usize::from(u16_at(tail, at + 20)) == tail.len()
    };
    let last = tail.len().checked_sub(to_usize(END));
    let mut ends = (0..=last.unwrap_or(0)).rev().filter(|at| last.is_some() && found(*at));
    let Some(at) = ends.next() else {
        return Err(Error::new(
            Kind::Truncated,
            "expected the end record of a zip file at the end, found none: the file is truncated or not a zip file",
        ));
    };
    if ends.next().is_some() {
        return Err(malformed(
            tail_at + at as u64,
            "expected one end record at the end of the zip file, found two that fit",
        ));
    }
    let place = tail_at + at as u64;
    let (disk, first_disk) = (u16_at(tail, at + 4), u16_at(tail, at + 6));
    let here = u64::from(u16_at(tail, at + 8));
    let [size, begin] = [12, 16].map(|field| u64::from(u32_at(tail, at + field)));
    let mut end = ZipEnd { count: u64::from(u16_at(tail, at + 10)), size, at: begin };
    let mut stop = place;
    if let Some(locator) = at.checked_sub(to_usize(LOCATOR)).filter(|at| tail[*at..].starts_with(b"PK\x06\x07")) {
        let (wide, begins) = end_64(tail, tail_at, locator)?;
        let same = |narrow: u64, all: u64, wide: u64| narrow == all || narrow == wide;
        if !same(end.count, 0xffff, wide.count)
            || !same(end.size, 0xffff_ffff, wide.size)
            || !same(end.at, 0xffff_ffff, wide.at)
        {
            return Err(malformed(place, "the end record and the zip64 end record have different numbers"));
        }
        (end, stop) = (wide, begins);
    } else if [disk, first_disk].iter().any(|n| *n != 0) || here != end.count {
        return Err(malformed(place, "archives of several disks are unsupported"));
    }
    if end.at.checked_add(end.size) != Some(stop) {
        let detail = format!(
            "expected the zip directory to end at byte {stop}, found {} bytes at byte {}: the file is damaged or has several archives",
            end.size, end.at
        );
        return Err(malformed(place, detail));
    }
    Ok(end)
}

/// The zip64 end record that a locator points to, and its offset.
fn end_64(tail: &[u8], tail_at: u64, locator: usize) -> Result<(ZipEnd, u64)> {
    let place = tail_at + locator as u64;
    let at = u64_at(tail, locator + 8);
    let inside = at.checked_sub(tail_at).and_then(|n| usize::try_from(n).ok()).filter(|n| *n < locator);
    let record = inside.map(|n| &tail[n..locator]).filter(|record| record.len() as u64 >= END_64);
    let Some(record) = record.filter(|record| {
        record.starts_with(b"PK\x06\x06") && u64_at(record, 4).checked_add(12) == Some(record.len() as u64)
    }) else {
        return Err(malformed(
            place,
            format!("expected a zip64 end record at byte {at}, directly before this locator"),
        ));
    };
    if u32_at(record, 16) != 0 || u32_at(record, 20) != 0 || u64_at(record, 24) != u64_at(record, 32) {
        return Err(malformed(at, "archives of several disks are unsupported"));
    }
    Ok((ZipEnd { count: u64_at(record, 32), size: u64_at(record, 40), at: u64_at(record, 48) }, at))
}

/// Parses one entry of the directory; returns its size.
fn entry(directory: &[u8], at: usize, base: u64, records: &mut Vec<ZipRecord>) -> Result<usize> {
    let place = base + at as u64;
    let rest = &directory[at.min(directory.len())..];
    if rest.len() < ENTRY || !rest.starts_with(b"PK\x01\x02") {
        return Err(malformed(place, "expected a record of the zip directory, found other bytes"));
    }
    let (name, extra, comment) =
        (usize::from(u16_at(rest, 28)), usize::from(u16_at(rest, 30)), usize::from(u16_at(rest, 32)));
    let whole = ENTRY + name + extra + comment;
    let Some(body) = rest.get(ENTRY..whole) else {
        return Err(malformed(place, "a record of the zip directory extends past the directory"));
    };
    let (name, extra) = (&body[..name], &body[name..name + extra]);
    let mut numbers = [24, 20, 42].map(|at| u64::from(u32_at(rest, at)));
    widen(&mut numbers, extra).map_err(|e| malformed(place, format!("'{}': {e}", shown(name))))?;
    let [size, stored, local] = numbers;
    let (flags, method) = (u16_at(rest, 8), u16_at(rest, 10));
    let refused = match method {
        _ if flags & 1 != 0 => Some("encrypted records are unsupported"),
        0 if size != stored => Some("a stored record whose two sizes differ"),
        0 | 8 => None,
        _ => Some("expected a stored or deflated record, found another compression"),
    };
    let crc = u32_at(rest, 16);
    let name = name.to_vec();
    records.push(ZipRecord { name, deflated: method == 8, stored, size, crc, local, end: 0, refused });
    Ok(whole)
}

/// Replaces the numbers that are 0xFFFFFFFF by those of the zip64 extra field, which has only these, in this order.
fn widen(numbers: &mut [u64; 3], mut extra: &[u8]) -> Result<(), &'static str> {
    let mut wanted = numbers.iter_mut().filter(|n| **n == 0xffff_ffff).peekable();
    while wanted.peek().is_some() {
        let Some((head, rest)) = extra.split_first_chunk::<4>() else {
            return Err("expected a zip64 extra field, found none");
        };
        let (id, len) = (u16_at(head, 0), usize::from(u16_at(head, 2)));
        let Some(field) = rest.get(..len) else { return Err("an extra field that is longer than all of them") };
        if id == 1 {
            let values = field.chunks_exact(8).map(|value| u64_at(value, 0));
            let mut found = 0;
            for (number, value) in wanted.by_ref().zip(values) {
                *number = value;
                found += 1;
            }
            return if wanted.next().is_none() && found > 0 {
                Ok(())
            } else {
                Err("a zip64 extra field that is too short")
            };
        }
        extra = &rest[len..];
    }
    Ok(())
}

/// Checks that names differ, that the first record is at byte 0 and that records do not overlap.
fn check_order(records: &mut [ZipRecord], directory: u64) -> Result<()> {
    let mut names = HashSet::with_capacity(records.len());
    for record in &*records {
        if !names.insert(&record.name[..]) {
            return Err(malformed(record.local, format!("two records are named '{}'", shown(&record.name))));
        }
    }
    let mut order: Vec<usize> = (0..records.len()).collect();
    order.sort_by_key(|i| records[*i].local);
    if let Some(first) = order.first().map(|i| records[*i].local).filter(|local| *local != 0) {
        return Err(malformed(
            0,
            format!(
                "expected the first record of the zip file at byte 0, found it at {first}: several archives in one file"
            ),
        ));
    }
    for (n, i) in order.iter().enumerate() {
        let end = order.get(n + 1).map_or(directory, |next| records[*next].local);
        let record = &mut records[*i];
        let least =
            record.local.checked_add(LOCAL + record.name.len() as u64).and_then(|n| n.checked_add(record.stored));
        if least.is_none_or(|least| least > end) {
            let detail = format!(
                "'{}' of {} bytes at byte {} overlaps the next record or the directory at byte {end}",
                shown(&record.name),
                record.stored,
                record.local
            );
            return Err(malformed(record.local, detail));
        }
        record.end = end;
    }
    Ok(())
}

impl ZipRecord {
    /// The offset of the record's data. Reads the local header.
    pub fn data(&self, source: &dyn Source, context: &mut Context<'_>) -> Result<u64> {
        if let Some(refused) = self.refused {
            return Err(Error::new(Kind::Unsupported, format!("'{}': {refused}", shown(&self.name))).byte(self.local));
        }
        let wanted = LOCAL + self.name.len() as u64;
        let header = bytes_at(source, self.local, wanted.min(self.end - self.local), context)?;
        let name = usize::from(u16_at(&header, 26));
        let same =
            header.starts_with(b"PK\x03\x04") && name == self.name.len() && header[to_usize(LOCAL)..] == self.name[..];
        if !same || u16_at(&header, 6) & 1 != 0 || (u16_at(&header, 8) == 8) != self.deflated {
            let detail = format!("expected the local header of '{}', found another", shown(&self.name));
            return Err(malformed(self.local, detail));
        }
        let start = self.local + wanted + u64::from(u16_at(&header, 28));
        match start.checked_add(self.stored) {
            Some(end) if end <= self.end => Ok(start),
            _ => Err(malformed(
                self.local,
                format!("'{}' of {} bytes extends past byte {}", shown(&self.name), self.stored, self.end),
            )),
        }
    }

    /// The content, of at most `most` bytes.
    pub fn content(&self, source: &dyn Source, most: u64, context: &mut Context<'_>) -> Result<Vec<u8>> {
        let at = self.data(source, context)?;
        if self.size > most {
            return Err(malformed(
                self.local,
                format!("'{}': expected at most {most} bytes, found {}", shown(&self.name), self.size),
            ));
        }
        if !self.deflated {
            return bytes_at(source, at, self.stored, context);
        }
        let deflated = DeflatedRange { source, at, stored: self.stored, size: self.size };
        let content = deflated.content(context);
        content.map_err(|e| Error { detail: format!("'{}': {}", shown(&self.name), e.detail), ..e })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::location::Location;
    use crate::source::held::Held;
    use crate::threads::Stop;

    /// An archive of stored records, as (name, content).
    fn archive(records: &[(&str, &[u8])]) -> Vec<u8> {
        let (mut made, mut directory) = (vec![], vec![]);
        for (name, content) in records {
            let (at, len, n) = (made.len() as u32, content.len() as u32, name.len() as u16);
            made.extend(b"PK\x03\x04");
            made.extend([0; 22]);
            made.extend(n.to_le_bytes());
            made.extend([0; 2]);
            made.extend(name.as_bytes());
            made.extend(*content);
            directory.extend(b"PK\x01\x02");
            directory.extend([0; 16]);
            directory.extend(len.to_le_bytes());
            directory.extend(len.to_le_bytes());
            directory.extend(n.to_le_bytes());
            directory.extend([0; 12]);
            directory.extend(at.to_le_bytes());
            directory.extend(name.as_bytes());
        }
        let (at, len, n) = (made.len() as u32, directory.len() as u32, records.len() as u16);
        made.extend(directory);
        made.extend(b"PK\x05\x06\0\0\0\0");
        made.extend(n.to_le_bytes());
        made.extend(n.to_le_bytes());
        made.extend(len.to_le_bytes());
        made.extend(at.to_le_bytes());
        made.extend([0; 2]);
        made
    }

    fn held(bytes: Vec<u8>) -> Held {
        Held::new(Location::object("test", "file"), bytes.into())
    }

    fn refusal(bytes: Vec<u8>) -> String {
        let source = held(bytes);
        let all = Archive::read(&source, &mut Context::of_part(&Stop::new())).and_then(|archive| {
            archive
                .records
                .iter()
                .map(|record| record.content(&source, 100, &mut Context::of_part(&Stop::new())))
                .collect::<Result<Vec<_>>>()
        });
        all.unwrap_err().to_string()
    }

    #[test]
    fn records_are_read_by_the_directory() {
        let source = held(archive(&[("a", b"first"), ("b/c", b""), ("d", b"last")]));
        let found = Archive::read(&source, &mut Context::of_part(&Stop::new())).unwrap();
        let read: Vec<_> = found
            .records
            .iter()
            .map(|r| (shown(&r.name), r.content(&source, 100, &mut Context::of_part(&Stop::new())).unwrap()))
            .collect();
        assert_eq!(read, [("a".into(), b"first".to_vec()), ("b/c".into(), vec![]), ("d".into(), b"last".to_vec())]);
        assert!(Archive::read(&held(archive(&[])), &mut Context::of_part(&Stop::new())).unwrap().records.is_empty());
    }

    #[test]
    fn each_lie_of_a_directory_is_refused() {
        let good = archive(&[("a", b"first"), ("b", b"second")]);
        let directory = good.len() - 22 - 2 * 47;
        let with = |at: usize, bytes: &[u8]| {
            let mut made = good.clone();
            made[at..at + bytes.len()].copy_from_slice(bytes);
            made
        };
        let end = good.len() - 22;
        let cases = [
            (good[..good.len() - 1].to_vec(), "found none"),
            (with(end + 10, &[3]), "archives of several disks"),
            (with(end + 4, &[1]), "archives of several disks"),
            (with(end + 12, &[1]), "expected the zip directory to end"),
            (with(end + 16, &[0xff, 0xff, 0xff]), "expected the zip directory to end"),
            ([&good[..], &good].concat(), "several archives"),
            (with(directory, b"XX"), "expected a record of the zip directory"),
            (with(directory + 28, &[200]), "extends past the directory"),
            (with(directory + 46, b"b"), "two records are named 'b'"),
            (with(directory + 8, &[1]), "encrypted"),
            (with(directory + 10, &[12]), "another compression"),
            (with(directory + 20, &[4]), "two sizes differ"),
            (with(directory + 42, &[1]), "expected the first record of the zip file at byte 0"),
            (with(directory + 20, &[99, 0, 0, 0, 99]), "overlaps"),
            (with(directory + 20, &[0xff, 0xff, 0xff, 0xff]), "zip64 extra field"),
            (with(0, b"XX"), "expected the local header of 'a'"),
            (with(30, b"x"), "expected the local header of 'a'"),
            (with(28, &[200]), "extends past byte"),
        ];
        for (bytes, expected) in cases {
            let found = refusal(bytes);
            assert!(found.contains(expected), "{expected}: {found}");
            assert!(!found.contains('\n'));
        }
    }

    #[test]
    fn every_truncation_is_refused() {
        let good = archive(&[("a", b"first"), ("b", b"second")]);
        for cut in 0..good.len() {
            assert!(Archive::read(&held(good[..cut].to_vec()), &mut Context::of_part(&Stop::new())).is_err(), "{cut}");
        }
    }
}
