//! Estimates of the step time and memory of layouts, for the order in which a search tries them.
//!
//! An estimate takes a microsecond: nothing is compiled. It comes from the times of the model's
//! kernels at two batch sizes, the sizes of its tensors, and the rates of the links. It is neither
//! a bound nor an answer, and no layout is excluded because of it. It must not know the simulator's
//! events or the bounds.

mod links;
mod profile;

pub(crate) use profile::kernel_seconds;

use crate::space::{Family, Request, most_shards, world_size};
use foretell_models::Graph;
use foretell_program::{Layout, Recompute, usual_cuts, work_of_blocks};
use foretell_simulator::MemoryRates;
use foretell_units::Seconds;
use links::{Links, StageMessages};
use profile::ModelProfile;
use std::collections::HashMap;
use std::sync::Mutex;

/// Bytes of a gradient, and of each value that the optimizer keeps for a parameter.
const SINGLE_PRECISION: f64 = 4.0;

/// Share of the last backward pass that can hide gradient reductions, if the two overlap. An
/// assumption.
const OVERLAPPED_SHARE: f64 = 0.8;

/// Share of the shorter of messages and kernels that the longer one does not hide. An assumption.
const EXPOSED_MESSAGES: f64 = 0.25;

/// The estimated step time and memory of a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Estimate {
    /// Step time with the stage of ZeRO for which it is shortest.
    pub(crate) time: Seconds,
    /// Bytes of the fullest device with the stage of ZeRO that needs least.
    pub(crate) memory: f64,
}

/// The shares of a model on its fullest stages, with the usual cuts. Work and blocks are counted
/// apart, since the head of a large vocabulary is one block with much work.
#[derive(Clone, Copy, Debug)]
struct Shares {
    /// The share of the work on the stage with the most work.
    work: f64,
    /// The share of the blocks on the stage with the most blocks.
    blocks: f64,
}

/// Estimates of the layouts of one request.
#[derive(Debug)]
pub(crate) struct Estimates {
    model: ModelProfile,
    links: Links,
    /// Least memory of the software stack for each byte of a Program's buffers. So estimates are
    /// rather low.
    memory_rates: MemoryRates,
    /// Bytes of a parameter.
    parameter: f64,
    /// Bytes that the optimizer keeps for a parameter.
    optimizer_state: f64,
    /// Seconds in which the optimizer updates a parameter.
    update: f64,
    global_batch: usize,
    /// The stage of ZeRO that the user has fixed.
    fixed_zero: Option<usize>,
    /// FLOPs of each block.
    work: Vec<f64>,
    /// The shares of the fullest stages, keyed by the numbers of stages and of chunks per stage.
    shares: Mutex<HashMap<(usize, usize), Shares>>,
    /// Whether layouts that do not fit may recompute a part of their blocks.
    recomputes_in_part: bool,
    /// Matrix-product rate of each device over that of the slowest. Empty if all are of one kind.
    speeds: Vec<f64>,
}

impl Estimates {
    /// Prepares the estimates of a request whose model has the forward graph `graph` for one
    /// sample, and whose optimizer keeps `optimizer_tensors` values for each parameter.
    pub(crate) fn new(
        request: &Request<'_>,
        graph: &Graph,
        memory_rates: MemoryRates,
        optimizer_tensors: usize,
        is_plain_stack: bool,
        speeds: &[f64],
    ) -> Self {
        let parameter = request.base.storage().size().value();
        let optimizer_state = SINGLE_PRECISION * optimizer_tensors as f64;
        let bandwidths = request.topology.device_kinds().iter().map(|kind| kind.memory_bandwidth.value());
        let slowest = bandwidths.fold(f64::INFINITY, f64::min);
        let least = speeds.iter().copied().fold(f64::INFINITY, f64::min);
        Self {
            model: ModelProfile::new(request, graph),
            links: Links::new(request.topology),
            memory_rates,
            parameter,
            optimizer_state,
            // The gradient and the state are read, the state and the parameter written.
            update: (SINGLE_PRECISION + 2.0 * optimizer_state + parameter) / slowest.max(1.0),
            global_batch: request.base.global_batch,
            fixed_zero: request.fixed.zero,
            work: work_of_blocks(graph),
            shares: Mutex::new(HashMap::new()),
            recomputes_in_part: is_plain_stack && request.fixed.recompute.is_none(),
            speeds: speeds.iter().map(|speed| speed / least).collect(),
        }
    }

