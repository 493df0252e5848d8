//! Lowering: resolves a Program on a topology, once, before it is interpreted at any quantile.
//!
//! [`Draft`] checks the Program and reads its instruction lists. [`Draft::lower`] then finds the
//! members of every process group and the two ends of every message, the links that each loads, and
//! the durations of instructions. [`Lowered::merge`] joins several jobs on one topology, and
//! [`Lowered::with_resources_numbered`] numbers the links and processors that ranks share.
//!
//! Nothing here depends on when something happens. This module must not know layouts or schedules.

mod backlog;
mod build;
mod calls;
mod communicators;
mod list;
mod list_times;
mod merge;
mod pairing;
mod ranks;
mod repeated;
mod resources;

pub(crate) use backlog::backlog;
pub use build::Oversubscription;
pub(crate) use build::{Draft, Threads};
pub(crate) use calls::{collectives, message_bytes};
pub(crate) use communicators::{Channel, CostKey, ProcessGroup, ShapeBits, SpreadByKind, shape_bits};
pub(crate) use list::{Action, LoweredList, Messages};
pub(crate) use list_times::{ListTimes, balanced_parts, list_times, uneven_groups};
pub(crate) use ranks::{JobOffset, SimulatedRank};

use crate::cost::CostModel;
use crate::network::{Hop, MeshRotation};
use foretell_program::StageProgram;
use std::collections::BTreeSet;

/// A Program on a topology.
#[derive(Debug)]
pub(crate) struct Lowered<'a> {
    /// The Program's instruction lists, in the order of `lists`.
    pub(crate) sources: Vec<&'a StageProgram>,
    pub(crate) costs: &'a CostModel,
    /// The ranks that are simulated.
    pub(crate) ranks: Vec<SimulatedRank>,
    /// For each rank of the Program, the index in `ranks` of its representative.
    pub(crate) representative_of: Vec<u32>,
    pub(crate) lists: Vec<LoweredList>,
    /// For each list, the durations of its instructions: one entry for each kind of device that
    /// runs it and, if kernels cost more on one member of a group than on another, for each
    /// position in such groups. [`SimulatedRank::times`] is the index.
    pub(crate) times: Vec<Vec<ListTimes>>,
    pub(crate) groups: Vec<ProcessGroup>,
    pub(crate) channels: Vec<Channel>,
    /// Hops of the rings that are simulated step by step, group by group.
    pub(crate) hops: Vec<Hop>,
    /// Number of collectives and messages. Those of the groups have the first indices, those of the
    /// channels the next.
    pub(crate) communications: u32,
    /// Capacities of the shared resources: links first, then processors.
    pub(crate) capacities: Vec<f64>,
    /// For each link, whether it belongs to a network: its queue passes the start of a message at
    /// once and stays busy after the message has arrived.
    pub(crate) has_queue: Vec<bool>,
    /// Number of processors, which are the last of `capacities`.
    pub(crate) processors: usize,
    /// Kernels that no sample covers.
    pub(crate) uncalibrated_kernels: BTreeSet<String>,
    /// The rotation of the mesh whose representatives are lowered. `None` if every rank is lowered.
    pub(crate) rotation: Option<MeshRotation>,
}

impl Lowered<'_> {
    /// Numbers all collectives and messages: those of the groups first, then those of the channels.
    pub(crate) fn number_communications(&mut self) {
        let mut next = 0;
        for group in &mut self.groups {
            group.first_communication = next;
            next += group.collectives.len() as u32;
        }
        for channel in &mut self.channels {
            channel.first_communication = next;
            next += channel.bytes.len() as u32;
        }
        self.communications = next;
    }

    /// Whether several ranks run on one processor.
    pub(crate) fn shares_processors(&self) -> bool {
        self.ranks.len() > self.processors
    }

    /// The long-run share of its processor's time that a rank's device has. `None` if it has the
    /// whole processor, or if ranks share processors: those run at a constant pace instead, since a
    /// quota belongs to a processor.
    pub(crate) fn quota(&self, rank: &SimulatedRank) -> Option<f64> {
        self.costs.quota(rank.kind).filter(|_| !self.shares_processors())
    }

    /// Whether the device of any rank has a quota.
    pub(crate) fn has_quotas(&self) -> bool {
        self.ranks.iter().any(|rank| self.quota(rank).is_some())
    }

    /// The list of a simulated rank, and the durations of its instructions.
    pub(crate) fn list_and_times(&self, rank: usize) -> (&LoweredList, &ListTimes) {
        let rank = &self.ranks[rank];
        (&self.lists[rank.list], &self.times[rank.list][rank.times])
    }

    /// Number of links among the shared resources, which is also the index of the first processor.
    pub(crate) fn first_processor(&self) -> usize {
        self.capacities.len() - self.processors
    }

    /// Whether collectives of one group, or messages to one peer, are in several streams of some
    /// list, so that two of them may run at the same time.
    pub(crate) fn communication_overlaps(&self) -> bool {
        self.lists.iter().any(|list| list.communication_overlaps)
    }

    /// Describes an instruction of a simulated rank, for messages to users.
    pub(crate) fn describe(&self, rank: usize, instruction: u32) -> String {
        let rank = &self.ranks[rank];
        let list = self.sources[rank.list];
        match list.instructions.get(instruction as usize) {
            Some(one) => {
                let name = list.names.get(one.name as usize).map_or("", String::as_str);
                format!("{} in instruction {instruction} (`{}` of `{name}`)", rank.rank, one.operation.kind())
            }
            None => format!("{} in instruction {instruction}", rank.rank),
        }
    }
}
