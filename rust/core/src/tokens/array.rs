//! A one-dimensional array of numbers in Zarr shards, read by ranges.
//!
//! A file is opened on first use; its index is read then, and its checksum verified. Stored numbers are copied from the mapping
//! or viewed in place. Other blocks in the range are decoded, and cached within the memory budget.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use zarrs::array::BytesToBytesCodecTraits;

use super::frame::{Blocks, Frame, HEADER, Planes, blosc, most_stored};
use super::ledger::LedgerState;
use super::meta::Meta;
use super::narrow::{to_float32, to_int32};
use crate::arrays::coded::{self, CodedArray};
use crate::arrays::file::{ChunkFile, StoredUnit};
use crate::arrays::index::Entries;
use crate::arrays::key::{UnitKey, VersionNumbers, WHOLE, new_array};
use crate::arrays::meta::Coding;
use crate::codec::cache::Cache;
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::files::open::View;
use crate::kernels::prefetch;
use crate::location::Location;
use crate::source::slots::{Opened, Slots};
use crate::source::{Access, ByteRange, Ready, Source, Store};
use crate::threads::{ForkSafe, Stop, Watch};

/// A cache of decoded blocks, shared by arrays.
pub type BlockCache = Cache<Planes, UnitKey>;

/// Bytes of a range to prefetch.
const PREFETCHED: usize = 32 << 10;
const PAGE: usize = 4096;
/// Bytes of fill values per call.
const FILLED: usize = 64 << 10;

/// States of an inner chunk's frame.
mod seen {
    pub const NOTHING: u8 = 0;
    pub const STORED: u8 = 1;
}

/// A file of an array, and the known kinds of its inner chunks.
#[derive(Debug)]
pub struct TokenFile {
    file: ChunkFile,
    /// The number of the file's version, in keys of the cache.
    version: u64,
    /// Indexed by inner chunk.
    seen: Arc<[AtomicU8]>,
    /// Frame headers fetched from a slow store, by inner chunk; `None` for other stores. The lock is only tried, not waited
    /// for: a child forked while another thread held it reads the header again.
    headers: Option<Arc<ForkSafe<HashMap<usize, FrameHeader>>>>,
}

type FrameHeader = [u8; HEADER];

impl TokenFile {
    /// Whether an inner chunk is known to be a stored frame.
    fn is_plain(&self, chunk: usize) -> bool {
        self.seen.get(chunk).is_some_and(|seen| seen.load(Ordering::Relaxed) == seen::STORED)
    }

    fn see_plain(&self, chunk: usize) {
        if let Some(seen) = self.seen.get(chunk) {
            seen.store(seen::STORED, Ordering::Relaxed);
        }
    }

    fn header(&self, chunk: usize) -> Option<FrameHeader> {
        self.headers.as_ref()?.try_lock()?.get(&chunk).copied()
    }

    /// Caches the header of an inner chunk's frame.
    pub(super) fn keep_header(&self, chunk: usize, header: FrameHeader) {
        if let Some(mut headers) = self.headers.as_ref().and_then(|headers| headers.try_lock()) {
            headers.insert(chunk, header);
        }
    }

    /// The file's source.
    pub(super) fn source(&self) -> Option<&Arc<dyn Source>> {
        self.file.source()
    }

    /// The same file with another source of its bytes.
    pub(super) fn over(&self, source: Arc<dyn Source>) -> TokenFile {
        let (seen, headers) = (Arc::clone(&self.seen), self.headers.clone());
        TokenFile { file: self.file.over(source), version: self.version, seen, headers }
    }
}

impl Opened for TokenFile {
    fn may_keep(&self) -> bool {
        self.file.may_keep()
    }

    /// Files of slow stores have no descriptors: closing them would only cost requests.
    fn holds_descriptor(&self) -> bool {
        self.headers.is_none()
    }
}

/// An open array.
#[derive(Debug)]
pub struct TokenArray {
    store: Arc<dyn Store>,
    folder: Location,
    meta: Meta,
    files: Slots<TokenFile>,
    cache: Arc<BlockCache>,
    number: u64,
    versions: VersionNumbers,
    foreign: Option<CodedArray>,
    ledger: Arc<LedgerState>,
}

impl Opened for TokenArray {
    fn may_keep(&self) -> bool {
        true
    }