    /// Estimates a family whose stages have one mesh and whose ranks have equal shares; `None` for
    /// others. If a family without recomputation does not fit, the estimate is that of its form
    /// that recomputes just enough blocks to fit.
    pub(crate) fn of(&self, family: &Family) -> Option<Estimate> {
        let zeros = self.stages_of_zero(&family.layout);
        let estimate = self.of_family(family, zeros)?;
        let limit = self.model.memory_limit;
        if !self.recomputes_in_part || family.layout.recompute != Recompute::None || estimate.memory <= limit {
            return Some(estimate);
        }
        let layout = Layout { recompute: Recompute::Full, ..family.layout.clone() };
        let smallest = self.of_family(&Family { layout, ..family.clone() }, zeros)?;
        if smallest.memory > limit {
            return Some(estimate);
        }
        let part = (estimate.memory - limit) / (estimate.memory - smallest.memory).max(1.0);
        let time = estimate.time + (smallest.time - estimate.time) * part.clamp(0.0, 1.0);
        Some(Estimate { time, memory: limit })
    }

    /// Returns the estimated memory of a layout with its own stage of ZeRO over the memory limit.
    pub(crate) fn memory_of_layout(&self, layout: &Layout, micro_batches: usize) -> Option<f64> {
        let estimate = self.of_family(&Family { layout: layout.clone(), micro_batches }, &[layout.zero])?;
        Some(self.memory_over_limit(&estimate))
    }

    /// Returns the stages of ZeRO that layouts of a family may have.
    fn stages_of_zero(&self, layout: &Layout) -> &[usize] {
        match most_shards(layout) {
            _ if self.fixed_zero.is_some() => self.fixed_zero.as_slice(),
            1 => &[0],
            _ if layout.follows_schedule() => &[0, 1],
            _ => &[0, 1, 2, 3],
        }
    }

