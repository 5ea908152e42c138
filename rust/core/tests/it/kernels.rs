//! Every kernel gives the bytes of a naive loop: for all patterns of 16-bit types, special and random values of the others, all
//! lengths and alignments, and both kinds of stores. `portable` is tested too, also where the processor has faster kernels.

use actshard_core::kernels::{self, Conversion, Float, portable};
use half::{bf16, f16};
use proptest::prelude::*;

const FLOATS: [Float; 4] = [Float::F16, Float::BF16, Float::F32, Float::F64];

fn size(float: Float) -> usize {
    match float {
        Float::F16 | Float::BF16 => 2,
        Float::F32 => 4,
        Float::F64 => 8,
    }
}

fn pairs() -> impl Iterator<Item = (Float, Float)> {
    FLOATS.iter().flat_map(|from| FLOATS.iter().map(|to| (*from, *to))).filter(|(from, to)| from != to)
}

/// The conversions by which files were read before there were kernels, one element at a time.
mod oracle {
    use super::{Float, bf16, f16, size};

    fn widen(x: u16) -> f32 {
        f32::from_bits(u32::from(x) << 16)
    }

    fn narrow(x: f32) -> u16 {
        let bits = x.to_bits();
        if x.is_nan() {
            return (bits >> 16) as u16 | 0x40;
        }
        (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16
    }

    fn to_odd(x: f64) -> f32 {
        let near = x as f32;
        if near.is_nan() || f64::from(near) == x || near.to_bits() & 1 == 1 {
            return near;
        }
        let toward_zero = f64::from(near).abs() > x.abs();
        f32::from_bits(if toward_zero { near.to_bits() - 1 } else { near.to_bits() + 1 })
    }

    fn one(from: Float, to: Float, bits: u64) -> u64 {
        let double = f64::from_bits(bits);
        let single = match from {
            Float::F16 => f16::from_bits(bits as u16).to_f32(),
            Float::BF16 => widen(bits as u16),
            Float::F32 => f32::from_bits(bits as u32),
            Float::F64 if to == Float::F32 => double as f32,
            Float::F64 => to_odd(double),
        };
        match to {
            Float::F16 => u64::from(f16::from_f32(single).to_bits()),
            Float::BF16 => u64::from(bf16::from_bits(narrow(single)).to_bits()),
            Float::F32 => u64::from(single.to_bits()),
            Float::F64 => f64::from(single).to_bits(),
        }
    }

    pub fn convert(from: Float, to: Float, src: &[u8]) -> Vec<u8> {
        let each = src.chunks_exact(size(from)).map(|element| {
            let mut bits = [0; 8];
            bits[..element.len()].copy_from_slice(element);
            one(from, to, u64::from_le_bytes(bits))
        });
        each.flat_map(|bits| bits.to_le_bytes()[..size(to)].to_vec()).collect()
    }
}

fn bytes_of(float: Float, patterns: impl Iterator<Item = u64>) -> Vec<u8> {
    patterns.flat_map(|bits| bits.to_le_bytes()[..size(float)].to_vec()).collect()
}

/// All patterns of a 16-bit type; of the others: patterns at equal distances, every exponent with edge fractions, and values
/// next to the limits of every type.
fn patterns(float: Float) -> Vec<u8> {
    let edges = |bits: u32, fraction: u32| {
        let exponents = 1u64 << (bits - fraction - 1);
        let edge: Vec<u64> =
            (0..fraction).flat_map(|b| [1u64 << b, (1 << b) - 1, (1 << fraction) - (1 << b)]).collect();
        (0..exponents * 2).flat_map(move |upper| edge.clone().into_iter().map(move |low| upper << fraction | low))
    };
    match float {
        Float::F16 | Float::BF16 => bytes_of(float, 0..1 << 16),
        Float::F32 => bytes_of(float, (0..1 << 32).step_by(8_191).chain(edges(32, 23))),
        Float::F64 => {
            let near = (0..1u64 << 32).step_by(16_381).map(|bits| f64::from(f32::from_bits(bits as u32)).to_bits());
            let around =
                near.flat_map(|bits| [bits.wrapping_sub(1), bits, bits + 1, bits ^ 1 << 28, bits ^ 0x0fff_ffff]);
            bytes_of(float, around.chain(edges(64, 52)))
        }
    }
}

fn engines(from: Float, to: Float) -> [(&'static str, Conversion); 2] {
    [("best", kernels::conversion(from, to).unwrap()), ("portable", portable::conversion(from, to).unwrap())]
}

#[test]
fn every_kernel_converts_like_the_oracle() {
    for (from, to) in pairs() {
        let src = patterns(from);
        let want = oracle::convert(from, to, &src);
        for ((name, kernel), stream) in engines(from, to).into_iter().flat_map(|e| [(e, false), (e, true)]) {
            let mut got = vec![0xa5; want.len()];
            kernels::storing(stream, |stores| kernel(&src, &mut got, stores));
            let wrong = got.chunks(size(to)).zip(want.chunks(size(to))).position(|(g, w)| g != w);
            let what = wrong.map(|i| &src[i * size(from)..(i + 1) * size(from)]);
            assert_eq!(what, None, "{name} {from:?} to {to:?}, streamed: {stream}");
        }
    }
}

/// Bytes before and after the output stay as they are.
#[test]
fn all_lengths_and_alignments_are_converted() {
    let src = patterns(Float::F16);
    for (from, to) in pairs() {
        for elements in (0..100).chain([127, 128, 129, 768, 1000]) {
            for (before, shift) in [(0, 0), (1, 3), (2, 8), (4, 1), (8, 5), (16, 0), (24, 2), (40, 7), (62, 4), (63, 6)]
            {
                let src = &src[20_000 + shift..][..elements * size(from)];
                let want = oracle::convert(from, to, src);
                for ((name, kernel), stream) in engines(from, to).into_iter().flat_map(|e| [(e, false), (e, true)]) {
                    let mut out = vec![0xa5; before + want.len() + 64];
                    kernels::storing(stream, |stores| kernel(src, &mut out[before..before + want.len()], stores));
                    let rest = out[..before].iter().chain(&out[before + want.len()..]);
                    assert!(rest.copied().all(|b| b == 0xa5), "{name} {from:?} {to:?} {elements} {before}");
                    assert_eq!(out[before..before + want.len()], want, "{name} {from:?} {to:?} {elements} {before}");
                }
            }
        }
    }
}

#[test]
fn copies_of_all_lengths_and_alignments_are_exact() {
    let src: Vec<u8> = (0..5_000u32).map(|i| (i * 31 % 251) as u8).collect();
    for stream in [false, true] {
        for n in (0..700).chain([1023, 1024, 3072, 4096, 4099]) {
            for (from, to) in [(0, 0), (1, 0), (0, 1), (5, 16), (64, 63), (17, 48), (33, 32)] {
                let mut out = vec![0xa5; to + n + 64];
                kernels::storing(stream, |stores| kernels::copy(&src[from..from + n], &mut out[to..to + n], stores));
                assert_eq!(out[to..to + n], src[from..from + n]);
                assert!(out[..to].iter().chain(&out[to + n..]).all(|b| *b == 0xa5), "{n} {from} {to}");
            }
        }
    }
}

/// Streamed lines are complete when another thread is told that they are.
#[test]
fn streamed_stores_are_seen_by_other_threads() {
    let src = vec![7u8; 1 << 20];
    for _ in 0..20 {
        let mut out = vec![0u8; src.len()];
        std::thread::scope(|scope| {
            for (out, src) in out.chunks_mut(1 << 18).zip(src.chunks(1 << 18)) {
                scope.spawn(move || kernels::storing(true, |stores| kernels::copy(src, out, stores)));
            }
        });
        assert!(out == src);
    }
}

/// A kernel that returns false made no finite value infinite.
#[test]
fn overflows_are_not_overlooked() {
    let infinite = |float: Float, element: &[u8]| {
        let bits = oracle::convert(float, if float == Float::F64 { Float::F32 } else { Float::F64 }, element);
        match float {
            Float::F64 => f64::from_le_bytes(element.try_into().unwrap()).is_infinite(),
            _ => f64::from_le_bytes(bits.try_into().unwrap()).is_infinite(),
        }
    };
    for (from, to) in pairs() {
        let (kernel, src) = (kernels::conversion(from, to).unwrap(), patterns(from));
        for (i, element) in src.chunks_exact(size(from)).enumerate().step_by(7) {
            let want = oracle::convert(from, to, element);
            if !infinite(from, element) && infinite(to, &want) {
                let n = [1, 31, 32, 33, 70][i % 5];
                let mut src = vec![0; n * size(from)];
                src[i % n * size(from)..][..size(from)].copy_from_slice(element);
                let mut got = vec![0; n * size(to)];
                let stream = i % 2 == 0;
                assert!(
                    kernels::storing(stream, |stores| kernel(&src, &mut got, stores)),
                    "{from:?} {to:?} {element:?}"
                );
            }
        }
    }
}

proptest! {
    #[test]
    fn random_values_convert_like_the_oracle(bits in prop::collection::vec(any::<u64>(), 0..300), stream: bool) {
        for (from, to) in pairs() {
            let src = bytes_of(from, bits.iter().copied());
            let want = oracle::convert(from, to, &src);
            for (_, kernel) in engines(from, to) {
                let mut got = vec![0; want.len()];
                kernels::storing(stream, |stores| kernel(&src, &mut got, stores));
                prop_assert_eq!(&got, &want);
            }
        }
    }

    #[test]
    fn magnitudes_are_found_and_counted(
        bytes in prop::collection::vec(any::<u8>(), 0..2_000), element in prop::sample::select(vec![2usize, 4, 8]),
        (first, span) in (any::<u64>(), any::<u64>()),
    ) {
        let most = u64::MAX >> (65 - 8 * element);
        let first = first % most;
        let end = first + span % (most - first) + 1;
        let magnitude = |e: &[u8]| e.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b)) & most;
        let want = bytes.chunks_exact(element).filter(|e| (first..end).contains(&magnitude(e))).count() as u64;
        prop_assert_eq!(portable::count_within(element, &bytes, first, end), want);
        prop_assert_eq!(kernels::any_within(element, &bytes, first, end), want > 0);
        prop_assert_eq!(portable::any_within(element, &bytes, first, end), want > 0);
    }
}
