//! Rows centred and scaled during the copy: `(row - center) * scale`, `(row - center) / divisor`, or scaled to a given norm.

use std::ops::{Div, Mul, Range, Sub};
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{Pod, Zeroable};

use crate::dtype::{Cast, DType, overflowed};
use crate::error::{Error, Kind, Result};
use crate::kernels::Stores;

/// The scaling of rows, after the centre is subtracted.
#[derive(Clone, Debug, PartialEq)]
pub enum Scale {
    /// No scaling.
    None,
    /// One factor per element; for one group, or for each group in turn.
    By(Vec<f64>),
    /// One divisor per element, likewise.
    Divide(Vec<f64>),
    /// Scales each row to this L2 norm. Rows of zeros, and rows with values that are not finite, stay as they are.
    ToNorm(f64),
}

/// The conversion of stored rows to rows of a batch.
#[derive(Debug)]
pub struct Convert {
    from: usize,
    to: usize,
    width: usize,
    plain: Cast<'static>,
    types: (DType, DType),
    change: Option<Change>,
    /// Finite values that became infinite since the last [`Convert::take_overflows`].
    overflows: AtomicU64,
}

/// Centre and scale, in the type of the arithmetic.
#[derive(Debug)]
enum Change {
    Single(Terms<f32>),
    Double(Terms<f64>),
}

#[derive(Debug)]
struct Terms<T> {
    read: Cast<'static>,
    write: Cast<'static>,
    center: Vec<T>,
    scale: ScaleOf<T>,
}

#[derive(Debug)]
enum ScaleOf<T> {
    None,
    By(Vec<T>),
    Divide(Vec<T>),
    ToNorm(f64),
}

/// Buffers for one row, reused.
#[derive(Default, Debug)]
pub struct Scratch(Vec<f32>, Vec<f64>);

impl Convert {
    /// `center` is empty, or has one element per column, or per column and group. The arithmetic is float32, or float64 if
    /// the stored or the requested type is, or if float32 lacks the range of a centre or factor.
    pub fn new(from: DType, to: DType, width: usize, groups: usize, center: Vec<f64>, scale: Scale) -> Result<Convert> {
        let double = from == DType::F64 || to == DType::F64 || !in_range(&center, &scale);
        Convert::with_arithmetic((from, to), double, (width, groups), center, scale)
    }

    /// As [`Convert::new`], in float64 whatever the types.
    pub fn in_double(
        (from, to): (DType, DType),
        (width, groups): (usize, usize),
        center: Vec<f64>,
        scale: Scale,
    ) -> Result<Convert> {
        Convert::with_arithmetic((from, to), true, (width, groups), center, scale)
    }

    fn with_arithmetic(
        (from, to): (DType, DType),
        double: bool,
        (width, groups): (usize, usize),
        center: Vec<f64>,
        scale: Scale,
    ) -> Result<Convert> {
        let plain = Cast::between(from, to)?;
        let fits = |n: usize| n == width || n == width * groups;
        let scales = match &scale {
            Scale::By(by) | Scale::Divide(by) => fits(by.len()),
            Scale::None | Scale::ToNorm(_) => true,
        };
        if !(center.is_empty() || fits(center.len())) || !scales {
            return Err(Error::new(
                Kind::Argument,
                format!("center and scale: expected {width} elements, or {groups} x {width}, one per layer"),
            ));
        }
        let change = if center.is_empty() && scale == Scale::None {
            None
        } else if double {
            Some(Change::Double(Terms::new(from, to, &center, &scale)?))
        } else {
            Some(Change::Single(Terms::new(from, to, &center, &scale)?))
        };
        let (types, overflows) = ((from, to), AtomicU64::new(0));
        let (from, to) = (width * plain.from_size, width * plain.to_size);
        Ok(Convert { from, to, width, plain, types, change, overflows })
    }

    /// Bytes of a stored row.
    pub fn from(&self) -> usize {
        self.from
    }

    /// Bytes of a row of a batch.
    pub fn to(&self) -> usize {
        self.to
    }

