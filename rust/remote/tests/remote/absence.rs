use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use actshard_core::Kind;
use actshard_core::source::{Access, Store};
use actshard_core::threads::Stop;
use actshard_remote::store::Standing;

use super::server::{Fake, Fault, noise, open, read};

const PAGE: &str = "<html><body>404 page not found</body></html>";
const NO_BUCKET: &str = "<Error><Code>NoSuchBucket</Code><Message>none</Message></Error>";

fn fake() -> Fake {
    Fake::new([("run/.zarray", noise(100, 1)), ("run/0.0", noise(1000, 2)), ("run/0.1", noise(1000, 3))])
}

fn page(code: u16, text: &'static str) -> Fault {
    Fault::Status(code, vec![], text)
}

#[test]
fn an_array_that_vanished_is_not_there() {
    let fake = fake();
    for store in [fake.s3("run", &[]), fake.web("run", &[])] {
        let place = store.root().join(".zarray");
        open(&store, &place).unwrap();
        assert!(store.look(&place).is_ok());
    }
    let (bucket, web) = (fake.s3("run", &[]), fake.web("run", &[]));
    for store in [&bucket, &web] {
        open(store, &store.root().join(".zarray")).unwrap();
    }
    fake.remove("run/.zarray");
    for store in [&bucket, &web] {
        let error = store.look(&store.root().join(".zarray")).unwrap_err();
        assert_eq!((error.kind, error.detail.as_str()), (Kind::NotFound, "expected a file, found nothing"));
    }
    fake.put("run/.zarray", noise(100, 9));
    assert_eq!(bucket.look(&bucket.root().join(".zarray")).unwrap_err().kind, Kind::Format);
}

#[test]
fn a_bucket_that_vanished_is_no_absent_object() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    open(&store, &store.location("run/.zarray")).unwrap();
    fake.fault("/bucket", page(404, NO_BUCKET), 1000);
    for name in ["run/0.0", "run/.zarray"] {
        let error = store.look(&store.location(name)).unwrap_err();
        assert!(error.kind == Kind::Access && error.detail.contains("404 NoSuchBucket"), "{error}");
    }
    assert_eq!(store.list(&store.root()).unwrap_err().kind, Kind::Access);
}

#[test]
fn a_404_of_a_proxy_is_no_absent_object() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    fake.fault("run/0.0", page(404, PAGE), 1);
    let chunk = open(&store, &store.location("run/0.0")).unwrap();
    assert_eq!(read(&*chunk, 0, 1000).unwrap(), noise(1000, 2));
    fake.fault("run/0.1", page(404, ""), 1000);
    let error = open(&store, &store.location("run/0.1")).unwrap_err();
    assert!(error.kind == Kind::Access && error.detail.contains("not an answer of the service itself"), "{error}");
}

#[test]
fn a_404_of_a_web_server_is_asked_for_again() {
    let fake = fake();
    let store = fake.web("run", &[]);
    let root = store.root();
    let (array, a, b, none) = (root.join(".zarray"), root.join("0.0"), root.join("0.1"), root.join("0.2"));
    fake.fault(".zarray", page(404, PAGE), 1);
    assert!(open(&store, &array).is_ok());
    fake.fault("/web/", page(404, PAGE), 3);
    let opened = store.open_many(&[&a, &b, &none], Access::Kept, &Stop::new());
    assert_eq!(read(&**opened[0].as_ref().unwrap(), 0, 1000).unwrap(), noise(1000, 2));
    assert_eq!(read(&**opened[1].as_ref().unwrap(), 0, 1000).unwrap(), noise(1000, 3));
    assert_eq!(opened[2].as_ref().unwrap_err().kind, Kind::NotFound);
    // While the server denies what it has, what it denies may be there.
    let other = root.join("0.3");
    fake.fault("/web/", page(404, PAGE), 1000);
    let error = open(&store, &other).unwrap_err();
    assert!(error.kind == Kind::Format && error.detail.contains("it is gone"), "{error}");
}

