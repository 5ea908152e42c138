//! Remote stores, for Python.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use actshard_core::disk_cache::DiskCache;
use actshard_core::location::Location;
use actshard_core::source::{Access, RangeRead, Source, Store, Version, fetch};
use actshard_core::threads::{self, Lock, Watch};
use actshard_core::{Error, Kind};
use actshard_remote::upload::{UploadBody, UploadJob, Uploaded};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes};

use crate::{detach, errors};
use actshard_remote::store::Standing;

/// Body, key, whether another object must not be replaced, the size of the existing object, and the SHA-256 of the
/// bytes.
type Job<'py> = (Bound<'py, PyAny>, String, bool, Option<u64>, Option<String>);

/// Time between two calls of `progress`.
const REPORT_EVERY: Duration = Duration::from_millis(200);

/// The store of a URL.
pub type AnyStore = actshard_remote::RemoteStore;

/// A bucket, web server or dataset of the hub.
#[pyclass(frozen, module = "actshard._native")]
#[derive(Debug)]
pub struct RemoteStore {
    pub store: Arc<AnyStore>,
}

/// The result of [`RemoteStore::fetch`] for an object.
enum FetchedObject {
    Bytes(Vec<u8>),
    Absent,
    Larger,
}

impl RemoteStore {
    fn fetched(&self, keys: &[String], most: u64, watch: Watch<'_>) -> actshard_core::Result<Vec<FetchedObject>> {
        let locations: Vec<Location> = keys.iter().map(|key| self.store.location(key)).collect();
        let names: Vec<&Location> = locations.iter().collect();
        let open = |stop: &threads::Stop| Ok(self.store.open_many(&names, Access::Once, stop));
        let (mut sources, mut found) = (vec![], vec![]);
        for opened in threads::wait_for(&open, &mut *watch)? {
            let (source, object) = match opened {
                Ok(source) if source.size() > most => (None, FetchedObject::Larger),
                Ok(source) => {
                    let mut bytes = vec![];
                    let none = |_| Error::new(Kind::NoMemory, "no memory for an object").at(source.location());
                    bytes.try_reserve_exact(source.size() as usize).map_err(none)?;
                    bytes.resize(source.size() as usize, 0);
                    (Some(source), FetchedObject::Bytes(bytes))
                }
                Err(error) if error.kind == Kind::NotFound => (None, FetchedObject::Absent),
                Err(error) => return Err(error),
            };
            sources.push(source);
            found.push(object);
        }
        let each = sources.iter().zip(&mut found).filter_map(|(source, object)| match (source, object) {
            (Some(source), FetchedObject::Bytes(bytes)) => Some((&**source, 0, &mut bytes[..])),
            _ => None,
        });
        if let Some(wishes) = self.store.wishes() {
            fetch::read_all(each.collect(), &wishes, watch)?;
        }
        Ok(found)
    }

    fn opened(&self, key: &str, watch: Watch<'_>) -> actshard_core::Result<Box<dyn Source>> {
        let location = self.store.location(key);
        let open = |stop: &threads::Stop| Ok(self.store.open_many(&[&location], Access::Once, stop).pop());
        let none = || Error::new(Kind::Internal, "a store without an answer");
        threads::wait_for(&open, watch)?.unwrap_or_else(|| Err(none().at(&location)))
    }
}

#[pymethods]
impl RemoteStore {
    /// The store of a URL, and folder and limit of its cache on disk. Makes no request.
    #[new]
    fn new(
        py: Python<'_>,
        url: &str,
        options: Vec<(String, String)>,
        cache: Option<(PathBuf, u64)>,
    ) -> PyResult<RemoteStore> {
        detach::guarded(py, || {
            let made = detach::detached(py, |watch| {
                let store = actshard_remote::RemoteStore::open(url, actshard_remote::Options::new(options))?;
                let Some((folder, limit)) = &cache else { return Ok(store) };
                // Another process may hold the lock of the cache.
                let open =
                    |_: usize, store: actshard_remote::RemoteStore, _: &threads::Stop| store.cached(folder, *limit);
                let made = threads::map_each_waiting([store], 1, &open, watch)?.pop();
                made.ok_or_else(|| Error::new(Kind::Internal, "a store that was not opened"))
            });
            Ok(RemoteStore { store: Arc::new(made?) })
        })
    }

