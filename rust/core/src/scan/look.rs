//! The scan of one thread's rows: one pass of bit operations over each row while it is in the cache.

use super::found::{Oddity, PLACES, Scan};
use crate::dtype::DType;
use crate::error::Result;
use crate::memory::zeroed;

/// Elements as integers of their size.
trait ElementBits: Copy + bytemuck::AnyBitPattern {
    fn join(magnitudes: &mut [u64], differences: &mut [u64], mine: &Columns<Self>);
}

struct Columns<T> {
    first: Vec<T>,
    magnitudes: Vec<T>,
    differences: Vec<T>,
}

/// Properties of one row.
#[derive(Default)]
struct Facts {
    zero: bool,
    constant: bool,
    bad: bool,
}

macro_rules! bits {
    ($t:ty, $unsigned:ty, $row:ident) => {
        impl ElementBits for $t {
            fn join(magnitudes: &mut [u64], differences: &mut [u64], mine: &Columns<$t>) {
                for (all, part) in [(magnitudes, &mine.magnitudes), (differences, &mine.differences)] {
                    all.iter_mut().zip(part).for_each(|(a, b)| *a |= u64::from(*b as $unsigned));
                }
            }
        }

        /// Processes one row. Branch-free so that it vectorises; signed, because SSE2 compares signed integers. `mask`
        /// excludes a bit that is only a sign.
        #[inline(always)]
        fn $row(row: &[$t], columns: &mut Columns<$t>, mask: $t, infinity: $t) -> Facts {
            let head = row.first().copied().unwrap_or(0);
            let (mut any, mut varies, mut bad) = (0, 0, 0);
            let columns = columns.magnitudes.iter_mut().zip(&mut columns.differences).zip(&columns.first);
            for (x, ((magnitudes, differences), first)) in row.iter().zip(columns) {
                let magnitude = *x & mask;
                any |= magnitude;
                varies |= *x ^ head;
                bad |= if magnitude >= infinity { -1 } else { 0 };
                *magnitudes |= magnitude;
                *differences |= *x ^ *first;
            }
            Facts { zero: any == 0, constant: varies == 0, bad: bad != 0 }
        }
    };
}

bits!(i8, u8, row_of_8);
bits!(i16, u16, row_of_16);
bits!(i32, u32, row_of_32);
bits!(i64, u64, row_of_64);

enum Kernel {
    Of8(Columns<i8>),
    Of16(Columns<i16>),
    Of32(Columns<i32>),
    Of64(Columns<i64>),
}

/// The interpretation of an element's bits.
#[derive(Clone, Copy)]
struct Meaning {
    /// The bits that distinguish it from zero: all but the sign, for types with a signed zero.
    mask: i64,
    /// Magnitudes from here on are infinite or NaN; `i64::MAX` if there are none.
    infinity: i64,
    /// Bytes of a number; half an element for complex types.
    number: usize,
    /// For one-byte types: 1 for NaN, 2 for infinity.
    bytes: Option<&'static [u8; 256]>,
    /// Whether the type has a zero.
    zero: bool,
}

/// A table of a type's bytes: 1 for NaN, 2 for infinity.
const fn bytes_of(nan: &[(u8, u8)], infinite: &[u8]) -> [u8; 256] {
    let mut made = [0; 256];
    let mut k = 0;
    while k < nan.len() {
        let mut x = nan[k].0 as usize;
        while x <= nan[k].1 as usize {
            made[x] = 1;
            x += 1;
        }
        k += 1;
    }
    k = 0;
    while k < infinite.len() {
        made[infinite[k] as usize] = 2;
        k += 1;
    }
    made
}

// Micikevicius et al., "FP8 Formats for Deep Learning", 2022; OCP Microscaling Formats 1.0 for E8M0; FNUZ: the negative zero
// is the only NaN.
static E5M2: [u8; 256] = bytes_of(&[(0x7d, 0x7f), (0xfd, 0xff)], &[0x7c, 0xfc]);
static E4M3: [u8; 256] = bytes_of(&[(0x7f, 0x7f), (0xff, 0xff)], &[]);
static FNUZ: [u8; 256] = bytes_of(&[(0x80, 0x80)], &[]);
static E8M0: [u8; 256] = bytes_of(&[(0xff, 0xff)], &[]);

