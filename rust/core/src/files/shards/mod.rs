//! Pickle shards: files whose rows are only known after parsing them.
//!
//! A shard is indexed on first use: its checksum is verified, it is inflated if compressed, and one pass of the pickle machine
//! finds each array's bytes. After that its rows are read like others: from a mapped file (plain `.pkl`), or from decoded memory
//! (`.pkl.gz`), which is cached within a budget and decoded again after eviction. Arrays that are in Fortran order,
//! byte-swapped, or written as text by old protocols are copied and put in order (`index`).
//!
//! A file may be replaced while its dataset is open. Inflating a compressed shard again verifies its checksum and index again; a
//! plain shard is verified again when it is opened and its inode, size or times have changed since it was indexed.
//!
//! Threads that need the same shard wait for the first of them to read it ([`crate::codec::flight`]).

mod ahead;
mod index;
mod load;
mod prepared;
mod spec;
mod stored;

pub use index::{ShardIndex, TYPES};
pub use load::{Shards, Values};
pub use prepared::Prepared;
pub use spec::ShardSpec;
pub use stored::read_file;
