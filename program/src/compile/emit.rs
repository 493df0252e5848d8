//! Emitting a stage's instructions: each task's operators in the graph's order, with what they need brought to where they need it.
//!
//! Nothing is placed in memory here and nothing waits for anything: buffers are numbered, instructions listed. A tensor may have several
//! variants at a time, one for each placement in which it was wanted.

use super::Lowering;
use super::convert::{Consumed, Place};
use super::cuts::Cuts;
use super::messages::{Receive, pass_of};
use super::reshard::Routes;
use super::state::{Member, StageState};
use crate::mesh::{Axis, Group, Mesh};
use crate::placement::Placements;
use crate::plan::{Plan, Recompute};
use crate::program::{
    Buffer, BufferId, BufferRole, Collective, GroupId, Initial, InitialShare, Instruction, Metric, MetricKind, Operation, Phase,
    StageProgram, Stream, StreamId,
};
use crate::schedule::{StagePass, Task};
use foretell_models::{Kernel, Operator, OperatorId, Pass, Role, TensorId};
use foretell_units::{Bytes, DataType};
use std::collections::{BTreeSet, HashMap, HashSet};

/// The emitter of one stage.
pub(super) struct StageEmitter<'a> {
    pub(super) lowering: &'a Lowering,
    pub(super) plan: &'a Plan,
    pub(super) mesh: &'a Mesh,
    pub(super) state: &'a StageState,
    pub(super) cuts: &'a Cuts,
    /// What crosses to and from stages with other meshes.
    pub(super) routes: &'a Routes,
    pub(super) program: StageProgram,
    names: HashMap<String, u32>,
    /// The variants of a tensor of a micro-batch that are in memory.
    live: HashMap<(TensorId, usize), Vec<(Placements, BufferId)>>,
    /// What is kept from step to step, by the tensor's name.
    kept: HashMap<String, BufferId>,
    /// Sums and gradients to which this step has written already.
    written: HashSet<BufferId>,
    /// For each bucket: parameters, gradients, optimizer state.
    pub(super) buckets: Vec<BucketBuffers>,
    /// Sharded parameters that are gathered now, by bucket: each parameter's place by its name.
    gathered: HashMap<usize, HashMap<String, BufferId>>,
    /// Gradients of a micro-batch that are not sharded yet, by bucket and micro-batch.
    open_gradients: HashMap<(usize, usize), OpenGradients>,
    /// Where the squares of gradients are summed.
    pub(super) norms: Vec<Norms>,
    /// What clipping and loss scaling decide with, where there is either.
    pub(super) control: Option<BufferId>,
    /// The root of all batch statistics.
    pub(super) statistics: Option<BufferId>,
    /// For each bucket, how many of its writers are still to come in the step.
    writers_left: Vec<usize>,
    /// The operators of each pass through each chunk, in the graph's order.
    operators: HashMap<(usize, StagePass), Vec<OperatorId>>,
    /// Of each block, the forward operators whose outputs its backward pass needs.
    needed_again: Vec<Vec<OperatorId>>,
}

/// A bucket's places in memory.
pub(super) struct BucketBuffers {
    /// All of them, or where ZeRO shards parameters the rank's shard.
    pub(super) parameters: BufferId,
    /// All of them, or where ZeRO shards gradients the rank's shard.
    pub(super) gradients: BufferId,
    pub(super) states: Vec<BufferId>,
    /// Where the reduced gradients are, once they are: all of them, or the rank's shard.
    pub(super) reduced: Option<BufferId>,
}

/// The sums of squares of the gradients of buckets that lie alike once they are reduced.
pub(super) struct Norms {
    pub(super) placements: Placements,
    /// One number a bucket.
    pub(super) root: BufferId,
    pub(super) buckets: Vec<(usize, BufferId)>,
}

/// The gradients of a bucket and a micro-batch before they are sharded.
struct OpenGradients {
    root: BufferId,
    /// By the gradient's name.
    pieces: HashMap<String, BufferId>,
    /// Writers still to come.
    writers_left: usize,
}

