//! Any bytes as the metadata of a Zarr array: rejected in one line, or sizes in bounds and usable codecs. No allocation depends
//! on the sizes in the metadata.

use std::path::Path;
use std::sync::Arc;

use actshard_core::{DType, Kind};
use actshard_core::arrays::coded::{CodedArray, Decode, problem};
use actshard_core::arrays::meta::ArrayMeta;
use actshard_core::location::Location;
use actshard_core::source::Io;
use actshard_core::source::local::Local;

use crate::memory::counted;

/// Parses the bytes as metadata of a 4-D store: rejected in one line, or bounded sizes.
fn parsed(data: &[u8]) {
    for version in [2, 3] {
        match counted(|| ArrayMeta::of_store(version, data, "")) {
            Ok(meta) => {
                assert!(meta.shape.len() <= 8 && meta.shape.len() == meta.outer.len());
                assert!(meta.shape.len() == meta.inner.len());
                for (outer, inner) in meta.outer.iter().zip(&meta.inner) {
                    assert!(*inner > 0 && *outer < 1 << 48 && outer.is_multiple_of(*inner));
                }
                assert!(!meta.naming.file(&meta.shape).is_empty());
                for dtype in DType::ALL {
                    let _ = meta.fill.bytes(*dtype);
                }
            }
            Err(error) => {
                assert!(matches!(error.kind, Kind::Format | Kind::Unsupported));
                assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
            }
        }
    }
}

pub fn zarr_metadata(data: &[u8]) {
    parsed(data);
    let folder = Location::from(Path::new("/nowhere"));
    if let Some(why) = counted(|| problem(&folder, data)) {
        assert!(!why.contains('\n'), "{why}");
        return;
    }
    for inner in [false, true] {
        let array = counted(|| CodedArray::of(Arc::new(Local { io: Io::Pread }), &folder, data, inner));
        let dims = array.dimensions().unwrap_or(0);
        // No file is there.
        let first = vec![0; dims];
        assert!(matches!(counted(|| array.chunk(&first, 8, &folder)), Ok(None)));
        if let Err(error) = counted(|| array.decode(vec![0; 40])) {
            assert_eq!(error.kind, Kind::Format);
        }
    }
}
