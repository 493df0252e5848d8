//! Steps of traced frameworks: a table's step on one rank of a data-parallel job, with what shards
//! the parameters around it.
//!
//! A table (`foretell_models::operator_tables`) is one replica's forward and backward pass. This
//! module adds what a rank does beside it, as the wrappers' own code does: the parameters and
//! states that it holds, gathering and scattering around each layer, the reduction of gradients,
//! and the optimizer's temporaries. The result is a list of [`RankEvent`]s in the order in which
//! the host issues them.
//!
//! Sources: `torch/distributed/fsdp/_runtime_utils.py` and `_flat_param.py` (FSDP1),
//! `_fully_shard/_fsdp_param_group.py` and `_fsdp_collectives.py` (FSDP2),
//! `torch/nn/parallel/distributed.py` (DDP), `torch/optim/adamw.py`; DeepSpeed's are in `zero.rs`.
//!
//! It knows no durations and no devices.

mod event;
mod of_plan;
mod optimizer;
mod rank_state;
mod sharding;
mod step_program;
mod zero;

pub use event::{AllocationStream, Contents, HostOptimizer, RankEvent, TracedCollective, TracedPhase};
pub use of_plan::{TracedPlan, Untraced, adapts_whole_groups, stages_of_zero, traced_offloads, traced_stages, wanted_key};
pub use optimizer::{MuonProducts, TracedOptimizer};

use foretell_models::operator_tables::{
    Element, OperatorTable, ParameterRole, StepEvent, TableError, TableParameter, TableSizes,
};
use optimizer::{TrainedTensor, matrix_of};
use rank_state::RankState;
use rustc_hash::FxHashMap;
use sharding::Wrapper;
use std::sync::Arc;
use zero::{GradientStages, ParameterStage};

/// How the ranks of a traced job hold parameters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharding {
    /// Each has everything; gradients are reduced after the backward pass if there are several
    /// ranks.
    Replicated,
    /// `DistributedDataParallel`: each has everything, and gradients are reduced in buckets during
    /// the backward pass.
    Ddp,
    /// `FullyShardedDataParallel` with original parameters, one unit a layer and one for the rest.
    Fsdp1,
    /// `fully_shard`, one group a layer, and groups of the rest.
    Fsdp2 {
        /// The format in which gradients are reduced.
        reduce: Element,
        /// What groups the rest has.
        groups: Fsdp2Groups,
    },
    /// DeepSpeed's ZeRO. Parameters are stored and computed in [`TracedJob::stored`]; the optimizer
    /// updates a partition in single precision.
    Zero {
        /// 1, 2 or 3.
        stage: u8,
    },
}

/// How `fully_shard` is called for what is in no layer, and for gradients of several micro-batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fsdp2Groups {
    /// All of it is the root's group. Each micro-batch reduces its gradients. So do torchtune and
    /// torchtitan.
    Root,
    /// `fsdp2_prepare_model` of Accelerate 1.15: the embedding; the last norm and the head, which
    /// stay gathered after the forward pass, and with which the embedding is if they share weights;
    /// the root's group for others. Whole gradients wait for the last micro-batch (`no_sync`).
    Accelerate,
}

/// A training step of a traced framework, as one of `ranks` data-parallel ranks runs it.
#[derive(Clone, Debug)]
pub struct TracedJob {
    /// The traced step of one replica.
    pub table: Arc<OperatorTable>,
    /// The model's sizes, and the rank's batch.
    pub sizes: TableSizes,
    /// Number of ranks.
    pub ranks: usize,
    /// How they hold parameters.
    pub sharding: Sharding,
    /// The format in which trained parameters are stored, and their states.
    pub stored: Element,
    /// What updates them.
    pub optimizer: TracedOptimizer,
    /// Micro-batches of a step.
    pub micro_batches: usize,
    /// Whether the optimizer's states, and the copy of parameters that it updates, lie in the
    /// host's memory, where the host updates them (DeepSpeed's `offload_optimizer`, FSDP's
    /// `CPUOffload`).
    pub offloads_optimizer: bool,
    /// Whether parameters lie there too while no layer uses them (DeepSpeed's `offload_param` at
    /// stage 3, FSDP's `CPUOffload`).
    pub offloads_parameters: bool,
    /// Whether each parameter is updated, and its gradient dropped, as soon as that is made.
    pub updates_in_backward: bool,
    /// Whether gradients are clipped by their norm before the update.
    pub clips_gradients: bool,
    /// Whether the device has no room for states in memory that it shares with its host: they come
    /// in and leave with every update.
    pub pages_out: bool,
    /// Forward passes without gradients between the two passes of each micro-batch, such as those
    /// of a reference that preferences are compared with.
    pub passes_without_gradients: usize,
    /// Whether a frozen copy of the model runs them.
    pub has_reference: bool,
    /// Whether each expert of a mixture is modules with weights of their own, as in transformers
    /// before release 5, or a row of one weight.
    pub separate_experts: bool,
    /// The products of Muon's update; none with other optimizers.
    pub muon: Arc<MuonProducts>,
}

