//! The Program of a traced step: an instruction for each event that runs on a stream, and a buffer
//! for each allocation.
//!
//! Its instructions are in the order of [`TracedJob::emit`], one for each event for which
//! [`RankEvent::is_instruction`] is true: whoever times the events has the spans. Operators name no
//! buffers, and the framework's allocator places these while the step runs, so every offset is 0.

use super::event::{AllocationStream, Contents, RankEvent, TracedCollective, TracedPhase};
use super::{HOST_COPY, TracedJob};
use crate::collective::{Collective, CollectiveAlgorithm, CollectiveRole};
use crate::mesh::{Axis, Group};
use crate::program::{
    Buffer, BufferRole, Few, GroupId, Instruction, InstructionId, MemoryKind, Operation, Phase, Program, StageProgram, Stream,
};
use foretell_models::operator_tables::{TableError, TracedOperator};
use foretell_units::{Bytes, DataType};
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// The name of an update by the host.
const HOST_UPDATE: &str = "update by the host";

/// The group of all ranks.
const EVERYONE: GroupId = GroupId(0);

impl TracedJob {
    /// The Program of one step. Mesh, formats, samples and FLOPs are those of `own`, our compiler's
    /// Program of the same plan.
    ///
    /// # Errors
    /// [`TableError`] if the table needs a size that is not given.
    pub fn step_program(&self, own: &Program) -> Result<Program, TableError> {
        let mut builder = Builder::new(self, own)?;
        self.emit(1, |event| builder.add(event))?;
        let list = builder.finish();
        Ok(Program { lists: vec![list], list_of_rank: vec![0; own.mesh.world_size()], ..own.clone() })
    }
}

struct Builder {
    list: StageProgram,
    values: Vec<f64>,
    precision: DataType,
    names: FxHashMap<String, u32>,
    /// The operation of each operator of the table. Only looked up, so the order does not matter.
    operators: FxHashMap<*const TracedOperator, Arc<Operation>>,
    phase: TracedPhase,
    micro_batches: u32,
    part: String,
    /// The kernel before, and the last collective or copy beside the kernels.
    kernel: Option<InstructionId>,
    beside: Option<(InstructionId, Stream)>,
    /// The last collective of each kind, which kernels may wait for.
    collectives: FxHashMap<TracedCollective, InstructionId>,
    /// What the next kernel waits for.
    awaited: Few<InstructionId>,
    /// The buffers that are allocated now, by the allocation's number.
    live: FxHashMap<u64, usize>,
    /// Their bytes.
    now: u64,
    /// The kernel before, by name.
    latest: String,
}

impl Builder {
    fn new(job: &TracedJob, own: &Program) -> Result<Self, TableError> {
        let axes = Axis::WITHIN_STAGE.into_iter().filter(|&axis| own.mesh.stage(0).size(axis) > 1);
        let list = StageProgram { groups: vec![Group::over(axes.collect())], ..StageProgram::empty(0, Vec::new()) };
        Ok(Self {
            list,
            values: job.table.values(&job.sizes)?,
            precision: own.precision,
            names: FxHashMap::default(),
            operators: FxHashMap::default(),
            phase: TracedPhase::Idle,
            micro_batches: 0,
            part: String::new(),
            kernel: None,
            beside: None,
            collectives: FxHashMap::default(),
            awaited: Few::new(),
            live: FxHashMap::default(),
            now: 0,
            latest: String::new(),
        })
    }

