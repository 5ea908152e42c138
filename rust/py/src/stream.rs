//! Streams of batches for Python.

use std::sync::Arc;

use actshard_core::dtype::DType;
use actshard_core::memory::output::Output;
use actshard_core::rows::Units;
use actshard_core::stream::ahead::{Ahead, Batch, Stream as Core, Supply, Wanted};
use actshard_core::stream::items::convert_block;
use actshard_core::stream::plan::{Plan, Settings, Shuffle, UNIT_BYTES};
use actshard_core::stream::rescale::{Convert, Scale};
use actshard_core::stream::select::Selection;
use actshard_core::stream::sequences::{self, PlacedSequences};
use actshard_core::stream::{ITEM_BYTES, items_in};
use actshard_core::threads::Lock;
use actshard_core::{Error, Kind};
use numpy::{PyArray1, PyArrayDescr, PyArrayDescrMethods, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PySlice;

use crate::arguments::dtype_of;
use crate::buffer::{self, Claim, Lent};
use crate::handle::Rows;
use crate::{detach, errors};

/// The selected tokens: the first, and the number per example (equal for all, or one each, optionally with a flag per token);
/// or one token of each example.
#[derive(FromPyObject)]
pub enum Tokens<'py> {
    #[pyo3(transparent)]
    Same((u64, u64)),
    #[pyo3(transparent)]
    Counts((u64, PyReadonlyArray1<'py, i64>)),
    #[pyo3(transparent)]
    Kept((u64, PyReadonlyArray1<'py, i64>, PyReadonlyArray1<'py, bool>)),
    #[pyo3(transparent)]
    Each((PyReadonlyArray1<'py, i64>,)),
}

/// The selection of these tokens.
pub fn selection(py: Python<'_>, examples: u64, tokens: Tokens<'_>) -> PyResult<Selection> {
    let each = |counts: &[i64]| counts.iter().map(|n| u64::try_from(*n).unwrap_or(0)).collect::<Vec<_>>();
    match tokens {
        Tokens::Same((first, count)) => Selection::same(examples, first, count).map_err(|e| errors::raise(py, &e)),
        Tokens::Counts((first, counts)) => {
            let counts = counts.as_slice()?;
            detach::detached(py, |_| Selection::counted(first, each(counts).into_iter()))
        }
        Tokens::Kept((first, counts, keep)) => {
            let (counts, keep) = (counts.as_slice()?, keep.as_slice()?);
            detach::detached(py, |_| Selection::masked(first, each(counts).into_iter(), keep))
        }
        Tokens::Each((tokens,)) => {
            let tokens = tokens.as_slice()?;
            detach::detached(py, |_| Selection::one_of_each(tokens.iter().map(|t| u32::try_from(*t).ok())))
        }
    }
}

/// The order of this name.
pub fn shuffle_of(name: Option<&str>) -> actshard_core::Result<Shuffle> {
    match name {
        None => Ok(Shuffle::Stored),
        Some("window") => Ok(Shuffle::Window),
        Some("exact") => Ok(Shuffle::Exact),
        Some(other) => {
            Err(Error::new(Kind::Argument, format!("shuffle must be None, 'window' or 'exact', not '{other}'")))
        }
    }
}

/// The number of selected tokens.
#[pyfunction]
pub fn count_selected(py: Python<'_>, examples: u64, tokens: Tokens<'_>) -> PyResult<u64> {
    detach::guarded(py, || Ok(selection(py, examples, tokens)?.len()))
}

/// The centre and the scale that keywords of Python name.
fn rescaling(
    center: Option<PyReadonlyArray1<'_, f64>>,
    scale: Option<PyReadonlyArray1<'_, f64>>,
    norm: Option<f64>,
    divide: Option<PyReadonlyArray1<'_, f64>>,
) -> PyResult<(Vec<f64>, Scale)> {
    let center = center.map(|c| c.as_slice().map(<[f64]>::to_vec)).transpose()?.unwrap_or_default();
    let scale = match (scale, divide, norm) {
        (Some(by), ..) => Scale::By(by.as_slice()?.to_vec()),
        (None, Some(by), _) => Scale::Divide(by.as_slice()?.to_vec()),
        (None, None, Some(norm)) => Scale::ToNorm(norm),
        (None, None, None) => Scale::None,
    };
    Ok((center, scale))
}

/// Rows of one layer, of `width` elements of type `stored`, centred and scaled into `out` as a stream of `dtype` does.
/// Returns the number of finite values that became infinite.
#[pyfunction]
#[pyo3(signature = (rows, stored, out, dtype, width, *, center, scale, norm, divide, wide))]
#[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
pub fn rescale_rows(
    py: Python<'_>,
    rows: PyReadonlyArray1<'_, u8>,
    stored: &str,
    out: &Bound<'_, PyUntypedArray>,
    dtype: &str,
    width: usize,
    center: Option<PyReadonlyArray1<'_, f64>>,
    scale: Option<PyReadonlyArray1<'_, f64>>,
    norm: Option<f64>,
    divide: Option<PyReadonlyArray1<'_, f64>>,
    wide: bool,
) -> PyResult<u64> {
    detach::guarded(py, || {
        let refuse = |detail: String| errors::raise(py, &Error::new(Kind::Argument, detail));
        let (center, scale) = rescaling(center, scale, norm, divide)?;
        let (from, to) = (dtype_of(py, stored)?, dtype_of(py, dtype)?);
        let convert = if wide {
            Convert::in_double((from, to), (width, 1), center, scale)
        } else {
            Convert::new(from, to, width, 1, center, scale)
        };
        let convert = convert.map_err(|e| errors::raise(py, &e))?;
        let mut claim = Claim::new(out, "out")?;
        let rows = rows.as_slice()?;
        if claim.overlaps(rows) {
            return Err(refuse("out: expected other memory than that of the rows".into()));
        }
        let out = claim.as_mut();
        if convert.from() == 0
            || rows.len() % convert.from() != 0
            || rows.len() / convert.from() * convert.to() != out.len()
        {
            return Err(refuse(format!(
                "rows: expected rows of {width}, found {} bytes for {}",
                rows.len(),
                out.len()
            )));
        }
        detach::detached(py, |watch| convert_block(&convert, rows, out, watch))?;
        Ok(convert.take_overflows())
    })
}

/// A stream of rows: source, order and conversion. Cheap to start and restart.
#[pyclass(frozen, module = "actshard._native")]
pub struct Stream {
    core: Arc<Core>,
    descr: Py<PyArrayDescr>,
    /// The shape of an item.
    item: Vec<usize>,
}

#[pymethods]
impl Stream {
    #[new]
    #[pyo3(signature = (rows, tokens, *, groups, stacked, interleaved, batch_size, shuffle, seed, drop_last, rank, world_size, memory, dtype, descr, center, scale, norm, divide=None, wide=false, given=false, unit_bytes=None))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn new(
        py: Python<'_>,
        rows: &Rows,
        tokens: Tokens<'_>,
        groups: Vec<usize>,
        stacked: bool,
        interleaved: bool,
        batch_size: u64,
        shuffle: Option<&str>,
        seed: u64,
        drop_last: bool,
        rank: u64,
        world_size: u64,
        memory: u64,
        dtype: &str,
        descr: Bound<'_, PyArrayDescr>,
        center: Option<PyReadonlyArray1<'_, f64>>,
        scale: Option<PyReadonlyArray1<'_, f64>>,
        norm: Option<f64>,
        divide: Option<PyReadonlyArray1<'_, f64>>,
        wide: bool,
        given: bool,
        unit_bytes: Option<u64>,
    ) -> PyResult<Stream> {
        detach::guarded(py, || {
            let raise = |e: Error| errors::raise(py, &e);
            let mut rows = rows.dataset(py)?;
            let selection = selection(py, rows.examples(), tokens)?;
            let per_item = if interleaved { 1 } else { groups.len() };
            let shuffle = shuffle_of(shuffle).map_err(raise)?;
            let (center, scale) = rescaling(center, scale, norm, divide)?;
            let to = dtype_of(py, dtype)?;
            if to.size() != Some(descr.itemsize()) {
                return Err(raise(Error::new(Kind::Internal, "a stream of another numpy type")));
            }
            if given && detach::detached(py, |watch| rows.stored_types(watch))?.iter().any(|t| *t != rows.row().dtype) {
                // Rows of several types are converted to the requested one, or to float64 if they are also rescaled.
                let as_is = center.is_empty() && scale == Scale::None;
                let read = rows.read_as(if as_is { to } else { DType::F64 });
                rows = read.map_or(rows, Arc::new);
            }
            let row = rows.row();
            let convert = if wide {
                Convert::in_double((row.dtype, to), (row.width, groups.len()), center, scale)
            } else {
                Convert::new(row.dtype, to, row.width, groups.len(), center, scale)
            };
            let convert = convert.map_err(raise)?;
            let window = items_in(memory, (row.bytes * per_item) as u64);
            if window == 0 && shuffle == Shuffle::Window {
                let least = ITEM_BYTES.saturating_add((row.bytes * per_item) as u64);
                let detail =
                    format!("memory: expected at least {least} bytes, for one row and its number, found {memory}");
                return Err(raise(Error::new(Kind::Argument, detail)));
            }
            let settings = Settings {
                shuffle,
                seed,
                batch: batch_size,
                rank,
                ranks: world_size,
                drop_last,
                groups,
                interleaved,
                window: window.max(1),
                unit_bytes: unit_bytes.unwrap_or_else(|| rows.unit_bytes().unwrap_or(UNIT_BYTES)),
                row_bytes: row.bytes as u64,
            };
            let plan = detach::detached(py, |_| Plan::new(settings, selection, &rows.units()?))?;
            let item = if stacked && !interleaved { vec![per_item, row.width] } else { vec![row.width] };
            Ok(Stream { core: Arc::new(Core { rows, plan, convert }), descr: descr.unbind(), item })
        })
    }

    /// Batches per rank.
    #[getter]
    fn batches(&self) -> u64 {
        self.core.plan.batches()
    }

    /// Rows of all ranks.
    #[getter]
    fn items(&self) -> u64 {
        self.core.plan.items()
    }

    /// Items per window, at most.
    #[getter]
    fn window(&self) -> u64 {
        self.core.plan.settings.window
    }

    /// Bytes that a window reads in one request, at least; `None` for the default.
    #[getter]
    fn unit_bytes(&self) -> Option<u64> {
        Some(self.core.plan.settings.unit_bytes).filter(|bytes| *bytes != UNIT_BYTES)
    }

    /// A digest of the units of the windows.
    #[getter]
    fn units(&self) -> u64 {
        self.core.plan.units_digest()
    }

    /// A new uninitialised array for a batch, in recycled memory if it is large.
    fn empty<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyUntypedArray>> {
        detach::guarded(py, || {
            let batch = usize::try_from(self.core.plan.settings.batch).unwrap_or(usize::MAX);
            let dims: Vec<usize> = std::iter::once(batch).chain(self.item.iter().copied()).collect();
            buffer::empty(py, self.descr.bind(py), &dims)
        })
    }

    /// Finite values that became infinite since the last call.
    fn take_overflows(&self) -> u64 {
        self.core.convert.take_overflows() + self.core.rows.take_overflows()
    }

    /// Examples and tokens of picks.
    fn locate<'py>(&self, py: Python<'py>, picks: PyReadonlyArray1<'py, i64>) -> PyResult<TwoArrays<'py>> {
        detach::guarded(py, || {
            let picks = picks.as_slice()?;
            let found = detach::detached(py, |_| self.core.plan.locate(picks))?;
            Ok((PyArray1::from_vec(py, found.0), PyArray1::from_vec(py, found.1)))
        })
    }

    /// Selected rows before each example, and their number.
    fn before<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        detach::guarded(py, || Ok(PyArray1::from_vec(py, detach::detached(py, |_| Ok(self.core.plan.before()))?)))
    }

    /// Bounds of the examples that are decoded together; None if examples are read separately.
    fn unit_bounds<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray1<i64>>>> {
        detach::guarded(py, || {
            Ok(match detach::detached(py, |_| self.core.rows.units())? {
                Units::Examples => None,
                Units::Between(bounds) => Some(PyArray1::from_vec(py, bounds.into_iter().map(|b| b as i64).collect())),
            })
        })
    }

    /// Whether reading decodes files or parts of them.
    #[getter]
    fn decodes(&self) -> bool {
        self.core.rows.decodes()
    }

    /// The rows of sequences: their first picks, numbers of picks, and first rows in an output of `shape`, whose product is the
    /// number of rows. Returns the output, zero where it has no rows, and the token of each row, -1 there.
    fn read<'py>(
        &self,
        py: Python<'py>,
        firsts: PyReadonlyArray1<'py, i64>,
        counts: PyReadonlyArray1<'py, i64>,
        places: PyReadonlyArray1<'py, i64>,
        shape: Vec<usize>,
    ) -> PyResult<(Bound<'py, PyUntypedArray>, Bound<'py, PyArray1<i64>>)> {
        detach::guarded(py, || {
            let items = shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d)).unwrap_or(usize::MAX);
            let dims: Vec<usize> = shape.iter().chain(&self.item).copied().collect();
            let mut array = buffer::empty(py, self.descr.bind(py), &dims)?;
            let placed = PlacedSequences {
                firsts: firsts.as_slice()?,
                counts: counts.as_slice()?,
                places: places.as_slice()?,
                items,
            };
            let Some(out) = buffer::bytes_mut(&mut array) else {
                return Err(errors::raise(py, &Error::new(Kind::Internal, "a new array that cannot be written")));
            };
            let tokens = detach::detached(py, |watch| sequences::read(&self.core, placed, out, watch))?;
            Ok((array, PyArray1::from_vec(py, tokens)))
        })
    }

    /// Starts reading batches `first`, `first + every`, ... of an epoch, into new arrays or into `buffers`. A buffer is
    /// filled again after the next call of `next`, or if `hold` is set after `release`.
    #[pyo3(signature = (epoch, first, every, buffers, hold=false))]
    fn start(
        &self,
        py: Python<'_>,
        epoch: u64,
        first: u64,
        every: u64,
        buffers: Option<Vec<Bound<'_, PyUntypedArray>>>,
        hold: bool,
    ) -> PyResult<Batches> {
        detach::guarded(py, || {
            let mut lent = vec![];
            let kept = buffers.is_some();
            for (number, array) in buffers.unwrap_or_default().iter().enumerate() {
                lent.push((array.clone().unbind(), buffer::lend(array, number)?));
            }
            let (arrays, lent): (Vec<_>, Vec<_>) = lent.into_iter().unzip();
            let ahead = if arrays.is_empty() && !kept { 1 } else { arrays.len() };
            let supply = if kept {
                Supply::Recycled(lent.into_iter().map(BatchMemory::Lent).collect())
            } else {
                Supply::New(Box::new(|bytes| {
                    let made = Output::new(bytes);
                    made.map(BatchMemory::New).map_err(|e| {
                        Error::new(Kind::NoMemory, format!("cannot allocate {bytes} bytes for a batch: {e}"))
                    })
                }))
            };
            let core = Arc::clone(&self.core);
            let wanted = Wanted { first, every: every.max(1) };
            let ahead = Ahead::start(core, epoch, wanted, supply, ahead).map_err(|e| errors::raise(py, &e))?;
            Ok(Batches {
                ahead: Lock::new(Some(Arc::new(ahead))),
                given: Lock::new(vec![]),
                hold,
                arrays,
                descr: self.descr.clone_ref(py),
                item: self.item.clone(),
                interleaved: self.core.plan.settings.interleaved,
            })
        })
    }
}

