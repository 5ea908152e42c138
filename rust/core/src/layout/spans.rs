//! Addresses of examples that begin at any row of any file: arrays `(rows, groups, tokens, width)` of fixed shape in which
//! each example uses some tokens of one row, or one file per example.
//!
//! A dataset has one or more *parts* with consecutive tokens (prompt and response, for example). In each part an example
//! has a file, a first row in it, and a number of tokens; the rows of group `g` begin `g * stride` rows later:
//!
//! ```text
//! file = files[example]
//! row  = starts[example] + group * stride + token
//! ```

use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// A number per example.
#[derive(Debug)]
pub enum PerExample<T> {
    /// The same for every example.
    Same(T),
    /// One value for each example.
    Each(Vec<T>),
}

impl<T: Copy> PerExample<T> {
    /// The number of an example.
    #[inline]
    pub(super) fn get(&self, example: u64) -> T {
        match self {
            PerExample::Same(value) => *value,
            PerExample::Each(values) => values[to_usize(example)],
        }
    }

    /// Whether there is a number for each of this many examples.
    pub(super) fn fits(&self, examples: u64) -> bool {
        match self {
            PerExample::Same(_) => true,
            PerExample::Each(values) => values.len() as u64 == examples,
        }
    }
}

/// The location of one part of every example.
#[derive(Debug)]
pub struct PartSpans {
    /// File numbers.
    pub files: PerExample<u32>,
    /// The row of the first token of group 0.
    pub starts: Vec<u64>,
    /// Numbers of tokens.
    pub tokens: PerExample<u32>,
    /// Rows from one group to the next.
    pub stride: u64,
}

/// The layout.
#[derive(Debug)]
pub struct Spans {
    groups: usize,
    examples: u64,
    parts: Vec<PartSpans>,
}

impl Spans {
    /// Checks that every part has a value for every example, that each file is below `files`, and each row below 2^40. Whether
    /// a file contains the rows is checked when they are read.
    pub fn new(groups: usize, files: usize, parts: Vec<PartSpans>) -> Result<Spans> {
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        let Some(first) = parts.first() else { return refuse("expected at least one part, found none".to_string()) };
        let examples = first.starts.len() as u64;
        if groups == 0 || examples >= 1 << 48 {
            return refuse(format!(
                "expected 1 or more layers and fewer than 2^48 examples, found {groups} and {examples}"
            ));
        }
        for (p, part) in parts.iter().enumerate() {
            if part.starts.len() as u64 != examples || !part.files.fits(examples) || !part.tokens.fits(examples) {
                return refuse(format!(
                    "part {p}: expected values for {examples} examples, found another number of them"
                ));
            }
            for example in 0..examples {
                let (file, tokens) = (part.files.get(example), u64::from(part.tokens.get(example)));
                if file as usize >= files {
                    return refuse(format!("example {example}: expected a file below {files}, found {file}"));
                }
                let last = part.stride.checked_mul(groups as u64 - 1).and_then(|n| n.checked_add(tokens));
                let end = last.and_then(|n| n.checked_add(part.starts[to_usize(example)]));
                if end.is_none_or(|n| n >= 1 << 40) {
                    return refuse(format!(
                        "example {example}: {tokens} tokens of {groups} layers from row {} on, {} rows apart, end beyond row 2^40",
                        part.starts[to_usize(example)],
                        part.stride
                    ));
                }
            }
        }
        Ok(Spans { groups, examples, parts })
    }

    #[inline]
    fn address(part: &PartSpans, group: usize, example: u64, token: u64) -> Address {
        let row = part.starts[to_usize(example)] + group as u64 * part.stride + token;
        Address { file: u64::from(part.files.get(example)), row }
    }
}

impl Layout for Spans {
    fn groups(&self) -> usize {
        self.groups
    }

