//! Writes files to a bucket: small ones in one request, others in parts, many requests at once.
//!
//! Every object carries the SHA-256 of its bytes, so that a later run recognises it, and so that a request whose answer
//! was lost is not repeated if it arrived. Errors and stops leave no unfinished upload: its invisible parts would be
//! billed.

use std::fmt::Write as _;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actshard_core::location::Location;
use actshard_core::threads::{ForkSafe, Stop, is_abandoned};
use actshard_core::{Error, Kind, Result};
use bytes::Bytes;
use futures_util::future::try_join_all;
use futures_util::stream::{self, StreamExt, TryStreamExt};
use sha2::{Digest, Sha256};
use tokio::sync::{Mutex, Semaphore, SemaphorePermit};
use tokio::time::sleep;

use crate::client::Puts;
use crate::client::pace::Pace;
use crate::failure::{Cause, Failure};
use crate::options::RequestLimits;
use crate::runtime::{reserve, wait, wait_at_most};

/// Larger files are sent in parts of at least this many bytes.
const PART: u64 = 8 << 20;
/// A new object (`only_new`) is sent in one request up to this size: only those are atomic.
const WHOLE: u64 = 64 << 20;
/// Providers allow 10,000 parts.
const PARTS: u64 = 9_999;
/// Files at once, and parts of one file.
const FILES: usize = 32;
const PARTS_AT_ONCE: usize = 8;
/// Requests at once, in units of this many bytes: 128 MiB in flight use a fast link fully, and finish in time on a slow
/// one.
const UNIT: u64 = 4 << 20;
const UNITS: u64 = 32;
/// Bytes of a file that are read at once to compute its digest.
const PIECE: u64 = 64 << 20;
/// Time to remove unfinished uploads after an error, and after a stop, when the user waits for the end.
const CLEANUP: Duration = Duration::from_secs(30);
const CLEANUP_STOPPED: Duration = Duration::from_secs(5);

/// The source of an object's bytes.
#[derive(Clone, Debug)]
pub enum UploadBody {
    /// A local file.
    File(PathBuf),
    /// Bytes in memory.
    Memory(Bytes),
}

/// An object to write.
#[derive(Clone, Debug)]
pub struct UploadJob {
    /// Its bytes.
    pub body: UploadBody,
    /// Its key.
    pub key: String,
    /// Whether an object of the same key and other content must not be replaced.
    pub only_new: bool,
    /// The size of the existing object of this key, if any.
    pub found: Option<u64>,
    /// The SHA-256 of its bytes when they were checked: other bytes are not written.
    pub sha256: Option<String>,
}

/// The result of an [`UploadJob`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uploaded {
    /// It was written.
    Sent,
    /// The same bytes already existed.
    There,
    /// Other bytes exist, and `only_new` was requested.
    Refused,
}

/// Writes objects; made for one call.
pub struct Uploader<'a> {
    puts: &'a dyn Puts,
    limits: &'a RequestLimits,
    pace: Pace,
    name: &'a (dyn Fn(&str) -> Location + Sync),
    /// Keys of uploads in parts that were begun, with their names once those are known.
    begun: ForkSafe<Vec<(String, Option<String>)>>,
    gate: Semaphore,
    sent: &'a AtomicU64,
}

/// A file that is read in order by several uploads of its parts.
struct OrderedParts {
    file: Arc<File>,
    digest: Sha256,
    next: usize,
}

/// Hexadecimal digits.
pub(crate) fn hex(digest: &[u8]) -> String {
    digest.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn part_bytes(size: u64) -> u64 {
    size.div_ceil(PARTS).next_multiple_of(1 << 20).max(PART)
}

/// Reads exactly this many bytes, on a thread that may block.
async fn read(file: &Arc<File>, at: u64, len: u64, location: &Location) -> Result<Bytes> {
    let file = Arc::clone(file);
    let none = || Error::new(Kind::NoMemory, format!("no memory for {len} bytes")).at(location);
    let mut bytes: Vec<u8> = vec![];
    bytes.try_reserve_exact(usize::try_from(len).unwrap_or(usize::MAX)).map_err(|_| none())?;
    let work = move || {
        bytes.resize(len as usize, 0);
        file.read_exact_at(&mut bytes, at).map(|()| Bytes::from(bytes))
    };
    let made = tokio::task::spawn_blocking(work).await;
    made.map_err(|_| Error::new(Kind::Internal, "a read that panicked").at(location))?
        .map_err(|error| shrunk(&error, location))
}

fn changed(location: &Location) -> Error {
    Error::new(Kind::Format, "changed while it was uploaded: push again").at(location)
}

fn shrunk(error: &std::io::Error, location: &Location) -> Error {
    match error.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            Error::new(Kind::Truncated, "became shorter while it was uploaded").at(location)
        }
        _ => Error::from_io(error, location, "read"),
    }
}

