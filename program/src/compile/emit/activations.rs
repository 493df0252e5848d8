//! Offloaded activations. A tensor that the forward pass leaves for the backward pass moves to the
//! host's memory when no later operator of the forward pass reads it. It comes back one block
//! before the gradients that read it. Each direction has a stream of its own.
//!
//! Recomputed tensors are not offloaded: they are dropped. So with full recomputation the inputs of
//! blocks are offloaded (ZeRO-Infinity's checkpoint offload, Rajbhandari et al. 2021), and without
//! recomputation everything that is kept (Calculon's `activations_offload`, Isaev et al. 2023).

use super::list::{Label, ListBuilder};
use super::live::{LiveTensors, Variant, retain_smallest};
use super::stage::Stage;
use crate::compile::cuts::ChunkPass;
use crate::program::{BufferId, MemoryKind, Phase};
use crate::schedule::{StagePass, Task};
use foretell_models::{OperatorId, Pass, TensorId};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The number of final blocks whose activations stay on the device if the backward pass follows at
/// once: it would need them back before the copies to the host had ended.
const BLOCKS_THAT_STAY: usize = 2;

/// A tensor that the forward pass through a chunk leaves for the backward pass.
pub(super) struct Leaving {
    tensor: TensorId,
    /// The position of the last operator of the forward pass that uses the tensor.
    last_use: usize,
    /// The number of this chunk's blocks after the last block whose backward pass reads the tensor.
    blocks_after: usize,
}

/// The activations that the operators of one block read in a backward pass.
pub(super) struct BlockActivations {
    /// The position of the first of these operators among the task's operators.
    start: usize,
    tensors: Vec<TensorId>,
}

/// The activations that are on the host at the moment.
#[derive(Default)]
pub(super) struct OffloadedActivations {
    /// The host buffers of each tensor, keyed by tensor and micro-batch.
    on_host: FxHashMap<(TensorId, usize), Vec<Variant>>,
    /// By chunk: the tensors that its forward pass leaves; found when first asked for.
    leaving: FxHashMap<usize, Rc<[Leaving]>>,
    /// The blocks of each backward pass; found when first asked for.
    blocks: FxHashMap<ChunkPass, Rc<[BlockActivations]>>,
}

impl OffloadedActivations {
    pub(super) fn contains(&self, tensor: TensorId, micro_batch: usize) -> bool {
        self.on_host.contains_key(&(tensor, micro_batch))
    }

    /// Drops all tensors of a micro-batch.
    pub(super) fn forget_micro_batch(&mut self, micro_batch: usize) {
        self.on_host.retain(|&(_, of), _| of != micro_batch);
    }

    /// The tensors that a task offloads, ordered by last use; none for backward passes.
    pub(super) fn leaving(&mut self, stage: &Stage<'_>, task: &Task) -> Rc<[Leaving]> {
        if !stage.plan.layout.offload.is_of_activations() || task.pass != StagePass::Forward {
            return Rc::from([]);
        }
        Rc::clone(self.leaving.entry(task.chunk).or_insert_with(|| find_leaving(stage, task).into()))
    }

    /// The blocks of a task with the activations that they read; none for forward passes.
    pub(super) fn blocks_of(&mut self, stage: &Stage<'_>, task: &Task) -> Rc<[BlockActivations]> {
        if !stage.plan.layout.offload.is_of_activations() || task.pass == StagePass::Forward {
            return Rc::from([]);
        }
        Rc::clone(self.blocks.entry((task.chunk, task.pass)).or_insert_with(|| find_blocks(stage, task).into()))
    }

    /// Moves tensors whose last use is at or before `position` to the host, and removes them from
    /// `leaving`. `returns` says that the backward pass of this micro-batch follows at once.
    pub(super) fn move_out(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        live: &mut LiveTensors,
        leaving: &mut &[Leaving],
        (position, micro_batch): (usize, usize),
        returns: bool,
    ) {
        while let Some((first, rest)) = leaving.split_first()
            && first.last_use <= position
        {
            *leaving = rest;
            let stays = returns && first.blocks_after < BLOCKS_THAT_STAY;
            if !stays && let Some(mut variants) = live.take(first.tensor, micro_batch) {
                // Only the smallest variants are copied; larger ones, such as a gathered sequence,
                // are derived again.
                retain_smallest(list, &mut variants);
                let label = Label { name: stage.name(first.tensor), micro_batch: Some(micro_batch), phase: Phase::Forward };
                let on_host = copy_variants(list, label, &variants, MemoryKind::Host);
                self.on_host.insert((first.tensor, micro_batch), on_host);
            }
        }
    }

