//! Compares chunked arrays with a naive reader of the original array: any shape and chunks, missing chunks, split rows,
//! byte-swapped elements, members and parts.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use actshard_core::arrays::coded::CodedArray;
use actshard_core::arrays::index::{ABSENT, encode};
use actshard_core::arrays::naming::Naming;
use actshard_core::dtype::Cast;
use actshard_core::files::chunks::{ChunkArray, ChunkFiles, Content};
use actshard_core::gather::{Ints, Origin, Out, Pick, gather};
use actshard_core::layout::chunked::{Chunked, Lengths, Member};
use actshard_core::source::Io;
use actshard_core::source::local::Local;
use actshard_core::source::mmap::Paging;
use actshard_core::{DType, Kind, Result};
use proptest::prelude::*;

const FILL: u32 = 0xdead_beef;

/// One array of 32-bit elements: its content, and the missing chunks.
#[derive(Clone, Debug)]
struct Made {
    shape: [u64; 4],
    chunk: [u64; 4],
    /// If bit `n % 61` is set, chunk `n` has no file.
    holes: u64,
    swapped: bool,
    slashes: bool,
    seed: u32,
}

impl Made {
    fn counts(&self) -> [u64; 4] {
        [0, 1, 2, 3].map(|d| self.shape[d].div_ceil(self.chunk[d]))
    }

    fn number(&self, at: [u64; 4]) -> u64 {
        let c = self.counts();
        ((at[0] * c[1] + at[1]) * c[2] + at[2]) * c[3] + at[3]
    }

    fn is_hole(&self, at: [u64; 4]) -> bool {
        self.holes >> (self.number(at) % 61) & 1 == 1
    }

    fn value(&self, at: [u64; 4]) -> u32 {
        let flat = at.iter().zip(self.shape).fold(0, |n, (a, s)| n * s + a);
        (flat as u32).wrapping_mul(2_654_435_761).wrapping_add(self.seed)
    }

    /// The naive reader.
    fn read(&self, at: [u64; 4]) -> u32 {
        if self.is_hole([0, 1, 2, 3].map(|d| at[d] / self.chunk[d])) { FILL } else { self.value(at) }
    }

    fn write(&self, folder: &Path) -> ChunkArray {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(".zarray"), "{}").unwrap();
        let (c, k) = (self.counts(), self.chunk);
        let separator = if self.slashes { "/" } else { "." };
        for i in 0..c.iter().product::<u64>() {
            let at = [i / c[3] / c[2] / c[1], i / c[3] / c[2] % c[1], i / c[3] % c[2], i % c[3]];
            if self.is_hole(at) {
                continue;
            }
            let mut bytes = vec![];
            for j in 0..k.iter().product::<u64>() {
                let within = [j / k[3] / k[2] / k[1], j / k[3] / k[2] % k[1], j / k[3] % k[2], j % k[3]];
                let place = [0, 1, 2, 3].map(|d| at[d] * k[d] + within[d]);
                let inside = (0..4).all(|d| place[d] < self.shape[d]);
                let value = if inside { self.value(place) } else { 0x7777_7777 };
                bytes.extend(if self.swapped { value.to_be_bytes() } else { value.to_le_bytes() });
            }
            let path = folder.join(at.map(|n| n.to_string()).join(separator));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        ChunkArray {
            folder: folder.into(),
            metadata: folder.join(".zarray").into(),
            naming: Naming::v2(separator == "/"),
            shape: self.shape,
            chunk: self.chunk,
            fill: Some(FILL.to_le_bytes().to_vec()),
            content: Content::Plain { swapped: self.swapped },
            scales: None,
        }
    }

