//! The memory of reads through the cache, in a process of its own.

use std::process::Command;
use std::sync::Arc;

use actshard_core::disk_cache::DiskCache;
use actshard_core::source::RangeRead;
use actshard_core::threads::Stop;

use super::MIB;
use super::far::{Far, Server, oracle};

const CHILD: &str = "ACTSHARD_DISK_PEAK";
const READ: u64 = 64 * MIB;
const THREADS: u64 = 3;

/// The most memory that this process ever had.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
}

/// Threads that read what is not cached; only in a child.
#[test]
fn child_that_measures() {
    if std::env::var(CHILD).is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = DiskCache::open(folder.path(), 512 * MIB).unwrap();
    let (server, before) = (Arc::<Server>::default(), peak());
    let read = |number: u64, ranges: &[(u64, u64)]| {
        let source = cache.source(Far::new(&server, number, 2 * READ).boxed());
        let mut into: Vec<Vec<u8>> = ranges.iter().map(|(_, len)| vec![0; *len as usize]).collect();
        let reads = ranges.iter().zip(&mut into).map(|((at, _), into)| RangeRead { at: *at, into });
        source.read_many(&mut reads.collect::<Vec<_>>(), &Stop::new()).unwrap();
        for ((at, len), into) in ranges.iter().zip(&into) {
            let mut last = [0; 9];
            oracle(number, at + len - 9, &mut last);
            assert!(into.ends_with(&last));
        }
    };
    // Whole pages, except the first and the last.
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|n| drop(scope.spawn(move || read(n, &[(1000, READ)]))));
    });
    let long = peak() - before;
    // At most 32 MiB of each thread are being downloaded.
    assert!((READ..THREADS * (READ + 32 * MIB) + 24 * MIB).contains(&long), "{} MiB", long / MIB);
    // A few bytes of each page.
    let rows: Vec<(u64, u64)> = (0..2 * READ / (64 << 10)).map(|page| (page * (64 << 10) + 70, 100)).collect();
    let rows = &rows;
    std::thread::scope(|scope| {
        (0..THREADS).for_each(|n| drop(scope.spawn(move || read(10 + n, rows))));
    });
    assert!(peak() - before < THREADS * (READ + 32 * MIB) + 24 * MIB, "{} MiB", (peak() - before) / MIB);
}

#[test]
fn memory_beside_the_result_is_bounded() {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "disk_cache::peak::child_that_measures", "--nocapture"]).env(CHILD, "1");
    let done = command.output().unwrap();
    let output = String::from_utf8_lossy(&done.stdout);
    assert!(done.status.success() && output.contains("1 passed"), "{output}{}", String::from_utf8_lossy(&done.stderr));
}
