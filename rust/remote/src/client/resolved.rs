//! The locations of URLs after their redirects, remembered until the signed URL expires. Tokens are sent to the first
//! host only.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use object_store::client::HttpResponse;
use reqwest::Url;
use reqwest::header::{ACCEPT_ENCODING, AUTHORIZATION, HeaderName, IF_MATCH, RANGE};

use futures_util::StreamExt;

use super::times::{ServerDate, seconds_of};
use super::wire::Wire;
use super::{Answer, Expected, Tag};
use crate::failure::{Cause, Failure};
use crate::options::{LONGEST, Secret};
use actshard_core::threads::Lock;

/// Redirects that are followed.
const HOPS: usize = 5;
/// A signed URL is renewed this long before it expires.
const EARLY: Duration = Duration::from_secs(30);
/// A URL that has just worked is used at least this long.
const LEAST: Duration = Duration::from_secs(60);
/// The assumed lifetime of a redirect to another host that does not state one.
const UNKNOWN: Duration = Duration::from_secs(600);

/// The place of an object.
#[derive(Clone, Debug)]
struct Resolved {
    url: Secret,
    /// Whether it is on the host that the token belongs to.
    home: bool,
    until: Option<Instant>,
    /// The tag from the first host, for hosts whose ETags are not the object's.
    linked: Option<Tag>,
    /// The ETag of the first answer from this place.
    seen: Arc<OnceLock<Tag>>,
}

impl Resolved {
    fn is_valid(&self) -> bool {
        self.until.is_none_or(|until| Instant::now() < until)
    }
}

type ResolvedSlot = Arc<tokio::sync::Mutex<Option<Resolved>>>;

/// The places of a process's objects.
#[derive(Debug)]
pub struct ResolvedFiles {
    wire: Wire,
    /// Not locked while a request waits.
    by_key: Lock<HashMap<String, ResolvedSlot>>,
}

/// A request for a range.
pub struct WantedBytes<'a> {
    /// The URL before redirects.
    pub url: &'a str,
    /// The token for its host.
    pub token: Option<&'a Secret>,
    /// The bytes.
    pub range: Range<u64>,
    /// The known facts about the object.
    pub expected: &'a Expected,
    /// Whether the ETag of answers is the object's, so that `If-Match` helps.
    pub own_etag: bool,
}

impl ResolvedFiles {
    /// No places known.
    pub fn new(wire: Wire) -> ResolvedFiles {
        ResolvedFiles { wire, by_key: Lock::default() }
    }

    /// The connections.
    pub fn wire(&self) -> &Wire {
        &self.wire
    }

    /// Requests a range, directly from its place if that is known. One request at a time finds the place of a key.
    pub async fn get(&self, key: &str, wanted: &WantedBytes<'_>) -> Result<Answer, Failure> {
        let slot = {
            let mut by_key = self.by_key.lock();
            Arc::clone(by_key.entry(key.to_string()).or_default())
        };
        let mut place = slot.lock().await;
        if let Some(known) = place.clone().filter(Resolved::is_valid) {
            drop(place);
            match self.at(&known, wanted).await {
                Err(failure) if !known.home && is_refused(&failure) => {
                    // The signed URL may have expired, or its host failed: get a new URL, once.
                    place = slot.lock().await;
                    if let Some(newer) = place.clone().filter(|newer| newer.url != known.url) {
                        drop(place);
                        return self.at(&newer, wanted).await;
                    }
                }
                answer => return answer,
            }
        }
        let followed = match self.follow(wanted).await {
            // A URL that expired before it was used, or a fault of its host: get a new URL, once.
            Err(failure) if failure.is_away && is_refused(&failure) && place.is_none() => self.follow(wanted).await,
            followed => followed,
        };
        *place = followed.as_ref().ok().map(|(found, _)| found.clone());
        drop(place);
        let (found, answer) = followed?;
        answer_of(answer, &found, wanted)
    }

