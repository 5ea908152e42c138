//! Which sequences share a batch: whole sequences of given lengths, packed into batches of at most `budget` tokens, or padded
//! to the longest of their batch.
//!
//! Sequences are divided into windows, and each window into *classes* of equal length. The lengths that share a batch are
//! decided once, for all epochs, from the lengths alone, so every epoch has equally many batches. Which sequence of a class goes
//! where, and the order of batches and windows, is decided by each epoch's permutations.
//!
//! - Packed: first-fit decreasing (Johnson, "Near-optimal bin packing algorithms", 1973). Computed over classes, not over
//!   sequences: the longest lengths that fit make a batch, and the batch is repeated while its classes have sequences left.
//!   O(n log n) for n sequences, for the sort; the batches of long classes cost nothing each.
//! - Padded: sequences in descending order of length, cut into batches whose number times the longest fits the budget.
//!
//! Memory: 4 bytes per sequence, 16 per distinct batch; an epoch's permutations add up to 8 per sequence, those of a window at
//! a time.

use std::collections::HashMap;
use std::ops::Range;

use super::order::{Permutation, key};
use super::plan::Shuffle;
use crate::error::{Error, Kind, Result};
use crate::threads::ForkSafe;

/// The settings of a packing.
#[derive(Clone, Copy, Debug)]
pub struct PackingSettings {
    /// Tokens per batch, at most; with padding, if `pack` is false.
    pub budget: u64,
    /// Packs sequences one after the other instead of padding them.
    pub pack: bool,
    /// [`Shuffle::Exact`]: one window of all sequences. [`Shuffle::Window`]: windows of units in a random order.
    /// [`Shuffle::Stored`]: windows of neighbours, batches by their first sequence.
    pub shuffle: Shuffle,
    /// With the epoch, decides every random order.
    pub seed: u64,
    /// Number of readers; all have equally many batches.
    pub ranks: u64,
    /// Leave out batches that not every rank gets; otherwise some batches are halved.
    pub drop_last: bool,
    /// Tokens per window.
    pub window: u64,
}

/// Sequences and their batches.
#[derive(Debug)]
pub struct PackedSequences {
    settings: PackingSettings,
    /// Sequences, window by window, each in descending order of length. A place in this list is a slot.
    slots: Vec<u32>,
    /// The first slot of each class, and the number of slots.
    classes: Vec<u32>,
    /// Distinct batches: the number of the first, and its first run. The last entry is the end.
    patterns: Vec<(u32, u32)>,
    runs: Vec<BatchRun>,
    /// Batches of all ranks before each window, and their number.
    windows: Vec<u32>,
    /// For stored order: batches by their first sequence.
    ordered: Vec<u32>,
    batches: u64,
    epoch: ForkSafe<Option<EpochOrders>>,
}

/// Consecutive slots of one batch. If a pattern is repeated, the next batch has the slots after them.
#[derive(Clone, Copy, Debug)]
struct BatchRun {
    slot: u32,
    take: u32,
}

/// Equal batches while they are planned.
#[derive(Debug)]
struct Repeated {
    window: usize,
    times: u32,
    runs: Vec<BatchRun>,
}

/// The permutations of an epoch that were needed so far.
#[derive(Debug)]
struct EpochOrders {
    number: u64,
    windows: Permutation,
    /// Batches before each window, in the epoch's order, and their number.
    before: Vec<u64>,
    /// The window whose permutations are kept: of its batches, and of its classes by number.
    window: u64,
    batches: Permutation,
    classes: HashMap<usize, Permutation>,
}

/// The purpose of a random order.
#[derive(Clone, Copy)]
enum Purpose {
    Units = 1,
    Windows = 2,
    Batches = 3,
    Class = 4,
    Batch = 5,
}

