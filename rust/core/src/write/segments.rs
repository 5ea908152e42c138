//! Writes a whole file from segments of memory: hashes it while writing, and compresses with all threads.
//!
//! A compressed file is one gzip member: stretches of 1 MiB are deflated separately and end in an empty stored block, so that
//! each begins at a byte (as in `pigz`); checksums are combined. Any gzip reader can read it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use flate2::{Compress, Compression, FlushCompress, Status};
use sha2::{Digest, Sha256};

use super::pieces::{Piece, Target, write};
use crate::error::{Error, Kind, Result};
use crate::threads::{self, Lock, Signal, Stop, Watch};

/// Bytes deflated separately.
const STRETCH: usize = 1 << 20;
/// Stretches deflated ahead of the one to write next, at most, or twice the number of threads; bounds the memory.
const AHEAD: usize = 16;
/// Interval of calls to the watch while a checksum is being computed.
const LOOK: Duration = Duration::from_millis(20);
/// RFC 1952: magic, deflate, no flags, no time, no extra flags, an unknown system.
const HEADER: [u8; 10] = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 255];

/// Size and checksum of a written file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Digested {
    /// Bytes on disk.
    pub size: u64,
    /// SHA-256 of these bytes.
    pub sha256: [u8; 32],
}

/// Writes segments one after the other into a new file, compressed if `level` is given.
pub fn write_segments(path: &Path, segments: &[&[u8]], level: Option<u32>, watch: Watch<'_>) -> Result<Digested> {
    let made = File::create(path).map_err(|e| Error::from_io(&e, path, "open to write"))?;
    match level {
        None => plain(path, segments, watch),
        Some(level) => gzip(path, made, segments, level, watch),
    }
}

fn plain(path: &Path, segments: &[&[u8]], watch: Watch<'_>) -> Result<Digested> {
    let mut pieces = vec![];
    let mut offset = 0;
    for (source, segment) in segments.iter().enumerate() {
        pieces.push(Piece { source, start: 0, bytes: segment.len() as u64, file: 0, offset });
        offset += segment.len() as u64;
    }
    let target = Target { path: path.to_path_buf(), size: offset };
    let stop = AtomicBool::new(false);
    let hash = |ends: Watch<'_>| {
        let mut sha = Sha256::new();
        for piece in segments.iter().flat_map(|s| s.chunks(STRETCH)) {
            if ends() {
                return None;
            }
            sha.update(piece);
        }
        Some(sha.finalize())
    };
    thread::scope(|scope| {
        let work = || hash(&mut || stop.load(Ordering::Relaxed));
        // Without a thread, this one hashes after it has written.
        let hashed = thread::Builder::new().name("actshard-sha".to_string()).spawn_scoped(scope, work).ok();
        let mut written = write(segments, &[target], &pieces, true, &mut *watch);
        let mut looked = Instant::now();
        while written.is_ok() && hashed.as_ref().is_some_and(|hashed| !hashed.is_finished()) {
            thread::sleep(Duration::from_millis(1));
            if looked.elapsed() >= LOOK {
                looked = Instant::now();
                if watch() {
                    written = Err(Error::new(Kind::Interrupted, "interrupted"));
                }
            }
        }
        // A failed write also stops the checksum: the scope waits for its thread.
        stop.store(written.is_err(), Ordering::Relaxed);
        written?;
        let sha256 = match hashed {
            Some(hashed) => hashed.join().ok().flatten(),
            None => hash(watch),
        };
        let sha256 = sha256.ok_or_else(threads::interrupted)?;
        Ok(Digested { size: offset, sha256: sha256.into() })
    })
}

/// The segments of each stretch, in order.
fn stretches<'a>(segments: &[&'a [u8]]) -> Vec<Vec<&'a [u8]>> {
    let mut made: Vec<Vec<&[u8]>> = vec![];
    let mut room = 0;
    for segment in segments {
        let mut rest = *segment;
        while !rest.is_empty() {
            if room == 0 {
                made.push(vec![]);
                room = STRETCH;
            }
            let (now, later) = rest.split_at(room.min(rest.len()));
            if let Some(last) = made.last_mut() {
                last.push(now);
            }
            room -= now.len();
            rest = later;
        }
    }
    made
}

/// Deflates a stretch; also returns the checksum of its input.
fn deflate(stretch: &[&[u8]], level: u32, last: bool) -> Result<(Vec<u8>, crc32fast::Hasher)> {
    let mut crc = crc32fast::Hasher::new();
    let total: usize = stretch.iter().map(|s| s.len()).sum();
    let mut out = Vec::with_capacity(total + total / 64 + 256);
    let mut compress = Compress::new(Compression::new(level), false);
    let failed = |e: flate2::CompressError| Error::new(Kind::Internal, format!("deflate: {e}"));
    for part in stretch {
        crc.update(part);
        let mut rest = *part;
        while !rest.is_empty() {
            let before = compress.total_in();
            compress.compress_vec(rest, &mut out, FlushCompress::None).map_err(failed)?;
            rest = &rest[(compress.total_in() - before) as usize..];
            out.reserve(1 << 14);
        }
    }
    let flush = if last { FlushCompress::Finish } else { FlushCompress::Sync };
    loop {
        let status = compress.compress_vec(&[], &mut out, flush).map_err(failed)?;
        // Spare capacity after a flush means that all output was written.
        if status == Status::StreamEnd || (!last && out.len() < out.capacity()) {
            return Ok((out, crc));
        }
        out.reserve(1 << 14);
    }
}

