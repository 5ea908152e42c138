//! Scans every value: NaN and infinite values, zero and constant rows, constant columns, duplicate examples.
//!
//! One pass of bit operations over each row while it is in the cache: magnitudes are OR-ed (0 for a column of zeros),
//! differences to the first row are OR-ed (0 for a constant column), and rows are hashed.

mod found;
mod look;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use self::found::{Oddity, Scan};
use self::look::{Look, RowsHash};
use crate::dtype::{self, Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::gather::blocks::{BlockReader, READERS};
use crate::gather::{Ints, Out, Pick};
use crate::kernels::wide;
use crate::layout::row::Row;
use crate::memory::limit::memory_limit;
use crate::memory::output::Output;
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::threads::{self, Lock, Stop, Turns, Watch, make_ahead};

/// Bytes per part.
const PART: u64 = 2 << 20;
/// Bytes that a reading thread scans at once.
const PIECE: usize = 2 << 20;
/// Bytes between two calls of `progress`; also the amount decoded at once.
const WAVE: u64 = 64 << 20;

/// Scans all rows of a range of examples of a group.
pub fn scan(
    rows: &Rows,
    group: usize,
    examples: Range<u64>,
    progress: &mut dyn FnMut(u64),
    watch: Watch<'_>,
) -> Result<Scan> {
    let row = rows.row();
    if examples.start > examples.end || examples.end > rows.examples() {
        let detail = format!("examples {} to {} of {} are out of range", examples.start, examples.end, rows.examples());
        return Err(Error::new(Kind::OutOfRange, detail));
    }
    let cast = Cast::between(row.dtype, row.dtype)?;
    let group = Group { rows, row, number: group, examples, cast, staged: rows.decodes() };
    let mut all =
        if rows.reads_blocks() { group.in_blocks(progress, watch)? } else { group.in_waves(progress, watch)? };
    if all.magnitudes.len() != row.width {
        (all.magnitudes, all.differences) = (zeroed(row.width)?, zeroed(row.width)?);
    }
    Ok(all)
}

/// What a scan of a range of examples takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanNeeds {
    /// Bytes read from files; `None` if rows must be decoded, or come from far.
    pub read: Option<u64>,
    /// Bytes of memory, without decoded files that are kept.
    pub memory: u64,
}

/// What [`scan`] takes. Plans the same reads, and reads no rows. `total` are bytes of rows of the whole scan, of which this range
/// may be a sample: they decide about the page cache and the number of threads that read.
#[expect(clippy::disallowed_methods, reason = "a counting reader reads nothing")]
pub fn needs(rows: &Rows, group: usize, examples: Range<u64>, total: u64, watch: Watch<'_>) -> Result<ScanNeeds> {
    let row = rows.row();
    let cast = Cast::between(row.dtype, row.dtype)?;
    let group = Group { rows, row, number: group, examples, cast, staged: rows.decodes() };
    // A look's columns are of the element's type, a result's of 64 bits.
    let columns = (row.bytes * 3 + row.width * 16) as u64;
    let parts = total.div_ceil(PART);
    if !rows.reads_blocks() {
        let wave = group.wave(group.examples.start, &mut *watch)?;
        let held = if group.staged {
            wave.bytes
        } else {
            let longest = wave.counts.iter().max().copied().unwrap_or(0) as u64 * row.bytes as u64;
            longest * threads::num_threads() as u64
        };
        return Ok(ScanNeeds { read: None, memory: held + wave.bytes.div_ceil(PART) * columns });
    }
    let mut mine = ScanningThread::new(row, false)?;
    mine.reader = BlockReader::counting(total > memory_limit() / 2)?;
    let (turns, stop) = (Turns::new(1), Stop::never());
    for part in group.parts() {
        let (wave, part) = part?;
        group.scan_part(
            &wave,
            part,
            &mut Look::new(row.dtype, row.width, &vec![0; row.bytes])?,
            (&mut mine, &turns, stop),
        )?;
        if watch() {
            return Err(threads::interrupted());
        }
    }
    let counted = mine.reader.counted();
    let readers = parts.min(READERS as u64);
    let memory = readers * (mine.rows.len() as u64 + counted.memory()) + parts.min(2 * READERS as u64) * columns;
    Ok(ScanNeeds { read: Some(counted.bytes), memory })
}

/// The rows of a group, and the way to read them.
struct Group<'a> {
    rows: &'a Rows,
    row: Row,
    number: usize,
    examples: Range<u64>,
    cast: Cast<'a>,
    /// Whether rows must be decoded; then each wave is decoded as a whole.
    staged: bool,
}

