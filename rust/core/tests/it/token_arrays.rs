//! Compares token arrays and fields with naive oracles: for every layout, every range equals a simple loop over the chunks,
//! for any order of reads and any memory for decoded blocks.

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Barrier};

use actshard_core::source::local::Local;
use actshard_core::source::{Io, Store};
use actshard_core::tokens::array::{BlockCache, HeldFile, TokenArray};
use actshard_core::tokens::frame::stored_header;
use actshard_core::tokens::jagged::{Cursor, Field, FieldShard};
use actshard_core::tokens::ledger::LedgerState;
use proptest::prelude::*;
use serde_json::{Value, json};
use zarrs::array::BytesToBytesCodecTraits;
use zarrs::array::codec::BloscCodec;
use zarrs::metadata_ext::codec::blosc::{BloscCompressionLevel, BloscCompressor, BloscShuffleMode};

fn open_array(folder: &Path, io: Io, cache: Arc<BlockCache>, most: Option<u64>) -> actshard_core::Result<TokenArray> {
    let store: Arc<dyn Store> = Arc::new(Local { io });
    TokenArray::open(&store, folder.into(), cache, most, Arc::default())
}

/// The encoding of an inner chunk.
#[derive(Clone, Copy, Debug)]
enum Chunk {
    Absent,
    Stored,
    /// By c-blosc, with the requested block size.
    Lz4(usize),
    /// In blocks of this many numbers, made by [`frame_by_hand`]: c-blosc makes none below 64 KiB.
    Blocks {
        numbers: usize,
        shuffle: bool,
        split: bool,
    },
    /// Decoded by c-blosc.
    Zstd(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Codec {
    Blosc,
    Plain,
    BigEndian,
    Gzip,
}

/// The layout of an array, without its numbers.
#[derive(Clone, Debug)]
struct Layout {
    dtype: &'static str,
    codec: Codec,
    sharded: bool,
    index_at_end: bool,
    index_checked: bool,
    index_big_endian: bool,
    fill: i64,
    inner: usize,
    per_file: usize,
    /// The chunks of each file, or `None` if the file is missing.
    files: Vec<Option<Vec<Chunk>>>,
}

impl Layout {
    fn new(dtype: &'static str, inner: usize, files: Vec<Option<Vec<Chunk>>>) -> Layout {
        Layout {
            dtype,
            codec: Codec::Blosc,
            sharded: true,
            index_at_end: true,
            index_checked: true,
            index_big_endian: false,
            fill: 0,
            inner,
            per_file: files.iter().flatten().map(Vec::len).max().unwrap_or(1),
            files,
        }
    }

    fn item(&self) -> usize {
        match self.dtype {
            "uint8" => 1,
            "uint16" => 2,
            "int32" | "float32" => 4,
            _ => 8,
        }
    }

    fn bytes(&self, number: i64) -> Vec<u8> {
        match self.dtype {
            "float32" => (number as f32).to_le_bytes().to_vec(),
            _ => number.to_le_bytes()[..self.item()].to_vec(),
        }
    }

    fn room(&self) -> usize {
        self.files.len() * self.per_file * self.inner
    }

    fn metadata(&self) -> Value {
        let endian =
            |big: bool| json!({"name": "bytes", "configuration": {"endian": if big { "big" } else { "little" }}});
        let mut codecs = vec![endian(self.codec == Codec::BigEndian)];
        match self.codec {
            Codec::Blosc => codecs.push(json!({"name": "blosc", "configuration": {
                "cname": "lz4", "clevel": 5, "shuffle": "shuffle", "typesize": self.item(), "blocksize": 0}})),
            Codec::Gzip => codecs.push(json!({"name": "gzip", "configuration": {"level": 5}})),
            Codec::Plain | Codec::BigEndian => {}
        }
        let mut outer = self.inner;
        if self.sharded {
            outer *= self.per_file;
            let mut index = vec![endian(self.index_big_endian)];
            if self.index_checked {
                index.push(json!({"name": "crc32c"}));
            }
            codecs = vec![json!({"name": "sharding_indexed", "configuration": {
                "chunk_shape": [self.inner], "codecs": codecs, "index_codecs": index,
                "index_location": if self.index_at_end { "end" } else { "start" }}})];
        }
        json!({"zarr_format": 3, "node_type": "array", "shape": [1u64 << 54], "data_type": self.dtype, "fill_value": self.fill,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [outer]}},
            "chunk_key_encoding": {"name": "default"}, "codecs": codecs})
    }

