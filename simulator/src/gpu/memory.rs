//! Memory of a device under a framework, from the compiler's buffers.
//!
//! A framework keeps tensors that our executor does not: a gradient in single precision beside the
//! narrow one, logits in single precision, scores of attention that is not fused. Its allocator
//! reserves more than is in use, and the CUDA context takes memory, too. [`StageMemory`] has the
//! counts that depend on the instruction list alone. The stack's
//! [`MemoryRules`](super::MemoryRules) turn them into bytes.

use super::expert_rows::ExpertRows;
use super::format::ProductFormat;
use super::memory_rates::{StateBytes, is_narrow};
use super::stack::{AttentionKind, StackProfile};
use super::workload::Workload;
use foretell_models::Kernel;
use foretell_program::{
    Buffer, BufferId, BufferRole, Collective, CollectiveRole, Footprint, Instruction, MemoryKind, Operation, Phase, StageProgram,
};
use foretell_units::{Bytes, DataType};
use std::collections::{BTreeMap, BTreeSet};

/// Elements and bytes of a list's buffers on the device, by role.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageMemory {
    /// Elements of parameters.
    parameters: f64,
    /// Share of the parameters that a step does not change: those beside adapters, and frozen ones.
    frozen: f64,
    /// Elements of gradients.
    gradients: f64,
    /// Number of parameters whose optimizer state this rank keeps.
    optimized: f64,
    /// Elements of optimizer state per parameter, without the master copy.
    moments: f64,
    /// Transient bytes at three peaks: while no buffer of logits is alive, while one is, and while
    /// several are.
    peaks: [TransientBytes; 3],
    /// The same peaks if gathered inputs of sequence-parallel products are kept for the backward
    /// pass rather than gathered again.
    peaks_with_gathered: [TransientBytes; 3],
    /// Largest number of attention scores kept at one time, by stacks without fused attention.
    scores: f64,
    /// Logits of a micro-batch.
    logits: f64,
    /// True if the vocabulary is sharded, so that a rank has a part of each token's logits.
    shards_logits: bool,
    precision: DataType,
}

/// Bytes that are allocated at one moment and freed within the step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct TransientBytes {
    /// Bytes of logits and of their gradients.
    logits: f64,
    /// Bytes of everything else.
    others: f64,
}

impl TransientBytes {
    fn total(&self) -> f64 {
        self.logits + self.others
    }
}

impl StageMemory {
    /// Counts the buffers of a list, with balanced routing. `precision` is the Program's data type.
    pub fn of(list: &StageProgram, precision: DataType) -> Self {
        Self::of_workload(list, precision, &Workload::default())
    }

    /// Counts the buffers of a list, on a rank whose experts receive the most tokens in every
    /// layer.
    pub fn of_workload(list: &StageProgram, precision: DataType, workload: &Workload) -> Self {
        let rows = workload.routing.is_some().then(|| ExpertRows::of(list));
        let of_experts = |buffer| rows.as_ref().and_then(|rows| rows.in_buffer(buffer));
        let rows_over_slots = |buffer| of_experts(buffer).map_or(1.0, |experts| workload.most_rows_over_slots(experts));
        let mut memory = Self {
            parameters: 0.0,
            frozen: frozen_share(list),
            gradients: 0.0,
            optimized: 0.0,
            moments: moments(list),
            peaks: Default::default(),
            peaks_with_gathered: Default::default(),
            scores: kept_scores(list),
            logits: list.instructions.iter().map(logits).fold(0.0, f64::max),
            shards_logits: list.instructions.iter().any(shards_logits),
            precision,
        };
        let is_kept = |buffer: &&Buffer| buffer.persistent && buffer.parent.is_none() && is_on_device(buffer);
        for buffer in list.buffers.iter().filter(is_kept) {
            let elements = buffer.bytes.value() / buffer.data_type.size().value();
            match buffer.role {
                BufferRole::Parameter => memory.parameters += elements,
                BufferRole::Gradient => memory.gradients += elements,
                BufferRole::OptimizerState => memory.optimized += elements,
                // The stack's memory rules cover these roles.
                BufferRole::ParameterCopy
                | BufferRole::Running
                | BufferRole::Input
                | BufferRole::Activation
                | BufferRole::Sum
                | BufferRole::Workspace => {}
            }
        }
        memory.peaks = peaks(list, memory.logits, &BTreeMap::new(), &rows_over_slots);
        memory.peaks_with_gathered = peaks(list, memory.logits, &gathered_again(list), &rows_over_slots);
        // The Program's optimizer state for narrow parameters includes a master copy.
        memory.optimized /= (memory.moments + if is_narrow(precision) { 1.0 } else { 0.0 }).max(1.0);
        if let Some(gathered) = gathered_once(list) {
            // Parameters that stay gathered replace their shards, and do not count as transient.
            let peaks = memory.peaks.iter_mut().chain(&mut memory.peaks_with_gathered);
            peaks.for_each(|peak| peak.others = (peak.others - gathered).max(0.0));
            memory.parameters = memory.parameters.max(gathered / precision.size().value());
        }
        memory
    }

