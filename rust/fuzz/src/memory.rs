//! An allocator that counts, so that a number in a file cannot make a parser ask for memory that the file does not justify.
#![allow(unsafe_code, reason = "an allocator is unsafe by its trait")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use actshard_core::memory::output::page_bytes;

/// The system's allocator. It counts for the whole process, because parsers hand work to the threads of a pool.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes allocated and not freed; the most of these since a count began; all bytes allocated since the process began.
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
static TOTAL: AtomicUsize = AtomicUsize::new(0);

fn grow(bytes: usize) {
    TOTAL.fetch_add(bytes, Ordering::Relaxed);
    let live = LIVE.fetch_add(bytes, Ordering::Relaxed) + bytes;
    PEAK.fetch_max(live, Ordering::Relaxed);
}

fn shrink(bytes: usize) {
    LIVE.fetch_sub(bytes, Ordering::Relaxed);
}

// SAFETY: every call goes to the system's allocator with the caller's own arguments; this type only counts bytes, in atomic
// numbers that allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller keeps the promises of `GlobalAlloc::alloc`.
        unsafe { System.alloc(layout) }
    }

    // Zeros that nobody touches cost no memory, but count: a file's number must not choose them either.
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grow(layout.size());
        // SAFETY: the caller keeps the promises of `GlobalAlloc::alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > layout.size() {
            grow(size - layout.size());
        } else {
            shrink(layout.size() - size);
        }
        // SAFETY: the caller keeps the promises of `GlobalAlloc::realloc`.
        unsafe { System.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        shrink(layout.size());
        // SAFETY: the caller keeps the promises of `GlobalAlloc::dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

/// The bytes that the counted calls of a run allocated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// All bytes that were allocated, also those that were freed again, and pages of outputs.
    pub total: usize,
    /// The most bytes in use at once within a call, with what earlier calls left in use; without pages of outputs.
    pub peak: usize,
}

static RUN_TOTAL: AtomicUsize = AtomicUsize::new(0);
static RUN_PEAK: AtomicUsize = AtomicUsize::new(0);
/// Bytes in use when the run began.
static RUN_LIVE: AtomicUsize = AtomicUsize::new(0);

fn allocated() -> usize {
    TOTAL.load(Ordering::Relaxed) + page_bytes()
}

/// Calls a parser under test and counts what it allocates, on whatever thread. What a target allocates outside of this, for its
/// oracle, is not counted. Calls are not nested.
pub fn counted<T>(parser: impl FnOnce() -> T) -> T {
    let total = allocated();
    PEAK.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
    let value = parser();
    RUN_TOTAL.fetch_add(allocated() - total, Ordering::Relaxed);
    let peak = PEAK.load(Ordering::Relaxed).saturating_sub(RUN_LIVE.load(Ordering::Relaxed));
    RUN_PEAK.fetch_max(peak, Ordering::Relaxed);
    value
}

/// What the [`counted`] calls in `run` allocated. One run at a time: the counters belong to the process.
pub(crate) fn usage(run: impl FnOnce()) -> Usage {
    RUN_TOTAL.store(0, Ordering::Relaxed);
    RUN_PEAK.store(0, Ordering::Relaxed);
    RUN_LIVE.store(LIVE.load(Ordering::Relaxed), Ordering::Relaxed);
    run();
    Usage { total: RUN_TOTAL.load(Ordering::Relaxed), peak: RUN_PEAK.load(Ordering::Relaxed) }
}