    /// Bytes and objects in the cache on disk, its limit, and hits and misses of this process; None without a cache.
    fn cache_info(&self, py: Python<'_>) -> PyResult<Option<[u64; 5]>> {
        detach::guarded(py, || {
            detach::detached(py, |_| {
                let info = self.store.cache().map(DiskCache::info).transpose()?;
                Ok(info.map(|info| [info.bytes, info.objects, info.limit, info.hits, info.misses]))
            })
        })
    }

    /// The reason why the cache on disk is not used; None after the first call.
    fn cache_warning(&self, py: Python<'_>) -> PyResult<Option<String>> {
        detach::guarded(py, || Ok(self.store.cache().and_then(DiskCache::take_warning)))
    }

    /// The store of a `state()`.
    #[staticmethod]
    fn from_state(py: Python<'_>, state: &[u8]) -> PyResult<RemoteStore> {
        detach::guarded(py, || {
            let made = detach::detached(py, |_| actshard_remote::RemoteStore::from_state(state));
            Ok(RemoteStore { store: Arc::new(made?) })
        })
    }

    /// URL, options, revision and known names, for other processes. Contains secrets.
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        detach::guarded(py, || Ok(PyBytes::new(py, &self.store.state().map_err(|error| errors::raise(py, &error))?)))
    }

    /// The key of the URL.
    #[getter]
    fn root(&self, py: Python<'_>) -> PyResult<String> {
        detach::guarded(py, || {
            Ok(match self.store.root() {
                Location::Object(object) => object.key.clone(),
                Location::Local(_) => String::new(),
            })
        })
    }

    /// Whether it can list names.
    #[getter]
    fn lists(&self, py: Python<'_>) -> PyResult<bool> {
        detach::guarded(py, || Ok(self.store.lists()))
    }

    /// The commit of a dataset of the hub, once it is known.
    #[getter]
    fn revision(&self, py: Python<'_>) -> PyResult<Option<String>> {
        detach::guarded(py, || Ok(self.store.revision()))
    }

    /// A digest of what distinguishes servers whose objects have equal URLs: endpoint and account.
    fn origin(&self, py: Python<'_>) -> PyResult<String> {
        detach::guarded(py, || detach::detached(py, |watch| threads::wait_for(&|stop| self.store.origin(stop), watch)))
    }

    /// The URL of a key, without secrets.
    fn text(&self, py: Python<'_>, key: &str) -> PyResult<String> {
        detach::guarded(py, || Ok(self.store.location(key).to_string()))
    }

    /// Numbers of requests, and bytes received.
    fn counts(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        detach::guarded(py, || {
            let counts = self.store.counts();
            Ok((counts.requests, counts.bytes))
        })
    }

    /// Whether both have the same objects.
    fn is_same(&self, py: Python<'_>, other: &RemoteStore) -> PyResult<bool> {
        detach::guarded(py, || Ok(self.store.is_same(&other.store)))
    }

    /// The URL of the bucket, server or dataset, without secrets.
    #[getter]
    fn name(&self, py: Python<'_>) -> PyResult<String> {
        detach::guarded(py, || Ok(self.store.name().to_string()))
    }

    /// The size and version of an object, (None, None) for a folder, None for nothing. If the server denies access, the
    /// error's reason is "absent-or-denied".
    fn stat(&self, py: Python<'_>, key: &str) -> PyResult<Option<(Option<u64>, Option<String>)>> {
        detach::guarded(py, || {
            detach::detached(py, |watch| {
                let location = self.store.location(key);
                let found = threads::wait_for(&|stop| self.store.stat(&location, stop), &mut *watch)?;
                Ok(match found {
                    Standing::Absent => None,
                    Standing::Folder => Some((None, None)),
                    Standing::Denied(error) => return Err(Error { reason: Some("absent-or-denied"), ..error }),
                    Standing::Object(size) => {
                        let version = match self.opened(key, watch)?.version() {
                            Some(Version::Tag(tag)) => tag.to_string(),
                            _ => size.to_string(),
                        };
                        Some((Some(size), Some(version)))
                    }
                })
            })
        })
    }

    /// For names that cannot be listed, with a request for each, many at once: True for an object, which is known from
    /// now on, None for nothing, and the error if the server denies access. `again` repeats the requests for names that
    /// are absent.
    fn stat_together<'py>(&self, py: Python<'py>, keys: Vec<String>, again: bool) -> PyResult<Vec<Bound<'py, PyAny>>> {
        detach::guarded(py, || {
            let locations: Vec<Location> = keys.iter().map(|key| self.store.location(key)).collect();
            let names: Vec<&Location> = locations.iter().collect();
            let found = detach::detached(py, |watch| {
                threads::wait_for(&|stop| self.store.stat_together(&names, again, stop), watch)
            })?;
            let word = |standing: Standing| match standing {
                Standing::Object(_) | Standing::Folder => PyBool::new(py, true).to_owned().into_any(),
                Standing::Absent => py.None().into_bound(py),
                Standing::Denied(error) => errors::raise(py, &error).into_value(py).into_bound(py).into_any(),
            };
            Ok(found.into_iter().map(word).collect())
        })
    }

    /// Names directly inside a folder, with the sizes of objects. `deep` lists everything below in the same requests.
    fn scan(&self, py: Python<'_>, key: &str, deep: bool) -> PyResult<Vec<(String, Option<u64>)>> {
        detach::guarded(py, || {
            detach::detached(py, |watch| {
                let location = self.store.location(key);
                let found = threads::wait_for(&|stop| self.store.scan(&location, deep, stop), watch)?;
                Ok(found.into_iter().map(|found| (found.name, found.size)).collect())
            })
        })
    }

    /// Keys, sizes and ETags (or "") of everything below the URL, as it is now.
    fn everything(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, String)>> {
        detach::guarded(py, || {
            let found = detach::detached(py, |watch| threads::wait_for(&|stop| self.store.everything(stop), watch))?;
            let etag = |tag: Option<Box<str>>| tag.map_or_else(String::new, String::from);
            Ok(found.into_iter().map(|object| (object.key, object.size, etag(object.tag.etag))).collect())
        })
    }

    /// Writes objects from files or bytes: each with its key, whether another object must not be replaced, the size of
    /// the existing object, and the SHA-256 that a file's bytes must have. `progress` is called with the number of
    /// bytes so far. Returns "sent", "there" or "refused" for each.
    fn upload(&self, py: Python<'_>, jobs: Vec<Job<'_>>, progress: Option<Py<PyAny>>) -> PyResult<Vec<&'static str>> {
        detach::guarded(py, || {
            let job = |(body, key, only_new, found, sha256): Job<'_>| {
                let body = match body.cast::<PyBytes>() {
                    Ok(bytes) => UploadBody::Memory(bytes.as_bytes().to_vec().into()),
                    Err(_) => UploadBody::File(body.extract()?),
                };
                Ok(UploadJob { body, key, only_new, found, sha256 })
            };
            let jobs = jobs.into_iter().map(job).collect::<PyResult<Vec<UploadJob>>>()?;
            let sent = AtomicU64::new(0);
            let (mut reported, mut raised) = (Instant::now(), None);
            let made = detach::detached(py, |watch| {
                let mut look = || {
                    let stops = watch();
                    let Some(progress) = progress.as_ref().filter(|_| reported.elapsed() >= REPORT_EVERY && !stops)
                    else {
                        return stops;
                    };
                    reported = Instant::now();
                    let called = Python::attach(|py| progress.call1(py, (sent.load(Ordering::Relaxed),)).map(drop));
                    raised = called.err();
                    raised.is_some()
                };
                threads::wait_for(&|stop| self.store.upload(&jobs, &sent, stop), &mut look)
            });
            if let Some(error) = raised {
                return Err(error);
            }
            let word = |made: Uploaded| match made {
                Uploaded::Sent => "sent",
                Uploaded::There => "there",
                Uploaded::Refused => "refused",
            };
            Ok(made?.into_iter().map(word).collect())
        })
    }

    /// Removes objects; objects that do not exist count as removed.
    fn remove(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<()> {
        detach::guarded(py, || {
            detach::detached(py, |watch| threads::wait_for(&|stop| self.store.remove(&keys, stop), watch))
        })
    }

    /// SHA-256 of objects that `upload` wrote, in hexadecimal digits; None for others.
    fn digests(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<Vec<Option<String>>> {
        detach::guarded(py, || {
            detach::detached(py, |watch| threads::wait_for(&|stop| self.store.digests(&keys, stop), watch))
        })
    }

    /// Aborts unfinished uploads of earlier runs of some keys; returns their number.
    fn sweep(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<usize> {
        detach::guarded(py, || {
            detach::detached(py, |watch| threads::wait_for(&|stop| self.store.sweep(&keys, stop), watch))
        })
    }

    /// Whole objects, all requested at once: their bytes, None for those that do not exist, and False for those of more
    /// than `most` bytes.
    fn fetch<'py>(&self, py: Python<'py>, keys: Vec<String>, most: u64) -> PyResult<Vec<Bound<'py, PyAny>>> {
        detach::guarded(py, || {
            let found = detach::detached(py, |watch| self.fetched(&keys, most, watch))?;
            let object = |found: FetchedObject| match found {
                FetchedObject::Bytes(bytes) => PyBytes::new(py, &bytes).into_any(),
                FetchedObject::Absent => py.None().into_bound(py),
                FetchedObject::Larger => PyBool::new(py, false).to_owned().into_any(),
            };
            Ok(found.into_iter().map(object).collect())
        })
    }

    /// Fails unless a known object still exists unchanged on the server.
    fn look(&self, py: Python<'_>, key: &str) -> PyResult<()> {
        detach::guarded(py, || {
            let location = self.store.location(key);
            detach::detached(py, |watch| threads::wait_for(&|_| self.store.look(&location), watch))
        })
    }

    /// Bytes of an object, fewer at its end.
    fn read<'py>(&self, py: Python<'py>, key: &str, start: u64, length: u64) -> PyResult<Bound<'py, PyBytes>> {
        detach::guarded(py, || {
            let bytes = detach::detached(py, |watch| {
                let source = self.opened(key, &mut *watch)?;
                let len = length.min(source.size().saturating_sub(start));
                let mut bytes: Vec<u8> = vec![];
                let none = |_| Error::new(Kind::NoMemory, format!("no memory for {len} bytes")).at(source.location());
                bytes.try_reserve_exact(usize::try_from(len).unwrap_or(usize::MAX)).map_err(none)?;
                bytes.resize(len as usize, 0);
                let into = Lock::new(&mut bytes[..]);
                let read = |stop: &threads::Stop| {
                    source.read_many(&mut [RangeRead { at: start, into: &mut into.lock() }], stop)
                };
                threads::wait_for(&read, watch)?;
                Ok(bytes)
            })?;
            Ok(PyBytes::new(py, &bytes))
        })
    }
}

/// Whether a text is a URL that can be opened.
#[pyfunction]
pub fn is_remote(py: Python<'_>, text: &str) -> PyResult<bool> {
    detach::guarded(py, || Ok(actshard_remote::address::is_remote(text)))
}