/// The name of copies between device and host that the step itself makes, such as of the loss.
pub const HOST_COPY: &str = "copy to or from the host";

/// The ids of a table's own allocations begin here, those of what is around it at 0.
const OF_TABLE: u64 = 1 << 32;

/// Those of each pass without gradients are so far behind those of the pass with them.
const OF_PASS: u64 = 1 << 28;

/// A parameter of the model: an entry of the table, its layer, and which expert's it is where each
/// has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct ParameterOf {
    index: usize,
    layer: Option<usize>,
    expert: usize,
}

impl TracedJob {
    /// A step of one micro-batch, with everything on the device and nothing but the model.
    pub fn new(
        table: Arc<OperatorTable>,
        sizes: TableSizes,
        ranks: usize,
        sharding: Sharding,
        stored: Element,
        optimizer: TracedOptimizer,
    ) -> Self {
        let is_muon = optimizer == TracedOptimizer::Muon;
        let muon = if is_muon { MuonProducts::new(&table, &sizes) } else { MuonProducts::default() };
        TracedJob {
            muon: Arc::new(muon),
            table,
            sizes,
            ranks,
            sharding,
            stored,
            optimizer,
            micro_batches: 1,
            offloads_optimizer: false,
            offloads_parameters: false,
            updates_in_backward: false,
            clips_gradients: true,
            pages_out: false,
            passes_without_gradients: 0,
            has_reference: false,
            separate_experts: false,
        }
    }

    /// Gives every event of `steps` steps to `visit`, in the order in which a rank's host issues
    /// them.
    ///
    /// # Errors
    /// [`TableError`] if the table needs a size that is not given.
    pub fn emit<'a>(&'a self, steps: usize, visit: impl FnMut(RankEvent<'a>)) -> Result<(), TableError> {
        let values = self.table.values(&self.sizes)?;
        let reference = if self.has_reference { self.reference_bytes(&values) } else { 0 };
        let mut emitter = Emitter {
            job: self,
            values,
            visit,
            next: 0,
            passes: 0,
            is_last_pass: false,
            gradients: FxHashMap::default(),
            is_first_step: steps > 1,
        };
        if reference > 0 {
            emitter.allocate(reference, Contents::Reference, AllocationStream::Compute);
        }
        match self.sharding {
            Sharding::Zero { stage: 3 } => {
                let state = ParameterStage::new(&mut emitter);
                self.steps(steps, &mut emitter, state)
            }
            Sharding::Zero { .. } => {
                let state = GradientStages::new(&mut emitter);
                self.steps(steps, &mut emitter, state)
            }
            Sharding::Replicated | Sharding::Ddp | Sharding::Fsdp1 | Sharding::Fsdp2 { .. } => {
                let state = Wrapper::new(&mut emitter);
                self.steps(steps, &mut emitter, state)
            }
        }
    }

