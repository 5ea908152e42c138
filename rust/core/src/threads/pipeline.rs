//! Results made ahead and in order, by threads that wait for a disk while the caller uses earlier results.

use std::collections::{BTreeMap, VecDeque};
use std::iter::Peekable;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::handout::{LOOK, Stop, Watch, interrupted};
use super::{Lock, LockGuard, Signal};
use crate::error::{Error, Kind, Result};

/// The time that one thread has for a result before others are started.
const SOON: Duration = Duration::from_micros(500);

/// Returns the next result; `None` after the last.
pub type NextResult<'a, T> = dyn FnMut(Watch<'_>) -> Result<Option<T>> + 'a;

struct Pipeline<'a, I: Iterator, T> {
    line: Lock<Line<I, T>>,
    changed: Signal,
    stop: Stop,
    depth: u64,
    weigh: &'a (dyn Fn(&I::Item) -> u64 + Sync),
    make: &'a (dyn Fn(I::Item, &Stop) -> Result<T> + Sync),
}

struct Line<I: Iterator, T> {
    jobs: Peekable<I>,
    /// Number of jobs taken by threads, and of results taken by the caller.
    taken: u64,
    used: u64,
    /// The weights of those taken and not used yet, and their sum.
    weights: VecDeque<u64>,
    ahead: u64,
    /// No job is left.
    ended: bool,
    made: BTreeMap<u64, Result<T>>,
    threads: usize,
}

