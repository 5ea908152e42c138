//! A field of a token cache: rows of variable length, one after another, in one array or in the arrays of many shards.
//!
//! The array `offsets` contains the end of each row in the array `data`; its element 0 is the number of rows
//! (`formats/levanter.md` 1.3). Rows and elements are numbered across all shards.

use std::collections::HashMap;
use std::sync::Arc;

use super::array::{BlockCache, HeldFile, StagedFiles, TokenArray};
use super::ledger::LedgerState;
use super::meta::{METADATA, Meta};
use super::staged::{Needed, first_of, stage};
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::files::open::View;
use crate::location::Location;
use crate::source::slots::Slots;
use crate::source::{Access, Store, Wishes};
use crate::threads::{self, Stop, Watch};

/// A shard of a field.
#[derive(Clone, Debug)]
pub struct FieldShard {
    /// The folder with `offsets` and `data`.
    pub folder: Location,
    /// Rows and elements, if a ledger has them; otherwise the array's counts are used.
    pub counts: Option<(u64, u64)>,
}

/// One of a shard's arrays.
#[derive(Clone, Copy)]
enum ShardArray {
    Offsets = 0,
    Data = 1,
    Shapes = 2,
}

impl ShardArray {
    fn name(self) -> &'static str {
        match self {
            ShardArray::Offsets => "offsets",
            ShardArray::Data => "data",
            ShardArray::Shapes => "shapes",
        }
    }
}

/// An open field.
#[derive(Debug)]
pub struct Field {
    parts: Vec<FieldShard>,
    /// Rows before each part, and in total.
    rows: Vec<u64>,
    /// Elements before each part, and in total.
    elements: Vec<u64>,
    arrays: Slots<TokenArray>,
    store: Arc<dyn Store>,
    cache: Arc<BlockCache>,
    ledger: Arc<LedgerState>,
    dtype: DType,
}

/// The arrays of the last read; see [`HeldFile`].
#[derive(Debug, Default)]
pub struct Cursor {
    offsets: Last,
    data: Last,
}

#[derive(Debug, Default)]
struct Last {
    array: Option<(usize, Arc<TokenArray>)>,
    held: HeldFile,
}

impl Cursor {
    /// Reads from fetched bytes.
    pub(super) fn over(staged: &Arc<StagedFiles>) -> Cursor {
        let last = || Last { array: None, held: HeldFile::over(staged) };
        Cursor { offsets: last(), data: last() }
    }
}

impl Last {
    fn get(
        &mut self,
        part: usize,
        open: impl FnOnce() -> Result<Arc<TokenArray>>,
    ) -> Result<(&TokenArray, &mut HeldFile)> {
        if !matches!(&self.array, Some((held, _)) if *held == part) {
            self.array = Some((part, open()?));
        }
        match &self.array {
            Some((_, array)) => Ok((array, &mut self.held)),
            None => Err(Error::new(Kind::Internal, "an array that is not open")),
        }
    }
}

/// A range of elements, numbered across all shards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ElementRange {
    /// The first.
    pub start: u64,
    /// One past the last.
    pub end: u64,
}

impl ElementRange {
    /// Number of elements.
    pub fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.start == self.end
    }
}

/// Called for the elements of a part: their array, the first index in it, their number, and the number before them.
type ShardVisitor<'a> = &'a mut dyn FnMut(&TokenArray, &mut HeldFile, u64, usize, usize) -> Result<()>;

