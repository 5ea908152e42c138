//! Compares chunked arrays with a naive reader of the original array: any shape and chunks, missing chunks, split rows,
//! byte-swapped elements, members and parts.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::Path;

use actshard_core::arrays::naming::Naming;
use actshard_core::dtype::Cast;
use actshard_core::files::chunks::{ChunkArray, ChunkFiles, Content};
use actshard_core::gather::{Ints, Origin, Out, Pick, gather};
use actshard_core::layout::chunked::{Chunked, Lengths, Member};
use actshard_core::source::Io;
use actshard_core::{DType, Kind, Result};
use proptest::prelude::*;

const FILL: u32 = 0xdead_beef;

/// One array of 32-bit elements: its content, and the missing chunks.
#[derive(Clone, Debug)]
struct Made {
    shape: [u64; 4],
    chunk: [u64; 4],
    /// If bit `n % 61` is set, chunk `n` has no file.
    holes: u64,
    swapped: bool,
    slashes: bool,
    seed: u32,
}

impl Made {
    fn counts(&self) -> [u64; 4] {
        [0, 1, 2, 3].map(|d| self.shape[d].div_ceil(self.chunk[d]))
    }

    fn number(&self, at: [u64; 4]) -> u64 {
        let c = self.counts();
        ((at[0] * c[1] + at[1]) * c[2] + at[2]) * c[3] + at[3]
    }

    fn is_hole(&self, at: [u64; 4]) -> bool {
        self.holes >> (self.number(at) % 61) & 1 == 1
    }

    fn value(&self, at: [u64; 4]) -> u32 {
        let flat = at.iter().zip(self.shape).fold(0, |n, (a, s)| n * s + a);
        (flat as u32).wrapping_mul(2_654_435_761).wrapping_add(self.seed)
    }

    /// The naive reader.
    fn read(&self, at: [u64; 4]) -> u32 {
        if self.is_hole([0, 1, 2, 3].map(|d| at[d] / self.chunk[d])) { FILL } else { self.value(at) }
    }

