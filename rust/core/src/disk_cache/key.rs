//! Keys of cached objects.

use std::fmt::Write as _;

use sha2::{Digest, Sha256};

use super::geometry::{Geometry, LARGEST};
use crate::location::Location;
use crate::source::Version;

/// Parameters of signed URLs, which change with every signature. They are ignored only together with the first of them,
/// the signature itself: a server may use the same names for other parameters.
const SIGNED: [(&str, &[&str]); 2] = [
    ("signature", &["awsaccesskeyid", "expires", "googleaccessid", "key-pair-id", "policy"]),
    ("sig", &["se", "sip", "ske", "skoid", "sks", "skt", "sktid", "skv", "sp", "spr", "sr", "srt", "ss", "st", "sv"]),
];

/// The identity of an object's content.
#[derive(Clone, Debug)]
pub struct ObjectKey {
    /// The name of its folder: 64 hexadecimal digits, `-`, and the size.
    pub name: String,
    /// Its address without credentials, for display.
    pub url: String,
    pub geometry: Geometry,
}

impl ObjectKey {
    /// `origin` distinguishes servers whose objects have equal locations: the address of a bucket's server, or the query of a
    /// web address.
    pub fn new(origin: &str, location: &Location, version: &Version, size: u64) -> ObjectKey {
        let text = without_revision(&without_credentials(&location.to_string()));
        let version = match version {
            Version::Tag(tag) => format!("tag {tag}"),
            file @ Version::File(..) => format!("{file:?}"),
        };
        let mut hash = Sha256::new();
        for part in [text.as_str(), &version, &without_credentials(origin)] {
            // With its length, so that different parts never give the same text.
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        hash.update(size.to_le_bytes());
        let digest: [u8; 32] = hash.finalize().into();
        let mut name = String::with_capacity(84);
        for byte in digest {
            // Writing to a String cannot fail.
            let _ = write!(name, "{byte:02x}");
        }
        let _ = write!(name, "-{size}");
        let seed = u32::from_le_bytes([digest[0], digest[1], digest[2], digest[3]]);
        let url = if is_web(&text) { text.split('?').next().unwrap_or_default().to_string() } else { text };
        ObjectKey { name, url, geometry: Geometry { size, seed } }
    }
}

/// The geometry of the object in a folder of this name.
pub fn geometry_of(name: &str) -> Option<Geometry> {
    let (digest, size) = name.split_once('-')?;
    let first = u32::from_str_radix(digest.get(..8)?, 16).ok()?;
    let size = size.parse().ok().filter(|size| (1..=LARGEST).contains(size))?;
    (digest.len() == 64).then_some(Geometry { size, seed: first.swap_bytes() })
}

/// Removes the revision of a dataset of the hub: the tags of its objects are digests of their bytes, so objects cached
/// at one commit are reused at the next one.
fn without_revision(text: &str) -> String {
    let Some(rest) = text.strip_prefix("hf://datasets/") else { return text.to_string() };
    let mut parts = rest.splitn(3, '/');
    let (owner, name) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let name = name.split('@').next().unwrap_or_default();
    let key = parts.next().map(|key| format!("/{key}")).unwrap_or_default();
    format!("hf://datasets/{owner}/{name}{key}")
}

fn is_web(text: &str) -> bool {
    text.starts_with("https://") || text.starts_with("http://")
}

/// Removes the user and the signature of a web address. Keys of other stores may contain `@` and `?`.
fn without_credentials(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://").filter(|_| is_web(text)) else { return text.to_string() };
    let (authority, path) = rest.find(['/', '?']).map_or((rest, ""), |at| rest.split_at(at));
    let host = authority.rsplit('@').next().unwrap_or_default();
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    let name_of = |parameter: &str| parameter.split('=').next().unwrap_or_default().to_ascii_lowercase();
    let names: Vec<String> = query.split('&').map(name_of).collect();
    let signs = |parameter: &&str| {
        let name = name_of(parameter);
        let signed = |(signature, others): &(&str, &[&str])| {
            names.iter().any(|name| name == signature) && (name == *signature || others.contains(&name.as_str()))
        };
        SIGNED.iter().any(signed) || name.starts_with("x-amz-") || name.starts_with("x-goog-")
    };
    let kept: Vec<&str> = query.split('&').filter(|p| !p.is_empty() && !signs(p)).collect();
    let mark = if kept.is_empty() { "" } else { "?" };
    format!("{scheme}://{host}{path}{mark}{}", kept.join("&"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn key(store: &str, key: &str, tag: &str, size: u64) -> ObjectKey {
        ObjectKey::new("", &Location::object(store, key), &Version::Tag(tag.into()), size)
    }

    fn at(origin: &str) -> String {
        ObjectKey::new(origin, &Location::object("s3://b", "k"), &Version::Tag("v".into()), 9).name
    }

    #[test]
    fn revisions_of_the_hub_share_what_has_one_digest() {
        let of = |store: &str, key_: &str, tag: &str| key(store, key_, tag, 9).name;
        let main = of("hf://datasets/lab/acts", "a/b@c", "d");
        assert_eq!(of("hf://datasets/lab/acts@v1", "a/b@c", "d"), main);
        for other in [
            of("hf://datasets/lab/acts", "a/b", "d"),
            of("hf://datasets/lab/act", "a/b@c", "d"),
            of("hf://datasets/lab/acts@v1", "a/b@c", "e"),
            of("s3://datasets/lab/acts", "a/b@c", "d"),
        ] {
            assert_ne!(other, main);
        }
        assert_ne!(of("s3://b@v1", "k", "d"), of("s3://b", "k", "d"));
    }

    #[test]
    fn equal_names_on_other_servers_have_other_keys() {
        let origins = ["", "http://a:9000", "http://b:9000", "https://h/?id=1", "https://h/?id=2", "https://h/?se=1"];
        for (i, a) in origins.iter().enumerate() {
            assert!(origins[i + 1..].iter().all(|b| at(a) != at(b)), "{a}");
        }
        assert_eq!(at("https://h/?id=1&sig=x&se=2026"), at("https://h/?id=1&sig=y&se=2027"));
        assert_eq!(at("https://user:word@h/"), at("https://h/"));
    }

    #[test]
    fn a_key_is_another_for_another_address_version_or_size() {
        let base = key("s3://b", "k", "v", 9);
        let others = [
            key("s3://b", "l", "v", 9),
            key("s3://c", "k", "v", 9),
            key("s3://b", "k", "w", 9),
            key("s3://b", "k", "v", 8),
            key("s3://b", "k?x", "v", 9),
        ];
        assert!(others.iter().all(|other| other.name != base.name));
        assert_eq!(key("s3://b", "k", "v", 9).name, base.name);
        let geometry = geometry_of(&base.name).unwrap();
        assert_eq!((geometry.size, geometry.seed), (9, base.geometry.seed));
        assert!(["", "x", "12-3", "lost+found"].iter().all(|name| geometry_of(name).is_none()));
    }

    #[test]
    fn credentials_are_in_no_key() {
        let plain = key("https://host", "a/b@c", "v", 9);
        for (store, path) in [
            ("https://user:word@host", "a/b@c"),
            ("https://host", "a/b@c?X-Amz-Signature=12&X-Amz-Date=3"),
            ("https://host", "a/b@c?Expires=1&Signature=2&Key-Pair-Id=3"),
        ] {
            let signed = key(store, path, "v", 9);
            assert_eq!((&signed.name, &signed.url), (&plain.name, &plain.url));
        }
        let other = key("https://host", "a/b@c?id=5&sig=7&se=2", "v", 9);
        assert_ne!(other.name, plain.name);
        assert_eq!(other.url, "https://host/a/b@c");
        assert_eq!(key("abfss://box@account", "k?x", "v", 1).url, "abfss://box@account/k?x");
    }
}
