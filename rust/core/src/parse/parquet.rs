//! The footer of a Parquet file, and the headers of its pages; the file is untrusted. Values are not decoded.
//!
//! ```text
//! file      PAR1, column chunks, footer, u32 bytes of the footer, PAR1
//! chunk     [dictionary page] data page, data page, ...      each a header and a body
//! footer    the schema as a tree, depth first; row groups, each with a chunk for every leaf of the schema
//! ```
//!
//! Footer and headers are structures of [`crate::parse::thrift`]. Checked are numbers, the tree, the types of chunks and
//! their bytes, which must be in front of the footer. pyarrow has such a parser too, but its accessors of column chunks end the
//! process for some damaged footers. Source: `parquet.thrift` of the format's repository (2.11).

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::parse::thrift::{ThriftReader, ThriftType};
use crate::source::Source;
use crate::threads::Stop;

/// Bytes at the end of each file: the footer's length and `PAR1`.
pub const END: u64 = 8;
const MAGIC: &[u8; 4] = b"PAR1";
const ENCRYPTED: &[u8; 4] = b"PARE";
/// The largest number of groups around a leaf.
const MAX_NESTING: usize = 64;
/// Names of groups are repeated in the paths of their leaves: so many bytes for each byte of the footer, and some more.
const PATHS: (u64, u64) = (16, 64 << 10);
/// Characters of a column's name in a message.
const MAX_NAME: usize = 100;
/// Bytes read for a page's header: usually a small number; statistics can make a header long.
const HEADERS: [u64; 2] = [512, 1 << 16];

const TYPES: [&str; 8] =
    ["BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY"];
const CODECS: [&str; 8] = ["UNCOMPRESSED", "SNAPPY", "GZIP", "LZO", "BROTLI", "LZ4", "ZSTD", "LZ4_RAW"];

/// A leaf of the schema: a column of values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParquetLeaf {
    /// Names of the groups around it and its own, with dots between them.
    pub path: String,
    /// Its physical type, such as `INT32`.
    pub physical_type: &'static str,
    /// Number of repeated nodes in its path: lists around a value.
    pub max_repetition_level: u32,
}

/// A range of integers in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IntegerRange {
    /// The smallest value.
    pub minimum: i64,
    /// The largest value.
    pub maximum: i64,
    /// Number of nulls, if the file states it.
    pub null_count: Option<u64>,
}

/// The values of a leaf in a row group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParquetChunk {
    /// Number of values, including nulls.
    pub num_values: u64,
    /// Offset of the first data page.
    pub data_page_offset: u64,
    /// Offset of the dictionary page, if any.
    pub dictionary_page_offset: Option<u64>,
    /// Bytes of its pages in the file.
    pub total_compressed_size: u64,
    /// Bytes of its pages without compression.
    pub total_uncompressed_size: u64,
    /// Name of the compression.
    pub codec: &'static str,
    /// Range of its values, if they are integers of 32 or 64 bits and the file states it.
    pub range: Option<IntegerRange>,
}

impl ParquetChunk {
    /// Offset of the first page, and of the end of the last one; an empty range without values.
    pub fn pages(&self) -> Range<u64> {
        // Some writers write 0 for no dictionary.
        let dictionary = self.dictionary_page_offset.filter(|at| *at > 0);
        let begin = dictionary.map_or(self.data_page_offset, |at| at.min(self.data_page_offset));
        // pyarrow writes an offset of 0, and a dictionary page, for a chunk without values.
        let size = if self.num_values == 0 { 0 } else { self.total_compressed_size };
        begin..begin.saturating_add(size)
    }
}

/// A row group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParquetGroup {
    /// Number of rows.
    pub num_rows: u64,
    /// A chunk for each leaf.
    pub columns: Vec<ParquetChunk>,
}

/// The footer of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParquetFooter {
    /// Number of rows.
    pub num_rows: u64,
    /// The leaves of the schema, in order.
    pub leaves: Vec<ParquetLeaf>,
    /// The row groups, in order.
    pub groups: Vec<ParquetGroup>,
}

/// The kind of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Values, in the first version of the format.
    Data,
    /// A dictionary.
    Dictionary,
    /// Values, in the second version.
    DataV2,
}

/// A page, as its header describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParquetPage {
    /// Its kind.
    pub kind: PageKind,
    /// Offset of its body.
    pub body: u64,
    /// Bytes of its body in the file.
    pub stored: u64,
    /// Bytes of its body without compression.
    pub raw: u64,
    /// Number of values.
    pub values: u64,
    /// The number of its encoding.
    pub encoding: u64,
}

