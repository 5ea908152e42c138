use actshard_core::Kind;
use actshard_core::source::{RangeRead, Store};
use actshard_core::threads::Stop;
use actshard_remote::RemoteStore;

use super::server::{COMMIT, Fake, Fault, TOKEN, noise, open, options_of, read, status};

fn fake() -> Fake {
    Fake::new([("layer 0/a.bin", noise(300_000, 1)), ("layer 0/b.bin", noise(10, 2)), ("meta.json", b"{}".to_vec())])
}

#[test]
fn a_dataset_is_pinned_listed_once_and_each_file_resolved_once() {
    let fake = fake();
    fake.set_page(2);
    let store = fake.hub("", &[]);
    assert_eq!(store.list(&store.root()).unwrap(), ["layer 0", "meta.json"]);
    assert_eq!(store.revision().as_deref(), Some(COMMIT));
    assert_eq!(store.list(&store.location("layer 0")).unwrap(), ["a.bin", "b.bin"]);
    assert_eq!(fake.seen().len(), 3); // the commit, and two pages
    let source = open(&store, &store.location("layer 0/a.bin")).unwrap();
    assert_eq!((source.size(), fake.seen().len()), (300_000, 0));
    let bytes = noise(300_000, 1);
    let mut into = vec![vec![0; 1000]; 50];
    let reads = into.iter_mut().enumerate().map(|(i, into)| RangeRead { at: i as u64 * 5000, into });
    source.read_many(&mut reads.collect::<Vec<_>>(), &Stop::new()).unwrap();
    assert!(into.iter().enumerate().all(|(i, part)| *part == bytes[i * 5000..i * 5000 + 1000]));
    let seen = fake.seen();
    assert_eq!(seen.iter().filter(|seen| !seen.away).count(), 1);
    assert_eq!(seen.len(), 51);
    assert!(seen.iter().all(|seen| seen.away != seen.headers.contains_key("authorization")));
}

#[test]
fn opening_a_file_first_lists_the_dataset() {
    let fake = fake();
    let store = fake.hub("", &[]);
    let source = open(&store, &store.location("meta.json")).unwrap();
    assert_eq!(source.size(), 2);
    assert_eq!(open(&store, &store.location("none")).unwrap_err().kind, Kind::NotFound);
    assert_eq!(open(&store, &store.location("layer 0")).unwrap_err().kind, Kind::NotAFile);
    assert_eq!(fake.seen().len(), 2);
}

#[test]
fn an_ended_url_is_resolved_again_once() {
    let fake = fake();
    let store = fake.hub("", &[]);
    let source = open(&store, &store.location("layer 0/a.bin")).unwrap();
    read(&*source, 0, 10).unwrap();
    fake.expire();
    assert_eq!(read(&*source, 100_000, 10).unwrap(), noise(300_000, 1)[100_000..100_010]);
    fake.seen();
    fake.fault("/cdn/", Fault::Status(403, vec![], "invalid key pair id"), 1000);
    let error = read(&*source, 5, 10).unwrap_err();
    assert!(error.to_string().contains("invalid key pair id"), "{error}");
    assert!(fake.seen().len() <= 4);
}

#[test]
fn a_file_that_changes_at_its_host_is_an_error() {
    let fake = fake();
    let store = fake.hub("", &[]);
    let source = open(&store, &store.location("layer 0/a.bin")).unwrap();
    read(&*source, 0, 10).unwrap();
    fake.put("layer 0/a.bin", noise(300_000, 5));
    assert_eq!(read(&*source, 100_000, 10).unwrap_err().kind, Kind::Format);
    fake.expire(); // resolved again, the identity of the hub is another one
    assert_eq!(read(&*source, 100_000, 10).unwrap_err().kind, Kind::Format);
}

#[test]
fn the_limit_of_requests_is_waited_for() {
    let limit = |t: u32| Fault::Status(429, vec![("RateLimit", format!("\"api\";r=0;t={t}"))], "");
    let fake = fake();
    let store = fake.hub("", &[]);
    fake.fault("/tree/", limit(0), 1);
    assert_eq!(store.list(&store.root()).unwrap().len(), 2);
    // A wait of 31 s is longer than the time allowed: no second request.
    let hasty = fake.hub("", &[("retry_timeout", "20")]);
    fake.fault("/tree/", limit(30), 1000);
    fake.seen();
    let error = hasty.list(&hasty.root()).unwrap_err();
    assert!(error.detail.contains("429"), "{error}");
    assert_eq!(fake.seen().len(), 2); // the commit and the listing
}

