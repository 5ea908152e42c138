//! Kernels for x86 with AVX-512 (F, BW). The `unsafe` here: vector instructions and raw pointers inside two slices.
//!
//! A conversion reads 32 elements as two registers of 16 float32, and writes them as whole cache lines: one of a 16-bit type,
//! two of float32, four of float64. Float64 becomes float32 by rounding to nearest, or to odd if a second rounding follows.
//! Elements before the first line boundary and after the last group of 32 are part of a group that overlaps others; when
//! streaming, and in short rows, they go through a block on the stack.
#![allow(unsafe_code, reason = "vector instructions, for a processor that has them")]

use core::arch::x86_64::*;
use std::is_x86_feature_detected;
use std::ops::Range;

use super::portable;
use super::stores::{Conversion, Float, Stores};

/// Elements per step.
const STEP: usize = 32;
/// Bytes of a cache line.
const LINE: usize = 64;
/// Copies outside this range are left to the C library.
const COPY_FROM: usize = 256;

#[inline]
fn detected() -> bool {
    is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw")
}

/// Copies if these instructions pay for this length; returns whether it did.
#[inline]
pub fn copy(src: &[u8], dst: &mut [u8], stores: Stores<'_>) -> bool {
    if src.len() < COPY_FROM || src.len() != dst.len() || !detected() {
        return false;
    }
    // SAFETY: the features were detected; both slices have this length and, as `dst` is exclusive, do not overlap.
    unsafe {
        if stores.stream() {
            copy_lines::<true>(src.as_ptr(), dst.as_mut_ptr(), src.len());
        } else {
            copy_lines::<false>(src.as_ptr(), dst.as_mut_ptr(), src.len());
        }
    }
    true
}

/// Whether some magnitude is in a range; `None` without these instructions.
#[inline]
pub fn any_within(element: usize, bytes: &[u8], first: u64, end: u64) -> Option<bool> {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl")]
    fn vectorised(element: usize, bytes: &[u8], first: u64, end: u64) -> bool {
        portable::any_within(element, bytes, first, end)
    }
    // SAFETY: the features were detected.
    (detected() && is_x86_feature_detected!("avx512vl")).then(|| unsafe { vectorised(element, bytes, first, end) })
}

/// The conversion between two types; `None` for equal types, or without these instructions.
pub fn conversion(from: Float, to: Float) -> Option<Conversion> {
    use Float::{BF16, F16, F32, F64};
    if !detected() {
        return None;
    }
    Some(match (from, to) {
        (F16, F32) => f16_to_f32,
        (F16, BF16) => f16_to_bf16,
        (F16, F64) => f16_to_f64,
        (BF16, F32) => bf16_to_f32,
        (BF16, F16) => bf16_to_f16,
        (BF16, F64) => bf16_to_f64,
        (F32, F16) => f32_to_f16,
        (F32, BF16) => f32_to_bf16,
        (F32, F64) => f32_to_f64,
        (F64, F16) => f64_to_f16,
        (F64, BF16) => f64_to_bf16,
        (F64, F32) => f64_to_f32,
        (F16, F16) | (BF16, BF16) | (F32, F32) | (F64, F64) => return None,
    })
}

/// Bytes from `at` to the next line boundary.
pub(super) fn to_line(at: *const u8) -> usize {
    at.addr().wrapping_neg() % LINE
}

