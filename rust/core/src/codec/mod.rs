//! Decoding: gzip files ([`inflate`]), LZ4 blocks ([`lz4`]), and one cache of decoded units ([`cache`]), each decoded by one
//! thread ([`flight`]).

pub mod cache;
pub mod flight;
pub mod inflate;
pub mod lz4;
mod shelves;
