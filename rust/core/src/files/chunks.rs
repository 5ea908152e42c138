//! Many small files with computed names: the chunks of 4-D arrays `(examples, groups, tokens, width)`.
//!
//! A store of a million chunks opens as fast as one of ten, because nothing is listed: a chunk's name follows from its
//! number. Plain chunks (C order, no compression) are files like any other; only the requested rows are read. A missing
//! chunk has the fill value, unless the writer stores every chunk. Other chunks are decoded whole by [`coded`](crate::arrays::coded), and cached within a memory
//! budget.
//!
//! Inner chunks of local shards that contain plain numbers are read in place as well. If a checksum follows them, it is
//! compared before the first row is read, once for each version of the shard's file and each time it is opened; later reads
//! of the same open file trust it, as they would trust a decoded chunk in the cache. All local shards stay open.
//!
//! Local chunk files are read, not mapped: mapping and unmapping a megabyte costs more than copying it. Only
//! [`ChunkFiles::view`] maps them, because the caller requests a view. Shards are large and few: those whose chunks are read in
//! place are mapped, if the caller allows it.
//!
//! Sources of the layout: Zarr v2 ("Storage specification 2.0", Chunks) and v3 (regular grid). Edge chunks are stored in
//! full size in both.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::SystemTime;

use crate::arrays::coded::{CodedArray, Decode, check_plain};
use crate::arrays::file::{ChunkFile, StoredUnit};
use crate::arrays::index::Numbers;
use crate::arrays::key::{UNCHECKED, UnitKey, WHOLE, new_array};
use crate::arrays::naming::Naming;
use crate::codec::cache::Cache;
use crate::codec::planes::BlockRow;
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::chunk_scales::{ChunkScales, ScaleSource};
use crate::files::open::{Body, OpenFile, View};
use crate::files::scaled::ScaledSource;
use crate::layout::grid::Grid;
use crate::layout::row::{Place, Row};
use crate::location::Location;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::source::held::Held;
use crate::source::local::Local;
use crate::source::mmap::Paging;
use crate::source::queue::{Hints, Ranged};
use crate::source::slots::{Opened, Slots};
use crate::source::{Access, ByteRange, Io, Ready, Source, Store, Wishes, replaced};
use crate::threads::{self, Stop, Watch};

/// Chunks of which it is known that rows were decoded apart, at most: more than fit in most caches.
const TOUCHED: u64 = 1 << 14;

/// Bytes of the chunks of an item, at most, that several threads decode ahead: of local files an eighth of what a thread reads, so that
/// few chunks are decoded by two of them; of a slow store, whose chunks are larger, little memory for all threads together.
const SMALL: u64 = 256 << 10;
const SMALL_FAR: u64 = 16 << 20;
/// Bytes of one of these chunks of a slow store, at most.
const SMALL_CHUNK_FAR: u64 = 1 << 20;

/// The encoding of chunks.
#[derive(Debug)]
pub enum Content {
    /// The file contains the chunk's elements in C order.
    Plain {
        /// Whether elements are byte-swapped.
        swapped: bool,
    },
    /// The file must be decoded.
    Coded(Box<dyn Decode>),
}

/// An array, not yet opened.
#[derive(Debug)]
pub struct ChunkArray {
    /// The array's folder.
    pub folder: Location,
    /// The array's metadata file. While it exists, a missing chunk has the fill value.
    pub metadata: Location,
    /// The names of its chunk files.
    pub naming: Naming,
    /// Examples, groups, tokens, elements.
    pub shape: [u64; 4],
    /// The shape of every chunk.
    pub chunk: [u64; 4],
    /// The element of missing chunks. `None`: the writer stores every chunk, and a missing one is an error.
    pub fill: Option<Vec<u8>>,
    /// The encoding of chunks.
    pub content: Content,
    /// The scales of its elements, if these are codes; rows are then their products, float32.
    pub scales: Option<ChunkScales>,
}

