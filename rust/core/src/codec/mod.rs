//! Decoding: gzip files ([`inflate`]), LZ4 blocks ([`lz4`]), chunks of Zarr arrays ([`coded`]), and one cache of what was
//! decoded ([`cache`]), by one thread at a time ([`flight`]).

pub mod cache;
mod chain;
pub mod coded;
pub mod flight;
pub mod inflate;
pub mod lz4;
pub mod unit;
