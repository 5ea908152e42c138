//! The only function that releases the GIL. All work of more than microseconds goes through it: other Python threads run
//! meanwhile, Ctrl-C is detected, and a panic becomes an `InternalError` instead of unwinding into the interpreter.
#![allow(clippy::disallowed_methods)] // clippy.toml sends all other code here

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actshard_core::threads::Watch;
use actshard_core::{Error, Kind, Result};
use pyo3::prelude::*;

use crate::errors;

/// Minimum interval between two checks for signals.
const LOOK: Duration = Duration::from_millis(20);
/// Maximum interval: the latency of Ctrl-C next to a thread that never releases the GIL for long.
const LONGEST: Duration = Duration::from_secs(1);
/// A check takes the GIL, which another thread may hold for its whole switch interval. The next check is made after
/// this many times the last wait, so waits take at most a twentieth of the time.
const WAITS: u32 = 20;
/// The last wait for the GIL, in ns, over all threads.
static WAITED: AtomicU64 = AtomicU64::new(0);
/// Number of times that watches took the GIL, for tests.
pub static LOOKS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// Whether this thread runs signal handlers, and the process in which that was determined: after a fork it may
    /// differ.
    static MAIN: Cell<Option<(u32, bool)>> = const { Cell::new(None) };
}

/// Checks for signals at intervals, on the main thread only: no other thread runs handlers.
struct Lookout {
    from: Instant,
    interval: Duration,
    /// Whether the work has called its watch: not in small requests, which should not pay for the clock.
    called: bool,
}

impl Lookout {
    fn new(py: Python<'_>) -> Lookout {
        if MAIN.get().is_none() {
            // Determined here, with the GIL; later it would have to wait for the GIL.
            MAIN.set(Some((std::process::id(), is_main_thread(py))));
        }
        Lookout { from: Instant::now(), interval: interval(), called: false }
    }

    /// Checks for signals if it is time; stores what a handler raised and returns true.
    fn look(&mut self, signal: &mut Option<PyErr>) -> bool {
        self.called = true;
        let now = Instant::now();
        if now.duration_since(self.from) < self.interval {
            return false;
        }
        let pid = std::process::id();
        let known = MAIN.get().filter(|(of, _)| *of == pid).map(|(_, main)| main);
        if known == Some(false) {
            self.from = now;
            return false;
        }
        LOOKS.fetch_add(1, Ordering::Relaxed);
        let stops = Python::attach(|py| {
            waited(now);
            let main = known.unwrap_or_else(|| is_main_thread(py));
            MAIN.set(Some((pid, main)));
            if !main {
                return false;
            }
            match py.check_signals() {
                Ok(()) => false,
                Err(raised) => {
                    *signal = Some(raised);
                    true
                }
            }
        });
        // From the end of the wait: otherwise a wait longer than the interval would be followed by the next.
        (self.from, self.interval) = (Instant::now(), interval());
        stops
    }
}

fn waited(from: Instant) {
    WAITED.store(u64::try_from(from.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
}

fn interval() -> Duration {
    Duration::from_nanos(WAITED.load(Ordering::Relaxed)).saturating_mul(WAITS).clamp(LOOK, LONGEST)
}

/// Runs `work` without the GIL. The watch passed to it checks for signals; on threads other than the main one it does
/// nothing.
pub fn detached<T: Send>(py: Python<'_>, work: impl FnOnce(Watch<'_>) -> Result<T> + Send) -> PyResult<T> {
    let mut signal: Option<PyErr> = None;
    let mut lookout = Lookout::new(py);
    let (outcome, ended) = py.detach(|| {
        let mut watch = || lookout.look(&mut signal);
        let outcome =
            catch_unwind(AssertUnwindSafe(|| work(&mut watch))).unwrap_or_else(|panic| Err(internal(&*panic)));
        // The wait for the GIL on return sets the first interval of the next call.
        (outcome, lookout.called.then(Instant::now))
    });
    if let Some(ended) = ended {
        waited(ended);
    }
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

/// Whether this thread runs signal handlers; true if that cannot be determined.
fn is_main_thread(py: Python<'_>) -> bool {
    let ask = || -> PyResult<bool> {
        let threading = py.import("threading")?;
        let main = threading.call_method0("main_thread")?.getattr("ident")?;
        main.eq(threading.call_method0("get_ident")?)
    };
    ask().unwrap_or(true)
}

fn internal(panic: &(dyn Any + Send)) -> Error {
    let message = panic
        .downcast_ref::<&str>()
        .map(ToString::to_string)
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_string());
    Error::new(Kind::Internal, format!("a bug in actshard; please report it: {message}"))
}