/// SHA-256 of a file's bytes.
async fn digest(file: &Arc<File>, size: u64, location: &Location) -> Result<String> {
    let (mut sha, mut at) = (Sha256::new(), 0);
    while at < size {
        let (piece, from) = (Arc::clone(file), at);
        let end = size.min(at + PIECE);
        let work = move || {
            let mut buffer = vec![0; 1 << 20];
            let mut at = from;
            while at < end {
                let some = (end - at).min(buffer.len() as u64) as usize;
                piece.read_exact_at(&mut buffer[..some], at)?;
                sha.update(&buffer[..some]);
                at += some as u64;
            }
            Ok(sha)
        };
        let made = tokio::task::spawn_blocking(work).await;
        sha = made
            .map_err(|_| Error::new(Kind::Internal, "a read that panicked").at(location))?
            .map_err(|error: std::io::Error| shrunk(&error, location))?;
        at = end;
    }
    Ok(hex(&sha.finalize()))
}

impl<'a> Uploader<'a> {
    /// A writer; `name` is the location of a key, `sent` counts the bytes.
    pub fn new(
        puts: &'a dyn Puts,
        limits: &'a RequestLimits,
        name: &'a (dyn Fn(&str) -> Location + Sync),
        sent: &'a AtomicU64,
    ) -> Uploader<'a> {
        let (pace, begun) = (Pace::default(), ForkSafe::default());
        Uploader { puts, limits, pace, name, begun, gate: Semaphore::new(UNITS as usize), sent }
    }

    /// Writes objects, in any order. After an error or a stop, some may have been written, and none is unfinished.
    pub fn run(&self, jobs: &[UploadJob], stop: &Stop) -> Result<Vec<Uploaded>> {
        let all = stream::iter(jobs).map(|job| self.one(job)).buffered(FILES).try_collect::<Vec<_>>();
        let made = wait(all, stop).flatten();
        let left = self.begun.with(std::mem::take).unwrap_or_default();
        if !left.is_empty() {
            // Not stopped together with the uploads.
            let stopped = stop.is_set() || is_abandoned();
            wait_at_most(self.abort_all(left), if stopped { CLEANUP_STOPPED } else { CLEANUP });
        }
        made
    }

    /// Removes objects; objects that do not exist count as removed.
    pub fn remove(&self, keys: &[String], stop: &Stop) -> Result<()> {
        let all = stream::iter(keys).map(|key| self.removed(key)).buffer_unordered(FILES).try_collect::<Vec<()>>();
        wait(all, stop)?.map(drop)
    }

    /// Aborts uploads of earlier runs that did not end: those of some keys below a prefix. Returns their number.
    pub fn sweep(&self, prefix: &str, keys: &[String], stop: &Stop) -> Result<usize> {
        let all = async {
            let found = self.repeated(|| self.puts.unfinished(prefix)).await;
            let found = found.map_err(|failure| failure.writing(&(self.name)(prefix)))?;
            let mut aborted = 0;
            for (key, id) in found.iter().filter(|(key, _)| keys.contains(key)) {
                let ended = self.repeated(|| self.puts.abort(key, id)).await;
                ended.or_else(gone).map_err(|failure| failure.writing(&(self.name)(key)))?;
                aborted += 1;
            }
            Ok(aborted)
        };
        wait(all, stop)?
    }

    /// The SHA-256 that objects carry; `None` for objects that do not exist or were written by other means.
    pub fn digests(&self, keys: &[String], stop: &Stop) -> Result<Vec<Option<String>>> {
        let one = |key| async move {
            let found = self.puts.head(key).await;
            let found = found.map_err(|failure| failure.at(&(self.name)(key)))?;
            Ok(found.and_then(|found| found.sha256))
        };
        let all = stream::iter(keys).map(|key| one(key)).buffered(FILES).try_collect();
        wait(all, stop)?
    }

    async fn removed(&self, key: &str) -> Result<()> {
        let ended = self.repeated(|| self.puts.remove(key)).await;
        ended.or_else(gone).map_err(|failure| failure.writing(&(self.name)(key)))
    }

    /// Sends an idempotent request until it succeeds or no attempt is left.
    async fn repeated<T, F: Future<Output = Result<T, Failure>>>(&self, ask: impl Fn() -> F) -> Result<T, Failure> {
        let mut attempts = Attempts::new(self);
        loop {
            match ask().await {
                Ok(made) => return Ok(made),
                Err(failure) => attempts.again(failure).await?,
            }
        }
    }

    async fn one(&self, job: &UploadJob) -> Result<Uploaded> {
        let location = (self.name)(&job.key);
        let path = match &job.body {
            UploadBody::Memory(bytes) => {
                let _gate = self.pass(bytes.len() as u64).await;
                return self.whole(job, bytes.clone(), &location).await;
            }
            UploadBody::File(path) => path.as_path(),
        };
        let local = Location::from(path);
        let file = Arc::new(File::open(path).map_err(|error| Error::from_io(&error, path, "open"))?);
        let size = file.metadata().map_err(|error| Error::from_io(&error, path, "look at"))?.len();
        if size <= if job.only_new { WHOLE } else { PART } {
            let _gate = self.pass(size).await;
            let bytes = read(&file, 0, size, &local).await?;
            if job.sha256.as_ref().is_some_and(|sha256| *sha256 != hex(&Sha256::digest(&bytes))) {
                return Err(changed(&local));
            }
            return self.whole(job, bytes, &location).await;
        }
        let sha256 = match &job.sha256 {
            Some(sha256) => sha256.clone(), // the parts are compared with it before they become an object
            None => digest(&file, size, &local).await?,
        };
        if job.found.is_some() || job.only_new {
            match self.stored(&job.key, size, &sha256).await.map_err(|failure| failure.writing(&location))? {
                FoundContent::Same => return Ok(self.counted(size, Uploaded::There)),
                FoundContent::Other if job.only_new => return Ok(Uploaded::Refused),
                _ => {}
            }
        }
        self.in_parts(&job.key, file, size, &sha256, &local).await?;
        Ok(Uploaded::Sent)
    }

    fn counted(&self, bytes: u64, made: Uploaded) -> Uploaded {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
        made
    }

    /// Waits until a request of this many bytes may be sent.
    async fn pass(&self, bytes: u64) -> (Option<SemaphorePermit<'_>>, Option<SemaphorePermit<'static>>) {
        let units = bytes.div_ceil(UNIT).clamp(1, UNITS / 2) as u32;
        (self.gate.acquire_many(units).await.ok(), reserve(bytes).await)
    }

    async fn stored(&self, key: &str, size: u64, sha256: &str) -> Result<FoundContent, Failure> {
        Ok(match self.puts.head(key).await? {
            None => FoundContent::Nothing,
            Some(found) if found.size == size && found.sha256.as_deref() == Some(sha256) => FoundContent::Same,
            Some(_) => FoundContent::Other,
        })
    }

    /// Writes an object in one request.
    async fn whole(&self, job: &UploadJob, bytes: Bytes, location: &Location) -> Result<Uploaded> {
        let (size, sha256) = (bytes.len() as u64, &hex(&Sha256::digest(&bytes)));
        let failed = |failure: Failure| failure.writing(location);
        if job.found == Some(size) && self.stored(&job.key, size, sha256).await.map_err(failed)? == FoundContent::Same {
            return Ok(self.counted(size, Uploaded::There));
        }
        let (mut attempts, mut only_new) = (Attempts::new(self), job.only_new);
        loop {
            let failure = match self.puts.put(&job.key, bytes.clone(), sha256, only_new).await {
                Ok(()) => return Ok(self.counted(size, Uploaded::Sent)),
                Err(failure) => failure,
            };
            let condition = only_new && matches!(failure.status(), Some(409 | 412));
            if condition || failure.is_temporary() || failure.status() == Some(501) {
                // It may have arrived, and the answer was lost.
                match self.stored(&job.key, size, sha256).await.map_err(failed)? {
                    FoundContent::Same => return Ok(self.counted(size, Uploaded::Sent)),
                    FoundContent::Other if job.only_new => return Ok(Uploaded::Refused),
                    _ => {}
                }
            }
            if only_new && failure.status() == Some(501) {
                // The server does not support conditions; no object existed a moment ago.
                only_new = false;
                continue;
            }
            let failure = if condition { Failure { cause: Cause::Status(503), ..failure } } else { failure };
            attempts.again(failure).await.map_err(failed)?;
        }
    }

    /// Writes an object in parts.
    async fn in_parts(&self, key: &str, file: Arc<File>, size: u64, sha256: &str, local: &Location) -> Result<()> {
        let failed = |failure: Failure| failure.writing(&(self.name)(key));
        let id = self.begin(key, sha256).await.map_err(failed)?;
        let length = part_bytes(size);
        let count = size.div_ceil(length) as usize;
        let ordered = Mutex::new(OrderedParts { file, digest: Sha256::new(), next: 0 });
        let worker = || async {
            let mut made = vec![];
            loop {
                let mut parts = ordered.lock().await;
                let number = parts.next;
                if number >= count {
                    return Ok::<_, Error>(made);
                }
                let at = number as u64 * length;
                let bytes = length.min(size - at);
                let gate = self.pass(bytes).await;
                let body = read(&parts.file, at, bytes, local).await?;
                parts.digest.update(&body);
                parts.next += 1;
                drop(parts);
                let sent = self.repeated(|| self.puts.part(key, &id, number, body.clone())).await;
                made.push((number, sent.map_err(failed)?));
                self.sent.fetch_add(bytes, Ordering::Relaxed);
                drop(gate);
            }
        };
        let workers = (0..PARTS_AT_ONCE.min(count)).map(|_| worker());
        let mut made: Vec<(usize, String)> = try_join_all(workers).await?.into_iter().flatten().collect();
        made.sort_unstable();
        if hex(&ordered.into_inner().digest.finalize()) != sha256 {
            return Err(changed(local));
        }
        let parts = made.into_iter().map(|(_, part)| part).collect();
        self.complete(key, &id, parts, size, sha256).await.map_err(failed)?;
        self.begun.with(|begun| begun.retain(|(of, _)| of != key));
        Ok(())
    }

    async fn begin(&self, key: &str, sha256: &str) -> Result<String, Failure> {
        self.begun.with(|begun| begun.push((key.to_string(), None)));
        let mut attempts = Attempts::new(self);
        loop {
            match self.puts.begin(key, sha256).await {
                Ok(id) => {
                    self.begun.with(|begun| {
                        begun.retain(|(of, _)| of != key);
                        begun.push((key.to_string(), Some(id.clone())));
                    });
                    return Ok(id);
                }
                Err(failure) => {
                    // A lost answer may name an upload that would never be ended.
                    if failure.is_temporary() {
                        self.abort_all(vec![(key.to_string(), None)]).await;
                    }
                    attempts.again(failure).await?;
                }
            }
        }
    }

    async fn complete(&self, key: &str, id: &str, parts: Vec<String>, size: u64, sha256: &str) -> Result<(), Failure> {
        let mut attempts = Attempts::new(self);
        loop {
            let Err(failure) = self.puts.complete(key, id, parts.clone()).await else { return Ok(()) };
            if self.stored(key, size, sha256).await? == FoundContent::Same {
                return Ok(());
            }
            // S3 responds 200 with an error inside.
            let inside = failure.cause == Cause::Protocol;
            let failure = if inside { Failure { cause: Cause::Broken, ..failure } } else { failure };
            attempts.again(failure).await?;
        }
    }

    /// Aborts uploads; of those without a name, all that are listed for the key.
    async fn abort_all(&self, uploads: Vec<(String, Option<String>)>) {
        let one = |(key, id): (String, Option<String>)| async move {
            let ids = match id {
                Some(id) => vec![id],
                None => {
                    let listed = self.repeated(|| self.puts.unfinished(&key)).await.unwrap_or_default();
                    listed.into_iter().filter(|(of, _)| *of == key).map(|(_, id)| id).collect()
                }
            };
            for id in ids {
                let _ = self.repeated(|| self.puts.abort(&key, &id)).await;
            }
        };
        stream::iter(uploads).for_each_concurrent(FILES, one).await;
    }
}

