//! The one gate through which the GIL is released. Everything that reads, copies or computes for more than
//! microseconds goes through here: other Python threads run meanwhile, Ctrl-C is looked for, and a panic of ours
//! becomes an `InternalError` and never unwinds into the interpreter.
#![allow(clippy::disallowed_methods)] // This is the gate that clippy.toml sends others to.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actshard_core::threads::Watch;
use actshard_core::{Error, Kind, Result};
use pyo3::prelude::*;

use crate::errors;

/// How often the watch asks Python for signals, at most. Each time takes the GIL, which another thread may hold for its whole
/// switch interval.
const LOOK: Duration = Duration::from_millis(20);
/// How often watches took the GIL, for tests.
pub static LOOKS: AtomicU64 = AtomicU64::new(0);

/// Runs `work` without the GIL. The watch it is given asks Python for signals, which only the main thread can see: on
/// others it finds that out once and does not take the GIL again.
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

/// Runs `work` with the GIL; a panic in it becomes an `InternalError` like one without. Every function that Python calls and
/// that does more than return a field does it in here or in [`detached`]: PyO3 alone would raise its `PanicException`, which no
/// `except Exception` catches.
pub fn guarded<T>(py: Python<'_>, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(errors::raise(py, &internal(&*panic))))
}

/// Whether this is the thread that runs signal handlers. Where Python cannot say, it might be.
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
