//! Reads, verifies, inflates, indexes and caches shards.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::ahead::NextShard;
use super::index::{ShardIndex, TYPES, class_of};
use super::spec::ShardSpec;
use super::stored::{ShardBytes, ShardRead, Stored, block_for, hex};

use crate::codec::cache::{Cache, Cached, Lookup, Turn};
use crate::codec::flight::Waited;
use crate::codec::inflate;
use crate::error::{Error, Finding, Kind, Result};
use crate::files::open::OpenFile;
use crate::layout::row::Row;
use crate::location::Location;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::parse::pickle::{Tree, machine};
use crate::source::fetch::{SCRATCH, read_all};
use crate::source::local::Local;
use crate::source::slots::Slots;
use crate::source::{Access, Io, RangeRead, Source, Store, Version, Wishes};
use crate::threads::{self, SharedLock, Stop, Watch};

/// A shard that is loaded.
#[derive(Clone, Debug)]
pub(super) struct Loaded {
    pub index: Arc<ShardIndex>,
    /// The inflated shard, if rows are read from it.
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

/// The turn to read a shard; `None` if other threads do not wait for it.
type MayWait<'a> = Option<Turn<'a, Loaded, usize>>;

/// A shard that was just read.
struct Fresh {
    loaded: Arc<Loaded>,
    tree: Tree,
    bytes: ShardBytes,
    version: Option<Version>,
}

/// Facts about a shard, kept after its first read.
#[derive(Debug)]
struct KnownShard {
    index: Arc<ShardIndex>,
    /// The version of the file that was last read; `None` if its store has no versions, and then it may have changed.
    version: Option<Version>,
}

/// The shards of a dataset.
pub struct Shards {
    specs: Vec<ShardSpec>,
    /// The layer name of each group, and the group of each layer name.
    layers: Vec<i64>,
    groups: HashMap<i64, usize>,
    /// The first example of each shard, then the number of all examples.
    firsts: Vec<u64>,
    /// A row of each supported type; all have the same width.
    rows: [Row; TYPES.len()],
    /// The type of the first array, as an index in [`TYPES`]; `None` until it is known.
    class: Option<usize>,
    pub(super) store: Arc<dyn Store>,
    pub(super) wishes: Option<Wishes>,
    /// Whether files are mapped, and views allowed.
    pub(super) maps: bool,
    pub(super) slots: Slots<OpenFile>,
    known: Vec<SharedLock<Option<KnownShard>>>,
    /// By shard; shards without decoded bytes are not cached.
    decoded: Cache<Loaded, usize>,
    /// For compressed shards of a slow store: the inflated size that they claim plus one, or 0 before it is known.
    claims: Vec<AtomicU64>,
    /// The shard that is needed next.
    ahead: NextShard,
    /// Shards inflated so far, for tests: rows in a random order must not inflate per row.
    inflated: AtomicU64,
}

/// Maximum number of shards: files of all types together are fewer than 2^24.
const MOST_SHARDS: usize = 1 << 21;

impl Shards {
    /// Whether a slow source sends the shards.
    pub fn are_far(&self) -> bool {
        self.wishes.is_some()
    }

    /// Local shards. Opens only shards up to the first with an array, which determines the properties of rows.
    pub fn open(
        specs: Vec<ShardSpec>,
        layers: Vec<i64>,
        decoded_memory: u64,
        io: Io,
        watch: Watch<'_>,
    ) -> Result<Shards> {
        Shards::of(Arc::new(Local { io }), io == Io::Mmap, specs, layers, decoded_memory, watch)
    }

