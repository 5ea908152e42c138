//! Files that hold a dataset's rows: numbered, opened when first touched, asked for their length again before rows are taken
//! from them. [`table`] lists them, [`chunks`] computes their names, [`shards`] looks for rows inside pickles.

pub mod chunks;
pub mod open;
pub mod shards;
pub mod table;

use std::sync::Arc;

use crate::error::Result;
use crate::layout::row::Row;
use crate::source::Wishes;
use crate::threads::Watch;

use self::open::OpenFile;

/// The numbered files that hold a dataset's rows, all rows of one width and type.
pub trait Files: Send + Sync {
    /// What a row is.
    fn row(&self) -> Row;

    /// The file, open and long enough.
    fn get(&self, file: u64) -> Result<Arc<OpenFile>>;

    /// Several files, in order; opened, and decoded, in parallel where that waits for a network.
    fn open_many(&self, files: &[u64], _watch: Watch<'_>) -> Result<Vec<Arc<OpenFile>>> {
        files.iter().map(|file| self.get(*file)).collect()
    }

    /// Bytes of memory that a file takes when it is open, because it is decoded.
    fn decoded_bytes(&self, _file: u64) -> u64 {
        0
    }

    /// How the sources are best read; `None` where they are files of this machine.
    fn wishes(&self) -> Option<Wishes> {
        None
    }

    /// Bits that hold any address inside a file; the bits above hold any file's number.
    fn address_bits(&self) -> u32 {
        40
    }

    /// Addresses from one row to the next of its run, in this file: what [`Place`](crate::layout::row::Place) says, before it is open.
    fn stride(&self, _file: u64) -> u64 {
        1
    }

    /// Consecutive files that the rows of this one are split over, this being the first.
    fn split(&self, _file: u64) -> u64 {
        1
    }

    /// Whether opening a file decodes it, so that going back and forth between files is to be avoided.
    fn decodes(&self) -> bool {
        false
    }
}
