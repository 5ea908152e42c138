//! What a store may say while its server changes, refuses, fails and lies: random events and calls against a simple oracle. No
//! sockets: the client is replaced by one that looks into a map.
//!
//! A store and its copies may return the bytes of one version of an object, the one that was there when the store got its first
//! answer, or an error of the right kind. That something is absent may only be said of what was absent at some time since then.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use actshard_core::source::{Source, Store};
use actshard_core::threads::Stop;
use actshard_core::{Error, Kind};
use actshard_remote::RemoteStore;
use actshard_remote::client::times::ServerDate;
use actshard_remote::client::{Answer, Client, Expected, ListedObject, Listing, Tag};
use actshard_remote::failure::{Cause, Failure};
use actshard_remote::store::Standing;
use futures_util::StreamExt;
use futures_util::future::{BoxFuture, FutureExt, ready};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::server::options_of;

const KEYS: [&str; 4] = ["run/m.json", "run/a/0", "run/a/1", "run/b"];
const FOLDERS: [&str; 3] = ["run", "run/a", "run/none"];
/// The second one is longer than what comes with the first request.
const SIZES: [usize; 3] = [5, 70_000, 0];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Tagging {
    Strong,
    /// Equal weak tags for all versions, and a time.
    Weak,
    Time,
    /// Only sizes tell versions apart.
    None,
}

/// A version of an object: its bytes are all equal to `fill`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Put {
    fill: u8,
    size: usize,
    written: u64,
}

impl Put {
    fn same_bytes(&self, other: &Put) -> bool {
        (self.size, self.fill) == (other.size, other.fill) || self.size == 0 && other.size == 0
    }
}

#[derive(Clone, Debug)]
struct World {
    objects: BTreeMap<&'static str, Put>,
    now: u64,
    is_web: bool,
    tagging: Tagging,
    /// Listings have no ETags.
    bare: bool,
    ignores_match: bool,
    unlistable: bool,
    /// A store that met it asks for known objects ever after, before it calls another one absent.
    was_unlistable: bool,
    refused: BTreeSet<&'static str>,
    down: bool,
    no_bucket: bool,
    /// So many answers are a proxy's 404.
    lies: usize,
    fills: u8,
    /// When the first answer came.
    first: Option<u64>,
    /// Kept for the oracle: everything that was put, and what was absent when.
    history: BTreeMap<&'static str, Vec<(u64, Option<Put>)>>,
}

impl World {
    fn put(&mut self, key: &'static str, size: usize, same: bool) {
        self.now += 2;
        let before = self.objects.get(key).copied();
        self.fills += 1;
        let mut size = size;
        if self.tagging == Tagging::None {
            size += 100 * usize::from(self.fills);
        }
        let new = Put { fill: self.fills, size, written: self.now };
        let put = match before {
            Some(before) if same => Put { written: self.now, ..before },
            _ => new,
        };
        self.objects.insert(key, put);
        self.history.entry(key).or_default().push((self.now, Some(put)));
        // No answer within the second, in which the order cannot be known.
        self.now += 2;
    }

    fn delete(&mut self, key: &'static str) {
        self.now += 2;
        self.objects.remove(key);
        self.history.entry(key).or_default().push((self.now, None));
    }

    fn tag(&self, put: &Put) -> Tag {
        let time = Some(put.written.to_string());
        match self.tagging {
            Tagging::Strong => Tag::new(Some(&format!("{}-{}", put.fill, put.size)), time),
            Tagging::Weak => Tag::new(Some("W/x"), time),
            Tagging::Time => Tag::new(None, time),
            Tagging::None => Tag::default(),
        }
    }

    /// The version of a key at a time.
    fn at(&self, key: &str, time: u64) -> Option<Put> {
        self.history.get(key)?.iter().rev().find(|(at, _)| *at <= time)?.1
    }

    /// The states of a key since a time.
    fn since(&self, key: &str, time: u64) -> Vec<Option<Put>> {
        let later = self.history.get(key).into_iter().flatten().filter(|(at, _)| *at > time).map(|(_, put)| *put);
        std::iter::once(self.at(key, time)).chain(later).collect()
    }

