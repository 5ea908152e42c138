//! One pass over the rows of a part, while they are in the cache.
//!
//! Rows are summed in blocks of [`BLOCK`] rows. Sums of a block are relative to a value of each column, its first finite one
//! (`shift`): with `d = x - shift`, the mean is `shift + sum(d) / n` and the sum of squared distances from the mean is
//! `sum(d²) - sum(d)² / n`. Since `shift` is one of the values, `sum(d²)` is at most `n + 1` times the result, so that the
//! difference loses at most the last digits of float64, also for a mean that is far larger than the deviations. Values of 16 bits
//! need no shift. They have at most 11 binary digits: sums of 128 values, of their squares, and `n sum(x²) - sum(x)²` are exact in
//! float64 while exponents differ by at most 8. If they differ more, distances from the mean are as large as the largest values, and
//! rounding is relative to them. Values of up to 32 bits are compared as float32 and summed as
//! float64.
//!
//! Each column is summed row by row, and each norm in eight lanes: the compiler neither reorders nor fuses floating-point
//! operations, so the result has the same bits on every machine.

use bytemuck::{Pod, Zeroable};

use super::moments::{Stats, Weights};
use super::summary::{LARGEST, LargestColumn, RowFacts, Summary, hash};
use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::kernels::{Loops, widest};
use crate::layout::row::Row;
use crate::memory::zeroed;
use crate::stream::rescale::{Real, SQUARABLE, norm_of};

/// Rows per block: their sums are relative to one of their values.
pub(super) const BLOCK: usize = 128;
/// Rows that are summed together: the sums of a column are loaded and stored once for all of them.
const TOGETHER: usize = 4;

/// Sums of a block: one value per column.
struct BlockSums<T> {
    /// The first finite value of the block; 0 if there is none.
    shift: Vec<f64>,
    /// Sums of finite values, relative to `shift`.
    sums: Vec<f64>,
    /// Sums of their squares.
    squares: Vec<f64>,
    low: Vec<T>,
    high: Vec<T>,
    zeros: Vec<u32>,
    nan: Vec<u32>,
    infinite: Vec<u32>,
}

/// float32 and float64: the type in which values are compared.
trait ComparedFloat: Real + PartialOrd {
    const LOWEST: Self;
    const HIGHEST: Self;
    const ZERO: Self;
}

macro_rules! value {
    ($float:ty) => {
        impl ComparedFloat for $float {
            const LOWEST: $float = <$float>::NEG_INFINITY;
            const HIGHEST: $float = <$float>::INFINITY;
            const ZERO: $float = 0.0;
        }
    };
}

value!(f32);
value!(f64);

/// An element of a row as it is summed.
trait SummedElement: Pod + Zeroable {
    type Value: ComparedFloat;
    /// The type that stored elements are cast to.
    const DTYPE: DType;
    /// Whether sums are relative to a value of the column.
    const SHIFTED: bool;
    fn value(self) -> Self::Value;
}

/// bfloat16, as stored.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
struct Brain(u16);

/// float16, as float32.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(transparent)]
struct Half(f32);

macro_rules! element {
    ($element:ty, $value:ty, $dtype:ident, $shifted:literal, $x:ident => $to_value:expr) => {
        impl SummedElement for $element {
            type Value = $value;
            const DTYPE: DType = DType::$dtype;
            const SHIFTED: bool = $shifted;

            #[inline(always)]
            fn value(self) -> $value {
                let $x = self;
                $to_value
            }
        }
    };
}

element!(Brain, f32, BF16, false, x => f32::from_bits(u32::from(x.0) << 16));
element!(Half, f32, F32, false, x => x.0);
element!(f32, f32, F32, true, x => x);
element!(f64, f64, F64, true, x => x);

/// One more where `counts`. A count of a block's rows cannot overflow, and a check of each costs half of the speed.
#[inline(always)]
fn counted(count: u32, counts: bool) -> u32 {
    count.wrapping_add(u32::from(counts))
}

