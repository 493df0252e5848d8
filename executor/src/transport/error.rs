//! The transport's errors. Each is one sentence that names the rank, with a hint where the user can
//! do something.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use super::StreamNumber;

/// A process of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Peer {
    /// The launcher, which started the ranks and collects their reports.
    Launcher,
    /// One rank of the run.
    Rank(usize),
}

impl fmt::Display for Peer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Launcher => formatter.write_str("the launcher"),
            Peer::Rank(rank) => write!(formatter, "rank {rank}"),
        }
    }
}

/// An error of a transport, a collective or the control connection.
#[derive(Debug, thiserror::Error, miette::Diagnostic)]
pub enum TransportError {
    /// A peer's process ended or its connection broke.
    #[error("rank {rank} is lost: its process ended or its connection broke{}", in_brackets(reason))]
    #[diagnostic(code(transport::peer_lost), help("see the log of rank {rank}"))]
    PeerLost {
        /// The rank that is gone.
        rank: usize,
        /// The operating system's reason, if it gave one.
        reason: Option<std::io::Error>,
    },
    /// The control connection to the launcher broke.
    #[error("the launcher is lost: its process ended or its connection broke{}", in_brackets(reason))]
    #[diagnostic(code(transport::launcher_lost))]
    LauncherLost {
        /// The operating system's reason, if it gave one.
        reason: Option<std::io::Error>,
    },
    /// Bytes of a peer do not fit their tag.
    #[error("what {peer} sent was changed, repeated or cut on the way: its tag does not fit")]
    #[diagnostic(
        code(transport::tampered),
        help("somebody interferes with the network between the hosts, or a device on the way is broken")
    )]
    Tampered {
        /// The process that the connection leads to.
        peer: Peer,
    },
    /// The launcher stopped the run.
    #[error("the launcher aborted the run")]
    #[diagnostic(code(transport::aborted))]
    Aborted,
    /// A peer made no progress within the configured time-out.
    #[error("rank {rank} did not {activity} on {stream} within {waited:?}")]
    #[diagnostic(code(transport::timed_out), help("see the log of rank {rank}"))]
    TimedOut {
        /// The rank waited for.
        rank: usize,
        /// The stream waited on.
        stream: StreamNumber,
        /// The action that was expected of the peer: `send`, `receive` or `connect`.
        activity: &'static str,
        /// How long this rank waited.
        waited: Duration,
    },
    /// A control message was not received, or could not be sent, in time.
    #[error("{peer} did not answer on the control connection within {waited:?}")]
    #[diagnostic(code(transport::control_timed_out))]
    ControlTimedOut {
        /// The other end.
        peer: Peer,
        /// How long this end waited.
        waited: Duration,
    },
    /// Both ends disagree about the size of a message, so they do not run the same Program.
    #[error("rank {rank} sent a message of {announced} bytes on {stream} where {expected} bytes were expected")]
    #[diagnostic(code(transport::length_mismatch), help("all ranks need the same version of foretell"))]
    LengthMismatch {
        /// The sender.
        rank: usize,
        /// The stream.
        stream: StreamNumber,
        /// Bytes that this side expected.
        expected: u64,
        /// Bytes that the peer announced.
        announced: u64,
    },
    /// The other end does not hold the run's secret.
    #[error("the process at {address} does not belong to this run: {reason}")]
    #[diagnostic(code(transport::not_authenticated), help("see whether another run uses this port"))]
    NotAuthenticated {
        /// Its address.
        address: SocketAddr,
        /// The step of the handshake that failed.
        reason: &'static str,
    },
    /// The other end belongs to the run but does not want this connection.
    #[error("{peer} refused the connection: {reason}")]
    #[diagnostic(code(transport::refused))]
    Refused {
        /// The process that refused.
        peer: Peer,
        /// Why.
        reason: &'static str,
    },
    /// Some ranks did not join in time.
    #[error("{} did not join the run within {waited:?}", name_ranks(ranks))]
    #[diagnostic(
        code(transport::missing_ranks),
        help("see the logs of the missing ranks, and whether their hosts can reach this one")
    )]
    MissingRanks {
        /// The ranks that are missing.
        ranks: Vec<usize>,
        /// How long the launcher waited.
        waited: Duration,
    },
    /// A control message is longer than allowed.
    #[error("a control message of {length} bytes to or from {peer} is longer than the {limit} bytes allowed")]
    #[diagnostic(code(transport::frame_too_long))]
    FrameTooLong {
        /// The other end.
        peer: Peer,
        /// The length in bytes.
        length: u64,
        /// The longest allowed, in bytes.
        limit: u64,
    },
    /// A control message is not JSON of the expected type.
    #[error("a control message to or from {peer} is malformed: {source}")]
    #[diagnostic(code(transport::malformed_message), help("all ranks need the same version of foretell"))]
    MalformedMessage {
        /// The other end.
        peer: Peer,
        /// The error of serde.
        source: serde_json::Error,
    },
    /// A channel was opened twice.
    #[error("the channel to rank {rank} on {stream} is open already")]
    #[diagnostic(code(transport::already_open))]
    AlreadyOpen {
        /// The peer.
        rank: usize,
        /// The stream.
        stream: StreamNumber,
    },
    /// This transport does not reach the rank.
    #[error("rank {rank} cannot be reached by this transport of rank {from}")]
    #[diagnostic(code(transport::no_such_peer))]
    NoSuchPeer {
        /// The rank that was asked for.
        rank: usize,
        /// The rank whose transport this is.
        from: usize,
    },
    /// The shared memory was created for fewer streams.
    #[error("{stream} to rank {rank} does not exist: the shared memory was created for {streams} streams")]
    #[diagnostic(code(transport::no_such_stream))]
    NoSuchStream {
        /// The peer.
        rank: usize,
        /// The stream that was asked for.
        stream: StreamNumber,
        /// The number of streams.
        streams: usize,
    },
    /// A rank is not among a group's members, or is there twice.
    #[error("rank {rank} must be exactly once among the members of the group on {stream}")]
    #[diagnostic(code(transport::not_a_member))]
    NotAMember {
        /// The rank.
        rank: usize,
        /// The group's stream.
        stream: StreamNumber,
    },
    /// A collective was given a buffer of the wrong size.
    #[error("rank {rank} called {operation} with {given} bytes where {expected} are needed")]
    #[diagnostic(code(transport::wrong_size))]
    WrongSize {
        /// The caller.
        rank: usize,
        /// The collective.
        operation: &'static str,
        /// The size needed, in bytes.
        expected: usize,
        /// The size given, in bytes.
        given: usize,
    },
    /// MPI is missing, is another one, or did not start or end.
    #[error("MPI cannot be used: {reason}")]
    #[diagnostic(code(transport::mpi), help("{hint}"))]
    Mpi {
        /// The defect.
        reason: String,
        /// What the user can do.
        hint: &'static str,
    },
    /// The shared memory segment is invalid.
    #[error("the shared memory segment is unusable: {reason}")]
    #[diagnostic(code(transport::segment))]
    Segment {
        /// The defect.
        reason: String,
    },
    /// The run's secret is missing or malformed.
    #[error("the run's secret is unusable: {reason}")]
    #[diagnostic(code(transport::credentials), help("all ranks need the same FORETELL_RUN_KEY or the same key file"))]
    Credentials {
        /// The defect.
        reason: &'static str,
    },
    /// The operating system refused something.
    #[error("cannot {doing}: {source}")]
    #[diagnostic(code(transport::system))]
    System {
        /// The action that failed, naming the rank if there is one.
        doing: String,
        /// The system's error.
        source: std::io::Error,
    },
}