    fn steps<'a, V: FnMut(RankEvent<'a>)>(
        &'a self,
        steps: usize,
        emitter: &mut Emitter<'a, V>,
        mut state: impl RankState,
    ) -> Result<(), TableError> {
        for _ in 0..steps {
            let count = self.micro_batches.max(1);
            for micro_batch in 0..count {
                emitter.is_last_pass = micro_batch + 1 == count;
                self.micro_batch(emitter, &mut state)?;
            }
            emitter.send(RankEvent::Phase(TracedPhase::Optimizer));
            state.update(emitter);
        }
        Ok(())
    }

    fn micro_batch<'a, V: FnMut(RankEvent<'a>)>(
        &'a self,
        emitter: &mut Emitter<'a, V>,
        state: &mut impl RankState,
    ) -> Result<(), TableError> {
        emitter.passes += 1;
        let base = OF_TABLE * emitter.passes;
        let mut layer_now = None;
        let keeps = self.keeps_layer_inputs();
        // The layer that made each allocation, and those that the backward pass does not release.
        let (mut homes, mut kept): (FxHashMap<u32, Option<usize>>, Vec<u32>) = (FxHashMap::default(), Vec::new());
        let mut is_backward = false;
        // Gradients that the part made of a parameter which each expert has.
        let mut of_experts: FxHashMap<usize, usize> = FxHashMap::default();
        emitter.gradients.clear();
        emitter.send(RankEvent::Phase(TracedPhase::Forward));
        state.before_forward(emitter);
        self.table.expand(&self.sizes, |event| match event {
            StepEvent::Begin { part, layer } => {
                layer_now = layer;
                of_experts.clear();
                if part.name == "backward.start" {
                    is_backward = true;
                    for pass in 0..self.passes_without_gradients {
                        emitter.send(RankEvent::Phase(TracedPhase::Reference));
                        self.pass_without_gradients(emitter, state, base + (pass as u64 + 1) * OF_PASS);
                    }
                    emitter.send(RankEvent::Phase(TracedPhase::Backward));
                    state.before_backward(emitter);
                }
                emitter.send(RankEvent::Part { name: &part.name, layer });
                if let Some(layer) = layer {
                    state.begin_layer(emitter, layer, part.name.starts_with("backward"));
                }
            }
            StepEvent::End { part, layer } => {
                if let Some(layer) = layer {
                    state.end_layer(emitter, layer, part.name.starts_with("backward"));
                }
            }
            StepEvent::Operator(operator) => emitter.send(RankEvent::Operator(operator)),
            StepEvent::Allocate { id, bytes } => {
                if keeps {
                    homes.insert(id, layer_now);
                }
                emitter.send(RankEvent::Allocate {
                    id: base + u64::from(id),
                    bytes,
                    contents: Contents::Activations,
                    stream: AllocationStream::Compute,
                });
            }
            StepEvent::Release { id } => {
                let home = homes.get(&id).copied().flatten();
                if is_backward && home.is_some() && layer_now.is_some() && home != layer_now {
                    kept.push(id);
                } else {
                    emitter.send(RankEvent::Release { id: base + u64::from(id) });
                }
            }
            StepEvent::Gradient { id, parameter } => {
                let of_table = &self.table.parameters[parameter];
                let mut expert = 0;
                if of_table.is_of_each_expert() {
                    let made = of_experts.entry(parameter).or_default();
                    expert = *made;
                    *made += 1;
                }
                let parameter = ParameterOf { index: parameter, layer: of_table.stack.as_ref().and(layer_now), expert };
                state.gradient(emitter, parameter, base + u64::from(id));
            }
            StepEvent::Workspace { bytes } => emitter.passing(bytes, Contents::Activations, AllocationStream::Compute),
            StepEvent::Copy { bytes, .. } => emitter.send(RankEvent::Moves { name: HOST_COPY, bytes, launches: 1 }),
        })?;
        for id in kept {
            emitter.send(RankEvent::Release { id: base + u64::from(id) });
        }
        state.after_backward(emitter);
        Ok(())
    }

    /// A forward pass of which nothing is kept: what a layer allocates is released when it ends,
    /// but for its last allocation, which the next layer may read.
    fn pass_without_gradients<'a, V: FnMut(RankEvent<'a>)>(
        &'a self,
        emitter: &mut Emitter<'a, V>,
        state: &mut impl RankState,
        base: u64,
    ) {
        let (mut live, mut before): (Vec<u64>, Vec<u64>) = (Vec::new(), Vec::new());
        let mut is_over = false;
        let expanded = self.table.expand(&self.sizes, |event| match event {
            StepEvent::Begin { part, .. } if part.name.starts_with("backward") => is_over = true,
            _ if is_over => {}
            StepEvent::Begin { part, layer } => {
                emitter.send(RankEvent::Part { name: &part.name, layer });
                if let Some(layer) = layer {
                    state.begin_layer(emitter, layer, false);
                }
            }
            StepEvent::End { layer, .. } => {
                before.drain(..).for_each(|id| emitter.release(id));
                let last = live.pop();
                live.drain(..).for_each(|id| emitter.release(id));
                before.extend(last);
                if let Some(layer) = layer {
                    state.end_layer(emitter, layer, false);
                }
            }
            StepEvent::Operator(operator) => emitter.send(RankEvent::Operator(operator)),
            StepEvent::Allocate { id, bytes } => {
                let id = base + u64::from(id);
                live.push(id);
                let (contents, stream) = (Contents::Activations, AllocationStream::Compute);
                emitter.send(RankEvent::Allocate { id, bytes, contents, stream });
            }
            StepEvent::Release { id } => {
                let id = base + u64::from(id);
                if let Some(at) = live.iter().rposition(|&held| held == id) {
                    live.remove(at);
                    emitter.release(id);
                }
            }
            StepEvent::Workspace { bytes } => emitter.passing(bytes, Contents::Activations, AllocationStream::Compute),
            StepEvent::Gradient { .. } | StepEvent::Copy { .. } => {}
        });
        expanded.expect("invariant: the pass with gradients had every size");
        live.into_iter().chain(before).for_each(|id| emitter.release(id));
    }

    /// Bytes of the rank's copy of a frozen reference: all parameters in the format in which they
    /// are stored, sharded as the model is.
    fn reference_bytes(&self, values: &[f64]) -> u64 {
        let shards = match self.sharding {
            Sharding::Fsdp1 | Sharding::Fsdp2 { .. } | Sharding::Zero { stage: 3 } => self.ranks.max(1) as u64,
            Sharding::Replicated | Sharding::Ddp | Sharding::Zero { .. } => 1,
        };
        let of_parameter = |parameter: &TableParameter| {
            let copies = if parameter.stack.is_some() { self.sizes.layers as f64 } else { 1.0 };
            let elements = parameter.dimensions.iter().map(|dimension| dimension.value(values)).product::<f64>();
            let is_trained = matches!(parameter.role, ParameterRole::Trained);
            let width = if is_trained { self.stored.bytes() } else { parameter.element.bytes() };
            elements * copies * width as f64
        };
        let own = self.table.parameters.iter().filter(|parameter| parameter.role != ParameterRole::Tied);
        (own.map(of_parameter).sum::<f64>() / shards as f64).round() as u64
    }

    /// Whether the inputs of layers, and the gradients of these, live to the end of the backward
    /// pass; nor is the layer before gathered ahead then.
    ///
    /// Inferred from measurements, not seen in code: FSDP1 hooks the inputs of units with frozen
    /// parameters (`_register_post_backward_reshard_only_hook`), and with PyTorch 2.4, which the
    /// measured rows ran on, inputs of reentrant checkpoints seem to stay alive in these hooks.
    /// The rule was made for 16 rows of Mistral-7B, which follow to 0.25 % (8 to 28 % too small
    /// without it). Three rows of Llama-3-8B on four GPUs, not looked at before, follow to 0.25 %.
    fn keeps_layer_inputs(&self) -> bool {
        let key = |word: &str| self.table.key.get(word).map_or("", String::as_str);
        let is_older = key("version").starts_with("4.");
        let has_frozen = self.table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Frozen);
        self.sharding == Sharding::Fsdp1 && has_frozen && key("checkpoint") == "full-reentrant" && is_older
    }
}

