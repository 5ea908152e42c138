//! Locks and holes of files. Locks belong to an open file description (`F_OFD_SETLK`): they exclude threads as well as processes,
//! and the kernel drops them when a process is killed. A forked child shares the descriptions of its parent, so locks are
//! released explicitly and never by closing alone.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Locks on bytes of one file, released together.
#[derive(Debug)]
pub struct ByteLocks {
    file: File,
}

impl ByteLocks {
    /// Opens a file for locks; no other description of it shares them.
    pub fn open(path: &Path) -> io::Result<ByteLocks> {
        Ok(ByteLocks { file: open_rw(path, false)? })
    }

    /// Locks a byte exclusively, if it is free.
    pub fn try_lock(&self, byte: u64) -> io::Result<bool> {
        lock(&self.file, byte)
    }

    /// Releases one byte.
    pub fn unlock(&self, byte: u64) -> io::Result<()> {
        unlock(&self.file, byte, 1)
    }

    pub fn file(&self) -> &File {
        &self.file
    }
}

impl Drop for ByteLocks {
    fn drop(&mut self) {
        // It fails only if the description is unusable, and then holds no locks.
        let _ = unlock(&self.file, 0, 0);
    }
}

/// Opens a file for reading and writing, private to the user.
pub fn open_rw(path: &Path, create: bool) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(create).truncate(false).mode(0o600).open(path)
}

#[cfg(target_os = "linux")]
fn request(kind: i32, byte: u64, len: i64) -> io::Result<nix::libc::flock> {
    let start = i64::try_from(byte).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok(nix::libc::flock {
        l_type: kind as nix::libc::c_short,
        l_whence: nix::libc::SEEK_SET as nix::libc::c_short,
        l_start: start,
        l_len: len,
        l_pid: 0,
    })
}

#[cfg(target_os = "linux")]
fn lock(file: &File, byte: u64) -> io::Result<bool> {
    use nix::errno::Errno;
    use nix::fcntl::{FcntlArg, fcntl};
    match fcntl(file, FcntlArg::F_OFD_SETLK(&request(nix::libc::F_WRLCK, byte, 1)?)) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES | Errno::EINTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(target_os = "linux")]
fn unlock(file: &File, byte: u64, len: i64) -> io::Result<()> {
    use nix::fcntl::{FcntlArg, fcntl};
    fcntl(file, FcntlArg::F_OFD_SETLK(&request(nix::libc::F_UNLCK, byte, len)?))?;
    Ok(())
}

/// Frees a range of a file; its bytes are 0 then.
#[cfg(target_os = "linux")]
pub fn punch(file: &File, at: u64, len: u64) -> io::Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    Ok(fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, at, len)?)
}

#[cfg(not(target_os = "linux"))]
fn lock(_: &File, _: u64) -> io::Result<bool> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(not(target_os = "linux"))]
fn unlock(_: &File, _: u64, _: i64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Frees a range of a file; its bytes are 0 then.
#[cfg(not(target_os = "linux"))]
pub fn punch(_: &File, _: u64, _: u64) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn a_byte_is_locked_once_also_in_one_process() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        open_rw(&path, true).unwrap();
        let (a, b) = (ByteLocks::open(&path).unwrap(), ByteLocks::open(&path).unwrap());
        assert!(a.try_lock(3).unwrap() && a.try_lock(1 << 40).unwrap());
        assert!(!b.try_lock(3).unwrap() && b.try_lock(4).unwrap());
        a.unlock(3).unwrap();
        assert!(b.try_lock(3).unwrap());
        // As in a child: the description lives on in another descriptor.
        let inherited = a.file().try_clone().unwrap();
        drop(a);
        assert!(b.try_lock(1 << 40).unwrap());
        drop(inherited);
    }
}
