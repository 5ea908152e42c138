//! A store of objects behind a URL.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use actshard_core::disk_cache::{DiskCache, PAGE};
use actshard_core::location::Location;
use actshard_core::source::{Access, LinkPace, Source, Store, Wishes};
use actshard_core::threads::{Stop, interrupted};
use actshard_core::{Error, Kind, Result};
use futures_util::stream::{FuturesUnordered, StreamExt};
use sha2::{Digest, Sha256};

use crate::address::{Provider, StoreUrl};
use crate::client::hub::HubClient;
use crate::client::objects::BucketClient;
use crate::client::pace::{Counts, Pace};
use crate::client::web::WebClient;
use crate::client::{Client, ListedObject};
use crate::failure::{Cause, Failure};
use crate::known::{Known, KnownName, NEWER, ObjectFacts};
use crate::object::{Head, HeadShare, LARGEST, PARALLEL, RemoteObject, SHORT_PARALLEL};
use crate::offline;
use crate::options::Options;
use crate::reading::{Beginning, Link, lost};
use crate::runtime::{ForkLock, wait};
use crate::state::State;
use crate::upload::{UploadJob, Uploaded, Uploader, hex};

/// Bytes that the first request for an unknown object asks for.
const HEAD: u64 = 64 << 10;
/// The largest gap that is read for the ranges around it.
const MOST_GAP: u64 = 1 << 20;
/// Objects whose first bytes are kept after they were looked at.
const MOST_HEADS: usize = 32;
/// Bytes of a header that are kept, and headers in a pickled store.
const HEADER: usize = 16 << 10;
const MOST_HEADERS: usize = 4;

/// The source of a location, once it is known.
type ProbeAnswer = Option<Result<Box<dyn Source>>>;

/// A name in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name.
    pub name: String,
    /// The object's size; `None` for a folder.
    pub size: Option<u64>,
}

/// What a name is.
#[derive(Clone, Debug)]
pub enum Standing {
    /// An object of this size.
    Object(u64),
    /// A folder.
    Folder,
    /// Nothing.
    Absent,
    /// The server refuses to say, with this error: it does not list names, and refuses objects that do not exist and those that
    /// may not be read alike.
    Denied(Error),
}

/// First bytes of objects that were looked at, by key.
type Heads = HashMap<String, Head>;

/// A bucket, web server or dataset of the hub. Remembers sizes and tags of its objects.
#[derive(Debug)]
pub struct RemoteStore {
    address: StoreUrl,
    url: crate::options::Secret,
    options: Options,
    link: Arc<Link>,
    heads: ForkLock<Heads>,
    /// Listings are refused.
    unlistable: AtomicBool,
    cache: Option<DiskCache>,
}

impl RemoteStore {
    /// The store of a URL. Makes no request.
    pub fn open(url: &str, options: Options) -> Result<RemoteStore> {
        RemoteStore::with(url, options, None, Known::default())
    }

    fn with(url: &str, options: Options, revision: Option<String>, known: Known) -> Result<RemoteStore> {
        let address = StoreUrl::parse(url)?;
        let settings = options.settings(address.provider)?;
        let (pace, limits) = (Arc::new(Pace::default()), settings.limits.clone());
        let client: Box<dyn Client> = match address.provider {
            Provider::S3 | Provider::Gcs | Provider::Azure => {
                Box::new(BucketClient::new(&address, settings, Arc::clone(&pace)))
            }
            Provider::Http => Box::new(WebClient::new(&address, &settings, Arc::clone(&pace))),
            Provider::Hub => Box::new(HubClient::new(&address, &settings, revision, Arc::clone(&pace))),
        };
        let link = Arc::new(Link { client, pace, limits, known: ForkLock::new(known) });
        let url = crate::options::Secret(url.to_string());
        let (heads, unlistable) = (ForkLock::default(), AtomicBool::new(false));
        Ok(RemoteStore { address, url, options, link, heads, unlistable, cache: None })
    }

    /// The same store, whose objects are read through a cache on disk of at most `limit` bytes.
    /// With `HF_HUB_OFFLINE`, a dataset of the hub has the files that it had when it was last listed with this cache.
    pub fn cached(self, folder: &Path, limit: u64) -> Result<RemoteStore> {
        let store = RemoteStore { cache: Some(DiskCache::open(folder, limit)?), ..self };
        let is_new = store.link.known.with(|known| *known == Known::default()).unwrap_or_default();
        if is_new
            && store.link.client.ready().is_err()
            && let Some((commit, known)) =
                store.listing_file(&store.address.revision).and_then(|file| offline::recall(&file))
        {
            let cache = store.cache;
            return Ok(RemoteStore { cache, ..RemoteStore::with(&store.url.0, store.options, Some(commit), known)? });
        }
        Ok(store)
    }

