//! Rows of packed chunks: decoded without the others of their chunk, and chunks that are needed again are kept.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use actshard_core::DType;
use actshard_core::arrays::coded::CodedArray;
use actshard_core::arrays::naming::Naming;
use actshard_core::codec::planes::encode;
use actshard_core::dtype::Cast;
use actshard_core::files::chunks::{ChunkArray, ChunkFiles, Content};
use actshard_core::gather::{Ints, Origin, Out, Pick, gather};
use actshard_core::layout::chunked::{Chunked, Lengths, Member};
use actshard_core::source::Io;
use actshard_core::source::local::Local;
use proptest::prelude::*;

const TOKENS: u64 = 24;
const CHUNK: u64 = 8;
const WIDTH: u64 = 20;
const CHUNKS: u64 = TOKENS / CHUNK;

/// The element of a row of an example: high bytes are few, so that planes are coded.
fn element(example: u64, token: u64, at: u64) -> u32 {
    let random = (example * 7919 + token * 104_729 + at * 31 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (random as u32 & 0x00ff_ffff) >> (random % 13)
}

/// Writes packed shards of one example each. `row` is the length of a block's rows: other encoders may choose another one.
fn packed(folder: &Path, examples: u64, row: u64) -> ChunkArray {
    for example in 0..examples {
        let (mut shard, mut index) = (vec![], vec![]);
        for chunk in 0..CHUNKS {
            let tokens = chunk * CHUNK..(chunk + 1) * CHUNK;
            let each = tokens.flat_map(|token| (0..WIDTH).map(move |at| element(example, token, at)));
            let rows: Vec<u8> = each.flat_map(u32::to_le_bytes).collect();
            let mut block = encode(&rows, 4, row as usize).unwrap();
            block.extend(crc32c::crc32c(&block).to_le_bytes());
            index.extend([shard.len() as u64, block.len() as u64].map(u64::to_le_bytes));
            shard.extend(block);
        }
        let index = index.concat();
        shard.extend(&index);
        shard.extend(crc32c::crc32c(&index).to_le_bytes());
        let path = folder.join(format!("c/{example}/0/0/0"));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, shard).unwrap();
    }
    let metadata = format!(
        r#"{{"zarr_format":3,"node_type":"array","shape":[{examples},1,{TOKENS},{WIDTH}],"data_type":"uint32","fill_value":0,
        "chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":[1,1,{TOKENS},{WIDTH}]}}}},
        "chunk_key_encoding":{{"name":"default","configuration":{{"separator":"/"}}}},
        "codecs":[{{"name":"sharding_indexed","configuration":{{"chunk_shape":[1,1,{CHUNK},{WIDTH}],"codecs":[
        {{"name":"bytes","configuration":{{"endian":"little"}}}},
        {{"name":"actshard.planes","configuration":{{"typesize":4,"width":{WIDTH}}}}},{{"name":"crc32c"}}],
        "index_codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}},{{"name":"crc32c"}}],
        "index_location":"end"}}}}]}}"#
    );
    fs::write(folder.join("zarr.json"), &metadata).unwrap();
    let store = Arc::new(Local { io: Io::Pread });
    ChunkArray {
        folder: folder.into(),
        metadata: folder.join("zarr.json").into(),
        naming: Naming::default_of(true),
        shape: [examples, 1, TOKENS, WIDTH],
        chunk: [1, 1, CHUNK, WIDTH],
        fill: Some(vec![0; 4]),
        content: Content::Coded(Box::new(CodedArray::of(store, &folder.into(), metadata.as_bytes(), true))),
        scales: None,
    }
}

struct Opened {
    files: ChunkFiles,
    layout: Chunked,
    _folder: tempfile::TempDir,
}

fn opened(examples: u64, row: u64, memory: u64) -> Opened {
    let folder = tempfile::tempdir().unwrap();
    let files =
        ChunkFiles::new(vec![packed(folder.path(), examples, row)], WIDTH, DType::U32, memory, Io::Pread).unwrap();
    let member = Member { examples, parts: files.grids() };
    let layout = Chunked::new(1, vec![member], vec![Lengths::Same(TOKENS)]).unwrap();
    Opened { files, layout, _folder: folder }
}

impl Opened {
    /// Gathers rows into one block or separate places, compares them, and returns the number of chunks decoded as a whole.
    fn check(&self, rows: &[(u64, u64)], dense: bool) -> u64 {
        let before = self.files.decodings();
        let (examples, tokens): (Vec<i64>, Vec<i64>) = rows.iter().map(|(e, t)| (*e as i64, *t as i64)).unzip();
        let source = Origin { files: &self.files, layout: &self.layout, groups: Ints::One(0), only: 0..u64::MAX };
        let pick = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
        let cast = Cast::between(DType::U32, DType::U32).unwrap();
        let row = WIDTH as usize * 4;
        let mut out = vec![0xaa; rows.len() * row];
        let places = if dense { Out::Dense(&mut out) } else { Out::Places(out.chunks_exact_mut(row).collect()) };
        gather(&source, pick, rows.len(), cast, places, &mut || false).unwrap();
        for ((example, token), found) in rows.iter().zip(out.chunks_exact(row)) {
            let expected: Vec<u8> = (0..WIDTH).flat_map(|at| element(*example, *token, at).to_le_bytes()).collect();
            assert_eq!(found, expected, "example {example}, token {token}");
        }
        self.files.decodings() - before
    }
}

/// More chunks than threads: fewer are opened together.
const EXAMPLES: u64 = 64;

#[test]
fn a_chunk_is_kept_when_it_is_needed_again() {
    let all: Vec<(u64, u64)> = (0..EXAMPLES).flat_map(|e| (0..TOKENS).map(move |t| (e, t))).collect();
    let some: Vec<(u64, u64)> = all.iter().copied().filter(|(_, t)| t % CHUNK == 3).collect();
    let chunks = EXAMPLES * CHUNKS;
    let large = opened(EXAMPLES, WIDTH, 1 << 30);
    for rows in [&all, &some] {
        let large = if rows.len() == all.len() { &large } else { &opened(EXAMPLES, WIDTH, 1 << 30) };
        assert_eq!([0; 4].map(|_| large.check(rows, true)), [0, chunks, 0, 0]);
    }
    // Whole chunks that do not all fit are not kept; some rows of few chunks are.
    let small = opened(EXAMPLES, WIDTH, 64 * CHUNK * WIDTH * 4);
    assert_eq!([0; 3].map(|_| small.check(&all, false)), [0; 3]);
    let few: Vec<(u64, u64)> = (0..40).map(|e| (e, 5)).collect();
    assert_eq!([0; 3].map(|_| small.check(&few, true)), [0, 40, 0]);
}

#[test]
fn blocks_with_rows_of_another_length_are_decoded_as_a_whole() {
    let some: Vec<(u64, u64)> = (0..EXAMPLES).map(|e| (e, e % TOKENS)).collect();
    for row in [1, WIDTH / 2, WIDTH * 2] {
        assert_eq!(opened(EXAMPLES, row, 1 << 30).check(&some, true), EXAMPLES, "rows of {row} values");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.div_ceil(8), ..ProptestConfig::default() })]
    #[test]
    fn any_rows_are_those_that_were_written(
        requests in prop::collection::vec((prop::collection::vec((0..EXAMPLES, 0..TOKENS), 0..90), any::<bool>()), 1..4),
        memory in prop::sample::select(vec![0u64, 3000, 1 << 30]),
    ) {
        let opened = opened(EXAMPLES, WIDTH, memory);
        for (rows, dense) in requests {
            opened.check(&rows, dense);
        }
    }
}
