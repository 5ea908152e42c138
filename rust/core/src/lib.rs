//! actshard's core: locates rows of activations and reads, writes and streams many of them at once.
//!
//! The modules form levels. Each level uses only those above it in this list, and imports of files form no cycle
//! (`tests/it/floors.rs` checks both).
//!
//! 1. [`number`]: conversions. [`location`]: the name of a file or object. [`error`]: the error type. [`kernels`]: vector code.
//!    [`dtype`]: element types and casts. [`threads`]: one thread pool, one way of handing out work, locks that survive a fork.
//!    [`memory`]: reused blocks.
//! 2. [`source`]: byte sources behind one trait: local files (mapped or read with `pread`), or any other store. [`disk_cache`]:
//!    far sources kept on the local disk. [`codec`]: decoding, with one cache of decoded units. [`arrays`]: arrays in chunk
//!    files and shards, under 4-D stores and token arrays.
//! 3. [`layout`]: the map from (group, example, token) to an [`layout::Address`], a file and a row in it. [`parse`]:
//!    parsers of untrusted files. A *group* is a part that a format stores separately for each example, usually a
//!    layer.
//! 4. [`files`]: the numbered files of a dataset, opened on demand, with checks that their rows are unchanged: listed
//!    ([`files::table`]), named by arithmetic ([`files::chunks`]), or inside pickles ([`files::shards`]).
//! 5. [`gather`]: reads many rows at once: sorts, hints, then copies or casts them into the caller's memory.
//! 6. [`rows`]: one dataset's rows in any layout; the type that a binding uses.
//! 7. [`scan`]: statistics over every value. [`stream`]: ordered batches, read ahead by a thread. [`write`](mod@write):
//!    writes at offsets and whole shards. [`tokens`]: token caches, their rows, batches and orders.
//!
//! This crate knows rows, files and byte ranges. It knows nothing of prompts or patches, decodes no Parquet values, and never
//! imports Python.

#[cfg(target_endian = "big")]
compile_error!("actshard reads little-endian rows in place; a big-endian host would need a byte-swapping read path");

#[cfg(not(target_pointer_width = "64"))]
compile_error!("actshard maps whole files and counts bytes in usize; a 32-bit host cannot address them");

pub mod arrays;
pub mod codec;
pub mod disk_cache;
pub mod dtype;
pub mod error;
pub mod files;
pub mod gather;
pub mod kernels;
pub mod layout;
pub mod location;
pub mod memory;
pub mod number;
pub mod parse;
pub mod rows;
pub mod scan;
pub mod source;
pub mod stream;
pub mod threads;
pub mod tokens;
pub mod write;

pub use dtype::DType;
pub use error::{Carried, Error, Finding, Kind, Result};
