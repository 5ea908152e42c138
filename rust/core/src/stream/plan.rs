//! Which rows make up which batch: all that a seed, an epoch, a rank and a batch size decide, by arithmetic. Any batch can be
//! asked for at once, which is why resuming needs no more than its number.
//!
//! An *item* is what a batch counts: a pick with all its groups, or with one of them. Items have three numbers:
//!
//! - stored: pick after pick, group after group;
//! - [`Shuffle::Exact`]: the stored items in a random order, all of them;
//! - [`Shuffle::Window`]: units (examples, usually) in a random order, their items as stored, cut into windows that fit the
//!   pool, and inside each window in a random order.
//!
//! Ranks share items such that every item is read by one, and all have as many batches. In stored and exact order they take
//! turns, batch after batch, so that what the first k batches of all ranks hold depends on nothing but how many rows that are.
//! Windows would have to be read by all then; so each rank has a part of the units for itself.

use std::ops::Range;

use super::order::{Order, key};
use super::select::Selection;
use crate::error::{Error, Kind, Result};
use crate::rows::Units;

/// How rows are shuffled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shuffle {
    /// Not at all.
    Stored,
    /// Within windows of what was read in a random order.
    Window,
    /// All of them, each order as likely.
    Exact,
}

/// What a user decides.
#[derive(Clone, Debug)]
pub struct Settings {
    /// How rows are shuffled.
    pub shuffle: Shuffle,
    /// Decides every random order, with the epoch.
    pub seed: u64,
    /// Items per batch.
    pub batch: u64,
    /// Which share of `ranks` is read.
    pub rank: u64,
    /// How many shares there are.
    pub ranks: u64,
    /// Leave out what does not fill a batch.
    pub drop_last: bool,
    /// The groups read.
    pub groups: Vec<usize>,
    /// An item is one group's row, not the rows of all groups.
    pub interleaved: bool,
    /// Items that a window may have.
    pub window: u64,
}

/// The rows of a stream, and the batches they make.
#[derive(Debug)]
pub struct Plan {
    /// What a user decided.
    pub settings: Settings,
    selection: Selection,
    units: Units,
    items: u64,
    batches: u64,
}

/// One row or, of several groups, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    /// The example.
    pub example: u64,
    /// The token.
    pub token: u64,
    /// Position among the groups read; 0 where an item has the rows of all.
    pub group: usize,
}

/// A plan for one epoch: its random orders, made.
#[derive(Debug)]
pub struct Epoch<'a> {
    plan: &'a Plan,
    number: u64,
    order: Order,
    /// Of windows: items before each unit in the order, where units differ.
    before: Vec<u64>,
    /// Of windows: this rank's.
    share: Range<u64>,
}

/// A window: items of the sequence of shuffled units, and the order in which they are given out.
#[derive(Debug)]
pub struct Window {
    /// Places in the sequence.
    pub places: Range<u64>,
    /// What is given out at a position is at this place after the first.
    pub order: Order,
    /// Position, in the rank's items, of the first that is given out.
    pub first: u64,
}

