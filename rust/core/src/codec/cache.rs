//! What had to be decoded, kept while a memory budget lasts.
//!
//! Least recently used goes first. What is thrown out lives on while somebody still reads it, so the budget bounds what is
//! *kept*; who decodes many things at once bounds what is in flight. The lock is tried and never waited for long: a child
//! forked while another thread held it decodes again instead of hanging.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use crate::memory::block::Block;
use crate::threads::fork::ForkMutex;

/// What a [`Cache`] may keep.
pub trait Kept {
    /// Bytes of memory that it takes.
    fn size(&self) -> usize;
}

impl Kept for Block {
    fn size(&self) -> usize {
        self.footprint()
    }
}

/// Decoded things by number, or by another key.
#[derive(Debug)]
pub struct Cache<T = Block, K = u64> {
    budget: u64,
    /// How long a thread waits for another one's decoding before it decodes by itself: that one may run Python code, and may
    /// wait for this thread.
    patience: Duration,
    state: ForkMutex<State<T, K>>,
}

#[derive(Debug)]
struct State<T, K> {
    blocks: HashMap<K, (Arc<T>, u64)>,
    /// The same keys by when they were used last.
    by_age: BTreeMap<u64, K>,
    /// What is being decoded.
    flights: HashMap<K, Arc<Flight<T>>>,
    now: u64,
    used: u64,
}

/// One decoding that other threads wait for.
#[derive(Debug)]
struct Flight<T> {
    pid: u32,
    thread: ThreadId,
    /// `None` until it ends; then what was decoded, if it succeeded.
    result: Mutex<Option<Option<Arc<T>>>>,
    ended: Condvar,
}

impl<T> Flight<T> {
    fn new(pid: u32) -> Flight<T> {
        Flight { pid, thread: thread::current().id(), result: Mutex::new(None), ended: Condvar::new() }
    }

    /// Whether it can be waited for: not if it was begun before a fork (no thread of this process does it), nor if it ended
    /// and could not be taken from the list.
    fn is_flying(&self, pid: u32) -> bool {
        self.pid == pid && self.result.lock().unwrap_or_else(PoisonError::into_inner).is_none()
    }

    /// Waits for what is decoded.
    fn wait(&self, patience: Duration) -> Waited<T> {
        let until = Instant::now() + patience;
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(ended) = result.as_ref() {
                return ended.clone().map_or(Waited::Failed, Waited::Made);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Waited::TooLong;
            }
            result = self.ended.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

enum Waited<T> {
    Made(Arc<T>),
    Failed,
    TooLong,
}

/// Ends a flight, also when decoding panics.
struct Landing<'a, T: Kept, K: Copy + Eq + Hash> {
    cache: &'a Cache<T, K>,
    number: K,
    flight: Arc<Flight<T>>,
    made: Option<Arc<T>>,
}

impl<T: Kept, K: Copy + Eq + Hash> Drop for Landing<'_, T, K> {
    fn drop(&mut self) {
        if let Some(made) = &self.made {
            self.cache.put(self.number, made);
        }
        *self.flight.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.made.take());
        self.flight.ended.notify_all();
        if let Some(mut guard) = self.cache.state.lock_briefly()
            && guard.flights.get(&self.number).is_some_and(|f| Arc::ptr_eq(f, &self.flight))
        {
            guard.flights.remove(&self.number);
        }
    }
}

impl<T: Kept, K: Copy + Eq + Hash> Cache<T, K> {
    /// Keeps at most `budget` bytes.
    pub fn new(budget: u64) -> Cache<T, K> {
        let empty =
            || State { blocks: HashMap::new(), by_age: BTreeMap::new(), flights: HashMap::new(), now: 0, used: 0 };
        Cache { budget, patience: Duration::from_secs(5), state: ForkMutex::new(empty(), empty()) }
    }

    /// Bytes that may be kept.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// A block, if it is kept.
    pub fn get(&self, number: K) -> Option<Arc<T>> {
        self.state.lock_briefly()?.get(number)
    }

