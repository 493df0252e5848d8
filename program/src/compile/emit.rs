//! Emitting the instruction list of a stage: the operators of each task in the graph's order, with
//! the communication and conversions that bring each operand where it is needed.
//!
//! The emitter numbers buffers and lists instructions. Later passes assign memory and add waits. A
//! tensor may have several variants at once, one for each placement in which an operator reads it.
//!
//! [`StageEmitter`] only decides what comes next, and brings operands into the placements that
//! operators read ([`operands`]). It works on a list builder ([`list`]), the live tensors
//! ([`live`]), the persistent buffers ([`persistent`]), and one policy each for gathered parameters
//! ([`gather`]), gradient buckets ([`buckets`]) and offloaded activations ([`activations`]). Parts
//! that run a few positions at a time are emitted tile by tile ([`tiles`]).
//! Micro-batches that repeat an earlier one are copied from it ([`repeats`]). It must not know what
//! a schedule is called: tasks arrive in order.

mod activations;
mod averaging;
mod buckets;
mod convert;
mod early;
mod exchange;
mod gather;
mod list;
mod live;
mod operands;
mod optimizer_states;
mod persistent;
mod push;
mod recompute;
mod repeats;
mod ring;
mod servers;
mod stage;
mod tiles;
mod transfers;
mod update;
mod workers;

pub(super) use stage::Stage;

use super::messages::Receive;
use super::reshard::crossing_placements;
use super::tiling::WaveId;
use crate::cycle::ExchangePart;
use crate::mesh::{Axis, Group};
use crate::program::{BufferId, BufferRole, Operation, Phase, StageProgram};
use crate::schedule::{StagePass, Task};
use activations::OffloadedActivations;
use buckets::GradientBuckets;
use early::EarlyUpdates;
use exchange::Exchange;
use foretell_models::{Kernel, Operand, OperatorId, Pass, Role, TensorId};
use gather::GatheredParameters;
use list::{Label, ListBuilder};
use live::{ALL_MICRO_BATCHES, LiveTensors};
use persistent::PersistentBuffers;
use repeats::{ListEnd, Next, Repeats, Segment};
use ring::Ring;
use rustc_hash::{FxHashMap, FxHashSet};
use std::rc::Rc;
use update::Update;
use workers::WorkerMessages;

/// How the emitter handles instructions that micro-batches share. Both ways give the same list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Emission {
    /// Emitted once, then copied for other micro-batches.
    Once,
    /// Emitted for each micro-batch. Tests compare `Once` with it.
    #[cfg(test)]
    Each,
}

/// The emitter of one list.
pub(super) struct StageEmitter<'a> {
    stage: &'a Stage<'a>,
    list: ListBuilder,
    live: LiveTensors,
    persistent: PersistentBuffers,
    parameters: GatheredParameters,
    gradients: GradientBuckets,
    messages: WorkerMessages,
    offloaded: OffloadedActivations,
    /// The part of an exchange between replicas that this step carries out, if any.
    exchange: Option<Exchange<'a>>,
    early: EarlyUpdates,
    /// The waves of tiled parts that were emitted for each micro-batch.
    emitted_waves: FxHashSet<(WaveId, usize)>,
    /// The operators that came before their wave did.
    waiting: FxHashMap<(WaveId, usize), Vec<OperatorId>>,
}

impl<'a> StageEmitter<'a> {
    pub(super) fn new(stage: &'a Stage<'a>) -> Self {
        let mut list = ListBuilder::new(stage.index, stage.routes.peers.clone(), stage.plan.layout.collective);
        let persistent = PersistentBuffers::declare(&mut list, stage);
        let messages = WorkerMessages::new(&mut list, stage);
        Self {
            stage,
            list,
            live: LiveTensors::default(),
            persistent,
            parameters: GatheredParameters::default(),
            gradients: GradientBuckets::new(stage),
            messages,
            offloaded: OffloadedActivations::default(),
            exchange: None,
            early: EarlyUpdates::default(),
            emitted_waves: FxHashSet::default(),
            waiting: FxHashMap::default(),
        }
    }

    /// The list, and the buckets that it pushes to servers, in order.
    pub(super) fn finish(self) -> (StageProgram, Vec<usize>) {
        (self.list.finish(), self.messages.pushed)
    }

