//! Addresses in chunked 4-D arrays `(examples, groups, tokens, width)`: Zarr activation stores.
//!
//! A dataset has one or more *members* (the stores of a run) with consecutive examples. A member has one or more *parts*:
//! arrays with consecutive tokens (HalluLens stores prompt and response separately). A part has a number of tokens per
//! example, or its array's full length.

use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};
use crate::layout::grid::Grid;
use crate::number::to_usize;

/// Tokens of one part.
#[derive(Debug)]
pub enum Lengths {
    /// Equal for every example.
    Same(u64),
    /// Per example.
    Each(Vec<u32>),
}

impl Lengths {
    #[inline]
    fn get(&self, example: u64) -> u64 {
        match self {
            Lengths::Same(n) => *n,
            Lengths::Each(n) => u64::from(n[to_usize(example)]),
        }
    }
}

/// A member's arrays.
#[derive(Debug)]
pub struct Member {
    /// Number of examples.
    pub examples: u64,
    /// Its arrays, in token order.
    pub parts: Vec<Grid>,
}

/// The layout.
#[derive(Debug)]
pub struct Chunked {
    groups: usize,
    examples: u64,
    /// Each with the index of its first example.
    members: Vec<(u64, Member)>,
    /// One per part; all members have the same number of parts.
    lengths: Vec<Lengths>,
}

impl Chunked {
    /// Every member must have as many parts as there are lengths, and every list of lengths one entry per example.
    /// Fails if a length, or the number of examples or groups, exceeds the array: an index past the end of one
    /// dimension would address chunks of the next index of the dimension before it.
    pub fn new(groups: usize, members: Vec<Member>, lengths: Vec<Lengths>) -> Result<Chunked> {
        let mut examples = 0u64;
        let mut placed = Vec::with_capacity(members.len());
        for member in members {
            let first = examples;
            if member.parts.len() != lengths.len() {
                return Err(Error::new(Kind::Internal, "a member with another number of parts"));
            }
            for part in &member.parts {
                let [n, g, _, _] = part.shape();
                if member.examples > n || groups as u64 > g {
                    let most = format!("expected at most {n} examples and {g} groups, as in the array's shape");
                    let what = format!("{most}, found {} and {groups}", member.examples);
                    return Err(Error::new(Kind::Format, what));
                }
            }
            examples = examples
                .checked_add(member.examples)
                .filter(|n| *n < 1 << 48)
                .ok_or_else(|| Error::new(Kind::Format, "more than 2^48 examples"))?;
            placed.push((first, member));
        }
        for each in &lengths {
            if matches!(each, Lengths::Each(n) if n.len() as u64 != examples) {
                return Err(Error::new(Kind::Internal, "lengths of another number of examples"));
            }
        }
        for (first, member) in &placed {
            for (part, each) in member.parts.iter().zip(&lengths) {
                let [_, _, most, _] = part.shape();
                let long = match each {
                    Lengths::Same(n) => (*n > most && member.examples > 0).then_some((*first, *n)),
                    Lengths::Each(n) => (*first..first + member.examples)
                        .zip(&n[to_usize(*first)..to_usize(first + member.examples)])
                        .find(|(_, n)| u64::from(**n) > most)
                        .map(|(example, n)| (example, u64::from(*n))),
                };
                if let Some((example, n)) = long {
                    let what = format!("example {example}: {n} tokens in an array with room for {most}");
                    return Err(Error::new(Kind::Format, what));
                }
            }
        }
        Ok(Chunked { groups, examples, members: placed, lengths })
    }

    /// Boundaries of the groups of examples that share chunks: 0, then the end of each group.
    pub fn bounds(&self) -> Vec<u64> {
        let mut bounds = vec![0];
        for (first, member) in &self.members {
            let step = member.parts.iter().map(Grid::examples_per_chunk).max().unwrap_or(1).max(1);
            let mut at = 0;
            while at < member.examples {
                at = (at + step).min(member.examples);
                bounds.push(first + at);
            }
        }
        bounds
    }

    /// The member that contains an example, and the example's index in it.
    #[inline]
    fn member(&self, example: u64) -> (&Member, u64) {
        let at = if self.members.len() == 1 {
            0
        } else {
            // An empty member has the same first index as the next: the last one with this index has the example.
            self.members.partition_point(|(first, _)| *first <= example) - 1
        };
        let (first, member) = &self.members[at];
        (member, example - first)
    }
}

impl Layout for Chunked {
    fn groups(&self) -> usize {
        self.groups
    }

    fn examples(&self) -> u64 {
        self.examples
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        self.lengths.iter().map(|l| l.get(example)).sum()
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, self.groups)?;
        let example = check_example(example, self.examples)?;
        let mut token = check_token(token, self.tokens(group, example), example)?;
        let (member, local) = self.member(example);
        for (grid, lengths) in member.parts.iter().zip(&self.lengths) {
            let here = lengths.get(example);
            if token < here {
                let (file, row) = grid.locate(local, group as u64, token);
                return Ok(Address { file, row });
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
        let (member, local) = self.member(example);
        for (grid, lengths) in member.parts.iter().zip(&self.lengths) {
            let (tokens, per_chunk) = (lengths.get(example), grid.tokens_per_chunk());
            let mut token = 0;
            while token < tokens {
                let (file, row) = grid.locate(local, group as u64, token);
                let rows = per_chunk.min(tokens - token);
                each(Run { at: Address { file, row }, rows });
                token += rows;
            }
        }
        Ok(())
    }
}
