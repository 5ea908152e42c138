//! Locks that survive a fork.

#[cfg(not(actshard_loom))]
use std::time::Duration;

use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Mutex, MutexGuard};

/// A lock that survives a fork. If a thread that does not exist in the child holds it, the child notices once, after a
/// few milliseconds, and continues with the spare value.
#[derive(Debug)]
pub(crate) struct ForkMutex<T> {
    first: Mutex<T>,
    spare: Mutex<T>,
    /// The process that created it.
    pid: u32,
    /// In this process, or the one it was forked from, the first lock can never be taken.
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
        self.pid = 0;
        std::mem::forget(self.first.lock());
    }

    /// Locks as [`try_briefly`] does.
    pub(crate) fn lock_briefly(&self) -> Option<MutexGuard<'_, T>> {
        if !self.lost.load(Ordering::Relaxed) {
            if let Some(guard) = try_briefly(&self.first) {
                return Some(guard);
            }
            if std::process::id() == self.pid {
                return None;
            }
            self.lost.store(true, Ordering::Relaxed);
        }
        try_briefly(&self.spare)
    }
}

/// A loom model that retries has no end, so it waits.
#[cfg(actshard_loom)]
pub(crate) fn try_briefly<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.lock().ok()
}

/// The guard, or `None` if the lock is not free within a few milliseconds. This crate holds no such lock for longer, but a
/// fork may have removed the holder.
#[cfg(not(actshard_loom))]
pub(crate) fn try_briefly<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    for attempt in 0..100 {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) if attempt < 20 => std::hint::spin_loop(),
            Err(std::sync::TryLockError::WouldBlock) => std::thread::sleep(Duration::from_micros(50)),
        }
    }
    None
}
