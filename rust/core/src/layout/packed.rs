//! Addresses of examples, packed in blocks of 64 examples.
//!
//! An example is a *body*, at most one run of consecutive rows, and optionally a *tail*: one more row, of the last
//! token, stored elsewhere. In most datasets bodies follow each other in a shard, and so do tails. Each block has the
//! smallest form that its examples allow:
//!
//! | form | words of 4 bytes for an example |
//! |---|---|
//! | bodies back to back, tails back to back, all bodies equally long | 0 |
//! | the same, bodies of any length | 1: where the body begins, relative to the block's first |
//! | one body anywhere, perhaps a tail anywhere | 2, 2 more with a tail, 1 more unless all bodies are equally long |
//! | any runs | 5, and 3 per run or 2 per token, whichever is less |
//!
//! Shard and row are one number, `shard << 40 | row`, so that the row after the last of a shard is no special case. A lookup
//! touches one block, and one place in `words` unless all bodies are equally long.

use super::Address;
use crate::number::to_usize;

/// Examples per block.
const BLOCK: usize = 64;
/// Bits of a row's number; the shard's are above.
pub const ROW_BITS: u32 = 40;
/// Words of an example in a block of any runs, without its runs: tokens, the last token's address, the start of its
/// runs.
const HEAD: usize = 5;
/// A flag in the start of an example's runs: they are one address per token.
const FLAT: u64 = 1 << 63;

/// A shard, and a row in it.
pub type At = u64;

/// Consecutive rows, starting at this token of an example.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenRun {
    /// The first token.
    pub token: u32,
    /// Its row.
    pub at: At,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BlockForm {
    BackToBack,
    Anywhere,
    Runs,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    /// The first body.
    body: At,
    /// The first tail.
    tail: At,
    /// Where its words begin.
    words: u64,
    /// Rows of each body, if `even`.
    length: u32,
    form: BlockForm,
    even: bool,
    tailed: bool,
}

/// An example's addresses.
#[derive(Clone, Copy, Debug)]
pub struct ExampleAddresses<'a> {
    /// Number of tokens.
    pub tokens: u64,
    /// The row of the last token.
    pub last: At,
    rows: ExampleRows<'a>,
}

#[derive(Clone, Copy, Debug)]
enum ExampleRows<'a> {
    /// All tokens, or all but the last: this many rows, from here on.
    Body(At, u64),
    /// Token and address of each run.
    Runs(&'a [u32]),
    /// The address of each token.
    Flat(&'a [u32]),
}

impl ExampleAddresses<'_> {
    /// The row of a token, which is below `tokens`.
    #[inline]
    pub fn locate(&self, token: u64) -> At {
        match self.rows {
            ExampleRows::Body(body, rows) if token < rows => body + token,
            ExampleRows::Body(..) => self.last,
            ExampleRows::Flat(words) => wide(words, to_usize(token) * 2),
            ExampleRows::Runs(words) => {
                // The first run starts at token 0, so at least one run starts at or before any token.
                let (mut low, mut high) = (0, words.len() / 3);
                while high - low > 1 {
                    let middle = usize::midpoint(low, high);
                    if u64::from(words[middle * 3]) <= token { low = middle } else { high = middle }
                }
                wide(words, low * 3 + 1) + (token - u64::from(words[low * 3]))
            }
        }
    }

    /// Calls `each` with the first row and the number of rows of each run, in token order.
    pub fn runs(&self, each: &mut dyn FnMut(At, u64)) {
        let mut run: Option<(At, u64)> = None;
        let mut add = |at: At, rows: u64| match &mut run {
            Some((first, before)) if *first + *before == at && *first >> ROW_BITS == at >> ROW_BITS => *before += rows,
            _ => {
                if let Some((first, before)) = run.replace((at, rows)) {
                    each(first, before);
                }
            }
        };
        match self.rows {
            ExampleRows::Body(body, rows) => {
                if rows > 0 {
                    add(body, rows);
                }
                if rows < self.tokens {
                    add(self.last, 1);
                }
            }
            ExampleRows::Flat(words) => (0..words.len() / 2).for_each(|i| add(wide(words, i * 2), 1)),
            ExampleRows::Runs(words) => {
                for (i, run) in words.chunks_exact(3).enumerate() {
                    let end = words.get(i * 3 + 3).map_or(self.tokens, |token| u64::from(*token));
                    add(wide(run, 1), end - u64::from(run[0]));
                }
            }
        }
        if let Some((first, rows)) = run {
            each(first, rows);
        }
    }
}

