//! Writes pieces of memory to offsets in files.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::disk::{AT_ONCE, on_threads, open_to_write};
use crate::error::{Error, Kind, Result};
use crate::memory::output::Output;
use crate::threads::{Lock, Watch};

/// Bytes per write, at most: large enough for the disk, small enough to balance threads.
const JOB: u64 = 4 << 20;
/// The alignment of direct writes. No disk in use needs a larger one.
const PAGE: u64 = 4096;
/// Files with fewer bytes to write use the cache: opening them twice costs more than it saves.
const DIRECT_FROM: u64 = 64 << 10;

/// A file to write to. It is created if it does not exist; existing content stays.
#[derive(Clone, Debug)]
pub struct Target {
    /// Its path.
    pub path: PathBuf,
    /// Its final size in bytes, at least. Unwritten ranges read as zeros and take no space.
    pub size: u64,
}

/// Bytes of a source, and their destination.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Index of the source.
    pub source: usize,
    /// Offset in the source.
    pub start: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Index of the file.
    pub file: usize,
    /// Offset in the file.
    pub offset: u64,
}

/// A range of one file, and its pieces.
struct WriteJob {
    file: usize,
    from: u64,
    to: u64,
    pieces: std::ops::Range<usize>,
}

/// A file while jobs write to it.
struct Open {
    plain: File,
    direct: Option<File>,
    /// Cleared by the first direct write that fails with EINVAL.
    may_direct: AtomicBool,
}

struct TargetState {
    open: Lock<Option<Arc<Open>>>,
    left: AtomicUsize,
    bytes: u64,
}

/// Writes all pieces. They must not overlap; adjacent pieces of a file are written together.
pub fn write(sources: &[&[u8]], targets: &[Target], pieces: &[Piece], direct: bool, watch: Watch<'_>) -> Result<()> {
    let mut order: Vec<Piece> = pieces.iter().filter(|p| p.bytes > 0).copied().collect();
    order.sort_unstable_by_key(|p| (p.file, p.offset));
    check(sources, targets, &order)?;

    let jobs = jobs_of(&order);
    let slots: Vec<TargetState> =
        targets.iter().map(|_| TargetState { open: Lock::new(None), left: AtomicUsize::new(0), bytes: 0 }).collect();
    let mut slots = slots;
    for job in &jobs {
        *slots[job.file].left.get_mut() += 1;
        slots[job.file].bytes += job.to - job.from;
    }
    let work = |j: usize| -> Result<()> {
        let job = &jobs[j];
        let (slot, target) = (&slots[job.file], &targets[job.file]);
        let open = {
            let mut held = slot.open.lock();
            match &*held {
                Some(open) => Arc::clone(open),
                None => Arc::clone(held.insert(Arc::new(open_target(target, direct && slot.bytes >= DIRECT_FROM)?))),
            }
        };
        do_job(job, &order, sources, &open).map_err(|e| Error::from_io(&e, &target.path, "write"))?;
        if slot.left.fetch_sub(1, Ordering::AcqRel) == 1 {
            slot.open.lock().take();
            grow(&open.plain, target)?;
        }
        Ok(())
    };
    on_threads(jobs.len(), AT_ONCE, &work, watch)?;
    // Files without pieces.
    for (slot, target) in slots.iter().zip(targets).filter(|(s, _)| s.bytes == 0) {
        debug_assert_eq!(slot.left.load(Ordering::Relaxed), 0);
        grow(&open_target(target, false)?.plain, target)?;
    }
    Ok(())
}

