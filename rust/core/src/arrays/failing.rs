//! How decoding fails below the file: a text, and a finding where there is one.

use crate::error::Finding;

/// Why a step failed; the caller adds the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Undecodable {
    pub text: String,
    pub finding: Option<Finding>,
}

impl<T: Into<String>> From<T> for Undecodable {
    fn from(text: T) -> Undecodable {
        Undecodable { text: text.into(), finding: None }
    }
}

pub(super) type Said<T> = Result<T, Undecodable>;

/// Memory for `n` bytes, or an error where it cannot be had: a failed `Vec::with_capacity` ends the process.
pub(super) fn reserve(n: u64) -> Said<Vec<u8>> {
    let mut made = Vec::new();
    usize::try_from(n)
        .ok()
        .and_then(|n| made.try_reserve_exact(n).ok())
        .ok_or_else(|| format!("no memory for {n} bytes"))?;
    Ok(made)
}
