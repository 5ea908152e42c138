//! Whether an object is older than the first answer of its store: a dataset consists of the objects that existed when
//! its first file was read.
//!
//! Only the clocks of the server are compared. Not detected: a replacement with an older time (copies that preserve
//! times; S3 dates an upload in parts by its beginning), and one in the same second as the first answer, if the first
//! file is of that second too.

use serde::{Deserialize, Serialize};

use crate::client::Tag;
use crate::client::times::{ServerDate, seconds_of};

/// Dates have whole seconds, and the machines of one service differ by about one.
const GRACE: u64 = 1;

/// The first answer of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Opening {
    /// Its time, by the server's clock.
    at: u64,
    /// Whether an object of this answer was written at the same moment: then others may have been, too.
    fresh: bool,
}

/// When an object was written; None if the server does not report it, or if it is in the future.
fn written(tag: &Tag, date: ServerDate) -> Option<u64> {
    let at = seconds_of(tag.modified.as_deref()?)?;
    (at <= date.0.saturating_add(GRACE)).then_some(at)
}

impl Opening {
    /// The opening by a first answer, of these objects.
    pub fn new<'a>(date: ServerDate, objects: impl IntoIterator<Item = &'a Tag>) -> Opening {
        let now = |tag: &Tag| written(tag, date).is_some_and(|at| at.saturating_add(GRACE) >= date.0);
        Opening { at: date.0, fresh: objects.into_iter().any(now) }
    }

    /// Whether an object of a later answer was written after the first answer, so that it may be of another version of the
    /// dataset.
    pub fn is_before(&self, tag: &Tag, date: Option<ServerDate>) -> bool {
        let Some(at) = date.and_then(|date| written(tag, date)) else { return false };
        at > self.at.saturating_add(GRACE) || at >= self.at && !self.fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(at: u64) -> Tag {
        Tag::new(Some("e"), Some(at.to_string()))
    }

    #[test]
    fn what_was_written_after_the_first_answer_is_newer() {
        let old = Opening::new(ServerDate(1000), [&tag(900)]);
        let newer = |opening: Opening, at| opening.is_before(&tag(at), Some(ServerDate(2000)));
        assert_eq!([900, 999, 1000, 1001, 1002, 2000].map(|at| newer(old, at)), [false, false, true, true, true, true]);
        // Its first file is as new: it was finished a moment ago.
        let fresh = Opening::new(ServerDate(1000), [&tag(900), &tag(999)]);
        assert_eq!([999, 1000, 1001, 1002].map(|at| newer(fresh, at)), [false, false, false, true]);
    }

    #[test]
    fn times_that_say_nothing_are_not_used() {
        let opening = Opening::new(ServerDate(1000), [&tag(900)]);
        assert!(!opening.is_before(&tag(5000), Some(ServerDate(2000))), "a time in the future");
        assert!(!opening.is_before(&tag(1500), None), "an answer without a date");
        assert!(!opening.is_before(&Tag::new(Some("e"), None), Some(ServerDate(2000))));
        assert!(!opening.is_before(&Tag::new(None, Some("soon".to_string())), Some(ServerDate(2000))));
    }
}
