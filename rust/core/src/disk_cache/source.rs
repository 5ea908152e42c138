//! A source whose reads go through the cache.
//!
//! A read that is not cached is cut at blocks; the missing pages are locked by blocks, counted, downloaded together,
//! stored, and copied. They are downloaded into separate memory, bounded for all threads together: other threads of a
//! program may change the caller's buffer before it is stored. The reader waits for blocks that another reader is
//! filling afterwards, when it holds no lock, so readers cannot deadlock. If the cache fails in any way, the bytes come
//! from the inner source.

use std::io;
use std::ops::Range;
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
use crate::threads::shared::SharedBytes;
use crate::threads::{SharedLock, Stop};

/// Largest read of the inner source.
const LARGEST: u64 = BLOCK;
/// Maximum bytes downloaded together, by one read and by all threads of this process.
const TOGETHER: u64 = 32 << 20;
static DOWNLOADED: SharedBytes = SharedBytes::new(128 << 20);
/// Downloads of at least this many neighbouring bytes belong to a scan, whose blocks are evicted first.
const SCAN: u64 = 1 << 20;
/// Attempts to open an object that other processes remove.
const ATTEMPTS: usize = 3;

/// A source, and the object that caches it.
#[derive(Debug)]
pub struct DiskSource {
    inner: Box<dyn Source>,
    folder: Arc<Folder>,
    key: ObjectKey,
    version: Version,
    /// `None` if no object existed at the last lookup.
    object: SharedLock<Option<Arc<CachedObject>>>,
    shares: [Share; 2],
    /// End of the last read, to detect reads in order.
    next: AtomicU64,
}

/// A part of a read: a part of one page, or whole pages of one block.
struct MissingPart<'a> {
    at: u64,
    into: &'a mut [u8],
    /// Whether it is whole pages.
    whole: bool,
}

