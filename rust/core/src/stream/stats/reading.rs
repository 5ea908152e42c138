//! Reads the selected rows, part by part, and sums them.

use std::ops::Range;

use super::moments::Stats;
use super::part::{BLOCK, Summer};
use super::tree::{SumNode, Sums};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::gather::blocks::{BlockReader, READERS};
use crate::gather::{Ints, Out, Pick};
use crate::layout::row::Row;
use crate::memory::limit::memory_limit;
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::stream::select::Selection;
use crate::threads::{self, Lock, Stop, Turns, Watch, make_ahead};

/// Bytes per part, unless one block is larger; then a part is a block.
const PART_BYTES: usize = 2 << 20;
/// Most rows per leaf; a leaf is also the amount between two calls of the watch and of `progress`.
const LEAF: u64 = 1 << 16;
/// Most bytes per leaf, unless one row is larger. A block of wide rows ends with its leaf.
const LEAF_BYTES: u64 = 64 << 20;

/// Rows per leaf. Blocks never cross the bounds of leaves, which decide the last bits of the result.
pub fn leaf_rows(row: Row) -> u64 {
    LEAF.min((LEAF_BYTES / row.bytes.max(1) as u64).max(1))
}

/// Rows of a part: whole blocks of about [`PART_BYTES`], at most a leaf.
pub(super) fn part_rows(row: Row) -> usize {
    ((PART_BYTES / (row.bytes * BLOCK).max(1)).max(1) * BLOCK).min(leaf_rows(row) as usize)
}

/// Threads that read parts, fewer if a block is large.
pub(super) fn readers(row: Row) -> usize {
    ((64 << 20) / (row.bytes * part_rows(row)).max(1)).clamp(2, READERS)
}

/// Example and token of each row.
type Ids = (Vec<i64>, Vec<i64>);

/// The rows to sum.
pub(super) struct Picked<'a> {
    pub(super) rows: &'a Rows,
    pub(super) group: usize,
    pub(super) selection: &'a Selection,
    /// The leaves to sum.
    pub(super) leaves: Range<u64>,
}

