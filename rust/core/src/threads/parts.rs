//! Parts that own an item: the chunk of the output that they fill, or their result.

use super::Lock;
use super::handout::{Stop, Watch, Work};
use super::{pool, waiting};
use crate::error::{Error, Kind, Result};

enum PartState<T, R> {
    Waiting(T),
    Taken,
    Made(R),
}

/// Returns `work(i, item)` for each item, in order; runs on this thread and the pool's. Each item belongs to one part, so
/// items that borrow chunks of one output need no proof of disjointness.
pub fn map_each<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: &(dyn Fn(usize, T, &Stop) -> Result<R> + Sync),
    watch: Watch<'_>,
) -> Result<Vec<R>> {
    hand_out(items, work, |parts, one| pool::run(parts, one, watch))
}

fn hand_out<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: &(dyn Fn(usize, T, &Stop) -> Result<R> + Sync),
    run: impl FnOnce(usize, &Work<'_>) -> Result<()>,
) -> Result<Vec<R>> {
    let slots: Vec<Lock<PartState<T, R>>> = items.into_iter().map(|item| Lock::new(PartState::Waiting(item))).collect();
    let exchange = |i: usize, by: PartState<T, R>| std::mem::replace(&mut *slots[i].lock(), by);
    let one = |i: usize, stop: &Stop| {
        let PartState::Waiting(item) = exchange(i, PartState::Taken) else {
            return Err(Error::new(Kind::Internal, "a part was handed out twice"));
        };
        exchange(i, PartState::Made(work(i, item, stop)?));
        Ok(())
    };
    run(slots.len(), &one)?;
    let made = slots.into_iter().map(|slot| match slot.into_inner() {
        PartState::Made(made) => Some(made),
        PartState::Waiting(_) | PartState::Taken => None,
    });
    made.collect::<Option<Vec<R>>>().ok_or_else(|| Error::new(Kind::Internal, "a part that was not done"))
}

/// [`map_each`] for parts without items.
pub fn map<R: Send>(
    parts: usize,
    work: &(dyn Fn(usize, &Stop) -> Result<R> + Sync),
    watch: Watch<'_>,
) -> Result<Vec<R>> {
    map_each(0..parts, &|_, i, stop| work(i, stop), watch)
}

/// [`map_each`] for parts without results.
pub fn for_each<T: Send>(
    items: impl IntoIterator<Item = T>,
    work: &(dyn Fn(usize, T, &Stop) -> Result<()> + Sync),
    watch: Watch<'_>,
) -> Result<()> {
    map_each(items, work, watch).map(drop)
}

/// [`map_each`] on at most `at_once` threads that may block.
pub fn map_each_waiting<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    at_once: usize,
    work: &(dyn Fn(usize, T, &Stop) -> Result<R> + Sync),
    watch: Watch<'_>,
) -> Result<Vec<R>> {
    hand_out(items, work, |parts, one| waiting::run_waiting(parts, at_once, one, watch))
}

/// [`for_each`] on at most `at_once` threads that may block.
pub fn for_each_waiting<T: Send>(
    items: impl IntoIterator<Item = T>,
    at_once: usize,
    work: &(dyn Fn(usize, T, &Stop) -> Result<()> + Sync),
    watch: Watch<'_>,
) -> Result<()> {
    map_each_waiting(items, at_once, work, watch).map(drop)
}

/// The result of `work` on a thread that may block, while the caller's watch is called.
pub fn wait_for<R: Send>(work: &(dyn Fn(&Stop) -> Result<R> + Sync), watch: Watch<'_>) -> Result<R> {
    let made = map_each_waiting([()], 1, &|_, (), stop| work(stop), watch)?;
    made.into_iter().next().ok_or_else(|| Error::new(Kind::Internal, "work that was not done"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn each_chunk_is_filled_and_each_result_is_in_its_place() {
        let mut out = vec![0usize; 10_000];
        for_each(
            out.chunks_mut(7),
            &|i, chunk, _| {
                chunk.fill(i);
                Ok(())
            },
            &mut || false,
        )
        .unwrap();
        assert!(out.iter().enumerate().all(|(at, i)| at / 7 == *i));
        assert_eq!(map(100, &|i, _| Ok(i * i), &mut || false).unwrap()[99], 9801);
    }
}
