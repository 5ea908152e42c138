//! Writing to buckets of S3, Google Cloud Storage and Azure, through object_store.
//!
//! Each object gets the SHA-256 of its bytes as user metadata, by which a later run recognises it. S3 receives a SHA-256 with
//! every body, and refuses one that was damaged on its way.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use object_store::aws::{AmazonS3ConfigKey, Checksum};
use object_store::multipart::PartId;
use object_store::path::Path;
use object_store::signer::{Method, SignedUrlOptions, Signer};
use object_store::{
    Attribute, Attributes, GetOptions, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload,
};

use super::objects::{BucketClient, parsed};
use super::pace::Pace;
use super::wire::Wire;
use super::write_side::WriteSide;
use super::{Puts, StoredObject};
use crate::address::Provider;
use crate::failure::{Failure, between};

/// The name of the metadata: letters alone, which all stores and proxies pass on.
const DIGEST: &str = "actshardsha256";
/// Time for a body to be sent: 64 MiB at 0.5 MB/s. The timeout of the HTTP client counts from the first byte sent.
const PATIENCE: Duration = Duration::from_secs(120);
/// The longest listing of unfinished uploads that is read, and the most pages.
const LISTING: usize = 8 << 20;
const PAGES: usize = 1000;

impl BucketClient {
    fn write_side(&self) -> Result<WriteSide, Failure> {
        self.writing.get(|| {
            let mut limits = (*self.limits).clone();
            limits.stall = limits.stall.max(PATIENCE);
            let wire = Wire::new(Arc::new(limits), Arc::new(Pace::default()))?;
            self.guarded(|| match self.provider {
                Provider::S3 => {
                    let builder = self.s3(wire.clone())?.0.with_disable_bulk_delete(true);
                    let anonymous = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature);
                    let is_signed = !anonymous.is_some_and(|text| crate::options::is_true(&text));
                    let made = Arc::new(self.built(builder.with_checksum_algorithm(Checksum::SHA256).build())?);
                    let signer = is_signed.then(|| Arc::clone(&made) as Arc<dyn Signer>);
                    Ok(WriteSide { whole: Arc::clone(&made) as _, parts: made, signer, wire })
                }
                Provider::Gcs => {
                    let made = Arc::new(self.built(self.gcs(wire.clone())?.0.build())?);
                    let signer = Some(Arc::clone(&made) as Arc<dyn Signer>);
                    Ok(WriteSide { whole: Arc::clone(&made) as _, parts: made, signer, wire })
                }
                _ => {
                    let made = Arc::new(self.built(self.azure(wire.clone())?.0.build())?);
                    Ok(WriteSide { whole: Arc::clone(&made) as _, parts: made, signer: None, wire })
                }
            })
        })
    }

    /// Sends a request; sends it again if other settings may help.
    async fn adapted<T, F>(&self, ask: impl Fn(WriteSide) -> F) -> Result<T, Failure>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let once = || async { ask(self.write_side()?).await.map_err(|error| Failure::of_store(&error)) };
        match once().await {
            Err(failure) if self.adapts(&failure) => once().await,
            answer => answer,
        }
    }

    async fn listed(&self, prefix: &str) -> Result<Vec<(String, String)>, Failure> {
        let side = self.write_side()?;
        let Some(signer) = &side.signer else { return Ok(vec![]) };
        let (mut found, mut marker) = (vec![], None::<(String, String)>);
        for _ in 0..PAGES {
            let mut query = vec![("uploads".to_string(), String::new()), ("prefix".to_string(), prefix.to_string())];
            if let Some((key, id)) = marker.take() {
                query.extend([("key-marker".to_string(), key), ("upload-id-marker".to_string(), id)]);
            }
            let options = SignedUrlOptions::default().with_query(query);
            let minute = Duration::from_secs(60);
            let signed = signer.signed_url_opts(Method::GET, &Path::default(), minute, &options).await;
            let url = match (signed, self.provider) {
                (Ok(url), _) => url,
                // Most credentials of Google cannot sign URLs.
                (Err(_), Provider::Gcs) => return Ok(vec![]),
                (Err(error), _) => return Err(Failure::of_store(&error)),
            };
            let answer = side.wire.send(Wire::get(url.as_str(), &[])?).await?;
            let page = side.wire.body(answer, LISTING).await?;
            let page = String::from_utf8_lossy(&page);
            let uploads = page.split("<Upload>").skip(1);
            found.extend(uploads.filter_map(|upload| Some((tag(upload, "Key")?, tag(upload, "UploadId")?))));
            match (tag(&page, "NextKeyMarker"), tag(&page, "NextUploadIdMarker")) {
                (Some(key), Some(id)) if tag(&page, "IsTruncated").as_deref() == Some("true") => {
                    marker = Some((key, id));
                }
                _ => break,
            }
        }
        Ok(found)
    }
}

