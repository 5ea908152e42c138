//! The files of one cached object: verified reads and writes of its bytes.

use std::fs::File;
use std::io::{self, IoSliceMut};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicU32, Ordering};

use super::folder::Folder;
use super::geometry::{BLOCK, CLOCK, Geometry, HEAD, PAGE, SECTOR};
use super::key::ObjectKey;
use super::system::{ByteLocks, open_rw, punch};

/// An object's open files.
#[derive(Debug)]
pub struct CachedObject {
    pub geometry: Geometry,
    data: File,
    state: File,
    inode: (u64, u64),
    /// Second in which each block's clock was last set by this process; 0 is never.
    touched: Box<[AtomicU32]>,
}

impl CachedObject {
    /// Opens an object that exists.
    pub fn open(folder: &Folder, key: &ObjectKey) -> io::Result<CachedObject> {
        let path = folder.object(&key.name);
        let (data, state) = (open_rw(&path.join("data"), false)?, open_rw(&path.join("state"), false)?);
        let meta = data.metadata()?;
        let touched = (0..key.geometry.blocks()).map(|_| AtomicU32::new(0)).collect();
        Ok(CachedObject { geometry: key.geometry, data, state, inode: (meta.dev(), meta.ino()), touched })
    }

    /// Whether its files were removed, and possibly made again.
    pub fn is_gone(&self) -> io::Result<bool> {
        let links = |file: &File| rustix::fs::fstat(file).map(|stat| stat.st_nlink);
        Ok(links(&self.data)? == 0 || links(&self.state)? == 0)
    }

    /// A description for locks of its blocks; `None` if the files were removed.
    pub fn locks(&self, folder: &Folder, key: &ObjectKey) -> io::Result<Option<ByteLocks>> {
        let locks = match ByteLocks::open(&folder.object(&key.name).join("data")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other?,
        };
        let meta = locks.file().metadata()?;
        Ok(((meta.dev(), meta.ino()) == self.inode).then_some(locks))
    }

    /// Fills `into` from `at`, a range inside the object, if all bytes are there and match their checksums. Otherwise the
    /// content of `into` is undefined.
    pub fn read(&self, mut at: u64, mut into: &mut [u8]) -> bool {
        while !into.is_empty() {
            let n = into.len().min((BLOCK - at % BLOCK) as usize);
            let (now, rest) = into.split_at_mut(n);
            if !self.read_in_block(at, now).unwrap_or(false) {
                return false;
            }
            (at, into) = (at + n as u64, rest);
        }
        true
    }

    /// Whether the sector of a byte was stored. It may still be damaged, or erased before it is read.
    pub fn has(&self, at: u64) -> bool {
        let mut sum = [0; 4];
        at < self.geometry.size
            && fill(&self.state, self.geometry.sums_at(at / SECTOR), &mut sum).is_ok_and(|there| there && sum != [0; 4])
    }

    /// For each page of a range of whole pages inside one block, whether it was stored.
    pub fn stored_pages(&self, at: u64, len: usize) -> Vec<bool> {
        let mut sums = vec![0; len.div_ceil(SECTOR as usize) * 4];
        if !fill(&self.state, self.geometry.sums_at(at / SECTOR), &mut sums).unwrap_or(false) {
            sums.fill(0);
        }
        let page = (PAGE / SECTOR) as usize * 4;
        sums.chunks(page).map(|page| page.chunks_exact(4).all(|sum| sum != [0; 4])).collect()
    }

