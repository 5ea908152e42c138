//! Rows of several datasets, the parts, as one: example after example, or group after group.
//!
//! - [`Several::examples`]: the examples of the first part, then those of the second. Each part has its own numbers of groups.
//! - [`Several::groups`]: all parts have the same examples; each group is a group of one part.
//!
//! A request is split by part. A request for one part is translated and passed on, with the caller's output. Otherwise
//! each part gets its rows of the output, as one range if they are contiguous or as a place per row, so that parts
//! write straight into the caller's memory. Parts behind a network are read at the same time; others one after another,
//! each by all threads.
//!
//! Memory: 8 bytes per part and group, nothing per example.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::gather::blocks::BlockReader;
use crate::gather::{Ints, Out, Pick};
use crate::layout::check_example;
use crate::layout::row::Row;
use crate::rows::chosen::NOTE;
use crate::rows::units::Units;
use crate::threads::{self, Stop, Watch};

/// Parts that are read at the same time.
const AT_ONCE: usize = 16;

/// Rows that can be a part of [`Several`]. The methods are those of [`Rows`](crate::rows::Rows).
pub trait Part: Sized + Send + Sync {
    /// The properties of a row.
    fn row(&self) -> Row;
    /// Number of groups.
    fn groups(&self) -> usize;
    /// Number of examples.
    fn examples(&self) -> u64;
    /// Whether reads convert rows to a type that was requested for all of them.
    fn converts(&self) -> bool;
    /// Whether a slow source sends some of the rows.
    fn is_far(&self) -> bool;
    /// The same rows, with every read converted; `None` if all have the same type.
    fn read_as(&self, dtype: DType) -> Option<Self>;
    /// The examples that should be read together.
    fn units(&self) -> Result<Units>;
    /// A hint: the example that is needed next.
    fn read_ahead(&self, example: Option<i64>);
    /// Numbers of tokens stored for these examples, each in its group.
    fn tokens_of(&self, groups: Ints<'_>, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>>;
    /// Numbers of tokens stored for these examples, in the first group that has each.
    fn tokens_anywhere(&self, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>>;
    /// Tokens stored per example.
    fn token_counts(&self, watch: Watch<'_>) -> Result<Vec<i64>>;
    /// The stored types of rows.
    fn stored_types(&self, watch: Watch<'_>) -> Result<Vec<DType>>;
    /// The stored type of each of these examples.
    fn types_of(&self, group: usize, examples: &[i64], watch: Watch<'_>) -> Result<Vec<DType>>;
    /// Whether all of these rows are in the page cache.
    fn are_cached(&self, groups: Ints<'_>, pick: Pick<'_>, items: usize, mapped: bool) -> bool;
    /// Reads in blocks.
    fn gather_in_blocks(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        out: Out<'_>,
        how: (&mut BlockReader, &Stop),
    ) -> Result<()>;
    /// Reads.
    fn gather(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        out: Out<'_>,
        watch: Watch<'_>,
    ) -> Result<()>;
}

/// Rows of several datasets.
pub struct Several<R> {
    parts: Vec<Arc<R>>,
    along: Along,
    row: Row,
    groups: usize,
    /// For parts that are runs of one dataset: what is added to the number of an example of each part, as its errors name it.
    shifts: Vec<u64>,
    /// Finite values that became infinite in reads without their own counter.
    overflows: AtomicU64,
}

#[derive(Clone)]
enum Along {
    Examples {
        /// The first example of each part, and the number of all examples.
        starts: Vec<u64>,
        /// For each part, its number of each group.
        groups: Vec<Vec<usize>>,
    },
    /// The part of each group, and the group's number in it.
    Groups(Vec<(usize, usize)>),
}

/// A row's part, and its group and example there.
struct PartRow {
    part: usize,
    group: i64,
    example: i64,
}

/// The items of one part.
#[derive(Default)]
struct PartItems {
    groups: Vec<i64>,
    examples: Vec<i64>,
    tokens: Vec<i64>,
    /// Positions in the request.
    items: Vec<usize>,
}

impl PartItems {
    fn pick(&self, like: Pick<'_>) -> Pick<'_> {
        let examples = Ints::Each(&self.examples);
        match like {
            Pick::Tokens { .. } => Pick::Tokens { examples, tokens: Ints::Each(&self.tokens) },
            Pick::Last { .. } => Pick::Last { examples },
            Pick::Whole { .. } => Pick::Whole { examples },
        }
    }
}

fn examples_of<'a>(pick: Pick<'a>) -> Ints<'a> {
    let (Pick::Tokens { examples, .. } | Pick::Last { examples } | Pick::Whole { examples }) = pick;
    examples
}

fn wrong(detail: &str) -> Error {
    Error::new(Kind::Internal, detail)
}

/// The properties of all parts' rows, read as `dtype` if it is given.
fn row_of<R: Part>(parts: &[Arc<R>], dtype: Option<DType>) -> Result<Row> {
    let Some(first) = parts.first() else { return Err(wrong("a join of nothing")) };
    let Row { width, dtype: own, .. } = first.row();
    let dtype = dtype.unwrap_or(own);
    for part in parts {
        if part.row().width != width {
            return Err(wrong("joined rows of several widths"));
        }
        Cast::between(part.row().dtype, dtype)?;
    }
    Ok(Row { width, dtype, bytes: width * dtype.size().unwrap_or(0) })
}

/// The parts, which read every stored type as `dtype` if it is given.
fn reading<R: Part>(parts: Vec<Arc<R>>, dtype: Option<DType>) -> Vec<Arc<R>> {
    let Some(dtype) = dtype else { return parts };
    parts.into_iter().map(|part| part.read_as(dtype).map_or(part, Arc::new)).collect()
}

impl<R: Part> Several<R> {
    /// The parts' examples, one part after the other. `groups[p][g]` is part p's number of group g. Rows are read as `dtype`;
    /// `None`: as the first part's type, which all have.
    pub fn examples(parts: Vec<Arc<R>>, groups: Vec<Vec<usize>>, dtype: Option<DType>) -> Result<Several<R>> {
        let row = row_of(&parts, dtype)?;
        let count = groups.first().map_or(0, Vec::len);
        let fit =
            |(part, own): (&Arc<R>, &Vec<usize>)| own.len() == count && own.iter().all(|group| *group < part.groups());
        if groups.len() != parts.len() || !parts.iter().zip(&groups).all(fit) {
            return Err(wrong("groups that a part does not have"));
        }
        let mut starts = vec![0u64];
        for part in &parts {
            let end = starts.last().and_then(|start| start.checked_add(part.examples()));
            let end = end.filter(|end| i64::try_from(*end).is_ok());
            starts.push(end.ok_or_else(|| Error::new(Kind::Argument, "more than 2^63 examples"))?);
        }
        let along = Along::Examples { starts, groups };
        Ok(Several {
            parts: reading(parts, dtype),
            along,
            row,
            groups: count,
            shifts: vec![],
            overflows: AtomicU64::new(0),
        })
    }

    /// The same examples of all parts: each of `groups` is a part's number and a group's number in it.
    pub fn groups(parts: Vec<Arc<R>>, groups: Vec<(usize, usize)>, dtype: Option<DType>) -> Result<Several<R>> {
        let row = row_of(&parts, dtype)?;
        if groups.iter().any(|(part, group)| parts.get(*part).is_none_or(|rows| *group >= rows.groups())) {
            return Err(wrong("groups that a part does not have"));
        }
        if parts.iter().any(|part| part.examples() != parts[0].examples()) {
            return Err(wrong("parts with different numbers of examples"));
        }
        let count = groups.len();
        let (parts, along) = (reading(parts, dtype), Along::Groups(groups));
        Ok(Several { parts, along, row, groups: count, shifts: vec![], overflows: AtomicU64::new(0) })
    }

    /// The same rows, whose parts are runs of one dataset without examples that are left out: errors name examples by other numbers,
    /// which are too small by these.
    pub fn of_one_dataset(self, shifts: Vec<u64>) -> Several<R> {
        Several { shifts, ..self }
    }

    /// The parts.
    pub fn parts(&self) -> &[Arc<R>] {
        &self.parts
    }

    /// The properties of a row.
    pub fn row(&self) -> Row {
        self.row
    }

    /// Number of groups.
    pub fn group_count(&self) -> usize {
        self.groups
    }

    /// Number of examples.
    pub fn len(&self) -> u64 {
        match &self.along {
            Along::Examples { starts, .. } => starts.last().copied().unwrap_or(0),
            Along::Groups(_) => self.parts[0].examples(),
        }
    }

    /// Whether there are no examples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Finite values that became infinite since the last call, in reads without their own counter.
    pub fn take_overflows(&self) -> u64 {
        self.overflows.swap(0, Ordering::Relaxed)
    }

    /// Whether a read converts rows of some part.
    pub fn converts(&self) -> bool {
        self.parts.iter().any(|part| part.converts() || part.row().dtype != self.row.dtype)
    }

    fn place(&self, group: i64, example: i64) -> Result<PartRow> {
        let of = usize::try_from(group).ok().filter(|group| *group < self.groups);
        let of = of.ok_or_else(|| Error::new(Kind::Internal, format!("group {group} of {}", self.groups)))?;
        let example = check_example(example, self.len())?;
        Ok(match &self.along {
            Along::Examples { starts, groups } => {
                // The last part that begins here or before; parts without examples begin where the next one does.
                let part = starts[1..].partition_point(|end| *end <= example);
                PartRow { part, group: groups[part][of] as i64, example: (example - starts[part]) as i64 }
            }
            Along::Groups(groups) => {
                let (part, group) = groups[of];
                PartRow { part, group: group as i64, example: example as i64 }
            }
        })
    }

    /// Adds a note to an error of a read of a part that names an example: it uses the part's numbers.
    fn named(&self, mut error: Error, part: usize) -> Error {
        if let (Kind::OutOfRange | Kind::NotStored, Along::Examples { starts, .. }) = (error.kind, &self.along) {
            let note = match self.shifts.get(part) {
                None => format!(" (examples are numbered as in part {part}, whose first is {} here)", starts[part]),
                Some(shift) => {
                    error.detail = error.detail.replace(NOTE, "");
                    if *shift == 0 { String::new() } else { format!(" (add {shift} to the example's number)") }
                }
            };
            error.detail.push_str(&note);
        }
        error
    }

    /// The only part of these items; `None` if there are several. Items are checked up to the first of another part.
    fn only_part(&self, groups: Ints<'_>, examples: Ints<'_>, items: usize) -> Result<Option<usize>> {
        groups.check_len(items, "groups")?;
        examples.check_len(items, "examples")?;
        if items == 0 {
            return Ok(Some(0));
        }
        let first = self.place(groups.get(0), examples.get(0))?.part;
        let varies = match &self.along {
            Along::Examples { .. } => !matches!(examples, Ints::One(_)),
            Along::Groups(_) => !matches!(groups, Ints::One(_)),
        };
        let others = if varies { 1..items } else { 0..0 };
        for i in others {
            if self.place(groups.get(i), examples.get(i))?.part != first {
                return Ok(None);
            }
        }
        Ok(Some(first))
    }

    /// Calls `read` with items of one part in its own numbers.
    fn within<T>(
        &self,
        part: usize,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        read: impl FnOnce(&R, Ints<'_>, Pick<'_>) -> Result<T>,
    ) -> Result<T> {
        let (mut own_groups, mut own) = (vec![], vec![]);
        let examples = examples_of(pick);
        let groups = match groups {
            _ if items == 0 => Ints::Each(&own_groups),
            Ints::One(group) => Ints::One(self.place(group, examples.get(0))?.group),
            groups => {
                for i in 0..items {
                    own_groups.push(self.place(groups.get(i), examples.get(i))?.group);
                }
                Ints::Each(&own_groups)
            }
        };
        let examples = match (&self.along, examples) {
            (Along::Groups(_), examples) => examples,
            _ if items == 0 => Ints::Each(&own),
            (Along::Examples { starts, .. }, Ints::One(example)) => Ints::One(example - starts[part] as i64),
            (Along::Examples { starts, .. }, examples) => {
                own.extend((0..items).map(|i| examples.get(i) - starts[part] as i64));
                Ints::Each(&own)
            }
        };
        let pick = match pick {
            Pick::Tokens { tokens, .. } => Pick::Tokens { examples, tokens },
            Pick::Last { .. } => Pick::Last { examples },
            Pick::Whole { .. } => Pick::Whole { examples },
        };
        read(&self.parts[part], groups, pick).map_err(|error| self.named(error, part))
    }

    /// The items of each part.
    fn shares(&self, groups: Ints<'_>, pick: Pick<'_>, items: usize) -> Result<Vec<PartItems>> {
        let mut shares: Vec<PartItems> = self.parts.iter().map(|_| PartItems::default()).collect();
        let examples = examples_of(pick);
        if let Pick::Tokens { tokens, .. } = pick {
            tokens.check_len(items, "tokens")?;
        }
        for i in 0..items {
            let PartRow { part, group, example } = self.place(groups.get(i), examples.get(i))?;
            let share = &mut shares[part];
            share.groups.push(group);
            share.examples.push(example);
            share.items.push(i);
            if let Pick::Tokens { tokens, .. } = pick {
                share.tokens.push(tokens.get(i));
            }
        }
        Ok(shares)
    }

    /// `read` for each part that has some of these items; its results in the order of the items.
    fn each<T: Clone>(
        &self,
        groups: Ints<'_>,
        examples: &[i64],
        mut read: impl FnMut(&R, Ints<'_>, &[i64]) -> Result<Vec<T>>,
    ) -> Result<Vec<T>> {
        let pick = Pick::Whole { examples: Ints::Each(examples) };
        let items = examples.len();
        let mut made: Vec<Option<T>> = vec![None; items];
        for (part, share) in self.shares(groups, pick, items)?.into_iter().enumerate() {
            if share.items.is_empty() && items > 0 {
                continue;
            }
            let found = read(&self.parts[part], Ints::Each(&share.groups), &share.examples);
            let found = found.map_err(|error| self.named(error, part))?;
            for (i, value) in share.items.into_iter().zip(found) {
                made[i] = Some(value);
            }
        }
        made.into_iter().collect::<Option<Vec<T>>>().ok_or_else(|| wrong("a part that returned too few"))
    }

    /// Numbers of tokens of these examples, each in its group.
    pub fn tokens_of(&self, groups: Ints<'_>, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>> {
        groups.check_len(examples.len(), "groups")?;
        self.each(groups, examples, |rows, groups, examples| rows.tokens_of(groups, examples, &mut *watch))
    }

    /// Numbers of tokens of these examples, in the first group that has each.
    pub fn tokens_anywhere(&self, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>> {
        match &self.along {
            Along::Groups(_) => self.parts[0].tokens_anywhere(examples, watch),
            Along::Examples { .. } => {
                self.each(Ints::One(0), examples, |rows, _, examples| rows.tokens_anywhere(examples, &mut *watch))
            }
        }
    }

    /// Tokens stored per example.
    pub fn token_counts(&self, watch: Watch<'_>) -> Result<Vec<i64>> {
        if let Along::Groups(_) = self.along {
            return self.parts[0].token_counts(watch);
        }
        let mut all = vec![];
        for part in &self.parts {
            all.extend(part.token_counts(&mut *watch)?);
        }
        Ok(all)
    }

    /// The part of an example's rows in a group, and the group and the example there.
    pub fn find(&self, group: usize, example: i64) -> Result<(&Arc<R>, usize, i64)> {
        let PartRow { part, group, example } = self.place(group as i64, example)?;
        Ok((&self.parts[part], group as usize, example))
    }

    /// [`Part::read_ahead`] in the parts.
    pub fn read_ahead(&self, example: Option<i64>) {
        for (number, part) in self.parts.iter().enumerate() {
            let own = match &self.along {
                Along::Groups(_) => example,
                Along::Examples { .. } => {
                    let place = example.and_then(|example| self.place(0, example).ok());
                    place.filter(|place| place.part == number).map(|place| place.example)
                }
            };
            part.read_ahead(own);
        }
    }

    /// [`Part::units`]: a part whose examples are independent contributes each example as a unit.
    pub fn units(&self) -> Result<Units> {
        let each = self.parts.iter().map(|part| part.units()).collect::<Result<Vec<_>>>()?;
        if each.iter().all(|units| *units == Units::Examples) {
            return Ok(Units::Examples);
        }
        let mut bounds = vec![0];
        match &self.along {
            Along::Examples { starts, .. } => {
                for (units, pair) in each.into_iter().zip(starts.windows(2)) {
                    match units {
                        Units::Examples => bounds.extend(pair[0] + 1..=pair[1]),
                        Units::Between(own) => bounds.extend(own.iter().skip(1).map(|bound| pair[0] + bound)),
                    }
                }
                bounds.dedup();
            }
            Along::Groups(_) => {
                // The largest units: each part's smaller ones are decoded together with them.
                let cut = each.into_iter().filter_map(|units| match units {
                    Units::Between(own) => Some(own),
                    Units::Examples => None,
                });
                bounds = cut.min_by_key(Vec::len).unwrap_or(bounds);
            }
        }
        Ok(if bounds.len() as u64 > self.len() { Units::Examples } else { Units::Between(bounds) })
    }

    /// [`Part::are_cached`] for the rows of every part.
    pub fn are_cached(&self, groups: Ints<'_>, pick: Pick<'_>, items: usize, mapped: bool) -> bool {
        let find = || -> Result<bool> {
            if let Some(part) = self.only_part(groups, examples_of(pick), items)? {
                return self.within(part, groups, pick, items, |rows, groups, pick| {
                    Ok(rows.are_cached(groups, pick, items, mapped))
                });
            }
            let shares = self.shares(groups, pick, items)?;
            let held = shares.iter().zip(&self.parts).filter(|(share, _)| !share.items.is_empty());
            Ok(held.into_iter().all(|(share, rows)| {
                rows.are_cached(Ints::Each(&share.groups), share.pick(pick), share.items.len(), mapped)
            }))
        };
        find().unwrap_or(false)
    }

    /// [`Part::gather_in_blocks`] in the parts.
    pub fn gather_in_blocks(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        out: Out<'_>,
        (reader, stop): (&mut BlockReader, &Stop),
    ) -> Result<()> {
        let cast = self.counted(cast);
        if let Some(part) = self.only_part(groups, examples_of(pick), items)? {
            return self.within(part, groups, pick, items, |rows, groups, pick| {
                rows.gather_in_blocks(groups, pick, items, cast.reading(rows.row().dtype)?, out, (reader, stop))
            });
        }
        let shares = self.shares(groups, pick, items)?;
        let outs = self.deal(&shares, items, pick, cast, out, &mut || stop.is_set())?;
        for (part, (share, out)) in shares.iter().zip(outs).enumerate() {
            let (rows, n) = (&self.parts[part], share.items.len());
            let cast = cast.reading(rows.row().dtype)?;
            let groups = Ints::Each(&share.groups);
            let read = rows.gather_in_blocks(groups, share.pick(pick), n, cast, out, (&mut *reader, stop));
            read.map_err(|error| self.named(error, part))?;
        }
        Ok(())
    }

    /// [`Part::gather`] from the parts.
    pub fn gather(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        out: Out<'_>,
        watch: Watch<'_>,
    ) -> Result<()> {
        let cast = self.counted(cast);
        if let Some(part) = self.only_part(groups, examples_of(pick), items)? {
            return self.within(part, groups, pick, items, |rows, groups, pick| {
                rows.gather(groups, pick, items, cast.reading(rows.row().dtype)?, out, watch)
            });
        }
        let shares = self.shares(groups, pick, items)?;
        let outs = self.deal(&shares, items, pick, cast, out, &mut *watch)?;
        let read = |part: usize, share: &PartItems, out: Out<'_>, watch: Watch<'_>| {
            let rows = &self.parts[part];
            let cast = cast.reading(rows.row().dtype)?;
            let n = share.items.len();
            let made = rows.gather(Ints::Each(&share.groups), share.pick(pick), n, cast, out, watch);
            made.map_err(|error| self.named(error, part))
        };
        let held = shares.iter().zip(outs).enumerate().filter(|(_, (share, _))| !share.items.is_empty());
        let far = shares.iter().zip(&self.parts).any(|(share, rows)| !share.items.is_empty() && rows.is_far());
        if far {
            let work = |_, (part, (share, out)): (usize, (&PartItems, Out<'_>)), stop: &Stop| {
                read(part, share, out, &mut || stop.is_set())
            };
            return threads::for_each_waiting(held, AT_ONCE, &work, watch);
        }
        for (part, (share, out)) in held {
            read(part, share, out, &mut *watch)?;
        }
        Ok(())
    }

    fn counted<'a>(&'a self, cast: Cast<'a>) -> Cast<'a> {
        if cast.counts() { cast } else { cast.counting(&self.overflows) }
    }

    /// Each part's rows of the output.
    fn deal<'o>(
        &self,
        shares: &[PartItems],
        items: usize,
        pick: Pick<'_>,
        cast: Cast<'_>,
        out: Out<'o>,
        watch: Watch<'_>,
    ) -> Result<Vec<Out<'o>>> {
        let row = self.row.width * cast.to_size;
        let mut owners = vec![0; items];
        let mut rows = vec![];
        for (part, share) in shares.iter().enumerate() {
            share.items.iter().for_each(|i| owners[*i] = part);
        }
        if let Pick::Whole { .. } = pick {
            rows.resize(items, 0);
            for (part, share) in shares.iter().enumerate().filter(|(_, share)| !share.items.is_empty()) {
                let groups = Ints::Each(&share.groups);
                let found = self.parts[part].tokens_of(groups, &share.examples, &mut *watch);
                let found = found.map_err(|error| self.named(error, part))?;
                share.items.iter().zip(found).for_each(|(i, tokens)| rows[*i] = usize::try_from(tokens).unwrap_or(0));
            }
        }
        let owned = owners.into_iter().enumerate().map(|(i, part)| (part, rows.get(i).copied().unwrap_or(1)));
        let dealt = out.deal_out(owned, shares.len(), row);
        dealt.ok_or_else(|| Error::new(Kind::Argument, "the output does not have the size of the requested rows"))
    }

    /// The same rows with every read converted to `dtype`; `None` if no part stores another type than this one's.
    pub fn read_as(&self, dtype: DType) -> Option<Several<R>> {
        let fit = |part: &Arc<R>| Cast::between(part.row().dtype, dtype).is_ok();
        let mixed = self.converts() || self.parts.iter().any(|part| part.read_as(dtype).is_some());
        (mixed && self.parts.iter().all(fit)).then(|| Several {
            parts: reading(self.parts.clone(), Some(dtype)),
            along: self.along.clone(),
            row: Row { dtype, bytes: self.row.width * dtype.size().unwrap_or(0), ..self.row },
            groups: self.groups,
            shifts: self.shifts.clone(),
            overflows: AtomicU64::new(0),
        })
    }

    /// The stored types of all parts.
    pub fn stored_types(&self, watch: Watch<'_>) -> Result<Vec<DType>> {
        let mut all: Vec<DType> = vec![];
        for part in &self.parts {
            for dtype in part.stored_types(&mut *watch)? {
                if !all.contains(&dtype) {
                    all.push(dtype);
                }
            }
        }
        Ok(all)
    }

    /// The stored type of each of these examples, in one group.
    pub fn types_of(&self, group: usize, examples: &[i64], watch: Watch<'_>) -> Result<Vec<DType>> {
        self.each(Ints::One(group as i64), examples, |rows, groups, examples| {
            let group = if examples.is_empty() { 0 } else { groups.get(0) as usize };
            rows.types_of(group, examples, &mut *watch)
        })
    }
}
