//! Footers of Parquet files and headers of their pages, as Python objects.

use std::sync::Arc;

use actshard_core::parse::parquet::{self, PageKind};
use actshard_core::source::{Access, Io};
use actshard_core::threads::Context;
use actshard_core::{Error, Kind};
use pyo3::prelude::*;

use crate::place::{NamedPlace, store_of};
use crate::{detach, errors};

/// The footer of a Parquet file.
#[pyclass(frozen, module = "actshard._native", name = "ParquetFooter")]
pub struct ParquetFooterObject {
    inner: Arc<parquet::ParquetFooter>,
}

/// A leaf of the schema.
#[pyclass(frozen, get_all, module = "actshard._native", name = "ParquetLeaf")]
pub struct ParquetLeafObject {
    path: String,
    physical_type: &'static str,
    max_repetition_level: u32,
}

/// A row group.
#[pyclass(frozen, module = "actshard._native", name = "ParquetGroup")]
pub struct ParquetGroupObject {
    footer: Arc<parquet::ParquetFooter>,
    number: usize,
}

/// The values of a leaf in a row group.
#[pyclass(frozen, get_all, module = "actshard._native", name = "ParquetChunk")]
pub struct ParquetChunkObject {
    num_values: u64,
    data_page_offset: u64,
    dictionary_page_offset: Option<u64>,
    total_compressed_size: u64,
    total_uncompressed_size: u64,
    codec: &'static str,
    /// Smallest and largest value, and number of nulls if the file states it; None unless it states both and they are integers.
    range: Option<(i64, i64, Option<u64>)>,
}

/// A page, as its header describes it.
#[pyclass(frozen, get_all, module = "actshard._native", name = "ParquetPage")]
pub struct ParquetPageObject {
    is_dictionary: bool,
    body: u64,
    stored: u64,
    raw: u64,
    values: u64,
    encoding: u64,
}

fn no_such(py: Python<'_>, what: &str, number: usize, count: usize) -> PyErr {
    errors::raise(py, &Error::new(Kind::OutOfRange, format!("expected a {what} below {count}, found {number}")))
}

#[pymethods]
impl ParquetFooterObject {
    /// Number of rows.
    #[getter]
    fn num_rows(&self) -> u64 {
        self.inner.num_rows
    }

    /// Number of row groups.
    #[getter]
    fn num_groups(&self) -> usize {
        self.inner.groups.len()
    }

    /// The leaves of the schema, in order; a new list.
    #[getter]
    fn leaves(&self, py: Python<'_>) -> PyResult<Vec<ParquetLeafObject>> {
        detach::guarded(py, || {
            let leaf = |leaf: &parquet::ParquetLeaf| ParquetLeafObject {
                path: leaf.path.clone(),
                physical_type: leaf.physical_type,
                max_repetition_level: leaf.max_repetition_level,
            };
            Ok(self.inner.leaves.iter().map(leaf).collect())
        })
    }

    /// A row group.
    fn group(&self, py: Python<'_>, number: usize) -> PyResult<ParquetGroupObject> {
        detach::guarded(py, || {
            if number >= self.inner.groups.len() {
                return Err(no_such(py, "row group", number, self.inner.groups.len()));
            }
            Ok(ParquetGroupObject { footer: Arc::clone(&self.inner), number })
        })
    }
}

#[pymethods]
impl ParquetGroupObject {
    /// Number of rows.
    #[getter]
    fn num_rows(&self) -> u64 {
        self.group().num_rows
    }

    /// Bytes of all columns in the file.
    #[getter]
    fn total_compressed_size(&self) -> u64 {
        self.group().columns.iter().fold(0, |sum, chunk| sum.saturating_add(chunk.total_compressed_size))
    }

    /// The values of a leaf.
    fn column(&self, py: Python<'_>, leaf: usize) -> PyResult<ParquetChunkObject> {
        detach::guarded(py, || {
            let columns = &self.group().columns;
            let chunk = columns.get(leaf).ok_or_else(|| no_such(py, "column", leaf, columns.len()))?;
            Ok(ParquetChunkObject {
                num_values: chunk.num_values,
                data_page_offset: chunk.data_page_offset,
                dictionary_page_offset: chunk.dictionary_page_offset,
                total_compressed_size: chunk.total_compressed_size,
                total_uncompressed_size: chunk.total_uncompressed_size,
                codec: chunk.codec,
                range: chunk.range.map(|range| (range.minimum, range.maximum, range.null_count)),
            })
        })
    }

    /// The pages of a leaf, of a local file with this footer; at most `most`.
    fn pages(&self, py: Python<'_>, path: NamedPlace, leaf: usize, most: u64) -> PyResult<Vec<ParquetPageObject>> {
        detach::guarded(py, || {
            let columns = &self.group().columns;
            let chunk = columns.get(leaf).ok_or_else(|| no_such(py, "column", leaf, columns.len()))?;
            let pages = detach::detached(py, |watch| {
                let store = store_of(&path, Io::Pread);
                let read = |context: &mut Context<'_>| {
                    let source = store.open(&path.location, Access::Once, context.stop())?;
                    parquet::read_pages(&*source, chunk, most, context.stop())
                };
                store.work(&read, watch)
            })?;
            let page = |page: parquet::ParquetPage| ParquetPageObject {
                is_dictionary: page.kind == PageKind::Dictionary,
                body: page.body,
                stored: page.stored,
                raw: page.raw,
                values: page.values,
                encoding: page.encoding,
            };
            Ok(pages.into_iter().map(page).collect())
        })
    }
}

impl ParquetGroupObject {
    fn group(&self) -> &parquet::ParquetGroup {
        &self.footer.groups[self.number]
    }
}

/// Offset of the footer of a Parquet file of `size` bytes, of which `end` are the last 8. Errors name no file.
#[pyfunction]
pub fn parquet_footer_begin(py: Python<'_>, end: &[u8], size: u64) -> PyResult<u64> {
    detach::guarded(py, || parquet::footer_begin(end, size).map_err(|e| errors::raise(py, &e)))
}

/// Parses a footer, which is at byte `begin` of a file. Errors name no file.
#[pyfunction]
pub fn parquet_footer(py: Python<'_>, data: &[u8], begin: u64) -> PyResult<ParquetFooterObject> {
    detach::guarded(py, || {
        let inner = detach::detached(py, |_| parquet::parse_footer(data, begin))?;
        Ok(ParquetFooterObject { inner: Arc::new(inner) })
    })
}
