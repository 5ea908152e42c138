//! Quantises the float32 rows of a block, with all threads: spans of rows, one for each example and layer, in this order.
//!
//! Codes are int8. A row has `parts` scales, one for each of as many equal parts of its elements: those of its layer, or its own.
//! The errors are summed for each span alone, so that they do not depend on the block in which it is written.

use std::ops::Range;

use crate::error::{Error, Kind, Result};
use crate::kernels::quantise::{CodingLoss, Quantised};
use crate::kernels::scaled::{Product, ScaledCode};
use crate::memory;
use crate::threads::{self, Watch};

/// Bytes of rows that a thread takes at once.
const AT_ONCE: usize = 2 << 20;

/// The rows of a block.
#[derive(Clone, Copy, Debug)]
pub struct RowSpans<'a> {
    rows: &'a [u8],
    lengths: &'a [i64],
    layers: usize,
    width: usize,
    parts: usize,
}

/// A value that is not finite, or whose product would not be: its span, and its row in the span.
pub type RefusedRow = (usize, u64);

impl<'a> RowSpans<'a> {
    /// Rows of `width` float32 elements, little-endian, `lengths` of them for each example and layer.
    pub fn new(rows: &'a [u8], lengths: &'a [i64], layers: usize, width: usize, parts: usize) -> Result<RowSpans<'a>> {
        let refuse = |what: &str| Err(Error::new(Kind::Argument, what));
        if layers == 0
            || width == 0
            || parts == 0
            || !width.is_multiple_of(parts)
            || !lengths.len().is_multiple_of(layers)
        {
            return refuse("expected layers, a width, and a number of scales that divides it");
        }
        let row_bytes = width.saturating_mul(4);
        let total = lengths.iter().try_fold(0usize, |total, n| total.checked_add(usize::try_from(*n).ok()?));
        if total.and_then(|n| n.checked_mul(row_bytes)) != Some(rows.len()) {
            return refuse("rows: expected as many as their lengths");
        }
        Ok(RowSpans { rows, lengths, layers, width, parts })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows.len() / (4 * self.width)
    }

    /// How the rows of a span are coded. `own`: each has its own scales.
    fn coding(&self, tokens: usize, own: bool) -> Quantised {
        let (shape, per) = match self.parts {
            1 => ([tokens, 1, self.width], [own, false, false]),
            parts if parts == self.width => ([tokens, 1, self.width], [own, false, true]),
            parts => ([tokens, parts, self.width / parts], [own, true, false]),
        };
        Quantised { code: ScaledCode::I8, of: Product::F32, shape, per, joined: true }
    }

    /// Runs of spans of about [`AT_ONCE`] bytes, with their rows.
    fn runs(&self) -> Vec<(Range<usize>, Range<usize>)> {
        let (mut runs, mut first, mut begin, mut end) = (vec![], 0, 0, 0);
        for (span, rows) in self.lengths.iter().enumerate() {
            end += usize::try_from(*rows).unwrap_or_default();
            if (end - begin) * self.width * 4 >= AT_ONCE || span + 1 == self.lengths.len() {
                runs.push((first..span + 1, begin..end));
                (first, begin) = (span + 1, end);
            }
        }
        runs
    }

    /// Spans of a run: their numbers, rows in bytes, and lengths.
    fn spans(&self, run: &(Range<usize>, Range<usize>)) -> impl Iterator<Item = (usize, &'a [u8], usize)> + '_ {
        let mut begin = run.1.start;
        run.0.clone().map(move |span| {
            let rows = usize::try_from(self.lengths[span]).unwrap_or_default();
            let of_span = &self.rows[begin * self.width * 4..(begin + rows) * self.width * 4];
            begin += rows;
            (span, of_span, rows)
        })
    }

    /// Raises `largest`, `parts` numbers for each layer, to the largest finite magnitudes. Returns the first row with another value.
    pub fn raise(&self, largest: &mut [f32], watch: Watch<'_>) -> Result<Option<RefusedRow>> {
        if largest.len() != self.layers * self.parts {
            return Err(Error::new(Kind::Argument, "largest: expected a number for each scale of each layer"));
        }
        let run_of = |_: usize, run: (Range<usize>, Range<usize>), _: &threads::Stop| {
            let mut of_run: Vec<f32> = memory::zeroed(self.layers * self.parts)?;
            let mut odd = None;
            for (span, rows, tokens) in self.spans(&run) {
                let layer = span % self.layers;
                let of_layer = &mut of_run[layer * self.parts..(layer + 1) * self.parts];
                let row = self.coding(tokens, false).raise(rows, of_layer);
                odd = odd.or(row.map(|row| (span, self.token(row))));
            }
            Ok((of_run, odd))
        };
        let mut odd = None;
        for (of_run, found) in threads::map_each(self.runs(), &run_of, watch)? {
            for (to, x) in largest.iter_mut().zip(of_run) {
                *to = to.max(x);
            }
            odd = odd.or(found);
        }
        Ok(odd)
    }

    /// The token of a row of the kernel, which takes the parts of a token for rows.
    fn token(&self, row: u64) -> u64 {
        if self.parts == self.width { row } else { row / self.parts as u64 }
    }

    /// Fills codes with the scales of layers, `parts` for each. Returns the loss of each span, in which the refused row is a token.
    pub fn encode(&self, codes: &mut [u8], scales: &[f32], watch: Watch<'_>) -> Result<Vec<CodingLoss>> {
        if scales.len() != self.layers * self.parts {
            return Err(Error::new(Kind::Argument, "scales: expected those of each layer"));
        }
        self.each(
            codes,
            None,
            &|span, tokens, rows, codes, _| {
                let layer = span % self.layers;
                self.coding(tokens, false).encode(rows, codes, &scales[layer * self.parts..(layer + 1) * self.parts])
            },
            watch,
        )
    }

    /// As [`RowSpans::encode`], and fills `scales` with those of each row, `parts` for each.
    pub fn fill(&self, codes: &mut [u8], scales: &mut [f32], watch: Watch<'_>) -> Result<Vec<CodingLoss>> {
        if scales.len() != self.rows() * self.parts {
            return Err(Error::new(Kind::Argument, "scales: expected those of each row"));
        }
        self.each(
            codes,
            Some(scales),
            &|_, tokens, rows, codes, scales| self.coding(tokens, true).fill(rows, codes, scales),
            watch,
        )
    }

    fn each(
        &self,
        mut codes: &mut [u8],
        scales: Option<&mut [f32]>,
        code: &CodeSpan<'_>,
        watch: Watch<'_>,
    ) -> Result<Vec<CodingLoss>> {
        if codes.len() != self.rows.len() / 4 {
            return Err(Error::new(Kind::Argument, "codes: expected one for each element"));
        }
        let own = if scales.is_some() { self.parts } else { 0 };
        let mut scales = scales.unwrap_or_default();
        let mut parts = vec![];
        for run in self.runs() {
            let (of_run, after) = codes.split_at_mut((run.1.end - run.1.start) * self.width);
            let (own_of_run, own_after) = scales.split_at_mut((run.1.end - run.1.start) * own);
            (codes, scales) = (after, own_after);
            parts.push((run, of_run, own_of_run));
        }
        type RunPart<'b> = ((Range<usize>, Range<usize>), &'b mut [u8], &'b mut [f32]);
        let work = |_: usize, (run, mut codes, mut scales): RunPart<'_>, _: &threads::Stop| {
            let mut losses = memory::reserve(run.0.len() as u64)?;
            for (span, rows, tokens) in self.spans(&run) {
                let (of_span, after) = codes.split_at_mut(tokens * self.width);
                let (own_of_span, own_after) = scales.split_at_mut(tokens * own);
                (codes, scales) = (after, own_after);
                let mut lost = code(span, tokens, rows, of_span, own_of_span);
                lost.first_refused = lost.first_refused.map(|row| self.token(row));
                losses.push(lost);
            }
            Ok(losses)
        };
        Ok(threads::map_each(parts, &work, watch)?.into_iter().flatten().collect())
    }
}

