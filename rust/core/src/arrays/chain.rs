//! Decodes the codec chains of Zarr arrays within limits.
//!
//! zarrs parses the metadata and decodes array-to-array codecs; bytes are decompressed here, for three reasons. A
//! chunk's decoded size follows from its shape, so decoding stops there (zarrs' decoders stop only when memory runs
//! out). Every inner chunk is decoded whole, so its checksum is verified (zarrs' partial decoders skip a trailing
//! crc32c). Input after the end of compressed data is an error, as in numcodecs.
//!
//! A shard that cannot be read chunk by chunk, because it is compressed as a whole or inside another shard, is decoded whole.

use std::borrow::Cow;
use std::io::Read;
use std::num::NonZeroU64;
use std::sync::Arc;

use zarrs::array::codec::{
    BloscCodec, Bz2Codec, Crc32cCodec, GzipCodec, ShardingCodec, VlenBytesCodec, VlenUtf8Codec, ZlibCodec, ZstdCodec,
};
use zarrs::array::{
    ArrayBytes, ArrayToArrayCodecTraits, ArrayToBytesCodecTraits, BytesRepresentation, BytesToBytesCodecTraits,
    CodecChain, CodecMetadataOptions, CodecOptions, CodecTraits, DataType, FillValue,
};
use zarrs::metadata_ext::codec::sharding::{
    ShardingCodecConfiguration, ShardingCodecConfigurationV1, ShardingIndexLocation,
};

use super::failing::{Said, Undecodable};
use super::index::{DecodeIndex, IndexForm, place};
use super::meta::index_numbers;
use super::packed::PlanesCodec;
use super::zstandard;
use crate::codec::planes::{BlockRow, PackedBlock};
use crate::error::{Finding, Kind};
use crate::memory;
use crate::number::to_usize;

/// The largest decoded chunk, as in numcodecs ("Codec does not support buffers of > 2147483647 bytes").
pub(super) const MOST_DECODED: u64 = i32::MAX as u64;

/// Maximum nesting of shards.
const MOST_NESTED: usize = 4;

/// Maximum encoded bytes of elements of variable size.
const MOST_VARIABLE: u64 = 1 << 30;

/// Decoded elements in C order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Elements {
    /// Elements of fixed size, in native byte order.
    Fixed(Vec<u8>),
    /// Strings or byte strings.
    Variable(Vec<Vec<u8>>),
}

/// An array between two codecs.
#[derive(Clone, Debug)]
struct Form {
    shape: Vec<NonZeroU64>,
    dtype: DataType,
    fill: FillValue,
}

impl Form {
    fn elements(&self) -> Said<u64> {
        self.shape
            .iter()
            .try_fold(1u64, |n, d| n.checked_mul(d.get()))
            .filter(|n| *n < 1 << 48)
            .ok_or_else(|| format!("a chunk of shape {:?} is too large", self.shape).into())
    }
}

/// The codecs of an array's chunks.
#[derive(Debug)]
pub(super) struct Chain {
    /// Each with the form of its decoded output.
    arrays: Vec<(Arc<dyn ArrayToArrayCodecTraits>, Form)>,
    /// The decoded form of the array-to-bytes codec.
    last: Form,
    whole: Form,
    to_bytes: ToBytes,
    /// Bytes before the first bytes-to-bytes codec.
    plain: Size,
    bytes: Vec<(Undo, BytesRepresentation, Size)>,
    encoded: Size,
}

/// The length of bytes.
#[derive(Clone, Copy, Debug)]
enum Size {
    Exactly(u64),
    AtMost(u64),
}

impl Size {
    fn limit(self) -> u64 {
        match self {
            Size::Exactly(n) | Size::AtMost(n) => n,
        }
    }

    fn fits(self, length: u64) -> bool {
        match self {
            Size::Exactly(n) => length == n,
            Size::AtMost(n) => length <= n,
        }
    }
}

#[derive(Debug)]
enum ToBytes {
    Zarrs(Arc<dyn ArrayToBytesCodecTraits>),
    /// The number of strings, then each after its 32-bit length (numcodecs' `vlen-utf8` and `vlen-bytes`).
    Strings,
    Shard(Box<ShardCodec>),
}

