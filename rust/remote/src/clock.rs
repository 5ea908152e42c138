//! The time that a process waits, without the time for which it was stopped or its machine was suspended.

use std::pin::pin;
use std::time::{Duration, Instant};

use tokio::time::timeout;

/// The longest sleep. Time beyond two sleeps before a task continues does not count as waiting for a server.
const TICK: Duration = Duration::from_secs(1);

/// Counts the time that a task waits.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    waited: Duration,
    woke: Instant,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock { waited: Duration::ZERO, woke: Instant::now() }
    }
}

impl Clock {
    /// The time that was waited.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Waits for a future, and counts the time.
    pub async fn watch<F: Future>(&mut self, future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            let answer = timeout(TICK, &mut future).await;
            self.wake(Instant::now());
            if let Ok(answer) = answer {
                return answer;
            }
        }
    }

    fn wake(&mut self, now: Instant) {
        self.waited += now.saturating_duration_since(self.woke).min(TICK * 2);
        self.woke = now;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_is_no_wait() {
        let mut clock = Clock::default();
        let begun = clock.woke;
        let at = |ms: u64| begun + Duration::from_millis(ms);
        for ms in [1000, 1300, 101_300, 102_300] {
            clock.wake(at(ms));
        }
        assert_eq!(clock.waited(), Duration::from_millis(1300 + 2000 + 1000));
    }

    #[test]
    fn waits_are_counted() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        let mut clock = Clock::default();
        runtime.block_on(async { clock.watch(tokio::time::sleep(Duration::from_millis(2500))).await });
        assert!((2500..6000).contains(&clock.waited().as_millis()), "{clock:?}");
    }
}
