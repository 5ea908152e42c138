//! Failures of requests: what failed, whether another attempt may help, and one line for the user.

use std::error::Error as StdError;
use std::fmt;
use std::time::Duration;

use actshard_core::location::Location;
use actshard_core::{Error, Kind};
use object_store::client::{HttpError, HttpErrorKind};
use reqwest::header::HeaderMap;

use crate::options::LONGEST;

/// The kind of a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// The server responded with this status.
    Status(u16),
    /// No connection.
    Connect,
    /// The connection broke or stalled.
    Broken,
    /// The object is not the one that was opened.
    Changed,
    /// The object that was opened no longer exists.
    Gone,
    /// The answer contradicts the request.
    Protocol,
    /// A request that cannot be made, for example without credentials.
    Refused,
    /// The store cannot do this.
    Unsupported,
}

/// A failed request. Contains no URL: those may be signed.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Its kind.
    pub cause: Cause,
    /// The server's error code: S3's `<Code>`, the hub's `X-Error-Code`.
    pub code: Option<String>,
    /// The details, in one line.
    pub text: String,
    /// The time that the server asks to wait.
    pub after: Option<Duration>,
    /// The region of the bucket, if the server reported it.
    pub region: Option<String>,
    /// The object's size, if the server reported it.
    pub size: Option<u64>,
    /// Whether it is from another host, after a redirect.
    pub is_away: bool,
    /// Whether the service names its reasons, but gave none: the answer is another server's, for example a proxy's.
    pub is_foreign: bool,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Cause::Status(status) = self.cause {
            write!(f, "{status}")?;
            if let Some(code) = &self.code {
                write!(f, " {code}")?;
            }
            if !self.text.is_empty() {
                f.write_str(": ")?;
            }
        }
        f.write_str(&self.text)
    }
}

impl StdError for Failure {}

impl Failure {
    /// A failure without a status.
    pub fn new(cause: Cause, text: impl Into<String>) -> Failure {
        let (code, after, region, size) = (None, None, None, None);
        Failure { cause, code, text: text.into(), after, region, size, is_away: false, is_foreign: false }
    }

    /// An object that is not the one that was opened.
    pub fn changed(text: impl fmt::Display) -> Failure {
        Failure::new(Cause::Changed, format!("was replaced after it was opened: {text}"))
    }

    /// An answer with a status other than success. `hide` takes secrets out of its texts before they are cut.
    pub fn of_answer(status: u16, headers: &HeaderMap, body: &[u8], hide: impl Fn(&str) -> String) -> Failure {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let body = String::from_utf8_lossy(body);
        let is_word = |code: &String| {
            (1..=64).contains(&code.len()) && code.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        };
        let code = header("x-error-code").or_else(|| header("x-ms-error-code")).map(str::to_string);
        let text =
            header("x-error-message").map(str::to_string).or_else(|| short_between(&body, "<Message>", "</Message>"));
        let text = text.unwrap_or_else(|| {
            if body.trim_start().starts_with('<') {
                String::new()
            } else {
                body.lines().next().unwrap_or_default().to_string()
            }
        });
        Failure {
            cause: Cause::Status(status),
            code: code.or_else(|| short_between(&body, "<Code>", "</Code>")).map(|code| hide(&code)).filter(is_word),
            text: shown(&hide(&text)),
            after: wait_of(status, headers),
            region: header("x-amz-bucket-region")
                .map(str::to_string)
                .or_else(|| short_between(&body, "<Region>", "</Region>")),
            size: header("content-range")
                .and_then(|range| range.strip_prefix("bytes */")?.parse().ok())
                .or_else(|| short_between(&body, "<ActualObjectSize>", "</ActualObjectSize>")?.parse().ok()),
            is_away: false,
            is_foreign: false,
        }
    }

