//! Stores behind a network: S3, Google Cloud Storage, Azure, web servers, and datasets of the Hugging Face hub.
//!
//! A [`store::RemoteStore`] implements the core's `Store`, and its objects implement `Source`. Local files never pass
//! through here. The modules form levels; each uses only those before it:
//!
//! 1. [`runtime`]: threads for requests, one set per process. [`checks`]: values that cannot be used. [`address`]: URLs.
//!    [`options`]: `storage_options`.
//! 2. [`failure`]: errors of requests, with advice. [`credentials`]: those that object_store does not find.
//! 3. [`client`]: the protocols. One place sends requests, with retries ([`client::wire`]); one place checks answers
//!    ([`client::checked`]).
//! 4. [`upload`]: files to objects. [`known`]: the known facts about names, without requests. [`state`]: the content of
//!    pickled stores. [`offline`]: listings for opening without a network. [`reading`]: ranges into memory. [`object`]:
//!    the `Source`. [`store`]: the `Store`.
//!
//! Secrets are in types whose `Debug` hides them, and messages contain no URL but the canonical one of [`address`].

pub mod address;
pub mod checks;
pub mod client;
pub mod clock;
pub mod credentials;
pub mod failure;
pub mod known;
pub mod object;
pub mod offline;
pub mod options;
pub mod reading;
pub mod runtime;
pub mod state;
pub mod store;
pub mod upload;

pub use options::Options;
pub use store::RemoteStore;
