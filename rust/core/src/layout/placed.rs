//! Addresses of examples that begin anywhere: one file and one offset for every group and example.
//!
//! In folders of many small files, or of files with several arrays each, addresses do not follow from a formula. An
//! address is a byte offset; the rows of one example in one group follow each other at the step of their file, which
//! may be larger than a row:
//!
//! ```text
//! file    = files[group * examples + example]
//! address = starts[group * examples + example] + token * steps[file]
//! ```
//!
//! Examples at equal distances need no table: 300 million rows of a file are one place.
//!
//! ```text
//! file    = places[group].file
//! address = places[group].start + example * places[group].step + token * steps[file]
//! ```
//!
//! An example whose file is damaged keeps its number: reading it fails with the reason.

use std::collections::BTreeMap;

use super::{Address, Layout, Run, address_bits, check_example, check_group, check_token, too_far};
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// Where the examples of a group begin that are at equal distances.
#[derive(Clone, Copy, Debug)]
pub struct EvenPlaces {
    /// The file.
    pub file: u32,
    /// Offset of the first example.
    pub start: u64,
    /// Bytes from one example to the next.
    pub step: u64,
}

#[derive(Debug)]
enum ExamplePlaces {
    Each { files: Vec<u32>, starts: Vec<u64>, tokens: Vec<u32> },
    Even { groups: Vec<EvenPlaces>, examples: u64, tokens: u32 },
}

/// The layout.
#[derive(Debug)]
pub struct Placed {
    groups: usize,
    places: ExamplePlaces,
    steps: Vec<u64>,
    faults: BTreeMap<u64, Error>,
}

impl Placed {
    /// Checks that there is a place for each group and example, that files exist, and that no offset overflows. Whether a file
    /// contains the rows is checked when they are read.
    ///
    /// `steps` has the bytes between rows of each file, `tokens` the number of rows of each example.
    pub fn new(groups: usize, files: Vec<u32>, starts: Vec<u64>, tokens: Vec<u32>, steps: Vec<u64>) -> Result<Placed> {
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        let places = groups.checked_mul(tokens.len());
        if groups == 0 || places != Some(files.len()) || files.len() != starts.len() {
            return refuse(format!(
                "expected a file and an offset for each of {groups} layers and {} examples, found {} and {}",
                tokens.len(),
                files.len(),
                starts.len()
            ));
        }
        for (i, (file, start)) in files.iter().zip(&starts).enumerate() {
            let (group, example) = (i / tokens.len(), i % tokens.len());
            let Some(step) = steps.get(*file as usize) else {
                return refuse(format!("example {example}: expected a file below {}, found {file}", steps.len()));
            };
            let end = step.checked_mul(u64::from(tokens[example])).and_then(|n| n.checked_add(*start));
            if end.is_none_or(|end| end >> address_bits(steps.len()) > 0) {
                let error = too_far(end.unwrap_or(u64::MAX), steps.len());
                return Err(Error { detail: format!("example {example}, layer {group}: {}", error.detail), ..error });
            }
        }
        Ok(Placed { groups, places: ExamplePlaces::Each { files, starts, tokens }, steps, faults: BTreeMap::new() })
    }

    /// The same for examples at equal distances, each of `tokens` rows.
    pub fn even(groups: Vec<EvenPlaces>, examples: u64, tokens: u32, steps: Vec<u64>) -> Result<Placed> {
        for (group, places) in groups.iter().enumerate() {
            let Some(step) = steps.get(places.file as usize) else {
                let detail = format!("layer {group}: expected a file below {}, found {}", steps.len(), places.file);
                return Err(Error::new(Kind::Format, detail));
            };
            let last = examples.saturating_sub(1).checked_mul(places.step).and_then(|n| n.checked_add(places.start));
            let end = step.checked_mul(u64::from(tokens)).and_then(|n| n.checked_add(last?));
            if end.is_none_or(|end| end >> address_bits(steps.len()) > 0) {
                let error = too_far(end.unwrap_or(u64::MAX), steps.len());
                return Err(Error { detail: format!("layer {group}: {}", error.detail), ..error });
            }
        }
        if groups.is_empty() || examples >= 1 << 48 {
            let detail = format!("expected layers and fewer than 2^48 examples, found {} and {examples}", groups.len());
            return Err(Error::new(Kind::Format, detail));
        }
        let (count, places) = (groups.len(), ExamplePlaces::Even { groups, examples, tokens });
        Ok(Placed { groups: count, places, steps, faults: BTreeMap::new() })
    }

    /// Sets the examples that cannot be read, with the errors. Their places are not used; they should have a token, so
    /// that a read of all tokens reaches them.
    #[must_use]
    pub fn refusing(mut self, faults: BTreeMap<u64, Error>) -> Placed {
        self.faults = faults;
        self
    }

    /// An example's number, if it is in the dataset and can be read.
    #[inline]
    fn readable(&self, example: i64) -> Result<u64> {
        let example = check_example(example, self.examples())?;
        self.faults.get(&example).map_or(Ok(example), |error| Err(error.clone()))
    }

    #[inline]
    fn address(&self, group: usize, example: u64, token: u64) -> Address {
        let (file, start) = match &self.places {
            ExamplePlaces::Each { files, starts, tokens } => {
                let place = group * tokens.len() + to_usize(example);
                (files[place], starts[place])
            }
            ExamplePlaces::Even { groups, .. } => {
                (groups[group].file, groups[group].start + example * groups[group].step)
            }
        };
        Address { file: u64::from(file), row: start + token * self.steps[file as usize] }
    }
}