    /// Shards of any store; files are mapped if `maps` is set and they can be. See [`Shards::open`].
    pub fn of(
        store: Arc<dyn Store>,
        maps: bool,
        specs: Vec<ShardSpec>,
        layers: Vec<i64>,
        decoded_memory: u64,
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
            return Err(Error::new(Kind::Format, format!("expected fewer than 2^40 samples, found {examples}")));
        }
        let mut shards = Shards {
            slots: Slots::new(specs.len() as u64 * 2),
            known: specs.iter().map(|_| SharedLock::new(None)).collect(),
            claims: specs.iter().map(|_| AtomicU64::new(0)).collect(),
            wishes: store.wishes(),
            store,
            maps,
            specs,
            groups: layers.iter().enumerate().map(|(group, layer)| (*layer, group)).collect(),
            layers,
            firsts,
            rows: TYPES.map(|dtype| Row { width: 0, dtype, bytes: 0 }),
            class: None,
            decoded: Cache::new(decoded_memory),
            ahead: NextShard::default(),
            inflated: AtomicU64::new(0),
        };
        for s in 0..shards.specs.len() {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let index = Arc::clone(&shards.load(s, None, &mut *watch)?.index);
            if let Some((width, dtype)) = index.row() {
                for row in &mut shards.rows {
                    *row = Row::new(width, row.dtype).map_err(|e| e.at(&shards.specs[s].location))?;
                }
                shards.class = class_of(dtype);
                return Ok(shards);
            }
        }
        Err(Error::new(Kind::Format, "expected a shard with an array in it, found none"))
    }

    /// The shards, as the metadata describe them.
    pub fn specs(&self) -> &[ShardSpec] {
        &self.specs
    }

    /// The layer names of the groups.
    pub fn layers(&self) -> &[i64] {
        &self.layers
    }

    /// Closes cached files and drops decoded shards.
    pub fn release(&self) {
        self.ahead.clear();
        self.slots.clear();
        self.decoded.make_room(self.decoded.budget());
    }

    /// Shards inflated so far.
    pub fn inflated(&self) -> u64 {
        self.inflated.load(Ordering::Relaxed)
    }

    /// The budget of decoded bytes.
    pub fn decoded_budget(&self) -> u64 {
        self.decoded.budget()
    }

    /// The properties of a row: the common width, and the type of the first array.
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

    /// Boundaries of the shards' examples; a shard without samples has two equal ones.
    pub fn bounds(&self) -> &[u64] {
        &self.firsts
    }

    /// The first example of a shard that has samples.
    pub fn first_of(&self, s: usize) -> Result<i64> {
        match (self.specs.get(s), self.firsts.get(s).map(|first| i64::try_from(*first))) {
            (Some(spec), Some(Ok(first))) if spec.samples > 0 => Ok(first),
            _ => Err(Error::new(Kind::Internal, format!("shard {s} of {} has no samples", self.specs.len()))),
        }
    }

    pub(super) fn first(&self, s: usize) -> u64 {
        self.firsts.get(s).copied().unwrap_or(0)
    }

    /// The number of files per type in the numbering of `Prepared`.
    pub(super) fn files_per_class(&self) -> u64 {
        self.specs.len().max(1) as u64 * 2
    }

    pub(super) fn shard_of(&self, example: u64) -> usize {
        // An empty shard has the same first example as the next: the last one with this number contains it.
        self.firsts.partition_point(|first| *first <= example).saturating_sub(1)
    }

    /// The index of a shard, if it is known. A forked child that cannot lock it indexes the shard again.
    pub(super) fn known(&self, s: usize) -> Option<(Arc<ShardIndex>, Option<Version>)> {
        let slot = self.known[s].read_briefly(|| ())?;
        slot.as_ref().map(|known| (Arc::clone(&known.index), known.version.clone()))
    }

    /// Stores the index of a shard. Fails if the shard was indexed before and has changed.
    fn remember(&self, s: usize, index: &mut Arc<ShardIndex>, version: Option<Version>) -> Result<()> {
        let Some(mut slot) = self.known[s].write_briefly() else { return Ok(()) };
        if let Some(known) = &*slot {
            if known.index != *index {
                return Err(Error::new(
                    Kind::Format,
                    "was replaced or changed after it was indexed, and contains other samples or arrays now; reopen the dataset",
                ));
            }
            *index = Arc::clone(&known.index);
        }
        *slot = Some(KnownShard { index: Arc::clone(index), version });
        Ok(())
    }

    /// Whether a shard is known to be unchanged since this version of its file was read.
    fn is_same(&self, s: usize, version: Option<&Version>) -> bool {
        self.known(s).is_some_and(|(_, known)| known.is_some() && known.as_ref() == version)
    }

    /// Fails unless an open file is the one that was indexed, or has the same content.
    pub(super) fn check_same(&self, s: usize, source: &dyn Source, watch: Watch<'_>) -> Result<()> {
        let version = source.version();
        if self.known(s).is_none() || self.is_same(s, version.as_ref()) {
            return Ok(());
        }
        let fresh = self.fresh(s, self.stored(s, &mut *watch)?, watch)?;
        if fresh.version != version {
            return Err(
                Error::new(Kind::Format, "the file changes during the read; reopen the dataset").at(source.location())
            );
        }
        Ok(())
    }

