//! Locks that a forked child can do without.

#[cfg(not(actshard_loom))]
use std::time::Duration;

use super::sync::atomic::{AtomicBool, Ordering};
use super::sync::{Mutex, MutexGuard};

/// A lock that a forked child can do without: where a thread that does not exist there holds it, the child finds that out
/// once, after a few milliseconds, and goes on with a value of its own.
#[derive(Debug)]
pub(crate) struct ForkMutex<T> {
    first: Mutex<T>,
    spare: Mutex<T>,
    /// The process that made it.
    pid: u32,
    /// In this process, or in the one it was forked from, the first is locked for ever.
    lost: AtomicBool,
}

impl<T> ForkMutex<T> {
    /// Protects a value; `spare` is what a child that lost it starts from.
    pub(crate) fn new(first: T, spare: T) -> ForkMutex<T> {
        let (first, spare) = (Mutex::new(first), Mutex::new(spare));
        ForkMutex { first, spare, pid: std::process::id(), lost: AtomicBool::new(false) }
    }

    /// As after a fork: made by another process, and locked by a thread that does not exist.
    #[cfg(test)]
    pub(crate) fn lose(&mut self) {
        self.pid = 0;
        std::mem::forget(self.first.lock());
    }

    /// The lock, as by [`try_briefly`].
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

/// A model that tries again and again has no end.
#[cfg(actshard_loom)]
pub(crate) fn try_briefly<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    mutex.lock().ok()
}

/// The lock, if it can be had within a few milliseconds; nobody holds one of ours for longer, but a fork may have made
/// the holder disappear.
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
