//! Finding out why a run failed.
//!
//! One rank's death makes the others fail soon after, and the launcher may hear of those first. So
//! it collects what the ranks report and how their processes end for a short time, then names the
//! most likely cause.

use super::{POLL_INTERVAL, Ranks, log_path};
use crate::error::ExecutorError;
use crate::job::{Order, Report};
use crate::transport::Event;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

/// How long ranks have, after the first sign of a failure, to report its cause and to end.
const GRACE: Duration = Duration::from_millis(700);

impl Ranks {
    /// Stops the run and returns the cause of its failure.
    ///
    /// `rank` is the rank on which the failure was noticed and `message` its own report, if it sent
    /// one; `is_consequence` says that the report blames another rank. The cause is, in this order:
    /// a rank that a signal killed, one that failed by itself, one of another launcher that left
    /// without a report, one that ended in failure, or `rank`.
    pub(super) fn diagnose(&mut self, rank: usize, message: Option<String>, is_consequence: bool) -> ExecutorError {
        let mut reports: Vec<(usize, String, bool)> = message.map(|text| (rank, text, is_consequence)).into_iter().collect();
        let started = Instant::now();
        let mut is_aborted = false;
        let mut silent = None;
        while started.elapsed() < GRACE && self.exits.iter().any(Option::is_none) {
            // Ranks that fail by themselves report first; then the waiting ones are told to give
            // up.
            if !is_aborted && started.elapsed() > GRACE / 4 {
                is_aborted = true;
                self.abort();
            }
            match self.server.next_event(POLL_INTERVAL) {
                Some((rank, Event::Message(message))) => {
                    if let Ok(Report::Failed { message, consequence }) = message.parse::<Report>() {
                        reports.push((rank, message, consequence));
                    }
                }
                Some((lost, Event::Lost(_))) if !reports.iter().any(|&(rank, ..)| rank == lost) => {
                    silent.get_or_insert(lost);
                }
                _ => {}
            }
            self.poll_children();
        }
        if let Some((rank, status)) = self.first_exit(|status| status.signal().is_some()) {
            return self.died(rank, describe_exit(status));
        }
        if let Some((rank, text, _)) = reports.into_iter().find(|(.., is_consequence)| !is_consequence) {
            return ExecutorError::RankDied { rank, host: self.host_of(rank), cause: format!("failed: {text}") };
        }
        // A rank of another launcher has no exit status here. A report that blames another rank
        // means that one, if it left without a report of its own.
        if let Some(lost) = silent.filter(|&lost| is_consequence && lost >= self.exits.len()) {
            return self.died(lost, "does not answer any more".into());
        }
        if let Some((rank, status)) = self.first_exit(|status| !status.success()) {
            return self.died(rank, describe_exit(status));
        }
        self.died(rank, "does not answer any more".into())
    }

    /// The error for a rank that ended, or stopped answering, without a report of its own.
    pub(super) fn died(&self, rank: usize, cause: String) -> ExecutorError {
        let log = match &self.logs {
            Some(folder) if rank < self.children.len() => format!("`{}`", log_path(folder, rank).display()),
            _ => format!("the output of rank {rank}"),
        };
        ExecutorError::RankDied { rank, host: self.host_of(rank), cause: format!("{cause}; hint: see {log}") }
    }

    /// The name of a rank's node; `None` if all ranks are on one node.
    fn host_of(&self, rank: usize) -> Option<String> {
        let has_several = self.hosts.iter().any(|host| Some(host) != self.hosts.first());
        self.hosts.get(rank).filter(|_| has_several).cloned()
    }

    /// Makes every wait for another rank fail.
    fn abort(&self) {
        for segment in &self.segments {
            segment.abort(None);
        }
        // Ranks that are gone cannot be told, and need not be.
        let _ = self.server.broadcast(&Order::Abort { lost: None });
    }
}

/// How a process ended, as the rest of a sentence that begins with the rank.
pub(super) fn describe_exit(status: ExitStatus) -> String {
    match (status.signal(), status.code()) {
        (Some(signal), _) => format!("was killed by signal {signal}{}", signal_name(signal)),
        (None, Some(code)) => format!("ended with status {code}"),
        (None, None) => "ended".into(),
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGKILL => " (SIGKILL; the kernel sends it when memory runs out)",
        libc::SIGTERM => " (SIGTERM)",
        libc::SIGINT => " (SIGINT)",
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGABRT => " (SIGABRT)",
        _ => "",
    }
}
