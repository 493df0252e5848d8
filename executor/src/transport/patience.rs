//! Waiting with a limit, and trying again with pauses. The caller says what time it is, so a
//! simulation can drive both.
//!
//! Time in which this process itself was stopped does not count: the others had no chance to be
//! heard. If the gap between two looks (calls of [`Patience::left`]) is longer than the caller ever
//! leaves, the process was stopped.

use std::time::{Duration, Instant};

/// Longest gap between two looks of a thread that looks several times a second. Generous, for a
/// machine whose processors are busy with other work.
pub(crate) const MOST_GAP: Duration = Duration::from_secs(1);

/// The first pause between two attempts. Each is twice the one before it.
const FIRST_PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// A wait with a limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    limit: Duration,
    /// Of a longer gap between two looks, only this much counts.
    most_gap: Duration,
    waited: Duration,
    last_look: Instant,
}

impl Patience {
    /// A wait that begins `now`, of a caller that calls [`Self::left`] at least every `most_gap`.
    pub(crate) fn new(limit: Duration, most_gap: Duration, now: Instant) -> Self {
        Self { limit, most_gap, waited: Duration::ZERO, last_look: now }
    }

    /// The time that is left; zero once the wait is over.
    pub(crate) fn left(&mut self, now: Instant) -> Duration {
        self.waited += now.saturating_duration_since(self.last_look).min(self.most_gap);
        self.last_look = now;
        self.limit.saturating_sub(self.waited)
    }

    /// The time waited, as of the last look.
    pub(crate) fn waited(&self) -> Duration {
        self.waited
    }
}

/// Attempts with growing pauses between them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retries {
    patience: Patience,
    pause: Duration,
}

impl Retries {
    /// Attempts from `now` on, each of which takes `most_attempt` at most.
    pub(crate) fn new(limit: Duration, most_attempt: Duration, now: Instant) -> Self {
        Self { patience: Patience::new(limit, most_attempt + MOST_GAP, now), pause: FIRST_PAUSE }
    }

    /// The time that is left for the next attempt.
    pub(crate) fn left(&mut self, now: Instant) -> Duration {
        self.patience.left(now)
    }

    /// The pause before the next attempt; `None` if there is no time for it.
    pub(crate) fn pause(&mut self, now: Instant) -> Option<Duration> {
        let pause = self.pause;
        self.pause = (pause * 2).min(LONGEST_PAUSE);
        (self.patience.left(now) > pause).then_some(pause)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let start = Instant::now();
        let mut patience = Patience::new(SECOND * 10, SECOND, start);
        assert_eq!(patience.left(start + SECOND / 2), SECOND * 19 / 2);
        // An hour without a look counts as one second.
        assert_eq!(patience.left(start + SECOND * 3600), SECOND * 17 / 2);
        let over = (1..20).find(|&second| patience.left(start + SECOND * (3600 + second)).is_zero());
        assert_eq!((over, patience.waited()), (Some(9), SECOND * 21 / 2));
    }

    #[test]
    fn pauses_grow_to_a_limit_and_end_with_the_patience() {
        let mut now = Instant::now();
        let mut retries = Retries::new(SECOND * 2, SECOND, now);
        let mut pauses = Vec::new();
        while let Some(pause) = retries.pause(now) {
            pauses.push(pause.as_millis());
            now += pause;
        }
        assert_eq!(pauses[..9], [2, 4, 8, 16, 32, 64, 128, 200, 200]);
        assert!((1800..2000).contains(&pauses.iter().sum::<u128>()), "{pauses:?}");
    }
}
