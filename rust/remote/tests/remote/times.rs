//! A dataset is what was there when its first file was read.

use actshard_core::Kind;
use actshard_core::source::Store;
use actshard_core::threads::Stop;
use actshard_remote::RemoteStore;

use super::server::{Fake, noise, open, read};

/// A manifest and two arrays, written at second 100; the clock is at 200.
fn fake() -> Fake {
    let fake =
        Fake::new([("run/ledger.json", noise(100, 1)), ("run/a/0", noise(1000, 2)), ("run/b/0", noise(1000, 3))]);
    for key in ["run/ledger.json", "run/a/0", "run/b/0"] {
        fake.set_written(key, 100);
    }
    fake.set_clock(200);
    fake
}

fn stores(fake: &Fake) -> [RemoteStore; 2] {
    [fake.s3("run", &[]), fake.web("run", &[])]
}

#[test]
fn an_object_that_was_replaced_before_its_first_answer_is_an_error() {
    for at in 0..2 {
        for travels in [false, true] {
            let fake = fake();
            let mut store = stores(&fake).into_iter().nth(at).unwrap();
            open(&store, &store.root().join("ledger.json")).unwrap();
            assert_eq!(read(&*open(&store, &store.root().join("a/0")).unwrap(), 0, 1000).unwrap(), noise(1000, 2));
            fake.set_clock(300);
            fake.put("run/b/0", noise(1000, 9));
            fake.put("run/ledger.json", noise(100, 1));
            if travels {
                store = RemoteStore::from_state(&store.state().unwrap()).unwrap();
            }
            fake.set_clock(400);
            fake.seen();
            for requests in [1, 0] {
                let error = open(&store, &store.root().join("b/0")).unwrap_err();
                assert!(
                    error.kind == Kind::Format && error.detail.contains("was replaced after it was opened"),
                    "{error}"
                );
                assert_eq!(fake.seen().len(), requests, "no request beside the first one for its bytes");
            }
            assert!(store.stat(&store.root().join("b/0"), &Stop::new()).is_err());
            // A store that is opened now reads the new dataset.
            let store = stores(&fake).into_iter().nth(at).unwrap();
            open(&store, &store.root().join("ledger.json")).unwrap();
            assert_eq!(read(&*open(&store, &store.root().join("b/0")).unwrap(), 0, 1000).unwrap(), noise(1000, 9));
        }
    }
}

#[test]
fn an_object_that_a_later_listing_shows_is_compared_too() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    open(&store, &store.location("run/ledger.json")).unwrap();
    fake.set_clock(300);
    fake.put("run/b/0", noise(1000, 9));
    assert_eq!(store.list(&store.location("run/b")).unwrap(), ["0"]);
    assert_eq!(open(&store, &store.location("run/b/0")).unwrap_err().kind, Kind::Format);
    let store = RemoteStore::from_state(&store.state().unwrap()).unwrap();
    assert_eq!(open(&store, &store.location("run/b/0")).unwrap_err().kind, Kind::Format);
}

#[test]
fn a_dataset_that_was_finished_a_moment_ago_opens() {
    let fake = fake();
    for key in ["run/a/0", "run/ledger.json", "run/b/0"] {
        fake.set_written(key, 200);
    }
    for store in stores(&fake) {
        open(&store, &store.root().join("ledger.json")).unwrap();
        open(&store, &store.root().join("a/0")).unwrap();
    }
    // But not one whose first file is old: this one was written while it was opened.
    fake.set_written("run/ledger.json", 100);
    for store in stores(&fake) {
        open(&store, &store.root().join("ledger.json")).unwrap();
        assert_eq!(open(&store, &store.root().join("a/0")).unwrap_err().kind, Kind::Format);
    }
}

#[test]
fn a_clock_that_says_nothing_hides_no_dataset() {
    let fake = fake();
    // Files whose times are in the future.
    for key in ["run/a/0", "run/ledger.json", "run/b/0"] {
        fake.set_written(key, 3000);
    }
    for store in stores(&fake) {
        open(&store, &store.root().join("ledger.json")).unwrap();
        fake.set_clock(300);
        open(&store, &store.root().join("a/0")).unwrap();
    }
}
