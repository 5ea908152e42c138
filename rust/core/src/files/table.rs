//! A list of files, opened on demand and checked before use.
//!
//! A dataset can have more files than a process may open, and a process can fork while another thread opens one. So opened files
//! are cached within a process-wide budget of descriptors, and beyond it opened for a single call; for forks see `Slots`.

use std::collections::HashMap;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::{Body, OpenFile};
use crate::layout::row::{FindRows, FoundRows, Place, Row};
use crate::layout::{address_bits, too_far};
use crate::location::Location;
use crate::source::listed::ListedFiles;
use crate::source::slots::Slots;
use crate::source::{Access, Io, Source, Store, Version, Wishes, replaced};
use crate::threads::{self, Context, ForkSafe, Stop, Watch};

/// The position of rows in a file.
#[derive(Clone, Debug)]
pub enum RowsIn {
    /// Rows from the first byte on; the file must contain at least this many.
    Raw(u64),
    /// Rows at an offset: one of several arrays in a file, or after a header that was already parsed.
    At {
        /// Offset of the first row.
        start: u64,
        /// The file must contain at least this many rows.
        rows: u64,
        /// Whether elements are byte-swapped.
        swapped: bool,
    },
    /// Rows some bytes apart, addressed by byte: a column of wider rows, or tensors that alternate with others.
    Apart {
        /// Bytes from one row of a run to the next.
        step: u64,
        /// Whether elements are byte-swapped.
        swapped: bool,
    },
    /// Described by the file's own header.
    Found(Arc<dyn FindRows>),
}

/// A file of a dataset, not yet opened.
#[derive(Clone, Debug)]
pub struct RowFile {
    /// Its location.
    pub location: Location,
    /// The position of its rows.
    pub rows: RowsIn,
}

/// The files of a dataset's rows; all rows have the same width and dtype.
#[derive(Debug)]
pub struct FileTable {
    files: Vec<RowFile>,
    store: Arc<dyn Store>,
    /// Cached, because every gather needs it.
    wishes: Option<Wishes>,
    decodes: bool,
    /// Files without headers may grow.
    access: Access,
    slots: Slots<OpenFile>,
    headers: Headers,
    row: Row,
}

/// The version of each file as it was first opened, and the rows that were found in it. Stored apart from descriptors: a file that
/// was closed for lack of descriptors is reopened in microseconds, but its header may be 100 MB of JSON, and it must still be the
/// same file. The lock is only tried, not waited for: a child forked while another thread held it parses the header again.
#[derive(Debug, Default)]
struct Headers {
    found: ForkSafe<HashMap<u64, (Version, Option<FoundRows>)>>,
    #[cfg(test)]
    parsed: std::sync::atomic::AtomicUsize,
}

impl Files for FileTable {
    fn row(&self) -> Row {
        self.row
    }

    fn get(&self, number: u64, stop: &Stop) -> Result<Arc<OpenFile>> {
        let file = self.file(number)?;
        self.slots.get(number, || self.place(number, file, self.store.open(&file.location, self.access, stop), stop))
    }

    #[expect(clippy::disallowed_methods, reason = "near files are opened and their headers read in a moment")]
    fn open_many(&self, numbers: &[u64], watch: Watch<'_>) -> Result<Vec<Arc<OpenFile>>> {
        let mut open: Vec<Option<Arc<OpenFile>>> = numbers.iter().map(|number| self.slots.kept(*number)).collect();
        let lacking: Vec<usize> = (0..numbers.len()).filter(|i| open[*i].is_none()).collect();
        let files: Vec<&RowFile> = lacking.iter().map(|i| self.file(numbers[*i])).collect::<Result<_>>()?;
        let locations: Vec<&Location> = files.iter().map(|file| &file.location).collect();
        let opened = self.store.open_together(&locations, self.access, &mut *watch)?;
        // Reading a header is a separate request.
        let headers = files.iter().any(|file| matches!(file.rows, RowsIn::Found(_)));
        let opened = lacking.iter().map(|i| numbers[*i]).zip(files).zip(opened);
        let place = |_: usize, ((number, file), source): ((u64, &RowFile), _), stop: &Stop| {
            self.slots.get(number, || self.place(number, file, source, stop))
        };
        let placed = match self.wishes {
            Some(wishes) if headers => threads::map_each_waiting(opened, wishes.parallel, &place, watch)?,
            _ => opened.map(|each| place(0, each, Stop::never())).collect::<Result<_>>()?,
        };
        for (i, file) in lacking.into_iter().zip(placed) {
            open[i] = Some(file);
        }
        Ok(open.into_iter().flatten().collect())
    }

