//! Memory: results and decoded bytes, used again when they are freed, and who writes where.

pub mod block;
pub mod claims;
pub mod output;
