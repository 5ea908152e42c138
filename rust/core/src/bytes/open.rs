//! A file that is open: its body, and where the rows lie in it.
//!
//! Every kind of dataset ends here. What differs is how the bytes are had (mapped, read in place, decoded into memory, or
//! not there at all, which in a chunked array means "the fill value") and how the rows stand in them; [`Place`] says the
//! second in five numbers.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::decoded::Block;
use super::mmap::Map;
use super::{evict, pread};
use crate::error::{Error, Kind, Result, is_out_of_descriptors};

/// Where rows stand in a file. Address `a` (an [`Address`](crate::layout::Address)'s `row`) is byte `start + a * unit`; the
/// row there has `used` bytes, the next row of a run begins `step` bytes later, and nothing may end after `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Offset of address 0.
    pub start: u64,
    /// Offset one past the last byte that rows may use.
    pub end: u64,
    /// Bytes between two addresses.
    pub unit: u64,
    /// Bytes between a row and the next of its run; a multiple of `unit`.
    pub step: u64,
    /// Bytes of a row that lie here: all of it, but where an array's chunks split the rows.
    pub used: usize,
    /// Where in the row they belong, in elements.
    pub column: usize,
    /// Whether elements lie in the other byte order.
    pub swapped: bool,
}

impl Place {
    /// Rows packed one after another, each address one row.
    pub fn packed(start: u64, rows: u64, row_bytes: usize) -> Option<Place> {
        let unit = row_bytes as u64;
        let end = rows.checked_mul(unit)?.checked_add(start)?;
        Some(Place { start, end, unit, step: unit, used: row_bytes, column: 0, swapped: false })
    }

    /// Offset of an address's first byte, if it and the `rows - 1` after it end in time.
    #[inline]
    pub fn offset(&self, address: u64, rows: u64) -> Option<u64> {
        let begin = address.checked_mul(self.unit)?.checked_add(self.start)?;
        let span = rows.checked_sub(1)?.checked_mul(self.step)?.checked_add(self.used as u64)?;
        (begin.checked_add(span)? <= self.end).then_some(begin)
    }

    /// Rows held, where each address is one.
    pub fn rows(&self) -> u64 {
        (self.end - self.start) / self.step.max(1)
    }

    /// Whether a run of rows is one range of bytes.
    pub fn is_dense(&self) -> bool {
        self.step == self.used as u64
    }
}

/// How the bytes of a file are had.
#[derive(Debug)]
pub enum Body {
    /// Mapped; the descriptor stays open for questions about cached pages.
    Mapped(File, Map),
    /// Read in place, call by call.
    Read(File),
    /// Decoded into memory.
    Memory(Arc<Block>),
    /// There is no such file, and the format says what that means: every element is this one.
    Fill(Vec<u8>),
}

/// A file that is open, and where its rows lie.
#[derive(Debug)]
pub struct OpenFile {
    path: PathBuf,
    body: Body,
    /// Bytes the file had when it was opened; all of them are mapped.
    len: u64,
    place: Place,
    /// Given back to the process-wide budget when the file closes.
    kept: bool,
}

impl OpenFile {
    /// A file whose `len` bytes were looked at just now. Takes a share of the descriptors that may be kept, if one is left.
    pub fn new(path: PathBuf, body: Body, len: u64, place: Place) -> OpenFile {
        let holds = matches!(body, Body::Mapped(..) | Body::Read(_));
        if holds {
            OPEN.fetch_add(1, Ordering::Relaxed);
        }
        OpenFile { path, body, len, place, kept: holds && keep_one() }
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How its bytes are had.
    #[inline]
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Where its rows lie.
    #[inline]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// Whether whoever opened it may keep it open.
    pub fn may_keep(&self) -> bool {
        self.kept
    }

    /// The bytes, where they can be looked at.
    #[inline]
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.body {
            Body::Mapped(_, map) => Some(map.bytes()),
            Body::Memory(bytes) => Some(bytes),
            Body::Read(_) | Body::Fill(_) => None,
        }
    }

    /// The mapping, where there is one.
    #[inline]
    pub fn map(&self) -> Option<&Map> {
        match &self.body {
            Body::Mapped(_, map) => Some(map),
            _ => None,
        }
    }

    /// The descriptor, where there is one.
    #[inline]
    pub fn file(&self) -> Option<&File> {
        match &self.body {
            Body::Mapped(file, _) | Body::Read(file) => Some(file),
            Body::Memory(_) | Body::Fill(_) => None,
        }
    }

