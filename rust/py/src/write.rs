//! Writing files and counting values that overflow, for Python.

use std::path::PathBuf;

use actshard_core::arrays::{index, packing};
use actshard_core::dtype::{Cast, DType};
use actshard_core::gather::cast;
use actshard_core::kernels::quantise::Quantised;
use actshard_core::kernels::scaled::{Product, ScaledCode};
use actshard_core::scan;
use actshard_core::write::{self, Digested, Piece, RefusedRow, RowSpans, Target};
use actshard_core::{Error, Kind, memory};
use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray1, PyReadonlyArray2, PyUntypedArray,
    PyUntypedArrayMethods,
};
use pyo3::prelude::*;

use crate::arguments::{dtype_of, helper};
use crate::{buffer, detach, errors};

/// Columns of a table of pieces: source, start, bytes, file, offset.
const COLUMNS: usize = 5;

/// Writes pieces of sources to offsets in files, in parallel, without the GIL.
#[pyfunction]
pub fn write_pieces(
    py: Python<'_>,
    sources: Vec<PyReadonlyArray1<'_, u8>>,
    files: Vec<(PathBuf, u64)>,
    pieces: PyReadonlyArray2<'_, i64>,
    direct: bool,
) -> PyResult<()> {
    detach::guarded(py, || {
        let bad = || Error::new(Kind::Internal, "pieces: expected a table of five non-negative columns");
        if pieces.shape()[1] != COLUMNS {
            return Err(errors::raise(py, &bad()));
        }
        let numbers = pieces.as_slice()?;
        let bytes = sources.iter().map(|s| s.as_slice()).collect::<Result<Vec<_>, _>>()?;
        detach::detached(py, |watch| {
            let mut table = Vec::with_capacity(numbers.len() / COLUMNS);
            for row in numbers.as_chunks::<COLUMNS>().0 {
                let [Ok(source), Ok(start), Ok(bytes), Ok(file), Ok(offset)] = row.map(u64::try_from) else {
                    return Err(bad());
                };
                table.push(Piece { source: source as usize, start, bytes, file: file as usize, offset });
            }
            let targets: Vec<Target> = files.into_iter().map(|(path, size)| Target { path, size }).collect();
            write::write(&bytes, &targets, &table, direct, watch)
        })
    })
}

fn digested(found: Digested) -> (u64, String) {
    (found.size, found.sha256.iter().map(|b| format!("{b:02x}")).collect())
}

/// Writes a file from segments, gzipped if `level` is given. Returns `(size, SHA-256)` of the file.
#[pyfunction]
#[pyo3(signature = (path, segments, level=None))]
pub fn write_segments(
    py: Python<'_>,
    path: PathBuf,
    segments: Vec<PyReadonlyArray1<'_, u8>>,
    level: Option<u32>,
) -> PyResult<(u64, String)> {
    detach::guarded(py, || {
        let bytes = segments.iter().map(|s| s.as_slice()).collect::<Result<Vec<_>, _>>()?;
        detach::detached(py, |watch| write::write_segments(&path, &bytes, level, watch)).map(digested)
    })
}

/// `(size, SHA-256)` of a file.
#[pyfunction]
pub fn digest_file(py: Python<'_>, path: PathBuf) -> PyResult<(u64, String)> {
    detach::guarded(py, || detach::detached(py, |watch| write::digest(&path, watch)).map(digested))
}

