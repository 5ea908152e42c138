//! Selections: the tokens of each example to read. Selected tokens are numbered in stored order: pick 0, 1, 2, ...

use crate::error::{Error, Kind, Result};

/// The picks of a dataset.
#[derive(Debug)]
pub struct Selection {
    examples: u64,
    count: Count,
    which: SelectedTokens,
}

/// Picks per example.
#[derive(Debug)]
enum Count {
    Same(u64),
    /// Picks before each example, and the total at the end.
    Before(Vec<u64>),
}

#[derive(Debug)]
enum SelectedTokens {
    /// Consecutive tokens from this one on.
    From(u64),
    /// The set bits; example e's token `first + i` is bit `bits_before[e] + i`.
    Set { first: u64, bits: Vec<u64>, before: Vec<u64> },
    /// One token of each example that has picks.
    At(Vec<u32>),
}

impl Selection {
    /// `count` tokens of every example, starting at token `first`.
    pub fn same(examples: u64, first: u64, count: u64) -> Result<Selection> {
        if examples.checked_mul(count).is_none_or(|n| n >= 1 << 62) {
            return Err(Error::new(Kind::Argument, format!("{examples} examples x {count} tokens are too many")));
        }
        Ok(Selection { examples, count: Count::Same(count), which: SelectedTokens::From(first) })
    }

    /// `counts[e]` tokens of example e, starting at token `first`.
    pub fn counted(first: u64, counts: impl Iterator<Item = u64>) -> Result<Selection> {
        let before = sums(counts)?;
        let examples = before.len() as u64 - 1;
        Ok(Selection { examples, count: Count::Before(before), which: SelectedTokens::From(first) })
    }

    /// Of `counts[e]` tokens of example e, starting at `first`, those whose flag in `keep` is set; flags are in the
    /// order of examples.
    pub fn masked(first: u64, counts: impl Iterator<Item = u64>, keep: &[bool]) -> Result<Selection> {
        let before = sums(counts)?;
        if before.last() != Some(&(keep.len() as u64)) {
            let detail = format!("expected {} flags, one per token, found {}", before.last().unwrap_or(&0), keep.len());
            return Err(Error::new(Kind::Argument, detail));
        }
        let mut bits = vec![0u64; keep.len().div_ceil(64)];
        for (word, flags) in bits.iter_mut().zip(keep.chunks(64)) {
            *word = flags.iter().enumerate().fold(0, |w, (i, f)| w | u64::from(*f) << i);
        }
        let kept = before.windows(2).map(|w| keep[w[0] as usize..w[1] as usize].iter().filter(|f| **f).count() as u64);
        let picks = sums(kept)?;
        let examples = before.len() as u64 - 1;
        Ok(Selection { examples, count: Count::Before(picks), which: SelectedTokens::Set { first, bits, before } })
    }

    /// One token of each example, or none if the entry is `None`.
    pub fn one_of_each(tokens: impl Iterator<Item = Option<u32>>) -> Result<Selection> {
        let tokens: Vec<Option<u32>> = tokens.collect();
        let before = sums(tokens.iter().map(|t| u64::from(t.is_some())))?;
        let at = tokens.iter().map(|t| t.unwrap_or(0)).collect();
        Ok(Selection { examples: tokens.len() as u64, count: Count::Before(before), which: SelectedTokens::At(at) })
    }

    /// Number of picks.
    pub fn len(&self) -> u64 {
        self.before(self.examples)
    }

    /// Whether there are no picks.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of examples, including those without picks.
    pub fn examples(&self) -> u64 {
        self.examples
    }

    /// Picks per example, if all examples have equally many.
    pub fn same_count(&self) -> Option<u64> {
        match self.count {
            Count::Same(n) => Some(n),
            Count::Before(_) => None,
        }
    }

    /// Number of picks before an example.
    #[inline]
    pub fn before(&self, example: u64) -> u64 {
        match &self.count {
            Count::Same(n) => example * n,
            Count::Before(before) => before[example as usize],
        }
    }

