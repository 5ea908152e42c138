//! Where bytes lie. [`Files`] is what the rest of the core knows: numbered files that hold a dataset's rows, opened when
//! first touched and asked for their length again before rows are taken from them. [`FileTable`] lists them,
//! [`chunks`] computes their names.

mod chain;
pub mod chunks;
pub mod codecs;
pub mod decoded;
mod files;
pub mod inflate;
pub mod lz4;
pub mod mmap;
mod open;
pub mod output;
pub mod pread;
pub mod shards;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, RwLock, TryLockError, Weak};

pub(crate) use files::map_or_read;
pub use files::{FileTable, RowFile, RowsIn};
pub use open::{Body, OpenFile, Place, View};
pub(crate) use open::{budget, descriptors_are_scarce, files_at_once, open_regular, outside};

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// Through a mapping: fastest from the page cache, and the only way to give views.
    Mmap,
    /// Positioned reads into the caller's memory: never maps, so nothing a file does later can fault.
    Pread,
}

impl Io {
    /// `"mmap"`, `"pread"`, or `None` for another word.
    pub fn from_name(name: &str) -> Option<Io> {
        match name {
            "mmap" => Some(Io::Mmap),
            "pread" => Some(Io::Pread),
            _ => None,
        }
    }
}

/// What all rows of a dataset have in common.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Elements.
    pub width: usize,
    /// Their stored type.
    pub dtype: DType,
    /// `width` times the type's size.
    pub bytes: usize,
}

impl Row {
    /// Rows of 1 byte to 4 GiB.
    pub fn new(width: u64, dtype: DType) -> Result<Row> {
        let size = dtype.size().ok_or_else(|| {
            Error::new(Kind::Unsupported, format!("rows of {} cannot be read as numpy arrays", dtype.name()))
        })?;
        let bytes = usize::try_from(width)
            .ok()
            .and_then(|w| w.checked_mul(size))
            .filter(|bytes| (1..=1 << 32).contains(bytes))
            .ok_or_else(|| {
                Error::new(Kind::Format, format!("a row of {width} x {} is not 1 byte to 4 GiB", dtype.name()))
            })?;
        Ok(Row { width: width as usize, dtype, bytes })
    }
}

/// The numbered files that hold a dataset's rows, all rows of one width and type.
pub trait Files: Send + Sync {
    /// What a row is.
    fn row(&self) -> Row;

    /// The file, open and long enough.
    fn get(&self, file: u64) -> Result<Arc<OpenFile>>;

    /// Bits that hold any address inside a file; the bits above hold any file's number.
    fn address_bits(&self) -> u32 {
        40
    }

    /// Addresses from one row to the next of its run, in this file: what [`Place`] says, before it is open.
    fn stride(&self, _file: u64) -> u64 {
        1
    }

    /// Consecutive files that the rows of this one are split over, this being the first.
    fn split(&self, _file: u64) -> u64 {
        1
    }

    /// Whether opening a file decodes it, so that going back and forth between files is to be avoided.
    fn decodes(&self) -> bool {
        false
    }
}

/// Places that keep opened files: file `n` lives in slot `n % len`. A slot is only ever *tried*, never waited for, so that
/// one locked by a thread that does not exist in a forked child costs that child an extra `open` and nothing else.
///
/// Kept files share one budget of descriptors over all datasets. When it is spent, a clock looks for one that was not used
/// since it last came by: an idle dataset gives its descriptors to those that are read.
#[derive(Debug)]
pub(crate) struct Slots<T: Opened + 'static> {
    slots: Arc<Box<[Slot<T>]>>,
}

#[derive(Debug)]
struct Slot<T> {
    /// A file's number and the file.
    held: RwLock<Option<(u64, Arc<T>)>>,
    /// Used since the clock came by.
    used: AtomicBool,
}

/// What is opened, and kept open as long as descriptors last.
pub(crate) trait Opened: Send + Sync {
    /// Whether it may be kept.
    fn may_keep(&self) -> bool;

    /// Whether a descriptor is free when it is dropped.
    fn holds_descriptor(&self) -> bool {
        true
    }
}

