//! Indexed shards as a layout with files.
//!
//! A gather reads rows of one type at a time, so rows of each type belong to separate virtual files. With `n` shards, file
//! `c * 2 n + 2 s + a` has the rows of type `c` ([`TYPES`]) in shard `s`: those in the shard's own bytes (`a` = 0) or in the
//! byte-swapped and reordered copies (`a` = 1). Addresses are bytes.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;

use super::load::Shards;
use super::spec::ShardSpec;
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::{Body, OpenFile, View};
use crate::files::shards::index::{ShardIndex, Spot, TYPES};
use crate::layout::row::{Place, Row};
use crate::layout::{Address, Layout, Run, check_example, check_group, check_token};
use crate::location::Location;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::source::mmap::Paging;
use crate::source::{Access, Source, Wishes};
use crate::threads::{Stop, Watch};

/// Indexed shards, some with their decoded bytes.
pub struct Prepared<'a> {
    shards: &'a Shards,
    indexes: BTreeMap<usize, Arc<ShardIndex>>,
    pinned: HashMap<u64, Arc<Buffer>>,
    /// The type whose rows are being read, as an index in [`TYPES`].
    class: usize,
}

impl Shards {
    /// Indexes the shards of these examples, or all shards; unknown ones in parallel.
    pub fn prepare(&self, examples: Option<&mut dyn Iterator<Item = i64>>, watch: Watch<'_>) -> Result<Prepared<'_>> {
        let mut wanted: Vec<usize> = match examples {
            None => (0..self.specs().len()).collect(),
            Some(examples) => {
                let mut found = vec![];
                for example in examples {
                    let s = self.shard_of(check_example(example, self.examples())?);
                    if found.last() != Some(&s) {
                        found.push(s);
                    }
                }
                found
            }
        };
        wanted.sort_unstable();
        wanted.dedup();
        let mut indexes: BTreeMap<usize, Arc<ShardIndex>> = BTreeMap::new();
        let mut unknown = vec![];
        for s in wanted {
            match self.known(s) {
                Some((index, _)) => {
                    indexes.insert(s, index);
                }
                None => unknown.push(s),
            }
        }
        self.ask_claims(&unknown, &mut *watch)?;
        for some in unknown.chunks(self.at_once(&unknown)) {
            for (s, loaded) in some.iter().zip(self.load_all(some, watch)?) {
                indexes.insert(*s, Arc::clone(&loaded.index));
            }
        }
        Ok(Prepared::new(self, indexes))
    }
}

impl<'a> Prepared<'a> {
    fn new(shards: &'a Shards, indexes: BTreeMap<usize, Arc<ShardIndex>>) -> Prepared<'a> {
        Prepared { shards, indexes, pinned: HashMap::new(), class: shards.class() }
    }

    /// Types of arrays in the prepared shards, as indices in [`TYPES`].
    pub fn classes(&self) -> Vec<usize> {
        let types = self.indexes.values().fold(0, |all, index| all | index.types());
        (0..TYPES.len()).filter(|class| types & 1 << class != 0).collect()
    }

    /// Selects the type of the rows to read. Returns the type.
    pub fn select(&mut self, class: usize) -> DType {
        self.class = class;
        TYPES[class]
    }

    /// The files of a wave with rows of the selected type.
    pub fn only(&self, wave: &Range<u64>) -> Range<u64> {
        let first = self.class as u64 * self.shards.files_per_class();
        first + wave.start..first + wave.end
    }

    /// Fails if rows (groups and examples) have another type than the dataset's: the caller must name a dtype to read them.
    pub fn check_types(&self, rows: impl Iterator<Item = (i64, i64)>) -> Result<()> {
        for (group, example) in rows {
            let group = usize::try_from(group).unwrap_or(usize::MAX);
            let example = check_example(example, self.examples())?;
            if let Ok((_, spot)) = self.spot(group, example) {
                self.check_type(example, spot)?;
            }
        }
        Ok(())
    }

    /// The type of an example's rows.
    pub fn type_of(&self, group: usize, example: i64) -> Result<DType> {
        let (_, spot) = self.spot(group, check_example(example, self.examples())?)?;
        Ok(TYPES[usize::from(spot.class)])
    }

    fn check_type(&self, example: u64, spot: Spot) -> Result<()> {
        if usize::from(spot.class) == self.shards.class() || spot.tokens == 0 {
            return Ok(());
        }
        let name = |class: usize| TYPES[class].numpy_name().unwrap_or(TYPES[class].name());
        let s = self.shards.shard_of(example);
        Err(Error::new(
            Kind::DType,
            format!(
                "example {example} is stored as {}, the dataset's first array as {}: read with dtype=, such as dtype=\"float32\"",
                name(usize::from(spot.class)),
                name(self.shards.class())
            ),
        )
        .at(&self.shards.specs()[s].location))
    }

    /// Divides the prepared shards into ranges of files whose decoded bytes fit the budget.
    pub fn waves(&self) -> Vec<Range<u64>> {
        let mut waves: Vec<Range<u64>> = vec![];
        let mut held = 0u64;
        for (s, index) in &self.indexes {
            let (first, bytes) = (2 * *s as u64, index.decoded + index.aside);
            match waves.last_mut() {
                Some(wave) if held + bytes <= self.shards.decoded_budget() => {
                    wave.end = first + 2;
                    held += bytes;
                }
                _ => {
                    waves.push(first..first + 2);
                    held = bytes;
                }
            }
        }
        // In reverse, because the shards indexed last are still cached.
        waves.reverse();
        waves
    }

    /// Holds the decoded bytes of a wave's shards, and drops those of others.
    pub fn hold(&mut self, wave: &Range<u64>, watch: Watch<'_>) -> Result<()> {
        self.pinned.clear();
        let which: Vec<usize> = self
            .indexes
            .range((wave.start / 2) as usize..(wave.end / 2) as usize)
            .filter(|(_, index)| index.decoded + index.aside > 0)
            .map(|(s, _)| *s)
            .collect();
        for some in which.chunks(self.shards.at_once(&which).max(1)) {
            for (s, loaded) in some.iter().zip(self.shards.load_all(some, watch)?) {
                let first = 2 * *s as u64;
                self.pinned.extend(loaded.main.iter().map(|main| (first, Arc::clone(main))));
                self.pinned.extend(loaded.aside.iter().map(|aside| (first + 1, Arc::clone(aside))));
            }
        }
        Ok(())
    }

    /// A view of the rows of a run, if the shard is mapped.
    #[expect(clippy::disallowed_methods, reason = "a view is of a near file, which opens in a moment")]
    pub fn view(&self, at: Address, rows: u64) -> Result<Option<View>> {
        let (s, aside) = self.shard_at(at.file);
        let mapped = !aside && self.indexes.get(&s).is_some_and(|index| index.decoded == 0);
        if !mapped || !self.shards.maps {
            return Ok(None);
        }
        View::of(&*self.get(at.file, Stop::never())?, at.row, rows, self.row().bytes, Paging::Hinted)
    }

    /// `sample_idx` of every prepared example, in order.
    pub fn samples(&self) -> impl Iterator<Item = i64> {
        self.indexes.values().flat_map(|index| index.samples.iter().copied())
    }

    /// Tokens of an example in the first group that has it.
    pub fn tokens_anywhere(&self, example: u64) -> u64 {
        (0..self.groups()).find_map(|g| self.find(g, example)).map_or(0, |spot| u64::from(spot.tokens))
    }

    fn shard_at(&self, file: u64) -> (usize, bool) {
        let file = file % self.shards.files_per_class();
        ((file / 2) as usize, !file.is_multiple_of(2))
    }

    fn find(&self, group: usize, example: u64) -> Option<Spot> {
        let s = self.shards.shard_of(example);
        self.indexes.get(&s)?.spot(group, to_usize(example - self.shards.first(s)))
    }

    fn spot(&self, group: usize, example: u64) -> Result<(usize, Spot)> {
        check_group(group, self.groups())?;
        let s = self.shards.shard_of(example);
        let local = to_usize(example - self.shards.first(s));
        let Some(index) = self.indexes.get(&s) else {
            // Indices are read twice: to prepare their shards, and to read their rows.
            return Err(Error::new(
                Kind::Argument,
                format!(
                    "example {example}: the array of indices changed during the read; do not write to it meanwhile"
                ),
            ));
        };
        match index.spot(group, local) {
            Some(spot) => Ok((s, spot)),
            None => {
                let sample = index.samples.get(local).copied().unwrap_or(-1);
                let layers = self.shards.layers();
                let has = |(g, layer): (usize, &i64)| index.spot(g, local).map(|_| *layer);
                let mut held: Vec<i64> = layers.iter().enumerate().filter_map(has).collect();
                held.sort_unstable();
                Err(Error::new(
                    Kind::NotStored,
                    format!("example {example} (sample_idx {sample}) has no layer {}; it has {held:?}", layers[group]),
                )
                .at(&self.shards.specs()[s].location))
            }
        }
    }

    fn address(&self, s: usize, spot: Spot, token: u64) -> Address {
        let class = usize::from(spot.class);
        let file = class as u64 * self.shards.files_per_class() + 2 * s as u64 + u64::from(spot.aside);
        Address { file, row: spot.offset + token * self.shards.row_of(class).bytes as u64 }
    }

    /// Rows may begin at any byte.
    fn place(&self, class: usize, len: u64) -> Place {
        let bytes = self.shards.row_of(class).bytes;
        Place { start: 0, end: len, unit: 1, step: bytes as u64, used: bytes, column: 0, swapped: false }
    }
}

impl Layout for Prepared<'_> {
    fn groups(&self) -> usize {
        self.shards.groups()
    }

