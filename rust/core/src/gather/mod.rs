//! Gathering: many rows, from anywhere in a dataset, into one block of memory.
//!
//! The rows asked for are cut into parts, each a contiguous range of the *output*, so that every part owns its memory
//! and nothing needs to be proven about aliasing. A part
//!
//! 1. asks the layout for its rows' addresses and sorts them by file and row, megabyte by megabyte of output: disks and
//!    page tables like order, caches like writes that stay together;
//! 2. joins neighbours that stay neighbours into one copy;
//! 3. checks, file by file, that the rows exist and that the file still has the length it had when it was opened;
//! 4. moves them. From memory or a mapping, a scout runs ahead of the copy, samples whether pages are cached, and hints the
//!    cold ones to the kernel, so that a cold gather keeps the disk's queue full from one thread while a hot one pays next
//!    to nothing. Without a mapping, what is cached is read at once, the rest is hinted and read when it has arrived. A
//!    file that is not there, where the format allows that, is its fill value.
//!
//! Memory: 40 bytes per row of the parts in flight, at most [`PART_ROWS`] rows per thread.

pub mod cast;
mod far;
mod hint;
mod near;
mod pick;
mod plan;
mod run;

pub use hint::hint;
pub use pick::{Ints, Origin, Out, Pick};
pub use run::gather;
