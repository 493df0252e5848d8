//! Time that collectives or kernels take one after another, whatever they wait for.

use super::TimedList;
use foretell_program::{Axis, CollectiveRole, Operation};
use std::ops::Range;

/// Time that collectives occupy one stream, in picoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(in crate::bounds) struct StreamTime {
    /// In each micro-batch.
    pub(in crate::bounds) per_micro_batch: f64,
    /// Once a step, in addition.
    pub(in crate::bounds) per_step: f64,
}

impl StreamTime {
    /// Combines each number with that of another stream.
    pub(in crate::bounds) fn with(self, other: Self, combine: impl Fn(f64, f64) -> f64) -> Self {
        Self {
            per_micro_batch: combine(self.per_micro_batch, other.per_micro_batch),
            per_step: combine(self.per_step, other.per_step),
        }
    }

    /// Returns the time in a step of `micro_batches`.
    pub(in crate::bounds) fn total(self, micro_batches: f64) -> f64 {
        self.per_micro_batch * micro_batches + self.per_step
    }
}

impl TimedList<'_> {
    /// Returns how long gradient and parameter collectives occupy the busiest stream among the
    /// groups over axes that `selects` accepts. The list runs `micro_batches` micro-batches.
    pub(in crate::bounds) fn busiest_stream(&self, micro_batches: usize, selects: impl Fn(&[Axis]) -> bool) -> StreamTime {
        let groups = self.list.groups.iter().enumerate().filter(|(_, group)| selects(&group.axes));
        let of_group = |group: usize| {
            let roles = [CollectiveRole::Gradients, CollectiveRole::Parameters];
            let [gradients, parameters] = roles.map(|role| self.stream_time(group, role, micro_batches));
            gradients.with(parameters, |left, right| left + right)
        };
        let total = |time: &StreamTime| time.total(micro_batches as f64);
        groups.map(|(group, _)| of_group(group)).max_by(|a, b| total(a).total_cmp(&total(b))).unwrap_or_default()
    }

    /// Returns how long one group's collectives of one role take. All micro-batches count as the
    /// one that takes the least, since the first alone may gather parameters, and the last alone
    /// may reduce gradients.
    fn stream_time(&self, group: usize, role: CollectiveRole, micro_batches: usize) -> StreamTime {
        let list = self.list;
        let is_own = |index: usize| match *list.instructions[index].operation {
            Operation::Collective { group: own, role: own_role, .. } => own.0 as usize == group && own_role == role,
            _ => false,
        };
        let sum = |range: Range<usize>| -> f64 {
            range.filter(|&index| is_own(index)).map(|index| self.times.in_full_buckets[index].0 as f64).sum()
        };
        let mut of_micro_batch = vec![0.0; micro_batches];
        for pass in &list.passes {
            if let Some(time) = of_micro_batch.get_mut(pass.task.micro_batch) {
                *time += sum(pass.instructions.start as usize..pass.instructions.end as usize);
            }
        }
        let per_micro_batch = of_micro_batch.into_iter().reduce(f64::min).unwrap_or(0.0);
        StreamTime { per_micro_batch, per_step: sum(0..list.instructions.len()) - per_micro_batch * micro_batches as f64 }
    }

    /// Returns how long the first `end` instructions gather parameters, in picoseconds.
    pub(in crate::bounds) fn gather_time(&self, end: u32) -> f64 {
        let gathers = |operation: &Operation| matches!(operation, Operation::Collective { role: CollectiveRole::Parameters, .. });
        let timed = self.list.instructions.iter().zip(&self.times.in_full_buckets).take(end as usize);
        timed.filter(|(instruction, _)| gathers(&instruction.operation)).map(|(_, duration)| duration.0 as f64).sum()
    }

    /// Returns the sum of the kernel times in `range`, each less the list's shortest kernel time: a
    /// longer model may fuse kernels and pay the fixed cost of a kernel once.
    pub(in crate::bounds) fn kernel_time(&self, range: Range<usize>) -> f64 {
        let shortest = self.shortest_kernel();
        let kernels = range.filter(|&index| self.is_kernel(index));
        kernels.map(|index| (self.times.durations[index].0 as f64 - shortest).max(0.0)).sum()
    }

    /// Returns the shortest kernel time of the list. Kernels that are fused into others take no
    /// time and do not count.
    pub(super) fn shortest_kernel(&self) -> f64 {
        let kernels = (0..self.list.instructions.len()).filter(|&index| self.is_kernel(index));
        kernels.map(|index| self.times.durations[index].0 as f64).filter(|&time| time > 0.0).reduce(f64::min).unwrap_or(0.0)
    }
}