    /// A block that is kept, or else what `load` makes, kept from now on. Threads that ask for the same block at once wait
    /// for one of them; if that one fails or takes long, they try themselves. So does a thread that is decoding this block
    /// already: a signal handler or finalizer that runs while Python decodes would wait for itself.
    pub fn get_or_load<E>(
        &self,
        number: K,
        load: impl FnOnce() -> Result<Option<Arc<T>>, E>,
    ) -> Result<Option<Arc<T>>, E> {
        let pid = std::process::id();
        let landing = loop {
            let Some(mut guard) = self.state.lock_briefly() else { break None };
            if let Some(block) = guard.get(number) {
                return Ok(Some(block));
            }
            let Some(flight) = guard.flights.get(&number).filter(|f| f.is_flying(pid)).cloned() else {
                let flight = Arc::new(Flight::new(pid));
                guard.flights.insert(number, Arc::clone(&flight));
                break Some(Landing { cache: self, number, flight, made: None });
            };
            drop(guard);
            if flight.thread == thread::current().id() {
                break None;
            }
            match flight.wait(self.patience) {
                Waited::Made(block) => return Ok(Some(block)),
                Waited::Failed => {}
                Waited::TooLong => break None,
            }
        };
        let made = load()?;
        match landing {
            Some(mut landing) => landing.made.clone_from(&made),
            None => {
                if let Some(block) = &made {
                    self.put(number, block);
                }
            }
        }
        Ok(made)
    }

    /// Keeps a block in place of those that were not used for longest; one larger than the budget in place of all, until
    /// the next: who reads from it goes on reading from it.
    pub fn put(&self, number: K, block: &Arc<T>) {
        let bytes = block.size() as u64;
        let Some(mut guard) = self.state.lock_briefly() else { return };
        if guard.blocks.contains_key(&number) {
            return;
        }
        guard.shrink(self.budget.saturating_sub(bytes));
        guard.now += 1;
        let now = guard.now;
        guard.used += bytes;
        guard.by_age.insert(now, number);
        guard.blocks.insert(number, (Arc::clone(block), now));
    }

    /// Forgets a block: a better one follows.
    pub fn remove(&self, number: K) {
        if let Some(mut guard) = self.state.lock_briefly()
            && let Some((block, used_at)) = guard.blocks.remove(&number)
        {
            guard.by_age.remove(&used_at);
            guard.used -= block.size() as u64;
        }
    }

    /// Throws out until `bytes` more would fit, as far as there is something to throw out.
    pub fn make_room(&self, bytes: u64) {
        if let Some(mut guard) = self.state.lock_briefly() {
            guard.shrink(self.budget.saturating_sub(bytes));
        }
    }

    /// Bytes kept now.
    pub fn used(&self) -> u64 {
        self.state.lock_briefly().map_or(0, |guard| guard.used)
    }
}

impl<T, K: Copy + Eq + Hash> State<T, K> {
    fn get(&mut self, number: K) -> Option<Arc<T>> {
        let (block, used_at) = self.blocks.get_mut(&number)?;
        self.by_age.remove(used_at);
        self.now += 1;
        *used_at = self.now;
        self.by_age.insert(self.now, number);
        Some(Arc::clone(block))
    }
}

