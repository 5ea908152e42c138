//! Compares reads of joined, paired and chosen rows, nested in any order, with a list of every row.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use actshard_core::dtype::Cast;
use actshard_core::files::table::{FileTable, RowFile, RowsIn};
use actshard_core::gather::blocks::BlockReader;
use actshard_core::gather::{Ints, Out, Pick};
use actshard_core::layout::spans::{PartSpans, PerExample, Spans};
use actshard_core::rows::chosen::Chosen;
use actshard_core::rows::several::Several;
use actshard_core::rows::{Rows, Units};
use actshard_core::source::Io;
use actshard_core::threads::Stop;
use actshard_core::{DType, Kind, Result};
use half::{bf16, f16};
use proptest::prelude::*;

const ALL: [DType; 4] = [DType::F16, DType::BF16, DType::F32, DType::F64];
const WIDTH: u64 = 3;
const GROUPS: usize = 2;

/// An element's bytes, with a value that every type can represent.
fn element(dtype: DType, n: u64) -> Vec<u8> {
    let x = (n % 128) as f32 - 64.0;
    match dtype {
        DType::F16 => f16::from_f32(x).to_le_bytes().to_vec(),
        DType::BF16 => bf16::from_f32(x).to_le_bytes().to_vec(),
        DType::F32 => x.to_le_bytes().to_vec(),
        _ => f64::from(x).to_le_bytes().to_vec(),
    }
}

/// The bytes of a row, which its number determines.
fn row(dtype: DType, number: u64) -> Vec<u8> {
    (0..WIDTH).flat_map(|d| element(dtype, number * 7 + d * 3)).collect()
}

/// Rows, and the numbers of all rows and the stored types: group by group, example by example.
#[derive(Clone)]
struct Model {
    rows: Arc<Rows>,
    numbers: Vec<Vec<Vec<u64>>>,
    stored: Vec<Vec<DType>>,
}

/// Choices that build a tree. The same choices build the same tree, over other files in another `variant`.
#[derive(Clone)]
struct Choices {
    left: Vec<u32>,
    at: usize,
}

impl Choices {
    fn below(&mut self, n: usize) -> usize {
        self.at += 1;
        self.left[self.at % self.left.len()] as usize % n.max(1)
    }
}

/// A file of ragged examples, some of them empty.
fn leaf(folder: &Path, which: usize, variant: usize, io: Io) -> Model {
    let lengths: &[u32] = [&[3, 0, 1, 4][..], &[2, 2, 2], &[0], &[], &[5]][which % 5];
    let dtype = ALL[(which + variant) % 4];
    let total: u64 = lengths.iter().map(|n| u64::from(*n)).sum();
    let first = (which * 1000 + variant * 100) as u64;
    let bytes: Vec<u8> = (0..total * GROUPS as u64).flat_map(|r| row(dtype, first + r)).collect();
    let path = folder.join(format!("{which}_{variant}"));
    fs::write(&path, bytes).unwrap();
    let file = RowFile { location: path.into(), rows: RowsIn::Raw(total * GROUPS as u64) };
    let mut starts = vec![];
    let mut at = 0;
    for n in lengths {
        starts.push(at);
        at += u64::from(*n);
    }
    let numbers = (0..GROUPS as u64).map(|g| {
        let of = |(start, n): (&u64, &u32)| (0..u64::from(*n)).map(|t| first + g * total + start + t).collect();
        starts.iter().zip(lengths).map(of).collect()
    });
    let numbers: Vec<Vec<Vec<u64>>> = numbers.collect();
    let files = FileTable::new(vec![file], WIDTH, dtype, io).unwrap();
    let part =
        PartSpans { files: PerExample::Same(0), tokens: PerExample::Each(lengths.to_vec()), starts, stride: total };
    let layout = Spans::new(GROUPS, 1, vec![part]).unwrap();
    let stored = vec![vec![dtype; lengths.len()]; GROUPS];
    Model { rows: Arc::new(Rows::Spans(files, layout)), numbers, stored }
}

