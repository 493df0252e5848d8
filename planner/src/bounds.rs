//! Lower bounds on what a layout takes and needs, cheap enough to have one of every layout, and never above what the simulator and the compiler
//! answer.

use crate::answer::{PlannerError, no_layout};
use crate::arithmetic::Arithmetic;
use crate::devices::Devices;
use crate::fitting::Fit;
use crate::members::bucket_sizes;
use crate::memo::Memo;
use crate::offloading::Offloading;
use crate::pipeline::{Cutting, InFlight, Pieces, Timetable, UNEVEN, Update};
use crate::probe::{FEWEST_LAYERS, Messages, PROBE_STAGES, Probe, ProbeError, Stacks, Sums, share_nodes};
use crate::request::Request;
use crate::search::seconds;
use crate::setting::{room_in_buckets, runs, shares_parameters, speeds};
use crate::space::{Family, Space};
use foretell_models::GraphOptions;
use foretell_program::{Compiler, Layout, Offload, Plan, Recompute, Schedule, StageLayout, work_of_blocks};
use foretell_simulator::Quantile;
use foretell_units::{Bytes, Seconds};
use std::sync::Arc;

/// What is known of a layout before it is simulated.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Verdict {
    /// Its value is at least this.
    Least(f64),
    /// It does not divide the model.
    Indivisible(String),
    /// It needs at least this much, which is more than there is.
    OutOfMemory(Bytes),
    /// It has more on a host than that has memory.
    OutOfHostMemory,
}

/// Bounds are made with rounded sums: what is allowed for that.
pub(crate) const ROUNDING: f64 = 1.0 - 1e-9;

/// The share of our arena that other frameworks hold at least: their number formats and what they keep differ from ours.
const SHARE_OF_OTHERS: f64 = 0.7;

/// What a probe depends on: the layout with what it does not depend on left out.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct ProbeKey {
    layout: Layout,
    micro_batches: usize,
    /// Of devices, where there are several.
    kind: Option<usize>,
    messages: Messages,
    sums: Sums,
}

type Probed = Result<Arc<Probe>, String>;

/// How a layout's blocks are cut, and for different pipelines of it the kinds of devices of their stages.
struct Way {
    cutting: Arc<Cutting>,
    pipelines: Vec<Vec<usize>>,
}

/// The bounds of one request's layouts.
pub(crate) struct Bounds<'a> {
    pub(crate) request: &'a Request<'a>,
    pub(crate) space: Space<'a>,
    /// Of the device that has the least; what others hold counts for as much less as they have more ([`Devices::weight`]).
    pub(crate) memory_limit: Bytes,
    pub(crate) compiler: Compiler<'a>,
    stacks: Stacks<'a>,
    /// Numbers that the model has as parameters.
    pub(crate) parameters: usize,
    /// The model is a stack of enough equal blocks.
    pub(crate) is_stack: bool,
    pub(crate) devices: Devices,
    pub(crate) offloading: Offloading,
    pub(crate) arithmetic: Arithmetic,
    /// What the fastest device adds to a step, and to each micro-batch.
    pub(crate) overheads: (Seconds, Seconds),
    /// By the number of ranks.
    weights: Memo<usize, f64>,
    probes: Memo<ProbeKey, Probed>,
    cuttings: Memo<(usize, usize), Arc<Cutting>>,
    timetables: Memo<(Schedule, usize, usize, usize), Arc<Timetable>>,
    in_flight: Memo<(Schedule, usize, usize, usize), Arc<InFlight>>,
    /// Of layouts without ZeRO, and their micro-batches, whose stages are cut by time alone.
    pub(crate) fits: Memo<(Layout, usize), Option<Fit>>,
}

