//! Conversions between numbers of files and numbers of memory.

/// A number of bytes or elements in memory. Lossless: [`crate`] is not built for 32 bits.
#[inline(always)]
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits: lib.rs refuses others")]
pub const fn to_usize(n: u64) -> usize {
    n as usize
}
