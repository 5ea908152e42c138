//! Listings of hub datasets, stored next to a cache on disk, so that data that was read once opens without a network
//! (`HF_HUB_OFFLINE`).

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use actshard_core::disk_cache::LISTINGS;
use serde::{Deserialize, Serialize};

use crate::address::name_of;
use crate::known::{Known, PackedKnown};

/// The version of this form. Others are ignored.
const VERSION: u32 = 1;
/// Some file systems do not support longer names.
const LONGEST_NAME: usize = 200;
/// The longest listing that is read, in bytes.
const LONGEST: u64 = 1 << 30;

#[derive(Serialize, Deserialize)]
struct Remembered {
    version: u32,
    commit: String,
    known: PackedKnown,
}

/// The file of a dataset's listing: server, dataset, requested revision, and folder. None if that is too long for a
/// name.
pub fn file_of(cache: &Path, origin: &str, dataset: &str, revision: &str, folder: &str) -> Option<PathBuf> {
    let name = [origin, dataset, revision, folder].map(name_of).join("+");
    (name.len() <= LONGEST_NAME).then(|| cache.join(LISTINGS).join(name))
}

/// Writes the listing at a commit. Errors are ignored: without the file, only the network is needed.
pub fn remember(file: &Path, commit: &str, known: &Known) {
    let found = Remembered { version: VERSION, commit: commit.to_string(), known: known.pack() };
    let (Ok(bytes), Some(folder)) = (serde_json::to_vec(&found), file.parent()) else { return };
    // Under a unique name first: other threads and processes write the same file.
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let own = folder.join(format!("new-{}-{}", std::process::id(), WRITTEN.fetch_add(1, Ordering::Relaxed)));
    let written = fs::create_dir_all(folder).and_then(|()| {
        let mut made = fs::File::create(&own)?;
        made.write_all(&bytes)?;
        fs::rename(&own, file)
    });
    if written.is_err() {
        let _ = fs::remove_file(&own);
    }
}

/// The commit and listing that were written last; None if there are none, or if they are damaged.
pub fn recall(file: &Path) -> Option<(String, Known)> {
    if fs::metadata(file).ok()?.len() > LONGEST {
        return None;
    }
    let found: Remembered = serde_json::from_slice(&fs::read(file).ok()?).ok()?;
    if found.version != VERSION {
        return None;
    }
    Some((found.commit, Known::unpack(found.known)?))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::client::{ListedObject, Listing, Tag};

    fn known() -> Known {
        let mut known = Known::default();
        let tag = Tag::new(Some("e"), None);
        let objects = vec![ListedObject { key: "a/b".to_string(), size: 3, tag }];
        known.record("", Listing { objects, folders: vec!["a".to_string()], deep: true, ..Listing::default() });
        known
    }

    #[test]
    fn a_listing_is_recalled_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let file = file_of(folder.path(), "https://h", "lab/acts", "main", "runs/1").unwrap();
        assert!(recall(&file).is_none());
        remember(&file, "c0ffee", &known());
        assert_eq!(recall(&file).unwrap(), ("c0ffee".to_string(), known()));
        remember(&file, "c0ffef", &Known::default());
        assert_eq!(recall(&file).unwrap().0, "c0ffef");
        assert_eq!(fs::read_dir(file.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn damaged_listings_are_none() {
        let folder = tempfile::tempdir().unwrap();
        let file = file_of(folder.path(), "https://h", "lab/acts", "main", "").unwrap();
        remember(&file, "c0ffee", &known());
        let whole = fs::read(&file).unwrap();
        for end in 0..whole.len() {
            fs::write(&file, &whole[..end]).unwrap();
            assert!(recall(&file).is_none(), "{end}");
        }
        fs::write(&file, String::from_utf8(whole).unwrap().replace("\"version\":1", "\"version\":2")).unwrap();
        assert!(recall(&file).is_none());
    }

    #[test]
    fn datasets_revisions_and_servers_have_files_of_their_own() {
        let of =
            |origin, dataset, revision, folder| file_of(Path::new("c"), origin, dataset, revision, folder).unwrap();
        let mut made = vec![
            of("https://h", "lab/acts", "main", ""),
            of("https://i", "lab/acts", "main", ""),
            of("https://h", "lab/acts", "v1", ""),
            of("https://h", "lab/act", "main", ""),
            of("https://h", "lab/acts", "main", "a/b"),
            of("https://h", "lab/acts", "main/a", "b"),
        ];
        made.sort();
        made.dedup();
        assert_eq!(made.len(), 6);
        assert!(file_of(Path::new("c"), "h", "lab/acts", "main", &"x".repeat(300)).is_none());
    }
}
