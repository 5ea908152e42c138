//! Arrays in chunk files: plain, compressed, and in shards.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use actshard_core::arrays::coded::{CodedArray, Elements, read_whole};
use actshard_core::arrays::index::{ABSENT, encode};
use actshard_core::arrays::naming::Naming;
use actshard_core::dtype::Cast;
use actshard_core::files::chunks::{ChunkArray, ChunkFiles, Content};
use actshard_core::gather::{Ints, Out, Pick};
use actshard_core::layout::chunked::{Chunked, Lengths, Member};
use actshard_core::location::Location;
use actshard_core::rows::Rows;
use actshard_core::source::local::Local;
use actshard_core::source::{Io, Store, Wishes};
use actshard_core::{DType, Kind, Result};
use proptest::prelude::*;

use super::store::{Handle, Memory, WISHES, at};

const FILL: u32 = 0xdead_beef;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Coding {
    Plain,
    Zstd,
    /// Shards of two chunks along each dimension except the last.
    Shards,
}

/// An array of uint32 whose elements equal their own index.
#[derive(Clone, Copy, Debug)]
struct Made {
    shape: [u64; 4],
    chunk: [u64; 4],
    coding: Coding,
    /// If bit `n % 61` is set, chunk `n` is missing.
    holes: u64,
}

impl Made {
    fn counts(&self) -> [u64; 4] {
        [0, 1, 2, 3].map(|d| self.shape[d].div_ceil(self.chunk[d]))
    }

    fn is_hole(&self, at: [u64; 4]) -> bool {
        let c = self.counts();
        let number = ((at[0] * c[1] + at[1]) * c[2] + at[2]) * c[3] + at[3];
        self.holes >> (number % 61) & 1 == 1
    }

    fn value(&self, at: [u64; 4]) -> u32 {
        let hole = self.is_hole([0, 1, 2, 3].map(|d| at[d] / self.chunk[d]));
        if hole { FILL } else { at.iter().zip(self.shape).fold(0, |n, (a, s)| n * s + a) as u32 }
    }

    fn chunk_bytes(&self, at: [u64; 4]) -> Option<Vec<u8>> {
        let k = self.chunk;
        if self.is_hole(at) {
            return None;
        }
        let each = (0..k.iter().product::<u64>()).flat_map(|j| {
            let within = [j / k[3] / k[2] / k[1], j / k[3] / k[2] % k[1], j / k[3] % k[2], j % k[3]];
            let place = [0, 1, 2, 3].map(|d| at[d] * k[d] + within[d]);
            let inside = (0..4).all(|d| place[d] < self.shape[d]);
            (if inside { self.value(place) } else { 7 }).to_le_bytes()
        });
        let bytes: Vec<u8> = each.collect();
        Some(if self.coding == Coding::Plain { bytes } else { zstd::encode_all(&bytes[..], 1).unwrap() })
    }

    fn per_shard(&self) -> [u64; 4] {
        if self.coding == Coding::Shards { [2, 2, 2, 1] } else { [1; 4] }
    }

    fn metadata(&self) -> String {
        let outer: Vec<u64> = self.chunk.iter().zip(self.per_shard()).map(|(c, n)| c * n).collect();
        let inner = r#"{"name":"bytes","configuration":{"endian":"little"}},{"name":"zstd","configuration":{"level":1,"checksum":false}}"#;
        let codecs = match self.coding {
            Coding::Plain => r#"{"name":"bytes","configuration":{"endian":"little"}}"#.to_string(),
            Coding::Zstd => inner.to_string(),
            Coding::Shards => format!(
                r#"{{"name":"sharding_indexed","configuration":{{"chunk_shape":{:?},"codecs":[{inner}],"index_codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}},{{"name":"crc32c"}}],"index_location":"end"}}}}"#,
                self.chunk
            ),
        };
        format!(
            r#"{{"zarr_format":3,"node_type":"array","shape":{:?},"data_type":"uint32","chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":{outer:?}}}}},"chunk_key_encoding":{{"name":"default"}},"fill_value":{FILL},"codecs":[{codecs}]}}"#,
            self.shape
        )
    }

