//! A block of memory that something is decoded or read into.

use std::ops::Deref;

use super::output::Output;

/// Decoded bytes. Large ones lie in memory that is used again when they are gone: filling fresh pages costs as much as decoding
/// into them.
#[derive(Debug)]
pub struct Block {
    memory: Bytes,
    len: usize,
}

#[derive(Debug)]
enum Bytes {
    Heap(Vec<u8>),
    Recycled(Output),
}

impl Block {
    /// Memory to be filled; what is in it is anybody's guess.
    pub fn new(len: usize) -> std::io::Result<Block> {
        Ok(Block { memory: Bytes::Recycled(Output::new(len)?), len })
    }

    /// To write in.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Bytes::Heap(bytes) => &mut bytes[..self.len],
            Bytes::Recycled(output) => &mut output.as_mut()[..self.len],
        }
    }

    /// Bytes of memory that it takes: the rest of a reused mapping is as resident as what it holds.
    pub fn footprint(&self) -> usize {
        match &self.memory {
            Bytes::Heap(_) => self.len,
            Bytes::Recycled(output) => output.capacity(),
        }
    }

    /// Forgets what lies after `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Bytes::Heap(bytes) => &bytes[..self.len],
            Bytes::Recycled(output) => &output.bytes()[..self.len],
        }
    }
}

impl From<Vec<u8>> for Block {
    fn from(bytes: Vec<u8>) -> Block {
        let len = bytes.len();
        Block { memory: Bytes::Heap(bytes), len }
    }
}
