//! Measurements of a store's server: latency, rate, and the time to wait before further requests.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::failure::Failure;
use actshard_core::threads::ForkSafe;

/// Answers that the median latency comes from.
const RECENT: usize = 64;
/// The shortest body that fills its connection for a while.
const LONG: u64 = 512 << 10;
/// This many long bodies together fill the link.
const FILLING: usize = 4;
/// Time over which bytes are counted.
const WINDOW: Duration = Duration::from_millis(200);
/// Assumed before anything was measured.
const LATENCY: Duration = Duration::from_millis(30);
const RATE: f64 = 150e6;

/// Counts of a store's requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests sent, repetitions included.
    pub requests: u64,
    /// Bytes of bodies received.
    pub bytes: u64,
    /// Requests sent again after a failure.
    pub retries: u64,
    /// Requests sent again because the first one was slow.
    pub hedges: u64,
    /// Listings among the requests.
    pub listings: u64,
}

#[derive(Debug)]
struct Measured {
    latencies: Vec<Duration>,
    next: usize,
    /// Bytes per second of all connections together.
    rate: f64,
    /// Beginning of the window in which bytes are counted, and their number before.
    since: Instant,
    before: u64,
}

/// Measurements and counts of a store.
#[derive(Debug)]
pub struct Pace {
    measured: ForkSafe<Measured>,
    origin: Instant,
    /// Hosts that accept no request before a time, with the answers that stated it.
    held: ForkSafe<HashMap<String, (Instant, Failure)>>,
    /// Long bodies that arrive now, and their minimum number in this window.
    flying: AtomicUsize,
    least_flying: AtomicUsize,
    /// End of the window, in ms since `origin`.
    window_end: AtomicU64,
    requests: AtomicU64,
    bytes: AtomicU64,
    retries: AtomicU64,
    hedges: AtomicU64,
    listings: AtomicU64,
    /// Varies the waits of threads and processes.
    jitter: AtomicU64,
}

impl Default for Pace {
    fn default() -> Pace {
        let now = Instant::now();
        let measured = Measured { latencies: vec![], next: 0, rate: 0.0, since: now, before: 0 };
        let zero = || AtomicU64::new(0);
        Pace {
            measured: ForkSafe::new(measured),
            origin: now,
            held: ForkSafe::default(),
            flying: AtomicUsize::new(0),
            least_flying: AtomicUsize::new(0),
            window_end: zero(),
            requests: zero(),
            bytes: zero(),
            retries: zero(),
            hedges: zero(),
            listings: zero(),
            jitter: AtomicU64::new(u64::from(std::process::id())),
        }
    }
}

impl Pace {
    /// The counts so far.
    pub fn counts(&self) -> Counts {
        let get = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counts {
            requests: get(&self.requests),
            bytes: get(&self.bytes),
            retries: get(&self.retries),
            hedges: get(&self.hedges),
            listings: get(&self.listings),
        }
    }

