//! A one-dimensional array of numbers in Zarr shards, read by ranges.
//!
//! A file is opened when it is first touched and its index is read then, its checksum compared. A range costs the blocks it
//! touches: nothing for numbers that are stored (they are copied from the map, or looked at in place), otherwise those blocks
//! are decoded and kept as long as the memory given for them lasts.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use zarrs::array::BytesToBytesCodecTraits;

use super::frame::{Frame, HEADER, Planes};
use super::meta::{Coding, Meta};
use crate::bytes::codecs::{self, CodedArray, Decode};
use crate::bytes::decoded::Cache;
use crate::bytes::{Body, Io, OpenFile, Opened, Place, Slots, View, map_or_read, open_regular, pread};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::par::pool::Watch;

/// Decoded blocks of many arrays, within one budget.
#[derive(Debug)]
pub struct BlockCache {
    blocks: Cache<Planes>,
    arrays: AtomicU32,
}

impl BlockCache {
    /// Keeps at most `budget` bytes.
    pub fn new(budget: u64) -> BlockCache {
        BlockCache { blocks: Cache::new(budget), arrays: AtomicU32::new(0) }
    }

    /// Bytes kept now.
    pub fn used(&self) -> u64 {
        self.blocks.used()
    }
}

/// Bytes of a range that are asked for ahead.
const PREFETCHED: usize = 32 << 10;
const PAGE: usize = 4096;

/// Bits of a block's number within its array; the array's number stands above them.
const BLOCK_BITS: u32 = 40;

/// What is known of an inner chunk's frame.
mod seen {
    pub const NOTHING: u8 = 0;
    pub const STORED: u8 = 1;
}

/// A file of an array, and its index.
#[derive(Debug)]
pub struct Shard {
    /// None where there is no such file: every number is 0.
    file: Option<Arc<OpenFile>>,
    /// Offset and length of each inner chunk.
    index: Box<[(u64, u64)]>,
    seen: Box<[AtomicU8]>,
}

impl Opened for Shard {
    fn may_keep(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.may_keep())
    }
}

/// An array, open.
#[derive(Debug)]
pub struct Array {
    folder: PathBuf,
    meta: Meta,
    io: Io,
    files: Slots<Shard>,
    cache: Arc<BlockCache>,
    number: u64,
    foreign: Option<CodedArray>,
}

impl Opened for Array {
    fn may_keep(&self) -> bool {
        true
    }
}

/// The file that was read from last: whoever reads many ranges finds it again without a lock, and its length is looked at once.
#[derive(Debug, Default)]
pub struct Held(Option<(u64, u64, Arc<Shard>)>);

/// A piece of a range: which file, which inner chunk of it, which numbers of that.
#[derive(Clone, Copy)]
struct Piece {
    file: u64,
    chunk: usize,
    first: usize,
    n: usize,
}

/// Where the numbers of a piece are.
enum Found<'a> {
    /// In the file as they are.
    Stored(&'a [u8]),
    /// Decoded; the piece begins at this number.
    Decoded(Arc<Planes>, usize),
    /// Read into memory.
    Read(Vec<u8>),
    /// Nowhere: they are all 0.
    Zero,
}

impl Array {
    /// Opens the array in a folder. `elements` that will be read at most, where that is known; no file but `zarr.json` is
    /// touched.
    pub fn open(folder: PathBuf, io: Io, cache: Arc<BlockCache>, elements: Option<u64>) -> Result<Array> {
        let meta = Meta::read(&folder)?;
        let files = Slots::new(elements.map_or(64, |n| n.div_ceil(meta.outer)));
        let number = u64::from(cache.arrays.fetch_add(1, Ordering::Relaxed));
        let foreign =
            (meta.coding == Coding::Foreign).then(|| CodedArray::new(folder.clone(), "/".to_string(), meta.sharded));
        Ok(Array { folder, meta, io, files, cache, number, foreign })
    }

    /// The type of its elements.
    pub fn dtype(&self) -> DType {
        self.meta.dtype
    }