/// Deflated stretches, written in order.
struct GzipFile {
    file: File,
    sha: Sha256,
    size: u64,
    crc: crc32fast::Hasher,
}

/// Stretches that are deflated and not written.
#[derive(Default)]
struct Deflated {
    /// The next one to write.
    next: usize,
    waiting: BTreeMap<usize, (Vec<u8>, crc32fast::Hasher)>,
}

impl GzipFile {
    fn put(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        self.sha.update(bytes);
        self.size += bytes.len() as u64;
        self.file.write_all(bytes).map_err(|e| Error::from_io(&e, path, "write"))
    }
}

/// One thread at a time hashes and writes stretches whose turn it is, while the others deflate. It writes one and goes back to
/// deflating: on a slow disk the calling thread, which watches for signals, would otherwise write to the end.
fn gzip(path: &Path, file: File, segments: &[&[u8]], level: u32, watch: Watch<'_>) -> Result<Digested> {
    let mut target = GzipFile { file, sha: Sha256::new(), size: 0, crc: crc32fast::Hasher::new() };
    target.put(path, &HEADER)?;
    let mut all = stretches(segments);
    if all.is_empty() {
        all.push(vec![]);
    }
    let target = Lock::new(target);
    let (deflated, turn): (Lock<Deflated>, Signal) = Default::default();
    // Writes the next stretch if it is ready and no other thread is writing; returns whether it did.
    let write_one = || -> Result<bool> {
        let Some(mut target) = target.try_lock() else { return Ok(false) };
        let mut waits = deflated.lock();
        let next = waits.next;
        let Some((bytes, part)) = waits.waiting.remove(&next) else { return Ok(false) };
        waits.next += 1;
        drop(waits);
        turn.notify_all();
        target.crc.combine(&part);
        target.put(path, &bytes).map(|()| true)
    };
    let work = |i: usize, stop: &Stop| -> Result<()> {
        let most = AHEAD.max(threads::num_threads() * 2);
        while i >= deflated.lock().next + most && !stop.is_set() {
            if !write_one()? {
                let waits = deflated.lock();
                if i >= waits.next + most {
                    drop(turn.wait_timeout(waits, LOOK));
                }
            }
        }
        if stop.is_set() {
            return Ok(());
        }
        let made = deflate(&all[i], level, i + 1 == all.len())?;
        deflated.lock().waiting.insert(i, made);
        write_one().map(drop)
    };
    threads::run(all.len(), &work, &mut *watch)?;
    while write_one()? {
        if watch() {
            return Err(Error::new(Kind::Interrupted, "interrupted"));
        }
    }
    let mut target = target.into_inner();
    let length: u64 = segments.iter().map(|s| s.len() as u64).sum();
    let crc = target.crc.clone().finalize();
    target.put(path, &crc.to_le_bytes())?;
    target.put(path, &(length as u32).to_le_bytes())?; // modulo 2^32 (RFC 1952)
    if deflated.into_inner().next != all.len() {
        return Err(Error::new(Kind::Internal, "a stretch that was not written"));
    }
    Ok(Digested { size: target.size, sha256: target.sha.finalize().into() })
}

/// Size and SHA-256 of a file.
pub fn digest(path: &Path, watch: Watch<'_>) -> Result<Digested> {
    let failed = |e: &std::io::Error| Error::from_io(e, path, "read");
    let mut file = File::open(path).map_err(|e| failed(&e))?;
    let mut sha = Sha256::new();
    let mut size = 0;
    let mut some = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut some).map_err(|e| failed(&e))?;
        if n == 0 {
            return Ok(Digested { size, sha256: sha.finalize().into() });
        }
        if watch() {
            return Err(Error::new(Kind::Interrupted, "interrupted"));
        }
        size += n as u64;
        sha.update(&some[..n]);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use flate2::read::GzDecoder;

    fn noise(n: usize) -> Vec<u8> {
        let mut x = 88_172_645_463_325_252u64;
        (0..n)
            .map(|i| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                // Half noise, half runs: produces blocks of every kind.
                if (i / 5000).is_multiple_of(2) { x as u8 } else { (i / 700) as u8 }
            })
            .collect()
    }

    #[test]
    fn what_is_compressed_comes_back_from_any_reader() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gz");
        for total in [0, 1, 1000, STRETCH - 1, STRETCH, STRETCH + 1, 3 * STRETCH, 20 * STRETCH + 77] {
            let bytes = noise(total);
            let cut = total / 3;
            for level in [1, 6] {
                let wrote =
                    write_segments(&path, &[&bytes[..cut], &[], &bytes[cut..]], Some(level), &mut || false).unwrap();
                let mut back = vec![];
                GzDecoder::new(File::open(&path).unwrap()).read_to_end(&mut back).unwrap();
                assert!(back == bytes, "{total} at level {level}");
                assert_eq!(wrote, digest(&path, &mut || false).unwrap());
                let stored = std::fs::read(&path).unwrap();
                let ours =
                    crate::codec::inflate::inflate(&stored, 1 << 30, &mut threads::Context::of_part(&Stop::new()))
                        .unwrap();
                assert!(ours[..] == bytes[..], "{total} at level {level}, by our reader");
            }
        }
    }

    #[test]
    fn plain_segments_are_their_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, noise(9000)).unwrap(); // an older, longer file
        let bytes = noise(5000);
        let wrote = write_segments(&path, &[&bytes[..7], &bytes[7..]], None, &mut || false).unwrap();
        assert!(std::fs::read(&path).unwrap() == bytes);
        assert_eq!(wrote, digest(&path, &mut || false).unwrap());
        assert_eq!(wrote.size, 5000);
    }
}
