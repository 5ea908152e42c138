//! Pickle shards: files that say only inside which rows they hold.
//!
//! A shard is looked into once, when something of it is first wanted: held against its checksum, inflated if it is
//! compressed, and indexed by one pass of the pickle machine, which finds where each array's bytes lie. After that its rows
//! are rows like any other: of a mapped file (plain `.pkl`), or of decoded memory (`.pkl.gz`), which is kept under a budget
//! and made again when it was thrown out. Arrays that do not lie as they should (Fortran order, other byte order, bytes
//! written as text by old protocols) are put right into memory beside it.
//!
//! In the numbering of [`Files`], shard `s` is file `2 s`, what was put right of it file `2 s + 1`. Addresses are bytes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use sha2::{Digest, Sha256};

use super::decoded::{Block, Cache};
use super::files::map_or_read;
use super::mmap::Map;
use super::{Body, Files, Io, OpenFile, Place, Row, Slots, View, inflate, open_regular, pread};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::layout::{Address, Layout, Run, check_example, check_group, check_token};
use crate::par::pool::{self, Stop, Watch};
use crate::parse::pickle::shard::{Layer, layers};
use crate::parse::pickle::{Tree, machine};

/// One shard, as the dataset's metadata describe it.
#[derive(Clone, Debug)]
pub struct ShardSpec {
    /// Where it is.
    pub path: PathBuf,
    /// Whether it is gzip.
    pub compressed: bool,
    /// Its size, if it has to be right.
    pub size: Option<u64>,
    /// Its SHA-256, if it has to be right.
    pub sha256: Option<[u8; 32]>,
    /// Samples it holds.
    pub samples: u64,
    /// Their smallest and largest number.
    pub ids: (i64, i64),
    /// Layers it may hold.
    pub layers: Vec<i64>,
    /// Bytes that it may inflate to.
    pub limit: u64,
}

/// Where one sample's rows of one layer lie.
#[derive(Clone, Copy, Debug)]
struct Spot {
    /// Among what was put right.
    aside: bool,
    offset: u64,
    tokens: u32,
}

/// What is inside a shard.
#[derive(Debug)]
pub struct Index {
    width: u64,
    dtype: DType,
    /// Samples in the order in which they first appear.
    samples: Vec<i64>,
    /// By group, then by sample.
    spots: Vec<Vec<Option<Spot>>>,
    /// Bytes that have to be in memory for rows to be read.
    decoded: u64,
    aside: u64,
    /// Bytes of the file when it was looked into.
    len: u64,
}

impl Index {
    /// `sample_idx` of each sample.
    pub fn samples(&self) -> &[i64] {
        &self.samples
    }

    /// Elements per row, and their type; `None` for a shard without arrays.
    pub fn row(&self) -> Option<(u64, DType)> {
        self.spots.iter().flatten().any(Option::is_some).then_some((self.width, self.dtype))
    }
}

/// A shard whose bytes are at hand.
struct Loaded {
    index: Arc<Index>,
    /// Inflated, if arrays lie in there.
    main: Option<Arc<Block>>,
    aside: Option<Arc<Block>>,
}

/// The shards of a dataset.
#[derive(Debug)]
pub struct Shards {
    specs: Vec<ShardSpec>,
    /// Names of the groups.
    layers: Vec<i64>,
    /// Number of each shard's first example, and of all examples.
    firsts: Vec<u64>,
    row: Row,
    io: Io,
    slots: Slots<OpenFile>,
    indexes: Vec<RwLock<Option<Arc<Index>>>>,
    verified: Vec<AtomicBool>,
    decoded: Cache,
    /// Shards inflated so far, for tests: rows in a random order must not inflate per row.
    inflated: AtomicU64,
}