    /// Emits the tasks of a schedule, each after the messages that it needs. `receives` has the
    /// messages of each task.
    pub(super) fn tasks(&mut self, tasks: &[Task], receives: &[Vec<Receive>], emission: Emission) {
        let mut tasks_left: FxHashMap<usize, usize> = FxHashMap::default();
        for task in tasks {
            *tasks_left.entry(task.micro_batch).or_default() += 1;
        }
        self.gradients.expect_micro_batches(self.stage, tasks_left.len());
        self.messages.pull(&mut self.list, self.stage, &self.persistent);
        let mut repeats = match emission {
            Emission::Once => Repeats::new(tasks, receives, self.stage.state.gathers),
            #[cfg(test)]
            Emission::Each => Repeats::none(),
        };
        for (index, task) in tasks.iter().enumerate() {
            let first = self.list.len();
            for receive in &receives[index] {
                let segment = Segment::Message(receive);
                self.emit_or_copy(&mut repeats, receive.micro_batch, segment, |emitter| emitter.receive(receive));
            }
            let next = tasks.get(index + 1);
            let was_copied = self.emit_or_copy(&mut repeats, task.micro_batch, Segment::Pass, |emitter| emitter.task(task, next));
            if was_copied {
                self.gradients.count_copied_task(self.stage, task);
            }
            self.list.end_pass(*task, first);
            // Other chunks and postponed weight gradients may read a micro-batch's tensors until
            // its last task.
            if let Some(left) = tasks_left.get_mut(&task.micro_batch) {
                *left -= 1;
                if *left == 0 && !was_copied {
                    self.live.forget_micro_batch(task.micro_batch);
                    self.offloaded.forget_micro_batch(task.micro_batch);
                }
            }
        }
    }

    /// Emits a segment of a micro-batch, or copies it from an earlier micro-batch. Returns whether
    /// it was copied.
    fn emit_or_copy(
        &mut self,
        repeats: &mut Repeats,
        micro_batch: usize,
        segment: Segment<'_>,
        emit: impl FnOnce(&mut Self),
    ) -> bool {
        match repeats.next(micro_batch, segment) {
            Next::Emit => emit(self),
            Next::EmitAndRecord(segment) => {
                let start = ListEnd::of(self.list.program_mut());
                emit(self);
                repeats.record(segment, self.list.program_mut(), start);
            }
            Next::Copy(segment) => {
                let first_sample = self.stage.first_sample(micro_batch);
                repeats.copy(segment, micro_batch, first_sample, self.list.program_mut());
                return true;
            }
        }
        false
    }

    fn task(&mut self, task: &Task, next: Option<&Task>) {
        let stage = self.stage;
        let micro_batch = task.micro_batch;
        let parameters = self.parameters.blocks_of(stage, task);
        let next_parameters = next.map_or_else(|| Rc::from([]), |next| self.parameters.blocks_of(stage, next));
        let activations = self.offloaded.blocks_of(stage, task);
        let leaving = self.offloaded.leaving(stage, task);
        let (mut leaving, returns) = (&*leaving, next.is_some_and(|next| task.returns_with(next)));
        let phase = if task.pass == StagePass::Forward { Phase::Forward } else { Phase::Backward };
        let mut block = 0;
        for (position, &id) in stage.operators_of(task).iter().enumerate() {
            if let Some(current) = parameters.get(block).filter(|block| block.start == position) {
                let blocks = (current, parameters.get(block + 1).or(next_parameters.first()));
                self.parameters.prepare(&mut self.list, stage, &self.persistent, &mut self.live, blocks, phase);
                block += 1;
            }
            let now = (position, micro_batch);
            self.offloaded.move_in_ahead(&mut self.list, stage, &mut self.live, &activations, now);
            self.operator(id, micro_batch, phase);
            for id in self.done_after(id, micro_batch) {
                let instance = (id, micro_batch);
                self.gradients.after_operator(&mut self.list, stage, &self.persistent, &mut self.messages, instance);
                self.update_early(task, position, id);
            }
            self.offloaded.move_out(&mut self.list, stage, &mut self.live, &mut leaving, now, returns);
        }
        if task.pass == StagePass::Forward {
            let is_of_chunk = |block: usize| stage.cuts.chunk_of_block[block] == task.chunk;
            for tensor in stage.recomputation.forgotten_tensors(stage.lowering, is_of_chunk) {
                self.live.take(tensor, micro_batch);
            }
            self.live.forget_larger_variants(&self.list, micro_batch);
        }
    }