    fn stride(&self, file: u64) -> u64 {
        match usize::try_from(file).ok().and_then(|n| self.files.get(n)).map(|file| &file.rows) {
            Some(RowsIn::Apart { step, .. }) => *step,
            _ => 1,
        }
    }

    fn address_bits(&self) -> u32 {
        address_bits(self.files.len())
    }

    #[expect(clippy::disallowed_methods, reason = "its bytes are in memory")]
    fn decoded(&self, number: u64) -> Option<Arc<OpenFile>> {
        let file = self.file(number).ok()?;
        let open = || self.place(number, file, self.store.decoded(&file.location)?, Stop::never()).ok().map(Arc::new);
        self.slots.kept(number).or_else(open)
    }

    fn decodes(&self) -> bool {
        self.decodes
    }

    fn wishes(&self) -> Option<Wishes> {
        // A store's measurements change.
        self.wishes.and_then(|_| self.store.wishes())
    }
}

impl FileTable {
    /// A table of local files with rows of `width` elements, as they are now. Opens nothing.
    pub fn new(files: Vec<RowFile>, width: u64, dtype: DType, io: Io) -> Result<FileTable> {
        let store = ListedFiles::now(io, files.iter().map(|file| &file.location))?;
        FileTable::of(Arc::new(store), files, width, dtype)
    }

    /// A table of a store's files.
    pub fn of(store: Arc<dyn Store>, files: Vec<RowFile>, width: u64, dtype: DType) -> Result<FileTable> {
        if files.len() >= 1 << 24 {
            return Err(Error::new(Kind::Format, format!("{} files; at most 2^24 - 1 are supported", files.len())));
        }
        let row = Row::new(width, dtype)?;
        let slots = Slots::new(files.len() as u64);
        let (wishes, decodes) = (store.wishes(), store.decodes());
        let is_raw = files.iter().all(|file| matches!(file.rows, RowsIn::Raw(_)));
        let access = if is_raw { Access::Growing } else { Access::Kept };
        Ok(FileTable { files, store, wishes, decodes, access, slots, headers: Headers::default(), row })
    }

