//! Encoded chunks, decoded one at a time.
//!
//! The `zarrs` crate parses the metadata; this module opens files and decompresses bytes, within the limits of a chunk's shape
//! (see `chain`). It holds no lock and needs no other thread, so a child forked while another thread decodes can decode as
//! its parent does. A panic of a codec becomes an error.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use serde_json::Value;
use zarrs::array::{Array, ArrayMetadata, ArrayMetadataV2, ArrayMetadataV3};
use zarrs::storage::store::MemoryStore;

pub use super::chain::Elements;
use super::chain::{Chain, ShardCodec, assemble, decoded_size};
use super::failing::Undecodable;
use super::file::{ChunkFile, StoredUnit};
use super::index::{Entries, Numbers};
use super::meta::index_numbers;
use crate::codec::cache::Cache;
use crate::codec::planes::BlockRow;
use crate::error::{Error, Kind, Result, in_one_line};
use crate::location::Location;
use crate::memory;
use crate::number::to_usize;
use crate::source::fetch::{SCRATCH, WantedRange, fetch};
use crate::source::{Access, ByteRange, Source, Store, Version, Wishes};
use crate::threads::{self, Stop, Watch};

/// Bytes of shard indexes that an array caches.
const INDEX_MEMORY: u64 = 32 << 20;

/// Maximum bytes of shard indexes for chunks that are read together, and bytes of one index entry.
const INDEXES: u64 = 64 << 20;
const ENTRY: u64 = 16;

/// Bytes of a crc32c.
const CRC: u64 = 4;
/// Bytes read at once to compute a checksum.
const CHECKED_AT_ONCE: u64 = 256 << 10;

/// A decoder of an array's chunks.
pub trait Decode: std::fmt::Debug + Send + Sync {
    /// A chunk's bytes in C order and native byte order, exactly `len`; `None` if the chunk is missing. `location` is for
    /// errors.
    fn chunk(&self, indices: &[u64], len: u64, location: &Location) -> Result<Option<Vec<u8>>>;

    /// Several chunks of a slow store, in order; read together if the decoder supports it.
    fn chunks(
        &self,
        which: &[(&[u64], &Location)],
        len: u64,
        _wishes: &Wishes,
        watch: Watch<'_>,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let each =
            which.iter().map(
                |(indices, location)| {
                    if watch() { Err(threads::interrupted()) } else { self.chunk(indices, len, location) }
                },
            );
        each.collect()
    }

    /// The array, if its chunks are inner chunks of shards.
    fn sharded(&self) -> Option<&CodedArray> {
        None
    }

    /// The file with a chunk, for errors; `None` if the decoder does not know it.
    fn file_of(&self, _indices: &[u64]) -> Option<Location> {
        None
    }
}

/// A shard's number in the grid, and its version.
type IndexKey = (u64, Version);

/// An array whose codecs this crate supports.
#[derive(Debug)]
pub struct CodedArray {
    /// Whether chunks are the inner chunks of shards.
    inner: bool,
    /// The array, or the reason why it cannot be read.
    array: Result<ParsedArray>,
    store: Arc<dyn Store>,
    indexes: Cache<Entries, IndexKey>,
    /// The form of inner chunks, if they are plain numbers.
    plain: Option<Numbers>,
    /// Whether rows of an inner chunk can be decoded without the others.
    rows_apart: bool,
}

#[derive(Debug)]
struct ParsedArray {
    folder: Location,
    array: Array<MemoryStore>,
    chain: Chain,
    chunk: Vec<u64>,
}

