//! Bounds of layouts, and of families of layouts.
//!
//! Most layouts are bounded by truncated models of their pipeline. Three kinds of layouts have
//! files of their own: those whose stages have their own meshes (`stage_meshes.rs`), those with
//! unequal shares of the samples (`unequal_shares.rs`), and those whose model or rank order
//! truncated models do not represent (`whole_program.rs`).

use super::bound::{Bound, Bounded, Excluded};
use super::context::Bounds;
use super::pipeline::{InFlight, OptimizerUpdate, PipelineCosts, PipelineCuts, Timetable};
use super::truncated::TruncatedModel;
use super::{stage_meshes, unequal_shares, whole_program};
use crate::space::{Family, inner_ranks, most_shards, optimizer_shards};
use foretell_program::{Layout, Plan};
use foretell_units::{Bytes, Seconds};
use std::sync::Arc;

/// The stages of a layout's blocks, and the kinds of devices of the stages.
struct Arrangement {
    cuts: Arc<PipelineCuts>,
    /// For each different replica of the pipeline, the index of each stage's kind among the kinds
    /// in use.
    pipelines: Vec<Vec<usize>>,
}

/// The least time left in a layout's step.
pub(crate) struct LayoutTimeLeft {
    pub(crate) timetable: Arc<Timetable>,
    /// By stage and pass, picoseconds from the pass's last kernel to the end of the step.
    pub(crate) after_passes: Vec<Vec<f64>>,
    /// Time of a step outside its instructions.
    pub(crate) overhead: Seconds,
}

