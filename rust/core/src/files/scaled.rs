//! A store in which arrays of float8 or int8 elements with scales appear as files of their products, bfloat16 or float32.
//! Nothing is decoded ahead: a read multiplies the elements that it copies, straight from a mapping if there is one.
//!
//! ```text
//! product file:  byte (((t * layers) + l) * width + h) * size = codes[t, l, h] * scales[t or 0, l or 0, h or 0]
//! ```
//!
//! Codes have three axes, dense in C order. Scales are float32 and have the same axes, each of the same length or of 1:
//! one scale for all, per token, per layer, per channel, or several of these. Both are in one file, or the scales are
//! kept in memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::kernels::scaled::{self, Product, ScaledCode};
use crate::kernels::{Stores, prefetch};
use crate::location::Location;
use crate::memory;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::parse::arrays::ArrayPlace;
use crate::source::{Access, ByteRange, RangeRead, Ready, Source, Store, Version, Wishes};
use crate::threads::Stop;

/// Elements in a file, and their scales in the same file or in memory.
#[derive(Clone, Debug)]
pub struct ScaledArray {
    code: ScaledCode,
    to: Product,
    /// The first code.
    codes: u64,
    /// The first scale.
    scales: u64,
    /// Tokens, layers, width.
    shape: [u64; 3],
    /// Which axes of the scales are as long as those of the codes.
    per: [bool; 3],
    /// All scales, little-endian, if they are not read from the file.
    held: Option<Arc<Buffer>>,
}

impl ScaledArray {
    /// An array and its scales, whose products have the type `to`.
    ///
    /// Fails for other types than float8 or int8 with float32 scales, for shapes that do not fit, and for arrays that
    /// are not dense or are not stored as they are.
    pub fn new(codes: &ArrayPlace, scales: &ArrayPlace, to: DType) -> Result<ScaledArray> {
        let refuse = |kind, what: String| Err(Error::new(kind, what));
        let code = match codes.dtype {
            DType::F8E4M3 => ScaledCode::E4M3,
            DType::F8E5M2 => ScaledCode::E5M2,
            DType::I8 => ScaledCode::I8,
            other => {
                return refuse(
                    Kind::Unsupported,
                    format!("expected scaled elements of type F8_E4M3, F8_E5M2 or I8, found {}", other.name()),
                );
            }
        };
        let to = match to {
            DType::BF16 => Product::BF16,
            DType::F32 => Product::F32,
            other => {
                return refuse(
                    Kind::Unsupported,
                    format!("expected products of type BF16 or F32, found {}", other.name()),
                );
            }
        };
        if scales.dtype != DType::F32 {
            return refuse(Kind::Unsupported, format!("scales: expected F32, found {}", scales.dtype.name()));
        }
        for array in [codes, scales] {
            if array.swapped
                || array.inside.is_some()
                || array.parts.is_some()
                || array.strides != ArrayPlace::dense(&array.shape)
            {
                return refuse(
                    Kind::Unsupported,
                    "expected scaled elements that are contiguous in their file, found another layout".into(),
                );
            }
        }
        let [Some(shape), Some(ones)] = [codes, scales].map(|array| three(&array.shape)) else {
            let (codes, scales) = (&codes.shape, &scales.shape);
            return refuse(Kind::Format, format!("expected at most 3 axes, found {codes:?} and scales {scales:?}"));
        };
        if (0..3).any(|axis| ones[axis] != 1 && ones[axis] != shape[axis]) {
            return refuse(Kind::Format, format!("scales: expected axes of {shape:?} or 1, found {ones:?}"));
        }
        let elements = shape.iter().try_fold(1u64, |n, axis| n.checked_mul(*axis)).filter(|n| *n < 1 << 59);
        if elements.is_none() || codes.at >= 1 << 60 || scales.at >= 1 << 60 {
            return refuse(Kind::Format, format!("expected fewer than 2^59 elements, found the shape {shape:?}"));
        }
        let per = std::array::from_fn(|axis| ones[axis] == shape[axis] && shape[axis] != 1);
        Ok(ScaledArray { code, to, codes: codes.at, scales: scales.at, shape, per, held: None })
    }

