//! The files of a dataset, opened on demand and checked before use.
//!
//! A dataset can have more files than a process may open, and a process can fork while another thread opens one. So:
//! opened files are kept while a process-wide budget of descriptors lasts and are opened for the single call after
//! that; and the slot that keeps a file is only ever *tried*, never waited for, so that a slot locked by a thread that
//! does not exist in a forked child costs that child an extra `open` and nothing else.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, RwLock};

use super::mmap::Map;
use super::{Io, pread};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::parse::safetensors;

/// Where rows lie in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowsIn {
    /// The file is rows from its first byte on; it must hold at least this many.
    Raw(u64),
    /// The rows are this 2-D tensor of a safetensors file.
    Tensor(String),
}

/// One file of a dataset, not opened yet.
#[derive(Clone, Debug)]
pub struct RowFile {
    /// Where it is.
    pub path: PathBuf,
    /// Which of its bytes are rows.
    pub rows: RowsIn,
}

/// A file that is open, and where its rows lie.
#[derive(Debug)]
pub struct OpenFile {
    path: PathBuf,
    file: File,
    /// The mapping, in `mmap` mode; an empty file has none.
    map: Option<Map>,
    /// Bytes the file had when it was opened; all of them are mapped.
    len: u64,
    /// Offset of the first row.
    start: u64,
    rows: u64,
    row_bytes: usize,
    /// Given back to the process-wide budget when the file closes.
    kept: bool,
}

impl OpenFile {
    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The descriptor.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The mapping, in `mmap` mode.
    pub fn map(&self) -> Option<&Map> {
        self.map.as_ref()
    }

    /// Rows the file holds.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Offset of a row's first byte; `row` may be one past the last. `open` proved that the product cannot overflow.
    #[inline]
    pub fn offset(&self, row: u64) -> u64 {
        debug_assert!(row <= self.rows);
        self.start + row * self.row_bytes as u64
    }

