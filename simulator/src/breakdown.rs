//! What a step is spent on: every instant of the last rank to finish, counted once.
//!
//! It must not know how the spans came about.

use crate::interpreter::Run;
use crate::lowering::{Lowered, Step};
use crate::simulation::Breakdown;
use foretell_program::{Operation, Phase};
use foretell_units::Picoseconds;
use std::ops::Range;

/// What an instant counts as; of several things at once the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Use {
    Optimizer,
    Compute,
    Communication,
    Data,
}

/// The breakdown of that rank of some that finishes last; of several the first.
pub(crate) fn of_last_rank(lowered: &Lowered<'_>, run: &Run, ranks: Range<usize>) -> Breakdown {
    let timelines = run.timeline.ranks.iter().enumerate().take(ranks.end).skip(ranks.start);
    let last = timelines.max_by_key(|(index, rank)| (rank.end, std::cmp::Reverse(*index)));
    let Some((index, timeline)) = last else { return Breakdown::default() };
    let rank = &lowered.ranks[lowered.of_rank[index] as usize];
    let stage = &lowered.lists[rank.list];
    let instructions = &lowered.sources[rank.list].instructions;
    // The beginnings (+1) and ends (-1) of everything.
    let mut changes: Vec<(Picoseconds, Use, i32)> = Vec::with_capacity(2 * timeline.spans.len());
    for ((span, step), instruction) in timeline.spans.iter().zip(&stage.steps).zip(instructions) {
        // Who has reached an exchange before the others waits for them; only then do data move.
        let exchange = match *step {
            Step::Compute | Step::Load => None,
            Step::Collective { group, nth } => Some(lowered.groups[rank.groups[group as usize] as usize].first_exchange + nth),
            Step::Send { peer, nth } => Some(lowered.channels[rank.sends[peer as usize] as usize].first_exchange + nth),
            Step::Receive { peer, nth } => Some(lowered.channels[rank.receives[peer as usize] as usize].first_exchange + nth),
        };
        let start = exchange.map_or(span.start, |exchange| run.began[exchange as usize].max(span.start));
        let is_update = instruction.phase == Phase::Update;
        let counts_as = match instruction.operation {
            Operation::Compute { .. } if is_update => Use::Optimizer,
            Operation::Compute { .. } => Use::Compute,
            Operation::Load { .. } => Use::Data,
            _ => Use::Communication,
        };
        changes.push((start, counts_as, 1));
        changes.push((span.end, counts_as, -1));
    }
    changes.sort_unstable();
    let mut active = [0i32; 4];
    let mut spent = [Picoseconds::ZERO; 4];
    let mut idle = Picoseconds::ZERO;
    let mut before = Picoseconds::ZERO;
    for (time, counts_as, change) in changes {
        let passed = time.saturating_sub(before);
        match active.iter().position(|&count| count > 0) {
            Some(first) => spent[first] += passed,
            None => idle += passed,
        }
        before = time;
        active[counts_as as usize] += change;
    }
    idle += timeline.end.saturating_sub(before);
    let of = |counts_as: Use| spent[counts_as as usize].into();
    Breakdown {
        compute: of(Use::Compute),
        exposed_communication: of(Use::Communication),
        bubble: idle.into(),
        data: of(Use::Data),
        optimizer: of(Use::Optimizer),
    }
}
