//! actshard's core: where rows of activations lie, and how to move many of them at once.
//!
//! The rooms, in the order data flows through them:
//!
//! - [`layout`] maps (group, example, token) to an [`layout::Address`]: a file and a row in it. A *group* is whatever a
//!   format stores apart: a layer, usually. [`layout::strided`] and [`layout::chunked`] compute addresses,
//!   [`layout::table`] looks them up.
//! - [`bytes`] is where rows lie: [`bytes::Files`] opens numbered files on demand, mapped ([`bytes::mmap`], the only mapping
//!   `unsafe`), read in place ([`bytes::pread`]) or decoded ([`bytes::decoded`]), and proves that a file still holds the
//!   rows it held when opened. [`bytes::FileTable`] lists files, [`bytes::chunks`] computes their names.
//! - [`par`] moves rows: [`par::gather`] sorts addresses, hints cold ones to the kernel, and copies or casts
//!   ([`dtype`]) on threads of our own ([`par::pool`]) straight into the caller's memory.
//! - [`rows`] is one dataset's rows, whatever its layout: what a binding holds. [`stream`] reads them in an order, batch
//!   after batch, on a thread ahead of whoever consumes them.
//! - [`write`] puts bytes into files: pieces at their places, whole shards. [`scan`] looks at every value of a dataset.
//! - [`tokens`] is the other kind of dataset: token caches, their rows, their batches and orders.
//! - [`parse`] reads files not to be trusted. [`error`] is how anything here says no.
//!
//! This crate knows rows, files and byte ranges. It has no word for a prompt, a patch or a parquet file, and never
//! imports Python.

#[cfg(target_endian = "big")]
compile_error!("actshard reads little-endian rows in place; a big-endian host would need a byte-swapping read path");

#[cfg(not(target_pointer_width = "64"))]
compile_error!("actshard maps whole files and counts bytes in usize; a 32-bit host cannot address them");

pub mod bytes;
pub mod dtype;
pub mod error;
pub mod layout;
pub mod par;
pub mod parse;
pub mod rows;
pub mod scan;
pub mod stream;
pub mod tokens;
pub mod write;

pub use dtype::DType;
pub use error::{Carried, Error, Kind, Result};
