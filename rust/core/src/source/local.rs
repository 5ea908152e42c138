//! Local files, mapped or read with `pread`.

use std::fs::{File, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use super::descriptors::{Share, open_regular};
use super::direct::DirectFile;
use super::mmap::{LastMap, Map, Paging};
use super::warmth::Warmth;
use super::{Access, ByteRange, Io, RangeRead, Ready, Source, Store, Version, pread, replaced};
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::threads::Stop;

pub use super::direct::DIRECT;

/// Opens local files.
#[derive(Clone, Copy, Debug)]
pub struct Local {
    /// The way to read them.
    pub io: Io,
}

impl Store for Local {
    fn open_many(&self, locations: &[&Location], access: Access, _: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let open = |location: &&Location| {
            let path = path_of(location)?;
            match access {
                Access::Kept => open_to_jump(path, self.io),
                Access::Growing => open_with(path, self.io, true),
                Access::Once => {
                    let opened = open_regular(path)?;
                    Ok(Box::new(Positioned::of(opened, (*location).clone(), None, false)) as Box<_>)
                }
            }
        };
        locations.iter().map(open).collect()
    }

    fn list(&self, folder: &Location) -> Result<Vec<String>> {
        let failed = |e: std::io::Error| Error::from_io(&e, folder, "list");
        let entries = match std::fs::read_dir(path_of(folder)?) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
            Err(e) => return Err(failed(e)),
        };
        let mut names = vec![];
        for entry in entries {
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }

    fn look(&self, location: &Location) -> Result<()> {
        let found = std::fs::metadata(path_of(location)?);
        found.map(drop).map_err(|e| Error::from_io(&e, location, "look at"))
    }
}

fn path_of(location: &Location) -> Result<&Path> {
    location.path().ok_or_else(|| Error::new(Kind::Internal, "expected a local path").at(location))
}

/// Opens a regular file for random reads.
pub fn open_to_jump(path: &Path, io: Io) -> Result<Box<dyn Source>> {
    open_with(path, io, false)
}

fn open_with(path: &Path, io: Io, grows: bool) -> Result<Box<dyn Source>> {
    let opened = open_regular(path)?;
    let len = opened.1.len();
    let read = Positioned::new(opened, path, grows);
    match io {
        Io::Mmap if len > 0 => {
            Ok(Box::new(Mapped { map: read.mapping(Paging::Hinted)?, warmth: Warmth::new(len), read }))
        }
        Io::Mmap | Io::Pread => Ok(Box::new(read)),
    }
}

/// The version of a file with this metadata.
pub(super) fn version_of(meta: &Metadata) -> Version {
    let times = [(meta.mtime(), meta.mtime_nsec()), (meta.ctime(), meta.ctime_nsec())];
    Version::File(meta.dev(), meta.ino(), meta.len(), times)
}

/// A file read with `pread`.
#[derive(Debug)]
struct Positioned {
    location: Location,
    file: File,
    len: u64,
    /// The time of its last change, in s and ns; `None` for a file that may grow.
    modified: Option<(i64, i64)>,
    /// `None` if the file is not cached.
    share: Option<Share>,
    /// The same file, for reads past the page cache.
    direct: DirectFile,
    /// For views, which would otherwise map the whole file each.
    mapped: LastMap,
    /// The mapping with readahead.
    mapped_ahead: LastMap,
}

impl Positioned {
    /// A file whose length has just been checked. Takes a share of the budget of cached descriptors, if one is left.
    fn new(opened: (File, Metadata), path: &Path, grows: bool) -> Positioned {
        // Also for a mapped file: checks of cached pages use the descriptor.
        pread::expect_random(&opened.0);
        Positioned::of(opened, path.into(), Some(Share::take()), grows)
    }

    fn of((file, meta): (File, Metadata), location: Location, share: Option<Share>, grows: bool) -> Positioned {
        let (len, modified) = (meta.len(), (!grows).then(|| (meta.mtime(), meta.mtime_nsec())));
        let (direct, mapped, mapped_ahead) = (DirectFile::default(), LastMap::default(), LastMap::default());
        Positioned { location, file, len, modified, share, direct, mapped, mapped_ahead }
    }

    fn mapping(&self, paging: Paging) -> Result<Map> {
        let bytes = usize::try_from(self.len).map_err(|_| {
            Error::new(Kind::Access, "the file exceeds this machine's address space").at(&self.location)
        })?;
        Map::open(&self.file, bytes, paging).map_err(|e| Error::from_io(&e, &self.location, "map"))
    }

    fn failed(&self, error: &std::io::Error, read: &RangeRead<'_>) -> Error {
        let mut error = Error::from_io(error, &self.location, "read").byte(read.at);
        if error.kind == Kind::Truncated {
            error.detail = format!("expected {} more bytes, the file ends", read.into.len());
        }
        error
    }
}

impl Source for Positioned {
    fn location(&self) -> &Location {
        &self.location
    }

    fn size(&self) -> u64 {
        self.len
    }

    fn version(&self) -> Option<Version> {
        // As in `unchanged`: not statx.
        let stat = rustix::fs::fstat(&self.file).ok()?;
        let times =
            [(stat.st_mtime as i64, stat.st_mtime_nsec as i64), (stat.st_ctime as i64, stat.st_ctime_nsec as i64)];
        Some(Version::File(stat.st_dev as u64, stat.st_ino as u64, u64::try_from(stat.st_size).unwrap_or(0), times))
    }

    fn map(&self, paging: Paging) -> Result<Option<Map>> {
        self.unchanged()?;
        if self.len == 0 {
            return Ok(None);
        }
        let last = match paging {
            Paging::Hinted => &self.mapped,
            Paging::Ahead => &self.mapped_ahead,
        };
        last.get_or_open(|| self.mapping(paging)).map(Some)
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        for read in reads {
            stop.check()?;
            pread::read_exact_at(&self.file, read.into, read.at).map_err(|e| self.failed(&e, read))?;
        }
        Ok(())
    }

    fn read_past_cache(&self, read: RangeRead<'_>, stop: &Stop) -> Result<()> {
        let wanted = usize::try_from(self.len.saturating_sub(read.at)).unwrap_or(usize::MAX).min(read.into.len());
        let done = self.direct.read(&self.file, read.into, read.at);
        if done >= wanted {
            return Ok(());
        }
        // The rest through the page cache: also finds out whether the file was truncated.
        self.read_many(&mut [RangeRead { at: read.at + done as u64, into: &mut read.into[done..wanted] }], stop)
    }

    fn read_if_ready(&self, read: RangeRead<'_>) -> Result<Ready> {
        pread::read_if_cached(&self.file, &mut *read.into, read.at).map_err(|e| self.failed(&e, &read))
    }

    fn is_ready(&self, at: u64) -> Ready {
        pread::is_cached(&self.file, at)
    }

    fn will_need(&self, ranges: &[ByteRange]) {
        for range in ranges {
            pread::will_need(&self.file, range.at, range.len);
        }
    }

    /// Fails if the file has shrunk since it was opened, because its mapped pages past the new end would fault, or was written
    /// since, or replaced.
    fn unchanged(&self) -> Result<()> {
        // fstat, not File::metadata: statx costs twice as much, which is noticeable for single-row reads.
        let stat = rustix::fs::fstat(&self.file).map_err(|e| Error::from_io(&e.into(), &self.location, "stat"))?;
        let now = u64::try_from(stat.st_size).unwrap_or(0);
        if now < self.len {
            return Err(Error::new(
                Kind::Truncated,
                format!(
                    "was truncated after it was opened: expected {} bytes, found {now}; reopen the dataset",
                    self.len
                ),
            )
            .at(&self.location)
            .byte(now));
        }
        if let Some(modified) = self.modified
            && (now > self.len || modified != (stat.st_mtime as i64, stat.st_mtime_nsec as i64))
        {
            return Err(replaced(&self.location, "its size or the time of its last change differs"));
        }
        // Some FUSE file systems report no links of any file.
        if stat.st_nlink == 0
            && let Some(named) = self.location.path().and_then(|path| path.metadata().ok())
            && (named.dev(), named.ino()) != (stat.st_dev as u64, stat.st_ino as u64)
        {
            return Err(replaced(&self.location, "its name belongs to another file now"));
        }
        Ok(())
    }

    fn may_keep(&self) -> bool {
        self.share.as_ref().is_some_and(Share::may_keep)
    }

    fn holds_descriptor(&self) -> bool {
        true
    }
}

/// A mapped file. The descriptor stays open for checks of cached pages.
#[derive(Debug)]
struct Mapped {
    map: Map,
    warmth: Warmth,
    read: Positioned,
}

impl Source for Mapped {
    fn location(&self) -> &Location {
        &self.read.location
    }

    fn size(&self) -> u64 {
        self.read.len
    }

    fn version(&self) -> Option<Version> {
        self.read.version()
    }

    fn bytes(&self) -> Option<&[u8]> {
        Some(self.map.bytes())
    }

    fn warmth(&self) -> Option<&Warmth> {
        Some(&self.warmth)
    }

    fn map(&self, paging: Paging) -> Result<Option<Map>> {
        match paging {
            Paging::Hinted => Ok(Some(self.map.clone())),
            Paging::Ahead => self.read.map(paging),
        }
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        self.read.read_many(reads, stop)
    }

    fn read_past_cache(&self, read: RangeRead<'_>, stop: &Stop) -> Result<()> {
        self.read.read_past_cache(read, stop)
    }

    fn read_if_ready(&self, read: RangeRead<'_>) -> Result<Ready> {
        let ready = self.read.read_if_ready(read);
        if matches!(ready, Ok(Ready::Unknown)) {
            self.warmth.never_read();
        }
        ready
    }

    fn is_ready(&self, at: u64) -> Ready {
        self.read.is_ready(at)
    }

    fn will_need(&self, ranges: &[ByteRange]) {
        // Not madvise, which takes the lock of the address space: 0.92 us compared with 0.50 for a cached row, two threads.
        self.read.will_need(ranges);
    }

    fn unchanged(&self) -> Result<()> {
        self.read.unchanged()
    }

    fn may_keep(&self) -> bool {
        self.read.may_keep()
    }

    fn holds_descriptor(&self) -> bool {
        true
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn a_file_is_replaced_when_its_name_belongs_to_another() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("a"), folder.path().join("b"));
        for io in [Io::Mmap, Io::Pread] {
            fs::write(&path, b"rows").unwrap();
            let source = open_with(&path, io, true).unwrap();
            fs::remove_file(&path).unwrap();
            source.unchanged().unwrap();
            fs::write(&other, b"rows").unwrap();
            fs::rename(&other, &path).unwrap();
            assert!(source.unchanged().unwrap_err().detail.contains("belongs to another file"));
        }
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_file_without_links_is_not_replaced_while_its_name_is_its_own() {
        use std::os::fd::AsRawFd;
        // As on FUSE file systems that count no links: a name that leads to the file, whose count is 0.
        let mut file = tempfile::tempfile().unwrap();
        std::io::Write::write_all(&mut file, b"rows").unwrap();
        let source = open_to_jump(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), Io::Pread).unwrap();
        source.unchanged().unwrap();
    }
}