impl MissingPart<'_> {
    fn end(&self) -> u64 {
        self.at + self.into.len() as u64
    }

    fn pages(&self) -> Range<u64> {
        self.at / PAGE..self.end().div_ceil(PAGE)
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

/// The result of a wave of parts.
struct WaveEnd<'a> {
    /// Parts that other readers are downloading.
    others: Vec<MissingPart<'a>>,
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
        let (mut waits, mut pause) = (None, 200);
        while !parts.is_empty() {
            parts.sort_by_key(|part| part.at);
            stop.check()?;
            let rest = parts.split_off(wave(&parts));
            let end = match self.lockable(stop) {
                Some((object, locks)) => self.fill_wave(parts, &object, &locks, scan, stop)?,
                None => {
                    self.download(parts, None, scan, stop)?;
                    WaveEnd { others: vec![], moved: true }
                }
            };
            if end.moved {
                (waits, pause) = (None, 200);
            } else if waits.get_or_insert_with(Instant::now).elapsed() > self.folder.patience() {
                self.folder.waited(true);
                let mut others = end.others;
                others.sort_by_key(|part| part.at);
                self.download(others, None, scan, stop)?;
                (parts, waits) = (rest, None);
                continue;
            } else {
                std::thread::sleep(Duration::from_micros(pause));
                pause = (pause * 2).min(5_000);
            }
            parts = end.others;
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
        let (mut owned, mut others, mut last) = (vec![], vec![], None);
        let bytes = |parts: &[MissingPart<'_>]| parts.iter().map(|part| part.into.len()).sum::<usize>();
        let asked = bytes(&parts);
        for part in parts {
            let (block, locked) = match last {
                Some((block, locked)) if block == part.block() => (block, locked),
                _ => (part.block(), self.try_lock(locks, part.block())),
            };
            last = Some((block, locked));
            // Other readers may have stored some of it since the first check.
            let missing = missing(object, part);
            if locked { owned.extend(missing) } else { others.extend(missing) }
        }
        // If reads overlap, the missing parts of one may come after those of another.
        owned.sort_by_key(|part| part.at);
        if owned.is_empty() {
            let moved = bytes(&others) < asked;
            if moved {
                self.folder.waited(false);
            }
            return Ok(WaveEnd { others, moved });
        }
        let granted = self.reserve(object, &owned, stop).unwrap_or_else(|error| {
            self.folder.failed("write", &error);
            None
        });
        self.download(owned, Some(StorePlace { object, last: granted }), scan, stop)?;
        Ok(WaveEnd { others, moved: true })
    }

    /// Makes room for the pages of parts; returns the last block that has room.
    fn reserve(&self, object: &CachedObject, parts: &[MissingPart<'_>], stop: &Stop) -> io::Result<Option<u64>> {
        let (mut wanted, mut next): (Vec<(u64, u64)>, u64) = (vec![], 0);
        for part in parts {
            let pages = part.pages();
            let units = (pages.start.max(next)..pages.end).map(|page| self.key.geometry.page_units(page)).sum::<u64>();
            next = next.max(pages.end);
            match wanted.last_mut() {
                Some((last, sum)) if *last == part.block() => *sum += units,
                _ => wanted.push((part.block(), units)),
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
        let (ranges, range_of) = self.ranges(&parts);
        let bytes = ranges.iter().map(|range| range.end - range.start).sum();
        let _held = DOWNLOADED.take(bytes, stop)?;
        let buffers: Result<Vec<Vec<u8>>> =
            ranges.iter().map(|range| zeroed((range.end - range.start) as usize)).collect();
        let Ok(mut buffers) = buffers else {
            // No memory for whole pages: exactly the requested bytes.
            let mut reads: Vec<_> = parts.into_iter().map(|part| RangeRead { at: part.at, into: part.into }).collect();
            return self.inner.read_many(&mut reads, stop);
        };
        let mut reads: Vec<_> =
            ranges.iter().zip(&mut buffers).map(|(range, into)| RangeRead { at: range.start, into }).collect();
        self.inner.read_many(&mut reads, stop)?;
        if let Some(StorePlace { object, last: Some(last) }) = place
            && self.inner.version().as_ref() == Some(&self.version)
        {
            for (range, bytes) in ranges.iter().zip(&buffers) {
                let stored = bytes.len().min(((last + 1) * BLOCK).saturating_sub(range.start) as usize);
                if let Err(error) = object.write(range.start, &bytes[..stored]) {
                    self.folder.failed("write", &error);
                    break;
                }
                if !scan && (stored as u64) < SCAN && stored > 0 {
                    object.touch(&self.folder, range.start, stored as u64);
                }
            }
        }
        for (part, n) in parts.into_iter().zip(range_of) {
            let from = (part.at - ranges[n].start) as usize;
            part.into.copy_from_slice(&buffers[n][from..from + part.into.len()]);
        }
        Ok(())
    }

    /// The pages of parts, neighbours merged, and the number of each part's range.
    fn ranges(&self, parts: &[MissingPart<'_>]) -> (Vec<Range<u64>>, Vec<usize>) {
        let (mut ranges, mut range_of): (Vec<Range<u64>>, Vec<usize>) = (vec![], vec![]);
        for part in parts {
            let Range { start, end } = part.pages();
            let (start, end) = (start * PAGE, (end * PAGE).min(self.key.geometry.size));
            match ranges.last_mut() {
                Some(last) if start <= last.end && end.max(last.end) - last.start <= LARGEST => {
                    last.end = last.end.max(end);
                }
                _ => ranges.push(start..end),
            }
            range_of.push(ranges.len() - 1);
        }
        (ranges, range_of)
    }
}

/// Reads the pages of a part that are stored; returns the others.
fn missing<'a>(object: &CachedObject, part: MissingPart<'a>) -> Vec<MissingPart<'a>> {
    let MissingPart { mut at, mut into, whole } = part;
    if !whole {
        return if object.read(at, into) { vec![] } else { vec![MissingPart { at, into, whole }] };
    }
    let mut lacking = vec![];
    for run in object.stored_pages(at, into.len()).chunk_by(|a, b| a == b) {
        let n = into.len().min(run.len() * PAGE as usize);
        let (mut run_bytes, others) = std::mem::take(&mut into).split_at_mut(n);
        let end = at + run_bytes.len() as u64;
        if !run[0] {
            lacking.push(MissingPart { at, into: run_bytes, whole });
        } else if !object.read(at, run_bytes) {
            // Some are damaged, or were evicted meanwhile.
            while !run_bytes.is_empty() {
                let n = run_bytes.len().min(PAGE as usize);
                let (page, rest) = std::mem::take(&mut run_bytes).split_at_mut(n);
                let here = end - (page.len() + rest.len()) as u64;
                if !object.read(here, page) {
                    lacking.push(MissingPart { at: here, into: page, whole });
                }
                run_bytes = rest;
            }
        }
        (at, into) = (end, others);
    }
    lacking
}

/// The number of parts that are downloaded together.
fn wave(parts: &[MissingPart<'_>]) -> usize {
    let (mut pages, mut next) = (0, 0);
    let fits = |part: &&MissingPart<'_>| {
        let Range { start, end } = part.pages();
        pages += end.saturating_sub(start.max(next));
        next = next.max(end);
        pages <= TOGETHER / PAGE
    };
    parts.iter().take_while(fits).count().max(1)
}

/// Cuts a read at blocks, and at pages that it covers only in part.
fn cut<'a>(read: &'a mut RangeRead<'_>, size: u64, parts: &mut Vec<MissingPart<'a>>) {
    let (mut at, mut into) = (read.at, &mut *read.into);
    while !into.is_empty() {
        let len = into.len() as u64;
        let pages = if at + len == size { len } else { len / PAGE * PAGE };
        let whole = at % PAGE == 0 && pages > 0;
        let n = if whole { pages.min(BLOCK - at % BLOCK) } else { len.min(PAGE - at % PAGE) };
        let (now, rest) = into.split_at_mut(n as usize);
        parts.push(MissingPart { at, into: now, whole });
        (at, into) = (at + n, rest);
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
            stop.check()?;
            match &object {
                Some(object) if object.read(read.at, read.into) => {
                    self.folder.hits.fetch_add(1, Ordering::Relaxed);
                    if !scan {
                        object.touch(&self.folder, read.at, read.into.len() as u64);
                    }
                }
                _ => {
                    self.folder.misses.fetch_add(1, Ordering::Relaxed);
                    cut(read, size, &mut parts);
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
            source.read(at, &mut into, &Stop::new()).unwrap();
            assert!(into.iter().all(|byte| *byte == 0));
            calls.swap(0, Ordering::Relaxed)
        };
        assert_eq!((read(0, 9), read(0, 9)), (1, 0));
        let name = cache.folder.names().unwrap().remove(0);
        let other = ByteLocks::open(&cache.folder.object(&name).join("data")).unwrap();
        assert!(other.try_lock(0).unwrap());
        // Replaces the first wait, which is long.
        cache.folder.waited(true);
        assert_eq!((read(0, 1 << 20), read(1 << 19, 9), read(0, 9)), (1, 1, 0));
        drop(other);
        assert_eq!((read(0, 1 << 20), read(0, 1 << 20)), (1, 0));
    }

    #[test]
    fn a_lock_that_stays_held_is_waited_for_once() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::open(folder.path(), 64 << 20).unwrap();
        let calls = Arc::<AtomicU64>::default();
        let source = cache.source(Box::new(Zeros(Location::object("s3://b", "k"), Arc::clone(&calls))));
        let read = |at: u64| {
            source.read(at, &mut [1; 9], &Stop::new()).unwrap();
            calls.swap(0, Ordering::Relaxed)
        };
        let (long, other) = (cache.folder.lock_patience(), ByteLocks::open(&cache.folder.lock()).unwrap());
        assert!(other.try_lock(0).unwrap());
        // Replaces the first wait, which is long.
        cache.folder.waited_for_lock(true);
        assert!(cache.folder.lock_patience() * 100 < long);
        // Nothing is stored, and later waits are short.
        assert_eq!((read(0), read(0), read(PAGE)), (1, 1, 1));
        assert!(cache.folder.lock_patience() * 100 < long);
        drop(other);
        assert_eq!((read(0), read(0)), (1, 0));
        assert_eq!(cache.folder.lock_patience(), long);
        // A stop ends the wait.
        let stop = Stop::new();
        stop.set();
        let other = ByteLocks::open(&cache.folder.lock()).unwrap();
        assert!(other.try_lock(0).unwrap());
        assert!(Books::open(&cache.folder, &stop).is_err());
        assert_eq!(cache.folder.lock_patience(), long);
    }

    #[test]
    fn a_network_file_system_is_refused_with_a_warning() {
        let folder = tempfile::tempdir().unwrap();
        let cache = DiskCache::open_on(folder.path(), 64 << 20, &|_| true).unwrap();
        let calls = Arc::<AtomicU64>::default();
        let source = cache.source(Box::new(Zeros(Location::object("s3://b", "k"), Arc::clone(&calls))));
        (0..2).for_each(|_| source.read(0, &mut [0; 9], &Stop::new()).unwrap());
        assert_eq!(calls.load(Ordering::Relaxed), 2);
        assert!(cache.take_warning().is_some_and(|warning| warning.contains("network file system")));
    }
}