    fn examples(&self) -> u64 {
        self.examples
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        self.parts.iter().map(|part| u64::from(part.tokens.get(example))).sum()
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, self.groups)?;
        let example = check_example(example, self.examples)?;
        let mut token = check_token(token, self.tokens(group, example), example)?;
        for part in &self.parts {
            let here = u64::from(part.tokens.get(example));
            if token < here {
                return Ok(Spans::address(part, group, example, token));
            }
            token -= here;
        }
        Err(Error::new(Kind::Internal, "a token in no part"))
    }

    #[inline]
    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        check_group(group, self.groups)?;
        let example = check_example(example, self.examples)?;
        for part in &self.parts {
            let rows = u64::from(part.tokens.get(example));
            if rows > 0 {
                each(Run { at: Spans::address(part, group, example, 0), rows });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Files, starts and tokens of two parts.
    type Two = (u32, u64, u32, u32, u64, u32);

    fn part(files: Vec<u32>, starts: Vec<u64>, tokens: Vec<u32>, stride: u64) -> PartSpans {
        PartSpans { files: PerExample::Each(files), starts, tokens: PerExample::Each(tokens), stride }
    }

    #[test]
    fn impossible_numbers_are_refused() {
        for (groups, files, parts) in [
            (1, 1, vec![]),
            (0, 1, vec![part(vec![0], vec![0], vec![1], 1)]),
            (1, 1, vec![part(vec![1], vec![0], vec![1], 1)]),
            (1, 0, vec![part(vec![0], vec![0], vec![1], 1)]),
            (1, 1, vec![part(vec![0], vec![0, 1], vec![1], 1)]),
            (1, 1, vec![part(vec![0], vec![0], vec![], 1)]),
            (1, 1, vec![part(vec![0], vec![0], vec![1], 1), part(vec![], vec![], vec![], 1)]),
            (1, 1, vec![part(vec![0], vec![1 << 40], vec![1], 1)]),
            (1, 1, vec![part(vec![0], vec![u64::MAX], vec![1], 1)]),
            (2, 1, vec![part(vec![0], vec![0], vec![1], 1 << 40)]),
            (3, 1, vec![part(vec![0], vec![0], vec![1], u64::MAX)]),
            (usize::MAX, 1, vec![part(vec![0], vec![0], vec![1], 2)]),
        ] {
            assert_eq!(Spans::new(groups, files, parts).unwrap_err().kind, Kind::Format);
        }
    }

    proptest! {
        /// Compares with an explicit list of rows.
        #[test]
        fn tokens_are_found_part_after_part(
            groups in 1usize..4,
            stride in 0u64..20,
            examples in prop::collection::vec((0u32..3, 0u64..100, 0u32..5, 0u32..3, 0u64..100, 0u32..5), 0..6),
        ) {
            let column = |f: &dyn Fn(&Two) -> u64| examples.iter().map(f).collect::<Vec<u64>>();
            let small = |v: Vec<u64>| v.into_iter().map(|x| x as u32).collect::<Vec<u32>>();
            let a = part(small(column(&|e| e.0.into())), column(&|e| e.1), small(column(&|e| e.2.into())), stride);
            let b = part(small(column(&|e| e.3.into())), column(&|e| e.4), small(column(&|e| e.5.into())), 7);
            let spans = Spans::new(groups, 3, vec![a, b]).unwrap();
            prop_assert_eq!(spans.examples(), examples.len() as u64);
            for (i, e) in examples.iter().enumerate() {
                for group in 0..groups {
                    let g = group as u64;
                    let mut rows: Vec<(u64, u64)> = vec![];
                    rows.extend((0..u64::from(e.2)).map(|t| (u64::from(e.0), e.1 + g * stride + t)));
                    rows.extend((0..u64::from(e.5)).map(|t| (u64::from(e.3), e.4 + g * 7 + t)));
                    for (t, row) in rows.iter().enumerate() {
                        let at = spans.locate(group, i as i64, t as i64).unwrap();
                        prop_assert_eq!((at.file, at.row), *row);
                    }
                    prop_assert_eq!(spans.tokens(group, i as u64), rows.len() as u64);
                    prop_assert!(spans.locate(group, i as i64, rows.len() as i64).is_err());
                    prop_assert_eq!(spans.last(group, i as i64).ok().map(|at| (at.file, at.row)), rows.last().copied());
                    let mut found = vec![];
                    spans.runs(group, i as i64, &mut |run| {
                        found.extend((0..run.rows).map(|k| (run.at.file, run.at.row + k)));
                    }).unwrap();
                    prop_assert_eq!(&found, &rows);
                }
            }
        }
    }
}
