//! Gathers from files that must be decoded, such as compressed chunks.
//!
//! Parts of the output would each decode nearly every file of a random request, unless all of them fit in the cache. So
//! all rows are located first, and the parts are cut by file: each file is decoded once per call, for any cache budget
//! and number of threads. Each part owns the rows that its files fill, wherever they are in the output
//! ([`Out::Spread`]). If all files are decoded already, or the others are so few that the threads can keep them, parts
//! are cut by output as for other files.
//!
//! Memory: 16 bytes per row, and 16 bytes per run of output rows from one part, of [`PLANNED_ROWS`] rows; and one decoded file
//! per thread. A larger request is split, and decodes a file once in each part of it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::far::Together;
use super::pick::{NO_OWNER, Out};
use super::plan::{Entry, GatherJob, INLINE_BYTES, PART_BYTES, Span, part_rows};
use crate::error::{Error, Kind, Result};
use crate::files::open::OpenFile;
use crate::layout::Layout;
use crate::threads::{self, Watch};

/// Rows planned together at most.
const PLANNED_ROWS: usize = 1 << 20;
/// The time to decode a byte, relative to the time to copy one. Only balances parts.
const DECODING: u64 = 8;
/// Parts whose files are hinted before they are decoded: some MiB.
const PARTS_AHEAD: usize = 6;

/// The located rows of a span, sorted by file and address.
struct Located {
    span: Span,
    entries: Vec<Entry>,
    /// The files, ascending.
    files: Vec<u64>,
}

/// The files of one part, as numbers `first` to `end - 1`: a file, or the consecutive files over which rows are split.
struct FileGroup {
    first: u64,
    end: u64,
    part: u32,
}

/// The parts of a request.
struct PartsByFile {
    /// Ascending.
    groups: Vec<FileGroup>,
    /// Number of parts whose files are decoded already. They are the first.
    decoded: usize,
    parts: usize,
}

/// Fills `out` with the rows of a job.
pub fn gather<L: Layout + ?Sized>(job: &GatherJob<'_, L>, items: usize, out: Out<'_>, watch: Watch<'_>) -> Result<()> {
    for (span, out) in job.parts(items, PLANNED_ROWS, out)? {
        gather_planned(job, span, out, &mut *watch)?;
    }
    Ok(())
}

fn gather_planned<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    whole: Span,
    out: Out<'_>,
    watch: Watch<'_>,
) -> Result<()> {
    let spans = job.spans(whole, part_rows(out.bytes(), job.out_row()))?;
    let located = threads::map_each(spans, &|_, span, _| locate(job, span), &mut *watch)?;
    let mut files: Vec<u64> = located.iter().flat_map(|some| &some.files).copied().collect();
    files.sort();
    files.dedup();
    let mut open = HashMap::new();
    let mut lacking = vec![];
    for file in &files {
        match job.files.decoded(*file) {
            // Not kept together with files that are decoded now: the budget would be used twice.
            Some(decoded) if lacking.is_empty() => drop(open.insert(*file, decoded)),
            Some(_) => {}
            None => lacking.push(*file),
        }
    }
    if files.len() > threads::num_threads() && !lacking.is_empty() {
        drop(open);
        return gather_by_file(job, whole, &located, &files, &lacking, out, watch);
    }
    let made = job.files.open_many(&lacking, &mut *watch)?;
    open.extend(lacking.into_iter().zip(made));
    gather_by_output(job, located, open, out, watch)
}

fn locate<L: Layout + ?Sized>(job: &GatherJob<'_, L>, span: Span) -> Result<Located> {
    let mut entries = job.locate(span)?;
    if !entries.is_sorted_by_key(|e| e.key) {
        entries.sort_unstable_by_key(|e| e.key);
    }
    let runs = entries.chunk_by(|a, b| job.file_of(a) == job.file_of(b));
    let files = runs.map(|run| job.file_of(&run[0])).collect();
    Ok(Located { span, entries, files })
}

/// All files are open.
fn gather_by_output<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    located: Vec<Located>,
    open: HashMap<u64, Arc<OpenFile>>,
    out: Out<'_>,
    watch: Watch<'_>,
) -> Result<()> {
    let files = Together { files: job.files, open };
    let job = GatherJob { files: &files, only: job.only.clone(), opened: true, ..*job };
    let shares = job.shares(located.iter().map(|some| some.span).collect(), out)?;
    let copy = |some: &Located, mut out: Out<'_>, stop: &threads::Stop| {
        job.run_entries(&some.entries, some.span.first, &mut out, stop)
    };
    let parts = shares.into_iter().zip(&located);
    threads::for_each(parts, &|_, ((_, out), some), stop| copy(some, out, stop), watch)
}

