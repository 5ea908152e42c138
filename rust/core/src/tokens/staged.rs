//! Prefetches the bytes of token arrays of a slow store for a whole batch.
//!
//! Opens files and reads their indexes concurrently, then reads all unknown frame headers together, then all bytes to copy
//! or decode. The batch is then read from memory. Data that was not fetched, or was evicted meanwhile, is read from the
//! store one by one.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::array::{ChunkRange, Lacking, StagedFiles, TokenArray, TokenFile};
use super::frame::HEADER;
use crate::error::Result;
use crate::location::Location;
use crate::source::fetch::{SCRATCH, WantedRange, fetch};
use crate::source::{ByteRange, RangeRead, Source, Version, Wishes};
use crate::threads::{self, Stop, Watch};

/// Needed numbers of an array, with the index of their range.
pub struct Needed {
    /// The array.
    pub array: Arc<TokenArray>,
    /// The first number, and their count.
    pub numbers: (u64, usize),
    /// Index of the caller's range.
    pub range: usize,
}

/// Bytes of ranges, by offset and length.
type FetchedRanges = HashMap<(u64, u64), Vec<u8>>;

/// A part of the needed data.
struct NeededPiece<'a> {
    array: &'a TokenArray,
    at: ChunkRange,
    range: usize,
    /// Index of its file.
    file: usize,
}

/// Numbers whose files are opened and whose places are looked up together; numbers that are not fetched then are looked
/// up again.
const LOOKED_UP: usize = 1 << 27;

/// The first of these ranges (their first numbers and lengths), at least one.
pub fn first_of(ranges: &[(u64, usize)], most: Option<usize>) -> &[(u64, usize)] {
    let (mut sum, most) = (0usize, most.unwrap_or(LOOKED_UP));
    let fits = |(_, n): &&(u64, usize)| {
        sum = sum.saturating_add(*n);
        sum <= most
    };
    &ranges[..ranges.iter().take_while(fits).count().max(1).min(ranges.len())]
}

/// Fetches the data of ranges in order until [`SCRATCH`] is full, at least of the first; returns their number.
pub fn stage(
    needed: &[Needed],
    ranges: usize,
    wishes: &Wishes,
    staged: &mut StagedFiles,
    watch: Watch<'_>,
) -> Result<usize> {
    let mut numbers: BTreeMap<(u64, u64), usize> = BTreeMap::new();
    let mut names: Vec<(&TokenArray, u64)> = vec![];
    let mut pieces: Vec<NeededPiece<'_>> = vec![];
    for Needed { array, numbers: (start, n), range } in needed {
        for at in array.chunk_ranges(*start, *n) {
            let file = *numbers.entry((array.number(), at.file)).or_insert_with(|| {
                names.push((array, at.file));
                names.len() - 1
            });
            pieces.push(NeededPiece { array, at, range: *range, file });
        }
    }
    let open = |_: usize, (array, file): (&TokenArray, u64), _: &Stop| match staged.get(&(array.number(), file)) {
        Some(open) => Ok(Arc::clone(open)),
        None => array.shard(file),
    };
    let files = threads::map_each_waiting(names.iter().copied(), wishes.parallel, &open, &mut *watch)?;
    let sources: Vec<Option<&dyn Source>> = files.iter().map(|file| file.source().map(|source| &**source)).collect();
    fetch_headers(&pieces, &files, &sources, wishes, &mut *watch)?;
    let (ranges, bytes) = fetch_bytes(&pieces, &files, &sources, ranges, wishes, watch)?;
    for (((array, number), file), bytes) in names.iter().zip(&files).zip(bytes) {
        let file = match file.source() {
            Some(source) => Arc::new(file.over(Arc::new(Fetched { source: Arc::clone(source), bytes }))),
            None => Arc::clone(file),
        };
        staged.insert((array.number(), *number), file);
    }
    Ok(ranges)
}

fn fetch_headers(
    pieces: &[NeededPiece<'_>],
    files: &[Arc<TokenFile>],
    sources: &[Option<&dyn Source>],
    wishes: &Wishes,
    watch: Watch<'_>,
) -> Result<()> {
    let mut wanted: BTreeMap<(usize, usize), ByteRange> = BTreeMap::new();
    for piece in pieces {
        if let Lacking::Header(range) = piece.array.lacking(&files[piece.file], piece.at)? {
            wanted.insert((piece.file, piece.at.chunk), range);
        }
    }
    let wanted = wanted.into_iter().map(|(to, range)| WantedRange { source: to.0, range, to });
    let keep = |(file, chunk): (usize, usize), bytes: &[u8]| {
        if let Some(header) = bytes.first_chunk::<HEADER>() {
            files[file].keep_header(chunk, *header);
        }
        Ok(())
    };
    fetch(sources, wanted.collect(), wishes, &keep, watch)
}

/// The bytes of each file by offset and length, and the number of ranges that they cover.
fn fetch_bytes(
    pieces: &[NeededPiece<'_>],
    files: &[Arc<TokenFile>],
    sources: &[Option<&dyn Source>],
    ranges: usize,
    wishes: &Wishes,
    watch: Watch<'_>,
) -> Result<(usize, Vec<FetchedRanges>)> {
    let mut made: BTreeMap<(usize, u64, u64), Vec<u8>> = BTreeMap::new();
    let (mut covered, mut total) = (ranges, 0u64);
    for piece in pieces {
        let Lacking::Bytes(ByteRange { at, len }) = piece.array.lacking(&files[piece.file], piece.at)? else {
            continue;
        };
        if made.contains_key(&(piece.file, at, len)) {
            continue;
        }
        if piece.range > 0 && total + len > SCRATCH {
            covered = piece.range;
            break;
        }
        total += len;
        made.insert((piece.file, at, len), vec![]);
    }
    let wanted = made.iter_mut().map(|((file, at, len), to)| WantedRange {
        source: *file,
        range: ByteRange { at: *at, len: *len },
        to,
    });
    let keep = |to: &mut Vec<u8>, bytes: &[u8]| {
        *to = bytes.to_vec();
        Ok(())
    };
    fetch(sources, wanted.collect(), wishes, &keep, watch)?;
    let mut bytes: Vec<FetchedRanges> = files.iter().map(|_| HashMap::new()).collect();
    for ((file, at, len), fetched) in made {
        bytes[file].insert((at, len), fetched);
    }
    Ok((covered, bytes))
}

/// A source with some ranges in memory.
#[derive(Debug)]
struct Fetched {
    source: Arc<dyn Source>,
    bytes: FetchedRanges,
}

impl Source for Fetched {
    fn location(&self) -> &Location {
        self.source.location()
    }

    fn size(&self) -> u64 {
        self.source.size()
    }

    fn version(&self) -> Option<Version> {
        self.source.version()
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        for read in reads {
            match self.bytes.get(&(read.at, read.into.len() as u64)) {
                Some(bytes) => read.into.copy_from_slice(bytes),
                None => self.source.read_many(&mut [RangeRead { at: read.at, into: read.into }], stop)?,
            }
        }
        Ok(())
    }

    fn unchanged(&self) -> Result<()> {
        self.source.unchanged()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_ranges_are_looked_up() {
        let ranges = [(0, 5), (9, 0), (20, 6), (30, 1)];
        for (most, n) in [(0, 1), (4, 1), (5, 2), (10, 2), (11, 3), (12, 4)] {
            assert_eq!(first_of(&ranges, Some(most)).len(), n);
        }
        assert_eq!(first_of(&ranges, None).len(), 4);
        assert!(first_of(&[], None).is_empty());
    }
}