    /// Estimates a family whose stages have one mesh and whose ranks have equal shares; `None` for
    /// others.
    fn of_family(&self, family: &Family, stages_of_zero: &[usize]) -> Option<Estimate> {
        let Family { layout, micro_batches } = family;
        if layout.stages.is_some() || layout.shares.is_some() {
            return None;
        }
        let micro_batches = *micro_batches as f64;
        let [data, tensor, context, expert] = [layout.data, layout.tensor, layout.context, layout.expert].map(|size| size as f64);
        let (stages, chunks) = (layout.pipeline as f64, layout.virtual_stages as f64);
        let samples = layout.micro_batch as f64;
        let Shares { work: share, blocks: share_of_blocks } = self.shares_of_fullest_stages(layout);
        let recompute = Recomputed::of(&layout.recompute);

        // The time of a micro-batch on the stage with the most work.
        let model = &self.model;
        let on_rank = samples / (tensor * context);
        let paced = self.share_by_speed(layout, share);
        let (forward, backward) = (model.forward.time(on_rank) * paced, model.backward.time(on_rank) * paced);
        // The rank with the most tokens for its experts sets the pace.
        let with_experts = layout.expert * if layout.expert_tensor == Some(1) { layout.tensor } else { 1 };
        let rows = model.rows_over_slots.get(&with_experts).copied().unwrap_or(1.0);
        let [more_forward, more_backward] = model.experts.map(|time| time.time(on_rank) * paced * (rows - 1.0));
        let (forward, backward) = (forward + more_forward, backward + more_backward);
        let again = match recompute {
            Recomputed::Nothing => 0.0,
            Recomputed::Attention => model.attention.time(on_rank) * paced,
            Recomputed::Blocks => forward,
        };
        let blocks = model.blocks * share_of_blocks;
        let inner = layout.tensor * layout.context * layout.expert;
        let links = self.links.of_world(world_size(layout));
        let activations = model.boundary * samples / context;
        let tensor_passes = if recompute == Recomputed::Blocks { 6.0 } else { 4.0 };
        let of_tensor = blocks * tensor_passes * links.all_reduce(activations, layout.tensor, 1);
        let of_context = blocks * 3.0 * links.all_reduce(activations, layout.context, layout.tensor);
        let routed = activations * model.routed * rows;
        let of_experts = blocks * 6.0 * links.all_to_all(routed, layout.expert, layout.tensor * layout.context);
        let micro_batch = forward + backward + again + of_tensor + of_context + of_experts;

        let bubble = (stages - 1.0) * micro_batch / chunks * if layout.schedule.splits_backward() { 0.5 } else { 1.0 };
        // Each rank of a stage sends its part of the positions.
        let message = activations / if layout.sequence_parallel { tensor } else { 1.0 };
        // With the pipeline inside nodes, the next stage is `inner` devices away.
        let ranks = if layout.placement.is_some() { inner } else { inner * layout.data };
        let StageMessages { slowest, through_all } = links.messages(message, ranks, layout.pipeline);
        // Forward messages and those of gradients share an interface.
        let messages = if layout.pipeline > 1 { 2.0 * chunks * slowest } else { 0.0 };
        // Messages and kernels of different micro-batches overlap, but not wholly.
        let pace = micro_batch.max(messages) + EXPOSED_MESSAGES * micro_batch.min(messages);
        let in_pipeline = micro_batches * pace + bubble + 2.0 * through_all;

        // The state and the gradients of the fullest stage.
        let fullest = share_of_blocks.max(model.fullest_share(layout.pipeline));
        let outside_experts = model.parameters / tensor * fullest;
        // The first and last blocks of a model have no experts.
        let inside_experts = model.expert_parameters / (tensor * expert) * share_of_blocks;
        let parameters = outside_experts + inside_experts;
        // Outside of experts, ranks along `expert` and `context` have the same parameters. Ranks
        // along `expert` have different experts.
        let all_reduce = |of_parameter: f64| {
            let alike = layout.data * layout.expert * layout.context;
            let outside = links.all_reduce(outside_experts * of_parameter, alike, layout.tensor);
            outside + links.all_reduce(inside_experts * of_parameter, layout.data, inner)
        };
        let reduction = all_reduce(SINGLE_PRECISION);
        let gathering = all_reduce(self.parameter) / 2.0;
        let hidden = OVERLAPPED_SHARE * backward / chunks.max(1.0);
        // Ranks along `expert` have different experts, so ZeRO does not shard experts over them.
        let shards = most_shards(layout) as f64;
        let of_shard = outside_experts / shards + inside_experts * expert / shards;
        let held = |is_sharded: bool| if is_sharded { of_shard } else { parameters };
        let time_with = |zero: usize| {
            let gathers = match zero {
                0 => 0.0,
                1 | 2 => gathering,
                // Parameters are gathered for the forward and for the backward pass, and the passes
                // hide most of both.
                _ => (2.0 * gathering - OVERLAPPED_SHARE * (forward + backward)).max(gathering / blocks.max(1.0)) * micro_batches,
            };
            let reductions = if zero > 1 { micro_batches } else { 1.0 };
            in_pipeline
                + (reduction * reductions / if zero > 0 { 2.0 } else { 1.0 } - hidden).max(0.0)
                + gathers
                + held(zero > 0) * self.update
        };
        let memory_with = |zero: usize| {
            let rates = &self.memory_rates;
            let parameters = rates.parameters * self.parameter * held(zero >= 3);
            let gradients = rates.gradients * SINGLE_PRECISION * held(zero >= 2);
            let state = parameters + gradients + rates.optimizer_state * self.optimizer_state * held(zero >= 1);
            state + rates.transient * self.activations(layout, share_of_blocks, &recompute) + rates.fixed.value()
        };
        let memory = stages_of_zero.iter().map(|&zero| memory_with(zero)).fold(f64::INFINITY, f64::min);
        let limit = model.memory_limit.max(memory);
        let fitting = stages_of_zero.iter().filter(|&&zero| memory_with(zero) <= limit);
        let time = fitting.map(|&zero| time_with(zero)).fold(f64::INFINITY, f64::min);
        // Micro-batches that do not divide the batch evenly are not in the space.
        let all_samples = samples * micro_batches * data * expert;
        let scale = self.global_batch as f64 / all_samples.max(1.0);
        Some(Estimate { time: Seconds::new(time * scale), memory })
    }