/// Makes a result of each job with up to `threads` threads, and calls `using` with the function that returns them in the order of
/// the jobs. At most `depth` results exist that were not taken yet. Returns after all threads have ended; a thread that is
/// blocked in a read ends after that read. The jobs are computed by one thread at a time. One thread is started at once, the
/// others when a result is not ready within [`SOON`]: small work and data in memory need no more.
///
/// The first error in the order of jobs is returned in its turn, and nothing after it.
pub fn make_ahead<I, T, R>(
    (threads, depth): (usize, usize),
    jobs: I,
    make: &(dyn Fn(I::Item, &Stop) -> Result<T> + Sync),
    using: impl FnOnce(&mut NextResult<'_, T>) -> R,
) -> R
where
    I: Iterator<Item: Send> + Send,
    T: Send,
{
    make_weighed_ahead((threads, depth.max(threads)), jobs, &|_| 1, make, using)
}

/// [`make_ahead`] for results of different sizes: those not taken yet weigh at most `depth` together. A heavier one is made alone.
pub fn make_weighed_ahead<I, T, R>(
    (threads, depth): (usize, usize),
    jobs: I,
    weigh: &(dyn Fn(&I::Item) -> u64 + Sync),
    make: &(dyn Fn(I::Item, &Stop) -> Result<T> + Sync),
    using: impl FnOnce(&mut NextResult<'_, T>) -> R,
) -> R
where
    I: Iterator<Item: Send> + Send,
    T: Send,
{
    let (jobs, weights, made) = (jobs.peekable(), VecDeque::new(), BTreeMap::new());
    let line = Line { jobs, taken: 0, used: 0, weights, ahead: 0, ended: false, made, threads: 0 };
    let (line, changed, stop, depth) = (Lock::new(line), Signal::new(), Stop::new(), depth.max(1) as u64);
    let pipeline = Pipeline { line, changed, stop, depth, weigh, make };
    std::thread::scope(|scope| {
        let _end = End(&pipeline);
        let mut started = 0;
        let mut start = |wanted: usize| {
            while started < wanted.min(threads) {
                pipeline.lock().threads += 1;
                let work = || pipeline.work();
                let name = format!("actshard-read-{started}");
                if std::thread::Builder::new().name(name).spawn_scoped(scope, work).is_err() {
                    pipeline.lock().threads -= 1;
                    break;
                }
                started += 1;
            }
        };
        start(1);
        using(&mut |watch| pipeline.next(&mut || start(threads), watch))
    })
}

/// Ends the threads when the caller is done, also during unwinding.
struct End<'p, 'a, I: Iterator, T>(&'p Pipeline<'a, I, T>);

impl<I: Iterator, T> Drop for End<'_, '_, I, T> {
    fn drop(&mut self) {
        self.0.stop.set();
        let _line = self.0.lock();
        self.0.changed.notify_all();
    }
}

fn fault() -> Error {
    Error::new(Kind::Internal, "a bug in actshard in a reading thread; please report it")
}

impl<I: Iterator, T> Line<I, T> {
    /// A job was taken.
    fn add(&mut self, weight: u64) {
        self.taken += 1;
        self.weights.push_back(weight);
        self.ahead += weight;
    }

    /// The next result was taken.
    fn pass(&mut self) {
        self.used += 1;
        self.ahead -= self.weights.pop_front().unwrap_or(0);
    }
}

impl<I: Iterator, T> Pipeline<'_, I, T> {
    fn lock(&self) -> LockGuard<'_, Line<I, T>> {
        self.line.lock()
    }

    /// Takes a job with its number; `None` if there is none now.
    fn take(&self, line: &mut Line<I, T>) -> Option<(u64, I::Item)> {
        if line.ended || self.stop.is_set() || line.ahead >= self.depth {
            return None;
        }
        let (jobs, ahead) = (&mut line.jobs, line.ahead);
        // A job that is too heavy now stays in the list.
        let found = catch_unwind(AssertUnwindSafe(|| {
            let weight = jobs.peek().map(|job| (self.weigh)(job).clamp(1, self.depth));
            weight.map(|weight| (weight, if ahead + weight <= self.depth { jobs.next() } else { None }))
        }));
        match found {
            Ok(Some((_, None))) => None,
            Ok(Some((weight, Some(job)))) => {
                line.add(weight);
                Some((line.taken - 1, job))
            }
            Ok(None) => {
                line.ended = true;
                None
            }
            Err(_) => {
                line.made.insert(line.taken, Err(fault()));
                line.add(0);
                line.ended = true;
                None
            }
        }
    }

    fn made(&self, job: I::Item) -> Result<T> {
        catch_unwind(AssertUnwindSafe(|| (self.make)(job, &self.stop))).unwrap_or_else(|_| Err(fault()))
    }

    fn work(&self) {
        let mut line = self.lock();
        while !self.stop.is_set() && !line.ended {
            let Some((number, job)) = self.take(&mut line) else {
                if line.ended {
                    break;
                }
                line = self.changed.wait(line);
                continue;
            };
            drop(line);
            let made = self.made(job);
            line = self.lock();
            line.made.insert(number, made);
            self.changed.notify_all();
        }
        line.threads -= 1;
        self.changed.notify_all();
    }

    fn next(&self, start_all: &mut dyn FnMut(), watch: Watch<'_>) -> Result<Option<T>> {
        let mut wait = SOON;
        loop {
            let mut line = self.lock();
            let number = line.used;
            if self.stop.is_set() {
                return Ok(None);
            }
            if let Some(made) = line.made.remove(&number) {
                line.pass();
                self.stop_after(made.is_err());
                self.changed.notify_all();
                return made.map(Some);
            }
            if line.ended && number >= line.taken {
                return Ok(None);
            }
            if line.threads == 0 {
                // No thread could be created, or all have ended: this one does the work.
                let Some((_, job)) = self.take(&mut line) else { continue };
                line.pass();
                drop(line);
                let made = self.made(job);
                self.stop_after(made.is_err());
                return made.map(Some);
            }
            let (guard, timeout) = self.changed.wait_timeout(line, wait);
            drop(guard);
            if timeout {
                start_all();
                wait = LOOK;
                if watch() {
                    return Err(interrupted());
                }
            }
        }
    }

    /// Nothing is returned after an error.
    fn stop_after(&self, failed: bool) {
        if failed {
            self.stop.set();
        }
    }
}

/// Turns for threads that compute between their reads: no more compute at once than there are processors.
pub struct Turns {
    free: Lock<usize>,
    changed: Signal,
}

impl Turns {
    /// Turns for this many threads.
    pub fn new(threads: usize) -> Turns {
        Turns { free: Lock::new(threads.max(1)), changed: Signal::new() }
    }