    async fn at(&self, place: &Resolved, wanted: &WantedBytes<'_>) -> Result<Answer, Failure> {
        let request = Wire::get(&place.url.0, &headers(wanted, place.home))?;
        let sent = self.wire.send(request).await;
        let answer = sent.map_err(|failure| Failure { is_away: !place.home, ..failure })?;
        if answer.status().is_redirection() {
            // It moved again: follow it once, without remembering.
            let (found, answer) = self.follow(wanted).await?;
            return answer_of(answer, &found, wanted);
        }
        answer_of(answer, place, wanted)
    }

    /// Follows redirects from the first URL to an answer.
    async fn follow(&self, wanted: &WantedBytes<'_>) -> Result<(Resolved, HttpResponse), Failure> {
        let invalid = |_| Failure::new(Cause::Protocol, "a redirect to an invalid URL");
        let mut url = Url::parse(wanted.url).map_err(invalid)?;
        let home = url.origin();
        let (mut linked, mut at_home) = (None, true);
        for _ in 0..=HOPS {
            let request = Wire::get(url.as_str(), &headers(wanted, at_home))?;
            let answer = self.wire.send(request).await.map_err(|failure| Failure { is_away: !at_home, ..failure })?;
            if at_home {
                let header = |name| Wire::header(answer.headers(), name);
                linked = header("x-linked-etag").map(|etag| Tag::new(Some(etag), None)).or(linked);
            }
            if !answer.status().is_redirection() {
                // A URL that has just worked is used for a while, even if its lifetime is shorter.
                let valid = lifetime(&url, Wire::header(answer.headers(), "date")).max(LEAST);
                let until = (!at_home).then(|| Instant::now() + valid - EARLY.min(valid / 4));
                let place =
                    Resolved { url: Secret(url.into()), home: at_home, until, linked, seen: Arc::new(OnceLock::new()) };
                return Ok((place, answer));
            }
            let to = Wire::header(answer.headers(), "location");
            let to = to.ok_or_else(|| Failure::new(Cause::Protocol, "a redirect without a location"))?;
            let next = url.join(to).map_err(invalid)?;
            if next.origin() == url.origin() && next.path() == format!("{}/", url.path()) {
                // A web server redirects to a folder this way; the next answer would be an HTML page.
                return Err(Failure::new(Cause::Status(404), "a folder of a web server"));
            }
            if !matches!(next.scheme(), "http" | "https") {
                return Err(Failure::new(Cause::Protocol, "a redirect to another protocol than http"));
            }
            if url.scheme() == "https" && next.scheme() != "https" {
                return Err(Failure::new(Cause::Protocol, "a redirect from https to http, which is not followed"));
            }
            // After a redirect to another host, the token is not sent again, even if that host redirects back.
            at_home = at_home && next.origin() == home;
            url = next;
        }
        Err(Failure::new(Cause::Protocol, format!("more than {HOPS} redirects")))
    }
}

/// Whether a host refused a signed URL.
fn is_refused(failure: &Failure) -> bool {
    matches!(failure.status(), Some(400 | 401 | 403 | 410))
}

fn headers(wanted: &WantedBytes<'_>, home: bool) -> Vec<(HeaderName, String)> {
    let last = wanted.range.end.saturating_sub(1).max(wanted.range.start);
    // Ranges of a compressed answer would be ranges of other bytes.
    let mut made = vec![(ACCEPT_ENCODING, "identity".to_string())];
    if !wanted.range.is_empty() {
        made.push((RANGE, format!("bytes={}-{last}", wanted.range.start)));
    }
    if let Some(token) = wanted.token.filter(|_| home) {
        made.push((AUTHORIZATION, format!("Bearer {}", token.0)));
    }
    if let Some(tag) = wanted.expected.tag.as_ref().filter(|_| wanted.own_etag).and_then(Tag::if_match) {
        made.push((IF_MATCH, tag));
    }
    made
}