    fn failure(status: u16, code: Option<&str>, is_foreign: bool) -> Failure {
        let code = code.map(str::to_string);
        Failure { code, is_foreign, ..Failure::new(Cause::Status(status), "") }
    }

    /// The time of an answer. After the first one the clock moves on, so that what is written next is written later.
    fn answered(&mut self) -> Option<ServerDate> {
        let now = self.now;
        if self.first.is_none() {
            self.first = Some(now);
            self.now += 2;
        }
        Some(ServerDate(now))
    }

    fn trouble(&mut self) -> Result<(), Failure> {
        if self.down {
            return Err(World::failure(503, None, false));
        }
        if self.no_bucket && !self.is_web {
            return Err(World::failure(404, Some("NoSuchBucket"), false));
        }
        if self.lies > 0 {
            self.lies -= 1;
            return Err(World::failure(404, None, !self.is_web));
        }
        Ok(())
    }

    fn get(&mut self, key: &str, range: Range<u64>, expected: &Expected) -> Result<Answer, Failure> {
        self.trouble()?;
        if self.refused.contains(key) {
            return Err(World::failure(403, Some("AccessDenied"), false));
        }
        let Some(put) = self.objects.get(key).copied() else {
            return Err(match (self.is_web, self.unlistable) {
                (true, _) => World::failure(404, None, false),
                (false, true) => World::failure(403, Some("AccessDenied"), false),
                (false, false) => World::failure(404, Some("NoSuchKey"), false),
            });
        };
        let (tag, size) = (self.tag(&put), put.size as u64);
        let wanted = expected.tag.as_ref().and_then(Tag::if_match);
        if !self.ignores_match && wanted.is_some_and(|wanted| Some(wanted) != tag.if_match()) {
            return Err(World::failure(412, None, false));
        }
        if !range.is_empty() && range.start >= size {
            return Err(Failure { size: Some(size), ..World::failure(416, None, false) });
        }
        let range = range.start..range.end.min(size);
        let bytes = vec![put.fill; (range.end - range.start) as usize];
        let body = futures_util::stream::once(ready(Ok(bytes.into()))).boxed();
        Ok(Answer { tag, size, date: self.answered(), range, body })
    }

    fn list(&mut self, folder: &str, deep: bool) -> Result<Listing, Failure> {
        if self.is_web {
            return Err(Failure::new(Cause::Unsupported, "cannot list"));
        }
        self.trouble()?;
        if self.unlistable {
            return Err(World::failure(403, Some("AccessDenied"), false));
        }
        let mut made = Listing { deep, ..Listing::default() };
        let start = format!("{folder}/");
        let mut folders = BTreeSet::new();
        for (key, put) in self.objects.iter().filter(|(key, _)| key.starts_with(&start)) {
            match key[start.len()..].split_once('/').filter(|_| !deep) {
                Some((name, _)) => drop(folders.insert(format!("{start}{name}"))),
                None => {
                    let tag = self.tag(put);
                    let tag = if self.bare { Tag { etag: None, ..tag } } else { tag };
                    made.objects.push(ListedObject { key: (*key).to_string(), size: put.size as u64, tag });
                }
            }
        }
        made.folders = folders.into_iter().collect();
        // Nothing is known by an empty one.
        if !(made.objects.is_empty() && made.folders.is_empty()) {
            made.date = self.answered();
        }
        Ok(made)
    }
}

#[derive(Clone, Debug)]
struct Wire(Arc<Mutex<World>>);

impl Client for Wire {
    fn get<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        expected: &'a Expected,
    ) -> BoxFuture<'a, Result<Answer, Failure>> {
        async move {
            // Another thread may come between.
            tokio::task::yield_now().await;
            self.0.lock().unwrap().get(key, range, expected)
        }
        .boxed()
    }

    fn list<'a>(&'a self, folder: &'a str, deep: bool) -> BoxFuture<'a, Result<Listing, Failure>> {
        async move { self.0.lock().unwrap().list(folder, deep) }.boxed()
    }

    fn lists(&self) -> bool {
        !self.0.lock().unwrap().is_web
    }

    fn origin(&self) -> Result<String, Failure> {
        Ok("model".to_string())
    }

    fn credentials(&self) -> String {
        "none".to_string()
    }
}

