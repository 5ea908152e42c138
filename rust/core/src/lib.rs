//! actshard's core: where rows of activations lie, and how to move many of them at once.
//!
//! The floors. Each uses only those above it in this list (`tests/floors.rs` holds them); no files use each other in a circle.
//!
//! 1. [`location`]: the name of a file or an object. [`error`]: how anything here fails. [`dtype`]: element types and casts. [`memory`]: blocks that are used again.
//!    [`threads`]: one pool, one way of handing out parts.
//! 2. [`source`]: where bytes lie, behind one trait: files of this machine, mapped or read in place, or anything else. [`codec`]: decoding, with one cache of what was decoded.
//!    [`arrays`]: arrays in chunk files and shards, under 4-D stores and token arrays.
//! 3. [`layout`]: the map from (group, example, token) to an [`layout::Address`], a file and a row in it. [`parse`]: files not
//!    to be trusted. A *group* is what a format stores apart for each example: a layer, usually.
//! 4. [`files`]: the numbered files of a dataset, opened on demand and proven to hold the rows that they held when opened:
//!    listed ([`files::table`]), named by arithmetic ([`files::chunks`]), or found inside pickles ([`files::shards`]).
//! 5. [`gather`]: many rows at once, sorted, hinted and copied or cast straight into the caller's memory.
//! 6. [`rows`]: one dataset's rows, whatever its layout: what a binding holds.
//! 7. [`scan`]: a look at every value. [`stream`]: batches in an order, read ahead by a thread. [`write`](mod@write): pieces at
//!    their places, whole shards. [`tokens`]: token caches, their rows, batches and orders.
//!
//! This crate knows rows, files and byte ranges. It has no word for a prompt, a patch or a parquet file, and never
//! imports Python.

#[cfg(target_endian = "big")]
compile_error!("actshard reads little-endian rows in place; a big-endian host would need a byte-swapping read path");

#[cfg(not(target_pointer_width = "64"))]
compile_error!("actshard maps whole files and counts bytes in usize; a 32-bit host cannot address them");

pub mod arrays;
pub mod codec;
pub mod dtype;
pub mod error;
pub mod files;
pub mod gather;
pub mod layout;
pub mod location;
pub mod memory;
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
