//! Any bytes as the index of a shard: rejected, or as many entries as chunks, each absent or within the file, and equal to a simple
//! reading.

use actshard_core::Kind;
use actshard_core::tokens::meta::Meta;

use crate::memory::counted;

fn meta(chunks: u64, checked: bool, big: bool) -> Meta {
    let endian = if big { "big" } else { "little" };
    let crc = if checked { r#",{"name":"crc32c"}"# } else { "" };
    let text = format!(
        r#"{{"zarr_format":3,"node_type":"array","shape":[99],"data_type":"int32","fill_value":0,
        "chunk_grid":{{"name":"regular","configuration":{{"chunk_shape":[{}]}}}},"chunk_key_encoding":{{"name":"default"}},
        "codecs":[{{"name":"sharding_indexed","configuration":{{"chunk_shape":[4],
        "codecs":[{{"name":"bytes","configuration":{{"endian":"little"}}}}],
        "index_codecs":[{{"name":"bytes","configuration":{{"endian":"{endian}"}}}}{crc}]}}}}]}}"#,
        chunks * 4
    );
    Meta::parse(text.as_bytes()).expect("valid metadata")
}

pub fn token_index(data: &[u8]) {
    let Some((&[flags, chunks, a, b], raw)) = data.split_first_chunk::<4>() else { return };
    let (checked, big) = (flags & 1 != 0, flags & 2 != 0);
    let chunks = u64::from(chunks) + 1;
    let len = u64::from(u16::from_le_bytes([a, b])) << (flags >> 2 & 31);
    let meta = meta(chunks, checked, big);
    let mut raw = raw.to_vec();
    // Mostly of the right length and checksum: otherwise the entries are never parsed.
    if flags & 0x80 == 0 {
        raw.resize(chunks as usize * 16, 0xff);
        if checked {
            raw.extend(crc32c::crc32c(&raw).to_le_bytes());
        }
    }
    let number = |b: &[u8]| {
        let bytes: [u8; 8] = b.try_into().expect("eight bytes");
        if big { u64::from_be_bytes(bytes) } else { u64::from_le_bytes(bytes) }
    };
    let parser = meta.index.as_ref().expect("shards");
    match counted(|| parser.parse_within(&raw, len)) {
        Ok(index) => {
            assert_eq!(index.len() as u64, chunks);
            assert!(index.capacity() <= raw.len());
            for (entry, bytes) in index.iter().zip(raw.chunks(16)) {
                assert_eq!(*entry, (number(&bytes[..8]), number(&bytes[8..])));
                let absent = *entry == (u64::MAX, u64::MAX);
                assert!(absent || u128::from(entry.0) + u128::from(entry.1) <= u128::from(len));
            }
        }
        Err((offset, error)) => {
            assert!(offset <= raw.len() as u64 && error.kind == Kind::Format);
            let whole = raw.len() as u64 == chunks * 16 + if checked { 4 } else { 0 };
            let entries = &raw[..raw.len().min(chunks as usize * 16)];
            let outside = entries.chunks_exact(16).any(|b| {
                let (offset, n) = (number(&b[..8]), number(&b[8..]));
                (offset, n) != (u64::MAX, u64::MAX) && u128::from(offset) + u128::from(n) > u128::from(len)
            });
            let sum = checked && whole && raw[entries.len()..] != crc32c::crc32c(entries).to_le_bytes();
            assert!(!whole || outside || sum, "{error}");
        }
    }
}