impl<T: ComparedFloat> BlockSums<T> {
    fn new(width: usize) -> Result<BlockSums<T>> {
        Ok(BlockSums {
            shift: zeroed(width)?,
            sums: zeroed(width)?,
            squares: zeroed(width)?,
            low: zeroed(width)?,
            high: zeroed(width)?,
            zeros: zeroed(width)?,
            nan: zeroed(width)?,
            infinite: zeroed(width)?,
        })
    }

    /// Begins a block.
    fn clear(&mut self) {
        self.sums.fill(0.0);
        self.squares.fill(0.0);
        self.low.fill(T::HIGHEST);
        self.high.fill(T::LOWEST);
        for counts in [&mut self.zeros, &mut self.nan, &mut self.infinite] {
            counts.fill(0);
        }
    }

    /// Adds rows; returns the roots of their squares' sums, added as in [`norm_of`].
    /// If a value is not finite, its row's norm is not either, and the sums are wrong.
    #[inline(always)]
    fn add_finite<E: SummedElement<Value = T>, const N: usize>(&mut self, rows: [&[E]; N]) -> [f64; N] {
        let mut lanes = [[0f64; 8]; N];
        let whole = self.shift.len() / 8;
        let (shift, _) = self.shift.as_chunks::<8>();
        let (sums, _) = self.sums.as_chunks_mut::<8>();
        let (squares, _) = self.squares.as_chunks_mut::<8>();
        let (low, _) = self.low.as_chunks_mut::<8>();
        let (high, _) = self.high.as_chunks_mut::<8>();
        let (zeros, _) = self.zeros.as_chunks_mut::<8>();
        let rows8 = rows.map(|row| &row.as_chunks::<8>().0[..whole]);
        let columns = shift.iter().zip(sums).zip(squares).zip(low.iter_mut().zip(high)).zip(zeros);
        for (c, ((((shift, sums), squares), (low, high)), zeros)) in columns.enumerate() {
            let (mut s, mut q, mut lo, mut hi, mut z) = (*sums, *squares, *low, *high, *zeros);
            for n in 0..N {
                let row = &rows8[n][c];
                for k in 0..8 {
                    let x = row[k].value().wide();
                    let d = if E::SHIFTED { x - shift[k] } else { x };
                    s[k] += d;
                    q[k] += d * d;
                    lanes[n][k] += x * x;
                }
                for k in 0..8 {
                    let value = row[k].value();
                    lo[k] = if value < lo[k] { value } else { lo[k] };
                    hi[k] = if value > hi[k] { value } else { hi[k] };
                    z[k] = counted(z[k], value == T::ZERO);
                }
            }
            (*sums, *squares, *low, *high, *zeros) = (s, q, lo, hi, z);
        }
        let mut rest = [0f64; N];
        for (rest, row) in rest.iter_mut().zip(rows) {
            for (k, element) in row.iter().enumerate().skip(8 * whole) {
                let value = element.value();
                let x = value.wide();
                let d = if E::SHIFTED { x - self.shift[k] } else { x };
                self.sums[k] += d;
                self.squares[k] += d * d;
                *rest += x * x;
                self.low[k] = if value < self.low[k] { value } else { self.low[k] };
                self.high[k] = if value > self.high[k] { value } else { self.high[k] };
                self.zeros[k] = counted(self.zeros[k], value == T::ZERO);
            }
        }
        std::array::from_fn(|n| (lanes[n].iter().sum::<f64>() + rest[n]).sqrt())
    }

    /// Adds the finite values of a row, and counts the others.
    #[inline(always)]
    fn add_some<E: SummedElement<Value = T>>(&mut self, row: &[E]) {
        for (k, element) in row.iter().enumerate() {
            let value = element.value();
            let x = value.wide();
            let finite = x.is_finite();
            let d = if finite { x - self.shift[k] } else { 0.0 };
            self.sums[k] += d;
            self.squares[k] += d * d;
            self.low[k] = if finite && value < self.low[k] { value } else { self.low[k] };
            self.high[k] = if finite && value > self.high[k] { value } else { self.high[k] };
            self.nan[k] = counted(self.nan[k], x.is_nan());
            self.infinite[k] = counted(self.infinite[k], x.is_infinite());
            self.zeros[k] = counted(self.zeros[k], value == T::ZERO);
        }
    }
}

