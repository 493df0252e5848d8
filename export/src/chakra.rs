//! MLCommons Chakra execution traces: a graph of nodes for each rank. The schema is `schema/protobuf/et_def.proto` of
//! `mlcommons/chakra` (commit 6dc63e1); what readers make of it was read in ASTRA-sim 2's `Workload.cc` and `HardwareResource.cc`
//! (`astra-sim/astra-sim`). Chakra: Sridharan et al. 2023, <https://arxiv.org/abs/2305.14516>.
//!
//! A file has the length and the bytes of a `GlobalMetadata`, then of each `Node`. Where the schema leaves room:
//!
//! - **Dependencies** are all in `data_deps`, those on the instruction before in the same stream in `ctrl_deps` as well: feeders follow the
//!   first, and some only these. Both always point back.
//! - **One communication at a time.** ASTRA-sim lets a rank have one collective or send in flight, and takes whichever is ready. Two ranks
//!   that take the collectives of two groups in different order would wait for each other for ever, so a rank's collectives and
//!   sends depend on each other in the order of the Program's list, in which one stream could run them all.
//! - **Time** is whole microseconds there. Kernels are rounded so that their sum is right to one microsecond; the exact time
//!   is the attribute `foretold_nanoseconds`.
//! - **An all-gather's size** is what one member brings (ASTRA-sim multiplies), every other collective's the whole tensor.
//! - **A shift** (everyone to the next) has no type there: it is a send and a receive.
//! - **Reading samples** is computation of the host (`is_cpu_op`).

use crate::error::ExportError;
use crate::wire::Message;
use foretell_program::{
    Collective, Group, Instruction, InstructionId, Operation, Origin, Program, Rank, Span, StageProgram, StreamId, Timeline,
};
use foretell_units::Picoseconds;
use std::collections::BTreeMap;

/// The version of the schema that other writers of it state.
const SCHEMA: &str = "0.0.4";

/// `NodeType` of the schema.
#[derive(Clone, Copy)]
enum NodeType {
    Compute = 4,
    Send = 5,
    Receive = 6,
    Collective = 7,
}

/// The traces of a Program, with the times of one step of it.
#[derive(Debug)]
pub struct Chakra<'a> {
    program: &'a Program,
    timeline: &'a Timeline,
    /// Each communicator's members. Its name is its place here and one more: ASTRA-sim takes 0 for everyone.
    communicators: Vec<Vec<Rank>>,
    /// By rank and by group of its list: the communicator.
    of_rank: Vec<Vec<usize>>,
    /// By list and by group: which of all distinct groups it is.
    kinds: Vec<Vec<usize>>,
    distinct_groups: usize,
}

impl<'a> Chakra<'a> {
    /// Finds who is in which communicator.
    ///
    /// # Errors
    /// [`ExportError::Unmatched`] where the timeline is not one of the Program.
    pub fn new(program: &'a Program, timeline: &'a Timeline) -> Result<Self, ExportError> {
        let ranks = || (0..program.mesh.world_size()).map(Rank);
        for rank in ranks() {
            let spans = timeline.rank(rank).map_or(0, |one| one.spans.len());
            let instructions = program.list_of(rank).instructions.len();
            if spans != instructions {
                return Err(ExportError::Unmatched { rank: rank.0, spans, instructions });
            }
        }
        let mut distinct: BTreeMap<&Group, usize> = BTreeMap::new();
        let mut number = |group| {
            let next = distinct.len();
            *distinct.entry(group).or_insert(next)
        };
        let kinds: Vec<Vec<usize>> = program.lists.iter().map(|list| list.groups.iter().map(&mut number).collect()).collect();
        let mut communicators: Vec<Vec<Rank>> = Vec::new();
        let mut known: BTreeMap<Vec<Rank>, usize> = BTreeMap::new();
        let mut communicator = |members: Vec<Rank>| {
            *known.entry(members).or_insert_with_key(|members| {
                communicators.push(members.clone());
                communicators.len() - 1
            })
        };
        let of_rank = ranks()
            .map(|rank| {
                let groups = program.list_of(rank).groups.iter();
                groups.map(|group| communicator(group.members(&program.mesh, rank))).collect()
            })
            .collect();
        Ok(Self { program, timeline, of_rank, distinct_groups: distinct.len(), communicators, kinds })
    }

