//! Many small files with computed names: the chunks of 4-D arrays `(examples, groups, tokens, width)`.
//!
//! A store of a million chunks costs no more to open than one of ten: nothing is listed, a chunk's number gives its name.
//! Plain chunks (C order, no compression) are files like any other, read in place and only where rows were asked for;
//! a chunk that is not there holds the fill value. All others are decoded whole, by [`coded`](crate::arrays::coded), and kept
//! under a memory budget.
//!
//! Chunks are read and not mapped: mapping and unmapping a megabyte costs more than copying it. Only
//! [`ChunkFiles::view`] maps, because a view is what was asked for.
//!
//! Sources of the layout: Zarr v2 ("Storage specification 2.0", Chunks) and v3 (regular grid). A v2 edge chunk is stored
//! whole, and so is a v3 one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::arrays::coded::Decode;
use crate::arrays::key::{UnitKey, WHOLE, new_array};
use crate::arrays::naming::Naming;
use crate::codec::cache::Cache;
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::{Body, OpenFile, View};
use crate::layout::grid::Grid;
use crate::layout::row::{Place, Row};
use crate::memory::buffer::Buffer;
use crate::source::Io;
use crate::source::descriptors::open_regular;
use crate::source::local::Positioned;
use crate::source::slots::Slots;

/// How a chunk's bytes are had.
#[derive(Debug)]
pub enum Content {
    /// The file is the chunk, in C order.
    Plain {
        /// In the other byte order.
        swapped: bool,
    },
    /// The file has to be decoded.
    Coded(Box<dyn Decode>),
}

/// One array, not opened yet.
#[derive(Debug)]
pub struct ChunkArray {
    /// Its folder.
    pub folder: PathBuf,
    /// Its own metadata file. As long as it is there, a chunk that is not there is the fill value.
    pub metadata: PathBuf,
    /// Names of its files.
    pub naming: Naming,
    /// Examples, groups, tokens, elements.
    pub shape: [u64; 4],
    /// The shape of every chunk.
    pub chunk: [u64; 4],
    /// One element: what a chunk holds that is not there.
    pub fill: Vec<u8>,
    /// How a chunk's bytes are had.
    pub content: Content,
}

/// The chunk files of a dataset's arrays.
#[derive(Debug)]
pub struct ChunkFiles {
    arrays: Vec<(Grid, ChunkArray)>,
    row: Row,
    address_bits: u32,
    io: Io,
    slots: Slots<OpenFile>,
    number: u64,
    decoded: Cache<Buffer, UnitKey>,
    decodes: bool,
}

impl ChunkFiles {
    /// Arrays of rows of `width` elements of one type. Opens nothing.
    pub fn new(arrays: Vec<ChunkArray>, width: u64, dtype: DType, decoded_memory: u64, io: Io) -> Result<ChunkFiles> {
        let row = Row::new(width, dtype)?;
        let mut first = 0u64;
        let mut most_rows = 1u64;
        let mut placed = Vec::with_capacity(arrays.len());
        for array in arrays {
            let refuse = |what: String| Error::new(Kind::Format, what).at(&array.metadata);
            let grid = Grid::new(first, array.shape, array.chunk)
                .ok_or_else(|| refuse(format!("chunks of shape {:?} hold nothing", array.chunk)))?;
            let elements = array.chunk.iter().try_fold(row.bytes as u64 / width, |n, c| n.checked_mul(*c));
            let end = grid.chunks().and_then(|n| first.checked_add(n));
            let (Some(_), Some(end)) = (elements.filter(|b| *b < 1 << 48), end.filter(|n| *n < 1 << 48)) else {
                return Err(refuse(format!(
                    "shape {:?} in chunks of {:?} is no array that a disk can hold",
                    array.shape, array.chunk
                )));
            };
            if dtype.size() != Some(array.fill.len()) {
                return Err(refuse("a fill value that is no element".to_string()));
            }
            if array.shape[3] != width {
                return Err(refuse(format!("rows of {} elements among rows of {width}", array.shape[3])));
            }
            first = end;
            most_rows = most_rows.max(array.chunk[0] * array.chunk[1] * array.chunk[2]);
            placed.push((grid, array));
        }
        let address_bits = 64 - most_rows.leading_zeros();
        if 64 - first.leading_zeros() + address_bits > 64 {
            return Err(Error::new(Kind::Format, format!("{first} chunks of up to {most_rows} rows are too many")));
        }
        let decodes = placed.iter().any(|(_, a)| matches!(a.content, Content::Coded(_)));
        let slots = Slots::new(first);
        let (number, decoded) = (new_array(), Cache::new(decoded_memory));
        Ok(ChunkFiles { arrays: placed, row, address_bits, io, slots, number, decoded, decodes })
    }

