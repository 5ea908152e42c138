//! What a store has learned about its server: latency, rate, and how long to leave it alone.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::runtime::ForkLock;

/// Answers that the median latency comes from.
const RECENT: usize = 64;
/// The shortest body that the rate is measured with.
const LONG: u64 = 512 << 10;
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
    /// Bytes per second of all connections together, from long bodies.
    rate: f64,
}

/// Measurements and counts of a store.
#[derive(Debug)]
pub struct Pace {
    measured: ForkLock<Measured>,
    /// No request before this time, in ms since `origin`.
    not_before: AtomicU64,
    origin: Instant,
    /// Long bodies that arrive now.
    flying: AtomicUsize,
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
        let measured = Measured { latencies: vec![], next: 0, rate: 0.0 };
        let zero = || AtomicU64::new(0);
        Pace {
            measured: ForkLock::new(measured),
            not_before: zero(),
            origin: now,
            flying: AtomicUsize::new(0),
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

    /// Whether a slow request may be sent again: at most one in ten are, so that a server that is slow for all gets no
    /// double load.
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
    }

    /// Counts a long body while it arrives. Short ones say nothing about the link: they end before it is busy.
    pub fn fly(&self, bytes: u64) -> Option<LongBody<'_>> {
        (bytes >= LONG).then(|| {
            let at_once = self.flying.fetch_add(1, Ordering::Relaxed) + 1;
            LongBody { pace: self, bytes, at_once, started: Instant::now() }
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

    /// No request before this time has passed.
    pub(super) fn hold(&self, time: Duration) {
        let until = (self.origin.elapsed() + time).as_millis().min(u128::from(u64::MAX)) as u64;
        self.not_before.fetch_max(until, Ordering::Relaxed);
    }

    /// The time until the server wants requests again.
    pub(super) fn held(&self) -> Duration {
        let now = self.origin.elapsed().as_millis() as u64;
        Duration::from_millis(self.not_before.load(Ordering::Relaxed).saturating_sub(now))
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
    bytes: u64,
    at_once: usize,
    started: Instant,
}

impl LongBody<'_> {
    /// Measures the link: all of it arrived.
    pub fn landed(self) {
        let time = self.started.elapsed().as_secs_f64().max(1e-6);
        // As many connections as flew at both ends: those that ended in between had a larger share.
        let at_once = self.pace.flying.load(Ordering::Relaxed).min(self.at_once);
        let rate = self.bytes as f64 / time * at_once as f64;
        self.pace.measured.with(|m| m.rate = rate.max(m.rate * 0.95));
    }
}

impl Drop for LongBody<'_> {
    fn drop(&mut self) {
        self.pace.flying.fetch_sub(1, Ordering::Relaxed);
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
    fn few_requests_are_sent_twice() {
        let pace = Pace::default();
        assert_eq!((0..100).filter(|_| pace.may_hedge()).count(), 3);
    }
}
