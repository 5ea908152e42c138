//! Files of web servers. They cannot be listed: names come from metadata.

use std::ops::Range;
use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use super::pace::Pace;
use super::resolved::{ResolvedFiles, WantedBytes};
use super::wire::Wire;
use super::{Answer, Client, Expected, Listing};
use crate::address::{StoreUrl, web_path_of};
use crate::failure::{Cause, Failure};
use crate::options::{ProviderSettings, Secret};
use crate::runtime::PerProcess;

/// A client of a web server.
#[derive(Debug)]
pub struct WebClient {
    base: String,
    /// The key of the URL.
    root: String,
    query: Option<Secret>,
    token: Option<Secret>,
    settings: Arc<crate::options::RequestLimits>,
    pace: Arc<Pace>,
    places: PerProcess<Arc<ResolvedFiles>>,
}

impl WebClient {
    /// A client of the server of an address.
    pub fn new(address: &StoreUrl, settings: &ProviderSettings, pace: Arc<Pace>) -> WebClient {
        WebClient {
            base: address.bucket.clone(),
            root: address.key.clone(),
            query: address.query.clone().map(Secret),
            token: settings.get("token").map(|token| Secret(token.to_string())),
            settings: Arc::new(settings.limits.clone()),
            pace,
            places: PerProcess::default(),
        }
    }
}

impl Client for WebClient {
    fn get<'a>(
        &'a self,
        key: &'a str,
        range: Range<u64>,
        expected: &'a Expected,
    ) -> BoxFuture<'a, Result<Answer, Failure>> {
        async move {
            let places = self.places.get(|| {
                Wire::new(Arc::clone(&self.settings), Arc::clone(&self.pace))
                    .map(|wire| Arc::new(ResolvedFiles::new(wire)))
            })?;
            let query = self.query.as_ref().map(|query| format!("?{}", query.0)).unwrap_or_default();
            let url = format!("{}/{}{query}", self.base, web_path_of(&self.root, key));
            let wanted = WantedBytes { url: &url, token: self.token.as_ref(), range, expected, own_etag: true };
            places.get(key, &wanted).await
        }
        .boxed()
    }

    fn list<'a>(&'a self, _: &'a str, _: bool) -> BoxFuture<'a, Result<Listing, Failure>> {
        let text = "web servers cannot list folders: use the URL of the object store, or a format whose metadata names its files";
        std::future::ready(Err(Failure::new(Cause::Unsupported, text))).boxed()
    }

    fn lists(&self) -> bool {
        false
    }

    fn credentials(&self) -> String {
        let used = if self.token.is_some() { "the token of storage_options" } else { "no token" };
        used.to_string()
    }

    fn origin(&self) -> Result<String, Failure> {
        Ok(format!("{}/?{}", self.base, self.query.as_ref().map_or("", |query| &query.0)))
    }
}
