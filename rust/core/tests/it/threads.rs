//! Concurrent use of everything that threads share: the pool, cached files and their clock, decoded blocks, freed outputs, the
//! read-ahead thread. Values are compared; `scripts/sanitize.sh` runs this under sanitizers.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use actshard_core::codec::cache::Cache;
use actshard_core::dtype::Cast;
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::gather::{Ints, Out, Pick};
use actshard_core::layout::strided::Strided;
use actshard_core::memory::buffer::Buffer;
use actshard_core::memory::output::Output;
use actshard_core::rows::{Rows, Units};
use actshard_core::source::Io;
use actshard_core::stream::ahead::{Ahead, Stream, Supply, Wanted};
use actshard_core::stream::plan::{Plan, Settings, Shuffle};
use actshard_core::stream::rescale::{Convert, Scale};
use actshard_core::stream::select::Selection;
use actshard_core::threads;
use actshard_core::{DType, Kind};

const WIDTH: u64 = 64;
const FILES: u64 = 24;
const PER_FILE: u64 = 50;

/// Rows whose elements all equal the row's number.
fn dataset(folder: &Path, io: Io) -> Rows {
    let files = (0..FILES).map(|f| {
        let path = folder.join(format!("{f}"));
        let numbers = (f * PER_FILE..(f + 1) * PER_FILE).flat_map(|r| std::iter::repeat_n(r as f32, WIDTH as usize));
        fs::write(&path, numbers.flat_map(f32::to_le_bytes).collect::<Vec<u8>>()).unwrap();
        RowFile { location: path.into(), rows: RowsIn::Raw(PER_FILE) }
    });
    let files = FileTable::new(files.collect(), WIDTH, DType::F32, io).unwrap();
    Rows::Strided(files, Strided::new(FILES * PER_FILE, PER_FILE, 1, 1).unwrap())
}

fn check(rows: &Rows, seed: i64, n: i64) {
    let total = (FILES * PER_FILE) as i64;
    let e: Vec<i64> = (0..n).map(|i| (i * 7919 + seed * 104_729) % total).collect();
    let mut out = Output::new(e.len() * WIDTH as usize * 4).unwrap();
    let cast = Cast::between(DType::F32, DType::F32).unwrap();
    let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::One(0) };
    rows.gather(Ints::One(0), pick, e.len(), cast, Out::Dense(out.as_mut()), &mut || false).unwrap();
    for (row, e) in out.bytes().chunks_exact(WIDTH as usize * 4).zip(&e) {
        assert!(row.chunks_exact(4).all(|x| x == (*e as f32).to_le_bytes()), "row {e}");
    }
}

#[test]
fn gathers_releases_and_other_datasets_at_once_give_right_rows() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let datasets = [dataset(folders[0].path(), Io::Mmap), dataset(folders[1].path(), Io::Pread)];
    std::thread::scope(|scope| {
        for k in 0..6 {
            let datasets = &datasets;
            scope.spawn(move || {
                for i in 0..12 {
                    // Small ones run on this thread, large ones also on the pool's.
                    check(&datasets[(k % 2) as usize], k * 100 + i, if i % 3 == 0 { 6000 } else { 40 });
                    if i % 4 == k % 4 {
                        datasets[(k % 2) as usize].release();
                    }
                }
            });
        }
    });
}

#[test]
fn parts_of_many_callers_run_once_each() {
    std::thread::scope(|scope| {
        for k in 0..8 {
            scope.spawn(move || {
                for round in 0..40 {
                    let parts = 1 + (k * 7 + round) % 23;
                    let seen: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
                    let work = |i: usize, _: &threads::Stop| {
                        seen[i].fetch_add(1, Ordering::Relaxed);
                        threads::run(2, &|_, _| Ok(()), &mut || false)
                    };
                    threads::run(parts, &work, &mut || false).unwrap();
                    assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
                }
            });
        }
    });
}

#[test]
fn a_cache_gives_what_was_put_under_its_number() {
    let cache: Cache = Cache::new(40 << 10);
    std::thread::scope(|scope| {
        for k in 0..6u64 {
            let cache = &cache;
            scope.spawn(move || {
                for i in 0..600 {
                    let number = (i * 13 + k * 7) % 40;
                    match cache.get(number) {
                        Some(block) => assert!(block.iter().all(|b| u64::from(*b) == number)),
                        None => cache.put(number, &Arc::new(Buffer::from(vec![number as u8; 2048]))),
                    }
                    if i % 50 == k {
                        cache.remove(number);
                    }
                    assert!(cache.used() <= cache.budget());
                }
            });
        }
    });
}

fn stream(rows: Arc<Rows>, shuffle: Shuffle, units: &Units) -> Arc<Stream> {
    let settings = Settings {
        shuffle,
        seed: 1,
        batch: 32,
        rank: 0,
        ranks: 1,
        drop_last: false,
        groups: vec![0],
        interleaved: false,
        window: 300,
        unit_bytes: 8,
        row_bytes: 1,
    };
    let selection = Selection::same(rows.examples(), 0, 1).unwrap();
    let plan = Plan::new(settings, selection, units).unwrap();
    let convert = Convert::new(DType::F32, DType::F32, WIDTH as usize, 1, vec![], Scale::None).unwrap();
    Arc::new(Stream { rows, plan, convert })
}

