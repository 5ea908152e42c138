//! The standard library's locks and atomics, or loom's models of them: `--cfg actshard_loom` tries every interleaving of a
//! model's threads (`scripts/sanitize.sh loom`). Modules with models import theirs from here.

#[cfg(actshard_loom)]
pub(crate) use loom::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic},
    thread,
};
#[cfg(not(actshard_loom))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic},
    thread,
};
