//! Locks that survive a fork.
//!
//! A child inherits every lock as it was, but not the threads that held it: a lock that another thread held at the fork is
//! never released there. So no lock that outlives a call is simply waited for.

#![allow(clippy::disallowed_types, reason = "the types that others use instead are made of these")]

#[cfg(not(actshard_loom))]
use std::{
    sync::{TryLockError, TryLockResult},
    time::Duration,
};

use std::sync::atomic::AtomicU32;

use super::sync::atomic::{AtomicBool, Ordering};
#[cfg(not(actshard_loom))]
use super::sync::attempt;
use super::sync::{ConstMutex, LockGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A value behind a lock that survives a fork: it can be tried ([`ForkSafe::try_lock`]), tried for some milliseconds
/// ([`ForkSafe::lock_briefly`]), or waited for as long as a thread of this process holds it ([`ForkSafe::with`]).
#[derive(Debug, Default)]
pub struct ForkSafe<T> {
    value: ConstMutex<T>,
    /// The process of the thread that is in [`ForkSafe::with`]; 0 if there is none.
    #[cfg_attr(actshard_loom, allow(dead_code, reason = "in a model there is one process"))]
    holder: AtomicU32,
}

impl<T> ForkSafe<T> {
    /// Protects a value.
    pub const fn new(value: T) -> ForkSafe<T> {
        ForkSafe { value: ConstMutex::new(value), holder: AtomicU32::new(0) }
    }

    /// The value if it is free now: where work without it costs little.
    #[cfg(not(actshard_loom))]
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        attempt(self.value.try_lock())
    }

    /// The value, or `None` if it is not free within a few milliseconds: where no thread holds it for longer, but a fork may
    /// have removed the holder.
    #[cfg(not(actshard_loom))]
    pub fn lock_briefly(&self) -> Option<LockGuard<'_, T>> {
        briefly(|| self.value.try_lock())
    }

    /// Works on the value when no other thread of this process does. `None` in a child whose copy was locked when it was
    /// forked: the value is lost there, and its threads do not wait for it again.
    #[cfg(not(actshard_loom))]
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        let pid = std::process::id();
        let (mut tried, mut unknown) = (0, 0);
        loop {
            if let Some(mut value) = attempt(self.value.try_lock()) {
                self.holder.store(pid, Ordering::Relaxed);
                let _holding = Holding(&self.holder);
                return Some(work(&mut value));
            }
            match self.holder.load(Ordering::Relaxed) {
                holder if holder == pid => unknown = 0,
                // A thread that has just locked it, or that is about to release it; a fork at that moment removes it.
                0 if unknown < UNKNOWN => unknown += 1,
                0 => drop(self.holder.compare_exchange(0, NOBODY, Ordering::Relaxed, Ordering::Relaxed)),
                _ => return None,
            }
            pause(tried);
            tried += 1;
        }
    }

    /// Simulates a fork while another thread worked on the value.
    #[cfg(test)]
    pub(crate) fn lose(&self) {
        std::mem::forget(self.try_lock());
        self.holder.store(NOBODY, Ordering::Relaxed);
    }
}

/// While it lives, a thread works on the value; it ends also by a panic.
#[cfg(not(actshard_loom))]
struct Holding<'a>(&'a AtomicU32);

#[cfg(not(actshard_loom))]
impl Drop for Holding<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

/// A loom model that retries has no end, so it waits.
#[cfg(actshard_loom)]
#[allow(missing_docs, reason = "as above")]
impl<T> ForkSafe<T> {
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        self.value.lock().ok()
    }

    pub fn lock_briefly(&self) -> Option<LockGuard<'_, T>> {
        self.value.lock().ok()
    }

    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.value.lock().ok().map(|mut value| work(&mut value))
    }
}

/// A value that begins anew: a child that lost the first one, because a thread that is not there holds its lock, uses the spare
/// one. It is for values without which work would be wrong or slow.
#[derive(Debug)]
pub struct Renewed<T> {
    first: ForkSafe<T>,
    spare: ForkSafe<T>,
    /// The process that created it.
    pid: u32,
    /// Set once the spare value is the one in use, in this process or in the one it was forked from.
    lost: AtomicBool,
}