    /// Its objects, below `acts`.
    fn objects(&self) -> Vec<(String, Vec<u8>)> {
        let (c, n) = (self.counts(), self.per_shard());
        let outer = [0, 1, 2, 3].map(|d| c[d].div_ceil(n[d]));
        let mut made = vec![("acts/zarr.json".to_string(), self.metadata().into_bytes())];
        for i in 0..outer.iter().product::<u64>() {
            let at = split(i, outer);
            let mut bytes = vec![];
            let mut index = vec![];
            for j in 0..n.iter().product::<u64>() {
                let within = split(j, n);
                let chunk = [0, 1, 2, 3].map(|d| at[d] * n[d] + within[d]);
                match self.chunk_bytes(chunk).filter(|_| (0..4).all(|d| chunk[d] < c[d])) {
                    Some(chunk) => {
                        index.push((bytes.len() as u64, chunk.len() as u64));
                        bytes.extend(chunk);
                    }
                    None => index.push(ABSENT),
                }
            }
            if index.iter().all(|entry| *entry == ABSENT) {
                continue;
            }
            if self.coding == Coding::Shards {
                bytes.extend(encode(&index));
            }
            made.push((format!("acts/c/{}/{}/{}/{}", at[0], at[1], at[2], at[3]), bytes));
        }
        made
    }

    fn files(&self, store: Arc<dyn Store>, folder: &Location, decoded_memory: u64) -> Result<ChunkFiles> {
        let content = match self.coding {
            Coding::Plain => Content::Plain { swapped: false },
            coding => Content::Coded(Box::new(CodedArray::of(
                Arc::clone(&store),
                folder,
                self.metadata().as_bytes(),
                coding == Coding::Shards,
            ))),
        };
        let (shape, chunk) = (self.shape, self.chunk);
        let (metadata, naming) = (folder.join("zarr.json"), Naming::default_of(true));
        let array = ChunkArray {
            folder: folder.clone(),
            metadata,
            naming,
            shape,
            chunk,
            fill: Some(FILL.to_le_bytes().to_vec()),
            content,
            scales: None,
        };
        ChunkFiles::of(store, vec![array], self.shape[3], DType::U32, decoded_memory)
    }

    fn rows(&self, files: ChunkFiles) -> Rows {
        let member = Member { examples: self.shape[0], parts: files.grids() };
        let lengths = vec![Lengths::Same(self.shape[2])];
        let layout = Chunked::new(self.shape[1] as usize, vec![member], lengths).unwrap();
        Rows::Chunked(files, layout)
    }

    fn far(&self, store: &Arc<Memory>, decoded_memory: u64) -> Rows {
        self.rows(self.files(Arc::new(Handle(Arc::clone(store))), &at("acts"), decoded_memory).unwrap())
    }
}

fn split(i: u64, counts: [u64; 4]) -> [u64; 4] {
    let [_, b, c, d] = counts;
    [i / d / c / b, i / d / c % b, i / d % c, i % d]
}

/// Rows of one group.
fn gather(rows: &Rows, group: i64, at: &[(i64, i64)], watch: &mut dyn FnMut() -> bool) -> Result<Vec<u32>> {
    let (examples, tokens): (Vec<i64>, Vec<i64>) = at.iter().copied().unzip();
    let mut out = vec![0u32; at.len() * rows.row().width];
    let pick = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
    let cast = Cast::between(DType::U32, DType::U32)?;
    let into = Out::Dense(bytemuck::cast_slice_mut(&mut out));
    rows.gather(Ints::One(group), pick, at.len(), cast, into, watch)?;
    Ok(out)
}

/// One row from each of 128 chunks, which are in 16 shards.
const HUNDRED: Made = Made { shape: [128, 1, 1, 8], chunk: [1, 1, 1, 8], coding: Coding::Plain, holes: 0 };

