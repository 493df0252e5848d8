//! Emitting a stage's instructions: each task's operators in the graph's order, with what they need brought to where they need it.
//!
//! Nothing is placed in memory here and nothing waits for anything: buffers are numbered, instructions listed. A tensor may have several
//! variants at a time, one for each placement in which it was wanted.

use super::activations::{Leaving, Offloaded, Reading};
use super::convert::{Consumed, Place};
use super::cuts::Cuts;
use super::keep::BucketBuffers;
use super::messages::{ChunkPass, Receive, pass_of};
use super::repeats::{Mark, Piece, Repeats, Way};
use super::reshard::Routes;
use super::state::StageState;
use super::zero::{OpenGradients, Run};
use super::{Emission, Lowering};
use crate::mesh::{Axis, Group, Mesh};
use crate::placement::Placements;
use crate::plan::{Plan, Recompute};
use crate::program::{BufferId, BufferRole, Operation, Pass, Phase, StageProgram, Stream};
use crate::schedule::{StagePass, Task};
use foretell_models::{BATCH, Kernel, OperatorId, Role, TensorId};
use foretell_units::Bytes;
use rustc_hash::{FxHashMap, FxHashSet};
use std::rc::Rc;

/// What stands for a micro-batch where a tensor is the same for all of them.
const OF_ALL: usize = usize::MAX;

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
    pub(super) names: FxHashMap<String, u32>,
    /// The variants of a tensor of a micro-batch that are in memory.
    pub(super) live: FxHashMap<(TensorId, usize), Vec<(Placements, BufferId)>>,
    /// What is kept from step to step, by the tensor's name.
    pub(super) kept: FxHashMap<String, BufferId>,
    /// Sums and gradients to which this step has written already.
    pub(super) written: FxHashSet<BufferId>,
    /// For each bucket: parameters, gradients, optimizer state.
    pub(super) buckets: Vec<BucketBuffers>,
    /// Sharded parameters that are gathered now, by bucket: each parameter's place by its name.
    pub(super) gathered: FxHashMap<usize, FxHashMap<String, BufferId>>,
    /// Gradients of a micro-batch that are not sharded yet, by bucket and micro-batch.
    pub(super) open_gradients: FxHashMap<(usize, usize), OpenGradients>,
    /// Where the squares of gradients are summed.
    pub(super) norms: Vec<Norms>,
    /// What clipping and loss scaling decide with, where there is either.
    pub(super) control: Option<BufferId>,
    /// The roots of batch statistics, each with the axes along which they are parts of sums.
    pub(super) statistics: Vec<(Vec<Axis>, BufferId)>,
    /// For each bucket, how many of its writers are still to come in the step.
    pub(super) writers_left: Vec<usize>,
    /// Buckets that are complete, to be reduced after the backward pass.
    pub(super) put_off: Vec<usize>,
    /// Buckets that are still to be summed over these axes after the backward pass.
    pub(super) summed_last: Vec<(usize, Vec<Axis>)>,
    /// The operators of each pass through each chunk, in the graph's order; and once they were asked for, their runs and how often they add to which
    /// bucket.
    pub(super) operators: FxHashMap<ChunkPass, Vec<OperatorId>>,
    pub(super) runs: FxHashMap<ChunkPass, Rc<[Run]>>,
    pub(super) writers: FxHashMap<ChunkPass, Rc<[(usize, usize)]>>,
    /// Where activations of a micro-batch lie that are on the host now.
    pub(super) offloaded: FxHashMap<(TensorId, usize), Offloaded>,
    /// What the forward pass through a chunk takes out, and what the others read of that, once they were asked for.
    pub(super) leaving: FxHashMap<usize, Rc<[Leaving]>>,
    pub(super) readings: FxHashMap<ChunkPass, Rc<[Reading]>>,
    /// Of each block, the forward operators whose outputs its backward pass needs.
    pub(super) needed_again: Vec<Vec<OperatorId>>,
}

