//! Quantises bfloat16 rows to float8 or int8 codes with scales, and measures the error of reading them back.
//!
//! ```text
//! scale = max(largest finite magnitude / largest code, 1e-12)            per token, layer, channel, or any of these together
//! code  = value / scale, rounded to nearest, ties to even, clamped
//! ```
//!
//! In float32, as hs-connectors 0.9.0 does (`quantize_tensor_to_fp8`, a scale per token). The error is that of the products that
//! [`super::scaled`] returns in bfloat16.

use super::codes::{Product, ScaledCode};
use super::portable::{narrow_bf16, widen_bf16};
use super::wide::wide;

/// The smallest scale: rows of zeros have it.
const SMALLEST: f32 = 1e-12;
/// Sums per row, so that loops vectorise and do not depend on the vector's width.
const LANES: usize = 16;

/// The errors of quantisation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CodingLoss {
    /// The largest absolute error of a finite value.
    pub largest: f64,
    /// The largest error of a row, relative to its L2 norm.
    pub worst_row: f64,
    /// The sum of squared errors of finite values.
    pub errors: f64,
    /// The sum of squared finite values.
    pub squares: f64,
    /// Finite values beyond the largest code.
    pub saturated: u64,
    /// Finite values other than zero that became zero.
    pub vanished: u64,
    /// Values that are NaN, and remain so.
    pub nan: u64,
    /// NaN and infinite values that the codes cannot express, and finite ones whose product is infinite.
    pub refused: u64,
    /// The row of the first of them.
    pub first_refused: Option<u64>,
}

/// Rows of one example.
#[derive(Clone, Copy, Debug)]
pub struct Quantised {
    /// The meaning of codes.
    pub code: ScaledCode,
    /// Tokens, layers, width.
    pub shape: [usize; 3],
    /// The axes along which scales differ.
    pub per: [bool; 3],
}

impl Quantised {
    /// Number of scales.
    pub fn scales(&self) -> usize {
        self.shape.iter().zip(self.per).map(|(n, per)| if per { *n } else { 1 }).product()
    }

    /// The first scale of a row.
    fn of_row(&self, row: usize) -> usize {
        let [_, layers, width] = self.shape;
        let mut scale = if self.per[0] { row / layers } else { 0 };
        if self.per[1] {
            scale = scale * layers + row % layers;
        }
        if self.per[2] { scale * width } else { scale }
    }

    /// Fills codes and scales from bfloat16 rows, little-endian, of the order tokens, layers, width.
    ///
    /// # Panics
    /// If the slices do not have the lengths of the shape.
    pub fn fill(&self, rows: &[u8], codes: &mut [u8], scales: &mut [f32]) -> CodingLoss {
        let width = self.shape[2];
        let rows = rows.as_chunks::<2>().0;
        let elements: usize = self.shape.iter().product();
        assert!(rows.len() == elements && codes.len() == elements && scales.len() == self.scales());
        let mut lost = CodingLoss::default();
        if elements == 0 {
            return lost;
        }
        scales.fill(0.0);
        for (row, values) in rows.chunks_exact(width).enumerate() {
            let first = self.of_row(row);
            wide(|| match self.per[2] {
                true => largest_each(values, &mut scales[first..first + width]),
                false => scales[first] = scales[first].max(largest(values)),
            });
        }
        let most = limit(self.code);
        for scale in scales.iter_mut() {
            *scale = (*scale / most).max(SMALLEST);
        }
        for (row, (values, codes)) in rows.chunks_exact(width).zip(codes.chunks_exact_mut(width)).enumerate() {
            let first = self.of_row(row);
            let of_row = if self.per[2] { &scales[first..first + width] } else { &scales[first..=first] };
            wide(|| code_row(self.code, values, of_row, codes));
            let before = lost.refused;
            wide(|| measure(self.code, values, of_row, codes, &mut lost));
            if lost.refused > before && lost.first_refused.is_none() {
                lost.first_refused = Some(row as u64);
            }
        }
        lost
    }
}