    /// Returns the estimated memory over the memory limit.
    pub(crate) fn memory_over_limit(&self, estimate: &Estimate) -> f64 {
        estimate.memory / self.model.memory_limit.max(1.0)
    }

    /// Returns the largest shares of work and of blocks on a stage, with the usual cuts.
    fn shares_of_fullest_stages(&self, layout: &Layout) -> Shares {
        let (stages, chunks) = (layout.pipeline, layout.virtual_stages);
        if stages == 1 || stages * chunks > self.work.len() {
            let equal = 1.0 / stages as f64;
            return Shares { work: equal, blocks: equal };
        }
        // A poisoned lock is harmless: no panic leaves the table half changed.
        let mut known = self.shares.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        *known.entry((stages, chunks)).or_insert_with(|| {
            let (mut of_stage, mut blocks_of_stage) = (vec![0.0; stages], vec![0; stages]);
            let mut blocks = self.work.iter();
            for (chunk, count) in usual_cuts(&self.work, stages, chunks).into_iter().enumerate() {
                of_stage[chunk % stages] += blocks.by_ref().take(count).sum::<f64>();
                blocks_of_stage[chunk % stages] += count;
            }
            let all: f64 = self.work.iter().sum();
            let most = blocks_of_stage.into_iter().max().unwrap_or(0) as f64;
            Shares {
                work: of_stage.into_iter().fold(0.0, f64::max) / all.max(f64::MIN_POSITIVE),
                blocks: most / self.work.len().max(1) as f64,
            }
        })
    }

    /// Scales `share`, the fullest stage's share under even cuts, to cuts by speed, in terms of the
    /// slowest device's rate. Returns `share` itself if all devices are equal.
    fn share_by_speed(&self, layout: &Layout, share: f64) -> f64 {
        let ranks = layout.data * layout.tensor * layout.context * layout.expert;
        if layout.pipeline < 2 || layout.virtual_stages > 1 || self.speeds.len() < ranks * layout.pipeline {
            return share;
        }
        let stages = self.speeds[..ranks * layout.pipeline].chunks(ranks);
        let all: f64 = stages.map(|stage| stage.iter().copied().fold(f64::INFINITY, f64::min)).sum();
        share * layout.pipeline as f64 / all.max(1.0)
    }

    /// Returns the bytes of activations on the fullest stage.
    fn activations(&self, layout: &Layout, share: f64, recompute: &Recomputed) -> f64 {
        let model = &self.model;
        let (tensor, context) = (layout.tensor as f64, layout.context as f64);
        let samples = layout.micro_batch as f64 / context;
        let of_tensor = if layout.sequence_parallel { 1.0 / tensor } else { 1.0 };
        let micro_batches = (self.global_batch / layout.samples_at_once().max(1)).max(1);
        let held = layout.schedule.in_flight_bound(layout.pipeline, micro_batches, layout.virtual_stages, 0) as f64;
        let blocks = model.blocks * share / layout.virtual_stages as f64;
        // Without sequence parallelism, norms, residuals and their inputs are not sharded over
        // `tensor`.
        let unsharded = 4.0 * model.boundary;
        let block = ((model.activations - unsharded).max(0.0) / tensor + unsharded * of_tensor) * samples;
        let attention = model.attention_activations / tensor * samples;
        let kept = match recompute {
            Recomputed::Nothing => block,
            Recomputed::Attention => (block - attention).max(0.0),
            Recomputed::Blocks => model.boundary * of_tensor * samples,
        };
        // The last stage holds one micro-batch of the head's output.
        let head = model.last_activations / tensor * samples;
        let of_blocks = held * blocks * kept + block;
        if layout.pipeline == 1 { of_blocks + head } else { of_blocks.max(blocks * kept + block + head) }
    }
}

