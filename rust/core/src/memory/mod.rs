//! Memory: blocks for results and decoded bytes, recycled when freed, and claims on ranges being written.

pub mod buffer;
pub mod claims;
pub mod limit;
pub mod output;

use bytemuck::Zeroable;

use crate::error::{Error, Kind, Result};

/// Zeros, or an error if there is no memory for them: the count may come from an untrusted file, and a failed allocation
/// aborts the process.
pub(crate) fn zeroed<T: Zeroable>(n: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(n)
        .map_err(|()| Error::new(Kind::NoMemory, format!("no memory for {n} elements of {} bytes", size_of::<T>())))
}
