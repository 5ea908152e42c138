//! Scaled codes: float8 or int8 elements times a scale, as bfloat16 or float32.
//!
//! The scale is rounded to the output type first, then the product, as a multiplication in that type does. Products are computed
//! in float32: of a code (at most 8 significant bits) and a bfloat16 scale it is exact, so each element is rounded once.
//!
//! The loops here are for processors without special kernels (`avx512_scaled`), and the oracle of those kernels.

use half::bf16;

#[cfg(target_arch = "x86_64")]
use super::avx512_scaled;
pub use super::codes::{Product, ScaledCode};
use super::codes::{e4m3, e5m2, int8};
use super::portable::narrow_bf16;
use super::stores::Stores;
use super::wide::wide;

/// Multiplies codes by one scale. `dst` has an element per code.
pub fn times(code: ScaledCode, to: Product, src: &[u8], scale: f32, dst: &mut [u8], stores: Stores<'_>) {
    #[cfg(target_arch = "x86_64")]
    if avx512_scaled::times(code, to, src, to.rounded(scale), dst, stores) {
        return;
    }
    let _ = stores;
    portable_times(code, to, src, scale, dst);
}

/// Multiplies each code by its own scale: `scales` are float32, little-endian, one per code.
pub fn times_each(code: ScaledCode, to: Product, src: &[u8], scales: &[u8], dst: &mut [u8], stores: Stores<'_>) {
    #[cfg(target_arch = "x86_64")]
    if avx512_scaled::times_each(code, to, src, &scales.as_chunks::<4>().0[..src.len()], dst, stores) {
        return;
    }
    let _ = stores;
    portable_times_each(code, to, src, scales, dst);
}

/// [`times`] without processor-specific instructions.
pub fn portable_times(code: ScaledCode, to: Product, src: &[u8], scale: f32, dst: &mut [u8]) {
    let scale = to.rounded(scale);
    with(code, to, src, dst, move |_| scale);
}

/// [`times_each`] without processor-specific instructions.
pub fn portable_times_each(code: ScaledCode, to: Product, src: &[u8], scales: &[u8], dst: &mut [u8]) {
    let scales = &scales.as_chunks::<4>().0[..src.len()];
    with(code, to, src, dst, move |i| to.rounded(f32::from_le_bytes(scales[i])));
}

#[inline(always)]
fn with(code: ScaledCode, to: Product, src: &[u8], dst: &mut [u8], scale: impl Fn(usize) -> f32 + Copy) {
    wide(
        #[inline(always)]
        || match code {
            ScaledCode::E4M3 => each(to, src, dst, e4m3, scale),
            ScaledCode::E5M2 => each(to, src, dst, e5m2, scale),
            ScaledCode::I8 => each(to, src, dst, int8, scale),
        },
    );
}

#[inline(always)]
fn each(to: Product, src: &[u8], dst: &mut [u8], value: impl Fn(u8) -> f32, scale: impl Fn(usize) -> f32) {
    match to {
        Product::BF16 => {
            for (i, (s, d)) in src.iter().zip(dst.as_chunks_mut::<2>().0).enumerate() {
                *d = narrow_bf16(value(*s) * scale(i)).to_bits().to_le_bytes();
            }
        }
        Product::F32 => {
            for (i, (s, d)) in src.iter().zip(dst.as_chunks_mut::<4>().0).enumerate() {
                *d = (value(*s) * scale(i)).to_le_bytes();
            }
        }
    }
}

/// The value of a code, by the definition of its type: the oracle of the kernels. Some codes are NaN.
pub fn value_of(code: ScaledCode, byte: u8) -> f64 {
    let (bits, bias, infinite) = match code {
        ScaledCode::I8 => return f64::from(byte as i8),
        ScaledCode::E4M3 => (3u32, 7, None),
        ScaledCode::E5M2 => (2u32, 15, Some(0x7cu8)),
    };
    let magnitude = byte & 0x7f;
    let sign = if byte & 0x80 == 0 { 1.0 } else { -1.0 };
    match infinite {
        Some(first) if magnitude == first => return sign * f64::INFINITY,
        Some(first) if magnitude > first => return f64::NAN,
        None if magnitude == 0x7f => return f64::NAN,
        _ => {}
    }
    let exponent = i32::from(magnitude >> bits);
    let fraction = f64::from(magnitude & ((1 << bits) - 1)) / f64::from(1u32 << bits);
    let found =
        if exponent == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(exponent - bias) };
    sign * found
}

