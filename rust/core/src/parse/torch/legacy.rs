//! The form before torch 1.6 (`_use_new_zipfile_serialization=False`).
//!
//! ```text
//! five pickles     magic number, 1001, {"protocol_version", "little_endian", "type_sizes"}, the object, [storage keys]
//! per key          number of elements (int64, native order of the writer), the elements
//! ```
//!
//! Source: `_legacy_save` and `_legacy_load` in torch/serialization.py of torch 2.15.

use std::collections::HashMap;
use std::ops::Range;

use super::super::arrays::Region;
use super::super::end;
use super::super::pickle::machine::{Dialect, parse_as};
use super::super::pickle::{Node, SavedStorage, Tree};
use super::super::zip::shown;
use super::file::{TorchFile, malformed, place_of};
use crate::error::{Error, Kind, Result};
use crate::memory;
use crate::source::Source;
use crate::threads::Context;

/// The first bytes: protocol 2, the magic number as a LONG1, STOP.
pub(super) const MAGIC: &[u8] = &[0x80, 2, 0x8a, 10, 0x6c, 0xfc, 0x9c, 0x46, 0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, b'.'];
/// Bytes read first; pickles that are longer double it.
const FRONT: u64 = 64 << 10;
const VERSION: i64 = 1001;

/// The pickles after the magic number, and where the storages begin.
struct Pickles {
    object: Tree,
    range: Range<usize>,
    swapped: bool,
    keys: Vec<Vec<u8>>,
    end: usize,
}

pub(super) fn read(source: &dyn Source, context: &mut Context<'_>) -> Result<TorchFile> {
    let mut known = FRONT.min(source.size());
    let (front, found) = loop {
        let mut front = memory::bytes(known)?;
        source.read_long(0, &mut front, context)?;
        match parse_front(&front) {
            Ok(found) => break (front, found),
            Err(e) if e.kind == Kind::Truncated && known < source.size() => {
                known = known.saturating_mul(2).min(source.size());
            }
            Err(e) => return Err(e),
        }
    };
    let pickle = memory::copied(&front[found.range.clone()])?;
    let places = places(source, &found, &pickle, context)?;
    let mut storages = Vec::with_capacity(found.object.storages().len());
    for storage in found.object.storages() {
        let key = found.object.bytes(&pickle, &storage.key);
        let Some(number) = places.numbers.get(key) else {
            return Err(malformed(format!("a tensor needs the storage '{}', which the file lacks", shown(key))));
        };
        storages.push(place_of(storage, *number, places.regions[*number].size, &shown(key))?);
    }
    let file = TorchFile {
        tree: found.object,
        pickle_at: Some(found.range.start as u64),
        pickle,
        regions: places.regions,
        storages,
        swapped: found.swapped,
        is_legacy: true,
        held: None,
    };
    file.check_tensors()?;
    Ok(file)
}

/// Storages by key.
struct LegacyStorages {
    regions: Vec<Region>,
    numbers: HashMap<Vec<u8>, usize>,
}

/// Finds the storages, one after another.
fn places(source: &dyn Source, found: &Pickles, pickle: &[u8], context: &mut Context<'_>) -> Result<LegacyStorages> {
    let sizes: HashMap<&[u8], &SavedStorage> =
        found.object.storages().iter().map(|s| (found.object.bytes(pickle, &s.key), s)).collect();
    let mut made = LegacyStorages { regions: vec![], numbers: HashMap::new() };
    let mut at = found.end as u64;
    for key in &found.keys {
        let Some(storage) = sizes.get(&key[..]) else {
            return Err(
                malformed(format!("a storage '{}' that no tensor names: its size is unknown", shown(key))).byte(at)
            );
        };
        let mut count = [0; 8];
        if source.size() - at < 8 {
            return Err(Error::new(Kind::Truncated, format!("the file ends before storage '{}'", shown(key))).byte(at));
        }
        source.read(at, &mut count, context.stop())?;
        let count = if found.swapped { i64::from_be_bytes(count) } else { i64::from_le_bytes(count) };
        let size =
            u64::try_from(count).ok().filter(|n| *n == storage.count).and_then(|n| n.checked_mul(storage.item()));
        let Some(size) = size else {
            let detail = format!("storage '{}': expected {} elements, found {count}", shown(key), storage.count);
            return Err(malformed(detail).byte(at));
        };
        at += 8;
        if size > source.size() - at {
            let detail = format!("storage '{}': expected {size} bytes, found {}", shown(key), source.size() - at);
            return Err(Error::new(Kind::Truncated, detail).byte(at));
        }
        if made.numbers.insert(key.clone(), made.regions.len()).is_some() {
            return Err(malformed(format!("two storages have the key '{}'", shown(key))).byte(at));
        }
        made.regions.push(Region { at, stored: size, size, deflated: false, crc: 0 });
        at += size;
    }
    end::check(at, source.size(), "the last storage", ": several saves in one file are unsupported")?;
    Ok(made)
}

/// Parses the five pickles.
fn parse_front(front: &[u8]) -> Result<Pickles> {
    let mut at = MAGIC.len();
    let mut next = |dialect: Dialect| -> Result<(Tree, usize)> {
        let from = at;
        let rest = front.get(from..).unwrap_or_default();
        let (tree, size) = parse_as(rest, dialect).map_err(|e| {
            let byte = e.offset.unwrap_or(0) + from as u64;
            e.byte(byte)
        })?;
        at += size;
        Ok((tree, from))
    };
    let (version, _) = next(Dialect::Plain)?;
    if !matches!(version.node(version.root()), Node::Int(VERSION)) {
        return Err(malformed(format!("expected the protocol {VERSION} of torch.save, found another")));
    }
    let (system, from) = next(Dialect::Plain)?;
    let input = &front[from..];
    let little = match system.node(system.root()) {
        Node::Dict(pairs) => system.get(input, pairs, "little_endian").map(|id| system.node(id)),
        _ => None,
    };
    let swapped = match little {
        Some(Node::Bool(little)) => !little,
        _ => return Err(malformed("expected 'little_endian' in the description of the system, found none")),
    };
    let (object, from) = next(Dialect::Torch)?;
    let (keys, end) = next(Dialect::Plain)?;
    let (range, from) = (from..end, end);
    let input = &front[from..];
    let Node::List(list) = keys.node(keys.root()) else {
        return Err(malformed("expected a list of storage keys, found another type"));
    };
    let key = |id: &u32| match keys.node(*id) {
        Node::Str(blob) => Ok(keys.bytes(input, blob).to_vec()),
        _ => Err(malformed("expected strings as storage keys, found another type")),
    };
    let keys = list.iter().map(key).collect::<Result<_>>()?;
    Ok(Pickles { object, range, swapped, keys, end: at })
}
