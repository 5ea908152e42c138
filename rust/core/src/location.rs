//! Names of files: a local path, or a store and a key in it.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The name of a file or an object.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Location {
    /// A local path.
    Local(PathBuf),
    /// An object in a store.
    Object(Arc<Object>),
}

/// The name of an object. Shared, so that errors, which contain locations, stay small.
#[derive(Debug, PartialEq, Eq, Hash)]
pub struct Object {
    /// The name of the store (a bucket, a repository) as messages show it.
    pub store: String,
    /// The object's key in the store.
    pub key: String,
}

impl Location {
    /// The location of an object in a store.
    pub fn object(store: impl Into<String>, key: impl Into<String>) -> Location {
        Location::Object(Arc::new(Object { store: store.into(), key: key.into() }))
    }

    /// The location of `name` inside this one; `name` may contain slashes.
    pub fn join(&self, name: &str) -> Location {
        match self {
            _ if name.is_empty() => self.clone(),
            Location::Local(path) => Location::Local(path.join(name)),
            Location::Object(object) if object.key.is_empty() => Location::object(object.store.clone(), name),
            Location::Object(object) => {
                Location::object(object.store.clone(), format!("{}/{name}", object.key.trim_end_matches('/')))
            }
        }
    }

    /// The path of a local file.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Location::Local(path) => Some(path),
            Location::Object(_) => None,
        }
    }
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Local(path) => f.write_str(&path.to_string_lossy()),
            Location::Object(object) if object.key.is_empty() => f.write_str(&object.store),
            Location::Object(object) => write!(f, "{}/{}", object.store, object.key),
        }
    }
}

impl From<PathBuf> for Location {
    fn from(path: PathBuf) -> Location {
        Location::Local(path)
    }
}

impl From<&PathBuf> for Location {
    fn from(path: &PathBuf) -> Location {
        Location::Local(path.clone())
    }
}

impl From<&Path> for Location {
    fn from(path: &Path) -> Location {
        Location::Local(path.to_path_buf())
    }
}

impl From<&Location> for Location {
    fn from(location: &Location) -> Location {
        location.clone()
    }
}
