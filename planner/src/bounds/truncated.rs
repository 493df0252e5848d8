//! Truncated models: short versions of a model whose compiled Programs bound the cost of any number
//! of equal blocks.
//!
//! Stacks of one and of two equal blocks are compiled; the cost of `n` follows by extrapolation.
//! The longest chain through `n` equal blocks is the maximum of functions that are linear in `n`,
//! hence convex in `n`. The line through its values at 1 and 2 lies nowhere above a convex function
//! for `n` ≥ 2, so the extrapolation is a lower bound, and exact if the same chain is longest
//! throughout. One assumption is tested, not proven: that no chain exists only from some number of
//! blocks on. `bounds_never_exceed_the_simulation` in `tests/planner/bounds.rs` searches for one.
//!
//! If a period of several blocks repeats, a layout without a pipeline counts whole periods as equal
//! blocks. A pipeline may cut through a period. So each kind of block then has its own stacks, and
//! each block of a chunk adds what a block of its kind adds in them. That it adds no less between
//! blocks of other kinds is tested in the same way.

mod cache;
mod chunk_cost;
mod messages;
mod stacks;

pub(super) use cache::TruncatedModels;
pub(super) use chunk_cost::{Chunk, ChunkCost, OffloadedActivations};
pub(super) use messages::stages_sharing_nodes;

use crate::bounds::passes::{MicroBatchMemory, TimedList};
use crate::space::{BlockPattern, FEWEST_REPEATS, Request};
use foretell_models::{Graph, GraphOptions, Model};
use foretell_program::{Compiler, Layout, Plan};
use foretell_simulator::{MemoryRates, Oversubscription, least_times, least_times_on};
use foretell_units::diagnostic::Mistake;
use messages::{equalise_messages, largest_message, leave_out_messages, leave_out_sums_over_stages};
use stacks::{LONG, SHORT, Stacks};
use std::borrow::Cow;
use std::cell::Cell;
use std::sync::Arc;

/// The number of stages of a truncated pipeline: the first blocks, the two stacks, the last blocks.
pub(super) const TRUNCATED_STAGES: usize = 4;

/// The number of equal blocks of a truncated pipeline: both stacks, and one block next to each end
/// of the model.
const PIPELINE_BLOCKS: usize = SHORT + LONG + 2;

const _: () = assert!(FEWEST_REPEATS >= PIPELINE_BLOCKS, "a truncated model is no longer than the model");

/// The most operators that each compiler caches: those of about forty graphs. Plans with the same
/// graph follow one another in the space, so more would only take memory.
const REMEMBERED_OPERATORS: usize = 8192;

/// Compilers of the truncated models.
pub(super) struct TruncatedCompilers<'a> {
    /// The model with one period and with two.
    stacks: [Compiler<'a>; 2],
    /// For each kind of block in a period, the truncated pipeline with this kind alone.
    pipelines: Vec<Compiler<'a>>,
    pattern: Arc<BlockPattern>,
}

impl<'a> TruncatedCompilers<'a> {
    fn new(request: &Request<'a>, graph: &Graph, pattern: &BlockPattern) -> Self {
        let training = &request.base.training;
        let graph_of = |model: &Model| training.graph(model, request.name, &GraphOptions::ONE).ok();
        // Building the graph of a shorter model is faster.
        let short = pattern.shortened(request.model, graph, graph_of, |parameter| training.is_frozen(parameter));
        let (model, pattern) = match short {
            Some((model, pattern)) => (Cow::Owned(model), pattern),
            None => (Cow::Borrowed(request.model), pattern.clone()),
        };
        let compiler =
            |blocks| Compiler::of_blocks(model.clone(), request.name, blocks).with_operator_limit(REMEMBERED_OPERATORS);
        Self {
            stacks: [SHORT, LONG].map(|periods| compiler(pattern.with_periods(periods))),
            pipelines: (0..pattern.kinds()).map(|kind| compiler(pattern.with_one_kind(kind, PIPELINE_BLOCKS))).collect(),
            pattern: Arc::new(pattern),
        }
    }
}

/// The number of equal blocks of a chunk whose activations may stay on the device. If the backward
/// pass follows at once, the last two stay on the device (`BLOCKS_THAT_STAY` in the compiler); and
/// other chunks may read what the chunk's first block leaves.
const BLOCKS_NOT_OFFLOADED: usize = 3;

/// Communication that a truncated model counts as taking no time, because it may differ from that
/// of the layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct LeftOut {
    /// Messages between stages: between unequal meshes, neither their sizes nor their ranks are
    /// those of the truncated model.
    pub(super) messages: bool,
    /// Gradient sums of a table that the first and the last stage share: the two stages may be
    /// closer to each other than in the truncated model.
    pub(super) sums_over_stages: bool,
}

