//! Locks that survive a fork.

#[cfg(not(actshard_loom))]
use std::{
    sync::{TryLockError, TryLockResult},
    time::Duration,
};

use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// A lock that survives a fork. If a thread that does not exist in the child holds it, the child notices once, after a
/// few milliseconds, and continues with the spare value.
#[derive(Debug)]
pub(crate) struct ForkMutex<T> {
    first: Mutex<T>,
    spare: Mutex<T>,
    /// The process that created it.
    pid: u32,
    /// Set if the first lock can never be taken, in this process or in the one it was forked from.
    lost: AtomicBool,
}

impl<T> ForkMutex<T> {
    /// Protects `first`; a child that cannot lock it starts with `spare`.
    pub(crate) fn new(first: T, spare: T) -> ForkMutex<T> {
        let (first, spare) = (Mutex::new(first), Mutex::new(spare));
        ForkMutex { first, spare, pid: std::process::id(), lost: AtomicBool::new(false) }
    }

    /// Simulates a fork: created by another process, and locked by a thread that does not exist.
    #[cfg(test)]
    pub(crate) fn lose(&mut self) {
        self.fork();
        std::mem::forget(self.first.lock());
    }

    /// Simulates a fork: created by another process.
    #[cfg(test)]
    pub(crate) fn fork(&mut self) {
        self.pid = 0;
    }

    /// Locks as [`try_briefly`] does.
    pub(crate) fn lock_briefly(&self) -> Option<MutexGuard<'_, T>> {
        if !self.lost.load(Ordering::Relaxed) {
            if let Some(guard) = try_briefly(&self.first) {
                return Some(guard);
            }
            if !self.lose_in_child() {
                return None;
            }
        }
        try_briefly(&self.spare)
    }

    /// Whether the spare value is the one in use.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed)
    }

    /// In a child, changes to the spare value, because a lock that the first value needs can never be taken. Returns
    /// whether it did.
    pub(crate) fn lose_in_child(&self) -> bool {
        let in_child = std::process::id() != self.pid;
        if in_child {
            self.lost.store(true, Ordering::Relaxed);
        }
        in_child
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

    /// Locks the value for reading, for as long as [`try_briefly`] tries. Calls `waits` if it is not free at once.
    #[cfg(not(actshard_loom))]
    pub(crate) fn read_briefly(&self, waits: impl FnOnce()) -> Option<RwLockReadGuard<'_, T>> {
        let attempt = || match self.passing.load(Ordering::Relaxed) {
            true => Err(TryLockError::WouldBlock),
            false => self.value.try_read(),
        };
        if let Ok(guard) = attempt() {
            return Some(guard);
        }
        waits();
        briefly(attempt)
    }

    /// Locks the value for changing it, for as long as [`try_briefly`] tries.
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

    #[cfg(actshard_loom)]
    pub(crate) fn read_briefly(&self, _waits: impl FnOnce()) -> Option<RwLockReadGuard<'_, T>> {
        self.value.read().ok()
    }

    #[cfg(actshard_loom)]
    pub(crate) fn write_briefly(&self) -> Option<RwLockWriteGuard<'_, T>> {
        self.value.write().ok()
    }
}

/// A loom model that retries has no end, so it waits.
#[cfg(actshard_loom)]
pub(crate) fn try_briefly<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.lock().ok()
}

/// Attempts before a thread sleeps between them.
#[cfg(not(actshard_loom))]
const SPINS: usize = 20;

/// The guard, or `None` if the lock is not free within a few milliseconds. This crate holds no such lock for longer, but a
/// fork may have removed the holder.
#[cfg(not(actshard_loom))]
pub(crate) fn try_briefly<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    briefly(|| mutex.try_lock())
}

#[cfg(not(actshard_loom))]
fn briefly<G>(attempt: impl Fn() -> TryLockResult<G>) -> Option<G> {
    for tried in 0..100 {
        match attempt() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if tried < SPINS => std::hint::spin_loop(),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
        }
    }
    None
}
