//! The kind of a name: an object, a folder, nothing, or unknown because the server denies access.

use actshard_core::location::Location;
use actshard_core::source::{Access, Store};
use actshard_core::threads::{Stop, interrupted};
use actshard_core::{Error, Kind, Result};
use futures_util::stream::{self, StreamExt, TryStreamExt};

use super::RemoteStore;
use crate::address::Provider;
use crate::failure::{Cause, Failure};
use crate::known::{KnownName, NEWER};
use crate::object::PARALLEL;
use crate::runtime::wait;

/// The kind of a name.
#[derive(Clone, Debug)]
pub enum Standing {
    /// An object of this size.
    Object(u64),
    /// A folder.
    Folder,
    /// Nothing.
    Absent,
    /// The server denies access, with this error: it does not list names, and returns the same answer for objects that
    /// do not exist and objects that may not be read.
    Denied(Error),
}

impl RemoteStore {
    /// Whether a folder has names. None if names cannot be listed.
    fn has_names(&self, folder: &Location, stop: &Stop) -> Result<Option<bool>> {
        if !self.lists() {
            return Ok(None);
        }
        match self.scan(folder, false, stop) {
            Ok(found) => Ok(Some(!found.is_empty())),
            Err(_) if !self.lists() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The kind of a name. The first bytes of metadata are kept for reading.
    pub fn stat(&self, location: &Location, stop: &Stop) -> Result<Standing> {
        let key = self.key(location)?;
        match self.look_up(key) {
            KnownName::Object(object) => return Ok(Standing::Object(object.size)),
            KnownName::Newer => return Err(Failure::changed(NEWER).at(location)),
            KnownName::Folder => return Ok(Standing::Folder),
            KnownName::Absent => return Ok(Standing::Absent),
            KnownName::Unknown => {}
        }
        let name = key.rsplit('/').next().unwrap_or_default();
        let is_root = *location == self.root();
        // The URL is nearly always a folder's, whose listing is needed next; names with a dot are usually objects.
        let is_folder = if is_root { !name.ends_with(".parquet") } else { !name.contains('.') };
        if is_folder || self.address.provider == Provider::Hub {
            match self.has_names(location, stop)? {
                Some(true) => return Ok(Standing::Folder),
                // Its folder is known by the names in it.
                None if is_root => return Ok(Standing::Folder),
                _ => {}
            }
            if self.address.provider == Provider::Hub {
                return self.stat_of_hub(location, stop);
            }
        }
        let is_metadata = is_metadata(name);
        if is_metadata && self.is_in_absent_folder(location, stop)? {
            return Ok(Standing::Absent);
        }
        let access = if is_metadata { Access::Once } else { Access::Kept };
        match wait(self.probe_twice(key, access), stop)?? {
            Ok((facts, head)) => {
                if let Some(head) = head.filter(|_| is_metadata) {
                    self.keep_head(key, head);
                }
                Ok(Standing::Object(facts.size))
            }
            Err(failure) if failure.is_absence() || failure.is_denial() => {
                // A folder's name was listed before the request.
                if !is_metadata && !is_folder && self.has_names(location, stop)? == Some(true) {
                    return Ok(Standing::Folder);
                }
                let above = location_above(location);
                if failure.is_absence() || above.is_some_and(|above| self.is_unlisted_in(&above, key, stop)) {
                    return Ok(Standing::Absent);
                }
                let error = self.link.error(&failure, location);
                if self.lists() { Err(error) } else { Ok(Standing::Denied(error)) }
            }
            Err(failure) => Err(self.link.error(&failure, location)),
        }
    }

    /// The kinds of names on a server that cannot list them: a request for each, many at once. Keeps the first bytes of
    /// each object for reading. `again` repeats the requests for absent names, as [`RemoteStore::stat`] does.
    pub fn stat_together(&self, locations: &[&Location], again: bool, stop: &Stop) -> Result<Vec<Standing>> {
        let all = async {
            let mut standings = self.probe_standings(locations).await?;
            let is_absent = |i: &usize| matches!(standings[*i], Standing::Absent);
            let absent: Vec<usize> = (0..locations.len()).filter(is_absent).collect();
            let Some(first) = absent.first().filter(|_| again) else { return Ok(standings) };
            if let Some(serves) = self.serves_its_objects(self.key(locations[*first])?) {
                serves.await?;
                let names: Vec<&Location> = absent.iter().map(|i| locations[*i]).collect();
                for (i, standing) in absent.into_iter().zip(self.probe_standings(&names).await?) {
                    standings[i] = standing;
                }
            }
            Ok(standings)
        };
        wait(all, stop)?
    }

    async fn probe_standings(&self, locations: &[&Location]) -> Result<Vec<Standing>> {
        let one = |location: Location| async move {
            let key = self.key(&location)?;
            match self.look_up(key) {
                KnownName::Object(object) => return Ok(Standing::Object(object.size)),
                KnownName::Newer => return Err(Failure::changed(NEWER).at(&location)),
                KnownName::Folder => return Ok(Standing::Folder),
                KnownName::Absent => return Ok(Standing::Absent),
                KnownName::Unknown => {}
            }
            let access = if is_metadata(key) { Access::Once } else { Access::Kept };
            match self.probe(key, access).await {
                Ok((facts, head)) => {
                    if let Some(head) = head.filter(|_| is_metadata(key)) {
                        self.keep_head(key, head);
                    }
                    Ok(Standing::Object(facts.size))
                }
                Err(failure) if failure.is_absence() => Ok(Standing::Absent),
                Err(failure) if failure.is_denial() => Ok(Standing::Denied(self.link.error(&failure, &location))),
                Err(failure) => Err(self.link.error(&failure, &location)),
            }
        };
        let each = locations.iter().map(|location| one((*location).clone()));
        stream::iter(each).buffered(PARALLEL).try_collect().await
    }

    /// Whether the folder of a key does not exist. Lists the siblings of that folder, once: the folder itself may
    /// contain a million chunks.
    fn is_in_absent_folder(&self, location: &Location, stop: &Stop) -> Result<bool> {
        let Some(folder) = location_above(location) else { return Ok(false) };
        let Some(above) = location_above(&folder) else { return Ok(false) };
        let (folder, beside) = (self.key(&folder)?, self.key(&above)?);
        if folder == self.address.key || !self.is_in_root(beside) || self.look_up(folder) != KnownName::Unknown {
            return Ok(false);
        }
        // What is empty before the first answer is not kept as known.
        let is_empty = self.has_names(&above, stop)? == Some(false);
        Ok(is_empty || self.look_up(folder) == KnownName::Absent)
    }

    fn stat_of_hub(&self, location: &Location, stop: &Stop) -> Result<Standing> {
        match self.open_many(&[location], Access::Kept, stop).pop() {
            Some(Ok(source)) => Ok(Standing::Object(source.size())),
            Some(Err(error)) if error.kind == Kind::NotFound => Ok(Standing::Absent),
            Some(Err(error)) => Err(error),
            None => Err(interrupted()),
        }
    }

    /// Whether the listing of a folder shows that a key does not exist.
    fn is_unlisted_in(&self, folder: &Location, key: &str, stop: &Stop) -> bool {
        match self.has_names(folder, stop) {
            Ok(Some(true)) => self.look_up(key) == KnownName::Absent,
            // What is empty before the first answer is not kept as known.
            Ok(Some(false)) => matches!(self.look_up(key), KnownName::Absent | KnownName::Unknown),
            _ => false,
        }
    }

    /// Sends a request even for a known name: absent chunks have fill values only while their array is there.
    #[expect(clippy::disallowed_methods, reason = "on a thread that is abandoned instead")]
    pub(super) fn look_at(&self, location: &Location) -> Result<()> {
        let missing = || Error::new(Kind::NotFound, "expected a file, found nothing").at(location);
        let (key, stop) = (self.key(location)?, Stop::never());
        match self.look_up(key) {
            KnownName::Newer => Err(Failure::changed(NEWER).at(location)),
            KnownName::Object(facts) => {
                let still = wait(self.is_still(key, facts), stop)?;
                still.map_err(|failure| if failure.cause == Cause::Gone { missing() } else { failure.at(location) })
            }
            // A commit does not change.
            KnownName::Folder if self.address.provider == Provider::Hub => Ok(()),
            KnownName::Folder => {
                let listing = wait(self.link.client.list(key, false), stop)?;
                let listing = listing.map_err(|failure| failure.at(location))?;
                let is_there = !(listing.objects.is_empty() && listing.folders.is_empty());
                is_there.then_some(()).ok_or_else(missing)
            }
            KnownName::Absent => Err(missing()),
            KnownName::Unknown => match self.stat(location, stop)? {
                Standing::Object(_) | Standing::Folder => Ok(()),
                Standing::Absent => Err(missing()),
                Standing::Denied(error) => Err(error),
            },
        }
    }
}

fn location_above(location: &Location) -> Option<Location> {
    let Location::Object(object) = location else { return None };
    let above = object.key.rsplit_once('/').map_or("", |(above, _)| above);
    Some(Location::object(object.store.clone(), above))
}

/// Whether a file is small, or read whole: then the first request brings its bytes.
fn is_metadata(name: &str) -> bool {
    let name = name.rsplit('/').next().unwrap_or_default();
    let dotted = [".zgroup", ".zarray", ".zattrs", ".zmetadata"];
    [".json", ".jsonl", ".parquet", ".toml"].iter().any(|end| name.ends_with(end)) || dotted.contains(&name)
}
