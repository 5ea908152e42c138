//! Products of codes and scales, for x86 with AVX-512 (F, BW, VBMI). The `unsafe` here: vector instructions and raw pointers
//! inside slices.
//!
//! A code is a byte, so a table of 256 results of 16 bits is enough for one type of code and one scale. The table is in
//! eight registers, the low and the high bytes in four each, and one instruction looks up 64 codes in two of these.
//! With one scale for a row, the results are the products: they are computed once, and the row is looked up. Otherwise
//! they are the values of the codes, all of which are exact in bfloat16; they are widened, multiplied and rounded.
//!
//! A step makes 64 products, in whole cache lines. Those before the first line boundary and after the last step are loaded and
//! stored with masks.
#![allow(unsafe_code, reason = "vector instructions, for a processor that has them")]

use core::arch::x86_64::*;
use std::is_x86_feature_detected;

use super::avx512::{narrow, put, to_line};
use super::codes::{CodeValues, Product, ScaledCode};
use super::stores::Stores;

/// Codes per step.
const STEP: usize = 64;
/// Bytes of a cache line.
const LINE: usize = 64;

fn detected() -> bool {
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vbmi")
}

/// Multiplies by one scale, rounded already; returns false without these instructions. `dst` has an element per code.
pub fn times(code: ScaledCode, to: Product, src: &[u8], scale: f32, dst: &mut [u8], stores: Stores<'_>) -> bool {
    if !detected() || dst.len() != src.len() * to.size() {
        return false;
    }
    // SAFETY: the features were detected.
    unsafe {
        match to {
            Product::BF16 => looked_up(code, src, scale, dst, stores),
            Product::F32 => multiplied(code, src, scale, dst, stores),
        }
    }
    true
}

/// Multiplies each code by its own scale, a float32; returns false without these instructions. `dst` has an element per code.
pub fn times_each(
    code: ScaledCode,
    to: Product,
    src: &[u8],
    scales: &[[u8; 4]],
    dst: &mut [u8],
    stores: Stores<'_>,
) -> bool {
    if !detected() || dst.len() != src.len() * to.size() || scales.len() != src.len() {
        return false;
    }
    // SAFETY: the features were detected.
    unsafe {
        match to {
            Product::BF16 => each_rounded(code, src, scales, dst, stores),
            Product::F32 => each_multiplied(code, src, scales, dst, stores),
        }
    }
    true
}

/// bfloat16 products with one scale: looked up.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn looked_up(code: ScaledCode, src: &[u8], scale: f32, dst: &mut [u8], stores: Stores<'_>) {
    let products = CodeResults::of(code, scale);
    steps::<2>(src, dst, stores, |codes, _, _| products.look_up(codes));
}

/// float32 products with one scale.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn multiplied(code: ScaledCode, src: &[u8], scale: f32, dst: &mut [u8], stores: Stores<'_>) {
    let (values, scale) = (CodeResults::values(code), _mm512_set1_ps(scale));
    steps::<4>(src, dst, stores, |codes, _, _| {
        values.look_up_f32(codes).map(|value| _mm512_castps_si512(_mm512_mul_ps(value, scale)))
    });
}

/// bfloat16 products, each with its own scale.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn each_rounded(code: ScaledCode, src: &[u8], scales: &[[u8; 4]], dst: &mut [u8], stores: Stores<'_>) {
    let values = CodeResults::values(code);
    steps::<2>(src, dst, stores, |codes, at, mask| {
        let [a, b, c, d] = values.look_up_f32(codes);
        let product = |value, k| _mm512_mul_ps(value, rounded_scale(some_scales(scales, at, mask, k)));
        [narrow_pair(product(a, 0), product(b, 1)), narrow_pair(product(c, 2), product(d, 3))]
    });
}

