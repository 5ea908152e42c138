//! From requested rows to byte ranges of files: cuts the output into parts, sorts addresses, joins neighbours.

use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::ops::Range;
use std::sync::Arc;

use super::pick::{Ints, Origin, Out, Pick};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::{Body, OpenFile, outside};
use crate::layout::{Address, Layout, check_example};
use crate::source::descriptors::{descriptors_are_scarce, files_at_once};
use crate::source::queue::Ranged;
use crate::source::{self, Source};
use crate::threads::{self, Stop};

/// The calling thread copies smaller outputs itself: waking other threads costs about 50 us.
pub const INLINE_BYTES: usize = 512 << 10;
/// Rows per part at most; bounds the temporary memory.
const PART_ROWS: usize = 16_384;
/// Output bytes per part at most, unless one example is larger; bounds the delay of Ctrl-C.
pub const PART_BYTES: usize = 8 << 20;
/// Longer runs are copied in extents of this size, a multiple of every element size.
pub const EXTENT: usize = 256 << 10;

/// The parameters shared by all parts of a gather.
pub struct GatherJob<'a, L: ?Sized> {
    pub files: &'a dyn Files,
    pub layout: &'a L,
    pub groups: Ints<'a>,
    pub only: Range<u64>,
    pub pick: Pick<'a>,
    pub cast: Cast<'a>,
    pub row_bytes: usize,
    /// Bits of an entry's key that hold the address.
    pub address_bits: u32,
    /// Whether files must be decoded: then only one is open at a time.
    pub decodes: bool,
    /// Whether all files are already open.
    pub opened: bool,
    /// Whether the output is written past the caches.
    pub streams: bool,
}

/// The items of a part, from `first` to `end - 1`. If items are whole examples, a long one may span several parts: this part
/// leaves out the first `skip` rows of its first example, and has `rows` rows in total.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub first: usize,
    pub end: usize,
    pub skip: u64,
    pub rows: u64,
}

/// Rows to copy: `rows` rows from `key` (file and address, in sort order) to row `dst` of the part.
#[derive(Clone, Copy)]
pub struct Entry {
    pub key: u64,
    pub dst: u32,
    pub rows: u32,
}

/// Bytes to copy from a file to an offset in the part.
#[derive(Clone, Copy)]
pub struct Extent {
    pub src: u64,
    pub dst: usize,
    pub len: u32,
    /// Index in the list of the part's files.
    pub file: u32,
}

/// Extents by source: in memory or computed from it, to be read, or filled.
pub struct Cut {
    pub files: Vec<Arc<OpenFile>>,
    pub seen: Vec<Extent>,
    pub read: Vec<Extent>,
    pub filled: Vec<Extent>,
    /// Number of entries included.
    pub done: usize,
}

/// Rows of an entry and of the `used` ones after it, neighbours in the output; `abreast`: side by side in the file, rather than
/// rows of a run.
struct Neighbours {
    rows: u64,
    used: usize,
    abreast: bool,
}

/// Joins an entry with the ones after it. `steps` are the addresses between rows of a run, and between rows side by side.
#[inline]
fn neighbours(head: &Entry, tail: &[Entry], (run, side): (u64, Option<u64>)) -> Neighbours {
    let mut found = Neighbours { rows: u64::from(head.rows), used: 0, abreast: false };
    let beside = |rows: u64| head.key.checked_add(side?.checked_mul(rows)?);
    for next in tail {
        if u64::from(next.dst) != u64::from(head.dst) + found.rows {
            break;
        }
        if !found.abreast && next.key == head.key + found.rows * run {
            found.rows += u64::from(next.rows);
        } else if next.rows == 1 && (found.abreast || found.rows == 1) && beside(found.rows) == Some(next.key) {
            (found.rows, found.abreast) = (found.rows + 1, true);
        } else {
            break;
        }
        found.used += 1;
    }
    found
}

impl Ranged for Extent {
    fn source(&self) -> usize {
        self.file as usize
    }

    fn range(&self) -> source::ByteRange {
        source::ByteRange { at: self.src, len: u64::from(self.len) }
    }
}

/// Rows per part: one part for small requests; large ones are cut for balance, bounded memory and a prompt Ctrl-C.
pub fn part_rows(out_bytes: usize, row_bytes: usize) -> usize {
    if out_bytes <= INLINE_BYTES {
        return usize::MAX;
    }
    let row_bytes = row_bytes.max(1);
    let balanced = (out_bytes / row_bytes).div_ceil(threads::num_threads() * 4);
    balanced.min(PART_ROWS).min(PART_BYTES / row_bytes).max(INLINE_BYTES / 2 / row_bytes).max(1)
}