impl PackedSequences {
    /// Plans batches of sequences of these lengths, all positive. `units` are the bounds of sequences that should be
    /// read together; empty if sequences are read separately.
    ///
    /// Fails if a sequence is longer than the budget, or if the ranks cannot have equally many batches.
    pub fn new(settings: PackingSettings, lengths: &[u64], units: &[u64]) -> Result<PackedSequences> {
        let wrong = |detail: String| Error::new(Kind::Argument, detail);
        if u32::try_from(lengths.len()).is_err() || settings.ranks == 0 || settings.window == 0 {
            return Err(wrong(format!("{} sequences: expected fewer than 2^32", lengths.len())));
        }
        if lengths.iter().any(|n| *n == 0 || *n > settings.budget) {
            return Err(Error::new(Kind::Internal, "a sequence that no batch holds"));
        }
        let (mut slots, ends) = divided(&settings, lengths, units);
        let mut classes: Vec<u32> = vec![];
        let mut made = vec![];
        let mut from = 0;
        for (window, to) in ends.into_iter().enumerate() {
            let mine = slots.get_mut(from..to).unwrap_or_default();
            mine.sort_by_key(|s| (std::cmp::Reverse(lengths[*s as usize]), *s));
            let known = classes_of(mine, lengths, from as u32);
            classes.extend(known.iter().map(|c| c.first));
            let fill = if settings.pack { packed } else { padded };
            made.extend(fill(known, settings.budget).into_iter().map(|(times, runs)| Repeated { window, times, runs }));
            from = to;
        }
        classes.push(lengths.len() as u32);
        let batches = equal_shares(&settings, &mut made).ok_or_else(|| {
            let (n, ranks) = (lengths.len(), settings.ranks);
            wrong(format!(
                "{n} sequences cannot be split over {ranks} ranks with equally many batches of whole sequences; use \
                 drop_last=True to leave out the batches that not every rank gets"
            ))
        })?;
        let mut planned = PackedSequences {
            settings,
            slots,
            classes,
            patterns: vec![],
            runs: vec![],
            windows: vec![0],
            ordered: vec![],
            batches,
            epoch: ForkSafe::new(None),
        };
        planned.number(made);
        Ok(planned)
    }

    /// Numbers the batches of all windows.
    fn number(&mut self, made: Vec<Repeated>) {
        let mut batches = 0;
        for Repeated { window, times, runs } in made {
            while self.windows.len() <= window {
                self.windows.push(batches);
            }
            self.patterns.push((batches, self.runs.len() as u32));
            self.runs.extend(runs);
            batches += times;
        }
        self.patterns.push((batches, self.runs.len() as u32));
        self.windows.push(batches);
        if self.settings.shuffle == Shuffle::Stored {
            let first = |batch: &u32| self.slots_of(*batch).map(|slot| self.slots[slot as usize]).min();
            let mut ordered: Vec<u32> = (0..batches).collect();
            for window in self.windows.windows(2) {
                ordered[window[0] as usize..window[1] as usize].sort_by_cached_key(first);
            }
            self.ordered = ordered;
        }
    }

    /// Batches per rank, equal for all ranks and epochs.
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Batches of all ranks, with those that [`PackingSettings::drop_last`] leaves out.
    pub fn all_batches(&self) -> u64 {
        self.windows.last().map_or(0, |n| u64::from(*n))
    }

    /// The position of a rank's batch among those of all ranks. In stored and exact order the ranks take turns; with windows,
    /// each has its own windows.
    fn position(&self, rank: u64, batch: u64) -> Result<u64> {
        let PackingSettings { ranks, shuffle, .. } = self.settings;
        if rank >= ranks || batch >= self.batches {
            let detail = format!(
                "batch {batch} of rank {rank}: expected a batch below {} and a rank below {ranks}",
                self.batches
            );
            return Err(Error::new(Kind::OutOfRange, detail));
        }
        Ok(if shuffle == Shuffle::Window { rank * self.batches + batch } else { batch * ranks + rank })
    }

