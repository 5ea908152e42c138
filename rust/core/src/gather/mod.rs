//! Gathering: many rows, from anywhere in a dataset, into one block of memory.
//!
//! The rows asked for are cut into parts, each a contiguous range of the *output*, so that every part owns its memory
//! and nothing needs to be proven about aliasing. A part
//!
//! 1. asks the layout for its rows' addresses and sorts them by file and row, megabyte by megabyte of output: disks and
//!    page tables like order, caches like writes that stay together;
//! 2. joins neighbours that stay neighbours into one copy;
//! 3. checks, file by file, that the rows exist and that the file still has the length it had when it was opened;
//! 4. moves them. From memory or a mapping, a scout runs ahead of the copy, samples whether pages are cached, and hints the
//!    cold ones to the kernel, so that a cold gather keeps the disk's queue full from one thread while a hot one pays next
//!    to nothing. Without a mapping, what is cached is read at once, the rest is hinted and read when it has arrived. A
//!    file that is not there, where the format allows that, is its fill value.
//!
//! Memory: 40 bytes per row of the parts in flight, at most [`PART_ROWS`] rows per thread.

pub mod cast;

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::{Body, OpenFile, outside};
use crate::layout::{Address, Layout};
use crate::source::descriptors::{descriptors_are_scarce, files_at_once};
use crate::source::pread::{self, Cached};
use crate::threads::{self, Stop, Watch};

/// Output below this is moved by the calling thread: waking others costs more (about 50 us).
const INLINE_BYTES: usize = 512 << 10;
/// Rows per part at most; bounds the scratch memory.
const PART_ROWS: usize = 16_384;
/// Output per part at most, unless one example is larger: bounds how long Ctrl-C waits for a part.
const PART_BYTES: usize = 8 << 20;
/// Rows are sorted within this much output: reads get their order, writes stay in the second-level cache, and many small
/// sorts cost less than one large one.
const SORT_BYTES: usize = 1 << 20;
/// A long run is moved in pieces of this size.
const PIECE: usize = 256 << 10;
/// Pieces per step of the scout, and how many of them it asks about.
const BLOCK: usize = 64;
const SAMPLES: usize = 2;
/// How far hints run ahead of the copy, in pieces and in bytes.
const AHEAD: usize = 1024;
const AHEAD_BYTES: usize = 16 << 20;

/// A list of integers that need not exist in memory.
#[derive(Clone, Copy, Debug)]
pub enum Ints<'a> {
    /// The same number, as often as needed.
    One(i64),
    /// These.
    Each(&'a [i64]),
    /// 0, 1, 2, ...
    Count,
}

impl Ints<'_> {
    /// The number at a place.
    #[inline]
    pub fn get(&self, i: usize) -> i64 {
        match self {
            Ints::One(x) => *x,
            Ints::Each(xs) => xs[i],
            Ints::Count => i as i64,
        }
    }

    fn check_len(&self, n: usize, what: &str) -> Result<()> {
        match self {
            Ints::Each(xs) if xs.len() != n => {
                Err(Error::new(Kind::Argument, format!("{} {what} for {n} items", xs.len())))
            }
            _ => Ok(()),
        }
    }
}

/// Which rows, in output order.
#[derive(Clone, Copy, Debug)]
pub enum Pick<'a> {
    /// One row per (example, token).
    Tokens {
        /// The examples.
        examples: Ints<'a>,
        /// The tokens; negative counts from the example's end.
        tokens: Ints<'a>,
    },
    /// The last token of each example.
    Last {
        /// The examples.
        examples: Ints<'a>,
    },
    /// Every token of each example, example after example.
    Whole {
        /// The examples.
        examples: Ints<'a>,
    },
}

impl Pick<'_> {
    /// The example of an item.
    pub fn example(&self, item: usize) -> i64 {
        match self {
            Pick::Tokens { examples, .. } | Pick::Last { examples } | Pick::Whole { examples } => examples.get(item),
        }
    }
}

