//! Why a rank's step took as long as it did: every instant of the step is given to one instruction and one of three reasons.
//!
//! The compute stream is the rank's clock. While a kernel runs, the time is the kernel's work. While none runs, the next one is
//! followed back through what it waited for, as a critical path is: to the dependency that finished last, to what *that* waited
//! for, and so on, until the walk is back at the time the compute stream fell idle. So communication counts only where it is
//! exposed, and the pieces of a rank add up to the step exactly. This module knows no kinds, no causes and no predictions.

use foretell_program::{
    Group, Instruction, InstructionId, Operation, PeerId, Program, Rank, RankTimeline, Span, StageProgram, Stream, Timeline,
};
use foretell_units::Picoseconds;
use std::collections::HashMap;

/// Why time passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Reason {
    /// The instruction ran.
    Work,
    /// Another rank had not come yet: to the same exchange, or to the end of the step.
    Wait,
    /// Nothing ran and nobody was waited for: the host was launching, handing over, or busy elsewhere.
    Host,
}

/// A part of a rank's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The instruction that ran or could not begin; none after the last.
    pub instruction: Option<InstructionId>,
    /// Why.
    pub reason: Reason,
    /// How long.
    pub duration: Picoseconds,
}

/// Splits a rank's step. The pieces add up to [`Timeline::step`]. Spans of instructions that the program does not have are passed over.
pub(crate) fn attribute(program: &Program, exchanges: &Exchanges, timeline: &Timeline, rank: Rank) -> Vec<Piece> {
    let step = timeline.step();
    let Some(own) = timeline.rank(rank) else { return Vec::new() };
    let stage = program.list_of(rank);
    let end = own.end;
    let mut walk = Walk { program, exchanges, timeline, rank, stage, spans: by_instruction(stage, own), pieces: Vec::new() };

    let mut computes: Vec<(InstructionId, Span)> = walk.all_spans().filter(|&(id, _)| is_on_compute_stream(stage, id)).collect();
    computes.sort_by_key(|(id, span)| (span.start, *id));
    let mut clock = Picoseconds::ZERO;
    for (instruction, span) in computes {
        let start = span.start.clamp(clock, end.max(clock));
        let finish = span.end.clamp(start, end.max(start));
        walk.explain_gap(clock, start, Some(instruction));
        walk.add(Some(instruction), Reason::Work, start, finish);
        clock = finish;
    }
    walk.explain_gap(clock, end, None);
    walk.add(None, Reason::Wait, end.max(clock), step);
    walk.pieces
}

/// How long an exchange or a load itself took, whether or not a kernel hid it: from when all had come until its end.
pub(crate) fn active_time(
    program: &Program,
    exchanges: &Exchanges,
    timeline: &Timeline,
    rank: Rank,
    id: InstructionId,
) -> Picoseconds {
    let Some(span) = timeline.rank(rank).and_then(|own| span_of(own, id)) else { return Picoseconds::ZERO };
    let arrival = exchanges.last_arrival(program, timeline, rank, id).unwrap_or_default();
    span.end.saturating_sub(span.start.max(arrival))
}

/// One rank's spans, and the pieces found so far.
struct Walk<'a> {
    program: &'a Program,
    exchanges: &'a Exchanges,
    timeline: &'a Timeline,
    rank: Rank,
    stage: &'a StageProgram,
    spans: Vec<Option<Span>>,
    pieces: Vec<Piece>,
}

impl Walk<'_> {
    fn add(&mut self, instruction: Option<InstructionId>, reason: Reason, from: Picoseconds, to: Picoseconds) {
        if to > from {
            self.pieces.push(Piece { instruction, reason, duration: to.saturating_sub(from) });
        }
    }

    /// Explains the idle time of the compute stream before an instruction, or before the end of the rank's step.
    fn explain_gap(&mut self, from: Picoseconds, to: Picoseconds, before: Option<InstructionId>) {
        let (mut until, mut blocked) = (to, before);
        // A dependency stands earlier in the list than what waits for it, so that the walk ends.
        while until > from {
            let binding = self.finished_last(blocked).filter(|(_, span)| span.end > from);
            let ready = binding.map_or(from, |(_, span)| span.end.min(until));
            self.explain(ready, until, blocked, Reason::Host);
            let Some((instruction, span)) = binding else { break };
            let start = span.start.clamp(from, ready);
            self.explain(start, ready, Some(instruction), Reason::Work);
            (until, blocked) = (start, Some(instruction));
        }
    }

    /// Gives time to an instruction: as waiting until the last of the other ranks had come to the exchange, then as `otherwise`.
    fn explain(&mut self, from: Picoseconds, to: Picoseconds, instruction: Option<InstructionId>, otherwise: Reason) {
        let arrival = instruction
            .filter(|_| to > from)
            .and_then(|id| self.exchanges.last_arrival(self.program, self.timeline, self.rank, id));
        let met = arrival.map_or(from, |arrival| arrival.clamp(from, to.max(from)));
        self.add(instruction, Reason::Wait, from, met);
        self.add(instruction, otherwise, met, to);
    }

    /// The dependency that let an instruction begin; for the end of the step, the last span.
    fn finished_last(&self, blocked: Option<InstructionId>) -> Option<(InstructionId, Span)> {
        let latest = |one: &(InstructionId, Span)| (one.1.end, one.0);
        match blocked {
            None => self.all_spans().max_by_key(latest),
            Some(id) => {
                let instruction = self.stage.instructions.get(id.0 as usize)?;
                let in_stream = self.exchanges.predecessor(self.program.list_index(self.rank), id);
                let before = instruction.after.iter().copied().chain(in_stream).filter(|&one| one < id);
                before.filter_map(|one| Some((one, self.span(one)?))).max_by_key(latest)
            }
        }
    }

    fn span(&self, id: InstructionId) -> Option<Span> {
        self.spans.get(id.0 as usize).copied().flatten()
    }

    fn all_spans(&self) -> impl Iterator<Item = (InstructionId, Span)> + '_ {
        self.spans.iter().flatten().map(|span| (span.instruction, *span))
    }
}