    /// The cast, if rows are neither centred nor scaled.
    pub fn cast(&self) -> Option<Cast<'_>> {
        self.change.is_none().then(|| self.plain.counting(&self.overflows))
    }

    /// Finite values that became infinite since the last call.
    pub fn take_overflows(&self) -> u64 {
        self.overflows.swap(0, Ordering::Relaxed)
    }

    /// Converts a row of a group.
    #[inline]
    pub fn row(&self, group: usize, src: &[u8], dst: &mut [u8], scratch: &mut Scratch, stores: Stores<'_>) {
        let found = match &self.change {
            None => return self.plain.counting(&self.overflows).apply_with(src, dst, stores),
            Some(Change::Single(terms)) => {
                scratch.0.resize(self.width, 0.0);
                terms.apply(group, src, &mut scratch.0);
                terms.put(self.types, src, &scratch.0, dst, stores)
            }
            Some(Change::Double(terms)) => {
                scratch.1.resize(self.width, 0.0);
                terms.apply(group, src, &mut scratch.1);
                terms.put(self.types, src, &scratch.1, dst, stores)
            }
        };
        if found > 0 {
            self.overflows.fetch_add(found, Ordering::Relaxed);
        }
    }
}

impl<T: Real> Terms<T> {
    fn new(from: DType, to: DType, center: &[f64], scale: &Scale) -> Result<Terms<T>> {
        let of = |all: &[f64]| all.iter().map(|x| T::of(*x)).collect();
        let scale = match scale {
            Scale::None => ScaleOf::None,
            Scale::By(by) => ScaleOf::By(of(by)),
            Scale::Divide(by) => ScaleOf::Divide(of(by)),
            Scale::ToNorm(norm) => ScaleOf::ToNorm(*norm),
        };
        let (read, write) = (Cast::between(from, T::DTYPE)?, Cast::between(T::DTYPE, to)?);
        Ok(Terms { read, write, center: of(center), scale })
    }

    /// Reads, centres and scales a row.
    fn apply(&self, group: usize, src: &[u8], row: &mut [T]) {
        self.read.apply(src, bytemuck::cast_slice_mut(row));
        let n = row.len();
        let of_group = |all: &Vec<T>| {
            let first = if all.len() > n { group * n } else { 0 };
            first..first + n
        };
        if !self.center.is_empty() {
            let center = &self.center[of_group(&self.center)];
            for (x, c) in row.iter_mut().zip(center) {
                *x = *x - *c;
            }
        }
        match &self.scale {
            ScaleOf::None => {}
            ScaleOf::By(by) => {
                let by = &by[of_group(by)];
                for (x, f) in row.iter_mut().zip(by) {
                    *x = *x * *f;
                }
            }
            ScaleOf::Divide(by) => {
                let by = &by[of_group(by)];
                for (x, f) in row.iter_mut().zip(by) {
                    *x = *x / *f;
                }
            }
            ScaleOf::ToNorm(norm) => to_norm(row, *norm),
        }
    }

    /// Writes a changed row; returns the number of finite values that became infinite.
    fn put(&self, (from, to): (DType, DType), src: &[u8], row: &[T], dst: &mut [u8], stores: Stores<'_>) -> u64 {
        let row = bytemuck::cast_slice(row);
        self.write.apply_with(row, dst, stores);
        overflowed((from, src), (T::DTYPE, row), to)
    }
}

/// Whether float32 has the range of these numbers. A factor that became infinite would make NaN of zeros.
fn in_range(center: &[f64], scale: &Scale) -> bool {
    let factors = match scale {
        Scale::By(by) | Scale::Divide(by) => by.as_slice(),
        Scale::None | Scale::ToNorm(_) => &[],
    };
    let single = |x: &f64| *x == 0.0 || !x.is_finite() || (*x as f32).is_normal();
    factors.iter().all(single) && center.iter().all(|x| !x.is_finite() || (*x as f32).is_finite())
}

/// Scales a row to an L2 norm. Rows of zeros, and rows with values that are not finite, stay as they are.
fn to_norm<T: Real>(row: &mut [T], norm: f64) {
    let found = root_of_squares(row);
    let factor = T::of(norm / found);
    if SQUARABLE.contains(&found) && factor.is_normal() {
        for x in row.iter_mut() {
            *x = *x * factor;
        }
        return;
    }
    // Products in float64.
    let (power, found) = scaled_norm(row, found);
    if found.is_finite() && found > 0.0 {
        for x in row.iter_mut() {
            *x = T::of(x.wide() * power * (norm / found));
        }
    }
}