impl ParsedArray {
    fn new(folder: &Location, metadata: &[u8]) -> Result<ParsedArray> {
        let unsupported = |e: &dyn std::fmt::Display| {
            Error::new(Kind::Unsupported, format!("zarrs cannot open this array: {e}")).at(folder)
        };
        guarded(folder, || {
            let value: serde_json::Value = serde_json::from_slice(metadata).map_err(|e| unsupported(&e))?;
            let version = value.get("zarr_format").and_then(serde_json::Value::as_u64);
            let metadata = if version == Some(3) {
                let v3: ArrayMetadataV3 = serde_json::from_value(value).map_err(|e| unsupported(&e))?;
                if let Some((name, _)) = v3.additional_fields.iter().find(|(_, field)| field.must_understand()) {
                    return Err(unsupported(&format!("field '{name}' is unknown and must be understood")));
                }
                if !v3.storage_transformers.is_empty() {
                    return Err(unsupported(&"storage transformers are unsupported"));
                }
                ArrayMetadata::V3(v3)
            } else {
                let v2: ArrayMetadataV2 = serde_json::from_value(value).map_err(|e| unsupported(&e))?;
                ArrayMetadata::V2(v2)
            };
            let array =
                Array::new_with_metadata(Arc::new(MemoryStore::new()), "/", metadata).map_err(|e| unsupported(&e))?;
            let chunk = array.chunk_shape(&vec![0; array.shape().len()]).map_err(|e| unsupported(&e))?;
            let chain = Chain::new(&array.codecs(), &chunk, array.data_type(), array.fill_value())
                .map_err(|e| unsupported(&e.text))?;
            let chunk = chunk.iter().map(|n| n.get()).collect();
            Ok(ParsedArray { folder: folder.clone(), array, chain, chunk })
        })
    }

    fn location(&self, indices: &[u64]) -> Location {
        self.folder.join(self.array.chunk_key(indices).as_str())
    }

    /// A whole chunk or shard.
    #[expect(
        clippy::disallowed_methods,
        reason = "opening a near file takes a moment, and far ones are opened together"
    )]
    fn chunk(&self, store: &dyn Store, indices: &[u64]) -> Result<Option<Elements>> {
        let location = self.location(indices);
        let file = ChunkFile::open(store.open(&location, Access::Once, Stop::never()), ChunkFile::one_unit)?;
        file.unit(0)?.map(|unit| decode_stored(unit, &self.chain, &location)).transpose()
    }

    /// Several chunks, in order: first opens all files together, then reads all indexes, then all units, and decodes each
    /// as it arrives.
    fn chunks(
        &self,
        store: &dyn Store,
        shards: Option<ArrayShards<'_>>,
        which: &[&[u64]],
        wishes: &Wishes,
        watch: Watch<'_>,
    ) -> Result<Vec<Option<Elements>>> {
        let mut numbers: BTreeMap<Vec<u64>, usize> = BTreeMap::new();
        let mut outers = vec![];
        let file_of: Vec<usize> = which
            .iter()
            .map(|indices| {
                let outer = shards.as_ref().map_or_else(|| indices.to_vec(), |shards| shards.codec.outer(indices));
                *numbers.entry(outer).or_insert_with_key(|outer| {
                    outers.push(outer.clone());
                    outers.len() - 1
                })
            })
            .collect();
        let locations: Vec<Location> = outers.iter().map(|outer| self.location(outer)).collect();
        let opened = store.open_together(&locations.iter().collect::<Vec<_>>(), Access::Once, &mut *watch)?.into_iter();
        let files: Vec<ChunkFile> = match &shards {
            None => opened.map(|source| ChunkFile::open(source, ChunkFile::one_unit)).collect::<Result<_>>()?,
            Some(shards) => shards.open(self, opened.zip(outers).collect(), wishes, &mut *watch)?,
        };
        let chain = shards.as_ref().map_or(&self.chain, |shards| &shards.codec.inner);
        let mut made: Vec<Option<Elements>> = which.iter().map(|_| None).collect();
        let mut wanted = vec![];
        for ((indices, file), made) in which.iter().zip(&file_of).zip(&mut made) {
            let unit = shards.as_ref().map_or(0, |shards| shards.codec.number(indices));
            let Some(StoredUnit { offset, len, .. }) = files[*file].unit(unit)? else { continue };
            chain.check_encoded(len).map_err(|e| cannot_decode(&locations[*file], e))?;
            let at = (&locations[*file], shards.is_some().then_some(offset));
            wanted.push(WantedRange { source: *file, range: ByteRange { at: offset, len }, to: (at, made) });
        }
        let sources: Vec<Option<&dyn Source>> = files.iter().map(|file| file.source().map(|s| &**s)).collect();
        type To<'a> = ((&'a Location, Option<u64>), &'a mut Option<Elements>);
        let decode = |((location, offset), made): To<'_>, bytes: &[u8]| {
            let decoded = decode_unit(bytes.into(), chain, location);
            *made = Some(decoded.map_err(|e| offset.map_or_else(|| e.clone(), |offset| e.clone().byte(offset)))?);
            Ok(())
        };
        fetch(&sources, wanted, wishes, &decode, watch)?;
        Ok(made)
    }
}

