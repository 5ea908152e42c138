//! Addresses from a table: each example has the shard and row of its last token and, if all tokens are stored, of the others.
//!
//! This is lmprobe's index: `shard_index`/`row_offset` and the per-token lists `token_shard_ids`/`token_shard_offsets`.
//! A list of addresses would cost 16 bytes per token. Tokens of an example are almost always consecutive, so lists are folded
//! into runs while they are read, and memory is O(examples). An unordered list still works: it becomes one run per token.
//!
//! Shards are numbered within a group; group `g`, shard `s` is file `g * shards + s` of the file table. Whether a row index
//! is inside its file is checked when the file's header is read.

use super::{Address, Layout, Run, check_example, check_group, check_token};
use crate::error::{Error, Kind, Result};

/// Consecutive rows, starting at this token of an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct TokenRun {
    token: u32,
    shard: u32,
    row: u64,
}

/// Addresses read so far. Columns arrive in batches; only the folded form is kept.
#[derive(Debug, Default)]
pub struct TableBuilder {
    shards: u32,
    last_shard: Vec<u32>,
    last_row: Vec<u64>,
    /// `runs[first_run[e]..first_run[e + 1]]` belong to example e; empty if only last tokens are stored.
    first_run: Vec<u64>,
    runs: Vec<TokenRun>,
    tokens: Vec<u32>,
}

impl TableBuilder {
    /// Addresses into `shards` shards per group.
    pub fn new(shards: u32) -> TableBuilder {
        TableBuilder { shards, ..TableBuilder::default() }
    }

    /// Appends the address of the last token of each of the next examples.
    pub fn push_last(&mut self, shard: &[i64], row: &[i64]) -> Result<()> {
        if shard.len() != row.len() {
            return Err(Error::new(Kind::Format, format!("{} shard numbers but {} rows", shard.len(), row.len())));
        }
        self.last_shard.reserve(shard.len());
        self.last_row.reserve(shard.len());
        for (&s, &r) in shard.iter().zip(row) {
            let (s, r) = self.check(self.last_row.len(), s, r)?;
            self.last_shard.push(s);
            self.last_row.push(r);
        }
        Ok(())
    }

