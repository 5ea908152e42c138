//! An open file: its bytes, and the positions of its rows.
//!
//! All kinds of datasets use it. They differ in the bytes (from a source, decoded into memory, or missing, which means "the fill
//! value" in a chunked array) and in the positions of rows, which [`Place`] describes.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::layout::row::Place;
use crate::location::Location;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::source::mmap::{Map, Paging};
use crate::source::slots::Opened;
use crate::source::{ByteRange, Ready, Source};

/// The bytes of a file.
#[derive(Debug)]
pub enum Body {
    /// Stored bytes, from a source.
    Stored(Box<dyn Source>),
    /// Stored bytes of a source that several files share: inner chunks of one shard.
    Shared(Arc<dyn Source>),
    /// Decoded into memory.
    Decoded(Location, Arc<Buffer>),
    /// A missing file whose elements all equal this one, as the format defines.
    Fill(Location, Vec<u8>),
}

/// An open file, and the positions of its rows.
#[derive(Debug)]
pub struct OpenFile {
    body: Body,
    place: Place,
}

impl OpenFile {
    /// A file whose length has just been checked.
    pub fn new(body: Body, place: Place) -> OpenFile {
        OpenFile { body, place }
    }

    /// Its location, even if it is missing.
    pub fn location(&self) -> &Location {
        match &self.body {
            Body::Stored(source) => source.location(),
            Body::Shared(source) => source.location(),
            Body::Decoded(location, _) | Body::Fill(location, _) => location,
        }
    }

    /// Its bytes.
    #[inline]
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// The positions of its rows.
    #[inline]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The bytes, if they are in memory or mapped.
    #[inline]
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.body {
            Body::Stored(source) => source.bytes(),
            Body::Shared(source) => source.bytes(),
            Body::Decoded(_, bytes) => Some(bytes),
            Body::Fill(..) => None,
        }
    }

    /// The source, if there is one.
    #[inline]
    pub fn source(&self) -> Option<&dyn Source> {
        match &self.body {
            Body::Stored(source) => Some(&**source),
            Body::Shared(source) => Some(&**source),
            Body::Decoded(..) | Body::Fill(..) => None,
        }
    }

    /// An identity of the source that it shares with other files, if it does.
    pub fn shared(&self) -> Option<*const ()> {
        if let Body::Shared(source) = &self.body { Some(Arc::as_ptr(source).cast()) } else { None }
    }

    /// Fails if the file has changed since it was opened.
    pub fn unchanged(&self) -> Result<()> {
        self.source().map_or(Ok(()), Source::unchanged)
    }
}

impl Opened for OpenFile {
    /// The owner of a shared source keeps it, and compares its version on each use.
    fn may_keep(&self) -> bool {
        matches!(&self.body, Body::Stored(source) if source.may_keep())
    }

    fn holds_descriptor(&self) -> bool {
        matches!(&self.body, Body::Stored(source) if source.holds_descriptor())
    }
}

/// Contiguous rows as bytes of a shared mapping, readable after the dataset is closed. A view keeps no descriptor, so
/// `ulimit -n` does not limit the number of views.
#[derive(Debug)]
pub struct View {
    map: Map,
    begin: usize,
    end: usize,
}

impl View {
    /// A view of rows; `None` if the file cannot be mapped, or the rows are not contiguous and in native byte order. The view is
    /// likely to be read from beginning to end: cold pages are hinted, unless `paging` lets the kernel read ahead.
    pub fn of(file: &OpenFile, at: u64, rows: u64, row_bytes: usize, paging: Paging) -> Result<Option<View>> {
        let place = *file.place();
        if rows == 0 || !place.is_dense() || place.swapped || place.used != row_bytes {
            return Ok(None);
        }
        let Some(begin) = place.offset(at, rows) else {
            return Err(outside(file, at, rows, ""));
        };
        file.unchanged()?;
        let (begin, end) = (to_usize(begin), to_usize(begin) + to_usize(rows) * row_bytes);
        let Some(source) = file.source() else { return Ok(None) };
        let Some(map) = source.map(paging)? else { return Ok(None) };
        if paging == Paging::Hinted && [begin, end - 1].iter().any(|at| source.is_ready(*at as u64) == Ready::No) {
            source.will_need(&[ByteRange { at: begin as u64, len: (end - begin) as u64 }]);
        }
        Ok(map.bytes().get(begin..end).is_some().then_some(View { map, begin, end }))
    }

    /// A byte range of a mapped file; `None` if the file is not mapped or has no such range.
    pub fn range(source: &dyn Source, begin: usize, end: usize) -> Result<Option<View>> {
        source.unchanged()?;
        let map = source.map(Paging::Hinted)?.filter(|map| map.bytes().get(begin..end).is_some());
        Ok(map.map(|map| View { map, begin, end }))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map.bytes()[self.begin..self.end]
    }
}

/// The error for rows that an index refers to and the file does not contain.
pub(crate) fn outside(file: &OpenFile, address: u64, rows: u64, whose: &str) -> Error {
    let place = file.place();
    let detail = if place.unit == place.step {
        let (row, held) = (address.saturating_add(rows.saturating_sub(1)), place.rows());
        format!("the index names row {row}{whose}, but the file has {held} rows")
    } else {
        format!("the index names {rows} rows at byte {address}{whose}, but the file has {} bytes", place.end)
    };
    Error::new(Kind::Format, detail).at(file.location())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::source::local::open_to_jump;
    use crate::source::{Io, RangeRead, Version};
    use crate::threads::Stop;

    #[derive(Debug)]
    struct Object(Location);

    impl Source for Object {
        fn location(&self) -> &Location {
            &self.0
        }

        fn size(&self) -> u64 {
            0
        }

        fn version(&self) -> Option<Version> {
            None
        }

        fn read_many(&self, _: &mut [RangeRead<'_>], _: &Stop) -> Result<()> {
            Ok(())
        }

        fn unchanged(&self) -> Result<()> {
            Ok(())
        }
    }

    /// Otherwise the clock would close objects to free descriptors that they do not hold.
    #[test]
    fn an_object_holds_no_descriptor_and_a_file_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [1]).unwrap();
        let place = Place::packed(0, 0, 1).unwrap();
        let holds = |source| OpenFile::new(Body::Stored(source), place).holds_descriptor();
        assert!([Io::Mmap, Io::Pread].into_iter().all(|io| holds(open_to_jump(&path, io).unwrap())));
        assert!(!holds(Box::new(Object(Location::object("store", "a")))));
    }
}
