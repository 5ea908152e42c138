//! Addresses from a table: each example has the shard and row of its last token and, if all tokens are stored, of the others.
//!
//! This is lmprobe's index: `shard_index`/`row_offset` and the per-token lists `token_shard_ids`/`token_shard_offsets`.
//! A list of addresses would cost 16 bytes per token. Tokens of an example are almost always consecutive, so lists are folded
//! into runs while they are read, and runs of neighbouring examples are packed ([`packed`](super::packed)): 0.5 to 5 bytes per
//! example of a dataset in the order in which it was written. Unordered lists still work, at 8 bytes per token.
//!
//! Shards are numbered within a group; group `g`, shard `s` is file `g * shards + s` of the file table. Whether a row index
//! is inside its file is checked when the file's header is read.

use super::packed::{At, Packed, ROW_BITS, TokenRun, address};
use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};
use crate::number::to_usize;

/// The addresses of all tokens of the next examples: example i of the batch has the entries `ids[id_ends[i]..id_ends[i + 1]]`,
/// and equally many of `rows`.
#[derive(Clone, Copy, Debug)]
pub struct Lists<'a> {
    /// Limits of the examples in `ids`.
    pub id_ends: &'a [i64],
    /// Shard numbers.
    pub ids: &'a [i64],
    /// Limits of the examples in `rows`.
    pub row_ends: &'a [i64],
    /// Rows.
    pub rows: &'a [i64],
}

/// Addresses read so far. Columns arrive in batches; only the packed form is kept.
#[derive(Debug, Default)]
pub struct TableBuilder {
    shards: u32,
    /// Whether examples have lists; unknown before the first batch.
    lists: Option<bool>,
    packed: Packed,
    /// Reused.
    runs: Vec<TokenRun>,
}

impl TableBuilder {
    /// Addresses into `shards` shards per group.
    pub fn new(shards: u32) -> TableBuilder {
        TableBuilder { shards, ..TableBuilder::default() }
    }

    /// Appends the next examples: the address of each one's last token and, if all tokens are stored, of all its tokens, which
    /// end with it. An example without tokens may have any. All batches have lists, or none has.
    pub fn push(&mut self, shard: &[i64], row: &[i64], lists: Option<Lists<'_>>) -> Result<()> {
        if shard.len() != row.len() {
            return Err(Error::new(Kind::Format, format!("{} shard numbers but {} rows", shard.len(), row.len())));
        }
        if self.shards >= 1 << 24 {
            return Err(Error::new(Kind::Format, format!("{} shards: too many files", self.shards)));
        }
        if *self.lists.get_or_insert(lists.is_some()) != lists.is_some() {
            return Err(Error::new(Kind::Format, "token lists for some examples only"));
        }
        let first = self.packed.len();
        for (i, (&s, &r)) in shard.iter().zip(row).enumerate() {
            self.check(first + i, s, r)?;
        }
        let Some(Lists { id_ends, ids, row_ends, rows }) = lists else {
            for (&s, &r) in shard.iter().zip(row) {
                let at = packed(s, r);
                self.packed.push(1, at, [TokenRun { token: 0, at }]);
            }
            return Ok(());
        };
        if [id_ends, row_ends].iter().any(|ends| ends.len() != shard.len() + 1) {
            let found = id_ends.len().min(row_ends.len()).saturating_sub(1);
            return Err(Error::new(Kind::Format, format!("{} examples, but token lists for {found}", shard.len())));
        }
        for (i, (id_end, row_end)) in id_ends.windows(2).zip(row_ends.windows(2)).enumerate() {
            let example = first + i;
            let slice = |ends: &[i64], values: &'_ [i64]| -> Option<std::ops::Range<usize>> {
                let (a, b) = (usize::try_from(ends[0]).ok()?, usize::try_from(ends[1]).ok()?);
                (a <= b && b <= values.len()).then_some(a..b)
            };
            let (Some(of_ids), Some(of_rows)) = (slice(id_end, ids), slice(row_end, rows)) else {
                return Err(Error::new(Kind::Format, format!("example {example}: list offsets are out of order")));
            };
            let (ids, rows) = (&ids[of_ids], &rows[of_rows]);
            if ids.len() != rows.len() {
                return Err(Error::new(
                    Kind::Format,
                    format!("example {example}: {} token shard numbers but {} token rows", ids.len(), rows.len()),
                ));
            }
            let Ok(count) = u32::try_from(ids.len()) else {
                return Err(Error::new(
                    Kind::Format,
                    format!("example {example}: {} tokens, more than 2^32 - 1", ids.len()),
                ));
            };
            self.fold(example, ids, rows)?;
            if let (Some(id), Some(at)) = (ids.last(), rows.last())
                && (*id, *at) != (shard[i], row[i])
            {
                let (last_shard, last_row) = (shard[i], row[i]);
                let detail = format!(
                    "example {example}: expected the last token's address, shard {last_shard}, row {last_row}, at the end of its \
                     list of tokens, found shard {id}, row {at}"
                );
                return Err(Error::new(Kind::Format, detail));
            }
            self.packed.push(count, packed(shard[i], row[i]), self.runs.iter().copied());
        }
        Ok(())
    }

    /// Folds the addresses of an example into runs.
    fn fold(&mut self, example: usize, ids: &[i64], rows: &[i64]) -> Result<()> {
        self.runs.clear();
        let mut t = 0;
        while t < ids.len() {
            self.check(example, ids[t], rows[t])?;
            let too_many = |_| Error::new(Kind::Internal, "tokens that were not counted");
            let token = u32::try_from(t).map_err(too_many)?;
            self.runs.push(TokenRun { token, at: packed(ids[t], rows[t]) });
            // The run continues while the shard is the same and the row increases by one. The row was checked to be below
            // 2^40; the run's end is checked below.
            let mut end = t + 1;
            while end < ids.len() && ids[end] == ids[t] && rows[end].wrapping_sub(rows[end - 1]) == 1 {
                end += 1;
            }
            self.check(example, ids[t], rows[end - 1])?;
            t = end;
        }
        Ok(())
    }

    fn check(&self, example: usize, shard: i64, row: i64) -> Result<()> {
        if !(0..i64::from(self.shards)).contains(&shard) {
            let last = i64::from(self.shards) - 1;
            let detail = format!("example {example}: expected a shard number from 0 to {last}, found {shard}");
            return Err(Error::new(Kind::Format, detail));
        }
        if !(0..1 << ROW_BITS).contains(&row) {
            return Err(Error::new(
                Kind::Format,
                format!("example {example}: expected a row from 0 to 2^40, found {row}"),
            ));
        }
        Ok(())
    }

    /// The finished table, for `groups` groups.
    pub fn finish(mut self, groups: usize) -> Result<Table> {
        if (groups as u64).saturating_mul(u64::from(self.shards)) >= 1 << 24 {
            return Err(Error::new(Kind::Format, format!("{groups} layers x {} shards: too many files", self.shards)));
        }
        self.packed.finish();
        Ok(Table { groups, shards: self.shards, lists: self.lists == Some(true), packed: self.packed })
    }
}