impl<'a> Bounds<'a> {
    pub(crate) fn new(request: &'a Request<'a>) -> Result<Self, PlannerError> {
        let graph = request.model.graph(request.name, &GraphOptions::ONE)?;
        let (topology, costs) = (request.topology, request.costs);
        let kinds = 0..topology.device_kinds().len();
        let least = |time: &dyn Fn(usize) -> Seconds| kinds.clone().map(time).reduce(Seconds::min).unwrap_or(Seconds::ZERO);
        let devices = Devices::new(topology, request.devices, request.memory_limit);
        let offloading = Offloading::new(request, &devices);
        let is_stack = request.model.repeated_layers().is_some_and(|layers| layers >= FEWEST_LAYERS);
        let has_attention = graph.operators.iter().any(|operator| operator.kind.is_attention());
        let gradients = room_in_buckets(&graph);
        let space = Space {
            base: &request.base.layout,
            fixed: &request.fixed,
            devices: request.devices,
            node: topology.node_groups().iter().map(|group| group.devices).min().unwrap_or(1),
            blocks: graph.blocks.len(),
            global_batch: request.base.global_batch,
            sequence: graph.tokens_per_sample.filter(|_| has_attention),
            experts: request.model.experts(),
            has_attention,
            is_recomputable: graph.blocks.iter().any(|block| block.recomputable),
            is_stack,
            buckets: bucket_sizes(request.base.layout.bucket, gradients, request.base.stack.is_own(), request.fixed.bucket),
            gradients,
            work: work_of_blocks(&graph),
            speeds: speeds(request),
            kinds: devices.places(request.devices),
            runs: runs(request, &devices, is_stack),
            shares_parameters: shares_parameters(&graph),
            memory_differs: devices.weights().iter().any(|&weight| weight < 1.0),
            offloads: offloading.open,
        };
        if space.global_batch == 0 {
            return Err(no_layout(request, "there are no samples".into(), "use a global batch of at least 1"));
        }
        let arithmetic = Arithmetic::new(request, &graph, &devices.kinds);
        Ok(Self {
            request,
            space,
            memory_limit: devices.least_memory(),
            compiler: Compiler::new(request.model, request.name),
            stacks: Stacks::new(request.model, request.name),
            parameters: graph.parameter_count(),
            is_stack,
            devices,
            offloading,
            arithmetic,
            overheads: (
                least(&|kind| costs.parameters(kind).step_overhead.at(Quantile::Median)),
                least(&|kind| costs.parameters(kind).micro_batch_overhead),
            ),
            weights: Memo::new(),
            probes: Memo::new(),
            cuttings: Memo::new(),
            timetables: Memo::new(),
            in_flight: Memo::new(),
            fits: Memo::new(),
        })
    }

    /// Of all members of a family: what their ranks of `data` do together is not counted.
    pub(crate) fn of_family(&self, family: &Family) -> Verdict {
        self.of_members(family, &self.members(family))
    }