    /// The same elements with these scales, in C order, instead of the file's. Fails if the number of scales differs.
    pub fn holding(self, scales: &[f32]) -> Result<ScaledArray> {
        self.sharing(Arc::new(little_endian(scales)?))
    }

    /// As [`ScaledArray::holding`], of scales that are shared, little-endian.
    pub fn sharing(mut self, scales: Arc<Buffer>) -> Result<ScaledArray> {
        let expected: u64 = (0..3).map(|axis| if self.per[axis] { self.shape[axis] } else { 1 }).product();
        if scales.len() as u64 != 4 * expected {
            return Err(Error::new(Kind::Format, format!("expected {expected} scales, found {}", scales.len() / 4)));
        }
        self.held = Some(scales);
        Ok(self)
    }

    fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Scales per token, or of all tokens.
    fn block(&self) -> u64 {
        (1..3).map(|axis| if self.per[axis] { self.shape[axis] } else { 1 }).product()
    }

    /// Indices of the scales of elements.
    fn scales_of(&self, elements: &Range<u64>) -> Range<u64> {
        let per_token = self.shape[1] * self.shape[2];
        match self.per[0] {
            _ if elements.is_empty() => 0..0,
            true => elements.start / per_token * self.block()..((elements.end - 1) / per_token + 1) * self.block(),
            false => 0..self.block(),
        }
    }

    /// Multiplies the codes of elements, whose scales are `scales`: bytes, from the first that [`ScaledArray::scales_of`] names.
    fn multiply(&self, elements: Range<u64>, codes: &[u8], scales: &[u8], out: &mut [u8], stores: Stores<'_>) {
        let [_, layers, width] = self.shape;
        let first = self.scales_of(&elements).start;
        let mut at = elements.start;
        while at < elements.end {
            let (row, h) = (at / width, at % width);
            let (t, l) = (row / layers, row % layers);
            let left = match self.per {
                [_, _, true] | [_, true, _] => width - h,
                [true, ..] => layers * width - (l * width + h),
                _ => u64::MAX,
            };
            let n = to_usize(left.min(elements.end - at));
            let mut scale = if self.per[0] { t } else { 0 };
            for (axis, place) in [(1, l), (2, h)] {
                if self.per[axis] {
                    scale = scale * self.shape[axis] + place;
                }
            }
            let (begin, from) = (to_usize(at - elements.start), 4 * to_usize(scale - first));
            let size = self.to.size();
            let (codes, out) = (&codes[begin..begin + n], &mut out[begin * size..(begin + n) * size]);
            if self.per[2] {
                scaled::times_each(self.code, self.to, codes, &scales[from..from + 4 * n], out, stores);
            } else {
                let mut one = [0; 4];
                one.copy_from_slice(&scales[from..from + 4]);
                scaled::times(self.code, self.to, codes, f32::from_le_bytes(one), out, stores);
            }
            at += n as u64;
        }
    }
}

/// The bytes of scales.
pub fn little_endian(scales: &[f32]) -> Result<Buffer> {
    let mut bytes = memory::reserve(4 * scales.len() as u64)?;
    bytes.extend(scales.iter().flat_map(|scale| scale.to_le_bytes()));
    Ok(Buffer::from(bytes))
}

/// A shape with leading axes of 1.
fn three(shape: &[u64]) -> Option<[u64; 3]> {
    let mut made = [1; 3];
    let skipped = 3usize.checked_sub(shape.len())?;
    made[skipped..].copy_from_slice(shape);
    Some(made)
}

/// The store.
#[derive(Debug)]
pub struct ScaledStore {
    inner: Arc<dyn Store>,
    arrays: HashMap<Location, (Location, ScaledArray)>,
}

