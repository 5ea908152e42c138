use super::*;

fn varint(mut value: u64) -> Vec<u8> {
    let mut bytes = vec![];
    while value > 127 {
        bytes.push((value & 127) as u8 | 128);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

fn integer(step: u8, wire: u8, value: i64) -> Vec<u8> {
    [vec![step << 4 | wire], varint((value << 1 ^ value >> 63) as u64)].concat()
}

fn number(step: u8, value: i64) -> Vec<u8> {
    integer(step, 6, value)
}

fn small(step: u8, value: i64) -> Vec<u8> {
    integer(step, 5, value)
}

fn text(step: u8, value: &[u8]) -> Vec<u8> {
    [vec![step << 4 | 8], varint(value.len() as u64), value.to_vec()].concat()
}

fn list(step: u8, items: &[Vec<u8>]) -> Vec<u8> {
    [vec![step << 4 | 9, 0xfc], varint(items.len() as u64), items.concat()].concat()
}

fn nested(step: u8, fields: &[Vec<u8>]) -> Vec<u8> {
    [vec![step << 4 | 12], fields.concat(), vec![0]].concat()
}

fn group_node(name: &str, repetition: i64, children: i64) -> Vec<u8> {
    [small(3, repetition), text(1, name.as_bytes()), small(1, children), vec![0]].concat()
}

fn leaf_node(name: &str, physical_type: i64) -> Vec<u8> {
    [small(1, physical_type), small(2, 1), text(1, name.as_bytes()), vec![0]].concat()
}

/// Type, compression, numbers of values and bytes, offsets; statistics in front of the end.
struct TestChunk {
    physical_type: i64,
    codec: i64,
    values: i64,
    stored: i64,
    data: i64,
    dictionary: i64,
    statistics: Vec<Vec<u8>>,
}

const CHUNK: TestChunk =
    TestChunk { physical_type: 1, codec: 1, values: 7, stored: 50, data: 30, dictionary: 4, statistics: vec![] };

impl TestChunk {
    fn bytes(&self) -> Vec<u8> {
        let fields = [
            small(1, self.physical_type),
            vec![0x19, 0x15, 0x00],       // encodings
            vec![0x19, 0x18, 0x01, b'n'], // path
            small(1, self.codec),
            number(1, self.values),
            number(1, 80),
            number(1, self.stored),
            number(2, self.data),
            number(2, self.dictionary),
            nested(1, &self.statistics),
        ];
        [number(2, 4), nested(1, &fields), vec![0]].concat()
    }
}

fn group(chunks: &[Vec<u8>], rows: i64) -> Vec<u8> {
    [list(1, chunks), number(1, 80), number(1, rows), vec![0]].concat()
}

fn footer(schema: &[Vec<u8>], rows: i64, groups: &[Vec<u8>]) -> Vec<u8> {
    [small(1, 2), list(1, schema), number(1, rows), list(1, groups), text(2, b"a test"), vec![0]].concat()
}

fn of_chunk(chunk: &TestChunk) -> Result<ParquetFooter> {
    let schema = [group_node("schema", 0, 1), leaf_node("n", 1)];
    parse_footer(&footer(&schema, 7, &[group(&[chunk.bytes()], 7)]), 100)
}

#[test]
fn a_footer_has_leaves_with_paths_and_a_chunk_for_each() {
    let schema = [
        group_node("schema", 0, 2),
        group_node("lists", 1, 1),
        group_node("list", 2, 1),
        group_node("element", 1, 2),
        leaf_node("x", 4),
        leaf_node("ä", 6),
        leaf_node("n", 2),
    ];
    let chunk = |physical_type, dictionary| TestChunk { physical_type, dictionary, ..CHUNK };
    let statistics = vec![
        text(1, &9_i64.to_le_bytes()),
        text(1, &8_i64.to_le_bytes()),
        number(1, 3),
        text(2, &5_i64.to_le_bytes()),
        text(1, &(-5_i64).to_le_bytes()),
    ];
    let last = TestChunk { statistics, ..chunk(2, 40) };
    let chunks = [chunk(4, 4).bytes(), chunk(6, 0).bytes(), last.bytes()];
    let footer = parse_footer(&footer(&schema, 9, &[group(&chunks, 7), group(&chunks, 2)]), 100).unwrap();
    let leaves: Vec<_> = footer.leaves.iter().map(|leaf| (leaf.path.as_str(), leaf.max_repetition_level)).collect();
    assert_eq!(leaves, [("lists.list.element.x", 1), ("lists.list.element.ä", 1), ("n", 0)]);
    assert_eq!((footer.num_rows, footer.groups.len(), footer.groups[1].num_rows), (9, 2, 2));
    let columns = &footer.groups[0].columns;
    assert_eq!(columns.iter().map(|chunk| chunk.pages().start).collect::<Vec<_>>(), [4, 30, 30]);
    assert_eq!((columns[0].codec, columns[0].num_values, columns[0].range), ("SNAPPY", 7, None));
    assert_eq!((columns[0].total_compressed_size, columns[0].total_uncompressed_size), (50, 80));
    assert_eq!(columns[2].range, Some(IntegerRange { minimum: -5, maximum: 5, null_count: Some(3) }));
}

#[test]
fn older_statistics_are_used_without_newer_ones_and_only_of_integers() {
    let range = |physical_type: i64, size: usize| {
        let statistics = vec![text(1, &vec![1; size]), text(1, &vec![0; size])];
        let schema = [group_node("schema", 0, 1), leaf_node("n", physical_type)];
        let chunk = TestChunk { physical_type, statistics, ..CHUNK };
        let footer = parse_footer(&footer(&schema, 7, &[group(&[chunk.bytes()], 7)]), 100).unwrap();
        footer.groups[0].columns[0].range.map(|range| (range.minimum, range.maximum, range.null_count))
    };
    assert_eq!(range(1, 4), Some((0, 0x0101_0101, None)));
    assert_eq!(range(2, 8), Some((0, 0x0101_0101_0101_0101, None)));
    assert_eq!([range(1, 8), range(2, 4), range(4, 4), range(6, 4)], [None; 4]);
}

#[test]
fn every_rule_of_a_chunk_has_its_error() {
    for (chunk, text) in [
        (TestChunk { physical_type: 2, ..CHUNK }, "expected type INT32, as in the schema, found INT64"),
        (TestChunk { physical_type: 8, ..CHUNK }, "expected a physical type from 0 to 7, found 8"),
        (TestChunk { codec: 8, ..CHUNK }, "expected a compression from 0 to 7, found 8"),
        (TestChunk { values: -1, ..CHUNK }, "at least 0, found -1"),
        (TestChunk { stored: -1, ..CHUNK }, "at least 0, found -1"),
        (TestChunk { data: i64::MIN, ..CHUNK }, "at least 0"),
        (TestChunk { stored: 97, ..CHUNK }, "expected pages between byte 4 and 100, found 97 bytes from byte 4 on"),
        (TestChunk { stored: i64::MAX, ..CHUNK }, "expected pages between"),
        (TestChunk { data: i64::MAX, dictionary: i64::MAX, stored: i64::MAX, ..CHUNK }, "expected pages between"),
        (TestChunk { data: 3, ..CHUNK }, "expected pages between"),
        (TestChunk { statistics: vec![small(1, 5)], ..CHUNK }, "expected a value of type Binary, found I32"),
    ] {
        let error = of_chunk(&chunk).unwrap_err();
        assert_eq!(error.kind, Kind::Format, "{error}");
        assert!(error.detail.starts_with("row group 0: column 'n': "), "{error}");
        assert!(error.detail.contains(text), "{error}");
        assert!(error.offset.is_some_and(|at| at > 100));
    }
    assert_eq!(of_chunk(&TestChunk { stored: 96, ..CHUNK }).unwrap().groups[0].columns[0].pages(), 4..100);
    // Without pages, offsets mean nothing.
    of_chunk(&TestChunk { stored: 0, data: 0, dictionary: 0, ..CHUNK }).unwrap();
    let empty = of_chunk(&TestChunk { values: 0, data: 0, ..CHUNK }).unwrap();
    assert!(empty.groups[0].columns[0].pages().is_empty());
}

#[test]
fn every_rule_of_a_footer_has_its_error() {
    let (root, leaf, chunk) = (group_node("schema", 0, 1), leaf_node("n", 1), CHUNK.bytes());
    let schema = [root.clone(), leaf.clone()];
    let groups = [group(std::slice::from_ref(&chunk), 7)];
    let deep: Vec<_> = (0..70).map(|_| group_node("g", 0, 1)).chain([leaf.clone()]).collect();
    let long = "x".repeat(1000);
    let wide: Vec<_> = [vec![root.clone(), group_node(&long, 0, 9_000)], vec![leaf.clone(); 9_000]].concat();
    let encrypted = [small(1, 2), nested(7, &[]), vec![0]].concat();
    for (bytes, kind, text) in [
        (footer(&[], 7, &groups), Kind::Format, "found no element"),
        (footer(std::slice::from_ref(&root), 7, &groups), Kind::Format, "found fewer than its groups contain"),
        (footer(&[&schema[..], std::slice::from_ref(&leaf)].concat(), 7, &groups), Kind::Format, "outside its groups"),
        (footer(&[root.clone(), leaf_node("n", -1)], 7, &groups), Kind::Format, "at least 0, found -1"),
        (footer(&[root.clone(), leaf_node("n", 9)], 7, &groups), Kind::Format, "from 0 to 7, found 9"),
        (footer(&[root.clone(), group_node("g", 3, 0)], 7, &groups), Kind::Format, "a repetition from 0 to 2"),
        (footer(&[root.clone(), group_node("g", 0, -1)], 7, &groups), Kind::Format, "at least 0, found -1"),
        (footer(&[root.clone(), vec![0]], 7, &groups), Kind::Format, "a name of a column, found none"),
        (footer(&[root.clone(), [text(4, b"\xff"), vec![0]].concat()], 7, &groups), Kind::Format, "in UTF-8"),
        (footer(&deep, 7, &groups), Kind::Format, "nested at most 64 deep"),
        (footer(&wide, 7, &groups), Kind::Format, "shorter names"),
        (footer(&schema, 8, &groups), Kind::Format, "expected 8 rows in all row groups, found 7"),
        (footer(&schema, -8, &groups), Kind::Format, "at least 0, found -8"),
        (
            footer(&schema, 7, &[group(&[], 7)]),
            Kind::Format,
            "row group 0: expected 1 columns, as the schema has, found 0",
        ),
        (footer(&schema, 7, &[group(&[chunk.clone(), chunk.clone()], 7)]), Kind::Format, "found 2"),
        (footer(&schema, 7, &[vec![0]]), Kind::Format, "expected columns and a number of rows"),
        (footer(&schema, 7, &[group(&[vec![0]], 7)]), Kind::Format, "metadata of a column chunk, found none"),
        (footer(&schema, 7, &[group(&[nested(3, &[]), vec![0]], 7)]), Kind::Format, "columns"),
        ([list(4, &groups), vec![0]].concat(), Kind::Format, "a schema before row groups"),
        (vec![0], Kind::Format, "found a footer without one of them"),
        ([footer(&schema, 7, &groups), vec![0]].concat(), Kind::Format, "the end of the footer, found 1 more bytes"),
        (encrypted, Kind::Unsupported, "encrypted"),
    ] {
        let error = parse_footer(&bytes, 100).unwrap_err();
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.detail.contains(text), "{text}: {error}");
        assert!(error.offset.is_some_and(|at| (100..=100 + bytes.len() as u64).contains(&at)), "{error:?}");
    }
    let whole = footer(&schema, 7, &groups);
    for length in 0..whole.len() {
        parse_footer(&whole[..length], 100).unwrap_err();
    }
    parse_footer(&whole, 100).unwrap();
}

#[test]
fn the_end_of_a_file_leads_to_its_footer() {
    let end = |length: u32, magic: &[u8]| [&length.to_le_bytes(), magic].concat();
    assert_eq!(footer_begin(&end(88, b"PAR1"), 100).unwrap(), 4);
    for (end, size, kind) in [
        (end(89, b"PAR1"), 100, Kind::Format),
        (end(u32::MAX, b"PAR1"), 100, Kind::Format),
        (end(0, b"PAR1"), 8, Kind::Format),
        (end(8, b"PAR2"), 100, Kind::Format),
        (end(8, b"PARE"), 100, Kind::Unsupported),
        (b"PAR".to_vec(), 3, Kind::Truncated),
        (vec![], 0, Kind::Truncated),
    ] {
        assert_eq!(footer_begin(&end, size).unwrap_err().kind, kind);
    }
}

fn page(kind: i64, stored: i64, contents: &[u8], number: u8) -> Vec<u8> {
    let head = [small(1, kind), small(1, 90), small(1, stored)].concat();
    [head, vec![(number - 3) << 4 | 12], contents.to_vec(), vec![0, 0], [7].repeat(stored.max(0) as usize)].concat()
}

#[test]
fn pages_are_found_by_their_headers() {
    let statistics = |step: u8| nested(step, &[text(1, &[9; 700])]);
    let dictionary = page(2, 5, &[small(1, 3), small(1, 0)].concat(), 7);
    let data = page(0, 8, &[small(1, 40), small(1, 2), small(1, 3), small(1, 3), statistics(1)].concat(), 5);
    let second =
        page(3, 2, &[small(1, 6), small(1, 0), small(1, 6), small(1, 8), small(1, 0), small(1, 0)].concat(), 8);
    let bytes = [dictionary.clone(), data.clone(), second.clone()].concat();
    let pages = parse_pages(&bytes, 3).unwrap();
    let read = |page: &ParquetPage| (page.kind, page.stored, page.raw, page.values, page.encoding);
    assert_eq!(
        pages.iter().map(read).collect::<Vec<_>>(),
        [(PageKind::Dictionary, 5, 90, 3, 0), (PageKind::Data, 8, 90, 40, 2), (PageKind::DataV2, 2, 90, 6, 8),]
    );
    assert_eq!(pages[2].body + pages[2].stored, bytes.len() as u64);
    assert_eq!(parse_pages(&[], 0).unwrap(), []);
    for (bytes, most, text) in [
        (&bytes, 2, "expected at most 2 pages"),
        (&[data.clone(), dictionary].concat(), 9, "expected a dictionary in front"),
        (&[&data[..], &second[..second.len() - 1]].concat(), 9, "expected a page of at most 1 bytes, found 2"),
        (&page(1, 2, &[], 6), 9, "expected a page of values"),
        (&page(0, 2, &[small(1, 40), small(1, 2)].concat(), 7), 9, "expected a page of values"),
        (&page(0, 2, &small(1, 40), 5), 9, "expected sizes, number of values and encoding"),
        (&page(0, -2, &[small(1, 40), small(1, 2)].concat(), 5), 9, "at least 0, found -2"),
        (&vec![0x15], 9, "expected 1 more bytes"),
    ] {
        let error = parse_pages(bytes, most).unwrap_err();
        assert!(error.detail.contains(text), "{text}: {error}");
    }
}