    pub(super) fn count_request(&self) {
        self.requests.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_retry(&self) {
        self.retries.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_listing(&self) {
        self.listings.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether a slow request may be sent again: at most one in ten are, so that the load of a slow server is not
    /// doubled.
    pub fn may_hedge(&self) -> bool {
        let (hedges, requests) = (self.hedges.load(Ordering::Relaxed), self.requests.load(Ordering::Relaxed));
        let may = hedges * 10 <= requests + 20;
        if may {
            self.hedges.fetch_add(1, Ordering::Relaxed);
        }
        may
    }

    /// Records the time to the first byte of an answer.
    pub(super) fn answered(&self, after: Duration) {
        self.measured.with(|m| {
            if m.latencies.len() < RECENT {
                m.latencies.push(after);
            } else {
                m.latencies[m.next] = after;
            }
            m.next = (m.next + 1) % RECENT;
        });
    }

    /// Counts bytes of a body.
    pub fn received(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let now = self.origin.elapsed().as_millis() as u64;
        let end = self.window_end.load(Ordering::Relaxed);
        let next = now + WINDOW.as_millis() as u64;
        if now < end || self.window_end.compare_exchange(end, next, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return;
        }
        self.measured.with(|m| self.measure(m));
    }

    /// Ends a window. The link carries at least the bytes of any window, and no more than those of one that was full of
    /// long bodies.
    fn measure(&self, m: &mut Measured) {
        let (now, bytes) = (Instant::now(), self.bytes.load(Ordering::Relaxed));
        let rate = bytes.saturating_sub(m.before) as f64 / now.duration_since(m.since).as_secs_f64().max(1e-3);
        let was_full = self.least_flying.swap(self.flying.load(Ordering::Relaxed), Ordering::Relaxed) >= FILLING;
        (m.since, m.before) = (now, bytes);
        let known = if m.rate > 0.0 { m.rate } else { RATE };
        if was_full {
            m.rate = if m.rate > 0.0 { rate.max(m.rate * 0.9) } else { rate };
        } else if rate > known {
            m.rate = rate;
        }
    }

    /// Counts a long body while it arrives. Short ones do not measure the link: they end before it is busy.
    pub fn fly(&self, bytes: u64) -> Option<LongBody<'_>> {
        (bytes >= LONG).then(|| {
            self.flying.fetch_add(1, Ordering::Relaxed);
            LongBody { pace: self }
        })
    }

    /// The median time to the first byte.
    pub fn latency(&self) -> Duration {
        let median = self.measured.with(|m| {
            let mut sorted = m.latencies.clone();
            sorted.sort_unstable();
            sorted.get(sorted.len() / 2).copied()
        });
        median.flatten().unwrap_or(LATENCY)
    }

    /// The shortest recent time to the first byte: others waited for a busy link.
    pub fn idle_latency(&self) -> Duration {
        self.measured.with(|m| m.latencies.iter().min().copied()).flatten().unwrap_or(LATENCY)
    }

    /// Bytes per second of the link.
    pub fn rate(&self) -> f64 {
        self.measured.with(|m| m.rate).filter(|rate| *rate > 0.0).unwrap_or(RATE)
    }

    /// After this time without a byte a request is sent again.
    pub fn patience(&self) -> Duration {
        (self.latency() * 3).max(Duration::from_millis(200))
    }

    /// No request to a host before this time has passed.
    pub(super) fn hold(&self, host: &str, time: Duration, why: &Failure) {
        let Some(until) = Instant::now().checked_add(time) else { return };
        self.held.with(|held| {
            if held.get(host).is_none_or(|(known, _)| *known < until) {
                held.insert(host.to_string(), (until, why.clone()));
            }
        });
    }

    /// The time until a host accepts requests again, and its last answer; `None` if it accepts them now.
    pub(super) fn held(&self, host: &str) -> Option<(Duration, Failure)> {
        self.held.with(|held| {
            let (until, why) = held.get(host)?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                held.remove(host);
                return None;
            }
            Some((left, why.clone()))
        })?
    }

    /// The wait before the attempt after the `tried`-th: doubled each time, half of it random.
    pub fn backoff(&self, tried: u32) -> Duration {
        let most = Duration::from_millis(100 << tried.min(6)).as_millis() as u64;
        let seed = self.jitter.fetch_add(0x9E37_79B9_7F4A_7C15, Ordering::Relaxed);
        let random = (seed ^ (seed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 33;
        Duration::from_millis(most / 2 + random % (most / 2 + 1))
    }
}

/// A long body that arrives.
#[derive(Debug)]
pub struct LongBody<'a> {
    pace: &'a Pace,
}

impl Drop for LongBody<'_> {
    fn drop(&mut self) {
        let left = self.pace.flying.fetch_sub(1, Ordering::Relaxed) - 1;
        self.pace.least_flying.fetch_min(left, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_and_differ() {
        let pace = Pace::default();
        let waits: Vec<Duration> = (0..20).map(|i| pace.backoff(i)).collect();
        assert!(waits.iter().all(|wait| (50..=6400).contains(&(wait.as_millis() as u64))), "{waits:?}");
        assert_ne!(pace.backoff(6), pace.backoff(6));
    }

    #[test]
    fn the_median_is_that_of_recent_answers() {
        let pace = Pace::default();
        assert_eq!(pace.latency(), LATENCY);
        for i in 0..RECENT * 3 {
            pace.answered(Duration::from_millis(if i < RECENT { 1 } else { 50 }));
        }
        assert_eq!(pace.latency(), Duration::from_millis(50));
        assert_eq!(pace.patience(), Duration::from_millis(200));
    }

    #[test]
    fn the_link_is_what_long_bodies_fill() {
        let pace = Pace::default();
        let window = |bytes: u64, rate: f64| {
            pace.bytes.fetch_add(bytes, Ordering::Relaxed);
            pace.measured.with(|m| {
                m.since = Instant::now() - Duration::from_secs(1);
                pace.measure(m);
                assert!((m.rate - rate).abs() <= rate * 0.05, "{} {rate}", m.rate);
            });
        };
        window(20 << 20, 0.0); // an idle link is not measured
        assert_eq!(pace.rate(), RATE);
        window(400_000_000, 400e6);
        let bodies: Vec<_> = (0..FILLING).map(|_| pace.fly(LONG)).collect();
        window(100_000_000, 400e6); // not full from its beginning
        window(100_000_000, 360e6);
        window(350_000_000, 350e6);
        drop(bodies);
        window(1_000_000, 350e6);
        window(1_000_000, 350e6);
        assert!(pace.fly(LONG - 1).is_none());
    }

    #[test]
    fn few_requests_are_sent_twice() {
        let pace = Pace::default();
        assert_eq!((0..100).filter(|_| pace.may_hedge()).count(), 3);
    }
}
