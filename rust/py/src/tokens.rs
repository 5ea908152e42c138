//! Token caches for Python: [`TokenField`] reads, [`write`] writes a field, [`order`] shuffles.

pub mod order;
pub mod write;

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::Arc;

use actshard_core::source::Io;
use actshard_core::source::local::Local;
use actshard_core::tokens::array::BlockCache as Blocks;
use actshard_core::tokens::batch::{self, Loss, Packing, TokenBatch};
use actshard_core::tokens::jagged::{Cursor, ElementRange, Field, FieldShard};
use actshard_core::tokens::ledger::LedgerState;
use actshard_core::tokens::pack::{Overlong, Packer};
use actshard_core::{Error, Finding, Kind, threads};
use numpy::{
    PyArray1, PyArrayDescr, PyArrayDescrMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::place::{NamedPlace, remote_store};
use crate::{buffer, detach, errors};

/// A cache of decoded blocks, shared by the fields of a token cache.
#[pyclass(frozen, module = "actshard._native")]
pub struct BlockCache {
    blocks: Arc<Blocks>,
}

#[pymethods]
impl BlockCache {
    #[new]
    fn new(budget: u64) -> BlockCache {
        BlockCache { blocks: Arc::new(Blocks::new(budget)) }
    }

    #[getter]
    fn used(&self) -> u64 {
        self.blocks.used()
    }
}

/// A field of a token cache: rows of variable length.
#[pyclass(frozen, module = "actshard._native")]
pub struct TokenField {
    field: Arc<Field>,
    descr: Py<PyArrayDescr>,
    has_shapes: bool,
}

/// Tokens, weights and segment ids of a batch.
type Examples<'py> =
    (Bound<'py, PyUntypedArray>, Option<Bound<'py, PyUntypedArray>>, Option<Bound<'py, PyUntypedArray>>);

/// A problem that [`TokenField::check`] found.
type Problem = (&'static str, Option<&'static str>, String, Option<PathBuf>, Option<u64>, bool);

/// Run lengths, and numbers of runs.
type Runs<'py> = (Bound<'py, PyArray1<i32>>, Bound<'py, PyArray1<i32>>);

fn argument(py: Python<'_>, detail: impl Into<String>) -> PyErr {
    errors::raise(py, &Error::new(Kind::Argument, detail))
}

/// A new array. A failed allocation becomes a NoMemoryError, because the size may come from a damaged file.
fn empty<'py>(
    py: Python<'py>,
    descr: &Bound<'py, PyArrayDescr>,
    dims: &[usize],
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let size = dims.iter().try_fold(descr.itemsize(), |n, d| n.checked_mul(*d));
    let too_large = || {
        let detail = format!("no memory for an array of shape {dims:?}; read less at once");
        errors::raise(py, &Error::new(Kind::NoMemory, detail))
    };
    if size.is_none_or(|n| isize::try_from(n).is_err()) {
        return Err(too_large());
    }
    buffer::empty(py, descr, dims).map_err(|e| if e.is_instance_of::<PyMemoryError>(py) { too_large() } else { e })
}

/// Checks indices below `most`; negative ones count from the end.
fn indices(py: Python<'_>, numbers: &[i64], most: u64, what: &str) -> PyResult<Vec<u64>> {
    let members = i64::try_from(most).unwrap_or(i64::MAX);
    let one = |n: &i64| {
        let at = if *n < 0 { n.saturating_add(members) } else { *n };
        u64::try_from(at).ok().filter(|at| *at < most).ok_or_else(|| {
            errors::raise(py, &Error::new(Kind::OutOfRange, format!("{what} {n} is out of range: there are {most}")))
        })
    };
    numbers.iter().map(one).collect()
}

/// Runs work that may wait for a network, on a separate thread if it does, so that an interrupt ends the wait.
fn patient<T: Send>(
    py: Python<'_>,
    far: bool,
    work: impl Fn() -> actshard_core::Result<T> + Send + Sync,
) -> PyResult<T> {
    detach::detached(py, |watch| if far { threads::wait_for(&|_| work(), watch) } else { work() })
}

/// A range in pieces, few of which are fetched at once.
fn pieces(range: ElementRange) -> Vec<ElementRange> {
    const MOST: u64 = 1 << 22;
    let count = (range.end - range.start).div_ceil(MOST);
    let piece = |i| ElementRange { start: range.start + i * MOST, end: range.end.min(range.start + (i + 1) * MOST) };
    (0..count).map(piece).collect()
}

impl TokenField {
    fn copied<'py>(&self, py: Python<'py>, range: ElementRange) -> PyResult<Bound<'py, PyUntypedArray>> {
        let view =
            patient(py, self.field.is_far(), || self.field.view(&mut Cursor::default(), range.start, range.len()))?;
        if let Some(view) = view {
            return buffer::over_map(py, view, self.descr.bind(py), &[range.len()]);
        }
        let mut out = empty(py, self.descr.bind(py), &[range.len()])?;
        if let Some(bytes) = buffer::bytes_mut(&mut out) {
            detach::detached(py, |watch| {
                if self.field.is_far() {
                    return batch::ranges(&self.field, &pieces(range), bytes, watch);
                }
                self.field.copy(&mut Cursor::default(), range.start, bytes)
            })?;
        }
        Ok(out)
    }
}