impl Meaning {
    fn of(dtype: DType) -> Meaning {
        let size = dtype.size().unwrap_or(1);
        let signed = i64::MAX >> (64 - 8 * size.min(8));
        let number = Meaning { mask: -1, infinity: i64::MAX, number: size, bytes: None, zero: true };
        let float = |infinity| Meaning { mask: signed, infinity, ..number };
        match dtype {
            DType::F16 => float(0x7c00),
            DType::BF16 => float(0x7f80),
            DType::F32 => float(0x7f80_0000),
            DType::F64 => float(0x7ff0_0000_0000_0000),
            DType::C64 => Meaning { mask: 0x7fff_ffff_7fff_ffff, infinity: 0x7f80_0000, number: 4, ..number },
            DType::F8E5M2 => Meaning { mask: signed, bytes: Some(&E5M2), ..number },
            DType::F8E4M3 => Meaning { mask: signed, bytes: Some(&E4M3), ..number },
            DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => Meaning { bytes: Some(&FNUZ), ..number },
            DType::F8E8M0 => Meaning { bytes: Some(&E8M0), zero: false, ..number },
            _ => number,
        }
    }

    /// The numbers of NaN and of infinite values in a row.
    fn count(&self, row: &[u8]) -> (u64, u64) {
        if let Some(bytes) = self.bytes {
            let of = |kind: u8| row.iter().filter(|b| bytes[usize::from(**b)] == kind).count() as u64;
            return (of(1), of(2));
        }
        count_bad(row, self.number, self.infinity)
    }
}

/// One thread's scan of some rows.
pub(super) struct Look {
    kernel: Kernel,
    meaning: Meaning,
    row_bytes: usize,
    width: usize,
    aligned: Vec<u64>,
    pub(super) found: Scan,
}

fn columns<T: ElementBits>(row: &[u8], width: usize) -> Result<Columns<T>> {
    let mut first = zeroed::<T>(width)?;
    if row.len() == width * size_of::<T>() {
        let elements = row.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned);
        first.iter_mut().zip(elements).for_each(|(to, element)| *to = element);
    }
    Ok(Columns { first, magnitudes: zeroed(width)?, differences: zeroed(width)? })
}

impl Look {
    pub(super) fn new(dtype: DType, width: usize, first: &[u8]) -> Result<Look> {
        let size = dtype.size().unwrap_or(1);
        let kernel = match size {
            1 => Kernel::Of8(columns(first, width)?),
            2 => Kernel::Of16(columns(first, width)?),
            4 => Kernel::Of32(columns(first, width)?),
            // Wider elements (complex numbers) are scanned as halves.
            n => Kernel::Of64(columns(first, width * n / 8)?),
        };
        let meaning = Meaning::of(dtype);
        Ok(Look { kernel, meaning, row_bytes: width * size, width, aligned: vec![], found: Scan::default() })
    }

    #[inline(always)]
    pub(super) fn example(&mut self, example: u64, bytes: &[u8]) {
        let mut hash = RowsHash::new();
        self.rows(example, 0, bytes, &mut hash);
        self.found.hashes.push(hash.done());
    }

    /// Scans the rows of an example from token `first` on.
    #[inline(always)]
    pub(super) fn rows(&mut self, example: u64, first: u64, bytes: &[u8], hash: &mut RowsHash) {
        for (token, row) in (first..).zip(bytes.chunks_exact(self.row_bytes.max(1))) {
            hash.add(row);
            let facts = self.row(row);
            self.found.rows += 1;
            let mut odd = |oddity: Oddity| {
                let k = oddity as usize;
                self.found.odd[k] += 1;
                if self.found.places[k].len() < PLACES {
                    self.found.places[k].push((example, token));
                }
            };
            let (nan, infinite) = if facts.bad { self.meaning.count(row) } else { (0, 0) };
            if facts.zero {
                odd(Oddity::Zero);
            } else if facts.constant && self.width > 1 && nan + infinite == 0 {
                odd(Oddity::Constant);
            }
            if nan > 0 {
                odd(Oddity::NotANumber);
            }
            if infinite > 0 {
                odd(Oddity::Infinite);
            }
            self.found.bad[0] += nan;
            self.found.bad[1] += infinite;
        }
    }

