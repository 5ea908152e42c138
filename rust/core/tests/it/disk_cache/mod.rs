//! The cache on disk: right bytes after any reads, limits, kills, damage and forks; few downloads; a hard limit.

mod damage;
mod far;
mod forks;
mod kills;
mod peak;
mod timing;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use actshard_core::Kind;
use actshard_core::disk_cache::DiskCache;
use actshard_core::source::{RangeRead, Source};
use actshard_core::threads::Stop;
use far::{Dice, Far, Server, disk_usage, files, is_right, oracle};
use proptest::prelude::*;

const KIB: u64 = 1 << 10;
const VERSION: &str = "actshard disk cache 1\n";
const MIB: u64 = 1 << 20;

fn server() -> Arc<Server> {
    Arc::default()
}

fn cache(limit: u64) -> (tempfile::TempDir, DiskCache) {
    let folder = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(folder.path(), limit).unwrap();
    assert_eq!(cache.take_warning(), None);
    (folder, cache)
}

#[test]
fn a_second_read_downloads_nothing() {
    let (folder, cache) = cache(64 * MIB);
    let server = server();
    let size = 9 * MIB + 12_345;
    let source = cache.source(Far::new(&server, 1, size).boxed());
    assert!(is_right(&*source, 1, 0, size));
    let calls = server.calls();
    assert_eq!(calls, [vec![(0, 4 * MIB), (4 * MIB, 4 * MIB), (8 * MIB, MIB + 12_345)]]);
    let mut dice = Dice(1);
    for _ in 0..300 {
        let at = dice.below(size);
        let len = dice.below((size - at).min(20_000)) + 1;
        assert!(is_right(&*source, 1, at, len.min(size - at)));
    }
    // Another process opens the folder later.
    let again = DiskCache::open(folder.path(), 64 * MIB).unwrap();
    assert!(is_right(&*again.source(Far::new(&server, 1, size).boxed()), 1, 0, size));
    assert_eq!(server.calls(), Vec::<Vec<_>>::new());
    let info = again.info().unwrap();
    assert_eq!((info.objects, info.hits, info.misses, info.limit), (1, 1, 0, 64 * MIB));
    assert!(
        info.bytes >= size && info.bytes < size + 200 * KIB && info.bytes >= disk_usage(&folder.path().join("objects"))
    );
}

#[test]
fn missing_pages_of_many_reads_are_downloaded_by_one_call_and_neighbours_are_merged() {
    let (_folder, cache) = cache(64 * MIB);
    let server = server();
    let source = cache.source(Far::new(&server, 1, 40 * MIB).boxed());
    assert!(is_right(&*source, 1, 3 * 64 * KIB, 1));
    server.calls();
    // Pages 0 to 2 and 4 are missing, page 3 is there; then a far page, and a range of 6 MiB across blocks.
    let ranges = [(9 * MIB + 5, 6 * MIB), (4 * 64 * KIB, 9), (70, 190 * KIB), (100, 7), (30 * MIB, 1)];
    let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|(_, len)| vec![0; *len as usize]).collect();
    let mut reads: Vec<_> =
        ranges.iter().zip(&mut buffers).map(|((at, _), into)| RangeRead { at: *at, into }).collect();
    source.read_many(&mut reads, &Stop::new()).unwrap();
    let page = 64 * KIB;
    let expected =
        vec![(0, 3 * page), (4 * page, page), (9 * MIB, 3 * MIB), (12 * MIB, 3 * MIB + page), (30 * MIB, page)];
    assert_eq!(server.calls(), [expected]);
    for ((at, _), found) in ranges.iter().zip(&buffers) {
        let mut expected = vec![0; found.len()];
        oracle(1, *at, &mut expected);
        assert!(expected == *found);
    }
}

#[test]
fn many_readers_download_a_block_once() {
    let (folder, cache) = cache(64 * MIB);
    let server = Arc::new(Server { delay: Duration::from_millis(20), ..Server::default() });
    let size = 12 * MIB;
    // Half of them as other processes would: with caches of their own.
    let own = DiskCache::open(folder.path(), 64 * MIB).unwrap();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let source = [&cache, &own][n % 2].source(Far::new(&server, 1, size).boxed());
            scope.spawn(move || assert!(is_right(&*source, 1, 0, size)));
        }
    });
    assert_eq!(server.bytes.load(Ordering::SeqCst), size);
}

