//! The headers of an Arrow IPC stream; the file is untrusted. Values are not read.
//!
//! ```text
//! message   FF FF FF FF, u32 n, n bytes of metadata (a flatbuffer, padded to 8), then its body
//! stream    a schema, then record batches; ended by FF FF FF FF 00 00 00 00, or by the end of the file
//! body      the batch's buffers, each at an offset that its metadata give; a column owns consecutive nodes and buffers
//! ```
//!
//! Source: Arrow's `Message.fbs` and `Schema.fbs` (format version 1.5), and the page on the columnar format. Streams with
//! dictionaries, compressed or big-endian bodies, unions, run-ends and views are valid Arrow and rejected as unsupported: rows of
//! activations are not stored in them. The bounds of every buffer are checked against its body, and the body against the file.

use crate::error::{Error, Kind, Result};
use crate::layout::row::{FindRows, FoundRows, Row};
use crate::memory;
use crate::number::to_usize;
use crate::parse::end;
use crate::parse::flatbuffer::{FlatTable, FlatVector};
use crate::source::Source;
use crate::threads::{Context, Stop};

/// The largest metadata of one message.
pub const MAX_METADATA: u64 = 64 << 20;
/// The largest number of columns, counting those inside others.
const MAX_FIELDS: usize = 1 << 16;
/// The largest number of bytes in all texts of a schema, counting a shared text each time.
const MAX_TEXTS: usize = to_usize(MAX_METADATA);
const MAX_NESTING: u32 = 32;
/// Metadata of a batch with few columns fit in one read of this size.
const USUAL: u64 = 4096;
const CONTINUES: [u8; 4] = [0xff; 4];

/// The type of a column: a name as in pyarrow (`"int32"`, `"list"`), and its parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrowType {
    /// Its name.
    pub name: &'static str,
    /// Sizes: list size, bytes of a binary, precision and scale.
    pub sizes: Vec<i64>,
    /// Unit of a time, `s`, `ms`, `us` or `ns`, then its zone.
    pub texts: Vec<String>,
    /// Number of buffers of the column itself.
    buffers: usize,
}

/// A column.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrowField {
    /// Its name.
    pub name: String,
    /// Its type.
    pub of: ArrowType,
    /// The columns inside it.
    pub children: Vec<ArrowField>,
    /// Its metadata, such as the name of an extension type.
    pub metadata: Vec<(String, String)>,
}

impl ArrowField {
    /// Numbers of nodes and buffers in a batch.
    pub fn parts(&self) -> (usize, usize) {
        self.children.iter().fold((1, self.of.buffers), |(nodes, buffers), child| {
            let (n, b) = child.parts();
            (nodes + n, buffers + b)
        })
    }
}

/// Columns and metadata of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrowSchema {
    /// The columns, in stored order.
    pub fields: Vec<ArrowField>,
    /// Metadata of the whole stream.
    pub metadata: Vec<(String, String)>,
}

/// A record batch: positions of its buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrowBatch {
    /// Offset of its message in the file.
    pub at: u64,
    /// Number of rows.
    pub rows: u64,
    /// Length and number of nulls (negative: unknown) of each column, depth first.
    pub nodes: Vec<(u64, i64)>,
    /// Offset in the file and length of each buffer.
    pub buffers: Vec<(u64, u64)>,
}

/// The headers of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrowStream {
    /// Its columns.
    pub schema: ArrowSchema,
    /// Its batches, in order.
    pub batches: Vec<ArrowBatch>,
    /// Whether the end marker follows the last batch; it is missing if the writer was killed.
    pub ended: bool,
}

/// Bytes of the end marker.
const MARKER: u64 = 8;

enum Message {
    Schema(ArrowSchema),
    Batch(ArrowBatch),
}

fn refuse(what: impl Into<String>) -> Error {
    Error::new(Kind::Format, what)
}

fn unsupported(what: impl Into<String>) -> Error {
    Error::new(Kind::Unsupported, what)
}

/// Reads the headers of all messages of a file.
pub fn read_stream(source: &dyn Source, stop: &Stop) -> Result<ArrowStream> {
    let found = walk(&|at, into| source.read(at, into, stop), source.size());
    found.map_err(|e: Error| if e.location.is_none() { e.at(source.location()) } else { e })
}