/// The chunk files of a dataset's arrays.
#[derive(Debug)]
pub struct ChunkFiles {
    arrays: Vec<(Grid, ChunkArray)>,
    row: Row,
    address_bits: u32,
    store: Arc<dyn Store>,
    /// Opens shards whose chunks are read in place.
    plain_shards: Arc<dyn Store>,
    /// Cached, because every gather needs it.
    wishes: Option<Wishes>,
    /// The folder of each array when it was opened, if it is local.
    folders: Vec<Option<FolderId>>,
    /// Whether views are allowed.
    views: bool,
    slots: Slots<OpenFile>,
    number: u64,
    decoded: Cache<Buffer, UnitKey>,
    decodes: bool,
    /// Chunks of which rows were decoded apart: one more than the number of a chunk, at its remainder. Empty if no array has such rows.
    touched: Box<[AtomicU64]>,
    /// Whether all decoded chunks together fit in their cache.
    fits: bool,
    /// Local shards; each by the number of its array's first chunk plus its own number.
    shards: Slots<ShardFile>,
}

/// A shard.
#[derive(Debug)]
struct ShardFile {
    file: ChunkFile,
    /// For each inner chunk that is read in place, whether its checksum was verified; empty if there are no checksums.
    verified: Box<[AtomicBool]>,
}

impl ShardFile {
    /// Whether its file is unchanged since it was opened: then its index is still valid.
    fn is_same(&self) -> bool {
        let now = self.file.source().and_then(|source| source.version());
        now.is_some() && now.as_ref() == self.file.version()
    }
}

impl Opened for ShardFile {
    fn may_keep(&self) -> bool {
        self.file.may_keep()
    }
}

impl ChunkFiles {
    /// Arrays in local files, of rows with `width` elements of one dtype. Opens nothing.
    pub fn new(arrays: Vec<ChunkArray>, width: u64, dtype: DType, decoded_memory: u64, io: Io) -> Result<ChunkFiles> {
        let store = Arc::new(Local { io: Io::Pread });
        let files = ChunkFiles::of(store, arrays, width, dtype, decoded_memory)?;
        Ok(ChunkFiles { views: io == Io::Mmap, plain_shards: Arc::new(Local { io }), ..files })
    }

    /// Arrays in any store.
    pub fn of(
        store: Arc<dyn Store>,
        arrays: Vec<ChunkArray>,
        width: u64,
        dtype: DType,
        decoded_memory: u64,
    ) -> Result<ChunkFiles> {
        let row = Row::new(width, dtype)?;
        let mut first = 0u64;
        let mut most_rows = 1u64;
        let mut placed = Vec::with_capacity(arrays.len());
        for array in arrays {
            let refuse = |what: String| Error::new(Kind::Format, what).at(&array.metadata);
            let grid = Grid::new(first, array.shape, array.chunk)
                .ok_or_else(|| refuse(format!("chunks of shape {:?} have no elements", array.chunk)))?;
            let elements = array.chunk.iter().try_fold(row.bytes as u64 / width, |n, c| n.checked_mul(*c));
            let end = grid.chunks().and_then(|n| first.checked_add(n));
            let (Some(_), Some(end)) = (elements.filter(|b| *b < 1 << 48), end.filter(|n| *n < 1 << 48)) else {
                return Err(refuse(format!(
                    "the array of shape {:?} in chunks of {:?} is too large for any disk",
                    array.shape, array.chunk
                )));
            };
            if array.fill.as_ref().is_some_and(|fill| dtype.size() != Some(fill.len())) {
                return Err(refuse("expected a fill value of one element, found another size".to_string()));
            }
            if array.shape[3] != width {
                return Err(refuse(format!("expected rows of {width} elements, found {}", array.shape[3])));
            }
            if let Some(scales) = &array.scales {
                scales.check(array.shape, array.chunk, dtype).map_err(|e| e.at(&array.metadata))?;
            }
            first = end;
            most_rows = most_rows.max(array.chunk[0] * array.chunk[1] * array.chunk[2]);
            placed.push((grid, array));
        }
        let address_bits = 64 - most_rows.leading_zeros();
        if 64 - first.leading_zeros() + address_bits > 64 {
            return Err(Error::new(Kind::Format, format!("{first} chunks of up to {most_rows} rows are too many")));
        }
        let slots = Slots::new(first);
        let (number, decoded) = (new_array(), Cache::new(decoded_memory));
        let folders = placed.iter().map(|(_, array)| folder_now(&array.folder)).collect();
        let (arrays, wishes) = (placed, store.wishes());
        let (views, decodes, shards) = (false, false, Slots::new(0));
        let (touched, fits) = (Box::default(), false);
        let mut made = ChunkFiles {
            arrays,
            row,
            address_bits,
            plain_shards: Arc::clone(&store),
            store,
            wishes,
            folders,
            views,
            slots,
            number,
            decoded,
            decodes,
            touched,
            fits,
            shards,
        };
        made.decodes = made.arrays.iter().any(|(_, array)| match (&array.content, made.in_place(array)) {
            (Content::Plain { .. }, _) => false,
            // A chunk with a checksum is read whole the first time.
            (Content::Coded(_), Some((_, form))) => form.checked,
            (Content::Coded(_), None) => true,
        });
        if made.arrays.iter().any(|(_, array)| made.sharded(array).is_some()) {
            made.shards = Slots::new(first);
        }
        if made.arrays.iter().any(|(grid, array)| made.apart(grid, array).is_some()) {
            made.touched = (0..TOUCHED).map(|_| AtomicU64::new(0)).collect();
            let mut bytes = made.arrays.iter().map(|(grid, _)| grid.chunks()?.checked_mul(made.chunk_bytes(grid)));
            let all = bytes.try_fold(0u64, |sum, bytes| sum.checked_add(bytes?));
            made.fits = all.is_some_and(|all| all <= decoded_memory);
        }
        Ok(made)
    }

