//! A shard as the dataset's metadata describe it.

use crate::location::Location;

/// One shard, as the dataset's metadata describe it.
#[derive(Clone, Debug)]
pub struct ShardSpec {
    /// Where it is.
    pub location: Location,
    /// Whether it is gzip.
    pub compressed: bool,
    /// Its size, if it has to be right.
    pub size: Option<u64>,
    /// Its SHA-256, if it has to be right.
    pub sha256: Option<[u8; 32]>,
    /// Samples it holds.
    pub samples: u64,
    /// Their smallest and largest number.
    pub ids: (i64, i64),
    /// Layers it may hold.
    pub layers: Vec<i64>,
    /// Bytes that it may inflate to by what its metadata declare; [`inflate::allowed`] bounds them by those that are there.
    pub limit: u64,
}
