//! Decoding: gzip files ([`inflate`]), LZ4 blocks ([`lz4`]), and one cache of what was
//! decoded ([`cache`]), by one thread at a time ([`flight`]).

pub mod cache;
pub mod flight;
pub mod inflate;
pub mod lz4;
