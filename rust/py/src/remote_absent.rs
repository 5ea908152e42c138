//! The place of `remote` in a build without the feature of this name: its classes and functions, which report that.

use std::sync::Arc;

use actshard_core::error::Result;
use actshard_core::location::Location;
use actshard_core::source::{Access, Source, Store};
use actshard_core::threads::Stop;
use actshard_core::{Error, Kind};
use pyo3::prelude::*;

use crate::detach;

/// A store that no build without the feature has.
#[derive(Debug)]
pub enum NoStore {}

impl NoStore {
    pub fn location(&self, _key: &str) -> Location {
        match *self {}
    }

    pub fn is_same(&self, _other: &NoStore) -> bool {
        match *self {}
    }
}

impl Store for NoStore {
    fn open_many(&self, _: &[&Location], _: Access, _: &Stop) -> Vec<Result<Box<dyn Source>>> {
        match *self {}
    }

    fn list(&self, _: &Location) -> Result<Vec<String>> {
        match *self {}
    }
}

/// The store of a URL.
pub type AnyStore = NoStore;

/// Raises UnsupportedError.
#[pyclass(frozen, module = "actshard._native")]
#[derive(Debug)]
pub struct RemoteStore {
    pub store: Arc<NoStore>,
}

/// Names the scheme only: the rest of a URL may have credentials.
fn unsupported(url: &str) -> Error {
    let scheme = url.split_once("://").map_or("remote", |(scheme, _)| scheme);
    let detail =
        "this build of actshard reads local files only: `make demo` made it. Install a complete one: `pip install .`";
    Error::new(Kind::Unsupported, format!("{scheme}://: {detail}"))
}

#[pymethods]
impl RemoteStore {
    #[new]
    #[pyo3(signature = (url, *_rest))]
    fn new(py: Python<'_>, url: &str, _rest: &Bound<'_, pyo3::types::PyTuple>) -> PyResult<RemoteStore> {
        detach::guarded(py, || detach::detached(py, |_| Err::<RemoteStore, _>(unsupported(url))))
    }

    #[staticmethod]
    fn from_state(py: Python<'_>, _state: &[u8]) -> PyResult<RemoteStore> {
        detach::guarded(py, || detach::detached(py, |_| Err::<RemoteStore, _>(unsupported("remote://"))))
    }
}

/// Whether a text is a URL.
#[pyfunction]
pub fn is_remote(py: Python<'_>, text: &str) -> PyResult<bool> {
    detach::guarded(py, || Ok(text.contains("://") && !text.to_ascii_lowercase().starts_with("file://")))
}
