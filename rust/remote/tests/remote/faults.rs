use std::time::Duration;

use actshard_core::Kind;
use actshard_core::source::{RangeRead, Store};
use actshard_core::threads::Stop;

use super::server::{Fake, Fault, TOKEN, noise, open, read, status};

const LEN: usize = 300_000;

fn fake() -> Fake {
    Fake::new([("run/a", noise(LEN, 1))])
}

#[test]
fn temporary_failures_are_tried_again() {
    let faults = [
        status(503),
        status(500),
        status(429),
        Fault::Reset,
        Fault::Cut(0),
        Fault::Cut(100),
        Fault::Cut(LEN - 1),
        Fault::Stall(1000, Duration::from_millis(1500)),
        Fault::Late(Duration::from_millis(500)),
        Fault::Status(503, vec![("Retry-After", "0".to_string())], "<Error><Code>SlowDown</Code></Error>"),
    ];
    for fault in faults {
        let fake = fake();
        let store = fake.s3("run", &[]);
        store.list(&store.root()).unwrap();
        let source = open(&store, &store.location("run/a")).unwrap();
        fake.fault("run/a", fault.clone(), 3);
        assert_eq!(read(&*source, 0, LEN).unwrap(), noise(LEN, 1), "{fault:?}");
    }
}

#[test]
fn opening_and_listing_are_tried_again_too() {
    for fault in [status(503), Fault::Reset, Fault::Cut(50)] {
        let fake = fake();
        let store = fake.s3("run", &[]);
        fake.fault("run/a", fault.clone(), 2);
        let source = open(&store, &store.location("run/a")).unwrap();
        assert_eq!(read(&*source, 0, LEN).unwrap(), noise(LEN, 1), "{fault:?}");
        fake.fault("list-type", fault.clone(), 1);
        assert_eq!(store.list(&store.root()).unwrap(), ["a"], "{fault:?}");
    }
}

#[test]
fn a_failure_that_stays_is_one_line_after_a_bounded_number_of_requests() {
    let xml = "<Error><Code>SlowDown</Code><Message>Reduce your request rate</Message></Error>";
    let fake = fake();
    let store = fake.s3("run", &[("max_retries", "2")]);
    fake.fault("run/a", Fault::Status(503, vec![], xml), 1000);
    let error = open(&store, &store.location("run/a")).unwrap_err();
    assert_eq!(error.kind, Kind::Access);
    let text = error.to_string();
    assert!(
        text.starts_with("s3://bucket/run/a: cannot read: 503 SlowDown: Reduce your request rate (after 3 attempts)"),
        "{text}"
    );
    assert!((3..=6).contains(&fake.seen().len()));
}

#[test]
fn a_body_that_always_breaks_is_an_error() {
    let fake = fake();
    let store = fake.s3("run", &[("max_retries", "2")]);
    store.list(&store.root()).unwrap();
    let source = open(&store, &store.location("run/a")).unwrap();
    fake.fault("run/a", Fault::Cut(10), 1000);
    let error = read(&*source, 7, LEN - 7).unwrap_err();
    assert!(error.kind == Kind::Access && error.to_string().contains("byte 7: cannot read"), "{error}");
}

/// The server would send for hours: each byte ends a wait before its limit.
#[test]
fn a_body_that_drips_is_asked_for_again_and_then_an_error() {
    let drip = Fault::Drip(1000, Duration::from_millis(50));
    let options = [("retry_timeout", "3"), ("read_timeout", "3")];
    let fake = fake();
    let store = fake.s3("run", &options);
    store.list(&store.root()).unwrap();
    let source = open(&store, &store.location("run/a")).unwrap();
    fake.fault("run/a", drip.clone(), 1);
    assert_eq!(read(&*source, 0, LEN).unwrap(), noise(LEN, 1));
    fake.seen();
    fake.fault("run/a", drip.clone(), 1000);
    let error = read(&*source, 0, LEN).unwrap_err();
    assert!(error.kind == Kind::Access && error.to_string().contains("too slow"), "{error}");
    assert!((2..=6).contains(&fake.seen().len()));
    // The first bytes of an object that nothing is known of.
    let store = fake.s3("run", &options);
    let error = open(&store, &store.location("run/a")).unwrap_err();
    assert!(error.kind == Kind::Access && error.to_string().contains("too slow"), "{error}");
}

