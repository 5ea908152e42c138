//! Children forked while threads of their parent read through the cache.
#![allow(unsafe_code, reason = "only fork makes a child of a process with threads")]

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::libc;

use super::far::{Dice, Far, Server, is_right};
use super::{MIB, cache};

const CHILDREN: usize = 12;
/// A child that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_forked_child_reads_with_the_sources_of_its_parent() {
    let (_folder, cache) = cache(24 * MIB);
    let server = std::sync::Arc::new(Server { delay: Duration::from_millis(1), ..Server::default() });
    let sizes = [MIB, 9 * MIB, 30 * MIB];
    let sources: Vec<_> = (0..).zip(sizes).map(|(n, size)| cache.source(Far::new(&server, n, size).boxed())).collect();
    let read = |seed: u64, reads: usize, stop: &AtomicBool| {
        let mut dice = Dice(seed);
        (0..reads).take_while(|_| !stop.load(Ordering::Relaxed)).all(|_| {
            let n = dice.below(3);
            let at = dice.below(sizes[n as usize] - 70_000);
            is_right(&*sources[n as usize], n, at, dice.below(70_000))
        })
    };
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let parents: Vec<_> = (0..3)
            .map(|seed| (seed, &read, &stop))
            .map(|(s, read, stop)| scope.spawn(move || read(s, usize::MAX, stop)))
            .collect();
        for seed in 0..CHILDREN {
            std::thread::sleep(Duration::from_millis(7));
            // SAFETY: the child reads, which allocates (glibc's allocator survives a fork) and waits for no lock of the parent,
            // and ends by `_exit`.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let right = read(100 + seed as u64, 30, &AtomicBool::new(false));
                // SAFETY: ends the child without running the parent's destructors.
                unsafe { libc::_exit(i32::from(!right)) };
            }
            let (mut status, began) = (-1, Instant::now());
            // SAFETY: `child` is a child of this process, and `status` outlives the call.
            while unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } == 0 {
                if began.elapsed() > PATIENCE {
                    // SAFETY: `child` has not been waited for, so its number is not used again.
                    unsafe { libc::kill(child, libc::SIGKILL) };
                    break;
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(status, 0, "child {seed}");
        }
        stop.store(true, Ordering::Relaxed);
        assert!(parents.into_iter().all(|parent| parent.join().unwrap()));
    });
}
