//! The items of a batch: their ids, and their rows, gathered or converted into the batch's memory.

use super::plan::Plan;
use super::rescale::{Convert, Scratch};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::gather::{Ints, Out, Pick};
use crate::kernels::{self, Stores, prefetch, should_stream};
use crate::memory::zeroed;
use crate::rows::Rows;
use crate::threads::{self, Stop, Watch};

/// Items whose ids one thread computes: about 50 us of work.
const IDS: usize = 2048;
/// Items whose numbers are computed together.
const NUMBERS: usize = 512;

/// The ids of the rows in a batch, item by item.
#[derive(Default, Debug)]
pub struct BatchItems {
    /// Examples.
    pub examples: Vec<i64>,
    /// Tokens.
    pub tokens: Vec<i64>,
    /// Positions among the groups read, if an item has a row of one group.
    pub groups: Vec<i64>,
}

/// The example, the token and the position among the groups read of an item.
pub type ItemIds = (i64, i64, i64);

impl BatchItems {
    /// Adds one item.
    #[inline]
    pub fn push(&mut self, (example, token, group): ItemIds, interleaved: bool) {
        self.examples.push(example);
        self.tokens.push(token);
        if interleaved {
            self.groups.push(group);
        }
    }

    /// Adds `n` items, computed by all threads: `numbers_from` fills the numbers of consecutive items from a given one,
    /// `item_of` maps a number to its item.
    pub fn extend<N, I>(
        &mut self,
        n: usize,
        interleaved: bool,
        (numbers_from, item_of): (&N, &I),
        watch: Watch<'_>,
    ) -> Result<()>
    where
        N: Fn(u64, &mut [u64]) + Sync,
        I: Fn(u64) -> ItemIds + Sync,
    {
        let grown = |ids: &mut Vec<i64>| {
            let from = ids.len();
            ids.resize(from + n, 0);
            from
        };
        let from = grown(&mut self.examples);
        grown(&mut self.tokens);
        if interleaved {
            grown(&mut self.groups);
        }
        let (examples, tokens) = (self.examples[from..].chunks_mut(IDS), self.tokens[from..].chunks_mut(IDS));
        let mut groups = self.groups.get_mut(from..).unwrap_or_default().chunks_mut(IDS);
        let parts: Vec<_> = examples.zip(tokens).map(|(e, t)| (e, t, groups.next().unwrap_or_default())).collect();
        let fill = |p: usize, (examples, tokens, groups): (&mut [i64], &mut [i64], &mut [i64]), _: &Stop| {
            let mut block = [0; NUMBERS];
            for from in (0..examples.len()).step_by(NUMBERS) {
                let numbers = &mut block[..NUMBERS.min(examples.len() - from)];
                numbers_from((p * IDS + from) as u64, numbers);
                for (i, number) in (from..).zip(numbers) {
                    let (example, token, group) = item_of(*number);
                    (examples[i], tokens[i]) = (example, token);
                    if let Some(to) = groups.get_mut(i) {
                        *to = group;
                    }
                }
            }
            Ok(())
        };
        if n <= 2 * IDS {
            #[expect(clippy::disallowed_methods, reason = "a few thousand numbers")]
            return parts.into_iter().enumerate().try_for_each(|(p, part)| fill(p, part, Stop::never()));
        }
        threads::for_each(parts, &fill, watch)
    }

    /// Reads and converts the rows of the items from `from` on.
    pub fn gather(
        &self,
        from: usize,
        (rows, plan, convert): (&Rows, &Plan, &Convert),
        out: &mut [u8],
        scratch: &mut Vec<u8>,
        watch: Watch<'_>,
    ) -> Result<()> {
        if let Some(cast) = convert.cast() {
            return self.gather_into(from, (rows, plan, cast), Out::Dense(out), watch);
        }
        let (per_item, n) = (plan.rows_per_item(), self.examples.len() - from);
        let dtype = rows.row().dtype;
        let need = n * per_item * convert.from();
        if scratch.len() != need {
            *scratch = zeroed(need)?;
        }
        self.gather_into(from, (rows, plan, Cast::between(dtype, dtype)?), Out::Dense(scratch), &mut *watch)?;
        let slots: Vec<u32> = (0..n as u32).collect();
        let positions = plan.settings.interleaved.then(|| &self.groups[from..]);
        convert_rows(convert, scratch, convert.from() * per_item, &slots, positions, out, watch)
    }