/// Reads the headers of a file in memory.
pub fn parse_bytes(bytes: &[u8]) -> Result<ArrowStream> {
    let read = |at: u64, into: &mut [u8]| {
        let at = to_usize(at);
        into.copy_from_slice(&bytes[at..at + into.len()]);
        Ok(())
    };
    walk(&read, bytes.len() as u64)
}

/// Fills a buffer from an offset; both are within the file.
type HeaderRead<'a> = &'a dyn Fn(u64, &mut [u8]) -> Result<()>;

fn walk(read: HeaderRead<'_>, size: u64) -> Result<ArrowStream> {
    let mut at = 0;
    let mut schema = None;
    let mut batches = Vec::new();
    while let Some((metadata, body)) = next_metadata(read, at, size)? {
        let (message, bytes) = parse_message(&metadata, schema.as_ref())
            .map_err(|e| Error { offset: Some(at + 8 + e.offset.unwrap_or(0)), ..e })?;
        let end = body.checked_add(bytes).filter(|end| *end <= size).ok_or_else(|| {
            let what = format!("expected {bytes} bytes of a message that begins at byte {at}, found {}", size - body);
            Error::new(Kind::Truncated, what).byte(size)
        })?;
        match message {
            Message::Schema(found) => schema = Some(found),
            Message::Batch(mut batch) => {
                batch.at = at;
                for buffer in &mut batch.buffers {
                    buffer.0 += body;
                }
                batches.push(batch);
            }
        }
        at = end;
    }
    let schema = schema.ok_or_else(|| refuse("expected the schema of an Arrow stream, found nothing").byte(0))?;
    let ended = at < size;
    if ended {
        end::check(at + MARKER, size, "the stream", ": several streams in one file are unsupported")?;
    }
    Ok(ArrowStream { schema, batches, ended })
}

/// The metadata of the message at `at`, and the offset of its body; `None` at the end of the stream.
fn next_metadata(read: HeaderRead<'_>, at: u64, size: u64) -> Result<Option<(Vec<u8>, u64)>> {
    let left = size - at;
    if left == 0 {
        return Ok(None);
    }
    let mut head = memory::bytes(left.min(USUAL))?;
    read(at, &mut head)?;
    if left < 8 {
        return Err(
            Error::new(Kind::Truncated, format!("expected an Arrow message of 8 bytes, found {left}")).byte(size)
        );
    }
    if head[..4] != CONTINUES {
        let found = &head[..4];
        let what = if at == 0 && found == b"ARRO" {
            unsupported("expected an Arrow stream, found an Arrow file (Feather): write it with Dataset.save_to_disk")
        } else {
            refuse(format!("expected an Arrow message (ff ff ff ff), found {found:02x?}"))
        };
        return Err(what.byte(at));
    }
    let length = u64::from(u32::from_le_bytes([head[4], head[5], head[6], head[7]]));
    if length == 0 {
        return Ok(None);
    }
    if length > MAX_METADATA || length % 8 != 0 {
        let what = format!("expected metadata of at most {MAX_METADATA} bytes, a multiple of 8, found {length}");
        return Err(refuse(what).byte(at + 4));
    }
    if length > left - 8 {
        let what = format!("expected {length} bytes of metadata from byte {} on, found {}", at + 8, left - 8);
        return Err(Error::new(Kind::Truncated, what).byte(size));
    }
    let had = to_usize((head.len() as u64 - 8).min(length));
    let mut metadata = memory::bytes(length)?;
    metadata[..had].copy_from_slice(&head[8..8 + had]);
    if (had as u64) < length {
        read(at + 8 + had as u64, &mut metadata[had..])?;
    }
    Ok(Some((metadata, at + 8 + length)))
}

