//! Any bytes as the files of a field of a token cache: opening, reading and checking it fails with a one-line error, or gives rows of
//! the lengths in its offsets, equal for both io modes, with and without a cache of decoded blocks. Memory and steps stay bounded.
#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use actshard_core::source::Io;
use actshard_core::source::local::Local;
use actshard_core::tokens::array::BlockCache;
use actshard_core::tokens::jagged::{Cursor, Field, FieldShard};
use actshard_core::{Error, Kind};
use libfuzzer_sys::fuzz_target;

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator; this type only counts bytes.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: as the caller guarantees.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(live, Ordering::Relaxed);
        // SAFETY: as the caller guarantees.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as the caller guarantees.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// An inner chunk has at most 2^24 elements of 8 bytes. Decoding one needs a few times that, and nothing may need more.
const MOST_MEMORY: usize = 512 << 20;
/// Elements of a row to read.
const MOST_READ: usize = 4096;
/// Calls of the watch before checking is stopped.
const MOST_STEPS: usize = 1000;
const FILES: [&str; 9] = [
    "offsets/zarr.json",
    "offsets/c/0",
    "offsets/c/1",
    "data/zarr.json",
    "data/c/0",
    "data/c/1",
    "shapes/zarr.json",
    "shapes/c/0/0",
    "data/c.0",
];

fn folder() -> &'static PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let memory = PathBuf::from("/dev/shm");
        let root = if memory.is_dir() { memory } else { std::env::temp_dir() };
        let root = root.join(format!("actshard-fuzz-{}", std::process::id()));
        for name in FILES {
            let parent = root.join(name);
            fs::create_dir_all(parent.parent().expect("a folder above")).expect("a folder to write to");
        }
        root
    })
}

fn one_line(error: &Error) {
    assert!(error.kind != Kind::Internal, "{error}");
    assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
}

type Rows = Vec<Option<Vec<u8>>>;

fn read(io: Io, budget: u64, counts: Option<(u64, u64)>) -> Option<(u64, Rows)> {
    let parts = vec![FieldShard { folder: folder().into(), counts }];
    let field = Field::open(parts, Arc::new(Local { io }), Arc::new(BlockCache::new(budget))).map_err(|e| one_line(&e)).ok()?;
    let mut cursor = Cursor::default();
    let item = field.dtype().size().expect("a number");
    let mut rows = vec![];
    for row in 0..field.num_rows().min(16) {
        let range = field.row(&mut cursor, row).map_err(|e| one_line(&e)).ok();
        let read = range.and_then(|range| {
            let n = range.len().min(MOST_READ);
            let mut out = vec![0; n * item];
            field.copy(&mut cursor, range.start, &mut out).map_err(|e| one_line(&e)).ok()?;
            let mut narrow = vec![0i32; n];
            if field.int32(&mut cursor, range.start, &mut narrow).is_ok() {
                for (made, number) in narrow.iter().zip(out.chunks_exact(item)) {
                    let mut wide = [0; 4];
                    wide[..item.min(4)].copy_from_slice(&number[..item.min(4)]);
                    assert!(i64::from(*made) == i64::from(i32::from_le_bytes(wide)) || item < 4);
                }
            }
            Some(out)
        });
        let _ = field.shapes_folder().map(|_| field.shape(row).map_err(|e| one_line(&e)));
        rows.push(read);
    }
    let mut steps = 0;
    let mut watch = || {
        steps += 1;
        steps > MOST_STEPS
    };
    let checked = field.check(false, &mut |e, _| one_line(&e), &mut watch);
    assert!(checked.is_ok() || checked.is_err_and(|e| e.kind == Kind::Interrupted));
    Some((field.num_rows(), rows))
}

fuzz_target!(|data: &[u8]| {
    let Some((&flags, mut rest)) = data.split_first() else { return };
    for name in FILES {
        let _ = fs::remove_file(folder().join(name));
    }
    // Files in sequence: an index, a length of three bytes, the content.
    while let Some((&[which, a, b, c], tail)) = rest.split_first_chunk::<4>() {
        let n = (u32::from_le_bytes([a, b, c, 0]) as usize).min(tail.len());
        fs::write(folder().join(FILES[usize::from(which) % FILES.len()]), &tail[..n]).expect("a file");
        rest = &tail[n..];
    }
    let counts = (flags & 1 != 0).then_some((u64::from(flags >> 4), 16));
    let before = LIVE.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let mapped = read(Io::Mmap, 1 << 20, counts);
    let positioned = read(Io::Pread, 0, counts);
    let peak = PEAK.load(Ordering::Relaxed).saturating_sub(before);
    assert!(peak <= MOST_MEMORY, "{peak} bytes of memory for {} bytes of files", data.len());
    // LZ4 guarantees nothing for data from no encoder, decoded in part or in full; all other data has one valid result.
    if !data.windows(5).any(|w| w == b"blosc") {
        assert_eq!(mapped, positioned);
    }
});