    fn encoded(&self, chunk: Chunk, numbers: &[i64]) -> Vec<u8> {
        let mut plain: Vec<u8> = numbers.iter().flat_map(|n| self.bytes(*n)).collect();
        let blosc = |how, block| {
            let level = BloscCompressionLevel::try_from(5u8).unwrap();
            let codec = BloscCodec::new(how, level, Some(block), BloscShuffleMode::Shuffle, Some(self.item())).unwrap();
            codec.encode(plain.clone().into(), &zarrs::array::CodecOptions::default()).unwrap().into_owned()
        };
        match (self.codec, chunk) {
            (Codec::Plain, _) => plain,
            (Codec::BigEndian, _) => {
                plain.chunks_exact_mut(self.item()).for_each(<[u8]>::reverse);
                plain
            }
            (Codec::Gzip, _) => {
                let mut out = flate2::write::GzEncoder::new(vec![], flate2::Compression::fast());
                out.write_all(&plain).unwrap();
                out.finish().unwrap()
            }
            (_, Chunk::Lz4(block)) => blosc(BloscCompressor::LZ4, block),
            (_, Chunk::Zstd(block)) => blosc(BloscCompressor::Zstd, block),
            (_, Chunk::Blocks { numbers, shuffle, split }) => {
                let made = frame_by_hand(&plain, self.item(), numbers, shuffle, split);
                let codec = BloscCodec::new(
                    BloscCompressor::LZ4,
                    BloscCompressionLevel::try_from(5u8).unwrap(),
                    None,
                    BloscShuffleMode::NoShuffle,
                    None,
                );
                let size = zarrs::array::BytesRepresentation::FixedSize(plain.len() as u64);
                let read = codec.unwrap().decode(made.clone().into(), &size, &zarrs::array::CodecOptions::default());
                assert_eq!(read.unwrap(), plain, "c-blosc reads it");
                made
            }
            _ => [&stored_header(plain.len(), self.item())[..], &plain].concat(),
        }
    }

    /// Writes the array and returns its numbers: the given ones where chunks are stored, else the fill value.
    fn lay(&self, folder: &Path, numbers: impl Fn(usize) -> i64) -> Vec<i64> {
        std::fs::create_dir_all(folder.join("c")).unwrap();
        std::fs::write(folder.join("zarr.json"), self.metadata().to_string()).unwrap();
        let mut held: Vec<i64> = vec![];
        for (number, file) in self.files.iter().enumerate() {
            let mut index = vec![(u64::MAX, u64::MAX); self.per_file];
            let index_bytes = self.per_file * 16 + if self.index_checked { 4 } else { 0 };
            let head = if self.sharded && !self.index_at_end { index_bytes } else { 0 };
            let mut bytes = vec![0; head];
            for (slot, entry) in index.iter_mut().enumerate() {
                let chunk =
                    file.as_ref().map_or(Chunk::Absent, |chunks| chunks.get(slot).copied().unwrap_or(Chunk::Absent));
                let first = held.len();
                if matches!(chunk, Chunk::Absent) {
                    held.resize(first + self.inner, self.fill);
                    continue;
                }
                held.extend((first..first + self.inner).map(&numbers));
                let made = self.encoded(chunk, &held[first..]);
                *entry = (bytes.len() as u64, made.len() as u64);
                bytes.extend(made);
            }
            if self.sharded {
                let order = |n: u64| if self.index_big_endian { n.to_be_bytes() } else { n.to_le_bytes() };
                let mut raw: Vec<u8> = index.iter().flat_map(|(a, n)| [order(*a), order(*n)].concat()).collect();
                if self.index_checked {
                    raw.extend(crc32c::crc32c(&raw).to_le_bytes());
                }
                if self.index_at_end {
                    bytes.extend(raw);
                } else {
                    bytes[..head].copy_from_slice(&raw);
                }
            }
            // An unsharded file without a chunk does not exist.
            if file.is_some() && (self.sharded || index[0].0 != u64::MAX) {
                std::fs::write(folder.join(format!("c/{number}")), bytes).unwrap();
            }
        }
        held
    }
}

