//! Gathering: many rows, from anywhere in a dataset, into one block of memory.
//!
//! The requested rows are cut into parts, each a contiguous range of the *output*, so that every part owns its memory
//! and no aliasing proof is needed. A part
//!
//! 1. gets the addresses of its rows from the layout and sorts them by file and row, for disks and page tables;
//! 2. joins rows that are adjacent in the file and in the output into one copy;
//! 3. checks, file by file, that the rows exist and that the file's length has not changed since it was opened;
//! 4. copies them. From memory or a mapping, a scout runs ahead of the copy, samples whether pages are cached, and
//!    sends hints for cold pages to the kernel. A cold gather then keeps the disk's queue full from one thread; a hot
//!    one costs almost nothing extra. Without a mapping, cached rows are read at once; the others are hinted and read
//!    after they arrive. A missing file counts as its fill value, if the format allows that.
//!
//! Files that must be decoded are different: see [`by_file`].
//!
//! Memory: 40 bytes per row of the parts in flight, at most 16,384 rows per thread.

pub mod blocks;
mod by_file;
mod cached;
pub mod cast;
mod far;
mod near;
mod pick;
mod plan;
mod run;

pub use cached::are_cached;
pub use pick::{Ints, Origin, Out, Pick};
pub use run::gather;
