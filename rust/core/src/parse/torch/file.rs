//! A parsed file of torch: the places of its storages and tensors, checked.

use std::collections::HashSet;

use super::super::arrays::{ArrayPlace, Region};
use super::super::pickle::{Node, NumpyArray, SavedStorage, SavedTensor, Tree};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::number::to_usize;
use crate::source::Source;
use crate::source::held::Held;
use crate::threads::Context;

/// Bytes read at once to compute a checksum.
const PIECE: u64 = 4 << 20;
/// A storage's bytes: a part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoragePlace {
    /// Index in [`TorchFile::regions`].
    pub region: usize,
    /// The first byte of the region's content.
    pub skip: u64,
    /// Number of bytes.
    pub size: u64,
}

/// A parsed and checked file.
#[derive(Debug)]
pub struct TorchFile {
    /// The saved object.
    pub tree: Tree,
    /// The bytes of the pickle, to which the tree refers.
    pub pickle: Vec<u8>,
    /// The pickle's offset in the file, if it is stored as it is.
    pub pickle_at: Option<u64>,
    /// The places of storages, without repetition.
    pub regions: Vec<Region>,
    /// The place of each of the tree's storages; `None` if no tensor needs it.
    pub storages: Vec<StoragePlace>,
    /// Whether storages are byte-swapped.
    pub swapped: bool,
    /// Whether the file has the form before torch 1.6.
    pub is_legacy: bool,
    /// The inflated file, if the file is gzipped; places are offsets in it.
    pub held: Option<Held>,
}

/// The error for a file that contradicts itself.
pub(super) fn malformed(detail: impl Into<String>) -> Error {
    Error::new(Kind::Format, detail)
}

/// The place of a storage in a region of `size` bytes, which must be all that the storage claims.
pub(super) fn place_of(storage: &SavedStorage, region: usize, size: u64, name: &str) -> Result<StoragePlace> {
    let item = storage.item();
    if storage.count.checked_mul(item) != Some(size) {
        return Err(malformed(format!(
            "storage '{name}': expected {} elements of {item} bytes, found {size} bytes",
            storage.count
        )));
    }
    let Some((first, count)) = storage.part else { return Ok(StoragePlace { region, skip: 0, size }) };
    match first.checked_add(count) {
        Some(end) if end <= storage.count => Ok(StoragePlace { region, skip: first * item, size: count * item }),
        _ => Err(malformed(format!(
            "storage '{name}': a view of {count} elements from {first} on, found {} elements",
            storage.count
        ))),
    }
}

impl SavedTensor {
    /// Number of elements; `None` if it overflows.
    pub fn count(&self) -> Option<u64> {
        if self.shape.contains(&0) {
            return Some(0);
        }
        self.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).filter(|n| *n < 1 << 62)
    }

    /// One past the last element that it uses, from the storage's first byte.
    fn end(&self) -> u128 {
        if self.shape.contains(&0) {
            return 0;
        }
        let last = self.shape.iter().zip(&self.strides).map(|(n, s)| u128::from(n - 1) * u128::from(*s));
        // At most 64 axes: no overflow of 128 bits.
        last.fold(u128::from(self.first) + 1, u128::saturating_add)
    }
}

/// Adds stored bytes to a checksum.
fn update(crc: &mut crc32fast::Hasher, source: &dyn Source, region: &Region, context: &mut Context<'_>) -> Result<()> {
    let mut piece = memory::bytes(region.stored.min(PIECE))?;
    let mut done = 0;
    while done < region.stored {
        let n = piece.len().min(to_usize(region.stored - done));
        source.read(region.at + done, &mut piece[..n], context.stop())?;
        crc.update(&piece[..n]);
        done += n as u64;
        context.check()?;
    }
    Ok(())
}