    /// Fails if the file is shorter than it was when opened: its mapped pages past the new end would fault.
    pub fn check_length(&self) -> Result<()> {
        // fstat and not File::metadata, whose statx costs twice as much; single-row reads feel it.
        let stat = rustix::fs::fstat(&self.file).map_err(|e| Error::from_io(&e.into(), &self.path, "look at"))?;
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
        if self.kept {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Files this process keeps open, over all datasets.
static KEPT: AtomicUsize = AtomicUsize::new(0);

/// Half of the descriptors this process may have; the rest is the program's.
fn budget() -> usize {
    static BUDGET: OnceLock<usize> = OnceLock::new();
    // A forked child may find this being initialised forever only if the fork hit the few nanoseconds of the first
    // call ever; `FileTable::new` makes that call before any file is touched.
    *BUDGET.get_or_init(|| {
        let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        soft.map_or(4096, |n| usize::try_from(n / 2).unwrap_or(4096)).clamp(16, 65_536)
    })
}

/// Files that one thread of `threads` may hold open at once without keeping them: all threads together stay within half of
/// what the budget leaves.
pub(crate) fn files_at_once(threads: usize) -> usize {
    (budget() / 2 / threads.max(1)).clamp(2, 1024)
}

fn keep_one() -> bool {
    KEPT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < budget()).then_some(n + 1)).is_ok()
}

/// The files that hold a dataset's rows, all rows of one width and type.
#[derive(Debug)]
pub struct FileTable {
    files: Vec<RowFile>,
    slots: Vec<RwLock<Option<Arc<OpenFile>>>>,
    width: usize,
    dtype: DType,
    row_bytes: usize,
    io: Io,
}

impl FileTable {
    /// A table of files with rows of `width` elements. Opens nothing.
    pub fn new(files: Vec<RowFile>, width: u64, dtype: DType, io: Io) -> Result<FileTable> {
        budget();
        if files.len() >= 1 << 24 {
            return Err(Error::new(Kind::Format, format!("{} files; at most 2^24 - 1 are supported", files.len())));
        }
        let row_bytes = dtype
            .size()
            .ok_or_else(|| {
                Error::new(Kind::Unsupported, format!("rows of {} cannot be read as numpy arrays", dtype.name()))
            })
            .and_then(|size| {
                usize::try_from(width)
                    .ok()
                    .and_then(|w| w.checked_mul(size))
                    .filter(|bytes| (1..=1 << 32).contains(bytes))
                    .ok_or_else(|| {
                        Error::new(Kind::Format, format!("a row of {width} x {} is not 1 byte to 4 GiB", dtype.name()))
                    })
            })?;
        let slots = files.iter().map(|_| RwLock::new(None)).collect();
        Ok(FileTable { files, slots, width: width as usize, dtype, row_bytes, io })
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Elements per row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Bytes per row, as stored.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The stored element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How rows are read.
    pub fn io(&self) -> Io {
        self.io
    }

    /// The file, open.
    pub fn get(&self, index: usize) -> Result<Arc<OpenFile>> {
        let (Some(slot), Some(file)) = (self.slots.get(index), self.files.get(index)) else {
            return Err(Error::new(Kind::Internal, format!("file {index} of {}", self.files.len())));
        };
        if let Ok(guard) = slot.try_read()
            && let Some(open) = guard.as_ref()
        {
            return Ok(Arc::clone(open));
        }
        let open = Arc::new(self.open(file)?);
        if open.kept
            && let Ok(mut guard) = slot.try_write()
        {
            // Another thread may have been first; either file will do.
            return Ok(Arc::clone(guard.get_or_insert(open)));
        }
        Ok(open)
    }

    /// Rows that lie one after another, as bytes that can be looked at in place; `None` where the file is not mapped.
    /// Cold pages are put on their way: who asks for a view is about to read it from front to back.
    pub fn view(&self, index: usize, row: u64, rows: u64) -> Result<Option<View>> {
        let file = self.get(index)?;
        if row.checked_add(rows).is_none_or(|end| end > file.rows) {
            let held = file.rows;
            return Err(Error::new(
                Kind::Format,
                format!("the index names rows {row} to {row} + {rows}, but the file holds {held} rows"),
            )
            .at(&file.path));
        }
        file.check_length()?;
        let (begin, end) = (file.offset(row) as usize, file.offset(row + rows) as usize);
        let Some(map) = file.map() else { return Ok(None) };
        if rows > 0 && [begin, end - 1].iter().any(|at| pread::is_cached(&file.file, *at as u64) == pread::Cached::No) {
            map.will_need(begin, end - begin);
        }
        Ok(Some(View { file, begin, end }))
    }

    fn open(&self, spec: &RowFile) -> Result<OpenFile> {
        let path = &spec.path;
        let (file, len) = open_regular(path)?;
        let (start, rows) = match &spec.rows {
            RowsIn::Raw(rows) => (0, *rows),
            RowsIn::Tensor(key) => self.find_tensor(&file, path, len, key)?,
        };
        let end = rows.checked_mul(self.row_bytes as u64).and_then(|b| b.checked_add(start));
        let Some(end) = end.filter(|_| rows < 1 << 40) else {
            return Err(
                Error::new(Kind::Format, format!("{rows} rows of {} bytes is too large", self.row_bytes)).at(path)
            );
        };
        if len < end {
            return Err(Error::new(
                Kind::Truncated,
                format!("expected at least {end} bytes ({rows} rows of {} bytes), found {len}", self.row_bytes),
            )
            .at(path)
            .byte(len));
        }
        let map = match self.io {
            Io::Mmap if len > 0 => {
                // For the questions about cached pages, which go through the descriptor.
                pread::expect_random(&file);
                let bytes = usize::try_from(len)
                    .map_err(|_| Error::new(Kind::Access, "does not fit this machine's address space").at(path))?;
                Some(Map::open(&file, bytes).map_err(|e| Error::from_io(&e, path, "map"))?)
            }
            Io::Mmap => None,
            Io::Pread => {
                pread::expect_random(&file);
                None
            }
        };
        let kept = keep_one();
        Ok(OpenFile { path: path.clone(), file, map, len, start, rows, row_bytes: self.row_bytes, kept })
    }

    fn find_tensor(&self, file: &File, path: &Path, len: u64, key: &str) -> Result<(u64, u64)> {
        let header = safetensors::read_header(file, path, len)?;
        let Some(tensor) = header.tensor(key) else {
            let found: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).take(8).collect();
            return Err(Error::new(Kind::Format, format!("expected a tensor named '{key}', found {found:?}")).at(path));
        };
        if tensor.dtype != self.dtype {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "tensor '{key}' is {}, but the dataset's first file has {}; one dataset, one dtype",
                    tensor.dtype.name(),
                    self.dtype.name()
                ),
            )
            .at(path));
        }
        match tensor.shape[..] {
            [rows, width] if width == self.width as u64 => Ok((header.data_start + tensor.begin, rows)),
            _ => Err(Error::new(
                Kind::Format,
                format!("tensor '{key}' has shape {:?}, expected (rows, {})", tensor.shape, self.width),
            )
            .at(path)),
        }
    }
}

/// Mapped bytes of a file, and a share in the map: the bytes stay readable when the table is gone.
#[derive(Debug)]
pub struct View {
    file: Arc<OpenFile>,
    begin: usize,
    end: usize,
}

impl View {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        self.file.map().map_or(&[], |map| &map.bytes()[self.begin..self.end])
    }
}

/// Opens a regular file (symlinks are followed) and tells its length.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64)> {
    // Looking before opening: opening a named pipe would wait for a writer.
    let meta = std::fs::metadata(path).map_err(|e| Error::from_io(&e, path, "look at"))?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "a folder" } else { "a special file" };
        return Err(Error::new(Kind::NotAFile, format!("expected a regular file, found {what}")).at(path));
    }
    let file = File::open(path).map_err(|e| Error::from_io(&e, path, "open"))?;
    let meta = file.metadata().map_err(|e| Error::from_io(&e, path, "look at"))?;
    Ok((file, meta.len()))
}
