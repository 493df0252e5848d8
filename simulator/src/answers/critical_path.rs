//! The critical path: the chain of instructions, across ranks, that determines the step time. Each
//! instruction on it waited for the one before it.
//!
//! The path is followed from the end of the step back to its start. An instruction off the path
//! could be somewhat slower without lengthening the step.
//!
//! This module reads only a timeline and a Program, so it works for a measured step as well as for
//! a predicted one.

use crate::error::SimulationError;
use crate::lowering::{Action, LoweredList, Messages};
use foretell_program::{InstructionId, Operation, PeerId, Phase, Program, Rank, StageProgram, Timeline};
use foretell_units::{Picoseconds, Seconds};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// An instruction on the critical path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PathSegment {
    /// The rank that runs the instruction.
    pub rank: Rank,
    /// The instruction, in the list of the rank's stage.
    pub instruction: InstructionId,
    /// When the path enters the instruction. For communication this is the start of the member that
    /// started last.
    pub start: Picoseconds,
    /// When the instruction ends.
    pub end: Picoseconds,
}

/// The critical path of a step, with its time by kind.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CriticalPath {
    /// The instructions on the path, in order of time. Between two instructions there are handoffs,
    /// and after the last one the step overhead.
    pub segments: Vec<PathSegment>,
    /// Time on the path by kind of operation (a kernel's name, `all_reduce`, `send`), longest
    /// first.
    pub by_kind: Vec<(String, Seconds)>,
    /// Time on the path by the categories of a step's breakdown. With `between` they add up to the
    /// step time.
    pub by_time: PathTime,
    /// The step time less all segments: handoffs and overheads.
    #[serde(with = "crate::si")]
    pub between: Seconds,
}

/// Time on the critical path by category. Work off the path does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, JsonSchema)]
pub struct PathTime {
    /// Kernels of the forward and backward pass.
    #[serde(with = "crate::si")]
    #[schemars(with = "f64")]
    pub compute: Seconds,
    /// Kernels that update the parameters.
    #[serde(with = "crate::si")]
    #[schemars(with = "f64")]
    pub optimizer: Seconds,
    /// Collectives and messages, from the start of the last member.
    #[serde(with = "crate::si")]
    #[schemars(with = "f64")]
    pub communication: Seconds,
    /// Loading of samples.
    #[serde(with = "crate::si")]
    #[schemars(with = "f64")]
    pub data: Seconds,
}

/// Returns the critical path of a step.
///
/// # Errors
/// [`SimulationError::Malformed`] if the Program contradicts itself, and
/// [`SimulationError::Unmatched`] if the timeline does not belong to the Program.
pub fn critical_path(timeline: &Timeline, program: &Program) -> Result<CriticalPath, SimulationError> {
    let lists: Vec<LoweredList> = program.lists.iter().map(LoweredList::new).collect::<Result<_, _>>()?;
    let path = Path { timeline, program, waits: program.lists.iter().map(waits).collect(), lists };
    path.check()?;
    let mut segments = Vec::new();
    let mut at = path.last();
    // A malformed timeline must not loop forever: a path has at most as many segments as
    // instructions.
    let most: usize = timeline.ranks.iter().map(|rank| rank.spans.len()).sum();
    while let Some((rank, instruction)) = at
        && segments.len() < most
    {
        // Communication starts when its last member arrives, so the path continues there.
        let (rank, instruction) = path.latest_partner(rank, instruction);
        let span = &timeline.ranks[rank.0].spans[instruction];
        segments.push(PathSegment { rank, instruction: span.instruction, start: span.start, end: span.end });
        at = path.latest_before(rank, instruction);
    }
    segments.reverse();
    Ok(path.summary(segments))
}

/// Returns, for each instruction of a list, the instructions it waits for: the previous one in its
/// stream and its dependencies.
fn waits(list: &StageProgram) -> Vec<Vec<u32>> {
    let mut last_of_stream: Vec<Option<u32>> = vec![None; list.streams.len()];
    let waits = (0..).zip(&list.instructions).map(|(index, instruction)| {
        let last = last_of_stream[instruction.stream.0 as usize].replace(index);
        last.into_iter().chain(instruction.after.iter().map(|before| before.0)).collect()
    });
    waits.collect()
}

struct Path<'a> {
    timeline: &'a Timeline,
    program: &'a Program,
    lists: Vec<LoweredList>,
    /// The instructions that each instruction waits for, indexed by list and instruction.
    waits: Vec<Vec<Vec<u32>>>,
}

