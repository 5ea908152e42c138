//! The threads that do input and output, one set per process.
//!
//! tokio does not survive a fork. The runtime therefore belongs to a process id: a child builds its own at its first
//! request and leaks its parent's, which must neither be used nor dropped there. The same applies to anything that
//! keeps connections: [`PerProcess`]. Callers run their own futures on their own thread, so that a body is written
//! straight into the caller's memory, and check their [`Stop`] every [`LOOK`].

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::OnceLock;
use std::time::Duration;

use actshard_core::threads::{ForkSafe, LOOK, Stop, interrupted, is_abandoned};
use actshard_core::{Error, Kind, Result};
use crossbeam_utils::atomic::AtomicCell;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{Semaphore, SemaphorePermit};

/// Bytes in flight in this process.
pub const IN_FLIGHT: u64 = 256 << 20;
/// One unit of [`IN_FLIGHT`], and the minimum size that a request counts as: at most 256 requests are in flight.
const UNIT: u64 = 1 << 20;
/// Threads that drive the connections. Two carry 2 GB/s over TLS.
const WORKERS: usize = 2;

/// A process's threads. Never freed: threads of a parent do not exist in its child, and dropping a runtime waits for them.
#[derive(Debug)]
struct IoThreads {
    pid: u32,
    made: OnceLock<Option<Runtime>>,
    budget: Semaphore,
}

/// The threads of this process, or of one that it was forked from. Compared by address.
#[derive(Clone, Copy, Debug)]
struct IoSlot(Option<&'static IoThreads>);

impl PartialEq for IoSlot {
    fn eq(&self, other: &IoSlot) -> bool {
        self.0.map(std::ptr::from_ref) == other.0.map(std::ptr::from_ref)
    }
}

impl Eq for IoSlot {}

static IO: AtomicCell<IoSlot> = AtomicCell::new(IoSlot(None));
const _: () = assert!(AtomicCell::<IoSlot>::is_lock_free(), "a lock could be held while another thread forks");

fn io() -> &'static IoThreads {
    let pid = std::process::id();
    let mut now = IO.load();
    loop {
        if let Some(io) = now.0.filter(|io| io.pid == pid) {
            return io;
        }
        let budget = Semaphore::new((IN_FLIGHT / UNIT) as usize);
        let new: &'static IoThreads = Box::leak(Box::new(IoThreads { pid, made: OnceLock::new(), budget }));
        match IO.compare_exchange(now, IoSlot(Some(new))) {
            Ok(_) => return new,
            Err(other) => now = other,
        }
    }
}

fn build() -> Option<Runtime> {
    // reqwest panics without a provider; a second installation fails, and the first one stays.
    let _ = rustls::crypto::ring::default_provider().install_default();
    Builder::new_multi_thread().worker_threads(WORKERS).thread_name("actshard-io").enable_all().build().ok()
}

/// Runs a future on the calling thread until it is done; fails once `stop` is set or the caller no longer waits for this
/// thread. Dropping a request closes its connection.
pub fn wait<F: Future>(future: F, stop: &Stop) -> Result<F::Output> {
    let runtime = io().made.get_or_init(build).as_ref();
    let runtime = runtime.ok_or_else(|| Error::new(Kind::Access, "cannot start the threads for network requests"))?;
    runtime.block_on(async {
        let mut future = pin!(future);
        while !stop.is_set() && !is_abandoned() {
            if let Ok(made) = tokio::time::timeout(LOOK, future.as_mut()).await {
                return Ok(made);
            }
        }
        Err(interrupted())
    })
}

/// Runs a future on the calling thread for at most this time. It does not end at a stop, or when the caller no longer
/// waits: it undoes the work of a stopped call.
pub fn wait_at_most<F: Future>(future: F, most: Duration) -> Option<F::Output> {
    let runtime = io().made.get_or_init(build).as_ref()?;
    runtime.block_on(async { tokio::time::timeout(most, future).await.ok() })
}

