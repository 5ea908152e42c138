//! Datasets of the Hugging Face hub: one listing at a pinned commit, one redirect per file and hour, then ranges.

use std::ops::Range;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use reqwest::Url;
use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderName};
use serde::Deserialize;

use super::pace::Pace;
use super::resolved::{ResolvedFiles, WantedBytes};
use super::wire::Wire;
use super::{Answer, Client, Expected, ListedObject, Listing, PAGE, PAGES, Tag, possible};
use crate::address::{StoreUrl, name_of, path_of};
use crate::credentials;
use crate::failure::{Cause, Failure};
use crate::options::{ProviderSettings, RequestLimits, Secret};
use crate::runtime::PerProcess;
use actshard_core::threads::ForkSafe;

/// A client of one dataset.
#[derive(Debug)]
pub struct HubClient {
    /// May contain a password.
    endpoint: Secret,
    id: String,
    wanted: String,
    token: Option<Secret>,
    offline: bool,
    limits: Arc<RequestLimits>,
    pace: Arc<Pace>,
    places: PerProcess<Arc<ResolvedFiles>>,
    /// The commit of all requests. Kept across a fork, unlike connections.
    commit: ForkSafe<Option<String>>,
}

#[derive(Deserialize)]
struct RevisionInfo {
    sha: String,
}

#[derive(Deserialize)]
struct TreeEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    oid: String,
    size: Option<u64>,
    lfs: Option<LfsPointer>,
}

#[derive(Deserialize)]
struct LfsPointer {
    oid: String,
    size: u64,
}

fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|b| b.is_ascii_hexdigit())
}

impl HubClient {
    /// A client of the dataset of an address; `pinned` is the commit of a pickled store.
    pub fn new(address: &StoreUrl, settings: &ProviderSettings, pinned: Option<String>, pace: Arc<Pace>) -> HubClient {
        let found = credentials::hub::find(settings, &credentials::variable);
        let pinned = pinned.or_else(|| is_commit(&address.revision).then(|| address.revision.clone()));
        HubClient {
            endpoint: Secret(found.endpoint),
            id: address.bucket.clone(),
            wanted: address.revision.clone(),
            token: found.token,
            offline: found.offline,
            limits: Arc::new(settings.limits.clone()),
            pace,
            places: PerProcess::default(),
            commit: ForkSafe::new(pinned),
        }
    }

    fn places(&self) -> Result<Arc<ResolvedFiles>, Failure> {
        self.ready()?;
        self.places.get(|| {
            let wire = Wire::new(Arc::clone(&self.limits), Arc::clone(&self.pace))?.naming_reasons();
            Ok(Arc::new(ResolvedFiles::new(wire)))
        })
    }

    fn headers(&self) -> Vec<(HeaderName, String)> {
        let mut made = vec![(ACCEPT_ENCODING, "identity".to_string())];
        made.extend(self.token.as_ref().map(|token| (AUTHORIZATION, format!("Bearer {}", token.0))));
        made
    }

    /// A GET of the hub's interface: the body and the URL of the next page.
    async fn api(&self, url: &str) -> Result<(Vec<u8>, Option<String>), Failure> {
        let places = self.places()?;
        let base = Url::parse(url).map_err(|_| Failure::new(Cause::Refused, "HF_ENDPOINT: expected a URL"))?;
        let mut at = base.clone();
        for _ in 0..3 {
            let answer = places.wire().send(Wire::get(at.as_str(), &self.headers())?).await?;
            if answer.status().is_redirection() {
                // A dataset that was renamed.
                let to = Wire::header(answer.headers(), "location").unwrap_or_default();
                let to = at.join(to).map_err(|_| Failure::new(Cause::Protocol, "a redirect to an invalid URL"))?;
                if to.origin() != base.origin() {
                    return Err(Failure::new(Cause::Protocol, "a redirect of the hub to another host"));
                }
                at = to;
                continue;
            }
            let next = Wire::header(answer.headers(), "link").and_then(next_page).and_then(|next| at.join(&next).ok());
            if next.as_ref().is_some_and(|next| next.origin() != base.origin()) {
                return Err(Failure::new(Cause::Protocol, "a next page on another host"));
            }
            return Ok((places.wire().body(answer, PAGE).await?, next.map(String::from)));
        }
        Err(Failure::new(Cause::Protocol, "too many redirects"))
    }