#[derive(Clone, Debug)]
enum Op {
    Put(usize, usize, bool),
    Delete(usize),
    Wait,
    Refuse(usize, bool),
    Unlistable(bool),
    Down(bool),
    NoBucket(bool),
    Lie(usize),
    Read(usize, usize),
    Keep(usize, usize),
    ReadKept(usize),
    Stat(usize, usize),
    List(usize, usize, bool),
    Look(usize, usize),
    Copy(usize),
    Race(usize, usize, usize),
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let key = 0..KEYS.len();
    let one = prop_oneof![
        3 => (key.clone(), 0..SIZES.len(), any::<bool>()).prop_map(|(k, s, same)| Op::Put(k, s, same)),
        1 => key.clone().prop_map(Op::Delete),
        1 => Just(Op::Wait),
        1 => (key.clone(), any::<bool>()).prop_map(|(k, on)| Op::Refuse(k, on)),
        1 => any::<bool>().prop_map(Op::Unlistable),
        1 => any::<bool>().prop_map(Op::Down),
        1 => any::<bool>().prop_map(Op::NoBucket),
        1 => (1..4_usize).prop_map(Op::Lie),
        6 => (0..3_usize, key.clone()).prop_map(|(s, k)| Op::Read(s, k)),
        2 => (0..3_usize, key.clone()).prop_map(|(s, k)| Op::Keep(s, k)),
        3 => (0..8_usize).prop_map(Op::ReadKept),
        2 => (0..3_usize, key.clone()).prop_map(|(s, k)| Op::Stat(s, k)),
        2 => (0..3_usize, 0..FOLDERS.len(), any::<bool>()).prop_map(|(s, f, deep)| Op::List(s, f, deep)),
        2 => (0..3_usize, key.clone()).prop_map(|(s, k)| Op::Look(s, k)),
        1 => (0..3_usize).prop_map(Op::Copy),
        1 => (0..3_usize, key.clone(), key).prop_map(|(s, a, b)| Op::Race(s, a, b)),
    ];
    proptest::collection::vec(one, 1..30)
}

fn setting() -> impl Strategy<Value = (bool, Tagging, bool, bool)> {
    let tagging = prop_oneof![
        3 => Just(Tagging::Strong),
        1 => Just(Tagging::Weak),
        1 => Just(Tagging::Time),
        1 => Just(Tagging::None),
    ];
    (any::<bool>(), tagging, any::<bool>(), any::<bool>())
}

/// A store, its copies, and what the oracle knows of them.
struct Family {
    world: Arc<Mutex<World>>,
    stores: Vec<RemoteStore>,
    kept: Vec<(&'static str, Box<dyn Source>)>,
    /// The version of each object that was read first.
    seen: BTreeMap<&'static str, Put>,
}

type Said = Result<(), TestCaseError>;

impl Family {
    fn new((is_web, tagging, bare, ignores_match): (bool, Tagging, bool, bool)) -> Family {
        let mut world = World {
            objects: BTreeMap::new(),
            now: 1000,
            is_web,
            tagging,
            bare,
            ignores_match,
            unlistable: false,
            was_unlistable: false,
            refused: BTreeSet::new(),
            down: false,
            no_bucket: false,
            lies: 0,
            fills: 0,
            first: None,
            history: BTreeMap::new(),
        };
        for key in &KEYS[..3] {
            world.put(key, 5, false);
        }
        world.now += 100;
        let family = Family { world: Arc::new(Mutex::new(world)), stores: vec![], kept: vec![], seen: BTreeMap::new() };
        let (url, options): (_, &[(&str, &str)]) = match is_web {
            true => ("http://127.0.0.1:1/run", &[]),
            false => ("s3://bucket/run", &[("anon", "true"), ("region", "x")]),
        };
        let store =
            RemoteStore::open(url, options_of(options)).unwrap().over(Box::new(Wire(Arc::clone(&family.world))));
        Family { stores: vec![store], ..family }
    }