/// An opened shard, or `None`, and its indices.
type OpenedShard = (Result<Box<dyn Source>>, Vec<u64>);

/// The shards of an array whose chunks are the shards' inner chunks, with the cached indexes.
#[derive(Clone, Copy)]
struct ArrayShards<'a> {
    codec: &'a ShardCodec,
    indexes: &'a Cache<Entries, IndexKey>,
}

impl ArrayShards<'_> {
    /// The key of a shard's index.
    fn key(&self, parsed: &ParsedArray, outer: &[u64], version: &Version) -> IndexKey {
        let grid = parsed.array.chunk_grid_shape();
        let file = outer.iter().zip(grid).fold(0u64, |n, (i, g)| n.wrapping_mul(*g).wrapping_add(*i));
        (file, version.clone())
    }

    fn parse(&self, raw: Vec<u8>, location: &Location) -> Result<Entries> {
        let entries = guarded(location, || self.codec.index.parse(raw).map_err(|e| cannot_decode(location, e)))?;
        Ok(Entries(entries.into()))
    }

    /// The index of a shard, cached or read now.
    fn index(
        &self,
        parsed: &ParsedArray,
        outer: &[u64],
        source: &dyn Source,
        version: Option<&Version>,
    ) -> Result<Arc<Entries>> {
        let read = || {
            let (_, raw) = self.codec.index.read(source, Kind::Format)?;
            self.parse(raw, source.location())
        };
        let Some(version) = version else { return read().map(Arc::new) };
        let key = self.key(parsed, outer, version);
        let index = self.indexes.get_or_load(key, |_| true, || read().map(Some))?;
        index.ok_or_else(|| Error::new(Kind::Internal, "an index that was not read").at(source.location()))
    }

    /// Shards opened together, with their indexes, cached or read together.
    fn open(
        &self,
        parsed: &ParsedArray,
        opened: Vec<OpenedShard>,
        wishes: &Wishes,
        watch: Watch<'_>,
    ) -> Result<Vec<ChunkFile>> {
        let mut found: Vec<Option<Arc<Entries>>> = vec![];
        let mut keys = vec![];
        for (source, outer) in &opened {
            let version = source.as_ref().ok().and_then(|source| source.version());
            let key = version.map(|version| self.key(parsed, outer, &version));
            found.push(key.clone().and_then(|key| self.indexes.get(key)));
            keys.push(key);
        }
        let sources: Vec<Option<&dyn Source>> = opened.iter().map(|(source, _)| source.as_deref().ok()).collect();
        let mut wanted = vec![];
        for (number, (source, found)) in sources.iter().zip(&mut found).enumerate() {
            if let (Some(source), None) = (source, &found) {
                let range = self.codec.index.range(*source, Kind::Format)?;
                wanted.push(WantedRange { source: number, range, to: (source.location(), found) });
            }
        }
        let parse = |(location, found): (&Location, &mut Option<Arc<Entries>>), bytes: &[u8]| {
            *found = Some(Arc::new(self.parse(memory::copied(bytes)?, location)?));
            Ok(())
        };
        fetch(&sources, wanted, wishes, &parse, watch)?;
        let files = opened.into_iter().zip(found).zip(keys).map(|(((source, _), found), key)| {
            if let (Some(key), Some(entries)) = (key, &found) {
                self.indexes.put(key, entries);
            }
            ChunkFile::open(source, |source, _| {
                found.ok_or_else(|| Error::new(Kind::Internal, "an index that was not read").at(source.location()))
            })
        });
        files.collect()
    }
}

