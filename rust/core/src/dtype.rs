//! Element types under their safetensors names, and casts of rows during the copy.
//!
//! Floating types cast to one another with round-to-nearest-even, in one step: a float64 is never rounded to float32 on
//! its way to a 16-bit type, which would round twice. Other types are only copied.

mod spelling;

use std::sync::atomic::{AtomicU64, Ordering};

use half::{bf16, f16};

use crate::error::{Error, Kind, Result};
use crate::kernels::{self, Conversion, Float, Stores};

pub use self::spelling::Spelling;

macro_rules! dtypes {
    ($($variant:ident, $name:literal, $bits:literal, $numpy:expr;)*) => {
        /// An element type. The set is safetensors 0.8's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[allow(missing_docs)]
        pub enum DType { $($variant,)* }

        impl DType {
            /// Every element type.
            pub const ALL: &[DType] = &[$(DType::$variant,)*];
            /// The safetensors name.
            pub fn name(self) -> &'static str { match self { $(DType::$variant => $name,)* } }
            /// Bits per element; 4 and 6 for the sub-byte types.
            pub fn bits(self) -> u64 { match self { $(DType::$variant => $bits,)* } }
            /// The numpy or ml_dtypes name, or `None` if no type there can view these bytes.
            pub fn numpy_name(self) -> Option<&'static str> { match self { $(DType::$variant => $numpy,)* } }
            /// The type of this safetensors name.
            pub fn from_name(name: &str) -> Option<DType> { match name { $($name => Some(DType::$variant),)* _ => None } }
        }
    };
}

dtypes! {
    Bool, "BOOL", 8, Some("bool");
    F4, "F4", 4, None;
    F6E2M3, "F6_E2M3", 6, None;
    F6E3M2, "F6_E3M2", 6, None;
    U8, "U8", 8, Some("uint8");
    I8, "I8", 8, Some("int8");
    F8E5M2, "F8_E5M2", 8, Some("float8_e5m2");
    F8E4M3, "F8_E4M3", 8, Some("float8_e4m3fn");
    F8E8M0, "F8_E8M0", 8, Some("float8_e8m0fnu");
    F8E4M3Fnuz, "F8_E4M3FNUZ", 8, Some("float8_e4m3fnuz");
    F8E5M2Fnuz, "F8_E5M2FNUZ", 8, Some("float8_e5m2fnuz");
    I16, "I16", 16, Some("int16");
    U16, "U16", 16, Some("uint16");
    F16, "F16", 16, Some("float16");
    BF16, "BF16", 16, Some("bfloat16");
    I32, "I32", 32, Some("int32");
    U32, "U32", 32, Some("uint32");
    F32, "F32", 32, Some("float32");
    C64, "C64", 64, Some("complex64");
    F64, "F64", 64, Some("float64");
    I64, "I64", 64, Some("int64");
    U64, "U64", 64, Some("uint64");
}

impl DType {
    /// Bytes per element, or `None` for the sub-byte types, which are not addressable.
    pub fn size(self) -> Option<usize> {
        self.bits().is_multiple_of(8).then_some((self.bits() / 8) as usize)
    }
}

/// A conversion of elements from one type to another, applied while they are copied.
#[derive(Clone, Copy, Debug)]
pub struct Cast<'a> {
    /// Bytes per element read.
    pub from_size: usize,
    /// Bytes per element written.
    pub to_size: usize,
    /// `None` copies the bytes unchanged.
    pub convert: Option<Conversion>,
    /// Bytes per number to reverse first; 1 if the byte order is native.
    swap: usize,
    /// The value of `swap` for byte-swapped input: bytes per number (a complex element has two).
    number: usize,
    from: DType,
    to: DType,
    /// Counts finite values that become infinite: those of at least this magnitude, in bits.
    overflows: Option<(&'a AtomicU64, u64)>,
    /// The requested counter, even if this cast cannot overflow.
    counter: Option<&'a AtomicU64>,
}

impl Cast<'static> {
    /// The cast between two types; an error if it is unsupported.
    pub fn between(from: DType, to: DType) -> Result<Cast<'static>> {
        let (Some(from_size), Some(to_size)) = (from.size(), to.size()) else {
            return Err(Error::new(
                Kind::Unsupported,
                format!("elements of {} are smaller than a byte and cannot be read as numpy arrays", from.name()),
            ));
        };
        let convert = match (float(from), float(to)) {
            _ if from == to => None,
            (Some(from), Some(to)) => kernels::conversion(from, to),
            _ => {
                return Err(Error::new(
                    Kind::DType,
                    format!(
                        "cannot convert {} to {}: dtype= converts between float16, bfloat16, float32 and float64",
                        from.numpy_name().unwrap_or(from.name()),
                        to.numpy_name().unwrap_or(to.name()),
                    ),
                ));
            }
        };
        let number = if from == DType::C64 { 4 } else { from_size };
        Ok(Cast { from_size, to_size, convert, swap: 1, number, from, to, overflows: None, counter: None })
    }
}