    /// The number of these shards that may be decoded concurrently.
    pub(super) fn at_once(&self, which: &[usize]) -> usize {
        let largest = which.iter().map(|s| self.decoded_guess(*s)).max().unwrap_or(0);
        let fit = self.decoded.budget().checked_div(largest).map_or(usize::MAX, to_usize);
        // More than the number of threads, so that threads do not wait for the slowest shard of each round.
        fit.clamp(1, threads::num_threads() * 4)
    }

    /// The memory that a shard will need: known, or the size that the file claims, limited by its compressed size.
    #[expect(clippy::disallowed_methods, reason = "four bytes of a near file")]
    fn decoded_guess(&self, s: usize) -> u64 {
        match self.known(s) {
            Some((index, _)) => index.decoded + index.aside,
            None if self.specs[s].compressed && self.wishes.is_some() => {
                self.claims[s].load(Ordering::Relaxed).saturating_sub(1)
            }
            None if self.specs[s].compressed => {
                let claimed = || {
                    let source = self.store.open(&self.specs[s].location, Access::Once, Stop::never()).ok()?;
                    let mut last = [0; 4];
                    source.read(source.size().checked_sub(4)?, &mut last, Stop::never()).ok()?;
                    Some(self.claimed(s, last, source.size()))
                };
                claimed().unwrap_or(0)
            }
            None => 0,
        }
    }

    /// The inflated size in the last bytes of a compressed shard of `len` bytes, limited to the allowed size.
    fn claimed(&self, s: usize, last: [u8; 4], len: u64) -> u64 {
        inflate::claimed(last, len).min(self.limit(s, len))
    }

    /// Reads the claimed inflated sizes of compressed shards of a slow store, all together. Errors are reported when the
    /// shard itself is read.
    pub(super) fn ask_claims(&self, which: &[usize], watch: Watch<'_>) -> Result<()> {
        let Some(wishes) = self.wishes else { return Ok(()) };
        let unknown = |s: &usize| {
            self.specs[*s].compressed && self.claims[*s].load(Ordering::Relaxed) == 0 && self.known(*s).is_none()
        };
        let which: Vec<usize> = which.iter().copied().filter(unknown).collect();
        let locations: Vec<&Location> = which.iter().map(|s| &self.specs[*s].location).collect();
        let opened = self.store.open_together(&locations, Access::Once, &mut *watch)?;
        let asked = which.iter().zip(&opened).filter_map(|(s, source)| Some((*s, source.as_deref().ok()?)));
        let ask = |_: usize, (s, source): (usize, &dyn Source), stop: &Stop| {
            let (len, mut last) = (source.size(), [0; 4]);
            let Some(at) = len.checked_sub(4) else { return Ok(()) };
            let claimed = match source.read_many(&mut [RangeRead { at, into: &mut last }], stop) {
                Ok(()) => self.claimed(s, last, len),
                Err(error) if error.kind == Kind::Interrupted => return Err(error),
                // It may inflate to the allowed maximum; the others are read by their claimed sizes.
                Err(_) => self.limit(s, len),
            };
            self.claims[s].store(claimed.saturating_add(1), Ordering::Relaxed);
            Ok(())
        };
        threads::for_each_waiting(asked, wishes.parallel, &ask, watch)
    }

    /// Bytes to which a shard may inflate.
    fn limit(&self, s: usize, stored: u64) -> u64 {
        inflate::allowed(stored, self.specs[s].limit, self.decoded.budget())
    }