/// Inner chunks of a shard, and the form of its index.
#[derive(Debug)]
pub(super) struct ShardCodec {
    pub inner: Chain,
    /// Shape of the shard, in elements.
    shape: Vec<NonZeroU64>,
    /// Shape of an inner chunk.
    chunk: Vec<NonZeroU64>,
    /// Inner chunks per dimension.
    pub counts: Vec<u64>,
    pub index: IndexForm,
}

/// Bytes-to-bytes codecs, by the bound of their output.
#[derive(Debug)]
enum Undo {
    Gzip,
    Zlib,
    Bz2,
    Zstd,
    Blosc(Arc<dyn BytesToBytesCodecTraits>),
    Planes,
    /// A checksum after the bytes.
    Crc32c,
    /// The output is never longer than the input: other checksums, shuffling.
    Shrinking(Arc<dyn BytesToBytesCodecTraits>),
}

fn options() -> CodecOptions {
    CodecOptions::default().with_concurrent_target(1)
}

fn text(error: impl std::fmt::Display) -> Undecodable {
    error.to_string().into()
}

impl Chain {
    /// The chain for chunks of this shape.
    pub fn new(codecs: &CodecChain, shape: &[NonZeroU64], dtype: &DataType, fill: &FillValue) -> Said<Chain> {
        Chain::nested(codecs, Form { shape: shape.to_vec(), dtype: dtype.clone(), fill: fill.clone() }, 0)
    }

    fn nested(codecs: &CodecChain, whole: Form, depth: usize) -> Said<Chain> {
        whole.elements()?;
        let mut last = whole.clone();
        let mut arrays = vec![];
        for codec in codecs.array_to_array_codecs() {
            let (shape, dtype, fill) =
                codec.encoded_representation(&last.shape, &last.dtype, &last.fill).map_err(text)?;
            let before = std::mem::replace(&mut last, Form { shape: shape.to_vec(), dtype, fill });
            arrays.push((Arc::clone(codec), before));
        }
        let elements = last.elements()?;
        let size = last.dtype.fixed_size().map(|size| elements.saturating_mul(size as u64));
        let codec = codecs.array_to_bytes_codec();
        let (to_bytes, mut known, plain) = match codec.as_any().downcast_ref::<ShardingCodec>() {
            Some(sharding) if depth < MOST_NESTED => {
                let shard = ShardCodec::new(sharding, &last, depth)?;
                let limit = shard.index.bytes().saturating_add(around(size.unwrap_or(MOST_VARIABLE)));
                (ToBytes::Shard(Box::new(shard)), BytesRepresentation::UnboundedSize, Size::AtMost(limit))
            }
            Some(_) => return Err(format!("shards nested more than {MOST_NESTED} deep are unsupported").into()),
            None if codec.as_any().is::<VlenUtf8Codec>() || codec.as_any().is::<VlenBytesCodec>() => {
                (ToBytes::Strings, BytesRepresentation::UnboundedSize, Size::AtMost(MOST_VARIABLE))
            }
            None => {
                let known = codec.encoded_representation(&last.shape, &last.dtype, &last.fill).map_err(text)?;
                let Some(size) = size else {
                    return Err("elements of variable size are supported with vlen-utf8 and vlen-bytes only".into());
                };
                let plain = match known {
                    BytesRepresentation::FixedSize(n) => Size::Exactly(n),
                    BytesRepresentation::BoundedSize(n) => Size::AtMost(n),
                    BytesRepresentation::UnboundedSize => Size::AtMost(around(size)),
                };
                (ToBytes::Zarrs(Arc::clone(codec)), known, plain)
            }
        };
        let mut bytes = vec![];
        let mut bound = plain;
        for codec in codecs.bytes_to_bytes_codecs() {
            bytes.push((Undo::of(codec), known, bound));
            known = codec.encoded_representation(&known);
            bound = match known {
                BytesRepresentation::FixedSize(n) => Size::Exactly(n),
                // Another library's encoder may produce more than zarrs'.
                _ => Size::AtMost(known.size().unwrap_or(0).max(around(plain.limit()))),
            };
        }
        Ok(Chain { arrays, last, whole, to_bytes, plain, bytes, encoded: bound })
    }