impl TransportError {
    /// Creates a [`TransportError::System`] from any of the operating system's error types.
    pub(super) fn system(doing: impl Into<String>, source: impl Into<std::io::Error>) -> Self {
        TransportError::System { doing: doing.into(), source: source.into() }
    }

    /// The loss of `peer`, for the operating system's `reason` if it gave one.
    pub(super) fn lost(peer: Peer, reason: Option<std::io::Error>) -> Self {
        match peer {
            Peer::Launcher => TransportError::LauncherLost { reason },
            Peer::Rank(rank) => TransportError::PeerLost { rank, reason },
        }
    }
}

/// Whether an error of a socket says that its connection is gone, rather than that something is
/// wrong here.
pub(super) fn is_connection_gone(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{
        BrokenPipe, ConnectionAborted, ConnectionReset, HostUnreachable, NetworkDown, NetworkUnreachable, NotConnected, TimedOut,
        UnexpectedEof,
    };
    matches!(
        error.kind(),
        BrokenPipe
            | ConnectionAborted
            | ConnectionReset
            | HostUnreachable
            | NetworkDown
            | NetworkUnreachable
            | NotConnected
            | TimedOut
            | UnexpectedEof
    )
}

fn name_ranks(ranks: &[usize]) -> String {
    let list = ranks.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if ranks.len() == 1 { format!("rank {list}") } else { format!("ranks {list}") }
}

fn in_brackets(reason: &Option<std::io::Error>) -> String {
    reason.as_ref().map_or_else(String::new, |reason| format!(" ({reason})"))
}
