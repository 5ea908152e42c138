//! A shard's file as bytes: mapped, read or inflated.

use std::fs::File;
use std::sync::Arc;

use sha2::{Digest, Sha256};

use crate::codec::inflate;
use crate::error::{Error, Kind, Result};
use crate::memory::buffer::Buffer;
use crate::source::descriptors::open_regular;
use crate::source::mmap::Map;
use crate::source::pread;
use crate::threads::Watch;

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

/// A regular file of `len` bytes, read into memory in pieces.
pub(super) fn read_whole(file: &File, len: usize, watch: Watch<'_>) -> Result<Buffer> {
    const PIECE: usize = 16 << 20;
    let said = |e: std::io::Error| Error::from_io(&e, std::path::Path::new(""), "read");
    let mut block = Buffer::new(len).map_err(said)?;
    for (i, piece) in block.bytes_mut().chunks_mut(PIECE).enumerate() {
        if i > 0 && watch() {
            return Err(Error::new(Kind::Interrupted, "interrupted"));
        }
        pread::read_exact_at(file, piece, (i * PIECE) as u64).map_err(said)?;
    }
    Ok(block)
}

/// A pickle file by itself, inflated if it is compressed; `limit` bounds what a compressed one may inflate to, as
/// [`inflate::allowed`] does.
pub fn read_file(path: &std::path::Path, compressed: bool, limit: u64, watch: Watch<'_>) -> Result<Buffer> {
    let read = |watch: Watch<'_>| {
        let (file, len) = open_regular(path)?;
        let bytes = usize::try_from(len).map_err(|_| Error::new(Kind::Access, "does not fit this machine's memory"))?;
        let stored = read_whole(&file, bytes, &mut *watch)?;
        if !compressed {
            return Ok(stored);
        }
        inflate::inflate_beside(&stored, inflate::allowed(len, u64::MAX, limit), &|_| Ok(()), watch)
    };
    read(watch).map_err(|e: Error| e.at(path))
}

/// Bytes hashed between two looks at a watch.
const HASHED_AT_ONCE: usize = 4 << 20;

pub(super) fn sha256(bytes: &[u8], watch: Watch<'_>) -> Result<[u8; 32]> {
    let mut sha = Sha256::new();
    for (i, piece) in bytes.chunks(HASHED_AT_ONCE).enumerate() {
        if i > 0 && watch() {
            return Err(Error::new(Kind::Interrupted, "interrupted"));
        }
        sha.update(piece);
    }
    Ok(sha.finalize().into())
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}