    /// The decoder of chunks in local shards. Those of a slow store are read together.
    fn sharded<'a>(&self, array: &'a ChunkArray) -> Option<&'a CodedArray> {
        let Content::Coded(coded) = &array.content else { return None };
        coded.sharded().filter(|_| self.wishes.is_none())
    }

    /// The decoder and the form of chunks that are encoded but can be read in place.
    fn in_place<'a>(&self, array: &'a ChunkArray) -> Option<(&'a CodedArray, Numbers)> {
        let coded = self.sharded(array)?;
        Some((coded, coded.plain()?))
    }

    /// The decoder of chunks whose rows can be decoded without the others.
    fn apart<'a>(&self, grid: &Grid, array: &'a ChunkArray) -> Option<&'a CodedArray> {
        let is_whole = array.scales.is_none() && grid.chunk()[3] == self.row.width as u64;
        self.sharded(array).filter(|coded| is_whole && coded.has_rows_apart())
    }

    /// Whether a chunk, of which `rows` rows are wanted, is decoded as a whole and cached: when it is needed for the second time. If not
    /// all chunks fit in the cache, those that are read as a whole, as in a stream, would only evict others.
    fn is_worth_caching(&self, file: u64, grid: &Grid, rows: usize) -> bool {
        let Some(slot) = self.touched.get(to_usize(file % TOUCHED)) else { return true };
        let most = grid.chunk()[..3].iter().product::<u64>();
        (self.fits || rows as u64 <= most / 2) && slot.swap(file + 1, Ordering::Relaxed) == file + 1
    }

    /// Whether chunks are encoded in their files, even if they can be read in place. Orders of streams depend on it.
    pub fn are_coded(&self) -> bool {
        self.arrays.iter().any(|(_, array)| matches!(array.content, Content::Coded(_)))
    }

    /// Whether all chunks are inner chunks of shards that are decoded here, and those of an item, with rows of `groups` groups, have few
    /// bytes: several threads can decode neighbouring items.
    pub fn decodes_small_chunks(&self, groups: u64) -> bool {
        let (most, most_of_chunk) = if self.wishes.is_some() { (SMALL_FAR, SMALL_CHUNK_FAR) } else { (SMALL, SMALL) };
        let is_small = |bytes: u64| bytes <= most_of_chunk && bytes.saturating_mul(groups) <= most;
        self.decodes
            && self.arrays.iter().all(|(grid, array)| match &array.content {
                Content::Plain { .. } => false,
                Content::Coded(coded) => coded.sharded().is_some() && is_small(self.chunk_bytes(grid)),
            })
    }

    /// The grids of the arrays' chunks, in the order of the arrays.
    pub fn grids(&self) -> Vec<Grid> {
        self.arrays.iter().map(|(grid, _)| *grid).collect()
    }

    fn array(&self, file: u64) -> &(Grid, ChunkArray) {
        &self.arrays[self.array_of(file)]
    }

    fn array_of(&self, file: u64) -> usize {
        self.arrays.partition_point(|(grid, _)| grid.first() <= file).saturating_sub(1)
    }

    /// Closes cached files and drops decoded chunks.
    pub fn release(&self) {
        self.slots.clear();
        self.shards.clear();
        self.decoded.make_room(self.decoded.budget());
    }

    /// A view of rows of one chunk; `None` if they cannot be viewed.
    #[expect(clippy::disallowed_methods, reason = "a view is of a near file, which opens in a moment")]
    pub fn view(&self, file: u64, address: u64, rows: u64, paging: Paging) -> Result<Option<View>> {
        if !self.views || self.split(file) > 1 {
            return Ok(None);
        }
        let open = self.get(file, Stop::never())?;
        // A shard may put its inner chunks at any offset.
        let aligned = open.place().start.is_multiple_of((self.row.bytes / self.row.width) as u64);
        if aligned { View::of(&open, address, rows, self.row.bytes, paging) } else { Ok(None) }
    }

    /// The shard of an inner chunk, which stays open, and the chunk's number in it.
    fn shard(&self, file: u64, array: &CodedArray) -> Result<(Arc<ShardFile>, usize)> {
        let (grid, chunks) = self.array(file);
        let indices = grid.indices(file);
        let (number, unit) = array.place_of(&indices)?;
        if chunks.scales.is_some() && self.shards.kept(grid.first() + number).is_some_and(|shard| !shard.is_same()) {
            let detail = "it was written again, and scales of its codes were read before";
            return Err(replaced(&chunks.location(indices), detail));
        }
        let open = || {
            self.check_folder(self.array_of(file))?;
            let store =
                if array.plain().is_some() || array.has_rows_apart() { &self.plain_shards } else { &self.store };
            let shard = array.open_shard(&**store, &indices)?;
            let checked = array.plain().is_some_and(|form| form.checked);
            let verified = (0..shard.units()).filter(|_| checked).map(|_| AtomicBool::new(false)).collect();
            Ok(ShardFile { file: shard, verified })
        };
        Ok((self.shards.get_if(grid.first() + number, ShardFile::is_same, open)?, unit))
    }

    /// An inner chunk that is read in place: its shard, and its offset in it. `None` if it is missing.
    fn inner(&self, file: u64, array: &CodedArray, form: Numbers) -> Result<FoundChunk> {
        let (shard, unit) = self.shard(file, array)?;
        let (Some(source), Some(stored)) = (shard.file.source(), shard.file.unit(unit)?) else {
            return Ok(FoundChunk::Absent);
        };
        let verified = shard.verified.get(unit);
        if !verified.is_some_and(|verified| verified.load(Ordering::Relaxed)) {
            let (grid, chunks) = self.array(file);
            check_plain(stored, self.stored_bytes(grid, chunks), form.checked)?;
            if let Some(verified) = verified {
                verified.store(true, Ordering::Relaxed);
            }
        }
        Ok(FoundChunk::Inner(Arc::clone(source), stored.offset))
    }

    /// Decodes a chunk; `None` if it is missing.
    fn decode(&self, file: u64, coded: &dyn Decode) -> Result<Option<Vec<u8>>> {
        let (grid, array) = self.array(file);
        let bytes = self.stored_bytes(grid, array);
        if let Some(sharded) = self.sharded(array) {
            let (shard, unit) = self.shard(file, sharded)?;
            return shard.file.unit(unit)?.map(|stored| sharded.decode_unit(stored, bytes)).transpose();
        }
        let indices = grid.indices(file);
        coded.chunk(&indices, bytes, &array.location(indices))
    }

    /// Whether the checksum of an inner chunk that is read in place was already compared.
    fn is_checked(&self, file: u64, array: &CodedArray, form: Numbers) -> bool {
        let grid = &self.array(file).0;
        let Ok((number, unit)) = array.place_of(&grid.indices(file)) else { return false };
        let shard = self.shards.kept(grid.first() + number).filter(|shard| shard.is_same());
        let is_verified =
            |shard: Arc<ShardFile>| shard.verified.get(unit).is_some_and(|verified| verified.load(Ordering::Relaxed));
        !form.checked || shard.is_some_and(is_verified)
    }

    /// Chunks decoded so far.
    pub fn decodings(&self) -> u64 {
        self.decoded.decoded()
    }

    /// Checks the folder of an array whose chunks are files. That of shards is checked when one is opened.
    fn check_chunk_folder(&self, array: usize) -> Result<()> {
        if self.sharded(&self.arrays[array].1).is_some() { Ok(()) } else { self.check_folder(array) }
    }

    /// Fails if another folder has the name of an array's: its chunks belong to other metadata. Chunks may be added to a folder.
    fn check_folder(&self, array: usize) -> Result<()> {
        let folder = &self.arrays[array].1.folder;
        match (&self.folders[array], folder_now(folder)) {
            (Some(opened), Some(now)) if *opened != now => {
                Err(replaced(folder, "its name belongs to another folder now"))
            }
            _ => Ok(()),
        }
    }

    /// The positions of a chunk's rows.
    fn place(&self, grid: &Grid, indices: [u64; 4], swapped: bool) -> Place {
        let size = self.row.bytes / self.row.width;
        let [_, _, _, ch] = grid.chunk();
        let column = indices[3] * ch;
        let used = to_usize(ch.min(self.row.width as u64 - column)) * size;
        let step = ch * size as u64;
        Place { start: 0, end: self.chunk_bytes(grid), unit: step, step, used, column: to_usize(column), swapped }
    }

    /// Bytes of a chunk's rows, as they are read.
    fn chunk_bytes(&self, grid: &Grid) -> u64 {
        grid.chunk().iter().product::<u64>() * (self.row.bytes / self.row.width) as u64
    }

    /// Bytes of a chunk's elements before scaling: codes have one each.
    fn stored_bytes(&self, grid: &Grid, array: &ChunkArray) -> u64 {
        if array.scales.is_some() { grid.chunk().iter().product() } else { self.chunk_bytes(grid) }
    }

    /// The scales of the rows of chunks of one array, in order; `None` for each if they are in memory. Missing ones are an error.
    /// `codes`: the files of these chunks.
    fn scales_of(
        &self,
        grid: &Grid,
        scales: &ChunkScales,
        numbers: &[u64],
        codes: &[Location],
        watch: Watch<'_>,
    ) -> Result<Vec<Option<Arc<Buffer>>>> {
        let ScaleSource::Chunks(array) = scales.source() else { return Ok(vec![None; numbers.len()]) };
        // The codes may be those of a shard that stays open: scales of another dataset under its name are not theirs.
        if let Some(number) = numbers.first() {
            self.check_folder(self.array_of(*number))?;
        }
        let bytes = scales.chunk_bytes(grid.chunk()[2]);
        let keys: Vec<UnitKey> = numbers.iter().map(|number| self.scale_key(*number)).collect();
        let indices: Vec<[u64; 4]> = numbers.iter().map(|number| grid.indices(*number)).collect();
        let file = |(indices, codes): (&[u64; 4], &Location)| array.file_of(indices).unwrap_or_else(|| codes.clone());
        let locations: Vec<Location> = indices.iter().zip(codes).map(file).collect();
        let wishes = self.wishes;
        let mut load = |which: &[usize], watch: Watch<'_>| {
            let which: Vec<_> = which.iter().map(|i| (&indices[*i][..], &locations[*i])).collect();
            let made = match &wishes {
                Some(wishes) => array.chunks(&which, bytes, wishes, watch)?,
                None => which.iter().map(|(at, location)| array.chunk(at, bytes, location)).collect::<Result<_>>()?,
            };
            Ok(made.into_iter().map(|made| made.map(Buffer::from)).collect())
        };
        let found = self.decoded.get_or_load_many(&keys, &mut load, watch)?;
        match found.iter().position(Option::is_none) {
            None => Ok(found),
            Some(i) => Err(Error::new(Kind::NotFound, "expected a chunk with the scales of these codes, found none")
                .at(&locations[i])),
        }
    }

    /// The cache's key of the scales of a chunk.
    fn scale_key(&self, number: u64) -> UnitKey {
        UnitKey { chunk: 1, ..self.key(number) }
    }

    /// Without the file's version: checking it for each cached chunk doubles the cost of a row.
    fn key(&self, number: u64) -> UnitKey {
        UnitKey { array: self.number, file: number, version: UNCHECKED, chunk: 0, block: WHOLE }
    }

    fn open(&self, number: u64, stop: &Stop) -> Result<OpenFile> {
        let (grid, array) = self.array(number);
        let indices = grid.indices(number);
        let bytes = self.stored_bytes(grid, array);
        let found = match &array.content {
            Content::Plain { .. } => plain(self.store.open(&array.location(indices), Access::Kept, stop), grid, bytes)?,
            Content::Coded(_) if let Some((coded, form)) = self.in_place(array) => self.inner(number, coded, form)?,
            Content::Coded(coded) => {
                let decode = || Ok::<_, Error>(self.decode(number, &**coded)?.map(Buffer::from));
                let block = self.decoded.get_or_load(self.key(number), |_| true, decode)?;
                block.map_or(FoundChunk::Absent, FoundChunk::Decoded)
            }
        };
        if let FoundChunk::Absent = found {
            // A missing chunk has the fill value, but a missing array (an unmounted disk, a moved folder) is an error.
            self.store.look(&array.metadata)?;
        }
        let scales = match &array.scales {
            Some(scales) if !matches!(found, FoundChunk::Absent) => {
                let places = [array.location(indices)];
                self.scales_of(grid, scales, &[number], &places, &mut || stop.is_set())?.pop().flatten()
            }
            _ => None,
        };
        self.opened(array, grid, indices, (found, scales))
    }

    /// A chunk of codes as a file of products.
    #[expect(clippy::disallowed_methods, reason = "its scales are in memory: nothing is read")]
    fn scaled(
        &self,
        scales: &ChunkScales,
        chunk: ([u64; 4], u64),
        location: Location,
        (found, own): (FoundChunk, Option<Arc<Buffer>>),
    ) -> Result<FoundChunk> {
        let is_shared = matches!(found, FoundChunk::Inner(..));
        let (at, source): (u64, Arc<dyn Source>) = match found {
            FoundChunk::Stored(source) => (0, source.into()),
            FoundChunk::Inner(source, offset) => (offset, source),
            FoundChunk::Decoded(block) => (0, Arc::new(Held::shared(location.clone(), block))),
            FoundChunk::Absent => return Ok(FoundChunk::Absent),
        };
        let products = scales.products(at, chunk.0, chunk.1, own).map_err(|e| e.at(&location))?;
        let products = ScaledSource::new(source, products, Stop::never())?;
        Ok(if is_shared { FoundChunk::Inner(Arc::new(products), 0) } else { FoundChunk::Stored(Box::new(products)) })
    }

    fn opened(
        &self,
        array: &ChunkArray,
        grid: &Grid,
        indices: [u64; 4],
        (found, own): (FoundChunk, Option<Arc<Buffer>>),
    ) -> Result<OpenFile> {
        let found = match &array.scales {
            None => found,
            Some(scales) => self.scaled(scales, (grid.chunk(), indices[1]), array.location(indices), (found, own))?,
        };
        let mut swapped = matches!(array.content, Content::Plain { swapped: true });
        let mut start = 0;
        let body = match found {
            FoundChunk::Stored(source) => Body::Stored(source),
            FoundChunk::Inner(source, offset) => {
                start = offset;
                swapped = array.scales.is_none() && self.in_place(array).is_some_and(|(_, form)| form.big_endian);
                Body::Shared(source)
            }
            FoundChunk::Decoded(block) => Body::Decoded(array.location(indices), block),
            FoundChunk::Absent => match &array.fill {
                Some(fill) => Body::Fill(array.location(indices), fill.clone()),
                None => {
                    let detail = "expected a chunk, found nothing: its writer stores every chunk; restore the file";
                    return Err(Error::new(Kind::NotFound, detail).at(array.location(indices)));
                }
            },
        };
        let place = self.place(grid, indices, swapped);
        Ok(OpenFile::new(body, Place { start, end: start + place.end, ..place }))
    }

    /// Chunks of one array of a slow store.
    fn open_together(&self, array: usize, numbers: &[u64], wishes: &Wishes, watch: Watch<'_>) -> Result<Vec<OpenFile>> {
        let (grid, array) = &self.arrays[array];
        let indices: Vec<[u64; 4]> = numbers.iter().map(|number| grid.indices(*number)).collect();
        let locations: Vec<Location> = indices.iter().map(|indices| array.location(*indices)).collect();
        let bytes = self.stored_bytes(grid, array);
        let found: Vec<FoundChunk> = match &array.content {
            Content::Plain { .. } => {
                let names: Vec<&Location> = locations.iter().collect();
                let opened = self.store.open_together(&names, Access::Kept, &mut *watch)?;
                opened.into_iter().map(|source| plain(source, grid, bytes)).collect::<Result<_>>()?
            }
            Content::Coded(coded) => {
                let keys: Vec<UnitKey> = numbers.iter().map(|number| self.key(*number)).collect();
                let mut decode = |which: &[usize], watch: Watch<'_>| {
                    let which: Vec<_> = which.iter().map(|i| (&indices[*i][..], &locations[*i])).collect();
                    let made = coded.chunks(&which, bytes, wishes, watch)?;
                    Ok(made.into_iter().map(|made| made.map(Buffer::from)).collect())
                };
                let blocks = self.decoded.get_or_load_many(&keys, &mut decode, &mut *watch)?;
                blocks.into_iter().map(|block| block.map_or(FoundChunk::Absent, FoundChunk::Decoded)).collect()
            }
        };
        if found.iter().any(|found| matches!(found, FoundChunk::Absent)) {
            threads::wait_for(&|_| self.store.look(&array.metadata), &mut *watch)?;
        }
        let mut scales = vec![None; found.len()];
        if let Some(of) = &array.scales {
            let present: Vec<usize> = (0..found.len()).filter(|i| !matches!(found[*i], FoundChunk::Absent)).collect();
            let these: Vec<u64> = present.iter().map(|i| numbers[*i]).collect();
            let places: Vec<Location> = present.iter().map(|i| locations[*i].clone()).collect();
            for (i, own) in present.iter().zip(self.scales_of(grid, of, &these, &places, watch)?) {
                scales[*i] = own;
            }
        }
        let each = indices.into_iter().zip(found.into_iter().zip(scales));
        each.map(|(indices, found)| self.opened(array, grid, indices, found)).collect()
    }
}

