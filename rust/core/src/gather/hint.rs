//! Read-ahead hints for rows that will be gathered soon.

use super::pick::{Origin, Pick};
use super::plan::{Cut, GatherJob, Span};
use crate::dtype::Cast;
use crate::error::Result;
use crate::layout::Layout;
use crate::source::Ready;
use crate::source::queue::Ranged;

/// Starts reading rows into the page cache if a sample of them appears not to be cached. A hint never fails: the gather
/// reports any error in these rows.
pub fn hint<L: Layout + ?Sized>(origin: &Origin<'_, L>, pick: Pick<'_>, items: usize) {
    let _ = try_hint(origin, pick, items);
}

fn try_hint<L: Layout + ?Sized>(origin: &Origin<'_, L>, pick: Pick<'_>, items: usize) -> Result<()> {
    const LOOKS: usize = 8;
    // Decoded files have no byte ranges to hint, and far sources have no page cache.
    if origin.files.decodes() || origin.files.wishes().is_some() {
        return Ok(());
    }
    let dtype = origin.files.row().dtype;
    let job = GatherJob::new(origin, pick, items, Cast::between(dtype, dtype)?)?;
    let each = |span: Span, only_look: bool| -> Result<bool> {
        let mut entries = job.locate(span)?;
        entries.sort_unstable_by_key(|e| e.key);
        let mut rest = &entries[..];
        while !rest.is_empty() {
            let Cut { files, seen, read, done, .. } = job.cut(rest, span.first, true)?;
            rest = &rest[done..];
            for extent in seen.iter().chain(&read) {
                let Some(source) = files[extent.file as usize].source() else { continue };
                if !only_look {
                    source.will_need(&[extent.range()]);
                } else if source.is_ready(extent.src) == Ready::No {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    };
    for first in (0..items).step_by(items.div_ceil(LOOKS).max(1)) {
        if each(Span { first, end: first + 1, skip: 0, rows: 1 }, true)? {
            return each(Span { first: 0, end: items, skip: 0, rows: items as u64 }, false).map(drop);
        }
    }
    Ok(())
}