    /// Its files have descriptors, and each file has a slot.
    fn holds_descriptor(&self) -> bool {
        false
    }
}

/// The file of the last read. A caller that reads many ranges reuses it without a lock, and its length is checked once.
#[derive(Debug, Default)]
pub struct HeldFile {
    last: Option<(u64, u64, Arc<TokenFile>)>,
    staged: Option<Arc<StagedFiles>>,
}

impl HeldFile {
    /// Fetched files are read from memory.
    pub(super) fn over(staged: &Arc<StagedFiles>) -> HeldFile {
        HeldFile { last: None, staged: Some(Arc::clone(staged)) }
    }
}

/// Files over fetched bytes, by the numbers of array and file.
pub(super) type StagedFiles = HashMap<(u64, u64), Arc<TokenFile>>;

/// A part of a range: the file, the inner chunk in it, and the numbers in that.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkRange {
    /// The file's number.
    pub file: u64,
    /// The inner chunk's index in the file.
    pub chunk: usize,
    first: usize,
    n: usize,
}

/// The data that must be fetched before a part can be read from memory.
pub(super) enum Lacking {
    Nothing,
    /// A frame's header, which determines what else is needed.
    Header(ByteRange),
    Bytes(ByteRange),
}

/// The numbers of a part.
enum ChunkBytes<'a> {
    /// Stored in the file.
    Stored(&'a [u8]),
    /// Decoded; the part begins at this number.
    Decoded(Arc<Planes>, usize),
    /// Read into memory.
    Read(Vec<u8>),
    /// All the fill value.
    Fill,
}

impl TokenArray {
    /// Opens the array in a folder of a store. `elements` is the maximum number of elements to read, if known. Opens no
    /// file but `zarr.json`.
    pub fn open(
        store: &Arc<dyn Store>,
        folder: Location,
        cache: Arc<BlockCache>,
        elements: Option<u64>,
        ledger: Arc<LedgerState>,
    ) -> Result<TokenArray> {
        let store = Arc::clone(store);
        let (meta, text) = Meta::read_with_text(&*store, &folder)?;
        ledger.check(&*store)?;
        let files = Slots::new(elements.map_or(64, |n| n.div_ceil(meta.outer)));
        let foreign = (meta.coding == Coding::Foreign)
            .then(|| CodedArray::of(Arc::clone(&store), &folder, &text, meta.index.is_some()));
        let (number, versions) = (new_array(), VersionNumbers::default());
        Ok(TokenArray { store, folder, meta, files, cache, number, versions, foreign, ledger })
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.meta.dtype
    }

    /// The parsed `zarr.json`.
    pub fn meta(&self) -> &Meta {
        &self.meta
    }

    /// Its folder.
    pub fn folder(&self) -> &Location {
        &self.folder
    }

