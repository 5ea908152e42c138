//! Gathers from chunks that must be decoded: rows equal those of the array, and each chunk is decoded once per call,
//! whatever the budget and the number of threads.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use actshard_core::arrays::coded::Decode;
use actshard_core::arrays::naming::Naming;
use actshard_core::dtype::Cast;
use actshard_core::files::chunks::{ChunkArray, ChunkFiles, Content};
use actshard_core::gather::{Ints, Origin, Out, Pick, gather};
use actshard_core::layout::chunked::{Chunked, Lengths, Member};
use actshard_core::layout::grid::Grid;
use actshard_core::location::Location;
use actshard_core::source::Io;
use actshard_core::{DType, Error, Kind, Result};
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;

const FILL: u32 = 0xdead_beef;

/// An array of 32-bit elements, `(examples, 1, tokens, width)`.
#[derive(Clone, Debug)]
struct Shape {
    array: [u64; 4],
    chunk: [u64; 4],
    /// If bit `n % 61` is set, chunk `n` is missing.
    holes: u64,
}

impl Shape {
    fn number(&self, chunk: &[u64]) -> usize {
        let n = [0, 1, 2, 3].map(|d| self.array[d].div_ceil(self.chunk[d]));
        (((chunk[0] * n[1] + chunk[1]) * n[2] + chunk[2]) * n[3] + chunk[3]) as usize
    }

    fn is_hole(&self, number: usize) -> bool {
        self.holes >> (number % 61) & 1 == 1
    }

    fn stored(&self, at: [u64; 4]) -> u32 {
        (at.iter().zip(self.array).fold(0, |n, (a, s)| n * s + a) as u32).wrapping_mul(2_654_435_761)
    }

    fn element(&self, at: [u64; 4]) -> u32 {
        let chunk = [0, 1, 2, 3].map(|d| at[d] / self.chunk[d]);
        if self.is_hole(self.number(&chunk)) { FILL } else { self.stored(at) }
    }
}

/// Makes chunks, and counts how often each is made.
#[derive(Debug)]
struct Counting {
    shape: Shape,
    made: Arc<Vec<AtomicUsize>>,
}

impl Decode for Counting {
    fn chunk(&self, indices: &[u64], len: u64, _: &Location) -> Result<Option<Vec<u8>>> {
        let number = self.shape.number(indices);
        self.made[number].fetch_add(1, Ordering::Relaxed);
        if self.shape.is_hole(number) {
            return Ok(None);
        }
        let k = self.shape.chunk;
        let mut bytes = Vec::with_capacity(len as usize);
        for j in 0..k.iter().product::<u64>() {
            let within = [j / k[3] / k[2] / k[1], j / k[3] / k[2] % k[1], j / k[3] % k[2], j % k[3]];
            let place = [0, 1, 2, 3].map(|d| indices[d] * k[d] + within[d]);
            bytes.extend(self.shape.stored(place).to_ne_bytes());
        }
        Ok(Some(bytes))
    }
}

struct Made {
    shape: Shape,
    files: ChunkFiles,
    layout: Chunked,
    made: Arc<Vec<AtomicUsize>>,
    _folder: tempfile::TempDir,
}

impl Made {
    fn new(shape: &Shape, budget: u64) -> Made {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(".zarray"), "{}").unwrap();
        let chunks = Grid::new(0, shape.array, shape.chunk).unwrap().chunks().unwrap();
        let made: Arc<Vec<AtomicUsize>> = Arc::new((0..chunks).map(|_| AtomicUsize::new(0)).collect());
        let array = ChunkArray {
            folder: folder.path().into(),
            metadata: folder.path().join(".zarray").into(),
            naming: Naming::v2(false),
            shape: shape.array,
            chunk: shape.chunk,
            fill: Some(FILL.to_ne_bytes().to_vec()),
            content: Content::Coded(Box::new(Counting { shape: shape.clone(), made: Arc::clone(&made) })),
            scales: None,
        };
        let files = ChunkFiles::new(vec![array], shape.array[3], DType::U32, budget, Io::Pread).unwrap();
        let members = vec![Member { examples: shape.array[0], parts: files.grids() }];
        let layout = Chunked::new(1, members, vec![Lengths::Same(shape.array[2])]).unwrap();
        Made { shape: shape.clone(), files, layout, made, _folder: folder }
    }

    /// Gathers rows into one block or into separate places; returns them and the most decodings of one chunk.
    fn gather(&self, pick: Pick<'_>, items: usize, rows: usize, places: bool) -> (Vec<u32>, usize) {
        self.made.iter().for_each(|n| n.store(0, Ordering::Relaxed));
        let row = self.shape.array[3] as usize;
        let mut out = vec![0x5555_5555u32; rows * row];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut out);
        let into = if places { Out::Places(bytes.chunks_exact_mut(row * 4).collect()) } else { Out::Dense(bytes) };
        let origin = Origin { files: &self.files, layout: &self.layout, groups: Ints::One(0), only: 0..u64::MAX };
        let cast = Cast::between(DType::U32, DType::U32).unwrap();
        gather(&origin, pick, items, cast, into, &mut || false).unwrap();
        (out, self.made.iter().map(|n| n.load(Ordering::Relaxed)).max().unwrap_or(0))
    }

    fn row(&self, example: i64, token: i64) -> impl Iterator<Item = u32> {
        (0..self.shape.array[3]).map(move |h| self.shape.element([example as u64, 0, token as u64, h]))
    }
}

