//! A cache of decoded units with a memory budget; one thread decodes each unit.
//!
//! Evicts the least recently used first. An evicted unit lives as long as a reader uses it, so the budget bounds the
//! *kept* units; callers that decode many units at once bound the rest. No lock is waited for long: a child forked
//! while another thread held one decodes again instead of hanging.
//!
//! Threads that find their unit do not wait for each other: each takes a shared lock and stamps the unit with the number
//! of its use. Only a miss locks the list ordered by age; an eviction updates the list from the stamps.

use std::collections::BTreeMap;
use std::hash::Hash;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::flight::{Begun, Flight, Flights, Waited};
use super::shelves::{CachedUnit, Shelf, Shelves};
use crate::error::Result;
use crate::memory::buffer::Buffer;
use crate::threads::sync::RwLockWriteGuard;
use crate::threads::{Renewed, Watch, interrupted};

/// A unit that a [`Cache`] can keep.
pub trait Cached {
    /// Bytes of memory in use.
    fn size(&self) -> usize;

    /// Whether it replaces a cached unit of the same key, because it contains more of the unit.
    fn replaces(&self, _kept: &Self) -> bool {
        false
    }
}

impl Cached for Buffer {
    fn size(&self) -> usize {
        self.footprint()
    }
}

/// How long a thread waits for another one's decoding before it decodes itself. The other thread may run Python code that
/// waits for this one.
const PATIENCE: Duration = Duration::from_secs(5);

/// Decoded units by key. A key identifies a unit completely: if arrays share a cache, the key includes the array.
#[derive(Debug)]
pub struct Cache<T = Buffer, K = u64> {
    budget: u64,
    patience: Duration,
    /// Changed only by the thread that locks `state`; the second array entry belongs to the spare value of `state`.
    shelves: [Shelves<T, K>; 2],
    state: Renewed<CacheState<T, K>>,
    /// The number of the last use.
    clock: AtomicU64,
    decoded: AtomicU64,
    waits: AtomicU64,
    given_up: AtomicU64,
}

#[derive(Debug)]
struct CacheState<T, K> {
    /// The index of the shelves that this state describes.
    shelves: usize,
    /// The keys of the cached units, ordered by their last use at the time they were listed.
    by_age: BTreeMap<u64, K>,
    flights: Flights<T, K>,
    used: u64,
}

/// Maximum number of units that an eviction skips because they were used after they were listed. It bounds the time for
/// which the lock is held after many hits.
const SPARED: usize = 64;

/// Returns the units at some positions of a list of keys, in order; `None` for a missing one.
pub type LoadMany<'a, T> = &'a mut dyn FnMut(&[usize], Watch<'_>) -> Result<Vec<Option<T>>>;

/// The result of [`Cache::look_up`].
pub enum Lookup<'a, T: Cached, K: Clone + Eq + Hash> {
    /// The unit is cached.
    Kept(Arc<T>),
    /// This thread must decode it.
    Mine(Turn<'a, T, K>),
    /// Another thread is decoding it.
    Theirs(Arc<Flight<T>>),
}

/// The right to decode a unit. If it is dropped without a unit, also by a panic, the waiting threads retry themselves.
pub struct Turn<'a, T: Cached, K: Clone + Eq + Hash> {
    cache: &'a Cache<T, K>,
    key: K,
    /// `None` if other threads cannot wait for this one.
    flight: Option<Arc<Flight<T>>>,
}

impl<T: Cached, K: Clone + Eq + Hash> Turn<'_, T, K> {
    /// Caches the unit and passes it to the waiting threads.
    pub fn keep(self, made: &Arc<T>) {
        self.cache.put(self.key.clone(), made);
        self.hand_over(made);
    }

    /// Passes the unit to the waiting threads.
    pub fn hand_over(self, made: &Arc<T>) {
        if let Some(flight) = &self.flight {
            flight.end(Some(Arc::clone(made)));
        }
    }
}

impl<T: Cached, K: Clone + Eq + Hash> Drop for Turn<'_, T, K> {
    fn drop(&mut self) {
        let Some(flight) = self.flight.take() else { return };
        flight.end(None);
        // If the list cannot be locked, the flight stays in it; it has ended, so later threads do not wait for it.
        if let Some(mut guard) = self.cache.state.lock_briefly() {
            guard.flights.remove(&self.key, &flight);
        }
    }
}

