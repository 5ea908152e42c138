//! Whether rows can be copied without waiting for a disk.

use super::pick::{Origin, Pick};
use super::plan::{Cut, GatherJob, Span};
use crate::dtype::Cast;
use crate::error::Result;
use crate::layout::Layout;
use crate::source::Ready;

/// Whether all of these rows are in the page cache and mapped. False if that cannot be known, or if a row cannot be read: the
/// gather reports the error.
pub fn are_mapped_and_cached<L: Layout + ?Sized>(origin: &Origin<'_, L>, pick: Pick<'_>, items: usize) -> bool {
    look(origin, pick, items).unwrap_or(false)
}

fn look<L: Layout + ?Sized>(origin: &Origin<'_, L>, pick: Pick<'_>, items: usize) -> Result<bool> {
    let dtype = origin.files.row().dtype;
    let job = GatherJob::new(origin, pick, items, Cast::between(dtype, dtype)?)?;
    let mut entries = job.locate(Span { first: 0, end: items, skip: 0, rows: items as u64 })?;
    entries.sort_unstable_by_key(|e| e.key);
    let mut rest = &entries[..];
    while !rest.is_empty() {
        let Cut { files, seen, read, done, .. } = job.cut(rest, 0, true)?;
        rest = &rest[done..];
        let is_cached =
            |at: u64, file: u32| files[file as usize].source().is_none_or(|source| source.is_ready(at) == Ready::Yes);
        let cached =
            |e: &super::plan::Extent| is_cached(e.src, e.file) && is_cached(e.src + u64::from(e.len) - 1, e.file);
        if !read.is_empty() || !seen.iter().all(cached) {
            return Ok(false);
        }
    }
    Ok(true)
}
