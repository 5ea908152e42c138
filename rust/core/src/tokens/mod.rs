//! Token caches, as Levanter stores them: rows of numbers in Zarr shards of blosc frames.
//!
//! - [`meta`] parses an array's `zarr.json`, [`frame`] one blosc frame; [`array`](mod@array) reads ranges of an array.
//! - [`jagged`] is a field: rows of any lengths, over one array or many shards.
//! - [`pack`] decides which rows go into which training example, [`batch`] makes batches of examples.
//! - [`order`] is Levanter's orders: the random numbers of JAX and numpy, and the permutations made of them.
//! - [`write`](mod@write) makes caches.

pub mod array;
pub mod batch;
pub mod frame;
pub mod jagged;
pub mod meta;
pub mod order;
pub mod pack;
pub mod write;
