//! Where bytes lie. A [`Source`] is one file or object, open; a [`Store`] opens them. Files of this machine are mapped or read
//! in place ([`local`]); [`scout`] and [`queue`] keep the disk busy for many reads of several sources at once. What was
//! opened is kept while descriptors last ([`slots`], [`descriptors`]).
//!
//! A remote store is one more implementation of both traits: its [`Wishes`] decide how reads are planned, and [`fetch`](mod@fetch)
//! reads many ranges as they say.

pub mod descriptors;
pub mod fetch;
pub mod local;
pub mod mmap;
pub mod pread;
pub mod queue;
pub mod scout;
pub mod slots;

use std::fmt::Debug;
use std::sync::Arc;

use self::mmap::Map;
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::threads::{self, Stop, Watch};

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

/// A range of a source's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteRange {
    /// Its first byte.
    pub at: u64,
    /// Its length.
    pub len: u64,
}

/// A read of a source: as many bytes from `at` on as `into` has.
#[derive(Debug)]
pub struct RangeRead<'a> {
    /// The first byte.
    pub at: u64,
    /// Where the bytes go.
    pub into: &'a mut [u8],
}

/// Whether bytes can be had without waiting for a disk or a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// All of them.
    Yes,
    /// Not all of them.
    No,
    /// The source cannot tell.
    Unknown,
}

/// What changes when the content of a source does.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// Of a file: device, inode, length, and the times of the last change of content and of metadata, in s and ns.
    File(u64, u64, u64, [(i64, i64); 2]),
    /// A store's own name for it.
    Tag(Arc<str>),
}

/// How a source that answers slowly is best read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Ranges this far apart, or nearer, are read as one.
    pub gap: u64,
    /// The largest read, in bytes; a longer range becomes several.
    pub largest: u64,
    /// Reads that may be on their way at the same time.
    pub parallel: usize,
    /// Bytes that a window stream reads in one go, at least.
    pub unit_bytes: u64,
}

/// One file or object, open to read. A read into a caller's memory never changes the source.
pub trait Source: Debug + Send + Sync {
    /// Its name.
    fn location(&self) -> &Location;

    /// Bytes it had when it was opened.
    fn size(&self) -> u64;

    /// Its version now; `None` where there is none, and nothing may be kept of it.
    fn version(&self) -> Option<Version>;

    /// Its bytes, where they can be looked at.
    fn bytes(&self) -> Option<&[u8]> {
        None
    }

    /// A mapping of all of it that outlives the source, where there can be one.
    fn map(&self) -> Result<Option<Map>> {
        Ok(None)
    }

    /// Fills all places, waiting as long as it takes or until `stop` is set.
    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()>;

    /// Fills a place if that needs no waiting; what is in it otherwise is undefined.
    fn read_if_ready(&self, _read: RangeRead<'_>) -> Result<Ready> {
        Ok(Ready::Unknown)
    }

    /// Whether a byte can be read without waiting.
    fn is_ready(&self, _at: u64) -> Ready {
        Ready::Unknown
    }

    /// Starts fetching ranges, without waiting for them. A hint: it never fails.
    fn will_need(&self, _ranges: &[ByteRange]) {}

    /// Fails if the source is not what it was when it was opened, as far as reading it would be unsafe or wrong.
    fn unchanged(&self) -> Result<()>;

    /// Whether it may be kept open.
    fn may_keep(&self) -> bool {
        true
    }

    /// Whether a descriptor is free when it is dropped.
    fn holds_descriptor(&self) -> bool {
        false
    }
}

impl dyn Source + '_ {
    /// Reads one range.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<()> {
        self.read_many(&mut [RangeRead { at, into }], &Stop::default())
    }
}

/// What a source is opened for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Many reads in jumps: it may be kept open, and mapped where it is opened.
    Kept,
    /// One pass: it is closed afterwards.
    Once,
}

/// What opens sources.
pub trait Store: Debug + Send + Sync {
    /// Opens each, or tells why not, in the order of the locations; in parallel where opening waits for a network. What is not
    /// there is [`Kind::NotFound`]. Waits no longer once `stop` is set: what is not open then is [`Kind::Interrupted`].
    fn open_many(&self, locations: &[&Location], access: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>>;

    /// Names of the files, objects and folders directly below a folder, in any order; none where there is no such folder. A
    /// name that is not Unicode may be left out.
    fn list(&self, folder: &Location) -> Result<Vec<String>>;

    /// Fails unless a file, an object or a folder of this name is there.
    fn look(&self, location: &Location) -> Result<()> {
        match opened(self.open_many(&[location], Access::Once, &Stop::default()).pop(), location) {
            Ok(_) => Ok(()),
            Err(error) if error.kind == Kind::NotFound && !self.list(location)?.is_empty() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// How its sources are best read; `None` for files of this machine, which answer at once.
    fn wishes(&self) -> Option<Wishes> {
        None
    }
}

fn opened(answer: Option<Result<Box<dyn Source>>>, location: &Location) -> Result<Box<dyn Source>> {
    answer.unwrap_or_else(|| Err(Error::new(Kind::Internal, "a store that answered for too few files").at(location)))
}

impl dyn Store + '_ {
    /// Opens one.
    pub fn open(&self, location: &Location, access: Access) -> Result<Box<dyn Source>> {
        opened(self.open_many(&[location], access, &Stop::default()).pop(), location)
    }

    /// Opens each, while the caller looks at its watch; an answer for each of the locations.
    pub fn open_together(
        &self,
        locations: &[&Location],
        access: Access,
        watch: Watch<'_>,
    ) -> Result<Vec<Result<Box<dyn Source>>>> {
        if locations.is_empty() {
            return Ok(vec![]);
        }
        let mut answers = threads::wait_for(&|stop| Ok(self.open_many(locations, access, stop)), watch)?.into_iter();
        Ok(locations.iter().map(|location| opened(answers.next(), location)).collect())
    }
}
