//! Conversions of stored numbers to int32 and float32.

use crate::dtype::DType;

/// Integers of a dtype as int32; returns whether all fit.
pub(super) fn to_int32(dtype: DType, bytes: &[u8], out: &mut [i32]) -> bool {
    macro_rules! each {
        ($t:ty) => {{
            const SIZE: usize = size_of::<$t>();
            let mut fits = true;
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<SIZE>().0) {
                let value = <$t>::from_le_bytes(*from);
                *to = value as i32;
                fits &= *to as i128 == value as i128;
            }
            fits
        }};
    }
    match dtype {
        DType::I64 => {
            // No branch in the loop, and no 64-bit comparison, which is slow on old processors: token ids are not negative.
            let mut all = 0u64;
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
                let value = u64::from_le_bytes(*from);
                *to = value as i32;
                all |= value;
            }
            all < 1 << 31 || each!(i64)
        }
        DType::I32 => {
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *to = i32::from_le_bytes(*from);
            }
            true
        }
        DType::U32 => {
            let mut all = 0u32;
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                let value = u32::from_le_bytes(*from);
                *to = value.cast_signed();
                all |= value;
            }
            all < 1 << 31
        }
        DType::U16 => {
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *to = i32::from(u16::from_le_bytes(*from));
            }
            true
        }
        DType::U64 => each!(u64),
        DType::I16 => each!(i16),
        DType::I8 => each!(i8),
        DType::U8 => each!(u8),
        _ => false,
    }
}

/// Numbers of a dtype as float32; returns whether the dtype is supported.
pub(super) fn to_float32(dtype: DType, bytes: &[u8], out: &mut [f32]) -> bool {
    macro_rules! each {
        ($t:ty) => {{
            const SIZE: usize = size_of::<$t>();
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<SIZE>().0) {
                *to = <$t>::from_le_bytes(*from) as f32;
            }
            true
        }};
    }
    match dtype {
        DType::F32 => each!(f32),
        DType::F64 => each!(f64),
        DType::F16 => each_half(bytes, out, |b| half::f16::from_le_bytes(b).to_f32()),
        DType::BF16 => each_half(bytes, out, |b| half::bf16::from_le_bytes(b).to_f32()),
        DType::I64 => each!(i64),
        DType::U64 => each!(u64),
        DType::I32 => each!(i32),
        DType::U32 => each!(u32),
        DType::I16 => each!(i16),
        DType::U16 => each!(u16),
        DType::I8 => each!(i8),
        DType::U8 => each!(u8),
        _ => false,
    }
}

fn each_half(bytes: &[u8], out: &mut [f32], widen: impl Fn([u8; 2]) -> f32) -> bool {
    for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *to = widen(*from);
    }
    true
}