fn all_rows(made: &Made) -> Vec<(i64, i64)> {
    (0..made.shape[0] as i64).flat_map(|e| (0..made.shape[2] as i64).map(move |t| (e, t))).collect()
}

fn expected(made: &Made, group: u64, at: &[(i64, i64)]) -> Vec<u32> {
    let row = |(e, t): &(i64, i64)| (0..made.shape[3]).map(move |h| (*e as u64, *t as u64, h)).collect::<Vec<_>>();
    at.iter().flat_map(row).map(|(e, t, h)| made.value([e, group, t, h])).collect()
}

#[test]
fn a_gather_over_a_hundred_chunks_takes_a_few_round_trips() {
    for coding in [Coding::Plain, Coding::Zstd, Coding::Shards] {
        let made = Made { coding, ..HUNDRED };
        let parallel = 128;
        let mut memory = Memory::new(made.objects(), Wishes { parallel, ..WISHES });
        let files = made.objects().len() - 1;
        *memory.together.get_mut() = files / 2 + 1;
        let store = Arc::new(memory);
        let rows = made.far(&store, 1 << 20);
        let at = all_rows(&made);
        assert_eq!(gather(&rows, 0, &at, &mut || false).unwrap(), expected(&made, 0, &at));
        // One round of opens, one of indexes, one of units: all requests of a round are in flight together.
        let (opens, reads) = (store.opens(), store.reads().len());
        assert_eq!(opens, 1, "{coding:?}");
        assert_eq!(reads, if coding == Coding::Shards { 2 * files } else { files }, "{coding:?}");
        // The second time plain chunks are still open, and decoded ones in memory.
        assert_eq!(gather(&rows, 0, &at, &mut || false).unwrap(), expected(&made, 0, &at));
        assert_eq!(store.opens(), 0, "{coding:?}");
        assert_eq!(store.reads().len(), if coding == Coding::Plain { files } else { 0 }, "{coding:?}");
    }
}

#[test]
fn no_more_reads_are_on_their_way_than_wished() {
    for coding in [Coding::Plain, Coding::Zstd, Coding::Shards] {
        let made = Made { coding, ..HUNDRED };
        let mut memory = Memory::new(made.objects(), Wishes { parallel: 3, ..WISHES });
        (memory.latency, *memory.together.get_mut()) = (Duration::from_millis(1), 2);
        let store = Arc::new(memory);
        gather(&made.far(&store, 0), 0, &all_rows(&made), &mut || false).unwrap();
        assert!(store.most.load(Ordering::Relaxed) <= 3, "{coding:?}");
    }
}

#[test]
fn chunks_longer_than_the_largest_read_are_read_at_once() {
    let made = Made { shape: [16, 1, 32, 64], chunk: [1, 1, 32, 64], coding: Coding::Zstd, holes: 0 };
    let mut memory = Memory::new(made.objects(), Wishes { parallel: 8, largest: 1000, ..WISHES });
    *memory.together.get_mut() = 5;
    let store = Arc::new(memory);
    let at = all_rows(&made);
    assert_eq!(gather(&made.far(&store, 1 << 20), 0, &at, &mut || false).unwrap(), expected(&made, 0, &at));
    let (reads, most) = (store.reads(), store.most.load(Ordering::Relaxed));
    assert!(reads.len() >= 32 && reads.iter().all(|(_, _, len)| *len <= 1000), "{}", reads.len());
    assert!(most <= 8, "{most} reads at once");
}