#[test]
fn errors_of_the_hub_say_what_to_do() {
    let fake = fake();
    let store = fake.hub("", &[("token", "")]);
    let text = store.list(&store.root()).unwrap_err().to_string();
    assert!(
        text.starts_with("hf://datasets/lab/acts: cannot read: 401 RepoNotFound") && text.contains("HF_TOKEN"),
        "{text}"
    );
    let text = fake.hub("@v9", &[]).list(&fake.hub("@v9", &[]).root()).unwrap_err().to_string();
    assert!(text.contains("RevisionNotFound"), "{text}");
    let store = fake.hub("", &[]);
    let source = open(&store, &store.location("layer 0/a.bin")).unwrap();
    let gated =
        vec![("X-Error-Code", "GatedRepo".to_string()), ("X-Error-Message", "Access is restricted".to_string())];
    fake.fault("/resolve/", Fault::Status(403, gated, ""), 1);
    let text = read(&*source, 0, 10).unwrap_err().to_string();
    assert!(text.contains("403 GatedRepo: Access is restricted; request access"), "{text}");
    assert!(!text.contains(TOKEN));
}

#[test]
fn a_state_keeps_the_commit_and_the_listing() {
    let fake = fake();
    let store = fake.hub("/layer 0", &[]);
    store.list(&store.root()).unwrap();
    let other = RemoteStore::from_state(&store.state().unwrap()).unwrap();
    assert_eq!(other.revision().as_deref(), Some(COMMIT));
    fake.seen();
    assert_eq!(other.list(&other.root()).unwrap(), ["a.bin", "b.bin"]);
    let source = open(&other, &other.location("layer 0/b.bin")).unwrap();
    assert_eq!(read(&*source, 0, 10).unwrap(), noise(10, 2));
    assert_eq!(fake.seen().len(), 2);
}

#[test]
fn redirects_of_the_listing_stay_on_the_host() {
    let fake = fake();
    let store = fake.hub("", &[("max_retries", "0")]);
    let away = vec![("Location", format!("http://127.0.0.1:{}/x", fake.away))];
    fake.fault("/revision/", Fault::Status(302, away, ""), 1);
    assert!(store.list(&store.root()).unwrap_err().detail.contains("another host"));
    assert!(fake.seen().iter().all(|seen| !seen.away));
    fake.fault("/revision/", status(503), 1);
    assert!(store.list(&store.root()).unwrap_err().detail.contains("503"));
}

#[test]
fn other_options_than_the_hubs_are_refused() {
    let refused = RemoteStore::open("hf://datasets/lab/acts", options_of(&[("region", "x")])).unwrap_err();
    assert_eq!(refused.kind, Kind::Argument);
}

#[test]
fn a_url_of_a_file_is_that_file() {
    let fake = fake();
    let store = fake.hub("/meta.json", &[]);
    assert_eq!(super::server::stat(&store, &store.root()), Some(Some(2)));
    let source = open(&store, &store.root()).unwrap();
    assert_eq!(read(&*source, 0, 2).unwrap(), b"{}");
}

#[test]
fn a_folder_beside_the_url_is_listed_too() {
    let fake = Fake::new([("run/a", vec![1]), ("run-2/b", vec![2])]);
    let store = fake.hub("/run", &[]);
    assert_eq!(store.list(&store.root()).unwrap(), ["a"]);
    assert_eq!(store.list(&store.location("run-2")).unwrap(), ["b"]);
    assert_eq!(read(&*open(&store, &store.location("run-2/b")).unwrap(), 0, 1).unwrap(), [2]);
}

#[test]
fn a_fresh_url_that_is_refused_is_replaced_once() {
    let fake = fake();
    let store = fake.hub("", &[]);
    let source = open(&store, &store.location("layer 0/a.bin")).unwrap();
    fake.fault("/cdn/", Fault::Status(403, vec![], "invalid key pair id"), 1);
    assert_eq!(read(&*source, 5, 10).unwrap(), noise(300_000, 1)[5..15]);
    assert_eq!(fake.seen().iter().filter(|seen| seen.path.contains("/resolve/")).count(), 2);
}
