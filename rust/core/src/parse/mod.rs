//! Parsers of untrusted files: no input may cause a panic, a hang, an excessive allocation or code execution.

pub mod arrays;
pub mod arrow;
pub mod flatbuffer;
pub mod npy;
pub mod pickle;
pub mod safetensors;
pub mod torch;
pub mod zip;