impl Field {
    /// Opens a field in a store. Opens no file of parts with known counts; reads the `offsets` of the others.
    pub fn open(
        parts: Vec<FieldShard>,
        store: Arc<dyn Store>,
        cache: Arc<BlockCache>,
        ledger: LedgerState,
    ) -> Result<Field> {
        // Arrays of a slow store are kept: the data fetched for a batch is found by their numbers.
        let arrays = match store.wishes() {
            None => Slots::new(3 * parts.len() as u64),
            Some(_) => Slots::without_descriptors(3 * parts.len()),
        };
        let (rows, elements, ledger) = (vec![0], vec![0], Arc::new(ledger));
        let mut field = Field { parts, rows, elements, arrays, store, cache, ledger, dtype: DType::I64 };
        for part in 0..field.parts.len() {
            let (rows, elements) = match field.parts[part].counts {
                Some(counts) => counts,
                None => {
                    let offsets = field.array(part, ShardArray::Offsets)?;
                    let rows = one(&offsets, 0)?;
                    check_files(&offsets, rows)?;
                    (rows, if rows == 0 { 0 } else { one(&offsets, rows)? })
                }
            };
            let (all_rows, all) = (field.rows[part].checked_add(rows), field.elements[part].checked_add(elements));
            let (Some(all_rows), Some(all)) = (all_rows.filter(|n| *n < MOST), all.filter(|n| *n < MOST)) else {
                return Err(Error::new(
                    Kind::Format,
                    format!("expected fewer than 2^60 rows and elements, found {rows} and {elements} more"),
                )
                .at(&field.parts[part].folder));
            };
            field.rows.push(all_rows);
            field.elements.push(all);
        }
        // The first part with elements determines the dtype; the others are compared with it when they are opened.
        let typed = (0..field.parts.len()).find(|p| field.elements[p + 1] > field.elements[*p]).unwrap_or(0);
        if !field.parts.is_empty() {
            field.dtype = Meta::read(&*field.store, &field.parts[typed].folder.join(ShardArray::Data.name()))?.dtype;
        }
        field.ledger.check(&*field.store)?;
        Ok(field)
    }

    /// Whether reading its store waits for a network.
    pub fn is_far(&self) -> bool {
        self.store.wishes().is_some()
    }

    /// The best way to read its store; `None` for local files.
    pub(super) fn wishes(&self) -> Option<Wishes> {
        self.store.wishes()
    }

    /// Fetches the data of ranges of elements (the first element and the number of elements); returns the number of ranges
    /// covered, at least one.
    pub(super) fn stage(
        &self,
        ranges: &[(u64, usize)],
        wishes: &Wishes,
        staged: &mut StagedFiles,
        watch: Watch<'_>,
    ) -> Result<usize> {
        self.stage_array(ShardArray::Data, &self.elements, ranges, wishes, staged, watch)
    }

    /// Fetches the bounds of rows (the first row and the number of rows); returns the number of ranges covered, at least
    /// one.
    pub(super) fn stage_bounds(
        &self,
        rows: &[(u64, usize)],
        wishes: &Wishes,
        staged: &mut StagedFiles,
        watch: Watch<'_>,
    ) -> Result<usize> {
        self.stage_array(ShardArray::Offsets, &self.rows, rows, wishes, staged, watch)
    }

    fn stage_array(
        &self,
        which: ShardArray,
        starts: &[u64],
        ranges: &[(u64, usize)],
        wishes: &Wishes,
        staged: &mut StagedFiles,
        watch: Watch<'_>,
    ) -> Result<usize> {
        let all = starts[self.parts.len()];
        let ranges = first_of(ranges, None);
        let mut pieces = vec![];
        for (range, (start, n)) in ranges.iter().enumerate() {
            // Ranges out of bounds are errors of the read.
            let end = start.saturating_add(*n as u64).min(all);
            let mut at = *start;
            while at < end {
                let part = Self::part_of(starts, at);
                let take = end.min(starts[part + 1]) - at;
                pieces.push((part, at - starts[part], take as usize, range));
                at += take;
            }
        }
        let mut parts: Vec<usize> = pieces.iter().map(|(part, ..)| *part).collect();
        parts.sort_unstable();
        parts.dedup();
        let open = |_: usize, part: usize, _: &Stop| self.array(part, which);
        let arrays = threads::map_each_waiting(parts.iter().copied(), wishes.parallel, &open, &mut *watch)?;
        let arrays: HashMap<usize, Arc<TokenArray>> = parts.into_iter().zip(arrays).collect();
        let mut needed = vec![];
        for (part, first, n, range) in pieces {
            let Some(array) = arrays.get(&part).map(Arc::clone) else { continue };
            let numbers = match which {
                // As in `bounds_into`: the ends of rows, and the end of the previous row as the start of the first.
                ShardArray::Offsets if first == 0 => (1, n),
                ShardArray::Offsets => (first, n + 1),
                ShardArray::Data | ShardArray::Shapes => (first, n),
            };
            needed.push(Needed { array, numbers, range });
        }
        stage(&needed, ranges.len(), wishes, staged, watch)
    }

    /// Number of rows.
    pub fn num_rows(&self) -> u64 {
        self.rows[self.parts.len()]
    }

