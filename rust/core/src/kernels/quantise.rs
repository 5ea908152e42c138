//! Quantises bfloat16 or float32 rows to float8 or int8 codes with scales, and measures the error of reading them back.
//!
//! ```text
//! scale = max(largest finite magnitude / largest code, 1e-12)            per token, layer, channel, or any of these together
//! code  = value / scale, rounded to nearest, ties to even, clamped
//! ```
//!
//! In float32, as hs-connectors 0.9.0 does (`quantize_tensor_to_fp8`, a scale per token). The error is that of the products that
//! [`super::scaled`] returns, in the type of the rows.

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
    /// The sum of the cosines of rows and their products.
    pub cosines: f64,
    /// Rows that have a cosine: neither they nor their products are zero.
    pub angles: u64,
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
    /// The type of the rows, and of the products as which they are read.
    pub of: Product,
    /// Tokens, layers, width.
    pub shape: [usize; 3],
    /// The axes along which scales differ.
    pub per: [bool; 3],
    /// Whether all layers of a token are one row, for the errors of rows: blocks of its elements.
    pub joined: bool,
}

/// A stored element of a row, little-endian.
trait FloatBits: Copy {
    const OF: Product;
    fn value(self) -> f32;
}

impl FloatBits for [u8; 2] {
    const OF: Product = Product::BF16;
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_bits(u32::from(u16::from_le_bytes(self)) << 16)
    }
}

impl FloatBits for [u8; 4] {
    const OF: Product = Product::F32;
    #[inline(always)]
    fn value(self) -> f32 {
        f32::from_le_bytes(self)
    }
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

    /// Fills codes and scales from rows, little-endian, of the order tokens, layers, width.
    ///
    /// # Panics
    /// If the slices do not have the lengths of the shape.
    pub fn fill(&self, rows: &[u8], codes: &mut [u8], scales: &mut [f32]) -> CodingLoss {
        scales.fill(0.0);
        self.raise(rows, scales);
        self.finish(scales);
        self.encode(rows, codes, scales)
    }

    /// Raises `largest`, a number for each scale, to the largest finite magnitudes of rows. Returns the first row with a value that
    /// is not finite.
    ///
    /// # Panics
    /// If the slices do not have the lengths of the shape.
    pub fn raise(&self, rows: &[u8], largest: &mut [f32]) -> Option<u64> {
        match self.of {
            Product::BF16 => self.raise_of(rows.as_chunks::<2>().0, largest),
            Product::F32 => self.raise_of(rows.as_chunks::<4>().0, largest),
        }
    }

    /// Turns largest magnitudes into scales.
    pub fn finish(&self, largest: &mut [f32]) {
        let most = limit(self.code);
        for scale in largest.iter_mut() {
            *scale = (*scale / most).max(SMALLEST);
        }
    }

    /// Fills codes from rows and scales.
    ///
    /// # Panics
    /// If the slices do not have the lengths of the shape.
    pub fn encode(&self, rows: &[u8], codes: &mut [u8], scales: &[f32]) -> CodingLoss {
        match self.of {
            Product::BF16 => self.encode_of(rows.as_chunks::<2>().0, codes, scales),
            Product::F32 => self.encode_of(rows.as_chunks::<4>().0, codes, scales),
        }
    }

    fn raise_of<E: FloatBits>(&self, rows: &[E], largest: &mut [f32]) -> Option<u64> {
        assert!(rows.len() == self.shape.iter().product::<usize>() && largest.len() == self.scales());
        let width = self.shape[2];
        let mut odd = None;
        for (row, values) in rows.chunks_exact(width.max(1)).enumerate() {
            let first = self.of_row(row);
            let all_finite = wide(|| match self.per[2] {
                true => raise_each(values, &mut largest[first..first + width]),
                false => raise_one(values, &mut largest[first]),
            });
            if !all_finite && odd.is_none() {
                odd = Some(row as u64);
            }
        }
        odd
    }

    fn encode_of<E: FloatBits>(&self, rows: &[E], codes: &mut [u8], scales: &[f32]) -> CodingLoss {
        let elements: usize = self.shape.iter().product();
        assert!(rows.len() == elements && codes.len() == elements && scales.len() == self.scales());
        let mut lost = CodingLoss::default();
        if elements == 0 {
            return lost;
        }
        let width = self.shape[2];
        let of_row = if self.joined { self.shape[1] } else { 1 };
        let mut sums = RowSums::default();
        for (row, (values, codes)) in rows.chunks_exact(width).zip(codes.chunks_exact_mut(width)).enumerate() {
            let first = self.of_row(row);
            let of_values = if self.per[2] { &scales[first..first + width] } else { &scales[first..=first] };
            wide(|| code_row(self.code, values, of_values, codes));
            let before = lost.refused;
            wide(|| measure(self.code, values, of_values, codes, (&mut sums, &mut lost)));
            if lost.refused > before && lost.first_refused.is_none() {
                lost.first_refused = Some(row as u64);
            }
            if (row + 1).is_multiple_of(of_row) {
                std::mem::take(&mut sums).end(&mut lost);
            }
        }
        lost
    }
}

