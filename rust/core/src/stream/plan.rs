//! The items of each batch, computed from the seed, the epoch, the rank and the batch size. Any batch can be computed
//! directly, so a stream resumes from a batch number alone.
//!
//! An *item* is the unit that a batch counts: a pick with all its groups, or with one of them. Items are ordered in one of
//! three ways:
//!
//! - stored: pick after pick, group after group;
//! - [`Shuffle::Exact`]: a uniform random permutation of all items;
//! - [`Shuffle::Window`]: units in a random order, their items in stored order, cut into windows that fit the pool, and each
//!   window shuffled. A unit is read in one request: a part of an example, long enough for the full rate of any disk and
//!   short enough for a window to contain parts of nearly every example, or the rows that must be decoded together.
//!
//! Each item is read by one rank, and all ranks have equally many batches. In stored and exact order the ranks take turns,
//! batch after batch, so that the first k batches of all ranks depend only on the total number of rows. With windows, every
//! rank would then have to read all windows; so each rank has its own range of units.
//!
//! # The format of a stream's state
//!
//! A state contains the dataset, the settings and a batch number; everything else follows. Besides the settings, these numbers
//! decide the orders of [`Shuffle::Window`]. They are part of the state's format and never change: [`Settings::unit_bytes`]
//! (where units are cut; [`UNIT_BYTES`] unless a state or a source sets another size), [`ITEM_BYTES`] and [`items_in`] (the
//! number of items in a window), the rows decoded together ([`Units`]), and the keys and tables of [`Permutation`]. A state stores
//! the result of the second as `window`, and [`Plan::units_digest`] of the first as `units`.

use std::ops::Range;

use super::order::{Permutation, key};
use super::select::Selection;
use crate::error::{Error, Kind, Result};
use crate::rows::Units;

/// Bytes that a window reads in one request, at least, if examples are that long. Any disk reaches its full rate at this size
/// (docs/streams.md), and shorter units give a window more examples. Used if a state names no other size.
///
/// Decides the orders of [`Shuffle::Window`], which are part of the contract: never change it.
pub const UNIT_BYTES: u64 = 64 << 10;

/// Bytes counted per item of a window in addition to its rows.
///
/// Decides the orders of [`Shuffle::Window`], which are part of the contract: never change it, whatever a pool really uses.
pub const ITEM_BYTES: u64 = 28;

/// Items of `item_bytes` in a window of `memory` bytes.
pub fn items_in(memory: u64, item_bytes: u64) -> u64 {
    memory / item_bytes.saturating_add(ITEM_BYTES)
}

/// The minimum number of picks in a unit of `unit_bytes`, if a pick has rows of `row_bytes`; 0 if a row is larger than
/// a unit.
pub fn picks_per_unit(unit_bytes: u64, row_bytes: u64) -> u64 {
    unit_bytes / row_bytes.max(1)
}

/// The shuffling of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    /// None: stored order.
    Stored,
    /// Within windows of units read in a random order.
    Window,
    /// A uniform random permutation of all rows.
    Exact,
}

/// The user's settings.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The shuffling of rows.
    pub shuffle: Shuffle,
    /// With the epoch, decides every random order.
    pub seed: u64,
    /// Items per batch.
    pub batch: u64,
    /// This reader's rank, below `ranks`.
    pub rank: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// Leave out an incomplete last batch.
    pub drop_last: bool,
    /// The groups read.
    pub groups: Vec<usize>,
    /// Whether an item is a row of one group instead of the rows of all groups.
    pub interleaved: bool,
    /// Items per window, at most.
    pub window: u64,
    /// Bytes per unit, at least, if examples are long enough to be cut.
    pub unit_bytes: u64,
    /// Bytes of a stored row.
    pub row_bytes: u64,
}

/// The rows of a stream and their batches.
#[derive(Debug)]
pub struct Plan {
    /// The user's settings.
    pub settings: Settings,
    selection: Selection,
    units: Cuts,
    items: u64,
    batches: u64,
}