/// Where rows come from.
pub struct Source<'a, L: ?Sized> {
    /// The files.
    pub files: &'a dyn Files,
    /// Where in them rows lie.
    pub layout: &'a L,
    /// The group that each item is taken from.
    pub groups: Ints<'a>,
    /// Rows in other files are left alone; who must not have all files open at once gathers in several goes.
    pub only: Range<u64>,
}

/// Where rows go.
pub enum Out<'a> {
    /// One after another.
    Dense(&'a mut [u8]),
    /// Each to a place of its own; all places are as long as a row of the output.
    Places(Vec<&'a mut [u8]>),
}

impl<'a> Out<'a> {
    /// The first `rows` of `row` bytes each, and the others; `None` if there are not as many.
    fn split_at(self, rows: usize, row: usize) -> Option<(Out<'a>, Out<'a>)> {
        match self {
            Out::Dense(bytes) => {
                let (mine, others) = bytes.split_at_mut_checked(rows.checked_mul(row)?)?;
                Some((Out::Dense(mine), Out::Dense(others)))
            }
            Out::Places(mut places) => {
                let others = if rows <= places.len() { places.split_off(rows) } else { return None };
                let fit = places.iter().all(|p| p.len() == row);
                fit.then_some((Out::Places(places), Out::Places(others)))
            }
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Out::Dense(bytes) => bytes.len(),
            Out::Places(places) => places.iter().map(|p| p.len()).sum(),
        }
    }

    fn is_dense(&self) -> bool {
        matches!(self, Out::Dense(_))
    }

    /// Bytes from `at` on, which lie in one row or in a dense output.
    #[inline]
    fn range(&mut self, at: usize, len: usize, row: usize) -> &mut [u8] {
        match self {
            Out::Dense(bytes) => &mut bytes[at..at + len],
            Out::Places(places) => &mut places[at / row][at % row..at % row + len],
        }
    }

    /// The same places, for a shorter time.
    pub fn reborrow(&mut self) -> Out<'_> {
        match self {
            Out::Dense(bytes) => Out::Dense(bytes),
            Out::Places(places) => Out::Places(places.iter_mut().map(|p| &mut **p).collect()),
        }
    }
}

/// Everything a part needs to know.
struct Job<'a, L: ?Sized> {
    files: &'a dyn Files,
    layout: &'a L,
    groups: Ints<'a>,
    only: Range<u64>,
    pick: Pick<'a>,
    cast: Cast<'a>,
    row_bytes: usize,
    /// Bits of an entry's key that hold the address.
    address_bits: u32,
    /// Whether a run of rows may be cut between files.
    decodes: bool,
}

/// What a part fills, and the output it owns; taken by whoever does the part.
type Part<'a> = Mutex<Option<(Span, Out<'a>)>>;

/// The items of a part, from `first` to one before `end`. Where items are whole examples, a long one can begin in one part
/// and end in another: `skip` rows of the first are not this part's, nor any after `rows`.
#[derive(Clone, Copy, Debug)]
struct Span {
    first: usize,
    end: usize,
    skip: u64,
    rows: u64,
}

/// Rows to copy: `rows` of them from `key` (file and address, in sorting order) to row `dst` of the part.
#[derive(Clone, Copy)]
struct Entry {
    key: u64,
    dst: u32,
    rows: u32,
}

/// Bytes to copy from a file to a place in the part.
#[derive(Clone, Copy)]
struct Piece {
    src: u64,
    dst: usize,
    len: u32,
    /// Position among the files of the part.
    file: u32,
}

/// Entries made into pieces, by how their bytes are had.
struct Cut {
    files: Vec<Arc<OpenFile>>,
    seen: Vec<Piece>,
    read: Vec<Piece>,
    filled: Vec<Piece>,
    /// Entries that are in here.
    done: usize,
}

