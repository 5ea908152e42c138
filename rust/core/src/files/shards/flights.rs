//! One reader per shard: threads that want a shard which another thread is reading wait for what it reads.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use crate::error::{Error, Kind, Result};
use crate::threads::Watch;
use crate::threads::fork::ForkMutex;

/// How often a waiting thread looks at its watch.
const LOOK: Duration = Duration::from_millis(20);

/// Who reads what now.
#[derive(Debug)]
pub struct Flights<T>(ForkMutex<HashMap<usize, Arc<Flight<T>>>>);

/// A shard that is being read.
#[derive(Debug)]
pub struct Flight<T> {
    /// The process of the reader: a forked child does not wait for a thread that it does not have.
    pid: u32,
    /// A watch may run a signal handler, which must not wait for the read that it interrupted.
    thread: ThreadId,
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
        Flights(ForkMutex::new(HashMap::new(), HashMap::new()))
    }

    /// Claims a shard, or names its reader.
    pub fn claim(&self, number: usize) -> Claim<'_, T> {
        let pid = std::process::id();
        let thread = thread::current().id();
        let flight = Arc::new(Flight { pid, thread, state: Mutex::new(State::Flying), landed: Condvar::new() });
        // A list that cannot be had now is done without: this thread reads by itself.
        if let Some(mut flying) = self.0.lock_briefly() {
            match flying.get(&number).filter(|f| f.pid == pid && f.is_flying()) {
                Some(own) if own.thread == thread => {}
                Some(other) => return Claim::Theirs(Arc::clone(other)),
                None => {
                    flying.insert(number, Arc::clone(&flight));
                }
            }
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
        // One that stays in the list because that cannot be had now is not waited for: it has landed.
        if let Some(mut flying) = self.flights.0.lock_briefly()
            && flying.get(&self.number).is_some_and(|f| Arc::ptr_eq(f, &self.flight))
        {
            flying.remove(&self.number);
        }
        let mut state = self.flight.state.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*state, State::Flying) {
            *state = State::Landed(None);
        }
        self.flight.landed.notify_all();
    }
}

impl<T> Flight<T> {
    fn is_flying(&self) -> bool {
        matches!(*self.state.lock().unwrap_or_else(PoisonError::into_inner), State::Flying)
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

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_thread_does_not_wait_for_itself() {
        let flights: Flights<u8> = Flights::new();
        let Claim::Mine(outer) = flights.claim(3) else { panic!("a shard that nobody reads") };
        let Claim::Mine(inner) = flights.claim(3) else { panic!("the reader waits for itself") };
        inner.land(&1);
        thread::scope(|scope| {
            let theirs = scope.spawn(|| matches!(flights.claim(3), Claim::Theirs(_)));
            assert!(theirs.join().unwrap(), "the first reader still reads");
        });
        drop(outer);
        assert!(matches!(flights.claim(3), Claim::Mine(_)));
    }

    /// As in a child forked while another thread had the list, or where that thread sleeps for longer than this one tries.
    #[test]
    fn a_list_that_cannot_be_had_holds_up_no_reader() {
        let flights: Flights<u8> = Flights::new();
        let Claim::Mine(failed) = flights.claim(3) else { panic!("a shard that nobody reads") };
        let list = flights.0.lock_briefly().unwrap();
        drop(failed);
        drop(list);
        assert!(matches!(flights.claim(3), Claim::Mine(_)), "what failed is still waited for");
        std::mem::forget(flights.0.lock_briefly().unwrap());
        assert!(matches!(flights.claim(3), Claim::Mine(_)));
    }
}
