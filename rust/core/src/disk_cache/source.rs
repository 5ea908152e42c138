//! A source whose reads go through the cache.
//!
//! A read that is not cached is cut at pages; the missing pages are locked by blocks, counted, downloaded together, stored, and
//! copied. Blocks that another reader is filling are waited for afterwards, when no lock is held, so readers cannot wait for
//! each other in a circle. Whatever fails in the cache, the bytes come from the inner source.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::books::{Books, Granted};
use super::folder::Folder;
use super::geometry::{BLOCK, PAGE};
use super::key::ObjectKey;
use super::object::CachedObject;
use super::system::ByteLocks;
use crate::error::Result;
use crate::location::Location;
use crate::memory::zeroed;
use crate::source::descriptors::Share;
use crate::source::{RangeRead, Source, Version};
use crate::threads::Stop;
use crate::threads::fork::SharedLock;

/// Largest read of the inner source.
const LARGEST: u64 = BLOCK;
/// Bytes downloaded together.
const TOGETHER: u64 = 256 << 20;
/// Downloads of at least this many neighbouring bytes belong to a scan, whose blocks are evicted first.
const SCAN: u64 = 1 << 20;
/// Attempts to open an object that others remove.
const ATTEMPTS: usize = 3;

/// A source, and the object that caches it.
#[derive(Debug)]
pub struct DiskSource {
    inner: Box<dyn Source>,
    folder: Arc<Folder>,
    key: ObjectKey,
    version: Version,
    /// `None` if no object existed when it was last looked for.
    object: SharedLock<Option<Arc<CachedObject>>>,
    shares: [Share; 2],
    /// End of the last read, which tells reads in order.
    next: AtomicU64,
}

/// A part of a read, inside one page.
struct MissingPart<'a> {
    at: u64,
    into: &'a mut [u8],
}

impl MissingPart<'_> {
    fn page(&self) -> u64 {
        self.at / PAGE
    }

    fn block(&self) -> u64 {
        self.at / BLOCK
    }
}

/// The object, locks of some of its blocks, and the last block that has room.
struct StorePlace<'a> {
    object: &'a CachedObject,
    last: Option<u64>,
}

/// Where the parts of a wave stand.
struct WaveEnd<'a> {
    /// Parts that others are downloading.
    theirs: Vec<MissingPart<'a>>,
    /// Whether any part was done.
    moved: bool,
}

impl DiskSource {
    pub fn new(inner: Box<dyn Source>, folder: Arc<Folder>, key: ObjectKey, version: Version) -> DiskSource {
        let object = SharedLock::new(CachedObject::open(&folder, &key).ok().map(Arc::new));
        let shares = [Share::take(), Share::take()];
        DiskSource { inner, folder, key, version, object, shares, next: AtomicU64::new(u64::MAX) }
    }

    fn object(&self) -> Option<Arc<CachedObject>> {
        self.object.read_briefly(|| ()).and_then(|object| object.clone())
    }

    fn keep(&self, object: Option<Arc<CachedObject>>) {
        if let Some(mut kept) = self.object.write_briefly() {
            *kept = object;
        }
    }