/// How long a signed URL is valid, by the clock of the server that answered: this machine's may be wrong.
fn lifetime(url: &Url, date: Option<&str>) -> Duration {
    let number = |name: &str| url.query_pairs().find(|(key, _)| key == name)?.1.parse::<u64>().ok();
    if let Some(seconds) = number("X-Amz-Expires") {
        return Duration::from_secs(seconds).min(LONGEST);
    }
    let here = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = date.and_then(seconds_of).map_or_else(here, Duration::from_secs);
    number("Expires").map_or(UNKNOWN, |end| Duration::from_secs(end).saturating_sub(now).min(LONGEST))
}

/// The range, size and tag of an answer.
fn answer_of(answer: HttpResponse, place: &Resolved, wanted: &WantedBytes<'_>) -> Result<Answer, Failure> {
    let protocol = |text: &str| Failure::new(Cause::Protocol, text);
    let header = |name: &str| Wire::header(answer.headers(), name);
    if header("content-encoding").is_some_and(|encoding| !encoding.eq_ignore_ascii_case("identity"))
        && !wanted.url.split('?').next().unwrap_or_default().ends_with("gz")
    {
        return Err(protocol("the server compressed the answer, so that ranges are not those of the object"));
    }
    let (range, size) = match answer.status().as_u16() {
        206 => {
            let text = header("content-range").unwrap_or_default();
            parse_range(text).ok_or_else(|| protocol("a partial answer without a valid Content-Range"))?
        }
        200 => {
            let size: Option<u64> = header("content-length").and_then(|text| text.parse().ok());
            let size =
                size.ok_or_else(|| protocol("an answer without a length: the server must support byte ranges"))?;
            if wanted.range.start > 0 {
                return Err(protocol("the server ignores byte ranges: download the dataset first"));
            }
            (0..size.min(wanted.range.end), size)
        }
        status => return Err(protocol(&format!("an answer with status {status}"))),
    };
    let own = Tag::new(header("etag"), header("last-modified").map(str::to_string));
    if !place.seen.get_or_init(|| own.clone()).agrees(&own) {
        return Err(Failure::changed("the server's ETag has changed"));
    }
    let tag = match (&place.linked, wanted.own_etag) {
        (Some(linked), false) => linked.clone(),
        (None, false) => wanted.expected.tag.clone().unwrap_or(own),
        (_, true) => own,
    };
    // A commit of the hub does not change.
    let date = answer.extensions().get::<ServerDate>().copied().filter(|_| wanted.own_etag);
    let body = answer.into_body().bytes_stream();
    let body = body.map(|chunk| chunk.map_err(|error| Failure::of_transport(&error)));
    Ok(Answer { tag, size, date, range, body: Box::pin(body) })
}

/// Parses `bytes FIRST-LAST/SIZE`.
fn parse_range(text: &str) -> Option<(Range<u64>, u64)> {
    let (range, size) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last, size): (u64, u64, u64) = (first.parse().ok()?, last.parse().ok()?, size.parse().ok()?);
    (first <= last && last < size).then_some((first..last + 1, size))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_answers_are_checked() {
        assert_eq!(parse_range("bytes 0-9/100"), Some((0..10, 100)));
        for text in ["bytes 0-9/*", "bytes 9-0/100", "bytes 0-100/100", "0-9/100", "bytes 0-9", ""] {
            assert_eq!(parse_range(text), None, "{text}");
        }
    }

    #[test]
    fn signed_urls_have_an_end() {
        let url = |query: &str| Url::parse(&format!("https://h/k?{query}")).unwrap();
        assert_eq!(lifetime(&url("X-Amz-Expires=3600&a=b"), None), Duration::from_secs(3600));
        assert_eq!(lifetime(&url("Expires=1"), None), Duration::ZERO);
        assert_eq!(lifetime(&url(&format!("Expires={}", u64::MAX)), None), LONGEST);
        assert_eq!(lifetime(&url("a=b"), None), UNKNOWN);
        // An hour after the server's time, in 1994.
        assert_eq!(
            lifetime(&url("Expires=784115377"), Some("Sun, 06 Nov 1994 08:49:37 GMT")),
            Duration::from_secs(3600)
        );
    }
}
