//! A list of files, opened on demand and checked before use.
//!
//! A dataset can have more files than a process may open, and a process can fork while another thread opens one. So:
//! opened files are kept while a process-wide budget of descriptors lasts and are opened for the single call after
//! that; see [`super::Slots`] for the fork.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::mmap::Map;
use super::{Body, Files, Io, OpenFile, Place, Row, Slots, open_regular, pread};
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

/// The files that hold a dataset's rows, all rows of one width and type.
#[derive(Debug)]
pub struct FileTable {
    files: Vec<RowFile>,
    slots: Slots<OpenFile>,
    row: Row,
    io: Io,
}

impl Files for FileTable {
    fn row(&self) -> Row {
        self.row
    }

    fn get(&self, number: u64) -> Result<Arc<OpenFile>> {
        let Some(file) = usize::try_from(number).ok().and_then(|n| self.files.get(n)) else {
            return Err(Error::new(Kind::Internal, format!("file {number} of {}", self.files.len())));
        };
        self.slots.get(number, || self.open(file))
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
        Ok(FileTable { files, slots, row, io })
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

    fn open(&self, spec: &RowFile) -> Result<OpenFile> {
        let path = &spec.path;
        let (file, len) = open_regular(path)?;
        let (start, rows) = match &spec.rows {
            RowsIn::Raw(rows) => (0, *rows),
            RowsIn::Tensor(key) => self.find_tensor(&file, path, len, key)?,
        };
        let place = Place::packed(start, rows, self.row.bytes).filter(|_| rows < 1 << 40);
        let Some(place) = place else {
            return Err(
                Error::new(Kind::Format, format!("{rows} rows of {} bytes is too large", self.row.bytes)).at(path)
            );
        };
        if len < place.end {
            return Err(Error::new(
                Kind::Truncated,
                format!("expected at least {} bytes ({rows} rows of {} bytes), found {len}", place.end, self.row.bytes),
            )
            .at(path)
            .byte(len));
        }
        Ok(OpenFile::new(path.clone(), map_or_read(file, path, len, self.io)?, len, place))
    }

    fn find_tensor(&self, file: &File, path: &Path, len: u64, key: &str) -> Result<(u64, u64)> {
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
