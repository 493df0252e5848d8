//! Emitting the conversions between placements: the table's collective, and the rearrangement that a collective needs where it cuts
//! or joins a dimension that is not the first in memory.

use super::emit::StageEmitter;
use crate::mesh::{Axis, Group};
use crate::placement::{Conversion, Placement, Placements, conversion};
use crate::program::{BufferId, BufferRole, Collective, GroupId, Operation, Phase, Stream};
use foretell_models::{Kernel, TensorId};

/// Where an instruction belongs: what all of a conversion's instructions share.
struct Place<'a> {
    name: &'a str,
    micro_batch: usize,
    phase: Phase,
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
        let name = self.lowering.graph.tensor(tensor).name.clone();
        let place = Place { name: &name, micro_batch, phase };
        for axis in Axis::WITHIN_STAGE {
            let (from, to) = (placements.get(axis), wanted.get(axis));
            match conversion(from, to) {
                Conversion::None => {}
                Conversion::Collective { kind: Collective::AllReduce, .. } => {
                    if buffer == first {
                        consumed = Consumed::Yes;
                    }
                    self.all_reduce(&place, buffer, axis);
                }
                Conversion::Collective { kind: Collective::AllGather, from, .. } => {
                    buffer = self.all_gather(&place, buffer, axis, from);
                }
                Conversion::Collective { kind: Collective::ReduceScatter, to, .. } => {
                    buffer = self.reduce_scatter(&place, buffer, axis, to);
                }
                Conversion::Collective { kind: Collective::AllToAll, from, to } => {
                    buffer = self.all_to_all(&place, buffer, axis, from, to);
                }
                Conversion::Slice(dimension) => buffer = self.slice(&place, buffer, axis, dimension),
                Conversion::Impossible => unreachable!("no operator wants partial sums of a tensor that is whole"),
            }
            placements = placements.with(axis, to);
        }
        debug_assert_eq!(placements, wanted);
        debug_assert!(
            !Axis::WITHIN_STAGE
                .iter()
                .any(|&axis| placements.get(axis) == Placement::Partial && wanted.get(axis) != Placement::Partial)
        );
        (buffer, consumed)
    }

    /// In place: the summands are of no use to anyone afterwards.
    fn all_reduce(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis) {
        self.collective(place, Collective::AllReduce, Group::along(axis), buffer, buffer);
    }

    fn all_gather(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, dimension: usize) -> BufferId {
        let parts = self.mesh.size(axis);
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
        let parts = self.mesh.size(axis);
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
        let parts = self.mesh.size(axis);
        let shape = self.program.buffer(buffer).shape.clone();
        let mut scattered = shape.clone();
        scattered[to] /= parts;
        let mut result_shape = scattered.clone();
        result_shape[from] *= parts;
        let (outer, inner) = around(&scattered, to);
        let ordered = self.like(place, buffer, shape, false);
        self.rearrange(place, Kernel::Deinterleave { outer, parts, inner }, buffer, ordered, None);
        let exchanged = self.like(place, buffer, result_shape.clone(), false);
        self.collective(place, Collective::AllToAll, Group::along(axis), ordered, exchanged);
        let (outer, inner) = around(&scattered, from);
        let result = self.like(place, buffer, result_shape, true);
        self.rearrange(place, Kernel::Interleave { outer, parts, inner }, exchanged, result, None);
        result
    }

    fn slice(&mut self, place: &Place<'_>, buffer: BufferId, axis: Axis, dimension: usize) -> BufferId {
        let parts = self.mesh.size(axis);
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

    fn collective(&mut self, place: &Place<'_>, kind: Collective, group: Group, from: BufferId, to: BufferId) {
        let operation = self.collective_operation(kind, group, from, to);
        let Operation::Collective { group, .. } = operation else { unreachable!("just made") };
        self.push(place.name, operation, Stream::Group(group), vec![from], vec![to], Some(place.micro_batch), place.phase);
    }

    /// A collective from one buffer to another, sized by the larger.
    pub(super) fn collective_operation(&mut self, kind: Collective, group: Group, from: BufferId, to: BufferId) -> Operation {
        let bytes = self.program.buffer(from).bytes.max(self.program.buffer(to).bytes);
        let data_type = self.program.buffer(from).data_type;
        Operation::Collective { kind, group: self.group(group), bytes, data_type }
    }
}

/// The product of the extents before a dimension, and of that dimension and those after it.
fn around(shape: &[usize], dimension: usize) -> (usize, usize) {
    (shape[..dimension].iter().product(), shape[dimension..].iter().product())
}
