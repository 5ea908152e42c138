//! Where a row lies: the map from (group, example, token) to a file and a row in it.
//!
//! A *group* is what a format stores side by side for every example: a layer, usually. Names of layers are the
//! caller's; here they are positions.

pub mod chunked;
pub mod grid;
pub mod row;
pub mod spans;
pub mod strided;
pub mod table;

use crate::error::{Error, Kind, Result};

/// A row: which of the dataset's numbered files, and which address in it: the row's number, usually.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// The file's number.
    pub file: u64,
    /// Address in that file; [`Place`](crate::layout::row::Place) says which byte it is.
    pub row: u64,
}

/// Rows that lie one after another in one file, in token order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first row.
    pub at: Address,
    /// How many.
    pub rows: u64,
}

/// The map from indices to addresses. `example` and `token` come from the user and are checked here; a negative `token`
/// counts from the example's end.
pub trait Layout: Send + Sync {
    /// Number of groups.
    fn groups(&self) -> usize;
    /// Number of examples.
    fn examples(&self) -> u64;
    /// Tokens stored for an example in a group; both are in range.
    fn tokens(&self, group: usize, example: u64) -> u64;
    /// The row of one token.
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address>;
    /// The row of an example's last token.
    fn last(&self, group: usize, example: i64) -> Result<Address>;
    /// Calls `each` with the runs that make up an example, in token order.
    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()>;
}

/// An example's number, if the dataset has it.
#[inline]
pub fn check_example(example: i64, examples: u64) -> Result<u64> {
    match u64::try_from(example) {
        Ok(e) if e < examples => Ok(e),
        _ => Err(Error::new(
            Kind::OutOfRange,
            format!(
                "example {example} is out of range: the dataset has {examples} examples, 0 to {}",
                examples.saturating_sub(1)
            ),
        )),
    }
}

#[inline]
pub(crate) fn check_token(token: i64, tokens: u64, example: u64) -> Result<u64> {
    let from_start = if token < 0 { token.checked_add_unsigned(tokens) } else { Some(token) };
    match from_start.and_then(|t| u64::try_from(t).ok()) {
        Some(t) if t < tokens => Ok(t),
        _ => Err(Error::new(
            Kind::OutOfRange,
            format!("token {token} is out of range: example {example} has {tokens} stored tokens"),
        )),
    }
}

pub(crate) fn check_group(group: usize, groups: usize) -> Result<()> {
    if group < groups {
        return Ok(());
    }
    Err(Error::new(Kind::Internal, format!("group {group} of {groups}")))
}
