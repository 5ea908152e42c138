//! Sums over rows, and how those of two sets of rows are combined.

use super::summary::Summary;
use crate::error::Result;
use crate::memory::zeroed;

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
    /// Zeros, norms, positions, and the largest.
    pub summary: Summary,
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
            summary: Summary::new(width)?,
        })
    }

    /// Adds the statistics of the rows that follow.
    pub fn join(&mut self, next: &Stats) {
        self.rows += next.rows;
        self.summary.join(&next.summary);
        self.norms = (self.norms.0 + next.norms.0, self.norms.1 + next.norms.1);
        for k in 0..self.mean.len() {
            let weights = Weights::of(self.finite[k], next.finite[k]);
            weights.join((&mut self.mean[k], &mut self.squares[k]), (next.mean[k], next.squares[k]));
            self.finite[k] += next.finite[k];
            // Not `f64::min`, which may return either of 0.0 and -0.0.
            self.min[k] = if next.min[k] < self.min[k] { next.min[k] } else { self.min[k] };
            self.max[k] = if next.max[k] > self.max[k] { next.max[k] } else { self.max[k] };
            self.nan[k] += next.nan[k];
            self.infinite[k] += next.infinite[k];
        }
    }
}

/// The numbers of values in two sets, by which their means and sums of squared distances are combined.
#[derive(Clone, Copy)]
pub(super) struct Weights {
    numbers: (u64, u64),
    /// The second set's part of all values.
    share: f64,
    /// The weight of the squared distance of the means.
    between: f64,
}

impl Weights {
    #[inline(always)]
    pub(super) fn of(first: u64, second: u64) -> Weights {
        let (a, b) = (first as f64, second as f64);
        Weights { numbers: (first, second), share: b / (a + b), between: a * b / (a + b) }
    }

    /// Adds the second set to the first. Source: Chan, Golub and LeVeque, see the module.
    #[inline(always)]
    pub(super) fn join(self, (mean, squares): (&mut f64, &mut f64), next: (f64, f64)) {
        match self.numbers {
            (_, 0) => (),
            (0, _) => (*mean, *squares) = next,
            _ => {
                let away = next.0 - *mean;
                *mean += away * self.share;
                *squares += next.1 + away * away * self.between;
            }
        }
    }
}
