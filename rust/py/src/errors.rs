//! The core's errors become the exceptions of `actshard.errors`, which owns the map from kind to class.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use actshard_core::{Error, Kind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

static MAKE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Exceptions raised by Python code that the core called, on their way through it.
static CARRIED: Mutex<Vec<(u64, PyErr)>> = Mutex::new(Vec::new());

/// Exceptions kept of callers that had another error to raise.
const MOST_CARRIED: usize = 16;

/// The error that [`raise`] turns back into this exception: KeyboardInterrupt, MemoryError, or an error of actshard.
pub fn carry(raised: PyErr) -> Error {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let error = Error::new(Kind::Interrupted, raised.to_string()).byte(number);
    let mut carried = CARRIED.lock().unwrap_or_else(PoisonError::into_inner);
    let oldest = (carried.len() >= MOST_CARRIED).then(|| carried.remove(0));
    carried.push((number, raised));
    // Dropping an exception may run Python code, which must not find the lock held.
    drop(carried);
    drop(oldest);
    error
}

fn carried(error: &Error) -> Option<PyErr> {
    let number = error.offset.filter(|_| error.kind == Kind::Interrupted)?;
    let mut carried = CARRIED.lock().unwrap_or_else(PoisonError::into_inner);
    let at = carried.iter().position(|(n, _)| *n == number)?;
    Some(carried.remove(at).1)
}

/// The exception for a core error.
pub fn raise(py: Python<'_>, error: &Error) -> PyErr {
    if let Some(raised) = carried(error) {
        return raised;
    }
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
