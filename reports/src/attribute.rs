//! Attributes every instant of a rank's step to one instruction and one of three reasons.
//!
//! The compute stream is the rank's clock. While a kernel runs, the time is that kernel's work.
//! While none runs, a walk starts at the next kernel and goes back to its dependency that finished
//! last, then to that one's last dependency, and so on, to the time at which the compute stream
//! became idle. So communication counts only where it is exposed, and the pieces of a rank add up
//! to the step exactly. This module must not know kinds of time, causes or predictions.

use foretell_program::{
    Group, Instruction, InstructionId, Operation, PeerId, Program, Rank, RankTimeline, Span, StageProgram, Stream, Timeline,
};
use foretell_units::Picoseconds;
use std::collections::HashMap;

/// The reason why a piece of the step passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Reason {
    /// The instruction ran.
    Work,
    /// Another rank had not yet arrived at the same collective or message, or at the end of the
    /// step.
    Wait,
    /// Nothing ran and no rank was awaited: the host was launching, switching streams, or busy.
    Host,
}

/// A part of a rank's step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The instruction that ran or was about to run; `None` after the last one.
    pub instruction: Option<InstructionId>,
    pub reason: Reason,
    pub start: Picoseconds,
    pub duration: Picoseconds,
}

/// Splits a rank's step into pieces that add up to [`Timeline::step`]. Ignores spans of
/// instructions that the Program does not have.
pub(crate) fn attribute(program: &Program, communications: &Communications, timeline: &Timeline, rank: Rank) -> Vec<Piece> {
    let step = timeline.step();
    let Some(own) = timeline.rank(rank) else { return Vec::new() };
    let stage = program.list_of(rank);
    let end = own.end;
    let mut walk = Walk { program, communications, timeline, rank, stage, spans: by_instruction(stage, own), pieces: Vec::new() };

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

/// The duration of a collective, message or load, hidden or not: from the arrival of the last
/// participant to its end.
pub(crate) fn active_time(
    program: &Program,
    communications: &Communications,
    timeline: &Timeline,
    rank: Rank,
    id: InstructionId,
) -> Picoseconds {
    let Some(span) = timeline.rank(rank).and_then(|own| span_of(own, id)) else { return Picoseconds::ZERO };
    let arrival = communications.last_arrival(program, timeline, rank, id).unwrap_or_default();
    span.end.saturating_sub(span.start.max(arrival))
}

/// One rank's spans, and the pieces found so far.
struct Walk<'a> {
    program: &'a Program,
    communications: &'a Communications,
    timeline: &'a Timeline,
    rank: Rank,
    stage: &'a StageProgram,
    spans: Vec<Option<Span>>,
    pieces: Vec<Piece>,
}