    /// The communicators' members, as ASTRA-sim's `--comm-group-configuration` reads them: `{"1": [0, 1], ...}`.
    pub fn communicators(&self) -> String {
        let members = |ranks: &Vec<Rank>| {
            let ranks: Vec<String> = ranks.iter().map(|rank| rank.0.to_string()).collect();
            ranks.join(",")
        };
        let all = self.communicators.iter().enumerate();
        let all: Vec<String> = all.map(|(place, ranks)| format!("\"{}\":[{}]", place + 1, members(ranks))).collect();
        format!("{{{}}}", all.join(","))
    }

    /// One rank's trace: the contents of `NAME.RANK.et`.
    ///
    /// # Errors
    /// [`ExportError::Malformed`] where an instruction talks to nobody.
    pub fn trace(&self, rank: Rank) -> Result<Vec<u8>, ExportError> {
        let mut file = Vec::new();
        let times = match self.timeline.origin {
            Origin::Predicted => "foretold",
            Origin::Measured => "measured",
        };
        Message::default()
            .text(1, SCHEMA)
            .message(2, Value::Text("foretell".into()).named("writer"))
            .message(2, Value::Text(times.into()).named("times"))
            .write_delimited(&mut file);
        for node in self.nodes(rank)? {
            node.message().write_delimited(&mut file);
        }
        Ok(file)
    }

    fn nodes(&self, rank: Rank) -> Result<Vec<Node>, ExportError> {
        let list = self.program.list_of(rank);
        let spans = self.timeline.rank(rank).map_or(&[][..], |one| one.spans.as_slice());
        let mut writer = RankWriter {
            chakra: self,
            rank,
            list,
            nodes: Vec::with_capacity(list.instructions.len()),
            of_instruction: Vec::with_capacity(list.instructions.len()),
            last_of_stream: vec![None; list.streams.len()],
            last_communication: None,
            messages: BTreeMap::new(),
            collectives: vec![0; list.groups.len()],
            rounding: BTreeMap::new(),
        };
        for (instruction, span) in list.instructions.iter().zip(spans) {
            writer.add(instruction, span)?;
        }
        Ok(writer.nodes)
    }
}

/// A value of an attribute; each is a member of the schema's `oneof`.
enum Value {
    Double(f64),
    Int32(u32),
    Int64(u64),
    Uint64(u64),
    Bool(bool),
    Text(String),
}

impl Value {
    fn named(&self, name: &str) -> Message {
        let attribute = Message::default().text(1, name);
        match self {
            Value::Double(value) => attribute.double(3, *value),
            Value::Int32(value) => attribute.number(7, u64::from(*value)),
            Value::Int64(value) => attribute.number(9, *value),
            Value::Uint64(value) => attribute.number(13, *value),
            Value::Bool(value) => attribute.number(27, u64::from(*value)),
            Value::Text(value) => attribute.text(29, value),
        }
    }
}

