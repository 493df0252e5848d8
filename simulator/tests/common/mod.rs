//! Builders for small Programs and clusters.
#![allow(dead_code, clippy::unwrap_used)]

use foretell_models::{InputKind, Kernel};
use foretell_program::*;
use foretell_simulator::{CostModel, HostWaits, LinkEfficiency, Options, Parameters, Simulation, simulate};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Flops, Picoseconds, Seconds};

/// Builds the instruction list of one stage.
pub struct StageBuilder(StageProgram);

impl StageBuilder {
    pub fn new(stage: usize) -> Self {
        Self(StageProgram {
            stage,
            streams: vec![Stream::Compute],
            groups: Vec::new(),
            peers: Vec::new(),
            buffers: Vec::new(),
            instructions: Vec::new(),
            names: vec!["x".into()],
            passes: Vec::new(),
            metrics: Vec::new(),
            arena: Bytes::new(1 << 20),
            host_arena: Bytes::ZERO,
        })
    }

    fn stream(&mut self, wanted: Stream) -> StreamId {
        let streams = &mut self.0.streams;
        let position = streams.iter().position(|stream| *stream == wanted).unwrap_or_else(|| {
            streams.push(wanted);
            streams.len() - 1
        });
        StreamId(position as u16)
    }

    fn push(&mut self, stream: Stream, operation: Operation, after: &[InstructionId]) -> InstructionId {
        let stream = self.stream(stream);
        self.0.instructions.push(Instruction {
            name: 0,
            operation: operation.into(),
            stream,
            after: after.into(),
            reads: Few::new(),
            writes: Few::new(),
            micro_batch: Some(0),
            phase: Phase::Forward,
        });
        InstructionId(self.0.instructions.len() as u32 - 1)
    }

    pub fn compute(&mut self, elements: usize, after: &[InstructionId]) -> InstructionId {
        let kernel = Kernel::Relu { elements };
        self.push(Stream::Compute, Operation::Compute { kernel, accumulate: false, group: None }, after)
    }

    pub fn update(&mut self, elements: usize, after: &[InstructionId]) -> InstructionId {
        let kernel = Kernel::AdamW { elements, controlled: false, exempt: false };
        let id = self.push(Stream::Compute, Operation::Compute { kernel, accumulate: false, group: None }, after);
        self.0.instructions[id.0 as usize].phase = Phase::Update;
        id
    }

    pub fn collective(&mut self, kind: Collective, group: Group, bytes: u64, after: &[InstructionId]) -> InstructionId {
        let groups = &mut self.0.groups;
        let position = groups.iter().position(|known| *known == group).unwrap_or_else(|| {
            groups.push(group);
            groups.len() - 1
        });
        let group = GroupId(position as u16);
        let operation = Operation::Collective {
            kind,
            group,
            bytes: Bytes::new(bytes),
            data_type: DataType::Fp32,
            algorithm: foretell_program::CollectiveAlgorithm::Automatic,
            role: foretell_program::CollectiveRole::Gradients,
        };
        self.push(Stream::Group(group), operation, after)
    }

    fn peer(&mut self, stage: usize) -> PeerId {
        let peer = Peer { stage, ranks: None };
        let position = self.0.peers.iter().position(|known| *known == peer).unwrap_or_else(|| {
            self.0.peers.push(peer);
            self.0.peers.len() - 1
        });
        PeerId(position as u16)
    }

    pub fn send(&mut self, stage: usize, bytes: u64, after: &[InstructionId]) -> InstructionId {
        let peer = self.peer(stage);
        self.push(Stream::SendTo(peer), Operation::Send { peer, bytes: Bytes::new(bytes) }, after)
    }

    pub fn receive(&mut self, stage: usize, bytes: u64, after: &[InstructionId]) -> InstructionId {
        let peer = self.peer(stage);
        self.push(Stream::ReceiveFrom(peer), Operation::Receive { peer, bytes: Bytes::new(bytes) }, after)
    }

