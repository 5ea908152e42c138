//! Buckets of S3, Google Cloud Storage and Azure, through object_store.

use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::str::FromStr;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{GetOptions, GetRange, ObjectMeta, ObjectStore, RetryConfig};

use super::pace::Pace;
use super::times::ServerDate;
use super::wire::Wire;
use super::write_side::WriteSide;
use super::{Answer, Client, Expected, ListedObject, Listing, PAGES, Puts, Tag, possible};
use crate::address::{Provider, StoreUrl};
use crate::checks::why_not;
use crate::credentials::{self, aws, cloud};
use crate::failure::{Cause, Failure, shown};
use crate::options::{ProviderSettings, RequestLimits, is_true, plain};
use crate::runtime::PerProcess;
use actshard_core::threads::ForkSafe;

/// A bucket, and the address of its server.
#[derive(Clone)]
struct Bucket {
    store: Arc<dyn ObjectStore>,
    pages: Arc<dyn PaginatedListStore>,
    origin: Arc<str>,
}

impl Bucket {
    fn new<S: ObjectStore + PaginatedListStore>(store: S, origin: String) -> Bucket {
        let store = Arc::new(store);
        Bucket { pages: Arc::clone(&store) as Arc<dyn PaginatedListStore>, store, origin: origin.into() }
    }
}

/// A client of one bucket.
#[derive(Debug)]
pub struct BucketClient {
    pub(super) provider: Provider,
    bucket: String,
    settings: ProviderSettings,
    pub(super) limits: Arc<RequestLimits>,
    pace: Arc<Pace>,
    bucket_store: PerProcess<Bucket>,
    pub(super) writing: PerProcess<WriteSide>,
    /// The region that the server named, if it is not the configured one.
    region: ForkSafe<Option<String>>,
}

impl BucketClient {
    /// A client of the bucket of an address.
    pub fn new(address: &StoreUrl, settings: ProviderSettings, pace: Arc<Pace>) -> BucketClient {
        BucketClient {
            provider: address.provider,
            bucket: address.bucket.clone(),
            limits: Arc::new(settings.limits.clone()),
            settings,
            pace,
            bucket_store: PerProcess::default(),
            writing: PerProcess::default(),
            region: ForkSafe::default(),
        }
    }

    fn made(&self) -> Result<Bucket, Failure> {
        self.bucket_store.get(|| {
            let wire = Wire::new(Arc::clone(&self.limits), Arc::clone(&self.pace))?.naming_reasons();
            self.guarded(|| match self.provider {
                Provider::S3 => {
                    let (builder, origin) = self.s3(wire)?;
                    Ok(Bucket::new(self.built(builder.build())?, origin))
                }
                Provider::Gcs => {
                    let (builder, origin) = self.gcs(wire)?;
                    Ok(Bucket::new(self.built(builder.build())?, origin))
                }
                _ => {
                    let (builder, origin) = self.azure(wire)?;
                    Ok(Bucket::new(self.built(builder.build())?, origin))
                }
            })
        })
    }

    /// object_store panics for some values that are not checked by this crate.
    pub(super) fn guarded<T>(&self, make: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
        std::panic::catch_unwind(AssertUnwindSafe(make)).unwrap_or_else(|_| Err(unusable()))
    }

