//! Many reads of several sources by one thread. Cached ranges are read at once; others are hinted, and read after enough further
//! hints, so that a cold disk has a full queue.

use std::collections::VecDeque;

use super::{ByteRange, Ready, Source};
use crate::error::Result;
use crate::threads::Stop;

/// Ranges hinted ahead of reads.
pub const AHEAD: usize = 1024;
/// Bytes hinted ahead of reads.
pub const AHEAD_BYTES: usize = 16 << 20;

/// A range of one of several sources.
pub trait Ranged {
    /// Index of its source.
    fn source(&self) -> usize;
    /// The range.
    fn range(&self) -> ByteRange;
}

/// Calls `read` for each range, first without waiting; if the range is not ready, again later with waiting allowed.
pub fn read_all<T: Ranged>(
    sources: &[Option<&dyn Source>],
    ranges: &[T],
    stop: &Stop,
    mut read: impl FnMut(&T, bool) -> Result<Ready>,
) -> Result<()> {
    let mut coming: VecDeque<&T> = VecDeque::new();
    let mut coming_bytes = 0;
    let mut can_ask = true;
    for each in ranges {
        if stop.is_set() {
            return Ok(());
        }
        if can_ask {
            match read(each, false)? {
                Ready::Yes => continue,
                Ready::No => {}
                Ready::Unknown => can_ask = false,
            }
        }
        if let Some(source) = sources[each.source()] {
            source.will_need(&[each.range()]);
        }
        coming.push_back(each);
        coming_bytes += each.range().len as usize;
        while coming.len() >= AHEAD || coming_bytes >= AHEAD_BYTES {
            let Some(oldest) = coming.pop_front() else { break };
            coming_bytes -= oldest.range().len as usize;
            read(oldest, true)?;
        }
    }
    for each in coming {
        if stop.is_set() {
            return Ok(());
        }
        read(each, true)?;
    }
    Ok(())
}
