//! Examples whose rows are spread evenly in one file, so that a single strided array can view them.
//!
//! Two forms. *Packed*: the rows of all examples follow each other, in any number per example. *Stepped*: every example
//! has the same number of contiguous rows, and begins the same number of rows after (or before) the one before it, as
//! the layers of a C-ordered array `(examples, groups, tokens, width)` do.

use crate::error::Result;
use crate::layout::{Layout, Run};

/// The rows of several examples in one file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spread {
    /// The file.
    pub file: u64,
    /// The lowest row of any example.
    pub lowest: u64,
    /// Rows from the lowest to the highest, including those between that belong to none of the examples.
    pub rows: u64,
    /// The first example's row, relative to `lowest`; 0 if packed.
    pub first: u64,
    /// Rows from one example's beginning to the next one's; `None` if packed.
    pub step: Option<i64>,
}

/// The rows of these examples, if they are packed or stepped in one file. Stops at the first example that is neither.
pub fn spread(layout: &impl Layout, group: usize, examples: &mut dyn Iterator<Item = i64>) -> Result<Option<Spread>> {
    let (mut found, mut empty): (Option<Walk>, bool) = (None, false);
    for example in examples {
        let (mut whole, mut apart): (Option<Run>, bool) = (None, false);
        layout.runs(group, example, &mut |run| match &mut whole {
            _ if run.rows == 0 => {}
            None => whole = Some(run),
            Some(w) if w.at.file == run.at.file && w.at.row + w.rows == run.at.row => w.rows += run.rows,
            Some(_) => apart = true,
        })?;
        if apart {
            return Ok(None);
        }
        match (&mut found, whole) {
            (_, None) => empty = true,
            (None, Some(run)) => found = Some(Walk::new(run)),
            (Some(walk), Some(run)) => {
                if !walk.admits(run) {
                    return Ok(None);
                }
            }
        }
        if empty && found.as_ref().is_some_and(|walk| !walk.packed) {
            return Ok(None);
        }
    }
    Ok(found.and_then(|walk| walk.finish()))
}

/// The examples so far.
struct Walk {
    first: Run,
    last: Run,
    step: Option<i64>,
    packed: bool,
    stepped: bool,
}

impl Walk {
    fn new(first: Run) -> Walk {
        Walk { first, last: first, step: None, packed: true, stepped: true }
    }

    /// Adds an example; false if the examples are then neither packed nor stepped.
    fn admits(&mut self, run: Run) -> bool {
        let step = i64::try_from(i128::from(run.at.row) - i128::from(self.last.at.row)).ok();
        self.packed &= run.at.row == self.last.at.row + self.last.rows;
        self.stepped &= run.rows == self.first.rows && step.is_some() && (self.step.is_none() || self.step == step);
        self.step = step;
        self.last = run;
        run.at.file == self.first.at.file && (self.packed || self.stepped)
    }

    fn finish(self) -> Option<Spread> {
        let (first, last) = (self.first.at.row, self.last.at.row);
        let lowest = first.min(last);
        let rows = if first <= last { last - lowest + self.last.rows } else { first - lowest + self.first.rows };
        let step = if self.packed { None } else { Some(self.step?) };
        Some(Spread { file: self.first.at.file, lowest, rows, first: first - lowest, step })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::layout::spans::{PartSpans, PerExample, Spans};
    use crate::layout::strided::Strided;
    use proptest::prelude::*;

    fn spans(starts: Vec<u64>, tokens: Vec<u32>, files: Vec<u32>) -> Spans {
        let (files, tokens) = (PerExample::Each(files), PerExample::Each(tokens));
        Spans::new(1, 2, vec![PartSpans { files, starts, tokens, stride: 0 }]).unwrap()
    }

    /// Every example's rows, as the spread places them.
    fn shown(found: Spread, lengths: &[u64]) -> Vec<Vec<u64>> {
        let mut at = found.first as i64;
        let mut rows = vec![];
        for n in lengths {
            rows.push((0..*n).map(|t| found.lowest + at as u64 + t).collect());
            at += found.step.unwrap_or(*n as i64);
        }
        rows
    }

    proptest! {
        /// The oracle lists every row of the array.
        #[test]
        fn a_layer_of_one_strided_file_is_spread(
            examples in 1u64..12, groups in 1u64..4, tokens in 1u64..5, first in 0i64..12, step in -3i64..4, count in 0i64..6,
        ) {
            let layout = Strided::new(examples, 20, groups, tokens).unwrap();
            let chosen: Vec<i64> = (0..count).map(|i| first + i * step).collect();
            for group in 0..groups {
                let got = spread(&layout, group as usize, &mut chosen.iter().copied());
                if chosen.iter().any(|e| !(0..examples as i64).contains(e)) {
                    prop_assert_eq!(got.unwrap_err().kind, Kind::OutOfRange);
                    continue;
                }
                let Some(found) = got.unwrap() else {
                    prop_assert!(chosen.is_empty());
                    continue;
                };
                let row = |e: i64| (e as u64 * groups + group) * tokens;
                let wanted: Vec<Vec<u64>> = chosen.iter().map(|e| (row(*e)..row(*e) + tokens).collect()).collect();
                let high = wanted.concat().into_iter().max().unwrap();
                prop_assert_eq!(shown(found, &vec![tokens; chosen.len()]), wanted);
                prop_assert_eq!(found.lowest + found.rows - 1, high);
            }
        }

        /// A spread that is found describes exactly the examples' rows; packed examples always have one.
        #[test]
        fn no_spread_shows_other_rows(examples in prop::collection::vec((0u64..9, 0u32..4, 0u32..2), 1..6), pack in any::<bool>()) {
            let (mut starts, tokens): (Vec<u64>, Vec<u32>) = examples.iter().map(|e| (e.0, e.1)).unzip();
            let files: Vec<u32> = examples.iter().map(|e| if pack { 1 } else { e.2 }).collect();
            if pack {
                (1..starts.len()).for_each(|i| starts[i] = starts[i - 1] + u64::from(tokens[i - 1]));
            }
            let layout = spans(starts.clone(), tokens.clone(), files.clone());
            let found = spread(&layout, 0, &mut (0..starts.len() as i64)).unwrap();
            prop_assert!(!pack || found.is_some() || tokens.iter().all(|n| *n == 0));
            if let Some(found) = found {
                let lengths: Vec<u64> = tokens.iter().map(|n| u64::from(*n)).collect();
                let wanted: Vec<Vec<u64>> = starts.iter().zip(&lengths).map(|(s, n)| (*s..s + n).collect()).collect();
                prop_assert_eq!(shown(found, &lengths), wanted);
                prop_assert!(files.iter().zip(&tokens).all(|(f, n)| *n == 0 || u64::from(*f) == found.file));
            }
        }
    }

    #[test]
    fn two_files_are_not_spread() {
        assert_eq!(spread(&Strided::new(4, 2, 1, 3).unwrap(), 0, &mut (0..4)).unwrap(), None);
        assert!(spread(&Strided::new(4, 2, 1, 3).unwrap(), 0, &mut (2..4)).unwrap().is_some());
    }
}
