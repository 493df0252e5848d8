//! Conversions between placements: the order in which axes are converted, and the instructions of
//! each step ([`moves`]).

use super::list::{Label, ListBuilder};
use super::live::Variant;
use crate::collective::{Collective, CollectiveRole};
use crate::mesh::{Axis, Group, StageMesh};
use crate::placement::{Action, Move, Placement, Placements, moves};
use crate::program::{BufferId, BufferRole};
use foretell_models::Kernel;

/// Whether a conversion overwrote the buffer that it started from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Intact,
    Overwritten,
}

/// Appends conversions of one tensor to a list.
pub(super) struct Converter<'a> {
    pub(super) list: &'a mut ListBuilder,
    pub(super) mesh: &'a StageMesh,
    pub(super) label: Label<'a>,
    /// Whether the tensor has a dimension of experts.
    pub(super) is_of_experts: bool,
}

impl Converter<'_> {
    /// Converts `from` to the placements `wanted`. Returns the buffer with the result.
    pub(super) fn convert(&mut self, from: Variant, wanted: Placements) -> (BufferId, Source) {
        let Variant { mut placements, mut buffer } = from;
        let mut source = Source::Intact;
        while let Some(step) = next_step(placements, wanted) {
            match step {
                ConversionStep::Sum(axes) => {
                    if buffer == from.buffer {
                        source = Source::Overwritten;
                    }
                    self.collective(Collective::AllReduce, Group::over(axes.clone()), [buffer, buffer]);
                    for axis in axes {
                        placements = placements.with(axis, Placement::Replicate);
                    }
                }
                ConversionStep::Along(axis, to) => {
                    buffer = self.convert_along(buffer, axis, placements.get(axis), to);
                    placements = placements.with(axis, to);
                }
            }
        }
        debug_assert_eq!(placements, wanted);
        (buffer, source)
    }

    /// Converts along one axis. Each move writes a new buffer, except for all-reduces: nobody needs
    /// their input afterwards, so they work in place.
    fn convert_along(&mut self, buffer: BufferId, axis: Axis, from: Placement, to: Placement) -> BufferId {
        let shape = self.list.buffer(buffer).shape.to_vec();
        let Some(moves) = moves(&shape, from, to, self.mesh.size(axis)) else {
            unreachable!("no operator reads a replicated or sharded tensor as a partial sum")
        };
        let mut buffer = buffer;
        let last = moves.len().saturating_sub(1);
        for (index, Move { action, shape }) in moves.into_iter().enumerate() {
            let next = match action {
                Action::Collective(Collective::AllReduce) => buffer,
                _ => {
                    let role = if index == last { BufferRole::Activation } else { BufferRole::Workspace };
                    self.list.add_buffer(self.label.name, role, shape, self.list.buffer(buffer).data_type)
                }
            };
            match action {
                Action::Collective(kind) => self.collective(kind, Group::along(axis), [buffer, next]),
                Action::Rearrange(kernel) => {
                    // A slice kernel takes the part at the rank's index in the group.
                    let group = matches!(kernel, Kernel::Slice { .. }).then(|| self.list.group(Group::along(axis)));
                    self.list.compute_in_group(self.label, kernel, group, &[buffer], &[next]);
                }
            }
            buffer = next;
        }
        buffer
    }

    fn collective(&mut self, kind: Collective, group: Group, buffers: [BufferId; 2]) {
        let role = match group.axes.as_slice() {
            _ if self.is_of_experts => CollectiveRole::Expert,
            [Axis::Context] => CollectiveRole::Context,
            _ => CollectiveRole::Tensor,
        };
        self.list.collective(self.label, kind, role, group, buffers);
    }
}

/// One step of a conversion.
#[derive(Clone, Debug, PartialEq, Eq)]
enum ConversionStep {
    /// One all-reduce over all of these axes.
    Sum(Vec<Axis>),
    /// A change of the placement along one axis.
    Along(Axis, Placement),
}

