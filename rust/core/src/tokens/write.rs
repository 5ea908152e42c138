//! Writing token caches: arrays in Zarr shards, rows appended to fields, and shards put together by copying bytes.
//!
//! What is written is what Levanter writes (`formats/levanter.md` 1.2, 1.3), except that numbers may be *stored*: frames that
//! c-blosc reads like any other and whose numbers lie in the file as they are. A frame that is not full is written without
//! its zeros ([`super::frame::short_frame`]).

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use serde_json::json;
use zarrs::array::BytesToBytesCodecTraits;
use zarrs::array::codec::BloscCodec;

use super::frame::{HEADER, short_frame, stored_header};
use super::jagged::{Cursor, Field};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::par::pool::{self, Watch};

/// Elements of an inner chunk, and inner chunks of a file: Levanter opens no others.
pub const INNER: usize = 262_144;
const PER_FILE: usize = 512;
/// What arrays of unknown length say they hold.
const LENGTH: u64 = 1 << 54;

/// How numbers are put into frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Storage {
    /// As they are.
    Plain,
    /// As Levanter does: LZ4, level 5, bytes shuffled.
    Lz4,
}

impl Storage {
    /// `"plain"`, `"lz4"`, or `None` for another word.
    pub fn from_name(name: &str) -> Option<Storage> {
        match name {
            "plain" => Some(Storage::Plain),
            "lz4" => Some(Storage::Lz4),
            _ => None,
        }
    }
}

/// Levanter's blosc, for numbers of so many bytes.
pub(super) fn blosc(item: usize) -> Result<BloscCodec> {
    use zarrs::metadata_ext::codec::blosc::{BloscCompressionLevel, BloscCompressor, BloscShuffleMode};
    let bad = |e: String| Error::new(Kind::Internal, format!("c-blosc refuses Levanter's own settings: {e}"));
    let level = BloscCompressionLevel::try_from(5u8).map_err(|_| bad("level 5".to_string()))?;
    BloscCodec::new(BloscCompressor::LZ4, level, Some(0), BloscShuffleMode::Shuffle, Some(item))
        .map_err(|e| bad(e.to_string()))
}

/// An array that is being written, from its first element to its last.
#[derive(Debug)]
struct ArrayWriter {
    folder: PathBuf,
    item: usize,
    /// Elements of a row: 1, or the columns of a table.
    width: usize,
    storage: Storage,
    /// Whether the first frame is kept back to the end: its first number is known last.
    holds_first: bool,
    first: Option<Vec<u8>>,
    /// Elements of the frame that is not full.
    partial: Vec<u8>,
    /// Full frames that wait for being compressed together.
    waiting: Vec<Vec<u8>>,
    file: Option<ShardWriter>,
    frames: usize,
    columns: bool,
}

#[derive(Debug)]
struct ShardWriter {
    path: PathBuf,
    file: File,
    at: u64,
    index: Vec<(u64, u64)>,
}

impl ShardWriter {
    fn create(path: PathBuf) -> Result<ShardWriter> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(|e| Error::from_io(&e, folder, "make"))?;
        }
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(true).open(&path);
        let file = file.map_err(|e| Error::from_io(&e, &path, "open to write"))?;
        Ok(ShardWriter { path, file, at: 0, index: vec![(u64::MAX, u64::MAX); PER_FILE] })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all_at(bytes, self.at).map_err(|e| Error::from_io(&e, &self.path, "write"))?;
        self.at += bytes.len() as u64;
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

    fn finish(mut self) -> Result<()> {
        let mut bytes = Vec::with_capacity(PER_FILE * 16 + 4);
        for (offset, len) in &self.index {
            bytes.extend_from_slice(&offset.to_le_bytes());
            bytes.extend_from_slice(&len.to_le_bytes());
        }
        bytes.extend_from_slice(&crc32c::crc32c(&bytes).to_le_bytes());
        self.put(&bytes)?;
        self.file.sync_all().map_err(|e| Error::from_io(&e, &self.path, "write to the disk"))
    }
}