    /// Where the listing of a dataset of the hub is kept for later processes without a network.
    fn listing_file(&self, revision: &str) -> Option<PathBuf> {
        let cache = self.cache.as_ref().filter(|_| self.address.provider == Provider::Hub)?;
        let origin = self.link.client.origin().ok()?;
        offline::file_of(cache.folder(), &origin, &self.address.bucket, revision, &self.address.key)
    }

    /// The cache on disk.
    pub fn cache(&self) -> Option<&DiskCache> {
        self.cache.as_ref()
    }

    /// The location of the URL.
    pub fn root(&self) -> Location {
        self.address.location(&self.address.key)
    }

    /// The location of a key.
    pub fn location(&self, key: &str) -> Location {
        self.address.location(key)
    }

    /// The commit of a dataset of the hub, once it is known.
    pub fn revision(&self) -> Option<String> {
        self.link.client.revision()
    }

    /// A digest of what distinguishes servers whose objects have equal URLs: endpoint and account. Makes no request.
    pub fn origin(&self, stop: &Stop) -> Result<String> {
        let origin = wait(async { self.link.client.origin() }, stop)?.ok_or_else(interrupted)?;
        origin.map(|text| hex(&Sha256::digest(text))).map_err(|failure| self.link.error(&failure, &self.root()))
    }

    /// Whether it can list names; web servers cannot, and buckets may refuse it.
    pub fn lists(&self) -> bool {
        self.link.client.lists() && !self.unlistable.load(Ordering::Relaxed)
    }

    /// The store without key and revision, to be hashed.
    pub fn name(&self) -> &str {
        &self.address.store
    }

    /// Whether both have the same objects: address, options and revision are equal.
    pub fn is_same(&self, other: &RemoteStore) -> bool {
        let pinned = self.revision().zip(other.revision());
        self.address.store == other.address.store
            && self.address.query == other.address.query
            && self.options == other.options
            && pinned.is_none_or(|(a, b)| a == b)
    }

    /// Counts of the requests so far.
    pub fn counts(&self) -> Counts {
        self.link.pace.counts()
    }

    /// What another process needs to open the same store without a request: URL, options, revision and known objects.
    /// Contains the options' secrets.
    pub fn state(&self) -> Result<Vec<u8>> {
        let known = self.known(&self.root(), |known| known.pack())?;
        let cache = self.cache.as_ref().map(|cache| (cache.chosen().to_path_buf(), cache.limit()));
        let (url, options, revision) = (self.url.0.clone(), self.options.pairs(), self.revision());
        let mut heads: Vec<(String, Vec<u8>)> = vec![];
        self.heads.with(|kept| {
            let headers = kept.iter().filter(|(key, _)| has_header(key)).take(MOST_HEADERS);
            heads = headers.map(|(key, head)| (key.clone(), head.bytes.to_vec())).collect();
        });
        State { url, options, revision, known, heads, cache }.encode()
    }

    /// The store of a state.
    pub fn from_state(bytes: &[u8]) -> Result<RemoteStore> {
        let state = State::decode(bytes)?;
        let damaged = || Error::new(Kind::Format, "the state of a remote store is damaged");
        let known = Known::unpack(state.known).ok_or_else(damaged)?;
        let store = RemoteStore::with(&state.url, Options::new(state.options), state.revision, known)?;
        for (key, bytes) in state.heads {
            store.keep_header(&key, &bytes);
        }
        match state.cache {
            Some((folder, limit)) => store.cached(&folder, limit),
            None => Ok(store),
        }
    }