    /// Emits one operator: the conversions of its inputs, its kernel, then the sums and sends of
    /// its outputs.
    fn operator(&mut self, id: OperatorId, micro_batch: usize, phase: Phase) {
        let stage = self.stage;
        let (lowering, operator) = (stage.lowering, stage.operator(id));
        if self.tiled_operator(id, micro_batch, phase) {
            return;
        }
        if operator.outputs.iter().any(|output| self.live.contains(output.tensor, ALL_MICRO_BATCHES)) {
            return;
        }
        let reads: Vec<BufferId> = operator
            .inputs
            .iter()
            .map(|input| self.fetch(input.tensor, micro_batch, lowering.sharding.wanted(id, input), phase))
            .collect();
        let (writes, accumulate) = self.output_buffers(id, micro_batch, phase);
        if accumulate {
            self.clear_unread_sums(id, &writes, (micro_batch, phase));
        }
        let kernel = operator.kernel(&lowering.sharding.local_extents(&lowering.graph, id, &lowering.mesh));
        let label = Label { name: &operator.name, micro_batch: Some(micro_batch), phase };
        self.compute(id, kernel, label, accumulate, reads, &writes);
        for output in operator.outputs.iter().filter(|output| lowering.is_activation(output.tensor)) {
            self.finish_output(output.tensor, micro_batch, phase);
        }
    }

    /// Emits an operator's kernel, or the steps of its ring.
    fn compute(
        &mut self,
        id: OperatorId,
        mut kernel: Kernel,
        label: Label<'_>,
        accumulate: bool,
        mut reads: Vec<BufferId>,
        writes: &[BufferId],
    ) {
        let stage = self.stage;
        let (lowering, operator) = (stage.lowering, stage.operator(id));
        let loss_scale = self.persistent.control.filter(|_| stage.plan.scales_loss());
        if let (
            Kernel::CrossEntropyGradient { scaled, .. } | Kernel::WeightedCrossEntropyGradient { scaled, .. },
            Some(control),
        ) = (&mut kernel, loss_scale)
        {
            *scaled = true;
            reads.push(control);
        }
        let first_sample = stage.first_sample(label.micro_batch.expect("invariant: an operator runs for a micro-batch"));
        let kernel = kernel.with_first_sample(first_sample).with_sample_parts(stage.sample_parts(id));
        let kernel = kernel.with_order(lowering.sharding.order_of(operator));
        let axes = stage.positional_axes(id);
        let group = (!axes.is_empty()).then(|| self.list.group(Group::over(axes)));
        if lowering.sharding.is_ring(id) {
            let ranks = lowering.mesh.size(Axis::Context);
            Ring { list: &mut self.list, label, ranks, group }.attention(kernel, &reads, writes);
        } else {
            self.list.push(label, Operation::Compute { kernel, accumulate, group }, &reads, writes);
        }
    }

    /// Sums and sends an activation that was just made.
    fn finish_output(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) {
        self.settle(tensor, micro_batch, phase);
        if phase != Phase::Recompute {
            self.send(tensor, micro_batch, phase);
        }
    }

    /// The buffers that an operator writes, and whether it adds to their contents.
    fn output_buffers(&mut self, id: OperatorId, micro_batch: usize, phase: Phase) -> (Vec<BufferId>, bool) {
        let outputs = &self.stage.operator(id).outputs;
        let mut buffers = Vec::with_capacity(outputs.len());
        let mut accumulate = false;
        for (buffer, has_contents) in outputs.iter().filter_map(|output| self.output_buffer(output, micro_batch, phase)) {
            accumulate |= has_contents;
            buffers.push(buffer);
        }
        (buffers, accumulate)
    }

    /// The buffer that an operator writes an output to, and whether it adds to what is there;
    /// `None` if it does not write the output in this pass.
    fn output_buffer(&mut self, output: &Operand, micro_batch: usize, phase: Phase) -> Option<(BufferId, bool)> {
        let stage = self.stage;
        let produced = stage.lowering.sharding.produced(output.tensor);
        let buffer = match stage.lowering.graph.tensor(output.tensor).role {
            // Batch statistics were summed when the operator first ran.
            Role::Sum if phase == Phase::Recompute => return None,
            Role::Sum | Role::ParameterGradient(_) => {
                let instance = (output.tensor, micro_batch);
                let target = self.gradients.sum_target(&mut self.list, stage, &self.persistent, instance)?;
                return Some((target.buffer, target.has_contents));
            }
            // Each micro-batch has a buffer of its own until the end of the step.
            Role::Kept => {
                let tensor = stage.lowering.graph.tensor(output.tensor);
                let data_type = tensor.storage.data_type(stage.plan.storage());
                let shape = produced.local_shape(&stage.lowering.shape(output.tensor), &stage.lowering.mesh);
                self.list.add_persistent(stage.name(output.tensor), BufferRole::Sum, shape, data_type)
            }
            Role::OfParameter(_) => {
                let instance = (output.tensor, ALL_MICRO_BATCHES);
                let buffer = self.live.new_variant(&mut self.list, stage, instance, produced);
                self.list.set_role(buffer, BufferRole::ParameterCopy);
                buffer
            }
            _ => self.live.new_variant(&mut self.list, stage, (output.tensor, micro_batch), produced),
        };
        Some((buffer, false))
    }

