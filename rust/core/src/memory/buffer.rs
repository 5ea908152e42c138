//! A block of memory to decode or read into.

use std::ops::Deref;

use super::output::Output;

/// Decoded bytes. Large blocks are recycled after they are dropped: filling fresh pages costs as much as decoding into
/// them.
#[derive(Debug)]
pub struct Buffer {
    memory: Backing,
    len: usize,
}

#[derive(Debug)]
enum Backing {
    Heap(Vec<u8>),
    Recycled(Output),
}

impl Buffer {
    /// A block to fill; its content is unspecified.
    pub fn new(len: usize) -> std::io::Result<Buffer> {
        Ok(Buffer { memory: Backing::Recycled(Output::new(len)?), len })
    }

    /// The bytes, to write to.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Backing::Heap(bytes) => &mut bytes[..self.len],
            Backing::Recycled(output) => &mut output.as_mut()[..self.len],
        }
    }

    /// Bytes of memory in use: all of a reused mapping is resident, not only `len` bytes.
    pub fn footprint(&self) -> usize {
        match &self.memory {
            Backing::Heap(_) => self.len,
            Backing::Recycled(output) => output.capacity(),
        }
    }

    /// Drops the bytes after `len`.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.memory {
            Backing::Heap(bytes) => &bytes[..self.len],
            Backing::Recycled(output) => &output.bytes()[..self.len],
        }
    }
}

impl From<Vec<u8>> for Buffer {
    fn from(bytes: Vec<u8>) -> Buffer {
        let len = bytes.len();
        Buffer { memory: Backing::Heap(bytes), len }
    }
}
