//! Parts of one piece of work, handed out to threads in order. [`pool`](super::pool) and [`waiting`](super::waiting)
//! provide the threads.

use std::time::Duration;

use super::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use super::sync::{Lock, Signal};
use crate::error::{Error, Kind, Result};

/// Interval at which a waiting caller calls its watch.
pub const LOOK: Duration = Duration::from_millis(20);

/// Called regularly on the calling thread; `true` means stop.
pub type Watch<'a> = &'a mut dyn FnMut() -> bool;

/// The error of work that its watch stopped.
pub fn interrupted() -> Error {
    Error::new(Kind::Interrupted, "interrupted")
}

/// A flag that stops the parts of a piece of work.
#[derive(Debug)]
pub struct Stop(AtomicBool);

impl Stop {
    /// For who will set it. Work that another one may stop is given that one's.
    #[expect(clippy::new_without_default, reason = "a default would be one that no caller sets")]
    pub fn new() -> Stop {
        Stop(AtomicBool::new(false))
    }

    /// A stop that is never set: for work of a moment. clippy.toml demands a reason, because Ctrl-C waits for that work.
    #[cfg(not(actshard_loom))]
    pub fn never() -> &'static Stop {
        static NEVER: Stop = Stop(AtomicBool::new(false));
        &NEVER
    }

    #[cfg(actshard_loom)]
    pub fn never() -> &'static Stop {
        Box::leak(Box::new(Stop::new()))
    }

    /// Whether the work was stopped: another part failed or the caller's watch returned true.
    #[inline]
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Fails if the work was stopped.
    pub fn check(&self) -> Result<()> {
        if self.is_set() { Err(interrupted()) } else { Ok(()) }
    }

    /// Stops the work.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Who may stop a piece of work, as one argument: a part's [`Stop`] on any thread, or the caller's watch on the calling one.
pub struct Context<'a> {
    stop: &'a Stop,
    watch: Option<Watch<'a>>,
}

impl<'a> Context<'a> {
    /// Of work on another thread, or of a part.
    pub fn of_part(stop: &'a Stop) -> Context<'a> {
        Context { stop, watch: None }
    }

    /// Of work on the calling thread, which calls its watch between two reads of a moment.
    #[expect(clippy::disallowed_methods, reason = "the watch is called instead")]
    pub fn of_caller(watch: Watch<'a>) -> Context<'a> {
        Context { stop: Stop::never(), watch: Some(watch) }
    }

    /// For reads.
    pub fn stop(&self) -> &'a Stop {
        self.stop
    }

    /// Whether the work is to end.
    pub fn is_over(&mut self) -> bool {
        self.stop.is_set() || self.watch.as_mut().is_some_and(|watch| watch())
    }

    /// Fails if the work is to end.
    pub fn check(&mut self) -> Result<()> {
        if self.is_over() { Err(interrupted()) } else { Ok(()) }
    }
}

/// The function called for each part.
pub type Work<'a> = dyn Fn(usize, &Stop) -> Result<()> + Sync + 'a;

/// Parts `0` to `parts - 1`, each given to one thread.
pub struct Handout<'a> {
    parts: usize,
    work: &'a Work<'a>,
    next: AtomicUsize,
    stop: Stop,
    interrupted: AtomicBool,
    failed: Lock<Option<(usize, Error)>>,
    /// Threads at work, without the caller.
    running: Lock<usize>,
    finished: Signal,
}

/// A registered thread; deregistered on drop, also during unwinding.
pub struct Leave<'a>(&'a Lock<usize>, &'a Signal);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
        self.1.notify_all();
    }
}

