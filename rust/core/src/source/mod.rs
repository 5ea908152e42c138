//! Byte sources. A [`Source`] is one open file or object; a [`Store`] opens them. Local files are mapped or read with
//! `pread` ([`local`]); [`warmth`] decides which. [`scout`] and [`queue`] keep the disk busy for many reads of several sources. Opened files are
//! cached within a budget of descriptors ([`slots`], [`descriptors`]).
//!
//! A remote store implements both traits; its [`Wishes`] decide how reads are planned, and [`fetch`](mod@fetch) reads many
//! ranges accordingly. [`held`] is bytes in memory. [`copying`] copies sources into local files.

pub mod copying;
pub mod descriptors;
mod direct;
pub mod fetch;
pub mod held;
pub mod listed;
pub mod local;
pub mod mmap;
pub mod pread;
pub mod queue;
pub mod scout;
pub mod slots;
pub mod warmth;

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use self::mmap::{Map, Paging};
use self::warmth::Warmth;
use crate::error::{Error, Kind, Result};
use crate::kernels::Stores;
use crate::location::Location;
use crate::threads::{self, Context, Stop, Watch};

/// The way to read local files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Io {
    /// Through a mapping: fastest from the page cache, and required for views.
    Mmap,
    /// Positioned reads into the caller's memory. Never maps, so later changes of a file cannot fault.
    Pread,
}

impl Io {
    /// `"mmap"` or `"pread"`; `None` for any other name.
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
    /// Its offset.
    pub at: u64,
    /// Its length.
    pub len: u64,
}

/// Bytes of a long range that are read at once: a fraction of a second.
const LONG: usize = 16 << 20;

/// A read of a source: fills `into` from offset `at`.
#[derive(Debug)]
pub struct RangeRead<'a> {
    /// The offset.
    pub at: u64,
    /// The destination.
    pub into: &'a mut [u8],
}

/// Whether bytes are available without waiting for a disk or a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ready {
    /// All of them.
    Yes,
    /// Not all of them.
    No,
    /// The source does not know.
    Unknown,
}

/// A value that changes with the content of a source.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Version {
    /// For a file: device, inode, length, and the times of the last change of content and of metadata, in s and ns.
    File(u64, u64, u64, [(i64, i64); 2]),
    /// A store's own version tag.
    Tag(Arc<str>),
}

impl Version {
    /// Whether the content is the same. A file's times of its metadata, and its names, may differ.
    pub fn has_content_of(&self, other: &Version) -> bool {
        match (self, other) {
            (Version::File(_, _, len, [modified, _]), Version::File(_, _, other_len, [other_modified, _])) => {
                (len, modified) == (other_len, other_modified)
            }
            _ => self == other,
        }
    }
}

/// The error for a source that is not the one that was opened.
pub(crate) fn replaced(location: &Location, what: &str) -> Error {
    let detail = format!("was replaced after it was opened: {what}; open the dataset again");
    Error::new(Kind::Format, detail).at(location)
}

/// The cost of reads of a slow source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkPace {
    /// The time to the first byte of an idle source.
    pub latency: Duration,
    /// Bytes per second of all reads together.
    pub rate: u64,
}

/// The best way to read a slow source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wishes {
    /// Ranges at most this many bytes apart are read together; with a pace, only if that takes less time.
    pub gap: u64,
    /// Reads begin and end at multiples of this: a cache stores no smaller pieces. 1 for any offset.
    pub grain: u64,
    /// The cost of reads, if known.
    pub pace: Option<LinkPace>,
    /// The largest read, in bytes; longer ranges are split.
    pub largest: u64,
    /// Maximum number of concurrent reads.
    pub parallel: usize,
    /// Bytes that a window stream reads in one request, at least.
    pub unit_bytes: u64,
}

/// An open file or object. Reads never change the source.
pub trait Source: Debug + Send + Sync {
    /// Its name.
    fn location(&self) -> &Location;

    /// Its size in bytes when it was opened.
    fn size(&self) -> u64;

    /// Bytes of files that a read of `len` bytes at `at` needs; differs from `len` for a source that computes its
    /// bytes.
    fn stored(&self, _at: u64, len: u64) -> u64 {
        len
    }

    /// Its version now; `None` if it has no version, and then its bytes may not be cached.
    fn version(&self) -> Option<Version>;

    /// Its bytes, if they are in memory or mapped.
    fn bytes(&self) -> Option<&[u8]> {
        None
    }

    /// Whether its bytes are computed from bytes in memory or mapped, by [`Source::compute`]. Then a read waits at most for pages.
    fn computes(&self) -> bool {
        false
    }

    /// Fills a buffer with computed bytes, with these stores. Only for a source that [`Source::computes`].
    fn compute(&self, _read: RangeRead<'_>, _stores: Stores<'_>) -> Result<()> {
        Err(Error::new(Kind::Internal, "a source that computes nothing").at(self.location()))
    }

    /// Prefetches the memory that [`Source::compute`] begins with.
    fn prefetch(&self, _at: u64) {}

    /// The memory of its reads, if it is mapped.
    fn warmth(&self) -> Option<&Warmth> {
        None
    }

    /// A mapping of all of it that outlives the source, if possible.
    fn map(&self, _paging: Paging) -> Result<Option<Map>> {
        Ok(None)
    }

    /// Fills all buffers, or fails: once `stop` is set, with [`Kind::Interrupted`], so that no caller keeps a buffer that was not
    /// filled. Buffers for bytes that follow each other should be neighbours in `reads`: a slow source makes one request for them.
    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()>;

