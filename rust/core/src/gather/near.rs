//! Copies from fast files: local, or decoded into memory.

use std::sync::Arc;
use std::time::Instant;

use super::pick::{Out, Pick};
use super::plan::{Cut, EXTENT, Entry, Extent, GatherJob, Span};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::files::open::{Body, OpenFile};
use crate::kernels::{self, Stores, prefetch};
use crate::layout::Layout;
use crate::source::queue::read_all;
use crate::source::scout::{BLOCK, Scout};
use crate::source::warmth::Way;
use crate::source::{self, RangeRead, Ready, Source};
use crate::threads::{Stop, Watch};

fn sources_of(files: &[Arc<OpenFile>]) -> Vec<Option<&dyn Source>> {
    files.iter().map(|file| file.source()).collect()
}

impl<L: Layout + ?Sized> GatherJob<'_, L> {
    /// Reads a single row without the planning: users call this a million times in a loop.
    #[expect(clippy::disallowed_methods, reason = "one row of a near file takes a moment")]
    pub fn one_row(&self, mut whole: Out<'_>, watch: Watch<'_>) -> Result<()> {
        let group = self.group(0)?;
        let at = match self.pick {
            Pick::Tokens { examples, tokens } => self.layout.locate(group, examples.get(0), tokens.get(0))?,
            Pick::Last { examples } | Pick::Whole { examples } => self.layout.last(group, examples.get(0))?,
        };
        let (row, out_row) = (self.row_bytes, self.out_row());
        if whole.bytes() != out_row {
            return Err(Error::new(Kind::Argument, "the output is not one row"));
        }
        if self.files.split(at.file) > 1 {
            return self.run_part(Span { first: 0, end: 1, skip: 0, rows: 1 }, &mut whole, Stop::never());
        }
        let out = whole.range(0, out_row, out_row);
        let open = match self.decodes.then(|| self.files.decoded(at.file)) {
            None => self.files.get(at.file, Stop::never())?,
            Some(Some(decoded)) => decoded,
            Some(None) => {
                let opened = self.files.open_many(&[at.file], watch)?.pop();
                opened.ok_or_else(|| Error::new(Kind::Internal, "a file that was not opened"))?
            }
        };
        let place = open.place();
        let Some(src) = place.offset(at.row, 1) else {
            return Err(self.outside(&open, at.row, 1, Some(0)));
        };
        open.unchanged()?;
        let as_is = self.cast.convert.is_none() && !place.swapped;
        match open.bytes() {
            Some(_)
                if as_is
                    && let Some(source) = open.source()
                    && let Some(warmth) = source.warmth()
                    && warmth.faster() == Way::Read
                    && !warmth.is_warm(src, row as u64) =>
            {
                source.read(src, out, Stop::never())
            }
            Some(bytes) => {
                // One page faults as fast as a hint; several pages are worth one hint for all.
                if row > 4096
                    && let Some(source) = open.source()
                    && source.is_ready(src + row as u64 - 1) == Ready::No
                {
                    source.will_need(&[source::ByteRange { at: src, len: row as u64 }]);
                }
                self.cast.swapped_if(place.swapped).apply(&bytes[src as usize..src as usize + row], out);
                Ok(())
            }
            None if self.fill(&open, out) => Ok(()),
            None if row > EXTENT => {
                self.run_part(Span { first: 0, end: 1, skip: 0, rows: 1 }, &mut whole, Stop::never())
            }
            None => match open.source() {
                Some(source) if as_is => source.read(src, out, Stop::never()),
                _ => {
                    let extent = Extent { src, dst: 0, len: row as u32, file: 0 };
                    self.copy_read(&[open], &[extent], &mut whole, Stop::never())
                }
            },
        }
    }

    pub fn run_part(&self, span: Span, out: &mut Out<'_>, stop: &Stop) -> Result<()> {
        let mut entries = self.locate(span)?;
        if !entries.is_sorted_by_key(|e| e.key) {
            entries.sort_unstable_by_key(|e| e.key);
        }
        self.run_entries(&entries, span.first, out, stop)
    }

    /// Copies the rows of entries in reading order; `first` is the item of row 0.
    pub fn run_entries(&self, entries: &[Entry], first: usize, out: &mut Out<'_>, stop: &Stop) -> Result<()> {
        let mut rest = entries;
        while let Some(next) = rest.first() {
            if self.decodes && !self.opened {
                stop.check()?;
                let file = self.file_of(next);
                let (run, others) = rest.split_at(rest.partition_point(|e| self.file_of(e) <= file));
                if self.copy_apart(file, run, out)? {
                    rest = others;
                    continue;
                }
            }
            let Cut { files, mut seen, mut read, filled, done } = self.cut(rest, first, out.is_dense(), stop)?;
            rest = &rest[done..];
            for extent in &filled {
                self.fill(&files[extent.file as usize], self.target(extent, out));
            }
            self.first_accesses(&files, &mut seen, &mut read, out, stop)?;
            if !seen.is_empty() {
                self.copy_seen(&files, &seen, out, stop)?;
            }
            if !read.is_empty() {
                self.copy_read(&files, &read, out, stop)?;
            }
        }
        Ok(())
    }

    /// Decodes rows of one file to their places without the others; `false` if the file must be opened.
    fn copy_apart(&self, file: u64, entries: &[Entry], out: &mut Out<'_>) -> Result<bool> {
        let (step, to) = (self.files.stride(file), self.out_row());
        let rows = entries
            .iter()
            .flat_map(|e| (0..e.rows).map(move |i| (self.address_of(e) + u64::from(i) * step, e.dst + i)));
        let (addresses, places): (Vec<u64>, Vec<u32>) = rows.unzip();
        let mut scratch = vec![];
        kernels::storing(self.streams, |stores| {
            self.files.rows_apart(file, &addresses, &mut |i, row| {
                let place = out.range(places[i] as usize * to, to, to);
                if self.cast.is_copy() && !self.streams {
                    row.write(place);
                } else {
                    scratch.resize(self.row_bytes, 0);
                    row.write(&mut scratch);
                    self.cast.apply_with(&scratch, place, stores);
                }
            })
        })
    }

    /// Moves extents that are better read than copied from a mapping to `read`. Copies blocks whose time is measured.
    fn first_accesses(
        &self,
        files: &[Arc<OpenFile>],
        seen: &mut Vec<Extent>,
        read: &mut Vec<Extent>,
        out: &mut Out<'_>,
        stop: &Stop,
    ) -> Result<()> {
        let warmth_of = |extent: &Extent| files[extent.file as usize].source().and_then(Source::warmth);
        let mut fresh = vec![];
        seen.retain(|extent| {
            let warm = warmth_of(extent).is_none_or(|warmth| warmth.is_warm(extent.src, u64::from(extent.len)));
            if !warm {
                fresh.push(*extent);
            }
            warm
        });
        for run in fresh.chunk_by(|a, b| a.file == b.file) {
            let Some(warmth) = warmth_of(&run[0]) else { continue };
            for block in run.chunks(BLOCK) {
                stop.check()?;
                // Few ranges are not worth the timing.
                let (way, timed) = if block.len() < BLOCK / 2 { (warmth.faster(), false) } else { warmth.next_way() };
                let before = Instant::now();
                match (way, timed) {
                    (Way::Fault, false) => seen.extend(block),
                    (Way::Read, false) => read.extend(block),
                    (Way::Fault, true) => self.copy_seen(files, block, out, stop)?,
                    (Way::Read, true) => self.copy_read(files, block, out, stop)?,
                }
                if timed {
                    let bytes = block.iter().map(|extent| extent.len as usize).sum();
                    warmth.took(way, before.elapsed(), block.len(), bytes);
                }
            }
        }
        Ok(())
    }

    /// Writes the converted fill value of a missing file; returns false if the file exists.
    pub fn fill(&self, open: &OpenFile, out: &mut [u8]) -> bool {
        let Body::Fill(_, value) = open.body() else { return false };
        let mut element = [0u8; 16];
        let element = &mut element[..self.cast.to_size];
        self.cast.apply(value, element);
        if element.iter().all(|b| *b == 0) {
            out.fill(0);
        } else {
            for to in out.chunks_exact_mut(element.len()) {
                to.copy_from_slice(element);
            }
        }
        true
    }

    /// Copies from mapped files and memory.
    pub fn copy_seen(&self, files: &[Arc<OpenFile>], extents: &[Extent], out: &mut Out<'_>, stop: &Stop) -> Result<()> {
        kernels::storing(self.streams, |stores| self.copy_seen_with(files, extents, out, stores, stop))
    }

    fn copy_seen_with(
        &self,
        files: &[Arc<OpenFile>],
        extents: &[Extent],
        out: &mut Out<'_>,
        stores: Stores<'_>,
        stop: &Stop,
    ) -> Result<()> {
        let bytes: Vec<&[u8]> = files.iter().map(|f| f.bytes().unwrap_or_default()).collect();
        let casts: Vec<Cast<'_>> = files.iter().map(|f| self.cast.swapped_if(f.place().swapped)).collect();
        let sources = sources_of(files);
        let computed: Vec<Option<&dyn Source>> = sources.iter().map(|s| s.filter(|s| s.computes())).collect();
        let mut scratch = vec![];
        let mut scout = Scout::new(&sources, extents);
        for (at, block) in extents.chunks(BLOCK).enumerate() {
            stop.check()?;
            scout.run_ahead_of(at * BLOCK);
            let before = Instant::now();
            for (i, extent) in block.iter().enumerate() {
                // Prefetch two rows ahead: one is too late for a page walk, more would evict data about to be used.
                let soon = extents.get(at * BLOCK + i + 2);
                if let Some(soon) = soon {
                    match computed[soon.file as usize] {
                        Some(source) => source.prefetch(soon.src),
                        None => prefetch(bytes[soon.file as usize].get(soon.src as usize..).unwrap_or_default()),
                    }
                }
                let file = extent.file as usize;
                if let Some(source) = computed[file] {
                    self.compute(source, casts[file], extent, self.target(extent, out), &mut scratch, stores)?;
                    continue;
                }
                let src = &bytes[file][extent.src as usize..extent.src as usize + extent.len as usize];
                casts[file].apply_with(src, self.target(extent, out), stores);
            }
            scout.block_took(before.elapsed(), block);
        }
        Ok(())
    }

    /// Computes an extent, and casts it.
    fn compute(
        &self,
        source: &dyn Source,
        cast: Cast<'_>,
        extent: &Extent,
        out: &mut [u8],
        scratch: &mut Vec<u8>,
        stores: Stores<'_>,
    ) -> Result<()> {
        if cast.is_copy() {
            return source.compute(RangeRead { at: extent.src, into: out }, stores);
        }
        scratch.resize(extent.len as usize, 0);
        source.compute(RangeRead { at: extent.src, into: scratch }, Stores::Cached)?;
        cast.apply_with(scratch, out, stores);
        Ok(())
    }

    /// Copies from files that are not mapped.
    fn copy_read(&self, files: &[Arc<OpenFile>], extents: &[Extent], out: &mut Out<'_>, stop: &Stop) -> Result<()> {
        let as_is = self.cast.convert.is_none() && !files.iter().any(|f| f.place().swapped);
        let mut scratch = vec![0u8; if as_is { 0 } else { EXTENT }];
        let sources = sources_of(files);
        read_all(&sources, extents, stop, |extent, wait| {
            let open = &files[extent.file as usize];
            let Some(source) = open.source() else {
                return Err(Error::new(Kind::Internal, "a file that is not open").at(open.location()));
            };
            let dst = self.target(extent, out);
            let into = if as_is { &mut *dst } else { &mut scratch[..extent.len as usize] };
            let read = RangeRead { at: extent.src, into };
            let ready = if wait {
                source.read_many(&mut [read], stop).map(|()| Ready::Yes)?
            } else {
                source.read_if_ready(read)?
            };
            if ready == Ready::Yes && !as_is {
                self.cast.swapped_if(open.place().swapped).apply(&scratch[..extent.len as usize], dst);
            }
            Ok(ready)
        })
    }
}
