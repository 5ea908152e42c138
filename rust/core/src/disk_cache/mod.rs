//! A cache of far objects on the local disk, shared by all threads and processes that use its folder.
//!
//! ```text
//! VERSION  lock  limit  objects/<sha256(address without credentials, version tag, size)>-<size>/{data, state, url}
//! ```
//! `data` is sparse; `state` contains its checksums and block heads (`geometry`). Bytes are downloaded by pages of 64
//! KiB, checked by sectors of 4 KiB, and locked and evicted by blocks of 4 MiB.
//!
//! - **Reads** take no lock. They compare every sector with its CRC32C each time, and download the bytes again if it
//!   differs: for a hole, a half-written block, a block that is evicted meanwhile, a write lost in a power cut, or
//!   damage by others. A changed object has another version tag, thus another folder; objects without a version are not
//!   cached.
//! - **Downloads** hold the locks of their blocks (`system`), so that many readers download a block once. A killed
//!   process holds no lock, and the sectors that it had not finished are absent.
//! - **The limit** (`books`) counts pages *before* their download, with the overhead of files, so it is never exceeded. Blocks are
//!   evicted by a clock; large or ordered reads insert blocks with their clock off, so that a scan does not replace blocks that
//!   random reads use.
//! - **Faults** of the cache are never errors of a read: a full or read-only disk stops the cache with one warning.
//!
//! State is read and written with `pread` and `pwrite`, not mapped: a mapping would turn a truncated state file or a full disk
//! into SIGBUS. No lock of this process is waited for, so a fork at any moment leaves a working child.

mod books;
mod folder;
mod geometry;
mod key;
mod object;
mod source;
mod system;

use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use self::books::{Books, LEAST, LEAST_BLOCKS};
use self::folder::Folder;
use self::geometry::LARGEST;
pub use self::geometry::PAGE;
use self::key::ObjectKey;
use self::source::DiskSource;
use crate::error::{Error, Kind, Result};
use crate::source::{Source, pread};
use crate::threads::Stop;

/// The version of the layout of a cache folder. The text identifies a folder of this cache.
const VERSION: &str = "actshard disk cache 1\n";
const VERSION_WORDS: &str = "actshard disk cache ";
/// The names of a cache folder. `listings` is written by the callers.
const NAMES: [&str; 5] = ["VERSION", "lock", "limit", "objects", LISTINGS];
/// The folder for records about datasets, next to their objects. [`DiskCache::clear`] removes it.
pub const LISTINGS: &str = "listings";
/// The subfolder for the cache, if the folder contains other files.
const INSIDE: &str = "actshard-cache";

/// A cache on disk. Clones share it.
#[derive(Clone, Debug)]
pub struct DiskCache {
    folder: Arc<Folder>,
    /// The folder as it was given.
    chosen: Arc<Path>,
    /// Whether the folder can be used.
    on: bool,
}

/// Statistics of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheInfo {
    /// Bytes counted, overhead included: at least the disk space of its files.
    pub bytes: u64,
    /// Cached objects.
    pub objects: u64,
    /// The maximum of `bytes`.
    pub limit: u64,
    /// Ranges that this process read from the cache.
    pub hits: u64,
    /// Ranges that this process had to download, at least in part.
    pub misses: u64,
}

impl DiskCache {
    /// Opens a cache folder, and makes it if it does not exist. `limit` is the maximum number of bytes on disk. If the
    /// folder cannot hold a cache, reads continue without one, and [`DiskCache::take_warning`] gives the reason.
    pub fn open(folder: &Path, limit: u64) -> Result<DiskCache> {
        DiskCache::open_on(folder, limit, &pread::is_network)
    }

