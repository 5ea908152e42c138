//! The budget of a cache folder: units in use, in the file `lock`, under a lock on its first byte.
//!
//! The file contains `magic, units, boot, check`, u64 each. A process that changes the cache clears the file first and
//! writes it last. If the file does not match its check (a process was killed meanwhile, or the file is damaged) or is
//! older than the boot, the units are recounted from the heads of all objects.

use std::fs::File;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::path::Path;
use std::time::{Duration, Instant};

use super::folder::{Folder, Hand};
use super::geometry::{BLOCK, CLOCK, Geometry, HEAD, SECTOR, decode_head, encode_head};
use super::key::{ObjectKey, geometry_of};
use super::object::{CachedObject, erase, fill};
use super::system::{ByteLocks, open_rw};
use crate::threads::{Stop, is_abandoned};

/// Bytes of the file.
const LEN: u64 = 32;
const MAGIC: u64 = 0x3165_6863_6163_7361;
/// Part of the limit that is freed at once.
const SLACK: u64 = 256;
/// Maximum number of passes over all objects for one request: the first one clears clocks, and may begin in the middle.
const PASSES: usize = 3;

/// The budget, locked. If it is dropped without [`Books::close`], the next user recounts it.
#[derive(Debug)]
pub struct Books<'a> {
    folder: &'a Folder,
    lock: ByteLocks,
    used: u64,
    /// A head was damaged.
    doubt: bool,
}

/// The answer to a request for room.
#[derive(Debug, PartialEq, Eq)]
pub enum Granted {
    /// The object's files were removed.
    Gone,
    /// Room for the first blocks of the request.
    First(usize),
}

/// An object's files, opened by path.
struct VisitedObject {
    geometry: Geometry,
    state: File,
    locks: ByteLocks,
    heads: Vec<u8>,
}

impl VisitedObject {
    fn open(folder: &Folder, name: &str, doubt: &mut bool) -> io::Result<Option<VisitedObject>> {
        let Some(geometry) = geometry_of(name) else { return Ok(None) };
        let path = folder.object(name);
        let open = || Ok((open_rw(&path.join("state"), false)?, ByteLocks::open(&path.join("data"))?));
        let (state, locks) = match open() {
            // A process was killed while it made or removed them, or a user removed some.
            Err(error) if io::Error::kind(&error) == io::ErrorKind::NotFound => {
                *doubt = true;
                remove(&path)?;
                return Ok(None);
            }
            other => other?,
        };
        let mut heads = vec![0; (geometry.blocks() * HEAD) as usize];
        fill(&state, 0, &mut heads)?;
        Ok(Some(VisitedObject { geometry, state, locks, heads }))
    }

    fn head(&self, block: u64) -> &[u8] {
        &self.heads[(block * HEAD) as usize..][..HEAD as usize]
    }

    /// Removes a block, unless a download is filling it; returns whether it did.
    fn erase(&mut self, block: u64) -> io::Result<bool> {
        if !self.locks.try_lock(block)? {
            return Ok(false);
        }
        erase(self.geometry, &self.state, self.locks.file(), block)?;
        self.locks.unlock(block)?;
        self.heads[(block * HEAD) as usize..][..HEAD as usize].fill(0);
        Ok(true)
    }

    /// Units of its blocks, after repairing damage of the heads.
    fn count(&mut self) -> io::Result<u64> {
        let geometry = self.geometry;
        let mut sum = 0;
        for block in 0..geometry.blocks() {
            match decode_head(block, self.head(block)) {
                Some(units) => sum += units.min(geometry.most_units(block)),
                None if self.erase(block)? => {}
                None => {
                    self.state.write_all_at(&encode_head(block, geometry.most_units(block)), block * HEAD)?;
                    sum += geometry.most_units(block);
                }
            }
        }
        let allocated = (self.locks.file().metadata()?.blocks() + self.state.metadata()?.blocks()) * 512 / SECTOR;
        if allocated > sum + geometry.object_units() {
            for block in 0..geometry.blocks() {
                if decode_head(block, self.head(block)) == Some(0) {
                    self.erase(block)?;
                }
            }
        }
        Ok(sum)
    }
}