    /// The sequences of a rank's batch, in their order in the batch.
    pub fn batch(&self, epoch: u64, rank: u64, batch: u64) -> Result<Vec<u64>> {
        let position = self.position(rank, batch)?;
        if self.settings.shuffle == Shuffle::Stored {
            let slots = self.slots_of(self.ordered[position as usize]);
            let mut found: Vec<u64> = slots.map(|slot| u64::from(self.slots[slot as usize])).collect();
            found.sort_unstable();
            return Ok(found);
        }
        let mut orders = self.take_orders(epoch);
        let (window, within) = orders.place(position);
        if orders.window != window {
            orders.batches = self.shuffled(self.batches_of(window), &[epoch, Purpose::Batches as u64, window]);
            orders.classes.clear();
            orders.window = window;
        }
        let number = u64::from(self.windows[window as usize]) + orders.batches.get(within);
        let sequence = |slot: u32| {
            let class = self.classes.partition_point(|first| *first <= slot) - 1;
            let (first, end) = (self.classes[class], self.classes[class + 1]);
            let order = orders.classes.entry(class).or_insert_with(|| {
                self.shuffled(u64::from(end - first), &[epoch, Purpose::Class as u64, class as u64])
            });
            u64::from(self.slots[first as usize + order.get(u64::from(slot - first)) as usize])
        };
        let found: Vec<u64> = self.slots_of(number as u32).map(sequence).collect();
        self.put_back(orders);
        let order = self.shuffled(found.len() as u64, &[epoch, Purpose::Batch as u64, number]);
        Ok((0..found.len() as u64).map(|i| found[order.get(i) as usize]).collect())
    }

    /// The end of the batches of a rank, from this one on, that share its window.
    pub fn end_of_window(&self, epoch: u64, rank: u64, batch: u64) -> Result<u64> {
        let position = self.position(rank, batch)?;
        let end = match self.settings.shuffle {
            Shuffle::Exact => self.all_batches(),
            Shuffle::Stored => u64::from(self.windows[self.windows.partition_point(|n| u64::from(*n) <= position)]),
            Shuffle::Window => {
                let orders = self.take_orders(epoch);
                let end = orders.before[orders.before.partition_point(|n| *n <= position)];
                self.put_back(orders);
                end
            }
        };
        let end = match self.settings.shuffle {
            Shuffle::Window => end - rank * self.batches,
            Shuffle::Stored | Shuffle::Exact => (end - rank).div_ceil(self.settings.ranks),
        };
        Ok(end.min(self.batches))
    }

    /// The permutations of an epoch: the kept ones, or new ones. The lock is only tried, and only to take them: a child
    /// that was forked while it was locked computes them again.
    fn take_orders(&self, epoch: u64) -> EpochOrders {
        let held = self.epoch.try_lock().and_then(|mut held| held.take());
        held.filter(|orders| orders.number == epoch).unwrap_or_else(|| self.orders(epoch))
    }

    fn put_back(&self, orders: EpochOrders) {
        if let Some(mut held) = self.epoch.try_lock() {
            *held = Some(orders);
        }
    }

    fn shuffled(&self, n: u64, of: &[u64]) -> Permutation {
        Permutation::shuffled(n, key(&[&[self.settings.seed], of].concat()))
    }

    fn batches_of(&self, window: u64) -> u64 {
        u64::from(self.windows[window as usize + 1] - self.windows[window as usize])
    }

    fn orders(&self, epoch: u64) -> EpochOrders {
        let windows = self.shuffled(self.windows.len() as u64 - 1, &[epoch, Purpose::Windows as u64]);
        let mut before = vec![0];
        let mut sum = 0;
        for place in 0..windows.len() {
            sum += self.batches_of(windows.get(place));
            before.push(sum);
        }
        let none = Permutation::stored(0);
        EpochOrders { number: epoch, windows, before, window: u64::MAX, batches: none, classes: HashMap::new() }
    }

    /// The slots of a batch.
    fn slots_of(&self, batch: u32) -> impl Iterator<Item = u32> + '_ {
        let pattern = self.patterns.partition_point(|(first, _)| *first <= batch) - 1;
        let ((first, from), (_, to)) = (self.patterns[pattern], self.patterns[pattern + 1]);
        let nth = batch - first;
        self.runs[from as usize..to as usize].iter().flat_map(move |run| {
            let start = run.slot + nth * run.take;
            start..start + run.take
        })
    }
}

