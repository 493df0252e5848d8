//! The device mesh: named axes over the ranks of a run.
//!
//! A rank is a coordinate on every axis. The order of the axes says which varies fastest over consecutive ranks, and so which
//! ranks are neighbours on the machine.

mod group;
#[cfg(test)]
mod tests;

pub use group::Group;

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

/// The mesh of one pipeline stage: the sizes of its axes, and how its ranks share out samples.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct StageMesh {
    /// In the order of [`Axis::WITHIN_STAGE`].
    sizes: [usize; 5],
    /// Samples of a micro-batch on one rank, for each position along `shard` and `data` (the latter slower).
    samples: Vec<usize>,
}

impl StageMesh {
    /// A mesh whose ranks have `samples` samples of a micro-batch each, or, where there are several numbers, those of their position along
    /// `shard` and `data` together. Returns `None` where a size or a number is 0, or there is not one number for each position.
    pub fn new(size_of: impl Fn(Axis) -> usize, samples: &[usize]) -> Option<Self> {
        let sizes = Axis::WITHIN_STAGE.map(size_of);
        let positions = sizes[Axis::Shard.index()].checked_mul(sizes[Axis::Data.index()])?;
        let samples = if let [all] = samples { vec![*all; positions] } else { samples.to_vec() };
        let is_valid = samples.len() == positions && !sizes.contains(&0) && !samples.contains(&0);
        is_valid.then_some(Self { sizes, samples })
    }

    /// How many ranks there are along an axis; 1 along the pipeline.
    pub fn size(&self, axis: Axis) -> usize {
        self.sizes.get(axis.index()).copied().unwrap_or(1)
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.sizes.iter().product()
    }

    /// Samples of a micro-batch over all ranks.
    pub fn samples_at_once(&self) -> usize {
        self.samples.iter().sum::<usize>() * self.size(Axis::Expert)
    }

    /// Samples of a micro-batch on one rank, which need not be the same for all.
    pub fn samples(&self, coordinates: Coordinates) -> usize {
        self.samples[self.sample_position(coordinates)]
    }

    /// Samples of a micro-batch that come before a rank's own.
    pub fn samples_before(&self, coordinates: Coordinates) -> usize {
        let position = self.sample_position(coordinates);
        let earlier: usize = self.samples[..position].iter().sum();
        earlier * self.size(Axis::Expert) + coordinates.along(Axis::Expert) * self.samples[position]
    }

    /// The numbers of samples that ranks have, each once, ascending.
    pub fn distinct_samples(&self) -> Vec<usize> {
        let mut samples = self.samples.clone();
        samples.sort_unstable();
        samples.dedup();
        samples
    }

    /// Whether all ranks have as many samples.
    pub fn is_even(&self) -> bool {
        self.samples.iter().all(|samples| *samples == self.samples[0])
    }

    /// The same with `samples` samples on every rank.
    pub fn with_even_samples(&self, samples: usize) -> Self {
        Self { sizes: self.sizes, samples: vec![samples; self.samples.len()] }
    }

    /// Whether the axes are as long as another's, however samples are shared out.
    pub fn has_sizes_of(&self, other: &Self) -> bool {
        self.sizes == other.sizes
    }

    /// How many parts the samples are cut into.
    pub fn batch_parts(&self) -> usize {
        Axis::BATCH.iter().map(|&axis| self.size(axis)).product()
    }

    /// Which part a position has of what the axes `axes` of a stage cut together, each once: the later of [`Axis::WITHIN_STAGE`] cuts first.
    pub fn part_along(&self, axes: &[Axis], coordinates: Coordinates) -> usize {
        let cutting = Axis::WITHIN_STAGE.iter().rev().filter(|axis| axes.contains(axis));
        cutting.fold(0, |part, &axis| part * self.size(axis) + coordinates.along(axis))
    }

    fn sample_position(&self, coordinates: Coordinates) -> usize {
        coordinates.along(Axis::Data) * self.size(Axis::Shard) + coordinates.along(Axis::Shard)
    }
}

/// The ranks of a run: a mesh for each pipeline stage, and the order in which the axes vary over the ranks.
///
/// Where all stages are as large, the pipeline is an axis like the others. Where they are not, the ranks of a stage follow those of the stage
/// before it. The stages lie along the ranks in their order, unless [`Mesh::with_stage_places`] says otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mesh {
    /// Of every stage; one for all of them where they are alike.
    stages: Vec<StageMesh>,
    /// How many stages there are.
    pipeline: usize,
    /// Of each stage its place along the ranks, and of each place its stage; none where the stages lie in order.
    places: Option<[Vec<usize>; 2]>,
    /// Where stages are not as large as each other: the first rank at each place, and then how many there are.
    firsts: Option<Vec<usize>>,
    /// Fastest first; every axis once.
    order: [Axis; 6],
}

impl Mesh {
    /// A mesh of stages that are alike, with one sample of a micro-batch on every rank. Its axes vary in `order`, the first fastest; axes that
    /// it leaves out follow in the usual order. Returns `None` where an axis is named twice or a size is 0.
    pub fn new(size_of: impl Fn(Axis) -> usize, order: &[Axis]) -> Option<Self> {
        Self::alike(StageMesh::new(&size_of, &[1])?, size_of(Axis::Pipeline), order)
    }

