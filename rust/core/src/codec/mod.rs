//! Decoding: gzip files ([`inflate`]), LZ4 blocks ([`lz4`]), chunks of Zarr arrays ([`coded`]), and the cache of what was
//! decoded ([`cache`]).

pub mod cache;
mod chain;
pub mod coded;
pub mod inflate;
pub mod lz4;
