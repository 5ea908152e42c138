//! The rows of a dataset in any layout: the type that a binding uses.

pub mod chosen;
mod part;
pub mod several;
pub mod spread;
pub mod units;

use std::iter::once;
use std::sync::Arc;

use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::chunks::ChunkFiles;
use crate::files::open::View;
use crate::files::shards::{Shards, TYPES as TYPES_OF_SHARDS};
use crate::files::table::FileTable;
use crate::gather::blocks::{BlockReader, gather_in_blocks};
use crate::gather::{Ints, Origin, Out, Pick, are_cached, gather};
use crate::layout::chunked::Chunked;
use crate::layout::joined::Joined;
use crate::layout::placed::Placed;
use crate::layout::records::Records;
use crate::layout::row::Row;
use crate::layout::spans::Spans;
use crate::layout::strided::Strided;
use crate::layout::table::Table;
use crate::layout::tensors::Tensors;
use crate::layout::{Address, Layout, check_example};
use crate::rows::chosen::{Chosen, named};
use crate::rows::several::Several;
use crate::rows::spread::{Spread, spread};
pub use crate::rows::units::Units;
use crate::source::Io;
use crate::source::mmap::Paging;
use crate::threads::{Stop, Watch};

/// The files and the layout of a dataset. An enum and not a trait object: the gather is compiled for each layout.
#[allow(clippy::large_enum_variant, reason = "one per dataset")]
pub enum Rows {
    /// Files of equal shape, addresses by arithmetic.
    Strided(FileTable, Strided),
    /// Listed files, addresses from a table.
    Table(FileTable, Table),
    /// Listed files; each example begins at its own row.
    Spans(FileTable, Spans),
    /// Listed files, joined to one sequence of rows that examples cut into pieces.
    Joined(FileTable, Joined),
    /// Listed files; addresses from an index file of records.
    Records(FileTable, Records),
    /// Listed files; each example is a part of tensors in them.
    Tensors(FileTable, Tensors),
    /// Listed files; each example of each group begins at its own byte.
    Placed(FileTable, Placed),
    /// Arrays cut into chunk files.
    Chunked(ChunkFiles, Chunked),
    /// Pickle shards, which must be parsed before their rows are known, and the requested type of rows, if any
    /// ([`Rows::read_as`]).
    Shards(Arc<Shards>, Option<DType>),
    /// Some examples of other rows.
    Chosen(Arc<Rows>, Chosen),
    /// Several other rows.
    Several(Several<Rows>),
}

/// Runs `$body` with the layout of these examples: the dataset's own, or, for shards, one prepared by parsing the shards
/// concerned.
macro_rules! with_layout {
    ($self:expr, $examples:expr, $watch:expr, $layout:ident => $body:expr) => {
        match $self {
            Rows::Strided(_, $layout) => $body,
            Rows::Table(_, $layout) => $body,
            Rows::Spans(_, $layout) => $body,
            Rows::Joined(_, $layout) => $body,
            Rows::Records(_, $layout) => $body,
            Rows::Tensors(_, $layout) => $body,
            Rows::Placed(_, $layout) => $body,
            Rows::Chunked(_, $layout) => $body,
            Rows::Shards(shards, _) => {
                let $layout = &shards.prepare(Some($examples), $watch)?;
                $body
            }
            Rows::Chosen(..) | Rows::Several(_) => Err(Error::new(Kind::Internal, "a choice or a join has no layout")),
        }
    };
}

