//! The requested rows, their source and their destination.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::files::Files;

/// A list of integers, which may be implicit.
#[derive(Clone, Copy, Debug)]
pub enum Ints<'a> {
    /// The same number, repeated.
    One(i64),
    /// A slice.
    Each(&'a [i64]),
    /// 0, 1, 2, ...
    Count,
}

impl Ints<'_> {
    /// The number at an index.
    #[inline]
    pub fn get(&self, i: usize) -> i64 {
        match self {
            Ints::One(x) => *x,
            Ints::Each(xs) => xs[i],
            Ints::Count => i as i64,
        }
    }

    /// Fails if this is a list whose length is not `n`.
    pub fn check_len(&self, n: usize, what: &str) -> Result<()> {
        match self {
            Ints::Each(xs) if xs.len() != n => {
                Err(Error::new(Kind::Argument, format!("expected {n} {what}, one per item, found {}", xs.len())))
            }
            _ => Ok(()),
        }
    }
}

/// The rows to read, in output order.
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

/// The source of rows.
pub struct Origin<'a, L: ?Sized> {
    /// The files.
    pub files: &'a dyn Files,
    /// The addresses of rows in the files.
    pub layout: &'a L,
    /// The group of each item.
    pub groups: Ints<'a>,
    /// The files to read; rows in other files are skipped. A caller that cannot open all files at once gathers range by range.
    pub only: Range<u64>,
}

/// The owner of a row without one.
pub(super) const NO_OWNER: u32 = u32::MAX;