    /// Rejects an encoded chunk that is longer than codecs can produce.
    pub fn check_encoded(&self, n: u64) -> Said<()> {
        let most = self.encoded.limit();
        if n <= most {
            Ok(())
        } else {
            Err(format!("expected an encoded chunk of at most {most} bytes, found {n}").into())
        }
    }

    /// The shard codec, if it is the only codec.
    pub fn shard(&self) -> Option<&ShardCodec> {
        match &self.to_bytes {
            ToBytes::Shard(shard) if self.arrays.is_empty() && self.bytes.is_empty() => Some(shard),
            _ => None,
        }
    }

    /// Bytes of a decoded element; `None` if elements vary in size or are rearranged by codecs.
    pub fn element_size(&self) -> Option<usize> {
        self.whole.dtype.fixed_size().filter(|_| self.arrays.is_empty())
    }

    /// Decodes a chunk.
    pub fn decode(&self, encoded: Cow<'_, [u8]>) -> Said<Elements> {
        let whole = self.whole.elements()?;
        if let Some(size) = self.whole.dtype.fixed_size()
            && whole.saturating_mul(size as u64) > MOST_DECODED.max(encoded.len() as u64)
        {
            return Err(format!(
                "expected a chunk of at most {MOST_DECODED} bytes, found {whole} elements of {size} bytes"
            )
            .into());
        }
        let mut bytes = encoded;
        for (undo, known, bound) in self.bytes.iter().rev() {
            bytes = undo.run(bytes, *known, *bound)?;
        }
        if let Size::Exactly(n) = self.plain
            && bytes.len() as u64 != n
        {
            return Err(format!("expected {n} bytes, found {}", bytes.len()).into());
        }
        let mut array = match &self.to_bytes {
            ToBytes::Zarrs(codec) => {
                let Form { shape, dtype, fill } = &self.last;
                let bytes = match bytes {
                    Cow::Borrowed(bytes) => memory::copied(bytes)?,
                    Cow::Owned(bytes) => bytes,
                };
                codec.decode(Cow::Owned(bytes), shape, dtype, fill, &options()).map_err(text)?.into_owned()
            }
            ToBytes::Strings => return self.variable(strings(&bytes, self.last.elements()?)?),
            ToBytes::Shard(shard) => match shard.whole(&bytes)? {
                Elements::Fixed(bytes) => ArrayBytes::new_flen(bytes),
                Elements::Variable(each) => return self.variable(each),
            },
        };
        for (codec, form) in self.arrays.iter().rev() {
            drop(memory::reserve::<u8>(array.size() as u64)?);
            array = codec.decode(array, &form.shape, &form.dtype, &form.fill, &options()).map_err(text)?.into_owned();
        }
        array.into_fixed().map(|b| Elements::Fixed(b.into_owned())).map_err(text)
    }