/// A blosc frame of LZ4 blocks, per `README_CHUNK_FORMAT.rst` of c-blosc and the decoder in its blosc.c.
fn frame_by_hand(plain: &[u8], item: usize, numbers: usize, shuffle: bool, split: bool) -> Vec<u8> {
    let block = (numbers.max(1) * item).min(plain.len());
    let count = plain.len().div_ceil(block);
    let flags = 1 << 5 | u8::from(shuffle && item > 1) | if split { 0 } else { 0x10 };
    let mut out = vec![2, 1, flags, item as u8];
    for word in [plain.len(), block, 0] {
        out.extend((word as u32).to_le_bytes());
    }
    out.resize(16 + 4 * count, 0);
    for (i, bytes) in plain.chunks(block).enumerate() {
        let start = (out.len() as u32).to_le_bytes();
        out[16 + 4 * i..20 + 4 * i].copy_from_slice(&start);
        let planes: Vec<u8> = match shuffle && item > 1 {
            true => (0..item).flat_map(|plane| bytes.iter().skip(plane).step_by(item)).copied().collect(),
            false => bytes.to_vec(),
        };
        // Frames from before the flag are split only if blocks are large enough; the last block only if it is full.
        let parts = if split && item > 1 && block / item >= 128 && bytes.len() == block { item } else { 1 };
        for part in planes.chunks(planes.len() / parts) {
            let coded = lz4_by_hand(part);
            out.extend((coded.len() as u32).to_le_bytes());
            out.extend(coded);
        }
    }
    let len = (out.len() as u32).to_le_bytes();
    out[12..16].copy_from_slice(&len);
    out
}

/// One literal and one match if all bytes are equal; else only literals, or uncompressed bytes (which blosc recognises by
/// the length).
fn lz4_by_hand(bytes: &[u8]) -> Vec<u8> {
    let long = |out: &mut Vec<u8>, mut more: usize| {
        while more >= 255 {
            out.push(255);
            more -= 255;
        }
        out.push(more as u8);
    };
    let mut out = vec![];
    if bytes.len() >= 32 && bytes.iter().all(|b| *b == bytes[0]) {
        out.extend([0x1f, bytes[0], 1, 0]);
        long(&mut out, bytes.len() - 6 - 4 - 15);
        out.push(0x50);
        out.extend([bytes[0]; 5]);
    } else if bytes.len() >= 15 && bytes[0].is_multiple_of(2) {
        out.push(0xf0);
        long(&mut out, bytes.len() - 15);
        out.extend(bytes);
    } else {
        out.extend(bytes);
    }
    out
}

fn chunk() -> impl Strategy<Value = Chunk> {
    let block = prop::sample::select(vec![0usize, 256, 512, 1024, 2048, 4096]);
    prop_oneof![
        1 => Just(Chunk::Absent),
        1 => Just(Chunk::Stored),
        1 => block.clone().prop_map(Chunk::Lz4),
        5 => (1usize..600, any::<bool>(), any::<bool>())
            .prop_map(|(numbers, shuffle, split)| Chunk::Blocks { numbers, shuffle, split }),
        1 => block.prop_map(Chunk::Zstd),
    ]
}