/// A chunk of each of twenty shards whose indexes have 4 MiB.
#[test]
fn indexes_of_few_shards_are_held_at_once() {
    const PER: u64 = 1 << 18;
    let mut shard: Vec<u8> = [5u32; 8].iter().flat_map(|n| n.to_le_bytes()).collect();
    let mut index = vec![ABSENT; PER as usize];
    index[0] = (0, 32);
    shard.extend(encode(&index));
    let (shards, n) = (20, 20 * PER);
    let metadata = format!(
        r#"{{"zarr_format":3,"node_type":"array","shape":[{n},1,1,8],"data_type":"uint32","chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":[{PER},1,1,8]}}}},"chunk_key_encoding":{{"name":"default"}},"fill_value":0,"codecs":[{{"name":"sharding_indexed","configuration":{{"chunk_shape":[1,1,1,8],"codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}}],"index_codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}},{{"name":"crc32c"}}],"index_location":"end"}}}}]}}"#
    );
    let objects = (0..shards).map(|i| (format!("acts/c/{i}/0/0/0"), shard.clone()));
    let store = Arc::new(Memory::new(objects, Wishes { parallel: 64, ..WISHES }));
    let far: Arc<dyn Store> = Arc::new(Handle(Arc::clone(&store)));
    let coded = CodedArray::of(Arc::clone(&far), &at("acts"), metadata.as_bytes(), true);
    let array = ChunkArray {
        folder: at("acts"),
        metadata: at("acts/zarr.json"),
        naming: Naming::default_of(true),
        shape: [n, 1, 1, 8],
        chunk: [1, 1, 1, 8],
        fill: Some(vec![0; 4]),
        content: Content::Coded(Box::new(coded)),
        scales: None,
    };
    let files = ChunkFiles::of(far, vec![array], 8, DType::U32, 1 << 20).unwrap();
    let member = Member { examples: n, parts: files.grids() };
    let rows = Rows::Chunked(files, Chunked::new(1, vec![member], vec![Lengths::Same(1)]).unwrap());
    let firsts: Vec<(i64, i64)> = (0..shards).map(|i| (i * PER as i64, 0)).collect();
    assert_eq!(gather(&rows, 0, &firsts, &mut || false).unwrap(), vec![5; 20 * 8]);
    // 64 MiB of them: sixteen, then four.
    assert_eq!(store.opens(), 2);
}

/// Four examples of two chunks each; each shard has two examples.
const SMALL: Made = Made { shape: [4, 1, 4, 8], chunk: [1, 1, 2, 8], coding: Coding::Plain, holes: 0 };

#[test]
fn a_chunk_that_is_not_there_is_the_fill_value_while_the_array_is() {
    for coding in [Coding::Plain, Coding::Zstd, Coding::Shards] {
        let made = Made { coding, holes: 0b1100_0110, ..SMALL };
        let store = Arc::new(Memory::new(made.objects(), WISHES));
        let at = all_rows(&made);
        assert_eq!(gather(&made.far(&store, 0), 0, &at, &mut || false).unwrap(), expected(&made, 0, &at));
        store.put("acts/zarr.json", None);
        let error = gather(&made.far(&store, 0), 0, &at, &mut || false).unwrap_err();
        let named = error.location.clone();
        assert_eq!((error.kind, named), (Kind::NotFound, Some(super::store::at("acts/zarr.json"))), "{coding:?}");
    }
}

#[test]
fn faults_and_damage_name_the_object() {
    for coding in [Coding::Plain, Coding::Zstd, Coding::Shards] {
        let made = Made { coding, ..SMALL };
        let last = made.objects().pop().unwrap().0;
        let at = all_rows(&made);
        let failing = |change: &dyn Fn(&mut Memory)| {
            let mut memory = Memory::new(made.objects(), WISHES);
            change(&mut memory);
            let error = gather(&made.far(&Arc::new(memory), 0), 0, &at, &mut || false).unwrap_err();
            assert_eq!(error.location, Some(super::store::at(&last)), "{coding:?}: {error}");
            error.kind
        };
        let broken = last.clone().leak();
        assert_eq!(failing(&|store| store.broken = Some(broken)), Kind::Access);
        let whole = made.objects().pop().unwrap().1;
        let cut = failing(&|store| store.put(&last, Some(whole[..whole.len() - 1].to_vec())));
        assert_eq!(cut, if coding == Coding::Plain { Kind::Truncated } else { Kind::Format }, "{coding:?}");
        let longer = failing(&|store| store.put(&last, Some([&whole[..], &[1]].concat())));
        assert_eq!(longer, Kind::Format, "{coding:?}");
    }
}

