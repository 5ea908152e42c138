//! Shards looked into, checked, inflated and kept.

use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock, TryLockError};

use super::index::{ShardIndex, TYPES, class_of};
use super::spec::ShardSpec;
use super::stored::{ShardBytes, Stored, hex, read_whole, sha256};

use crate::codec::cache::{Cache, Cached, Lookup, Turn};
use crate::codec::flight::Waited;
use crate::codec::inflate;
use crate::error::{Error, Finding, Kind, Result};
use crate::files::open::OpenFile;
use crate::layout::row::Row;
use crate::memory::buffer::Buffer;
use crate::parse::pickle::{Tree, machine};
use crate::source::Version;
use crate::source::descriptors::open_regular;
use crate::source::local::version_of;
use crate::source::mmap::Map;
use crate::source::slots::Slots;
use crate::source::{Io, pread};
use crate::threads::{self, Stop, Watch};

/// A shard whose bytes are at hand.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub index: Arc<ShardIndex>,
    /// Inflated, if arrays lie in there.
    pub main: Option<Arc<Buffer>>,
    pub aside: Option<Arc<Buffer>>,
}

impl Loaded {
    fn has_blocks(&self) -> bool {
        self.main.is_some() || self.aside.is_some()
    }
}

impl Cached for Loaded {
    fn size(&self) -> usize {
        self.main.iter().chain(&self.aside).map(|block| block.footprint()).sum()
    }
}

/// The turn to read a shard, if other threads wait for it.
type MayWait<'a> = Option<Turn<'a, Loaded, usize>>;

/// A shard that was read just now.
struct Fresh {
    loaded: Arc<Loaded>,
    tree: Tree,
    bytes: ShardBytes,
    version: Version,
}

/// What is known of a shard from its first look on.
#[derive(Debug)]
struct KnownShard {
    index: Arc<ShardIndex>,
    /// The file that was read last.
    version: Version,
}

/// The shards of a dataset.
pub struct Shards {
    specs: Vec<ShardSpec>,
    /// Names of the groups, and the groups by name.
    layers: Vec<i64>,
    groups: HashMap<i64, usize>,
    /// Number of each shard's first example, and of all examples.
    firsts: Vec<u64>,
    /// A row of each type that there may be; all are as many elements wide.
    rows: [Row; TYPES.len()],
    /// The type of the first array, as a position among [`TYPES`]; `None` until it was found.
    class: Option<usize>,
    pub(super) io: Io,
    pub(super) slots: Slots<OpenFile>,
    known: Vec<RwLock<Option<KnownShard>>>,
    /// By shard; those without blocks are not kept.
    decoded: Cache<Loaded, usize>,
    /// Shards inflated so far, for tests: rows in a random order must not inflate per row.
    inflated: AtomicU64,
}

/// Shards of a dataset at most: files of all types together are fewer than 2^24.
const MOST_SHARDS: usize = 1 << 21;

impl Shards {
    /// Opens nothing but the first shard that holds an array: only there is written what a row is.
    pub fn open(
        specs: Vec<ShardSpec>,
        layers: Vec<i64>,
        decoded_memory: u64,
        io: Io,
        watch: Watch<'_>,
    ) -> Result<Shards> {
        if specs.len() > MOST_SHARDS {
            return Err(Error::new(
                Kind::Format,
                format!("{} shards; at most {MOST_SHARDS} are supported", specs.len()),
            ));
        }
        let mut firsts = Vec::with_capacity(specs.len() + 1);
        let mut examples = 0u64;
        for spec in &specs {
            firsts.push(examples);
            examples = examples.saturating_add(spec.samples);
        }
        firsts.push(examples);
        if examples >= 1 << 40 {
            return Err(Error::new(Kind::Format, format!("{examples} samples are more than any dataset has")));
        }
        let mut shards = Shards {
            slots: Slots::new(specs.len() as u64 * 2),
            known: specs.iter().map(|_| RwLock::new(None)).collect(),
            specs,
            groups: layers.iter().enumerate().map(|(group, layer)| (*layer, group)).collect(),
            layers,
            firsts,
            rows: TYPES.map(|dtype| Row { width: 0, dtype, bytes: 0 }),
            class: None,
            io,
            decoded: Cache::new(decoded_memory),
            inflated: AtomicU64::new(0),
        };
        for s in 0..shards.specs.len() {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let index = Arc::clone(&shards.load(s, &mut *watch)?.index);
            if let Some((width, dtype)) = index.row() {
                for row in &mut shards.rows {
                    *row = Row::new(width, row.dtype).map_err(|e| e.at(&shards.specs[s].path))?;
                }
                shards.class = class_of(dtype);
                return Ok(shards);
            }
        }
        Err(Error::new(Kind::Format, "expected a shard with an array in it, found none"))
    }

