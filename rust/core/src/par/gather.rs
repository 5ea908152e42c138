//! Gathering: many rows, from anywhere in a dataset, into one block of memory.
//!
//! The rows asked for are cut into parts, each a contiguous range of the *output*, so that every part owns its memory
//! and nothing needs to be proven about aliasing. A part
//!
//! 1. asks the layout for its rows' addresses and sorts them by file and row, megabyte by megabyte of output: disks and
//!    page tables like order, caches like writes that stay together;
//! 2. joins neighbours that stay neighbours into one copy;
//! 3. checks, file by file, that the rows exist and that the file still has the length it had when it was opened;
//! 4. moves them. From a mapping, a scout runs ahead of the copy, samples whether pages are cached, and hints the cold
//!    ones to the kernel, so that a cold gather keeps the disk's queue full from one thread while a hot one pays next
//!    to nothing. Without a mapping, what is cached is read at once, the rest is hinted and read when it has arrived.
//!
//! Memory: 40 bytes per row of the parts in flight, at most [`PART_ROWS`] rows per thread.

use std::collections::hash_map::Entry as MapEntry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::bytes::mmap::Map;
use crate::bytes::pread::{self, Cached};
use crate::bytes::{FileTable, Io, OpenFile, files_at_once};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::layout::{Address, Layout};
use crate::par::pool::{self, Stop, Watch};

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
    #[inline]
    fn get(&self, i: usize) -> i64 {
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
    fn example(&self, item: usize) -> i64 {
        match self {
            Pick::Tokens { examples, .. } | Pick::Last { examples } | Pick::Whole { examples } => examples.get(item),
        }
    }
}

/// Where rows come from.
#[derive(Debug)]
pub struct Source<'a, L: ?Sized> {
    /// The files.
    pub files: &'a FileTable,
    /// Where in them rows lie.
    pub layout: &'a L,
    /// The group they are taken from.
    pub group: usize,
}

/// Everything a part needs to know.
struct Job<'a, L: ?Sized> {
    files: &'a FileTable,
    layout: &'a L,
    group: usize,
    pick: Pick<'a>,
    cast: Cast,
}

/// Items of a part, from first to one past the last, and the output they fill; taken by whoever does the part.
type Part<'a> = Mutex<Option<(usize, usize, &'a mut [u8])>>;

/// Rows to copy: `rows` of them from `key` (file and row, in sorting order) to row `dst` of the part.
#[derive(Clone, Copy)]
struct Entry {
    key: u64,
    dst: u32,
    rows: u32,
}

impl Entry {
    #[inline]
    fn new(at: Address, dst: usize, rows: u64) -> Result<Entry> {
        let too_large = |_| Error::new(Kind::Unsupported, "more than 2^32 rows in one example");
        Ok(Entry {
            // `FileTable` holds fewer than 2^24 files, layouts give rows below 2^40.
            key: u64::from(at.file) << 40 | at.row,
            dst: u32::try_from(dst).map_err(too_large)?,
            rows: u32::try_from(rows).map_err(too_large)?,
        })
    }

    fn file(&self) -> usize {
        (self.key >> 40) as usize
    }

