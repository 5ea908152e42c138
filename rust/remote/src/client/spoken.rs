//! What a request says in confidence. A server may repeat it in its answer, parts of which messages show.

use object_store::client::HttpRequest;
use percent_encoding::percent_decode_str;

use crate::failure::Failure;

/// Headers with secrets.
const HEADERS: &[&str] = &["authorization", "proxy-authorization", "x-amz-security-token", "cookie"];
/// Words of these headers that are no secrets.
const WORDS: &[&str] =
    &["Bearer", "Basic", "Credential", "SignedHeaders", "Signature", "SharedKey", "AWS4-HMAC-SHA256"];
/// Parameters that are no secrets.
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
/// The longest form that is looked at.
const FORM: usize = 64 << 10;

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
            value.split([' ', ',', '=', ':']).for_each(&mut add);
        }
        let form = request.body().as_bytes().filter(|body| request.method().as_str() == "POST" && body.len() <= FORM);
        let form = form.map(|body| String::from_utf8_lossy(body).into_owned()).unwrap_or_default();
        for pair in request.uri().query().unwrap_or_default().split('&').chain(form.split('&')) {
            let (name, value) = pair.split_once('=').unwrap_or(("", pair));
            if !PARAMETERS.contains(&name) {
                add(value);
            }
        }
        made.retain(|text| text.len() >= SHORTEST && !WORDS.contains(&text.as_str()));
        made.sort_unstable_by_key(|text| std::cmp::Reverse(text.len()));
        made.dedup();
        Spoken(made)
    }

    /// A failure without the secrets.
    pub fn hide(&self, failure: Failure) -> Failure {
        let hidden = |text: String| self.0.iter().fold(text, |text, secret| text.replace(secret.as_str(), "***"));
        Failure { code: failure.code.map(hidden), text: hidden(failure.text), ..failure }
    }
}
