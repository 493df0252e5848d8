//! What can go wrong between ranks, each in one sentence that names the rank.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::StreamNumber;

/// One end of a control connection: the launcher or a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Party {
    /// The process that started the ranks and gathers their reports.
    Launcher,
    /// One rank of the run.
    Rank(usize),
}

impl fmt::Display for Party {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Party::Launcher => formatter.write_str("the launcher"),
            Party::Rank(rank) => write!(formatter, "rank {rank}"),
        }
    }
}

/// An error of a transport, a collective or the control connection.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    /// A peer's process ended or its connection broke.
    #[error("rank {rank} is lost: its process ended or its connection broke")]
    PeerLost {
        /// The rank that is gone.
        rank: usize,
    },
    /// The control connection to the launcher broke.
    #[error("the launcher is lost: its process ended or its connection broke")]
    LauncherLost,
    /// The launcher called the run off.
    #[error("the run was aborted by the launcher")]
    Aborted,
    /// A peer did nothing for the whole of the configured time-out.
    #[error("rank {rank} did not {activity} on {stream} within {waited:?}")]
    TimedOut {
        /// The rank waited for.
        rank: usize,
        /// The stream waited on.
        stream: StreamNumber,
        /// What the peer should have done: `send`, `receive` or `connect`.
        activity: &'static str,
        /// How long it was waited for.
        waited: Duration,
    },
    /// A control message did not come, or could not be handed over, in time.
    #[error("{party} did not answer on the control connection within {waited:?}")]
    ControlTimedOut {
        /// The other end.
        party: Party,
        /// How long it was waited for.
        waited: Duration,
    },
    /// Both ends disagree about the size of a message: they do not run the same Program.
    #[error("rank {rank} sent a message of {announced} bytes on {stream} where {expected} bytes were expected")]
    LengthMismatch {
        /// The sender.
        rank: usize,
        /// The stream.
        stream: StreamNumber,
        /// What this side expected.
        expected: u64,
        /// What the peer announced.
        announced: u64,
    },
    /// The other end does not hold the run's secret, or takes part in another run.
    #[error("the process at {address} does not belong to this run: {reason}")]
    NotAuthenticated {
        /// Where it is.
        address: SocketAddr,
        /// What it got wrong.
        reason: &'static str,
    },
    /// The other end knows us, and does not want this connection.
    #[error("{party} refused the connection: {reason}")]
    Refused {
        /// Who refused.
        party: Party,
        /// Why.
        reason: &'static str,
    },
    /// Some ranks did not join in time.
    #[error("{} did not join the run within {waited:?}", name_ranks(ranks))]
    MissingRanks {
        /// Those that did not come.
        ranks: Vec<usize>,
        /// How long they were waited for.
        waited: Duration,
    },
    /// A control frame longer than allowed was announced or asked for.
    #[error("a control message of {length} bytes to or from {party} is longer than the {limit} bytes allowed")]
    FrameTooLong {
        /// The other end.
        party: Party,
        /// The announced length.
        length: u64,
        /// The most allowed.
        limit: u64,
    },
    /// A control message is not the JSON of the type wanted.
    #[error("a control message to or from {party} cannot be read or written as the type wanted")]
    MalformedMessage {
        /// The other end.
        party: Party,
        /// What serde says.
        source: serde_json::Error,
    },
    /// A channel was opened twice.
    #[error("the channel to rank {rank} on {stream} is open already")]
    AlreadyOpen {
        /// The peer.
        rank: usize,
        /// The stream.
        stream: StreamNumber,
    },
    /// A rank that this transport does not reach.
    #[error("rank {rank} cannot be reached by this transport of rank {from}")]
    NoSuchPeer {
        /// The rank asked for.
        rank: usize,
        /// Who asked.
        from: usize,
    },
    /// A stream beyond those the shared memory was made for.
    #[error("{stream} to rank {rank} does not exist: the shared memory was made for {streams} streams")]
    NoSuchStream {
        /// The peer.
        rank: usize,
        /// The stream asked for.
        stream: StreamNumber,
        /// How many there are.
        streams: usize,
    },
    /// A rank is not among a group's members, or is there twice.
    #[error("rank {rank} must be exactly once among the members of the group on {stream}")]
    NotAMember {
        /// The rank.
        rank: usize,
        /// The group's stream.
        stream: StreamNumber,
    },
    /// A buffer of the wrong size was given to a collective.
    #[error("rank {rank} called {operation} with {given} elements where {expected} are needed")]
    WrongSize {
        /// The caller.
        rank: usize,
        /// The collective.
        operation: &'static str,
        /// The size needed.
        expected: usize,
        /// The size given.
        given: usize,
    },
    /// The shared memory segment is not what it should be.
    #[error("the shared memory segment is unusable: {reason}")]
    Segment {
        /// What is wrong.
        reason: String,
    },
    /// The credentials of the run are missing or malformed.
    #[error("the credentials of the run are unusable: {reason}")]
    Credentials {
        /// What is wrong.
        reason: &'static str,
    },
    /// The operating system refused something.
    #[error("cannot {doing}")]
    System {
        /// What was attempted, naming the rank where there is one.
        doing: String,
        /// What the system said.
        source: std::io::Error,
    },
}

impl TransportError {
    /// A [`TransportError::System`] from any of the operating system's error types.
    pub(super) fn system(doing: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        TransportError::System { doing: doing.into(), source: source.into() }
    }

    /// The loss of either kind of party.
    pub(super) fn lost(party: Party) -> Self {
        match party {
            Party::Launcher => TransportError::LauncherLost,
            Party::Rank(rank) => TransportError::PeerLost { rank },
        }
    }
}

fn name_ranks(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}