/// The boundaries of units, in picks.
#[derive(Debug)]
enum Cuts {
    /// `count` units of `size` picks each.
    Equal { count: u64, size: u64 },
    /// Boundaries; the first is 0, the last the number of picks.
    Between(Vec<u64>),
}

impl Cuts {
    fn new(selection: &Selection, units: &Units, least: u64) -> Cuts {
        // As many units as possible of at least `least` picks.
        let cut = |picks: u64| (picks / least.max(1)).max(1);
        if let (Units::Examples, Some(same)) = (units, selection.same_count()) {
            let most = cut(same);
            // Equal units need no list; slightly fewer of them are as good.
            let equal = (most.div_ceil(2)..=most).rev().find(|n| same.is_multiple_of(*n));
            if let Some(n) = equal {
                return Cuts::Equal { count: if same > 0 { selection.examples() * n } else { 0 }, size: same / n };
            }
        }
        let mut bounds = vec![0];
        let mut push = |bound: u64| {
            if bounds.last() != Some(&bound) {
                bounds.push(bound);
            }
        };
        match units {
            Units::Between(between) => between.iter().for_each(|example| push(selection.before(*example))),
            Units::Examples => {
                for example in 0..selection.examples() {
                    let (from, to) = (selection.before(example), selection.before(example + 1));
                    let n = cut(to - from);
                    (1..=n).for_each(|k| push(from + (to - from) * k / n));
                }
            }
        }
        Cuts::Between(bounds)
    }

    fn len(&self) -> u64 {
        match self {
            Cuts::Equal { count, .. } => *count,
            Cuts::Between(bounds) => bounds.len() as u64 - 1,
        }
    }

    fn picks(&self, unit: u64) -> Range<u64> {
        match self {
            Cuts::Equal { size, .. } => unit * size..(unit + 1) * size,
            Cuts::Between(bounds) => bounds[unit as usize]..bounds[unit as usize + 1],
        }
    }
}

/// One row, or one row of each group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The example.
    pub example: u64,
    /// The token.
    pub token: u64,
    /// Position among the groups read; 0 if an item has the rows of all.
    pub group: usize,
}

impl Item {
    /// Its example, token and position among the groups read.
    #[inline]
    pub fn ids(self) -> (i64, i64, i64) {
        (self.example as i64, self.token as i64, self.group as i64)
    }
}

/// A plan for one epoch, with its random orders.
#[derive(Debug)]
pub struct Epoch<'a> {
    plan: &'a Plan,
    number: u64,
    order: Permutation,
    /// For windows of unequal units: items before each unit, in shuffled order.
    before: Vec<u64>,
    /// For windows: this rank's range of items.
    share: Range<u64>,
}

/// The items of a window, by place, without a list of them: units are equal, each a part of one example.
#[derive(Debug)]
pub struct EqualUnits {
    /// Items of a unit, and those of the first one before the window.
    each: u64,
    skipped: u64,
    /// Each unit's example and first pick in it.
    units: Vec<(u64, u64)>,
}

impl EqualUnits {
    /// The item at a place, relative to the window's first. The plan is the window's.
    #[inline]
    pub fn get(&self, plan: &Plan, place: u64) -> Item {
        let at = place + self.skipped;
        let (example, first) = self.units[(at / self.each) as usize];
        let (pick, group) = plan.pick_of(at % self.each);
        Item { example, token: plan.selection.token(example, first + pick), group }
    }
}

/// A window: a range of the sequence of shuffled units, and the order in which its items are returned.
#[derive(Debug)]
pub struct Window {
    /// Places in the sequence.
    pub places: Range<u64>,
    /// Maps a position in the output to a place, relative to the first.
    pub order: Permutation,
    /// Position of its first output among the rank's items.
    pub first: u64,
}