    fn world(&self) -> World {
        self.world.lock().unwrap().clone()
    }

    /// When the first answer came.
    fn opened(&self) -> Option<u64> {
        self.world.lock().unwrap().first
    }

    /// Bytes were returned: they are those of one version.
    fn read(&mut self, key: &'static str, bytes: &[u8], before: &World) -> Said {
        let found = Put { fill: bytes.first().copied().unwrap_or(0), size: bytes.len(), written: 0 };
        prop_assert!(bytes.iter().all(|byte| *byte == found.fill), "{key}: bytes of two versions");
        self.version(key, found, before)
    }

    /// A version of a key was seen.
    fn version(&mut self, key: &'static str, found: Put, world: &World) -> Said {
        let first = *self.seen.entry(key).or_insert(found);
        // Without tags and times, copies cannot know that they first see different versions.
        let blind = world.tagging == Tagging::None && self.stores.len() > 1;
        prop_assert!(blind || first.same_bytes(&found), "{key}: {found:?} after {first:?}");
        if world.tagging != Tagging::None {
            let was = world.at(key, self.opened().unwrap_or(world.now));
            prop_assert!(
                was.is_some_and(|was| was.same_bytes(&found)),
                "{key}: {found:?} was not there at first, but {was:?}"
            );
        }
        Ok(())
    }

    /// An error was returned: its kind says what is true.
    fn error(&mut self, key: &'static str, error: &Error, before: &World) -> Said {
        let since = self.opened().unwrap_or(before.now);
        let states = before.since(key, since);
        let has_changed = states.len() > 1;
        let is_troubled = before.down || before.no_bucket || before.lies > 0 || before.refused.contains(key);
        let right = match error.kind {
            Kind::NotFound => {
                // A web server that lies before anything is known of it is believed.
                states.contains(&None) || before.is_web && before.lies > 0 && self.seen.is_empty()
            }
            // A known object that is not there now; on the web, another one that was asked for in between, or a lie about it.
            Kind::Format => {
                let all = KEYS.iter().any(|key| before.since(key, since).len() > 1);
                has_changed
                    || before.lies > 0 && (before.is_web || before.unlistable)
                    || before.is_web && all
                    || before.was_unlistable && all
            }
            Kind::Access => {
                let hidden = before.unlistable && states.contains(&None);
                is_troubled || hidden || before.unlistable || !before.refused.is_empty()
            }
            Kind::Unsupported => before.is_web,
            _ => false,
        };
        prop_assert!(right, "{key}: {error} ({:?}), states since the first answer {states:?}", error.kind);
        Ok(())
    }

    fn open_and_read(store: &RemoteStore, key: &str) -> Result<Vec<u8>, Error> {
        let source = super::server::open(store, &store.location(key))?;
        let mut bytes = vec![0; source.size() as usize];
        source.read(0, &mut bytes, &Stop::new())?;
        Ok(bytes)
    }

    fn said(&mut self, key: &'static str, made: Result<Vec<u8>, Error>, before: &World) -> Said {
        match made {
            Ok(bytes) => self.read(key, &bytes, before),
            Err(error) => self.error(key, &error, before),
        }
    }