    pub(super) fn s3(&self, wire: Wire) -> Result<(AmazonS3Builder, String), Failure> {
        let found = aws::find(&self.settings, &credentials::variable)?;
        let mut builder = AmazonS3Builder::new();
        let ours = self.settings.has(&["access_key_id", "skip_signature"]) || self.settings.profile.is_some();
        let has_endpoint = self.settings.has(&["endpoint"]);
        for (name, value) in environment("AWS_") {
            let Ok(key) = AmazonS3ConfigKey::from_str(&name) else { continue };
            let credential = matches!(
                key,
                AmazonS3ConfigKey::AccessKeyId | AmazonS3ConfigKey::SecretAccessKey | AmazonS3ConfigKey::Token
            );
            let excluded = match key {
                AmazonS3ConfigKey::Client(_) | AmazonS3ConfigKey::Bucket => true,
                // object_store prefers it to the endpoint of the options.
                AmazonS3ConfigKey::S3Endpoint => has_endpoint,
                // A session token of the environment does not belong to the keys of the options.
                _ => ours && credential,
            };
            if !excluded {
                builder = builder.with_config(key, usable(self.provider, &name, value)?);
            }
        }
        builder = found.apply(builder, self.limits.patience)?;
        for (key, value) in &self.settings.keys {
            builder = builder.with_config(known(key)?, value);
        }
        if let Some(region) = self.region.with(|region| region.clone()).flatten() {
            builder = builder.with_region(region);
        }
        let endpoint = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
        let origin = endpoint.iter().find_map(|key| builder.get_config_value(key)).unwrap_or_default();
        let builder = builder.with_bucket_name(&self.bucket).with_retry(no_retries()).with_allow_http(true);
        Ok((builder.with_http_connector(wire), origin))
    }

    pub(super) fn gcs(&self, wire: Wire) -> Result<(GoogleCloudStorageBuilder, String), Failure> {
        cloud::check_google(&self.settings, &credentials::variable)?;
        let mut builder = GoogleCloudStorageBuilder::new();
        if let Ok(path) = std::env::var("SERVICE_ACCOUNT") {
            builder = builder.with_service_account_path(path);
        }
        for (name, value) in environment("GOOGLE_") {
            if let Ok(key) = GoogleConfigKey::from_str(&name)
                && !matches!(key, GoogleConfigKey::Client(_) | GoogleConfigKey::Bucket)
            {
                builder = builder.with_config(key, usable(self.provider, &name, value)?);
            }
        }
        for (key, value) in &self.settings.keys {
            builder = builder.with_config(known(key)?, value);
        }
        // A service account's file may name a server too.
        let accounts = [GoogleConfigKey::ServiceAccountKey, GoogleConfigKey::ServiceAccount];
        let origin = builder.get_config_value(&GoogleConfigKey::BaseUrl).unwrap_or_else(|| {
            accounts.iter().filter_map(|key| builder.get_config_value(key)).collect::<Vec<_>>().join(" ")
        });
        let builder = builder.with_bucket_name(&self.bucket).with_retry(no_retries());
        Ok((builder.with_http_connector(wire), origin))
    }

    pub(super) fn azure(&self, wire: Wire) -> Result<(MicrosoftAzureBuilder, String), Failure> {
        cloud::check_azure(&self.settings, &credentials::variable)?;
        let (container, host) = self.bucket.split_once('@').unwrap_or((&self.bucket, ""));
        let mut builder = MicrosoftAzureBuilder::new();
        for (name, value) in environment("AZURE_") {
            if let Ok(key) = AzureConfigKey::from_str(&name)
                && !matches!(key, AzureConfigKey::Client(_) | AzureConfigKey::ContainerName)
            {
                builder = builder.with_config(key, usable(self.provider, &name, value)?);
            }
        }
        for (key, value) in &self.settings.keys {
            builder = builder.with_config(known(key)?, value);
        }
        if let Some(account) = host.split('.').next().filter(|account| !account.is_empty()) {
            builder = builder.with_account(account);
        }
        let parts = [AzureConfigKey::AccountName, AzureConfigKey::Endpoint, AzureConfigKey::UseEmulator];
        let origin = parts.map(|key| builder.get_config_value(&key).unwrap_or_default()).join(" ");
        let builder = builder.with_container_name(container).with_retry(no_retries()).with_allow_http(true);
        Ok((builder.with_http_connector(wire), origin))
    }

