//! The thread that reads ahead: it makes batches until enough are ready, and waits for the consumer to take one.
//!
//! The consumer may stop at any time, from any thread, also while another waits for a batch; the thread then ends within the
//! time of one part of a gather. Chunks that the zarr package decodes call Python from this thread: whoever stops it and waits
//! must not hold the GIL.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::exchange::Exchange;
use super::plan::{Plan, Shuffle};
use super::pool::{Known, Pool, convert_rows};
use super::rescale::Convert;
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::gather::{Ints, Out, Pick};
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::threads::Watch;

pub use super::pool::Wanted;

/// What is read, and how: shared by all epochs.
pub struct Stream {
    /// From where.
    pub rows: Arc<Rows>,
    /// In which order.
    pub plan: Plan,
    /// As what.
    pub convert: Convert,
}

/// A batch: the memory it lies in, of which the first rows are its own, and what they are.
#[derive(Debug)]
pub struct Batch<M> {
    /// At least as large as the batch.
    pub memory: M,
    /// Items.
    pub len: usize,
    /// The example of each.
    pub examples: Vec<i64>,
    /// The token of each.
    pub tokens: Vec<i64>,
    /// The position among the groups read of each; empty where an item has rows of all.
    pub groups: Vec<i64>,
}

/// Where batches are put.
pub enum Supply<M> {
    /// Into new memory of so many bytes each.
    New(Box<dyn FnMut(usize) -> Result<M> + Send>),
    /// Into these, again and again, as they are given back.
    Recycled(Vec<M>),
}

/// Batches that are being read.
pub struct Ahead<M> {
    shared: Arc<Exchange<Batch<M>, M>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pid: u32,
}

impl<M: AsMut<[u8]> + Send + 'static> Ahead<M> {
    /// Begins to read the batches wanted of an epoch, `ahead` at most beside the one that is being made.
    pub fn start(stream: Arc<Stream>, epoch: u64, wanted: Wanted, supply: Supply<M>, ahead: usize) -> Result<Ahead<M>> {
        let (make, spare) = match supply {
            Supply::New(make) => (Some(make), vec![]),
            Supply::Recycled(spare) => (None, spare),
        };
        let shared = Arc::new(Exchange::new(spare));
        let theirs = Arc::clone(&shared);
        let work = move || {
            let maker = Maker { stream: &stream, shared: &theirs, wanted, ahead: ahead.max(1) };
            let ended = catch_unwind(AssertUnwindSafe(|| maker.run(epoch, make)));
            let error = match ended {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error),
                Err(_) => Some(Error::new(Kind::Internal, "a fault of actshard in a reading thread, please report it")),
            };
            theirs.finish(error);
        };
        let thread = std::thread::Builder::new()
            .name("actshard-ahead".to_owned())
            .spawn(work)
            .map_err(|e| Error::new(Kind::Access, format!("cannot start a thread: {e}")))?;
        Ok(Ahead { shared, thread: Mutex::new(Some(thread)), pid: std::process::id() })
    }

    /// The next batch, when it is ready; `None` after the last, and when it was stopped meanwhile. An error comes when all
    /// batches before it were taken, and again whenever one is asked for after it. The watch is asked without any lock: it may
    /// run code that stops this very iterator.
    pub fn next(&self, watch: Watch<'_>) -> Result<Option<Batch<M>>> {
        if self.is_inherited() {
            return Err(Error::new(Kind::Argument, "a stream's iterator was carried into a forked process"));
        }
        self.shared.next(watch)
    }

    /// Memory that may be filled again.
    pub fn give_back(&self, memory: M) {
        if !self.is_inherited() {
            self.shared.give_back(memory);
        }
    }

    /// Ends the thread, and waits until it touches no memory of a batch any more. A watch that says stop ends the waiting and
    /// not the thread, which may hang in a read of a network file system: it ends by itself, and keeps its memory until then.
    pub fn stop(&self, watch: Watch<'_>) -> Result<()> {
        if self.is_inherited() {
            return Ok(());
        }
        self.shared.stop();
        if self.is_own_thread() {
            return Ok(());
        }
        if let Err(interrupted) = self.shared.wait_until_finished(watch) {
            // Whoever drops this would wait for it, and could not be interrupted.
            drop(self.thread.lock().unwrap_or_else(PoisonError::into_inner).take());
            return Err(interrupted);
        }
        self.join();
        Ok(())
    }
}