    /// Runs `work` when it is this thread's turn.
    pub fn take<R>(&self, work: impl FnOnce() -> R) -> R {
        /// Ends the turn, also during unwinding.
        struct Taken<'a>(&'a Turns);
        impl Drop for Taken<'_> {
            fn drop(&mut self) {
                *self.0.free.lock() += 1;
                self.0.changed.notify_one();
            }
        }
        let mut free = self.free.lock();
        while *free == 0 {
            free = self.changed.wait(free);
        }
        *free -= 1;
        drop(free);
        let _turn = Taken(self);
        work()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn all<T>(next: &mut NextResult<'_, T>) -> Result<Vec<T>> {
        let mut all = vec![];
        while let Some(one) = next(&mut || false)? {
            all.push(one);
        }
        Ok(all)
    }

    #[test]
    fn results_come_in_order_and_no_more_exist_than_allowed() {
        for threads in [0, 1, 3, 16] {
            let (made, used) = (AtomicU64::new(0), AtomicU64::new(0));
            let make = |job: u64, _: &Stop| {
                std::thread::sleep(std::time::Duration::from_micros(job * 7 % 50));
                let ahead = made.fetch_add(1, Ordering::SeqCst) + 1 - used.load(Ordering::SeqCst);
                assert!(ahead <= 18, "{ahead}");
                Ok(job)
            };
            let found = make_ahead((threads, 16), 0..500u64, &make, |next| {
                let mut all = vec![];
                while let Some(one) = next(&mut || false)? {
                    used.fetch_add(1, Ordering::SeqCst);
                    all.push(one);
                }
                Ok::<_, Error>(all)
            });
            assert_eq!(found.unwrap(), (0..500).collect::<Vec<_>>());
        }
    }

    #[test]
    fn results_not_taken_yet_weigh_no_more_than_allowed() {
        for threads in [0, 1, 4] {
            let weigh = |job: &u64| if job % 7 == 3 { 100 } else { 1 + job % 4 };
            let (ahead, order) = (AtomicU64::new(0), AtomicU64::new(0));
            let make = |job: u64, _: &Stop| {
                let now = ahead.fetch_add(weigh(&job).min(8), Ordering::SeqCst) + weigh(&job).min(8);
                // The caller reports a result after it was taken: one more of each weight may have begun meanwhile.
                assert!(now <= 16, "{now}");
                Ok(job)
            };
            make_weighed_ahead((threads, 8), 0..300u64, &weigh, &make, |next| {
                while let Some(job) = next(&mut || false).unwrap() {
                    assert_eq!(job, order.fetch_add(1, Ordering::SeqCst));
                    ahead.fetch_sub(weigh(&job).min(8), Ordering::SeqCst);
                }
            });
            assert_eq!(order.into_inner(), 300);
        }
    }

    #[test]
    fn the_first_error_comes_in_its_turn_and_ends_it() {
        for threads in [0, 4] {
            let make = |job: u64, _: &Stop| match job {
                7 => Err(Error::new(Kind::Format, "7")),
                8 => panic!("a later job"),
                job => Ok(job),
            };
            make_ahead((threads, 8), 0..100u64, &make, |next| {
                for expected in 0..7 {
                    assert_eq!(next(&mut || false).unwrap(), Some(expected));
                }
                assert_eq!(next(&mut || false).unwrap_err().detail, "7");
                assert_eq!(next(&mut || false).unwrap(), None);
            });
            let jobs = (0..100u64).inspect(|job| assert!(*job < 3, "in the list of jobs"));
            let found = make_ahead((threads, 8), jobs, &|job, _| Ok(job), |next| all(next));
            assert_eq!(found.unwrap_err().kind, Kind::Internal);
            let panics = |_: u64, _: &Stop| -> Result<u64> { panic!("in a job") };
            assert_eq!(
                make_ahead((threads, 8), 0..100u64, &panics, |next| all(next)).unwrap_err().kind,
                Kind::Internal
            );
        }
    }

    #[test]
    fn no_more_threads_compute_than_have_a_turn() {
        let (turns, now) = (Turns::new(3), AtomicU64::new(0));
        let make = |job: u64, _: &Stop| {
            turns.take(|| {
                assert!(now.fetch_add(1, Ordering::SeqCst) < 3);
                std::thread::sleep(std::time::Duration::from_micros(100));
                now.fetch_sub(1, Ordering::SeqCst);
                if job == 50 { Err(Error::new(Kind::Format, "50")) } else { Ok(job) }
            })
        };
        assert_eq!(make_ahead((8, 8), 0..200, &make, |next| all(next)).unwrap_err().detail, "50");
    }

    #[test]
    fn a_caller_that_leaves_or_is_interrupted_ends_the_threads() {
        let make = |_: u64, stop: &Stop| {
            while !stop.is_set() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            Ok(())
        };
        let ended = make_ahead((4, 4), 0..u64::MAX, &make, |next| next(&mut || true));
        assert_eq!(ended.unwrap_err().kind, Kind::Interrupted);
        let endless = |job: u64, _: &Stop| Ok(job);
        assert_eq!(make_ahead((4, 4), 0..u64::MAX, &endless, |next| next(&mut || false)).unwrap(), Some(0));
    }
}
