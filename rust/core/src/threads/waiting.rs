//! Threads that wait for a disk or a network, separate from the pool, whose threads compute.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::handout::{Handout, Stop, Watch};
use crate::error::Result;

thread_local! {
    /// On threads of [`run_waiting`]: set once its caller's watch returned true.
    static ABANDONED: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Whether the caller no longer waits for this thread's work. Stores that wait for a network check it in addition to
/// their [`Stop`]: work that takes a moment at near files, and so receives no stop, may be done at far ones.
pub fn is_abandoned() -> bool {
    ABANDONED.with_borrow(|flag| flag.as_ref().is_some_and(|flag| flag.load(Ordering::Relaxed)))
}

/// Runs `work(0)` to `work(jobs - 1)`, each once, at most `at_once` at a time, on threads that may block, and waits for
/// them. Returns the error of the lowest failing job. Even a single job gets its own thread, so that the caller can call
/// its watch.
pub fn run_waiting(
    jobs: usize,
    at_once: usize,
    work: &(dyn Fn(usize, &Stop) -> Result<()> + Sync),
    watch: Watch<'_>,
) -> Result<()> {
    if jobs == 0 {
        return Ok(());
    }
    let handout = Handout::new(jobs, work);
    let abandoned = Arc::new(AtomicBool::new(false));
    let mut watch = || {
        let ends = watch() || is_abandoned();
        abandoned.fetch_or(ends, Ordering::Relaxed);
        ends
    };
    std::thread::scope(|scope| {
        for i in 0..at_once.clamp(1, jobs) {
            let (leave, handout, abandoned) = (handout.enter(), &handout, Arc::clone(&abandoned));
            let made = std::thread::Builder::new().name(format!("actshard-wait-{i}")).spawn_scoped(scope, move || {
                let _leave = leave;
                ABANDONED.set(Some(abandoned));
                while handout.do_one() {}
            });
            if made.is_err() {
                break; // the failed spawn dropped the closure and with it `leave`
            }
        }
        if handout.is_alone() {
            while handout.do_one() {} // no thread could be created, or all is done
        }
        handout.wait(&mut watch);
    });
    handout.result()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::error::{Carried, Error, Kind};

    #[test]
    fn work_below_work_learns_that_nobody_waits() {
        assert!(!is_abandoned());
        let mut looks = 0;
        let mut watch = || {
            looks += 1;
            looks > 2
        };
        let below = |_: usize, _: &Stop| {
            while !is_abandoned() {
                std::thread::yield_now();
            }
            Err(Error::new(Kind::Interrupted, "ended"))
        };
        let work = |_: usize, _: &Stop| run_waiting(2, 2, &below, &mut || false);
        assert_eq!(run_waiting(1, 1, &work, &mut watch).unwrap_err().kind, Kind::Interrupted);
        assert!(!is_abandoned());
    }

    #[test]
    fn the_lowest_failing_job_is_told_and_others_stop() {
        let done = AtomicUsize::new(0);
        let work = |i: usize, _: &Stop| {
            done.fetch_add(1, Ordering::Relaxed);
            if i >= 3 { Err(Error::new(Kind::Format, format!("{i}"))) } else { Ok(()) }
        };
        assert_eq!(run_waiting(10_000, 4, &work, &mut || false).unwrap_err().detail, "3");
        assert!(done.load(Ordering::Relaxed) < 10_000);
    }

    #[test]
    fn a_part_that_another_one_stopped_is_not_the_reported_error() {
        let work = |part: usize, stop: &Stop| {
            if part == 1 {
                return Err(Error::new(Kind::NotFound, "gone"));
            }
            while !stop.is_set() {
                std::thread::yield_now();
            }
            Err(Error::new(Kind::Interrupted, "interrupted"))
        };
        for _ in 0..20 {
            assert_eq!(run_waiting(2, 2, &work, &mut || false).unwrap_err().kind, Kind::NotFound);
        }
    }

    #[test]
    fn an_exception_of_a_callback_is_as_much_an_error_as_any_other() {
        let both = std::sync::Barrier::new(2);
        for raising in 0..2 {
            let work = |part: usize, _: &Stop| {
                both.wait();
                let mut error =
                    Error::new(if part == raising { Kind::Interrupted } else { Kind::Format }, format!("{part}"));
                error.carried = (part == raising).then(|| Carried(Arc::new("KeyboardInterrupt")));
                Err(error)
            };
            for _ in 0..20 {
                assert_eq!(run_waiting(2, 2, &work, &mut || false).unwrap_err().detail, "0", "the lowest part");
            }
        }
    }
}