#[test]
fn a_failed_or_stopped_download_leaves_nothing() {
    let (folder, cache) = cache(64 * MIB);
    let server = server();
    let source = cache.source(Far::new(&server, 3, 5 * MIB).boxed());
    server.broken.store(true, Ordering::SeqCst);
    let mut into = vec![0; 100_000];
    let error = source.read(7, &mut into, &Stop::new()).unwrap_err();
    assert_eq!((error.kind, error.location), (Kind::Access, Some(source.location().clone())));
    server.broken.store(false, Ordering::SeqCst);
    let stop = Stop::new();
    stop.set();
    let read =
        |into: &mut [u8], stop: &Stop| source.read_many(&mut [RangeRead { at: 7, into }], stop).unwrap_err().kind;
    assert_eq!(read(&mut into, &stop), Kind::Interrupted);
    server.held.store(true, Ordering::SeqCst);
    let stop = Stop::new();
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(read(&mut into, &stop), Kind::Interrupted));
        while server.waiting.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        stop.set();
    });
    server.held.store(false, Ordering::SeqCst);
    let stored: u64 = files(&folder.path().join("objects"))
        .iter()
        .filter(|path| path.ends_with("data"))
        .map(|path| disk_usage(path))
        .sum();
    assert_eq!(stored, 0);
    assert!(is_right(&*source, 3, 0, 5 * MIB));
}

#[test]
fn a_stop_ends_the_wait_for_another_reader() {
    let (_folder, cache) = cache(64 * MIB);
    let server = server();
    server.held.store(true, Ordering::SeqCst);
    let (first, second) =
        (cache.source(Far::new(&server, 3, MIB).boxed()), cache.source(Far::new(&server, 3, MIB).boxed()));
    let stop = Stop::new();
    std::thread::scope(|scope| {
        scope.spawn(|| assert!(is_right(&*first, 3, 0, MIB)));
        while server.waiting.load(Ordering::SeqCst) == 0 {
            std::thread::yield_now();
        }
        let waits = scope.spawn(|| second.read_many(&mut [RangeRead { at: 0, into: &mut [0; 9] }], &stop));
        std::thread::sleep(Duration::from_millis(20));
        stop.set();
        assert_eq!(waits.join().unwrap().unwrap_err().kind, Kind::Interrupted);
        assert_eq!(server.waiting.load(Ordering::SeqCst), 1);
        server.held.store(false, Ordering::SeqCst);
    });
    assert_eq!(server.calls().len(), 1);
}

#[test]
fn another_version_is_another_object_and_none_is_not_cached() {
    let (_folder, cache) = cache(64 * MIB);
    let server = server();
    let with = |tag: Option<&str>, number| Far { tag: tag.map(str::to_string), ..Far::new(&server, number, MIB) };
    assert!(is_right(&*cache.source(with(Some("a"), 1).boxed()), 1, 0, MIB));
    let mut other = with(Some("b"), 2);
    other.location = with(None, 1).location;
    assert!(is_right(&*cache.source(other.boxed()), 2, 0, MIB));
    assert_eq!(cache.info().unwrap().objects, 2);
    let uncached = cache.source(with(None, 5).boxed());
    server.calls();
    (0..3).for_each(|_| assert!(is_right(&*uncached, 5, 10, 10)));
    assert_eq!(server.calls(), vec![vec![(10, 10)]; 3]);
    assert_eq!(cache.info().unwrap().objects, 2);
}

#[test]
fn the_limit_holds_and_a_lower_one_is_applied_at_once() {
    let (folder, cache) = cache(20 * MIB);
    let server = server();
    let mut most = 0;
    for round in 0..2 {
        for number in 0..8 {
            let source = cache.source(Far::new(&server, number, 7 * MIB + number).boxed());
            assert!(is_right(&*source, number, round, 7 * MIB));
            most = most.max(disk_usage(folder.path()));
        }
    }
    let bytes = cache.info().unwrap().bytes;
    assert!(most <= 20 * MIB && bytes <= 20 * MIB && bytes > 12 * MIB, "{most} {bytes}");
    let lower = DiskCache::open(folder.path(), 16 * MIB).unwrap();
    assert!(disk_usage(folder.path()) <= 16 * MIB && lower.info().unwrap().bytes <= 16 * MIB);
    lower.clear().unwrap();
    let info = lower.info().unwrap();
    assert_eq!((info.bytes, info.objects), (0, 0));
    assert!(disk_usage(folder.path()) < 64 * KIB);
    // Sources that were open meanwhile cache again.
    let source = cache.source(Far::new(&server, 1, MIB).boxed());
    assert!(is_right(&*source, 1, 0, MIB));
    cache.clear().unwrap();
    assert!(is_right(&*source, 1, 0, MIB));
    assert!(is_right(&*source, 1, 0, MIB));
    server.calls();
    assert!(is_right(&*source, 1, 0, MIB));
    assert_eq!(server.calls().len(), 0);
}