    fn row(&self) -> u64 {
        self.key & ((1 << 40) - 1)
    }
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

/// Fills `out` with the `items` rows (or, for [`Pick::Whole`], examples) picked. `out` holds exactly those rows, in the
/// type that `cast` makes.
///
/// Errors: an index out of range, a file that is missing, too short or changed, a row outside its file. `out` is then
/// partly written.
pub fn gather<L: Layout + ?Sized>(
    source: &Source<'_, L>,
    pick: Pick<'_>,
    items: usize,
    cast: Cast,
    out: &mut [u8],
    watch: Watch<'_>,
) -> Result<()> {
    match pick {
        Pick::Tokens { examples, tokens } => {
            examples.check_len(items, "examples")?;
            tokens.check_len(items, "tokens")?;
        }
        Pick::Last { examples } | Pick::Whole { examples } => examples.check_len(items, "examples")?,
    }
    let &Source { files, layout, group } = source;
    let job = Job { files, layout, group, pick, cast };
    if items == 1 && !matches!(pick, Pick::Whole { .. }) {
        return job.one_row(out);
    }
    let row_bytes = files.width() * cast.to_size;
    let part_rows = part_rows(out.len(), row_bytes);

    // Parts in output order: how many items each takes, and its own piece of the output.
    let mut parts: Vec<Part<'_>> = Vec::new();
    let mut rest = out;
    let mut item = 0;
    while item < items {
        let first = item;
        let mut rows = 0usize;
        if let Pick::Whole { .. } = pick {
            while item < items && rows < part_rows {
                let example = crate::layout::check_example(pick.example(item), layout.examples())?;
                let tokens = usize::try_from(layout.tokens(example)).unwrap_or(usize::MAX);
                rows = rows.saturating_add(tokens);
                item += 1;
            }
        } else {
            rows = part_rows.min(items - item);
            item += rows;
        }
        let bytes = rows.checked_mul(row_bytes).filter(|b| *b <= rest.len());
        let Some(bytes) = bytes else {
            return Err(Error::new(Kind::Argument, "the output is smaller than the rows asked for"));
        };
        let (mine, others) = rest.split_at_mut(bytes);
        parts.push(Mutex::new(Some((first, item, mine))));
        rest = others;
    }
    if !rest.is_empty() {
        return Err(Error::new(Kind::Argument, "the output is larger than the rows asked for"));
    }

    let work = |part: usize, stop: &Stop| -> Result<()> {
        let taken = parts[part].lock().unwrap_or_else(PoisonError::into_inner).take();
        match taken {
            Some((first, end, out)) => job.run_part(first, end, out, stop),
            None => Err(Error::new(Kind::Internal, "a part was handed out twice")),
        }
    };
    pool::run(parts.len(), &work, watch)
}

/// Small requests are one part; large ones are cut for balance, bounded memory and a prompt Ctrl-C.
fn part_rows(out_bytes: usize, row_bytes: usize) -> usize {
    if out_bytes <= INLINE_BYTES {
        return usize::MAX;
    }
    let row_bytes = row_bytes.max(1);
    let balanced = (out_bytes / row_bytes).div_ceil(pool::num_threads() * 4);
    balanced.min(PART_ROWS).min(PART_BYTES / row_bytes).max(INLINE_BYTES / 2 / row_bytes).max(1)
}

impl<L: Layout + ?Sized> Job<'_, L> {
    /// A single row, without the machinery: users do call this a million times in a loop.
    fn one_row(&self, out: &mut [u8]) -> Result<()> {
        let at = match self.pick {
            Pick::Tokens { examples, tokens } => self.layout.locate(self.group, examples.get(0), tokens.get(0))?,
            Pick::Last { examples } | Pick::Whole { examples } => self.layout.last(self.group, examples.get(0))?,
        };
        let row = self.files.row_bytes();
        if out.len() != row / self.cast.from_size * self.cast.to_size {
            return Err(Error::new(Kind::Argument, "the output is not one row"));
        }
        let open = self.files.get(at.file as usize)?;
        if at.row >= open.rows() {
            return Err(self.outside(&Entry::new(at, 0, 1)?, &open, 0));
        }
        open.check_length()?;
        let src = open.offset(at.row);
        match open.map() {
            Some(map) => {
                // One page faults as fast as it can be hinted; more are worth asking for together.
                if row > 4096 && pread::is_cached(open.file(), src + row as u64 - 1) == Cached::No {
                    map.will_need(src as usize, row);
                }
                self.cast.apply(&map.bytes()[src as usize..src as usize + row], out);
                Ok(())
            }
            None => {
                let piece = Piece { src, dst: 0, len: row as u32, file: 0 };
                if row > PIECE {
                    self.run_part(0, 1, out, &Stop::default())
                } else {
                    self.copy_read(&[open], &[piece], out, &Stop::default())
                }
            }
        }
    }

