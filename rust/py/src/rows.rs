//! The rows of a dataset, for Python.

use std::collections::HashMap;
use std::sync::Arc;

use actshard_core::files::Files;
use actshard_core::files::chunks::ChunkFiles;
use actshard_core::files::shards::{ShardSpec, Shards};
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::gather::{Ints, Pick};
use actshard_core::layout::chunked::{Chunked, Lengths, Member};
use actshard_core::layout::records::{RecordRows, Records};
use actshard_core::layout::spans::{PartSpans, PerExample, Spans};
use actshard_core::layout::strided::Strided;
use actshard_core::layout::tensors::{TensorGroup, TensorParts, Tensors};
use actshard_core::parse::safetensors::TensorRows;
use actshard_core::rows::Rows as Dataset;
use actshard_core::rows::chosen::Chosen;
use actshard_core::rows::several::Several;
use actshard_core::source::{Io, Store};
use actshard_core::{DType, Error, Kind};
use numpy::{PyArray1, PyArrayDescr, PyReadonlyArray1, PyUntypedArray};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyDict, PyList};

use crate::addresses::{Addresses, IndexRecords, used};
use crate::arguments::{IndexArgument, dtype_of, groups_of, helper, io_of};
use crate::chunk_arrays::{ChunkArrayTuple, ChunkScalesTuple, chunk_array};
use crate::handle::{Destination, RowArguments, Rows};
use crate::place::{NamedPlace, remote_store};
use crate::{buffer, detach, errors, joined, pickle, stream, summing};

/// A shard, as passed to [`Rows::shards`]: path, whether compressed, size and SHA-256 (if they are to be checked), number of
/// samples, smallest and largest sample number, layers, maximum inflated bytes.
type ShardTuple = (NamedPlace, bool, Option<u64>, Option<[u8; 32]>, u64, (i64, i64), Vec<i64>, u64);

/// A part of every example, as passed to [`Rows::spans`]: file numbers (one or uint32 per example), first rows (uint64),
/// tokens (one or uint32 per example), rows from one group to the next.
type PartTuple<'py> = (Bound<'py, PyAny>, PyReadonlyArray1<'py, u64>, Bound<'py, PyAny>, u64);