    /// Where the arrays' chunks stand, in the order of the arrays.
    pub fn grids(&self) -> Vec<Grid> {
        self.arrays.iter().map(|(grid, _)| *grid).collect()
    }

    fn array(&self, file: u64) -> &(Grid, ChunkArray) {
        &self.arrays[self.arrays.partition_point(|(grid, _)| grid.first() <= file).saturating_sub(1)]
    }

    /// Closes kept files and drops decoded chunks.
    pub fn release(&self) {
        self.slots.clear();
        self.decoded.make_room(self.decoded.budget());
    }

    /// Rows of one chunk, in place; `None` where they cannot be had so.
    pub fn view(&self, file: u64, address: u64, rows: u64) -> Result<Option<View>> {
        if self.io == Io::Pread || self.split(file) > 1 {
            return Ok(None);
        }
        View::of(&*self.get(file)?, address, rows, self.row.bytes)
    }

    fn open(&self, number: u64) -> Result<OpenFile> {
        let (grid, array) = self.array(number);
        let indices = grid.indices(number);
        let path = array.folder.join(array.naming.file(&indices));
        let size = self.row.bytes / self.row.width;
        let [cn, cl, ct, ch] = grid.chunk();
        let column = indices[3] * ch;
        let used = ch.min(self.row.width as u64 - column) as usize * size;
        let step = ch * size as u64;
        let end = cn * cl * ct * step;
        let swapped = matches!(array.content, Content::Plain { swapped: true });
        let place = Place { start: 0, end, unit: step, step, used, column: column as usize, swapped };
        let body = match &array.content {
            Content::Plain { .. } => plain(&path, grid, end)?,
            Content::Coded(coded) => {
                // Without the version of the file: looking it up for each chunk that is kept doubles the cost of a row.
                let key = UnitKey { array: self.number, file: number, version: None, chunk: 0, block: WHOLE };
                let decode = || Ok::<_, Error>(coded.chunk(&indices, end, &path)?.map(Buffer::from));
                let found = self.decoded.get_or_load(key, |_| true, decode)?;
                found.map(|bytes| Body::Decoded(path.as_path().into(), bytes))
            }
        };
        match body {
            Some(body) => Ok(OpenFile::new(body, place)),
            None => {
                array.check_is_there()?;
                Ok(OpenFile::new(Body::Fill(path.into(), array.fill.clone()), place))
            }
        }
    }
}

/// The file of a plain chunk; `None` where there is none.
fn plain(path: &Path, grid: &Grid, bytes: u64) -> Result<Option<Body>> {
    match open_regular(path) {
        Ok((file, len)) if len == bytes => Ok(Some(Body::Stored(Box::new(Positioned::new(file, path, len))))),
        Ok((_, len)) => {
            let kind = if len < bytes { Kind::Truncated } else { Kind::Format };
            let [a, b, c, d] = grid.chunk();
            let detail = format!("expected {bytes} bytes, a whole chunk of {a} x {b} x {c} x {d}, found {len}");
            Err(Error::new(kind, detail).at(path).byte(len.min(bytes)))
        }
        Err(error) if error.kind == Kind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

impl ChunkArray {
    /// A chunk that is not there is the fill value; an array that is not there (a disk unmounted, a folder moved) is not.
    fn check_is_there(&self) -> Result<()> {
        let path: &Path = &self.metadata;
        std::fs::metadata(path).map(|_| ()).map_err(|e| Error::from_io(&e, path, "look at"))
    }
}

impl Files for ChunkFiles {
    fn row(&self) -> Row {
        self.row
    }

    fn get(&self, file: u64) -> Result<Arc<OpenFile>> {
        self.slots.get(file, || self.open(file))
    }

    fn address_bits(&self) -> u32 {
        self.address_bits
    }

    #[inline]
    fn split(&self, file: u64) -> u64 {
        // One array is by far the usual case, and this is asked for every row.
        match &self.arrays[..] {
            [(grid, _)] => grid.split(),
            _ => self.array(file).0.split(),
        }
    }

    fn decodes(&self) -> bool {
        self.decodes
    }
}
