//! A list of files, opened on demand and checked before use.
//!
//! A dataset can have more files than a process may open, and a process can fork while another thread opens one. So:
//! opened files are kept while a process-wide budget of descriptors lasts and are opened for the single call after
//! that; see [`Slots`] for the fork.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::{OpenFile, map_or_read};
use crate::layout::row::{Place, Row};
use crate::parse::safetensors;
use crate::source::Io;
use crate::source::descriptors::open_regular;
use crate::source::slots::Slots;

/// Where rows lie in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowsIn {
    /// The file is rows from its first byte on; it must hold at least this many.
    Raw(u64),
    /// Rows from some byte on: an array in a file of several, or after a header that was read already.
    At {
        /// The first row's first byte.
        start: u64,
        /// The file must hold at least this many.
        rows: u64,
        /// Whether elements are in the other byte order.
        swapped: bool,
    },
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

/// The files that hold a dataset's rows, all rows of one width and type.
#[derive(Debug)]
pub struct FileTable {
    files: Vec<RowFile>,
    slots: Slots<OpenFile>,
    headers: Headers,
    row: Row,
    io: Io,
}

/// Where a tensor lies, by the number of its file. Kept apart from descriptors: a file that was closed to make room for others
/// is opened again in microseconds, but its header may be 100 MB of JSON.
#[derive(Debug, Default)]
struct Headers {
    found: Mutex<HashMap<u64, Found>>,
    #[cfg(test)]
    parsed: std::sync::atomic::AtomicUsize,
}

/// First byte and rows of a tensor, as long as the file is the same.
#[derive(Clone, Copy, Debug)]
struct Found {
    file: Identity,
    start: u64,
    rows: u64,
}

/// Device, inode, length, and the times of the last change of content and of metadata, in ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity(u64, u64, u64, [i64; 4]);

impl Identity {
    fn of(file: &File) -> Option<Identity> {
        use std::os::unix::fs::MetadataExt;
        let meta = file.metadata().ok()?;
        let times = [meta.mtime(), meta.mtime_nsec(), meta.ctime(), meta.ctime_nsec()];
        Some(Identity(meta.dev(), meta.ino(), meta.len(), times))
    }
}

impl Files for FileTable {
    fn row(&self) -> Row {
        self.row
    }

    fn get(&self, number: u64) -> Result<Arc<OpenFile>> {
        let Some(file) = usize::try_from(number).ok().and_then(|n| self.files.get(n)) else {
            return Err(Error::new(Kind::Internal, format!("file {number} of {}", self.files.len())));
        };
        self.slots.get(number, || self.open(number, file))
    }
}

