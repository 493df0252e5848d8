//! The events of the interpreter, and the items that they refer to.

use crate::network::ActivityId;

/// An event. An event whose `generation` is no longer current is outdated and ignored.
#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A block starts: its handoffs are over.
    Start(Task),
    /// A block with exclusive use of its processor ends.
    ExclusiveEnds { task: Task, generation: u32 },
    /// A communication with exclusive use of its members' processors ends.
    ExclusiveCommunicationEnds { communication: Communication, generation: u32 },
    /// The last block of a rank's run ahead ends.
    RunAheadEnds { rank: u32, generation: u32 },
    /// A block that uses no shared resource ends.
    TimerEnds(Task),
    /// All members have reached a collective.
    MembersArrived(Communication),
    /// The latency of a communication is over, and its data begin to flow.
    LatencyEnds(Communication),
    /// A communication that shares no contended resource ends.
    CommunicationEnds(Communication),
    /// A member has entered a collective that runs step by step.
    MemberEntered(u32),
    /// The latency of a hop's message is over, and its data begin to flow.
    HopFlows(u32),
    /// A hop's message has arrived.
    HopArrived(u32),
    /// A device has used up its processor budget of the period.
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