fn layout() -> impl Strategy<Value = Layout> {
    let dtype = prop::sample::select(vec!["uint8", "uint16", "int32", "int64", "float32"]);
    let codec = prop_oneof![
        5 => Just(Codec::Blosc), 1 => Just(Codec::Plain), 1 => Just(Codec::BigEndian), 1 => Just(Codec::Gzip)
    ];
    let file = |per_file| prop_oneof![1 => Just(None), 6 => prop::collection::vec(chunk(), per_file).prop_map(Some)];
    (1usize..4, any::<bool>())
        .prop_flat_map(move |(per_file, sharded)| {
            let per_file = if sharded { per_file } else { 1 };
            let files = prop::collection::vec(file(per_file), 1..5);
            (
                dtype.clone(),
                codec.clone(),
                Just(sharded),
                files,
                1usize..1500,
                any::<[bool; 3]>(),
                0i64..3,
                Just(per_file),
            )
        })
        .prop_map(|(dtype, codec, sharded, files, inner, flags, fill, per_file)| Layout {
            dtype,
            codec,
            sharded,
            index_at_end: flags[0],
            index_checked: flags[1],
            index_big_endian: flags[2],
            fill: fill * 7,
            inner,
            per_file,
            files,
        })
}

/// Small numbers in runs, which compress well; all chunks differ.
fn number(i: usize, seed: u64, dtype: &str) -> i64 {
    let mixed = ((i as u64 / 3) ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    (mixed % if dtype == "uint8" { 200 } else { 5000 }) as i64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(
        std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(96)
    ))]

    #[test]
    fn every_range_of_any_layout_is_what_its_chunks_hold(
        layout in layout(), seed: u64, mapped: bool, budget in prop::sample::select(vec![0u64, 3000, 1 << 20]),
        reads in prop::collection::vec((0.0f64..1.0, 0.0f64..1.0, 0u8..3), 1..40),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let mut held = layout.lay(folder.path(), |i| number(i, seed, layout.dtype));
        // One more file than exists.
        held.resize(layout.room() + layout.inner, layout.fill);
        let io = if mapped { Io::Mmap } else { Io::Pread };
        let cache = Arc::new(BlockCache::new(budget));
        let array = open_array(folder.path(), io, cache, Some(held.len() as u64)).unwrap();
        let mut last = HeldFile::default();
        for (from, part, how) in reads {
            let start = (from * held.len() as f64) as usize;
            let n = (part * (held.len() - start) as f64) as usize;
            let want = &held[start..start + n];
            if how == 1 && layout.dtype != "float32" {
                let mut out = vec![-1; n];
                array.int32(&mut last, start as u64, &mut out).unwrap();
                prop_assert!(out.iter().map(|x| i64::from(*x)).eq(want.iter().copied()));
            } else if how == 2 {
                let mut out = vec![-1.0f32; n];
                array.float32(&mut last, start as u64, &mut out).unwrap();
                prop_assert!(out.iter().map(|x| *x as i64).eq(want.iter().copied()));
            } else {
                let mut out = vec![9u8; n * layout.item()];
                array.copy(&mut last, start as u64, &mut out).unwrap();
                prop_assert_eq!(out, want.iter().flat_map(|x| layout.bytes(*x)).collect::<Vec<_>>());
            }
        }
        // Reports exactly the chunks that are not stored.
        let mut told = vec![];
        array.check(layout.room() as u64, true, &mut |e, absent| told.push((e.detail, absent)), &mut || false).unwrap();
        prop_assert!(told.iter().all(|(_, absent)| *absent), "{:?}", told);
    }

    #[test]
    fn rows_of_any_shards_are_those_between_their_offsets(
        shards in prop::collection::vec(
            (layout(), prop::collection::vec(0usize..200, 0..80), any::<bool>(), 0usize..900, any::<bool>()), 1..4
        ),
        seed: u64, mapped: bool, reads in prop::collection::vec(0.0f64..1.0, 0..30), ledger: bool,
    ) {
        let root = tempfile::tempdir().unwrap();
        let dtype = shards[0].0.dtype;
        let (mut rows, mut parts): (Vec<Vec<i64>>, Vec<FieldShard>) = (vec![], vec![]);
        for (shard, (mut layout, mut lengths, wide, frame, big)) in shards.into_iter().enumerate() {
            layout.dtype = dtype;
            let folder = root.path().join(shard.to_string());
            let held = layout.lay(&folder.join("data"), |i| number(i, seed + shard as u64, dtype));
            let (mut ends, mut at) = (vec![0i64], 0);
            lengths.retain(|n| { at += n; at <= held.len() || { at -= n; false } });
            for n in &lengths {
                let from = *ends.last().unwrap() as usize;
                rows.push(held[from..from + n].to_vec());
                ends.push((from + n) as i64);
            }
            let elements = *ends.last().unwrap() as u64;
            ends[0] = lengths.len() as i64;
            // Offsets in one inner chunk or in many, compressed or stored.
            let inner = 16 + frame;
            let chunks = ends.len().div_ceil(inner);
            let files = (0..chunks.div_ceil(2)).map(|_| Some(vec![if wide { Chunk::Lz4(1024) } else { Chunk::Stored }; 2]));
            let mut offsets = Layout::new("int64", inner, files.collect());
            offsets.index_big_endian = big;
            offsets.lay(&folder.join("offsets"), |i| ends.get(i).copied().unwrap_or(0));
            let counts = ledger.then_some((lengths.len() as u64, elements));
            parts.push(FieldShard { folder: folder.into(), counts });
        }
        let io = if mapped { Io::Mmap } else { Io::Pread };
        let field = Field::open(parts, Arc::new(Local { io }), Arc::new(BlockCache::new(4000)), LedgerState::default()).unwrap();
        prop_assert_eq!(field.num_rows(), rows.len() as u64);
        let mut cursor = Cursor::default();
        let item = field.dtype().size().unwrap();
        let shape = Layout::new(dtype, 1, vec![]);
        for at in reads.iter().filter(|_| !rows.is_empty()) {
            let row = (at * rows.len() as f64) as usize;
            let range = field.row(&mut cursor, row as u64).unwrap();
            prop_assert_eq!(range.len(), rows[row].len());
            let mut out = vec![9u8; range.len() * item];
            field.copy(&mut cursor, range.start, &mut out).unwrap();
            prop_assert_eq!(out, rows[row].iter().flat_map(|x| shape.bytes(*x)).collect::<Vec<_>>());
        }
        let bounds = field.bounds(&mut cursor, 0, rows.len()).unwrap();
        let lengths: Vec<usize> = bounds.windows(2).map(|b| (b[1] - b[0]) as usize).collect();
        prop_assert_eq!(lengths, rows.iter().map(Vec::len).collect::<Vec<_>>());
    }
}