    /// The cache in a folder, to inspect or clear it; `None` if the folder has no cache. Its limit is that of its last
    /// user.
    pub fn existing(folder: &Path) -> Result<Option<DiskCache>> {
        let has_cache = |root: &Path| root.join("objects").is_dir() && root.join("lock").is_file();
        let roots = [folder.to_path_buf(), folder.join(INSIDE)];
        let roots = roots.iter().flat_map(|root| [root.clone(), root.join(THIS_VERSION)]);
        let is_this = |root: &Path| std::fs::read_to_string(root.join("VERSION")).is_ok_and(|found| found == VERSION);
        let Some(root) = roots.into_iter().find(|root| is_this(root) && has_cache(root)) else {
            return Ok(None);
        };
        if pread::is_network(&root) {
            let text = "the folder is on a network file system, whose locks are unreliable";
            return Err(Error::new(Kind::Unsupported, text).at(folder.to_path_buf()));
        }
        let text = std::fs::read_to_string(root.join("limit")).unwrap_or_default();
        let limit = text.trim_end().parse().ok().filter(|limit| *limit >= LEAST).unwrap_or(0);
        let opened = Folder::new(root, limit);
        Ok(Some(DiskCache { folder: Arc::new(opened), chosen: folder.into(), on: true }))
    }

    fn open_on(folder: &Path, limit: u64, is_network: &dyn Fn(&Path) -> bool) -> Result<DiskCache> {
        if limit < LEAST {
            let detail = format!(
                "the limit of the disk cache: expected at least {LEAST} bytes ({LEAST_BLOCKS} blocks), found {limit}"
            );
            return Err(Error::new(Kind::Argument, detail));
        }
        let prepared = prepare(folder).and_then(|root| {
            if is_network(&root) {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "the folder is on a network file system, whose locks are unreliable; choose a local one",
                ));
            }
            let opened = Folder::new(root, limit);
            start(&opened)?;
            Ok(opened)
        });
        match prepared {
            Ok(opened) => Ok(DiskCache { folder: Arc::new(opened), chosen: folder.into(), on: true }),
            Err(error) => {
                let opened = Folder::new(folder.to_path_buf(), limit);
                opened.stop(&format!("cannot use the folder: {error}"));
                Ok(DiskCache { folder: Arc::new(opened), chosen: folder.into(), on: false })
            }
        }
    }

    /// A source that reads through the cache. Returns `inner` itself if it has no version, is in memory already,
    /// or is larger than 16 TiB.
    pub fn source(&self, inner: Box<dyn Source>) -> Box<dyn Source> {
        self.source_from("", inner)
    }

    /// As [`DiskCache::source`]; `origin` distinguishes servers whose objects have equal locations. It is hashed, not stored.
    pub fn source_from(&self, origin: &str, inner: Box<dyn Source>) -> Box<dyn Source> {
        match inner.version() {
            Some(version) if self.on && (1..=LARGEST).contains(&inner.size()) && inner.bytes().is_none() => {
                let key = ObjectKey::new(origin, inner.location(), &version, inner.size());
                Box::new(DiskSource::new(inner, Arc::clone(&self.folder), key, version))
            }
            _ => inner,
        }
    }

    /// The reason why the cache is not used; `None` after the first call.
    pub fn take_warning(&self) -> Option<String> {
        self.folder.take_warning()
    }

    /// The folder that it was opened with.
    pub fn chosen(&self) -> &Path {
        &self.chosen
    }

    /// The maximum number of bytes on disk.
    pub fn limit(&self) -> u64 {
        self.folder.limit
    }

    /// The folder that holds the objects.
    pub fn folder(&self) -> &Path {
        &self.folder.root
    }

    /// Its size, and the hits and misses of this process.
    pub fn info(&self) -> Result<CacheInfo> {
        let (mut bytes, mut objects) = (0, 0);
        if self.on {
            bytes = self.with_books(&mut |books| Ok(books.bytes()), "look at")?;
            let names = self.folder.names().map_err(|e| Error::from_io(&e, self.folder(), "list"))?;
            objects = names.iter().filter(|name| key::geometry_of(name).is_some()).count() as u64;
        }
        let (hits, misses) = (&self.folder.hits, &self.folder.misses);
        let count = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
        Ok(CacheInfo { bytes, objects, limit: self.folder.limit, hits: count(hits), misses: count(misses) })
    }

    /// Removes all blocks that are not being downloaded now.
    pub fn clear(&self) -> Result<()> {
        if !self.on {
            return Ok(());
        }
        match std::fs::remove_dir_all(self.folder().join(LISTINGS)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(Error::from_io(&error, self.folder(), "clear"));
            }
            _ => {}
        }
        self.with_books(&mut |books| books.clear(), "clear")
    }

    #[expect(clippy::disallowed_methods, reason = "maintenance, by a caller who waits at most for another process's")]
    fn with_books<T>(&self, work: &mut dyn FnMut(&mut Books<'_>) -> io::Result<T>, doing: &str) -> Result<T> {
        let mut locked = || {
            let mut books = Books::open(&self.folder, Stop::never())?;
            let done = work(&mut books)?;
            books.close()?;
            Ok(done)
        };
        locked().map_err(|e| Error::from_io(&e, self.folder(), doing))
    }
}

