//! Writes token caches: arrays in Zarr shards, rows appended to fields, shards concatenated by copying bytes.
//!
//! The files equal Levanter's (`formats/levanter.md` 1.2, 1.3), except that numbers may be *stored*: such frames contain them
//! uncompressed, and c-blosc reads them like any other. A partial frame is written without its zeros
//! ([`super::frame::short_frame`]).

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::json;
use zarrs::array::BytesToBytesCodecTraits;

use super::frame::{HEADER, blosc, short_frame, stored_header};
use super::jagged::{Cursor, Field};
use crate::arrays::index;
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::memory::{self, output::Output};
use crate::threads::{self, Stop, Watch};
use crate::write::{self as pieces, Piece, Target};

/// Elements per inner chunk and inner chunks per file: the only sizes that Levanter opens.
pub const INNER: usize = 262_144;
const PER_FILE: usize = 512;
/// The length in the metadata of arrays of unknown length.
const LENGTH: u64 = 1 << 54;

/// The encoding of numbers in frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// Uncompressed.
    Plain,
    /// As in Levanter: LZ4, level 5, byte shuffle.
    Lz4,
}

impl Storage {
    /// `"plain"` or `"lz4"`; `None` for any other name.
    pub fn from_name(name: &str) -> Option<Storage> {
        match name {
            "plain" => Some(Storage::Plain),
            "lz4" => Some(Storage::Lz4),
            _ => None,
        }
    }
}

/// An array being written sequentially.
#[derive(Debug)]
struct ArrayWriter {
    folder: PathBuf,
    item: usize,
    /// Elements per row: 1, or the columns of a table.
    width: usize,
    storage: Storage,
    /// Whether the first frame is written last, because its first number is known last.
    holds_first: bool,
    first: Option<Vec<u8>>,
    /// Bytes of the partial frame; those of stored frames are in the stage.
    partial: Vec<u8>,
    stage: Option<Stage>,
    direct: bool,
    inner: usize,
    per_file: usize,
    /// Full frames waiting to be compressed together.
    waiting: Vec<Vec<u8>>,
    file: Option<ShardWriter>,
    frames: usize,
    columns: bool,
    /// CRC-32 of each finished file.
    checksums: Vec<u32>,
}

#[derive(Debug)]
struct ShardWriter {
    path: PathBuf,
    file: File,
    at: u64,
    index: Vec<(u64, u64)>,
    /// Of all bytes before `at`: files are written from their first byte to their last.
    crc: crc32fast::Hasher,
}

impl ShardWriter {
    fn create(path: PathBuf, per_file: usize) -> Result<ShardWriter> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|e| Error::from_io(&e, folder, "make"))?;
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(|e| Error::from_io(&e, &path, "open to write"))?;
        let (index, crc) = (vec![index::ABSENT; per_file], crc32fast::Hasher::new());
        Ok(ShardWriter { path, file, at: 0, index, crc })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, self.at).map_err(|e| Error::from_io(&e, &self.path, "write"))?;
        self.at += bytes.len() as u64;
        self.crc.update(bytes);
        Ok(())
    }

    fn frame(&mut self, slot: usize, parts: &[&[u8]]) -> Result<()> {
        let start = self.at;
        for part in parts {
            self.put(part)?;
        }
        self.index[slot] = (start, self.at - start);
        Ok(())
    }

    /// Writes the frames of a stage, starting at a slot.
    fn stage(&mut self, slot: usize, stage: &Stage, full: usize, direct: bool) -> Result<()> {
        let bytes = stage.frames * (PAGE + full);
        let target = Target { path: self.path.clone(), size: 0 };
        let piece = Piece { source: 0, start: 0, bytes: bytes as u64, file: 0, offset: self.at };
        let memory = &stage.memory.bytes()[..bytes];
        pieces::write(&[memory], &[target], &[piece], direct, &mut || false)?;
        self.crc.update(memory);
        for frame in 0..stage.frames {
            let start = self.at + (frame * (PAGE + full) + PAGE - HEADER) as u64;
            self.index[slot + frame] = (start, (HEADER + full) as u64);
        }
        self.at += bytes as u64;
        Ok(())
    }

    /// Writes the index and syncs the file. Returns the CRC-32 of its bytes.
    fn finish(mut self) -> Result<u32> {
        self.put(&index::encode(&self.index))?;
        self.file.sync_all().map_err(|e| Error::from_io(&e, &self.path, "write and sync"))?;
        Ok(self.crc.finalize())
    }
}