    fn add(&mut self, event: RankEvent<'_>) {
        let before = self.list.instructions.len();
        match event {
            RankEvent::Phase(phase) => {
                self.micro_batches += u32::from(phase == TracedPhase::Forward);
                self.phase = phase;
                self.part = if phase == TracedPhase::Optimizer { "update".into() } else { phase.name().into() };
            }
            RankEvent::Part { name, layer } => {
                self.part = layer.map_or_else(|| name.to_owned(), |layer| format!("{name} {layer}"));
            }
            RankEvent::Operator(operator) if event.is_instruction() => {
                let values = &self.values;
                let known = self.operators.entry(std::ptr::from_ref(operator));
                let operation = known.or_insert_with(|| Arc::new(operation_of(operator, values))).clone();
                self.kernel(operation);
            }
            RankEvent::Operator(_) => {}
            RankEvent::Moves { name, bytes, .. } => self.traced(name, bytes),
            RankEvent::Collective { kind, bytes } => self.collective(kind, bytes),
            RankEvent::Wait(kind) => self.awaited.extend(self.collectives.get(&kind).copied()),
            RankEvent::HostCopy { bytes, stream: AllocationStream::Compute } => self.traced(HOST_COPY, bytes),
            RankEvent::HostCopy { bytes, stream } => self.copy(bytes, stream),
            RankEvent::HostUpdate { elements, .. } => {
                self.awaited.extend(self.beside.as_ref().map(|&(before, _)| before));
                self.traced(HOST_UPDATE, 4 * elements);
            }
            RankEvent::Allocate { id, bytes, contents, .. } => self.allocate(id, bytes, contents),
            RankEvent::Release { id } => _ = self.release(id),
            RankEvent::Becomes { id, contents } => {
                if let Some(bytes) = self.release(id) {
                    self.allocate(id, bytes, contents);
                }
            }
            RankEvent::Hooks { .. } | RankEvent::HostMemory { .. } | RankEvent::PagedMemory { .. } => {}
        }
        assert_eq!(
            self.list.instructions.len() - before,
            usize::from(event.is_instruction()),
            "invariant: an event is one instruction or none"
        );
    }

    fn traced(&mut self, name: &str, bytes: u64) {
        self.kernel(Arc::new(Operation::Traced { operator: name.into(), bytes: Bytes::new(bytes) }));
    }

    /// Adds a kernel, which waits for the collectives that the host made kernels wait for.
    fn kernel(&mut self, operation: Arc<Operation>) {
        self.latest.clear();
        self.latest.push_str(operation.kind());
        let after = std::mem::take(&mut self.awaited);
        self.kernel = Some(self.push(operation, Stream::Compute, after));
    }

    fn collective(&mut self, kind: TracedCollective, bytes: u64) {
        let (collective, role) = match kind {
            TracedCollective::AllGather => (Collective::AllGather, CollectiveRole::Parameters),
            TracedCollective::ReduceScatter => (Collective::ReduceScatter, CollectiveRole::Gradients),
            TracedCollective::AllReduce => (Collective::AllReduce, CollectiveRole::Gradients),
        };
        let operation = Operation::Collective {
            kind: collective,
            group: EVERYONE,
            bytes: Bytes::new(bytes),
            data_type: self.precision,
            role,
            algorithm: CollectiveAlgorithm::Automatic,
        };
        let is_there = kind.is_there(self.phase);
        let last = self.add_beside(operation, Stream::Group(EVERYONE), !is_there);
        self.collectives.insert(kind, last);
    }

    fn copy(&mut self, bytes: u64, stream: AllocationStream) {
        let is_gathered = stream == AllocationStream::Gather;
        let (to, kind) = if is_gathered {
            (MemoryKind::Device, TracedCollective::AllGather)
        } else {
            (MemoryKind::Host, TracedCollective::ReduceScatter)
        };
        // Parameters are there before the kernels that use them.
        let last = self.add_beside(Operation::Copy { to, bytes: Bytes::new(bytes) }, Stream::CopyTo(to), !is_gathered);
        self.collectives.insert(kind, last);
    }

    /// Adds what runs beside kernels: one after the other, whatever its stream.
    fn add_beside(&mut self, operation: Operation, stream: Stream, waits_for_kernel: bool) -> InstructionId {
        let kernel = self.kernel.filter(|_| waits_for_kernel);
        let other = self.beside.as_ref().filter(|(_, before)| *before != stream).map(|&(before, _)| before);
        let added = self.push(Arc::new(operation), stream.clone(), kernel.into_iter().chain(other).collect());
        self.beside = Some((added, stream));
        added
    }