impl Path<'_> {
    fn check(&self) -> Result<(), SimulationError> {
        let fits = self.timeline.ranks.len() == self.program.mesh.world_size()
            && self.program.list_of_rank.len() == self.timeline.ranks.len()
            && self.program.list_of_rank.iter().all(|&list| (list as usize) < self.lists.len())
            && self
                .timeline
                .ranks
                .iter()
                .enumerate()
                .all(|(rank, timeline)| timeline.spans.len() == self.lists[self.list(Rank(rank))].actions.len());
        if fits {
            return Ok(());
        }
        Err(SimulationError::Unmatched {
            left: "the timeline".into(),
            right: "the Program".into(),
            reason: "they differ in ranks or in instructions".into(),
        })
    }

    fn list(&self, rank: Rank) -> usize {
        self.program.list_index(rank)
    }

    /// Returns the last instruction to finish on the last rank to finish.
    fn last(&self) -> Option<(Rank, usize)> {
        let ranks = self.timeline.ranks.iter().enumerate();
        let (rank, timeline) = ranks.max_by_key(|(index, rank)| (rank.end, std::cmp::Reverse(*index)))?;
        let spans = timeline.spans.iter().enumerate();
        let (instruction, _) = spans.max_by_key(|(_, span)| (span.end, span.start))?;
        Some((Rank(rank), instruction))
    }

    /// Returns the last to finish of the instructions that an instruction waits for.
    fn latest_before(&self, rank: Rank, instruction: usize) -> Option<(Rank, usize)> {
        let spans = &self.timeline.ranks[rank.0].spans;
        let before = self.waits[self.list(rank)][instruction].iter().map(|&index| index as usize);
        before.max_by_key(|&index| (spans[index].end, spans[index].start)).map(|index| (rank, index))
    }

    /// Returns the member of a collective or message that started last, or the instruction itself
    /// for everything else.
    fn latest_partner(&self, rank: Rank, instruction: usize) -> (Rank, usize) {
        let mesh = &self.program.mesh;
        let list = self.list(rank);
        let own = (rank, instruction);
        let opposite = |peer: PeerId, nth: u32, messages: fn(&LoweredList) -> &[Messages]| {
            let other = self.program.lists[list].peers.get(peer.0 as usize)?.of(mesh, rank);
            let theirs = self.list(other);
            let peers = &self.program.lists[theirs].peers;
            let is_ours =
                |message: &&Messages| peers.get(message.peer.0 as usize).is_some_and(|peer| peer.of(mesh, other) == rank);
            let messages = messages(&self.lists[theirs]).iter().find(is_ours)?;
            Some((other, *messages.instructions.get(nth as usize)? as usize))
        };
        let partners: Vec<(Rank, usize)> = match self.lists[list].actions[instruction] {
            Action::Compute | Action::Load | Action::Copy => Vec::new(),
            Action::Send { peer, nth } => {
                opposite(self.lists[list].sends[peer as usize].peer, nth, |list| &list.receives).into_iter().collect()
            }
            Action::Receive { peer, nth } => {
                opposite(self.lists[list].receives[peer as usize].peer, nth, |list| &list.sends).into_iter().collect()
            }
            Action::Collective { group, nth } => {
                let group = &self.program.lists[list].groups[group as usize];
                let members = group.members(mesh, rank).into_iter();
                members
                    .filter_map(|member| {
                        let other = self.list(member);
                        let number = self.program.lists[other].groups.iter().position(|known| known == group)?;
                        Some((member, *self.lists[other].collectives[number].get(nth as usize)? as usize))
                    })
                    .collect()
            }
        };
        let start = |&(rank, instruction): &(Rank, usize)| self.timeline.ranks[rank.0].spans[instruction].start;
        let latest = partners.into_iter().max_by_key(|partner| (start(partner), std::cmp::Reverse(partner.0)));
        // Only a member that started strictly later was waited for, so on a tie the path stays on
        // its own rank. A member that started after this instruction ended was not waited for
        // either: a buffered message may be received late.
        let end = self.timeline.ranks[rank.0].spans[instruction].end;
        latest.filter(|member| start(member) > start(&own) && start(member) <= end).unwrap_or(own)
    }

    fn summary(&self, segments: Vec<PathSegment>) -> CriticalPath {
        let mut by_kind: BTreeMap<&str, Picoseconds> = BTreeMap::new();
        let mut by_time = PathTime::default();
        let mut total = Picoseconds::ZERO;
        for segment in &segments {
            let stage = &self.program.lists[self.list(segment.rank)];
            let duration = segment.end.saturating_sub(segment.start);
            let instruction = stage.instruction(segment.instruction);
            *by_kind.entry(instruction.operation.kind()).or_default() += duration;
            let spent_on = match *instruction.operation {
                Operation::Compute { .. } | Operation::Traced { .. } if instruction.phase == Phase::Update => {
                    &mut by_time.optimizer
                }
                Operation::Compute { .. } | Operation::Traced { .. } => &mut by_time.compute,
                Operation::Load { .. } => &mut by_time.data,
                Operation::Collective { .. }
                | Operation::Send { .. }
                | Operation::Receive { .. }
                | Operation::Copy { .. }
                | Operation::Save { .. }
                | Operation::Write { .. } => &mut by_time.communication,
            };
            *spent_on += Seconds::from(duration);
            total += duration;
        }
        let mut by_kind: Vec<(String, Seconds)> =
            by_kind.into_iter().map(|(kind, time)| (kind.to_string(), time.into())).collect();
        by_kind.sort_by(|left, right| right.1.value().total_cmp(&left.1.value()));
        CriticalPath { segments, by_kind, by_time, between: self.timeline.step().saturating_sub(total).into() }
    }
}