/// The next step from the placements `now` to `wanted`; `None` if they are equal.
///
/// Where several axes shard one dimension, the shards are nested. So an axis can be sharded only
/// when all axes with larger parts are sharded, and unsharded only when all axes with smaller parts
/// are unsharded. Steps that make a tensor smaller come first, steps that make it larger last.
fn next_step(now: Placements, wanted: Placements) -> Option<ConversionStep> {
    let differs = |&axis: &Axis| now.get(axis) != wanted.get(axis);
    let can_shard = |axis: Axis, dimension: usize| {
        let larger = Axis::WITHIN_STAGE.iter().skip_while(|&&within| within != axis).skip(1);
        let nested = |placements: Placements, axis: Axis| placements.get(axis) == Placement::Shard(dimension);
        !now.is_cut_finer(axis, dimension) && larger.clone().all(|&larger| nested(now, larger) == nested(wanted, larger))
    };
    let is_ready = |axis: Axis| {
        let can_leave = match now.get(axis) {
            Placement::Shard(dimension) => !now.is_cut_finer(axis, dimension),
            _ => true,
        };
        let can_enter = match wanted.get(axis) {
            Placement::Shard(dimension) => can_shard(axis, dimension),
            _ => true,
        };
        can_leave && can_enter
    };
    let cost = |axis: Axis| match (now.get(axis), wanted.get(axis)) {
        (Placement::Replicate, _) => 0,
        (Placement::Partial, Placement::Shard(_)) => 1,
        (Placement::Partial, _) => 2,
        (Placement::Shard(_), Placement::Shard(_)) => 3,
        (Placement::Shard(_), _) => 4,
    };
    // Among equal costs the axis with the largest parts comes first, so that shards nest.
    let ready =
        Axis::WITHIN_STAGE.into_iter().rev().filter(differs).filter(|&axis| is_ready(axis)).min_by_key(|&axis| cost(axis));
    match ready {
        Some(axis) if cost(axis) == 2 => {
            let sums = |&axis: &Axis| now.get(axis) == Placement::Partial && wanted.get(axis) == Placement::Replicate;
            Some(ConversionStep::Sum(Axis::WITHIN_STAGE.into_iter().filter(sums).collect()))
        }
        Some(axis) => Some(ConversionStep::Along(axis, wanted.get(axis))),
        // Every axis that differs waits for an axis with smaller parts of the same dimension, which
        // keeps its placement or waits itself. Replicate along the blocking axis for now.
        None => {
            let blocker = |axis: Axis| {
                let finer = Axis::WITHIN_STAGE.into_iter().take_while(move |&within| within != axis);
                [now.get(axis), wanted.get(axis)].into_iter().find_map(|placement| match placement {
                    Placement::Shard(_) => finer.clone().find(|&finer| now.get(finer) == placement),
                    _ => None,
                })
            };
            let blocked = Axis::WITHIN_STAGE.into_iter().filter(differs).find_map(blocker);
            blocked.map(|axis| ConversionStep::Along(axis, Placement::Replicate))
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
            Axis::WITHIN_STAGE
                .iter()
                .zip(all)
                .fold(Placements::default(), |placements, (&axis, placement)| placements.with(axis, placement))
        })
    }

    proptest! {
        #[test]
        fn every_conversion_ends_and_keeps_shards_nested(from in placements(), to in placements()) {
            // Nothing converts to a partial sum but a partial sum.
            let to = Axis::WITHIN_STAGE.iter().fold(to, |to, &axis| match (from.get(axis), to.get(axis)) {
                (Placement::Partial, _) | (_, Placement::Shard(_) | Placement::Replicate) => to,
                (_, Placement::Partial) => to.with(axis, Placement::Replicate),
            });
            let mut now = from;
            let mut steps = 0;
            while let Some(step) = next_step(now, to) {
                match step {
                    ConversionStep::Sum(axes) => {
                        prop_assert!(!axes.is_empty());
                        for axis in axes {
                            prop_assert_eq!(now.get(axis), Placement::Partial);
                            now = now.with(axis, Placement::Replicate);
                        }
                    }
                    ConversionStep::Along(axis, placement) => {
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
