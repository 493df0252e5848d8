//! Bytes of device memory that persist from step to step, and that each micro-batch holds.

use foretell_program::{Buffer, BufferId, BufferRole, MemoryKind, Phase, StageProgram};
use foretell_simulator::MemoryRates;

/// Bytes of device memory that a software stack keeps from step to step, by the kinds that ZeRO may
/// shard.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::bounds) struct PersistentMemory {
    pub(in crate::bounds) parameters: f64,
    /// Part of `parameters` that only forward passes read: embedding tables.
    pub(in crate::bounds) forward_only: f64,
    pub(in crate::bounds) gradients: f64,
    pub(in crate::bounds) optimizer_state: f64,
    pub(in crate::bounds) other: f64,
    /// Bytes of the Program's optimizer state: the host holds these if the state is offloaded.
    pub(in crate::bounds) state_of_program: f64,
}

impl PersistentMemory {
    /// Returns the memory of a list under a stack with these rates.
    pub(in crate::bounds) fn of(list: &StageProgram, rates: &MemoryRates) -> Self {
        let mut memory = Self::default();
        let persists = |buffer: &&Buffer| buffer.persistent && buffer.parent.is_none() && buffer.memory == MemoryKind::Device;
        for buffer in list.buffers.iter().filter(persists) {
            let part = match buffer.role {
                BufferRole::Parameter => &mut memory.parameters,
                BufferRole::Gradient => &mut memory.gradients,
                BufferRole::OptimizerState => &mut memory.optimizer_state,
                _ => &mut memory.other,
            };
            *part += buffer.bytes.value();
        }
        Self {
            parameters: memory.parameters * rates.parameters,
            // At the larger rate: it is subtracted from gathered parameters, which may count as
            // transient memory.
            forward_only: forward_only(list) * rates.parameters.max(rates.transient),
            gradients: memory.gradients * rates.gradients,
            optimizer_state: memory.optimizer_state * rates.optimizer_state,
            other: memory.other * rates.others,
            state_of_program: memory.optimizer_state,
        }
    }

    pub(in crate::bounds) fn total(self) -> f64 {
        self.parameters + self.gradients + self.optimizer_state + self.other
    }

    /// Returns the least that remains on each rank if ZeRO shards the memory over `ranks`.
    pub(in crate::bounds) fn sharded(self, zero: usize, ranks: usize) -> Self {
        let share = |from: usize| if zero >= from { 1.0 / ranks as f64 } else { 1.0 };
        // Parameters that are gathered once a step are freed after their last pass. Those that only
        // forward passes read may be freed before the rank's memory peaks.
        let freed = if gathers_parameters_once(zero, ranks) { self.forward_only } else { 0.0 };
        Self {
            forward_only: 0.0,
            optimizer_state: self.optimizer_state * share(1),
            gradients: self.gradients * share(2),
            parameters: (self.parameters - freed).max(0.0) * share(3),
            // Buffers for gradient sums may be smaller with ZeRO.
            other: if zero > 0 { 0.0 } else { self.other },
            state_of_program: self.state_of_program * share(1),
        }
    }

    /// Combines each number with that of other blocks.
    pub(in crate::bounds) fn with(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            parameters: combine(self.parameters, other.parameters),
            forward_only: combine(self.forward_only, other.forward_only),
            gradients: combine(self.gradients, other.gradients),
            optimizer_state: combine(self.optimizer_state, other.optimizer_state),
            other: combine(self.other, other.other),
            state_of_program: combine(self.state_of_program, other.state_of_program),
        }
    }
}

/// Returns `true` if a stage of ZeRO shards the updated parameters and gathers them once for all
/// passes of a step.
pub(in crate::bounds) fn gathers_parameters_once(zero: usize, ranks: usize) -> bool {
    (1..3).contains(&zero) && ranks > 1
}

/// Returns the bytes of the parameters that a list reads in forward passes only.
fn forward_only(list: &StageProgram) -> f64 {
    let mut read_forward = vec![false; list.buffers.len()];
    let mut read_later = vec![false; list.buffers.len()];
    for instruction in &list.instructions {
        let read = match instruction.phase {
            Phase::Forward => &mut read_forward,
            Phase::Backward | Phase::Recompute => &mut read_later,
            Phase::Update => continue,
        };
        instruction.reads.iter().for_each(|buffer| read[buffer.0 as usize] = true);
    }
    let counts = |index: &usize| {
        let buffer = &list.buffers[*index];
        buffer.persistent && buffer.role == BufferRole::Parameter && read_forward[*index] && !read_later[*index]
    };
    (0..list.buffers.len()).filter(counts).map(|index| list.buffers[index].bytes.value()).sum()
}