/// What the backward pass recomputes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Recomputed {
    Nothing,
    Attention,
    Blocks,
}

impl Recomputed {
    fn of(recompute: &Recompute) -> Self {
        match recompute {
            Recompute::None => Self::Nothing,
            Recompute::Selective => Self::Attention,
            Recompute::Full | Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) | Recompute::AllBut(_) => Self::Blocks,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Estimates;
    use crate::space::{Family, Request, optimizer_tensors};
    use foretell_models::{GraphOptions, Model};
    use foretell_program::{Layout, Plan, Recompute, compile};
    use foretell_simulator::{CostModel, Folding, MemoryRates, Oversubscription, predict};
    use foretell_topologies::Topology;
    use foretell_units::{Bytes, DataType};

    #[test]
    fn a_fixed_stage_of_zero_is_the_one_that_is_estimated() {
        let topology = Topology::library("dgx-a100-80g").expect("in the library");
        let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("known");
        let model = Model::named("gpt2-medium").expect("in the zoo");
        let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 64) };
        let memory = |choices: &str| {
            let fixed = choices.parse().expect("well formed");
            let request = Request { fixed, ..Request::new(&model, "model", &topology, &costs, &base) };
            let graph = model.graph("model", &GraphOptions::ONE).expect("it is sound");
            let family = Family { layout: Layout { data: 8, micro_batch: 8, ..Layout::default() }, micro_batches: 1 };
            Estimates::new(&request, &graph, MemoryRates::ARENA, optimizer_tensors(&base), true, &[])
                .of(&family)
                .expect("one mesh")
                .memory
        };
        assert!(memory("zero=0") > memory("zero=1") && memory("zero=1") > memory("zero=3"));
        assert_eq!(memory("zero=3"), memory(""));
    }

    /// Estimates need not be right, but they must tell good layouts from bad ones.
    #[test]
    fn estimates_are_near_the_simulation() {
        let topology = Topology::library("dgx-a100-80g").expect("in the library").with_nodes(2).expect("16 devices");
        let costs = CostModel::new(None, &topology).with_stack(&topology, "foretell", DataType::Bf16).expect("known");
        for name in ["gpt2-medium", "bert-base-uncased", "t5-small", "resnet50"] {
            let model = Model::named(name).expect("in the zoo");
            let base = Plan { precision: DataType::Bf16, ..Plan::new(Layout::default(), 256) };
            let request = Request::new(&model, name, &topology, &costs, &base);
            let graph = model.graph(name, &GraphOptions::ONE).expect("it is sound");
            let estimates = Estimates::new(&request, &graph, MemoryRates::ARENA, optimizer_tensors(&base), true, &[]);
            for (data, tensor, pipeline, micro_batch) in [(16, 1, 1, 8), (8, 2, 1, 8), (8, 1, 2, 4), (4, 4, 1, 8), (4, 1, 4, 4)] {
                for recompute in [Recompute::None, Recompute::Full] {
                    let layout = Layout { data, tensor, pipeline, micro_batch, recompute, ..Layout::default() };
                    let plan = Plan { layout: layout.clone(), ..base.clone() };
                    let Ok(compiled) = compile(&model, name, &plan) else { continue };
                    let predicted = predict(&compiled.training, &topology, &costs, Oversubscription::Refused, Folding::On);
                    let step = predicted.expect("it can be simulated").0.step_seconds;
                    let family = Family { layout, micro_batches: plan.micro_batches().expect("it divides") };
                    let estimate = estimates.of(&family).expect("one mesh for all stages");
                    let time = estimate.time / step;
                    assert!((0.3..3.0).contains(&time), "{name} {:?}: {} beside {step}", family.layout, estimate.time);
                    let arena = compiled.arenas().into_iter().max().unwrap_or(Bytes::ZERO).value();
                    let memory = estimate.memory / arena;
                    assert!((0.15..4.0).contains(&memory), "{name} {:?}: {} beside {arena}", family.layout, estimate.memory);
                }
            }
        }
    }
}
