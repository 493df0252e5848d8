//! Finding links that are lost although both of their ranks reach the launcher.

use crate::transport::StreamNumber;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The longest gap between two reports of one wait. A waiting rank reports every second, so a
/// longer gap means that bytes arrived or that the whole run was stopped.
const LONGEST_REPORT_GAP: Duration = Duration::from_secs(3);

/// One direction of a connection between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Link {
    /// The sender.
    pub(crate) from: usize,
    /// The receiver.
    pub(crate) to: usize,
    pub(crate) stream: StreamNumber,
}

/// What is known about the bytes for which a rank waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    /// Perhaps its peer has not sent them yet.
    Unknown,
    /// The bytes have been in transit for at least this long.
    For(Duration),
}

/// The links on which ranks wait for bytes.
#[derive(Debug, Default)]
pub(crate) struct LinkWatch {
    waits: BTreeMap<Link, Wait>,
}

#[derive(Clone, Copy, Debug)]
struct Wait {
    /// The bytes that the receiver has; `None` while the connection is being made.
    received: Option<u64>,
    /// When the receiver last said so.
    reported: Instant,
    /// When the launcher first knew that bytes, or the connection itself, were overdue.
    missing_since: Option<Instant>,
}

impl LinkWatch {
    /// Notes that the receiver of `link` still has only these bytes, and waits for more.
    pub(crate) fn note_starved(&mut self, link: &Link, received: Option<u64>, now: Instant) -> Missing {
        // The peer accepts connections at any time, so one that does not come about is missing.
        let new = Wait { received, reported: now, missing_since: received.is_none().then_some(now) };
        let wait = self.waits.entry(*link).or_insert(new);
        if wait.received != received || now.duration_since(wait.reported) > LONGEST_REPORT_GAP {
            *wait = new;
        }
        wait.reported = now;
        wait.missing_since.map_or(Missing::Unknown, |since| Missing::For(now.duration_since(since)))
    }

    /// Notes how many bytes the sender of `link` has sent.
    pub(crate) fn note_sent(&mut self, link: &Link, sent: u64, now: Instant) {
        if let Some(wait) = self.waits.get_mut(link)
            && wait.received.is_some_and(|received| received < sent)
        {
            wait.missing_since.get_or_insert(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINK: Link = Link { from: 0, to: 1, stream: StreamNumber(2) };

    /// A watch, and a function from seconds to instants after the start.
    fn watch() -> (LinkWatch, impl Fn(u64) -> Instant) {
        let start = Instant::now();
        (LinkWatch::default(), move |second| start + Duration::from_secs(second))
    }

    #[test]
    fn bytes_that_were_sent_and_do_not_arrive_are_missing_since_then() {
        let (mut links, at) = watch();
        assert_eq!(links.note_starved(&LINK, Some(100), at(0)), Missing::Unknown);
        links.note_sent(&LINK, 101, at(1));
        links.note_sent(&LINK, 150, at(2));
        assert_eq!(links.note_starved(&LINK, Some(100), at(3)), Missing::For(Duration::from_secs(2)));
        assert_eq!(links.note_starved(&LINK, Some(100), at(5)), Missing::For(Duration::from_secs(4)));
        let back = Link { from: 1, to: 0, ..LINK };
        assert_eq!(links.note_starved(&back, Some(100), at(5)), Missing::Unknown);
    }

    #[test]
    fn a_peer_that_has_sent_nothing_more_may_take_its_time() {
        let (mut links, at) = watch();
        for second in 0..1000 {
            assert_eq!(links.note_starved(&LINK, Some(100), at(second)), Missing::Unknown);
            links.note_sent(&LINK, 100, at(second));
        }
    }

    #[test]
    fn every_byte_that_arrives_starts_the_wait_again() {
        let (mut links, at) = watch();
        for second in 0..1000 {
            assert_eq!(links.note_starved(&LINK, Some(second), at(second)), Missing::Unknown);
            links.note_sent(&LINK, 2000, at(second));
        }
    }

    #[test]
    fn a_run_that_was_stopped_for_a_while_starts_its_waits_again() {
        let (mut links, at) = watch();
        assert_eq!(links.note_starved(&LINK, Some(100), at(0)), Missing::Unknown);
        links.note_sent(&LINK, 200, at(0));
        assert_eq!(links.note_starved(&LINK, Some(100), at(60)), Missing::Unknown);
    }

    #[test]
    fn a_connection_that_does_not_come_about_is_missing_at_once() {
        let (mut links, at) = watch();
        assert_eq!(links.note_starved(&LINK, None, at(0)), Missing::For(Duration::ZERO));
        assert_eq!(links.note_starved(&LINK, None, at(2)), Missing::For(Duration::from_secs(2)));
        assert_eq!(links.note_starved(&LINK, Some(0), at(3)), Missing::Unknown);
    }
}