    /// Appends the per-token addresses of the next examples: example i of the batch has the entries
    /// `ids[id_ends[i]..id_ends[i + 1]]`, and equally many of `rows`.
    pub fn push_tokens(&mut self, id_ends: &[i64], ids: &[i64], row_ends: &[i64], rows: &[i64]) -> Result<()> {
        if self.first_run.is_empty() {
            self.first_run.push(0);
        }
        for (id_end, row_end) in id_ends.windows(2).zip(row_ends.windows(2)) {
            let example = self.tokens.len();
            let slice = |ends: &[i64], values: &'_ [i64]| -> Option<std::ops::Range<usize>> {
                let (a, b) = (usize::try_from(ends[0]).ok()?, usize::try_from(ends[1]).ok()?);
                (a <= b && b <= values.len()).then_some(a..b)
            };
            let (Some(i), Some(r)) = (slice(id_end, ids), slice(row_end, rows)) else {
                return Err(Error::new(Kind::Format, format!("example {example}: list offsets are out of order")));
            };
            let (ids, rows) = (&ids[i], &rows[r]);
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
            self.tokens.push(count);
            self.first_run.push(self.runs.len() as u64);
        }
        Ok(())
    }

    fn fold(&mut self, example: usize, ids: &[i64], rows: &[i64]) -> Result<()> {
        let mut t = 0;
        while t < ids.len() {
            let (shard, row) = self.check(example, ids[t], rows[t])?;
            self.runs.push(TokenRun { token: t as u32, shard, row });
            // The run continues while the shard is the same and the row increases by one. `row` was checked to be below
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

    fn check(&self, example: usize, shard: i64, row: i64) -> Result<(u32, u64)> {
        let s = u32::try_from(shard).ok().filter(|s| *s < self.shards);
        let r = u64::try_from(row).ok().filter(|r| *r < 1 << 40);
        match (s, r) {
            (Some(s), Some(r)) => Ok((s, r)),
            (None, _) => Err(Error::new(
                Kind::Format,
                format!(
                    "example {example}: expected a shard number from 0 to {}, found {shard}",
                    i64::from(self.shards) - 1
                ),
            )),
            _ => {
                Err(Error::new(Kind::Format, format!("example {example}: expected a row from 0 to 2^40, found {row}")))
            }
        }
    }

    /// The finished table, for `groups` groups.
    pub fn finish(mut self, groups: usize) -> Result<Table> {
        let examples = self.last_row.len();
        if !self.first_run.is_empty() && self.tokens.len() != examples {
            return Err(Error::new(
                Kind::Format,
                format!("{examples} examples, but token lists for {}", self.tokens.len()),
            ));
        }
        if (groups as u64).saturating_mul(u64::from(self.shards)) >= 1 << 24 {
            return Err(Error::new(Kind::Format, format!("{groups} layers x {} shards: too many files", self.shards)));
        }
        self.last_shard.shrink_to_fit();
        self.last_row.shrink_to_fit();
        self.first_run.shrink_to_fit();
        self.runs.shrink_to_fit();
        self.tokens.shrink_to_fit();
        Ok(Table { groups, inner: self })
    }
}

/// The layout.
#[derive(Debug)]
pub struct Table {
    groups: usize,
    inner: TableBuilder,
}

impl Table {
    /// Whether every token has an address, or only the last.
    pub fn has_tokens(&self) -> bool {
        !self.inner.first_run.is_empty()
    }

    /// Bytes of memory in use.
    pub fn bytes(&self) -> usize {
        let t = &self.inner;
        t.last_shard.len() * 4
            + t.last_row.len() * 8
            + t.first_run.len() * 8
            + t.runs.len() * size_of::<TokenRun>()
            + t.tokens.len() * 4
    }

    fn runs_of(&self, example: usize) -> &[TokenRun] {
        let first = &self.inner.first_run;
        &self.inner.runs[first[example] as usize..first[example + 1] as usize]
    }

    fn file(&self, group: usize, shard: u32) -> u64 {
        // `finish` proved groups * shards < 2^24.
        group as u64 * u64::from(self.inner.shards) + u64::from(shard)
    }
}

impl Layout for Table {
    fn groups(&self) -> usize {
        self.groups
    }

    fn examples(&self) -> u64 {
        self.inner.last_row.len() as u64
    }

    fn tokens(&self, _group: usize, example: u64) -> u64 {
        if self.has_tokens() { u64::from(self.inner.tokens[example as usize]) } else { 1 }
    }

    #[inline]
    fn locate(&self, group: usize, example: i64, token: i64) -> Result<Address> {
        if !self.has_tokens() {
            let e = check_example(example, self.examples())?;
            check_token(token, 1, e)?;
            return self.last(group, example);
        }
        check_group(group, self.groups)?;
        let example = check_example(example, self.examples())?;
        let token = check_token(token, self.tokens(group, example), example)?;
        let runs = self.runs_of(example as usize);
        // The first run starts at token 0, so at least one run starts at or before any token.
        let run = runs[runs.partition_point(|r| u64::from(r.token) <= token) - 1];
        Ok(Address { file: self.file(group, run.shard), row: run.row + (token - u64::from(run.token)) })
    }

    #[inline]
    fn last(&self, group: usize, example: i64) -> Result<Address> {
        check_group(group, self.groups)?;
        let e = check_example(example, self.examples())? as usize;
        Ok(Address { file: self.file(group, self.inner.last_shard[e]), row: self.inner.last_row[e] })
    }

    fn runs(&self, group: usize, example: i64, each: &mut dyn FnMut(Run)) -> Result<()> {
        if !self.has_tokens() {
            let at = self.last(group, example)?;
            each(Run { at, rows: 1 });
            return Ok(());
        }
        check_group(group, self.groups)?;
        let e = check_example(example, self.examples())?;
        let runs = self.runs_of(e as usize);
        let ends = runs.iter().skip(1).map(|r| u64::from(r.token)).chain([self.tokens(group, e)]);
        for (run, end) in runs.iter().zip(ends) {
            let at = Address { file: self.file(group, run.shard), row: run.row };
            each(Run { at, rows: end - u64::from(run.token) });
        }
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn flat(lists: &[Vec<(i64, i64)>]) -> (Vec<i64>, Vec<i64>, Vec<i64>) {
        let mut ends = vec![0];
        let (mut ids, mut rows) = (vec![], vec![]);
        for list in lists {
            ids.extend(list.iter().map(|a| a.0));
            rows.extend(list.iter().map(|a| a.1));
            ends.push(ids.len() as i64);
        }
        (ends, ids, rows)
    }

    /// Lists that are regular (runs), irregular (jumps, repeats, backwards), or mixed.
    fn lists() -> impl Strategy<Value = Vec<Vec<(i64, i64)>>> {
        let run = (0i64..4, 0i64..1000, 1i64..9).prop_map(|(s, r, n)| (0..n).map(|i| (s, r + i)).collect::<Vec<_>>());
        prop::collection::vec(prop::collection::vec(run, 0..4).prop_map(|runs| runs.concat()), 1..20)
    }

    proptest! {
        /// The oracle is the list itself.
        #[test]
        fn folded_lists_give_every_address_back(lists in lists(), split in 0usize..20) {
            let mut builder = TableBuilder::new(4);
            let split = split.min(lists.len());
            for part in [&lists[..split], &lists[split..]] {
                let (ends, ids, rows) = flat(part);
                builder.push_tokens(&ends, &ids, &ends, &rows).unwrap();
                let last: Vec<(i64, i64)> = part.iter().map(|l| l.last().copied().unwrap_or((0, 0))).collect();
                builder.push_last(&last.iter().map(|a| a.0).collect::<Vec<_>>(), &last.iter().map(|a| a.1).collect::<Vec<_>>()).unwrap();
            }
            let table = builder.finish(3).unwrap();
            prop_assert_eq!(table.examples(), lists.len() as u64);
            for (e, list) in lists.iter().enumerate() {
                prop_assert_eq!(table.tokens(0, e as u64), list.len() as u64);
                let mut walked = vec![];
                table.runs(2, e as i64, &mut |run| {
                    walked.extend((0..run.rows).map(|i| (run.at.file as i64 - 8, (run.at.row + i) as i64)));
                }).unwrap();
                prop_assert_eq!(&walked, list);
                for (t, &(shard, row)) in list.iter().enumerate() {
                    let want = Address { file: 8 + shard as u64, row: row as u64 };
                    prop_assert_eq!(table.locate(2, e as i64, t as i64).unwrap(), want);
                    prop_assert_eq!(table.locate(2, e as i64, t as i64 - list.len() as i64).unwrap(), want);
                }
                prop_assert_eq!(table.locate(2, e as i64, list.len() as i64).unwrap_err().kind, Kind::OutOfRange);
            }
        }

        #[test]
        fn no_input_panics(ends in prop::collection::vec(any::<i64>(), 0..6), ids in prop::collection::vec(any::<i64>(), 0..6), rows in prop::collection::vec(-2i64..1 << 41, 0..6)) {
            let mut builder = TableBuilder::new(3);
            let _ = builder.push_tokens(&ends, &ids, &ends, &rows);
            let _ = builder.push_last(&ids, &rows);
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
            assert_eq!(TableBuilder::new(2).push_last(&[s], &[r]).unwrap_err().kind, Kind::Format);
            assert_eq!(TableBuilder::new(2).push_tokens(&[0, 1], &[s], &[0, 1], &[r]).unwrap_err().kind, Kind::Format);
        }
        assert!(TableBuilder::new(2).push_tokens(&[0, 2], &[0, 0], &[0, 1], &[5]).is_err());
    }

    #[test]
    fn regular_lists_cost_bytes_per_example_not_per_token() {
        let mut builder = TableBuilder::new(1);
        let lists: Vec<Vec<(i64, i64)>> = (0..100).map(|e| (0..1000).map(|t| (0, e * 1000 + t)).collect()).collect();
        let (ends, ids, rows) = flat(&lists);
        builder.push_tokens(&ends, &ids, &ends, &rows).unwrap();
        builder.push_last(&[0; 100], &[0; 100]).unwrap();
        assert!(builder.finish(1).unwrap().bytes() < 100 * 64);
    }
}