/// Costs of a layout's blocks, read from compiled truncated models.
#[derive(Clone, Debug)]
pub(super) struct TruncatedModel {
    pattern: Arc<BlockPattern>,
    /// With a pipeline, the stacks of each kind of block in a period; otherwise one pair of stacks
    /// of whole periods.
    stacks: Vec<Stacks>,
    /// Whether it is a pipeline.
    is_pipeline: bool,
    /// The same model with full recomputation, for layouts that recompute part of their blocks.
    all_recomputed: Option<Arc<Self>>,
    /// Whether it runs several micro-batches. If so, no pass contains work that is done once a
    /// step.
    pub(super) has_several_micro_batches: bool,
    /// Least extra time, in picoseconds, of a message between stages that share no node, over the
    /// time that this model gives messages.
    pub(super) extra_between_nodes: f64,
    /// Bytes of the largest message between stages.
    pub(super) message_bytes: f64,
}

/// The inputs of a truncated model besides its layout.
#[derive(Clone, Copy)]
pub(super) struct Timing<'a> {
    request: &'a Request<'a>,
    rates: &'a MemoryRates,
    micro_batches: usize,
    /// The topology's kind of all devices; the topology's own devices if `None`.
    kind: Option<usize>,
    left_out: LeftOut,
}

impl TruncatedModel {
    /// Compiles and times the truncated models of a plan with 1 or [`TRUNCATED_STAGES`] stages of
    /// one chunk each.
    fn new(compilers: &TruncatedCompilers<'_>, plan: &Plan, timing: &Timing<'_>) -> Result<Self, Mistake> {
        let is_pipeline = plan.layout.pipeline == TRUNCATED_STAGES;
        let pattern = &compilers.pattern;
        let (extra_between_nodes, message_bytes) = (Cell::new(None), Cell::new(0.0f64));
        let costs_of_stages = |compiler: &Compiler<'_>, cuts: Option<Vec<usize>>| -> Result<Vec<ChunkCost>, Mistake> {
            let Timing { request: Request { topology, costs, .. }, rates, micro_batches, kind, left_out } = *timing;
            let layout = Layout { cuts, ..plan.layout.clone() };
            let global_batch = layout.samples_at_once().saturating_mul(micro_batches);
            let plan = Plan { layout, global_batch, ..plan.clone() };
            let program = compiler.unplaced(&plan).map_err(|error| Mistake::of(&error))?;
            let times = match kind {
                Some(kind) => least_times_on(&program, costs, plan.layout.bucket, |_| kind),
                None => least_times(&program, topology, costs, Oversubscription::Allowed, plan.layout.bucket),
            };
            let mut times = times.map_err(|error| Mistake::of(&error))?;
            if is_pipeline && left_out.sums_over_stages {
                leave_out_sums_over_stages(&program.lists, &mut times);
            }
            message_bytes.set(message_bytes.get().max(largest_message(&program)));
            if left_out.messages {
                leave_out_messages(&program.lists, &mut times);
            } else {
                // If a kind of device is given, it is not known which nodes the stages are on.
                let nodes = kind.is_none().then_some(*topology);
                let extra = equalise_messages(&program, &mut times, nodes);
                extra_between_nodes.set(Some(extra_between_nodes.get().map_or(extra, |least: f64| least.min(extra))));
            }
            let timed = program.lists.iter().zip(&times);
            Ok(timed.map(|(list, times)| ChunkCost::of(&TimedList { list, times, overlap: &plan.overlap }, rates)).collect())
        };
        let stacks = if is_pipeline {
            let cuts = vec![pattern.first + 1, SHORT, LONG, pattern.last + 1];
            let of_kind = |compiler: &Compiler<'_>| Ok(Stacks::of_pipeline(&costs_of_stages(compiler, Some(cuts.clone()))?));
            compilers.pipelines.iter().map(of_kind).collect::<Result<_, Mistake>>()?
        } else {
            let [short, long] = [&compilers.stacks[0], &compilers.stacks[1]].map(|compiler| costs_of_stages(compiler, None));
            vec![Stacks::without_pipeline(short?[0], long?[0])]
        };
        Ok(Self {
            pattern: Arc::clone(pattern),
            stacks,
            is_pipeline,
            all_recomputed: None,
            has_several_micro_batches: timing.micro_batches > 1,
            // Zero if messages are left out.
            extra_between_nodes: extra_between_nodes.get().unwrap_or(0.0),
            message_bytes: message_bytes.get(),
        })
    }

    /// Joins the models without recomputation and with full recomputation into one for layouts that
    /// recompute part of their blocks.
    fn partly_recomputed(none: &Self, all: Arc<Self>) -> Self {
        Self { all_recomputed: Some(all), ..none.clone() }
    }

    /// Returns the least cost of a chunk.
    pub(super) fn chunk(&self, chunk: Chunk) -> ChunkCost {
        let none = self.chunk_of_uniform_blocks(chunk);
        let Some(all) = self.all_recomputed.as_ref().filter(|_| chunk.recomputed > 0) else { return none };
        if !self.pattern.is_plain() {
            // Which blocks are recomputed depends on where the chunk begins. Its cost is at least
            // the smaller of those with none and with all blocks recomputed.
            return none.with(&all.chunk_of_uniform_blocks(chunk), f64::min);
        }
        if chunk.recomputed >= chunk.equal_blocks {
            // If every block is recomputed, the recomputation of the last one may precede the
            // arrival of the gradient, and is then in no chain. Extrapolation from `none` would
            // count it.
            return all.chunk_of_uniform_blocks(chunk);
        }
        let extra = all.stacks[0].per_block().with(&self.stacks[0].per_block(), |all, none| all - none);
        let count = chunk.recomputed as f64;
        // A zero means that no such chain exists here, so nothing is added to it.
        let add = |own: f64, extra: f64| if own > 0.0 { (own + count * extra).max(0.0) } else { own };
        let saved = add(none.micro_batch.saved, extra.micro_batch.saved);
        // While a recomputed block runs, it uses as much memory beyond `saved` as other blocks.
        let freed = none.micro_batch.saved - saved;
        ChunkCost {
            backward: none.backward.with(extra.backward, add),
            weights: none.weights.with(extra.weights, |own, extra| add(own, extra.min(0.0))),
            // The last pass may be a weight-gradient pass, which recomputes nothing.
            tail: none.tail.with(extra.tail, |own, extra| add(own, extra.min(0.0))),
            micro_batch: MicroBatchMemory {
                saved,
                saved_for_weights: add(none.micro_batch.saved_for_weights, extra.micro_batch.saved_for_weights),
                forward_peak: none.micro_batch.forward_peak - freed,
                backward_peak: none.micro_batch.backward_peak - freed,
                ..none.micro_batch
            },
            // How many of the remaining activations are offloaded depends on which blocks are
            // recomputed, so none count.
            offloaded: OffloadedActivations::default(),
            ..none
        }
    }

    /// Returns the least cost of a chunk whose blocks are recomputed as in this model: all of them,
    /// or none.
    fn chunk_of_uniform_blocks(&self, chunk: Chunk) -> ChunkCost {
        let counts = self.counts(chunk);
        // Adds the chunk's blocks of all kinds to `from`, which already has one block of kind
        // `own`.
        let with_all = |from: &ChunkCost, own: usize| {
            let of_own = self.stacks[own].extrapolate(from, counts[own] as f64 - 1.0);
            let others = self.stacks.iter().zip(&counts).enumerate().filter(|&(kind, (_, &count))| kind != own && count > 0);
            others.fold(of_own, |cost, (_, (stacks, &count))| stacks.extrapolate(&cost, count as f64))
        };
        let beginning_with = |own: usize| {
            let stacks = &self.stacks[own];
            match (self.is_pipeline, chunk.has_first, chunk.has_last) {
                (false, ..) | (true, false, false) => with_all(&stacks.short, own),
                (true, true, false) => with_all(&stacks.first, own),
                (true, false, true) => with_all(&stacks.last, own),
                (true, true, true) => {
                    // `first` and `last` have a block each, which the middle counts already.
                    let (first, last) = (stacks.extrapolate(&stacks.first, -1.0), stacks.extrapolate(&stacks.last, -1.0));
                    first.then(&with_all(&stacks.short, own)).then(&last)
                }
            }
        };
        // Work of a chunk's outermost block that overlaps other blocks is in no chain. Which kind
        // of block that is differs between chains, so each number is the least over all kinds.
        let has = |kind: &usize| counts[*kind] > 0 || counts.iter().all(|&count| count == 0);
        let costs = (0..counts.len()).filter(has).map(beginning_with);
        let cost = costs.reduce(|left, right| left.with(&right, f64::min)).expect("invariant: a period has a block");
        ChunkCost { offloaded: self.offloaded(chunk, &counts), ..cost }
    }

    /// Returns how many equal blocks of each kind of stack a chunk has.
    fn counts(&self, chunk: Chunk) -> Vec<usize> {
        if !self.is_pipeline {
            return vec![chunk.equal_blocks / self.pattern.period.len()];
        }
        let mut counts = vec![0; self.stacks.len()];
        (0..chunk.equal_blocks).for_each(|block| counts[self.pattern.kind(chunk.offset + block)] += 1);
        counts
    }

    /// Returns the activations that a chunk with `counts` equal blocks of each kind moves to the
    /// host.
    fn offloaded(&self, chunk: Chunk, counts: &[usize]) -> OffloadedActivations {
        let of_kinds = |value: fn(&ChunkCost) -> f64| self.stacks.iter().map(move |stacks| value(&stacks.per_block()).max(0.0));
        let blocks_of_each = if self.is_pipeline { 1 } else { self.pattern.period.len() };
        let certain = (chunk.equal_blocks.saturating_sub(BLOCKS_NOT_OFFLOADED) / blocks_of_each) as f64;
        let least = |value: fn(&ChunkCost) -> f64| certain * of_kinds(value).fold(f64::INFINITY, f64::min);
        let bytes: fn(&ChunkCost) -> f64 = |cost| cost.micro_batch.saved_activations;
        OffloadedActivations {
            bytes: least(bytes),
            all_bytes: of_kinds(bytes).zip(counts).map(|(bytes, &count)| bytes * count as f64).sum(),
            forward: least(|cost| cost.kernels[0]),
            backward: least(|cost| cost.kernels[1]),
        }
    }
}
