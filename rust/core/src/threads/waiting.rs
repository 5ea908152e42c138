//! Threads that wait for a disk or a network, separate from the pool, whose threads compute.

use super::handout::{Handout, Stop, Watch};
use crate::error::Result;

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
    std::thread::scope(|scope| {
        for i in 0..at_once.clamp(1, jobs) {
            let (leave, handout) = (handout.enter(), &handout);
            let made = std::thread::Builder::new().name(format!("actshard-wait-{i}")).spawn_scoped(scope, move || {
                let _leave = leave;
                while handout.do_one() {}
            });
            if made.is_err() {
                break; // the failed spawn dropped the closure and with it `leave`
            }
        }
        if handout.is_alone() {
            while handout.do_one() {} // no thread could be created, or all is done
        }
        handout.wait(watch);
    });
    handout.result()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::error::{Error, Kind};

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
}
