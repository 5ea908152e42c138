//! Claims on the caller's memory: two concurrent reads into the same bytes would mix their rows silently.

use std::sync::{Arc, Weak};

use crate::threads::ForkSafe;

/// Address ranges that reads are writing to, each with its process id: a forked child inherits the list, but not the
/// threads that would release their ranges.
#[derive(Debug)]
pub struct Claims {
    // Locked only to add a range, for a few comparisons. Releasing takes no lock: a release that failed to lock the list
    // would block this memory for ever, also for later arrays at the same address.
    list: ForkSafe<Vec<Listed>>,
}

#[derive(Debug)]
struct Listed {
    pid: u32,
    from: usize,
    to: usize,
    held: Weak<()>,
}

/// An exclusive range, released on drop.
#[derive(Debug)]
pub struct Claimed {
    _held: Arc<()>,
}

impl Claims {
    /// An empty list.
    #[expect(clippy::new_without_default, reason = "made once, as a static")]
    pub const fn new() -> Claims {
        Claims { list: ForkSafe::new(vec![]) }
    }

    /// Claims `len` bytes starting at an address; `None` if they overlap a claimed range. In a child whose list was locked when
    /// it was forked, every claim succeeds.
    pub fn claim(&self, from: usize, len: usize) -> Option<Claimed> {
        let (pid, to, held) = (std::process::id(), from + len, Arc::new(()));
        let add = |list: &mut Vec<Listed>| {
            list.retain(|other| other.pid == pid && other.held.strong_count() > 0);
            let is_free = !list.iter().any(|other| other.from < to && from < other.to);
            if is_free {
                list.push(Listed { pid, from, to, held: Arc::downgrade(&held) });
            }
            is_free
        };
        let is_claimed = len == 0
            || match self.list.try_lock() {
                Some(mut list) => add(&mut list), // usually; `with` asks for the process once more, 0.2 us of a row's 2.5
                None => self.list.with(add).unwrap_or(true),
            };
        is_claimed.then_some(Claimed { _held: held })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_claimed_once_at_a_time() {
        let claims = Claims::new();
        let first = claims.claim(100, 50).unwrap();
        assert!(claims.claim(149, 1).is_none() && claims.claim(0, 101).is_none() && claims.claim(120, 5).is_none());
        let beside = [claims.claim(150, 50).unwrap(), claims.claim(50, 50).unwrap(), claims.claim(120, 0).unwrap()];
        drop(first);
        assert!(claims.claim(100, 50).is_some());
        drop(beside);
        assert!(claims.claim(0, 1000).is_some());
    }

    /// A thread that holds the list may be suspended for longer than another one tries.
    #[test]
    fn a_claim_given_up_while_the_list_cannot_be_had_is_given_up() {
        let claims = Claims::new();
        let claimed = claims.claim(100, 50).unwrap();
        let list = claims.list.try_lock().unwrap();
        drop(claimed);
        drop(list);
        assert!(claims.claim(100, 50).is_some());
        // Released ranges are also removed.
        for k in 0..100 {
            drop(claims.claim(k * 10, 10).unwrap());
        }
        assert!(claims.list.try_lock().unwrap().len() <= 1);
    }
}