/// Options of writing.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// The encoding of numbers.
    pub storage: Storage,
    /// Bypass the page cache, if the file system supports it: the data is not read soon.
    pub direct: bool,
    /// Elements per inner chunk.
    pub inner: usize,
    /// Inner chunks per file.
    pub per_file: usize,
}

impl WriteOptions {
    /// Options with Levanter's chunk sizes, the only ones that it opens.
    pub fn new(storage: Storage, direct: bool) -> WriteOptions {
        WriteOptions { storage, direct, inner: INNER, per_file: PER_FILE }
    }
}

/// A page precedes each stored frame, and ends with the frame's header.
const PAGE: usize = 4096;
/// Bytes per write.
const STAGE: usize = 16 << 20;

/// Stored frames being filled.
#[derive(Debug)]
struct Stage {
    memory: Output,
    frames: usize,
    /// Bytes in the frame after them.
    filled: usize,
}

impl Stage {
    fn new(full: usize) -> Result<Stage> {
        let room = (STAGE / (PAGE + full)).max(1);
        let memory = Output::new(room * (PAGE + full))
            .map_err(|e| Error::new(Kind::NoMemory, format!("no memory to write from: {e}")))?;
        Ok(Stage { memory, frames: 0, filled: 0 })
    }

    fn room(&self, full: usize) -> usize {
        (STAGE / (PAGE + full)).max(1)
    }

    /// The unfilled part of the current frame.
    fn payload(&mut self, full: usize) -> &mut [u8] {
        let (start, filled) = (self.frames * (PAGE + full) + PAGE, self.filled);
        &mut self.memory.as_mut()[start + filled..start + full]
    }

    /// The current frame, from its start.
    fn payload_start(&mut self, full: usize) -> &mut [u8] {
        let start = self.frames * (PAGE + full) + PAGE;
        &mut self.memory.as_mut()[start..start + full]
    }

    /// Completes the current frame: writes its header and starts the next.
    fn close(&mut self, full: usize, item: usize) {
        let start = self.frames * (PAGE + full);
        let page = &mut self.memory.as_mut()[start..start + PAGE];
        page[..PAGE - HEADER].fill(0);
        page[PAGE - HEADER..].copy_from_slice(&stored_header(full, item));
        self.frames += 1;
    }

    /// Moves the partial frame to the front.
    fn restart(&mut self, full: usize) {
        let (from, filled) = (self.frames * (PAGE + full) + PAGE, self.filled);
        if filled > 0 {
            self.memory.as_mut().copy_within(from..from + filled, PAGE);
        }
        self.frames = 0;
    }
}

