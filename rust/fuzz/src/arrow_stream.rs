//! Any bytes: the walker of Arrow streams rejects them in one line, or accepts headers whose buffers all lie in the file.

use actshard_core::Kind;
use actshard_core::parse::arrow::parse_bytes;

use crate::memory::counted;

pub fn arrow_stream(bytes: &[u8]) {
    let stream = match counted(|| parse_bytes(bytes)) {
        Ok(stream) => stream,
        Err(error) => {
            assert!(matches!(error.kind, Kind::Format | Kind::Truncated | Kind::Unsupported), "{error}");
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
            return;
        }
    };
    let (nodes, buffers) =
        stream.schema.fields.iter().map(|field| field.parts()).fold((0, 0), |(a, b), (n, m)| (a + n, b + m));
    let mut last = None;
    for batch in &stream.batches {
        assert!(last < Some(batch.at));
        last = Some(batch.at);
        assert_eq!((batch.nodes.len(), batch.buffers.len()), (nodes, buffers));
        for (begin, length) in &batch.buffers {
            assert!(*begin > batch.at && begin + length <= bytes.len() as u64);
        }
        for (length, nulls) in &batch.nodes {
            assert!(*nulls <= *length as i64);
        }
    }
    // The end marker is the end of the file: what follows it, such as another stream, would be lost without a word.
    if stream.ended {
        let longer = [bytes, &[0xff; 64]].concat();
        let error = parse_bytes(&longer).expect_err("bytes after the end of the stream are refused");
        assert_eq!((error.kind, error.offset), (Kind::Format, Some(bytes.len() as u64)), "{error}");
    }
}
