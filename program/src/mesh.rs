//! The device mesh: named axes over the ranks of a run.
//!
//! A rank is a coordinate on every axis. The order of the axes says which varies fastest over consecutive ranks, and so which
//! ranks are neighbours on the machine.

use serde::{Deserialize, Serialize};
use std::fmt;

/// An axis of the mesh, named as users of Megatron-LM and torchtitan name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Shares out the weights of operators.
    Tensor,
    /// Shares out the positions of a sequence.
    Context,
    /// Shares out experts; outside of them, samples.
    Expert,
    /// Shares out samples, and what ZeRO shards: the part of the plan's `data` that is one shard group.
    Shard,
    /// Shares out samples: the shard groups of the plan's `data`, or all of it where nothing is sharded.
    Data,
    /// Shares out the layers.
    Pipeline,
}

impl Axis {
    /// All axes, in the usual order of placement: the most talkative varies fastest.
    pub const ALL: [Axis; 6] = [Axis::Tensor, Axis::Context, Axis::Expert, Axis::Shard, Axis::Data, Axis::Pipeline];

    /// The axes within a pipeline stage, along which placements are stated. Where several cut one dimension, the later of this list
    /// cuts first: its parts are the larger ones.
    pub const WITHIN_STAGE: [Axis; 5] = [Axis::Tensor, Axis::Context, Axis::Expert, Axis::Shard, Axis::Data];

    /// The axes that share out samples, the one with the largest parts last.
    pub const BATCH: [Axis; 3] = [Axis::Expert, Axis::Shard, Axis::Data];

    /// The name used in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Axis::Tensor => "tensor",
            Axis::Context => "context",
            Axis::Expert => "expert",
            Axis::Shard => "shard",
            Axis::Data => "data",
            Axis::Pipeline => "pipeline",
        }
    }

    const fn index(self) -> usize {
        match self {
            Axis::Tensor => 0,
            Axis::Context => 1,
            Axis::Expert => 2,
            Axis::Shard => 3,
            Axis::Data => 4,
            Axis::Pipeline => 5,
        }
    }
}

impl fmt::Display for Axis {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.name())
    }
}

/// A rank of the run, from 0 to the world size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rank(pub usize);

impl fmt::Display for Rank {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "rank {}", self.0)
    }
}

/// A rank's position on every axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates([usize; 6]);

impl Coordinates {
    /// The position on one axis.
    pub fn along(&self, axis: Axis) -> usize {
        self.0[axis.index()]
    }

    /// The same position but on one axis.
    pub fn with(mut self, axis: Axis, position: usize) -> Self {
        self.0[axis.index()] = position;
        self
    }
}

/// The sizes of the axes and the order in which they vary over the ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    sizes: [usize; 6],
    /// Fastest first; every axis once.
    order: [Axis; 6],
}

impl Mesh {
    /// A mesh whose axes vary in `order`, the first fastest; axes that it leaves out follow in the usual order.
    /// Returns `None` where an axis is named twice or a size is 0.
    pub fn new(size_of: impl Fn(Axis) -> usize, order: &[Axis]) -> Option<Self> {
        let mut complete: Vec<Axis> = Vec::with_capacity(Axis::ALL.len());
        for &axis in order.iter().chain(Axis::ALL.iter().filter(|axis| !order.contains(axis))) {
            if complete.contains(&axis) {
                return None;
            }
            complete.push(axis);
        }
        let sizes = Axis::ALL.map(size_of);
        if sizes.contains(&0) {
            return None;
        }
        Some(Self { sizes, order: complete.try_into().ok()? })
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        self.sizes.iter().product()
    }

    /// How many ranks there are along an axis.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes[axis.index()]
    }

    /// The rank at a position.
    pub fn rank(&self, coordinates: Coordinates) -> Rank {
        let mut stride = 1;
        let mut rank = 0;
        for axis in self.order {
            rank += coordinates.along(axis) * stride;
            stride *= self.size(axis);
        }
        Rank(rank)
    }

    /// How many parts the samples are cut into.
    pub fn batch_parts(&self) -> usize {
        Axis::BATCH.iter().map(|&axis| self.size(axis)).product()
    }

    /// Which of [`Mesh::batch_parts`] is a position's.
    pub fn batch_part(&self, coordinates: Coordinates) -> usize {
        Axis::BATCH.iter().rev().fold(0, |part, &axis| part * self.size(axis) + coordinates.along(axis))
    }

    /// Which part a position has of what the axes `axes` of a stage cut together, each once: the later of [`Axis::WITHIN_STAGE`] cuts first.
    pub fn part_along(&self, axes: &[Axis], coordinates: Coordinates) -> usize {
        let cutting = Axis::WITHIN_STAGE.iter().rev().filter(|axis| axes.contains(axis));
        cutting.fold(0, |part, &axis| part * self.size(axis) + coordinates.along(axis))
    }

    /// The position of a rank.
    pub fn coordinates(&self, rank: Rank) -> Coordinates {
        let mut rest = rank.0;
        let mut coordinates = Coordinates([0; 6]);
        for axis in self.order {
            coordinates = coordinates.with(axis, rest % self.size(axis));
            rest /= self.size(axis);
        }
        coordinates
    }

    /// The ranks of a pipeline stage, ascending.
    pub fn stage_ranks(&self, stage: usize) -> Vec<Rank> {
        (0..self.world_size()).map(Rank).filter(|&rank| self.coordinates(rank).along(Axis::Pipeline) == stage).collect()
    }
}

