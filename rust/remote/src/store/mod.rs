//! A store of objects behind a URL. The known facts about them are in [`Known`], requests for unknown objects in
//! [`probing`], and kinds of names in [`standing`].

mod probing;
mod standing;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use actshard_core::disk_cache::{DiskCache, PAGE};
use actshard_core::location::Location;
use actshard_core::source::{Access, LinkPace, Source, Store, Wishes};
use actshard_core::threads::{ForkSafe, Renewed, Stop, interrupted};
use actshard_core::{Error, Kind, Result};
use sha2::{Digest, Sha256};

use crate::address::{Provider, StoreUrl};
use crate::client::hub::HubClient;
use crate::client::objects::BucketClient;
use crate::client::pace::{Counts, Pace};
use crate::client::web::WebClient;
use crate::client::{Client, ListedObject};
use crate::known::{Known, KnownName};
use crate::object::{Head, LARGEST, SHORT_PARALLEL};
use crate::offline;
use crate::options::Options;
use crate::reading::Link;
use crate::runtime::wait;
use crate::state::State;
use crate::upload::{UploadJob, Uploaded, Uploader, hex};

/// The largest gap that is read for the ranges around it.
const MOST_GAP: u64 = 1 << 20;

pub use self::standing::Standing;

/// A name in a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The name.
    pub name: String,
    /// The object's size; `None` for a folder.
    pub size: Option<u64>,
}

/// First bytes of objects that were inspected, by key.
type Heads = HashMap<String, Head>;

/// A bucket, web server or dataset of the hub. Remembers sizes and tags of its objects.
#[derive(Debug)]
pub struct RemoteStore {
    address: StoreUrl,
    url: crate::options::Secret,
    options: Options,
    link: Arc<Link>,
    heads: ForkSafe<Heads>,
    cache: Option<DiskCache>,
}

impl RemoteStore {
    /// The store of a URL. Makes no request.
    pub fn open(url: &str, options: Options) -> Result<RemoteStore> {
        RemoteStore::with(url, options, None, Known::default())
    }

    /// The same store, whose requests go another way: for tests.
    #[doc(hidden)]
    pub fn over(self, client: Box<dyn Client>) -> RemoteStore {
        let (pace, limits) = (Arc::clone(&self.link.pace), self.link.limits.clone());
        let known = self.link.known.with(std::mem::take);
        RemoteStore {
            link: Arc::new(Link { client, pace, limits, known: Renewed::new(known, Known::default()) }),
            ..self
        }
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
        let link = Arc::new(Link { client, pace, limits, known: Renewed::new(known, Known::default()) });
        let url = crate::options::Secret(url.to_string());
        Ok(RemoteStore { address, url, options, link, heads: ForkSafe::default(), cache: None })
    }

