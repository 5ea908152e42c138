//! Any bytes as the files of a field of a token cache: opening, reading and checking it fails with a one-line error, or gives rows of
//! the lengths in its offsets, equal for both io modes, with and without a cache of decoded blocks. Memory and steps stay bounded.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use actshard_core::source::Io;
use actshard_core::source::local::Local;
use actshard_core::tokens::array::BlockCache;
use actshard_core::tokens::jagged::{Cursor, Field, FieldShard};
use actshard_core::tokens::ledger::LedgerState;
use actshard_core::{Error, Kind};

use crate::folder::scratch;
use crate::memory::counted;

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

fn one_line(error: &Error) {
    assert!(error.kind != Kind::Internal, "{error}");
    assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
}

type Rows = Vec<Option<Vec<u8>>>;

fn read(folder: &Path, io: Io, budget: u64, counts: Option<(u64, u64)>) -> Option<(u64, Rows)> {
    let parts = vec![FieldShard { folder: folder.into(), counts }];
    let opened = counted(|| Field::open(parts, Arc::new(Local { io }), Arc::new(BlockCache::new(budget)), LedgerState::default()));
    let field = opened.map_err(|e| one_line(&e)).ok()?;
    let mut cursor = Cursor::default();
    let item = field.dtype().size().expect("a number");
    let mut rows = vec![];
    for row in 0..field.num_rows().min(16) {
        let range = counted(|| field.row(&mut cursor, row)).map_err(|e| one_line(&e)).ok();
        let read = range.and_then(|range| {
            let n = range.len().min(MOST_READ);
            let mut out = vec![0; n * item];
            counted(|| field.copy(&mut cursor, range.start, &mut out)).map_err(|e| one_line(&e)).ok()?;
            let mut narrow = vec![0i32; n];
            if counted(|| field.int32(&mut cursor, range.start, &mut narrow)).is_ok() {
                for (value, number) in narrow.iter().zip(out.chunks_exact(item)) {
                    let mut wide = [0; 4];
                    wide[..item.min(4)].copy_from_slice(&number[..item.min(4)]);
                    assert!(i64::from(*value) == i64::from(i32::from_le_bytes(wide)) || item < 4);
                }
            }
            Some(out)
        });
        let _ = field.shapes_folder().map(|_| counted(|| field.shape(row)).map_err(|e| one_line(&e)));
        rows.push(read);
    }
    let mut steps = 0;
    let mut watch = || {
        steps += 1;
        steps > MOST_STEPS
    };
    let checked = counted(|| field.check(false, &mut |e, _| one_line(&e), &mut watch));
    assert!(checked.is_ok() || checked.is_err_and(|e| e.kind == Kind::Interrupted));
    Some((field.num_rows(), rows))
}

pub fn token_array(data: &[u8]) {
    let Some((&flags, mut rest)) = data.split_first() else { return };
    let folder = scratch();
    for name in FILES {
        fs::create_dir_all(folder.path().join(name).parent().expect("a folder above")).expect("a folder to write to");
    }
    // Files in sequence: an index, a length of three bytes, the content.
    while let Some((&[which, a, b, c], tail)) = rest.split_first_chunk::<4>() {
        let n = (u32::from_le_bytes([a, b, c, 0]) as usize).min(tail.len());
        fs::write(folder.path().join(FILES[usize::from(which) % FILES.len()]), &tail[..n]).expect("a file");
        rest = &tail[n..];
    }
    let counts = (flags & 1 != 0).then_some((u64::from(flags >> 4), 16));
    let mapped = read(folder.path(), Io::Mmap, 1 << 20, counts);
    let positioned = read(folder.path(), Io::Pread, 0, counts);
    // LZ4 guarantees nothing for data from no encoder, decoded in part or in full; all other data has one valid result.
    if !data.windows(5).any(|w| w == b"blosc") {
        assert_eq!(mapped, positioned);
    }
}
