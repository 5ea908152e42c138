//! The read-ahead thread: it makes batches until enough are ready, then waits for the consumer to take one.
//!
//! The consumer may stop at any time, from any thread, even while another one waits for a batch. The thread then ends within
//! the time of one part of a gather. Chunks decoded by the zarr package call Python from this thread: a caller that stops
//! it and waits must not hold the GIL.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use super::chunks::{ChunkJob, ChunkMaker, ChunkRows, Chunks};
use super::exchange::Exchange;
use super::items::{BatchItems, convert_rows};
use super::plan::{Epoch, Plan, Shuffle};
use super::pool::WindowPool;
use super::rescale::Convert;
use crate::error::{Error, Kind, Result};
use crate::rows::Rows;
use crate::threads::{Lock, Watch, make_ahead, make_weighed_ahead};

pub use super::chunks::Wanted;

/// The source, order and conversion of a stream, shared by all epochs.
pub struct Stream {
    /// The rows to read.
    pub rows: Arc<Rows>,
    /// Their order.
    pub plan: Plan,
    /// Their conversion.
    pub convert: Convert,
}

/// A batch: its memory, of which it fills the first rows, and the ids of these rows.
#[derive(Debug)]
pub struct Batch<M> {
    /// At least as large as the batch.
    pub memory: M,
    /// Number of items.
    pub len: usize,
    /// Each item's example.
    pub examples: Vec<i64>,
    /// Each item's token.
    pub tokens: Vec<i64>,
    /// Each item's position among the groups read; empty if an item has a row of every group.
    pub groups: Vec<i64>,
}

/// The memory for batches.
pub enum Supply<M> {
    /// Allocates this many bytes for each batch.
    New(Box<dyn FnMut(usize) -> Result<M> + Send>),
    /// A fixed set, reused as it is returned.
    Recycled(Vec<M>),
}

/// Batches read ahead.
pub struct Ahead<M> {
    shared: Arc<Exchange<Batch<M>, M>>,
    thread: Lock<Option<JoinHandle<()>>>,
    pid: u32,
}

impl<M: AsMut<[u8]> + Send + 'static> Ahead<M> {
    /// Starts reading the wanted batches of an epoch; at most `ahead` are ready while another is being made.
    pub fn start(stream: Arc<Stream>, epoch: u64, wanted: Wanted, supply: Supply<M>, ahead: usize) -> Result<Ahead<M>> {
        let (make, spare) = match supply {
            Supply::New(make) => (Some(make), vec![]),
            Supply::Recycled(spare) => (None, spare),
        };
        let shared = Arc::new(Exchange::new(spare));
        let theirs = Arc::clone(&shared);
        let work = move || {
            let maker = BatchMaker { stream: &stream, shared: &theirs, wanted, ahead: ahead.max(1) };
            let ended = catch_unwind(AssertUnwindSafe(|| maker.run(epoch, make)));
            let error = match ended {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(_) => Some(Error::new(Kind::Internal, "a bug in actshard in a reading thread; please report it")),
            };
            theirs.finish(error);
        };
        let thread = std::thread::Builder::new()
            .name("actshard-ahead".to_owned())
            .spawn(work)
            .map_err(|e| Error::new(Kind::Access, format!("cannot start a thread: {e}")))?;
        Ok(Ahead { shared, thread: Lock::new(Some(thread)), pid: std::process::id() })
    }

    /// Returns the next batch; `None` after the last, or if the stream was stopped meanwhile. An error is returned after all
    /// batches before it were taken, and again on every later call. The watch is called without holding a lock: it may run
    /// code that stops this iterator.
    pub fn next(&self, watch: Watch<'_>) -> Result<Option<Batch<M>>> {
        if self.is_inherited() {
            return Err(Error::new(Kind::Argument, "a stream's iterator was carried into a forked process"));
        }
        self.shared.next(watch)
    }

    /// Whether [`Ahead::next`] would return a batch without waiting. False at the end and before an error.
    pub fn is_ready(&self) -> bool {
        !self.is_inherited() && self.shared.is_ready()
    }

    /// Returns memory for reuse.
    pub fn give_back(&self, memory: M) {
        if !self.is_inherited() {
            self.shared.give_back(memory);
        }
    }

    /// Stops the thread, and waits until it no longer touches the memory of a batch. If the watch returns true, only the wait
    /// ends: the thread may be blocked in a read of a network file system, and keeps its memory until it ends by itself.
    pub fn stop(&self, watch: Watch<'_>) -> Result<()> {
        if self.is_inherited() {
            return Ok(());
        }
        self.shared.stop();
        if self.is_own_thread() {
            return Ok(());
        }
        if let Err(interrupted) = self.shared.wait_until_finished(watch) {
            // Without the handle, dropping this does not wait uninterruptibly.
            drop(self.thread.lock().take());
            return Err(interrupted);
        }
        self.join();
        Ok(())
    }
}