fn gather_by_file<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    whole: Span,
    located: &[Located],
    files: &[u64],
    lacking: &[u64],
    out: Out<'_>,
    watch: Watch<'_>,
) -> Result<()> {
    let rows = out.bytes() / job.out_row();
    let PartsByFile { groups, decoded, parts } = cut_files(job, located, files, lacking);
    let mut owners = vec![NO_OWNER; rows];
    let mut begin = 0;
    for some in located {
        let mut group = groups.iter().peekable();
        for run in some.entries.chunk_by(|a, b| job.file_of(a) == job.file_of(b)) {
            let file = job.file_of(&run[0]);
            while group.next_if(|group| group.end <= file).is_some() {}
            let owner = group.peek().map_or(NO_OWNER, |group| group.part);
            for entry in run {
                let first = begin + entry.dst as usize;
                owners[first..first + entry.rows as usize].fill(owner);
            }
        }
        begin += some.span.rows as usize;
    }
    let outs = out.deal(&mut owners, parts, job.out_row());
    let outs =
        outs.ok_or_else(|| Error::new(Kind::Argument, "the output does not have the size of the requested rows"))?;
    let mut ranges: Vec<Vec<Range<u64>>> = (0..parts).map(|_| vec![]).collect();
    for group in groups {
        ranges[group.part as usize].push(group.first..group.end);
    }
    // Each part hints the files of a later one, so that a cold disk always has reads to do.
    let ahead: Vec<Vec<u64>> = ranges[decoded..].iter().map(|ranges| files_in(files, ranges)).collect();
    ahead.iter().take(PARTS_AHEAD).for_each(|files| job.files.will_need(files));
    let work = |part: Option<usize>, (ranges, mut out): (Vec<Range<u64>>, Out<'_>), stop: &threads::Stop| {
        if let Some(later) = part.and_then(|part| ahead.get(part + PARTS_AHEAD)) {
            job.files.will_need(later);
        }
        let mut entries = vec![];
        for range in ranges {
            take_entries(job, located, &range, &mut entries);
        }
        job.run_entries(&entries, whole.first, &mut out, stop)
    };
    // Decoded files first, before the cache evicts them for others.
    let mut others: Vec<_> = ranges.into_iter().zip(outs).collect();
    let first: Vec<_> = others.drain(..decoded).collect();
    threads::for_each(first, &|_, part, stop| work(None, part, stop), &mut *watch)?;
    threads::for_each(others, &|number, part, stop| work(Some(number), part, stop), watch)
}

/// The files of sorted `files` that are in these ranges, in the order of the ranges.
fn files_in(files: &[u64], ranges: &[Range<u64>]) -> Vec<u64> {
    let within = |range: &Range<u64>| {
        &files[files.partition_point(|file| *file < range.start)..files.partition_point(|file| *file < range.end)]
    };
    ranges.iter().flat_map(within).copied().collect()
}

/// Appends the entries of some files, in order, with their rows in the whole output.
fn take_entries<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    located: &[Located],
    files: &Range<u64>,
    entries: &mut Vec<Entry>,
) {
    let before = entries.len();
    let mut begin = 0;
    for Located { span, entries: some, .. } in located {
        let from = some.partition_point(|e| job.file_of(e) < files.start);
        let mine = some[from..].iter().take_while(|e| job.file_of(e) < files.end);
        entries.extend(mine.map(|e| Entry { dst: begin + e.dst, ..*e }));
        begin += span.rows as u32;
    }
    entries[before..].sort_unstable_by_key(|e| e.key);
}

/// Cuts the files into parts of about equal cost.
fn cut_files<L: Layout + ?Sized>(
    job: &GatherJob<'_, L>,
    located: &[Located],
    files: &[u64],
    lacking: &[u64],
) -> PartsByFile {
    let mut wanted: HashMap<u64, u64> = HashMap::new();
    for some in located {
        for run in some.entries.chunk_by(|a, b| job.file_of(a) == job.file_of(b)) {
            *wanted.entry(job.file_of(&run[0])).or_default() += run.iter().map(|e| u64::from(e.rows)).sum::<u64>();
        }
    }
    // Each group with its cost.
    let (mut decoded, mut others) = (vec![], vec![]);
    let mut lacking = lacking.iter().copied().peekable();
    let mut rest = files;
    while let Some(first) = rest.first().copied() {
        let end = first + job.files.split(first).max(1);
        let (group, after) = rest.split_at(rest.partition_point(|file| *file < end));
        rest = after;
        let mut cost = 0u64;
        let mut is_decoded = true;
        for file in group {
            cost = cost.saturating_add(wanted.get(file).copied().unwrap_or(0) * job.out_row() as u64);
            if lacking.next_if_eq(file).is_some() {
                cost = cost.saturating_add(job.files.decoded_bytes(*file).saturating_mul(DECODING));
                is_decoded = false;
            }
        }
        let some = if is_decoded { &mut decoded } else { &mut others };
        some.push((FileGroup { first, end, part: 0 }, cost));
    }
    let (mut groups, mut parts, mut of_decoded) = (Vec::with_capacity(files.len()), 0, 0);
    for some in [decoded, others] {
        of_decoded = parts;
        let total = some.iter().fold(0u64, |sum, (_, cost)| sum.saturating_add(*cost));
        let each = total / (threads::num_threads() as u64 * 4);
        let each = each.clamp(INLINE_BYTES as u64 / 2, PART_BYTES as u64);
        let mut filled = each;
        for (mut group, cost) in some {
            if filled >= each {
                (parts, filled) = (parts + 1, 0);
            }
            filled = filled.saturating_add(cost);
            group.part = parts - 1;
            groups.push(group);
        }
    }
    groups.sort_unstable_by_key(|group| group.first);
    PartsByFile { groups, decoded: of_decoded as usize, parts: parts as usize }
}
