//! `storage_options`: object_store's names in any letter case, and fsspec's names for the most common ones.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use actshard_core::{Error, Kind, Result};
use object_store::aws::AmazonS3ConfigKey;
use object_store::azure::AzureConfigKey;
use object_store::gcp::GoogleConfigKey;

use crate::address::Provider;
use crate::checks::{not_a_header, switch, why_not};

/// Options as a user gave them. `Debug` shows the names only.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Options(BTreeMap<String, String>);

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// Limits of requests, the same for all providers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestLimits {
    /// Attempts of one request.
    pub tries: u32,
    /// Time of one request with all its attempts.
    pub patience: Duration,
    /// Time to connect.
    pub connect: Duration,
    /// Time without a byte after which an answer is abandoned.
    pub stall: Duration,
    /// Idle time after which a connection is closed.
    pub idle: Duration,
    /// Whether a request is sent a second time while its answer is slow.
    pub hedge: bool,
    /// A proxy, instead of the environment's; may contain a password.
    pub proxy: Option<Secret>,
    /// The `User-Agent` header.
    pub agent: String,
}

/// A text that is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Default for RequestLimits {
    fn default() -> RequestLimits {
        RequestLimits {
            tries: 5,
            patience: Duration::from_secs(60),
            connect: Duration::from_secs(5),
            stall: Duration::from_secs(15),
            idle: Duration::from_secs(60),
            hedge: true,
            proxy: None,
            agent: concat!("actshard/", env!("CARGO_PKG_VERSION")).to_string(),
        }
    }
}

/// Options under the names of one provider.
#[derive(Clone, Default)]
pub struct ProviderSettings {
    /// object_store's names with their values.
    pub keys: Vec<(String, String)>,
    /// The profile of the AWS files.
    pub profile: Option<String>,
    /// The limits.
    pub limits: RequestLimits,
}

impl fmt::Debug for ProviderSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.keys.iter().map(|(key, _)| key)).finish()
    }
}

impl ProviderSettings {
    /// The value of an option.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.keys.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Whether any of some options is set.
    pub fn has(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.get(name).is_some())
    }

    /// Whether a boolean option is on.
    pub fn is_on(&self, name: &str) -> bool {
        self.get(name).is_some_and(is_true)
    }
}

/// Whether a text is one of the usual words for true.
pub fn is_true(text: &str) -> bool {
    switch(text) == Some(true)
}

/// Names and their synonyms; the second is the one that this crate uses.
type Synonyms = &'static [(&'static str, &'static str)];

const S3: Synonyms = &[
    ("anon", "skip_signature"),
    ("key", "access_key_id"),
    ("secret", "secret_access_key"),
    ("token", "session_token"),
    ("endpoint_url", "endpoint"),
    ("endpoint_override", "endpoint"),
    ("client_kwargs.endpoint_url", "endpoint"),
    ("client_kwargs.region_name", "region"),
    ("region_name", "region"),
    ("requester_pays", "request_payer"),
];
const GCS: Synonyms =
    &[("anon", "skip_signature"), ("endpoint_url", "base_url"), ("service_account_path", "service_account")];
const AZURE: Synonyms = &[
    ("anon", "skip_signature"),
    ("account_key", "access_key"),
    ("sas_token", "sas_key"),
    ("endpoint_url", "endpoint"),
];
const WEB: Synonyms = &[("bearer_token", "token"), ("endpoint_url", "endpoint"), ("hf_token", "token")];

/// Names that messages suggest.
const KNOWN: &[(Provider, &[&str])] = &[
    (
        Provider::S3,
        &[
            "access_key_id",
            "secret_access_key",
            "session_token",
            "region",
            "endpoint",
            "skip_signature",
            "request_payer",
            "virtual_hosted_style_request",
            "profile",
            "role_arn",
            "web_identity_token_file",
            "s3_express",
            "anon",
            "key",
            "secret",
            "token",
            "endpoint_url",
            "requester_pays",
            "metadata_endpoint",
        ],
    ),
    (
        Provider::Gcs,
        &[
            "service_account",
            "service_account_key",
            "application_credentials",
            "bearer_token",
            "base_url",
            "skip_signature",
            "anon",
            "token",
        ],
    ),
    (
        Provider::Azure,
        &[
            "account_name",
            "account_key",
            "sas_key",
            "sas_token",
            "connection_string",
            "client_id",
            "client_secret",
            "tenant_id",
            "use_azure_cli",
            "endpoint",
            "use_emulator",
            "skip_signature",
            "anon",
        ],
    ),
    (Provider::Http, &["token"]),
    (Provider::Hub, &["token", "endpoint"]),
];
const LIMITS: &[&str] = &[
    "connect_timeout",
    "read_timeout",
    "pool_idle_timeout",
    "proxy_url",
    "user_agent",
    "max_retries",
    "retry_timeout",
    "hedge",
    "allow_http",
];

impl Options {
    /// Options from names and values; case does not matter.
    pub fn new(given: impl IntoIterator<Item = (String, String)>) -> Options {
        Options(given.into_iter().map(|(key, value)| (key.trim().to_ascii_lowercase(), value)).collect())
    }

