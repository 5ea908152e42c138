//! Which unit of which array: the key under which decoded units are kept.
//!
//! A key names a unit completely: the array, the file, the version of that file when it was opened, the chunk in it and the
//! block in that. A block's number means nothing without the size of the blocks, which the frame's header says: both are in the
//! key, so that a file that was written anew in place is not answered from units of the old one.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::source::Version;

/// A unit of an array.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct UnitKey {
    /// Number of the array over the whole process; see [`new_array`].
    pub array: u64,
    /// Number of the file in the array, or of the chunk where files are not numbered.
    pub file: u64,
    /// The file's version; `None` where it is not looked up.
    pub version: Option<Version>,
    /// The chunk in the file.
    pub chunk: usize,
    /// The block in the chunk's frame, and how many numbers a block of that frame has; [`WHOLE`] for chunks that are decoded as
    /// a whole.
    pub block: (usize, usize),
}

/// The one block of a chunk that is decoded as a whole: no frame has blocks of no numbers.
pub const WHOLE: (usize, usize) = (0, 0);

/// A number that no other array of this process has.
pub fn new_array() -> u64 {
    static ARRAYS: AtomicU64 = AtomicU64::new(0);
    ARRAYS.fetch_add(1, Ordering::Relaxed)
}
