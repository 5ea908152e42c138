//! The ledger of a token cache while the cache is open. Its content is parsed in Python.

use crate::error::{Error, Kind, Result};
use crate::location::Location;
use crate::source::{Access, Store, Version};
use crate::threads::Stop;

/// A cache's ledger at the time when it was read.
#[derive(Clone, Debug, Default)]
pub struct LedgerState {
    /// Its location, size, and time of change in ns; `None` for shards without a cache, and for stores whose sources have
    /// versions.
    pub file: Option<(Location, u64, i64)>,
    /// Whether its writer wrote every file of an array. Other writers leave out files of zeros.
    pub is_complete: bool,
}

impl LedgerState {
    /// Fails if the ledger was removed or replaced. Called after a file is opened: a cache is replaced ledger first, so a file that
    /// was opened under an unchanged ledger is of the same cache.
    #[expect(
        clippy::disallowed_methods,
        reason = "opening a near file takes a moment, and far ones are opened together"
    )]
    pub(super) fn check(&self, store: &dyn Store) -> Result<()> {
        let Some((location, size, changed)) = &self.file else { return Ok(()) };
        let detail = match store.open(location, Access::Once, Stop::never()).map(|file| file.version()) {
            Ok(Some(Version::File(_, _, now, [(seconds, ns), _])))
                if now == *size && seconds.wrapping_mul(1_000_000_000).wrapping_add(ns) == *changed =>
            {
                return Ok(());
            }
            Ok(_) => {
                "was replaced after the cache was opened, and the files that are not open yet may be of another cache"
            }
            Err(error) if error.kind == Kind::NotFound => "was removed after the cache was opened",
            Err(error) => return Err(error),
        };
        Err(Error::new(Kind::Format, format!("{detail}; open the cache again")).at(location))
    }
}
