//! Moves and removes the contents of many folders: small calls, each of which waits for a disk or a file server.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::threads::{self, Lock, Watch};

/// Calls at once: a file server answers many, a local disk is as fast with few.
const AT_ONCE: usize = 16;
/// Files that one thread renames in turn.
const GROUP: usize = 256;

/// Files of one folder, by name.
struct FolderFiles {
    from: PathBuf,
    to: PathBuf,
    names: Vec<OsString>,
}

/// Renames all files below each of `folders` into `root`, under the same paths below it, except those in `but` (paths
/// below `root`). Files that already exist there, and no longer exist below a folder, were renamed by an earlier call.
///
/// Returns the folders below `root`, and `root`, whose entries changed: sync them.
///
/// # Errors
/// `Kind::Format`: something is neither a file nor a folder. Other kinds: the system's error, with the path.
pub fn move_files(folders: &[PathBuf], root: &Path, but: &BTreeSet<PathBuf>, watch: Watch<'_>) -> Result<Vec<PathBuf>> {
    let found: Lock<Vec<FolderFiles>> = Lock::new(vec![]);
    let list = |i: usize| {
        let mut some = vec![];
        list_files(&folders[i], Path::new(""), root, but, &mut some)?;
        found.lock().append(&mut some);
        Ok(())
    };
    threads::run_waiting(folders.len(), AT_ONCE, &|job, _| list(job), watch)?;
    let found = found.into_inner();
    let mut changed = BTreeSet::new();
    for files in &found {
        for above in files.to.ancestors().take_while(|path| path.starts_with(root)) {
            if !changed.insert(above.to_path_buf()) {
                break;
            }
        }
    }
    for folder in &changed {
        fs::create_dir_all(folder).map_err(|e| Error::from_io(&e, folder, "make"))?;
    }
    let rename = |i: usize| found[i].names.iter().try_for_each(|name| rename_file(&found[i], name));
    threads::run_waiting(found.len(), AT_ONCE, &|job, _| rename(job), watch)?;
    Ok(changed.into_iter().collect())
}

fn list_files(
    top: &Path,
    below: &Path,
    root: &Path,
    but: &BTreeSet<PathBuf>,
    found: &mut Vec<FolderFiles>,
) -> Result<()> {
    let from = top.join(below);
    let failed = |e: std::io::Error| Error::from_io(&e, &from, "list");
    let entries = match fs::read_dir(&from) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(failed(error)),
    };
    let mut names = vec![];
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let kind = entry.file_type().map_err(failed)?;
        let path = below.join(entry.file_name());
        if kind.is_dir() {
            list_files(top, &path, root, but, found)?;
        } else if !kind.is_file() {
            return Err(Error::new(Kind::Format, "expected a file or a folder").at(entry.path()));
        } else if !but.contains(&path) {
            names.push(entry.file_name());
        }
    }
    let to = root.join(below);
    while !names.is_empty() {
        let some = names.split_off(names.len().saturating_sub(GROUP));
        found.push(FolderFiles { from: from.clone(), to: to.clone(), names: some });
    }
    Ok(())
}

fn rename_file(files: &FolderFiles, name: &OsString) -> Result<()> {
    let (from, to) = (files.from.join(name), files.to.join(name));
    match fs::rename(&from, &to) {
        // An earlier call, which was killed, may have renamed it after it was listed.
        Err(error) if error.kind() == ErrorKind::NotFound && to.exists() => Ok(()),
        done => done.map_err(|e| Error::from_io(&e, &from, "rename")),
    }
}

/// Removes folders and their contents, as far as the system permits.
///
/// # Errors
/// `Kind::Interrupted` only.
pub fn remove_folders(folders: &[PathBuf], watch: Watch<'_>) -> Result<()> {
    let remove = |i: usize| {
        drop(fs::remove_dir_all(&folders[i]));
        Ok(())
    };
    threads::run_waiting(folders.len(), AT_ONCE, &|job, _| remove(job), watch)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn files_of_many_folders_come_together_and_a_second_call_finds_nothing_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("d");
        let tops: Vec<PathBuf> = (0..40).map(|i| dir.path().join(format!("t{i}"))).collect();
        for (i, top) in tops.iter().enumerate() {
            write(&top.join(format!("a/b/{i}")), "x");
            write(&top.join(format!("{i}")), "y");
            write(&top.join("shared"), "z");
        }
        for i in 0..1000 {
            write(&tops[0].join(format!("many/{i}")), "m");
        }
        let but = BTreeSet::from([PathBuf::from("shared")]);
        let changed = move_files(&tops, &root, &but, &mut || false).unwrap();
        let expected: Vec<PathBuf> = ["", "a", "a/b", "many"].iter().map(|p| root.join(p)).collect();
        assert_eq!(changed.iter().map(|p| p.components().collect::<PathBuf>()).collect::<Vec<_>>(), expected);
        for (i, top) in tops.iter().enumerate() {
            assert_eq!(fs::read_to_string(root.join(format!("a/b/{i}"))).unwrap(), "x");
            assert_eq!(fs::read_to_string(root.join(format!("{i}"))).unwrap(), "y");
            assert!(top.join("shared").exists());
        }
        assert_eq!(fs::read_dir(root.join("many")).unwrap().count(), 1000);
        assert!(!root.join("shared").exists());
        assert!(move_files(&tops, &root, &but, &mut || false).unwrap().is_empty());
        remove_folders(&tops, &mut || false).unwrap();
        assert!(tops.iter().all(|top| !top.exists()));
        remove_folders(&tops, &mut || false).unwrap();
    }

    #[test]
    fn links_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("t");
        fs::create_dir(&top).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", top.join("a")).unwrap();
        let failed = move_files(&[top], &dir.path().join("d"), &BTreeSet::new(), &mut || false).unwrap_err();
        assert_eq!(failed.kind, Kind::Format);
    }
}