    /// Of some layouts of a family, which need not be of the space.
    pub(crate) fn of_members(&self, family: &Family, members: &[Layout]) -> Verdict {
        let Family { layout, micro_batches } = family;
        if let Some(stages) = &layout.stages {
            return self.of_own_meshes(members, stages, *micro_batches);
        }
        if let Some(shares) = &layout.shares {
            return self.of_shares(layout, shares, *micro_batches);
        }
        if !self.has_probe(layout) {
            return self.of_kernels(layout, *micro_batches);
        }
        let in_flight = self.in_flight(layout, *micro_batches);
        let ways = self.ways(members);
        let shards = members.iter().map(shards).max().unwrap_or(1);
        let least = |pieces: &Pieces<'_>, samples: usize| {
            let memory = members.iter().map(|member| least_memory(pieces, &in_flight, member, samples as f64));
            memory.fold(f64::INFINITY, f64::min)
        };
        // What micro-batches of one sample hold says enough of most that are too large: activations grow with their samples.
        let single = Layout { data: 1, micro_batch: 1, ..layout.clone() };
        if let Ok(probes) = self.probes(&single, (*micro_batches).min(2))
            && self.space.experts.is_none()
        {
            let needed = self.needed(self.of_ways(&ways, &probes, layout, shards, |pieces| least(pieces, layout.micro_batch)));
            if needed > self.memory_limit {
                return Verdict::OutOfMemory(needed);
            }
        }
        let probes = match self.probes(&Layout { data: 1, ..layout.clone() }, (*micro_batches).min(2)) {
            Err(reason) => return Verdict::Indivisible(reason),
            Ok(probes) => probes,
        };
        let memory = self.of_ways(&ways, &probes, layout, shards, |pieces| least(pieces, 1));
        // An update may be shared out among all ranks of `data`.
        let time = self.of_ways(&ways, &probes, layout, shards, |pieces| pieces.least_time(*micro_batches, Update::LeftOut));
        self.verdict(layout, *micro_batches, time, memory)
    }

    /// Of one layout, without what its ranks of `data` do together: whether it can fit.
    pub(crate) fn may_fit(&self, layout: &Layout, micro_batches: usize) -> Result<(), Verdict> {
        if !self.has_probe(layout) {
            return Ok(());
        }
        let alone = Layout { data: 1, zero: 0, shard_group: None, placement: None, ..layout.clone() };
        let Ok(probes) = self.probes(&alone, micro_batches.min(2)) else { return Ok(()) };
        let (ways, in_flight) = (self.ways(std::slice::from_ref(layout)), self.in_flight(layout, micro_batches));
        let all = shards(layout);
        let needed =
            self.needed(self.of_ways(&ways, &probes, layout, all, |pieces| least_memory(pieces, &in_flight, layout, 1.0)));
        if needed > self.memory_limit {
            return Err(Verdict::OutOfMemory(needed));
        }
        let on_host = self.of_ways(&ways, &probes, layout, all, |pieces| pieces.least_on_host());
        if self.offloading.is_too_much(on_host, layout.data * inner_ranks(layout) * layout.pipeline) {
            return Err(Verdict::OutOfHostMemory);
        }
        Ok(())
    }

    /// Of one layout.
    pub(crate) fn of_member(&self, layout: &Layout, micro_batches: usize) -> Verdict {
        if let Some(stages) = &layout.stages {
            return self.of_own_meshes(std::slice::from_ref(layout), stages, micro_batches);
        }
        if layout.shares.is_some() {
            // The family's bound stands.
            return Verdict::Least(0.0);
        }
        if !self.has_probe(layout) {
            return self.of_whole(layout, micro_batches);
        }
        if let Err(verdict) = self.may_fit(layout, micro_batches) {
            return verdict;
        }
        if !self.lies_as_probe(layout) {
            // The family's bound stands.
            return Verdict::Least(0.0);
        }
        match self.probes(layout, micro_batches.min(2)) {
            Err(reason) => Verdict::Indivisible(reason),
            Ok(probes) => {
                let ways = self.ways(std::slice::from_ref(layout));
                let timetable = self.timetable(layout, micro_batches);
                // The probe has shared out what ZeRO shares out.
                let memory =
                    self.of_ways(&ways, &probes, layout, 1, |pieces| pieces.least_memory(timetable.in_flight(), 0, |_| 1, 1.0));
                let longer = self.longer_messages(layout, &probes);
                let time = self.of_ways(&ways, &probes, layout, 1, |pieces| pieces.least_time_by_pass(&timetable, &longer));
                self.verdict(layout, micro_batches, time, memory)
            }
        }
    }

    /// Whether what the probe of a layout's own ranks says holds for it.
    pub(crate) fn lies_as_probe(&self, layout: &Layout) -> bool {
        let ranks = layout.data * inner_ranks(layout);
        // The first and the last stage, which may share a table, are neighbours in some orders and not in a probe.
        self.lies_alike_in_all_stages(layout) && (layout.stage_places.is_none() || self.are_whole_nodes(ranks))
    }

    /// How much longer than a layout's probes say messages take between each stage and the next, and the last and the first.
    pub(crate) fn longer_messages(&self, layout: &Layout, probes: &[Arc<Probe>]) -> Vec<f64> {
        let least = probes.iter().map(|probe| probe.between_nodes).reduce(f64::min).unwrap_or(0.0);
        let plan = Plan { layout: layout.clone(), ..self.request.base.clone() };
        let Some(mesh) = plan.mesh().ok().filter(|_| least > 0.0) else { return Vec::new() };
        share_nodes(&mesh, self.request.topology).into_iter().map(|share| if share { 0.0 } else { least }).collect()
    }

    /// The different ways in which some members of a family are cut and lie on devices.
    fn ways(&self, members: &[Layout]) -> Vec<Way> {
        let mut ways: Vec<Way> = Vec::new();
        let mut seen: Vec<&Layout> = Vec::new();
        for member in members {
            let lies_alike = |other: &Layout| !self.devices.are_mixed() || lie_alike(other, member);
            if !seen.iter().any(|other| other.cuts == member.cuts && lies_alike(other)) {
                seen.push(member);
                let whole = Layout { zero: 0, shard_group: None, ..member.clone() };
                let mesh = Plan { layout: whole, ..self.request.base.clone() }.mesh();
                let pipelines = mesh.map_or_else(|_| vec![vec![0; member.pipeline]], |mesh| self.devices.pipelines(&mesh));
                ways.push(Way { cutting: self.cutting(member), pipelines });
            }
        }
        ways
    }

    /// The least of all ways of the most that any pipeline takes or holds, where so many ranks share out what the probes have of the optimizer's
    /// state.
    fn of_ways(
        &self,
        ways: &[Way],
        probes: &[Arc<Probe>],
        layout: &Layout,
        shards: usize,
        value: impl Fn(&Pieces<'_>) -> f64,
    ) -> f64 {
        let of_way = |way: &Way| {
            let of_pipeline = |of_stage: &Vec<usize>| {
                let weights = self.devices.weights();
                let pieces = Pieces::new(probes, of_stage, weights, &way.cutting, layout.schedule, layout.virtual_stages);
                value(&pieces.offloading(self.offloading.of(layout, &self.offloading.paces, shards)))
            };
            way.pipelines.iter().map(of_pipeline).fold(0.0, f64::max)
        };
        ways.iter().map(of_way).fold(f64::INFINITY, f64::min)
    }

    /// Whether a short model tells of it. A probe has four stages, so that where the pipeline is not outermost the layout must have as many, or groups would
    /// lie further apart in the probe; and one of several chunks would have shared tables twice.
    pub(crate) fn has_probe(&self, layout: &Layout) -> bool {
        let are_known =
            !self.devices.are_mixed() || self.devices.kinds.iter().all(|&kind| self.request.costs.knows_collectives(kind));
        let is_even = are_known && layout.shares.is_none() && layout.stages.is_none() && layout.operators.is_empty();
        let is_alike = is_even && (layout.placement.is_none() || layout.pipeline >= PROBE_STAGES);
        let is_one = layout.virtual_stages == 1 || layout.pipeline > 1;
        self.is_stack && is_alike && is_one && self.is_aligned(layout, inner_ranks(layout))
    }

    /// Whether so many ranks that follow each other lie on nodes alike in every stage, so that those of a probe's stages lie as those of others.
    fn is_aligned(&self, layout: &Layout, ranks: usize) -> bool {
        let mut sizes = self.request.topology.node_groups().iter().map(|group| group.devices.max(1));
        layout.pipeline == 1 || sizes.all(|size| ranks.is_multiple_of(size) || size.is_multiple_of(ranks))
    }

    /// Whether the ranks of a stage lie on nodes as those of any other do.
    fn lies_alike_in_all_stages(&self, layout: &Layout) -> bool {
        self.is_aligned(layout, layout.data * inner_ranks(layout))
    }

    /// Whether so many ranks take up whole nodes of every kind.
    fn are_whole_nodes(&self, ranks: usize) -> bool {
        self.request.topology.node_groups().iter().all(|group| ranks.is_multiple_of(group.devices.max(1)))
    }

    pub(crate) fn in_flight(&self, layout: &Layout, micro_batches: usize) -> Arc<InFlight> {
        let (schedule, stages, chunks) = (layout.schedule, layout.pipeline, layout.virtual_stages);
        let micro_batches = schedule.few_micro_batches(stages, micro_batches);
        let key = (schedule, stages, micro_batches, chunks);
        self.in_flight.get(key, || Arc::new(InFlight::least(schedule, stages, micro_batches, chunks)))
    }

    pub(crate) fn timetable(&self, layout: &Layout, micro_batches: usize) -> Arc<Timetable> {
        let (schedule, stages, chunks) = (layout.schedule, layout.pipeline, layout.virtual_stages);
        let key = (schedule, stages, micro_batches, chunks);
        self.timetables.get(key, || Arc::new(Timetable::new(schedule, stages, micro_batches, chunks)))
    }

    pub(crate) fn verdict(&self, layout: &Layout, micro_batches: usize, picoseconds: f64, memory: f64) -> Verdict {
        let needed = self.needed(memory);
        if needed > self.memory_limit {
            return Verdict::OutOfMemory(needed);
        }
        let (step, micro_batch) = self.overheads;
        let time = seconds(picoseconds * ROUNDING) + step + micro_batch * micro_batches as f64;
        Verdict::Least(time.value() * self.weight(layout))
    }

    /// What a device holds at least whose pieces hold so many bytes.
    pub(crate) fn needed(&self, bytes: f64) -> Bytes {
        Bytes::new((bytes * self.share_of_arena() - UNEVEN).max(0.0) as u64)
    }

    /// The share of our arena that the request's stack holds at least.
    pub(crate) fn share_of_arena(&self) -> f64 {
        share_of_arena(self.request.base)
    }

    /// What a second of a step weighs in the request's objective.
    pub(crate) fn weight(&self, layout: &Layout) -> f64 {
        let ranks = ranks(layout);
        self.weights.get(ranks, || self.request.objective.weight(self.request, ranks))
    }

    pub(crate) fn cutting(&self, layout: &Layout) -> Arc<Cutting> {
        let (stages, chunks) = (layout.pipeline, layout.virtual_stages);
        let cutting = match &layout.cuts {
            Some(cuts) => Arc::new(Cutting::new(cuts)),
            None => self.cuttings.get((stages, chunks), || Arc::new(Cutting::usual(&self.space.work, stages, chunks))),
        };
        match &layout.recompute {
            Recompute::FullLayers(layers) => Arc::new(cutting.recomputing(vec![*layers; stages], layout.schedule)),
            Recompute::FullLayersOfStages(layers) if layers.len() == stages => {
                Arc::new(cutting.recomputing(layers.clone(), layout.schedule))
            }
            _ => cutting,
        }
    }

    /// A layout's probes on each kind of device.
    pub(crate) fn probes(&self, layout: &Layout, micro_batches: usize) -> Result<Vec<Arc<Probe>>, String> {
        if !self.devices.are_mixed() {
            return Ok(vec![self.probe(layout, micro_batches, None)?]);
        }
        self.devices.kinds.iter().map(|&kind| self.probe(layout, micro_batches, Some(kind))).collect()
    }

    pub(crate) fn probe(&self, layout: &Layout, micro_batches: usize, kind: Option<usize>) -> Probed {
        self.probe_with(layout, micro_batches, kind, Messages::Counted)
    }

    /// Whether the two ends of a layout's pipeline share a table and somewhere a node, as those of its probe do not.
    fn ends_are_nearer(&self, layout: &Layout, probe: &Layout) -> bool {
        let node = self.request.topology.node_groups().iter().map(|group| group.devices).max().unwrap_or(1);
        // Of the ranks in between, those of `data` need not lie there, and a turned pipeline's ends may be neighbours.
        let apart = (layout.pipeline - 1) * inner_ranks(layout);
        if !self.space.shares_parameters || layout.stage_places.is_none() && apart >= node {
            return false;
        }
        let share = |layout: &Layout| {
            let mesh = Plan { layout: layout.clone(), ..self.request.base.clone() }.mesh().ok()?;
            share_nodes(&mesh, self.request.topology).last().copied()
        };
        share(layout) == Some(true) && share(probe) != Some(true)
    }

    pub(crate) fn probe_with(&self, layout: &Layout, micro_batches: usize, kind: Option<usize>, messages: Messages) -> Probed {
        if let Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) = layout.recompute {
            // A short model has too few blocks to compute some of them again.
            let of = |recompute| self.probe_with(&Layout { recompute, ..layout.clone() }, micro_batches, kind, messages);
            return Ok(Arc::new(Probe::of_some(&*of(Recompute::None)?, of(Recompute::Full)?)));
        }
        let is_cut = layout.pipeline > 1;
        let splits = layout.schedule.splits_backward();
        let schedule = if splits { Schedule::ZeroBubbleH1 } else { Schedule::OneForwardOneBackward };
        let pipeline = if is_cut { PROBE_STAGES } else { 1 };
        // What is offloaded follows from what is kept where nothing is.
        let offload = Offload::None;
        let own = Layout { pipeline, virtual_stages: 1, schedule, offload, cuts: None, stage_places: None, ..layout.clone() };
        // On devices of a kind that is said it is not known which share a node.
        let are_nearer = is_cut && (kind.is_some() || self.ends_are_nearer(layout, &own));
        let sums = if are_nearer { Sums::LeftOut } else { Sums::Counted };
        let plan = Plan { layout: own, ..self.request.base.clone() };
        let Request { topology, costs, .. } = *self.request;
        let key = ProbeKey { layout: plan.layout.clone(), micro_batches, kind, messages, sums };
        let probe = || Probe::new(&self.stacks, &plan, (topology, costs), micro_batches, kind, (messages, sums));
        self.probes.get(key, || match probe() {
            Ok(probe) => Ok(Arc::new(probe)),
            Err(ProbeError::Plan(error)) => Err(error.to_string()),
            Err(ProbeError::Simulation(error)) => Err(error.to_string()),
        })
    }
}

