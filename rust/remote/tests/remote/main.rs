//! Tests of remote stores against a server of their own.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_types, reason = "no test forks while another of its threads has locked a lock of its own")]

mod absence;
mod buckets;
mod faults;
mod hub;
mod model;
mod processes;
mod server;
mod times;
mod values;
mod web;
