//! Ranks that leave a run, which continues without them.
//!
//! Where workers go at their own pace, none waits for another. The ranks of one worker need each
//! other, so they leave together: when one of them is lost, the others are ended. The last worker
//! never leaves. A rank that reports an error of its own does not leave, since others would meet
//! the same error.

use super::Ranks;
use super::failure::{describe_exit, is_stopped};
use crate::job::{LauncherMessage, Report};
use std::collections::BTreeSet;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How long after the first sign of a loss the launcher looks for the process that has ended.
const GRACE: Duration = Duration::from_millis(300);

/// What the launcher learns next.
#[derive(Debug)]
pub(crate) enum News {
    /// A rank's report.
    Report(usize, Report),
    /// These ranks have left, because of the first cause, which continues the words "rank 3 ...".
    Left {
        /// All ranks of the worker.
        ranks: Vec<usize>,
        /// The one that was lost.
        lost: usize,
        /// The reason.
        cause: String,
    },
}

/// Which ranks may leave, and which have.
#[derive(Debug, Default)]
pub(super) struct Departures {
    /// The ranks of each worker that may leave.
    workers: Vec<Vec<usize>>,
    left: BTreeSet<usize>,
}

impl Departures {
    pub(super) fn may_leave(&self, rank: usize) -> bool {
        self.worker_of(rank).is_some()
    }

    pub(super) fn has_left(&self, rank: usize) -> bool {
        self.left.contains(&rank)
    }

    fn worker_of(&self, rank: usize) -> Option<&Vec<usize>> {
        self.workers.iter().find(|ranks| ranks.contains(&rank))
    }

    /// The ranks that leave with `rank`; `None` if the run cannot continue without it.
    fn leaving_with(&self, rank: usize) -> Option<Vec<usize>> {
        let ranks = self.worker_of(rank)?;
        let remains = |other: &&Vec<usize>| *other != ranks && other.iter().all(|rank| !self.has_left(*rank));
        self.workers.iter().any(|other| remains(&other)).then(|| ranks.clone())
    }
}

impl Ranks {
    /// From now on the ranks of each of these workers may leave.
    pub(crate) fn let_leave(&mut self, workers: Vec<Vec<usize>>) {
        self.departures.workers = workers;
    }

    /// The news that a worker leaves, because one of its processes has ended, or because the
    /// connection to `lost`, which an external launcher started, is gone. `None` if no worker
    /// leaves; then the run ends.
    pub(super) fn leave_ended(&mut self, lost: Option<usize>) -> Option<News> {
        if self.departures.workers.is_empty() {
            return None;
        }
        if let Some(lost) = lost.filter(|&lost| lost >= self.children.len()) {
            return self.leave(lost, "does not answer any more".into());
        }
        let started = Instant::now();
        loop {
            self.poll_children();
            if let Some((rank, status)) = self.first_exit(|status: &ExitStatus| !status.success()) {
                return self.leave(rank, describe_exit(status));
            }
            if started.elapsed() > GRACE {
                return None;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The news that a worker leaves because one of its processes gives no sign of life. That
    /// process is ended, so that servers do not wait for it.
    pub(super) fn leave_silent(&mut self) -> Option<News> {
        if self.departures.workers.is_empty() {
            return None;
        }
        let silent = self.silent_ranks();
        let &rank = silent.first()?;
        if rank >= self.children.len() || !silent.iter().all(|&rank| self.departures.may_leave(rank)) {
            return None;
        }
        let state = if is_stopped(self.children[rank].id()) { "its process is stopped" } else { "its process does nothing" };
        self.leave(rank, format!("has sent no sign of life for {:?}: {state}", self.peer_timeout))
    }

    /// The ranks that have sent no sign of life for too long and have not left.
    pub(super) fn silent_ranks(&self) -> Vec<usize> {
        let mut silent = self.server.silent_ranks(self.peer_timeout);
        silent.retain(|&rank| !self.departures.has_left(rank));
        silent
    }

    /// Ends all processes of the worker that has `lost`.
    fn leave(&mut self, lost: usize, cause: String) -> Option<News> {
        let ranks = self.departures.leaving_with(lost)?;
        for &rank in &ranks {
            if let (Some(child), Some(None)) = (self.children.get_mut(rank), self.exits.get(rank)) {
                // The child may have ended since.
                let _ = child.kill();
                self.exits[rank] = child.wait().ok();
            } else if rank >= self.children.len() {
                // The worker's other ranks fail without the lost one, and exit on this message.
                let _ = self.server.send(rank, &LauncherMessage::Leave);
            }
        }
        self.departures.left.extend(&ranks);
        Some(News::Left { ranks, lost, cause })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ranks_of_a_worker_leave_together_and_the_last_worker_stays() {
        let mut departures = Departures { workers: vec![vec![0, 2], vec![1, 3]], left: BTreeSet::new() };
        assert!(departures.may_leave(3) && !departures.may_leave(4));
        assert_eq!((departures.leaving_with(3), departures.leaving_with(4)), (Some(vec![1, 3]), None));
        departures.left.extend([1, 3]);
        assert_eq!(departures.leaving_with(0), None);
    }
}