impl<T> Renewed<T> {
    /// Protects `first`; a child that cannot lock it starts with `spare`.
    pub fn new(first: T, spare: T) -> Renewed<T> {
        let (first, spare) = (ForkSafe::new(first), ForkSafe::new(spare));
        Renewed { first, spare, pid: std::process::id(), lost: AtomicBool::new(false) }
    }

    /// Simulates a fork: created by another process, and locked by a thread that does not exist.
    #[cfg(test)]
    pub(crate) fn lose(&mut self) {
        self.fork();
        self.first.lose();
    }

    /// Simulates a fork: created by another process.
    #[cfg(test)]
    pub(crate) fn fork(&mut self) {
        self.pid = 0;
    }

    /// The value in use, as [`ForkSafe::lock_briefly`] locks it.
    pub fn lock_briefly(&self) -> Option<LockGuard<'_, T>> {
        if !self.is_lost() {
            if let Some(guard) = self.first.lock_briefly() {
                return Some(guard);
            }
            if !self.lose_in_child() {
                return None;
            }
        }
        self.spare.lock_briefly()
    }

    /// Whether the spare value is the one in use.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// In a child, changes to the spare value, because a lock that the first value needs can never be taken. Returns
    /// whether it did.
    pub fn lose_in_child(&self) -> bool {
        let in_child = std::process::id() != self.pid;
        if in_child {
            self.lost.store(true, Ordering::Relaxed);
        }
        in_child
    }
}

impl<T: Default> Renewed<T> {
    /// Works on the value in use, as [`ForkSafe::with`] does. A child of a child that lost both works on a value of its own,
    /// once.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let mut left = Some(work);
        let mut once = |value: &mut T| left.take().map(|work| work(value));
        let first = if self.is_lost() { None } else { self.first.with(&mut once) };
        let done = first.or_else(|| {
            self.lose_in_child();
            self.spare.with(&mut once)
        });
        match done.flatten().or_else(|| once(&mut T::default())) {
            Some(done) => done,
            None => unreachable!("the work is done at most once, and then its result was returned"),
        }
    }
}

/// A value that many threads read and few change; readers do not wait for each other. Its locks are only tried.
#[derive(Debug)]
pub(crate) struct SharedLock<T> {
    value: RwLock<T>,
    /// A thread is about to change the value: new readers wait for it. Readers in a loop could delay it for ever.
    #[cfg_attr(actshard_loom, allow(dead_code, reason = "in a model a thread waits for its turn"))]
    passing: AtomicBool,
}

impl<T> SharedLock<T> {
    pub(crate) fn new(value: T) -> SharedLock<T> {
        SharedLock { value: RwLock::new(value), passing: AtomicBool::new(false) }
    }

    /// The value for reading, if it is free now.
    #[cfg(not(actshard_loom))]
    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        attempt(self.value.try_read())
    }

    /// The value for changing it, if it is free now.
    #[cfg(not(actshard_loom))]
    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        attempt(self.value.try_write())
    }

    /// The value for reading, if it is free within a few milliseconds. Calls `waits` if it is not free at once.
    #[cfg(not(actshard_loom))]
    pub(crate) fn read_briefly(&self, waits: impl FnOnce()) -> Option<RwLockReadGuard<'_, T>> {
        let lock = || match self.passing.load(Ordering::Relaxed) {
            true => Err(TryLockError::WouldBlock),
            false => self.value.try_read(),
        };
        if let Some(guard) = attempt(lock()) {
            return Some(guard);
        }
        waits();
        briefly(lock)
    }

    /// The value for changing it, if it is free within a few milliseconds.
    #[cfg(not(actshard_loom))]
    pub(crate) fn write_briefly(&self) -> Option<RwLockWriteGuard<'_, T>> {
        // New readers wait only until the current readers finish.
        self.passing.store(true, Ordering::Relaxed);
        let passed = (0..SPINS).find_map(|_| {
            std::hint::spin_loop();
            self.value.try_write().ok()
        });
        self.passing.store(false, Ordering::Relaxed);
        passed.or_else(|| briefly(|| self.value.try_write()))
    }
}