/// Waits until files and folders are on disk.
#[pyfunction]
pub fn sync_files(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<()> {
    detach::guarded(py, || detach::detached(py, |watch| write::sync(&paths, watch)))
}

/// Renames all files below folders into `root`, except some. Returns the folders whose entries changed.
#[pyfunction]
pub fn move_files(py: Python<'_>, folders: Vec<PathBuf>, root: PathBuf, but: Vec<PathBuf>) -> PyResult<Vec<PathBuf>> {
    detach::guarded(py, || {
        let but = but.into_iter().collect();
        detach::detached(py, |watch| write::move_files(&folders, &root, &but, watch))
    })
}

/// Removes folders and their contents, as far as the system permits.
#[pyfunction]
pub fn remove_folders(py: Python<'_>, folders: Vec<PathBuf>) -> PyResult<()> {
    detach::guarded(py, || detach::detached(py, |watch| write::remove_folders(&folders, watch)))
}

/// Copies a range of bytes between files.
#[pyfunction]
pub fn copy_range(
    py: Python<'_>,
    source: PathBuf,
    start: u64,
    size: u64,
    target: PathBuf,
    offset: u64,
) -> PyResult<()> {
    detach::guarded(py, || {
        detach::detached(py, |watch| write::copy_range(&source, start, size, &target, offset, watch))
    })
}

/// Converts the elements of one array into another, with all threads.
#[pyfunction]
pub fn cast_into(
    py: Python<'_>,
    source: PyReadonlyArray1<'_, u8>,
    source_dtype: &str,
    target: Bound<'_, PyUntypedArray>,
    target_dtype: &str,
) -> PyResult<()> {
    detach::guarded(py, || {
        let how = dtype_of(py, source_dtype)
            .and_then(|from| Ok((from, dtype_of(py, target_dtype)?)))
            .and_then(|(from, to)| Cast::between(from, to).map_err(|e| errors::raise(py, &e)))?;
        let src = source.as_slice()?;
        let mut dst = buffer::Claim::new(&target, "target")?;
        if dst.overlaps(src) {
            return Err(errors::raise(py, &Error::new(Kind::Argument, "target: shares memory with the source")));
        }
        detach::detached(py, |watch| cast::cast(how, src, dst.as_mut(), watch))
    })
}

/// Codes and scales of an example's bfloat16 rows, `(tokens, layers, width)` as bytes, into `codes` and `scales`. `per` are the axes
/// along which scales differ. Returns the loss: (largest absolute error, worst error of a row relative to its norm, sum of squared
/// errors, sum of squares, saturated values, values that became zero, NaN values, refused values, the row of the first of these).
#[pyfunction]
#[expect(clippy::type_complexity, reason = "a tuple that one Python function unpacks")]
pub fn quantise(
    py: Python<'_>,
    rows: PyReadonlyArray1<'_, u8>,
    shape: (usize, usize, usize),
    dtype: &str,
    per: (bool, bool, bool),
    codes: Bound<'_, PyUntypedArray>,
    scales: Bound<'_, PyUntypedArray>,
) -> PyResult<(f64, f64, f64, f64, u64, u64, u64, u64, Option<u64>)> {
    detach::guarded(py, || {
        let refuse = |what: String| errors::raise(py, &Error::new(Kind::Argument, what));
        let code = match dtype_of(py, dtype)? {
            DType::F8E4M3 => ScaledCode::E4M3,
            DType::F8E5M2 => ScaledCode::E5M2,
            DType::I8 => ScaledCode::I8,
            other => return Err(refuse(format!("codes of {}", other.name()))),
        };
        let shape = [shape.0, shape.1, shape.2];
        let per = [per.0, per.1, per.2];
        let how = Quantised { code, of: Product::BF16, shape, per, joined: false };
        let elements = shape.iter().try_fold(1usize, |n, axis| n.checked_mul(*axis)).filter(|n| *n < 1 << 60);
        let rows = rows.as_slice()?;
        let (mut codes, mut scales) = (buffer::Claim::new(&codes, "codes")?, buffer::Claim::new(&scales, "scales")?);
        if codes.overlaps(rows) || scales.overlaps(rows) {
            return Err(refuse("codes: share memory with the rows".into()));
        }
        let (codes, scales) = (codes.as_mut(), scales.as_mut());
        let fits =
            elements.is_some_and(|n| rows.len() == 2 * n && codes.len() == n && scales.len() == 4 * how.scales());
        if !fits {
            return Err(refuse(format!("expected rows, codes and scales of {shape:?}")));
        }
        let lost = detach::detached(py, |_| {
            let mut made = vec![0f32; how.scales()];
            let lost = how.fill(rows, codes, &mut made);
            for (to, scale) in scales.as_chunks_mut::<4>().0.iter_mut().zip(made) {
                *to = scale.to_le_bytes();
            }
            Ok(lost)
        })?;
        let sums = (lost.largest, lost.worst_row, lost.errors, lost.squares);
        Ok((sums.0, sums.1, sums.2, sums.3, lost.saturated, lost.vanished, lost.nan, lost.refused, lost.first_refused))
    })
}

/// Raises `largest`, float32 `(layers, parts)`, to the largest finite magnitudes of float32 rows, as bytes, in `parts` equal parts.
/// `lengths` are the numbers of rows of each example and layer, in this order. Returns the first row with a value that is not
/// finite: (its place in `lengths`, its token).
#[pyfunction]
pub fn raise_largest(
    py: Python<'_>,
    rows: PyReadonlyArray1<'_, u8>,
    width: usize,
    lengths: PyReadonlyArray1<'_, i64>,
    layers: usize,
    largest: Bound<'_, PyUntypedArray>,
) -> PyResult<Option<RefusedRow>> {
    detach::guarded(py, || {
        let (rows, lengths) = (rows.as_slice()?, lengths.as_slice()?);
        let mut largest = buffer::Claim::new(&largest, "largest")?;
        if largest.overlaps(rows) {
            return Err(errors::raise(py, &Error::new(Kind::Argument, "largest: shares memory with the rows")));
        }
        let largest = largest.as_mut();
        detach::detached(py, |watch| {
            let mut numbers = singles(largest)?;
            let parts = numbers.len().checked_div(layers).unwrap_or_default();
            let odd = RowSpans::new(rows, lengths, layers, width, parts)?.raise(&mut numbers, watch)?;
            put_singles(&numbers, largest);
            Ok(odd)
        })
    })
}

/// float32 numbers of bytes.
fn singles(bytes: &[u8]) -> actshard_core::Result<Vec<f32>> {
    let mut numbers = memory::reserve((bytes.len() / 4) as u64)?;
    numbers.extend(bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)));
    Ok(numbers)
}

