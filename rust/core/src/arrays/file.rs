//! The open file of a chunk or a shard, and the positions of units in it.

use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Arc;

use super::failing::Undecodable;
use super::index::{Entries, place};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::slots::Opened;
use crate::source::{ByteRange, Ready, Source, Version};
use crate::threads::Stop;

/// A thread keeps at most this much memory for encoded units: fresh memory would cost as much as the read.
const KEPT: usize = 2 << 20;

thread_local! {
    static ENCODED: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// The file of a chunk or a shard.
#[derive(Debug)]
pub struct ChunkFile {
    /// `None` if the file is missing: every element has the fill value.
    source: Option<Arc<dyn Source>>,
    /// Offset and length of each unit; empty if the file is missing.
    index: Arc<Entries>,
    version: Option<Version>,
}

/// A stored unit and its position.
#[derive(Clone, Copy, Debug)]
pub struct StoredUnit<'a> {
    /// The file.
    pub source: &'a dyn Source,
    /// Its offset in the file.
    pub offset: u64,
    /// Its length in the file.
    pub len: u64,
}

impl ChunkFile {
    /// A file from a store's result; a missing file has no units. `index` returns the entries; for a file that is a single
    /// unit use [`ChunkFile::one_unit`].
    pub fn open(
        opened: Result<Box<dyn Source>>,
        index: impl FnOnce(&dyn Source, Option<&Version>) -> Result<Arc<Entries>>,
    ) -> Result<ChunkFile> {
        let source = match opened {
            Ok(source) => source,
            Err(error) if error.is_absence() => {
                return Ok(ChunkFile { source: None, index: Arc::new(Entries(Box::default())), version: None });
            }
            Err(error) => return Err(error),
        };
        let version = source.version();
        let index = index(&*source, version.as_ref())?;
        Ok(ChunkFile { source: Some(source.into()), index, version })
    }

    /// The index of a file that is a single unit.
    pub fn one_unit(source: &dyn Source, _: Option<&Version>) -> Result<Arc<Entries>> {
        Ok(Arc::new(Entries(Box::new([(0, source.size())]))))
    }

    /// The same file with another source of its bytes.
    pub fn over(&self, source: Arc<dyn Source>) -> ChunkFile {
        ChunkFile { source: Some(source), index: Arc::clone(&self.index), version: self.version.clone() }
    }

    /// The file; `None` if it is missing.
    pub fn source(&self) -> Option<&Arc<dyn Source>> {
        self.source.as_ref()
    }

    /// Its version when it was opened; `None` if its store has no versions, and then nothing of it may be cached.
    pub fn version(&self) -> Option<&Version> {
        self.version.as_ref()
    }

    /// Number of units.
    pub fn units(&self) -> usize {
        self.index.0.len()
    }

    /// The position of a unit; `None` if it is not stored.
    #[inline]
    pub fn unit(&self, unit: usize) -> Result<Option<StoredUnit<'_>>> {
        let (Some(source), Some(entry)) = (self.source.as_deref(), self.index.0.get(unit)) else { return Ok(None) };
        let placed = place(*entry, source.size());
        let placed = placed.map_err(|e| Error::new(Kind::Format, e.text).at(source.location()))?;
        Ok(placed.map(|(offset, len)| StoredUnit { source, offset, len }))
    }
}

impl Opened for ChunkFile {
    fn may_keep(&self) -> bool {
        self.source.as_ref().is_some_and(|file| file.may_keep())
    }
}

impl<'a> StoredUnit<'a> {
    /// An error about this unit.
    pub fn bad(&self, why: impl Into<Undecodable>) -> Error {
        let why = why.into();
        Error::new(why.kind, why.text).at(self.source.location()).byte(self.offset)
    }

    /// Its bytes, if the file is mapped.
    #[inline]
    pub fn mapped(&self) -> Option<&'a [u8]> {
        self.source.bytes()?.get(to_usize(self.offset)..to_usize(self.offset + self.len))
    }

    /// Decodes all its bytes. Starts read-ahead if they are cold.
    #[expect(clippy::disallowed_methods, reason = "a chunk is decoded as a whole, and far ones are fetched together")]
    pub fn decode<R>(&self, decode: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
        if let Some(whole) = self.mapped() {
            if self.source.is_ready(self.offset) == Ready::No {
                self.source.will_need(&[self.range()]);
            }
            return decode(whole);
        }
        let mut encoded = ENCODED.take();
        if (encoded.len() as u64) < self.len {
            memory::resize(&mut encoded, self.len).map_err(|e| self.bad(e))?;
        }
        let whole = &mut encoded[..to_usize(self.len)];
        self.source.read(self.offset, whole, Stop::never())?;
        let decoded = decode(whole);
        if encoded.capacity() <= KEPT {
            ENCODED.set(encoded);
        }
        decoded
    }

    /// Its range in the file.
    pub fn range(&self) -> ByteRange {
        ByteRange { at: self.offset, len: self.len }
    }

    /// `n` of its bytes, from its byte `at`.
    #[expect(clippy::disallowed_methods, reason = "a chunk is decoded as a whole, and far ones are fetched together")]
    pub fn part(&self, at: usize, n: usize) -> Result<Cow<'a, [u8]>> {
        if let Some(part) = self.mapped().and_then(|whole| whole.get(at..at + n)) {
            return Ok(Cow::Borrowed(part));
        }
        let mut part = memory::bytes(n as u64).map_err(|e| self.bad(e))?;
        self.source.read(self.offset + at as u64, &mut part, Stop::never())?;
        Ok(Cow::Owned(part))
    }
}
