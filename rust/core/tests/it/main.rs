//! The core's integration tests: one program, because each takes long to link.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_types, reason = "no test forks while another of its threads has locked a lock of its own")]

mod allocations;
mod apart;
mod array_meta;
mod chunked;
mod contexts;
mod decodes;
#[cfg(target_os = "linux")]
mod disk_cache;
mod far;
mod floors;
mod gather;
mod kernels;
mod layouts;
mod names;
mod planes;
mod several;
mod sources;
mod threads;
mod token_arrays;
