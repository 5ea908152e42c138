//! Conversions in plain Rust: for processors without special kernels, and the oracle of those kernels.
//!
//! Round to nearest, ties to even, in one step: a float64 is never rounded to float32 on its way to a 16-bit type,
//! which would round twice. All pairs except the direct ones go through a block of float32 on the stack, for the `half`
//! crate's conversions of slices, which use the processor's instructions. These kernels do not check for overflows.

use bytemuck::{AnyBitPattern, NoUninit, Zeroable};
use half::{bf16, f16, slice::HalfFloatSliceExt};

use super::stores::{Conversion, Float};

/// Elements per block on the stack.
const BLOCK: usize = 256;

/// The portable conversion between two different types; `None` for equal types.
pub fn conversion(from: Float, to: Float) -> Option<Conversion> {
    use Float::{BF16, F16, F32, F64};
    Some(match (from, to) {
        (F16, F32) => |s, d, _| in_bulk::<f16, f32>(s, d, |s, d| s.convert_to_f32_slice(d)),
        (BF16, F32) => |s, d, _| each::<bf16, f32>(s, d, widen_bf16),
        (F64, F32) => |s, d, _| each::<f64, f32>(s, d, |x| x as f32),
        (F32, F16) => |s, d, _| in_bulk::<f32, f16>(s, d, |s, d| d.convert_from_f32_slice(s)),
        (BF16, F16) => |s, d, _| to_f16::<bf16>(s, d, widen_bf16),
        (F64, F16) => |s, d, _| to_f16::<f64>(s, d, to_f32_round_to_odd),
        (F32, BF16) => |s, d, _| each::<f32, bf16>(s, d, narrow_bf16),
        (F16, BF16) => |s, d, _| from_f16::<bf16>(s, d, narrow_bf16),
        (F64, BF16) => |s, d, _| each::<f64, bf16>(s, d, |x| narrow_bf16(to_f32_round_to_odd(x))),
        (F32, F64) => |s, d, _| each::<f32, f64>(s, d, f64::from),
        (F16, F64) => |s, d, _| from_f16::<f64>(s, d, f64::from),
        (BF16, F64) => |s, d, _| each::<bf16, f64>(s, d, |x| f64::from(widen_bf16(x))),
        (F16, F16) | (BF16, BF16) | (F32, F32) | (F64, F64) => return None,
    })
}

/// Whether the magnitude of some element is in `first..end`. Branch-free so that it vectorises.
#[inline(always)]
pub fn any_within(element: usize, bytes: &[u8], first: u64, end: u64) -> bool {
    macro_rules! look {
        ($t:ty) => {{
            let (first, span) = (first as $t, (end - first) as $t);
            let elements = bytes.as_chunks::<{ size_of::<$t>() }>().0.iter();
            elements.fold(0, |any, b| {
                let magnitude = <$t>::from_le_bytes(*b) & (<$t>::MAX >> 1);
                any | <$t>::from(magnitude.wrapping_sub(first) < span)
            }) != 0
        }};
    }
    match element {
        2 => look!(u16),
        4 => look!(u32),
        _ => look!(u64),
    }
}

/// The number of elements whose magnitude is in `first..end`.
#[inline(always)]
pub fn count_within(element: usize, bytes: &[u8], first: u64, end: u64) -> u64 {
    macro_rules! count {
        ($t:ty) => {{
            let elements = bytes.as_chunks::<{ size_of::<$t>() }>().0.iter();
            elements.fold(0, |n, b| {
                let magnitude = u64::from(<$t>::from_le_bytes(*b) & (<$t>::MAX >> 1));
                n + u64::from(magnitude >= first && magnitude < end)
            })
        }};
    }
    match element {
        2 => count!(u16),
        4 => count!(u32),
        _ => count!(u64),
    }
}

/// bfloat16 is the upper half of a float32, NaN payloads included.
#[inline]
pub(super) fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Round to nearest, ties to even; NaN stays NaN for any low bits. Branch-free so that it vectorises.
#[inline]
pub(super) fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    let quiet = ((bits >> 16) as u16) | 0x0040;
    bf16::from_bits(if x.is_nan() { quiet } else { rounded })
}

/// Rounds inexact values to the neighbouring float32 whose last bit is odd, so that a second rounding to fewer bits is
/// correct (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd",
/// 2008). Branch-free so that it vectorises.
#[inline]
fn to_f32_round_to_odd(x: f64) -> f32 {
    let near = x as f32;
    let back = f64::from(near);
    let bits = near.to_bits();
    // An even, inexact result is replaced by its odd neighbour on the other side of x. Infinity steps back to f32::MAX. A NaN
    // compares as neither.
    let inexact = u32::from(back < x) | u32::from(back > x);
    let step = inexact & !bits & 1;
    let toward_zero = u32::from(back.abs() > x.abs());
    f32::from_bits(bits.wrapping_add(step).wrapping_sub(2 * (step & toward_zero)))
}

fn each<S: AnyBitPattern + NoUninit, D: AnyBitPattern + NoUninit>(
    src: &[u8],
    dst: &mut [u8],
    f: impl Fn(S) -> D,
) -> bool {
    in_bulk::<S, D>(src, dst, |src, dst| {
        for (s, d) in src.iter().zip(dst) {
            *d = f(*s);
        }
    })
}

fn to_f16<S: AnyBitPattern + NoUninit>(src: &[u8], dst: &mut [u8], f: impl Fn(S) -> f32) -> bool {
    in_bulk::<S, f16>(src, dst, |src, dst| {
        let mut middle = [0f32; BLOCK];
        for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK)) {
            for (m, s) in middle.iter_mut().zip(src) {
                *m = f(*s);
            }
            dst.convert_from_f32_slice(&middle[..src.len()]);
        }
    })
}

fn from_f16<D: AnyBitPattern + NoUninit>(src: &[u8], dst: &mut [u8], f: impl Fn(f32) -> D) -> bool {
    in_bulk::<f16, D>(src, dst, |src, dst| {
        let mut middle = [0f32; BLOCK];
        for (src, dst) in src.chunks(BLOCK).zip(dst.chunks_mut(BLOCK)) {
            let middle = &mut middle[..src.len()];
            src.convert_to_f32_slice(middle);
            for (d, m) in dst.iter_mut().zip(&*middle) {
                *d = f(*m);
            }
        }
    })
}

/// Calls `bulk` with typed slices. Rows in files and callers' buffers may be unaligned: those go through an aligned block
/// on the stack.
fn in_bulk<S: AnyBitPattern + NoUninit, D: AnyBitPattern + NoUninit>(
    src: &[u8],
    dst: &mut [u8],
    bulk: impl Fn(&[S], &mut [D]),
) -> bool {
    if let (Ok(s), Ok(d)) = (bytemuck::try_cast_slice::<u8, S>(src), bytemuck::try_cast_slice_mut::<u8, D>(dst)) {
        bulk(s, d);
        return true;
    }
    let mut s = [<S as Zeroable>::zeroed(); BLOCK];
    let mut d = [<D as Zeroable>::zeroed(); BLOCK];
    let (from, to) = (size_of::<S>(), size_of::<D>());
    for (src, dst) in src.chunks(BLOCK * from).zip(dst.chunks_mut(BLOCK * to)) {
        let n = src.len() / from;
        bytemuck::cast_slice_mut::<S, u8>(&mut s[..n]).copy_from_slice(src);
        bulk(&s[..n], &mut d[..n]);
        dst.copy_from_slice(bytemuck::cast_slice::<D, u8>(&d[..n]));
    }
    true
}
