//! Any bytes as the metadata of a Zarr array: rejected in one line, or usable codecs. No allocation depends on the sizes in the
//! metadata.
#![no_main]

use std::path::{Path, PathBuf};
use std::sync::Once;

use actshard_core::Kind;
use actshard_core::arrays::coded::{CodedArray, Decode, problem};
use libfuzzer_sys::fuzz_target;

static QUIET: Once = Once::new();

fuzz_target!(|data: &[u8]| {
    let folder = PathBuf::from("/nowhere");
    // libFuzzer's hook ends the process at a panic; panics of zarrs over metadata are caught and become errors.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    if let Some(why) = problem(&folder, data) {
        assert!(!why.contains('\n'), "{why}");
        return;
    }
    for inner in [false, true] {
        let array = CodedArray::of(&folder, data, inner);
        let dims = array.dimensions().unwrap_or(0);
        // The file does not exist.
        assert!(matches!(array.chunk(&vec![0; dims], 8, Path::new("0")), Ok(None)));
        if let Err(error) = array.decode(vec![0; 40]) {
            assert_eq!(error.kind, Kind::Format);
        }
    }
});