fn remove(path: &Path) -> io::Result<()> {
    for name in ["data", "state", "url"] {
        ignore_missing(std::fs::remove_file(path.join(name)))?;
    }
    ignore_missing(std::fs::remove_dir(path))
}

fn ignore_missing(done: io::Result<()>) -> io::Result<()> {
    done.or_else(|error| if error.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(error) })
}

fn check(used: u64, boot: u64) -> u64 {
    (used ^ MAGIC).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29) ^ boot.wrapping_mul(0xD6E8_FEB8_6659_FD93)
}

impl<'a> Books<'a> {
    /// Locks the budget; `WouldBlock` if others hold it for too long, or once `stop` is set.
    pub fn open(folder: &'a Folder, stop: &Stop) -> io::Result<Books<'a>> {
        open_rw(&folder.lock(), true)?;
        let lock = ByteLocks::open(&folder.lock())?;
        let (began, patience, mut pause) = (Instant::now(), folder.lock_patience(), 20);
        while !lock.try_lock(0)? {
            if stop.is_set() || is_abandoned() {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            if began.elapsed() >= patience {
                folder.waited_for_lock(true);
                return Err(io::ErrorKind::WouldBlock.into());
            }
            std::thread::sleep(Duration::from_micros(pause));
            pause = (pause * 2).min(2_000);
        }
        folder.waited_for_lock(false);
        let mut books = Books { folder, lock, used: 0, doubt: false };
        let known = books.sealed()?;
        books.lock.file().write_all_at(&[0; LEN as usize], 0)?;
        match known {
            Some(used) => books.used = used,
            None => {
                books.lock.file().set_len(LEN)?;
                books.count()?;
            }
        }
        Ok(books)
    }

    /// Units in use, if the file is valid. A longer file is not: its other bytes would be on the disk and never counted.
    fn sealed(&self) -> io::Result<Option<u64>> {
        if self.lock.file().metadata()?.len() != LEN {
            return Ok(None);
        }
        let mut bytes = [0; LEN as usize];
        fill(self.lock.file(), 0, &mut bytes)?;
        let [magic, used, boot, sum]: [u64; 4] = bytemuck::pod_read_unaligned(&bytes);
        Ok((magic == MAGIC && boot == self.folder.boot && sum == check(used, boot)).then_some(used))
    }

    /// Writes the budget and releases it.
    pub fn close(mut self) -> io::Result<()> {
        if self.doubt {
            self.count()?;
        }
        let words = [MAGIC, self.used, self.folder.boot, check(self.used, self.folder.boot)];
        self.lock.file().write_all_at(bytemuck::bytes_of(&words), 0)
    }

    /// Bytes in use.
    pub fn bytes(&self) -> u64 {
        self.used * SECTOR
    }

    /// Counts all objects.
    fn count(&mut self) -> io::Result<()> {
        (self.used, self.doubt) = (0, false);
        for name in self.folder.names()? {
            if let Some(mut found) = VisitedObject::open(self.folder, &name, &mut false)? {
                self.used += found.geometry.object_units() + found.count()?;
            }
        }
        Ok(())
    }

    /// Makes an object's files, if they are missing; false if there is no room.
    pub fn create(&mut self, key: &ObjectKey) -> io::Result<bool> {
        let path = self.folder.object(&key.name);
        if !path.join("state").exists() || !path.join("data").exists() {
            remove(&path)?;
            let units = key.geometry.object_units();
            if !self.make_room(units, None)? {
                return Ok(false);
            }
            self.used += units;
            std::fs::DirBuilder::new().mode(0o700).recursive(true).create(&path)?;
            open_rw(&path.join("url"), true)?.write_all_at(key.url.as_bytes(), 0)?;
            open_rw(&path.join("data"), true)?.set_len(key.geometry.size)?;
            open_rw(&path.join("state"), true)?.set_len(key.geometry.state_len())?;
        }
        Ok(true)
    }

    /// Counts units for blocks whose locks the caller holds, in order, while there is room.
    pub fn reserve(&mut self, key: &ObjectKey, object: &CachedObject, wanted: &[(u64, u64)]) -> io::Result<Granted> {
        if object.is_gone()? {
            return Ok(Granted::Gone);
        }
        for (n, &(block, units)) in wanted.iter().enumerate() {
            let most = key.geometry.most_units(block);
            let counted = decode_head(block, &object.head(block)?);
            self.doubt |= counted.is_none();
            let counted = counted.unwrap_or(most).min(most);
            let grown = key.geometry.grown(block, counted, units);
            if !self.make_room(grown - counted, Some(&key.name))? {
                return Ok(Granted::First(n));
            }
            self.used += grown - counted;
            object.set_head(block, encode_head(block, grown))?;
        }
        Ok(Granted::First(wanted.len()))
    }

    /// Evicts until `units` fit. Objects other than `keep` are removed when they are empty.
    fn make_room(&mut self, units: u64, keep: Option<&str>) -> io::Result<bool> {
        let limit = self.folder.limit_units();
        if self.used + units <= limit {
            return Ok(true);
        }
        if units <= limit {
            self.evict((self.used + units - limit).max(limit / SLACK), PASSES, keep)?;
        }
        if self.used + units > limit {
            // All blocks are locked, or damaged heads hide some.
            self.count()?;
            self.evict((self.used + units).saturating_sub(limit), PASSES, keep)?;
        }
        Ok(self.used + units <= limit)
    }

    /// Evicts blocks until the limit is met: it may be lower than that of the last process.
    pub fn shrink(&mut self) -> io::Result<()> {
        self.make_room(0, None).map(drop)
    }

    /// Evicts every block that is not being filled.
    pub fn clear(&mut self) -> io::Result<()> {
        self.evict(u64::MAX, PASSES, None)
    }

    fn evict(&mut self, wanted: u64, passes: usize, keep: Option<&str>) -> io::Result<()> {
        let mut spare = Hand::default();
        let folder = self.folder;
        let mut kept = folder.hand.lock_briefly();
        let hand = kept.as_deref_mut().unwrap_or(&mut spare);
        let (mut freed, mut begun) = (0, 0);
        while freed < wanted {
            if hand.at >= hand.names.len() {
                begun += 1;
                let names = folder.names()?;
                if begun > passes || names.is_empty() {
                    break;
                }
                *hand = Hand { names, ..Hand::default() };
            }
            let name = hand.names[hand.at].clone();
            if let Some(mut found) = VisitedObject::open(folder, &name, &mut self.doubt)? {
                freed += self.evict_blocks(&mut found, &mut hand.block, wanted.saturating_sub(freed))?;
                if hand.block < found.geometry.blocks() {
                    continue;
                }
                let empty = (0..hand.block).all(|block| decode_head(block, found.head(block)) == Some(0));
                if empty && keep != Some(name.as_str()) {
                    remove(&folder.object(&name))?;
                    freed += found.geometry.object_units();
                }
            }
            (hand.at, hand.block) = (hand.at + 1, 0);
        }
        self.used = self.used.saturating_sub(freed);
        Ok(())
    }

    /// Moves the hand over an object's blocks until enough is freed.
    fn evict_blocks(&mut self, found: &mut VisitedObject, hand: &mut u64, wanted: u64) -> io::Result<u64> {
        let mut freed = 0;
        while *hand < found.geometry.blocks() && freed < wanted {
            let block = *hand;
            *hand += 1;
            let counted = decode_head(block, found.head(block));
            self.doubt |= counted.is_none();
            if counted == Some(0) {
                continue;
            }
            if found.head(block)[CLOCK as usize] != 0 {
                found.heads[(block * HEAD + CLOCK) as usize] = 0;
                found.state.write_all_at(&[0], block * HEAD + CLOCK)?;
            } else if found.erase(block)? {
                freed += counted.unwrap_or(0).min(found.geometry.most_units(block));
            }
        }
        Ok(freed)
    }
}

/// The minimum limit, in blocks; below it, nothing can be cached.
pub const LEAST_BLOCKS: u64 = 4;
/// The minimum limit, in bytes.
pub const LEAST: u64 = LEAST_BLOCKS * BLOCK;