/// A row's number and its shard.
pub fn address(at: At) -> Address {
    Address { file: at >> ROW_BITS, row: at & ((1 << ROW_BITS) - 1) }
}

fn wide(words: &[u32], at: usize) -> u64 {
    u64::from(words[at]) | u64::from(words[at + 1]) << 32
}

fn push_wide(words: &mut Vec<u32>, value: u64) {
    #[expect(clippy::cast_possible_truncation, reason = "the lower half, and the upper half")]
    words.extend([value as u32, (value >> 32) as u32]);
}

/// Packed examples, and examples of a block that is not full yet.
#[derive(Debug, Default)]
pub struct Packed {
    blocks: Vec<Block>,
    words: Vec<u32>,
    examples: usize,
    waiting: Waiting,
}

/// Examples of the block that is being filled.
#[derive(Debug, Default)]
struct Waiting {
    tokens: Vec<u32>,
    last: Vec<At>,
    /// Where the runs of each example end.
    ends: Vec<usize>,
    runs: Vec<TokenRun>,
}

impl Packed {
    /// Number of examples.
    pub fn len(&self) -> usize {
        self.examples
    }

    /// Bytes of memory in use.
    pub fn bytes(&self) -> usize {
        self.blocks.len() * size_of::<Block>() + self.words.len() * size_of::<u32>()
    }

    /// Appends an example: its number of tokens, the address of the last one, and maximal runs for all of them.
    pub fn push(&mut self, tokens: u32, last: At, runs: impl IntoIterator<Item = TokenRun>) {
        let waiting = &mut self.waiting;
        waiting.tokens.push(tokens);
        waiting.last.push(last);
        waiting.runs.extend(runs);
        waiting.ends.push(waiting.runs.len());
        self.examples += 1;
        if waiting.tokens.len() == BLOCK {
            self.pack();
        }
    }

    /// Packs the last examples. Nothing can be found before, or pushed after.
    pub fn finish(&mut self) {
        if !self.waiting.tokens.is_empty() {
            self.pack();
        }
        self.waiting = Waiting::default();
        self.blocks.shrink_to_fit();
        self.words.shrink_to_fit();
    }

    fn pack(&mut self) {
        let Packed { blocks, words, waiting, .. } = self;
        blocks.push(waiting.pack(words));
        waiting.tokens.clear();
        waiting.last.clear();
        waiting.ends.clear();
        waiting.runs.clear();
    }

    /// An example, which is below `len`.
    #[inline]
    pub fn get(&self, example: usize) -> ExampleAddresses<'_> {
        let (block, i) = (&self.blocks[example / BLOCK], example % BLOCK);
        let words = &self.words[to_usize(block.words)..];
        let (body, length, tail) = match block.form {
            BlockForm::BackToBack if block.even => {
                (block.body + i as u64 * u64::from(block.length), block.length, block.tail + i as u64)
            }
            BlockForm::BackToBack => (block.body + u64::from(words[i]), words[i + 1] - words[i], block.tail + i as u64),
            BlockForm::Anywhere => {
                let words = &words[i * anywhere(block.even, block.tailed)..];
                let tail = if block.tailed { wide(words, 2) } else { 0 };
                let length = if block.even { block.length } else { words[if block.tailed { 4 } else { 2 }] };
                (wide(words, 0), length, tail)
            }
            BlockForm::Runs => return runs_of(words, i),
        };
        let length = u64::from(length);
        let (tokens, last) = if block.tailed { (length + 1, tail) } else { (length, body + length - 1) };
        ExampleAddresses { tokens, last, rows: ExampleRows::Body(body, length) }
    }
}

/// Words of an example of the form `Anywhere`.
fn anywhere(even: bool, tailed: bool) -> usize {
    2 + 2 * usize::from(tailed) + usize::from(!even)
}

