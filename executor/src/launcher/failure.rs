//! Finding out why a run failed.
//!
//! One rank's death makes the others fail soon after, and the launcher may hear of those first. So
//! it collects what the ranks report and how their processes end for a short time, then names the
//! most likely cause.

use super::links::{Link, Missing};
use super::{POLL_INTERVAL, Ranks, log_path};
use crate::error::ExecutorError;
use crate::job::{LauncherMessage, Report};
use crate::transport::{Event, Starved};
use foretell_units::diagnostic::Mistake;
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
    pub(super) fn diagnose(&mut self, rank: usize, mistake: Option<Mistake>, is_consequence: bool) -> ExecutorError {
        let mut reports: Vec<(usize, Mistake, bool)> =
            mistake.map(|mistake| (rank, mistake, is_consequence)).into_iter().collect();
        let started = Instant::now();
        let mut is_aborted = false;
        let mut silent = None;
        // The last reports of ranks that have ended may still be on their way here.
        let is_over = |ranks: &Self| ranks.exits.iter().all(Option::is_some) && ranks.server.have_all_left();
        let mut was_over = false;
        while started.elapsed() < GRACE && !was_over {
            was_over = is_over(self);
            // Ranks that fail by themselves report first; then the waiting ones are told to give
            // up.
            if !is_aborted && started.elapsed() > GRACE / 4 {
                is_aborted = true;
                self.abort();
            }
            match self.server.next_event(if was_over { Duration::ZERO } else { POLL_INTERVAL }) {
                Some((rank, Event::Message(message))) => {
                    was_over = false;
                    if let Ok(Report::Failed { message, hint, consequence }) = message.parse::<Report>() {
                        reports.push((rank, Mistake { message, hint }, consequence));
                    }
                }
                Some((lost, Event::Lost(_))) if !reports.iter().any(|&(rank, ..)| rank == lost) => {
                    was_over = false;
                    silent.get_or_insert(lost);
                }
                Some(_) => was_over = false,
                None => {}
            }
            self.poll_children();
        }
        if let Some((rank, status)) = self.first_exit(|status| status.signal().is_some()) {
            return self.died(rank, describe_exit(status));
        }
        if let Some((rank, Mistake { message, hint }, _)) = reports.into_iter().find(|(.., is_consequence)| !is_consequence) {
            return ExecutorError::RankFailed { rank, host: self.host_of(rank), message, hint };
        }
        // A rank of another launcher has no exit status here. A report that blames another rank
        // means such a rank, if it left without a report of its own.
        if let Some(lost) = silent.filter(|&lost| is_consequence && lost >= self.exits.len()) {
            return self.died(lost, "does not answer any more".into());
        }
        if let Some((rank, status)) = self.first_exit(|status| !status.success()) {
            return self.died(rank, describe_exit(status));
        }
        self.died(rank, "does not answer any more".into())
    }

    /// Ends the run if ranks have sent no sign of life for too long. The error names them.
    pub(super) fn require_signs_of_life(&self) -> Result<(), ExecutorError> {
        let silent = self.silent_ranks();
        let Some((&rank, others)) = silent.split_first() else { return Ok(()) };
        self.abort();
        let state = match self.children.get(rank).is_some_and(|child| is_stopped(child.id())) {
            true => "its process is stopped",
            false => "its process is stopped or its host cannot be reached",
        };
        let others = match others {
            [] => String::new(),
            [other] => format!(", and so has rank {other}"),
            [first, .., last] => format!(", and so have {} others from rank {first} to rank {last}", others.len()),
        };
        let waited = self.peer_timeout;
        let cause = format!("has sent no sign of life for {waited:?}: {state}{others}");
        let hint = "`--peer-timeout` allows longer".into();
        Err(ExecutorError::RankDied { rank, host: self.host_of(rank), cause, hint })
    }

    /// Ends the run if a rank has waited too long for bytes that its peer has sent, or for a
    /// connection to it. Both run: otherwise their signs of life would be missing. The error names
    /// both.
    pub(super) fn require_links(&mut self, rank: usize, starved: &[Starved]) -> Result<(), ExecutorError> {
        for starved in starved {
            let link = Link { from: starved.peer, to: rank, stream: starved.stream };
            match self.links.note_starved(&link, starved.received, Instant::now()) {
                Missing::Unknown => {
                    // A rank that is gone is found by its lost connection.
                    let _ = self.server.send(link.from, &LauncherMessage::CountSent { to: link.to, stream: link.stream });
                }
                Missing::For(time) if time >= self.peer_timeout => {
                    self.abort();
                    let (host, peer_host) = (self.host_of(rank), self.host_of(link.from));
                    let (peer, stream, waited) = (link.from, link.stream, self.peer_timeout);
                    let is_connected = starved.received.is_some();
                    return Err(ExecutorError::LinkLost { rank, host, peer, peer_host, stream, waited, is_connected });
                }
                Missing::For(_) => {}
            }
        }
        Ok(())
    }

    /// The error for a rank that ended, or stopped answering, without a report of its own.
    pub(super) fn died(&self, rank: usize, cause: String) -> ExecutorError {
        let log = match &self.logs {
            Some(folder) if rank < self.children.len() => format!("`{}`", log_path(folder, rank).display()),
            _ => format!("the output of rank {rank}"),
        };
        ExecutorError::RankDied { rank, host: self.host_of(rank), cause, hint: format!("see {log}") }
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
        let _ = self.server.broadcast(&LauncherMessage::Abort { lost: None });
    }
}

/// Whether a signal has stopped a process.
pub(super) fn is_stopped(process: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name, in brackets, may hold anything; the state follows it.
    status.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with(['T', 't']))
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
