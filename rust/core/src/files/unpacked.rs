//! A store in which arrays that cannot be read in place appear as separate files: deflated or byte-swapped arrays,
//! arrays whose rows are not contiguous, and everything in a gzipped file. Each is decoded once into memory, and kept
//! within a budget.

use std::collections::HashMap;
use std::sync::Arc;

use crate::codec::cache::Cache;
use crate::codec::inflate;
use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::memory;
use crate::memory::buffer::Buffer;
use crate::number::to_usize;
use crate::parse::arrays::{self, ArrayPlace};
use crate::source::held::Held;
use crate::source::{Access, Source, Store, Wishes};
use crate::threads::{self, Context, Stop};

/// Something to decode.
#[derive(Clone, Debug)]
pub struct Unit {
    /// The file that contains it.
    pub file: Location,
    /// Whether the file is gzipped.
    pub gzipped: bool,
    /// The array, in C order and native byte order; `None` for the whole inflated file.
    pub array: Option<ArrayPlace>,
}

/// The store.
#[derive(Debug)]
pub struct Unpacked {
    inner: Arc<dyn Store>,
    units: Vec<Unit>,
    named: HashMap<Location, usize>,
    cache: Cache,
    /// Bytes to which a gzipped file may inflate.
    limit: u64,
}

impl Unpacked {
    /// The files of `inner`, and units under the names that [`Unpacked::name`] returns.
    pub fn new(inner: Arc<dyn Store>, units: Vec<Unit>, memory: u64) -> Unpacked {
        let named = (0..units.len()).map(|i| (Unpacked::name(&units[i], i), i)).collect();
        Unpacked { inner, units, named, cache: Cache::new(memory), limit: memory }
    }

    /// The name of a unit: that of its file, with its number.
    pub fn name(unit: &Unit, number: usize) -> Location {
        let what = if unit.array.is_some() { "array" } else { "inflated" };
        Location::object(unit.file.to_string(), format!("({what} {number})"))
    }

    fn open_unit(&self, number: usize, stop: &Stop) -> Result<Box<dyn Source>> {
        let unit = &self.units[number];
        let load = || self.decode(unit, stop).map(Some);
        let made = self.cache.get_or_load(number as u64, |_| true, load).map_err(|e: Error| e.at(&unit.file))?;
        let made = made.unwrap_or_else(|| Arc::new(vec![].into()));
        Ok(Box::new(Held::shared(unit.file.clone(), made)))
    }

    fn decode(&self, unit: &Unit, stop: &Stop) -> Result<Buffer> {
        let context = &mut Context::of_part(stop);
        let source = self.inner.open(&unit.file, Access::Once, stop)?;
        let whole: Box<dyn Source> = if unit.gzipped {
            let most = inflate::allowed(source.size(), u64::MAX, self.limit);
            let mut gz = memory::bytes(source.size())?;
            source.read_long(0, &mut gz, context)?;
            Box::new(Held::new(unit.file.clone(), inflate::inflate(&gz, most, context)?))
        } else {
            source
        };
        match &unit.array {
            Some(place) => Ok(arrays::read(&*whole, place, context)?.into()),
            None => {
                let mut all = Buffer::new(to_usize(whole.size()))
                    .map_err(|e| Error::new(Kind::NoMemory, format!("cannot allocate memory: {e}")))?;
                whole.read_long(0, all.bytes_mut(), context)?;
                Ok(all)
            }
        }
    }
}

impl Store for Unpacked {
    fn open_many(&self, locations: &[&Location], access: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let plain: Vec<&Location> = locations.iter().copied().filter(|at| !self.named.contains_key(*at)).collect();
        let mut plain = self.inner.open_many(&plain, access, stop).into_iter();
        let missing = |at: &Location| Err(Error::new(Kind::Internal, "a file that was not opened").at(at));
        let units: Vec<usize> = locations.iter().filter_map(|at| self.named.get(*at).copied()).collect();
        let decode = |_: usize, number: usize, _: &Stop| Ok(self.open_unit(number, stop));
        let decoded = threads::map_each(units, &decode, &mut || stop.is_set());
        let mut decoded = match decoded {
            Ok(decoded) => decoded.into_iter(),
            Err(stopped) => return locations.iter().map(|_| Err(stopped.clone())).collect(),
        };
        let next = |at: &&Location| match self.named.contains_key(*at) {
            true => decoded.next().unwrap_or_else(|| missing(at)),
            false => plain.next().unwrap_or_else(|| missing(at)),
        };
        locations.iter().map(next).collect()
    }

    fn list(&self, folder: &Location) -> Result<Vec<String>> {
        self.inner.list(folder)
    }

    fn decodes(&self) -> bool {
        true
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "opening a near file takes a moment, and far ones are opened together"
    )]
    fn decoded(&self, location: &Location) -> Option<Result<Box<dyn Source>>> {
        let Some(number) = self.named.get(location) else {
            return Some(self.inner.open(location, Access::Kept, Stop::never()));
        };
        let unit = self.cache.get(*number as u64)?;
        Some(Ok(Box::new(Held::shared(self.units[*number].file.clone(), unit))))
    }

    fn wishes(&self) -> Option<Wishes> {
        self.inner.wishes()
    }
}
