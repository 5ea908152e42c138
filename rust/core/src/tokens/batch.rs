//! Batches of training examples: tokens, loss weights and segment ids, written to the caller's memory.
//!
//! `formats/levanter.md` 3 describes how Levanter makes windows and packs. Examples are filled in cache order, for any
//! requested order: a block that two of them need is decoded once, and a cold disk is read sequentially.

use std::sync::Arc;

use super::array::StagedFiles;
use super::jagged::{Cursor, ElementRange, Field};
use crate::error::{Error, Kind, Result};
use crate::threads::{self, Stop, Watch};

/// Elements of the smallest batch that several threads fill: where ranges are decoded or fetched, and where they are only copied.
/// To wake a thread and wait for it takes as long as to copy some megabytes, on a busy machine.
const DECODED_FROM: usize = 64 << 10;
const COPIED_FROM: usize = 2 << 20;

/// Memory of a batch: `length` elements per example in each array.
#[derive(Debug)]
pub struct TokenBatch<'a> {
    /// Elements per example.
    pub length: usize,
    /// Tokens.
    pub tokens: &'a mut [i32],
    /// Loss weights at the predicting positions, if requested.
    pub weights: Option<&'a mut [f32]>,
    /// The document of each position, if requested.
    pub segments: Option<&'a mut [i32]>,
}

/// The loss weights.
#[derive(Clone, Copy, Debug)]
pub enum Loss<'a> {
    /// 1 at every position that predicts a token.
    All,
    /// The values of this field.
    Weights(&'a Field),
    /// 1 where the next token is marked in this field.
    Mask(&'a Field),
}

/// Memory of one example.
struct Example<'a> {
    number: usize,
    tokens: &'a mut [i32],
    weights: Option<&'a mut [f32]>,
    segments: Option<&'a mut [i32]>,
}

impl<'a> TokenBatch<'a> {
    fn examples(self) -> Result<Vec<Example<'a>>> {
        let length = self.length.max(1);
        let n = self.tokens.len() / length;
        let fits = self.tokens.len() == n * length
            && self.weights.as_ref().is_none_or(|w| w.len() == n * length)
            && self.segments.as_ref().is_none_or(|s| s.len() == n * length);
        if !fits {
            return Err(Error::new(Kind::Internal, "a batch whose memory has other sizes"));
        }
        let mut weights = self.weights.map(|w| w.chunks_exact_mut(length));
        let mut segments = self.segments.map(|s| s.chunks_exact_mut(length));
        let each = self.tokens.chunks_exact_mut(length).enumerate().map(|(number, tokens)| Example {
            number,
            tokens,
            weights: weights.as_mut().and_then(Iterator::next),
            segments: segments.as_mut().and_then(Iterator::next),
        });
        Ok(each.collect())
    }
}

/// State of a thread between examples.
#[derive(Debug, Default)]
struct Cursors {
    bounds: Vec<u64>,
    tokens: Cursor,
    loss: Cursor,
}