    /// Zeroes the outputs that nothing reads, before their kernel adds to them.
    fn clear_unread_sums(&mut self, id: OperatorId, writes: &[BufferId], (micro_batch, phase): (usize, Phase)) {
        let operator = self.stage.operator(id);
        let label = Label { name: &operator.name, micro_batch: Some(micro_batch), phase };
        for (output, &buffer) in operator.outputs.iter().zip(writes) {
            if self.stage.lowering.graph.tensor(output.tensor).role == Role::UnreadSum {
                let elements = self.list.elements(buffer);
                self.list.compute(label, Kernel::Zero { elements }, &[], &[buffer]);
            }
        }
    }

    /// Receives a tensor from another stage.
    fn receive(&mut self, receive: &Receive) {
        let stage = self.stage;
        let &Receive { tensor, micro_batch, from } = receive;
        let Some(producer) = stage.lowering.producers[tensor.0] else { return };
        let phase = if stage.operator(producer).pass == Pass::Forward { Phase::Forward } else { Phase::Backward };
        let label = self.label(tensor, micro_batch, phase);
        match stage.routes.receives.get(&(tensor, from)) {
            None => {
                let placements = stage.lowering.sharding.settled(tensor);
                let buffer = self.live.new_variant(&mut self.list, stage, (tensor, micro_batch), placements);
                let peer = self.list.opposite_peer(from);
                self.list.receive(label, peer, buffer);
            }
            Some(fragments) => {
                let placements = crossing_placements(stage.lowering, tensor);
                let shard = self.live.new_variant(&mut self.list, stage, (tensor, micro_batch), placements);
                for fragment in fragments {
                    transfers::receive_fragment(&mut self.list, label, fragment, shard);
                }
            }
        }
    }

    /// Sends a tensor that was just produced to the other stages that read it.
    fn send(&mut self, tensor: TensorId, micro_batch: usize, phase: Phase) {
        let stage = self.stage;
        let label = self.label(tensor, micro_batch, phase);
        for reader in stage.lowering.other_readers(tensor, stage.index, &stage.cuts.stage_of_block) {
            match stage.routes.sends.get(&(tensor, reader)) {
                None => {
                    let buffer = self.fetch(tensor, micro_batch, stage.lowering.sharding.settled(tensor), phase);
                    let peer = self.list.opposite_peer(reader);
                    self.list.send(label, peer, buffer);
                }
                Some(fragments) => {
                    // A rank without fragments to send still takes part in the sum that other ranks
                    // of its group need.
                    let shard = self.fetch(tensor, micro_batch, crossing_placements(stage.lowering, tensor), phase);
                    for fragment in fragments {
                        transfers::send_fragment(&mut self.list, label, fragment, shard);
                    }
                }
            }
        }
    }

    /// Begins the step's part of an exchange: emits the messages between replicas that overlap with
    /// the step's kernels.
    pub(super) fn begin_exchange(&mut self, part: ExchangePart) {
        self.exchange = Some(Exchange::new(self.stage, part, &mut self.list, &self.persistent));
    }

    /// Emits the end of the step, after the last backward pass, with its part of an exchange.
    pub(super) fn update(&mut self) {
        self.gradients.finish(&mut self.list, self.stage, &self.persistent, &mut self.messages);
        let Self { stage, list, persistent, gradients, exchange, early, .. } = self;
        Update { list, stage, persistent, gradients, exchange: exchange.as_ref() }.run(std::mem::take(&mut early.begun));
    }

    fn label(&self, tensor: TensorId, micro_batch: usize, phase: Phase) -> Label<'a> {
        Label { name: self.stage.name(tensor), micro_batch: Some(micro_batch), phase }
    }
}
