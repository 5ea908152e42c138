//! Compares the gather over table and chunked layouts with independent naive readers: addresses in any order, rows split over
//! chunks, byte-swapped chunks, missing chunks, every cast, dense and scattered outputs.

use std::fs;
use std::path::Path;

use std::sync::Arc;

use actshard_core::arrays::naming::Naming;
use actshard_core::dtype::Cast;
use actshard_core::files::Files;
use actshard_core::files::chunks::{ChunkArray, ChunkFiles, Content};
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::gather::{Ints, Origin, Out, Pick, gather};
use actshard_core::layout::Layout;
use actshard_core::layout::chunked::{Chunked, Lengths, Member};
use actshard_core::layout::table::{Lists, Table, TableBuilder};
use actshard_core::parse::safetensors::TensorRows;
use actshard_core::source::Io;
use actshard_core::{DType, Kind, Result};
use half::{bf16, f16};
use proptest::prelude::*;

const ALL: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];

/// An element's bytes, with a value that every type can represent: halves need 9 bits, more than bfloat16 has, so whole numbers
/// up to 127.
fn element(dtype: DType, n: u64) -> Vec<u8> {
    let x = (n % 128) as f32 - 64.0;
    match dtype {
        DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        DType::F32 => x.to_le_bytes().to_vec(),
        _ => f64::from(x).to_le_bytes().to_vec(),
    }
}

fn row(dtype: DType, width: u64, mut number: impl FnMut(u64) -> u64) -> Vec<u8> {
    (0..width).flat_map(|d| element(dtype, number(d))).collect()
}

fn io() -> impl Strategy<Value = Io> {
    prop_oneof![Just(Io::Mmap), Just(Io::Pread)]
}

fn dtype() -> impl Strategy<Value = DType> {
    prop::sample::select(&ALL[..])
}

/// Gathers into one block, and into places given in another order.
fn both<L: Layout>(
    files: &dyn Files,
    layout: &L,
    groups: Ints<'_>,
    pick: Pick<'_>,
    items: usize,
    to: DType,
    rows: usize,
) -> Result<(Vec<u8>, Vec<u8>)> {
    let cast = Cast::between(files.row().dtype, to)?;
    let row = files.row().width * to.size().unwrap();
    let source = Origin { files, layout, groups, only: 0..u64::MAX };
    let mut dense = vec![0xa5; rows * row];
    gather(&source, pick, items, cast, Out::Dense(&mut dense), &mut || false)?;
    let mut memory = vec![0xa5; rows * row];
    let mut places: Vec<Option<&mut [u8]>> = memory.chunks_exact_mut(row).map(Some).collect();
    let order: Vec<usize> = (0..rows).map(|i| i ^ 1).map(|i| if i < rows { i } else { rows - 1 }).collect();
    let out = order.iter().map(|i| places[*i].take().unwrap()).collect();
    gather(&source, pick, items, cast, Out::Places(out), &mut || false)?;
    let scattered = order.iter().flat_map(|i| memory[i * row..(i + 1) * row].to_vec()).collect();
    Ok((dense, scattered))
}

/// Safetensors shards whose elements encode their shard and row.
fn shards(folder: &Path, groups: u64, rows: &[u64], width: u64, dtype: DType, io: Io) -> FileTable {
    let mut files = vec![];
    for g in 0..groups {
        for (s, n) in rows.iter().enumerate() {
            let data: Vec<u8> = (0..*n).flat_map(|r| row(dtype, width, |d| value(g, s as u64, r, d))).collect();
            let other = [7u8; 10];
            let header = format!(
                r#"{{"other":{{"dtype":"U8","shape":[10],"data_offsets":[0,10]}},"acts":{{"dtype":"{}","shape":[{n},{width}],"data_offsets":[10,{}]}}}}"#,
                dtype.name(),
                10 + data.len()
            );
            let path = folder.join(format!("{g}_{s}.safetensors"));
            fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &other, &data].concat())
                .unwrap();
            files.push(RowFile { location: path.into(), rows: RowsIn::Found(Arc::new(TensorRows("acts".to_owned()))) });
        }
    }
    FileTable::new(files, width, dtype, io).unwrap()
}

fn value(group: u64, shard: u64, row: u64, d: u64) -> u64 {
    (group * 31 + shard * 17 + row * 5 + d * 3) ^ (row >> 3)
}