    /// Loads these shards: from the cache, from other threads that are reading them, or from their files.
    pub(super) fn load_all(&self, which: &[usize], watch: Watch<'_>) -> Result<Vec<Arc<Loaded>>> {
        // Looking up a cached shard marks it as recently used, so that loading the others does not evict it.
        let mut found: Vec<Option<Arc<Loaded>>> = which.iter().map(|s| self.kept(*s)).collect();
        let mut lacking: Vec<usize> = (0..which.len()).filter(|i| found[*i].is_none()).collect();
        self.decoded.make_room(lacking.iter().map(|i| self.decoded_guess(which[*i])).sum());
        while !lacking.is_empty() {
            let (mut owned, mut flights) = (vec![], vec![]);
            for i in lacking.drain(..) {
                match self.decoded.look_up(which[i], |_| true) {
                    Lookup::Kept(kept) => found[i] = Some(kept),
                    // Another thread may have read it since this one checked.
                    Lookup::Mine(turn) => match self.kept(which[i]) {
                        Some(kept) => {
                            turn.hand_over(&kept);
                            found[i] = Some(kept);
                        }
                        None => owned.push((i, Some(turn))),
                    },
                    // A part of other work must not wait: the other thread may need this one.
                    Lookup::Theirs(_) if threads::in_part() => owned.push((i, None)),
                    Lookup::Theirs(flight) => flights.push((i, flight)),
                }
            }
            // A thread never waits while it has a turn.
            for (i, loaded) in self.load_owned(which, owned, &mut *watch)? {
                found[i] = Some(loaded);
            }
            for (i, flight) in flights {
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

    fn load_owned(
        &self,
        which: &[usize],
        owned: Vec<(usize, MayWait<'_>)>,
        watch: Watch<'_>,
    ) -> Result<Vec<(usize, Arc<Loaded>)>> {
        let (mut ready, mut rest) = (vec![], vec![]);
        for (i, turn) in owned {
            match self.ahead.take(which[i], &mut *watch)? {
                None if self.wishes.is_some() => rest.push((i, turn)),
                read => ready.push((i, turn, read)),
            }
        }
        let mut loaded = self.look_into(which, ready, &mut *watch)?;
        // For a slow store, requests all bytes before the first shard is parsed, as far as they fit in memory.
        let (owned, Some(wishes)) = (rest, self.wishes) else { return Ok(loaded) };
        let locations: Vec<&Location> = owned.iter().map(|(i, _)| &self.specs[which[*i]].location).collect();
        let opened = self.store.open_together(&locations, Access::Once, &mut *watch)?;
        let mut coming = owned.into_iter().zip(opened).peekable();
        while coming.peek().is_some() {
            let (mut some, mut sources, mut versions, mut blocks, mut bytes) = (vec![], vec![], vec![], vec![], 0u64);
            while let Some(((i, turn), source)) = coming.next_if(|(_, source)| {
                bytes = bytes.saturating_add(source.as_ref().map_or(0, |source| source.size()));
                bytes <= SCRATCH || some.is_empty()
            }) {
                let s = which[i];
                let source = source.and_then(|source| self.check_size(s, source.size()).map(|()| source));
                let source =
                    source.map_err(|e| if e.location.is_none() { e.at(&self.specs[s].location) } else { e })?;
                blocks.push(block_for(&*source)?);
                versions.push(source.version());
                sources.push(source);
                some.push((i, turn));
            }
            let places = sources.iter().zip(&mut blocks).map(|(source, block)| (&**source, 0, block.bytes_mut()));
            read_all(places.collect(), &wishes, &mut *watch)?;
            let read = blocks.into_iter().zip(versions).map(|(block, of)| ShardRead::new(Stored::Buffer(block), of));
            let some = some.into_iter().zip(read).map(|((i, turn), read)| (i, turn, Some(read)));
            loaded.extend(self.look_into(which, some.collect(), &mut *watch)?);
        }
        Ok(loaded)
    }

    /// Indexes shards whose turns this thread has, some with their bytes already read.
    fn look_into(
        &self,
        which: &[usize],
        owned: Vec<(usize, MayWait<'_>, Option<ShardRead>)>,
        watch: Watch<'_>,
    ) -> Result<Vec<(usize, Arc<Loaded>)>> {
        let work = |i: usize,
                    turn: MayWait<'_>,
                    stored: Option<ShardRead>,
                    watch: Watch<'_>|
         -> Result<(usize, Arc<Loaded>)> {
            let loaded = self.load(which[i], stored, watch)?;
            if let Some(turn) = turn {
                turn.hand_over(&loaded);
            }
            Ok((i, loaded))
        };
        // In parallel; a last shard that would occupy a single thread is read afterwards by all threads.
        let mut together = owned;
        let alone = if together.len() % threads::num_threads() == 1 { together.pop() } else { None };
        let part = |_: usize, (i, turn, stored), stop: &Stop| match work(i, turn, stored, &mut || stop.is_set()) {
            // Another part's error stopped this one, and is reported instead.
            Err(error) if error.kind == Kind::Interrupted && stop.is_set() => Ok(None),
            done => done.map(Some),
        };
        let mut loaded: Vec<_> = threads::map_each(together, &part, &mut *watch)?.into_iter().flatten().collect();
        if let Some((i, turn, stored)) = alone {
            loaded.push(work(i, turn, stored, watch)?);
        }
        Ok(loaded)
    }

    /// A shard's index and decoded bytes, if both are cached.
    fn kept(&self, s: usize) -> Option<Arc<Loaded>> {
        let (index, _) = self.known(s)?;
        if index.decoded + index.aside > 0 {
            return self.decoded.get(s);
        }
        Some(Arc::new(Loaded { index, main: None, aside: None }))
    }

    /// A shard's index and decoded bytes, cached or made from its bytes, which are read now if needed.
    fn load(&self, s: usize, stored: Option<ShardRead>, watch: Watch<'_>) -> Result<Arc<Loaded>> {
        match self.kept(s) {
            Some(loaded) => Ok(loaded),
            None => {
                let stored = stored.map_or_else(|| self.stored(s, &mut *watch), Ok)?;
                Ok(self.fresh(s, stored, watch)?.loaded)
            }
        }
    }

    /// Indexes a shard, even if it is cached, and caches the result.
    fn fresh(&self, s: usize, stored: ShardRead, watch: Watch<'_>) -> Result<Fresh> {
        let spec = &self.specs[s];
        let in_shard = |e: Error| if e.location.is_none() { e.at(&spec.location) } else { e };
        let mut fresh = self.read(s, stored, watch).map_err(in_shard)?;
        if self.class.is_some()
            && let Some((width, _)) = fresh.loaded.index.row()
            && width != self.row().width as u64
        {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "its arrays have width {width}, those of the first shard {}; one dataset, one row",
                    self.row().width
                ),
            )
            .at(&spec.location));
        }
        let index = &mut Arc::make_mut(&mut fresh.loaded).index;
        self.remember(s, index, fresh.version.clone()).map_err(in_shard)?;
        if fresh.loaded.has_blocks() {
            self.decoded.put(s, &fresh.loaded);
        }
        Ok(fresh)
    }

    /// The bytes of a shard's file.
    fn stored(&self, s: usize, watch: Watch<'_>) -> Result<ShardRead> {
        let spec = &self.specs[s];
        let mut read = || {
            let source = self.store.open_watched(&spec.location, Access::Once, &mut *watch)?;
            self.check_size(s, source.size())?;
            // Taken before the read: a later change gives another version.
            let version = source.version();
            let stored = Stored::of(&*source, self.maps, self.wishes.as_ref(), &mut *watch)?;
            if let Stored::Map(map) = &stored
                && (spec.compressed || spec.sha256.is_some())
            {
                // All of it will be read sequentially.
                map.will_need(0, map.bytes().len());
            }
            Ok(ShardRead::new(stored, version))
        };
        read().map_err(|e: Error| if e.location.is_none() { e.at(&spec.location) } else { e })
    }

    /// Begins to read the shard of an example, which is needed next, on a separate thread, unless it is decoded. A
    /// hint: errors are reported when the shard is used.
    pub fn read_ahead(self: &Arc<Shards>, example: i64) {
        let example = u64::try_from(example).ok().filter(|example| *example < self.examples());
        let Some(s) = example.map(|example| self.shard_of(example)) else { return };
        if self.kept(s).is_some() {
            return;
        }
        let shards = Arc::clone(self);
        self.ahead.read(s, move |wanted, dropped| {
            let mut read = shards.stored(s, &mut || dropped.is_set()).ok()?;
            if shards.specs[s].sha256.is_some() {
                read.hash(&mut || wanted.is_set() || dropped.is_set());
            }
            Some(read)
        });
    }

    /// Drops a shard that was read ahead and not used.
    pub fn forget_ahead(&self) {
        self.ahead.clear();
    }

    /// Fails if the file's size differs from the metadata.
    fn check_size(&self, s: usize, len: u64) -> Result<()> {
        if let Some(size) = self.specs[s].size
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
        Ok(())
    }

    fn read(&self, s: usize, read: ShardRead, watch: Watch<'_>) -> Result<Fresh> {
        let spec = &self.specs[s];
        let bytes = read.stored.bytes();
        let verify = |watch: Watch<'_>| -> Result<()> {
            let Some(expected) = spec.sha256 else { return Ok(()) };
            let found = read.sha256(watch)?;
            if found == expected {
                return Ok(());
            }
            Err(Error::new(
                Kind::Format,
                format!(
                    "the checksum in metadata.json is sha256:{}, the file's is sha256:{}: damaged or replaced; checksums=False reads it anyway",
                    hex(&expected),
                    hex(&found)
                ),
            )
            .finds(Finding::Checksum))
        };
        if spec.compressed != inflate::is_gzip(bytes) {
            verify(watch)?;
            let (declared, found) =
                if spec.compressed { ("true", "one without gzip's first bytes") } else { ("false", "a gzip file") };
            return Err(Error::new(
                Kind::Format,
                format!("metadata.json has \"compressed\": {declared}, but the file is {found}; correct one of them"),
            )
            .finds(Finding::Gzip)
            .byte(0));
        }
        if !spec.compressed {
            // Rows of a plain shard are read in place, so its checksum is verified once per file, not per read.
            if !self.is_same(s, read.version.as_ref()) {
                verify(watch)?;
            }
            let tree = machine::parse(bytes)?;
            let (index, aside) = ShardIndex::build(spec, &self.groups, &tree, bytes, false)?;
            let loaded = Arc::new(Loaded { index: Arc::new(index), main: None, aside });
            let ShardRead { stored, version, .. } = read;
            return Ok(Fresh { loaded, tree, bytes: ShardBytes::Stored(stored), version });
        }
        // Before inflating everything, check that the beginning is a pickle, and that no value in it is too large.
        let limit = self.limit(s, bytes.len() as u64);
        const FRONT: usize = 64 << 10;
        let front = inflate::front(bytes, FRONT);
        let refused = match machine::least(&front) {
            // A file shorter than this is cheap to inflate, so its error comes from inflating it.
            Ok(least) if least > limit && front.len() == FRONT => Some(inflate::too_large(limit)),
            Ok(_) => None,
            Err(error) => Some(error),
        };
        if let Some(error) = refused {
            // A wrong checksum explains any other error.
            verify(watch)?;
            return Err(error);
        }
        // A wrong checksum explains damage, so of two errors the checksum's is reported.
        let main = Arc::new(inflate::inflate_beside(bytes, limit, &verify, &mut *watch)?);
        self.inflated.fetch_add(1, Ordering::Relaxed);
        let version = read.version.clone();
        drop(read);
        if watch() {
            return Err(Error::new(Kind::Interrupted, "interrupted"));
        }
        let tree = machine::parse(&main)?;
        let (index, aside) = ShardIndex::build(spec, &self.groups, &tree, &main, true)?;
        let kept = (index.decoded > 0).then(|| Arc::clone(&main));
        let loaded = Arc::new(Loaded { index: Arc::new(index), main: kept, aside });
        Ok(Fresh { loaded, tree, bytes: ShardBytes::Shared(main), version })
    }

    /// A shard's values, for text and metadata.
    pub fn values(&self, s: usize, watch: Watch<'_>) -> Result<Values> {
        let Some(spec) = self.specs.get(s) else {
            return Err(Error::new(Kind::Internal, format!("shard {s} of {}", self.specs.len())));
        };
        if spec.compressed
            && let Some(loaded) = self.load_all(&[s], &mut *watch)?.pop()
            && let Some(main) = &loaded.main
        {
            let tree = machine::parse(main).map_err(|e| e.at(&spec.location))?;
            return Ok(Values { tree, index: Arc::clone(&loaded.index), bytes: ShardBytes::Shared(Arc::clone(main)) });
        }
        let Fresh { loaded, tree, bytes, .. } = self.fresh(s, self.stored(s, &mut *watch)?, watch)?;
        Ok(Values { tree, index: Arc::clone(&loaded.index), bytes })
    }
}

/// A parsed shard and its input.
pub struct Values {
    /// The values.
    pub tree: Tree,
    /// Its content.
    pub index: Arc<ShardIndex>,
    bytes: ShardBytes,
}

impl Values {
    /// The parsed bytes.
    pub fn input(&self) -> &[u8] {
        self.bytes.get()
    }
}