    /// Returns the memory of a device under a stack: the allocated bytes by role, the bytes that
    /// the allocator reserves but does not use, and the context.
    pub fn footprint(&self, stack: &StackProfile, format: ProductFormat, workload: &Workload) -> Footprint {
        let rules = &stack.memory;
        let state = StateBytes::of(stack, format, workload, self.precision);
        let frozen = if workload.trained.are_adapters() { 1.0 } else { self.frozen };
        let parameter = frozen * state.frozen_parameter + (1.0 - frozen) * state.parameter;
        let score = if matches!(stack.attention, AttentionKind::Unfused { .. }) { rules.score } else { 0.0 };
        let scores = self.scores * score * self.precision.size().value() / 2.0;
        let bytes = |bytes: f64| Bytes::new(bytes.max(0.0).round() as u64);
        let logit = match (workload.has_eager_loss, self.shards_logits) {
            (false, _) => rules.logit,
            (true, false) => rules.logit + rules.eager_loss,
            (true, true) => rules.logit + rules.eager_loss + rules.eager_loss_of_parts,
        };
        let activations_and_copies = |peak: &TransientBytes| {
            let at_a_time = workload.logits_at_a_time;
            let copies = if peak.logits > 0.0 { self.logits * logit * at_a_time } else { 0.0 };
            (peak.others * rules.activations + peak.logits * at_a_time, copies)
        };
        let peaks = if rules.keeps_gathered { &self.peaks_with_gathered } else { &self.peaks };
        let peaks = peaks.iter().map(activations_and_copies);
        let highest = peaks.max_by(|peak, other| (peak.0 + peak.1).total_cmp(&(other.0 + other.1)));
        let (activations, copies) = highest.unwrap_or_default();
        let mut footprint = Footprint {
            parameters: bytes(self.parameters * parameter),
            gradients: bytes(self.gradients * state.gradient),
            optimizer_state: bytes(self.optimized * (state.master_copy + state.moment * self.moments)),
            activations: bytes(activations + scores),
            workspace: bytes(copies) + rules.buffers,
            ..Footprint::default()
        };
        footprint.unused = bytes(footprint.total().value() * rules.fragmentation);
        footprint.context = rules.context;
        footprint
    }
}

/// Whether a buffer lies in device memory (not in host memory).
fn is_on_device(buffer: &Buffer) -> bool {
    buffer.memory == MemoryKind::Device
}

/// Returns the share of a list's parameters that no instruction writes. 0 if none is written, as in
/// evaluation.
fn frozen_share(list: &StageProgram) -> f64 {
    let written: BTreeSet<BufferId> =
        list.instructions.iter().flat_map(|instruction| &*instruction.writes).map(|&id| root(list, id)).collect();
    let is_parameter = |buffer: &Buffer| buffer.persistent && buffer.parent.is_none() && buffer.role == BufferRole::Parameter;
    let (mut all, mut frozen) = (0.0, 0.0);
    for (index, buffer) in list.buffers.iter().enumerate().filter(|(_, buffer)| is_parameter(buffer)) {
        all += buffer.bytes.value();
        frozen += if written.contains(&BufferId(index as u32)) { 0.0 } else { buffer.bytes.value() };
    }
    if frozen < all { frozen / all } else { 0.0 }
}

/// Returns the buffer that a view refers to, through all parents, or the buffer itself if it is no
/// view.
fn root(list: &StageProgram, mut id: BufferId) -> BufferId {
    while let Some(parent) = list.buffer(id).parent {
        id = parent;
    }
    id
}

/// Returns the mean elements of optimizer state per updated parameter, without a master copy.
fn moments(list: &StageProgram) -> f64 {
    let of_kernel = |instruction: &Instruction| match *instruction.operation {
        Operation::Compute { kernel: Kernel::AdamW { elements, .. } | Kernel::LambDirection { elements, .. }, .. } => {
            Some((elements, 2.0))
        }
        Operation::Compute { kernel: Kernel::Sgd { elements, momentum, .. }, .. } => {
            Some((elements, if momentum { 1.0 } else { 0.0 }))
        }
        Operation::Compute { kernel: Kernel::MuonDirection { elements, .. }, .. } => Some((elements, 1.0)),
        _ => None,
    };
    let add = |(all, states): (f64, f64), (elements, of_each): (usize, f64)| {
        (all + elements as f64, states + elements as f64 * of_each)
    };
    let (all, states) = list.instructions.iter().filter_map(of_kernel).fold((0.0, 0.0), add);
    if all == 0.0 { 0.0 } else { states / all }
}