fn table(lists: &[Vec<(i64, i64)>], shards: u32, groups: usize, tokens: bool) -> Table {
    let mut builder = TableBuilder::new(shards);
    let last: Vec<(i64, i64)> = lists.iter().map(|l| *l.last().unwrap()).collect();
    let (s, r): (Vec<i64>, Vec<i64>) = last.into_iter().unzip();
    let mut ends = vec![0];
    let (mut ids, mut rows) = (vec![], vec![]);
    for (s, r) in lists.iter().flatten() {
        ids.push(*s);
        rows.push(*r);
    }
    for list in lists {
        ends.push(ends.last().unwrap() + list.len() as i64);
    }
    let all = Lists { id_ends: &ends, ids: &ids, row_ends: &ends, rows: &rows };
    builder.push(&s, &r, tokens.then_some(all)).unwrap();
    builder.finish(groups).unwrap()
}

const ROWS: [u64; 3] = [40, 1, 25];

/// Runs, repeats, jumps and steps backwards.
fn lists() -> impl Strategy<Value = Vec<Vec<(i64, i64)>>> {
    let run = (0usize..3, 0u64..40, 1u64..12).prop_map(|(s, first, n)| {
        let first = first % ROWS[s];
        (first..(first + n).min(ROWS[s])).map(|r| (s as i64, r as i64)).collect::<Vec<_>>()
    });
    prop::collection::vec(prop::collection::vec(run, 1..4).prop_map(|runs| runs.concat()), 1..12)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn rows_of_a_table_equal_the_oracle(
        io in io(), dtype in dtype(), to in dtype(), width in 1u64..20, lists in lists(),
        picks in prop::collection::vec((0usize..1000, 0usize..1000, 0u64..2), 1..60), tokens: bool,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let files = shards(folder.path(), 2, &ROWS, width, dtype, io);
        let layout = table(&lists, 3, 2, tokens);
        let want = |group: u64, (s, r): (i64, i64)| row(to, width, |d| value(group, s as u64, r as u64, d));
        let e: Vec<i64> = picks.iter().map(|p| (p.0 % lists.len()) as i64).collect();
        let g: Vec<i64> = picks.iter().map(|p| p.2 as i64).collect();

        let last: Vec<u8> = e.iter().zip(&g).flat_map(|(e, g)| want(*g as u64, *lists[*e as usize].last().unwrap())).collect();
        let pick = Pick::Last { examples: Ints::Each(&e) };
        let (dense, scattered) = both(&files, &layout, Ints::Each(&g), pick, e.len(), to, e.len()).unwrap();
        prop_assert!(dense == last && scattered == last);

        if tokens {
            // Counted from the beginning or the end.
            let t: Vec<i64> = picks.iter().zip(&e).map(|(p, e)| {
                let n = lists[*e as usize].len();
                let t = (p.1 % n) as i64;
                if p.1 % 2 == 0 { t } else { t - n as i64 }
            }).collect();
            let at = |e: i64, t: i64| {
                let list = &lists[e as usize];
                list[if t < 0 { (t + list.len() as i64) as usize } else { t as usize }]
            };
            let each: Vec<u8> = (0..e.len()).flat_map(|i| want(g[i] as u64, at(e[i], t[i]))).collect();
            let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&t) };
            let (dense, scattered) = both(&files, &layout, Ints::Each(&g), pick, e.len(), to, e.len()).unwrap();
            prop_assert!(dense == each && scattered == each);

            let whole: Vec<u8> = (0..e.len()).flat_map(|i| {
                lists[e[i] as usize].iter().flat_map(|at| want(g[i] as u64, *at)).collect::<Vec<u8>>()
            }).collect();
            let rows = e.iter().map(|e| lists[*e as usize].len()).sum();
            let pick = Pick::Whole { examples: Ints::Each(&e) };
            let (dense, scattered) = both(&files, &layout, Ints::Each(&g), pick, e.len(), to, rows).unwrap();
            prop_assert!(dense == whole && scattered == whole);
        }
    }

    /// One array `(examples, groups, tokens, width)` in chunks of any shape, some of them missing.
    #[test]
    fn rows_of_chunks_equal_the_oracle(
        io in io(), dtype in dtype(), to in dtype(), swapped: bool,
        shape in [1u64..6, 1u64..4, 1u64..7, 1u64..11], chunk in [1u64..5, 1u64..4, 1u64..6, 1u64..8],
        absent in any::<u64>(), lengths in prop::collection::vec(0u32..7, 6),
        picks in prop::collection::vec((0u64..1000, 0u64..1000, 0u64..1000), 1..60),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let [n, l, t, h] = shape;
        let number = |e: u64, g: u64, t: u64, d: u64| ((e * l + g) * 7 + t) * 11 + d;
        let counts = [0, 1, 2, 3].map(|i| shape[i].div_ceil(chunk[i]));
        let is_absent = |at: [u64; 4]| absent >> ((at[0] * 31 + at[1] * 17 + at[2] * 5 + at[3]) % 64) & 3 == 0;
        let mut at = [0; 4];
        for k in 0..counts.iter().product() {
            let mut rest = k;
            for axis in (0..4).rev() {
                at[axis] = rest % counts[axis];
                rest /= counts[axis];
            }
            if is_absent(at) {
                continue;
            }
            let mut bytes = vec![];
            for e in 0..chunk[0] { for g in 0..chunk[1] { for k in 0..chunk[2] { for d in 0..chunk[3] {
                let mut one = element(dtype, number(at[0] * chunk[0] + e, at[1] * chunk[1] + g, at[2] * chunk[2] + k, at[3] * chunk[3] + d));
                if swapped { one.reverse(); }
                bytes.extend(one);
            } } } }
            let name = at.map(|i| i.to_string()).join(".");
            fs::write(folder.path().join(name), bytes).unwrap();
        }
        let metadata = folder.path().join(".zarray");
        fs::write(&metadata, b"{}").unwrap();
        let fill = 100u64;
        let (root, naming) = (folder.path().into(), Naming::v2(false));
        let (content, metadata) = (Content::Plain { swapped }, metadata.into());
        let array = ChunkArray { folder: root, metadata, naming, shape, chunk, fill: Some(element(dtype, fill)), content, scales: None };
        let files = ChunkFiles::new(vec![array], h, dtype, 1 << 20, io).unwrap();
        let lengths: Vec<u32> = lengths.iter().take(n as usize).map(|x| (*x).min(t as u32)).chain(std::iter::repeat(t as u32)).take(n as usize).collect();
        let member = Member { examples: n, parts: files.grids() };
        let layout = Chunked::new(l as usize, vec![member], vec![Lengths::Each(lengths.clone())]).unwrap();
        let want = |e: u64, g: u64, k: u64| row(to, h, |d| {
            let at = [e / chunk[0], g / chunk[1], k / chunk[2], d / chunk[3]];
            if is_absent(at) { fill } else { number(e, g, k, d) }
        });

        let e: Vec<i64> = picks.iter().map(|p| (p.0 % n) as i64).collect();
        let g: Vec<i64> = picks.iter().map(|p| (p.1 % l) as i64).collect();
        let whole: Vec<u8> = e.iter().zip(&g).flat_map(|(e, g)| {
            (0..u64::from(lengths[*e as usize])).flat_map(|k| want(*e as u64, *g as u64, k)).collect::<Vec<u8>>()
        }).collect();
        let rows = e.iter().map(|e| lengths[*e as usize] as usize).sum();
        let pick = Pick::Whole { examples: Ints::Each(&e) };
        let (dense, scattered) = both(&files, &layout, Ints::Each(&g), pick, e.len(), to, rows).unwrap();
        prop_assert!(dense == whole && scattered == whole);

        let (e, g): (Vec<i64>, Vec<i64>) = e.iter().zip(&g).filter(|(e, _)| lengths[**e as usize] > 0).unzip();
        let k: Vec<i64> = e.iter().zip(&picks).map(|(e, p)| (p.2 % u64::from(lengths[*e as usize])) as i64).collect();
        let each: Vec<u8> = (0..e.len()).flat_map(|i| want(e[i] as u64, g[i] as u64, k[i] as u64)).collect();
        let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&k) };
        let (dense, scattered) = both(&files, &layout, Ints::Each(&g), pick, e.len(), to, e.len()).unwrap();
        prop_assert!(dense == each && scattered == each);
    }
}

/// A row beyond the end of a shard is an error that names the shard, for every way to request it.
#[test]
fn an_index_beyond_its_shard_is_refused() {
    for io in [Io::Mmap, Io::Pread] {
        let folder = tempfile::tempdir().unwrap();
        let files = shards(folder.path(), 1, &ROWS, 4, DType::F32, io);
        let layout = table(&[vec![(0, 38), (0, 39), (0, 40)]], 3, 1, true);
        for pick in [
            Pick::Last { examples: Ints::One(0) },
            Pick::Tokens { examples: Ints::One(0), tokens: Ints::One(2) },
            Pick::Whole { examples: Ints::One(0) },
        ] {
            let rows = if matches!(pick, Pick::Whole { .. }) { 3 } else { 1 };
            let error = both(&files, &layout, Ints::One(0), pick, 1, DType::F32, rows).unwrap_err();
            assert_eq!(error.kind, Kind::Format);
            assert!(error.to_string().contains("0_0.safetensors") && error.detail.contains("40"), "{error}");
        }
    }
}