    fn run_part(&self, first: usize, end: usize, out: &mut [u8], stop: &Stop) -> Result<()> {
        let mut entries = self.locate(first, end)?;
        if !entries.is_sorted_by_key(|e| e.key) {
            let mut rest = &mut entries[..];
            let block_rows = (SORT_BYTES / (self.files.width() * self.cast.to_size)).max(1);
            while !rest.is_empty() {
                // Entries are in output order still, whole examples may bring several rows each.
                let limit = rest[0].dst as usize + block_rows;
                let (block, others) = rest.split_at_mut(rest.partition_point(|e| (e.dst as usize) < limit).max(1));
                block.sort_unstable_by_key(|e| e.key);
                rest = others;
            }
        }
        join_neighbours(&mut entries);
        let mut rest = &entries[..];
        while !rest.is_empty() {
            let (files, pieces, done) = self.cut(rest, first)?;
            rest = &rest[done..];
            if stop.is_set() {
                return Ok(());
            }
            match self.files.io() {
                Io::Mmap => self.copy_mapped(&files, &pieces, out, stop)?,
                Io::Pread => self.copy_read(&files, &pieces, out, stop)?,
            }
        }
        Ok(())
    }

    fn locate(&self, first: usize, end: usize) -> Result<Vec<Entry>> {
        let mut entries = Vec::with_capacity(end - first);
        match self.pick {
            Pick::Tokens { examples, tokens } => {
                for i in first..end {
                    let at = self.layout.locate(self.group, examples.get(i), tokens.get(i))?;
                    entries.push(Entry::new(at, i - first, 1)?);
                }
            }
            Pick::Last { examples } => {
                for i in first..end {
                    let at = self.layout.last(self.group, examples.get(i))?;
                    entries.push(Entry::new(at, i - first, 1)?);
                }
            }
            Pick::Whole { examples } => {
                let mut dst = 0usize;
                let mut failed = None;
                for i in first..end {
                    self.layout.runs(self.group, examples.get(i), &mut |run| {
                        match Entry::new(run.at, dst, run.rows) {
                            Ok(entry) => entries.push(entry),
                            Err(error) => failed = Some(error),
                        }
                        dst += run.rows as usize;
                    })?;
                }
                if let Some(error) = failed {
                    return Err(error);
                }
            }
        }
        Ok(entries)
    }

    /// Opens and checks the files that entries name, and cuts entries into pieces of bounded size. Stops where more files
    /// would be open than this thread may hold; tells how many entries were cut.
    fn cut(&self, entries: &[Entry], first: usize) -> Result<(Vec<Arc<OpenFile>>, Vec<Piece>, usize)> {
        let files_at_once = files_at_once(pool::num_threads());
        let mut done = 0;
        let mut files: Vec<Arc<OpenFile>> = Vec::new();
        let mut opened: HashMap<usize, usize> = HashMap::new();
        let mut pieces = Vec::with_capacity(entries.len());
        let (from, to) = (self.cast.from_size, self.cast.to_size);
        let row = self.files.row_bytes();
        for run in entries.chunk_by(|a, b| a.file() == b.file()) {
            let file = match opened.entry(run[0].file()) {
                MapEntry::Occupied(known) => *known.get(),
                MapEntry::Vacant(_) if files.len() >= files_at_once => break,
                MapEntry::Vacant(new) => {
                    let open = self.files.get(run[0].file())?;
                    open.check_length()?;
                    files.push(open);
                    *new.insert(files.len() - 1)
                }
            };
            done += run.len();
            let open = &files[file];
            for entry in run {
                if entry.row() + u64::from(entry.rows) > open.rows() {
                    return Err(self.outside(entry, open, first));
                }
                let (mut src, mut dst) = (open.offset(entry.row()), entry.dst as usize * (row / from * to));
                let mut left = entry.rows as usize * row;
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
        Ok((files, pieces, done))
    }

    /// The rows that an index names must be rows that the file holds.
    fn outside(&self, entry: &Entry, open: &OpenFile, first: usize) -> Error {
        let whose = match self.pick {
            Pick::Whole { .. } => String::new(),
            _ => format!(" for example {}", self.pick.example(first + entry.dst as usize)),
        };
        let (row, rows) = (entry.row() + u64::from(entry.rows) - 1, open.rows());
        Error::new(Kind::Format, format!("the index names row {row}{whose}, but the file holds {rows} rows"))
            .at(open.path())
    }

    /// Where a piece goes.
    #[inline]
    fn target<'o>(&self, piece: &Piece, out: &'o mut [u8]) -> &'o mut [u8] {
        &mut out[piece.dst..piece.dst + piece.len as usize / self.cast.from_size * self.cast.to_size]
    }

