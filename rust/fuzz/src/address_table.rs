//! Any lists of addresses with any list offsets: the table rejects them exactly when a simple reading of the offsets does.
//! An accepted table returns every address as listed, by `locate`, from the end, and by `runs`.

use actshard_core::Kind;
use actshard_core::layout::table::{Lists, TableBuilder};
use actshard_core::layout::{Layout, Run};

use crate::memory::counted;

const SHARDS: i64 = 5;
const GROUP: usize = 1;

type List = Vec<(i64, i64)>;

/// One batch: the lists of `push`.
struct Batch {
    id_ends: Vec<i64>,
    ids: Vec<i64>,
    row_ends: Vec<i64>,
    rows: Vec<i64>,
}

/// Numbers at the limits of a checked conversion or addition.
const HOSTILE: [i64; 8] = [-1, i64::MIN, i64::MAX, 1 << 40, (1 << 40) - 1, u32::MAX as i64, SHARDS, i64::MAX - 1];

/// Maps bytes to numbers without `arbitrary`: seed files stay readable, and do not depend on the version of a crate. Two of
/// 256 byte values give a hostile number; more would reject nearly all inputs.
fn number(bytes: &mut impl Iterator<Item = u8>, plain: impl Fn(u8) -> i64) -> Option<i64> {
    Some(match bytes.next()? {
        0xff => HOSTILE[usize::from(bytes.next()?) % HOSTILE.len()],
        0xfe => i64::from(i16::from_le_bytes([bytes.next()?, bytes.next()?])),
        b => plain(b),
    })
}

fn batch(bytes: &mut impl Iterator<Item = u8>) -> Option<Batch> {
    let mode = bytes.next()?;
    let (mut ends, mut ids, mut rows): (Vec<i64>, Vec<i64>, Vec<i64>) = (vec![0], vec![], vec![]);
    for _ in 0..mode % 8 {
        let Some(count) = bytes.next() else { break };
        for _ in 0..count % 16 {
            let Some(id) = number(bytes, |b| i64::from(b) % SHARDS) else { break };
            // Odd bytes continue from the previous row, so that runs are common.
            let before = rows.last().copied().unwrap_or(0);
            let step = |b: u8| if b & 1 == 1 { before.wrapping_add(1) } else { i64::from(b) };
            let Some(row) = number(bytes, step) else { break };
            ids.push(id);
            rows.push(row);
        }
        ends.push(ids.len() as i64);
    }
    let (mut id_ends, mut row_ends) = (ends.clone(), ends);
    // Offsets of the two columns may differ, decrease, leave gaps or be out of range.
    for (bit, ends) in [(0x10, &mut id_ends), (0x20, &mut row_ends)] {
        if mode & bit != 0 {
            let place = usize::from(bytes.next()?) % ends.len();
            ends[place] = number(bytes, i64::from)?;
        }
    }
    if mode & 0x40 != 0 {
        id_ends.pop();
    }
    if mode & 0x80 != 0 {
        rows.pop();
    }
    Some(Batch { id_ends, ids, row_ends, rows })
}

/// The oracle: reads the offsets in wide numbers, without folding.
fn plainly(b: &Batch) -> Option<Vec<List>> {
    let slice = |ends: &[i64], values: &[i64]| -> Option<Vec<i64>> {
        let (a, z) = (ends[0], ends[1]);
        (0 <= a && a <= z && i128::from(z) <= values.len() as i128).then(|| values[a as usize..z as usize].to_vec())
    };
    if b.id_ends.len() != b.row_ends.len() {
        return None;
    }
    let mut lists = vec![];
    for (i, r) in b.id_ends.windows(2).zip(b.row_ends.windows(2)) {
        let (ids, rows) = (slice(i, &b.ids)?, slice(r, &b.rows)?);
        let addresses = ids.iter().all(|s| (0..SHARDS).contains(s)) && rows.iter().all(|r| (0..1 << 40).contains(r));
        if ids.len() != rows.len() || !addresses {
            return None;
        }
        lists.push(ids.into_iter().zip(rows).collect());
    }
    Some(lists)
}

pub fn address_table(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut builder = TableBuilder::new(SHARDS as u32);
    let mut lists: Vec<List> = vec![];
    let mut pushed = false;
    while let Some(b) = batch(&mut bytes) {
        let want = plainly(&b);
        // Each example's own last token; for an empty list, or lists that will be refused, any address. A column of offsets
        // may be empty, which is refused too.
        let count = want.as_ref().map_or(b.id_ends.len().min(b.row_ends.len()).saturating_sub(1), Vec::len);
        let last = |e: usize| want.as_ref().and_then(|w| w[e].last().copied()).unwrap_or((0, 0));
        let (shard, row): (Vec<i64>, Vec<i64>) = (0..count).map(last).unzip();
        let lists_of = Lists { id_ends: &b.id_ends, ids: &b.ids, row_ends: &b.row_ends, rows: &b.rows };
        let result = counted(|| builder.push(&shard, &row, Some(lists_of)));
        assert_eq!(result.is_ok(), want.is_some(), "{result:?}");
        let Some(want) = want else {
            assert_eq!(result.unwrap_err().kind, Kind::Format);
            return;
        };
        pushed = true;
        lists.extend(want);
    }
    let table = counted(|| builder.finish(GROUP + 1)).expect("as many last tokens as lists");
    assert_eq!(table.has_tokens(), pushed);
    assert_eq!(table.examples(), lists.len() as u64);
    let plain = |file: u64, row: u64| (file as i64 - GROUP as i64 * SHARDS, row as i64);
    for (e, list) in lists.iter().enumerate() {
        let (n, example) = (list.len() as i64, e as i64);
        assert_eq!(table.tokens(GROUP, e as u64), list.len() as u64);
        let mut walked: List = vec![];
        let visit = &mut |run: Run| {
            assert!(run.rows > 0, "an empty run");
            walked.extend((0..run.rows).map(|i| plain(run.at.file, run.at.row + i)));
        };
        table.runs(GROUP, example, visit).expect("a known example");
        assert_eq!(&walked, list);
        for (t, want) in list.iter().enumerate() {
            for token in [t as i64, t as i64 - n] {
                let address = table.locate(GROUP, example, token).expect("a known token");
                assert_eq!(plain(address.file, address.row), *want);
            }
        }
        for token in [n, -n - 1, i64::MIN, i64::MAX] {
            assert_eq!(table.locate(GROUP, example, token).unwrap_err().kind, Kind::OutOfRange);
        }
        if let Some(want) = list.last() {
            let address = table.last(GROUP, example).expect("a known example");
            assert_eq!(plain(address.file, address.row), *want);
        }
    }
}
