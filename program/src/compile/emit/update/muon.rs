//! The update of one parameter by Muon: ranks gather its shards into whole matrices.

use super::Update;
use crate::collective::Collective;
use crate::compile::emit::list::Label;
use crate::compile::recipe::BucketTraining;
use crate::mesh::{Axis, Group};
use crate::placement::Placement;
use crate::program::{BufferId, BufferRole, Phase};
use foretell_models::{HiddenMatrix, Kernel};

impl Update<'_> {
    /// Updates the matrices of a bucket by Muon: each rank finds the direction of its shard,
    /// gathers the directions of whole matrices, makes them orthogonal, and steps along its own
    /// shard.
    pub(super) fn update_by_muon(
        &mut self,
        index: usize,
        name: &str,
        matrix: HiddenMatrix,
        (reads, writes): (&[BufferId], &[BufferId]),
    ) {
        let bucket = &self.stage.state.buckets[index];
        let exempt = bucket.training == BucketTraining::Exempt;
        let member = &bucket.members[0];
        let (elements, precision) = (bucket.shard_elements(), self.stage.state.precision);
        let controlled = self.persistent.control.is_some();
        // After the parameter come the momentum and, in mixed precision, the master copy.
        let (updated, momentum, master) = (writes[0], writes[1], writes.get(2).copied());
        let own = self.list.add_buffer(name, BufferRole::Workspace, vec![elements], precision);
        self.compute(name, Kernel::MuonDirection { elements, controlled }, reads, &[own, momentum]);

        let mut direction = own;
        if bucket.shards > 1 {
            let whole = self.list.add_buffer(name, BufferRole::Workspace, vec![bucket.elements], precision);
            let buffers = [direction, whole];
            self.list.collective_of_step(name, Collective::AllGather, bucket.shard_group(), buffers, Phase::Update);
            direction = whole;
        }
        let padded = direction;
        let mut shape = member.shape.clone();
        let own_elements: usize = shape.iter().product();
        direction = self.list.add_view(name, direction, 0, vec![own_elements]);
        // Axes whose ranks hold parts of one matrix, as opposed to different matrices. The first
        // axes have the smallest parts.
        let cuts: Vec<(Axis, usize)> = Axis::WITHIN_STAGE
            .into_iter()
            .filter_map(|axis| match member.placements.get(axis) {
                Placement::Shard(dimension) if dimension >= matrix.count_dimensions => Some((axis, dimension)),
                _ => None,
            })
            .filter(|&(axis, _)| self.stage.lowering.mesh.size(axis) > 1)
            .collect();
        for &(axis, dimension) in &cuts {
            direction = self.join(name, (axis, dimension), &mut shape, direction);
        }

        let [matrices, rows, columns] = matrix.sizes(&shape);
        let orthogonal = self.list.add_buffer(name, BufferRole::Workspace, vec![matrices * rows * columns], precision);
        self.compute(name, Kernel::Orthogonalise { matrices, rows, columns }, &[direction], &[orthogonal]);

        let mut direction = orthogonal;
        for &(axis, dimension) in cuts.iter().rev() {
            direction = self.part(name, (axis, dimension), &mut shape, direction);
        }
        if bucket.elements > own_elements {
            // The padding behind the matrix belongs to no parameter. Its direction stays as
            // gathered: zero.
            let part = self.list.add_view(name, padded, 0, vec![own_elements]);
            let kernel = Kernel::Slice { outer: 1, parts: 1, inner: own_elements };
            self.compute(name, kernel, &[direction], &[part]);
            direction = padded;
        }
        if bucket.shards > 1 {
            self.slice(name, (bucket.shards, elements), bucket.shard_group(), direction, own);
            direction = own;
        }
        let step_reads: Vec<BufferId> = std::iter::once(direction).chain(self.persistent.control).collect();
        let step_writes: Vec<BufferId> = std::iter::once(updated).chain(master).collect();
        let longest = rows.max(columns);
        self.compute(name, Kernel::MuonStep { elements, longest, controlled, exempt }, &step_reads, &step_writes);
    }

    /// Gathers a tensor whose `dimension` is sharded equally over the ranks along `axis`. `shape`
    /// is the shape of `part`, and is replaced by that of the result.
    fn join(&mut self, name: &str, (axis, dimension): (Axis, usize), shape: &mut [usize], part: BufferId) -> BufferId {
        let (parts, precision) = (self.stage.lowering.mesh.size(axis), self.list.buffer(part).data_type);
        let (outer, inner) = (shape[..dimension].iter().product(), shape[dimension..].iter().product());
        let elements = vec![parts * outer * inner];
        let gathered = self.list.add_buffer(name, BufferRole::Workspace, elements.clone(), precision);
        self.list.collective_of_step(name, Collective::AllGather, Group::over(vec![axis]), [part, gathered], Phase::Update);
        shape[dimension] *= parts;
        if outer == 1 {
            return gathered;
        }
        let joined = self.list.add_buffer(name, BufferRole::Workspace, elements, precision);
        self.compute(name, Kernel::Interleave { outer, parts, inner }, &[gathered], &[joined]);
        joined
    }

    /// Takes this rank's part of a tensor: the reverse of [`Self::join`].
    fn part(&mut self, name: &str, (axis, dimension): (Axis, usize), shape: &mut [usize], whole: BufferId) -> BufferId {
        let (parts, precision) = (self.stage.lowering.mesh.size(axis), self.list.buffer(whole).data_type);
        shape[dimension] /= parts;
        let (outer, inner) = (shape[..dimension].iter().product(), shape[dimension..].iter().product());
        let part = self.list.add_buffer(name, BufferRole::Workspace, vec![outer * inner], precision);
        let group = self.list.group(Group::over(vec![axis]));
        let kernel = Kernel::Slice { outer, parts, inner };
        self.list.compute_in_group(Label::of_step(name, Phase::Update), kernel, Some(group), &[whole], &[part]);
        part
    }
}
