//! Arguments from Python: numbers, names of dtypes and modes, and the functions of `actshard.base._arguments`.

use actshard_core::dtype::DType;
use actshard_core::gather::Ints;
use actshard_core::source::Io;
use actshard_core::{Error, Kind};
use numpy::{PyArray1, PyArrayMethods, PyReadonlyArray1, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyInt;

use crate::errors;

/// An index argument.
pub enum IndexArgument<'py> {
    One(i64),
    Each(PyReadonlyArray1<'py, i64>),
    All,
}

impl IndexArgument<'_> {
    pub fn ints(&self) -> PyResult<Ints<'_>> {
        Ok(match self {
            IndexArgument::One(x) => Ints::One(*x),
            IndexArgument::Each(xs) => Ints::Each(xs.as_slice()?),
            IndexArgument::All => Ints::Count,
        })
    }

    /// Converts an int or a contiguous 1-D int64 array; `None` for anything else.
    pub fn quick<'py>(value: &Bound<'py, PyAny>) -> Option<IndexArgument<'py>> {
        if value.is_exact_instance_of::<PyInt>() {
            return value.extract().ok().map(IndexArgument::One);
        }
        let array = value.cast::<PyArray1<i64>>().ok()?;
        // The Python side knows what subclasses mean, such as masked arrays.
        if value.cast_exact::<PyUntypedArray>().is_err() || !array.is_c_contiguous() {
            return None;
        }
        // A misaligned array has no slice; the Python side copies it.
        array.try_readonly().ok().filter(|xs| xs.as_slice().is_ok()).map(IndexArgument::Each)
    }

    pub fn len(&self) -> Option<usize> {
        match self {
            IndexArgument::Each(xs) => Some(xs.len()),
            IndexArgument::One(_) | IndexArgument::All => None,
        }
    }
}

/// One group for all examples, or one for each of `n`.
pub fn groups_of<'py>(py: Python<'py>, groups: &Bound<'py, PyAny>, n: usize) -> PyResult<IndexArgument<'py>> {
    IndexArgument::quick(groups)
        .filter(|g| g.len().is_none_or(|len| len == n))
        .ok_or_else(|| errors::raise(py, &Error::new(Kind::Internal, "groups that are not one per example")))
}

/// A function of `actshard.base._arguments`, which handles the uncommon argument types.
pub fn helper<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    MODULE.get_or_try_init(py, || py.import("actshard.base._arguments").map(Bound::unbind))?.bind(py).getattr(name)
}

/// The element type with this name.
pub fn dtype_of(py: Python<'_>, name: &str) -> PyResult<DType> {
    DType::from_name(name)
        .ok_or_else(|| errors::raise(py, &Error::new(Kind::Unsupported, format!("unknown element type '{name}'"))))
}

/// The read mode with this name.
pub fn io_of(py: Python<'_>, name: &str) -> PyResult<Io> {
    Io::from_name(name).ok_or_else(|| {
        errors::raise(py, &Error::new(Kind::Argument, format!("io must be 'mmap', 'pread' or 'auto', not '{name}'")))
    })
}
