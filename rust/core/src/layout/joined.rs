//! Addresses in files that are joined to one sequence of rows, which examples cut into pieces:
//!
//! ```text
//! rows      0 1 2 3 4 5 6 7 8 9 ...     of one group: file 0, then file 1, ...
//! files     |  0    |    1    | ...     bounds [0, 4, 9, ...]; group g has the files g * files, g * files + 1, ...
//! examples  | 0 | 1   |  2 |  ...       ends [0, 2, 5, 8, ...], or equally long
//! ```
//!
//! All groups have files with the same numbers of rows. An example may cross files. Examples that are *void* keep their number
//! and have no rows; the rows of the sequence that they own are never read (a null row of an Arrow file, for example).

use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// The rows of each example.
#[derive(Debug)]
pub enum ExampleCut {
    /// This many examples of this many rows each.
    Even {
        /// Number of examples.
        examples: u64,
        /// Rows of each.
        tokens: u64,
    },
    /// Example i has the rows from entry i to entry i + 1.
    Ends(Vec<u64>),
}

impl ExampleCut {
    fn examples(&self) -> u64 {
        match self {
            ExampleCut::Even { examples, .. } => *examples,
            ExampleCut::Ends(ends) => (ends.len() as u64).saturating_sub(1),
        }
    }

    /// First row and number of rows.
    #[inline]
    fn of(&self, example: u64) -> (u64, u64) {
        match self {
            ExampleCut::Even { tokens, .. } => (example * tokens, *tokens),
            ExampleCut::Ends(ends) => {
                let first = ends[to_usize(example)];
                (first, ends[to_usize(example) + 1] - first)
            }
        }
    }
}

/// The layout.
#[derive(Debug)]
pub struct Joined {
    groups: usize,
    /// Row numbers between files, from 0 to the number of rows.
    bounds: Vec<u64>,
    cut: ExampleCut,
    /// Examples without rows, ascending.
    void: Vec<u64>,
}

impl Joined {
    /// Checks that bounds and ends ascend from 0, that examples end within the rows, and that each file has fewer than 2^40 rows.
    /// Whether a file contains its rows is checked when it is opened.
    pub fn new(groups: usize, rows: &[u64], cut: ExampleCut, void: Vec<u64>) -> Result<Joined> {
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        if groups == 0 {
            return refuse("expected at least one layer, found none".to_string());
        }
        let mut bounds = vec![0u64];
        for (file, n) in rows.iter().enumerate() {
            let end = bounds[file].checked_add(*n).filter(|end| *n < 1 << 40 && *end < 1 << 56);
            let Some(end) = end else { return refuse(format!("file {file}: {n} rows is too many")) };
            bounds.push(end);
        }
        let all = bounds[rows.len()];
        let used = match &cut {
            ExampleCut::Even { examples, tokens } => examples.checked_mul(*tokens),
            ExampleCut::Ends(ends) => {
                if let Some(i) = ends.windows(2).position(|pair| pair[0] > pair[1]) {
                    let (begin, end) = (ends[i], ends[i + 1]);
                    return refuse(format!("example {i}: expected an end from row {begin} on, found row {end}"));
                }
                ends.last().copied()
            }
        };
        if matches!(&cut, ExampleCut::Ends(ends) if ends.first() != Some(&0)) {
            return refuse("expected the first example to begin at row 0".to_string());
        }
        if cut.examples() >= 1 << 48 || used.is_none_or(|n| n > all) {
            let found = used.map_or("more".to_string(), |n| n.to_string());
            return refuse(format!("expected examples with {all} rows at most, the rows of the files, found {found}"));
        }
        if void.windows(2).any(|pair| pair[0] >= pair[1]) || void.last().is_some_and(|last| *last >= cut.examples()) {
            return refuse("expected ascending numbers of void examples".to_string());
        }
        Ok(Joined { groups, bounds, cut, void })
    }

    /// First row and number of rows of an example.
    #[inline]
    fn span(&self, example: u64) -> (u64, u64) {
        let (first, rows) = self.cut.of(example);
        let is_void = !self.void.is_empty() && self.void.binary_search(&example).is_ok();
        (first, if is_void { 0 } else { rows })
    }

    /// The file of a row of the sequence. Files are mostly of equal length, so the search begins at a guess.
    #[inline]
    fn file(&self, row: u64) -> usize {
        let guess = row.checked_div(self.bounds.get(1).copied().unwrap_or(0)).map_or(usize::MAX, to_usize);
        if guess < self.bounds.len() - 1 && self.bounds[guess] <= row && row < self.bounds[guess + 1] {
            return guess;
        }
        // Of files without rows, which share a bound, the last one before the row's.
        self.bounds.partition_point(|bound| *bound <= row) - 1
    }

    #[inline]
    fn address(&self, group: usize, row: u64) -> Address {
        let file = self.file(row);
        let files = self.bounds.len() - 1;
        Address { file: (group * files + file) as u64, row: row - self.bounds[file] }
    }
}

impl Layout for Joined {
    fn groups(&self) -> usize {
        self.groups
    }