/// float32 products, each with its own scale.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn each_multiplied(code: ScaledCode, src: &[u8], scales: &[[u8; 4]], dst: &mut [u8], stores: Stores<'_>) {
    let values = CodeResults::values(code);
    steps::<4>(src, dst, stores, |codes, at, mask| {
        let [a, b, c, d] = values.look_up_f32(codes);
        let product = |value, k| _mm512_castps_si512(_mm512_mul_ps(value, some_scales(scales, at, mask, k)));
        [product(a, 0), product(b, 1), product(c, 2), product(d, 3)]
    });
}

/// Calls `step` for up to 64 codes at a time, with their position and a bit for each code that exists; it returns one
/// line for each byte of a product. `dst` has an element per code.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn steps<const SIZE: usize>(
    src: &[u8],
    dst: &mut [u8],
    stores: Stores<'_>,
    step: impl Fn(__m512i, usize, u64) -> [__m512i; SIZE],
) {
    assert!(src.len() * SIZE == dst.len());
    let whole = |at: usize| step(load(src, at, u64::MAX), at, u64::MAX);
    let n = src.len();
    let gap = to_line(dst.as_ptr());
    let stream = stores.stream() && gap.is_multiple_of(SIZE);
    let mut at = (gap / SIZE).min(n);
    let some = |dst: &mut [u8], at: usize, count: usize| {
        if count == 0 {
            return;
        }
        let mask = (1u64 << count) - 1;
        for (i, line) in step(load(src, at, mask), at, mask).into_iter().enumerate() {
            let bytes = (count * SIZE).saturating_sub(i * LINE).min(LINE);
            let mask = u64::MAX.checked_shr((LINE - bytes) as u32).unwrap_or(0);
            // SAFETY: masked to the bytes of `count` products from `at`, which exist.
            unsafe { _mm512_mask_storeu_epi8(dst.as_mut_ptr().wrapping_add(at * SIZE + i * LINE).cast(), mask, line) };
        }
    };
    some(dst, 0, at);
    while at + STEP <= n {
        let into = dst[at * SIZE..(at + STEP) * SIZE].as_mut_ptr();
        for (i, line) in whole(at).into_iter().enumerate() {
            // SAFETY: `SIZE` lines from `into` are in the slice; it is at a line boundary if the stores are streamed.
            unsafe {
                if stream {
                    put::<true>(into.add(i * LINE), line);
                } else {
                    put::<false>(into.add(i * LINE), line);
                }
            }
        }
        at += STEP;
    }
    some(dst, at, n - at);
}

/// Codes from a position that exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn load(src: &[u8], at: usize, mask: u64) -> __m512i {
    debug_assert!(at + (64 - mask.leading_zeros()) as usize <= src.len());
    // SAFETY: only the bytes of the mask are accessed, and `steps` asks for existing ones.
    unsafe { _mm512_maskz_loadu_epi8(mask, src.as_ptr().wrapping_add(at).cast()) }
}

/// The `k`th 16 scales of a step, of codes that exist.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn some_scales(scales: &[[u8; 4]], at: usize, mask: u64, k: usize) -> __m512 {
    debug_assert!(at + (64 - mask.leading_zeros()) as usize <= scales.len());
    // SAFETY: only the scales of the mask are accessed, and there is one for each code.
    unsafe { _mm512_maskz_loadu_ps((mask >> (16 * k)) as u16, scales.as_ptr().wrapping_add(at + 16 * k).cast()) }
}

/// A result of 16 bits for each byte: the low bytes and the high bytes of those for 0 to 63, 64 to 127, 128 to 191, 192 to 255.
#[derive(Clone, Copy)]
struct CodeResults {
    low: [__m512i; 4],
    high: [__m512i; 4],
}

