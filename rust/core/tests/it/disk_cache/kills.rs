//! Processes that share a folder, killed while they fill it, with and without damage behind their back.
//!
//! `ACTSHARD_DISK_SECONDS` sets the seconds of each of the two runs.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use actshard_core::disk_cache::DiskCache;

use super::damage::damage;
use super::far::{Dice, Far, Server, disk_usage, is_right};
use super::{KIB, MIB, server};

const FOLDER: &str = "ACTSHARD_DISK_FOLDER";
const SEED: &str = "ACTSHARD_DISK_SEED";
const SIZES: [u64; 7] = [1, 60 * KIB, 300 * KIB + 7, 4 * MIB, 9 * MIB + 1, 21 * MIB + 4095, 40 * MIB];
const LIMIT: u64 = 24 * MIB;
const PROCESSES: usize = 8;
/// Exit status after a wrong byte.
const WRONG: i32 = 77;

/// Reads until it is killed; only in a child of [`run`].
#[test]
fn child_that_reads() {
    let (Ok(folder), Ok(seed)) = (std::env::var(FOLDER), std::env::var(SEED)) else { return };
    let mut dice = Dice(seed.parse().unwrap());
    let server = std::sync::Arc::new(Server { delay: Duration::from_micros(dice.below(3000)), ..Server::default() });
    let cache = DiskCache::open(Path::new(&folder), LIMIT).unwrap();
    let mut sources = vec![];
    loop {
        if dice.below(50) == 0 || sources.is_empty() {
            let open = |(n, size): (u64, &u64)| cache.source(Far::new(&server, n, *size).boxed());
            sources = (0..).zip(&SIZES).map(open).collect();
        }
        let number = dice.below(SIZES.len() as u64);
        let size = SIZES[number as usize];
        let at = dice.below(size);
        let most = [4 * KIB, 100 * KIB, MIB, 6 * MIB][dice.below(4) as usize];
        let len = dice.below(most.min(size - at)) + 1;
        if !is_right(&*sources[number as usize], number, at, len) {
            eprintln!("WRONG: object {number} at {at} for {len}");
            std::process::exit(WRONG);
        }
        if dice.below(400) == 0 {
            let _ = cache.clear();
        }
        if let Some(warning) = cache.take_warning() {
            eprintln!("WARNING: {warning}");
        }
        server.calls();
    }
}

fn start(folder: &Path, seed: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "disk_cache::kills::child_that_reads", "--nocapture"]).stdout(Stdio::null());
    command.env(FOLDER, folder).env(SEED, seed.to_string()).spawn().unwrap()
}

/// Runs, kills and restarts processes; returns the number of kills and the most bytes above the limit.
fn run(harm: bool) -> (usize, u64, u64) {
    let seconds = std::env::var("ACTSHARD_DISK_SECONDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1.2);
    let seed = std::env::var(SEED).ok().and_then(|n| n.parse().ok()).unwrap_or(15);
    let folder = tempfile::tempdir().unwrap();
    let mut dice = Dice(seed);
    let mut children: Vec<Child> = (0..PROCESSES).map(|_| start(folder.path(), dice.next())).collect();
    let (began, mut kills, mut most, mut damages) = (Instant::now(), 0, 0, 0);
    while began.elapsed() < Duration::from_secs_f64(seconds) {
        most = most.max(disk_usage(folder.path()));
        std::thread::sleep(Duration::from_millis(dice.below(8)));
        for child in &mut children {
            if let Some(status) = child.try_wait().unwrap() {
                panic!("a reader ended by itself: {status}");
            }
        }
        if dice.below(6) == 0 {
            let n = dice.below(PROCESSES as u64) as usize;
            children[n].kill().unwrap();
            children[n].wait().unwrap();
            children[n] = start(folder.path(), dice.next());
            kills += 1;
        }
        if harm {
            damage(folder.path(), &mut dice);
            damages += 1;
        }
    }
    for child in &mut children {
        child.kill().unwrap();
        assert_ne!(child.wait().unwrap().code(), Some(WRONG));
    }
    // What is left is right, counted, and removed.
    let cache = DiskCache::open(folder.path(), LIMIT).unwrap();
    let server = server();
    for (n, size) in (0..).zip(SIZES) {
        assert!(is_right(&*cache.source(Far::new(&server, n, size).boxed()), n, 0, size));
    }
    cache.clear().unwrap();
    cache.clear().unwrap();
    let (info, left) = (cache.info().unwrap(), disk_usage(folder.path()));
    assert!(info.objects == 0 && left < 64 * KIB, "{info:?}, {left} bytes left");
    (kills, damages, most.saturating_sub(LIMIT))
}

#[test]
fn killed_processes_leave_right_bytes_and_the_limit() {
    let (kills, _, over) = run(false);
    eprintln!("{kills} kills; at most {over} bytes above the limit");
    assert!(over <= 4 * MIB);
}

#[test]
fn damage_behind_killed_processes_gives_no_wrong_byte() {
    let (kills, damages, over) = run(true);
    eprintln!("{kills} kills, {damages} damages; at most {over} bytes above the limit");
}