/// Fetches the data of the first items from a slow store; returns the number of these items, at least one.
type StageItems<'a, T> = &'a dyn Fn(&[T], &mut StagedFiles, Watch<'_>) -> Result<usize>;

/// Runs `work` for each item, sorted by place, on as many threads as the size justifies. `stage` is given for fields in a
/// slow store.
fn in_order<T: Send>(
    mut items: Vec<T>,
    elements: usize,
    place: impl Fn(&T) -> u64 + Sync,
    shared_from: usize,
    (ahead, stage): (Option<&Field>, Option<StageItems<'_, T>>),
    work: &(dyn Fn(&mut T, &mut Cursors) -> Result<()> + Sync),
    watch: Watch<'_>,
) -> Result<()> {
    items.sort_by_key(|item| place(item));
    let count = items.len().max(1);
    let typical = elements / count;
    let mut rest = &mut items[..];
    while !rest.is_empty() {
        let mut fetched = StagedFiles::default();
        let taken = stage.map_or(Ok(rest.len()), |stage| stage(rest, &mut fetched, &mut *watch))?;
        let taken = taken.clamp(1, rest.len());
        let (some, others) = std::mem::take(&mut rest).split_at_mut(taken);
        rest = others;
        let fetched = stage.map(|_| Arc::new(fetched));
        let mine = elements as u128 * some.len() as u128 / count as u128;
        let shared = mine >= shared_from as u128 && threads::are_free();
        let parts = if shared { threads::num_threads() * 4 } else { 1 };
        let per_part = some.len().div_ceil(parts.min(some.len()).max(1)).max(1);
        let one = |_: usize, chunk: &mut [T], stop: &Stop| {
            let mut scratch = fetched.as_ref().map_or_else(Cursors::default, Cursors::over);
            for at in 0..chunk.len() {
                stop.check()?;
                // The first misses of the next window overlap with the copy of this one.
                if let (Some(field), Some(next)) = (ahead, chunk.get(at + 1)) {
                    field.prefetch(&scratch.tokens, place(next), typical);
                }
                work(&mut chunk[at], &mut scratch)?;
            }
            Ok(())
        };
        threads::for_each(some.chunks_mut(per_part), &one, &mut *watch)?;
    }
    Ok(())
}

impl Cursors {
    fn over(fetched: &Arc<StagedFiles>) -> Cursors {
        Cursors { bounds: vec![], tokens: Cursor::over(fetched), loss: Cursor::over(fetched) }
    }
}

/// Size of the sample that decides whether to hint; like the gather's, see [`crate::source::scout`].
const SAMPLES: usize = 2;

/// Sends read-ahead hints for all ranges if some are not cached. A hint costs as much as copying a window, so a sample of the
/// ranges is checked first. Returns the elements from which several threads are worth it.
fn hint<'a>(field: &Field, ranges: impl ExactSizeIterator<Item = (u64, usize)> + Clone + 'a) -> usize {
    if field.wishes().is_some() {
        return DECODED_FROM;
    }
    let mut cursor = Cursor::default();
    let step = ranges.len().div_ceil(SAMPLES).max(1);
    let mut sample = ranges.clone().step_by(step);
    if sample.any(|(start, n)| field.is_doubtful(&mut cursor, start, n)) {
        for (start, n) in ranges {
            field.will_need(&mut cursor, start, n);
        }
        return DECODED_FROM;
    }
    let is_plain = ranges.step_by(step).all(|(start, n)| field.is_plain(&mut cursor, start, n));
    if is_plain { COPIED_FROM } else { DECODED_FROM }
}

/// Examples that begin at `starts`, regardless of documents; `eos` ends a document in the segment ids.
pub fn windows(
    field: &Field,
    starts: &[u64],
    loss: Loss<'_>,
    eos: Option<i64>,
    batch: TokenBatch<'_>,
    watch: Watch<'_>,
) -> Result<()> {
    let elements = batch.tokens.len();
    let length = batch.length;
    let examples = batch.examples()?;
    if examples.len() != starts.len() {
        return Err(Error::new(Kind::Internal, "expected one start per example"));
    }
    let shared_from = hint(field, starts.iter().map(|s| (*s, length)));
    let with_weights = examples.iter().any(|example| example.weights.is_some());
    let fill = |example: &mut Example<'_>, scratch: &mut Cursors| {
        let start = starts[example.number];
        field.int32(&mut scratch.tokens, start, example.tokens)?;
        if let Some(weights) = &mut example.weights {
            match loss {
                Loss::Weights(stored) => stored.float32(&mut scratch.loss, start, weights)?,
                Loss::All | Loss::Mask(_) => weights.fill(1.0),
            }
            if let Some(last) = weights.last_mut() {
                *last *= 0.0;
            }
        }
        if let Some(segments) = &mut example.segments {
            let mut segment = 0;
            for (to, token) in segments.iter_mut().zip(example.tokens.iter()) {
                *to = segment;
                segment += i32::from(Some(i64::from(*token)) == eos);
            }
        }
        Ok(())
    };
    let wishes = field.wishes();
    let stage = |examples: &[Example<'_>], staged: &mut StagedFiles, watch: Watch<'_>| {
        let Some(wishes) = &wishes else { return Ok(examples.len()) };
        let needed: Vec<(u64, usize)> = examples.iter().map(|e| (starts[e.number], length)).collect();
        let taken = field.stage(&needed, wishes, staged, &mut *watch)?;
        match loss {
            Loss::Weights(stored) if with_weights => stored.stage(&needed[..taken], wishes, staged, watch),
            _ => Ok(taken),
        }
    };
    let stage: StageItems<'_, _> = &stage;
    in_order(examples, elements, |e| starts[e.number], shared_from, (Some(field), wishes.map(|_| stage)), &fill, watch)
}

/// How packs become examples.
#[derive(Clone, Copy, Debug)]
pub struct Packing<'a> {
    /// The field of tokens.
    pub tokens: &'a Field,
    /// The loss weights.
    pub loss: Loss<'a>,
    /// Whether a document longer than an example keeps its end instead of its beginning.
    pub right: bool,
    /// Whether padding, and the position before it, get weight 0.
    pub mask_padding: bool,
}

