//! Encodes inner chunks with the codecs that their array's metadata name: the opposite of `chain`.
//!
//! A chunk is the rows of one example, then zeros up to its size. Chunks are encoded in parallel, and joined in their order.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ops::Range;

use serde_json::Value;
use zarrs::array::codec::BloscCodec;
use zarrs::array::{BytesToBytesCodecTraits, CodecOptions};
use zarrs::metadata_ext::codec::blosc::BloscCodecConfiguration;
use zstd::bulk::Compressor;

use crate::codec::planes;
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::threads::{self, Watch};

/// Bytes of chunks that a thread encodes before it takes the next: few enough to keep all threads busy to the end.
const AT_ONCE: usize = 1 << 20;

thread_local! {
    /// A compressor and its level. A new one for each chunk would touch a megabyte of fresh memory.
    static ZSTD: RefCell<Option<(i32, Compressor<'static>)>> = const { RefCell::new(None) };
}

/// Encoded chunks, one after the other.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct EncodedChunks {
    /// All chunks.
    pub bytes: Vec<u8>,
    /// Bytes of each.
    pub sizes: Vec<u64>,
}

/// A codec from bytes to bytes.
#[derive(Debug)]
enum ChunkEncoder {
    Zstd(i32),
    Blosc(BloscCodec),
    Planes { typesize: usize, width: usize },
    Crc32c,
}

impl ChunkEncoder {
    /// The codec of an entry of the field `codecs`; `None` for one that changes nothing.
    fn new(codec: &Value) -> Result<Option<ChunkEncoder>> {
        let unknown = |why: String| Error::new(Kind::Internal, format!("codec {codec}: {why}"));
        let configuration = codec.get("configuration").unwrap_or(&Value::Null);
        match codec.get("name").and_then(Value::as_str) {
            // The numbers of the rows are little-endian, as those of this machine.
            Some("bytes") if cfg!(target_endian = "little") => Ok(None),
            Some("crc32c") => Ok(Some(ChunkEncoder::Crc32c)),
            Some("zstd") => {
                let level = configuration.get("level").and_then(Value::as_i64);
                let level = level.and_then(|level| i32::try_from(level).ok());
                level.map(|level| Some(ChunkEncoder::Zstd(level))).ok_or_else(|| unknown("expected a level".into()))
            }
            Some("actshard.planes") => {
                let size = |name: &str| {
                    let size = configuration.get(name).and_then(Value::as_u64).and_then(|n| usize::try_from(n).ok());
                    size.ok_or_else(|| unknown(format!("expected a {name}")))
                };
                Ok(Some(ChunkEncoder::Planes { typesize: size("typesize")?, width: size("width")? }))
            }
            Some("blosc") => {
                let parsed: BloscCodecConfiguration =
                    serde_json::from_value(configuration.clone()).map_err(|e| unknown(e.to_string()))?;
                let codec = BloscCodec::new_with_configuration(&parsed).map_err(|e| unknown(e.to_string()))?;
                Ok(Some(ChunkEncoder::Blosc(codec)))
            }
            _ => Err(unknown("cannot be written".into())),
        }
    }

    fn encode<'a>(&self, mut bytes: Cow<'a, [u8]>) -> Result<Cow<'a, [u8]>> {
        match self {
            ChunkEncoder::Crc32c => {
                let crc = crc32c::crc32c(&bytes);
                bytes.to_mut().extend_from_slice(&crc.to_le_bytes());
                Ok(bytes)
            }
            ChunkEncoder::Zstd(level) => zstd(&bytes, *level).map(Cow::Owned),
            ChunkEncoder::Planes { typesize, width } => planes::encode(&bytes, *typesize, *width).map(Cow::Owned),
            ChunkEncoder::Blosc(codec) => codec
                .encode(bytes, &CodecOptions::default().with_concurrent_target(1))
                .map_err(|e| Error::new(Kind::Internal, format!("blosc: {e}"))),
        }
    }
}

/// One frame, with its content's size.
fn zstd(bytes: &[u8], level: i32) -> Result<Vec<u8>> {
    let failed = |e: std::io::Error| Error::new(Kind::Internal, format!("zstd: {e}"));
    ZSTD.with_borrow_mut(|kept| {
        let compressor = match kept.take_if(|(of, _)| *of != level) {
            None if kept.is_some() => kept.as_mut(),
            _ => Some(kept.insert((level, Compressor::new(level).map_err(failed)?))),
        };
        let Some((_, compressor)) = compressor else { return Err(Error::new(Kind::Internal, "no compressor")) };
        compressor.compress(bytes).map_err(failed)
    })
}

