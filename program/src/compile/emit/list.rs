//! The builder of one instruction list: buffers, names, streams, groups, peers and instructions.
//!
//! It knows nothing of tensors, placements or buckets. It places nothing in memory, and it finds no
//! dependencies: later passes do both.

use crate::collective::{Collective, CollectiveAlgorithm, CollectiveRole};
use crate::mesh::Group;
use crate::program::{
    Buffer, BufferId, BufferRole, Few, GroupId, Instruction, MemoryKind, Metric, Operation, Peer, PeerId, Phase, ScheduledPass,
    StageProgram, StateContents, Stream, index_or_push,
};
use crate::schedule::Task;
use foretell_models::Kernel;
use foretell_units::{Bytes, DataType};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The label of an instruction: the operator, tensor or bucket and the micro-batch that it belongs
/// to, and its phase.
#[derive(Clone, Copy)]
pub(super) struct Label<'a> {
    /// The name of the operator, tensor or bucket.
    pub(super) name: &'a str,
    /// `None` for instructions that belong to the whole step.
    pub(super) micro_batch: Option<usize>,
    pub(super) phase: Phase,
}

impl<'a> Label<'a> {
    /// The label of an instruction that belongs to no micro-batch.
    pub(super) fn of_step(name: &'a str, phase: Phase) -> Self {
        Self { name, micro_batch: None, phase }
    }
}

/// An instruction list under construction.
pub(super) struct ListBuilder {
    program: StageProgram,
    /// The index of each name in [`StageProgram::names`].
    name_indices: FxHashMap<String, u32>,
    /// The algorithm of all-reduces.
    all_reduce: CollectiveAlgorithm,
}

impl ListBuilder {
    /// An empty list of `stage` with the peers `peers`.
    pub(super) fn new(stage: usize, peers: Vec<Peer>, all_reduce: CollectiveAlgorithm) -> Self {
        let program = StageProgram::empty(stage, peers);
        Self { program, name_indices: FxHashMap::default(), all_reduce }
    }

    pub(super) fn finish(self) -> StageProgram {
        self.program
    }

    /// The list itself, for copying whole runs of instructions and buffers.
    pub(super) fn program_mut(&mut self) -> &mut StageProgram {
        &mut self.program
    }

    /// The number of instructions so far.
    pub(super) fn len(&self) -> u32 {
        self.program.instructions.len() as u32
    }

    pub(super) fn buffer(&self, id: BufferId) -> &Buffer {
        self.program.buffer(id)
    }

    pub(super) fn elements(&self, id: BufferId) -> usize {
        self.buffer(id).shape.iter().product()
    }

    fn buffer_mut(&mut self, id: BufferId) -> &mut Buffer {
        &mut self.program.buffers[id.0 as usize]
    }

    pub(super) fn set_role(&mut self, id: BufferId, role: BufferRole) {
        self.buffer_mut(id).role = role;
    }

    pub(super) fn set_memory(&mut self, id: BufferId, memory: MemoryKind) {
        self.buffer_mut(id).memory = memory;
    }

    pub(super) fn set_state(&mut self, id: BufferId, state: StateContents) {
        self.buffer_mut(id).state = Some(Box::new(state));
    }

    /// Adds a buffer of the device's memory whose contents do not outlive the step.
    pub(super) fn add_buffer(
        &mut self,
        name: &str,
        role: BufferRole,
        shape: impl Into<Arc<[usize]>>,
        data_type: DataType,
    ) -> BufferId {
        let shape = shape.into();
        let bytes = data_type.size() * shape.iter().product::<usize>() as u64;
        self.program.buffers.push(Buffer {
            name: name.into(),
            role,
            shape,
            data_type,
            parent: None,
            memory: MemoryKind::Device,
            offset: Bytes::ZERO,
            bytes,
            persistent: false,
            lifetime: None,
            state: None,
        });
        BufferId(self.program.buffers.len() as u32 - 1)
    }

    /// Adds a buffer with the shape and number format of another.
    pub(super) fn add_buffer_like(&mut self, name: &str, role: BufferRole, like: BufferId) -> BufferId {
        let (shape, data_type) = (self.buffer(like).shape.clone(), self.buffer(like).data_type);
        self.add_buffer(name, role, shape, data_type)
    }

    /// Adds a buffer that keeps its contents from step to step.
    pub(super) fn add_persistent(&mut self, name: &str, role: BufferRole, shape: Vec<usize>, data_type: DataType) -> BufferId {
        let id = self.add_buffer(name, role, shape, data_type);
        self.buffer_mut(id).persistent = true;
        id
    }

    /// Adds a view: a part of `parent` that starts at its element `start`. Until the parent has a
    /// place in the arena, the view's offset is relative to the parent.
    pub(super) fn add_view(&mut self, name: &str, parent: BufferId, start: usize, shape: Vec<usize>) -> BufferId {
        let whole = self.buffer(parent);
        let (role, data_type, persistent, memory) = (whole.role, whole.data_type, whole.persistent, whole.memory);
        // A view of a view becomes a view of the buffer that has a place.
        let (root, root_offset) = match whole.parent {
            Some(root) => (root, whole.offset),
            None => (parent, Bytes::ZERO),
        };
        let id = self.add_buffer(name, role, shape, data_type);
        let view = self.buffer_mut(id);
        (view.persistent, view.memory) = (persistent, memory);
        view.parent = Some(root);
        view.offset = root_offset + data_type.size() * start as u64;
        id
    }