fn runs_of(words: &[u32], i: usize) -> ExampleAddresses<'_> {
    let head = &words[i * HEAD..];
    let (start, end) = (wide(head, 3), wide(head, 3 + HEAD));
    let list = &words[(start & !FLAT) as usize..(end & !FLAT) as usize];
    let rows = if start & FLAT != 0 { ExampleRows::Flat(list) } else { ExampleRows::Runs(list) };
    ExampleAddresses { tokens: u64::from(head[0]), last: wide(head, 1), rows }
}

impl Waiting {
    fn runs(&self, i: usize) -> &[TokenRun] {
        &self.runs[i.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[i]]
    }

    /// The body of an example: with `tailed`, its last token is left out. `None` if it has other runs, or if the list of
    /// tokens does not end with the last token's own address.
    fn body(&self, i: usize, tailed: bool) -> Option<(At, u32)> {
        let rows = self.tokens[i].checked_sub(u32::from(tailed))?;
        let (first, tail) = match *self.runs(i) {
            [body] => (body.at, body.at + u64::from(self.tokens[i]) - 1),
            [body, tail] if tailed && tail.token == rows => (body.at, tail.at),
            _ => return None,
        };
        (tail == self.last[i]).then_some((first, rows))
    }

    fn pack(&self, words: &mut Vec<u32>) -> Block {
        let n = self.tokens.len();
        let bodies = |tailed| (0..n).map(|i| self.body(i, tailed)).collect::<Option<Vec<_>>>().map(|b| (tailed, b));
        let at = words.len() as u64;
        let Some((tailed, bodies)) = bodies(false).or_else(|| bodies(true)) else {
            self.pack_runs(words);
            return Block { body: 0, tail: 0, words: at, length: 0, form: BlockForm::Runs, even: false, tailed: false };
        };
        let length = bodies[0].1;
        let even = bodies.iter().all(|(_, rows)| *rows == length);
        let first = bodies.iter().find(|(_, rows)| *rows > 0).map_or(0, |(body, _)| *body);
        let tails = !tailed || (0..n).all(|i| self.last[i] == self.last[0] + i as u64);
        let form = match starts(first, &bodies) {
            Some(starts) if tails => {
                words.extend(starts.into_iter().filter(|_| !even));
                BlockForm::BackToBack
            }
            _ => {
                for (i, (body, rows)) in bodies.iter().enumerate() {
                    push_wide(words, *body);
                    if tailed {
                        push_wide(words, self.last[i]);
                    }
                    words.extend((!even).then_some(*rows));
                }
                BlockForm::Anywhere
            }
        };
        Block { body: first, tail: self.last[0], words: at, length, form, even, tailed }
    }

    fn pack_runs(&self, words: &mut Vec<u32>) {
        let n = self.tokens.len();
        let mut start = (n * HEAD + HEAD) as u64;
        let is_flat = |i: usize| self.tokens[i] as usize * 2 < self.runs(i).len() * 3;
        for i in 0..n {
            words.push(self.tokens[i]);
            push_wide(words, self.last[i]);
            push_wide(words, if is_flat(i) { start | FLAT } else { start });
            start += if is_flat(i) { u64::from(self.tokens[i]) * 2 } else { self.runs(i).len() as u64 * 3 };
        }
        words.extend([0; 3]);
        push_wide(words, start);
        for i in 0..n {
            let runs = self.runs(i);
            let ends = runs.iter().skip(1).map(|run| run.token).chain([self.tokens[i]]);
            for (run, end) in runs.iter().zip(ends) {
                if is_flat(i) {
                    (0..u64::from(end - run.token)).for_each(|t| push_wide(words, run.at + t));
                } else {
                    words.push(run.token);
                    push_wide(words, run.at);
                }
            }
        }
    }
}

/// The starts of consecutive bodies and the end of the last one, relative to `first`; `None` if the bodies are not
/// consecutive, or too far apart for 32 bits.
fn starts(first: At, bodies: &[(At, u32)]) -> Option<Vec<u32>> {
    let mut starts = vec![0u32];
    let mut end = 0u32;
    for (body, rows) in bodies {
        if *rows > 0 && *body != first + u64::from(end) {
            return None;
        }
        end = end.checked_add(*rows)?;
        starts.push(end);
    }
    Some(starts)
}