impl Layout for Placed {
    fn groups(&self) -> usize {
        self.groups
    }

    fn examples(&self) -> u64 {
        match &self.places {
            ExamplePlaces::Each { tokens, .. } => tokens.len() as u64,
            ExamplePlaces::Even { examples, .. } => *examples,
        }
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        u64::from(match &self.places {
            ExamplePlaces::Each { tokens, .. } => tokens[to_usize(example)],
            ExamplePlaces::Even { tokens, .. } => *tokens,
        })
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, self.groups)?;
        let example = self.readable(example)?;
        let token = check_token(token, self.tokens(group, example), example)?;
        Ok(self.address(group, example, token))
    }

    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        check_group(group, self.groups)?;
        let example = self.readable(example)?;
        let rows = self.tokens(group, example);
        if rows > 0 {
            each(Run { at: self.address(group, example, 0), rows });
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_the_table() {
        let layout = Placed::new(2, vec![0, 1, 1, 0], vec![100, 7, 9, 300], vec![3, 0], vec![8, 20]).unwrap();
        let at = |group, example, token| layout.locate(group, example, token).unwrap();
        assert_eq!(at(0, 0, 2), Address { file: 0, row: 116 });
        assert_eq!(at(1, 0, -1), Address { file: 1, row: 49 });
        assert!(layout.locate(0, 1, 0).is_err(), "an example without tokens");
        assert!(layout.locate(0, 2, 0).is_err());
        let mut runs = vec![];
        layout.runs(1, 0, &mut |run| runs.push(run)).unwrap();
        layout.runs(0, 1, &mut |run| runs.push(run)).unwrap();
        assert_eq!(runs, [Run { at: Address { file: 1, row: 9 }, rows: 3 }]);
    }

    #[test]
    fn examples_at_equal_distances_have_the_addresses_of_a_table() {
        let groups = [(0u32, 100u64, 40u64), (1, 7, 20)].map(|(file, start, step)| EvenPlaces { file, start, step });
        let even = Placed::even(groups.to_vec(), 3, 2, vec![8, 20]).unwrap();
        let starts = groups.iter().flat_map(|group| (0..3).map(move |i| group.start + i * group.step)).collect();
        let table = Placed::new(2, vec![0, 0, 0, 1, 1, 1], starts, vec![2; 3], vec![8, 20]).unwrap();
        let runs = |layout: &Placed, group, example| {
            let mut runs = vec![];
            layout.runs(group, example, &mut |run| runs.push(run)).map(|()| runs).map_err(|e| e.kind)
        };
        for (group, example) in (0..2).flat_map(|group| (-1..4).map(move |example| (group, example))) {
            assert_eq!(runs(&even, group, example), runs(&table, group, example));
            for token in -3..3 {
                let at = |layout: &Placed| layout.locate(group, example, token).map_err(|e| e.kind);
                assert_eq!(at(&even), at(&table));
            }
        }
        let many = |examples, tokens, file, step| {
            Placed::even(vec![EvenPlaces { file, start: 0, step }], examples, tokens, vec![8]).is_ok()
        };
        assert!(many(1 << 47, 1, 0, 8) && many(0, 1, 0, 8));
        assert!(
            !many(1 << 48, 1, 0, 8) && !many(1 << 47, 1, 0, 1 << 10) && !many(1, 1, 1, 8) && !many(u64::MAX, 1, 0, 8)
        );
    }

    #[test]
    fn examples_that_cannot_be_read_fail_with_their_reason_and_others_do_not() {
        let why = Error::new(Kind::UnsafePickle, "calls posix.getcwd");
        let layout = Placed::new(1, vec![0, 0, 0], vec![0, 8, 16], vec![1, 1, 1], vec![8]).unwrap();
        let layout = layout.refusing(BTreeMap::from([(1, why.clone())]));
        let failures = [layout.locate(0, 1, 0).err(), layout.last(0, 1).err(), layout.runs(0, 1, &mut |_| ()).err()];
        for failure in failures {
            let found = failure.unwrap();
            assert_eq!((found.kind, found.detail), (why.kind, why.detail.clone()));
        }
        assert_eq!(layout.locate(0, 1, 5).unwrap_err().kind, Kind::UnsafePickle);
        assert_eq!((layout.locate(0, 0, 0).unwrap().row, layout.last(0, 2).unwrap().row), (0, 16));
        assert_eq!(layout.examples(), 3);
    }

    #[test]
    fn tables_that_do_not_fit_are_refused() {
        let made = |files: &[u32], starts: &[u64], tokens: &[u32], steps: &[u64]| {
            Placed::new(1, files.to_vec(), starts.to_vec(), tokens.to_vec(), steps.to_vec()).is_ok()
        };
        assert!(made(&[0], &[0], &[1], &[4]));
        assert!(!made(&[1], &[0], &[1], &[4]));
        assert!(!made(&[0, 0], &[0], &[1], &[4]));
        assert!(!made(&[0], &[0], &[1, 1], &[4]));
        assert!(!made(&[0], &[u64::MAX], &[1], &[4]));
        for (files, bits) in [(1, 56), (2, 56), (256, 56), (257, 55), (1 << 16, 48)] {
            let steps = vec![4; files];
            assert!(made(&[0], &[(1 << bits) - 5], &[1], &steps));
            assert!(
                !made(&[0], &[(1 << bits) - 4], &[1], &steps),
                "an address of {} bits would name another file",
                bits + 1
            );
        }
        assert!(!made(&[0], &[0], &[u32::MAX], &[1 << 40]));
        assert!(Placed::new(0, vec![], vec![], vec![], vec![]).is_err());
    }
}