    fn key<'a>(&self, location: &'a Location) -> Result<&'a str> {
        match location {
            Location::Object(object) if object.store == self.address.store => Ok(&object.key),
            _ => Err(Error::new(Kind::Internal, format!("not in the store {}", self.address.store)).at(location)),
        }
    }

    /// Works on what is known; an error where a fork lost it.
    fn known<R>(&self, location: &Location, work: impl FnOnce(&mut Known) -> R) -> Result<R> {
        self.link.known.with(work).ok_or_else(|| lost().at(location))
    }

    fn look_up(&self, key: &str) -> Result<KnownName> {
        self.known(&self.location(key), |known| known.find(key))
    }

    fn uploader<'a>(
        &'a self,
        name: &'a (dyn Fn(&str) -> Location + Sync),
        sent: &'a AtomicU64,
    ) -> Result<Uploader<'a>> {
        let client = &self.link.client;
        client.ready().map_err(|failure| failure.writing(&self.root()))?;
        let text = "cannot be written: expected s3://, gs:// or az://";
        let puts = client.writer().ok_or_else(|| Error::new(Kind::Unsupported, text).at(self.root()))?;
        Ok(Uploader::new(puts, &self.link.limits, name, sent))
    }

    /// Everything below the URL, as it is now.
    pub fn everything(&self, stop: &Stop) -> Result<Vec<ListedObject>> {
        let listing = wait(self.link.client.list(&self.address.key, true), stop)?.ok_or_else(interrupted)?;
        Ok(listing.map_err(|failure| failure.at(&self.root()))?.objects)
    }

    /// Writes objects; `sent` counts their bytes. What was known of the store is forgotten.
    pub fn upload(&self, jobs: &[UploadJob], sent: &AtomicU64, stop: &Stop) -> Result<Vec<Uploaded>> {
        let name = |key: &str| self.location(key);
        let made = self.uploader(&name, sent)?.run(jobs, stop);
        self.link.known.with(Known::forget);
        made
    }

    /// Removes objects.
    pub fn remove(&self, keys: &[String], stop: &Stop) -> Result<()> {
        let name = |key: &str| self.location(key);
        let made = self.uploader(&name, &AtomicU64::new(0))?.remove(keys, stop);
        self.link.known.with(Known::forget);
        made
    }

    /// Aborts uploads in parts that earlier runs began and did not end, of some keys below the URL. Returns their number.
    pub fn sweep(&self, keys: &[String], stop: &Stop) -> Result<usize> {
        let name = |key: &str| self.location(key);
        self.uploader(&name, &AtomicU64::new(0))?.sweep(&self.address.key, keys, stop)
    }

    /// The SHA-256 of objects that were written by [`RemoteStore::upload`].
    pub fn digests(&self, keys: &[String], stop: &Stop) -> Result<Vec<Option<String>>> {
        let name = |key: &str| self.location(key);
        self.uploader(&name, &AtomicU64::new(0))?.digests(keys, stop)
    }

    /// Names directly inside a folder; `deep` lists everything below it at once, for later calls.
    pub fn scan(&self, folder: &Location, deep: bool, stop: &Stop) -> Result<Vec<Found>> {
        let key = self.key(folder)?;
        let names = |known: &mut Known| -> Option<Vec<Found>> {
            if deep && !known.is_deep(key) {
                return None;
            }
            let names = known.names(key)?;
            Some(names.map(|(name, size)| Found { name: name.to_string(), size }).collect())
        };
        if let Some(found) = self.known(folder, names)? {
            return Ok(found);
        }
        // The hub lists all below a folder in as few requests as one level: from the dataset's root, once.
        let from_root = self.address.provider == Provider::Hub && self.is_in_root(key);
        let from = if from_root { self.address.key.as_str() } else { key };
        let listing = wait(self.link.client.list(from, deep), stop)?.ok_or_else(interrupted)?;
        let listing = listing.map_err(|failure| {
            // Public objects in a bucket whose names are not public; Google says 401 to who has no credentials.
            let anonymous = self.address.provider == Provider::Gcs && failure.status() == Some(401);
            if self.address.provider != Provider::Hub && (failure.is_denial() || anonymous) {
                self.unlistable.store(true, Ordering::Relaxed);
            }
            self.link.error(&failure, folder)
        })?;
        if listing.objects.is_empty() && listing.folders.is_empty() {
            // No folder, or an object.
            self.known(folder, |known| known.record_empty(from))?;
            return Ok(vec![]);
        }
        let mut own = Known::default();
        own.record(from, listing.clone());
        let all = self.known(folder, |known| {
            known.record(from, listing);
            from_root.then(|| known.clone())
        })?;
        if let (Some(all), Some(commit)) = (all, self.revision()) {
            // By the commit's name too: when a branch moves on, what was read of the commit before still opens as `@COMMIT`.
            for revision in [&self.address.revision, &commit] {
                if let Some(file) = self.listing_file(revision) {
                    offline::remember(&file, &commit, &all);
                }
            }
        }
        Ok(names(&mut own).unwrap_or_default())
    }

    /// Whether a key is that of the URL, or below it.
    fn is_in_root(&self, key: &str) -> bool {
        let root = &self.address.key;
        root.is_empty() || key.strip_prefix(root.as_str()).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Keeps the beginning of an object that starts with a header, so that copies of this store need no request for it.
    fn keep_header(&self, key: &str, bytes: &[u8]) {
        let bytes = &bytes[..bytes.len().min(HEADER)];
        if let Some(share) = HeadShare::take(bytes.len() as u64).filter(|_| has_header(key)) {
            let head = Head { bytes: bytes::Bytes::copy_from_slice(bytes), _share: Arc::new(share) };
            self.heads.with(|heads| {
                if heads.len() < MOST_HEADS {
                    heads.insert(key.to_string(), head);
                }
            });
        }
    }

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

    /// What a name is. The first bytes of metadata are kept for reading.
    pub fn stat(&self, location: &Location, stop: &Stop) -> Result<Standing> {
        let key = self.key(location)?;
        match self.look_up(key)? {
            KnownName::Object(object) => return Ok(Standing::Object(object.size)),
            KnownName::Newer => return Err(Failure::changed(NEWER).at(location)),
            KnownName::Folder => return Ok(Standing::Folder),
            KnownName::Absent => return Ok(Standing::Absent),
            KnownName::Unknown => {}
        }
        let name = key.rsplit('/').next().unwrap_or_default();
        let is_root = *location == self.root();
        // The URL is nearly always that of a folder, whose listing is needed next; names with a dot are those of objects.
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
        match wait(self.probe(key, access), stop)?.ok_or_else(interrupted)? {
            Ok((facts, head)) => {
                let size = facts.size;
                self.heads.with(|heads| {
                    if heads.len() >= MOST_HEADS {
                        heads.clear();
                    }
                    heads.extend(head.filter(|_| is_metadata).map(|head| (key.to_string(), head)));
                });
                Ok(Standing::Object(size))
            }
            Err(failure) if failure.is_absence() || failure.is_denial() => {
                if !is_metadata && self.has_names(location, stop)? == Some(true) {
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

    /// Whether the folder of a key does not exist. Lists what is beside that folder, once: the folder itself may hold a million
    /// chunks.
    fn is_in_absent_folder(&self, location: &Location, stop: &Stop) -> Result<bool> {
        let Some(folder) = location_above(location) else { return Ok(false) };
        let Some(above) = location_above(&folder) else { return Ok(false) };
        let (folder, beside) = (self.key(&folder)?, self.key(&above)?);
        if folder == self.address.key || !self.is_in_root(beside) || self.look_up(folder)? != KnownName::Unknown {
            return Ok(false);
        }
        self.has_names(&above, stop)?;
        Ok(self.look_up(folder)? == KnownName::Absent)
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
        self.has_names(folder, stop).is_ok_and(|names| names.is_some())
            && self.look_up(key).is_ok_and(|known| known == KnownName::Absent)
    }

    fn object(&self, location: &Location, key: &str, facts: ObjectFacts, head: Option<Head>) -> Box<dyn Source> {
        Box::new(RemoteObject {
            link: Arc::clone(&self.link),
            location: location.clone(),
            key: key.to_string(),
            opened: facts,
            head: ForkLock::new(head),
        })
    }

    /// Opens an object that nothing is known of: its first bytes, and with them its size and tag. One that is read once is
    /// usually read whole: then its bytes come with the first request.
    async fn probe(&self, key: &str, access: Access) -> Result<(ObjectFacts, Option<Head>), Failure> {
        let whole = if access == Access::Once { HeadShare::take(LARGEST) } else { None };
        let share = whole.or_else(|| HeadShare::take(HEAD));
        let most = share.as_ref().map_or(HEAD, HeadShare::bytes);
        let Beginning { bytes: head, facts, date } = self.link.reading(key, None).open(most).await?;
        if self.address.provider == Provider::Http && is_page(key, &head) {
            let text = "the server sent a web page, as some do for names that do not exist";
            return Err(Failure { code: Some("WebPage".to_string()), ..Failure::new(Cause::Status(404), text) });
        }
        let kept = share.map(|mut share| {
            share.shrink(head.len() as u64);
            Head { bytes: head.into(), _share: Arc::new(share) }
        });
        let first = self.link.known.with(|known| known.first(key, &facts, date)).ok_or_else(lost)?;
        first.map_err(Failure::changed)?;
        Ok((facts, kept))
    }

    /// Probes objects, many at once.
    async fn probe_all(&self, which: Vec<usize>, locations: &[&Location], access: Access, answers: &mut [ProbeAnswer]) {
        let one = |i: usize| async move {
            let location = locations[i];
            let key = match self.key(location) {
                Ok(key) => key,
                Err(error) => return (i, Err(error)),
            };
            let opened = self.probe(key, access).await.map(|(facts, head)| {
                if let Some(head) = &head {
                    self.keep_header(key, &head.bytes);
                }
                self.object(location, key, facts, head)
            });
            (i, opened.map_err(|failure| self.link.error(&failure, location)))
        };
        let mut left = which.into_iter();
        let mut flying: FuturesUnordered<_> = left.by_ref().take(PARALLEL).map(one).collect();
        while let Some((i, opened)) = flying.next().await {
            answers[i] = Some(opened);
            flying.extend(left.next().map(one));
        }
    }

    /// Asks again for objects of a web server that are said to be absent, whose chunks would have fill values: a 404 of a web
    /// server may be that of a proxy. In between, the server must show that it serves its objects, if one is known.
    async fn ask_again(&self, locations: &[&Location], access: Access, answers: &mut [ProbeAnswer]) {
        let is_absent = |answer: &ProbeAnswer| matches!(answer, Some(Err(error)) if error.kind == Kind::NotFound);
        let absent: Vec<usize> = (0..answers.len()).filter(|i| is_absent(&answers[*i])).collect();
        let Some(Ok(key)) = absent.first().map(|i| self.key(locations[*i])) else { return };
        match self.link.known.with(|known| known.nearest(key)).flatten() {
            Some((known, facts)) => {
                if let Err(failure) = self.is_still(&known, facts).await {
                    let error = failure.at(&self.location(&known));
                    absent.into_iter().for_each(|i| answers[i] = Some(Err(error.clone())));
                    return;
                }
            }
            None => tokio::time::sleep(self.link.pace.backoff(0)).await,
        }
        self.probe_all(absent, locations, access, answers).await;
    }

    /// Asks the server for a byte of a known object: fails unless it is there, and the same.
    async fn is_still(&self, key: &str, facts: ObjectFacts) -> Result<(), Failure> {
        self.link.reading(key, Some(&facts)).still().await
    }

    /// The cache on disk, and the origin of this store's objects in it. None if that cannot be known: without credentials, for
    /// example, whose absence the requests report.
    fn cache_from(&self, stop: &Stop) -> Option<(&DiskCache, String)> {
        let cache = self.cache.as_ref()?;
        let origin = wait(async { self.link.client.origin() }, stop).ok()??.ok()?;
        Some((cache, origin))
    }

    /// Whether equal tags mean equal bytes. A time of writing, in seconds, does not, nor does a weak ETag.
    fn has_strong_tag(&self, location: &Location) -> bool {
        let known = self.key(location).map(|key| self.look_up(key));
        matches!(known, Ok(Ok(KnownName::Object(object))) if object.tag.if_match().is_some())
    }

    fn open_known(&self, location: &Location) -> Result<Option<Box<dyn Source>>> {
        let key = self.key(location)?;
        let detail = match self.look_up(key)? {
            KnownName::Object(facts) => {
                let head = self.heads.with(|heads| heads.get(key).cloned()).flatten();
                return Ok(Some(self.object(location, key, facts, head)));
            }
            KnownName::Unknown => return Ok(None),
            KnownName::Newer => return Err(Failure::changed(NEWER).at(location)),
            KnownName::Absent => Error::new(Kind::NotFound, "expected an object, found nothing"),
            KnownName::Folder => Error::new(Kind::NotAFile, "expected an object, found a folder"),
        };
        Err(detail.at(location))
    }
}

fn location_above(location: &Location) -> Option<Location> {
    let Location::Object(object) = location else { return None };
    let above = object.key.rsplit_once('/').map_or("", |(above, _)| above);
    Some(Location::object(object.store.clone(), above))
}

/// Whether a file is small, or read whole: its bytes come with the first request.
fn is_metadata(name: &str) -> bool {
    let dotted = [".zgroup", ".zarray", ".zattrs", ".zmetadata"];
    [".json", ".jsonl", ".parquet"].iter().any(|end| name.ends_with(end)) || dotted.contains(&name)
}

/// Whether a file starts with a header that is read when the dataset is opened.
fn has_header(key: &str) -> bool {
    key.ends_with(".safetensors")
}

/// Whether an answer is a page for people instead of the file that was asked for.
fn is_page(key: &str, head: &[u8]) -> bool {
    let start = head.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(0);
    let is = |tag: &[u8]| head.get(start..start + tag.len()).is_some_and(|found| found.eq_ignore_ascii_case(tag));
    (is(b"<!doctype html") || is(b"<html")) && !key.ends_with(".html") && !key.ends_with(".htm")
}

impl Store for RemoteStore {
    fn open_many(&self, locations: &[&Location], access: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let mut answers: Vec<Option<Result<Box<dyn Source>>>> =
            locations.iter().map(|location| self.open_known(location).transpose()).collect();
        // The hub's listing at the pinned commit is one request for all names, a probe is two for each.
        if self.address.provider == Provider::Hub && answers.iter().any(Option::is_none) {
            if let Err(error) = self.scan(&self.root(), true, stop) {
                let failed = |location: &&Location| Err(Error { location: Some((*location).clone()), ..error.clone() });
                return answers.into_iter().zip(locations).map(|(a, l)| a.unwrap_or_else(|| failed(l))).collect();
            }
            answers = locations.iter().map(|location| self.open_known(location).transpose()).collect();
        }
        let unknown: Vec<usize> = (0..answers.len()).filter(|i| answers[*i].is_none()).collect();
        if !unknown.is_empty() {
            let all = async {
                self.probe_all(unknown, locations, access, &mut answers).await;
                if !self.lists() {
                    self.ask_again(locations, access, &mut answers).await;
                }
            };
            if let Err(error) = wait(all, stop) {
                return locations.iter().map(|location| Err(error.clone().at(*location))).collect();
            }
        }
        let fill =
            |(answer, location): (Option<_>, &&Location)| answer.unwrap_or_else(|| Err(interrupted().at(*location)));
        let cache = self.cache_from(stop);
        let through = |source: Box<dyn Source>| match &cache {
            Some((cache, origin)) if self.has_strong_tag(source.location()) => cache.source_from(origin, source),
            _ => source,
        };
        answers.into_iter().zip(locations).map(fill).map(|answer| answer.map(through)).collect()
    }

    fn list(&self, folder: &Location) -> Result<Vec<String>> {
        Ok(self.scan(folder, false, &Stop::default())?.into_iter().map(|found| found.name).collect())
    }

    /// Asks the server, whatever is known: absent chunks have fill values only while their array is there.
    fn look(&self, location: &Location) -> Result<()> {
        let missing = || Error::new(Kind::NotFound, "expected a file, found nothing").at(location);
        let (key, stop) = (self.key(location)?, Stop::default());
        match self.look_up(key)? {
            KnownName::Newer => Err(Failure::changed(NEWER).at(location)),
            KnownName::Object(facts) => {
                let still = wait(self.is_still(key, facts), &stop)?.ok_or_else(interrupted)?;
                still.map_err(|failure| if failure.cause == Cause::Gone { missing() } else { failure.at(location) })
            }
            // A commit does not change.
            KnownName::Folder if self.address.provider == Provider::Hub => Ok(()),
            KnownName::Folder => {
                let listing = wait(self.link.client.list(key, false), &stop)?.ok_or_else(interrupted)?;
                let listing = listing.map_err(|failure| failure.at(location))?;
                let is_there = !(listing.objects.is_empty() && listing.folders.is_empty());
                is_there.then_some(()).ok_or_else(missing)
            }
            KnownName::Absent => Err(missing()),
            KnownName::Unknown => match self.stat(location, &stop)? {
                Standing::Object(_) | Standing::Folder => Ok(()),
                Standing::Absent => Err(missing()),
                Standing::Denied(error) => Err(error),
            },
        }
    }

    fn wishes(&self) -> Option<Wishes> {
        let pace = &self.link.pace;
        let pace = LinkPace { latency: pace.idle_latency(), rate: pace.rate() as u64 };
        let grain = if self.cache.is_some() { PAGE } else { 1 };
        Some(Wishes {
            gap: MOST_GAP,
            grain,
            pace: Some(pace),
            largest: LARGEST,
            parallel: SHORT_PARALLEL,
            unit_bytes: LARGEST,
        })
    }
}
