//! Any lists of addresses: the table refuses them, or gives every address back as the list says.
#![no_main]

use actshard_core::layout::Layout;
use actshard_core::layout::table::TableBuilder;
use libfuzzer_sys::fuzz_target;

const SHARDS: u32 = 5;

/// Bytes become examples: a count, then (shard, row) pairs. Small numbers make runs likely, 0xff makes hostile ones.
fn decode(bytes: &[u8]) -> Vec<Vec<(i64, i64)>> {
    let mut examples = vec![];
    let mut bytes = bytes.iter().copied();
    while let Some(count) = bytes.next() {
        let mut list = vec![];
        for _ in 0..count % 16 {
            let (Some(s), Some(r)) = (bytes.next(), bytes.next()) else { break };
            let previous: i64 = list.last().map_or(0, |a: &(i64, i64)| a.1);
            let row = match r {
                0xff => i64::MAX,
                0xfe => -1,
                0xfd => 1 << 40,
                r if r & 1 == 1 => previous.wrapping_add(1),
                r => i64::from(r),
            };
            list.push((if s == 0xff { i64::from(SHARDS) } else { i64::from(s % 5) }, row));
        }
        examples.push(list);
    }
    examples
}

fuzz_target!(|bytes: &[u8]| {
    let examples = decode(bytes);
    let mut builder = TableBuilder::new(SHARDS);
    let mut ends = vec![0i64];
    let (mut ids, mut rows) = (vec![], vec![]);
    for list in &examples {
        ids.extend(list.iter().map(|a| a.0));
        rows.extend(list.iter().map(|a| a.1));
        ends.push(ids.len() as i64);
    }
    let valid = ids.iter().all(|s| *s < i64::from(SHARDS)) && rows.iter().all(|r| (0..1 << 40).contains(r));
    let pushed = builder.push_tokens(&ends, &ids, &ends, &rows);
    assert_eq!(pushed.is_ok(), valid);
    if !valid {
        return;
    }
    let zeros = vec![0; examples.len()];
    builder.push_last(&zeros, &zeros).expect("zeros are addresses");
    let table = builder.finish(2).expect("as many last tokens as lists");
    for (e, list) in examples.iter().enumerate() {
        let mut walked = vec![];
        let each = &mut |run: actshard_core::layout::Run| {
            walked.extend((0..run.rows).map(|i| (i64::from(run.at.file) - i64::from(SHARDS), (run.at.row + i) as i64)));
        };
        table.runs(1, e as i64, each).expect("a known example");
        assert_eq!(&walked, list);
        for (t, &(shard, row)) in list.iter().enumerate() {
            let at = table.locate(1, e as i64, t as i64).expect("a known token");
            assert_eq!((i64::from(at.file) - i64::from(SHARDS), at.row as i64), (shard, row));
        }
        assert!(table.locate(1, e as i64, list.len() as i64).is_err());
    }
});