/// Fills `out` with the `items` rows (or, for [`Pick::Whole`], examples) picked. `out` holds exactly those rows, in the
/// type that `cast` makes.
///
/// Errors: an index out of range, a file that is missing, too short or changed, a row outside its file. `out` is then
/// partly written.
pub fn gather<L: Layout + ?Sized>(
    source: &Source<'_, L>,
    pick: Pick<'_>,
    items: usize,
    cast: Cast<'_>,
    out: Out<'_>,
    watch: Watch<'_>,
) -> Result<()> {
    match pick {
        Pick::Tokens { examples, tokens } => {
            examples.check_len(items, "examples")?;
            tokens.check_len(items, "tokens")?;
        }
        Pick::Last { examples } | Pick::Whole { examples } => examples.check_len(items, "examples")?,
    }
    let &Source { files, layout, groups, ref only } = source;
    groups.check_len(items, "groups")?;
    let row_bytes = files.row().bytes;
    let (address_bits, decodes) = (files.address_bits(), files.decodes());
    let job = Job { files, layout, groups, only: only.clone(), pick, cast, row_bytes, address_bits, decodes };
    if items == 1 && !matches!(pick, Pick::Whole { .. }) && job.only.end == u64::MAX {
        return job.one_row(out);
    }
    let out_row = row_bytes / cast.from_size * cast.to_size;
    let part_rows = part_rows(out.bytes(), out_row);

    // Parts in output order: how many items each takes, and its own piece of the output.
    let mut parts: Vec<Part<'_>> = Vec::new();
    let mut rest = out;
    let mut item = 0;
    // Rows of `item` that are in parts already.
    let mut skip = 0u64;
    while item < items {
        let mut span = Span { first: item, end: item, skip, rows: 0 };
        if let Pick::Whole { .. } = pick {
            while item < items && span.rows < part_rows as u64 {
                let example = crate::layout::check_example(pick.example(item), layout.examples())?;
                let left = layout.tokens(job.group(item)?, example).saturating_sub(skip);
                let taken = left.min(part_rows as u64 - span.rows);
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
            item += part_rows.min(items - item);
            span.rows = (item - span.first) as u64;
            span.end = item;
        }
        let rows = usize::try_from(span.rows).unwrap_or(usize::MAX);
        let Some((mine, others)) = rest.split_at(rows, out_row) else {
            return Err(Error::new(Kind::Argument, "the output is smaller than the rows asked for"));
        };
        parts.push(Mutex::new(Some((span, mine))));
        rest = others;
    }
    if rest.bytes() > 0 {
        return Err(Error::new(Kind::Argument, "the output is larger than the rows asked for"));
    }

    let work = |part: usize, stop: &Stop| -> Result<()> {
        let taken = parts[part].lock().unwrap_or_else(PoisonError::into_inner).take();
        match taken {
            Some((span, mut out)) => job.run_part(span, &mut out, stop),
            None => Err(Error::new(Kind::Internal, "a part was handed out twice")),
        }
    };
    threads::run(parts.len(), &work, watch)
}

/// Starts reading rows into the page cache, if a few of them look as if they were not in it. A hint never fails: whatever is
/// wrong with these rows is an error of their gather.
pub fn hint<L: Layout + ?Sized>(source: &Source<'_, L>, pick: Pick<'_>, items: usize) {
    let _ = try_hint(source, pick, items);
}

fn try_hint<L: Layout + ?Sized>(source: &Source<'_, L>, pick: Pick<'_>, items: usize) -> Result<()> {
    const LOOKS: usize = 8;
    let &Source { files, layout, groups, ref only } = source;
    let row_bytes = files.row().bytes;
    let cast = Cast::between(files.row().dtype, files.row().dtype)?;
    let (address_bits, decodes) = (files.address_bits(), files.decodes());
    if decodes {
        return Ok(());
    }
    let job = Job { files, layout, groups, only: only.clone(), pick, cast, row_bytes, address_bits, decodes };
    let each = |span: Span, only_look: bool| -> Result<bool> {
        let mut entries = job.locate(span)?;
        entries.sort_unstable_by_key(|e| e.key);
        let mut rest = &entries[..];
        while !rest.is_empty() {
            let Cut { files, seen, read, done, .. } = job.cut(rest, span.first, true)?;
            rest = &rest[done..];
            for piece in seen.iter().chain(&read) {
                let open = &files[piece.file as usize];
                match (open.map(), open.file()) {
                    (_, Some(file)) if only_look => {
                        if pread::is_cached(file, piece.src) == Cached::No {
                            return Ok(true);
                        }
                    }
                    (Some(map), _) => map.will_need(piece.src as usize, piece.len as usize),
                    (None, Some(file)) => pread::will_need(file, piece.src, u64::from(piece.len)),
                    (None, None) => {}
                }
            }
        }
        Ok(false)
    };
    for first in (0..items).step_by(items.div_ceil(LOOKS).max(1)) {
        if each(Span { first, end: first + 1, skip: 0, rows: 1 }, true)? {
            return each(Span { first: 0, end: items, skip: 0, rows: items as u64 }, false).map(drop);
        }
    }
    Ok(())
}

/// Small requests are one part; large ones are cut for balance, bounded memory and a prompt Ctrl-C.
fn part_rows(out_bytes: usize, row_bytes: usize) -> usize {
    if out_bytes <= INLINE_BYTES {
        return usize::MAX;
    }
    let row_bytes = row_bytes.max(1);
    let balanced = (out_bytes / row_bytes).div_ceil(threads::num_threads() * 4);
    balanced.min(PART_ROWS).min(PART_BYTES / row_bytes).max(INLINE_BYTES / 2 / row_bytes).max(1)
}

impl<L: Layout + ?Sized> Job<'_, L> {
    fn group(&self, item: usize) -> Result<usize> {
        let group = self.groups.get(item);
        usize::try_from(group)
            .ok()
            .filter(|g| *g < self.layout.groups())
            .ok_or_else(|| Error::new(Kind::Internal, format!("group {group} of {}", self.layout.groups())))
    }

    /// A single row, without the machinery: users do call this a million times in a loop.
    fn one_row(&self, mut whole: Out<'_>) -> Result<()> {
        let group = self.group(0)?;
        let at = match self.pick {
            Pick::Tokens { examples, tokens } => self.layout.locate(group, examples.get(0), tokens.get(0))?,
            Pick::Last { examples } | Pick::Whole { examples } => self.layout.last(group, examples.get(0))?,
        };
        let (row, out_row) = (self.row_bytes, self.out_row());
        if whole.bytes() != out_row {
            return Err(Error::new(Kind::Argument, "the output is not one row"));
        }
        if self.files.split(at.file) > 1 {
            return self.run_part(Span { first: 0, end: 1, skip: 0, rows: 1 }, &mut whole, &Stop::default());
        }
        let out = whole.range(0, out_row, out_row);
        let open = self.files.get(at.file)?;
        let place = open.place();
        let Some(src) = place.offset(at.row, 1) else {
            return Err(self.outside(&open, at.row, 1, Some(0)));
        };
        open.check_length()?;
        match open.bytes() {
            Some(bytes) => {
                // One page faults as fast as it can be hinted; more are worth asking for together.
                if let (Some(map), Some(file)) = (open.map(), open.file())
                    && row > 4096
                    && pread::is_cached(file, src + row as u64 - 1) == Cached::No
                {
                    map.will_need(src as usize, row);
                }
                self.cast.swapped_if(place.swapped).apply(&bytes[src as usize..src as usize + row], out);
                Ok(())
            }
            None if self.fill(&open, out) => Ok(()),
            None if row > PIECE => {
                self.run_part(Span { first: 0, end: 1, skip: 0, rows: 1 }, &mut whole, &Stop::default())
            }
            None => {
                let piece = Piece { src, dst: 0, len: row as u32, file: 0 };
                self.copy_read(&[open], &[piece], &mut whole, &Stop::default())
            }
        }
    }

    fn out_row(&self) -> usize {
        self.row_bytes / self.cast.from_size * self.cast.to_size
    }

    fn run_part(&self, span: Span, out: &mut Out<'_>, stop: &Stop) -> Result<()> {
        let first = span.first;
        let mut entries = self.locate(span)?;
        if !entries.is_sorted_by_key(|e| e.key) {
            let mut rest = &mut entries[..];
            // What has to be decoded is visited once per part, whatever the order costs in cache misses.
            let sort_bytes = if self.decodes { usize::MAX } else { SORT_BYTES };
            let block_rows = (sort_bytes / self.out_row()).max(1);
            while !rest.is_empty() {
                // Entries are in output order still, whole examples may bring several rows each.
                let limit = (rest[0].dst as usize).saturating_add(block_rows);
                let (block, others) = rest.split_at_mut(rest.partition_point(|e| (e.dst as usize) < limit).max(1));
                block.sort_unstable_by_key(|e| e.key);
                rest = others;
            }
        }
        let mut rest = &entries[..];
        while !rest.is_empty() {
            let Cut { files, seen, read, filled, done } = self.cut(rest, first, out.is_dense())?;
            rest = &rest[done..];
            if stop.is_set() {
                return Ok(());
            }
            for piece in &filled {
                self.fill(&files[piece.file as usize], self.target(piece, out));
            }
            if !seen.is_empty() {
                self.copy_seen(&files, &seen, out, stop)?;
            }
            if !read.is_empty() {
                self.copy_read(&files, &read, out, stop)?;
            }
        }
        Ok(())
    }

    /// Writes the fill value of a file that is not there, converted like any other; false if the file is there.
    fn fill(&self, open: &OpenFile, out: &mut [u8]) -> bool {
        let Body::Fill(value) = open.body() else { return false };
        let mut element = [0u8; 16];
        let element = &mut element[..self.cast.to_size];
        self.cast.apply(value, element);
        if element.iter().all(|b| *b == 0) {
            out.fill(0);
        } else {
            for to in out.chunks_exact_mut(element.len()) {
                to.copy_from_slice(element);
            }
        }
        true
    }

    /// Rows of the part's items, in output order; neighbours in a file and in the output as one entry.
    fn locate(&self, span: Span) -> Result<Vec<Entry>> {
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
        // The files promise that both fit.
        for file in at.file..at.file + self.files.split(at.file) {
            entries.push(Entry { key: file << self.address_bits | at.row, dst, rows });
        }
        Ok(())
    }

    fn file_of(&self, entry: &Entry) -> u64 {
        entry.key >> self.address_bits
    }

    /// Opens and checks the files that entries name, joins rows that follow each other both in the file and in the output,
    /// and cuts the result into pieces of bounded size. Stops where more files would be open than this thread may hold;
    /// tells how many entries were cut.
    fn cut(&self, entries: &[Entry], first: usize, dense: bool) -> Result<Cut> {
        let files_at_once = if self.decodes { 1 } else { files_at_once(threads::num_threads()) };
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
                // With something to copy already, a thread does not ask for more of what all threads together lack.
                MapEntry::Vacant(_) if !cut.files.is_empty() && descriptors_are_scarce() => break,
                MapEntry::Vacant(new) => {
                    let open = match self.files.get(number) {
                        Err(error) if !cut.files.is_empty() && error.is_out_of_descriptors() => break,
                        open => open?,
                    };
                    open.check_length()?;
                    cut.files.push(open);
                    *new.insert(cut.files.len() - 1)
                }
            };
            cut.done += run.len();
            let open = &cut.files[file];
            let place = open.place();
            let pieces = match open.body() {
                Body::Mapped(..) | Body::Memory(_) => &mut cut.seen,
                Body::Read(_) => &mut cut.read,
                Body::Fill(_) => &mut cut.filled,
            };
            let whole_rows = place.is_dense() && place.used == self.row_bytes;
            let stride = place.step / place.unit;
            let mut rest = run;
            while let Some((head, tail)) = rest.split_first() {
                // Join.
                let mut rows = u64::from(head.rows);
                let mut used = 0;
                for next in tail {
                    if next.key != head.key + rows * stride || u64::from(next.dst) != u64::from(head.dst) + rows {
                        break;
                    }
                    rows += u64::from(next.rows);
                    used += 1;
                }
                rest = &tail[used..];
                let address = head.key & ((1 << self.address_bits) - 1);
                let Some(src) = place.offset(address, rows) else {
                    let whose = (!matches!(self.pick, Pick::Whole { .. })).then_some(first + head.dst as usize);
                    return Err(self.outside(open, address, rows, whose));
                };
                // Cut. A run of whole rows is one range of bytes, parts of rows are taken row by row.
                let dst = head.dst as usize * out_row + place.column * to;
                let (times, bytes) =
                    if whole_rows && dense { (1, rows as usize * self.row_bytes) } else { (rows as usize, place.used) };
                for row in 0..times {
                    let (mut src, mut dst) = (src + row as u64 * place.step, dst + row * out_row);
                    let mut left = bytes;
                    while left > 0 {
                        // PIECE is a multiple of every element size, so that pieces hold whole elements.
                        let len = left.min(PIECE);
                        pieces.push(Piece { src, dst, len: len as u32, file: file as u32 });
                        src += len as u64;
                        dst += len / from * to;
                        left -= len;
                    }
                }
            }
        }
        Ok(cut)
    }

    /// The rows that an index names must be rows that the file holds.
    fn outside(&self, open: &OpenFile, address: u64, rows: u64, item: Option<usize>) -> Error {
        let whose = item.map_or(String::new(), |i| format!(" for example {}", self.pick.example(i)));
        outside(open, address, rows, &whose)
    }

    /// Where a piece goes.
    #[inline]
    fn target<'o>(&self, piece: &Piece, out: &'o mut Out<'_>) -> &'o mut [u8] {
        out.range(piece.dst, piece.len as usize / self.cast.from_size * self.cast.to_size, self.out_row())
    }

    /// Copies what can be looked at: mapped files and memory.
    fn copy_seen(&self, files: &[Arc<OpenFile>], pieces: &[Piece], out: &mut Out<'_>, stop: &Stop) -> Result<()> {
        let bytes: Vec<&[u8]> = files.iter().map(|f| f.bytes().unwrap_or_default()).collect();
        let casts: Vec<Cast<'_>> = files.iter().map(|f| self.cast.swapped_if(f.place().swapped)).collect();
        let mut scout = Scout::new(files, pieces);
        for (at, block) in pieces.chunks(BLOCK).enumerate() {
            if stop.is_set() {
                return Ok(());
            }
            scout.run_ahead_of(at * BLOCK);
            let before = Instant::now();
            for (i, piece) in block.iter().enumerate() {
                // Two rows ahead: one is too late for a page walk, more evicts what is about to be used.
                let soon = pieces.get(at * BLOCK + i + 2);
                if let Some((map, soon)) = soon.and_then(|p| Some((files[p.file as usize].map()?, p))) {
                    map.prefetch(soon.src as usize);
                }
                let file = piece.file as usize;
                let src = &bytes[file][piece.src as usize..piece.src as usize + piece.len as usize];
                casts[file].apply(src, self.target(piece, out));
            }
            scout.block_took(before.elapsed(), block);
        }
        Ok(())
    }

    /// Copies what has to be read.
    fn copy_read(&self, files: &[Arc<OpenFile>], pieces: &[Piece], out: &mut Out<'_>, stop: &Stop) -> Result<()> {
        let as_is = self.cast.convert.is_none() && !files.iter().any(|f| f.place().swapped);
        let mut scratch = vec![0u8; if as_is { 0 } else { PIECE }];
        let mut into = |piece: &Piece, out: &mut Out<'_>, wait: bool| -> Result<Cached> {
            let open = &files[piece.file as usize];
            let Some(file) = open.file() else {
                return Err(Error::new(Kind::Internal, "a file that is not open").at(open.path()));
            };
            let dst = self.target(piece, out);
            let buf = if as_is { &mut *dst } else { &mut scratch[..piece.len as usize] };
            let read = if wait {
                pread::read_exact_at(file, buf, piece.src).map(|()| Cached::Yes)
            } else {
                pread::read_if_cached(file, buf, piece.src)
            };
            let cached = read.map_err(|e| {
                let mut error = Error::from_io(&e, open.path(), "read").byte(piece.src);
                if error.kind == Kind::Truncated {
                    error.detail = format!("expected {} more bytes, the file ends", piece.len);
                }
                error
            })?;
            if cached == Cached::Yes && !as_is {
                self.cast.swapped_if(open.place().swapped).apply(&scratch[..piece.len as usize], dst);
            }
            Ok(cached)
        };
        // Reads on their way: hinted, and waited for when enough others have been hinted after them.
        let mut coming: VecDeque<&Piece> = VecDeque::new();
        let mut coming_bytes = 0;
        let mut can_ask = true;
        for piece in pieces {
            if stop.is_set() {
                return Ok(());
            }
            if can_ask {
                match into(piece, out, false)? {
                    Cached::Yes => continue,
                    Cached::No => {}
                    Cached::Unknown => can_ask = false,
                }
            }
            if let Some(file) = files[piece.file as usize].file() {
                pread::will_need(file, piece.src, u64::from(piece.len));
            }
            coming.push_back(piece);
            coming_bytes += piece.len as usize;
            while coming.len() >= AHEAD || coming_bytes >= AHEAD_BYTES {
                let Some(oldest) = coming.pop_front() else { break };
                coming_bytes -= oldest.len as usize;
                into(oldest, out, true)?;
            }
        }
        for piece in coming {
            if stop.is_set() {
                return Ok(());
            }
            into(piece, out, true)?;
        }
        Ok(())
    }
}