/// A run of operators of one block, and the buckets of the parameters that they read.
struct Run {
    /// Its first operator, within its task's.
    start: usize,
    buckets: BTreeSet<usize>,
}

impl<'a> StageEmitter<'a> {
    pub(super) fn new(
        lowering: &'a Lowering,
        plan: &'a Plan,
        mesh: &'a Mesh,
        cuts: &'a Cuts,
        stage: usize,
        state: &'a StageState,
        routes: &'a Routes,
    ) -> Self {
        let program = StageProgram {
            stage,
            streams: Vec::new(),
            groups: Vec::new(),
            peers: routes.peers.clone(),
            buffers: Vec::new(),
            instructions: Vec::new(),
            names: Vec::new(),
            metrics: Vec::new(),
            arena: Bytes::ZERO,
        };
        let mut emitter = Self {
            lowering,
            plan,
            mesh,
            state,
            cuts,
            routes,
            program,
            names: HashMap::new(),
            live: HashMap::new(),
            kept: HashMap::new(),
            written: HashSet::new(),
            buckets: Vec::new(),
            gathered: HashMap::new(),
            open_gradients: HashMap::new(),
            norms: Vec::new(),
            control: None,
            statistics: None,
            writers_left: Vec::new(),
            operators: HashMap::new(),
            needed_again: Vec::new(),
        };
        for (index, operator) in lowering.graph.operators.iter().enumerate() {
            if cuts.stage_of_block[operator.block] == stage {
                let pass = (cuts.chunk_of_block[operator.block], pass_of(plan.layout.schedule, operator.pass));
                emitter.operators.entry(pass).or_default().push(OperatorId(index));
            }
        }
        emitter.stream(Stream::Compute);
        emitter.keep_state();
        emitter.keep_sums();
        if plan.layout.recompute != Recompute::None {
            emitter.needed_again = emitter.find_needed_again();
        }
        emitter
    }

    pub(super) fn finish(self) -> StageProgram {
        self.program
    }

    /// Emits a schedule's tasks, each after what is to be received before it.
    pub(super) fn tasks(&mut self, tasks: &[Task], receives: &[Vec<Receive>]) {
        let mut left: HashMap<usize, usize> = HashMap::new();
        for task in tasks {
            *left.entry(task.micro_batch).or_default() += 1;
        }
        self.writers_left = self.state.buckets.iter().map(|bucket| bucket.writers * left.len()).collect();
        let runs: Vec<Vec<Run>> = tasks.iter().map(|task| self.runs(task)).collect();
        for (index, task) in tasks.iter().enumerate() {
            for receive in &receives[index] {
                self.receive(receive);
            }
            let phase = if task.pass == StagePass::Forward { Phase::Forward } else { Phase::Backward };
            let operators = self.operators_of(task).to_vec();
            let mut run = 0;
            for (position, &id) in operators.iter().enumerate() {
                if runs[index].get(run).is_some_and(|next| next.start == position) {
                    self.gather_ahead(&runs[index][run..], runs.get(index + 1).map_or(&[], Vec::as_slice), phase);
                    run += 1;
                }
                self.operator(id, task.micro_batch, phase);
                self.reduce_complete_buckets(id, task.micro_batch);
            }
            if task.pass == StagePass::Forward {
                self.forget_recomputable(task);
                self.forget_larger_variants(task.micro_batch);
            }
            // Until its last task a micro-batch's tensors may be read: by other chunks, and by gradients of parameters that were put off.
            if let Some(left) = left.get_mut(&task.micro_batch) {
                *left -= 1;
                if *left == 0 {
                    self.live.retain(|&(_, micro_batch), _| micro_batch != task.micro_batch);
                }
            }
        }
    }

    /// The operators that a task runs, in order.
    fn operators_of(&self, task: &Task) -> &[OperatorId] {
        self.operators.get(&(task.chunk, task.pass)).map_or(&[], Vec::as_slice)
    }