impl ScaledStore {
    /// The files of `inner`, and products under the names that [`ScaledStore::name`] returns.
    pub fn new(inner: Arc<dyn Store>, arrays: Vec<(Location, ScaledArray)>) -> ScaledStore {
        let named = arrays.into_iter().enumerate().map(|(i, each)| (ScaledStore::name(&each.0, i), each));
        ScaledStore { inner, arrays: named.collect() }
    }

    /// The name of products: that of the file, with the array's number.
    pub fn name(file: &Location, number: usize) -> Location {
        Location::object(file.to_string(), format!("(scaled {number})"))
    }
}

impl ScaledStore {
    /// The products of an opened file, if it has some.
    fn wrap(&self, at: &Location, opened: Result<Box<dyn Source>>, stop: &Stop) -> Result<Box<dyn Source>> {
        match self.arrays.get(at) {
            Some((_, array)) => Ok(Box::new(ScaledSource::new(opened?.into(), array.clone(), stop)?)),
            None => opened,
        }
    }
}

impl Store for ScaledStore {
    fn open_many(&self, locations: &[&Location], access: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let files: Vec<&Location> =
            locations.iter().map(|at| self.arrays.get(*at).map_or(*at, |(file, _)| file)).collect();
        let opened = self.inner.open_many(&files, access, stop);
        locations.iter().zip(opened).map(|(at, opened)| self.wrap(at, opened, stop)).collect()
    }

    fn list(&self, folder: &Location) -> Result<Vec<String>> {
        self.inner.list(folder)
    }

    fn decodes(&self) -> bool {
        self.inner.decodes()
    }

    #[expect(clippy::disallowed_methods, reason = "the scales of one array take a moment")]
    fn decoded(&self, at: &Location) -> Option<Result<Box<dyn Source>>> {
        let file = self.arrays.get(at).map_or(at, |(file, _)| file);
        Some(self.wrap(at, self.inner.decoded(file)?, Stop::never()))
    }

    fn wishes(&self) -> Option<Wishes> {
        self.inner.wishes()
    }
}

/// The products of an open file.
#[derive(Debug)]
pub(super) struct ScaledSource {
    inner: Arc<dyn Source>,
    array: ScaledArray,
    /// All scales, if they are in memory, or do not depend on the token.
    fixed: Option<Arc<Buffer>>,
}

/// A read: elements, the position of the first byte in the first of them, and bytes for codes and scales.
struct ScaledRead {
    elements: Range<u64>,
    skip: usize,
    codes: Vec<u8>,
    scales: Vec<u8>,
}

impl ScaledSource {
    pub(super) fn new(inner: Arc<dyn Source>, array: ScaledArray, stop: &Stop) -> Result<ScaledSource> {
        let (elements, all) = (array.elements(), array.scales_of(&(0..array.elements())).end);
        let in_file = if array.held.is_some() { 0 } else { 4 * all };
        for (at, len) in [(array.codes, elements), (array.scales, in_file)] {
            if len > 0 && at + len > inner.size() {
                let detail = format!("expected {} bytes, found {}", at + len, inner.size());
                return Err(Error::new(Kind::Truncated, detail).at(inner.location()));
            }
        }
        let fixed = array.held.clone();
        let mut made = ScaledSource { inner, array, fixed };
        if made.fixed.is_none() && !made.array.per[0] {
            let mut fixed = memory::bytes(4 * all).map_err(|e| e.at(made.inner.location()))?;
            made.inner.read(made.array.scales, &mut fixed, stop)?;
            made.fixed = Some(Arc::new(fixed.into()));
        }
        Ok(made)
    }