/// Runs ahead of a copy from a mapping and sees to it that cold pages are on their way.
struct Scout<'a> {
    files: &'a [Arc<OpenFile>],
    pieces: &'a [Piece],
    /// Pieces looked at so far, and their bytes that are not copied yet.
    seen: usize,
    ahead_bytes: usize,
    /// Copying was slow although nothing looked cold: the file system cannot tell, so hint everything.
    blind: bool,
}

impl<'a> Scout<'a> {
    fn new(files: &'a [Arc<OpenFile>], pieces: &'a [Piece]) -> Scout<'a> {
        Scout { files, pieces, seen: 0, ahead_bytes: 0, blind: false }
    }

    fn run_ahead_of(&mut self, copied: usize) {
        // At least the block about to be copied, whatever its size.
        let wanted =
            |scout: &Self| scout.seen <= copied || (scout.seen < copied + AHEAD && scout.ahead_bytes < AHEAD_BYTES);
        while self.seen < self.pieces.len() && wanted(self) {
            let end = (self.seen + BLOCK).min(self.pieces.len());
            let block = &self.pieces[self.seen..end];
            let bytes = bytes_of(block);
            // Asking costs 0.3 us: nothing beside a large piece, so each is asked about; of small ones a sample.
            let large = bytes / block.len() >= PIECE / 4;
            let cold =
                self.blind || (!large && block.iter().step_by(block.len().div_ceil(SAMPLES)).any(|p| self.is_cold(p)));
            for piece in block {
                if (cold || (large && self.is_cold(piece)))
                    && let Some(map) = self.files[piece.file as usize].map()
                {
                    map.will_need(piece.src as usize, piece.len as usize);
                }
            }
            self.ahead_bytes += bytes;
            self.seen = end;
        }
    }

    fn is_cold(&self, piece: &Piece) -> bool {
        let Some(file) = self.files[piece.file as usize].file() else { return false };
        let last = piece.src + u64::from(piece.len) - 1;
        pread::is_cached(file, piece.src) == Cached::No
            || (piece.len > 64 << 10 && pread::is_cached(file, last) == Cached::No)
    }

    fn block_took(&mut self, took: Duration, block: &[Piece]) {
        // A hot block moves at gigabytes a second; a block of page faults that wait for a disk or a network does not
        // come near 8 us a piece and 4 ns a byte.
        let bytes = bytes_of(block);
        self.ahead_bytes = self.ahead_bytes.saturating_sub(bytes);
        self.blind = took > Duration::from_nanos((8_000 * block.len() + 4 * bytes) as u64);
    }
}

fn bytes_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|p| p.len as usize).sum()
}
