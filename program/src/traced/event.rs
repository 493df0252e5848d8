//! What a rank's host issues in a traced step, one event after the other.

use foretell_models::operator_tables::TracedOperator;

/// What an allocation holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Contents {
    /// Parameters and buffers.
    Parameters,
    /// Parameters that the rank gathered.
    Gathered,
    /// Gradients.
    Gradients,
    /// The optimizer's states.
    OptimizerStates,
    /// Activations and temporaries.
    Activations,
    /// What collectives read and write.
    Communication,
    /// A frozen copy of the model that it is compared with.
    Reference,
}

impl Contents {
    /// All, in the order of their discriminants.
    pub const ALL: [Self; 7] = [
        Self::Parameters,
        Self::Gathered,
        Self::Gradients,
        Self::OptimizerStates,
        Self::Activations,
        Self::Communication,
        Self::Reference,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Contents::Parameters => "parameters",
            Contents::Gathered => "gathered parameters",
            Contents::Gradients => "gradients",
            Contents::OptimizerStates => "optimizer states",
            Contents::Activations => "activations",
            Contents::Communication => "communication buffers",
            Contents::Reference => "reference's parameters",
        }
    }
}

/// The stream that an allocation belongs to: blocks of one are not reused by another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum AllocationStream {
    /// Kernels.
    Compute,
    /// Gathering.
    Gather,
    /// Reduction.
    Reduce,
}

/// A collective operation of a traced step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TracedCollective {
    /// Gathers parameters.
    AllGather,
    /// Reduces gradients, each rank to its shard.
    ReduceScatter,
    /// Reduces gradients.
    AllReduce,
}

impl TracedCollective {
    /// Whether what it sends is there when the host issues it in a phase, so that it need not wait
    /// for the kernels before. Gradients are not, nor are parameters that the optimizer updates.
    pub fn is_there(self, phase: TracedPhase) -> bool {
        self == Self::AllGather && phase != TracedPhase::Optimizer
    }
}

/// What a rank's host issues next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RankEvent<'a> {
    /// A phase begins.
    Phase(TracedPhase),
    /// A part of the table begins, for one of the model's layers or for what is around them.
    Part {
        /// The part's name, such as `forward.layer`.
        name: &'a str,
        /// The layer.
        layer: Option<usize>,
    },
    /// A kernel of the table.
    Operator(&'a TracedOperator),
    /// A kernel of a wrapper or optimizer, by the bytes that it moves.
    Moves {
        /// Its name.
        name: &'static str,
        /// Bytes read and written.
        bytes: u64,
        /// Kernels that are launched for them.
        launches: u64,
    },
    /// Memory is allocated.
    Allocate {
        /// A number that no other allocation has.
        id: u64,
        /// Bytes.
        bytes: u64,
        /// What it holds.
        contents: Contents,
        /// Its stream.
        stream: AllocationStream,
    },
    /// Memory is released.
    Release {
        /// The allocation.
        id: u64,
    },
    /// What an allocation holds is something else now.
    Becomes {
        /// The allocation.
        id: u64,
        /// What it holds.
        contents: Contents,
    },
    /// A collective begins beside the kernels; after those before if it reduces gradients, or
    /// gathers in the optimizer's phase.
    Collective {
        /// What it does.
        kind: TracedCollective,
        /// Bytes of the whole that is gathered or reduced.
        bytes: u64,
    },
    /// Kernels from here on wait for the collectives of a kind that began before.
    Wait(TracedCollective),
    /// The host runs a wrapper's own code around modules.
    Hooks {
        /// How often.
        calls: u64,
    },
    /// The rank takes memory of its host, for good.
    HostMemory {
        /// Bytes.
        bytes: u64,
    },
    /// The rank takes memory that device and host share, for good.
    PagedMemory {
        /// Bytes.
        bytes: u64,
    },
    /// A copy between device and host, on a stream of the device, after the kernels before.
    HostCopy {
        /// Bytes.
        bytes: u64,
        /// The stream; kernels go on beside a copy on another than theirs.
        stream: AllocationStream,
    },
    /// The host updates parameters by AdamW, once all kernels and copies have ended.
    HostUpdate {
        /// Elements of the rank.
        elements: u64,
        /// Whose code does it.
        by: HostOptimizer,
    },
}

/// The operator that stands for a call of generated code, beside its kernels.
const COMPILED_CALL: &str = "inductor.call";

impl RankEvent<'_> {
    /// Whether a stream runs something for the event. Others change memory, order what runs, or
    /// take the host's time alone.
    pub fn is_instruction(&self) -> bool {
        match self {
            Self::Operator(operator) => operator.name != COMPILED_CALL,
            Self::Moves { .. } | Self::Collective { .. } | Self::HostCopy { .. } | Self::HostUpdate { .. } => true,
            Self::Phase(_)
            | Self::Part { .. }
            | Self::Allocate { .. }
            | Self::Release { .. }
            | Self::Becomes { .. }
            | Self::Wait(_)
            | Self::Hooks { .. }
            | Self::HostMemory { .. }
            | Self::PagedMemory { .. } => false,
        }
    }
}

/// An optimizer that runs on hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostOptimizer {
    /// One vectorised loop over everything: `DeepSpeedCPUAdam`, and PyTorch's fused AdamW.
    OneLoop,
    /// PyTorch's AdamW over lists of tensors, a pass over memory for each operation.
    Lists,
}

/// The phases of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TracedPhase {
    /// What lives before the step.
    Idle,
    /// Forward pass and loss.
    Forward,
    /// Forward passes without gradients.
    Reference,
    /// Backward pass.
    Backward,
    /// The optimizer.
    Optimizer,
}

impl TracedPhase {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            TracedPhase::Idle => "idle",
            TracedPhase::Forward => "forward",
            TracedPhase::Reference => "reference's forward",
            TracedPhase::Backward => "backward",
            TracedPhase::Optimizer => "optimizer",
        }
    }
}