impl<'a> Cast<'a> {
    /// The same cast, which also adds the number of finite values that became infinite to `counter`.
    #[must_use]
    pub fn counting<'b>(self, counter: &'b AtomicU64) -> Cast<'b> {
        let overflows = overflow_from(self.from, self.to).map(|first| (counter, first));
        Cast { overflows, counter: Some(counter), ..self }
    }

    /// Whether a counter was given.
    pub fn counts(&self) -> bool {
        self.counter.is_some()
    }

    /// The cast from `from` to the same target type, with the same counter.
    pub fn reading(self, from: DType) -> Result<Cast<'a>> {
        let cast = Cast::between(from, self.to)?;
        Ok(match self.counter {
            Some(counter) => cast.counting(counter),
            None => cast,
        })
    }

    /// Whether it copies bytes unchanged.
    #[inline]
    pub fn is_copy(&self) -> bool {
        self.swap == 1 && self.convert.is_none()
    }

    /// Copies or converts whole elements; `src` and `dst` have equally many.
    #[inline]
    pub fn apply(&self, src: &[u8], dst: &mut [u8]) {
        self.apply_with(src, dst, Stores::Cached);
    }

    /// [`Cast::apply`] with a choice of stores.
    #[inline]
    pub fn apply_with(&self, src: &[u8], dst: &mut [u8], stores: Stores<'_>) {
        debug_assert_eq!(src.len() / self.from_size, dst.len() / self.to_size);
        if self.swap > 1 {
            return self.apply_swapped(src, dst, stores);
        }
        match (self.convert, self.overflows) {
            (None, _) => kernels::copy(src, dst, stores),
            (Some(convert), None) => {
                convert(src, dst, stores);
            }
            (Some(convert), Some((counter, first))) => self.convert_counting(convert, counter, first, src, dst, stores),
        }
    }

    /// Counts in the input, block by block while it is in the cache: the output may have been streamed past the cache.
    fn convert_counting(
        &self,
        convert: Conversion,
        counter: &AtomicU64,
        first: u64,
        src: &[u8],
        dst: &mut [u8],
        stores: Stores<'_>,
    ) {
        // A multiple of every element size; half of the smallest first-level caches.
        const BLOCK: usize = 16 << 10;
        let end = infinity(self.from).unwrap_or(first);
        for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK / self.from_size * self.to_size)) {
            if convert(src, dst, stores) && kernels::any_within(self.from_size, src, first, end) {
                counter.fetch_add(kernels::count_within(self.from_size, src, first, end), Ordering::Relaxed);
            }
        }
    }

    /// The same cast for byte-swapped input, if `swapped`.
    #[inline]
    #[must_use]
    pub fn swapped_if(mut self, swapped: bool) -> Cast<'a> {
        self.swap = if swapped { self.number } else { 1 };
        self
    }

    fn apply_swapped(&self, src: &[u8], dst: &mut [u8], stores: Stores<'_>) {
        // A multiple of every element size.
        const BLOCK: usize = 4096;
        let mut block = [0u8; BLOCK];
        let straight = self.swapped_if(false);
        for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK / self.from_size * self.to_size)) {
            let block = &mut block[..src.len()];
            block.copy_from_slice(src);
            match self.swap {
                2 => swap_each::<2>(block),
                4 => swap_each::<4>(block),
                _ => swap_each::<8>(block),
            }
            straight.apply_with(block, dst, stores);
        }
    }
}

/// The corresponding type of the kernels.
fn float(dtype: DType) -> Option<Float> {
    match dtype {
        DType::F16 => Some(Float::F16),
        DType::BF16 => Some(Float::BF16),
        DType::F32 => Some(Float::F32),
        DType::F64 => Some(Float::F64),
        _ => None,
    }
}

