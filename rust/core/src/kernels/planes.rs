//! Values and planes of their bytes, for floating-point values whose lowest bits may all be zeros.
//!
//! A value is rotated left by one bit, so that its exponent begins at the highest bit; its sign, now lowest, moves up to bit `sign`,
//! over bits that are 0 in all values. Then the first bytes of all values form a plane, the second bytes the next one, and so on.

use super::wide;

/// Values merged at a time.
const STEP: usize = 256;

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

/// Appends `n` values of 1, 2, 4 or 8 bytes, one of each plane, to `values`, which has room for them. `sign` is a bit of a value.
pub fn merge(planes: &[Plane<'_>], n: usize, sign: u32, values: &mut Vec<u8>) {
    wide(|| match *planes {
        [a] => u8::merge([a], n, sign, values),
        [a, b] => u16::merge([a, b], n, sign, values),
        [a, b, c, d] => u32::merge([a, b, c, d], n, sign, values),
        [a, b, c, d, e, f, g, h] => u64::merge([a, b, c, d, e, f, g, h], n, sign, values),
        _ => {}
    });
}

/// A value of `N` bytes.
trait InPlanes<const N: usize>: Sized {
    fn split(values: &[u8], planes: &mut [u8]) -> u32;
    fn merge(planes: [Plane<'_>; N], n: usize, sign: u32, values: &mut Vec<u8>);
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
            fn merge(planes: [Plane<'_>; $n], n: usize, sign: u32, values: &mut Vec<u8>) {
                let constants = planes.map(|plane| match plane {
                    Plane::Bytes(_) => [0; STEP],
                    Plane::Constant(byte) => [byte; STEP],
                });
                let whole = n / STEP;
                for step in 0..whole {
                    let mut parts = constants.each_ref();
                    for (part, plane) in parts.iter_mut().zip(&planes) {
                        if let Plane::Bytes(bytes) = plane {
                            *part = &bytes.as_chunks().0[step];
                        }
                    }
                    values.extend_from_slice(merge_step(parts, sign).as_flattened());
                }
                let mut rest = constants;
                for (rest, plane) in rest.iter_mut().zip(&planes) {
                    if let Plane::Bytes(bytes) = plane {
                        let bytes = bytes.as_chunks::<STEP>().1;
                        rest[..bytes.len()].copy_from_slice(bytes);
                    }
                }
                values.extend_from_slice(merge_step(rest.each_ref(), sign)[..n % STEP].as_flattened());

                #[inline(always)]
                fn merge_step(parts: [&[u8; STEP]; $n], sign: u32) -> [[u8; $n]; STEP] {
                    let mut merged = [[0; $n]; STEP];
                    for (i, value) in merged.iter_mut().enumerate() {
                        let mut word: $word = 0;
                        for (k, part) in parts.iter().enumerate() {
                            word |= $word::from(part[i]) << (8 * k);
                        }
                        let low = word >> sign & 1;
                        *value = (word & !(1 << sign) | low).rotate_right(1).to_le_bytes();
                    }
                    merged
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
