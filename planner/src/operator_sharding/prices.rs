//! What exchanges along an axis take where they are waited for, as the simulator has it: one Program of nothing but exchanges, one after the other with
//! a kernel between two of them, over the whole mesh at once as in a run.

use foretell_models::Kernel;
use foretell_program::{
    Collective, CollectiveAlgorithm, CollectiveRole, Few, Group, GroupId, Instruction, InstructionId, Mesh, Operation, Phase,
    Program, StageProgram, Stream, StreamId,
};
use foretell_simulator::{CostModel, Options, Oversubscription, Quantile, Recording, SimulationError, prepare};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Flops, Picoseconds};
use std::collections::{BTreeSet, HashMap};

/// An exchange: which, over which axes, and the bytes of the larger of what a rank has before and after.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Exchange {
    pub(super) kind: Collective,
    pub(super) group: Group,
    pub(super) bytes: u64,
}

/// Where exchanges are priced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ground<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) precision: DataType,
    pub(super) topology: &'a Topology,
    pub(super) costs: &'a CostModel,
    pub(super) oversubscription: Oversubscription,
}

/// What each of some exchanges takes from the end of a kernel to the beginning of the next that waits for it.
#[derive(Clone, Debug, Default)]
pub(super) struct Prices(HashMap<Exchange, Picoseconds>);

impl Prices {
    /// Asks the simulator for all of them.
    pub(super) fn new(ground: &Ground<'_>, wanted: &BTreeSet<Exchange>) -> Result<Self, SimulationError> {
        if wanted.is_empty() {
            return Ok(Self::default());
        }
        let program = program(ground, wanted);
        let options = Options { oversubscription: ground.oversubscription, ..Options::default() };
        let prepared = prepare(&program, ground.topology, ground.costs, &options)?;
        let simulation = prepared.simulate(Quantile::Median, Recording::Spans)?;
        let spans = simulation.timeline.ranks.first().map(|rank| rank.spans.as_slice()).unwrap_or_default();
        // Kernel, exchange, kernel, exchange, ..., kernel: the same kernel every time.
        let mut prices = HashMap::new();
        for (number, exchange) in wanted.iter().enumerate() {
            if let (Some(before), Some(after)) = (spans.get(2 * number), spans.get(2 * number + 2)) {
                prices.insert(exchange.clone(), after.start.saturating_sub(before.end));
            }
        }
        Ok(Self(prices))
    }

    /// The price of one that was asked for.
    pub(super) fn of(&self, exchange: &Exchange) -> Picoseconds {
        self.0.get(exchange).copied().unwrap_or_default()
    }
}

fn program(ground: &Ground<'_>, wanted: &BTreeSet<Exchange>) -> Program {
    let mut groups: Vec<Group> = Vec::new();
    let mut instructions: Vec<Instruction> = Vec::with_capacity(2 * wanted.len() + 1);
    let mut push = |operation: Operation, stream: usize| {
        let after = instructions.len().checked_sub(1).map(|last| InstructionId(last as u32)).into_iter().collect();
        instructions.push(Instruction {
            name: 0,
            operation: operation.into(),
            stream: StreamId(stream as u16),
            after,
            reads: Few::new(),
            writes: Few::new(),
            micro_batch: Some(0),
            phase: Phase::Forward,
        });
    };
    let kernel = || Operation::Compute { kernel: Kernel::Zero { elements: 1 }, accumulate: false, group: None };
    push(kernel(), 0);
    for Exchange { kind, group, bytes } in wanted {
        let known = groups.iter().position(|one| one == group).unwrap_or_else(|| {
            groups.push(group.clone());
            groups.len() - 1
        });
        let operation = Operation::Collective {
            kind: *kind,
            group: GroupId(known as u16),
            bytes: Bytes::new(*bytes),
            data_type: ground.precision,
            algorithm: CollectiveAlgorithm::Automatic,
            role: CollectiveRole::Tensor,
        };
        push(operation, 1 + known);
        push(kernel(), 0);
    }
    let streams = (0..groups.len()).map(|group| Stream::Group(GroupId(group as u16)));
    let list = StageProgram {
        stage: 0,
        streams: [Stream::Compute].into_iter().chain(streams).collect(),
        groups,
        peers: Vec::new(),
        buffers: Vec::new(),
        instructions,
        names: vec!["price".into()],
        passes: Vec::new(),
        metrics: Vec::new(),
        arena: Bytes::ZERO,
        host_arena: Bytes::ZERO,
    };
    let mesh = ground.mesh.clone();
    let lists = (0..mesh.stage_count()).map(|stage| StageProgram { stage, ..list.clone() }).collect();
    Program {
        list_of_rank: Program::one_list_a_stage(&mesh),
        mesh,
        precision: ground.precision,
        format: ground.precision,
        lists,
        samples: 1,
        predictions: 1,
        tokens: None,
        model_flops: Flops::ZERO,
        hardware_flops: Flops::ZERO,
    }
}
