//! Any bytes as a token cache's `zarr.json`: rejected in one line, or parsed into usable sizes.

use actshard_core::Kind;
use actshard_core::arrays::meta::Coding;
use actshard_core::tokens::meta::Meta;

use crate::memory::counted;

pub fn token_array_meta(data: &[u8]) {
    match counted(|| Meta::parse(data)) {
        Ok(meta) => {
            assert!(meta.inner > 0 && meta.outer > 0 && meta.width > 0 && meta.item() > 0);
            assert!(meta.inner.checked_mul(meta.item() as u64).is_some());
            assert!(meta.outer.is_multiple_of(meta.inner));
            if meta.coding != Coding::Foreign {
                assert!(meta.index_bytes() <= (1 << 24) + 4);
            }
            let file = meta.file(&std::path::Path::new("a").into(), 3);
            assert!(file.path().is_some_and(|path| path.starts_with("a")));
        }
        Err(error) => {
            assert_eq!(error.kind, Kind::Format);
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
        }
    }
}
