//! URLs of datasets.

use crate::checks::not_an_address;
use actshard_core::location::Location;
use actshard_core::{Error, Kind, Result};
use percent_encoding::{AsciiSet, CONTROLS, percent_decode_str, utf8_percent_encode};

/// Characters of a key that must be escaped in a URL's path.
const IN_PATH: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'#')
    .add(b'%')
    .add(b'<')
    .add(b'>')
    .add(b'?')
    .add(b'`')
    .add(b'{')
    .add(b'}')
    .add(b'\\')
    .add(b'^')
    .add(b'[')
    .add(b']')
    .add(b'|');
/// The same for one name in a path.
const IN_NAME: &AsciiSet = &IN_PATH.add(b'/');

/// The kinds of stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Provider {
    /// Amazon S3 and servers with its protocol.
    S3,
    /// Google Cloud Storage.
    Gcs,
    /// Azure Blob Storage.
    Azure,
    /// Web servers: no listing.
    Http,
    /// Datasets of the Hugging Face hub.
    Hub,
}

/// The parts of a URL.
#[derive(Clone, PartialEq, Eq)]
pub struct StoreUrl {
    /// The kind of store.
    pub provider: Provider,
    /// The store's canonical text, without secrets: `s3://bucket`, `https://host:port`, `hf://datasets/org/name@revision`.
    pub store: String,
    /// The bucket, container, `org/name` of a dataset, or scheme, host and port of a web server.
    pub bucket: String,
    /// The key, without a slash at either end; for the web, the path as it was written.
    pub key: String,
    /// The revision of a dataset of the hub; `main` by default.
    pub revision: String,
    /// The query of a signed URL: a secret. Sent with every request to a web server.
    pub query: Option<String>,
}

impl std::fmt::Debug for StoreUrl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "StoreUrl({}/{})", self.store, self.key)
    }
}

fn refused(detail: impl Into<String>) -> Error {
    Error::new(Kind::Argument, detail)
}

/// Whether a text is a URL of a scheme that this crate reads.
pub fn is_remote(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| provider_of(&scheme.to_ascii_lowercase()).is_some())
}

fn provider_of(scheme: &str) -> Option<Provider> {
    Some(match scheme {
        "s3" | "s3a" => Provider::S3,
        "gs" | "gcs" => Provider::Gcs,
        "az" | "azure" | "abfs" | "abfss" | "adl" => Provider::Azure,
        "http" | "https" => Provider::Http,
        "hf" => Provider::Hub,
        _ => return None,
    })
}

impl StoreUrl {
    /// Parses a URL.
    pub fn parse(url: &str) -> Result<StoreUrl> {
        let (scheme, rest) = url.split_once("://").ok_or_else(|| refused("expected a URL, SCHEME://..."))?;
        let scheme = scheme.to_ascii_lowercase();
        let Some(provider) = provider_of(&scheme) else {
            let known = "s3, gs, az, https, http or hf";
            return Err(refused(format!("{scheme}://: unsupported scheme; expected {known}")));
        };
        if rest.chars().any(char::is_control) {
            return Err(refused(format!("{scheme}://: control characters in the URL")));
        }
        if provider == Provider::Hub {
            return hub(rest);
        }
        let (rest, query) = match (provider, rest.split_once('?')) {
            (Provider::Http, Some((rest, query))) => (rest, Some(query.split('#').next().unwrap_or(query))),
            _ => (rest, None),
        };
        let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
        // abfss://CONTAINER@ACCOUNT.dfs.core.windows.net; any other name before an @ is a user's.
        let container = provider == Provider::Azure && bucket.contains(".core.");
        if bucket.split_once('@').is_some_and(|(user, _)| !container || user.contains(':')) {
            return Err(refused(format!("{scheme}://: the URL contains credentials: pass them as storage_options")));
        }
        // A secret may contain a slash, so that the @ is after it.
        if provider != Provider::Http && bucket.contains(':') {
            return Err(refused(format!("{scheme}://: the URL contains credentials: pass them as storage_options")));
        }
        if bucket.is_empty() {
            return Err(refused(format!("{scheme}://: expected {scheme}://BUCKET/KEY, found no bucket")));
        }
        if let Some(why) = not_a_bucket(provider, &scheme, bucket) {
            return Err(refused(format!("{scheme}://: {why}")));
        }
        let (scheme, bucket) = match provider {
            Provider::S3 => ("s3", bucket.to_string()),
            Provider::Gcs => ("gs", bucket.to_string()),
            Provider::Azure => ("az", bucket.to_string()),
            _ => (scheme.as_str(), format!("{scheme}://{}", bucket.to_ascii_lowercase())),
        };
        let store = if provider == Provider::Http { bucket.clone() } else { format!("{scheme}://{bucket}") };
        let key = checked(key.trim_matches('/'), scheme)?;
        Ok(StoreUrl { provider, store, bucket, key, revision: String::new(), query: query.map(str::to_string) })
    }