impl<T: Kept, K: Copy + Eq + Hash> State<T, K> {
    fn shrink(&mut self, to: u64) {
        while self.used > to
            && let Some((_, number)) = self.by_age.pop_first()
        {
            if let Some((block, _)) = self.blocks.remove(&number) {
                self.used -= block.size() as u64;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_child_that_lost_the_lock_keeps_blocks_all_the_same() {
        let mut cache: Cache = Cache::new(10);
        cache.put(1, &Arc::new(Block::from(vec![0; 4])));
        cache.state.lose();
        assert!(cache.get(1).is_none());
        cache.put(1, &Arc::new(Block::from(vec![0; 5])));
        assert_eq!((cache.get(1).unwrap().len(), cache.used()), (5, 5));
    }

    #[test]
    fn what_is_larger_than_the_budget_is_kept_alone() {
        let cache = Cache::new(10);
        cache.put(1, &Arc::new(Block::from(vec![0; 9])));
        cache.put(2, &Arc::new(Block::from(vec![0; 11])));
        assert!(cache.get(1).is_none() && cache.get(2).is_some());
        cache.put(3, &Arc::new(Block::from(vec![0; 1])));
        assert!(cache.get(2).is_none());
        assert_eq!(cache.used(), 1);
    }

    #[test]
    fn threads_that_miss_one_block_load_it_once() {
        let cache: Cache = Cache::new(100);
        let (loads, together) = (AtomicUsize::new(0), std::sync::Barrier::new(8));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    together.wait();
                    let block = cache.get_or_load(3, || {
                        loads.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(50));
                        Ok::<_, ()>(Some(Arc::new(Block::from(vec![1; 8]))))
                    });
                    assert_eq!(block.unwrap().unwrap().len(), 8);
                });
            }
        });
        assert_eq!(loads.into_inner(), 1);
    }

    #[test]
    fn a_load_that_fails_or_panics_is_tried_again() {
        let cache: Cache = Cache::new(100);
        assert_eq!(cache.get_or_load(1, || Err(5)).err(), Some(5));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = cache.get_or_load(1, || -> Result<_, ()> { std::panic::panic_any(7) });
        }));
        assert!(panicked.is_err());
        assert!(cache.get_or_load(1, || Ok::<_, ()>(None)).unwrap().is_none());
        let made = cache.get_or_load(1, || Ok::<_, ()>(Some(Arc::new(Block::from(vec![2])))));
        assert_eq!(made.unwrap().unwrap()[..], [2]);
    }

    /// The thread that ends a load may find the list locked for longer than it tries: others free large blocks under that lock.
    #[test]
    fn a_load_that_ended_is_not_waited_for_though_it_is_still_listed() {
        let cache: Cache = Cache::new(100);
        for (round, first) in [Err(5), Ok(None), Ok(Some(Arc::new(Block::from(vec![1]))))].into_iter().enumerate() {
            let ended = thread::scope(|scope| {
                let (locked, is_locked) = std::sync::mpsc::channel();
                let (release, released) = std::sync::mpsc::channel::<()>();
                let cache = &cache;
                let loads = scope.spawn(move || {
                    cache.get_or_load(3, || {
                        scope.spawn(move || {
                            let _guard = cache.state.lock_briefly().unwrap();
                            locked.send(()).unwrap();
                            let _ = released.recv();
                        });
                        is_locked.recv().unwrap();
                        first
                    })
                });
                let found = loads.join().unwrap();
                drop(release);
                found
            });
            assert_eq!(ended.is_err(), round == 0);
            let (done, is_done) = std::sync::mpsc::channel();
            thread::scope(|scope| {
                let cache = &cache;
                scope.spawn(move || {
                    let made = cache.get_or_load(3, || Ok::<_, ()>(Some(Arc::new(Block::from(vec![2])))));
                    done.send(made.unwrap().unwrap()[..] == [2]).unwrap();
                });
                let right = is_done.recv_timeout(Duration::from_secs(30));
                if right.is_err() {
                    eprintln!("the second load never ends");
                    std::process::exit(1);
                }
                assert!(right.unwrap());
            });
            cache.remove(3);
        }
    }

    #[test]
    fn a_thread_that_loads_a_block_does_not_wait_for_itself() {
        let cache: Cache = Cache::new(100);
        let block = |n: u8| Ok::<_, ()>(Some(Arc::new(Block::from(vec![n]))));
        let made = cache.get_or_load(3, || cache.get_or_load(3, || block(1)));
        assert_eq!(made.unwrap().unwrap()[..], [1]);
    }

    /// As when Python code that decodes a block waits for the thread that asks for the same block.
    #[test]
    fn a_load_that_waits_for_who_waits_for_it_is_not_waited_for_for_ever() {
        let mut cache: Cache = Cache::new(100);
        cache.patience = Duration::from_millis(20);
        let block = |n: u8| Ok::<_, ()>(Some(Arc::new(Block::from(vec![n]))));
        let made = cache.get_or_load(3, || {
            let other = thread::scope(|scope| scope.spawn(|| cache.get_or_load(3, || block(1))).join().unwrap());
            assert_eq!(other.unwrap().unwrap()[..], [1]);
            block(1)
        });
        assert_eq!(made.unwrap().unwrap()[..], [1]);
    }

    /// As in a child forked while another thread was loading.
    #[test]
    fn a_load_of_the_parents_is_not_waited_for() {
        let cache: Cache = Cache::new(100);
        let flight = Flight::new(std::process::id() + 1);
        cache.state.lock_briefly().unwrap().flights.insert(3, Arc::new(flight));
        let made = cache.get_or_load(3, || Ok::<_, ()>(Some(Arc::new(Block::from(vec![3])))));
        assert_eq!(made.unwrap().unwrap()[..], [3]);
    }

    proptest! {
        /// Against a list in order of use.
        #[test]
        fn the_least_recently_used_goes_first(budget in 1u64..40, steps in prop::collection::vec((0u64..8, any::<bool>()), 0..200)) {
            let cache = Cache::new(budget);
            let mut oracle: Vec<(u64, u64)> = vec![];
            for (number, put) in steps {
                let size = number * 3;
                let at = oracle.iter().position(|(n, _)| *n == number);
                if put {
                    cache.put(number, &Arc::new(Block::from(vec![0; size as usize])));
                    if at.is_none() {
                        while oracle.iter().map(|(_, s)| s).sum::<u64>() > budget.saturating_sub(size) {
                            oracle.remove(0);
                        }
                        oracle.push((number, size));
                    }
                } else {
                    prop_assert_eq!(cache.get(number).is_some(), at.is_some());
                    if let Some(at) = at {
                        let entry = oracle.remove(at);
                        oracle.push(entry);
                    }
                }
                prop_assert_eq!(cache.used(), oracle.iter().map(|(_, s)| s).sum::<u64>());
            }
        }
    }
}