impl FileTable {
    /// A table of files with rows of `width` elements. Opens nothing.
    pub fn new(files: Vec<RowFile>, width: u64, dtype: DType, io: Io) -> Result<FileTable> {
        if files.len() >= 1 << 24 {
            return Err(Error::new(Kind::Format, format!("{} files; at most 2^24 - 1 are supported", files.len())));
        }
        let row = Row::new(width, dtype)?;
        let slots = Slots::new(files.len() as u64);
        Ok(FileTable { files, slots, headers: Headers::default(), row, io })
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Closes kept files.
    pub fn release(&self) {
        self.slots.clear();
    }

    fn open(&self, number: u64, spec: &RowFile) -> Result<OpenFile> {
        let path = &spec.path;
        let (file, len) = open_regular(path)?;
        let (start, rows, swapped) = match &spec.rows {
            RowsIn::Raw(rows) => (0, *rows, false),
            RowsIn::At { start, rows, swapped } => (*start, *rows, *swapped),
            RowsIn::Tensor(key) => {
                let (start, rows) = self.find_tensor(number, &file, path, len, key)?;
                (start, rows, false)
            }
        };
        let place = Place::packed(start, rows, self.row.bytes).filter(|_| rows < 1 << 40);
        let Some(place) = place else {
            return Err(
                Error::new(Kind::Format, format!("{rows} rows of {} bytes is too large", self.row.bytes)).at(path)
            );
        };
        let place = place.swapped_if(swapped);
        if len < place.end {
            return Err(Error::new(
                Kind::Truncated,
                match start {
                    0 => format!(
                        "expected at least {} bytes ({rows} rows of {} bytes), found {len}",
                        place.end, self.row.bytes
                    ),
                    _ => format!(
                        "expected at least {} bytes ({rows} rows of {} bytes from byte {start} on), found {len}",
                        place.end, self.row.bytes
                    ),
                },
            )
            .at(path)
            .byte(len));
        }
        Ok(OpenFile::new(path.clone(), map_or_read(file, path, len, self.io)?, len, place))
    }

    /// First byte and rows of a tensor: of this very file as it was found before, or read now.
    fn find_tensor(&self, number: u64, file: &File, path: &Path, len: u64, key: &str) -> Result<(u64, u64)> {
        let identity = Identity::of(file);
        // Tried and not waited for: a child forked while another thread was in here parses again.
        let known = self.headers.found.try_lock().ok().and_then(|found| found.get(&number).copied());
        if let Some(known) = known
            && Some(known.file) == identity
        {
            return Ok((known.start, known.rows));
        }
        let (start, rows) = self.read_header(file, path, len, key)?;
        if let (Some(file), Ok(mut found)) = (identity, self.headers.found.try_lock()) {
            found.insert(number, Found { file, start, rows });
        }
        Ok((start, rows))
    }

    fn read_header(&self, file: &File, path: &Path, len: u64, key: &str) -> Result<(u64, u64)> {
        #[cfg(test)]
        self.headers.parsed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let header = safetensors::read_header(file, path, len)?;
        let Some(tensor) = header.tensor(key) else {
            let found: Vec<&str> = header.tensors.iter().map(|t| t.name.as_str()).take(8).collect();
            return Err(Error::new(Kind::Format, format!("expected a tensor named '{key}', found {found:?}")).at(path));
        };
        if tensor.dtype != self.row.dtype {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "tensor '{key}' is {}, but the dataset's first file has {}; one dataset, one dtype",
                    tensor.dtype.name(),
                    self.row.dtype.name()
                ),
            )
            .at(path));
        }
        match tensor.shape[..] {
            [rows, width] if width == self.row.width as u64 => Ok((header.data_start + tensor.begin, rows)),
            _ => Err(Error::new(
                Kind::Format,
                format!("tensor '{key}' has shape {:?}, expected (rows, {})", tensor.shape, self.row.width),
            )
            .at(path)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    fn write(path: &Path, skipped: usize) {
        let header = format!(
            r#"{{"a":{{"dtype":"U8","shape":[{skipped}],"data_offsets":[0,{skipped}]}},"b":{{"dtype":"U8","shape":[4,1],"data_offsets":[{skipped},{}]}}}}"#,
            skipped + 4
        );
        let bytes =
            [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![9; skipped], &[0, 1, 2, 3]].concat();
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn a_header_is_read_again_only_if_the_file_is_another() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        write(&path, 5);
        let file = RowFile { path: path.clone(), rows: RowsIn::Tensor("b".to_owned()) };
        let table = FileTable::new(vec![file], 1, DType::U8, Io::Mmap).unwrap();
        let rows = |table: &FileTable| {
            let open = table.get(0).unwrap();
            let start = open.place().start as usize;
            open.bytes().unwrap()[start..start + 4].to_vec()
        };
        for _ in 0..3 {
            assert_eq!(rows(&table), [0, 1, 2, 3]);
            table.release();
        }
        assert_eq!(table.headers.parsed.load(Ordering::Relaxed), 1);
        // As long as before, but the tensor begins elsewhere.
        std::fs::remove_file(&path).unwrap();
        write(&path, 6);
        assert_eq!(rows(&table), [0, 1, 2, 3]);
        assert_eq!(table.headers.parsed.load(Ordering::Relaxed), 2);
    }
}