    /// Calls `each` with the position of each of these row numbers and its row, if the first codec after the numbers' bytes is
    /// `actshard.planes` and its rows have `row` bytes; `false` otherwise. Checksums are compared; nothing is kept.
    pub fn rows(
        &self,
        encoded: &[u8],
        row: usize,
        numbers: &[u64],
        each: &mut dyn FnMut(usize, BlockRow<'_>),
    ) -> Said<bool> {
        let mut bytes = Cow::Borrowed(encoded);
        for (undo, known, bound) in self.bytes.iter().skip(1).rev() {
            bytes = undo.run(bytes, *known, *bound)?;
        }
        let Some((Undo::Planes, _, bound)) = self.bytes.first() else { return Ok(false) };
        let block = block_of(&bytes, *bound)?;
        if block.row() != row {
            return Ok(false);
        }
        block.rows(numbers, each)?;
        Ok(true)
    }

    fn variable(&self, each: Vec<Vec<u8>>) -> Said<Elements> {
        if self.arrays.is_empty() { Ok(Elements::Variable(each)) } else { Err("strings cannot be transposed".into()) }
    }
}

/// A bound on the compressed size of `n` incompressible bytes.
fn around(n: u64) -> u64 {
    n.saturating_mul(2).saturating_add(64 << 10)
}

fn strings(bytes: &[u8], count: u64) -> Said<Vec<Vec<u8>>> {
    let mut rest = bytes;
    let mut next = |n: usize| {
        let (taken, after) = rest.split_at_checked(n)?;
        rest = after;
        Some(taken)
    };
    let number = |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
    let short = || format!("expected {count} strings, found {} bytes", bytes.len());
    if u64::from(next(4).map(number).ok_or_else(short)?) != count || (bytes.len() as u64) < 4 * count {
        return Err(short().into());
    }
    let each = (0..count).map(|_| {
        let length = next(4).map(number)?;
        next(length as usize).map(<[u8]>::to_vec)
    });
    let each: Vec<Vec<u8>> = each.collect::<Option<_>>().ok_or_else(short)?;
    if rest.is_empty() { Ok(each) } else { Err(format!("{} bytes follow {count} strings", rest.len()).into()) }
}

impl Undo {
    fn of(codec: &Arc<dyn BytesToBytesCodecTraits>) -> Undo {
        let any = codec.as_any();
        if any.is::<GzipCodec>() {
            Undo::Gzip
        } else if any.is::<ZlibCodec>() {
            Undo::Zlib
        } else if any.is::<Bz2Codec>() {
            Undo::Bz2
        } else if any.is::<ZstdCodec>() {
            Undo::Zstd
        } else if any.is::<BloscCodec>() {
            Undo::Blosc(Arc::clone(codec))
        } else if any.is::<PlanesCodec>() {
            Undo::Planes
        } else if any.is::<Crc32cCodec>() && is_at_end(&**codec) {
            Undo::Crc32c
        } else {
            Undo::Shrinking(Arc::clone(codec))
        }
    }

    fn run<'a>(&self, encoded: Cow<'a, [u8]>, known: BytesRepresentation, bound: Size) -> Said<Cow<'a, [u8]>> {
        match self {
            Undo::Gzip => inflate("gzip", flate2::bufread::MultiGzDecoder::new(&encoded[..]), &encoded, bound)
                .map_err(|e| Undecodable { finding: (e.kind == Kind::Format).then_some(Finding::Gzip), ..e }),
            Undo::Zlib => {
                let mut decoder = flate2::bufread::ZlibDecoder::new(&encoded[..]);
                let made = inflate("zlib", &mut decoder, &encoded, bound)?;
                let read = decoder.total_in();
                if read != encoded.len() as u64 {
                    return Err(
                        format!("zlib: {} bytes follow the end of the data", encoded.len() as u64 - read).into()
                    );
                }
                Ok(made)
            }
            Undo::Bz2 => inflate("bz2", bzip2::bufread::MultiBzDecoder::new(&encoded[..]), &encoded, bound),
            Undo::Zstd => {
                if bound.limit() <= likely(encoded.len())
                    && let Some(made) = zstandard::decode(&encoded, bound.limit())
                    && bound.fits(made.len() as u64)
                {
                    return Ok(Cow::Owned(made));
                }
                let decoder = zstd::stream::read::Decoder::with_buffer(&encoded[..]).map_err(text)?;
                inflate("zstd", decoder, &encoded, bound)
            }
            Undo::Blosc(codec) => {
                let header = encoded.get(..16).ok_or("blosc: expected a header of 16 bytes")?;
                let word = |at: usize| u64::from(u32::from_le_bytes([0, 1, 2, 3].map(|i| header[at + i])));
                let (claimed, length) = (word(4), word(12));
                if !bound.fits(claimed) {
                    return Err(
                        format!("blosc: expected a frame of {} bytes, found one of {claimed}", bound.limit()).into()
                    );
                }
                if length != encoded.len() as u64 {
                    return Err(format!("blosc: expected {length} encoded bytes, found {}", encoded.len()).into());
                }
                drop(memory::reserve::<u8>(claimed)?);
                codec.decode(encoded, &known, &options()).map_err(text)
            }
            Undo::Planes => Ok(Cow::Owned(block_of(&encoded, bound)?.decode()?)),
            Undo::Crc32c => {
                let Some((data, stored)) = encoded.split_last_chunk() else {
                    return Err(format!("crc32c: expected a checksum of 4 bytes, found {} bytes", encoded.len()).into());
                };
                let (n, stored, crc) = (data.len(), u32::from_le_bytes(*stored), crc32c::crc32c(data));
                if stored != crc {
                    return Err(format!("expected the checksum (crc32c) {stored:08x}, found {crc:08x}").into());
                }
                Ok(match encoded {
                    Cow::Borrowed(bytes) => Cow::Borrowed(&bytes[..n]),
                    Cow::Owned(mut bytes) => {
                        bytes.truncate(n);
                        Cow::Owned(bytes)
                    }
                })
            }
            Undo::Shrinking(codec) => codec.decode(encoded, &known, &options()).map_err(text),
        }
    }
}

