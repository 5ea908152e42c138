//! The only function that releases the GIL. All work of more than microseconds goes through it: other Python threads run
//! meanwhile, Ctrl-C is detected, and a panic becomes an `InternalError` instead of unwinding into the interpreter.
#![allow(clippy::disallowed_methods)] // clippy.toml sends all other code here

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actshard_core::threads::Watch;
use actshard_core::{Error, Kind, Result};
use pyo3::prelude::*;

use crate::errors;

/// Minimum interval between two checks for signals. Each takes the GIL, which another thread may hold for its whole switch
/// interval.
const LOOK: Duration = Duration::from_millis(20);
/// Number of times that watches took the GIL, for tests.
pub static LOOKS: AtomicU64 = AtomicU64::new(0);

/// Runs `work` without the GIL. The watch passed to it checks for signals. Only the main thread sees them: on other threads
/// the first check finds that out, and later ones do not take the GIL.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce(Watch<'_>) -> Result<T> + Send) -> PyResult<T> {
    let mut signal: Option<PyErr> = None;
    let outcome = py.detach(|| {
        let (mut looked, mut sees_signals) = (Instant::now(), None);
        let mut watch = || {
            if sees_signals == Some(false) || looked.elapsed() < LOOK {
                return false;
            }
            looked = Instant::now();
            LOOKS.fetch_add(1, Ordering::Relaxed);
            Python::attach(|py| {
                if !*sees_signals.get_or_insert_with(|| is_main_thread(py)) {
                    return false;
                }
                match py.check_signals() {
                    Ok(()) => false,
                    Err(raised) => {
                        signal = Some(raised);
                        true
                    }
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

/// Runs `work` with the GIL; a panic in it becomes an `InternalError`. Every function that Python calls and that does more
/// than return a field runs in here or in [`detached`]: PyO3 alone would raise `PanicException`, which `except Exception` does
/// not catch.
pub fn guarded<T>(py: Python<'_>, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(errors::raise(py, &internal(&*panic))))
}

/// Whether this thread runs signal handlers; true if Python cannot tell.
fn is_main_thread(py: Python<'_>) -> bool {
    let ask = || -> PyResult<bool> {
        let threading = py.import("threading")?;
        let main = threading.call_method0("main_thread")?.getattr("ident")?;
        main.eq(threading.call_method0("get_ident")?)
    };
    ask().unwrap_or(true)
}

fn internal(panic: &(dyn Any + Send)) -> Error {
    let said = panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_string());
    Error::new(Kind::Internal, format!("a fault of actshard, please report it: {said}"))
}