    fn write(&self, folder: &Path) -> ChunkArray {
        fs::create_dir_all(folder).unwrap();
        fs::write(folder.join(".zarray"), "{}").unwrap();
        let (c, k) = (self.counts(), self.chunk);
        let separator = if self.slashes { "/" } else { "." };
        for i in 0..c.iter().product::<u64>() {
            let at = [i / c[3] / c[2] / c[1], i / c[3] / c[2] % c[1], i / c[3] % c[2], i % c[3]];
            if self.is_hole(at) {
                continue;
            }
            let mut bytes = vec![];
            for j in 0..k.iter().product::<u64>() {
                let within = [j / k[3] / k[2] / k[1], j / k[3] / k[2] % k[1], j / k[3] % k[2], j % k[3]];
                let place = [0, 1, 2, 3].map(|d| at[d] * k[d] + within[d]);
                let inside = (0..4).all(|d| place[d] < self.shape[d]);
                let value = if inside { self.value(place) } else { 0x7777_7777 };
                bytes.extend(if self.swapped { value.to_be_bytes() } else { value.to_le_bytes() });
            }
            let path = folder.join(at.map(|n| n.to_string()).join(separator));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        ChunkArray {
            folder: folder.into(),
            metadata: folder.join(".zarray").into(),
            naming: Naming::v2(separator == "/"),
            shape: self.shape,
            chunk: self.chunk,
            fill: FILL.to_le_bytes().to_vec(),
            content: Content::Plain { swapped: self.swapped },
        }
    }
}

fn array(examples: u64, groups: u64, width: u64) -> impl Strategy<Value = Made> {
    let chunk = (1u64..4, 1u64..3, 1u64..6, 1u64..=width + 2);
    (1u64..9, chunk, any::<u64>(), any::<u64>(), any::<bool>(), any::<bool>(), any::<u32>()).prop_map(
        move |(tokens, (a, b, c, d), h1, h2, swapped, slashes, seed)| Made {
            shape: [examples, groups, tokens, width],
            chunk: [a, b, c, d],
            holes: h1 & h2,
            swapped,
            slashes,
            seed,
        },
    )
}

/// Two members, each of one or two parts.
fn dataset() -> impl Strategy<Value = [Vec<Made>; 2]> {
    (1u64..4, 1u64..12, 1usize..3, 1u64..6, 0u64..4).prop_flat_map(|(groups, width, parts, first, second)| {
        [first, second].map(|n| prop::collection::vec(array(n, groups, width), parts))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn rows_equal_the_arrays_they_were_cut_from(
        members in dataset(),
        lengths in prop::collection::vec(any::<u32>(), 40),
        picks in prop::collection::vec((any::<u64>(), any::<u64>(), any::<bool>()), 0..60),
        mmap in any::<bool>(),
    ) {
        let folder = tempfile::tempdir().unwrap();
        let (groups, width, parts) = (members[0][0].shape[1], members[0][0].shape[3], members[0].len());
        let mut arrays = vec![];
        for (m, each) in members.iter().enumerate() {
            for (p, made) in each.iter().enumerate() {
                arrays.push(made.write(&folder.path().join(format!("{m}-{p}"))));
            }
        }
        let io = if mmap { Io::Mmap } else { Io::Pread };
        let files = ChunkFiles::new(arrays, width, DType::U32, 0, io).unwrap();
        let grids = files.grids();
        let counts: Vec<u64> = members.iter().map(|m| m[0].shape[0]).collect();
        // Lengths per part, at most the length of its array.
        let mut each: Vec<Vec<u32>> = vec![vec![]; parts];
        for (m, n) in counts.iter().enumerate() {
            for i in 0..*n {
                for (p, list) in each.iter_mut().enumerate() {
                    let random = lengths[(m * 13 + i as usize * 3 + p) % lengths.len()];
                    list.push(random % (members[m][p].shape[2] as u32 + 1));
                }
            }
        }
        let places = (0..members.len())
            .map(|m| Member { examples: counts[m], parts: (0..parts).map(|p| grids[m * parts + p]).collect() })
            .collect();
        let layout = Chunked::new(groups as usize, places, each.iter().cloned().map(Lengths::Each).collect()).unwrap();

        let mut e = vec![];
        let mut t = vec![];
        let mut want: Vec<Vec<u32>> = vec![vec![]; groups as usize];
        let total: u64 = counts.iter().sum();
        for (example, token, back) in picks {
            let example = example % total;
            let tokens: u64 = each.iter().map(|l| u64::from(l[example as usize])).sum();
            if tokens == 0 {
                continue;
            }
            let token = token % tokens;
            let (m, local) = if example < counts[0] { (0, example) } else { (1, example - counts[0]) };
            let first = u64::from(each[0][example as usize]);
            let (p, at) = if token < first { (0, token) } else { (1, token - first) };
            for (group, want) in want.iter_mut().enumerate() {
                want.extend((0..width).map(|h| members[m][p].read([local, group as u64, at, h])));
            }
            e.push(example as i64);
            t.push(if back { token as i64 - tokens as i64 } else { token as i64 });
        }
        for (group, want) in want.iter().enumerate() {
            let mut out = vec![0xaa; e.len() * width as usize * 4];
            let source = Origin { files: &files, layout: &layout, groups: Ints::One(group as i64), only: 0..u64::MAX };
            let pick = Pick::Tokens { examples: Ints::Each(&e), tokens: Ints::Each(&t) };
            let cast = Cast::between(DType::U32, DType::U32).unwrap();
            gather(&source, pick, e.len(), cast, Out::Dense(&mut out), &mut || false).unwrap();
            let found: Vec<u32> = out.chunks_exact(4).map(|b| u32::from_ne_bytes(b.try_into().unwrap())).collect();
            prop_assert_eq!(&found, want);
        }
    }
}

/// Past the end of one dimension lies the next index of the dimension before it: other rows, not fill values.
#[test]
fn lengths_and_counts_above_the_array_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let made = Made { shape: [3, 2, 5, 4], chunk: [1, 1, 2, 4], holes: 0, swapped: false, slashes: false, seed: 1 };
    let files = ChunkFiles::new(vec![made.write(folder.path())], 4, DType::U32, 0, Io::Pread).unwrap();
    let grid = files.grids()[0];
    let layout = |groups, examples, lengths| -> Result<Chunked> {
        Chunked::new(groups, vec![Member { examples, parts: vec![grid] }], vec![lengths])
    };
    assert!(layout(2, 3, Lengths::Same(5)).is_ok());
    assert!(layout(2, 3, Lengths::Each(vec![5, 0, 5])).is_ok());
    for refused in [
        layout(2, 3, Lengths::Same(6)),
        layout(2, 3, Lengths::Each(vec![5, 6, 0])),
        layout(3, 3, Lengths::Same(5)),
        layout(2, 4, Lengths::Same(5)),
    ] {
        assert_eq!(refused.unwrap_err().kind, Kind::Format);
    }
}
