//! The binding: converts Python arguments and results to and from the core's types. It never computes.
//!
//! - `arguments`: numbers, names and types from Python
//! - `handle`: [`handle::Rows`], the rows of a dataset as one object
//! - `rows`: its methods; `addresses`: tables and index files of row addresses; `chunk_arrays`: arrays in chunks
//! - `stream`: ordered batches, read ahead by a thread
//! - `buffer`: memory shared with numpy, the only `unsafe` of this crate
//! - `place`: paths and remote locations from Python; `remote`: the stores of the latter
//! - `containers`: files that contain arrays, such as those of torch.save
//! - `copying`: copies of objects in local files, and the cache on disk
//! - `detach`: the only function that releases the GIL
//! - `tokens`: token caches, their batches and orders
//! - `summing`: statistics and scans
//! - `write`: writing files
//! - `pickle`: values of a pickle as Python objects
//! - `errors`: the core's errors as the exceptions of `actshard.base.errors`

mod addresses;
mod arguments;
mod buffer;
mod chunk_arrays;
mod containers;
mod copying;
mod decoding;
mod detach;
mod errors;
mod handle;
mod joined;
mod packing;
mod parquet;
mod pickle;
mod place;
#[cfg(feature = "remote")]
mod remote;
#[cfg(not(feature = "remote"))]
#[path = "remote_absent.rs"]
mod remote;
mod rows;
mod stream;
mod summing;
mod tokens;
mod write;

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use actshard_core::arrays::coded;
use actshard_core::arrays::element::Fill;
use actshard_core::arrays::meta::ArrayMeta;
use actshard_core::codec::planes;
use actshard_core::dtype::DType;
use actshard_core::parse::arrow::{self, ArrowField};
use actshard_core::parse::safetensors;
use actshard_core::source::{Access, Io, pread};
use actshard_core::threads::{self, Context, Watch};
use actshard_core::{Finding, Kind};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};

use crate::place::{NamedPlace, store_of};

/// `[(name, dtype, shape, begin, end)]` sorted by offset, the `__metadata__` pairs, and the data offset.
type HeaderTuple = (Vec<(String, &'static str, Vec<u64>, u64, u64)>, Vec<(String, String)>, u64);

fn header_tuple(header: safetensors::Header) -> HeaderTuple {
    let tensors = header.tensors.into_iter().map(|t| (t.name, t.dtype.name(), t.shape, t.begin, t.end)).collect();
    (tensors, header.metadata, header.data_start)
}

/// Reads and checks the header of a safetensors file.
#[pyfunction]
fn safetensors_header(py: Python<'_>, path: NamedPlace) -> PyResult<HeaderTuple> {
    detach::guarded(py, || {
        let store = store_of(&path, Io::Pread);
        detach::detached(py, |watch| {
            let read = |context: &mut Context<'_>| {
                safetensors::read_header(&*store.open(&path.location, Access::Once, context.stop())?, context.stop())
            };
            store.work(&read, watch).map(header_tuple)
        })
    })
}

/// Checks the header of a safetensors file in memory.
#[pyfunction]
fn parse_safetensors(py: Python<'_>, data: &[u8]) -> PyResult<HeaderTuple> {
    detach::guarded(py, || detach::detached(py, |_| safetensors::parse_bytes(data).map(header_tuple)))
}

/// A column of an Arrow stream: name, type, sizes, texts, columns inside, metadata.
#[derive(IntoPyObject)]
struct ArrowColumn(String, &'static str, Vec<i64>, Vec<String>, Vec<ArrowColumn>, Vec<(String, String)>);

impl ArrowColumn {
    fn of(field: ArrowField) -> ArrowColumn {
        let ArrowField { name, of, children, metadata } = field;
        let children = children.into_iter().map(ArrowColumn::of).collect();
        ArrowColumn(name, of.name, of.sizes, of.texts, children, metadata)
    }
}

/// Columns, metadata, batches (offset, rows, nodes, buffers), and whether the stream has its end marker.
type ArrowTuple = (Vec<ArrowColumn>, Vec<(String, String)>, Vec<(u64, u64, Vec<(u64, i64)>, Vec<(u64, u64)>)>, bool);

/// Reads and checks the headers of an Arrow IPC stream.
#[pyfunction]
fn arrow_stream(py: Python<'_>, path: NamedPlace) -> PyResult<ArrowTuple> {
    detach::guarded(py, || {
        let store = store_of(&path, Io::Pread);
        detach::detached(py, |watch| {
            let read = |context: &mut Context<'_>| {
                arrow::read_stream(&*store.open(&path.location, Access::Once, context.stop())?, context.stop())
            };
            let found = store.work(&read, watch)?;
            let fields = found.schema.fields.into_iter().map(ArrowColumn::of).collect();
            let batches = found.batches.into_iter().map(|b| (b.at, b.rows, b.nodes, b.buffers)).collect();
            Ok((fields, found.schema.metadata, batches, found.ended))
        })
    })
}

/// Reads a whole small Zarr array whose existing chunks are listed. Returns the bytes of its elements (at most `most`), or a
/// list of the bytes of its strings.
#[pyfunction]
fn read_zarr<'py>(
    py: Python<'py>,
    folder: NamedPlace,
    metadata: &[u8],
    there: Vec<Vec<u64>>,
    most: u64,
) -> PyResult<Bound<'py, PyAny>> {
    detach::guarded(py, || {
        let store = store_of(&folder, Io::Pread);
        let read = |watch: Watch<'_>| coded::read_whole(&*store, &folder.location, metadata, there, most, watch);
        Ok(match detach::detached(py, read)? {
            coded::Elements::Fixed(bytes) => PyBytes::new(py, &bytes).into_any(),
            coded::Elements::Variable(each) => PyList::new(py, each.iter().map(|b| PyBytes::new(py, b)))?.into_any(),
        })
    })
}

