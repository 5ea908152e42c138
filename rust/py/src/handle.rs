//! A dataset's rows as one Python object; `rows` adds its methods.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use actshard_core::dtype::{Cast, DType};
use actshard_core::gather::{Ints, Out, Pick};
use actshard_core::layout::row::Row;
use actshard_core::rows::Rows as Dataset;
use actshard_core::source::Io;
use actshard_core::threads::Lock;
use actshard_core::{Error, Kind};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::arguments::{dtype_of, helper, io_of};
use crate::{buffer, detach, errors};

/// The rows of a dataset: files, layout and dtype.
#[pyclass(frozen, module = "actshard._native")]
pub struct Rows {
    /// `None` once closed. Locked only under the GIL, and only to copy or take the pointer: no thread waits for it, and
    /// a fork cannot happen while it is locked.
    rows: Lock<Option<Arc<Dataset>>>,
    row: Row,
    examples: u64,
    io: Io,
    descr: Py<PyArrayDescr>,
}

/// The arguments that the constructors of all layouts of files share.
pub struct RowArguments<'a, 'py> {
    pub width: u64,
    pub dtype: &'a str,
    pub descr: Bound<'py, PyArrayDescr>,
    pub io: &'a str,
}

impl RowArguments<'_, '_> {
    /// The dataset that `make` builds from the width, the dtype and the I/O mode.
    pub fn rows(
        self,
        py: Python<'_>,
        make: impl FnOnce(u64, DType, Io) -> actshard_core::Result<Dataset> + Send,
    ) -> PyResult<Rows> {
        let (width, dtype, io) = (self.width, dtype_of(py, self.dtype)?, io_of(py, self.io)?);
        let made = detach::detached(py, |_| make(width, dtype, io))?;
        Rows::new(py, made, io, self.descr)
    }
}

/// The destination of a gather, as Python passes it: the caller's array, the dtype, and a list for the number of
/// overflows.
pub struct Destination<'a, 'py> {
    pub out: Option<&'a Bound<'py, PyAny>>,
    pub dtype: Option<&'a Bound<'py, PyAny>>,
    pub overflows: Option<&'a Bound<'py, PyList>>,
}

/// Whether the output overlaps an index array: Rust must not read memory that it is writing.
fn overlaps(groups: &Ints<'_>, pick: &Pick<'_>, out: &buffer::Claim) -> bool {
    let (examples, tokens) = match pick {
        Pick::Tokens { examples, tokens } => (examples, Some(tokens)),
        Pick::Last { examples } | Pick::Whole { examples } => (examples, None),
    };
    [Some(groups), Some(examples), tokens].into_iter().flatten().any(|ints| match ints {
        Ints::Each(xs) => out.overlaps(xs),
        Ints::One(_) | Ints::Count => false,
    })
}

impl Rows {
    pub fn new(py: Python<'_>, rows: Dataset, io: Io, descr: Bound<'_, PyArrayDescr>) -> PyResult<Rows> {
        let (row, examples) = (rows.row(), rows.examples());
        let made = Rows { rows: Lock::new(Some(Arc::new(rows))), row, examples, io, descr: descr.clone().unbind() };
        let dtype = row.dtype;
        if dtype.size() != Some(descr.itemsize()) {
            return Err(errors::raise(
                py,
                &Error::new(Kind::Internal, format!("{} given the wrong numpy type", dtype.name())),
            ));
        }
        Ok(made)
    }

    /// How files are read.
    pub fn mode(&self) -> Io {
        self.io
    }

    /// Number of examples.
    pub fn examples(&self) -> u64 {
        self.examples
    }

