//! The headers of `.npy` files, and the members of `.npz` archives; the files are untrusted.
//!
//! ```text
//! 6 bytes   93 "NUMPY"
//! 2 bytes   version: 1.0, 2.0 or 3.0
//! 2 or 4    length of the header (4 bytes from version 2.0 on)
//! header    a Python dict literal: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
//! the rest  elements
//! ```
//!
//! The header is parsed as the few literals that numpy writes, never evaluated. Elements of type `V1` and `V2`, which
//! numpy writes for the types of ml_dtypes, are bytes and 16-bit integers here: only the reader knows their type. A name such as
//! `bfloat16` needs no reader that knows.
//! Strings (`U`, `S`) get one more axis, of code points or bytes. Object and structured dtypes are refused.
//!
//! Source: numpy/lib/_format_impl.py of numpy 2.4.

use super::arrays::{ArrayPlace, Region};
use super::end;
use super::zip::{Archive, ZipRecord, shown};
use crate::codec::inflate;
use crate::dtype::{DType, Spelling};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::Source;
use crate::threads::{Context, Stop};

const MAGIC: &[u8] = b"\x93NUMPY";
/// Bytes read first; longer headers are read again.
const FRONT: u64 = 512;
/// The longest header: numpy's own reader stops at 10,000 bytes.
const MOST_HEADER: u64 = 1 << 20;
const MAX_AXES: usize = 64;

/// The meaning of elements that a dtype does not name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NpyElements {
    /// Numbers.
    Numbers,
    /// Bytes of an unknown type: unsigned integers of their size here.
    Void,
    /// Text: code points (`U`) or bytes (`S`) along one more axis.
    Text,
}

/// An array of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpyArray {
    /// Its place.
    pub place: ArrayPlace,
    /// Its elements.
    pub elements: NpyElements,
}

/// A header, and its length from the first byte of the file.
struct NpyHeader {
    descr: String,
    fortran: bool,
    shape: Vec<u64>,
    len: u64,
}

fn malformed(detail: impl Into<String>) -> Error {
    Error::new(Kind::Format, detail)
}

/// The array of a `.npy` file.
pub fn read(source: &dyn Source, stop: &Stop) -> Result<NpyArray> {
    header_of(source, stop).and_then(|header| header.array(source.size(), false)).map_err(|e| e.at(source.location()))
}

/// As [`read`], for a file that may end before its array does.
pub fn read_partial(source: &dyn Source, stop: &Stop) -> Result<NpyArray> {
    header_of(source, stop).and_then(|header| header.array(source.size(), true)).map_err(|e| e.at(source.location()))
}

fn header_of(source: &dyn Source, stop: &Stop) -> Result<NpyHeader> {
    in_front(source.size(), &mut |len| {
        let mut front = memory::bytes(len)?;
        source.read(0, &mut front, stop)?;
        Ok(front)
    })
}

/// The members of a `.npz` archive, by name without `.npy`.
pub fn read_archive(source: &dyn Source, context: &mut Context<'_>) -> Result<Vec<(String, NpyArray)>> {
    let mut read = || -> Result<Vec<(String, NpyArray)>> {
        let archive = Archive::read(source, context)?;
        let members = archive.records.iter().filter(|record| record.name.ends_with(b".npy"));
        members.map(|record| member(source, record, context)).collect()
    };
    read().map_err(|e: Error| e.at(source.location()))
}

fn member(source: &dyn Source, record: &ZipRecord, context: &mut Context<'_>) -> Result<(String, NpyArray)> {
    let name = shown(record.name.strip_suffix(b".npy").unwrap_or_default());
    let at = record.data(source, context)?;
    let read = |len: u64| {
        // Deflate makes at most 1032 bytes of one; a header is text, and never near that.
        let stored = record.stored.min(if record.deflated { len + 1024 } else { len });
        let mut front = memory::bytes(stored)?;
        source.read(at, &mut front, context.stop())?;
        Ok(if record.deflated { inflate::raw_front(&front, to_usize(len)) } else { front })
    };
    let parsed = in_front(record.size, &mut { read }).and_then(|header| header.array(record.size, false));
    let mut array = parsed.map_err(|e| malformed(format!("'{name}': {}", e.detail)).byte(at))?;
    if record.deflated {
        let (stored, size, crc) = (record.stored, record.size, record.crc);
        array.place.inside = Some(Region { at, stored, size, deflated: true, crc });
    } else {
        array.place.at += at;
    }
    Ok((name, array))
}

