//! The zip archive that torch writes since 1.6.

use std::collections::HashMap;

use super::super::arrays::Region;
use super::super::end;
use super::super::pickle::machine::{Dialect, parse_as};
use super::super::zip::{Archive, shown};
use super::file::{TorchFile, malformed, place_of};
use crate::error::{Error, Kind, Result};
use crate::source::Source;
use crate::threads::Context;

/// The largest pickle: tensors are stored outside it.
const MOST_PICKLE: u64 = 1 << 30;
/// A deflated pickle may inflate to this, or to 16 times its size.
const MOST_INFLATED: u64 = 16 << 20;

/// Reads an archive.
pub(super) fn read(source: &dyn Source, context: &mut Context<'_>) -> Result<TorchFile> {
    let archive = Archive::read(source, context)?;
    let (main, top) = find_pickle(&archive)?;
    let record = &archive.records[main];
    let at = record.data(source, context)?;
    let most = if record.deflated { MOST_INFLATED.max(record.stored.saturating_mul(16)) } else { u64::MAX };
    let pickle = record.content(source, most.min(MOST_PICKLE), context)?;
    let inside = |e: Error| match e.offset {
        Some(byte) if !record.deflated => e.byte(at + byte),
        _ => e,
    };
    let (tree, size) = parse_as(&pickle, Dialect::Torch).map_err(inside)?;
    end::check(size as u64, pickle.len() as u64, "the pickle", "").map_err(inside)?;
    let named: HashMap<&[u8], usize> = archive.records.iter().enumerate().map(|(i, r)| (&r.name[..], i)).collect();
    let part = |name: &str| [&top[..], b"/", name.as_bytes()].concat();
    let swapped = match named.get(&part("byteorder")[..]).map(|i| archive.records[*i].content(source, 64, context)) {
        None => false,
        Some(Err(e)) => return Err(e),
        Some(Ok(order)) => match &order[..] {
            b"little" => false,
            b"big" => true,
            other => return Err(malformed(format!("byteorder: expected little or big, found '{}'", shown(other)))),
        },
    };
    let mut places: HashMap<usize, usize> = HashMap::new();
    let (mut regions, mut storages) = (vec![], Vec::with_capacity(tree.storages().len()));
    for storage in tree.storages() {
        let key = tree.bytes(&pickle, &storage.key);
        let name = [&top[..], b"/data/", key].concat();
        let Some(number) = named.get(&name[..]) else {
            return Err(malformed(format!("a tensor needs the storage '{}', which the archive lacks", shown(&name))));
        };
        let record = &archive.records[*number];
        let region = match places.get(number) {
            Some(region) => *region,
            None => {
                regions.push(Region {
                    at: record.data(source, context)?,
                    stored: record.stored,
                    size: record.size,
                    deflated: record.deflated,
                    crc: record.crc,
                });
                places.insert(*number, regions.len() - 1);
                regions.len() - 1
            }
        };
        storages.push(place_of(storage, region, record.size, &shown(&name))?);
    }
    let file = TorchFile {
        tree,
        pickle_at: (!record.deflated).then_some(at),
        pickle,
        regions,
        storages,
        swapped,
        is_legacy: false,
        held: None,
    };
    file.check_tensors()?;
    Ok(file)
}

/// The record of the pickle, and the name of its folder.
fn find_pickle(archive: &Archive) -> Result<(usize, Vec<u8>)> {
    let mut found: Option<(usize, Vec<u8>)> = None;
    for (i, record) in archive.records.iter().enumerate() {
        let Some(top) = record.name.strip_suffix(b"/data.pkl").filter(|top| !top.contains(&b'/')) else { continue };
        if let Some((_, other)) = &found {
            return Err(malformed(format!(
                "expected one saved object, found two, '{}' and '{}'",
                shown(other),
                shown(top)
            )));
        }
        found = Some((i, top.to_vec()));
    }
    let Some((main, top)) = found else {
        return Err(malformed("a zip archive without */data.pkl, which torch.save writes"));
    };
    let within = |name: &[u8]| archive.records.iter().any(|r| r.name.starts_with(&[&top[..], name].concat()));
    if within(b"/constants.pkl") || within(b"/code/") {
        return Err(Error::new(Kind::Unsupported, "a TorchScript archive: it contains code, not only tensors"));
    }
    Ok((main, top))
}