    #[inline(always)]
    fn row(&mut self, row: &[u8]) -> Facts {
        // Rows of a safetensors file may be unaligned.
        let row = if row.as_ptr().addr().is_multiple_of(8) {
            row
        } else {
            self.aligned.resize(row.len().div_ceil(8), 0);
            let place = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut self.aligned)[..row.len()];
            place.copy_from_slice(row);
            place
        };
        let Meaning { mask, infinity, number, bytes, zero } = self.meaning;
        // In a type without infinities the largest magnitude is a normal value.
        let floats = infinity != i64::MAX;
        let facts = match &mut self.kernel {
            Kernel::Of8(c) => row_of_8(bytemuck::cast_slice(row), c, mask as i8, i8::MAX),
            Kernel::Of16(c) => row_of_16(bytemuck::cast_slice(row), c, mask as i16, infinity.min(0x7fff) as i16),
            Kernel::Of32(c) => row_of_32(bytemuck::cast_slice(row), c, mask as i32, infinity.min(0x7fff_ffff) as i32),
            Kernel::Of64(c) => row_of_64(bytemuck::cast_slice(row), c, mask, infinity),
        };
        let bad = match bytes {
            Some(bytes) => row.iter().fold(0, |any, b| any | bytes[usize::from(*b)]) != 0,
            // For complex elements, the halves are counted one by one.
            None => floats && (facts.bad || number != self.row_bytes / self.width.max(1)),
        };
        Facts { zero: facts.zero && zero, bad, ..facts }
    }

    pub(super) fn done(mut self) -> Result<Scan> {
        (self.found.magnitudes, self.found.differences) = (zeroed(self.width)?, zeroed(self.width)?);
        let (m, d) = (&mut self.found.magnitudes, &mut self.found.differences);
        match &self.kernel {
            Kernel::Of8(c) => ElementBits::join(m, d, c),
            Kernel::Of16(c) => ElementBits::join(m, d, c),
            Kernel::Of32(c) => ElementBits::join(m, d, c),
            Kernel::Of64(c) => ElementBits::join(m, d, c),
        }
        if !self.meaning.zero && self.found.rows > 0 {
            // The type has no zero, so no column is zero: set a bit that no element uses.
            m.iter_mut().for_each(|m| *m |= 1 << 8);
        }
        Ok(self.found)
    }
}

/// The numbers of NaN and of infinite values in a row.
fn count_bad(row: &[u8], size: usize, infinity: i64) -> (u64, u64) {
    let (mut nan, mut infinite) = (0, 0);
    for element in row.chunks_exact(size) {
        let mut bits = [0; 8];
        bits[..size].copy_from_slice(element);
        let magnitude = i64::from_le_bytes(bits) & (i64::MAX >> (64 - 8 * size));
        nan += u64::from(magnitude > infinity);
        infinite += u64::from(magnitude == infinity);
    }
    (nan, infinite)
}

/// Four lanes of multiply and rotate: fast, and any change of one word changes it. Records of datasets contain it: it never changes.
pub(super) struct RowsHash([u64; 4]);

impl RowsHash {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

    pub(super) fn new() -> RowsHash {
        RowsHash([1, 2, 3, 4].map(|k| RowsHash::ODD.wrapping_mul(k)))
    }

    /// The hash of an example's rows.
    pub(super) fn of(bytes: &[u8], row_bytes: usize) -> u64 {
        let mut hash = RowsHash::new();
        bytes.chunks_exact(row_bytes.max(1)).for_each(|row| hash.add(row));
        hash.done()
    }

