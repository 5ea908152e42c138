//! The index of a shard: (offset, length) per inner chunk, (2^64-1, 2^64-1) for a missing one (Zarr enhancement proposal 2,
//! "Binary shard format").

use std::sync::Arc;

use super::failing::{Said, Undecodable};
use crate::codec::cache::Cached;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::{ByteRange, Source};
use crate::threads::Stop;

/// The entry of a missing inner chunk.
pub const ABSENT: (u64, u64) = (u64::MAX, u64::MAX);

/// The encoding of an array's shard indexes.
#[derive(Clone, Debug)]
pub struct IndexForm {
    chunks: u64,
    at_end: bool,
    coding: IndexCoding,
}

#[derive(Clone, Debug)]
enum IndexCoding {
    Numbers(Numbers),
    /// Other codecs, and the length of their output.
    Coded(Arc<dyn DecodeIndex>, u64),
}

/// A decoder of index codecs.
pub(super) trait DecodeIndex: std::fmt::Debug + Send + Sync {
    /// Decodes to numbers in native byte order.
    fn decode(&self, raw: Vec<u8>) -> Said<Vec<u8>>;
}

/// Plain numbers, optionally followed by a checksum: the form that all libraries write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// Whether the numbers are big-endian.
    pub big_endian: bool,
    /// Whether a crc32c follows.
    pub checked: bool,
}

impl IndexForm {
    /// An index of plain numbers, for `chunks` inner chunks.
    pub fn numbers(chunks: u64, at_end: bool, numbers: Numbers) -> IndexForm {
        IndexForm { chunks, at_end, coding: IndexCoding::Numbers(numbers) }
    }

    /// An index with other codecs, `bytes` bytes long.
    pub(super) fn coded(chunks: u64, at_end: bool, codecs: Arc<dyn DecodeIndex>, bytes: u64) -> IndexForm {
        IndexForm { chunks, at_end, coding: IndexCoding::Coded(codecs, bytes) }
    }

    /// Its length in a shard.
    pub fn bytes(&self) -> u64 {
        match &self.coding {
            IndexCoding::Numbers(numbers) => self.chunks * 16 + if numbers.checked { 4 } else { 0 },
            IndexCoding::Coded(_, bytes) => *bytes,
        }
    }

    /// Its offset in a shard of `len` bytes; `None` if the shard is too short.
    pub(super) fn start(&self, len: u64) -> Option<u64> {
        let at = len.checked_sub(self.bytes())?;
        Some(if self.at_end { at } else { 0 })
    }

    /// Its range in a shard. `short` is the kind of the error if the shard is too short.
    pub fn range(&self, shard: &dyn Source, short: Kind) -> Result<ByteRange> {
        let (len, found) = (self.bytes(), shard.size());
        let at = self.start(found).ok_or_else(|| {
            let detail = format!("expected at least the {len} bytes of a shard's index, found {found}");
            Error::new(short, detail).at(shard.location())
        })?;
        Ok(ByteRange { at, len })
    }

    /// Reads it from a shard; returns its offset and bytes. See [`IndexForm::range`].
    #[expect(clippy::disallowed_methods, reason = "an index is short, and those of far shards are fetched together")]
    pub fn read(&self, shard: &dyn Source, short: Kind) -> Result<(u64, Vec<u8>)> {
        let ByteRange { at, len } = self.range(shard, short)?;
        // The length of the file limits this allocation.
        let mut raw = memory::bytes(len).map_err(|e| e.at(shard.location()))?;
        shard.read(at, &mut raw, Stop::never())?;
        Ok((at, raw))
    }

    /// Its entries.
    pub(super) fn parse(&self, raw: Vec<u8>) -> Said<Vec<(u64, u64)>> {
        match &self.coding {
            IndexCoding::Numbers(numbers) => self.parse_numbers(*numbers, &raw),
            IndexCoding::Coded(codecs, _) => {
                let decoded = codecs.decode(raw);
                let pairs = decoded.map_err(|e| Undecodable { text: format!("shard index: {}", e.text), ..e })?;
                entries(&pairs, u64::from_ne_bytes)
            }
        }
    }

