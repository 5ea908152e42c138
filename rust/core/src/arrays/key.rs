//! Cache keys of decoded units.
//!
//! A key identifies a unit completely: the array, the file and its version when it was opened, the chunk, and the block. A
//! block's number is only meaningful with the block size from the frame's header, so both are in the key: units of a file that
//! was rewritten in place are not confused with old ones.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::source::Version;

/// A unit of an array.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnitKey {
    /// A process-wide number of the array; see [`new_array`].
    pub array: u64,
    /// Number of the file in the array, or of the chunk if files are not numbered.
    pub file: u64,
    /// The file's version; `None` if it is not checked.
    pub version: Option<Version>,
    /// The chunk in the file.
    pub chunk: usize,
    /// The block in the chunk's frame, and the numbers per block of that frame; [`WHOLE`] for chunks that are decoded as a
    /// whole.
    pub block: (usize, usize),
}

/// The block of a chunk decoded as a whole; no frame has empty blocks.
pub const WHOLE: (usize, usize) = (0, 0);

/// A new process-wide number for an array.
pub fn new_array() -> u64 {
    static ARRAYS: AtomicU64 = AtomicU64::new(0);
    ARRAYS.fetch_add(1, Ordering::Relaxed)
}