impl<T: Cached, K: Clone + Eq + Hash> Cache<T, K> {
    /// An empty cache of at most `budget` bytes.
    pub fn new(budget: u64) -> Cache<T, K> {
        let empty = |shelves| CacheState { shelves, by_age: BTreeMap::new(), flights: Flights::new(), used: 0 };
        Cache {
            budget,
            patience: PATIENCE,
            shelves: [Shelves::new(), Shelves::new()],
            state: Renewed::new(empty(0), empty(1)),
            clock: AtomicU64::new(0),
            decoded: AtomicU64::new(0),
            waits: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
        }
    }

    /// The budget in bytes.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes cached now.
    pub fn used(&self) -> u64 {
        self.state.lock_briefly().map_or(0, |guard| guard.used)
    }

    /// Units decoded so far by [`Cache::get_or_load`].
    pub fn decoded(&self) -> u64 {
        self.decoded.load(Ordering::Relaxed)
    }

    /// Number of lookups that waited for a thread that was changing the cache.
    pub fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    /// Number of times that a lock was not free in time, or another thread's unit not decoded, as on a busy machine or in a
    /// child. Each time, at most one unit is not found or not kept, and is decoded once more.
    pub fn given_up(&self) -> u64 {
        self.given_up.load(Ordering::Relaxed)
    }

    fn give_up(&self) {
        self.given_up.fetch_add(1, Ordering::Relaxed);
    }

    /// The unit, if it is cached.
    pub fn get(&self, key: K) -> Option<Arc<T>> {
        self.find(usize::from(self.state.is_lost()), &key)
    }

    fn find(&self, shelves: usize, key: &K) -> Option<Arc<T>> {
        let Some(units) = self.shelves[shelves].read(key, || _ = self.waits.fetch_add(1, Ordering::Relaxed)) else {
            self.give_up();
            self.state.lose_in_child();
            return None;
        };
        units.get(key).map(|slot| {
            // The unit that was used last needs no new stamp, so threads that share it do not contend for the clock.
            if slot.used_at.load(Ordering::Relaxed) != self.clock.load(Ordering::Relaxed) {
                slot.used_at.store(self.tick(), Ordering::Relaxed);
            }
            Arc::clone(&slot.unit)
        })
    }

    fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Returns a cached unit for which `enough` is true, else the right to decode it or the flight of the thread that
    /// is decoding it. A thread that is already decoding this unit gets a second turn: a signal handler or finalizer
    /// that runs while Python decodes would otherwise wait for its own thread.
    pub fn look_up(&self, key: K, enough: impl Fn(&T) -> bool) -> Lookup<'_, T, K> {
        if let Some(unit) = self.get(key.clone()).filter(|unit| enough(unit)) {
            return Lookup::Kept(unit);
        }
        let flight = match self.state.lock_briefly() {
            Some(mut guard) => match guard.flights.begin(key.clone()) {
                Begun::Theirs(flight) => return Lookup::Theirs(flight),
                Begun::Mine(flight) => {
                    // Another thread may have cached it, and then ended its flight, since the first look.
                    if let Some(unit) = self.find(guard.shelves, &key).filter(|unit| enough(unit)) {
                        guard.flights.remove(&key, &flight);
                        return Lookup::Kept(unit);
                    }
                    Some(flight)
                }
                Begun::Again => None,
            },
            // Without the lock: decode without informing other threads.
            None => {
                self.give_up();
                None
            }
        };
        Lookup::Mine(Turn { cache: self, key, flight })
    }

    /// Returns a cached unit for which `enough` is true, else caches and returns the result of `load`. Concurrent callers
    /// for the same unit wait for one of them; if that one fails or takes too long, they load it themselves.
    pub fn get_or_load<E>(
        &self,
        key: K,
        enough: impl Fn(&T) -> bool,
        load: impl FnOnce() -> Result<Option<T>, E>,
    ) -> Result<Option<Arc<T>>, E> {
        let turn = loop {
            match self.look_up(key.clone(), &enough) {
                Lookup::Kept(unit) => return Ok(Some(unit)),
                Lookup::Mine(turn) => break turn,
                Lookup::Theirs(flight) => match flight.wait(Some(self.patience), &mut || false) {
                    Waited::Made(unit) if enough(&unit) => return Ok(Some(unit)),
                    Waited::Made(_) | Waited::Failed => {}
                    Waited::TooLong | Waited::Interrupted => {
                        self.give_up();
                        break Turn { cache: self, key, flight: None };
                    }
                },
            }
        };
        let Some(made) = load()?.map(Arc::new) else { return Ok(None) };
        self.decoded.fetch_add(1, Ordering::Relaxed);
        turn.keep(&made);
        Ok(Some(made))
    }

    /// [`Cache::get_or_load`] for many units, in order. `load` receives positions and returns their units in the same
    /// order. No thread waits for another one while it has turns.
    pub fn get_or_load_many(&self, keys: &[K], load: LoadMany<'_, T>, watch: Watch<'_>) -> Result<Vec<Option<Arc<T>>>> {
        let mut found: Vec<Option<Arc<T>>> = keys.iter().map(|_| None).collect();
        let mut lacking: Vec<usize> = (0..keys.len()).collect();
        while !lacking.is_empty() {
            let (mut to_load, mut turns, mut awaited) = (vec![], vec![], vec![]);
            for i in lacking.drain(..) {
                match self.look_up(keys[i].clone(), |_| true) {
                    Lookup::Kept(unit) => found[i] = Some(unit),
                    Lookup::Mine(turn) => {
                        to_load.push(i);
                        turns.push(turn);
                    }
                    Lookup::Theirs(flight) => awaited.push((i, flight)),
                }
            }
            if !to_load.is_empty() {
                let made = load(&to_load, &mut *watch)?;
                for ((i, turn), unit) in to_load.into_iter().zip(turns).zip(made) {
                    let Some(unit) = unit.map(Arc::new) else { continue };
                    self.decoded.fetch_add(1, Ordering::Relaxed);
                    turn.keep(&unit);
                    found[i] = Some(unit);
                }
            }
            for (i, flight) in awaited {
                match flight.wait(Some(self.patience), &mut *watch) {
                    Waited::Made(unit) => found[i] = Some(unit),
                    Waited::Failed => lacking.push(i),
                    Waited::TooLong => {
                        self.give_up();
                        found[i] = load(&[i], &mut *watch)?.pop().flatten().map(Arc::new);
                    }
                    Waited::Interrupted => return Err(interrupted()),
                }
            }
        }
        Ok(found)
    }

    /// Caches a unit and evicts the least recently used ones. A unit larger than the budget evicts all others and stays
    /// until the next is cached: its reader is likely to read from it again.
    pub fn put(&self, key: K, unit: &Arc<T>) {
        let bytes = unit.size() as u64;
        let Some(mut guard) = self.state.lock_briefly() else { return self.give_up() };
        let state = &mut *guard;
        let Some(units) = self.shelves[state.shelves].read(&key, || ()) else { return self.give_up() };
        let replaces = units.get(&key).map(|slot| unit.replaces(&slot.unit));
        drop(units);
        match replaces {
            Some(false) => return,
            Some(true) if !self.remove_from(state, &key) => return,
            _ => {}
        }
        if !self.shrink(state, self.budget.saturating_sub(bytes)) {
            return;
        }
        let Some(mut units) = self.write(state, &key) else { return };
        let now = self.tick();
        units.insert(key.clone(), CachedUnit::new(Arc::clone(unit), now));
        state.by_age.insert(now, key);
        state.used += bytes;
    }

    /// Removes a unit.
    pub fn remove(&self, key: K) {
        if let Some(mut guard) = self.state.lock_briefly() {
            self.remove_from(&mut guard, &key);
        }
    }

    /// Evicts units until `bytes` more fit, or none is left.
    pub fn make_room(&self, bytes: u64) {
        if let Some(mut guard) = self.state.lock_briefly() {
            self.shrink(&mut guard, self.budget.saturating_sub(bytes));
        }
    }

    /// Returns `false` if a lock prevented it.
    fn remove_from(&self, state: &mut CacheState<T, K>, key: &K) -> bool {
        let Some(mut units) = self.write(state, key) else { return false };
        if let Some(slot) = units.remove(key) {
            state.by_age.remove(&slot.listed);
            state.used -= slot.unit.size() as u64;
        }
        true
    }

    /// The key's shelf. In a child where no thread can ever change it, this process's next call starts with empty shelves.
    fn write(&self, state: &CacheState<T, K>, key: &K) -> Option<RwLockWriteGuard<'_, Shelf<T, K>>> {
        let units = self.shelves[state.shelves].write(key);
        if units.is_none() {
            self.give_up();
            self.state.lose_in_child();
        }
        units
    }

    /// Evicts units until at most `to` bytes are left. Returns `false` if a lock prevented it.
    fn shrink(&self, state: &mut CacheState<T, K>, to: u64) -> bool {
        let mut spared = 0;
        while state.used > to
            && let Some((listed, key)) = state.by_age.pop_first()
        {
            let Some(mut units) = self.write(state, &key) else {
                state.by_age.insert(listed, key);
                return false;
            };
            match units.get_mut(&key) {
                Some(slot) if slot.listed < slot.last_use() && spared < SPARED => {
                    slot.listed = slot.last_use();
                    state.by_age.insert(slot.listed, key);
                    spared += 1;
                }
                Some(_) => {
                    let evicted = units.remove(&key);
                    drop(units);
                    state.used -= evicted.map_or(0, |slot| slot.unit.size() as u64);
                    spared = 0;
                }
                None => {}
            }
        }
        true
    }
}