impl ArrayWriter {
    fn create(folder: PathBuf, dtype: DType, width: Option<u64>, how: WriteOptions, holds_first: bool) -> Result<Self> {
        let WriteOptions { storage, direct, inner, per_file } = how;
        let item = dtype.size().ok_or_else(|| Error::new(Kind::DType, format!("cannot store {}", dtype.name())))?;
        let columns = width.is_some();
        let width = usize::try_from(width.unwrap_or(1)).ok().filter(|w| (1..=1 << 10).contains(w));
        let width = width.ok_or_else(|| Error::new(Kind::Argument, "rows of more than 1,024 axes"))?;
        fs::create_dir_all(&folder).map_err(|e| Error::from_io(&e, &folder, "make"))?;
        let chunk = |n: usize| if columns { json!([n, width]) } else { json!([n]) };
        // Keys are sorted as in tensorstore, so that both write the same bytes.
        let endian = json!({"configuration": {"endian": "little"}, "name": "bytes"});
        let text = json!({
            "chunk_grid": {"configuration": {"chunk_shape": chunk(inner * per_file)}, "name": "regular"},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"configuration": {
                "chunk_shape": chunk(inner),
                "codecs": [endian, {"configuration": {
                    "blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "shuffle", "typesize": item,
                }, "name": "blosc"}],
                "index_codecs": [endian, {"name": "crc32c"}],
            }, "name": "sharding_indexed"}],
            "data_type": dtype.numpy_name(),
            // As tensorstore writes it for Levanter: 0.0 for floats.
            "fill_value": if is_float(dtype) { json!(0.0) } else { json!(0) },
            "node_type": "array",
            "shape": if columns { json!([LENGTH, width]) } else { json!([LENGTH]) },
            "zarr_format": 3,
        });
        let path = folder.join("zarr.json");
        let file = File::create(&path).map_err(|e| Error::from_io(&e, &path, "write"))?;
        file.write_all_at(text.to_string().as_bytes(), 0)
            .and_then(|()| file.sync_all())
            .map_err(|e| Error::from_io(&e, &path, "write"))?;
        Ok(ArrayWriter {
            folder,
            item,
            width,
            storage,
            holds_first,
            first: None,
            partial: vec![],
            stage: None,
            direct,
            inner,
            per_file,
            waiting: vec![],
            file: None,
            frames: 0,
            columns,
            checksums: vec![],
        })
    }

    fn frame_bytes(&self) -> usize {
        self.inner * self.width * self.item
    }

    fn append(&mut self, bytes: &[u8]) -> Result<()> {
        match self.storage {
            Storage::Plain => self.append_stored(bytes),
            Storage::Lz4 => self.append_compressed(bytes),
        }
    }

    /// Fills stored frames in place: each follows a page that ends with its header, so that numbers are page-aligned in memory
    /// and in the file, and can bypass the page cache.
    fn append_stored(&mut self, mut bytes: &[u8]) -> Result<()> {
        let full = self.frame_bytes();
        while !bytes.is_empty() {
            let stage = match &mut self.stage {
                Some(stage) => stage,
                None => self.stage.insert(Stage::new(full)?),
            };
            let take = bytes.len().min(full - stage.filled);
            stage.payload(full)[..take].copy_from_slice(&bytes[..take]);
            stage.filled += take;
            bytes = &bytes[take..];
            if stage.filled < full {
                continue;
            }
            stage.filled = 0;
            self.frames += 1;
            if self.holds_first && self.frames == 1 {
                self.first = Some(stage.payload(full).to_vec());
                continue;
            }
            stage.close(full, self.item);
            if stage.frames == stage.room(full) || self.frames.is_multiple_of(self.per_file) {
                self.write_stage()?;
            }
        }
        Ok(())
    }

    /// Writes the full frames of the stage.
    fn write_stage(&mut self) -> Result<()> {
        let full = self.frame_bytes();
        let Some(mut stage) = self.stage.take() else { return Ok(()) };
        if stage.frames > 0 {
            let number = self.frames - stage.frames;
            if number >= self.per_file && self.first.is_some() {
                self.put_first()?;
            }
            let direct = self.direct;
            let (file, slot) = self.slot(number)?;
            file.stage(slot, &stage, full, direct)?;
        }
        stage.restart(full);
        self.stage = Some(stage);
        Ok(())
    }

    fn append_compressed(&mut self, mut bytes: &[u8]) -> Result<()> {
        let full = self.frame_bytes();
        while !bytes.is_empty() {
            let take = bytes.len().min(full - self.partial.len());
            self.partial.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.partial.len() < full {
                continue;
            }
            let frame = std::mem::take(&mut self.partial);
            if self.holds_first && self.frames == 0 {
                self.first = Some(frame);
                self.frames += 1;
                continue;
            }
            self.waiting.push(frame);
            if self.waiting.len() >= threads::num_threads() * 2 {
                self.compress()?;
            }
        }
        Ok(())
    }

    /// The file of a frame, and the frame's slot in it.
    fn slot(&mut self, frame: usize) -> Result<(&mut ShardWriter, usize)> {
        let number = frame / self.per_file;
        if frame.is_multiple_of(self.per_file) && number > 0 && self.first.is_none() {
            self.close_file()?;
        }
        if self.file.is_none() {
            self.file = Some(ShardWriter::create(self.folder.join(self.file_name(number)), self.per_file)?);
        }
        match &mut self.file {
            Some(file) => Ok((file, frame % self.per_file)),
            None => Err(Error::new(Kind::Internal, "no file to write to")),
        }
    }

    fn file_name(&self, number: usize) -> String {
        format!("c/{number}{}", if self.columns { "/0" } else { "" })
    }

    /// Finishes the open file.
    fn close_file(&mut self) -> Result<()> {
        if let Some(file) = self.file.take() {
            self.checksums.push(file.finish()?);
        }
        Ok(())
    }

    fn next_frame(&mut self) -> Result<usize> {
        let number = self.frames;
        if number == self.per_file && self.first.is_some() {
            self.put_first()?;
        }
        self.frames += 1;
        Ok(number)
    }

    fn compress(&mut self) -> Result<()> {
        let waiting = std::mem::take(&mut self.waiting);
        let made = compressed(&waiting, self.item)?;
        for frame in made {
            let number = self.next_frame()?;
            let (file, slot) = self.slot(number)?;
            file.frame(slot, &[&frame])?;
        }
        Ok(())
    }

    /// Writes the kept first frame. Later only its first number may change, in place, because the frame is stored.
    fn put_first(&mut self) -> Result<()> {
        let Some(first) = self.first.take() else { return Ok(()) };
        let head = stored_header(first.len(), self.item);
        // Always stored uncompressed, because its first number is patched at the end.
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(ShardWriter::create(self.folder.join("c/0"), self.per_file)?),
        };
        file.frame(0, &[&head, &first])
    }

    /// Writes the rest; `first` becomes element 0 of an array that kept its first frame. Returns name and CRC-32 of each file.
    fn finish(mut self, first: Option<u64>) -> Result<Vec<(String, u32)>> {
        if self.storage == Storage::Plain {
            self.write_stage()?;
            let full = self.frame_bytes();
            if let Some(stage) = &mut self.stage {
                let filled = stage.filled;
                self.partial = stage.payload_start(full)[..filled].to_vec();
            }
        }
        if let Some(value) = first {
            let bytes = value.to_le_bytes();
            match &mut self.first {
                Some(frame) => frame[..8].copy_from_slice(&bytes),
                None if self.frames == 0 && !self.partial.is_empty() => self.partial[..8].copy_from_slice(&bytes),
                None if self.frames > 0 => {
                    let path = self.folder.join("c/0");
                    let patch = OpenOptions::new().write(true).read(true).open(&path);
                    let patch = patch.map_err(|e| Error::from_io(&e, &path, "open to write"))?;
                    patch_first(&patch, &path, &bytes, self.per_file)?;
                    self.checksums[0] = checksum(&patch, &path)?;
                }
                None => {}
            }
        }
        if !self.waiting.is_empty() {
            self.compress()?;
        }
        if let Some(frame) = self.first.take() {
            let made = match self.storage {
                Storage::Plain => vec![stored_header(frame.len(), self.item).to_vec(), frame],
                Storage::Lz4 => compressed(&[frame], self.item)?,
            };
            let (file, _) = self.slot(0)?;
            file.frame(0, &made.iter().map(Vec::as_slice).collect::<Vec<_>>())?;
        }
        if !self.partial.is_empty() {
            let bytes = self.frame_bytes();
            let mut partial = std::mem::take(&mut self.partial);
            let made = match self.storage {
                Storage::Plain => short_frame(&partial, bytes, self.item),
                Storage::Lz4 => {
                    partial.resize(bytes, 0);
                    compressed(&[partial], self.item)?.concat()
                }
            };
            let number = self.next_frame()?;
            let (file, slot) = self.slot(number)?;
            file.frame(slot, &[&made])?;
        }
        self.close_file()?;
        Ok(self.checksums.iter().enumerate().map(|(number, crc)| (self.file_name(number), *crc)).collect())
    }
}

