//! Scans every value: NaN and infinite values, zero and constant rows, constant columns, duplicate examples.
//!
//! One pass of bit operations over each row while it is in the cache: magnitudes are OR-ed (0 for a column of zeros),
//! differences to the first row are OR-ed (0 for a constant column), and rows are hashed.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

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
use crate::threads::{self, Stop, Turns, Watch, make_ahead};

/// Bytes per part.
const PART: u64 = 2 << 20;
/// Bytes that a reading thread scans at once.
const PIECE: usize = 2 << 20;
/// Bytes between two calls of `progress`; also the amount decoded at once.
const WAVE: u64 = 64 << 20;
/// Positions stored per oddity.
const PLACES: usize = 16;

/// A suspicious property of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oddity {
    /// Contains NaN values.
    NotANumber,
    /// Contains infinite values.
    Infinite,
    /// All zeros.
    Zero,
    /// One repeated nonzero value.
    Constant,
}

impl Oddity {
    /// Every oddity.
    pub const ALL: [Oddity; 4] = [Oddity::NotANumber, Oddity::Infinite, Oddity::Zero, Oddity::Constant];
}

/// The result of a scan.
#[derive(Clone, Debug, Default)]
pub struct Scan {
    /// Number of rows.
    pub rows: u64,
    /// Number of rows with each oddity, indexed by the oddity.
    pub odd: [u64; 4],
    /// The first positions of each: example and token.
    pub places: [Vec<(u64, u64)>; 4],
    /// Numbers of NaN and of infinite values.
    pub bad: [u64; 2],
    /// Per column, all magnitudes (bits without the sign, for types with a signed zero) OR-ed: 0 for a column of zeros.
    pub magnitudes: Vec<u64>,
    /// Per column, all differences to the first row OR-ed: 0 for a constant column.
    pub differences: Vec<u64>,
    /// Per example, a hash of its rows; equal bytes give equal hashes.
    pub hashes: Vec<u64>,
}

impl Scan {
    fn join(&mut self, next: Scan) {
        self.rows += next.rows;
        for k in 0..4 {
            self.odd[k] += next.odd[k];
            let room = PLACES - self.places[k].len().min(PLACES);
            self.places[k].extend(next.places[k].iter().take(room));
        }
        for k in 0..2 {
            self.bad[k] += next.bad[k];
        }
        for (all, mut part) in [(&mut self.magnitudes, next.magnitudes), (&mut self.differences, next.differences)] {
            // The first scan has no columns yet: take the other's memory.
            if all.len() < part.len() {
                std::mem::swap(all, &mut part);
            }
            all.iter_mut().zip(&part).for_each(|(a, b)| *a |= b);
        }
        self.hashes.extend(next.hashes);
    }
}

