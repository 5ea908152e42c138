//! The standard library's locks and atomics, or loom's models of them: `--cfg actshard_loom` tries every order in which the
//! threads of a model can run (`scripts/sanitize.sh loom`). Modules that have models take theirs from here.

#[cfg(actshard_loom)]
pub(crate) use loom::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread,
};
#[cfg(not(actshard_loom))]
pub(crate) use std::{
    sync::{Condvar, Mutex, MutexGuard, atomic},
    thread,
};
