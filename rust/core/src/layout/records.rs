//! Addresses from an index of fixed-size records, one per example, that is mapped and read on demand: opening reads no record.
//! This is DeepSpec's target cache (`deepspec/data/target_cache_dataset.py` at afdfa7c, and two forks).
//!
//! ```text
//! record, 56 bytes:  number u64, file u32, tokens u32, offsets 5 x u64
//!         64 bytes:  number u64, file u32, tokens u32, start u32, held u32, offsets 5 x u64
//!         60 bytes:  number u64, file u32, tokens u32, held u32, offsets 5 x u64
//! example, back to back in its file from the first offset on:
//!         three columns of tokens x 4, 1 and 1 bytes
//!         states    held x layers x row_bytes
//!         last      held x row_bytes, unless the index has none
//! ```
//!
//! All integers are little-endian; record i has number i. `held` is `tokens`, unless an example's states are split over several
//! index files ([`RecordSplit`]): each of them has a record for every example, with all columns and a share of the states.
//!
//! Every use of a record checks it: number, file, length, share, all five offsets, and the example's end against the file's size.
//! Offsets with gaps or in another order are refused: readers that trust them return other tensors' bytes as states.

use std::sync::Arc;

use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::memory;
use crate::number::to_usize;
use crate::source::{Access, Source, Store};
use crate::threads::Context;

/// Bytes per token of the three columns.
pub const COLUMNS: [u64; 3] = [4, 1, 1];
/// Names of the fields of a record in messages, from the first offset on.
const OFFSETS: [&str; 5] = [
    "input_ids_offset",
    "attention_mask_offset",
    "loss_mask_offset",
    "target_hidden_states_offset",
    "target_last_hidden_states_offset",
];
/// Index files per dataset, at most: a context is split over the GPUs of a few machines.
const MOST_SPLITS: usize = 1024;
/// Bytes of an index that is not mapped, at most: 76 million examples.
const MOST_READ: u64 = 4 << 30;

/// The states' split over several index files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordSplit {
    /// Index r has the r-th of equal shares of the tokens; the first shares have one token more where they cannot be equal.
    Contiguous,
    /// With n index files, the tokens are padded and cut into 2n chunks: index r has chunk r, then chunk 2n - 1 - r.
    HeadTail,
}

/// The offsets of the fields that differ between versions of a record.
#[derive(Clone, Copy, Debug)]
struct RecordShape {
    bytes: usize,
    start: Option<usize>,
    held: Option<usize>,
    offsets: usize,
}

impl RecordShape {
    fn of(bytes: usize) -> Option<RecordShape> {
        let (start, held, offsets) = match bytes {
            56 => (None, None, 16),
            60 => (None, Some(16), 20),
            64 => (Some(16), Some(20), 24),
            _ => return None,
        };
        Some(RecordShape { bytes, start, held, offsets })
    }
}

/// An index file.
#[derive(Debug)]
struct IndexFile {
    source: Box<dyn Source>,
    /// Its bytes, if they are not mapped.
    read: Option<Vec<u8>>,
}

impl IndexFile {
    fn open(store: &dyn Store, location: &Location, bytes: u64, context: &mut Context<'_>) -> Result<IndexFile> {
        let source = store.open(location, Access::Growing, context.stop())?;
        let found = source.size();
        if found != bytes {
            let detail = format!("expected an index of {bytes} bytes, found {found}");
            return Err(Error::new(Kind::Format, detail).at(location).byte(found.min(bytes)));
        }
        let read = match source.bytes() {
            Some(_) => None,
            None if bytes > MOST_READ => {
                let detail = format!(
                    "expected an index of at most {MOST_READ} bytes to read into memory, found {bytes}; use io=\"mmap\""
                );
                return Err(Error::new(Kind::Unsupported, detail).at(location));
            }
            None => {
                let mut read = memory::bytes(bytes).map_err(|e| e.at(location))?;
                source.read_long(0, &mut read, context)?;
                Some(read)
            }
        };
        Ok(IndexFile { source, read })
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        self.read.as_deref().or_else(|| self.source.bytes()).unwrap_or_default()
    }
}