/// Consecutive examples of about [`WAVE`] bytes.
struct Wave {
    ids: Vec<i64>,
    /// Number of tokens of each example.
    counts: Vec<i64>,
    bytes: u64,
    /// The first row of each example, relative to the wave's first.
    starts: Vec<u64>,
}

impl Wave {
    /// Scans some examples in the decoded bytes of the wave.
    fn look_at(&self, part: Range<usize>, stage: &[u8], row_bytes: usize, look: &mut Look) {
        for e in part {
            let at = self.starts[e] as usize * row_bytes;
            look.example(self.ids[e] as u64, &stage[at..at + self.counts[e] as usize * row_bytes]);
        }
    }
}

impl Group<'_> {
    /// Rows that are read in blocks: each reading thread scans what it reads.
    fn in_blocks(&self, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Scan> {
        let mut first = None;
        let (mut from, mut seen) = (self.examples.start, 0);
        while first.is_none() && from < self.examples.end {
            let wave = self.wave(from, &mut *watch)?;
            first = self.first_row(&wave, &mut *watch)?;
            from += wave.ids.len() as u64;
            seen += wave.bytes;
        }
        // About as many bytes for each example as in the waves seen.
        let (some, all) = (from - self.examples.start, self.examples.end - self.examples.start);
        let bytes = u128::from(seen) * u128::from(all) / u128::from(some.max(1));
        let past_cache = bytes > u128::from(memory_limit() / 2);
        let first = first.unwrap_or_default();
        let (turns, spare) = (Turns::new(threads::num_threads()), Lock::new(vec![]));
        let lock = || spare.lock();
        let scan_part = |part: Result<(Arc<Wave>, Range<usize>)>, stop: &Stop| -> Result<Scan> {
            let (wave, part) = part?;
            let taken = lock().pop();
            let mut mine = taken.map_or_else(|| ScanningThread::new(self.row, past_cache), Ok)?;
            let mut look = Look::new(self.row.dtype, self.row.width, &first)?;
            self.scan_part(&wave, part, &mut look, (&mut mine, &turns, stop))?;
            lock().push(mine);
            look.done()
        };
        make_ahead((READERS, 2 * READERS), self.parts(), &scan_part, |next| {
            let (mut all, mut told) = (Scan::default(), 0);
            while let Some(part) = next(&mut *watch)? {
                all.join(part);
                if (all.rows - told).saturating_mul(self.row.bytes as u64) >= WAVE {
                    told = all.rows;
                    progress(told);
                    if watch() {
                        return Err(threads::interrupted());
                    }
                }
            }
            progress(all.rows);
            all.first.clone_from(&first);
            Ok(all)
        })
    }

    /// Other rows: those that must be decoded are read by all threads together, in large parts.
    fn in_waves(&self, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Scan> {
        let mut all = Scan::default();
        let mut first: Option<Vec<u8>> = None;
        let mut from = self.examples.start;
        while from < self.examples.end {
            let wave = self.wave(from, &mut *watch)?;
            if first.is_none() {
                first = self.first_row(&wave, &mut *watch)?;
            }
            let stage = self.stage(&wave, &mut *watch)?;
            let stage = stage.as_ref().map(|s| s.bytes());
            let parts = cut(&wave.counts, self.row.bytes as u64);
            let look = |p: usize, stop: &Stop| -> Result<Scan> {
                let mut look = Look::new(self.row.dtype, self.row.width, first.as_deref().unwrap_or_default())?;
                match stage {
                    Some(stage) => wave.look_at(parts[p].clone(), stage, self.row.bytes, &mut look),
                    None => self.look_at(&wave, parts[p].clone(), &mut look, stop)?,
                }
                look.done()
            };
            for part in threads::map(parts.len(), &look, &mut *watch)? {
                all.join(part);
            }
            from += wave.ids.len() as u64;
            progress(all.rows);
        }
        all.first = first.unwrap_or_default();
        Ok(all)
    }

    /// Parts of about [`PART`] bytes, or one longer example; ends after an error.
    fn parts(&self) -> impl Iterator<Item = Result<(Arc<Wave>, Range<usize>)>> + Send {
        let (mut from, mut failed) = (self.examples.start, false);
        let waves = std::iter::from_fn(move || {
            if failed || from >= self.examples.end {
                return None;
            }
            let wave = self.wave(from, &mut || false);
            failed = wave.is_err();
            from += wave.as_ref().map_or(0, |wave| wave.ids.len() as u64);
            Some(wave.map(Arc::new))
        });
        waves.flat_map(|wave| -> Vec<_> {
            match wave {
                Ok(wave) => {
                    let parts = cut(&wave.counts, self.row.bytes as u64);
                    parts.into_iter().map(|part| Ok((Arc::clone(&wave), part))).collect()
                }
                Err(error) => vec![Err(error)],
            }
        })
    }

    /// Reads and scans some examples: short ones together, long ones in pieces.
    fn scan_part(
        &self,
        wave: &Wave,
        part: Range<usize>,
        look: &mut Look,
        (mine, turns, stop): (&mut ScanningThread, &Turns, &Stop),
    ) -> Result<()> {
        let at_once = (PIECE / self.row.bytes).max(1) as i64;
        let mut e = part.start;
        while e < part.end {
            let count = wave.counts[e];
            if count > at_once {
                let mut hash = RowsHash::new();
                for from in (0..count).step_by(at_once as usize) {
                    let tokens: Vec<i64> = (from..count.min(from + at_once)).collect();
                    let pick = Pick::Tokens { examples: Ints::One(wave.ids[e]), tokens: Ints::Each(&tokens) };
                    let bytes = mine.read(self, pick, tokens.len(), tokens.len(), stop)?;
                    let Some(bytes) = bytes else { continue };
                    turns.take(|| wide(|| look.rows(wave.ids[e] as u64, from as u64, bytes, &mut hash)));
                }
                look.found.hashes.push(hash.done());
                e += 1;
                continue;
            }
            let (mut end, mut rows) = (e + 1, count);
            while end < part.end && rows + wave.counts[end] <= at_once {
                rows += wave.counts[end];
                end += 1;
            }
            // Examples without rows in this group may have none stored.
            let present: Vec<i64> = (e..end).filter(|i| wave.counts[*i] > 0).map(|i| wave.ids[i]).collect();
            let pick = Pick::Whole { examples: Ints::Each(&present) };
            let bytes = mine.read(self, pick, present.len(), rows as usize, stop)?;
            let first = std::mem::replace(&mut e, end);
            let Some(bytes) = bytes else { continue };
            turns.take(|| {
                let mut rest = bytes;
                for i in first..end {
                    let (example, others) = rest.split_at(wave.counts[i] as usize * self.row.bytes);
                    wide(|| look.example(wave.ids[i] as u64, example));
                    rest = others;
                }
            });
        }
        Ok(())
    }

    fn groups(&self) -> Ints<'static> {
        Ints::One(self.number as i64)
    }

    /// The wave that begins at example `from`. Counting decodes shards, so it counts no more than will be read.
    fn wave(&self, from: u64, watch: Watch<'_>) -> Result<Wave> {
        let mut ids: Vec<i64> = (from as i64..(from + 4096).min(self.examples.end) as i64).collect();
        let mut counts = if self.staged { vec![] } else { self.rows.tokens_of(self.groups(), &ids, &mut *watch)? };
        let (mut bytes, mut n) = (0, 0);
        while n < ids.len() && bytes < WAVE {
            if self.staged {
                counts.push(self.rows.tokens_of(self.groups(), &ids[n..=n], &mut *watch)?[0]);
            }
            bytes += counts[n] as u64 * self.row.bytes as u64;
            n += 1;
        }
        ids.truncate(n);
        counts.truncate(n);
        let starts = counts.iter().scan(0, |at, c| Some(std::mem::replace(at, *at + *c as u64))).collect();
        Ok(Wave { ids, counts, bytes, starts })
    }

    /// The wave's first row, if it has one.
    fn first_row(&self, wave: &Wave, watch: Watch<'_>) -> Result<Option<Vec<u8>>> {
        let Some(e) = wave.counts.iter().position(|c| *c > 0) else { return Ok(None) };
        let mut row = zeroed(self.row.bytes)?;
        let pick = Pick::Tokens { examples: Ints::One(wave.ids[e]), tokens: Ints::One(0) };
        self.rows.gather(self.groups(), pick, 1, self.cast, Out::Dense(&mut row), watch)?;
        Ok(Some(row))
    }

    /// The wave's decoded rows, if rows must be decoded.
    fn stage(&self, wave: &Wave, watch: Watch<'_>) -> Result<Option<Output>> {
        if !self.staged {
            return Ok(None);
        }
        let mut stage = output(wave.bytes as usize)?;
        // Skip examples that have no rows in this group.
        let present = wave.ids.iter().zip(&wave.counts).filter(|(_, c)| **c > 0).map(|(id, _)| *id);
        self.read(&present.collect::<Vec<_>>(), stage.as_mut(), watch)?;
        Ok(Some(stage))
    }

    fn read(&self, ids: &[i64], out: &mut [u8], watch: Watch<'_>) -> Result<()> {
        let pick = Pick::Whole { examples: Ints::Each(ids) };
        self.rows.gather(self.groups(), pick, ids.len(), self.cast, Out::Dense(out), watch)
    }

    /// Reads and scans some examples, one at a time.
    fn look_at(&self, wave: &Wave, part: Range<usize>, look: &mut Look, stop: &Stop) -> Result<()> {
        let mut block = output(0)?;
        for e in part {
            let need = wave.counts[e] as usize * self.row.bytes;
            if block.bytes().len() < need {
                block = output(need)?;
            }
            if need > 0 {
                self.read(&wave.ids[e..=e], &mut block.as_mut()[..need], &mut || stop.is_set())?;
            }
            look.example(wave.ids[e] as u64, &block.bytes()[..need]);
        }
        Ok(())
    }
}