    /// The result of object_store. Its errors are about options and variables: adds the names of the options and
    /// removes their values.
    pub(super) fn built<S>(&self, made: object_store::Result<S>) -> Result<S, Failure> {
        match made {
            Ok(store) => Ok(store),
            Err(error) => {
                let mut text = Failure::chain(&error);
                for (_, value) in self.settings.keys.iter().filter(|(_, value)| value.len() > 3) {
                    text = text.replace(value.as_str(), "***");
                }
                // Parts of JSON are quoted, by the name of their type.
                let quoted: Vec<String> = text.split('"').skip(1).step_by(2).map(str::to_string).collect();
                for part in quoted.iter().filter(|part| part.len() > 3) {
                    if self.settings.keys.iter().any(|(_, value)| value.contains(part.as_str())) {
                        text = text.replace(part.as_str(), "***");
                    }
                }
                let names: Vec<&str> = self.settings.keys.iter().map(|(name, _)| name.as_str()).collect();
                let given = if names.is_empty() { "none".to_string() } else { names.join(", ") };
                let text = format!("cannot use the options: {} (storage_options: {given})", shown(&text));
                Err(Failure::new(Cause::Refused, text))
            }
        }
    }

    fn reset(&self) {
        self.bucket_store.reset();
        self.writing.reset();
    }

    /// Whether another attempt with other settings may succeed: the bucket's region, or fresh credentials.
    pub(super) fn adapts(&self, failure: &Failure) -> bool {
        let redirected = matches!(failure.status(), Some(301 | 307 | 308 | 400));
        if let Some(region) = failure.region.as_ref().filter(|_| redirected && self.provider == Provider::S3) {
            self.region.with(|known| *known = Some(region.clone()));
            self.reset();
            return true;
        }
        let expired = failure.is_expired();
        if expired {
            self.reset();
        }
        expired
    }

    async fn ask(&self, key: &str, range: Range<u64>, expected: &Expected) -> Result<Answer, Failure> {
        let path = parsed(key)?;
        let options = GetOptions {
            range: (!range.is_empty()).then_some(GetRange::Bounded(range)),
            if_match: expected.tag.as_ref().and_then(Tag::if_match),
            ..GetOptions::default()
        };
        let found = self.made()?.store.get_opts(&path, options).await.map_err(|error| Failure::of_store(&error))?;
        let (tag, size, range) = (tag_of(&found.meta), found.meta.size, found.range.clone());
        let date = found.extensions.get::<ServerDate>().copied();
        let body = found.into_stream().map(|chunk| chunk.map_err(|error| Failure::of_store(&error)));
        Ok(Answer { tag, size, date, range, body: Box::pin(body) })
    }

    async fn names(&self, folder: &str, deep: bool) -> Result<Listing, Failure> {
        let prefix = if folder.is_empty() { None } else { Some(format!("{}/", parsed(folder)?)) };
        let pages = self.made()?.pages;
        let mut listing = Listing { deep, ..Listing::default() };
        let mut token: Option<String> = None;
        for _ in 0..PAGES {
            let delimiter = (!deep).then_some("/".into());
            let options =
                PaginatedListOptions { delimiter, page_token: token.clone(), ..PaginatedListOptions::default() };
            let page = pages.list_paginated(prefix.as_deref(), options).await;
            let page = page.map_err(|error| Failure::of_store(&error))?;
            listing.date = listing.date.or(page.result.extensions.get::<ServerDate>().copied());
            for meta in page.result.objects {
                let (size, tag) = (possible(meta.size)?, tag_of(&meta));
                listing.objects.push(ListedObject { key: meta.location.into(), size, tag });
            }
            listing.folders.extend(page.result.common_prefixes.into_iter().map(String::from));
            match page.page_token {
                None => return Ok(listing),
                again if again == token => break,
                next => token = next,
            }
        }
        Err(Failure::new(Cause::Protocol, "a listing that does not end"))
    }
}

/// Variables of the environment that begin with a prefix, in lower case.
fn environment(prefix: &str) -> Vec<(String, String)> {
    let vars =
        std::env::vars_os().filter_map(|(key, value)| Some((key.into_string().ok()?, value.into_string().ok()?)));
    let ours = vars.filter(|(key, value)| key.starts_with(prefix) && !value.is_empty());
    ours.map(|(key, value)| (key.to_ascii_lowercase(), value)).collect()
}

/// A value of the environment that object_store can use.
fn usable(provider: Provider, name: &str, value: String) -> Result<String, Failure> {
    match why_not(&plain(provider, name), &value) {
        None => Ok(value),
        Some(why) => Err(Failure::new(Cause::Refused, format!("variable {}: {why}", name.to_ascii_uppercase()))),
    }
}

