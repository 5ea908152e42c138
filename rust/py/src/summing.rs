//! Statistics of rows and scans of their values, whole or in ranges that tasks divide.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use actshard_core::dtype::DType;
use actshard_core::rows::Rows as Dataset;
use actshard_core::scan::{self, Oddity, Scan};
use actshard_core::stream::stats::summary::{HASHES, LARGEST, LargestColumn, LargestRow, Sorted, Summary};
use actshard_core::stream::stats::{self, Stats, SumNode, Sums};
use actshard_core::threads::Watch;
use actshard_core::{Error, Kind, Result};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::handle::Rows;
use crate::stream::{Tokens, selection};
use crate::{detach, errors};

/// Runs long work that calls `report` with the number of rows done; an exception of `progress` stops it and is raised.
fn with_progress<T: Send>(
    py: Python<'_>,
    progress: Option<Bound<'_, PyAny>>,
    work: impl FnOnce(&mut dyn FnMut(u64), Watch<'_>) -> Result<T> + Send,
) -> PyResult<T> {
    let progress = progress.map(Bound::unbind);
    let mut raised: Option<PyErr> = None;
    let made = detach::detached(py, |watch| {
        let stop = std::cell::Cell::new(false);
        let mut report = |done: u64| {
            if let Some(progress) = &progress
                && let Err(error) = Python::attach(|py| progress.call1(py, (done,)).map(drop))
            {
                raised = Some(error);
                stop.set(true);
            }
        };
        let made = work(&mut report, &mut || stop.get() || watch());
        if stop.get() { Err(Error::new(Kind::Interrupted, "interrupted")) } else { made }
    });
    match raised {
        Some(error) => Err(error),
        None => made,
    }
}

/// Whether rows are read as float64 because stored types differ: yes, no, or None if they do.
type Wide = Option<bool>;

/// The dataset, with rows as float64 if requested.
fn read_wide(dataset: Arc<Dataset>, wide: Wide) -> Arc<Dataset> {
    if wide == Some(true) { dataset.read_as(DType::F64).map_or(dataset, Arc::new) } else { dataset }
}

/// Calls `work` with a dataset; again with its rows as float64 if their types differ.
fn widened<T>(dataset: &Dataset, wide: Wide, mut work: impl FnMut(&Dataset) -> Result<T>) -> Result<T> {
    match work(dataset) {
        Err(error) if wide.is_none() && error.kind == Kind::DType => match dataset.read_as(DType::F64) {
            Some(wide) => work(&wide),
            None => Err(error),
        },
        done => done,
    }
}

/// The dataset whose rows are summed: values as they are stored, not rounded to a requested type first.
fn summed(py: Python<'_>, rows: &Rows, wide: Wide) -> PyResult<Arc<Dataset>> {
    let dataset = rows.dataset(py)?;
    let converts = dataset.converts();
    Ok(read_wide(dataset, if converts { Some(true) } else { wide }))
}

/// `Rows.stats`: statistics of all rows of a group.
pub fn stats_of<'py>(
    py: Python<'py>,
    rows: &Rows,
    group: usize,
    tokens: Tokens<'py>,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let dataset = summed(py, rows, None)?;
    let selection = selection(py, dataset.examples(), tokens)?;
    let made = with_progress(py, progress, |report, watch| {
        widened(&dataset, None, |dataset| stats::stats(dataset, group, &selection, report, watch))
    })?;
    as_dict(py, &made)
}

/// `Rows.leaf_rows`: selected rows per leaf.
pub fn leaf_rows_of(py: Python<'_>, rows: &Rows, wide: bool) -> PyResult<u64> {
    Ok(stats::leaf_rows(summed(py, rows, Some(wide))?.row()))
}

/// `Rows.sums`: the nodes of a range of leaves of a group.
pub fn sums_of<'py>(
    py: Python<'py>,
    rows: &Rows,
    (group, wide): (usize, bool),
    tokens: Tokens<'py>,
    leaves: Range<u64>,
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let dataset = summed(py, rows, Some(wide))?;
    let selection = selection(py, dataset.examples(), tokens)?;
    let made =
        with_progress(py, progress, |report, watch| stats::sums(&dataset, group, (&selection, leaves), report, watch))?;
    as_dicts(py, &made)
}

/// `Rows.sum_needs`: bytes that sums of leaves read (None: unknown) and their memory.
pub fn sum_needs_of<'py>(
    py: Python<'py>,
    rows: &Rows,
    (group, wide): (usize, bool),
    tokens: Tokens<'py>,
    leaves: Range<u64>,
    total: u64,
) -> PyResult<(Option<u64>, u64)> {
    let dataset = summed(py, rows, Some(wide))?;
    let selection = selection(py, dataset.examples(), tokens)?;
    let made = detach::detached(py, |watch| stats::needs(&dataset, group, (&selection, leaves), total, watch))?;
    Ok((made.read, made.memory))
}