/// A reading thread's memory: a block of a file, and rows.
struct ScanningThread {
    reader: BlockReader,
    rows: Vec<u8>,
}

impl ScanningThread {
    fn new(row: Row, past_cache: bool) -> Result<ScanningThread> {
        Ok(ScanningThread {
            reader: BlockReader::new(past_cache)?,
            rows: zeroed((PIECE / row.bytes).max(1) * row.bytes)?,
        })
    }

    /// Reads `items` examples or rows, `rows` rows in total; `None` if the reader only counts.
    fn read(
        &mut self,
        group: &Group<'_>,
        pick: Pick<'_>,
        items: usize,
        rows: usize,
        stop: &Stop,
    ) -> Result<Option<&[u8]>> {
        let out = &mut self.rows[..rows * group.row.bytes];
        group.rows.gather_in_blocks(
            group.groups(),
            pick,
            items,
            group.cast,
            Out::Dense(out),
            (&mut self.reader, stop),
        )?;
        Ok(Some(&self.rows[..rows * group.row.bytes]).filter(|_| !self.reader.counts()))
    }
}

fn output(len: usize) -> Result<Output> {
    Output::new(len).map_err(|e| Error::new(Kind::NoMemory, format!("cannot allocate {len} bytes: {e}")))
}

/// [`dtype::overflows`] of many elements, with all threads.
pub fn count_overflows(from: DType, to: DType, elements: &[u8], watch: Watch<'_>) -> Result<u64> {
    // Reports unsupported types first.
    dtype::overflows(from, to, &[])?;
    let found = AtomicU64::new(0);
    let parts: Vec<&[u8]> = elements.chunks(PART as usize).collect();
    let count = |p: usize, _: &Stop| -> Result<()> {
        found.fetch_add(dtype::overflows(from, to, parts[p])?, Ordering::Relaxed);
        Ok(())
    };
    threads::run(parts.len(), &count, watch)?;
    Ok(found.into_inner())
}

