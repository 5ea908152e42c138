//! A file that is open: its body, and where the rows lie in it.
//!
//! Every kind of dataset ends here. What differs is how the bytes are had (mapped, read in place, decoded into memory, or
//! not there at all, which in a chunked array means "the fill value") and how the rows stand in them; [`Place`] says the
//! second in five numbers.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::layout::row::Place;
use crate::memory::block::Block;
use crate::source::Io;
use crate::source::descriptors::Share;
use crate::source::mmap::Map;
use crate::source::pread;
use crate::source::slots::Opened;

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
    /// Of the process-wide budget, where there is a descriptor.
    share: Option<Share>,
}

impl OpenFile {
    /// A file whose `len` bytes were looked at just now. Takes a share of the descriptors that may be kept, if one is left.
    pub fn new(path: PathBuf, body: Body, len: u64, place: Place) -> OpenFile {
        let share = matches!(body, Body::Mapped(..) | Body::Read(_)).then(Share::take);
        OpenFile { path, body, len, place, share }
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
        self.share.as_ref().is_some_and(Share::may_keep)
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

/// The error for rows that an index names and the file does not hold.
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

/// The body of a file whose rows are read where they lie, in jumps.
pub(crate) fn map_or_read(file: File, path: &Path, len: u64, io: Io) -> Result<Body> {
    // Also for a mapped file: the questions about cached pages go through the descriptor.
    pread::expect_random(&file);
    match io {
        Io::Mmap if len > 0 => {
            let bytes = usize::try_from(len)
                .map_err(|_| Error::new(Kind::Access, "does not fit this machine's address space").at(path))?;
            let map = Map::open(&file, bytes).map_err(|e| Error::from_io(&e, path, "map"))?;
            Ok(Body::Mapped(file, map))
        }
        Io::Mmap | Io::Pread => Ok(Body::Read(file)),
    }
}

impl Opened for OpenFile {
    fn may_keep(&self) -> bool {
        OpenFile::may_keep(self)
    }
}