    fn examples(&self) -> u64 {
        self.shards.examples()
    }

    fn tokens(&self, group: usize, example: u64) -> u64 {
        self.find(group, example).map_or(0, |spot| u64::from(spot.tokens))
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        let example = check_example(example, self.examples())?;
        let (s, spot) = self.spot(group, example)?;
        let token = check_token(token, u64::from(spot.tokens), example)?;
        Ok(self.address(s, spot, token))
    }

    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        let example = check_example(example, self.examples())?;
        let (s, spot) = self.spot(group, example)?;
        if spot.tokens > 0 {
            each(Run { at: self.address(s, spot, 0), rows: u64::from(spot.tokens) });
        }
        Ok(())
    }
}

impl Files for Prepared<'_> {
    fn row(&self) -> Row {
        self.shards.row_of(self.class)
    }

    fn stride(&self, file: u64) -> u64 {
        self.shards.row_of(to_usize(file / self.shards.files_per_class())).bytes as u64
    }

    fn get(&self, file: u64, stop: &Stop) -> Result<Arc<OpenFile>> {
        match self.held(file) {
            Some(held) => Ok(held),
            None => {
                let spec = self.in_place(file)?;
                let open = || {
                    let source = self.shards.store.open(&spec.location, Access::Kept, stop);
                    self.open(file, source, &mut || stop.is_set())
                };
                self.shards.slots.get(file, open)
            }
        }
    }

    fn open_many(&self, files: &[u64], watch: Watch<'_>) -> Result<Vec<Arc<OpenFile>>> {
        let mut found: Vec<Option<Arc<OpenFile>>> =
            files.iter().map(|file| self.held(*file).or_else(|| self.shards.slots.kept(*file))).collect();
        let lacking: Vec<usize> = (0..files.len()).filter(|i| found[*i].is_none()).collect();
        let specs: Vec<&ShardSpec> = lacking.iter().map(|i| self.in_place(files[*i])).collect::<Result<_>>()?;
        let locations: Vec<&Location> = specs.into_iter().map(|spec| &spec.location).collect();
        let opened = self.shards.store.open_together(&locations, Access::Kept, &mut *watch)?;
        for (i, source) in lacking.into_iter().zip(opened) {
            found[i] = Some(self.shards.slots.get(files[i], || self.open(files[i], source, &mut *watch))?);
        }
        Ok(found.into_iter().flatten().collect())
    }

    fn wishes(&self) -> Option<Wishes> {
        self.shards.wishes.and_then(|_| self.shards.store.wishes())
    }
}

