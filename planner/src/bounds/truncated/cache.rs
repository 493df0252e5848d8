//! The truncated models of a request's layouts, each compiled once.

use super::messages::stages_sharing_nodes;
use super::{LeftOut, TRUNCATED_STAGES, Timing, TruncatedCompilers, TruncatedModel};
use crate::bounds::memo::Memo;
use crate::space::{DeviceKinds, ModelFacts, Request, inner_ranks, ranks_of_stage, world_size};
use foretell_models::Graph;
use foretell_program::{Layout, Offload, Plan, Recompute};
use foretell_simulator::MemoryRates;
use foretell_units::diagnostic::Mistake;
use std::sync::Arc;

/// Everything that a truncated model depends on. Layouts with equal keys share one model.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ModelKey {
    /// The truncated model's own layout.
    layout: Layout,
    micro_batches: usize,
    /// Kind of its devices, if the topology has several kinds.
    kind: Option<usize>,
    left_out: LeftOut,
}

/// A truncated model, or why it cannot be compiled or timed.
type Truncated = Result<Arc<TruncatedModel>, Mistake>;

/// The truncated models of a request's layouts.
pub(in crate::bounds) struct TruncatedModels<'a> {
    request: &'a Request<'a>,
    kinds: Arc<DeviceKinds>,
    memory_rates: MemoryRates,
    /// Whether two blocks read the same parameter.
    shares_parameters: bool,
    /// `None` if no blocks of the model repeat.
    compilers: Option<TruncatedCompilers<'a>>,
    models: Memo<ModelKey, Truncated>,
}

impl<'a> TruncatedModels<'a> {
    pub(in crate::bounds) fn new(
        request: &'a Request<'a>,
        kinds: Arc<DeviceKinds>,
        memory_rates: MemoryRates,
        (model, graph): (&ModelFacts, &Graph),
    ) -> Self {
        let compilers = model.pattern.as_ref().map(|pattern| TruncatedCompilers::new(request, graph, pattern));
        Self { request, kinds, memory_rates, shares_parameters: model.shares_parameters, compilers, models: Memo::new() }
    }

    /// Returns `true` if truncated models represent one replica of a layout. Layouts with unequal
    /// shares, with their own meshes of stages or with shardings of single operators are not
    /// represented. A truncated pipeline has four stages. With a stated rank order (`placement`),
    /// ranks of a group may be further apart the more stages there are, so such layouts need at
    /// least four stages. Nor is a single stage with several chunks represented: costs of chunks
    /// are added, so a shared table would count twice.
    pub(in crate::bounds) fn represent(&self, layout: &Layout) -> bool {
        let are_known = self.collectives_are_known();
        let is_even = are_known && layout.shares.is_none() && layout.stages.is_none() && layout.operators.is_empty();
        let has_same_rank_distances = is_even && (layout.placement.is_none() || layout.pipeline >= TRUNCATED_STAGES);
        let has_one_chunk = layout.virtual_stages == 1 || layout.pipeline > 1;
        self.compilers.is_some()
            && has_same_rank_distances
            && has_one_chunk
            && self.fill_nodes_evenly(layout, inner_ranks(layout))
    }

    /// Returns `true` if all devices are of one kind, or if the cost model knows how long
    /// collectives take on each kind.
    fn collectives_are_known(&self) -> bool {
        !self.kinds.are_mixed() || self.kinds.kinds.iter().all(|&kind| self.request.costs.knows_collectives(kind))
    }

    /// Returns `true` if `ranks` consecutive ranks are spread over nodes in the same way in every
    /// stage.
    fn fill_nodes_evenly(&self, layout: &Layout, ranks: usize) -> bool {
        let mut sizes = self.request.topology.node_groups().iter().map(|group| group.devices.max(1));
        layout.pipeline == 1 || sizes.all(|size| ranks.is_multiple_of(size) || size.is_multiple_of(ranks))
    }

    /// Returns `true` if truncated models represent all ranks of a layout: its data-parallel groups
    /// are spread over nodes in the same way in all stages.
    pub(in crate::bounds) fn represent_all_ranks(&self, layout: &Layout) -> bool {
        let ranks = ranks_of_stage(layout);
        // With `stage_places`, the first and the last stage may be neighbours and share a table,
        // unlike in a truncated model. That is harmless if no two stages share a node.
        let fill_nodes = || self.request.topology.node_groups().iter().all(|group| ranks.is_multiple_of(group.devices.max(1)));
        // With more ranks than devices, ranks wrap around to the first device. A group that spans
        // two nodes in the truncated model may then be in one.
        let has_own_devices = world_size(layout) <= self.request.topology.device_count();
        has_own_devices && self.fill_nodes_evenly(layout, ranks) && (layout.stage_places.is_none() || fill_nodes())
    }

