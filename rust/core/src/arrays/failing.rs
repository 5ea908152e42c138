//! Decoding errors below the level of files: a text and a kind.

use crate::error::{Finding, Kind};

/// Why a step of decoding failed; the caller adds the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undecodable {
    /// [`Kind::Format`], or [`Kind::NoMemory`], which is not a fault of the bytes.
    pub kind: Kind,
    /// What is wrong.
    pub text: String,
    /// The finding, if there is one.
    pub finding: Option<Finding>,
}

impl<T: Into<String>> From<T> for Undecodable {
    fn from(text: T) -> Undecodable {
        Undecodable { kind: Kind::Format, text: text.into(), finding: None }
    }
}

pub(super) type Said<T> = Result<T, Undecodable>;

/// The error if `n` units of memory cannot be allocated.
pub(super) fn no_memory(n: u64, of: &str) -> Undecodable {
    Undecodable { kind: Kind::NoMemory, text: format!("no memory for {n} {of}"), finding: None }
}

/// Memory for `n` elements, or an error: a failed `Vec::with_capacity` aborts the process.
pub(super) fn reserve<T>(n: u64) -> Said<Vec<T>> {
    let mut made = Vec::new();
    usize::try_from(n)
        .ok()
        .and_then(|n| made.try_reserve_exact(n).ok())
        .ok_or_else(|| no_memory(n.saturating_mul(size_of::<T>() as u64), "bytes"))?;
    Ok(made)
}

/// `n` zero bytes, or an error if they cannot be allocated.
pub(crate) fn zeros(n: usize) -> Said<Vec<u8>> {
    bytemuck::allocation::try_zeroed_vec(n).map_err(|()| no_memory(n as u64, "bytes"))
}