/// Compares a gather of single rows and one of whole examples with the array.
fn check(shape: &Shape, budget: u64, at: &[(i64, i64)], places: bool) -> Result<(), TestCaseError> {
    let (examples, tokens): (Vec<i64>, Vec<i64>) = at.iter().copied().unzip();
    let made = Made::new(shape, budget);
    let each = Pick::Tokens { examples: Ints::Each(&examples), tokens: Ints::Each(&tokens) };
    for _ in 0..2 {
        let (found, most) = made.gather(each, at.len(), at.len(), places);
        let want: Vec<u32> = at.iter().flat_map(|(e, t)| made.row(*e, *t)).collect();
        prop_assert!(found == want);
        prop_assert!(most <= 1, "a chunk was decoded {most} times");
    }
    let some = &examples[..examples.len().min(40)];
    let per = shape.array[2] as i64;
    let (found, most) =
        made.gather(Pick::Whole { examples: Ints::Each(some) }, some.len(), some.len() * per as usize, places);
    let want: Vec<u32> =
        some.iter().flat_map(|e| (0..per).map(move |t| (*e, t))).flat_map(|(e, t)| made.row(e, t)).collect();
    prop_assert!(found == want);
    prop_assert!(most <= 1, "a chunk was decoded {most} times");
    Ok(())
}

fn shapes() -> impl Strategy<Value = Shape> {
    let chunk = (1u64..5, 1u64..7, 1u64..40);
    (1u64..30, 1u64..12, prop_oneof![1u64..9, 100u64..130], chunk, any::<u64>(), any::<u64>()).prop_map(
        |(n, t, h, (a, b, c), h1, h2)| Shape { array: [n, 1, t, h], chunk: [a, 1, b, c.max(h / 3)], holes: h1 & h2 },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rows_are_those_of_the_array_and_each_chunk_is_decoded_once(
        shape in shapes(),
        at in prop::collection::vec((any::<u64>(), any::<u64>()), 1..3000),
        budget in prop_oneof![Just(0u64), 0u64..20_000, Just(1 << 30)],
        places in any::<bool>(),
    ) {
        let at: Vec<(i64, i64)> =
            at.iter().map(|(e, t)| ((e % shape.array[0]) as i64, (t % shape.array[2]) as i64)).collect();
        check(&shape, budget, &at, places)?;
    }
}

/// The request of the bench: 16,384 random rows over 1,000 chunks, more than fit into the budget.
#[test]
fn random_rows_over_many_chunks_decode_each_once() {
    let shape = Shape { array: [1000, 1, 4, 64], chunk: [1, 1, 4, 64], holes: 0 };
    let mut x = 1u64;
    let mut next = |n: u64| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((x >> 33) % n) as i64
    };
    let at: Vec<(i64, i64)> = (0..16_384).map(|_| (next(1000), next(4))).collect();
    for budget in [0, 100 << 10] {
        check(&shape, budget, &at, false).unwrap();
    }
}

/// A budget for half of the chunks: the cached half is read before the other half evicts it.
#[test]
fn cached_chunks_are_read_before_others_evict_them() {
    let shape = Shape { array: [64, 1, 4, 4096], chunk: [1, 1, 4, 4096], holes: 0 };
    let made = Made::new(&shape, 2 << 20);
    let examples: Vec<i64> = (0..64).collect();
    let decodings = || {
        let before = made.files.decodings();
        made.gather(Pick::Whole { examples: Ints::Each(&examples) }, 64, 256, false);
        made.files.decodings() - before
    };
    assert_eq!(decodings(), 64);
    let again = decodings();
    assert!(again <= 64 - 16, "{again} of 64 chunks were decoded again, although the budget holds about 32");
}