    /// The same array in shards of version 3.
    fn write_shards(&self, folder: &Path, form: ShardForm) -> ChunkArray {
        fs::create_dir_all(folder).unwrap();
        let (c, k, n) = (self.counts(), self.chunk, form.per_shard);
        let shards = [0, 1, 2, 3].map(|d| c[d].div_ceil(n[d]));
        let split =
            |i: u64, by: [u64; 4]| [i / by[3] / by[2] / by[1], i / by[3] / by[2] % by[1], i / by[3] % by[2], i % by[3]];
        for shard in 0..shards.iter().product::<u64>() {
            let at = split(shard, shards);
            let (mut bytes, mut index) = (vec![], vec![]);
            let index_bytes = n.iter().product::<u64>() * 16 + 4;
            let before = if form.index_first { index_bytes } else { 0 };
            for inner in 0..n.iter().product::<u64>() {
                let within = split(inner, n);
                let chunk = [0, 1, 2, 3].map(|d| at[d] * n[d] + within[d]);
                if (0..4).any(|d| chunk[d] >= c[d]) || self.is_hole(chunk) {
                    index.push(ABSENT);
                    continue;
                }
                bytes.resize(bytes.len() + form.gap, 0x55);
                let begin = bytes.len();
                for j in 0..k.iter().product::<u64>() {
                    let within = split(j, k);
                    let place = [0, 1, 2, 3].map(|d| chunk[d] * k[d] + within[d]);
                    let value = self.value(place);
                    bytes.extend(if self.swapped { value.to_be_bytes() } else { value.to_le_bytes() });
                }
                if form.checked {
                    bytes.extend(crc32c::crc32c(&bytes[begin..]).to_le_bytes());
                }
                index.push((before + begin as u64, (bytes.len() - begin) as u64));
            }
            if index.iter().all(|entry| *entry == ABSENT) {
                continue;
            }
            let index = encode(&index);
            let all = if form.index_first { [index, bytes].concat() } else { [bytes, index].concat() };
            let path = folder.join(format!("c/{}/{}/{}/{}", at[0], at[1], at[2], at[3]));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, all).unwrap();
        }
        let endian = if self.swapped { "big" } else { "little" };
        let bytes = format!(r#"{{"name":"bytes","configuration":{{"endian":"{endian}"}}}}"#);
        let crc = if form.checked { r#",{"name":"crc32c"}"# } else { "" };
        let outer = [0, 1, 2, 3].map(|d| k[d] * n[d]);
        let at = if form.index_first { "start" } else { "end" };
        let metadata = format!(
            r#"{{"zarr_format":3,"node_type":"array","shape":{:?},"data_type":"uint32","fill_value":{FILL},
            "chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":{outer:?}}}}},
            "chunk_key_encoding":{{"name":"default","configuration":{{"separator":"/"}}}},
            "codecs":[{{"name":"sharding_indexed","configuration":{{"chunk_shape":{k:?},"codecs":[{bytes}{crc}],
            "index_codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}},{{"name":"crc32c"}}],
            "index_location":"{at}"}}}}]}}"#,
            self.shape
        );
        fs::write(folder.join("zarr.json"), &metadata).unwrap();
        let store = Arc::new(Local { io: Io::Pread });
        ChunkArray {
            folder: folder.into(),
            metadata: folder.join("zarr.json").into(),
            naming: Naming::default_of(true),
            shape: self.shape,
            chunk: self.chunk,
            fill: Some(FILL.to_le_bytes().to_vec()),
            content: Content::Coded(Box::new(CodedArray::of(store, &folder.into(), metadata.as_bytes(), true))),
            scales: None,
        }
    }
}

/// The form of shards.
#[derive(Clone, Copy, Debug)]
struct ShardForm {
    per_shard: [u64; 4],
    checked: bool,
    index_first: bool,
    /// Bytes before each inner chunk that belong to none.
    gap: usize,
}

/// Files and layout of one array.
fn opened(array: ChunkArray) -> (ChunkFiles, Chunked) {
    let [examples, groups, tokens, width] = array.shape;
    let files = ChunkFiles::new(vec![array], width, DType::U32, 1 << 20, Io::Mmap).unwrap();
    let member = Member { examples, parts: files.grids() };
    let layout = Chunked::new(groups as usize, vec![member], vec![Lengths::Same(tokens)]).unwrap();
    (files, layout)
}

