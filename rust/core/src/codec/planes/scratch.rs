//! Memory of a thread for planes.

use std::cell::Cell;

use crate::error::Result;
use crate::memory;

/// A thread keeps at most this much memory for planes.
const KEPT: usize = 1 << 20;

thread_local! {
    static SCRATCH: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Calls `work` with memory of any content. Fresh memory would cost as much as a plane.
pub fn with_scratch<R>(len: usize, work: impl FnOnce(&mut [u8]) -> Result<R>) -> Result<R> {
    let mut scratch = SCRATCH.take();
    if scratch.len() < len {
        memory::resize(&mut scratch, len as u64)?;
    }
    let done = work(&mut scratch[..len]);
    if scratch.capacity() <= KEPT {
        SCRATCH.set(scratch);
    }
    done
}