/// Where events go, and numbers for what is allocated around the table.
struct Emitter<'a, V> {
    job: &'a TracedJob,
    values: Vec<f64>,
    visit: V,
    next: u64,
    /// Micro-batches that have begun, whose allocations have numbers of their own.
    passes: u64,
    /// Whether the micro-batch is the step's last, which reduces gradients.
    is_last_pass: bool,
    /// Gradients of the micro-batch that are not yet reduced, as the table made them.
    gradients: FxHashMap<ParameterOf, u64>,
    /// Whether a run begins, whose first update makes the optimizer's states. A step alone is a
    /// later one, which has them.
    is_first_step: bool,
}

impl<'a, V: FnMut(RankEvent<'a>)> Emitter<'a, V> {
    fn send(&mut self, event: RankEvent<'a>) {
        (self.visit)(event);
    }

    fn allocate(&mut self, bytes: u64, contents: Contents, stream: AllocationStream) -> u64 {
        let id = self.next;
        self.next += 1;
        self.send(RankEvent::Allocate { id, bytes, contents, stream });
        id
    }

    fn release(&mut self, id: u64) {
        self.send(RankEvent::Release { id });
    }

    /// Allocates and releases.
    fn passing(&mut self, bytes: u64, contents: Contents, stream: AllocationStream) {
        let id = self.allocate(bytes, contents, stream);
        self.release(id);
    }

    /// Elements of a parameter, of one expert where each has its own.
    fn elements(&self, index: usize) -> u64 {
        self.job.table.parameters[index].own_elements(&self.values)
    }

    /// A trained parameter as an optimizer updates it where no rank has a shard.
    fn trained(&self, parameter: ParameterOf) -> TrainedTensor {
        let of_table = &self.job.table.parameters[parameter.index];
        let matrix = matrix_of(of_table.own_dimensions(), &self.values).filter(|_| of_table.stack.is_some());
        TrainedTensor { elements: self.elements(parameter.index), width: self.stored(parameter).bytes(), matrix }
    }

    /// The experts that have a row each of a parameter, if each is modules of its own although the
    /// table has one weight of all; 0 for others.
    fn experts(&self, index: usize) -> u64 {
        let parameter = &self.job.table.parameters[index];
        let is_of_experts =
            self.job.separate_experts && parameter.own_dimensions().len() == 3 && parameter.name.contains("experts");
        let experts = parameter.dimensions.first().filter(|_| is_of_experts);
        experts.map_or(0, |dimension| dimension.value(&self.values).round() as u64)
    }

    /// Elements of a parameter's shard, cut along its first dimension and padded.
    fn shard_elements(&self, index: usize) -> u64 {
        let dimensions = self.job.table.parameters[index].own_dimensions();
        let first = dimensions.first().map_or(1, |dimension| dimension.value(&self.values).round() as u64);
        match first {
            // A size of a model may be 0; its parameter has no element then.
            0 => 0,
            first => first.div_ceil(self.job.ranks.max(1) as u64) * (self.elements(index) / first),
        }
    }

    /// What sorts parameters as the Trainer's groups have them: matrices before what has no decay,
    /// and the layers one by one.
    fn update_order(&self, parameter: ParameterOf) -> (bool, usize, Option<usize>, usize, usize) {
        let of_table = &self.job.table.parameters;
        let stack = &of_table[parameter.index].stack;
        // The first parameter of the layers' that it is among.
        let is_apart = |index: &usize| stack.is_none() || of_table[*index].stack != *stack;
        let first = (0..parameter.index).rev().find(is_apart).map_or(0, |before| before + 1);
        let first = if stack.is_none() { parameter.index } else { first };
        let is_vector = of_table[parameter.index].own_dimensions().len() < 2;
        (is_vector, first, parameter.layer, parameter.index, parameter.expert)
    }

    /// All parameters and buffers of the model.
    fn parameters(&self) -> Vec<ParameterOf> {
        let table = &self.job.table;
        let of_model = table.parameters.iter().enumerate().filter(|(_, parameter)| parameter.role != ParameterRole::Tied);
        let copies = |(index, parameter): (usize, &TableParameter)| -> Vec<ParameterOf> {
            let layers: Vec<Option<usize>> = match &parameter.stack {
                None => vec![None],
                Some(_) => (0..self.job.sizes.layers).map(Some).collect(),
            };
            let experts = parameter.copies(&self.values);
            let of_layer = |layer| (0..experts).map(move |expert| ParameterOf { index, layer, expert });
            layers.into_iter().flat_map(of_layer).collect()
        };
        of_model.flat_map(copies).collect()
    }

    fn role(&self, parameter: ParameterOf) -> ParameterRole {
        self.job.table.parameters[parameter.index].role
    }

    /// Whether a parameter is trained: with adapters, only these are.
    fn is_trained(&self, parameter: ParameterOf) -> bool {
        let has_adapters = self.job.table.parameters.iter().any(|parameter| parameter.role == ParameterRole::Adapter);
        match self.role(parameter) {
            ParameterRole::Adapter => true,
            ParameterRole::Trained => !has_adapters,
            _ => false,
        }
    }

    /// The format in which a parameter is stored.
    fn stored(&self, parameter: ParameterOf) -> Element {
        let own = self.job.table.parameters[parameter.index].element;
        match self.role(parameter) {
            ParameterRole::Trained | ParameterRole::Adapter if self.is_trained(parameter) => self.job.stored,
            _ => own,
        }
    }
}
