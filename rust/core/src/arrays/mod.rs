//! Arrays in chunk files: one engine for 4-D stores and token arrays.
//!
//! - A *unit* is decoded at once: a chunk, or an inner chunk of a shard. [`file`](mod@file) opens the file of a unit and locates
//!   the unit in it; in shards by their index, which [`index`] reads and writes.
//! - `chain` decodes the codecs of a unit within the limits of its shape; [`coded`] does this for arrays whose metadata the
//!   `zarrs` crate parses. [`packing`] encodes units that are written.
//! - [`meta`] parses the metadata of an array, with JSON [`fields`], types and fill values ([`element`]); [`naming`] gives the
//!   names of its files.
//! - [`key`] identifies a decoded unit in a [`Cache`](crate::codec::cache::Cache): array, file, version of the file.

// A number of a file is converted with a check; tests may not care.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap))]

mod chain;
pub mod coded;
pub mod element;
pub(crate) mod failing;
pub mod fields;
pub mod file;
pub mod index;
pub mod key;
pub mod meta;
pub mod naming;
mod packed;
pub mod packing;
mod zstandard;