/// Copies `n` bytes, whole lines of `dst` with single stores.
///
/// # Safety
/// Both ranges are valid, and do not overlap.
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy_lines<const STREAM: bool>(src: *const u8, dst: *mut u8, n: usize) {
    let head = to_line(dst).min(n);
    // SAFETY: every access is at `at + 64 <= n`, `at + 256 <= n`, or masked to the bytes left of `n`.
    unsafe {
        copy_some(src, dst, head);
        let mut at = head;
        while at + 4 * LINE <= n {
            let (from, to) = (src.add(at), dst.add(at));
            let a = _mm512_loadu_si512(from.cast());
            let b = _mm512_loadu_si512(from.add(LINE).cast());
            let c = _mm512_loadu_si512(from.add(2 * LINE).cast());
            let d = _mm512_loadu_si512(from.add(3 * LINE).cast());
            put::<STREAM>(to, a);
            put::<STREAM>(to.add(LINE), b);
            put::<STREAM>(to.add(2 * LINE), c);
            put::<STREAM>(to.add(3 * LINE), d);
            at += 4 * LINE;
        }
        while at + LINE <= n {
            put::<STREAM>(dst.add(at), _mm512_loadu_si512(src.add(at).cast()));
            at += LINE;
        }
        copy_some(src.add(at), dst.add(at), n - at);
    }
}

/// Copies fewer than 64 bytes.
///
/// # Safety
/// Both ranges are valid.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn copy_some(src: *const u8, dst: *mut u8, n: usize) {
    let mask = (1u64 << n) - 1;
    // SAFETY: masked to `n` bytes; masked-out bytes are not accessed.
    unsafe { _mm512_mask_storeu_epi8(dst.cast(), mask, _mm512_maskz_loadu_epi8(mask, src.cast())) };
}

/// Stores a line; streams only to a line boundary.
///
/// # Safety
/// 64 bytes from `at` are valid, and a line if `STREAM`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn put<const STREAM: bool>(at: *mut u8, line: __m512i) {
    // SAFETY: as above.
    unsafe {
        if STREAM {
            _mm512_stream_si512(at.cast(), line);
        } else {
            _mm512_storeu_si512(at.cast(), line);
        }
    }
}

macro_rules! kernel {
    ($name:ident: $read:ident, $from:literal, $write:ident, $to:literal, $over:expr) => {
        fn $name(src: &[u8], dst: &mut [u8], stores: Stores<'_>) -> bool {
            /// # Safety
            /// `n` elements are valid at both.
            #[target_feature(enable = "avx512f,avx512bw")]
            unsafe fn run<const STREAM: bool>(src: *const u8, dst: *mut u8, n: usize) -> bool {
                let head = (to_line(dst) / $to).min(n);
                let mut at = head;
                // SAFETY: every step ends at `n` or before; `head` and the rest are fewer than 32 elements each.
                unsafe {
                    // Cached stores may overlap; a line that was streamed is not written again.
                    let overlap = !STREAM && n >= STEP;
                    let mut over = if overlap { step::<false>(src, dst) } else { some(src, dst, head) };
                    while at + STEP <= n {
                        over |= step::<STREAM>(src.add(at * $from), dst.add(at * $to));
                        at += STEP;
                    }
                    if overlap {
                        at = n - STEP;
                        over |= step::<false>(src.add(at * $from), dst.add(at * $to));
                    } else {
                        over |= some(src.add(at * $from), dst.add(at * $to), n - at);
                    }
                    over != 0
                }
            }
            /// Converts 32 elements.
            ///
            /// # Safety
            /// They are valid at both, and `dst` is at a line boundary if `STREAM`.
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw")]
            unsafe fn step<const STREAM: bool>(src: *const u8, dst: *mut u8) -> __mmask16 {
                // SAFETY: as above.
                unsafe {
                    let (a, b) = ($read(src), $read(src.add(STEP / 2 * $from)));
                    $write::<STREAM>(dst, a, b);
                    within(a, $over) | within(b, $over)
                }
            }
            /// Converts at most 32 elements.
            ///
            /// # Safety
            /// `n` elements are valid at both.
            #[target_feature(enable = "avx512f,avx512bw")]
            unsafe fn some(src: *const u8, dst: *mut u8, n: usize) -> __mmask16 {
                if n == 0 {
                    return 0;
                }
                let (mut from, mut to) = ([0u8; STEP * $from], [0u8; STEP * $to]);
                // SAFETY: `n <= 32` elements fit the blocks.
                unsafe {
                    src.copy_to_nonoverlapping(from.as_mut_ptr(), n * $from);
                    let (from, to) = (from.as_ptr(), to.as_mut_ptr());
                    let over = step::<false>(from, to);
                    to.copy_to_nonoverlapping(dst, n * $to);
                    over
                }
            }
            let n = (src.len() / $from).min(dst.len() / $to);
            let (src, dst) = (src.as_ptr(), dst.as_mut_ptr());
            // SAFETY: only `conversion` returns this function, after it detected the features; both slices hold `n` elements. A
            // line boundary is a whole number of elements away, or nothing is streamed.
            unsafe {
                if stores.stream() && to_line(dst).is_multiple_of($to) {
                    run::<true>(src, dst, n)
                } else {
                    run::<false>(src, dst, n)
                }
            }
        }
    };
}

