//! Batches of whole sequences, for Python.

use actshard_core::stream::packing::{PackedSequences, PackingSettings};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::stream::shuffle_of;
use crate::{detach, errors};

/// Batches of whole sequences.
#[pyclass(name = "Packing", frozen, module = "actshard._native")]
pub struct SequencePacking {
    core: PackedSequences,
}

#[pymethods]
impl SequencePacking {
    /// Plans batches of sequences of these lengths. `units` are the bounds of sequences that are read together, if any.
    #[new]
    #[pyo3(signature = (lengths, units, *, budget, pack, shuffle, seed, world_size, drop_last, window))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn new(
        py: Python<'_>,
        lengths: PyReadonlyArray1<'_, i64>,
        units: Option<PyReadonlyArray1<'_, i64>>,
        budget: u64,
        pack: bool,
        shuffle: Option<&str>,
        seed: u64,
        world_size: u64,
        drop_last: bool,
        window: u64,
    ) -> PyResult<SequencePacking> {
        detach::guarded(py, || {
            let shuffle = shuffle_of(shuffle).map_err(|e| errors::raise(py, &e))?;
            let settings = PackingSettings { budget, pack, shuffle, seed, ranks: world_size, drop_last, window };
            let lengths = lengths.as_slice()?;
            let units = units.as_ref().map(|u| u.as_slice()).transpose()?.unwrap_or_default();
            let positive = |values: &[i64]| values.iter().map(|n| u64::try_from(*n).unwrap_or(0)).collect::<Vec<_>>();
            let core = detach::detached(py, |_| PackedSequences::new(settings, &positive(lengths), &positive(units)))?;
            Ok(SequencePacking { core })
        })
    }

    /// Batches per rank.
    #[getter]
    fn batches(&self) -> u64 {
        self.core.batches()
    }

    /// Batches of all ranks.
    #[getter]
    fn all_batches(&self) -> u64 {
        self.core.all_batches()
    }

    /// The sequences of a batch, in order.
    fn batch<'py>(&self, py: Python<'py>, epoch: u64, rank: u64, batch: u64) -> PyResult<Bound<'py, PyArray1<i64>>> {
        detach::guarded(py, || {
            let found = detach::detached(py, |_| self.core.batch(epoch, rank, batch))?;
            Ok(PyArray1::from_vec(py, found.into_iter().map(|s| s as i64).collect()))
        })
    }

    /// The end of the batches from this one on that share its window.
    fn end_of_window(&self, py: Python<'_>, epoch: u64, rank: u64, batch: u64) -> PyResult<u64> {
        detach::guarded(py, || self.core.end_of_window(epoch, rank, batch).map_err(|e| errors::raise(py, &e)))
    }
}
