//! The scales of an array of int8 or float8 codes in chunks, whose rows are read as float32 products.
//!
//! ```text
//! codes   (examples, groups, tokens, width)      in chunks (1, 1, tokens, width)
//! scales  (examples, groups, tokens, parts)      in chunks with the same numbers, or
//!         (1, groups, 1, parts)                  in memory
//! row[h] = codes[h] * scales[h / (width / parts)]
//! ```
//!
//! `parts` divides the width: 1 is a scale for each row, `width` one for each element, others one for each block of elements.

use std::sync::Arc;

use super::scaled::{ScaledArray, little_endian};
use crate::arrays::coded::Decode;
use crate::dtype::DType;
use crate::error::{Error, Kind, Result};
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::parse::arrays::ArrayPlace;

/// Where the scales are.
#[derive(Debug)]
pub enum ScaleSource {
    /// In memory: those of each group, little-endian.
    Groups(Vec<Arc<Buffer>>),
    /// In an array with a scale, or several, for each row: its chunks have the numbers of the codes' chunks.
    Chunks(Box<dyn Decode>),
}

/// The scales of an array.
#[derive(Debug)]
pub struct ChunkScales {
    /// The type of the codes.
    code: DType,
    /// Scales of a row.
    parts: u64,
    source: ScaleSource,
}

impl ChunkScales {
    /// Scales in memory, `parts` for each group.
    pub fn of_groups(code: DType, parts: u64, scales: &[f32]) -> Result<ChunkScales> {
        let each = scales.chunks(to_usize(parts.max(1)));
        let groups = each.map(|scales| little_endian(scales).map(Arc::new)).collect::<Result<_>>()?;
        Ok(ChunkScales { code, parts, source: ScaleSource::Groups(groups) })
    }

    /// Scales in an array, `parts` for each row.
    pub fn of_rows(code: DType, parts: u64, chunks: Box<dyn Decode>) -> ChunkScales {
        ChunkScales { code, parts, source: ScaleSource::Chunks(chunks) }
    }

    /// Where they are.
    pub fn source(&self) -> &ScaleSource {
        &self.source
    }

    /// Fails if an array of this shape in these chunks cannot have these scales.
    pub(super) fn check(&self, shape: [u64; 4], chunk: [u64; 4], rows: DType) -> Result<()> {
        let [_, groups, _, width] = shape;
        if rows != DType::F32 {
            return Err(Error::new(Kind::Internal, format!("products of type {}", rows.name())));
        }
        if [chunk[0], chunk[1], chunk[3]] != [1, 1, width] {
            let detail =
                format!("codes with scales: expected chunks of one example and layer, whole rows, found {chunk:?}");
            return Err(Error::new(Kind::Unsupported, detail));
        }
        if self.parts == 0 || !width.is_multiple_of(self.parts) {
            let detail = format!("scales: expected a number per row that divides {width}, found {}", self.parts);
            return Err(Error::new(Kind::Format, detail));
        }
        let of_group = |scales: &Arc<Buffer>| scales.len() as u64 == 4 * self.parts;
        match &self.source {
            ScaleSource::Groups(scales) if scales.len() as u64 != groups || !scales.iter().all(of_group) => {
                Err(Error::new(Kind::Format, format!("scales: expected {} for each of {groups} layers", self.parts)))
            }
            _ => Ok(()),
        }
    }

    /// Bytes of the scales of a chunk with so many tokens.
    pub(super) fn chunk_bytes(&self, tokens: u64) -> u64 {
        tokens * self.parts * 4
    }

    /// The products of a chunk whose codes begin at byte `at`. `of_chunk` are the scales of its rows, if each has its own.
    pub(super) fn products(
        &self,
        at: u64,
        chunk: [u64; 4],
        group: u64,
        of_chunk: Option<Arc<Buffer>>,
    ) -> Result<ScaledArray> {
        let lacking = || Error::new(Kind::Internal, "a chunk without scales");
        let scales = match (&self.source, of_chunk) {
            (ScaleSource::Groups(scales), _) => {
                usize::try_from(group).ok().and_then(|group| scales.get(group)).cloned()
            }
            (ScaleSource::Chunks(_), of_chunk) => of_chunk,
        };
        let [_, _, tokens, width] = chunk;
        let own = if matches!(self.source, ScaleSource::Chunks(_)) { tokens } else { 1 };
        let (shape, of_axes) = match self.parts {
            1 => ([tokens, 1, width], [own, 1, 1]),
            parts if parts == width => ([tokens, 1, width], [own, 1, width]),
            parts => ([tokens, parts, width / parts], [own, parts, 1]),
        };
        let place = |dtype, shape: [u64; 3], at| ArrayPlace {
            dtype,
            swapped: false,
            shape: shape.to_vec(),
            strides: ArrayPlace::dense(&shape),
            at,
            inside: None,
            parts: None,
        };
        let array = ScaledArray::new(&place(self.code, shape, at), &place(DType::F32, of_axes, 0), DType::F32)?;
        array.sharing(scales.ok_or_else(lacking)?)
    }
}