    /// The id of a group, added if it is new.
    pub(super) fn group(&mut self, group: Group) -> GroupId {
        GroupId(index_or_push(&mut self.program.groups, group))
    }

    /// The id of the peer at the same position in another stage, which has the same mesh.
    pub(super) fn opposite_peer(&mut self, stage: usize) -> PeerId {
        self.peer(Peer { stage, ranks: None })
    }

    /// The id of a peer, added if it is new.
    pub(super) fn peer(&mut self, peer: Peer) -> PeerId {
        PeerId(index_or_push(&mut self.program.peers, peer))
    }

    pub(super) fn add_metric(&mut self, metric: Metric) {
        self.program.metrics.push(metric);
    }

    /// Ends a pass that began when the list had `first` instructions.
    pub(super) fn end_pass(&mut self, task: Task, first: u32) {
        let instructions = first..self.len();
        self.program.passes.push(ScheduledPass { task, instructions });
    }

    /// Appends an instruction to the stream of its operation.
    pub(super) fn push(&mut self, label: Label<'_>, operation: Operation, reads: &[BufferId], writes: &[BufferId]) {
        let stream = match &operation {
            Operation::Compute { .. } | Operation::Traced { .. } => Stream::Compute,
            Operation::Load { .. } => Stream::Load,
            Operation::Collective { group, .. } => Stream::Group(*group),
            Operation::Send { peer, .. } => Stream::SendTo(*peer),
            Operation::Receive { peer, .. } => Stream::ReceiveFrom(*peer),
            Operation::Copy { to, .. } => Stream::CopyTo(*to),
            Operation::Save { .. } => Stream::CopyTo(MemoryKind::Host),
            Operation::Write { .. } => Stream::Storage,
        };
        let stream = self.program.stream_id(stream);
        let name = self.name(label.name);
        self.program.instructions.push(Instruction {
            name,
            operation: Arc::new(operation),
            stream,
            after: Few::new(),
            reads: Few::from_slice(reads),
            writes: Few::from_slice(writes),
            micro_batch: label.micro_batch.map(|index| index as u32),
            phase: label.phase,
        });
    }

    fn name(&mut self, name: &str) -> u32 {
        if let Some(&known) = self.name_indices.get(name) {
            return known;
        }
        let index = self.program.names.len() as u32;
        self.program.names.push(name.into());
        self.name_indices.insert(name.into(), index);
        index
    }

    /// Appends a kernel that overwrites its outputs.
    pub(super) fn compute(&mut self, label: Label<'_>, kernel: Kernel, reads: &[BufferId], writes: &[BufferId]) {
        self.compute_in_group(label, kernel, None, reads, writes);
    }

    /// Appends a kernel that depends on the rank's index in a group.
    pub(super) fn compute_in_group(
        &mut self,
        label: Label<'_>,
        kernel: Kernel,
        group: Option<GroupId>,
        reads: &[BufferId],
        writes: &[BufferId],
    ) {
        self.push(label, Operation::Compute { kernel, accumulate: false, group }, reads, writes);
    }

    /// Appends a collective from one buffer to another. Its size is that of the larger one.
    pub(super) fn collective(
        &mut self,
        label: Label<'_>,
        kind: Collective,
        role: CollectiveRole,
        group: Group,
        [from, to]: [BufferId; 2],
    ) {
        let bytes = self.buffer(from).bytes.max(self.buffer(to).bytes);
        let data_type = self.buffer(from).data_type;
        let algorithm = if kind == Collective::AllReduce { self.all_reduce } else { CollectiveAlgorithm::Automatic };
        let operation = Operation::Collective { kind, group: self.group(group), bytes, data_type, role, algorithm };
        self.push(label, operation, &[from], &[to]);
    }

    /// Appends a collective of parameters or gradients that belongs to no micro-batch.
    pub(super) fn collective_of_step(
        &mut self,
        name: &str,
        kind: Collective,
        group: Group,
        buffers: [BufferId; 2],
        phase: Phase,
    ) {
        let role = if kind == Collective::AllGather { CollectiveRole::Parameters } else { CollectiveRole::Gradients };
        self.collective(Label::of_step(name, phase), kind, role, group, buffers);
    }

    /// Appends an all-reduce in place that belongs to no micro-batch.
    pub(super) fn all_reduce_of_step(&mut self, name: &str, group: Group, buffer: BufferId) {
        self.collective_of_step(name, Collective::AllReduce, group, [buffer, buffer], Phase::Update);
    }

    pub(super) fn send(&mut self, label: Label<'_>, peer: PeerId, buffer: BufferId) {
        let operation = Operation::Send { peer, bytes: self.buffer(buffer).bytes };
        self.push(label, operation, &[buffer], &[]);
    }

    pub(super) fn receive(&mut self, label: Label<'_>, peer: PeerId, buffer: BufferId) {
        let operation = Operation::Receive { peer, bytes: self.buffer(buffer).bytes };
        self.push(label, operation, &[], &[buffer]);
    }

    /// Appends a copy of a whole buffer between the device's and the host's memory.
    pub(super) fn copy(&mut self, label: Label<'_>, from: BufferId, to: BufferId) {
        let target = self.buffer(to);
        let operation = Operation::Copy { to: target.memory, bytes: target.bytes };
        self.push(label, operation, &[from], &[to]);
    }
}
