//! A process-wide budget of file descriptors, and the clock algorithm that closes cached files when it is used up.

use std::fs::{File, Metadata};
use std::path::Path;
use std::sync::Weak;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::error::{Error, Kind, Result, is_out_of_descriptors};
use crate::threads::ForkSafe;

/// Cached open files of this process, over all datasets.
static KEPT: AtomicUsize = AtomicUsize::new(0);
/// All open files, including those open for a single call.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// Mappings that a process may have, unless the system names another number.
const MAPPINGS: usize = 65_530;

/// Half of this process's descriptor limit, and a quarter of its mappings, since a cached file may be mapped; the rest is left to the
/// program.
pub(crate) fn budget() -> usize {
    // Not a OnceLock: a child forked while another thread initialised it would wait for that thread.
    static BUDGET: AtomicUsize = AtomicUsize::new(0);
    match BUDGET.load(Ordering::Relaxed) {
        0 => {
            let soft = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
            let mappings = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
            let mappings = mappings.and_then(|count| count.trim().parse().ok()).unwrap_or(MAPPINGS);
            let budget = soft.map_or(4096, |n| usize::try_from(n / 2).unwrap_or(4096)).min(mappings / 4).max(16);
            BUDGET.store(budget, Ordering::Relaxed);
            budget
        }
        budget => budget,
    }
}

/// Files that one of `threads` threads may keep open without caching them: all threads together stay within half of
/// what the budget leaves.
pub(crate) fn files_at_once(threads: usize) -> usize {
    (budget() / 2 / threads.max(1)).clamp(2, 1024)
}

/// Whether all threads together have so many open files that no thread should open a second one. Counts files, because
/// callers may be many more than the pool's threads.
pub(crate) fn descriptors_are_scarce() -> bool {
    OPEN.load(Ordering::Relaxed) > budget() + budget() / 2
}

/// An open descriptor's share of the budget, released on drop.
#[derive(Debug)]
pub(crate) struct Share {
    kept: bool,
}

impl Share {
    /// Counts a newly opened descriptor, and reserves space in the cache for it if there is any.
    pub(crate) fn take() -> Share {
        OPEN.fetch_add(1, Ordering::Relaxed);
        Share { kept: keep_one() }
    }

    /// Whether the file may be cached.
    pub(crate) fn may_keep(&self) -> bool {
        self.kept
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        if self.kept {
            KEPT.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Reserves space for a cached file: free space, or that of a file not used lately.
fn keep_one() -> bool {
    let take = || KEPT.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| (n < budget()).then_some(n + 1)).is_ok();
    take() || (evict(false) > 0 && take())
}

/// Opens a file for reading. If the process has no free descriptor, closes cached files first, then waits briefly for other
/// threads' reads to finish.
pub(crate) fn open_to_read(path: &Path) -> std::io::Result<File> {
    const TRIES: usize = 20;
    let mut tries = 0;
    loop {
        match File::open(path) {
            Err(error) if tries < TRIES && error.raw_os_error().is_some_and(is_out_of_descriptors) => {
                if evict(true) == 0 {
                    tries += 1;
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            other => return other,
        }
    }
}

/// Opens a regular file (symlinks are followed); returns it with its length and times.
pub(crate) fn open_regular(path: &Path) -> Result<(File, Metadata)> {
    // Check the type before opening: opening a named pipe would wait for a writer.
    let meta = std::fs::metadata(path).map_err(|e| Error::from_io(&e, path, "stat"))?;
    if !meta.is_file() {
        let what = if meta.is_dir() { "a folder" } else { "a special file" };
        return Err(Error::new(Kind::NotAFile, format!("expected a regular file, found {what}")).at(path));
    }
    let file = open_to_read(path).map_err(|e| Error::from_io(&e, path, "open"))?;
    let meta = file.metadata().map_err(|e| Error::from_io(&e, path, "stat"))?;
    Ok((file, meta))
}

/// The slots of a dataset, for the clock.
pub(super) trait Keeper: Send + Sync {
    fn len(&self) -> usize;
    /// Closes the file in a slot if no thread reads it and it was not used since the last visit; with `any`, even if used.
    fn close(&self, slot: usize, any: bool) -> Visit;
}

/// The result of the clock's visit to a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Visit {
    Closed,
    Spared,
    Empty,
}

/// All slots of the process, and the clock's hand: an index of slots, and a slot.
struct Keepers {
    list: Vec<Weak<dyn Keeper>>,
    hand: (usize, usize),
}

static KEEPERS: ForkSafe<Keepers> = ForkSafe::new(Keepers { list: vec![], hand: (0, 0) });

/// Registers slots. The lock is only tried: an unregistered dataset keeps its files until it is dropped.
pub(super) fn list(slots: Weak<dyn Keeper>) {
    if let Some(mut keepers) = KEEPERS.try_lock() {
        keepers.list.retain(|keeper| keeper.strong_count() > 0);
        keepers.list.push(slots);
    }
}

/// Cached files that the clock visits to free one. Few, so that a cyclic access to more files than descriptors does not evict
/// every file before its next use.
const VISITS: usize = 4;
/// Slots that it inspects, including empty ones.
const LOOKS: usize = 256;

/// Closes cached files not used lately; returns their number. In an emergency also used ones, up to a sixteenth of the budget.
fn evict(emergency: bool) -> usize {
    let most = if emergency { (budget() / 16).max(1) } else { 1 };
    let (mut visits, mut looks) = if emergency { (usize::MAX, usize::MAX) } else { (VISITS, LOOKS) };
    let Some(mut keepers) = KEEPERS.try_lock() else { return 0 };
    let Keepers { list, hand } = &mut *keepers;
    let (mut closed, mut passed) = (0, 0);
    while closed < most && visits > 0 && looks > 0 && passed <= list.len() {
        let Some(keeper) = list.get(hand.0).and_then(Weak::upgrade).filter(|k| hand.1 < k.len()) else {
            *hand = (if hand.0 + 1 < list.len() { hand.0 + 1 } else { 0 }, 0);
            passed += 1;
            continue;
        };
        let visit = keeper.close(hand.1, emergency);
        hand.1 += 1;
        looks -= 1;
        visits -= usize::from(visit != Visit::Empty);
        closed += usize::from(visit == Visit::Closed);
    }
    closed
}