impl CodeResults {
    /// The values, exact in bfloat16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn values(code: ScaledCode) -> CodeResults {
        let CodeValues { low, high, .. } = code.values();
        let of = |bytes: &[u8; 256]| {
            [0, 64, 128, 192].map(|at| {
                // SAFETY: the slice has 64 bytes.
                unsafe { _mm512_loadu_si512(bytes[at..at + 64].as_ptr().cast()) }
            })
        };
        CodeResults { low: of(low), high: of(high) }
    }

    /// The products with a scale, in bfloat16.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn of(code: ScaledCode, scale: f32) -> CodeResults {
        let (values, by) = (&code.values().f32, _mm512_set1_ps(scale));
        let zero = _mm512_setzero_si512();
        let mut made = CodeResults { low: [zero; 4], high: [zero; 4] };
        for (i, values) in values.as_chunks::<64>().0.iter().enumerate() {
            let product = |k: usize| {
                // SAFETY: 16 of the 64 values.
                let values = unsafe { _mm512_loadu_ps(values.as_ptr().add(16 * k)) };
                narrow(_mm512_mul_ps(values, by))
            };
            let first = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(product(0)), product(1));
            let last = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(product(2)), product(3));
            made.low[i] = bytes_of(first, last);
            made.high[i] = bytes_of(_mm512_srli_epi16::<8>(first), _mm512_srli_epi16::<8>(last));
        }
        made
    }

    /// The results of 64 codes, in order.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn look_up(&self, codes: __m512i) -> [__m512i; 2] {
        // Bytes are interleaved within 128 bits: the first half of the codes goes to the lower halves of these.
        let codes = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), codes);
        let upper = _mm512_movepi8_mask(codes);
        // The index of two registers has 7 bits; the highest bit of a code is ignored.
        let found = |of: &[__m512i; 4]| {
            let (below, above) =
                (_mm512_permutex2var_epi8(of[0], codes, of[1]), _mm512_permutex2var_epi8(of[2], codes, of[3]));
            _mm512_mask_blend_epi8(upper, below, above)
        };
        let (low, high) = (found(&self.low), found(&self.high));
        [_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)]
    }

    /// The results of 64 codes as float32, in order.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
    fn look_up_f32(&self, codes: __m512i) -> [__m512; 4] {
        let [first, last] = self.look_up(codes);
        [
            widen(_mm512_castsi512_si256(first)),
            widen(_mm512_extracti64x4_epi64::<1>(first)),
            widen(_mm512_castsi512_si256(last)),
            widen(_mm512_extracti64x4_epi64::<1>(last)),
        ]
    }
}

/// The lower bytes of 64 elements of 16 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn bytes_of(first: __m512i, last: __m512i) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)), _mm512_cvtepi16_epi8(last))
}

/// bfloat16 as float32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn widen(x: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
}

/// Rounded to bfloat16: the upper half of each element; the lower half is undefined. Not for NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rounded(bits: __m512i) -> __m512i {
    let last = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)))
}

/// A scale as `Product::BF16.rounded` makes it.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn rounded_scale(scale: __m512) -> __m512 {
    let bits = _mm512_castps_si512(scale);
    let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(scale, scale);
    let quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x40_0000));
    let either = _mm512_mask_blend_epi32(nan, rounded(bits), quiet);
    _mm512_castsi512_ps(_mm512_and_si512(either, _mm512_set1_epi32(0xffff_0000u32 as i32)))
}

/// 32 float32 as bfloat16: equal to [`narrow`], faster unless some are NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn narrow_pair(a: __m512, b: __m512) -> __m512i {
    if (_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(a, a) | _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(b, b)) != 0 {
        return _mm512_inserti64x4::<1>(_mm512_castsi256_si512(narrow(a)), narrow(b));
    }
    // Elements 1, 3, 5 to 63 of 16 bits of both.
    const UPPER: [u16; 32] = {
        let mut made = [0; 32];
        let mut i = 0;
        while i < 32 {
            made[i] = 2 * i as u16 + 1;
            i += 1;
        }
        made
    };
    // SAFETY: 64 bytes.
    let upper = unsafe { _mm512_loadu_si512(UPPER.as_ptr().cast()) };
    _mm512_permutex2var_epi16(rounded(_mm512_castps_si512(a)), upper, rounded(_mm512_castps_si512(b)))
}
