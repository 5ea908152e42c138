//! Files of `torch.save`, read without torch and without running anything; the file is untrusted.
//!
//! Since torch 1.6 a file is a zip archive whose records are stored uncompressed, at multiples of 64 bytes:
//!
//! ```text
//! NAME/data.pkl        the pickled object; a tensor in it names a storage, an offset, a shape and strides
//! NAME/byteorder       "little" or "big"; absent in old files: little           (optional)
//! NAME/data/KEY        the elements of storage KEY
//! NAME/version, ...    ignored
//! ```
//!
//! NAME is any name. `legacy` reads the form before 1.6. A gzip file around either is inflated once, in memory.
//!
//! The result is the tree of the pickle ([`TorchFile::tree`]), in which tensors are [`Node::Tensor`](super::pickle::Node::Tensor), and the place of each
//! storage in the file. Every tensor was checked against its storage.
//!
//! Source: torch/serialization.py of torch 2.15.

mod archive;
mod file;
mod legacy;

pub use self::file::{StoragePlace, TorchFile};

use self::file::malformed;
use crate::codec::inflate;
use crate::error::{Error, Result};
use crate::memory;
use crate::source::Source;
use crate::source::held::Held;
use crate::threads::Context;

/// Reads and checks a file. A gzipped file may inflate to `limit` bytes, or to the usual multiple of its size if that
/// is more.
pub fn read(source: &dyn Source, limit: u64, context: &mut Context<'_>) -> Result<TorchFile> {
    let location = source.location();
    let mut front = [0; 262];
    let known = front.len().min(usize::try_from(source.size()).unwrap_or(usize::MAX));
    source.read(0, &mut front[..known], context.stop())?;
    let front = &front[..known];
    if !inflate::is_gzip(front) {
        return read_plain(source, front, context).map_err(|e| e.at(location));
    }
    let inflated = |context: &mut Context<'_>| {
        let most = inflate::allowed(source.size(), u64::MAX, limit);
        let mut gz = memory::bytes(source.size())?;
        source.read_long(0, &mut gz, context)?;
        inflate::inflate(&gz, most, context)
    };
    let held = Held::new(location.clone(), inflated(context).map_err(|e: Error| e.at(location))?);
    let front = held.bytes().map_or_else(Vec::new, |bytes| bytes[..bytes.len().min(262)].to_vec());
    let file = read_plain(&held, &front, context).map_err(|mut e| {
        e.detail = format!("inside the gzip file: {}", e.detail);
        e.at(location)
    })?;
    Ok(TorchFile { held: Some(held), ..file })
}

fn read_plain(source: &dyn Source, front: &[u8], context: &mut Context<'_>) -> Result<TorchFile> {
    if front.starts_with(b"PK") {
        return archive::read(source, context);
    }
    if front.starts_with(legacy::MAGIC) {
        return legacy::read(source, context);
    }
    let found = match front {
        [] => "an empty file".to_string(),
        _ if front.get(257..262) == Some(b"ustar") => "a tar archive: torch of 2016; save it again".to_string(),
        _ => format!("{:02x?}", &front[..front.len().min(8)]),
    };
    Err(malformed(format!("expected a file of torch.save (a zip archive or its older form), found {found}")).byte(0))
}
