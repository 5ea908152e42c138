//! Our own thread pool: survives being forked, watches for Ctrl-C, and never outlives a call's borrow.
//!
//! rayon's global pool is not used: a forked child inherits its bookkeeping but none of its threads, and the first
//! `install` there waits forever. This pool remembers the process it was made in; a child makes a new one. So does the
//! count of callers: those of the parent do not exist in a child. The slot that holds the pool is only ever tried, never
//! waited for, and locked for as long as a pointer takes to copy: if a fork caught another thread inside it, the child
//! works on the calling thread instead of hanging.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Kind, Result};

/// How often a waiting caller looks at its watch.
const LOOK: Duration = Duration::from_millis(20);

/// Asked now and then on the calling thread; `true` means stop.
pub type Watch<'a> = &'a mut dyn FnMut() -> bool;

/// Callers at work now, of all threads of this process: the process id in the upper half, their number in the lower. A
/// forked child inherits the parent's number but not its threads, so a number under another id is zero.
static CALLERS: AtomicU64 = AtomicU64::new(0);

/// The process that made a pool, and the pool.
type Owned = Option<(u32, Arc<Pool>)>;

static POOL: Mutex<Owned> = Mutex::new(None);

/// The threads beside the caller.
struct Pool {
    threads: ThreadPool,
    #[cfg(target_os = "linux")]
    seat: seat::Seat,
}

/// Threads used for large reads: `ACTSHARD_NUM_THREADS`, or the processors this process may use.
pub fn num_threads() -> usize {
    // Asked once: counting processors reads control group files, which costs more than a small gather. Not a OnceLock: a
    // child that was forked while another thread counted would wait for that thread. Counting twice gives the same.
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    match COUNT.load(Ordering::Relaxed) {
        0 => {
            let count = count_threads();
            COUNT.store(count, Ordering::Relaxed);
            count
        }
        count => count,
    }
}

fn count_threads() -> usize {
    std::env::var("ACTSHARD_NUM_THREADS")
        .ok()
        .and_then(|n| n.parse().ok())
        .filter(|n| *n > 0)
        .or_else(|| std::thread::available_parallelism().ok().map(usize::from))
        .unwrap_or(1)
        .min(256)
}

/// The pool of this process, or `None` where none can be had.
fn current() -> Option<Arc<Pool>> {
    let pid = std::process::id();
    let mine = |slot: &MutexGuard<'_, Owned>| {
        slot.as_ref().filter(|(owner, _)| *owner == pid).map(|(_, pool)| Arc::clone(pool))
    };
    if let Some(pool) = mine(&try_slot()?) {
        return Some(pool);
    }
    // Built without the lock, which takes about a millisecond: two threads may both build one, the second is dropped.
    let made = Arc::new(build()?);
    let mut slot = try_slot()?;
    if let Some(first) = mine(&slot) {
        return Some(first);
    }
    // The parent's threads do not exist here; dropping its pool would signal them through locks that one of them may have
    // held.
    if let Some(parents) = slot.replace((pid, Arc::clone(&made))) {
        std::mem::forget(parents);
    }
    Some(made)
}

/// The lock, if it can be had at once or after another thread copied a pointer.
fn try_slot() -> Option<MutexGuard<'static, Owned>> {
    for _ in 0..200 {
        match POOL.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
    None
}

fn build() -> Option<Pool> {
    let mut builder = ThreadPoolBuilder::new()
        .num_threads(num_threads().saturating_sub(1).max(1))
        .thread_name(|i| format!("actshard-{i}"));
    #[cfg(target_os = "linux")]
    let seat = seat::Seat::default();
    #[cfg(target_os = "linux")]
    {
        builder = builder.start_handler(seat.register());
    }
    let threads = builder.build().ok()?;
    Some(Pool {
        threads,
        #[cfg(target_os = "linux")]
        seat,
    })
}

/// Runs `work` on one of our threads and waits: for libraries that use "the current" rayon pool, which must be ours. Where
/// none can be had, on this thread.
pub fn inside<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    match current() {
        Some(pool) => pool.threads.install(work),
        None => work(),
    }
}

/// What a part of the work sees of the rest: whether to go on.
#[derive(Debug, Default)]
pub struct Stop(AtomicBool);

impl Stop {
    /// Whether the work was called off: another part failed or the caller's watch said so.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

thread_local! {
    /// This thread is doing a part: what it starts in there is done by itself, for the others may all be in the same place
    /// and wait for each other.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// A caller at work; counted out when dropped, also while unwinding.
struct Caller {
    pid: u32,
}

impl Caller {
    /// Counts a caller in: also returns how many others there are.
    fn enter() -> (Caller, usize) {
        let pid = std::process::id();
        let enter = |now| Some(u64::from(pid) << 32 | (callers_of(now, pid) + 1));
        let before = CALLERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enter).unwrap_or(0);
        (Caller { pid }, callers_of(before, pid) as usize)
    }
}

fn callers_of(now: u64, pid: u32) -> u64 {
    if now >> 32 == u64::from(pid) { now & u64::from(u32::MAX) } else { 0 }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // A caller that forked inside its work is dropped in the child as well, where it was never counted.
        let leave = |now| (callers_of(now, self.pid) > 0).then(|| now - 1);
        let _ = CALLERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, leave);
    }
}

/// Whether this thread is doing a part of some work: waiting for another thread there could wait for ever.
pub fn in_part() -> bool {
    BUSY.get()
}

/// Whether work started here would be shared with other threads.
pub fn are_free() -> bool {
    num_threads() > 1 && !BUSY.get()
}