impl CodedArray {
    /// The array in a folder of a store, from metadata already read; `inner` selects the inner chunks of shards as chunks.
    pub fn of(store: Arc<dyn Store>, folder: &Location, metadata: &[u8], inner: bool) -> CodedArray {
        let array = ParsedArray::new(folder, metadata);
        let shard = array.as_ref().ok().and_then(|parsed| parsed.chain.shard()).filter(|_| inner);
        let plain = shard.and_then(|shard| plain_inner_chunks(metadata, shard));
        let rows_apart = shard.is_some_and(|shard| has_rows_apart(metadata, shard));
        CodedArray { inner, array, store, indexes: Cache::new(INDEX_MEMORY), plain, rows_apart }
    }

    /// Whether rows of an inner chunk can be decoded without the others: [`CodedArray::rows`].
    pub fn has_rows_apart(&self) -> bool {
        self.rows_apart
    }

    /// The form of inner chunks that can be read in place: numbers in C order, optionally followed by a checksum.
    pub fn plain(&self) -> Option<Numbers> {
        self.plain
    }

    /// The number of the shard of an inner chunk in the grid of shards, and the inner chunk's number in it.
    pub fn place_of(&self, indices: &[u64]) -> Result<(u64, usize)> {
        let parsed = self.parsed()?;
        let shards = self.shards(parsed).ok_or_else(|| Error::new(Kind::Internal, "an array without shards"))?;
        let grid = parsed.array.chunk_grid_shape();
        let outer = indices.iter().zip(&shards.codec.counts).map(|(i, n)| i / n);
        let shard = outer.zip(grid).fold(0u64, |n, (i, g)| n.wrapping_mul(*g).wrapping_add(i));
        Ok((shard, shards.codec.number(indices)))
    }