fn chosen(of: &Model, choices: &mut Choices) -> Model {
    let n = of.numbers[0].len();
    let wanted: Vec<usize> = if n == 0 { vec![] } else { (0..choices.below(6)).map(|_| choices.below(n)).collect() };
    let bytes: Vec<u8> = wanted.iter().flat_map(|e| (*e as i64).to_ne_bytes()).collect();
    let chosen = Chosen::listed(Arc::new(bytes), n as u64).unwrap();
    Model {
        rows: Arc::new(Rows::Chosen(Arc::clone(&of.rows), chosen)),
        numbers: of.numbers.iter().map(|g| wanted.iter().map(|e| g[*e].clone()).collect()).collect(),
        stored: of.stored.iter().map(|g| wanted.iter().map(|e| g[*e]).collect()).collect(),
    }
}

fn joined(parts: &[Model], choices: &mut Choices) -> Model {
    let count = 1 + choices.below(3);
    let groups: Vec<Vec<usize>> =
        parts.iter().map(|p| (0..count).map(|_| choices.below(p.numbers.len())).collect()).collect();
    let dtype = ALL[choices.below(4)];
    let rows = parts.iter().map(|p| Arc::clone(&p.rows)).collect();
    let several = Several::examples(rows, groups.clone(), Some(dtype)).unwrap();
    let each = |g: usize| parts.iter().zip(&groups).map(move |(part, own)| (part, own[g]));
    let numbers = (0..count).map(|g| each(g).flat_map(|(part, own)| part.numbers[own].clone()).collect()).collect();
    let stored = (0..count).map(|g| each(g).flat_map(|(part, own)| part.stored[own].clone()).collect()).collect();
    Model { rows: Arc::new(Rows::Several(several)), numbers, stored }
}

fn paired(parts: &[Model], choices: &mut Choices) -> Model {
    let group = |choices: &mut Choices| {
        let part = choices.below(parts.len());
        (part, choices.below(parts[part].numbers.len()))
    };
    let groups: Vec<(usize, usize)> = (0..=choices.below(3)).map(|_| group(&mut *choices)).collect();
    let dtype = ALL[choices.below(4)];
    let rows = parts.iter().map(|p| Arc::clone(&p.rows)).collect();
    let several = Several::groups(rows, groups.clone(), Some(dtype)).unwrap();
    let numbers = groups.iter().map(|(p, g)| parts[*p].numbers[*g].clone()).collect();
    let stored = groups.iter().map(|(p, g)| parts[*p].stored[*g].clone()).collect();
    Model { rows: Arc::new(Rows::Several(several)), numbers, stored }
}

fn built(folder: &Path, choices: &mut Choices, variant: usize, depth: usize) -> Model {
    let kind = if depth == 0 { 0 } else { choices.below(4) };
    match kind {
        0 => {
            let (which, io) = (choices.below(5), [Io::Mmap, Io::Pread][choices.below(2)]);
            leaf(folder, which, variant, io)
        }
        1 => {
            let of = built(folder, choices, variant, depth - 1);
            chosen(&of, choices)
        }
        2 => {
            let parts: Vec<Model> =
                (0..=choices.below(3)).map(|_| built(folder, choices, variant, depth - 1)).collect();
            joined(&parts, choices)
        }
        _ => {
            let mut again = choices.clone();
            let one = built(folder, choices, variant, depth - 1);
            let other = built(folder, &mut again, 1 - variant, depth - 1);
            paired(&[one, other], choices)
        }
    }
}

