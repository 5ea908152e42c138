//! Pickle shards: files that say only inside which rows they hold.
//!
//! A shard is looked into once, when something of it is first wanted: compared with its checksum, inflated if it is
//! compressed, and indexed by one pass of the pickle machine, which finds where each array's bytes lie. After that its rows
//! are rows like any other: of a mapped file (plain `.pkl`), or of decoded memory (`.pkl.gz`), which is kept under a budget
//! and made again after it was evicted. Arrays in Fortran order, in the other byte order, or written as text by old protocols are
//! copied into memory of their own, put in order ([`index`]).
//!
//! A file may be replaced while its dataset is open. Whenever a compressed shard is inflated again, its checksum and index are
//! compared again; a plain one is, when it is opened and its inode, size or times are not those that were indexed.
//!
//! Threads that want one shard wait for the first of them to read it ([`crate::codec::flight`]).

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