    /// The elements of a range of bytes.
    fn elements(&self, at: u64, len: u64) -> Result<Range<u64>> {
        let size = self.array.to.size() as u64;
        match at.checked_add(len).filter(|end| *end <= self.size()) {
            Some(end) => Ok(at / size..end.div_ceil(size)),
            None => {
                let detail = format!("expected {len} bytes, found fewer");
                Err(Error::new(Kind::Truncated, detail).at(self.location()).byte(at))
            }
        }
    }

    /// Byte ranges of the codes and scales of elements; no scales if they are fixed.
    fn ranges(&self, elements: &Range<u64>) -> [ByteRange; 2] {
        let scales = if self.fixed.is_some() { 0..0 } else { self.array.scales_of(elements) };
        [
            ByteRange { at: self.array.codes + elements.start, len: elements.end - elements.start },
            match self.fixed {
                Some(_) => ByteRange { at: 0, len: 0 },
                None => ByteRange { at: self.array.scales + 4 * scales.start, len: 4 * (scales.end - scales.start) },
            },
        ]
    }

    /// Fills a buffer with products. The buffer begins `skip` bytes into the first element.
    fn fill(
        &self,
        elements: Range<u64>,
        skip: usize,
        codes: &[u8],
        scales: &[u8],
        into: &mut [u8],
        stores: Stores<'_>,
    ) -> Result<()> {
        let wanted = self.array.scales_of(&elements);
        let scales =
            self.fixed.as_ref().map_or(scales, |all| &all[4 * to_usize(wanted.start)..4 * to_usize(wanted.end)]);
        if skip == 0 && into.len().is_multiple_of(self.array.to.size()) {
            self.array.multiply(elements, codes, scales, into, stores);
            return Ok(());
        }
        let mut whole = memory::bytes((codes.len() * self.array.to.size()) as u64)?;
        self.array.multiply(elements, codes, scales, &mut whole, Stores::Cached);
        into.copy_from_slice(&whole[skip..skip + into.len()]);
        Ok(())
    }

    /// Fills a buffer from the inner source's memory; false if it has none.
    fn fill_from_memory(&self, read: &mut RangeRead<'_>, stores: Stores<'_>) -> Result<bool> {
        let Some(bytes) = self.inner.bytes() else { return Ok(false) };
        let elements = self.elements(read.at, read.into.len() as u64)?;
        let [codes, scales] = self.ranges(&elements).map(|r| bytes.get(to_usize(r.at)..to_usize(r.at + r.len)));
        let (Some(codes), Some(scales)) = (codes, scales) else {
            return Err(Error::new(Kind::Truncated, "the file became shorter").at(self.location()));
        };
        let skip = to_usize(read.at % self.array.to.size() as u64);
        self.fill(elements, skip, codes, scales, read.into, stores)?;
        Ok(true)
    }

    fn prepared(&self, at: u64, len: usize) -> Result<ScaledRead> {
        let elements = self.elements(at, len as u64)?;
        let [codes, scales] = self.ranges(&elements).map(|range| memory::bytes(range.len));
        Ok(ScaledRead { elements, skip: to_usize(at % self.array.to.size() as u64), codes: codes?, scales: scales? })
    }
}

impl Source for ScaledSource {
    fn location(&self) -> &Location {
        self.inner.location()
    }

    fn size(&self) -> u64 {
        self.array.elements() * self.array.to.size() as u64
    }

    fn stored(&self, at: u64, len: u64) -> u64 {
        self.elements(at, len).map_or(len, |elements| self.ranges(&elements).iter().map(|range| range.len).sum())
    }

    fn version(&self) -> Option<Version> {
        None
    }

    fn computes(&self) -> bool {
        self.inner.bytes().is_some()
    }

    fn compute(&self, mut read: RangeRead<'_>, stores: Stores<'_>) -> Result<()> {
        match self.fill_from_memory(&mut read, stores)? {
            true => Ok(()),
            false => Err(Error::new(Kind::Internal, "products of a file that is not mapped").at(self.location())),
        }
    }