fn check(sources: &[&[u8]], targets: &[Target], order: &[Piece]) -> Result<()> {
    let mut before: Option<&Piece> = None;
    for piece in order {
        let source = sources.get(piece.source).map_or(0, |s| s.len() as u64);
        let inside = piece.start.checked_add(piece.bytes).is_some_and(|end| end <= source);
        if !inside || piece.file >= targets.len() || piece.offset.checked_add(piece.bytes).is_none() {
            return Err(Error::new(Kind::Internal, "a piece outside its source or file"));
        }
        if before.is_some_and(|b| b.file == piece.file && b.offset + b.bytes > piece.offset) {
            return Err(Error::new(Kind::Internal, "pieces that overlap").at(&targets[piece.file].path));
        }
        before = Some(piece);
    }
    Ok(())
}

/// Joins adjacent pieces, and cuts at multiples of [`JOB`] so that cuts are aligned.
fn jobs_of(order: &[Piece]) -> Vec<WriteJob> {
    let mut jobs: Vec<WriteJob> = vec![];
    for (i, piece) in order.iter().enumerate() {
        let (mut from, end) = (piece.offset, piece.offset + piece.bytes);
        while from < end {
            let to = end.min((from / JOB + 1) * JOB);
            match jobs.last_mut() {
                Some(last) if last.file == piece.file && last.to == from && !from.is_multiple_of(JOB) => {
                    last.to = to;
                    last.pieces.end = i + 1;
                }
                _ => jobs.push(WriteJob { file: piece.file, from, to, pieces: i..i + 1 }),
            }
            from = to;
        }
    }
    jobs
}

fn open_target(target: &Target, direct: bool) -> Result<Open> {
    let Some(plain) = open_to_write(&target.path, false)? else {
        return Err(Error::new(Kind::Internal, "a plain open that was refused as direct"));
    };
    let direct = if direct { open_to_write(&target.path, true)? } else { None };
    Ok(Open { plain, may_direct: AtomicBool::new(direct.is_some()), direct })
}

fn grow(file: &File, target: &Target) -> Result<()> {
    let failed = |e: &std::io::Error| Error::from_io(e, &target.path, "write");
    if file.metadata().map_err(|e| failed(&e))?.len() < target.size {
        file.set_len(target.size).map_err(|e| failed(&e))?;
    }
    Ok(())
}

fn do_job(job: &WriteJob, order: &[Piece], sources: &[&[u8]], open: &Open) -> std::io::Result<()> {
    // The bytes of the job that come from a piece.
    let part = |p: &Piece| {
        let (from, to) = (job.from.max(p.offset), job.to.min(p.offset + p.bytes));
        let start = (p.start + (from - p.offset)) as usize;
        (from, &sources[p.source][start..start + (to - from) as usize])
    };
    if let [only] = &order[job.pieces.clone()] {
        let (_, bytes) = part(only);
        // Written without a copy if memory and file have the same alignment.
        if (bytes.as_ptr().addr() as u64) % PAGE == job.from % PAGE || open.direct.is_none() {
            return put(open, bytes, job.from);
        }
    }
    let skew = (job.from % PAGE) as usize;
    let len = (job.to - job.from) as usize;
    let mut memory = Output::new((JOB + PAGE) as usize)?;
    let bounce = &mut memory.as_mut()[skew..skew + len];
    for piece in &order[job.pieces.clone()] {
        let (from, bytes) = part(piece);
        let at = (from - job.from) as usize;
        bounce[at..at + bytes.len()].copy_from_slice(bytes);
    }
    put(open, bounce, job.from)
}