#[test]
fn a_stat_asks_a_web_server_again_too() {
    let fake = fake();
    let store = fake.web("run", &[]);
    open(&store, &store.root().join(".zarray")).unwrap();
    fake.fault("run/0.0", page(404, PAGE), 1);
    let found = store.stat(&store.root().join("0.0"), &Stop::new()).unwrap();
    assert!(matches!(found, Standing::Object(1000)), "{found:?}");
    let found = store.stat(&store.root().join("0.9"), &Stop::new()).unwrap();
    assert!(matches!(found, Standing::Absent), "{found:?}");
    fake.fault("/web/", page(404, PAGE), 1000);
    let error = store.stat(&store.root().join("0.8"), &Stop::new()).unwrap_err();
    assert!(error.kind == Kind::Format && error.detail.contains("it is gone"), "{error}");
}

#[test]
fn two_first_readers_of_an_object_see_one_version() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    let place = store.location("run/0.0");
    // The first answer comes later than the replacement and the second one.
    let error = std::thread::scope(|scope| {
        let is_free = Arc::new(AtomicBool::new(false));
        fake.fault("run/0.0", Fault::Held(500, Arc::clone(&is_free)), 1);
        let first = scope.spawn(|| open(&store, &place));
        while fake.seen().is_empty() {
            std::thread::yield_now();
        }
        fake.put("run/0.0", noise(1000, 7));
        let second = open(&store, &place);
        is_free.store(true, Ordering::SeqCst);
        [first.join().unwrap(), second].into_iter().find_map(Result::err)
    });
    let error = error.unwrap();
    assert!(error.kind == Kind::Format && error.detail.contains("was replaced"), "{error}");
}

#[test]
fn sources_of_an_object_without_a_listed_etag_see_one_version() {
    let fake = fake();
    fake.set_bare_listings();
    let store = fake.s3("run", &[]);
    store.list(&store.root()).unwrap();
    let (a, b) = (open(&store, &store.location("run/0.0")).unwrap(), open(&store, &store.location("run/0.0")).unwrap());
    read(&*a, 0, 10).unwrap();
    fake.put("run/0.0", noise(1000, 7));
    assert_eq!(read(&*b, 0, 10).unwrap_err().kind, Kind::Format);
}

#[test]
fn a_listing_that_repeats_a_page_ends() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    let text = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken></ListBucketResult>";
    fake.fault("list-type=2", page(200, text), 1000);
    let error = store.list(&store.root()).unwrap_err();
    assert!(error.detail.contains("does not end"), "{error}");
    assert_eq!(fake.seen().len(), 2);
}

#[test]
fn a_stat_asks_for_no_more_than_the_beginning() {
    let fake = Fake::new([("run/a", noise(3 << 20, 1))]);
    let store = fake.web("run", &[]);
    let found = store.stat(&store.root().join("a"), &Stop::new()).unwrap();
    assert!(matches!(found, Standing::Object(size) if size == 3 << 20), "{found:?}");
    assert_eq!(fake.seen()[0].headers["range"], "bytes=0-65535");
}

#[test]
fn ranges_and_sizes_of_no_object_are_refused() {
    let fake = fake();
    for store in [fake.s3("run", &[]), fake.web("run", &[])] {
        let range = vec![("Content-Range", format!("bytes 0-{}/{}", u64::MAX, u64::MAX))];
        fake.fault("run/0.0", Fault::Status(206, range, "x"), 1);
        let error = open(&store, &store.root().join("0.0")).unwrap_err();
        assert!(error.kind == Kind::Access && error.detail.contains("impossible range"), "{error}");
    }
    let store = fake.s3("run", &[]);
    let text = "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>run/x</Key><LastModified>2022-11-06T08:49:37.000Z</LastModified><Size>18446744073709551615</Size></Contents></ListBucketResult>";
    fake.fault("list-type=2", page(200, text), 1);
    assert_eq!(store.list(&store.root()).unwrap_err().kind, Kind::Access);
}

#[test]
fn a_server_that_asked_to_wait_an_hour_is_asked_again_by_the_next_read() {
    let fake = fake();
    let store = fake.s3("run", &[("retry_timeout", "1")]);
    fake.fault("run/0.0", Fault::Status(503, vec![("Retry-After", "3600".to_string())], ""), 1);
    let text = open(&store, &store.location("run/0.0")).unwrap_err().to_string();
    assert!(
        text.contains("503: the server asks to wait 3600 s") || text.contains("(the server asks to wait 3600 s)"),
        "{text}"
    );
    assert!(text.contains("503") && !text.contains("429") && !text.contains("fewer requests"), "{text}");
    assert!(open(&store, &store.location("run/0.0")).is_ok());
}