/// The memory of a thread that sums parts, for rows of one type.
struct PartOf<E: SummedElement> {
    row: Row,
    columns: BlockSums<E::Value>,
    /// Some rows, where their stored type or place needs a copy.
    elements: Vec<E>,
    /// Whether the part has values that are not finite.
    bad: bool,
    /// The largest finite magnitude of each column in the part.
    largest: Vec<f64>,
    /// The first block that has it.
    blocks: Vec<u32>,
    facts: RowFacts,
}

impl<E: SummedElement> PartOf<E> {
    fn new(row: Row) -> Result<PartOf<E>> {
        Ok(PartOf {
            row,
            columns: BlockSums::new(row.width)?,
            elements: zeroed(TOGETHER.max(BLOCK.div_ceil(row.width.max(1))) * row.width)?,
            bad: false,
            largest: zeroed(row.width)?,
            blocks: zeroed(row.width)?,
            facts: RowFacts::default(),
        })
    }

    /// The first finite value of each column of a block.
    fn set_shift(&mut self, cast: Cast<'_>, block: &[u8]) {
        let width = self.row.width;
        let mut missing = width;
        self.columns.shift.fill(f64::NAN);
        for raw in block.chunks_exact(self.row.bytes) {
            cast.apply(raw, bytemuck::cast_slice_mut(&mut self.elements[..width]));
            for (shift, element) in self.columns.shift.iter_mut().zip(&self.elements[..width]) {
                let x = element.value().wide();
                if shift.is_nan() && x.is_finite() {
                    *shift = x;
                    missing -= 1;
                }
            }
            if missing == 0 {
                return;
            }
        }
        self.columns.shift.iter_mut().filter(|shift| shift.is_nan()).for_each(|shift| *shift = 0.0);
    }

    /// Sums a block.
    #[inline(always)]
    fn add_block(&mut self, cast: Cast<'_>, block: &[u8]) {
        if E::SHIFTED {
            self.set_shift(cast, block);
        }
        self.columns.clear();
        let (width, before) = (self.row.width, self.facts.norms.len());
        for raw in block.chunks(TOGETHER * self.row.bytes) {
            let first = self.facts.norms.len();
            for row in raw.chunks_exact(self.row.bytes) {
                self.facts.hashes.push(hash(row));
            }
            let n = raw.len() / self.row.bytes;
            let rows = as_elements(cast, raw, &mut self.elements[..n * width]);
            let row = |n: usize| &rows[n * width..(n + 1) * width];
            if n == TOGETHER {
                let norms = self.columns.add_finite::<E, TOGETHER>(std::array::from_fn(row));
                self.facts.norms.extend_from_slice(&norms);
            } else {
                for n in 0..n {
                    self.facts.norms.extend_from_slice(&self.columns.add_finite::<E, 1>([row(n)]));
                }
            }
            if E::DTYPE == DType::F64 {
                for (norm, row) in self.facts.norms[first..].iter_mut().zip(rows.chunks_exact(width)) {
                    if !SQUARABLE.contains(norm) {
                        *norm = norm_of::<f64>(bytemuck::cast_slice(row));
                    }
                }
            }
        }
        if self.facts.norms[before..].iter().any(|norm| !norm.is_finite()) {
            self.add_again(cast, block);
        }
    }

    /// Sums a block with values that are not finite, or whose squares are not.
    #[cold]
    fn add_again(&mut self, cast: Cast<'_>, block: &[u8]) {
        self.bad = true;
        self.columns.clear();
        for raw in block.chunks(self.row.bytes) {
            self.columns.add_some(as_elements(cast, raw, &mut self.elements[..self.row.width]));
        }
    }