    /// The stored numpy dtype of the rows.
    pub fn stored<'py>(&self, py: Python<'py>) -> Bound<'py, PyArrayDescr> {
        self.descr.bind(py).clone()
    }

    /// Takes the dataset out; later reads raise ClosedError.
    pub fn take(&self) -> Option<Arc<Dataset>> {
        self.rows.lock().take()
    }

    /// The dataset, for one read or for a stream's thread; ClosedError after [`Rows::take`].
    pub fn dataset(&self, py: Python<'_>) -> PyResult<Arc<Dataset>> {
        let held = self.rows.lock().clone();
        held.ok_or_else(|| errors::raise(py, &Error::new(Kind::Closed, "the store was closed")))
    }

    /// The properties of a row.
    pub fn row(&self) -> Row {
        self.row
    }

    /// Numbers of tokens of these examples.
    pub fn count(&self, py: Python<'_>, groups: Ints<'_>, examples: &[i64]) -> PyResult<Vec<i64>> {
        let dataset = self.dataset(py)?;
        detach::detached(py, |watch| dataset.tokens_of(groups, examples, watch))
    }

    /// Gathers into a new array or into `out`, converted to `dtype` if given.
    pub fn fill<'py>(
        &self,
        py: Python<'py>,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        dims: &[usize],
        into: Destination<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Destination { out, dtype, overflows } = into;
        let stored = self.descr.bind(py);
        let (descr, to) = match dtype {
            Some(asked) if !asked.is_none() && !asked.is(stored) => {
                let (descr, name): (Bound<'py, PyArrayDescr>, String) =
                    helper(py, "dtype")?.call1((asked,))?.extract()?;
                (descr, dtype_of(py, &name)?)
            }
            _ => (stored.clone(), self.row().dtype),
        };
        let cast = Cast::between(self.row().dtype, to).map_err(|e| errors::raise(py, &e))?;
        let size: usize = dims.iter().try_fold(descr.itemsize(), |n, d| n.checked_mul(*d)).ok_or_else(|| {
            errors::raise(py, &Error::new(Kind::Argument, "more bytes than this machine can address"))
        })?;
        let mut dataset = self.dataset(py)?;
        if dtype.is_some_and(|asked| !asked.is_none()) {
            // Rows of every stored type are converted to the requested one.
            dataset = dataset.read_as(to).map_or(dataset, Arc::new);
        }
        let counter = &AtomicU64::new(0);
        let cast = cast.counting(counter);
        let report = |counter: &AtomicU64| match (overflows, counter.load(Ordering::Relaxed)) {
            (Some(list), found @ 1..) => list.append(found),
            _ => Ok(()),
        };
        let Some(out) = out else {
            let mut array = buffer::empty(py, &descr, dims)?;
            let Some(bytes) = buffer::bytes_mut(&mut array) else {
                return Err(errors::raise(py, &Error::new(Kind::Internal, "a new array that cannot be written")));
            };
            detach::detached(py, |watch| dataset.gather(groups, pick, items, cast, Out::Dense(bytes), watch))?;
            report(counter)?;
            return Ok(array.into_any());
        };
        let mut claim = buffer::Claim::new(&self.writable(py, out, &descr, dims, size)?, "out")?;
        if overlaps(&groups, &pick, &claim) {
            let detail = "out: shares memory with the indices, which would be overwritten during the read";
            return Err(errors::raise(py, &Error::new(Kind::Argument, detail)));
        }
        let into = Out::Dense(claim.as_mut());
        detach::detached(py, |watch| dataset.gather(groups, pick, items, cast, into, watch))?;
        report(counter)?;
        Ok(out.clone())
    }

    /// The caller's buffer as an array with exactly the output's bytes.
    fn writable<'py>(
        &self,
        py: Python<'py>,
        out: &Bound<'py, PyAny>,
        descr: &Bound<'py, PyArrayDescr>,
        dims: &[usize],
        size: usize,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        if let Ok(array) = out.cast::<PyUntypedArray>() {
            let same_type = array.dtype().is(descr) || array.dtype().is_equiv_to(descr);
            if same_type && buffer::is_plain_and_writable(array) && array.len() * descr.itemsize() == size {
                return Ok(array.clone());
            }
        }
        Ok(helper(py, "writable")?.call1((out, descr, dims.to_vec()))?.extract()?)
    }
}
