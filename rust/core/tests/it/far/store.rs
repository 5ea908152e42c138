//! The store of these tests: objects in memory, with latency and faults, and a record of the requests.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actshard_core::location::Location;
use actshard_core::source::{Access, RangeRead, Source, Store, Version, Wishes};
use actshard_core::threads::Stop;
use actshard_core::{Error, Kind, Result};

pub const WISHES: Wishes =
    Wishes { gap: 64 << 10, grain: 1, pace: None, largest: 4 << 20, parallel: 8, unit_bytes: 1 << 20 };

/// Bytes, and the number of their replacements.
type Versioned = (Arc<[u8]>, u64);

/// Objects, and a record of the requests for them.
#[derive(Debug)]
pub struct Memory {
    /// Each with its version.
    objects: Mutex<BTreeMap<String, Versioned>>,
    pub wishes: Wishes,
    pub latency: Duration,
    /// Reads wait until so many have been on their way at once, however slow a busy machine starts them.
    pub together: AtomicUsize,
    /// Reads of this object fail.
    pub broken: Option<&'static str>,
    /// The next read of this object fails.
    pub fails_once: Mutex<Option<String>>,
    /// Set if objects were replaced after they were opened.
    pub replaced: AtomicBool,
    /// Numbers of calls that opened objects, and of objects opened.
    pub opens: AtomicUsize,
    pub opened: AtomicUsize,
    /// Key, offset and length of every read.
    reads: Mutex<Vec<(String, u64, u64)>>,
    /// Current and maximum number of concurrent reads.
    flying: AtomicUsize,
    pub most: AtomicUsize,
}

impl Memory {
    pub fn new(objects: impl IntoIterator<Item = (String, Vec<u8>)>, wishes: Wishes) -> Memory {
        Memory {
            objects: Mutex::new(objects.into_iter().map(|(key, bytes)| (key, (bytes.into(), 1))).collect()),
            wishes,
            latency: Duration::ZERO,
            together: AtomicUsize::new(0),
            broken: None,
            fails_once: Mutex::default(),
            replaced: AtomicBool::new(false),
            opens: AtomicUsize::new(0),
            opened: AtomicUsize::new(0),
            reads: Mutex::default(),
            flying: AtomicUsize::new(0),
            most: AtomicUsize::new(0),
        }
    }

    /// The files below a folder, by their paths in it.
    pub fn of_folder(folder: &Path, wishes: Wishes) -> Memory {
        let (mut found, mut folders) = (vec![], vec![folder.to_path_buf()]);
        while let Some(below) = folders.pop() {
            for entry in std::fs::read_dir(below).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else {
                    let key = path.strip_prefix(folder).unwrap().to_str().unwrap().to_string();
                    found.push((key, std::fs::read(path).unwrap()));
                }
            }
        }
        Memory::new(found, wishes)
    }

    /// Reads since the last call.
    pub fn reads(&self) -> Vec<(String, u64, u64)> {
        std::mem::take(&mut *self.reads.lock().unwrap())
    }

    /// Calls that opened objects since the last call.
    pub fn opens(&self) -> usize {
        self.opens.swap(0, Ordering::Relaxed)
    }

    /// Waits for the other reads of `together`.
    fn meet(&self) {
        let together = self.together.load(Ordering::SeqCst);
        for _ in 0..60_000 {
            if self.most.load(Ordering::SeqCst) >= together {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        panic!("{} reads at once, expected {together}", self.most.load(Ordering::SeqCst));
    }

    /// Replaces or adds an object; `None` removes it.
    pub fn put(&self, key: &str, bytes: Option<Vec<u8>>) {
        let mut objects = self.objects.lock().unwrap();
        let version = objects.get(key).map_or(1, |(_, version)| version + 1);
        match bytes {
            Some(bytes) => objects.insert(key.to_string(), (bytes.into(), version)),
            None => objects.remove(key),
        };
    }

    pub fn get(&self, key: &str) -> Vec<u8> {
        self.objects.lock().unwrap()[key].0.to_vec()
    }
}

pub fn at(key: &str) -> Location {
    Location::object("memory://bucket", key)
}

#[derive(Debug)]
pub struct Handle(pub Arc<Memory>);

fn key_of(location: &Location) -> &str {
    let Location::Object(name) = location else { panic!("{location} is not an object") };
    &name.key
}

impl Store for Handle {
    fn open_many(&self, locations: &[&Location], _: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>> {
        self.0.opens.fetch_add(1, Ordering::Relaxed);
        self.0.opened.fetch_add(locations.len(), Ordering::Relaxed);
        std::thread::sleep(self.0.latency);
        let open = |location: &&Location| -> Result<Box<dyn Source>> {
            if stop.is_set() {
                return Err(Error::new(Kind::Interrupted, "interrupted"));
            }
            let key = key_of(location).to_string();
            let found = self.0.objects.lock().unwrap().get(&key).cloned();
            let Some((bytes, version)) = found else {
                return Err(Error::new(Kind::NotFound, "expected an object, found nothing").at(*location));
            };
            let store = Arc::clone(&self.0);
            Ok(Box::new(Object { store, location: (*location).clone(), key, size: bytes.len() as u64, version }))
        };
        locations.iter().map(open).collect()
    }

    fn list(&self, folder: &Location) -> Result<Vec<String>> {
        let below = format!("{}/", key_of(folder));
        let objects = self.0.objects.lock().unwrap();
        let mut names: Vec<String> = objects
            .keys()
            .filter_map(|key| key.strip_prefix(&below))
            .map(|rest| rest.split('/').next().unwrap().to_string())
            .collect();
        names.dedup();
        Ok(names)
    }

    fn wishes(&self) -> Option<Wishes> {
        Some(self.0.wishes)
    }
}

#[derive(Debug)]
struct Object {
    store: Arc<Memory>,
    location: Location,
    key: String,
    size: u64,
    version: u64,
}

impl Object {
    /// Responds as a server does to a request for a given version.
    fn bytes_of_this_version(&self) -> Result<Arc<[u8]>> {
        let found = self.store.objects.lock().unwrap().get(&self.key).cloned();
        match found.filter(|(_, version)| *version == self.version) {
            Some((bytes, _)) if !self.store.replaced.load(Ordering::Relaxed) => Ok(bytes),
            _ => Err(Error::new(Kind::Format, "was replaced after it was opened").at(&self.location)),
        }
    }
}

impl Source for Object {
    fn location(&self) -> &Location {
        &self.location
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<Version> {
        Some(Version::Tag(self.version.to_string().into()))
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        for read in reads {
            self.store.reads.lock().unwrap().push((self.key.clone(), read.at, read.into.len() as u64));
            let flying = self.store.flying.fetch_add(1, Ordering::SeqCst) + 1;
            self.store.most.fetch_max(flying, Ordering::SeqCst);
            self.store.meet();
            std::thread::sleep(self.store.latency);
            self.store.flying.fetch_sub(1, Ordering::SeqCst);
            stop.check()?;
            let fails = self.store.fails_once.lock().unwrap().take_if(|key| *key == self.key).is_some();
            if fails || self.store.broken.is_some_and(|key| key == self.key) {
                return Err(Error::new(Kind::Access, "cannot read: 503").at(&self.location).byte(read.at));
            }
            let from = read.at as usize;
            read.into.copy_from_slice(&self.bytes_of_this_version()?[from..from + read.into.len()]);
        }
        Ok(())
    }

    fn unchanged(&self) -> Result<()> {
        self.bytes_of_this_version().map(drop)
    }
}
