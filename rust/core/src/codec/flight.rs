//! Single flight: threads that need a unit which another thread is decoding wait for its result.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::threads::sync::thread::{self, ThreadId};
use crate::threads::{LOOK, Lock, Signal, Watch};

/// A unit that is being decoded.
#[derive(Debug)]
pub struct Flight<T> {
    /// The decoding process: a forked child must not wait for a thread that does not exist there.
    pid: u32,
    /// The decoding thread: a signal handler or finalizer that runs on it must not wait for it.
    thread: ThreadId,
    /// `None` until the flight ends; then the unit, or `None` where decoding failed.
    result: Lock<Option<Option<Arc<T>>>>,
    ended: Signal,
}

/// How a wait ended.
#[derive(Debug)]
pub enum Waited<T> {
    /// With the unit.
    Made(Arc<T>),
    /// The other thread failed or panicked; decoding again meets the same error.
    Failed,
    /// The wait timed out.
    TooLong,
    /// The watch requested a stop.
    Interrupted,
}

impl<T> Flight<T> {
    fn new(pid: u32) -> Flight<T> {
        Flight { pid, thread: thread::current().id(), result: Lock::new(None), ended: Signal::new() }
    }

    /// Whether to wait for it: not if it began before a fork, nor if it ended and could not be removed from the list.
    fn is_flying(&self, pid: u32) -> bool {
        self.pid == pid && self.result.lock().is_none()
    }

    /// Waits for the unit, at most for `patience`.
    pub fn wait(&self, patience: Option<Duration>, watch: Watch<'_>) -> Waited<T> {
        let until = patience.map(|patience| Instant::now() + patience);
        loop {
            let result = self.result.lock();
            if let Some(ended) = result.as_ref() {
                return ended.clone().map_or(Waited::Failed, Waited::Made);
            }
            let left = until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Waited::TooLong;
            }
            let waited = self.ended.wait_timeout(result, left.min(LOOK));
            let timed_out = waited.1;
            drop(waited);
            if timed_out && watch() {
                return Waited::Interrupted;
            }
        }
    }

    /// Ends the flight; later calls have no effect.
    pub(super) fn end(&self, made: Option<Arc<T>>) {
        // In a child forked meanwhile the lock may be held for ever; the child ignores the flight anyway.
        if self.pid == std::process::id() {
            self.result.lock().get_or_insert(made);
            self.ended.notify_all();
        }
    }
}

/// Units that are being decoded now.
#[derive(Debug)]
pub(super) struct Flights<T, K>(HashMap<K, Arc<Flight<T>>>);

/// The owner of a flight.
pub(super) enum Begun<T> {
    /// This thread.
    Mine(Arc<Flight<T>>),
    /// Another thread.
    Theirs(Arc<Flight<T>>),
    /// This thread is already decoding the same unit, further up its stack.
    Again,
}

impl<T, K: Eq + Hash> Flights<T, K> {
    pub(super) fn new() -> Flights<T, K> {
        Flights(HashMap::new())
    }

    /// Begins a flight, unless a thread of this process has one for the same key.
    pub(super) fn begin(&mut self, key: K) -> Begun<T> {
        let pid = std::process::id();
        match self.0.get(&key).filter(|flight| flight.is_flying(pid)) {
            Some(own) if own.thread == thread::current().id() => Begun::Again,
            Some(other) => Begun::Theirs(Arc::clone(other)),
            None => {
                let flight = Arc::new(Flight::new(pid));
                self.0.insert(key, Arc::clone(&flight));
                Begun::Mine(flight)
            }
        }
    }

    /// Removes a flight from the list.
    pub(super) fn remove(&mut self, key: &K, flight: &Arc<Flight<T>>) {
        if self.0.get(key).is_some_and(|listed| Arc::ptr_eq(listed, flight)) {
            self.0.remove(key);
        }
    }

    /// Simulates a child forked while a thread of its parent decoded.
    #[cfg(test)]
    pub(super) fn begin_elsewhere(&mut self, key: K) {
        self.0.insert(key, Arc::new(Flight::new(std::process::id() + 1)));
    }
}
