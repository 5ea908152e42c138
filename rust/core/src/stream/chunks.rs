//! Chunks: neighbouring rows of a stream, read ahead in large pieces by threads that wait for the disk.
//!
//! A stream whose rows are in the page cache does not need them: its batches are gathered from the mapping. So each
//! window, or batch in stored order, is sampled first. Data that cannot stay in memory until the next epoch are read
//! past the page cache.

use std::ops::Range;
use std::sync::Arc;

use super::plan::{Epoch, EqualUnits, Item, Plan, Shuffle, Window};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::gather::blocks::{BlockReader, READERS};
use crate::gather::{Ints, Out, Pick};
use crate::memory::limit::memory_limit;
use crate::memory::output::Output;
use crate::rows::Rows;
use crate::threads::{self, Lock, NextResult, Stop, Watch};

/// Bytes of a chunk in stored order, at most.
const CHUNK: u64 = 4 << 20;
/// Bytes of a chunk of a window, at most: larger ones are not read faster and add to the memory of the pool. The second
/// constant is the lower limit, for small windows.
const WINDOW_CHUNK: u64 = 2 << 20;
const SMALL_CHUNK: u64 = 256 << 10;
/// Chunks that are read or being read, and not used yet.
pub const AHEAD: usize = 20;
/// Bytes of batches in stored order that are checked together.
const LOOK: u64 = 16 << 20;
/// Items sampled to find out whether a window or batch is in the page cache.
const SAMPLES: u64 = 64;

/// The wanted batches: `first`, `first + every`, ...
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The first.
    pub first: u64,
    /// The distance between two wanted batches.
    pub every: u64,
}

impl Wanted {
    fn has(self, batch: u64) -> bool {
        batch >= self.first && (batch - self.first).is_multiple_of(self.every)
    }
}

/// Rows to read: each item has a row of one group or of several.
#[derive(Debug, Default)]
pub struct Picks {
    examples: Vec<i64>,
    tokens: Vec<i64>,
    groups: Vec<i64>,
}

impl Picks {
    /// Adds an item's rows.
    pub fn add(&mut self, plan: &Plan, item: Item) {
        for group in plan.groups_of(item) {
            self.examples.push(item.example as i64);
            self.tokens.push(item.token as i64);
            self.groups.push(*group as i64);
        }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.groups.len()
    }

    /// The groups and the rows.
    pub fn as_pick(&self) -> (Ints<'_>, Pick<'_>) {
        let pick = Pick::Tokens { examples: Ints::Each(&self.examples), tokens: Ints::Each(&self.tokens) };
        (Ints::Each(&self.groups), pick)
    }
}

/// A chunk.
#[derive(Debug)]
pub struct Chunk {
    /// The window, or the batch in stored order; of batches in the page cache, the last.
    pub number: u64,
    /// Items of the window or batch that it covers, wanted or not.
    pub covered: u64,
    /// The wanted items, each with its place relative to the first.
    pub items: Vec<(u32, Item)>,
    /// Their rows.
    pub rows: ChunkRows,
}

/// The rows of a chunk.
#[derive(Debug)]
pub enum ChunkRows {
    /// In the order of the items.
    Read(Output),
    /// In the page cache. The chunk covers the whole window, or all batches up to its number; the list of wanted items is empty.
    Cached(Option<CachedItems>),
}

/// The items of a window in the page cache, by place.
#[derive(Debug)]
pub enum CachedItems {
    /// Computed.
    Equal(EqualUnits),
    /// Listed.
    Listed(Vec<SlotItem>),
}

/// An item in a window.
#[derive(Clone, Copy, Debug, Default)]
pub struct SlotItem {
    example: u64,
    token: u32,
    group: u32,
}

impl SlotItem {
    /// A compact form of an item.
    pub fn of(item: Item) -> Result<SlotItem> {
        let too_large = |_| Error::new(Kind::Internal, "a token beyond 2^32");
        let token = u32::try_from(item.token).map_err(too_large)?;
        Ok(SlotItem { example: item.example, token, group: item.group as u32 })
    }

