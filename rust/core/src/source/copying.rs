//! Copies ranges of sources into local files.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use super::{Access, RangeRead, Store};
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::memory::zeroed;
use crate::threads::{self, Stop, Watch};

/// Ranges copied at the same time: enough small files to hide the latency of a network.
const AT_ONCE: usize = 32;
/// Bytes that one thread reads at once; all threads together have 256 MiB in memory.
const STEP: u64 = 8 << 20;

/// A range to copy, to the same offset of a file.
#[derive(Debug)]
pub struct CopiedRange {
    /// Its source.
    pub from: Location,
    /// The file, made if it does not exist.
    pub into: PathBuf,
    /// The offset of the range.
    pub at: u64,
    /// Its length. A source that is shorter is an error.
    pub len: u64,
}

/// Copies ranges, many at once. Existing bytes of the files outside the ranges stay. Nothing is synced to the disk.
pub fn copy_ranges(store: &dyn Store, ranges: &[CopiedRange], watch: Watch<'_>) -> Result<()> {
    let copy = |i: usize, stop: &Stop| match ranges.get(i) {
        Some(range) => copy_range(store, range, stop),
        None => Ok(()),
    };
    threads::run_waiting(ranges.len(), AT_ONCE, &copy, watch)
}

fn copy_range(store: &dyn Store, range: &CopiedRange, stop: &Stop) -> Result<()> {
    let file: File = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(&range.into)
        .map_err(|e| Error::from_io(&e, range.into.as_path(), "open to write"))?;
    if range.len == 0 {
        return Ok(());
    }
    let none = || Error::new(Kind::Internal, "a store without an answer").at(&range.from);
    let source = store.open_many(&[&range.from], Access::Once, stop).pop().ok_or_else(none)??;
    let mut bytes = zeroed::<u8>(range.len.min(STEP) as usize)?;
    let mut done = 0;
    while done < range.len {
        let part = &mut bytes[..(range.len - done).min(STEP) as usize];
        source.read_many(&mut [RangeRead { at: range.at + done, into: part }], stop)?;
        file.write_all_at(part, range.at + done).map_err(|e| Error::from_io(&e, range.into.as_path(), "write"))?;
        done += part.len() as u64;
    }
    source.unchanged()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::source::Io;
    use crate::source::local::Local;

    fn range(from: &std::path::Path, into: PathBuf, at: u64, len: u64) -> CopiedRange {
        CopiedRange { from: from.to_path_buf().into(), into, at, len }
    }

    #[test]
    fn ranges_of_a_file_make_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let (from, into) = (folder.path().join("a"), folder.path().join("b"));
        let bytes: Vec<u8> = (0..20_000_000u32).map(|i| (i.wrapping_mul(7919) >> 5) as u8).collect();
        std::fs::write(&from, &bytes).unwrap();
        let mut ranges: Vec<_> = (0..20).map(|i| range(&from, into.clone(), i * 1_000_000, 1_000_000)).collect();
        ranges.push(range(&from, folder.path().join("empty"), 0, 0));
        let store = Local { io: Io::Pread };
        copy_ranges(&store, &ranges, &mut || false).unwrap();
        assert!(std::fs::read(&into).unwrap() == bytes);
        assert!(std::fs::read(folder.path().join("empty")).unwrap().is_empty());
        let whole = [range(&from, folder.path().join("c"), 0, 20_000_000)];
        copy_ranges(&store, &whole, &mut || false).unwrap();
        assert!(std::fs::read(folder.path().join("c")).unwrap() == bytes);
    }

    #[test]
    fn a_source_that_is_shorter_or_missing_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a"), [1; 10]).unwrap();
        let store = Local { io: Io::Pread };
        let copy = |name: &str, len| {
            let ranges = [range(&folder.path().join(name), folder.path().join("b"), 0, len)];
            copy_ranges(&store, &ranges, &mut || false).unwrap_err().kind
        };
        assert_eq!(copy("a", 11), Kind::Truncated);
        assert_eq!(copy("none", 1), Kind::NotFound);
    }
}
