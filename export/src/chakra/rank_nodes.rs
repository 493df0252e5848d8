//! Turns the instructions of one rank into nodes.

use super::Chakra;
use super::node::{Attributes, Node, NodeType, Value};
use crate::error::ExportError;
use foretell_program::{Collective, Instruction, InstructionId, Operation, Rank, Span, StageProgram, StreamId};
use foretell_units::Picoseconds;
use std::collections::BTreeMap;

const PICOSECONDS_PER_MICROSECOND: u64 = 1_000_000;

/// The nodes of one rank so far.
pub(super) struct RankNodes<'a> {
    chakra: &'a Chakra<'a>,
    rank: Rank,
    list: &'a StageProgram,
    nodes: Vec<Node>,
    /// For each instruction so far, its nodes. The instruction has ended when all of them have.
    of_instruction: Vec<Vec<u64>>,
    last_of_stream: Vec<Option<InstructionId>>,
    /// Last collective or send.
    last_communication: Option<u64>,
    /// Number of messages so far, by sender and receiver.
    messages: BTreeMap<(Rank, Rank), u32>,
    /// Number of collectives so far, by group.
    collectives: Vec<u32>,
    /// By stream, the total duration of its computation so far, exact and in rounded microseconds.
    elapsed: BTreeMap<StreamId, (Picoseconds, u64)>,
}

impl<'a> RankNodes<'a> {
    /// Returns the nodes of a rank, in the order of its instructions.
    ///
    /// # Errors
    /// [`ExportError::Malformed`] if an instruction communicates with a peer or group that does not
    /// exist.
    pub(super) fn of(chakra: &'a Chakra<'a>, rank: Rank) -> Result<Vec<Node>, ExportError> {
        let list = chakra.program.list_of(rank);
        let spans = chakra.timeline.rank(rank).map_or(&[][..], |rank_timeline| rank_timeline.spans.as_slice());
        let mut nodes = Self {
            chakra,
            rank,
            list,
            nodes: Vec::with_capacity(list.instructions.len()),
            of_instruction: Vec::with_capacity(list.instructions.len()),
            last_of_stream: vec![None; list.streams.len()],
            last_communication: None,
            messages: BTreeMap::new(),
            collectives: vec![0; list.groups.len()],
            elapsed: BTreeMap::new(),
        };
        for (instruction, span) in list.instructions.iter().zip(spans) {
            nodes.add_instruction(instruction, span)?;
        }
        Ok(nodes.nodes)
    }

    fn add_instruction(&mut self, instruction: &Instruction, span: &Span) -> Result<(), ExportError> {
        let id = InstructionId(self.of_instruction.len() as u32);
        let nodes = match *instruction.operation {
            Operation::Compute { kernel, .. } => {
                let flops = kernel.flops().value() as u64;
                let bytes = kernel.bytes(self.chakra.program.precision).count();
                vec![self.add_computation(instruction, span, false, flops, bytes)]
            }
            Operation::Load { .. } => {
                let bytes = instruction.writes.iter().map(|&buffer| self.list.buffer(buffer).bytes.count()).sum();
                vec![self.add_computation(instruction, span, true, 0, bytes)]
            }
            Operation::Traced { bytes, .. }
            | Operation::Copy { bytes, .. }
            | Operation::Save { bytes, .. }
            | Operation::Write { bytes } => {
                vec![self.add_computation(instruction, span, false, 0, bytes.count())]
            }
            Operation::Collective { kind, group, bytes, .. } => {
                self.add_collective(instruction, span, kind, usize::from(group.0), bytes.count())?
            }
            Operation::Send { peer, bytes } => {
                let receiver = self.peer(usize::from(peer.0))?;
                let tag = self.next_message_tag(self.rank, receiver);
                vec![self.add_message(instruction, span, NodeType::Send, receiver, bytes.count(), tag)?]
            }
            Operation::Receive { peer, bytes } => {
                let sender = self.peer(usize::from(peer.0))?;
                let tag = self.next_message_tag(sender, self.rank);
                vec![self.add_message(instruction, span, NodeType::Receive, sender, bytes.count(), tag)?]
            }
        };
        self.of_instruction.push(nodes);
        if let Some(last) = self.last_of_stream.get_mut(usize::from(instruction.stream.0)) {
            *last = Some(id);
        }
        Ok(())
    }

    fn add_computation(&mut self, instruction: &Instruction, span: &Span, on_host: bool, flops: u64, bytes: u64) -> u64 {
        let (exact, rounded) = self.elapsed.entry(instruction.stream).or_default();
        *exact += span.duration();
        let end = (exact.0 + PICOSECONDS_PER_MICROSECOND / 2) / PICOSECONDS_PER_MICROSECOND;
        let duration = end - *rounded;
        *rounded = end;
        let attributes =
            vec![("is_cpu_op", Value::Bool(on_host)), ("num_ops", Value::Int64(flops)), ("tensor_size", Value::Uint64(bytes))];
        let id = self.add_node(instruction, span, NodeType::Compute, attributes);
        if let Some(node) = self.nodes.last_mut() {
            node.duration_microseconds = duration;
        }
        id
    }