    /// Where ZeRO shards parameters: a task's operators by block, and the buckets that each needs. Else nothing.
    fn runs(&self, task: &Task) -> Vec<Run> {
        if !self.state.shards_parameters {
            return Vec::new();
        }
        let graph = &self.lowering.graph;
        let buckets_read = |id: OperatorId| {
            let parameters = graph.operators[id.0].inputs.iter().map(|input| &graph.tensor(input.tensor).name);
            parameters.filter_map(|name| self.state.bucket_of_parameter(name)).filter(|&one| self.state.buckets[one].shards > 1)
        };
        let mut runs: Vec<Run> = Vec::new();
        let mut block = None;
        for (position, &id) in self.operators_of(task).iter().enumerate() {
            let here = graph.operators[id.0].block;
            if block != Some(here) {
                block = Some(here);
                // What is computed again for the backward pass reads parameters, too.
                let again = if task.pass == StagePass::Forward { None } else { self.needed_again.get(here) };
                let buckets = again.into_iter().flatten().flat_map(|&id| buckets_read(id)).collect();
                runs.push(Run { start: position, buckets });
            }
            if let Some(run) = runs.last_mut() {
                run.buckets.extend(buckets_read(id));
            }
        }
        runs
    }

    /// Before a run of operators: gathers its parameters if they are not there, drops those that neither it nor the next needs, and
    /// begins to gather those of the next, so that they come while this run computes.
    fn gather_ahead(&mut self, rest: &[Run], next_task: &[Run], phase: Phase) {
        let Some(run) = rest.first() else { return };
        let next = rest.get(1).or_else(|| next_task.first()).map(|next| next.buckets.clone()).unwrap_or_default();
        self.gathered.retain(|bucket, _| run.buckets.contains(bucket) || next.contains(bucket));
        for bucket in run.buckets.iter().chain(&next) {
            if !self.gathered.contains_key(bucket) {
                self.gather(*bucket, phase);
            }
        }
    }

    fn gather(&mut self, index: usize, phase: Phase) {
        let bucket = &self.state.buckets[index];
        let name = format!("parameters {index}");
        let root = self.buffer(&name, BufferRole::Parameter, vec![bucket.elements], self.state.precision);
        let shard = self.buckets[index].parameters;
        self.exchange(&name, Collective::AllGather, Group::along(Axis::Shard), shard, root, phase);
        let mut pieces = HashMap::new();
        for member in &bucket.members {
            pieces.insert(member.name.clone(), self.piece(&member.name, root, member.offset, member.shape.clone()));
        }
        self.gathered.insert(index, pieces);
    }

    /// Emits one operator: its inputs as it wants them, itself, the sums and sends of its outputs.
    fn operator(&mut self, id: OperatorId, micro_batch: usize, phase: Phase) {
        let lowering = self.lowering;
        let operator = &lowering.graph.operators[id.0];
        let mut reads: Vec<BufferId> = operator
            .inputs
            .iter()
            .map(|input| {
                let wanted = lowering.sharding.wanted(id, input);
                self.fetch(input.tensor, micro_batch, wanted, phase)
            })
            .collect();
        let mut writes = Vec::with_capacity(operator.outputs.len());
        let mut accumulate = false;
        for output in &operator.outputs {
            match lowering.graph.tensor(output.tensor).role {
                // Batch statistics were summed when the operator ran first.
                Role::Sum if phase == Phase::Recompute => {}
                Role::Sum | Role::ParameterGradient(_) => {
                    if let Some(buffer) = self.sum_buffer(output.tensor, micro_batch) {
                        accumulate |= !self.written.insert(buffer);
                        writes.push(buffer);
                    }
                }
                _ => writes.push(self.new_variant(output.tensor, micro_batch, lowering.sharding.produced(output.tensor))),
            }
        }
        let mut kernel = operator.kernel(&lowering.sharding.local_extents(&lowering.graph, id, &lowering.mesh));
        if let (Kernel::CrossEntropyGradient { scaled, .. }, Some(control)) = (&mut kernel, self.loss_scale()) {
            *scaled = true;
            reads.push(control);
        }
        let kernel = kernel.from_sample(self.first_sample(micro_batch));
        let axes = self.positional_axes(id);
        let group = (!axes.is_empty()).then(|| self.group(Group::over(axes)));
        if lowering.sharding.is_ring(id) {
            self.ring(&Place { name: &operator.name, micro_batch, phase }, kernel, group, &reads, &writes);
        } else {
            self.push(
                &operator.name,
                Operation::Compute { kernel, accumulate, group },
                Stream::Compute,
                reads,
                writes,
                Some(micro_batch),
                phase,
            );
        }
        for output in &operator.outputs {
            if lowering.is_activation(output.tensor) {
                self.settle(output.tensor, micro_batch, phase);
                if phase != Phase::Recompute {
                    self.send(output.tensor, micro_batch, phase);
                }
            }
        }
    }