/// `Rows.scan_needs`: bytes that a scan of some examples reads (None: unknown) and its memory.
pub fn scan_needs_of(
    py: Python<'_>,
    rows: &Rows,
    (group, wide): (usize, bool),
    examples: Range<u64>,
    total: u64,
) -> PyResult<(Option<u64>, u64)> {
    let dataset = read_wide(rows.dataset(py)?, Some(wide));
    let made = detach::detached(py, |watch| scan::needs(&dataset, group, examples, total, watch))?;
    Ok((made.read, made.memory))
}

/// Joins sums of consecutive ranges of leaves: the nodes of the whole range.
#[pyfunction]
pub fn joined_sums<'py>(py: Python<'py>, nodes: Vec<Bound<'py, PyDict>>) -> PyResult<Vec<Bound<'py, PyDict>>> {
    detach::guarded(py, || as_dicts(py, &join(py, &nodes)?))
}

/// The sums of all rows, from the sums of consecutive ranges that are all leaves. None without leaves.
#[pyfunction]
pub fn total_sums<'py>(py: Python<'py>, nodes: Vec<Bound<'py, PyDict>>) -> PyResult<Option<Bound<'py, PyDict>>> {
    detach::guarded(py, || join(py, &nodes)?.total().map(|all| as_dict(py, &all)).transpose())
}

fn join(py: Python<'_>, nodes: &[Bound<'_, PyDict>]) -> PyResult<Sums> {
    let mut all = Sums::default();
    for node in nodes {
        all.push(node_of(py, node)?).map_err(|error| errors::raise(py, &error))?;
    }
    Ok(all)
}

fn as_dicts<'py>(py: Python<'py>, sums: &Sums) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let each = sums.nodes().iter().map(|node| {
        let out = as_dict(py, &node.sums)?;
        out.set_item("first", node.first)?;
        out.set_item("level", node.level)?;
        Ok(out)
    });
    each.collect()
}

fn as_dict<'py>(py: Python<'py>, sums: &Stats) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("rows", sums.rows)?;
    for (name, values) in [("mean", &sums.mean), ("squares", &sums.squares), ("min", &sums.min), ("max", &sums.max)] {
        out.set_item(name, PyArray1::from_slice(py, values))?;
    }
    for (name, values) in [("finite", &sums.finite), ("nan", &sums.nan), ("infinite", &sums.infinite)] {
        out.set_item(name, PyArray1::from_vec(py, values.iter().map(|n| *n as i64).collect()))?;
    }
    out.set_item("norms", sums.norms)?;
    let found = &sums.summary;
    out.set_item("zeros", PyArray1::from_vec(py, found.zeros.iter().map(|n| *n as i64).collect()))?;
    out.set_item("norm_bins", found.norms.clone())?;
    out.set_item("positions", found.positions.iter().map(|(at, (sum, n))| (*at, *sum, *n)).collect::<Vec<_>>())?;
    out.set_item("bands", found.bands.iter().map(|((at, bin), n)| (*at, *bin, *n)).collect::<Vec<_>>())?;
    out.set_item("hashes", found.hashes.clone())?;
    let rows = found.largest_rows.iter().map(|row| (row.norm, row.place.0, row.place.1));
    out.set_item("largest_rows", rows.collect::<Vec<_>>())?;
    let columns = found.largest_columns.iter().map(|each| (each.column, each.magnitude, each.place.0, each.place.1));
    out.set_item("largest_columns", columns.collect::<Vec<_>>())?;
    Ok(out)
}

/// The inverse of [`as_dict`] for a summary. Lists may come from a file: those longer than a summary's are refused.
fn summary_of(py: Python<'_>, node: &Bound<'_, PyDict>, zeros: Vec<u64>) -> PyResult<Summary> {
    let get = |name: &str| node.get_item(name)?.ok_or_else(|| PyKeyError::new_err(name.to_owned()));
    let refused = |detail: String| Err(errors::raise(py, &Error::new(Kind::Argument, detail)));
    let rows: Vec<(f64, u64, u64)> = get("largest_rows")?.extract()?;
    let columns: Vec<(u64, f64, u64, u64)> = get("largest_columns")?.extract()?;
    let hashes: Vec<(u64, u64)> = get("hashes")?.extract()?;
    if rows.len() > LARGEST || columns.len() > LARGEST || hashes.len() > HASHES {
        let found = [rows.len(), columns.len(), hashes.len()];
        return refused(format!("sums: expected at most {LARGEST}, {LARGEST} and {HASHES} of each, found {found:?}"));
    }
    if columns.iter().any(|(column, ..)| *column >= zeros.len() as u64) {
        return refused(format!("sums: expected columns below {}", zeros.len()));
    }
    let counted = |n: u64| in_range(py, n);
    let norms: Vec<(u32, u64)> = get("norm_bins")?.extract()?;
    let positions: Vec<(u32, f64, u64)> = get("positions")?.extract()?;
    let bands: Vec<(u32, u32, u64)> = get("bands")?.extract()?;
    Ok(Summary {
        zeros,
        norms: ascending(norms.into_iter().map(|(bin, n)| Ok((bin, counted(n)?))))?,
        positions: ascending(positions.into_iter().map(|(at, sum, n)| Ok((at, (sum, counted(n)?)))))?,
        bands: ascending(bands.into_iter().map(|(at, bin, n)| Ok(((at, bin), counted(n)?))))?,
        largest_rows: rows.into_iter().map(|(norm, e, t)| LargestRow { norm, place: (e, t) }).collect(),
        largest_columns: columns
            .into_iter()
            .map(|(column, magnitude, e, t)| LargestColumn { column, magnitude, place: (e, t) })
            .collect(),
        hashes: ascending(hashes.into_iter().map(|(hash, n)| Ok((hash, counted(n)?))))?,
    })
}

