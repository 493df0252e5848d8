//! The device mesh: named axes over the ranks of a run.
//!
//! A rank has a coordinate on every axis. The rank order says which axis varies fastest over
//! consecutive ranks, and so which ranks are neighbours on the machine. It must not know machines:
//! topologies give ranks their devices.

mod group;
#[cfg(test)]
mod tests;

pub use group::Group;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An axis of the mesh, named as users of Megatron-LM and torchtitan name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Axis {
    /// Shards the weights of operators.
    Tensor,
    /// Shards the positions of a sequence.
    Context,
    /// Shards experts; outside of experts, samples.
    Expert,
    /// Shards samples and the state that ZeRO shards: one shard group of the plan's `data`.
    Shard,
    /// Shards samples: the shard groups of the plan's `data`, or all of `data` without ZeRO.
    Data,
    /// Divides the layers into stages.
    Pipeline,
}

impl Axis {
    /// All axes in the usual rank order. The axis with the most communication varies fastest.
    pub const ALL: [Axis; 6] = [Axis::Tensor, Axis::Context, Axis::Expert, Axis::Shard, Axis::Data, Axis::Pipeline];

    /// The axes within a pipeline stage, which have placements. If several shard one dimension, a
    /// later axis has the larger parts.
    pub const WITHIN_STAGE: [Axis; 5] = [Axis::Tensor, Axis::Context, Axis::Expert, Axis::Shard, Axis::Data];

    /// The axes that shard samples. A later axis has the larger parts.
    pub const BATCH: [Axis; 3] = [Axis::Expert, Axis::Shard, Axis::Data];

    /// The axes over which ZeRO shards the state of parameters, if the parameters are replicated
    /// along them. Megatron and torchtitan do the same: `context` and, outside of experts, `expert`
    /// shard the batch's tokens as `data` does.
    pub const ZERO: [Axis; 3] = [Axis::Context, Axis::Expert, Axis::Shard];

    /// The name in plan files.
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

    /// The axis's index in [`Axis::ALL`], and in [`Axis::WITHIN_STAGE`] if it is one of those.
    pub(crate) const fn index(self) -> usize {
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

/// A rank of the run, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Rank(pub usize);

impl fmt::Display for Rank {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "rank {}", self.0)
    }
}

/// The coordinates of a rank: its position on every axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Coordinates([usize; 6]);

impl Coordinates {
    /// The position on one axis.
    pub fn along(&self, axis: Axis) -> usize {
        self.0[axis.index()]
    }

    /// These coordinates with another position on one axis.
    pub fn with(mut self, axis: Axis, position: usize) -> Self {
        self.0[axis.index()] = position;
        self
    }
}

/// The mesh of one pipeline stage: the sizes of its axes, and the samples of its ranks.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StageMesh {
    /// In the order of [`Axis::WITHIN_STAGE`].
    sizes: [usize; 5],
    /// The number of samples of a micro-batch on one rank, for each position along `data` and
    /// `shard`; `shard` varies faster.
    samples: Vec<usize>,
}

impl StageMesh {
    /// A mesh with these sizes. `samples` is the number of samples of a micro-batch on every rank,
    /// or one number for each position along `data` and `shard` (`shard` varies faster). Returns
    /// `None` if a size or a number is 0, or if the count of numbers is wrong.
    pub fn new(size_of: impl Fn(Axis) -> usize, samples: &[usize]) -> Option<Self> {
        let sizes = Axis::WITHIN_STAGE.map(size_of);
        let positions = sizes[Axis::Shard.index()].checked_mul(sizes[Axis::Data.index()])?;
        let samples = if let [all] = samples { vec![*all; positions] } else { samples.to_vec() };
        let is_valid = samples.len() == positions && !sizes.contains(&0) && !samples.contains(&0);
        is_valid.then_some(Self { sizes, samples })
    }