/// The arrays of a batch of `n` examples, filled by `fill`.
fn filled<'py>(
    py: Python<'py>,
    n: usize,
    length: usize,
    weights: bool,
    segments: bool,
    fill: impl FnOnce(TokenBatch<'_>, actshard_core::threads::Watch<'_>) -> actshard_core::Result<()> + Send,
) -> PyResult<Examples<'py>> {
    let int32 = PyArrayDescr::new(py, "int32")?;
    let make = |descr: &Bound<'py, PyArrayDescr>| empty(py, descr, &[n, length]);
    let mut tokens = make(&int32)?;
    let mut weights = if weights { Some(make(&PyArrayDescr::new(py, "float32")?)?) } else { None };
    let mut segments = if segments { Some(make(&int32)?) } else { None };
    if n > 0 {
        let internal = || errors::raise(py, &Error::new(Kind::Internal, "a new array that is not one block"));
        let bytes = buffer::bytes_mut(&mut tokens).ok_or_else(internal)?;
        let batch = TokenBatch {
            length,
            tokens: cast_mut(py, bytes)?,
            weights: match weights.as_mut().and_then(buffer::bytes_mut) {
                Some(bytes) => Some(cast_mut(py, bytes)?),
                None => None,
            },
            segments: match segments.as_mut().and_then(buffer::bytes_mut) {
                Some(bytes) => Some(cast_mut(py, bytes)?),
                None => None,
            },
        };
        detach::detached(py, |watch| fill(batch, watch))?;
    }
    Ok((tokens, weights, segments))
}

fn cast_mut<'a, T: bytemuck::Pod>(py: Python<'_>, bytes: &'a mut [u8]) -> PyResult<&'a mut [T]> {
    if bytes.is_empty() {
        return Ok(&mut []);
    }
    bytemuck::try_cast_slice_mut(bytes)
        .map_err(|_| errors::raise(py, &Error::new(Kind::Internal, "a new array that is not aligned")))
}

fn loss_of<'a>(py: Python<'_>, name: &str, field: Option<&'a Field>) -> PyResult<Loss<'a>> {
    match (name, field) {
        ("all", None) => Ok(Loss::All),
        ("weights", Some(field)) => Ok(Loss::Weights(field)),
        ("mask", Some(field)) => Ok(Loss::Mask(field)),
        _ => Err(argument(py, format!("loss: expected all, or weights or mask and a field, found {name}"))),
    }
}