impl Shards {
    /// Opens nothing but the first shard that holds an array: only there is written what a row is.
    pub fn open(
        specs: Vec<ShardSpec>,
        layers: Vec<i64>,
        decoded_memory: u64,
        io: Io,
        watch: Watch<'_>,
    ) -> Result<Shards> {
        if specs.len() >= 1 << 22 {
            return Err(Error::new(Kind::Format, format!("{} shards; at most 2^22 - 1 are supported", specs.len())));
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
            indexes: specs.iter().map(|_| RwLock::new(None)).collect(),
            verified: specs.iter().map(|_| AtomicBool::new(false)).collect(),
            specs,
            layers,
            firsts,
            // Until a shard has been looked into.
            row: Row { width: 0, dtype: DType::F32, bytes: 0 },
            io,
            decoded: Cache::new(decoded_memory),
            inflated: AtomicU64::new(0),
        };
        for s in 0..shards.specs.len() {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let index = shards.load(s)?.index;
            if let Some((width, dtype)) = index.row() {
                shards.row = Row::new(width, dtype).map_err(|e| e.at(&shards.specs[s].path))?;
                return Ok(shards);
            }
        }
        Err(Error::new(Kind::Format, "expected a shard with an array in it, found none"))
    }

    /// The shards, as described.
    pub fn specs(&self) -> &[ShardSpec] {
        &self.specs
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

    /// An example of a shard.
    pub fn first_of(&self, s: usize) -> Result<i64> {
        match (self.specs.get(s), self.firsts.get(s)) {
            (Some(spec), Some(first)) if spec.samples > 0 => Ok(*first as i64),
            _ => Err(Error::new(Kind::Internal, format!("shard {s} of {} has no samples", self.specs.len()))),
        }
    }

    fn shard_of(&self, example: u64) -> usize {
        // Shards without samples share their first number with the next: the last of those holds the example.
        self.firsts.partition_point(|first| *first <= example) - 1
    }

    fn known(&self, s: usize) -> Option<Arc<Index>> {
        self.indexes[s].try_read().ok().and_then(|slot| slot.clone())
    }

    /// What is inside the shards that hold these examples, or all shards; looked into in parallel where it is not known.
    pub fn prepare(&self, examples: Option<&mut dyn Iterator<Item = i64>>, watch: Watch<'_>) -> Result<Prepared<'_>> {
        let total = *self.firsts.last().unwrap_or(&0);
        let mut wanted: Vec<usize> = match examples {
            None => (0..self.specs.len()).collect(),
            Some(examples) => {
                let mut found = vec![];
                for example in examples {
                    let s = self.shard_of(check_example(example, total)?);
                    if found.last() != Some(&s) {
                        found.push(s);
                    }
                }
                found
            }
        };
        wanted.sort_unstable();
        wanted.dedup();
        let mut indexes: BTreeMap<usize, Arc<Index>> = BTreeMap::new();
        let mut unknown = vec![];
        for s in wanted {
            match self.known(s) {
                Some(index) => {
                    indexes.insert(s, index);
                }
                None => unknown.push(s),
            }
        }
        for some in unknown.chunks(self.at_once(&unknown)) {
            for (s, loaded) in some.iter().zip(self.load_all(some, watch)?) {
                indexes.insert(*s, loaded.index);
            }
        }
        Ok(Prepared { shards: self, indexes, pinned: HashMap::new() })
    }

    /// How many of these shards may be decoded at once.
    fn at_once(&self, which: &[usize]) -> usize {
        let largest = which.iter().map(|s| self.decoded_guess(*s)).max().unwrap_or(0);
        let fit = self.decoded.budget().checked_div(largest).map_or(usize::MAX, |n| n as usize);
        // More than the threads, so that none waits for the slowest of each go.
        fit.clamp(1, pool::num_threads() * 4)
    }

    /// What a shard will take in memory: known, or what the file says.
    fn decoded_guess(&self, s: usize) -> u64 {
        match self.known(s) {
            Some(index) => index.decoded + index.aside,
            None if self.specs[s].compressed => {
                let tail = File::open(&self.specs[s].path).ok().and_then(|file| {
                    let len = file.metadata().ok()?.len();
                    let mut last = [0; 4];
                    pread::read_exact_at(&file, &mut last, len.checked_sub(4)?).ok()?;
                    Some(u64::from(u32::from_le_bytes(last)))
                });
                tail.unwrap_or(0)
            }
            None => 0,
        }
    }

    fn load_all(&self, which: &[usize], watch: Watch<'_>) -> Result<Vec<Loaded>> {
        // Those that are kept already are touched, so that they are not what makes room for the others, or for themselves.
        let absent: Vec<usize> = which.iter().copied().filter(|s| self.kept(*s).is_none()).collect();
        self.decoded.make_room(absent.iter().map(|s| self.decoded_guess(*s)).sum());
        let slots: Vec<Mutex<Option<Loaded>>> = which.iter().map(|_| Mutex::default()).collect();
        let work = |i: usize, _: &Stop| -> Result<()> {
            let loaded = self.load(which[i])?;
            if let Ok(mut slot) = slots[i].lock() {
                *slot = Some(loaded);
            }
            Ok(())
        };
        // Side by side; one that would be left over for one thread is read when the others are done, by all of them.
        let cold: Vec<usize> = (0..which.len()).filter(|i| self.kept(which[*i]).is_none()).collect();
        let alone = cold.last().copied().filter(|_| cold.len() % pool::num_threads() == 1);
        let together: Vec<usize> = (0..which.len()).filter(|i| Some(*i) != alone).collect();
        pool::run(together.len(), &|i, stop| work(together[i], stop), watch)?;
        if let Some(i) = alone {
            work(i, &Stop::default())?;
        }
        slots
            .into_iter()
            .map(|slot| {
                slot.into_inner()
                    .ok()
                    .flatten()
                    .ok_or_else(|| Error::new(Kind::Internal, "a shard that was not loaded"))
            })
            .collect()
    }

    /// A shard's index and decoded bytes, where both are kept.
    fn kept(&self, s: usize) -> Option<Loaded> {
        let index = self.known(s)?;
        let main = if index.decoded > 0 { Some(self.decoded.get(2 * s as u64)?) } else { None };
        let aside = if index.aside > 0 { Some(self.decoded.get(2 * s as u64 + 1)?) } else { None };
        Some(Loaded { index, main, aside })
    }

    /// A shard's index and decoded bytes: kept ones, or read now.
    fn load(&self, s: usize) -> Result<Loaded> {
        if let Some(loaded) = self.kept(s) {
            return Ok(loaded);
        }
        let spec = &self.specs[s];
        let loaded = self.read(s).map_err(|e| if e.path.is_none() { e.at(&spec.path) } else { e })?;
        if self.row.bytes > 0
            && let Some((width, dtype)) = loaded.index.row()
            && (width != self.row.width as u64 || dtype != self.row.dtype)
        {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "its arrays are {} {} wide, those of the first shard {} {}; one dataset, one row",
                    dtype.numpy_name().unwrap_or(dtype.name()),
                    width,
                    self.row.dtype.numpy_name().unwrap_or(self.row.dtype.name()),
                    self.row.width
                ),
            )
            .at(&spec.path));
        }
        if let Some(main) = &loaded.main {
            self.decoded.put(2 * s as u64, main);
        }
        if let Some(aside) = &loaded.aside {
            self.decoded.put(2 * s as u64 + 1, aside);
        }
        if let Ok(mut slot) = self.indexes[s].try_write() {
            *slot = Some(Arc::clone(&loaded.index));
        }
        Ok(loaded)
    }

    /// The shard's file as bytes, and its own bytes as they lie.
    fn stored(&self, s: usize) -> Result<Stored> {
        let spec = &self.specs[s];
        let (file, len) = open_regular(&spec.path)?;
        if let Some(size) = spec.size
            && size != len
        {
            let kind = if len < size { Kind::Truncated } else { Kind::Format };
            return Err(Error::new(
                kind,
                format!("expected {size} bytes ('size_bytes' in metadata.json), found {len}"),
            )
            .byte(len.min(size)));
        }
        if len == 0 {
            return Err(Error::new(Kind::Truncated, "expected a pickle, found an empty file").byte(0));
        }
        let bytes = usize::try_from(len).map_err(|_| Error::new(Kind::Access, "does not fit this machine's memory"))?;
        if self.io == Io::Mmap {
            let map = Map::open(&file, bytes).map_err(|e| Error::from_io(&e, &spec.path, "map"))?;
            if spec.compressed || spec.sha256.is_some() {
                // All of it will be read, from front to back.
                map.will_need(0, bytes);
            }
            return Ok(Stored::Map(map));
        }
        let mut block = Block::new(bytes).map_err(|e| Error::from_io(&e, &spec.path, "read"))?;
        pread::read_exact_at(&file, block.bytes_mut(), 0).map_err(|e| Error::from_io(&e, &spec.path, "read"))?;
        Ok(Stored::Block(block))
    }

    fn read(&self, s: usize) -> Result<Loaded> {
        let spec = &self.specs[s];
        let stored = self.stored(s)?;
        let verify = || -> Result<()> {
            let Some(expected) = spec.sha256.filter(|_| !self.verified[s].load(Ordering::Relaxed)) else {
                return Ok(());
            };
            let found: [u8; 32] = Sha256::digest(stored.bytes()).into();
            if found != expected {
                return Err(Error::new(
                    Kind::Format,
                    format!(
                        "the checksum in metadata.json is sha256:{}, the file's is sha256:{}: damaged or exchanged; checksums=False reads it as it is",
                        hex(&expected),
                        hex(&found)
                    ),
                ));
            }
            self.verified[s].store(true, Ordering::Relaxed);
            Ok(())
        };
        if spec.compressed != inflate::is_gzip(stored.bytes()) {
            verify()?;
            let (said, found) =
                if spec.compressed { ("true", "one without gzip's first bytes") } else { ("false", "a gzip file") };
            return Err(Error::new(
                Kind::Format,
                format!(
                    "metadata.json says \"compressed\": {said}, the file is {found}; one of them has to be put right"
                ),
            )
            .byte(0));
        }
        if !spec.compressed {
            verify()?;
            let input = stored.bytes();
            let tree = machine::parse(input)?;
            let (index, aside) = self.index(s, &tree, input, false)?;
            return Ok(Loaded { index: Arc::new(index), main: None, aside });
        }
        // Before anything is inflated: a stretch that is enough to see that this is no pickle.
        let front = inflate::front(stored.bytes(), 64 << 10);
        if let Err(error) = machine::parse(&front)
            && error.kind != Kind::Truncated
        {
            // A wrong checksum explains any nonsense.
            verify()?;
            return Err(error);
        }
        // A wrong checksum explains damage, not the other way round: of two errors that of the checksum is told.
        let main = Arc::new(inflate::inflate_beside(stored.bytes(), spec.limit, &verify)?);
        self.inflated.fetch_add(1, Ordering::Relaxed);
        drop(stored);
        let tree = machine::parse(&main)?;
        let (index, aside) = self.index(s, &tree, &main, true)?;
        let main = (index.decoded > 0).then_some(main);
        Ok(Loaded { index: Arc::new(index), main, aside })
    }

    /// Checks what the shard holds against what the metadata say, and finds every array.
    fn index(&self, s: usize, tree: &Tree, input: &[u8], in_memory: bool) -> Result<(Index, Option<Arc<Block>>)> {
        let spec = &self.specs[s];
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        let found: Vec<Layer> = layers(tree, input)?;
        let mut samples: Vec<i64> = vec![];
        let mut local: HashMap<i64, usize> = HashMap::new();
        let mut row: Option<(u64, DType)> = None;
        let mut aside: Vec<u8> = vec![];
        let mut here = false;
        let mut spots: Vec<Vec<Option<Spot>>> = self.layers.iter().map(|_| vec![]).collect();
        // An array that several items share is put right once.
        let mut moved: HashMap<(u64, bool, Vec<u64>), u64> = HashMap::new();
        for Layer { layer, items } in &found {
            let group = self.layers.iter().position(|l| l == layer).filter(|_| spec.layers.contains(layer));
            let Some(group) = group else {
                return refuse(format!("holds layer {layer}, metadata.json lists {:?} for it", spec.layers));
            };
            for item in items {
                let next = samples.len();
                let at = *local.entry(item.sample).or_insert_with(|| {
                    samples.push(item.sample);
                    next
                });
                if at == next && !(spec.ids.0..=spec.ids.1).contains(&item.sample) {
                    return refuse(format!(
                        "holds sample_idx {}, metadata.json gives it {} to {}",
                        item.sample, spec.ids.0, spec.ids.1
                    ));
                }
                let [tokens, width] = item.array.shape[..] else {
                    return Err(Error::new(Kind::Internal, "an array that has not two axes"));
                };
                let dtype = item.array.element.dtype;
                if *row.get_or_insert((width, dtype)) != (width, dtype) {
                    return refuse(format!(
                        "sample_idx {}: an array of another width or type than those before",
                        item.sample
                    ));
                }
                let tokens = u32::try_from(tokens)
                    .map_err(|_| Error::new(Kind::Unsupported, format!("{tokens} tokens in one sample")))?;
                let spot = match item.array.in_place() {
                    Some(range) => {
                        here |= tokens > 0;
                        Spot { aside: false, offset: range.start as u64, tokens }
                    }
                    None => {
                        let bytes = tree.bytes(input, &item.array.data);
                        let key = (bytes.as_ptr() as u64, item.array.fortran, item.array.shape.clone());
                        let offset = match moved.get(&key) {
                            Some(offset) => *offset,
                            None => {
                                if aside.len() as u64 + bytes.len() as u64 > spec.limit.max(input.len() as u64 * 2) {
                                    return refuse("its arrays take more memory than its metadata allow".to_string());
                                }
                                let offset = aside.len() as u64;
                                tree.materialise(input, &item.array, &mut aside)?;
                                moved.insert(key, offset);
                                offset
                            }
                        };
                        Spot { aside: true, offset, tokens }
                    }
                };
                let places = &mut spots[group];
                places.resize(places.len().max(at + 1), None);
                places[at] = Some(spot);
            }
        }
        if samples.len() as u64 != spec.samples {
            return refuse(format!("holds {} samples, metadata.json says {}", samples.len(), spec.samples));
        }
        let (width, dtype) = row.unwrap_or((0, DType::F32));
        let decoded = if in_memory && here { input.len() as u64 } else { 0 };
        let len = input.len() as u64;
        let index = Index { width, dtype, samples, spots, decoded, aside: aside.len() as u64, len };
        Ok((index, (!aside.is_empty()).then(|| Arc::new(Block::from(aside)))))
    }

    /// A shard's values, for texts and metadata.
    pub fn values(&self, s: usize) -> Result<Values> {
        let Some(spec) = self.specs.get(s) else {
            return Err(Error::new(Kind::Internal, format!("shard {s} of {}", self.specs.len())));
        };
        let read = || {
            let loaded = self.load(s)?;
            let bytes = match loaded.main {
                Some(main) => Bytes::Shared(main),
                None => {
                    let stored = self.stored(s)?;
                    if spec.compressed {
                        Bytes::Shared(Arc::new(inflate::inflate(stored.bytes(), spec.limit)?))
                    } else {
                        Bytes::Stored(stored)
                    }
                }
            };
            let tree = machine::parse(bytes.get())?;
            Ok(Values { tree, bytes, index: loaded.index })
        };
        read().map_err(|e: Error| if e.path.is_none() { e.at(&spec.path) } else { e })
    }
}