/// The sizes that all examples share.
#[derive(Clone, Debug)]
pub struct RecordSizes {
    /// Number of examples.
    pub examples: u64,
    /// Bytes of a record: 56, 60 or 64.
    pub record_bytes: usize,
    /// Sizes of the files, in bytes.
    pub files: Vec<u64>,
    /// Layers side by side in the states of a token.
    pub layers: u64,
    /// Bytes of one layer's row.
    pub row_bytes: u64,
    /// Whether a last row per token follows the states.
    pub last: bool,
    /// The split, if there are several index files.
    pub split: RecordSplit,
}

/// An open index.
#[derive(Debug)]
pub struct RecordIndex {
    indexes: Vec<IndexFile>,
    shape: RecordShape,
    sizes: RecordSizes,
}

/// A checked record.
#[derive(Clone, Copy, Debug)]
struct Record {
    file: u64,
    tokens: u64,
    offsets: [u64; 5],
}

#[inline]
fn number<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes.get(at..at + N).and_then(|b| b.try_into().ok()).unwrap_or([0; N])
}

#[inline]
fn int(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32::from_le_bytes(number(bytes, at)))
}

#[inline]
fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(number(bytes, at))
}

impl RecordIndex {
    /// Opens index files of one dataset; several only if the states are split. Reads no record from a mapped file.
    pub fn open(
        store: &dyn Store,
        locations: &[Location],
        sizes: RecordSizes,
        context: &mut Context<'_>,
    ) -> Result<RecordIndex> {
        let refuse = |what: String| Err(Error::new(Kind::Format, what));
        let Some(shape) = RecordShape::of(sizes.record_bytes) else {
            return refuse(format!("expected records of 56, 60 or 64 bytes, found {}", sizes.record_bytes));
        };
        let bytes = sizes.examples.checked_mul(sizes.record_bytes as u64).filter(|n| *n < 1 << 48);
        let Some(bytes) = bytes.filter(|_| sizes.files.len() < 1 << 22) else {
            return refuse(format!("{} examples, {} files: too many", sizes.examples, sizes.files.len()));
        };
        if locations.is_empty() || locations.len() > MOST_SPLITS || (locations.len() > 1 && shape.held.is_none()) {
            return refuse(format!(
                "expected 1 index file, or 2 to {MOST_SPLITS} with larger records, found {}",
                locations.len()
            ));
        }
        let row = sizes.row_bytes.checked_mul(sizes.layers.saturating_add(1)).filter(|n| *n < 1 << 32);
        if row.is_none() || sizes.layers == 0 || sizes.row_bytes == 0 {
            return refuse(format!(
                "expected states of 1 byte to 4 GiB per token, found {} x {}",
                sizes.layers, sizes.row_bytes
            ));
        }
        let indexes = locations.iter().map(|at| IndexFile::open(store, at, bytes, context)).collect::<Result<_>>()?;
        Ok(RecordIndex { indexes, shape, sizes })
    }

    /// The sizes.
    pub fn sizes(&self) -> &RecordSizes {
        &self.sizes
    }

    fn unchanged(&self) -> Result<()> {
        self.indexes.iter().filter(|index| index.read.is_none()).try_for_each(|index| index.source.unchanged())
    }

    /// Tokens of chunks in the head-tail split.
    fn chunk(&self, tokens: u64) -> u64 {
        tokens.div_ceil(2 * self.indexes.len() as u64)
    }

    /// The first token and the number of rows that an index has of an example.
    fn share(&self, index: usize, tokens: u64) -> (u64, u64) {
        let (n, r) = (self.indexes.len() as u64, index as u64);
        match self.sizes.split {
            _ if n == 1 => (0, tokens),
            RecordSplit::Contiguous => (r * (tokens / n) + r.min(tokens % n), tokens / n + u64::from(r < tokens % n)),
            RecordSplit::HeadTail => (0, 2 * self.chunk(tokens)),
        }
    }