/// All rows of some examples of group 0.
fn rows(files: &ChunkFiles, layout: &Chunked, examples: &[i64], tokens: u64, width: u64) -> Result<Vec<u32>> {
    let mut out = vec![0xaa; examples.len() * (tokens * width) as usize * 4];
    let source = Origin { files, layout, groups: Ints::One(0), only: 0..u64::MAX };
    let cast = Cast::between(DType::U32, DType::U32).unwrap();
    let pick = Pick::Whole { examples: Ints::Each(examples) };
    gather(&source, pick, examples.len(), cast, Out::Dense(&mut out), &mut || false)?;
    Ok(out.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect())
}

fn array(examples: u64, groups: u64, width: u64) -> impl Strategy<Value = Made> {
    let chunk = (1u64..4, 1u64..3, 1u64..6, 1u64..=width + 2);
    (1u64..9, chunk, any::<u64>(), any::<u64>(), any::<bool>(), any::<bool>(), any::<u32>()).prop_map(
        move |(tokens, (a, b, c, d), h1, h2, swapped, slashes, seed)| Made {
            shape: [examples, groups, tokens, width],
            chunk: [a, b, c, d],
            holes: h1 & h2,
            swapped,
            slashes,
            seed,
        },
    )
}

/// Two members, each of one or two parts.
fn dataset() -> impl Strategy<Value = [Vec<Made>; 2]> {
    (1u64..4, 1u64..12, 1usize..3, 1u64..6, 0u64..4).prop_flat_map(|(groups, width, parts, first, second)| {
        [first, second].map(|n| prop::collection::vec(array(n, groups, width), parts))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn rows_equal_the_arrays_they_were_cut_from(
        members in dataset(),
        lengths in prop::collection::vec(any::<u32>(), 40),
        picks in prop::collection::vec((any::<u64>(), any::<u64>(), any::<bool>()), 0..60),
        mmap in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (groups, width, parts) = (members[0][0].shape[1], members[0][0].shape[3], members[0].len());
        let mut arrays = vec![];
        for (m, each) in members.iter().enumerate() {
            for (p, made) in each.iter().enumerate() {
                arrays.push(made.write(&folder.path().join(format!("{m}-{p}"))));
            }
        }
        let io = if mmap { Io::Mmap } else { Io::Pread };
        let files = ChunkFiles::new(arrays, width, DType::U32, 0, io).unwrap();
        let grids = files.grids();
        let counts: Vec<u64> = members.iter().map(|m| m[0].shape[0]).collect();
        // Lengths per part, at most the length of its array.
        let mut each: Vec<Vec<u32>> = vec![vec![]; parts];
        for (m, n) in counts.iter().enumerate() {
            for i in 0..*n {
                for (p, list) in each.iter_mut().enumerate() {
                    let random = lengths[(m * 13 + i as usize * 3 + p) % lengths.len()];
                    list.push(random % (members[m][p].shape[2] as u32 + 1));
                }
            }
        }
        let places = (0..members.len())
            .map(|m| Member { examples: counts[m], parts: (0..parts).map(|p| grids[m * parts + p]).collect() })
            .collect();
        let layout = Chunked::new(groups as usize, places, each.iter().cloned().map(Lengths::Each).collect()).unwrap();

        let mut e = vec![];
        let mut t = vec![];
        let mut want: Vec<Vec<u32>> = vec![vec![]; groups as usize];
        let total: u64 = counts.iter().sum();
        for (example, token, back) in picks {
            let example = example % total;
            let tokens: u64 = each.iter().map(|l| u64::from(l[example as usize])).sum();
            if tokens == 0 {
                continue;
            }
            let token = token % tokens;
            let (m, local) = if example < counts[0] { (0, example) } else { (1, example - counts[0]) };
            let first = u64::from(each[0][example as usize]);
            let (p, at) = if token < first { (0, token) } else { (1, token - first) };
            for (group, want) in want.iter_mut().enumerate() {
                want.extend((0..width).map(|h| members[m][p].read([local, group as u64, at, h])));
            }
            e.push(example as i64);
            t.push(if back { token as i64 - tokens as i64 } else { token as i64 });
        }
        for (group, want) in want.iter().enumerate() {
            let mut out = vec![0xaa; e.len() * width as usize * 4];
            let source = Origin { files: &files, layout: &layout, groups: Ints::One(group as i64), only: 0..u64::MAX };
            let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&t) };
            let cast = Cast::between(DType::U32, DType::U32).unwrap();
            gather(&source, pick, e.len(), cast, Out::Dense(&mut out), &mut || false).unwrap();
            let found: Vec<u32> = out.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect();
            prop_assert_eq!(&found, want);
        }
    }
}

