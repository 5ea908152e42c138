//! Any numbers as the offsets of a field: rows are rejected, or are where a simple reading of the numbers puts them.

use std::fs;
use std::sync::Arc;

use actshard_core::source::Io;
use actshard_core::source::local::Local;
use actshard_core::tokens::array::BlockCache;
use actshard_core::tokens::jagged::{Cursor, Field, FieldShard};
use actshard_core::tokens::ledger::LedgerState;

use crate::folder::scratch;
use crate::memory::counted;

const MOST: u64 = 1 << 60;

fn meta(dtype: &str, n: usize) -> String {
    format!(
        r#"{{"zarr_format":3,"node_type":"array","shape":[18014398509481984],"data_type":"{dtype}","fill_value":0,
        "chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":[{n}]}}}},"chunk_key_encoding":{{"name":"default"}},
        "codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}}]}}"#
    )
}

/// A simple reading of the numbers: rows and elements.
fn plainly(offsets: &[u64]) -> Option<(usize, u64)> {
    let rows = usize::try_from(offsets[0]).ok().filter(|rows| *rows < offsets.len())?;
    let elements = if rows == 0 { 0 } else { offsets[rows] };
    (elements < MOST).then_some((rows, elements))
}

pub fn token_offsets(data: &[u8]) {
    let Some((&[from, n], data)) = data.split_first_chunk::<2>() else { return };
    let offsets: Vec<u64> = data.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect();
    if offsets.is_empty() {
        return;
    }
    let folder = scratch();
    let root = folder.path();
    fs::create_dir_all(root.join("offsets/c")).expect("a folder to write to");
    fs::create_dir_all(root.join("data")).expect("a folder to write to");
    fs::write(root.join("data/zarr.json"), meta("uint8", 16)).expect("a file");
    fs::write(root.join("offsets/zarr.json"), meta("int64", offsets.len())).expect("a file");
    fs::write(root.join("offsets/c/0"), &data[..offsets.len() * 8]).expect("a file");
    let parts = vec![FieldShard { folder: root.into(), counts: None }];
    let opened = counted(|| Field::open(parts, Arc::new(Local { io: Io::Mmap }), Arc::new(BlockCache::new(0)), LedgerState::default()));
    let want = plainly(&offsets);
    let Ok(field) = opened else {
        assert!(want.is_none(), "{opened:?}");
        return;
    };
    let (rows, elements) = want.expect("numbers that make sense");
    assert_eq!((field.num_rows(), field.num_elements()), (rows as u64, elements));
    for (first, n) in [(0, rows), (usize::from(from) % (rows + 1), usize::from(n))] {
        let read = counted(|| field.bounds(&mut Cursor::default(), first as u64, n));
        if first + n > rows {
            assert!(read.is_err());
            continue;
        }
        if n == 0 {
            continue;
        }
        let start = if first == 0 { 0 } else { offsets[first] };
        let bounds: Vec<u64> = [&[start], &offsets[first + 1..=first + n]].concat();
        let ascending = bounds.is_sorted() && bounds[n] <= elements;
        assert_eq!(read.ok(), ascending.then_some(bounds));
    }
}