    /// The axes along the loops of which an operator's kernel must know which part a rank has.
    fn positional_axes(&self, id: OperatorId) -> Vec<Axis> {
        let operator = &self.lowering.graph.operators[id.0];
        let strategy = self.lowering.sharding.strategy(id);
        let along = |axis: &Axis| strategy.get(*axis).is_some_and(|one| operator.kind.knows_part_of(operator.loops[one.0].role));
        Axis::WITHIN_STAGE.into_iter().filter(along).collect()
    }

    /// The first sample of the global batch that is in a micro-batch.
    fn first_sample(&self, micro_batch: usize) -> usize {
        micro_batch * self.plan.layout.samples_at_once()
    }

    /// Where a sum over micro-batches is made: kept, or opened for this micro-batch where gradients are sharded.
    fn sum_buffer(&mut self, tensor: TensorId, micro_batch: usize) -> Option<BufferId> {
        let lowering = self.lowering;
        let name = &lowering.graph.tensor(tensor).name;
        match self.state.bucket_of_gradient(tensor).filter(|&index| self.shards_gradients(index)) {
            Some(index) => {
                if !self.open_gradients.contains_key(&(index, micro_batch)) {
                    let opened = self.open_gradients(index);
                    self.open_gradients.insert((index, micro_batch), opened);
                }
                self.open_gradients.get(&(index, micro_batch)).and_then(|open| open.pieces.get(name)).copied()
            }
            None => self.kept.get(name).copied(),
        }
    }

    fn shards_gradients(&self, bucket: usize) -> bool {
        self.state.shards_gradients && self.state.buckets[bucket].shards > 1
    }

    /// Room for a bucket's gradients of one micro-batch. What lies between parameters is zero, since it is summed with the rest.
    fn open_gradients(&mut self, index: usize) -> OpenGradients {
        let bucket = &self.state.buckets[index];
        let name = format!("gradients {index}");
        let root = self.buffer(&name, BufferRole::Gradient, vec![bucket.elements], DataType::Fp32);
        for (start, elements) in bucket.gaps() {
            let gap = self.piece(&name, root, start, vec![elements]);
            self.compute(&name, Kernel::Zero { elements }, vec![], vec![gap], Phase::Backward);
        }
        let mut pieces = HashMap::new();
        for member in &bucket.members {
            let gradient = format!("{}.gradient", member.name);
            let piece = self.piece(&gradient, root, member.offset, member.shape.clone());
            pieces.insert(gradient, piece);
        }
        OpenGradients { root, pieces, writers_left: bucket.writers }
    }

