//! UTF-8 as written by Python.

/// Whether the bytes are UTF-8, possibly with encoded surrogates.
pub(super) fn is_python_utf8(mut bytes: &[u8]) -> bool {
    loop {
        match std::str::from_utf8(bytes) {
            Ok(_) => return true,
            Err(error) => match bytes[error.valid_up_to()..] {
                [0xed, 0xa0..=0xbf, 0x80..=0xbf, ..] => bytes = &bytes[error.valid_up_to() + 3..],
                _ => return false,
            },
        }
    }
}
