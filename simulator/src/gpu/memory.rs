//! What a device holds under a framework: the compiler's buffers counted by what they are for, in the framework's bytes.
//!
//! A framework keeps other copies than our executor (a single-precision gradient beside the narrow one, logits in single precision, scores of attention
//! that is not fused), has an allocator that holds more than is in use, and a context beside it. A [`StageMemory`] is what of that depends on
//! the list alone, counted once; the stack's [`MemoryRules`](super::MemoryRules) make bytes of it.

use super::format::ProductFormat;
use super::kernels::Trained;
use super::stack::{AttentionKind, StackKind};
use foretell_models::Kernel;
use foretell_program::{
    Buffer, BufferId, BufferRole, Collective, CollectiveRole, Footprint, Instruction, Operation, Phase, StageProgram,
};
use foretell_units::{Bytes, DataType};
use std::collections::{BTreeMap, BTreeSet};

/// Elements and bytes of a list's buffers, by what they are for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StageMemory {
    parameters: f64,
    gradients: f64,
    /// Parameters that the rank keeps the optimizer's state of.
    optimized: f64,
    /// Elements that the optimizer keeps of each beside a copy of it.
    moments: f64,
    /// What is not kept from step to step when most of it is alive, with no logits, one buffer of them and several.
    fullest: [Moment; 3],
    /// The same where what ranks of `tensor` gather is kept for the backward pass and not gathered again.
    fullest_gathered: [Moment; 3],
    /// The most elements of attention's scores that are kept at a time, by stacks that do not fuse attention.
    scores: f64,
    /// Logits of a micro-batch.
    logits: f64,
    /// Whether ranks share out the vocabulary, so that these are a part of them.
    cuts_logits: bool,
    precision: DataType,
}

/// What of a list is alive at a moment and not kept from step to step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Moment {
    /// Bytes of logits and of their gradients.
    logits: f64,
    /// Bytes of everything else.
    others: f64,
}

impl Moment {
    fn total(&self) -> f64 {
        self.logits + self.others
    }
}

impl StageMemory {
    /// Counts what a list of a Program in a number format holds.
    pub fn of(list: &StageProgram, precision: DataType) -> Self {
        let mut memory = Self {
            parameters: 0.0,
            gradients: 0.0,
            optimized: 0.0,
            moments: moments(list),
            fullest: Default::default(),
            fullest_gathered: Default::default(),
            scores: kept_scores(list),
            logits: list.instructions.iter().map(logits).fold(0.0, f64::max),
            cuts_logits: list.instructions.iter().any(cuts_logits),
            precision,
        };
        for buffer in list.buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none()) {
            let elements = buffer.bytes.value() / buffer.data_type.size().value();
            match buffer.role {
                BufferRole::Parameter => memory.parameters += elements,
                BufferRole::Gradient => memory.gradients += elements,
                BufferRole::OptimizerState => memory.optimized += elements,
                _ => {}
            }
        }
        memory.fullest = fullest(list, memory.logits, &BTreeMap::new());
        memory.fullest_gathered = fullest(list, memory.logits, &gathered_again(list));
        // A copy of each in single precision beside its moments, where it is narrow itself.
        memory.optimized /= (memory.moments + if is_narrow(precision) { 1.0 } else { 0.0 }).max(1.0);
        if let Some(gathered) = gathered_once(list) {
            // Whole parameters take the place of their shards.
            let moments = memory.fullest.iter_mut().chain(&mut memory.fullest_gathered);
            moments.for_each(|moment| moment.others = (moment.others - gathered).max(0.0));
            memory.parameters = memory.parameters.max(gathered / precision.size().value());
        }
        memory
    }

    /// What a device holds of it under a stack: what its allocator gave out by component, what that holds beside (`unused`), and the context.
    pub fn footprint(&self, stack: &StackKind, format: ProductFormat, trained: Trained) -> Footprint {
        let rules = &stack.memory;
        let is_narrow = is_narrow(self.precision);
        let trains = if trained == Trained::All { 1.0 } else { 0.0 };
        let gradient = match format {
            _ if !is_narrow => 4.0,
            ProductFormat::Fp16 => rules.half_gradient.unwrap_or(rules.gradient),
            _ => rules.gradient,
        };
        let score = if matches!(stack.attention, AttentionKind::Unfused { .. }) { rules.score } else { 0.0 };
        let scores = self.scores * score * self.precision.size().value() / 2.0;
        // What the stack's rule has beside Adam's two moments in single precision is the copy; where it has less, the moments are narrow.
        let copy = if is_narrow { (rules.optimizer - 8.0).max(0.0) } else { 0.0 };
        let moment = if is_narrow { rules.optimizer.min(8.0) / 2.0 } else { 4.0 };
        let bytes = |bytes: f64| Bytes::new(bytes.max(0.0).round() as u64);
        let logit = match (stack.has_eager_loss, self.cuts_logits) {
            (false, _) => rules.logit,
            (true, false) => rules.logit + rules.eager_loss,
            (true, true) => rules.logit + rules.eager_loss + rules.eager_loss_of_parts,
        };
        let at = |moment: &Moment| {
            let copies = if moment.logits > 0.0 { self.logits * logit } else { 0.0 };
            (moment.others * rules.activations + moment.logits, copies)
        };
        let fullest = if rules.keeps_gathered { &self.fullest_gathered } else { &self.fullest };
        let fullest = fullest.iter().map(at).max_by(|one, two| (one.0 + one.1).total_cmp(&(two.0 + two.1)));
        let (activations, copies) = fullest.unwrap_or_default();
        let mut footprint = Footprint {
            parameters: bytes(self.parameters * if is_narrow { rules.parameter } else { 4.0 }),
            gradients: bytes(self.gradients * gradient * trains),
            optimizer_state: bytes(self.optimized * (copy + moment * self.moments) * trains),
            activations: bytes(activations + scores),
            workspace: bytes(copies) + rules.buffers,
            ..Footprint::default()
        };
        footprint.unused = bytes(footprint.total().value() * rules.fragmentation);
        footprint.context = rules.context;
        footprint
    }
}

