//! Elements in C order: the last index changes first.

/// The strides of elements in C order.
pub(super) fn dense(shape: &[u64]) -> Vec<u64> {
    let mut next = 1u64;
    let mut made: Vec<u64> = shape
        .iter()
        .rev()
        .map(|n| {
            let this = next;
            next = next.saturating_mul((*n).max(1));
            this
        })
        .collect();
    made.reverse();
    made
}

/// The next index in C order; false after the last.
pub(super) fn advance(index: &mut [u64], lens: impl DoubleEndedIterator<Item = u64> + ExactSizeIterator) -> bool {
    for (i, n) in index.iter_mut().zip(lens).rev() {
        *i += 1;
        if *i < n {
            return true;
        }
        *i = 0;
    }
    false
}