/// Parses the header of `size` bytes, of which `read` returns the first ones.
fn in_front(size: u64, read: &mut dyn FnMut(u64) -> Result<Vec<u8>>) -> Result<NpyHeader> {
    let front = read(FRONT.min(size))?;
    if !front.starts_with(MAGIC) {
        let found = &front[..front.len().min(6)];
        return Err(malformed(format!(
            "expected a .npy file, which begins with 93 4e 55 4d 50 59, found {found:02x?}"
        ))
        .byte(0));
    }
    let (wide, len) = match front[MAGIC.len()..] {
        [1, 0, a, b, ..] => (10, u64::from(u16::from_le_bytes([a, b]))),
        [2 | 3, 0, a, b, c, d, ..] => (12, u64::from(u32::from_le_bytes([a, b, c, d]))),
        [major, minor, ..] if !matches!((major, minor), (1..=3, 0)) => {
            let detail = format!("expected version 1.0, 2.0 or 3.0 of .npy, found {major}.{minor}");
            return Err(Error::new(Kind::Unsupported, detail).byte(6));
        }
        _ => {
            return Err(
                Error::new(Kind::Truncated, "the header of the .npy file is truncated").byte(front.len() as u64)
            );
        }
    };
    let end = wide + len;
    if len > MOST_HEADER || end > size {
        return Err(malformed(format!("a header of {len} bytes, but {} bytes follow", size - wide)).byte(8));
    }
    let front = if end > front.len() as u64 { read(end)? } else { front };
    let text = front.get(to_usize(wide)..to_usize(end)).map(std::str::from_utf8);
    let Some(Ok(text)) = text else { return Err(malformed("the header of the .npy file is not text").byte(wide)) };
    Literal { text, at: 0 }.header(end).map_err(|at| {
        malformed(
            "expected {'descr': '...', 'fortran_order': ..., 'shape': (...)} as the header, found another literal",
        )
        .byte(wide + at as u64)
    })
}