    /// Its entries, each absent or inside a shard of `len` bytes. An error has its position in the index.
    pub fn parse_within(&self, raw: &[u8], len: u64) -> Result<Vec<(u64, u64)>, (u64, Error)> {
        let refused = |why: Undecodable| (0, Error::new(why.kind, why.text));
        let index = match &self.coding {
            IndexCoding::Numbers(numbers) => self.parse_numbers(*numbers, raw).map_err(refused)?,
            IndexCoding::Coded(..) => {
                memory::copied(raw).map_err(Undecodable::from).and_then(|raw| self.parse(raw)).map_err(refused)?
            }
        };
        for (chunk, (offset, n)) in index.iter().enumerate() {
            if (*offset, *n) != ABSENT && offset.checked_add(*n).is_none_or(|end| end > len) {
                let detail = format!("inner chunk {chunk}: expected {n} bytes at {offset}, but the file ends at {len}");
                return Err((16 * chunk as u64, Error::new(Kind::Format, detail)));
            }
        }
        Ok(index)
    }

    fn parse_numbers(&self, numbers: Numbers, raw: &[u8]) -> Said<Vec<(u64, u64)>> {
        let (Some((pairs, crc)), true) =
            (raw.split_at_checked(to_usize(self.chunks) * 16), raw.len() as u64 == self.bytes())
        else {
            return Err(format!("expected an index of {} bytes, found {}", self.bytes(), raw.len()).into());
        };
        if let Ok(crc) = <[u8; 4]>::try_from(crc) {
            let (stored, found) = (u32::from_le_bytes(crc), crc32c::crc32c(pairs));
            if stored != found {
                return Err(format!(
                    "the checksum of the shard's index is {found:08x}, expected {stored:08x}: the file is truncated or damaged"
                )
                .into());
            }
        }
        entries(pairs, if numbers.big_endian { u64::from_be_bytes } else { u64::from_le_bytes })
    }
}

fn entries(pairs: &[u8], number: impl Fn([u8; 8]) -> u64) -> Said<Vec<(u64, u64)>> {
    let number = |b: &[u8]| number(b.first_chunk::<8>().copied().unwrap_or([0xff; 8]));
    let pairs = pairs.as_chunks::<16>().0;
    let mut made = memory::reserve(pairs.len() as u64)?;
    made.extend(pairs.iter().map(|pair| (number(pair), number(&pair[8..]))));
    Ok(made)
}

/// The position of an entry's inner chunk in a shard of `len` bytes; `None` if it is missing.
pub(super) fn place((offset, n): (u64, u64), len: u64) -> Said<Option<(u64, u64)>> {
    if (offset, n) == ABSENT {
        return Ok(None);
    }
    if offset.checked_add(n).is_none_or(|end| end > len) {
        return Err(format!("the shard index refers to {n} bytes at {offset}, but the shard has {len}").into());
    }
    Ok(Some((offset, n)))
}

/// Encodes an index as Levanter and zarr-python do: little-endian, with a checksum.
pub fn encode(entries: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(entries.len() * 16 + 4);
    for (offset, len) in entries {
        bytes.extend_from_slice(&offset.to_le_bytes());
        bytes.extend_from_slice(&len.to_le_bytes());
    }
    bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
    bytes
}

/// The entries of a shard's index, which can be cached.
#[derive(Debug)]
pub struct Entries(pub Box<[(u64, u64)]>);

impl Cached for Entries {
    fn size(&self) -> usize {
        self.0.len() * 16 + 64
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_index_that_was_encoded_is_read_again(pairs in prop::collection::vec((0u64..1 << 20, 0u64..1 << 20), 0..40)) {
            let numbers = Numbers { big_endian: false, checked: true };
            let form = IndexForm::numbers(pairs.len() as u64, true, numbers);
            let raw = encode(&pairs);
            prop_assert_eq!(raw.len() as u64, form.bytes());
            prop_assert_eq!(&form.parse_within(&raw, 1 << 21).unwrap(), &pairs);
            prop_assert_eq!(form.parse(raw).unwrap(), pairs);
        }
    }
}
