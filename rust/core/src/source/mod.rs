//! Where bytes lie: files of this machine, mapped ([`mmap`]) or read in place ([`pread`]), opened when first touched and
//! kept open while descriptors last ([`slots`], [`descriptors`]).

pub mod descriptors;
pub mod mmap;
pub mod pread;
pub mod slots;

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