/// Files of one array from two writers: 4 blocks in each frame of the first, 2 in those of the second.
fn two_writers() -> Layout {
    let file = |numbers| Some(vec![Chunk::Blocks { numbers, shuffle: true, split: true }; 4]);
    Layout::new("int32", 4096, vec![file(1024), file(2048)])
}

#[test]
fn frames_of_different_block_sizes_do_not_share_cached_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let layout = two_writers();
    let held = layout.lay(folder.path(), |i| (i / 4096 * 1000) as i64 + number(i, 0, "int32") % 500);
    for io in [Io::Mmap, Io::Pread] {
        let cache = Arc::new(BlockCache::new(64 << 20));
        let array = open_array(folder.path(), io, cache, Some(held.len() as u64)).unwrap();
        for pass in 0..2 {
            for start in (0..held.len()).step_by(512) {
                let mut out = vec![0; 128];
                array.int32(&mut HeldFile::default(), start as u64, &mut out).unwrap();
                let want: Vec<i32> = held[start..start + 128].iter().map(|x| *x as i32).collect();
                assert_eq!(out, want, "elements from {start}, pass {pass}");
            }
        }
    }
}

#[test]
fn cached_blocks_of_a_replaced_file_are_not_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let layout = two_writers();
    layout.lay(folder.path(), |i| number(i, 1, "int32"));
    let cache = Arc::new(BlockCache::new(64 << 20));
    // Only one file stays open at a time.
    let array = open_array(folder.path(), Io::Mmap, cache, Some(1)).unwrap();
    let mut out = vec![0; layout.room()];
    array.int32(&mut HeldFile::default(), 0, &mut out).unwrap();
    for file in ["c/0", "c/1"] {
        std::fs::remove_file(folder.path().join(file)).unwrap();
    }
    let held = layout.lay(folder.path(), |i| number(i, 2, "int32"));
    let first = layout.room() / 2;
    array.int32(&mut HeldFile::default(), 0, &mut out[..first]).unwrap();
    assert!(out[..first].iter().map(|x| i64::from(*x)).eq(held[..first].iter().copied()));
}