impl Picked<'_> {
    /// Leaves: the number of each, and its picks.
    fn waves(&self) -> impl Iterator<Item = (u64, Range<u64>)> + Clone + use<> {
        let (n, total) = (leaf_rows(self.rows.row()), self.selection.len());
        self.leaves.clone().map(move |leaf| (leaf, leaf * n..total.min((leaf + 1) * n)))
    }

    fn ids(&self, picks: Range<u64>) -> Ids {
        let of = |pick| {
            let (example, token) = self.selection.get(pick);
            (example as i64, token as i64)
        };
        picks.map(of).unzip()
    }

    /// The picks of each part.
    pub(super) fn parts(&self) -> impl Iterator<Item = Range<u64>> + Clone + use<> {
        let at_once = part_rows(self.rows.row());
        self.waves().flat_map(move |(_, picks)| {
            (picks.start..picks.end).step_by(at_once).map(move |from| from..picks.end.min(from + at_once as u64))
        })
    }

    /// Bytes of the largest part.
    pub(super) fn part_bytes(&self) -> usize {
        let rows = self.waves().map(|(_, picks)| picks.end - picks.start).max().unwrap_or(0);
        part_rows(self.rows.row()).min(rows as usize) * self.rows.row().bytes
    }

    /// Reads picks as stored to the beginning of `raw`; returns their examples and tokens.
    pub(super) fn read(&self, picks: Range<u64>, raw: &mut [u8], reader: &mut BlockReader, stop: &Stop) -> Result<Ids> {
        let row = self.rows.row();
        let (examples, tokens) = self.ids(picks);
        let n = examples.len();
        let pick = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
        let as_is = Cast::between(row.dtype, row.dtype)?;
        let out = Out::Dense(&mut raw[..n * row.bytes]);
        self.rows.gather_in_blocks(Ints::One(self.group as i64), pick, n, as_is, out, (reader, stop))?;
        Ok((examples, tokens))
    }

    /// Rows that are read in blocks: each reading thread sums what it reads.
    pub(super) fn in_blocks(&self, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Sums> {
        let row = self.rows.row();
        let total = self.waves().map(|(_, picks)| picks.end - picks.start).sum::<u64>();
        let past_cache = total.saturating_mul(row.bytes as u64) > memory_limit() / 2;
        let turns = Turns::new(threads::num_threads());
        let part_bytes = self.part_bytes();
        // As many summers as threads with a turn.
        let (reading, summing) = (Spare::default(), Spare::default());
        let sum = |picks: Range<u64>, stop: &Stop| -> Result<Stats> {
            let (mut reader, mut raw) =
                reading.take(|| Ok((BlockReader::new(past_cache)?, zeroed::<u8>(part_bytes)?)))?;
            let (examples, tokens) = self.read(picks, &mut raw, &mut reader, stop)?;
            let made = turns.take(|| {
                stop.check()?;
                let mut summer = summing.take(|| Summer::new(row))?;
                let made = summer.sum(&raw[..examples.len() * row.bytes], (&examples, &tokens));
                summing.put(summer);
                made
            });
            reading.put((reader, raw));
            made
        };
        let mut all = Sums::default();
        let readers = readers(row);
        make_ahead((readers, 2 * readers), self.parts(), &sum, |next| {
            let mut done = 0;
            for (first, picks) in self.waves() {
                let mut sums = Stats::new(row.width)?;
                while sums.rows < picks.end - picks.start {
                    let Some(part) = next(&mut *watch)? else {
                        return Err(Error::new(Kind::Internal, "fewer parts than rows"));
                    };
                    sums.join(&part);
                }
                done += sums.rows;
                all.push(SumNode { first, level: 0, sums })?;
                progress(done);
                if watch() {
                    return Err(threads::interrupted());
                }
            }
            Ok(())
        })?;
        Ok(all)
    }

    /// Other rows: those that must be decoded are read by all threads together, a leaf at a time.
    pub(super) fn in_waves(&self, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Sums> {
        let row = self.rows.row();
        let as_is = Cast::between(row.dtype, row.dtype)?;
        let (staged, at_once, part_bytes) = (self.rows.decodes(), part_rows(row), self.part_bytes());
        let (raws, summing) = (Spare::default(), Spare::default());
        let mut all = Sums::default();
        let mut stage: Vec<u8> = vec![];
        let mut done = 0;
        for (first, picks) in self.waves() {
            let (examples, tokens) = self.ids(picks);
            let n = examples.len();
            let read = |span: Range<usize>, out: &mut [u8], watch: Watch<'_>| -> Result<()> {
                let ids = (&examples[span.clone()], &tokens[span.clone()]);
                let pick = Pick::Tokens { examples: Ints::Each(ids.0), tokens: Ints::Each(ids.1) };
                let out = Out::Dense(&mut out[..span.len() * row.bytes]);
                self.rows.gather(Ints::One(self.group as i64), pick, span.len(), as_is, out, watch)
            };
            if staged {
                if stage.len() < n * row.bytes {
                    stage = zeroed(n * row.bytes)?;
                }
                read(0..n, &mut stage, &mut *watch)?;
            }
            let work = |part: usize, stop: &Stop| -> Result<Stats> {
                let span = part * at_once..((part + 1) * at_once).min(n);
                let ids = (&examples[span.clone()], &tokens[span.clone()]);
                let mut summer: Summer = summing.take(|| Summer::new(row))?;
                let made = if staged {
                    summer.sum(&stage[span.start * row.bytes..span.end * row.bytes], ids)
                } else {
                    let mut raw: Vec<u8> = raws.take(|| zeroed(part_bytes))?;
                    read(span.clone(), &mut raw, &mut || stop.is_set())?;
                    let made = summer.sum(&raw[..span.len() * row.bytes], ids);
                    raws.put(raw);
                    made
                };
                summing.put(summer);
                made
            };
            let mut sums = Stats::new(row.width)?;
            for part in threads::map(n.div_ceil(at_once), &work, &mut *watch)? {
                sums.join(&part);
            }
            done += sums.rows;
            all.push(SumNode { first, level: 0, sums })?;
            progress(done);
        }
        Ok(all)
    }
}

/// Memory of threads that have ended their work, for the next ones.
struct Spare<T>(Lock<Vec<T>>);

impl<T> Default for Spare<T> {
    fn default() -> Spare<T> {
        Spare(Lock::new(vec![]))
    }
}

impl<T> Spare<T> {
    fn take(&self, new: impl FnOnce() -> Result<T>) -> Result<T> {
        let taken = self.0.lock().pop();
        taken.map_or_else(new, Ok)
    }

    fn put(&self, used: T) {
        self.0.lock().push(used);
    }
}
