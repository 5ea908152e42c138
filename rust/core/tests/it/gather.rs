//! Compares the gather with a naive reader of the same files: both io modes, every pick, requests of all sizes.

use std::fs;
use std::path::Path;

use actshard_core::dtype::Cast;
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::gather::{Ints, Origin, Out, Pick, gather};
use actshard_core::kernels::STREAM_FROM;
use actshard_core::layout::placed::Placed;
use actshard_core::layout::strided::Strided;
use actshard_core::source::local::open_to_jump;
use actshard_core::source::{Io, Ready};
use actshard_core::{DType, Kind, Result};
use proptest::prelude::*;

const PER_FILE: u64 = 3;
const GROUPS: u64 = 2;
const TOKENS: u64 = 5;

/// Files of float32 rows whose elements encode their row and position.
fn dataset(folder: &Path, examples: u64, width: u64, io: Io) -> (FileTable, Strided) {
    let mut files = vec![];
    for (f, first) in (0..examples).step_by(PER_FILE as usize).enumerate() {
        let rows = PER_FILE.min(examples - first) * GROUPS * TOKENS;
        let values = (0..rows * width).flat_map(|i| ((f * 1_000_000) as f32 + i as f32).to_le_bytes());
        let path = folder.join(format!("{f}.bin"));
        fs::write(&path, values.collect::<Vec<u8>>()).unwrap();
        files.push(RowFile { location: path.into(), rows: RowsIn::Raw(rows) });
    }
    let table = FileTable::new(files, width, DType::F32, io).unwrap();
    (table, Strided::new(examples, PER_FILE, GROUPS, TOKENS).unwrap())
}

fn expected(width: u64, group: u64, example: i64, token: i64) -> Vec<f32> {
    let (f, e) = (example as u64 / PER_FILE, example as u64 % PER_FILE);
    let token = if token < 0 { TOKENS as i64 + token } else { token } as u64;
    let row = (e * GROUPS + group) * TOKENS + token;
    (0..width).map(|d| (f * 1_000_000) as f32 + (row * width + d) as f32).collect()
}

fn run(files: &FileTable, layout: &Strided, group: usize, pick: Pick<'_>, items: usize, out: &mut [u8]) -> Result<()> {
    let cast = Cast::between(DType::F32, DType::F32)?;
    gather(
        &Origin { files, layout, groups: Ints::One(group as i64), only: 0..u64::MAX },
        pick,
        items,
        cast,
        Out::Dense(out),
        &mut || false,
    )
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect()
}

fn io() -> impl Strategy<Value = Io> {
    prop_oneof![Just(Io::Mmap), Just(Io::Pread)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rows_equal_the_oracle(
        io in io(),
        examples in 1u64..12,
        width in 1u64..70,
        group in 0u64..GROUPS,
        picks in prop::collection::vec((0i64..1000, -(TOKENS as i64)..TOKENS as i64), 0..200),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (files, layout) = dataset(folder.path(), examples, width, io);
        let e: Vec<i64> = picks.iter().map(|p| p.0 % examples as i64).collect();
        let t: Vec<i64> = picks.iter().map(|p| p.1).collect();
        let mut out = vec![0xaa; picks.len() * width as usize * 4];
        let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&t) };
        let want: Vec<f32> = e.iter().zip(&t).flat_map(|(e, t)| expected(width, group, *e, *t)).collect();
        // The first accesses of a mapped file are reads.
        for _ in 0..5 {
            out.fill(0xaa);
            run(&files, &layout, group as usize, pick, e.len(), &mut out).unwrap();
            prop_assert_eq!(&floats(&out), &want);
        }

        run(&files, &layout, group as usize, Pick::Last { examples: Ints::Each(&e) }, e.len(), &mut out).unwrap();
        let want: Vec<f32> = e.iter().flat_map(|e| expected(width, group, *e, -1)).collect();
        prop_assert_eq!(floats(&out), want);

        let mut whole = vec![0xaa; out.len() * TOKENS as usize];
        run(&files, &layout, group as usize, Pick::Whole { examples: Ints::Each(&e) }, e.len(), &mut whole).unwrap();
        let want: Vec<f32> =
            e.iter().flat_map(|e| (0..TOKENS as i64).flat_map(|t| expected(width, group, *e, t))).collect();
        prop_assert_eq!(floats(&whole), want);
    }
}

