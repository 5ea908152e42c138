//! Any bytes as DeepSpec's index files: opened without reading a record; then every example is refused in one line, or all of its rows
//! lie in its files, as many as its tokens, at the places that a simple reading of the records gives.

use std::sync::Arc;

use actshard_core::layout::Layout;
use actshard_core::layout::records::{COLUMNS, RecordIndex, RecordRows, RecordSizes, RecordSplit, Records};
use actshard_core::location::Location;
use actshard_core::source::held::Held;
use actshard_core::source::{Access, Source, Store};
use actshard_core::threads::{Context, Stop};
use actshard_core::{Kind, Result};

use crate::memory::counted;

/// Files in memory, named by their numbers.
#[derive(Debug)]
struct Files(Vec<Vec<u8>>);

impl Store for Files {
    fn open_many(&self, locations: &[&Location], _: Access, _: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let open = |place: &&Location| -> Box<dyn Source> {
            let number: usize = place.to_string().rsplit('/').next().and_then(|name| name.parse().ok()).expect("a number");
            Box::new(Held::new((*place).clone(), self.0[number].clone().into()))
        };
        locations.iter().map(|place| Ok(open(place))).collect()
    }

    fn list(&self, _: &Location) -> Result<Vec<String>> {
        Ok(vec![])
    }
}

fn checked<T>(result: Result<T>) -> Option<T> {
    result
        .inspect_err(|error| {
            assert!(matches!(error.kind, Kind::Format | Kind::Truncated), "{error:?}");
            assert!(!error.to_string().contains(['\n', '\r']), "more than one line: {error:?}");
        })
        .ok()
}

pub fn index_records(data: &[u8]) {
    let Some((&[flags, layers, row, a, b, claimed], raw)) = data.split_first_chunk::<6>() else { return };
    let record_bytes = [56, 60, 64, 57][usize::from(flags & 3)];
    let splits = usize::from(flags >> 2 & 3) + 1;
    let share = raw.len() / splits / record_bytes * record_bytes;
    let examples = if flags & 0x80 == 0 { (share / record_bytes) as u64 } else { u64::from(claimed) << (claimed % 60) };
    let file = u64::from(u16::from_le_bytes([a, b])) << (claimed % 40);
    let sizes = RecordSizes {
        examples,
        record_bytes,
        files: vec![file, file / 2, file / 4, file],
        layers: u64::from(layers),
        row_bytes: u64::from(row) << (claimed % 30),
        last: flags & 0x20 != 0,
        split: if flags & 0x40 != 0 { RecordSplit::HeadTail } else { RecordSplit::Contiguous },
    };
    let store = Files(raw.chunks(share.max(1)).take(splits).map(<[u8]>::to_vec).collect());
    if store.0.len() < splits {
        return;
    }
    let locations: Vec<Location> =
        (0..splits).map(|i| Location::from(std::path::PathBuf::from(format!("/index/{i}")))).collect();
    let Some(index) = checked(counted(|| RecordIndex::open(&store, &locations, sizes.clone(), &mut Context::of_part(&Stop::new())))) else { return };
    let index = Arc::new(index);
    let long = |i: usize, begin: usize| u64::from_le_bytes(store.0[i][begin..begin + 8].try_into().expect("eight bytes"));
    let kinds = [RecordRows::States, RecordRows::Column(0), RecordRows::Column(1), RecordRows::Column(2)];
    for rows in kinds {
        let layout = Records::new(Arc::clone(&index), rows).expect("one of the columns");
        let (steps, bytes) = (layout.steps(), layout.row_bytes());
        for example in 0..layout.examples().min(64) {
            for group in 0..layout.groups().min(5) {
                let mut runs = vec![];
                let known = checked(layout.runs(group, example as i64, &mut |run| runs.push(run)));
                let Some(()) = known else { continue };
                let tokens = checked(layout.count(group, example)).expect("the same record");
                assert_eq!(runs.iter().map(|run| run.rows).sum::<u64>(), tokens);
                for run in &runs {
                    let step = steps[run.at.file as usize];
                    let end = u128::from(run.at.row) + u128::from(run.rows - 1) * u128::from(step) + u128::from(bytes);
                    assert!(
                        end <= u128::from(sizes.files[run.at.file as usize % sizes.files.len()]),
                        "rows beyond their file"
                    );
                }
                let last = runs.last().expect("at least one token");
                let end = last.at.row + (last.rows - 1) * steps[last.at.file as usize];
                assert_eq!(layout.last(group, example as i64).expect("a checked record").row, end);
                assert_eq!(layout.locate(group, example as i64, 0).expect("a checked record"), runs[0].at);
                assert!(layout.locate(group, example as i64, tokens as i64).is_err());
                // The simple reading, of an index that is not split.
                if splits == 1 {
                    let first = example as usize * record_bytes + record_bytes - 40;
                    let (which, skip) = match rows {
                        RecordRows::Column(c) => (c, 0),
                        RecordRows::States if (group as u64) < sizes.layers => (3, group as u64 * sizes.row_bytes),
                        RecordRows::States => (4, 0),
                    };
                    assert_eq!(runs[0].at.row, long(0, first + 8 * which) + skip);
                    let columns = COLUMNS.iter().sum::<u64>() * tokens;
                    assert_eq!(long(0, first + 24), long(0, first) + columns);
                }
            }
        }
    }
}
