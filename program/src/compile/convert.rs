//! Emitting the conversions between placements: the table's collective, and the rearrangement that a collective needs where it cuts
//! or joins a dimension that is not the first in memory.

use super::emit::StageEmitter;
use crate::mesh::{Axis, Group};
use crate::placement::{Conversion, Placement, Placements, conversion};
use crate::program::{BufferId, BufferRole, Collective, CollectiveRole, GroupId, Operation, Phase, Stream};
use foretell_models::{EXPERTS, Kernel, TensorId};

/// Where an instruction belongs: what all of a conversion's instructions share.
pub(super) struct Place<'a> {
    pub(super) name: &'a str,
    pub(super) micro_batch: usize,
    pub(super) phase: Phase,
    /// Whether it is of tokens at experts.
    pub(super) is_of_experts: bool,
}

/// Whether a conversion worked in the place of the variant that it began with, which then is no more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Consumed {
    No,
    Yes,
}

impl StageEmitter<'_> {
    /// Brings a tensor from the first of its variants into the placement that is wanted, and says what that did to the first.
    pub(super) fn convert(
        &mut self,
        tensor: TensorId,
        micro_batch: usize,
        variants: Vec<(Placements, BufferId)>,
        wanted: Placements,
        phase: Phase,
    ) -> (BufferId, Consumed) {
        let Some(&(mut placements, mut buffer)) = variants.first() else {
            unreachable!("a tensor that is read was made, loaded, received or recomputed before")
        };
        let first = buffer;
        let mut consumed = Consumed::No;
        let description = self.lowering.graph.tensor(tensor);
        let is_of_experts = description.dimensions.iter().any(|one| one.name == EXPERTS);
        let place = Place { name: &description.name, micro_batch, phase, is_of_experts };
        while let Some(step) = next_step(placements, wanted) {
            match step {
                Step::Sum(axes) => {
                    if buffer == first {
                        consumed = Consumed::Yes;
                    }
                    self.all_reduce(&place, buffer, Group::over(axes.clone()));
                    for axis in axes {
                        placements = placements.with(axis, Placement::Replicate);
                    }
                }
                Step::Along(axis, to) => {
                    buffer = self.convert_along(&place, buffer, axis, placements.get(axis), to);
                    placements = placements.with(axis, to);
                }
            }
        }
        debug_assert_eq!(placements, wanted);
        (buffer, consumed)
    }

    /// One conversion along one axis, of which sums in place are not one.
    fn convert_along(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, from: Placement, to: Placement) -> BufferId {
        match conversion(from, to) {
            Conversion::None => buffer,
            Conversion::Collective { kind: Collective::AllReduce, .. } => {
                self.all_reduce(place, buffer, Group::along(axis));
                buffer
            }
            Conversion::Collective { kind: Collective::AllGather, from, .. } => self.all_gather(place, buffer, axis, from),
            Conversion::Collective { kind: Collective::ReduceScatter, to, .. } => self.reduce_scatter(place, buffer, axis, to),
            Conversion::Collective { kind: Collective::AllToAll, from, to } => self.all_to_all(place, buffer, axis, from, to),
            Conversion::Slice(dimension) => self.slice(place, buffer, axis, dimension),
            Conversion::Collective { kind: Collective::Shift, .. } => unreachable!("the table of conversions has no shift"),
            Conversion::Impossible => unreachable!("no operator wants partial sums of a tensor that is whole"),
        }
    }

    /// In place: the summands are of no use to anyone afterwards.
    fn all_reduce(&mut self, place: &Place<'_>, buffer: BufferId, group: Group) {
        self.collective(place, Collective::AllReduce, group, buffer, buffer);
    }

    fn all_gather(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, dimension: usize) -> BufferId {
        let parts = self.lowering.mesh.size(axis);
        let shape = self.program.buffer(buffer).shape.clone();
        let mut whole = shape.clone();
        whole[dimension] *= parts;
        let (outer, inner) = around(&shape, dimension);
        let gathered = self.like(place, buffer, whole.clone(), outer == 1);
        self.collective(place, Collective::AllGather, Group::along(axis), buffer, gathered);
        if outer == 1 {
            return gathered;
        }
        let result = self.like(place, buffer, whole, true);
        self.rearrange(place, Kernel::Interleave { outer, parts, inner }, gathered, result, None);
        result
    }

    fn reduce_scatter(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, dimension: usize) -> BufferId {
        let parts = self.lowering.mesh.size(axis);
        let mut shape = self.program.buffer(buffer).shape.clone();
        let whole = shape.clone();
        shape[dimension] /= parts;
        let (outer, inner) = around(&shape, dimension);
        let ordered = if outer == 1 {
            buffer
        } else {
            let ordered = self.like(place, buffer, whole, false);
            self.rearrange(place, Kernel::Deinterleave { outer, parts, inner }, buffer, ordered, None);
            ordered
        };
        let result = self.like(place, buffer, shape, true);
        self.collective(place, Collective::ReduceScatter, Group::along(axis), ordered, result);
        result
    }

    fn all_to_all(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, from: usize, to: usize) -> BufferId {
        let parts = self.lowering.mesh.size(axis);
        let shape = self.program.buffer(buffer).shape.clone();
        let mut scattered = shape.clone();
        scattered[to] /= parts;
        let mut result_shape = scattered.clone();
        result_shape[from] *= parts;
        let (outer, inner) = around(&scattered, to);
        let ordered = if outer == 1 {
            buffer
        } else {
            let ordered = self.like(place, buffer, shape, false);
            self.rearrange(place, Kernel::Deinterleave { outer, parts, inner }, buffer, ordered, None);
            ordered
        };
        let (outer, inner) = around(&scattered, from);
        let exchanged = self.like(place, buffer, result_shape.clone(), outer == 1);
        self.collective(place, Collective::AllToAll, Group::along(axis), ordered, exchanged);
        if outer == 1 {
            return exchanged;
        }
        let result = self.like(place, buffer, result_shape, true);
        self.rearrange(place, Kernel::Interleave { outer, parts, inner }, exchanged, result, None);
        result
    }

    fn slice(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, dimension: usize) -> BufferId {
        let parts = self.lowering.mesh.size(axis);
        let mut shape = self.program.buffer(buffer).shape.clone();
        shape[dimension] /= parts;
        let (outer, inner) = around(&shape, dimension);
        let result = self.like(place, buffer, shape, true);
        let group = self.group(Group::along(axis));
        self.rearrange(place, Kernel::Slice { outer, parts, inner }, buffer, result, Some(group));
        result
    }

    /// A buffer of the same format as another; `result` tells a tensor from working room.
    fn like(&mut self, place: &Place<'_>, buffer: BufferId, shape: Vec<usize>, result: bool) -> BufferId {
        let data_type = self.program.buffer(buffer).data_type;
        let role = if result { BufferRole::Activation } else { BufferRole::Workspace };
        self.buffer(place.name, role, shape, data_type)
    }

    fn rearrange(&mut self, place: &Place<'_>, kernel: Kernel, from: BufferId, to: BufferId, group: Option<GroupId>) {
        let operation = Operation::Compute { kernel, accumulate: false, group };
        self.push(place.name, operation, Stream::Compute, vec![from], vec![to], Some(place.micro_batch), place.phase);
    }

    pub(super) fn collective(&mut self, place: &Place<'_>, kind: Collective, group: Group, from: BufferId, to: BufferId) {
        let role = match group.axes.as_slice() {
            _ if place.is_of_experts => CollectiveRole::Expert,
            [Axis::Context] => CollectiveRole::Context,
            _ => CollectiveRole::Tensor,
        };
        let operation = self.collective_operation(kind, role, group, from, to);
        let Operation::Collective { group, .. } = operation else { unreachable!("just made") };
        self.push(place.name, operation, Stream::Group(group), vec![from], vec![to], Some(place.micro_batch), place.phase);
    }

    /// A collective from one buffer to another, sized by the larger.
    pub(super) fn collective_operation(
        &mut self,
        kind: Collective,
        role: CollectiveRole,
        group: Group,
        from: BufferId,
        to: BufferId,
    ) -> Operation {
        let bytes = self.program.buffer(from).bytes.max(self.program.buffer(to).bytes);
        let data_type = self.program.buffer(from).data_type;
        Operation::Collective { kind, group: self.group(group), bytes, data_type, role }
    }
}