    /// The buffer that holds a tensor as it is wanted, made or brought if it is not there yet.
    pub(super) fn fetch(&mut self, tensor: TensorId, micro_batch: usize, wanted: Placements, phase: Phase) -> BufferId {
        let description = self.lowering.graph.tensor(tensor);
        let kept = match description.role {
            Role::Parameter(_) => {
                let bucket = self.state.bucket_of_parameter(&description.name);
                let gathered = bucket.and_then(|bucket| self.gathered.get(&bucket)?.get(&description.name));
                gathered.or_else(|| self.kept.get(&description.name)).copied()
            }
            Role::Running => self.kept.get(&description.name).copied(),
            _ => None,
        };
        if let Some(buffer) = kept {
            let settled = self.lowering.sharding.settled(tensor);
            let from = vec![(settled, buffer)];
            return if settled == wanted { buffer } else { self.convert(tensor, micro_batch, from, wanted, phase).0 };
        }
        if let Role::Input(kind) = description.role
            && !self.live.contains_key(&(tensor, micro_batch))
        {
            self.load(tensor, kind, micro_batch);
        }
        if !self.live.contains_key(&(tensor, micro_batch)) {
            self.recompute(tensor, micro_batch);
        }
        let variants = self.live.get(&(tensor, micro_batch));
        match variants.and_then(|variants| variants.iter().find(|(placements, _)| *placements == wanted)) {
            Some(&(_, buffer)) => buffer,
            None => {
                let variants = variants.cloned().unwrap_or_default();
                let first = variants.first().map(|&(_, buffer)| buffer);
                let (buffer, consumed) = self.convert(tensor, micro_batch, variants, wanted, phase);
                let live = self.live.entry((tensor, micro_batch)).or_default();
                if consumed == Consumed::Yes {
                    live.retain(|&(_, variant)| Some(variant) != first);
                }
                live.push((wanted, buffer));
                buffer
            }
        }
    }

    fn load(&mut self, tensor: TensorId, kind: foretell_models::InputKind, micro_batch: usize) {
        let placements = self.lowering.sharding.settled(tensor);
        let buffer = self.new_variant(tensor, micro_batch, placements);
        self.program.buffers[buffer.0 as usize].role = BufferRole::Input;
        let samples = self.lowering.mesh.samples_at_once() / self.lowering.mesh.batch_parts();
        let first_sample = self.first_sample(micro_batch);
        let operation = Operation::Load { input: kind, first_sample, samples };
        let lowering = self.lowering;
        self.push(
            &lowering.graph.tensor(tensor).name,
            operation,
            Stream::Load,
            vec![],
            vec![buffer],
            Some(micro_batch),
            Phase::Forward,
        );
    }

    /// Runs the forward operators of a tensor's block again, as far as its backward pass needs them.
    fn recompute(&mut self, tensor: TensorId, micro_batch: usize) {
        let Some(maker) = self.lowering.makers[tensor.0] else { return };
        let block = self.lowering.graph.operators[maker.0].block;
        for id in self.needed_again.get(block).cloned().unwrap_or_default() {
            let outputs = &self.lowering.graph.operators[id.0].outputs;
            let made = outputs
                .iter()
                .filter(|output| self.lowering.is_activation(output.tensor))
                .all(|output| self.live.contains_key(&(output.tensor, micro_batch)));
            if !made {
                self.operator(id, micro_batch, Phase::Recompute);
            }
        }
    }

    /// Of each block that may be recomputed, the forward operators whose outputs gradients read, and those that these read.
    fn find_needed_again(&self) -> Vec<Vec<OperatorId>> {
        let graph = &self.lowering.graph;
        let recompute = self.plan.layout.recompute;
        let mut repeated = self.forward_operators().iter().map(|id| graph.operators[id.0].block).collect::<Vec<_>>();
        repeated.dedup();
        repeated.retain(|&block| graph.blocks[block].recomputable);
        if let Recompute::FullLayers(layers) = recompute {
            repeated.truncate(layers);
        }
        let may_drop = |operator: &Operator| recompute != Recompute::Selective || operator.kind.is_attention();
        let mut needed = vec![false; graph.operators.len()];
        for index in (0..graph.operators.len()).rev() {
            let operator = &graph.operators[index];
            if operator.pass == Pass::Forward && !needed[index] {
                continue;
            }
            for input in &operator.inputs {
                if let Some(maker) = self.lowering.makers[input.tensor.0]
                    && self.lowering.is_activation(input.tensor)
                    && graph.operators[maker.0].pass == Pass::Forward
                    && graph.operators[maker.0].block == operator.block
                {
                    needed[maker.0] = true;
                }
            }
        }
        let mut blocks = vec![Vec::new(); graph.blocks.len()];
        for id in self.forward_operators() {
            let operator = &graph.operators[id.0];
            if needed[id.0] && repeated.contains(&operator.block) && may_drop(operator) {
                blocks[operator.block].push(id);
            }
        }
        blocks
    }

