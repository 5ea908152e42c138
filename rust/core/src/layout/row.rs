//! The properties of rows, and their positions in a file.

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;
use crate::source::Source;
use crate::threads::Context;

/// The properties that all rows of a dataset share.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Elements per row.
    pub width: usize,
    /// The stored element type.
    pub dtype: DType,
    /// `width` times the type's size.
    pub bytes: usize,
}

impl Row {
    /// Rows of 1 byte to 4 GiB.
    pub fn new(width: u64, dtype: DType) -> Result<Row> {
        let size = dtype.size().ok_or_else(|| {
            Error::new(Kind::Unsupported, format!("rows of {} cannot be read as numpy arrays", dtype.name()))
        })?;
        let bytes = usize::try_from(width)
            .ok()
            .and_then(|w| w.checked_mul(size))
            .filter(|bytes| (1..=1 << 32).contains(bytes))
            .ok_or_else(|| {
                Error::new(Kind::Format, format!("expected rows of 1 byte to 4 GiB, found {width} x {}", dtype.name()))
            })?;
        Ok(Row { width: to_usize(width), dtype, bytes })
    }
}

/// The positions of rows in a file. Address `a` (an [`Address`](crate::layout::Address)'s `row`) is byte `start + a * unit`;
/// the row there has `used` bytes, the next row of a run begins `step` bytes later, and no row may end after `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Offset of address 0.
    pub start: u64,
    /// Offset one past the last byte of any row.
    pub end: u64,
    /// Bytes between two addresses.
    pub unit: u64,
    /// Bytes from one row of a run to the next; a multiple of `unit`.
    pub step: u64,
    /// Bytes of each row in this file: all of it, unless an array's chunks split the rows.
    pub used: usize,
    /// The first element of the row that is stored here.
    pub column: usize,
    /// Whether elements are byte-swapped.
    pub swapped: bool,
}

impl Place {
    /// Contiguous rows, one per address.
    pub fn packed(start: u64, rows: u64, row_bytes: usize) -> Option<Place> {
        let unit = row_bytes as u64;
        let end = rows.checked_mul(unit)?.checked_add(start)?;
        Some(Place { start, end, unit, step: unit, used: row_bytes, column: 0, swapped: false })
    }

    /// The same rows, byte-swapped if `swapped`.
    #[must_use]
    pub fn swapped_if(self, swapped: bool) -> Place {
        Place { swapped, ..self }
    }

    /// Byte offset of an address, if it and the following `rows - 1` rows end before `end`.
    #[inline]
    pub fn offset(&self, address: u64, rows: u64) -> Option<u64> {
        let begin = address.checked_mul(self.unit)?.checked_add(self.start)?;
        let span = rows.checked_sub(1)?.checked_mul(self.step)?.checked_add(self.used as u64)?;
        (begin.checked_add(span)? <= self.end).then_some(begin)
    }

    /// Addresses from a row to one that begins at its end, as the layers of a token do; `None` if rows are not stored whole.
    pub fn beside(&self, row_bytes: usize) -> Option<u64> {
        let used = self.used as u64;
        (self.used == row_bytes && used.is_multiple_of(self.unit)).then(|| used / self.unit)
    }

    /// Byte offset of an address, if `rows` rows, side by side from there on, end before `end`.
    pub fn abreast(&self, address: u64, rows: u64) -> Option<u64> {
        let begin = address.checked_mul(self.unit)?.checked_add(self.start)?;
        (begin.checked_add(rows.checked_mul(self.used as u64)?)? <= self.end).then_some(begin)
    }

    /// Number of rows, if each address is a row.
    pub fn rows(&self) -> u64 {
        (self.end - self.start) / self.step.max(1)
    }

    /// Whether a run of rows is one contiguous byte range.
    pub fn is_dense(&self) -> bool {
        self.step == self.used as u64
    }
}

/// The rows that a file's own header describes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundRows {
    /// Offset of the first row.
    pub start: u64,
    /// Number of rows.
    pub rows: u64,
    /// Whether elements are byte-swapped.
    pub swapped: bool,
}

/// Finds a dataset's rows in a file by reading its header.
pub trait FindRows: std::fmt::Debug + Send + Sync {
    /// Finds rows like `row`. Errors name the file.
    fn find(&self, source: &dyn Source, row: &Row, context: &mut Context<'_>) -> Result<FoundRows>;
}
