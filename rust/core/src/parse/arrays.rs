//! Arrays in files: their places as parsers find them, and their elements in C order.
//!
//! Only arrays of metadata (token ids, masks, lengths) are read this way. Activations are read as rows.

use std::sync::Arc;

use super::array_chunks::ChunkList;
use super::order::{self, advance};
use crate::codec::inflate::DeflatedRange;
use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::held::Held;
use crate::source::{RangeRead, Source};
use crate::threads::Context;

/// Bytes that are read and reordered between two calls of the watch.
const BLOCK: u64 = 64 << 20;
/// Bytes of one piece of a block: neighbours in the result may be far apart in the file.
const PIECE: u64 = 1 << 20;
/// Neighbours in the result that a block of one piece has at least.
const FEW: u64 = 16;
/// An array may have this many bytes, or 64 times those of its file: strides of 0 make more elements than are stored.
const ALWAYS: u64 = 64 << 20;

/// Bytes of a file, stored or deflated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Offset of the first stored byte.
    pub at: u64,
    /// Bytes in the file.
    pub stored: u64,
    /// Bytes of the content.
    pub size: u64,
    /// Whether the content is deflated.
    pub deflated: bool,
    /// CRC-32 of the content; 0 if there is none.
    pub crc: u32,
}

/// An array in a file: element `[i, j, ..]` is at `at + (i * strides[0] + j * strides[1] + ..) * item`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArrayPlace {
    /// The element type.
    pub dtype: DType,
    /// Whether elements are byte-swapped.
    pub swapped: bool,
    /// Elements along each axis.
    pub shape: Vec<u64>,
    /// Elements from one index to the next along each axis.
    pub strides: Vec<u64>,
    /// The first element's offset in the file; in the content of `inside`, if that is set.
    pub at: u64,
    /// The deflated bytes that contain the array.
    pub inside: Option<Region>,
    /// The parts of an array whose elements are not in one range. Its strides are those of C order, unless it is transposed.
    pub parts: Option<Arc<ArrayParts>>,
}

/// The parts of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArrayParts {
    /// Chunks of a grid.
    Chunks(ChunkList),
    /// Arrays joined along an axis.
    Pieces(PieceList),
}

impl ArrayPlace {
    /// Bytes per element.
    pub fn item(&self) -> u64 {
        self.dtype.bits() / 8
    }

    /// Number of elements; `None` if it overflows.
    pub fn count(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).filter(|n| *n < 1 << 62)
    }

    /// Bytes from the first element to the end of the last.
    pub fn extent(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        let last =
            self.shape.iter().zip(&self.strides).try_fold(0u64, |n, (d, s)| n.checked_add((d - 1).checked_mul(*s)?));
        last?.checked_add(1)?.checked_mul(self.item())
    }

    /// The same array with its axes in another order; `None` if `order` does not name each axis once.
    pub fn transposed(&self, order: &[usize]) -> Option<ArrayPlace> {
        let mut sorted = order.to_vec();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..self.shape.len()) || self.strides.len() != self.shape.len() {
            return None;
        }
        let of = |values: &[u64]| order.iter().map(|axis| values[*axis]).collect();
        Some(ArrayPlace { shape: of(&self.shape), strides: of(&self.strides), ..self.clone() })
    }

    /// The strides of elements in C order.
    pub fn dense(shape: &[u64]) -> Vec<u64> {
        order::dense(shape)
    }
}

impl Region {
    /// The deflated bytes in their file.
    pub fn deflated<'a>(&self, source: &'a dyn Source) -> DeflatedRange<'a> {
        DeflatedRange { source, at: self.at, stored: self.stored, size: self.size }
    }
}