    fn read_in_block(&self, at: u64, into: &mut [u8]) -> io::Result<bool> {
        let end = at + into.len() as u64;
        let (first, last) = (at / SECTOR, (end - 1) / SECTOR);
        let mut sums = [0; BLOCK as usize / SECTOR as usize * 4];
        let sums = &mut sums[..(last - first + 1) as usize * 4];
        if !fill(&self.state, self.geometry.sums_at(first), sums)? || sums.chunks_exact(4).any(|sum| sum == [0; 4]) {
            return Ok(false);
        }
        // Sectors that are requested only in part are read whole, together with the others, in one call.
        let (mut head, mut tail) = ([0; SECTOR as usize], [0; SECTOR as usize]);
        let whole_end = |sector: u64| ((sector + 1) * SECTOR).min(self.geometry.size);
        let skipped = (at - first * SECTOR) as usize;
        let head_len = if skipped > 0 || (first == last && end < whole_end(first)) {
            (whole_end(first) - first * SECTOR) as usize
        } else {
            0
        };
        let tail_len = if end < whole_end(last) && !(first == last && head_len > 0) {
            (whole_end(last) - last * SECTOR) as usize
        } else {
            0
        };
        let from_head = if head_len > 0 { (head_len - skipped).min(into.len()) } else { 0 };
        let from_tail = if tail_len > 0 { (end - last * SECTOR) as usize } else { 0 };
        let middle_end = into.len() - from_tail;
        let (head, tail) = (&mut head[..head_len], &mut tail[..tail_len]);
        if !fill_three(&self.data, first * SECTOR, [&mut *head, &mut into[from_head..middle_end], &mut *tail])? {
            return Ok(false);
        }
        let middle = into[from_head..middle_end].chunks(SECTOR as usize);
        let pieces = [&*head].into_iter().chain(middle).chain([&*tail]).filter(|piece| !piece.is_empty());
        for ((sector, piece), sum) in (first..).zip(pieces).zip(sums.chunks_exact(4)) {
            if self.geometry.sum(sector, piece).to_le_bytes() != sum {
                return Ok(false);
            }
        }
        into[..from_head].copy_from_slice(&head[skipped.min(head_len)..][..from_head]);
        into[middle_end..].copy_from_slice(&tail[..from_tail]);
        Ok(true)
    }

    /// Stores whole sectors from `at`, a multiple of a sector. The caller holds the locks of their blocks and has counted them.
    pub fn write(&self, at: u64, bytes: &[u8]) -> io::Result<()> {
        self.data.write_all_at(bytes, at)?;
        let first = at / SECTOR;
        let sums = bytes.chunks(SECTOR as usize).zip(first..);
        let sums: Vec<u8> = sums.flat_map(|(piece, n)| self.geometry.sum(n, piece).to_le_bytes()).collect();
        // After the data, so that a kill between leaves the sectors absent.
        self.state.write_all_at(&sums, self.geometry.sums_at(first))
    }

    /// The first half of a block's head.
    pub fn head(&self, block: u64) -> io::Result<[u8; 4]> {
        let mut head = [0; 4];
        fill(&self.state, block * HEAD, &mut head)?;
        Ok(head)
    }

    pub fn set_head(&self, block: u64, head: [u8; 4]) -> io::Result<()> {
        self.state.write_all_at(&head, block * HEAD)
    }

    /// Sets the clocks of the blocks of a range, at most once a second each.
    pub fn touch(&self, folder: &Folder, at: u64, len: u64) {
        let now = folder.now();
        for block in at / BLOCK..=(at + len.max(1) - 1) / BLOCK {
            let Some(touched) = self.touched.get(block as usize) else { return };
            if touched.load(Ordering::Relaxed) != now {
                touched.store(now, Ordering::Relaxed);
                // Only a hint for eviction.
                let _ = self.state.write_at(&[1], block * HEAD + CLOCK);
            }
        }
    }
}

/// Removes a block from an object's files. The caller holds its lock.
pub fn erase(geometry: Geometry, state: &File, data: &File, block: u64) -> io::Result<()> {
    // Checksums first: a reader never takes the hole for bytes.
    punch(state, geometry.sums_at(block * (BLOCK / SECTOR)), BLOCK / SECTOR * 4)?;
    punch(data, block * BLOCK, BLOCK)?;
    state.write_all_at(&[0; HEAD as usize], block * HEAD)
}

/// Fills a buffer; false if the file ends before. Zeros are written into the rest.
pub fn fill(file: &File, at: u64, mut into: &mut [u8]) -> io::Result<bool> {
    let mut at = at;
    while !into.is_empty() {
        match file.read_at(into, at) {
            Ok(0) => {
                into.fill(0);
                return Ok(false);
            }
            Ok(n) => (at, into) = (at + n as u64, &mut into[n..]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Fills three buffers from consecutive bytes.
fn fill_three(file: &File, at: u64, into: [&mut [u8]; 3]) -> io::Result<bool> {
    let [a, b, c] = into;
    let wanted = a.len() + b.len() + c.len();
    let read = match (a.is_empty(), c.is_empty()) {
        (true, true) => file.read_at(b, at)?,
        _ => rustix::io::preadv(file, &mut [IoSliceMut::new(a), IoSliceMut::new(b), IoSliceMut::new(c)], at)?,
    };
    if read == wanted {
        return Ok(true);
    }
    // Short: a signal, or the end of a damaged file.
    let (mut at, mut done) = (at, true);
    for part in [a, b, c] {
        done = done && fill(file, at, part)?;
        at += part.len() as u64;
    }
    Ok(done)
}
