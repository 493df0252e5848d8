//! Stages with meshes of their own, where a cluster has runs of devices of different kinds: as many stages on each run as divide it, each
//! with a `tensor` and a `data` that fit that run's nodes; and the bounds of such layouts.
//!
//! A stage of such a layout does what one of a pipeline of its own mesh does, but for what it sends: messages between unequal meshes are
//! of other sizes, and not of every rank. So probes are of each run's own mesh and kind of device, without the time of messages.

use crate::bounds::{Bounds, Verdict};
use crate::pipeline::{Pieces, Update};
use crate::probe::Messages;
use crate::space::{Family, Space, divisors, greatest_common_divisor};
use foretell_program::{Layout, Plan, StageLayout};

/// Devices up to which stages have meshes of their own: on more there are meshes that fit all kinds nearly as well, and far too many that
/// do not.
const MOST_DEVICES: usize = 256;

/// How much faster the devices of one stage may be together than those of another: blocks even out no more than that.
const MOST_UNEVEN: f64 = 4.0;

/// Devices of one kind that follow each other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Run {
    /// How many.
    pub devices: usize,
    /// How many of them are in a node.
    pub node: usize,
    /// How fast each is at matrix products.
    pub speed: f64,
}

/// What a run's stages are like.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Section {
    stages: usize,
    data: usize,
    tensor: usize,
    speed: f64,
}

impl Space<'_> {
    /// Families of pipelines whose stages have meshes of their own on each run of devices.
    pub(crate) fn own_meshes(&self) -> Vec<Family> {
        if let Some(stages) = &self.fixed.stages {
            return self.with_meshes(stages);
        }
        let fixed = self.fixed;
        let is_open = fixed.data.is_none()
            && fixed.tensor.is_none()
            && [fixed.context, fixed.expert].iter().all(|size| size.is_none_or(|size| size == 1))
            && self.base.stages.is_none()
            && fixed.stage_places.is_none();
        let devices: usize = self.runs.iter().map(|run| run.devices).sum();
        if !is_open || self.runs.len() < 2 || devices > MOST_DEVICES {
            return Vec::new();
        }
        let mut all: Vec<Vec<Section>> = vec![Vec::new()];
        for run in &self.runs {
            let with = |sections: &Vec<Section>| {
                let possible = run.sections().into_iter().filter(|one| sections.iter().all(|other| one.is_near(other)));
                possible.map(|one| [sections.clone(), vec![one]].concat()).collect::<Vec<_>>()
            };
            all = all.iter().flat_map(with).collect();
        }
        let is_uneven = |sections: &&Vec<Section>| {
            sections.iter().any(|one| (one.data, one.tensor) != (sections[0].data, sections[0].tensor))
        };
        let meshes = |sections: &Vec<Section>| {
            let of_section =
                |one: &Section| vec![StageLayout { data: one.data, tensor: one.tensor, ..StageLayout::default() }; one.stages];
            sections.iter().flat_map(of_section).collect::<Vec<StageLayout>>()
        };
        all.iter().filter(is_uneven).map(meshes).flat_map(|stages| self.with_meshes(&stages)).collect()
    }

    /// The families whose stages have these meshes.
    fn with_meshes(&self, stages: &[StageLayout]) -> Vec<Family> {
        let pipeline = stages.len();
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else { return Vec::new() };
        let devices: usize = stages.iter().map(|stage| stage.data.saturating_mul(stage.tensor)).fold(0, usize::saturating_add);
        let is_fixed_otherwise = self.fixed.pipeline.is_some_and(|fixed| fixed != pipeline)
            || self.fixed.virtual_stages.is_some_and(|fixed| fixed != 1)
            || devices > self.devices
            || pipeline > self.blocks;
        // Parameters that the ends of the model share are summed rank by rank.
        let share_alike = !self.shares_parameters || (first.data, first.tensor) == (last.data, last.tensor);
        if is_fixed_otherwise || !share_alike {
            return Vec::new();
        }
        let multiple = |one: usize, other: usize| (one / greatest_common_divisor(one, other)).saturating_mul(other);
        let at_least = stages.iter().fold(1, |all, stage| multiple(all, stage.data));
        let mesh = Layout {
            stages: Some(stages.to_vec()),
            pipeline,
            zero: 0,
            shard_group: None,
            bucket: self.buckets[0],
            offload: self.fixed.offload.unwrap_or(self.base.offload),
            collective: self.fixed.collective.unwrap_or(self.base.collective),
            ..self.base.clone()
        };
        // Each micro-batch is a multiple of what the stages can share out.
        if !self.global_batch.is_multiple_of(at_least) {
            return Vec::new();
        }
        let unit = at_least / first.data;
        let families = self.with_micro_batches(&mesh, self.global_batch / first.data).into_iter();
        families.filter(|family| family.layout.micro_batch.is_multiple_of(unit) && family.layout.virtual_stages == 1).collect()
    }
}