    /// The shards, as described.
    pub fn specs(&self) -> &[ShardSpec] {
        &self.specs
    }

    /// Names of the groups.
    pub fn layers(&self) -> &[i64] {
        &self.layers
    }

    /// Closes kept files and drops decoded shards.
    pub fn release(&self) {
        self.slots.clear();
        self.decoded.make_room(self.decoded.budget());
    }

    /// Shards inflated so far.
    pub fn inflated(&self) -> u64 {
        self.inflated.load(Ordering::Relaxed)
    }

    /// Bytes that may be kept of what was decoded.
    pub fn decoded_budget(&self) -> u64 {
        self.decoded.budget()
    }

    /// What a row is: the width of all, the type of the first array.
    pub fn row(&self) -> Row {
        self.rows[self.class()]
    }

    pub(super) fn row_of(&self, class: usize) -> Row {
        self.rows[class.min(TYPES.len() - 1)]
    }

    pub(super) fn class(&self) -> usize {
        self.class.unwrap_or(0)
    }

    /// Number of examples.
    pub fn examples(&self) -> u64 {
        *self.firsts.last().unwrap_or(&0)
    }

    /// Number of groups.
    pub fn groups(&self) -> usize {
        self.layers.len()
    }

    /// Bounds of the examples of each shard; a shard without samples has two equal ones.
    pub fn bounds(&self) -> &[u64] {
        &self.firsts
    }

    /// An example of a shard that has one.
    pub fn first_of(&self, s: usize) -> Result<i64> {
        match (self.specs.get(s), self.firsts.get(s)) {
            (Some(spec), Some(first)) if spec.samples > 0 => Ok(*first as i64),
            _ => Err(Error::new(Kind::Internal, format!("shard {s} of {} has no samples", self.specs.len()))),
        }
    }

    pub(super) fn first(&self, s: usize) -> u64 {
        self.firsts.get(s).copied().unwrap_or(0)
    }

    /// Files in the numbering of [`Prepared`] that hold rows of one type.
    pub(super) fn files_per_class(&self) -> u64 {
        self.specs.len().max(1) as u64 * 2
    }

    pub(super) fn shard_of(&self, example: u64) -> usize {
        // Shards without samples share their first number with the next: the last of those holds the example.
        self.firsts.partition_point(|first| *first <= example).saturating_sub(1)
    }

    /// The index of a shard, if it has been looked into. Tried and never waited for: a forked child may find a lock taken by a
    /// thread that it does not have, and looks into the shard again.
    pub(super) fn known(&self, s: usize) -> Option<(Arc<ShardIndex>, Version)> {
        // Writing takes nanoseconds.
        for _ in 0..1000 {
            match self.known[s].try_read() {
                Ok(slot) => return slot.as_ref().map(|known| (Arc::clone(&known.index), known.version.clone())),
                Err(TryLockError::Poisoned(_)) => return None,
                Err(TryLockError::WouldBlock) => std::hint::spin_loop(),
            }
        }
        None
    }

    /// Keeps what was found in a shard. A shard that was looked into before has to be as it was.
    fn remember(&self, s: usize, index: &mut Arc<ShardIndex>, version: Version) -> Result<()> {
        for _ in 0..1000 {
            let mut slot = match self.known[s].try_write() {
                Ok(slot) => slot,
                Err(TryLockError::Poisoned(_)) => return Ok(()),
                Err(TryLockError::WouldBlock) => {
                    std::thread::yield_now();
                    continue;
                }
            };
            if let Some(known) = &*slot {
                if known.index != *index {
                    return Err(Error::new(
                        Kind::Format,
                        "was replaced or changed after it was indexed, and holds other samples or arrays now; reopen the dataset",
                    ));
                }
                *index = Arc::clone(&known.index);
            }
            *slot = Some(KnownShard { index: Arc::clone(index), version });
            return Ok(());
        }
        Ok(())
    }