    /// Before the first operator of a block: begins to bring back the tensors that the next block
    /// reads, so that the copies overlap this block's kernels. Before the first block it also
    /// brings back that block's own.
    pub(super) fn move_in_ahead(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        live: &mut LiveTensors,
        blocks: &[BlockActivations],
        (position, micro_batch): (usize, usize),
    ) {
        let Some(block) = blocks.iter().position(|block| block.start == position) else { return };
        let first = if block == 0 { 0 } else { block + 1 };
        for block in blocks.iter().take(block + 2).skip(first) {
            for &tensor in &block.tensors {
                self.move_in(list, stage, live, (tensor, micro_batch));
            }
        }
    }

    /// Brings a tensor back to the device, if it is on the host.
    pub(super) fn move_in(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        live: &mut LiveTensors,
        (tensor, micro_batch): (TensorId, usize),
    ) {
        let Some(variants) = self.on_host.remove(&(tensor, micro_batch)) else { return };
        let label = Label { name: stage.name(tensor), micro_batch: Some(micro_batch), phase: Phase::Backward };
        live.replace(tensor, micro_batch, copy_variants(list, label, &variants, MemoryKind::Device));
    }
}

/// Copies the variants of a tensor to the other memory.
fn copy_variants(list: &mut ListBuilder, label: Label<'_>, variants: &[Variant], memory: MemoryKind) -> Vec<Variant> {
    let mut copy = |from: BufferId| {
        let to = list.add_buffer_like(label.name, list.buffer(from).role, from);
        list.set_memory(to, memory);
        list.copy(label, from, to);
        to
    };
    variants.iter().map(|variant| Variant { buffer: copy(variant.buffer), ..*variant }).collect()
}

fn find_leaving(stage: &Stage<'_>, task: &Task) -> Vec<Leaving> {
    let own = stage.operators_of(task);
    let mut last_uses: BTreeMap<TensorId, usize> = BTreeMap::new();
    for (position, &id) in own.iter().enumerate() {
        let operator = stage.operator(id);
        let inputs = operator.inputs.iter().map(|input| input.tensor);
        for tensor in inputs.chain(operator.outputs.iter().map(|output| output.tensor)) {
            if stage.lowering.is_activation(tensor) && !stage.lowering.tiling.is_wide(tensor) {
                last_uses.insert(tensor, position);
            }
        }
    }
    let blocks: BTreeSet<usize> = own.iter().map(|&id| stage.operator(id).block).collect();
    let leaving = last_uses.into_iter().filter_map(|(tensor, last_use)| {
        let is_of_stage = |id: &OperatorId| stage.cuts.stage(stage.operator(*id)) == stage.index;
        let readers = stage.lowering.consumers[tensor.0].iter().copied().filter(is_of_stage);
        let (forward, backward): (Vec<_>, Vec<_>) = readers.partition(|&id| stage.operator(id).pass == Pass::Forward);
        let is_of_other_chunk = |id: &OperatorId| stage.cuts.chunk_of_block[stage.operator(*id).block] != task.chunk;
        if forward.iter().any(is_of_other_chunk) || stage.recomputation.forgets(stage.lowering, tensor) {
            return None;
        }
        let runs_again = |id| stage.recomputation.contains(id) || stage.lowering.tiling.runs_again(id);
        let recomputed = forward.into_iter().filter(|&id| runs_again(id));
        let last_block = backward.into_iter().chain(recomputed).map(|id| stage.operator(id).block).max()?;
        Some(Leaving { tensor, last_use, blocks_after: blocks.range(last_block + 1..).count() })
    });
    let mut leaving: Vec<Leaving> = leaving.collect();
    leaving.sort_by_key(|message| (message.last_use, message.tensor));
    leaving
}

fn find_blocks(stage: &Stage<'_>, task: &Task) -> Vec<BlockActivations> {
    let mut blocks: Vec<BlockActivations> = Vec::new();
    let mut last_block = None;
    for (position, &id) in stage.operators_of(task).iter().enumerate() {
        let block = stage.operator(id).block;
        let mut readers = vec![id];
        if last_block != Some(block) {
            last_block = Some(block);
            blocks.push(BlockActivations { start: position, tensors: Vec::new() });
            readers.extend(stage.recomputation.of_block(block));
        }
        if let Some(block) = blocks.last_mut() {
            readers.extend(stage.lowering.tiling.again_for(id));
            let inputs = readers.iter().flat_map(|&id| &stage.operator(id).inputs).map(|input| input.tensor);
            for tensor in inputs.filter(|&tensor| stage.lowering.is_activation(tensor)) {
                if !block.tensors.contains(&tensor) {
                    block.tensors.push(tensor);
                }
            }
        }
    }
    blocks
}
