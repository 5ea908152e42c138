//! Reads from slow sources, which are fastest with few large requests.
//!
//! The whole request is planned before the first read. All files are opened together, and rows are sorted by file and
//! address. Rows closer than the sources' gap are read together, up to the sources' largest request, with the sources'
//! number of reads in flight. The rows of each read are copied or cast to their places as it arrives.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::pick::Out;
use super::plan::{Cut, Extent, GatherJob};
use crate::error::{Error, Kind, Result};
use crate::files::Files;
use crate::files::open::OpenFile;
use crate::layout::Layout;
use crate::layout::row::Row;
use crate::memory::zeroed;
use crate::source::{RangeRead, Wishes};
use crate::threads::{self, Stop, Watch};

/// One read of a source, and the extents that it covers.
struct Request {
    file: usize,
    at: u64,
    len: u64,
    extents: Range<usize>,
}

/// Files that were opened together.
struct Together<'a> {
    files: &'a dyn Files,
    open: HashMap<u64, Arc<OpenFile>>,
}

impl Files for Together<'_> {
    fn row(&self) -> Row {
        self.files.row()
    }

    fn get(&self, file: u64) -> Result<Arc<OpenFile>> {
        self.open.get(&file).cloned().map_or_else(|| self.files.get(file), Ok)
    }
}

/// Fills `out` with the rows of a job.
pub fn gather<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    items: usize,
    mut out: Out<'_>,
    wishes: &Wishes,
    watch: Watch<'_>,
) -> Result<()> {
    let whole = job.parts(items, usize::MAX, out.reborrow())?;
    let Some((span, _)) = whole.into_iter().next() else { return Ok(()) };
    let mut entries = job.locate(span)?;
    entries.sort_unstable_by_key(|e| e.key);
    let mut numbers: Vec<u64> = entries.iter().map(|e| job.file_of(e)).collect();
    numbers.dedup();
    if watch() {
        return Err(threads::interrupted());
    }
    let open = job.files.open_many(&numbers)?;
    let files = Together { files: job.files, open: numbers.into_iter().zip(open).collect() };
    let job = GatherJob { files: &files, only: job.only.clone(), opened: true, ..*job };
    let mut rest = &entries[..];
    while !rest.is_empty() {
        // Row by row: an extent then lies in one row of the output.
        let Cut { files, seen, read, filled, done } = job.cut(rest, span.first, false)?;
        rest = &rest[done..];
        for extent in &filled {
            job.fill(&files[extent.file as usize], job.target(extent, &mut out));
        }
        job.copy_seen(&files, &seen, &mut out, &Stop::default())?;
        let mut read = read;
        read.sort_unstable_by_key(|e| (e.file, e.src));
        fetch(&job, &files, &read, out.reborrow(), wishes, &mut *watch)?;
    }
    Ok(())
}

/// Merges extents, sorted by source and offset, into requests.
fn requests(extents: &[Extent], wishes: &Wishes) -> Vec<Request> {
    let mut made: Vec<Request> = vec![];
    for (i, extent) in extents.iter().enumerate() {
        let (file, end) = (extent.file as usize, extent.src + u64::from(extent.len));
        match made.last_mut() {
            Some(last)
                if last.file == file
                    && extent.src <= (last.at + last.len).saturating_add(wishes.gap)
                    && end.saturating_sub(last.at) <= wishes.largest =>
            {
                last.len = last.len.max(end - last.at);
                last.extents.end = i + 1;
            }
            _ => made.push(Request { file, at: extent.src, len: u64::from(extent.len), extents: i..i + 1 }),
        }
    }
    made
}

fn fetch<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    files: &[Arc<OpenFile>],
    extents: &[Extent],
    out: Out<'_>,
    wishes: &Wishes,
    watch: Watch<'_>,
) -> Result<()> {
    // The output range of each extent, in the order of the extents.
    let len_of = |e: &Extent| e.len as usize / job.cast.from_size * job.cast.to_size;
    let mut by_place: Vec<usize> = (0..extents.len()).collect();
    by_place.sort_unstable_by_key(|i| extents[*i].dst);
    let ranges: Vec<(usize, usize)> = by_place.iter().map(|i| (extents[*i].dst, len_of(&extents[*i]))).collect();
    let overlap = || Error::new(Kind::Internal, "rows that share a place in the output");
    let mut places: Vec<(usize, &mut [u8])> =
        by_place.into_iter().zip(out.ranges(&ranges, job.out_row()).ok_or_else(overlap)?).collect();
    places.sort_unstable_by_key(|(i, _)| *i);
    let mut places = places.into_iter().map(|(_, place)| place);
    let requests = requests(extents, wishes);
    let owned =
        requests.iter().map(|request| (request, places.by_ref().take(request.extents.len()).collect::<Vec<_>>()));
    let one = |_: usize, (request, places): (&Request, Vec<&mut [u8]>), stop: &Stop| {
        let open = &files[request.file];
        let Some(source) = open.source() else {
            return Err(Error::new(Kind::Internal, "a file that is not open").at(open.location()));
        };
        let mut block = zeroed::<u8>(request.len as usize)?;
        source.read_many(&mut [RangeRead { at: request.at, into: &mut block }], stop)?;
        if stop.is_set() {
            return Ok(());
        }
        let cast = job.cast.swapped_if(open.place().swapped);
        for (extent, place) in extents[request.extents.clone()].iter().zip(places) {
            let from = (extent.src - request.at) as usize;
            cast.apply(&block[from..from + extent.len as usize], place);
        }
        Ok(())
    };
    threads::for_each_waiting(owned, wishes.parallel, &one, watch)
}
