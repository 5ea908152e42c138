//! Moving many rows at once, on threads of our own.

pub mod cast;
pub mod claims;
pub mod gather;
pub mod pool;