/// One step from some placements to others.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// The sums along these axes are made, all at once.
    Sum(Vec<Axis>),
    /// The placement along one axis becomes this.
    Along(Axis, Placement),
}

/// What to do next on the way from `now` to `wanted`; `None` when they are the same.
///
/// Where several axes cut one dimension they are nested, so a cut can be made only when all larger parts are cut, and undone only when all
/// smaller ones are undone. What makes a tensor smaller comes first, what makes it larger last.
fn next_step(now: Placements, wanted: Placements) -> Option<Step> {
    let differs = |&axis: &Axis| now.get(axis) != wanted.get(axis);
    let can_cut = |axis: Axis, dimension: usize| {
        let larger = Axis::WITHIN_STAGE.iter().skip_while(|&&one| one != axis).skip(1);
        let nested = |placements: Placements, one: Axis| placements.get(one) == Placement::Shard(dimension);
        !now.is_cut_finer(axis, dimension) && larger.clone().all(|&one| nested(now, one) == nested(wanted, one))
    };
    let is_ready = |axis: Axis| {
        let from_is_last = match now.get(axis) {
            Placement::Shard(dimension) => !now.is_cut_finer(axis, dimension),
            _ => true,
        };
        let to_is_next = match wanted.get(axis) {
            Placement::Shard(dimension) => can_cut(axis, dimension),
            _ => true,
        };
        from_is_last && to_is_next
    };
    let cost = |axis: Axis| match (now.get(axis), wanted.get(axis)) {
        (Placement::Replicate, _) => 0,
        (Placement::Partial, Placement::Shard(_)) => 1,
        (Placement::Partial, _) => 2,
        (Placement::Shard(_), Placement::Shard(_)) => 3,
        (Placement::Shard(_), _) => 4,
    };
    // Larger parts first where the cost is the same, so that cuts nest.
    let ready =
        Axis::WITHIN_STAGE.into_iter().rev().filter(differs).filter(|&axis| is_ready(axis)).min_by_key(|&axis| cost(axis));
    match ready {
        Some(axis) if cost(axis) == 2 => {
            let sums = |&axis: &Axis| now.get(axis) == Placement::Partial && wanted.get(axis) == Placement::Replicate;
            Some(Step::Sum(Axis::WITHIN_STAGE.into_iter().filter(sums).collect()))
        }
        Some(axis) => Some(Step::Along(axis, wanted.get(axis))),
        // Every axis that differs waits for a smaller part of the same dimension to be undone, or for another that differs.
        None => {
            let blocker = |axis: Axis| {
                let finer = Axis::WITHIN_STAGE.into_iter().take_while(move |&one| one != axis);
                [now.get(axis), wanted.get(axis)].into_iter().find_map(|placement| match placement {
                    Placement::Shard(_) => finer.clone().find(|&one| now.get(one) == placement),
                    _ => None,
                })
            };
            let blocked = Axis::WITHIN_STAGE.into_iter().filter(differs).find_map(blocker);
            blocked.map(|axis| Step::Along(axis, Placement::Replicate))
        }
    }
}

