//! A budget of bytes, shared by all threads of this process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::handout::{Stop, interrupted};
use super::waiting::is_abandoned;
use crate::error::Result;

/// Unit of the count, which has 32 bits.
const UNIT: u64 = 4 << 10;
/// Longest pause between two checks of the count.
const PAUSE: Duration = Duration::from_millis(2);

/// A budget of bytes, of which threads take shares. There is no lock, and the count belongs to a process: a forked
/// child begins with all bytes, whatever its parent's threads had taken.
#[derive(Debug)]
pub struct SharedBytes {
    most: u64,
    /// Process id, and units taken.
    taken: AtomicU64,
}

/// A share, given back when it is dropped.
#[derive(Debug)]
pub struct TakenBytes<'a> {
    from: &'a SharedBytes,
    pid: u32,
    units: u64,
}

impl SharedBytes {
    /// A budget of this many bytes.
    pub const fn new(bytes: u64) -> SharedBytes {
        SharedBytes { most: bytes / UNIT, taken: AtomicU64::new(0) }
    }

    /// Waits until this many bytes are free, at most until `stop` is set or the caller no longer waits for this thread. More than half of the budget counts as half: a piece that cannot be cut may exceed it.
    pub fn take(&self, bytes: u64, stop: &Stop) -> Result<TakenBytes<'_>> {
        let (pid, units) = (std::process::id(), bytes.div_ceil(UNIT).min(self.most / 2));
        let mut pause = Duration::from_micros(20);
        loop {
            let now = self.taken.load(Ordering::Relaxed);
            let taken = if (now >> 32) as u32 == pid { now & u64::from(u32::MAX) } else { 0 };
            if taken + units <= self.most {
                let new = u64::from(pid) << 32 | (taken + units);
                if self.taken.compare_exchange_weak(now, new, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                    return Ok(TakenBytes { from: self, pid, units });
                }
                continue;
            }
            if stop.is_set() || is_abandoned() {
                return Err(interrupted());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE);
        }
    }
}

impl Drop for TakenBytes<'_> {
    fn drop(&mut self) {
        // In a child, this is a copy of the parent's share.
        let _ = self.from.taken.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
            ((now >> 32) as u32 == self.pid && self.pid == std::process::id()).then(|| now - self.units)
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::error::Kind;

    #[test]
    fn shares_never_exceed_the_whole() {
        let shared = SharedBytes::new(10 * UNIT);
        let most = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for i in 0..8u64 {
                let (shared, most) = (&shared, &most);
                scope.spawn(move || {
                    for n in 0..2_000 {
                        let _share = shared.take((i + n) % 5 * UNIT + 1, &Stop::new()).unwrap();
                        most.fetch_max(shared.taken.load(Ordering::Relaxed) & u64::from(u32::MAX), Ordering::Relaxed);
                    }
                });
            }
        });
        assert!((1..=10).contains(&most.load(Ordering::Relaxed)));
        assert_eq!(shared.taken.load(Ordering::Relaxed) & u64::from(u32::MAX), 0);
    }

    #[test]
    fn a_stop_ends_the_wait_and_a_child_begins_anew() {
        let shared = SharedBytes::new(4 * UNIT);
        let whole = shared.take(100 * UNIT, &Stop::new()).unwrap();
        let other = shared.take(2 * UNIT, &Stop::new()).unwrap();
        let (stop, waited) = (Stop::new(), AtomicBool::new(false));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(shared.take(1, &stop).unwrap_err().kind, Kind::Interrupted);
                waited.store(true, Ordering::Relaxed);
            });
            stop.set();
        });
        assert!(waited.load(Ordering::Relaxed));
        // As if another process had taken them.
        std::mem::forget((whole, other));
        shared.taken.fetch_xor(1 << 32, Ordering::Relaxed);
        drop(shared.take(2 * UNIT, &Stop::new()).unwrap());
        assert_eq!(shared.taken.load(Ordering::Relaxed) & u64::from(u32::MAX), 0);
    }
}
