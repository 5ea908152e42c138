//! Places that Python names: paths of local files, and locations in remote stores.

use std::path::PathBuf;
use std::sync::Arc;

use actshard_core::location::Location;
use actshard_core::source::local::Local;
use actshard_core::source::{Io, Store};
use actshard_core::{Error, Kind};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::remote::{AnyStore, RemoteStore};

/// A path, or an `actshard.base.location.Location`.
#[derive(Debug)]
pub struct NamedPlace {
    /// Its name.
    pub location: Location,
    /// Its store; `None` for local files.
    store: Option<Arc<AnyStore>>,
}

impl<'py> FromPyObject<'_, 'py> for NamedPlace {
    type Error = PyErr;

    fn extract(value: Borrowed<'_, 'py, PyAny>) -> PyResult<NamedPlace> {
        let py = value.py();
        if !value.is_exact_instance_of::<PyString>()
            && let Some(storage) = value.getattr_opt(intern!(py, "storage"))?
            && let Some(native) = storage.getattr_opt(intern!(py, "native"))?
        {
            let store = Arc::clone(&native.cast::<RemoteStore>()?.get().store);
            let key: String = value.getattr(intern!(py, "key"))?.extract()?;
            return Ok(NamedPlace { location: store.location(&key), store: Some(store) });
        }
        Ok(NamedPlace { location: value.extract::<PathBuf>()?.into(), store: None })
    }
}

/// The store of some places: all are in one. `None` if there are none, or they are local.
pub fn remote_store<'a>(
    places: impl IntoIterator<Item = &'a NamedPlace>,
) -> actshard_core::Result<Option<Arc<dyn Store>>> {
    let mut found: Option<Option<&Arc<AnyStore>>> = None;
    for place in places {
        let same = match (found, &place.store) {
            (None, _) | (Some(None), None) => true,
            (Some(Some(a)), Some(b)) => Arc::ptr_eq(a, b) || a.is_same(b),
            (Some(_), _) => false,
        };
        if !same {
            return Err(Error::new(Kind::Unsupported, "files of one dataset in several stores").at(&place.location));
        }
        found = Some(place.store.as_ref());
    }
    Ok(found.flatten().map(|store| Arc::clone(store) as Arc<dyn Store>))
}

/// The store of a place; local files are read in a given way.
pub fn store_of(place: &NamedPlace, io: Io) -> Arc<dyn Store> {
    match &place.store {
        Some(store) => Arc::clone(store) as Arc<dyn Store>,
        None => Arc::new(Local { io }),
    }
}