/// The bits of the smallest finite magnitude that a cast makes infinite, if there is one: half a step above the largest number
/// of `to`, where ties round up.
fn overflow_from(from: DType, to: DType) -> Option<u64> {
    use DType::{BF16, F16, F32, F64};
    match (from, to) {
        (F32, F16) => Some(0x477f_f000),
        (F32, BF16) => Some(0x7f7f_8000),
        // 65,520 is not a bfloat16 number; this is the next one.
        (BF16, F16) => Some(0x4780),
        (F64, F16) => Some(0x40ef_fe00_0000_0000),
        (F64, BF16) => Some(0x47ef_f000_0000_0000),
        (F64, F32) => Some(0x47ef_ffff_f000_0000),
        _ => None,
    }
}

/// The bits of infinity, for types that can be cast.
fn infinity(dtype: DType) -> Option<u64> {
    match dtype {
        DType::F16 => Some(0x7c00),
        DType::BF16 => Some(0x7f80),
        DType::F32 => Some(0x7f80_0000),
        DType::F64 => Some(0x7ff0_0000_0000_0000),
        _ => None,
    }
}

/// Counts elements that are finite in `src` while the cast of the same element of `values` to `to` is infinite.
pub fn overflowed((from, src): (DType, &[u8]), (middle, values): (DType, &[u8]), to: DType) -> u64 {
    let (Some(finite_below), Some(infinite), Some(from_size), Some(size)) =
        (infinity(from), infinity(middle), from.size(), middle.size())
    else {
        return 0;
    };
    let (first, end) = (overflow_from(middle, to).unwrap_or(infinite), infinite + 1);
    // Rare: one scan of values that are in the cache usually suffices.
    if !kernels::any_within(size, values, first, end) {
        return 0;
    }
    let pairs = src.chunks_exact(from_size).zip(values.chunks_exact(size));
    pairs.filter(|(s, v)| magnitude(s) < finite_below && (first..end).contains(&magnitude(v))).count() as u64
}

/// An element's bits without the sign.
fn magnitude(element: &[u8]) -> u64 {
    let mut bits = [0; 8];
    bits[..element.len()].copy_from_slice(element);
    u64::from_le_bytes(bits) & (u64::MAX >> (65 - 8 * element.len()))
}

/// Counts finite elements that would become infinite when cast to `to`, or NaN if `to` has no infinity.
///
/// Fails for types that are not numbers, or that are too small to overflow in a defined way.
pub fn overflows(from: DType, to: DType, src: &[u8]) -> Result<u64> {
    use DType::{
        BF16, Bool, F8E4M3, F8E4M3Fnuz, F8E5M2, F8E5M2Fnuz, F16, F32, F64, I8, I16, I32, I64, U8, U16, U32, U64,
    };
    if from == to {
        return Ok(0);
    }
    // Values round beyond the largest number from half a step above it; ties go to the even neighbour.
    let (limit, itself) = match to {
        F64 => (f64::INFINITY, false),
        F32 => (f64::from(f32::MAX) + 2f64.powi(103), true),
        BF16 => (bf16::MAX.to_f64() + 2f64.powi(119), true),
        F16 => (65_520.0, true),
        F8E5M2 | F8E5M2Fnuz => (61_440.0, true),
        F8E4M3 => (464.0, false),
        F8E4M3Fnuz => (248.0, true),
        _ => {
            let (from, to) = (from.numpy_name().unwrap_or(from.name()), to.numpy_name().unwrap_or(to.name()));
            return Err(Error::new(Kind::DType, format!("cannot count overflows of {from} to {to}: expected a float")));
        }
    };
    let over = |x: f64| if itself { x >= limit } else { x > limit };
    // Magnitudes are ordered like their bits: a binary search finds the first that overflows.
    let first = |value: &dyn Fn(u64) -> f64| {
        let (mut low, mut high) = (0, infinity(from).unwrap_or(0));
        while low < high {
            let middle = low + (high - low) / 2;
            if over(value(middle)) { high = middle } else { low = middle + 1 }
        }
        low
    };
    macro_rules! floats {
        ($t:ty, $value:expr) => {{ kernels::count_within(size_of::<$t>(), src, first(&$value), infinity(from).unwrap_or(0)) }};
    }
    macro_rules! integers {
        ($t:ty) => {{
            let elements = src.as_chunks::<{ size_of::<$t>() }>().0.iter();
            elements.fold(0, |n, b| n + u64::from(over((<$t>::from_le_bytes(*b) as f64).abs())))
        }};
    }
    Ok(match from {
        F16 => floats!(u16, |x| f16::from_bits(x as u16).to_f64()),
        BF16 => floats!(u16, |x| bf16::from_bits(x as u16).to_f64()),
        F32 => floats!(u32, |x| f64::from(f32::from_bits(x as u32))),
        F64 => floats!(u64, f64::from_bits),
        Bool => 0,
        I8 => integers!(i8),
        U8 => integers!(u8),
        I16 => integers!(i16),
        U16 => integers!(u16),
        I32 => integers!(i32),
        U32 => integers!(u32),
        I64 => integers!(i64),
        U64 => integers!(u64),
        _ => {
            let name = from.numpy_name().unwrap_or(from.name());
            return Err(Error::new(
                Kind::DType,
                format!("cannot count overflows of {name}: expected floats or integers"),
            ));
        }
    })
}