impl Opened for OpenFile {
    fn may_keep(&self) -> bool {
        OpenFile::may_keep(self)
    }
}

impl<T: Opened + 'static> Slots<T> {
    pub(crate) fn new(files: u64) -> Slots<T> {
        // More than the budget of kept descriptors would never fill.
        let len = usize::try_from(files).unwrap_or(usize::MAX).min(budget()).max(1);
        let slot = |_| Slot { held: RwLock::new(None), used: AtomicBool::new(false) };
        let slots: Arc<Box<[Slot<T>]>> = Arc::new((0..len).map(slot).collect());
        // Only ever tried, like the slots: a dataset that is not listed keeps its files until it is dropped.
        if let Ok(mut keepers) = KEEPERS.try_lock() {
            keepers.list.retain(|keeper| keeper.strong_count() > 0);
            keepers.list.push(Arc::downgrade(&slots) as Weak<dyn Keeper>);
        }
        Slots { slots }
    }

    pub(crate) fn get(&self, number: u64, open: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        let slot = &self.slots[(number % self.slots.len() as u64) as usize];
        if let Ok(guard) = slot.held.try_read()
            && let Some((held, file)) = guard.as_ref()
            && *held == number
        {
            // Most often it is set already, and a line that is only read stays in every processor's cache.
            if !slot.used.load(Ordering::Relaxed) {
                slot.used.store(true, Ordering::Relaxed);
            }
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(open()?);
        if file.may_keep()
            && let Ok(mut guard) = slot.held.try_write()
        {
            // Another thread may have been first; either file will do.
            *guard = Some((number, Arc::clone(&file)));
            slot.used.store(true, Ordering::Relaxed);
        }
        Ok(file)
    }

    /// Drops all kept files; those in use are closed when their readers finish.
    pub(crate) fn clear(&self) {
        for slot in self.slots.iter() {
            if let Ok(mut guard) = slot.held.try_write() {
                *guard = None;
            }
        }
    }
}

/// Slots of any dataset, as the clock sees them.
trait Keeper: Send + Sync {
    fn len(&self) -> usize;
    /// Closes the file in a slot, if no thread reads it and it was not used since the last visit; used or not, if `any`.
    fn close(&self, slot: usize, any: bool) -> Visit;
}

impl<T: Opened + 'static> Keeper for Box<[Slot<T>]> {
    fn len(&self) -> usize {
        <[Slot<T>]>::len(self)
    }

    fn close(&self, slot: usize, any: bool) -> Visit {
        let Some(slot) = self.get(slot) else { return Visit::Empty };
        let Ok(mut guard) = slot.held.try_write() else { return Visit::Spared };
        let Some((_, file)) = guard.as_ref().filter(|(_, file)| file.holds_descriptor()) else { return Visit::Empty };
        if (slot.used.swap(false, Ordering::Relaxed) && !any) || Arc::strong_count(file) > 1 {
            return Visit::Spared;
        }
        let closed = guard.take();
        drop(guard);
        drop(closed);
        Visit::Closed
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Visit {
    Closed,
    Spared,
    Empty,
}

/// All slots of the process, and the clock's hand: which of them, and which slot.
struct Keepers {
    list: Vec<Weak<dyn Keeper>>,
    hand: (usize, usize),
}

static KEEPERS: Mutex<Keepers> = Mutex::new(Keepers { list: vec![], hand: (0, 0) });

/// Kept files that the clock visits to make room for one. Few, so that files that are all used in turn, more of them than
/// descriptors, do not push each other out every time.
const VISITS: usize = 4;
/// And slots that it looks into, empty ones included.
const LOOKS: usize = 256;

/// Closes kept files that were not used lately; returns how many. In an emergency, used ones too, a sixteenth of all that may
/// be kept.
fn evict(emergency: bool) -> usize {
    let most = if emergency { (budget() / 16).max(1) } else { 1 };
    let (mut visits, mut looks) = if emergency { (usize::MAX, usize::MAX) } else { (VISITS, LOOKS) };
    let mut keepers = match KEEPERS.try_lock() {
        Ok(keepers) => keepers,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return 0,
    };
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