/// The parsed metadata of a Zarr array, in a store of version 2 or 3.
#[pyclass(frozen, get_all, module = "actshard._native")]
struct ZarrMeta {
    shape: Vec<u64>,
    outer: Vec<u64>,
    chunks: Vec<u64>,
    dtype: Option<String>,
    swapped: bool,
    fill: Py<PyAny>,
    prefix: &'static str,
    separator: &'static str,
    how: String,
    inner: bool,
    codecs: Vec<String>,
}

#[pymethods]
impl ZarrMeta {
    /// `place` precedes field names in errors; errors name no file.
    #[new]
    fn new(py: Python<'_>, version: u8, text: &[u8], place: &str) -> PyResult<ZarrMeta> {
        detach::guarded(py, || {
            let meta = ArrayMeta::of_store(version, text, place).map_err(|e| errors::raise(py, &e))?;
            let fill = match meta.fill {
                Fill::Absent => 0.into_py_any(py),
                Fill::Bool(b) => b.into_py_any(py),
                Fill::Integer(n) => n.into_py_any(py),
                Fill::Float(n) => n.into_py_any(py),
                Fill::Bits(bytes) => PyBytes::new(py, &bytes).into_py_any(py),
                Fill::Text(text) => text.into_py_any(py),
            }?;
            Ok(ZarrMeta {
                shape: meta.shape,
                outer: meta.outer,
                chunks: meta.inner,
                dtype: meta.element.numpy(),
                swapped: meta.swapped,
                fill,
                prefix: meta.naming.prefix(),
                separator: meta.naming.separator(),
                how: meta.how,
                inner: meta.index.is_some(),
                codecs: meta.codecs,
            })
        })
    }
}

/// Why the core's codecs cannot read a Zarr array, or None.
#[pyfunction]
fn zarr_problem(py: Python<'_>, folder: NamedPlace, metadata: &[u8]) -> PyResult<Option<String>> {
    detach::guarded(py, || detach::detached(py, |_| Ok(coded::problem(&folder.location, metadata))))
}

/// Raises unless compressed data decode to at most `limit` bytes.
#[pyfunction]
fn check_decoded_size(py: Python<'_>, codec: &str, data: &[u8], limit: u64, path: NamedPlace) -> PyResult<()> {
    detach::guarded(py, || detach::detached(py, |_| coded::check_decoded_size(codec, data, limit, &path.location)))
}

/// Packs rows of `width` values of `typesize` bytes as a block of the codec `actshard.planes`.
#[pyfunction]
fn encode_planes<'py>(py: Python<'py>, rows: &[u8], typesize: usize, width: usize) -> PyResult<Bound<'py, PyBytes>> {
    detach::guarded(py, || {
        let block = detach::detached(py, |_| planes::encode(rows, typesize, width))?;
        Ok(PyBytes::new(py, &block))
    })
}