/// The hash of each example's rows, as in [`Scan::hashes`], with all threads. The examples lie one after the other in `bytes`;
/// `counts` are their numbers of rows.
pub fn hash_rows(bytes: &[u8], row_bytes: usize, counts: &[i64], watch: Watch<'_>) -> Result<Vec<u64>> {
    let misfit = || Error::new(Kind::Argument, "expected as many bytes as the rows of all examples have");
    let mut ends = vec![0usize];
    for count in counts {
        let size = usize::try_from(*count).ok().and_then(|n| n.checked_mul(row_bytes)).ok_or_else(misfit)?;
        ends.push(ends[ends.len() - 1].checked_add(size).filter(|end| *end <= bytes.len()).ok_or_else(misfit)?);
    }
    if ends[counts.len()] != bytes.len() {
        return Err(misfit());
    }
    let parts = cut(counts, row_bytes as u64);
    let hash_part = |p: usize, _: &Stop| -> Result<Vec<u64>> {
        let examples = parts[p].clone().map(|e| RowsHash::of(&bytes[ends[e]..ends[e + 1]], row_bytes));
        Ok(examples.collect())
    };
    Ok(threads::map(parts.len(), &hash_part, watch)?.concat())
}

/// Groups neighbouring examples into parts of about [`PART`] bytes.
fn cut(counts: &[i64], row_bytes: u64) -> Vec<Range<usize>> {
    let mut parts = vec![];
    let (mut start, mut bytes) = (0, 0);
    for (i, count) in counts.iter().enumerate() {
        bytes += *count as u64 * row_bytes;
        if bytes >= PART || i + 1 == counts.len() {
            parts.push(start..i + 1);
            (start, bytes) = (i + 1, 0);
        }
    }
    parts
}