impl EpochOrders {
    /// The window of a position, and the position in it.
    fn place(&self, position: u64) -> (u64, u64) {
        let place = self.before.partition_point(|n| *n <= position) - 1;
        (self.windows.get(place as u64), position - self.before[place])
    }
}

/// Divides sequences into windows: the sequences, window by window, and the ends of windows.
fn divided(settings: &PackingSettings, lengths: &[u64], units: &[u64]) -> (Vec<u32>, Vec<usize>) {
    let n = lengths.len();
    if settings.shuffle == Shuffle::Exact || n == 0 {
        return ((0..n as u32).collect(), vec![n]);
    }
    let count = if units.is_empty() { n as u64 } else { units.len() as u64 - 1 };
    let unit =
        |u: u64| -> Range<u64> { if units.is_empty() { u..u + 1 } else { units[u as usize]..units[u as usize + 1] } };
    let order = match settings.shuffle {
        Shuffle::Window => Permutation::shuffled(count, key(&[settings.seed, 0, Purpose::Units as u64])),
        _ => Permutation::stored(count),
    };
    let (mut slots, mut ends, mut tokens) = (Vec::with_capacity(n), vec![], 0);
    for place in 0..count {
        let range = unit(order.get(place));
        let more: u64 = range.clone().map(|s| lengths[s as usize]).sum();
        if tokens > 0 && tokens + more > settings.window {
            ends.push(slots.len());
            tokens = 0;
        }
        slots.extend(range.map(|s| s as u32));
        tokens += more;
    }
    ends.push(n);
    (slots, ends)
}

/// Sequences of equal length in a window.
#[derive(Clone, Copy, Debug)]
struct SequenceClass {
    length: u64,
    first: u32,
    left: u32,
}

/// The classes of a sorted window whose first slot is `first`.
fn classes_of(sorted: &[u32], lengths: &[u64], first: u32) -> Vec<SequenceClass> {
    let mut made: Vec<SequenceClass> = vec![];
    for (slot, sequence) in (first..).zip(sorted) {
        let length = lengths[*sequence as usize];
        match made.last_mut() {
            Some(class) if class.length == length => class.left += 1,
            _ => made.push(SequenceClass { length, first: slot, left: 1 }),
        }
    }
    made
}

/// First-fit decreasing: repeated batches, each of the longest lengths that fit.
fn packed(mut classes: Vec<SequenceClass>, budget: u64) -> Vec<(u32, Vec<BatchRun>)> {
    // For each class, itself or a later class that may have sequences left; shortened as it is followed.
    let mut next: Vec<usize> = (0..=classes.len()).collect();
    let mut left_from = |classes: &[SequenceClass], from: usize| {
        let mut at = from;
        while at < classes.len() && (next[at] != at || classes[at].left == 0) {
            if next[at] == at {
                next[at] = at + 1;
            }
            next[at] = next[next[at]];
            at = next[at];
        }
        at
    };
    let mut made = vec![];
    loop {
        let (mut room, mut runs, mut times) = (budget, vec![], u32::MAX);
        let mut at = left_from(&classes, 0);
        while let Some(class) = classes.get(at) {
            let take = u64::from(class.left).min(room / class.length) as u32;
            runs.push((at, take));
            times = times.min(class.left / take);
            room -= u64::from(take) * class.length;
            let fits = at + 1 + classes[at + 1..].partition_point(|c| c.length > room);
            at = left_from(&classes, fits);
        }
        if runs.is_empty() {
            return made;
        }
        let taken = runs.iter().map(|(class, take)| {
            let class = &mut classes[*class];
            let run = BatchRun { slot: class.first, take: *take };
            class.first += times * take;
            class.left -= times * take;
            run
        });
        made.push((times, taken.collect()));
    }
}

