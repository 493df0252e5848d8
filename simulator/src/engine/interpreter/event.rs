//! The events of the interpreter, and what they name.

use crate::network::ActivityId;

/// An event. A `generation` that is no longer current means that the event was overtaken: drop it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// The handoffs before a block are over.
    Start(Task),
    /// A block ends that has its processor to itself.
    ExclusiveEnds { task: Task, generation: u32 },
    /// A communication ends that has its members' processors to itself.
    ExclusiveCommunicationEnds { communication: Communication, generation: u32 },
    /// The last block ends through which a rank ran ahead.
    RunAheadEnds { rank: u32, generation: u32 },
    /// A block ends that shares nothing.
    TimerEnds(Task),
    /// All members have reached a collective.
    MembersArrived(Communication),
    /// The latency of a communication is over, and its data begin to flow.
    LatencyEnds(Communication),
    /// A communication ends that shares nothing.
    CommunicationEnds(Communication),
    /// A member of a collective that runs step by step has been set up.
    MemberEntered(u32),
    /// The latency of a hop's message is over, and its data begin to flow.
    HopFlows(u32),
    /// A hop's message has arrived.
    HopArrived(u32),
    /// A device has used up its budget of the period.
    QuotaIsUsedUp { number: u32, generation: u32 },
    /// The next period begins for a device that has used up its budget.
    PeriodBegins(u32),
    /// A fluid activity ends.
    FluidEnds { activity: ActivityId, generation: u32 },
}

/// A block of a simulated rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) rank: u32,
    pub(super) block: u32,
}

/// The `nth` collective of a group or message of a channel. Groups are numbered first, then
/// channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Communication {
    pub(super) communicator: u32,
    pub(super) nth: u32,
}