    /// The commit of all requests; the first call requests it.
    async fn commit(&self) -> Result<String, Failure> {
        if let Some(commit) = self.revision() {
            return Ok(commit);
        }
        let url = format!("{}/api/datasets/{}/revision/{}", self.endpoint.0, self.id, name_of(&self.wanted));
        let (body, _) = self.api(&url).await?;
        let info: RevisionInfo = parsed(&body)?;
        if !is_commit(&info.sha) {
            return Err(Failure::new(Cause::Protocol, "the hub's answer names no commit"));
        }
        // Another thread may have been faster: its commit stays, so that all requests use the same one.
        let first = self.commit.with(|commit| commit.get_or_insert_with(|| info.sha.clone()).clone());
        Ok(first.unwrap_or(info.sha))
    }
}

fn parsed<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, Failure> {
    serde_json::from_slice(body).map_err(|error| {
        let text = format!("an answer of the hub that is not the expected JSON: {error}");
        Failure::new(Cause::Protocol, text)
    })
}

/// The URL of `Link: <URL>; rel="next"`.
fn next_page(link: &str) -> Option<String> {
    link.split(',').find_map(|part| {
        let (url, rest) = part.trim().strip_prefix('<')?.split_once('>')?;
        rest.contains("rel=\"next\"").then(|| url.to_string())
    })
}

impl Client for HubClient {
    fn get<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        expected: &'a Expected,
    ) -> BoxFuture<'a, Result<Answer, Failure>> {
        async move {
            let (places, commit) = (self.places()?, self.commit().await?);
            let url = format!("{}/datasets/{}/resolve/{commit}/{}", self.endpoint.0, self.id, path_of(key));
            let wanted = WantedBytes { url: &url, token: self.token.as_ref(), range, expected, own_etag: false };
            places.get(key, &wanted).await
        }
        .boxed()
    }

    fn list<'a>(&'a self, folder: &'a str, _: bool) -> BoxFuture<'a, Result<Listing, Failure>> {
        async move {
            let commit = self.commit().await?;
            let below = if folder.is_empty() { String::new() } else { format!("/{}", path_of(folder)) };
            let mut url = format!("{}/api/datasets/{}/tree/{commit}{below}", self.endpoint.0, self.id);
            url.push_str("?recursive=true&expand=false");
            let mut listing = Listing { deep: true, ..Listing::default() };
            for _ in 0..PAGES {
                let asked = url.clone();
                self.pace.count_listing();
                let (body, next) = match self.api(&url).await {
                    Err(failure)
                        if failure.status() == Some(404) && failure.code.as_deref() == Some("EntryNotFound") =>
                    {
                        return Ok(listing);
                    }
                    answer => answer?,
                };
                for entry in parsed::<Vec<TreeEntry>>(&body)? {
                    match entry.kind.as_str() {
                        "file" => {
                            let (oid, size) = match entry.lfs {
                                Some(lfs) => (lfs.oid, Some(lfs.size)),
                                None => (entry.oid, entry.size),
                            };
                            let unsized_file = || Failure::new(Cause::Protocol, "a listing of the hub without a size");
                            let size = possible(size.ok_or_else(unsized_file)?)?;
                            let tag = Tag::new(Some(oid.trim_start_matches("sha256:")), None);
                            listing.objects.push(ListedObject { key: entry.path, size, tag });
                        }
                        "directory" => listing.folders.push(entry.path),
                        _ => {}
                    }
                }
                match next {
                    Some(next) if next == asked => break,
                    Some(next) => url = next,
                    None => return Ok(listing),
                }
            }
            Err(Failure::new(Cause::Protocol, "a listing that does not end"))
        }
        .boxed()
    }

    fn revision(&self) -> Option<String> {
        self.commit.with(|commit| commit.clone()).flatten()
    }

    fn credentials(&self) -> String {
        if self.token.is_some() { "a token of the hub" } else { "no token" }.to_string()
    }

    fn origin(&self) -> Result<String, Failure> {
        Ok(self.endpoint.0.clone())
    }

    fn ready(&self) -> Result<(), Failure> {
        if self.offline {
            let text = "HF_HUB_OFFLINE is set, and this is not in the cache: no request may be made. Data read at an earlier \
                        commit opens as hf://datasets/ORG/NAME@COMMIT";
            return Err(Failure::new(Cause::Refused, text));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_linked() {
        let link = "<https://h/a?cursor=x>; rel=\"prev\", <https://h/a?cursor=y>; rel=\"next\"";
        assert_eq!(next_page(link).as_deref(), Some("https://h/a?cursor=y"));
        assert_eq!(next_page("<https://h/a>; rel=\"last\""), None);
    }
}
