//! Plain loops, compiled a second time for wide vectors. The `unsafe` here: calls of functions for instructions that were found.
#![allow(unsafe_code, reason = "a call of a function for instructions that were found")]

/// Runs `work`, compiled for AVX2 and BMI2 if the processor has both. Its loops give equal results: the compiler neither reorders nor fuses
/// floating-point operations. For loops of whole rows; what `work` calls must be inlined to profit.
#[inline]
pub fn wide<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("bmi1")
        && std::arch::is_x86_feature_detected!("bmi2")
    {
        // SAFETY: the processor has AVX2, BMI1 and BMI2.
        return unsafe { with_avx2(work) };
    }
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1,bmi2")]
fn with_avx2<R>(work: impl FnOnce() -> R) -> R {
    work()
}

/// As [`wide`], also compiled for AVX-512: for loops that multiply integers of 64 bits, for which it has an instruction.
#[inline]
pub fn wide_integers<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    if has_avx512() {
        // SAFETY: the processor has AVX-512 F and DQ.
        return unsafe { with_avx512(work) };
    }
    wide(work)
}

/// Work whose loops are compiled for each set of instructions. `run` must be `#[inline(always)]`: a large closure is a function of its
/// own, compiled for the least processor.
pub trait Loops {
    /// What the work returns.
    type Output;
    /// Does the work.
    fn run(self) -> Self::Output;
}

/// Runs loops compiled for AVX-512 or AVX2, as in [`wide`]. AVX-512 has 32 registers, which sums of several rows need.
#[inline]
pub fn widest<L: Loops>(loops: L) -> L::Output {
    #[cfg(target_arch = "x86_64")]
    {
        if has_avx512() {
            // SAFETY: the processor has AVX-512 F and DQ.
            return unsafe { loops_with_avx512(loops) };
        }
        if std::arch::is_x86_feature_detected!("avx2") {
            // SAFETY: the processor has AVX2.
            return unsafe { loops_with_avx2(loops) };
        }
    }
    loops.run()
}

#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    std::arch::is_x86_feature_detected!("avx512f") && std::arch::is_x86_feature_detected!("avx512dq")
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn with_avx512<R>(work: impl FnOnce() -> R) -> R {
    work()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512dq")]
fn loops_with_avx512<L: Loops>(loops: L) -> L::Output {
    loops.run()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn loops_with_avx2<L: Loops>(loops: L) -> L::Output {
    loops.run()
}