/// Bytes of device memory of one micro-batch under a software stack.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::bounds) struct MicroBatchMemory {
    /// Bytes saved by the forward pass for the backward pass over the same blocks.
    pub(in crate::bounds) saved: f64,
    /// The part of `saved` in activations: results of operators that other operators read. Counted
    /// in the Program's bytes, which copies to the host move.
    pub(in crate::bounds) saved_activations: f64,
    /// Bytes saved by the input-gradient pass for the weight-gradient pass, if the two are
    /// separate.
    pub(in crate::bounds) saved_for_weights: f64,
    /// Most bytes at any time of the forward pass, `saved` included.
    pub(in crate::bounds) forward_peak: f64,
    /// Most bytes at any time of the backward or input-gradient pass, `saved` included.
    pub(in crate::bounds) backward_peak: f64,
}

impl MicroBatchMemory {
    /// Returns the memory of the first micro-batch of a list, with `rate` bytes for each byte of
    /// the Program.
    ///
    /// Buffers that instructions outside these passes also touch do not count. Neither do copies of
    /// weights: they grow neither with samples nor with micro-batches.
    pub(in crate::bounds) fn of(list: &StageProgram, rate: f64) -> Self {
        let mut passes = list.passes.iter().filter(|pass| pass.task.micro_batch == 0);
        let (Some(forward), Some(backward)) = (passes.next(), passes.next()) else { return Self::default() };
        let weights = passes.next_back();
        let [forward, backward, weight_pass] = [forward, backward, weights.unwrap_or(backward)]
            .map(|pass| pass.instructions.start as usize..pass.instructions.end as usize);
        let is_own = |index: usize| [&forward, &backward, &weight_pass].iter().any(|range| range.contains(&index));
        // First and last instruction that touch each buffer.
        let mut touched: Vec<Option<(usize, usize)>> = vec![None; list.buffers.len()];
        let mut is_shared = vec![false; list.buffers.len()];
        for (index, instruction) in list.instructions.iter().enumerate() {
            for &BufferId(buffer) in instruction.reads.iter().chain(&instruction.writes) {
                let root = list.buffers[buffer as usize].parent.map_or(buffer, |parent| parent.0) as usize;
                is_shared[root] |= !is_own(index);
                touched[root] = Some(touched[root].map_or((index, index), |(first, _)| (first, index)));
            }
        }
        // Changes of the bytes in use. Each instruction has two points in time.
        let mut changes: Vec<(usize, f64)> = Vec::new();
        let mut memory = Self::default();
        for (root, buffer) in list.buffers.iter().enumerate() {
            let is_copy = buffer.role == BufferRole::ParameterCopy;
            let is_temporary = !buffer.persistent && buffer.parent.is_none() && buffer.memory == MemoryKind::Device && !is_copy;
            let counts = is_temporary && !is_shared[root];
            let Some((first, last)) = touched[root].filter(|_| counts) else { continue };
            let bytes = buffer.bytes.value() * rate;
            if first < forward.end && last >= backward.start {
                memory.saved += bytes;
                memory.saved_activations += if buffer.role == BufferRole::Activation { buffer.bytes.value() } else { 0.0 };
            }
            if weights.is_some() && first < backward.end && last >= weight_pass.start {
                memory.saved_for_weights += bytes;
            }
            // An instruction may write its output over an input that it is the last to read.
            changes.push((2 * first + 1, bytes));
            changes.push((2 * last.max(first + 1), -bytes));
        }
        changes.sort_by(|a, b| a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)));
        (memory.forward_peak, memory.backward_peak) = (memory.saved, memory.saved);
        let mut now = 0.0f64;
        for (time, change) in changes {
            now += change;
            if time < 2 * forward.end {
                memory.forward_peak = memory.forward_peak.max(now);
            } else if time < 2 * backward.end {
                memory.backward_peak = memory.backward_peak.max(now);
            }
        }
        memory
    }

    /// Returns the most bytes at any time.
    pub(in crate::bounds) fn peak(self) -> f64 {
        self.forward_peak.max(self.backward_peak)
    }

    /// Combines each number with that of other blocks.
    pub(in crate::bounds) fn with(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            saved: combine(self.saved, other.saved),
            saved_activations: combine(self.saved_activations, other.saved_activations),
            saved_for_weights: combine(self.saved_for_weights, other.saved_for_weights),
            forward_peak: combine(self.forward_peak, other.forward_peak),
            backward_peak: combine(self.backward_peak, other.backward_peak),
        }
    }
}