#[test]
fn threads_that_need_one_block_decode_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let layout = Layout::new("int64", 1 << 16, vec![Some(vec![Chunk::Lz4(1 << 19)])]);
    layout.lay(folder.path(), |i| number(i, 5, "int64"));
    let cache = Arc::new(BlockCache::new(64 << 20));
    let array = open_array(folder.path(), Io::Mmap, Arc::clone(&cache), None).unwrap();
    let barrier = Barrier::new(8);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                barrier.wait();
                let mut out = vec![0; 1 << 15];
                array.int32(&mut HeldFile::default(), 0, &mut out).unwrap();
            });
        }
    });
    // Once more for each lock that was not free in time, on a busy machine.
    assert!((1..=1 + cache.given_up()).contains(&cache.decoded()), "{}", cache.decoded());
}

/// Creates a folder with this `zarr.json` and these files.
fn folder(meta: &Value, files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("c")).unwrap();
    std::fs::write(folder.path().join("zarr.json"), meta.to_string()).unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

#[test]
fn sizes_that_only_metadata_claim_take_no_memory() {
    let small = Layout::new("int64", 4, vec![Some(vec![Chunk::Stored])]);
    for codec in [Codec::Blosc, Codec::Plain, Codec::Gzip, Codec::BigEndian] {
        for (outer, inner) in [(1u64 << 50, 1u64), (1 << 50, 1 << 24), (1 << 44, 1 << 24), (1 << 20, 1)] {
            let mut meta = Layout { codec, ..small.clone() }.metadata();
            meta["chunk_grid"]["configuration"]["chunk_shape"] = json!([outer]);
            meta["codecs"][0]["configuration"]["chunk_shape"] = json!([inner]);
            for file in [None, Some([0u8; 100])] {
                let files: Vec<(&str, &[u8])> = file.iter().map(|bytes| ("c/0", &bytes[..])).collect();
                let folder = folder(&meta, &files);
                let cache = Arc::new(BlockCache::new(1 << 20));
                // An error, or the fill value if there is no file; never an allocation of the claimed size.
                let Ok(array) = open_array(folder.path(), Io::Mmap, cache, Some(outer)) else {
                    continue;
                };
                let mut out = [7; 3];
                let read = array.int32(&mut HeldFile::default(), 0, &mut out);
                assert_eq!(read.is_ok(), file.is_none(), "{codec:?} {outer} {inner}: {read:?}");
                assert!(file.is_some() || out == [0; 3]);
            }
        }
    }
}

#[test]
fn chunk_shapes_beyond_all_memory_are_refused() {
    let mut meta = Layout::new("int64", 4, vec![]).metadata();
    meta["shape"] = json!([10, 4]);
    meta["chunk_grid"]["configuration"]["chunk_shape"] = json!([1u64 << 62, 4]);
    meta["codecs"][0]["configuration"]["chunk_shape"] = json!([1, 4]);
    let folder = folder(&meta, &[]);
    let error = open_array(folder.path(), Io::Mmap, Arc::new(BlockCache::new(0)), None).unwrap_err();
    assert!(error.to_string().contains("chunk_shape"), "{error}");
}