/// Magnitudes of float32, as bits, at which a value may have become infinite: half a step above the largest number of the
/// target, below infinity; float64 rounded to odd keeps its side of these even numbers. Float64 that becomes float32 is
/// infinite already: its source decides.
const TO_F16: Range<u32> = 0x477f_f000..0x7f80_0000;
const TO_BF16: Range<u32> = 0x7f7f_8000..0x7f80_0000;
const INFINITE: Range<u32> = 0x7f80_0000..0x7f80_0001;
const NEVER: Range<u32> = 0..0;

kernel!(f16_to_f32: read_f16, 2, write_f32, 4, NEVER);
kernel!(f16_to_bf16: read_f16, 2, write_bf16, 2, NEVER);
kernel!(f16_to_f64: read_f16, 2, write_f64, 8, NEVER);
kernel!(bf16_to_f32: read_bf16, 2, write_f32, 4, NEVER);
kernel!(bf16_to_f16: read_bf16, 2, write_f16, 2, TO_F16);
kernel!(bf16_to_f64: read_bf16, 2, write_f64, 8, NEVER);
kernel!(f32_to_f16: read_f32, 4, write_f16, 2, TO_F16);
kernel!(f32_to_bf16: read_f32, 4, write_bf16, 2, TO_BF16);
kernel!(f32_to_f64: read_f32, 4, write_f64, 8, NEVER);
kernel!(f64_to_f16: read_f64_to_odd, 8, write_f16, 2, TO_F16);
kernel!(f64_to_bf16: read_f64_to_odd, 8, write_bf16, 2, TO_BF16);
kernel!(f64_to_f32: read_f64, 8, write_f32, 4, INFINITE);

macro_rules! reads {
    ($($(#[$doc:meta])* $name:ident($src:ident) $body:block)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// 16 elements are valid at `src`.
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw")]
            unsafe fn $name($src: *const u8) -> __m512 {
                // SAFETY: loads of 16 elements.
                unsafe { $body }
            }
        )*
    };
}

reads! {
    /// Reads float16.
    read_f16(src) { _mm512_cvtph_ps(_mm256_loadu_si256(src.cast())) }
    /// Reads bfloat16.
    read_bf16(src) {
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast()))))
    }
    /// Reads float32.
    read_f32(src) { _mm512_loadu_ps(src.cast()) }
    /// Reads float64, rounded to nearest.
    read_f64(src) {
        join(_mm512_cvtpd_ps(_mm512_loadu_pd(src.cast())), _mm512_cvtpd_ps(_mm512_loadu_pd(src.add(LINE).cast())))
    }
    /// Reads float64, rounded to odd.
    read_f64_to_odd(src) {
        to_odd(_mm512_loadu_pd(src.cast()), _mm512_loadu_pd(src.add(LINE).cast()))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn join(low: __m256, high: __m256) -> __m512 {
    let low = _mm512_castpd256_pd512(_mm256_castps_pd(low));
    _mm512_castpd_ps(_mm512_insertf64x4::<1>(low, _mm256_castps_pd(high)))
}

/// The elements whose magnitude is in a range.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn within(x: __m512, range: Range<u32>) -> __mmask16 {
    if range.is_empty() {
        return 0;
    }
    let magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX));
    let above = _mm512_sub_epi32(magnitude, _mm512_set1_epi32(range.start as i32));
    _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32((range.end - range.start) as i32))
}