impl<M> Ahead<M> {
    /// Whether this is a forked child, where neither the thread nor a holder of the lock exists.
    pub fn is_inherited(&self) -> bool {
        self.pid != std::process::id()
    }

    /// The garbage collector may drop an iterator on its own reading thread, when that calls Python.
    fn is_own_thread(&self) -> bool {
        let thread = self.thread.lock();
        thread.as_ref().is_some_and(|thread| thread.thread().id() == std::thread::current().id())
    }

    fn join(&self) {
        let thread = self.thread.lock().take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl<M> Drop for Ahead<M> {
    fn drop(&mut self) {
        if self.is_inherited() {
            std::mem::forget(self.thread.get_mut().take());
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        self.shared.stop();
        self.join();
    }
}

/// The thread's side.
struct BatchMaker<'a, M> {
    stream: &'a Stream,
    shared: &'a Exchange<Batch<M>, M>,
    wanted: Wanted,
    ahead: usize,
}

type Make<M> = Option<Box<dyn FnMut(usize) -> Result<M> + Send>>;

impl<M: AsMut<[u8]>> BatchMaker<'_, M> {
    fn run(&self, epoch: u64, make: Make<M>) -> Result<()> {
        let Stream { rows, plan, .. } = self.stream;
        let epoch = plan.epoch(epoch);
        let shuffle = plan.settings.shuffle;
        if self.wanted.first >= plan.batches() {
            return Ok(());
        }
        if shuffle == Shuffle::Exact || !(rows.reads_blocks() || rows.is_gathered_ahead(plan.rows_per_item() as u64)) {
            return self.batches(&epoch, make, None);
        }
        let maker = ChunkMaker::new(rows, plan, &epoch, self.wanted);
        if maker.is_decoded_at_hand() {
            return self.batches(&epoch, make, None);
        }
        let make_chunk = |job, stop: &_| maker.make(job, stop);
        let threads = maker.threads();
        if shuffle == Shuffle::Window {
            let first = epoch.window_of(epoch.own(self.wanted.first).start);
            // The list of a cached window may be larger than all chunks: one at a time.
            let weigh = |job: &ChunkJob| if job.is_cached() { threads.1 as u64 } else { 1 };
            make_weighed_ahead(threads, maker.of_windows(first), &weigh, &make_chunk, |next| {
                self.batches(&epoch, make, Some(Chunks::new(&maker, next)))
            })
        } else {
            make_ahead(threads, maker.of_batches(), &make_chunk, |next| {
                self.batches(&epoch, make, Some(Chunks::new(&maker, next)))
            })
        }
    }

    fn batches(&self, epoch: &Epoch<'_>, mut make: Make<M>, chunks: Option<Chunks<'_, '_>>) -> Result<()> {
        let Stream { rows, plan, convert } = self.stream;
        let windows = plan.settings.shuffle == Shuffle::Window;
        let (mut pool, mut chunks) = match chunks {
            chunks if windows => (Some(WindowPool::new((rows, plan, epoch), self.wanted, chunks)?), None),
            chunks => (None, chunks),
        };
        let mut scratch: Vec<u8> = vec![];
        // The window in which the last batch ended, and the error that prevents reading the next one.
        let (mut window, mut broken) = (0, None);
        let watch = &mut || self.shared.stopped();
        let batches = (self.wanted.first..plan.batches()).step_by(self.wanted.every.max(1) as usize);
        for batch in batches {
            // An error in the next window is reported only when a batch needs that window.
            let ends_in =
                if windows { epoch.own(batch).end.checked_sub(1).map_or(0, |last| epoch.window_of(last)) } else { 0 };
            if ends_in > window
                && let Some(error) = broken.take()
            {
                return Err(error);
            }
            window = ends_in;
            let len = epoch.batch_len(batch) as usize;
            let bytes = len * plan.rows_per_item() * convert.to();
            let Some(mut memory) = self.memory(&mut make, bytes)? else { return Ok(()) };
            let out = memory.as_mut().get_mut(..bytes);
            let out = out.ok_or_else(|| Error::new(Kind::Argument, "a buffer is smaller than a batch"))?;
            let mut known = BatchItems::default();
            if let Some(pool) = &mut pool {
                pool.give(batch, convert, out, &mut known, watch)?;
            } else if !self.take(&mut chunks, batch, out, &mut known, watch)? {
                let (first, interleaved) = (epoch.turn(batch).start, plan.settings.interleaved);
                let numbers = |from: u64, numbers: &mut [u64]| epoch.numbers_from(first + from, numbers);
                known.extend(len, interleaved, (&numbers, &|number| plan.item(number).ids()), watch)?;
                known.gather(0, (rows, plan, convert), out, &mut scratch, watch)?;
            }
            let BatchItems { examples, tokens, groups } = known;
            if !self.shared.hand_over(Batch { memory, len, examples, tokens, groups }) {
                return Ok(());
            }
            if let Some(pool) = &mut pool
                && broken.is_none()
            {
                broken = pool.refill(watch).err();
            }
        }
        // Before the threads that read chunks have ended: the epoch is complete.
        self.shared.finish(None);
        Ok(())
    }

    /// Fills a batch in stored order from its chunks; false if there are none because its rows are in the page cache.
    fn take(
        &self,
        chunks: &mut Option<Chunks<'_, '_>>,
        batch: u64,
        out: &mut [u8],
        known: &mut BatchItems,
        watch: Watch<'_>,
    ) -> Result<bool> {
        let Some(chunks) = chunks else { return Ok(false) };
        let Stream { plan, convert, .. } = self.stream;
        let (per_item, interleaved) = (plan.rows_per_item(), plan.settings.interleaved);
        let mut rest = out;
        while !rest.is_empty() {
            let Some(chunk) = chunks.next_until(batch, &mut *watch)? else { return Ok(false) };
            let ChunkRows::Read(rows) = &chunk.rows else {
                return Err(Error::new(Kind::Internal, "a batch partly in the page cache"));
            };
            let from = known.examples.len();
            chunk.items.iter().for_each(|(_, item)| known.push(item.ids(), interleaved));
            let (mine, others) = rest
                .split_at_mut_checked(chunk.items.len() * per_item * convert.to())
                .ok_or_else(|| Error::new(Kind::Internal, "a chunk larger than its batch"))?;
            let slots: Vec<u32> = (0..chunk.items.len() as u32).collect();
            let groups = interleaved.then(|| &known.groups[from..]);
            convert_rows(convert, rows.bytes(), convert.from() * per_item, &slots, groups, mine, &mut *watch)?;
            rest = others;
            chunks.done(chunk);
        }
        Ok(true)
    }

    /// Memory for a batch; `None` if stopped.
    fn memory(&self, make: &mut Make<M>, bytes: usize) -> Result<Option<M>> {
        match make {
            Some(make) if self.shared.wait_for_room(self.ahead) => make(bytes).map(Some),
            Some(_) => Ok(None),
            None => Ok(self.shared.wait_for_memory()),
        }
    }
}