/// A block of `actshard.planes` with the right length of decoded bytes.
fn block_of(encoded: &[u8], bound: Size) -> Said<PackedBlock<'_>> {
    let block = PackedBlock::parse(encoded, bound.limit())?;
    if bound.fits(block.decoded() as u64) {
        Ok(block)
    } else {
        Err(format!("actshard.planes: expected {} bytes, found {}", bound.limit(), block.decoded()).into())
    }
}

/// Whether a codec puts its checksum after the bytes: numcodecs' crc32c may begin with it.
fn is_at_end(codec: &dyn BytesToBytesCodecTraits) -> bool {
    codec.encode(Cow::Borrowed(b"a"), &options()).is_ok_and(|encoded| encoded.starts_with(b"a"))
}

/// The decoded size of compressed data; fails above `limit`.
pub(super) fn decoded_size(codec: &str, data: &[u8], limit: u64) -> Said<u64> {
    let undo = match codec {
        "gzip" => Undo::Gzip,
        "zlib" => Undo::Zlib,
        "bz2" => Undo::Bz2,
        "zstd" => Undo::Zstd,
        _ => return Err(format!("unknown codec '{codec}'").into()),
    };
    let made = undo.run(Cow::Borrowed(data), BytesRepresentation::UnboundedSize, Size::AtMost(limit))?;
    Ok(made.len() as u64)
}

/// A plausible decoded size for data of this encoded length.
fn likely(encoded: usize) -> u64 {
    (encoded as u64).saturating_mul(16).max(1 << 20)
}

/// Reads a decoder to its end, and fails if the output exceeds the bound.
fn inflate(name: &str, decoder: impl Read, encoded: &[u8], bound: Size) -> Said<Cow<'static, [u8]>> {
    let limit = bound.limit();
    // The rest is allocated as data arrives, so that a claimed size alone allocates nothing.
    let mut made = memory::reserve(limit.min(likely(encoded.len())))?;
    let mut decoder = decoder.take(limit.saturating_add(1));
    loop {
        let before = made.len();
        let step = (before.max(1 << 20) as u64).min(limit + 1 - before as u64);
        made.try_reserve(to_usize(step)).map_err(|_| memory::no_memory(before as u64 + step))?;
        if (&mut decoder).take(step).read_to_end(&mut made).map_err(|e| format!("{name}: {e}"))? == 0 {
            break;
        }
        if made.len() as u64 > limit {
            return Err(format!("{name}: decodes to more than the {limit} bytes that the chunk's shape allows").into());
        }
    }
    match bound {
        Size::Exactly(n) if made.len() as u64 != n => {
            Err(format!("{name}: expected {n} bytes, decoded {}", made.len()).into())
        }
        _ => Ok(Cow::Owned(made)),
    }
}

impl DecodeIndex for Chain {
    fn decode(&self, raw: Vec<u8>) -> Said<Vec<u8>> {
        match Chain::decode(self, Cow::Owned(raw))? {
            Elements::Fixed(bytes) => Ok(bytes),
            Elements::Variable(_) => Err("expected numbers".into()),
        }
    }
}