    /// A mesh of `pipeline` stages that are alike. Returns `None` as [`Mesh::new`] does.
    pub fn alike(stage: StageMesh, pipeline: usize, order: &[Axis]) -> Option<Self> {
        (pipeline > 0).then_some(Self { stages: vec![stage], pipeline, places: None, firsts: None, order: complete(order)? })
    }

    /// A mesh of stages that have meshes of their own. Returns `None` as [`Mesh::new`] does.
    pub fn of_stages(stages: Vec<StageMesh>, order: &[Axis]) -> Option<Self> {
        let first = stages.first()?;
        if stages.iter().all(|stage| stage == first) {
            return Self::alike(first.clone(), stages.len(), order);
        }
        let is_even = stages.iter().all(|stage| stage.has_sizes_of(first));
        let firsts = (!is_even).then(|| first_ranks(stages.iter()));
        Some(Self { pipeline: stages.len(), stages, places: None, firsts, order: complete(order)? })
    }

    /// The same with each stage at a place of its own along the ranks: that of stage n is `places[n]`. Returns `None` where these are not
    /// the places of all stages, each once.
    pub fn with_stage_places(mut self, places: &[usize]) -> Option<Self> {
        let mut stage_at = vec![None; self.pipeline];
        for (stage, &place) in places.iter().enumerate() {
            stage_at.get_mut(place).filter(|stage| stage.is_none())?.replace(stage);
        }
        let stage_at = stage_at.into_iter().collect::<Option<Vec<usize>>>()?;
        if places.is_sorted() {
            return Some(self);
        }
        self.firsts = self.firsts.is_some().then(|| first_ranks(stage_at.iter().map(|&stage| self.stage(stage))));
        self.places = Some([places.to_vec(), stage_at]);
        Some(self)
    }

    /// How many ranks there are.
    pub fn world_size(&self) -> usize {
        match &self.firsts {
            Some(firsts) => firsts[self.pipeline],
            None => self.stages[0].ranks() * self.pipeline,
        }
    }

    /// How far apart ranks are that follow each other along an axis, if that is as far everywhere: not where stages differ in size.
    pub fn stride(&self, axis: Axis) -> Option<usize> {
        let before = self.order.iter().take_while(|&&other| other != axis);
        self.firsts.is_none().then(|| before.map(|&other| self.length(0, other)).product())
    }

    /// How many pipeline stages there are.
    pub fn stage_count(&self) -> usize {
        self.pipeline
    }

    /// The mesh of a stage.
    pub fn stage(&self, stage: usize) -> &StageMesh {
        self.stages.get(stage).unwrap_or(&self.stages[0])
    }

    /// The meshes of stages, each at least once: of stages that are alike only one.
    pub fn distinct_stages(&self) -> &[StageMesh] {
        &self.stages
    }

    /// The mesh of the stage of a position.
    pub fn stage_at(&self, coordinates: Coordinates) -> &StageMesh {
        self.stage(coordinates.along(Axis::Pipeline))
    }

    /// The rank at a position.
    pub fn rank(&self, coordinates: Coordinates) -> Rank {
        let stage = coordinates.along(Axis::Pipeline);
        let place = self.places.as_ref().map_or(stage, |[places, _]| places[stage]);
        let mut stride = 1;
        let mut rank = self.firsts.as_ref().map_or(0, |firsts| firsts[place]);
        for axis in self.order {
            if axis == Axis::Pipeline && self.firsts.is_some() {
                continue;
            }
            rank += if axis == Axis::Pipeline { place } else { coordinates.along(axis) } * stride;
            stride *= self.length(stage, axis);
        }
        Rank(rank)
    }

    /// The position of a rank.
    pub fn coordinates(&self, rank: Rank) -> Coordinates {
        let mut coordinates = Coordinates([0; 6]);
        let mut rest = rank.0;
        let mut stage = 0;
        let stage_at = |place: usize| self.places.as_ref().map_or(place, |[_, stages]| stages[place]);
        if let Some(firsts) = &self.firsts {
            let place = firsts.partition_point(|&first| first <= rest).saturating_sub(1);
            rest -= firsts[place];
            stage = stage_at(place);
            coordinates = coordinates.with(Axis::Pipeline, stage);
        }
        for axis in self.order {
            if axis == Axis::Pipeline && self.firsts.is_some() {
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
        match &self.firsts {
            Some(firsts) => {
                let place = self.places.as_ref().map_or(stage, |[places, _]| places[stage]);
                (firsts[place]..firsts[place + 1]).map(Rank).collect()
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

/// The first rank of each of some stages that follow each other, and then how many ranks there are.
fn first_ranks<'a>(stages: impl Iterator<Item = &'a StageMesh>) -> Vec<usize> {
    let ends = stages.scan(0, |end, stage| {
        *end += stage.ranks();
        Some(*end)
    });
    std::iter::once(0).chain(ends).collect()
}

/// An order with the axes that it leaves out, in the usual order; `None` where one stands twice.
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
