//! Zstd chunks decoded in one call, straight into the result.
//!
//! The stream decoder has a separate window, from which every byte is copied once more, and a decoder per chunk touches
//! fresh memory. A context is kept per thread instead: 150 KiB. If decoding fails here for any reason, the stream
//! decoder decodes the chunk again and reports the error.

use std::cell::RefCell;

use zstd::bulk::Decompressor;

use crate::memory;

thread_local! {
    static CONTEXT: RefCell<Option<Decompressor<'static>>> = const { RefCell::new(None) };
}

/// The frames' content; `None` unless it has at most `limit` bytes, which are allocated first.
pub(super) fn decode(encoded: &[u8], limit: u64) -> Option<Vec<u8>> {
    if encoded.is_empty() {
        return None; // decoding no frames in one call gives no bytes; the stream decoder rejects an empty input
    }
    let mut made = memory::reserve(limit).ok()?;
    let decoded = CONTEXT.try_with(|context| {
        let mut context = context.try_borrow_mut().ok()?;
        if context.is_none() {
            *context = Some(Decompressor::new().ok()?);
        }
        context.as_mut()?.decompress_to_buffer(encoded, &mut made).ok()
    });
    // A vector may have more room than was reserved.
    decoded.ok().flatten().filter(|n| *n as u64 <= limit)?;
    Some(made)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use proptest::prelude::*;

    use super::decode;

    fn oracle(encoded: &[u8]) -> Option<Vec<u8>> {
        let mut made = vec![];
        zstd::stream::read::Decoder::with_buffer(encoded).ok()?.read_to_end(&mut made).ok()?;
        Some(made)
    }

    proptest! {
        #[test]
        fn one_call_decodes_what_the_stream_decoder_does(
            parts in prop::collection::vec((prop::collection::vec(0u8..4, 0..3000), 1usize..40), 0..4),
            level in -3i32..6,
            damage in prop::option::of((any::<prop::sample::Index>(), any::<u8>())),
            cut in prop::option::of(any::<prop::sample::Index>()),
            slack in 0u64..3,
        ) {
            let mut encoded = vec![];
            for (part, times) in &parts {
                encoded.extend(zstd::bulk::compress(&part.repeat(*times), level).unwrap());
            }
            if let (Some((at, by)), false) = (damage, encoded.is_empty()) {
                let at = at.index(encoded.len());
                encoded[at] ^= by;
            }
            if let Some(cut) = cut {
                encoded.truncate(cut.index(encoded.len() + 1));
            }
            if let Some(whole) = oracle(&encoded) {
                let size = whole.len() as u64;
                prop_assert_eq!(decode(&encoded, size + slack), Some(whole));
                prop_assert!(size == 0 || decode(&encoded, size - 1).is_none());
            } else {
                prop_assert_eq!(decode(&encoded, 1 << 20), None);
            }
        }
    }
}