/// A folder: its device, its inode, which may be used again, and when it was made, where that is recorded.
type FolderId = (u64, u64, Option<SystemTime>);

/// The folder that has a local path now; `None` if there is none.
fn folder_now(folder: &Location) -> Option<FolderId> {
    let metadata = std::fs::metadata(folder.path()?).ok()?;
    Some((metadata.dev(), metadata.ino(), metadata.created().ok()))
}

/// The range of an inner chunk in one of some shards.
struct ShardRange {
    shard: usize,
    range: ByteRange,
}

impl Ranged for ShardRange {
    fn source(&self) -> usize {
        self.shard
    }

    fn range(&self) -> ByteRange {
        self.range
    }
}

/// The bytes found for a chunk.
enum FoundChunk {
    Stored(Box<dyn Source>),
    /// A shard, and the offset of an inner chunk in it.
    Inner(Arc<dyn Source>, u64),
    Decoded(Arc<Buffer>),
    Absent,
}

/// The file of a plain chunk.
fn plain(opened: Result<Box<dyn Source>>, grid: &Grid, bytes: u64) -> Result<FoundChunk> {
    let source = match opened {
        Err(error) if error.is_absence() => return Ok(FoundChunk::Absent),
        opened => opened?,
    };
    let len = source.size();
    if len == bytes {
        return Ok(FoundChunk::Stored(source));
    }
    let kind = if len < bytes { Kind::Truncated } else { Kind::Format };
    let [a, b, c, d] = grid.chunk();
    let detail = format!("expected {bytes} bytes, a whole chunk of {a} x {b} x {c} x {d}, found {len}");
    Err(Error::new(kind, detail).at(source.location()).byte(len.min(bytes)))
}