    /// Reads and checks a record.
    #[inline]
    fn record(&self, index: usize, example: u64) -> Result<Record> {
        let shape = &self.shape;
        let bytes = self.indexes[index].bytes();
        let at = to_usize(example) * shape.bytes;
        let bytes = bytes.get(at..at + shape.bytes).unwrap_or_default();
        let file = int(bytes, 8);
        let tokens = int(bytes, 12);
        let offsets = std::array::from_fn(|i| long(bytes, shape.offsets + 8 * i));
        let record = Record { file, tokens, offsets };
        let (start, held) = self.share(index, tokens);
        let fits = !bytes.is_empty()
            && long(bytes, 0) == example
            && shape.start.is_none_or(|at| int(bytes, at) == start)
            && shape.held.is_none_or(|at| int(bytes, at) == held)
            && tokens > 0
            && self.sizes.files.get(to_usize(file)).is_some_and(|size| {
                self.expected(&record, held).is_some_and(|(expected, end)| expected == offsets && end <= *size)
            });
        if fits { Ok(record) } else { Err(self.refused(index, example, bytes, &record)) }
    }

    /// The offsets of an example that begins at its first offset, and its end.
    fn expected(&self, record: &Record, held: u64) -> Option<([u64; 5], u64)> {
        let mut at = record.offsets[0];
        let mut offsets = [at; 5];
        let states = self.sizes.layers * self.sizes.row_bytes;
        let lengths = COLUMNS.map(|width| width * record.tokens).into_iter().chain([held.checked_mul(states)?]);
        for (i, length) in lengths.enumerate() {
            at = at.checked_add(length)?;
            offsets[i + 1] = at;
        }
        let last = if self.sizes.last { held.checked_mul(self.sizes.row_bytes)? } else { 0 };
        Some((offsets, at.checked_add(last)?))
    }

    /// The error of a record that does not fit.
    #[cold]
    fn refused(&self, index: usize, example: u64, bytes: &[u8], record: &Record) -> Error {
        let first = example * self.shape.bytes as u64;
        let location = self.indexes[index].source.location();
        let refuse = |at: usize, name: &str, expected: String, found: u64| {
            let detail = format!("record {example}: {name}: expected {expected}, found {found}");
            Error::new(Kind::Format, detail).at(location).byte(first + at as u64)
        };
        let (start, held) = self.share(index, record.tokens);
        let size = self.sizes.files.get(to_usize(record.file));
        let fields = [
            (Some(0), "sample_id", example, long(bytes, 0)),
            (self.shape.start, "context_start", start, self.shape.start.map_or(0, |at| int(bytes, at))),
            (self.shape.held, "context_len", held, self.shape.held.map_or(0, |at| int(bytes, at))),
        ];
        if bytes.is_empty() {
            return Error::new(
                Kind::Truncated,
                format!("record {example}: expected {} bytes, found the end of the index", self.shape.bytes),
            )
            .at(location)
            .byte(first);
        }
        if record.tokens == 0 {
            return refuse(12, "seq_len", "a positive number".to_string(), 0);
        }
        for (at, name, expected, found) in fields {
            if let Some(at) = at.filter(|_| expected != found) {
                return refuse(at, name, expected.to_string(), found);
            }
        }
        let Some(size) = size else {
            let last = self.sizes.files.len().saturating_sub(1);
            return refuse(8, "shard_id", format!("a shard, 0 to {last}"), record.file);
        };
        let Some((expected, end)) = self.expected(record, held) else {
            return refuse(
                self.shape.offsets,
                OFFSETS[0],
                "an example below 2^64 bytes".to_string(),
                record.offsets[0],
            );
        };
        for (i, (start, found)) in expected.iter().zip(record.offsets).enumerate() {
            if *start != found {
                let why = format!(
                    "{start} (tensors back to back, {} tokens, {} layers of {} bytes)",
                    record.tokens, self.sizes.layers, self.sizes.row_bytes
                );
                return refuse(self.shape.offsets + 8 * i, OFFSETS[i], why, found);
            }
        }
        let detail = format!("record {example}: ends at byte {end} of shard {}, which has {size} bytes", record.file);
        Error::new(Kind::Truncated, detail).at(location).byte(first)
    }

    /// The shares of an example in token order: index, first row in it, rows.
    fn shares(&self, tokens: u64, mut each: impl FnMut(usize, u64, u64) -> Result<()>) -> Result<()> {
        let n = self.indexes.len();
        match self.sizes.split {
            _ if n == 1 => each(0, 0, tokens),
            RecordSplit::Contiguous => (0..n).try_for_each(|r| each(r, 0, self.share(r, tokens).1)),
            RecordSplit::HeadTail => {
                let chunk = self.chunk(tokens);
                (0..2 * n).try_for_each(|k| {
                    let rows = tokens.saturating_sub(k as u64 * chunk).min(chunk);
                    if k < n { each(k, 0, rows) } else { each(2 * n - 1 - k, chunk, rows) }
                })
            }
        }
    }
}