    /// An error of the HTTP client.
    pub fn of_transport(error: &HttpError) -> Failure {
        if let Some(own) = own(error) {
            return own;
        }
        let cause = match error.kind() {
            HttpErrorKind::Connect => Cause::Connect,
            _ => Cause::Broken,
        };
        // The innermost source is the most specific: "Connection refused", "dns error".
        let mut texts = vec![error.to_string()];
        let mut source = error.source();
        while let Some(inner) = source {
            texts.push(inner.to_string());
            source = inner.source();
        }
        let text = match (error.kind(), cause) {
            (HttpErrorKind::Timeout, Cause::Connect) => "no connection in time".to_string(),
            (HttpErrorKind::Timeout, _) => "no answer in time".to_string(),
            _ => certificates(&texts).unwrap_or_else(|| texts.pop().unwrap_or_default()),
        };
        Failure::new(cause, shown(&text))
    }

    /// The innermost text of an error: the others describe where it occurred. May be long, and contain options.
    pub fn chain(error: &(dyn StdError + 'static)) -> String {
        let mut last = error;
        while let Some(inner) = last.source() {
            last = inner;
        }
        last.to_string()
    }

    /// An error of object_store.
    pub fn of_store(error: &object_store::Error) -> Failure {
        if let Some(own) = own(error) {
            return own;
        }
        let mut source: Option<&(dyn StdError + 'static)> = Some(error);
        let mut last = error.to_string();
        while let Some(inner) = source {
            if let Some(http) = inner.downcast_ref::<HttpError>() {
                return Failure::of_transport(http);
            }
            last = inner.to_string();
            source = inner.source();
        }
        match error {
            object_store::Error::InvalidPath { .. } => {
                let text =
                    format!("a key that cannot be read, for example with an empty name between two slashes: {last}");
                Failure::new(Cause::Protocol, shown(&text))
            }
            _ => Failure::new(Cause::Protocol, shown(&last)),
        }
    }

    /// The status, if the server responded with one.
    pub fn status(&self) -> Option<u16> {
        match self.cause {
            Cause::Status(status) => Some(status),
            _ => None,
        }
    }

    /// Whether another attempt may succeed.
    pub fn is_temporary(&self) -> bool {
        match self.cause {
            Cause::Status(status) => {
                matches!(status, 408 | 429 | 500 | 502 | 503 | 504 | 509)
                    || matches!(self.code.as_deref(), Some("RequestTimeout" | "SlowDown" | "InternalError"))
            }
            Cause::Connect | Cause::Broken => !self.text.contains("certificate"),
            Cause::Changed | Cause::Gone | Cause::Protocol | Cause::Refused | Cause::Unsupported => false,
        }
    }

    /// Whether the credentials or the signed URL are too old: new ones may help, once.
    pub fn is_expired(&self) -> bool {
        let code = self.code.as_deref().unwrap_or_default();
        matches!(code, "ExpiredToken" | "ExpiredTokenException" | "RequestExpired" | "TokenRefreshRequired")
    }

    /// Whether the service reports that the object does not exist. Reports of a missing bucket or dataset, and answers
    /// of a proxy, do not count: absent chunks have fill values, so a wrong answer would be read as rows.
    pub fn is_absence(&self) -> bool {
        matches!(self.status(), Some(404 | 410))
            && !self.is_foreign
            && matches!(
                self.code.as_deref(),
                None | Some("NoSuchKey" | "BlobNotFound" | "PathNotFound" | "EntryNotFound" | "WebPage")
            )
    }

    /// Whether it is a 404 or 410 without an error code.
    pub fn is_unnamed(&self) -> bool {
        matches!(self.status(), Some(404 | 410)) && self.code.is_none()
    }

    /// Whether the server denies access to a name. The name may not exist: servers that deny listing do not distinguish
    /// the two.
    pub fn is_denial(&self) -> bool {
        let credentials = [
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "InvalidToken",
            "RequestTimeTooSkewed",
            "AuthenticationFailed",
            "GatedRepo",
        ];
        let code = self.code.as_deref().unwrap_or_default();
        self.status() == Some(403) && !self.is_away && !self.is_expired() && !credentials.contains(&code)
    }

    /// The error about a location.
    pub fn at(&self, location: &Location) -> Error {
        let kind = match self.cause {
            _ if self.is_absence() => Kind::NotFound,
            Cause::Changed | Cause::Gone | Cause::Status(412) => Kind::Format,
            Cause::Unsupported => Kind::Unsupported,
            _ => Kind::Access,
        };
        let detail = match self.cause {
            _ if self.is_absence() => self.absence().to_string(),
            Cause::Status(412) => "was replaced after it was opened".to_string(),
            Cause::Status(status) => format!("cannot read: {self}{}", self.advice(status)),
            Cause::Connect => format!("cannot connect: {self}"),
            Cause::Broken => format!("cannot read: {self}"),
            _ => self.to_string(),
        };
        Error::new(kind, detail).at(location)
    }

    /// What the server sent in place of an object.
    fn absence(&self) -> &'static str {
        match (self.status(), self.code.as_deref()) {
            (_, Some("WebPage")) => "expected an object, found a web page",
            (Some(410), _) => "expected an object, found nothing: it was removed (410)",
            _ => "expected an object, found nothing",
        }
    }

    /// The error about a location that was to be written.
    pub fn writing(&self, location: &Location) -> Error {
        let (kind, text) = match (self.cause, self.code.as_deref()) {
            (Cause::Status(403), Some("InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidToken")) => {
                (Kind::Access, format!("cannot write: {self}; check the credentials"))
            }
            (Cause::Status(403), _) => {
                (Kind::Access, format!("cannot write: {self}; the credentials may not write to this bucket"))
            }
            (Cause::Status(404), Some("NoSuchUpload")) => (
                Kind::Access,
                format!(
                    "cannot write: {self}; another process writes the same object, or removed unfinished uploads: run it again"
                ),
            ),
            (Cause::Status(404), _) => (Kind::Access, format!("cannot write: {self}; create the bucket first")),
            (Cause::Status(412), _) => {
                (Kind::Access, format!("cannot write: {self}; another process wrote it meanwhile"))
            }
            (Cause::Status(status), _) => (Kind::Access, format!("cannot write: {self}{}", self.advice(status))),
            (Cause::Broken, _) => (Kind::Access, format!("cannot write: {self}")),
            _ => return self.at(location),
        };
        Error::new(kind, text).at(location)
    }

    /// Advice for a status.
    fn advice(&self, status: u16) -> &'static str {
        match (status, self.code.as_deref()) {
            (_, Some("GatedRepo")) => {
                "; request access on the dataset's page, and set HF_TOKEN or storage_options={\"token\": ...}"
            }
            (_, Some("RepoNotFound" | "RepositoryNotFound")) => {
                "; check the name; for a private dataset set HF_TOKEN or storage_options={\"token\": ...}"
            }
            (_, Some("ExpiredToken" | "RequestExpired")) => "; renew the credentials",
            (_, Some("RequestTimeTooSkewed")) => "; set this machine's clock",
            (301 | 307 | 308 | 400, Some("PermanentRedirect" | "AuthorizationHeaderMalformed")) => {
                "; set storage_options={\"region\": ...} to the bucket's region"
            }
            (301..=308, _) => "; the server redirects elsewhere: check the endpoint and the region",
            _ if self.is_away => "; the host that the server redirects to refused: try again later",
            (401, _) | (403, Some("InvalidAccessKeyId" | "SignatureDoesNotMatch" | "InvalidToken")) => {
                "; check the credentials"
            }
            (403, _) => {
                "; the credentials may not read this object, or it does not exist and they may not list the bucket"
            }
            (416, _) => "; the object is shorter than when it was listed",
            (404 | 410, None) => "; not an answer of the service itself: check the endpoint, and proxies before it",
            (404, Some("NoSuchBucket" | "ContainerNotFound")) => "; check the name of the bucket",
            (429, _) => "; fewer requests are allowed: wait, or use credentials with a higher limit",
            (500..=599, _) => "; the server failed repeatedly: try again later",
            _ => "",
        }
    }
}