/// The product of the extents before a dimension, and of that dimension and those after it.
fn around(shape: &[usize], dimension: usize) -> (usize, usize) {
    (shape[..dimension].iter().product(), shape[dimension..].iter().product())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn placement() -> impl Strategy<Value = Placement> {
        prop_oneof![Just(Placement::Replicate), (0usize..2).prop_map(Placement::Shard), Just(Placement::Partial)]
    }

    fn placements() -> impl Strategy<Value = Placements> {
        proptest::collection::vec(placement(), Axis::WITHIN_STAGE.len()).prop_map(|all| {
            Axis::WITHIN_STAGE.iter().zip(all).fold(Placements::default(), |placements, (&axis, one)| placements.with(axis, one))
        })
    }

    proptest! {
        /// From any placements to any that can be had, in few steps, and never a cut across smaller parts.
        #[test]
        fn every_conversion_ends_and_nests(from in placements(), to in placements()) {
            let to = Axis::WITHIN_STAGE.iter().fold(to, |to, &axis| match (from.get(axis), to.get(axis)) {
                (Placement::Partial, _) | (_, Placement::Shard(_) | Placement::Replicate) => to,
                (_, Placement::Partial) => to.with(axis, Placement::Replicate),
            });
            let mut now = from;
            let mut steps = 0;
            while let Some(step) = next_step(now, to) {
                match step {
                    Step::Sum(axes) => {
                        prop_assert!(!axes.is_empty());
                        for axis in axes {
                            prop_assert_eq!(now.get(axis), Placement::Partial);
                            now = now.with(axis, Placement::Replicate);
                        }
                    }
                    Step::Along(axis, placement) => {
                        prop_assert_ne!(now.get(axis), placement);
                        prop_assert_ne!(conversion(now.get(axis), placement), Conversion::Impossible);
                        for changed in [now.get(axis), placement] {
                            if let Placement::Shard(dimension) = changed {
                                prop_assert!(!now.is_cut_finer(axis, dimension), "{:?} of {:?}", axis, now);
                            }
                        }
                        now = now.with(axis, placement);
                    }
                }
                steps += 1;
                prop_assert!(steps <= 3 * Axis::WITHIN_STAGE.len(), "{:?} to {:?} does not end", from, to);
            }
            prop_assert_eq!(now, to);
        }
    }
}