/// Offset of the footer. `end`: the last [`END`] bytes of a file of `size` bytes, or the whole file if it is shorter.
pub fn footer_begin(end: &[u8], size: u64) -> Result<u64> {
    let refuse = |kind: Kind, what: String| Err(Error::new(kind, what).byte(size.saturating_sub(END)));
    let [a, b, c, d, magic @ ..] = end else {
        return refuse(Kind::Truncated, format!("expected a Parquet file of at least 12 bytes, found {size}"));
    };
    if magic == ENCRYPTED {
        let what = "expected a Parquet file, found an encrypted one: write it without encryption";
        return refuse(Kind::Unsupported, what.to_string());
    }
    if magic != MAGIC {
        let what = format!(
            "expected a Parquet file, which ends with PAR1, found {magic:02x?}: it is another file, or not whole"
        );
        return refuse(Kind::Format, what);
    }
    let length = u64::from(u32::from_le_bytes([*a, *b, *c, *d]));
    let begin = size.checked_sub(END).and_then(|size| size.checked_sub(length)).filter(|begin| *begin >= 4);
    match begin {
        Some(begin) => Ok(begin),
        None => refuse(
            Kind::Format,
            format!("expected a footer of at most {} bytes, found {length}", size.saturating_sub(END + 4)),
        ),
    }
}

