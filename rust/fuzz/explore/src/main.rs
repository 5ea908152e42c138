//! libFuzzer over one target, which FUZZ_TARGET names: one program for all targets, because each takes long to link.
#![no_main]
#![allow(clippy::disallowed_types, reason = "this program does not fork")]

use std::panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind};
use std::process::abort;
use std::sync::{Mutex, OnceLock, PoisonError};

use actshard_fuzz::{TARGETS, Target};
use libfuzzer_sys::fuzz_target;

static TARGET: OnceLock<&Target> = OnceLock::new();

/// What the last panic said. Panics that a parser catches and turns into errors are no failures, and not worth a line.
static LAST: Mutex<String> = Mutex::new(String::new());

fn remember(panic: &PanicHookInfo<'_>) {
    *LAST.lock().unwrap_or_else(PoisonError::into_inner) = panic.to_string();
}

fn prepare() {
    // libFuzzer's own hook ends the process at a panic, also at one that is caught.
    std::panic::set_hook(Box::new(remember));
    let name = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let Some(target) = Target::named(&name) else {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("FUZZ_TARGET={name:?}: expected one of {}", names.join(" "));
        std::process::exit(2);
    };
    let _ = TARGET.set(target);
}

fuzz_target!(init: prepare(), |bytes: &[u8]| {
    let target = TARGET.get().expect("chosen at the start");
    if catch_unwind(AssertUnwindSafe(|| target.check(bytes))).is_err() {
        eprintln!("{}: {}", target.name, LAST.lock().unwrap_or_else(PoisonError::into_inner));
        // libFuzzer sees the signal and keeps the input.
        abort();
    }
});
