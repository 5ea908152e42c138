//! A file that is open: its bytes, and where the rows lie in it.
//!
//! Every kind of dataset ends here. What differs is how the bytes are had (a source, decoded into memory, or not there at all,
//! which in a chunked array means "the fill value") and how the rows stand in them; [`Place`] says the second in five numbers.

use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::layout::row::Place;
use crate::location::Location;
use crate::memory::buffer::Buffer;
use crate::source::mmap::Map;
use crate::source::slots::Opened;
use crate::source::{ByteRange, Ready, Source};

/// How the bytes of a file are had.
#[derive(Debug)]
pub enum Body {
    /// As they are stored.
    Stored(Box<dyn Source>),
    /// Decoded into memory.
    Decoded(Location, Arc<Buffer>),
    /// There is no such file, and the format says what that means: every element is this one.
    Fill(Location, Vec<u8>),
}

/// A file that is open, and where its rows lie.
#[derive(Debug)]
pub struct OpenFile {
    body: Body,
    place: Place,
}

impl OpenFile {
    /// A file whose length was looked at just now.
    pub fn new(body: Body, place: Place) -> OpenFile {
        OpenFile { body, place }
    }

    /// Where it is, or would be.
    pub fn location(&self) -> &Location {
        match &self.body {
            Body::Stored(source) => source.location(),
            Body::Decoded(location, _) | Body::Fill(location, _) => location,
        }
    }

    /// How its bytes are had.
    #[inline]
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Where its rows lie.
    #[inline]
    pub fn place(&self) -> &Place {
        &self.place
    }

    /// The bytes, where they can be looked at.
    #[inline]
    pub fn bytes(&self) -> Option<&[u8]> {
        match &self.body {
            Body::Stored(source) => source.bytes(),
            Body::Decoded(_, bytes) => Some(bytes),
            Body::Fill(..) => None,
        }
    }

    /// The source, where there is one.
    #[inline]
    pub fn source(&self) -> Option<&dyn Source> {
        match &self.body {
            Body::Stored(source) => Some(&**source),
            Body::Decoded(..) | Body::Fill(..) => None,
        }
    }

    /// Fails if the file is not what it was when it was opened.
    pub fn unchanged(&self) -> Result<()> {
        self.source().map_or(Ok(()), Source::unchanged)
    }
}

impl Opened for OpenFile {
    fn may_keep(&self) -> bool {
        self.source().is_some_and(Source::may_keep)
    }

    fn holds_descriptor(&self) -> bool {
        self.source().is_some_and(Source::holds_descriptor)
    }
}

/// Rows that lie one after another, as bytes in a shared mapping: they stay readable when the dataset is closed. A view keeps
/// no descriptor, so that the number of views is not bounded by `ulimit -n`.
#[derive(Debug)]
pub struct View {
    map: Map,
    begin: usize,
    end: usize,
}

impl View {
    /// Rows of a file that can be mapped; `None` where it cannot, or the rows are not one range of bytes in this machine's order.
    /// Cold pages are put on their way: who asks for a view is about to read it from front to back.
    pub fn of(file: &OpenFile, address: u64, rows: u64, row_bytes: usize) -> Result<Option<View>> {
        let place = *file.place();
        if rows == 0 || !place.is_dense() || place.swapped || place.used != row_bytes {
            return Ok(None);
        }
        let Some(begin) = place.offset(address, rows) else {
            return Err(outside(file, address, rows, ""));
        };
        file.unchanged()?;
        let (begin, end) = (begin as usize, begin as usize + rows as usize * row_bytes);
        let Some(source) = file.source() else { return Ok(None) };
        let Some(map) = source.map()? else { return Ok(None) };
        if [begin, end - 1].iter().any(|at| source.is_ready(*at as u64) == Ready::No) {
            source.will_need(&[ByteRange { at: begin as u64, len: (end - begin) as u64 }]);
        }
        Ok(map.bytes().get(begin..end).is_some().then_some(View { map, begin, end }))
    }

    /// A range of a mapped file's bytes; `None` where there is no map, or the file has no such range.
    pub fn range(source: &dyn Source, begin: usize, end: usize) -> Result<Option<View>> {
        source.unchanged()?;
        let map = source.map()?.filter(|map| map.bytes().get(begin..end).is_some());
        Ok(map.map(|map| View { map, begin, end }))
    }

    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.map.bytes()[self.begin..self.end]
    }
}

/// The error for rows that an index names and the file does not hold.
pub(crate) fn outside(file: &OpenFile, address: u64, rows: u64, whose: &str) -> Error {
    let place = file.place();
    let detail = if place.unit == place.step {
        let (row, held) = (address.saturating_add(rows.saturating_sub(1)), place.rows());
        format!("the index names row {row}{whose}, but the file holds {held} rows")
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

    /// Or the clock would close objects where descriptors are lacking, and count them as free.
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
