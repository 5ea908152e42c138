//! Listed files.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use actshard_core::dtype::Cast;
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::gather::{Ints, Out, Pick};
use actshard_core::layout::spans::{PartSpans, PerExample, Spans};
use actshard_core::layout::strided::Strided;
use actshard_core::location::Location;
use actshard_core::parse::safetensors::TensorRows;
use actshard_core::rows::{Rows, Units};
use actshard_core::source::{Access, Io, RangeRead, Source, Store, Version, Wishes};
use actshard_core::stream::ahead::{Ahead, Stream, Supply, Wanted};
use actshard_core::stream::plan::{Plan, Settings, Shuffle};
use actshard_core::stream::rescale::{Convert, Scale};
use actshard_core::stream::select::Selection;
use actshard_core::threads::Stop;
use actshard_core::{DType, Error, Kind, Result};
use proptest::prelude::*;

use super::store::{Handle, Memory, WISHES, at};

/// `files` objects of float32 rows; element `e` of row `r` of file `f` is its own number.
fn objects(files: u64, rows: u64, width: u64, before: usize) -> Vec<(String, Vec<u8>)> {
    let object = |f: u64| {
        let numbers = (0..rows * width).map(|i| (f * rows * width + i) as f32);
        let bytes = [vec![7; before], numbers.flat_map(f32::to_le_bytes).collect()].concat();
        (format!("part-{f}"), bytes)
    };
    (0..files).map(object).collect()
}

fn row_files(files: u64, rows: u64, start: u64) -> Vec<RowFile> {
    let file = |f| RowFile { location: at(&format!("part-{f}")), rows: RowsIn::At { start, rows, swapped: false } };
    (0..files).map(file).collect()
}

/// One example per row.
fn strided(store: &Arc<Memory>, files: u64, rows: u64, width: u64) -> Rows {
    let table =
        FileTable::of(Arc::new(Handle(Arc::clone(store))), row_files(files, rows, 0), width, DType::F32).unwrap();
    Rows::Strided(table, Strided::new(files * rows, rows, 1, 1).unwrap())
}

fn gather(rows: &Rows, pick: Pick<'_>, n: usize, width: u64, watch: &mut dyn FnMut() -> bool) -> Result<Vec<f32>> {
    let mut out = vec![0f32; n * width as usize];
    let cast = Cast::between(DType::F32, DType::F32)?;
    rows.gather(Ints::One(0), pick, n, cast, Out::Dense(bytemuck::cast_slice_mut(&mut out)), watch)?;
    Ok(out)
}

fn some(rows: &Rows, examples: &[i64], width: u64) -> Result<Vec<f32>> {
    let pick = Pick::Tokens { examples: Ints::Each(examples), tokens: Ints::One(0) };
    gather(rows, pick, examples.len(), width, &mut || false)
}

/// A deterministic shuffle.
fn shuffled(n: u64, of: u64) -> Vec<i64> {
    (0..n).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20) % of).map(|i| i as i64).collect()
}

#[test]
fn many_rows_within_a_few_megabytes_are_few_requests() {
    let (files, rows, width) = (4, 4096, 64);
    let store = Arc::new(Memory::new(objects(files, rows, width, 0), WISHES));
    let dataset = strided(&store, files, rows, width);
    let examples = shuffled(10_000, files * rows);
    let found = some(&dataset, &examples, width).unwrap();
    for (row, example) in found.chunks(width as usize).zip(&examples) {
        assert_eq!(row[1], (example * width as i64 + 1) as f32);
    }
    // Four objects of a megabyte each.
    let reads = store.reads();
    assert_eq!(reads.len(), 4, "{reads:?}");
    assert_eq!(store.opens.load(Ordering::Relaxed), 1);
    some(&dataset, &examples, width).unwrap();
    assert_eq!(store.opens.load(Ordering::Relaxed), 1, "files that are kept were opened again");
}

#[test]
fn no_request_is_larger_than_wished_and_far_rows_are_asked_for_apart() {
    let (rows, width) = (65_536, 16);
    let wishes = Wishes { gap: 1000, largest: 300_000, ..WISHES };
    let store = Arc::new(Memory::new(objects(1, rows, width, 0), wishes));
    let dataset = strided(&store, 1, rows, width);
    let all: Vec<i64> = (0..rows as i64).collect();
    some(&dataset, &all, width).unwrap();
    let reads = store.reads();
    assert!(reads.iter().all(|(_, _, len)| *len <= 300_000));
    assert!(reads.len() <= (rows * width * 4).div_ceil(300_000 - 262_144) as usize, "{}", reads.len());
    // Gaps of 2,000 bytes and of 900.
    some(&dataset, &[0, 31, 62, 10_000, 10_014], width).unwrap();
    let mut lengths: Vec<u64> = store.reads().into_iter().map(|(_, _, len)| len).collect();
    lengths.sort_unstable();
    assert_eq!(lengths, [64, 64, 64, 14 * 64 + 64]);
}

