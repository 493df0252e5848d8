//! The cases of the speed benchmark and of the `scale` example.
#![allow(dead_code, clippy::unwrap_used)]

use foretell_models::Model;
use foretell_program::{
    Axis, Collective, CollectiveAlgorithm, CollectiveRole, Few, Group, GroupId, Instruction, Mesh, Operation, Phase, Plan,
    Program, StageProgram, Stream, StreamId, compile_training,
};
use foretell_simulator::CostModel;
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Flops};

/// A Program, its topology and its costs.
pub struct Case {
    pub program: Program,
    pub topology: Topology,
    pub costs: CostModel,
}

impl Case {
    /// Compiles the JSON of a model and a plan, for `nodes` nodes of a topology of the library.
    pub fn compiled(model: &str, plan: &str, topology: &str, nodes: usize) -> Self {
        let model: Model = serde_json::from_str(model).unwrap();
        let plan: Plan = serde_json::from_str(plan).unwrap();
        let topology = Topology::library(topology).unwrap().with_nodes(nodes).unwrap();
        let costs = CostModel::new(None, &topology);
        Self { program: compile_training(&model, "gpt", &plan).unwrap(), topology, costs }
    }

    /// Returns the number of instructions over all ranks.
    pub fn instructions(&self) -> usize {
        let lists = &self.program.lists;
        self.program.list_of_rank.iter().map(|&list| lists[list as usize].instructions.len()).sum()
    }

    /// Returns the number of ranks.
    pub fn ranks(&self) -> usize {
        self.program.mesh.world_size()
    }
}

/// Returns a single all-reduce of 1 GiB among `ranks` ranks, each on its own node.
pub fn all_reduce(ranks: usize) -> Case {
    let text = format!(
        "name: switch\n\
         devices:\n  one: {{architecture: gpu, memory: 1GiB, memory_bandwidth: 1TB/s, peak: {{fp32: 1TFLOP/s}}, link: 50GB/s}}\n\
         nodes:\n  - {{name: node, count: {ranks}, devices: {{kind: one, count: 1}}, nics: {{count: 1, bandwidth: 50GB/s}}}}\n\
         network: {{kind: switch, latency: 5us}}\n"
    );
    let topology = Topology::from_yaml(&text, "switch.yaml").unwrap();
    let group = Group::along(Axis::Data);
    let operation = Operation::Collective {
        kind: Collective::AllReduce,
        algorithm: CollectiveAlgorithm::Automatic,
        role: CollectiveRole::Gradients,
        group: GroupId(0),
        bytes: Bytes::new(1 << 30),
        data_type: DataType::Fp32,
    };
    let instruction = Instruction {
        name: 0,
        operation: operation.into(),
        stream: StreamId(0),
        after: Few::new(),
        reads: Few::new(),
        writes: Few::new(),
        micro_batch: None,
        phase: Phase::Update,
    };
    let list = StageProgram {
        stage: 0,
        streams: vec![Stream::Group(GroupId(0))],
        groups: vec![group],
        peers: Vec::new(),
        buffers: Vec::new(),
        instructions: vec![instruction],
        names: vec!["gradients".into()],
        passes: Vec::new(),
        metrics: Vec::new(),
        arena: Bytes::ZERO,
        host_arena: Bytes::ZERO,
    };
    let mesh = Mesh::new(|axis| if axis == Axis::Data { ranks } else { 1 }, &[]).unwrap();
    let program = Program {
        list_of_rank: Program::one_list_per_stage(&mesh),
        mesh,
        precision: DataType::Fp32,
        format: DataType::Fp32,
        lists: vec![list],
        samples: ranks,
        predictions: ranks,
        tokens: None,
        model_flops: Flops::ZERO,
        hardware_flops: Flops::ZERO,
    };
    let costs = CostModel::new(None, &topology);
    Case { program, topology, costs }
}

/// Returns a transformer of 24 layers of 1,024 on 256 GPUs: tensor 8, pipeline 8, data 4. A step
/// has 1.4 million instructions.
pub fn small_transformer() -> Case {
    Case::compiled(
        r#"{"family": "gpt", "layers": 24, "hidden": 1024, "heads": 16, "vocab": 51200, "sequence": 1024}"#,
        r#"{"global_batch": 192, "precision": "bf16", "optimizer": "adam",
            "layout": {"data": 4, "tensor": 8, "pipeline": 8, "micro_batch": 1}}"#,
        "dgx-a100-80g",
        32,
    )
}

/// Returns GPT-3 175B on 1,024 GPUs: tensor 8, pipeline 8, data 16, with 96 micro-batches in 1F1B
/// order.
pub fn gpt_175b() -> Case {
    Case::compiled(
        r#"{"family": "gpt", "layers": 96, "hidden": 12288, "heads": 96, "vocab": 51200, "sequence": 2048}"#,
        r#"{"global_batch": 1536, "precision": "bf16", "optimizer": "adam",
            "layout": {"data": 16, "tensor": 8, "pipeline": 8, "sequence_parallel": true, "recompute": "selective", "micro_batch": 1,
                       "zero": 1}}"#,
        "dgx-a100-80g",
        128,
    )
}

/// Returns a model of 1.01 trillion parameters on 99,840 GPUs: tensor 8, pipeline 16, data 780,
/// with 8 micro-batches in 1F1B order. A step has 25.6 million tokens.
pub fn trillion() -> Case {
    Case::compiled(
        r#"{"family": "gpt", "layers": 128, "hidden": 25600, "heads": 160, "vocab": 51200, "sequence": 4096}"#,
        r#"{"global_batch": 6240, "precision": "bf16", "optimizer": "adam",
            "layout": {"data": 780, "tensor": 8, "pipeline": 16, "sequence_parallel": true, "recompute": "selective", "micro_batch": 1,
                       "zero": 1}}"#,
        "dgx-h100",
        12_480,
    )
}