/// Parses a footer, which is at byte `begin` of its file.
pub fn parse_footer(bytes: &[u8], begin: u64) -> Result<ParquetFooter> {
    let mut reader = ThriftReader::new(bytes, begin);
    let (mut leaves, mut num_rows, mut groups) = (None, None, None);
    reader.fields(&mut |reader, number, wire| {
        match number {
            2 => leaves = Some(parse_schema(reader, wire)?),
            3 => num_rows = Some(reader.count(ThriftType::I64, wire)?),
            4 => {
                let leaves = leaves.as_deref().ok_or_else(|| reader.refuse("expected a schema before row groups"))?;
                groups = Some(parse_groups(reader, wire, leaves, begin)?);
            }
            8 => {
                let what = "expected plain column chunks, found an encrypted file: write it without encryption";
                return Err(Error { kind: Kind::Unsupported, ..reader.refuse(what) });
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    if reader.rest() > 0 {
        let what = format!("expected the end of the footer, found {} more bytes", reader.rest());
        return Err(reader.refuse(what));
    }
    let (Some(leaves), Some(num_rows), Some(groups)) = (leaves, num_rows, groups) else {
        return Err(
            reader.refuse("expected a schema, a number of rows and row groups, found a footer without one of them")
        );
    };
    let rows = groups.iter().fold(0_u64, |sum, group: &ParquetGroup| sum.saturating_add(group.num_rows));
    if rows != num_rows {
        let what = format!("expected {num_rows} rows in all row groups, found {rows}");
        return Err(Error::new(Kind::Format, what).byte(begin));
    }
    Ok(ParquetFooter { num_rows, leaves, groups })
}

/// An element of the schema.
struct SchemaNode<'a> {
    name: &'a [u8],
    physical_type: Option<&'static str>,
    repeated: bool,
    children: u64,
    at: u64,
}

/// A name of a table by its number.
fn name_of(reader: &ThriftReader<'_>, names: &[&'static str], number: u64, what: &str) -> Result<&'static str> {
    let name = names.get(to_usize(number));
    name.copied().ok_or_else(|| reader.refuse(format!("expected {what} from 0 to {}, found {number}", names.len() - 1)))
}

fn parse_schema(reader: &mut ThriftReader<'_>, wire: ThriftType) -> Result<Vec<ParquetLeaf>> {
    let at = reader.offset();
    let count = reader.structs(wire)?;
    let whole = reader.rest() as u64;
    let mut nodes = memory::reserve(count as u64)?;
    for _ in 0..count {
        let at = reader.offset();
        let (mut name, mut physical_type, mut repeated, mut children) = (None, None, false, 0);
        reader.fields(&mut |reader, number, wire| {
            match number {
                1 => {
                    let number = reader.count(ThriftType::I32, wire)?;
                    physical_type = Some(name_of(reader, &TYPES, number, "a physical type")?);
                }
                3 => {
                    let number = reader.count(ThriftType::I32, wire)?;
                    repeated =
                        name_of(reader, &["required", "optional", "repeated"], number, "a repetition")? == "repeated";
                }
                4 => name = Some(reader.binary(wire)?),
                5 => children = reader.count(ThriftType::I32, wire)?,
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        let name = name.ok_or_else(|| reader.refuse("expected a name of a column, found none"))?;
        nodes.push(SchemaNode { name, physical_type, repeated, children, at });
    }
    let mut tree =
        SchemaTree { nodes: &nodes, next: 0, paths: PATHS.0.saturating_mul(whole) + PATHS.1, leaves: vec![] };
    tree.walk(at)?;
    Ok(tree.leaves)
}

/// Walks a schema, which is stored depth first.
struct SchemaTree<'n, 'a> {
    nodes: &'n [SchemaNode<'a>],
    next: usize,
    /// Bytes that paths may still have.
    paths: u64,
    leaves: Vec<ParquetLeaf>,
}

impl SchemaTree<'_, '_> {
    fn walk(&mut self, at: u64) -> Result<()> {
        let refuse = |at: u64, what: &str| Err(Error::new(Kind::Format, what).byte(at));
        let Some(root) = self.nodes.first() else { return refuse(at, "expected a schema, found no element") };
        self.next = 1;
        // Children that follow, the length of the path, and the repetition level of each open group.
        let mut open: Vec<(u64, usize, u32)> = vec![(root.children, 0, 0)];
        let mut path = String::new();
        while let Some((left, length, level)) = open.last_mut() {
            if *left == 0 {
                open.pop();
                continue;
            }
            *left -= 1;
            let (length, level) = (*length, *level);
            let Some(node) = self.nodes.get(self.next) else {
                return refuse(at, "expected all columns of the schema, found fewer than its groups contain");
            };
            self.next += 1;
            path.truncate(length);
            if length > 0 {
                path.push('.');
            }
            let Ok(name) = std::str::from_utf8(node.name) else {
                return refuse(node.at, "expected a name of a column in UTF-8, found other bytes");
            };
            path.push_str(name);
            let level = level + u32::from(node.repeated);
            if let Some(physical_type) = node.physical_type.filter(|_| node.children == 0) {
                let left = self.paths.checked_sub(path.len() as u64);
                let Some(left) = left else { return refuse(node.at, "expected shorter names of columns") };
                self.paths = left;
                self.leaves.push(ParquetLeaf { path: path.clone(), physical_type, max_repetition_level: level });
            } else if open.len() > MAX_NESTING {
                return refuse(node.at, "expected columns nested at most 64 deep, found more");
            } else {
                open.push((node.children, path.len(), level));
            }
        }
        if let Some(node) = self.nodes.get(self.next) {
            return refuse(node.at, "expected the end of the schema, found columns outside its groups");
        }
        Ok(())
    }
}

fn parse_groups(
    reader: &mut ThriftReader<'_>,
    wire: ThriftType,
    leaves: &[ParquetLeaf],
    end: u64,
) -> Result<Vec<ParquetGroup>> {
    let mut groups = Vec::new();
    for number in 0..reader.structs(wire)? {
        let named = |e: Error| Error { detail: format!("row group {number}: {}", e.detail), ..e };
        groups.push(parse_group(reader, leaves, end).map_err(named)?);
    }
    Ok(groups)
}

fn parse_group(reader: &mut ThriftReader<'_>, leaves: &[ParquetLeaf], end: u64) -> Result<ParquetGroup> {
    let (mut columns, mut num_rows) = (None, None);
    reader.fields(&mut |reader, number, wire| {
        match number {
            1 => columns = Some(parse_chunks(reader, wire, leaves, end)?),
            3 => num_rows = Some(reader.count(ThriftType::I64, wire)?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    match (columns, num_rows) {
        (Some(columns), Some(num_rows)) => Ok(ParquetGroup { num_rows, columns }),
        _ => Err(reader.refuse("expected columns and a number of rows, found neither or one of them")),
    }
}

fn parse_chunks(
    reader: &mut ThriftReader<'_>,
    wire: ThriftType,
    leaves: &[ParquetLeaf],
    end: u64,
) -> Result<Vec<ParquetChunk>> {
    let count = reader.structs(wire)?;
    if count != leaves.len() {
        return Err(reader.refuse(format!("expected {} columns, as the schema has, found {count}", leaves.len())));
    }
    let mut columns = memory::reserve(count as u64)?;
    for leaf in leaves {
        let name: String = leaf.path.chars().take(MAX_NAME).collect();
        let named = |e: Error| Error { detail: format!("column '{name}': {}", e.detail), ..e };
        columns.push(parse_chunk(reader, leaf, end).map_err(named)?);
    }
    Ok(columns)
}

fn parse_chunk(reader: &mut ThriftReader<'_>, leaf: &ParquetLeaf, end: u64) -> Result<ParquetChunk> {
    let mut chunk = None;
    reader.fields(&mut |reader, number, wire| {
        match number {
            3 => chunk = Some(parse_chunk_metadata(reader, wire, leaf)?),
            8 => {
                let what = "expected a plain column chunk, found an encrypted one: write it without encryption";
                return Err(Error { kind: Kind::Unsupported, ..reader.refuse(what) });
            }
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let chunk = chunk.ok_or_else(|| reader.refuse("expected the metadata of a column chunk, found none"))?;
    let pages = chunk.pages();
    if !pages.is_empty() && (pages.start < 4 || pages.end > end) {
        let size = chunk.total_compressed_size;
        let what = format!("expected pages between byte 4 and {end}, found {size} bytes from byte {} on", pages.start);
        return Err(reader.refuse(what));
    }
    Ok(chunk)
}

fn parse_chunk_metadata(reader: &mut ThriftReader<'_>, wire: ThriftType, leaf: &ParquetLeaf) -> Result<ParquetChunk> {
    let (mut physical_type, mut codec, mut dictionary, mut range) = (None, None, None, None);
    let [mut values, mut raw, mut stored, mut data] = [None; 4];
    reader.nested(wire, &mut |reader, number, wire| {
        match number {
            1 => {
                let number = reader.count(ThriftType::I32, wire)?;
                let name = name_of(reader, &TYPES, number, "a physical type")?;
                if name != leaf.physical_type {
                    let what = format!("expected type {}, as in the schema, found {name}", leaf.physical_type);
                    return Err(reader.refuse(what));
                }
                physical_type = Some(name);
            }
            4 => {
                let number = reader.count(ThriftType::I32, wire)?;
                codec = Some(name_of(reader, &CODECS, number, "a compression")?);
            }
            5 => values = Some(reader.count(ThriftType::I64, wire)?),
            6 => raw = Some(reader.count(ThriftType::I64, wire)?),
            7 => stored = Some(reader.count(ThriftType::I64, wire)?),
            9 => data = Some(reader.count(ThriftType::I64, wire)?),
            11 => dictionary = Some(reader.count(ThriftType::I64, wire)?),
            12 => range = parse_range(reader, wire, leaf.physical_type)?,
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    match (physical_type, codec, values, raw, stored, data) {
        (Some(_), Some(codec), Some(num_values), Some(raw), Some(stored), Some(data_page_offset)) => Ok(ParquetChunk {
            num_values,
            data_page_offset,
            dictionary_page_offset: dictionary,
            total_compressed_size: stored,
            total_uncompressed_size: raw,
            codec,
            range,
        }),
        _ => Err(reader.refuse("expected type, compression, number of values, sizes and offset of a column chunk")),
    }
}

/// The range of integers that statistics state, in their newer fields or in the older ones.
fn parse_range(reader: &mut ThriftReader<'_>, wire: ThriftType, physical_type: &str) -> Result<Option<IntegerRange>> {
    let integer = |bytes: &[u8]| match physical_type {
        "INT32" => bytes.try_into().ok().map(|bytes| i64::from(i32::from_le_bytes(bytes))),
        "INT64" => bytes.try_into().ok().map(i64::from_le_bytes),
        _ => None,
    };
    let (mut older, mut newer, mut null_count) = ([None; 2], [None; 2], None);
    reader.nested(wire, &mut |reader, number, wire| {
        match number {
            1 => older[1] = integer(reader.binary(wire)?),
            2 => older[0] = integer(reader.binary(wire)?),
            3 => null_count = Some(reader.count(ThriftType::I64, wire)?),
            5 => newer[1] = integer(reader.binary(wire)?),
            6 => newer[0] = integer(reader.binary(wire)?),
            _ => return Ok(false),
        }
        Ok(true)
    })?;
    let range =
        |[minimum, maximum]: [Option<i64>; 2]| Some(IntegerRange { minimum: minimum?, maximum: maximum?, null_count });
    Ok(range(newer).or_else(|| range(older)))
}

/// Reads the headers of the pages of a chunk, at most `most`. The first may be a dictionary; the others have values.
pub fn read_pages(source: &dyn Source, chunk: &ParquetChunk, most: u64, stop: &Stop) -> Result<Vec<ParquetPage>> {
    let Range { start, end } = chunk.pages();
    if start == end {
        return Ok(vec![]);
    }
    if end > source.size() {
        let what = format!("expected pages from byte {start} to {end}, found a file of {} bytes", source.size());
        return Err(Error::new(Kind::Truncated, what).at(source.location()));
    }
    let read = |at: u64, into: &mut [u8]| source.read(at, into, stop);
    walk_pages(&read, start, end, most).map_err(|e| if e.location.is_none() { e.at(source.location()) } else { e })
}

/// Parses the headers of the pages of a chunk in memory.
pub fn parse_pages(bytes: &[u8], most: u64) -> Result<Vec<ParquetPage>> {
    let read = |at: u64, into: &mut [u8]| {
        into.copy_from_slice(&bytes[to_usize(at)..to_usize(at) + into.len()]);
        Ok(())
    };
    walk_pages(&read, 0, bytes.len() as u64, most)
}

/// Fills a buffer from an offset; both are within the chunk.
type PageRead<'r> = &'r dyn Fn(u64, &mut [u8]) -> Result<()>;

fn walk_pages(read: PageRead<'_>, begin: u64, end: u64, most: u64) -> Result<Vec<ParquetPage>> {
    let mut pages = Vec::new();
    let mut at = begin;
    while at < end {
        let refuse = |what: String| Err(Error::new(Kind::Format, what).byte(at));
        if pages.len() as u64 == most {
            return refuse(format!("expected at most {most} pages, found more"));
        }
        let page = read_page(read, at, end)?;
        let next = page.body.checked_add(page.stored).filter(|next| *next <= end);
        let Some(next) = next else {
            let what = format!("expected a page of at most {} bytes, found {}", end - page.body, page.stored);
            return refuse(what);
        };
        if page.kind == PageKind::Dictionary && at != begin {
            return refuse("expected a dictionary in front of all pages, found one behind them".to_string());
        }
        pages.push(page);
        at = next;
    }
    Ok(pages)
}

/// Reads the header at `at`, with a small read first.
fn read_page(read: PageRead<'_>, at: u64, end: u64) -> Result<ParquetPage> {
    let mut page = Err(Error::new(Kind::Truncated, "expected a page header, found nothing").byte(at));
    for length in HEADERS.map(|length| length.min(end - at)) {
        let mut header = memory::bytes(length)?;
        read(at, &mut header)?;
        page = parse_page(&header, at);
        let is_longer = page.as_ref().is_err_and(|e| e.kind == Kind::Truncated);
        if !is_longer {
            break;
        }
    }
    page
}

fn parse_page(bytes: &[u8], at: u64) -> Result<ParquetPage> {
    let mut reader = ThriftReader::new(bytes, at);
    let [mut kind, mut raw, mut stored, mut values, mut encoding] = [None; 5];
    let mut contents = None;
    reader.fields(&mut |reader, number, wire| {
        // The number of the encoding's field in each header.
        let of_encoding = match number {
            1 => return reader.count(ThriftType::I32, wire).map(|n| kind = Some(n)).map(|()| true),
            2 => return reader.count(ThriftType::I32, wire).map(|n| raw = Some(n)).map(|()| true),
            3 => return reader.count(ThriftType::I32, wire).map(|n| stored = Some(n)).map(|()| true),
            5 | 7 => 2,
            8 => 4,
            _ => return Ok(false),
        };
        contents = Some(number);
        reader.nested(wire, &mut |reader, number, wire| {
            match number {
                1 => values = Some(reader.count(ThriftType::I32, wire)?),
                number if number == of_encoding => encoding = Some(reader.count(ThriftType::I32, wire)?),
                _ => return Ok(false),
            }
            Ok(true)
        })?;
        Ok(true)
    })?;
    let kind = match (kind, contents) {
        (Some(0), Some(5)) => PageKind::Data,
        (Some(2), Some(7)) => PageKind::Dictionary,
        (Some(3), Some(8)) => PageKind::DataV2,
        _ => return Err(Error::new(Kind::Format, "expected a page of values or a dictionary, found another").byte(at)),
    };
    match (raw, stored, values, encoding) {
        (Some(raw), Some(stored), Some(values), Some(encoding)) => {
            Ok(ParquetPage { kind, body: reader.offset(), stored, raw, values, encoding })
        }
        _ => Err(Error::new(Kind::Format, "expected sizes, number of values and encoding of a page").byte(at)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