/// Encodes chunks of `chunk_bytes`. `places` are the ranges of `rows` that the chunks begin with; `codecs` is the field of the
/// metadata, as JSON.
pub fn pack(
    rows: &[u8],
    places: &[Range<usize>],
    chunk_bytes: usize,
    codecs: &[u8],
    watch: Watch<'_>,
) -> Result<EncodedChunks> {
    let wrong = |why: &str| Error::new(Kind::Internal, format!("inner chunks: {why}"));
    let codecs: Vec<Value> = serde_json::from_slice(codecs).map_err(|_| wrong("expected a list of codecs"))?;
    let encoders: Vec<ChunkEncoder> =
        codecs.iter().filter_map(|codec| ChunkEncoder::new(codec).transpose()).collect::<Result<_>>()?;
    let encode = |place: &Range<usize>| -> Result<Cow<'_, [u8]>> {
        let rows = rows.get(place.clone()).filter(|rows| rows.len() <= chunk_bytes);
        let rows = rows.ok_or_else(|| wrong("a range outside of the rows, or longer than a chunk"))?;
        let mut chunk = Cow::Borrowed(rows);
        if rows.len() < chunk_bytes {
            let mut padded = memory::bytes(chunk_bytes as u64)?;
            padded[..rows.len()].copy_from_slice(rows);
            chunk = Cow::Owned(padded);
        }
        encoders.iter().try_fold(chunk, |bytes, encoder| encoder.encode(bytes))
    };
    let batches: Vec<&[Range<usize>]> = places.chunks((AT_ONCE / chunk_bytes.max(1)).max(1)).collect();
    // A batch's chunks are joined at once, so that the memory of each serves the next one.
    let encode_batch = |_: usize, batch: &[Range<usize>], _: &threads::Stop| {
        let mut joined = EncodedChunks {
            bytes: memory::reserve((batch.len() * chunk_bytes) as u64)?,
            sizes: memory::reserve(batch.len() as u64)?,
        };
        for place in batch {
            let chunk = encode(place)?;
            joined.bytes.extend_from_slice(&chunk);
            joined.sizes.push(chunk.len() as u64);
        }
        Ok(joined)
    };
    let encoded: Vec<EncodedChunks> = threads::map_each(batches, &encode_batch, watch)?;
    let sizes: Vec<u64> = encoded.iter().flat_map(|batch| &batch.sizes).copied().collect();
    let mut bytes = memory::reserve(sizes.iter().sum())?;
    encoded.iter().for_each(|batch| bytes.extend_from_slice(&batch.bytes));
    Ok(EncodedChunks { bytes, sizes })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const PLAIN: &str = r#"{"name": "bytes", "configuration": {"endian": "little"}}"#;

    fn packed(rows: &[u8], places: &[Range<usize>], codecs: &str) -> Result<EncodedChunks> {
        pack(rows, places, 1000, format!("[{PLAIN}{codecs}]").as_bytes(), &mut || false)
    }

    #[test]
    fn chunks_are_padded_with_zeros_and_joined_in_their_order() {
        let rows: Vec<u8> = (0..5000u32).map(|i| i as u8).collect();
        let places: Vec<Range<usize>> = vec![0..1000, 1000..1010, 4000..5000, 7..7];
        let plain = packed(&rows, &places, "").unwrap();
        let mut expected = vec![0; 4000];
        for (chunk, place) in expected.chunks_mut(1000).zip(&places) {
            chunk[..place.len()].copy_from_slice(&rows[place.clone()]);
        }
        assert_eq!(plain, EncodedChunks { bytes: expected.clone(), sizes: vec![1000; 4] });
        let sums = packed(&rows, &places, r#", {"name": "crc32c"}"#).unwrap();
        assert_eq!(sums.sizes, [1004; 4]);
        for (chunk, summed) in expected.chunks(1000).zip(sums.bytes.chunks(1004)) {
            assert_eq!(summed[..1000], *chunk);
            assert_eq!(summed[1000..], crc32c::crc32c(chunk).to_le_bytes());
        }
        // Contexts are kept: another level between two calls changes nothing.
        for level in [1, 5, 1] {
            let codec = format!(r#", {{"name": "zstd", "configuration": {{"level": {level}, "checksum": false}}}}"#);
            let zstd = packed(&rows, &places, &codec).unwrap();
            let frames: Vec<Vec<u8>> =
                expected.chunks(1000).map(|chunk| zstd::bulk::compress(chunk, level).unwrap()).collect();
            assert_eq!(zstd.bytes, frames.concat());
            assert_eq!(zstd.sizes, frames.iter().map(|frame| frame.len() as u64).collect::<Vec<_>>());
        }
    }

    #[test]
    fn ranges_outside_of_the_rows_and_unknown_codecs_are_errors() {
        for place in [0..1001, 4999..5001, 6000..6001] {
            assert_eq!(packed(&[0; 5000], &[place], "").unwrap_err().kind, Kind::Internal);
        }
        for codec in [r#", {"name": "gzip"}"#, r#", {"name": "zstd"}"#, r#", {"name": "blosc"}"#, ", 1", ", {"] {
            assert_eq!(packed(&[0; 5000], std::slice::from_ref(&(0..1)), codec).unwrap_err().kind, Kind::Internal);
        }
    }
}