/// Parses one message: a schema if there was none, otherwise a batch of that schema, with buffers relative to its body. Returns
/// also the length of the body.
fn parse_message(metadata: &[u8], schema: Option<&ArrowSchema>) -> Result<(Message, u64)> {
    let message = FlatTable::root(metadata)?;
    let version = message.i16(0, 0)?;
    if !(3..=4).contains(&version) {
        return Err(unsupported(format!(
            "expected Arrow metadata version V4 or V5, found V{}",
            i32::from(version) + 1
        )));
    }
    let length = message.i64(3, 0)?;
    let body = u64::try_from(length).ok().filter(|n| *n < 1 << 60);
    let body = body.ok_or_else(|| refuse(format!("expected the length of a message's body, found {length}")))?;
    let header = message.table(2)?.ok_or_else(|| refuse("expected a message header, found none"))?;
    let message = match (message.u8(1, 0)?, schema) {
        (1, None) => Message::Schema(parse_schema(&header)?),
        (3, Some(schema)) => Message::Batch(parse_batch(&header, schema, body)?),
        (2, _) => return Err(unsupported("expected plain columns, found a dictionary")),
        (kind, _) => {
            let expected = if schema.is_none() { "a schema" } else { "a record batch" };
            return Err(refuse(format!("expected {expected}, found a message of type {kind}")));
        }
    };
    Ok((message, body))
}

fn parse_schema(header: &FlatTable<'_>) -> Result<ArrowSchema> {
    if header.i16(0, 0)? != 0 {
        return Err(unsupported("expected little-endian values, found another endianness"));
    }
    let mut budget = SchemaBudget { fields: MAX_FIELDS, texts: MAX_TEXTS };
    let fields = parse_fields(header.vector(1, 4)?, MAX_NESTING, &mut budget)?;
    Ok(ArrowSchema { fields, metadata: parse_pairs(header.vector(2, 4)?, &mut budget)? })
}

/// What a schema may still contain. Tables and texts of a flatbuffer may be shared, so its size bounds neither.
struct SchemaBudget {
    fields: usize,
    texts: usize,
}

impl SchemaBudget {
    /// A copy of a text.
    fn text(&mut self, text: Option<&str>) -> Result<String> {
        let text = text.unwrap_or_default();
        let left = self.texts.checked_sub(text.len());
        self.texts = left.ok_or_else(|| refuse(format!("expected at most {MAX_TEXTS} bytes of names and metadata")))?;
        Ok(text.to_string())
    }
}

fn parse_fields(found: Option<FlatVector<'_>>, depth: u32, budget: &mut SchemaBudget) -> Result<Vec<ArrowField>> {
    let Some(found) = found else { return Ok(Vec::new()) };
    let left = budget.fields.checked_sub(found.len);
    budget.fields = left.ok_or_else(|| refuse(format!("expected at most {MAX_FIELDS} columns")))?;
    if depth == 0 && found.len > 0 {
        return Err(refuse(format!("expected columns nested at most {MAX_NESTING} deep")));
    }
    (0..found.len).map(|i| parse_field(&found.table(i)?, depth - 1, budget)).collect()
}

fn parse_field(field: &FlatTable<'_>, depth: u32, budget: &mut SchemaBudget) -> Result<ArrowField> {
    let name = budget.text(field.text(0)?)?;
    let named = |e: Error| Error { detail: format!("column '{name}': {}", e.detail), ..e };
    if field.table(4)?.is_some() {
        return Err(named(unsupported("expected plain values, found a dictionary")));
    }
    let of = match field.table(3)? {
        Some(table) => parse_type(field.u8(2, 0)?, &table, budget).map_err(named)?,
        None => return Err(named(refuse("expected a type, found none"))),
    };
    let children = parse_fields(field.vector(5, 4)?, depth, budget)?;
    let most = match of.name {
        "list" | "large_list" | "fixed_size_list" | "map" => Some(1),
        "struct" => None,
        _ => Some(0),
    };
    if most.is_some_and(|n| n != children.len()) {
        return Err(named(refuse(format!("expected {} columns inside, found {}", most.unwrap_or(0), children.len()))));
    }
    let metadata = parse_pairs(field.vector(6, 4)?, budget)?;
    Ok(ArrowField { name, of, children, metadata })
}

fn parse_pairs(found: Option<FlatVector<'_>>, budget: &mut SchemaBudget) -> Result<Vec<(String, String)>> {
    let Some(found) = found else { return Ok(Vec::new()) };
    (0..found.len)
        .map(|i| {
            let pair = found.table(i)?;
            Ok((budget.text(pair.text(0)?)?, budget.text(pair.text(1)?)?))
        })
        .collect()
}

