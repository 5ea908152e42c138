//! Opens files for writing, copies ranges, and syncs files to disk.

use std::fs::{File, OpenOptions};
use std::num::NonZeroUsize;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, Kind, Result};
use crate::threads::{self, Watch};

/// Maximum number of concurrent writes.
pub(super) const AT_ONCE: usize = 4;

/// Runs `jobs` jobs that wait for the disk. The calling thread runs a single job, which cannot be stopped anyway.
pub(super) fn on_threads(
    jobs: usize,
    at_once: usize,
    work: &(dyn Fn(usize) -> Result<()> + Sync),
    watch: Watch<'_>,
) -> Result<()> {
    if jobs <= 1 {
        return (0..jobs).try_for_each(work);
    }
    threads::run_waiting(jobs, at_once, &|job, _| work(job), watch)
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

/// Maximum number of concurrent syncs: each waits for the disk, which serves many together.
const SYNCS_AT_ONCE: usize = 16;

/// Files, at least, whose file system is synced first, so that they share one commit of its journal: syncing 20,000 files of
/// 4 KiB on ext4 then takes half of the time.
#[cfg(target_os = "linux")]
const MANY: usize = 256;

/// Waits until the data written to these files is on disk. Each file is synced, and reports its failed writes: `syncfs` reports
/// none before Linux 5.8, and later to one caller only.
pub fn sync(paths: &[PathBuf], watch: Watch<'_>) -> Result<()> {
    #[cfg(target_os = "linux")]
    if let (MANY.., Some(Ok(file))) = (paths.len(), paths.first().map(File::open)) {
        // An error may be that of another program's file; that of one of these is reported by its own sync.
        let _ = rustix::fs::syncfs(file);
    }
    let one = |i: usize| {
        let path = &paths[i];
        let file = File::open(path).map_err(|e| Error::from_io(&e, path, "open"))?;
        // A folder's entries are its data: fdatasync may leave them out, so use fsync.
        let folder = file.metadata().is_ok_and(|m| m.is_dir());
        let done = if folder { file.sync_all() } else { file.sync_data() };
        done.map_err(|e| Error::from_io(&e, path, "sync"))
    };
    on_threads(paths.len(), SYNCS_AT_ONCE, &one, watch)
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

    #[test]
    fn every_file_is_synced() {
        let folder = tempfile::tempdir().unwrap();
        let mut paths: Vec<PathBuf> = (0..300).map(|i| folder.path().join(format!("{i}"))).collect();
        for path in &paths {
            std::fs::write(path, b"x").unwrap();
        }
        paths.push(folder.path().to_path_buf());
        sync(&paths, &mut || false).unwrap();
        // The kernel's files cannot be synced, and their file system can.
        #[cfg(target_os = "linux")]
        assert!(sync(&[&paths[..], &["/proc/self/status".into()]].concat(), &mut || false).is_err());
        // A missing file is reported, wherever it is in the list.
        paths.push(folder.path().join("none"));
        assert_eq!(sync(&paths, &mut || false).unwrap_err().kind, Kind::NotFound);
    }
}
