//! Ring attention (Liu et al. 2023): keys and values go round the ranks of `context` part by part while these compute.
//!
//! In step t a rank attends with its own queries to the part that began t ranks before it, and passes that part on meanwhile. What a step leaves
//! is merged with what the steps before it left. In the backward pass the gradients of keys and values travel with them and gather every
//! rank's contribution; one pass more than keys and values make takes them home. A contribution is made beside what is still on its
//! way and added to it when that has come, so that no step waits for the gradients of the one before it to be passed on.
//!
//! Parts come and go in two buffers each, whatever the number of steps. What is summed over steps is in single precision.

use super::convert::Place;
use super::emit::StageEmitter;
use crate::mesh::{Axis, Group};
use crate::program::{BufferId, BufferRole, Collective, GroupId, Operation, Stream};
use foretell_models::{Attention, Kernel, KeyStep};
use foretell_units::DataType;

/// Keys and values, or their gradients.
type Pair = [BufferId; 2];

impl StageEmitter<'_> {
    /// Attention, or its gradient, whose operands are the rank's own parts: emits what `kernel` (which has all keys) would do on gathered ones.
    /// What a rank does follows from its place in `group`.
    pub(super) fn ring(
        &mut self,
        place: &Place<'_>,
        kernel: Kernel,
        group: Option<GroupId>,
        reads: &[BufferId],
        writes: &[BufferId],
    ) {
        match (kernel, reads, writes) {
            (Kernel::Attention(sizes), &[q, k, v], &[out, log_sums]) => {
                self.ring_forward(place, sizes, group, [q, k, v], [out, log_sums]);
            }
            (Kernel::AttentionGradient(sizes), &[dout, q, k, v, out, log_sums], &[dq, dk, dv]) => {
                self.ring_backward(place, sizes, group, [dout, q, k, v, out, log_sums], [dq, dk, dv]);
            }
            _ => unreachable!("only attention with q, k and v apart and without a table goes round a ring"),
        }
    }

    fn ring_forward(
        &mut self,
        place: &Place<'_>,
        sizes: Attention,
        group: Option<GroupId>,
        [q, k, v]: [BufferId; 3],
        [out, log_sums]: [BufferId; 2],
    ) {
        let steps = self.lowering.mesh.size(Axis::Context);
        let running = self.running(place, out);
        let rooms = self.rooms(place, [k, v]);
        let mut here: Pair = [k, v];
        for step in 0..steps {
            let next = (step + 1 < steps).then(|| rooms[step % rooms.len()]);
            if let Some(next) = next {
                self.pass_on(place, here, next);
            }
            let kernel = Kernel::Attention(self.step_sizes(sizes, step));
            self.ring_kernel(place, kernel, group, vec![q, here[0], here[1]], vec![running, log_sums]);
            here = next.unwrap_or(here);
        }
        self.narrow(place, running, out);
    }

    fn ring_backward(
        &mut self,
        place: &Place<'_>,
        sizes: Attention,
        group: Option<GroupId>,
        [dout, q, k, v, out, log_sums]: [BufferId; 6],
        [dq, dk, dv]: [BufferId; 3],
    ) {
        let steps = self.lowering.mesh.size(Axis::Context);
        let running = self.running(place, dq);
        let rooms = self.rooms(place, [k, v]);
        let made = [(); 2].map(|()| [dk, dv].map(|part| self.single_like(place, part)));
        let arrived: Pair = [dk, dv].map(|part| self.single_like(place, part));
        let home: Pair = [dk, dv].map(|part| self.running(place, part));
        let mut here: Pair = [k, v];
        for step in 0..steps {
            let next = (step + 1 < steps).then(|| rooms[step % rooms.len()]);
            if let Some(next) = next {
                self.pass_on(place, here, next);
            }
            let made = made[step % 2];
            let kernel = Kernel::AttentionGradient(self.step_sizes(sizes, step));
            let reads = vec![dout, q, here[0], here[1], out, log_sums];
            self.ring_kernel(place, kernel, group, reads, vec![running, made[0], made[1]]);
            if step > 0 {
                for (arrived, made) in arrived.into_iter().zip(made) {
                    let elements = self.program.buffer(made).shape.iter().product();
                    self.ring_kernel(place, Kernel::Accumulate { elements }, None, vec![arrived], vec![made]);
                }
            }
            self.pass_on(place, made, if next.is_some() { arrived } else { home });
            here = next.unwrap_or(here);
        }
        for (single, result) in [(running, dq), (home[0], dk), (home[1], dv)] {
            self.narrow(place, single, result);
        }
    }

    /// The sizes of one step, of the part of the keys that a rank has then.
    fn step_sizes(&self, sizes: Attention, step: usize) -> Attention {
        let parts = self.lowering.mesh.size(Axis::Context);
        let ring = Some(KeyStep { step, parts, unseen: false });
        Attention { keys: sizes.keys / parts, query_parts: 1, query_offset: 0, ring, ..sizes }
    }

    fn pass_on(&mut self, place: &Place<'_>, from: Pair, to: Pair) {
        for (from, to) in from.into_iter().zip(to) {
            self.collective(place, Collective::Shift, Group::along(Axis::Context), from, to);
        }
    }

    /// Where sums over steps are made that end up in `result`: there, if that is in single precision.
    fn running(&mut self, place: &Place<'_>, result: BufferId) -> BufferId {
        let is_single = self.program.buffer(result).data_type == DataType::Fp32;
        if is_single { result } else { self.single_like(place, result) }
    }

    fn narrow(&mut self, place: &Place<'_>, running: BufferId, result: BufferId) {
        if running != result {
            let elements = self.program.buffer(result).shape.iter().product();
            self.ring_kernel(place, Kernel::Narrow { elements }, None, vec![running], vec![result]);
        }
    }

    fn single_like(&mut self, place: &Place<'_>, like: BufferId) -> BufferId {
        let shape = self.program.buffer(like).shape.clone();
        self.buffer(place.name, BufferRole::Workspace, shape, DataType::Fp32)
    }

    /// Where parts come in: in turns, as the next one comes while this one is read.
    fn rooms(&mut self, place: &Place<'_>, own: Pair) -> Vec<Pair> {
        let turns = (self.lowering.mesh.size(Axis::Context) - 1).min(2);
        let mut room_like = |like: BufferId| {
            let (shape, data_type) = (self.program.buffer(like).shape.clone(), self.program.buffer(like).data_type);
            self.buffer(place.name, BufferRole::Workspace, shape, data_type)
        };
        (0..turns).map(|_| own.map(&mut room_like)).collect()
    }

    fn ring_kernel(
        &mut self,
        place: &Place<'_>,
        kernel: Kernel,
        group: Option<GroupId>,
        reads: Vec<BufferId>,
        writes: Vec<BufferId>,
    ) {
        let operation = Operation::Compute { kernel, accumulate: false, group };
        self.push(place.name, operation, Stream::Compute, reads, writes, Some(place.micro_batch), place.phase);
    }
}