    /// Number of elements.
    pub fn num_elements(&self) -> u64 {
        self.elements[self.parts.len()]
    }

    /// The dtype of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The `shapes` folder of the first part that has rows; `None` for rows of one axis.
    #[expect(
        clippy::disallowed_methods,
        reason = "opening a near file takes a moment, and far ones are opened together"
    )]
    pub fn shapes_folder(&self) -> Result<Option<Location>> {
        let typed = (0..self.parts.len()).find(|p| self.rows[p + 1] > self.rows[*p]).unwrap_or(0);
        let Some(part) = self.parts.get(typed) else { return Ok(None) };
        let folder = part.folder.join(ShardArray::Shapes.name());
        let found = match self.store.wishes() {
            None => return Ok(self.store.look(&folder).is_ok().then_some(folder)),
            // Looking for a folder may take a listing, which some stores do not have.
            Some(_) => self.store.open(&folder.join(METADATA), Access::Once, Stop::never()),
        };
        match found {
            Ok(_) => Ok(Some(folder)),
            Err(error) if error.kind == Kind::NotFound => Ok(None),
            // Another error is not a sign of absence: rows of several axes would be read as flat rows.
            Err(error) => Err(error),
        }
    }

    fn array(&self, part: usize, which: ShardArray) -> Result<Arc<TokenArray>> {
        let number = (part * 3 + which as usize) as u64;
        self.arrays.get(number, || {
            let folder = self.parts[part].folder.join(which.name());
            let counts = self.parts[part].counts;
            let most = match which {
                ShardArray::Offsets | ShardArray::Shapes => counts.map(|c| c.0 + 1),
                ShardArray::Data => counts
                    .map(|c| c.1)
                    .or_else(|| Some(self.elements.get(part + 1)?.saturating_sub(self.elements[part]))),
            };
            let array = TokenArray::open(&self.store, folder, Arc::clone(&self.cache), most, Arc::clone(&self.ledger))?;
            match which {
                ShardArray::Data => self.check_part(part, &array)?,
                ShardArray::Offsets => self.check_rows(part, &array)?,
                ShardArray::Shapes => {}
            }
            Ok(array)
        })
    }

    /// Compares a shard's number of rows with the ledger's, when the shard is opened.
    fn check_rows(&self, part: usize, offsets: &TokenArray) -> Result<()> {
        let Some((rows, _)) = self.parts[part].counts else { return Ok(()) };
        let found = one(offsets, 0)?;
        if found == rows {
            return check_files(offsets, rows);
        }
        Err(Error::new(Kind::Format, format!("the ledger counts {rows} rows here, offsets[0] is {found}"))
            .at(offsets.folder()))
    }

    /// Compares a shard's dtype with the field's, and its number of elements with the ledger's, when the shard is opened.
    fn check_part(&self, part: usize, data: &TokenArray) -> Result<()> {
        if data.dtype() != self.dtype && self.elements[part + 1] > self.elements[part] {
            return Err(Error::new(
                Kind::Format,
                format!(
                    "has dtype {}, but the cache's first shard has {}",
                    data.dtype().numpy_name().unwrap_or_default(),
                    self.dtype.numpy_name().unwrap_or_default()
                ),
            )
            .at(data.folder()));
        }
        let Some((rows, elements)) = self.parts[part].counts else { return Ok(()) };
        let offsets = self.array(part, ShardArray::Offsets)?;
        let last = if rows == 0 { 0 } else { one(&offsets, rows)? };
        if last != elements {
            return Err(Error::new(
                Kind::Format,
                format!("the ledger counts {elements} elements here, the last row ends at {last}"),
            )
            .at(offsets.folder()));
        }
        Ok(())
    }

    fn part_of(starts: &[u64], at: u64) -> usize {
        starts.partition_point(|start| *start <= at) - 1
    }

    /// The start of row `first`, then the ends of rows `first` to `first + n - 1`, numbered across all shards.
    pub fn bounds(&self, cursor: &mut Cursor, first: u64, n: usize) -> Result<Vec<u64>> {
        let mut out = vec![];
        self.bounds_into(cursor, first, n, &mut out)?;
        Ok(out)
    }

    /// [`Field::bounds`] into a reused list.
    pub fn bounds_into(&self, cursor: &mut Cursor, first: u64, n: usize, out: &mut Vec<u64>) -> Result<()> {
        out.clear();
        let no_memory =
            |_| Error::new(Kind::NoMemory, format!("no memory for the bounds of {n} rows; read fewer at once"));
        let end = first.checked_add(n as u64).filter(|end| *end <= self.num_rows());
        let Some(end) = end else {
            return Err(Error::new(
                Kind::OutOfRange,
                format!("row {first} is out of range: the cache has {} rows", self.num_rows()),
            ));
        };
        if n == 0 {
            out.push(self.start_of(cursor, first)?);
            return Ok(());
        }
        out.try_reserve(n + 1).map_err(no_memory)?;
        let mut at = first;
        while at < end {
            let part = Self::part_of(&self.rows, at);
            let (base, local) = (self.elements[part], at - self.rows[part]);
            let take = (end.min(self.rows[part + 1]) - at) as usize;
            let (offsets, held) = cursor.offsets.get(part, || self.array(part, ShardArray::Offsets))?;
            // Row 0 of a part starts at 0, because element 0 is the number of rows. Others start at the end of the previous row.
            let with_start = local > 0 && out.is_empty();
            if local == 0 && out.is_empty() {
                out.push(base);
            }
            let (from, count) = if with_start { (local, take + 1) } else { (local + 1, take) };
            let (most, mut before) = (self.elements[part + 1] - base, out.last().map_or(base, |b| *b));
            if with_start {
                before = base;
            }
            let mut wrong: Option<(u64, u64)> = None;
            each_number(offsets, held, from, count, &mut |number, value| {
                let ends = base.wrapping_add(value);
                if (value > most || ends < before) && wrong.is_none() {
                    wrong = Some((number, value));
                }
                before = ends;
                out.push(ends);
            })?;
            if let Some((number, value)) = wrong {
                return Err(Error::new(
                    Kind::Format,
                    format!("element {number}: expected row ends in ascending order, up to {most}, found {value}"),
                )
                .at(offsets.folder()));
            }
            at += take as u64;
        }
        Ok(())
    }

    fn start_of(&self, cursor: &mut Cursor, row: u64) -> Result<u64> {
        if row == self.num_rows() {
            return Ok(self.num_elements());
        }
        Ok(self.bounds(cursor, row, 1)?[0])
    }

    /// The range of a row's elements.
    pub fn row(&self, cursor: &mut Cursor, row: u64) -> Result<ElementRange> {
        let bounds = self.bounds(cursor, row, 1)?;
        Ok(ElementRange { start: bounds[0], end: bounds[1] })
    }

    fn each_part(&self, last: &mut Last, start: u64, n: usize, each: ShardVisitor<'_>) -> Result<()> {
        let end = start.checked_add(n as u64).filter(|end| *end <= self.num_elements());
        let Some(end) = end else {
            return Err(Error::new(
                Kind::OutOfRange,
                format!(
                    "elements {start} to {} are out of range: the field has {}",
                    start.saturating_add(n as u64),
                    self.num_elements()
                ),
            ));
        };
        let mut at = start;
        while at < end {
            let part = Self::part_of(&self.elements, at);
            let take = (end.min(self.elements[part + 1]) - at) as usize;
            let (data, held) = last.get(part, || self.array(part, ShardArray::Data))?;
            each(data, held, at - self.elements[part], take, (at - start) as usize)?;
            at += take as u64;
        }
        Ok(())
    }

    /// Copies elements in the stored dtype.
    pub fn copy(&self, cursor: &mut Cursor, start: u64, out: &mut [u8]) -> Result<()> {
        let item = self.dtype.size().unwrap_or(1);
        self.each_part(&mut cursor.data, start, out.len() / item, &mut |data, held, from, n, before| {
            data.copy(held, from, &mut out[before * item..(before + n) * item])
        })
    }

    /// Elements as int32.
    pub fn int32(&self, cursor: &mut Cursor, start: u64, out: &mut [i32]) -> Result<()> {
        self.each_part(&mut cursor.data, start, out.len(), &mut |data, held, from, n, before| {
            data.int32(held, from, &mut out[before..before + n])
        })
    }

    /// Elements as float32.
    pub fn float32(&self, cursor: &mut Cursor, start: u64, out: &mut [f32]) -> Result<()> {
        self.each_part(&mut cursor.data, start, out.len(), &mut |data, held, from, n, before| {
            data.float32(held, from, &mut out[before..before + n])
        })
    }

    /// Calls `each` with the elements in order, in the stored dtype.
    pub fn each(&self, start: u64, n: usize, each: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let mut failed: Result<()> = Ok(());
        self.each_part(&mut Last::default(), start, n, &mut |data, held, from, n, _| {
            data.each(held, from, n, &mut |bytes, _| {
                if failed.is_ok() {
                    failed = each(bytes);
                }
            })
        })?;
        failed
    }

    /// A view of elements, if they are contiguous in a mapped file.
    pub fn view(&self, cursor: &mut Cursor, start: u64, n: usize) -> Result<Option<View>> {
        let mut found = None;
        self.each_part(&mut cursor.data, start, n, &mut |data, held, from, take, _| {
            if take == n {
                found = data.view(held, from, n)?;
            }
            Ok(())
        })?;
        Ok(found)
    }

    /// Prefetches the beginning of some elements into the processor's cache, if they are in the array of the last read.
    pub fn prefetch(&self, cursor: &Cursor, start: u64, n: usize) {
        if let Some((part, array)) = &cursor.data.array
            && (self.elements[*part]..self.elements[part + 1]).contains(&start)
        {
            array.prefetch(&cursor.data.held, start - self.elements[*part], n);
        }
    }

    /// Whether the data of these elements may have to be fetched; see [`TokenArray::is_doubtful`].
    pub fn is_doubtful(&self, cursor: &mut Cursor, start: u64, n: usize) -> bool {
        let mut is_doubtful = false;
        let _ = self.each_part(&mut cursor.data, start, n, &mut |data, held, from, n, _| {
            is_doubtful |= data.is_doubtful(held, from, n);
            Ok(())
        });
        is_doubtful
    }

    /// Whether these elements are stored as they are; see [`TokenArray::is_plain`].
    pub fn is_plain(&self, cursor: &mut Cursor, start: u64, n: usize) -> bool {
        let mut is_plain = true;
        let parts = self.each_part(&mut cursor.data, start, n, &mut |data, held, from, n, _| {
            is_plain &= data.is_plain(held, from, n);
            Ok(())
        });
        is_plain && parts.is_ok()
    }

    /// Starts reading the data of these elements, unless it is cached. A hint.
    pub fn will_need(&self, cursor: &mut Cursor, start: u64, n: usize) {
        let _ = self.each_part(&mut cursor.data, start, n, &mut |data, held, from, n, _| {
            data.will_need(held, from, n);
            Ok(())
        });
    }

    /// The sizes of a row's axes without the last, for fields whose rows have several axes.
    pub fn shape(&self, row: u64) -> Result<Vec<u64>> {
        if row >= self.num_rows() {
            return Err(Error::new(
                Kind::OutOfRange,
                format!("row {row} is out of range: the cache has {} rows", self.num_rows()),
            ));
        }
        let part = Self::part_of(&self.rows, row);
        let shapes = self.array(part, ShardArray::Shapes)?;
        let width = shapes.meta().width;
        let first = (row - self.rows[part]).checked_mul(width);
        let first = first.ok_or_else(|| Error::new(Kind::Format, "a shape beyond 2^64").at(shapes.folder()))?;
        let mut out = vec![];
        each_number(&shapes, &mut HeldFile::default(), first, width as usize, &mut |_, value| out.push(value))?;
        Ok(out)
    }

    /// The first missing file of each array, and the number of missing files. Of a writer that leaves out no file, only parts without
    /// counts in the ledger are opened for this: the first read of others raises.
    pub fn missing_files(&self) -> Result<Vec<(Location, u64)>> {
        let mut missing = vec![];
        let is_counted = |part: usize| self.parts[part].counts.is_some();
        for part in (0..self.parts.len()).filter(|part| !is_counted(*part) || !self.ledger.is_complete) {
            let rows = self.rows[part + 1] - self.rows[part];
            let elements = self.elements[part + 1] - self.elements[part];
            // An array of a shard without rows may have no file.
            for (which, n) in
                [(ShardArray::Offsets, if rows == 0 { 0 } else { rows + 1 }), (ShardArray::Data, elements)]
            {
                let array = match self.array(part, which) {
                    Err(_) if is_counted(part) => continue, // an error of its first read
                    array => array?,
                };
                let gaps = array.gaps(&array.existing()?, n);
                if let Some(first) = gaps.first() {
                    let files = gaps.iter().map(|gap| gap.end - gap.start).sum();
                    missing.push((array.meta().file(array.folder(), first.start), files));
                }
            }
        }
        Ok(missing)
    }

    /// Reports every problem of the field's files; see [`TokenArray::check`].
    pub fn check(&self, deep: bool, report: &mut dyn FnMut(Error, bool), watch: Watch<'_>) -> Result<()> {
        for part in 0..self.parts.len() {
            let counts = [
                (ShardArray::Offsets, self.rows[part + 1] - self.rows[part] + 1),
                (ShardArray::Data, self.elements[part + 1] - self.elements[part]),
            ];
            for (which, elements) in counts {
                match self.array(part, which) {
                    Ok(array) if elements > 1 || matches!(which, ShardArray::Data) => {
                        array.check(elements, deep, report, watch)?;
                    }
                    Ok(_) => {}
                    Err(error) => report(error, false),
                }
            }
        }
        // Check that row ends are in ascending order, block by block.
        const ROWS: u64 = 1 << 18;
        const MOST_REPORTED: usize = 100;
        let (mut cursor, mut bounds, mut first, mut reported) = (Cursor::default(), vec![], 0, 0);
        while first < self.num_rows() && reported < MOST_REPORTED {
            if watch() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let n = (self.num_rows() - first).min(ROWS);
            if let Err(error) = self.bounds_into(&mut cursor, first, n as usize, &mut bounds) {
                report(error, false);
                reported += 1;
            }
            first += n;
        }
        Ok(())
    }
}