#[pymethods]
impl TokenField {
    /// `parts`: folder, and the numbers of rows and elements if a ledger has them. `ledger`: the cache's ledger, its size and time
    /// of change in ns. `is_complete`: whether the writer left out no file.
    #[new]
    #[pyo3(signature = (parts, io, cache, ledger=None, *, is_complete=false))]
    fn new(
        py: Python<'_>,
        parts: Vec<(NamedPlace, Option<(u64, u64)>)>,
        io: &str,
        cache: &BlockCache,
        ledger: Option<(PathBuf, u64, i64)>,
        is_complete: bool,
    ) -> PyResult<TokenField> {
        detach::guarded(py, || {
            let io = Io::from_name(io)
                .ok_or_else(|| argument(py, format!("io: expected 'mmap' or 'pread', found '{io}'")))?;
            let store = remote_store(parts.iter().map(|(place, _)| place)).map_err(|e| errors::raise(py, &e))?;
            let store = store.unwrap_or_else(|| Arc::new(Local { io }));
            let part = |(place, counts): (NamedPlace, _)| FieldShard { folder: place.location, counts };
            let parts: Vec<FieldShard> = parts.into_iter().map(part).collect();
            let blocks = Arc::clone(&cache.blocks);
            let file = ledger.map(|(path, size, changed)| (path.as_path().into(), size, changed));
            let ledger = LedgerState { file, is_complete };
            let (field, has_shapes) = patient(py, store.wishes().is_some(), || {
                let field = Field::open(parts.clone(), Arc::clone(&store), Arc::clone(&blocks), ledger.clone())?;
                let has_shapes = field.shapes_folder()?.is_some();
                Ok((field, has_shapes))
            })?;
            let name = field.dtype().numpy_name().unwrap_or("uint8");
            let descr = PyArrayDescr::new(py, name)?.unbind();
            Ok(TokenField { field: Arc::new(field), descr, has_shapes })
        })
    }

    #[getter]
    fn num_rows(&self) -> u64 {
        self.field.num_rows()
    }

    #[getter]
    fn num_elements(&self) -> u64 {
        self.field.num_elements()
    }

    #[getter]
    fn descr(&self, py: Python<'_>) -> Py<PyArrayDescr> {
        self.descr.clone_ref(py)
    }

    #[getter]
    fn has_shapes(&self) -> bool {
        self.has_shapes
    }

