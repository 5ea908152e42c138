//! Memory: results and decoded bytes, used again when they are freed, and who writes where.

pub mod block;
pub mod claims;
pub mod output;

use bytemuck::Zeroable;

use crate::error::{Error, Kind, Result};

/// Zeros, or an error where there is no memory for them: how many there are may follow from what a file claims of itself, and an
/// allocation that fails ends the process.
pub(crate) fn zeroed<T: Zeroable>(n: usize) -> Result<Vec<T>> {
    bytemuck::allocation::try_zeroed_vec(n)
        .map_err(|()| Error::new(Kind::NoMemory, format!("no memory for {n} elements of {} bytes", size_of::<T>())))
}
