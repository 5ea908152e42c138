//! Reads from slow sources, which are fastest with few large requests.
//!
//! A request is planned before its first read: all files are opened together, rows are sorted by file and address, and
//! their ranges are read by [`fetch`]. The rows of each read are copied or cast to their places as it arrives.
//!
//! Memory in addition to the output: about 100 bytes per row of [`PLANNED_ROWS`], [`MOST_FILES`] open files, and twice
//! [`SCRATCH`] for bytes in flight and decoded files. A request that needs more is split into several, one after another.

use std::collections::HashMap;
use std::sync::Arc;

use super::pick::Out;
use super::plan::{Cut, Entry, Extent, GatherJob};
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::OpenFile;
use crate::layout::Layout;
use crate::layout::row::Row;
use crate::source::fetch::{Delivery, SCRATCH, WantedRange, deliver};
use crate::source::{self, Source, Wishes};
use crate::threads::{self, Stop, Watch};

/// Maximum number of rows planned together.
const PLANNED_ROWS: usize = 1 << 19;
/// Maximum number of files open together.
const MOST_FILES: usize = 1 << 14;

/// Files opened together.
pub struct Together<'a> {
    pub files: &'a dyn Files,
    pub open: HashMap<u64, Arc<OpenFile>>,
}

impl Files for Together<'_> {
    fn row(&self) -> Row {
        self.files.row()
    }

    fn get(&self, file: u64, stop: &Stop) -> Result<Arc<OpenFile>> {
        self.open.get(&file).cloned().map_or_else(|| self.files.get(file, stop), Ok)
    }
}

/// Fills `out` with the rows of a job.
pub fn gather<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    items: usize,
    out: Out<'_>,
    wishes: &Wishes,
    watch: Watch<'_>,
) -> Result<()> {
    for (span, mut out) in job.parts(items, PLANNED_ROWS, out)? {
        let mut entries = job.locate(span)?;
        entries.sort_unstable_by_key(|e| e.key);
        let mut rest = &entries[..];
        while !rest.is_empty() {
            if watch() {
                return Err(threads::interrupted());
            }
            let (wave, files) = wave(job, rest);
            rest = &rest[wave.len()..];
            gather_wave(job, wave, files, span.first, out.reborrow(), wishes, &mut *watch)?;
        }
    }
    Ok(())
}

/// The longest prefix of the sorted entries whose files can be held together, and those files.
fn wave<'e, L: Layout + ?Sized>(job: &GatherJob<'_, L>, entries: &'e [Entry]) -> (&'e [Entry], Vec<u64>) {
    let (mut files, mut taken, mut decoded): (Vec<u64>, usize, u64) = (vec![], 0, 0);
    for run in entries.chunk_by(|a, b| job.file_of(a) == job.file_of(b)) {
        let file = job.file_of(&run[0]);
        decoded = decoded.saturating_add(job.files.decoded_bytes(file));
        if !files.is_empty() && (files.len() >= MOST_FILES || decoded > SCRATCH) {
            break;
        }
        files.push(file);
        taken += run.len();
    }
    (&entries[..taken], files)
}

#[expect(clippy::disallowed_methods, reason = "the files are open, and decoded bytes of a wave are copied in a moment")]
fn gather_wave<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    entries: &[Entry],
    numbers: Vec<u64>,
    first: usize,
    mut out: Out<'_>,
    wishes: &Wishes,
    watch: Watch<'_>,
) -> Result<()> {
    let open = job.files.open_many(&numbers, &mut *watch)?;
    let files = Together { files: job.files, open: numbers.into_iter().zip(open).collect() };
    let job = GatherJob { files: &files, only: job.only.clone(), opened: true, ..*job };
    let mut rest = entries;
    while !rest.is_empty() {
        let Cut { files, seen, read, filled, done } = job.cut(rest, first, out.is_dense(), Stop::never())?;
        rest = &rest[done..];
        for extent in &filled {
            job.fill(&files[extent.file as usize], job.target(extent, &mut out));
        }
        job.copy_seen(&files, &seen, &mut out, Stop::never())?;
        copy_read(&job, &files, read, out.reborrow(), wishes, &mut *watch)?;
    }
    Ok(())
}

/// The destination of an extent's bytes.
struct ExtentPlace<'a> {
    /// Whether the bytes are copied to the output unchanged.
    as_is: bool,
    swapped: bool,
    bytes: &'a mut [u8],
}

impl ExtentPlace<'_> {
    fn direct(&mut self) -> Option<&mut [u8]> {
        self.as_is.then_some(&mut *self.bytes)
    }
}

fn copy_read<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    files: &[Arc<OpenFile>],
    mut extents: Vec<Extent>,
    out: Out<'_>,
    wishes: &Wishes,
    watch: Watch<'_>,
) -> Result<()> {
    let swapped = |extent: &Extent| files[extent.file as usize].place().swapped;
    let as_is = |extent: &Extent| job.cast.convert.is_none() && !swapped(extent);
    extents.sort_unstable_by_key(|extent| extent.dst);
    if out.is_dense() {
        join(&mut extents, wishes.largest, as_is);
    }
    let len_of = |e: &Extent| e.len as usize / job.cast.from_size * job.cast.to_size;
    let ranges: Vec<(usize, usize)> = extents.iter().map(|extent| (extent.dst, len_of(extent))).collect();
    let overlap = || Error::new(Kind::Internal, "two rows have the same place in the output");
    let places = out.ranges(&ranges, job.out_row()).ok_or_else(overlap)?;
    let wanted = extents.iter().zip(places).map(|(extent, bytes)| {
        let range = source::ByteRange { at: extent.src, len: u64::from(extent.len) };
        let to = ExtentPlace { as_is: as_is(extent), swapped: swapped(extent), bytes };
        WantedRange { source: extent.file as usize, range, to }
    });
    let sources: Vec<Option<&dyn Source>> = files.iter().map(|file| file.source()).collect();
    let each = |to: ExtentPlace<'_>, bytes: &[u8]| {
        job.cast.swapped_if(to.swapped).apply(bytes, to.bytes);
        Ok(())
    };
    deliver(&sources, wanted.collect(), wishes, &Delivery { each: &each, place: ExtentPlace::direct }, watch)
}

/// Joins neighbours in both the file and the output that are copied as they are, up to `most` bytes.
fn join(extents: &mut Vec<Extent>, most: u64, as_is: impl Fn(&Extent) -> bool) {
    extents.dedup_by(|next, last| {
        let len = u64::from(last.len) + u64::from(next.len);
        let follows = next.file == last.file
            && next.src == last.src + u64::from(last.len)
            && next.dst == last.dst + last.len as usize
            && len <= most.min(u64::from(u32::MAX))
            && as_is(last);
        if follows {
            last.len = len as u32;
        }
        follows
    });
}