/// Layers of a token side by side, some of them apart from the others, as draft-model caches store them: requests of several layers
/// find neighbours in both the file and the output, in any order and with repeats.
fn beside(folder: &Path, layers: usize, width: u64, apart: bool, io: Io) -> (FileTable, Placed) {
    let tokens: Vec<u32> = vec![3, 0, 5, 1];
    let (side, mut bytes, mut starts) = (layers - usize::from(apart), vec![], vec![vec![]; layers]);
    for (e, n) in tokens.iter().enumerate() {
        let first = bytes.len() as u64;
        let end = first + side as u64 * u64::from(*n) * width * 4;
        for (l, start) in starts.iter_mut().enumerate() {
            start.push(if l < side { first + l as u64 * width * 4 } else { end });
        }
        let together = (0..*n).flat_map(|t| (0..side).map(move |l| (l, t)));
        let alone = (side..layers).flat_map(|l| (0..*n).map(move |t| (l, t)));
        for (l, t) in together.chain(alone) {
            bytes.extend((0..width).flat_map(|d| value(l, e, t, d).to_le_bytes()));
        }
    }
    let path = folder.join("rows");
    fs::write(&path, bytes).unwrap();
    let steps = [side as u64 * width * 4, width * 4];
    let file = |step: u64| RowFile { location: path.clone().into(), rows: RowsIn::Apart { step, swapped: false } };
    let files = (0..layers).flat_map(|l| tokens.iter().map(move |_| u32::from(l >= side))).collect();
    let placed = Placed::new(layers, files, starts.concat(), tokens, steps.to_vec()).unwrap();
    (FileTable::new(steps.map(file).to_vec(), width, DType::F32, io).unwrap(), placed)
}

fn value(layer: usize, example: usize, token: u32, element: u64) -> f32 {
    (((layer * 10 + example) * 10 + token as usize) * 100) as f32 + element as f32
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rows_side_by_side_equal_the_oracle(
        io in io(),
        layers in 1usize..5,
        width in 1u64..70,
        apart in any::<bool>(),
        pitched in any::<bool>(),
        sorted in any::<bool>(),
        picks in prop::collection::vec((0usize..60, prop::sample::select(vec![0i64, 2, 3]), 0u32..5), 0..200),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (files, layout) = beside(folder.path(), layers, width, apart, io);
        let tokens = [3u32, 0, 5, 1];
        let mut picks: Vec<_> =
            picks.into_iter().map(|(l, e, t)| (e, t % tokens[usize::try_from(e).unwrap()], l % layers)).collect();
        if sorted {
            picks.sort_unstable(); // the order of a batch of all layers
        }
        let groups: Vec<i64> = picks.iter().map(|p| p.2 as i64).collect();
        let (e, t): (Vec<i64>, Vec<i64>) = picks.iter().map(|p| (p.0, i64::from(p.1))).unzip();
        let row = width as usize * 4;
        let pitch = row + if pitched { 12 } else { 0 };
        let want: Vec<f32> =
            picks.iter().flat_map(|(e, t, l)| (0..width).map(move |d| value(*l, *e as usize, *t, d))).collect();
        let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&t) };
        for _ in 0..5 {
            let mut out = vec![0xaa; picks.len() * pitch];
            let cast = Cast::between(DType::F32, DType::F32).unwrap();
            let origin = Origin { files: &files, layout: &layout, groups: Ints::Each(&groups), only: 0..u64::MAX };
            let into = if pitched {
                Out::Places(out.chunks_mut(pitch).map(|place| &mut place[..row]).collect())
            } else {
                Out::Dense(&mut out)
            };
            gather(&origin, pick, picks.len(), cast, into, &mut || false).unwrap();
            let found: Vec<f32> = out.chunks(pitch).flat_map(|r| floats(&r[..row])).collect();
            prop_assert_eq!(&found, &want);
            prop_assert!(out.chunks(pitch).all(|r| r[row..].iter().all(|b| *b == 0xaa)));
        }
    }
}