impl ChunkArray {
    /// The file that contains a chunk.
    fn location(&self, indices: [u64; 4]) -> Location {
        let shard = match &self.content {
            Content::Plain { .. } => None,
            Content::Coded(coded) => coded.sharded().and_then(|array| array.location(&indices).ok()),
        };
        shard.unwrap_or_else(|| self.folder.join(&self.naming.file(&indices)))
    }
}

impl Files for ChunkFiles {
    fn row(&self) -> Row {
        self.row
    }

    fn get(&self, file: u64, stop: &Stop) -> Result<Arc<OpenFile>> {
        self.slots.get(file, || {
            self.check_chunk_folder(self.array_of(file))?;
            self.open(file, stop)
        })
    }

    fn open_many(&self, files: &[u64], watch: Watch<'_>) -> Result<Vec<Arc<OpenFile>>> {
        let Some(wishes) = self.wishes else {
            // Once for all chunks of an array: it takes a third of the time of opening one.
            let lacking = files.iter().filter(|file| self.slots.kept(**file).is_none());
            let mut arrays: Vec<usize> = lacking.map(|file| self.array_of(*file)).collect();
            arrays.dedup();
            arrays.into_iter().try_for_each(|array| self.check_chunk_folder(array))?;
            let open = |_: usize, file: &u64, stop: &Stop| self.slots.get(*file, || self.open(*file, stop));
            return threads::map_each(files.iter(), &open, watch);
        };
        let mut open: Vec<Option<Arc<OpenFile>>> = files.iter().map(|file| self.slots.kept(*file)).collect();
        let mut lacking: Vec<usize> = (0..files.len()).filter(|i| open[*i].is_none()).collect();
        lacking.sort_by_key(|i| files[*i]);
        for run in lacking.chunk_by(|a, b| self.array_of(files[*a]) == self.array_of(files[*b])) {
            let numbers: Vec<u64> = run.iter().map(|i| files[*i]).collect();
            let opened = self.open_together(self.array_of(numbers[0]), &numbers, &wishes, &mut *watch)?;
            for (i, file) in run.iter().zip(opened) {
                open[*i] = Some(self.slots.get(files[*i], || Ok(file))?);
            }
        }
        Ok(open.into_iter().flatten().collect())
    }