    fn prefetch(&self, at: u64) {
        let codes = self.array.codes + at / self.array.to.size() as u64;
        let bytes = self.inner.bytes().unwrap_or_default();
        prefetch(usize::try_from(codes).ok().and_then(|codes| bytes.get(codes..)).unwrap_or_default());
    }

    fn read_many(&self, reads: &mut [RangeRead<'_>], stop: &Stop) -> Result<()> {
        if self.inner.bytes().is_some() {
            return reads.iter_mut().try_for_each(|read| self.fill_from_memory(read, Stores::Cached).map(drop));
        }
        let made = reads.iter().map(|read| self.prepared(read.at, read.into.len())).collect::<Result<Vec<_>>>();
        let mut made = made?;
        let mut parts = vec![];
        let mut tails = vec![];
        for each in &mut made {
            let [codes, scales] = self.ranges(&each.elements);
            parts.push(RangeRead { at: codes.at, into: &mut each.codes });
            if scales.len > 0 {
                tails.push(RangeRead { at: scales.at, into: &mut each.scales });
            }
        }
        parts.append(&mut tails);
        self.inner.read_many(&mut parts, stop)?;
        for (each, read) in made.into_iter().zip(reads) {
            self.fill(each.elements, each.skip, &each.codes, &each.scales, read.into, Stores::Cached)?;
        }
        Ok(())
    }

    fn read_if_ready(&self, mut read: RangeRead<'_>) -> Result<Ready> {
        let elements = self.elements(read.at, read.into.len() as u64)?;
        if elements.is_empty() {
            return Ok(Ready::Yes);
        }
        let [codes, scales] = self.ranges(&elements);
        if self.inner.bytes().is_some() {
            let ready = [codes.at, codes.at + codes.len - 1].map(|at| self.inner.is_ready(at));
            if ready.contains(&Ready::No) {
                return Ok(Ready::No);
            }
            self.fill_from_memory(&mut read, Stores::Cached)?;
            return Ok(Ready::Yes);
        }
        let mut made = self.prepared(read.at, read.into.len())?;
        let ready = self.inner.read_if_ready(RangeRead { at: codes.at, into: &mut made.codes })?;
        if ready != Ready::Yes {
            return Ok(ready);
        }
        if scales.len > 0 {
            let ready = self.inner.read_if_ready(RangeRead { at: scales.at, into: &mut made.scales })?;
            if ready != Ready::Yes {
                return Ok(ready);
            }
        }
        self.fill(made.elements, made.skip, &made.codes, &made.scales, read.into, Stores::Cached)?;
        Ok(Ready::Yes)
    }

    fn is_ready(&self, at: u64) -> Ready {
        self.inner.is_ready(self.array.codes + at / self.array.to.size() as u64)
    }

    fn is_near(&self, at: u64) -> bool {
        self.inner.is_near(self.array.codes + at / self.array.to.size() as u64)
    }

    fn will_need(&self, ranges: &[ByteRange]) {
        let size = self.array.to.size() as u64;
        let needed = ranges.iter().filter(|range| range.len > 0 && range.at + range.len <= self.size());
        let needed = needed.flat_map(|r| self.ranges(&(r.at / size..(r.at + r.len).div_ceil(size))));
        self.inner.will_need(&needed.filter(|range| range.len > 0).collect::<Vec<_>>());
    }

    fn unchanged(&self) -> Result<()> {
        self.inner.unchanged()
    }

    fn may_keep(&self) -> bool {
        self.inner.may_keep()
    }

    fn holds_descriptor(&self) -> bool {
        self.inner.holds_descriptor()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::source::Io;
    use crate::source::local::Local;

    fn place(dtype: DType, shape: &[u64], at: u64) -> ArrayPlace {
        let (shape, strides) = (shape.to_vec(), ArrayPlace::dense(shape));
        ArrayPlace { dtype, swapped: false, shape, strides, at, inside: None, parts: None }
    }

    #[test]
    fn arrays_that_do_not_fit_are_refused() {
        let codes = place(DType::F8E4M3, &[3, 2, 4], 8);
        let scales = |shape: &[u64]| place(DType::F32, shape, 0);
        assert!(ScaledArray::new(&codes, &scales(&[3, 1, 1]), DType::BF16).is_ok());
        assert!(ScaledArray::new(&codes, &scales(&[]), DType::F32).is_ok());
        let held = |n| ScaledArray::new(&codes, &scales(&[3, 1, 1]), DType::BF16).unwrap().holding(&vec![1.0; n]);
        assert!(held(3).is_ok());
        assert_eq!(held(4).unwrap_err().kind, Kind::Format);
        for shape in [&[2, 1, 1][..], &[3, 1], &[3, 2, 5], &[1, 3, 1, 1], &[0, 1, 1]] {
            assert_eq!(ScaledArray::new(&codes, &scales(shape), DType::BF16).unwrap_err().kind, Kind::Format);
        }
        let strided = ArrayPlace { strides: vec![8, 4, 2], ..codes.clone() };
        for (codes, scales, to) in [
            (codes.clone(), scales(&[]), DType::F16),
            (codes.clone(), place(DType::BF16, &[], 0), DType::BF16),
            (place(DType::U8, &[3, 2, 4], 8), scales(&[]), DType::BF16),
            (strided, scales(&[]), DType::BF16),
            (codes.clone(), ArrayPlace { swapped: true, ..scales(&[]) }, DType::BF16),
        ] {
            assert_eq!(ScaledArray::new(&codes, &scales, to).unwrap_err().kind, Kind::Unsupported);
        }
        let huge = place(DType::I8, &[1 << 40, 1 << 40, 1], 0);
        assert_eq!(ScaledArray::new(&huge, &scales(&[]), DType::BF16).unwrap_err().kind, Kind::Format);
    }

    #[test]
    fn files_that_are_too_short_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, [0; 35]).unwrap();
        let file = Location::from(path.as_path());
        for (codes, scales) in [(12, 0), (0, 24), (1 << 50, 0), (0, 1 << 50)] {
            let codes = place(DType::I8, &[3, 2, 4], codes);
            let array = ScaledArray::new(&codes, &place(DType::F32, &[3, 1, 1], scales), DType::BF16).unwrap();
            let inner = Arc::new(Local { io: Io::Mmap });
            let store: Arc<dyn Store> = Arc::new(ScaledStore::new(inner, vec![(file.clone(), array)]));
            let found = store.open(&ScaledStore::name(&file, 0), Access::Kept, &Stop::new());
            assert_eq!(found.unwrap_err().kind, Kind::Truncated);
        }
    }

