//! A row, and where rows stand in a file.

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::source::Source;

/// What all rows of a dataset have in common.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    /// Elements.
    pub width: usize,
    /// Their stored type.
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
                Error::new(Kind::Format, format!("a row of {width} x {} is not 1 byte to 4 GiB", dtype.name()))
            })?;
        Ok(Row { width: width as usize, dtype, bytes })
    }
}

/// Where rows stand in a file. Address `a` (an [`Address`](crate::layout::Address)'s `row`) is byte `start + a * unit`; the
/// row there has `used` bytes, the next row of a run begins `step` bytes later, and nothing may end after `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Offset of address 0.
    pub start: u64,
    /// Offset one past the last byte that rows may use.
    pub end: u64,
    /// Bytes between two addresses.
    pub unit: u64,
    /// Bytes between a row and the next of its run; a multiple of `unit`.
    pub step: u64,
    /// Bytes of a row that lie here: all of it, but where an array's chunks split the rows.
    pub used: usize,
    /// Where in the row they belong, in elements.
    pub column: usize,
    /// Whether elements lie in the other byte order.
    pub swapped: bool,
}

impl Place {
    /// Rows packed one after another, each address one row.
    pub fn packed(start: u64, rows: u64, row_bytes: usize) -> Option<Place> {
        let unit = row_bytes as u64;
        let end = rows.checked_mul(unit)?.checked_add(start)?;
        Some(Place { start, end, unit, step: unit, used: row_bytes, column: 0, swapped: false })
    }

    /// The same rows, their elements in the other byte order.
    #[must_use]
    pub fn swapped_if(self, swapped: bool) -> Place {
        Place { swapped, ..self }
    }

    /// Offset of an address's first byte, if it and the `rows - 1` after it end in time.
    #[inline]
    pub fn offset(&self, address: u64, rows: u64) -> Option<u64> {
        let begin = address.checked_mul(self.unit)?.checked_add(self.start)?;
        let span = rows.checked_sub(1)?.checked_mul(self.step)?.checked_add(self.used as u64)?;
        (begin.checked_add(span)? <= self.end).then_some(begin)
    }

    /// Rows held, where each address is one.
    pub fn rows(&self) -> u64 {
        (self.end - self.start) / self.step.max(1)
    }

    /// Whether a run of rows is one range of bytes.
    pub fn is_dense(&self) -> bool {
        self.step == self.used as u64
    }
}

/// Where rows lie in a file, as the file itself says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Found {
    /// The first row's first byte.
    pub start: u64,
    /// How many.
    pub rows: u64,
    /// Whether elements are in the other byte order.
    pub swapped: bool,
}

/// Looks into a file for a dataset's rows: what a format's header says, as a layout needs it.
pub trait FindRows: std::fmt::Debug + Send + Sync {
    /// Where rows like `row` lie. An error names the file.
    fn find(&self, source: &dyn Source, row: &Row) -> Result<Found>;
}