/// loom tries every interleaving of two threads that need one unit. It has no timeouts: a thread that is not notified is a
/// deadlock.
#[cfg(all(test, actshard_loom))]
mod models {
    use loom::thread;

    use super::*;

    type Loaded = Result<Option<Arc<Buffer>>, u8>;

    /// Two threads request one unit; returns both results and the number of loads.
    fn two_ask(budget: u64, load: fn(usize) -> Result<Option<Buffer>, u8>) -> ([Loaded; 2], usize) {
        let cache: Arc<Cache> = Arc::new(Cache::new(budget));
        let loads = Arc::new(AtomicU64::new(0));
        let ask = move |cache: Arc<Cache>, loads: Arc<AtomicU64>| {
            cache.get_or_load(1, |_| true, || load(loads.fetch_add(1, Ordering::Relaxed) as usize))
        };
        let (shared, counted) = (Arc::clone(&cache), Arc::clone(&loads));
        let other = thread::spawn(move || ask(shared, counted));
        let here = ask(cache, Arc::clone(&loads));
        let there = other.join().unwrap();
        ([here, there], loads.load(Ordering::Relaxed) as usize)
    }

    #[test]
    fn one_of_two_loads_and_both_have_it() {
        loom::model(|| {
            let (got, loads) = two_ask(100, |_| Ok(Some(Buffer::from(vec![1, 2]))));
            assert_eq!(loads, 1);
            assert!(got.iter().all(|got| got.as_ref().unwrap().as_ref().unwrap()[..] == [1, 2]));
        });
    }

    #[test]
    fn a_load_that_fails_is_tried_by_the_other() {
        loom::model(|| {
            let fails_once = |n| if n == 0 { Err(7) } else { Ok(Some(Buffer::from(vec![1]))) };
            let (got, loads) = two_ask(100, fails_once);
            assert_eq!(loads, 2);
            assert_eq!(got.iter().filter(|got| got.is_err()).count(), 1);
        });
    }

    #[test]
    fn a_unit_that_is_not_there_keeps_nobody_waiting() {
        loom::model(|| {
            let (got, loads) = two_ask(100, |_| Ok(None));
            assert_eq!(loads, 2);
            assert!(got.iter().all(|got| got.as_ref().unwrap().is_none()));
        });
    }

