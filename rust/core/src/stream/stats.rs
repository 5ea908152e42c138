//! Statistics of all rows in one pass: mean, variance and extremes of each element.
//!
//! Rows are divided into blocks of fixed size. Each block is summed separately in float64, and blocks are combined in order
//! (Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979), so the
//! result is the same for any number of threads. NaN and infinite values are counted and excluded.

use super::rescale::norm_of;
use super::select::Selection;
use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::gather::{Ints, Out, Pick};
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::threads::{self, Stop, Watch};

/// Rows per block: a block is summed twice while it is in the cache.
const BLOCK: usize = 256;
/// Rows read between two calls of the watch and of `progress`; bounds the memory for the sums of blocks.
const AT_ONCE: u64 = 1 << 16;

/// Sums over rows, per element.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Rows.
    pub rows: u64,
    /// Finite values.
    pub finite: Vec<u64>,
    /// Mean of the finite values; 0 if there are none.
    pub mean: Vec<f64>,
    /// The sum of squared distances from the mean.
    pub squares: Vec<f64>,
    /// The smallest finite value; infinity if there are none.
    pub min: Vec<f64>,
    /// The largest finite value; negative infinity if there are none.
    pub max: Vec<f64>,
    /// NaN values.
    pub nan: Vec<u64>,
    /// Infinite values.
    pub infinite: Vec<u64>,
    /// The sum of the L2 norms of rows with finite norms, and the number of those rows.
    pub norms: (f64, u64),
}

impl Stats {
    /// Statistics of no rows.
    pub fn new(width: usize) -> Result<Stats> {
        let of = |value: f64| -> Result<Vec<f64>> {
            let mut made = zeroed(width)?;
            made.fill(value);
            Ok(made)
        };
        Ok(Stats {
            rows: 0,
            finite: zeroed(width)?,
            mean: zeroed(width)?,
            squares: zeroed(width)?,
            min: of(f64::INFINITY)?,
            max: of(f64::NEG_INFINITY)?,
            nan: zeroed(width)?,
            infinite: zeroed(width)?,
            norms: (0.0, 0),
        })
    }

    /// Statistics of these rows.
    fn of(rows: &[f64], width: usize) -> Result<Stats> {
        let mut made = Stats::new(width)?;
        made.rows = (rows.len() / width) as u64;
        for row in rows.chunks_exact(width) {
            let norm = norm_of(row);
            if norm.is_finite() {
                made.norms = (made.norms.0 + norm, made.norms.1 + 1);
            }
            for (k, x) in row.iter().enumerate() {
                let finite = x.is_finite();
                let x_or_0 = if finite { *x } else { 0.0 };
                made.finite[k] += u64::from(finite);
                made.mean[k] += x_or_0;
                made.min[k] = if finite { made.min[k].min(*x) } else { made.min[k] };
                made.max[k] = if finite { made.max[k].max(*x) } else { made.max[k] };
                made.nan[k] += u64::from(x.is_nan());
                made.infinite[k] += u64::from(x.is_infinite());
            }
        }
        for (mean, n) in made.mean.iter_mut().zip(&made.finite) {
            *mean /= (*n).max(1) as f64;
        }
        for row in rows.chunks_exact(width) {
            for ((squares, mean), x) in made.squares.iter_mut().zip(&made.mean).zip(row) {
                let away = x - mean;
                *squares += if x.is_finite() { away * away } else { 0.0 };
            }
        }
        Ok(made)
    }

    /// Adds the statistics of the rows that follow.
    pub fn join(&mut self, next: &Stats) {
        self.rows += next.rows;
        self.norms = (self.norms.0 + next.norms.0, self.norms.1 + next.norms.1);
        for k in 0..self.mean.len() {
            let (a, b) = (self.finite[k] as f64, next.finite[k] as f64);
            if next.finite[k] > 0 {
                let away = next.mean[k] - self.mean[k];
                self.mean[k] += away * (b / (a + b));
                self.squares[k] += next.squares[k] + away * away * (a * b / (a + b));
            }
            self.finite[k] += next.finite[k];
            self.min[k] = self.min[k].min(next.min[k]);
            self.max[k] = self.max[k].max(next.max[k]);
            self.nan[k] += next.nan[k];
            self.infinite[k] += next.infinite[k];
        }
    }
}

