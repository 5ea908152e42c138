//! Arrays of one file that are one array, joined along an axis, such as the hidden states of each step of a generation.
//!
//! Shapes come from an untrusted file: arrays may share bytes, so that their elements are more than the file stores.

use super::arrays::{self, ArrayPlace};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::Source;
use crate::threads::Context;

/// Joined arrays may have this many bytes, or 64 times those of their file.
const ALWAYS: u64 = 64 << 20;

/// Arrays joined along an axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PieceList {
    axis: usize,
    shape: Vec<u64>,
    pieces: Vec<ArrayPlace>,
}

impl PieceList {
    /// Checks that arrays have one element type, and shapes that only differ along the axis.
    pub fn new(axis: usize, pieces: Vec<ArrayPlace>) -> Result<PieceList> {
        let wrong = |detail: String| Error::new(Kind::Format, detail);
        let Some(first) = pieces.first() else {
            return Err(wrong("expected arrays to join, found nothing".to_string()));
        };
        if axis >= first.shape.len() {
            return Err(wrong(format!("axis {axis}: expected more axes, found the shape {:?}", first.shape)));
        }
        let mut shape = first.shape.clone();
        shape[axis] = 0;
        for piece in &pieces {
            let along = piece.shape.get(axis).copied().unwrap_or(0);
            let mut others = piece.shape.clone();
            if let Some(n) = others.get_mut(axis) {
                *n = shape[axis];
            }
            if others != shape || piece.dtype != first.dtype {
                let (a, b) = (first.dtype.name(), piece.dtype.name());
                return Err(wrong(format!(
                    "arrays to join along axis {axis}: expected {:?} of {a}, found {:?} of {b}",
                    first.shape, piece.shape
                )));
            }
            shape[axis] = shape[axis]
                .checked_add(along)
                .ok_or_else(|| wrong(format!("arrays to join along axis {axis}: their length overflows")))?;
        }
        Ok(PieceList { axis, shape, pieces })
    }

    /// The shape of the joined array.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// The elements in C order and native byte order.
    pub(super) fn read(&self, source: &dyn Source, context: &mut Context<'_>) -> Result<Vec<u8>> {
        let item = self.pieces.first().map_or(1, ArrayPlace::item);
        let product = |shape: &[u64]| shape.iter().try_fold(item, |n, d| n.checked_mul(*d));
        let most = source.size().saturating_mul(64).max(ALWAYS);
        let bytes = if self.shape.contains(&0) { Some(0) } else { product(&self.shape) };
        let (Some(bytes), Some(inner)) = (bytes.filter(|n| *n <= most), product(&self.shape[self.axis + 1..])) else {
            let detail = format!("joined arrays of shape {:?}: far more than their file stores", self.shape);
            return Err(Error::new(Kind::Unsupported, detail));
        };
        let mut elements = memory::bytes(bytes)?;
        if bytes == 0 {
            return Ok(elements);
        }
        let whole = to_usize(self.shape[self.axis] * inner);
        let mut first = 0;
        for piece in &self.pieces {
            let content = arrays::read(source, piece, context)?;
            let run = to_usize(piece.shape[self.axis] * inner);
            for (from, to) in content.chunks_exact(run.max(1)).zip(elements[first..].chunks_mut(whole)) {
                to[..run].copy_from_slice(from);
            }
            first += run;
            context.check()?;
        }
        Ok(elements)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;
    use crate::location::Location;
    use crate::parse::arrays::ArrayParts;
    use crate::parse::order::dense;
    use crate::source::held::Held;
    use crate::threads::Stop;

    fn place(shape: &[u64], at: u64) -> ArrayPlace {
        let (shape, strides) = (shape.to_vec(), dense(shape));
        ArrayPlace { dtype: DType::U16, swapped: false, shape, strides, at, inside: None, parts: None }
    }

    fn read(place: &ArrayPlace, file: Vec<u8>) -> Result<Vec<u8>> {
        let source = Held::new(Location::object("test", "a.pt"), file.into());
        arrays::read(&source, place, &mut Context::of_part(&Stop::new()))
    }

    proptest! {
        /// Element [a, j, c] of the joined array is that of the piece that has j, in any order of axes.
        #[test]
        fn pieces_follow_each_other(
            (outer, inner) in (0u64..4, 0u64..4),
            lens in prop::collection::vec(0u64..4, 1..5),
            order in Just(vec![0usize, 1, 2]).prop_shuffle(),
        ) {
            let mut file = vec![];
            let pieces: Vec<ArrayPlace> = lens.iter().map(|n| {
                let at = file.len() as u64;
                file.extend((0..outer * n * inner).flat_map(|i| ((at / 2 + i) as u16).to_ne_bytes()));
                place(&[outer, *n, inner], at)
            }).collect();
            let list = PieceList::new(1, pieces.clone()).unwrap();
            let mut joined = place(list.shape(), 0);
            joined.parts = Some(Arc::new(ArrayParts::Pieces(list)));
            let turned = joined.transposed(&order).unwrap();
            let found = read(&turned, file.clone()).unwrap();
            let mut wanted: Vec<u8> = vec![];
            let total: u64 = lens.iter().sum();
            for number in 0..outer * total * inner {
                let (mut rest, mut stored) = (number, [0; 3]);
                for (axis, n) in order.iter().zip(&turned.shape).rev() {
                    stored[*axis] = rest % n;
                    rest /= n;
                }
                let [a, mut j, c] = stored;
                let mut pieces = pieces.iter().zip(&lens);
                let (piece, n) = pieces.find(|(_, n)| { let here = j < **n; if !here { j -= **n; } here }).unwrap();
                let at = (piece.at + (a * n * inner + j * inner + c) * 2) as usize;
                wanted.extend(&file[at..at + 2]);
            }
            prop_assert_eq!(found, wanted);
        }
    }

    #[test]
    fn arrays_that_do_not_fit_are_refused() {
        for pieces in [
            vec![],
            vec![place(&[], 0)],
            vec![place(&[2, 3], 0), place(&[2, 4], 0)],
            vec![place(&[2, 3], 0), place(&[2], 0)],
            vec![place(&[2, 3], 0), ArrayPlace { dtype: DType::F32, ..place(&[2, 3], 0) }],
            vec![place(&[u64::MAX, 1], 0), place(&[u64::MAX, 1], 0)],
        ] {
            assert_eq!(PieceList::new(0, pieces).unwrap_err().kind, Kind::Format);
        }
    }

    #[test]
    fn pieces_that_share_bytes_are_bounded() {
        let list = PieceList::new(0, vec![place(&[1 << 20, 8], 0); 100]).unwrap();
        let joined = ArrayPlace { parts: Some(Arc::new(ArrayParts::Pieces(list))), ..place(&[100 << 20, 8], 0) };
        assert_eq!(read(&joined, vec![0; 16 << 20]).unwrap_err().kind, Kind::Unsupported);
    }
}