/// Norms whose squares float64 represents with full precision. All norms of other dtypes than float64 are such, or 0.
pub(super) const SQUARABLE: Range<f64> = 1e-140..1e140;

/// A power of two, and its product with the norm of a row whose squares overflow or vanish. `found`: [`root_of_squares`].
fn scaled_norm<T: Real>(row: &[T], found: f64) -> (f64, f64) {
    let power = 2f64.powi(if found < 1.0 { 600 } else { -600 });
    (power, row.iter().map(|x| (x.wide() * power).powi(2)).sum::<f64>().sqrt())
}

/// The L2 norm, equal on every machine; not finite if a value is not, or if float64 does not represent it.
pub(super) fn norm_of<T: Real>(row: &[T]) -> f64 {
    let found = root_of_squares(row);
    if SQUARABLE.contains(&found) {
        return found;
    }
    let (power, found) = scaled_norm(row, found);
    found / power
}

/// The root of the squares' sum in eight lanes of float64.
#[inline]
fn root_of_squares<T: Real>(row: &[T]) -> f64 {
    let (chunks, rest) = row.as_chunks::<8>();
    let mut lanes = [0f64; 8];
    for chunk in chunks {
        for (lane, x) in lanes.iter_mut().zip(chunk) {
            let x = x.wide();
            *lane += x * x;
        }
    }
    let rest: f64 = rest.iter().map(|x| x.wide() * x.wide()).sum();
    (lanes.iter().sum::<f64>() + rest).sqrt()
}