impl Plan {
    /// Fails where the ranks cannot have equal numbers of batches.
    pub fn new(settings: Settings, selection: Selection, units: Units) -> Result<Plan> {
        let wrong = |detail: String| Err(Error::new(Kind::Argument, detail));
        let Settings { batch, rank, ranks, drop_last, .. } = settings;
        if batch == 0 || settings.window == 0 || settings.groups.is_empty() {
            return wrong("batch_size, memory and layers must hold at least one row".to_owned());
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
                "{items} rows cannot be shared by {ranks} ranks such that each has {batches} batches of 1 to {batch} rows and \
                 no row is read twice; drop_last=True leaves out the rows that are too few"
            ));
        }
        Ok(Plan { settings, selection, units, items, batches })
    }

    /// Batches of this rank, and of any other.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Items of all ranks.
    pub fn items(&self) -> u64 {
        self.items
    }

    /// Rows per item.
    pub fn rows_per_item(&self) -> usize {
        if self.settings.interleaved { 1 } else { self.settings.groups.len() }
    }

    fn per_pick(&self) -> u64 {
        if self.settings.interleaved { self.settings.groups.len() as u64 } else { 1 }
    }

    /// Items of a batch, counted among this rank's: what is left when only as many remain as there are batches to fill.
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
        // The last rounds may be short: each rank an equal part, and at least one.
        let cut = |r: u64| from + (u128::from(to - from) * u128::from(r) / u128::from(ranks)) as u64;
        cut(rank)..cut(rank + 1)
    }

    fn item(&self, stored: u64) -> Item {
        let per_pick = self.per_pick();
        let (example, token) = self.selection.get(stored / per_pick);
        Item { example, token, group: (stored % per_pick) as usize }
    }

    /// Examples of a unit.
    fn unit(&self, unit: u64) -> Range<u64> {
        match &self.units {
            Units::Examples => unit..unit + 1,
            Units::Between(bounds) => bounds[unit as usize]..bounds[unit as usize + 1],
        }
    }

    /// The random orders of an epoch.
    pub fn epoch(&self, number: u64) -> Epoch<'_> {
        let Settings { shuffle, seed, rank, ranks, .. } = self.settings;
        let (mut before, mut share) = (vec![], 0..self.items);
        let order = match shuffle {
            Shuffle::Stored => Order::stored(self.items),
            Shuffle::Exact => Order::shuffled(self.items, key(&[seed, number])),
            Shuffle::Window => {
                let units = match &self.units {
                    Units::Examples => self.selection.examples(),
                    Units::Between(bounds) => bounds.len() as u64 - 1,
                };
                let order = Order::shuffled(units, key(&[seed, number, 1]));
                if self.selection.same_count().is_none() || self.units != Units::Examples {
                    before.reserve_exact(units as usize + 1);
                    let mut sum = 0;
                    before.push(0);
                    for i in 0..units {
                        let Range { start, end } = self.unit(order.get(i));
                        sum += (self.selection.before(end) - self.selection.before(start)) * self.per_pick();
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
    /// The items of a batch, in the orders that need no window.
    pub fn items(&self, batch: u64) -> impl Iterator<Item = Item> + '_ {
        self.plan.turn(batch).map(|position| self.plan.item(self.order.get(position)))
    }

    /// How many items a batch has.
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

    /// The batch that a position among the rank's items is in, and `None` if it is in none.
    pub fn batch_of(&self, position: u64) -> Option<u64> {
        let near = position / self.plan.settings.batch;
        // The last batches of a rank may begin a little earlier.
        (near..near + 2).find(|b| *b < self.plan.batches && self.own(*b).contains(&position))
    }

    /// Number of windows.
    pub fn windows(&self) -> u64 {
        (self.share.end - self.share.start).div_ceil(self.plan.settings.window)
    }

    /// Positions of a window among the rank's items; all windows are of one size, or differ by one.
    fn window_range(&self, number: u64) -> Range<u64> {
        let mine = self.share.end - self.share.start;
        let cut = |w: u64| (u128::from(mine) * u128::from(w) / u128::from(self.windows())) as u64;
        cut(number)..cut(number + 1)
    }

    /// Items of a window.
    pub fn window_len(&self, number: u64) -> u64 {
        let range = self.window_range(number);
        range.end - range.start
    }

    /// A window.
    pub fn window(&self, number: u64) -> Window {
        let Settings { seed, rank, ranks, .. } = self.plan.settings;
        let Range { start, end } = self.window_range(number);
        let order = Order::shuffled(end - start, key(&[seed, self.number, 2, ranks, rank, number]));
        Window { places: self.share.start + start..self.share.start + end, order, first: start }
    }

    /// The window that holds a position among the rank's items.
    pub fn window_of(&self, position: u64) -> u64 {
        let mine = self.share.end - self.share.start;
        let mut number = (u128::from(position) * u128::from(self.windows()) / u128::from(mine.max(1))) as u64;
        while position >= self.window_range(number).end {
            number += 1;
        }
        number
    }

    /// The items at some places of the sequence of shuffled units, in order.
    pub fn sequence(&self, places: Range<u64>, mut each: impl FnMut(u64, Item)) {
        let (plan, per_pick) = (self.plan, self.plan.per_pick());
        if let (true, Some(count)) = (self.before.is_empty(), plan.selection.same_count()) {
            let size = (count * per_pick).max(1);
            let mut place = places.start;
            while place < places.end {
                let example = self.order.get(place / size);
                let first = place / size * size;
                while place < places.end && place < first + size {
                    let inside = place - first;
                    let token = plan.selection.token(example, inside / per_pick);
                    each(place, Item { example, token, group: (inside % per_pick) as usize });
                    place += 1;
                }
            }
            return;
        }
        let mut place = places.start;
        let mut at = self.before.partition_point(|b| *b <= place).saturating_sub(1);
        while place < places.end {
            let (begin, end) = (self.before[at], self.before[at + 1].min(places.end));
            if place < end {
                let examples = plan.unit(self.order.get(at as u64));
                let first = plan.selection.before(examples.start) * per_pick;
                let mut item = plan.item(first + place - begin);
                let mut k = first / per_pick + (place - begin) / per_pick - plan.selection.before(item.example);
                let mut left = plan.selection.before(item.example + 1) - plan.selection.before(item.example);
                while place < end {
                    each(place, item);
                    place += 1;
                    item.group += 1;
                    if item.group as u64 == per_pick {
                        item.group = 0;
                        k += 1;
                        while k == left && item.example + 1 < examples.end {
                            item.example += 1;
                            k = 0;
                            left = plan.selection.before(item.example + 1) - plan.selection.before(item.example);
                        }
                        if k < left {
                            item.token = plan.selection.token(item.example, k);
                        }
                    }
                }
            }
            at += 1;
        }
    }
}