/// Examples of whole documents: `packs` has the first document and one past the last of each.
pub fn packed(packing: Packing<'_>, packs: &[[u64; 2]], batch: TokenBatch<'_>, watch: Watch<'_>) -> Result<()> {
    let elements = batch.tokens.len();
    let examples = batch.examples()?;
    if examples.len() != packs.len() {
        return Err(Error::new(Kind::Internal, "expected one pack per example"));
    }
    let fill =
        |example: &mut Example<'_>, scratch: &mut Cursors| fill_pack(packing, packs[example.number], example, scratch);
    let with_weights = examples.iter().any(|example| example.weights.is_some());
    let fields = match packing.loss {
        Loss::Weights(field) | Loss::Mask(field) if with_weights => vec![packing.tokens, field],
        _ => vec![packing.tokens],
    };
    let wishes = packing.tokens.wishes();
    let stage = |examples: &[Example<'_>], staged: &mut StagedFiles, watch: Watch<'_>| {
        let Some(wishes) = &wishes else { return Ok(examples.len()) };
        let rows = |[first, end]: [u64; 2]| (first, end.saturating_sub(first) as usize);
        let rows: Vec<(u64, usize)> = examples.iter().map(|e| rows(packs[e.number])).collect();
        let mut taken = rows.len();
        for field in &fields {
            taken = field.stage_bounds(&rows[..taken], wishes, staged, &mut *watch)?;
        }
        // The positions of their elements are in memory now.
        let mut bounds = vec![];
        for field in &fields {
            let mut cursor = Cursor::over(&Arc::new(staged.clone()));
            let each = examples[..taken].iter().map(|e| {
                let (pack, length) = (packs[e.number], e.tokens.len());
                taken_of(field, &mut cursor, pack, length, packing.right, &mut bounds)
            });
            let needed = each.collect::<Result<Vec<_>>>()?;
            taken = field.stage(&needed, wishes, staged, &mut *watch)?;
        }
        Ok(taken)
    };
    let stage: StageItems<'_, _> = &stage;
    in_order(examples, elements, |e| packs[e.number][0], DECODED_FROM, (None, wishes.map(|_| stage)), &fill, watch)
}

/// The start and length of an example's range in a field.
fn taken_of(
    field: &Field,
    cursor: &mut Cursor,
    pack: [u64; 2],
    length: usize,
    right: bool,
    bounds: &mut Vec<u64>,
) -> Result<(u64, usize)> {
    let rows =
        pack[1].checked_sub(pack[0]).ok_or_else(|| Error::new(Kind::Argument, "a pack that ends before it begins"))?;
    field.bounds_into(cursor, pack[0], rows as usize, bounds)?;
    let (start, end) = (bounds[0], bounds[bounds.len() - 1]);
    let n = ((end - start) as usize).min(length);
    Ok((if right { end - n as u64 } else { start }, n))
}

fn fill_pack(packing: Packing<'_>, pack: [u64; 2], example: &mut Example<'_>, scratch: &mut Cursors) -> Result<()> {
    let Cursors { bounds, tokens, loss } = scratch;
    let length = example.tokens.len();
    if let (Some(weights), Loss::Weights(field) | Loss::Mask(field)) = (&mut example.weights, packing.loss) {
        let (start, n) = taken_of(field, loss, pack, length, packing.right, bounds)?;
        field.float32(loss, start, &mut weights[..n])?;
        weights[n..].fill(0.0);
        if let Loss::Mask(_) = packing.loss {
            weights.rotate_left(1);
        }
    }
    let (start, n) = taken_of(packing.tokens, tokens, pack, length, packing.right, bounds)?;
    packing.tokens.int32(tokens, start, &mut example.tokens[..n])?;
    example.tokens[n..].fill(0);
    if let Some(weights) = &mut example.weights {
        if let Loss::All = packing.loss {
            weights.fill(1.0);
        }
        if let Some(last) = weights.last_mut() {
            *last *= 0.0;
        }
        if packing.mask_padding {
            for weight in &mut weights[n.saturating_sub(1)..] {
                *weight *= 0.0;
            }
        }
    }
    if let Some(segments) = &mut example.segments {
        segments[n..].fill(-1);
        let first = i32::try_from(pack[0]).ok().filter(|_| i32::try_from(pack[1]).is_ok());
        let first = first.ok_or_else(|| {
            Error::new(Kind::Unsupported, "segment ids are 32-bit row numbers; expected fewer than 2^31 rows")
        })?;
        for (row, pair) in (first..).zip(bounds.windows(2)) {
            // Only an example of a single row can begin within it.
            let from = (pair[0].max(start) - start) as usize;
            let to = (pair[1].max(start) - start) as usize;
            segments[from.min(n)..to.min(n)].fill(row);
        }
    }
    Ok(())
}

/// Copies ranges one after another, in the stored dtype.
pub fn ranges(field: &Field, ranges: &[ElementRange], out: &mut [u8], watch: Watch<'_>) -> Result<()> {
    let item = field.dtype().size().unwrap_or(1);
    let mut rest = out;
    let mut items: Vec<(ElementRange, &mut [u8])> = Vec::with_capacity(ranges.len());
    for range in ranges {
        let Some((mine, others)) = rest.split_at_mut_checked(range.len() * item) else {
            return Err(Error::new(Kind::Internal, "less memory than the ranges need"));
        };
        items.push((*range, mine));
        rest = others;
    }
    let shared_from = hint(field, ranges.iter().map(|r| (r.start, r.len())));
    let elements = ranges.iter().map(ElementRange::len).sum();
    let fill = |item: &mut (ElementRange, &mut [u8]), scratch: &mut Cursors| {
        field.copy(&mut scratch.tokens, item.0.start, item.1)
    };
    let wishes = field.wishes();
    let stage = |items: &[(ElementRange, &mut [u8])], staged: &mut StagedFiles, watch: Watch<'_>| {
        let needed: Vec<(u64, usize)> = items.iter().map(|(range, _)| (range.start, range.len())).collect();
        wishes.as_ref().map_or(Ok(items.len()), |wishes| field.stage(&needed, wishes, staged, watch))
    };
    let stage: StageItems<'_, _> = &stage;
    in_order(items, elements, |i| i.0.start, shared_from, (Some(field), wishes.map(|_| stage)), &fill, watch)
}