/// A checked shard and row as one number.
fn packed(shard: i64, row: i64) -> At {
    shard.cast_unsigned() << ROW_BITS | row.cast_unsigned()
}

/// The layout.
#[derive(Debug)]
pub struct Table {
    groups: usize,
    shards: u32,
    lists: bool,
    packed: Packed,
}

impl Table {
    /// Whether every token has an address, or only the last.
    pub fn has_tokens(&self) -> bool {
        self.lists
    }

    /// Bytes of memory in use.
    pub fn bytes(&self) -> usize {
        self.packed.bytes()
    }

    #[inline]
    fn address(&self, group: usize, at: At) -> Address {
        let Address { file: shard, row } = address(at);
        // `finish` proved groups * shards < 2^24.
        Address { file: group as u64 * u64::from(self.shards) + shard, row }
    }
}

impl Layout for Table {
    fn groups(&self) -> usize {
        self.groups
    }

    fn examples(&self) -> u64 {
        self.packed.len() as u64
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        self.packed.get(to_usize(example)).tokens
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        check_group(group, self.groups)?;
        let e = check_example(example, self.examples())?;
        let example = self.packed.get(to_usize(e));
        let token = check_token(token, example.tokens, e)?;
        Ok(self.address(group, example.locate(token)))
    }

    #[inline]
    fn last(&self, group: usize, example: i64) -> Result<Address> {
        check_group(group, self.groups)?;
        let e = check_example(example, self.examples())?;
        Ok(self.address(group, self.packed.get(to_usize(e)).last))
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        check_group(group, self.groups)?;
        let e = check_example(example, self.examples())?;
        self.packed.get(to_usize(e)).runs(&mut |at, rows| each(Run { at: self.address(group, at), rows }));
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// An example: the addresses of its tokens, and that of the last one.
    type Listed = (Vec<(i64, i64)>, (i64, i64));

    fn push(builder: &mut TableBuilder, examples: &[Listed], lists: bool) -> Result<()> {
        let mut ends = vec![0];
        let (mut ids, mut rows) = (vec![], vec![]);
        for (list, _) in examples {
            ids.extend(list.iter().map(|a| a.0));
            rows.extend(list.iter().map(|a| a.1));
            ends.push(ids.len() as i64);
        }
        let (shard, row): (Vec<i64>, Vec<i64>) = examples.iter().map(|(_, last)| *last).unzip();
        let all = Lists { id_ends: &ends, ids: &ids, row_ends: &ends, rows: &rows };
        builder.push(&shard, &row, lists.then_some(all))
    }

    fn table(examples: &[Listed], lists: bool, groups: usize) -> Table {
        let mut builder = TableBuilder::new(4);
        push(&mut builder, examples, lists).unwrap();
        builder.finish(groups).unwrap()
    }

    /// Up to 3 runs, with jumps, repeats and steps backwards.
    fn any_list() -> impl Strategy<Value = Vec<(i64, i64)>> {
        let run = (0i64..4, prop_oneof![0i64..1000, Just((1 << 40) - 9)], 1i64..9)
            .prop_map(|(s, r, n)| (0..n).map(|i| (s, r + i)).collect::<Vec<_>>());
        prop::collection::vec(run, 0..4).prop_map(|runs| runs.concat())
    }

    /// Examples whose bodies of `lengths` rows follow each other, perhaps from another row each, perhaps with tails.
    fn regular(shard: i64, first: i64, lengths: &[i64], tail: Option<i64>, apart: bool) -> Vec<Listed> {
        let mut row = first;
        let example = |(i, rows): (usize, &i64)| {
            row += i64::from(apart && i % 3 == 0);
            let mut list: Vec<_> = (0..*rows).map(|r| (shard, row + r)).collect();
            row += rows;
            list.extend(tail.map(|tail| (3, tail + i as i64)));
            let last = list.last().copied().unwrap_or((1, 7));
            (list, last)
        };
        lengths.iter().enumerate().map(example).collect()
    }

    fn examples() -> impl Strategy<Value = Vec<Listed>> {
        let lengths = prop_oneof![
            (1i64..5, 1usize..150).prop_map(|(n, times)| vec![n; times]),
            prop::collection::vec(0i64..5, 1..150),
        ];
        let tail = prop_oneof![Just(None), (0i64..1000).prop_map(Some), Just(Some((1 << 40) - 200))];
        let stretch = (0i64..4, 0i64..1000, lengths, tail, any::<bool>())
            .prop_map(|(shard, first, lengths, tail, apart)| regular(shard, first, &lengths, tail, apart));
        let any_last = (any_list(), (0i64..4, 0i64..1000)).prop_map(|(list, other)| {
            let last = list.last().copied().unwrap_or(other);
            (list, last)
        });
        let any = prop::collection::vec(any_last, 0..20);
        prop::collection::vec(prop_oneof![stretch, any], 1..5).prop_map(|parts| parts.concat())
    }

    fn plain(at: Address) -> (i64, i64) {
        (at.file as i64 - 8, at.row as i64)
    }

    proptest! {
        /// The oracle is the list itself.
        #[test]
        fn packed_lists_give_every_address_back(examples in examples(), split in 0usize..600) {
            let mut builder = TableBuilder::new(4);
            let split = split.min(examples.len());
            for part in [&examples[..split], &examples[split..]] {
                push(&mut builder, part, true).unwrap();
            }
            let table = builder.finish(3).unwrap();
            prop_assert_eq!(table.examples(), examples.len() as u64);
            for (e, (list, last)) in examples.iter().enumerate() {
                prop_assert_eq!(table.tokens(0, e as u64), list.len() as u64);
                prop_assert_eq!(plain(table.last(2, e as i64).unwrap()), *last);
                let mut runs = vec![];
                table.runs(2, e as i64, &mut |run| runs.push(run)).unwrap();
                let follows = |a: &Run, b: &Run| a.at.file == b.at.file && a.at.row + a.rows == b.at.row;
                prop_assert!(runs.iter().all(|run| run.rows > 0));
                prop_assert!(runs.windows(2).all(|w| !follows(&w[0], &w[1])), "runs are maximal");
                let walked: Vec<_> = runs
                    .iter()
                    .flat_map(|run| (0..run.rows).map(|i| plain(Address { row: run.at.row + i, ..run.at })))
                    .collect();
                prop_assert_eq!(&walked, list);
                for (t, want) in list.iter().enumerate() {
                    prop_assert_eq!(plain(table.locate(2, e as i64, t as i64).unwrap()), *want);
                    prop_assert_eq!(plain(table.locate(2, e as i64, t as i64 - list.len() as i64).unwrap()), *want);
                }
                prop_assert_eq!(table.locate(2, e as i64, list.len() as i64).unwrap_err().kind, Kind::OutOfRange);
            }
            let pooled = super::tests::table(&examples, false, 3);
            for (e, (_, last)) in examples.iter().enumerate() {
                prop_assert_eq!(pooled.tokens(0, e as u64), 1);
                prop_assert_eq!(plain(pooled.last(2, e as i64).unwrap()), *last);
                prop_assert_eq!(plain(pooled.locate(2, e as i64, -1).unwrap()), *last);
                prop_assert_eq!(pooled.locate(2, e as i64, 1).unwrap_err().kind, Kind::OutOfRange);
            }
        }

        #[test]
        fn no_input_panics(ends in prop::collection::vec(any::<i64>(), 0..6), ids in prop::collection::vec(any::<i64>(), 0..6), rows in prop::collection::vec(-2i64..1 << 41, 0..6)) {
            let mut builder = TableBuilder::new(3);
            let _ = builder.push(&ids, &rows, Some(Lists { id_ends: &ends, ids: &ids, row_ends: &ends, rows: &rows }));
            if let Ok(table) = builder.finish(1) {
                for e in 0..table.examples() as i64 {
                    let _ = table.locate(0, e, 0);
                    let _ = table.runs(0, e, &mut |_| {});
                }
            }
        }
    }

    #[test]
    fn addresses_outside_the_shards_are_refused() {
        for (s, r) in [(-1, 0), (2, 0), (0, -1), (0, 1 << 40), (i64::MAX, 0), (0, i64::MIN)] {
            assert_eq!(TableBuilder::new(2).push(&[s], &[r], None).unwrap_err().kind, Kind::Format);
            let lists = Lists { id_ends: &[0, 1], ids: &[s], row_ends: &[0, 1], rows: &[r] };
            assert_eq!(TableBuilder::new(2).push(&[0], &[0], Some(lists)).unwrap_err().kind, Kind::Format);
        }
        let uneven = Lists { id_ends: &[0, 2], ids: &[0, 0], row_ends: &[0, 1], rows: &[5] };
        assert!(TableBuilder::new(2).push(&[0], &[0], Some(uneven)).is_err());
        assert!(TableBuilder::new(2).push(&[0, 0], &[0, 1], Some(uneven)).is_err());
        assert!(TableBuilder::new(1 << 24).push(&[0], &[0], None).is_err());
        let mut mixed = TableBuilder::new(2);
        mixed.push(&[0], &[0], None).unwrap();
        let one = Lists { id_ends: &[0, 1], ids: &[0], row_ends: &[0, 1], rows: &[5] };
        assert!(mixed.push(&[0], &[0], Some(one)).is_err());
    }

    #[test]
    fn a_list_ends_with_the_last_token() {
        let lists = Lists { id_ends: &[0, 0, 2], ids: &[0, 1], row_ends: &[0, 0, 2], rows: &[5, 7] };
        assert!(TableBuilder::new(2).push(&[1, 1], &[3, 7], Some(lists)).is_ok());
        for (shard, row) in [(0, 7), (1, 5), (0, 5)] {
            let error = TableBuilder::new(2).push(&[1, shard], &[3, row], Some(lists)).unwrap_err();
            assert_eq!(error.kind, Kind::Format);
            assert!(error.detail.starts_with("example 1: expected the last token's address"), "{error}");
        }
    }

    /// Bytes per example of 6,400 examples, rounded to a quarter.
    fn cost(examples: &[Listed], lists: bool) -> f64 {
        (table(examples, lists, 1).bytes() as f64 / examples.len() as f64 * 4.0).round() / 4.0
    }

    #[test]
    fn regular_lists_cost_bytes_per_example_not_per_token() {
        let n = 6400;
        let lengths: Vec<i64> = (0..n).map(|i| i * 7 % 100 + 1).collect();
        assert_eq!(cost(&regular(0, 0, &vec![100; n as usize], Some(0), false), true), 0.5);
        assert_eq!(cost(&regular(0, 0, &lengths, None, false), true), 4.5);
        assert_eq!(cost(&regular(0, 0, &lengths, Some(0), false), true), 4.5);
        assert_eq!(cost(&regular(0, 0, &lengths, None, true), true), 12.5);
        assert_eq!(cost(&regular(0, 0, &lengths, Some(0), true), true), 20.5);
        let shuffled: Vec<Listed> = (0..n).map(|i| (vec![], (0, i * 7919 % n))).collect();
        assert_eq!(cost(&shuffled, false), 8.5);
    }

    #[test]
    fn irregular_lists_cost_8_bytes_per_token() {
        let scattered = |e: i64| (0..50).map(|t| (t % 4, e * 977 + t * 31)).collect::<Vec<_>>();
        let listed = |list: Vec<(i64, i64)>| (list.clone(), *list.last().unwrap());
        let examples: Vec<Listed> = (0..6400).map(|e| listed(scattered(e))).collect();
        assert!(cost(&examples, true) < 50.0 * 8.0 + 22.0);
    }
}