/// Calls `each` with the numbers of an array of offsets or shapes, in any integer dtype.
fn each_number(
    array: &TokenArray,
    held: &mut HeldFile,
    from: u64,
    n: usize,
    each: &mut dyn FnMut(u64, u64),
) -> Result<()> {
    let dtype = array.dtype();
    let wide = |bytes: &[u8], at: &mut u64, each: &mut dyn FnMut(u64, u64)| {
        macro_rules! numbers {
            ($t:ty) => {
                for b in bytes.as_chunks::<{ size_of::<$t>() }>().0 {
                    // A negative number becomes far too large, and is rejected as such.
                    each(*at, <$t>::from_le_bytes(*b) as i64 as u64);
                    *at += 1;
                }
            };
        }
        match dtype {
            DType::I64 => numbers!(i64),
            DType::U64 => numbers!(u64),
            DType::I32 => numbers!(i32),
            DType::U32 => numbers!(u32),
            _ => return false,
        }
        true
    };
    let (mut at, mut known) = (from, true);
    array.each(held, from, n, &mut |bytes, _| known &= wide(bytes, &mut at, each))?;
    if known {
        return Ok(());
    }
    Err(Error::new(Kind::Format, format!("expected integers, found {}", dtype.name())).at(array.folder()))
}

/// Limit on the numbers of rows and elements of a field.
const MOST: u64 = 1 << 60;

/// Fails if the files of `offsets` cannot contain this many rows: only files of zeros may be missing, and row ends are not 0. So
/// existing files bound the work of reading all rows.
fn check_files(offsets: &TokenArray, rows: u64) -> Result<()> {
    let outer = offsets.meta().outer;
    if rows < outer {
        return Ok(());
    }
    let files = match offsets.existing() {
        // A web server. Its requests for missing files are what bounds the work.
        Err(error) if error.kind == Kind::Unsupported => return Ok(()),
        found => found?.len() as u64,
    };
    if rows / outer < files {
        return Ok(());
    }
    let detail =
        format!("element 0 counts {rows} rows, expected {} files of {outer} elements, found {files}", rows / outer + 1);
    Err(Error::new(Kind::Format, detail).at(offsets.folder()))
}

fn one(array: &TokenArray, at: u64) -> Result<u64> {
    let mut found = 0;
    each_number(array, &mut HeldFile::default(), at, 1, &mut |_, value| found = value)?;
    if found > 1 << 60 {
        return Err(Error::new(Kind::Format, format!("element {at}: expected a count up to 2^60, found {found}"))
            .at(array.folder()));
    }
    Ok(found)
}
