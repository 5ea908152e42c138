//! Requests for unknown objects, and checks of known ones.

use std::sync::Arc;

use actshard_core::location::Location;
use actshard_core::source::{Access, Source};
use actshard_core::threads::ForkSafe;
use actshard_core::{Error, Kind, Result};
use bytes::Bytes;
use futures_util::future::join;
use futures_util::stream::{FuturesUnordered, StreamExt};

use super::RemoteStore;
use crate::address::Provider;
use crate::failure::{Cause, Failure};
use crate::known::{KnownName, NEWER, ObjectFacts};
use crate::object::{Head, HeadShare, LARGEST, PARALLEL, RemoteObject};
use crate::reading::Beginning;

/// Bytes in the first request for an unknown object.
const HEAD: u64 = 64 << 10;
/// Objects whose first bytes are kept after they were inspected.
const MOST_HEADS: usize = 32;
/// Bytes of a header that are kept, and headers in a pickled store.
const HEADER: usize = 16 << 10;
const MOST_HEADERS: usize = 4;

/// The source of a location, once it is known.
pub(super) type ProbeAnswer = Option<Result<Box<dyn Source>>>;
/// An object, and its first bytes if there is room for them.
type Probed = (ObjectFacts, Option<Head>);

impl RemoteStore {
    /// Keeps the beginning of an object that starts with a header, so that copies of this store need no request for it.
    pub(super) fn keep_header(&self, key: &str, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(HEADER)];
        if let Some(share) = HeadShare::take(bytes.len() as u64).filter(|_| has_header(key)) {
            let head = Head { bytes: Bytes::copy_from_slice(bytes), _share: Arc::new(share) };
            self.heads.with(|heads| {
                if heads.len() < MOST_HEADS {
                    heads.insert(key.to_string(), head);
                }
            });
        }
    }

    /// Headers that copies of this store get.
    pub(super) fn headers(&self) -> Vec<(String, Vec<u8>)> {
        let some = |kept: &mut super::Heads| {
            let headers = kept.iter().filter(|(key, _)| has_header(key)).take(MOST_HEADERS);
            headers.map(|(key, head)| (key.clone(), head.bytes.to_vec())).collect()
        };
        self.heads.with(some).unwrap_or_default()
    }

    /// Keeps the first bytes of an object for the next time that it is opened.
    pub(super) fn keep_head(&self, key: &str, head: Head) {
        self.heads.with(|heads| {
            if heads.len() >= MOST_HEADS {
                heads.clear();
            }
            heads.insert(key.to_string(), head);
        });
    }

    pub(super) fn object(
        &self,
        location: &Location,
        key: &str,
        facts: ObjectFacts,
        head: Option<Head>,
    ) -> Box<dyn Source> {
        Box::new(RemoteObject {
            link: Arc::clone(&self.link),
            location: location.clone(),
            key: key.to_string(),
            opened: facts,
            head: ForkSafe::new(head),
        })
    }

    /// Opens an unknown object: its first bytes, and with them its size and tag. An object that is read once is usually
    /// read whole: then the first request brings all its bytes.
    pub(super) async fn probe(&self, key: &str, access: Access) -> Result<Probed, Failure> {
        let whole = if access == Access::Once { HeadShare::take(LARGEST) } else { None };
        let share = whole.or_else(|| HeadShare::take(HEAD));
        let most = share.as_ref().map_or(HEAD, HeadShare::bytes);
        let Beginning { bytes: head, facts, date } = self.link.reading(key, None).open(most).await?;
        if self.address.provider == Provider::Http && is_page(key, &head) {
            let text = "the server sent a web page, as some do for names that do not exist";
            return Err(Failure { code: Some("WebPage".to_string()), ..Failure::new(Cause::Status(404), text) });
        }
        let kept = share.map(|mut share| {
            share.shrink(head.len() as u64);
            Head { bytes: head.into(), _share: Arc::new(share) }
        });
        let first = self.link.known.with(|known| known.first(key, &facts, date));
        first.map_err(Failure::changed)?;
        Ok((facts, kept))
    }

    /// Probes objects, many at once.
    pub(super) async fn probe_all(
        &self,
        which: Vec<usize>,
        locations: &[&Location],
        access: Access,
        answers: &mut [ProbeAnswer],
    ) {
        let one = |i: usize| async move {
            let location = locations[i];
            let key = match self.key(location) {
                Ok(key) => key,
                Err(error) => return (i, Err(error)),
            };
            let opened = self.probe(key, access).await.map(|(facts, head)| {
                if let Some(head) = &head {
                    self.keep_header(key, &head.bytes);
                }
                self.object(location, key, facts, head)
            });
            (i, opened.map_err(|failure| self.link.error(&failure, location)))
        };
        let mut left = which.into_iter();
        let mut flying: FuturesUnordered<_> = left.by_ref().take(PARALLEL).map(one).collect();
        while let Some((i, opened)) = flying.next().await {
            answers[i] = Some(opened);
            flying.extend(left.next().map(one));
        }
    }

    /// The same for one object; repeats the request if a web server reports it as absent, as for many
    /// ([`RemoteStore::ask_again`]).
    pub(super) async fn probe_twice(&self, key: &str, access: Access) -> Result<Result<Probed, Failure>> {
        match self.probe(key, access).await {
            Err(failure) if failure.is_absence() && !self.link.client.lists() => {
                let Some(serves) = self.serves_its_objects(key) else { return Ok(Err(failure)) };
                let (serves, again) = join(serves, self.probe(key, access)).await;
                serves.map(|()| again)
            }
            answer => Ok(answer),
        }
    }

    /// Repeats the requests for objects that a web server reports as absent: absent chunks have fill values, and a
    /// proxy may have sent the 404. In between, the server must return a known object, if there is one.
    pub(super) async fn ask_again(&self, locations: &[&Location], access: Access, answers: &mut [ProbeAnswer]) {
        let is_absent = |answer: &ProbeAnswer| matches!(answer, Some(Err(error)) if error.kind == Kind::NotFound);
        let absent: Vec<usize> = (0..answers.len()).filter(|i| is_absent(&answers[*i])).collect();
        let Some(Ok(key)) = absent.first().map(|i| self.key(locations[*i])) else { return };
        match self.serves_its_objects(key) {
            Some(serves) => {
                if let Err(error) = serves.await {
                    absent.into_iter().for_each(|i| answers[i] = Some(Err(error.clone())));
                    return;
                }
            }
            None => tokio::time::sleep(self.link.pace.backoff(0)).await,
        }
        self.probe_all(absent, locations, access, answers).await;
    }

    /// Requests the known object that is nearest to a key: an error unless it still exists unchanged. `None` if none is
    /// known.
    pub(super) fn serves_its_objects(&self, key: &str) -> Option<impl Future<Output = Result<()>>> {
        let (known, facts) = self.link.known.with(|known| known.nearest(key))?;
        Some(async move { self.is_still(&known, facts).await.map_err(|failure| failure.at(&self.location(&known))) })
    }

    /// Requests one byte of a known object: fails unless it still exists unchanged.
    pub(super) async fn is_still(&self, key: &str, facts: ObjectFacts) -> Result<(), Failure> {
        self.link.reading(key, Some(&facts)).still().await
    }

    pub(super) fn open_known(&self, location: &Location) -> Result<Option<Box<dyn Source>>> {
        let key = self.key(location)?;
        let detail = match self.look_up(key) {
            KnownName::Object(facts) => {
                let head = self.heads.with(|heads| heads.get(key).cloned()).flatten();
                return Ok(Some(self.object(location, key, facts, head)));
            }
            KnownName::Unknown => return Ok(None),
            KnownName::Newer => return Err(Failure::changed(NEWER).at(location)),
            KnownName::Absent => Error::new(Kind::NotFound, "expected an object, found nothing"),
            KnownName::Folder => Error::new(Kind::NotAFile, "expected an object, found a folder"),
        };
        Err(detail.at(location))
    }
}

/// Whether a file starts with a header that is read when the dataset is opened.
fn has_header(key: &str) -> bool {
    key.ends_with(".safetensors")
}

/// Whether an answer is an HTML page instead of the requested file.
fn is_page(key: &str, head: &[u8]) -> bool {
    let start = head.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(0);
    let is = |tag: &[u8]| head.get(start..start + tag.len()).is_some_and(|found| found.eq_ignore_ascii_case(tag));
    (is(b"<!doctype html") || is(b"<html")) && !key.ends_with(".html") && !key.ends_with(".htm")
}
