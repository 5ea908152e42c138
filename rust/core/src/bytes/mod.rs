//! Where bytes lie. [`Files`] is what the rest of the core knows: numbered files that hold a dataset's rows, opened when
//! first touched and asked for their length again before rows are taken from them. [`FileTable`] lists them,
//! [`chunks`] computes their names.

pub mod chunks;
pub mod codecs;
pub mod decoded;
mod files;
pub mod inflate;
pub(crate) mod lz4;
pub mod mmap;
mod open;
pub mod output;
pub mod pread;
pub mod shards;

use std::sync::{Arc, RwLock};

pub(crate) use files::map_or_read;
pub use files::{FileTable, RowFile, RowsIn};
pub use open::{Body, OpenFile, Place, View};
pub(crate) use open::{budget, files_at_once, open_regular, outside};

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// Through a mapping: fastest from the page cache, and the only way to give views.
    Mmap,
    /// Positioned reads into the caller's memory: never maps, so nothing a file does later can fault.
    Pread,
}

impl Io {
    /// `"mmap"`, `"pread"`, or `None` for another word.
    pub fn from_name(name: &str) -> Option<Io> {
        match name {
            "mmap" => Some(Io::Mmap),
            "pread" => Some(Io::Pread),
            _ => None,
        }
    }
}

/// What all rows of a dataset have in common.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Elements.
    pub width: usize,
    /// Their stored type.
    pub dtype: DType,
    /// `width` times the type's size.
    pub bytes: usize,
}

impl Row {
    /// Rows of 1 byte to 4 GiB.
    pub fn new(width: u64, dtype: DType) -> Result<Row> {
        let size = dtype.size().ok_or_else(|| {
            Error::new(Kind::Unsupported, format!("rows of {} cannot be read as numpy arrays", dtype.name()))
        })?;
        let bytes = usize::try_from(width)
            .ok()
            .and_then(|w| w.checked_mul(size))
            .filter(|bytes| (1..=1 << 32).contains(bytes))
            .ok_or_else(|| {
                Error::new(Kind::Format, format!("a row of {width} x {} is not 1 byte to 4 GiB", dtype.name()))
            })?;
        Ok(Row { width: width as usize, dtype, bytes })
    }
}

/// The numbered files that hold a dataset's rows, all rows of one width and type.
pub trait Files: Send + Sync {
    /// What a row is.
    fn row(&self) -> Row;

    /// The file, open and long enough.
    fn get(&self, file: u64) -> Result<Arc<OpenFile>>;

    /// Bits that hold any address inside a file; the bits above hold any file's number.
    fn address_bits(&self) -> u32 {
        40
    }

    /// Addresses from one row to the next of its run, in this file: what [`Place`] says, before it is open.
    fn stride(&self, _file: u64) -> u64 {
        1
    }

    /// Consecutive files that the rows of this one are split over, this being the first.
    fn split(&self, _file: u64) -> u64 {
        1
    }

    /// Whether opening a file decodes it, so that going back and forth between files is to be avoided.
    fn decodes(&self) -> bool {
        false
    }
}

/// Places that keep opened files: file `n` lives in slot `n % len`. A slot is only ever *tried*, never waited for, so that
/// one locked by a thread that does not exist in a forked child costs that child an extra `open` and nothing else.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Box<[Slot<T>]>,
}

/// A file's number and the file.
type Slot<T> = RwLock<Option<(u64, Arc<T>)>>;

/// What is opened, and kept open as long as descriptors last.
pub(crate) trait Opened {
    /// Whether it may be kept.
    fn may_keep(&self) -> bool;
}

impl Opened for OpenFile {
    fn may_keep(&self) -> bool {
        OpenFile::may_keep(self)
    }
}

impl<T: Opened> Slots<T> {
    pub(crate) fn new(files: u64) -> Slots<T> {
        // More than the budget of kept descriptors would never fill.
        let len = usize::try_from(files).unwrap_or(usize::MAX).min(budget()).max(1);
        Slots { slots: (0..len).map(|_| RwLock::new(None)).collect() }
    }

    pub(crate) fn get(&self, number: u64, open: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let slot = &self.slots[(number % self.slots.len() as u64) as usize];
        if let Ok(guard) = slot.try_read()
            && let Some((held, file)) = guard.as_ref()
            && *held == number
        {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(open()?);
        if file.may_keep()
            && let Ok(mut guard) = slot.try_write()
        {
            // Another thread may have been first; either file will do.
            *guard = Some((number, Arc::clone(&file)));
        }
        Ok(file)
    }

    /// Drops all kept files; those in use are closed when their readers finish.
    pub(crate) fn clear(&self) {
        for slot in &self.slots {
            if let Ok(mut guard) = slot.try_write() {
                *guard = None;
            }
        }
    }
}
