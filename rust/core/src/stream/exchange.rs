//! The exchange of batches and memory between the reading thread and the consumer.

use std::collections::VecDeque;

use crate::error::{Error, Result};
use crate::threads::sync::atomic::{AtomicBool, Ordering};
use crate::threads::{LOOK, Lock, LockGuard, Signal, Watch, interrupted};

/// Ready batches `B` and free memory `M`.
pub(super) struct Exchange<B, M> {
    state: Lock<ExchangeState<B, M>>,
    changed: Signal,
    stop: AtomicBool,
}

struct ExchangeState<B, M> {
    ready: VecDeque<B>,
    spare: Vec<M>,
    /// Set when no more batches follow, optionally with an error; the maker no longer touches the memory of a batch.
    finished: Option<Option<Error>>,
}

impl<B, M> Exchange<B, M> {
    pub(super) fn new(spare: Vec<M>) -> Exchange<B, M> {
        let state = ExchangeState { ready: VecDeque::new(), spare, finished: None };
        Exchange { state: Lock::new(state), changed: Signal::new(), stop: AtomicBool::new(false) }
    }

    fn lock(&self) -> LockGuard<'_, ExchangeState<B, M>> {
        self.state.lock()
    }

    fn wait<'a>(&self, state: LockGuard<'a, ExchangeState<B, M>>) -> LockGuard<'a, ExchangeState<B, M>> {
        self.changed.wait_timeout(state, LOOK).0
    }

    // -- consumer --------------------------------------------------------------------------------------------------

    /// Returns the next batch; `None` after the last, or if stopped meanwhile. An error is returned after all batches before
    /// it, and on every later call. The watch is called without the lock.
    pub(super) fn next(&self, watch: Watch<'_>) -> Result<Option<B>> {
        let mut state = self.lock();
        loop {
            if self.stopped() {
                return Ok(None);
            }
            if let Some(batch) = state.ready.pop_front() {
                self.changed.notify_all();
                return Ok(Some(batch));
            }
            match &state.finished {
                Some(Some(error)) => return Err(error.clone()),
                Some(None) => return Ok(None),
                None => state = self.wait(state),
            }
            if state.ready.is_empty() && state.finished.is_none() {
                drop(state);
                if watch() {
                    return Err(interrupted());
                }
                state = self.lock();
            }
        }
    }

    /// Whether `next` would return a batch without waiting.
    pub(super) fn is_ready(&self) -> bool {
        !self.lock().ready.is_empty()
    }

    /// Returns memory for reuse.
    pub(super) fn give_back(&self, memory: M) {
        self.lock().spare.push(memory);
        self.changed.notify_all();
    }

    /// Stops both sides.
    pub(super) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        // A thread that checked the flag before now either waits or holds the lock. Without taking the lock, the
        // notification could fall in between and be lost.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Waits until the maker no longer touches any memory, then drops the batches that were not taken.
    pub(super) fn wait_until_finished(&self, watch: Watch<'_>) -> Result<()> {
        let mut state = self.lock();
        while state.finished.is_none() {
            state = self.wait(state);
            if state.finished.is_none() {
                drop(state);
                if watch() {
                    return Err(interrupted());
                }
                state = self.lock();
            }
        }
        state.ready.clear();
        state.spare.clear();
        Ok(())
    }

    // -- maker -----------------------------------------------------------------------------------------------------

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Waits until fewer than `ahead` batches are ready; false if stopped. The maker starts a batch only when there is room
    /// for it.
    pub(super) fn wait_for_room(&self, ahead: usize) -> bool {
        let mut state = self.lock();
        while !self.stopped() {
            if state.ready.len() < ahead {
                return true;
            }
            state = self.wait(state);
        }
        false
    }

    /// Waits for returned memory; `None` if stopped.
    pub(super) fn wait_for_memory(&self) -> Option<M> {
        let mut state = self.lock();
        while !self.stopped() {
            if let Some(memory) = state.spare.pop() {
                return Some(memory);
            }
            state = self.wait(state);
        }
        None
    }

    /// Passes a batch to the consumer; false if stopped.
    pub(super) fn hand_over(&self, batch: B) -> bool {
        self.lock().ready.push_back(batch);
        self.changed.notify_all();
        !self.stopped()
    }

    /// Marks the end of the batches.
    pub(super) fn finish(&self, error: Option<Error>) {
        self.lock().finished = Some(error);
        self.changed.notify_all();
    }
}

/// loom tries every interleaving of two threads. It has no timeouts: a lost notification is a deadlock there, and 20 ms of
/// waiting in production.
#[cfg(all(test, actshard_loom))]
mod models {
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::error::Kind;

    fn make(exchange: &Exchange<usize, usize>, batches: usize, error: Option<Error>) {
        for batch in 0..batches {
            if !exchange.wait_for_room(1) || !exchange.hand_over(batch) {
                break;
            }
        }
        exchange.finish(error);
    }

    /// Runs `maker` on a second thread, and `taker` on this one.
    fn model(spare: &'static [usize], maker: fn(&Exchange<usize, usize>), taker: fn(&Exchange<usize, usize>)) {
        loom::model(move || {
            let exchange = Arc::new(Exchange::new(spare.to_vec()));
            let theirs = Arc::clone(&exchange);
            let thread = thread::spawn(move || maker(&theirs));
            taker(&exchange);
            thread.join().unwrap();
        });
    }

    #[test]
    fn every_batch_is_taken_once_and_in_order_and_then_the_error() {
        model(
            &[],
            |maker| make(maker, 2, Some(Error::new(Kind::Format, "the last"))),
            |taker| {
                for batch in 0..2 {
                    assert_eq!(taker.next(&mut || false).unwrap(), Some(batch));
                }
                assert_eq!(taker.next(&mut || false).unwrap_err().detail, "the last");
            },
        );
    }

    #[test]
    fn a_maker_that_waits_for_room_or_memory_is_stopped() {
        model(
            &[7],
            |maker| {
                while let Some(memory) = maker.wait_for_memory() {
                    maker.hand_over(memory);
                }
                maker.finish(None);
            },
            |taker| {
                assert_eq!(taker.next(&mut || false).unwrap(), Some(7));
                taker.stop();
                taker.wait_until_finished(&mut || false).unwrap();
                assert_eq!(taker.next(&mut || false).unwrap(), None);
            },
        );
        model(
            &[],
            |maker| make(maker, 9, None),
            |taker| {
                taker.stop();
                taker.wait_until_finished(&mut || false).unwrap();
            },
        );
    }

    #[test]
    fn memory_that_is_given_back_is_filled_again() {
        model(
            &[7],
            |maker| {
                for _ in 0..2 {
                    let memory = maker.wait_for_memory().unwrap();
                    maker.hand_over(memory);
                }
                maker.finish(None);
            },
            |taker| {
                for _ in 0..2 {
                    let batch = taker.next(&mut || false).unwrap().unwrap();
                    taker.give_back(batch);
                }
                assert_eq!(taker.next(&mut || false).unwrap(), None);
            },
        );
    }

    /// One thread waits for a batch while another stops the stream.
    #[test]
    fn whoever_waits_for_a_batch_is_woken_by_a_stop() {
        model(&[], |waiting| assert_eq!(waiting.next(&mut || false).unwrap(), None), Exchange::stop);
    }
}