#[test]
fn a_chunk_that_was_replaced_while_it_is_open_is_noticed() {
    let store = Arc::new(Memory::new(SMALL.objects(), WISHES));
    let rows = SMALL.far(&store, 0);
    let at = all_rows(&SMALL);
    gather(&rows, 0, &at, &mut || false).unwrap();
    store.put("acts/c/1/0/0/0", Some(store.get("acts/c/1/0/0/0")));
    let error = gather(&rows, 0, &at, &mut || false).unwrap_err();
    assert_eq!((error.kind, error.location), (Kind::Format, Some(super::store::at("acts/c/1/0/0/0"))));
    rows.release();
    assert_eq!(gather(&rows, 0, &at, &mut || false).unwrap(), expected(&SMALL, 0, &at));
    // An index is only used for its version of the shard.
    let made = Made { coding: Coding::Shards, ..SMALL };
    let store = Arc::new(Memory::new(made.objects(), WISHES));
    let rows = made.far(&store, 0);
    gather(&rows, 0, &at, &mut || false).unwrap();
    let holes = Made { holes: 1, ..made };
    for (key, bytes) in holes.objects() {
        store.put(&key, Some(bytes));
    }
    rows.release();
    assert_eq!(gather(&rows, 0, &at, &mut || false).unwrap(), expected(&holes, 0, &at));
}

#[test]
fn a_stop_ends_a_wait() {
    for coding in [Coding::Plain, Coding::Zstd, Coding::Shards] {
        let made = Made { coding, ..HUNDRED };
        let mut memory = Memory::new(made.objects(), Wishes { parallel: 1, ..WISHES });
        memory.latency = Duration::from_millis(25);
        let store = Arc::new(memory);
        let mut looks = 0;
        let error = gather(&made.far(&store, 0), 0, &all_rows(&made), &mut || {
            looks += 1;
            looks > 3
        });
        assert_eq!(error.unwrap_err().kind, Kind::Interrupted);
        assert!(store.reads().len() < made.objects().len(), "{coding:?}");
    }
}

/// Chunks are decoded once, whichever thread requests them first.
#[test]
fn threads_that_want_the_same_chunks_read_them_once() {
    let made = Made { coding: Coding::Zstd, ..HUNDRED };
    let mut memory = Memory::new(made.objects(), WISHES);
    memory.latency = Duration::from_millis(2);
    let store = Arc::new(memory);
    let rows = made.far(&store, 1 << 20);
    let at = all_rows(&made);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_eq!(gather(&rows, 0, &at, &mut || false).unwrap(), expected(&made, 0, &at)));
        }
    });
    assert_eq!(store.reads().len(), 128);
}

