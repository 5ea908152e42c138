//! Places that keep what was opened.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, RwLock, Weak};

use super::descriptors::{self, Keeper, Visit, budget};
use crate::error::Result;

/// Places that keep opened files: file `n` lives in slot `n % len`. A slot is only ever *tried*, never waited for, so that
/// one locked by a thread that does not exist in a forked child costs that child an extra `open` and nothing else.
///
/// Kept files share one budget of descriptors over all datasets. When it is spent, a clock looks for one that was not used
/// since it last came by: an idle dataset gives its descriptors to those that are read.
#[derive(Debug)]
pub(crate) struct Slots<T: Opened + 'static> {
    slots: Arc<Box<[FileSlot<T>]>>,
}

#[derive(Debug)]
struct FileSlot<T> {
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

impl<T: Opened + 'static> Slots<T> {
    pub(crate) fn new(files: u64) -> Slots<T> {
        // More than the budget of kept descriptors would never fill.
        let len = usize::try_from(files).unwrap_or(usize::MAX).min(budget()).max(1);
        let slot = |_| FileSlot { held: RwLock::new(None), used: AtomicBool::new(false) };
        let slots: Arc<Box<[FileSlot<T>]>> = Arc::new((0..len).map(slot).collect());
        descriptors::list(Arc::downgrade(&slots) as Weak<dyn Keeper>);
        Slots { slots }
    }

    /// A file that is kept.
    pub(crate) fn kept(&self, number: u64) -> Option<Arc<T>> {
        let slot = &self.slots[(number % self.slots.len() as u64) as usize];
        let guard = slot.held.try_read().ok()?;
        let (held, file) = guard.as_ref()?;
        if *held != number {
            return None;
        }
        // Most often it is set already, and a line that is only read stays in every processor's cache.
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(Arc::clone(file))
    }

    /// A file that is kept, or else opened now.
    #[inline]
    pub(crate) fn get(&self, number: u64, open: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        if let Some(kept) = self.kept(number) {
            return Ok(kept);
        }
        let slot = &self.slots[(number % self.slots.len() as u64) as usize];
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

impl<T: Opened + 'static> Keeper for Box<[FileSlot<T>]> {
    fn len(&self) -> usize {
        <[FileSlot<T>]>::len(self)
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
