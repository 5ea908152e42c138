//! The pool of computing threads: works after a fork, stops on Ctrl-C, and never outlives a call's borrow.
//!
//! rayon's global pool does not survive a fork: the child inherits its bookkeeping but none of its threads, and the first
//! `install` waits forever. This pool stores the id of the process that created it; a child creates a new one. The count
//! of callers does the same. The slot with the pool is one pointer, replaced atomically: there is no lock that a thread
//! could hold while another one forks, so a child always gets all its threads.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_utils::atomic::AtomicCell;
use rayon::{ThreadPool, ThreadPoolBuilder};

use super::handout::{Handout, Stop, Watch, interrupted};
#[cfg(target_os = "linux")]
use super::seat;
use crate::error::Result;

/// Callers at work in all threads of this process: the process id in the upper half, their number in the lower. A forked
/// child inherits the parent's number but not its threads, so a number under another id counts as zero.
static CALLERS: AtomicU64 = AtomicU64::new(0);

/// A process's pool. Never freed: a child must not drop its parent's pool, whose threads do not exist there.
#[derive(Debug)]
struct Owned {
    pid: u32,
    /// Built by the first caller, while others wait; `None` if that failed. Only threads of the process `pid` wait for it,
    /// so the builder exists.
    pool: OnceLock<Option<Pool>>,
}

/// The pool of this process, or of one that it was forked from. Compared by address.
#[derive(Clone, Copy, Debug)]
struct Slot(Option<&'static Owned>);

impl PartialEq for Slot {
    fn eq(&self, other: &Slot) -> bool {
        match (self.0, other.0) {
            (Some(a), Some(b)) => std::ptr::eq(a, b),
            (a, b) => a.is_none() && b.is_none(),
        }
    }
}

impl Eq for Slot {}

static POOL: AtomicCell<Slot> = AtomicCell::new(Slot(None));
const _: () = assert!(AtomicCell::<Slot>::is_lock_free(), "a lock could be held while another thread forks");

/// The threads besides the caller.
#[derive(Debug)]
struct Pool {
    threads: ThreadPool,
    #[cfg(target_os = "linux")]
    seat: seat::Seat,
}

/// Threads used for large reads: `ACTSHARD_NUM_THREADS`, or the number of processors available to this process.
pub fn num_threads() -> usize {
    // Counted once: it reads control group files, which costs more than a small gather. Not a OnceLock: a child forked
    // while another thread counts would wait for that thread. Counting twice gives the same number.
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

/// The pool of this process, or `None` if it cannot be built.
fn current() -> Option<&'static Pool> {
    owned(&POOL, std::process::id()).pool.get_or_init(build).as_ref()
}

/// The pool of the process `pid`; another process's is replaced.
fn owned(slot: &AtomicCell<Slot>, pid: u32) -> &'static Owned {
    let mut now = slot.load();
    loop {
        if let Some(owned) = now.0.filter(|owned| owned.pid == pid) {
            return owned;
        }
        let new: &'static Owned = Box::leak(Box::new(Owned { pid, pool: OnceLock::new() }));
        match slot.compare_exchange(now, Slot(Some(new))) {
            Ok(_) => return new,
            Err(other) => now = other, // another thread was faster; `new`, still without threads, is a few bytes
        }
    }
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

thread_local! {
    /// Set while this thread does a part. Nested work then runs on this thread alone: the pool's threads may all be nested
    /// in the same way and would wait for each other.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// A registered caller; deregistered on drop, also during unwinding.
struct Caller {
    pid: u32,
}

impl Caller {
    fn enter() -> Caller {
        let pid = std::process::id();
        let enter = |now| Some(u64::from(pid) << 32 | (callers_of(now, pid) + 1));
        let _ = CALLERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, enter);
        Caller { pid }
    }

    /// The number of other callers now.
    fn others(&self) -> usize {
        callers_of(CALLERS.load(Ordering::Relaxed), self.pid).saturating_sub(1) as usize
    }
}

fn callers_of(now: u64, pid: u32) -> u64 {
    if now >> 32 == u64::from(pid) { now & u64::from(u32::MAX) } else { 0 }
}

impl Drop for Caller {
    fn drop(&mut self) {
        // A caller that forked inside its work is dropped in the child as well, where it was never registered.
        let leave = |now| (callers_of(now, self.pid) > 0).then(|| now - 1);
        let _ = CALLERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, leave);
    }
}

/// Whether this thread is doing a part of some work. Waiting for another thread there could deadlock.
pub fn in_part() -> bool {
    BUSY.get()
}

/// Whether work started here would use other threads.
pub fn are_free() -> bool {
    num_threads() > 1 && !BUSY.get()
}