/// Values by ascending key, one for each.
fn ascending<K: Ord, V>(values: impl Iterator<Item = PyResult<(K, V)>>) -> PyResult<Sorted<K, V>> {
    Ok(values.collect::<PyResult<BTreeMap<K, V>>>()?.into_iter().collect())
}

/// The inverse of [`as_dicts`], for one node. Numbers may come from a file: counts so large that sums overflow are refused.
fn node_of(py: Python<'_>, node: &Bound<'_, PyDict>) -> PyResult<SumNode> {
    let get = |name: &str| node.get_item(name)?.ok_or_else(|| PyKeyError::new_err(name.to_owned()));
    let floats = |name: &str| -> PyResult<Vec<f64>> {
        Ok(get(name)?.extract::<PyReadonlyArray1<'_, f64>>()?.as_slice()?.to_vec())
    };
    let counts = |name: &str| -> PyResult<Vec<u64>> {
        let values = get(name)?.extract::<PyReadonlyArray1<'_, i64>>()?.as_slice()?.to_vec();
        values.into_iter().map(|n| in_range(py, u64::try_from(n).unwrap_or(u64::MAX))).collect()
    };
    let norms: (f64, u64) = get("norms")?.extract()?;
    let sums = Stats {
        rows: in_range(py, get("rows")?.extract()?)?,
        finite: counts("finite")?,
        mean: floats("mean")?,
        squares: floats("squares")?,
        min: floats("min")?,
        max: floats("max")?,
        nan: counts("nan")?,
        infinite: counts("infinite")?,
        norms: (norms.0, in_range(py, norms.1)?),
        summary: summary_of(py, node, counts("zeros")?)?,
    };
    let width = sums.mean.len();
    let counted = [&sums.finite, &sums.nan, &sums.infinite, &sums.summary.zeros].map(|each| each.len());
    let lengths = [&counted[..], &[sums.squares.len(), sums.min.len(), sums.max.len()]].concat();
    if lengths.iter().any(|length| *length != width) {
        let detail = format!("sums: expected {width} values each, found {lengths:?}");
        return Err(errors::raise(py, &Error::new(Kind::Argument, detail)));
    }
    Ok(SumNode { first: in_range(py, get("first")?.extract()?)?, level: get("level")?.extract()?, sums })
}

/// A count that may be added to 2^20 others.
fn in_range(py: Python<'_>, count: u64) -> PyResult<u64> {
    if count < 1 << 43 {
        return Ok(count);
    }
    Err(errors::raise(py, &Error::new(Kind::Argument, format!("sums: expected a count below 2^43, found {count}"))))
}

/// `Rows.scan`: scans every value of a group, or of some of its examples.
pub fn scan_of<'py>(
    py: Python<'py>,
    rows: &Rows,
    group: usize,
    (examples, wide): (Option<(u64, u64)>, Wide),
    progress: Option<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyDict>> {
    let dataset = read_wide(rows.dataset(py)?, wide);
    let examples = examples.map_or(0..dataset.examples(), |(from, to)| from..to);
    let (dtype, made) = with_progress(py, progress, |report, watch| {
        widened(&dataset, wide, |dataset| {
            let made = scan::scan(dataset, group, examples.clone(), report, watch)?;
            Ok((dataset.row().dtype, made))
        })
    })?;
    scanned(py, dtype, made)
}

fn scanned(py: Python<'_>, dtype: DType, made: Scan) -> PyResult<Bound<'_, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("dtype", dtype.numpy_name().unwrap_or(dtype.name()))?;
    out.set_item("rows", made.rows)?;
    out.set_item("nan", made.bad[0])?;
    out.set_item("infinite", made.bad[1])?;
    for (name, oddity) in ["nan_rows", "infinite_rows", "zero_rows", "constant_rows"].iter().zip(Oddity::ALL) {
        let k = oddity as usize;
        out.set_item(name, (made.odd[k], made.places[k].clone()))?;
    }
    out.set_item("first", PyBytes::new(py, &made.first))?;
    for (name, values) in [("magnitudes", made.magnitudes), ("differences", made.differences), ("hashes", made.hashes)]
    {
        out.set_item(name, PyArray1::from_vec(py, values))?;
    }
    Ok(out)
}