    /// The forward operators of all the stage's chunks, in the graph's order.
    fn forward_operators(&self) -> Vec<OperatorId> {
        let all = self.operators.iter().filter(|((_, pass), _)| *pass == StagePass::Forward);
        let mut operators: Vec<OperatorId> = all.flat_map(|(_, operators)| operators.iter().copied()).collect();
        operators.sort_unstable();
        operators
    }

    /// After a forward pass through a chunk, forgets what only the same block has read and can make again.
    fn forget_recomputable(&mut self, task: &Task) {
        let micro_batch = task.micro_batch;
        let graph = &self.lowering.graph;
        for (block, operators) in self.needed_again.iter().enumerate() {
            if self.cuts.chunk_of_block[block] != task.chunk {
                continue;
            }
            for output in operators.iter().flat_map(|id| &graph.operators[id.0].outputs) {
                let leaves_block = self.lowering.consumers[output.tensor.0]
                    .iter()
                    .any(|&id| graph.operators[id.0].pass == Pass::Forward && graph.operators[id.0].block != block);
                if !leaves_block {
                    self.live.remove(&(output.tensor, micro_batch));
                }
            }
        }
    }

    /// After a forward pass, forgets what was made of a tensor that is kept and is larger than that: a gathered sequence. It is made again.
    fn forget_larger_variants(&mut self, micro_batch: usize) {
        let bytes = |buffer: BufferId| self.program.buffers[buffer.0 as usize].bytes;
        for (_, variants) in self.live.iter_mut().filter(|((_, one), _)| *one == micro_batch) {
            if let Some(least) = variants.iter().map(|&(_, buffer)| bytes(buffer)).min() {
                variants.retain(|&(_, buffer)| bytes(buffer) == least);
            }
        }
    }

    /// Makes the sums that its maker left in a tensor, unless they may wait.
    fn settle(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) {
        let produced = self.lowering.sharding.produced(tensor);
        let settled = self.lowering.sharding.settled(tensor);
        if produced != settled
            && let Some(variants) = self.live.remove(&(tensor, micro_batch))
        {
            let (buffer, _) = self.convert(tensor, micro_batch, variants, settled, phase);
            self.live.insert((tensor, micro_batch), vec![(settled, buffer)]);
        }
    }

    /// After an operator: reduces the buckets whose last gradient it was.
    fn reduce_complete_buckets(&mut self, id: OperatorId, micro_batch: usize) {
        for index in self.state.buckets_written(&self.lowering.graph.operators[id.0]) {
            self.writers_left[index] -= 1;
            let is_last = self.writers_left[index] == 0;
            if self.shards_gradients(index) {
                let Some(open) = self.open_gradients.get_mut(&(index, micro_batch)) else { continue };
                open.writers_left -= 1;
                if open.writers_left == 0 {
                    let root = open.root;
                    self.open_gradients.remove(&(index, micro_batch));
                    self.shard_gradients(index, root);
                }
            }
            if is_last {
                self.reduce(index);
            }
        }
    }