/// An array's elements in C order and native byte order.
pub fn read(source: &dyn Source, place: &ArrayPlace, context: &mut Context<'_>) -> Result<Vec<u8>> {
    if let Some(parts) = &place.parts {
        let content = match &**parts {
            ArrayParts::Chunks(chunks) => chunks.read(source, (place.dtype, place.swapped), context)?,
            ArrayParts::Pieces(pieces) => pieces.read(source, context)?,
        };
        if place.strides == ArrayPlace::dense(&place.shape) {
            return Ok(content);
        }
        let (whole, size) = (ArrayPlace { swapped: false, parts: None, at: 0, ..place.clone() }, content.len() as u64);
        if whole.extent() != Some(size) {
            return Err(Error::new(Kind::Format, format!("parts of an array of shape {:?}: other sizes", place.shape)));
        }
        return read(&Held::new(source.location().clone(), content.into()), &whole, context);
    }
    let (item, count, extent) = (place.item(), place.count(), place.extent());
    let most = source.size().saturating_mul(64).max(ALWAYS).max(place.inside.map_or(0, |region| region.size));
    let (Some(bytes), Some(extent)) = (count.and_then(|n| n.checked_mul(item)), extent) else {
        return Err(Error::new(Kind::Format, format!("an array of shape {:?}: its size overflows", place.shape)));
    };
    if bytes > most {
        return Err(Error::new(
            Kind::Unsupported,
            format!(
                "an array of shape {:?} has {bytes} bytes, far more than its file stores: strides of 0",
                place.shape
            ),
        ));
    }
    let is_stored = bytes == 0 || (!place.swapped && place.strides == ArrayPlace::dense(&place.shape));
    let Some(region) = place.inside else {
        let mut elements = memory::bytes(bytes)?;
        if !is_stored {
            Reordering::new(place, [BLOCK, PIECE])?.fill(source, &mut elements, context)?;
            return Ok(elements);
        }
        source.read_long(place.at, &mut elements, context)?;
        return Ok(elements);
    };
    let mut content = region.deflated(source).content(context)?;
    let Some(end) = place.at.checked_add(extent).filter(|end| *end <= region.size) else {
        return Err(Error::new(Kind::Format, "an array extends past its deflated record").byte(region.at));
    };
    if is_stored {
        content.truncate(to_usize(end));
        content.drain(..to_usize(place.at));
        return Ok(content);
    }
    let mut elements = memory::bytes(bytes)?;
    let held = Held::new(source.location().clone(), content.into());
    Reordering::new(place, [BLOCK, PIECE])?.fill(&held, &mut elements, context)?;
    Ok(elements)
}

/// Arrays of one file joined along an axis, such as the hidden states of each step of a generation. They may share bytes, so that
/// their elements are more than the file stores.
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
    fn read(&self, source: &dyn Source, context: &mut Context<'_>) -> Result<Vec<u8>> {
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
            let content = read(source, piece, context)?;
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

/// An axis of an array.
#[derive(Clone, Copy)]
struct Axis {
    len: u64,
    /// Elements from one index to the next, in the file.
    stride: u64,
    /// The same in C order.
    dense: u64,
}

/// A copy into C order that holds a block at a time. A block is a range of the file, or several at equal distances: axes with the
/// longest strides are walked, the others are in each piece, and the two between them are cut so that a piece has about [`PIECE`]
/// bytes and a block about [`BLOCK`].
struct Reordering<'a> {
    at: u64,
    item: u64,
    cast: Cast<'a>,
    /// By falling stride.
    axes: Vec<Axis>,
    /// Bytes of a block, and of a piece of it.
    sizes: [u64; 2],
}