    /// Reads the rows of the items from `from` on.
    pub fn gather_into(
        &self,
        from: usize,
        (rows, plan, cast): (&Rows, &Plan, Cast<'_>),
        out: Out<'_>,
        watch: Watch<'_>,
    ) -> Result<()> {
        let of = &plan.settings.groups;
        let (mut examples, mut tokens, mut groups) = (vec![], vec![], vec![]);
        let per_item = plan.rows_per_item();
        let known = (&self.examples[from..], &self.tokens[from..]);
        let (groups, (examples, tokens)) = if plan.settings.interleaved {
            groups.extend(self.groups[from..].iter().map(|g| of[*g as usize] as i64));
            (Ints::Each(&groups), known)
        } else if per_item == 1 {
            (Ints::One(of[0] as i64), known)
        } else {
            for (example, token) in known.0.iter().zip(known.1) {
                examples.extend(std::iter::repeat_n(*example, per_item));
                tokens.extend(std::iter::repeat_n(*token, per_item));
                groups.extend(of.iter().map(|g| *g as i64));
            }
            (Ints::Each(&groups), (&examples[..], &tokens[..]))
        };
        let pick = Pick::Tokens { examples: Ints::Each(examples), tokens: Ints::Each(tokens) };
        rows.gather(groups, pick, examples.len(), cast, out, watch)
    }
}

/// Rows that [`convert_block`] numbers at once.
const BLOCK: usize = 1 << 20;

/// Converts rows of one group, which lie one after the other.
pub fn convert_block(convert: &Convert, rows: &[u8], out: &mut [u8], watch: Watch<'_>) -> Result<()> {
    let (from, to) = (convert.from().max(1), convert.to().max(1));
    for (rows, out) in rows.chunks(from * BLOCK).zip(out.chunks_mut(to * BLOCK)) {
        let slots: Vec<u32> = (0..(rows.len() / from) as u32).collect();
        convert_rows(convert, rows, from, &slots, None, out, &mut *watch)?;
    }
    Ok(())
}

/// Converts the rows of slots into `out`, one after the other; `groups` has each slot's group if a slot has a row of
/// one group.
pub fn convert_rows(
    convert: &Convert,
    memory: &[u8],
    slot_bytes: usize,
    slots: &[u32],
    groups: Option<&[i64]>,
    out: &mut [u8],
    watch: Watch<'_>,
) -> Result<()> {
    let per_slot = slot_bytes / convert.from();
    let to = convert.to() * per_slot;
    let at_once = slots.len().div_ceil(threads::num_threads() * 4).max((256 << 10) / to.max(1)).max(1);
    let stream = should_stream(out.len(), convert.to());
    let fill = |p: usize, out: &mut [u8], stores: Stores<'_>| -> Result<()> {
        let mut scratch = Scratch::default();
        let slot = |i: usize| {
            let first = *slots.get(i)? as usize * slot_bytes;
            memory.get(first..first + slot_bytes)
        };
        for (i, out) in out.chunks_exact_mut(to).enumerate() {
            let i = p * at_once + i;
            if let Some(soon) = slot(i + 2) {
                prefetch(soon);
            }
            let Some(from) = slot(i) else { return Err(Error::new(Kind::Internal, "a slot outside its memory")) };
            for (k, (src, dst)) in from.chunks_exact(convert.from()).zip(out.chunks_exact_mut(convert.to())).enumerate()
            {
                let group = groups.map_or(k, |g| g[i] as usize);
                convert.row(group, src, dst, &mut scratch, stores);
            }
        }
        Ok(())
    };
    let work = |p: usize, out: &mut [u8], stop: &Stop| {
        stop.check()?;
        kernels::storing(stream, |stores| fill(p, out, stores))
    };
    threads::for_each(out.chunks_mut(at_once * to), &work, watch)
}
