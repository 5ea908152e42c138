//! Pickle shards of a slow store: their rows are those of local files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use actshard_core::DType;
use actshard_core::dtype::Cast;
use actshard_core::files::shards::{ShardSpec, Shards};
use actshard_core::gather::{Ints, Out, Pick};
use actshard_core::location::Location;
use actshard_core::rows::Rows;
use actshard_core::source::{Io, Wishes};

use super::store::{Handle, Memory, WISHES, at};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/pickle")
}

/// The shards that a folder's metadata list, at the locations that `to` gives, and the layers.
fn specs(folder: &Path, to: &dyn Fn(&str) -> Location) -> (Vec<ShardSpec>, Vec<i64>) {
    let text: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.join("metadata.json")).unwrap()).unwrap();
    let integers =
        |value: &serde_json::Value| value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect::<Vec<i64>>();
    let mut layers: Vec<i64> = vec![];
    let mut shards = vec![];
    for shard in text["shards"].as_array().unwrap() {
        let own = integers(&shard["layers"]);
        layers.extend(own.iter().filter(|layer| !layers.contains(layer)).copied().collect::<Vec<_>>());
        let ids = integers(&shard["sample_id_range"]);
        shards.push(ShardSpec {
            location: to(shard["filename"].as_str().unwrap()),
            compressed: shard["compressed"].as_bool().unwrap(),
            size: shard["size_bytes"].as_u64(),
            sha256: None,
            samples: shard["num_samples"].as_u64().unwrap(),
            ids: (ids[0], ids[1]),
            layers: own,
            limit: u64::MAX,
        });
    }
    (shards, layers)
}

fn local(folder: &Path, io: Io) -> (Rows, usize) {
    let (shards, layers) = specs(folder, &|name| folder.join(name).into());
    let n = layers.len();
    let shards = Shards::open(shards, layers, 1 << 20, io, &mut || false).unwrap();
    (Rows::Shards(Arc::new(shards), Some(DType::F32)), n)
}

/// Every row of a group, examples forwards and backwards, with the number of tokens of each.
fn all_rows(rows: &Rows, group: i64) -> (Vec<i64>, Vec<u8>) {
    let n = rows.examples() as i64;
    let all: Vec<i64> = (0..n).chain((0..n).rev()).collect();
    let counts = rows.tokens_of(Ints::One(group), &all, &mut || false).unwrap();
    let stored: Vec<i64> = all.iter().zip(&counts).filter(|(_, count)| **count > 0).map(|(e, _)| *e).collect();
    let mut out = vec![0u8; counts.iter().sum::<i64>() as usize * rows.row().width * 4];
    let cast = Cast::between(DType::F32, DType::F32).unwrap();
    let pick = Pick::Whole { examples: Ints::Each(&stored) };
    rows.gather(Ints::One(group), pick, stored.len(), cast, Out::Dense(&mut out), &mut || false).unwrap();
    (counts, out)
}

#[test]
fn rows_are_those_of_local_files() {
    let mut compared = 0;
    for entry in std::fs::read_dir(golden()).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.join("metadata.json").exists() {
            continue;
        }
        let (near, groups) = local(&folder, Io::Mmap);
        for (memory, parallel) in [(1 << 13, 1), (1 << 13, 8), (1 << 20, 8)] {
            let wishes = Wishes { parallel, largest: 200, gap: 50, unit_bytes: 1, ..WISHES };
            let store = Arc::new(Handle(Arc::new(Memory::of_folder(&folder, wishes))));
            let (shards, layers) = specs(&folder, &at);
            let far = Shards::of(store, true, shards, layers, memory, &mut || false).unwrap();
            let far = Rows::Shards(Arc::new(far), Some(DType::F32));
            for group in 0..groups as i64 {
                assert_eq!(all_rows(&near, group), all_rows(&far, group), "{folder:?}, group {group}");
                compared += 1;
            }
        }
    }
    assert!(compared > 30);
}

/// A mapping per view would run into the system's limit of mappings.
#[cfg(target_os = "linux")]
#[test]
fn views_of_a_plain_shard_share_one_mapping() {
    let (golden, copy) = (golden().join("mixed_compression"), tempfile::tempdir().unwrap());
    let (shards, layers) = specs(&golden, &|name| copy.path().join(name).into());
    let plain: Vec<ShardSpec> = shards.into_iter().filter(|shard| !shard.compressed).collect();
    for shard in &plain {
        // A path of its own: other tests of this process map the golden files.
        let path = shard.location.path().unwrap();
        std::fs::copy(golden.join(path.file_name().unwrap()), path).unwrap();
    }
    let shards = Shards::open(plain, layers, 1 << 20, Io::Mmap, &mut || false).unwrap();
    let rows = Rows::Shards(Arc::new(shards), None);
    let views: Vec<_> = (0..6).map(|_| rows.view(Io::Mmap, 0, 0, &mut || false).unwrap()).collect();
    assert!(views.iter().all(Option::is_some));
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert_eq!(maps.lines().filter(|line| line.contains(&*copy.path().to_string_lossy())).count(), 1);
}

#[test]
fn one_size_that_cannot_be_read_leaves_the_others_bounded() {
    let folder = golden().join("numpy2_proto5");
    // One shard, and three copies of another, each alone: this memory has room for none. Without their sizes, the copies would be
    // read together.
    let opens = |fails: bool| {
        let store = Arc::new(Memory::of_folder(&folder, WISHES));
        let (mut shards, layers) = specs(&folder, &at);
        for copy in ["a", "b"] {
            store.put(copy, Some(store.get("shard_0002.pkl.gz")));
            shards.push(ShardSpec { location: at(copy), ..shards[1].clone() });
        }
        let far = Shards::of(Arc::new(Handle(Arc::clone(&store))), true, shards, layers, 1, &mut || false).unwrap();
        *store.fails_once.lock().unwrap() = fails.then(|| "shard_0002.pkl.gz".to_string());
        store.opens();
        all_rows(&Rows::Shards(Arc::new(far), Some(DType::F32)), 0);
        assert!(store.fails_once.lock().unwrap().is_none());
        store.opens()
    };
    let usual = opens(false);
    assert!(usual >= 4, "{usual}");
    assert_eq!(opens(true), usual);
}