impl<'a, L: Layout + ?Sized> GatherJob<'a, L> {
    /// Prepares a gather; fails if the lists' lengths differ from `items`.
    pub fn new(origin: &Origin<'a, L>, pick: Pick<'a>, items: usize, cast: Cast<'a>) -> Result<GatherJob<'a, L>> {
        match pick {
            Pick::Tokens { examples, tokens } => {
                examples.check_len(items, "examples")?;
                tokens.check_len(items, "tokens")?;
            }
            Pick::Last { examples } | Pick::Whole { examples } => examples.check_len(items, "examples")?,
        }
        let &Origin { files, layout, groups, ref only } = origin;
        groups.check_len(items, "groups")?;
        layout.unchanged()?;
        let row_bytes = files.row().bytes;
        let (address_bits, decodes) = (files.address_bits(), files.decodes());
        let only = only.clone();
        let (opened, streams) = (false, false);
        Ok(GatherJob { files, layout, groups, only, pick, cast, row_bytes, address_bits, decodes, opened, streams })
    }

    /// The group of an item, checked.
    pub fn group(&self, item: usize) -> Result<usize> {
        let group = self.groups.get(item);
        usize::try_from(group)
            .ok()
            .filter(|g| *g < self.layout.groups())
            .ok_or_else(|| Error::new(Kind::Internal, format!("group {group} of {}", self.layout.groups())))
    }

    /// Bytes of an output row.
    pub fn out_row(&self) -> usize {
        self.row_bytes / self.cast.from_size * self.cast.to_size
    }

    /// All items as one span.
    pub fn all(&self, items: usize) -> Span {
        Span { first: 0, end: items, skip: 0, rows: u64::MAX }
    }

    /// A span, cut into consecutive ones of at most `most` rows each.
    pub fn spans(&self, within: Span, most: usize) -> Result<Vec<Span>> {
        let Span { first: mut item, end, mut skip, rows: mut rest } = within;
        let mut spans = Vec::new();
        while item < end && rest > 0 {
            let most = rest.min(most as u64);
            let mut span = Span { first: item, end: item, skip, rows: 0 };
            if let Pick::Whole { .. } = self.pick {
                while item < end && span.rows < most {
                    let example = check_example(self.pick.example(item), self.layout.examples())?;
                    let left = self.layout.tokens(self.group(item)?, example).saturating_sub(skip);
                    let taken = left.min(most - span.rows);
                    span.rows += taken;
                    span.end = item + 1;
                    if taken < left {
                        skip += taken;
                    } else {
                        skip = 0;
                        item += 1;
                    }
                }
            } else {
                item += usize::try_from(most).unwrap_or(usize::MAX).min(end - item);
                span.rows = (item - span.first) as u64;
                span.end = item;
            }
            rest -= span.rows;
            spans.push(span);
        }
        Ok(spans)
    }

    /// The parts in output order, each with its share of the output and at most `most` rows.
    pub fn parts<'o>(&self, items: usize, most: usize, out: Out<'o>) -> Result<Vec<(Span, Out<'o>)>> {
        self.shares(self.spans(self.all(items), most)?, out)
    }

