//! Chunked arrays from Python: names of chunks, their decoders, and the scales of codes.

use actshard_core::arrays::coded::{CodedArray, Decode};
use actshard_core::arrays::naming::Naming;
use actshard_core::files::chunk_scales::ChunkScales;
use actshard_core::files::chunks::{ChunkArray, Content};
use actshard_core::source::Io;
use actshard_core::{Error, Kind};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::arguments::dtype_of;
use crate::place::{NamedPlace, store_of};
use crate::{decoding, errors};

/// A chunked array, as passed to `Rows.chunked`: folder, metadata file, prefix and separator of chunk names, shape, chunk
/// shape, fill element, whether byte-swapped, and the decoder, if chunks are encoded.
pub(crate) type ChunkArrayTuple =
    (NamedPlace, NamedPlace, String, String, [u64; 4], [u64; 4], Option<Vec<u8>>, bool, Option<DecodedBy>);

/// The decoder of an array's chunks.
#[derive(FromPyObject)]
pub(crate) enum DecodedBy {
    /// The core: the array's folder, its metadata, whether to read the inner chunks of shards.
    Core(NamedPlace, Vec<u8>, bool),
    /// A Python function that calls another library: indices in, bytes out.
    Python(Py<PyAny>),
}

impl DecodedBy {
    fn decoder(self) -> Box<dyn Decode> {
        match self {
            DecodedBy::Core(folder, metadata, inner) => {
                let store = store_of(&folder, Io::Pread);
                Box::new(CodedArray::of(store, &folder.location, &metadata, inner))
            }
            DecodedBy::Python(decode) => Box::new(decoding::Callback(decode)),
        }
    }
}

/// The scales of a chunked array, as passed to `Rows.chunked`: the type of its codes, scales per row, and where they are.
pub(crate) type ChunkScalesTuple<'py> = (String, u64, ScalesBy<'py>);

#[derive(FromPyObject)]
pub(crate) enum ScalesBy<'py> {
    /// Those of each layer.
    Groups(PyReadonlyArray1<'py, f32>),
    /// Those of each row, in an array with this decoder.
    Chunks(DecodedBy),
}

fn chunk_scales(py: Python<'_>, (code, parts, scales): ChunkScalesTuple<'_>) -> PyResult<ChunkScales> {
    let code = dtype_of(py, &code)?;
    Ok(match scales {
        ScalesBy::Groups(scales) => {
            ChunkScales::of_groups(code, parts, scales.as_slice()?).map_err(|e| errors::raise(py, &e))?
        }
        ScalesBy::Chunks(decoder) => ChunkScales::of_rows(code, parts, decoder.decoder()),
    })
}

/// The array of these arguments, whose rows are products if there are scales.
pub(crate) fn chunk_array(
    py: Python<'_>,
    array: ChunkArrayTuple,
    scales: Option<ChunkScalesTuple<'_>>,
) -> PyResult<ChunkArray> {
    let (folder, metadata, prefix, separator, shape, chunk, fill, swapped, coded) = array;
    let unknown = || errors::raise(py, &Error::new(Kind::Internal, "unknown names of chunks"));
    let content = coded.map_or(Content::Plain { swapped }, |coded| Content::Coded(coded.decoder()));
    let naming = Naming::of(&prefix, &separator).ok_or_else(unknown)?;
    let scales = scales.map(|scales| chunk_scales(py, scales)).transpose()?;
    let (folder, metadata) = (folder.location, metadata.location);
    Ok(ChunkArray { folder, metadata, naming, shape, chunk, fill, content, scales })
}
