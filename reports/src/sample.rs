//! A small Program with a predicted and a measured Timeline, for tests and the gallery: two stages
//! of two data-parallel ranks and four micro-batches in 1F1B order. The measured run has slower
//! kernels on stage 1, slower communication and host gaps.

use foretell_models::{Activation, InputKind, Kernel, WeightLayout};
use foretell_program::{
    Axis, Buffer, BufferId, BufferRole, Collective, CollectiveAlgorithm, CollectiveRole, Few, Group, GroupId, Instruction,
    InstructionId, MemoryKind, Mesh, Operation, Origin, Peer, PeerId, Phase, Program, Rank, RankTimeline, Span, StageProgram,
    Stream, StreamId, Timeline,
};
use foretell_units::{Bytes, DataType, Flops, Picoseconds};
use std::sync::Arc;

const MICRO_BATCHES: u32 = 4;
const ACTIVATION: Bytes = Bytes::new(1 << 20);
const WEIGHTS: Bytes = Bytes::new(4 << 20);

/// The Program, its predicted and its measured Timeline.
pub fn pipeline() -> (Program, Timeline, Timeline) {
    let size = |axis| if matches!(axis, Axis::Data | Axis::Pipeline) { 2 } else { 1 };
    let mesh = Mesh::new(size, &[]).expect("two by two ranks");
    let program = Program {
        list_of_rank: Program::one_list_per_stage(&mesh),
        mesh,
        precision: DataType::Fp32,
        format: DataType::Fp32,
        lists: vec![stage(0), stage(1)],
        samples: 8,
        predictions: 8,
        tokens: None,
        model_flops: Flops::new(1e9),
        hardware_flops: Flops::new(1e9),
    };
    let predicted = run(&program, Origin::Predicted, |_, _| 1.0, 0);
    let measured = run(&program, Origin::Measured, slowdown, 12_000_000);
    (program, predicted, measured)
}

/// A timeline with the Program's ranks and no spans.
pub fn empty(program: &Program, origin: Origin) -> Timeline {
    Timeline { origin, ranks: vec![Arc::default(); program.mesh.world_size()] }
}

fn slowdown(rank: Rank, operation: &Operation) -> f64 {
    match operation {
        Operation::Compute { .. } if rank.0 == 3 => 1.25,
        Operation::Compute { .. } => 1.02,
        Operation::Collective { .. } => 1.4,
        _ => 1.1,
    }
}

struct Builder {
    stage: StageProgram,
}

impl Builder {
    fn buffer(&mut self, name: &str, role: BufferRole, bytes: Bytes, persistent: bool) -> BufferId {
        self.stage.buffers.push(Buffer {
            name: name.into(),
            role,
            shape: [bytes.count() as usize / 4].into(),
            data_type: DataType::Fp32,
            parent: None,
            memory: MemoryKind::Device,
            offset: self.stage.arena,
            bytes,
            persistent,
            lifetime: None,
            state: None,
        });
        self.stage.arena += bytes;
        BufferId(self.stage.buffers.len() as u32 - 1)
    }

    #[allow(clippy::too_many_arguments)]
    fn add(
        &mut self,
        name: &str,
        operation: Operation,
        stream: u16,
        phase: Phase,
        micro_batch: Option<u32>,
        after: &[InstructionId],
        buffers: &[BufferId],
    ) -> InstructionId {
        let id = InstructionId(self.stage.instructions.len() as u32);
        for buffer in buffers {
            let lifetime = &mut self.stage.buffers[buffer.0 as usize].lifetime;
            *lifetime = Some((lifetime.map_or(id, |(first, _)| first), id));
        }
        self.stage.names.push(name.into());
        self.stage.instructions.push(Instruction {
            name: self.stage.names.len() as u32 - 1,
            operation: operation.into(),
            stream: StreamId(stream),
            after: after.into(),
            reads: Few::new(),
            writes: buffers.into(),
            micro_batch,
            phase,
        });
        id
    }
}

fn compute(kernel: Kernel) -> Operation {
    Operation::Compute { kernel, accumulate: false, group: None }
}