/// Runs `work(0)`, `work(1)`, ... `work(parts - 1)`, each once, on this thread and the pool's, and waits for them. The error
/// of the lowest failing part is returned, so that what a user reads does not depend on timing. Inside a part, on this thread
/// alone.
pub fn run(parts: usize, work: &(dyn Fn(usize, &Stop) -> Result<()> + Sync), watch: Watch<'_>) -> Result<()> {
    let stop = Stop::default();
    let (_caller, others) = Caller::enter();
    // Each caller works itself: where there are as many as processors, waking more threads would only cost.
    let workers = num_threads().saturating_sub(1 + others).min(parts.saturating_sub(1));
    let pool = if workers > 0 && !BUSY.get() { current() } else { None };
    let Some(pool) = pool else {
        for part in 0..parts {
            // A single part is a small request: looking at the watch would cost more than the work.
            if part > 0 && watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            work(part, &stop)?;
        }
        return Ok(());
    };

    let next = AtomicUsize::new(0);
    let failed: Mutex<Option<(usize, Error)>> = Mutex::new(None);
    let running = Mutex::new(workers);
    let finished = Condvar::new();
    /// Counts a worker out, also when it unwinds.
    struct Leave<'a>(&'a Mutex<usize>, &'a Condvar);
    impl Drop for Leave<'_> {
        fn drop(&mut self) {
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
            self.1.notify_all();
        }
    }

    /// Marks this thread, also while it unwinds.
    struct Busy;
    impl Busy {
        fn begin() -> Busy {
            BUSY.set(true);
            Busy
        }
    }
    impl Drop for Busy {
        fn drop(&mut self) {
            BUSY.set(false);
        }
    }

    // Takes the next part and does it; false when there is none left.
    let do_one = || {
        let part = if stop.is_set() { parts } else { next.fetch_add(1, Ordering::Relaxed) };
        if part >= parts {
            return false;
        }
        let busy = Busy::begin();
        let done = work(part, &stop);
        drop(busy);
        if let Err(error) = done {
            let mut first = failed.lock().unwrap_or_else(PoisonError::into_inner);
            if first.as_ref().is_none_or(|(p, _)| part < *p) {
                *first = Some((part, error));
            }
            stop.set();
        }
        true
    };

    let mut interrupted = false;
    #[cfg(target_os = "linux")]
    let kept_off = if others == 0 { pool.seat.keep_off_this_processor() } else { None };
    pool.threads.in_place_scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|_| {
                #[cfg(target_os = "linux")]
                if let Some(before) = &kept_off {
                    seat::give_back(before);
                }
                let _leave = Leave(&running, &finished);
                while do_one() {}
            });
        }
        // The caller works too: it is awake, and a small request is done before the others are.
        while do_one() {
            if !interrupted && watch() {
                interrupted = true;
                stop.set();
            }
        }
        let mut left = running.lock().unwrap_or_else(PoisonError::into_inner);
        while *left > 0 {
            let (guard, timeout) = finished.wait_timeout(left, LOOK).unwrap_or_else(PoisonError::into_inner);
            left = guard;
            if timeout.timed_out() && !interrupted {
                drop(left);
                if watch() {
                    interrupted = true;
                    stop.set();
                }
                left = running.lock().unwrap_or_else(PoisonError::into_inner);
            }
        }
    });
    if interrupted {
        return Err(Error::new(Kind::Interrupted, "interrupted"));
    }
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

/// Where the one thread of a pool of one wakes up.
///
/// A thread that is woken runs where the scheduler puts it, and in a virtual machine of two processors that can be beside the
/// one that woke it while the other idles: a halted virtual processor looks "preempted", and Linux does not take such for idle
/// (`available_idle_cpu`). So the thread is told to keep off the caller's processor before it is woken, and gives itself its
/// own mask back as the first thing it does: no mask outlives the wake, whatever the user pins later. Where there are
/// more processors the scheduler finds an idle one, and nothing is done.
#[cfg(target_os = "linux")]
mod seat {
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
        pub fn keep_off_this_processor(&self) -> Option<CpuSet> {
            if super::num_threads() != 2 {
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
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn callers_of_another_process_are_not_counted() {
        let here = u64::from(std::process::id());
        assert_eq!(callers_of((here + 1) << 32 | 7, here as u32), 0);
        assert_eq!(callers_of(here << 32 | 7, here as u32), 7);
    }

    #[test]
    fn every_part_runs_once() {
        let seen: Vec<AtomicUsize> = (0..1000).map(|_| AtomicUsize::new(0)).collect();
        run(
            1000,
            &|i, _| {
                seen[i].fetch_add(1, Ordering::Relaxed);
                Ok(())
            },
            &mut || false,
        )
        .unwrap();
        assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
    }

    #[test]
    fn the_lowest_error_is_told() {
        let error =
            run(64, &|i, _| if i >= 5 { Err(Error::new(Kind::Format, format!("{i}"))) } else { Ok(()) }, &mut || false);
        // Later parts may or may not have started, part 5 always has by the time any later one failed.
        assert_eq!(error.unwrap_err().detail, "5");
    }

    #[test]
    fn parts_may_start_parts() {
        let seen = AtomicUsize::new(0);
        let inner = |_: usize, _: &Stop| {
            seen.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        run(16, &|_, _| run(16, &inner, &mut || false), &mut || false).unwrap();
        assert_eq!(seen.load(Ordering::Relaxed), 256);
    }

    #[test]
    fn a_watch_stops_work() {
        // Nobody could finish this before the watch says stop.
        let slow = |_: usize, stop: &Stop| {
            for _ in 0..10 {
                if !stop.is_set() {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            Ok(())
        };
        let mut looks = 0;
        let error = run(100_000, &slow, &mut || {
            looks += 1;
            looks == 2
        });
        assert_eq!(error.unwrap_err().kind, Kind::Interrupted);
    }
}
