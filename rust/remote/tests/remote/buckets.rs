use actshard_core::Kind;
use actshard_core::source::{Access, RangeRead, Store, Version};
use actshard_core::threads::Stop;
use actshard_remote::RemoteStore;
use actshard_remote::store::Standing;

use super::server::{Fake, Fault, noise, open, options_of, read, stat};

#[test]
fn any_range_has_the_bytes_of_the_object() {
    let bytes = noise(9 << 20, 1);
    let fake = Fake::new([("run/a.bin", bytes.clone()), ("run/empty", vec![])]);
    let store = fake.s3("run", &[]);
    let source = open(&store, &store.location("run/a.bin")).unwrap();
    assert_eq!(source.size(), bytes.len() as u64);
    for (at, len) in [(0, 1), (0, 64 << 10), (65_535, 2), (9 << 20, 0), ((9 << 20) - 1, 1), (5, 9 << 19), (0, 9 << 20)]
    {
        assert_eq!(read(&*source, at as u64, len).unwrap(), bytes[at..at + len], "{at} {len}");
    }
    let (mut a, mut b) = (vec![0; 100], vec![0; 5 << 20]);
    let reads = &mut [RangeRead { at: 8 << 20, into: &mut a }, RangeRead { at: 3, into: &mut b }];
    source.read_many(reads, &Stop::new()).unwrap();
    assert!(a == bytes[8 << 20..(8 << 20) + 100] && b == bytes[3..3 + (5 << 20)]);
    let error = read(&*source, (9 << 20) - 1, 2).unwrap_err();
    assert_eq!(error.kind, Kind::Truncated);
    let empty = open(&store, &store.location("run/empty")).unwrap();
    assert_eq!((empty.size(), read(&*empty, 0, 0).unwrap()), (0, vec![]));
}

#[test]
fn an_unknown_object_costs_one_request_and_a_listed_one_none() {
    let fake = Fake::new([("run/a", noise(1000, 1)), ("run/b", noise(1000, 2)), ("run/c", noise(100_000, 3))]);
    let store = fake.s3("run", &[]);
    let a = open(&store, &store.location("run/a")).unwrap();
    assert_eq!(read(&*a, 0, 1000).unwrap(), noise(1000, 1));
    assert_eq!(fake.seen().len(), 1);
    assert_eq!(store.scan(&store.root(), false, &Stop::new()).unwrap().len(), 3);
    let places = [store.location("run/b"), store.location("run/c"), store.location("run/none")];
    let opened = store.open_many(&places.iter().collect::<Vec<_>>(), Access::Kept, &Stop::new());
    assert_eq!(fake.seen().len(), 1);
    assert_eq!(opened[1].as_ref().unwrap().size(), 100_000);
    assert_eq!(opened[2].as_ref().unwrap_err().kind, Kind::NotFound);
    assert_eq!(store.list(&store.location("run")).unwrap(), ["a", "b", "c"]);
    assert_eq!(stat(&store, &store.location("run/b")), Some(Some(1000)));
    assert_eq!(fake.seen().len(), 0);
    assert_eq!(store.counts().listings, 1);
    let again = open(&store, &store.location("run/a")).unwrap();
    assert_eq!((again.size(), fake.seen().len()), (1000, 0));
}

#[test]
fn folders_are_listed_by_level_and_by_pages() {
    let keys = ["run/x/1", "run/x/2", "run/y/z/3", "run/é a+b%", "run/meta.json", "runner/no"];
    let fake = Fake::new(keys.map(|key| (key, vec![1])));
    fake.set_page(2);
    let names = |store: &RemoteStore, key: &str, deep| {
        let found = store.scan(&store.location(key), deep, &Stop::new()).unwrap();
        found.into_iter().map(|found| (found.name, found.size)).collect::<Vec<_>>()
    };
    let all = [("x", None), ("y", None), ("meta.json", Some(1)), ("é a+b%", Some(1))];
    let all = all.map(|(name, size)| (name.to_string(), size));
    for deep in [false, true] {
        let store = fake.s3("run", &[]);
        assert_eq!(names(&store, "run", deep), all);
        let before = fake.seen().len();
        assert!(before == if deep { 3 } else { 2 }, "{before}");
        assert_eq!(names(&store, "run/x", deep), [("1".to_string(), Some(1)), ("2".to_string(), Some(1))]);
        assert_eq!(fake.seen().len(), usize::from(!deep));
        assert!(names(&store, "nothing", false).is_empty());
        let odd = open(&store, &store.location("run/é a+b%")).unwrap();
        assert_eq!(read(&*odd, 0, 1).unwrap(), [1]);
        assert_eq!(stat(&store, &store.location("run/y")), Some(None));
        assert!(store.look(&store.location("run/y/z")).is_ok());
        assert_eq!(store.look(&store.location("run/q")).unwrap_err().kind, Kind::NotFound);
        fake.seen();
    }
}

