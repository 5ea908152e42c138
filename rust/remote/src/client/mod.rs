//! Clients of the providers behind one trait, and the one place that checks their answers.

pub mod hub;
pub mod objects;
pub mod pace;
pub mod put;
pub mod resolved;
mod spoken;
pub mod times;
pub mod web;
pub mod wire;
pub mod write_side;

use std::fmt::Debug;
use std::ops::Range;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;

use self::times::ServerDate;
use crate::failure::{Cause, Failure};

/// Pages of one listing, of 1,000 names each.
const PAGES: usize = 10_000;
/// The longest body of one page of a listing.
const PAGE: usize = 64 << 20;

/// The identity of an object's content, as reported by the server.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag {
    /// The entity tag without quotes; a weak one begins with `W/`.
    pub etag: Option<Box<str>>,
    /// The time of the last change, as the server writes it.
    pub modified: Option<Box<str>>,
}

impl Tag {
    /// The tag of an ETag and a time.
    pub fn new(etag: Option<&str>, modified: Option<String>) -> Tag {
        let plain = |etag: &str| match etag.strip_prefix("W/") {
            Some(weak) => format!("W/{}", weak.trim_matches('"')),
            None => etag.trim_matches('"').to_string(),
        };
        let etag = etag.map(plain).filter(|etag| !etag.is_empty());
        Tag { etag: etag.map(Into::into), modified: modified.map(Into::into) }
    }

    /// Whether it identifies anything.
    pub fn is_empty(&self) -> bool {
        self.etag.is_none() && self.modified.is_none()
    }

    /// Whether both may belong to the same content. A strong ETag decides; a weak one allows other bytes, so that the time
    /// counts too.
    pub fn agrees(&self, other: &Tag) -> bool {
        let same = |a: &Option<Box<str>>, b: &Option<Box<str>>| match (a, b) {
            (Some(a), Some(b)) => Some(a == b),
            _ => None,
        };
        let strong = |tag: &Tag| tag.etag.as_deref().is_some_and(|etag| !etag.starts_with("W/"));
        match same(&self.etag, &other.etag) {
            Some(false) => false,
            Some(true) if strong(self) => true,
            _ => same(&self.modified, &other.modified) != Some(false),
        }
    }

    /// The header `If-Match`, which allows strong tags only.
    pub fn if_match(&self) -> Option<String> {
        self.etag.as_deref().filter(|etag| !etag.starts_with("W/")).map(|etag| format!("\"{etag}\""))
    }

    /// One text for a version.
    pub fn text(&self, size: u64) -> String {
        format!("{}:{}:{size}", self.etag.as_deref().unwrap_or_default(), self.modified.as_deref().unwrap_or_default())
    }
}

/// A range of an object's bytes, as the server sends it.
pub struct Answer {
    /// The object's tag.
    pub tag: Tag,
    /// The object's size.
    pub size: u64,
    /// When the server sent it.
    pub date: Option<ServerDate>,
    /// The bytes that follow.
    pub range: Range<u64>,
    /// The bytes.
    pub body: BoxStream<'static, Result<Bytes, Failure>>,
}

impl Debug for Answer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Answer({:?} of {})", self.range, self.size)
    }
}

/// The known facts about an object before a request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Its size.
    pub size: Option<u64>,
    /// Its tag.
    pub tag: Option<Tag>,
}

/// An object of a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedObject {
    /// Its key.
    pub key: String,
    /// Its size.
    pub size: u64,
    /// Its tag.
    pub tag: Tag,
}

/// The content of a folder.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// Objects.
    pub objects: Vec<ListedObject>,
    /// Keys of folders, without a slash at the end.
    pub folders: Vec<String>,
    /// Whether it contains everything below the folder, not only the names directly inside.
    pub deep: bool,
    /// When the server sent its first page.
    pub date: Option<ServerDate>,
}

/// A provider's protocol. Requests are repeated below this trait, bodies above it.
pub trait Client: Debug + Send + Sync {
    /// Requests a range; for an empty object it is empty, too. The range of the answer may be shorter at the object's
    /// end; nothing else is checked yet.
    fn get<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        expected: &'a Expected,
    ) -> BoxFuture<'a, Result<Answer, Failure>>;

    /// Lists a folder: the objects in it and its folders, or everything below it if that takes no more requests.
    fn list<'a>(&'a self, folder: &'a str, deep: bool) -> BoxFuture<'a, Result<Listing, Failure>>;

    /// Whether folders can be listed.
    fn lists(&self) -> bool {
        true
    }

    /// The revision that all requests are made at, once it is known.
    fn revision(&self) -> Option<String> {
        None
    }

    /// Distinguishes servers whose objects have equal locations: endpoint, account and parameters. May contain secrets.
    /// Called inside the runtime.
    fn origin(&self) -> Result<String, Failure>;
    /// How objects are written; `None` for stores that are read only.
    fn writer(&self) -> Option<&dyn Puts> {
        None
    }

    /// The credentials that requests are made with, for messages: their place, not their value.
    fn credentials(&self) -> String;

    /// Fails if requests cannot succeed, before the first one.
    fn ready(&self) -> Result<(), Failure> {
        Ok(())
    }
}