impl ShardCodec {
    fn new(codec: &ShardingCodec, form: &Form, depth: usize) -> Said<ShardCodec> {
        let configuration = codec
            .configuration_v3(&CodecMetadataOptions::default())
            .ok_or("sharding without a configuration")?
            .to_typed::<ShardingCodecConfiguration>()
            .map_err(text)?;
        let ShardingCodecConfiguration::V1(v1) = configuration else {
            return Err("unsupported version of the sharding codec".into());
        };
        let chunk: Vec<NonZeroU64> = v1.chunk_shape.to_vec();
        if chunk.len() != form.shape.len() || form.shape.iter().zip(&chunk).any(|(n, c)| n.get() % c.get() != 0) {
            return Err(format!("expected inner chunks that divide shards of {:?}, found {chunk:?}", form.shape).into());
        }
        let counts: Vec<u64> = form.shape.iter().zip(&chunk).map(|(n, c)| n.get() / c.get()).collect();
        let inner = Form { shape: chunk.clone(), dtype: form.dtype.clone(), fill: form.fill.clone() };
        let inner = Chain::nested(&CodecChain::from_metadata(&v1.codecs).map_err(text)?, inner, depth + 1)?;
        let index = ShardCodec::index_form(&v1, &counts)?;
        Ok(ShardCodec { inner, shape: form.shape.clone(), chunk, counts, index })
    }

    fn index_form(v1: &ShardingCodecConfigurationV1, counts: &[u64]) -> Said<IndexForm> {
        let pair = NonZeroU64::MIN.saturating_add(1);
        let shape = counts.iter().filter_map(|n| NonZeroU64::new(*n)).chain([pair]).collect();
        let fill = FillValue::from(u64::MAX);
        let pairs = Form { shape, dtype: zarrs::array::data_type::uint64(), fill };
        let codecs = CodecChain::from_metadata(&v1.index_codecs).map_err(text)?;
        let chain = Chain::nested(&codecs, pairs, MOST_NESTED)?;
        let Size::Exactly(bytes) = chain.encoded else {
            return Err("expected index codecs with a fixed encoded size".into());
        };
        let chunks = counts.iter().product();
        let at_end = !matches!(v1.index_location, ShardingIndexLocation::Start);
        let codecs = serde_json::to_value(&v1.index_codecs).map_err(text)?;
        let numbers = codecs.as_array().and_then(|codecs| index_numbers(codecs));
        Ok(match numbers.map(|numbers| IndexForm::numbers(chunks, at_end, numbers)) {
            Some(form) if form.bytes() == bytes => form,
            _ => IndexForm::coded(chunks, at_end, Arc::new(chain), bytes),
        })
    }

    /// The index of a shard, from the index of one of its inner chunks in the whole array.
    pub fn outer(&self, indices: &[u64]) -> Vec<u64> {
        indices.iter().zip(&self.counts).map(|(i, n)| i / n).collect()
    }

    /// An inner chunk's position in the shard's index, from its index in the shard or in the whole array.
    pub fn number(&self, indices: &[u64]) -> usize {
        to_usize(indices.iter().zip(&self.counts).fold(0, |n, (i, c)| n * c + i % c))
    }

    fn whole(&self, bytes: &[u8]) -> Said<Elements> {
        let len = bytes.len() as u64;
        let cut = |(at, n): (u64, u64)| &bytes[to_usize(at)..to_usize(at + n)];
        let n = self.index.bytes();
        let at = self.index.start(len);
        let at = at.ok_or_else(|| format!("expected a shard index of {n} bytes, found {len} bytes in all"))?;
        let index = self.index.parse(memory::copied(cut((at, n)))?)?;
        let fill = self.inner.whole.fill.as_ne_bytes();
        let fixed = self.inner.whole.dtype.is_fixed();
        let (shape, chunk) = (unwrapped(&self.shape), unwrapped(&self.chunk));
        assemble(&shape, &chunk, fill, fixed, Places::new(&self.counts), |at| {
            let entry = *index.get(self.number(at)).ok_or("shard index: too short")?;
            let placed = place(entry, len)?;
            placed
                .map(|(at, n)| {
                    self.inner.check_encoded(n).and_then(|()| self.inner.decode(Cow::Borrowed(cut((at, n)))))
                })
                .transpose()
        })
    }
}