/// The largest finite code.
fn limit(code: ScaledCode) -> f32 {
    match code {
        ScaledCode::E4M3 => 448.0,
        ScaledCode::E5M2 => 57_344.0,
        ScaledCode::I8 => 127.0,
    }
}

#[inline(always)]
fn value(bytes: [u8; 2]) -> f32 {
    f32::from_bits(u32::from(u16::from_le_bytes(bytes)) << 16)
}

/// The magnitude, 0 if it is not finite.
#[inline(always)]
fn finite(x: f32) -> f32 {
    let magnitude = x.abs();
    if magnitude < f32::INFINITY { magnitude } else { 0.0 }
}

#[inline(always)]
fn largest(values: &[[u8; 2]]) -> f32 {
    let (blocks, rest) = values.as_chunks::<LANES>();
    let mut most = [0f32; LANES];
    for block in blocks {
        for (m, v) in most.iter_mut().zip(block) {
            *m = m.max(finite(value(*v)));
        }
    }
    rest.iter().fold(most.into_iter().fold(0.0, f32::max), |m, v| m.max(finite(value(*v))))
}

#[inline(always)]
fn largest_each(values: &[[u8; 2]], most: &mut [f32]) {
    for (m, v) in most.iter_mut().zip(values) {
        *m = m.max(finite(value(*v)));
    }
}

/// `scales` has one for all, or one for each.
#[inline(always)]
fn code_row(code: ScaledCode, values: &[[u8; 2]], scales: &[f32], codes: &mut [u8]) {
    match code {
        ScaledCode::E4M3 => encode_row(values, scales, codes, e4m3),
        ScaledCode::E5M2 => encode_row(values, scales, codes, e5m2),
        ScaledCode::I8 => encode_row(values, scales, codes, int8),
    }
}

#[inline(always)]
fn encode_row(values: &[[u8; 2]], scales: &[f32], codes: &mut [u8], encode: impl Fn(f32) -> u8) {
    if let [scale] = scales {
        for (c, v) in codes.iter_mut().zip(values) {
            *c = encode(value(*v) / scale);
        }
    } else {
        for ((c, v), scale) in codes.iter_mut().zip(values).zip(scales) {
            *c = encode(value(*v) / scale);
        }
    }
}

/// Rounds to float8 with these bits of fraction and this bias. Branch-free so that it vectorises.
#[inline(always)]
fn float8(x: f32, fraction: u32, bias: u32, most: f32, infinite: u32, nan: u32) -> u8 {
    let magnitude = x.abs().min(most);
    let bits = magnitude.to_bits();
    let shift = 23 - fraction;
    let normal =
        ((bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)) >> shift).wrapping_sub((127 - bias) << fraction);
    // Below the normal numbers, codes are multiples of the smallest; adding 2^23 rounds to a whole number.
    let steps = magnitude * f32::from_bits((127 + bias - 1 + fraction) << 23);
    let small = (steps + 8_388_608.0).to_bits() & 0xff;
    let found = if bits < (128 - bias) << 23 { small } else { normal };
    let found = if x.abs() == f32::INFINITY { infinite } else { found };
    let found = if x.is_nan() { nan } else { found };
    (found | (x.to_bits() >> 24 & 0x80)) as u8
}

#[inline(always)]
fn e4m3(x: f32) -> u8 {
    float8(x, 3, 7, 448.0, 0x7f, 0x7f)
}

#[inline(always)]
fn e5m2(x: f32) -> u8 {
    float8(x, 2, 15, 57_344.0, 0x7c, 0x7e)
}

/// 0 for NaN.
#[inline(always)]
fn int8(x: f32) -> u8 {
    let clamped = if x.is_nan() { 0.0 } else { x.clamp(-127.0, 127.0) };
    // 1.5 * 2^23: the sum's last bits are the nearest whole number.
    (clamped + 12_582_912.0).to_bits() as u8
}