    /// Names and values, secrets included: for the state of a pickled store.
    pub fn pairs(&self) -> Vec<(String, String)> {
        self.0.clone().into_iter().collect()
    }

    /// The options under a provider's names. Unknown names are errors.
    pub fn settings(&self, provider: Provider) -> Result<ProviderSettings> {
        let mut made = ProviderSettings::default();
        for (key, value) in &self.0 {
            let name = plain(provider, key);
            if made.limits.set(&name, value)? {
                continue;
            }
            if let Some(why) = why_not(&name, value).filter(|_| name != "connection_string") {
                return Err(refused(key, why));
            }
            match (provider, name.as_str()) {
                (Provider::S3, "profile") => made.profile = Some(value.clone()),
                (Provider::Gcs, "token") => made.keys.push(gcs_token(key, value)?),
                (Provider::Gcs | Provider::S3, "project") => {}
                (Provider::Azure, "connection_string") => made.keys.extend(connection(value)?),
                (Provider::S3, "bucket" | "bucket_name") | (Provider::Gcs, "bucket" | "bucket_name") => {
                    return Err(refused(key, "the bucket is part of the URL"));
                }
                _ if is_known(provider, &name) => made.keys.push(setting(name, value)),
                _ => return Err(unknown(provider, key)),
            }
        }
        Ok(made)
    }
}

/// An option for object_store, which accepts fewer words for true.
fn setting(name: String, value: &str) -> (String, String) {
    let word = why_not(&name, "?").filter(|why| *why == "expected true or false").and_then(|_| switch(value));
    let value = word.map_or_else(|| value.to_string(), |on| on.to_string());
    (name, value)
}

fn refused(key: &str, why: &str) -> Error {
    Error::new(Kind::Argument, format!("storage_options: {key:?}: {why}"))
}

/// The name of an option without its provider's prefix.
pub fn plain(provider: Provider, key: &str) -> String {
    let (prefixes, synonyms): (&[&str], Synonyms) = match provider {
        Provider::S3 => (&["aws_"], S3),
        Provider::Gcs => (&["google_"], GCS),
        Provider::Azure => (&["azure_storage_", "azure_"], AZURE),
        Provider::Http | Provider::Hub => (&[], WEB),
    };
    let name = prefixes.iter().find_map(|prefix| key.strip_prefix(prefix)).unwrap_or(key);
    synonyms.iter().find(|(alias, _)| *alias == name).map_or(name, |(_, name)| name).to_string()
}

fn is_known(provider: Provider, name: &str) -> bool {
    match provider {
        Provider::S3 => AmazonS3ConfigKey::from_str(name).is_ok_and(|key| !matches!(key, AmazonS3ConfigKey::Client(_))),
        Provider::Gcs => GoogleConfigKey::from_str(name).is_ok_and(|key| !matches!(key, GoogleConfigKey::Client(_))),
        Provider::Azure => AzureConfigKey::from_str(name).is_ok_and(|key| !matches!(key, AzureConfigKey::Client(_))),
        Provider::Http => name == "token",
        Provider::Hub => matches!(name, "token" | "endpoint"),
    }
}

fn unknown(provider: Provider, key: &str) -> Error {
    let own = KNOWN.iter().filter(|(of, _)| *of == provider).flat_map(|(_, names)| names.iter());
    // Of a name or of one of its words: "tokem" is near to "bearer_token".
    let edits = |name: &str| name.split('_').map(|word| distance(key, word)).chain([distance(key, name)]).min();
    let mut near: Vec<_> = own.chain(LIMITS).map(|name| (edits(name), *name)).collect();
    near.sort_unstable();
    let near: Vec<&str> = near.into_iter().take(3).map(|(_, name)| name).collect();
    refused(key, &format!("unknown option; the most similar options are {}", near.join(", ")))
}

/// Edits that change one text into another.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut corner = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let cost = (corner + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            corner = std::mem::replace(&mut row[j + 1], cost);
        }
    }
    row[b.len()]
}

/// gcsfs's `token`: `"anon"`, the path of a file, or a token itself.
fn gcs_token(key: &str, value: &str) -> Result<(String, String)> {
    Ok(match value {
        "anon" => ("skip_signature".to_string(), "true".to_string()),
        _ if value.contains('/') || value.ends_with(".json") => {
            ("application_credentials".to_string(), value.to_string())
        }
        _ if value.is_empty() => return Err(refused(key, "expected \"anon\", the path of a file, or a token")),
        _ => ("bearer_token".to_string(), value.to_string()),
    })
}

/// Azure's connection string.
fn connection(text: &str) -> Result<Vec<(String, String)>> {
    let mut made = vec![];
    for part in text.split(';').filter(|part| !part.trim().is_empty()) {
        let (key, value) =
            part.split_once('=').ok_or_else(|| refused("connection_string", "expected NAME=VALUE;..."))?;
        let name = match key.trim().to_ascii_lowercase().as_str() {
            "accountname" => "account_name",
            "accountkey" => "access_key",
            "sharedaccesssignature" => "sas_key",
            "blobendpoint" => "endpoint",
            _ => continue,
        };
        if let Some(why) = why_not(name, value) {
            return Err(refused("connection_string", &format!("{}: {why}", key.trim())));
        }
        made.push((name.to_string(), value.to_string()));
    }
    Ok(made)
}

