//! Each layout over a store of in-memory objects, with latency and faults. Reads are planned from the whole request.

mod chunks;
mod shards;
mod store;
mod table;
mod tokens;