impl TorchFile {
    /// Checks that every tensor is inside its storage.
    pub(super) fn check_tensors(&self) -> Result<()> {
        for node in self.tree.nodes() {
            let Node::Tensor(tensor) = node else { continue };
            let item = u128::from(tensor.dtype.bits() / 8);
            let size = self.storages.get(tensor.storage as usize).map_or(0, |place| place.size);
            if tensor.count().is_none() {
                return Err(malformed(format!("a tensor of shape {:?}: its size overflows", tensor.shape)));
            }
            if tensor.end().saturating_mul(item) > u128::from(size) {
                return Err(malformed(format!(
                    "a tensor of shape {:?}, strides {:?}, first element {}: expected {} bytes of storage, found {size}",
                    tensor.shape,
                    tensor.strides,
                    tensor.first,
                    tensor.end().saturating_mul(item)
                )));
            }
        }
        Ok(())
    }

    /// The place of a tensor of the tree.
    pub fn place(&self, tensor: &SavedTensor) -> Option<ArrayPlace> {
        let storage = self.storages.get(tensor.storage as usize)?;
        let region = *self.regions.get(storage.region)?;
        let within =
            storage.skip + if tensor.shape.contains(&0) { 0 } else { tensor.first * (tensor.dtype.bits() / 8) };
        Some(ArrayPlace {
            dtype: tensor.dtype,
            swapped: self.swapped && tensor.dtype.bits() > 8,
            shape: tensor.shape.clone(),
            strides: tensor.strides.clone(),
            at: if region.deflated { within } else { region.at + within },
            inside: region.deflated.then_some(region),
            parts: None,
        })
    }

    /// The place of a numpy array of the tree; `None` if its bytes are not stored unchanged.
    pub fn array_place(&self, array: &NumpyArray) -> Option<ArrayPlace> {
        let at = self.pickle_at?.checked_add(array.data.in_input()?.start as u64)?;
        let strides = if array.fortran {
            let reversed: Vec<u64> = array.shape.iter().rev().copied().collect();
            ArrayPlace::dense(&reversed).into_iter().rev().collect()
        } else {
            ArrayPlace::dense(&array.shape)
        };
        let (dtype, swapped) = (array.element.dtype, array.element.swapped);
        Some(ArrayPlace { dtype, swapped, shape: array.shape.clone(), strides, at, inside: None, parts: None })
    }

    /// Offsets of the storages whose content differs from their CRC-32. A CRC-32 of 0 was not computed by the writer.
    pub fn damaged(&self, source: &dyn Source, context: &mut Context<'_>) -> Result<Vec<u64>> {
        let mut found = vec![];
        for region in self.regions.iter().filter(|region| region.crc != 0) {
            let mut crc = crc32fast::Hasher::new();
            let read = if region.deflated {
                region.deflated(source).each(context, &mut |some| crc.update(some))
            } else {
                update(&mut crc, source, region, context)
            };
            let is_whole = match read {
                Err(e) if !region.deflated || e.kind != Kind::Format => return Err(e),
                read => read.is_ok(),
            };
            if !is_whole || crc.finalize() != region.crc {
                found.push(region.at);
            }
        }
        Ok(found)
    }

    /// Bytes of all storages, and bytes of the distinct tensors in them: a saved slice includes the whole storage.
    pub fn sizes(&self) -> (u64, u64) {
        let mut seen = HashSet::new();
        let mut used = vec![0u64; self.regions.len()];
        for node in self.tree.nodes() {
            let Node::Tensor(tensor) = node else { continue };
            let Some(place) = self.storages.get(tensor.storage as usize) else { continue };
            let item = tensor.dtype.bits() / 8;
            let first = place.skip.saturating_add(tensor.first.saturating_mul(item));
            if seen.insert((place.region, first, item, &tensor.shape, &tensor.strides)) {
                let bytes = tensor.count().unwrap_or(0).saturating_mul(item);
                used[place.region] = used[place.region].saturating_add(bytes);
            }
        }
        let stored = self.regions.iter().fold(0u64, |n, region| n.saturating_add(region.size));
        (stored, self.regions.iter().zip(used).fold(0u64, |n, (region, used)| n.saturating_add(used.min(region.size))))
    }
}
