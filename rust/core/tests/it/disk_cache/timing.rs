//! Times of warm reads, compared with `pread` of a plain file. Not a test: `cargo test --release --test it timing -- --ignored
//! --nocapture`.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use super::far::{Dice, Far};
use super::{MIB, cache, server};

const SIZE: u64 = 128 * MIB;
const ROUNDS: usize = 9;

/// The median time of a read.
fn median(times: &mut [Duration], reads: u32) -> Duration {
    times.sort_unstable();
    times[times.len() / 2] / reads
}

#[test]
#[ignore = "a measurement"]
fn warm_reads_compared_with_pread() {
    let (folder, cache) = cache(512 * MIB);
    let source = cache.source(Far::new(&server(), 1, SIZE).boxed());
    let mut all = vec![0; SIZE as usize];
    let began = Instant::now();
    source.read(0, &mut all, &actshard_core::threads::Stop::new()).unwrap();
    eprintln!("first read, of zero latency: {:?}", began.elapsed());
    std::fs::write(folder.path().join("plain"), &all).unwrap();
    let plain = std::fs::File::open(folder.path().join("plain")).unwrap();
    for (len, reads) in [(4 << 10, 4000), (64 << 10, 1000), (4 << 20, 30)] {
        for (name, step) in [("aligned", 4096), ("unaligned", 1)] {
            let mut dice = Dice(7);
            let places: Vec<u64> = (0..reads).map(|_| dice.below((SIZE - len) / step) * step).collect();
            let mut into = vec![0; len as usize];
            let (mut ours, mut theirs) = (vec![], vec![]);
            for _ in 0..ROUNDS {
                let began = Instant::now();
                places.iter().for_each(|at| source.read(*at, &mut into, &actshard_core::threads::Stop::new()).unwrap());
                ours.push(began.elapsed());
                assert!(into == all[places[places.len() - 1] as usize..][..len as usize]);
                let began = Instant::now();
                places.iter().for_each(|at| plain.read_exact_at(&mut into, *at).unwrap());
                theirs.push(began.elapsed());
            }
            let (ours, theirs) = (median(&mut ours, reads), median(&mut theirs, reads));
            let ratio = ours.as_secs_f64() / theirs.as_secs_f64();
            eprintln!("{} KiB {name}: cache {ours:?}, pread {theirs:?}, {ratio:.2}x", len >> 10);
        }
    }
}
