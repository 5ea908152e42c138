//! Work that opens and reads files ends when its caller wants it to, wherever it is then.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use actshard_core::codec::inflate;
use actshard_core::files::shards;
use actshard_core::layout::records::{RecordIndex, RecordSizes, RecordSplit};
use actshard_core::location::Location;
use actshard_core::parse::{arrow, npy, safetensors, torch};
use actshard_core::source::held::Held;
use actshard_core::source::{Access, RangeRead, Source, Store, Version, Wishes};
use actshard_core::threads::{Context, Stop, interrupted};
use actshard_core::{Error, Kind, Result};

/// A far store whose answers never come: its requests end only when they are told to.
#[derive(Debug)]
struct Silent {
    /// Whether opening hangs already.
    opens: bool,
    size: u64,
}

#[derive(Debug)]
struct SilentObject(Location, u64);

/// Waits for the stop; a path that forgot it fails after a minute.
fn hang(stop: &Stop, at: &Location) -> Error {
    let begun = Instant::now();
    while !stop.is_set() {
        if begun.elapsed() > Duration::from_secs(60) {
            return Error::new(Kind::Internal, "nobody stopped this read").at(at);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    interrupted()
}

impl Source for SilentObject {
    fn location(&self) -> &Location {
        &self.0
    }

    fn size(&self) -> u64 {
        self.1
    }

    fn version(&self) -> Option<Version> {
        None
    }

    fn read_many(&self, _: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        Err(hang(stop, &self.0))
    }

    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}

impl Store for Silent {
    fn open_many(&self, locations: &[&Location], _: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let open = |at: &&Location| match self.opens {
            true => Ok(Box::new(SilentObject((*at).clone(), self.size)) as Box<dyn Source>),
            false => Err(hang(stop, at)),
        };
        locations.iter().map(open).collect()
    }

    fn list(&self, _: &Location) -> Result<Vec<String>> {
        Ok(vec![])
    }

    fn wishes(&self) -> Option<Wishes> {
        Some(Wishes { gap: 0, grain: 1, pace: None, largest: 1 << 20, parallel: 2, unit_bytes: 1 << 20 })
    }
}

#[test]
fn every_parser_of_a_far_file_ends_when_its_caller_does() {
    let at = Location::object("far", "a");
    let sizes = || RecordSizes {
        examples: 10,
        record_bytes: 56,
        files: vec![1 << 20],
        layers: 1,
        row_bytes: 8,
        last: false,
        split: RecordSplit::Contiguous,
    };
    type Parse<'a> = &'a (dyn Fn(&dyn Source, &mut Context<'_>) -> Result<()> + Sync);
    let parsers: [(&str, Parse<'_>); 5] = [
        ("npy", &|source, context| npy::read(source, context.stop()).map(drop)),
        ("npz", &|source, context| npy::read_archive(source, context).map(drop)),
        ("safetensors", &|source, context| safetensors::read_header(source, context.stop()).map(drop)),
        ("arrow", &|source, context| arrow::read_stream(source, context.stop()).map(drop)),
        ("torch", &|source, context| torch::read(source, 1 << 20, context).map(drop)),
    ];
    for opens in [false, true] {
        let store: &dyn Store = &Silent { opens, size: 560 };
        for (name, parse) in parsers {
            let work = |context: &mut Context<'_>| parse(&*store.open(&at, Access::Once, context.stop())?, context);
            assert_eq!(store.work(&work, &mut || true).unwrap_err().kind, Kind::Interrupted, "{name}");
        }
        let locations = [at.clone()];
        let index = |context: &mut Context<'_>| RecordIndex::open(store, &locations, sizes(), context).map(drop);
        assert_eq!(store.work(&index, &mut || true).unwrap_err().kind, Kind::Interrupted);
        for compressed in [false, true] {
            let read = shards::read_file(store, &at, compressed, 1 << 20, &mut || true);
            assert_eq!(read.err().map(|error| error.kind), Some(Kind::Interrupted));
        }
    }
}

/// Bytes in memory, and the number of reads.
#[derive(Debug)]
struct Counted(Held, AtomicUsize);

impl Source for Counted {
    fn location(&self) -> &Location {
        self.0.location()
    }

    fn size(&self) -> u64 {
        self.0.size()
    }

    fn version(&self) -> Option<Version> {
        None
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.read_many(reads, stop)
    }

    fn unchanged(&self) -> Result<()> {
        Ok(())
    }
}

#[test]
fn a_gzipped_file_of_torch_is_read_and_inflated_no_further_than_its_caller_waits() {
    let mut encoder = flate2::write::GzEncoder::new(vec![], flate2::Compression::none());
    encoder.write_all(&vec![5; 50 << 20]).unwrap();
    let gz = encoder.finish().unwrap();
    let source = Counted(Held::new(Location::object("test", "a.pt.gz"), gz.clone().into()), AtomicUsize::new(0));
    let stop = Stop::new();
    stop.set();
    let error = torch::read(&source, 1 << 30, &mut Context::of_part(&stop)).unwrap_err();
    assert_eq!((error.kind, source.1.load(Ordering::Relaxed)), (Kind::Interrupted, 2), "its front, and one piece");
    let error = inflate::inflate(&gz, 1 << 30, &mut Context::of_part(&stop)).unwrap_err();
    assert_eq!(error.kind, Kind::Interrupted);
}
