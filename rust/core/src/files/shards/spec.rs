//! A shard as the dataset's metadata describe it, and its file as it was found.

use std::fs::File;
use std::path::PathBuf;

/// One shard, as the dataset's metadata describe it.
#[derive(Clone, Debug)]
pub struct ShardSpec {
    /// Where it is.
    pub path: PathBuf,
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

/// What tells a file that was replaced or written to from the one that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    file: (u64, u64),
    len: u64,
    times: [(i64, i64); 2],
}

impl Stamp {
    pub(super) fn of(file: &File) -> std::io::Result<Stamp> {
        let meta = file.metadata()?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let times = [(meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec())];
            Ok(Stamp { file: (meta.dev(), meta.ino()), len: meta.len(), times })
        }
        #[cfg(not(unix))]
        {
            let since = meta.modified()?.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
            let time = (since.as_secs() as i64, i64::from(since.subsec_nanos()));
            Ok(Stamp { file: (0, 0), len: meta.len(), times: [time; 2] })
        }
    }
}