#[test]
fn a_replaced_object_is_an_error_and_never_other_bytes() {
    for ignores in [false, true] {
        for bare in [false, true] {
            let fake = Fake::new([("run/a", noise(200_000, 1))]);
            if ignores {
                fake.ignore_match();
            }
            if bare {
                fake.set_bare_listings();
            }
            let store = fake.s3("run", &[]);
            store.scan(&store.root(), false, &Stop::new()).unwrap();
            let source = open(&store, &store.location("run/a")).unwrap();
            assert_eq!(read(&*source, 0, 10).unwrap(), noise(200_000, 1)[..10]);
            assert!(matches!(source.version(), Some(Version::Tag(_))));
            fake.put("run/a", noise(200_000, 2));
            let error = read(&*source, 100_000, 10).unwrap_err();
            assert!(error.kind == Kind::Format && error.detail.contains("was replaced"), "{error}");
            fake.remove("run/a");
            let error = read(&*source, 100_000, 10).unwrap_err();
            assert!(error.kind == Kind::Format && error.detail.contains("was replaced"), "{error}");
            fake.put("run/a", noise(100, 2));
            assert_eq!(read(&*source, 100_000, 10).unwrap_err().kind, Kind::Format);
            assert_eq!(read(&*source, 0, 200_000).unwrap_err().kind, Kind::Format);
        }
    }
}

#[test]
fn an_object_opened_again_is_still_the_first_one() {
    let fake = Fake::new([("run/a", noise(200_000, 1))]);
    let store = fake.s3("run", &[]);
    drop(open(&store, &store.location("run/a")).unwrap());
    fake.put("run/a", noise(200_000, 2));
    let again = open(&store, &store.location("run/a")).unwrap();
    assert_eq!(read(&*again, 0, 10).unwrap_err().kind, Kind::Format);
}

#[test]
fn a_state_opens_the_same_store_without_a_request() {
    let fake = Fake::new([("run/a", noise(200_000, 1)), ("run/x/b", noise(10, 2))]);
    let store = fake.s3("run", &[]);
    store.scan(&store.root(), true, &Stop::new()).unwrap();
    let state = store.state().unwrap();
    fake.seen();
    let other = RemoteStore::from_state(&state).unwrap();
    assert_eq!(other.list(&other.location("run/x")).unwrap(), ["b"]);
    let source = open(&other, &other.location("run/a")).unwrap();
    assert_eq!((source.size(), fake.seen().len()), (200_000, 0));
    assert_eq!(read(&*source, 9, 10).unwrap(), noise(200_000, 1)[9..19]);
    assert_eq!(RemoteStore::from_state(&state[..state.len() / 2]).unwrap_err().kind, Kind::Format);
    assert_eq!(RemoteStore::from_state(b"[2, {}]").unwrap_err().kind, Kind::Format);
}

#[test]
fn requests_are_signed_unless_access_is_anonymous() {
    let fake = Fake::new([("run/a", vec![1])]);
    let store = fake.s3("run", &[]);
    open(&store, &store.location("run/a")).unwrap();
    let signed = fake.seen().remove(0);
    assert!(signed.headers["authorization"].starts_with("AWS4-HMAC-SHA256 Credential=id/"));
    let endpoint = format!("http://127.0.0.1:{}", fake.port);
    let anonymous =
        RemoteStore::open("s3://bucket/run", options_of(&[("endpoint_url", &endpoint), ("anon", "true")])).unwrap();
    open(&anonymous, &anonymous.location("run/a")).unwrap();
    assert!(!fake.seen().remove(0).headers.contains_key("authorization"));
}

#[test]
fn secrets_are_in_no_debug_text_and_no_message() {
    let fake = Fake::new([("run/a", vec![1])]);
    let store = fake.s3("run", &[]);
    fake.fault("run/a", super::server::status(403), 1);
    let error = open(&store, &store.location("run/a")).unwrap_err();
    let texts = [format!("{store:?}"), format!("{error:?}"), error.to_string()];
    assert!(texts.iter().all(|text| !text.contains("swordfish")), "{texts:?}");
    let web = fake.web("run/none?X-Amz-Signature=swordfish", &[("token", "sword2")]);
    let error = open(&web, &web.root()).unwrap_err();
    let texts = [format!("{web:?}"), format!("{error:?}"), error.to_string()];
    assert!(texts.iter().all(|text| !text.contains("sword")), "{texts:?}");
}