    /// A row: a read-only view if it is contiguous, else a copy.
    fn row<'py>(&self, py: Python<'py>, row: u64) -> PyResult<Bound<'py, PyUntypedArray>> {
        detach::guarded(py, || {
            let (range, view) = patient(py, self.field.is_far(), || {
                let mut cursor = Cursor::default();
                let range = self.field.row(&mut cursor, row)?;
                Ok((range, self.field.view(&mut cursor, range.start, range.len())?))
            })?;
            match view {
                Some(view) => buffer::over_map(py, view, self.descr.bind(py), &[range.len()]),
                None => self.copied(py, range),
            }
        })
    }

    /// `n` elements from `start`, across rows: a read-only view if they are contiguous, else a copy.
    fn elements<'py>(&self, py: Python<'py>, start: u64, n: u64) -> PyResult<Bound<'py, PyUntypedArray>> {
        detach::guarded(py, || {
            let Some(end) = start.checked_add(n).filter(|end| *end <= self.field.num_elements()) else {
                let found = self.field.num_elements();
                let end = start.saturating_add(n);
                let detail = format!("elements {start} to {end} are out of range: the field has {found}");
                return Err(errors::raise(py, &Error::new(Kind::OutOfRange, detail)));
            };
            self.copied(py, ElementRange { start, end })
        })
    }

    /// Rows, concatenated, and their offsets (one more than rows).
    fn rows<'py>(
        &self,
        py: Python<'py>,
        rows: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<(Bound<'py, PyUntypedArray>, Bound<'py, PyArray1<i64>>)> {
        detach::guarded(py, || {
            let rows = indices(py, rows.as_slice()?, self.field.num_rows(), "row")?;
            let (ranges, offsets) = detach::detached(py, |watch| {
                let ranges = batch::row_ranges(&self.field, &rows, watch)?;
                let mut offsets = Vec::with_capacity(rows.len() + 1);
                let mut total = 0i64;
                offsets.push(0);
                for range in &ranges {
                    total += range.len() as i64;
                    offsets.push(total);
                }
                Ok((ranges, offsets))
            })?;
            let total = offsets.last().map_or(0, |n| *n as usize);
            let mut out = empty(py, self.descr.bind(py), &[total])?;
            if let Some(bytes) = buffer::bytes_mut(&mut out) {
                detach::detached(py, |watch| batch::ranges(&self.field, &ranges, bytes, watch))?;
            }
            Ok((out, PyArray1::from_vec(py, offsets)))
        })
    }

    /// The offsets of `n` rows from `first`, in elements, and the end of the last.
    fn bounds<'py>(&self, py: Python<'py>, first: u64, n: u64) -> PyResult<Bound<'py, PyArray1<u64>>> {
        detach::guarded(py, || {
            let bounds = detach::detached(py, |watch| {
                let (mut cursor, mut bounds) = (Cursor::default(), vec![]);
                batch::bounds_into(&self.field, &mut cursor, (first, n as usize), &mut bounds, watch)?;
                Ok(bounds)
            })?;
            Ok(PyArray1::from_vec(py, bounds))
        })
    }

    /// The bounds of rows, in elements: the start and the end of each.
    fn extents<'py>(&self, py: Python<'py>, rows: PyReadonlyArray1<'py, i64>) -> PyResult<Bound<'py, PyArray1<u64>>> {
        detach::guarded(py, || {
            let rows = indices(py, rows.as_slice()?, self.field.num_rows(), "row")?;
            let ranges = detach::detached(py, |watch| batch::row_ranges(&self.field, &rows, watch))?;
            Ok(PyArray1::from_vec(py, ranges.iter().flat_map(|range| [range.start, range.end]).collect()))
        })
    }

    /// The first missing file of each array whose counts are its own, and the number of missing files.
    fn missing_files(&self, py: Python<'_>) -> PyResult<Vec<(PathBuf, u64)>> {
        detach::guarded(py, || {
            let missing = patient(py, self.field.is_far(), || self.field.missing_files())?;
            Ok(missing.into_iter().map(|(location, n)| (errors::path_of(&location).into(), n)).collect())
        })
    }

    /// Every problem of the files: kind, finding code if more exact, detail, path, byte offset, and whether data is
    /// only missing. At most the first 10,000.
    fn check(&self, py: Python<'_>, deep: bool) -> PyResult<Vec<Problem>> {
        detach::guarded(py, || {
            const MOST: usize = 10_000;
            detach::detached(py, |watch| {
                let (mut found, mut known): (Vec<Problem>, HashSet<Problem>) = (vec![], HashSet::new());
                let mut report = |e: Error, absent: bool| {
                    let path = e.location.as_ref().map(|l| errors::path_of(l).into());
                    let problem = (e.kind.code(), e.finding.map(Finding::code), e.detail, path, e.offset, absent);
                    if known.len() < MOST && known.insert(problem.clone()) {
                        found.push(problem);
                    }
                };
                self.field.check(deep, &mut report, watch)?;
                Ok(found)
            })
        })
    }

    /// The sizes of a row's axes, without the last.
    fn shape(&self, py: Python<'_>, row: u64) -> PyResult<Vec<u64>> {
        detach::guarded(py, || patient(py, self.field.is_far(), || self.field.shape(row)))
    }

    /// Examples of `length` elements; example `i` of `count` begins at element `i * stride`.
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    #[pyo3(signature = (numbers, stride, count, length, *, loss, field, weights, segments, eos))]
    fn windows<'py>(
        &self,
        py: Python<'py>,
        numbers: PyReadonlyArray1<'py, i64>,
        stride: u64,
        count: u64,
        length: usize,
        loss: &str,
        field: Option<PyRef<'py, TokenField>>,
        weights: bool,
        segments: bool,
        eos: Option<i64>,
    ) -> PyResult<Examples<'py>> {
        detach::guarded(py, || {
            let mut starts = indices(py, numbers.as_slice()?, count, "example")?;
            for start in &mut starts {
                *start = start.saturating_mul(stride);
            }
            let field = field.map(|f| Arc::clone(&f.field));
            let loss = loss_of(py, loss, field.as_deref())?;
            filled(py, starts.len(), length, weights, segments, |batch, watch| {
                batch::windows(&self.field, &starts, loss, eos, batch, watch)
            })
        })
    }

    /// Examples of whole rows: `packs` has the first row and one past the last for each.
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    #[pyo3(signature = (packs, length, *, loss, field, segments, right, mask_padding))]
    fn packed<'py>(
        &self,
        py: Python<'py>,
        packs: PyReadonlyArray2<'py, i64>,
        length: usize,
        loss: &str,
        field: Option<PyRef<'py, TokenField>>,
        segments: bool,
        right: bool,
        mask_padding: bool,
    ) -> PyResult<Examples<'py>> {
        detach::guarded(py, || {
            if packs.shape()[1] != 2 {
                return Err(argument(py, "packs: expected pairs of rows"));
            }
            let numbers = indices(py, packs.as_slice()?, self.field.num_rows().saturating_add(1), "row")?;
            let packs = numbers.as_chunks::<2>().0;
            let field = field.map(|f| Arc::clone(&f.field));
            let loss = loss_of(py, loss, field.as_deref())?;
            let packing = Packing { tokens: &self.field, loss, right, mask_padding };
            filled(py, packs.len(), length, true, segments, |batch, watch| batch::packed(packing, packs, batch, watch))
        })
    }
}

