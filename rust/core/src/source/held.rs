//! A source of bytes in memory: a file that was inflated.

use std::sync::Arc;

use super::{RangeRead, Source, Version};
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::memory::buffer::Buffer;
use crate::threads::Stop;

/// Bytes in memory under the name of the file that they come from.
#[derive(Debug)]
pub struct Held {
    location: Location,
    bytes: Arc<Buffer>,
}

impl Held {
    /// A source of these bytes.
    pub fn new(location: Location, bytes: Buffer) -> Held {
        Held::shared(location, Arc::new(bytes))
    }

    /// A source of shared bytes.
    pub fn shared(location: Location, bytes: Arc<Buffer>) -> Held {
        Held { location, bytes }
    }
}

impl Source for Held {
    fn location(&self) -> &Location {
        &self.location
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn version(&self) -> Option<Version> {
        None
    }

    fn bytes(&self) -> Option<&[u8]> {
        Some(&self.bytes)
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], _: &Stop) -> Result<()> {
        for read in reads {
            let found = usize::try_from(read.at).ok().and_then(|at| self.bytes.get(at..)?.get(..read.into.len()));
            let found = found.ok_or_else(|| {
                Error::new(Kind::Truncated, format!("expected {} bytes, found fewer", read.into.len()))
                    .at(&self.location)
                    .byte(read.at)
            })?;
            read.into.copy_from_slice(found);
        }
        Ok(())
    }

    fn unchanged(&self) -> Result<()> {
        Ok(())
    }

    /// The bytes are already kept by a cache of a fixed size.
    fn may_keep(&self) -> bool {
        false
    }
}