#[test]
fn a_folder_is_looked_at_and_cleared_without_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    assert!(DiskCache::existing(folder.path()).unwrap().is_none());
    assert!(DiskCache::existing(&folder.path().join("none")).unwrap().is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    let cache = DiskCache::open(folder.path(), 20 * MIB).unwrap();
    let server = server();
    let source = cache.source(Far::new(&server, 1, 5 * MIB).boxed());
    assert!(is_right(&*source, 1, 0, 5 * MIB));
    let seen = DiskCache::existing(folder.path()).unwrap().unwrap();
    let (own, theirs) = (cache.info().unwrap(), seen.info().unwrap());
    assert_eq!((theirs.bytes, theirs.objects, theirs.limit), (own.bytes, 1, 20 * MIB));
    seen.clear().unwrap();
    assert_eq!(seen.info().unwrap().objects, 0);
    assert!(is_right(&*source, 1, 0, 5 * MIB));
    DiskCache::open(folder.path(), 16 * MIB).unwrap();
    assert_eq!(DiskCache::existing(folder.path()).unwrap().unwrap().limit(), 16 * MIB);
    // Of an older version of actshard, which wrote no limit.
    std::fs::remove_file(folder.path().join("limit")).unwrap();
    assert_eq!(DiskCache::existing(folder.path()).unwrap().unwrap().limit(), 0);
}

#[test]
fn a_scan_does_not_evict_what_random_reads_use() {
    let (_folder, cache) = cache(32 * MIB);
    let server = server();
    let kept = cache.source(Far::new(&server, 1, 64 * MIB).boxed());
    let rows: Vec<u64> = (0..40).map(|n| n * 163 * KIB * 9 % (63 * MIB)).collect();
    let read = || rows.iter().for_each(|at| assert!(is_right(&*kept, 1, *at, 4000)));
    read();
    let scanned = cache.source(Far::new(&server, 2, 200 * MIB).boxed());
    for n in 0..50 {
        assert!(is_right(&*scanned, 2, n * 4 * MIB, 4 * MIB));
        if n % 4 == 0 {
            // At another second for the clock of the blocks.
            std::thread::sleep(Duration::from_millis(90));
            read();
        }
    }
    server.calls();
    read();
    let again = server.calls().len();
    assert!(again <= rows.len() / 4, "{again} of {} rows were evicted", rows.len());
}

#[test]
fn a_limit_below_four_blocks_is_an_argument_error() {
    let folder = tempfile::tempdir().unwrap();
    let error = DiskCache::open(folder.path(), 16 * MIB - 1).unwrap_err();
    assert_eq!(error.kind, Kind::Argument);
    assert!(error.detail.contains("16777216"), "{error}");
}

#[test]
fn a_folder_that_cannot_be_used_gives_one_warning_and_no_error() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "x").unwrap();
    let server = server();
    for bad in [folder.path().join("file/below"), "/proc/actshard".into(), "/sys/kernel/actshard".into()] {
        let cache = DiskCache::open(&bad, 64 * MIB).unwrap();
        let source = cache.source(Far::new(&server, 1, MIB).boxed());
        assert!(is_right(&*source, 1, 5, 500));
        let warning = cache.take_warning().unwrap();
        assert!(warning.contains(bad.to_str().unwrap()) && warning.contains("without the disk cache"), "{warning}");
        assert_eq!(cache.take_warning(), None);
        assert_eq!((cache.info().unwrap().bytes, cache.clear().is_ok()), (0, true));
    }
}

