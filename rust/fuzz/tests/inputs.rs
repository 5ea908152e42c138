//! Every target over its seeds, over the inputs that failed once, and over the same mutations of both in every run.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_types, reason = "this program does not fork")]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use actshard_fuzz::memory::counted;
use actshard_fuzz::mutations::visit_mutations;
use actshard_fuzz::{Bound, TARGETS, Target};

/// Mutations of all inputs of a target together, and the fewest of one input.
const MUTATIONS: usize = 400;
const FEWEST: usize = 12;

static ALONE: Mutex<()> = Mutex::new(());

/// Until the value is dropped, no other test of this process allocates: the counters belong to the process.
fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// The files of a target: seeds first. Git keeps no empty folders, so that one may be missing.
fn inputs(target: &Target) -> Vec<PathBuf> {
    let files = |kind: &str| {
        let mut files: Vec<PathBuf> = fs::read_dir(folder(kind).join(target.name))
            .map(|entries| entries.map(|entry| entry.unwrap().path()).collect())
            .unwrap_or_default();
        files.sort();
        files
    };
    [files("seeds"), files("failed")].concat()
}

/// Runs a target, and names the input of a failure, which stays in a file.
fn check(target: &Target, name: &str, bytes: &[u8]) {
    let Err(panic) = catch_unwind(AssertUnwindSafe(|| target.check(bytes))) else { return };
    let copy = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{}.failed", target.name));
    fs::write(&copy, bytes).unwrap();
    eprintln!("{}: {name}; the input is in {}", target.name, copy.display());
    resume_unwind(panic);
}

fn check_all(target: &str) {
    let _alone = alone();
    let target = Target::named(target).unwrap();
    let inputs = inputs(target);
    assert!(!inputs.is_empty(), "no seeds");
    let count = (MUTATIONS / inputs.len()).max(FEWEST);
    for path in inputs {
        let bytes = fs::read(&path).unwrap();
        let name = path.strip_prefix(folder("")).unwrap().display().to_string();
        check(target, &name, &bytes);
        visit_mutations(&bytes, count, |change, bytes| check(target, &format!("{name}, {change}"), bytes));
    }
}

macro_rules! tests {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                check_all(stringify!($name));
            }
        )*
        const TESTED: &[&str] = &[$(stringify!($name)),*];
    };
}

tests! {
    address_table arrow_stream containers deflate index_records parquet_footer pickle planes safetensors_header
    token_array token_array_meta token_frame token_index token_lz4 token_offsets zarr_chunk zarr_metadata
}

#[test]
fn every_target_is_tested_and_every_folder_is_of_a_target() {
    let _alone = alone();
    let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
    assert_eq!(names, TESTED);
    for kind in ["seeds", "failed"] {
        for entry in fs::read_dir(folder(kind)).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            assert!(!entry.file_type().unwrap().is_dir() || names.contains(&name.as_str()), "{kind}/{name}");
        }
    }
}

#[test]
fn a_bound_above_the_ordinary_one_has_a_reason() {
    let _alone = alone();
    for Target { name, bound, .. } in TARGETS {
        let above = bound.per_byte > Bound::ORDINARY.per_byte || bound.base > Bound::ORDINARY.base;
        assert_eq!(above, !bound.reason.is_empty(), "{name}");
    }
}

/// What a parser does that believes a number in its input.
fn believe(bytes: &[u8]) {
    let size = bytes.first_chunk().map_or(0, |size| u64::from_le_bytes(*size)) as usize;
    let values = counted(|| vec![0_u8; size]);
    assert_eq!(values.len(), size);
}

const BELIEVING: Target = Target { name: "believing", run: believe, bound: Bound::ORDINARY };

#[test]
#[should_panic(expected = "bytes allocated for 8 bytes of input")]
fn memory_that_a_number_in_a_file_chooses_is_refused() {
    let _alone = alone();
    BELIEVING.check(&1_000_000_u64.to_le_bytes());
}

#[test]
fn memory_is_counted_on_every_thread_and_only_in_parsers() {
    let _alone = alone();
    // The threads of the test harness allocate and free a little at any time.
    let near = |usage: usize, expected: usize| usage.abs_diff(expected) < 10_000;
    let usage = BELIEVING.usage(&50_000_u64.to_le_bytes());
    assert!(near(usage.total, 50_000) && near(usage.peak, 50_000), "{usage:?}");
    let threads = |_: &[u8]| {
        let size = 1 << 20;
        drop(vec![1_u8; 16 * size]);
        let on_a_thread = || std::thread::spawn(move || vec![1_u8; size].len()).join().unwrap();
        let _ = counted(on_a_thread) + counted(on_a_thread);
    };
    let usage = Target { run: threads, ..BELIEVING }.usage(&[]);
    assert!(near(usage.total, 2 << 20) && near(usage.peak, 1 << 20), "{usage:?}");
}

/// For whoever sets a bound: `cargo test --workspace --test inputs -- --ignored --nocapture`.
#[test]
#[ignore = "a measurement"]
fn most_that_each_target_allocates() {
    let _alone = alone();
    for target in TARGETS {
        let (mut most, mut slope) = ([0; 3], 0);
        for path in inputs(target) {
            let bytes = fs::read(&path).unwrap();
            let mut measure = |_: &str, bytes: &[u8]| {
                let Ok(usage) = catch_unwind(AssertUnwindSafe(|| target.usage(bytes))) else { return };
                most = most.max([usage.total, usage.peak, bytes.len()]);
                slope = slope.max(usage.total.saturating_sub(target.bound.base) / bytes.len().max(1));
            };
            measure("", &bytes);
            visit_mutations(&bytes, 100, measure);
        }
        let [total, peak, length] = most;
        eprintln!(
            "{}: {total} bytes in all and {peak} at once for an input of {length}; {slope} a byte above the base",
            target.name
        );
    }
}