#[test]
fn headers_are_read_through_the_source() {
    let header = br#"{"acts":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}}"#;
    let numbers: Vec<u8> = (0..6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    let object = [&(header.len() as u64).to_le_bytes()[..], header, &numbers].concat();
    let store = Arc::new(Memory::new([("a".to_string(), object)], WISHES));
    let open = |key: &str| {
        let file = RowFile { location: at("a"), rows: RowsIn::Found(Arc::new(TensorRows(key.to_string()))) };
        let table = FileTable::of(Arc::new(Handle(Arc::clone(&store))), vec![file], 2, DType::F32).unwrap();
        Rows::Strided(table, Strided::new(3, 3, 1, 1).unwrap())
    };
    assert_eq!(some(&open("acts"), &[2, 0], 2).unwrap(), [4.0, 5.0, 0.0, 1.0]);
    let error = some(&open("other"), &[0], 2).unwrap_err();
    assert!(error.to_string().starts_with("memory://bucket/a: expected a tensor named 'other'"), "{error}");
}

#[test]
fn faults_name_the_object() {
    let mut made = Memory::new(objects(3, 8, 2, 0), WISHES);
    made.broken = Some("part-1");
    let store = Arc::new(made);
    let dataset = strided(&store, 3, 8, 2);
    assert!(some(&dataset, &[0, 20], 2).is_ok());
    let error = some(&dataset, &[23, 9, 0], 2).unwrap_err();
    assert_eq!(
        (error.kind, error.to_string().as_str()),
        (Kind::Access, "memory://bucket/part-1: byte 8: cannot read: 503")
    );
    // A missing object, a truncated one, and a replaced one.
    let lacking = strided(&store, 5, 8, 2);
    let error = some(&lacking, &[0, 39], 2).unwrap_err();
    assert_eq!((error.kind, error.location), (Kind::NotFound, Some(at("part-4"))));
    let longer = strided(&store, 3, 9, 2);
    assert_eq!(some(&longer, &[0], 2).unwrap_err().kind, Kind::Truncated);
    store.replaced.store(true, Ordering::Relaxed);
    assert_eq!(some(&dataset, &[0, 20], 2).unwrap_err().kind, Kind::Format);
    // Invalid indices are errors before anything is read.
    store.reads();
    assert_eq!(some(&dataset, &[0, 24], 2).unwrap_err().kind, Kind::OutOfRange);
    assert!(store.reads().is_empty());
}

#[test]
fn a_caller_that_stops_waits_for_no_further_request() {
    let (files, wishes) = (400, Wishes { parallel: 2, ..WISHES });
    let mut made = Memory::new(objects(files, 1, 4, 0), wishes);
    made.latency = Duration::from_millis(25);
    let store = Arc::new(made);
    let dataset = strided(&store, files, 1, 4);
    let all: Vec<i64> = (0..files as i64).collect();
    let mut looks = 0;
    let pick = Pick::Tokens { examples: Ints::Each(&all), tokens: Ints::One(0) };
    let error = gather(&dataset, pick, all.len(), 4, &mut || {
        looks += 1;
        looks > 2
    })
    .unwrap_err();
    assert_eq!(error.kind, Kind::Interrupted);
    assert!(store.reads().len() < files as usize);
}

/// An object that never responds until it is told to stop.
#[derive(Debug)]
struct Silent(Location);

impl Source for Silent {
    fn location(&self) -> &Location {
        &self.0
    }

    fn size(&self) -> u64 {
        1 << 20
    }

    fn version(&self) -> Option<Version> {
        None
    }

    fn read_many(&self, _: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        for _ in 0..1000 {
            stop.check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
        Err(Error::new(Kind::Access, "nobody stopped it"))
    }

    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}

#[derive(Debug)]
struct Mute;

impl Store for Mute {
    fn open_many(&self, locations: &[&Location], _: Access, _: &Stop) -> Vec<Result<Box<dyn Source>>> {
        locations.iter().map(|l| Ok(Box::new(Silent((*l).clone())) as Box<dyn Source>)).collect()
    }

    fn list(&self, _: &Location) -> Result<Vec<String>> {
        Ok(vec![])
    }

    fn wishes(&self) -> Option<Wishes> {
        Some(WISHES)
    }
}

#[test]
fn a_single_request_can_be_stopped_while_it_waits() {
    let table = FileTable::of(Arc::new(Mute), row_files(1, 4, 0), 2, DType::F32).unwrap();
    let dataset = Rows::Strided(table, Strided::new(4, 4, 1, 1).unwrap());
    let mut looks = 0;
    let pick = Pick::Tokens { examples: Ints::Each(&[1]), tokens: Ints::One(0) };
    let error = gather(&dataset, pick, 1, 2, &mut || {
        looks += 1;
        looks > 2
    })
    .unwrap_err();
    assert_eq!(error.kind, Kind::Interrupted);
}

/// Even with more objects than the limit of open files there is one request: nothing is read before all objects are known
/// to exist.
#[test]
fn many_objects_are_planned_together() {
    let files = 3000;
    let store = Arc::new(Memory::new(objects(files, 1, 2, 0), Wishes { parallel: 2, ..WISHES }));
    let table = FileTable::of(Arc::new(Handle(Arc::clone(&store))), row_files(files, 1, 0), 2, DType::F32).unwrap();
    let part = PartSpans {
        files: PerExample::Each((0..files as u32).collect()),
        starts: (0..files).map(|f| u64::from(f + 1 == files)).collect(),
        tokens: PerExample::Same(1),
        stride: 0,
    };
    let dataset = Rows::Spans(table, Spans::new(1, files as usize, vec![part]).unwrap());
    let all: Vec<i64> = (0..files as i64).collect();
    assert_eq!(some(&dataset, &all, 2).unwrap_err().kind, Kind::Format);
    assert!(store.reads().is_empty());
    assert_eq!(some(&dataset, &all[..5], 2).unwrap()[8..], [8.0, 9.0]);
}

#[test]
fn any_gap_may_be_wished_for() {
    let (rows, width) = (64, 16);
    let wishes = Wishes { gap: u64::MAX, largest: u64::MAX, ..WISHES };
    let store = Arc::new(Memory::new(objects(1, rows, width, 0), wishes));
    some(&strided(&store, 1, rows, width), &[60, 1, 33], width).unwrap();
    assert_eq!(store.reads(), [("part-0".to_string(), 64, 60 * 64)]);
}

fn stream_of(rows: Rows, window: u64, unit_bytes: u64, width: usize) -> Arc<Stream> {
    let settings = Settings {
        shuffle: Shuffle::Window,
        seed: 1,
        batch: 100,
        rank: 0,
        ranks: 1,
        drop_last: false,
        groups: vec![0],
        interleaved: false,
        window,
        unit_bytes,
        row_bytes: 4 * width as u64,
    };
    let selection = Selection::same(rows.examples(), 0, 64).unwrap();
    let plan = Plan::new(settings, selection, &Units::Examples).unwrap();
    let convert = Convert::new(DType::F32, DType::F32, width, 1, vec![], Scale::None).unwrap();
    Arc::new(Stream { rows: Arc::new(rows), plan, convert })
}

fn batches(stream: &Arc<Stream>) -> Result<Vec<Vec<u8>>> {
    let supply = Supply::New(Box::new(|bytes| Ok(vec![0u8; bytes])));
    let ahead = Ahead::start(Arc::clone(stream), 0, Wanted { first: 0, every: 1 }, supply, 2)?;
    let mut made = vec![];
    while let Some(batch) = ahead.next(&mut || false)? {
        made.push(batch.memory);
    }
    Ok(made)
}

#[test]
fn a_window_stream_of_objects_is_that_of_files_in_few_requests() {
    let (examples, tokens, width) = (64, 64, 16);
    let bytes = objects(1, examples * tokens, width, 0).remove(0).1;
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("part-0");
    std::fs::write(&path, &bytes).unwrap();
    let layout = || Strided::new(examples, examples, 1, tokens).unwrap();
    let file = RowFile { location: path.into(), rows: RowsIn::Raw(examples * tokens) };
    let near = Rows::Strided(FileTable::new(vec![file], width, DType::F32, Io::Pread).unwrap(), layout());
    let store = Arc::new(Memory::new([("part-0".to_string(), bytes)], WISHES));
    let table =
        FileTable::of(Arc::new(Handle(Arc::clone(&store))), row_files(1, examples * tokens, 0), width, DType::F32)
            .unwrap();
    let far = Rows::Strided(table, layout());
    assert_eq!((near.unit_bytes(), far.unit_bytes()), (None, Some(1 << 20)));
    let (window, unit) = (1000, 1 << 11);
    let theirs = batches(&stream_of(near, window, unit, width as usize)).unwrap();
    let ours = batches(&stream_of(far, window, unit, width as usize)).unwrap();
    assert_eq!(ours.len(), 41);
    assert!(ours == theirs);
    // 4,096 rows; after each batch, one gather reads the rows that replace it.
    let reads = store.reads().len();
    assert!(reads <= 2 * 41 + 8, "{reads} requests");
    // A fault becomes the stream's error.
    let mut broken = Memory::new(objects(1, examples * tokens, width, 0), WISHES);
    broken.broken = Some("part-0");
    let table =
        FileTable::of(Arc::new(Handle(Arc::new(broken))), row_files(1, examples * tokens, 0), width, DType::F32)
            .unwrap();
    let far = Rows::Strided(table, layout());
    assert_eq!(batches(&stream_of(far, window, unit, width as usize)).unwrap_err().kind, Kind::Access);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Compares with numbers that encode their position: for both kinds of output, with and without a cast, in both byte
    /// orders.
    #[test]
    fn rows_are_those_of_a_naive_reader(
        files in 1u64..5,
        rows in 1u64..40,
        width in 1u64..6,
        before in 0usize..9,
        (gap, largest, parallel) in (0u64..200, 1u64..400, 1usize..4),
        picked in prop::collection::vec((0u64..5, 0u64..40, 1u32..4), 1..30),
        swapped in any::<bool>(),
        places in any::<bool>(),
        widen in any::<bool>(),
    ) {
        let wishes = Wishes { gap, largest, parallel, unit_bytes: 1, ..WISHES };
        let mut made = objects(files, rows, width, before);
        if swapped {
            made.iter_mut().for_each(|(_, bytes)| bytes[before..].chunks_mut(4).for_each(<[u8]>::reverse));
        }
        let store = Arc::new(Memory::new(made, wishes));
        let listed = (0..files)
            .map(|f| RowFile { location: at(&format!("part-{f}")), rows: RowsIn::At { start: before as u64, rows, swapped } })
            .collect();
        let table = FileTable::of(Arc::new(Handle(Arc::clone(&store))), listed, width, DType::F32).unwrap();
        let spans: Vec<(u64, u64, u32)> = picked
            .iter()
            .map(|(f, r, n)| (f % files, r % rows, (u64::from(*n)).min(rows - r % rows) as u32))
            .collect();
        let part = PartSpans {
            files: PerExample::Each(spans.iter().map(|s| s.0 as u32).collect()),
            starts: spans.iter().map(|s| s.1).collect(),
            tokens: PerExample::Each(spans.iter().map(|s| s.2).collect()),
            stride: 0,
        };
        let dataset = Rows::Spans(table, Spans::new(1, files as usize, vec![part]).unwrap());
        let expected: Vec<f64> = spans
            .iter()
            .flat_map(|(f, r, n)| (0..u64::from(*n) * width).map(move |i| ((f * rows + r) * width + i) as f64))
            .collect();
        let to = if widen { DType::F64 } else { DType::F32 };
        let row = width as usize * to.size().unwrap();
        let total: u64 = spans.iter().map(|s| u64::from(s.2)).sum();
        let mut out = vec![0u8; total as usize * row];
        let into = if places { Out::Places(out.chunks_mut(row).collect()) } else { Out::Dense(&mut out) };
        let cast = Cast::between(DType::F32, to).unwrap();
        dataset.gather(Ints::One(0), Pick::Whole { examples: Ints::Count }, spans.len(), cast, into, &mut || false).unwrap();
        let found: Vec<f64> = if widen {
            out.chunks(8).map(|c| f64::from_le_bytes(c.try_into().unwrap())).collect()
        } else {
            out.chunks(4).map(|c| f64::from(f32::from_le_bytes(c.try_into().unwrap()))).collect()
        };
        prop_assert_eq!(found, expected);
        let reads = store.reads();
        prop_assert!(reads.iter().all(|(_, _, n)| *n <= largest.max(width * 4)));
    }
}