    fn add_collective(
        &mut self,
        instruction: &Instruction,
        span: &Span,
        kind: Collective,
        group: usize,
        bytes: u64,
    ) -> Result<Vec<u64>, ExportError> {
        let chakra = self.chakra;
        let communicator = chakra.communicator_of.get(self.rank.0).and_then(|groups| groups.get(group));
        let Some((&communicator, count)) = communicator.zip(self.collectives.get_mut(group)) else {
            return Err(self.malformed("its group is not in the list"));
        };
        let index = *count;
        *count += 1;
        let members = &chakra.communicators[communicator];
        let (code, bytes) = match kind {
            Collective::AllReduce => (0, bytes),
            Collective::AllGather => (2, bytes / members.len().max(1) as u64),
            Collective::AllToAll => (6, bytes),
            Collective::ReduceScatter => (7, bytes),
            Collective::Shift => {
                let Some(own) = members.iter().position(|&member| member == self.rank) else {
                    return Err(self.malformed("the rank is not in its own group"));
                };
                let receiver = members[(own + 1) % members.len()];
                let sender = members[(own + members.len() - 1) % members.len()];
                // Tags of shifts are odd and those of messages between stages are even. Both ends
                // compute the same tag, since the group has one number in all lists.
                let number = chakra.group_numbers[chakra.program.list_index(self.rank)][group];
                let tag = 2 * (index * chakra.distinct_groups as u32 + number as u32) + 1;
                let send = self.add_message(instruction, span, NodeType::Send, receiver, bytes, tag)?;
                return Ok(vec![send, self.add_message(instruction, span, NodeType::Receive, sender, bytes, tag)?]);
            }
        };
        let attributes = vec![
            ("is_cpu_op", Value::Bool(false)),
            ("comm_type", Value::Int64(code)),
            ("comm_size", Value::Int64(bytes)),
            ("pg_name", Value::Text((communicator + 1).to_string())),
        ];
        Ok(vec![self.add_node(instruction, span, NodeType::Collective, attributes)])
    }

    fn add_message(
        &mut self,
        instruction: &Instruction,
        span: &Span,
        node_type: NodeType,
        other: Rank,
        bytes: u64,
        tag: u32,
    ) -> Result<u64, ExportError> {
        if other == self.rank || other.0 >= self.chakra.communicator_of.len() {
            return Err(self.malformed("its message has no other end"));
        }
        let (source, destination) = if let NodeType::Send = node_type { (self.rank, other) } else { (other, self.rank) };
        let attributes = vec![
            ("is_cpu_op", Value::Bool(false)),
            ("comm_size", Value::Int64(bytes)),
            ("comm_src", Value::Int32(source.0 as u32)),
            ("comm_dst", Value::Int32(destination.0 as u32)),
            ("comm_tag", Value::Int32(tag)),
        ];
        Ok(self.add_node(instruction, span, node_type, attributes))
    }

    /// Adds a node with the dependencies of its instruction. Returns its id.
    fn add_node(&mut self, instruction: &Instruction, span: &Span, node_type: NodeType, mut attributes: Attributes) -> u64 {
        // Readers take the id 0 for a missing one.
        let id = self.nodes.len() as u64 + 1;
        let nodes_of =
            |instruction: &InstructionId| self.of_instruction.get(instruction.0 as usize).into_iter().flatten().copied();
        let last = self.last_of_stream.get(usize::from(instruction.stream.0)).copied().flatten();
        let control: Vec<u64> = last.iter().flat_map(nodes_of).collect();
        let mut data: Vec<u64> = control.iter().copied().chain(instruction.after.iter().flat_map(nodes_of)).collect();
        if let NodeType::Send | NodeType::Collective = node_type {
            data.extend(self.last_communication.replace(id));
        }
        data.sort_unstable();
        data.dedup();
        let nanoseconds = span.duration().0 as f64 / 1e3;
        attributes.push(("foretold_nanoseconds", Value::Double(nanoseconds)));
        let micro_batch = instruction.micro_batch.map_or(String::new(), |number| format!(" #{number}"));
        let name = format!("{} {}{micro_batch}", instruction.operation.kind(), self.list.name_of(instruction));
        let start_microseconds = span.start.0 / PICOSECONDS_PER_MICROSECOND;
        self.nodes.push(Node { id, name, node_type, control, data, start_microseconds, duration_microseconds: 0, attributes });
        id
    }

    fn peer(&self, peer: usize) -> Result<Rank, ExportError> {
        let peer = self.list.peers.get(peer).map(|peer| peer.of(&self.chakra.program.mesh, self.rank));
        peer.ok_or_else(|| self.malformed("its peer is not in the list"))
    }

    /// Returns the tag of the next message from one rank to another. Both ends count, so the n-th
    /// send meets the n-th receive.
    fn next_message_tag(&mut self, sender: Rank, receiver: Rank) -> u32 {
        let count = self.messages.entry((sender, receiver)).or_default();
        *count += 1;
        2 * (*count - 1)
    }

    fn malformed(&self, reason: &'static str) -> ExportError {
        ExportError::Malformed { rank: self.rank.0, instruction: self.of_instruction.len(), reason }
    }
}