/// Unpacks a block of the codec `actshard.planes` of at most `limit` bytes of rows.
#[pyfunction]
fn decode_planes<'py>(py: Python<'py>, block: &[u8], limit: u64) -> PyResult<Bound<'py, PyBytes>> {
    detach::guarded(py, || {
        let rows = detach::detached(py, |_| planes::decode(block, limit))?;
        Ok(PyBytes::new(py, &rows))
    })
}

/// `(safetensors name, numpy or ml_dtypes name or None, bits)` of every element type.
#[pyfunction]
fn dtypes() -> Vec<(&'static str, Option<&'static str>, u64)> {
    DType::ALL.iter().map(|d| (d.name(), d.numpy_name(), d.bits())).collect()
}

/// The codes of all error kinds, for the test that compares them with `actshard.base.errors`.
#[pyfunction]
fn error_kinds() -> Vec<&'static str> {
    Kind::ALL.iter().map(|k| k.code()).collect()
}

/// The finding codes that the core uses, for the test that compares them with the table of codes.
#[pyfunction]
fn finding_codes() -> Vec<&'static str> {
    Finding::ALL.iter().map(|f| f.code()).collect()
}

/// The named rules that a safetensors header can break.
#[pyfunction]
fn header_reasons() -> Vec<&'static str> {
    safetensors::Reason::ALL.iter().map(|r| r.name()).collect()
}

/// Whether a path is on a network or user-space file system.
#[pyfunction]
fn is_network(py: Python<'_>, path: PathBuf) -> PyResult<bool> {
    detach::guarded(py, || {
        // Without the GIL: statfs of a network file system blocks if its server is down.
        detach::detached(py, |_| Ok(pread::is_network(&path)))
    })
}

/// Number of threads for large reads.
#[pyfunction]
fn num_threads() -> usize {
    threads::num_threads()
}

/// Number of times that reads took the GIL to check for signals, for tests.
#[pyfunction]
fn looks() -> u64 {
    detach::LOOKS.load(Ordering::Relaxed)
}

/// Panics, to test how panics are reported.
#[pyfunction]
#[allow(clippy::panic, reason = "the test needs a panic")]
fn panic_for_test(py: Python<'_>, detached: bool) -> PyResult<()> {
    detach::guarded(py, || {
        if detached {
            return detach::detached(py, |_| std::panic::panic_any("on purpose"));
        }
        std::panic::panic_any("on purpose")
    })
}

/// Build information: version, profile, target, ABI. A build without remote stores has the profile `demo`.
#[pyfunction]
fn build_info(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    detach::guarded(py, || {
        let info = PyDict::new(py);
        info.set_item("version", env!("CARGO_PKG_VERSION"))?;
        let profile = match (cfg!(feature = "remote"), cfg!(debug_assertions)) {
            (false, _) => "demo",
            (true, true) => "debug",
            (true, false) => "release",
        };
        info.set_item("profile", profile)?;
        info.set_item("target", format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS))?;
        info.set_item("abi", "abi3-py311")?;
        Ok(info)
    })
}

