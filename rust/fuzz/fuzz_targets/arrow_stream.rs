//! Any bytes: the walker of Arrow streams rejects them in one line, or accepts headers whose buffers all lie in the file.
#![no_main]

use actshard_core::Kind;
use actshard_core::parse::arrow::parse_bytes;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let found = match parse_bytes(bytes) {
        Ok(found) => found,
        Err(error) => {
            assert!(matches!(error.kind, Kind::Format | Kind::Truncated | Kind::Unsupported), "{error}");
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
            return;
        }
    };
    let (nodes, buffers) =
        found.schema.fields.iter().map(|field| field.parts()).fold((0, 0), |(a, b), (n, m)| (a + n, b + m));
    let mut last = None;
    for batch in &found.batches {
        assert!(last < Some(batch.at));
        last = Some(batch.at);
        assert_eq!((batch.nodes.len(), batch.buffers.len()), (nodes, buffers));
        for (at, length) in &batch.buffers {
            assert!(*at > batch.at && at + length <= bytes.len() as u64);
        }
        for (length, nulls) in &batch.nodes {
            assert!(*nulls <= *length as i64);
        }
    }
    // A copy of the same bytes is the same stream, and what follows the end marker is not read.
    if found.ended {
        let longer = [bytes, &[0xff; 64]].concat();
        assert_eq!(parse_bytes(&longer).expect("accepted with more bytes after its end"), found);
    }
});