/// Writes whole pages directly if memory and file have the same alignment; the rest, or all if that fails, through the cache.
fn put(open: &Open, bytes: &[u8], offset: u64) -> std::io::Result<()> {
    let end = offset + bytes.len() as u64;
    let (first, last) = (offset.next_multiple_of(PAGE), end / PAGE * PAGE);
    let alike = (bytes.as_ptr().addr() as u64) % PAGE == offset % PAGE;
    if let Some(direct) = &open.direct
        && alike
        && first < last
        && open.may_direct.load(Ordering::Relaxed)
    {
        let (a, b) = ((first - offset) as usize, (last - offset) as usize);
        match direct.write_all_at(&bytes[a..b], first) {
            Ok(()) => {
                open.plain.write_all_at(&bytes[..a], offset)?;
                return open.plain.write_all_at(&bytes[b..], last);
            }
            // The disk needs a larger alignment: use the cache from here on.
            Err(error) if error.kind() == std::io::ErrorKind::InvalidInput => {
                open.may_direct.store(false, Ordering::Relaxed);
            }
            Err(error) => return Err(error),
        }
    }
    open.plain.write_all_at(bytes, offset)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// Compares with plain copying in memory, for any pieces in any order, direct or not.
        #[test]
        fn pieces_land_where_they_should(
            lengths in prop::collection::vec((0usize..60_000, 0usize..9000, 0usize..3), 1..40),
            large in prop::option::of(4_000_000usize..9_000_000),
            size in 0u64..200_000,
            direct: bool,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let source: Vec<u8> = (0..10_000_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
            let targets: Vec<Target> = (0..3).map(|i| Target { path: folder.path().join(format!("{i}")), size }).collect();
            let mut ends = [0usize; 3];
            let mut expected = vec![vec![]; 3];
            let mut pieces = vec![];
            let lengths = lengths.into_iter().chain(large.map(|n| (n, 5, 1)));
            for (k, (bytes, gap, file)) in lengths.enumerate() {
                let offset = ends[file] + if k % 3 == 0 { gap } else { 0 };
                ends[file] = offset + bytes;
                let start = (k * 7919) % (source.len() - bytes);
                pieces.push(Piece { source: 0, start: start as u64, bytes: bytes as u64, file, offset: offset as u64 });
                let out: &mut Vec<u8> = &mut expected[file];
                if bytes > 0 {
                    out.resize(offset.max(out.len()), 0);
                    out.extend_from_slice(&source[start..start + bytes]);
                }
            }
            pieces.reverse();
            write(&[&source], &targets, &pieces, direct, &mut || false).unwrap();
            for (target, mut wanted) in targets.iter().zip(expected) {
                wanted.resize(wanted.len().max(size as usize), 0);
                prop_assert!(std::fs::read(&target.path).unwrap() == wanted);
            }
        }
    }

    #[test]
    fn what_a_file_holds_already_stays() {
        let folder = tempfile::tempdir().unwrap();
        let target = Target { path: folder.path().join("a"), size: 0 };
        std::fs::write(&target.path, b"abcdefgh").unwrap();
        let piece = Piece { source: 0, start: 0, bytes: 2, file: 0, offset: 3 };
        write(&[b"XY"], std::slice::from_ref(&target), &[piece], true, &mut || false).unwrap();
        assert_eq!(std::fs::read(&target.path).unwrap(), b"abcXYfgh");
    }

    #[test]
    fn a_folder_that_is_not_there_and_a_full_disk_are_told() {
        let folder = tempfile::tempdir().unwrap();
        let target = Target { path: folder.path().join("none").join("a"), size: 0 };
        let piece = Piece { source: 0, start: 0, bytes: 2, file: 0, offset: 3 };
        let error = write(&[b"XY"], &[target], &[piece], true, &mut || false).unwrap_err();
        assert_eq!(error.kind, Kind::NotFound);
        let full = Target { path: PathBuf::from("/dev/full"), size: 0 };
        let error = write(&[b"XY"], &[full], &[piece], true, &mut || false).unwrap_err();
        assert_eq!(error.kind, Kind::DiskFull);
    }

    #[test]
    fn pieces_that_overlap_are_a_fault_of_ours() {
        let folder = tempfile::tempdir().unwrap();
        let target = Target { path: folder.path().join("a"), size: 0 };
        let piece = |offset| Piece { source: 0, start: 0, bytes: 2, file: 0, offset };
        let error = write(&[b"XY"], &[target], &[piece(3), piece(4)], true, &mut || false).unwrap_err();
        assert_eq!(error.kind, Kind::Internal);
    }
}