impl Walk<'_> {
    fn add(&mut self, instruction: Option<InstructionId>, reason: Reason, from: Picoseconds, to: Picoseconds) {
        if to > from {
            self.pieces.push(Piece { instruction, reason, start: from, duration: to.saturating_sub(from) });
        }
    }

    /// Explains the compute stream's idle time before an instruction, or before the end of the
    /// step.
    fn explain_gap(&mut self, from: Picoseconds, to: Picoseconds, before: Option<InstructionId>) {
        let (mut until, mut blocked) = (to, before);
        // A dependency comes earlier in the list than its dependent, so the walk ends.
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

    /// Attributes the time from `from` to `to` to an instruction: as [`Reason::Wait`] until the
    /// last other participant arrived, then as `otherwise`.
    fn explain(&mut self, from: Picoseconds, to: Picoseconds, instruction: Option<InstructionId>, otherwise: Reason) {
        let arrival = instruction
            .filter(|_| to > from)
            .and_then(|id| self.communications.last_arrival(self.program, self.timeline, self.rank, id));
        let met = arrival.map_or(from, |arrival| arrival.clamp(from, to.max(from)));
        self.add(instruction, Reason::Wait, from, met);
        self.add(instruction, otherwise, met, to);
    }

    /// The dependency of `blocked` that finished last; for the end of the step, the last span.
    fn finished_last(&self, blocked: Option<InstructionId>) -> Option<(InstructionId, Span)> {
        let latest = |ended: &(InstructionId, Span)| (ended.1.end, ended.0);
        match blocked {
            None => self.all_spans().max_by_key(latest),
            Some(id) => {
                let instruction = self.stage.instructions.get(id.0 as usize)?;
                let in_stream = self.communications.predecessor(self.program.list_index(self.rank), id);
                let before = instruction.after.iter().copied().chain(in_stream).filter(|&before| before < id);
                before.filter_map(|before| Some((before, self.span(before)?))).max_by_key(latest)
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

/// Which instructions of different ranks take part in the same collective or message. Found once
/// for a Program and valid for every Timeline of it.
pub(crate) struct Communications {
    lists: Vec<ListCommunications>,
}

struct ListCommunications {
    /// The previous instruction in the same stream, indexed by instruction.
    predecessors: Vec<Option<InstructionId>>,
    /// The collective or message of each communicating instruction, indexed by instruction.
    meetings: Vec<Option<Meeting>>,
    /// The instruction of each collective or message.
    instructions: HashMap<Meeting, InstructionId>,
}

/// The `ordinal`-th use of a channel. All participants count the same number, since a channel keeps
/// its order.
#[derive(Clone, PartialEq, Eq, Hash)]
struct Meeting {
    channel: Channel,
    ordinal: usize,
}

#[derive(Clone, PartialEq, Eq, Hash)]
enum Channel {
    Group(Group),
    /// Messages to a peer of the list.
    To(PeerId),
    /// Messages from a peer of the list.
    From(PeerId),
}

impl Communications {
    pub(crate) fn of(program: &Program) -> Self {
        Self { lists: program.lists.iter().map(ListCommunications::of).collect() }
    }

    fn predecessor(&self, list: usize, id: InstructionId) -> Option<InstructionId> {
        self.lists.get(list)?.predecessors.get(id.0 as usize).copied().flatten()
    }

    /// When the last other participant arrived; `None` if the instruction does not communicate.
    fn last_arrival(&self, program: &Program, timeline: &Timeline, rank: Rank, id: InstructionId) -> Option<Picoseconds> {
        let partners = self.partners(program, rank, id);
        partners.into_iter().filter_map(|(rank, id)| span_of(timeline.rank(rank)?, id)).map(|span| span.start).max()
    }

    /// The other participants of an instruction's collective or message, each with its instruction.
    fn partners(&self, program: &Program, rank: Rank, id: InstructionId) -> Vec<(Rank, InstructionId)> {
        let own = program.list_index(rank);
        let meeting = |list: usize| self.lists.get(list)?.meetings.get(id.0 as usize)?.as_ref();
        let Some(Meeting { channel, ordinal }) = meeting(own) else { return Vec::new() };
        let place = |other: Rank, channel: Channel| {
            let list = self.lists.get(program.list_index(other))?;
            Some((other, *list.instructions.get(&Meeting { channel, ordinal: *ordinal })?))
        };
        let opposite = |peer: &PeerId, as_seen_there: fn(PeerId) -> Channel| {
            let other = program.lists[own].peers.get(peer.0 as usize)?.of(&program.mesh, rank);
            let peers = program.list_of(other).peers.iter().enumerate();
            // A list may have the same peer twice: for sends and for receives.
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

impl ListCommunications {
    fn of(stage: &StageProgram) -> Self {
        let mut last_of_stream = HashMap::new();
        let mut met: HashMap<Channel, usize> = HashMap::new();
        let mut result = Self { predecessors: Vec::new(), meetings: Vec::new(), instructions: HashMap::new() };
        for (index, instruction) in stage.instructions.iter().enumerate() {
            let id = InstructionId(index as u32);
            result.predecessors.push(last_of_stream.insert(instruction.stream, id));
            let meeting = channel(stage, instruction).map(|channel| {
                let count = met.entry(channel.clone()).or_default();
                *count += 1;
                Meeting { channel, ordinal: *count }
            });
            if let Some(meeting) = &meeting {
                result.instructions.insert(meeting.clone(), id);
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
        Operation::Compute { .. }
        | Operation::Traced { .. }
        | Operation::Load { .. }
        | Operation::Copy { .. }
        | Operation::Save { .. }
        | Operation::Write { .. } => None,
    }
}

fn is_on_compute_stream(stage: &StageProgram, id: InstructionId) -> bool {
    let stream = stage.instructions.get(id.0 as usize).and_then(|instruction| stage.streams.get(instruction.stream.0 as usize));
    stream == Some(&Stream::Compute)
}

/// A timeline's spans, indexed by instruction. Ignores spans of unknown instructions.
fn by_instruction(stage: &StageProgram, timeline: &RankTimeline) -> Vec<Option<Span>> {
    let mut spans = vec![None; stage.instructions.len()];
    for span in &timeline.spans {
        if let Some(place) = spans.get_mut(span.instruction.0 as usize) {
            *place = Some(*span);
        }
    }
    spans
}

/// One instruction's span. In a complete timeline its index is the instruction's; an incomplete one
/// is searched.
fn span_of(timeline: &RankTimeline, id: InstructionId) -> Option<Span> {
    let at_its_place = timeline.spans.get(id.0 as usize).filter(|span| span.instruction == id);
    at_its_place.or_else(|| timeline.spans.iter().find(|span| span.instruction == id)).copied()
}