#[test]
fn a_location_of_another_store_is_refused() {
    let fake = Fake::new([("run/a", vec![1])]);
    let (store, web) = (fake.s3("run", &[]), fake.web("run", &[]));
    assert_eq!(open(&store, &web.location("run/a")).unwrap_err().kind, Kind::Internal);
}

#[test]
fn an_object_that_is_read_once_comes_with_its_first_request() {
    let bytes = noise(3 << 20, 1);
    let fake = Fake::new([("run/0.0", bytes.clone()), ("run/0.1", noise(5 << 20, 2))]);
    let store = fake.s3("run", &[]);
    let place = store.location("run/0.0");
    let source = store.open_many(&[&place], Access::Once, &Stop::new()).pop().unwrap().unwrap();
    assert_eq!(read(&*source, 0, 3 << 20).unwrap(), bytes);
    assert_eq!(fake.seen().len(), 1);
    let place = store.location("run/0.1");
    let longer = store.open_many(&[&place], Access::Once, &Stop::new()).pop().unwrap().unwrap();
    assert_eq!(read(&*longer, 0, 5 << 20).unwrap(), noise(5 << 20, 2));
    let seen = fake.seen();
    assert_eq!(
        seen.iter().map(|seen| seen.headers["range"].as_str()).collect::<Vec<_>>(),
        ["bytes=0-4194303", "bytes=4194304-5242879"]
    );
}

#[test]
fn the_listing_of_a_name_that_is_no_folder_hides_nothing() {
    let fake = Fake::new([("run/a", vec![1, 2])]);
    let store = fake.s3("run/a", &[]);
    assert!(store.list(&store.root()).unwrap().is_empty());
    assert_eq!(stat(&store, &store.root()), Some(Some(2)));
    let folder = fake.s3("run", &[]);
    fake.seen();
    assert_eq!(stat(&folder, &folder.root()), Some(None));
    assert_eq!(folder.list(&folder.root()).unwrap(), ["a"]);
    assert_eq!(fake.seen().len(), 1);
    let nothing = fake.s3("none", &[]);
    assert_eq!(stat(&nothing, &nothing.root()), None);
    assert_eq!(fake.seen().len(), 2, "one listing and one GET");
}

#[test]
fn a_bucket_that_may_not_be_listed_is_read_by_name() {
    let fake = Fake::new([("run/metadata.json", b"{}".to_vec())]);
    let denied = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>";
    let store = fake.s3("run", &[]);
    fake.fault("list-type", Fault::Status(403, vec![], denied), 1000);
    fake.fault("labels", Fault::Status(403, vec![], denied), 1000);
    assert_eq!(stat(&store, &store.root()), Some(None));
    assert!(!store.lists());
    assert_eq!(stat(&store, &store.location("run/metadata.json")), Some(Some(2)));
    let place = store.location("run/labels.bin");
    let Standing::Denied(error) = store.stat(&place, &Stop::new()).unwrap() else { panic!("told as absent or there") };
    assert!(error.kind == Kind::Access && error.detail.contains("used: the credentials of storage_options"), "{error}");
    assert_eq!(
        open(&store, &place).unwrap_err().kind,
        Kind::Access,
        "never as absent: chunks that are have fill values"
    );
    let listings = fake.seen().iter().filter(|seen| seen.query.contains("list-type")).count();
    assert_eq!(listings, 1);
}

#[test]
fn wrong_credentials_are_no_absence() {
    let fake = Fake::new([("run/metadata.json", b"{}".to_vec())]);
    let wrong = "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message></Error>";
    fake.fault("bucket", Fault::Status(403, vec![], wrong), 1000);
    let store = fake.s3("run", &[]);
    assert_eq!(store.stat(&store.root(), &Stop::new()).unwrap_err().kind, Kind::Access);
    let error = store.stat(&store.location("run/a.json"), &Stop::new()).unwrap_err();
    assert!(store.lists() && error.detail.contains("check the credentials"), "{error}");
}

#[test]
fn an_object_below_which_nothing_is_listed_is_listed_once() {
    let fake = Fake::new([("run/index/a.parquet", b"PAR1".to_vec())]);
    let store = fake.s3("run/index/a.parquet", &[]);
    for _ in 0..3 {
        assert_eq!(stat(&store, &store.root()), Some(Some(4)));
        assert!(store.scan(&store.root(), false, &Stop::new()).unwrap().is_empty());
    }
    let source = open(&store, &store.root()).unwrap();
    assert_eq!(read(&*source, 0, 4).unwrap(), b"PAR1");
    assert_eq!(fake.seen().len(), 2, "one GET and one listing");
}