/// Neighbours in order of length, each batch as long as its first.
fn padded(classes: Vec<SequenceClass>, budget: u64) -> Vec<(u32, Vec<BatchRun>)> {
    let mut made = vec![];
    let end = classes.last().map_or(0, |c| c.first + c.left);
    let mut slot = classes.first().map_or(0, |c| c.first);
    for class in classes {
        let after = class.first + class.left;
        if slot >= after {
            continue; // in the batch of longer ones
        }
        let rows = (budget / class.length).min(u64::from(end - class.first)) as u32;
        let full = (after - slot) / rows;
        if full > 0 {
            made.push((full, vec![BatchRun { slot, take: rows }]));
            slot += full * rows;
        }
        if slot < after {
            let take = rows.min(end - slot);
            made.push((1, vec![BatchRun { slot, take }]));
            slot += take;
        }
    }
    made
}

/// Batches per rank. Halves batches of several sequences, from the last on, until their number is a multiple of the ranks' or
/// [`PackingSettings::drop_last`] is set; `None` if all have one sequence.
fn equal_shares(settings: &PackingSettings, made: &mut Vec<Repeated>) -> Option<u64> {
    let count: u64 = made.iter().map(|m| u64::from(m.times)).sum();
    let ranks = settings.ranks;
    if settings.drop_last {
        return Some(count / ranks);
    }
    let batches = count.div_ceil(ranks);
    let mut missing = batches.checked_mul(ranks)? - count;
    let mut at = made.len();
    while missing > 0 {
        // A batch that was halved may be halved again.
        at = at.checked_sub(1)?;
        let size: u32 = made[at].runs.iter().map(|run| run.take).sum();
        if size < 2 {
            continue;
        }
        let one = made.get_mut(at)?;
        one.times -= 1;
        let nth = one.times;
        let runs: Vec<BatchRun> =
            one.runs.iter().map(|run| BatchRun { slot: run.slot + nth * run.take, take: run.take }).collect();
        let window = one.window;
        let (first, second) = halves(runs, size / 2);
        let halved = [first, second].map(|runs| Repeated { window, times: 1, runs });
        let from = if nth == 0 { at } else { at + 1 };
        made.splice(from..at + 1, halved);
        at = from + 2;
        missing -= 1;
    }
    Some(batches)
}

