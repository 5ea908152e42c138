//! Files that contain arrays, as Python objects: values, and arrays by their places.

use std::sync::Arc;

use actshard_core::files::scaled::{ScaledArray, ScaledStore};
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::files::unpacked::{Unit, Unpacked};
use actshard_core::layout::placed::{EvenPlaces, Placed};
use actshard_core::parse::array_chunks::{ChunkFilter, ChunkList, ChunkPlace};
use actshard_core::parse::arrays::{self, ArrayParts, ArrayPlace, PieceList};
use actshard_core::parse::npy::{self, NpyArray, NpyElements};
use actshard_core::parse::safetensors;
use actshard_core::parse::torch::{self, TorchFile};
use actshard_core::rows::Rows as Dataset;
use actshard_core::source::listed::ListedFiles;
use actshard_core::source::{Access, Io, Source, Store};
use actshard_core::threads::{self, Context, Stop, Watch};
use actshard_core::{Error, Kind, Result};
use numpy::{PyArrayDescr, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;

use crate::arguments::dtype_of;
use crate::handle::{RowArguments, Rows};
use crate::pickle::{Failed, ObjectMaker, StoredArray};
use crate::place::{NamedPlace, remote_store, store_of};
use crate::{detach, errors};

/// Files read at the same time: most of the time is spent waiting for a disk or a network.
const AT_ONCE: usize = 16;

#[pymethods]
impl StoredArray {
    /// An array that no file describes: `strides` are in elements, `offset` in bytes.
    #[new]
    fn new(
        py: Python<'_>,
        dtype: &str,
        shape: Vec<u64>,
        strides: Vec<u64>,
        offset: u64,
        swapped: bool,
    ) -> PyResult<StoredArray> {
        detach::guarded(py, || {
            let dtype = dtype_of(py, dtype)?;
            let swapped = swapped && dtype.bits() > 8;
            Ok(StoredArray {
                place: ArrayPlace { dtype, swapped, shape, strides, at: offset, inside: None, parts: None },
            })
        })
    }

    /// An array in chunks: `chunks` are (index of the first element, offset in the file, stored bytes, mask of filters that were left
    /// out), `filters` some of "shuffle", "deflate" and "checksum", in the order in which they were applied.
    #[staticmethod]
    fn chunked(
        py: Python<'_>,
        dtype: &str,
        shape: Vec<u64>,
        swapped: bool,
        chunk_shape: Vec<u64>,
        filters: Vec<String>,
        chunks: Vec<(Vec<u64>, u64, u64, u32)>,
    ) -> PyResult<StoredArray> {
        detach::guarded(py, || {
            let dtype = dtype_of(py, dtype)?;
            let filter = |name: String| match name.as_str() {
                "shuffle" => Ok(ChunkFilter::Shuffle),
                "deflate" => Ok(ChunkFilter::Deflate),
                "checksum" => Ok(ChunkFilter::Checksum),
                _ => Err(Error::new(Kind::Unsupported, format!("chunks with the filter {name}"))),
            };
            let filters = filters.into_iter().map(filter).collect::<Result<Vec<_>>>();
            let chunks =
                chunks.into_iter().map(|(first, at, stored, skipped)| ChunkPlace { first, at, stored, skipped });
            let list = filters.and_then(|filters| ChunkList::new(&shape, chunk_shape, filters, chunks.collect()));
            let list = list.map_err(|error| errors::raise(py, &error))?;
            let (swapped, strides) = (swapped && dtype.bits() > 8, ArrayPlace::dense(&shape));
            let parts = Some(Arc::new(ArrayParts::Chunks(list)));
            Ok(StoredArray { place: ArrayPlace { dtype, swapped, shape, strides, at: 0, inside: None, parts } })
        })
    }

    /// Arrays of one file, joined along an axis.
    #[staticmethod]
    fn joined(py: Python<'_>, axis: usize, arrays: Vec<Bound<'_, StoredArray>>) -> PyResult<StoredArray> {
        detach::guarded(py, || {
            let pieces = arrays.iter().map(|array| array.get().place.clone()).collect();
            let list = PieceList::new(axis, pieces).map_err(|error| errors::raise(py, &error))?;
            let (shape, dtype) = (list.shape().to_vec(), arrays[0].get().place.dtype);
            let (strides, parts) = (ArrayPlace::dense(&shape), Some(Arc::new(ArrayParts::Pieces(list))));
            Ok(StoredArray { place: ArrayPlace { dtype, swapped: false, shape, strides, at: 0, inside: None, parts } })
        })
    }

    /// The same array with its axes in another order.
    fn transposed(&self, py: Python<'_>, order: Vec<usize>) -> PyResult<StoredArray> {
        detach::guarded(py, || match self.place.transposed(&order) {
            Some(place) => Ok(StoredArray { place }),
            None => {
                let detail = format!("expected each of {} axes once, found {order:?}", self.place.shape.len());
                Err(errors::raise(py, &Error::new(Kind::Argument, detail)))
            }
        })
    }

    /// Whether the array is in chunks, or joined from others.
    #[getter]
    fn is_chunked(&self) -> bool {
        self.place.parts.is_some()
    }

    /// The same bytes as elements of another type of the same size.
    fn viewed(&self, py: Python<'_>, dtype: &str) -> PyResult<StoredArray> {
        detach::guarded(py, || {
            let dtype = dtype_of(py, dtype)?;
            if dtype.bits() != self.place.dtype.bits() {
                let detail = format!("{} and {} differ in size", self.place.dtype.name(), dtype.name());
                return Err(errors::raise(py, &Error::new(Kind::DType, detail)));
            }
            Ok(StoredArray { place: ArrayPlace { dtype, ..self.place.clone() } })
        })
    }

    /// The element type, by its safetensors name.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.place.dtype.name()
    }

    /// Elements along each axis.
    #[getter]
    fn shape(&self) -> Vec<u64> {
        self.place.shape.clone()
    }

    /// Elements from one index to the next along each axis.
    #[getter]
    fn strides(&self) -> Vec<u64> {
        self.place.strides.clone()
    }

    /// Offset of the first element in the file, or in the inflated bytes.
    #[getter]
    fn offset(&self) -> u64 {
        self.place.at
    }

    /// Whether elements are byte-swapped.
    #[getter]
    fn swapped(&self) -> bool {
        self.place.swapped
    }

    /// `(offset, stored bytes, inflated bytes, CRC-32)` of the deflated record that contains the array, or None.
    #[getter]
    fn deflated(&self) -> Option<(u64, u64, u64, u32)> {
        self.place.inside.map(|region| (region.at, region.stored, region.size, region.crc))
    }
}