    pub fn load(&mut self, bytes: u64) -> InstructionId {
        let buffer = BufferId(self.0.buffers.len() as u32);
        self.0.buffers.push(Buffer {
            name: "images".into(),
            role: BufferRole::Input,
            shape: [bytes as usize / 4].into(),
            data_type: DataType::Fp32,
            parent: None,
            memory: MemoryKind::Device,
            offset: Bytes::ZERO,
            bytes: Bytes::new(bytes),
            persistent: false,
            lifetime: None,
            state: None,
        });
        let id = self.push(
            Stream::Load,
            Operation::Load { input: InputKind::Features, first_sample: 0, samples: 1, order: None },
            &[],
        );
        self.0.instructions[id.0 as usize].writes.push(buffer);
        id
    }

    pub fn done(self) -> StageProgram {
        self.0
    }
}

/// A Program with `data` x `tensor` ranks a stage.
pub fn program(data: usize, tensor: usize, stages: Vec<StageProgram>) -> Program {
    let size = |axis| match axis {
        Axis::Data => data,
        Axis::Tensor => tensor,
        Axis::Pipeline => stages.len(),
        _ => 1,
    };
    let mesh = Mesh::new(size, &[]).unwrap();
    Program {
        list_of_rank: Program::one_list_per_stage(&mesh),
        mesh,
        precision: DataType::Fp32,
        format: DataType::Fp32,
        lists: stages,
        samples: 8,
        predictions: 8,
        tokens: None,
        model_flops: Flops::new(1e9),
        hardware_flops: Flops::new(2e9),
    }
}

/// One node of devices with 1 TFLOP/s and 1 GB/s of memory bandwidth. Its switch has 1 GB/s a port
/// and 1 us.
pub fn node(devices: usize) -> Topology {
    cluster(1, devices, "nvswitch-1GB/s")
}

pub fn cluster(nodes: usize, devices: usize, link: &str) -> Topology {
    cluster_on("{kind: switch, latency: 10us}", nodes, devices, link)
}

/// Like [`cluster`], with the network described by `network`.
pub fn cluster_on(network: &str, nodes: usize, devices: usize, link: &str) -> Topology {
    let text = format!(
        "name: test\n\
         devices:\n  one: {{architecture: gpu, memory: 1GiB, memory_bandwidth: 1GB/s, peak: {{fp32: 1TFLOP/s}}, link: 1GB/s}}\n\
         nodes:\n  - {{name: node, count: {nodes}, devices: {{kind: one, count: {devices}}}, link: {link}, \
         nics: {{count: 1, bandwidth: 1GB/s}}}}\n\
         network: {network}\n"
    );
    Topology::from_yaml(&text, "test.yaml").unwrap()
}

/// A cost model without overheads, in which communication uses no processor and links give their
/// full bandwidth.
pub fn ideal(topology: &Topology) -> CostModel {
    let mut costs = CostModel::new(None, topology);
    costs.links = LinkEfficiency::IDEAL;
    for kind in 0..costs.kind_count() {
        let none = exactly(Seconds::ZERO, costs.parameters(kind));
        *costs.parameters_mut(kind) = Parameters {
            instruction_overhead: none,
            stream_handoff: none,
            launch: Seconds::ZERO,
            step_overhead: none,
            micro_batch_overhead: Seconds::ZERO,
            exchange_overhead: Seconds::ZERO,
            has_trees: true,
            load_seconds_per_byte: Seconds::new(1e-9),
            copy_share: 0.0,
            communication_share: 0.0,
            communication_growth: None,
            host_waits: HostWaits::default(),
            interruption: Seconds::ZERO,
        };
    }
    costs
}

/// A duration without spread.
pub fn exactly(time: Seconds, like: &Parameters) -> foretell_simulator::Estimate {
    foretell_simulator::Estimate { median: time, p10: time, p90: time, source: like.step_overhead.source }
}

/// Returns the duration of [`StageBuilder::compute`] alone.
pub fn kernel(costs: &CostModel, elements: usize) -> Picoseconds {
    costs.kernel_time(&Kernel::Relu { elements }, false, DataType::Fp32, 0).median.into()
}

pub fn run(program: &Program, topology: &Topology, costs: &CostModel) -> Simulation {
    simulate(program, topology, costs, &Options::default()).unwrap()
}

/// Returns whether two times differ by less than a nanosecond.
pub fn about(one: Picoseconds, two: impl Into<Picoseconds>) -> bool {
    let two = two.into();
    one.0.abs_diff(two.0) < 1000
}