#[test]
fn a_folder_that_breaks_later_gives_one_warning_and_no_error() {
    let (folder, cache) = cache(64 * MIB);
    let server = server();
    let source = cache.source(Far::new(&server, 1, 9 * MIB).boxed());
    assert!(is_right(&*source, 1, 0, MIB));
    std::fs::remove_dir_all(folder.path()).unwrap();
    std::fs::write(folder.path(), "a file").unwrap();
    (0..3).for_each(|n| assert!(is_right(&*source, 1, n * MIB, 3 * MIB)));
    assert!(cache.take_warning().is_some());
    assert_eq!(cache.take_warning(), None);
    std::fs::remove_file(folder.path()).unwrap();
    std::fs::create_dir(folder.path()).unwrap();
}

#[test]
fn a_full_disk_gives_one_warning_and_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let run = |unshare: &str, command: &str| {
        let mut made = std::process::Command::new("unshare");
        made.args([unshare, "sh", "-c", command]).arg(std::env::current_exe().unwrap()).arg(folder.path());
        made.env(FULL_DISK, folder.path()).output()
    };
    let mount = "mount -t tmpfs -o size=6m tmpfs \"$1\"";
    let can = |unshare: &&str| run(unshare, mount).is_ok_and(|done| done.status.success());
    let Some(unshare) = ["-m", "-rm"].into_iter().find(can) else {
        eprintln!("skipped: file systems cannot be mounted here");
        return;
    };
    // In a namespace of its own, so that the mount ends with the process.
    let test = format!("{mount} && exec \"$0\" --exact disk_cache::child_on_a_full_disk --nocapture");
    let done = run(unshare, &test).unwrap();
    let said = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && said.contains("1 passed"), "{said}{}", String::from_utf8_lossy(&done.stderr));
}

const FULL_DISK: &str = "ACTSHARD_FULL_DISK";

#[test]
fn child_on_a_full_disk() {
    let Some(folder) = std::env::var_os(FULL_DISK) else { return };
    let cache = DiskCache::open(folder.as_ref(), 64 * MIB).unwrap();
    let server = server();
    for number in 0..3 {
        let source = cache.source(Far::new(&server, number, 9 * MIB).boxed());
        (0..2).for_each(|_| assert!(is_right(&*source, number, 0, 9 * MIB)));
        (0..9).for_each(|n| assert!(is_right(&*source, number, n * MIB, 9)));
    }
    let warning = cache.take_warning().unwrap();
    assert!(warning.contains("No space left"), "{warning}");
    assert_eq!(cache.take_warning(), None);
    // What was stored before is still used, and a process that starts now does not fail either.
    server.calls();
    let again = DiskCache::open(folder.as_ref(), 64 * MIB).unwrap();
    assert!(is_right(&*again.source(Far::new(&server, 0, 9 * MIB).boxed()), 0, 0, 9 * MIB));
}

#[test]
fn another_layout_version_is_another_folder() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("VERSION"), "actshard disk cache 7\n").unwrap();
    let cache = DiskCache::open(folder.path(), 64 * MIB).unwrap();
    let server = server();
    assert!(is_right(&*cache.source(Far::new(&server, 1, MIB).boxed()), 1, 0, MIB));
    assert_eq!(cache.folder(), folder.path().join("version-1"));
    assert_eq!(std::fs::read_to_string(folder.path().join("VERSION")).unwrap(), "actshard disk cache 7\n");
    assert_eq!(std::fs::read_to_string(folder.path().join("version-1/VERSION")).unwrap(), VERSION);
    assert!(!folder.path().join("objects").exists());
}

#[test]
fn a_damaged_layout_version_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    for damaged in ["", "\0\0\0", "actshard", "actshard disk cache", "actshard disk cache 1", "actshard disk cache 1\0"]
    {
        std::fs::write(folder.path().join("VERSION"), damaged).unwrap();
        let cache = DiskCache::open(folder.path(), 64 * MIB).unwrap();
        assert_eq!(cache.folder(), folder.path());
        assert_eq!(std::fs::read_to_string(folder.path().join("VERSION")).unwrap(), VERSION);
    }
}

/// A process that is killed while it tries the file system leaves its file: it is no object, and the next start removes it.
#[test]
fn what_a_killed_start_leaves_is_no_object() {
    let folder = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(folder.path(), 64 * MIB).unwrap();
    let probe = folder.path().join("objects/probe");
    std::fs::write(&probe, [1; 8192]).unwrap();
    assert_eq!(cache.info().unwrap().objects, 0);
    cache.clear().unwrap();
    DiskCache::open(folder.path(), 64 * MIB).unwrap();
    assert!(!probe.exists());
}

