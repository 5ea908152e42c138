//! The rows of a window, held while they are returned in another order.
//!
//! A pool has as many slots as a window has items. Each time items are returned, items of the next window are read into the
//! freed slots, in file order. When the last item of a window is returned, the next window is complete. So the pool needs
//! the memory of one window, and reading never pauses.

use std::ops::Range;

use super::plan::{Epoch, Item, Plan, Window};
use super::rescale::{Convert, Scratch};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::gather::{Ints, Out, Pick};
use crate::kernels::{self, Stores, prefetch, should_stream};
use crate::memory::buffer::Buffer;
use crate::rows::Rows;
use crate::threads::{self, Stop, Watch};

/// Bytes per read while a window is filled, at most: bounds the time that a stop waits.
const READ: usize = 64 << 20;
const NO_SLOT: u32 = u32::MAX;

/// The item in a slot.
#[derive(Clone, Copy, Default)]
struct SlotItem {
    example: u64,
    token: u32,
    group: u32,
}

/// A window, some of whose items are in slots.
struct PartialWindow {
    number: u64,
    window: Window,
    /// The slot of each place.
    slots: Vec<u32>,
    /// Places that were read, or skipped because they are not wanted.
    read: u64,
    /// Places for which the kernel got a read-ahead hint.
    hinted: u64,
}

/// The wanted batches: `first`, `first + every`, ...
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// The first.
    pub first: u64,
    /// The distance between two wanted batches.
    pub every: u64,
}

impl Wanted {
    fn has(self, batch: u64) -> bool {
        batch >= self.first && (batch - self.first).is_multiple_of(self.every)
    }
}

/// The pool.
pub struct WindowPool<'a> {
    rows: &'a Rows,
    plan: &'a Plan,
    epoch: &'a Epoch<'a>,
    wanted: Wanted,
    memory: Buffer,
    slot_bytes: usize,
    kept: Vec<SlotItem>,
    free: Vec<u32>,
    current: Option<PartialWindow>,
    next: Option<PartialWindow>,
}

/// The ids of the rows in a batch, item by item.
#[derive(Default, Debug)]
pub struct BatchItems {
    /// Examples.
    pub examples: Vec<i64>,
    /// Tokens.
    pub tokens: Vec<i64>,
    /// Positions among the groups read, if an item has a row of one group.
    pub groups: Vec<i64>,
}