/// Whether the ranks of two layouts of a family lie on the same devices.
pub(crate) fn lie_alike(one: &Layout, other: &Layout) -> bool {
    one.placement == other.placement && one.stage_places == other.stage_places
}

/// The share of our arena that a plan's stack holds at least.
pub(crate) fn share_of_arena(plan: &Plan) -> f64 {
    if plan.stack.is_own() { 1.0 } else { SHARE_OF_OTHERS }
}

/// What a layout holds at least, by pieces without ZeRO whose micro-batches have so many times fewer samples.
fn least_memory(pieces: &Pieces<'_>, in_flight: &InFlight, layout: &Layout, times: f64) -> f64 {
    let ranks = layout.shard_group.unwrap_or(layout.data);
    pieces.least_memory(in_flight, layout.zero, |_| ranks, times)
}

/// Ranks that share out each parameter's optimizer state.
fn shards(layout: &Layout) -> usize {
    if layout.zero > 0 { layout.shard_group.unwrap_or(layout.data) } else { 1 }
}

/// All ranks of a layout.
pub(crate) fn ranks(layout: &Layout) -> usize {
    let of_stage = |stage: StageLayout| stage.data * stage.tensor * stage.context * stage.expert;
    match &layout.stages {
        Some(stages) => stages.iter().cloned().map(of_stage).sum(),
        None => of_stage(layout.stage(0)) * layout.pipeline,
    }
}

/// Ranks of a stage that share out the same samples, or their tokens.
pub(crate) fn inner_ranks(layout: &Layout) -> usize {
    layout.tensor * layout.context * layout.expert
}
