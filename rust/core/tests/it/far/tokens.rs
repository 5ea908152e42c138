//! Token arrays: batches of windows over shards of a cache.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use actshard_core::location::Location;
use actshard_core::source::local::Local;
use actshard_core::source::{Io, Store, Wishes};
use actshard_core::tokens::array::BlockCache;
use actshard_core::tokens::batch::{Loss, Packing, TokenBatch, packed, windows};
use actshard_core::tokens::jagged::{Field, FieldShard};
use actshard_core::tokens::ledger::LedgerState;
use actshard_core::{Kind, Result};

use super::store::{Handle, Memory, WISHES, at};

const SHARDS: u64 = 40;
/// Numbers of tokens in a shard, an inner chunk and a window.
const TOKENS: usize = 4096;
const INNER: usize = 512;
const LENGTH: usize = 64;

/// A shard of one file with documents of 64 tokens; numbers are stored uncompressed, without frames.
fn write(folder: &Path, shard: u64) {
    let array = |name: &str, dtype: &str, size: usize, numbers: &[i64]| {
        let folder = folder.join(format!("{shard}/{name}"));
        std::fs::create_dir_all(folder.join("c")).unwrap();
        let per_file = numbers.len().next_multiple_of(INNER);
        let metadata = format!(
            r#"{{"zarr_format":3,"node_type":"array","shape":[{per_file}],"data_type":"{dtype}","chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":[{per_file}]}}}},"chunk_key_encoding":{{"name":"default"}},"fill_value":0,"codecs":[{{"name":"sharding_indexed","configuration":{{"chunk_shape":[{INNER}],"codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}}],"index_codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}},{{"name":"crc32c"}}],"index_location":"end"}}}}]}}"#
        );
        std::fs::write(folder.join("zarr.json"), metadata).unwrap();
        let mut bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()[..size].to_vec()).collect();
        bytes.resize(per_file * size, 0);
        let each = (INNER * size) as u64;
        let index: Vec<(u64, u64)> = (0..(per_file / INNER) as u64).map(|i| (i * each, each)).collect();
        bytes.extend(actshard_core::arrays::index::encode(&index));
        std::fs::write(folder.join("c/0"), bytes).unwrap();
    };
    let rows = TOKENS / LENGTH;
    let ends = (0..=rows).map(|r| if r == 0 { rows as i64 } else { (r * LENGTH) as i64 });
    array("offsets", "int64", 8, &ends.collect::<Vec<_>>());
    array("data", "int32", 4, &(0..TOKENS as i64).map(|i| shard as i64 * TOKENS as i64 + i).collect::<Vec<_>>());
}

fn field(store: Arc<dyn Store>, folder: &Location) -> Field {
    let counts = Some(((TOKENS / LENGTH) as u64, TOKENS as u64));
    let parts = (0..SHARDS).map(|s| FieldShard { folder: folder.join(&s.to_string()), counts }).collect();
    Field::open(parts, store, Arc::new(BlockCache::new(1 << 20)), LedgerState::default()).unwrap()
}

fn batch(field: &Field, starts: &[u64], watch: &mut dyn FnMut() -> bool) -> Result<Vec<i32>> {
    let mut tokens = vec![0; starts.len() * LENGTH];
    let memory = TokenBatch { length: LENGTH, tokens: &mut tokens, weights: None, segments: None };
    windows(field, starts, Loss::All, None, memory, watch)?;
    Ok(tokens)
}

/// One window in each shard, most of them across the end of an inner chunk.
fn starts() -> Vec<u64> {
    (0..SHARDS).map(|s| (s * 7 % SHARDS) * TOKENS as u64 + s * 37 + 480).collect()
}

fn expected(starts: &[u64]) -> Vec<i32> {
    starts.iter().flat_map(|start| (0..LENGTH as i32).map(move |i| *start as i32 + i)).collect()
}

fn far(latency: u64, parallel: usize) -> (tempfile::TempDir, Arc<Memory>) {
    let folder = tempfile::tempdir().unwrap();
    (0..SHARDS).for_each(|shard| write(folder.path(), shard));
    let mut memory = Memory::of_folder(folder.path(), Wishes { parallel, ..WISHES });
    memory.latency = Duration::from_millis(latency);
    (folder, Arc::new(memory))
}