    /// A new buffer for a tensor of a micro-batch, in a placement.
    pub(super) fn new_variant(&mut self, tensor: TensorId, micro_batch: usize, placements: Placements) -> BufferId {
        let lowering = self.lowering;
        let description = lowering.graph.tensor(tensor);
        let full: Vec<usize> = description.dimensions.iter().map(|one| one.extent).collect();
        let data_type = description.storage.data_type(self.plan.precision);
        let shape = placements.local_shape(&full, &lowering.mesh);
        let buffer = self.buffer(&description.name, BufferRole::Activation, shape, data_type);
        self.live.entry((tensor, micro_batch)).or_default().push((placements, buffer));
        buffer
    }

    pub(super) fn buffer(&mut self, name: &str, role: BufferRole, shape: Vec<usize>, data_type: DataType) -> BufferId {
        let bytes = data_type.size() * shape.iter().product::<usize>() as u64;
        self.program.buffers.push(Buffer {
            name: name.into(),
            role,
            shape,
            data_type,
            parent: None,
            offset: Bytes::ZERO,
            bytes,
            persistent: false,
            lifetime: None,
            initial: None,
        });
        BufferId(self.program.buffers.len() as u32 - 1)
    }

    pub(super) fn persistent(&mut self, name: &str, role: BufferRole, shape: Vec<usize>, data_type: DataType) -> BufferId {
        let id = self.buffer(name, role, shape, data_type);
        self.program.buffers[id.0 as usize].persistent = true;
        id
    }

    /// A piece of `parent`, from element `offset` on. Its offset becomes that in the arena when the parent is placed.
    pub(super) fn piece(&mut self, name: &str, parent: BufferId, offset: usize, shape: Vec<usize>) -> BufferId {
        let (role, data_type) = (self.program.buffer(parent).role, self.program.buffer(parent).data_type);
        let persistent = self.program.buffer(parent).persistent;
        // A piece of a piece is one of the whole.
        let (root, before) = match self.program.buffer(parent).parent {
            Some(root) => (root, self.program.buffer(parent).offset),
            None => (parent, Bytes::ZERO),
        };
        let id = self.buffer(name, role, shape, data_type);
        let buffer = &mut self.program.buffers[id.0 as usize];
        buffer.persistent = persistent;
        buffer.parent = Some(root);
        buffer.offset = before + data_type.size() * offset as u64;
        id
    }

    /// Parameters, gradients and optimizer state, bucket by bucket; then running statistics.
    fn keep_state(&mut self) {
        for (index, bucket) in self.state.buckets.iter().enumerate() {
            let (whole, shard) = (vec![bucket.elements], vec![bucket.shard_elements()]);
            let sharded = |is_sharded: bool| if is_sharded { shard.clone() } else { whole.clone() };
            let name = format!("parameters {index}");
            let shards_parameters = self.state.shards_parameters && bucket.shards > 1;
            let parameters = self.persistent(&name, BufferRole::Parameter, sharded(shards_parameters), self.state.precision);
            let shape = sharded(self.shards_gradients(index));
            let gradients = self.persistent(&format!("gradients {index}"), BufferRole::Gradient, shape, DataType::Fp32);
            let copies = self.state.optimizer_states + usize::from(self.state.master);
            let states: Vec<BufferId> = (0..copies)
                .map(|copy| {
                    let name = format!("optimizer state {index}.{copy}");
                    self.persistent(&name, BufferRole::OptimizerState, shard.clone(), DataType::Fp32)
                })
                .collect();
            let share = |member: &Member| InitialShare { tensor: member.parameter, placements: member.placements };
            let start = || Initial::Bucket {
                members: bucket.members.iter().map(|member| (member.offset, share(member))).collect(),
                axis: (bucket.shards > 1).then_some(Axis::Shard),
            };
            if shards_parameters {
                self.program.buffers[parameters.0 as usize].initial = Some(start());
            }
            // The single-precision copy is the last of the states.
            if let Some(master) = states.last().filter(|_| self.state.master) {
                self.program.buffers[master.0 as usize].initial = Some(start());
            }
            for member in &bucket.members {
                if !shards_parameters {
                    let parameter = self.piece(&member.name, parameters, member.offset, member.shape.clone());
                    self.program.buffers[parameter.0 as usize].initial = Some(Initial::Share(share(member)));
                    self.kept.insert(member.name.clone(), parameter);
                }
                if !self.shards_gradients(index) {
                    let name = format!("{}.gradient", member.name);
                    let gradient = self.piece(&name, gradients, member.offset, member.shape.clone());
                    self.kept.insert(name, gradient);
                }
            }
            self.buckets.push(BucketBuffers { parameters, gradients, states, reduced: None });
        }
        self.keep_norms();
        self.keep_control();
        if self.state.running.is_empty() {
            return;
        }
        let elements: usize = self.state.running.iter().map(|one| one.shape.iter().product::<usize>()).sum();
        let root = self.persistent("batch statistics", BufferRole::Sum, vec![elements], DataType::Fp32);
        let mut offset = 0;
        for running in &self.state.running {
            let statistics = self.piece(&running.statistics, root, offset, running.shape.clone());
            self.kept.insert(running.statistics.clone(), statistics);
            offset += running.shape.iter().product::<usize>();
            let buffer = self.persistent(&running.name, BufferRole::Running, running.shape.clone(), DataType::Fp32);
            self.program.buffers[buffer.0 as usize].initial =
                Some(Initial::Share(InitialShare { tensor: running.tensor, placements: running.placements }));
            self.kept.insert(running.name.clone(), buffer);
        }
        self.statistics = Some(root);
    }