    fn wishes(&self) -> Option<Wishes> {
        self.wishes.and_then(|_| self.store.wishes())
    }

    #[expect(clippy::disallowed_methods, reason = "its shard is open")]
    fn decoded(&self, file: u64) -> Option<Arc<OpenFile>> {
        let (grid, array) = self.array(file);
        let Content::Coded(_) = array.content else { return None };
        if let Some((coded, form)) = self.in_place(array) {
            return self.is_checked(file, coded, form).then(|| self.get(file, Stop::never()).ok()).flatten();
        }
        let block = self.decoded.get(self.key(file))?;
        let own = match array.scales.as_ref().map(ChunkScales::source) {
            Some(ScaleSource::Chunks(_)) => Some(self.decoded.get(self.scale_key(file))?),
            _ => None,
        };
        let found = (FoundChunk::Decoded(block), own);
        self.opened(array, grid, grid.indices(file), found).ok().map(Arc::new)
    }

    fn will_need(&self, files: &[u64]) {
        let (mut shards, mut ranges): (Vec<Arc<ShardFile>>, Vec<ShardRange>) = (vec![], vec![]);
        for file in files {
            let Some(sharded) = self.sharded(&self.array(*file).1) else { continue };
            let Ok((shard, unit)) = self.shard(*file, sharded) else { continue };
            let Ok(Some(range)) = shard.file.unit(unit).map(|unit| unit.map(|unit| unit.range())) else { continue };
            if !shards.last().is_some_and(|last| Arc::ptr_eq(last, &shard)) {
                shards.push(shard);
            }
            ranges.push(ShardRange { shard: shards.len() - 1, range });
        }
        let sources: Vec<Option<&dyn Source>> = shards.iter().map(|shard| shard.file.source().map(|s| &**s)).collect();
        let mut hints = Hints::new(&sources);
        ranges.iter().for_each(|range| hints.add(range));
        hints.flush();
    }