/// Statistics of one group's picks. Calls `progress` regularly with the number of rows done.
pub fn stats(
    rows: &Rows,
    group: usize,
    selection: &Selection,
    progress: &mut dyn FnMut(u64),
    watch: Watch<'_>,
) -> Result<Stats> {
    let row = rows.row();
    let cast = Cast::between(row.dtype, DType::F64).map_err(|_| {
        Error::new(Kind::DType, format!("statistics: expected a floating type, found {}", row.dtype.name()))
    })?;
    let mut all = Stats::new(row.width)?;
    let total = selection.len();
    // Rows that need decoding are best read in large parts, by all threads together.
    let staged = rows.decodes();
    let mut done = 0;
    while done < total {
        let n = AT_ONCE.min(total - done).min(((64 << 20) / row.bytes as u64).max(BLOCK as u64));
        let (mut examples, mut tokens) = (Vec::with_capacity(n as usize), Vec::with_capacity(n as usize));
        for pick in done..done + n {
            let (example, token) = selection.get(pick);
            examples.push(example as i64);
            tokens.push(token as i64);
        }
        let read = |from: usize, to: usize, out: &mut [f64], watch: Watch<'_>| -> Result<()> {
            let pick =
                Pick::Tokens { examples: Ints::Each(&examples[from..to]), tokens: Ints::Each(&tokens[from..to]) };
            rows.gather(
                Ints::One(group as i64),
                pick,
                to - from,
                cast,
                Out::Dense(bytemuck::cast_slice_mut(out)),
                watch,
            )
        };
        let n = n as usize;
        let mut stage = zeroed::<f64>(if staged { n * row.width } else { 0 })?;
        if staged {
            read(0, n, &mut stage, &mut *watch)?;
        }
        let work = |b: usize, stop: &Stop| -> Result<Stats> {
            let (from, to) = (b * BLOCK, ((b + 1) * BLOCK).min(n));
            if staged {
                Stats::of(&stage[from * row.width..to * row.width], row.width)
            } else {
                let mut values = zeroed::<f64>((to - from) * row.width)?;
                read(from, to, &mut values, &mut || stop.is_set())?;
                Stats::of(&values, row.width)
            }
        };
        for block in threads::map(n.div_ceil(BLOCK), &work, &mut *watch)? {
            all.join(&block);
        }
        done += n as u64;
        progress(done);
    }
    Ok(all)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Compares the blocks' combination with one plain pass over all values.
        #[test]
        fn blocks_join_to_the_whole(values in prop::collection::vec(-1e3f64..1e3, 3..400), cut in 1usize..50, shift in -1e9f64..1e9) {
            let width = 3;
            let mut values: Vec<f64> = values.iter().map(|v| v + shift).collect();
            values.truncate(values.len() / width * width);
            values[0] = f64::NAN;
            values[1] = f64::NEG_INFINITY;
            let mut all = Stats::new(width).unwrap();
            for block in values.chunks(cut * width) {
                all.join(&Stats::of(block, width).unwrap());
            }
            let n = values.len() / width;
            prop_assert_eq!(all.rows, n as u64);
            prop_assert_eq!((all.nan[0], all.infinite[1], all.norms.1), (1, 1, n as u64 - 1));
            for k in 0..width {
                let column: Vec<f64> = values.iter().skip(k).step_by(width).copied().filter(|x| x.is_finite()).collect();
                let mean = column.iter().sum::<f64>() / column.len().max(1) as f64;
                let squares: f64 = column.iter().map(|x| (x - mean) * (x - mean)).sum();
                prop_assert_eq!(all.finite[k], column.len() as u64);
                prop_assert!((all.mean[k] - mean).abs() <= 1e-12 * mean.abs().max(1.0));
                prop_assert!((all.squares[k] - squares).abs() <= 1e-6 * squares.max(1.0), "{} {}", all.squares[k], squares);
                prop_assert_eq!(all.min[k], column.iter().copied().fold(f64::INFINITY, f64::min));
                prop_assert_eq!(all.max[k], column.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            }
        }
    }
}