fn stage(index: usize) -> StageProgram {
    let other = 1 - index;
    let streams =
        vec![Stream::Compute, Stream::Load, Stream::Group(GroupId(0)), Stream::SendTo(PeerId(0)), Stream::ReceiveFrom(PeerId(0))];
    let mut builder = Builder {
        stage: StageProgram {
            stage: index,
            streams,
            groups: vec![Group::along(Axis::Data)],
            peers: vec![Peer { stage: other, ranks: None }],
            buffers: vec![],
            instructions: vec![],
            names: vec![],
            passes: vec![],
            metrics: vec![],
            arena: Bytes::ZERO,
            host_arena: Bytes::ZERO,
        },
    };
    let weights = builder.buffer("weights", BufferRole::Parameter, WEIGHTS, true);
    let gradients = builder.buffer("gradients", BufferRole::Gradient, WEIGHTS, true);
    let (rows, columns, contracted, weight) = (1024, 256, 256, WeightLayout::OutIn);
    let order: &[(bool, u32)] = if index == 0 {
        &[(true, 0), (true, 1), (false, 0), (true, 2), (false, 1), (true, 3), (false, 2), (false, 3)]
    } else {
        &[(true, 0), (false, 0), (true, 1), (false, 1), (true, 2), (false, 2), (true, 3), (false, 3)]
    };
    let activations: Vec<BufferId> = (0..MICRO_BATCHES)
        .map(|micro_batch| builder.buffer(&format!("x{micro_batch}"), BufferRole::Activation, ACTIVATION, false))
        .collect();
    let mut last = InstructionId(0);
    for &(forward, micro_batch) in order {
        let (mb, x) = (Some(micro_batch), activations[micro_batch as usize]);
        let receive = Operation::Receive { peer: PeerId(0), bytes: ACTIVATION };
        let send = Operation::Send { peer: PeerId(0), bytes: ACTIVATION };
        if forward {
            let input = if index == 0 {
                let load =
                    Operation::Load { input: InputKind::Images, first_sample: micro_batch as usize * 2, samples: 1, order: None };
                builder.add("samples", load, 1, Phase::Forward, mb, &[], &[x])
            } else {
                builder.add("boundary", receive, 4, Phase::Forward, mb, &[], &[x])
            };
            let matmul = compute(Kernel::Matmul { rows, columns, contracted, weight, bias: false, activation: Activation::None });
            last = builder.add("linear", matmul, 0, Phase::Forward, mb, &[input], &[x]);
            if index == 0 {
                builder.add("boundary", send, 3, Phase::Forward, mb, &[last], &[x]);
            }
        } else {
            let input = if index == 0 {
                vec![builder.add("boundary.gradient", receive, 4, Phase::Backward, mb, &[], &[x])]
            } else {
                vec![]
            };
            let data = compute(Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: false });
            last = builder.add("linear", data, 0, Phase::Backward, mb, &input, &[x]);
            if index == 1 {
                builder.add("boundary.gradient", send, 3, Phase::Backward, mb, &[last], &[x]);
            }
            let gradient = compute(Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false });
            last = builder.add("linear", gradient, 0, Phase::Backward, mb, &[], &[x, gradients]);
        }
    }
    let reduce = Operation::Collective {
        kind: Collective::AllReduce,
        group: GroupId(0),
        bytes: WEIGHTS,
        data_type: DataType::Fp32,
        algorithm: CollectiveAlgorithm::Automatic,
        role: CollectiveRole::Gradients,
    };
    let reduced = builder.add("gradients", reduce, 2, Phase::Update, None, &[last], &[gradients]);
    let update = compute(Kernel::Sgd { elements: 1 << 20, momentum: false, nesterov: false, controlled: false, exempt: false });
    builder.add("weights", update, 0, Phase::Update, None, &[reduced], &[weights, gradients]);
    builder.stage
}

/// Duration in picoseconds on an imaginary device with 1 TFLOP/s, 100 GB/s of memory bandwidth and
/// 10 GB/s of network bandwidth.
fn duration(operation: &Operation) -> f64 {
    match operation {
        Operation::Compute { kernel, .. } => kernel.flops().value().max(kernel.bytes(DataType::Fp32).value() * 10.0),
        Operation::Traced { bytes, .. }
        | Operation::Collective { bytes, .. }
        | Operation::Send { bytes, .. }
        | Operation::Receive { bytes, .. }
        | Operation::Copy { bytes, .. }
        | Operation::Save { bytes, .. }
        | Operation::Write { bytes } => 5e6 + bytes.value() * 100.0,
        Operation::Load { .. } => 30e6,
    }
}

/// Runs every list until no time changes any more. A receive ends after its send started; a
/// collective ends after all participants arrived.
fn run(program: &Program, origin: Origin, slowdown: impl Fn(Rank, &Operation) -> f64, gap: u64) -> Timeline {
    let mut timeline = empty(program, origin);
    for _ in 0..64 {
        let before = timeline.clone();
        for rank in (0..program.mesh.world_size()).map(Rank) {
            timeline.ranks[rank.0] = Arc::new(run_rank(program, &before, rank, &slowdown, gap));
        }
        if timeline == before {
            break;
        }
    }
    timeline
}

fn run_rank(
    program: &Program,
    before: &Timeline,
    rank: Rank,
    slowdown: &impl Fn(Rank, &Operation) -> f64,
    gap: u64,
) -> RankTimeline {
    let stage = program.list_of(rank);
    let mut free = vec![Picoseconds::ZERO; stage.streams.len()];
    let mut spans: Vec<Span> = Vec::new();
    for (index, instruction) in stage.instructions.iter().enumerate() {
        let stream = instruction.stream.0 as usize;
        let ready = instruction.after.iter().map(|id| spans[id.0 as usize].end).max().unwrap_or_default();
        let launch = if stream == 0 { gap } else { 0 };
        let start = free[stream].max(ready) + Picoseconds(launch);
        let together = last_start(program, before, rank, index).max(start);
        let took = duration(&instruction.operation) * slowdown(rank, &instruction.operation);
        let end = together + Picoseconds(took as u64);
        free[stream] = end;
        spans.push(Span { instruction: InstructionId(index as u32), start, end });
    }
    let end = spans.iter().map(|span| span.end).max().unwrap_or_default();
    RankTimeline { spans, end }
}

/// When the last participant arrived, in the previous round.
fn last_start(program: &Program, before: &Timeline, rank: Rank, index: usize) -> Picoseconds {
    let instruction = &program.list_of(rank).instructions[index];
    let start = |rank: Rank, index: usize| before.ranks[rank.0].spans.get(index).map_or(Picoseconds::ZERO, |span| span.start);
    match *instruction.operation {
        Operation::Collective { group, .. } => {
            let members = program.list_of(rank).groups[group.0 as usize].members(&program.mesh, rank);
            members.into_iter().map(|member| start(member, index)).max().unwrap_or_default()
        }
        Operation::Receive { peer, .. } => {
            let peer = program.list_of(rank).peers[peer.0 as usize].of(&program.mesh, rank);
            let sent = |sent: &Instruction| {
                matches!(*sent.operation, Operation::Send { .. })
                    && (sent.micro_batch, sent.phase) == (instruction.micro_batch, instruction.phase)
            };
            let send = program.list_of(peer).instructions.iter().position(sent).expect("every receive has its send");
            start(peer, send)
        }
        _ => Picoseconds::ZERO,
    }
}
