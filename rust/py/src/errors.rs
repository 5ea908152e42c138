//! The core's errors become the exceptions of `actshard.errors`, which owns the map from kind to class.

use actshard_core::Error;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// The exception for a core error.
pub fn raise(py: Python<'_>, error: &Error) -> PyErr {
    let made = MAKE
        .get_or_try_init(py, || py.import("actshard.errors")?.getattr("from_native").map(Bound::unbind))
        .and_then(|make| {
            let path = error.path.as_ref().map(|p| p.as_os_str());
            make.bind(py).call1((error.kind.code(), &error.detail, path, error.offset, error.reason, error.errno))
        });
    match made {
        Ok(exception) => PyErr::from_value(exception),
        // Only if `actshard.errors` itself is broken.
        Err(broken) => {
            let fallback = PyRuntimeError::new_err(error.to_string());
            fallback.set_cause(py, Some(broken));
            fallback
        }
    }
}
