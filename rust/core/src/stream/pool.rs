//! The rows of a window, kept in memory while they are returned in another order.
//!
//! A pool has as many slots as a window has items. Each time items are returned, items of the next window are put into the
//! freed slots, in file order. When the last item of a window is returned, the next window is complete. So the pool needs
//! the memory of one window, and reading never pauses.
//!
//! Rows arrive as [`Chunks`], read ahead by other threads; rows that must be decoded, or that a slow source sends, are
//! gathered into the slots. A window that is in the page cache takes no slots: its batches are gathered from the
//! mapping.

use super::chunks::{CachedItems, Chunk, ChunkRows, Chunks, Picks, SlotItem, Wanted, wanted_of};
use super::items::{BatchItems, convert_rows};
use super::plan::{Epoch, Item, Plan, Window};
use super::rescale::Convert;
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::gather::Out;
use crate::kernels::{self, should_stream};
use crate::memory::buffer::Buffer;
use crate::rows::Rows;
use crate::threads::{self, Watch};

/// Bytes per gather while a window is filled without chunks, at most: bounds the time that a stop waits.
const READ: usize = 64 << 20;
const NO_SLOT: u32 = u32::MAX;

/// A window, some of whose items are in slots.
struct PartialWindow {
    number: u64,
    window: Window,
    /// The slot of each place.
    slots: Vec<u32>,
    /// Places that were read, or skipped because they are not wanted.
    read: u64,
    /// The items by place, if the window is in the page cache; then it takes no slots.
    cached: Option<CachedItems>,
}

/// The pool.
pub struct WindowPool<'a, 'n> {
    rows: &'a Rows,
    plan: &'a Plan,
    epoch: &'a Epoch<'a>,
    wanted: Wanted,
    /// The remaining rows; `None` if they are gathered.
    chunks: Option<Chunks<'a, 'n>>,
    /// Made with the first row: windows in the page cache need none.
    memory: Option<Buffer>,
    slot_bytes: usize,
    slots: u32,
    kept: Vec<SlotItem>,
    free: Vec<u32>,
    scratch: Vec<u8>,
    current: Option<PartialWindow>,
    next: Option<PartialWindow>,
}

impl<'a, 'n> WindowPool<'a, 'n> {
    /// An empty pool for the wanted batches.
    pub fn new(
        (rows, plan, epoch): (&'a Rows, &'a Plan, &'a Epoch<'a>),
        wanted: Wanted,
        chunks: Option<Chunks<'a, 'n>>,
    ) -> Result<WindowPool<'a, 'n>> {
        let batch = plan.settings.batch;
        let largest = (0..epoch.windows().min(2)).map(|w| epoch.window_len(w)).max().unwrap_or(0) + 1;
        // Every `every`-th batch: those that begin in a window, and those that overlap it.
        let share = (largest / (batch * wanted.every) + 2).saturating_mul(batch);
        let slots = if wanted.every == 1 { largest } else { share.min(largest) };
        let slot_bytes = rows.row().bytes * plan.rows_per_item();
        let too_large = || Error::new(Kind::Argument, "memory: more than 2^32 rows in a window");
        let slots = u32::try_from(slots).map_err(|_| too_large())?;
        let (memory, kept, free) = (None, vec![], vec![]);
        let scratch = vec![];
        let (current, next) = (None, None);
        Ok(WindowPool {
            rows,
            plan,
            epoch,
            wanted,
            chunks,
            memory,
            slot_bytes,
            slots,
            kept,
            free,
            scratch,
            current,
            next,
        })
    }