    /// What its `zarr.json` says.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn shard(&self, number: u64) -> Result<Arc<Shard>> {
        self.files.get(number, || self.open_shard(number))
    }

    fn open_shard(&self, number: u64) -> Result<Shard> {
        let path = self.meta.file(&self.folder, number);
        let chunks = if self.meta.sharded { self.meta.per_file() as usize } else { 1 };
        let seen: Box<[AtomicU8]> = (0..chunks).map(|_| AtomicU8::new(seen::NOTHING)).collect();
        let (file, len) = match open_regular(&path) {
            Ok(found) => found,
            Err(error) if error.kind == Kind::NotFound => {
                return Ok(Shard { file: None, index: vec![(u64::MAX, u64::MAX); chunks].into(), seen });
            }
            Err(error) => return Err(error),
        };
        let index = if self.meta.sharded { self.read_index(&file, &path, len)? } else { vec![(0, len)] };
        let body = map_or_read(file, &path, len, self.io)?;
        let place = Place { start: 0, end: len, unit: 1, step: 1, used: 1, column: 0, swapped: false };
        let file = Arc::new(OpenFile::new(path, body, len, place));
        Ok(Shard { file: Some(file), index: index.into(), seen })
    }

    /// A shard's index (sharding codec of Zarr 3): offset and length per inner chunk, and their checksum.
    fn read_index(&self, file: &std::fs::File, path: &Path, len: u64) -> Result<Vec<(u64, u64)>> {
        let bytes = self.meta.index_bytes();
        let Some(at) = len.checked_sub(bytes) else {
            return Err(Error::new(
                Kind::Truncated,
                format!("expected at least the {bytes} bytes of a shard's index, found {len}"),
            )
            .at(path));
        };
        let at = if self.meta.index_at_end { at } else { 0 };
        let mut raw = vec![0u8; bytes as usize];
        pread::read_exact_at(file, &mut raw, at).map_err(|e| Error::from_io(&e, path, "read"))?;
        let (entries, crc) = raw.split_at(self.meta.per_file() as usize * 16);
        if let Ok(crc) = <[u8; 4]>::try_from(crc) {
            let (told, found) = (u32::from_le_bytes(crc), crc32c::crc32c(entries));
            if told != found {
                return Err(Error::new(
                    Kind::Format,
                    format!(
                        "the checksum of the shard's index is {found:08x}, expected {told:08x}: the file was cut or damaged"
                    ),
                )
                .at(path)
                .byte(at));
            }
        }
        let number = |b: &[u8]| b.first_chunk::<8>().map_or(u64::MAX, |b| u64::from_le_bytes(*b));
        let index: Vec<(u64, u64)> = entries.as_chunks::<16>().0.iter().map(|e| (number(e), number(&e[8..]))).collect();
        for (chunk, (offset, n)) in index.iter().enumerate() {
            if (*offset, *n) != (u64::MAX, u64::MAX) && offset.checked_add(*n).is_none_or(|end| end > len) {
                return Err(Error::new(
                    Kind::Format,
                    format!("inner chunk {chunk}: expected {n} bytes at {offset}, but the file ends at {len}"),
                )
                .at(path)
                .byte(at + 16 * chunk as u64));
            }
        }
        Ok(index)
    }

    /// Calls `each` with the pieces of a range in order: the piece, the shard it is in, and how many numbers lie before it.
    fn pieces(
        &self,
        held: &mut Held,
        start: u64,
        n: usize,
        each: &mut dyn FnMut(&Shard, Piece, usize) -> Result<()>,
    ) -> Result<()> {
        let (outer, inner) = (self.meta.outer, self.meta.inner);
        let mut done = 0usize;
        while done < n {
            let at = start.checked_add(done as u64).ok_or_else(|| Error::new(Kind::Format, "an offset beyond 2^64"))?;
            let (file, within) = (at / outer, at % outer);
            let (chunk, first) = (within / inner, within % inner);
            let take = (n - done).min((inner - first) as usize);
            if !matches!(&held.0, Some((array, number, _)) if *array == self.number && *number == file) {
                let shard = self.shard(file)?;
                if let Some(file) = &shard.file {
                    file.check_length()?;
                }
                held.0 = Some((self.number, file, shard));
            }
            if let Some((_, _, shard)) = &held.0 {
                each(shard, Piece { file, chunk: chunk as usize, first: first as usize, n: take }, done)?;
            }
            done += take;
        }
        Ok(())
    }

    fn find<'a>(&self, shard: &'a Shard, piece: Piece) -> Result<Found<'a>> {
        if self.meta.coding == Coding::Foreign {
            return self.find_foreign(shard, piece);
        }
        let (offset, len) = shard.index[piece.chunk];
        let Some(file) = shard.file.as_ref().filter(|_| offset != u64::MAX) else { return Ok(Found::Zero) };
        let item = self.meta.item();
        let bytes = self.meta.inner as usize * item;
        let bad = |detail: String| Error::new(Kind::Format, detail).at(file.path()).byte(offset);
        let lies = |at: usize| self.as_it_is(file, offset + (at + piece.first * item) as u64, piece.n * item);
        if self.meta.coding == Coding::Plain {
            return if len == bytes as u64 {
                lies(0)
            } else {
                Err(bad(format!("expected an inner chunk of {bytes} bytes, found {len}")))
            };
        }
        if shard.seen[piece.chunk].load(Ordering::Relaxed) == seen::STORED {
            return lies(HEADER);
        }
        if len < HEADER as u64 {
            return Err(bad(format!("expected a blosc frame, found {len} bytes")));
        }
        let mut header = [0u8; HEADER];
        match file.bytes() {
            Some(all) => header.copy_from_slice(&all[offset as usize..offset as usize + HEADER]),
            None => read(file, &mut header, offset)?,
        }
        let frame = Frame::parse(&header, len, bytes, item).map_err(bad)?;
        if frame == Frame::Stored {
            shard.seen[piece.chunk].store(seen::STORED, Ordering::Relaxed);
            return lies(HEADER);
        }
        // A frame decoded by blocks has as many numbers in each as in the first.
        let (per_block, most) = match &frame {
            Frame::Blocks(blocks) => (blocks.numbers(0), blocks.count()),
            _ => (self.meta.inner as usize, 1),
        };
        let block = piece.first / per_block;
        let in_block = match &frame {
            Frame::Blocks(blocks) => blocks.numbers(block),
            _ => per_block,
        };
        let chunk = piece.file * self.meta.per_file() + piece.chunk as u64;
        let key = self.key(chunk, most, block);
        let first = piece.first - block * per_block;
        if let Some(key) = key
            && let Some(held) = self.cache.blocks.get(key)
            && held.numbers() >= (first + piece.n).min(in_block)
        {
            return Ok(Found::Decoded(held, first));
        }
        if let (Some(map), Some(descriptor)) = (file.map(), file.file())
            && pread::is_cached(descriptor, offset) == pread::Cached::No
        {
            map.will_need(offset as usize, len as usize);
        }
        let owned;
        let whole: &[u8] = match file.bytes() {
            Some(all) => &all[offset as usize..(offset + len) as usize],
            None => {
                let mut buf = vec![0u8; len as usize];
                read(file, &mut buf, offset)?;
                owned = buf;
                &owned
            }
        };
        let planes = match &frame {
            Frame::Blocks(blocks) => {
                if let Some(at) = blocks.stored(whole, block) {
                    let from = at + first * item;
                    let n = piece.n.min(in_block - first) * item;
                    if file.bytes().is_some() {
                        return self.as_it_is(file, offset + from as u64, n);
                    }
                    return Ok(Found::Read(whole[from..from + n].to_vec()));
                }
                // As far as it is needed; the second time in full.
                let again = key.is_some_and(|key| self.cache.blocks.get(key).is_some());
                let upto = if again { in_block } else { first + piece.n };
                blocks.decode(whole, block, upto).map_err(bad)?
            }
            _ => Planes::whole(
                self.decode_whole(whole, bytes, file.path()).map_err(|e| e.byte(offset))?,
                item,
                per_block,
            ),
        };
        let planes = Arc::new(planes);
        if let Some(key) = key {
            self.cache.blocks.remove(key);
            self.cache.blocks.put(key, &planes);
        }
        Ok(Found::Decoded(planes, first))
    }

    fn key(&self, chunk: u64, blocks: usize, block: usize) -> Option<u64> {
        let within = chunk.checked_mul(blocks as u64)?.checked_add(block as u64)?;
        (within < 1 << BLOCK_BITS && self.number < 1 << (64 - BLOCK_BITS)).then_some(self.number << BLOCK_BITS | within)
    }

    fn as_it_is<'a>(&self, file: &'a OpenFile, at: u64, n: usize) -> Result<Found<'a>> {
        if let Some(all) = file.bytes() {
            return Ok(Found::Stored(&all[at as usize..at as usize + n]));
        }
        let mut buf = vec![0u8; n];
        read(file, &mut buf, at)?;
        Ok(Found::Read(buf))
    }

    /// What c-blosc decodes: other codecs, bits shuffled.
    fn decode_whole(&self, frame: &[u8], bytes: usize, path: &Path) -> Result<Vec<u8>> {
        codecs::guarded(path, || {
            let codec = super::write::blosc(1)?;
            let made = codec
                .decode(
                    frame.into(),
                    &zarrs::array::BytesRepresentation::FixedSize(bytes as u64),
                    &zarrs::array::CodecOptions::default(),
                )
                .map_err(|e| Error::new(Kind::Format, format!("c-blosc cannot decode this: {e}")).at(path))?;
            codecs::of_length(made.into_owned(), bytes as u64, path)
        })
    }

    fn find_foreign<'a>(&self, shard: &'a Shard, piece: Piece) -> Result<Found<'a>> {
        let (Some(coded), Some(file)) = (&self.foreign, &shard.file) else { return Ok(Found::Zero) };
        let per_file = if self.meta.sharded { self.meta.per_file() } else { 1 };
        let chunk = piece.file * per_file + piece.chunk as u64;
        let key = self.key(chunk, 1, 0);
        if let Some(key) = key
            && let Some(held) = self.cache.blocks.get(key)
        {
            return Ok(Found::Decoded(held, piece.first));
        }
        let numbers = self.meta.inner as usize;
        let bytes = numbers * self.meta.item();
        let Some(made) = coded.chunk(&self.meta.indices(chunk), bytes as u64, file.path())? else {
            return Ok(Found::Zero);
        };
        let planes = Arc::new(Planes::whole(made, self.meta.item(), numbers));
        if let Some(key) = key {
            self.cache.blocks.put(key, &planes);
        }
        Ok(Found::Decoded(planes, piece.first))
    }

    /// Hands the numbers of a range to `each`, in order: as bytes, with how many numbers came before.
    pub fn each(&self, held: &mut Held, start: u64, n: usize, each: &mut dyn FnMut(&[u8], usize)) -> Result<()> {
        self.visit(held, start, n, &mut |found, piece, before| {
            match found {
                Found::Stored(bytes) => each(bytes, before),
                Found::Read(bytes) => each(bytes, before),
                Found::Decoded(planes, first) => each(&planes.bytes(*first, piece), before),
                Found::Zero => each(&vec![0u8; piece * self.meta.item()], before),
            }
            Ok(())
        })
    }

    /// Visits what is found of a range; a piece may be shorter than its inner chunk, for blocks may be.
    fn visit(
        &self,
        held: &mut Held,
        start: u64,
        n: usize,
        each: &mut dyn FnMut(&Found<'_>, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let item = self.meta.item();
        self.pieces(held, start, n, &mut |shard, mut piece, mut before| {
            while piece.n > 0 {
                let found = self.find(shard, piece)?;
                let got = match &found {
                    Found::Stored(bytes) => bytes.len() / item,
                    Found::Read(bytes) => bytes.len() / item,
                    Found::Decoded(planes, first) => planes.numbers().saturating_sub(*first),
                    Found::Zero => piece.n,
                }
                .min(piece.n);
                if got == 0 {
                    return Err(Error::new(Kind::Internal, "a block without numbers").at(&self.folder));
                }
                each(&found, got, before)?;
                piece.first += got;
                piece.n -= got;
                before += got;
            }
            Ok(())
        })
    }

    /// Copies a range as it is stored.
    pub fn copy(&self, held: &mut Held, start: u64, out: &mut [u8]) -> Result<()> {
        let item = self.meta.item();
        self.each(held, start, out.len() / item, &mut |bytes, before| {
            out[before * item..before * item + bytes.len()].copy_from_slice(bytes);
        })
    }

    /// A range of integers as int32; one that does not fit is an error and not another number.
    pub fn int32(&self, held: &mut Held, start: u64, out: &mut [i32]) -> Result<()> {
        let dtype = self.meta.dtype;
        self.visit(held, start, out.len(), &mut |found, n, before| {
            let to = &mut out[before..before + n];
            let fits = match found {
                Found::Stored(bytes) => to_int32(dtype, bytes, to),
                Found::Read(bytes) => to_int32(dtype, bytes, to),
                Found::Decoded(planes, first) => {
                    planes.narrow(*first, to) || to_int32(dtype, &planes.bytes(*first, n), to)
                }
                Found::Zero => {
                    to.fill(0);
                    true
                }
            };
            if fits {
                return Ok(());
            }
            let at = start + before as u64;
            Err(Error::new(
                Kind::Format,
                match dtype {
                    DType::F16 | DType::BF16 | DType::F32 | DType::F64 => {
                        format!("expected integers, found {}", dtype.numpy_name().unwrap_or_default())
                    }
                    _ => format!("elements {at} to {}: one does not fit int32", at + n as u64),
                },
            )
            .at(&self.folder))
        })
    }

    /// A range of numbers as float32.
    pub fn float32(&self, held: &mut Held, start: u64, out: &mut [f32]) -> Result<()> {
        let (dtype, item) = (self.meta.dtype, self.meta.item());
        let mut known = true;
        self.each(held, start, out.len(), &mut |bytes, before| {
            known &= to_float32(dtype, bytes, &mut out[before..before + bytes.len() / item]);
        })?;
        if known {
            return Ok(());
        }
        Err(Error::new(Kind::DType, format!("cannot give {} as float32", dtype.name())).at(&self.folder))
    }

    /// A range as it lies in a mapped file; `None` where it does not lie in one piece.
    pub fn view(&self, held: &mut Held, start: u64, n: usize) -> Result<Option<View>> {
        if self.io != Io::Mmap || n == 0 {
            return Ok(None);
        }
        let mut at: Option<(Arc<OpenFile>, usize, usize)> = None;
        let mut pieces = 0;
        self.pieces(held, start, n, &mut |shard, piece, _| {
            pieces += 1;
            if pieces > 1 || piece.n < n {
                return Ok(());
            }
            let Some(file) = &shard.file else { return Ok(()) };
            if let (Found::Stored(bytes), Some(all)) = (self.find(shard, piece)?, file.bytes())
                && bytes.len() == n * self.meta.item()
            {
                let begin = bytes.as_ptr() as usize - all.as_ptr() as usize;
                at = Some((Arc::clone(file), begin, begin + bytes.len()));
            }
            Ok(())
        })?;
        match at {
            Some((file, begin, end)) => View::range(&file, begin, end),
            None => Ok(None),
        }
    }

    /// Looks at everything that the first `elements` elements need: files, indices, frames; with `deep` every block is decoded.
    /// What is wrong goes to `tell`, with whether it is only not there (and reads as zeros).
    pub fn check(&self, elements: u64, deep: bool, tell: &mut dyn FnMut(Error, bool), watch: Watch<'_>) -> Result<()> {
        let mut held = Held::default();
        for number in 0..elements.div_ceil(self.meta.outer) {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let path = self.meta.file(&self.folder, number);
            let shard = match self.shard(number) {
                Ok(shard) => shard,
                Err(error) => {
                    tell(error, false);
                    continue;
                }
            };
            if shard.file.is_none() {
                tell(Error::new(Kind::NotFound, "is not there: its elements read as 0").at(&path), true);
                continue;
            }
            let first = number * self.meta.outer;
            let within = (elements - first).min(self.meta.outer);
            let (mut absent, mut last) = (0u64, 0);
            for (chunk, entry) in shard.index.iter().enumerate().take(within.div_ceil(self.meta.inner) as usize) {
                if entry.0 == u64::MAX && self.meta.coding != Coding::Foreign {
                    absent += 1;
                    last = chunk;
                    continue;
                }
                let start = first + chunk as u64 * self.meta.inner;
                let n = if deep { (elements - start).min(self.meta.inner) as usize } else { 1 };
                if let Err(error) = self.visit(&mut held, start, n, &mut |_, _, _| Ok(())) {
                    tell(error, false);
                }
            }
            if absent > 0 {
                let detail = format!("{absent} inner chunks are not there (the last is {last}): they read as 0");
                tell(Error::new(Kind::NotFound, detail).at(&path), true);
            }
        }
        Ok(())
    }

    /// Asks the processor for the beginning of a range, where it is stored in the file that was read from last.
    pub fn prefetch(&self, held: &Held, start: u64, n: usize) {
        let Some((array, number, shard)) = &held.0 else { return };
        let (file, within) = (start / self.meta.outer, start % self.meta.outer);
        let (chunk, first) = ((within / self.meta.inner) as usize, within % self.meta.inner);
        if *array != self.number || *number != file || shard.seen[chunk].load(Ordering::Relaxed) != seen::STORED {
            return;
        }
        if let Some(map) = shard.file.as_ref().and_then(|file| file.map()) {
            // Processors fetch ahead by themselves, but never into the next page.
            let begin = shard.index[chunk].0 as usize + HEADER + first as usize * self.meta.item();
            let end = begin + n.min(PREFETCHED / self.meta.item()) * self.meta.item();
            map.prefetch(begin);
            for page in (begin.next_multiple_of(PAGE)..end).step_by(PAGE) {
                map.prefetch(page);
            }
        }
    }

    /// Starts reading what a range will need into the page cache, if it is not there; whether it was. A hint: what fails here fails
    /// again when it is read, and is told then.
    pub fn will_need(&self, held: &mut Held, start: u64, n: usize) -> bool {
        let item = self.meta.item() as u64;
        let mut all_there = true;
        let _ = self.pieces(held, start, n, &mut |shard, piece, _| {
            let (offset, len) = shard.index[piece.chunk];
            let Some(file) = shard.file.as_ref().filter(|_| offset != u64::MAX) else { return Ok(()) };
            let stored = shard.seen[piece.chunk].load(Ordering::Relaxed) == seen::STORED;
            let (at, n) = if stored {
                (offset + HEADER as u64 + piece.first as u64 * item, piece.n as u64 * item)
            } else {
                (offset, len)
            };
            if let Some(descriptor) = file.file()
                && pread::is_cached(descriptor, at) == pread::Cached::No
            {
                all_there = false;
                pread::will_need(descriptor, at, n);
            }
            Ok(())
        });
        all_there
    }
}