    /// Whether an open file is the one that was indexed, or holds the same.
    pub(super) fn check_same(&self, s: usize, file: &File) -> Result<()> {
        let path = &self.specs[s].path;
        let version = version_of(file).map_err(|e| Error::from_io(&e, path, "look at"))?;
        if self.known(s).is_none_or(|(_, known)| known == version) {
            return Ok(());
        }
        let fresh = self.fresh(s, &mut || false)?;
        if fresh.version != version {
            return Err(Error::new(Kind::Format, "changes while it is read; reopen the dataset").at(path));
        }
        Ok(())
    }

    /// How many of these shards may be decoded at once.
    pub(super) fn at_once(&self, which: &[usize]) -> usize {
        let largest = which.iter().map(|s| self.decoded_guess(*s)).max().unwrap_or(0);
        let fit = self.decoded.budget().checked_div(largest).map_or(usize::MAX, |n| n as usize);
        // More than the threads, so that none waits for the slowest of each go.
        fit.clamp(1, threads::num_threads() * 4)
    }

    /// What a shard will take in memory: known, or what the file claims, as far as so few bytes can inflate to it.
    fn decoded_guess(&self, s: usize) -> u64 {
        match self.known(s) {
            Some((index, _)) => index.decoded + index.aside,
            None if self.specs[s].compressed => {
                let claimed = || {
                    let (file, len) = open_regular(&self.specs[s].path).ok()?;
                    let mut last = [0; 4];
                    pread::read_exact_at(&file, &mut last, len.checked_sub(4)?).ok()?;
                    Some(inflate::claimed(last, len).min(self.limit(s, len)))
                };
                claimed().unwrap_or(0)
            }
            None => 0,
        }
    }

    /// Bytes that a shard may inflate to.
    fn limit(&self, s: usize, stored: u64) -> u64 {
        inflate::allowed(stored, self.specs[s].limit, self.decoded.budget())
    }

    /// Indexes and decoded bytes of these shards: kept ones, ones that other threads are reading, or read now.
    pub(super) fn load_all(&self, which: &[usize], watch: Watch<'_>) -> Result<Vec<Arc<Loaded>>> {
        // A kept shard that is looked up becomes the one used last: loading the others does not evict it.
        let mut found: Vec<Option<Arc<Loaded>>> = which.iter().map(|s| self.kept(*s)).collect();
        let mut lacking: Vec<usize> = (0..which.len()).filter(|i| found[*i].is_none()).collect();
        self.decoded.make_room(lacking.iter().map(|i| self.decoded_guess(which[*i])).sum());
        while !lacking.is_empty() {
            let (mut mine, mut theirs) = (vec![], vec![]);
            for i in lacking.drain(..) {
                match self.decoded.look_up(which[i], |_| true) {
                    Lookup::Kept(kept) => found[i] = Some(kept),
                    // Another thread may have read it since this one looked.
                    Lookup::Mine(turn) => match self.kept(which[i]) {
                        Some(kept) => {
                            turn.hand_over(&kept);
                            found[i] = Some(kept);
                        }
                        None => mine.push((i, Some(turn))),
                    },
                    // Inside a part of other work no thread waits: the one that it waited for may need this thread.
                    Lookup::Theirs(_) if threads::in_part() => mine.push((i, None)),
                    Lookup::Theirs(flight) => theirs.push((i, flight)),
                }
            }
            // No thread waits while it has a turn.
            for (i, loaded) in self.load_mine(which, mine, &mut *watch)? {
                found[i] = Some(loaded);
            }
            for (i, flight) in theirs {
                match flight.wait(None, &mut *watch) {
                    Waited::Made(loaded) => found[i] = Some(loaded),
                    Waited::Failed | Waited::TooLong => lacking.push(i),
                    Waited::Interrupted => return Err(Error::new(Kind::Interrupted, "interrupted")),
                }
            }
        }
        let all: Option<Vec<Arc<Loaded>>> = found.into_iter().collect();
        all.ok_or_else(|| Error::new(Kind::Internal, "a shard that was not loaded"))
    }