    fn rows_apart(&self, file: u64, addresses: &[u64], each: &mut dyn FnMut(usize, BlockRow<'_>)) -> Result<bool> {
        let (grid, array) = self.array(file);
        let Some(coded) = self.apart(grid, array) else { return Ok(false) };
        if self.decoded.get(self.key(file)).is_some() || self.is_worth_caching(file, grid, addresses.len()) {
            return Ok(false);
        }
        let (shard, unit) = self.shard(file, coded)?;
        let Some(stored) = shard.file.unit(unit)? else { return Ok(false) };
        coded.rows(stored, self.row.bytes, addresses, each)
    }

    fn is_at_hand(&self, file: u64) -> bool {
        let Some(sharded) = self.sharded(&self.array(file).1) else { return false };
        let Ok((shard, unit)) = self.shard(file, sharded) else { return false };
        match (shard.file.source(), shard.file.unit(unit)) {
            (Some(source), Ok(Some(StoredUnit { offset, len, .. }))) => {
                [offset, (offset + len).saturating_sub(1)].iter().all(|at| source.is_ready(*at) == Ready::Yes)
            }
            (None, Ok(_)) | (_, Ok(None)) => true, // a missing chunk has the fill value
            (_, Err(_)) => false,
        }
    }

    fn decoded_bytes(&self, file: u64) -> u64 {
        let (grid, array) = self.array(file);
        let decodes = matches!(array.content, Content::Coded(_)) && self.in_place(array).is_none();
        if decodes { self.stored_bytes(grid, array) } else { 0 }
    }

    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    #[inline]
    fn split(&self, file: u64) -> u64 {
        // One array is by far the most common case, and this runs for every row.
        match &self.arrays[..] {
            [(grid, _)] => grid.split(),
            _ => self.array(file).0.split(),
        }
    }

    fn decodes(&self) -> bool {
        self.decodes
    }
}