/// A node of a trace.
struct Node {
    id: u64,
    name: String,
    node_type: NodeType,
    control: Vec<u64>,
    data: Vec<u64>,
    start_microseconds: u64,
    duration_microseconds: u64,
    attributes: Vec<(&'static str, Value)>,
}

impl Node {
    fn message(&self) -> Message {
        let node = Message::default()
            .number(1, self.id)
            .text(2, &self.name)
            .number(3, self.node_type as u64)
            .numbers(4, &self.control)
            .numbers(5, &self.data)
            .number_unless_zero(6, self.start_microseconds)
            .number_unless_zero(7, self.duration_microseconds);
        self.attributes.iter().fold(node, |node, (name, value)| node.message(10, value.named(name)))
    }
}

/// Makes the nodes of one rank.
struct RankWriter<'a> {
    chakra: &'a Chakra<'a>,
    rank: Rank,
    list: &'a StageProgram,
    nodes: Vec<Node>,
    /// The nodes that each instruction became, which must all have ended when it has.
    of_instruction: Vec<Vec<u64>>,
    last_of_stream: Vec<Option<InstructionId>>,
    last_communication: Option<u64>,
    /// Messages so far from one rank to another.
    messages: BTreeMap<(Rank, Rank), u32>,
    /// Collectives so far of each group.
    collectives: Vec<u32>,
    /// By stream, what its kernels took so far, and as it was rounded.
    rounding: BTreeMap<StreamId, (Picoseconds, u64)>,
}

const PICOSECONDS_A_MICROSECOND: u64 = 1_000_000;