    /// The example, the token and the position among the groups read.
    #[inline]
    pub fn ids(self) -> (i64, i64, i64) {
        (self.example as i64, i64::from(self.token), i64::from(self.group))
    }
}

/// A chunk to be made.
pub struct ChunkJob {
    number: u64,
    window: Option<Arc<Window>>,
    places: Range<u64>,
    cached: bool,
}

impl ChunkJob {
    /// Whether the chunk is a list of items in the page cache.
    pub fn is_cached(&self) -> bool {
        self.cached
    }
}

/// Makes chunks.
pub struct ChunkMaker<'a> {
    rows: &'a Rows,
    plan: &'a Plan,
    epoch: &'a Epoch<'a>,
    wanted: Wanted,
    item_bytes: u64,
    /// Bytes of a chunk, at most, unless one item is larger.
    chunk_bytes: u64,
    chunk_items: u64,
    past_cache: bool,
    /// Whether rows are gathered, from a slow source or with decoding, and not read in blocks.
    gathers: bool,
    /// Threads that read chunks, at most.
    readers_at_once: usize,
    readers: Lock<Vec<BlockReader>>,
    /// Memory of used chunks.
    spare: Lock<Vec<Output>>,
}

/// Chunks in order, and the way to get the next one.
pub struct Chunks<'a, 'n> {
    maker: &'a ChunkMaker<'a>,
    next: &'n mut NextResult<'n, Chunk>,
    /// A chunk for which there was no room yet.
    pending: Option<Chunk>,
    /// The last batch in stored order that is known to be in the page cache, of those whose chunk was taken.
    cached_until: Option<u64>,
}

