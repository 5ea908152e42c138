//! The one gate through which the GIL is released. Everything that reads, copies or computes for more than
//! microseconds goes through here: other Python threads run meanwhile, Ctrl-C is looked for, and a panic of ours
//! becomes an `InternalError` and never unwinds into the interpreter.
#![allow(clippy::disallowed_methods)] // This is the gate that clippy.toml sends others to.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use actshard_core::par::pool::Watch;
use actshard_core::{Error, Kind, Result};
use pyo3::prelude::*;

use crate::errors;

/// Runs `work` without the GIL. The watch it is given asks Python for signals.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce(Watch<'_>) -> Result<T> + Send) -> PyResult<T> {
    let mut signal: Option<PyErr> = None;
    let outcome = py.detach(|| {
        let mut watch = || {
            Python::attach(|py| match py.check_signals() {
                Ok(()) => false,
                Err(raised) => {
                    signal = Some(raised);
                    true
                }
            })
        };
        catch_unwind(AssertUnwindSafe(|| work(&mut watch))).unwrap_or_else(|panic| Err(internal(&*panic)))
    });
    match outcome {
        Ok(value) => Ok(value),
        Err(error) => Err(match signal {
            Some(raised) if error.kind == Kind::Interrupted => raised,
            _ => errors::raise(py, &error),
        }),
    }
}

fn internal(panic: &(dyn Any + Send)) -> Error {
    let said = panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_string());
    Error::new(Kind::Internal, format!("a fault of actshard, please report it: {said}"))
}