    fn load_mine(
        &self,
        which: &[usize],
        mine: Vec<(usize, MayWait<'_>)>,
        watch: Watch<'_>,
    ) -> Result<Vec<(usize, Arc<Loaded>)>> {
        let work = |i: usize, turn: MayWait<'_>, watch: Watch<'_>| -> Result<(usize, Arc<Loaded>)> {
            let loaded = self.load(which[i], watch)?;
            if let Some(turn) = turn {
                turn.hand_over(&loaded);
            }
            Ok((i, loaded))
        };
        // In parallel; one that would be left over for a single thread is read after the others, by all of them.
        let mut together = mine;
        let alone = if together.len() % threads::num_threads() == 1 { together.pop() } else { None };
        let part = |_: usize, (i, turn), stop: &Stop| match work(i, turn, &mut || stop.is_set()) {
            // Another part's error stopped this one, and is the one to be reported.
            Err(error) if error.kind == Kind::Interrupted && stop.is_set() => Ok(None),
            done => done.map(Some),
        };
        let mut loaded: Vec<_> = threads::map_each(together, &part, &mut *watch)?.into_iter().flatten().collect();
        if let Some((i, turn)) = alone {
            loaded.push(work(i, turn, watch)?);
        }
        Ok(loaded)
    }

    /// A shard's index and decoded bytes, where both are kept.
    fn kept(&self, s: usize) -> Option<Arc<Loaded>> {
        let (index, _) = self.known(s)?;
        if index.decoded + index.aside > 0 {
            return self.decoded.get(s);
        }
        Some(Arc::new(Loaded { index, main: None, aside: None }))
    }

    /// A shard's index and decoded bytes: kept ones, or read now.
    fn load(&self, s: usize, watch: Watch<'_>) -> Result<Arc<Loaded>> {
        match self.kept(s) {
            Some(loaded) => Ok(loaded),
            None => Ok(self.fresh(s, watch)?.loaded),
        }
    }

    /// Reads a shard, whether it is kept or not, and keeps what was read.
    fn fresh(&self, s: usize, watch: Watch<'_>) -> Result<Fresh> {
        let spec = &self.specs[s];
        let in_shard = |e: Error| if e.location.is_none() { e.at(&spec.path) } else { e };
        let mut fresh = self.read(s, watch).map_err(in_shard)?;
        if self.class.is_some()
            && let Some((width, _)) = fresh.loaded.index.row()
            && width != self.row().width as u64
        {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "its arrays are {width} wide, those of the first shard {}; one dataset, one row",
                    self.row().width
                ),
            )
            .at(&spec.path));
        }
        let index = &mut Arc::make_mut(&mut fresh.loaded).index;
        self.remember(s, index, fresh.version.clone()).map_err(in_shard)?;
        if fresh.loaded.has_blocks() {
            self.decoded.put(s, &fresh.loaded);
        }
        Ok(fresh)
    }

    /// The shard's file as bytes.
    fn stored(&self, s: usize, watch: Watch<'_>) -> Result<(Stored, Version)> {
        let spec = &self.specs[s];
        let (file, len) = open_regular(&spec.path)?;
        let version = version_of(&file).map_err(|e| Error::from_io(&e, &spec.path, "look at"))?;
        if let Some(size) = spec.size
            && size != len
        {
            let detail = format!("expected {size} bytes ('size_bytes' in metadata.json), found {len}");
            let error = match len < size {
                true => Error::new(Kind::Truncated, detail),
                false => Error::new(Kind::Format, detail).finds(Finding::SizeBytes),
            };
            return Err(error.byte(len.min(size)));
        }
        if len == 0 {
            return Err(Error::new(Kind::Truncated, "expected a pickle, found an empty file")
                .finds(Finding::EmptyFile)
                .byte(0));
        }
        let bytes = usize::try_from(len).map_err(|_| Error::new(Kind::Access, "does not fit this machine's memory"))?;
        if self.io == Io::Mmap {
            let map = Map::open(&file, bytes).map_err(|e| Error::from_io(&e, &spec.path, "map"))?;
            if spec.compressed || spec.sha256.is_some() {
                // All of it will be read, from front to back.
                map.will_need(0, bytes);
            }
            return Ok((Stored::Map(map), version));
        }
        Ok((Stored::Buffer(read_whole(&file, bytes, watch).map_err(|e| e.at(&spec.path))?), version))
    }

    fn read(&self, s: usize, watch: Watch<'_>) -> Result<Fresh> {
        let spec = &self.specs[s];
        let (stored, version) = self.stored(s, &mut *watch)?;
        let verify = |watch: Watch<'_>| -> Result<()> {
            let Some(expected) = spec.sha256 else { return Ok(()) };
            let found = sha256(stored.bytes(), watch)?;
            if found == expected {
                return Ok(());
            }
            Err(Error::new(
                Kind::Format,
                format!(
                    "the checksum in metadata.json is sha256:{}, the file's is sha256:{}: damaged or exchanged; checksums=False reads it as it is",
                    hex(&expected),
                    hex(&found)
                ),
            )
            .finds(Finding::Checksum))
        };
        if spec.compressed != inflate::is_gzip(stored.bytes()) {
            verify(watch)?;
            let (said, found) =
                if spec.compressed { ("true", "one without gzip's first bytes") } else { ("false", "a gzip file") };
            return Err(Error::new(
                Kind::Format,
                format!(
                    "metadata.json says \"compressed\": {said}, the file is {found}; one of them has to be put right"
                ),
            )
            .finds(Finding::Gzip)
            .byte(0));
        }
        if !spec.compressed {
            // Rows of a plain shard are read where they lie, so that its checksum is compared once per file, not per read.
            if self.known(s).is_none_or(|(_, known)| known != version) {
                verify(watch)?;
            }
            let tree = machine::parse(stored.bytes())?;
            let (index, aside) = ShardIndex::build(spec, &self.groups, &tree, stored.bytes(), false)?;
            let loaded = Arc::new(Loaded { index: Arc::new(index), main: None, aside });
            return Ok(Fresh { loaded, tree, bytes: ShardBytes::Stored(stored), version });
        }
        // Before all of it is inflated: a stretch that is enough to see that this is no pickle, or one of a value that is too large.
        let limit = self.limit(s, stored.bytes().len() as u64);
        const FRONT: usize = 64 << 10;
        let front = inflate::front(stored.bytes(), FRONT);
        let refused = match machine::least(&front) {
            // All of a file that ends before is inflated at no cost, to see that it is too short.
            Ok(least) if least > limit && front.len() == FRONT => Some(inflate::too_large(limit)),
            Ok(_) => None,
            Err(error) => Some(error),
        };
        if let Some(error) = refused {
            // A wrong checksum explains any nonsense.
            verify(watch)?;
            return Err(error);
        }
        // A wrong checksum explains damage, not the other way round: of two errors that of the checksum is reported.
        let main = Arc::new(inflate::inflate_beside(stored.bytes(), limit, &verify, &mut *watch)?);
        self.inflated.fetch_add(1, Ordering::Relaxed);
        drop(stored);
        if watch() {
            return Err(Error::new(Kind::Interrupted, "interrupted"));
        }
        let tree = machine::parse(&main)?;
        let (index, aside) = ShardIndex::build(spec, &self.groups, &tree, &main, true)?;
        let kept = (index.decoded > 0).then(|| Arc::clone(&main));
        let loaded = Arc::new(Loaded { index: Arc::new(index), main: kept, aside });
        Ok(Fresh { loaded, tree, bytes: ShardBytes::Shared(main), version })
    }

    /// A shard's values, for texts and metadata.
    pub fn values(&self, s: usize, watch: Watch<'_>) -> Result<Values> {
        let Some(spec) = self.specs.get(s) else {
            return Err(Error::new(Kind::Internal, format!("shard {s} of {}", self.specs.len())));
        };
        if spec.compressed
            && let Some(loaded) = self.load_all(&[s], &mut *watch)?.pop()
            && let Some(main) = &loaded.main
        {
            let tree = machine::parse(main).map_err(|e| e.at(&spec.path))?;
            return Ok(Values { tree, index: Arc::clone(&loaded.index), bytes: ShardBytes::Shared(Arc::clone(main)) });
        }
        let Fresh { loaded, tree, bytes, .. } = self.fresh(s, watch)?;
        Ok(Values { tree, index: Arc::clone(&loaded.index), bytes })
    }
}

/// A parsed shard and what it was parsed from.
pub struct Values {
    /// The values.
    pub tree: Tree,
    /// What is inside.
    pub index: Arc<ShardIndex>,
    bytes: ShardBytes,
}

impl Values {
    /// What was parsed.
    pub fn input(&self) -> &[u8] {
        self.bytes.get()
    }
}
