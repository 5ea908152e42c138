//! Parsers of untrusted files: no input may cause a panic, a hang, an excessive allocation or code execution.

// A number of a file is converted with a check; tests may not care.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_possible_wrap))]

pub mod array_chunks;
pub mod arrays;
pub mod arrow;
pub mod end;
pub mod flatbuffer;
pub mod npy;
mod order;
pub mod parquet;
pub mod pickle;
pub mod safetensors;
pub mod thrift;
pub mod torch;
pub mod zip;
