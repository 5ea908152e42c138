//! The standard library's locks and atomics, or loom's models of them: `--cfg actshard_loom` tries every interleaving of a
//! model's threads (`scripts/sanitize.sh loom`). Other modules take their locks from here; those that outlive a call are
//! [`ForkSafe`](super::fork::ForkSafe), as clippy.toml demands.

#![allow(clippy::disallowed_types, reason = "the types that others use instead are made of these")]

use std::sync::{PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

#[cfg(not(actshard_loom))]
use std::sync::{Condvar, Mutex};

#[cfg(actshard_loom)]
use loom::sync::{Condvar, Mutex};

#[cfg(actshard_loom)]
pub use loom::sync::MutexGuard as LockGuard;
#[cfg(actshard_loom)]
pub(crate) use loom::{
    sync::{RwLock, RwLockReadGuard, RwLockWriteGuard, atomic},
    thread,
};
#[cfg(not(actshard_loom))]
pub use std::sync::MutexGuard as LockGuard;
#[cfg(not(actshard_loom))]
pub(crate) use std::{
    sync::{Mutex as ConstMutex, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic},
    thread,
};

/// A lock among the threads of one call, or of one process: a thread waits for it, and a panic of another one is no reason to
/// stop. A value that a forked child uses is [`ForkSafe`](super::fork::ForkSafe).
#[derive(Debug, Default)]
pub struct Lock<T>(Mutex<T>);

impl<T> Lock<T> {
    /// Protects a value.
    pub fn new(value: T) -> Lock<T> {
        Lock(Mutex::new(value))
    }

    /// Waits for the value.
    pub fn lock(&self) -> LockGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value if it is free now.
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        attempt(self.0.try_lock())
    }

    /// The value, by its only owner.
    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value without its lock.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The guard of a lock that is free. A panic of another holder is no reason to stop.
pub(super) fn attempt<G>(tried: TryLockResult<G>) -> Option<G> {
    match tried {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Wakes threads that wait for a change of a [`Lock`]'s value.
#[derive(Debug, Default)]
pub struct Signal(Condvar);

impl Signal {
    /// Without a thread that waits.
    pub fn new() -> Signal {
        Signal(Condvar::new())
    }

    /// Waits until it is notified.
    pub fn wait<'a, T>(&self, guard: LockGuard<'a, T>) -> LockGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until it is notified, for at most this time; also returns whether the time is over.
    pub fn wait_timeout<'a, T>(&self, guard: LockGuard<'a, T>, most: Duration) -> (LockGuard<'a, T>, bool) {
        let (guard, waited) = self.0.wait_timeout(guard, most).unwrap_or_else(PoisonError::into_inner);
        (guard, waited.timed_out())
    }

    /// Wakes one thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all threads.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// loom makes its locks at run time, so that one in a constant is made when it is first locked.
#[cfg(actshard_loom)]
#[derive(Debug)]
pub(crate) struct ConstMutex<T> {
    value: std::sync::Mutex<Option<T>>,
    made: std::sync::OnceLock<Mutex<T>>,
}

#[cfg(actshard_loom)]
impl<T: Default> Default for ConstMutex<T> {
    fn default() -> ConstMutex<T> {
        ConstMutex::new(T::default())
    }
}

#[cfg(actshard_loom)]
#[allow(clippy::unwrap_used, reason = "a model fails by panicking")]
impl<T> ConstMutex<T> {
    pub(crate) const fn new(value: T) -> ConstMutex<T> {
        ConstMutex { value: std::sync::Mutex::new(Some(value)), made: std::sync::OnceLock::new() }
    }

    pub(crate) fn lock(&self) -> std::sync::LockResult<LockGuard<'_, T>> {
        self.made.get_or_init(|| Mutex::new(self.value.lock().unwrap().take().unwrap())).lock()
    }
}
