//! The folder of a cache, and its state in this process.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::geometry::SECTOR;
use crate::error::is_out_of_descriptors;
use crate::threads::Renewed;

/// Units kept free for the folder's own files.
const OWN_UNITS: u64 = 8;
/// Longest wait, in ms, for another process's download, after which this process downloads the same bytes without
/// caching them.
const PATIENCE: u32 = if cfg!(test) { 2_000 } else { 10_000 };
/// The longest wait, in ms, after a wait that failed: the holder may be a child of a killed process, and hold its lock
/// for hours.
const IMPATIENCE: u32 = 100;

/// Longest wait for the lock of the budget: it is held for milliseconds, or by a stopped process, or by a child of a killed one.
const LOCK_PATIENCE: Duration = Duration::from_secs(5);
/// Waits for this lock are short for this many seconds after a wait that failed. A short wait is as long as a working
/// process holds the lock.
const HURRY: u32 = 60;
const SHORT_WAIT: Duration = Duration::from_millis(20);

/// The position of the clock: objects in the order of their names, and the next block.
#[derive(Debug, Default)]
pub struct Hand {
    pub names: Vec<String>,
    pub at: usize,
    pub block: u64,
}

/// An open cache folder.
#[derive(Debug)]
pub struct Folder {
    pub root: PathBuf,
    /// In bytes.
    pub limit: u64,
    /// Identifies the boot: after a crash of the machine the ledger may be older than the states.
    pub boot: u64,
    /// Set when the disk is full or cannot be written: nothing more is stored.
    stopped: AtomicBool,
    warning: Renewed<Option<String>>,
    warned: AtomicBool,
    pub hand: Renewed<Hand>,
    pub hits: AtomicU64,
    pub misses: AtomicU64,
    patience: AtomicU32,
    /// Waits for the lock of the budget are short until this time, in seconds of [`Folder::now`].
    hurried: AtomicU32,
    started: Instant,
}

impl Folder {
    pub fn new(root: PathBuf, limit: u64) -> Folder {
        Folder {
            root,
            limit,
            boot: boot(),
            stopped: AtomicBool::new(false),
            warning: Renewed::new(None, None),
            warned: AtomicBool::new(false),
            hand: Renewed::new(Hand::default(), Hand::default()),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            patience: AtomicU32::new(PATIENCE),
            hurried: AtomicU32::new(0),
            started: Instant::now(),
        }
    }

    pub fn objects(&self) -> PathBuf {
        self.root.join("objects")
    }

    pub fn object(&self, name: &str) -> PathBuf {
        self.objects().join(name)
    }

    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// The limit of the budget, in units.
    pub fn limit_units(&self) -> u64 {
        (self.limit / SECTOR).saturating_sub(OWN_UNITS)
    }

    /// Sorted names of all objects.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let mut names = vec![];
        for entry in std::fs::read_dir(self.objects())? {
            names.extend(entry?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Stops storing, with a warning. A lack of descriptors passes, and an object may be too large for the
    /// file system: then only this read is not cached.
    pub fn failed(&self, doing: &str, error: &io::Error) {
        let passes = matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::FileTooLarge)
            || error.raw_os_error().is_some_and(is_out_of_descriptors);
        if passes {
            return;
        }
        self.stop(&format!("cannot {doing}: {error}"));
    }

    /// Stops storing, with a warning.
    pub fn stop(&self, reason: &str) {
        self.stopped.store(true, Ordering::Relaxed);
        if !self.warned.swap(true, Ordering::Relaxed)
            && let Some(mut warning) = self.warning.lock_briefly()
        {
            *warning = Some(format!("{}: {reason}; reading continues without the disk cache", self.root.display()));
        }
    }

    pub fn take_warning(&self) -> Option<String> {
        self.warning.lock_briefly()?.take()
    }

    /// How long to wait for another process now.
    pub fn patience(&self) -> Duration {
        Duration::from_millis(u64::from(self.patience.load(Ordering::Relaxed)))
    }

    /// Records whether the last wait failed: then the next wait is short.
    pub fn waited(&self, in_vain: bool) {
        self.patience.store(if in_vain { IMPATIENCE } else { PATIENCE }, Ordering::Relaxed);
    }

    /// How long to wait for the lock of the budget now.
    pub fn lock_patience(&self) -> Duration {
        if self.now() < self.hurried.load(Ordering::Relaxed) { SHORT_WAIT } else { LOCK_PATIENCE }
    }

    /// Records whether a wait for the lock of the budget failed: then waits for it are short for a while.
    pub fn waited_for_lock(&self, in_vain: bool) {
        let until = if in_vain { self.now() + HURRY } else { 0 };
        if in_vain || self.hurried.load(Ordering::Relaxed) != 0 {
            self.hurried.store(until, Ordering::Relaxed);
        }
    }

    /// Seconds since the folder was opened, at least 1.
    pub fn now(&self) -> u32 {
        self.started.elapsed().as_secs() as u32 + 1
    }
}

fn boot() -> u64 {
    let text = std::fs::read(Path::new("/proc/sys/kernel/random/boot_id")).unwrap_or_default();
    let low = crc32c::crc32c(&text);
    u64::from(crc32c::crc32c_append(low, &text)) << 32 | u64::from(low)
}
