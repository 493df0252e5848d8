//! Activations that are offloaded: what a forward pass leaves for the gradients goes to the host's memory as soon as no operator of the pass reads it
//! any more, and comes back a block before the gradients that read it, each direction on a stream of its own.
//!
//! What is computed again is not taken out: it is forgotten. So with full recomputation it is the blocks' inputs that go (ZeRO-Infinity's offload of
//! checkpoints, Rajbhandari et al. 2021), and without any all that is kept (Calculon's `activations_offload`, Isaev et al. 2023).

use super::emit::StageEmitter;
use crate::placement::Placements;
use crate::program::{BufferId, MemoryKind, Phase};
use crate::schedule::{StagePass, Task};
use foretell_models::{OperatorId, Pass, TensorId};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Blocks whose activations stay where a pass is followed by its own way back: they would come in before they were out.
const BLOCKS_THAT_STAY: usize = 2;

/// A tensor that a forward pass through a chunk leaves for its way back.
pub(super) struct Leaving {
    tensor: TensorId,
    /// The last of the pass's operators that uses it, by its place among them.
    after: usize,
    /// How many blocks come after the last that reads it on the way back, in this chunk.
    blocks_after: usize,
}

/// A run of operators of one block on the way back, and what of the offloaded it reads.
pub(super) struct Reading {
    /// Its first operator, within its task's.
    start: usize,
    tensors: Vec<TensorId>,
}

/// Where the variants of an offloaded tensor of a micro-batch lie on the host, by placement.
pub(super) type Offloaded = Vec<(Placements, BufferId)>;

