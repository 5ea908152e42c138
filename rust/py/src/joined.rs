//! Arguments of `Rows.joined`: files of rows that follow each other, and the examples that cut them.

use std::sync::Arc;

use actshard_core::files::table::{RowFile, RowsIn};
use actshard_core::layout::joined::{ExampleCut, Joined};
use actshard_core::parse::arrow::{EvenOffsets, ListRows};
use actshard_core::{Error, Kind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::place::NamedPlace;

/// A file: path, offset of the first row, rows, whether byte-swapped, and list offsets to check when it is opened: byte
/// offset, how many, whether 64 bits each, the first, difference of neighbours.
pub type JoinedTuple = (NamedPlace, u64, u64, bool, Vec<(u64, u64, bool, u64, u64)>);

/// The examples.
#[derive(FromPyObject)]
pub enum CutBy<'py> {
    /// Examples, rows of each.
    Even(u64, u64),
    /// The row at which each example begins, and the row after the last.
    Ends(PyReadonlyArray1<'py, u64>),
}

impl CutBy<'_> {
    /// The same, for the core.
    pub fn examples(self) -> PyResult<ExampleCut> {
        Ok(match self {
            CutBy::Even(examples, tokens) => ExampleCut::Even { examples, tokens },
            CutBy::Ends(ends) => ExampleCut::Ends(ends.as_slice()?.to_vec()),
        })
    }
}

/// The files and the layout. The list has equal parts, one per group.
pub fn parts(
    files: Vec<JoinedTuple>,
    cut: ExampleCut,
    void: Vec<u64>,
    num_groups: usize,
) -> actshard_core::Result<(Vec<RowFile>, Joined)> {
    let each = files.len() / num_groups.max(1);
    let rows: Vec<u64> = files.iter().map(|(_, _, rows, ..)| *rows).collect();
    if each * num_groups != files.len() || rows.chunks(each.max(1)).any(|group| *group != rows[..each]) {
        return Err(Error::new(Kind::Format, "expected files of equal numbers of rows for every layer"));
    }
    let layout = Joined::new(num_groups, &rows[..each], cut, void)?;
    let file = |(place, start, rows, swapped, offsets): JoinedTuple| {
        let even = |(at, count, wide, first, step)| EvenOffsets { at, count, wide, first, step };
        let rows = if offsets.is_empty() {
            RowsIn::At { start, rows, swapped }
        } else {
            RowsIn::Found(Arc::new(ListRows { start, rows, offsets: offsets.into_iter().map(even).collect() }))
        };
        RowFile { location: place.location, rows }
    };
    Ok((files.into_iter().map(file).collect(), layout))
}