/// The first `n` slots of runs, and the rest.
fn halves(runs: Vec<BatchRun>, mut n: u32) -> (Vec<BatchRun>, Vec<BatchRun>) {
    let (mut first, mut second) = (vec![], vec![]);
    for BatchRun { slot, take } in runs {
        let mine = take.min(n);
        n -= mine;
        if mine > 0 {
            first.push(BatchRun { slot, take: mine });
        }
        if mine < take {
            second.push(BatchRun { slot: slot + mine, take: take - mine });
        }
    }
    (first, second)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn settings(budget: u64, pack: bool, shuffle: Shuffle, ranks: u64, window: u64) -> PackingSettings {
        PackingSettings { budget, pack, shuffle, seed: 7, ranks, drop_last: false, window }
    }

    /// First-fit decreasing, sequence by sequence: the number of batches.
    fn first_fit_decreasing(lengths: &[u64], budget: u64) -> usize {
        let mut sorted = lengths.to_vec();
        sorted.sort_unstable_by(|a, b| b.cmp(a));
        let mut rooms: Vec<u64> = vec![];
        for length in sorted {
            match rooms.iter_mut().find(|room| **room >= length) {
                Some(room) => *room -= length,
                None => rooms.push(budget - length),
            }
        }
        rooms.len()
    }

    fn shuffles() -> impl Strategy<Value = Shuffle> {
        prop_oneof![Just(Shuffle::Stored), Just(Shuffle::Window), Just(Shuffle::Exact)]
    }

    proptest! {
        #[test]
        fn classes_pack_as_single_sequences_do(lengths in prop::collection::vec(1u64..40, 0..300), budget in 40u64..100) {
            let plan = PackedSequences::new(settings(budget, true, Shuffle::Exact, 1, 1), &lengths, &[]).unwrap();
            prop_assert_eq!(plan.all_batches() as usize, first_fit_decreasing(&lengths, budget));
        }

        /// Every sequence is in exactly one batch of one rank in every epoch, no batch exceeds the budget, and all ranks have
        /// equally many batches.
        #[test]
        fn every_sequence_is_in_one_batch(
            lengths in prop::collection::vec(1u64..40, 0..200), budget in 40u64..100, pack in any::<bool>(), shuffle in shuffles(),
            ranks in 1u64..5, window in 1u64..2000, cuts in prop::collection::vec(1u64..20, 0..20), drop_last in any::<bool>(),
        ) {
            let n = lengths.len() as u64;
            let mut units: Vec<u64> = vec![0];
            units.extend(cuts.iter().scan(0, |sum, c| { *sum += c; Some(*sum) }).filter(|at| *at < n));
            units.push(n);
            let units = if cuts.is_empty() || n == 0 { vec![] } else { units };
            let settings = PackingSettings { drop_last, ..settings(budget, pack, shuffle, ranks, window) };
            let plan = match PackedSequences::new(settings, &lengths, &units) {
                Ok(plan) => plan,
                Err(error) => {
                    prop_assert!(!drop_last && n < ranks * n.div_ceil(ranks), "{}", error.detail);
                    return Ok(());
                }
            };
            for epoch in 0..2 {
                let mut seen = vec![0; lengths.len()];
                for rank in 0..ranks {
                    for batch in 0..plan.batches() {
                        let found = plan.batch(epoch, rank, batch).unwrap();
                        prop_assert!(!found.is_empty());
                        let each: Vec<u64> = found.iter().map(|s| lengths[*s as usize]).collect();
                        let tokens = if pack { each.iter().sum() } else { each.len() as u64 * each.iter().max().unwrap() };
                        prop_assert!(tokens <= budget);
                        found.iter().for_each(|s| seen[*s as usize] += 1);
                        let end = plan.end_of_window(epoch, rank, batch).unwrap();
                        prop_assert!(batch < end && end <= plan.batches());
                    }
                }
                prop_assert!(plan.batch(epoch, 0, plan.batches()).is_err());
                if drop_last {
                    prop_assert!(plan.all_batches() - plan.batches() * ranks < ranks);
                    prop_assert!(seen.iter().all(|n| *n <= 1));
                } else {
                    prop_assert!(seen.iter().all(|n| *n == 1), "{seen:?}");
                }
            }
        }
    }

    /// Fill of realistic lengths: the figures of docs/sequences.md.
    #[test]
    fn batches_are_full() {
        let mut state = 1u64;
        let mut uniform = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut lengths_of = |draw: &dyn Fn(f64, f64) -> f64| -> Vec<u64> {
            (0..20_000).map(|_| (draw(uniform(), uniform()) as u64).clamp(1, 2048)).collect()
        };
        let normal = |u: f64, v: f64| (-2.0 * (1.0 - u).ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        let web = lengths_of(&|u, v| (5.5 + normal(u, v)).exp());
        let even = lengths_of(&|u, _| 1.0 + 2048.0 * u);
        let short = lengths_of(&|u, _| 128.0 + 8.0 * u);
        for lengths in [web, even, short] {
            for budget in [2048, 16384] {
                let plan = PackedSequences::new(settings(budget, true, Shuffle::Exact, 1, 1), &lengths, &[]).unwrap();
                let fill = lengths.iter().sum::<u64>() as f64 / (plan.all_batches() * budget) as f64;
                assert!(fill >= if budget == 2048 { 0.96 } else { 0.99 }, "{fill}");
                let plan = PackedSequences::new(settings(budget, false, Shuffle::Exact, 1, 1), &lengths, &[]).unwrap();
                let padded: u64 = (0..plan.batches())
                    .map(|batch| {
                        let found = plan.batch(0, 0, batch).unwrap();
                        found.len() as u64 * found.iter().map(|s| lengths[*s as usize]).max().unwrap()
                    })
                    .sum();
                let used = lengths.iter().sum::<u64>() as f64 / padded as f64;
                assert!(used >= 0.98, "{used}");
            }
        }
    }
}
