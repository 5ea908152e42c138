//! Threads: a pool for computation ([`run`]), separate threads for blocking work ([`run_waiting`]), and one way of handing
//! out parts to both (`handout`). [`map`] and [`for_each`] hand out parts that own an item, usually a chunk of an output.
//! [`shared`] bounds the memory of all threads together. [`Lock`] is for the threads of one call, [`ForkSafe`] for what a forked
//! child uses.

mod fork;
mod handout;
mod parts;
mod pipeline;
mod pool;
#[cfg(target_os = "linux")]
mod seat;
pub mod shared;
pub(crate) mod sync;
mod waiting;

pub(crate) use fork::SharedLock;
pub use fork::{ForkSafe, Renewed};
pub use handout::{Context, LOOK, Stop, Watch, interrupted};
pub use parts::{for_each, for_each_waiting, map, map_each, map_each_waiting, wait_for};
pub use pipeline::{NextResult, Turns, make_ahead, make_weighed_ahead};
pub use pool::{are_free, in_part, num_threads, run};
pub use sync::{Lock, LockGuard, Signal};
pub use waiting::{is_abandoned, run_waiting};
