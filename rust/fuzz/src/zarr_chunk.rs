//! Any bytes as an encoded chunk or shard, for arrays with every codec: decoding gives the bytes that the chunk's shape needs, or an
//! error. The first byte selects the array.

use std::path::Path;
use std::sync::{Arc, LazyLock};

use actshard_core::Kind;
use actshard_core::arrays::coded::{CodedArray, Elements};
use actshard_core::source::Io;
use actshard_core::source::local::Local;

use crate::memory::counted;

const BYTES: &str = r#"{"name":"bytes","configuration":{"endian":"little"}}"#;
const ZSTD: &str = r#"{"name":"zstd","configuration":{"level":1,"checksum":false}}"#;
const GZIP: &str = r#"{"name":"gzip","configuration":{"level":1}}"#;
const CRC: &str = r#"{"name":"crc32c"}"#;
const BLOSC: &str =
    r#"{"name":"blosc","configuration":{"cname":"lz4","clevel":5,"shuffle":"shuffle","typesize":4,"blocksize":0}}"#;
const TURN: &str = r#"{"name":"transpose","configuration":{"order":[1,3,2,0]}}"#;

fn v3(kind: &str, codecs: &[&str]) -> String {
    let fill = if kind == "string" { "\"\"" } else { "0" };
    format!(
        r#"{{"zarr_format":3,"node_type":"array","shape":[3,2,8,4],"data_type":"{kind}","fill_value":{fill},"chunk_grid":{{"name":"regular",
        "configuration":{{"chunk_shape":[1,2,8,4]}}}},"chunk_key_encoding":{{"name":"default"}},"codecs":[{}]}}"#,
        codecs.join(",")
    )
}

fn v2(compressor: &str) -> String {
    format!(
        r#"{{"zarr_format":2,"shape":[3,2,8,4],"chunks":[1,2,8,4],"dtype":"<f4","fill_value":0,"order":"F","filters":null,"compressor":{compressor}}}"#
    )
}

fn shards(inner: &[&str], index: &str, location: &str) -> String {
    format!(
        r#"{{"name":"sharding_indexed","configuration":{{"chunk_shape":[1,1,4,4],"codecs":[{}],"index_codecs":[{index}],"index_location":"{location}"}}}}"#,
        inner.join(",")
    )
}

static ARRAYS: LazyLock<Vec<CodedArray>> = LazyLock::new(|| {
    let checked = format!("{BYTES},{CRC}");
    let nested = shards(&[&shards(&[BYTES, ZSTD], BYTES, "end")], BYTES, "start");
    let metadata = [
        v2(r#"{"id":"zlib","level":1}"#),
        v2(r#"{"id":"bz2","level":1}"#),
        v2(r#"{"id":"zstd","level":1}"#),
        v3("float32", &[BYTES, GZIP]),
        v3("float32", &[BYTES, ZSTD]),
        v3("float32", &[BYTES, BLOSC]),
        v3("float32", &[BYTES, ZSTD, CRC]),
        v3("float32", &[TURN, BYTES, ZSTD]),
        v3("float32", &[&shards(&[BYTES, ZSTD], &checked, "end")]),
        v3("float32", &[&shards(&[BYTES, ZSTD], BYTES, "start")]),
        v3("float32", &[&shards(&[TURN, BYTES, GZIP], BYTES, "end"), ZSTD]),
        v3("float32", &[&nested]),
        v3("string", &[r#"{"name":"vlen-utf8"}"#]),
        v3("string", &[r#"{"name":"vlen-utf8"}"#, ZSTD]),
    ];
    let store = Arc::new(Local { io: Io::Pread });
    let folder = Path::new("/nowhere").into();
    metadata.iter().map(|m| CodedArray::of(store.clone(), &folder, m.as_bytes(), false)).collect()
});

pub fn zarr_chunk(data: &[u8]) {
    let Some((which, encoded)) = data.split_first() else { return };
    let array = &ARRAYS[*which as usize % ARRAYS.len()];
    match counted(|| array.decode(encoded.to_vec())) {
        Ok(Elements::Fixed(bytes)) => assert_eq!(bytes.len(), 2 * 8 * 4 * 4),
        Ok(Elements::Variable(texts)) => assert_eq!(texts.len(), 2 * 8 * 4),
        Err(error) => {
            assert_eq!(error.kind, Kind::Format, "{error}");
            assert!(!error.detail.contains("(a panic)"), "{error}");
        }
    }
}