/// Returns the bytes of parameters that are gathered once and kept for the step. `None` if
/// parameters are gathered several times (FSDP), which shows in several buffers of the same name.
fn gathered_once(list: &StageProgram) -> Option<f64> {
    let is_gathered = |buffer: &&Buffer| buffer.role == BufferRole::Parameter && !buffer.persistent && buffer.parent.is_none();
    let gathered = || list.buffers.iter().filter(is_gathered);
    let mut names = BTreeSet::new();
    gathered().all(|buffer| names.insert(&*buffer.name)).then(|| gathered().map(|buffer| buffer.bytes.value()).sum())
}

/// Returns the three peaks of transient bytes, see [`StageMemory::peaks`]. Buffers with as many
/// elements as `logits` are logits.
///
/// Frameworks write results to new memory. So a buffer counts in full even if our memory plan lets
/// a kernel overwrite one of its operands with it. A buffer in `extended` lives at least until the
/// instruction given there. `scale` returns the factor on a buffer's bytes.
fn peaks(
    list: &StageProgram,
    logits: f64,
    extended: &BTreeMap<BufferId, u32>,
    scale: &dyn Fn(BufferId) -> f64,
) -> [TransientBytes; 3] {
    let is_logits = |buffer: &Buffer| logits > 0.0 && buffer.shape.iter().product::<usize>() as f64 == logits;
    // Each change has: instruction, whether a buffer ends there, change of bytes, whether the
    // buffer holds logits. Sorted so that at each instruction buffers begin before others end.
    let mut changes: Vec<(u32, bool, f64, bool)> = Vec::new();
    for (index, buffer) in list.buffers.iter().enumerate() {
        if let (Some((first, last)), false, None, true) =
            (buffer.lifetime, buffer.persistent, buffer.parent, is_on_device(buffer))
        {
            let id = BufferId(index as u32);
            let (bytes, is_logits) = (buffer.bytes.value() * scale(id), is_logits(buffer));
            changes.push((first.0, false, bytes, is_logits));
            let last = extended.get(&id).map_or(last.0, |&until| until.max(last.0));
            changes.push((last, true, -bytes, is_logits));
        }
    }
    changes.sort_by_key(|&(at, ends, ..)| (at, ends));
    let mut alive = TransientBytes::default();
    let mut logit_buffers = 0usize;
    let mut peaks = [TransientBytes::default(); 3];
    for (_, ends, bytes, is_logits) in changes {
        if is_logits {
            alive.logits += bytes;
            logit_buffers = if ends { logit_buffers.saturating_sub(1) } else { logit_buffers + 1 };
        } else {
            alive.others += bytes;
        }
        if let Some(peak) = peaks.get_mut(logit_buffers.min(2))
            && alive.total() > peak.total()
        {
            *peak = alive;
        }
    }
    peaks
}

/// Returns the inputs of sequence-parallel products that are gathered again in the backward pass,
/// each with the instruction that gathers it again.
fn gathered_again(list: &StageProgram) -> BTreeMap<BufferId, u32> {
    let mut gathered: BTreeMap<BufferId, BufferId> = BTreeMap::new();
    let mut gathered_again = BTreeMap::new();
    for (index, instruction) in list.instructions.iter().enumerate() {
        let Operation::Collective { kind: Collective::AllGather, role: CollectiveRole::Tensor, .. } = *instruction.operation
        else {
            continue;
        };
        if let (Some(&part), Some(&whole)) = (instruction.reads.first(), instruction.writes.first())
            && let Some(before) = gathered.insert(part, whole)
            && instruction.phase == Phase::Backward
        {
            gathered_again.insert(before, index as u32);
        }
    }
    gathered_again
}

fn shards_logits(instruction: &Instruction) -> bool {
    matches!(*instruction.operation, Operation::Compute { kernel: Kernel::LogitStatistics { parts: 2.., .. }, .. })
}

