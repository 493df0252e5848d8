//! The events of the interpreter, and the things that they name.

use crate::network::ActivityId;

#[derive(Clone, Copy, Debug)]
pub(super) enum Event {
    /// A block's handoffs are over.
    Start(Task),
    /// A block that has its processor to itself is done, unless someone came in between.
    ExclusiveEnds {
        task: Task,
        generation: u32,
    },
    /// The same of an exchange that has its members' processors to itself.
    ExclusiveCommunicationEnds {
        communication: Communication,
        generation: u32,
    },
    /// The last is done of the blocks through which a rank was taken ahead, unless someone came in between.
    RunAheadEnds {
        rank: u32,
        generation: u32,
    },
    /// Something that shares nothing is done.
    TimerEnds(Task),
    /// All members have reached a collective.
    MembersArrived(Communication),
    /// The latency of an exchange is over.
    LatencyEnds(Communication),
    /// An exchange that shares nothing is done.
    CommunicationEnds(Communication),
    /// A member of a collective that is run step by step has been set up for it.
    Entered(u32),
    /// The latency of a hop's message is over; the message has arrived.
    HopFlows(u32),
    Hopped(u32),
    /// A device has used up what it may of the period, unless its use changed in between; the period after that begins.
    QuotaIsUsedUp {
        number: u32,
        generation: u32,
    },
    PeriodBegins(u32),
    /// A fluid activity is done, unless its rate changed in between.
    Fluid {
        activity: ActivityId,
        generation: u32,
    },
}

/// A block of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task {
    pub(super) rank: u32,
    pub(super) block: u32,
}

/// The `nth` exchange of a group or channel: the groups come first, then the channels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Communication {
    pub(super) communicator: u32,
    pub(super) nth: u32,
}