    /// The number of ranks along an axis; 1 along the pipeline.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes.get(axis.index()).copied().unwrap_or(1)
    }

    /// The number of ranks.
    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// The number of samples of a micro-batch over all ranks.
    pub fn samples_at_once(&self) -> usize {
        self.samples.iter().sum::<usize>() * self.size(Axis::Expert)
    }

    /// The number of samples of a micro-batch on the rank at `coordinates`.
    pub fn samples(&self, coordinates: Coordinates) -> usize {
        self.samples[self.sample_position(coordinates)]
    }

    /// The number of samples of a micro-batch before the first sample of the rank at `coordinates`.
    pub fn samples_before(&self, coordinates: Coordinates) -> usize {
        let position = self.sample_position(coordinates);
        let earlier: usize = self.samples[..position].iter().sum();
        earlier * self.size(Axis::Expert) + coordinates.along(Axis::Expert) * self.samples[position]
    }

    /// The distinct numbers of samples of ranks, ascending.
    pub fn distinct_samples(&self) -> Vec<usize> {
        let mut samples = self.samples.clone();
        samples.sort_unstable();
        samples.dedup();
        samples
    }

    /// Whether all ranks have equal numbers of samples.
    pub fn is_even(&self) -> bool {
        self.samples.iter().all(|samples| *samples == self.samples[0])
    }

    /// This mesh with `samples` samples on every rank.
    pub fn with_even_samples(&self, samples: usize) -> Self {
        Self { sizes: self.sizes, samples: vec![samples; self.samples.len()] }
    }

    /// Whether all axes have the sizes of `other`, whatever the samples.
    pub fn has_sizes_of(&self, other: &Self) -> bool {
        self.sizes == other.sizes
    }

    /// The number of parts that samples are sharded into.
    pub fn batch_parts(&self) -> usize {
        Axis::BATCH.iter().map(|&axis| self.size(axis)).product()
    }

    /// The index of a rank's part of a dimension that `axes` shard together. The later axis of
    /// [`Axis::WITHIN_STAGE`] has the larger parts.
    pub fn part_along(&self, axes: &[Axis], coordinates: Coordinates) -> usize {
        let largest_parts_first = Axis::WITHIN_STAGE.iter().rev().filter(|axis| axes.contains(axis));
        largest_parts_first.fold(0, |part, &axis| part * self.size(axis) + coordinates.along(axis))
    }

    fn sample_position(&self, coordinates: Coordinates) -> usize {
        coordinates.along(Axis::Data) * self.size(Axis::Shard) + coordinates.along(Axis::Shard)
    }
}

/// The ranks of a run: a mesh for each pipeline stage, and the rank order.
///
/// If all stages have equal sizes, the pipeline is an axis of the rank order like the others.
/// Otherwise each stage has consecutive ranks. Stages lie along the ranks in order, unless
/// [`Mesh::with_stage_places`] says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// The mesh of every stage; a single one if all are equal.
    stages: Vec<StageMesh>,
    /// The number of stages.
    pipeline: usize,
    /// The position of each stage along the ranks, and the stage at each position; `None` if stages
    /// lie in order.
    places: Option<[Vec<usize>; 2]>,
    /// The first rank at each position, then the world size; `None` if all stages have equal sizes.
    first_ranks: Option<Vec<usize>>,
    /// The rank order: every axis once, the one that varies fastest first.
    order: [Axis; 6],
}

impl Mesh {
    /// A mesh of equal stages with one sample of a micro-batch on every rank. `order` is the rank
    /// order, the fastest axis first; axes that it leaves out follow in the usual order. Returns
    /// `None` if an axis is named twice or a size is 0.
    pub fn new(size_of: impl Fn(Axis) -> usize, order: &[Axis]) -> Option<Self> {
        Self::uniform(StageMesh::new(&size_of, &[1])?, size_of(Axis::Pipeline), order)
    }

    /// A mesh of `pipeline` equal stages. Returns `None` as [`Mesh::new`] does.
    pub fn uniform(stage: StageMesh, pipeline: usize, order: &[Axis]) -> Option<Self> {
        (pipeline > 0).then_some(Self { stages: vec![stage], pipeline, places: None, first_ranks: None, order: complete(order)? })
    }

    /// A mesh of stages with meshes of their own. Returns `None` as [`Mesh::new`] does.
    pub fn of_stages(stages: Vec<StageMesh>, order: &[Axis]) -> Option<Self> {
        let first = stages.first()?;
        if stages.iter().all(|stage| stage == first) {
            return Self::uniform(first.clone(), stages.len(), order);
        }
        let have_equal_sizes = stages.iter().all(|stage| stage.has_sizes_of(first));
        let first_ranks = (!have_equal_sizes).then(|| first_ranks_of(stages.iter()));
        Some(Self { pipeline: stages.len(), stages, places: None, first_ranks, order: complete(order)? })
    }

    /// This mesh with stage n at position `places[n]` along the ranks. Returns `None` if `places`
    /// is not a permutation of the stages.
    pub fn with_stage_places(mut self, places: &[usize]) -> Option<Self> {
        let mut stage_at = vec![None; self.pipeline];
        for (stage, &place) in places.iter().enumerate() {
            stage_at.get_mut(place).filter(|stage| stage.is_none())?.replace(stage);
        }
        let stage_at = stage_at.into_iter().collect::<Option<Vec<usize>>>()?;
        if places.is_sorted() {
            return Some(self);
        }
        self.first_ranks = self.first_ranks.is_some().then(|| first_ranks_of(stage_at.iter().map(|&stage| self.stage(stage))));
        self.places = Some([places.to_vec(), stage_at]);
        Some(self)
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        match &self.first_ranks {
            Some(first_ranks) => first_ranks[self.pipeline],
            None => self.stages[0].ranks() * self.pipeline,
        }
    }