impl StageEmitter<'_> {
    /// What the forward pass of a task takes out, in the order of the operators after which it does; nothing of other passes.
    pub(super) fn leaving(&mut self, task: &Task) -> Rc<[Leaving]> {
        if !self.plan.layout.offload.is_of_activations() || task.pass != StagePass::Forward {
            return Rc::from([]);
        }
        if let Some(known) = self.leaving.get(&task.chunk) {
            return Rc::clone(known);
        }
        let found: Rc<[Leaving]> = self.find_leaving(task).into();
        self.leaving.insert(task.chunk, Rc::clone(&found));
        found
    }

    fn find_leaving(&self, task: &Task) -> Vec<Leaving> {
        let operators = &self.lowering.graph.operators;
        let own = self.operators_of(task);
        let mut last_use: BTreeMap<TensorId, usize> = BTreeMap::new();
        for (position, id) in own.iter().enumerate() {
            let operator = &operators[id.0];
            let inputs = operator.inputs.iter().map(|input| input.tensor);
            for tensor in inputs.chain(operator.outputs.iter().map(|output| output.tensor)) {
                if self.lowering.is_activation(tensor) {
                    last_use.insert(tensor, position);
                }
            }
        }
        let blocks: BTreeSet<usize> = own.iter().map(|id| operators[id.0].block).collect();
        let leaving = last_use.into_iter().filter_map(|(tensor, after)| {
            let here = |id: &OperatorId| self.cuts.stage_of_block[operators[id.0].block] == self.program.stage;
            let readers = self.lowering.consumers[tensor.0].iter().copied().filter(here);
            let (forward, back): (Vec<_>, Vec<_>) = readers.partition(|id| operators[id.0].pass == Pass::Forward);
            // Another chunk of the stage is still to read it.
            if forward.iter().any(|id| self.cuts.chunk_of_block[operators[id.0].block] != task.chunk) || self.is_forgotten(tensor)
            {
                return None;
            }
            let again = forward.into_iter().filter(|id| self.needed_again.iter().any(|block| block.contains(id)));
            let last_block = back.into_iter().chain(again).map(|id| operators[id.0].block).max()?;
            Some(Leaving { tensor, after, blocks_after: blocks.range(last_block + 1..).count() })
        });
        let mut leaving: Vec<Leaving> = leaving.collect();
        leaving.sort_by_key(|one| (one.after, one.tensor));
        leaving
    }

    /// After an operator of a forward pass: takes out what no later one reads. `returns` says whether the way back follows at once.
    pub(super) fn take_out_activations(&mut self, leaving: &mut &[Leaving], position: usize, micro_batch: usize, returns: bool) {
        while let Some((first, rest)) = leaving.split_first()
            && first.after <= position
        {
            *leaving = rest;
            let stays = returns && first.blocks_after < BLOCKS_THAT_STAY;
            if !stays && let Some(variants) = self.live.remove(&(first.tensor, micro_batch)) {
                // What was made of it and is larger, as a gathered sequence, is made again.
                let bytes = |&(_, buffer): &(Placements, BufferId)| self.program.buffer(buffer).bytes;
                let least = variants.iter().map(bytes).min();
                let kept: Vec<_> = variants.into_iter().filter(|one| Some(bytes(one)) == least).collect();
                let to_host = kept.into_iter().map(|(placements, device)| {
                    (placements, self.copy_of_activation(first.tensor, device, MemoryKind::Host, micro_batch, Phase::Forward))
                });
                let offloaded = to_host.collect();
                self.offloaded.insert((first.tensor, micro_batch), offloaded);
            }
        }
    }

    /// What each run of a way back's operators reads of what may be offloaded; nothing of forward passes.
    pub(super) fn readings(&mut self, task: &Task) -> Rc<[Reading]> {
        if !self.plan.layout.offload.is_of_activations() || task.pass == StagePass::Forward {
            return Rc::from([]);
        }
        let pass = (task.chunk, task.pass);
        if let Some(known) = self.readings.get(&pass) {
            return Rc::clone(known);
        }
        let found: Rc<[Reading]> = self.find_readings(task).into();
        self.readings.insert(pass, Rc::clone(&found));
        found
    }

    fn find_readings(&self, task: &Task) -> Vec<Reading> {
        let operators = &self.lowering.graph.operators;
        let mut readings: Vec<Reading> = Vec::new();
        let mut block = None;
        for (position, &id) in self.operators_of(task).iter().enumerate() {
            let here = operators[id.0].block;
            let mut readers = vec![id];
            if block != Some(here) {
                block = Some(here);
                readings.push(Reading { start: position, tensors: Vec::new() });
                readers.extend(self.needed_again.get(here).into_iter().flatten().copied());
            }
            if let Some(reading) = readings.last_mut() {
                let inputs = readers.iter().flat_map(|id| &operators[id.0].inputs).map(|input| input.tensor);
                for tensor in inputs.filter(|&tensor| self.lowering.is_activation(tensor)) {
                    if !reading.tensors.contains(&tensor) {
                        reading.tensors.push(tensor);
                    }
                }
            }
        }
        readings
    }

    /// Before a run of a way back's operators: begins to bring in what the next one reads, so that it comes while this one computes; before the
    /// first, what that reads itself.
    pub(super) fn bring_in_ahead(&mut self, readings: &[Reading], position: usize, micro_batch: usize) {
        let Some(run) = readings.iter().position(|one| one.start == position) else { return };
        let first = if run == 0 { 0 } else { run + 1 };
        for reading in readings.iter().take(run + 2).skip(first) {
            for &tensor in &reading.tensors {
                self.bring_in_activation(tensor, micro_batch);
            }
        }
    }

    /// Brings in an offloaded tensor, if it is one.
    pub(super) fn bring_in_activation(&mut self, tensor: TensorId, micro_batch: usize) {
        let Some(variants) = self.offloaded.remove(&(tensor, micro_batch)) else { return };
        let to_device = variants.into_iter().map(|(placements, host)| {
            (placements, self.copy_of_activation(tensor, host, MemoryKind::Device, micro_batch, Phase::Backward))
        });
        let live = to_device.collect();
        self.live.insert((tensor, micro_batch), live);
    }

    fn copy_of_activation(
        &mut self,
        tensor: TensorId,
        from: BufferId,
        memory: MemoryKind,
        micro_batch: usize,
        phase: Phase,
    ) -> BufferId {
        let name = &self.lowering.graph.tensor(tensor).name;
        let source = self.program.buffer(from);
        let (role, shape, data_type) = (source.role, source.shape.clone(), source.data_type);
        let copy = self.buffer(name, role, shape, data_type);
        self.program.buffers[copy.0 as usize].memory = memory;
        self.copy_over(name, from, copy, Some(micro_batch), phase);
        copy
    }
}
