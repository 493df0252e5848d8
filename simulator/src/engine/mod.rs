//! The engine: runs a lowered Program and computes the start and end of each instruction.
//!
//! Each list is first cut into [`blocks`], which all ranks that run it share. The [`interpreter`]
//! then runs the blocks of every simulated rank from an [`event_queue`], at one quantile of all
//! durations, with the costs of all communication resolved beforehand ([`resolved_costs`]). It must
//! not know layouts or schedules, or how a duration was found.

mod block_times;
mod blocks;
mod breakdown;
mod event_queue;
mod interpreter;
mod order;
mod resolved_costs;
mod scenario;

pub use breakdown::Breakdown;
pub use event_queue::EventQueue;
pub(crate) use interpreter::interpret;
pub(crate) use resolved_costs::{ResolvedCosts, growth, processor_share};
#[cfg(test)]
pub(crate) use scenario::FastPath;
pub use scenario::{Deadline, Recording, Stop};
pub(crate) use scenario::{QuotaPeriods, Scenario};

use crate::lowering::{Lowered, LoweredList};
use blocks::{BlockList, Joins};
use foretell_program::{StageProgram, Timeline};
use interpreter::fast_path::ForcedOrder;
use order::InstructionOrder;
use rayon::prelude::*;

/// A lowered Program whose lists have been cut into blocks.
#[derive(Debug)]
pub(crate) struct Runnable<'a> {
    pub(crate) lowered: Lowered<'a>,
    /// The blocks of each list.
    block_lists: Vec<BlockList>,
}

impl<'a> Runnable<'a> {
    /// Cuts the lists of a Program into blocks.
    pub(crate) fn new(lowered: Lowered<'a>) -> Self {
        let lists = lowered.sources.par_iter().zip(&lowered.lists).zip(&lowered.times);
        let block_lists = lists.map(|((source, list), times)| {
            // If launches take time, each kernel waits for its own launch and is a block of its
            // own.
            let launches_are_free = times.iter().all(|times| times.launched.is_empty());
            block_list(source, list, if launches_are_free { Joins::Kernels } else { Joins::Nothing })
        });
        Self { block_lists: block_lists.collect(), lowered }
    }
}

fn block_list(source: &StageProgram, list: &LoweredList, joins: Joins) -> BlockList {
    let order = InstructionOrder::new(source, list);
    let forced = ForcedOrder::new(list, &order);
    let successor = |order: &InstructionOrder, instruction| forced.successor(list, order, instruction);
    BlockList::new(list, order, joins, (&forced.slot_of, forced.slots), successor)
}

/// The outcome of one run.
#[derive(Debug)]
pub(crate) struct RunOutcome {
    /// Has no spans if none were recorded.
    pub(crate) timeline: Timeline,
    /// For each simulated rank, how it spent the step.
    pub(crate) breakdowns: Vec<Breakdown>,
    /// Number of simulated events, including ends of blocks that the fast path computed without an
    /// event.
    pub(crate) events: u64,
    /// Number of events that came from the queue.
    #[cfg(test)]
    pub(crate) queue_events: u64,
    /// The collectives and messages that no sample covers.
    pub(crate) uncalibrated: Vec<String>,
    /// How far devices with a quota are in their periods after the step.
    pub(crate) periods: QuotaPeriods,
}