impl Plan {
    /// Fails if the ranks cannot have equal numbers of batches.
    pub fn new(settings: Settings, selection: Selection, units: &Units) -> Result<Plan> {
        let wrong = |detail: String| Err(Error::new(Kind::Argument, detail));
        let Settings { batch, rank, ranks, drop_last, .. } = settings;
        if batch == 0 || settings.window == 0 || settings.groups.is_empty() {
            return wrong("batch_size, memory and layers: expected space for at least one row in each".to_owned());
        }
        if rank >= ranks || ranks > 1 << 32 || batch >= 1 << 32 {
            return wrong(format!("rank {rank} of {ranks}: expected 0 to world_size - 1"));
        }
        let per_pick = if settings.interleaved { settings.groups.len() as u64 } else { 1 };
        let Some(items) = selection.len().checked_mul(per_pick).filter(|n| *n < 1 << 62) else {
            return wrong("more than 2^62 rows".to_owned());
        };
        let round = ranks * batch;
        let batches = if drop_last { items / round } else { items.div_ceil(round) };
        if batches * ranks > items {
            return wrong(format!(
                "{items} rows cannot be split over {ranks} ranks with {batches} batches of 1 to {batch} rows each and no row \
                 read twice; use drop_last=True to leave out the incomplete batches"
            ));
        }
        let units = match settings.shuffle {
            Shuffle::Window => Cuts::new(&selection, units, picks_per_unit(settings.unit_bytes, settings.row_bytes)),
            Shuffle::Stored | Shuffle::Exact => Cuts::Equal { count: 0, size: 0 },
        };
        Ok(Plan { settings, selection, units, items, batches })
    }

    /// Batches per rank, equal for all ranks.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Items of all ranks.
    pub fn items(&self) -> u64 {
        self.items
    }

    /// The groups of an item's rows.
    pub fn groups_of(&self, item: Item) -> &[usize] {
        let Settings { groups, interleaved, .. } = &self.settings;
        if *interleaved { &groups[item.group..=item.group] } else { groups }
    }

    /// A digest of the units: equal digests mean equal window orders.
    pub fn units_digest(&self) -> u64 {
        match &self.units {
            Cuts::Equal { count, size } => key(&[0, *count, *size]),
            Cuts::Between(bounds) => key(bounds),
        }
    }

    /// The examples and tokens of picks.
    pub fn locate(&self, picks: &[i64]) -> Result<(Vec<i64>, Vec<i64>)> {
        let n = self.selection.len();
        let each = picks.iter().map(|&pick| match u64::try_from(pick) {
            Ok(pick) if pick < n => {
                let (example, token) = self.selection.get(pick);
                Ok((example as i64, token as i64))
            }
            _ => Err(Error::new(Kind::OutOfRange, format!("row {pick} is out of range: {n} are selected"))),
        });
        each.collect::<Result<Vec<_>>>().map(|all| all.into_iter().unzip())
    }

    /// Picks before each example, and their number.
    pub fn before(&self) -> Vec<i64> {
        (0..=self.selection.examples()).map(|example| self.selection.before(example) as i64).collect()
    }

    /// Rows per item.
    pub fn rows_per_item(&self) -> usize {
        if self.settings.interleaved { 1 } else { self.settings.groups.len() }
    }

    fn per_pick(&self) -> u64 {
        if self.settings.interleaved { self.settings.groups.len() as u64 } else { 1 }
    }

    /// Items of a batch, counted among this rank's. Batches shrink when fewer items remain than full batches need.
    fn own(&self, batch: u64, mine: u64) -> Range<u64> {
        let begin = |j: u64| {
            let full = j * self.settings.batch;
            if self.settings.drop_last { full } else { full.min(mine - (self.batches - j)) }
        };
        begin(batch)..if batch + 1 == self.batches && !self.settings.drop_last { mine } else { begin(batch + 1) }
    }

