//! An open object.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use actshard_core::location::Location;
use actshard_core::source::{ByteRange, RangeRead, Ready, Source, Version};
use actshard_core::threads::{ForkSafe, Stop};
use actshard_core::{Error, Kind, Result};
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::failure::{Cause, Failure};
use crate::known::ObjectFacts;
use crate::reading::{Link, Pieces};
use crate::runtime::wait;

/// The longest piece of a read; longer ranges are several requests.
pub const LARGEST: u64 = 4 << 20;
/// Requests of one read in flight.
pub const PARALLEL: usize = 64;
/// Requests for short ranges in flight: more of them save bytes, since fewer gaps are read to save requests.
pub const SHORT_PARALLEL: usize = 128;

/// Bytes of objects' beginnings that this process keeps.
const HEADS: u64 = 256 << 20;
static HELD: AtomicU64 = AtomicU64::new(0);

/// A share of [`HEADS`].
#[derive(Debug)]
pub struct HeadShare(u64);

impl HeadShare {
    /// A share of this many bytes, if they are available.
    pub fn take(bytes: u64) -> Option<HeadShare> {
        let fits = |held: u64| held.checked_add(bytes).filter(|held| *held <= HEADS);
        HELD.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok().then_some(HeadShare(bytes))
    }

    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        self.0
    }

    /// Returns all but this many bytes.
    pub fn shrink(&mut self, bytes: u64) {
        HELD.fetch_sub(self.0.saturating_sub(bytes), Ordering::Relaxed);
        self.0 = self.0.min(bytes);
    }
}

impl Drop for HeadShare {
    fn drop(&mut self) {
        self.shrink(0);
    }
}

/// The first bytes of an object, received when it was opened.
#[derive(Clone, Debug)]
pub struct Head {
    pub(crate) bytes: Bytes,
    pub(crate) _share: Arc<HeadShare>,
}

/// An open object of a store. It keeps no connection.
#[derive(Debug)]
pub struct RemoteObject {
    pub(crate) link: Arc<Link>,
    pub(crate) location: Location,
    pub(crate) key: String,
    /// The facts about it when it was opened.
    pub(crate) opened: ObjectFacts,
    /// Its first bytes, if they were received when it was opened; dropped by the first read past them.
    pub(crate) head: ForkSafe<Option<Head>>,
}

impl RemoteObject {
    fn check(&self, at: u64, len: usize) -> Result<()> {
        if at.checked_add(len as u64).is_none_or(|end| end > self.opened.size) {
            let text = format!("expected {len} bytes, found the end of the object at {}", self.opened.size);
            return Err(Error::new(Kind::Truncated, text).at(&self.location).byte(at));
        }
        Ok(())
    }

    /// Copies the part of a range that is in the first bytes; returns its length.
    fn copy_head(&self, at: u64, into: &mut [u8]) -> usize {
        let Some(head) = self.head.with(|head| head.clone()).flatten() else { return 0 };
        let Some(found) = usize::try_from(at).ok().and_then(|at| head.bytes.get(at..)) else { return 0 };
        let len = found.len().min(into.len());
        into[..len].copy_from_slice(&found[..len]);
        len
    }

    fn error(&self, failure: &Failure, at: u64) -> Error {
        let error = self.link.error(failure, &self.location);
        if failure.cause == Cause::Broken { error.byte(at) } else { error }
    }
}

impl Source for RemoteObject {
    fn location(&self) -> &Location {
        &self.location
    }

    fn size(&self) -> u64 {
        self.opened.size
    }

    fn version(&self) -> Option<Version> {
        let latest = self.link.known.with(|known| known.latest(&self.key, &self.opened));
        (!latest.tag.is_empty()).then(|| Version::Tag(latest.tag.text(latest.size).into()))
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        // Reads that follow each other are one request, up to its longest.
        let mut pieces: Vec<(u64, Pieces<'_>)> = vec![];
        for read in reads {
            self.check(read.at, read.into.len())?;
            let copied = self.copy_head(read.at, read.into);
            let (mut at, mut rest) = (read.at + copied as u64, &mut read.into[copied..]);
            while !rest.is_empty() {
                let room = match pieces.last() {
                    Some((first, last)) if first + last.bytes() as u64 == at => LARGEST as usize - last.bytes(),
                    _ => 0,
                };
                if room == 0 {
                    pieces.push((at, Pieces::default()));
                }
                let room = if room == 0 { LARGEST as usize } else { room };
                let (now, later) = rest.split_at_mut(rest.len().min(room));
                (at, rest) = (at + now.len() as u64, later);
                if let Some((_, last)) = pieces.last_mut() {
                    last.push(now);
                }
            }
        }
        if pieces.is_empty() {
            return Ok(());
        }
        self.head.with(|head| *head = None);
        let reading = self.link.reading(&self.key, Some(&self.opened));
        let one = |(at, mut into)| async move { reading.fill(at, &mut into).await.map_err(|failure| (at, failure)) };
        let all = async {
            let mut left = pieces.into_iter();
            let mut flying: FuturesUnordered<_> = left.by_ref().take(PARALLEL).map(one).collect();
            while let Some(done) = flying.next().await {
                done?;
                flying.extend(left.next().map(one));
            }
            Ok(())
        };
        wait(all, stop)?.map_err(|(at, failure)| self.error(&failure, at))
    }

    fn read_if_ready(&self, read: RangeRead<'_>) -> Result<Ready> {
        self.check(read.at, read.into.len())?;
        Ok(if self.copy_head(read.at, read.into) == read.into.len() { Ready::Yes } else { Ready::No })
    }

    fn is_ready(&self, at: u64) -> Ready {
        let len = self.head.with(|head| head.as_ref().map(|head| head.bytes.len())).flatten().unwrap_or(0);
        if at < len as u64 { Ready::Yes } else { Ready::No }
    }

    fn will_need(&self, _: &[ByteRange]) {}

    /// Every answer is compared with the first one, before its bytes are returned.
    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}
