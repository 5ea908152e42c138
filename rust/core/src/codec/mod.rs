//! Decoding: gzip files ([`inflate`]), LZ4 blocks ([`lz4`]), packed rows ([`planes`]), and one cache of decoded units
//! ([`cache`]), each decoded by one thread ([`flight`]).

// A number of a file is converted with a check; tests may not care.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap))]

pub mod cache;
pub mod flight;
pub mod inflate;
pub mod lz4;
pub mod planes;
mod shelves;