    /// The shard of an inner chunk, from a store that keeps it open.
    #[expect(
        clippy::disallowed_methods,
        reason = "opening a near file takes a moment, and far ones are opened together"
    )]
    pub fn open_shard(&self, store: &dyn Store, indices: &[u64]) -> Result<ChunkFile> {
        let parsed = self.parsed()?;
        let shards = self.shards(parsed).ok_or_else(|| Error::new(Kind::Internal, "an array without shards"))?;
        let outer = shards.codec.outer(indices);
        let index = |source: &dyn Source, version: Option<&Version>| shards.index(parsed, &outer, source, version);
        ChunkFile::open(store.open(&parsed.location(&outer), Access::Kept, Stop::never()), index)
    }

    /// The file of a shard, from an inner chunk; of a chunk, if these are files.
    pub fn location(&self, indices: &[u64]) -> Result<Location> {
        let parsed = self.parsed()?;
        Ok(match self.shards(parsed) {
            Some(shards) => parsed.location(&shards.codec.outer(indices)),
            None => parsed.location(indices),
        })
    }

    /// Its shards, if chunks are the inner chunks of shards.
    fn shards<'a>(&'a self, parsed: &'a ParsedArray) -> Option<ArrayShards<'a>> {
        let codec = parsed.chain.shard().filter(|_| self.inner)?;
        Some(ArrayShards { codec, indexes: &self.indexes })
    }

    /// Number of dimensions.
    pub fn dimensions(&self) -> Result<usize> {
        Ok(self.parsed()?.chunk.len())
    }

    /// Decodes a whole chunk or shard already read.
    pub fn decode(&self, encoded: Vec<u8>) -> Result<Elements> {
        let parsed = self.parsed()?;
        decode_unit(encoded.into(), &parsed.chain, &parsed.folder)
    }

    /// Reads and decodes a stored unit of `len` bytes: an inner chunk of a shard, or a whole chunk.
    pub fn decode_unit(&self, unit: StoredUnit<'_>, len: u64) -> Result<Vec<u8>> {
        let (parsed, location) = (self.parsed()?, unit.source.location());
        let chain = self.shards(parsed).map_or(&parsed.chain, |shards| &shards.codec.inner);
        let decoded = decode_stored(unit, chain, location).and_then(|elements| numbers(elements, len, location));
        decoded.map_err(|e| e.byte(unit.offset))
    }

    /// Reads a stored unit, and calls `each` with the position of each of these numbers of rows and its row; `false` if the unit has no
    /// rows of `row` bytes.
    pub fn rows(
        &self,
        unit: StoredUnit<'_>,
        row: usize,
        numbers: &[u64],
        each: &mut dyn FnMut(usize, BlockRow<'_>),
    ) -> Result<bool> {
        let (parsed, location) = (self.parsed()?, unit.source.location());
        let chain = self.shards(parsed).map_or(&parsed.chain, |shards| &shards.codec.inner);
        let decode = |encoded: &[u8]| {
            guarded(location, || chain.rows(encoded, row, numbers, each).map_err(|e| cannot_decode(location, e)))
        };
        let checked = chain.check_encoded(unit.len).map_err(|e| cannot_decode(location, e));
        checked.and_then(|()| unit.decode(decode)).map_err(|e| e.byte(unit.offset))
    }

    /// Chunks that are read together: their shards' indexes fit in [`INDEXES`].
    fn groups<'i, 'a>(&self, parsed: &ParsedArray, mut indices: &'i [&'a [u64]]) -> Vec<&'i [&'a [u64]]> {
        let Some(ArrayShards { codec, .. }) = self.shards(parsed) else { return vec![indices] };
        let entries = codec.counts.iter().fold(1u64, |n, count| n.saturating_mul(*count));
        let most = usize::try_from(INDEXES / entries.saturating_mul(ENTRY).max(1)).unwrap_or(usize::MAX).max(1);
        let mut groups = vec![];
        while !indices.is_empty() {
            let mut shards = BTreeSet::new();
            let fits = |each: &&&[u64]| {
                shards.insert(codec.outer(each));
                shards.len() <= most
            };
            let (some, rest) = indices.split_at(indices.iter().take_while(fits).count());
            groups.push(some);
            indices = rest;
        }
        groups
    }

    fn parsed(&self) -> Result<&ParsedArray> {
        self.array.as_ref().map_err(Clone::clone)
    }
}

impl Decode for CodedArray {
    fn sharded(&self) -> Option<&CodedArray> {
        self.shards(self.array.as_ref().ok()?).map(|_| self)
    }

    fn file_of(&self, indices: &[u64]) -> Option<Location> {
        self.location(indices).ok()
    }

    fn chunk(&self, indices: &[u64], len: u64, location: &Location) -> Result<Option<Vec<u8>>> {
        let parsed = self.parsed()?;
        if let Some(shards) = self.shards(parsed) {
            let shard = self.open_shard(&*self.store, indices)?;
            let unit = shard.unit(shards.codec.number(indices))?;
            return unit.map(|unit| self.decode_unit(unit, len)).transpose();
        }
        parsed.chunk(&*self.store, indices)?.map(|elements| numbers(elements, len, location)).transpose()
    }

    fn chunks(
        &self,
        which: &[(&[u64], &Location)],
        len: u64,
        wishes: &Wishes,
        watch: Watch<'_>,
    ) -> Result<Vec<Option<Vec<u8>>>> {
        let parsed = self.parsed()?;
        let indices: Vec<&[u64]> = which.iter().map(|(indices, _)| *indices).collect();
        let mut found = vec![];
        for some in self.groups(parsed, &indices) {
            found.extend(parsed.chunks(&*self.store, self.shards(parsed), some, wishes, &mut *watch)?);
        }
        let each = found.into_iter().zip(which);
        each.map(|(made, (_, location))| made.map(|made| numbers(made, len, location)).transpose()).collect()
    }
}

