//! Our own thread pool: survives being forked, watches for Ctrl-C, and never outlives a call's borrow.
//!
//! rayon's global pool is not used: a forked child inherits its bookkeeping but none of its threads, and the first
//! `install` there waits forever. This pool remembers the process it was made in; a child makes a new one. The slot
//! that holds it is only ever tried, never waited for: if a fork caught another thread inside it, the child works on
//! the calling thread instead of hanging.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Error, Kind, Result};

/// How often a waiting caller looks at its watch.
const LOOK: Duration = Duration::from_millis(20);

/// Asked now and then on the calling thread; `true` means stop.
pub type Watch<'a> = &'a mut dyn FnMut() -> bool;

/// Callers at work now, of all threads of this process.
static CALLERS: AtomicUsize = AtomicUsize::new(0);

static POOL: Mutex<Option<(u32, Arc<Pool>)>> = Mutex::new(None);

/// The threads beside the caller.
struct Pool {
    threads: ThreadPool,
    #[cfg(target_os = "linux")]
    seats: seats::Seats,
}

/// Threads used for large reads: `ACTSHARD_NUM_THREADS`, or the processors this process may use.
pub fn num_threads() -> usize {
    // Asked once: counting processors reads control group files, which costs more than a small gather.
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(count_threads)
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
    // Building the pool holds the lock for about a millisecond, once; a neighbour waits that long, not forever.
    for _ in 0..200 {
        if let Ok(mut slot) = POOL.try_lock() {
            if let Some((owner, pool)) = slot.as_ref()
                && *owner == pid
            {
                return Some(Arc::clone(pool));
            }
            // The parent's threads do not exist here; dropping its pool would signal them through locks that one of
            // them may have held.
            if let Some(parents) = slot.take() {
                std::mem::forget(parents);
            }
            #[cfg(target_os = "linux")]
            let seats = seats::Seats::new();
            let mut builder = ThreadPoolBuilder::new()
                .num_threads(num_threads().saturating_sub(1).max(1))
                .thread_name(|i| format!("actshard-{i}"));
            #[cfg(target_os = "linux")]
            {
                builder = builder.start_handler(seats.register());
            }
            let threads = builder.build().ok()?;
            let pool = Arc::new(Pool {
                threads,
                #[cfg(target_os = "linux")]
                seats,
            });
            *slot = Some((pid, Arc::clone(&pool)));
            return Some(pool);
        }
        std::thread::sleep(Duration::from_micros(100));
    }
    None
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

/// Counts a caller out, also when it unwinds.
struct Caller;

impl Drop for Caller {
    fn drop(&mut self) {
        CALLERS.fetch_sub(1, Ordering::Relaxed);
    }
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
    let others = CALLERS.fetch_add(1, Ordering::Relaxed);
    let _caller = Caller;
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
    pool.seats.keep_off_this_processor();
    pool.threads.in_place_scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|_| {
                let _leave = Leave(&running, &finished);
                while do_one() {}
            });
        }
        // The caller works too: it is awake, and a small request is done before the others are.
        let mut looked = Instant::now();
        while do_one() {
            if looked.elapsed() >= LOOK {
                if watch() {
                    interrupted = true;
                    stop.set();
                }
                looked = Instant::now();
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

/// Where our threads may run.
///
/// A thread that is woken runs where the scheduler puts it, and in a virtual machine that can be beside the one that woke
/// it while another processor idles: a halted virtual processor looks "preempted", and Linux does not take such for idle
/// (`available_idle_cpu`). Measured on two processors: a gather of 10.7 ms in place of 5.6. So before our threads are
/// woken they are told to keep off the caller's processor; nothing else about where they run is decided here.
#[cfg(target_os = "linux")]
mod seats {
    use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

    /// The threads, and the processor they were told to keep off last.
    pub struct Seats {
        threads: Arc<Mutex<Vec<AtomicI32>>>,
        off: AtomicUsize,
    }

    impl Seats {
        pub fn new() -> Seats {
            Seats { threads: Arc::default(), off: AtomicUsize::new(usize::MAX) }
        }

        /// What each thread calls when it starts.
        pub fn register(&self) -> impl Fn(usize) + Send + Sync + 'static {
            let threads = Arc::clone(&self.threads);
            move |_| {
                if let Ok(mut threads) = threads.lock() {
                    threads.push(AtomicI32::new(gettid().as_raw_nonzero().get()));
                }
            }
        }

        /// Hints only: a system that refuses leaves the threads where they are.
        pub fn keep_off_this_processor(&self) {
            let here = sched_getcpu();
            if self.off.load(Ordering::Relaxed) == here {
                return;
            }
            // What this process may use now, containers and taskset included.
            let Ok(allowed) = sched_getaffinity(None) else { return };
            let mut others: CpuSet = allowed;
            others.unset(here);
            if others.count() == 0 {
                return;
            }
            let Ok(threads) = self.threads.try_lock() else { return };
            for thread in threads.iter() {
                if let Some(tid) = Pid::from_raw(thread.load(Ordering::Relaxed)) {
                    let _ = sched_setaffinity(Some(tid), &others);
                }
            }
            self.off.store(here, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

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