    fn copy_mapped(&self, files: &[Arc<OpenFile>], pieces: &[Piece], out: &mut [u8], stop: &Stop) -> Result<()> {
        let maps: Vec<&Map> = files
            .iter()
            .map(|f| f.map().ok_or_else(|| Error::new(Kind::Internal, "a file that is not mapped").at(f.path())))
            .collect::<Result<_>>()?;
        let mut scout = Scout::new(files, &maps, pieces);
        for (at, block) in pieces.chunks(BLOCK).enumerate() {
            if stop.is_set() {
                return Ok(());
            }
            scout.run_ahead_of(at * BLOCK);
            let before = Instant::now();
            for (i, piece) in block.iter().enumerate() {
                // Two rows ahead: one is too late for a page walk, more evicts what is about to be used.
                if let Some(soon) = pieces.get(at * BLOCK + i + 2) {
                    maps[soon.file as usize].prefetch(soon.src as usize);
                }
                let src =
                    &maps[piece.file as usize].bytes()[piece.src as usize..piece.src as usize + piece.len as usize];
                self.cast.apply(src, self.target(piece, out));
            }
            scout.block_took(before.elapsed(), block);
        }
        Ok(())
    }

    fn copy_read(&self, files: &[Arc<OpenFile>], pieces: &[Piece], out: &mut [u8], stop: &Stop) -> Result<()> {
        let mut scratch = vec![0u8; if self.cast.convert.is_some() { PIECE } else { 0 }];
        let mut into = |piece: &Piece, out: &mut [u8], wait: bool| -> Result<Cached> {
            let open = &files[piece.file as usize];
            let dst = self.target(piece, out);
            let buf = if self.cast.convert.is_some() { &mut scratch[..piece.len as usize] } else { &mut *dst };
            let read = if wait {
                pread::read_exact_at(open.file(), buf, piece.src).map(|()| Cached::Yes)
            } else {
                pread::read_if_cached(open.file(), buf, piece.src)
            };
            let cached = read.map_err(|e| {
                let mut error = Error::from_io(&e, open.path(), "read").byte(piece.src);
                if error.kind == Kind::Truncated {
                    error.detail = format!("expected {} more bytes, the file ends", piece.len);
                }
                error
            })?;
            if let (Cached::Yes, Some(convert)) = (cached, self.cast.convert) {
                convert(&scratch[..piece.len as usize], dst);
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
            pread::will_need(files[piece.file as usize].file(), piece.src, u64::from(piece.len));
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

/// Joins rows that follow each other both in the file and in the output.
fn join_neighbours(entries: &mut Vec<Entry>) {
    entries.dedup_by(|next, kept| {
        let rows = kept.rows.checked_add(next.rows);
        let follows = kept.key + u64::from(kept.rows) == next.key && kept.dst.checked_add(kept.rows) == Some(next.dst);
        match rows {
            Some(rows) if follows => {
                kept.rows = rows;
                true
            }
            _ => false,
        }
    });
}

/// Runs ahead of a copy from a mapping and sees to it that cold pages are on their way.
struct Scout<'a> {
    files: &'a [Arc<OpenFile>],
    maps: &'a [&'a Map],
    pieces: &'a [Piece],
    /// Pieces looked at so far, and their bytes that are not copied yet.
    seen: usize,
    ahead_bytes: usize,
    /// Copying was slow although nothing looked cold: the file system cannot tell, so hint everything.
    blind: bool,
}

impl<'a> Scout<'a> {
    fn new(files: &'a [Arc<OpenFile>], maps: &'a [&'a Map], pieces: &'a [Piece]) -> Scout<'a> {
        Scout { files, maps, pieces, seen: 0, ahead_bytes: 0, blind: false }
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
                if cold || (large && self.is_cold(piece)) {
                    self.maps[piece.file as usize].will_need(piece.src as usize, piece.len as usize);
                }
            }
            self.ahead_bytes += bytes;
            self.seen = end;
        }
    }

    fn is_cold(&self, piece: &Piece) -> bool {
        let file = self.files[piece.file as usize].file();
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