/// Who meets whom: found once for a program, and the same for every timeline of it.
pub(crate) struct Exchanges {
    lists: Vec<ListExchanges>,
}

struct ListExchanges {
    /// By instruction: the one before it in its stream.
    predecessors: Vec<Option<InstructionId>>,
    /// By instruction: which exchange it takes part in, if it communicates.
    meetings: Vec<Option<Meeting>>,
    /// Where each meeting is in the list.
    places: HashMap<Meeting, InstructionId>,
}

/// The `ordinal`-th exchange over a channel, which every participant numbers alike since a channel keeps its order.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Meeting {
    channel: Channel,
    ordinal: usize,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Channel {
    Group(Group),
    /// Messages to a peer of the list, and from one.
    To(PeerId),
    From(PeerId),
}

impl Exchanges {
    pub(crate) fn of(program: &Program) -> Self {
        Self { lists: program.lists.iter().map(ListExchanges::of).collect() }
    }

    fn predecessor(&self, list: usize, id: InstructionId) -> Option<InstructionId> {
        self.lists.get(list)?.predecessors.get(id.0 as usize).copied().flatten()
    }

    /// When the last other participant began the exchange; none where the instruction is not one.
    fn last_arrival(&self, program: &Program, timeline: &Timeline, rank: Rank, id: InstructionId) -> Option<Picoseconds> {
        let partners = self.partners(program, rank, id);
        partners.into_iter().filter_map(|(rank, id)| span_of(timeline.rank(rank)?, id)).map(|span| span.start).max()
    }

    /// The other ranks of an exchange, each with its instruction.
    fn partners(&self, program: &Program, rank: Rank, id: InstructionId) -> Vec<(Rank, InstructionId)> {
        let own = program.list_index(rank);
        let meeting = |list: usize| self.lists.get(list)?.meetings.get(id.0 as usize)?.as_ref();
        let Some(Meeting { channel, ordinal }) = meeting(own) else { return Vec::new() };
        let place = |other: Rank, channel: Channel| {
            let list = self.lists.get(program.list_index(other))?;
            Some((other, *list.places.get(&Meeting { channel, ordinal: *ordinal })?))
        };
        let opposite = |peer: &PeerId, as_seen_there: fn(PeerId) -> Channel| {
            let other = program.lists[own].peers.get(peer.0 as usize)?.of(&program.mesh, rank);
            let peers = program.list_of(other).peers.iter().enumerate();
            // A list may have a peer once for sends and once for receives.
            let back = peers.filter(|(_, peer)| peer.of(&program.mesh, other) == rank);
            back.map(|(number, _)| as_seen_there(PeerId(number as u16))).find_map(|channel| place(other, channel))
        };
        match channel {
            Channel::Group(group) => {
                let others = group.members(&program.mesh, rank).into_iter().filter(|&other| other != rank);
                others.filter_map(|other| place(other, channel.clone())).collect()
            }
            Channel::To(peer) => opposite(peer, Channel::From).into_iter().collect(),
            Channel::From(peer) => opposite(peer, Channel::To).into_iter().collect(),
        }
    }
}

impl ListExchanges {
    fn of(stage: &StageProgram) -> Self {
        let mut last_of_stream = HashMap::new();
        let mut met: HashMap<Channel, usize> = HashMap::new();
        let mut result = Self { predecessors: Vec::new(), meetings: Vec::new(), places: HashMap::new() };
        for (index, instruction) in stage.instructions.iter().enumerate() {
            let id = InstructionId(index as u32);
            result.predecessors.push(last_of_stream.insert(instruction.stream, id));
            let meeting = channel(stage, instruction).map(|channel| {
                let count = met.entry(channel.clone()).or_default();
                *count += 1;
                Meeting { channel, ordinal: *count }
            });
            if let Some(meeting) = &meeting {
                result.places.insert(meeting.clone(), id);
            }
            result.meetings.push(meeting);
        }
        result
    }
}

fn channel(stage: &StageProgram, instruction: &Instruction) -> Option<Channel> {
    match *instruction.operation {
        Operation::Collective { group, .. } => stage.groups.get(group.0 as usize).cloned().map(Channel::Group),
        Operation::Send { peer, .. } => Some(Channel::To(peer)),
        Operation::Receive { peer, .. } => Some(Channel::From(peer)),
        Operation::Compute { .. } | Operation::Load { .. } | Operation::Copy { .. } => None,
    }
}

fn is_on_compute_stream(stage: &StageProgram, id: InstructionId) -> bool {
    let stream = stage.instructions.get(id.0 as usize).and_then(|one| stage.streams.get(one.stream.0 as usize));
    stream == Some(&Stream::Compute)
}

/// A timeline's spans in the order of the list; those of unknown instructions are left out.
fn by_instruction(stage: &StageProgram, timeline: &RankTimeline) -> Vec<Option<Span>> {
    let mut spans = vec![None; stage.instructions.len()];
    for span in &timeline.spans {
        if let Some(place) = spans.get_mut(span.instruction.0 as usize) {
            *place = Some(*span);
        }
    }
    spans
}

/// One instruction's span: at its place in the list, or wherever an incomplete timeline has it.
fn span_of(timeline: &RankTimeline, id: InstructionId) -> Option<Span> {
    let at_its_place = timeline.spans.get(id.0 as usize).filter(|span| span.instruction == id);
    at_its_place.or_else(|| timeline.spans.iter().find(|span| span.instruction == id)).copied()
}