/// A parser of the literals in a header. Errors are positions.
struct Literal<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Literal<'a> {
    fn skip(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        self.at += rest.iter().take_while(|b| b.is_ascii_whitespace()).count();
    }

    fn takes(&mut self, word: &str) -> bool {
        self.skip();
        let found = self.text[self.at..].starts_with(word);
        self.at += if found { word.len() } else { 0 };
        found
    }

    fn expect(&mut self, word: &str) -> Result<(), usize> {
        if self.takes(word) { Ok(()) } else { Err(self.at) }
    }

    fn string(&mut self) -> Result<&'a str, usize> {
        let quote = if self.takes("'") { '\'' } else { self.expect("\"").map(|()| '"')? };
        let rest = &self.text[self.at..];
        let len = rest.find([quote, '\\', '\n']).filter(|n| rest[*n..].starts_with(quote)).ok_or(self.at)?;
        self.at += len + 1;
        Ok(&rest[..len])
    }

    fn number(&mut self) -> Result<u64, usize> {
        self.skip();
        let rest = &self.text[self.at..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let value = rest[..digits].parse().map_err(|_| self.at)?;
        self.at += digits;
        let _ = self.takes("L"); // Python 2 wrote long integers so
        Ok(value)
    }

    fn shape(&mut self) -> Result<Vec<u64>, usize> {
        self.expect("(")?;
        let mut made = vec![];
        while !self.takes(")") {
            made.push(self.number()?);
            if made.len() > MAX_AXES {
                return Err(self.at);
            }
            if !self.takes(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(made)
    }

    fn header(mut self, len: u64) -> Result<NpyHeader, usize> {
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        self.expect("{")?;
        while !self.takes("}") {
            let key = self.string()?;
            self.expect(":")?;
            match key {
                "descr" if descr.is_none() && self.takes("[") => descr = Some("[".to_string()),
                "descr" if descr.is_none() => descr = Some(self.string()?.to_string()),
                "fortran_order" if fortran.is_none() => {
                    fortran = Some(self.takes("True"));
                    if fortran == Some(false) {
                        self.expect("False")?;
                    }
                }
                "shape" if shape.is_none() => shape = Some(self.shape()?),
                _ => return Err(self.at),
            }
            // A structured dtype is refused by name, so the rest of its list does not matter.
            if descr.as_deref() == Some("[") {
                return Ok(NpyHeader { descr: "[...]".to_string(), fortran: false, shape: vec![], len });
            }
            if !self.takes(",") {
                self.expect("}")?;
                break;
            }
        }
        self.skip();
        match (descr, fortran, shape) {
            (Some(descr), Some(fortran), Some(shape)) if self.at == self.text.len() => {
                Ok(NpyHeader { descr, fortran, shape, len })
            }
            _ => Err(self.at),
        }
    }
}

/// The number of code points (`U`) or bytes (`S`) of a text, and the type of each; `None` for other elements.
fn text(descr: &str) -> Option<(DType, u64)> {
    let bare = descr.trim_start_matches(['<', '>', '=', '|']);
    let dtype = match bare.get(..1)? {
        "U" => DType::U32,
        "S" => DType::U8,
        _ => return None,
    };
    Some((dtype, bare[1..].parse().ok().filter(|n| *n <= 1 << 24)?))
}

impl NpyHeader {
    /// The array in a file of `size` bytes, which may end before it if the file `is_partial`.
    fn array(self, size: u64, is_partial: bool) -> Result<NpyArray> {
        let (dtype, elements, text, swapped) = match (text(&self.descr), Spelling::of_code(&self.descr)) {
            (Some((dtype, text)), _) => {
                (dtype, NpyElements::Text, text, self.descr.starts_with('>') && dtype == DType::U32)
            }
            (None, (Spelling::Type(dtype), swapped)) => (dtype, NpyElements::Numbers, 1, swapped),
            (None, (Spelling::Bits(dtype), swapped)) => (dtype, NpyElements::Void, 1, swapped),
            (None, (other, _)) => {
                let what = match other {
                    Spelling::Unsupported(what) => what,
                    _ if self.descr == "[...]" => "records of a structured dtype",
                    _ => "another dtype",
                };
                let shown: String = self.descr.chars().take(40).collect();
                return Err(Error::new(
                    Kind::Unsupported,
                    format!("expected elements of numbers or text, found {what} ('{shown}')"),
                ));
            }
        };
        let mut strides = if self.fortran {
            let reversed: Vec<u64> = self.shape.iter().rev().copied().collect();
            ArrayPlace::dense(&reversed).into_iter().rev().collect()
        } else {
            ArrayPlace::dense(&self.shape)
        };
        let mut shape = self.shape;
        if elements == NpyElements::Text {
            strides.iter_mut().for_each(|stride| *stride = stride.saturating_mul(text));
            shape.push(text);
            strides.push(1);
        }
        let place = ArrayPlace { dtype, swapped, shape, strides, at: self.len, inside: None, parts: None };
        let bytes = place.count().and_then(|n| n.checked_mul(place.item()));
        match bytes.and_then(|bytes| bytes.checked_add(self.len)) {
            Some(end) if end <= size => {
                end::check(end, size, "the array", ": several arrays in one file are unsupported")?;
                Ok(NpyArray { place, elements })
            }
            Some(_) if is_partial => Ok(NpyArray { place, elements }),
            Some(end) => Err(Error::new(
                Kind::Truncated,
                format!("an array of shape {:?}: expected {end} bytes, found {size}", place.shape),
            )
            .byte(size)),
            None => Err(malformed(format!("an array of shape {:?}: its size overflows", place.shape)).byte(8)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::location::Location;
    use crate::parse::arrays;
    use crate::source::held::Held;

    fn file(header: &str, data: &[u8]) -> Held {
        let mut bytes = [MAGIC, &[1, 0], &(header.len() as u16).to_le_bytes()].concat();
        bytes.extend(header.as_bytes());
        bytes.extend(data);
        Held::new(Location::object("test", "a.npy"), bytes.into())
    }

    #[test]
    fn elements_are_returned_in_c_order_and_native_byte_order() {
        let data: Vec<u8> = (0..6u16).flat_map(u16::to_be_bytes).collect();
        let header = "{'descr': '>u2', 'fortran_order': True, 'shape': (2, 3), }   \n";
        let source = file(header, &data);
        let array = read(&source, &Stop::new()).unwrap();
        assert_eq!((&array.place.shape[..], &array.place.strides[..]), (&[2, 3][..], &[1, 2][..]));
        let made: Vec<u16> = arrays::read(&source, &array.place, &mut Context::of_part(&Stop::new()))
            .unwrap()
            .chunks_exact(2)
            .map(|pair| u16::from_le_bytes([pair[0], pair[1]]))
            .collect();
        assert_eq!(made, [0, 2, 4, 1, 3, 5]);
    }

    #[test]
    fn shapes_of_any_number_of_axes_are_parsed() {
        for (shape, expected) in [("()", vec![]), ("(3,)", vec![3]), ("(3L, 1)", vec![3, 1]), ("( 1 , 3 )", vec![1, 3])]
        {
            let header = format!("{{\"shape\": {shape}, 'fortran_order': False, 'descr': '|u1'}}");
            let count = expected.iter().product::<u64>() as usize;
            let source = file(&header, &[1, 2, 3][..count]);
            assert_eq!(read(&source, &Stop::new()).unwrap().place.shape, expected, "{shape}");
        }
    }

    #[test]
    fn each_wrong_header_is_refused() {
        let cases = [
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (9, 9)}", "expected 3"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387904, 8)}", "overflows"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "another literal"),
            ("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "Python objects"),
            ("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "structured"),
            ("{'descr': '<M8[ns]', 'fortran_order': False, 'shape': (1,)}", "times"),
            ("{'descr': f(), 'fortran_order': False, 'shape': (1,)}", "another literal"),
            ("{'descr': '<f4', 'fortran_order': 1, 'shape': (1,)}", "another literal"),
            ("{'descr': '<f4', 'shape': (1,)}", "another literal"),
            ("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} + 1", "another literal"),
            ("{'descr': '<f4', 'descr': '<f8', 'fortran_order': False, 'shape': (1,)}", "another literal"),
            ("", "another literal"),
            ("{'descr': '<i2', 'fortran_order': False, 'shape': (1,)}", "the end of the array, found 2 more bytes"),
        ];
        for (header, expected) in cases {
            let found = read(&file(header, &[0; 4]), &Stop::new()).unwrap_err().to_string();
            assert!(found.contains(expected), "{header}: {found}");
        }
    }
}