    /// Fills a buffer with bytes that are read once, without taking room in the page cache for them, if that is possible: the
    /// offset, the length and the buffer's address should be multiples of [`local::DIRECT`]. The buffer may extend past the
    /// source's end; its content there is undefined.
    fn read_past_cache(&self, read: RangeRead<'_>, stop: &Stop) -> Result<()> {
        let len = usize::try_from(self.size().saturating_sub(read.at)).unwrap_or(usize::MAX).min(read.into.len());
        self.read_many(&mut [RangeRead { at: read.at, into: &mut read.into[..len] }], stop)
    }

    /// Fills a buffer if that needs no waiting; otherwise its content is undefined.
    fn read_if_ready(&self, _read: RangeRead<'_>) -> Result<Ready> {
        Ok(Ready::Unknown)
    }

    /// Whether a byte can be read without waiting.
    fn is_ready(&self, _at: u64) -> Ready {
        Ready::Unknown
    }

    /// Whether a byte can be read without a network; the read may wait for a disk.
    fn is_near(&self, at: u64) -> bool {
        self.is_ready(at) == Ready::Yes
    }

    /// Fills a buffer if that needs no network; otherwise its content is undefined.
    fn read_if_near(&self, read: RangeRead<'_>) -> Result<bool> {
        Ok(self.read_if_ready(read)? == Ready::Yes)
    }

    /// Starts fetching ranges, without waiting for them. A hint: it never fails.
    fn will_need(&self, _ranges: &[ByteRange]) {}

    /// Fails if the source changed since it was opened such that reading it would be unsafe or wrong.
    fn unchanged(&self) -> Result<()>;

    /// Whether it may stay open.
    fn may_keep(&self) -> bool {
        true
    }

    /// Whether dropping it releases a descriptor.
    fn holds_descriptor(&self) -> bool {
        false
    }
}

impl dyn Source + '_ {
    /// Reads one range.
    pub fn read(&self, at: u64, into: &mut [u8], stop: &Stop) -> Result<()> {
        self.read_many(&mut [RangeRead { at, into }], stop)
    }

    /// Reads one long range, a near one in pieces, between which the context is asked whether to go on. A far read ends at its
    /// stop, and one of the whole range makes more requests at once.
    pub fn read_long(&self, mut at: u64, into: &mut [u8], context: &mut Context<'_>) -> Result<()> {
        let most = if self.is_near(at) { LONG } else { into.len().max(1) };
        for piece in into.chunks_mut(most) {
            self.read(at, piece, context.stop())?;
            at += piece.len() as u64;
            context.check()?;
        }
        Ok(())
    }
}

/// The purpose of opening a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Many random reads: it may stay open, and be mapped when it is opened.
    Kept,
    /// As [`Access::Kept`], of a file without a header that may grow while it is read.
    Growing,
    /// One sequential read: it is closed afterwards.
    Once,
}

/// Opens sources.
pub trait Store: Debug + Send + Sync {
    /// Opens each source, or returns its error, in order; in parallel if opening waits for a network. A missing one is
    /// [`Kind::NotFound`]. Stops waiting once `stop` is set; sources not open then are [`Kind::Interrupted`].
    fn open_many(&self, locations: &[&Location], access: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>>;

    /// Names of the files, objects and folders directly inside a folder, in any order; none if the folder does not exist.
    /// Names that are not Unicode may be left out.
    fn list(&self, folder: &Location) -> Result<Vec<String>>;

    /// Fails unless a file, object or folder of this name exists.
    #[expect(clippy::disallowed_methods, reason = "of a slow store on a thread that is abandoned instead")]
    fn look(&self, location: &Location) -> Result<()> {
        match opened(self.open_many(&[location], Access::Once, Stop::never()).pop(), location) {
            Ok(_) => Ok(()),
            Err(error) if error.kind == Kind::NotFound && !self.list(location)?.is_empty() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Whether opening a source may decode it into memory: then few of them are open at a time.
    fn decodes(&self) -> bool {
        false
    }

    /// The source, if opening it decodes nothing; `None` for another.
    fn decoded(&self, _location: &Location) -> Option<Result<Box<dyn Source>>> {
        None
    }

    /// The best way to read its sources; `None` for local files, which respond at once.
    fn wishes(&self) -> Option<Wishes> {
        None
    }
}

fn opened(answer: Option<Result<Box<dyn Source>>>, location: &Location) -> Result<Box<dyn Source>> {
    answer.unwrap_or_else(|| Err(Error::new(Kind::Internal, "a store that answered for too few files").at(location)))
}

impl dyn Store + '_ {
    /// Opens one source.
    pub fn open(&self, location: &Location, access: Access, stop: &Stop) -> Result<Box<dyn Source>> {
        opened(self.open_many(&[location], access, stop).pop(), location)
    }

    /// Opens one source while the caller's watch is called.
    pub fn open_watched(&self, location: &Location, access: Access, watch: Watch<'_>) -> Result<Box<dyn Source>> {
        self.work(&|context| self.open(location, access, context.stop()), watch)
    }

    /// Does work that opens and reads its sources: on this thread if they are near, else on one that may block, while the
    /// caller's watch is called.
    pub fn work<R: Send>(&self, work: &(dyn Fn(&mut Context<'_>) -> Result<R> + Sync), watch: Watch<'_>) -> Result<R> {
        match self.wishes() {
            None => work(&mut Context::of_caller(watch)),
            Some(_) => threads::wait_for(&|stop| work(&mut Context::of_part(stop)), watch),
        }
    }

    /// Opens each source while the caller's watch is called; returns one result per location.
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
