//! Prices of collectives: how long the simulator takes for each if nothing overlaps with it.
//!
//! It simulates one Program with only these collectives, one after another, with a kernel between
//! each two. As in a run, all groups of the mesh communicate at the same time.

use foretell_models::Kernel;
use foretell_program::{
    Collective, CollectiveAlgorithm, CollectiveRole, Few, Group, GroupId, Instruction, InstructionId, Mesh, Operation, Phase,
    Program, StageProgram, Stream, StreamId,
};
use foretell_simulator::{CostModel, Options, Oversubscription, Quantile, Recording, SimulationError, prepare};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Flops, Picoseconds};
use std::collections::{BTreeSet, HashMap};

/// A collective to price.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct PricedCollective {
    pub(super) kind: Collective,
    pub(super) group: Group,
    /// Bytes of a rank's input or output, whichever is larger.
    pub(super) bytes: u64,
}

/// The mesh and devices on which collectives are priced.
#[derive(Clone, Copy, Debug)]
pub(super) struct PricingContext<'a> {
    pub(super) mesh: &'a Mesh,
    pub(super) precision: DataType,
    pub(super) topology: &'a Topology,
    pub(super) costs: &'a CostModel,
    pub(super) oversubscription: Oversubscription,
}

/// Prices of collectives: the time from the end of the kernel before it to the start of the kernel
/// after it.
#[derive(Clone, Debug, Default)]
pub(super) struct CollectivePrices(HashMap<PricedCollective, Picoseconds>);

impl CollectivePrices {
    /// Prices all of `wanted` in one simulation.
    pub(super) fn new(context: &PricingContext<'_>, wanted: &BTreeSet<PricedCollective>) -> Result<Self, SimulationError> {
        if wanted.is_empty() {
            return Ok(Self::default());
        }
        let program = program(context, wanted);
        let options = Options { oversubscription: context.oversubscription, ..Options::default() };
        let prepared = prepare(&program, context.topology, context.costs, &options)?;
        let simulation = prepared.simulate(Quantile::Median, Recording::Spans)?;
        let spans = &simulation.timeline.ranks.first().expect("invariant: a mesh has a rank").spans;
        // The spans are kernel, collective, kernel, collective, ..., kernel.
        let mut prices = HashMap::new();
        for (number, collective) in wanted.iter().enumerate() {
            let (before, after) = (&spans[2 * number], &spans[2 * number + 2]);
            prices.insert(collective.clone(), after.start.saturating_sub(before.end));
        }
        Ok(Self(prices))
    }

    /// Returns the price of a collective that was priced.
    pub(super) fn of(&self, collective: &PricedCollective) -> Picoseconds {
        *self.0.get(collective).expect("invariant: the collective was priced")
    }
}

/// Returns a Program that runs all of `wanted` on every rank.
fn program(context: &PricingContext<'_>, wanted: &BTreeSet<PricedCollective>) -> Program {
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
    for PricedCollective { kind, group, bytes } in wanted {
        let known = groups.iter().position(|known| known == group).unwrap_or_else(|| {
            groups.push(group.clone());
            groups.len() - 1
        });
        let operation = Operation::Collective {
            kind: *kind,
            group: GroupId(known as u16),
            bytes: Bytes::new(*bytes),
            data_type: context.precision,
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
    let mesh = context.mesh.clone();
    let lists = (0..mesh.stage_count()).map(|stage| StageProgram { stage, ..list.clone() }).collect();
    Program {
        list_of_rank: Program::one_list_per_stage(&mesh),
        mesh,
        precision: context.precision,
        format: context.precision,
        lists,
        samples: 1,
        predictions: 1,
        tokens: None,
        model_flops: Flops::ZERO,
        hardware_flops: Flops::ZERO,
    }
}
