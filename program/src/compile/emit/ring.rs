//! Ring attention (Liu et al. 2023): keys and values travel around the ranks of `context`, one part
//! per step, while the ranks compute.
//!
//! In step t, a rank's queries attend to the keys that started t ranks before it, while the rank
//! passes those keys on. The result is merged with those of earlier steps. In the backward pass the
//! gradients of keys and values travel with them and collect every rank's contribution. The
//! gradients take one shift more than keys and values, which brings them back to their rank. A
//! contribution is computed while the sum so far is still in transit, and added when it arrives, so
//! no step waits for the gradients of the step before.
//!
//! In a zigzag order, a rank's queries see half of the (query, key) pairs of every part but their
//! own, so each step takes equally long on all ranks.
//!
//! Parts arrive in at most two alternating buffers, whatever the number of steps. Sums over steps
//! are in single precision.

use super::list::{Label, ListBuilder};
use crate::collective::{Collective, CollectiveRole};
use crate::mesh::{Axis, Group};
use crate::program::{BufferId, BufferRole, GroupId};
use foretell_models::{Attention, Kernel, RingStep};
use foretell_units::DataType;

/// Keys and values, or their gradients.
type Pair = [BufferId; 2];

/// Appends attention around a ring to a list.
pub(super) struct Ring<'a> {
    pub(super) list: &'a mut ListBuilder,
    pub(super) label: Label<'a>,
    /// The number of ranks along `context`, and so of steps.
    pub(super) ranks: usize,
    /// The group of the ring: the rank's index in it is the number of the part that it starts with.
    pub(super) group: Option<GroupId>,
}

impl Ring<'_> {
    /// Appends the instructions that compute `kernel` around the ring: attention to all keys, or
    /// its gradient. Operands are the rank's own parts.
    pub(super) fn attention(&mut self, kernel: Kernel, reads: &[BufferId], writes: &[BufferId]) {
        match (kernel, reads, writes) {
            (Kernel::Attention(sizes), &[q, k, v], &[out, log_sums]) => self.forward(sizes, [q, k, v], [out, log_sums]),
            (Kernel::AttentionGradient(sizes), &[dout, q, k, v, out, log_sums], &[dq, dk, dv]) => {
                self.backward(sizes, [dout, q, k, v, out, log_sums], [dq, dk, dv]);
            }
            _ => unreachable!("only attention with separate q, k and v and without a position table uses a ring"),
        }
    }

    fn forward(&mut self, sizes: Attention, [q, k, v]: [BufferId; 3], [out, log_sums]: [BufferId; 2]) {
        let sum = self.sum_for(out);
        let arrivals = self.arrival_buffers([k, v]);
        let mut current: Pair = [k, v];
        for step in 0..self.ranks {
            let next = (step + 1 < self.ranks).then(|| arrivals[step % arrivals.len()]);
            if let Some(next) = next {
                self.shift(current, next);
            }
            let kernel = Kernel::Attention(self.step_sizes(sizes, step));
            self.kernel(kernel, &[q, current[0], current[1]], &[sum, log_sums]);
            current = next.unwrap_or(current);
        }
        self.narrow(sum, out);
    }

    fn backward(&mut self, sizes: Attention, [dout, q, k, v, out, log_sums]: [BufferId; 6], [dq, dk, dv]: [BufferId; 3]) {
        let query_sum = self.sum_for(dq);
        let arrivals = self.arrival_buffers([k, v]);
        let contributions = [(); 2].map(|()| [dk, dv].map(|part| self.single_precision_like(part)));
        let arrived: Pair = [dk, dv].map(|part| self.single_precision_like(part));
        let home: Pair = [dk, dv].map(|part| self.sum_for(part));
        let mut current: Pair = [k, v];
        for step in 0..self.ranks {
            let next = (step + 1 < self.ranks).then(|| arrivals[step % arrivals.len()]);
            if let Some(next) = next {
                self.shift(current, next);
            }
            let contribution = contributions[step % 2];
            let kernel = Kernel::AttentionGradient(self.step_sizes(sizes, step));
            let reads = [dout, q, current[0], current[1], out, log_sums];
            self.kernel(kernel, &reads, &[query_sum, contribution[0], contribution[1]]);
            if step > 0 {
                for (arrived, contribution) in arrived.into_iter().zip(contribution) {
                    let elements = self.list.elements(contribution);
                    self.list.compute(self.label, Kernel::Accumulate { elements }, &[arrived], &[contribution]);
                }
            }
            self.shift(contribution, if next.is_some() { arrived } else { home });
            current = next.unwrap_or(current);
        }
        for (sum, result) in [(query_sum, dq), (home[0], dk), (home[1], dv)] {
            self.narrow(sum, result);
        }
    }

    /// The sizes of one step, which sees one part of the keys.
    fn step_sizes(&self, sizes: Attention, step: usize) -> Attention {
        let ring = Some(RingStep { step, parts: self.ranks, unseen: false, half: None });
        Attention { keys: sizes.keys / self.ranks, query_parts: 1, query_offset: 0, ring, ..sizes }
    }

    fn kernel(&mut self, kernel: Kernel, reads: &[BufferId], writes: &[BufferId]) {
        self.list.compute_in_group(self.label, kernel, self.group, reads, writes);
    }

    fn shift(&mut self, from: Pair, to: Pair) {
        for (from, to) in from.into_iter().zip(to) {
            let group = Group::along(Axis::Context);
            self.list.collective(self.label, Collective::Shift, CollectiveRole::Context, group, [from, to]);
        }
    }

    /// The buffer for a sum over steps that ends up in `result`: `result` itself if it is in single
    /// precision.
    fn sum_for(&mut self, result: BufferId) -> BufferId {
        let is_single = self.list.buffer(result).data_type == DataType::Fp32;
        if is_single { result } else { self.single_precision_like(result) }
    }

    /// Rounds a sum to the number format of `result`.
    fn narrow(&mut self, sum: BufferId, result: BufferId) {
        if sum != result {
            let elements = self.list.elements(result);
            self.list.compute(self.label, Kernel::Narrow { elements }, &[sum], &[result]);
        }
    }

    fn single_precision_like(&mut self, like: BufferId) -> BufferId {
        let shape = self.list.buffer(like).shape.clone();
        self.list.add_buffer(self.label.name, BufferRole::Workspace, shape, DataType::Fp32)
    }

    /// The buffers in which parts arrive in turn: the next part arrives while the last one is read.
    fn arrival_buffers(&mut self, own: Pair) -> Vec<Pair> {
        let turns = (self.ranks - 1).min(2);
        let mut buffer_like = |like: BufferId| self.list.add_buffer_like(self.label.name, BufferRole::Workspace, like);
        (0..turns).map(|_| own.map(&mut buffer_like)).collect()
    }
}