    #[test]
    fn a_unit_larger_than_the_budget_is_had_by_both() {
        loom::model(|| {
            let (got, _) = two_ask(1, |_| Ok(Some(Buffer::from(vec![1, 2, 3]))));
            assert!(got.iter().all(|got| got.as_ref().unwrap().as_ref().unwrap().len() == 3));
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;
    use proptest::prelude::*;

    fn whatever(_: &Buffer) -> bool {
        true
    }

    impl Cache {
        /// Simulates a child forked while another thread cached a unit.
        fn lose(&mut self) {
            self.state.lose();
            self.shelves[0].lose();
        }
    }

    #[test]
    fn a_child_that_lost_the_lock_keeps_blocks_all_the_same() {
        let mut cache: Cache = Cache::new(10);
        cache.put(1, &Arc::new(Buffer::from(vec![0; 4])));
        cache.lose();
        assert!(cache.get(1).is_none());
        cache.put(1, &Arc::new(Buffer::from(vec![0; 5])));
        assert_eq!((cache.get(1).unwrap().len(), cache.used()), (5, 5));
    }

    #[test]
    fn a_child_forked_while_a_unit_was_looked_up_keeps_blocks_all_the_same() {
        let mut cache: Cache = Cache::new(10);
        cache.put(1, &Arc::new(Buffer::from(vec![0; 4])));
        cache.state.fork();
        std::mem::forget(cache.shelves[0].read(&1, || ()));
        assert_eq!(cache.get(1).unwrap().len(), 4);
        // The dead reader's lock is never released: cached units are dropped, and caching continues.
        cache.remove(1);
        assert!(cache.get(1).is_none());
        cache.put(1, &Arc::new(Buffer::from(vec![0; 5])));
        assert_eq!((cache.get(1).unwrap().len(), cache.used()), (5, 5));
    }

    /// In the process that created the cache, a shelf that is locked for long only causes a delay: no unit is lost or
    /// counted twice.
    #[test]
    fn a_shelf_that_cannot_be_had_changes_nothing() {
        let cache: Cache = Cache::new(10);
        cache.put(1, &Arc::new(Buffer::from(vec![0; 4])));
        let reader = cache.shelves[0].read(&1, || ()).unwrap();
        cache.remove(1);
        cache.put(2, &Arc::new(Buffer::from(vec![0; 8])));
        drop(reader);
        assert_eq!((cache.get(1).unwrap().len(), cache.get(2).is_none(), cache.used()), (4, true, 4));
        cache.put(2, &Arc::new(Buffer::from(vec![0; 8])));
        assert_eq!((cache.get(1).is_none(), cache.get(2).unwrap().len(), cache.used()), (true, 8, 8));
    }

    /// Threads that look up cached units do not wait for each other, even for the same unit.
    #[test]
    fn sixteen_threads_that_find_their_units_never_wait() {
        const UNITS: u64 = 200;
        let cache: Cache = Cache::new(UNITS * 8);
        let found = AtomicUsize::new(0);
        let find = |key: u64| {
            let unit = cache.get_or_load(key, whatever, || Ok::<_, ()>(Some(Buffer::from(vec![key as u8; 8]))));
            assert!(unit.unwrap().unwrap()[..] == [key as u8; 8]);
        };
        (0..UNITS).for_each(find);
        thread::scope(|scope| {
            for t in 0..16 {
                let (find, found) = (&find, &found);
                scope.spawn(move || {
                    for i in 0..20_000u64 {
                        find(if i % 2 == 0 { 7 } else { (i * 13 + t * 31) % UNITS });
                        found.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!((found.into_inner(), cache.decoded(), cache.waits(), cache.given_up()), (320_000, UNITS, 0, 0));
    }

    /// Each unit is made once, whether another thread caches it before, between or after a thread's two lookups.
    #[test]
    fn sixteen_threads_make_each_unit_once() {
        let cache: Cache = Cache::new(1 << 20);
        thread::scope(|scope| {
            for t in 0..16 {
                let cache = &cache;
                scope.spawn(move || {
                    for i in 0..2_000u64 {
                        let key = i ^ (t & 3);
                        let made = cache
                            .get_or_load(key, whatever, || Ok::<_, ()>(Some(Buffer::from(key.to_le_bytes().to_vec()))));
                        assert_eq!(made.unwrap().unwrap()[..], key.to_le_bytes());
                    }
                });
            }
        });
        // A thread that cannot get a lock in time, on a busy machine, makes a unit again.
        assert!((2_000..=2_000 + cache.given_up()).contains(&cache.decoded()), "{cache:?}");
        assert!(cache.used() == 16_000 || cache.given_up() > 0, "{}", cache.used());
    }

    #[test]
    fn what_is_larger_than_the_budget_is_kept_alone() {
        let cache = Cache::new(10);
        cache.put(1, &Arc::new(Buffer::from(vec![0; 9])));
        cache.put(2, &Arc::new(Buffer::from(vec![0; 11])));
        assert!(cache.get(1).is_none() && cache.get(2).is_some());
        cache.put(3, &Arc::new(Buffer::from(vec![0; 1])));
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
                    let block = cache.get_or_load(3, whatever, || {
                        loads.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(50));
                        Ok::<_, ()>(Some(Buffer::from(vec![1; 8])))
                    });
                    assert_eq!(block.unwrap().unwrap().len(), 8);
                });
            }
        });
        assert!((1..=1 + cache.given_up()).contains(&(loads.into_inner() as u64)), "{cache:?}");
    }

    #[test]
    fn a_load_that_fails_or_panics_is_tried_again() {
        let cache: Cache = Cache::new(100);
        assert_eq!(cache.get_or_load(1, whatever, || Err(5)).err(), Some(5));
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let _ = cache.get_or_load(1, whatever, || -> Result<_, ()> { std::panic::panic_any(7) });
        }));
        assert!(panicked.is_err());
        assert!(cache.get_or_load(1, whatever, || Ok::<_, ()>(None)).unwrap().is_none());
        let made = cache.get_or_load(1, whatever, || Ok::<_, ()>(Some(Buffer::from(vec![2]))));
        assert_eq!(made.unwrap().unwrap()[..], [2]);
    }

