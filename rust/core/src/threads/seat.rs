//! Processor placement for a pool of one thread.
//!
//! In a virtual machine with two processors, the scheduler may wake a thread on its waker's processor while the other one
//! idles: a halted virtual processor looks "preempted", and Linux does not treat it as idle (`available_idle_cpu`). So the
//! caller excludes its own processor from the thread's affinity mask before it wakes the thread. The thread restores its
//! mask first, so that no mask outlives the wake, whatever the user pins later. With more processors the scheduler finds
//! an idle one, and this module does nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The thread of a pool of one; 0 before it has started.
#[derive(Debug, Default)]
pub struct Seat {
    thread: Arc<AtomicI32>,
}

impl Seat {
    /// Called by each thread when it starts.
    pub fn register(&self) -> impl Fn(usize) + Send + Sync + 'static {
        let thread = Arc::clone(&self.thread);
        move |_| thread.store(gettid().as_raw_nonzero().get(), Ordering::Relaxed)
    }

    /// Excludes the caller's processor from the thread's mask; returns the previous mask. A hint: if the system refuses, the
    /// thread stays where it is. Only one caller at a time may do this, or one would read the other's temporary mask as
    /// the thread's own.
    pub fn keep_off_this_processor(&self, threads: usize) -> Option<CpuSet> {
        if threads != 2 {
            return None;
        }
        let thread = Pid::from_raw(self.thread.load(Ordering::Relaxed))?;
        let before = sched_getaffinity(Some(thread)).ok()?;
        let mut others = before;
        others.unset(sched_getcpu());
        if others.count() == 0 || others.count() == before.count() {
            return None;
        }
        sched_setaffinity(Some(thread), &others).ok()?;
        Some(before)
    }
}

/// Restores the calling thread's mask.
pub fn give_back(before: &CpuSet) {
    let _ = sched_setaffinity(None, before);
}