    /// The loss and the count of right predictions, in the stage that makes them.
    fn keep_sums(&mut self) {
        for id in self.forward_operators() {
            for output in &self.lowering.graph.operators[id.0].outputs {
                let tensor = self.lowering.graph.tensor(output.tensor);
                if tensor.role != Role::Sum || self.kept.contains_key(&tensor.name) {
                    continue;
                }
                let buffer = self.persistent(&tensor.name, BufferRole::Sum, vec![1], DataType::Fp32);
                self.kept.insert(tensor.name.clone(), buffer);
                let kind = match tensor.name.as_str() {
                    "loss" => MetricKind::Loss,
                    "dropped" => MetricKind::Dropped,
                    _ => MetricKind::Correct,
                };
                let placements = self.lowering.sharding.produced(output.tensor);
                self.program.metrics.push(Metric { kind, buffer, placements });
            }
        }
    }

    /// The buffer kept under a name.
    pub(super) fn kept(&self, name: &str) -> Option<BufferId> {
        self.kept.get(name).copied()
    }

    /// Appends an instruction; dependencies are found later.
    #[allow(clippy::too_many_arguments)] // It is the one place where an instruction's fields come together.
    pub(super) fn push(
        &mut self,
        name: &str,
        operation: Operation,
        stream: Stream,
        reads: Vec<BufferId>,
        writes: Vec<BufferId>,
        micro_batch: Option<usize>,
        phase: Phase,
    ) {
        let name = match self.names.get(name) {
            Some(&known) => known,
            None => {
                let index = self.program.names.len() as u32;
                self.program.names.push(name.into());
                self.names.insert(name.into(), index);
                index
            }
        };
        let stream = self.stream(stream);
        let micro_batch = micro_batch.map(|index| index as u32);
        self.program.instructions.push(Instruction {
            name,
            operation,
            stream,
            after: Vec::new(),
            reads,
            writes,
            micro_batch,
            phase,
        });
    }

    fn stream(&mut self, stream: Stream) -> StreamId {
        let index = self.program.streams.iter().position(|known| *known == stream).unwrap_or_else(|| {
            self.program.streams.push(stream);
            self.program.streams.len() - 1
        });
        StreamId(index as u16)
    }

    pub(super) fn group(&mut self, group: Group) -> GroupId {
        let index = self.program.groups.iter().position(|known| *known == group).unwrap_or_else(|| {
            self.program.groups.push(group);
            self.program.groups.len() - 1
        });
        GroupId(index as u16)
    }
}
