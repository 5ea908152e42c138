//! One reader per shard: threads that want a shard which another thread is reading wait for what it reads.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::bytes::decoded::try_briefly;
use crate::error::{Error, Kind, Result};
use crate::par::pool::Watch;

/// How often a waiting thread looks at its watch.
const LOOK: Duration = Duration::from_millis(20);

/// Who reads what now.
#[derive(Debug)]
pub struct Flights<T>(Mutex<HashMap<usize, Arc<Flight<T>>>>);

/// A shard that is being read.
#[derive(Debug)]
pub struct Flight<T> {
    /// The process of the reader: a forked child does not wait for a thread that it does not have.
    pid: u32,
    state: Mutex<State<T>>,
    landed: Condvar,
}

#[derive(Debug)]
enum State<T> {
    Flying,
    /// Read; `None` after an error, which the waiting threads meet by themselves.
    Landed(Option<T>),
}

/// Either the right to read, or somebody to wait for.
pub enum Claim<'a, T> {
    Mine(Mine<'a, T>),
    Theirs(Arc<Flight<T>>),
}

/// The right to read a shard, given up when dropped.
pub struct Mine<'a, T> {
    flights: &'a Flights<T>,
    number: usize,
    flight: Arc<Flight<T>>,
}

impl<T: Clone> Flights<T> {
    pub fn new() -> Flights<T> {
        Flights(Mutex::new(HashMap::new()))
    }

    /// Claims a shard, or names its reader.
    pub fn claim(&self, number: usize) -> Claim<'_, T> {
        let pid = std::process::id();
        let flight = Arc::new(Flight { pid, state: Mutex::new(State::Flying), landed: Condvar::new() });
        // A lock that cannot be had was left behind by a thread that a fork did not copy: this thread reads by itself.
        if let Some(mut flying) = try_briefly(&self.0) {
            if let Some(other) = flying.get(&number).filter(|f| f.pid == pid) {
                return Claim::Theirs(Arc::clone(other));
            }
            flying.insert(number, Arc::clone(&flight));
        }
        Claim::Mine(Mine { flights: self, number, flight })
    }
}

impl<T: Clone> Mine<'_, T> {
    /// Hands over what was read.
    pub fn land(self, read: &T) {
        *self.flight.state.lock().unwrap_or_else(PoisonError::into_inner) = State::Landed(Some(read.clone()));
    }
}

impl<T> Drop for Mine<'_, T> {
    fn drop(&mut self) {
        if self.flight.pid != std::process::id() {
            return; // a child that was forked meanwhile ignores the flight anyway
        }
        let mut flying = self.flights.0.lock().unwrap_or_else(PoisonError::into_inner);
        if flying.get(&self.number).is_some_and(|f| Arc::ptr_eq(f, &self.flight)) {
            flying.remove(&self.number);
        }
        drop(flying);
        let mut state = self.flight.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Flying) {
            *state = State::Landed(None);
        }
        self.flight.landed.notify_all();
    }
}

impl<T: Clone> Flight<T> {
    /// Waits until the shard is read; `None` where its reader failed.
    pub fn wait(&self, watch: Watch<'_>) -> Result<Option<T>> {
        loop {
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            if let State::Landed(read) = &*state {
                return Ok(read.clone());
            }
            let (state, timeout) = self.landed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            drop(state);
            if timeout.timed_out() && watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
        }
    }
}
