//! Rows of any layout as a part of [`Several`](crate::rows::several::Several).

use crate::dtype::{Cast, DType};
use crate::error::Result;
use crate::gather::blocks::BlockReader;
use crate::gather::{Ints, Out, Pick};
use crate::layout::row::Row;
use crate::rows::Rows;
use crate::rows::several::Part;
use crate::rows::units::Units;
use crate::threads::{Stop, Watch};

impl Part for Rows {
    fn row(&self) -> Row {
        Rows::row(self)
    }

    fn groups(&self) -> usize {
        Rows::groups(self)
    }

    fn examples(&self) -> u64 {
        Rows::examples(self)
    }

    fn converts(&self) -> bool {
        Rows::converts(self)
    }

    fn is_far(&self) -> bool {
        Rows::is_far(self)
    }

    fn read_as(&self, dtype: DType) -> Option<Rows> {
        Rows::read_as(self, dtype)
    }

    fn units(&self) -> Result<Units> {
        Rows::units(self)
    }

    fn read_ahead(&self, example: Option<i64>) {
        Rows::read_ahead(self, example);
    }

    fn tokens_of(&self, groups: Ints<'_>, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>> {
        Rows::tokens_of(self, groups, examples, watch)
    }

    fn tokens_anywhere(&self, examples: &[i64], watch: Watch<'_>) -> Result<Vec<i64>> {
        Rows::tokens_anywhere(self, examples, watch)
    }

    fn token_counts(&self, watch: Watch<'_>) -> Result<Vec<i64>> {
        Rows::token_counts(self, watch)
    }

    fn stored_types(&self, watch: Watch<'_>) -> Result<Vec<DType>> {
        Rows::stored_types(self, watch)
    }

    fn types_of(&self, group: usize, examples: &[i64], watch: Watch<'_>) -> Result<Vec<DType>> {
        Rows::types_of(self, group, examples, watch)
    }

    fn are_cached(&self, groups: Ints<'_>, pick: Pick<'_>, items: usize, mapped: bool) -> bool {
        Rows::are_cached(self, groups, pick, items, mapped)
    }

    fn gather_in_blocks(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        out: Out<'_>,
        how: (&mut BlockReader, &Stop),
    ) -> Result<()> {
        Rows::gather_in_blocks(self, groups, pick, items, cast, out, how)
    }

    fn gather(
        &self,
        groups: Ints<'_>,
        pick: Pick<'_>,
        items: usize,
        cast: Cast<'_>,
        out: Out<'_>,
        watch: Watch<'_>,
    ) -> Result<()> {
        Rows::gather(self, groups, pick, items, cast, out, watch)
    }
}