impl ArrayWriter {
    fn create(folder: PathBuf, dtype: DType, width: Option<u64>, storage: Storage, holds_first: bool) -> Result<Self> {
        let item = dtype.size().ok_or_else(|| Error::new(Kind::DType, format!("cannot store {}", dtype.name())))?;
        let columns = width.is_some();
        let width = usize::try_from(width.unwrap_or(1)).ok().filter(|w| (1..=1 << 10).contains(w));
        let width = width.ok_or_else(|| Error::new(Kind::Argument, "rows of more than 1,024 axes"))?;
        fs::create_dir_all(&folder).map_err(|e| Error::from_io(&e, &folder, "make"))?;
        let chunk = |n: usize| if columns { json!([n, width]) } else { json!([n]) };
        // In the order of names, as tensorstore writes it: the same bytes whoever wrote the array.
        let endian = json!({"configuration": {"endian": "little"}, "name": "bytes"});
        let text = json!({
            "chunk_grid": {"configuration": {"chunk_shape": chunk(INNER * PER_FILE)}, "name": "regular"},
            "chunk_key_encoding": {"name": "default"},
            "codecs": [{"configuration": {
                "chunk_shape": chunk(INNER),
                "codecs": [endian, {"configuration": {
                    "blocksize": 0, "clevel": 5, "cname": "lz4", "shuffle": "shuffle", "typesize": item,
                }, "name": "blosc"}],
                "index_codecs": [endian, {"name": "crc32c"}],
            }, "name": "sharding_indexed"}],
            "data_type": dtype.numpy_name(),
            "fill_value": 0,
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
            waiting: vec![],
            file: None,
            frames: 0,
            columns,
        })
    }

    fn frame_bytes(&self) -> usize {
        INNER * self.width * self.item
    }