#[test]
fn a_batch_of_windows_is_read_together() {
    let (folder, store) = far(0, 64);
    let near = field(Arc::new(Local { io: Io::Pread }), &folder.path().into());
    let cache = field(Arc::new(Handle(Arc::clone(&store))), &at(""));
    let starts = starts();
    assert_eq!(batch(&near, &starts, &mut || false).unwrap(), expected(&starts));
    assert_eq!(batch(&cache, &starts, &mut || false).unwrap(), expected(&starts));
    store.reads();
    store.opens();
    // Metadata and indexes are known, so a batch is one round of reads: the bytes of its windows and the gaps between them.
    store.most.store(0, Ordering::SeqCst);
    store.together.store(SHARDS as usize / 2 + 1, Ordering::SeqCst);
    assert_eq!(batch(&cache, &starts, &mut || false).unwrap(), expected(&starts));
    let reads = store.reads();
    assert_eq!((store.opens(), reads.len()), (0, SHARDS as usize), "{reads:?}");
}

/// The arrays of a cache of many shards stay known, whatever the limit of descriptors: they hold none.
#[test]
fn few_descriptors_are_enough_for_many_shards() {
    let limited = "ulimit -n 64 && exec \"$0\" --exact far::tokens::a_batch_of_windows_is_read_together";
    let tests = std::env::current_exe().unwrap();
    let child = std::process::Command::new("sh").args(["-c", limited]).arg(tests).output().unwrap();
    let output = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success() && output.contains("1 passed"), "{output}");
}

#[test]
fn packs_are_read_together() {
    let (folder, store) = far(0, 16);
    let near = field(Arc::new(Local { io: Io::Pread }), &folder.path().into());
    let cache = field(Arc::new(Handle(Arc::clone(&store))), &at(""));
    let packs: Vec<[u64; 2]> = (0..200).map(|i| [i * 7, i * 7 + 2]).collect();
    let read = |field: &Field| {
        let (mut tokens, mut segments) = (vec![0; packs.len() * 100], vec![0; packs.len() * 100]);
        let memory = TokenBatch { length: 100, tokens: &mut tokens, weights: None, segments: Some(&mut segments) };
        let packing = Packing { tokens: field, loss: Loss::All, right: false, mask_padding: false };
        packed(packing, &packs, memory, &mut || false).unwrap();
        (tokens, segments)
    };
    assert_eq!(read(&cache), read(&near));
    store.reads();
    assert_eq!(read(&cache), read(&near));
    // Offsets, then tokens, of the shards that contain the packs.
    let shards = (200 * 7 + 2usize).div_ceil(TOKENS / LENGTH);
    assert!(store.reads().len() <= 2 * shards);
}

#[test]
fn faults_and_damage_name_the_object() {
    let (_folder, store) = far(0, 16);
    let open = || field(Arc::new(Handle(Arc::clone(&store))), &at(""));
    let cache = open();
    batch(&cache, &starts(), &mut || false).unwrap();
    let whole = store.get("7/data/c/0");
    store.put("7/data/c/0", Some(whole.clone()));
    let error = batch(&cache, &starts(), &mut || false).unwrap_err();
    assert_eq!((error.kind, error.location), (Kind::Format, Some(at("7/data/c/0"))), "a file that was replaced");
    store.put("7/data/c/0", Some(whole[..60].to_vec()));
    let error = batch(&open(), &starts(), &mut || false).unwrap_err();
    assert_eq!((error.kind, error.location), (Kind::Truncated, Some(at("7/data/c/0"))));
    // A missing file has the fill value.
    store.put("7/data/c/0", None);
    let first = 7 * TOKENS as u64;
    assert_eq!(batch(&open(), &[first], &mut || false).unwrap(), vec![0; LENGTH]);
}

#[test]
fn a_stop_ends_a_wait() {
    let (_folder, store) = far(10, 1);
    let cache = field(Arc::new(Handle(Arc::clone(&store))), &at(""));
    let mut looks = 0;
    let error = batch(&cache, &starts(), &mut || {
        looks += 1;
        looks > 3
    });
    assert_eq!(error.unwrap_err().kind, Kind::Interrupted);
}