fn start(stream: &Arc<Stream>, buffers: usize) -> Ahead<Vec<u8>> {
    let supply = match buffers {
        0 => Supply::New(Box::new(|bytes| Ok(vec![0; bytes]))),
        n => Supply::Recycled((0..n).map(|_| vec![0; 32 * WIDTH as usize * 4]).collect()),
    };
    Ahead::start(Arc::clone(stream), 0, Wanted { first: 0, every: 1 }, supply, buffers.max(1)).unwrap()
}

#[test]
fn every_row_of_a_stream_comes_once_whoever_takes_the_batches() {
    let folder = tempfile::tempdir().unwrap();
    let rows = Arc::new(dataset(folder.path(), Io::Mmap));
    for (shuffle, buffers) in [(Shuffle::Window, 0), (Shuffle::Exact, 3), (Shuffle::Stored, 2), (Shuffle::Window, 3)] {
        let ahead = start(&stream(Arc::clone(&rows), shuffle, &Units::Examples), buffers);
        let seen: Vec<AtomicUsize> = (0..FILES * PER_FILE).map(|_| AtomicUsize::new(0)).collect();
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while let Some(batch) = ahead.next(&mut || false).unwrap() {
                        for (i, e) in batch.examples.iter().enumerate() {
                            let row = &batch.memory[i * WIDTH as usize * 4..][..WIDTH as usize * 4];
                            assert!(row.chunks_exact(4).all(|x| x == (*e as f32).to_le_bytes()));
                            seen[*e as usize].fetch_add(1, Ordering::Relaxed);
                        }
                        if buffers > 0 {
                            ahead.give_back(batch.memory);
                        }
                    }
                });
            }
        });
        assert!(seen.iter().all(|n| n.load(Ordering::Relaxed) == 1));
    }
}

/// A consumer waiting for a batch that cannot come is woken by a stop from another thread, and by its own watch.
#[test]
fn a_stream_can_be_stopped_while_it_is_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let rows = Arc::new(dataset(folder.path(), Io::Mmap));
    let stream = stream(rows, Shuffle::Window, &Units::Examples);
    for from_watch in [false, true] {
        let ahead = start(&stream, 2);
        let kept: Vec<_> = (0..2).map(|_| ahead.next(&mut || false).unwrap().unwrap()).collect();
        std::thread::scope(|scope| {
            if !from_watch {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_millis(30));
                    ahead.stop(&mut || false).unwrap();
                });
            }
            // Buffers are never returned, so without a stop this would not end.
            let found = ahead.next(&mut || {
                if from_watch {
                    ahead.stop(&mut || false).unwrap();
                }
                false
            });
            assert!(found.unwrap().is_none());
        });
        assert!(ahead.next(&mut || false).unwrap().is_none());
        drop(kept);
    }
}

/// A reading thread that blocks (here: for lack of memory from the consumer) does not delay a program that was told to stop.
#[test]
fn an_interrupted_stop_does_not_wait_for_the_thread_when_it_is_dropped() {
    let folder = tempfile::tempdir().unwrap();
    let stream = stream(Arc::new(dataset(folder.path(), Io::Mmap)), Shuffle::Stored, &Units::Examples);
    let (hangs, is_hanging) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let make = move |bytes| {
        let _ = hangs.send(());
        let _ = released.recv();
        Ok(vec![0; bytes])
    };
    let ahead = Ahead::start(stream, 0, Wanted { first: 0, every: 1 }, Supply::New(Box::new(make)), 1).unwrap();
    is_hanging.recv().unwrap();
    assert_eq!(ahead.stop(&mut || true).unwrap_err().kind, Kind::Interrupted);
    let (done, is_done) = std::sync::mpsc::channel();
    let dropped = std::thread::spawn(move || {
        drop(ahead);
        done.send(()).unwrap();
    });
    let in_time = is_done.recv_timeout(Duration::from_secs(20));
    drop(release);
    dropped.join().unwrap();
    in_time.expect("dropping waits for the blocked thread");
}

#[test]
fn a_damaged_file_takes_no_batch_of_an_earlier_window_along() {
    let folder = tempfile::tempdir().unwrap();
    let rows = Arc::new(dataset(folder.path(), Io::Pread));
    let files = Units::Between((0..=FILES).map(|f| f * PER_FILE).collect());
    let stream = stream(rows, Shuffle::Window, &files);
    let mut order = vec![];
    let ahead = start(&stream, 0);
    while let Some(batch) = ahead.next(&mut || false).unwrap() {
        order.push(batch.examples);
    }
    // The first window of 300 has no row of this file.
    let early: Vec<i64> = order.iter().flatten().copied().take(300).collect();
    let late = (0..FILES as i64).find(|f| !early.iter().any(|e| e / PER_FILE as i64 == *f)).unwrap();
    fs::OpenOptions::new().write(true).open(folder.path().join(late.to_string())).unwrap().set_len(1).unwrap();
    let ahead = start(&stream, 0);
    let mut taken = 0;
    let error = loop {
        match ahead.next(&mut || false) {
            Ok(batch) => assert_eq!(batch.unwrap().examples, order[taken]),
            Err(error) => break error,
        }
        taken += 1;
    };
    assert_eq!(error.kind, Kind::Truncated);
    assert!(taken >= 300 / 32, "{taken}");
}
