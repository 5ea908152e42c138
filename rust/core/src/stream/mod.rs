//! Reading a dataset in an order, batch after batch, ahead of whoever consumes it.
//!
//! - [`order`]: permutations that need no memory
//! - [`select`]: which tokens of which examples are read at all
//! - [`plan`]: which of them make up which batch, for one rank of many; pure arithmetic, the whole of what a seed decides
//! - [`pool`]: the rows of a window, held while they are given out in another order
//! - [`rescale`]: centred and scaled rows
//! - [`ahead`]: the thread that reads, and [`exchange`]: what it hands over
//! - [`stats`]: what all rows have in common

pub mod ahead;
mod exchange;
pub mod order;
pub mod plan;
mod pool;
pub mod rescale;
pub mod select;
pub mod stats;

pub use plan::items_in;