/// A [`Failure`] among the sources of an error.
fn own(error: &(dyn StdError + 'static)) -> Option<Failure> {
    let mut source = Some(error);
    while let Some(inner) = source {
        if let Some(failure) = inner.downcast_ref::<Failure>() {
            return Some(failure.clone());
        }
        source = inner.source();
    }
    None
}

fn certificates(texts: &[String]) -> Option<String> {
    let found = texts.iter().rev().find(|text| {
        let text = text.to_ascii_lowercase();
        text.contains("certificate") || text.contains("unknownissuer") || text.contains("no native root")
    })?;
    Some(format!(
        "{found}; the server's certificate is not trusted here: install the package ca-certificates, or set SSL_CERT_FILE"
    ))
}

/// The text between two others, the first of each.
pub(crate) fn between<'a>(text: &'a str, start: &str, end: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(start)?;
    rest.split_once(end).map(|(found, _)| found)
}

/// As [`between`], if it is short.
fn short_between(text: &str, start: &str, end: &str) -> Option<String> {
    between(text, start, end).filter(|found| found.len() <= 300).map(str::to_string)
}

/// The first part of a text, without the queries of URLs, which may be signatures.
pub fn shown(text: &str) -> String {
    let mut made = String::new();
    for word in text.split_whitespace().take(40) {
        let word = match word.split_once('?') {
            Some((url, _)) if word.contains("://") || word.contains('/') => url,
            _ => word,
        };
        if !made.is_empty() {
            made.push(' ');
        }
        made.extend(word.chars().take(120));
    }
    made
}

