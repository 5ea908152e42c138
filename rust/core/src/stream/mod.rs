//! Streams: batches of a dataset in a given order, read ahead of the consumer.
//!
//! - [`order`]: permutations computed on the fly
//! - [`select`]: the tokens and examples to read
//! - [`plan`]: the items of each batch and rank; pure arithmetic on the settings
//! - `chunks`: neighbouring rows, read ahead in large pieces
//! - `pool`: the rows of a window, returned in another order; `items`: the items of a batch
//! - [`rescale`]: centred and scaled rows
//! - [`packing`]: which sequences share a batch; [`sequences`]: their rows
//! - [`ahead`]: the reading thread; `exchange`: its hand-over to the consumer
//! - [`stats`]: statistics of all rows

pub mod ahead;
mod chunks;
mod exchange;
pub mod items;
pub mod order;
pub mod packing;
pub mod plan;
mod pool;
pub mod rescale;
pub mod select;
pub mod sequences;
pub mod stats;

pub use plan::{ITEM_BYTES, items_in};