/// A parsed shard and what it was parsed from.
pub struct Values {
    /// The values.
    pub tree: Tree,
    /// What is inside.
    pub index: Arc<Index>,
    bytes: Bytes,
}

impl Values {
    /// What was parsed.
    pub fn input(&self) -> &[u8] {
        self.bytes.get()
    }
}

enum Bytes {
    Shared(Arc<Block>),
    Stored(Stored),
}

impl Bytes {
    fn get(&self) -> &[u8] {
        match self {
            Bytes::Shared(block) => block,
            Bytes::Stored(stored) => stored.bytes(),
        }
    }
}

enum Stored {
    Map(Map),
    Block(Block),
}

impl Stored {
    fn bytes(&self) -> &[u8] {
        match self {
            Stored::Map(map) => map.bytes(),
            Stored::Block(block) => block,
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// Shards that have been looked into, and those whose decoded bytes are held for now. A layout and its files in one.
pub struct Prepared<'a> {
    shards: &'a Shards,
    indexes: BTreeMap<usize, Arc<Index>>,
    pinned: HashMap<u64, Arc<OpenFile>>,
}

impl Prepared<'_> {
    /// Cuts the prepared shards into ranges of files whose decoded bytes fit the budget together.
    pub fn waves(&self) -> Vec<std::ops::Range<u64>> {
        let mut waves: Vec<std::ops::Range<u64>> = vec![];
        let mut held = 0u64;
        for (s, index) in &self.indexes {
            let (first, bytes) = (2 * *s as u64, index.decoded + index.aside);
            match waves.last_mut() {
                Some(wave) if held + bytes <= self.shards.decoded.budget() => {
                    wave.end = first + 2;
                    held += bytes;
                }
                _ => {
                    waves.push(first..first + 2);
                    held = bytes;
                }
            }
        }
        // Backwards: what was looked into last is still there.
        waves.reverse();
        waves
    }

    /// Holds the decoded bytes of the shards in a wave, and no others.
    pub fn hold(&mut self, wave: &std::ops::Range<u64>, watch: Watch<'_>) -> Result<()> {
        self.pinned.clear();
        let which: Vec<usize> = self
            .indexes
            .range((wave.start / 2) as usize..(wave.end / 2) as usize)
            .filter(|(_, index)| index.decoded + index.aside > 0)
            .map(|(s, _)| *s)
            .collect();
        for some in which.chunks(self.shards.at_once(&which).max(1)) {
            for (s, loaded) in some.iter().zip(self.shards.load_all(some, watch)?) {
                let path = &self.shards.specs[*s].path;
                for (number, block) in [(2 * *s as u64, loaded.main), (2 * *s as u64 + 1, loaded.aside)] {
                    if let Some(block) = block {
                        let (len, place) = (block.len() as u64, self.shards.place(block.len() as u64));
                        let file = OpenFile::new(path.clone(), Body::Memory(block), len, place);
                        self.pinned.insert(number, Arc::new(file));
                    }
                }
            }
        }
        Ok(())
    }

    /// The rows of a run in place, of a mapped file.
    pub fn view(&self, at: Address, rows: u64) -> Result<Option<View>> {
        let s = (at.file / 2) as usize;
        let mapped = at.file.is_multiple_of(2) && self.indexes.get(&s).is_some_and(|index| index.decoded == 0);
        if !mapped || self.shards.io == Io::Pread {
            return Ok(None);
        }
        View::of(&*self.get(at.file)?, at.row, rows, self.shards.row.bytes)
    }

    /// `sample_idx` of every example prepared, in order.
    pub fn samples(&self) -> impl Iterator<Item = i64> {
        self.indexes.values().flat_map(|index| index.samples.iter().copied())
    }

    /// Tokens of an example in the first group that holds it.
    pub fn tokens_anywhere(&self, example: u64) -> u64 {
        (0..self.groups()).find_map(|g| self.spot(g, example).ok()).map_or(0, |spot| u64::from(spot.1.tokens))
    }

    fn spot(&self, group: usize, example: u64) -> Result<(usize, Spot)> {
        check_group(group, self.shards.layers.len())?;
        let s = self.shards.shard_of(example);
        let local = (example - self.shards.firsts[s]) as usize;
        let Some(index) = self.indexes.get(&s) else {
            return Err(Error::new(Kind::Internal, format!("shard {s} was not looked into")));
        };
        match index.spots[group].get(local).copied().flatten() {
            Some(spot) => Ok((s, spot)),
            None => {
                let sample = index.samples.get(local).copied().unwrap_or(-1);
                let held: HashSet<i64> = index
                    .spots
                    .iter()
                    .zip(&self.shards.layers)
                    .filter(|(spots, _)| spots.get(local).copied().flatten().is_some())
                    .map(|(_, layer)| *layer)
                    .collect();
                let mut held: Vec<i64> = held.into_iter().collect();
                held.sort_unstable();
                Err(Error::new(
                    Kind::NotStored,
                    format!(
                        "example {example} (sample_idx {sample}) has no layer {}; it has {held:?}",
                        self.shards.layers[group]
                    ),
                )
                .at(&self.shards.specs[s].path))
            }
        }
    }
}

impl Shards {
    /// Addresses are bytes, rows may lie anywhere.
    fn place(&self, len: u64) -> Place {
        let bytes = self.row.bytes;
        Place { start: 0, end: len, unit: 1, step: bytes as u64, used: bytes, column: 0, swapped: false }
    }
}

impl Layout for Prepared<'_> {
    fn groups(&self) -> usize {
        self.shards.layers.len()
    }