fn swap_each<const N: usize>(bytes: &mut [u8]) {
    for number in bytes.as_chunks_mut::<N>().0 {
        number.reverse();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use bytemuck::{AnyBitPattern, NoUninit};
    use proptest::prelude::*;

    fn cast_one<S: NoUninit, D: AnyBitPattern>(from: DType, to: DType, x: S) -> D {
        let mut out = vec![0u8; size_of::<D>()];
        Cast::between(from, to).unwrap().apply(bytemuck::bytes_of(&x), &mut out);
        bytemuck::pod_read_unaligned(&out)
    }

    /// The nearest value of a small format, found by trying all of them.
    fn nearest<T: Copy>(x: f64, all: impl Iterator<Item = (T, f64, u16)>) -> (f64, u16) {
        let mut best = (f64::INFINITY, 0u16);
        let mut gap = f64::INFINITY;
        for (_, value, bits) in all {
            let g = (value - x).abs();
            if g < gap || (g == gap && bits & 1 == 0) {
                (gap, best) = (g, (value, bits));
            }
        }
        best
    }

    #[test]
    fn f64_rounds_once_to_16_bits() {
        // Above the tie between two bfloat16 neighbours by less than float32 can represent.
        let x = 1.0 + 2f64.powi(-8) + 2f64.powi(-40);
        assert_eq!(cast_one::<f64, bf16>(DType::F64, DType::BF16, x).to_f64(), 1.0 + 2f64.powi(-7));
        let y = 1.0 + 2f64.powi(-11) + 2f64.powi(-40);
        assert_eq!(cast_one::<f64, f16>(DType::F64, DType::F16, y).to_f64(), 1.0 + 2f64.powi(-10));
        assert_eq!(cast_one::<f64, f32>(DType::F64, DType::F32, 1e300), f32::INFINITY);
        assert!(cast_one::<f64, bf16>(DType::F64, DType::BF16, f64::NAN).is_nan());
        assert_eq!(cast_one::<f64, f16>(DType::F64, DType::F16, -1e9), f16::NEG_INFINITY);
    }

    #[test]
    fn every_16_bit_pattern_widens_and_comes_back() {
        for bits in 0..=u16::MAX {
            let h: f32 = cast_one(DType::F16, DType::F32, bits);
            let b: f32 = cast_one(DType::BF16, DType::F32, bits);
            assert_eq!(h.is_nan(), f16::from_bits(bits).is_nan());
            assert_eq!(b.to_bits(), u32::from(bits) << 16);
            if !h.is_nan() {
                assert_eq!(cast_one::<f32, u16>(DType::F32, DType::F16, h), bits);
            }
            if !b.is_nan() {
                assert_eq!(cast_one::<f32, u16>(DType::F32, DType::BF16, b), bits);
            } else {
                assert!(cast_one::<f32, bf16>(DType::F32, DType::BF16, b).is_nan());
            }
        }
    }

    /// Values near the overflow limits of each floating type.
    fn around_the_limits(dtype: DType) -> Vec<u8> {
        let mut values =
            vec![0.0, -1.5, f64::INFINITY, f64::NEG_INFINITY, f64::NAN, 1e300, -1e300, 1e39, 1e38, -70_000.0];
        for limit in [
            65_504.0,
            65_520.0,
            f64::from(f32::MAX),
            f64::from(f32::MAX) + 2f64.powi(103),
            bf16::MAX.to_f64() + 2f64.powi(119),
        ] {
            for step in -3i64..=3 {
                values.push(f64::from_bits(f64::to_bits(limit).wrapping_add_signed(step)));
                values.push(-f64::from_bits(f64::to_bits(limit).wrapping_add_signed(step << 29)));
                values.push(f64::from_bits(f64::to_bits(limit).wrapping_add_signed(step << 45)));
            }
        }
        let mut bytes = vec![0; values.len() * dtype.size().unwrap()];
        Cast::between(DType::F64, dtype).unwrap().apply(bytemuck::cast_slice(&values), &mut bytes);
        bytes
    }

    /// Compares with casting every value, for all pairs of types, in both byte orders.
    #[test]
    fn overflows_are_what_the_cast_makes_infinite() {
        let types = [DType::F16, DType::BF16, DType::F32, DType::F64];
        let wide = |dtype: DType, bytes: &[u8]| {
            let mut out = vec![0f64; bytes.len() / dtype.size().unwrap()];
            Cast::between(dtype, DType::F64).unwrap().apply(bytes, bytemuck::cast_slice_mut(&mut out));
            out
        };
        for (from, to) in types.iter().flat_map(|f| types.iter().map(move |t| (*f, *t))) {
            let src = around_the_limits(from);
            let count = AtomicU64::new(0);
            let cast = Cast::between(from, to).unwrap().counting(&count);
            let mut dst = vec![0; src.len() / cast.from_size * cast.to_size];
            cast.apply(&src, &mut dst);
            let plain =
                wide(from, &src).iter().zip(wide(to, &dst)).filter(|(a, b)| a.is_finite() && b.is_infinite()).count();
            assert_eq!(overflows(from, to, &src).unwrap(), plain as u64, "{from:?} {to:?}");
            assert_eq!(count.swap(0, Ordering::Relaxed), plain as u64, "{from:?} {to:?}");
            let swapped: Vec<u8> = src.chunks(cast.from_size).flat_map(|b| b.iter().rev().copied()).collect();
            cast.swapped_if(true).apply(&swapped, &mut dst);
            assert_eq!(count.into_inner(), plain as u64);
        }
        let bytes: Vec<u8> = [0i32, 65_519, 65_520, -65_520, i32::MIN].iter().flat_map(|x| x.to_le_bytes()).collect();
        assert_eq!(overflows(DType::I32, DType::F16, &bytes).unwrap(), 3);
        assert_eq!(overflows(DType::I32, DType::F32, &bytes).unwrap(), 0);
        assert_eq!(overflows(DType::F32, DType::I32, &[]).unwrap_err().kind, Kind::DType);
        assert_eq!(overflows(DType::C64, DType::F32, &[]).unwrap_err().kind, Kind::DType);
    }

    #[test]
    fn only_floats_convert_and_sub_byte_types_are_refused() {
        assert_eq!(Cast::between(DType::I32, DType::F32).unwrap_err().kind, Kind::DType);
        assert_eq!(Cast::between(DType::F4, DType::F4).unwrap_err().kind, Kind::Unsupported);
        assert!(Cast::between(DType::I32, DType::I32).unwrap().convert.is_none());
    }

    proptest! {
        #[test]
        fn narrowing_gives_the_nearest_value(x in -1e6f64..1e6) {
            let all = || (0..0x7f80u16).chain(0x8000..0xff80).map(|b| (b, bf16::from_bits(b).to_f64(), b));
            let (value, _) = nearest(x, all());
            prop_assert_eq!(cast_one::<f64, bf16>(DType::F64, DType::BF16, x).to_f64(), value);
            let all = || (0..0x7c00u16).chain(0x8000..0xfc00).map(|b| (b, f16::from_bits(b).to_f64(), b));
            let small = x / 32.0;
            let (value, _) = nearest(small, all());
            prop_assert_eq!(cast_one::<f64, f16>(DType::F64, DType::F16, small).to_f64(), value);
            let single = small as f32;
            let (value, _) = nearest(f64::from(single), all());
            prop_assert_eq!(cast_one::<f32, f16>(DType::F32, DType::F16, single).to_f64(), value);
        }

        #[test]
        fn unaligned_rows_cast_like_aligned_ones(values in prop::collection::vec(any::<f32>(), 0..700), shift in 0usize..4) {
            let mut src = vec![0u8; shift];
            src.extend_from_slice(bytemuck::cast_slice(&values));
            let mut out = vec![0u8; values.len() * 2 + shift];
            let cast = Cast::between(DType::F32, DType::F16).unwrap();
            cast.apply(&src[shift..], &mut out[shift..]);
            for (i, v) in values.iter().enumerate() {
                let got = f16::from_le_bytes([out[shift + 2 * i], out[shift + 2 * i + 1]]);
                prop_assert!(got == f16::from_f32(*v) || (got.is_nan() && v.is_nan()));
            }
        }
    }
}
