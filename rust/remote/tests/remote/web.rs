use actshard_core::Kind;
use actshard_core::source::Store;

use super::server::{Fake, Fault, noise, open, read};

fn fake() -> Fake {
    Fake::new([("run/a b.bin", noise(300_000, 1)), ("run/empty", vec![])])
}

#[test]
fn files_of_a_web_server_are_read_by_ranges() {
    let fake = fake();
    let store = fake.web("run", &[]);
    let source = open(&store, &store.root().join("a b.bin")).unwrap();
    assert_eq!(read(&*source, 100_000, 200_000).unwrap(), noise(300_000, 1)[100_000..]);
    let seen = fake.seen();
    assert_eq!(seen.len(), 2);
    assert!(seen.iter().all(|seen| seen.headers["accept-encoding"] == "identity" && seen.path == "/web/run/a b.bin"));
    let empty = open(&store, &store.root().join("empty")).unwrap();
    assert_eq!(empty.size(), 0);
    let error = open(&store, &store.root().join("none")).unwrap_err();
    assert_eq!(error.kind, Kind::NotFound);
    let error = store.list(&store.root()).unwrap_err();
    assert!(error.kind == Kind::Unsupported && error.detail.contains("cannot list"), "{error}");
}

#[test]
fn a_replaced_file_is_an_error() {
    for ignores in [false, true] {
        let fake = fake();
        if ignores {
            fake.ignore_match();
        }
        let store = fake.web("run", &[]);
        let source = open(&store, &store.root().join("a b.bin")).unwrap();
        fake.put("run/a b.bin", noise(300_000, 2));
        let error = read(&*source, 100_000, 10).unwrap_err();
        assert!(error.kind == Kind::Format && error.detail.contains("was replaced"), "{error}");
    }
}

#[test]
fn a_server_without_ranges_can_only_be_read_from_the_start() {
    let fake = fake();
    let store = fake.web("run", &[]);
    fake.fault("a b", Fault::Whole, 1000);
    let source = open(&store, &store.root().join("a b.bin")).unwrap();
    assert_eq!(source.size(), 300_000);
    assert_eq!(read(&*source, 0, 100).unwrap(), noise(300_000, 1)[..100]);
    let error = read(&*source, 100_000, 10).unwrap_err();
    assert!(error.detail.contains("ignores byte ranges"), "{error}");
}

#[test]
fn a_compressed_answer_is_refused() {
    let fake = fake();
    let store = fake.web("run", &[]);
    fake.fault("a b", Fault::Header("Content-Encoding", "gzip"), 1);
    let error = open(&store, &store.root().join("a b.bin")).unwrap_err();
    assert!(error.kind == Kind::Access && error.detail.contains("compressed"), "{error}");
}

#[test]
fn a_file_without_a_tag_has_no_version() {
    let fake = fake();
    let store = fake.web("run", &[]);
    fake.fault("a b", Fault::Untagged, 1000);
    let source = open(&store, &store.root().join("a b.bin")).unwrap();
    assert!(source.version().is_none());
    assert_eq!(read(&*source, 9, 10).unwrap(), noise(300_000, 1)[9..19]);
}

#[test]
fn a_token_goes_to_its_own_host_only() {
    let fake = fake();
    let store = fake.web("run", &[("token", "mine")]);
    let away = format!("http://127.0.0.1:{}/cdn/run/a b.bin?sig=9", fake.away).replace(' ', "%20");
    fake.fault("/web/", Fault::Status(302, vec![("Location", away)], ""), 1000);
    let source = open(&store, &store.root().join("a b.bin")).unwrap();
    assert_eq!(read(&*source, 9, 10).unwrap(), noise(300_000, 1)[9..19]);
    let seen = fake.seen();
    assert!(seen.iter().all(|seen| seen.away != seen.headers.contains_key("authorization")), "{seen:?}");
    assert_eq!(seen.iter().filter(|seen| !seen.away).count(), 1);
}

#[test]
fn a_signed_url_keeps_its_query() {
    let fake = fake();
    let store = fake.web("run/a%20b.bin?X-Sig=secret", &[]);
    let source = open(&store, &store.root()).unwrap();
    assert_eq!(read(&*source, 0, 10).unwrap(), noise(300_000, 1)[..10]);
    assert!(fake.seen().iter().all(|seen| seen.query == "X-Sig=secret"));
    assert_eq!(
        store.root().to_string(),
        format!("http://127.0.0.1:{}/run/a%20b.bin", fake.port).replace("/run", "/web/run")
    );
}

#[test]
fn a_folder_of_a_web_server_is_no_file() {
    let fake = fake();
    let store = fake.web("", &[]);
    fake.fault("/web/run", Fault::Status(301, vec![("Location", "/web/run/".to_string())], ""), 1000);
    assert_eq!(super::server::stat(&store, &store.location("web/run")), None);
    // The folder of the URL is known by the names in it.
    assert_eq!(super::server::stat(&store, &store.root()), Some(None));
}

#[test]
fn a_page_for_every_name_is_no_file() {
    let fake = fake();
    let store = fake.web("run", &[]);
    let page = Fault::Status(200, vec![], "\n<!DOCTYPE html><html>hello, world!</html>");
    fake.fault("shard_ledger", page, 1000);
    let place = store.root().join("shard_ledger.json");
    assert_eq!(super::server::stat(&store, &place), None);
    assert_eq!(open(&store, &place).unwrap_err().kind, Kind::NotFound);
}
