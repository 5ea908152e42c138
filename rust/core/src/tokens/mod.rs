//! Token caches in Levanter's format: rows of numbers in Zarr shards of blosc frames.
//!
//! - [`meta`] parses an array's `zarr.json`, [`frame`] a blosc frame; [`array`](mod@array) reads ranges of an array.
//! - [`jagged`] reads a field: rows of variable length, over one array or many shards.
//! - [`pack`] assigns rows to training examples, [`batch`] makes batches of examples.
//! - [`order`] implements Levanter's shuffles: the random numbers of JAX and numpy, and permutations made from them.
//! - [`write`](mod@write) writes caches.

pub mod array;
pub mod batch;
pub mod frame;
pub mod jagged;
pub mod ledger;
pub mod meta;
mod narrow;
pub mod order;
pub mod pack;
mod staged;
pub mod write;
