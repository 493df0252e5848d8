//! Ranks that do alike because the mesh may be turned: moved on along one axis, the last to the front, every rank does what the one before did and
//! lies as that lay. One rank of each orbit of such a turn is made ready, so that neither time nor memory grows with the ranks that it stands for.
//!
//! It is a matter of the mesh, of which list each rank runs, and of the nodes, which must be alike ([`InterchangeableNodes`]). Whether the flows of a
//! collective turn along is looked at where they are known ([`crate::network`]): a ring's do, a tree's do not. [`crate::folding`] then finds
//! what else is alike. It must not know time, and what instructions do.
//!
//! Links are numbered as the topology has them; the one of an orbit in the node of the first rank stands for all.

use foretell_program::{Axis, Mesh, Rank};
use foretell_topologies::InterchangeableNodes;

/// The orbits of a turn.
#[derive(Clone, Debug)]
pub(crate) struct MeshRotation {
    /// The axis along which ranks are moved on.
    pub(crate) axis: Axis,
    /// How far apart the ranks of an orbit are, and how many ranks each turning block has: rank r comes to (r + step) modulo block in its block.
    step: usize,
    block: usize,
    nodes: InterchangeableNodes,
}

impl MeshRotation {
    /// The rotation along `axis` of a mesh, if it moves whole nodes.
    pub(crate) fn along(axis: Axis, mesh: &Mesh, nodes: InterchangeableNodes) -> Option<Self> {
        let (step, size) = (mesh.stride(axis)?, mesh.stage(0).size(axis));
        (size > 1 && step.is_multiple_of(nodes.devices)).then_some(Self { axis, step, block: step * size, nodes })
    }

    /// Whether ranks that come to each other have the same.
    pub(crate) fn leaves_unchanged<T: PartialEq>(&self, of_ranks: &[T]) -> bool {
        of_ranks
            .chunks(self.block)
            .all(|block| block.iter().skip(self.step).eq(block.iter().take(block.len().saturating_sub(self.step))))
    }

    /// Those of one block of ranks on as many nodes.
    #[cfg(test)]
    pub(crate) fn of_blocks(step: usize, block: usize) -> Self {
        Self { axis: Axis::Data, step, block, nodes: InterchangeableNodes { count: block / step, devices: step, links: 1 } }
    }

    /// How many ranks an orbit has.
    pub(crate) fn period(&self) -> usize {
        self.block / self.step
    }

    /// The rank that stands for this one.
    pub(crate) fn representative(&self, rank: usize) -> usize {
        rank - self.rotations_to(rank) * self.step
    }

    /// The ranks that stand for all of a world.
    pub(crate) fn representatives(&self, world: usize) -> impl Iterator<Item = usize> + use<> {
        let Self { step, block, .. } = *self;
        (0..world).step_by(block).flat_map(move |first| first..first + step)
    }

    /// The place among those of the rank that stands for this one.
    pub(crate) fn representative_index(&self, rank: usize) -> usize {
        self.index_and_rotations(rank).0
    }

    /// The same, and how often that rank is to be moved on to come to this one.
    pub(crate) fn index_and_rotations(&self, rank: usize) -> (usize, usize) {
        let block = rank / self.block;
        let within = rank - block * self.block;
        let turns = within / self.step;
        (block * self.step + within - turns * self.step, turns)
    }

    /// [`Self::place`] of every rank of a world.
    pub(crate) fn representative_indices(&self, world: usize) -> Vec<u32> {
        let mut indices = Vec::with_capacity(world);
        for block in 0..world / self.block {
            let of_block = (block * self.step) as u32..((block + 1) * self.step) as u32;
            (0..self.period()).for_each(|_| indices.extend(of_block.clone()));
        }
        indices
    }

    /// How often the rank that stands for this one is to be moved on to come to it.
    pub(crate) fn rotations_to(&self, rank: usize) -> usize {
        rank % self.block / self.step
    }

    /// Where a rank comes to when it is moved back so often.
    pub(crate) fn rotate_back(&self, rank: Rank, turns: usize) -> Rank {
        let Self { step, block, .. } = *self;
        Rank(rank.0 / block * block + (rank.0 % block + block - turns * step) % block)
    }

    /// The link that stands for this one; none for one that is in no node.
    pub(crate) fn representative_link(&self, link: usize) -> Option<usize> {
        let device = self.device_of(link)?;
        Some(self.link_at(self.representative(device), link))
    }

    /// A neighbour of a link, seen from the link that stands for that.
    pub(crate) fn relative_link(&self, link: usize, neighbour: usize) -> usize {
        let devices = self.device_of(link).zip(self.device_of(neighbour));
        devices.map_or(neighbour, |(own, other)| self.link_at(self.rotate_back(Rank(other), self.rotations_to(own)).0, neighbour))
    }

    /// The first device of the node that has a link.
    fn device_of(&self, link: usize) -> Option<usize> {
        let node = link / self.nodes.links;
        (node < self.nodes.count).then_some(node * self.nodes.devices)
    }

    /// The link in the node of a device that is there what another is in its node.
    fn link_at(&self, device: usize, link: usize) -> usize {
        device / self.nodes.devices * self.nodes.links + link % self.nodes.links
    }
}