/// The kind of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordRows {
    /// States: a group per layer, then one of the last rows, if there are any. Files are listed twice: as those of the
    /// layers, then as those of the last rows.
    States,
    /// One of the columns: a single group.
    Column(usize),
}

/// The layout of one kind of rows. Addresses are byte offsets.
#[derive(Clone, Debug)]
pub struct Records {
    index: Arc<RecordIndex>,
    rows: RecordRows,
}

impl Records {
    /// Rows of one kind.
    pub fn new(index: Arc<RecordIndex>, rows: RecordRows) -> Result<Records> {
        match rows {
            RecordRows::Column(c) if c >= COLUMNS.len() => Err(Error::new(Kind::Internal, format!("column {c}"))),
            _ => Ok(Records { index, rows }),
        }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> u64 {
        match self.rows {
            RecordRows::Column(c) => COLUMNS[c],
            RecordRows::States => self.index.sizes.row_bytes,
        }
    }

    /// For each file of the file table, the bytes from one row to the next.
    pub fn steps(&self) -> Vec<u64> {
        let RecordSizes { files, layers, row_bytes, last, .. } = self.index.sizes();
        match self.rows {
            RecordRows::Column(c) => vec![COLUMNS[c]; files.len()],
            RecordRows::States => {
                [vec![layers * row_bytes; files.len()], vec![*row_bytes; files.len() * usize::from(*last)]].concat()
            }
        }
    }

    /// Checks an example and calls `each` with its runs.
    fn walk(&self, group: usize, example: u64, mut each: impl FnMut(Run)) -> Result<()> {
        let (index, sizes) = (&*self.index, self.index.sizes());
        let first = index.record(0, example)?;
        let (files, g) = (sizes.files.len() as u64, group as u64);
        let (file, offset, skip, step) = match self.rows {
            RecordRows::Column(c) => {
                each(Run { at: Address { file: first.file, row: first.offsets[c] }, rows: first.tokens });
                return Ok(());
            }
            RecordRows::States if g < sizes.layers => (0, 3, g * sizes.row_bytes, sizes.layers * sizes.row_bytes),
            RecordRows::States => (files, 4, 0, sizes.row_bytes),
        };
        index.shares(first.tokens, |i, from, rows| {
            let record = if i == 0 { first } else { index.record(i, example)? };
            if record.tokens != first.tokens {
                let detail = format!(
                    "record {example}: seq_len: expected {} as in the first index, found {}",
                    first.tokens, record.tokens
                );
                let at = example * index.shape.bytes as u64 + 12;
                return Err(Error::new(Kind::Format, detail).at(index.indexes[i].source.location()).byte(at));
            }
            if rows > 0 {
                let row = record.offsets[offset] + skip + from * step;
                each(Run { at: Address { file: file + record.file, row }, rows });
            }
            Ok(())
        })
    }

    fn step(&self, group: usize) -> u64 {
        let sizes = self.index.sizes();
        match self.rows {
            RecordRows::Column(c) => COLUMNS[c],
            RecordRows::States if (group as u64) < sizes.layers => sizes.layers * sizes.row_bytes,
            RecordRows::States => sizes.row_bytes,
        }
    }
}

impl Layout for Records {
    fn groups(&self) -> usize {
        match self.rows {
            RecordRows::Column(_) => 1,
            RecordRows::States => to_usize(self.index.sizes.layers) + usize::from(self.index.sizes.last),
        }
    }

    fn examples(&self) -> u64 {
        self.index.sizes.examples
    }

    fn tokens(&self, group: usize, example: u64) -> u64 {
        self.count(group, example).unwrap_or(1)
    }

    fn count(&self, _group: usize, example: u64) -> Result<u64> {
        Ok(self.index.record(0, example)?.tokens)
    }