/// Whether a number format has a master copy in single precision beside it.
fn is_narrow(precision: DataType) -> bool {
    precision.size().count() < 4
}

/// Elements in single precision that the optimizer keeps of a parameter.
fn moments(list: &StageProgram) -> f64 {
    let of_optimizer = |instruction: &Instruction| match *instruction.operation {
        Operation::Compute { kernel: Kernel::AdamW { .. }, .. } => Some(2.0),
        Operation::Compute { kernel: Kernel::Sgd { momentum, .. }, .. } => Some(if momentum { 1.0 } else { 0.0 }),
        _ => None,
    };
    list.instructions.iter().rev().find_map(of_optimizer).unwrap_or(0.0)
}

/// Bytes of parameters that are gathered once and kept for the step. Those that are dropped to be gathered again (FSDP) are not: of them there
/// are several of a name.
fn gathered_once(list: &StageProgram) -> Option<f64> {
    let is_gathered = |buffer: &&Buffer| buffer.role == BufferRole::Parameter && !buffer.persistent && buffer.parent.is_none();
    let gathered = || list.buffers.iter().filter(is_gathered);
    let mut names = BTreeSet::new();
    gathered().all(|buffer| names.insert(&*buffer.name)).then(|| gathered().map(|buffer| buffer.bytes.value()).sum())
}

/// The moments at which most is alive besides logits of so many elements: where there are none, where one buffer has them, and where several have.
/// What our memory plan lets a kernel write over counts beside what is written there: frameworks write results to memory of their own.
/// Buffers of `longer` are alive until the instructions that it has for them.
fn fullest(list: &StageProgram, logits: f64, longer: &BTreeMap<BufferId, u32>) -> [Moment; 3] {
    let is_logits = |buffer: &Buffer| logits > 0.0 && buffer.shape.iter().product::<usize>() as f64 == logits;
    // What begins with an instruction does so before what ends with it has ended.
    let mut changes: Vec<(u32, bool, f64, bool)> = Vec::new();
    for (place, buffer) in list.buffers.iter().enumerate() {
        if let (Some((first, last)), false, None) = (buffer.lifetime, buffer.persistent, buffer.parent) {
            let (bytes, is_logits) = (buffer.bytes.value(), is_logits(buffer));
            changes.push((first.0, false, bytes, is_logits));
            let last = longer.get(&BufferId(place as u32)).map_or(last.0, |&until| until.max(last.0));
            changes.push((last, true, -bytes, is_logits));
        }
    }
    changes.sort_by_key(|&(at, ends, ..)| (at, ends));
    let mut alive = Moment::default();
    let mut buffers = 0usize;
    let mut fullest = [Moment::default(); 3];
    for (_, ends, bytes, is_logits) in changes {
        if is_logits {
            alive.logits += bytes;
            buffers = if ends { buffers.saturating_sub(1) } else { buffers + 1 };
        } else {
            alive.others += bytes;
        }
        if let Some(most) = fullest.get_mut(buffers.min(2))
            && alive.total() > most.total()
        {
            *most = alive;
        }
    }
    fullest
}