/// Scans all rows of a group.
pub fn scan(rows: &Rows, group: usize, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Scan> {
    let row = rows.row();
    let group = Group { rows, row, number: group, cast: Cast::between(row.dtype, row.dtype)?, staged: rows.decodes() };
    let mut all =
        if rows.reads_blocks() { group.in_blocks(progress, watch)? } else { group.in_waves(progress, watch)? };
    if all.magnitudes.len() != row.width {
        (all.magnitudes, all.differences) = (zeroed(row.width)?, zeroed(row.width)?);
    }
    Ok(all)
}

/// The rows of a group, and the way to read them.
struct Group<'a> {
    rows: &'a Rows,
    row: Row,
    number: usize,
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
        let (mut from, mut seen) = (0, 0);
        while first.is_none() && from < self.rows.examples() {
            let wave = self.wave(from, &mut *watch)?;
            first = self.first_row(&wave, &mut *watch)?;
            from += wave.ids.len() as u64;
            seen += wave.bytes;
        }
        // About as many bytes for each example as in the waves seen.
        let bytes = u128::from(seen) * u128::from(self.rows.examples()) / u128::from(from.max(1));
        let past_cache = bytes > u128::from(memory_limit() / 2);
        let first = first.unwrap_or_default();
        let (turns, spare) = (Turns::new(threads::num_threads()), Mutex::new(vec![]));
        let lock = || spare.lock().unwrap_or_else(PoisonError::into_inner);
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
            Ok(all)
        })
    }

    /// Other rows: those that must be decoded are read by all threads together, in large parts.
    fn in_waves(&self, progress: &mut dyn FnMut(u64), watch: Watch<'_>) -> Result<Scan> {
        let mut all = Scan::default();
        let mut first: Option<Vec<u8>> = None;
        let mut from = 0;
        while from < self.rows.examples() {
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
        Ok(all)
    }

    /// Parts of about [`PART`] bytes, or one longer example; ends after an error.
    fn parts(&self) -> impl Iterator<Item = Result<(Arc<Wave>, Range<usize>)>> + Send {
        let (mut from, mut failed) = (0, false);
        let waves = std::iter::from_fn(move || {
            if failed || from >= self.rows.examples() {
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
                    if stop.is_set() {
                        return Ok(());
                    }
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
            if stop.is_set() {
                return Ok(());
            }
            turns.take(|| {
                let mut rest = bytes;
                for i in e..end {
                    let (example, others) = rest.split_at(wave.counts[i] as usize * self.row.bytes);
                    wide(|| look.example(wave.ids[i] as u64, example));
                    rest = others;
                }
            });
            e = end;
        }
        Ok(())
    }

    fn groups(&self) -> Ints<'static> {
        Ints::One(self.number as i64)
    }

    /// The wave that begins at example `from`. Counting decodes shards, so it counts no more than will be read.
    fn wave(&self, from: u64, watch: Watch<'_>) -> Result<Wave> {
        let mut ids: Vec<i64> = (from as i64..(from + 4096).min(self.rows.examples()) as i64).collect();
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

    /// Reads `items` examples or rows, `rows` rows in total.
    fn read(&mut self, group: &Group<'_>, pick: Pick<'_>, items: usize, rows: usize, stop: &Stop) -> Result<&[u8]> {
        let out = &mut self.rows[..rows * group.row.bytes];
        group.rows.gather_in_blocks(group.groups(), pick, items, group.cast, out, (&mut self.reader, stop))?;
        Ok(&self.rows[..rows * group.row.bytes])
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

/// Elements as integers of their size.
trait ElementBits: Copy + bytemuck::AnyBitPattern {
    fn join(magnitudes: &mut [u64], differences: &mut [u64], mine: &Columns<Self>);
}

struct Columns<T> {
    first: Vec<T>,
    magnitudes: Vec<T>,
    differences: Vec<T>,
}

/// Properties of one row.
#[derive(Default)]
struct Facts {
    zero: bool,
    constant: bool,
    bad: bool,
}

macro_rules! bits {
    ($t:ty, $unsigned:ty, $row:ident) => {
        impl ElementBits for $t {
            fn join(magnitudes: &mut [u64], differences: &mut [u64], mine: &Columns<$t>) {
                for (all, part) in [(magnitudes, &mine.magnitudes), (differences, &mine.differences)] {
                    all.iter_mut().zip(part).for_each(|(a, b)| *a |= u64::from(*b as $unsigned));
                }
            }
        }

        /// Processes one row. Branch-free so that it vectorises; signed, because SSE2 compares signed integers. `mask`
        /// excludes a bit that is only a sign.
        #[inline(always)]
        fn $row(row: &[$t], columns: &mut Columns<$t>, mask: $t, infinity: $t) -> Facts {
            let head = row.first().copied().unwrap_or(0);
            let (mut any, mut varies, mut bad) = (0, 0, 0);
            let columns = columns.magnitudes.iter_mut().zip(&mut columns.differences).zip(&columns.first);
            for (x, ((magnitudes, differences), first)) in row.iter().zip(columns) {
                let magnitude = *x & mask;
                any |= magnitude;
                varies |= *x ^ head;
                bad |= if magnitude >= infinity { -1 } else { 0 };
                *magnitudes |= magnitude;
                *differences |= *x ^ *first;
            }
            Facts { zero: any == 0, constant: varies == 0, bad: bad != 0 }
        }
    };
}

bits!(i8, u8, row_of_8);
bits!(i16, u16, row_of_16);
bits!(i32, u32, row_of_32);
bits!(i64, u64, row_of_64);

enum Kernel {
    Of8(Columns<i8>),
    Of16(Columns<i16>),
    Of32(Columns<i32>),
    Of64(Columns<i64>),
}

/// The interpretation of an element's bits.
#[derive(Clone, Copy)]
struct Meaning {
    /// The bits that distinguish it from zero: all but the sign, for types with a signed zero.
    mask: i64,
    /// Magnitudes from here on are infinite or NaN; `i64::MAX` if there are none.
    infinity: i64,
    /// Bytes of a number; half an element for complex types.
    number: usize,
    /// For one-byte types: 1 for NaN, 2 for infinity.
    bytes: Option<&'static [u8; 256]>,
    /// Whether the type has a zero.
    zero: bool,
}

/// A table of a type's bytes: 1 for NaN, 2 for infinity.
const fn bytes_of(nan: &[(u8, u8)], infinite: &[u8]) -> [u8; 256] {
    let mut made = [0; 256];
    let mut k = 0;
    while k < nan.len() {
        let mut x = nan[k].0 as usize;
        while x <= nan[k].1 as usize {
            made[x] = 1;
            x += 1;
        }
        k += 1;
    }
    k = 0;
    while k < infinite.len() {
        made[infinite[k] as usize] = 2;
        k += 1;
    }
    made
}

// Micikevicius et al., "FP8 Formats for Deep Learning", 2022; OCP Microscaling Formats 1.0 for E8M0; FNUZ: the negative zero
// is the only NaN.
static E5M2: [u8; 256] = bytes_of(&[(0x7d, 0x7f), (0xfd, 0xff)], &[0x7c, 0xfc]);
static E4M3: [u8; 256] = bytes_of(&[(0x7f, 0x7f), (0xff, 0xff)], &[]);
static FNUZ: [u8; 256] = bytes_of(&[(0x80, 0x80)], &[]);
static E8M0: [u8; 256] = bytes_of(&[(0xff, 0xff)], &[]);

impl Meaning {
    fn of(dtype: DType) -> Meaning {
        let size = dtype.size().unwrap_or(1);
        let signed = i64::MAX >> (64 - 8 * size.min(8));
        let number = Meaning { mask: -1, infinity: i64::MAX, number: size, bytes: None, zero: true };
        let float = |infinity| Meaning { mask: signed, infinity, ..number };
        match dtype {
            DType::F16 => float(0x7c00),
            DType::BF16 => float(0x7f80),
            DType::F32 => float(0x7f80_0000),
            DType::F64 => float(0x7ff0_0000_0000_0000),
            DType::C64 => Meaning { mask: 0x7fff_ffff_7fff_ffff, infinity: 0x7f80_0000, number: 4, ..number },
            DType::F8E5M2 => Meaning { mask: signed, bytes: Some(&E5M2), ..number },
            DType::F8E4M3 => Meaning { mask: signed, bytes: Some(&E4M3), ..number },
            DType::F8E4M3Fnuz | DType::F8E5M2Fnuz => Meaning { bytes: Some(&FNUZ), ..number },
            DType::F8E8M0 => Meaning { bytes: Some(&E8M0), zero: false, ..number },
            _ => number,
        }
    }

    /// The numbers of NaN and of infinite values in a row.
    fn count(&self, row: &[u8]) -> (u64, u64) {
        if let Some(bytes) = self.bytes {
            let of = |kind: u8| row.iter().filter(|b| bytes[usize::from(**b)] == kind).count() as u64;
            return (of(1), of(2));
        }
        count_bad(row, self.number, self.infinity)
    }
}

/// One thread's scan of some rows.
struct Look {
    kernel: Kernel,
    meaning: Meaning,
    row_bytes: usize,
    width: usize,
    aligned: Vec<u64>,
    found: Scan,
}

fn columns<T: ElementBits>(row: &[u8], width: usize) -> Result<Columns<T>> {
    let mut first = zeroed::<T>(width)?;
    if row.len() == width * size_of::<T>() {
        let elements = row.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned);
        first.iter_mut().zip(elements).for_each(|(to, element)| *to = element);
    }
    Ok(Columns { first, magnitudes: zeroed(width)?, differences: zeroed(width)? })
}

impl Look {
    fn new(dtype: DType, width: usize, first: &[u8]) -> Result<Look> {
        let size = dtype.size().unwrap_or(1);
        let kernel = match size {
            1 => Kernel::Of8(columns(first, width)?),
            2 => Kernel::Of16(columns(first, width)?),
            4 => Kernel::Of32(columns(first, width)?),
            // Wider elements (complex numbers) are scanned as halves.
            n => Kernel::Of64(columns(first, width * n / 8)?),
        };
        let meaning = Meaning::of(dtype);
        Ok(Look { kernel, meaning, row_bytes: width * size, width, aligned: vec![], found: Scan::default() })
    }

    #[inline(always)]
    fn example(&mut self, example: u64, bytes: &[u8]) {
        let mut hash = RowsHash::new();
        self.rows(example, 0, bytes, &mut hash);
        self.found.hashes.push(hash.done());
    }

    /// Scans the rows of an example from token `first` on.
    #[inline(always)]
    fn rows(&mut self, example: u64, first: u64, bytes: &[u8], hash: &mut RowsHash) {
        for (token, row) in (first..).zip(bytes.chunks_exact(self.row_bytes.max(1))) {
            hash.add(row);
            let facts = self.row(row);
            self.found.rows += 1;
            let mut odd = |oddity: Oddity| {
                let k = oddity as usize;
                self.found.odd[k] += 1;
                if self.found.places[k].len() < PLACES {
                    self.found.places[k].push((example, token));
                }
            };
            if facts.zero {
                odd(Oddity::Zero);
            } else if facts.constant && self.width > 1 {
                odd(Oddity::Constant);
            }
            if facts.bad {
                let (nan, infinite) = self.meaning.count(row);
                if nan > 0 {
                    odd(Oddity::NotANumber);
                }
                if infinite > 0 {
                    odd(Oddity::Infinite);
                }
                self.found.bad[0] += nan;
                self.found.bad[1] += infinite;
            }
        }
    }

    #[inline(always)]
    fn row(&mut self, row: &[u8]) -> Facts {
        // Rows of a safetensors file may be unaligned.
        let row = if row.as_ptr().addr().is_multiple_of(8) {
            row
        } else {
            self.aligned.resize(row.len().div_ceil(8), 0);
            let place = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut self.aligned)[..row.len()];
            place.copy_from_slice(row);
            place
        };
        let Meaning { mask, infinity, number, bytes, zero } = self.meaning;
        // In a type without infinities the largest magnitude is a normal value.
        let floats = infinity != i64::MAX;
        let facts = match &mut self.kernel {
            Kernel::Of8(c) => row_of_8(bytemuck::cast_slice(row), c, mask as i8, i8::MAX),
            Kernel::Of16(c) => row_of_16(bytemuck::cast_slice(row), c, mask as i16, infinity.min(0x7fff) as i16),
            Kernel::Of32(c) => row_of_32(bytemuck::cast_slice(row), c, mask as i32, infinity.min(0x7fff_ffff) as i32),
            Kernel::Of64(c) => row_of_64(bytemuck::cast_slice(row), c, mask, infinity),
        };
        let bad = match bytes {
            Some(bytes) => row.iter().fold(0, |any, b| any | bytes[usize::from(*b)]) != 0,
            // For complex elements, the halves are counted one by one.
            None => floats && (facts.bad || number != self.row_bytes / self.width.max(1)),
        };
        Facts { zero: facts.zero && zero, bad, ..facts }
    }

    fn done(mut self) -> Result<Scan> {
        (self.found.magnitudes, self.found.differences) = (zeroed(self.width)?, zeroed(self.width)?);
        let (m, d) = (&mut self.found.magnitudes, &mut self.found.differences);
        match &self.kernel {
            Kernel::Of8(c) => ElementBits::join(m, d, c),
            Kernel::Of16(c) => ElementBits::join(m, d, c),
            Kernel::Of32(c) => ElementBits::join(m, d, c),
            Kernel::Of64(c) => ElementBits::join(m, d, c),
        }
        if !self.meaning.zero && self.found.rows > 0 {
            // The type has no zero, so no column is zero: set a bit that no element uses.
            m.iter_mut().for_each(|m| *m |= 1 << 8);
        }
        Ok(self.found)
    }
}

/// The numbers of NaN and of infinite values in a row.
fn count_bad(row: &[u8], size: usize, infinity: i64) -> (u64, u64) {
    let (mut nan, mut infinite) = (0, 0);
    for element in row.chunks_exact(size) {
        let mut bits = [0; 8];
        bits[..size].copy_from_slice(element);
        let magnitude = i64::from_le_bytes(bits) & (i64::MAX >> (64 - 8 * size));
        nan += u64::from(magnitude > infinity);
        infinite += u64::from(magnitude == infinity);
    }
    (nan, infinite)
}

/// Four lanes of multiply and rotate: fast, and good enough to find examples worth comparing.
struct RowsHash([u64; 4]);

impl RowsHash {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

    fn new() -> RowsHash {
        RowsHash([1, 2, 3, 4].map(|k| RowsHash::ODD.wrapping_mul(k)))
    }

    #[inline(always)]
    fn add(&mut self, bytes: &[u8]) {
        let mix = |lane: &mut u64, word: u64| *lane = (*lane ^ word).wrapping_mul(RowsHash::ODD).rotate_left(29);
        let (whole, rest) = bytes.as_chunks::<32>();
        for block in whole {
            for (lane, word) in self.0.iter_mut().zip(block.as_chunks::<8>().0) {
                mix(lane, u64::from_le_bytes(*word));
            }
        }
        for (k, part) in rest.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..part.len()].copy_from_slice(part);
            mix(&mut self.0[k], u64::from_le_bytes(word));
        }
        // Include row boundaries: the same bytes cut into other rows are a different example.
        mix(&mut self.0[3], bytes.len() as u64);
    }

    fn done(&self) -> u64 {
        self.0.iter().fold(0, |all, lane| (all.rotate_left(23) ^ lane).wrapping_mul(RowsHash::ODD))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn look_at(dtype: DType, width: usize, rows: &[u8]) -> Scan {
        let size = width * dtype.size().unwrap();
        let mut look = Look::new(dtype, width, &rows[..size]).unwrap();
        look.example(0, rows);
        look.done().unwrap()
    }

    #[test]
    fn bytes_and_complex_numbers_that_are_no_numbers_are_found() {
        // (type, number of NaN bytes, number of infinite bytes), as ml_dtypes counts them.
        for (dtype, nan, infinite) in [
            (DType::F8E5M2, 6, 2),
            (DType::F8E4M3, 2, 0),
            (DType::F8E4M3Fnuz, 1, 0),
            (DType::F8E5M2Fnuz, 1, 0),
            (DType::F8E8M0, 1, 0),
            (DType::U8, 0, 0),
            (DType::I8, 0, 0),
        ] {
            let bytes: Vec<u8> = (0..=255).collect();
            let found = look_at(dtype, 256, &bytes);
            assert_eq!(found.bad, [nan, infinite], "{dtype:?}");
            assert_eq!(found.odd[..2], [u64::from(nan > 0), u64::from(infinite > 0)]);
        }
        let zeros = |dtype, bytes: &[u8]| look_at(dtype, 2, bytes).odd[Oddity::Zero as usize];
        assert_eq!([0x80, 0].map(|b| zeros(DType::F8E4M3, &[b, 0])), [1, 1]);
        assert_eq!([0x80, 0].map(|b| zeros(DType::F8E5M2Fnuz, &[b, 0])), [0, 1]);
        assert_eq!(zeros(DType::F8E8M0, &[0, 0]), 0);
        let complex = |values: [f32; 4]| look_at(DType::C64, 2, bytemuck::cast_slice(&values));
        assert_eq!(complex([1.0, f32::NAN, f32::INFINITY, f32::INFINITY]).bad, [1, 2]);
        assert_eq!(complex([-0.0, 0.0, 0.0, -0.0]).odd[Oddity::Zero as usize], 1);
        assert_eq!(complex([-1.0, 0.0, 0.0, -0.0]).bad, [0, 0]);
    }

    proptest! {
        /// Compares with a simple count.
        #[test]
        fn oddities_are_counted(
            values in prop::collection::vec(prop_oneof![
                3 => any::<f32>(), 2 => Just(0.0f32), 1 => Just(-0.0), 1 => Just(f32::NAN), 1 => Just(f32::NEG_INFINITY), 1 => Just(2.5)
            ], 5..200),
            width in 1usize..9,
            shift in 0usize..8,
        ) {
            let n = values.len() / width;
            prop_assume!(n > 0);
            let values = &values[..n * width];
            let mut bytes = vec![0; shift];
            bytes.extend_from_slice(bytemuck::cast_slice(values));
            let found = look_at(DType::F32, width, &bytes[shift..]);
            let rows: Vec<&[f32]> = values.chunks(width).collect();
            let count = |f: &dyn Fn(&[f32]) -> bool| rows.iter().filter(|r| f(r)).count() as u64;
            let zero = |r: &[f32]| r.iter().all(|x| *x == 0.0);
            let alike = |r: &[f32]| width > 1 && r.iter().all(|x| x.to_bits() == r[0].to_bits()) && !zero(r);
            prop_assert_eq!(found.rows, n as u64);
            prop_assert_eq!(found.odd[0], count(&|r| r.iter().any(|x| x.is_nan())));
            prop_assert_eq!(found.odd[1], count(&|r| r.iter().any(|x| x.is_infinite())));
            prop_assert_eq!(found.odd[2], count(&zero));
            prop_assert_eq!(found.odd[3], count(&alike));
            prop_assert_eq!(found.bad[0], values.iter().filter(|x| x.is_nan()).count() as u64);
            prop_assert_eq!(found.bad[1], values.iter().filter(|x| x.is_infinite()).count() as u64);
            for k in 0..width {
                prop_assert_eq!(found.magnitudes[k] == 0, rows.iter().all(|r| r[k] == 0.0));
                prop_assert_eq!(found.differences[k] == 0, rows.iter().all(|r| r[k].to_bits() == rows[0][k].to_bits()));
            }
        }

        #[test]
        fn sixteen_bits_and_eight(bits in prop::collection::vec(any::<u16>(), 4..64)) {
            let half = bits.iter().filter(|b| half::f16::from_bits(**b).is_nan()).count() as u64;
            let brain = bits.iter().filter(|b| half::bf16::from_bits(**b).is_infinite()).count() as u64;
            let bytes: Vec<u8> = bits.iter().flat_map(|b| b.to_le_bytes()).collect();
            prop_assert_eq!(look_at(DType::F16, bits.len(), &bytes).bad[0], half);
            prop_assert_eq!(look_at(DType::BF16, bits.len(), &bytes).bad[1], brain);
            prop_assert_eq!(look_at(DType::I16, bits.len(), &bytes).bad, [0, 0]);
            prop_assert_eq!(look_at(DType::U8, bytes.len(), &bytes).bad, [0, 0]);
        }

        /// Compares with reading each element as its own type.
        #[test]
        fn integers_have_no_sign_to_leave_out(bytes in prop::collection::vec(prop_oneof![Just(0u8), Just(0x80), any::<u8>()], 8..40)) {
            let bytes = &bytes[..bytes.len() / 8 * 8];
            for dtype in [DType::Bool, DType::U8, DType::I8, DType::U16, DType::I16, DType::U32, DType::I32, DType::U64, DType::I64] {
                let size = dtype.size().unwrap();
                let found = look_at(dtype, 8 / size, bytes);
                let zeros = bytes.chunks(8).filter(|row| row.iter().all(|b| *b == 0)).count() as u64;
                prop_assert_eq!(found.odd[Oddity::Zero as usize], zeros);
                prop_assert_eq!(found.bad, [0, 0]);
                for column in 0..8 / size {
                    let dead = bytes.chunks(8).all(|row| row[column * size..][..size].iter().all(|b| *b == 0));
                    prop_assert_eq!(found.magnitudes[column] == 0, dead);
                }
            }
        }

        #[test]
        fn one_bit_makes_another_hash(bytes in prop::collection::vec(any::<u8>(), 1..300), at: prop::sample::Index, bit in 0u8..8) {
            let of = |b: &[u8]| { let mut h = RowsHash::new(); h.add(b); h.done() };
            let mut other = bytes.clone();
            other[at.index(bytes.len())] ^= 1 << bit;
            prop_assert_ne!(of(&bytes), of(&other));
        }
    }
}