    fn stat(&mut self, store: usize, key: &'static str) -> Said {
        let before = self.world();
        let store = &self.stores[store];
        match store.stat(&store.location(key), &Stop::new()) {
            Ok(Standing::Object(size)) => {
                let states = before.since(key, self.opened().unwrap_or(before.now));
                let sized = states.iter().flatten().any(|put| put.size as u64 == size);
                prop_assert!(sized, "{key}: {size} bytes, {states:?}");
                let blind = before.tagging == Tagging::None && self.stores.len() > 1;
                if let Some(seen) = self.seen.get(key).filter(|_| !blind) {
                    prop_assert_eq!(seen.size as u64, size);
                }
                Ok(())
            }
            Ok(Standing::Folder) => Err(TestCaseError::fail(format!("{key} is no folder"))),
            Ok(Standing::Absent) => self.error(key, &Error::new(Kind::NotFound, "absent"), &before),
            Ok(Standing::Denied(error)) => {
                prop_assert!(!store.lists(), "{error}");
                let states = before.since(key, self.opened().unwrap_or(before.now));
                prop_assert!(before.refused.contains(key) || states.contains(&None), "{key}: {error}");
                Ok(())
            }
            Err(error) => self.error(key, &error, &before),
        }
    }

    fn list(&mut self, store: usize, folder: &'static str, deep: bool) -> Said {
        let before = self.world();
        let store = &self.stores[store];
        match store.scan(&store.location(folder), deep, &Stop::new()) {
            Ok(found) => {
                let names: BTreeSet<String> =
                    found.into_iter().map(|found| format!("{folder}/{}", found.name)).collect();
                let since = self.opened().unwrap_or(before.now);
                for key in KEYS.iter().filter(|key| key.starts_with(&format!("{folder}/"))) {
                    let states = before.since(key, since);
                    let end = key[folder.len() + 1..].find('/').map_or(key.len(), |end| folder.len() + 1 + end);
                    let there = names.contains(&key[..end]);
                    prop_assert!(there || states.contains(&None), "{key} is not listed, {states:?}");
                    let direct = end == key.len();
                    prop_assert!(
                        !there || !direct || states.iter().any(Option::is_some),
                        "{key} is listed, {states:?}"
                    );
                }
                Ok(())
            }
            Err(error) => {
                let troubled = before.down || before.no_bucket || before.lies > 0 || before.unlistable;
                let right = error.kind == Kind::Access && troubled || error.kind == Kind::Unsupported && before.is_web;
                prop_assert!(right, "{folder}: {error} ({:?})", error.kind);
                Ok(())
            }
        }
    }

    /// A look says what is there now.
    fn look(&mut self, store: usize, key: &'static str) -> Said {
        let before = self.world();
        let store = &self.stores[store];
        match store.look(&store.location(key)) {
            Ok(()) => {
                let now = before.objects.get(key).copied();
                prop_assert!(now.is_some(), "{key} is not there");
                let blind = before.tagging == Tagging::None && self.stores.len() > 1;
                if let (Some(seen), Some(now)) = (self.seen.get(key), now) {
                    prop_assert!(blind || seen.same_bytes(&now), "{key}: {now:?} is not {seen:?}");
                }
                Ok(())
            }
            Err(error) => {
                // A known object that a server denies once is said to be gone: the caller fails, and reads no fill values.
                if error.kind == Kind::NotFound && before.lies > 0 { Ok(()) } else { self.error(key, &error, &before) }
            }
        }
    }

    /// Two threads read an object while another one is written.
    fn race(&mut self, store: usize, key: &'static str, written: &'static str) -> Said {
        if self.opened().is_none() {
            return Ok(());
        }
        let store = &self.stores[store];
        let made = std::thread::scope(|scope| {
            let readers = [(); 2].map(|()| scope.spawn(|| Family::open_and_read(store, key)));
            self.world.lock().unwrap().put(written, 5, false);
            readers.map(|reader| reader.join().unwrap())
        });
        let after = self.world();
        for one in made {
            self.said(key, one, &World { lies: after.lies.max(3), ..after.clone() })?;
        }
        Ok(())
    }

    fn apply(&mut self, op: &Op) -> Said {
        let mut world = self.world.lock().unwrap();
        match *op {
            Op::Put(key, size, same) => world.put(KEYS[key], SIZES[size], same),
            Op::Delete(key) => world.delete(KEYS[key]),
            Op::Wait => world.now += 10,
            Op::Refuse(key, true) => drop(world.refused.insert(KEYS[key])),
            Op::Refuse(key, false) => drop(world.refused.remove(KEYS[key])),
            Op::Unlistable(on) => {
                world.unlistable = on && !world.is_web;
                world.was_unlistable |= world.unlistable;
            }
            Op::Down(on) => world.down = on,
            Op::NoBucket(on) => world.no_bucket = on,
            Op::Lie(times) => world.lies = times,
            _ => {
                drop(world);
                return self.call(op);
            }
        }
        Ok(())
    }

