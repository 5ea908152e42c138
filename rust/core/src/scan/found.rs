//! The result of a scan.

/// Positions stored per oddity.
pub(super) const PLACES: usize = 16;

/// A suspicious property of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oddity {
    /// Contains NaN values.
    NotANumber,
    /// Contains infinite values.
    Infinite,
    /// All zeros.
    Zero,
    /// One repeated nonzero value.
    Constant,
}

impl Oddity {
    /// Every oddity.
    pub const ALL: [Oddity; 4] = [Oddity::NotANumber, Oddity::Infinite, Oddity::Zero, Oddity::Constant];
}

/// The result of a scan.
#[derive(Clone, Debug, Default)]
pub struct Scan {
    /// Number of rows.
    pub rows: u64,
    /// Number of rows with each oddity, indexed by the oddity.
    pub odd: [u64; 4],
    /// The first positions of each: example and token.
    pub places: [Vec<(u64, u64)>; 4],
    /// Numbers of NaN and of infinite values.
    pub bad: [u64; 2],
    /// Per column, all magnitudes (bits without the sign, for types with a signed zero) OR-ed: 0 for a column of zeros.
    pub magnitudes: Vec<u64>,
    /// Per column, all differences to the first row OR-ed: 0 for a constant column.
    pub differences: Vec<u64>,
    /// The first row, as stored; empty without rows. Differences to another row are these OR-ed with the difference of both rows.
    pub first: Vec<u8>,
    /// Per example, a hash of its rows; equal bytes give equal hashes.
    pub hashes: Vec<u64>,
}

impl Scan {
    /// Adds the scan of rows that follow, whose differences are to the same row.
    pub(super) fn join(&mut self, next: Scan) {
        self.rows += next.rows;
        for k in 0..4 {
            self.odd[k] += next.odd[k];
            let room = PLACES - self.places[k].len().min(PLACES);
            self.places[k].extend(next.places[k].iter().take(room));
        }
        for k in 0..2 {
            self.bad[k] += next.bad[k];
        }
        for (all, mut part) in [(&mut self.magnitudes, next.magnitudes), (&mut self.differences, next.differences)] {
            // The first scan has no columns yet: take the other's memory.
            if all.len() < part.len() {
                std::mem::swap(all, &mut part);
            }
            all.iter_mut().zip(&part).for_each(|(a, b)| *a |= b);
        }
        self.hashes.extend(next.hashes);
    }
}
