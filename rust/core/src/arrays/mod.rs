//! Arrays in chunk files: one engine under the 4-D stores and the token arrays.
//!
//! - A *unit* is what is decoded at once: a chunk, or a chunk inside a shard. [`file`](mod@file) opens the file of a unit and says
//!   where in it the unit lies; for shards by their index, which [`index`] reads and writes.
//! - [`chain`] undoes the codecs of a unit within the bounds that its shape sets; [`coded`] does so for arrays whose
//!   metadata the `zarrs` crate parses.
//! - [`meta`] parses the metadata of an array, from [`fields`] of JSON to types and fill values ([`element`]); [`naming`] gives the
//!   names of its files.
//! - [`key`] names a decoded unit in a [`Cache`](crate::codec::cache::Cache): array, file, version of the file.

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