/// Past the end of one dimension lies the next index of the dimension before it: other rows, not fill values.
#[test]
fn a_missing_chunk_without_a_fill_value_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let made = Made { shape: [2, 1, 3, 4], chunk: [1, 1, 3, 4], holes: 0, swapped: false, slashes: false, seed: 1 };
    let (files, layout) = opened(ChunkArray { fill: None, ..made.write(folder.path()) });
    let missing = folder.path().join("1.0.0.0");
    fs::remove_file(&missing).unwrap();
    assert_eq!(rows(&files, &layout, &[0], 3, 4).unwrap()[0], made.value([0, 0, 0, 0]));
    let error = rows(&files, &layout, &[1], 3, 4).unwrap_err();
    assert_eq!((error.kind, error.location.unwrap().path().unwrap()), (Kind::NotFound, missing.as_path()));
}

#[test]
fn lengths_and_counts_above_the_array_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let made = Made { shape: [3, 2, 5, 4], chunk: [1, 1, 2, 4], holes: 0, swapped: false, slashes: false, seed: 1 };
    let files = ChunkFiles::new(vec![made.write(folder.path())], 4, DType::U32, 0, Io::Pread).unwrap();
    let grid = files.grids()[0];
    let layout = |groups, examples, lengths| -> Result<Chunked> {
        Chunked::new(groups, vec![Member { examples, parts: vec![grid] }], vec![lengths])
    };
    assert!(layout(2, 3, Lengths::Same(5)).is_ok());
    assert!(layout(2, 3, Lengths::Each(vec![5, 0, 5])).is_ok());
    for refused in [
        layout(2, 3, Lengths::Same(6)),
        layout(2, 3, Lengths::Each(vec![5, 6, 0])),
        layout(3, 3, Lengths::Same(5)),
        layout(2, 4, Lengths::Same(5)),
    ] {
        assert_eq!(refused.unwrap_err().kind, Kind::Format);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn rows_of_inner_chunks_are_read_in_place(
        made in (1u64..6, 1u64..9).prop_flat_map(|(examples, width)| array(examples, 1, width)),
        per_shard in (1u64..3, 1u64..3, 1u64..3),
        (checked, index_first) in (any::<bool>(), any::<bool>()),
        gap in 0usize..6,
        order in prop::collection::vec(any::<u64>(), 1..12),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let form = ShardForm { per_shard: [per_shard.0, 1, per_shard.1, per_shard.2], checked, index_first, gap };
        let (files, layout) = opened(made.write_shards(folder.path(), form));
        let [examples, _, tokens, width] = made.shape;
        let picked: Vec<i64> = order.iter().map(|e| (e % examples) as i64).collect();
        for _ in 0..2 {
            let found = rows(&files, &layout, &picked, tokens, width).unwrap();
            let want: Vec<u32> = picked
                .iter()
                .flat_map(|e| (0..tokens * width).map(|i| made.read([*e as u64, 0, i / width, i % width])))
                .collect();
            prop_assert_eq!(found, want);
        }
        prop_assert_eq!(files.decodings(), 0, "inner chunks were decoded");
        // Where a view is given, it contains the same bytes.
        let (file, row) = files.grids()[0].locate(0, 0, 0);
        if let Some(view) = files.view(file, row, 1, Paging::Hinted).unwrap() {
            let want: Vec<u8> = (0..width).flat_map(|h| made.read([0, 0, 0, h]).to_ne_bytes()).collect();
            prop_assert_eq!(view.bytes(), &want[..]);
        }
    }

    /// A byte of a shard with checksums is changed: every read of its chunk fails, or the byte was between chunks.
    #[test]
    fn no_changed_byte_is_read_in_place(at in any::<prop::sample::Index>(), flip in 1u8..=255, index_first in any::<bool>()) {
        let folder = tempfile::tempdir().unwrap();
        let made = Made { shape: [4, 1, 5, 4], chunk: [1, 1, 5, 4], holes: 0, swapped: false, slashes: true, seed: 5 };
        let form = ShardForm { per_shard: [4, 1, 1, 1], checked: true, index_first, gap: 0 };
        let array = made.write_shards(folder.path(), form);
        let path = folder.path().join("c/0/0/0/0");
        let mut bytes = fs::read(&path).unwrap();
        *at.get_mut(&mut bytes[..]) ^= flip;
        fs::write(&path, bytes).unwrap();
        let (files, layout) = opened(array);
        let mut failed = 0;
        for example in 0..4 {
            match rows(&files, &layout, &[example], 5, 4) {
                Ok(found) => {
                    let want: Vec<u32> = (0..20).map(|i| made.read([example as u64, 0, i / 4, i % 4])).collect();
                    prop_assert_eq!(found, want);
                }
                Err(error) => {
                    prop_assert_eq!(error.kind, Kind::Format);
                    prop_assert!(rows(&files, &layout, &[example], 5, 4).is_err());
                    failed += 1;
                }
            }
        }
        prop_assert!(failed == 1 || failed == 4, "{failed} chunks failed");
    }
}