/// Codes a span: its number, its tokens, rows, codes, and own scales.
type CodeSpan<'a> = dyn Fn(usize, usize, &[u8], &mut [u8], &mut [f32]) -> CodingLoss + Sync + 'a;

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// For all kinds of scales: those of layers and rows, and codes, are those of plain loops; spans are cut anywhere.
        #[test]
        fn spans_are_coded_as_by_plain_loops(
            lengths in prop::collection::vec(0i64..4, 6),
            parts in prop::sample::select(vec![1usize, 2, 3, 6]),
            values in prop::collection::vec(-1e3f32..1e3, 18 * 6),
        ) {
            let (layers, width) = (2, 6);
            let rows: usize = lengths.iter().map(|n| *n as usize).sum();
            let values = &values[..rows * width];
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let spans = RowSpans::new(&bytes, &lengths, layers, width, parts).unwrap();
            let layer_of: Vec<usize> = lengths.iter().enumerate()
                .flat_map(|(span, n)| std::iter::repeat_n(span % layers, *n as usize)).collect();
            let mut of_layers = vec![0f32; layers * parts];
            let mut of_rows = vec![0f32; rows * parts];
            for (i, v) in values.iter().enumerate() {
                let part = i % width / (width / parts);
                for to in [&mut of_layers[layer_of[i / width] * parts + part], &mut of_rows[i / width * parts + part]] {
                    *to = to.max(v.abs());
                }
            }
            let mut found = vec![0f32; layers * parts];
            prop_assert_eq!(spans.raise(&mut found, &mut || false).unwrap(), None);
            prop_assert_eq!(&found, &of_layers);
            for scale in of_layers.iter_mut().chain(&mut of_rows) {
                *scale = (*scale / 127.0).max(1e-12);
            }
            let (mut codes, mut own) = (vec![9; rows * width], vec![0f32; rows * parts]);
            let coded = |i: usize, scale: f32| (values[i] / scale).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
            let losses = spans.encode(&mut codes, &of_layers, &mut || false).unwrap();
            prop_assert_eq!(losses.len(), lengths.len());
            for (i, code) in codes.iter().enumerate() {
                prop_assert_eq!(*code, coded(i, of_layers[layer_of[i / width] * parts + i % width / (width / parts)]));
            }
            spans.fill(&mut codes, &mut own, &mut || false).unwrap();
            prop_assert_eq!(&own, &of_rows);
            for (i, code) in codes.iter().enumerate() {
                prop_assert_eq!(*code, coded(i, of_rows[i / width * parts + i % width / (width / parts)]));
            }
        }
    }

    #[test]
    fn values_that_are_not_finite_are_named_by_span_and_token() {
        let mut values = [1f32; 5 * 4];
        values[3 * 4 + 1] = f32::NAN;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        for parts in [1, 2, 4] {
            let spans = RowSpans::new(&bytes, &[2, 3], 1, 4, parts).unwrap();
            let mut largest = vec![0f32; parts];
            assert_eq!(spans.raise(&mut largest, &mut || false).unwrap(), Some((1, 1)), "{parts}");
            assert_eq!(largest, vec![1f32; parts]);
            let losses = spans.encode(&mut [0; 20], &largest, &mut || false).unwrap();
            assert_eq!(
                losses.iter().map(|lost| (lost.refused, lost.first_refused)).collect::<Vec<_>>(),
                [(0, None), (1, Some(1))]
            );
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        for (bytes, lengths, layers, width, parts) in [
            (16, &[1][..], 1, 4, 3),
            (12, &[1], 1, 4, 1),
            (16, &[-1, 2], 1, 4, 1),
            (16, &[1], 2, 4, 1),
            (0, &[], 0, 4, 1),
        ] {
            assert_eq!(RowSpans::new(&vec![0; bytes], lengths, layers, width, parts).unwrap_err().kind, Kind::Argument);
        }
        let rows = [0; 16];
        let spans = RowSpans::new(&rows, &[1], 1, 4, 1).unwrap();
        assert!(spans.encode(&mut [0; 3], &[1.0], &mut || false).is_err());
        assert!(spans.encode(&mut [0; 4], &[1.0, 2.0], &mut || false).is_err());
        assert!(
            spans.fill(&mut [0; 4], &mut [], &mut || false).is_err() && spans.raise(&mut [], &mut || false).is_err()
        );
    }
}
