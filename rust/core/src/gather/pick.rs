//! Which rows, from where, and where they go.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::files::Files;

/// A list of integers that need not exist in memory.
#[derive(Clone, Copy, Debug)]
pub enum Ints<'a> {
    /// The same number, as often as needed.
    One(i64),
    /// These.
    Each(&'a [i64]),
    /// 0, 1, 2, ...
    Count,
}

impl Ints<'_> {
    /// The number at a place.
    #[inline]
    pub fn get(&self, i: usize) -> i64 {
        match self {
            Ints::One(x) => *x,
            Ints::Each(xs) => xs[i],
            Ints::Count => i as i64,
        }
    }

    pub(super) fn check_len(&self, n: usize, what: &str) -> Result<()> {
        match self {
            Ints::Each(xs) if xs.len() != n => {
                Err(Error::new(Kind::Argument, format!("{} {what} for {n} items", xs.len())))
            }
            _ => Ok(()),
        }
    }
}

/// Which rows, in output order.
#[derive(Clone, Copy, Debug)]
pub enum Pick<'a> {
    /// One row per (example, token).
    Tokens {
        /// The examples.
        examples: Ints<'a>,
        /// The tokens; negative counts from the example's end.
        tokens: Ints<'a>,
    },
    /// The last token of each example.
    Last {
        /// The examples.
        examples: Ints<'a>,
    },
    /// Every token of each example, example after example.
    Whole {
        /// The examples.
        examples: Ints<'a>,
    },
}

impl Pick<'_> {
    /// The example of an item.
    pub fn example(&self, item: usize) -> i64 {
        match self {
            Pick::Tokens { examples, .. } | Pick::Last { examples } | Pick::Whole { examples } => examples.get(item),
        }
    }
}

/// Where rows come from.
pub struct Origin<'a, L: ?Sized> {
    /// The files.
    pub files: &'a dyn Files,
    /// Where in them rows lie.
    pub layout: &'a L,
    /// The group that each item is taken from.
    pub groups: Ints<'a>,
    /// Rows in other files are left alone; who must not have all files open at once gathers in several goes.
    pub only: Range<u64>,
}

/// Where rows go.
pub enum Out<'a> {
    /// One after another.
    Dense(&'a mut [u8]),
    /// Each to a place of its own; all places are as long as a row of the output.
    Places(Vec<&'a mut [u8]>),
}

impl<'a> Out<'a> {
    /// Ranges of an output of rows of `row` bytes, in ascending order and apart from each other; `None` if they are not, or lie in
    /// two places each.
    pub(super) fn ranges(self, ranges: &[(usize, usize)], row: usize) -> Option<Vec<&'a mut [u8]>> {
        let mut places = match self {
            Out::Dense(bytes) => vec![bytes],
            Out::Places(places) => places,
        }
        .into_iter();
        let dense = places.len() == 1;
        let mut made = Vec::with_capacity(ranges.len());
        let (mut number, mut rest, mut passed): (usize, &'a mut [u8], usize) = (0, places.next()?, 0);
        for (at, len) in ranges {
            let (place, within) = if dense { (0, *at) } else { (at / row, at % row) };
            while number < place {
                (number, rest, passed) = (number + 1, places.next()?, 0);
            }
            let (_, from) = std::mem::take(&mut rest).split_at_mut_checked(within.checked_sub(passed)?)?;
            let (mine, others) = from.split_at_mut_checked(*len)?;
            made.push(mine);
            (rest, passed) = (others, within + len);
        }
        Some(made)
    }

    /// The first `rows` of `row` bytes each, and the others; `None` if there are not as many.
    pub(super) fn split_at(self, rows: usize, row: usize) -> Option<(Out<'a>, Out<'a>)> {
        match self {
            Out::Dense(bytes) => {
                let (mine, others) = bytes.split_at_mut_checked(rows.checked_mul(row)?)?;
                Some((Out::Dense(mine), Out::Dense(others)))
            }
            Out::Places(mut places) => {
                let others = if rows <= places.len() { places.split_off(rows) } else { return None };
                let fit = places.iter().all(|p| p.len() == row);
                fit.then_some((Out::Places(places), Out::Places(others)))
            }
        }
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Out::Dense(bytes) => bytes.len(),
            Out::Places(places) => places.iter().map(|p| p.len()).sum(),
        }
    }

    pub(super) fn is_dense(&self) -> bool {
        matches!(self, Out::Dense(_))
    }

    /// Bytes from `at` on, which lie in one row or in a dense output.
    #[inline]
    pub(super) fn range(&mut self, at: usize, len: usize, row: usize) -> &mut [u8] {
        match self {
            Out::Dense(bytes) => &mut bytes[at..at + len],
            Out::Places(places) => &mut places[at / row][at % row..at % row + len],
        }
    }

    /// The same places, for a shorter time.
    pub fn reborrow(&mut self) -> Out<'_> {
        match self {
            Out::Dense(bytes) => Out::Dense(bytes),
            Out::Places(places) => Out::Places(places.iter_mut().map(|p| &mut **p).collect()),
        }
    }
}