/// The type with a number of the union `Type`.
fn parse_type(number: u8, table: &FlatTable<'_>, budget: &mut SchemaBudget) -> Result<ArrowType> {
    let plain = |name: &'static str, buffers: usize| ArrowType { name, sizes: vec![], texts: vec![], buffers };
    let sized = |name: &'static str, buffers: usize, sizes: Vec<i64>| ArrowType { sizes, ..plain(name, buffers) };
    let timed = |name: &'static str, unit: i16| {
        let unit = usize::try_from(unit).ok().and_then(|unit| ["s", "ms", "us", "ns"].get(unit).copied());
        let unit = unit.ok_or_else(|| refuse("expected a unit of time"))?;
        Ok::<_, Error>(ArrowType { texts: vec![unit.to_string()], ..plain(name, 2) })
    };
    Ok(match number {
        1 => plain("null", 0),
        2 => plain(int_name(table.i32(0, 0)?, table.u8(1, 0)? != 0)?, 2),
        3 => match table.i16(0, 0)? {
            0 => plain("float16", 2),
            1 => plain("float32", 2),
            2 => plain("float64", 2),
            other => return Err(refuse(format!("expected a float of 16, 32 or 64 bits, found precision {other}"))),
        },
        4 => plain("binary", 3),
        5 => plain("string", 3),
        6 => plain("bool", 2),
        7 => {
            let name = match table.i32(2, 128)? {
                128 => "decimal128",
                256 => "decimal256",
                bits => return Err(unsupported(format!("expected decimals of 128 or 256 bits, found {bits}"))),
            };
            sized(name, 2, vec![table.i32(0, 0)?.into(), table.i32(1, 0)?.into()])
        }
        8 if table.i16(0, 1)? == 0 => plain("date32", 2),
        8 => plain("date64", 2),
        9 => timed(if table.i32(1, 32)? == 32 { "time32" } else { "time64" }, table.i16(0, 1)?)?,
        10 => {
            let mut made = timed("timestamp", table.i16(0, 0)?)?;
            if let Some(zone) = table.text(1)? {
                made.texts.push(budget.text(Some(zone))?);
            }
            made
        }
        12 => plain("list", 2),
        13 => plain("struct", 1),
        15 => sized("fixed_size_binary", 2, vec![size_of_item(table.i32(0, 0)?)?]),
        16 => sized("fixed_size_list", 1, vec![size_of_item(table.i32(0, 0)?)?]),
        17 => plain("map", 2),
        18 => timed("duration", table.i16(0, 1)?)?,
        19 => plain("large_binary", 3),
        20 => plain("large_string", 3),
        21 => plain("large_list", 2),
        other => return Err(unsupported(format!("expected a list, number or text, found Arrow type {other}"))),
    })
}

fn int_name(bits: i32, signed: bool) -> Result<&'static str> {
    Ok(match (bits, signed) {
        (8, true) => "int8",
        (16, true) => "int16",
        (32, true) => "int32",
        (64, true) => "int64",
        (8, false) => "uint8",
        (16, false) => "uint16",
        (32, false) => "uint32",
        (64, false) => "uint64",
        _ => return Err(refuse(format!("expected integers of 8, 16, 32 or 64 bits, found {bits}"))),
    })
}

fn size_of_item(found: i32) -> Result<i64> {
    if found < 0 {
        return Err(refuse(format!("expected a size of at least 0, found {found}")));
    }
    Ok(found.into())
}