/// The codecs of inner chunks.
fn inner_codecs(metadata: &[u8]) -> Option<Vec<Value>> {
    let value: Value = serde_json::from_slice(metadata).ok()?;
    value.get("codecs")?.as_array()?.first()?.get("configuration")?.get("codecs")?.as_array().cloned()
}

/// Whether inner chunks are numbers in the byte order of this machine in the codec `actshard.planes`, with at most a checksum.
fn has_rows_apart(metadata: &[u8], shard: &ShardCodec) -> bool {
    let Some(mut codecs) = inner_codecs(metadata) else { return false };
    if !codecs.get(1).and_then(|codec| codec.get("name")).is_some_and(|name| name == "actshard.planes") {
        return false;
    }
    codecs.remove(1);
    let form = index_numbers(&codecs).filter(|_| shard.inner.element_size().is_some());
    form.is_some_and(|form| form.big_endian == cfg!(target_endian = "big"))
}

/// The form of inner chunks, if they are plain numbers with at most a checksum.
fn plain_inner_chunks(metadata: &[u8], shard: &ShardCodec) -> Option<Numbers> {
    let codecs = inner_codecs(metadata)?;
    // Without a byte order, zarrs decides whether numbers of several bytes are an error.
    let ordered = codecs.first()?.pointer("/configuration/endian").is_some() || shard.inner.element_size() == Some(1);
    index_numbers(&codecs).filter(|_| ordered && shard.inner.element_size().is_some())
}

/// Fails unless an inner chunk that is read in place has its length and, if it has one, the right checksum. Reads it once,
/// block by block.
pub fn check_plain(unit: StoredUnit<'_>, len: u64, checked: bool) -> Result<()> {
    let bad = |why: String| cannot_decode(unit.source.location(), why.into()).byte(unit.offset);
    let expected = len + if checked { CRC } else { 0 };
    if unit.len != expected {
        return Err(bad(format!("expected {expected} bytes, found {}", unit.len)));
    }
    if !checked {
        return Ok(());
    }
    let (mut crc, mut at) = (0, 0);
    while at < len {
        let n = CHECKED_AT_ONCE.min(len - at);
        crc = crc32c::crc32c_append(crc, &unit.part(to_usize(at), to_usize(n))?);
        at += n;
    }
    let stored = unit.part(to_usize(len), to_usize(CRC))?;
    let stored = stored.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes));
    if stored != crc {
        return Err(bad(format!("expected the checksum (crc32c) {stored:08x}, found {crc:08x}")));
    }
    Ok(())
}

fn numbers(made: Elements, len: u64, location: &Location) -> Result<Vec<u8>> {
    match made {
        Elements::Fixed(bytes) => of_length(bytes, len, location),
        Elements::Variable(_) => Err(cannot_decode(location, "expected numbers, found strings".into())),
    }
}

/// Reads and decodes a stored unit.
fn decode_stored(unit: StoredUnit<'_>, chain: &Chain, location: &Location) -> Result<Elements> {
    chain.check_encoded(unit.len).map_err(|e| cannot_decode(location, e))?;
    unit.decode(|encoded| decode_unit(encoded.into(), chain, location))
}

fn decode_unit(encoded: Cow<'_, [u8]>, chain: &Chain, location: &Location) -> Result<Elements> {
    guarded(location, || chain.decode(encoded).map_err(|e| cannot_decode(location, e)))
}

/// Checks the length of decoded bytes.
pub fn of_length(bytes: Vec<u8>, len: u64, location: &Location) -> Result<Vec<u8>> {
    if bytes.len() as u64 == len {
        return Ok(bytes);
    }
    Err(Error::new(Kind::Format, format!("expected a chunk of {len} bytes, decoded {}", bytes.len())).at(location))
}

/// Why an array's codecs are unsupported; `None` if they are supported.
pub fn problem(folder: &Location, metadata: &[u8]) -> Option<String> {
    ParsedArray::new(folder, metadata).err().map(|e| in_one_line(&e.detail))
}