/// Which ranks talk to each other: from the view of one rank, those that differ from it on these axes only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// The axes along which the members differ.
    pub axes: Vec<Axis>,
    /// Where the pipeline is among the axes: the stages that take part.
    pub stages: Vec<usize>,
}

impl Group {
    /// The ranks along one axis within a stage.
    pub fn along(axis: Axis) -> Self {
        Self { axes: vec![axis], stages: Vec::new() }
    }

    /// The ranks along several axes within a stage.
    pub fn over(mut axes: Vec<Axis>) -> Self {
        axes.sort_unstable();
        Self { axes, stages: Vec::new() }
    }

    /// The ranks that have the same position in each of `stages`.
    pub fn across(stages: Vec<usize>) -> Self {
        Self { axes: vec![Axis::Pipeline], stages }
    }

    /// The members, as `rank` (one of them) sees them; every member sees the same list.
    pub fn members(&self, mesh: &Mesh, rank: Rank) -> Vec<Rank> {
        let mut members = vec![mesh.coordinates(rank)];
        for &axis in &self.axes {
            let positions: Vec<usize> = if axis == Axis::Pipeline { self.stages.clone() } else { (0..mesh.size(axis)).collect() };
            members =
                members.iter().flat_map(|&member| positions.iter().map(move |&position| member.with(axis, position))).collect();
        }
        let mut ranks: Vec<Rank> = members.into_iter().map(|member| mesh.rank(member)).collect();
        ranks.sort_unstable();
        ranks
    }
}

impl fmt::Display for Group {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.axes.iter().map(|axis| axis.name()).collect();
        formatter.pad(&names.join("+"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mesh() -> Mesh {
        let size = |axis| match axis {
            Axis::Tensor => 2,
            Axis::Data => 3,
            Axis::Pipeline => 4,
            _ => 1,
        };
        Mesh::new(size, &[Axis::Tensor, Axis::Data]).expect("a valid mesh")
    }

    #[test]
    fn ranks_and_coordinates_are_each_others_inverse() {
        let mesh = mesh();
        assert_eq!(mesh.world_size(), 24);
        for rank in (0..24).map(Rank) {
            assert_eq!(mesh.rank(mesh.coordinates(rank)), rank);
        }
    }

    #[test]
    fn groups_partition_the_ranks() {
        let mesh = mesh();
        for group in [Group::along(Axis::Tensor), Group::along(Axis::Data), Group::across(vec![0, 3])] {
            for rank in (0..24).map(Rank) {
                let stage = mesh.coordinates(rank).along(Axis::Pipeline);
                if group.axes == [Axis::Pipeline] && !group.stages.contains(&stage) {
                    continue;
                }
                let members = group.members(&mesh, rank);
                assert!(members.contains(&rank));
                for &member in &members {
                    assert_eq!(group.members(&mesh, member), members, "every member sees the same group");
                }
            }
        }
    }

    #[test]
    fn parts_are_counted_as_nested_cuts_whatever_the_order_of_ranks() {
        let size = |axis| match axis {
            Axis::Tensor => 2,
            Axis::Context => 3,
            Axis::Data => 2,
            _ => 1,
        };
        for order in [&[Axis::Tensor, Axis::Context][..], &[Axis::Context, Axis::Data, Axis::Tensor]] {
            let mesh = Mesh::new(size, order).expect("a valid mesh");
            for rank in (0..mesh.world_size()).map(Rank) {
                let coordinates = mesh.coordinates(rank);
                let [tensor, context] = [Axis::Tensor, Axis::Context].map(|axis| coordinates.along(axis));
                assert_eq!(mesh.part_along(&[Axis::Tensor, Axis::Context], coordinates), context * 2 + tensor);
                assert_eq!(mesh.part_along(&Axis::BATCH, coordinates), mesh.batch_part(coordinates));
                for axis in [Axis::Tensor, Axis::Context, Axis::Data] {
                    let members = Group::along(axis).members(&mesh, rank);
                    let place = members.iter().position(|&member| member == rank);
                    assert_eq!(Some(mesh.part_along(&[axis], coordinates)), place, "of one axis: the place among the members");
                }
            }
        }
    }

    #[test]
    fn the_first_axis_of_the_order_is_the_neighbourhood() {
        assert_eq!(Group::along(Axis::Tensor).members(&mesh(), Rank(5)), [Rank(4), Rank(5)]);
        assert_eq!(Group::along(Axis::Data).members(&mesh(), Rank(5)), [Rank(1), Rank(3), Rank(5)]);
    }
}