/// The memory of a batch.
enum BatchMemory {
    New(Output),
    Lent(Lent),
}

impl AsMut<[u8]> for BatchMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        match self {
            BatchMemory::New(output) => output.as_mut(),
            BatchMemory::Lent(lent) => lent.as_mut(),
        }
    }
}

/// Batches being read ahead.
#[pyclass(frozen, module = "actshard._native")]
pub struct Batches {
    /// `None` once stopped. Locked only under the GIL, and only to copy or take the pointer: never while waiting for a
    /// batch, when a signal handler on the same thread may stop these batches.
    ahead: Lock<Option<Arc<Ahead<BatchMemory>>>>,
    /// Buffers that the consumer is using.
    given: Lock<Vec<Lent>>,
    /// Whether buffers are returned for reuse by `release`, and not by the next call of `next`.
    hold: bool,
    arrays: Vec<Py<PyUntypedArray>>,
    descr: Py<PyArrayDescr>,
    item: Vec<usize>,
    interleaved: bool,
}

type TwoArrays<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>);

/// Activations, examples, tokens, and indices of layers if each row is of one layer.
type BatchTuple<'py> =
    (Bound<'py, PyAny>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Option<Bound<'py, PyArray1<i64>>>);

#[pymethods]
impl Batches {
    /// The next batch, or None after the last.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<BatchTuple<'py>>> {
        detach::guarded(py, || {
            let ahead = self.ahead.lock().clone();
            let Some(ahead) = ahead else { return Ok(None) };
            let given = if self.hold { vec![] } else { std::mem::take(&mut *self.given.lock()) };
            let next = detach::detached(py, |watch| {
                for lent in given {
                    ahead.give_back(BatchMemory::Lent(lent));
                }
                ahead.next(watch)
            })?;
            let Some(Batch { memory, len, examples, tokens, groups }) = next else { return Ok(None) };
            let dims: Vec<usize> = std::iter::once(len).chain(self.item.iter().copied()).collect();
            let array = match memory {
                BatchMemory::New(output) => buffer::over_output(py, output, self.descr.bind(py), &dims)?.into_any(),
                BatchMemory::Lent(lent) => {
                    let array = self.arrays[lent.number].bind(py).clone();
                    self.given.lock().push(lent);
                    if array.shape()[0] == len {
                        array.into_any()
                    } else {
                        array.get_item(PySlice::new(py, 0, len as isize, 1))?
                    }
                }
            };
            let groups = self.interleaved.then(|| PyArray1::from_vec(py, groups));
            Ok(Some((array, PyArray1::from_vec(py, examples), PyArray1::from_vec(py, tokens), groups)))
        })
    }

    /// Whether `next` would return a batch without waiting. False at the end and before an error.
    fn ready(&self, py: Python<'_>) -> PyResult<bool> {
        detach::guarded(py, || {
            let ahead = self.ahead.lock().clone();
            Ok(ahead.is_some_and(|ahead| ahead.is_ready()))
        })
    }

    /// Returns a held buffer, by its index, for reuse. Does nothing if it is not held.
    fn release(&self, py: Python<'_>, number: usize) -> PyResult<()> {
        detach::guarded(py, || {
            let mut given = self.given.lock();
            let Some(at) = given.iter().position(|lent| lent.number == number) else { return Ok(()) };
            let lent = given.swap_remove(at);
            drop(given);
            let ahead = self.ahead.lock().clone();
            if let Some(ahead) = ahead {
                ahead.give_back(BatchMemory::Lent(lent));
            }
            Ok(())
        })
    }

    /// Stops the thread and drops the batches read ahead. A waiting call of `next` returns None.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        detach::guarded(py, || {
            let ahead = self.ahead.lock().take();
            // Without the GIL: the thread may be decoding through Python.
            detach::detached(py, |watch| ahead.map_or(Ok(()), |ahead| ahead.stop(watch)))
        })
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        let ahead = self.ahead.get_mut().take();
        let Some(ahead) = ahead else { return };
        // Not interruptible: an exception raised here would be lost. Only a panic can fail, and it has been reported.
        let _ = Python::attach(|py| detach::detached(py, |_| ahead.stop(&mut || false)));
    }
}