/// `n` zeros; an error, not an abort, if there is no memory for them.
fn zeros(n: Option<usize>, what: &str) -> actshard_core::Result<Vec<i32>> {
    let mut made = room(n, what)?;
    made.resize(n.unwrap_or(0), 0);
    Ok(made)
}

/// An empty list with capacity for `n` elements; an error if there is no memory for it.
fn room<T>(n: Option<usize>, what: &str) -> actshard_core::Result<Vec<T>> {
    let mut made = vec![];
    let had = n.is_some_and(|n| made.try_reserve_exact(n).is_ok());
    let many = n.map_or_else(|| "too many".to_string(), |n| n.to_string());
    if had { Ok(made) } else { Err(Error::new(Kind::NoMemory, format!("no memory for {what}: {many} numbers"))) }
}

/// Packs the rows of some fields into examples: first row, one past the last, and so on.
#[pyfunction]
pub fn pack_rows<'py>(
    py: Python<'py>,
    fields: Vec<PyRef<'py, TokenField>>,
    most: u64,
    segments: u64,
    overlong: &str,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    detach::guarded(py, || {
        const ROWS: u64 = 1 << 18;
        const FAR_ROWS: u64 = 1 << 22;
        let how = Overlong::from_name(overlong).ok_or_else(|| {
            argument(py, format!("slice_strategy: expected 'left', 'right', 'raise' or 'drop', found '{overlong}'"))
        })?;
        let fields: Vec<Arc<Field>> = fields.iter().map(|f| Arc::clone(&f.field)).collect();
        let rows = fields.iter().map(|f| f.num_rows()).min().unwrap_or(0);
        let at_once = if fields.iter().any(|f| f.is_far()) { FAR_ROWS } else { ROWS };
        let packs = detach::detached(py, |watch| {
            let mut packer = Packer::new(most, segments, how, fields.len());
            let mut cursors: Vec<Cursor> = fields.iter().map(|_| Cursor::default()).collect();
            let mut bounds: Vec<Vec<u64>> = vec![vec![]; fields.len()];
            let mut first = 0;
            while first < rows {
                if watch() {
                    return Err(Error::new(Kind::Interrupted, "interrupted"));
                }
                let n = (rows - first).min(at_once) as usize;
                for ((field, bounds), cursor) in fields.iter().zip(&mut bounds).zip(&mut cursors) {
                    batch::bounds_into(field, cursor, (first, n), bounds, &mut *watch)?;
                }
                packer.push(&bounds)?;
                first += n as u64;
            }
            Ok(packer.finish().into_iter().flatten().map(|n| n as i64).collect::<Vec<_>>())
        })?;
        Ok(PyArray1::from_vec(py, packs))
    })
}

/// The lengths of the runs of equal segment ids in each example, and the number of runs.
#[pyfunction]
pub fn run_lengths<'py>(py: Python<'py>, segments: PyReadonlyArray2<'py, i32>, most: usize) -> PyResult<Runs<'py>> {
    detach::guarded(py, || {
        let [examples, length] = [segments.shape()[0], segments.shape()[1]];
        let segments = segments.as_slice()?;
        let (lengths, counts) = detach::detached(py, |_| {
            let mut lengths = zeros(examples.checked_mul(most), "the runs of the batch")?;
            let mut counts = zeros(Some(examples), "the runs of the batch")?;
            batch::run_lengths(segments, length, most, &mut lengths, &mut counts)?;
            Ok((lengths, counts))
        })?;
        Ok((PyArray1::from_vec(py, lengths), PyArray1::from_vec(py, counts)))
    })
}