    #[inline(always)]
    fn add(&mut self, bytes: &[u8]) {
        let mix = |lane: &mut u64, word: u64| *lane = (*lane ^ word).wrapping_mul(RowsHash::ODD).rotate_left(29);
        let (whole, rest) = bytes.as_chunks::<32>();
        for block in whole {
            for (lane, word) in self.0.iter_mut().zip(block.as_chunks::<8>().0) {
                mix(lane, u64::from_le_bytes(*word));
            }
        }
        for (k, part) in rest.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            mix(&mut self.0[k], u64::from_le_bytes(word));
        }
        // Include row boundaries: the same bytes cut into other rows are a different example.
        mix(&mut self.0[3], bytes.len() as u64);
    }

    pub(super) fn done(&self) -> u64 {
        self.0.iter().fold(0, |all, lane| (all.rotate_left(23) ^ lane).wrapping_mul(RowsHash::ODD))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn look_at(dtype: DType, width: usize, rows: &[u8]) -> Scan {
        let size = width * dtype.size().unwrap();
        let mut look = Look::new(dtype, width, &rows[..size]).unwrap();
        look.example(0, rows);
        look.done().unwrap()
    }

    #[test]
    fn bytes_and_complex_numbers_that_are_no_numbers_are_found() {
        // (type, number of NaN bytes, number of infinite bytes), as ml_dtypes counts them.
        for (dtype, nan, infinite) in [
            (DType::F8E5M2, 6, 2),
            (DType::F8E4M3, 2, 0),
            (DType::F8E4M3Fnuz, 1, 0),
            (DType::F8E5M2Fnuz, 1, 0),
            (DType::F8E8M0, 1, 0),
            (DType::U8, 0, 0),
            (DType::I8, 0, 0),
        ] {
            let bytes: Vec<u8> = (0..=255).collect();
            let found = look_at(dtype, 256, &bytes);
            assert_eq!(found.bad, [nan, infinite], "{dtype:?}");
            assert_eq!(found.odd[..2], [u64::from(nan > 0), u64::from(infinite > 0)]);
        }
        let zeros = |dtype, bytes: &[u8]| look_at(dtype, 2, bytes).odd[Oddity::Zero as usize];
        assert_eq!([0x80, 0].map(|b| zeros(DType::F8E4M3, &[b, 0])), [1, 1]);
        assert_eq!([0x80, 0].map(|b| zeros(DType::F8E5M2Fnuz, &[b, 0])), [0, 1]);
        assert_eq!(zeros(DType::F8E8M0, &[0, 0]), 0);
        let complex = |values: [f32; 4]| look_at(DType::C64, 2, bytemuck::cast_slice(&values));
        assert_eq!(complex([1.0, f32::NAN, f32::INFINITY, f32::INFINITY]).bad, [1, 2]);
        assert_eq!(complex([-0.0, 0.0, 0.0, -0.0]).odd[Oddity::Zero as usize], 1);
        assert_eq!(complex([-1.0, 0.0, 0.0, -0.0]).bad, [0, 0]);
        let alike = |values: [f32; 4]| complex(values).odd[Oddity::Constant as usize];
        assert_eq!(alike([-1.0, 2.0, -1.0, 2.0]), 1);
        assert_eq!(alike([-1.0, f32::NAN, -1.0, f32::NAN]), 0);
    }

    proptest! {
        /// Compares with a simple count.
        #[test]
        fn oddities_are_counted(
            values in prop::collection::vec(prop_oneof![
                3 => any::<f32>(), 2 => Just(0.0f32), 1 => Just(-0.0), 1 => Just(f32::NAN), 1 => Just(f32::NEG_INFINITY), 1 => Just(2.5)
            ], 5..200),
            width in 1usize..9,
            shift in 0usize..8,
        ) {
            let n = values.len() / width;
            prop_assume!(n > 0);
            let values = &values[..n * width];
            let mut bytes = vec![0; shift];
            bytes.extend_from_slice(bytemuck::cast_slice(values));
            let found = look_at(DType::F32, width, &bytes[shift..]);
            let rows: Vec<&[f32]> = values.chunks(width).collect();
            let count = |f: &dyn Fn(&[f32]) -> bool| rows.iter().filter(|r| f(r)).count() as u64;
            let zero = |r: &[f32]| r.iter().all(|x| *x == 0.0);
            let alike = |r: &[f32]| width > 1 && r[0].is_finite() && r.iter().all(|x| x.to_bits() == r[0].to_bits()) && !zero(r);
            prop_assert_eq!(found.rows, n as u64);
            prop_assert_eq!(found.odd[0], count(&|r| r.iter().any(|x| x.is_nan())));
            prop_assert_eq!(found.odd[1], count(&|r| r.iter().any(|x| x.is_infinite())));
            prop_assert_eq!(found.odd[2], count(&zero));
            prop_assert_eq!(found.odd[3], count(&alike));
            prop_assert_eq!(found.bad[0], values.iter().filter(|x| x.is_nan()).count() as u64);
            prop_assert_eq!(found.bad[1], values.iter().filter(|x| x.is_infinite()).count() as u64);
            for k in 0..width {
                prop_assert_eq!(found.magnitudes[k] == 0, rows.iter().all(|r| r[k] == 0.0));
                prop_assert_eq!(found.differences[k] == 0, rows.iter().all(|r| r[k].to_bits() == rows[0][k].to_bits()));
            }
        }

        #[test]
        fn sixteen_bits_and_eight(bits in prop::collection::vec(any::<u16>(), 4..64)) {
            let half = bits.iter().filter(|b| half::f16::from_bits(**b).is_nan()).count() as u64;
            let brain = bits.iter().filter(|b| half::bf16::from_bits(**b).is_infinite()).count() as u64;
            let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
            prop_assert_eq!(look_at(DType::F16, bits.len(), &bytes).bad[0], half);
            prop_assert_eq!(look_at(DType::BF16, bits.len(), &bytes).bad[1], brain);
            prop_assert_eq!(look_at(DType::I16, bits.len(), &bytes).bad, [0, 0]);
            prop_assert_eq!(look_at(DType::U8, bytes.len(), &bytes).bad, [0, 0]);
        }

        /// Compares with reading each element as its own type.
        #[test]
        fn integers_have_no_sign_to_leave_out(bytes in prop::collection::vec(prop_oneof![Just(0u8), Just(0x80), any::<u8>()], 8..40)) {
            let bytes = &bytes[..bytes.len() / 8 * 8];
            for dtype in [DType::Bool, DType::U8, DType::I8, DType::U16, DType::I16, DType::U32, DType::I32, DType::U64, DType::I64] {
                let size = dtype.size().unwrap();
                let found = look_at(dtype, 8 / size, bytes);
                let zeros = bytes.chunks(8).filter(|row| row.iter().all(|b| *b == 0)).count() as u64;
                prop_assert_eq!(found.odd[Oddity::Zero as usize], zeros);
                prop_assert_eq!(found.bad, [0, 0]);
                for column in 0..8 / size {
                    let dead = bytes.chunks(8).all(|row| row[column * size..][..size].iter().all(|b| *b == 0));
                    prop_assert_eq!(found.magnitudes[column] == 0, dead);
                }
            }
        }

        #[test]
        fn examples_in_memory_have_the_hashes_of_a_scan(counts in prop::collection::vec(0i64..5, 0..40), width in 1usize..70, seed: u64) {
            let rows = counts.iter().sum::<i64>() as usize;
            let bytes: Vec<u8> = (0..(rows * width) as u64).map(|i| (i ^ seed).wrapping_mul(RowsHash::ODD).to_le_bytes()[7]).collect();
            let mut look = Look::new(DType::U8, width, &vec![0; width]).unwrap();
            let mut rest = &bytes[..];
            for (example, count) in (0..).zip(&counts) {
                let (mine, others) = rest.split_at(*count as usize * width);
                look.example(example, mine);
                rest = others;
            }
            let hash = |bytes: &[u8]| crate::scan::hash_rows(bytes, width, &counts, &mut || false);
            prop_assert_eq!(hash(&bytes).unwrap(), look.done().unwrap().hashes);
            prop_assert!(hash(&[&bytes[..], &[0]].concat()).is_err());
            prop_assert!(rows == 0 || hash(&bytes[1..]).is_err());
        }

        #[test]
        fn one_bit_makes_another_hash(bytes in prop::collection::vec(any::<u8>(), 1..300), at: prop::sample::Index, bit in 0u8..8) {
            let of = |b: &[u8]| { let mut h = RowsHash::new(); h.add(b); h.done() };
            let mut other = bytes.clone();
            other[at.index(bytes.len())] ^= 1 << bit;
            prop_assert_ne!(of(&bytes), of(&other));
        }
    }
}