impl<M> Ahead<M> {
    /// In a forked child: neither the thread nor whoever holds the lock exists here.
    pub fn is_inherited(&self) -> bool {
        self.pid != std::process::id()
    }

    /// The garbage collector may drop an iterator on the very thread that reads for it, while that calls Python.
    fn is_own_thread(&self) -> bool {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner);
        thread.as_ref().is_some_and(|thread| thread.thread().id() == std::thread::current().id())
    }

    fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

impl<M> Drop for Ahead<M> {
    fn drop(&mut self) {
        if self.is_inherited() {
            std::mem::forget(self.thread.get_mut().unwrap_or_else(PoisonError::into_inner).take());
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        self.shared.stop();
        self.join();
    }
}

/// The thread's side.
struct Maker<'a, M> {
    stream: &'a Stream,
    shared: &'a Exchange<Batch<M>, M>,
    wanted: Wanted,
    ahead: usize,
}

type Make<M> = Option<Box<dyn FnMut(usize) -> Result<M> + Send>>;

impl<M: AsMut<[u8]>> Maker<'_, M> {
    fn run(&self, epoch: u64, mut make: Make<M>) -> Result<()> {
        let Stream { rows, plan, convert } = self.stream;
        let epoch = plan.epoch(epoch);
        let settings = &plan.settings;
        let windows = settings.shuffle == Shuffle::Window;
        let mut pool = None;
        let mut scratch: Vec<u8> = vec![];
        // The window that the last batch ended in, and why the one after it cannot be read.
        let (mut window, mut broken) = (0, None);
        let watch = &mut || self.shared.stopped();
        let batches = (self.wanted.first..plan.batches()).step_by(self.wanted.every.max(1) as usize);
        for batch in batches {
            // An error of the next window waits until a batch needs that window.
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
            let mut known = Known::default();
            if windows {
                if pool.is_none() {
                    pool = Some(Pool::new(rows, plan, &epoch, self.wanted)?);
                }
                if let Some(pool) = &mut pool {
                    pool.give(batch, convert, out, &mut known, watch)?;
                }
            } else {
                self.pick(epoch.items(batch), convert, out, &mut scratch, &mut known, watch)?;
            }
            let Known { examples, tokens, groups } = known;
            if !self.shared.hand_over(Batch { memory, len, examples, tokens, groups }) {
                return Ok(());
            }
            if let Some(pool) = &mut pool
                && broken.is_none()
            {
                broken = pool.refill(watch).err();
            }
        }
        Ok(())
    }

    /// Reads items straight from where they are stored.
    fn pick(
        &self,
        items: impl Iterator<Item = super::plan::Item>,
        convert: &Convert,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
        known: &mut Known,
        watch: Watch<'_>,
    ) -> Result<()> {
        let interleaved = self.stream.plan.settings.interleaved;
        let (mut examples, mut tokens, mut groups) = (vec![], vec![], vec![]);
        for item in items {
            known.examples.push(item.example as i64);
            known.tokens.push(item.token as i64);
            if interleaved {
                known.groups.push(item.group as i64);
            }
            for group in self.stream.plan.groups_of(item) {
                examples.push(item.example as i64);
                tokens.push(item.token as i64);
                groups.push(*group as i64);
            }
        }
        let rows = &self.stream.rows;
        let pick = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
        let n = examples.len();
        if let Some(cast) = convert.cast() {
            return rows.gather(Ints::Each(&groups), pick, n, cast, Out::Dense(out), watch);
        }
        let dtype = rows.row().dtype;
        let need = n * convert.from();
        if scratch.len() != need {
            *scratch = zeroed(need)?;
        }
        rows.gather(Ints::Each(&groups), pick, n, Cast::between(dtype, dtype)?, Out::Dense(scratch), &mut *watch)?;
        let slots: Vec<u32> = (0..known.examples.len() as u32).collect();
        let slot_bytes = convert.from() * self.stream.plan.rows_per_item();
        let groups = interleaved.then_some(&known.groups[..]);
        convert_rows(convert, scratch, slot_bytes, &slots, groups, out, watch)
    }

    /// Memory for a batch; `None` when stopped.
    fn memory(&self, make: &mut Make<M>, bytes: usize) -> Result<Option<M>> {
        match make {
            Some(make) if self.shared.wait_for_room(self.ahead) => make(bytes).map(Some),
            Some(_) => Ok(None),
            None => Ok(self.shared.wait_for_memory()),
        }
    }
}