/// The destination of rows.
pub enum Out<'a> {
    /// Contiguous memory.
    Dense(&'a mut [u8]),
    /// A separate slice for each row, each as long as a row of the output.
    Places(Vec<&'a mut [u8]>),
    /// Some of the rows of an output.
    Spread {
        /// Runs of rows, each with the offset of its first byte in the output.
        pieces: Vec<(usize, &'a mut [u8])>,
        /// For each row of the output, its index in the `pieces` that contain it.
        piece_of: &'a [u32],
        /// Whether neighbouring rows of one piece are contiguous.
        dense: bool,
    },
}

impl<'a> Out<'a> {
    /// Splits an output with rows of `row` bytes into ranges. `None` unless they are ascending, disjoint, and each inside one
    /// place.
    pub(super) fn ranges(self, ranges: &[(usize, usize)], row: usize) -> Option<Vec<&'a mut [u8]>> {
        let mut places = match self {
            Out::Dense(bytes) => vec![bytes],
            Out::Places(places) => places,
            Out::Spread { .. } => return None,
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

    /// The first `rows` of `row` bytes each, and the rest; `None` if there are fewer.
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
            Out::Spread { .. } => None,
        }
    }

    /// Deals rows out to `parts` owners. `owners` has the owner of each row, or [`NO_OWNER`]; it becomes the table of pieces
    /// that the results share. `None` unless the output has exactly these rows.
    pub(super) fn deal(self, owners: &'a mut [u32], parts: usize, row: usize) -> Option<Vec<Out<'a>>> {
        let dense = self.is_dense();
        let (mut bytes, mut places) = match self {
            Out::Dense(bytes) => (bytes, vec![].into_iter()),
            Out::Places(places) => (&mut [][..], places.into_iter()),
            Out::Spread { .. } => return None,
        };
        let mut dealt: Vec<Vec<(usize, &'a mut [u8])>> = (0..parts).map(|_| vec![]).collect();
        let mut at = 0;
        while at < owners.len() {
            let owner = owners[at];
            let alike = if dense { owners[at..].iter().take_while(|other| **other == owner).count() } else { 1 };
            let piece = if dense {
                let (piece, others) = std::mem::take(&mut bytes).split_at_mut_checked(alike * row)?;
                bytes = others;
                piece
            } else {
                places.next().filter(|place| place.len() == row)?
            };
            if owner != NO_OWNER {
                let mine = dealt.get_mut(owner as usize)?;
                owners[at..at + alike].fill(u32::try_from(mine.len()).ok()?);
                mine.push((at * row, piece));
            }
            at += alike;
        }
        if !bytes.is_empty() || places.next().is_some() {
            return None;
        }
        let piece_of = &*owners;
        Some(dealt.into_iter().map(|pieces| Out::Spread { pieces, piece_of, dense }).collect())
    }

    /// Deals runs of rows out to `parts` owners: each run is its owner and its number of rows. A result is dense if its rows are
    /// contiguous, and otherwise a place per row. `None` unless the output has exactly these rows.
    pub fn deal_out(
        self,
        runs: impl Iterator<Item = (usize, usize)>,
        parts: usize,
        row: usize,
    ) -> Option<Vec<Out<'a>>> {
        let (mut bytes, mut places, dense) = match self {
            Out::Dense(bytes) => (bytes, vec![].into_iter(), true),
            Out::Places(places) => (&mut [][..], places.into_iter(), false),
            Out::Spread { .. } => return None,
        };
        let mut dealt: Vec<Vec<&'a mut [u8]>> = (0..parts).map(|_| vec![]).collect();
        let mut runs = runs.peekable();
        while let Some((owner, mut rows)) = runs.next() {
            while let Some((_, more)) = runs.next_if(|(next, _)| *next == owner) {
                rows = rows.checked_add(more)?;
            }
            let mine = dealt.get_mut(owner)?;
            if dense {
                let (piece, others) = std::mem::take(&mut bytes).split_at_mut_checked(rows.checked_mul(row)?)?;
                bytes = others;
                mine.push(piece);
            } else {
                for _ in 0..rows {
                    mine.push(places.next().filter(|place| place.len() == row)?);
                }
            }
        }
        if !bytes.is_empty() || places.next().is_some() {
            return None;
        }
        let made = dealt.into_iter().map(|mut pieces| match pieces.len() {
            0 if dense => Out::Dense(&mut []),
            1 if dense => pieces.pop().map_or(Out::Dense(&mut []), Out::Dense),
            _ if dense => {
                Out::Places(pieces.into_iter().flat_map(|piece| piece.chunks_exact_mut(row.max(1))).collect())
            }
            _ => Out::Places(pieces),
        });
        Some(made.collect())
    }

    pub(super) fn bytes(&self) -> usize {
        match self {
            Out::Dense(bytes) => bytes.len(),
            Out::Places(places) => places.iter().map(|p| p.len()).sum(),
            Out::Spread { pieces, .. } => pieces.iter().map(|(_, piece)| piece.len()).sum(),
        }
    }

    pub(super) fn is_dense(&self) -> bool {
        matches!(self, Out::Dense(_) | Out::Spread { dense: true, .. })
    }

    /// `len` bytes from offset `at`, inside one row or anywhere in a dense output.
    #[inline]
    pub(super) fn range(&mut self, at: usize, len: usize, row: usize) -> &mut [u8] {
        match self {
            Out::Dense(bytes) => &mut bytes[at..at + len],
            Out::Places(places) => &mut places[at / row][at % row..at % row + len],
            Out::Spread { pieces, piece_of, .. } => {
                let (start, piece) = &mut pieces[piece_of[at / row] as usize];
                &mut piece[at - *start..][..len]
            }
        }
    }

    /// The same places, for a shorter time.
    pub fn reborrow(&mut self) -> Out<'_> {
        match self {
            Out::Dense(bytes) => Out::Dense(bytes),
            Out::Places(places) => Out::Places(places.iter_mut().map(|p| &mut **p).collect()),
            Out::Spread { pieces, piece_of, dense } => {
                let pieces = pieces.iter_mut().map(|(at, piece)| (*at, &mut **piece)).collect();
                Out::Spread { pieces, piece_of, dense: *dense }
            }
        }
    }
}
