//! Plain loops, compiled a second time for wide vectors. The `unsafe` here: calls of functions for instructions that were found.
#![allow(unsafe_code, reason = "a call of a function for instructions that were found")]

/// Runs `work`, compiled for AVX2 if the processor has it. Its loops give equal results: the compiler neither reorders nor fuses
/// floating-point operations. For loops of whole rows; what `work` calls must be inlined to profit.
#[inline]
pub fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2.
        return unsafe { with_avx2(work) };
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// As [`wide`], also compiled for AVX-512: for loops that multiply integers of 64 bits, for which it has an instruction, and for
/// those that need more than 16 registers.
#[inline]
pub fn widest<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512dq") {
        // SAFETY: the processor has AVX-512 F and DQ.
        return unsafe { with_avx512(work) };
    }
    wide(work)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}