/// Waits until a request for this many bytes fits into [`IN_FLIGHT`], and counts it until the permit is dropped.
pub async fn reserve(bytes: u64) -> Option<SemaphorePermit<'static>> {
    let units = bytes.div_ceil(UNIT).clamp(1, IN_FLIGHT / UNIT) as u32;
    io().budget.acquire_many(units).await.ok()
}

/// A value that works in the process that made it only, and is made again in a child.
pub struct PerProcess<T: Clone>(ForkSafe<Option<(u32, T)>>);

/// Shows no value: clients of the libraries below show their credentials.
impl<T: Clone> fmt::Debug for PerProcess<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PerProcess")
    }
}

impl<T: Clone> Default for PerProcess<T> {
    fn default() -> PerProcess<T> {
        PerProcess(ForkSafe::new(None))
    }
}

impl<T: Clone> PerProcess<T> {
    /// The value of this process. Two threads may make one at once; then the first one stays.
    pub fn get<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let pid = std::process::id();
        let found = self.0.with(|slot| slot.as_ref().filter(|(of, _)| *of == pid).map(|(_, value)| value.clone()));
        if let Some(value) = found.flatten() {
            return Ok(value);
        }
        let made = make()?;
        let stored = self.0.with(|slot| match slot {
            Some((of, value)) if *of == pid => value.clone(),
            _ => {
                // A parent's value may wait for threads that do not exist here.
                std::mem::forget(slot.replace((pid, made.clone())));
                made.clone()
            }
        });
        Ok(stored.unwrap_or(made))
    }

    /// Makes the value again at the next call.
    pub fn reset(&self) {
        self.0.with(|slot| {
            if slot.as_ref().is_some_and(|(pid, _)| *pid == std::process::id()) {
                *slot = None;
            }
        });
    }
}

impl<T: Clone> Drop for PerProcess<T> {
    fn drop(&mut self) {
        self.0.with(|slot| {
            if slot.as_ref().is_some_and(|(pid, _)| *pid != std::process::id()) {
                std::mem::forget(slot.take());
            }
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use actshard_core::threads::run_waiting;

    use super::*;

    #[test]
    fn a_stop_ends_a_wait() {
        let stop = Stop::new();
        std::thread::scope(|scope| {
            scope.spawn(|| stop.set());
            assert_eq!(wait(std::future::pending::<()>(), &stop).unwrap_err().kind, Kind::Interrupted);
        });
        assert_eq!(wait(async { 7 }, &Stop::new()).unwrap(), 7);
    }

    #[test]
    fn what_a_stop_left_is_undone_within_its_time() {
        assert_eq!(wait_at_most(async { 7 }, LOOK), Some(7));
        assert_eq!(wait_at_most(std::future::pending::<()>(), LOOK), None);
        let undone = AtomicBool::new(false);
        let work = |_: usize, stop: &Stop| {
            assert!(wait(std::future::pending::<()>(), stop).is_err());
            undone.store(wait_at_most(async { true }, LOOK) == Some(true), Ordering::Relaxed);
            Err(interrupted())
        };
        assert!(run_waiting(1, 1, &work, &mut || true).is_err());
        assert!(undone.load(Ordering::Relaxed));
    }

    #[test]
    fn a_value_of_another_process_is_made_again_and_never_dropped() {
        #[derive(Clone)]
        struct Bomb(u32, std::sync::Arc<std::sync::atomic::AtomicUsize>);
        impl Drop for Bomb {
            fn drop(&mut self) {
                if self.0 == 0 {
                    self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            }
        }
        let drops = std::sync::Arc::default();
        let value = PerProcess::default();
        value.0.with(|slot| *slot = Some((0, Bomb(0, std::sync::Arc::clone(&drops)))));
        let made = value.get(|| Ok::<_, ()>(Bomb(1, std::sync::Arc::clone(&drops)))).unwrap();
        assert_eq!(made.0, 1);
        assert_eq!(drops.load(std::sync::atomic::Ordering::Relaxed), 0);
    }
}