/// Runs `$body` with the origin of all rows, compiled for each layout; calls `$shards` for pickle shards.
macro_rules! with_origin {
    ($self:expr, $groups:expr, $origin:ident => $body:expr, $shards:expr) => {{
        let (groups, only) = ($groups, 0..u64::MAX);
        match $self {
            Rows::Strided(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Table(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Placed(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Spans(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Joined(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Records(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Tensors(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Chunked(files, layout) => {
                let $origin = &Origin { files, layout, groups, only };
                $body
            }
            Rows::Shards(..) | Rows::Chosen(..) | Rows::Several(_) => $shards(),
        }
    }};
}

impl Rows {
    /// The properties of a row.
    pub fn row(&self) -> Row {
        match self {
            Rows::Strided(files, _)
            | Rows::Table(files, _)
            | Rows::Spans(files, _)
            | Rows::Joined(files, _)
            | Rows::Records(files, _)
            | Rows::Tensors(files, _)
            | Rows::Placed(files, _) => files.row(),
            Rows::Chunked(files, _) => files.row(),
            Rows::Chosen(of, _) => of.row(),
            Rows::Several(several) => several.row(),
            Rows::Shards(shards, None) => shards.row(),
            Rows::Shards(shards, Some(dtype)) => {
                let Row { width, .. } = shards.row();
                Row { width, dtype: *dtype, bytes: width * dtype.size().unwrap_or(0) }
            }
        }
    }

    /// Closes cached files and drops cached decoded bytes. Reads in progress finish; a later read opens its files again.
    pub fn release(&self) {
        match self {
            Rows::Strided(files, _)
            | Rows::Table(files, _)
            | Rows::Spans(files, _)
            | Rows::Joined(files, _)
            | Rows::Records(files, _)
            | Rows::Tensors(files, _)
            | Rows::Placed(files, _) => files.release(),
            Rows::Chunked(files, _) => files.release(),
            Rows::Shards(shards, _) => shards.release(),
            Rows::Chosen(of, _) => of.release(),
            Rows::Several(several) => several.parts().iter().for_each(|part| part.release()),
        }
    }

    /// Begins to read the shard of an example that is needed next, if shards are read whole; `None` drops the shard
    /// that was read ahead. Only a hint.
    pub fn read_ahead(&self, example: Option<i64>) {
        match (self, example) {
            (Rows::Shards(shards, _), Some(example)) => shards.read_ahead(example),
            (Rows::Shards(shards, _), None) => shards.forget_ahead(),
            (Rows::Several(several), example) => several.read_ahead(example),
            _ => {}
        }
    }

    /// Number of examples.
    pub fn examples(&self) -> u64 {
        match self {
            Rows::Strided(_, layout) => layout.examples(),
            Rows::Table(_, layout) => layout.examples(),
            Rows::Spans(_, layout) => layout.examples(),
            Rows::Joined(_, layout) => layout.examples(),
            Rows::Records(_, layout) => layout.examples(),
            Rows::Tensors(_, layout) => layout.examples(),
            Rows::Placed(_, layout) => layout.examples(),
            Rows::Chunked(_, layout) => layout.examples(),
            Rows::Shards(shards, _) => shards.examples(),
            Rows::Chosen(_, chosen) => chosen.len(),
            Rows::Several(several) => several.len(),
        }
    }

    /// Number of groups.
    pub fn groups(&self) -> usize {
        match self {
            Rows::Strided(_, layout) => layout.groups(),
            Rows::Table(_, layout) => layout.groups(),
            Rows::Spans(_, layout) => layout.groups(),
            Rows::Joined(_, layout) => layout.groups(),
            Rows::Records(_, layout) => layout.groups(),
            Rows::Tensors(_, layout) => layout.groups(),
            Rows::Placed(_, layout) => layout.groups(),
            Rows::Chunked(_, layout) => layout.groups(),
            Rows::Shards(shards, _) => shards.groups(),
            Rows::Chosen(of, _) => of.groups(),
            Rows::Several(several) => several.group_count(),
        }
    }

    /// Whether reading decodes: then switching between files is expensive.
    pub fn decodes(&self) -> bool {
        match self {
            Rows::Strided(..)
            | Rows::Table(..)
            | Rows::Spans(..)
            | Rows::Joined(..)
            | Rows::Records(..)
            | Rows::Tensors(..)
            | Rows::Placed(..) => false,
            Rows::Chunked(files, _) => files.decodes(),
            Rows::Shards(shards, _) => shards.specs().iter().any(|s| s.compressed),
            Rows::Chosen(of, _) => of.decodes(),
            Rows::Several(several) => several.parts().iter().any(|part| part.decodes()),
        }
    }

    /// Bytes that a window should read in one request from these sources; `None` for local files.
    pub fn unit_bytes(&self) -> Option<u64> {
        match self {
            Rows::Strided(files, _)
            | Rows::Table(files, _)
            | Rows::Spans(files, _)
            | Rows::Joined(files, _)
            | Rows::Records(files, _)
            | Rows::Tensors(files, _)
            | Rows::Placed(files, _) => files.wishes().map(|w| w.unit_bytes),
            Rows::Chunked(files, _) => files.wishes().map(|w| w.unit_bytes),
            Rows::Shards(..) => None,
            Rows::Chosen(of, _) => of.unit_bytes(),
            Rows::Several(several) => several.parts().iter().filter_map(|part| part.unit_bytes()).max(),
        }
    }

    /// Whether a slow source sends some of the rows.
    pub fn is_far(&self) -> bool {
        match self {
            Rows::Shards(shards, _) => shards.are_far(),
            Rows::Chosen(of, _) => of.is_far(),
            Rows::Several(several) => several.parts().iter().any(|part| part.is_far()),
            _ => self.unit_bytes().is_some(),
        }
    }

    /// Whether reads convert rows to a type that was requested for all of them.
    pub fn converts(&self) -> bool {
        match self {
            Rows::Shards(_, asked) => asked.is_some(),
            Rows::Chosen(of, _) => of.converts(),
            Rows::Several(several) => several.converts(),
            _ => false,
        }
    }

    /// Finite values that became infinite since the last call, in reads that do not count them themselves.
    pub fn take_overflows(&self) -> u64 {
        match self {
            Rows::Chosen(of, _) => of.take_overflows(),
            Rows::Several(several) => several.take_overflows(),
            _ => 0,
        }
    }

    /// The examples that should be read together.
    pub fn units(&self) -> Result<Units> {
        Ok(match self {
            Rows::Shards(shards, _) if self.decodes() => {
                // A shard without samples is not a unit.
                let mut bounds = shards.bounds().to_vec();
                bounds.dedup();
                Units::Between(bounds)
            }
            // Also if the chunks are read in place: the order of a stream must not depend on how they are read.
            Rows::Chunked(files, layout) if files.are_coded() => {
                let bounds = layout.bounds();
                if bounds.len() as u64 > layout.examples() { Units::Examples } else { Units::Between(bounds) }
            }
            Rows::Chosen(of, chosen) => match of.units()? {
                Units::Examples => Units::Examples,
                Units::Between(bounds) => {
                    let bounds = chosen.bounds(&bounds);
                    if bounds.len() as u64 > chosen.len() { Units::Examples } else { Units::Between(bounds) }
                }
            },
            Rows::Several(several) => several.units()?,
            _ => Units::Examples,
        })
    }

    /// Numbers of tokens stored for these examples, each in its group.
    pub fn tokens_of(&self, groups: Ints<'_>, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>> {
        if let Rows::Chosen(of, chosen) = self {
            return of.tokens_of(groups, &chosen.of(examples)?, watch).map_err(named);
        }
        if let Rows::Several(several) = self {
            return several.tokens_of(groups, examples, watch);
        }
        with_layout!(self, &mut examples.iter().copied(), watch, layout => {
            layout.unchanged()?;
            let each = examples.iter().enumerate().map(|(i, &e)| {
                let group = usize::try_from(groups.get(i)).ok().filter(|g| *g < layout.groups());
                let group = group.ok_or_else(|| Error::new(Kind::Internal, "a group that is not there"))?;
                Ok(layout.count(group, check_example(e, layout.examples())?)? as i64)
            });
            each.collect()
        })
    }

    /// Tokens stored per example.
    pub fn token_counts(&self, watch: Watch<'_>) -> Result<Vec<i64>> {
        let all = |l: &dyn Layout| -> Result<Vec<i64>> {
            l.unchanged()?;
            (0..l.examples()).map(|e| Ok(l.count(0, e)? as i64)).collect()
        };
        Ok(match self {
            Rows::Strided(_, layout) => all(layout)?,
            Rows::Table(_, layout) => all(layout)?,
            Rows::Spans(_, layout) => all(layout)?,
            Rows::Joined(_, layout) => all(layout)?,
            Rows::Records(_, layout) => all(layout)?,
            Rows::Tensors(_, layout) => all(layout)?,
            Rows::Placed(_, layout) => all(layout)?,
            Rows::Chunked(_, layout) => all(layout)?,
            Rows::Shards(shards, _) => {
                let prepared = shards.prepare(None, watch)?;
                (0..prepared.examples()).map(|e| prepared.tokens_anywhere(e) as i64).collect()
            }
            Rows::Chosen(of, chosen) => of.tokens_anywhere(&chosen.all().collect::<Vec<_>>(), watch)?,
            Rows::Several(several) => several.token_counts(watch)?,
        })
    }

    /// Numbers of tokens stored for these examples; in the first group that has each, where groups differ.
    pub fn tokens_anywhere(&self, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>> {
        match self {
            Rows::Shards(shards, _) => {
                let prepared = shards.prepare(Some(&mut examples.iter().copied()), watch)?;
                let each =
                    examples.iter().map(|e| Ok(prepared.tokens_anywhere(check_example(*e, shards.examples())?) as i64));
                each.collect()
            }
            Rows::Chosen(of, chosen) => of.tokens_anywhere(&chosen.of(examples)?, watch),
            Rows::Several(several) => several.tokens_anywhere(examples, watch),
            of => of.tokens_of(Ints::One(0), examples, watch),
        }
    }

    /// A view of an example's rows and their number, if they are contiguous in one mapped file.
    pub fn view(&self, io: Io, group: usize, example: i64, watch: Watch<'_>) -> Result<Option<(View, u64)>> {
        if io == Io::Pread {
            return Ok(None);
        }
        let in_table = |files: &FileTable, at, rows| table_view(files, at, rows, Paging::Hinted);
        match self {
            Rows::Strided(files, layout) => one_view(layout, group, example, |at, rows| in_table(files, at, rows)),
            Rows::Table(files, layout) => one_view(layout, group, example, |at, rows| in_table(files, at, rows)),
            Rows::Placed(files, layout) => one_view(layout, group, example, |at, rows| in_table(files, at, rows)),
            Rows::Spans(files, layout) => one_view(layout, group, example, |at, rows| in_table(files, at, rows)),
            Rows::Joined(files, layout) => one_view(layout, group, example, |at, rows| in_table(files, at, rows)),
            Rows::Records(files, layout) => one_view(layout, group, example, |at, rows| in_table(files, at, rows)),
            Rows::Tensors(files, layout) => one_view(layout, group, example, |at, rows| in_table(files, at, rows)),
            Rows::Chunked(files, layout) => {
                one_view(layout, group, example, |at, rows| files.view(at.file, at.row, rows, Paging::Hinted))
            }
            Rows::Shards(_, Some(_)) => Ok(None),
            Rows::Shards(shards, None) => {
                let prepared = shards.prepare(Some(&mut once(example)), watch)?;
                prepared.check_types(once((group as i64, example)))?;
                one_view(&prepared, group, example, |at, rows| prepared.view(at, rows))
            }
            Rows::Chosen(of, chosen) => of.view(io, group, chosen.get(example)?, watch).map_err(named),
            Rows::Several(several) => {
                let (of, group, example) = several.find(group, example)?;
                if of.row().dtype == several.row().dtype { of.view(io, group, example, watch) } else { Ok(None) }
            }
        }
    }

    /// A view that contains the rows of all examples of a group, and their positions in it, if they are [spread evenly](spread) in
    /// one mapped file. Never for shards and records, which must be parsed first.
    pub fn view_all(&self, io: Io, group: usize) -> Result<Option<(View, Spread)>> {
        self.view_each(io, group, &mut (0..self.examples() as i64))
    }

    /// [`view_all`](Rows::view_all) of these examples.
    fn view_each(
        &self,
        io: Io,
        group: usize,
        examples: &mut dyn Iterator<Item = i64>,
    ) -> Result<Option<(View, Spread)>> {
        if io == Io::Pread {
            return Ok(None);
        }
        let (at, paging) = (|found: &Spread| Address { file: found.file, row: found.lowest }, Paging::Ahead);
        let table = |files: &FileTable, found: Option<Spread>| -> Result<Option<(View, Spread)>> {
            let Some(found) = found else { return Ok(None) };
            Ok(table_view(files, at(&found), found.rows, paging)?.map(|view| (view, found)))
        };
        match self {
            Rows::Strided(files, layout) => table(files, spread(layout, group, examples)?),
            Rows::Table(files, layout) => table(files, spread(layout, group, examples)?),
            Rows::Spans(files, layout) => table(files, spread(layout, group, examples)?),
            Rows::Joined(files, layout) => table(files, spread(layout, group, examples)?),
            Rows::Chunked(files, layout) => {
                let Some(found) = spread(layout, group, examples)? else { return Ok(None) };
                Ok(files.view(found.file, found.lowest, found.rows, paging)?.map(|view| (view, found)))
            }
            Rows::Shards(..) | Rows::Records(..) | Rows::Tensors(..) | Rows::Placed(..) | Rows::Several(_) => Ok(None),
            Rows::Chosen(of, chosen) => {
                let mut failed = None;
                let mut numbers = examples.map_while(|e| chosen.get(e).map_err(|error| failed = Some(error)).ok());
                let found = of.view_each(io, group, &mut numbers).map_err(named);
                failed.map_or(found, Err)
            }
        }
    }

    /// Whether neighbouring rows are best read in large blocks, from local files: neither decoded nor sent by a slow source.
    pub fn reads_blocks(&self) -> bool {
        match self {
            Rows::Strided(files, _)
            | Rows::Table(files, _)
            | Rows::Spans(files, _)
            | Rows::Joined(files, _)
            | Rows::Records(files, _)
            | Rows::Tensors(files, _)
            | Rows::Placed(files, _) => files.wishes().is_none(),
            Rows::Chunked(files, _) => !files.decodes() && files.wishes().is_none(),
            Rows::Shards(..) => false,
            Rows::Chosen(of, _) => of.reads_blocks(),
            Rows::Several(several) => several.parts().iter().all(|part| part.reads_blocks()),
        }
    }

    /// Whether several threads should gather neighbouring items, of rows of `groups` groups, ahead: a slow source sends them, or they are
    /// decoded in small units.
    pub fn is_gathered_ahead(&self, groups: u64) -> bool {
        match self {
            Rows::Strided(files, _)
            | Rows::Table(files, _)
            | Rows::Spans(files, _)
            | Rows::Joined(files, _)
            | Rows::Records(files, _)
            | Rows::Tensors(files, _)
            | Rows::Placed(files, _) => files.wishes().is_some(),
            Rows::Chunked(files, _) => {
                files.decodes_small_chunks(groups) || !files.decodes() && files.wishes().is_some()
            }
            Rows::Shards(..) => false,
            Rows::Chosen(of, _) => of.is_gathered_ahead(groups),
            Rows::Several(several) => {
                several.parts().iter().all(|part| part.reads_blocks() || part.is_gathered_ahead(groups))
                    && !self.reads_blocks()
            }
        }
    }

    /// Whether all of these rows are in the page cache and, if `mapped`, in mapped files; false if that cannot be known.
    pub fn are_cached(&self, groups: Ints<'_>, pick: Pick<'_>, items: usize, mapped: bool) -> bool {
        if let Rows::Chosen(of, chosen) = self {
            return chosen
                .translated(pick, items, |pick| Ok(of.are_cached(groups, pick, items, mapped)))
                .unwrap_or(false);
        }
        if let Rows::Several(several) = self {
            return several.are_cached(groups, pick, items, mapped);
        }
        with_origin!(self, groups, origin => are_cached(origin, pick, items, mapped), || false)
    }

    /// [`gather_in_blocks`] from these rows; only if they are read in blocks.
    pub fn gather_in_blocks(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        out: Out<'_>,
        how: (&mut BlockReader, &Stop),
    ) -> Result<()> {
        if let Rows::Chosen(of, chosen) = self {
            return chosen.translated(pick, items, |pick| of.gather_in_blocks(groups, pick, items, cast, out, how));
        }
        if let Rows::Several(several) = self {
            return several.gather_in_blocks(groups, pick, items, cast, out, how);
        }
        let none = || Err(Error::new(Kind::Internal, "pickle shards are not read in blocks"));
        with_origin!(self, groups, origin => gather_in_blocks(origin, pick, items, cast, out, how), none)
    }

    /// [`gather`] from these rows.
    pub fn gather(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        mut out: Out<'_>,
        watch: Watch<'_>,
    ) -> Result<()> {
        let only = 0..u64::MAX;
        match self {
            Rows::Strided(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Table(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Placed(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Spans(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Joined(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Records(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Tensors(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Chunked(files, layout) => {
                gather(&Origin { files, layout, groups, only }, pick, items, cast, out, watch)
            }
            Rows::Shards(shards, asked) => {
                let examples = &mut (0..items).map(|i| pick.example(i));
                let mut prepared = shards.prepare(Some(examples), &mut *watch)?;
                let mut classes = prepared.classes();
                let own = TYPES_OF_SHARDS.iter().position(|t| *t == shards.row().dtype).unwrap_or(0);
                if asked.is_none() && classes != [own] {
                    prepared.check_types((0..items).map(|i| (groups.get(i), pick.example(i))))?;
                    classes = vec![own];
                }
                let mut waves = prepared.waves();
                if waves.len() < 2 && classes.len() < 2 {
                    for wave in &waves {
                        prepared.hold(wave, &mut *watch)?;
                    }
                    let cast = cast.reading(prepared.select(classes.first().copied().unwrap_or(own)))?;
                    let source = Origin { files: &prepared, layout: &prepared, groups, only };
                    return gather(&source, pick, items, cast, out, watch);
                }
                for wave in waves.drain(..) {
                    prepared.hold(&wave, &mut *watch)?;
                    for class in &classes {
                        let cast = cast.reading(prepared.select(*class))?;
                        let only = prepared.only(&wave);
                        let source = Origin { files: &prepared, layout: &prepared, groups, only };
                        gather(&source, pick, items, cast, out.reborrow(), &mut *watch)?;
                    }
                }
                Ok(())
            }
            Rows::Chosen(of, chosen) => {
                chosen.translated(pick, items, |pick| of.gather(groups, pick, items, cast, out, watch))
            }
            Rows::Several(several) => several.gather(groups, pick, items, cast, out, watch),
        }
    }

    /// The same rows, with every read converted to `dtype`: for rows whose stored types may differ. `None` if all have the
    /// same type.
    pub fn read_as(&self, dtype: DType) -> Option<Rows> {
        match self {
            Rows::Shards(shards, _) if Cast::between(DType::F32, dtype).is_ok() => {
                Some(Rows::Shards(Arc::clone(shards), Some(dtype)))
            }
            Rows::Chosen(of, chosen) => Some(Rows::Chosen(Arc::new(of.read_as(dtype)?), chosen.clone())),
            Rows::Several(several) => several.read_as(dtype).map(Rows::Several),
            _ => None,
        }
    }

    /// The stored types of rows; parses all shards of a pickle dataset.
    pub fn stored_types(&self, watch: Watch<'_>) -> Result<Vec<DType>> {
        match self {
            Rows::Shards(shards, _) => {
                Ok(shards.prepare(None, watch)?.classes().iter().map(|class| TYPES_OF_SHARDS[*class]).collect())
            }
            Rows::Chosen(of, chosen) => match &**of {
                Rows::Shards(shards, _) => {
                    let prepared = shards.prepare(Some(&mut chosen.all()), watch)?;
                    Ok(prepared.classes().iter().map(|class| TYPES_OF_SHARDS[*class]).collect())
                }
                of => of.stored_types(watch),
            },
            Rows::Several(several) => several.stored_types(watch),
            _ => Ok(vec![self.row().dtype]),
        }
    }

    /// The stored type of each of these examples, in one group.
    pub fn types_of(&self, group: usize, examples: &[i64], watch: Watch<'_>) -> Result<Vec<DType>> {
        match self {
            Rows::Shards(shards, _) => {
                let prepared = shards.prepare(Some(&mut examples.iter().copied()), watch)?;
                examples.iter().map(|example| prepared.type_of(group, *example)).collect()
            }
            Rows::Chosen(of, chosen) => of.types_of(group, &chosen.of(examples)?, watch).map_err(named),
            Rows::Several(several) => several.types_of(group, examples, watch),
            _ => Ok(vec![self.row().dtype; examples.len()]),
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "a view is of a near file, which opens in a moment")]
fn table_view(files: &FileTable, at: Address, rows: u64, paging: Paging) -> Result<Option<View>> {
    View::of(&*files.get(at.file, Stop::never())?, at.row, rows, files.row().bytes, paging)
}

fn one_view(
    layout: &impl Layout,
    group: usize,
    example: i64,
    view: impl FnOnce(Address, u64) -> Result<Option<View>>,
) -> Result<Option<(View, u64)>> {
    let mut whole: Option<(Address, u64)> = None;
    let mut apart = false;
    layout.unchanged()?;
    layout.runs(group, example, &mut |run| match &mut whole {
        None => whole = Some((run.at, run.rows)),
        Some((at, rows)) if at.file == run.at.file && at.row + *rows == run.at.row => *rows += run.rows,
        Some(_) => apart = true,
    })?;
    match whole {
        Some((at, rows)) if !apart => Ok(view(at, rows)?.map(|v| (v, rows))),
        _ => Ok(None),
    }
}
