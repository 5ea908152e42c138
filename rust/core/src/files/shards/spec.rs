//! The description of a shard in the dataset's metadata.

use crate::location::Location;

/// A shard, as described by the dataset's metadata.
#[derive(Clone, Debug)]
pub struct ShardSpec {
    /// Its location.
    pub location: Location,
    /// Whether it is gzipped.
    pub compressed: bool,
    /// Its expected size, if it is to be checked.
    pub size: Option<u64>,
    /// Its expected SHA-256, if it is to be checked.
    pub sha256: Option<[u8; 32]>,
    /// Number of samples.
    pub samples: u64,
    /// Their smallest and largest number.
    pub ids: (i64, i64),
    /// Layers that it may have.
    pub layers: Vec<i64>,
    /// Inflated bytes that its metadata declare; `inflate::allowed` limits them further.
    pub limit: u64,
}