/// Reads into one block and into places in another order; both must give the same rows.
fn read(rows: &Rows, groups: Ints<'_>, pick: Pick<'_>, items: usize, count: usize, to: DType) -> Result<Vec<u8>> {
    let cast = Cast::between(rows.row().dtype, to)?;
    let size = WIDTH as usize * to.size().unwrap();
    let mut dense = vec![0xa5; count * size];
    rows.gather(groups, pick, items, cast, Out::Dense(&mut dense), &mut || false)?;
    let mut memory = vec![0xa5; count * size];
    let mut places: Vec<&mut [u8]> = memory.chunks_exact_mut(size).collect();
    places.reverse();
    rows.gather(groups, pick, items, cast, Out::Places(places), &mut || false)?;
    let turned: Vec<u8> = memory.chunks_exact(size).rev().flatten().copied().collect();
    assert_eq!(dense, turned);
    if rows.reads_blocks() {
        let (mut blocks, mut reader) = (vec![0xa5; count * size], BlockReader::new(false)?);
        let out = Out::Dense(&mut blocks);
        rows.gather_in_blocks(groups, pick, items, cast, out, (&mut reader, &Stop::new()))?;
        assert_eq!(dense, blocks);
    }
    Ok(dense)
}

fn check(model: &Model, picks: &[(u32, u32, u32)], to: DType) {
    let Model { rows, numbers, stored } = model;
    let n = numbers[0].len();
    assert_eq!((rows.examples(), rows.groups()), (n as u64, numbers.len()));
    let counts = |group: usize| numbers[group].iter().map(|e| e.len() as i64).collect::<Vec<_>>();
    let watch = &mut || false;
    assert_eq!(rows.token_counts(watch).unwrap(), counts(0));
    assert_eq!(rows.units().unwrap(), Units::Examples);
    let every: Vec<i64> = (0..n as i64).collect();
    assert_eq!(rows.tokens_anywhere(&every, watch).unwrap(), counts(0));
    for (group, own) in numbers.iter().enumerate() {
        assert_eq!(rows.types_of(group, &every, watch).unwrap(), stored[group]);
        assert_eq!(rows.tokens_of(Ints::One(group as i64), &every, watch).unwrap(), counts(group));
        let all: Vec<u8> = own.iter().flatten().flat_map(|r| row(to, *r)).collect();
        let pick = Pick::Whole { examples: Ints::Count };
        let total = own.iter().map(Vec::len).sum();
        assert_eq!(read(rows, Ints::One(group as i64), pick, n, total, to).unwrap(), all);
        for (example, tokens) in own.iter().enumerate() {
            if let Some((view, found)) = rows.view(Io::Mmap, group, example as i64, watch).unwrap() {
                let bytes: Vec<u8> = tokens.iter().flat_map(|r| row(rows.row().dtype, *r)).collect();
                assert_eq!((found, view.bytes()), (tokens.len() as u64, &bytes[..]));
            }
        }
    }
    let has: Vec<usize> = (0..n).filter(|e| numbers.iter().all(|g| !g[*e].is_empty())).collect();
    for beyond in [n as i64, -1, i64::MIN, i64::MAX] {
        let pick = Pick::Last { examples: Ints::One(beyond) };
        assert_eq!(read(rows, Ints::One(0), pick, 1, 1, to).unwrap_err().kind, Kind::OutOfRange);
    }
    let of_none = Pick::Last { examples: Ints::Each(&[]) };
    assert!(read(rows, Ints::One(0), of_none, 0, 0, to).unwrap().is_empty());
    if has.is_empty() {
        return;
    }
    let items = picks.len();
    let e: Vec<i64> = picks.iter().map(|p| has[p.0 as usize % has.len()] as i64).collect();
    let g: Vec<i64> = picks.iter().map(|p| (p.1 as usize % numbers.len()) as i64).collect();
    let of = |i: usize| &numbers[g[i] as usize][e[i] as usize];
    let k: Vec<i64> = (0..items)
        .map(|i| (picks[i].2 as usize % of(i).len()) as i64 - if picks[i].2 > 1 << 31 { of(i).len() as i64 } else { 0 })
        .collect();
    let at = |i: usize| of(i)[k[i].rem_euclid(of(i).len() as i64) as usize];
    let (examples, groups) = (Ints::Each(&e), Ints::Each(&g));
    let expected: Vec<u8> = (0..items).flat_map(|i| row(to, at(i))).collect();
    let pick = Pick::Tokens { examples, tokens: Ints::Each(&k) };
    assert_eq!(read(rows, groups, pick, items, items, to).unwrap(), expected);
    assert!(read(rows, groups, pick, items, items + 1, to).is_err());
    let expected: Vec<u8> = (0..items).flat_map(|i| row(to, *of(i).last().unwrap())).collect();
    assert_eq!(read(rows, groups, Pick::Last { examples }, items, items, to).unwrap(), expected);
    let expected: Vec<u8> = (0..items).flat_map(|i| of(i).iter().flat_map(|r| row(to, *r))).collect();
    let total = (0..items).map(|i| of(i).len()).sum();
    assert_eq!(read(rows, groups, Pick::Whole { examples }, items, total, to).unwrap(), expected);
    let one = Ints::One(e[0]);
    let expected: Vec<u8> =
        g.iter().flat_map(|g| row(to, *numbers[*g as usize][e[0] as usize].last().unwrap())).collect();
    assert_eq!(read(rows, groups, Pick::Last { examples: one }, items, items, to).unwrap(), expected);
    let wrong = [numbers.len() as i64];
    assert!(read(rows, Ints::Each(&wrong), Pick::Last { examples: one }, 1, 1, to).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// Joins of pairs of choices of joins read what a list of all rows holds.
    #[test]
    fn a_tree_of_rows_reads_as_the_list_of_its_rows(
        left in prop::collection::vec(any::<u32>(), 40), to in prop::sample::select(&ALL[..]),
        picks in prop::collection::vec(any::<(u32, u32, u32)>(), 1..40),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let model = built(folder.path(), &mut Choices { left, at: 0 }, 0, 3);
        check(&model, &picks, to);
    }
}

/// More parts than threads, of which some have no example of a request.
#[test]
fn many_parts_are_read_in_the_order_of_the_request() {
    let folder = tempfile::tempdir().unwrap();
    let mut choices = Choices { left: vec![3, 1, 4, 1, 5, 9, 2, 6], at: 0 };
    let parts: Vec<Model> = (0..150).map(|i| leaf(folder.path(), i % 5, i % 2, [Io::Mmap, Io::Pread][i % 2])).collect();
    let model = joined(&parts, &mut choices);
    let picks: Vec<(u32, u32, u32)> =
        (0..997u32).map(|i| (i.wrapping_mul(0x9e37_79b9), i, i.wrapping_mul(77_777_777))).collect();
    check(&model, &picks, DType::F32);
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (a, b) = (leaf(folder.path(), 0, 0, Io::Mmap).rows, leaf(folder.path(), 1, 0, Io::Mmap).rows);
    let both = || vec![Arc::clone(&a), Arc::clone(&b)];
    assert!(Several::<Rows>::examples(vec![], vec![], None).is_err());
    for groups in [vec![], vec![vec![0]], vec![vec![0], vec![2]], vec![vec![0], vec![0, 1]]] {
        assert!(Several::examples(both(), groups, Some(DType::F32)).is_err());
    }
    assert!(Several::groups(both(), vec![(0, 0), (1, 0)], Some(DType::F32)).is_err());
    for groups in [vec![(0, 2)], vec![(2, 0)]] {
        assert!(Several::groups(vec![Arc::clone(&a), Arc::clone(&a)], groups, Some(DType::F32)).is_err());
    }
    let error = Several::examples(both(), vec![vec![0], vec![1]], Some(DType::F32)).unwrap();
    let mut out = vec![0; 12];
    let pick = Pick::Tokens { examples: Ints::One(4), tokens: Ints::One(9) };
    let cast = Cast::between(DType::F32, DType::F32).unwrap();
    let error = error.gather(Ints::One(0), pick, 1, cast, Out::Dense(&mut out), &mut || false).unwrap_err();
    assert!(error.detail.contains("as in part 1, whose first is 4 here"), "{error}");
}