/// A file of `torch.save`.
#[pyclass(frozen, module = "actshard._native")]
pub struct TorchContents {
    file: Arc<TorchFile>,
    place: NamedPlace,
}

#[pymethods]
impl TorchContents {
    /// The saved object; tensors are [`StoredArray`].
    fn value<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        detach::guarded(py, || {
            ObjectMaker::of_torch(py, &self.file).whole().map_err(|failed| match failed {
                Failed::Python(raised) => raised,
                Failed::Core(error) => errors::raise(py, &error.at(&self.place.location)),
            })
        })
    }

    /// Bytes of all storages, and bytes of the distinct tensors in them.
    fn sizes(&self) -> (u64, u64) {
        self.file.sizes()
    }

    /// Whether the file has the form before torch 1.6.
    #[getter]
    fn is_legacy(&self) -> bool {
        self.file.is_legacy
    }

    /// Whether the file is gzipped: offsets are those in the inflated file.
    #[getter]
    fn is_gzipped(&self) -> bool {
        self.file.held.is_some()
    }

    /// Offsets of storages whose content differs from their CRC-32.
    fn damaged(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        detach::guarded(py, || {
            detach::detached(py, |watch| self.with_source(&|source, context| self.file.damaged(source, context), watch))
        })
    }

    /// An array's elements in C order and native byte order.
    fn read<'py>(&self, py: Python<'py>, array: &StoredArray) -> PyResult<Bound<'py, PyByteArray>> {
        detach::guarded(py, || {
            let read = |source: &dyn Source, context: &mut Context<'_>| arrays::read(source, &array.place, context);
            let made = detach::detached(py, |watch| self.with_source(&read, watch))?;
            PyByteArray::new_with(py, made.len(), |copy| {
                copy.copy_from_slice(&made);
                Ok(())
            })
        })
    }
}