    fn examples(&self) -> u64 {
        *self.shards.firsts.last().unwrap_or(&0)
    }

    fn tokens(&self, group: usize, example: u64) -> u64 {
        self.spot(group, example).map_or(0, |(_, spot)| u64::from(spot.tokens))
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        let example = check_example(example, self.examples())?;
        let (s, spot) = self.spot(group, example)?;
        let token = check_token(token, u64::from(spot.tokens), example)?;
        let row = spot.offset + token * self.shards.row.bytes as u64;
        Ok(Address { file: 2 * s as u64 + u64::from(spot.aside), row })
    }

    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        let example = check_example(example, self.examples())?;
        let (s, spot) = self.spot(group, example)?;
        if spot.tokens > 0 {
            let at = Address { file: 2 * s as u64 + u64::from(spot.aside), row: spot.offset };
            each(Run { at, rows: u64::from(spot.tokens) });
        }
        Ok(())
    }
}

impl Files for Prepared<'_> {
    fn row(&self) -> Row {
        self.shards.row
    }

    fn stride(&self, _file: u64) -> u64 {
        self.shards.row.bytes as u64
    }

    fn get(&self, file: u64) -> Result<Arc<OpenFile>> {
        if let Some(held) = self.pinned.get(&file) {
            return Ok(Arc::clone(held));
        }
        let s = (file / 2) as usize;
        let spec = &self.shards.specs[s];
        if !file.is_multiple_of(2) || self.indexes.get(&s).is_none_or(|index| index.decoded > 0) {
            return Err(Error::new(Kind::Internal, "decoded bytes that are not held").at(&spec.path));
        }
        self.shards.slots.get(file, || {
            let (descriptor, len) = open_regular(&spec.path)?;
            let indexed = self.indexes.get(&s).map_or(len, |index| index.len);
            if len < indexed {
                return Err(Error::new(
                    Kind::Truncated,
                    format!(
                        "was truncated after it was indexed: expected {indexed} bytes, found {len}; reopen the dataset"
                    ),
                )
                .at(&spec.path)
                .byte(len));
            }
            let body = map_or_read(descriptor, &spec.path, len, self.shards.io)?;
            Ok(OpenFile::new(spec.path.clone(), body, len, self.shards.place(len)))
        })
    }
}

impl Shards {
    /// What a row is.
    pub fn row(&self) -> Row {
        self.row
    }

    /// Number of examples.
    pub fn examples(&self) -> u64 {
        *self.firsts.last().unwrap_or(&0)
    }

    /// Number of groups.
    pub fn groups(&self) -> usize {
        self.layers.len()
    }
}