/// An existing object, as a writer needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredObject {
    /// Its size.
    pub size: u64,
    /// SHA-256 of its bytes in hexadecimal digits, if this crate wrote it.
    pub sha256: Option<String>,
}

/// A protocol's requests for writing. Those that change something are sent once: only the caller knows when they may be sent
/// again.
pub trait Puts: Debug + Send + Sync {
    /// Writes an object in one request; with `only_new`, unless one exists (then the status is 409 or 412).
    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        sha256: &'a str,
        only_new: bool,
    ) -> BoxFuture<'a, Result<(), Failure>>;

    /// The existing object.
    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<StoredObject>, Failure>>;

    /// Begins an object in parts; its name.
    fn begin<'a>(&'a self, key: &'a str, sha256: &'a str) -> BoxFuture<'a, Result<String, Failure>>;

    /// Sends a part, counted from 0; its name.
    fn part<'a>(
        &'a self,
        key: &'a str,
        id: &'a str,
        number: usize,
        body: Bytes,
    ) -> BoxFuture<'a, Result<String, Failure>>;

    /// Makes an object of its parts. Nothing is visible before.
    fn complete<'a>(&'a self, key: &'a str, id: &'a str, parts: Vec<String>) -> BoxFuture<'a, Result<(), Failure>>;

    /// Removes the parts of an object that was begun.
    fn abort<'a>(&'a self, key: &'a str, id: &'a str) -> BoxFuture<'a, Result<(), Failure>>;

    /// Keys that begin with a prefix, and names, of objects that were begun and neither completed nor aborted. Empty where the
    /// store cannot list them.
    fn unfinished<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, String)>, Failure>>;

    /// Removes an object.
    fn remove<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), Failure>>;
}

/// Refuses sizes that no store has, whose sums would overflow.
fn possible(size: u64) -> Result<u64, Failure> {
    let text = || Failure::new(Cause::Protocol, format!("an object of {size} bytes"));
    (size < 1 << 62).then_some(size).ok_or_else(text)
}

/// Requests a range, and checks that the answer contains this range of the expected object.
pub async fn checked(
    client: &dyn Client,
    key: &str,
    range: Range<u64>,
    expected: &Expected,
) -> Result<Answer, Failure> {
    let opening = expected.size.is_none() && expected.tag.is_none();
    let answer = match client.get(key, range.clone(), expected).await {
        Ok(answer) => answer,
        // HTTP servers refuse a range of an empty object, in an answer without its tag.
        Err(failure) if failure.status() == Some(416) && range.start == 0 && failure.size == Some(0) => {
            client.get(key, 0..0, expected).await?
        }
        Err(failure) => {
            return Err(match failure.status() {
                Some(412) => Failure::changed("the server has another version (412)"),
                Some(416) if !opening => Failure::changed("it is shorter now (416)"),
                _ if failure.is_absence() && !opening => {
                    Failure { cause: Cause::Gone, ..Failure::changed("it is gone (404)") }
                }
                _ => failure,
            });
        }
    };
    possible(answer.size)?;
    if let Some(size) = expected.size
        && size != answer.size
    {
        return Err(Failure::changed(format!("expected {size} bytes, found {}", answer.size)));
    }
    if let Some(tag) = &expected.tag
        && !tag.agrees(&answer.tag)
    {
        return Err(Failure::changed("its ETag has changed"));
    }
    let wanted = range.start..range.end.min(answer.size);
    if answer.range != wanted {
        let text = format!("expected bytes {wanted:?}, the server sent {:?}", answer.range);
        return Err(Failure::new(Cause::Protocol, text));
    }
    Ok(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_agree_unless_they_say_otherwise() {
        let tag = |etag, modified: Option<&str>| Tag::new(etag, modified.map(str::to_string));
        assert!(tag(Some("\"a\""), Some("1")).agrees(&tag(Some("a"), Some("2"))));
        assert!(!tag(Some("a"), Some("1")).agrees(&tag(Some("b"), Some("1"))));
        assert!(tag(None, Some("1")).agrees(&tag(Some("b"), Some("1"))));
        assert!(!tag(None, Some("1")).agrees(&tag(Some("b"), Some("2"))));
        assert!(!tag(Some("W/\"a\""), Some("1")).agrees(&tag(Some("W/\"a\""), Some("2"))));
        assert!(tag(None, None).agrees(&tag(Some("b"), Some("2"))));
        assert_eq!(tag(Some("W/\"a\""), None).if_match(), None);
        assert_eq!(tag(Some("a"), None).if_match().as_deref(), Some("\"a\""));
    }
}