/// The native half of actshard.
#[pymodule(gil_used = true)]
fn _native(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<containers::TorchContents>()?;
    m.add_class::<pickle::StoredArray>()?;
    m.add_class::<pickle::RefusedObject>()?;
    m.add_class::<handle::Rows>()?;
    m.add_class::<addresses::Addresses>()?;
    m.add_class::<addresses::IndexRecords>()?;
    m.add_class::<stream::Stream>()?;
    m.add_class::<stream::Batches>()?;
    m.add_class::<packing::SequencePacking>()?;
    m.add_class::<ZarrMeta>()?;
    m.add_class::<remote::RemoteStore>()?;
    m.add_function(wrap_pyfunction!(remote::is_remote, m)?)?;
    m.add_function(wrap_pyfunction!(copying::copy_ranges, m)?)?;
    m.add_function(wrap_pyfunction!(copying::disk_cache_info, m)?)?;
    m.add_function(wrap_pyfunction!(copying::clear_disk_cache, m)?)?;
    m.add_function(wrap_pyfunction!(safetensors_header, m)?)?;
    m.add_function(wrap_pyfunction!(parse_safetensors, m)?)?;
    m.add_function(wrap_pyfunction!(arrow_stream, m)?)?;
    m.add_class::<parquet::ParquetFooterObject>()?;
    m.add_class::<parquet::ParquetLeafObject>()?;
    m.add_class::<parquet::ParquetGroupObject>()?;
    m.add_class::<parquet::ParquetChunkObject>()?;
    m.add_class::<parquet::ParquetPageObject>()?;
    m.add_function(wrap_pyfunction!(parquet::parquet_footer_begin, m)?)?;
    m.add_function(wrap_pyfunction!(parquet::parquet_footer, m)?)?;
    m.add_function(wrap_pyfunction!(read_zarr, m)?)?;
    m.add_function(wrap_pyfunction!(check_decoded_size, m)?)?;
    m.add_function(wrap_pyfunction!(encode_planes, m)?)?;
    m.add_function(wrap_pyfunction!(decode_planes, m)?)?;
    m.add_function(wrap_pyfunction!(zarr_problem, m)?)?;
    m.add_function(wrap_pyfunction!(stream::count_selected, m)?)?;
    m.add_function(wrap_pyfunction!(stream::rescale_rows, m)?)?;
    m.add_function(wrap_pyfunction!(summing::joined_sums, m)?)?;
    m.add_function(wrap_pyfunction!(summing::total_sums, m)?)?;
    m.add_function(wrap_pyfunction!(pickle::load_pickle, m)?)?;
    m.add_function(wrap_pyfunction!(pickle::load_pickle_file, m)?)?;
    m.add_function(wrap_pyfunction!(containers::read_torch, m)?)?;
    m.add_function(wrap_pyfunction!(containers::read_arrays, m)?)?;
    m.add_function(wrap_pyfunction!(containers::read_array, m)?)?;
    m.add_function(wrap_pyfunction!(containers::placed_rows, m)?)?;
    m.add_function(wrap_pyfunction!(write::write_pieces, m)?)?;
    m.add_function(wrap_pyfunction!(write::write_segments, m)?)?;
    m.add_function(wrap_pyfunction!(write::digest_file, m)?)?;
    m.add_function(wrap_pyfunction!(write::sync_files, m)?)?;
    m.add_function(wrap_pyfunction!(write::move_files, m)?)?;
    m.add_function(wrap_pyfunction!(write::remove_folders, m)?)?;
    m.add_function(wrap_pyfunction!(write::copy_range, m)?)?;
    m.add_function(wrap_pyfunction!(write::cast_into, m)?)?;
    m.add_function(wrap_pyfunction!(write::quantise, m)?)?;
    m.add_function(wrap_pyfunction!(write::quantise_spans, m)?)?;
    m.add_function(wrap_pyfunction!(write::raise_largest, m)?)?;
    m.add_function(wrap_pyfunction!(write::count_overflows, m)?)?;
    m.add_function(wrap_pyfunction!(write::hash_rows, m)?)?;
    m.add_function(wrap_pyfunction!(write::encode_shard_index, m)?)?;
    m.add_function(wrap_pyfunction!(write::pack_chunks, m)?)?;
    m.add_class::<tokens::BlockCache>()?;
    m.add_class::<tokens::TokenField>()?;
    m.add_class::<tokens::write::TokenFieldWriter>()?;
    m.add_class::<tokens::order::TokenOrder>()?;
    m.add_function(wrap_pyfunction!(tokens::pack_rows, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::run_lengths, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::write::token_array_size, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::order::jax_key, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::order::jax_split, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::order::jax_fold_in, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::order::jax_randint30, m)?)?;
    m.add_function(wrap_pyfunction!(tokens::order::jax_permutation, m)?)?;
    m.add_function(wrap_pyfunction!(dtypes, m)?)?;
    m.add_function(wrap_pyfunction!(error_kinds, m)?)?;
    m.add_function(wrap_pyfunction!(finding_codes, m)?)?;
    m.add_function(wrap_pyfunction!(header_reasons, m)?)?;
    m.add_function(wrap_pyfunction!(is_network, m)?)?;
    m.add_function(wrap_pyfunction!(num_threads, m)?)?;
    m.add_function(wrap_pyfunction!(looks, m)?)?;
    m.add_function(wrap_pyfunction!(panic_for_test, m)?)?;
    m.add_function(wrap_pyfunction!(build_info, m)?)
}