impl RankWriter<'_> {
    fn add(&mut self, instruction: &Instruction, span: &Span) -> Result<(), ExportError> {
        let id = InstructionId(self.of_instruction.len() as u32);
        let nodes = match *instruction.operation {
            Operation::Compute { kernel, .. } => {
                let ops = Value::Int64(kernel.flops().value() as u64);
                let bytes = Value::Uint64(kernel.bytes(self.chakra.program.precision).count());
                let attributes = vec![("is_cpu_op", Value::Bool(false)), ("num_ops", ops), ("tensor_size", bytes)];
                vec![self.computation(instruction, span, attributes)]
            }
            Operation::Load { .. } => {
                let buffers = instruction.writes.iter().map(|&buffer| self.list.buffer(buffer).bytes.count());
                let bytes = Value::Uint64(buffers.sum());
                let attributes = vec![("is_cpu_op", Value::Bool(true)), ("num_ops", Value::Int64(0)), ("tensor_size", bytes)];
                vec![self.computation(instruction, span, attributes)]
            }
            Operation::Copy { bytes, .. } => {
                let bytes = Value::Uint64(bytes.count());
                let attributes = vec![("is_cpu_op", Value::Bool(false)), ("num_ops", Value::Int64(0)), ("tensor_size", bytes)];
                vec![self.computation(instruction, span, attributes)]
            }
            Operation::Collective { kind, group, bytes, .. } => {
                self.collective(instruction, span, kind, usize::from(group.0), bytes.count())?
            }
            Operation::Send { peer, bytes } => {
                let to = self.peer(usize::from(peer.0))?;
                let tag = self.message_tag(self.rank, to);
                vec![self.message(instruction, span, NodeType::Send, to, bytes.count(), tag)?]
            }
            Operation::Receive { peer, bytes } => {
                let from = self.peer(usize::from(peer.0))?;
                let tag = self.message_tag(from, self.rank);
                vec![self.message(instruction, span, NodeType::Receive, from, bytes.count(), tag)?]
            }
        };
        self.of_instruction.push(nodes);
        if let Some(last) = self.last_of_stream.get_mut(usize::from(instruction.stream.0)) {
            *last = Some(id);
        }
        Ok(())
    }

    fn computation(&mut self, instruction: &Instruction, span: &Span, attributes: Vec<(&'static str, Value)>) -> u64 {
        let (exact, rounded) = self.rounding.entry(instruction.stream).or_default();
        *exact += span.duration();
        let until = (exact.0 + PICOSECONDS_A_MICROSECOND / 2) / PICOSECONDS_A_MICROSECOND;
        let duration = until - *rounded;
        *rounded = until;
        let id = self.node(instruction, span, NodeType::Compute, attributes);
        if let Some(node) = self.nodes.last_mut() {
            node.duration_microseconds = duration;
        }
        id
    }

    fn collective(
        &mut self,
        instruction: &Instruction,
        span: &Span,
        kind: Collective,
        group: usize,
        bytes: u64,
    ) -> Result<Vec<u64>, ExportError> {
        let chakra = self.chakra;
        let communicator = chakra.of_rank.get(self.rank.0).and_then(|groups| groups.get(group));
        let Some((&communicator, nth)) = communicator.zip(self.collectives.get_mut(group)) else {
            return Err(self.malformed("its group is not in the list"));
        };
        let number = *nth;
        *nth += 1;
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
                let to = members[(own + 1) % members.len()];
                let from = members[(own + members.len() - 1) % members.len()];
                // Odd, so that it is no pipeline message's; the same at both ends, whose groups are of one kind.
                let kind = chakra.kinds[chakra.program.list_index(self.rank)][group];
                let tag = 2 * (number * chakra.distinct_groups as u32 + kind as u32) + 1;
                let send = self.message(instruction, span, NodeType::Send, to, bytes, tag)?;
                return Ok(vec![send, self.message(instruction, span, NodeType::Receive, from, bytes, tag)?]);
            }
        };
        let attributes = vec![
            ("is_cpu_op", Value::Bool(false)),
            ("comm_type", Value::Int64(code)),
            ("comm_size", Value::Int64(bytes)),
            ("pg_name", Value::Text((communicator + 1).to_string())),
        ];
        Ok(vec![self.node(instruction, span, NodeType::Collective, attributes)])
    }

    fn message(
        &mut self,
        instruction: &Instruction,
        span: &Span,
        node_type: NodeType,
        other: Rank,
        bytes: u64,
        tag: u32,
    ) -> Result<u64, ExportError> {
        if other == self.rank || other.0 >= self.chakra.of_rank.len() {
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
        Ok(self.node(instruction, span, node_type, attributes))
    }

    /// Adds a node that waits for what its instruction waits for.
    fn node(
        &mut self,
        instruction: &Instruction,
        span: &Span,
        node_type: NodeType,
        mut attributes: Vec<(&'static str, Value)>,
    ) -> u64 {
        // 0 is what a reader takes for an id that is not there.
        let id = self.nodes.len() as u64 + 1;
        let of = |instruction: &InstructionId| self.of_instruction.get(instruction.0 as usize).into_iter().flatten().copied();
        let last = self.last_of_stream.get(usize::from(instruction.stream.0)).copied().flatten();
        let control: Vec<u64> = last.iter().flat_map(of).collect();
        let mut data: Vec<u64> = control.iter().copied().chain(instruction.after.iter().flat_map(of)).collect();
        if let NodeType::Send | NodeType::Collective = node_type {
            data.extend(self.last_communication.replace(id));
        }
        data.sort_unstable();
        data.dedup();
        let nanoseconds = span.duration().0 as f64 / 1e3;
        attributes.push(("foretold_nanoseconds", Value::Double(nanoseconds)));
        let micro_batch = instruction.micro_batch.map_or(String::new(), |number| format!(" #{number}"));
        let name = format!("{} {}{micro_batch}", instruction.operation.kind(), self.list.name_of(instruction));
        let start_microseconds = span.start.0 / PICOSECONDS_A_MICROSECOND;
        // Readers find out themselves how long communication takes.
        self.nodes.push(Node { id, name, node_type, control, data, start_microseconds, duration_microseconds: 0, attributes });
        id
    }

    fn peer(&self, peer: usize) -> Result<Rank, ExportError> {
        let peer = self.list.peers.get(peer).map(|peer| peer.of(&self.chakra.program.mesh, self.rank));
        peer.ok_or_else(|| self.malformed("its peer is not in the list"))
    }

    /// The n-th message from one rank to another meets the n-th receive there.
    fn message_tag(&mut self, from: Rank, to: Rank) -> u32 {
        let count = self.messages.entry((from, to)).or_default();
        *count += 1;
        2 * (*count - 1)
    }

    fn malformed(&self, reason: &'static str) -> ExportError {
        ExportError::Malformed { rank: self.rank.0, instruction: self.of_instruction.len(), reason }
    }
}