/// Returns the number of logits that an instruction of the loss reads; 0 for other instructions.
fn logits(instruction: &Instruction) -> f64 {
    match *instruction.operation {
        Operation::Compute { kernel: Kernel::CrossEntropy { rows, classes }, .. }
        | Operation::Compute { kernel: Kernel::WeightedCrossEntropy { rows, classes, .. }, .. }
        | Operation::Compute { kernel: Kernel::LogitStatistics { rows, classes, .. }, .. } => rows as f64 * classes as f64,
        _ => 0.0,
    }
}

/// Returns the largest number of attention scores that are alive at one time, from an attention to
/// its gradient. If attention is recomputed, the recomputed scores count and the first ones do not.
fn kept_scores(list: &StageProgram) -> f64 {
    let mut kept: BTreeMap<(u32, Option<u32>), f64> = BTreeMap::new();
    // Goes backwards from the end: the last attention before each gradient keeps its scores.
    let mut awaited: BTreeSet<(u32, Option<u32>)> = BTreeSet::new();
    let mut keepers: Vec<bool> = vec![false; list.instructions.len()];
    let key = |instruction: &Instruction| (instruction.name, instruction.micro_batch);
    for (instruction, keeps) in list.instructions.iter().zip(&mut keepers).rev() {
        match *instruction.operation {
            Operation::Compute { kernel: Kernel::AttentionGradient(_), .. } => {
                awaited.insert(key(instruction));
            }
            Operation::Compute { kernel: Kernel::Attention(_), .. } => *keeps = awaited.remove(&key(instruction)),
            _ => {}
        }
    }
    let (mut sum, mut most) = (0.0f64, 0.0f64);
    for (instruction, keeps) in list.instructions.iter().zip(keepers) {
        match *instruction.operation {
            Operation::Compute { kernel: Kernel::Attention(sizes), .. } if keeps => {
                let scores = (sizes.batch * sizes.heads()) as f64 * sizes.queries as f64 * sizes.keys as f64;
                kept.insert(key(instruction), scores);
                sum += scores;
            }
            Operation::Compute { kernel: Kernel::AttentionGradient(_), .. } => {
                sum -= kept.remove(&key(instruction)).unwrap_or(0.0);
            }
            _ => {}
        }
        most = most.max(sum);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::TrainedParameters;
    use foretell_program::{Layout, MomentFormat, Plan, Training, compile_training};

    fn memory(layout: Layout) -> (StageMemory, f64) {
        let model = foretell_models::Model::Gpt(foretell_models::Gpt {
            layers: 4,
            hidden: 256,
            heads: 4,
            ffn: None,
            vocab: 8192,
            sequence: 128,
            dropout: Default::default(),
            attention_dropout: Default::default(),
            tied_embeddings: true,
        });
        let batch = layout.samples_at_once();
        let plan = Plan { precision: DataType::Bf16, ..Plan::new(layout, batch) };
        let program = compile_training(&model, "model", &plan).expect("compiles");
        let list = &program.lists[0];
        let kept = list.buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none());
        let rest = list.arena.value() - kept.map(|buffer| buffer.bytes.value()).sum::<f64>();
        (StageMemory::of(list, plan.precision), rest)
    }

    #[test]
    fn the_peak_is_the_arena_without_writing_over_operands() {
        let (memory, rest) = memory(Layout { micro_batch: 4, ..Layout::default() });
        let most = memory.peaks.iter().map(TransientBytes::total).fold(0.0, f64::max);
        // In the arena the gradient of the logits replaces the logits.
        let logits = 2.0 * memory.logits;
        assert!(most > 0.95 * rest && most < rest + 1.05 * logits, "{most} of {rest} and {logits}");
        let [none, one, several] = memory.peaks;
        assert_eq!((none.logits, one.logits), (0.0, logits));
        assert!(several.logits >= 2.0 * logits, "{several:?}");
    }

    #[test]
    fn the_activation_share_does_not_scale_logits() {
        let (memory, _) = memory(Layout { micro_batch: 4, ..Layout::default() });
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let stack = |activations| {
            let mut stack = profiles.stack("megatron-core").expect("known").clone();
            stack.memory.activations = activations;
            stack
        };
        let held =
            |activations| memory.footprint(&stack(activations), ProductFormat::Bf16, &Workload::default()).activations.value();
        assert!(held(0.0) >= 2.0 * memory.logits, "{}", held(0.0));
        assert!(held(2.0) < 2.0 * held(1.0), "{} beside {}", held(2.0), held(1.0));
    }

    #[test]
    fn a_loss_that_is_not_compiled_keeps_copies_of_logits() {
        let (memory, _) = memory(Layout { micro_batch: 4, ..Layout::default() });
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let stack = profiles.stack("torchtitan-compiled").expect("known");
        let workspace = |has_eager_loss| {
            let workload = Workload { has_eager_loss, ..Workload::default() };
            memory.footprint(stack, ProductFormat::Bf16, &workload).workspace.value()
        };
        let copies = memory.logits * stack.memory.eager_loss;
        assert!(copies > 0.0 && (workspace(true) - workspace(false) - copies).abs() < 1.0);
    }

    #[test]
    fn narrow_state_takes_as_many_bytes_as_its_formats() {
        let (memory, _) = memory(Layout { micro_batch: 4, ..Layout::default() });
        let memory = StageMemory { moments: 2.0, optimized: memory.parameters, ..memory };
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let stack = profiles.stack("megatron-core").expect("known");
        let state = |has_no_master_copy, moments| {
            let workload = Workload { has_no_master_copy, moments, ..Workload::default() };
            let found = memory.footprint(stack, ProductFormat::Bf16, &workload);
            [found.parameters, found.gradients, found.optimizer_state].map(|bytes| bytes.value() / memory.parameters)
        };
        let is_about =
            |found: [f64; 3], expected: [f64; 3]| found.iter().zip(expected).all(|(left, right)| (left - right).abs() < 1e-3);
        let gradient = stack.memory.gradient;
        assert!(is_about(state(false, MomentFormat::Single), [2.0, gradient, 12.0]));
        assert!(is_about(state(true, MomentFormat::Single), [2.0, 2.0, 8.0]));
        assert!(is_about(state(true, MomentFormat::Half), [2.0, 2.0, 4.0]));
        assert!(is_about(state(false, MomentFormat::EightBit), [2.0, gradient, 4.0 + 2.0 * (1.0 + 4.0 / 256.0)]));
    }

    #[test]
    fn frozen_parameters_have_no_copy_in_single_precision() {
        let model = foretell_models::Model::named("gpt2").expect("in the zoo");
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let stack = profiles.stack("torchtitan").expect("known");
        let held = |frozen: &[&str], trained| {
            let training = Training { frozen: frozen.iter().copied().collect(), ..Training::default() };
            let plan = Plan { precision: DataType::Bf16, training, ..Plan::new(Layout::default(), 1) };
            let program = compile_training(&model, "model", &plan).expect("compiles");
            let memory = StageMemory::of(&program.lists[0], plan.precision);
            let workload = Workload { trained, ..Workload::default() };
            memory.footprint(stack, ProductFormat::Bf16, &workload).parameters.value() / memory.parameters
        };
        let all = TrainedParameters::All;
        assert_eq!(held(&[], all), 4.0);
        assert_eq!(held(&[], TrainedParameters::Adapters { beside_shards: false }), 2.0);
        // The embedding of 50,257 tokens has 0.31 of the parameters.
        assert!((3.3..3.5).contains(&held(&["transformer.wte.weight"], all)), "{}", held(&["transformer.wte.weight"], all));
    }

    #[test]
    fn gathered_inputs_stay_alive_if_they_are_not_gathered_again() {
        let layout = Layout { tensor: 4, sequence_parallel: true, micro_batch: 4, ..Layout::default() };
        let (memory, _) = memory(layout);
        let most = |peaks: &[TransientBytes; 3]| peaks.iter().map(|peak| peak.others).fold(0.0, f64::max);
        // Two inputs in each of four layers, attention's and the feed-forward network's, and the
        // head's.
        let gathered = 9.0 * (4 * 128 * 256 * 2) as f64;
        let more = most(&memory.peaks_with_gathered) - most(&memory.peaks);
        assert!(more > 0.8 * gathered && more <= gathered, "{more} of {gathered}");
    }

    #[test]
    fn an_eager_loss_over_a_sharded_vocabulary_keeps_more_copies() {
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let stack = profiles.stack("torchtitan").expect("known").clone();
        let held = |tensor: usize, stack: &StackProfile| {
            let (memory, _) = memory(Layout { tensor, micro_batch: 4, ..Layout::default() });
            let workload = Workload { has_eager_loss: true, ..Workload::default() };
            (memory.logits, memory.footprint(stack, ProductFormat::Bf16, &workload).workspace.value())
        };
        let mut plain = stack.clone();
        plain.memory.eager_loss_of_parts = 0.0;
        let ((whole, with), (_, without)) = (held(1, &stack), held(1, &plain));
        assert!(whole > 0.0 && with == without);
        let ((part, with), (_, without)) = (held(2, &stack), held(2, &plain));
        assert_eq!(part, whole / 2.0);
        assert!((with - without - part * stack.memory.eager_loss_of_parts).abs() < 1.0, "{with} beside {without}");
    }
}