/// Rounds to odd: toward zero, then sets the last bit of inexact results.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn to_odd(low: __m512d, high: __m512d) -> __m512 {
    const TOWARD_ZERO: i32 = _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC;
    let cut_low = _mm512_cvt_roundpd_ps::<TOWARD_ZERO>(low);
    let cut_high = _mm512_cvt_roundpd_ps::<TOWARD_ZERO>(high);
    let inexact_low = _mm512_cmp_pd_mask::<_CMP_NEQ_OQ>(_mm512_cvtps_pd(cut_low), low);
    let inexact_high = _mm512_cmp_pd_mask::<_CMP_NEQ_OQ>(_mm512_cvtps_pd(cut_high), high);
    let inexact = u16::from(inexact_high) << 8 | u16::from(inexact_low);
    let cut = _mm512_castps_si512(join(cut_low, cut_high));
    _mm512_castsi512_ps(_mm512_mask_or_epi32(cut, inexact, cut, _mm512_set1_epi32(1)))
}

macro_rules! writes {
    ($($(#[$doc:meta])* $name:ident($dst:ident, $a:ident, $b:ident) $body:block)*) => {
        $(
            $(#[$doc])*
            ///
            /// # Safety
            /// 32 elements are valid at `dst`, which is at a line boundary if `STREAM`.
            #[inline]
            #[target_feature(enable = "avx512f,avx512bw")]
            unsafe fn $name<const STREAM: bool>($dst: *mut u8, $a: __m512, $b: __m512) {
                // SAFETY: stores of 32 elements in whole lines.
                unsafe { $body }
            }
        )*
    };
}

writes! {
    /// Writes float32.
    write_f32(dst, a, b) {
        put::<STREAM>(dst, _mm512_castps_si512(a));
        put::<STREAM>(dst.add(LINE), _mm512_castps_si512(b));
    }
    /// Writes float16, rounded to nearest.
    write_f16(dst, a, b) {
        let a = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(a);
        let b = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(b);
        put::<STREAM>(dst, _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b));
    }
    /// Writes bfloat16, rounded to nearest.
    write_bf16(dst, a, b) {
        put::<STREAM>(dst, _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow(a)), narrow(b)));
    }
    /// Writes float64.
    write_f64(dst, a, b) {
        put::<STREAM>(dst, lower(a));
        put::<STREAM>(dst.add(LINE), upper(a));
        put::<STREAM>(dst.add(2 * LINE), lower(b));
        put::<STREAM>(dst.add(3 * LINE), upper(b));
    }
}

/// [`portable`]'s rounding to bfloat16. AVX512_BF16's instruction would flush subnormal numbers to zero.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn narrow(x: __m512) -> __m256i {
    let bits = _mm512_castps_si512(x);
    let upper = _mm512_srli_epi32::<16>(bits);
    let last = _mm512_and_si512(upper, _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    let quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
    _mm512_cvtepi32_epi16(_mm512_mask_blend_epi32(nan, _mm512_srli_epi32::<16>(rounded), quiet))
}

/// The lower eight as float64.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn lower(x: __m512) -> __m512i {
    _mm512_castpd_si512(_mm512_cvtps_pd(_mm512_castps512_ps256(x)))
}

/// The upper eight as float64.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn upper(x: __m512) -> __m512i {
    _mm512_castpd_si512(_mm512_cvtps_pd(_mm256_castpd_ps(_mm512_extractf64x4_pd::<1>(_mm512_castps_pd(x)))))
}
