//! Layouts: the map from (group, example, token) to a file and a row in it.
//!
//! A *group* is a part that a format stores separately for each example, usually a layer. Layer names belong to the
//! caller; here groups are indices.

// A number of a file is converted with a check; tests may not care.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap))]

pub mod chunked;
pub mod grid;
pub mod joined;
mod packed;
pub mod placed;
pub mod records;
pub mod row;
pub mod spans;
pub mod strided;
pub mod table;
pub mod tensors;

use crate::error::{Error, Kind, Result};

/// A row's location: the number of a file of the dataset, and an address in it, usually the row's index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Address {
    /// The file's number.
    pub file: u64,
    /// Address in that file; [`Place`](crate::layout::row::Place) maps it to a byte offset.
    pub row: u64,
}

/// Bits of an address in one of so many files. A gather sorts rows by one number of 64 bits, whose upper bits are the file's
/// number: a single file may have 2^56 bytes, each of 2^24 files 2^40.
pub const fn address_bits(files: usize) -> u32 {
    let bits = (files.saturating_sub(1) as u64).leading_zeros();
    if bits > 56 { 56 } else { bits }
}

/// The error for a byte that has no address in one of so many files.
pub(crate) fn too_far(end: u64, files: usize) -> Error {
    let limit = 1u64 << address_bits(files);
    let detail =
        format!("expected rows in the first {limit} bytes of each of {files} files, found byte {end}: split the file");
    Error::new(Kind::Unsupported, detail)
}

/// Consecutive rows of one file, in token order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first row.
    pub at: Address,
    /// Number of rows.
    pub rows: u64,
}

/// The map from indices to addresses. `example` and `token` come from the user and are checked here; a negative `token`
/// counts from the end of the example.
pub trait Layout: Send + Sync {
    /// Number of groups.
    fn groups(&self) -> usize;
    /// Number of examples.
    fn examples(&self) -> u64;
    /// Tokens stored for an example in a group; both are in range.
    fn tokens(&self, group: usize, example: u64) -> u64;
    /// The same for a user: fails if the index entry of the example is damaged. Then [`Layout::tokens`] is 1, so that a read
    /// of the example reaches its entry, and fails too.
    fn count(&self, group: usize, example: u64) -> Result<u64> {
        Ok(self.tokens(group, example))
    }
    /// Fails if the file that addresses are read from has changed such that reading it would be unsafe or wrong. Called before
    /// each read of rows or lengths.
    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
    /// The row of one token.
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address>;
    /// The row of an example's last token.
    fn last(&self, group: usize, example: i64) -> Result<Address>;
    /// Calls `each` with the runs of an example, in token order.
    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()>;
}

/// Checks an example's index.
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