impl Reordering<'_> {
    fn new(place: &ArrayPlace, sizes: [u64; 2]) -> Result<Reordering<'static>> {
        let dense = ArrayPlace::dense(&place.shape);
        let each = place.shape.iter().zip(&place.strides).zip(dense);
        let mut axes: Vec<Axis> =
            each.map(|((len, stride), dense)| Axis { len: *len, stride: *stride, dense }).collect();
        axes.retain(|axis| axis.len > 1);
        axes.sort_by_key(|axis| std::cmp::Reverse(axis.stride));
        let cast = Cast::between(place.dtype, place.dtype)?.swapped_if(place.swapped);
        Ok(Reordering { at: place.at, item: place.item(), cast, axes, sizes })
    }

    /// Elements from the first to the end of the last of some axes.
    fn extent(axes: &[Axis]) -> u64 {
        axes.iter().map(|axis| (axis.len - 1) * axis.stride).sum::<u64>() + 1
    }

    /// The first axis that is whole in a piece of some bytes, and the one before with the number of its indices in a piece.
    fn cut(&self, bytes: u64) -> (usize, Option<(Axis, u64)>) {
        let most = bytes / self.item;
        let inner =
            (0..self.axes.len()).find(|inner| Self::extent(&self.axes[*inner..]) <= most).unwrap_or(self.axes.len());
        let axis = inner.checked_sub(1).map(|before| self.axes[before]);
        let free = most.saturating_sub(Self::extent(&self.axes[inner..]));
        (inner, axis.map(|axis| (axis, free.checked_div(axis.stride).map_or(axis.len, |n| axis.len.min(n + 1)))))
    }

    fn fill(&self, source: &dyn Source, elements: &mut [u8], context: &mut Context<'_>) -> Result<()> {
        // A piece has all of the axes from `inner` on, and `cut` indices of the one before.
        let (inner, cut) = match self.cut(self.sizes[0]) {
            // Few neighbours in the result would be in one block.
            (inner, Some((_, n))) if n < FEW && inner < self.axes.len() => self.cut(self.sizes[1]),
            cut => cut,
        };
        let walked = &self.axes[..inner.saturating_sub(1)];
        let extent = Self::extent(&self.axes[inner..]) + cut.map_or(0, |(axis, n)| (n - 1) * axis.stride);
        let (outer, apart) = match walked.split_last() {
            None => (&[][..], None),
            Some((axis, outer)) => (outer, Some((*axis, (self.sizes[0] / self.item / extent).clamp(1, axis.len)))),
        };
        let mut buffer = memory::bytes(apart.map_or(1, |(_, n)| n) * extent * self.item)?;
        let mut turned = memory::bytes(if self.cast.is_copy() { 0 } else { buffer.len() as u64 })?;
        let steps = |part: Option<(Axis, u64)>| part.map_or(1, |(axis, n)| axis.len.div_ceil(n));
        let part = |part: Option<(Axis, u64)>, step: u64| {
            part.map(|(axis, n)| (step * n, Axis { len: n.min(axis.len - step * n), ..axis }))
        };
        let mut index = vec![0u64; outer.len()];
        loop {
            let at = |of: fn(&Axis) -> u64| index.iter().zip(outer).map(|(i, axis)| i * of(axis)).sum::<u64>();
            let (from, to) = (at(|axis| axis.stride), at(|axis| axis.dense));
            for step in (0..steps(apart)).flat_map(|a| (0..steps(cut)).map(move |c| (a, c))) {
                let (apart, cut) = (part(apart, step.0), part(cut, step.1));
                let offset =
                    |of: fn(&Axis) -> u64| apart.iter().chain(&cut).map(|(first, axis)| first * of(axis)).sum::<u64>();
                let mut axes: Vec<Axis> =
                    cut.iter().map(|(_, axis)| *axis).chain(self.axes[inner..].iter().copied()).collect();
                let used = Self::extent(&axes) * self.item;
                let first = self.at + (from + offset(|axis| axis.stride)) * self.item;
                let pieces = apart.map_or(1, |(_, axis)| axis.len);
                let step = apart.map_or(0, |(_, axis)| axis.stride * self.item);
                let mut reads: Vec<RangeRead<'_>> = buffer
                    .chunks_mut(to_usize(used))
                    .take(to_usize(pieces))
                    .enumerate()
                    .map(|(i, into)| RangeRead { at: first + i as u64 * step, into })
                    .collect();
                source.read_many(&mut reads, context.stop())?;
                axes.extend(apart.map(|(_, axis)| Axis { stride: used / self.item, ..axis }));
                let all = to_usize(pieces * used);
                let block = match turned.get_mut(..all) {
                    Some(turned) => {
                        self.cast.apply(&buffer[..all], turned);
                        &*turned
                    }
                    None => &buffer[..all],
                };
                axes.sort_by_key(|axis| std::cmp::Reverse(axis.dense));
                let to = (to + offset(|axis| axis.dense)) * self.item;
                scatter(block, &axes, to_usize(self.item), &mut elements[to_usize(to)..]);
                context.check()?;
            }
            if !advance(&mut index, outer.iter().map(|axis| axis.len)) {
                return Ok(());
            }
        }
    }
}

/// Copies the elements of a block to their places, in the order of the places.
fn scatter(block: &[u8], axes: &[Axis], item: usize, to: &mut [u8]) {
    let (last, outer) = match axes.split_last() {
        Some((last, outer)) => (*last, outer),
        None => (Axis { len: 1, stride: 1, dense: 1 }, &[][..]),
    };
    let mut index = vec![0u64; outer.len()];
    loop {
        let at =
            |of: fn(&Axis) -> u64| to_usize(index.iter().zip(outer).map(|(i, axis)| i * of(axis)).sum::<u64>()) * item;
        let (from, to) = (&block[at(|axis| axis.stride)..], &mut to[at(|axis| axis.dense)..]);
        match item {
            _ if last.stride == 1 && last.dense == 1 => {
                let n = to_usize(last.len) * item;
                to[..n].copy_from_slice(&from[..n]);
            }
            1 => copy_apart(from, last, to, 1),
            2 => copy_apart(from, last, to, 2),
            4 => copy_apart(from, last, to, 4),
            8 => copy_apart(from, last, to, 8),
            _ => copy_apart(from, last, to, item),
        }
        if !advance(&mut index, outer.iter().map(|axis| axis.len)) {
            return;
        }
    }
}