/// Streamed past the caches, into memory that is not at a line boundary.
#[test]
fn streamed_outputs_equal_the_oracle() {
    const WIDTH: usize = 260;
    let folder = tempfile::tempdir().unwrap();
    let (files, layout) = dataset(folder.path(), 7, WIDTH as u64, Io::Mmap);
    for (to, before) in [(DType::F32, 0), (DType::F32, 16), (DType::F64, 8), (DType::F64, 4), (DType::F32, 1)] {
        let size = to.size().unwrap();
        let n = STREAM_FROM / (WIDTH * size) + 1;
        let e: Vec<i64> = (0..n as i64).map(|i| (i * 5 + i / 7) % 7).collect();
        let t: Vec<i64> = (0..n as i64).map(|i| (i * 3) % TOKENS as i64).collect();
        let mut out = vec![0xaa; before + n * WIDTH * size];
        gather(
            &Origin { files: &files, layout: &layout, groups: Ints::One(1), only: 0..u64::MAX },
            Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&t) },
            n,
            Cast::between(DType::F32, to).unwrap(),
            Out::Dense(&mut out[before..]),
            &mut || false,
        )
        .unwrap();
        for (i, row) in out[before..].chunks_exact(WIDTH * size).enumerate() {
            let want = expected(WIDTH as u64, 1, e[i], t[i]);
            let equal = match to {
                DType::F32 => floats(row) == want,
                _ => row
                    .chunks_exact(8)
                    .zip(&want)
                    .all(|(b, w)| f64::from_le_bytes(b.try_into().unwrap()) == f64::from(*w)),
            };
            assert!(equal, "row {i} as {to:?}");
        }
    }
}

/// Large enough for many parts on the pool, with rows shorter and longer than an extent.
#[test]
fn large_requests_equal_the_oracle() {
    for (io, width, n) in
        [(Io::Mmap, 256, 6_000), (Io::Pread, 256, 6_000), (Io::Mmap, 70_000, 12), (Io::Pread, 70_000, 12)]
    {
        let folder = tempfile::tempdir().unwrap();
        let (files, layout) = dataset(folder.path(), 7, width, io);
        let e: Vec<i64> = (0..n).map(|i| (i * 5 + i / 7) % 7).collect();
        let t: Vec<i64> = (0..n).map(|i| (i * 3) % TOKENS as i64).collect();
        let mut out = vec![0xaa; n as usize * width as usize * 4];
        let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&t) };
        for turn in 0..5 {
            out.fill(0xaa);
            run(&files, &layout, 1, pick, e.len(), &mut out).unwrap();
            for (i, row) in out.chunks_exact(width as usize * 4).enumerate() {
                assert!(floats(row) == expected(width, 1, e[i], t[i]), "turn {turn}, row {i}");
            }
        }
    }
}

#[test]
fn an_output_of_the_wrong_size_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (files, layout) = dataset(folder.path(), 4, 8, Io::Mmap);
    for size in [0, 31, 33, 64] {
        let pick = Pick::Last { examples: Ints::One(0) };
        let error = run(&files, &layout, 0, pick, 1, &mut vec![0; size]).unwrap_err();
        assert_eq!(error.kind, Kind::Argument);
    }
}

#[test]
fn a_file_that_shrinks_after_it_was_opened_is_an_error() {
    for io in [Io::Mmap, Io::Pread] {
        let folder = tempfile::tempdir().unwrap();
        let (files, layout) = dataset(folder.path(), 4, 8, io);
        let mut out = vec![0; 4 * 32];
        let pick = Pick::Last { examples: Ints::Count };
        run(&files, &layout, 0, pick, 4, &mut out).unwrap();
        fs::OpenOptions::new().write(true).open(folder.path().join("1.bin")).unwrap().set_len(16).unwrap();
        let error = run(&files, &layout, 0, pick, 4, &mut out).unwrap_err();
        assert_eq!(error.kind, Kind::Truncated);
        assert!(error.to_string().contains("1.bin"), "{error}");
    }
}

