use std::sync::atomic::{AtomicBool, Ordering};

use super::server::{Fake, noise, open, read};

/// Runs before `main`: with a handler of its own for these signals, Rust's runtime installs none. Its handler, which libraries
/// that Python loads never have, keeps a lock that every thread takes when it starts and ends: a child that was forked at
/// such a moment could start no thread.
#[allow(unsafe_code, reason = "the runtime looks at the signals before any safe code runs")]
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section holds functions without arguments, which the C library calls one after another before `main`.
#[unsafe(link_section = ".init_array")]
static WITHOUT_STACK_HANDLER: extern "C" fn() = {
    extern "C" fn crash(_signal: libc::c_int) {
        // SAFETY: abort may be called in a signal handler.
        unsafe { libc::abort() }
    }
    extern "C" fn install() {
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            // SAFETY: `crash` is a handler of one number.
            unsafe { libc::signal(signal, crash as *const () as libc::sighandler_t) };
        }
    }
    install
};

/// Forks, runs `work` in the child, and returns whether it returned true there within 20 s.
#[allow(unsafe_code, reason = "the standard library cannot fork")]
fn in_child(work: impl Fn() -> bool) -> bool {
    // SAFETY: the child calls only code that must survive a fork of a process with threads, which is what is tested, and
    // leaves with _exit, also after a panic. The parent waits for the child that it made.
    unsafe {
        let pid = libc::fork();
        assert!(pid >= 0);
        if pid == 0 {
            libc::alarm(20);
            let right = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
            libc::_exit(i32::from(!right.unwrap_or(false)));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
        libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0
    }
}

#[test]
fn children_of_a_busy_parent_can_read_with_its_store() {
    let bytes = noise(300_000, 1);
    let fake = Fake::new([("run/a", bytes.clone())]);
    let store = fake.s3("run", &[]);
    store.scan(&store.root(), false, &actshard_core::threads::Stop::new()).unwrap();
    let source = open(&store, &store.location("run/a")).unwrap();
    assert_eq!(read(&*source, 0, 300_000).unwrap(), bytes);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert_eq!(read(&*source, 100, 200_000).unwrap(), bytes[100..200_100]);
                }
            });
        }
        for round in 0..20 {
            let open_again = round % 2 == 0;
            let read_there = || {
                let again = open_again.then(|| open(&store, &store.location("run/a")).unwrap());
                read(again.as_deref().unwrap_or(&*source), 5, 1000).is_ok_and(|found| found == bytes[5..1005])
            };
            let fine = in_child(read_there);
            if !fine {
                done.store(true, Ordering::Relaxed);
            }
            assert!(fine, "round {round}");
        }
        done.store(true, Ordering::Relaxed);
    });
}