/// Bytes behind a valid budget would be on the disk, counted by nobody, until someone removes the folder.
#[test]
fn a_budget_that_became_longer_is_cut_to_its_length() {
    let (folder, cache) = cache(64 * MIB);
    let server = server();
    assert!(is_right(&*cache.source(Far::new(&server, 1, MIB).boxed()), 1, 0, MIB));
    let before = cache.info().unwrap().bytes;
    let lock = folder.path().join("lock");
    let length = std::fs::metadata(&lock).unwrap().len();
    let file = std::fs::OpenOptions::new().write(true).open(&lock).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&file, &[7; 70_000], length).unwrap();
    assert_eq!(cache.info().unwrap().bytes, before);
    assert_eq!(std::fs::metadata(&lock).unwrap().len(), length);
}

#[test]
fn files_of_others_stay_as_they_are() {
    let files = [
        ("VERSION", "1.2.3"),
        ("VERSION", "1\n"),
        ("lock", "mine"),
        ("probe", "x"),
        ("notes.txt", ""),
        ("objects", ""),
    ];
    for (name, text) in files {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(name), text).unwrap();
        for _ in 0..2 {
            let cache = DiskCache::open(folder.path(), 64 * MIB).unwrap();
            assert_eq!(cache.take_warning(), None);
            assert_eq!(cache.folder(), folder.path().join("actshard-cache"));
            let server = server();
            assert!(is_right(&*cache.source(Far::new(&server, 1, MIB).boxed()), 1, 0, MIB));
            cache.clear().unwrap();
        }
        assert_eq!(std::fs::read_to_string(folder.path().join(name)).unwrap(), text);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "{name}");
    }
}

#[test]
fn reads_outside_the_object_and_empty_ones_are_left_to_the_source() {
    let (_folder, cache) = cache(64 * MIB);
    let server = server();
    let source = cache.source(Far::new(&server, 1, 1000).boxed());
    assert!(is_right(&*source, 1, 1000, 0) && is_right(&*source, 1, 0, 0) && is_right(&*source, 1, 0, 1000));
    server.calls();
    source.read(990, &mut [0; 20], &Stop::new()).unwrap();
    assert_eq!(server.calls(), [[(990, 20)]]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Any reads of any objects under any limit, with damage between them, give the objects' bytes.
    #[test]
    fn reads_give_the_bytes_of_their_objects(
        sizes in prop::collection::vec(prop_oneof![1u64..9000, 60_000u64..70_000, 4_190_000u64..4_200_000, 1u64..12_000_000], 1..5),
        limit in 16u64..24,
        seed in any::<u64>(),
        harm in prop_oneof![Just(0u64), Just(3)],
    ) {
        let (folder, cache) = cache(limit * MIB);
        let server = server();
        let sources: Vec<Box<dyn Source>> =
            (0u64..).zip(&sizes).map(|(n, size)| cache.source(Far::new(&server, n, *size).boxed())).collect();
        let mut dice = Dice(seed);
        for _ in 0..40 {
            let number = dice.below(sizes.len() as u64);
            let size = sizes[number as usize];
            let ranges: Vec<(u64, u64)> = (0..=dice.below(4))
                .map(|_| {
                    let at = dice.below(size);
                    let most = [20, 5000, 200_000, size][dice.below(4) as usize];
                    (at, dice.below(most.min(size - at)) + 1)
                })
                .collect();
            let mut buffers: Vec<Vec<u8>> = ranges.iter().map(|(_, len)| vec![1; *len as usize]).collect();
            let mut reads: Vec<_> =
                ranges.iter().zip(&mut buffers).map(|((at, _), into)| RangeRead { at: *at, into }).collect();
            sources[number as usize].read_many(&mut reads, &Stop::new()).unwrap();
            for ((at, len), found) in ranges.iter().zip(&buffers) {
                let mut expected = vec![0; *len as usize];
                oracle(number, *at, &mut expected);
                prop_assert!(expected == *found, "object {} at {} for {}", number, at, len);
            }
            if dice.below(10) < harm {
                damage::damage(folder.path(), &mut dice);
            } else if harm == 0 {
                prop_assert!(disk_usage(folder.path()) <= limit * MIB);
            }
        }
    }
}