fn parse_batch(header: &FlatTable<'_>, schema: &ArrowSchema, body: u64) -> Result<ArrowBatch> {
    if header.table(3)?.is_some() {
        return Err(unsupported(
            "expected uncompressed values, found a compressed record batch: write it with Dataset.save_to_disk",
        ));
    }
    let rows = count_of(header.i64(0, 0)?)?;
    let (nodes, buffers) = schema.fields.iter().fold((0, 0), |(nodes, buffers), field| {
        let (n, b) = field.parts();
        (nodes + n, buffers + b)
    });
    let (of_nodes, of_buffers) = (header.vector(1, 16)?, header.vector(2, 16)?);
    let found = (of_nodes.map_or(0, |v| v.len), of_buffers.map_or(0, |v| v.len));
    if found != (nodes, buffers) {
        return Err(refuse(format!(
            "expected {nodes} nodes and {buffers} buffers, as the schema has, found {} and {}",
            found.0, found.1
        )));
    }
    let mut batch = ArrowBatch { at: 0, rows, nodes: vec![], buffers: vec![] };
    for i in 0..nodes {
        let Some(of_nodes) = of_nodes else { break };
        let (length, nulls) = (count_of(of_nodes.i64(i, 0)?)?, of_nodes.i64(i, 8)?);
        if u64::try_from(nulls).is_ok_and(|nulls| nulls > length) {
            return Err(refuse(format!("expected at most {length} nulls, found {nulls}")));
        }
        batch.nodes.push((length, nulls));
    }
    for i in 0..buffers {
        let Some(of_buffers) = of_buffers else { break };
        let (at, length) = (of_buffers.i64(i, 0)?, of_buffers.i64(i, 8)?);
        let inside = u64::try_from(at).ok().zip(u64::try_from(length).ok());
        let inside = inside.filter(|(at, length)| at.checked_add(*length).is_some_and(|end| end <= body));
        let what = || refuse(format!("expected buffer {i} within {body} bytes, found {length} bytes at {at}"));
        batch.buffers.push(inside.ok_or_else(what)?);
    }
    let mut node = 0;
    for field in &schema.fields {
        if batch.nodes[node].0 != rows {
            let what = format!("expected {rows} values, one per row, found {}", batch.nodes[node].0);
            return Err(refuse(format!("column '{}': {what}", field.name)));
        }
        node += field.parts().0;
    }
    Ok(batch)
}

fn count_of(found: i64) -> Result<u64> {
    u64::try_from(found)
        .ok()
        .filter(|n| *n < 1 << 56)
        .ok_or_else(|| refuse(format!("expected a number of values, found {found}")))
}

/// The offsets of a list column, which must be evenly spaced for its values to be rows.
#[derive(Clone, Copy, Debug)]
pub struct EvenOffsets {
    /// Byte offset of the first.
    pub at: u64,
    /// How many.
    pub count: u64,
    /// Whether they have 64 bits, or 32.
    pub wide: bool,
    /// Value of the first.
    pub first: u64,
    /// Difference of neighbours.
    pub step: u64,
}

/// Rows that are the values of a list column. Its offsets, a small part of the file, are checked when the file is opened.
#[derive(Clone, Debug)]
pub struct ListRows {
    /// Offset of the first row.
    pub start: u64,
    /// Number of rows.
    pub rows: u64,
    /// The offsets of the lists, and of lists inside them.
    pub offsets: Vec<EvenOffsets>,
}

impl FindRows for ListRows {
    fn find(&self, source: &dyn Source, _row: &Row, context: &mut Context<'_>) -> Result<FoundRows> {
        for offsets in &self.offsets {
            offsets.check(source, context)?;
        }
        Ok(FoundRows { start: self.start, rows: self.rows, swapped: false })
    }
}

impl EvenOffsets {
    /// Compares all offsets with the even ones.
    fn check(&self, source: &dyn Source, context: &mut Context<'_>) -> Result<()> {
        let size = if self.wide { 8 } else { 4 };
        let end = self.count.checked_mul(size).and_then(|n| n.checked_add(self.at));
        if end.is_none_or(|end| end > source.size()) {
            let what = format!("expected {} offsets from byte {} on", self.count, self.at);
            return Err(Error::new(Kind::Truncated, what).at(source.location()).byte(source.size()));
        }
        let mut buffer = memory::bytes((self.count * size).min(1 << 18))?;
        let mut done = 0;
        while done < self.count {
            let n = (self.count - done).min(buffer.len() as u64 / size);
            let block = &mut buffer[..to_usize(n * size)];
            source.read(self.at + done * size, block, context.stop())?;
            context.check()?;
            for (i, bytes) in block.chunks_exact(to_usize(size)).enumerate() {
                let number = done + i as u64;
                let found = bytes.iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte));
                let even = number.checked_mul(self.step).and_then(|n| n.checked_add(self.first));
                if even != Some(found) {
                    let what = format!(
                        "expected lists of {} values each, so offset {number} to be {}, found {found}",
                        self.step,
                        even.unwrap_or(u64::MAX)
                    );
                    return Err(refuse(what).at(source.location()).byte(self.at + number * size));
                }
            }
            done += n;
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::source::Io;
    use crate::source::local::open_to_jump;