#[test]
fn reads_that_follow_each_other_are_one_request() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    store.list(&store.root()).unwrap();
    let source = open(&store, &store.location("run/a")).unwrap();
    fake.seen();
    // Also if the body breaks inside of one of them.
    for fault in [None, Some(Fault::Cut(20_000)), Some(Fault::Cut(70_000))] {
        let mut into = [vec![0; 20_000], vec![], vec![0; 30_000], vec![0; 50_000], vec![0; 10]];
        let at = [100, 20_100, 20_100, 50_100, 200_000];
        // A fault is for the request that comes first: it would not break the body of ten bytes.
        let count = if fault.is_some() { 4 } else { 5 };
        let mut reads: Vec<_> =
            at.into_iter().zip(&mut into).take(count).map(|(at, into)| RangeRead { at, into }).collect();
        let broken = usize::from(fault.is_some());
        if let Some(fault) = fault {
            fake.fault("run/a", fault, 1);
        }
        source.read_many(&mut reads, &Stop::new()).unwrap();
        // Each for itself they were four. A broken answer may have brought nothing: what is asked for again need not begin at
        // another byte.
        let asked: Vec<_> = fake.seen().iter().map(|seen| seen.headers["range"].clone()).collect();
        assert_eq!(asked.len(), count - 3 + broken, "{asked:?}");
        let bytes = noise(LEN, 1);
        for (at, into) in at.into_iter().zip(&into).take(count) {
            assert!(into[..] == bytes[at as usize..at as usize + into.len()]);
        }
    }
}

#[test]
fn a_server_that_asks_to_wait_too_long_is_not_waited_for() {
    let fake = fake();
    let store = fake.s3("run", &[("retry_timeout", "2")]);
    fake.fault("run/a", Fault::Status(429, vec![("Retry-After", "3600".to_string())], ""), 1000);
    let error = open(&store, &store.location("run/a")).unwrap_err();
    assert!(error.to_string().contains("429"), "{error}");
    assert!(fake.seen().len() <= 2);
}

#[test]
fn a_refusal_is_told_at_once_and_is_no_missing_object() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    fake.fault("run/a", Fault::Status(403, vec![], "<Error><Code>AccessDenied</Code><Message>No</Message></Error>"), 1);
    let error = open(&store, &store.location("run/a")).unwrap_err();
    assert!(error.kind == Kind::Access && error.to_string().contains("may not list the bucket"), "{error}");
    assert_eq!(fake.seen().len(), 1);
    let error = open(&store, &store.location("run/none")).unwrap_err();
    assert_eq!(error.kind, Kind::NotFound);
    assert_eq!(error.to_string(), "s3://bucket/run/none: expected an object, found nothing");
}

#[test]
fn an_answer_that_is_not_the_one_asked_for_is_refused() {
    for fault in [Fault::Elsewhere, Fault::Whole] {
        let fake = fake();
        let store = fake.s3("run", &[]);
        store.list(&store.root()).unwrap();
        let source = open(&store, &store.location("run/a")).unwrap();
        fake.fault("run/a", fault.clone(), 1);
        assert_eq!(read(&*source, 1000, 10).unwrap_err().kind, Kind::Access, "{fault:?}");
        assert_eq!(read(&*source, 1000, 10).unwrap(), noise(LEN, 1)[1000..1010]);
    }
}

#[test]
fn a_bucket_in_another_region_is_found() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    let region = vec![("x-amz-bucket-region", "eu-west-1".to_string())];
    fake.fault("run/a", Fault::Status(301, region, "<Error><Code>PermanentRedirect</Code></Error>"), 1);
    let source = open(&store, &store.location("run/a")).unwrap();
    assert_eq!(read(&*source, 0, LEN).unwrap(), noise(LEN, 1));
    let seen = fake.seen();
    assert!(seen[0].headers["authorization"].contains("/us-east-1/"));
    assert!(seen[1..].iter().all(|seen| seen.headers["authorization"].contains("/eu-west-1/")));
}

#[test]
fn a_stop_ends_every_wait() {
    let fake = fake();
    let store = fake.s3("run", &[]);
    store.list(&store.root()).unwrap();
    let source = open(&store, &store.location("run/a")).unwrap();
    let (stop, hour) = (Stop::new(), Duration::from_secs(3600));
    fake.fault("/bucket", Fault::Late(hour), 1000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            stop.set();
        });
        let mut into = vec![0; 10];
        let error = source.read_many(&mut [RangeRead { at: 0, into: &mut into }], &stop).unwrap_err();
        assert_eq!(error.kind, Kind::Interrupted);
        let error = store.scan(&store.location("elsewhere"), false, &stop).unwrap_err();
        assert_eq!(error.kind, Kind::Interrupted);
        let other = store.location("elsewhere/b");
        let opened = store.open_many(&[&other], actshard_core::source::Access::Kept, &stop).pop().unwrap();
        assert_eq!(opened.unwrap_err().kind, Kind::Interrupted);
    });
}