    fn make_slots(&mut self) -> Result<()> {
        if self.memory.is_none() {
            let memory = Buffer::new(self.slots as usize * self.slot_bytes)
                .map_err(|e| Error::new(Kind::NoMemory, format!("cannot allocate {} rows: {e}", self.slots)))?;
            self.memory = Some(memory);
            self.kept = vec![SlotItem::default(); self.slots as usize];
            self.free = (0..self.slots).rev().collect();
        }
        Ok(())
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
        let (plan, own, interleaved) = (self.plan, self.epoch.own(batch), self.plan.settings.interleaved);
        let to = convert.to() * (self.slot_bytes / convert.from());
        let (mut position, mut out) = (own.start, out);
        while position < own.end {
            let number = self.epoch.window_of(position);
            self.advance(number, &mut *watch)?;
            let Some(held) = &self.current else { return Err(wrong("no window")) };
            let (first, order) = (held.window.first, &held.window.order);
            let end = own.end.min(first + order.len());
            let n = (end - position) as usize;
            let (mine, others) =
                out.split_at_mut_checked(n * to).ok_or_else(|| wrong("a batch larger than its memory"))?;
            let from = known.examples.len();
            if let Some(cached) = &held.cached {
                let numbers = |from: u64, places: &mut [u64]| order.fill(position - first + from, places);
                match cached {
                    CachedItems::Equal(units) => {
                        known.extend(n, interleaved, (&numbers, &|place| units.get(plan, place).ids()), &mut *watch)?;
                    }
                    CachedItems::Listed(items) => {
                        known.extend(n, interleaved, (&numbers, &|place| items[place as usize].ids()), &mut *watch)?;
                    }
                }
                let source = (self.rows, self.plan, convert);
                known.gather(from, source, mine, &mut self.scratch, &mut *watch)?;
            } else {
                let given: Vec<u32> = (position..end)
                    .map(|t| held.slots.get(order.get(t - first) as usize).copied().unwrap_or(NO_SLOT))
                    .collect();
                for slot in &given {
                    let kept = self.kept.get(*slot as usize).ok_or_else(|| wrong("an item that was not read"))?;
                    known.push(kept.ids(), interleaved);
                }
                let groups = interleaved.then(|| &known.groups[from..]);
                let memory = self.memory.as_deref().unwrap_or_default();
                convert_rows(convert, memory, self.slot_bytes, &given, groups, mine, &mut *watch)?;
                self.free.extend_from_slice(&given);
            }
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
        let done = self.read(&mut next, watch);
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
        let done = self.read(&mut held, watch);
        let missing = held.read < held.window.order.len();
        self.current = Some(held);
        if missing && done.is_ok() { Err(wrong("no slots for a window")) } else { done }
    }

    fn held(&self, number: u64) -> PartialWindow {
        let window = self.epoch.window(number);
        PartialWindow { number, window, slots: vec![], read: 0, cached: None }
    }

    /// Reads items of a window in stored order while slots are free.
    fn read(&mut self, held: &mut PartialWindow, watch: Watch<'_>) -> Result<()> {
        let n = held.window.order.len();
        if let Some(mut chunks) = self.chunks.take() {
            let done = self.take_chunks(held, &mut chunks, watch);
            self.chunks = Some(chunks);
            return done;
        }
        self.make_slots()?;
        let at_once = (READ / self.slot_bytes).max(1) as u64;
        while held.read < n && !self.free.is_empty() {
            let places = (n - held.read).min(self.free.len() as u64).min(at_once);
            let wanted = wanted_of(self.epoch, self.wanted, &held.window, held.read..held.read + places);
            held.read += places;
            self.fetch(held, &wanted, &mut *watch)?;
        }
        Ok(())
    }

    fn take_chunks(&mut self, held: &mut PartialWindow, chunks: &mut Chunks<'a, '_>, watch: Watch<'_>) -> Result<()> {
        while held.read < held.window.order.len() {
            let free = if self.memory.is_some() { self.free.len() } else { self.slots as usize };
            let fits = |chunk: &Chunk| chunk.items.len() <= free;
            let Some(mut chunk) = chunks.next(held.number, fits, &mut *watch)? else { return Ok(()) };
            held.read += chunk.covered;
            match &mut chunk.rows {
                ChunkRows::Read(rows) => self.put(held, &chunk.items, rows.bytes(), &mut *watch)?,
                ChunkRows::Cached(items) => held.cached = items.take(),
            }
            chunks.done(chunk);
        }
        Ok(())
    }

    /// Takes a slot for each item; returns the items' memory in the order of the items.
    fn take_slots(&mut self, held: &mut PartialWindow, items: &[(u32, Item)]) -> Result<Vec<&mut [u8]>> {
        let left = self.free.len().checked_sub(items.len()).ok_or_else(|| wrong("too few slots"))?;
        if held.slots.is_empty() {
            held.slots = vec![NO_SLOT; held.window.order.len() as usize];
        }
        let mut slots = self.free.split_off(left);
        slots.sort_unstable();
        let mut places = Vec::with_capacity(items.len());
        let mut rest = self.memory.as_mut().map(Buffer::bytes_mut).unwrap_or_default();
        let mut passed = 0;
        for (slot, (local, item)) in slots.iter().zip(items) {
            let (_, from) = rest.split_at_mut((*slot as usize - passed) * self.slot_bytes);
            let (mine, others) = from.split_at_mut(self.slot_bytes);
            (rest, passed) = (others, *slot as usize + 1);
            places.push(mine);
            held.slots[*local as usize] = *slot;
            self.kept[*slot as usize] = SlotItem::of(*item)?;
        }
        Ok(places)
    }

    /// Copies a chunk's rows into slots.
    fn put(&mut self, held: &mut PartialWindow, items: &[(u32, Item)], rows: &[u8], watch: Watch<'_>) -> Result<()> {
        self.make_slots()?;
        let (slot_bytes, pool_bytes) = (self.slot_bytes, self.slots as usize * self.slot_bytes);
        let places = self.take_slots(held, items)?;
        // Parts of 1 MiB.
        let at_once = ((1 << 20) / slot_bytes).max(1);
        let mut places = places.into_iter();
        let parts = rows[..items.len() * slot_bytes].chunks(at_once * slot_bytes).map(|from| {
            let to: Vec<&mut [u8]> = places.by_ref().take(from.len() / slot_bytes).collect();
            (from, to)
        });
        let parts: Vec<_> = parts.collect();
        let copy = |_: usize, (from, to): (&[u8], Vec<&mut [u8]>), _: &threads::Stop| {
            // A pool is larger than any cache.
            kernels::storing(should_stream(pool_bytes, slot_bytes), |stores| {
                from.chunks_exact(slot_bytes).zip(to).for_each(|(from, to)| kernels::copy(from, to, stores));
            });
            Ok(())
        };
        threads::for_each(parts, &copy, watch)
    }

    /// Gathers items into slots.
    fn fetch(&mut self, held: &mut PartialWindow, items: &[(u32, Item)], watch: Watch<'_>) -> Result<()> {
        let (rows, plan) = (self.rows, self.plan);
        let row = rows.row();
        let mut picks = Picks::default();
        items.iter().for_each(|(_, item)| picks.add(plan, *item));
        let places = self.take_slots(held, items)?;
        let places = places.into_iter().flat_map(|slot| slot.chunks_exact_mut(row.bytes)).collect();
        let (groups, pick) = picks.as_pick();
        rows.gather(groups, pick, picks.len(), Cast::between(row.dtype, row.dtype)?, Out::Places(places), watch)
    }
}

fn wrong(detail: &str) -> Error {
    Error::new(Kind::Internal, format!("a pool with {detail}"))
}