/// Copies elements that are apart. Inlined, so that `item` is a constant.
#[inline(always)]
fn copy_apart(from: &[u8], axis: Axis, to: &mut [u8], item: usize) {
    let (stride, dense) = (to_usize(axis.stride) * item, to_usize(axis.dense) * item);
    for i in 0..to_usize(axis.len) {
        to[i * dense..i * dense + item].copy_from_slice(&from[i * stride..i * stride + item]);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::location::Location;
    use crate::threads::Stop;

    /// Elements one by one.
    fn oracle(bytes: &[u8], place: &ArrayPlace) -> Vec<u8> {
        let (item, mut index, mut elements) = (place.item() as usize, vec![0; place.shape.len()], vec![]);
        if place.shape.contains(&0) {
            return elements;
        }
        loop {
            let from: u64 = index.iter().zip(&place.strides).map(|(i, s): (&u64, &u64)| i * s).sum();
            let from = place.at as usize + from as usize * item;
            let mut element = bytes[from..from + item].to_vec();
            if place.swapped {
                element.reverse();
            }
            elements.extend(element);
            if !advance(&mut index, place.shape.iter().copied()) {
                return elements;
            }
        }
    }

    proptest! {
        #[test]
        fn any_strides_are_read_in_blocks_of_any_size(
            axes in prop::collection::vec((0u64..7, 0u64..40), 0..4),
            order in any::<bool>(),
            swapped in any::<bool>(),
            wide in any::<bool>(),
            at in 0u64..9,
            sizes in (4u64..2000, 4u64..300),
        ) {
            let (shape, mut strides): (Vec<u64>, Vec<u64>) = axes.into_iter().unzip();
            if order {
                let reversed: Vec<u64> = shape.iter().rev().copied().collect();
                strides = ArrayPlace::dense(&reversed).into_iter().rev().collect();
            }
            let dtype = if wide { DType::F32 } else { DType::F16 };
            let place = ArrayPlace { dtype, swapped, shape, strides, at, inside: None, parts: None };
            let len = at + place.extent().unwrap();
            let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 251) as u8).collect();
            let source = Held::new(Location::object("test", "a"), bytes.clone().into());
            let expected = oracle(&bytes, &place);
            prop_assert_eq!(&read(&source, &place, &mut Context::of_part(&Stop::new())).unwrap(), &expected);
            if !expected.is_empty() {
                let mut elements = vec![0; expected.len()];
                let reordering = Reordering::new(&place, [sizes.0, sizes.1]).unwrap();
                reordering.fill(&source, &mut elements, &mut Context::of_part(&Stop::new())).unwrap();
                prop_assert_eq!(&elements, &expected);
            }
        }
    }

    #[test]
    fn a_watch_ends_a_read() {
        let (shape, strides) = (vec![3, 5], vec![1, 3]);
        let source = Held::new(Location::object("test", "a"), vec![0; 60].into());
        for strides in [strides, vec![5, 1]] {
            let place = ArrayPlace {
                dtype: DType::F32,
                swapped: false,
                shape: shape.clone(),
                strides,
                at: 0,
                inside: None,
                parts: None,
            };
            assert_eq!(
                read(&source, &place, &mut Context::of_caller(&mut || true)).unwrap_err().kind,
                Kind::Interrupted
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod piece_tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::dtype::DType;
    use crate::location::Location;
    use crate::parse::order::dense;
    use crate::source::held::Held;
    use crate::threads::Stop;

    fn place(shape: &[u64], at: u64) -> ArrayPlace {
        let (shape, strides) = (shape.to_vec(), dense(shape));
        ArrayPlace { dtype: DType::U16, swapped: false, shape, strides, at, inside: None, parts: None }
    }

    fn read(place: &ArrayPlace, file: Vec<u8>) -> Result<Vec<u8>> {
        let source = Held::new(Location::object("test", "a.pt"), file.into());
        super::read(&source, place, &mut Context::of_part(&Stop::new()))
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