impl Run {
    /// The stages that all of its devices make up, with `tensor` within a node.
    fn sections(&self) -> Vec<Section> {
        let mut found = Vec::new();
        for stages in divisors(self.devices) {
            let ranks = self.devices / stages;
            for tensor in divisors(ranks).into_iter().filter(|&tensor| tensor <= self.node && self.node.is_multiple_of(tensor)) {
                found.push(Section { stages, data: ranks / tensor, tensor, speed: self.speed * ranks as f64 });
            }
        }
        found
    }
}

impl Section {
    fn is_near(&self, other: &Self) -> bool {
        let times = self.speed / other.speed;
        (1.0 / MOST_UNEVEN..=MOST_UNEVEN).contains(&times)
    }
}

impl Bounds<'_> {
    /// Of some layouts whose stages have the same meshes of their own, and that differ in their cuts and in ZeRO: without what ranks of
    /// `data` do together.
    pub(crate) fn of_own_meshes(&self, members: &[Layout], stages: &[StageLayout], micro_batches: usize) -> Verdict {
        let Some(layout) = members.first() else { return Verdict::Least(0.0) };
        if !self.is_stack || !self.devices.kinds.iter().all(|&kind| self.request.costs.knows_collectives(kind)) {
            return Verdict::Least(0.0);
        }
        let Ok(mesh) = (Plan { layout: layout.clone(), ..self.request.base.clone() }).mesh() else { return Verdict::Least(0.0) };
        let at_once = layout.samples_at_once();
        // By their mesh and kind of device: the stages' place among these, their probes, and what a byte counts.
        let mut different: Vec<(&StageLayout, Option<usize>)> = Vec::new();
        let mut of_stage = Vec::with_capacity(stages.len());
        for (stage, own) in stages.iter().enumerate() {
            let kind = mesh.stage_ranks(stage).first().and_then(|rank| self.devices.kind_of(rank.0));
            let place = different.iter().position(|other| *other == (own, kind)).unwrap_or_else(|| {
                different.push((own, kind));
                different.len() - 1
            });
            of_stage.push(place);
        }
        let mut probes = Vec::new();
        let (mut weights, mut paces) = (Vec::new(), Vec::new());
        for (own, kind) in different {
            let alone = Layout {
                stages: None,
                tensor: own.tensor,
                context: own.context,
                expert: own.expert,
                micro_batch: at_once / own.data / own.expert,
                zero: 0,
                shard_group: None,
                ..layout.clone()
            };
            match self.probe_with(&alone, micro_batches.min(2), kind, Messages::LeftOut) {
                Ok(probe) => probes.push(probe),
                Err(reason) => return Verdict::Indivisible(reason),
            }
            weights.push(self.devices.weight_of(kind));
            paces.push(self.offloading.pace_of(&self.devices, kind));
        }
        let in_flight = self.in_flight(layout, micro_batches);
        let most_shards = stages.iter().map(|stage| stage.data).max().unwrap_or(1);
        let (mut time, mut memory) = (f64::INFINITY, f64::INFINITY);
        for member in members {
            let cutting = self.cutting(member);
            let pieces = Pieces::new(&probes, &of_stage, &weights, &cutting, layout.schedule, 1);
            let pieces = pieces.offloading(self.offloading.of(layout, &paces, most_shards));
            time = time.min(pieces.least_time(micro_batches, Update::LeftOut));
            memory = memory.min(pieces.least_memory(&in_flight, member.zero, |stage| stages[stage].data, 1.0));
        }
        self.verdict(layout, micro_batches, time, memory)
    }
}