    fn call(&mut self, op: &Op) -> Said {
        let before = self.world();
        let count = self.stores.len();
        match *op {
            Op::Read(store, key) => {
                let made = Family::open_and_read(&self.stores[store % count], KEYS[key]);
                self.said(KEYS[key], made, &before)
            }
            Op::Keep(store, key) => {
                let store = &self.stores[store % count];
                match super::server::open(store, &store.location(KEYS[key])) {
                    Ok(source) => {
                        self.kept.push((KEYS[key], source));
                        Ok(())
                    }
                    Err(error) => self.error(KEYS[key], &error, &before),
                }
            }
            Op::ReadKept(which) if which < self.kept.len() => {
                let (key, source) = &self.kept[which];
                let mut bytes = vec![0; source.size() as usize];
                let (key, made) = (*key, source.read(0, &mut bytes, &Stop::new()));
                self.said(key, made.map(|()| bytes), &before)
            }
            Op::Stat(store, key) => self.stat(store % count, KEYS[key]),
            Op::List(store, folder, deep) => self.list(store % count, FOLDERS[folder], deep),
            Op::Look(store, key) => self.look(store % count, KEYS[key]),
            // A copy of a store that nothing was answered to is another store.
            Op::Copy(_) if before.first.is_none() => Ok(()),
            Op::Copy(store) => {
                let state = self.stores[store % count].state().unwrap();
                let copy = RemoteStore::from_state(&state).unwrap().over(Box::new(Wire(Arc::clone(&self.world))));
                if count < 3 {
                    self.stores.push(copy);
                }
                Ok(())
            }
            Op::Race(store, key, written) => self.race(store % count, KEYS[key], KEYS[written]),
            _ => Ok(()),
        }
    }
}

fn run(setting: (bool, Tagging, bool, bool), ops: &[Op]) -> Said {
    let mut family = Family::new(setting);
    ops.iter().try_for_each(|op| family.apply(op))
}

/// Too rare for the random events: the whole folder is deleted before anything is known of the server, the store asks, and one
/// object is put again.
#[test]
fn a_folder_that_was_empty_before_the_first_answer_is_listed_again() {
    let list = |deep| Op::List(0, 1, deep);
    let before = [vec![list(false)], vec![list(true)], vec![Op::Refuse(1, true), Op::Stat(0, 1)]];
    let after = [
        vec![list(false)],
        vec![list(true)],
        vec![Op::Refuse(1, false), Op::Stat(0, 1), list(false)],
        vec![Op::Refuse(1, false), Op::Read(0, 1), list(true)],
    ];
    for tagging in [Tagging::Strong, Tagging::Weak, Tagging::Time, Tagging::None] {
        for (first, last) in before.iter().flat_map(|first| after.iter().map(move |last| (first, last))) {
            let ops = [&[Op::Delete(2), Op::Delete(1)], &first[..], &[Op::Put(1, 0, false)], last].concat();
            let result = run((false, tagging, false, false), &ops);
            assert!(result.is_ok(), "{tagging:?}, {ops:?}: {result:?}");
        }
    }
}

#[test]
fn a_store_and_its_copies_tell_one_version_or_the_truth_about_why_not() {
    let default = Config::default();
    // Faults need rare orders of events: four times the usual number of cases, more in `make torture` (PROPTEST_CASES).
    let config = Config { cases: 4 * default.cases, failure_persistence: None, max_shrink_iters: 4000, ..default };
    let mut runner = TestRunner::new(config);
    runner.run(&(setting(), ops()), |(setting, ops)| run(setting, &ops)).unwrap();
}
