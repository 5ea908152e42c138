//! Copies of objects in local files, and the folder of the cache on disk.

use std::path::PathBuf;

use actshard_core::disk_cache::DiskCache;
use actshard_core::source::copying::{self, CopiedRange};
use actshard_core::source::local::Local;
use actshard_core::source::{Io, Store};
use actshard_core::threads::{self, Stop};
use pyo3::prelude::*;

use crate::detach;
use crate::place::{NamedPlace, remote_store};

/// Copies ranges: (source, file, offset, length), to the same offset of the file. All sources are in one store.
#[pyfunction]
pub fn copy_ranges(py: Python<'_>, ranges: Vec<(NamedPlace, PathBuf, u64, u64)>) -> PyResult<()> {
    detach::guarded(py, || {
        detach::detached(py, |watch| {
            let store = remote_store(ranges.iter().map(|(from, ..)| from))?;
            let made = |(from, into, at, len): (NamedPlace, PathBuf, u64, u64)| CopiedRange {
                from: from.location,
                into,
                at,
                len,
            };
            let ranges: Vec<CopiedRange> = ranges.into_iter().map(made).collect();
            let near = Local { io: Io::Pread };
            let store: &dyn Store = store.as_deref().unwrap_or(&near);
            copying::copy_ranges(store, &ranges, watch)
        })
    })
}

/// Bytes and objects in the folder of a cache on disk, and the limit of its last user; None if the folder is not a
/// cache.
#[pyfunction]
pub fn disk_cache_info(py: Python<'_>, folder: PathBuf) -> PyResult<Option<(u64, u64, u64)>> {
    detach::guarded(py, || {
        detach::detached(py, |watch| {
            let info = |_: &Stop| DiskCache::existing(&folder)?.map(|cache| cache.info()).transpose();
            Ok(threads::wait_for(&info, watch)?.map(|info| (info.bytes, info.objects, info.limit)))
        })
    })
}

/// Removes the content of a cache folder on disk, except blocks that are being downloaded; false if it is not a cache.
#[pyfunction]
pub fn clear_disk_cache(py: Python<'_>, folder: PathBuf) -> PyResult<bool> {
    detach::guarded(py, || {
        detach::detached(py, |watch| {
            let clear = |_: &Stop| match DiskCache::existing(&folder)? {
                Some(cache) => cache.clear().map(|()| true),
                None => Ok(false),
            };
            threads::wait_for(&clear, watch)
        })
    })
}