/// The sums of squares of the gradients of buckets that lie alike once they are reduced.
pub(super) struct Norms {
    pub(super) placements: Placements,
    /// One number a bucket.
    pub(super) root: BufferId,
    pub(super) buckets: Vec<(usize, BufferId)>,
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
            passes: Vec::new(),
            metrics: Vec::new(),
            arena: Bytes::ZERO,
            host_arena: Bytes::ZERO,
        };
        let mut emitter = Self {
            lowering,
            plan,
            mesh,
            state,
            cuts,
            routes,
            program,
            names: FxHashMap::default(),
            live: FxHashMap::default(),
            kept: FxHashMap::default(),
            written: FxHashSet::default(),
            buckets: Vec::new(),
            gathered: FxHashMap::default(),
            open_gradients: FxHashMap::default(),
            norms: Vec::new(),
            control: None,
            statistics: Vec::new(),
            writers_left: Vec::new(),
            put_off: Vec::new(),
            summed_last: Vec::new(),
            operators: FxHashMap::default(),
            runs: FxHashMap::default(),
            writers: FxHashMap::default(),
            offloaded: FxHashMap::default(),
            leaving: FxHashMap::default(),
            readings: FxHashMap::default(),
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
        let recompute = plan.layout.recompute.of_stage(stage);
        if recompute != Recompute::None {
            emitter.needed_again = emitter.find_needed_again(&recompute);
        }
        emitter
    }

    pub(super) fn finish(self) -> StageProgram {
        self.program
    }

    /// Emits a schedule's tasks, each after what is to be received before it.
    pub(super) fn tasks(&mut self, tasks: &[Task], receives: &[Vec<Receive>], emission: Emission) {
        let mut left: FxHashMap<usize, usize> = FxHashMap::default();
        for task in tasks {
            *left.entry(task.micro_batch).or_default() += 1;
        }
        self.writers_left = self.state.buckets.iter().map(|bucket| bucket.writers * left.len()).collect();
        let mut repeats = match emission {
            Emission::Once => Repeats::new(tasks, receives, self.state.gathers()),
            #[cfg(test)]
            Emission::Each => Repeats::none(),
        };
        for (index, task) in tasks.iter().enumerate() {
            let first = self.program.instructions.len() as u32;
            for receive in &receives[index] {
                let piece = Piece::Message(receive);
                self.once_or_again(&mut repeats, receive.micro_batch, piece, |emitter| emitter.receive(receive));
            }
            let next = tasks.get(index + 1);
            let was_repeated =
                self.once_or_again(&mut repeats, task.micro_batch, Piece::Pass, |emitter| emitter.task(task, next));
            if was_repeated {
                self.count_writers(task);
            }
            self.program.passes.push(Pass { task: *task, instructions: first..self.program.instructions.len() as u32 });
            // Until its last task a micro-batch's tensors may be read: by other chunks, and by gradients of parameters that were put off.
            if let Some(left) = left.get_mut(&task.micro_batch) {
                *left -= 1;
                if *left == 0 && !was_repeated {
                    self.live.retain(|&(_, micro_batch), _| micro_batch != task.micro_batch);
                    self.offloaded.retain(|&(_, micro_batch), _| micro_batch != task.micro_batch);
                }
            }
        }
    }

    /// Emits a piece of a micro-batch, or what an earlier one left there again; returns whether it was the latter.
    fn once_or_again(
        &mut self,
        repeats: &mut Repeats,
        micro_batch: usize,
        piece: Piece<'_>,
        emit: impl FnOnce(&mut Self),
    ) -> bool {
        match repeats.way(micro_batch, piece) {
            Way::Alone => emit(self),
            Way::Learned(part) => {
                let mark = Mark::of(&self.program);
                emit(self);
                repeats.learn(part, &mut self.program, mark);
            }
            Way::Again(part) => {
                let first_sample = self.first_sample(micro_batch);
                repeats.again(part, micro_batch, first_sample, &mut self.program);
                return true;
            }
        }
        false
    }

    fn task(&mut self, task: &Task, next: Option<&Task>) {
        let runs = self.runs(task);
        let next_runs = next.map_or_else(|| Rc::from([]), |next| self.runs(next));
        let phase = if task.pass == StagePass::Forward { Phase::Forward } else { Phase::Backward };
        let operators = self.operators_of(task).to_vec();
        let (leaving, readings) = (self.leaving(task), self.readings(task));
        let (mut leaving, returns) = (&*leaving, next.is_some_and(|next| task.returns_with(next)));
        let mut run = 0;
        for (position, &id) in operators.iter().enumerate() {
            if runs.get(run).is_some_and(|next| next.start == position) {
                self.gather_ahead(&runs[run..], &next_runs, phase);
                run += 1;
            }
            self.bring_in_ahead(&readings, position, task.micro_batch);
            self.operator(id, task.micro_batch, phase);
            self.reduce_complete_buckets(id, task.micro_batch);
            self.take_out_activations(&mut leaving, position, task.micro_batch, returns);
        }
        if task.pass == StagePass::Forward {
            self.forget_recomputable(task);
            self.forget_larger_variants(task.micro_batch);
        }
    }

    /// The operators that a task runs, in order.
    pub(super) fn operators_of(&self, task: &Task) -> &[OperatorId] {
        self.operators.get(&(task.chunk, task.pass)).map_or(&[], Vec::as_slice)
    }

    /// Emits one operator: its inputs as it wants them, itself, the sums and sends of its outputs.
    pub(super) fn operator(&mut self, id: OperatorId, micro_batch: usize, phase: Phase) {
        let lowering = self.lowering;
        let operator = &lowering.graph.operators[id.0];
        if operator.outputs.iter().any(|output| self.live.contains_key(&(output.tensor, OF_ALL))) {
            return;
        }
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
                Role::OfParameter(_) => {
                    let buffer = self.new_variant(output.tensor, OF_ALL, lowering.sharding.produced(output.tensor));
                    self.program.buffers[buffer.0 as usize].role = BufferRole::ParameterCopy;
                    writes.push(buffer);
                }
                _ => writes.push(self.new_variant(output.tensor, micro_batch, lowering.sharding.produced(output.tensor))),
            }
        }
        let mut kernel = operator.kernel(&lowering.sharding.local_extents(&lowering.graph, id, &lowering.mesh));
        if let (Kernel::CrossEntropyGradient { scaled, .. }, Some(control)) = (&mut kernel, self.loss_scale()) {
            *scaled = true;
            reads.push(control);
        }
        let kernel = kernel.from_sample(self.first_sample(micro_batch)).among_samples_of(self.sample_parts(id));
        let axes = self.positional_axes(id);
        let group = (!axes.is_empty()).then(|| self.group(Group::over(axes)));
        if lowering.sharding.is_ring(id) {
            self.ring(&Place { name: &operator.name, micro_batch, phase, is_of_experts: false }, kernel, group, &reads, &writes);
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
        // Which samples are those of a rank's place along the other axes it knows anyway.
        let cuts_samples = |axis: &Axis| operator.kind.drops() && self.sample_axes(id).any(|one| one == *axis);
        let along = |axis: &Axis| strategy.get(*axis).is_some_and(|one| operator.kind.knows_part_of(operator.loops[one.0].role));
        Axis::WITHIN_STAGE.into_iter().filter(|axis| along(axis) || cuts_samples(axis)).collect()
    }

    /// The axes that cut an operator's samples beside those that cut the samples of all.
    fn sample_axes(&self, id: OperatorId) -> impl Iterator<Item = Axis> {
        let batch = self.lowering.graph.operators[id.0].find_loop(BATCH);
        let strategy = self.lowering.sharding.strategy(id);
        let others = Axis::WITHIN_STAGE.into_iter().filter(|axis| !Axis::BATCH.contains(axis));
        others.filter(move |&axis| batch.is_some() && strategy.get(axis) == batch)
    }

    /// Into how many parts those axes cut them.
    fn sample_parts(&self, id: OperatorId) -> usize {
        self.sample_axes(id).map(|axis| self.lowering.mesh.size(axis)).product()
    }

    /// The first sample of the global batch that is in a micro-batch.
    fn first_sample(&self, micro_batch: usize) -> usize {
        micro_batch * self.plan.layout.samples_at_once()
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
        if let Role::OfParameter(_) = description.role {
            return self.fetch_of_parameter(tensor, micro_batch, phase);
        }
        if let Role::Input(kind) = description.role
            && !self.live.contains_key(&(tensor, micro_batch))
        {
            self.load(tensor, kind, micro_batch);
        }
        self.bring_in_activation(tensor, micro_batch);
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

    /// What is made of a parameter alone, when it is first needed: its readers want it as its maker leaves it.
    fn fetch_of_parameter(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) -> BufferId {
        if !self.live.contains_key(&(tensor, OF_ALL))
            && let Some(maker) = self.lowering.makers[tensor.0]
        {
            self.operator(maker, micro_batch, phase);
        }
        match self.live.get(&(tensor, OF_ALL)).and_then(|variants| variants.first()) {
            Some(&(_, buffer)) => buffer,
            None => unreachable!("its maker has just made it"),
        }
    }

    /// Forgets what was made of the parameters of buckets that are dropped: it is made again of those that are gathered again.
    pub(super) fn forget_of_parameters(&mut self, is_dropped: impl Fn(usize) -> bool) {
        let Self { lowering, state, live, .. } = self;
        live.retain(|&(tensor, micro_batch), _| match lowering.graph.tensor(tensor).role {
            Role::OfParameter(parameter) if micro_batch == OF_ALL => {
                !state.bucket_of_parameter(&lowering.graph.tensor(parameter).name).is_some_and(&is_dropped)
            }
            _ => true,
        });
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

    /// The forward operators of all the stage's chunks, in the graph's order.
    pub(super) fn forward_operators(&self) -> Vec<OperatorId> {
        let all = self.operators.iter().filter(|((_, pass), _)| *pass == StagePass::Forward);
        let mut operators: Vec<OperatorId> = all.flat_map(|(_, operators)| operators.iter().copied()).collect();
        operators.sort_unstable();
        operators
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
    pub(super) fn settle(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) {
        let produced = self.lowering.sharding.produced(tensor);
        let settled = self.lowering.sharding.settled(tensor);
        if produced != settled
            && let Some(variants) = self.live.remove(&(tensor, micro_batch))
        {
            let (buffer, _) = self.convert(tensor, micro_batch, variants, settled, phase);
            self.live.insert((tensor, micro_batch), vec![(settled, buffer)]);
        }
    }

    /// A new buffer for a tensor of a micro-batch, in a placement.
    pub(super) fn new_variant(&mut self, tensor: TensorId, micro_batch: usize, placements: Placements) -> BufferId {
        let lowering = self.lowering;
        let description = lowering.graph.tensor(tensor);
        let full: Vec<usize> = description.dimensions.iter().map(|one| one.extent).collect();
        let data_type = description.storage.data_type(self.plan.storage());
        let shape = placements.local_shape(&full, &lowering.mesh);
        let buffer = self.buffer(&description.name, BufferRole::Activation, shape, data_type);
        self.live.entry((tensor, micro_batch)).or_default().push((placements, buffer));
        buffer
    }
}
