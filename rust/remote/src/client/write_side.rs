//! The half of a bucket's client that writes.

use std::sync::Arc;

use object_store::ObjectStore;
use object_store::multipart::MultipartStore;
use object_store::signer::Signer;

use super::wire::Wire;

/// A bucket's client for writing: other timeouts, and no part in measurements of reads.
#[derive(Clone, Debug)]
pub struct WriteSide {
    /// Objects in one request.
    pub whole: Arc<dyn ObjectStore>,
    /// Objects in parts.
    pub parts: Arc<dyn MultipartWriter>,
    /// Signs URLs, where the credentials can.
    pub signer: Option<Arc<dyn Signer>>,
    /// Its connections.
    pub wire: Wire,
}

/// A store of objects in parts.
pub trait MultipartWriter: MultipartStore + std::fmt::Debug {}
impl<T: MultipartStore + std::fmt::Debug> MultipartWriter for T {}
