//! Whether rows can be copied without waiting for a disk.

use super::pick::{Origin, Pick};
use super::plan::{Cut, Extent, GatherJob, Span};
use crate::dtype::Cast;
use crate::error::Result;
use crate::layout::Layout;
use crate::source::Ready;
use crate::threads::Stop;

/// Whether all of these rows are in the page cache and, if `mapped`, in mapped files. False if that cannot be known, or if a row
/// cannot be read: the gather reports the error.
pub fn are_cached<L: Layout + ?Sized>(origin: &Origin<'_, L>, pick: Pick<'_>, items: usize, mapped: bool) -> bool {
    look(origin, pick, items, mapped).unwrap_or(false)
}

#[expect(clippy::disallowed_methods, reason = "near files open in a moment; far ones do not ask")]
fn look<L: Layout + ?Sized>(origin: &Origin<'_, L>, pick: Pick<'_>, items: usize, mapped: bool) -> Result<bool> {
    let dtype = origin.files.row().dtype;
    let job = GatherJob::new(origin, pick, items, Cast::between(dtype, dtype)?)?;
    let mut entries = job.locate(Span { first: 0, end: items, skip: 0, rows: items as u64 })?;
    if job.decodes {
        return Ok(entries.iter().all(|entry| job.files.is_at_hand(job.file_of(entry))));
    }
    entries.sort_unstable_by_key(|e| e.key);
    let mut rest = &entries[..];
    while !rest.is_empty() {
        let Cut { files, seen, read, done, .. } = job.cut(rest, 0, true, Stop::never())?;
        rest = &rest[done..];
        let ready = |e: &Extent| {
            let source = files[e.file as usize].source();
            [e.src, e.src + u64::from(e.len) - 1].iter().all(|at| source.is_none_or(|s| s.is_ready(*at) == Ready::Yes))
        };
        if (mapped && !read.is_empty()) || !seen.iter().chain(&read).all(ready) {
            return Ok(false);
        }
    }
    Ok(true)
}
