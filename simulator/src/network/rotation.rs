//! A rotation of the mesh: a cyclic shift of all ranks along one axis, the last to the front.
//! [`MeshRotation`] maps ranks and links to the representatives of their orbits.
//!
//! Rank `r` runs on device `r`, and whole nodes move with their ranks. So ranks, and links inside
//! nodes, form orbits of [`MeshRotation::period`] members each. The representative of an orbit is
//! its member in the first node. [`crate::equivalence`] decides whether a rotation is a symmetry of
//! a Program; [`super::Shape`] and [`super::hops`] check the flows of each collective.

use foretell_program::{Axis, Mesh, Rank};
use foretell_topologies::InterchangeableNodes;

/// A cyclic shift of all ranks along one axis of the mesh.
#[derive(Clone, Debug)]
pub(crate) struct MeshRotation {
    /// The axis along which ranks move.
    pub(crate) axis: Axis,
    /// Distance between a rank and the rank that it moves to.
    step: usize,
    /// Ranks rotate in blocks of this size: within its block, rank `r` moves to `r + step` modulo
    /// `block`.
    block: usize,
    nodes: InterchangeableNodes,
}

impl MeshRotation {
    /// The rotation along an axis of the mesh, if it moves whole nodes.
    pub(crate) fn along(axis: Axis, mesh: &Mesh, nodes: InterchangeableNodes) -> Option<Self> {
        let (step, size) = (mesh.stride(axis)?, mesh.stage(0).size(axis));
        (size > 1 && step.is_multiple_of(nodes.devices)).then_some(Self { axis, step, block: step * size, nodes })
    }

    /// The rotation of blocks of this size, whose nodes have `step` devices and one link.
    #[cfg(test)]
    pub(crate) fn of_blocks(step: usize, block: usize) -> Self {
        Self { axis: Axis::Data, step, block, nodes: InterchangeableNodes { count: block / step, devices: step, links: 1 } }
    }

    /// Whether all ranks of each orbit have the same value.
    pub(crate) fn leaves_unchanged<T: PartialEq>(&self, by_rank: &[T]) -> bool {
        by_rank
            .chunks(self.block)
            .all(|block| block.iter().skip(self.step).eq(block.iter().take(block.len().saturating_sub(self.step))))
    }

    /// Number of ranks in an orbit. After this many rotations every rank is back where it started.
    pub(crate) fn period(&self) -> usize {
        self.block / self.step
    }

    /// The representative of a rank's orbit.
    pub(crate) fn representative(&self, rank: usize) -> usize {
        rank - self.rotations_to(rank) * self.step
    }

    /// The representatives of all orbits of `world` ranks, in ascending order.
    pub(crate) fn representatives(&self, world: usize) -> impl Iterator<Item = usize> + use<> {
        let Self { step, block, .. } = *self;
        (0..world).step_by(block).flat_map(move |first| first..first + step)
    }

    /// The index of a rank's representative among all representatives.
    pub(crate) fn representative_index(&self, rank: usize) -> usize {
        self.index_and_rotations(rank).0
    }

    /// The index of a rank's representative among all representatives, and the number of rotations
    /// that move the representative to the rank.
    pub(crate) fn index_and_rotations(&self, rank: usize) -> (usize, usize) {
        let block = rank / self.block;
        let within = rank - block * self.block;
        let rotations = within / self.step;
        (block * self.step + within - rotations * self.step, rotations)
    }

    /// [`Self::representative_index`] of each of `world` ranks.
    pub(crate) fn representative_indices(&self, world: usize) -> Vec<u32> {
        let mut indices = Vec::with_capacity(world);
        for block in 0..world / self.block {
            let of_block = (block * self.step) as u32..((block + 1) * self.step) as u32;
            (0..self.period()).for_each(|_| indices.extend(of_block.clone()));
        }
        indices
    }

    /// Number of rotations that move a rank's representative to the rank.
    pub(crate) fn rotations_to(&self, rank: usize) -> usize {
        rank % self.block / self.step
    }

    /// The rank that `rotations` rotations move to `rank`. `rotations` must be less than the
    /// period.
    pub(crate) fn rotate_back(&self, rank: Rank, rotations: usize) -> Rank {
        let Self { step, block, .. } = *self;
        Rank(rank.0 / block * block + (rank.0 % block + block - rotations * step) % block)
    }

    /// The representative of a link's orbit; `None` for a link outside nodes.
    pub(crate) fn representative_link(&self, link: usize) -> Option<usize> {
        let device = self.device_of(link)?;
        Some(self.link_at(self.representative(device), link))
    }

    /// Applies to `neighbour` the rotations that move `link` to its representative. Returns
    /// `neighbour` itself if either link is outside nodes.
    pub(crate) fn relative_link(&self, link: usize, neighbour: usize) -> usize {
        let devices = self.device_of(link).zip(self.device_of(neighbour));
        devices.map_or(neighbour, |(own, other)| self.link_at(self.rotate_back(Rank(other), self.rotations_to(own)).0, neighbour))
    }

    /// The first device of the node that has a link; `None` for a link outside nodes.
    fn device_of(&self, link: usize) -> Option<usize> {
        let node = link / self.nodes.links;
        (node < self.nodes.count).then_some(node * self.nodes.devices)
    }

    /// The link that corresponds to `link` in the node of `device`.
    fn link_at(&self, device: usize, link: usize) -> usize {
        device / self.nodes.devices * self.nodes.links + link % self.nodes.links
    }
}