impl Prepared<'_> {
    /// A file with its decoded bytes.
    fn held(&self, file: u64) -> Option<Arc<OpenFile>> {
        let (s, aside) = self.shard_at(file);
        let block = self.pinned.get(&(2 * s as u64 + u64::from(aside)))?;
        let location = self.shards.specs()[s].location.clone();
        let place = self.place(self.class_of(file), block.len() as u64);
        Some(Arc::new(OpenFile::new(Body::Decoded(location, Arc::clone(block)), place)))
    }

    fn class_of(&self, file: u64) -> usize {
        to_usize(file / self.shards.files_per_class())
    }

    /// The shard of a file whose rows are read from the stored file.
    fn in_place(&self, file: u64) -> Result<&ShardSpec> {
        let (s, aside) = self.shard_at(file);
        let spec = &self.shards.specs()[s];
        match self.indexes.get(&s) {
            Some(index) if !aside && index.decoded == 0 => Ok(spec),
            _ => Err(Error::new(Kind::Internal, "decoded bytes that are not held").at(&spec.location)),
        }
    }

    /// A newly opened shard whose rows are read from the stored file.
    fn open(&self, file: u64, opened: Result<Box<dyn Source>>, watch: Watch<'_>) -> Result<OpenFile> {
        let (s, _) = self.shard_at(file);
        let source = opened?;
        let (len, expected) = (source.size(), self.indexes.get(&s).map_or(0, |index| index.len));
        if len < expected {
            return Err(Error::new(
                Kind::Truncated,
                format!(
                    "was truncated after it was indexed: expected {expected} bytes, found {len}; reopen the dataset"
                ),
            )
            .at(source.location())
            .byte(len));
        }
        self.shards.check_same(s, &*source, watch)?;
        Ok(OpenFile::new(Body::Stored(source), self.place(self.class_of(file), len)))
    }
}