fn put_singles(numbers: &[f32], bytes: &mut [u8]) {
    for (to, number) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(numbers) {
        *to = number.to_le_bytes();
    }
}

/// Sums of the error of each span, `(spans, 5)`: the largest absolute error, the worst error of a row relative to its norm, and the
/// sums of squared errors, of squares, and of cosines. Counts of each span, `(spans, 4)`: values that saturated and that became
/// zero, rows with a cosine, and refused values. The first refused row: (its place in `lengths`, its token).
type SpanLosses<'py> = (Bound<'py, PyArray2<f64>>, Bound<'py, PyArray2<u64>>, Option<RefusedRow>);

/// int8 codes of float32 rows, as bytes, with scales of each layer, or `own` ones of each row, which are filled. `lengths` as for
/// [`raise_largest`].
#[pyfunction]
#[expect(clippy::too_many_arguments, reason = "a keyword each in Python")]
pub fn quantise_spans<'py>(
    py: Python<'py>,
    rows: PyReadonlyArray1<'py, u8>,
    width: usize,
    lengths: PyReadonlyArray1<'py, i64>,
    layers: usize,
    parts: usize,
    codes: Bound<'py, PyUntypedArray>,
    scales: Bound<'py, PyUntypedArray>,
    own: bool,
) -> PyResult<SpanLosses<'py>> {
    detach::guarded(py, || {
        let (rows, lengths) = (rows.as_slice()?, lengths.as_slice()?);
        let (mut codes, mut scales) = (buffer::Claim::new(&codes, "codes")?, buffer::Claim::new(&scales, "scales")?);
        if codes.overlaps(rows) || scales.overlaps(rows) {
            return Err(errors::raise(py, &Error::new(Kind::Argument, "codes: share memory with the rows")));
        }
        let (codes, scales) = (codes.as_mut(), scales.as_mut());
        let losses = detach::detached(py, |watch| {
            let spans = RowSpans::new(rows, lengths, layers, width, parts)?;
            let mut numbers = singles(scales)?;
            if !own {
                return spans.encode(codes, &numbers, watch);
            }
            let losses = spans.fill(codes, &mut numbers, watch)?;
            put_singles(&numbers, scales);
            Ok(losses)
        })?;
        let sums = losses.iter().flat_map(|l| [l.largest, l.worst_row, l.errors, l.squares, l.cosines]);
        let counts = losses.iter().flat_map(|l| [l.saturated, l.vanished, l.angles, l.refused]);
        let refused = losses.iter().enumerate().find_map(|(span, l)| Some((span, l.first_refused?)));
        let (sums, counts): (Vec<f64>, Vec<u64>) = (sums.collect(), counts.collect());
        let n = losses.len();
        Ok((sums.into_pyarray(py).reshape([n, 5])?, counts.into_pyarray(py).reshape([n, 4])?, refused))
    })
}

