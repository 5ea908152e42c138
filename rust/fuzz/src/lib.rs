//! Fuzz targets: plain functions that read any bytes with a parser and panic if the parser breaks its promises.
//!
//! `cargo test -p actshard-fuzz` runs each over its seeds, over the inputs that failed once, and over mutations of the seeds;
//! `make fuzz` lets libFuzzer look for inputs that nobody thought of. Both check what the parser allocates.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "a target fails by panicking")]

mod folder;
pub mod memory;
pub mod mutations;

/// The targets: each a function of its module's name, and a bound of what its parsers allocate.
macro_rules! targets {
    ($($name:ident: $per_byte:literal * input + $base:expr, $reason:literal;)*) => {
        $(mod $name;)*

        /// All targets, in alphabetical order.
        pub const TARGETS: &[Target] = &[$(Target {
            name: stringify!($name),
            run: $name::$name,
            bound: Bound { per_byte: $per_byte, base: $base, reason: $reason },
        }),*];
    };
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

targets! {
    address_table: 64 * input + 64 * KIB, "";
    arrow_stream: 64 * input + 64 * KIB, "";
    containers: 64 * input + 64 * KIB, "";
    deflate: 64 * input + 64 * KIB, "";
    index_records: 64 * input + 64 * KIB, "";
    pickle: 64 * input + 64 * KIB, "";
    safetensors_header: 64 * input + 64 * KIB, "";
    token_array: 64 * input + 64 * KIB, "";
    token_array_meta: 64 * input + 64 * KIB, "";
    token_frame: 64 * input + 64 * KIB, "";
    token_index: 64 * input + 64 * KIB, "";
    token_lz4: 64 * input + 64 * KIB, "";
    token_offsets: 64 * input + 64 * KIB, "";
    zarr_chunk: 64 * input + 64 * KIB, "";
    zarr_metadata: 64 * input + MIB, "";
}

/// A function that reads any bytes, and panics if a parser breaks a promise.
#[derive(Debug, Clone, Copy)]
pub struct Target {
    /// The name of the function, of its module, and of its folders of seeds and of inputs that failed.
    pub name: &'static str,
    /// The function.
    pub run: fn(&[u8]),
    /// What its parsers may allocate.
    pub bound: Bound,
}

/// At most `per_byte * input + base` bytes.
#[derive(Debug, Clone, Copy)]
pub struct Bound {
    /// Bytes for every byte of input.
    pub per_byte: usize,
    /// Bytes for any input, also an empty one.
    pub base: usize,
    /// Why the bound is above [`Bound::ORDINARY`]; empty otherwise.
    pub reason: &'static str,
}

impl Bound {
    /// What a parser needs that keeps the values of its input in vectors and maps.
    pub const ORDINARY: Bound = Bound { per_byte: 64, base: 64 * KIB, reason: "" };

    /// The most bytes for an input of `input` bytes.
    pub fn most(&self, input: usize) -> usize {
        self.per_byte * input + self.base
    }
}

impl Target {
    /// The target of this name.
    pub fn named(name: &str) -> Option<&'static Target> {
        TARGETS.iter().find(|target| target.name == name)
    }

    /// Runs the target on an input, and panics if a parser breaks a promise or allocates more than the bound.
    pub fn check(&self, input: &[u8]) {
        let usage = self.usage(input);
        let most = self.bound.most(input.len());
        assert!(
            usage.total <= most,
            "{usage:?} bytes allocated for {} bytes of input, at most {most} expected",
            input.len()
        );
    }

    /// Runs the target on an input, and returns what its parsers allocated. The process does nothing else meanwhile: its
    /// allocations would count too.
    pub fn usage(&self, input: &[u8]) -> memory::Usage {
        memory::usage(|| (self.run)(input))
    }
}
