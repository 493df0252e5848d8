//! Which ranks have sent no sign of life for too long. The caller says what time it is, so a
//! simulation can drive it.

use super::HEARTBEAT;
use std::time::{Duration, Instant};

/// When the ranks were last heard.
#[derive(Debug)]
pub(crate) struct LifeWatch {
    /// By rank; `None` before a rank has joined and after it has left.
    heard: Vec<Option<Instant>>,
    last_look: Instant,
}

impl LifeWatch {
    pub(crate) fn new(ranks: usize, now: Instant) -> Self {
        Self { heard: vec![None; ranks], last_look: now }
    }

    /// Notes that bytes of `rank` have arrived.
    pub(crate) fn hear(&mut self, rank: usize, now: Instant) {
        if let Some(heard) = self.heard.get_mut(rank) {
            *heard = Some(now);
        }
    }

    /// Expects nothing more of `rank`: it has left.
    pub(crate) fn forget(&mut self, rank: usize) {
        if let Some(heard) = self.heard.get_mut(rank) {
            *heard = None;
        }
    }

    /// The ranks from which nothing has arrived for longer than `limit`. If the last call was more
    /// than [`HEARTBEAT`] ago, this process was stopped or had no processor itself, and that time
    /// does not count.
    pub(crate) fn silent(&mut self, limit: Duration, now: Instant) -> Vec<usize> {
        let since = now.saturating_duration_since(std::mem::replace(&mut self.last_look, now));
        let away = if since > HEARTBEAT { since } else { Duration::ZERO };
        for heard in self.heard.iter_mut().flatten() {
            *heard = (*heard + away).min(now);
        }
        let is_silent = |heard: &Option<Instant>| heard.is_some_and(|heard| now.saturating_duration_since(heard) > limit);
        self.heard.iter().enumerate().filter(|(_, heard)| is_silent(heard)).map(|(rank, _)| rank).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    #[test]
    fn a_rank_is_silent_after_the_limit_only_while_it_is_a_member() {
        let start = Instant::now();
        let mut life = LifeWatch::new(3, start);
        life.hear(0, start);
        life.hear(2, start);
        life.forget(2);
        let mut found = Vec::new();
        for second in 1..=20 {
            let now = start + Duration::from_secs(second);
            found.extend(life.silent(LIMIT, now).into_iter().map(|rank| (rank, second)));
            if second == 12 {
                life.hear(0, now);
            }
        }
        assert_eq!(found, [(0, 11), (0, 12)]);
    }

    #[test]
    fn a_launcher_that_was_stopped_blames_nobody_for_that_time() {
        let start = Instant::now();
        let mut life = LifeWatch::new(1, start);
        life.hear(0, start);
        assert!(life.silent(LIMIT, start + Duration::from_secs(1)).is_empty());
        let back = start + Duration::from_secs(3600);
        assert!(life.silent(LIMIT, back).is_empty());
        let after = |second: u64| back + Duration::from_secs(second);
        let first = (1..30).find(|&second| !life.silent(LIMIT, after(second)).is_empty());
        // One second had passed before it was stopped.
        assert_eq!(first, Some(10));
    }
}
