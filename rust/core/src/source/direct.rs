//! Reads past the page cache (`O_DIRECT`): for data larger than memory, whose pages would be evicted before their next use. Such a
//! read costs a tenth of the processor time of a read through the cache (measured: 0.04 compared with 0.43 s per GB).

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::descriptors::Share;
use crate::threads::ForkSafe;

/// Direct reads begin and end at multiples of this, in the file and in memory: the largest logical block of common disks.
pub const DIRECT: u64 = 4096;

/// A file opened a second time, for direct reads, when it is first needed.
#[derive(Debug, Default)]
pub struct DirectFile {
    /// Reads go through the cache where it cannot be locked.
    opened: ForkSafe<Option<(Arc<File>, Share)>>,
    /// The file system cannot read directly.
    refused: AtomicBool,
}

impl DirectFile {
    /// Reads from `at` into an aligned buffer; returns the number of bytes read, which is smaller at the end of the file and 0
    /// if direct reads are not possible. Any error is left to a read through the cache.
    pub fn read(&self, file: &File, into: &mut [u8], at: u64) -> usize {
        let aligned = |n: u64| n.is_multiple_of(DIRECT);
        let fits = aligned(at) && aligned(into.len() as u64) && aligned(into.as_ptr().addr() as u64);
        let Some(direct) = fits.then(|| self.get(file)).flatten() else { return 0 };
        let mut done = 0;
        while done < into.len() {
            match direct.read_at(&mut into[done..], at + done as u64) {
                Ok(0) => break,
                // A short read that does not end at a block is the end of the file.
                Ok(n) if !aligned(n as u64) => return done + n,
                Ok(n) => done += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.refused.store(true, Ordering::Relaxed);
                    break;
                }
            }
        }
        done
    }

    fn get(&self, file: &File) -> Option<Arc<File>> {
        if self.refused.load(Ordering::Relaxed) {
            return None;
        }
        // Another thread may be opening it.
        let mut opened = self.opened.lock_briefly()?;
        if let Some((kept, _)) = &*opened {
            return Some(Arc::clone(kept));
        }
        let Ok(made) = open(file).map(Arc::new) else {
            // Also if there is no free descriptor: reads through the cache need none.
            self.refused.store(true, Ordering::Relaxed);
            return None;
        };
        let share = Share::take();
        if share.may_keep() {
            *opened = Some((Arc::clone(&made), share));
        }
        Some(made)
    }
}

/// Opens the same file again, even if another file has its name now.
#[cfg(target_os = "linux")]
fn open(file: &File) -> io::Result<File> {
    let flags = rustix::fs::OFlags::DIRECT.bits().cast_signed();
    OpenOptions::new().read(true).custom_flags(flags).open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(not(target_os = "linux"))]
fn open(_: &File) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}