/// The product of a code and a scale, rounded by the `half` crate and the processor: the oracle of the kernels, as bits.
pub fn product_of(code: ScaledCode, to: Product, byte: u8, scale: f32) -> u32 {
    let value = value_of(code, byte);
    match to {
        Product::BF16 => u32::from(bf16::from_f64(value * bf16::from_f32(scale).to_f64()).to_bits()),
        Product::F32 => (value as f32 * scale).to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CODES: [ScaledCode; 3] = [ScaledCode::E4M3, ScaledCode::E5M2, ScaledCode::I8];
    const PRODUCTS: [Product; 2] = [Product::BF16, Product::F32];

    fn is_nan(to: Product, bits: u32) -> bool {
        match to {
            Product::BF16 => bits & 0x7fff > 0x7f80,
            Product::F32 => f32::from_bits(bits).is_nan(),
        }
    }

    fn bits(to: Product, bytes: &[u8]) -> Vec<u32> {
        let one = |b: &[u8]| b.iter().rev().fold(0, |n, byte| n << 8 | u32::from(*byte));
        bytes.chunks_exact(to.size()).map(one).collect()
    }

    /// Equal bits, or both NaN.
    fn same(to: Product, found: &[u32], wanted: &[u32]) -> bool {
        found.len() == wanted.len()
            && found.iter().zip(wanted).all(|(f, w)| f == w || (is_nan(to, *f) && is_nan(to, *w)))
    }

    fn check(code: ScaledCode, to: Product, src: &[u8], scales: &[f32]) {
        let mut out = vec![0; src.len() * to.size()];
        let listed: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        times_each(code, to, src, &listed, &mut out, Stores::Cached);
        let wanted: Vec<u32> = src.iter().zip(scales).map(|(s, scale)| product_of(code, to, *s, *scale)).collect();
        assert!(same(to, &bits(to, &out), &wanted), "{code:?} {to:?} each");
        for (s, scale) in src.iter().zip(scales) {
            let mut one = vec![0; to.size()];
            times(code, to, &[*s], *scale, &mut one, Stores::Cached);
            assert!(same(to, &bits(to, &one), &[product_of(code, to, *s, *scale)]), "{code:?} {to:?} {s} {scale}");
        }
    }

    #[test]
    fn all_codes_with_all_kinds_of_scales_are_those_of_the_oracle() {
        let all: Vec<u8> = (0..=255).collect();
        let scales =
            [1.0, 0.0, -0.0, 1e-12, 0.1, 3.4e38, f32::MIN_POSITIVE, 1e-45, 448.0, -2.5, f32::INFINITY, f32::NAN];
        for code in CODES {
            for to in PRODUCTS {
                for scale in scales {
                    check(code, to, &all, &[scale; 256]);
                    let mut out = vec![0; 256 * to.size()];
                    times(code, to, &all, scale, &mut out, Stores::Cached);
                    let wanted: Vec<u32> = all.iter().map(|b| product_of(code, to, *b, scale)).collect();
                    assert!(same(to, &bits(to, &out), &wanted), "{code:?} {to:?} {scale}");
                }
            }
        }
    }

    #[test]
    fn values_are_those_of_the_types() {
        for (code, byte, value) in [
            (ScaledCode::E4M3, 0x7e, 448.0),
            (ScaledCode::E4M3, 0x01, 2f64.powi(-9)),
            (ScaledCode::E4M3, 0x88, -(2f64.powi(-6))),
            (ScaledCode::E5M2, 0x7b, 57_344.0),
            (ScaledCode::E5M2, 0x01, 2f64.powi(-16)),
            (ScaledCode::E5M2, 0xfc, f64::NEG_INFINITY),
            (ScaledCode::I8, 0x80, -128.0),
        ] {
            assert_eq!(value_of(code, byte), value, "{code:?} {byte}");
        }
        assert!(value_of(ScaledCode::E4M3, 0xff).is_nan() && value_of(ScaledCode::E5M2, 0x7d).is_nan());
    }

    /// Rows of any length and alignment, also streamed, equal those of the portable loops; no byte outside them is
    /// written.
    #[test]
    fn kernels_write_what_the_portable_loops_write_and_no_more() {
        let src: Vec<u8> = (0..400u32).map(|i| (i * 37) as u8).collect();
        let scales: Vec<u8> = (0..400).flat_map(|i| (i as f32 * 0.3 - 50.0).to_le_bytes()).collect();
        for (code, to) in CODES.iter().flat_map(|code| PRODUCTS.map(|to| (*code, to))) {
            for n in (0..200).chain([255, 256, 257, 300]) {
                let skipped = [0, 1, 2, 7, 32, 62, 63, 64];
                for (before, stream) in skipped.into_iter().flat_map(|skipped| [(skipped, false), (skipped, true)]) {
                    let (src, scales) = (&src[before..before + n], &scales[4 * before..4 * (before + n)]);
                    let end = before + n * to.size();
                    let (mut found, mut each) = (vec![7; end + 65], vec![7; end + 65]);
                    let (mut wanted, mut wanted_each) = (found.clone(), each.clone());
                    super::super::storing(stream, |stores| {
                        times(code, to, src, 0.3, &mut found[before..end], stores);
                        times_each(code, to, src, scales, &mut each[before..end], stores);
                    });
                    portable_times(code, to, src, 0.3, &mut wanted[before..end]);
                    portable_times_each(code, to, src, scales, &mut wanted_each[before..end]);
                    assert_eq!(found[..before], wanted[..before]);
                    assert_eq!(found[end..], wanted[end..]);
                    assert_eq!(each[..before], wanted_each[..before]);
                    assert_eq!(each[end..], wanted_each[end..]);
                    for (found, wanted) in [(found, wanted), (each, wanted_each)] {
                        assert!(
                            same(to, &bits(to, &found[before..end]), &bits(to, &wanted[before..end])),
                            "{code:?} {to:?} {n}"
                        );
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn any_scale_gives_the_bits_of_the_oracle(
            pairs in prop::collection::vec((any::<u8>(), any::<u32>()), 1..70),
        ) {
            let (src, scales): (Vec<u8>, Vec<f32>) = pairs.into_iter().map(|(s, b)| (s, f32::from_bits(b))).unzip();
            for code in CODES {
                for to in PRODUCTS {
                    check(code, to, &src, &scales);
                }
            }
        }
    }
}
