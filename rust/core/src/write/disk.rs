//! Opens files for writing, copies ranges, and syncs files to disk.

use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::threads::{self, Watch};

/// Maximum number of concurrent writes.
const AT_ONCE: usize = 4;

/// Runs `jobs` jobs that wait for the disk. The calling thread runs a single job, which cannot be stopped anyway.
pub(super) fn on_threads(jobs: usize, work: &(dyn Fn(usize) -> Result<()> + Sync), watch: Watch<'_>) -> Result<()> {
    if jobs <= 1 {
        return (0..jobs).try_for_each(work);
    }
    threads::run_waiting(jobs, AT_ONCE, &|job, _| work(job), watch)
}

pub(super) fn open_to_write(path: &Path, direct: bool) -> Result<Option<File>> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o666);
    if direct {
        #[cfg(target_os = "linux")]
        options.custom_flags(rustix::fs::OFlags::DIRECT.bits().cast_signed());
        #[cfg(not(target_os = "linux"))]
        return Ok(None);
    }
    match options.open(path) {
        Ok(file) => Ok(Some(file)),
        // EINVAL: the file system (tmpfs, for example) does not support direct writes.
        Err(error) if direct && error.kind() == std::io::ErrorKind::InvalidInput => Ok(None),
        Err(error) => Err(Error::from_io(&error, path, "open to write")),
    }
}

/// Above this number of files, one `syncfs` call per file system replaces a sync per file.
const MANY: usize = 256;

/// A dataset may span several file systems: its folders may be mounts or symlinks to other disks.
#[cfg(target_os = "linux")]
fn one_of_each_file_system(paths: &[PathBuf]) -> Result<Vec<&Path>> {
    use std::os::unix::fs::MetadataExt;
    let mut found: Vec<(u64, &Path)> = vec![];
    for path in paths {
        let device = std::fs::metadata(path).map_err(|e| Error::from_io(&e, path, "stat"))?.dev();
        if !found.iter().any(|(known, _)| *known == device) {
            found.push((device, path));
        }
    }
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// Waits until the data written to these files is on disk.
pub fn sync(paths: &[PathBuf], watch: Watch<'_>) -> Result<()> {
    #[cfg(target_os = "linux")]
    if paths.len() > MANY {
        let each = one_of_each_file_system(paths)?;
        let one = |i: usize| {
            let path = each[i];
            let file = File::open(path).map_err(|e| Error::from_io(&e, path, "open"))?;
            rustix::fs::syncfs(&file).map_err(|e| Error::from_io(&e.into(), path, "sync"))
        };
        return on_threads(each.len(), &one, watch);
    }
    on_threads(
        paths.len(),
        &|i| {
            let path = &paths[i];
            let file = File::open(path).map_err(|e| Error::from_io(&e, path, "open"))?;
            // A folder's entries are its data: fdatasync may leave them out, so use fsync.
            let folder = file.metadata().is_ok_and(|m| m.is_dir());
            let done = if folder { file.sync_all() } else { file.sync_data() };
            done.map_err(|e| Error::from_io(&e, path, "sync"))
        },
        watch,
    )
}

/// Copies a range of bytes between files, inside the kernel if possible.
pub fn copy_range(from: &Path, start: u64, bytes: u64, to: &Path, offset: u64, watch: Watch<'_>) -> Result<()> {
    const MOST: usize = 64 << 20;
    let source = File::open(from).map_err(|e| Error::from_io(&e, from, "open"))?;
    let Some(target) = open_to_write(to, false)? else {
        return Err(Error::new(Kind::Internal, "a plain open that was refused as direct"));
    };
    let mut done = 0;
    while done < bytes {
        if watch() {
            return Err(Error::new(Kind::Interrupted, "interrupted"));
        }
        let n = NonZeroUsize::new((bytes - done).min(MOST as u64) as usize).map_or(0, NonZeroUsize::get);
        let copied = copy_some(&source, start + done, n, &target, offset + done)
            .map_err(|e| Error::from_io(&e, to, &format!("copy from {} to", from.display())))?;
        if copied == 0 {
            let need = start + bytes;
            return Err(Error::new(Kind::Truncated, format!("expected {need} bytes, found {}", start + done)).at(from));
        }
        done += copied as u64;
    }
    Ok(())
}

fn copy_some(source: &File, from: u64, n: usize, target: &File, to: u64) -> std::io::Result<usize> {
    #[cfg(target_os = "linux")]
    {
        use rustix::io::Errno;
        let (mut at, mut put) = (from, to);
        match rustix::fs::copy_file_range(source, Some(&mut at), target, Some(&mut put), n) {
            // 0: end of file, or a file system with a known bug that copies nothing; reading distinguishes the two.
            Ok(copied) if copied > 0 => return Ok(copied),
            Ok(_) | Err(Errno::XDEV | Errno::NOSYS | Errno::INVAL | Errno::OPNOTSUPP) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    use std::os::unix::fs::FileExt;
    let mut some = vec![0; n.min(1 << 20)];
    let read = source.read_at(&mut some, from)?;
    target.write_all_at(&some[..read], to)?;
    Ok(read)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_copied_and_a_short_source_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let (a, b) = (folder.path().join("a"), folder.path().join("b"));
        std::fs::write(&a, (0..=255u8).cycle().take(100_000).collect::<Vec<_>>()).unwrap();
        copy_range(&a, 7, 90_000, &b, 3, &mut || false).unwrap();
        let copied = std::fs::read(&b).unwrap();
        assert_eq!(copied.len(), 90_003);
        assert_eq!(copied[3..], std::fs::read(&a).unwrap()[7..90_007]);
        assert_eq!(copy_range(&a, 0, 100_001, &b, 0, &mut || false).unwrap_err().kind, Kind::Truncated);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn many_files_are_synced_on_each_of_their_file_systems() {
        use std::os::unix::fs::MetadataExt;
        let folder = tempfile::tempdir().unwrap();
        let mut paths: Vec<PathBuf> = (0..MANY).map(|i| folder.path().join(format!("{i}"))).collect();
        for path in &paths {
            std::fs::write(path, b"x").unwrap();
        }
        // A file system other than the one of temporary files, even if it is only the kernel's.
        let other = PathBuf::from("/proc/self/status");
        assert_ne!(std::fs::metadata(&other).unwrap().dev(), std::fs::metadata(&paths[0]).unwrap().dev());
        paths.push(other.clone());
        paths.push(folder.path().join("0"));
        assert_eq!(one_of_each_file_system(&paths).unwrap(), [paths[0].as_path(), other.as_path()]);
        // A missing file is reported, wherever it is in the list.
        paths.push(folder.path().join("none"));
        assert_eq!(sync(&paths, &mut || false).unwrap_err().kind, Kind::NotFound);
    }
}
