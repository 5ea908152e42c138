//! Addresses computed by arithmetic: every file has the same number of examples, and every example the same shape.
//!
//! A file is a C-ordered array `(examples_per_file, groups, tokens, width)`, so that
//!
//! ```text
//! file = example / examples_per_file
//! row  = ((example % examples_per_file) * groups + group) * tokens + token
//! ```
//!
//! This is saev's layout: the protocol text, section 4.2, with S = `ex_per_shard`. The last file may have fewer examples;
//! the file table checks that.

use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// The layout.
#[derive(Clone, Copy, Debug)]
pub struct Strided {
    examples: u64,
    examples_per_file: u64,
    groups: u64,
    tokens: u64,
}

impl Strided {
    /// Checks that every row of a file has an index below 2^40, and every file one below 2^24.
    pub fn new(examples: u64, examples_per_file: u64, groups: u64, tokens: u64) -> Result<Strided> {
        let rows = examples_per_file.checked_mul(groups).and_then(|n| n.checked_mul(tokens));
        if examples_per_file == 0 || groups == 0 || tokens == 0 || rows.is_none_or(|n| n >= 1 << 40) {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "expected 1 to 2^40 rows per file, found {examples_per_file} examples x {groups} layers x {tokens} tokens"
                ),
            ));
        }
        if examples.div_ceil(examples_per_file) >= 1 << 24 {
            return Err(Error::new(
                Kind::Format,
                format!("{examples} examples, {examples_per_file} per file: too many files"),
            ));
        }
        Ok(Strided { examples, examples_per_file, groups, tokens })
    }

    #[inline]
    fn address(&self, group: usize, example: u64, token: u64) -> Address {
        let (file, inside) = (example / self.examples_per_file, example % self.examples_per_file);
        Address { file, row: (inside * self.groups + group as u64) * self.tokens + token }
    }
}

impl Layout for Strided {
    fn groups(&self) -> usize {
        to_usize(self.groups)
    }

    fn examples(&self) -> u64 {
        self.examples
    }

    fn tokens(&self, _group: usize, _example: u64) -> u64 {
        self.tokens
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, to_usize(self.groups))?;
        let example = check_example(example, self.examples)?;
        let token = check_token(token, self.tokens, example)?;
        Ok(self.address(group, example, token))
    }

    #[inline]
    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        let at = self.locate(group, example, 0)?;
        each(Run { at, rows: self.tokens });
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn impossible_sizes_are_refused() {
        for (e, per, g, t) in [
            (5, 0, 1, 1),
            (5, 1, 0, 1),
            (5, 1, 1, 0),
            (5, u64::MAX, 2, 2),
            (5, 1 << 20, 1 << 10, 1 << 10),
            (u64::MAX, 1, 1, 1),
        ] {
            assert_eq!(Strided::new(e, per, g, t).unwrap_err().kind, Kind::Format);
        }
    }

    proptest! {
        /// The oracle counts every row in stored order.
        #[test]
        fn addresses_count_up_in_stored_order(examples in 1u64..20, per in 1u64..6, groups in 1u64..4, tokens in 1u64..5) {
            let layout = Strided::new(examples, per, groups, tokens).unwrap();
            let mut next = Address { file: 0, row: 0 };
            for e in 0..examples {
                if e > 0 && e % per == 0 {
                    next = Address { file: next.file + 1, row: 0 };
                }
                for g in 0..groups {
                    let mut runs = vec![];
                    layout.runs(g as usize, e as i64, &mut |r| runs.push(r)).unwrap();
                    prop_assert_eq!(runs, vec![Run { at: next, rows: tokens }]);
                    for t in 0..tokens {
                        prop_assert_eq!(layout.locate(g as usize, e as i64, t as i64).unwrap(), next);
                        prop_assert_eq!(layout.locate(g as usize, e as i64, t as i64 - tokens as i64).unwrap(), next);
                        if t + 1 == tokens {
                            prop_assert_eq!(layout.last(g as usize, e as i64).unwrap(), next);
                        }
                        next.row += 1;
                    }
                }
            }
        }

        #[test]
        fn indices_outside_are_refused(example in any::<i64>(), token in any::<i64>()) {
            let layout = Strided::new(7, 3, 2, 4).unwrap();
            let inside = (0..7).contains(&example) && (-4..4).contains(&token);
            let got = layout.locate(1, example, token);
            prop_assert_eq!(got.is_ok(), inside);
            if let Err(e) = got {
                prop_assert_eq!(e.kind, Kind::OutOfRange);
            }
        }
    }
}
