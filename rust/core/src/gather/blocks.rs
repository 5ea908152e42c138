//! Reads many neighbouring rows with few large reads, on a thread that may wait for the disk.
//!
//! For data that are read once, in large pieces. A mapping would cost a page fault for every few rows and keep every
//! touched page in this process. Reads through the page cache would evict the data of other programs. The rows are
//! sorted by file and address, ranges at most [`GAP`] apart are read together into a block of memory, and rows are
//! copied from there.

use std::collections::HashMap;
use std::sync::Arc;

use super::pick::{Origin, Out, Pick};
use super::plan::{Cut, Extent, GatherJob, Span};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::files::open::OpenFile;
use crate::layout::Layout;
use crate::memory::output::Output;
use crate::source::local::DIRECT;
use crate::source::{RangeRead, Source};
use crate::threads::Stop;

/// Bytes per read, at most.
const BLOCK: usize = 1 << 20;
/// Reads up to this size use small pages: the 16 readers of a window read units of 64 KiB, and huge pages would make 32 MiB of
/// that resident.
const SHORT: usize = 256 << 10;
/// A huge page.
const HUGE: usize = 2 << 20;
/// Ranges at most this far apart are read together: a further read of a local disk costs about as much.
const GAP: u64 = 32 << 10;

/// Threads that read blocks at the same time. They wait for the disk most of the time: this many reach its full rate
/// with random reads of 64 KiB.
pub const READERS: usize = 16;

/// The cost of reads in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlockReads {
    /// Bytes of files, including the gaps between rows that are read with them.
    pub bytes: u64,
    /// Bytes of the longest read.
    pub longest: u64,
}

impl BlockReads {
    /// Bytes of memory for blocks in a thread with such reads.
    pub fn memory(self) -> u64 {
        let short = self.longest.min(SHORT as u64);
        // Huge pages, if the system provides them.
        let long = if self.longest > SHORT as u64 { (BLOCK + 2 * DIRECT as usize).next_multiple_of(HUGE) } else { 0 };
        short + long as u64
    }
}

/// A thread's memory for blocks.
#[derive(Debug)]
pub struct BlockReader {
    short: Output,
    /// Made with the first longer read.
    long: Option<Output>,
    past_cache: bool,
    /// Reads that were counted and not made; `None` for a reader that reads.
    counted: Option<BlockReads>,
}

impl BlockReader {
    /// Memory for one block. With `past_cache`, blocks are read past the page cache if the source can.
    pub fn new(past_cache: bool) -> Result<BlockReader> {
        Ok(BlockReader { short: Output::sparse(SHORT).map_err(no_block)?, long: None, past_cache, counted: None })
    }

    /// A reader that reads nothing: it counts the bytes that it would read.
    pub fn counting(past_cache: bool) -> Result<BlockReader> {
        Ok(BlockReader { counted: Some(BlockReads::default()), ..BlockReader::new(past_cache)? })
    }

    /// The counts of a counting reader.
    pub fn counted(&self) -> BlockReads {
        self.counted.unwrap_or_default()
    }

    /// Whether bytes are counted and not read.
    pub fn counts(&self) -> bool {
        self.counted.is_some()
    }

    fn memory(&mut self, len: usize) -> Result<&mut Output> {
        if len <= SHORT {
            return Ok(&mut self.short);
        }
        let long = match self.long.take() {
            Some(long) => long,
            None => Output::new(BLOCK + 2 * DIRECT as usize).map_err(no_block)?,
        };
        Ok(self.long.insert(long))
    }

    /// The bytes from `at` to `end`; `None` if they are counted only.
    fn read(&mut self, source: &dyn Source, at: u64, end: u64, stop: &Stop) -> Result<Option<&[u8]>> {
        // Direct reads begin and end at multiples of DIRECT.
        let from = if self.past_cache { at / DIRECT * DIRECT } else { at };
        let skipped = (at - from) as usize;
        let used = skipped..skipped + (end - at) as usize;
        let whole = used.end.next_multiple_of(DIRECT as usize);
        let past_cache = self.past_cache;
        if let Some(counted) = &mut self.counted {
            let len = if past_cache { (whole as u64).min(source.size().saturating_sub(from)) } else { end - at };
            counted.bytes += source.stored(from, len);
            counted.longest = counted.longest.max(whole as u64);
            return Ok(None);
        }
        let memory = self.memory(whole)?;
        if past_cache {
            source.read_past_cache(RangeRead { at: from, into: &mut memory.as_mut()[..whole] }, stop)?;
        } else {
            source.read(at, &mut memory.as_mut()[used.clone()], stop)?;
        }
        Ok(Some(&memory.bytes()[used]))
    }
}