impl Bounds<'_> {
    /// Returns one bound for several layouts of a family. Sharding and communication among
    /// data-parallel ranks do not count, since the layouts differ in them.
    ///
    /// A bound on time that reaches `enough` is not tightened further.
    pub(crate) fn layouts(&self, family: &Family, variants: &[Layout], enough: Option<Seconds>) -> Bounded {
        let Family { layout, micro_batches } = family;
        let micro_batches = *micro_batches;
        // Chains of passes are no bound on woven passes, which a caller of the library may request.
        if self.request.base.overlap.passes {
            return Ok(Bound::TRIVIAL);
        }
        if let Some(stages) = &layout.stages {
            return stage_meshes::bound(self, variants, stages, micro_batches);
        }
        if let Some(shares) = &layout.shares {
            return unequal_shares::bound(self, layout, shares, micro_batches);
        }
        if !self.truncated.represent(layout) {
            return whole_program::bound_by_passes(self, layout, micro_batches, enough);
        }
        let in_flight = self.pipelines.in_flight(layout, micro_batches);
        let arrangements = self.arrangements(variants);
        let shards = variants.iter().map(optimizer_shards).max().unwrap_or(1);
        let least = |costs: &PipelineCosts<'_>, samples: usize| {
            let memory = variants.iter().map(|variant| least_memory(costs, &in_flight, variant, samples as f64));
            memory.fold(f64::INFINITY, f64::min)
        };
        // Activations grow with the samples of a micro-batch. So the truncated model of one sample,
        // which all families of a mesh share, already shows most layouts that are too large.
        let one_sample = Layout { data: 1, micro_batch: 1, ..layout.clone() };
        if let Ok(models) = self.truncated.on_each_kind(&one_sample, micro_batches)
            && self.space.model.experts.is_none()
        {
            let samples = layout.micro_batch;
            let bytes = self.least_over(&arrangements, &models, layout, shards, |costs| least(costs, samples));
            let memory = self.needed_memory(bytes);
            if memory > self.memory_limit {
                return Ok(Bound::too_large(memory));
            }
        }
        let one_replica = Layout { data: 1, ..layout.clone() };
        let models = self.truncated.on_each_kind(&one_replica, micro_batches).map_err(Excluded::Indivisible)?;
        let bytes = self.least_over(&arrangements, &models, layout, shards, |costs| least(costs, 1));
        let time = self.least_over(&arrangements, &models, layout, shards, |costs| {
            costs.least_time(micro_batches, OptimizerUpdate::LeftOut)
        });
        Ok(self.bound(micro_batches, time, bytes))
    }

    /// Bounds one layout. The bound of its family holds as well, and may be greater.
    pub(crate) fn layout(&self, layout: &Layout, micro_batches: usize) -> Bounded {
        if self.request.base.overlap.passes {
            return Ok(Bound::TRIVIAL);
        }
        if let Some(stages) = &layout.stages {
            return stage_meshes::bound(self, std::slice::from_ref(layout), stages, micro_batches);
        }
        if layout.shares.is_some() {
            return Ok(Bound::TRIVIAL);
        }
        if !self.truncated.represent(layout) {
            return whole_program::bound_by_chain(self, layout, micro_batches);
        }
        let memory = self.replica_memory(layout, micro_batches)?;
        if memory > self.memory_limit {
            return Ok(Bound::too_large(memory));
        }
        if !self.truncated.represent_all_ranks(layout) {
            return Ok(Bound::TRIVIAL);
        }
        let models = self.truncated.on_each_kind(layout, micro_batches).map_err(Excluded::Indivisible)?;
        let arrangements = self.arrangements(std::slice::from_ref(layout));
        let timetable = self.pipelines.timetable(layout, micro_batches);
        // This truncated model has all data-parallel ranks. If they gather parameters, it does not
        // show how many are gathered at once, since its first and last block are closer together
        // than in the layout.
        let bytes = if optimizer_shards(layout) > 1 {
            0.0
        } else {
            self.least_over(&arrangements, &models, layout, 1, |costs| costs.least_memory(timetable.in_flight(), 0, |_| 1, 1.0))
        };
        let extra = self.truncated.extra_message_times(layout, &models);
        let time = self.least_over(&arrangements, &models, layout, 1, |costs| costs.least_time_by_pass(&timetable, &extra));
        let bound = self.bound(micro_batches, time, bytes);
        Ok(Bound { memory: bound.memory.max(memory), ..bound })
    }

    /// Returns the least memory of a layout by the truncated model of one replica, or zero if there
    /// is none.
    ///
    /// # Errors
    /// [`Excluded::HostMemory`] if the hosts cannot hold what the layout keeps there.
    fn replica_memory(&self, layout: &Layout, micro_batches: usize) -> Result<Bytes, Excluded> {
        let one_replica = Layout { data: 1, zero: 0, shard_group: None, placement: None, ..layout.clone() };
        let Ok(models) = self.truncated.on_each_kind(&one_replica, micro_batches) else { return Ok(Bytes::ZERO) };
        let arrangements = self.arrangements(std::slice::from_ref(layout));
        let in_flight = self.pipelines.in_flight(layout, micro_batches);
        let shards = optimizer_shards(layout);
        let bytes = self.least_over(&arrangements, &models, layout, shards, |costs| least_memory(costs, &in_flight, layout, 1.0));
        let memory = self.needed_memory(bytes);
        if memory > self.memory_limit {
            return Ok(memory);
        }
        let on_host = self.least_over(&arrangements, &models, layout, shards, |costs| costs.least_host_memory());
        if self.hosts.exceeds_host_memory(on_host, layout.data * inner_ranks(layout) * layout.pipeline) {
            return Err(Excluded::HostMemory);
        }
        Ok(memory)
    }

    /// Returns `true` if none of `layouts` fits even with the optimizer state on the hosts, given
    /// that each needs at least `needed` without.
    pub(crate) fn offloaded_state_does_not_fit(&self, layouts: &[Layout], needed: Bytes) -> bool {
        self.hosts.offloaded_state_does_not_fit(layouts, needed, self.memory_limit)
    }

    /// Returns the least time left after each pass of a layout, or `None` if no truncated model of
    /// one kind of device bounds all its ranks.
    pub(crate) fn time_left(&self, layout: &Layout) -> Option<LayoutTimeLeft> {
        let has_one_mesh = layout.stages.is_none() && layout.shares.is_none();
        let is_bounded = has_one_mesh && !self.kinds.are_mixed() && self.truncated.represent(layout);
        if !is_bounded || !self.truncated.represent_all_ranks(layout) {
            return None;
        }
        let micro_batches = (Plan { layout: layout.clone(), ..self.request.base.clone() }).micro_batches().ok()?;
        let models = self.truncated.on_each_kind(layout, micro_batches).ok()?;
        let (cuts, timetable) = (self.cuts(layout), self.pipelines.timetable(layout, micro_batches));
        let kind_of_stage = vec![0; layout.pipeline];
        let (schedule, chunks) = (layout.schedule, layout.virtual_stages);
        let costs = PipelineCosts::new(&models, &kind_of_stage, self.kinds.weights(), &cuts, schedule, chunks)
            .offloading(self.hosts.offload(layout, &self.hosts.copy_time_per_byte, 1));
        let after_passes = costs.time_left(&timetable, &self.truncated.extra_message_times(layout, &models))?;
        Some(LayoutTimeLeft { timetable, after_passes, overhead: self.overhead(micro_batches) })
    }

    /// Returns the different arrangements of some layouts of a family.
    fn arrangements(&self, variants: &[Layout]) -> Vec<Arrangement> {
        let mut arrangements: Vec<Arrangement> = Vec::new();
        let mut seen: Vec<&Layout> = Vec::new();
        for variant in variants {
            let has_same_rank_distances = |other: &Layout| !self.kinds.are_mixed() || have_same_devices(other, variant);
            if !seen.iter().any(|other| other.cuts == variant.cuts && has_same_rank_distances(other)) {
                seen.push(variant);
                let layout = Layout { zero: 0, shard_group: None, ..variant.clone() };
                let mesh = Plan { layout, ..self.request.base.clone() }.mesh();
                let pipelines = mesh.map_or_else(|_| vec![vec![0; variant.pipeline]], |mesh| self.kinds.pipelines(&mesh));
                arrangements.push(Arrangement { cuts: self.cuts(variant), pipelines });
            }
        }
        arrangements
    }

    /// Returns the minimum over arrangements of the maximum of `value` over the replicas of the
    /// pipeline. The optimizer state in `models` is sharded over `shards` ranks.
    fn least_over(
        &self,
        arrangements: &[Arrangement],
        models: &[Arc<TruncatedModel>],
        layout: &Layout,
        shards: usize,
        value: impl Fn(&PipelineCosts<'_>) -> f64,
    ) -> f64 {
        let of_arrangement = |arrangement: &Arrangement| {
            let of_replica = |kind_of_stage: &Vec<usize>| {
                let (weights, cuts) = (self.kinds.weights(), &arrangement.cuts);
                let costs = PipelineCosts::new(models, kind_of_stage, weights, cuts, layout.schedule, layout.virtual_stages);
                value(&costs.offloading(self.hosts.offload(layout, &self.hosts.copy_time_per_byte, shards)))
            };
            arrangement.pipelines.iter().map(of_replica).fold(0.0, f64::max)
        };
        arrangements.iter().map(of_arrangement).fold(f64::INFINITY, f64::min)
    }
}

/// Returns `true` if the ranks of two layouts of a family are on the same devices.
pub(super) fn have_same_devices(one: &Layout, other: &Layout) -> bool {
    one.placement == other.placement && one.stage_places == other.stage_places
}

/// Returns the least weighted bytes of a layout, from costs without ZeRO whose micro-batches have a
/// share `1 / samples` of the layout's samples.
fn least_memory(costs: &PipelineCosts<'_>, in_flight: &InFlight, layout: &Layout, samples: f64) -> f64 {
    let ranks = most_shards(layout);
    costs.least_memory(in_flight, layout.zero, |_| ranks, samples)
}