#[test]
fn a_slow_answer_is_asked_for_again() {
    let fake = fake();
    let store = fake.s3("run", &[("hedge", "true")]);
    store.list(&store.root()).unwrap();
    let source = open(&store, &store.location("run/a")).unwrap();
    fake.fault("run/a", Fault::Late(Duration::from_secs(3600)), 1);
    assert_eq!(read(&*source, 5, 10).unwrap(), noise(LEN, 1)[5..15]);
    fake.fault("run/a", Fault::Stall(100_000, Duration::from_secs(3600)), 1);
    assert_eq!(read(&*source, 0, LEN).unwrap(), noise(LEN, 1));
    // On a busy machine other answers are slow too.
    assert!(store.counts().hedges >= 2);
}

#[test]
fn nothing_listens_is_one_line() {
    let fake = fake();
    let dead = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let endpoint = format!("http://127.0.0.1:{dead}");
    let store = fake.s3("run", &[("endpoint", &endpoint), ("max_retries", "1")]);
    let error = open(&store, &store.location("run/a")).unwrap_err();
    let text = error.to_string();
    assert!(error.kind == Kind::Access && text.contains("cannot connect") && text.contains("refused"), "{text}");
    let missing = fake.s3("run", &[("endpoint", "http://no-such-host.invalid"), ("max_retries", "1")]);
    let text = open(&missing, &missing.location("run/a")).unwrap_err().to_string();
    assert!(text.contains("cannot connect"), "{text}");
}

#[test]
fn what_a_server_repeats_of_a_request_is_in_no_message() {
    const SAID: &str = "<Error><Code>Bearer hf_secret_token</Code><Message>invalid token: Bearer hf_secret_token, \
                        bad signature X-Amz-Signature=swordfish</Message></Error>";
    let fake = Fake::new([("run/a.bin", noise(1000, 1))]);
    fake.fault("a.bin", Fault::Status(403, vec![("X-Error-Code", TOKEN.to_string())], SAID), 1000);
    let stores = [
        fake.web("run/a.bin?X-Amz-Signature=swordfish", &[]),
        fake.web("run/a.bin", &[("token", TOKEN)]),
        fake.s3("run/a.bin", &[("session_token", TOKEN)]),
    ];
    for (n, store) in stores.iter().enumerate() {
        let error = open(store, &store.root()).unwrap_err();
        let text = format!("{error} {error:?}");
        assert!(text.contains("403"), "{text}");
        assert!(if n == 0 { !text.contains("swordfish") } else { !text.contains(TOKEN) }, "{text}");
    }
}

/// Tokens longer than what a message shows, cut ones, and ones that JSON or XML have escaped.
#[test]
fn no_part_of_a_long_token_is_in_a_message() {
    let token: String = (0..300u32)
        .map(|n| char::from(b"abcdefghijkmnpqrstuvwxyz0123456789+/"[(n * n % 36 + n / 36) as usize % 36]))
        .collect();
    let said = [
        format!("invalid token {token}"),
        format!("{{\"error\": \"invalid token \\\"{}\\\"\"}}", token.replace('/', "\\/")),
        format!("<Error><Code>InvalidToken</Code><Message>{}</Message></Error>", &token[..250]),
        format!("<Error><Message>the token {} is old</Message></Error>", token[100..200].replace('+', "&#43;")),
        format!("{}{token}", "x".repeat(8 << 10).replace('x', " .")),
    ];
    for text in said {
        let fake = Fake::new([("run/a.bin", noise(1000, 1))]);
        fake.fault("a.bin", Fault::Status(403, vec![], Box::leak(text.clone().into_boxed_str())), 1000);
        for store in [fake.web("run/a.bin", &[("token", &token)]), fake.s3("run/a.bin", &[("session_token", &token)])] {
            let error = open(&store, &store.root()).unwrap_err();
            let seen = format!("{error} {error:?}");
            assert!(seen.contains("403"), "{seen}");
            assert!(
                token.as_bytes().windows(8).all(|part| !seen.contains(std::str::from_utf8(part).unwrap())),
                "{seen}"
            );
        }
    }
}