    /// The location of a key in this store.
    pub fn location(&self, key: &str) -> Location {
        Location::object(self.store.clone(), key)
    }
}

/// Bytes of a key, at most: 32 times what S3 allows.
const MOST_KEY: usize = 32 << 10;

fn checked(key: &str, scheme: &str) -> Result<String> {
    if key.len() > MOST_KEY {
        return Err(refused(format!("{scheme}://: expected a path of at most {MOST_KEY} bytes, found {}", key.len())));
    }
    Ok(key.to_string())
}

/// The reason why a text is invalid as a bucket or a host.
fn not_a_bucket(provider: Provider, scheme: &str, bucket: &str) -> Option<&'static str> {
    if provider == Provider::Http {
        // Names in other scripts are sent in their ASCII form.
        let url = reqwest::Url::parse(&format!("{scheme}://{bucket}"));
        return not_an_address(url.as_ref().map_or("", |url| url.as_str()));
    }
    let odd = |c: char| !c.is_ascii_graphic() || "\"<>\\^`{|}#?%".contains(c);
    bucket.contains(odd).then_some("expected a bucket of letters, digits, dashes, dots and underscores")
}

/// Parses what follows `hf://`: `datasets/ORG/NAME[@REVISION][/PATH]`.
fn hub(rest: &str) -> Result<StoreUrl> {
    let expected = "expected hf://datasets/ORG/NAME[@REVISION][/PATH]";
    let plain = |text: &str| text.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c));
    // Other text may be a secret.
    let named = |text: &str| if text.split('/').all(plain) { text.to_string() } else { String::new() };
    let Some(rest) = rest.strip_prefix("datasets/") else {
        let what = named(rest.split('/').next().unwrap_or_default());
        return Err(refused(format!("hf://{what}: only datasets are supported; {expected}")));
    };
    let mut parts = rest.splitn(3, '/');
    let (org, name, path) = (parts.next(), parts.next(), parts.next().unwrap_or_default());
    let (Some(org), Some(name)) = (org.filter(|s| !s.is_empty()), name.filter(|s| !s.is_empty())) else {
        return Err(refused(format!("hf://datasets/{}: {expected}", named(rest))));
    };
    let (name, revision) = name.split_once('@').unwrap_or((name, "main"));
    // Revisions like refs/pr/1 contain slashes.
    let (revision, path) = match (revision, path) {
        ("refs", path) => {
            let mut parts = path.splitn(3, '/');
            let (kind, number) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
            (format!("refs/{kind}/{number}"), parts.next().unwrap_or_default())
        }
        _ => (percent_decode_str(revision).decode_utf8_lossy().into_owned(), path),
    };
    if name.is_empty() || revision.is_empty() || !plain(org) || !plain(name) {
        return Err(refused(format!("hf://datasets/{}: {expected}", named(&format!("{org}/{name}")))));
    }
    let shown = if revision == "main" { String::new() } else { format!("@{revision}") };
    Ok(StoreUrl {
        provider: Provider::Hub,
        store: format!("hf://datasets/{org}/{name}{shown}"),
        bucket: format!("{org}/{name}"),
        key: checked(path.trim_matches('/'), "hf")?,
        revision,
        query: None,
    })
}

/// A key as the path of a URL.
pub fn path_of(key: &str) -> String {
    utf8_percent_encode(key, IN_PATH).to_string()
}

/// A key of a web server as the path of a URL. In the part that the user wrote, `root` or the folders that the key shares with
/// it, escapes stay as they are: `%2F` is no separator, and a server may distinguish `%2B` from `+`. Other names come from the
/// dataset and are escaped, `%` too: else a file name would be another object's, or `%2e%2e` the folder above.
pub fn web_path_of(root: &str, key: &str) -> String {
    let (written, below) = key.split_at(written_bytes(root, key));
    let mut path = String::with_capacity(key.len());
    let mut parts = written.split('%');
    path.push_str(&path_of(parts.next().unwrap_or_default()));
    for part in parts {
        let is_escape =
            part.as_bytes().first_chunk().is_some_and(|two: &[u8; 2]| two.iter().all(u8::is_ascii_hexdigit));
        path.push_str(if is_escape { "%" } else { "%25" });
        path.push_str(&path_of(part));
    }
    path.push_str(&path_of(below));
    path
}

/// The number of bytes of a key that the user wrote: the URL that was opened, also with a further ending (`rows.parquet.yaml`), or
/// the folders above it.
fn written_bytes(root: &str, key: &str) -> usize {
    if key.strip_prefix(root).is_some_and(|rest| root.is_empty() || rest.is_empty() || rest.starts_with(['/', '.'])) {
        return root.len();
    }
    let names = root.split_inclusive('/').zip(key.split_inclusive('/'));
    let is_written =
        |(written, asked): &(&str, &str)| written.strip_suffix('/') == Some(asked.strip_suffix('/').unwrap_or(asked));
    names.take_while(is_written).map(|(_, asked)| asked.len()).sum()
}

