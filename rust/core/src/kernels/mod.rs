//! Vector code: copies, casts and prefetches, chosen for the processor at run time.
//!
//! Each kernel has a portable equivalent in [`portable`], which also serves as its oracle: both give equal bytes for
//! all input, NaN payloads included. The kernels for x86 with AVX-512 are in `avx512`; other processors run the
//! portable loops, with the half-precision instructions that the `half` crate finds (F16C, NEON).
//!
//! [`Stores::Streaming`] writes whole cache lines past the caches. A cached store reads the line first, so that a copy moves
//! three bytes for two; a streamed line is written only. Measured on two cores (Xeon with AMX, 48 MiB of random 3 KiB rows):
//! memcpy 8.8 GB/s, AVX-512 stores 11.0, streamed 16.1. The output is then in memory, not in a cache: a consumer that reads it at
//! once is slower below about 24 MiB (see [`STREAM_FROM`]).

#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_scaled;
mod codes;
mod instructions;
pub mod planes;
pub mod portable;
pub mod prefix;
pub mod quantise;
pub mod scaled;
mod stores;
mod wide;

pub use instructions::prefetch;
pub use stores::{Conversion, Fenced, Float, Stores, storing};
pub use wide::{Loops, wide, wide_integers, widest};

/// Outputs of at least this many bytes are streamed. Rows gathered by two threads and summed by one thread afterwards, cached
/// and streamed: 1 MiB 0.08 and 0.13 ms, 8 MiB 0.94 and 1.04, 16 MiB 1.9 and 2.0, 32 MiB 4.3 and 4.0, 64 MiB 9.0 and 8.4.
pub const STREAM_FROM: usize = 32 << 20;
/// Shorter rows are never streamed: a partly written line costs more than a cached store.
pub const STREAM_ROW: usize = 1 << 10;

/// Whether an output of `bytes` bytes with rows of `row` bytes should be streamed.
pub fn should_stream(bytes: usize, row: usize) -> bool {
    bytes >= STREAM_FROM && row >= STREAM_ROW
}

/// The fastest conversion between two different types; `None` for equal types.
pub fn conversion(from: Float, to: Float) -> Option<Conversion> {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernel) = avx512::conversion(from, to) {
        return Some(kernel);
    }
    portable::conversion(from, to)
}

/// Copies bytes; both slices have one length.
#[inline]
pub fn copy(src: &[u8], dst: &mut [u8], stores: Stores<'_>) {
    #[cfg(target_arch = "x86_64")]
    if avx512::copy(src, dst, stores) {
        return;
    }
    let _ = stores;
    dst.copy_from_slice(src);
}

/// Whether the magnitude (the bits without the sign) of some element is in `first..end`.
#[inline]
pub fn any_within(element: usize, bytes: &[u8], first: u64, end: u64) -> bool {
    #[cfg(target_arch = "x86_64")]
    if let Some(any) = avx512::any_within(element, bytes, first, end) {
        return any;
    }
    portable::any_within(element, bytes, first, end)
}

/// The number of elements whose magnitude is in `first..end`.
pub fn count_within(element: usize, bytes: &[u8], first: u64, end: u64) -> u64 {
    portable::count_within(element, bytes, first, end)
}