    fn push(&mut self, operation: Arc<Operation>, stream: Stream, after: Few<InstructionId>) -> InstructionId {
        let stream = self.list.stream_id(stream);
        let next = self.names.len() as u32;
        let name = *self.names.entry(self.part.clone()).or_insert(next);
        if name == next {
            self.list.names.push(self.part.clone());
        }
        let phase = match self.phase {
            TracedPhase::Idle | TracedPhase::Forward | TracedPhase::Reference => Phase::Forward,
            TracedPhase::Backward => Phase::Backward,
            TracedPhase::Optimizer => Phase::Update,
        };
        self.list.instructions.push(Instruction {
            name,
            operation,
            stream,
            after,
            reads: Few::new(),
            writes: Few::new(),
            micro_batch: (phase != Phase::Update).then(|| self.micro_batches.saturating_sub(1)),
            phase,
        });
        InstructionId(self.list.instructions.len() as u32 - 1)
    }

    fn allocate(&mut self, id: u64, bytes: u64, contents: Contents) {
        let role = match contents {
            Contents::Parameters | Contents::Reference => BufferRole::Parameter,
            Contents::Gathered => BufferRole::ParameterCopy,
            Contents::Gradients => BufferRole::Gradient,
            Contents::OptimizerStates => BufferRole::OptimizerState,
            Contents::Activations => BufferRole::Activation,
            Contents::Communication => BufferRole::Workspace,
        };
        let name = match contents {
            Contents::Activations => format!("{} {}", self.part, self.latest),
            other => other.name().to_owned(),
        };
        // A table's operator is followed by what it allocates, a wrapper's work preceded by it.
        let first = if contents == Contents::Activations { self.last_instruction() } else { self.next_instruction() };
        self.now += bytes;
        self.list.arena = self.list.arena.max(Bytes::new(self.now));
        self.live.insert(id, self.list.buffers.len());
        self.list.buffers.push(Buffer {
            name: name.into(),
            role,
            shape: [bytes as usize].into(),
            data_type: DataType::Int8,
            parent: None,
            memory: MemoryKind::Device,
            offset: Bytes::ZERO,
            bytes: Bytes::new(bytes),
            persistent: self.phase == TracedPhase::Idle,
            lifetime: Some((first, first)),
            state: None,
        });
    }

    /// Releases an allocation. Returns its bytes.
    fn release(&mut self, id: u64) -> Option<u64> {
        let last = self.last_instruction();
        let buffer = &mut self.list.buffers[self.live.remove(&id)?];
        buffer.lifetime = buffer.lifetime.map(|(first, _)| (first, last.max(first)));
        self.now -= buffer.bytes.count();
        Some(buffer.bytes.count())
    }

    fn last_instruction(&self) -> InstructionId {
        InstructionId((self.list.instructions.len() as u32).saturating_sub(1))
    }

    fn next_instruction(&self) -> InstructionId {
        InstructionId(self.list.instructions.len() as u32)
    }

    /// What is not released lives to the end, and nothing longer.
    fn finish(mut self) -> StageProgram {
        let end = self.last_instruction();
        for (_, index) in self.live.drain() {
            let buffer = &mut self.list.buffers[index];
            buffer.lifetime = buffer.lifetime.map(|(first, _)| (first, end));
        }
        for buffer in &mut self.list.buffers {
            buffer.lifetime = buffer.lifetime.map(|(first, last)| (first.min(end), last.min(end)));
        }
        self.list
    }
}

fn operation_of(operator: &TracedOperator, values: &[f64]) -> Operation {
    let bytes: f64 = operator.inputs.iter().chain(&operator.outputs).map(|tensor| tensor.bytes(values)).sum();
    Operation::Traced { operator: operator.name.as_str().into(), bytes: Bytes::new(bytes.round() as u64) }
}