/// The folder for this version of the layout inside one of another version.
const THIS_VERSION: &str = "version-1";

/// Makes the folder, and returns the one for this version of the layout: a subfolder, if the folder has another version
/// or contains other files. Other files are not touched.
fn prepare(folder: &Path) -> io::Result<PathBuf> {
    let make = |path: &Path| std::fs::DirBuilder::new().mode(0o700).recursive(true).create(path);
    let mut root = folder.to_path_buf();
    make(&root)?;
    if !is_cache(&root)? {
        root = root.join(INSIDE);
        make(&root)?;
        if !is_cache(&root)? {
            let text = format!("{} contains other files; choose another folder", root.display());
            return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
        }
    }
    let found = std::fs::read_to_string(root.join("VERSION")).unwrap_or_default();
    if has_number(&found) && found != VERSION {
        root = root.join(THIS_VERSION);
        make(&root)?;
    }
    let file = system::open_rw(&root.join("VERSION"), true)?;
    if file.metadata()?.len() != VERSION.len() as u64 {
        file.set_len(0)?;
    }
    file.write_all_at(VERSION.as_bytes(), 0)?;
    make(&root.join("objects"))?;
    Ok(root)
}

fn has_number(version: &str) -> bool {
    let number = version.strip_prefix(VERSION_WORDS).and_then(|rest| rest.strip_suffix('\n'));
    number.is_some_and(|number| number.len() < 10 && number.parse::<u32>().is_ok())
}

/// Whether a folder is empty, or a cache. If its version is damaged, it must contain only names of a cache, and either
/// an object, or a version that a crash of the machine truncated or filled with zeros.
fn is_cache(folder: &Path) -> io::Result<bool> {
    let version = match std::fs::read(folder.join("VERSION")) {
        Ok(version) => version,
        Err(error) if error.kind() == io::ErrorKind::NotFound => vec![],
        Err(error) => return Err(error),
    };
    if has_number(&String::from_utf8_lossy(&version)) {
        return Ok(true);
    }
    let written = version.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    let (mut names, mut objects) = (0, false);
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        if !NAMES.iter().any(|own| name == *own) {
            return Ok(false);
        }
        objects |= name == "objects" && entry.file_type()?.is_dir();
        names += usize::from(name != "VERSION");
    }
    if VERSION.as_bytes().starts_with(&version[..written]) {
        return Ok(objects || names == 0);
    }
    let is_object = |name: &str| key::geometry_of(name).is_some();
    Ok(objects
        && std::fs::read_dir(folder.join("objects"))?.flatten().any(|e| e.file_name().to_str().is_some_and(is_object)))
}

/// Checks that the file system supports the cache, and enforces the limit.
#[expect(clippy::disallowed_methods, reason = "once, when the cache is opened")]
fn start(folder: &Folder) -> io::Result<()> {
    let mut books = Books::open(folder, Stop::never())?;
    // One name for all processes, which hold the lock here: the file that a killed one leaves is removed by the next
    // one.
    let probe = folder.objects().join("probe");
    let file = system::open_rw(&probe, true)?;
    let tried = file.write_all_at(&[1; 8192], 0).and_then(|()| system::punch(&file, 0, 4096));
    std::fs::remove_file(&probe)?;
    tried?;
    // For `existing`. Under the lock, so that the file never mixes two limits.
    let limit = system::open_rw(&folder.root.join("limit"), true)?;
    limit.set_len(0)?;
    limit.write_all_at(format!("{}\n", folder.limit).as_bytes(), 0)?;
    books.shrink()?;
    books.close()
}