/// The text of the first element of a name.
fn tag(xml: &str, name: &str) -> Option<String> {
    let text = between(xml, &format!("<{name}>"), &format!("</{name}>"))?;
    let plain = [("&lt;", "<"), ("&gt;", ">"), ("&quot;", "\""), ("&#34;", "\""), ("&apos;", "'"), ("&#39;", "'")];
    let text = plain.iter().fold(text.to_string(), |text, (from, to)| text.replace(from, to));
    Some(text.replace("&amp;", "&"))
}

fn attributes(sha256: &str) -> Attributes {
    Attributes::from_iter([(Attribute::Metadata(DIGEST.into()), sha256.to_string())])
}

impl Puts for BucketClient {
    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        sha256: &'a str,
        only_new: bool,
    ) -> BoxFuture<'a, Result<(), Failure>> {
        async move {
            let path = &parsed(key)?;
            let mode = if only_new { PutMode::Create } else { PutMode::Overwrite };
            let options = PutOptions { mode, attributes: attributes(sha256), ..PutOptions::default() };
            self.adapted(|side| {
                let (payload, options) = (PutPayload::from_bytes(body.clone()), options.clone());
                async move { side.whole.put_opts(path, payload, options).await }
            })
            .await
            .map(drop)
        }
        .boxed()
    }

    fn head<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<StoredObject>, Failure>> {
        async move {
            let path = &parsed(key)?;
            let options = GetOptions { head: true, ..GetOptions::default() };
            let answer = self.adapted(|side| {
                let options = options.clone();
                async move { side.whole.get_opts(path, options).await }
            });
            match answer.await {
                Ok(found) => {
                    let sha256 =
                        found.attributes.get(&Attribute::Metadata(DIGEST.into())).map(|text| text.as_ref().to_string());
                    Ok(Some(StoredObject { size: found.meta.size, sha256 }))
                }
                Err(failure) if failure.status() == Some(404) => Ok(None),
                Err(failure) => Err(failure),
            }
        }
        .boxed()
    }

    fn begin<'a>(&'a self, key: &'a str, sha256: &'a str) -> BoxFuture<'a, Result<String, Failure>> {
        async move {
            let path = &parsed(key)?;
            // Azure's protocol takes metadata with the last request, where object_store does not pass it on.
            let attributes = if self.provider == Provider::Azure { Attributes::default() } else { attributes(sha256) };
            let options = PutMultipartOptions { attributes, ..PutMultipartOptions::default() };
            self.adapted(|side| {
                let options = options.clone();
                async move { side.parts.create_multipart_opts(path, options).await }
            })
            .await
        }
        .boxed()
    }

    fn part<'a>(
        &'a self,
        key: &'a str,
        id: &'a str,
        number: usize,
        body: Bytes,
    ) -> BoxFuture<'a, Result<String, Failure>> {
        async move {
            let (path, id) = (&parsed(key)?, &id.to_string());
            let part = self.adapted(|side| {
                let payload = PutPayload::from_bytes(body.clone());
                async move { side.parts.put_part(path, id, number, payload).await }
            });
            part.await.map(|part| part.content_id)
        }
        .boxed()
    }

    fn complete<'a>(&'a self, key: &'a str, id: &'a str, parts: Vec<String>) -> BoxFuture<'a, Result<(), Failure>> {
        async move {
            let (path, id) = (&parsed(key)?, &id.to_string());
            let parts: Vec<PartId> = parts.into_iter().map(|content_id| PartId { content_id }).collect();
            self.adapted(|side| {
                let parts = parts.clone();
                async move { side.parts.complete_multipart(path, id, parts).await }
            })
            .await
            .map(drop)
        }
        .boxed()
    }

    fn abort<'a>(&'a self, key: &'a str, id: &'a str) -> BoxFuture<'a, Result<(), Failure>> {
        async move {
            let (path, id) = (&parsed(key)?, &id.to_string());
            self.adapted(|side| async move { side.parts.abort_multipart(path, id).await }).await
        }
        .boxed()
    }

    fn unfinished<'a>(&'a self, prefix: &'a str) -> BoxFuture<'a, Result<Vec<(String, String)>, Failure>> {
        self.listed(prefix).boxed()
    }

    fn remove<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<(), Failure>> {
        async move {
            let path = &parsed(key)?;
            self.adapted(|side| async move { side.whole.delete(path).await }).await
        }
        .boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::tag;

    #[test]
    fn names_in_answers_are_unescaped() {
        let xml = "<Upload><Key>a&amp;b/&lt;c&gt;</Key><UploadId>x</UploadId></Upload>";
        assert_eq!(tag(xml, "Key").as_deref(), Some("a&b/<c>"));
        assert_eq!(tag(xml, "UploadId").as_deref(), Some("x"));
        assert_eq!(tag(xml, "NextKeyMarker"), None);
    }
}