#[test]
fn folders_and_missing_files_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let (files, layout) = dataset(folder.path(), 4, 8, Io::Mmap);
    fs::remove_file(folder.path().join("1.bin")).unwrap();
    let pick = Pick::Last { examples: Ints::Count };
    assert_eq!(run(&files, &layout, 0, pick, 4, &mut [0; 128]).unwrap_err().kind, Kind::NotFound);
    fs::create_dir(folder.path().join("1.bin")).unwrap();
    assert_eq!(run(&files, &layout, 0, pick, 4, &mut [0; 128]).unwrap_err().kind, Kind::NotAFile);
}

/// Read calls of this thread so far; `None` if the system does not count them.
fn reads() -> Option<u64> {
    let counts = fs::read_to_string("/proc/thread-self/io").ok()?;
    counts.lines().find_map(|line| line.strip_prefix("syscr: "))?.parse().ok()
}

/// Whether reads of the file system of this folder can be asked not to wait.
fn can_ask(folder: &Path) -> bool {
    let path = folder.join("asked");
    fs::write(&path, [1]).unwrap();
    let source = open_to_jump(&path, Io::Pread).unwrap();
    source.is_ready(0) != Ready::Unknown
}

#[test]
fn a_mapped_file_is_read_first_and_copied_when_it_is_accessed_often() {
    let folder = tempfile::tempdir().unwrap();
    if reads().is_none() || !can_ask(folder.path()) {
        return;
    }
    let (files, layout) = dataset(folder.path(), 3, 16, Io::Mmap);
    let (e, t) = ([0, 2, 1, 0, 2], [4, 0, 2, 1, 3]);
    let calls = |n: usize| -> Vec<u64> {
        let pick = Pick::Tokens { examples: Ints::Each(&e[..n]), tokens: Ints::Each(&t[..n]) };
        (0..6)
            .map(|_| {
                let mut out = vec![0xaa; n * 64];
                let before = reads().unwrap();
                run(&files, &layout, 0, pick, n, &mut out).unwrap();
                let calls = reads().unwrap() - before;
                for (i, row) in out.chunks_exact(64).enumerate() {
                    assert_eq!(floats(row), expected(16, 0, e[i], t[i]));
                }
                calls
            })
            .collect()
    };
    // Counting itself reads; the first call also starts threads.
    let own = calls(0)[5];
    let single: Vec<u64> = calls(1).iter().map(|n| n - own).collect();
    assert_eq!(single, [1, 1, 1, 0, 0, 0]);
}

/// Otherwise rows of the first accesses of a mapped file would not be converted.
#[test]
fn first_accesses_are_converted() {
    let folder = tempfile::tempdir().unwrap();
    let (files, layout) = dataset(folder.path(), 6, 33, Io::Mmap);
    let cast = Cast::between(DType::F32, DType::F64).unwrap();
    let e: Vec<i64> = (0..500).map(|i| i * 7 % 6).collect();
    for n in [1, 500] {
        for _ in 0..5 {
            let mut out = vec![0xaa; n * 33 * 8];
            let pick = Pick::Tokens { examples: Ints::Each(&e[..n]), tokens: Ints::One(-2) };
            let origin = Origin { files: &files, layout: &layout, groups: Ints::One(1), only: 0..u64::MAX };
            gather(&origin, pick, n, cast, Out::Dense(&mut out), &mut || false).unwrap();
            let got = out.chunks_exact(8).map(|c| f64::from_le_bytes(c.try_into().unwrap()) as f32);
            assert!(got.eq(e[..n].iter().flat_map(|e| expected(33, 1, *e, -2))));
        }
    }
}