#[test]
fn a_chunk_longer_than_any_codec_makes_it_is_not_read_into_memory() {
    // A sparse file, with an index that covers all of it.
    for codec in [Codec::Blosc, Codec::Gzip] {
        for io in [Io::Mmap, Io::Pread] {
            let layout = Layout { codec, ..Layout::new("int64", 64, vec![Some(vec![Chunk::Lz4(0)])]) };
            let folder = folder(&layout.metadata(), &[]);
            let len = 1u64 << 40;
            let mut index = [0u64.to_le_bytes(), len.to_le_bytes()].concat();
            index.extend(crc32c::crc32c(&index).to_le_bytes());
            let file = std::fs::File::create(folder.path().join("c/0")).unwrap();
            std::os::unix::fs::FileExt::write_all_at(&file, &index, len).unwrap();
            let array = open_array(folder.path(), io, Arc::new(BlockCache::new(0)), None).unwrap();
            let error = array.int32(&mut HeldFile::default(), 0, &mut [0]).unwrap_err();
            assert!(error.to_string().contains("at most"), "{error}");
        }
    }
}

#[test]
fn special_files_are_refused_at_once() {
    let layout = Layout::new("int64", 64, vec![Some(vec![Chunk::Stored])]);
    for (name, target) in [
        ("zarr.json", "/dev/zero"),
        ("zarr.json", "/dev/full"),
        ("c/0", "/dev/zero"),
        ("zarr.json", "fifo"),
        ("c/0", "fifo"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        layout.lay(folder.path(), |i| i as i64);
        let path = folder.path().join(name);
        std::fs::remove_file(&path).unwrap();
        if target == "fifo" {
            assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        } else {
            std::os::unix::fs::symlink(target, &path).unwrap();
        }
        let opened = open_array(folder.path(), Io::Mmap, Arc::new(BlockCache::new(0)), None);
        let error = opened.and_then(|array| array.int32(&mut HeldFile::default(), 0, &mut [0])).unwrap_err();
        assert!(error.to_string().contains("special file"), "{name} {target}: {error}");
    }
}

#[test]
fn rows_that_no_file_of_offsets_has_room_for_are_refused() {
    let root = tempfile::tempdir().unwrap();
    let one = |rows: i64| {
        let offsets = Layout::new("int64", 16, vec![Some(vec![Chunk::Stored])]);
        offsets.lay(&root.path().join("offsets"), |i| if i == 0 { rows } else { 0 });
        Layout::new("int64", 16, vec![None]).lay(&root.path().join("data"), |_| 0);
        let parts = vec![FieldShard { folder: root.path().into(), counts: None }];
        Field::open(parts, Arc::new(Local { io: Io::Mmap }), Arc::new(BlockCache::new(0)), LedgerState::default())
    };
    assert_eq!(one(15).unwrap().num_rows(), 15);
    for rows in [16, 1 << 40, 1 << 59] {
        assert!(one(rows).unwrap_err().to_string().contains("element 0 counts"));
    }
}

#[test]
fn checking_takes_as_long_as_there_are_files() {
    let folder = tempfile::tempdir().unwrap();
    Layout::new("int64", 16, vec![Some(vec![Chunk::Stored])]).lay(folder.path(), |_| 1);
    let array = open_array(folder.path(), Io::Mmap, Arc::new(BlockCache::new(0)), None).unwrap();
    let (mut told, mut looks) = (vec![], 0);
    let mut watch = || {
        looks += 1;
        false
    };
    array.check(1 << 60, false, &mut |e, absent| told.push((e.to_string(), absent)), &mut watch).unwrap();
    assert_eq!((told.len(), looks), (1, 1));
    assert!(told[0].1 && told[0].0.contains("c/1: this file and the"), "{told:?}");
}