/// The hash of each example's rows, as `Rows.scan` returns it. The examples lie one after the other in `rows`; `counts` are their
/// numbers of rows.
#[pyfunction]
pub fn hash_rows<'py>(
    py: Python<'py>,
    rows: PyReadonlyArray1<'py, u8>,
    row_bytes: usize,
    counts: PyReadonlyArray1<'py, i64>,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    detach::guarded(py, || {
        let (rows, counts) = (rows.as_slice()?, counts.as_slice()?);
        let hashes = detach::detached(py, |watch| scan::hash_rows(rows, row_bytes, counts, watch))?;
        Ok(hashes.into_pyarray(py))
    })
}

/// The index of a Zarr shard: `entries` are the offset and the bytes of each inner chunk, 2^64-1 twice for a missing one. Little-endian,
/// followed by its crc32c.
#[pyfunction]
pub fn encode_shard_index<'py>(
    py: Python<'py>,
    entries: PyReadonlyArray2<'py, u64>,
) -> PyResult<Bound<'py, PyArray1<u8>>> {
    detach::guarded(py, || {
        if entries.shape()[1] != 2 {
            return Err(errors::raise(py, &Error::new(Kind::Internal, "entries: expected offsets and bytes")));
        }
        let numbers = entries.as_slice()?;
        let index = detach::detached(py, |_| {
            let pairs: Vec<(u64, u64)> = numbers.as_chunks::<2>().0.iter().map(|pair| (pair[0], pair[1])).collect();
            Ok(index::encode(&pairs))
        })?;
        Ok(index.into_pyarray(py))
    })
}

/// Encoded chunks one after another, and their sizes.
type PackedArrays<'py> = (Bound<'py, PyArray1<u8>>, Bound<'py, PyArray1<u64>>);

/// Encodes inner chunks of a Zarr shard with the codecs of its metadata, in parallel. `places` are the first byte and the bytes of
/// each chunk's rows; zeros follow up to `chunk_bytes`. Returns all encoded chunks, and the bytes of each.
#[pyfunction]
pub fn pack_chunks<'py>(
    py: Python<'py>,
    rows: PyReadonlyArray1<'py, u8>,
    places: PyReadonlyArray2<'py, i64>,
    chunk_bytes: usize,
    codecs: &[u8],
) -> PyResult<PackedArrays<'py>> {
    detach::guarded(py, || {
        if places.shape()[1] != 2 {
            return Err(errors::raise(py, &Error::new(Kind::Internal, "places: expected offsets and bytes")));
        }
        let (rows, numbers) = (rows.as_slice()?, places.as_slice()?);
        let packed = detach::detached(py, |watch| {
            let ranges = numbers.as_chunks::<2>().0.iter().map(|[first, bytes]| {
                let (first, bytes) = (usize::try_from(*first).ok()?, usize::try_from(*bytes).ok()?);
                Some(first..first.checked_add(bytes)?)
            });
            let ranges: Option<Vec<_>> = ranges.collect();
            let ranges = ranges.ok_or_else(|| Error::new(Kind::Internal, "places: expected non-negative numbers"))?;
            packing::pack(rows, &ranges, chunk_bytes, codecs, watch)
        })?;
        Ok((packed.bytes.into_pyarray(py), packed.sizes.into_pyarray(py)))
    })
}

/// The number of finite values of an array that would become infinite in another type (NaN, if it has no infinity).
#[pyfunction]
pub fn count_overflows(py: Python<'_>, array: &Bound<'_, PyAny>, dtype: &Bound<'_, PyAny>) -> PyResult<u64> {
    detach::guarded(py, || {
        let (bytes, from): (PyReadonlyArray1<'_, u8>, String) = helper(py, "elements")?.call1((array,))?.extract()?;
        let (_, to): (Bound<'_, PyAny>, String) = helper(py, "dtype")?.call1((dtype,))?.extract()?;
        let (from, to) = (dtype_of(py, &from)?, dtype_of(py, &to)?);
        let bytes = bytes.as_slice()?;
        detach::detached(py, |watch| scan::count_overflows(from, to, bytes, watch))
    })
}