/// The existing content of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FoundContent {
    Nothing,
    Same,
    Other,
}

/// Counts an object that does not exist as removed.
fn gone(failure: Failure) -> Result<(), Failure> {
    if failure.status() == Some(404) { Ok(()) } else { Err(failure) }
}

/// Attempts of one request.
struct Attempts<'a> {
    limits: &'a RequestLimits,
    pace: &'a Pace,
    tried: u32,
    end: Instant,
}

impl<'a> Attempts<'a> {
    fn new(uploader: &'a Uploader<'_>) -> Attempts<'a> {
        let limits = uploader.limits;
        Attempts { limits, pace: &uploader.pace, tried: 0, end: Instant::now() + limits.patience }
    }

    /// Waits before the next attempt; fails if it cannot help.
    async fn again(&mut self, failure: Failure) -> Result<(), Failure> {
        self.tried += 1;
        let wait = failure.after.unwrap_or_else(|| self.pace.backoff(self.tried - 1));
        let late = Instant::now() + wait > self.end && self.tried > 1;
        if !failure.is_temporary() || self.tried >= self.limits.tries || late {
            let text = match self.tried {
                1 => failure.text,
                tried => format!("{} (after {tried} attempts)", failure.text).trim_start().to_string(),
            };
            return Err(Failure { text, ..failure });
        }
        sleep(wait).await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_many_as_providers_allow() {
        for size in [PART + 1, 17 << 20, 80 << 30, 1 << 40, 5 << 40] {
            let part = part_bytes(size);
            assert!(part >= PART && part.is_multiple_of(1 << 20) && size.div_ceil(part) <= 10_000, "{size}: {part}");
        }
        assert_eq!(part_bytes(10 << 30), PART);
    }
}
