//! The bytes of a shard's file: mapped, read or inflated.

use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::codec::inflate;
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::memory::buffer::Buffer;
use crate::source::fetch::read_all;
use crate::source::mmap::{Map, Paging};
use crate::source::{Access, Source, Store, Version, Wishes};
use crate::threads::{Context, Watch};

pub(super) enum ShardBytes {
    Shared(Arc<Buffer>),
    Stored(Stored),
}

impl ShardBytes {
    pub(super) fn get(&self) -> &[u8] {
        match self {
            ShardBytes::Shared(block) => block,
            ShardBytes::Stored(stored) => stored.bytes(),
        }
    }
}

pub(super) enum Stored {
    Map(Map),
    Buffer(Buffer),
}

impl Stored {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Stored::Map(map) => map.bytes(),
            Stored::Buffer(block) => block,
        }
    }
}

/// Allocates memory for all bytes of a source.
pub(super) fn block_for(source: &dyn Source) -> Result<Buffer> {
    let len = source.size();
    let len =
        usize::try_from(len).map_err(|_| Error::new(Kind::Access, "the file exceeds this machine's address space"))?;
    Buffer::new(len).map_err(|e| Error::from_io(&e, source.location(), "read"))
}

/// Reads a source into memory, in pieces.
fn read_whole(source: &dyn Source, wishes: Option<&Wishes>, watch: Watch<'_>) -> Result<Buffer> {
    let mut block = block_for(source)?;
    if let Some(wishes) = wishes {
        read_all(vec![(source, 0, block.bytes_mut())], wishes, watch)?;
        return Ok(block);
    }
    source.read_long(0, block.bytes_mut(), &mut Context::of_caller(watch))?;
    Ok(block)
}

impl Stored {
    /// All bytes of a source: mapped if `maps` is set and it can be, else read.
    pub(super) fn of(source: &dyn Source, maps: bool, wishes: Option<&Wishes>, watch: Watch<'_>) -> Result<Stored> {
        if maps && let Some(map) = source.map(Paging::Hinted)? {
            return Ok(Stored::Map(map));
        }
        read_whole(source, wishes, watch).map(Stored::Buffer)
    }
}

/// Reads a single pickle file, and inflates it if `compressed`; `limit` bounds the inflated size as in `inflate::allowed`.
pub fn read_file(
    store: &dyn Store,
    location: &Location,
    compressed: bool,
    limit: u64,
    watch: Watch<'_>,
) -> Result<Buffer> {
    let read = |watch: Watch<'_>| {
        let source = store.open_watched(location, Access::Once, &mut *watch)?;
        let stored = read_whole(&*source, store.wishes().as_ref(), &mut *watch)?;
        if !compressed {
            return Ok(stored);
        }
        inflate::inflate_beside(&stored, inflate::allowed(source.size(), u64::MAX, limit), &|_| Ok(()), watch)
    };
    read(watch).map_err(|e: Error| e.at(location))
}

/// Bytes hashed between two calls of the watch.
const HASHED_AT_ONCE: usize = 4 << 20;

/// The bytes of a shard's file, its version, and the checksum of its first bytes.
pub(super) struct ShardRead {
    pub(super) stored: Stored,
    pub(super) version: Option<Version>,
    sha: Sha256,
    hashed: usize,
}

impl ShardRead {
    pub(super) fn new(stored: Stored, version: Option<Version>) -> ShardRead {
        ShardRead { stored, version, sha: Sha256::new(), hashed: 0 }
    }

    /// Hashes bytes until the watch returns true; returns whether all are hashed.
    pub(super) fn hash(&mut self, watch: Watch<'_>) -> bool {
        (self.sha, self.hashed) = hash(self.stored.bytes(), self.sha.clone(), self.hashed, watch);
        self.hashed == self.stored.bytes().len()
    }

    /// The SHA-256 of all bytes.
    pub(super) fn sha256(&self, watch: Watch<'_>) -> Result<[u8; 32]> {
        match hash(self.stored.bytes(), self.sha.clone(), self.hashed, watch) {
            (sha, hashed) if hashed == self.stored.bytes().len() => Ok(sha.finalize().into()),
            _ => Err(Error::new(Kind::Interrupted, "interrupted")),
        }
    }
}

/// Hashes bytes from an offset on until the watch returns true; returns the offset reached.
fn hash(bytes: &[u8], mut sha: Sha256, mut at: usize, watch: Watch<'_>) -> (Sha256, usize) {
    for (i, piece) in bytes[at..].chunks(HASHED_AT_ONCE).enumerate() {
        if i > 0 && watch() {
            break;
        }
        sha.update(piece);
        at += piece.len();
    }
    (sha, at)
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