fn read(file: &OpenFile, out: &mut [u8], at: u64) -> Result<()> {
    match file.body() {
        Body::Read(descriptor) | Body::Mapped(descriptor, _) => {
            pread::read_exact_at(descriptor, out, at).map_err(|e| Error::from_io(&e, file.path(), "read"))
        }
        Body::Memory(_) | Body::Fill(_) => {
            Err(Error::new(Kind::Internal, "a file that cannot be read").at(file.path()))
        }
    }
}

fn to_int32(dtype: DType, bytes: &[u8], out: &mut [i32]) -> bool {
    macro_rules! each {
        ($t:ty) => {{
            const SIZE: usize = size_of::<$t>();
            let mut fits = true;
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<SIZE>().0) {
                let value = <$t>::from_le_bytes(*from);
                *to = value as i32;
                fits &= *to as i128 == value as i128;
            }
            fits
        }};
    }
    match dtype {
        DType::I64 => {
            // Without a branch in the loop, and without comparing 64 bits, which old processors do slowly: ids have no sign.
            let mut all = 0u64;
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<8>().0) {
                let value = u64::from_le_bytes(*from);
                *to = value as i32;
                all |= value;
            }
            all < 1 << 31 || each!(i64)
        }
        DType::I32 => {
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *to = i32::from_le_bytes(*from);
            }
            true
        }
        DType::U32 => {
            let mut all = 0u32;
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                let value = u32::from_le_bytes(*from);
                *to = value.cast_signed();
                all |= value;
            }
            all < 1 << 31
        }
        DType::U16 => {
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *to = i32::from(u16::from_le_bytes(*from));
            }
            true
        }
        DType::U64 => each!(u64),
        DType::I16 => each!(i16),
        DType::I8 => each!(i8),
        DType::U8 => each!(u8),
        _ => false,
    }
}

fn to_float32(dtype: DType, bytes: &[u8], out: &mut [f32]) -> bool {
    macro_rules! each {
        ($t:ty) => {{
            const SIZE: usize = size_of::<$t>();
            for (to, from) in out.iter_mut().zip(bytes.as_chunks::<SIZE>().0) {
                *to = <$t>::from_le_bytes(*from) as f32;
            }
            true
        }};
    }
    match dtype {
        DType::F32 => each!(f32),
        DType::F64 => each!(f64),
        DType::F16 => each_half(bytes, out, |b| half::f16::from_le_bytes(b).to_f32()),
        DType::BF16 => each_half(bytes, out, |b| half::bf16::from_le_bytes(b).to_f32()),
        DType::I64 => each!(i64),
        DType::U64 => each!(u64),
        DType::I32 => each!(i32),
        DType::U32 => each!(u32),
        DType::I16 => each!(i16),
        DType::U16 => each!(u16),
        DType::I8 => each!(i8),
        DType::U8 => each!(u8),
        _ => false,
    }
}

fn each_half(bytes: &[u8], out: &mut [f32], widen: impl Fn([u8; 2]) -> f32) -> bool {
    for (to, from) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
        *to = widen(*from);
    }
    true
}
