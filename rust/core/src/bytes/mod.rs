//! Where bytes lie. A [`FileTable`] is the fixed list of files that hold a dataset's rows; files are opened when first
//! touched, mapped or read in place, and asked for their length again before rows are taken from them.

mod files;
pub mod mmap;
pub mod pread;

pub use files::{FileTable, OpenFile, RowFile, RowsIn, View};
pub(crate) use files::{files_at_once, open_regular};

/// How rows are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// Through a mapping: fastest from the page cache, and the only way to give views.
    Mmap,
    /// Positioned reads into the caller's memory: never maps, so nothing a file does later can fault.
    Pread,
}

impl Io {
    /// `"mmap"`, `"pread"`, or `None` for another word.
    pub fn from_name(name: &str) -> Option<Io> {
        match name {
            "mmap" => Some(Io::Mmap),
            "pread" => Some(Io::Pread),
            _ => None,
        }
    }
}
