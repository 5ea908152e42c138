//! The types that kernels share: stores, element types, and the signature of a conversion.

use std::marker::PhantomData;

use super::instructions::fence;

/// The kind of stores that a kernel uses. Streaming exists only inside [`storing`], which ends with a fence.
#[derive(Clone, Copy, Debug)]
pub enum Stores<'a> {
    /// Ordinary stores, through the caches.
    Cached,
    /// Stores past the caches.
    Streaming(Fenced<'a>),
}

/// Exists only while [`storing`] runs, on its thread.
#[derive(Clone, Copy, Debug)]
pub struct Fenced<'a>(PhantomData<(&'a (), *const ())>);

impl Stores<'_> {
    /// Whether to stream.
    pub fn stream(self) -> bool {
        matches!(self, Stores::Streaming(_))
    }
}

/// Runs `work` with the stores to use; streamed ones are visible to other threads, in order, once this returns (also by a
/// panic).
pub fn storing<R>(stream: bool, work: impl FnOnce(Stores<'_>) -> R) -> R {
    struct AtEnd;
    impl Drop for AtEnd {
        fn drop(&mut self) {
            fence();
        }
    }
    if !stream {
        return work(Stores::Cached);
    }
    let _fence = AtEnd;
    work(Stores::Streaming(Fenced(PhantomData)))
}

/// Converts `src` into `dst`: whole elements, equally many in both. Returns false if no finite value became infinite; true
/// otherwise, or if this kernel does not check.
pub type Conversion = fn(src: &[u8], dst: &mut [u8], stores: Stores<'_>) -> bool;

/// A floating type that kernels convert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names of the types")]
pub enum Float {
    F16,
    BF16,
    F32,
    F64,
}
