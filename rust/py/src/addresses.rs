//! Addresses of rows, for Python: tables, and index files.

use std::sync::Arc;

use actshard_core::layout::records::{RecordIndex, RecordSizes, RecordSplit};
use actshard_core::layout::table::{Lists, TableBuilder};
use actshard_core::location::Location;
use actshard_core::threads::Lock;
use actshard_core::{Error, Kind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::arguments::io_of;
use crate::place::{NamedPlace, store_of};
use crate::{detach, errors};

/// A table of row addresses, read from an index batch by batch.
#[pyclass(frozen, module = "actshard._native")]
pub struct Addresses {
    /// The table being built; `None` once a dataset owns it.
    pub builder: Lock<Option<TableBuilder>>,
}

impl Addresses {
    fn with<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut TableBuilder) -> actshard_core::Result<T> + Send,
    ) -> PyResult<T>
    where
        T: Send,
    {
        detach::detached(py, |_| {
            let mut slot = self.builder.lock();
            match slot.as_mut() {
                Some(builder) => work(builder),
                None => Err(used()),
            }
        })
    }
}

/// The error of a second use.
pub fn used() -> Error {
    Error::new(Kind::Argument, "these addresses already belong to a dataset")
}

#[pymethods]
impl Addresses {
    #[new]
    fn new(shards: u32) -> Addresses {
        Addresses { builder: Lock::new(Some(TableBuilder::new(shards))) }
    }

    /// Appends examples: addresses of last tokens and, if all tokens are stored, limits and values of the two lists.
    #[pyo3(signature = (shards, rows, lists=None))]
    fn push(
        &self,
        py: Python<'_>,
        shards: PyReadonlyArray1<'_, i64>,
        rows: PyReadonlyArray1<'_, i64>,
        lists: Option<[PyReadonlyArray1<'_, i64>; 4]>,
    ) -> PyResult<()> {
        detach::guarded(py, || {
            let (shards, rows) = (shards.as_slice()?, rows.as_slice()?);
            let lists = match &lists {
                Some([id_ends, ids, row_ends, rows]) => Some(Lists {
                    id_ends: id_ends.as_slice()?,
                    ids: ids.as_slice()?,
                    row_ends: row_ends.as_slice()?,
                    rows: rows.as_slice()?,
                }),
                None => None,
            };
            self.with(py, |b| b.push(shards, rows, lists))
        })
    }
}

/// An index of fixed-size records, which several [`Rows`] share: of states, and of per-token columns.
#[pyclass(frozen, module = "actshard._native")]
pub struct IndexRecords {
    /// The index.
    pub index: Arc<RecordIndex>,
}

#[pymethods]
impl IndexRecords {
    /// Opens index files. `shards` are the sizes of the files that the records refer to; `split` names the split of an example's
    /// states over several index files: "contiguous" or "head-tail".
    #[new]
    #[pyo3(signature = (files, shards, *, num_examples, record_bytes, layers, row_bytes, last, split, io))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn new(
        py: Python<'_>,
        files: Vec<NamedPlace>,
        shards: Vec<u64>,
        num_examples: u64,
        record_bytes: usize,
        layers: u64,
        row_bytes: u64,
        last: bool,
        split: &str,
        io: &str,
    ) -> PyResult<IndexRecords> {
        detach::guarded(py, || {
            let io = io_of(py, io)?;
            let split = match split {
                "contiguous" => RecordSplit::Contiguous,
                "head-tail" => RecordSplit::HeadTail,
                _ => return Err(errors::raise(py, &Error::new(Kind::Internal, "unknown split of states"))),
            };
            let sizes =
                RecordSizes { examples: num_examples, record_bytes, files: shards, layers, row_bytes, last, split };
            let index = detach::detached(py, |watch| {
                let store = files.first().map(|place| store_of(place, io));
                let store = store.ok_or_else(|| Error::new(Kind::Internal, "no index file"))?;
                let locations: Vec<Location> = files.into_iter().map(|place| place.location).collect();
                store.work(&|context| RecordIndex::open(&*store, &locations, sizes.clone(), context), watch)
            })?;
            Ok(IndexRecords { index: Arc::new(index) })
        })
    }
}