    /// An open file.
    pub(super) fn shard(&self, number: u64) -> Result<Arc<TokenFile>> {
        self.files.get(number, || self.open_shard(number))
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "opening a near file takes a moment, and far ones are opened together"
    )]
    fn open_shard(&self, number: u64) -> Result<TokenFile> {
        let location = self.meta.file(&self.folder, number);
        let file = ChunkFile::open(self.store.open(&location, Access::Kept, Stop::never()), |source, version| {
            match &self.meta.index {
                Some(form) => {
                    let (at, raw) = form.read(source, Kind::Truncated)?;
                    let entries = form.parse_within(&raw, source.size());
                    let entries = entries.map_err(|(within, error)| error.at(&location).byte(at + within))?;
                    Ok(Arc::new(Entries(entries.into())))
                }
                None => ChunkFile::one_unit(source, version),
            }
        })?;
        self.ledger.check(&*self.store)?;
        if file.source().is_none() && self.ledger.is_complete {
            let detail = "the file is missing: the cache is incomplete; copy it again, or build it again";
            return Err(Error::new(Kind::NotFound, detail).at(&location));
        }
        let seen = (0..file.units()).map(|_| AtomicU8::new(seen::NOTHING)).collect();
        let version = self.versions.number(number, file.version());
        Ok(TokenFile { file, version, seen, headers: self.store.wishes().map(|_| Arc::default()) })
    }

    /// The parts of a range, without opening a file.
    pub(super) fn chunk_ranges(&self, start: u64, n: usize) -> Vec<ChunkRange> {
        let (outer, inner) = (self.meta.outer, self.meta.inner);
        let (mut done, mut found) = (0usize, vec![]);
        while done < n {
            let Some(at) = start.checked_add(done as u64) else { break };
            let (file, within) = (at / outer, at % outer);
            let (chunk, first) = ((within / inner) as usize, within % inner);
            let take = (n - done).min((inner - first) as usize);
            found.push(ChunkRange { file, chunk, first: first as usize, n: take });
            done += take;
        }
        found
    }

    /// The missing data of a part. Damage is reported when the part is read.
    pub(super) fn lacking(&self, file: &TokenFile, piece: ChunkRange) -> Result<Lacking> {
        let Some(unit) = file.file.unit(piece.chunk)? else { return Ok(Lacking::Nothing) };
        let (item, bytes) = (self.meta.item() as u64, self.inner_bytes());
        let numbers = |at: usize| {
            let at = unit.offset + at as u64 + piece.first as u64 * item;
            Lacking::Bytes(ByteRange { at, len: piece.n as u64 * item })
        };
        let kept =
            |block, upto| self.cache.get(self.key(file, piece, block)).is_some_and(|planes| planes.numbers() >= upto);
        let whole = |kept: bool| match kept {
            false if unit.len <= most_stored(bytes) => Lacking::Bytes(ByteRange { at: unit.offset, len: unit.len }),
            _ => Lacking::Nothing,
        };
        let header = match self.meta.coding {
            Coding::Plain if unit.len == bytes as u64 => return Ok(numbers(0)),
            Coding::Plain => return Ok(Lacking::Nothing),
            Coding::Foreign => return Ok(whole(kept(WHOLE, 0))),
            Coding::Blosc if file.is_plain(piece.chunk) => return Ok(numbers(HEADER)),
            Coding::Blosc if unit.len < HEADER as u64 => return Ok(Lacking::Nothing),
            Coding::Blosc => file.header(piece.chunk),
        };
        let Some(header) = header else {
            return Ok(Lacking::Header(ByteRange { at: unit.offset, len: HEADER as u64 }));
        };
        Ok(match Frame::parse(&header, unit.len, bytes, self.meta.item()) {
            Ok(Frame::Stored) => {
                file.see_plain(piece.chunk);
                numbers(HEADER)
            }
            Ok(Frame::Blocks(blocks)) => {
                let (each, end) = (blocks.numbers(0).max(1), piece.first + piece.n);
                let upto = |block: usize| (end - block * each).min(blocks.numbers(block));
                let mut touched = piece.first / each..end.div_ceil(each);
                whole(touched.all(|block| kept((block, each), upto(block))))
            }
            Ok(Frame::Other) => whole(kept(WHOLE, 0)),
            Err(_) => Lacking::Nothing,
        })
    }

    /// Its process-wide number.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Calls `each` with the parts of a range in order: the file, the part, and the number of elements before it.
    fn pieces(
        &self,
        held: &mut HeldFile,
        start: u64,
        n: usize,
        each: &mut dyn FnMut(&TokenFile, ChunkRange, usize) -> Result<()>,
    ) -> Result<()> {
        let (outer, inner) = (self.meta.outer, self.meta.inner);
        let mut done = 0usize;
        while done < n {
            let at = start.checked_add(done as u64).ok_or_else(|| Error::new(Kind::Format, "an offset beyond 2^64"))?;
            let (file, within) = (at / outer, at % outer);
            let (chunk, first) = (within / inner, within % inner);
            let take = (n - done).min((inner - first) as usize);
            if !matches!(&held.last, Some((array, number, _)) if *array == self.number && *number == file) {
                let staged = held.staged.as_ref().and_then(|staged| staged.get(&(self.number, file)));
                let shard = staged.map_or_else(|| self.shard(file), |staged| Ok(Arc::clone(staged)))?;
                if let Some(file) = shard.file.source() {
                    file.unchanged()?;
                }
                held.last = Some((self.number, file, shard));
            }
            if let Some((_, _, shard)) = &held.last {
                each(shard, ChunkRange { file, chunk: chunk as usize, first: first as usize, n: take }, done)?;
            }
            done += take;
        }
        Ok(())
    }

    fn find<'a>(&self, shard: &'a TokenFile, piece: ChunkRange) -> Result<ChunkBytes<'a>> {
        let Some(unit) = shard.file.unit(piece.chunk)? else { return Ok(ChunkBytes::Fill) };
        let (bytes, len) = (self.inner_bytes(), unit.len);
        let longest = most_stored(bytes);
        match self.meta.coding {
            Coding::Plain if len == bytes as u64 => self.as_it_is(unit, 0, piece.first, piece.n),
            Coding::Plain => Err(unit.bad(format!("expected an inner chunk of {bytes} bytes, found {len}"))),
            Coding::Blosc if shard.is_plain(piece.chunk) => self.as_it_is(unit, HEADER, piece.first, piece.n),
            Coding::Blosc | Coding::Foreign if len > longest => {
                Err(unit.bad(format!("expected an encoded inner chunk of at most {longest} bytes, found {len}")))
            }
            Coding::Foreign => self.find_whole(shard, unit, piece),
            Coding::Blosc => self.find_in_frame(shard, unit, piece),
        }
    }

    #[expect(clippy::disallowed_methods, reason = "a header, and far ones are fetched together")]
    fn find_in_frame<'a>(
        &self,
        shard: &'a TokenFile,
        unit: StoredUnit<'a>,
        piece: ChunkRange,
    ) -> Result<ChunkBytes<'a>> {
        if unit.len < HEADER as u64 {
            return Err(unit.bad(format!("expected a blosc frame, found {} bytes", unit.len)));
        }
        let mut header = [0u8; HEADER];
        match unit.mapped() {
            Some(frame) => header.copy_from_slice(&frame[..HEADER]),
            None => match shard.header(piece.chunk) {
                Some(known) => header = known,
                None => unit.source.read(unit.offset, &mut header, Stop::never())?,
            },
        }
        match Frame::parse(&header, unit.len, self.inner_bytes(), self.meta.item()).map_err(|e| unit.bad(e))? {
            Frame::Stored => {
                shard.see_plain(piece.chunk);
                self.as_it_is(unit, HEADER, piece.first, piece.n)
            }
            Frame::Blocks(blocks) => self.find_in_blocks(shard, unit, &blocks, piece),
            Frame::Other => self.find_whole(shard, unit, piece),
        }
    }

    fn find_in_blocks<'a>(
        &self,
        shard: &'a TokenFile,
        unit: StoredUnit<'a>,
        blocks: &Blocks,
        piece: ChunkRange,
    ) -> Result<ChunkBytes<'a>> {
        let item = self.meta.item();
        // All blocks except the last have as many numbers as the first.
        let block = piece.first / blocks.numbers(0);
        let first = piece.first - block * blocks.numbers(0);
        let numbers = blocks.numbers(block);
        let upto = (first + piece.n).min(numbers);
        if let Some(whole) = unit.mapped()
            && let Some(at) = blocks.stored(whole, block)
        {
            return self.as_it_is(unit, at, first, upto - first);
        }
        let key = || self.key(shard, piece, (block, blocks.numbers(0)));
        let decode = || {
            // The first time only as far as needed, the second time in full.
            let upto = if self.cache.get(key()).is_some() { numbers } else { upto };
            unit.decode(|whole| match blocks.stored(whole, block) {
                Some(at) => Ok(Some(Planes::whole(whole[at..at + numbers * item].to_vec(), item, numbers))),
                None => blocks.decode(whole, block, upto).map(Some).map_err(|e| unit.bad(e)),
            })
        };
        let planes = self.cache.get_or_load(key(), |planes| planes.numbers() >= upto, decode)?;
        Ok(planes.map_or(ChunkBytes::Fill, |planes| ChunkBytes::Decoded(planes, first)))
    }

    /// Finds numbers of an inner chunk that zarrs or c-blosc decodes as a whole.
    fn find_whole<'a>(&self, shard: &'a TokenFile, unit: StoredUnit<'a>, piece: ChunkRange) -> Result<ChunkBytes<'a>> {
        let (numbers, bytes) = (self.meta.inner as usize, self.inner_bytes());
        let location = unit.source.location();
        let decode = || {
            let decoded = match &self.foreign {
                Some(coded) => coded.decode_unit(unit, bytes as u64),
                None => unit.decode(|frame| self.decode_frame(frame, bytes, location).map_err(|e| e.byte(unit.offset))),
            };
            Ok(Some(Planes::whole(decoded?, self.meta.item(), numbers)))
        };
        let planes = self.cache.get_or_load(self.key(shard, piece, WHOLE), |_| true, decode)?;
        Ok(planes.map_or(ChunkBytes::Fill, |planes| ChunkBytes::Decoded(planes, piece.first)))
    }

    fn key(&self, shard: &TokenFile, piece: ChunkRange, block: (usize, usize)) -> UnitKey {
        UnitKey { array: self.number, file: piece.file, version: shard.version, chunk: piece.chunk, block }
    }

    fn inner_bytes(&self) -> usize {
        self.meta.inner as usize * self.meta.item()
    }

    /// `n` uncompressed numbers of an inner chunk, from number `first` after byte `at`.
    fn as_it_is<'a>(&self, unit: StoredUnit<'a>, at: usize, first: usize, n: usize) -> Result<ChunkBytes<'a>> {
        let item = self.meta.item();
        Ok(match unit.part(at + first * item, n * item)? {
            Cow::Borrowed(bytes) => ChunkBytes::Stored(bytes),
            Cow::Owned(bytes) => ChunkBytes::Read(bytes),
        })
    }

    /// Decodes a frame with c-blosc: other codecs, bit shuffle.
    fn decode_frame(&self, frame: &[u8], bytes: usize, location: &Location) -> Result<Vec<u8>> {
        coded::guarded(location, || {
            let codec = blosc(1)?;
            let made = codec
                .decode(
                    frame.into(),
                    &zarrs::array::BytesRepresentation::FixedSize(bytes as u64),
                    &zarrs::array::CodecOptions::default(),
                )
                .map_err(|e| Error::new(Kind::Format, format!("c-blosc cannot decode this: {e}")).at(location))?;
            coded::of_length(made.into_owned(), bytes as u64, location)
        })
    }

    /// The fill value's bytes.
    fn fill(&self) -> &[u8] {
        &self.meta.fill[..self.meta.item()]
    }

    /// Calls `each` with the numbers of a range in order: their bytes, and the number of elements before them.
    pub fn each(&self, held: &mut HeldFile, start: u64, n: usize, each: &mut dyn FnMut(&[u8], usize)) -> Result<()> {
        self.visit(held, start, n, &mut |found, piece, before| {
            match found {
                ChunkBytes::Stored(bytes) => each(bytes, before),
                ChunkBytes::Read(bytes) => each(bytes, before),
                ChunkBytes::Decoded(planes, first) => each(&planes.bytes(*first, piece), before),
                ChunkBytes::Fill => {
                    let at_once = (FILLED / self.meta.item()).min(piece);
                    let some = self.fill().repeat(at_once);
                    for first in (0..piece).step_by(at_once.max(1)) {
                        let n = at_once.min(piece - first);
                        each(&some[..n * self.meta.item()], before + first);
                    }
                }
            }
            Ok(())
        })
    }

    /// Visits the parts of a range; a part may end before its inner chunk does, because blocks are smaller.
    fn visit(
        &self,
        held: &mut HeldFile,
        start: u64,
        n: usize,
        each: &mut dyn FnMut(&ChunkBytes<'_>, usize, usize) -> Result<()>,
    ) -> Result<()> {
        let item = self.meta.item();
        self.pieces(held, start, n, &mut |shard, mut piece, mut before| {
            while piece.n > 0 {
                let found = self.find(shard, piece)?;
                let got = match &found {
                    ChunkBytes::Stored(bytes) => bytes.len() / item,
                    ChunkBytes::Read(bytes) => bytes.len() / item,
                    ChunkBytes::Decoded(planes, first) => planes.numbers().saturating_sub(*first),
                    ChunkBytes::Fill => piece.n,
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

    /// Copies a range in the stored dtype.
    pub fn copy(&self, held: &mut HeldFile, start: u64, out: &mut [u8]) -> Result<()> {
        let item = self.meta.item();
        self.each(held, start, out.len() / item, &mut |bytes, before| {
            out[before * item..before * item + bytes.len()].copy_from_slice(bytes);
        })
    }

    /// A range of integers as int32; an integer that does not fit is an error.
    pub fn int32(&self, held: &mut HeldFile, start: u64, out: &mut [i32]) -> Result<()> {
        let dtype = self.meta.dtype;
        self.visit(held, start, out.len(), &mut |found, n, before| {
            let to = &mut out[before..before + n];
            let fits = match found {
                ChunkBytes::Stored(bytes) => to_int32(dtype, bytes, to),
                ChunkBytes::Read(bytes) => to_int32(dtype, bytes, to),
                ChunkBytes::Decoded(planes, first) => {
                    planes.narrow(*first, to) || to_int32(dtype, &planes.bytes(*first, n), to)
                }
                ChunkBytes::Fill => {
                    let mut one = [0];
                    let fits = to_int32(dtype, self.fill(), &mut one);
                    to.fill(one[0]);
                    fits
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
    pub fn float32(&self, held: &mut HeldFile, start: u64, out: &mut [f32]) -> Result<()> {
        let (dtype, item) = (self.meta.dtype, self.meta.item());
        let mut known = true;
        self.each(held, start, out.len(), &mut |bytes, before| {
            known &= to_float32(dtype, bytes, &mut out[before..before + bytes.len() / item]);
        })?;
        if known {
            return Ok(());
        }
        Err(Error::new(Kind::DType, format!("cannot convert {} to float32", dtype.name())).at(&self.folder))
    }

    /// A view of a range in a mapped file; `None` if it is not contiguous there.
    pub fn view(&self, held: &mut HeldFile, start: u64, n: usize) -> Result<Option<View>> {
        if n == 0 || self.store.wishes().is_some() {
            return Ok(None);
        }
        let mut at: Option<(Arc<dyn Source>, usize, usize)> = None;
        let mut pieces = 0;
        self.pieces(held, start, n, &mut |shard, piece, _| {
            pieces += 1;
            if pieces > 1 || piece.n < n {
                return Ok(());
            }
            let Some(file) = shard.file.source() else { return Ok(()) };
            if let Some(all) = file.bytes()
                && let ChunkBytes::Stored(bytes) = self.find(shard, piece)?
                && bytes.len() == n * self.meta.item()
            {
                let begin = bytes.as_ptr() as usize - all.as_ptr() as usize;
                at = Some((Arc::clone(file), begin, begin + bytes.len()));
            }
            Ok(())
        })?;
        match at {
            Some((file, begin, end)) => View::range(&*file, begin, end),
            None => Ok(None),
        }
    }

    /// Numbers of the files that may exist, in ascending order.
    pub fn existing(&self) -> Result<Vec<u64>> {
        self.meta.existing(&*self.store, &self.folder)
    }

    /// Checks everything that the first `elements` elements need: files, indexes, frames; with `deep` decodes every
    /// block. Reports each problem to `each`, with whether data is only missing (and reads as the fill value).
    ///
    /// The work depends on the existing files, not on the number of elements.
    pub fn check(&self, elements: u64, deep: bool, each: &mut dyn FnMut(Error, bool), watch: Watch<'_>) -> Result<()> {
        let existing = self.existing()?;
        for gap in self.gaps(&existing, elements) {
            self.report_missing(gap, each);
        }
        let files = elements.div_ceil(self.meta.outer);
        for number in existing.into_iter().filter(|number| *number < files) {
            self.check_file(number, elements, deep, each, watch)?;
        }
        Ok(())
    }

    /// Ranges of missing files among those of the first `elements` elements. `existing`: numbers of files, in ascending order.
    pub(super) fn gaps(&self, existing: &[u64], elements: u64) -> Vec<Range<u64>> {
        let files = elements.div_ceil(self.meta.outer);
        let ends = existing.iter().copied().filter(|number| *number < files).chain([files]);
        let starts = [0].into_iter().chain(existing.iter().map(|number| number + 1));
        starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty()).collect()
    }

    fn report_missing(&self, files: Range<u64>, report: &mut dyn FnMut(Error, bool)) {
        let path = self.meta.file(&self.folder, files.start);
        let detail = match files.end - files.start {
            1 => "the file is missing".to_string(),
            n => format!("this file and the {} after it are missing", n - 1),
        };
        let is_fill = !self.ledger.is_complete;
        let detail = if is_fill { format!("{detail}; the elements read as the fill value") } else { detail };
        report(Error::new(Kind::NotFound, detail).at(&path), is_fill);
    }

    fn check_file(
        &self,
        number: u64,
        elements: u64,
        deep: bool,
        report: &mut dyn FnMut(Error, bool),
        watch: Watch<'_>,
    ) -> Result<()> {
        let shard = match self.shard(number) {
            Ok(shard) => shard,
            Err(error) => {
                report(error, false);
                return Ok(());
            }
        };
        if shard.file.source().is_none() {
            self.report_missing(number..number + 1, report);
            return Ok(());
        }
        let mut held = HeldFile::default();
        let first = number * self.meta.outer;
        let within = (elements - first).min(self.meta.outer);
        let (mut absent, mut last) = (0u64, 0);
        for chunk in 0..shard.file.units().min(within.div_ceil(self.meta.inner) as usize) {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            if shard.file.unit(chunk)?.is_none() {
                absent += 1;
                last = chunk;
                continue;
            }
            let start = first + chunk as u64 * self.meta.inner;
            let n = if deep { (elements - start).min(self.meta.inner) as usize } else { 1 };
            if let Err(error) = self.visit(&mut held, start, n, &mut |_, _, _| Ok(())) {
                report(error, false);
            }
        }
        if absent > 0 {
            let path = self.meta.file(&self.folder, number);
            let detail = format!("{absent} inner chunks are missing (the last is {last}): they read as the fill value");
            report(Error::new(Kind::NotFound, detail).at(&path), true);
        }
        Ok(())
    }

    /// Prefetches the beginning of a range into the processor's cache, if it is stored in the file of the last read.
    pub fn prefetch(&self, held: &HeldFile, start: u64, n: usize) {
        let Some((array, number, shard)) = &held.last else { return };
        let (file, within) = (start / self.meta.outer, start % self.meta.outer);
        let (chunk, first) = ((within / self.meta.inner) as usize, within % self.meta.inner);
        if *array != self.number || *number != file || !shard.is_plain(chunk) {
            return;
        }
        if let Ok(Some(unit)) = shard.file.unit(chunk)
            && let Some(bytes) = unit.source.bytes()
        {
            // Processors prefetch on their own, but not into the next page.
            let begin = unit.offset as usize + HEADER + first as usize * self.meta.item();
            let end = begin + n.min(PREFETCHED / self.meta.item()) * self.meta.item();
            prefetch(bytes.get(begin..).unwrap_or_default());
            for page in (begin.next_multiple_of(PAGE)..end).step_by(PAGE) {
                prefetch(bytes.get(page..).unwrap_or_default());
            }
        }
    }

    /// Whether the data of a range may have to be fetched: it is not cached, or other data of its file were not a moment ago.
    pub fn is_doubtful(&self, held: &mut HeldFile, start: u64, n: usize) -> bool {
        let mut is_doubtful = false;
        self.each_unit(held, start, n, &mut |source, range| {
            let is_cold = source.is_ready(range.at) == Ready::No;
            match source.warmth() {
                Some(warmth) if is_cold => warmth.found_cold(),
                Some(warmth) => is_doubtful |= warmth.is_wary(),
                None => {}
            }
            is_doubtful |= is_cold;
        });
        is_doubtful
    }

    /// Whether elements are stored as they are, not encoded.
    pub fn is_plain(&self, held: &mut HeldFile, start: u64, n: usize) -> bool {
        let mut is_plain = true;
        let pieces = self.pieces(held, start, n, &mut |shard, piece, _| {
            is_plain &= shard.is_plain(piece.chunk);
            Ok(())
        });
        is_plain && pieces.is_ok()
    }

    /// Starts reading the data of a range into the page cache. A hint: its errors are reported when the range is read.
    pub fn will_need(&self, held: &mut HeldFile, start: u64, n: usize) {
        self.each_unit(held, start, n, &mut |source, range| {
            if source.is_ready(range.at) == Ready::No {
                source.will_need(&[range]);
            }
        });
    }

    /// Calls `each` with the stored bytes of a range, as far as their files can be opened.
    fn each_unit(&self, held: &mut HeldFile, start: u64, n: usize, each: &mut dyn FnMut(&dyn Source, ByteRange)) {
        let item = self.meta.item() as u64;
        let _ = self.pieces(held, start, n, &mut |shard, piece, _| {
            let Some(StoredUnit { source, offset, len }) = shard.file.unit(piece.chunk)? else { return Ok(()) };
            let range = if shard.is_plain(piece.chunk) {
                ByteRange { at: offset + HEADER as u64 + piece.first as u64 * item, len: piece.n as u64 * item }
            } else {
                ByteRange { at: offset, len }
            };
            each(source, range);
            Ok(())
        });
    }
}
