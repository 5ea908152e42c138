//! Writing from memory to files: many pieces at given offsets, and whole files of segments, hashed and compressed.
//!
//! Large writes bypass the page cache (`O_DIRECT`) if the file system supports it: a capture of terabytes neither evicts other
//! programs' pages nor waits for the kernel to write back dirty ones. Measured on two cores and a virtual disk: 2.5 GB/s with
//! one thread and almost no processor time, compared with 0.4 to 2.5 GB/s through the cache, depending on its state. Unaligned
//! bytes, small files and file systems without direct writes use the cache.

mod disk;
mod folders;
mod pieces;
mod segments;
mod spans;

pub use disk::{copy_range, sync};
pub use folders::{move_files, remove_folders};
pub use pieces::{Piece, Target, write};
pub use segments::{Digested, digest, write_segments};
pub use spans::{RefusedRow, RowSpans};
