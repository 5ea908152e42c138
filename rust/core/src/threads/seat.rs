//! Where the one thread of a pool of one wakes up.
//!
//! A thread that is woken runs where the scheduler puts it, and in a virtual machine of two processors that can be beside the
//! one that woke it while the other idles: a halted virtual processor looks "preempted", and Linux does not take such for idle
//! (`available_idle_cpu`). So the thread is told to keep off the caller's processor before it is woken, and gives itself its
//! own mask back as the first thing it does: no mask outlives the wake, whatever the user pins later. Where there are
//! more processors the scheduler finds an idle one, and nothing is done.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// The thread of a pool of one; 0 before it has started.
#[derive(Default)]
pub struct Seat {
    thread: Arc<AtomicI32>,
}

impl Seat {
    /// Called by each thread when it starts.
    pub fn register(&self) -> impl Fn(usize) + Send + Sync + 'static {
        let thread = Arc::clone(&self.thread);
        move |_| thread.store(gettid().as_raw_nonzero().get(), Ordering::Relaxed)
    }

    /// Keeps the thread off the caller's processor; returns the mask that it had. A hint: a system that refuses leaves
    /// the thread where it is. Only one caller at a time may do this, or one would take the other's mask for the
    /// thread's own.
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

/// Gives the calling thread its mask back.
pub fn give_back(before: &CpuSet) {
    let _ = sched_setaffinity(None, before);
}
