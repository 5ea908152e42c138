//! Each layout over a store of in-memory objects, with latency and faults. Reads are planned from the whole request.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod chunks;
mod shards;
mod store;
mod table;
mod tokens;
