//! Positioned reads, and read-ahead hints that make many of them fast on a cold disk.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::Ready;

/// Fills `buf` from `offset`; may wait for the disk.
pub fn read_exact_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<()> {
    file.read_exact_at(buf, offset)
}

/// Fills `buf` only if all of it is in the page cache (`RWF_NOWAIT`).
pub fn read_if_cached(file: &File, buf: &mut [u8], offset: u64) -> io::Result<Ready> {
    #[cfg(target_os = "linux")]
    {
        use rustix::io::{Errno, ReadWriteFlags, preadv2};
        let want = buf.len();
        match preadv2(file, &mut [IoSliceMut::new(buf)], offset, ReadWriteFlags::NOWAIT) {
            Ok(n) if n == want => Ok(Ready::Yes),
            // Short: not all cached, or the end of the file; the waiting read finds out which.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => Ok(Ready::No),
            Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => Ok(Ready::Unknown),
            Err(errno) => Err(errno.into()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (file, buf, offset);
        Ok(Ready::Unknown)
    }
}

/// Whether the byte at `offset` is in the page cache. Uses a non-blocking read: `mincore` answers "yes" for any file that
/// this user may not write, whereas a read is correct for all that the user may read.
pub fn is_cached(file: &File, offset: u64) -> Ready {
    match read_if_cached(file, &mut [0], offset) {
        // File systems in memory do not support the check, and do not need it.
        Ok(Ready::Unknown) if is_in_memory(file) => Ready::Yes,
        Ok(ready) => ready,
        Err(_) => Ready::Unknown,
    }
}

/// Whether a file is on a file system that keeps its files in memory only. Magic numbers: `statfs(2)`.
fn is_in_memory(file: &File) -> bool {
    #[cfg(target_os = "linux")]
    {
        const IN_MEMORY: [u32; 3] = [
            0x0102_1994, // tmpfs
            0x8584_58f6, // ramfs
            0x9584_58f6, // hugetlbfs
        ];
        rustix::fs::fstatfs(file).is_ok_and(|fs| IN_MEMORY.contains(&(fs.f_type as u32)))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = file;
        false
    }
}

/// Starts reading a range into the page cache without waiting for it. A hint.
pub fn will_need(file: &File, offset: u64, len: u64) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(len), rustix::fs::Advice::WillNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, len);
}

/// Advises the kernel that reads are random, so that a small read does not trigger megabytes of readahead.
pub fn expect_random(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

/// Whether `path` is on a network or user-space file system, where a page fault is a round trip and mapping is often slower.
/// Magic numbers: `statfs(2)` and each file system's kernel header.
pub fn is_network(path: &Path) -> bool {
    #[cfg(target_os = "linux")]
    {
        const NETWORK: [u32; 14] = [
            0x0000_6969, // NFS
            0x0BD0_0BD0, // Lustre
            0x4750_4653, // GPFS / Spectrum Scale
            0x00C3_6400, // Ceph
            0xFF53_4D42, // CIFS
            0xFE53_4D42, // SMB2
            0x0000_517B, // SMB
            0x6573_5546, // FUSE (s3fs, gcsfuse, sshfs, ...)
            0x0102_1997, // 9p
            0x1983_0326, // BeeGFS
            0x5346_414F, // AFS
            0x7375_7245, // Coda
            0x0000_564C, // NCP
            0x2003_0528, // PanFS / OrangeFS
        ];
        rustix::fs::statfs(path).is_ok_and(|fs| NETWORK.contains(&(fs.f_type as u32)))
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = path;
        false
    }
}