    fn examples(&self) -> u64 {
        self.cut.examples()
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        self.span(example).1
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, self.groups)?;
        let example = check_example(example, self.examples())?;
        let (first, rows) = self.span(example);
        let token = check_token(token, rows, example)?;
        Ok(self.address(group, first + token))
    }

    #[inline]
    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        check_group(group, self.groups)?;
        let example = check_example(example, self.examples())?;
        let (mut first, mut rows) = self.span(example);
        while rows > 0 {
            let at = self.address(group, first);
            let file = to_usize(at.file) - group * (self.bounds.len() - 1);
            let here = rows.min(self.bounds[file + 1] - first);
            each(Run { at, rows: here });
            first += here;
            rows -= here;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn impossible_numbers_are_refused() {
        let even = |examples, tokens| ExampleCut::Even { examples, tokens };
        for (groups, rows, cut, void) in [
            (0, vec![4], even(1, 1), vec![]),
            (1, vec![4], even(5, 1), vec![]),
            (1, vec![4], even(u64::MAX, 2), vec![]),
            (1, vec![4], even(1 << 48, 0), vec![]),
            (1, vec![1 << 40], even(1, 1), vec![]),
            (1, vec![u64::MAX, 2], even(1, 1), vec![]),
            (1, vec![4], ExampleCut::Ends(vec![]), vec![]),
            (1, vec![4], ExampleCut::Ends(vec![1, 2]), vec![]),
            (1, vec![4], ExampleCut::Ends(vec![0, 3, 2]), vec![]),
            (1, vec![4], ExampleCut::Ends(vec![0, 5]), vec![]),
            (1, vec![], even(1, 1), vec![]),
            (1, vec![4], even(4, 1), vec![2, 2]),
            (1, vec![4], even(4, 1), vec![4]),
        ] {
            assert_eq!(Joined::new(groups, &rows, cut, void).unwrap_err().kind, Kind::Format);
        }
    }

    #[test]
    fn a_sequence_without_rows_has_examples_without_rows() {
        let layout = Joined::new(1, &[], ExampleCut::Even { examples: 3, tokens: 0 }, vec![]).unwrap();
        assert_eq!((layout.examples(), layout.tokens(0, 2)), (3, 0));
        assert_eq!(layout.locate(0, 2, 0).unwrap_err().kind, Kind::OutOfRange);
    }

    proptest! {
        /// The oracle lists every row of every file, and deals them out to the examples.
        #[test]
        fn examples_take_rows_in_order(
            groups in 1usize..4,
            files in prop::collection::vec(0u64..7, 0..6),
            lengths in prop::collection::vec(0u64..5, 0..8),
            even in any::<bool>(),
            void in prop::collection::btree_set(0u64..8, 0..3),
        ) {
            let all: Vec<(u64, u64)> =
                files.iter().enumerate().flat_map(|(f, n)| (0..*n).map(move |row| (f as u64, row))).collect();
            let lengths: Vec<u64> = if even { vec![lengths.first().copied().unwrap_or(0); lengths.len()] } else { lengths };
            let mut ends = vec![0];
            for n in &lengths {
                ends.push(ends[ends.len() - 1] + n);
            }
            let void: Vec<u64> = void.into_iter().filter(|e| (*e as usize) < lengths.len()).collect();
            let cut = if even {
                ExampleCut::Even { examples: lengths.len() as u64, tokens: lengths.first().copied().unwrap_or(0) }
            } else {
                ExampleCut::Ends(ends.clone())
            };
            let made = Joined::new(groups, &files, cut, void.clone());
            prop_assert_eq!(made.is_ok(), ends[lengths.len()] <= all.len() as u64);
            let Ok(layout) = made else { return Ok(()) };
            prop_assert_eq!(layout.examples(), lengths.len() as u64);
            for e in 0..lengths.len() {
                let own = if void.contains(&(e as u64)) { &[][..] } else { &all[ends[e] as usize..ends[e + 1] as usize] };
                for g in 0..groups {
                    let want: Vec<Address> =
                        own.iter().map(|(f, row)| Address { file: (g * files.len()) as u64 + f, row: *row }).collect();
                    prop_assert_eq!(layout.tokens(g, e as u64), want.len() as u64);
                    for (t, at) in want.iter().enumerate() {
                        prop_assert_eq!(layout.locate(g, e as i64, t as i64).unwrap(), *at);
                        prop_assert_eq!(layout.locate(g, e as i64, t as i64 - want.len() as i64).unwrap(), *at);
                    }
                    prop_assert!(layout.locate(g, e as i64, want.len() as i64).is_err());
                    prop_assert_eq!(layout.last(g, e as i64).ok(), want.last().copied());
                    let mut walked = vec![];
                    layout.runs(g, e as i64, &mut |run| {
                        walked.extend((0..run.rows).map(|i| Address { row: run.at.row + i, ..run.at }));
                    }).unwrap();
                    prop_assert_eq!(walked, want);
                }
            }
        }
    }
}