    /// The same store, whose objects are read through a cache on disk of at most `limit` bytes.
    /// With `HF_HUB_OFFLINE`, a dataset of the hub has the files that it had when it was last listed with this cache.
    pub fn cached(self, folder: &Path, limit: u64) -> Result<RemoteStore> {
        let store = RemoteStore { cache: Some(DiskCache::open(folder, limit)?), ..self };
        let is_new = store.link.known.with(|known| *known == Known::default());
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

    /// The file with the listing of a dataset of the hub, for later processes without a network.
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

    /// A digest of the properties that distinguish servers whose objects have equal URLs: endpoint and account. Makes
    /// no request.
    pub fn origin(&self, stop: &Stop) -> Result<String> {
        let origin = wait(async { self.link.client.origin() }, stop)?;
        origin.map(|text| hex(&Sha256::digest(text))).map_err(|failure| self.link.error(&failure, &self.root()))
    }

    /// Whether it can list names; web servers cannot, and buckets may refuse it.
    pub fn lists(&self) -> bool {
        self.link.client.lists() && self.link.known.with(|known| known.lists())
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

    /// The state from which another process opens the same store without a request: URL, options, revision and known
    /// objects. Contains the options' secrets.
    pub fn state(&self) -> Result<Vec<u8>> {
        let known = self.link.known.with(|known| known.pack());
        let cache = self.cache.as_ref().map(|cache| (cache.chosen().to_path_buf(), cache.limit()));
        let (url, options, revision) = (self.url.0.clone(), self.options.pairs(), self.revision());
        let heads = self.headers();
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

    fn look_up(&self, key: &str) -> KnownName {
        self.link.known.with(|known| known.find(key))
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
        let listing = wait(self.link.client.list(&self.address.key, true), stop)?;
        Ok(listing.map_err(|failure| failure.at(&self.root()))?.objects)
    }

    /// Writes objects; `sent` counts their bytes. Resets the known facts about the store.
    pub fn upload(&self, jobs: &[UploadJob], sent: &AtomicU64, stop: &Stop) -> Result<Vec<Uploaded>> {
        let name = |key: &str| self.location(key);
        let made = self.uploader(&name, sent)?.run(jobs, stop);
        self.forget();
        made
    }

    /// Resets the known facts about objects, including their first bytes: the objects are about to change.
    fn forget(&self) {
        self.link.known.with(Known::forget);
        self.heads.with(Heads::clear);
    }

    /// Removes objects.
    pub fn remove(&self, keys: &[String], stop: &Stop) -> Result<()> {
        let name = |key: &str| self.location(key);
        let made = self.uploader(&name, &AtomicU64::new(0))?.remove(keys, stop);
        self.forget();
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
        if let Some(found) = self.link.known.with(names) {
            return Ok(found);
        }
        // Before the request: another thread may get the first answer while this one is on its way. A commit does not change.
        let has_version = self.address.provider == Provider::Hub || self.link.known.with(|known| known.has_version());
        // The hub lists all below a folder in as few requests as one level: from the dataset's root, once.
        let from_root = self.address.provider == Provider::Hub && self.is_in_root(key);
        let from = if from_root { self.address.key.as_str() } else { key };
        let listing = wait(self.link.client.list(from, deep), stop)?;
        let listing = listing.map_err(|failure| {
            // Public objects in a bucket whose names are not public; without credentials, Google returns 401.
            let anonymous = self.address.provider == Provider::Gcs && failure.status() == Some(401);
            if self.address.provider != Provider::Hub && (failure.is_denial() || anonymous) {
                self.link.known.with(Known::refuse_listings);
            }
            self.link.error(&failure, folder)
        })?;
        if listing.objects.is_empty() && listing.folders.is_empty() {
            // The folder does not exist, or is an object. Without a version it may be written before the first answer, and
            // is listed again.
            if has_version {
                self.link.known.with(|known| known.record_empty(from));
            }
            return Ok(vec![]);
        }
        let mut own = Known::default();
        own.record(from, listing.clone());
        let all = self.link.known.with(|known| {
            known.record(from, listing);
            from_root.then(|| known.clone())
        });
        if let (Some(all), Some(commit)) = (all, self.revision()) {
            // Also under the commit's name: after the branch moves, data read at the earlier commit still opens as
            // `@COMMIT`.
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

    /// The cache on disk, and the origin of this store's objects in it. None if that cannot be known: without credentials, for
    /// example, whose absence the requests report.
    fn cache_from(&self, stop: &Stop) -> Option<(&DiskCache, String)> {
        let cache = self.cache.as_ref()?;
        let origin = wait(async { self.link.client.origin() }, stop).ok()?.ok()?;
        Some((cache, origin))
    }

    /// Whether equal tags mean equal bytes. A time of writing, in seconds, does not, nor does a weak ETag.
    fn has_strong_tag(&self, location: &Location) -> bool {
        let known = self.key(location).map(|key| self.look_up(key));
        matches!(known, Ok(KnownName::Object(object)) if object.tag.if_match().is_some())
    }
}

impl Store for RemoteStore {
    fn open_many(&self, locations: &[&Location], access: Access, stop: &Stop) -> Vec<Result<Box<dyn Source>>> {
        let mut answers: Vec<Option<Result<Box<dyn Source>>>> =
            locations.iter().map(|location| self.open_known(location).transpose()).collect();
        // The hub's listing at the pinned commit is one request for all names, a probe is two for each. One file that
        // is read once, such as the ledger of a token cache, is probed: a listing of many shards has many pages. A
        // cache on disk needs the listing: without a network, only listed objects open.
        let lacking = answers.iter().filter(|answer| answer.is_none()).count();
        let asked = usize::from(access == Access::Once && self.cache.is_none());
        if self.address.provider == Provider::Hub && lacking > asked {
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

    #[expect(clippy::disallowed_methods, reason = "on a thread that is abandoned instead")]
    fn list(&self, folder: &Location) -> Result<Vec<String>> {
        Ok(self.scan(folder, false, Stop::never())?.into_iter().map(|found| found.name).collect())
    }

    fn look(&self, location: &Location) -> Result<()> {
        self.look_at(location)
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