#[cfg(actshard_loom)]
impl<T> SharedLock<T> {
    pub(crate) fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        self.value.read().ok()
    }

    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.value.write().ok()
    }

    pub(crate) fn read_briefly(&self, _waits: impl FnOnce()) -> Option<RwLockReadGuard<'_, T>> {
        self.try_read()
    }

    pub(crate) fn write_briefly(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.try_write()
    }
}

/// No process: a holder that was not there.
#[cfg(any(test, not(actshard_loom)))]
const NOBODY: u32 = u32::MAX;
/// Attempts before a thread sleeps between them.
#[cfg(not(actshard_loom))]
const SPINS: usize = 20;
/// Attempts of [`ForkSafe::lock_briefly`]: some milliseconds.
#[cfg(not(actshard_loom))]
const BRIEF: usize = 100;
/// Attempts while the process of the holder is not known: a second.
#[cfg(not(actshard_loom))]
const UNKNOWN: usize = 20_000;

#[cfg(not(actshard_loom))]
fn briefly<G>(mut lock: impl FnMut() -> TryLockResult<G>) -> Option<G> {
    (0..BRIEF).find_map(|tried| {
        attempt(lock()).or_else(|| {
            pause(tried);
            None
        })
    })
}

#[cfg(not(actshard_loom))]
fn pause(tried: usize) {
    if tried < SPINS {
        std::hint::spin_loop();
    } else {
        std::thread::sleep(Duration::from_micros(50));
    }
}

#[cfg(all(test, not(actshard_loom)))]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn threads_of_one_process_wait_however_long_one_works() {
        let value = ForkSafe::new(0);
        let barrier = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                value.with(|n| {
                    barrier.wait();
                    // Longer than a thread tries that does not know who holds the lock.
                    std::thread::sleep(Duration::from_millis(1500));
                    *n += 1;
                })
            });
            barrier.wait();
            assert!(value.try_lock().is_none() && value.lock_briefly().is_none());
            assert_eq!(value.with(|n| *n), Some(1));
        });
    }

    #[test]
    fn a_child_gives_up_a_lock_whose_holder_is_not_there() {
        let value = ForkSafe::new(1);
        assert_eq!(value.with(|value| *value), Some(1));
        value.lose();
        assert_eq!(value.with(|value| *value), None);
        // Forked between the lock and the word of who holds it.
        let value = ForkSafe::new(1);
        std::mem::forget(value.try_lock());
        assert_eq!((value.with(|value| *value), value.with(|value| *value)), (None, None));
        assert_eq!(value.holder.load(Ordering::Relaxed), NOBODY, "the second time it does not wait");
    }

    #[test]
    fn a_panic_of_a_holder_is_no_end() {
        let value = ForkSafe::new(1);
        let panics = std::panic::AssertUnwindSafe(|| value.with(|_| panic!("in a holder")));
        assert!(std::panic::catch_unwind(panics).is_err());
        assert_eq!(value.with(|value| *value), Some(1));
        assert!(value.try_lock().is_some() && value.lock_briefly().is_some());
    }

    #[test]
    fn a_child_whose_copy_is_locked_begins_anew() {
        let mut value = Renewed::new(vec![1, 2], vec![]);
        value.with(|value| value.push(3));
        value.fork();
        assert_eq!(value.with(|value| value.clone()), [1, 2, 3], "not locked");
        value.lose();
        value.with(|value| value.push(4));
        assert_eq!(value.with(|value| value.clone()), [4]);
        assert!(value.is_lost());
        value.spare.lose();
        assert_eq!(value.with(|value| value.clone()), [0; 0], "as a child of that child");
    }

    #[test]
    fn a_child_that_gave_up_a_value_never_returns_to_it() {
        let mut value = Renewed::new(1, 2);
        value.fork();
        let held = value.first.try_lock();
        assert_eq!(value.lock_briefly().map(|value| *value), Some(2));
        drop(held);
        assert_eq!((value.with(|value| *value), value.is_lost()), (2, true));
    }
}