/// The space that an array of stored numbers takes, from its number of elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArraySize {
    /// Bytes of all frames.
    pub frames: u64,
    /// Bytes of the indexes of all files.
    pub indexes: u64,
    /// Number of data files.
    pub files: u64,
    /// Elements that fit into the last frame, and that it does not have.
    pub unused: u64,
}

/// The space of an array of `elements` numbers of `item` bytes. `offsets`: its first frame is written last, with no page before it.
///
/// Fails for sizes that overflow.
pub fn plain_size(elements: u64, item: usize, offsets: bool) -> Result<ArraySize> {
    let (full, rest) = (elements / INNER as u64, (elements % INNER as u64) as usize);
    let frame = INNER * item;
    let last = if rest > 0 { short_frame(&memory::zeroed(rest * item)?, frame, item).len() } else { 0 };
    let pages = if offsets && full > 0 { PAGE - HEADER } else { 0 };
    let frames = full.checked_mul((PAGE + frame) as u64).and_then(|bytes| bytes.checked_add(last as u64));
    let frames = frames.ok_or_else(|| Error::new(Kind::Argument, format!("{elements} elements of {item} bytes")))?;
    let files = elements.div_ceil((INNER * PER_FILE) as u64);
    let unused = if rest > 0 { (INNER - rest) as u64 } else { 0 };
    Ok(ArraySize { frames: frames - pages as u64, indexes: files * (PER_FILE as u64 * 16 + 4), files, unused })
}

fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16 | DType::F32 | DType::F64)
}

fn patch_first(file: &File, path: &Path, bytes: &[u8; 8], per_file: usize) -> Result<()> {
    let io = |e: std::io::Error| Error::from_io(&e, path, "write");
    let len = file.metadata().map_err(io)?.len();
    let mut entry = [0u8; 8];
    let at =
        len.checked_sub(per_file as u64 * 16 + 4).ok_or_else(|| Error::new(Kind::Internal, "no index").at(path))?;
    file.read_exact_at(&mut entry, at).map_err(io)?;
    file.write_all_at(bytes, u64::from_le_bytes(entry) + HEADER as u64).and_then(|()| file.sync_all()).map_err(io)
}

/// The CRC-32 of a file, read again because its first bytes changed.
fn checksum(file: &File, path: &Path) -> Result<u32> {
    let (mut crc, mut buffer, mut at) = (crc32fast::Hasher::new(), vec![0; 1 << 20], 0);
    loop {
        match file.read_at(&mut buffer, at).map_err(|e| Error::from_io(&e, path, "read"))? {
            0 => return Ok(crc.finalize()),
            n => {
                crc.update(&buffer[..n]);
                at += n as u64;
            }
        }
    }
}

/// Compresses frames in parallel.
fn compressed(frames: &[Vec<u8>], item: usize) -> Result<Vec<Vec<u8>>> {
    let codec = blosc(item)?;
    let one = |i: usize, _: &Stop| {
        let out = codec.encode(frames[i].as_slice().into(), &zarrs::array::CodecOptions::default());
        Ok(out.map_err(|e| Error::new(Kind::Internal, format!("c-blosc cannot compress: {e}")))?.into_owned())
    };
    threads::map(frames.len(), &one, &mut || false)
}

/// A field being written.
///
/// A failed write leaves counters, buffers and files inconsistent: the bytes of a row may be written but not its end. So after
/// a failure, an interrupt or a panic during a change, the writer rejects every call, and the field must be written again.
/// Arguments are checked before anything changes; a rejected call leaves the writer unchanged.
#[derive(Debug)]
pub struct FieldWriter {
    data: ArrayWriter,
    offsets: ArrayWriter,
    shapes: Option<ArrayWriter>,
    rows: u64,
    elements: u64,
    /// Set before a change begins, cleared after it ends.
    unfinished: bool,
}

/// A field that is written and synced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct WrittenField {
    /// Number of rows.
    pub rows: u64,
    /// Number of elements.
    pub elements: u64,
    /// Path in the field's folder, and CRC-32, of each data file.
    pub checksums: Vec<(String, u32)>,
}

impl FieldWriter {
    /// Creates a field in a new folder. `axes` is the number of axes of its rows; 1 needs no array of shapes.
    pub fn create(folder: &Path, dtype: DType, axes: u64, how: WriteOptions) -> Result<FieldWriter> {
        let shapes =
            (axes > 1).then(|| ArrayWriter::create(folder.join("shapes"), DType::I64, Some(axes - 1), how, false));
        Ok(FieldWriter {
            data: ArrayWriter::create(folder.join("data"), dtype, None, how, false)?,
            offsets: ArrayWriter::create(folder.join("offsets"), DType::I64, None, how, true)?,
            shapes: shapes.transpose()?,
            rows: 0,
            elements: 0,
            unfinished: false,
        })
    }

    /// Rows and elements so far.
    pub fn counts(&self) -> (u64, u64) {
        (self.rows, self.elements)
    }

    /// Fails if an earlier change did not end.
    fn whole(&self) -> Result<()> {
        if self.unfinished {
            let detail = "an earlier write to this field failed, so its rows are incomplete; write the field again";
            return Err(Error::new(Kind::Argument, detail).at(&self.data.folder));
        }
        Ok(())
    }