/// float32 and float64.
pub(super) trait Real: Pod + Zeroable + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> {
    const DTYPE: DType;
    fn of(x: f64) -> Self;
    fn wide(self) -> f64;
    /// Neither zero, subnormal, infinite nor NaN.
    fn is_normal(self) -> bool;
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;
    fn of(x: f64) -> f32 {
        x as f32
    }
    fn wide(self) -> f64 {
        f64::from(self)
    }
    fn is_normal(self) -> bool {
        self.is_normal()
    }
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;
    fn of(x: f64) -> f64 {
        x
    }
    fn wide(self) -> f64 {
        self
    }
    fn is_normal(self) -> bool {
        self.is_normal()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn run(convert: &Convert, group: usize, row: &[f32]) -> Vec<f32> {
        let mut out = vec![0f32; row.len()];
        convert.row(
            group,
            bytemuck::cast_slice(row),
            bytemuck::cast_slice_mut(&mut out),
            &mut Scratch::default(),
            Stores::Cached,
        );
        out
    }

    #[test]
    fn rows_are_centred_scaled_and_brought_to_a_norm() {
        let f32s = |center: Vec<f64>, scale| Convert::new(DType::F32, DType::F32, 2, 2, center, scale);
        let row = [3.0, 4.0];
        assert_eq!(run(&f32s(vec![1.0, 2.0], Scale::None).unwrap(), 1, &row), [2.0, 2.0]);
        assert_eq!(run(&f32s(vec![1.0, 2.0, 3.0, 0.0], Scale::By(vec![2.0, 0.5])).unwrap(), 1, &row), [0.0, 2.0]);
        assert_eq!(run(&f32s(vec![], Scale::ToNorm(1.0)).unwrap(), 0, &row), [0.6, 0.8]);
        assert_eq!(run(&f32s(vec![], Scale::ToNorm(2f64.sqrt())).unwrap(), 0, &[0.0, 0.0]), [0.0, 0.0]);
        assert!(f32s(vec![1.0], Scale::None).is_err() && f32s(vec![], Scale::By(vec![1.0; 3])).is_err());
        assert!(f32s(vec![], Scale::None).unwrap().cast().is_some());
    }

    /// Quotients equal those of a division, and factors beyond float32 do not turn zeros into NaN.
    #[test]
    fn divisors_divide_and_factors_keep_their_range() {
        let f32s = |scale| Convert::new(DType::F32, DType::F32, 3, 1, vec![], scale).unwrap();
        let row = [1.0, 5.0, 1e-42];
        let thirds = run(&f32s(Scale::Divide(vec![3.0, 3.0, 3.0])), 0, &row);
        assert_eq!(thirds, row.map(|x| x / 3.0));
        for scale in [Scale::Divide(vec![1.0, 1e-300, 1e-42]), Scale::By(vec![1.0, 1e300, 1e42])] {
            assert!(matches!(f32s(scale.clone()).change, Some(Change::Double(_))));
            let found = run(&f32s(scale), 0, &[1.0, 0.0, 1e-42]);
            assert!(found[..2] == [1.0, 0.0] && (found[2] - 1.0).abs() < 1e-3, "{found:?}");
        }
        assert!(matches!(f32s(Scale::Divide(vec![2.0; 3])).change, Some(Change::Single(_))));
    }

    /// Rows with elements of any size get the requested norm; rows without a norm are unchanged.
    #[test]
    fn rows_of_any_size_are_brought_to_a_norm() {
        for to in [DType::F32, DType::F64] {
            for size in [1e-45, 1e-42, 1e-39, 1e-20, 1.0, 1e20, 1e38, 3e38] {
                let row = [size as f32, 0.0, -size as f32];
                let convert = Convert::new(DType::F32, to, 3, 1, vec![], Scale::ToNorm(2f64.sqrt())).unwrap();
                let mut out = vec![0; convert.to()];
                convert.row(0, bytemuck::cast_slice(&row), &mut out, &mut Scratch::default(), Stores::Cached);
                let found: Vec<f64> = match to {
                    DType::F32 => bytemuck::pod_collect_to_vec::<u8, f32>(&out).into_iter().map(f64::from).collect(),
                    _ => bytemuck::pod_collect_to_vec(&out),
                };
                let near = |x: f64, y: f64| (x - y).abs() < 1e-6;
                assert!(near(found[0], 1.0) && found[1] == 0.0 && near(found[2], -1.0), "{size} {found:?}");
                assert_eq!(convert.take_overflows(), 0);
            }
        }
        for size in [5e-324f64, 1e-310, 1e-200, 1e-141, 1e141, 1e200, 1.7e308] {
            let mut row = [size, 0.0, -size];
            to_norm(&mut row, 2f64.sqrt());
            assert!((row[0] - 1.0).abs() < 1e-12 && row[1] == 0.0 && (row[2] + 1.0).abs() < 1e-12, "{size} {row:?}");
        }
        for odd in [f32::INFINITY, f32::NAN] {
            let mut row = [odd, 1.0, 2.0];
            to_norm(&mut row, 1.0);
            assert_eq!(row.map(f32::to_bits), [odd, 1.0, 2.0].map(f32::to_bits));
        }
        let mut row = [0f64, -0.0];
        to_norm(&mut row, 1.0);
        assert_eq!(row, [0.0, 0.0]);
    }

    #[test]
    fn types_are_converted_on_the_way() {
        let convert = Convert::new(DType::F16, DType::F64, 1, 1, vec![0.5], Scale::By(vec![3.0])).unwrap();
        let mut out = [0f64];
        let src = half::f16::from_f32(2.0).to_le_bytes();
        convert.row(0, &src, bytemuck::cast_slice_mut(&mut out), &mut Scratch::default(), Stores::Cached);
        assert_eq!(out, [4.5]);
        assert_eq!(convert.take_overflows(), 0);
        assert!(Convert::new(DType::I32, DType::I32, 1, 1, vec![0.5], Scale::None).is_err());
        assert!(Convert::new(DType::I32, DType::I32, 1, 1, vec![], Scale::None).is_ok());
    }

    /// A cast or a factor may overflow; values that were infinite before are not counted.
    #[test]
    fn overflows_are_counted() {
        let row = [1e30f32, f32::INFINITY, 1.0, -3e38];
        for (to, scale, expected) in [
            (DType::F16, Scale::None, 2),
            (DType::F16, Scale::By(vec![1e-30; 4]), 1),
            (DType::F32, Scale::By(vec![10.0; 4]), 1),
            (DType::F32, Scale::None, 0),
        ] {
            let convert = Convert::new(DType::F32, to, 4, 1, vec![], scale).unwrap();
            let mut out = vec![0; convert.to()];
            convert.row(0, bytemuck::cast_slice(&row), &mut out, &mut Scratch::default(), Stores::Cached);
            assert_eq!(convert.take_overflows(), expected, "{to:?}");
            assert_eq!(convert.take_overflows(), 0);
        }
    }
}