/// The ranges of rows, in the given order.
pub fn row_ranges(field: &Field, rows: &[u64], watch: Watch<'_>) -> Result<Vec<ElementRange>> {
    let mut made = vec![ElementRange { start: 0, end: 0 }; rows.len()];
    let items: Vec<(u64, &mut ElementRange)> = rows.iter().copied().zip(&mut made).collect();
    let fill = |(row, to): &mut (u64, &mut ElementRange), scratch: &mut Cursors| {
        field.bounds_into(&mut scratch.tokens, *row, 1, &mut scratch.bounds)?;
        **to = ElementRange { start: scratch.bounds[0], end: scratch.bounds[1] };
        Ok(())
    };
    let Some(wishes) = field.wishes() else {
        let mut scratch = Cursors::default();
        items.into_iter().try_for_each(|mut item| fill(&mut item, &mut scratch))?;
        return Ok(made);
    };
    let stage = |items: &[(u64, &mut ElementRange)], staged: &mut StagedFiles, watch: Watch<'_>| {
        let needed: Vec<(u64, usize)> = items.iter().map(|(row, _)| (*row, 1)).collect();
        field.stage_bounds(&needed, &wishes, staged, watch)
    };
    let stage: StageItems<'_, _> = &stage;
    in_order(items, rows.len(), |item| item.0, DECODED_FROM, (None, Some(stage)), &fill, watch)?;
    Ok(made)
}

