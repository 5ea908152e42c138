//! The files of a dataset's rows: numbered, opened on first use, with their length checked again before each read. [`table`]
//! lists them, [`chunks`] computes their names, [`shards`] finds rows inside pickles. [`unpacked`] decodes arrays that
//! cannot be read in place; [`scaled`] multiplies float8 and int8 elements by their scales, and [`chunk_scales`] those of chunks.

// A number of a file is converted with a check; tests may not care.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap))]

pub mod chunk_scales;
pub mod chunks;
pub mod open;
pub mod scaled;
pub mod shards;
pub mod table;
pub mod unpacked;

use std::sync::Arc;

use crate::codec::planes::BlockRow;
use crate::error::Result;
use crate::layout::row::Row;
use crate::source::Wishes;
use crate::threads::{self, Stop, Watch};

use self::open::OpenFile;

/// The numbered files of a dataset's rows; all rows have the same width and dtype.
pub trait Files: Send + Sync {
    /// The properties of a row.
    fn row(&self) -> Row;

    /// The file, opened and long enough.
    fn get(&self, file: u64, stop: &Stop) -> Result<Arc<OpenFile>>;

    /// Several files, in order, opened and decoded in parallel.
    fn open_many(&self, files: &[u64], watch: Watch<'_>) -> Result<Vec<Arc<OpenFile>>> {
        threads::map_each(files.iter(), &|_, file, stop| self.get(*file, stop), watch)
    }

    /// The file, if it is decoded already. The cache evicts it after those that were not used since.
    fn decoded(&self, _file: u64) -> Option<Arc<OpenFile>> {
        None
    }

    /// Decodes only some rows of a file: calls `each` with the position of each of these addresses and its row. `false` if it does not:
    /// the file is better opened, or has no rows that can be decoded apart.
    fn rows_apart(&self, _file: u64, _addresses: &[u64], _each: &mut dyn FnMut(usize, BlockRow<'_>)) -> Result<bool> {
        Ok(false)
    }

    /// Starts to read files that will be decoded in this order, without waiting for the disk. A hint.
    fn will_need(&self, _files: &[u64]) {}

    /// Whether a file that must be decoded can be read without waiting for the disk; false if that cannot be known.
    fn is_at_hand(&self, _file: u64) -> bool {
        false
    }

    /// Bytes of memory that an open file needs because it is decoded.
    fn decoded_bytes(&self, _file: u64) -> u64 {
        0
    }

    /// The best way to read the sources; `None` for local files.
    fn wishes(&self) -> Option<Wishes> {
        None
    }

    /// Number of bits of an address in a file; the bits above are for the file's number.
    fn address_bits(&self) -> u32 {
        40
    }

    /// Addresses from one row of a run to the next in this file: [`Place`](crate::layout::row::Place)'s value, before it is open.
    fn stride(&self, _file: u64) -> u64 {
        1
    }

    /// Number of consecutive files over which rows of this file, the first of them, are split.
    fn split(&self, _file: u64) -> u64 {
        1
    }

    /// Whether opening a file decodes it: then switching between files is expensive.
    fn decodes(&self) -> bool {
        false
    }
}