#[test]
fn small_arrays_are_read_whole() {
    for coding in [Coding::Plain, Coding::Zstd, Coding::Shards] {
        let made = Made { coding, holes: 5, ..SMALL };
        let store = Arc::new(Memory::new(made.objects(), WISHES));
        let there: Vec<Vec<u64>> = made.objects()[1..]
            .iter()
            .map(|(key, _)| key.split('/').skip(2).map(|i| i.parse().unwrap()).collect())
            .collect();
        let whole = |there| {
            let handle = Handle(Arc::clone(&store));
            read_whole(&handle, &at("acts"), made.metadata().as_bytes(), there, 1 << 20, &mut || false)
        };
        let Elements::Fixed(bytes) = whole(there).unwrap() else { panic!("strings") };
        let found: Vec<u32> = bytes.chunks(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect();
        assert_eq!(found, expected(&made, 0, &all_rows(&made)), "{coding:?}");
        assert!(store.opens() <= 1 + 8 / WISHES.parallel);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The same rows as from local files, equal to the expected elements.
    #[test]
    fn rows_are_those_of_local_files(
        (examples, groups, tokens, width) in (1u64..5, 1u64..4, 1u64..7, 1u64..7),
        (a, b, c, d) in (1u64..3, 1u64..3, 1u64..5, 1u64..5),
        holes in any::<u64>(),
        coding in prop_oneof![Just(Coding::Plain), Just(Coding::Zstd), Just(Coding::Shards)],
        picked in prop::collection::vec((0u64..5, 0u64..7), 1..40),
        group in 0u64..4,
        (gap, largest, parallel) in (0u64..100, 1u64..400, 1usize..5),
        decoded_memory in prop_oneof![Just(0u64), Just(1 << 20)],
    ) {
        let made = Made { shape: [examples, groups, tokens, width], chunk: [a, b, c, d], coding, holes: holes & holes >> 7 };
        let folder = tempfile::tempdir().unwrap();
        for (key, bytes) in made.objects() {
            let path = folder.path().join(key);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        let local: Arc<dyn Store> = Arc::new(Local { io: Io::Pread });
        let near = made.rows(made.files(local, &folder.path().join("acts").into(), decoded_memory).unwrap());
        let store = Arc::new(Memory::of_folder(folder.path(), Wishes { gap, largest, parallel, unit_bytes: 1, ..WISHES }));
        let far = made.far(&store, decoded_memory);
        let (at, group): (Vec<(i64, i64)>, u64) = (
            picked.iter().map(|(e, t)| ((e % examples) as i64, (t % tokens) as i64)).collect(),
            group % groups,
        );
        let want = expected(&made, group, &at);
        prop_assert_eq!(&gather(&near, group as i64, &at, &mut || false).unwrap(), &want);
        prop_assert_eq!(&gather(&far, group as i64, &at, &mut || false).unwrap(), &want);
        prop_assert_eq!(&gather(&far, group as i64, &at, &mut || false).unwrap(), &want);
        let reads = store.reads();
        prop_assert!(reads.iter().all(|(_, _, n)| *n <= largest), "{:?}", reads);
        prop_assert!(store.most.load(Ordering::Relaxed) <= parallel);
    }
}

const FOURS: &str = r#"{"zarr_format":3,"node_type":"array","shape":[16],"data_type":"int32","chunk_grid":{"name":"regular","configuration":{"chunk_shape":[4]}},"chunk_key_encoding":{"name":"default"},"fill_value":0,"codecs":[{"name":"bytes","configuration":{"endian":"little"}},{"name":"zstd","configuration":{"level":1,"checksum":false}}]}"#;

/// Four chunks, of 1 to 4, and what is left of a larger array.
fn fours() -> Arc<Memory> {
    let chunk = |i: i32| zstd::encode_all(&[i + 1; 4].map(i32::to_le_bytes).concat()[..], 1).unwrap();
    let left = ("acts/c/7".to_string(), b"left over".to_vec());
    let objects = (0..4).map(|i| (format!("acts/c/{i}"), chunk(i))).chain([left]);
    Arc::new(Memory::new(objects, Wishes { parallel: 2, ..WISHES }))
}

#[test]
fn chunks_outside_of_an_array_are_not_read_and_one_listed_twice_is_one() {
    let store = fours();
    let there = [0, 0, 1, 7, 2, 3, 1].map(|i| vec![i]).to_vec();
    let made = read_whole(&Handle(Arc::clone(&store)), &at("acts"), FOURS.as_bytes(), there, 1 << 20, &mut || false);
    let Ok(Elements::Fixed(bytes)) = made else { panic!("{made:?}") };
    let expected: Vec<u8> = (1..=4i32).flat_map(|i| [i; 4]).flat_map(i32::to_le_bytes).collect();
    assert_eq!(bytes, expected);
    let mut read: Vec<String> = store.reads().into_iter().map(|(key, ..)| key).collect();
    read.sort();
    assert_eq!(read, ["acts/c/0", "acts/c/1", "acts/c/2", "acts/c/3"]);
}
