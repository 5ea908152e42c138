//! Reads one object of a remote store, whole and in random rows, and prints times and requests:
//! `ranges URL KEY [ROWS] [in_flight=N] [NAME=VALUE...]`. The key is
//! relative to the URL.

#![allow(clippy::unwrap_used, reason = "a tool of developers")]

use std::time::Instant;

use actshard_core::source::fetch::{WantedRange, fetch, read_all};
use actshard_core::source::{Access, ByteRange, Source, Store};
use actshard_core::threads::Stop;
use actshard_remote::{Options, RemoteStore};

const ROW: u64 = 8 << 10;

fn main() {
    let given: Vec<String> = std::env::args().skip(1).collect();
    let is_option = |text: &String| text.split_once('=').is_some_and(|(name, _)| !name.contains('/'));
    let (mut options, plain): (Vec<String>, Vec<String>) = given.into_iter().partition(is_option);
    let in_flight = options.iter().position(|text| text.starts_with("in_flight="));
    let in_flight = in_flight.map(|i| options.remove(i)).map(|text| text["in_flight=".len()..].parse().unwrap());
    let options = options.iter().map(|text| text.split_once('=').unwrap()).map(|(a, b)| (a.to_string(), b.to_string()));
    let rows: u64 = plain.get(2).map_or(4096, |rows| rows.parse().unwrap());
    let store = RemoteStore::open(&plain[0], Options::new(options)).unwrap();
    let location = store.root().join(&plain[1]);
    let started = Instant::now();
    let source = store.open_many(&[&location], Access::Kept, &Stop::new()).pop().unwrap().unwrap();
    println!("open: {:?} {:?}", started.elapsed(), store.counts());
    let (size, wishes) = (source.size(), || store.wishes().unwrap());

    let mut all = vec![0; size as usize];
    let (started, before) = (Instant::now(), store.counts());
    read_all(vec![(&*source, 0, &mut all)], &wishes(), &mut || false).unwrap();
    let (time, after) = (started.elapsed(), store.counts());
    let rate = size as f64 / time.as_secs_f64() / 1e6;
    println!(
        "whole: {time:?} {rate:.0} MB/s, {} requests, {} hedges",
        after.requests - before.requests,
        after.hedges - before.hedges
    );

    for round in 0..5u64 {
        let mut x = 88_172_645_463_325_252 + round;
        let wanted = (0..rows).map(|_| {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            let range = ByteRange { at: x % (size / ROW) * ROW, len: ROW };
            WantedRange { source: 0, range, to: range.at }
        });
        let (wanted, sources) = (wanted.collect(), [Some(&*source as &dyn Source)]);
        let same = |at: u64, bytes: &[u8]| {
            assert!(*bytes == all[at as usize..at as usize + bytes.len()]);
            Ok(())
        };
        let (started, before, mut wishes) = (Instant::now(), store.counts(), wishes());
        wishes.parallel = in_flight.unwrap_or(wishes.parallel);
        fetch(&sources, wanted, &wishes, &same, &mut || false).unwrap();
        let (time, after) = (started.elapsed(), store.counts());
        let over = (after.bytes - before.bytes) as f64 / (rows * ROW) as f64;
        println!(
            "{rows} rows: {time:?}, {:?}, {} requests, over-read {over:.1}, {} hedges",
            wishes.pace.unwrap(),
            after.requests - before.requests,
            after.hedges - before.hedges
        );
    }
    let started = Instant::now();
    let mut one = [0; 4096];
    for i in 0..200u64 {
        source.read(i * 4096 % (size - 4096), &mut one, &Stop::new()).unwrap();
    }
    println!("4 KiB, one after another: {:?} each", started.elapsed() / 200);
}