    /// Items of a batch, counted among those of all ranks, which take turns.
    fn turn(&self, batch: u64) -> Range<u64> {
        let Settings { rank, ranks, batch: size, drop_last, .. } = self.settings;
        let begin = |j: u64| {
            let full = j * size * ranks;
            if drop_last { full } else { full.min(self.items - (self.batches - j) * ranks) }
        };
        let (from, to) =
            (begin(batch), if batch + 1 == self.batches && !drop_last { self.items } else { begin(batch + 1) });
        // The last rounds may be short: an equal part for each rank, and at least one item.
        let cut = |r: u64| from + (u128::from(to - from) * u128::from(r) / u128::from(ranks)) as u64;
        cut(rank)..cut(rank + 1)
    }

    /// The item with a number in stored order.
    #[inline]
    pub fn item(&self, stored: u64) -> Item {
        let (pick, group) = self.pick_of(stored);
        let (example, token) = self.selection.get(pick);
        Item { example, token, group }
    }

    /// The pick of an item, and its group; items count from a pick's first.
    #[inline]
    fn pick_of(&self, item: u64) -> (u64, usize) {
        match self.per_pick() {
            1 => (item, 0),
            per_pick => (item / per_pick, (item % per_pick) as usize),
        }
    }

    /// The random orders of an epoch.
    pub fn epoch(&self, number: u64) -> Epoch<'_> {
        let Settings { shuffle, seed, rank, ranks, .. } = self.settings;
        let (mut before, mut share) = (vec![], 0..self.items);
        let order = match shuffle {
            Shuffle::Stored => Permutation::stored(self.items),
            Shuffle::Exact => Permutation::shuffled(self.items, key(&[seed, number])),
            Shuffle::Window => {
                let order = Permutation::shuffled(self.units.len(), key(&[seed, number, 1]));
                if let Cuts::Between(_) = self.units {
                    before.reserve_exact(self.units.len() as usize + 1);
                    let mut sum = 0;
                    before.push(0);
                    for i in 0..self.units.len() {
                        let Range { start, end } = self.units.picks(order.get(i));
                        sum += (end - start) * self.per_pick();
                        before.push(sum);
                    }
                }
                let cut = |r: u64| (u128::from(self.items) * u128::from(r) / u128::from(ranks)) as u64;
                share = cut(rank)..cut(rank + 1);
                order
            }
        };
        Epoch { plan: self, number, order, before, share }
    }
}

