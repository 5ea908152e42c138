//! The secrets of a request. A server may repeat them in its answer, and error messages show parts of the answer.

use std::collections::HashSet;

use object_store::client::HttpRequest;
use percent_encoding::{NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Headers with secrets.
const HEADERS: &[&str] = &["authorization", "proxy-authorization", "x-amz-security-token", "cookie"];
/// Words of these headers that are not secrets.
const WORDS: &[&str] =
    &["Bearer", "Basic", "Credential", "SignedHeaders", "Signature", "SharedKey", "AWS4-HMAC-SHA256"];
/// Parameters that are not secrets.
const PARAMETERS: &[&str] = &[
    "list-type",
    "prefix",
    "delimiter",
    "continuation-token",
    "start-after",
    "max-keys",
    "encoding-type",
    "marker",
    "maxresults",
    "restype",
    "comp",
    "recursive",
    "expand",
    "cursor",
    "limit",
    "uploadId",
    "partNumber",
    "grant_type",
    "scope",
    "resource",
    "api-version",
];
/// Shorter texts are left: they are parts of ordinary words.
const SHORTEST: usize = 4;
/// Parts of this many bytes of a longer secret are hidden as well: an answer may be cut within it.
const PART: usize = 8;
/// The longest form that is inspected.
const FORM: usize = 64 << 10;
/// The longest secret that is inspected, and the longest text.
const LONGEST: usize = 16 << 10;
/// How JSON and XML write characters that tokens have.
const ESCAPES: &[(&str, &str)] = &[
    ("\\/", "/"),
    ("\\u002b", "+"),
    ("\\u003d", "="),
    ("&#43;", "+"),
    ("&#47;", "/"),
    ("&#61;", "="),
    ("&#x2b;", "+"),
    ("&#x2B;", "+"),
    ("&#x2f;", "/"),
    ("&#x2F;", "/"),
    ("&#x3d;", "="),
    ("&#x3D;", "="),
    ("&amp;", "&"),
    ("&quot;", "\""),
];

/// Secrets of a request, the longest first.
pub struct Spoken(Vec<String>);

impl Spoken {
    /// The secrets of a request: in its headers, its query, and the form that it sends.
    pub fn of(request: &HttpRequest) -> Spoken {
        let mut made = vec![];
        let mut add = |text: &str| {
            made.push(text.to_string());
            made.push(percent_decode_str(text).decode_utf8_lossy().into_owned());
        };
        for name in HEADERS {
            let Some(value) = request.headers().get(*name).and_then(|value| value.to_str().ok()) else { continue };
            let mut before = "";
            for word in value.split([' ', ',', '=', ':']) {
                match before {
                    // Names of headers.
                    "SignedHeaders" => {}
                    // The rest is a date, a region and a service, which error messages may show.
                    "Credential" => add(word.split('/').next().unwrap_or_default()),
                    _ => add(word),
                }
                before = word;
            }
        }
        let form = request.body().as_bytes().filter(|body| request.method().as_str() == "POST" && body.len() <= FORM);
        let form = form.map(|body| String::from_utf8_lossy(body).into_owned()).unwrap_or_default();
        for pair in request.uri().query().unwrap_or_default().split('&').chain(form.split('&')) {
            let (name, value) = pair.split_once('=').unwrap_or(("", pair));
            if !PARAMETERS.contains(&name) {
                add(value);
            }
        }
        let authority = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        if let Some((user, _)) = authority.rsplit_once('@') {
            user.split(':').for_each(&mut add);
        }
        let escaped: Vec<_> = made.iter().map(|text| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string()).collect();
        made.extend(escaped);
        made.retain(|text| text.len() >= SHORTEST && !WORDS.contains(&text.as_str()));
        made.sort_unstable_by_key(|text| std::cmp::Reverse(text.len()));
        made.dedup();
        Spoken(made)
    }

    /// A text of the answer without the secrets, whole or in part. For texts that are not cut yet.
    pub fn hide(&self, text: &str) -> String {
        let mut text: String = text.chars().take(LONGEST).collect();
        for (escape, character) in ESCAPES {
            text = text.replace(escape, character);
        }
        let bytes = text.as_bytes();
        let mut secret = vec![false; bytes.len()];
        for whole in &self.0 {
            let part = whole.len().min(PART);
            let parts: HashSet<&[u8]> = whole.as_bytes().windows(part).take(LONGEST).collect();
            for (at, window) in bytes.windows(part).enumerate() {
                if parts.contains(window) {
                    secret[at..at + part].fill(true);
                }
            }
        }
        let mut made = String::new();
        for (at, character) in text.char_indices() {
            if !secret[at] {
                made.push(character);
            } else if at == 0 || !secret[at - 1] {
                made.push_str("***");
            }
        }
        made
    }
}