    /// Whether these reads continue the last ones.
    fn in_order(&self, reads: &[RangeRead<'_>]) -> bool {
        let (Some(first), Some(last)) = (reads.first(), reads.last()) else { return false };
        let next = self.next.swap(last.at + last.into.len() as u64, Ordering::Relaxed);
        reads.len() == 1 && first.at >= next && first.at - next < PAGE
    }

    /// Fills parts, in the order of their offsets, from the cache or the inner source.
    fn fill(&self, mut parts: Vec<MissingPart<'_>>, scan: bool, stop: &Stop) -> Result<()> {
        parts.sort_by_key(|part| part.at);
        let (mut waits, mut pause) = (None, 200);
        while !parts.is_empty() {
            if stop.is_set() {
                return Ok(());
            }
            let rest = parts.split_off(wave(&parts));
            let end = match self.lockable(stop) {
                Some((object, locks)) => self.fill_wave(parts, &object, &locks, scan, stop)?,
                None => {
                    self.download(parts, None, scan, stop)?;
                    WaveEnd { theirs: vec![], moved: true }
                }
            };
            if end.moved {
                (waits, pause) = (None, 200);
            } else if waits.get_or_insert_with(Instant::now).elapsed() > self.folder.patience() {
                self.folder.waited(true);
                self.download(end.theirs, None, scan, stop)?;
                (parts, waits) = (rest, None);
                continue;
            } else {
                std::thread::sleep(Duration::from_micros(pause));
                pause = (pause * 2).min(5_000);
            }
            parts = end.theirs;
            parts.extend(rest);
        }
        Ok(())
    }

    /// The object, made if it does not exist, and a description for locks; `None` if the cache cannot be used now.
    fn lockable(&self, stop: &Stop) -> Option<(Arc<CachedObject>, ByteLocks)> {
        if self.folder.is_stopped() {
            return None;
        }
        let attempt = || -> io::Result<Option<(Arc<CachedObject>, ByteLocks)>> {
            for _ in 0..ATTEMPTS {
                if let Some(object) = self.object()
                    && let Some(locks) = object.locks(&self.folder, &self.key)?
                {
                    return Ok(Some((object, locks)));
                }
                let mut books = Books::open(&self.folder, stop)?;
                let made = books.create(&self.key)?;
                books.close()?;
                if !made {
                    return Ok(None);
                }
                match CachedObject::open(&self.folder, &self.key) {
                    Ok(object) => self.keep(Some(Arc::new(object))),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(None)
        };
        attempt().unwrap_or_else(|error| {
            self.folder.failed("open the cached object", &error);
            None
        })
    }

    fn try_lock(&self, locks: &ByteLocks, block: u64) -> bool {
        locks.try_lock(block).unwrap_or_else(|error| {
            self.folder.failed("lock a block", &error);
            false
        })
    }

    /// Downloads the parts whose blocks this reader can lock.
    fn fill_wave<'a>(
        &self,
        parts: Vec<MissingPart<'a>>,
        object: &CachedObject,
        locks: &ByteLocks,
        scan: bool,
        stop: &Stop,
    ) -> Result<WaveEnd<'a>> {
        let (mut mine, mut theirs, mut last) = (vec![], vec![], None);
        let asked = parts.len();
        for part in parts {
            let (block, locked) = match last {
                Some((block, locked)) if block == part.block() => (block, locked),
                _ => (part.block(), self.try_lock(locks, part.block())),
            };
            last = Some((block, locked));
            // Others may have stored it since the first look.
            if object.read(part.at, part.into) {
                continue;
            }
            if locked { mine.push(part) } else { theirs.push(part) }
        }
        if mine.is_empty() {
            let moved = theirs.len() < asked;
            if moved {
                self.folder.waited(false);
            }
            return Ok(WaveEnd { theirs, moved });
        }
        let granted = self.reserve(object, &mine, stop).unwrap_or_else(|error| {
            self.folder.failed("write", &error);
            None
        });
        self.download(mine, Some(StorePlace { object, last: granted }), scan, stop)?;
        Ok(WaveEnd { theirs, moved: true })
    }

    /// Makes room for the pages of parts; returns the last block that has room.
    fn reserve(&self, object: &CachedObject, parts: &[MissingPart<'_>], stop: &Stop) -> io::Result<Option<u64>> {
        let mut wanted: Vec<(u64, u64)> = vec![];
        for page in parts.chunk_by(|a, b| a.page() == b.page()) {
            let (block, units) = (page[0].block(), self.key.geometry.page_units(page[0].page()));
            match wanted.last_mut() {
                Some((last, sum)) if *last == block => *sum += units,
                _ => wanted.push((block, units)),
            }
        }
        let mut books = Books::open(&self.folder, stop)?;
        let granted = books.reserve(&self.key, object, &wanted)?;
        books.close()?;
        match granted {
            Granted::Gone => {
                self.keep(None);
                Ok(None)
            }
            Granted::First(n) => Ok(wanted[..n].last().map(|(block, _)| *block)),
        }
    }

    /// Downloads the pages of parts with one call of the inner source, stores those that have a place, and copies the parts.
    fn download(
        &self,
        parts: Vec<MissingPart<'_>>,
        place: Option<StorePlace<'_>>,
        scan: bool,
        stop: &Stop,
    ) -> Result<()> {
        let ranges = self.ranges(&parts);
        let buffers: Result<Vec<Vec<u8>>> = ranges.iter().map(|(_, len)| zeroed(*len as usize)).collect();
        let Ok(mut buffers) = buffers else {
            // No memory for whole pages: exactly the bytes that were asked.
            let mut reads: Vec<_> = parts.into_iter().map(|part| RangeRead { at: part.at, into: part.into }).collect();
            return self.inner.read_many(&mut reads, stop);
        };
        let mut reads: Vec<_> =
            ranges.iter().zip(&mut buffers).map(|((at, _), into)| RangeRead { at: *at, into }).collect();
        self.inner.read_many(&mut reads, stop)?;
        if stop.is_set() {
            return Ok(());
        }
        if let Some(StorePlace { object, last: Some(last) }) = place
            && self.inner.version().as_ref() == Some(&self.version)
        {
            for ((at, _), bytes) in ranges.iter().zip(&buffers) {
                let stored = bytes.len().min(((last + 1) * BLOCK).saturating_sub(*at) as usize);
                if let Err(error) = object.write(*at, &bytes[..stored]) {
                    self.folder.failed("write", &error);
                    break;
                }
                if !scan && (stored as u64) < SCAN && stored > 0 {
                    object.touch(&self.folder, *at, stored as u64);
                }
            }
        }
        for part in parts {
            let n = ranges.partition_point(|(at, _)| *at <= part.at) - 1;
            let from = (part.at - ranges[n].0) as usize;
            part.into.copy_from_slice(&buffers[n][from..from + part.into.len()]);
        }
        Ok(())
    }

    /// Offsets and lengths of the pages of parts, neighbours merged.
    fn ranges(&self, parts: &[MissingPart<'_>]) -> Vec<(u64, u64)> {
        let mut ranges: Vec<(u64, u64)> = vec![];
        for page in parts.chunk_by(|a, b| a.page() == b.page()) {
            let (at, len) = (page[0].page() * PAGE, self.key.geometry.page_len(page[0].page()));
            match ranges.last_mut() {
                Some((first, sum)) if *first + *sum == at && *sum + len <= LARGEST => *sum += len,
                _ => ranges.push((at, len)),
            }
        }
        ranges
    }
}

/// The number of parts whose pages are downloaded together.
fn wave(parts: &[MissingPart<'_>]) -> usize {
    let pages = parts.chunk_by(|a, b| a.page() == b.page());
    pages.take((TOGETHER / PAGE) as usize).map(<[_]>::len).sum()
}

/// Cuts a read at pages.
fn cut<'a>(read: &'a mut RangeRead<'_>, parts: &mut Vec<MissingPart<'a>>) {
    let (mut at, mut into) = (read.at, &mut *read.into);
    while !into.is_empty() {
        let (now, rest) = into.split_at_mut(into.len().min((PAGE - at % PAGE) as usize));
        let len = now.len() as u64;
        parts.push(MissingPart { at, into: now });
        (at, into) = (at + len, rest);
    }
}

impl Source for DiskSource {
    fn location(&self) -> &Location {
        self.inner.location()
    }

    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn version(&self) -> Option<Version> {
        self.inner.version()
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        let size = self.key.geometry.size;
        let inside = |read: &RangeRead<'_>| read.at.checked_add(read.into.len() as u64).is_some_and(|end| end <= size);
        if !reads.iter().all(inside) {
            return self.inner.read_many(reads, stop);
        }
        let (object, scan) = (self.object(), self.in_order(reads));
        let mut parts = vec![];
        for read in reads.iter_mut().filter(|read| !read.into.is_empty()) {
            if stop.is_set() {
                return Ok(());
            }
            match &object {
                Some(object) if object.read(read.at, read.into) => {
                    self.folder.hits.fetch_add(1, Ordering::Relaxed);
                    if !scan {
                        object.touch(&self.folder, read.at, read.into.len() as u64);
                    }
                }
                _ => {
                    self.folder.misses.fetch_add(1, Ordering::Relaxed);
                    cut(read, &mut parts);
                }
            }
        }
        self.fill(parts, scan, stop)
    }

    fn is_near(&self, at: u64) -> bool {
        self.object().is_some_and(|object| object.has(at)) || self.inner.is_near(at)
    }

    fn read_if_near(&self, read: RangeRead<'_>) -> Result<bool> {
        let inside = read.at.checked_add(read.into.len() as u64).is_some_and(|end| end <= self.key.geometry.size);
        let RangeRead { at, into } = read;
        if let Some(object) = self.object().filter(|_| inside)
            && object.read(at, into)
        {
            self.folder.hits.fetch_add(1, Ordering::Relaxed);
            object.touch(&self.folder, at, into.len() as u64);
            return Ok(true);
        }
        self.inner.read_if_near(RangeRead { at, into })
    }

    fn unchanged(&self) -> Result<()> {
        self.inner.unchanged()
    }

    fn may_keep(&self) -> bool {
        self.inner.may_keep() && self.shares.iter().all(Share::may_keep)
    }

    fn holds_descriptor(&self) -> bool {
        true
    }
}

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::DiskCache;
    use super::*;

    /// Zeros of any size.
    #[derive(Debug)]
    struct Zeros(Location, Arc<AtomicU64>);

    impl Source for Zeros {
        fn location(&self) -> &Location {
            &self.0
        }

        fn size(&self) -> u64 {
            1 << 20
        }

        fn version(&self) -> Option<Version> {
            Some(Version::Tag("1".into()))
        }

        fn read_many(&self, reads: &mut [RangeRead<'_>], _: &Stop) -> Result<()> {
            self.1.fetch_add(1, Ordering::Relaxed);
            reads.iter_mut().for_each(|read| read.into.fill(0));
            Ok(())
        }

        fn unchanged(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_block_that_stays_locked_is_read_from_the_inner_source() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(folder.path(), 64 << 20).unwrap();
        let calls = Arc::<AtomicU64>::default();
        let source = cache.source(Box::new(Zeros(Location::object("s3://b", "k"), Arc::clone(&calls))));
        let read = |at: u64, len: usize| {
            let mut into = vec![1; len];
            source.read(at, &mut into).unwrap();
            assert!(into.iter().all(|byte| *byte == 0));
            calls.swap(0, Ordering::Relaxed)
        };
        assert_eq!((read(0, 9), read(0, 9)), (1, 0));
        let name = cache.folder.names().unwrap().remove(0);
        let other = ByteLocks::open(&cache.folder.object(&name).join("data")).unwrap();
        assert!(other.try_lock(0).unwrap());
        // Instead of the first wait, which is long.
        cache.folder.waited(true);
        assert_eq!((read(0, 1 << 20), read(1 << 19, 9), read(0, 9)), (1, 1, 0));
        drop(other);
        assert_eq!((read(0, 1 << 20), read(0, 1 << 20)), (1, 0));
    }

    #[test]
    fn a_network_file_system_is_refused_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::open_on(folder.path(), 64 << 20, &|_| true).unwrap();
        let calls = Arc::<AtomicU64>::default();
        let source = cache.source(Box::new(Zeros(Location::object("s3://b", "k"), Arc::clone(&calls))));
        (0..2).for_each(|_| source.read(0, &mut [0; 9]).unwrap());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        assert!(cache.take_warning().is_some_and(|warning| warning.contains("network file system")));
    }
}