impl<'a> Handout<'a> {
    pub fn new(parts: usize, work: &'a Work<'a>) -> Handout<'a> {
        Handout {
            parts,
            work,
            next: AtomicUsize::new(0),
            stop: Stop::new(),
            interrupted: AtomicBool::new(false),
            failed: Lock::new(None),
            running: Lock::new(0),
            finished: Signal::new(),
        }
    }

    /// Registers a thread, before it starts.
    pub fn enter(&self) -> Leave<'_> {
        *self.running.lock() += 1;
        Leave(&self.running, &self.finished)
    }

    /// Whether only the caller is at work.
    pub fn is_alone(&self) -> bool {
        *self.running.lock() == 0
    }

    /// Parts that no thread has taken.
    pub fn left(&self) -> usize {
        self.parts.saturating_sub(self.next.load(Ordering::Relaxed))
    }

    /// Takes the next part and does it; false if none is left.
    pub fn do_one(&self) -> bool {
        let part = if self.stop.is_set() { self.parts } else { self.next.fetch_add(1, Ordering::Relaxed) };
        if part >= self.parts {
            return false;
        }
        if let Err(error) = (self.work)(part, &self.stop) {
            let mut first = self.failed.lock();
            // A part that was stopped because another one failed is not the cause, however low its number. An exception that a
            // callback raised, KeyboardInterrupt too, is one.
            let rank = |part: usize, error: &Error| (error.kind == Kind::Interrupted && error.carried.is_none(), part);
            if first.as_ref().is_none_or(|(p, e)| rank(part, &error) < rank(*p, e)) {
                *first = Some((part, error));
            }
            self.stop.set();
        }
        true
    }

    /// Calls the caller's watch, unless it requested a stop already.
    pub fn look(&self, watch: Watch<'_>) {
        if !self.interrupted.load(Ordering::Relaxed) && watch() {
            self.interrupted.store(true, Ordering::Relaxed);
            self.stop.set();
        }
    }

    /// Waits until all registered threads have left.
    pub fn wait(&self, watch: Watch<'_>) {
        let mut left = self.running.lock();
        while *left > 0 {
            let (guard, timeout) = self.finished.wait_timeout(left, LOOK);
            left = guard;
            if timeout && *left > 0 {
                // Not under the lock: a watch may run arbitrary code.
                drop(left);
                self.look(&mut *watch);
                left = self.running.lock();
            }
        }
    }

    /// The error of the lowest failing part that no other one stopped, so that the reported error does not depend on timing.
    pub fn result(self) -> Result<()> {
        if self.interrupted.load(Ordering::Relaxed) {
            return Err(interrupted());
        }
        match self.failed.into_inner() {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }
}

/// loom tries every interleaving of the threads. It has no timeouts: a thread that leaves unnoticed is a deadlock.
#[cfg(all(test, actshard_loom))]
mod models {
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;

    /// A second thread and the caller do the parts, as in the pool.
    fn shared(parts: usize, work: &'static Work<'static>, watch: Watch<'_>) -> Result<()> {
        let handout: &'static Handout<'static> = Box::leak(Box::new(Handout::new(parts, work)));
        let leave = handout.enter();
        let other = thread::spawn(move || {
            let _leave = leave;
            while handout.do_one() {}
        });
        while handout.do_one() {
            handout.look(&mut *watch);
        }
        handout.wait(watch);
        other.join().map_err(|_| Error::new(Kind::Internal, "a thread died"))?;
        match handout.failed.lock().clone() {
            _ if handout.interrupted.load(Ordering::Relaxed) => Err(interrupted()),
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    #[test]
    fn every_part_is_done_once_before_the_caller_goes_on() {
        loom::model(|| {
            let done: &'static [AtomicUsize] = Vec::leak((0..3).map(|_| AtomicUsize::new(0)).collect());
            let work: &'static Work<'static> = Box::leak(Box::new(|part: usize, _: &Stop| {
                done[part].fetch_add(1, Ordering::Relaxed);
                Ok(())
            }));
            assert!(shared(3, work, &mut || false).is_ok());
            assert!(done.iter().all(|n| n.load(Ordering::Relaxed) == 1));
        });
    }

    #[test]
    fn the_lowest_error_is_told() {
        loom::model(|| {
            let work: &'static Work<'static> =
                Box::leak(Box::new(
                    |part: usize, _: &Stop| {
                        if part >= 1 { Err(Error::new(Kind::Format, format!("{part}"))) } else { Ok(()) }
                    },
                ));
            assert_eq!(shared(3, work, &mut || false).unwrap_err().detail, "1");
        });
    }

    #[test]
    fn a_watch_stops_unless_all_is_done() {
        loom::model(|| {
            let done: &'static AtomicUsize = Box::leak(Box::new(AtomicUsize::new(0)));
            let work: &'static Work<'static> = Box::leak(Box::new(|_: usize, _: &Stop| {
                done.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }));
            match shared(3, work, &mut || true) {
                Ok(()) => assert_eq!(done.load(Ordering::Relaxed), 3),
                Err(error) => assert_eq!(error.kind, Kind::Interrupted),
            }
        });
    }
}
