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
//! An example whose file is damaged keeps its number: reading it fails with the reason.

use std::collections::BTreeMap;

use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};

/// Offsets below this are supported: a gather plans with addresses of 40 bits, and larger files are refused when they are opened.
const MOST: u64 = 1 << 40;

/// The layout.
#[derive(Debug)]
pub struct Placed {
    groups: usize,
    files: Vec<u32>,
    starts: Vec<u64>,
    tokens: Vec<u32>,
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
            if end.is_none_or(|end| end >= MOST) {
                return refuse(format!("example {example}, layer {group}: rows end beyond byte 2^40"));
            }
        }
        Ok(Placed { groups, files, starts, tokens, steps, faults: BTreeMap::new() })
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
        let place = group * self.tokens.len() + example as usize;
        let file = self.files[place];
        Address { file: u64::from(file), row: self.starts[place] + token * self.steps[file as usize] }
    }
}

impl Layout for Placed {
    fn groups(&self) -> usize {
        self.groups
    }

    fn examples(&self) -> u64 {
        self.tokens.len() as u64
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        u64::from(self.tokens[example as usize])
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
        assert!(made(&[0], &[(1 << 40) - 5], &[1], &[4]));
        assert!(!made(&[0], &[(1 << 40) - 4], &[1], &[4]), "an address of 41 bits would name another file");
        assert!(!made(&[0], &[0], &[u32::MAX], &[1 << 40]));
        assert!(Placed::new(0, vec![], vec![], vec![], vec![]).is_err());
    }
}