    /// Consecutive spans, each with its share of the output.
    pub fn shares<'o>(&self, spans: Vec<Span>, out: Out<'o>) -> Result<Vec<(Span, Out<'o>)>> {
        let mut parts = Vec::with_capacity(spans.len());
        let mut rest = out;
        for span in spans {
            let rows = usize::try_from(span.rows).unwrap_or(usize::MAX);
            let Some((mine, others)) = rest.split_at(rows, self.out_row()) else {
                return Err(Error::new(Kind::Argument, "the output is smaller than the requested rows"));
            };
            parts.push((span, mine));
            rest = others;
        }
        if rest.bytes() > 0 {
            return Err(Error::new(Kind::Argument, "the output is larger than the requested rows"));
        }
        Ok(parts)
    }

    /// The rows of the part's items, in output order; one entry per run of adjacent rows.
    pub fn locate(&self, span: Span) -> Result<Vec<Entry>> {
        let Span { first, end, .. } = span;
        let mut entries = Vec::with_capacity(end - first);
        match self.pick {
            Pick::Tokens { examples, tokens } => {
                for i in first..end {
                    let at = self.layout.locate(self.group(i)?, examples.get(i), tokens.get(i))?;
                    self.enter(&mut entries, at, i - first, 1)?;
                }
            }
            Pick::Last { examples } => {
                for i in first..end {
                    let at = self.layout.last(self.group(i)?, examples.get(i))?;
                    self.enter(&mut entries, at, i - first, 1)?;
                }
            }
            Pick::Whole { examples } => {
                let mut dst = 0u64;
                let mut skip = span.skip;
                let mut failed = None;
                for i in first..end {
                    self.layout.runs(self.group(i)?, examples.get(i), &mut |run| {
                        let passed = skip.min(run.rows);
                        let rows = (run.rows - passed).min(span.rows - dst);
                        skip -= passed;
                        if rows == 0 {
                            return;
                        }
                        let at =
                            Address { file: run.at.file, row: run.at.row + passed * self.files.stride(run.at.file) };
                        if let Err(error) = self.enter(&mut entries, at, dst as usize, rows) {
                            failed = Some(error);
                        }
                        dst += rows;
                    })?;
                }
                if let Some(error) = failed {
                    return Err(error);
                }
            }
        }
        Ok(entries)
    }

    #[inline]
    fn enter(&self, entries: &mut Vec<Entry>, at: Address, dst: usize, rows: u64) -> Result<()> {
        if !self.only.contains(&at.file) {
            return Ok(());
        }
        let too_large = |_| Error::new(Kind::Unsupported, "more than 2^32 rows in one example");
        let (dst, rows) = (u32::try_from(dst).map_err(too_large)?, u32::try_from(rows).map_err(too_large)?);
        // The file table guarantees that both fit.
        for file in at.file..at.file + self.files.split(at.file) {
            entries.push(Entry { key: file << self.address_bits | at.row, dst, rows });
        }
        Ok(())
    }

    /// The number of an entry's file.
    pub fn file_of(&self, entry: &Entry) -> u64 {
        entry.key >> self.address_bits
    }

    /// The address of an entry in its file.
    pub fn address_of(&self, entry: &Entry) -> u64 {
        entry.key & ((1 << self.address_bits) - 1)
    }

    /// Opens and checks the files of the entries, joins rows that are adjacent in both the file and the output, and cuts the
    /// result into extents of bounded size. Stops when this thread holds its maximum of open files; returns the number of
    /// entries cut.
    pub fn cut(&self, entries: &[Entry], first: usize, dense: bool, stop: &Stop) -> Result<Cut> {
        let files_at_once = match (self.opened, self.decodes) {
            (true, _) => usize::MAX,
            (false, true) => 1,
            (false, false) => files_at_once(threads::num_threads()),
        };
        let mut opened: HashMap<u64, usize> = HashMap::new();
        let mut cut =
            Cut { files: vec![], seen: Vec::with_capacity(entries.len()), read: vec![], filled: vec![], done: 0 };
        let (from, to) = (self.cast.from_size, self.cast.to_size);
        let out_row = self.out_row();
        for run in entries.chunk_by(|a, b| self.file_of(a) == self.file_of(b)) {
            let number = self.file_of(&run[0]);
            let file = match opened.entry(number) {
                MapEntry::Occupied(known) => *known.get(),
                MapEntry::Vacant(_) if cut.files.len() >= files_at_once => break,
                // A thread that has rows to copy does not take more descriptors while all threads together lack them.
                MapEntry::Vacant(_) if !cut.files.is_empty() && !self.opened && descriptors_are_scarce() => break,
                MapEntry::Vacant(new) => {
                    let open = match self.files.get(number, stop) {
                        Err(error) if !cut.files.is_empty() && error.is_out_of_descriptors() => break,
                        open => open?,
                    };
                    // Chunks of a shard follow each other.
                    let is_checked =
                        open.shared().is_some() && cut.files.last().is_some_and(|last| last.shared() == open.shared());
                    if !is_checked {
                        open.unchanged()?;
                    }
                    cut.files.push(open);
                    *new.insert(cut.files.len() - 1)
                }
            };
            cut.done += run.len();
            let open = &cut.files[file];
            let place = open.place();
            let extents = match open.body() {
                Body::Fill(..) => &mut cut.filled,
                _ if open.bytes().is_some() || open.source().is_some_and(Source::computes) => &mut cut.seen,
                _ => &mut cut.read,
            };
            let steps = (place.step / place.unit, place.beside(self.row_bytes));
            let mut rest = run;
            while let Some((head, tail)) = rest.split_first() {
                let Neighbours { rows, used, abreast } = neighbours(head, tail, steps);
                rest = &tail[used..];
                let address = self.address_of(head);
                let (found, step) = if abreast {
                    (place.abreast(address, rows), place.used as u64)
                } else {
                    (place.offset(address, rows), place.step)
                };
                let Some(src) = found else {
                    let whose = (!matches!(self.pick, Pick::Whole { .. })).then_some(first + head.dst as usize);
                    return Err(self.outside(open, address, rows, whose));
                };
                // Cut. Neighbours are one range of bytes; partial rows, and rows apart, are copied row by row.
                let dst = head.dst as usize * out_row + place.column * to;
                let whole = place.used == self.row_bytes && step == place.used as u64;
                let (times, bytes) =
                    if whole && dense { (1, rows as usize * self.row_bytes) } else { (rows as usize, place.used) };
                for row in 0..times {
                    let (mut src, mut dst) = (src + row as u64 * step, dst + row * out_row);
                    let mut left = bytes;
                    while left > 0 {
                        // EXTENT is a multiple of every element size, so extents contain whole elements.
                        let len = left.min(EXTENT);
                        extents.push(Extent { src, dst, len: len as u32, file: file as u32 });
                        src += len as u64;
                        dst += len / from * to;
                        left -= len;
                    }
                }
            }
        }
        Ok(cut)
    }

    /// The error for rows that an index refers to and the file does not contain.
    pub fn outside(&self, open: &OpenFile, address: u64, rows: u64, item: Option<usize>) -> Error {
        let whose = item.map_or(String::new(), |i| format!(" for example {}", self.pick.example(i)));
        outside(open, address, rows, &whose)
    }

    /// The output range of an extent.
    #[inline]
    pub fn target<'o>(&self, extent: &Extent, out: &'o mut Out<'_>) -> &'o mut [u8] {
        out.range(extent.dst, extent.len as usize / self.cast.from_size * self.cast.to_size, self.out_row())
    }
}