    /// Written by datasets 5.2.0: 5 columns, of which two are lists of lists of 8 float32.
    const RAGGED: &[u8] =
        include_bytes!("../../../../tests/golden/hf_arrow/hub_array2d_ragged_f32/dataset/data-00001-of-00002.arrow");
    /// Written by pyarrow: structs, maps, decimals, timestamps.
    const TYPES: &[u8] = include_bytes!("../../../fuzz/seeds/arrow_stream/types");

    #[test]
    fn columns_and_buffers_are_those_of_the_writer() {
        let found = parse_bytes(RAGGED).unwrap();
        let names: Vec<_> = found.schema.fields.iter().map(|field| (field.name.as_str(), field.of.name)).collect();
        assert!(names.contains(&("hidden_0", "list")) && names.contains(&("prompt", "string")), "{names:?}");
        assert!(found.ended && found.schema.metadata.iter().any(|(key, _)| key == "huggingface"));
        let found = parse_bytes(TYPES).unwrap();
        let [of_struct, of_map, decimal, large] = &found.schema.fields[..] else { panic!("{:?}", found.schema) };
        assert_eq!(of_struct.children[1].of.texts, ["us", "UTC"]);
        assert_eq!((of_map.of.name, decimal.of.sizes.as_slice()), ("map", &[9, 2][..]));
        assert_eq!((large.of.name, large.children[0].of.sizes.as_slice()), ("large_list", &[2][..]));
    }

    #[test]
    fn a_cut_stream_is_truncated_or_shorter() {
        for stream in [RAGGED, TYPES] {
            let whole = parse_bytes(stream).unwrap();
            for end in 0..stream.len() {
                match parse_bytes(&stream[..end]) {
                    Ok(found) => assert!(!found.ended && found.batches.len() <= whole.batches.len()),
                    Err(error) => assert!(matches!(error.kind, Kind::Truncated | Kind::Format), "{end}: {error}"),
                }
            }
        }
    }

    #[test]
    fn no_changed_byte_panics_or_leaves_the_file() {
        for stream in [RAGGED, TYPES] {
            for at in 0..stream.len() {
                for value in [0x00, 0x01, 0x7f, 0x80, 0xff] {
                    let mut bytes = stream.to_vec();
                    bytes[at] = value;
                    if let Ok(found) = parse_bytes(&bytes) {
                        let buffers = found.batches.iter().flat_map(|batch| &batch.buffers);
                        assert!(buffers.clone().all(|(at, len)| at + len <= bytes.len() as u64));
                    }
                }
            }
        }
    }

    #[test]
    fn other_files_are_refused_by_name() {
        for (bytes, kind) in [
            (&b""[..], Kind::Format),
            (b"\xff\xff", Kind::Truncated),
            (b"ARROW1\0\0\xff\xff\xff\xff", Kind::Unsupported),
            (b"PAR1aaaaaaaa", Kind::Format),
            (b"\xff\xff\xff\xff\0\0\0\0", Kind::Format),
            (b"\xff\xff\xff\xff\x08\0\0\x70", Kind::Format),
            (b"\xff\xff\xff\xff\x08\0\0\0\x04\0\0\0\xff\xff\xff\x7f", Kind::Format),
        ] {
            assert_eq!(parse_bytes(bytes).unwrap_err().kind, kind, "{bytes:?}");
        }
    }

    #[test]
    fn uneven_offsets_are_refused_with_their_byte() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let n = 100_000u64;
        for (wide, wrong) in [(false, None), (true, None), (false, Some(99_999)), (true, Some(70_000))] {
            let mut bytes = vec![7; 16];
            for i in 0..n {
                let value = 5 + 3 * i + u64::from(Some(i) == wrong);
                if wide { bytes.extend(value.to_le_bytes()) } else { bytes.extend((value as u32).to_le_bytes()) }
            }
            std::fs::write(&path, bytes).unwrap();
            let source = open_to_jump(&path, Io::Pread).unwrap();
            let even = EvenOffsets { at: 16, count: n, wide, first: 5, step: 3 };
            let size = if wide { 8 } else { 4 };
            assert_eq!(
                even.check(&*source, &mut Context::of_part(&Stop::new())).err().and_then(|e| e.offset),
                wrong.map(|i| 16 + i * size)
            );
            let long = EvenOffsets { count: u64::MAX / 2, ..even };
            assert_eq!(long.check(&*source, &mut Context::of_part(&Stop::new())).unwrap_err().kind, Kind::Truncated);
        }
    }
}
