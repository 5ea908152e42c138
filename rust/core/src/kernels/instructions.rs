//! Prefetches and fences. The `unsafe` here: single instructions that never fault.
#![allow(unsafe_code, reason = "single instructions that never fault")]

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches the first cache lines: a random row's page walk and first misses then overlap with the copy of the previous row
/// (measured: 12.7 compared with 11.0 GB/s for 3 KiB rows on two cores).
#[inline]
pub fn prefetch(bytes: &[u8]) {
    const LINES: usize = 6;
    for line in bytes.chunks_exact(LINE).take(LINES) {
        prefetch_line(line);
    }
}

#[inline]
fn prefetch_line(line: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: prefetching never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().cast()) };
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: prefetching never faults and changes no register.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{line}]", line = in(reg) line.as_ptr(), options(nostack, preserves_flags, readonly))
    };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = line;
}

/// Orders streamed stores before all later stores of this thread.
pub fn fence() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: part of SSE, which every x86-64 has.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
}