    #[test]
    fn an_opening_or_read_that_was_stopped_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let scales: Vec<u8> = [2f32; 3].iter().flat_map(|scale| scale.to_le_bytes()).collect();
        std::fs::write(&path, [scales, vec![5; 24]].concat()).unwrap();
        let file = Location::from(path.as_path());
        let stopped = Stop::new();
        stopped.set();
        for scales in [&[1, 1, 1][..], &[3, 1, 1]] {
            let array = ScaledArray::new(&place(DType::I8, &[3, 2, 4], 12), &place(DType::F32, scales, 0), DType::F32);
            let inner = Arc::new(Local { io: Io::Pread });
            let store: Arc<dyn Store> = Arc::new(ScaledStore::new(inner, vec![(file.clone(), array.unwrap())]));
            let products = |stop: &Stop| {
                let source = store.open(&ScaledStore::name(&file, 0), Access::Kept, stop)?;
                let mut products = vec![0; to_usize(source.size())];
                source.read(0, &mut products, stop).map(|()| products)
            };
            assert_eq!(products(&stopped).unwrap_err().kind, Kind::Interrupted);
            assert_eq!(products(&Stop::new()).unwrap(), [10f32.to_le_bytes(); 24].concat());
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]
        /// Any range of bytes of the product file, for all kinds of scales, mapped or not.
        #[test]
        fn reads_are_the_products_of_the_oracle(
            shape in prop::array::uniform3(1u64..6),
            per in prop::array::uniform3(any::<bool>()),
            which in 0usize..3,
            wide in any::<bool>(),
            mapped in any::<bool>(),
            bytes in prop::collection::vec(any::<u8>(), 125 + 500),
            cuts in prop::collection::vec((0u64..1000, 0u64..200), 1..5),
        ) {
            let (dtype, code) = [(DType::F8E4M3, ScaledCode::E4M3), (DType::F8E5M2, ScaledCode::E5M2), (DType::I8, ScaledCode::I8)][which];
            let (to, product) = if wide { (DType::F32, Product::F32) } else { (DType::BF16, Product::BF16) };
            let ones: Vec<u64> = (0..3).map(|axis| if per[axis] { shape[axis] } else { 1 }).collect();
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("a");
            std::fs::write(&path, &bytes).unwrap();
            let file = Location::from(path.as_path());
            let array = ScaledArray::new(&place(dtype, &shape, 500), &place(DType::F32, &ones, 0), to).unwrap();
            let io = if mapped { Io::Mmap } else { Io::Pread };
            let store: Arc<dyn Store> = Arc::new(ScaledStore::new(Arc::new(Local { io }), vec![(file.clone(), array)]));
            let source = store.open(&ScaledStore::name(&file, 0), Access::Kept, &Stop::new()).unwrap();
            let mut wanted = vec![];
            for t in 0..shape[0] {
                for l in 0..shape[1] {
                    for h in 0..shape[2] {
                        let index = |axis: usize, i: u64| if per[axis] { i } else { 0 };
                        let scale = ((index(0, t) * ones[1] + index(1, l)) * ones[2] + index(2, h)) as usize;
                        let scale = f32::from_le_bytes(bytes[4 * scale..4 * scale + 4].try_into().unwrap());
                        let byte = bytes[500 + ((t * shape[1] + l) * shape[2] + h) as usize];
                        let bits = scaled::product_of(code, product, byte, scale);
                        wanted.extend_from_slice(&bits.to_le_bytes()[..product.size()]);
                    }
                }
            }
            prop_assert_eq!(source.size(), wanted.len() as u64);
            let mut whole = vec![0; wanted.len()];
            source.read(0, &mut whole, &Stop::new()).unwrap();
            // NaN products differ in their payloads.
            let number = |bytes: &[u8]| match product {
                Product::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
                Product::BF16 => f32::from_bits(u32::from(u16::from_le_bytes(bytes.try_into().unwrap())) << 16),
            };
            for (found, wanted) in whole.chunks(product.size()).zip(wanted.chunks(product.size())) {
                prop_assert!(found == wanted || (number(found).is_nan() && number(wanted).is_nan()));
            }
            let mut buffers: Vec<(u64, Vec<u8>)> = vec![];
            for (at, len) in cuts {
                let at = at % source.size();
                buffers.push((at, vec![7; len.min(source.size() - at) as usize]));
            }
            let mut reads: Vec<_> = buffers.iter_mut().map(|(at, into)| RangeRead { at: *at, into }).collect();
            source.read_many(&mut reads, &Stop::new()).unwrap();
            for (at, found) in &buffers {
                prop_assert_eq!(&found[..], &whole[*at as usize..*at as usize + found.len()]);
                let mut again = vec![1; found.len()];
                if source.read_if_ready(RangeRead { at: *at, into: &mut again }).unwrap() == Ready::Yes {
                    prop_assert_eq!(&again, found);
                }
            }
            let mut outside = [0; 1];
            prop_assert_eq!(source.read(source.size(), &mut outside, &Stop::new()).unwrap_err().kind, Kind::Truncated);
        }
    }
}
