//! The rows of whole sequences, read into one block of memory, one after the other or with padding between them.

use super::ahead::Stream;
use super::items::{BatchItems, convert_rows};
use crate::dtype::Cast;
use crate::error::{Error, Kind, Result};
use crate::gather::Out;
use crate::memory::zeroed;
use crate::threads::Watch;

/// Sequences and their places in an output.
#[derive(Clone, Copy, Debug)]
pub struct PlacedSequences<'a> {
    /// The first pick of each.
    pub firsts: &'a [i64],
    /// The number of picks of each.
    pub counts: &'a [i64],
    /// The first item of each in the output; ascending and disjoint.
    pub places: &'a [i64],
    /// Items of the output. Those of no sequence are padding.
    pub items: usize,
}

/// First pick, number of picks, place.
type PlacedSequence = (u64, usize, usize);

impl PlacedSequences<'_> {
    /// The sequences, and whether there is no padding.
    fn checked(&self, picks: u64) -> Result<(Vec<PlacedSequence>, bool)> {
        let wrong = || Error::new(Kind::Argument, "sequences: expected ascending places and numbers of selected rows");
        let (n, mut end, mut dense) = (self.firsts.len(), 0, true);
        if self.counts.len() != n || self.places.len() != n {
            return Err(wrong());
        }
        let mut made = Vec::with_capacity(n);
        for ((first, count), place) in self.firsts.iter().zip(self.counts).zip(self.places) {
            let (Ok(first), Ok(count), Ok(place)) =
                (u64::try_from(*first), usize::try_from(*count), usize::try_from(*place))
            else {
                return Err(wrong());
            };
            let past = first.checked_add(count as u64).is_none_or(|last| last > picks);
            let after = place.checked_add(count).filter(|after| place >= end && *after <= self.items);
            let Some(after) = after.filter(|_| !past) else { return Err(wrong()) };
            dense &= place == end;
            end = after;
            made.push((first, count, place));
        }
        Ok((made, dense && end == self.items))
    }
}

/// Reads sequences into `out`; clears the padding. Returns the token of each item, -1 for padding.
pub fn read(stream: &Stream, placed: PlacedSequences<'_>, out: &mut [u8], watch: Watch<'_>) -> Result<Vec<i64>> {
    let Stream { rows, plan, convert } = stream;
    let per_item = plan.rows_per_item();
    let item = per_item * convert.to();
    let (sequences, dense) = placed.checked(plan.items())?;
    if plan.settings.interleaved || out.len() != placed.items.saturating_mul(item) {
        return Err(Error::new(Kind::Internal, "an output of another size than the sequences"));
    }
    let numbers: Vec<u64> = sequences.iter().flat_map(|(first, count, _)| *first..first + *count as u64).collect();
    let mut known = BatchItems::default();
    let fill = |from: u64, to: &mut [u64]| to.copy_from_slice(&numbers[from as usize..from as usize + to.len()]);
    known.extend(numbers.len(), false, (&fill, &|number| plan.item(number).ids()), &mut *watch)?;
    if dense {
        known.gather(0, (rows, plan, convert), out, &mut vec![], watch)?;
        return Ok(known.tokens);
    }
    let mut pieces = vec![];
    let (mut rest, mut at) = (out, 0);
    for (_, count, place) in &sequences {
        let (padding, others) = rest.split_at_mut((place - at) * item);
        padding.fill(0);
        let (mine, others) = others.split_at_mut(count * item);
        pieces.push(mine);
        (rest, at) = (others, place + count);
    }
    rest.fill(0);
    if let Some(cast) = convert.cast() {
        let places = pieces.into_iter().flat_map(|piece| piece.chunks_exact_mut(convert.to())).collect();
        known.gather_into(0, (rows, plan, cast), Out::Places(places), watch)?;
    } else {
        let dtype = rows.row().dtype;
        let mut stored: Vec<u8> = zeroed(numbers.len() * per_item * convert.from())?;
        known.gather_into(0, (rows, plan, Cast::between(dtype, dtype)?), Out::Dense(&mut stored), &mut *watch)?;
        let mut first = 0;
        for (piece, (_, count, _)) in pieces.into_iter().zip(&sequences) {
            let slots: Vec<u32> = (first..first + *count as u32).collect();
            convert_rows(convert, &stored, convert.from() * per_item, &slots, None, piece, &mut *watch)?;
            first += *count as u32;
        }
    }
    let mut tokens = vec![-1; placed.items];
    let mut from = 0;
    for (_, count, place) in sequences {
        tokens[place..place + count].copy_from_slice(&known.tokens[from..from + count]);
        from += count;
    }
    Ok(tokens)
}