    fn unchanged(&self) -> Result<()> {
        self.index.unchanged()
    }

    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, self.groups())?;
        let example = check_example(example, self.examples())?;
        let mut token = check_token(token, self.count(group, example)?, example)?;
        let mut found = None;
        let step = self.step(group);
        self.walk(group, example, |run| {
            if found.is_none() && token < run.rows {
                found = Some(Address { file: run.at.file, row: run.at.row + token * step });
            } else {
                token = token.saturating_sub(run.rows);
            }
        })?;
        found.ok_or_else(|| Error::new(Kind::Internal, "a token in no share"))
    }

    fn last(&self, group: usize, example: i64) -> Result<Address> {
        self.locate(group, example, -1)
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        check_group(group, self.groups())?;
        self.walk(group, check_example(example, self.examples())?, each)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::path::Path;

    use proptest::prelude::*;

    use super::*;
    use crate::source::Io;
    use crate::source::local::Local;

    const SHARD: u64 = 1 << 20;

    fn sizes(examples: u64, record_bytes: usize, split: RecordSplit) -> RecordSizes {
        RecordSizes { examples, record_bytes, files: vec![SHARD, SHARD], layers: 3, row_bytes: 16, last: true, split }
    }

    /// A record as a writer makes it: file, tokens, start, held, first offset.
    fn record(bytes: usize, number: u64, at: (u32, u32, u32, u32), first: u64) -> Vec<u8> {
        let (file, tokens, start, held) = at;
        let mut made = number.to_le_bytes().to_vec();
        made.extend(file.to_le_bytes());
        made.extend(tokens.to_le_bytes());
        if bytes == 64 {
            made.extend(start.to_le_bytes());
        }
        if bytes > 56 {
            made.extend(held.to_le_bytes());
        }
        let (s, h) = (u64::from(tokens), u64::from(held));
        let mut at = first;
        for length in [4 * s, s, s, h * 48, 0] {
            made.extend(at.to_le_bytes());
            at += length;
        }
        assert_eq!(made.len(), bytes);
        made
    }

    fn open(folder: &Path, indexes: &[Vec<u8>], sizes: RecordSizes, io: Io) -> Result<Arc<RecordIndex>> {
        let at = |i: usize| Location::from(folder.join(format!("samples.cp{i:03}.idx")));
        let locations: Vec<Location> = (0..indexes.len()).map(at).collect();
        for (location, bytes) in locations.iter().zip(indexes) {
            std::fs::write(location.path().unwrap(), bytes).unwrap();
        }
        RecordIndex::open(&Local { io }, &locations, sizes, &mut Context::of_part(&crate::threads::Stop::new()))
            .map(Arc::new)
    }

    /// One record of 5 tokens with one byte changed.
    fn changed(at: usize, to: u8) -> Error {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = record(56, 0, (1, 5, 0, 5), 100);
        bytes[at] = to;
        let index = open(folder.path(), &[bytes], sizes(1, 56, RecordSplit::Contiguous), Io::Mmap).unwrap();
        let states = Records::new(index, RecordRows::States).unwrap();
        assert_eq!(states.tokens(0, 0), 1, "a read of the example must reach the record");
        let errors = [
            states.count(0, 0).unwrap_err(),
            states.locate(2, 0, 0).unwrap_err(),
            states.last(3, 0).unwrap_err(),
            states.runs(0, 0, &mut |_| {}).unwrap_err(),
        ];
        let text = errors[0].to_string();
        assert!(errors.iter().all(|e| e.to_string() == text), "{errors:?}");
        errors.into_iter().next().unwrap()
    }

    #[test]
    fn a_record_that_does_not_fit_is_named_by_its_field_and_byte() {
        for (at, to, field, byte) in [
            (0, 1, "sample_id: expected 0, found 1", 0),
            (8, 2, "shard_id: expected a shard, 0 to 1, found 2", 8),
            (12, 0, "seq_len: expected a positive number", 12),
            (12, 6, "attention_mask_offset: expected 124", 24),
            (16, 101, "attention_mask_offset: expected 121", 24),
            (32, 0, "loss_mask_offset: expected 125", 32),
            (40, 0, "target_hidden_states_offset: expected 130", 40),
            (48, 0, "target_last_hidden_states_offset: expected 370", 48),
            (23, 255, "attention_mask_offset", 24),
        ] {
            let error = changed(at, to);
            assert_eq!((error.kind, error.offset), (Kind::Format, Some(byte)), "{error}");
            assert!(error.to_string().contains(field), "{error}");
        }
        for (first, expected) in [(SHARD - 349, "ends at byte 1048577"), (u64::MAX - 100, "below 2^64 bytes")] {
            let error = counted(first).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        assert_eq!(counted(SHARD - 350).unwrap(), 5);
    }

    /// Tokens of an example of 350 bytes that begins at this offset.
    fn counted(first: u64) -> Result<u64> {
        let folder = tempfile::tempdir().unwrap();
        let mut bytes = record(56, 0, (1, 5, 0, 5), 0);
        for field in bytes[16..].chunks_exact_mut(8) {
            let offset = u64::from_le_bytes(field.try_into().unwrap()).wrapping_add(first);
            field.copy_from_slice(&offset.to_le_bytes());
        }
        let index = open(folder.path(), &[bytes], sizes(1, 56, RecordSplit::Contiguous), Io::Pread)?;
        Records::new(index, RecordRows::States)?.count(0, 0)
    }

    #[test]
    fn indexes_of_another_size_or_shape_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let one = record(56, 0, (0, 5, 0, 5), 0);
        for io in [Io::Mmap, Io::Pread] {
            for bytes in [vec![], one[..55].to_vec(), [&one[..], &[0]].concat()] {
                let error = open(folder.path(), &[bytes], sizes(1, 56, RecordSplit::Contiguous), io).unwrap_err();
                assert!(error.to_string().contains("expected an index of 56 bytes"), "{error}");
            }
        }
        let refused = |change: &dyn Fn(&mut RecordSizes), indexes: usize| {
            let mut sizes = sizes(1, 56, RecordSplit::Contiguous);
            change(&mut sizes);
            let error = open(folder.path(), &vec![one.clone(); indexes], sizes, Io::Mmap).unwrap_err();
            assert_eq!(error.kind, Kind::Format, "{error}");
        };
        refused(&|s| s.record_bytes = 57, 1);
        refused(&|s| s.examples = u64::MAX / 8, 1);
        refused(&|s| s.layers = 0, 1);
        refused(&|s| s.row_bytes = 0, 1);
        refused(&|s| s.layers = u64::MAX, 1);
        refused(&|s| s.row_bytes = 1 << 31, 1);
        refused(&|_| {}, 0);
        refused(&|_| {}, 2);
    }

    #[test]
    fn an_index_truncated_after_it_was_opened_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = record(56, 0, (0, 5, 0, 5), 0);
        let index = open(folder.path(), &[bytes], sizes(1, 56, RecordSplit::Contiguous), Io::Mmap).unwrap();
        let states = Records::new(index, RecordRows::States).unwrap();
        states.unchanged().unwrap();
        std::fs::OpenOptions::new()
            .write(true)
            .open(folder.path().join("samples.cp000.idx"))
            .unwrap()
            .set_len(8)
            .unwrap();
        assert_eq!(states.unchanged().unwrap_err().kind, Kind::Truncated);
    }

    #[test]
    fn indexes_of_one_example_with_other_lengths_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let indexes = [record(64, 0, (0, 5, 0, 3), 0), record(64, 0, (1, 4, 2, 2), 0)];
        let index = open(folder.path(), &indexes, sizes(1, 64, RecordSplit::Contiguous), Io::Mmap).unwrap();
        let states = Records::new(index, RecordRows::States).unwrap();
        let error = states.locate(0, 0, 4).unwrap_err();
        assert!(error.to_string().contains("seq_len: expected 5 as in the first index, found 4"), "{error}");
    }

    proptest! {
        /// The oracle writes down where each token of each example is, from the definition of the split.
        #[test]
        fn tokens_are_where_a_writer_puts_them(
            lengths in prop::collection::vec(1u32..40, 0..5),
            ranks in 1usize..5,
            head_tail in any::<bool>(),
            wide in any::<bool>(),
        ) {
            let (n, split) = (ranks as u32, if head_tail { RecordSplit::HeadTail } else { RecordSplit::Contiguous });
            let bytes = if wide { 64 } else if ranks > 1 { 60 } else { 56 };
            let mut indexes = vec![vec![]; ranks];
            let mut ends = vec![0u64; ranks];
            let mut places = vec![];
            for (example, &tokens) in lengths.iter().enumerate() {
                let mut owner = vec![(0usize, 0u64); tokens as usize];
                let mut firsts = vec![];
                for rank in 0..n {
                    let all: Vec<u32> = if head_tail && n > 1 {
                        let padded = tokens.div_ceil(2 * n) * 2 * n;
                        let chunk = padded / (2 * n);
                        let of = |k: u32| k * chunk..(k + 1) * chunk;
                        of(rank).chain(of(2 * n - 1 - rank)).collect()
                    } else {
                        let (base, more) = (tokens / n, tokens % n);
                        let start = rank * base + rank.min(more);
                        (start..start + base + u32::from(rank < more)).collect()
                    };
                    let start = if head_tail && n > 1 { 0 } else { rank * (tokens / n) + rank.min(tokens % n) };
                    let (r, first) = (rank as usize, ends[rank as usize]);
                    indexes[r].extend(record(bytes, example as u64, (rank % 2, tokens, start, all.len() as u32), first));
                    for (row, token) in all.iter().enumerate() {
                        if let Some(owner) = owner.get_mut(*token as usize) {
                            *owner = (r, row as u64);
                        }
                    }
                    firsts.push((first, all.len() as u64));
                    ends[r] += u64::from(tokens) * 6 + all.len() as u64 * 64;
                }
                places.push((owner, firsts));
            }
            let folder = tempfile::tempdir().unwrap();
            let index = open(folder.path(), &indexes, sizes(lengths.len() as u64, bytes, split), Io::Mmap).unwrap();
            let states = Records::new(Arc::clone(&index), RecordRows::States).unwrap();
            prop_assert_eq!(states.groups(), 4);
            for (example, (owner, firsts)) in places.iter().enumerate() {
                let e = example as i64;
                let tokens = owner.len() as u64;
                prop_assert_eq!(states.count(0, example as u64).unwrap(), tokens);
                for group in 0..4u64 {
                    let mut walked = vec![];
                    let step = if group < 3 { 48 } else { 16 };
                    states.runs(group as usize, e, &mut |run| {
                        walked.extend((0..run.rows).map(|i| (run.at.file, run.at.row + i * step)));
                    }).unwrap();
                    let want: Vec<(u64, u64)> = owner.iter().map(|&(rank, row)| {
                        let (first, held) = firsts[rank];
                        let base = first + 6 * tokens;
                        let shard = rank as u64 % 2;
                        if group < 3 { (shard, base + row * 48 + group * 16) } else { (2 + shard, base + held * 48 + row * 16) }
                    }).collect();
                    prop_assert_eq!(&walked, &want);
                    for (token, want) in want.iter().enumerate() {
                        let at = states.locate(group as usize, e, token as i64).unwrap();
                        prop_assert_eq!((at.file, at.row), *want);
                    }
                    prop_assert_eq!(states.last(group as usize, e).ok().map(|at| (at.file, at.row)), want.last().copied());
                    prop_assert!(states.locate(group as usize, e, tokens as i64).is_err());
                }
                let (first, width) = (firsts[0].0, [4, 1, 1]);
                let mut from = first;
                for (c, width) in width.into_iter().enumerate() {
                    let column = Records::new(Arc::clone(&index), RecordRows::Column(c)).unwrap();
                    let at = column.locate(0, e, tokens as i64 - 1).unwrap();
                    prop_assert_eq!((at.file, at.row), (0, from + (tokens - 1) * width));
                    from += tokens * width;
                }
            }
        }

        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 128), wide in any::<bool>(), head_tail in any::<bool>()) {
            let folder = tempfile::tempdir().unwrap();
            let split = if head_tail { RecordSplit::HeadTail } else { RecordSplit::Contiguous };
            let (record_bytes, halves) = if wide { (64, vec![bytes[..64].to_vec(), bytes[64..].to_vec()]) } else { (60, vec![bytes[..60].to_vec()]) };
            let index = open(folder.path(), &halves, sizes(1, record_bytes, split), Io::Mmap).unwrap();
            for rows in [RecordRows::States, RecordRows::Column(2)] {
                let layout = Records::new(Arc::clone(&index), rows).unwrap();
                let _ = layout.locate(0, 0, -1);
                let _ = layout.runs(0, 0, &mut |_| {});
                prop_assert_eq!(layout.tokens(0, 0).max(1), layout.count(0, 0).unwrap_or(1));
            }
        }
    }
}
