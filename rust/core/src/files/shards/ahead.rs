//! The bytes of the shard that is needed next: read, and hashed as far as time permits, while rows of an earlier shard are used.

use std::sync::Arc;

use super::stored::ShardRead;
use crate::error::Result;
use crate::threads::{ForkSafe, LOOK, Lock, Signal, Stop, Watch, interrupted};

/// At most one shard: its bytes take the memory of those from which the shard before it was decoded.
#[derive(Default)]
pub(super) struct NextShard(ForkSafe<Option<Arc<Coming>>>);

/// A shard that a thread reads.
struct Coming {
    shard: usize,
    /// The reading process: a forked child has no such thread.
    pid: u32,
    /// Set when the bytes are needed now, hashed or not.
    wanted: Stop,
    /// Set when the bytes are no longer needed.
    dropped: Stop,
    /// `None` until the thread is done; then the bytes, or `None` if they could not be read.
    read: Lock<Option<Option<ShardRead>>>,
    done: Signal,
}

impl Coming {
    fn new(shard: usize) -> Coming {
        let (wanted, dropped) = (Stop::new(), Stop::new());
        Coming { shard, pid: std::process::id(), wanted, dropped, read: Lock::new(None), done: Signal::new() }
    }

    fn end(&self, read: Option<ShardRead>) {
        self.read.lock().get_or_insert(read);
        self.done.notify_all();
    }

    fn wait(&self, watch: Watch<'_>) -> Result<Option<ShardRead>> {
        self.wanted.set();
        let mut read = self.read.lock();
        loop {
            if let Some(read) = read.take() {
                return Ok(read);
            }
            let (again, waited) = self.done.wait_timeout(read, LOOK);
            read = again;
            if waited && watch() {
                self.dropped.set();
                return Err(interrupted());
            }
        }
    }
}

/// The reading thread's end, also during unwinding.
struct Ending<'a>(&'a Coming);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end(None);
    }
}

impl NextShard {
    /// Calls `read` on a separate thread, unless the shard is being read. It stops hashing once the first flag is set,
    /// and ends once the second is set. Another shard that was read and not used is dropped.
    pub(super) fn read(&self, shard: usize, read: impl FnOnce(&Stop, &Stop) -> Option<ShardRead> + Send + 'static) {
        let Some(coming) = self.begin(shard) else { return };
        let work = move || {
            let _ending = Ending(&coming);
            coming.end(read(&coming.wanted, &coming.dropped));
        };
        if std::thread::Builder::new().name("actshard-ahead".into()).spawn(work).is_err() {
            self.clear();
        }
    }

    /// Puts a shard in the place of another; `None` if it is there.
    fn begin(&self, shard: usize) -> Option<Arc<Coming>> {
        let mut place = self.0.lock_briefly()?;
        if place.as_ref().is_some_and(|there| there.shard == shard && there.pid == std::process::id()) {
            return None;
        }
        let coming = Arc::new(Coming::new(shard));
        if let Some(left) = place.replace(Arc::clone(&coming)) {
            left.dropped.set();
        }
        Some(coming)
    }

    /// Drops the shard; its thread ends soon.
    pub(super) fn clear(&self) {
        if let Some(left) = self.0.lock_briefly().and_then(|mut place| place.take()) {
            left.dropped.set();
        }
    }

    /// The bytes of a shard if a thread reads or has read them. Errors of that thread recur when the shard is read.
    pub(super) fn take(&self, shard: usize, watch: Watch<'_>) -> Result<Option<ShardRead>> {
        match self.0.lock_briefly().and_then(|mut place| place.take_if(|coming| coming.shard == shard)) {
            Some(coming) if coming.pid == std::process::id() => coming.wait(watch),
            _ => Ok(None),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::files::shards::stored::Stored;
    use crate::memory::buffer::Buffer;

    fn bytes(of: &[u8]) -> ShardRead {
        ShardRead::new(Stored::Buffer(Buffer::from(of.to_vec())), None)
    }

    #[test]
    fn a_shard_is_handed_over_once_and_only_if_asked_for() {
        let ahead = NextShard::default();
        let coming = ahead.begin(3).unwrap();
        assert!(ahead.begin(3).is_none(), "it is being read");
        coming.end(Some(bytes(b"three")));
        assert!(ahead.take(4, &mut || false).unwrap().is_none());
        assert_eq!(ahead.take(3, &mut || false).unwrap().unwrap().stored.bytes(), b"three");
        assert!(ahead.take(3, &mut || false).unwrap().is_none());
    }

    #[test]
    fn another_shard_takes_its_place_and_its_thread_ends() {
        let ahead = NextShard::default();
        let three = ahead.begin(3).unwrap();
        let four = ahead.begin(4).unwrap();
        assert!(three.dropped.is_set() && !four.dropped.is_set());
        assert!(ahead.take(3, &mut || false).unwrap().is_none());
        ahead.clear();
        assert!(four.dropped.is_set());
        assert!(ahead.take(4, &mut || false).unwrap().is_none());
    }

    #[test]
    fn a_wait_ends_when_the_reader_fails_panics_or_is_interrupted() {
        let ahead = NextShard::default();
        ahead.begin(0).unwrap().end(None);
        assert!(ahead.take(0, &mut || false).unwrap().is_none());

        let coming = ahead.begin(1).unwrap();
        let panics = std::thread::spawn(move || {
            let _ending = Ending(&coming);
            panic!("in a reader");
        });
        assert!(ahead.take(1, &mut || false).unwrap().is_none());
        assert!(panics.join().is_err());

        let coming = ahead.begin(2).unwrap();
        assert!(matches!(ahead.take(2, &mut || true), Err(error) if error.kind == Kind::Interrupted));
        assert!(coming.wanted.is_set() && coming.dropped.is_set());
    }

    #[test]
    fn a_forked_child_does_not_wait() {
        let ahead = NextShard::default();
        let parents = Arc::new(Coming { pid: std::process::id() + 1, ..Coming::new(5) });
        *ahead.0.try_lock().unwrap() = Some(Arc::clone(&parents));
        assert!(ahead.begin(5).is_some(), "the parent's thread does not exist here");
        *ahead.0.try_lock().unwrap() = Some(parents);
        assert!(ahead.take(5, &mut || false).unwrap().is_none());
    }

    #[test]
    fn a_checksum_continues_where_it_stopped() {
        let content: Vec<u8> = (0..10_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let expected = bytes(&content).sha256(&mut || false).unwrap();
        for pieces in 0..4 {
            let mut read = bytes(&content);
            let mut looks = 0;
            let all = read.hash(&mut || {
                looks += 1;
                looks > pieces
            });
            assert_eq!(all, pieces >= 2, "{pieces}");
            assert_eq!(read.sha256(&mut || false).unwrap(), expected);
        }
        assert!(bytes(&content).sha256(&mut || true).is_err());
        assert_eq!(bytes(b"").sha256(&mut || true).unwrap(), bytes(b"").sha256(&mut || false).unwrap());
    }
}
