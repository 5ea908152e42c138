//! Memory for results, recycled when its owner drops it.

use crate::threads::ForkSafe;
use std::cmp::Reverse;
use std::sync::atomic::{AtomicUsize, Ordering};

use memmap2::MmapMut;

/// Outputs of at least this size are recycled; the allocator reuses smaller ones itself.
const RECYCLE_FROM: usize = 1 << 20;
/// Bytes of freed outputs kept in total, at most.
const KEEP_AT_MOST: usize = 256 << 20;
/// Blocks kept, at most: a loop that binds the next batch before it drops the last needs two, and several threads may loop.
const KEEP_BLOCKS: usize = 8;
/// Sizes of blocks are multiples of a huge page.
const GRAIN: usize = 2 << 20;

/// Freed large outputs, the most recent last. Fresh memory costs more than filling it (the kernel clears every page,
/// and a virtual machine may have to ask its host for it): a loop that drops each batch gets the same pages back. The
/// lock is only tried, never waited for, so that a fork while it is locked costs an allocation at most.
static FREED: ForkSafe<Vec<MmapMut>> = ForkSafe::new(vec![]);

/// Bytes of all blocks of pages since the process began, recycled ones too.
static PAGES: AtomicUsize = AtomicUsize::new(0);

/// The bytes of pages that outputs have asked for since the process began: a counting allocator does not see them.
#[doc(hidden)] // for the fuzz targets
pub fn page_bytes() -> usize {
    PAGES.load(Ordering::Relaxed)
}

/// An uncleared block of memory, aligned for any element type.
#[derive(Debug)]
pub struct Output {
    memory: Allocation,
    len: usize,
}

#[derive(Debug)]
enum Allocation {
    /// As u64, for alignment.
    Heap(Vec<u64>),
    /// Returned to [`FREED`] on drop.
    Pages(Option<MmapMut>),
    /// Of small pages, unmapped on drop.
    Sparse(MmapMut),
}

/// The index of the smallest block that fits `len` bytes without much waste; of equal sizes, the last. Not simply the
/// last block: of two sizes in use, the smaller could take the larger's block, and the larger would find none.
fn fitting(blocks: impl Iterator<Item = usize>, len: usize) -> Option<usize> {
    let most = (len + len / 4).max(2 * GRAIN);
    let fits = blocks.enumerate().filter(|(_, size)| (len..=most).contains(size));
    fits.min_by_key(|(at, size)| (*size, Reverse(*at))).map(|(at, _)| at)
}

impl Output {
    /// A block of `len` bytes: the smallest freed one that fits, the most recent of equal ones, or a new one if none
    /// fits without much waste. Before a new one is made, the oldest is unmapped, so that a program whose sizes change
    /// keeps no useless memory.
    pub fn new(len: usize) -> std::io::Result<Output> {
        if len < RECYCLE_FROM {
            return Ok(Output { memory: Allocation::Heap(vec![0; len.div_ceil(8)]), len });
        }
        PAGES.fetch_add(len, Ordering::Relaxed);
        if let Some(mut freed) = FREED.try_lock() {
            if let Some(at) = fitting(freed.iter().map(|map| map.len()), len) {
                return Ok(Output { memory: Allocation::Pages(Some(freed.remove(at))), len });
            }
            if !freed.is_empty() {
                freed.remove(0);
            }
        }
        // Up to an eighth more, so that outputs of similar sizes can reuse each other; untouched pages cost nothing.
        let grain = (len.checked_next_power_of_two().unwrap_or(GRAIN) / 16).max(GRAIN);
        let map = MmapMut::map_anon(len.checked_next_multiple_of(grain).unwrap_or(len))?;
        // Fewer, larger pages to clear; a system without huge pages clears small ones.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Output { memory: Allocation::Pages(Some(map)), len })
    }
}

impl Output {
    /// A cleared block of which only touched pages of 4 KiB take memory, aligned to pages.
    pub fn sparse(len: usize) -> std::io::Result<Output> {
        PAGES.fetch_add(len, Ordering::Relaxed);
        let map = MmapMut::map_anon(len.max(1))?;
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::NoHugePage);
        Ok(Output { memory: Allocation::Sparse(map), len })
    }

    /// Bytes of memory in use, all of which may be resident: the size of the reused mapping.
    pub fn capacity(&self) -> usize {
        match &self.memory {
            Allocation::Heap(eights) => eights.len() * 8,
            Allocation::Pages(map) => map.as_ref().map_or(0, |map| map.len()),
            Allocation::Sparse(map) => map.len(),
        }
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        match &self.memory {
            Allocation::Heap(eights) => &bytemuck::cast_slice(eights)[..self.len],
            Allocation::Pages(map) => map.as_deref().and_then(|m| m.get(..self.len)).unwrap_or_default(),
            Allocation::Sparse(map) => &map[..self.len],
        }
    }
}

impl AsMut<[u8]> for Output {
    fn as_mut(&mut self) -> &mut [u8] {
        match &mut self.memory {
            Allocation::Heap(eights) => &mut bytemuck::cast_slice_mut(eights)[..self.len],
            Allocation::Pages(map) => map.as_deref_mut().and_then(|m| m.get_mut(..self.len)).unwrap_or_default(),
            Allocation::Sparse(map) => &mut map[..self.len],
        }
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if let Allocation::Pages(map) = &mut self.memory
            && let (Some(map), Some(mut freed)) = (map.take(), FREED.try_lock())
            && map.len() <= KEEP_AT_MOST
        {
            freed.push(map);
            while freed.len() > KEEP_BLOCKS || freed.iter().map(|m| m.len()).sum::<usize>() > KEEP_AT_MOST {
                freed.remove(0);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_reused_block_is_not_much_larger_than_asked_for() {
        for len in [RECYCLE_FROM, 3 * GRAIN, 64 << 20] {
            // Freed last, so that this block is reused; another test may take it first, which is as good.
            drop(Output::new(len * 2).unwrap());
            let output = Output::new(len).unwrap();
            assert!(output.capacity() >= len && output.capacity() <= (len + len / 4).max(2 * GRAIN), "{len}");
        }
    }

    #[test]
    fn the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_last() {
        let freed = [104, 96, 8, 96, 104, 200].map(|mib| mib << 20);
        let taken = |mib: usize| fitting(freed.into_iter(), mib << 20);
        assert_eq!(
            [93, 96, 97, 104, 105, 150, 170, 201, 7, 5].map(taken),
            [Some(3), Some(3), Some(4), Some(4), None, None, Some(5), None, Some(2), None]
        );
    }

    #[test]
    fn sparse_blocks_are_as_long_as_asked_for_and_cleared() {
        for len in [0, 1, 4096, (256 << 10) + 5] {
            let mut output = Output::sparse(len).unwrap();
            assert!(output.bytes().len() == len && output.bytes().iter().all(|b| *b == 0));
            assert!(output.as_mut().as_ptr().addr().is_multiple_of(4096));
            output.as_mut().fill(7);
        }
    }

    #[test]
    fn outputs_are_as_long_as_asked_for_and_aligned() {
        for len in [0, 1, 7, 4096, RECYCLE_FROM - 1, RECYCLE_FROM, 3 * GRAIN + 5] {
            let mut output = Output::new(len).unwrap();
            assert_eq!(output.as_mut().len(), len);
            assert!(output.as_mut().as_ptr().addr().is_multiple_of(8));
            output.as_mut().fill(7);
        }
    }
}