    /// Fails if the file is shorter than it was when opened: its mapped pages past the new end would fault.
    pub fn check_length(&self) -> Result<()> {
        let Some(file) = self.file() else { return Ok(()) };
        // fstat and not File::metadata, whose statx costs twice as much; single-row reads feel it.
        let stat = rustix::fs::fstat(file).map_err(|e| Error::from_io(&e.into(), &self.path, "look at"))?;
        let now = u64::try_from(stat.st_size).unwrap_or(0);
        if now < self.len {
            return Err(Error::new(
                Kind::Truncated,
                format!(
                    "was truncated after it was opened: expected {} bytes, found {now}; reopen the dataset",
                    self.len
                ),
            )
            .at(&self.path)
            .byte(now));
        }
        Ok(())
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if self.file().is_some() {
            OPEN.fetch_sub(1, Ordering::Relaxed);
        }
        if self.kept {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Files this process keeps open, over all datasets.
static KEPT: AtomicUsize = AtomicUsize::new(0);
/// And all that are open, also for a single call.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// Half of the descriptors this process may have; the rest is the program's.
pub(crate) fn budget() -> usize {
    // Not a OnceLock: a child forked while another thread initialised it would wait for that thread.
    static BUDGET: AtomicUsize = AtomicUsize::new(0);
    match BUDGET.load(Ordering::Relaxed) {
        0 => {
            let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            let budget = soft.map_or(4096, |n| usize::try_from(n / 2).unwrap_or(4096)).clamp(16, 65_536);
            BUDGET.store(budget, Ordering::Relaxed);
            budget
        }
        budget => budget,
    }
}

/// Files that one thread of `threads` may hold open at once without keeping them: all threads together stay within half of
/// what the budget leaves.
pub(crate) fn files_at_once(threads: usize) -> usize {
    (budget() / 2 / threads.max(1)).clamp(2, 1024)
}

/// Whether all threads together hold so many files open that none should open a second one. Callers may be many more than
/// our own threads, so their number says nothing.
pub(crate) fn descriptors_are_scarce() -> bool {
    OPEN.load(Ordering::Relaxed) > budget() + budget() / 2
}

/// A share of the descriptors that may be kept: a free one, or that of a file that was not used lately.
fn keep_one() -> bool {
    let take = || KEPT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < budget()).then_some(n + 1)).is_ok();
    take() || (evict(false) > 0 && take())
}

/// Opens a file to read. Where the process has no descriptor left, kept ones are closed first; then those of other threads'
/// reads are waited for, a moment.
pub(crate) fn open_to_read(path: &Path) -> std::io::Result<File> {
    const TRIES: usize = 20;
    let mut tries = 0;
    loop {
        match File::open(path) {
            Err(error) if tries < TRIES && error.raw_os_error().is_some_and(is_out_of_descriptors) => {
                if evict(true) == 0 {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            other => return other,
        }
    }
}

/// Rows that lie one after another, as bytes in a shared mapping: they stay readable when the dataset is closed. A view keeps
/// no descriptor, so that the number of views is not bounded by `ulimit -n`.
#[derive(Debug)]
pub struct View {
    map: Map,
    begin: usize,
    end: usize,
}

impl View {
    /// Rows of a mapped file; `None` where there is no map, or the rows are not one range of bytes in this machine's order.
    /// Cold pages are put on their way: who asks for a view is about to read it from front to back.
    pub fn of(file: &OpenFile, address: u64, rows: u64, row_bytes: usize) -> Result<Option<View>> {
        let place = *file.place();
        if rows == 0 || !place.is_dense() || place.swapped || place.used != row_bytes {
            return Ok(None);
        }
        let Some(begin) = place.offset(address, rows) else {
            return Err(outside(file, address, rows, ""));
        };
        file.check_length()?;
        let (begin, end) = (begin as usize, begin as usize + rows as usize * row_bytes);
        let (Some(map), Some(descriptor)) = (file.map(), file.file()) else { return Ok(None) };
        if [begin, end - 1].iter().any(|at| pread::is_cached(descriptor, *at as u64) == pread::Cached::No) {
            map.will_need(begin, end - begin);
        }
        Ok(Some(View { map: map.clone(), begin, end }))
    }

    /// A range of a mapped file's bytes; `None` where there is no map, or the file has no such range.
    pub fn range(file: &OpenFile, begin: usize, end: usize) -> Result<Option<View>> {
        file.check_length()?;
        let map = file.map().filter(|map| map.bytes().get(begin..end).is_some());
        Ok(map.map(|map| View { map: map.clone(), begin, end }))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map.bytes()[self.begin..self.end]
    }
}

/// The rows that an index names must be rows that the file holds.
pub(crate) fn outside(file: &OpenFile, address: u64, rows: u64, whose: &str) -> Error {
    let place = file.place();
    let detail = if place.unit == place.step {
        let (row, held) = (address.saturating_add(rows.saturating_sub(1)), place.rows());
        format!("the index names row {row}{whose}, but the file holds {held} rows")
    } else {
        format!("the index names {rows} rows at byte {address}{whose}, but the file has {} bytes", place.end)
    };
    Error::new(Kind::Format, detail).at(file.path())
}

/// Opens a regular file (symlinks are followed) and tells its length.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64)> {
    // Looking before opening: opening a named pipe would wait for a writer.
    let meta = std::fs::metadata(path).map_err(|e| Error::from_io(&e, path, "look at"))?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "a folder" } else { "a special file" };
        return Err(Error::new(Kind::NotAFile, format!("expected a regular file, found {what}")).at(path));
    }
    let file = open_to_read(path).map_err(|e| Error::from_io(&e, path, "open"))?;
    let meta = file.metadata().map_err(|e| Error::from_io(&e, path, "look at"))?;
    Ok((file, meta.len()))
}