/// An array with a decoder, and without a cache.
struct Coded {
    files: ChunkFiles,
    layout: Chunked,
    _folder: tempfile::TempDir,
}

impl Coded {
    fn new(shape: [u64; 4], chunk: [u64; 4], decoder: Box<dyn Decode>) -> Coded {
        let folder = tempfile::tempdir().unwrap();
        let array = ChunkArray {
            folder: folder.path().into(),
            metadata: folder.path().join(".zarray").into(),
            naming: Naming::v2(false),
            shape,
            chunk,
            fill: Some(vec![0; 4]),
            content: Content::Coded(decoder),
            scales: None,
        };
        let files = ChunkFiles::new(vec![array], shape[3], DType::U32, 0, Io::Pread).unwrap();
        let members = vec![Member { examples: shape[0], parts: files.grids() }];
        let layout = Chunked::new(1, members, vec![Lengths::Same(shape[2])]).unwrap();
        Coded { files, layout, _folder: folder }
    }

    fn gather(&self, examples: &[i64], out: &mut [u8]) -> Result<()> {
        let origin = Origin { files: &self.files, layout: &self.layout, groups: Ints::One(0), only: 0..u64::MAX };
        let pick = Pick::Whole { examples: Ints::Each(examples) };
        gather(&origin, pick, examples.len(), Cast::between(DType::U32, DType::U32)?, Out::Dense(out), &mut || false)
    }
}

#[test]
fn an_error_of_a_chunk_is_the_error_of_the_gather() {
    #[derive(Debug)]
    struct Failing;
    impl Decode for Failing {
        fn chunk(&self, indices: &[u64], len: u64, location: &Location) -> Result<Option<Vec<u8>>> {
            match indices[0] {
                7 | 9 => Err(Error::new(Kind::Format, format!("chunk {}", indices[0])).at(location)),
                _ => Ok(Some(vec![0; len as usize])),
            }
        }
    }
    let made = Coded::new([64, 1, 4, 64], [1, 1, 4, 64], Box::new(Failing));
    let examples: Vec<i64> = (0..64).rev().collect();
    let mut out = vec![0u8; 64 * 4 * 256];
    let error = made.gather(&examples, &mut out).unwrap_err();
    assert_eq!(error.detail, "chunk 7");
    let short = made.gather(&examples, &mut out[..100]).unwrap_err();
    assert_eq!(short.kind, Kind::Argument);
}

/// The pool's threads wait until the caller has decoded a chunk: if it never does, all chunks are theirs.
#[test]
fn the_calling_thread_decodes_too() {
    #[derive(Debug)]
    struct Waiting {
        caller: std::thread::ThreadId,
        /// Whether the caller has decoded, and a signal of it.
        decoded: Arc<(Mutex<bool>, Condvar)>,
    }
    impl Decode for Waiting {
        fn chunk(&self, _: &[u64], len: u64, _: &Location) -> Result<Option<Vec<u8>>> {
            let (decoded, changed) = &*self.decoded;
            let mut decoded = decoded.lock().unwrap();
            if std::thread::current().id() == self.caller {
                *decoded = true;
                changed.notify_all();
            } else {
                drop(changed.wait_timeout_while(decoded, Duration::from_secs(20), |yes| !*yes).unwrap());
            }
            Ok(Some(vec![0; len as usize]))
        }
    }
    let decoded = Arc::new((Mutex::new(false), Condvar::new()));
    let waiting = Waiting { caller: std::thread::current().id(), decoded: Arc::clone(&decoded) };
    let made = Coded::new([64, 1, 4, 64], [1, 1, 4, 64], Box::new(waiting));
    made.gather(&(0..64).collect::<Vec<i64>>(), &mut vec![0u8; 64 * 4 * 256]).unwrap();
    assert!(*decoded.0.lock().unwrap());
}

/// The number of threads is read once per process, so the other tests run again in processes with other numbers.
#[test]
fn with_other_numbers_of_threads() {
    if std::env::var_os("ACTSHARD_NUM_THREADS").is_some() {
        return;
    }
    for threads in ["1", "2", "16"] {
        let run = std::process::Command::new(std::env::current_exe().unwrap())
            .env("ACTSHARD_NUM_THREADS", threads)
            .args(["decodes::", "--skip", "with_other_numbers_of_threads"])
            .output()
            .unwrap();
        let output = String::from_utf8_lossy(&run.stdout);
        assert!(run.status.success() && !output.contains(" 0 passed"), "{threads} threads: {output}");
    }
}