/// Compares the products of a row's codes with its values.
#[inline(always)]
fn measure(code: ScaledCode, values: &[[u8; 2]], scales: &[f32], codes: &[u8], lost: &mut CodingLoss) {
    let table = &code.values().f32;
    let beyond = match code {
        ScaledCode::E4M3 => 464.0,
        ScaledCode::E5M2 => 61_440.0,
        ScaledCode::I8 => 127.5,
    };
    let (mut most, mut errors, mut squares) = (0f64, [0f64; LANES], [0f64; LANES]);
    let one = if let [scale] = scales { Some(Product::BF16.rounded(*scale)) } else { None };
    for (i, (bytes, byte)) in values.iter().zip(codes).enumerate() {
        let x = value(*bytes);
        let scale = scales[if one.is_some() { 0 } else { i }];
        if !x.is_finite() {
            let kept = match code {
                ScaledCode::E4M3 => x.is_nan(),
                ScaledCode::E5M2 => true,
                ScaledCode::I8 => false,
            };
            lost.nan += u64::from(kept && x.is_nan());
            lost.refused += u64::from(!kept);
            continue;
        }
        let product = table[usize::from(*byte)] * one.unwrap_or_else(|| Product::BF16.rounded(scale));
        let back = widen_bf16(narrow_bf16(product));
        if back.is_infinite() {
            lost.refused += 1;
            continue;
        }
        let error = f64::from(x) - f64::from(back);
        most = most.max(error.abs());
        errors[i % LANES] += error * error;
        squares[i % LANES] += f64::from(x) * f64::from(x);
        lost.saturated += u64::from((x / scale).abs() > beyond);
        lost.vanished += u64::from(x != 0.0 && back == 0.0);
    }
    let (errors, squares) = (errors.iter().sum::<f64>(), squares.iter().sum::<f64>());
    lost.largest = lost.largest.max(most);
    if squares > 0.0 {
        lost.worst_row = lost.worst_row.max((errors / squares).sqrt());
    }
    lost.errors += errors;
    lost.squares += squares;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::scaled::{product_of, value_of};
    use super::*;

    const CODES: [ScaledCode; 3] = [ScaledCode::E4M3, ScaledCode::E5M2, ScaledCode::I8];

    /// The nearest code by trying all, ties to the even code; a zero has the sign of the value.
    fn nearest(code: ScaledCode, x: f32) -> u8 {
        let distance = |byte: u8| (f64::from(x) - value_of(code, byte)).abs();
        let usable = |byte: &u8| value_of(code, *byte).is_finite() && (code != ScaledCode::I8 || *byte != 0x80);
        let fits = |byte: &u8| code == ScaledCode::I8 || (*byte >= 0x80) == x.is_sign_negative();
        (0..=255)
            .filter(usable)
            .filter(fits)
            .min_by(|a, b| distance(*a).total_cmp(&distance(*b)).then((a & 1).cmp(&(b & 1))))
            .unwrap_or(0)
    }

    fn encoded(code: ScaledCode, x: f32) -> u8 {
        match code {
            ScaledCode::E4M3 => e4m3(x),
            ScaledCode::E5M2 => e5m2(x),
            ScaledCode::I8 => int8(x),
        }
    }

    #[test]
    fn codes_and_the_numbers_halfway_between_them_are_rounded_to_the_nearest_even() {
        for code in CODES {
            let mut values: Vec<f64> = (0..=255).map(|b| value_of(code, b)).filter(|v| v.is_finite()).collect();
            values.sort_by(f64::total_cmp);
            let halves: Vec<f64> = values.windows(2).map(|pair| (pair[0] + pair[1]) / 2.0).collect();
            for x in values.into_iter().chain(halves).chain([1e9, -1e9, 1e-30, -1e-30]) {
                for x in [x as f32, (x as f32).next_up(), (x as f32).next_down()] {
                    assert_eq!(encoded(code, x), nearest(code, x), "{code:?} {x:e}");
                }
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_are_kept_or_counted() {
        let bytes = |values: &[f32]| -> Vec<u8> { values.iter().flat_map(|v| narrow_bf16(*v).to_le_bytes()).collect() };
        let rows = bytes(&[1.0, 2.0, f32::NAN, 4.0, f32::INFINITY, 8.0]);
        for (code, found, nan, refused) in [
            (ScaledCode::E4M3, [0x7f, 0x7f], 1, 1),
            (ScaledCode::E5M2, [0x7e, 0x7c], 1, 0),
            (ScaledCode::I8, [0, 127], 0, 2),
        ] {
            let how = Quantised { code, shape: [3, 1, 2], per: [true, false, false] };
            let (mut codes, mut scales) = ([0; 6], [0.0; 3]);
            let lost = how.fill(&rows, &mut codes, &mut scales);
            assert_eq!([codes[2], codes[4]], found, "{code:?}");
            assert_eq!((lost.nan, lost.refused), (nan, refused), "{code:?}");
            assert_eq!(scales, [2.0, 4.0, 8.0].map(|most| most / limit(code)), "scales are those of finite values");
            assert_eq!(
                lost.first_refused,
                match code {
                    ScaledCode::E4M3 => Some(2),
                    ScaledCode::E5M2 => None,
                    ScaledCode::I8 => Some(1),
                }
            );
        }
    }

    #[test]
    fn zeros_have_the_smallest_scale_and_small_values_beside_large_ones_vanish() {
        let row: Vec<u8> = [0.0f32, -0.0, 1e-6, 1e6].iter().flat_map(|v| narrow_bf16(*v).to_le_bytes()).collect();
        let how = Quantised { code: ScaledCode::E4M3, shape: [2, 1, 2], per: [true, false, false] };
        let (mut codes, mut scales) = ([1; 4], [0.0; 2]);
        let lost = how.fill(&row, &mut codes, &mut scales);
        assert_eq!((codes, scales[0]), ([0, 0x80, 0, 0x7e], SMALLEST));
        assert_eq!((lost.vanished, lost.saturated), (1, 0));
    }

    proptest! {
        /// Scales, codes and losses equal those of plain loops, for all kinds of scales.
        #[test]
        fn codes_and_losses_are_those_of_the_oracle(
            shape in prop::array::uniform3(1usize..5),
            per in prop::array::uniform3(any::<bool>()),
            which in 0usize..3,
            bits in prop::collection::vec(any::<u16>(), 64),
        ) {
            let code = CODES[which];
            let how = Quantised { code, shape, per };
            let n: usize = shape.iter().product();
            let values: Vec<f32> = bits[..n].iter().map(|b| f32::from_bits(u32::from(*b) << 16)).collect();
            let bytes: Vec<u8> = bits[..n].iter().flat_map(|b| b.to_le_bytes()).collect();
            let (mut codes, mut scales) = (vec![0; n], vec![0.0; how.scales()]);
            let lost = how.fill(&bytes, &mut codes, &mut scales);
            let scale_of = |i: usize| {
                let place = [i / (shape[1] * shape[2]), i / shape[2] % shape[1], i % shape[2]];
                (0..3).fold(0, |at, axis| if per[axis] { at * shape[axis] + place[axis] } else { at })
            };
            let mut most = vec![0f32; how.scales()];
            for (i, v) in values.iter().enumerate().filter(|(_, v)| v.is_finite()) {
                most[scale_of(i)] = most[scale_of(i)].max(v.abs());
            }
            let (mut largest, mut saturated, mut vanished) = (0f64, 0, 0);
            for (i, v) in values.iter().enumerate() {
                let scale = (most[scale_of(i)] / limit(code)).max(1e-12);
                prop_assert_eq!(scale.to_bits(), scales[scale_of(i)].to_bits());
                if v.is_finite() {
                    prop_assert_eq!(codes[i], nearest(code, v / scale), "{} {}", v, scale);
                    let back = f32::from_bits(product_of(code, Product::BF16, codes[i], scale) << 16);
                    if back.is_infinite() {
                        continue;
                    }
                    largest = largest.max((f64::from(*v) - f64::from(back)).abs());
                    vanished += u64::from(*v != 0.0 && back == 0.0);
                    saturated += u64::from((v / scale).abs() > limit(code) * 1.1);
                }
            }
            prop_assert_eq!((lost.largest, lost.vanished, lost.saturated), (largest, vanished, saturated));
            prop_assert_eq!(lost.nan + lost.refused <= n as u64, true);
        }
    }
}