/// A text as one name in the path of a URL.
pub fn name_of(text: &str) -> String {
    utf8_percent_encode(text, IN_NAME).to_string()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn urls_have_one_canonical_text() {
        let parsed = |url: &str| {
            let a = StoreUrl::parse(url).unwrap();
            (a.store, a.key)
        };
        let pair = |a: &str, b: &str| (a.to_string(), b.to_string());
        assert_eq!(parsed("s3a://bucket/run//x/"), pair("s3://bucket", "run//x"));
        assert_eq!(parsed("gs://b"), pair("gs://b", ""));
        assert_eq!(parsed("HTTPS://Host:80/a%20b/c?X-Sig=secret#f"), pair("https://host:80", "a%20b/c"));
        assert_eq!(parsed("hf://datasets/lab/acts@v1/x/y"), pair("hf://datasets/lab/acts@v1", "x/y"));
        assert_eq!(parsed("hf://datasets/lab/acts@main/x"), pair("hf://datasets/lab/acts", "x"));
        assert_eq!(parsed("hf://datasets/lab/acts@refs/pr/1/x"), pair("hf://datasets/lab/acts@refs/pr/1", "x"));
    }

    #[test]
    fn a_web_server_is_asked_for_the_path_that_was_written() {
        for path in ["a/group%2Fname", "caf%E9", "a%20b", "a+b", "a%2Bb", "x%25y", "a//b", "%f0%9f%98%80", "%"] {
            let key = StoreUrl::parse(&format!("https://host/{path}/x")).unwrap().key;
            let expected = if path == "%" { "%25" } else { path };
            assert_eq!(web_path_of(&key, &key), format!("{expected}/x"));
        }
        let root = "run/100% a?#%zz/é";
        assert_eq!(web_path_of(root, root), "run/100%25%20a%3F%23%25zz/%C3%A9");
    }

    #[test]
    fn names_of_a_dataset_on_the_web_are_the_names_of_its_files() {
        for (name, expected) in
            [("layer%205", "layer%25205"), ("%2e%2e/x", "%252e%252e/x"), ("..%2fx", "..%252fx"), ("a b", "a%20b")]
        {
            assert_eq!(web_path_of("a%20b", &format!("a%20b/{name}")), format!("a%20b/{expected}"));
            assert_eq!(web_path_of("", name), expected);
            // A file's neighbours are below the folder that the user wrote.
            assert_eq!(web_path_of("a%20b/x%20y.npy", &format!("a%20b/{name}")), format!("a%20b/{expected}"));
            assert_eq!(web_path_of("a%20b/x%20y", &format!("a%20b/x%20y.{name}")), format!("a%20b/x%20y.{expected}"));
            assert_eq!(web_path_of("a%20b/x%20y", "a%20b"), "a%20b");
            // Outside the URL, nothing is as the user wrote it.
            assert_eq!(web_path_of("a%20b", &format!("a%20bc/{name}")), format!("a%2520bc/{expected}"));
        }
    }

    #[test]
    fn secrets_of_urls_are_not_shown() {
        let address = StoreUrl::parse("https://host/a?X-Sig=secret").unwrap();
        assert_eq!(address.query.as_deref(), Some("X-Sig=secret"));
        assert!(!format!("{address:?}").contains("secret"));
        for url in [
            "https://user:secret@host/a",
            "s3://key:secret@bucket/x",
            "s3://key:se/secret@bucket/x",
            "gs://key:se?secret@bucket/x",
            "az://key:se/secret@container/x",
            "https://user:se/secret@host/a",
            "hf://user:secret@datasets/o/n",
            "hf://datasets/user:secret@o/n",
            "hf://datasets/user:secret",
        ] {
            let error = StoreUrl::parse(url).unwrap_err();
            assert!(error.kind == Kind::Argument && !error.to_string().contains("secret"), "{error}");
        }
    }

    #[test]
    fn other_urls_are_refused() {
        for url in [
            "ftp://x/y",
            "s3://",
            "s3://a b/c",
            "https://ho st/x",
            "https://h:99999/x",
            "gs://\u{e9}/x",
            "s3:///key",
            "hf://lab/acts",
            "hf://datasets/acts",
            "hf://models/a/b",
            "plain",
            &format!("s3://bucket/{}", "a/".repeat(20_000)),
            &format!("https://host/{}", "a/".repeat(20_000)),
            &format!("hf://datasets/lab/acts/{}", "a/".repeat(20_000)),
        ] {
            assert_eq!(StoreUrl::parse(url).unwrap_err().kind, Kind::Argument, "{url}");
        }
        assert!(is_remote("S3://b/k") && !is_remote("/data/s3") && !is_remote("file:///x"));
    }
}