    /// Adds the block's sums to those of the part.
    #[inline(always)]
    fn fold(&mut self, number: u32, rows: u64, made: &mut Stats) {
        if self.bad {
            self.fold_moments::<true>(rows, made);
        } else {
            self.fold_moments::<false>(rows, made);
        }
        let from = &self.columns;
        for k in 0..from.shift.len() {
            let (low, high) = (from.low[k].wide(), from.high[k].wide());
            made.min[k] = if low < made.min[k] { low } else { made.min[k] };
            made.max[k] = if high > made.max[k] { high } else { made.max[k] };
            // -infinity without finite values.
            let magnitude = if high > -low { high } else { -low };
            let larger = magnitude > self.largest[k];
            self.largest[k] = if larger { magnitude } else { self.largest[k] };
            self.blocks[k] = if larger { number } else { self.blocks[k] };
        }
        let add = |to: &mut [u64], from: &[u32]| to.iter_mut().zip(from).for_each(|(n, more)| *n += u64::from(*more));
        add(&mut made.summary.zeros, &from.zeros);
        if self.bad {
            add(&mut made.nan, &from.nan);
            add(&mut made.infinite, &from.infinite);
        }
        made.rows += rows;
    }

    /// Means, squares and counts. `BAD`: columns may have different numbers of finite values. The results are the same without.
    #[inline(always)]
    fn fold_moments<const BAD: bool>(&mut self, rows: u64, made: &mut Stats) {
        let from = &self.columns;
        let (weights, of_all) = (Weights::of(made.rows, rows), rows.max(1) as f64);
        let columns = from.shift.iter().zip(&from.sums).zip(&from.squares).zip(from.nan.iter().zip(&from.infinite));
        let to = made.mean.iter_mut().zip(&mut made.squares).zip(&mut made.finite);
        for ((((shift, sum), squares), (nan, infinite)), ((mean, all), finite)) in columns.zip(to) {
            let some = rows - if BAD { u64::from(*nan) + u64::from(*infinite) } else { 0 };
            let n = if BAD { some.max(1) as f64 } else { of_all };
            let by = sum / n;
            // Without a shift, both products are exact, which the mean is not. With one, `sum * sum` may overflow, and so may squares.
            // Rounding may make the difference less than 0.
            let around = if E::SHIFTED { squares - sum * by } else { (n * squares - sum * sum) / n };
            let around = if around > 0.0 { around } else { 0.0 };
            let around = if squares.is_finite() { around } else { f64::INFINITY };
            let weights = if BAD { Weights::of(*finite, some) } else { weights };
            weights.join((mean, all), (shift + by, around));
            *finite += some;
        }
    }

    /// The statistics of the rows of a part. `ids`: example and token of each row.
    fn sum(&mut self, raw: &[u8], ids: (&[i64], &[i64])) -> Result<Stats> {
        let cast = Cast::between(self.row.dtype, E::DTYPE)?;
        let mut made = Stats::new(self.row.width)?;
        self.facts.clear();
        self.largest.fill(0.0);
        self.bad = false;
        let of_block = BLOCK * self.row.bytes;
        for (number, block) in raw.chunks(of_block).enumerate() {
            widest(AddBlock { part: self, cast, block, number: number as u32, made: &mut made });
        }
        for norm in self.facts.norms.iter().filter(|norm| norm.is_finite()) {
            made.norms = (made.norms.0 + norm, made.norms.1 + 1);
        }
        let zeros = std::mem::take(&mut made.summary.zeros);
        let columns = largest_of(&self.largest).into_iter().filter_map(|column| {
            let (magnitude, number) = (self.largest[column], self.blocks[column] as usize);
            let block = raw.chunks(of_block).nth(number)?;
            let row = number * BLOCK + first_of(cast, &self.row, (block, &mut self.elements), (column, magnitude))?;
            Some(LargestColumn { column: column as u64, magnitude, place: (ids.0[row] as u64, ids.1[row] as u64) })
        });
        let columns = columns.collect();
        made.summary = Summary::of(&mut self.facts, ids, zeros, columns);
        Ok(made)
    }
}

