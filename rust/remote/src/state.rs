//! The content of a pickled store.

use std::path::PathBuf;

use actshard_core::{Error, Kind, Result};
use serde::{Deserialize, Serialize};

use crate::known::PackedKnown;

/// The version of this form. A newer one is refused.
const VERSION: u32 = 1;

/// URL, options, revision and known objects of a store.
#[derive(Serialize, Deserialize)]
pub struct State {
    /// The URL as the user gave it; signed URLs contain a secret.
    pub url: String,
    /// The options, secrets included.
    pub options: Vec<(String, String)>,
    /// The pinned revision.
    pub revision: Option<String>,
    /// The known objects.
    pub known: PackedKnown,
    /// First bytes of objects whose headers were read.
    #[serde(default)]
    pub heads: Vec<(String, Vec<u8>)>,
    /// Folder and limit of the cache on disk.
    #[serde(default)]
    pub cache: Option<(PathBuf, u64)>,
}

impl State {
    /// The state as bytes.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let encoded = serde_json::to_vec(&(VERSION, self));
        encoded.map_err(|error| Error::new(Kind::Internal, format!("the state of a remote store: {error}")))
    }

    /// The state of bytes.
    pub fn decode(bytes: &[u8]) -> Result<State> {
        let damaged = |_| Error::new(Kind::Format, "the state of a remote store is damaged, or from a newer version");
        let (version, state): (u32, State) = serde_json::from_slice(bytes).map_err(damaged)?;
        if version != VERSION {
            let text = format!("the state of a remote store: expected version {VERSION}, found {version}");
            return Err(Error::new(Kind::Unsupported, text));
        }
        Ok(state)
    }
}