fn no_block(error: std::io::Error) -> Error {
    Error::new(Kind::NoMemory, format!("cannot allocate a block: {error}"))
}

/// Fills `out` like [`gather`](super::gather), on this thread alone. Reads end early once `stop` is set.
pub fn gather_in_blocks<L: Layout + ?Sized>(
    origin: &Origin<'_, L>,
    pick: Pick<'_>,
    items: usize,
    cast: Cast<'_>,
    out: Out<'_>,
    (reader, stop): (&mut BlockReader, &Stop),
) -> Result<()> {
    let job = GatherJob::new(origin, pick, items, cast)?;
    for (span, mut out) in job.parts(items, usize::MAX, out)? {
        job.copy_blocks(span, &mut out, reader, stop)?;
    }
    Ok(())
}

impl<L: Layout + ?Sized> GatherJob<'_, L> {
    fn copy_blocks(&self, span: Span, out: &mut Out<'_>, reader: &mut BlockReader, stop: &Stop) -> Result<()> {
        let mut entries = self.locate(span)?;
        entries.sort_unstable_by_key(|e| e.key);
        let mut rest = &entries[..];
        while !rest.is_empty() {
            let Cut { files, mut seen, read, filled, done } = self.cut(rest, span.first, out.is_dense(), stop)?;
            rest = &rest[done..];
            for extent in &filled {
                self.fill(&files[extent.file as usize], self.target(extent, out));
            }
            seen.extend(read);
            let source_of = first_with_source(&files);
            seen.sort_unstable_by_key(|e| (source_of[e.file as usize], e.src));
            let mut blocks = &seen[..];
            while let Some((first, _)) = blocks.split_first() {
                stop.check()?;
                let (block, others) = blocks.split_at(block_len(blocks, &source_of));
                blocks = others;
                let open = &files[first.file as usize];
                let end = block.iter().map(|e| e.src + u64::from(e.len)).max().unwrap_or(first.src);
                let bytes = match (open.source(), open.bytes()) {
                    (Some(source), _) => match reader.read(source, first.src, end, stop)? {
                        Some(bytes) => bytes,
                        None => continue,
                    },
                    (None, Some(bytes)) => &bytes[first.src as usize..end as usize],
                    (None, None) => return Err(Error::new(Kind::Internal, "a file without bytes").at(open.location())),
                };
                for extent in block {
                    let at = (extent.src - first.src) as usize;
                    let cast = self.cast.swapped_if(files[extent.file as usize].place().swapped);
                    cast.apply(&bytes[at..at + extent.len as usize], self.target(extent, out));
                }
            }
        }
        Ok(())
    }
}

/// For each file, the number of the first one with the same source: inner chunks of a shard are read together.
fn first_with_source(files: &[Arc<OpenFile>]) -> Vec<usize> {
    let mut firsts = HashMap::new();
    let first = |(number, file): (usize, &Arc<OpenFile>)| {
        file.shared().map_or(number, |source| *firsts.entry(source).or_insert(number))
    };
    files.iter().enumerate().map(first).collect()
}

/// The number of extents at the beginning of this sorted list that are read together.
fn block_len(extents: &[Extent], source_of: &[usize]) -> usize {
    let Some(first) = extents.first() else { return 0 };
    let mut end = first.src + u64::from(first.len);
    for (i, next) in extents.iter().enumerate().skip(1) {
        let till = end.max(next.src + u64::from(next.len));
        if source_of[next.file as usize] != source_of[first.file as usize]
            || next.src > end + GAP
            || till - first.src > BLOCK as u64
        {
            return i;
        }
        end = till;
    }
    extents.len()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::files::open::Body;
    use crate::layout::row::Place;
    use crate::location::Location;
    use crate::source::held::Held;

    #[test]
    fn neighbouring_chunks_of_a_shard_are_one_read() {
        let shard = |name: &str| -> Arc<dyn Source> {
            Arc::new(Held::shared(Location::object("store", name), Arc::new(vec![0u8].into())))
        };
        let (a, b) = (shard("a"), shard("b"));
        let chunk_of = |shard: &Arc<dyn Source>| {
            Arc::new(OpenFile::new(Body::Shared(Arc::clone(shard)), Place::packed(0, 0, 1).unwrap()))
        };
        let sources = first_with_source(&[chunk_of(&a), chunk_of(&b), chunk_of(&a), chunk_of(&a)]);
        assert_eq!(sources, [0, 1, 0, 0]);
        let rows = |file: u32, src: u64| Extent { src, dst: 0, len: 100, file };
        assert_eq!(block_len(&[rows(0, 0), rows(2, 100), rows(3, 200), rows(1, 300)], &sources), 3);
        assert_eq!(block_len(&[rows(0, 0), rows(2, 101 + GAP)], &sources), 1);
    }
}