/// The sum of a block, compiled for each set of instructions.
struct AddBlock<'a, E: SummedElement> {
    part: &'a mut PartOf<E>,
    cast: Cast<'a>,
    block: &'a [u8],
    number: u32,
    made: &'a mut Stats,
}

impl<E: SummedElement> Loops for AddBlock<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        self.part.add_block(self.cast, self.block);
        self.part.fold(self.number, (self.block.len() / self.part.row.bytes) as u64, self.made);
    }
}

/// Rows as they are summed: in place where they are, or cast to `elements`.
#[inline(always)]
fn as_elements<'a, E: SummedElement>(cast: Cast<'_>, raw: &'a [u8], elements: &'a mut [E]) -> &'a [E] {
    if cast.is_copy()
        && let Ok(rows) = bytemuck::try_cast_slice(raw)
    {
        return rows;
    }
    cast.apply(raw, bytemuck::cast_slice_mut(elements));
    elements
}

/// The first row of a block whose value in a column has this magnitude.
fn first_of<E: SummedElement>(
    cast: Cast<'_>,
    row: &Row,
    (block, elements): (&[u8], &mut [E]),
    (column, magnitude): (usize, f64),
) -> Option<usize> {
    let size = cast.from_size;
    let mut stored = [0u8; size_of::<f64>() * BLOCK];
    let n = block.len() / row.bytes;
    for (to, row) in stored.chunks_exact_mut(size).zip(block.chunks_exact(row.bytes)) {
        to.copy_from_slice(&row[column * size..][..size]);
    }
    cast.apply(&stored[..n * size], bytemuck::cast_slice_mut(&mut elements[..n]));
    elements[..n].iter().position(|element| element.value().wide().abs() == magnitude)
}

/// The columns of the largest magnitudes, at most [`LARGEST`].
fn largest_of(magnitudes: &[f64]) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..magnitudes.len()).filter(|k| magnitudes[*k] > 0.0).collect();
    if columns.len() > LARGEST {
        let order = |a: &usize, b: &usize| magnitudes[*b].total_cmp(&magnitudes[*a]).then(a.cmp(b));
        columns.select_nth_unstable_by(LARGEST - 1, order);
        columns.truncate(LARGEST);
    }
    columns
}

/// What sums parts on one thread. It reuses its memory.
pub(super) struct Summer(OfType);

enum OfType {
    Brain(Box<PartOf<Brain>>),
    Half(Box<PartOf<Half>>),
    Single(Box<PartOf<f32>>),
    Double(Box<PartOf<f64>>),
}

impl Summer {
    /// Errors if rows are of no floating type.
    pub(super) fn new(row: Row) -> Result<Summer> {
        Ok(Summer(match row.dtype {
            DType::BF16 => OfType::Brain(Box::new(PartOf::new(row)?)),
            DType::F16 => OfType::Half(Box::new(PartOf::new(row)?)),
            DType::F32 => OfType::Single(Box::new(PartOf::new(row)?)),
            DType::F64 => OfType::Double(Box::new(PartOf::new(row)?)),
            other => {
                let detail =
                    format!("statistics: expected float64, float32, float16 or bfloat16, found {}", other.name());
                return Err(Error::new(Kind::DType, detail));
            }
        }))
    }

    /// Bytes of memory for rows of a type, and for facts about `rows` rows.
    pub(super) fn memory(row: Row, rows: u64) -> u64 {
        let value = if row.dtype == DType::F64 { 8 } else { 4 };
        let columns = 4 * 8 + 4 * 4 + (2 + TOGETHER as u64) * value;
        row.width as u64 * columns + rows * RowFacts::BYTES
    }

    /// The statistics of stored rows. `ids`: example and token of each.
    pub(super) fn sum(&mut self, raw: &[u8], ids: (&[i64], &[i64])) -> Result<Stats> {
        match &mut self.0 {
            OfType::Brain(part) => part.sum(raw, ids),
            OfType::Half(part) => part.sum(raw, ids),
            OfType::Single(part) => part.sum(raw, ids),
            OfType::Double(part) => part.sum(raw, ids),
        }
    }
}
