//! How decoding fails below the file: a text, and what kind of fault it is.

use crate::error::{Finding, Kind};

/// Why a step failed; the caller adds the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undecodable {
    /// [`Kind::Format`], or [`Kind::NoMemory`], which says nothing about the bytes.
    pub kind: Kind,
    /// What is wrong.
    pub text: String,
    /// The finding, where there is one.
    pub finding: Option<Finding>,
}

impl<T: Into<String>> From<T> for Undecodable {
    fn from(text: T) -> Undecodable {
        Undecodable { kind: Kind::Format, text: text.into(), finding: None }
    }
}

pub(super) type Said<T> = Result<T, Undecodable>;

/// The error where `n` units of memory cannot be had.
pub(super) fn no_memory(n: u64, of: &str) -> Undecodable {
    Undecodable { kind: Kind::NoMemory, text: format!("no memory for {n} {of}"), finding: None }
}

/// Memory for `n` elements, or an error where it cannot be had: a failed `Vec::with_capacity` ends the process.
pub(super) fn reserve<T>(n: u64) -> Said<Vec<T>> {
    let mut made = Vec::new();
    usize::try_from(n)
        .ok()
        .and_then(|n| made.try_reserve_exact(n).ok())
        .ok_or_else(|| no_memory(n.saturating_mul(size_of::<T>() as u64), "bytes"))?;
    Ok(made)
}

/// `n` bytes of zeros, likewise.
pub(crate) fn zeros(n: usize) -> Said<Vec<u8>> {
    bytemuck::allocation::try_zeroed_vec(n).map_err(|()| no_memory(n as u64, "bytes"))
}