/// A shard is written again in place, with its inner chunks at other offsets, while the dataset is open.
#[test]
fn a_shard_that_was_written_again_is_read_with_its_new_index() {
    for checked in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let first = Made { shape: [4, 1, 5, 4], chunk: [1, 1, 5, 4], holes: 0, swapped: false, slashes: true, seed: 5 };
        let form = ShardForm { per_shard: [4, 1, 1, 1], checked, index_first: false, gap: 0 };
        let (files, layout) = opened(first.write_shards(folder.path(), form));
        let want = |made: &Made| -> Vec<u32> { (0..20).map(|i| made.read([2, 0, i / 4, i % 4])).collect() };
        assert_eq!(rows(&files, &layout, &[2], 5, 4).unwrap(), want(&first));
        std::thread::sleep(std::time::Duration::from_millis(20)); // the clock of file times
        let second = Made { seed: 77, ..first };
        second.write_shards(folder.path(), ShardForm { gap: 3, ..form });
        assert_eq!(rows(&files, &layout, &[2], 5, 4).unwrap(), want(&second));
    }
}

#[test]
fn an_inner_chunk_of_another_length_is_refused() {
    for checked in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let made = Made { shape: [4, 1, 5, 4], chunk: [1, 1, 5, 4], holes: 0, swapped: false, slashes: true, seed: 5 };
        let form = ShardForm { per_shard: [4, 1, 1, 1], checked, index_first: false, gap: 0 };
        let array = made.write_shards(folder.path(), form);
        let path = folder.path().join("c/0/0/0/0");
        let bytes = fs::read(&path).unwrap();
        let each = if checked { 84 } else { 80 };
        let shorter: Vec<(u64, u64)> = (0..4).map(|i| (i * each, if i == 1 { each - 4 } else { each })).collect();
        fs::write(&path, [&bytes[..4 * each as usize], &encode(&shorter)].concat()).unwrap();
        let (files, layout) = opened(array);
        assert!(rows(&files, &layout, &[0], 5, 4).is_ok());
        let error = rows(&files, &layout, &[1], 5, 4).unwrap_err();
        assert_eq!((error.kind, error.offset), (Kind::Format, Some(each)), "{error}");
    }
}
