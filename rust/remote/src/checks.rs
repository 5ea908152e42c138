//! Values of options and of the environment that the libraries below cannot use: some of them panic then. Messages do not contain
//! the value, which may be a secret.

use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::Url;

const SWITCHES: &[&str] = &[
    "skip_signature",
    "request_payer",
    "virtual_hosted_style_request",
    "imdsv1_fallback",
    "unsigned_payload",
    "s3_express",
    "disable_tagging",
    "disable_bulk_delete",
    "sse_bucket_key_enabled",
    "use_emulator",
    "use_azure_cli",
    "use_fabric_endpoint",
];
const URLS: &[&str] = &[
    "endpoint",
    "endpoint_url_s3",
    "base_url",
    "sts_endpoint",
    "metadata_endpoint",
    "container_credentials_full_uri",
    "msi_endpoint",
    "identity_endpoint",
    "authority_host",
];
/// Names of files, and the content of one. The library reports those that it cannot read.
const TEXTS: &[&str] = &["service_account", "service_account_key", "application_credentials", "profile"];
/// An empty value of these options means no value.
const MAY_BE_EMPTY: &[&str] = &["token", "session_token"];

/// Parses a word for true or false.
pub fn switch(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" | "t" | "y" => Some(true),
        "0" | "false" | "no" | "off" | "f" | "n" => Some(false),
        _ => None,
    }
}

/// The reason why a value is invalid for an option; `None` if it is valid. `name` is the option's name without its
/// provider's prefix.
pub fn why_not(name: &str, value: &str) -> Option<&'static str> {
    if value.is_empty() {
        return (!MAY_BE_EMPTY.contains(&name)).then_some("expected a value, found an empty text");
    }
    if TEXTS.contains(&name) || name.ends_with("_file") {
        let is_key = name == "service_account_key";
        return (!is_key && value.contains(char::is_control)).then_some("expected one line of text");
    }
    if SWITCHES.contains(&name) {
        return switch(value).is_none().then_some("expected true or false");
    }
    if let Some(why) = not_a_header(value) {
        return Some(why);
    }
    let is_word = || value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    match name {
        "region" | "default_region" | "account_name" if !is_word() => Some("expected letters, digits and dashes"),
        _ if URLS.contains(&name) => not_an_address(value),
        _ => None,
    }
}

/// The reason why a text is invalid as the value of a header.
pub fn not_a_header(value: &str) -> Option<&'static str> {
    if value.contains(char::is_control) {
        return Some("expected one line of text, found a line break or another control character");
    }
    if value.trim() != value {
        return Some("expected text without spaces around it");
    }
    (!value.is_ascii()).then_some("expected ASCII text, found other characters")
}

/// The reason why a text is invalid as the address of a server.
pub fn not_an_address(value: &str) -> Option<&'static str> {
    let expected = "expected a URL such as https://HOST or http://HOST:PORT";
    let scheme = value.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
    if !scheme.is_some_and(|scheme| scheme == "http" || scheme == "https") || value.contains([' ', '?', '#']) {
        return Some(expected);
    }
    // Two parsers: object_store uses both, and panics if they disagree.
    let mut request = HttpRequest::new(HttpRequestBody::empty());
    let parsed = value.parse().map(|uri| *request.uri_mut() = uri);
    match (Url::parse(value), parsed) {
        (Ok(url), Ok(())) if !url.username().is_empty() || url.password().is_some() => {
            Some("expected a URL without a user name: pass credentials as separate options")
        }
        (Ok(url), Ok(())) if url.has_host() && request.uri().host().is_some_and(|host| !host.is_empty()) => None,
        _ => Some(expected),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_those_of_web_servers() {
        for good in
            ["http://localhost:9000", "HTTPS://minio.lab.org/prefix/", "http://127.0.0.1:1", "http://[::1]:9000"]
        {
            assert_eq!(not_an_address(good), None, "{good}");
        }
        for bad in
            ["", " ", "localhost:9000", "minio.lab.org", "ftp://h", "://", "http://", "http://ho st", "http://h:99999"]
        {
            assert!(not_an_address(bad).is_some(), "{bad}");
        }
        for bad in ["http://user:word@h", "http://h?x=1", "http://\u{e9}:x", "http://256.256.256.256", "http://[::g]"] {
            assert!(not_an_address(bad).is_some(), "{bad}");
        }
    }

    #[test]
    fn switches_have_the_usual_words() {
        assert_eq!((switch("True"), switch("0"), switch("off")), (Some(true), Some(false), Some(false)));
        assert!(why_not("skip_signature", "nonsense").is_some());
        assert!(why_not("session_token", "").is_none() && why_not("access_key_id", "").is_some());
        assert!(why_not("secret_access_key", "abc\n").is_some() && why_not("service_account_key", "{\n}").is_none());
    }
}
