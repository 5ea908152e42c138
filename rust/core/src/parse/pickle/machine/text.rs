//! The text forms of protocols 0 to 2: strings with escapes, bytes in latin-1, decimal integers.

use super::super::{Blob, Id, Node};
use super::{FALSE, MAX_INT_BYTES, Machine, TRUE};
use crate::error::{Kind, Result};

impl Machine<'_> {
    pub(super) fn quoted(&mut self) -> Result<()> {
        let range = self.line()?;
        let line = &self.input[range.clone()];
        let quote = line.first().copied().filter(|q| matches!(q, b'\'' | b'"'));
        let plain = line.len() >= 2 && quote.is_some() && line.last().copied() == quote;
        if !plain || line[1..line.len() - 1].contains(&b'\\') {
            return Err(self.error(Kind::Unsupported, "quoted strings with escapes are unsupported"));
        }
        self.python2_string(Blob::new(false, range.start + 1..range.end - 1))
    }

    fn keep(&mut self, bytes: &[u8]) -> Blob {
        let start = self.own.len();
        self.own.extend_from_slice(bytes);
        Blob::new(true, start..self.own.len())
    }

    /// Protocol 0's text: latin-1 with \uXXXX and \UXXXXXXXX for other characters ("raw-unicode-escape").
    pub(super) fn escaped(&mut self) -> Result<()> {
        let range = self.line()?;
        let line = &self.input[range];
        let mut made: Vec<u8> = Vec::with_capacity(line.len());
        let mut at = 0;
        while at < line.len() {
            // As in CPython: \u and \U count after an even number of backslashes, which are kept.
            if line[at] == b'\\' && matches!(line.get(at + 1), Some(b'u' | b'U')) {
                let digits = if line[at + 1] == b'u' { 4 } else { 8 };
                let code = line
                    .get(at + 2..at + 2 + digits)
                    .filter(|d| d.iter().all(u8::is_ascii_hexdigit))
                    .and_then(|d| std::str::from_utf8(d).ok())
                    .and_then(|d| u32::from_str_radix(d, 16).ok())
                    .filter(|c| *c <= 0x10_ffff)
                    .ok_or_else(|| self.malformed("expected hexadecimal digits in the escape of a string"))?;
                push_utf8(&mut made, code);
                at += 2 + digits;
            } else if line[at] == b'\\' && line.get(at + 1) == Some(&b'\\') {
                made.extend_from_slice(b"\\\\");
                at += 2;
            } else {
                push_utf8(&mut made, u32::from(line[at]));
                at += 1;
            }
        }
        self.spend(made.len())?;
        let blob = self.keep(&made);
        self.push_node(Node::Str(blob))
    }

    pub(super) fn encode_latin1(&mut self, text: Id) -> Result<()> {
        let utf8 = self.text(text).ok_or_else(|| self.malformed("expected a string to encode"))?;
        let mut made = Vec::with_capacity(utf8.len());
        let mut at = 0;
        while at < utf8.len() {
            match utf8[at..] {
                [a, ..] if a < 0x80 => {
                    made.push(a);
                    at += 1;
                }
                [a @ (0xc2 | 0xc3), b, ..] => {
                    made.push((a & 3) << 6 | (b & 0x3f));
                    at += 2;
                }
                _ => return Err(self.malformed("expected a string that latin-1 can encode")),
            }
        }
        // A string in the memo can be encoded repeatedly.
        self.spend(made.len())?;
        let blob = self.keep(&made);
        self.push_node(Node::Bytes(blob))
    }

    pub(super) fn text_integer(&mut self, op: u8) -> Result<()> {
        let range = self.line()?;
        let line = &self.input[range];
        match (op, line) {
            (b'I', b"00") => return self.push_id(FALSE),
            (b'I', b"01") => return self.push_id(TRUE),
            _ => {}
        }
        let text = if op == b'L' { line.strip_suffix(b"L").unwrap_or(line) } else { line };
        let digits = text.strip_prefix(b"-").unwrap_or(text);
        if digits.is_empty() || digits.len() > MAX_INT_BYTES || !digits.iter().all(u8::is_ascii_digit) {
            return Err(self.malformed("expected an integer"));
        }
        let value = std::str::from_utf8(text).ok().and_then(|t| t.parse().ok());
        match value {
            Some(value) => self.push_node(Node::Int(value)),
            None => {
                let bytes = big_from_decimal(digits, text.starts_with(b"-"));
                let blob = self.keep(&bytes);
                self.push_node(Node::Big(blob))
            }
        }
    }
}

/// Converts decimal digits to little-endian two's complement. Quadratic in at most [`MAX_INT_BYTES`] digits.
fn big_from_decimal(digits: &[u8], negative: bool) -> Vec<u8> {
    let mut bytes: Vec<u8> = vec![];
    for digit in digits {
        let mut carry = u16::from(digit - b'0');
        for byte in &mut bytes {
            let [low, high] = (carry + u16::from(*byte) * 10).to_le_bytes();
            (*byte, carry) = (low, u16::from(high));
        }
        bytes.extend(u8::try_from(carry).ok().filter(|carry| *carry > 0));
    }
    bytes.push(0);
    if negative {
        let mut carry = true;
        for byte in &mut bytes {
            let (flipped, over) = (!*byte).overflowing_add(u8::from(carry));
            *byte = flipped;
            carry = over;
        }
    }
    bytes
}

/// Appends the UTF-8 of any code point, unpaired surrogates included (Python's "surrogatepass").
#[expect(clippy::cast_possible_truncation, reason = "each byte has at most 7 bits of the code point")]
fn push_utf8(out: &mut Vec<u8>, code: u32) {
    match code {
        0..0x80 => out.push(code as u8),
        0x80..0x800 => out.extend_from_slice(&[0xc0 | (code >> 6) as u8, 0x80 | (code & 0x3f) as u8]),
        0x800..0x1_0000 => {
            out.extend_from_slice(&[
                0xe0 | (code >> 12) as u8,
                0x80 | (code >> 6 & 0x3f) as u8,
                0x80 | (code & 0x3f) as u8,
            ]);
        }
        _ => out.extend_from_slice(&[
            0xf0 | (code >> 18) as u8,
            0x80 | (code >> 12 & 0x3f) as u8,
            0x80 | (code >> 6 & 0x3f) as u8,
            0x80 | (code & 0x3f) as u8,
        ]),
    }
}
