//! An open object.

use std::sync::{Arc, Mutex};

use actshard_core::location::Location;
use actshard_core::source::{ByteRange, RangeRead, Ready, Source, Version};
use actshard_core::threads::Stop;
use actshard_core::{Error, Kind, Result};
use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::client::Tag;
use crate::failure::{Cause, Failure};
use crate::reading::Link;
use crate::runtime::{wait, with};

/// The longest piece of a read; longer ranges are several requests.
pub const LARGEST: u64 = 4 << 20;
/// Requests of one read in flight.
pub const PARALLEL: usize = 64;

/// An open object of a store. It holds no connection.
#[derive(Debug)]
pub struct RemoteObject {
    pub(crate) link: Arc<Link>,
    pub(crate) location: Location,
    pub(crate) key: String,
    pub(crate) size: u64,
    pub(crate) tag: Mutex<Tag>,
    /// Its first bytes, if they came when it was opened; dropped by the first read past them.
    pub(crate) head: Mutex<Option<Bytes>>,
}

impl RemoteObject {
    fn check(&self, at: u64, len: usize) -> Result<()> {
        if at.checked_add(len as u64).is_none_or(|end| end > self.size) {
            let text = format!("expected {len} bytes, found the end of the object at {}", self.size);
            return Err(Error::new(Kind::Truncated, text).at(&self.location).byte(at));
        }
        Ok(())
    }

    /// Copies a range from the first bytes; false if they do not contain it.
    fn copy_head(&self, at: u64, into: &mut [u8]) -> bool {
        let Some(head) = with(&self.head, |head| head.clone()).flatten() else { return false };
        let found = usize::try_from(at).ok().and_then(|at| head.get(at..at.checked_add(into.len())?));
        if let Some(found) = found {
            into.copy_from_slice(found);
        }
        found.is_some()
    }

    fn error(&self, failure: &Failure, at: u64) -> Error {
        let error = failure.at(&self.location);
        if failure.cause == Cause::Broken { error.byte(at) } else { error }
    }
}

impl Source for RemoteObject {
    fn location(&self) -> &Location {
        &self.location
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<Version> {
        let tag = with(&self.tag, |tag| tag.clone()).filter(|tag| !tag.is_empty())?;
        Some(Version::Tag(tag.text(self.size).into()))
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        let mut pieces: Vec<(u64, &mut [u8])> = vec![];
        for read in reads {
            self.check(read.at, read.into.len())?;
            if read.into.is_empty() || self.copy_head(read.at, read.into) {
                continue;
            }
            let chunks = read.into.chunks_mut(LARGEST as usize).enumerate();
            pieces.extend(chunks.map(|(i, into)| (read.at + i as u64 * LARGEST, into)));
        }
        if pieces.is_empty() {
            return Ok(());
        }
        with(&self.head, |head| {
            if head.as_ref().is_some_and(|head| (head.len() as u64) < self.size) {
                *head = None;
            }
        });
        let reading = self.link.reading(&self.key, Some(self.size), &self.tag);
        let one = |(at, into)| async move { reading.fill(at, into).await.map_err(|failure| (at, failure)) };
        let all = async {
            let mut left = pieces.into_iter();
            let mut flying: FuturesUnordered<_> = left.by_ref().take(PARALLEL).map(one).collect();
            while let Some(done) = flying.next().await {
                done?;
                flying.extend(left.next().map(one));
            }
            Ok(())
        };
        match wait(all, stop)? {
            Some(Err((at, failure))) => Err(self.error(&failure, at)),
            Some(Ok(())) | None => Ok(()),
        }
    }

    fn read_if_ready(&self, read: RangeRead<'_>) -> Result<Ready> {
        self.check(read.at, read.into.len())?;
        Ok(if self.copy_head(read.at, read.into) { Ready::Yes } else { Ready::No })
    }

    fn is_ready(&self, at: u64) -> Ready {
        let len = with(&self.head, |head| head.as_ref().map(Bytes::len)).flatten().unwrap_or(0);
        if at < len as u64 { Ready::Yes } else { Ready::No }
    }

    fn will_need(&self, _: &[ByteRange]) {}

    /// Every answer is compared with the first one, before its bytes are returned.
    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}