    /// The same files, which have no headers and may grow while they are read.
    #[must_use]
    pub fn growing(mut self) -> FileTable {
        self.access = Access::Growing;
        self
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there are no files.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Closes cached files.
    pub fn release(&self) {
        self.slots.clear();
    }

    fn file(&self, number: u64) -> Result<&RowFile> {
        let file = usize::try_from(number).ok().and_then(|n| self.files.get(n));
        file.ok_or_else(|| Error::new(Kind::Internal, format!("file {number} of {}", self.files.len())))
    }

    /// Locates the rows of an opened file, and checks them against its length.
    fn place(&self, number: u64, spec: &RowFile, opened: Result<Box<dyn Source>>, stop: &Stop) -> Result<OpenFile> {
        let source = opened?;
        let found = self.recall(number, &*source)?;
        let FoundRows { start, rows, swapped } = match &spec.rows {
            RowsIn::Apart { step, swapped } => return self.apart(spec, source, *step, *swapped),
            RowsIn::Raw(rows) => FoundRows { start: 0, rows: *rows, swapped: false },
            RowsIn::At { start, rows, swapped } => FoundRows { start: *start, rows: *rows, swapped: *swapped },
            RowsIn::Found(finder) => found.map_or_else(|| self.find(number, &*source, &**finder, stop), Ok)?,
        };
        let (len, bytes) = (source.size(), self.row.bytes);
        let Some(place) = Place::packed(start, rows, bytes).filter(|_| rows < 1 << 40) else {
            return Err(
                Error::new(Kind::Format, format!("{rows} rows of {bytes} bytes is too large")).at(&spec.location)
            );
        };
        if len < place.end {
            let from = if start == 0 { String::new() } else { format!(" from byte {start} on") };
            let need = format!("expected at least {} bytes ({rows} rows of {bytes} bytes{from})", place.end);
            return Err(Error::new(Kind::Truncated, format!("{need}, found {len}")).at(&spec.location).byte(len));
        }
        Ok(OpenFile::new(Body::Stored(source), place.swapped_if(swapped)))
    }

    /// A file whose rows are addressed by byte.
    fn apart(&self, spec: &RowFile, source: Box<dyn Source>, step: u64, swapped: bool) -> Result<OpenFile> {
        let (end, used) = (source.size(), self.row.bytes);
        if end >> self.address_bits() > 0 {
            return Err(too_far(end, self.files.len()).at(&spec.location));
        }
        let place = Place { start: 0, end, unit: 1, step, used, column: 0, swapped };
        Ok(OpenFile::new(Body::Stored(source), place))
    }

    /// The rows that were found in a file when it was opened before. Fails if it was another file then.
    fn recall(&self, number: u64, source: &dyn Source) -> Result<Option<FoundRows>> {
        let (Access::Kept, Some(version)) = (self.access, source.version()) else { return Ok(None) };
        let Some(mut found) = self.headers.found.try_lock() else { return Ok(None) };
        let (first, rows) = found.entry(number).or_insert_with(|| (version.clone(), None));
        if !first.has_content_of(&version) {
            return Err(replaced(source.location(), "its version differs from that of the first read"));
        }
        Ok(*rows)
    }

    /// The rows of a file, by its header.
    fn find(&self, number: u64, source: &dyn Source, finder: &dyn FindRows, stop: &Stop) -> Result<FoundRows> {
        #[cfg(test)]
        self.headers.parsed.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let rows = finder.find(source, &self.row, &mut Context::of_part(stop))?;
        if let Some(mut found) = self.headers.found.try_lock()
            && let Some((_, known)) = found.get_mut(&number)
        {
            *known = Some(rows);
        }
        Ok(rows)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::Ordering;

    use std::path::Path;

    use super::*;
    use crate::parse::safetensors::TensorRows;

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
        let file = RowFile { location: (&path).into(), rows: RowsIn::Found(Arc::new(TensorRows("b".to_owned()))) };
        let table = FileTable::new(vec![file], 1, DType::U8, Io::Mmap).unwrap();
        let rows = |table: &FileTable| {
            let open = table.get(0, &Stop::new()).unwrap();
            let start = open.place().start as usize;
            open.bytes().unwrap()[start..start + 4].to_vec()
        };
        for _ in 0..3 {
            assert_eq!(rows(&table), [0, 1, 2, 3]);
            table.release();
        }
        assert_eq!(table.headers.parsed.load(Ordering::Relaxed), 1);
        // The same length, but the tensor begins elsewhere.
        std::fs::remove_file(&path).unwrap();
        write(&path, 6);
        let error = table.get(0, &Stop::new()).unwrap_err();
        assert!(error.kind == Kind::Format && error.detail.contains("was replaced"), "{error}");
    }

    /// Of any source, and however it was replaced: in place, or by another file of its name.
    #[test]
    fn a_file_that_was_replaced_is_not_read_with_what_was_known_of_the_old_one() {
        for (io, in_place, release) in [Io::Mmap, Io::Pread]
            .into_iter()
            .flat_map(|io| [(io, true, false), (io, false, false), (io, true, true), (io, false, true)])
        {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a");
            write(&path, 5);
            let rows = RowsIn::At { start: 8, rows: 4, swapped: false };
            let table = FileTable::new(vec![RowFile { location: (&path).into(), rows }], 1, DType::U8, io).unwrap();
            table.get(0, &Stop::new()).unwrap().unchanged().unwrap();
            let target = if in_place { path.clone() } else { folder.path().join("b") };
            write(&target, 4000);
            std::fs::rename(&target, &path).unwrap();
            if release {
                table.release();
            }
            let error = table.get(0, &Stop::new()).and_then(|open| open.unchanged()).unwrap_err();
            assert!(error.kind == Kind::Format && error.detail.contains("was replaced"), "{error}");
        }
    }

    #[test]
    fn raw_rows_may_grow_and_a_file_without_a_name_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [1, 2, 3]).unwrap();
        let file = |rows| vec![RowFile { location: (&path).into(), rows }];
        let raw = FileTable::new(file(RowsIn::Raw(3)), 1, DType::U8, Io::Mmap).unwrap();
        raw.get(0, &Stop::new()).unwrap().unchanged().unwrap();
        std::fs::write(&path, [1, 2, 3, 4]).unwrap();
        raw.get(0, &Stop::new()).unwrap().unchanged().unwrap();
        let kept =
            FileTable::new(file(RowsIn::At { start: 0, rows: 3, swapped: false }), 1, DType::U8, Io::Mmap).unwrap();
        kept.get(0, &Stop::new()).unwrap().unchanged().unwrap();
        std::fs::remove_file(&path).unwrap();
        kept.get(0, &Stop::new()).unwrap().unchanged().unwrap();
    }
}