    /// Returns, for each stage, a lower bound in picoseconds on the extra time of a message to the
    /// next stage over that in the truncated models. Empty means none for any stage.
    pub(in crate::bounds) fn extra_message_times(&self, layout: &Layout, models: &[Arc<TruncatedModel>]) -> Vec<f64> {
        let extra = models.iter().map(|model| model.extra_between_nodes).reduce(f64::min).unwrap_or(0.0);
        let plan = Plan { layout: layout.clone(), ..self.request.base.clone() };
        let Some(mesh) = plan.mesh().ok().filter(|_| extra > 0.0) else { return Vec::new() };
        let share = stages_sharing_nodes(&mesh, self.request.topology);
        share.into_iter().map(|share| if share { 0.0 } else { extra }).collect()
    }

    /// Returns a layout's truncated model on each kind of device, in the order of
    /// [`DeviceKinds::kinds`]; a single model if all devices are of one kind.
    ///
    /// # Errors
    /// The message, if a truncated model cannot be compiled or timed: for instance, the layout does
    /// not divide the model.
    pub(in crate::bounds) fn on_each_kind(
        &self,
        layout: &Layout,
        micro_batches: usize,
    ) -> Result<Vec<Arc<TruncatedModel>>, Mistake> {
        if !self.kinds.are_mixed() {
            return Ok(vec![self.on_kind(layout, micro_batches, None)?]);
        }
        self.kinds.kinds.iter().map(|&kind| self.on_kind(layout, micro_batches, Some(kind))).collect()
    }

    /// Returns a layout's truncated model on devices of one kind, or on the topology's own devices
    /// (`None`).
    pub(in crate::bounds) fn on_kind(&self, layout: &Layout, micro_batches: usize, kind: Option<usize>) -> Truncated {
        self.get(layout, micro_batches, kind, false)
    }

    /// Returns the truncated model of [`Self::on_kind`] without messages between stages.
    pub(in crate::bounds) fn without_messages(&self, layout: &Layout, micro_batches: usize, kind: Option<usize>) -> Truncated {
        self.get(layout, micro_batches, kind, true)
    }

    fn get(&self, layout: &Layout, micro_batches: usize, kind: Option<usize>, leave_out_messages: bool) -> Truncated {
        // At most two micro-batches are compiled. A pass counts in every micro-batch with the
        // lesser of its two times.
        let micro_batches = micro_batches.min(2);
        if let Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) = layout.recompute {
            // A truncated model has too few blocks to recompute only part of them. So a model that
            // recomputes none is joined with one that recomputes all.
            let with = |recompute| self.get(&Layout { recompute, ..layout.clone() }, micro_batches, kind, leave_out_messages);
            return Ok(Arc::new(TruncatedModel::partly_recomputed(&*with(Recompute::None)?, with(Recompute::Full)?)));
        }
        let is_pipeline = layout.pipeline > 1;
        let truncated_layout = Layout {
            pipeline: if is_pipeline { TRUNCATED_STAGES } else { 1 },
            virtual_stages: 1,
            schedule: layout.schedule.of_one_chunk(),
            // Offloaded bytes are derived from the bytes that are saved without offloading.
            offload: Offload::None,
            cuts: None,
            stage_places: None,
            ..layout.clone()
        };
        // If a kind of device is given, it is not known on which nodes the stages are.
        let ends_may_be_nearer = is_pipeline && (kind.is_some() || self.ends_are_nearer(layout, &truncated_layout));
        let left_out = LeftOut { messages: leave_out_messages, sums_over_stages: ends_may_be_nearer };
        let plan = Plan { layout: truncated_layout, ..self.request.base.clone() };
        let key = ModelKey { layout: plan.layout.clone(), micro_batches, kind, left_out };
        self.models.get(key, || {
            let compilers = self.compilers.as_ref().expect("invariant: layouts of models without a pattern are not represented");
            let timing = Timing { request: self.request, rates: &self.memory_rates, micro_batches, kind, left_out };
            Ok(Arc::new(TruncatedModel::new(compilers, &plan, &timing)?))
        })
    }

    /// Returns `true` if the first and the last stage share a parameter table and a node, while in
    /// the truncated model they share no node.
    fn ends_are_nearer(&self, layout: &Layout, truncated: &Layout) -> bool {
        let topology = self.request.topology;
        let node = topology.node_groups().iter().map(|group| group.devices).max().expect("invariant: a topology has nodes");
        // The first and the last stage are at least this many ranks apart, whether or not
        // data-parallel ranks are between them. This holds only without `stage_places`, with which
        // the two may be neighbours.
        let between = (layout.pipeline - 1) * inner_ranks(layout);
        if !self.shares_parameters || layout.stage_places.is_none() && between >= node {
            return false;
        }
        let share = |layout: &Layout| {
            let mesh = Plan { layout: layout.clone(), ..self.request.base.clone() }.mesh().ok()?;
            stages_sharing_nodes(&mesh, topology).last().copied()
        };
        // With more ranks than devices, ranks wrap around to the first device, and which of them
        // share a node says nothing about the time of their collectives.
        let has_own_devices = world_size(truncated) <= topology.device_count();
        share(layout) == Some(true) && !(has_own_devices && share(truncated) == Some(true))
    }
}