    /// The list may stay locked for longer than the thread that ends a load tries to lock it: others free large blocks
    /// under that lock.
    #[test]
    fn a_load_that_ended_is_not_waited_for_though_it_is_still_listed() {
        let cache: Cache = Cache::new(100);
        for (round, first) in [Err(5), Ok(None), Ok(Some(Buffer::from(vec![1])))].into_iter().enumerate() {
            let ended = thread::scope(|scope| {
                let (locked, is_locked) = std::sync::mpsc::channel();
                let (release, released) = std::sync::mpsc::channel::<()>();
                let cache = &cache;
                let loads = scope.spawn(move || {
                    cache.get_or_load(3, whatever, || {
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
                    let made = cache.get_or_load(3, whatever, || Ok::<_, ()>(Some(Buffer::from(vec![2]))));
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
        let block = |n: u8| Ok::<_, ()>(Some(Buffer::from(vec![n])));
        let made = cache.get_or_load(3, whatever, || {
            let again = cache.get_or_load(3, whatever, || block(1)).unwrap().unwrap();
            block(again[0])
        });
        assert_eq!(made.unwrap().unwrap()[..], [1]);
    }

    /// Python code that decodes a block may wait for a thread that requests the same block.
    #[test]
    fn a_load_that_waits_for_who_waits_for_it_is_not_waited_for_for_ever() {
        let mut cache: Cache = Cache::new(100);
        cache.patience = Duration::from_millis(20);
        let block = |n: u8| Ok::<_, ()>(Some(Buffer::from(vec![n])));
        let made = cache.get_or_load(3, whatever, || {
            let other =
                thread::scope(|scope| scope.spawn(|| cache.get_or_load(3, whatever, || block(1))).join().unwrap());
            assert_eq!(other.unwrap().unwrap()[..], [1]);
            block(1)
        });
        assert_eq!(made.unwrap().unwrap()[..], [1]);
    }

    /// A child forked while another thread was loading.
    #[test]
    fn a_load_of_the_parents_is_not_waited_for() {
        let cache: Cache = Cache::new(100);
        cache.state.lock_briefly().unwrap().flights.begin_elsewhere(3);
        let made = cache.get_or_load(3, whatever, || Ok::<_, ()>(Some(Buffer::from(vec![3]))));
        assert_eq!(made.unwrap().unwrap()[..], [3]);
    }

    #[test]
    fn a_turn_in_a_turn_does_not_end_the_first() {
        let cache: Cache = Cache::new(100);
        let Lookup::Mine(outer) = cache.look_up(3, whatever) else { panic!("a unit that is not kept") };
        let Lookup::Mine(inner) = cache.look_up(3, whatever) else { panic!("the thread waits for itself") };
        inner.hand_over(&Arc::new(Buffer::from(vec![1])));
        thread::scope(|scope| {
            let other = scope.spawn(|| matches!(cache.look_up(3, whatever), Lookup::Theirs(_)));
            assert!(other.join().unwrap(), "the first still decodes");
        });
        drop(outer);
        assert!(matches!(cache.look_up(3, whatever), Lookup::Mine(_)));
    }

    /// A child forked while another thread held the list's lock, or a holder that sleeps for longer than this thread
    /// tries.
    #[test]
    fn a_list_that_cannot_be_had_holds_up_no_thread() {
        let cache: Cache = Cache::new(100);
        let Lookup::Mine(failed) = cache.look_up(3, whatever) else { panic!("a unit that is not kept") };
        let list = cache.state.lock_briefly().unwrap();
        drop(failed);
        drop(list);
        assert!(matches!(cache.look_up(3, whatever), Lookup::Mine(_)), "what failed is still waited for");
        std::mem::forget(cache.state.lock_briefly().unwrap());
        assert!(matches!(cache.look_up(3, whatever), Lookup::Mine(_)));
    }

    #[test]
    fn a_waiting_thread_is_stopped_by_its_watch() {
        let cache: Cache = Cache::new(100);
        let Lookup::Mine(_turn) = cache.look_up(3, whatever) else { panic!("a unit that is not kept") };
        let waited = thread::scope(|scope| {
            let waits = scope.spawn(|| match cache.look_up(3, whatever) {
                Lookup::Theirs(flight) => Some(flight.wait(None, &mut || true)),
                _ => None,
            });
            waits.join().unwrap()
        });
        assert!(matches!(waited, Some(Waited::Interrupted)));
    }

    /// The beginning of a unit stays cached until more of it is needed.
    #[test]
    fn more_of_a_unit_replaces_less_of_it() {
        #[derive(Debug)]
        struct Prefix(usize);
        impl Cached for Prefix {
            fn size(&self) -> usize {
                self.0
            }
            fn replaces(&self, kept: &Prefix) -> bool {
                self.0 > kept.0
            }
        }
        let cache: Cache<Prefix> = Cache::new(100);
        for (want, made, found, used) in [(3, 3, 3, 3), (2, 9, 3, 3), (5, 5, 5, 5), (4, 9, 5, 5)] {
            let unit = cache.get_or_load(1, |unit| unit.0 >= want, || Ok::<_, ()>(Some(Prefix(made))));
            assert_eq!((unit.unwrap().unwrap().0, cache.used()), (found, used));
        }
        cache.put(1, &Arc::new(Prefix(4)));
        assert_eq!((cache.used(), cache.decoded()), (5, 2));
    }

    proptest! {
        /// Compares with a list in order of use.
        #[test]
        fn the_least_recently_used_goes_first(budget in 1u64..40, steps in prop::collection::vec((0u64..8, any::<bool>()), 0..200)) {
            let cache = Cache::new(budget);
            let mut oracle: Vec<(u64, u64)> = vec![];
            for (number, put) in steps {
                let size = number * 3;
                let at = oracle.iter().position(|(n, _)| *n == number);
                if put {
                    cache.put(number, &Arc::new(Buffer::from(vec![0; size as usize])));
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

    proptest! {
        // Each case has thousands of numbers: a quarter of the usual cases (PROPTEST_CASES).
        #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.div_ceil(4), ..ProptestConfig::default() })]
        /// More units than one eviction spares: the order is no longer exact, but cached units are correct and within
        /// the budget.
        #[test]
        fn what_is_kept_fits_and_is_right(
            budget in 1u64..1000,
            steps in prop::collection::vec((0u64..300, 0u8..8), 0..1500),
        ) {
            let cache = Cache::new(budget);
            let size = |key: u64| key % 11;
            for (key, step) in steps {
                match step {
                    0 => cache.remove(key),
                    1 => cache.make_room(size(key)),
                    2 | 3 => cache.put(key, &Arc::new(Buffer::from(vec![key as u8; size(key) as usize]))),
                    _ => prop_assert!(cache.get(key).is_none_or(|unit| unit[..] == vec![key as u8; size(key) as usize])),
                }
                let kept: Vec<u64> = (0..300).filter(|key| cache.shelves[0].read(key, || ()).unwrap().contains_key(key)).collect();
                let used: u64 = kept.iter().map(|key| size(*key)).sum();
                prop_assert_eq!(cache.used(), used);
                prop_assert_eq!(cache.state.lock_briefly().unwrap().by_age.len(), kept.len());
                prop_assert!(used <= budget || kept.iter().filter(|key| size(**key) > 0).count() == 1);
            }
        }
    }
}