/// How long the server asks to wait: `RateLimit` of the hub when nothing is left, else `Retry-After` in seconds.
fn wait_of(status: u16, headers: &HeaderMap) -> Option<Duration> {
    if !matches!(status, 429 | 503) {
        return None;
    }
    let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let limit = header("ratelimit").and_then(|text| {
        let part = |name: &str| text.split(';').find_map(|part| part.trim().strip_prefix(name)?.parse::<u64>().ok());
        (part("r=") == Some(0)).then(|| part("t=").map(|t| t.saturating_add(1))).flatten()
    });
    let seconds = limit.or_else(|| header("retry-after")?.trim().parse().ok())?;
    Some(Duration::from_secs(seconds).min(LONGEST))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs.iter().map(|(k, v)| (k.parse().unwrap(), v.parse().unwrap())).collect()
    }

    #[test]
    fn a_server_may_ask_to_wait() {
        let limit = headers(&[("ratelimit", "\"resolvers\";r=0;t=120"), ("retry-after", "3")]);
        assert_eq!(wait_of(429, &limit), Some(Duration::from_secs(121)));
        let left = headers(&[("ratelimit", "\"api\";r=5;t=120"), ("retry-after", "3")]);
        assert_eq!(wait_of(429, &left), Some(Duration::from_secs(3)));
        assert_eq!(wait_of(200, &left), None);
    }

    #[test]
    fn a_line_has_the_status_the_code_and_what_to_do_and_no_secret() {
        let body =
            b"<Error><Code>AccessDenied</Code><Message>Denied\nhttp://h/k?X-Amz-Signature=abc x</Message></Error>";
        let failure = Failure::of_answer(403, &HeaderMap::new(), body, str::to_string);
        let error = failure.at(&Location::object("s3://bucket", "key"));
        assert_eq!(error.kind, Kind::Access);
        let line = error.to_string();
        assert!(line.starts_with("s3://bucket/key: cannot read: 403 AccessDenied: Denied http://h/k x; "), "{line}");
    }
}
