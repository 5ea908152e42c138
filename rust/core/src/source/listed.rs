//! Local files as they were when a dataset was opened.
//!
//! What is known of a file, such as its header or its place in an index, is of that time. Rows may be read from it hours later.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use super::local::{Local, version_of};
use super::{Access, Io, Source, Store, Version, replaced};
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::threads::{self, Stop};

/// Files whose versions one thread reads at a time.
const TOGETHER: usize = 256;

/// Opens local files, and refuses those that were written or replaced since they were listed.
#[derive(Debug)]
pub struct ListedFiles {
    local: Local,
    hasher: RandomState,
    /// By the hash of the file's location, because there may be millions. A file that was missing has none.
    stamps: HashMap<u64, Stamp>,
}

/// A version of a file, small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    /// A hash of the device and the inode.
    file: u64,
    len: u64,
    /// A hash of the time of the last change.
    modified: u64,
}

impl ListedFiles {
    /// Files as they are now. Others are opened as they are then.
    pub fn now<'a>(io: Io, locations: impl IntoIterator<Item = &'a Location>) -> Result<ListedFiles> {
        let hasher = RandomState::new();
        let stamp = |location: &&Location| {
            let metadata = std::fs::metadata(location.path()?).ok()?;
            Some((hasher.hash_one(location), Stamp::of(&hasher, &version_of(&metadata))?))
        };
        let locations: Vec<&Location> = locations.into_iter().collect();
        let stamps_of = |_: usize, some: &[&Location], _: &Stop| Ok(some.iter().filter_map(stamp).collect::<Vec<_>>());
        let parts = threads::map_each(locations.chunks(TOGETHER), &stamps_of, &mut || false)?;
        Ok(ListedFiles { local: Local { io }, stamps: parts.into_iter().flatten().collect(), hasher })
    }

    /// Fails unless a file is the one that was listed. A file that grows may have another length and time.
    fn check(&self, source: Box<dyn Source>, access: Access) -> Result<Box<dyn Source>> {
        let location = source.location();
        let Some(listed) = self.stamps.get(&self.hasher.hash_one(location)) else { return Ok(source) };
        let Some(now) = source.version().and_then(|version| Stamp::of(&self.hasher, &version)) else {
            return Ok(source);
        };
        if now.len < listed.len {
            let detail = format!(
                "was truncated after the dataset was opened: expected {} bytes, found {}; open the dataset again",
                listed.len, now.len
            );
            return Err(Error::new(Kind::Truncated, detail).at(location).byte(now.len));
        }
        let same_content = (now.len, now.modified) == (listed.len, listed.modified);
        if same_content || (access == Access::Growing && now.file == listed.file) {
            return Ok(source);
        }
        Err(replaced(location, "its size or the time of its last change differs from when the dataset was opened"))
    }
}

impl Stamp {
    fn of(hasher: &RandomState, version: &Version) -> Option<Stamp> {
        let Version::File(device, inode, len, [modified, _]) = version else { return None };
        Some(Stamp { file: hasher.hash_one((device, inode)), len: *len, modified: hasher.hash_one(modified) })
    }
}

impl Store for ListedFiles {
    fn open_many(&self, locations: &[&Location], access: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let opened = self.local.open_many(locations, access, stop);
        opened.into_iter().map(|source| source.and_then(|source| self.check(source, access))).collect()
    }

    fn list(&self, folder: &Location) -> Result<Vec<String>> {
        self.local.list(folder)
    }

    fn look(&self, location: &Location) -> Result<()> {
        self.local.look(location)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use std::fs;
    use std::path::Path;

    fn replace(path: &Path, bytes: &[u8]) {
        let other = path.with_extension("new");
        fs::write(&other, bytes).unwrap();
        fs::rename(&other, path).unwrap();
    }

    #[test]
    fn a_file_that_was_replaced_before_it_was_first_opened_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let at = Location::from(&path);
        for io in [Io::Mmap, Io::Pread] {
            for (access, in_place, bytes, kind) in [
                (Access::Kept, true, &b"longer rows"[..], Some(Kind::Format)),
                (Access::Kept, false, b"longer rows", Some(Kind::Format)),
                (Access::Once, false, b"rows", Some(Kind::Format)),
                (Access::Kept, false, b"r", Some(Kind::Truncated)),
                (Access::Growing, true, b"longer rows", None),
                (Access::Growing, false, b"longer rows", Some(Kind::Format)),
            ] {
                fs::write(&path, b"rows").unwrap();
                let store = ListedFiles::now(io, [&at]).unwrap();
                let open = || store.open_many(&[&at], access, &Stop::new()).pop().unwrap();
                open().unwrap();
                // Of another time, whatever the resolution of the file system's clock.
                std::thread::sleep(std::time::Duration::from_millis(20));
                if in_place {
                    fs::write(&path, bytes).unwrap()
                } else {
                    replace(&path, bytes)
                }
                assert_eq!(open().err().map(|error| error.kind), kind, "{io:?} {access:?} {in_place}");
            }
        }
    }

    #[test]
    fn a_copy_with_the_same_times_and_a_file_that_came_later_are_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (path, later) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&path, b"rows").unwrap();
        let (at, later_at) = (Location::from(&path), Location::from(&later));
        let store = ListedFiles::now(Io::Mmap, [&at, &later_at]).unwrap();
        let time = fs::metadata(&path).unwrap().modified().unwrap();
        replace(&path, b"rows");
        fs::File::options().append(true).open(&path).unwrap().set_modified(time).unwrap();
        fs::write(&later, b"rows").unwrap();
        for source in store.open_many(&[&at, &later_at], Access::Kept, &Stop::new()) {
            source.unwrap();
        }
    }
}