    /// The difference between the numbers of two consecutive ranks along an axis. `None` if stages
    /// have different sizes, since the stride then differs from stage to stage.
    pub fn stride(&self, axis: Axis) -> Option<usize> {
        let before = self.order.iter().take_while(|&&other| other != axis);
        self.first_ranks.is_none().then(|| before.map(|&other| self.length(0, other)).product())
    }

    /// The number of pipeline stages.
    pub fn stage_count(&self) -> usize {
        self.pipeline
    }

    /// The mesh of a stage.
    pub fn stage(&self, stage: usize) -> &StageMesh {
        self.stages.get(stage).unwrap_or(&self.stages[0])
    }

    /// The meshes of all stages; a single one if all are equal.
    pub fn distinct_stages(&self) -> &[StageMesh] {
        &self.stages
    }

    /// The mesh of the stage at some coordinates.
    pub fn stage_at(&self, coordinates: Coordinates) -> &StageMesh {
        self.stage(coordinates.along(Axis::Pipeline))
    }

    /// The rank at some coordinates.
    pub fn rank(&self, coordinates: Coordinates) -> Rank {
        let stage = coordinates.along(Axis::Pipeline);
        let place = self.places.as_ref().map_or(stage, |[places, _]| places[stage]);
        let mut stride = 1;
        let mut rank = self.first_ranks.as_ref().map_or(0, |first_ranks| first_ranks[place]);
        for axis in self.order {
            if axis == Axis::Pipeline && self.first_ranks.is_some() {
                continue;
            }
            rank += if axis == Axis::Pipeline { place } else { coordinates.along(axis) } * stride;
            stride *= self.length(stage, axis);
        }
        Rank(rank)
    }

    /// The coordinates of a rank.
    pub fn coordinates(&self, rank: Rank) -> Coordinates {
        let mut coordinates = Coordinates([0; 6]);
        let mut rest = rank.0;
        let mut stage = 0;
        let stage_at = |place: usize| self.places.as_ref().map_or(place, |[_, stages]| stages[place]);
        if let Some(first_ranks) = &self.first_ranks {
            let place = first_ranks.partition_point(|&first| first <= rest).saturating_sub(1);
            rest -= first_ranks[place];
            stage = stage_at(place);
            coordinates = coordinates.with(Axis::Pipeline, stage);
        }
        for axis in self.order {
            if axis == Axis::Pipeline && self.first_ranks.is_some() {
                continue;
            }
            let position = rest % self.length(stage, axis);
            coordinates = coordinates.with(axis, if axis == Axis::Pipeline { stage_at(position) } else { position });
            rest /= self.length(stage, axis);
        }
        coordinates
    }

    /// The ranks of a pipeline stage, ascending.
    pub fn stage_ranks(&self, stage: usize) -> Vec<Rank> {
        match &self.first_ranks {
            Some(first_ranks) => {
                let place = self.places.as_ref().map_or(stage, |[places, _]| places[stage]);
                (first_ranks[place]..first_ranks[place + 1]).map(Rank).collect()
            }
            None => (0..self.world_size()).map(Rank).filter(|&rank| self.stage_of(rank) == stage).collect(),
        }
    }

    /// The pipeline stage of a rank.
    pub fn stage_of(&self, rank: Rank) -> usize {
        self.coordinates(rank).along(Axis::Pipeline)
    }

    fn length(&self, stage: usize, axis: Axis) -> usize {
        if axis == Axis::Pipeline { self.pipeline } else { self.stage(stage).size(axis) }
    }
}

/// The first rank of each of some consecutive stages, then the number of all ranks.
fn first_ranks_of<'a>(stages: impl Iterator<Item = &'a StageMesh>) -> Vec<usize> {
    let ends = stages.scan(0, |end, stage| {
        *end += stage.ranks();
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// A rank order completed by the axes that it leaves out, in the usual order. `None` if an axis is
/// named twice.
fn complete(order: &[Axis]) -> Option<[Axis; 6]> {
    let mut complete: Vec<Axis> = Vec::with_capacity(Axis::ALL.len());
    for &axis in order.iter().chain(Axis::ALL.iter().filter(|axis| !order.contains(axis))) {
        if complete.contains(&axis) {
            return None;
        }
        complete.push(axis);
    }
    complete.try_into().ok()
}