    fn append(&mut self, mut bytes: &[u8]) -> Result<()> {
        let full = self.frame_bytes();
        while !bytes.is_empty() {
            if self.partial.is_empty() && bytes.len() >= full && self.storage == Storage::Plain {
                let (frame, rest) = bytes.split_at(full);
                if self.holds_first && self.frames == 0 {
                    self.first = Some(frame.to_vec());
                    self.frames += 1;
                } else {
                    self.store(frame)?;
                }
                bytes = rest;
                continue;
            }
            let take = bytes.len().min(full - self.partial.len());
            if self.partial.capacity() == 0 && self.storage == Storage::Plain && bytes.len() == take && take > full / 8
            {
                self.partial.reserve_exact(full);
            }
            self.partial.extend_from_slice(&bytes[..take]);
            bytes = &bytes[take..];
            if self.partial.len() == full {
                let frame = std::mem::take(&mut self.partial);
                if self.holds_first && self.frames == 0 {
                    self.first = Some(frame);
                    self.frames += 1;
                } else if self.storage == Storage::Plain {
                    self.store(&frame)?;
                    self.partial = frame;
                    self.partial.clear();
                } else {
                    self.waiting.push(frame);
                    if self.waiting.len() >= pool::num_threads() * 2 {
                        self.compress()?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The file of the frame that comes next, and its number there.
    fn slot(&mut self, frame: usize) -> Result<(&mut ShardWriter, usize)> {
        let number = frame / PER_FILE;
        if frame.is_multiple_of(PER_FILE) && number > 0 && self.first.is_none() {
            self.close_file()?;
        }
        if self.file.is_none() {
            let tail = if self.columns { "/0" } else { "" };
            self.file = Some(ShardWriter::create(self.folder.join(format!("c/{number}{tail}")))?);
        }
        match &mut self.file {
            Some(file) => Ok((file, frame % PER_FILE)),
            None => Err(Error::new(Kind::Internal, "no file to write to")),
        }
    }

    /// The first file may have to wait for its first frame.
    fn close_file(&mut self) -> Result<()> {
        match self.file.take() {
            Some(file) => file.finish(),
            None => Ok(()),
        }
    }

    fn store(&mut self, frame: &[u8]) -> Result<()> {
        let number = self.next_frame()?;
        let head = stored_header(frame.len(), self.item);
        let (file, slot) = self.slot(number)?;
        file.frame(slot, &[&head, frame])
    }

    fn next_frame(&mut self) -> Result<usize> {
        let number = self.frames;
        if number == PER_FILE && self.first.is_some() {
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

    /// Writes the frame that was held back. Only its first number may change after that, in place, where frames are stored.
    fn put_first(&mut self) -> Result<()> {
        let Some(first) = self.first.take() else { return Ok(()) };
        let head = stored_header(first.len(), self.item);
        // It is stored whatever the rest is: its first number is patched at the end.
        let file = match &mut self.file {
            Some(file) => file,
            None => self.file.insert(ShardWriter::create(self.folder.join("c/0"))?),
        };
        file.frame(0, &[&head, &first])
    }

    /// Writes what is left; `first` becomes element 0 of an array that held its first frame back.
    fn finish(mut self, first: Option<u64>) -> Result<()> {
        if let Some(value) = first {
            let bytes = value.to_le_bytes();
            match &mut self.first {
                Some(frame) => frame[..8].copy_from_slice(&bytes),
                None if self.frames == 0 && !self.partial.is_empty() => self.partial[..8].copy_from_slice(&bytes),
                None if self.frames > 0 => {
                    let path = self.folder.join("c/0");
                    let patch = OpenOptions::new().write(true).read(true).open(&path);
                    let patch = patch.map_err(|e| Error::from_io(&e, &path, "open to write"))?;
                    patch_first(&patch, &path, &bytes)?;
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
        self.close_file()
    }
}

fn patch_first(file: &File, path: &Path, bytes: &[u8; 8]) -> Result<()> {
    let io = |e: std::io::Error| Error::from_io(&e, path, "write");
    let len = file.metadata().map_err(io)?.len();
    let mut entry = [0u8; 8];
    let at =
        len.checked_sub(PER_FILE as u64 * 16 + 4).ok_or_else(|| Error::new(Kind::Internal, "no index").at(path))?;
    file.read_exact_at(&mut entry, at).map_err(io)?;
    file.write_all_at(bytes, u64::from_le_bytes(entry) + HEADER as u64).and_then(|()| file.sync_all()).map_err(io)
}

/// Frames compressed, in parallel.
fn compressed(frames: &[Vec<u8>], item: usize) -> Result<Vec<Vec<u8>>> {
    let codec = blosc(item)?;
    let made: Vec<Mutex<Vec<u8>>> = frames.iter().map(|_| Mutex::new(vec![])).collect();
    pool::run(
        frames.len(),
        &|i, _| {
            let out = codec
                .encode(frames[i].as_slice().into(), &zarrs::array::CodecOptions::default())
                .map_err(|e| Error::new(Kind::Internal, format!("c-blosc cannot compress: {e}")))?;
            if let Ok(mut slot) = made[i].lock() {
                *slot = out.into_owned();
            }
            Ok(())
        },
        &mut || false,
    )?;
    Ok(made.into_iter().map(|m| m.into_inner().unwrap_or_default()).collect())
}

/// A field that is being written.
#[derive(Debug)]
pub struct FieldWriter {
    data: ArrayWriter,
    offsets: ArrayWriter,
    shapes: Option<ArrayWriter>,
    rows: u64,
    elements: u64,
}

impl FieldWriter {
    /// A field in a folder, which is made. `axes`: those of its rows; 1 needs no array of shapes.
    pub fn create(folder: &Path, dtype: DType, axes: u64, storage: Storage) -> Result<FieldWriter> {
        let shapes =
            (axes > 1).then(|| ArrayWriter::create(folder.join("shapes"), DType::I64, Some(axes - 1), storage, false));
        Ok(FieldWriter {
            data: ArrayWriter::create(folder.join("data"), dtype, None, storage, false)?,
            offsets: ArrayWriter::create(folder.join("offsets"), DType::I64, None, storage, true)?,
            shapes: shapes.transpose()?,
            rows: 0,
            elements: 0,
        })
    }

    /// Rows and elements so far.
    pub fn counts(&self) -> (u64, u64) {
        (self.rows, self.elements)
    }

    /// Appends rows: their elements one after another, and how many each has.
    pub fn append(&mut self, elements: &[u8], lengths: &[i64], shapes: &[i64]) -> Result<()> {
        let total = lengths.iter().try_fold(0u64, |n, l| n.checked_add(u64::try_from(*l).ok()?));
        if total != Some((elements.len() / self.data.item) as u64) {
            return Err(Error::new(Kind::Internal, "rows of other lengths than their elements"));
        }
        self.data.append(elements)?;
        self.ends(lengths.iter().map(|l| l.unsigned_abs()))?;
        if let Some(writer) = &mut self.shapes {
            if shapes.len() != lengths.len() * writer.width {
                return Err(Error::new(Kind::Internal, "rows of several axes need the sizes of all but the last"));
            }
            writer.append(bytemuck::cast_slice(shapes))?;
        }
        Ok(())
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

    /// Appends all rows of another field. What is stored is copied and not decoded.
    pub fn extend(&mut self, field: &Field, watch: Watch<'_>) -> Result<()> {
        const ROWS: usize = 1 << 16;
        let mut cursor = Cursor::default();
        let mut row = 0;
        while row < field.num_rows() {
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

    /// Writes what is left, the number of rows last, and waits for the disk.
    pub fn finish(self) -> Result<(u64, u64)> {
        self.data.finish(None)?;
        if let Some(shapes) = self.shapes {
            shapes.finish(None)?;
        }
        self.offsets.finish(Some(self.rows))?;
        Ok((self.rows, self.elements))
    }
}