impl<'a> WindowPool<'a> {
    /// An empty pool for the wanted batches.
    pub fn new(rows: &'a Rows, plan: &'a Plan, epoch: &'a Epoch<'a>, wanted: Wanted) -> Result<WindowPool<'a>> {
        let batch = plan.settings.batch;
        let largest = (0..epoch.windows().min(2)).map(|w| epoch.window_len(w)).max().unwrap_or(0) + 1;
        // Every `every`-th batch: those that begin in a window, and those that overlap it.
        let share = (largest / (batch * wanted.every) + 2).saturating_mul(batch);
        let slots = if wanted.every == 1 { largest } else { share.min(largest) };
        let slot_bytes = rows.row().bytes * plan.rows_per_item();
        let too_large = || Error::new(Kind::Argument, "memory: more than 2^32 rows in a window");
        let slots = u32::try_from(slots).map_err(|_| too_large())?;
        let memory = Buffer::new(slots as usize * slot_bytes)
            .map_err(|e| Error::new(Kind::NoMemory, format!("cannot allocate {} rows: {e}", slots)))?;
        let (kept, free) = (vec![SlotItem::default(); slots as usize], (0..slots).rev().collect());
        Ok(WindowPool { rows, plan, epoch, wanted, memory, slot_bytes, kept, free, current: None, next: None })
    }

    /// Writes a batch to `out`.
    pub fn give(
        &mut self,
        batch: u64,
        convert: &Convert,
        out: &mut [u8],
        known: &mut BatchItems,
        watch: Watch<'_>,
    ) -> Result<()> {
        let (own, interleaved) = (self.epoch.own(batch), self.plan.settings.interleaved);
        let to = convert.to() * (self.slot_bytes / convert.from());
        let (mut position, mut out) = (own.start, out);
        let mut given: Vec<u32> = Vec::with_capacity((own.end - own.start) as usize);
        while position < own.end {
            let number = self.epoch.window_of(position);
            self.advance(number, &mut *watch)?;
            let Some(held) = &self.current else { return Err(wrong("no window")) };
            let end = own.end.min(held.window.first + held.window.order.len());
            given.clear();
            for t in position..end {
                let slot = held.slots[held.window.order.get(t - held.window.first) as usize];
                let Some(kept) = self.kept.get(slot as usize) else { return Err(wrong("an item that was not read")) };
                known.examples.push(kept.example as i64);
                known.tokens.push(i64::from(kept.token));
                if interleaved {
                    known.groups.push(i64::from(kept.group));
                }
                given.push(slot);
            }
            let (mine, others) =
                out.split_at_mut_checked(given.len() * to).ok_or_else(|| wrong("a batch larger than its memory"))?;
            let groups = interleaved.then_some(&known.groups[known.groups.len().saturating_sub(given.len())..]);
            convert_rows(convert, &self.memory, self.slot_bytes, &given, groups, mine, &mut *watch)?;
            self.free.extend_from_slice(&given);
            out = others;
            position = end;
        }
        Ok(())
    }

    /// Reads as much of the next window as free slots allow.
    pub fn refill(&mut self, watch: Watch<'_>) -> Result<()> {
        if self.next.is_none()
            && let Some(current) = &self.current
            && current.number + 1 < self.epoch.windows()
        {
            self.next = Some(self.held(current.number + 1));
        }
        let Some(mut next) = self.next.take() else { return Ok(()) };
        let done = self.read(&mut next, false, watch);
        self.next = Some(next);
        done
    }

    /// Makes a window the current one and reads its missing items.
    fn advance(&mut self, number: u64, watch: Watch<'_>) -> Result<()> {
        if self.current.as_ref().is_some_and(|c| c.number == number) {
            return Ok(());
        }
        let mut held = match self.next.take() {
            Some(next) if next.number == number => next,
            other => {
                // A window is skipped if none of its batches is wanted.
                if let Some(PartialWindow { slots, .. }) = other {
                    self.free.extend(slots.iter().filter(|s| **s != NO_SLOT));
                }
                self.held(number)
            }
        };
        let done = self.read(&mut held, true, watch);
        self.current = Some(held);
        done
    }

    fn held(&self, number: u64) -> PartialWindow {
        let window = self.epoch.window(number);
        let slots = vec![NO_SLOT; window.order.len() as usize];
        PartialWindow { number, window, slots, read: 0, hinted: 0 }
    }

    /// Reads items of a window in stored order while slots are free; with `all`, fails unless every wanted item was read.
    fn read(&mut self, held: &mut PartialWindow, all: bool, watch: Watch<'_>) -> Result<()> {
        let n = held.window.order.len();
        let at_once = (READ / self.slot_bytes).max(1);
        while held.read < n && !self.free.is_empty() {
            let places = (n - held.read).min(self.free.len() as u64).min(at_once as u64);
            // The disk reads the next items while these are copied and while the pool is idle.
            let soon = (held.read + places + at_once as u64).min(n);
            let unknown = held.hinted.max(held.read)..soon;
            if unknown.end - unknown.start >= places.min(n - held.read) / 2 {
                self.hint(held, unknown.clone());
                held.hinted = soon;
            }
            let wanted = self.wanted(held, held.read..held.read + places);
            held.read += places;
            self.fetch(held, &wanted, &mut *watch)?;
        }
        if all && held.read < n {
            return Err(wrong("no slots for a window"));
        }
        Ok(())
    }

    /// The wanted items of a window, with their places in it.
    fn wanted(&self, held: &PartialWindow, places: Range<u64>) -> Vec<(u32, Item)> {
        let begun = held.window.first >= self.epoch.own(self.wanted.first).start;
        let every = self.wanted.every == 1 && begun;
        let first = held.window.places.start;
        let mut wanted: Vec<(u32, Item)> = Vec::with_capacity((places.end - places.start) as usize);
        self.epoch.sequence(first + places.start..first + places.end, |place, item| {
            let local = place - first;
            let batch = || self.epoch.batch_of(held.window.first + held.window.order.position(local));
            if every || batch().is_some_and(|batch| self.wanted.has(batch)) {
                wanted.push((local as u32, item));
            }
        });
        wanted
    }

    fn hint(&self, held: &PartialWindow, places: Range<u64>) {
        if self.rows.decodes() {
            return;
        }
        let (mut examples, mut tokens, mut groups) = (vec![], vec![], vec![]);
        for (_, item) in self.wanted(held, places) {
            for group in self.plan.groups_of(item) {
                examples.push(item.example as i64);
                tokens.push(item.token as i64);
                groups.push(*group as i64);
            }
        }
        let pick = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
        self.rows.hint(Ints::Each(&groups), pick, groups.len());
    }

    fn fetch(&mut self, held: &mut PartialWindow, wanted: &[(u32, Item)], watch: Watch<'_>) -> Result<()> {
        let mut slots = self.free.split_off(self.free.len() - wanted.len());
        slots.sort_unstable();
        let row = self.rows.row().bytes;
        let per_item = self.slot_bytes / row;
        let n = wanted.len() * per_item;
        let (mut examples, mut tokens, mut groups) =
            (Vec::with_capacity(n), Vec::with_capacity(n), Vec::with_capacity(n));
        let mut places: Vec<&mut [u8]> = Vec::with_capacity(n);
        let mut rest = self.memory.bytes_mut();
        let mut passed = 0;
        for (slot, (local, item)) in slots.iter().zip(wanted) {
            let (_, from) = rest.split_at_mut((*slot as usize - passed) * self.slot_bytes);
            let (mine, others) = from.split_at_mut(self.slot_bytes);
            (rest, passed) = (others, *slot as usize + 1);
            for (place, group) in mine.chunks_exact_mut(row).zip(self.plan.groups_of(*item)) {
                examples.push(item.example as i64);
                tokens.push(item.token as i64);
                groups.push(*group as i64);
                places.push(place);
            }
            held.slots[*local as usize] = *slot;
            let token = u32::try_from(item.token).map_err(|_| wrong("a token beyond 2^32"))?;
            self.kept[*slot as usize] = SlotItem { example: item.example, token, group: item.group as u32 };
        }
        let dtype = self.rows.row().dtype;
        let pick = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
        let cast = Cast::between(dtype, dtype)?;
        self.rows.gather(Ints::Each(&groups), pick, n, cast, Out::Places(places), watch)
    }
}