/// Bytes of a string in addition to its text: its place in a list, and its allocation.
const STRING_BYTES: usize = 48;

/// Reads a whole array of at most `most` bytes, as small arrays next to the activations are. Looks
/// only for the chunks listed in `there`; the others are missing and have the fill value.
pub fn read_whole(
    store: &dyn Store,
    folder: &Location,
    metadata: &[u8],
    mut there: Vec<Vec<u64>>,
    most: u64,
    watch: Watch<'_>,
) -> Result<Elements> {
    let parsed = ParsedArray::new(folder, metadata)?;
    let (shape, fill) = (parsed.array.shape(), parsed.array.fill_value().as_ne_bytes());
    let fixed = parsed.array.data_type().fixed_size();
    // Strings that are not stored are copies of the fill value.
    let item = fixed.unwrap_or_else(|| STRING_BYTES + fill.len()) as u64;
    let bytes = shape.iter().try_fold(item, |n, d| n.checked_mul(*d));
    if bytes.is_none_or(|n| n > most) {
        return Err(Error::new(Kind::Format, format!("shape {shape:?} is too large to read")).at(folder));
    }
    // Files of an older, larger array may be left over. A chunk that is listed twice is read once.
    let (grid, mut seen) = (parsed.array.chunk_grid_shape(), BTreeSet::new());
    let is_inside = |indices: &[u64]| indices.len() == grid.len() && indices.iter().zip(grid).all(|(i, n)| i < n);
    there.retain(|indices| is_inside(indices) && seen.insert(indices.clone()));
    let chunk_bytes = parsed.chunk.iter().fold(fixed.unwrap_or(1) as u64, |n, d| n.saturating_mul(*d)).max(1);
    let together = usize::try_from(SCRATCH / chunk_bytes).unwrap_or(usize::MAX).max(1);
    // From a slow store, in groups of its preferred size.
    let (mut coming, mut fetched) =
        (store.wishes().map(|_| there.clone()).unwrap_or_default().into_iter(), BTreeMap::new());
    let mut chunk = |indices: &[u64]| -> Result<Option<Elements>> {
        let Some(wishes) = store.wishes() else { return parsed.chunk(store, indices) };
        while !fetched.contains_key(indices) && coming.len() > 0 {
            let some: Vec<Vec<u64>> = coming.by_ref().take(wishes.parallel.clamp(1, together)).collect();
            let each: Vec<&[u64]> = some.iter().map(Vec::as_slice).collect();
            let chunks = parsed.chunks(store, None, &each, &wishes, &mut *watch)?;
            fetched.extend(some.into_iter().zip(chunks));
        }
        Ok(fetched.remove(indices).flatten())
    };
    let mut failed = None;
    let made = assemble(shape, &parsed.chunk, fill, fixed.is_some(), there, |indices| {
        chunk(indices).map_err(|error| {
            failed = Some(error);
            String::new().into()
        })
    });
    made.map_err(|what| failed.unwrap_or_else(|| cannot_decode(folder, what)))
}

/// Fails unless compressed data ("gzip", "zlib", "bz2" or "zstd") decode to at most `limit` bytes. For libraries whose decoders
/// have no limit.
pub fn check_decoded_size(codec: &str, data: &[u8], limit: u64, location: &Location) -> Result<()> {
    guarded(location, || decoded_size(codec, data, limit).map(|_| ()).map_err(|e| cannot_decode(location, e)))
}

fn cannot_decode(location: &Location, why: Undecodable) -> Error {
    let mut error = Error::new(why.kind, format!("cannot decode this chunk: {}", why.text)).at(location);
    error.finding = why.finding;
    error
}

/// Runs codecs, which may panic on untrusted bytes.
pub(crate) fn guarded<T>(location: &Location, work: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        Err(Error::new(Kind::Format, "cannot decode this: the codec failed on these bytes (a panic)").at(location))
    })
}
