//! Values and planes of their bytes: each value rotated left by one bit, its first byte in the first plane.

use super::wide;

/// Values merged at a time.
const STEP: usize = 256;

/// Splits values of 1, 2, 4 or 8 bytes; `planes` has the length of `values`.
pub fn split(values: &[u8], typesize: usize, planes: &mut [u8]) {
    wide(|| match typesize {
        1 => u8::split(values, planes),
        2 => u16::split(values, planes),
        4 => u32::split(values, planes),
        _ => u64::split(values, planes),
    });
}

/// A plane: its bytes, or the one byte that all of them are.
#[derive(Clone, Copy, Debug)]
pub enum Plane<'a> {
    /// One byte of each value.
    Bytes(&'a [u8]),
    /// The same byte of all values.
    Constant(u8),
}

/// Appends `n` values of 1, 2, 4 or 8 bytes, one of each plane, to `values`, which has room for them.
pub fn merge(planes: &[Plane<'_>], n: usize, values: &mut Vec<u8>) {
    wide(|| match *planes {
        [a] => u8::merge([a], n, values),
        [a, b] => u16::merge([a, b], n, values),
        [a, b, c, d] => u32::merge([a, b, c, d], n, values),
        [a, b, c, d, e, f, g, h] => u64::merge([a, b, c, d, e, f, g, h], n, values),
        _ => {}
    });
}

/// A value of `N` bytes.
trait Value<const N: usize>: Sized {
    fn split(values: &[u8], planes: &mut [u8]);
    fn merge(planes: [Plane<'_>; N], n: usize, values: &mut Vec<u8>);
}

macro_rules! values {
    ($($word:ident: $n:literal;)*) => {$(
        impl Value<$n> for $word {
            #[inline(always)]
            fn split(values: &[u8], planes: &mut [u8]) {
                let n = values.len() / $n;
                for (k, plane) in planes.chunks_exact_mut(n.max(1)).enumerate() {
                    for (byte, value) in plane.iter_mut().zip(values.as_chunks::<$n>().0) {
                        *byte = ($word::from_le_bytes(*value).rotate_left(1) >> (8 * k)) as u8;
                    }
                }
            }

            #[inline(always)]
            fn merge(planes: [Plane<'_>; $n], n: usize, values: &mut Vec<u8>) {
                // A step is copied first, so that the loop has arrays of one length and no branches.
                let mut bytes = planes.map(|plane| match plane {
                    Plane::Bytes(_) => [0; STEP],
                    Plane::Constant(byte) => [byte; STEP],
                });
                for at in (0..n).step_by(STEP) {
                    let step = STEP.min(n - at);
                    for (bytes, plane) in bytes.iter_mut().zip(&planes) {
                        if let Plane::Bytes(plane) = plane {
                            bytes[..step].copy_from_slice(&plane[at..at + step]);
                        }
                    }
                    let mut merged = [[0; $n]; STEP];
                    for (i, value) in merged.iter_mut().enumerate() {
                        let mut word: $word = 0;
                        for (k, bytes) in bytes.iter().enumerate() {
                            word |= $word::from(bytes[i]) << (8 * k);
                        }
                        *value = word.rotate_right(1).to_le_bytes();
                    }
                    values.extend_from_slice(merged[..step].as_flattened());
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