fn wrong(detail: &str) -> Error {
    Error::new(Kind::Internal, format!("a pool with {detail}"))
}

/// Converts the rows of slots into `out`, one after the other; `groups` holds each slot's group if slots hold one group.
pub fn convert_rows(
    convert: &Convert,
    memory: &[u8],
    slot_bytes: usize,
    slots: &[u32],
    groups: Option<&[i64]>,
    out: &mut [u8],
    watch: Watch<'_>,
) -> Result<()> {
    let per_slot = slot_bytes / convert.from();
    let to = convert.to() * per_slot;
    let at_once = slots.len().div_ceil(threads::num_threads() * 4).max((256 << 10) / to.max(1)).max(1);
    let stream = should_stream(out.len(), convert.to());
    let fill = |p: usize, out: &mut [u8], stores: Stores<'_>| -> Result<()> {
        let mut scratch = Scratch::default();
        let slot = |i: usize| {
            let first = *slots.get(i)? as usize * slot_bytes;
            memory.get(first..first + slot_bytes)
        };
        for (i, out) in out.chunks_exact_mut(to).enumerate() {
            let i = p * at_once + i;
            if let Some(soon) = slot(i + 2) {
                prefetch(soon);
            }
            let Some(from) = slot(i) else { return Err(wrong("a slot outside its memory")) };
            for (k, (src, dst)) in from.chunks_exact(convert.from()).zip(out.chunks_exact_mut(convert.to())).enumerate()
            {
                let group = groups.map_or(k, |g| g[i] as usize);
                convert.row(group, src, dst, &mut scratch, stores);
            }
        }
        Ok(())
    };
    let work = |p: usize, out: &mut [u8], stop: &Stop| {
        if stop.is_set() { Ok(()) } else { kernels::storing(stream, |stores| fill(p, out, stores)) }
    };
    threads::for_each(out.chunks_mut(at_once * to), &work, watch)
}
