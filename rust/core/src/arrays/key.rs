//! Cache keys of decoded units.
//!
//! A key identifies a unit completely: the array, the file and its version when it was opened, the chunk, and the block. A
//! block's number is only meaningful with the block size from the frame's header, so both are in the key: units of a file that
//! was rewritten in place are not confused with old ones.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::source::Version;
use crate::threads::ForkSafe;

/// A unit of an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UnitKey {
    /// A process-wide number of the array; see [`new_array`].
    pub array: u64,
    /// Number of the file in the array, or of the chunk if files are not numbered.
    pub file: u64,
    /// The number of the file's version from [`VersionNumbers`]; [`UNCHECKED`] if versions are not compared.
    pub version: u64,
    /// The chunk in the file.
    pub chunk: usize,
    /// The block in the chunk's frame, and the numbers per block of that frame; [`WHOLE`] for chunks that are decoded as a
    /// whole.
    pub block: (usize, usize),
}

/// The block of a chunk decoded as a whole; no frame has empty blocks.
pub const WHOLE: (usize, usize) = (0, 0);

/// A new process-wide number for an array.
pub fn new_array() -> u64 {
    static ARRAYS: AtomicU64 = AtomicU64::new(0);
    ARRAYS.fetch_add(1, Ordering::Relaxed)
}

/// The version of a file that is not compared.
pub const UNCHECKED: u64 = 0;

/// Numbers that stand for versions of an array's files. Cloning and hashing a [`Version`] for every cached block made batches
/// of windows 6 to 30 % slower.
#[derive(Debug, Default)]
pub struct VersionNumbers {
    /// The last version of each file, and its number. A child forked while another thread held the lock gets new numbers and
    /// decodes again.
    last: ForkSafe<HashMap<u64, (Version, u64)>>,
}

impl VersionNumbers {
    /// The number of a file's version: the same for the same version, a new one for another version or an unknown one.
    pub fn number(&self, file: u64, version: Option<&Version>) -> u64 {
        static NEXT: AtomicU64 = AtomicU64::new(UNCHECKED + 1);
        let new = || NEXT.fetch_add(1, Ordering::Relaxed);
        let Some(version) = version else { return new() };
        let number = self.last.with(|last| match last.get(&file) {
            Some((known, number)) if known == version => *number,
            _ => {
                let number = new();
                last.insert(file, (version.clone(), number));
                number
            }
        });
        number.unwrap_or_else(new)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn threads_that_open_one_file_at_once_get_one_number() {
        let versions = VersionNumbers::default();
        for file in 0..200 {
            let barrier = std::sync::Barrier::new(4);
            let open = || {
                barrier.wait();
                versions.number(file, Some(&Version::Tag("a".into())))
            };
            let numbers: Vec<u64> = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..4).map(|_| scope.spawn(open)).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert!(numbers.iter().all(|number| *number == numbers[0]), "{numbers:?}");
        }
    }

    #[test]
    fn a_version_keeps_its_number_and_another_gets_another() {
        let versions = VersionNumbers::default();
        let tag = |text: &str| Version::Tag(text.into());
        let a = versions.number(3, Some(&tag("a")));
        assert_eq!(versions.number(3, Some(&tag("a"))), a);
        assert_ne!(versions.number(4, Some(&tag("a"))), a);
        let b = versions.number(3, Some(&tag("b")));
        assert_ne!(b, a);
        assert_ne!(versions.number(3, Some(&tag("a"))), a);
        assert_ne!(versions.number(5, None), versions.number(5, None));
        assert!([a, b].iter().all(|number| *number != UNCHECKED));
    }
}
