//! Where a file or one of its parts ends: each parser passes the end that it found.

use crate::error::{Error, Kind, Result};

/// An error with the offset `end` if bytes follow it.
///
/// `part` is what ends there, and `advice` what to do about more of them: an appended second object looks like this.
pub fn check(end: u64, size: u64, part: &str, advice: &str) -> Result<()> {
    if end >= size {
        return Ok(());
    }
    let detail = format!("expected the end of {part}, found {} more bytes{advice}", size - end);
    Err(Error::new(Kind::Format, detail).byte(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_after_the_end_are_an_error_at_their_offset() {
        assert!(check(3, 3, "the file", "").is_ok());
        let error = check(3, 5, "the file", ": cut it").err();
        let text = error.as_ref().map(ToString::to_string).unwrap_or_default();
        assert!(text.contains("expected the end of the file, found 2 more bytes: cut it"), "{text}");
        assert_eq!(error.and_then(|error| error.offset), Some(3));
    }
}