impl RequestLimits {
    /// Sets a limit; false if no limit has this name.
    fn set(&mut self, name: &str, value: &str) -> Result<bool> {
        let seconds =
            || duration(value).ok_or_else(|| refused(name, "expected a time such as 30, \"30s\" or \"500ms\""));
        match name {
            "connect_timeout" => self.connect = seconds()?,
            "read_timeout" => self.stall = seconds()?,
            "pool_idle_timeout" => self.idle = seconds()?,
            "retry_timeout" | "timeout" => self.patience = seconds()?,
            "hedge" => {
                self.hedge = switch(value).ok_or_else(|| refused(name, "expected true or false"))?;
            }
            "max_retries" => {
                let retries: u32 = value.parse().map_err(|_| refused(name, "expected a whole number"))?;
                self.tries = retries.saturating_add(1).min(100);
            }
            "proxy_url" | "user_agent" if value.is_empty() => return Err(refused(name, "expected a value")),
            "proxy_url" | "user_agent" if not_a_header(value).is_some() => {
                return Err(refused(name, not_a_header(value).unwrap_or_default()));
            }
            "proxy_url" => self.proxy = Some(Secret(value.to_string())),
            "user_agent" => self.agent = value.to_string(),
            // The user has already chosen http with the endpoint; the other options describe the behaviour anyway.
            "allow_http" | "http1_only" | "randomize_addresses" => {}
            _ => return Ok(false),
        }
        Ok(true)
    }
}

/// The longest time to wait for anything.
pub const LONGEST: Duration = Duration::from_secs(30 * 86_400);

fn duration(text: &str) -> Option<Duration> {
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().ok()?;
    let unit = match text[digits..].trim() {
        "ms" => 1e-3,
        "" | "s" | "sec" | "second" | "seconds" => 1.0,
        "m" | "min" | "minute" | "minutes" => 60.0,
        _ => return None,
    };
    // Longer ones cannot be added to the clock.
    Duration::try_from_secs_f64(number * unit).ok().map(|time| time.min(LONGEST))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn options(pairs: &[(&str, &str)]) -> Options {
        Options::new(pairs.iter().map(|(a, b)| ((*a).to_string(), (*b).to_string())))
    }

    #[test]
    fn both_dialects_and_any_case_mean_the_same() {
        let ours = options(&[
            ("AWS_ACCESS_KEY_ID", "a"),
            ("region", "r"),
            ("aws_endpoint_url", "http://h"),
            ("SKIP_SIGNATURE", "true"),
        ]);
        let theirs = options(&[
            ("key", "a"),
            ("client_kwargs.region_name", "r"),
            ("endpoint_url", "http://h"),
            ("anon", "True"),
        ]);
        let sorted = |options: &Options| {
            let mut keys: Vec<String> =
                options.settings(Provider::S3).unwrap().keys.into_iter().map(|(k, _)| k).collect();
            keys.sort();
            keys
        };
        assert_eq!(sorted(&ours), sorted(&theirs));
        assert_eq!(sorted(&ours), ["access_key_id", "endpoint", "region", "skip_signature"]);
        assert!(theirs.settings(Provider::S3).unwrap().is_on("skip_signature"));
    }

    #[test]
    fn an_unknown_option_is_an_error_that_names_near_ones_and_no_value() {
        for provider in [Provider::S3, Provider::Gcs, Provider::Azure, Provider::Http, Provider::Hub] {
            let error = options(&[("tokem", "secret")]).settings(provider).err().unwrap();
            assert!(error.kind == Kind::Argument && error.detail.contains("token"), "{error}");
            assert!(!error.detail.contains("secret,") && !error.detail.contains("\"secret\""), "{error}");
        }
        assert!(!format!("{:?}", options(&[("secret", "swordfish")])).contains("swordfish"));
    }

    #[test]
    fn every_suggested_name_is_known() {
        for (provider, names) in KNOWN {
            for name in *names {
                let value = match *name {
                    "connection_string" => "AccountName=a",
                    _ if name.contains("endpoint") || *name == "base_url" => "http://h",
                    _ => "true",
                };
                assert!(options(&[(name, value)]).settings(*provider).is_ok(), "{provider:?} {name}");
            }
            for name in LIMITS {
                assert!(options(&[(name, "1")]).settings(*provider).is_ok(), "{provider:?} {name}");
            }
        }
    }

    #[test]
    fn times_have_units() {
        let parsed = |text| duration(text).map(|d| d.as_millis());
        assert_eq!(parsed("30"), Some(30_000));
        assert_eq!(parsed("500ms"), Some(500));
        assert_eq!(parsed("2 minutes"), Some(120_000));
        assert_eq!(parsed("soon"), None);
    }
}