fn unusable() -> Failure {
    let text = "an option, a variable of the environment or a credential has a value that cannot be sent";
    Failure::new(Cause::Refused, text)
}

/// Runs a request of object_store, which panics for values that it cannot put into a request.
async fn guarded<T>(work: impl Future<Output = Result<T, Failure>> + Send) -> Result<T, Failure> {
    AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|_| Err(unusable()))
}

/// An option's key; the options were checked before.
fn known<T: FromStr>(key: &str) -> Result<T, Failure> {
    T::from_str(key).map_err(|_| Failure::new(Cause::Refused, format!("storage_options: {key:?}: unknown option")))
}

pub(super) fn parsed(key: &str) -> Result<Path, Failure> {
    Path::parse(key).map_err(|error| Failure::new(Cause::Refused, format!("a key that cannot be read: {error}")))
}

/// Requests are repeated by [`Wire`], and bodies by the reader.
fn no_retries() -> RetryConfig {
    RetryConfig { max_retries: 0, ..RetryConfig::default() }
}

fn tag_of(meta: &ObjectMeta) -> Tag {
    // Servers without times report 1970.
    let time = Some(meta.last_modified.timestamp()).filter(|time| *time > 0);
    Tag::new(meta.e_tag.as_deref(), time.map(|time| time.to_string()))
}

impl Client for BucketClient {
    fn get<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        expected: &'a Expected,
    ) -> BoxFuture<'a, Result<Answer, Failure>> {
        async move {
            match guarded(self.ask(key, range.clone(), expected)).await {
                Err(failure) if self.adapts(&failure) => guarded(self.ask(key, range, expected)).await,
                answer => answer,
            }
        }
        .boxed()
    }

    fn list<'a>(&'a self, folder: &'a str, deep: bool) -> BoxFuture<'a, Result<Listing, Failure>> {
        async move {
            match guarded(self.names(folder, deep)).await {
                Err(failure) if self.adapts(&failure) || failure.cause == Cause::Broken => {
                    guarded(self.names(folder, deep)).await
                }
                listing => listing,
            }
        }
        .boxed()
    }

    fn credentials(&self) -> String {
        let (prefix, keys): (_, &[&str]) = match self.provider {
            Provider::S3 => ("AWS_", &["access_key_id"]),
            Provider::Gcs => ("GOOGLE_", &["service_account", "service_account_key", "bearer_token"]),
            _ => ("AZURE_", &["access_key", "sas_key", "bearer_token", "client_id", "token"]),
        };
        let variable = credentials::variable;
        let is_on = |name: &str| variable(name).is_some_and(|value| is_true(&value));
        if self.settings.is_on("skip_signature") || is_on(&format!("{prefix}SKIP_SIGNATURE")) {
            return "anonymous access".to_string();
        }
        if let Some(profile) = &self.settings.profile {
            return format!("profile {profile:?} of the AWS files");
        }
        if self.settings.has(keys) {
            return "the credentials of storage_options".to_string();
        }
        if self.provider != Provider::S3 || variable("AWS_ACCESS_KEY_ID").is_some() {
            return format!("the credentials of the environment ({prefix}...)");
        }
        variable("AWS_PROFILE").map_or_else(
            || "the default profile of the AWS files, or this machine's role".to_string(),
            |profile| format!("profile {profile:?} of the AWS files (AWS_PROFILE)"),
        )
    }

    fn origin(&self) -> Result<String, Failure> {
        Ok(self.made()?.origin.to_string())
    }

    fn writer(&self) -> Option<&dyn Puts> {
        Some(self)
    }

    fn ready(&self) -> Result<(), Failure> {
        match self.provider {
            Provider::S3 => aws::find(&self.settings, &credentials::variable).map(drop),
            Provider::Gcs => cloud::check_google(&self.settings, &credentials::variable),
            _ => cloud::check_azure(&self.settings, &credentials::variable),
        }
    }
}