fn unwrapped(shape: &[NonZeroU64]) -> Vec<u64> {
    shape.iter().map(|n| n.get()).collect()
}

/// Assembles an array from its chunks at `places`; elements in no chunk get the fill value.
pub(super) fn assemble(
    shape: &[u64],
    chunks: &[u64],
    fill: &[u8],
    fixed: bool,
    places: impl IntoIterator<Item = Vec<u64>>,
    mut chunk: impl FnMut(&[u64]) -> Said<Option<Elements>>,
) -> Said<Elements> {
    let too_large = || format!("shape {shape:?} is too large to read");
    let product = |n: &[u64]| n.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).filter(|n| *n < 1 << 48);
    let (total, per) = product(shape).zip(product(chunks)).ok_or_else(too_large)?;
    let (total, per, size) = (to_usize(total), to_usize(per), fill.len());
    let mut made = if fixed {
        let bytes = total.checked_mul(size).ok_or_else(too_large)?;
        // Of a shard of 1 GiB that holds one chunk, the rest is never touched.
        if fill.iter().all(|b| *b == 0) {
            Elements::Fixed(memory::bytes(bytes as u64)?)
        } else {
            let mut made = memory::reserve(bytes as u64)?;
            (0..total).for_each(|_| made.extend_from_slice(fill));
            Elements::Fixed(made)
        }
    } else {
        let mut texts: Vec<Vec<u8>> = memory::reserve(total as u64)?;
        for _ in 0..total {
            texts.push(memory::copied(fill)?);
        }
        Elements::Variable(texts)
    };
    let dims = shape.len();
    for at in places {
        if at.len() != dims || at.iter().zip(chunks).zip(shape).any(|((a, c), n)| a.saturating_mul(*c) >= *n) {
            continue;
        }
        let Some(found) = chunk(&at)? else { continue };
        let right = match &found {
            Elements::Fixed(bytes) => fixed && bytes.len() == per * size,
            Elements::Variable(each) => !fixed && each.len() == per,
        };
        if !right {
            return Err(format!("expected a chunk of {per} elements").into());
        }
        // Runs along the last dimension, clipped at the array's end.
        let begin: Vec<u64> = at.iter().zip(chunks).map(|(a, c)| a * c).collect();
        let (outer, width) = (dims.saturating_sub(1), chunks.last().map_or(1, |c| to_usize(*c)));
        let run = dims.checked_sub(1).map_or(1, |d| to_usize(chunks[d].min(shape[d] - begin[d])));
        for (k, line) in Places::new(&chunks[..outer]).enumerate() {
            if line.iter().zip(&begin).zip(shape).any(|((l, b), n)| b + l >= *n) {
                continue;
            }
            let to = to_usize((0..dims).fold(0, |to, d| to * shape[d] + begin[d] + line.get(d).copied().unwrap_or(0)));
            let from = k * width;
            match (&mut made, &found) {
                (Elements::Fixed(made), Elements::Fixed(found)) => {
                    made[to * size..(to + run) * size].copy_from_slice(&found[from * size..(from + run) * size]);
                }
                (Elements::Variable(made), Elements::Variable(found)) => {
                    made[to..to + run].clone_from_slice(&found[from..from + run]);
                }
                _ => {}
            }
        }
    }
    Ok(made)
}

/// All indices below `counts`, in C order.
pub(super) struct Places {
    counts: Vec<u64>,
    next: Option<Vec<u64>>,
}

impl Places {
    pub fn new(counts: &[u64]) -> Places {
        let next = (!counts.contains(&0)).then(|| vec![0; counts.len()]);
        Places { counts: counts.to_vec(), next }
    }
}

impl Iterator for Places {
    type Item = Vec<u64>;

    fn next(&mut self) -> Option<Vec<u64>> {
        let now = self.next.take()?;
        let mut next = now.clone();
        for (index, count) in next.iter_mut().zip(&self.counts).rev() {
            *index += 1;
            if *index < *count {
                self.next = Some(next);
                break;
            }
            *index = 0;
        }
        Some(now)
    }
}
