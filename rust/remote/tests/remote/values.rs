use actshard_core::Kind;
use actshard_core::threads::Stop;
use actshard_remote::RemoteStore;

use super::server::{Fake, noise, options_of, read};

const OPTIONS: [(&str, &[&str]); 5] = [
    (
        "s3://bucket/run",
        &[
            "endpoint_url",
            "endpoint",
            "region",
            "key",
            "secret",
            "token",
            "anon",
            "profile",
            "request_payer",
            "virtual_hosted_style_request",
            "s3_express",
            "unsigned_payload",
            "role_arn",
            "sts_endpoint",
            "metadata_endpoint",
            "container_credentials_full_uri",
            "container_credentials_relative_uri",
            "checksum_algorithm",
            "conditional_put",
            "proxy_url",
            "user_agent",
            "read_timeout",
            "retry_timeout",
            "max_retries",
        ],
    ),
    ("gs://bucket/run", &["base_url", "token", "bearer_token", "anon", "service_account", "service_account_key"]),
    (
        "az://bucket/run",
        &["account_name", "account_key", "sas_token", "token", "endpoint", "anon", "use_emulator", "tenant_id"],
    ),
    ("http://127.0.0.1:PORT/web/run", &["token", "user_agent"]),
    ("hf://datasets/lab/acts", &["token", "endpoint"]),
];

/// What makes a request of each store possible.
fn usual(url: &str, port: u16) -> Vec<(String, String)> {
    let server = format!("http://127.0.0.1:{port}");
    let pairs: &[(&str, &str)] = match url.split(':').next() {
        Some("s3") => &[("endpoint", &server), ("key", "id"), ("secret", "word"), ("region", "x"), ("token", "t")],
        Some("gs") => &[("base_url", &server), ("bearer_token", "t")],
        Some("az") => &[("endpoint", &server), ("account_name", "a"), ("account_key", "YWJj")],
        Some("hf") => &[("endpoint", &server)],
        _ => &[],
    };
    let limits = [("max_retries", "0"), ("connect_timeout", "100ms"), ("read_timeout", "1s"), ("retry_timeout", "1s")];
    pairs.iter().chain(&limits).map(|(a, b)| ((*a).to_string(), (*b).to_string())).collect()
}

#[test]
fn no_value_of_an_option_reaches_a_panic() {
    let fake = Fake::new([]);
    let long = "swordfish".repeat(20_000);
    let values =
        ["", " ", "\n", "swordfish\n", "sword\u{e9}fish", "://", "http://", "-1", "99999999999999999999", &long];
    for (url, names) in OPTIONS {
        let url = url.replace("PORT", &fake.port.to_string());
        for name in names {
            for value in values {
                let start: String = value.chars().take(30).collect();
                let mut pairs = usual(&url, fake.port);
                let synonyms = ["endpoint", "endpoint_url"];
                pairs.retain(|(key, _)| key != name && !(synonyms.contains(name) && synonyms.contains(&key.as_str())));
                pairs.push(((*name).to_string(), value.to_string()));
                let options = actshard_remote::Options::new(pairs);
                let found = RemoteStore::open(&url, options).and_then(|store| {
                    let stop = Stop::new();
                    store.stat(&store.root().join("metadata.json"), &stop)
                });
                let Err(error) = found else { continue };
                let text = error.to_string();
                assert_ne!(error.kind, Kind::Internal, "{name}: {text:.300}");
                assert!(!text.contains("cannot be sent"), "{url} {name} {start:?}: {text:.300}");
                // Names of files and profiles are no secrets.
                let is_name = ["profile", "service_account"].contains(name) || text.contains("os error");
                assert!(is_name || !text.contains("fish"), "{url} {name} {start:?}: {text:.300}");
            }
        }
    }
}

#[test]
fn refused_values_are_errors_that_name_the_option() {
    for (url, name, value) in [
        ("s3://b/k", "endpoint_url", "localhost:9000"),
        ("s3://b/k", "endpoint_url", "http://ho st"),
        ("s3://b/k", "anon", "nonsense"),
        ("s3://b/k", "secret", "swordfish\n"),
        ("s3://b/k", "region", "eu west"),
        ("az://b/k", "account_name", "a/b"),
        ("gs://b/k", "base_url", "storage"),
        ("hf://datasets/a/b", "endpoint", "hub"),
    ] {
        let error = RemoteStore::open(url, options_of(&[(name, value)])).unwrap_err();
        assert!(error.kind == Kind::Argument && error.detail.contains(name), "{error}");
        assert!(!error.detail.contains("swordfish"), "{error}");
    }
    for (url, pairs, names) in [
        ("gs://b/k", &[("service_account_key", "\"swordfish\"")][..], "service_account_key"),
        ("az://b/k", &[("account_name", "a"), ("account_key", "sword-fish")][..], "access_key"),
        ("az://b/k", &[("account_key", "YWJj")][..], "access_key"),
    ] {
        let store = RemoteStore::open(url, options_of(pairs)).unwrap();
        let error = store.stat(&store.root(), &Stop::new()).unwrap_err();
        assert!(error.kind == Kind::Access && error.detail.contains(names), "{error}");
        assert!(!error.detail.contains("fish"), "{error}");
    }
}

#[test]
fn servers_with_equal_names_and_tags_do_not_share_cached_objects() {
    let (a, b) = (noise(200_000, 1), noise(200_000, 2));
    let (one, other) = (Fake::new([("run/a", a.clone())]), Fake::new([("run/a", b.clone())]));
    let folder = tempfile::tempdir().unwrap();
    for (fake, bytes) in [(&one, &a), (&other, &b), (&one, &a)] {
        let store = fake.s3("run", &[]).cached(folder.path(), 64 << 20).unwrap();
        let source = super::server::open(&store, &store.location("run/a")).unwrap();
        assert!(read(&*source, 0, 200_000).unwrap() == *bytes, "the objects differ in their bytes only");
        let web = RemoteStore::open(&format!("http://127.0.0.1:{}/web/run", fake.port), options_of(&[])).unwrap();
        let web = web.cached(folder.path(), 64 << 20).unwrap();
        let source = super::server::open(&web, &web.location("web/run/a")).unwrap();
        assert!(read(&*source, 0, 200_000).unwrap() == *bytes);
    }
    let seen = one.seen();
    let bodies = seen.iter().filter(|seen| seen.path == "/bucket/run/a").count();
    assert!(bodies <= 3, "{bodies} requests: the last reading comes from the cache");
}

#[test]
fn objects_without_strong_tags_are_not_cached() {
    let bytes = noise(200_000, 1);
    let fake = Fake::new([("run/a", bytes.clone())]);
    fake.set_bare_listings();
    let folder = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let store = fake.s3("run", &[]).cached(folder.path(), 64 << 20).unwrap();
        store.scan(&store.root(), false, &Stop::new()).unwrap();
        let source = super::server::open(&store, &store.location("run/a")).unwrap();
        fake.seen();
        assert!(read(&*source, 0, 200_000).unwrap() == bytes);
        assert!(!fake.seen().is_empty(), "its time of writing does not tell that it is the same");
        assert_eq!(store.cache().unwrap().info().unwrap().objects, 0);
    }
}
