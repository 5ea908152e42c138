//! Any bytes: the header parser rejects them with a named reason in one line, or accepts a consistent header that is the same
//! after writing and parsing it again.

use std::collections::BTreeMap;

use actshard_core::Kind;
use actshard_core::parse::safetensors::{Header, parse_bytes};
use serde_json::json;

use crate::memory::counted;

fn rewrite(header: &Header, data: usize) -> Vec<u8> {
    let mut object = BTreeMap::new();
    for t in &header.tensors {
        object.insert(
            t.name.clone(),
            json!({"dtype": t.dtype.name(), "shape": t.shape, "data_offsets": [t.begin, t.end]}),
        );
    }
    let text = serde_json::to_string(&object).expect("maps of plain values serialise");
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(text.as_bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

pub fn safetensors_header(bytes: &[u8]) {
    let header = match counted(|| parse_bytes(bytes)) {
        Ok(header) => header,
        Err(error) => {
            assert_eq!(error.kind, Kind::Header);
            assert!(error.reason.is_some(), "{error}");
            // Logs are read line by line, and names in a rejected file are untrusted.
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
            return;
        }
    };
    let mut next = 0;
    let mut names = std::collections::HashSet::new();
    for t in &header.tensors {
        assert_eq!(t.begin, next);
        assert!(t.end >= t.begin && names.insert(&t.name));
        let bits = t.shape.iter().fold(u128::from(t.dtype.bits()), |n, d| n * u128::from(*d));
        assert_eq!(bits, u128::from(t.end - t.begin) * 8);
        next = t.end;
    }
    assert_eq!(header.data_start + next, bytes.len() as u64);

    // Empty tensors share an offset and have no order among themselves: compare by name.
    let again = parse_bytes(&rewrite(&header, next as usize)).expect("what was accepted is accepted again");
    let by_name = |h: &Header| {
        let mut tensors = h.tensors.clone();
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        tensors
    };
    assert_eq!(by_name(&again), by_name(&header));
}