/// Rows whose bounds are fetched together from a slow store.
const FETCHED: usize = 1 << 18;

/// [`Field::bounds_into`], with the bounds of many rows of a slow store fetched together.
pub fn bounds_into(
    field: &Field,
    cursor: &mut Cursor,
    (first, n): (u64, usize),
    out: &mut Vec<u64>,
    watch: Watch<'_>,
) -> Result<()> {
    let Some(wishes) = field.wishes().filter(|_| n > 1) else { return field.bounds_into(cursor, first, n, out) };
    let end = first.checked_add(n as u64).filter(|end| *end <= field.num_rows());
    if end.is_none() {
        return field.bounds_into(cursor, first, n, out); // its error
    }
    let no_memory = |_| Error::new(Kind::NoMemory, format!("no memory for the bounds of {n} rows; read fewer at once"));
    out.clear();
    out.try_reserve(n + 1).map_err(no_memory)?;
    out.resize(n + 1, 0);
    // The first piece also has the start of its first row.
    let (head, rest) = out.split_at_mut(n.min(FETCHED) + 1);
    let mut items: Vec<(u64, usize, &mut [u64])> = vec![(first, head.len() - 1, head)];
    for (i, piece) in rest.chunks_mut(FETCHED).enumerate() {
        items.push((first + ((i + 1) * FETCHED) as u64, piece.len(), piece));
    }
    let fill = |(row, n, to): &mut (u64, usize, &mut [u64]), scratch: &mut Cursors| {
        field.bounds_into(&mut scratch.tokens, *row, *n, &mut scratch.bounds)?;
        to.copy_from_slice(&scratch.bounds[*n + 1 - to.len()..]);
        Ok(())
    };
    let stage = |items: &[(u64, usize, &mut [u64])], staged: &mut StagedFiles, watch: Watch<'_>| {
        let needed: Vec<(u64, usize)> = items.iter().map(|(row, n, _)| (*row, *n)).collect();
        field.stage_bounds(&needed, &wishes, staged, watch)
    };
    let stage: StageItems<'_, _> = &stage;
    in_order(items, n, |item| item.0, DECODED_FROM, (None, Some(stage)), &fill, watch)
}

/// Writes the lengths of the runs of equal segment ids in each example, padding included, and their number; each example has
/// space for `most` lengths.
pub fn run_lengths(
    segments: &[i32],
    length: usize,
    most: usize,
    lengths: &mut [i32],
    counts: &mut [i32],
) -> Result<()> {
    let examples = segments.chunks_exact(length.max(1)).zip(lengths.chunks_exact_mut(most.max(1))).zip(counts);
    for (number, ((segments, lengths), count)) in examples.enumerate() {
        lengths.fill(0);
        let mut runs = 0;
        for run in segments.chunk_by(|a, b| a == b) {
            let Some(to) = lengths.get_mut(runs) else {
                return Err(Error::new(
                    Kind::Argument,
                    format!("example {number} of the batch has more than {most} runs of equal segment ids"),
                ));
            };
            *to = run.len() as i32;
            runs += 1;
        }
        *count = runs as i32;
    }
    Ok(())
}