    /// The example and the token of a pick.
    #[inline]
    pub fn get(&self, pick: u64) -> (u64, u64) {
        let (example, k) = match &self.count {
            Count::Same(n) => (pick / n, pick % n),
            Count::Before(before) => {
                // An example without picks has the same count as the next: the last one with this count has the pick.
                let example = before.partition_point(|b| *b <= pick) - 1;
                (example as u64, pick - before[example])
            }
        };
        (example, self.token(example, k))
    }

    /// The token of an example's k-th pick.
    #[inline]
    pub fn token(&self, example: u64, k: u64) -> u64 {
        match &self.which {
            SelectedTokens::From(first) => first + k,
            SelectedTokens::At(tokens) => u64::from(tokens[example as usize]),
            SelectedTokens::Set { first, bits, before } => {
                let begin = before[example as usize];
                first + nth_set(bits, begin, k) - begin
            }
        }
    }
}

/// The position of the k-th set bit at or after `from`.
fn nth_set(bits: &[u64], from: u64, mut k: u64) -> u64 {
    let mut at = (from / 64) as usize;
    let mut word = bits[at] & (!0 << (from % 64));
    while u64::from(word.count_ones()) <= k {
        k -= u64::from(word.count_ones());
        at += 1;
        word = bits[at];
    }
    for _ in 0..k {
        word &= word - 1;
    }
    at as u64 * 64 + u64::from(word.trailing_zeros())
}

/// 0, followed by the running sums.
fn sums(counts: impl Iterator<Item = u64>) -> Result<Vec<u64>> {
    let mut sum = 0u64;
    let mut made = vec![0];
    for count in counts {
        sum = sum
            .checked_add(count)
            .filter(|n| *n < 1 << 62)
            .ok_or_else(|| Error::new(Kind::Argument, "more than 2^62 tokens"))?;
        made.push(sum);
    }
    Ok(made)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(selection: &Selection) -> Vec<(u64, u64)> {
        (0..selection.len()).map(|i| selection.get(i)).collect()
    }

    proptest! {
        /// Compares with a list of all picks.
        #[test]
        fn picks_are_those_that_were_kept(first in 0u64..3, flags in prop::collection::vec(prop::collection::vec(any::<bool>(), 0..200), 0..20)) {
            let counts = || flags.iter().map(|f| f.len() as u64);
            let keep: Vec<bool> = flags.concat();
            let every: Vec<(u64, u64)> =
                flags.iter().enumerate().flat_map(|(e, f)| (0..f.len() as u64).map(move |t| (e as u64, first + t))).collect();
            prop_assert_eq!(all(&Selection::counted(first, counts()).unwrap()), every.clone());
            let kept: Vec<_> = every.iter().zip(&keep).filter(|(_, k)| **k).map(|(p, _)| *p).collect();
            let masked = Selection::masked(first, counts(), &keep).unwrap();
            prop_assert_eq!(all(&masked), kept.clone());
            for (i, (example, _)) in kept.iter().enumerate() {
                prop_assert!(masked.before(*example) <= i as u64 && (i as u64) < masked.before(example + 1));
            }
            let last = flags.iter().map(|f| (f.len() as u32).checked_sub(1));
            let want: Vec<_> = last.clone().enumerate().filter_map(|(e, t)| Some((e as u64, u64::from(t?)))).collect();
            prop_assert_eq!(all(&Selection::one_of_each(last).unwrap()), want);
            prop_assert!(Selection::masked(first, counts(), &[&keep[..], &[true]].concat()).is_err());
        }

        #[test]
        fn equal_examples_need_no_list(examples in 0u64..9, first in 0u64..3, count in 0u64..9) {
            let same = Selection::same(examples, first, count).unwrap();
            let listed = Selection::counted(first, (0..examples).map(|_| count)).unwrap();
            prop_assert_eq!(same.len(), listed.len());
            prop_assert_eq!(all(&same), all(&listed));
        }
    }
}
