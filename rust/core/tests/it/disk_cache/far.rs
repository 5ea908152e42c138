//! Far objects of these tests: any byte is computed from its object and offset, with delays, faults and a record of requests.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use actshard_core::location::Location;
use actshard_core::source::{RangeRead, Source, Version};
use actshard_core::threads::Stop;
use actshard_core::{Error, Kind, Result};

/// A random number generator that a seed repeats (splitmix64).
#[derive(Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n.max(1)
    }
}

fn mix(n: u64) -> u64 {
    let n = (n ^ (n >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    n ^ (n >> 31)
}

/// The bytes of an object; every seventh page is all zeros, like a hole.
pub fn oracle(object: u64, at: u64, into: &mut [u8]) {
    let mut word = (u64::MAX, [0; 8]);
    for (n, byte) in (at..).zip(into) {
        if word.0 != n / 8 {
            let zero = (n >> 16) % 7 == object % 7;
            word = (n / 8, if zero { [0; 8] } else { mix(object << 40 ^ (n / 8)).to_le_bytes() });
        }
        *byte = word.1[(n % 8) as usize];
    }
}

/// Requests, and what happens to them.
#[derive(Debug, Default)]
pub struct Server {
    /// Ranges of each call of `read_many`.
    pub calls: Mutex<Vec<Vec<(u64, u64)>>>,
    pub bytes: AtomicU64,
    pub delay: Duration,
    /// Calls fail after they filled a half.
    pub broken: AtomicBool,
    /// Calls wait until this is false, or they are stopped.
    pub held: AtomicBool,
    pub waiting: AtomicUsize,
}

impl Server {
    pub fn calls(&self) -> Vec<Vec<(u64, u64)>> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }
}

/// An object of the server.
#[derive(Debug)]
pub struct Far {
    pub server: Arc<Server>,
    pub location: Location,
    pub number: u64,
    pub size: u64,
    pub tag: Option<String>,
}

impl Far {
    pub fn new(server: &Arc<Server>, number: u64, size: u64) -> Far {
        let location = Location::object("s3://bucket", format!("object-{number}"));
        Far { server: Arc::clone(server), location, number, size, tag: Some("\"etag\"".to_string()) }
    }

    pub fn boxed(self) -> Box<dyn Source> {
        Box::new(self)
    }
}

impl Source for Far {
    fn location(&self) -> &Location {
        &self.location
    }

    fn size(&self) -> u64 {
        self.size
    }

    fn version(&self) -> Option<Version> {
        self.tag.as_ref().map(|tag| Version::Tag(tag.as_str().into()))
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        let server = &self.server;
        if let Ok(mut calls) = server.calls.try_lock() {
            calls.push(reads.iter().map(|read| (read.at, read.into.len() as u64)).collect());
        }
        std::thread::sleep(server.delay);
        server.waiting.fetch_add(1, Ordering::SeqCst);
        while server.held.load(Ordering::SeqCst) && !stop.is_set() {
            std::thread::sleep(Duration::from_millis(1));
        }
        server.waiting.fetch_sub(1, Ordering::SeqCst);
        for read in reads {
            stop.check()?;
            let broken = server.broken.load(Ordering::SeqCst);
            let n = if broken { read.into.len() / 2 } else { read.into.len() };
            oracle(self.number, read.at, &mut read.into[..n]);
            server.bytes.fetch_add(n as u64, Ordering::SeqCst);
            if broken {
                return Err(Error::new(Kind::Access, "cannot read: the connection was reset").at(&self.location));
            }
        }
        Ok(())
    }

    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}

/// Reads a range and compares it with the oracle.
pub fn is_right(source: &dyn Source, number: u64, at: u64, len: u64) -> bool {
    let (mut found, mut expected) = (vec![0xA5; len as usize], vec![0; len as usize]);
    source.read(at, &mut found, &Stop::new()).unwrap();
    oracle(number, at, &mut expected);
    found == expected
}

/// Bytes of the disk that the files and folders below a path take.
pub fn disk_usage(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(meta) = std::fs::symlink_metadata(path) else { return 0 };
    let inside = std::fs::read_dir(path).into_iter().flatten().flatten();
    meta.blocks() * 512 + inside.map(|entry| disk_usage(&entry.path())).sum::<u64>()
}

/// The files below a path.
pub fn files(path: &Path) -> Vec<std::path::PathBuf> {
    let mut found = vec![];
    for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() { found.extend(files(&path)) } else { found.push(path) }
    }
    found.sort();
    found
}
