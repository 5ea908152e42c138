//! The entry point of a gather.

use super::pick::{Origin, Out, Pick};
use super::plan::{GatherJob, part_rows};
use super::{by_file, far};
use crate::dtype::Cast;
use crate::error::Result;
use crate::kernels::should_stream;
use crate::layout::Layout;
use crate::threads::{self, Watch};

/// Fills `out` with the `items` picked rows (or, for [`Pick::Whole`], examples). `out` has exactly the size of those rows in
/// the target type of `cast`.
///
/// Errors: an index out of range, a file that is missing, too short or changed, a row outside its file. `out` is then
/// partly written.
pub fn gather<L: Layout + ?Sized>(
    origin: &Origin<'_, L>,
    pick: Pick<'_>,
    items: usize,
    cast: Cast<'_>,
    out: Out<'_>,
    watch: Watch<'_>,
) -> Result<()> {
    let mut job = GatherJob::new(origin, pick, items, cast)?;
    if let Some(wishes) = origin.files.wishes() {
        return far::gather(&job, items, out, &wishes, watch);
    }
    if items == 1 && !matches!(pick, Pick::Whole { .. }) && job.only.end == u64::MAX {
        return job.one_row(out, watch);
    }
    job.streams = should_stream(out.bytes(), job.out_row());
    if job.decodes {
        return by_file::gather(&job, items, out, watch);
    }
    let most = part_rows(out.bytes(), job.out_row());
    let parts = job.parts(items, most, out)?;
    threads::for_each(parts, &|_, (span, mut out), stop| job.run_part(span, &mut out, stop), watch)
}
