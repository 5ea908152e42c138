//! A cache of opened files.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use super::descriptors::{self, Keeper, Visit, budget};
use crate::error::Result;
use crate::threads::SharedLock;

/// A cache of opened files: file `n` uses slot `n % len`. A slot's lock is only *tried*, never waited for: if a thread that does
/// not exist in a forked child holds it, the child only needs an extra `open`.
///
/// Cached files of all datasets share one budget of descriptors. When it is used up, a clock algorithm closes a file that was not
/// used since its last visit, so that idle datasets release descriptors to active ones.
#[derive(Debug)]
pub(crate) struct Slots<T: Opened + 'static> {
    slots: Arc<Box<[FileSlot<T>]>>,
}

#[derive(Debug)]
struct FileSlot<T> {
    /// A file's number, and the file.
    held: SharedLock<Option<(u64, Arc<T>)>>,
    /// Whether it was used since the clock's last visit.
    used: AtomicBool,
}

/// An opened file that can be cached.
pub(crate) trait Opened: Send + Sync {
    /// Whether it may stay open.
    fn may_keep(&self) -> bool;

    /// Whether dropping it releases a descriptor.
    fn holds_descriptor(&self) -> bool {
        true
    }
}

impl<T: Opened + 'static> Slots<T> {
    pub(crate) fn new(files: u64) -> Slots<T> {
        // Slots beyond the budget of descriptors would stay empty.
        Slots::with(usize::try_from(files).unwrap_or(usize::MAX).min(budget()))
    }

    /// Slots for objects without descriptors.
    pub(crate) fn without_descriptors(objects: usize) -> Slots<T> {
        Slots::with(objects)
    }

    fn with(slots: usize) -> Slots<T> {
        let len = slots.max(1);
        let slot = |_| FileSlot { held: SharedLock::new(None), used: AtomicBool::new(false) };
        let slots: Arc<Box<[FileSlot<T>]>> = Arc::new((0..len).map(slot).collect());
        descriptors::list(Arc::downgrade(&slots) as Weak<dyn Keeper>);
        Slots { slots }
    }

    /// A cached file.
    pub(crate) fn kept(&self, number: u64) -> Option<Arc<T>> {
        let slot = &self.slots[(number % self.slots.len() as u64) as usize];
        let guard = slot.held.try_read()?;
        let (held, file) = guard.as_ref()?;
        if *held != number {
            return None;
        }
        // Usually it is set already; a cache line that is only read stays shared between processors.
        if !slot.used.load(Ordering::Relaxed) {
            slot.used.store(true, Ordering::Relaxed);
        }
        Some(Arc::clone(file))
    }

    /// A cached file, or else opens it.
    #[inline]
    pub(crate) fn get(&self, number: u64, open: impl FnOnce() -> Result<T>) -> Result<Arc<T>> {
        self.get_if(number, |_| true, open)
    }

    /// A cached file for which `valid` is true, or else opens it.
    #[inline]
    pub(crate) fn get_if(
        &self,
        number: u64,
        valid: impl FnOnce(&T) -> bool,
        open: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        if let Some(kept) = self.kept(number).filter(|kept| valid(kept)) {
            return Ok(kept);
        }
        let slot = &self.slots[(number % self.slots.len() as u64) as usize];
        let file = Arc::new(open()?);
        if file.may_keep()
            && let Some(mut guard) = slot.held.try_write()
        {
            // Another thread may have been faster; either file is valid.
            *guard = Some((number, Arc::clone(&file)));
            slot.used.store(true, Ordering::Relaxed);
        }
        Ok(file)
    }

    /// Drops all cached files; those in use are closed when their readers finish.
    pub(crate) fn clear(&self) {
        for slot in self.slots.iter() {
            if let Some(mut guard) = slot.held.try_write() {
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
        let Some(mut guard) = slot.held.try_write() else { return Visit::Spared };
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