impl Epoch<'_> {
    /// The items of a batch, for stored and exact order.
    pub fn items(&self, batch: u64) -> impl Iterator<Item = Item> + '_ {
        self.turn(batch).map(|position| self.item_at(position))
    }

    /// Positions of a batch among the items of all ranks, for stored and exact order.
    pub fn turn(&self, batch: u64) -> Range<u64> {
        self.plan.turn(batch)
    }

    /// The item at a position among those of all ranks, for stored and exact order.
    #[inline]
    pub fn item_at(&self, position: u64) -> Item {
        self.plan.item(self.order.get(position))
    }

    /// Numbers in stored order of the items at consecutive positions, for stored and exact order; see [`Plan::item`].
    pub fn numbers_from(&self, first: u64, numbers: &mut [u64]) {
        self.order.fill(first, numbers);
    }

    /// The number of items in a batch.
    pub fn batch_len(&self, batch: u64) -> u64 {
        let range = match self.plan.settings.shuffle {
            Shuffle::Window => self.own(batch),
            Shuffle::Stored | Shuffle::Exact => self.plan.turn(batch),
        };
        range.end - range.start
    }

    /// Positions of a batch among the rank's items, for windows.
    pub fn own(&self, batch: u64) -> Range<u64> {
        self.plan.own(batch, self.share.end - self.share.start)
    }

    /// The batch that contains a position among the rank's items, or `None`.
    pub fn batch_of(&self, position: u64) -> Option<u64> {
        let near = position / self.plan.settings.batch;
        // The last batches of a rank may begin slightly earlier.
        (near..near + 2).find(|b| *b < self.plan.batches && self.own(*b).contains(&position))
    }

    /// Number of windows.
    pub fn windows(&self) -> u64 {
        (self.share.end - self.share.start).div_ceil(self.plan.settings.window)
    }

    /// Positions of a window among the rank's items; the sizes of windows differ by one at most.
    fn window_range(&self, number: u64) -> Range<u64> {
        let mine = self.share.end - self.share.start;
        let cut = |w: u64| (u128::from(mine) * u128::from(w) / u128::from(self.windows())) as u64;
        cut(number)..cut(number + 1)
    }

    /// The number of items in a window.
    pub fn window_len(&self, number: u64) -> u64 {
        let range = self.window_range(number);
        range.end - range.start
    }

    /// A window.
    pub fn window(&self, number: u64) -> Window {
        let Settings { seed, rank, ranks, .. } = self.plan.settings;
        let Range { start, end } = self.window_range(number);
        let order = Permutation::shuffled(end - start, key(&[seed, self.number, 2, ranks, rank, number]));
        Window { places: self.share.start + start..self.share.start + end, order, first: start }
    }

    /// The items of a window, if its units are equal.
    pub fn equal_units(&self, window: &Window) -> Option<EqualUnits> {
        let (plan, Range { start, end }) = (self.plan, window.places.clone());
        let Cuts::Equal { size, .. } = plan.units else { return None };
        let each = (size * plan.per_pick()).max(1);
        let mut numbers = vec![0; (end.div_ceil(each) - start / each) as usize];
        self.order.fill(start / each, &mut numbers);
        let units = numbers.into_iter().map(|unit| {
            let pick = plan.units.picks(unit).start;
            let (example, _) = plan.selection.get(pick);
            (example, pick - plan.selection.before(example))
        });
        Some(EqualUnits { each, skipped: start % each, units: units.collect() })
    }

    /// The window that contains a position among the rank's items.
    pub fn window_of(&self, position: u64) -> u64 {
        let mine = self.share.end - self.share.start;
        let mut number = (u128::from(position) * u128::from(self.windows()) / u128::from(mine.max(1))) as u64;
        while position >= self.window_range(number).end {
            number += 1;
        }
        number
    }

    /// Calls `each` with the items at these places of the sequence of shuffled units, in order.
    pub fn sequence(&self, places: Range<u64>, mut each: impl FnMut(u64, Item)) {
        let (plan, per_pick) = (self.plan, self.plan.per_pick());
        let mut at = match &plan.units {
            Cuts::Equal { size, .. } => places.start / (size * per_pick).max(1),
            Cuts::Between(_) => self.before.partition_point(|b| *b <= places.start) as u64 - 1,
        };
        let mut place = places.start;
        while place < places.end {
            let begin = match &plan.units {
                Cuts::Equal { size, .. } => at * size * per_pick,
                Cuts::Between(_) => self.before[at as usize],
            };
            let picks = plan.units.picks(self.order.get(at));
            let end = (begin + (picks.end - picks.start) * per_pick).min(places.end);
            let (mut pick, mut group) = (picks.start + (place - begin) / per_pick, (place - begin) % per_pick);
            let (mut example, mut token) = plan.selection.get(pick);
            let mut before = plan.selection.before(example);
            while place < end {
                each(place, Item { example, token, group: group as usize });
                place += 1;
                group += 1;
                if group == per_pick && place < end {
                    (group, pick) = (0, pick + 1);
                    while pick == plan.selection.before(example + 1) {
                        example += 1;
                        before = pick;
                    }
                    token = plan.selection.token(example, pick - before);
                }
            }
            at += 1;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings(shuffle: Shuffle, batch: u64, rank: u64, ranks: u64) -> Settings {
        Settings {
            shuffle,
            seed: 3,
            batch,
            rank,
            ranks,
            drop_last: false,
            groups: vec![0, 1],
            interleaved: true,
            window: 10,
            unit_bytes: 2,
            row_bytes: 1,
        }
    }

    type Key = (u64, u64, usize);

    fn of(item: Item) -> Key {
        (item.example, item.token, item.group)
    }

    /// Users' orders depend on these numbers.
    #[test]
    fn windows_are_as_large_as_ever() {
        assert_eq!((UNIT_BYTES, ITEM_BYTES), (65_536, 28));
        assert_eq!([items_in(1 << 30, 3072), items_in(1000, 72), items_in(99, 72)], [346_368, 10, 0]);
        assert_eq!([3072, 1 << 16, 1 << 17].map(|row| picks_per_unit(UNIT_BYTES, row)), [21, 1, 0]);
    }

    /// States count batches of these windows: where units are cut, where windows begin, and the first item of each.
    #[test]
    fn windows_begin_where_they_ever_did() {
        let row_bytes = 12_288;
        let starts = |selection: Selection, units: &Units, rank: u64| {
            let s = Settings {
                window: items_in(100_000, row_bytes),
                unit_bytes: UNIT_BYTES,
                row_bytes,
                ..settings(Shuffle::Window, 4, rank, 2)
            };
            let plan = Plan::new(s, selection, units).unwrap();
            let epoch = plan.epoch(5);
            let mut found = vec![];
            for number in 0..epoch.windows() {
                let window = epoch.window(number);
                let place = window.places.start + window.order.get(0);
                epoch.sequence(place..place + 1, |_, item| {
                    found.push((window.places.clone(), window.first, of(item)));
                });
            }
            (plan.units_digest(), found)
        };
        let same = || Selection::same(3, 1, 10).unwrap();
        let ragged = || Selection::counted(0, [7, 0, 12, 3, 9].into_iter()).unwrap();
        let found = [
            starts(same(), &Units::Examples, 0),
            starts(same(), &Units::Examples, 1),
            starts(ragged(), &Units::Examples, 1),
            starts(ragged(), &Units::Between(vec![0, 2, 4, 5]), 0),
        ];
        let (even, cut, whole) = (5_683_249_199_955_317_498, 14_764_984_583_724_970_104, 4_138_305_733_391_143_157);
        let expected = [
            (
                even,
                vec![(0..7, 0, (1, 2, 1)), (7..15, 7, (1, 5, 1)), (15..22, 15, (1, 10, 0)), (22..30, 22, (0, 4, 1))],
            ),
            (
                even,
                vec![(30..37, 0, (2, 7, 0)), (37..45, 7, (2, 2, 0)), (45..52, 15, (2, 5, 0)), (52..60, 22, (0, 7, 1))],
            ),
            (
                cut,
                vec![(31..38, 0, (2, 1, 1)), (38..46, 7, (3, 0, 1)), (46..54, 15, (0, 1, 0)), (54..62, 23, (0, 3, 1))],
            ),
            (
                whole,
                vec![(0..7, 0, (4, 1, 1)), (7..15, 7, (4, 4, 1)), (15..23, 15, (2, 0, 1)), (23..31, 23, (2, 5, 0))],
            ),
        ];
        assert_eq!(found, expected);
    }

    proptest! {
        /// Ranks, batches and windows together contain every item once, for any selection and any units, and windows and
        /// batches assign items to the same ranks.
        #[test]
        fn every_item_has_one_place(
            counts in prop::collection::vec(0u64..14, 1..12),
            flags in prop::collection::vec(any::<bool>(), 14 * 12),
            same in any::<bool>(),
            masked in any::<bool>(),
            bound in prop::option::of(1usize..5),
            (batch, ranks, window, unit_bytes) in (1u64..9, 1u64..5, 1u64..40, 1u64..9),
            (interleaved, drop_last) in (any::<bool>(), any::<bool>()),
            epoch in 0u64..3,
        ) {
            let examples = counts.len() as u64;
            let flags = &flags[..counts.iter().sum::<u64>() as usize];
            let make = || match (same, masked) {
                (true, _) => Selection::same(examples, 1, counts[0]).unwrap(),
                (_, true) => Selection::masked(1, counts.iter().copied(), flags).unwrap(),
                _ => Selection::counted(1, counts.iter().copied()).unwrap(),
            };
            let units = match bound {
                Some(step) => Units::Between((0..examples).step_by(step).chain([examples]).collect()),
                None => Units::Examples,
            };
            let selection = make();
            let groups = if interleaved { 0..2 } else { 0..1 };
            let every: Vec<Key> = (0..selection.len())
                .flat_map(|p| groups.clone().map(move |g| (p, g)))
                .map(|(p, g)| (selection.get(p).0, selection.get(p).1, g))
                .collect();
            for shuffle in [Shuffle::Stored, Shuffle::Exact, Shuffle::Window] {
                let mut seen: Vec<Key> = vec![];
                for rank in 0..ranks {
                    let s = Settings { interleaved, drop_last, window, unit_bytes, ..settings(shuffle, batch, rank, ranks) };
                    let Ok(plan) = Plan::new(s, make(), &units) else {
                        prop_assert!(!drop_last && (every.len() as u64) < every.len().div_ceil((batch * ranks) as usize) as u64 * ranks);
                        return Ok(());
                    };
                    let epoch = plan.epoch(epoch);
                    if shuffle != Shuffle::Window {
                        for b in 0..plan.batches() {
                            let items: Vec<Key> = epoch.items(b).map(of).collect();
                            let mut numbers = vec![0; items.len()];
                            epoch.numbers_from(epoch.turn(b).start, &mut numbers);
                            prop_assert!(numbers.iter().zip(&items).all(|(number, item)| of(plan.item(*number)) == *item));
                            prop_assert_eq!(items.len() as u64, epoch.batch_len(b));
                            prop_assert!((1..=batch).contains(&epoch.batch_len(b)));
                            seen.extend(items);
                        }
                        continue;
                    }
                    let mut mine: Vec<Key> = vec![];
                    for w in 0..epoch.windows() {
                        let it = epoch.window(w);
                        prop_assert_eq!(it.first, mine.len() as u64);
                        prop_assert!(it.order.len() <= window);
                        let mut stored = vec![];
                        epoch.sequence(it.places.clone(), |place, item| {
                            assert_eq!(place, it.places.start + stored.len() as u64);
                            stored.push(of(item));
                        });
                        // Any part of a sequence equals that part of the whole.
                        let half = it.places.start + (it.places.end - it.places.start) / 2;
                        let mut rest = vec![];
                        epoch.sequence(half..it.places.end, |_, item| rest.push(of(item)));
                        prop_assert_eq!(&stored[stored.len() - rest.len()..], &rest[..]);
                        prop_assert!(epoch.equal_units(&it).is_none() || (bound.is_none() && same));
                        if let Some(units) = epoch.equal_units(&it) {
                            let by_place = (0..it.order.len()).map(|place| of(units.get(&plan, place)));
                            prop_assert_eq!(by_place.collect::<Vec<_>>(), stored.clone());
                        }
                        for t in 0..it.order.len() {
                            prop_assert_eq!(epoch.window_of(it.first + t), w);
                            mine.push(stored[it.order.get(t) as usize]);
                        }
                    }
                    for b in 0..plan.batches() {
                        let own = epoch.own(b);
                        prop_assert!((1..=batch).contains(&(own.end - own.start)));
                        for position in own {
                            prop_assert_eq!(epoch.batch_of(position), Some(b));
                            seen.push(mine[position as usize]);
                        }
                    }
                }
                if shuffle == Shuffle::Stored && ranks == 1 && !drop_last {
                    prop_assert_eq!(&seen, &every);
                }
                let n = seen.len();
                seen.sort_unstable();
                seen.dedup();
                prop_assert_eq!(seen.len(), n);
                let full = batch * ranks;
                prop_assert_eq!(n as u64, if drop_last { every.len() as u64 / full * full } else { every.len() as u64 });
                prop_assert!(seen.iter().all(|k| every.binary_search(k).is_ok()));
            }
        }
    }
}