impl<'a> ChunkMaker<'a> {
    /// Makes chunks of an epoch's wanted batches.
    pub fn new(rows: &'a Rows, plan: &'a Plan, epoch: &'a Epoch<'a>, wanted: Wanted) -> ChunkMaker<'a> {
        let item_bytes = (rows.row().bytes * plan.rows_per_item()) as u64;
        let window = plan.settings.window.min(plan.items()) * item_bytes;
        let (gathers, far) = (rows.is_gathered_ahead(plan.rows_per_item() as u64), rows.is_far());
        let chunk_bytes = if plan.settings.shuffle == Shuffle::Window && !far { WINDOW_CHUNK } else { CHUNK };
        // Threads that decode do not wait, apart from a few whose bytes are on their way.
        let readers_at_once = if gathers && !far { READERS.min(threads::num_threads() + 2) } else { READERS };
        let chunk_items = ((window / AHEAD as u64).clamp(SMALL_CHUNK, chunk_bytes) / item_bytes).max(1);
        // Rows that take half of the memory do not stay in the page cache until the next epoch.
        let past_cache = plan.items().saturating_mul(item_bytes) > memory_limit() / 2;
        let (readers, spare) = (Lock::new(vec![]), Lock::new(vec![]));
        ChunkMaker {
            rows,
            plan,
            epoch,
            wanted,
            item_bytes,
            chunk_bytes,
            chunk_items,
            past_cache,
            gathers,
            readers_at_once,
            readers,
            spare,
        }
    }

    /// Threads that read chunks, and chunks that exist at the same time: fewer if items are large.
    pub fn threads(&self) -> (usize, usize) {
        let ahead =
            (AHEAD as u64 * self.chunk_bytes / (self.chunk_items * self.item_bytes)).clamp(2, AHEAD as u64) as usize;
        (self.readers_at_once.min(ahead), ahead)
    }

    /// The chunks of all windows from `first` on.
    pub fn of_windows(&'a self, first: u64) -> impl Iterator<Item = ChunkJob> + Send + 'a {
        (first..self.epoch.windows()).flat_map(move |number| {
            let window = Arc::new(self.epoch.window(number));
            let cached =
                self.is_cached(window.places.clone(), true, |place, each| self.epoch.sequence(place..place + 1, each));
            let n = window.order.len();
            self.cut(n, cached).map(move |places| ChunkJob {
                number,
                window: Some(Arc::clone(&window)),
                places,
                cached,
            })
        })
    }

    /// The chunks of all wanted batches in stored order. Batches are checked together, [`LOOK`] bytes at a time; if
    /// they are in the page cache, one chunk stands for all of them.
    pub fn of_batches(&'a self) -> impl Iterator<Item = ChunkJob> + Send + 'a {
        let every = self.wanted.every.max(1);
        let together = (LOOK / (self.plan.settings.batch * self.item_bytes).max(1)).max(1).saturating_mul(every);
        let all = self.wanted.first..self.plan.batches();
        all.clone().step_by(usize::try_from(together).unwrap_or(usize::MAX)).flat_map(move |first| {
            let end = first.saturating_add(together).min(all.end);
            let places = self.epoch.turn(first).start..self.epoch.turn(end - 1).end;
            let cached = self.is_cached(places, false, |at, each| each(at, self.epoch.item_at(at)));
            let batches = if cached { end - 1..end } else { first..end };
            batches.step_by(every as usize).flat_map(move |number| {
                let own = self.epoch.turn(number);
                let chunks = self.cut(own.end - own.start, cached);
                chunks.map(move |places| ChunkJob { number, window: None, places, cached })
            })
        })
    }

    fn cut(&self, n: u64, cached: bool) -> impl Iterator<Item = Range<u64>> + Send + use<> {
        let size = if cached { n.max(1) } else { self.chunk_items };
        (0..n).step_by(size as usize).map(move |from| from..(from + size).min(n))
    }

    /// Whether rows are decoded from files in the page cache: no thread has to wait, and they are best decoded to their places.
    pub fn is_decoded_at_hand(&self) -> bool {
        let item = |number, each: &mut dyn FnMut(u64, Item)| each(number, self.plan.item(number));
        self.gathers && !self.rows.is_far() && self.are_samples_cached(0..self.plan.items(), false, item)
    }

    /// Whether a window or batches need not be read ahead: their rows are in the page cache and, if `mapped`, in mapped files.
    fn is_cached(&self, places: Range<u64>, mapped: bool, item: impl Fn(u64, &mut dyn FnMut(u64, Item))) -> bool {
        !self.gathers && self.are_samples_cached(places, mapped, item)
    }

    fn are_samples_cached(
        &self,
        places: Range<u64>,
        mapped: bool,
        item: impl Fn(u64, &mut dyn FnMut(u64, Item)),
    ) -> bool {
        let mut picks = Picks::default();
        let step = (places.end - places.start).div_ceil(SAMPLES).max(1);
        for place in places.step_by(step as usize) {
            item(place, &mut |_, item| picks.add(self.plan, item));
        }
        let (groups, pick) = picks.as_pick();
        self.rows.are_cached(groups, pick, picks.len(), mapped)
    }

    /// Reads a chunk.
    pub fn make(&self, job: ChunkJob, stop: &Stop) -> Result<Chunk> {
        let ChunkJob { number, window, places, cached } = job;
        let covered = places.end - places.start;
        if cached {
            let items = window.map(|window| self.items_of(&window)).transpose()?;
            return Ok(Chunk { number, covered, items: vec![], rows: ChunkRows::Cached(items) });
        }
        let items: Vec<(u32, Item)> = match &window {
            Some(window) => wanted_of(self.epoch, self.wanted, window, places),
            None => {
                let first = self.epoch.turn(number).start;
                places.map(|at| (at as u32, self.epoch.item_at(first + at))).collect()
            }
        };
        let mut picks = Picks::default();
        for (_, item) in &items {
            picks.add(self.plan, *item);
        }
        let row = self.rows.row();
        let bytes = picks.len() * row.bytes;
        let mut memory = self.memory(bytes)?;
        let (groups, pick) = picks.as_pick();
        let cast = Cast::between(row.dtype, row.dtype)?;
        let out = &mut memory.as_mut()[..bytes];
        if self.gathers {
            self.rows.gather(groups, pick, picks.len(), cast, Out::Dense(out), &mut || stop.is_set())?;
        } else {
            let spare = self.readers.lock().pop();
            let mut reader = spare.map_or_else(|| BlockReader::new(self.past_cache), Ok)?;
            let done =
                self.rows.gather_in_blocks(groups, pick, picks.len(), cast, Out::Dense(out), (&mut reader, stop));
            self.readers.lock().push(reader);
            done?;
        }
        Ok(Chunk { number, covered, items, rows: ChunkRows::Read(memory) })
    }

    /// All items of a window, by place.
    fn items_of(&self, window: &Window) -> Result<CachedItems> {
        if let Some(units) = self.epoch.equal_units(window) {
            return Ok(CachedItems::Equal(units));
        }
        let mut all = Vec::with_capacity(window.order.len() as usize);
        let mut failed = None;
        self.epoch.sequence(window.places.clone(), |_, item| match SlotItem::of(item) {
            Ok(item) => all.push(item),
            Err(error) => failed = Some(error),
        });
        failed.map_or(Ok(CachedItems::Listed(all)), Err)
    }

    fn memory(&self, bytes: usize) -> Result<Output> {
        let mut spare = self.spare.lock();
        while let Some(memory) = spare.pop() {
            if memory.bytes().len() >= bytes {
                return Ok(memory);
            }
        }
        drop(spare);
        let usual = self.chunk_items as usize * self.rows.row().bytes * self.plan.rows_per_item();
        Output::new(bytes.max(usual))
            .map_err(|e| Error::new(Kind::NoMemory, format!("cannot allocate {bytes} bytes: {e}")))
    }
}

/// The wanted items of a window, with their places in it.
pub fn wanted_of(epoch: &Epoch<'_>, wanted: Wanted, window: &Window, places: Range<u64>) -> Vec<(u32, Item)> {
    let every = wanted.every == 1 && window.first >= epoch.own(wanted.first).start;
    let first = window.places.start;
    let mut found: Vec<(u32, Item)> = Vec::with_capacity((places.end - places.start) as usize);
    epoch.sequence(first + places.start..first + places.end, |place, item| {
        let local = place - first;
        let batch = || epoch.batch_of(window.first + window.order.position(local));
        if every || batch().is_some_and(|batch| wanted.has(batch)) {
            found.push((local as u32, item));
        }
    });
    found
}

impl<'a, 'n> Chunks<'a, 'n> {
    /// Chunks from a pipeline.
    pub fn new(maker: &'a ChunkMaker<'a>, next: &'n mut NextResult<'n, Chunk>) -> Chunks<'a, 'n> {
        Chunks { maker, next, pending: None, cached_until: None }
    }

    /// The next chunk of a window or batch, if it is the next at all and `fits`.
    pub fn next(&mut self, number: u64, fits: impl Fn(&Chunk) -> bool, watch: Watch<'_>) -> Result<Option<Chunk>> {
        loop {
            let Some(chunk) = self.pending.take().map_or_else(|| (self.next)(&mut *watch), |c| Ok(Some(c)))? else {
                return Ok(None);
            };
            if chunk.number < number {
                // No batch of its window is wanted.
                self.done(chunk);
            } else if chunk.number > number || !fits(&chunk) {
                self.pending = Some(chunk);
                return Ok(None);
            } else {
                return Ok(Some(chunk));
            }
        }
    }

    /// The next chunk of a batch in stored order; `None` if the batch is in the page cache.
    pub fn next_until(&mut self, batch: u64, watch: Watch<'_>) -> Result<Option<Chunk>> {
        while self.cached_until.is_none_or(|last| last < batch) {
            let chunk = (self.next)(&mut *watch)?;
            let chunk = chunk.ok_or_else(|| Error::new(Kind::Internal, "a batch without its chunks"))?;
            match chunk.rows {
                ChunkRows::Cached(_) => self.cached_until = Some(chunk.number),
                ChunkRows::Read(_) => return Ok(Some(chunk)),
            }
        }
        Ok(None)
    }

    /// Returns a chunk's memory.
    pub fn done(&self, chunk: Chunk) {
        if let ChunkRows::Read(memory) = chunk.rows {
            self.maker.spare.lock().push(memory);
        }
    }
}
