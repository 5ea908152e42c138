//! Values and planes of their bytes, for floating-point values whose lowest bits may all be zeros.
//!
//! A value is rotated left by one bit, so that its exponent begins at the highest bit; its sign, now lowest, moves up to bit `sign`,
//! over bits that are 0 in all values. Then the first bytes of all values form a plane, the second bytes the next one, and so on.
//! The `unsafe` here: memory that is written before it is read.
#![allow(unsafe_code, reason = "decoded rows are written once, not cleared before")]

use std::mem::MaybeUninit;
use std::ops::Range;

use super::wide;

/// Values merged at a time.
const STEP: usize = 128;

/// Splits values of 1, 2, 4 or 8 bytes; `planes` has the length of `values`. Returns the highest possible `sign`.
pub fn split(values: &[u8], typesize: usize, planes: &mut [u8]) -> u32 {
    wide(|| match typesize {
        1 => u8::split(values, planes),
        2 => u16::split(values, planes),
        4 => u32::split(values, planes),
        _ => u64::split(values, planes),
    })
}

/// A plane: its bytes, or the one byte that all of them are.
#[derive(Clone, Copy, Debug)]
pub enum Plane<'a> {
    /// One byte of each value.
    Bytes(&'a [u8]),
    /// The same byte of all values.
    Constant(u8),
}

impl Plane<'_> {
    fn part(self, values: &Range<usize>) -> Self {
        match self {
            Plane::Bytes(bytes) => Plane::Bytes(&bytes[values.clone()]),
            constant => constant,
        }
    }
}

/// Appends `n` values of 1, 2, 4 or 8 bytes, one of each plane, to `rows`. `sign` is a bit of a value.
pub fn append_merged(planes: &[Plane<'_>], n: usize, sign: u32, rows: &mut Vec<u8>) {
    let (old, bytes) = (rows.len(), n * planes.len());
    rows.reserve(bytes);
    merge_to(planes, 0..n, sign, &mut rows.spare_capacity_mut()[..bytes]);
    // SAFETY: the capacity was reserved, and `merge_to` writes every byte of its output.
    unsafe { rows.set_len(old + bytes) };
}

/// Merges the values of a range; `rows` has their length.
pub fn merge(planes: &[Plane<'_>], values: Range<usize>, sign: u32, rows: &mut [u8]) {
    // SAFETY: only bytes are written, so that all of `rows` remains initialized.
    let rows = unsafe { &mut *(std::ptr::from_mut(rows) as *mut [MaybeUninit<u8>]) };
    merge_to(planes, values, sign, rows);
}

/// Writes every byte of `rows`, or panics.
fn merge_to(planes: &[Plane<'_>], values: Range<usize>, sign: u32, rows: &mut [MaybeUninit<u8>]) {
    assert!(matches!(planes.len(), 1 | 2 | 4 | 8), "values of 1, 2, 4 or 8 bytes");
    assert_eq!(rows.len(), values.len() * planes.len(), "rows of another length");
    wide(
        #[inline(always)]
        || match planes {
            [a] => u8::merge([*a].map(|plane| plane.part(&values)), sign, rows),
            [a, b] => u16::merge([*a, *b].map(|plane| plane.part(&values)), sign, rows),
            [a, b, c, d] => u32::merge([*a, *b, *c, *d].map(|plane| plane.part(&values)), sign, rows),
            [a, b, c, d, e, f, g, h] => {
                u64::merge([*a, *b, *c, *d, *e, *f, *g, *h].map(|plane| plane.part(&values)), sign, rows);
            }
            _ => {}
        },
    );
}

/// A value of `N` bytes.
trait InPlanes<const N: usize>: Sized {
    fn split(values: &[u8], planes: &mut [u8]) -> u32;
    /// Writes every byte of `rows`. Planes of bytes have as many as there are values.
    fn merge(planes: [Plane<'_>; N], sign: u32, rows: &mut [MaybeUninit<u8>]);
}

macro_rules! values {
    ($($word:ident: $n:literal;)*) => {$(
        impl InPlanes<$n> for $word {
            #[inline(always)]
            fn split(values: &[u8], planes: &mut [u8]) -> u32 {
                let n = values.len() / $n;
                let values = values.as_chunks::<$n>().0;
                let bits = values.iter().fold(0, |bits, value| bits | $word::from_le_bytes(*value));
                let magnitude = bits & $word::MAX >> 1;
                let sign = if magnitude == 0 { 0 } else { magnitude.trailing_zeros() };
                for (k, plane) in planes.chunks_exact_mut(n.max(1)).enumerate() {
                    for (byte, value) in plane.iter_mut().zip(values) {
                        let word = $word::from_le_bytes(*value).rotate_left(1);
                        *byte = ((word & !1 | (word & 1) << sign) >> (8 * k)) as u8;
                    }
                }
                sign
            }

            #[inline(always)]
            fn merge(planes: [Plane<'_>; $n], sign: u32, rows: &mut [MaybeUninit<u8>]) {
                let constants = planes.map(|plane| match plane {
                    Plane::Bytes(_) => [0; STEP],
                    Plane::Constant(byte) => [byte; STEP],
                });
                let mut parts = planes.map(|plane| match plane {
                    Plane::Bytes(bytes) => bytes.as_chunks::<STEP>().0.iter(),
                    Plane::Constant(_) => [].iter(),
                });
                let (steps, rest) = rows.as_chunks_mut::<{ $n * STEP }>();
                let done = steps.len() * STEP;
                for step in steps {
                    // Loops of one operation each, which the compiler turns into vectors.
                    let mut merged = [0; STEP];
                    for (k, (part, constant)) in parts.iter_mut().zip(&constants).enumerate() {
                        for (value, byte) in merged.iter_mut().zip(part.next().unwrap_or(constant)) {
                            *value |= $word::from(*byte) << (8 * k);
                        }
                    }
                    let merged = merged.map(|word| unrotated(word, sign).to_le());
                    // SAFETY: a step is as long as the merged values.
                    unsafe { step.as_mut_ptr().cast::<[$word; STEP]>().write_unaligned(merged) };
                }
                for (i, value) in rest.as_chunks_mut::<$n>().0.iter_mut().enumerate() {
                    let byte = |plane| match plane {
                        Plane::Bytes(bytes) => bytes[done + i],
                        Plane::Constant(byte) => byte,
                    };
                    let word = $word::from_le_bytes(planes.map(byte));
                    *value = unrotated(word, sign).to_le_bytes().map(MaybeUninit::new);
                }

                #[inline(always)]
                fn unrotated(word: $word, sign: u32) -> $word {
                    let low = word >> sign & 1;
                    (word & !(1 << sign) | low).rotate_right(1)
                }
            }
        }
    )*};
}

values! {
    u8: 1;
    u16: 2;
    u32: 4;
    u64: 8;
}
