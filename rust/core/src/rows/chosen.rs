//! Some of a dataset's examples, renumbered from 0: a range, or numbers in any order.
//!
//! A choice is one map from new example numbers to the dataset's. Reads translate the examples of a pick before they
//! reach a layout, so layouts and formats do not depend on it.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::gather::{Ints, Pick};
use crate::layout::check_example;

/// Numbers of examples, as bytes of native 64-bit integers. The owner may be a binding's object.
pub type ExampleNumbers = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Bytes of a number.
const NUMBER: usize = size_of::<i64>();

/// The chosen examples.
#[derive(Clone)]
pub struct Chosen(Which);

#[derive(Clone)]
enum Which {
    /// `first`, `first + step`, ...
    Range { first: i64, step: i64, count: u64 },
    /// In this order.
    Listed(ExampleNumbers),
}

impl fmt::Debug for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Chosen({})", self.len())
    }
}

impl Chosen {
    /// `count` numbers from `first` on, `step` apart, of a dataset with `examples` examples.
    pub fn range(first: i64, step: i64, count: u64, examples: u64) -> Result<Chosen> {
        let last = i64::try_from(count).ok().and_then(|n| step.checked_mul(n - 1)?.checked_add(first));
        if count > 0 {
            check_example(first, examples)?;
            check_example(last.unwrap_or(-1), examples)?;
        }
        Ok(Chosen(Which::Range { first, step, count }))
    }

    /// These numbers, of a dataset with `examples` examples.
    pub fn listed(numbers: ExampleNumbers, examples: u64) -> Result<Chosen> {
        let bytes = (*numbers).as_ref();
        if !bytes.len().is_multiple_of(NUMBER) {
            return Err(Error::new(Kind::Internal, "numbers of examples that are not 64-bit integers"));
        }
        bytes.chunks_exact(NUMBER).try_for_each(|b| check_example(number(b), examples).map(drop))?;
        Ok(Chosen(Which::Listed(numbers)))
    }

    /// Number of chosen examples.
    pub fn len(&self) -> u64 {
        match &self.0 {
            Which::Range { count, .. } => *count,
            Which::Listed(numbers) => ((**numbers).as_ref().len() / NUMBER) as u64,
        }
    }

    /// Whether no example is chosen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dataset's number of a chosen example.
    #[inline]
    pub fn get(&self, example: i64) -> Result<i64> {
        let i = check_example(example, self.len())? as usize;
        Ok(match &self.0 {
            // The last number was checked in `range`, so none overflows.
            Which::Range { first, step, .. } => first + step * i as i64,
            Which::Listed(numbers) => number(&(**numbers).as_ref()[i * NUMBER..][..NUMBER]),
        })
    }

    /// The dataset's numbers of these examples.
    pub fn of(&self, examples: &[i64]) -> Result<Vec<i64>> {
        examples.iter().map(|e| self.get(*e)).collect()
    }

    /// Every number, in order.
    pub fn all(&self) -> impl Iterator<Item = i64> + '_ {
        (0..self.len() as i64).map_while(|i| self.get(i).ok())
    }

    /// Calls `read` with a pick of `items` items, in the dataset's numbers.
    pub fn translated<T>(&self, pick: Pick<'_>, items: usize, read: impl FnOnce(Pick<'_>) -> Result<T>) -> Result<T> {
        let (Pick::Tokens { examples, .. } | Pick::Last { examples } | Pick::Whole { examples }) = pick;
        let each;
        let examples = match examples {
            Ints::One(example) => Ints::One(self.get(example)?),
            Ints::Each(examples) => {
                each = self.of(examples)?;
                Ints::Each(&each)
            }
            Ints::Count => {
                each = (0..items as i64).map(|i| self.get(i)).collect::<Result<Vec<_>>>()?;
                Ints::Each(&each)
            }
        };
        let found = match pick {
            Pick::Tokens { tokens, .. } => read(Pick::Tokens { examples, tokens }),
            Pick::Last { .. } => read(Pick::Last { examples }),
            Pick::Whole { .. } => read(Pick::Whole { examples }),
        };
        found.map_err(named)
    }

    /// Bounds of runs of chosen examples between the same two of a dataset's bounds.
    pub fn bounds(&self, of: &[u64]) -> Vec<u64> {
        let mut made = vec![0];
        let mut before = None;
        for (i, example) in self.all().enumerate() {
            let unit = of.partition_point(|bound| *bound <= example as u64);
            if before.is_some_and(|b| b != unit) {
                made.push(i as u64);
            }
            before = Some(unit);
        }
        made.push(self.len());
        made
    }
}

#[inline]
fn number(bytes: &[u8]) -> i64 {
    bytes.try_into().map_or(-1, i64::from_ne_bytes)
}

/// The note of an error that names an example by its number in the dataset.
pub const NOTE: &str = " (examples are numbered as in the whole dataset)";

/// Adds a note to an error of a read of the dataset that names an example: it uses the dataset's numbers.
pub fn named(mut error: Error) -> Error {
    if matches!(error.kind, Kind::OutOfRange | Kind::NotStored) {
        error.detail.push_str(NOTE);
    }
    error
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn listed(numbers: &[i64], examples: u64) -> Result<Chosen> {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
        Chosen::listed(Arc::new(bytes), examples)
    }

    #[test]
    fn numbers_outside_the_dataset_are_refused() {
        assert!(Chosen::range(0, 1, 5, 5).is_ok());
        assert!(Chosen::range(4, -1, 5, 5).is_ok());
        assert!(Chosen::range(9, 7, 0, 5).is_ok());
        for (first, step, count) in [(0, 1, 6), (3, -1, 5), (-1, 1, 2), (0, i64::MAX, 3), (5, 0, 1), (0, 1, u64::MAX)] {
            assert!(Chosen::range(first, step, count, 5).is_err(), "{first} {step} {count}");
        }
        assert!(listed(&[0, 4, 4], 5).is_ok());
        assert!(listed(&[0, 5], 5).is_err());
        assert!(listed(&[-1], 5).is_err());
        assert!(Chosen::listed(Arc::new(vec![0u8; 9]), 5).is_err());
    }

    proptest! {
        /// The oracle is a plain list.
        #[test]
        fn a_choice_is_the_list_of_its_numbers(
            numbers in prop::collection::vec(0i64..40, 0..30), first in 0i64..20, step in -3i64..4, count in 0u64..6,
        ) {
            let chosen = listed(&numbers, 40).unwrap();
            prop_assert_eq!(chosen.all().collect::<Vec<_>>(), numbers.clone());
            prop_assert!(chosen.get(numbers.len() as i64).is_err());
            prop_assert!(chosen.get(-1).is_err());
            let oracle: Vec<i64> = (0..count as i64).map(|i| first + i * step).collect();
            if let Ok(range) = Chosen::range(first, step, count, 40) {
                prop_assert_eq!(range.all().collect::<Vec<_>>(), oracle);
            } else {
                prop_assert!(oracle.iter().any(|n| !(0..40).contains(n)));
            }
            let bounds = chosen.bounds(&[0, 7, 19, 40]);
            prop_assert_eq!((bounds[0], *bounds.last().unwrap()), (0, numbers.len() as u64));
            let unit = |n: &i64| [7, 19, 40].iter().filter(|b| n >= b).count();
            for (i, pair) in numbers.windows(2).enumerate() {
                let cut = bounds.contains(&(i as u64 + 1));
                prop_assert_eq!(cut, unit(&pair[0]) != unit(&pair[1]));
            }
        }
    }
}