/// Marks this thread as busy until dropped, also during unwinding.
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

/// Runs `work(0)` to `work(parts - 1)`, each once, on this thread and the pool's, and waits for them. Returns the error of
/// the lowest failing part, so that the reported error does not depend on timing. Inside a part it uses this thread only.
pub fn run(parts: usize, work: &(dyn Fn(usize, &Stop) -> Result<()> + Sync), watch: Watch<'_>) -> Result<()> {
    let caller = Caller::enter();
    let pool = if parts > 1 && are_free() { current() } else { None };
    let Some(pool) = pool else {
        let stop = Stop::new();
        for part in 0..parts {
            // A single part is a small request: calling the watch would cost more than the work.
            if part > 0 && watch() {
                return Err(interrupted());
            }
            work(part, &stop)?;
        }
        return Ok(());
    };

    let marked = |part: usize, stop: &Stop| {
        let _busy = Busy::begin();
        work(part, stop)
    };
    let handout = Handout::new(parts, &marked);
    pool.threads.in_place_scope(|scope| {
        let (handout, mut workers) = (&handout, 0);
        loop {
            // Each caller works itself: with as many callers as processors, more threads would only cost. Others may leave before
            // this one, so they are counted before each part.
            let others = caller.others();
            let most = num_threads().saturating_sub(1 + others).min(handout.left().saturating_sub(1));
            // A watch may have forked: the child has no threads.
            while workers < most && caller.pid == std::process::id() {
                workers += 1;
                let leave = handout.enter();
                #[cfg(target_os = "linux")]
                let kept_off = if others == 0 { pool.seat.keep_off_this_processor(num_threads()) } else { None };
                scope.spawn(move |_| {
                    #[cfg(target_os = "linux")]
                    if let Some(before) = &kept_off {
                        seat::give_back(before);
                    }
                    let _leave = leave;
                    while handout.do_one() {}
                });
            }
            // The caller works too: it is awake, and finishes a small request before the others start.
            if !handout.do_one() {
                break;
            }
            handout.look(&mut *watch);
        }
        handout.wait(watch);
    });
    handout.result()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::collections::HashSet;
    use std::time::Duration;

    use super::*;
    use crate::error::{Error, Kind};
    use crate::threads::Lock;

    #[test]
    fn callers_of_another_process_are_not_counted() {
        let here = u64::from(std::process::id());
        assert_eq!(callers_of((here + 1) << 32 | 7, here as u32), 0);
        assert_eq!(callers_of(here << 32 | 7, here as u32), 7);
    }

    /// Simulates a fork while another thread builds the pool: its `OnceLock` is never finished.
    #[test]
    fn a_pool_that_was_being_built_at_a_fork_is_replaced() {
        let slot = AtomicCell::new(Slot(None));
        let parents = owned(&slot, 1);
        let (building, is_building) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            parents.pool.get_or_init(|| {
                building.send(()).unwrap();
                loop {
                    std::thread::park();
                }
            })
        });
        is_building.recv().unwrap();
        let child = owned(&slot, 2);
        assert!(!std::ptr::eq(parents, child));
        assert!(child.pool.get_or_init(build).is_some());
        assert!(std::ptr::eq(child, owned(&slot, 2)));
    }

    #[test]
    fn threads_of_a_process_share_one_pool() {
        let slot = AtomicCell::new(Slot(None));
        let found: Vec<usize> = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..8).map(|_| scope.spawn(|| std::ptr::from_ref(owned(&slot, 1)) as usize)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(found.iter().all(|at| *at == found[0]));
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

    /// The other caller of a long work is often a short one, such as a sum of the rows that are then written.
    #[test]
    fn other_threads_join_when_a_caller_leaves() {
        let other = Lock::new(Some(Caller::enter()));
        let threads = Lock::new(HashSet::new());
        let work = |i: usize, _: &Stop| {
            let mut threads = threads.lock();
            threads.insert(std::thread::current().id());
            let wait = threads.len() < 2.min(num_threads());
            drop(threads);
            if i == 3 {
                *other.lock() = None;
            }
            // Until then, at most: other tests are callers too.
            std::thread::sleep(Duration::from_millis(u64::from(wait)));
            Ok(())
        };
        run(60_000, &work, &mut || false).unwrap();
        assert_eq!(threads.into_inner().len().min(2), 2.min(num_threads()));
    }

    #[test]
    fn the_lowest_error_is_told() {
        let error =
            run(64, &|i, _| if i >= 5 { Err(Error::new(Kind::Format, format!("{i}"))) } else { Ok(()) }, &mut || false);
        // Later parts may or may not have started; part 5 has started by the time any later one failed.
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
        // Too much work to finish before the watch returns true.
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