    fn change(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        self.unfinished = true;
        work(self)?;
        self.unfinished = false;
        Ok(())
    }

    /// Appends rows: their concatenated elements, and the length of each.
    pub fn append(&mut self, elements: &[u8], lengths: &[i64], shapes: &[i64]) -> Result<()> {
        self.whole()?;
        // Read once: another thread may write to the caller's memory meanwhile.
        let lengths: Option<Vec<u64>> = lengths.iter().map(|l| u64::try_from(*l).ok()).collect();
        let lengths = lengths
            .ok_or_else(|| Error::new(Kind::Argument, "expected row lengths of 0 or more, found a negative one"))?;
        let total = lengths.iter().try_fold(0u64, |n, l| n.checked_add(*l));
        let held = (elements.len() / self.data.item) as u64;
        if total != Some(held) || !elements.len().is_multiple_of(self.data.item) {
            let detail = format!("expected lengths that sum to the {held} elements of the rows");
            return Err(Error::new(Kind::Argument, detail));
        }
        let axes = self.shapes.as_ref().map_or(0, |writer| writer.width);
        if shapes.len() != lengths.len() * axes {
            let detail =
                format!("expected the sizes of {axes} axes for each of {} rows, found {}", lengths.len(), shapes.len());
            return Err(Error::new(Kind::Argument, detail));
        }
        self.change(|field| {
            field.data.append(elements)?;
            field.ends(lengths.into_iter())?;
            match &mut field.shapes {
                Some(writer) => writer.append(bytemuck::cast_slice(shapes)),
                None => Ok(()),
            }
        })
    }

    fn ends(&mut self, lengths: impl Iterator<Item = u64>) -> Result<()> {
        let mut ends: Vec<u64> = if self.rows == 0 { vec![0] } else { vec![] };
        let before = ends.len();
        for length in lengths {
            self.elements += length;
            ends.push(self.elements);
        }
        let rows = (ends.len() - before) as u64;
        if rows == 0 {
            return Ok(());
        }
        self.rows += rows;
        self.offsets.append(bytemuck::cast_slice(&ends))
    }

    /// Appends all rows of another field. Stored frames are copied without decoding.
    pub fn extend(&mut self, field: &Field, watch: Watch<'_>) -> Result<()> {
        self.whole()?;
        let item = field.dtype().size().unwrap_or(0);
        if field.num_elements() > 0 && item != self.data.item {
            let detail = format!("expected elements of {} bytes, found {}", self.data.item, field.dtype().name());
            return Err(Error::new(Kind::DType, detail));
        }
        self.change(|writer| writer.take_all(field, watch))
    }

    fn take_all(&mut self, field: &Field, watch: Watch<'_>) -> Result<()> {
        const ROWS: usize = 1 << 16;
        let mut cursor = Cursor::default();
        let mut row = 0;
        while row < field.num_rows() {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let n = (field.num_rows() - row).min(ROWS as u64) as usize;
            let bounds = field.bounds(&mut cursor, row, n)?;
            self.ends(bounds.windows(2).map(|b| b[1] - b[0]))?;
            if let Some(writer) = &mut self.shapes {
                for row in row..row + n as u64 {
                    let shape = field.shape(row)?;
                    writer.append(bytemuck::cast_slice(&shape))?;
                }
            }
            row += n as u64;
        }
        let mut at = 0;
        while at < field.num_elements() {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let n = (field.num_elements() - at).min(INNER as u64 * 8) as usize;
            field.each(at, n, &mut |bytes| self.data.append(bytes))?;
            at += n as u64;
        }
        Ok(())
    }

    /// Writes the rest, the number of rows last, and waits for the disk.
    pub fn finish(self) -> Result<WrittenField> {
        self.whole()?;
        let mut checksums = vec![];
        let mut add = |array: &str, files: Vec<(String, u32)>| {
            checksums.extend(files.into_iter().map(|(name, crc)| (format!("{array}/{name}"), crc)));
        };
        add("data", self.data.finish(None)?);
        if let Some(shapes) = self.shapes {
            add("shapes", shapes.finish(None)?);
        }
        add("offsets", self.offsets.finish(Some(self.rows))?);
        Ok(WrittenField { rows: self.rows, elements: self.elements, checksums })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
