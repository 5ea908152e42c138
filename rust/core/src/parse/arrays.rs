//! Arrays in files: their places as parsers find them, and their elements in C order.
//!
//! Only arrays of metadata (token ids, masks, lengths) are read this way. Activations are read as rows.

use crate::codec::inflate;
use crate::dtype::{Cast, DType};
use crate::error::{Error, Kind, Result};
use crate::source::Source;

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

    /// The strides of elements in C order.
    pub fn dense(shape: &[u64]) -> Vec<u64> {
        let mut next = 1u64;
        let mut made: Vec<u64> = shape
            .iter()
            .rev()
            .map(|n| {
                let this = next;
                next = next.saturating_mul((*n).max(1));
                this
            })
            .collect();
        made.reverse();
        made
    }
}

/// An array's elements in C order and native byte order.
pub fn read(source: &dyn Source, place: &ArrayPlace) -> Result<Vec<u8>> {
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
    let cast = Cast::between(place.dtype, place.dtype)?.swapped_if(place.swapped);
    let stored = match place.inside {
        None => {
            let mut stored = vec![0; extent as usize];
            source.read(place.at, &mut stored)?;
            stored
        }
        Some(region) => {
            let mut packed = vec![0; region.stored as usize];
            source.read(region.at, &mut packed)?;
            let mut all = inflate::raw(&packed, region.size).map_err(|e| e.byte(region.at))?;
            let range = place.at.checked_add(extent).filter(|end| *end <= region.size);
            let Some(end) = range else {
                return Err(Error::new(Kind::Format, "an array extends past its deflated record").byte(region.at));
            };
            all.truncate(end as usize);
            all.split_off(place.at as usize)
        }
    };
    let mut made = vec![0; bytes as usize];
    if place.strides == ArrayPlace::dense(&place.shape) || bytes == 0 {
        cast.apply(&stored[..bytes as usize], &mut made);
        return Ok(made);
    }
    let mut at = vec![0u64; place.shape.len()];
    for to in made.chunks_exact_mut(item as usize) {
        let from: u64 = at.iter().zip(&place.strides).map(|(i, s)| i * s).sum();
        let from = (from * item) as usize;
        cast.apply(&stored[from..from + item as usize], to);
        for (i, n) in at.iter_mut().zip(&place.shape).rev() {
            *i += 1;
            if *i < *n {
                break;
            }
            *i = 0;
        }
    }
    Ok(made)
}
