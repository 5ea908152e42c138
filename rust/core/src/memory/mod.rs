//! Memory: blocks for results and decoded bytes, recycled when freed, and claims on ranges being written.

pub mod buffer;
pub mod claims;
pub mod limit;
pub mod output;

use bytemuck::Zeroable;

use self::limit::memory_limit;
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// Below this size, the system decides alone: looking up the limit is not worth it.
const LARGE: u64 = 1 << 30;

/// The error for memory that cannot be had.
pub fn no_memory(bytes: u64) -> Error {
    Error::new(Kind::NoMemory, format!("no memory for {bytes} bytes"))
}

/// Memory for `n` elements as a count that fits; an error if this process may not have so much. The system alone promises
/// more than there is, and ends the process when the promise is used.
fn allowed<T>(n: u64) -> Result<usize> {
    let bytes = n.saturating_mul(size_of::<T>() as u64);
    let limit = if bytes < LARGE { u64::MAX } else { memory_limit() };
    if bytes > limit {
        let detail = format!("no memory for {bytes} bytes: this process may use {limit}");
        return Err(Error::new(Kind::NoMemory, detail));
    }
    usize::try_from(n).map_err(|_| no_memory(bytes))
}

/// `n` zeros, or an error if there is no memory for them: the count may come from an untrusted file, and a failed allocation
/// aborts the process.
pub fn zeroed<T: Zeroable>(n: usize) -> Result<Vec<T>> {
    let n = allowed::<T>(n as u64)?;
    bytemuck::allocation::try_zeroed_vec(n).map_err(|()| no_memory((n as u64).saturating_mul(size_of::<T>() as u64)))
}

/// `n` zero bytes, or an error as of [`zeroed`].
pub fn bytes(n: u64) -> Result<Vec<u8>> {
    zeroed(usize::try_from(n).unwrap_or(usize::MAX))
}

/// An empty vector with memory for `n` elements, or an error as of [`zeroed`].
pub fn reserve<T>(n: u64) -> Result<Vec<T>> {
    let mut reserved = Vec::new();
    extend(&mut reserved, n)?;
    Ok(reserved)
}

/// Reserves memory for exactly `n` more elements, or an error as of [`zeroed`].
pub fn extend<T>(list: &mut Vec<T>, n: u64) -> Result<()> {
    let bytes = n.saturating_mul(size_of::<T>() as u64);
    list.try_reserve_exact(allowed::<T>(n)?).map_err(|_| no_memory(bytes))
}

/// Shortens a vector to `n` bytes, or appends zeros, or an error as of [`zeroed`].
pub fn resize(list: &mut Vec<u8>, n: u64) -> Result<()> {
    extend(list, n.saturating_sub(list.len() as u64))?;
    list.resize(to_usize(n), 0);
    Ok(())
}

/// A copy of bytes, or an error as of [`zeroed`].
pub fn copied(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut copy = reserve(bytes.len() as u64)?;
    copy.extend_from_slice(bytes);
    Ok(copy)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        for n in [memory_limit().saturating_add(1), 1 << 62, u64::MAX] {
            assert_eq!(bytes(n).unwrap_err().kind, Kind::NoMemory);
            assert_eq!(reserve::<u64>(n).unwrap_err().kind, Kind::NoMemory);
            assert_eq!(extend(&mut vec![1u8], n).unwrap_err().kind, Kind::NoMemory);
        }
        assert_eq!(bytes(5).unwrap(), [0; 5]);
        assert_eq!(copied(b"ab").unwrap(), b"ab");
        let mut list = vec![1u8; 3];
        for n in [5, 2, 9] {
            resize(&mut list, n).unwrap();
            assert_eq!(list.len() as u64, n);
        }
        assert_eq!(list, [1, 1, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(resize(&mut list, 1 << 62).unwrap_err().kind, Kind::NoMemory);
        assert!(reserve::<u64>(5).unwrap().capacity() >= 5);
    }
}