/// What ranks of `tensor` gather for a pass and gather again in the backward pass: each with the instruction that does so.
fn gathered_again(list: &StageProgram) -> BTreeMap<BufferId, u32> {
    let mut gathered: BTreeMap<BufferId, BufferId> = BTreeMap::new();
    let mut longer = BTreeMap::new();
    for (place, instruction) in list.instructions.iter().enumerate() {
        let Operation::Collective { kind: Collective::AllGather, role: CollectiveRole::Tensor, .. } = *instruction.operation
        else {
            continue;
        };
        if let (Some(&part), Some(&whole)) = (instruction.reads.first(), instruction.writes.first())
            && let Some(before) = gathered.insert(part, whole)
            && instruction.phase == Phase::Backward
        {
            longer.insert(before, place as u32);
        }
    }
    longer
}

fn cuts_logits(instruction: &Instruction) -> bool {
    matches!(*instruction.operation, Operation::Compute { kernel: Kernel::LogitStatistics { parts: 2.., .. }, .. })
}

fn logits(instruction: &Instruction) -> f64 {
    match *instruction.operation {
        Operation::Compute { kernel: Kernel::CrossEntropy { rows, classes }, .. }
        | Operation::Compute { kernel: Kernel::LogitStatistics { rows, classes, .. }, .. } => rows as f64 * classes as f64,
        _ => 0.0,
    }
}

/// The most elements of scores at a time between an attention and its gradient: of those that are computed again only what was computed last.
fn kept_scores(list: &StageProgram) -> f64 {
    let mut kept: BTreeMap<(u32, Option<u32>), f64> = BTreeMap::new();
    // From the end: an attention whose gradient is still to come, and that is not computed again before it, keeps its scores.
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
    use foretell_program::{Layout, Plan, compile_training};

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
    fn what_is_alive_at_once_is_what_the_arena_holds_and_what_it_writes_over() {
        let (memory, rest) = memory(Layout { micro_batch: 4, ..Layout::default() });
        let most = memory.fullest.iter().map(Moment::total).fold(0.0, f64::max);
        // The gradient of the logits takes the place of these in the arena.
        let logits = 2.0 * memory.logits;
        assert!(most > 0.95 * rest && most < rest + 1.05 * logits, "{most} of {rest} and {logits}");
        let [none, one, several] = memory.fullest;
        assert_eq!((none.logits, one.logits), (0.0, logits));
        assert!(several.logits >= 2.0 * logits, "{several:?}");
    }

    #[test]
    fn what_a_stack_makes_of_activations_leaves_logits_as_they_are() {
        let (memory, _) = memory(Layout { micro_batch: 4, ..Layout::default() });
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let stack = |activations| {
            let mut stack = profiles.stack("megatron-core").expect("known").clone();
            stack.memory.activations = activations;
            stack
        };
        let held = |activations| memory.footprint(&stack(activations), ProductFormat::Bf16, Trained::All).activations.value();
        assert!(held(0.0) >= 2.0 * memory.logits, "{}", held(0.0));
        assert!(held(2.0) < 2.0 * held(1.0), "{} beside {}", held(2.0), held(1.0));
    }

    #[test]
    fn a_loss_that_is_not_compiled_keeps_copies_of_logits() {
        let (memory, _) = memory(Layout { micro_batch: 4, ..Layout::default() });
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let mut stack = profiles.stack("torchtitan-compiled").expect("known").clone();
        let held = |stack: &StackKind| memory.footprint(stack, ProductFormat::Bf16, Trained::All).workspace.value();
        let compiled = held(&stack);
        stack.has_eager_loss = true;
        let copies = memory.logits * stack.memory.eager_loss;
        assert!(copies > 0.0 && (held(&stack) - compiled - copies).abs() < 1.0);
    }

    #[test]
    fn what_tensor_ranks_gather_stays_where_it_is_not_gathered_again() {
        let layout = Layout { tensor: 4, sequence_parallel: true, micro_batch: 4, ..Layout::default() };
        let (memory, _) = memory(layout);
        let most = |moments: &[Moment; 3]| moments.iter().map(|moment| moment.others).fold(0.0, f64::max);
        // Of each of four layers the gathered inputs of attention and of the feed-forward, and that of the head.
        let gathered = 9.0 * (4 * 128 * 256 * 2) as f64;
        let more = most(&memory.fullest_gathered) - most(&memory.fullest);
        assert!(more > 0.8 * gathered && more <= gathered, "{more} of {gathered}");
    }

    #[test]
    fn a_loss_over_parts_of_the_vocabulary_keeps_copies_of_its_own() {
        let profiles = crate::gpu::Profiles::library().expect("the library is sound");
        let mut stack = profiles.stack("torchtitan").expect("known").clone();
        stack.has_eager_loss = true;
        let held = |tensor: usize, stack: &StackKind| {
            let (memory, _) = memory(Layout { tensor, micro_batch: 4, ..Layout::default() });
            (memory.logits, memory.footprint(stack, ProductFormat::Bf16, Trained::All).workspace.value())
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
