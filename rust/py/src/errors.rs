//! Converts the core's errors to the exceptions of `actshard.base.errors`, which maps kinds to classes.

use std::ffi::OsString;
use std::sync::Arc;

use actshard_core::location::Location;
use actshard_core::{Carried, Error, Finding, Kind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Wraps an exception (KeyboardInterrupt, MemoryError, or an actshard error) in an error that [`raise`] converts back. The
/// error owns the exception: if it is not raised, because another part of the read raised first, both are dropped, with the
/// arrays in the frames of the traceback.
pub fn carry(raised: PyErr) -> Error {
    let mut error = Error::new(Kind::Interrupted, raised.to_string());
    error.carried = Some(Carried(Arc::new(raised)));
    error
}

/// The exception for a core error.
pub fn raise(py: Python<'_>, error: &Error) -> PyErr {
    if let Some(raised) = error.carried.as_ref().and_then(|carried| carried.0.downcast_ref::<PyErr>()) {
        return raised.clone_ref(py);
    }
    let made = MAKE
        .get_or_try_init(py, || py.import("actshard.base.errors")?.getattr("from_native").map(Bound::unbind))
        .and_then(|make| {
            let path = error.location.as_ref().map(path_of);
            let code = error.finding.map(Finding::code);
            make.bind(py).call1((error.kind.code(), &error.detail, path, error.offset, error.reason, error.errno, code))
        });
    match made {
        Ok(exception) => PyErr::from_value(exception),
        // Only if `actshard.base.errors` itself fails.
        Err(broken) => {
            let fallback = PyRuntimeError::new_err(error.to_string());
            fallback.set_cause(py, Some(broken));
            fallback
        }
    }
}

/// A location as a Python path.
pub fn path_of(location: &Location) -> OsString {
    location.path().map_or_else(|| location.to_string().into(), |path| path.as_os_str().to_os_string())
}