/// Sums over a row.
#[derive(Default)]
struct RowSums {
    errors: f64,
    squares: f64,
    products: f64,
    read: f64,
}

impl RowSums {
    fn end(self, lost: &mut CodingLoss) {
        if self.squares > 0.0 {
            lost.worst_row = lost.worst_row.max((self.errors / self.squares).sqrt());
            if self.read > 0.0 {
                lost.cosines += self.products / (self.squares.sqrt() * self.read.sqrt());
                lost.angles += 1;
            }
        }
        lost.errors += self.errors;
        lost.squares += self.squares;
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

/// The magnitude, 0 if it is not finite.
#[inline(always)]
fn finite(x: f32) -> f32 {
    let magnitude = x.abs();
    if magnitude < f32::INFINITY { magnitude } else { 0.0 }
}

/// Whether all values are finite.
#[inline(always)]
fn raise_one<E: FloatBits>(values: &[E], to: &mut f32) -> bool {
    let (blocks, rest) = values.as_chunks::<LANES>();
    let (mut most, mut odd) = ([0f32; LANES], [0u32; LANES]);
    for block in blocks {
        for ((m, o), v) in most.iter_mut().zip(&mut odd).zip(block) {
            *m = m.max(finite(v.value()));
            *o |= u32::from(!v.value().is_finite());
        }
    }
    let all = rest.iter().fold(most.into_iter().fold(0.0, f32::max), |m, v| m.max(finite(v.value())));
    *to = to.max(all);
    odd.iter().all(|o| *o == 0) && rest.iter().all(|v| v.value().is_finite())
}

/// Whether all values are finite.
#[inline(always)]
fn raise_each<E: FloatBits>(values: &[E], to: &mut [f32]) -> bool {
    let mut odd = 0u32;
    for (m, v) in to.iter_mut().zip(values) {
        *m = m.max(finite(v.value()));
        odd |= u32::from(!v.value().is_finite());
    }
    odd == 0
}

/// `scales` has one for all, or one for each.
#[inline(always)]
fn code_row<E: FloatBits>(code: ScaledCode, values: &[E], scales: &[f32], codes: &mut [u8]) {
    match code {
        ScaledCode::E4M3 => encode_row(values, scales, codes, e4m3),
        ScaledCode::E5M2 => encode_row(values, scales, codes, e5m2),
        ScaledCode::I8 => encode_row(values, scales, codes, int8),
    }
}

#[inline(always)]
fn encode_row<E: FloatBits>(values: &[E], scales: &[f32], codes: &mut [u8], encode: impl Fn(f32) -> u8) {
    if let [scale] = scales {
        for (c, v) in codes.iter_mut().zip(values) {
            *c = encode(v.value() / scale);
        }
    } else {
        for ((c, v), scale) in codes.iter_mut().zip(values).zip(scales) {
            *c = encode(v.value() / scale);
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
fn measure<E: FloatBits>(
    code: ScaledCode,
    values: &[E],
    scales: &[f32],
    codes: &[u8],
    (sums, lost): (&mut RowSums, &mut CodingLoss),
) {
    let table = &code.values().f32;
    let beyond = match code {
        ScaledCode::E4M3 => 464.0,
        ScaledCode::E5M2 => 61_440.0,
        ScaledCode::I8 => 127.5,
    };
    let (mut most, mut errors, mut squares) = (0f64, [0f64; LANES], [0f64; LANES]);
    let (mut products, mut read) = ([0f64; LANES], [0f64; LANES]);
    let one = if let [scale] = scales { Some(E::OF.rounded(*scale)) } else { None };
    for (i, (bytes, byte)) in values.iter().zip(codes).enumerate() {
        let x = bytes.value();
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
        let product = table[usize::from(*byte)] * one.unwrap_or_else(|| E::OF.rounded(scale));
        let back = match E::OF {
            Product::BF16 => widen_bf16(narrow_bf16(product)),
            Product::F32 => product,
        };
        if back.is_infinite() {
            lost.refused += 1;
            continue;
        }
        let (x, back) = (f64::from(x), f64::from(back));
        let error = x - back;
        most = most.max(error.abs());
        errors[i % LANES] += error * error;
        squares[i % LANES] += x * x;
        products[i % LANES] += x * back;
        read[i % LANES] += back * back;
        lost.saturated += u64::from((bytes.value() / scale).abs() > beyond);
        lost.vanished += u64::from(x != 0.0 && back == 0.0);
    }
    lost.largest = lost.largest.max(most);
    sums.errors += errors.iter().sum::<f64>();
    sums.squares += squares.iter().sum::<f64>();
    sums.products += products.iter().sum::<f64>();
    sums.read += read.iter().sum::<f64>();
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
            let how = Quantised { code, of: Product::BF16, shape: [3, 1, 2], per: [true, false, false], joined: false };
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
        let per = [true, false, false];
        let how = Quantised { code: ScaledCode::E4M3, of: Product::BF16, shape: [2, 1, 2], per, joined: false };
        let (mut codes, mut scales) = ([1; 4], [0.0; 2]);
        let lost = how.fill(&row, &mut codes, &mut scales);
        assert_eq!((codes, scales[0]), ([0, 0x80, 0, 0x7e], SMALLEST));
        assert_eq!((lost.vanished, lost.saturated), (1, 0));
    }

    proptest! {
        /// Scales, codes and losses equal those of plain loops, for all kinds of scales and both types of rows.
        #[test]
        fn codes_and_losses_are_those_of_the_oracle(
            shape in prop::array::uniform3(1usize..5),
            per in prop::array::uniform3(any::<bool>()),
            which in 0usize..3,
            (single, joined) in any::<(bool, bool)>(),
            bits in prop::collection::vec(any::<u32>(), 64),
        ) {
            let (code, of) = (CODES[which], if single { Product::F32 } else { Product::BF16 });
            let how = Quantised { code, of, shape, per, joined };
            let n: usize = shape.iter().product();
            let values: Vec<f32> =
                bits[..n].iter().map(|b| f32::from_bits(if single { *b } else { b & 0xffff_0000 })).collect();
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()[4 - of.size()..].to_vec()).collect();
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
            let odd = values.iter().position(|v| !v.is_finite()).map(|i| (i / shape[2]) as u64);
            prop_assert_eq!(how.raise(&bytes, &mut vec![0.0; how.scales()]), odd);
            let (mut largest, mut saturated, mut vanished) = (0f64, 0, 0);
            let of_row = shape[2] * if joined { shape[1] } else { 1 };
            let mut rows = vec![[0f64; 4]; n / of_row];
            for (i, v) in values.iter().enumerate() {
                let scale = (most[scale_of(i)] / limit(code)).max(1e-12);
                prop_assert_eq!(scale.to_bits(), scales[scale_of(i)].to_bits());
                if v.is_finite() {
                    prop_assert_eq!(codes[i], nearest(code, v / scale), "{} {}", v, scale);
                    let back = product_of(code, of, codes[i], scale);
                    let back = f32::from_bits(if single { back } else { back << 16 });
                    if back.is_infinite() {
                        continue;
                    }
                    let (x, y) = (f64::from(*v), f64::from(back));
                    for (sum, term) in rows[i / of_row].iter_mut().zip([(x - y).powi(2), x * x, x * y, y * y]) {
                        *sum += term;
                    }
                    largest = largest.max((x - y).abs());
                    vanished += u64::from(x != 0.0 && y == 0.0);
                    saturated += u64::from((v / scale).abs() > limit(code) * 1.1);
                }
            }
            prop_assert_eq!((lost.largest, lost.vanished, lost.saturated), (largest, vanished, saturated));
            prop_assert_eq!(lost.nan + lost.refused <= n as u64, true);
            let near = |found: f64, expected: f64| (found - expected).abs() <= 1e-12 * expected.abs();
            prop_assert!(near(lost.errors, rows.iter().map(|row| row[0]).sum()));
            prop_assert!(near(lost.squares, rows.iter().map(|row| row[1]).sum()));
            let angles: Vec<f64> = rows
                .iter()
                .filter(|row| row[1] > 0.0 && row[3] > 0.0)
                .map(|row| row[2] / (row[1].sqrt() * row[3].sqrt()))
                .collect();
            prop_assert_eq!(lost.angles, angles.len() as u64);
            prop_assert!((lost.cosines - angles.iter().sum::<f64>()).abs() < 1e-9);
            let worst = rows.iter().filter(|row| row[1] > 0.0).map(|row| (row[0] / row[1]).sqrt()).fold(0.0, f64::max);
            prop_assert!(near(lost.worst_row, worst));
        }
    }
}