impl TorchContents {
    /// Works on the inflated file, or on the opened one.
    fn with_source<R: Send>(
        &self,
        work: &(dyn Fn(&dyn Source, &mut Context<'_>) -> Result<R> + Sync),
        watch: Watch<'_>,
    ) -> Result<R> {
        match &self.file.held {
            Some(held) => work(held, &mut Context::of_caller(watch)),
            None => with_opened(&self.place, work, watch),
        }
        .map_err(|e| e.at(&self.place.location))
    }
}

/// Works on an opened file, while the caller's watch is called.
fn with_opened<R: Send>(
    place: &NamedPlace,
    work: &(dyn Fn(&dyn Source, &mut Context<'_>) -> Result<R> + Sync),
    watch: Watch<'_>,
) -> Result<R> {
    let store = store_of(place, Io::Pread);
    let open = |context: &mut Context<'_>| store.open(&place.location, Access::Once, context.stop());
    store.work(&|context| work(&*open(context)?, context), watch)
}

/// An array of a file and its name: numbers, `"void"` (bytes of an unknown type), `"text"`, or `"small"` (elements of less than a
/// byte, which cannot be read).
type NamedArray = (String, StoredArray, &'static str);
/// The arrays of a file, and its metadata.
type ArraysTuple = (Vec<NamedArray>, Vec<(String, String)>);

fn arrays_in(source: &dyn Source, kind: &str, partial: bool, context: &mut Context<'_>) -> Result<ArraysTuple> {
    let named = |(name, array): (String, NpyArray)| {
        let kind = match array.elements {
            NpyElements::Numbers => "numbers",
            NpyElements::Void => "void",
            NpyElements::Text => "text",
        };
        (name, StoredArray { place: array.place }, kind)
    };
    match kind {
        "npy" => {
            let read = if partial { npy::read_partial } else { npy::read };
            Ok((vec![named((String::new(), read(source, context.stop())?))], vec![]))
        }
        "npz" => Ok((npy::read_archive(source, context)?.into_iter().map(named).collect(), vec![])),
        "safetensors" => {
            let read = if partial { safetensors::read_header_of_partial } else { safetensors::read_header };
            let header = read(source, context.stop())?;
            let place = |tensor: &safetensors::Tensor| ArrayPlace {
                dtype: tensor.dtype,
                swapped: false,
                shape: tensor.shape.clone(),
                strides: ArrayPlace::dense(&tensor.shape),
                at: header.data_start + tensor.begin,
                inside: None,
                parts: None,
            };
            let named = |tensor: &safetensors::Tensor| {
                let kind = if tensor.dtype.size().is_some() { "numbers" } else { "small" };
                (tensor.name.clone(), StoredArray { place: place(tensor) }, kind)
            };
            Ok((header.tensors.iter().map(named).collect(), header.metadata.clone()))
        }
        _ => Err(Error::new(Kind::Internal, format!("a container '{kind}'"))),
    }
}

/// Reads the headers of `.npy`, `.npz` and safetensors files (`kind`), in parallel. `partial`: `.npy` and safetensors files may end
/// before their arrays do.
#[pyfunction]
#[pyo3(signature = (places, kind, partial=false))]
pub fn read_arrays(py: Python<'_>, places: Vec<NamedPlace>, kind: &str, partial: bool) -> PyResult<Vec<ArraysTuple>> {
    detach::guarded(py, || {
        let read = |_: usize, place: NamedPlace, stop: &Stop| -> Result<ArraysTuple> {
            let store: Arc<dyn Store> = store_of(&place, Io::Pread);
            arrays_in(&*store.open(&place.location, Access::Once, stop)?, kind, partial, &mut Context::of_part(stop))
                .map_err(|e| e.at(&place.location))
        };
        detach::detached(py, |watch| threads::map_each_waiting(places, AT_ONCE, &read, watch))
    })
}

/// An array's elements in C order and native byte order, from a file that is not gzipped.
#[pyfunction]
pub fn read_array<'py>(py: Python<'py>, place: NamedPlace, array: &StoredArray) -> PyResult<Bound<'py, PyByteArray>> {
    detach::guarded(py, || {
        let made = detach::detached(py, |watch| {
            let read = |source: &dyn Source, context: &mut Context<'_>| arrays::read(source, &array.place, context);
            with_opened(&place, &read, watch).map_err(|e| e.at(&place.location))
        })?;
        PyByteArray::new_with(py, made.len(), |copy| {
            copy.copy_from_slice(&made);
            Ok(())
        })
    })
}

/// Reads files of `torch.save`, in parallel: the saved objects, without the bytes of tensors. A gzipped file may inflate to
/// `limit` bytes, or to what is usual for its size if that is more.
#[pyfunction]
pub fn read_torch(py: Python<'_>, places: Vec<NamedPlace>, limit: u64) -> PyResult<Vec<TorchContents>> {
    detach::guarded(py, || {
        let read = |_: usize, place: NamedPlace, stop: &Stop| -> Result<TorchContents> {
            let store: Arc<dyn Store> = store_of(&place, Io::Pread);
            let file =
                torch::read(&*store.open(&place.location, Access::Once, stop)?, limit, &mut Context::of_part(stop))?;
            Ok(TorchContents { file: Arc::new(file), place })
        };
        detach::detached(py, |watch| threads::map_each_waiting(places, AT_ONCE, &read, watch))
    })
}

/// A file, as passed to [`placed_rows`].
pub type PlacedFileTuple<'py> = (NamedPlace, u64, bool, bool, Option<Bound<'py, StoredArray>>);

/// An example that cannot be read: its number, the error's code and detail, the file.
pub type FaultTuple = (u64, String, String, NamedPlace);

/// The number of a file, its float8 or int8 elements, their scales, and the values of these if they are not in the file.
pub type ScaledTuple<'py> =
    (usize, Bound<'py, StoredArray>, Bound<'py, StoredArray>, Option<PyReadonlyArray1<'py, f32>>);

/// Examples at equal distances: their number, the rows of each, and for each group the file, the first byte and the bytes from one
/// example to the next.
pub type EvenTuple = (u64, u32, Vec<(u32, u64, u64)>);

/// An example that cannot be read, and the error of its reads.
fn fault((example, code, detail, place): FaultTuple) -> (u64, Error) {
    let kind = Kind::ALL.into_iter().find(|kind| kind.code() == code).unwrap_or(Kind::Format);
    (example, Error::new(kind, detail).at(place.location))
}

/// The number of a file, the places of its elements and scales, and the scales' values if they are not in the file.
type ScaledPlace = (usize, ArrayPlace, ArrayPlace, Option<Vec<f32>>);

fn scaled_place((number, codes, scales, held): ScaledTuple<'_>) -> PyResult<ScaledPlace> {
    let held = held.map(|held| held.as_slice().map(<[f32]>::to_vec)).transpose()?;
    Ok((number, codes.get().place.clone(), scales.get().place.clone(), held))
}

fn placed_evenly((examples, tokens, groups): EvenTuple, steps: Vec<u64>) -> Result<Placed> {
    let groups = groups.into_iter().map(|(file, start, step)| EvenPlaces { file, start, step });
    Placed::even(groups.collect(), examples, tokens, steps)
}

/// Rows anywhere in files: `files` are (path, bytes between rows, whether byte-swapped, whether gzipped, the array to decode or
/// None). `numbers` and `starts` have the file and the first byte for each group and example, `tokens` the rows of each example.
/// In a decoded array, offsets are those in its C order. `faults` are examples that cannot be read: (example, the error's code, its
/// detail, the file). `scaled` are files whose elements are products: (number of the file, float8 or int8 elements, their scales,
/// the scales' values if they are not in the file); offsets are those in the products' C order, in `dtype`. Files that
/// `grows` have no headers, and may become longer while they are read. With
/// `even`, examples are at equal distances, and the arrays are empty.
#[pyfunction]
#[pyo3(signature = (files, numbers, starts, tokens, *, num_groups, width, dtype, decoded_memory, descr, io, faults=vec![], scaled=vec![], grows=false, even=None))]
#[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
pub fn placed_rows(
    py: Python<'_>,
    files: Vec<PlacedFileTuple<'_>>,
    numbers: PyReadonlyArray1<'_, u32>,
    starts: PyReadonlyArray1<'_, u64>,
    tokens: PyReadonlyArray1<'_, u32>,
    num_groups: usize,
    width: u64,
    dtype: &str,
    decoded_memory: u64,
    descr: Bound<'_, PyArrayDescr>,
    io: &str,
    faults: Vec<FaultTuple>,
    scaled: Vec<ScaledTuple<'_>>,
    grows: bool,
    even: Option<EvenTuple>,
) -> PyResult<Rows> {
    detach::guarded(py, || {
        let scaled = scaled.into_iter().map(scaled_place).collect::<PyResult<Vec<_>>>()?;
        let faults = faults.into_iter().map(fault).collect();
        let (numbers, starts) = (numbers.as_slice()?.to_vec(), starts.as_slice()?.to_vec());
        let tokens = tokens.as_slice()?.to_vec();
        let row = RowArguments { width, dtype, descr, io };
        let files: Vec<_> = files
            .into_iter()
            .map(|(place, step, swapped, gzipped, array)| {
                (place, step, swapped, gzipped, array.map(|array| array.get().place.clone()))
            })
            .collect();
        row.rows(py, |width, dtype, io| {
            let inner = match remote_store(files.iter().map(|(place, ..)| place))? {
                Some(store) => store,
                None => Arc::new(ListedFiles::now(io, files.iter().map(|(place, ..)| &place.location))?),
            };
            let steps = files.iter().map(|(_, step, ..)| *step).collect();
            let layout = match even {
                None => Placed::new(num_groups, numbers, starts, tokens, steps)?,
                Some(even) => placed_evenly(even, steps)?,
            };
            let layout = layout.refusing(faults);
            let (mut units, mut table) = (vec![], vec![]);
            for (place, step, swapped, gzipped, array) in files {
                let mut location = place.location;
                let mut rows = RowsIn::Apart { step, swapped };
                if gzipped || array.is_some() {
                    let swapped = swapped && array.is_none();
                    rows = RowsIn::Apart { step, swapped };
                    let unit = Unit { file: location, gzipped, array };
                    location = Unpacked::name(&unit, units.len());
                    units.push(unit);
                }
                table.push(RowFile { location, rows });
            }
            let mut store: Arc<dyn Store> =
                if units.is_empty() { inner } else { Arc::new(Unpacked::new(inner, units, decoded_memory)) };
            let mut arrays = Vec::with_capacity(scaled.len());
            for (number, codes, scales, held) in scaled {
                let file: &mut RowFile = table
                    .get_mut(number)
                    .ok_or_else(|| Error::new(Kind::Argument, format!("expected files below {number}")))?;
                let array = ScaledArray::new(&codes, &scales, dtype);
                let array = match held {
                    Some(held) => array.and_then(|array| array.holding(&held)),
                    None => array,
                };
                let array = array.map_err(|e| e.at(&file.location))?;
                let products = ScaledStore::name(&file.location, arrays.len());
                arrays.push((std::mem::replace(&mut file.location, products), array));
            }
            if !arrays.is_empty() {
                store = Arc::new(ScaledStore::new(store, arrays));
            }
            let table = FileTable::of(store, table, width, dtype)?;
            Ok(Dataset::Placed(if grows { table.growing() } else { table }, layout))
        })
    })
}