/// One number for all examples, or a uint32 array with one for each.
fn per_example(numbers: &Bound<'_, PyAny>) -> PyResult<PerExample<u32>> {
    Ok(match numbers.extract::<u32>() {
        Ok(same) => PerExample::Same(same),
        Err(_) => PerExample::Each(numbers.extract::<PyReadonlyArray1<'_, u32>>()?.as_slice()?.to_vec()),
    })
}

/// The examples of [`Rows::choose`].
#[derive(FromPyObject)]
enum ChosenBy {
    /// First, step, count.
    Range(i64, i64, u64),
    /// Native 64-bit integers.
    Numbers(PyBackedBytes),
}

/// A table of files of a remote store, or of local ones.
fn file_table(
    store: Option<Arc<dyn Store>>,
    files: Vec<RowFile>,
    width: u64,
    dtype: DType,
    io: Io,
) -> actshard_core::Result<FileTable> {
    match store {
        Some(store) => FileTable::of(store, files, width, dtype),
        None => FileTable::new(files, width, dtype, io),
    }
}

/// A join of these rows.
fn join(
    py: Python<'_>,
    parts: &[PyRef<'_, Rows>],
    dtype: Option<&str>,
    descr: Bound<'_, PyArrayDescr>,
    io: &str,
    make: impl FnOnce(Vec<Arc<Dataset>>, Option<DType>) -> actshard_core::Result<Several<Dataset>> + Send,
) -> PyResult<Rows> {
    let parts = parts.iter().map(|part| part.dataset(py)).collect::<PyResult<Vec<_>>>()?;
    let dtype = dtype.map(|name| dtype_of(py, name)).transpose()?;
    let made = detach::detached(py, |_| make(parts, dtype))?;
    Rows::new(py, Dataset::Several(made), io_of(py, io)?, descr)
}

fn as_shards<'a>(py: Python<'_>, dataset: &'a Dataset) -> PyResult<&'a Shards> {
    match dataset {
        Dataset::Shards(shards, _) => Ok(shards),
        _ => Err(errors::raise(py, &Error::new(Kind::Internal, "rows that are not of pickle shards"))),
    }
}

#[pymethods]
impl Rows {
    /// Rows at computed addresses: file f has `rows_per_file[f]` rows of `width` elements, starting at its first byte.
    #[staticmethod]
    #[pyo3(signature = (files, *, num_examples, examples_per_file, num_groups, num_tokens, width, dtype, descr, io))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn strided(
        py: Python<'_>,
        files: Vec<(NamedPlace, u64)>,
        num_examples: u64,
        examples_per_file: u64,
        num_groups: u64,
        num_tokens: u64,
        width: u64,
        dtype: &str,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            RowArguments { width, dtype, descr, io }.rows(py, |width, dtype, io| {
                let store = remote_store(files.iter().map(|(place, _)| place))?;
                let file =
                    |(place, rows): (NamedPlace, u64)| RowFile { location: place.location, rows: RowsIn::Raw(rows) };
                let layout = Strided::new(num_examples, examples_per_file, num_groups, num_tokens)?;
                let table = file_table(store, files.into_iter().map(file).collect(), width, dtype, io)?;
                Ok(Dataset::Strided(table, layout))
            })
        })
    }

    /// Rows from a table of addresses: `files[g * shards + s]` is group g's shard s, with the key of its 2-D tensor.
    #[staticmethod]
    #[pyo3(signature = (files, addresses, *, num_groups, width, dtype, descr, io))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn table(
        py: Python<'_>,
        files: Vec<(NamedPlace, String)>,
        addresses: &Addresses,
        num_groups: usize,
        width: u64,
        dtype: &str,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            RowArguments { width, dtype, descr, io }.rows(py, |width, dtype, io| {
                let store = remote_store(files.iter().map(|(place, _)| place))?;
                let in_file = |key| RowsIn::Found(Arc::new(TensorRows(key)));
                let file = |(place, key): (NamedPlace, _)| RowFile { location: place.location, rows: in_file(key) };
                // Another thread may be adding addresses, without the GIL.
                let builder = addresses.builder.lock().take();
                let table = builder.ok_or_else(used)?.finish(num_groups)?;
                let files = file_table(store, files.into_iter().map(file).collect(), width, dtype, io)?;
                Ok(Dataset::Table(files, table))
            })
        })
    }

    /// Rows at offsets: `files` are (path, offset of the first row, rows, whether byte-swapped); `parts` locate each example's
    /// rows, part after part of its tokens (see [`PartTuple`]).
    #[staticmethod]
    #[pyo3(signature = (files, parts, *, num_groups, width, dtype, descr, io))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn spans(
        py: Python<'_>,
        files: Vec<(NamedPlace, u64, u64, bool)>,
        parts: Vec<PartTuple<'_>>,
        num_groups: usize,
        width: u64,
        dtype: &str,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            let parts = parts
                .into_iter()
                .map(|(files, starts, tokens, stride)| {
                    Ok(PartSpans {
                        files: per_example(&files)?,
                        starts: starts.as_slice()?.to_vec(),
                        tokens: per_example(&tokens)?,
                        stride,
                    })
                })
                .collect::<PyResult<_>>()?;
            RowArguments { width, dtype, descr, io }.rows(py, |width, dtype, io| {
                let store = remote_store(files.iter().map(|(place, ..)| place))?;
                let layout = Spans::new(num_groups, files.len(), parts)?;
                let file = |(place, start, rows, swapped): (NamedPlace, _, _, _)| RowFile {
                    location: place.location,
                    rows: RowsIn::At { start, rows, swapped },
                };
                let files = file_table(store, files.into_iter().map(file).collect(), width, dtype, io)?.growing();
                Ok(Dataset::Spans(files, layout))
            })
        })
    }

    /// Rows of tensors in files: `files` are (path, bytes from one row to the next); `tokens` are those of each example; `tensors`
    /// are (file numbers, one or uint32 per example; byte of each example's first row); `groups` are (tensor, byte in its rows).
    #[staticmethod]
    #[pyo3(signature = (files, tokens, tensors, groups, *, width, dtype, descr, io))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn tensors(
        py: Python<'_>,
        files: Vec<(NamedPlace, u64)>,
        tokens: PyReadonlyArray1<'_, u32>,
        tensors: Vec<(Bound<'_, PyAny>, PyReadonlyArray1<'_, u64>)>,
        groups: Vec<(usize, u64)>,
        width: u64,
        dtype: &str,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            let parts = tensors
                .into_iter()
                .map(|(files, starts)| {
                    Ok(TensorParts { files: per_example(&files)?, starts: starts.as_slice()?.to_vec() })
                })
                .collect::<PyResult<_>>()?;
            let tokens = tokens.as_slice()?.to_vec();
            RowArguments { width, dtype, descr, io }.rows(py, |width, dtype, io| {
                let store = remote_store(files.iter().map(|(place, _)| place))?;
                let groups = groups.into_iter().map(|(tensor, offset)| TensorGroup { tensor, offset }).collect();
                let steps = files.iter().map(|(_, step)| *step).collect();
                let layout = Tensors::new(tokens, parts, groups, steps)?;
                let file = |(place, step): (NamedPlace, u64)| RowFile {
                    location: place.location,
                    rows: RowsIn::Apart { step, swapped: false },
                };
                let table = file_table(store, files.into_iter().map(file).collect(), width, dtype, io)?;
                Ok(Dataset::Tensors(table, layout))
            })
        })
    }

    /// Rows found by an index of records: the states, a group per layer and one of last rows, or (`column`) one of the per-token
    /// columns, with a single group.
    #[staticmethod]
    #[pyo3(signature = (files, index, *, column, width, dtype, descr, io))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn indexed(
        py: Python<'_>,
        files: Vec<NamedPlace>,
        index: &IndexRecords,
        column: Option<usize>,
        width: u64,
        dtype: &str,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            let rows = column.map_or(RecordRows::States, RecordRows::Column);
            RowArguments { width, dtype, descr, io }.rows(py, |width, dtype, io| {
                let store = remote_store(&files)?;
                let layout = Records::new(Arc::clone(&index.index), rows)?;
                let steps = layout.steps();
                let file = |(place, step): (&NamedPlace, u64)| RowFile {
                    location: place.location.clone(),
                    rows: RowsIn::Apart { step, swapped: false },
                };
                let listed = files.iter().cycle().zip(steps).map(file).collect();
                let table = file_table(store, listed, width, dtype, io)?.growing();
                if index.index.sizes().files.len() != files.len() || table.row().bytes as u64 != layout.row_bytes() {
                    return Err(Error::new(Kind::Internal, "an index of other files or rows"));
                }
                Ok(Dataset::Records(table, layout))
            })
        })
    }

    /// Rows of files that follow each other, cut into examples. `files` of group g, of `num_groups` equal parts of the list, are
    /// that part; `void` are the numbers of examples without rows.
    #[staticmethod]
    #[pyo3(signature = (files, cut, *, void, num_groups, width, dtype, descr, io))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn joined(
        py: Python<'_>,
        files: Vec<joined::JoinedTuple>,
        cut: joined::CutBy<'_>,
        void: Vec<u64>,
        num_groups: usize,
        width: u64,
        dtype: &str,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            let cut = cut.examples()?;
            RowArguments { width, dtype, descr, io }.rows(py, |width, dtype, io| {
                let store = remote_store(files.iter().map(|(place, ..)| place))?;
                let (files, layout) = joined::parts(files, cut, void, num_groups)?;
                Ok(Dataset::Joined(file_table(store, files, width, dtype, io)?, layout))
            })
        })
    }

    /// Rows of chunked arrays: `members` are (examples, indices of arrays in token order), `lengths` has one entry per array
    /// of a member: its number of tokens, for all examples or for each. `scales` are those of arrays of codes, whose rows are their
    /// products.
    #[staticmethod]
    #[pyo3(signature = (arrays, members, lengths, *, num_groups, width, dtype, decoded_memory, descr, io, scales=vec![]))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn chunked(
        py: Python<'_>,
        arrays: Vec<ChunkArrayTuple>,
        members: Vec<(u64, Vec<usize>)>,
        lengths: Vec<Bound<'_, PyAny>>,
        num_groups: usize,
        width: u64,
        dtype: &str,
        decoded_memory: u64,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
        scales: Vec<Option<ChunkScalesTuple<'_>>>,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            let store = remote_store(arrays.iter().map(|(folder, ..)| folder)).map_err(|e| errors::raise(py, &e))?;
            let scales = scales.into_iter().chain(std::iter::repeat_with(|| None));
            let arrays = arrays.into_iter().zip(scales).map(|(array, scales)| chunk_array(py, array, scales));
            let arrays = arrays.collect::<PyResult<_>>()?;
            let lengths = lengths
                .iter()
                .map(|each| match each.extract::<u64>() {
                    Ok(same) => Ok(Lengths::Same(same)),
                    Err(_) => {
                        let each: PyReadonlyArray1<'_, u32> = each.extract()?;
                        Ok(Lengths::Each(each.as_slice()?.to_vec()))
                    }
                })
                .collect::<PyResult<_>>()?;
            RowArguments { width, dtype, descr, io }.rows(py, |width, dtype, io| {
                let files = match store {
                    Some(store) => ChunkFiles::of(store, arrays, width, dtype, decoded_memory)?,
                    None => ChunkFiles::new(arrays, width, dtype, decoded_memory, io)?,
                };
                let grids = files.grids();
                let grid = |p: usize| {
                    let unknown = || Error::new(Kind::Internal, "a member of unknown arrays");
                    grids.get(p).copied().ok_or_else(unknown)
                };
                let member = |(examples, parts): (u64, Vec<usize>)| {
                    Ok(Member { examples, parts: parts.into_iter().map(grid).collect::<actshard_core::Result<_>>()? })
                };
                let members = members.into_iter().map(member).collect::<actshard_core::Result<_>>()?;
                Ok(Dataset::Chunked(files, Chunked::new(num_groups, members, lengths)?))
            })
        })
    }

    /// Rows of pickle shards. Parses the first shard, which determines the width and dtype of rows.
    #[staticmethod]
    #[pyo3(signature = (shards, *, layers, decoded_memory, io))]
    fn shards(
        py: Python<'_>,
        shards: Vec<ShardTuple>,
        layers: Vec<i64>,
        decoded_memory: u64,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            let io = io_of(py, io)?;
            let store = remote_store(shards.iter().map(|(place, ..)| place)).map_err(|e| errors::raise(py, &e))?;
            let specs = shards
                .into_iter()
                .map(|(place, compressed, size, sha256, samples, ids, layers, limit)| ShardSpec {
                    location: place.location,
                    compressed,
                    size,
                    sha256,
                    samples,
                    ids,
                    layers,
                    limit,
                })
                .collect();
            let shards = detach::detached(py, |watch| match store {
                Some(store) => Shards::of(store, false, specs, layers, decoded_memory, watch),
                None => Shards::open(specs, layers, decoded_memory, io, watch),
            })?;
            let descr = helper(py, "stored")?.call1((shards.row().dtype.name(),))?.extract()?;
            Rows::new(py, Dataset::Shards(Arc::new(shards), None), io, descr)
        })
    }

    /// Some of the dataset's examples, renumbered from 0, as a separate handle: `(first, step, count)`, or int64
    /// numbers as bytes, which are not copied. Numbers are those of the whole dataset, even if this is already a
    /// choice.
    fn choose(&self, py: Python<'_>, examples: ChosenBy) -> PyResult<Rows> {
        detach::guarded(py, || {
            let dataset = self.dataset(py)?;
            let whole = match &*dataset {
                Dataset::Chosen(of, _) => Arc::clone(of),
                _ => dataset,
            };
            let chosen = detach::detached(py, |_| match examples {
                ChosenBy::Range(first, step, count) => Chosen::range(first, step, count, whole.examples()),
                ChosenBy::Numbers(numbers) => Chosen::listed(Arc::new(numbers), whole.examples()),
            })?;
            Rows::new(py, Dataset::Chosen(whole, chosen), self.mode(), self.stored(py))
        })
    }

    /// The examples of several datasets, one after the other: `groups[p][g]` is dataset p's number of group g. Rows are read as
    /// `dtype`; None: as the first one's, which all have. `shifts`: the parts are runs of one dataset, and errors name examples by
    /// numbers that are too small by these.
    #[staticmethod]
    #[pyo3(signature = (parts, groups, dtype, descr, io, shifts=vec![]))]
    fn several(
        py: Python<'_>,
        parts: Vec<PyRef<'_, Rows>>,
        groups: Vec<Vec<usize>>,
        dtype: Option<&str>,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
        shifts: Vec<u64>,
    ) -> PyResult<Rows> {
        detach::guarded(py, || {
            join(py, &parts, dtype, descr, io, |parts, dtype| {
                Ok(Several::examples(parts, groups, dtype)?.of_one_dataset(shifts))
            })
        })
    }

    /// The same examples of several datasets: each of `groups` is a dataset's number and a group's number in it.
    #[staticmethod]
    fn paired(
        py: Python<'_>,
        parts: Vec<PyRef<'_, Rows>>,
        groups: Vec<(usize, usize)>,
        dtype: Option<&str>,
        descr: Bound<'_, PyArrayDescr>,
        io: &str,
    ) -> PyResult<Rows> {
        detach::guarded(py, || join(py, &parts, dtype, descr, io, |parts, dtype| Several::groups(parts, groups, dtype)))
    }

    /// The numpy dtype of the rows.
    #[getter]
    fn descr<'py>(&self, py: Python<'py>) -> Bound<'py, PyArrayDescr> {
        self.stored(py)
    }

    /// Elements per row.
    #[getter]
    fn width(&self) -> usize {
        self.row().width
    }

    /// Shards inflated so far, for tests.
    #[getter]
    fn inflated(&self, py: Python<'_>) -> u64 {
        match self.dataset(py).as_deref() {
            Ok(Dataset::Shards(shards, _)) => shards.inflated(),
            _ => 0,
        }
    }

    /// `sample_idx` of every sample of a pickle shard, in order.
    fn samples(&self, py: Python<'_>, shard: usize) -> PyResult<Vec<i64>> {
        detach::guarded(py, || {
            let dataset = self.dataset(py)?;
            let shards = as_shards(py, &dataset)?;
            let first = shards.first_of(shard).map_err(|e| errors::raise(py, &e))?;
            detach::detached(py, |watch| {
                let prepared = shards.prepare(Some(&mut std::iter::once(first)), watch)?;
                Ok(prepared.samples().collect())
            })
        })
    }

    /// For every sample of a pickle shard: `(sample_idx, text_preview, shape, layers, metadata)`.
    fn records<'py>(&self, py: Python<'py>, shard: usize) -> PyResult<Vec<Bound<'py, PyAny>>> {
        detach::guarded(py, || {
            let dataset = self.dataset(py)?;
            let shards = as_shards(py, &dataset)?;
            let values = detach::detached(py, |watch| shards.values(shard, watch))?;
            pickle::records(py, &values).map_err(|e| match e {
                pickle::Failed::Python(raised) => raised,
                pickle::Failed::Core(e) => errors::raise(py, &e.at(&shards.specs()[shard].location)),
            })
        })
    }

    /// The stored numpy dtypes in one group: one for each of these examples, or, with None, every one that occurs.
    fn stored_types<'py>(
        &self,
        py: Python<'py>,
        group: usize,
        examples: Option<PyReadonlyArray1<'py, i64>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let dataset = self.dataset(py)?;
        let examples = examples.as_ref().map(|e| e.as_slice()).transpose()?;
        let found = detach::detached(py, |watch| match examples {
            Some(examples) => dataset.types_of(group, examples, watch),
            None => dataset.stored_types(watch),
        })?;
        let stored = helper(py, "stored")?;
        let mut made: HashMap<&str, Bound<'py, PyAny>> = HashMap::new();
        let each = found.iter().map(|dtype| match made.get(dtype.name()) {
            Some(known) => Ok(known.clone()),
            None => Ok(made.entry(dtype.name()).or_insert(stored.call1((dtype.name(),))?).clone()),
        });
        each.collect()
    }

    /// The read mode: "mmap" or "pread".
    #[getter]
    fn io(&self) -> &'static str {
        match self.mode() {
            Io::Mmap => "mmap",
            Io::Pread => "pread",
        }
    }

    /// Tokens stored per example, int64; equal for all examples in a strided layout.
    fn token_counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        detach::guarded(py, || {
            let dataset = self.dataset(py)?;
            Ok(PyArray1::from_vec(py, detach::detached(py, |watch| dataset.token_counts(watch))?))
        })
    }

    /// Numbers of tokens stored for these examples, in one group or one group each.
    fn tokens_of<'py>(
        &self,
        py: Python<'py>,
        groups: &Bound<'py, PyAny>,
        examples: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        detach::guarded(py, || {
            let (groups, ids) = (groups_of(py, groups, examples.as_slice()?.len())?, examples.as_slice()?);
            Ok(PyArray1::from_vec(py, self.count(py, groups.ints()?, ids)?))
        })
    }

    /// Begins to read the shard of an example that is needed next, if shards are read whole; None drops the shard that
    /// was read ahead. Only a hint: never raises, and does nothing after `close`.
    fn read_ahead(&self, py: Python<'_>, example: Option<i64>) -> PyResult<()> {
        detach::guarded(py, || {
            let Ok(dataset) = self.dataset(py) else { return Ok(()) };
            detach::detached(py, |_| {
                dataset.read_ahead(example);
                Ok(())
            })
        })
    }

    /// Whether reads decode files or parts of them.
    #[getter]
    fn decodes(&self, py: Python<'_>) -> PyResult<bool> {
        detach::guarded(py, || Ok(self.dataset(py)?.decodes()))
    }

    /// Bytes of memory that the address table uses.
    fn table_bytes(&self, py: Python<'_>) -> usize {
        match self.dataset(py).as_deref() {
            Ok(Dataset::Table(_, table)) => table.bytes(),
            _ => 0,
        }
    }

    /// Closes files and drops mappings and decoded bytes. Views keep their own mappings; reads in progress and started streams
    /// finish; later reads raise ClosedError.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        detach::guarded(py, || {
            let held = self.take();
            detach::detached(py, |_| {
                if let Some(held) = held {
                    held.release();
                }
                Ok(())
            })
        })
    }

    /// One row per (example, token), from one group or from one per row; `tokens=None` selects each example's last token.
    ///
    /// If `overflows` is a list, the number of finite values that became infinite is appended to it, unless it is 0.
    #[pyo3(signature = (groups, examples, tokens, out, dtype, overflows=None))]
    #[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
    fn gather<'py>(
        &self,
        py: Python<'py>,
        groups: &Bound<'py, PyAny>,
        examples: &Bound<'py, PyAny>,
        tokens: Option<&Bound<'py, PyAny>>,
        out: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        overflows: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        detach::guarded(py, || {
            let mut dims: Vec<usize> = Vec::new();
            let (e, t) = match tokens {
                None if examples.is_none() => {
                    dims.push(self.examples() as usize);
                    (IndexArgument::All, None)
                }
                None => {
                    let e = match IndexArgument::quick(examples) {
                        Some(IndexArgument::One(x)) => {
                            dims.push(1);
                            IndexArgument::One(x)
                        }
                        Some(e) => {
                            dims.extend(e.len());
                            e
                        }
                        None => {
                            let (e, shape): (PyReadonlyArray1<'_, i64>, Vec<usize>) =
                                helper(py, "index")?.call1((examples, "examples"))?.extract()?;
                            dims = shape;
                            IndexArgument::Each(e)
                        }
                    };
                    (e, None)
                }
                Some(tokens) => match (IndexArgument::quick(examples), IndexArgument::quick(tokens)) {
                    (Some(e), Some(t)) if e.len().is_none() || t.len().is_none() || e.len() == t.len() => {
                        dims.push(e.len().or(t.len()).unwrap_or(1));
                        (e, Some(t))
                    }
                    _ => {
                        let (e, t, shape): (PyReadonlyArray1<'_, i64>, PyReadonlyArray1<'_, i64>, Vec<usize>) =
                            helper(py, "broadcast")?.call1((examples, tokens))?.extract()?;
                        dims = shape;
                        (IndexArgument::Each(e), Some(IndexArgument::Each(t)))
                    }
                },
            };
            let items = dims.iter().product();
            dims.push(self.row().width);
            let groups = groups_of(py, groups, items)?;
            let pick = match &t {
                None => Pick::Last { examples: e.ints()? },
                Some(t) => Pick::Tokens { examples: e.ints()?, tokens: t.ints()? },
            };
            self.fill(py, groups.ints()?, pick, items, &dims, Destination { out, dtype, overflows })
        })
    }

    /// Every token of each example, example after example, from one group or from one per example.
    #[pyo3(signature = (groups, examples, out, dtype, overflows=None))]
    fn gather_whole<'py>(
        &self,
        py: Python<'py>,
        groups: &Bound<'py, PyAny>,
        examples: PyReadonlyArray1<'py, i64>,
        out: Option<&Bound<'py, PyAny>>,
        dtype: Option<&Bound<'py, PyAny>>,
        overflows: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        detach::guarded(py, || {
            let ids = examples.as_slice()?;
            let groups = groups_of(py, groups, ids.len())?;
            let counts = self.count(py, groups.ints()?, ids)?;
            let rows =
                counts.iter().try_fold(0usize, |n, &t| n.checked_add(usize::try_from(t).ok()?)).ok_or_else(|| {
                    errors::raise(py, &Error::new(Kind::Argument, "more rows than this machine can address"))
                })?;
            let pick = Pick::Whole { examples: Ints::Each(ids) };
            let dims = [rows, self.row().width];
            self.fill(py, groups.ints()?, pick, ids.len(), &dims, Destination { out, dtype, overflows })
        })
    }

    /// Statistics of a group: a dict of arrays, one element per column.
    #[pyo3(signature = (group, tokens, progress=None))]
    fn stats<'py>(
        &self,
        py: Python<'py>,
        group: usize,
        tokens: stream::Tokens<'py>,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyDict>> {
        detach::guarded(py, || summing::stats_of(py, self, group, tokens, progress))
    }

    /// Selected rows per leaf of the statistics; `wide` if stored types differ.
    fn leaf_rows(&self, py: Python<'_>, wide: bool) -> PyResult<u64> {
        detach::guarded(py, || summing::leaf_rows_of(py, self, wide))
    }

    /// Sums of a range of leaves of a group: a dict for each node.
    #[pyo3(signature = (group, tokens, leaves, wide, progress=None))]
    fn sums<'py>(
        &self,
        py: Python<'py>,
        group: usize,
        tokens: stream::Tokens<'py>,
        leaves: (u64, u64),
        wide: bool,
        progress: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyDict>>> {
        detach::guarded(py, || summing::sums_of(py, self, (group, wide), tokens, leaves.0..leaves.1, progress))
    }

    /// A scan of a group, or of some of its examples: oddities, columns, a hash per example.
    #[pyo3(signature = (group, progress=None, *, examples=None, wide=None))]
    fn scan<'py>(
        &self,
        py: Python<'py>,
        group: usize,
        progress: Option<Bound<'py, PyAny>>,
        examples: Option<(u64, u64)>,
        wide: Option<bool>,
    ) -> PyResult<Bound<'py, PyDict>> {
        detach::guarded(py, || summing::scan_of(py, self, group, (examples, wide), progress))
    }

    /// The cost of `sums` of a range of leaves, without reading it: bytes read (None: unknown), memory. `total`: rows
    /// of all.
    fn sum_needs<'py>(
        &self,
        py: Python<'py>,
        group: usize,
        tokens: stream::Tokens<'py>,
        leaves: (u64, u64),
        wide: bool,
        total: u64,
    ) -> PyResult<(Option<u64>, u64)> {
        detach::guarded(py, || summing::sum_needs_of(py, self, (group, wide), tokens, leaves.0..leaves.1, total))
    }

    /// The cost of `scan` of a range of examples, without reading it: bytes read (None: unknown), memory. `total`:
    /// bytes of all.
    fn scan_needs(
        &self,
        py: Python<'_>,
        group: usize,
        examples: (u64, u64),
        wide: bool,
        total: u64,
    ) -> PyResult<(Option<u64>, u64)> {
        detach::guarded(py, || summing::scan_needs_of(py, self, (group, wide), examples.0..examples.1, total))
    }

    /// A read-only view of an example's rows, or None if they are not contiguous in one mapped file.
    fn view<'py>(&self, py: Python<'py>, group: usize, example: i64) -> PyResult<Option<Bound<'py, PyUntypedArray>>> {
        detach::guarded(py, || {
            let dataset = self.dataset(py)?;
            let found = detach::detached(py, |watch| dataset.view(self.mode(), group, example, watch))?;
            let Some((view, rows)) = found else { return Ok(None) };
            let dims = [rows as usize, self.row().width];
            buffer::over_map(py, view, &self.stored(py), &dims).map(Some)
        })
    }

    /// A read-only view `(rows, width)` that contains the rows of all examples of a group, the row of the first example in it,
    /// and the rows from one example's beginning to the next one's (None: they follow each other). None if they are not spread
    /// evenly in one mapped file.
    #[expect(clippy::type_complexity, reason = "a tuple in Python")]
    fn view_all<'py>(
        &self,
        py: Python<'py>,
        group: usize,
    ) -> PyResult<Option<(Bound<'py, PyUntypedArray>, u64, Option<i64>)>> {
        detach::guarded(py, || {
            let dataset = self.dataset(py)?;
            let found = detach::detached(py, |_| dataset.view_all(self.mode(), group))?;
            let Some((view, spread)) = found else { return Ok(None) };
            let dims = [spread.rows as usize, self.row().width];
            let array = buffer::over_map(py, view, &self.stored(py), &dims)?;
            Ok(Some((array, spread.first, spread.step)))
        })
    }
}
