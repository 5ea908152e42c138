//! Fuzz targets: plain functions that read any bytes with a parser and panic if the parser breaks its promises.
//!
//! `cargo test --workspace --test inputs` runs each over its seeds, over the inputs that failed once, and over mutations of the seeds;
//! `make fuzz` lets libFuzzer look for inputs that nobody thought of. Both check what the parser allocates.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, reason = "a target fails by panicking")]

mod folder;
pub mod memory;
pub mod mutations;

/// The targets: each a function of its module's name, and a bound of what its parsers allocate.
macro_rules! targets {
    ($($name:ident: $measure:ident <= $per_byte:literal * input + $base:expr, $reason:literal;)*) => {
        $(mod $name;)*

        /// All targets, in alphabetical order.
        pub const TARGETS: &[Target] = &[$(Target {
            name: stringify!($name),
            run: $name::$name,
            bound: Bound { measure: |usage| usage.$measure, per_byte: $per_byte, base: $base, reason: $reason },
        }),*];
    };
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

targets! {
    address_table: total <= 64 * input + 64 * KIB, "";
    arrow_stream: total <= 64 * input + 64 * KIB, "";
    containers: total <= 1100 * input + 4 * MIB, "deflate holds up to 1032 bytes in one; the target allows 1 MiB";
    deflate: total <= 1100 * input + 8 * MIB, "deflate holds up to 1032 bytes in one; the target allows 4 MiB, twice";
    index_records: total <= 64 * input + 64 * KIB, "";
    parquet_footer: total <= 64 * input + 64 * KIB, "";
    pickle: total <= 160 * input + 64 * KIB, "an opcode of one byte makes a node of 48; the input is parsed twice";
    planes: total <= 64 * input + 4 * MIB, "a byte holds any number of equal rows; the target allows 256 KiB, and a plane is decoded first";
    safetensors_header: total <= 64 * input + 64 * KIB, "";
    token_array: peak <= 64 * input + 512 * MIB, "chunks of up to 2^24 elements of 8 bytes, one after the other";
    token_array_meta: total <= 64 * input + 64 * KIB, "";
    token_frame: total <= 64 * input + 4 * MIB, "up to 128 KiB of numbers, decoded in full and in part";
    token_index: total <= 64 * input + 64 * KIB, "";
    token_lz4: total <= 64 * input + 64 * KIB, "";
    token_offsets: total <= 64 * input + 64 * KIB, "";
    zarr_chunk: total <= 64 * input + 4 * MIB, "a bzip2 decoder of level 1 has 2 MiB";
    zarr_metadata: total <= 256 * input + 16 * MIB, "JSON values are larger than their text and parsed eight times; decoders of 40 bytes";
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
    /// What is at most so much: the bytes allocated in all, or at once where a parser decodes one chunk after the other.
    pub measure: fn(memory::Usage) -> usize,
    /// Bytes for every byte of input.
    pub per_byte: usize,
    /// Bytes for any input, also an empty one.
    pub base: usize,
    /// Why the bound is above [`Bound::ORDINARY`]; empty otherwise.
    pub reason: &'static str,
}

impl Bound {
    /// What a parser needs that keeps the values of its input in vectors and maps.
    pub const ORDINARY: Bound = Bound { measure: |usage| usage.total, per_byte: 64, base: 64 * KIB, reason: "" };

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
            (self.bound.measure)(usage) <= most,
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
