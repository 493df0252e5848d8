//! Emitting the conversions between placements: in which order the axes are converted, and each one's moves ([`moves`]).

use super::emit::StageEmitter;
use crate::mesh::{Axis, Group};
use crate::placement::{Action, Move, Placement, Placements, moves};
use crate::plan::CollectiveAlgorithm;
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

    /// One conversion along one axis: its moves, each into a buffer of its own but for sums, which are made in place since the summands are of no
    /// use to anyone afterwards.
    fn convert_along(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, from: Placement, to: Placement) -> BufferId {
        let shape = self.program.buffer(buffer).shape.to_vec();
        let Some(moves) = moves(&shape, from, to, self.lowering.mesh.size(axis)) else {
            unreachable!("no operator wants partial sums of a tensor that is whole")
        };
        let mut buffer = buffer;
        let last = moves.len().saturating_sub(1);
        for (index, Move { action, shape }) in moves.into_iter().enumerate() {
            let next = match action {
                Action::Exchange(Collective::AllReduce) => buffer,
                _ => self.like(place, buffer, shape, index == last),
            };
            match action {
                Action::Exchange(kind) => self.collective(place, kind, Group::along(axis), buffer, next),
                Action::Rearrange(kernel) => {
                    // Which part is the rank's own.
                    let group = matches!(kernel, Kernel::Slice { .. }).then(|| self.group(Group::along(axis)));
                    self.rearrange(place, kernel, buffer, next, group);
                }
            }
            buffer = next;
        }
        buffer
    }

    fn all_reduce(&mut self, place: &Place<'_>, buffer: BufferId, group: Group) {
        self.collective(place, Collective::AllReduce, group, buffer, buffer);
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
        let is_sum = kind == Collective::AllReduce;
        let algorithm = if is_sum { self.plan.layout.collective } else { CollectiveAlgorithm::Automatic };
        Operation::Collective { kind, group: self.group(group), bytes, data_type, role, algorithm }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::placement::{Conversion, conversion};
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
