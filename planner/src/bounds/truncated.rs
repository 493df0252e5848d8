//! Truncated models: short versions of a model whose compiled Programs bound the cost of any number
//! of equal blocks.
//!
//! Stacks of one and of two equal blocks are compiled; the cost of `n` follows by extrapolation.
//! The longest chain through `n` equal blocks is the maximum of functions that are linear in `n`,
//! hence convex in `n`. The line through its values at 1 and 2 lies nowhere above a convex function
//! for `n` ≥ 2, so the extrapolation is a lower bound, and exact if the same chain is longest
//! throughout. One assumption is tested, not proven: that no chain exists only from some number of
//! blocks on. `bounds_never_exceed_the_simulation` in `tests/planner/bounds.rs` searches for one.

mod cache;
mod chunk_cost;
mod messages;

pub(super) use cache::TruncatedModels;
pub(super) use chunk_cost::{Chunk, ChunkCost, OffloadedActivations};
pub(super) use messages::stages_sharing_nodes;

use crate::bounds::passes::{MicroBatchMemory, StreamTime, TimedList};
use crate::space::FEWEST_EQUAL_BLOCKS;
use foretell_models::Model;
use foretell_program::{Compiler, Layout, Plan};
use foretell_simulator::{CostModel, MemoryRates, Oversubscription, least_times, least_times_on};
use foretell_topologies::Topology;
use foretell_units::diagnostic::Mistake;
use messages::{equalise_messages, largest_message, leave_out_messages, leave_out_sums_over_stages};
use std::cell::Cell;
use std::sync::Arc;

/// Equal blocks of the shorter and of the longer stack.
const SHORT: usize = 1;
const LONG: usize = 2;

/// Stages of a truncated pipeline: the first blocks, the two stacks, the last blocks.
pub(super) const TRUNCATED_STAGES: usize = 4;

/// Equal blocks of a truncated pipeline: both stacks, and one beside each end of the model.
const PIPELINE_BLOCKS: usize = SHORT + LONG + 2;

const _: () = assert!(FEWEST_EQUAL_BLOCKS >= PIPELINE_BLOCKS, "a truncated model is no longer than the model");

/// Equal blocks of a chunk whose activations need not go to the host. If the backward pass follows
/// at once, the last two stay on the device (`BLOCKS_THAT_STAY` in the compiler); and other chunks
/// may read what the chunk's first block leaves.
const BLOCKS_NOT_OFFLOADED: usize = 3;

/// Operators whose compilation each compiler keeps: those of about forty graphs. Plans with the
/// same graph follow one another in the space, so more would only take memory.
const REMEMBERED_OPERATORS: usize = 8192;

/// Compilers of the truncated models, each with its number of equal blocks. `None` if the model has
/// no equal blocks.
pub(super) struct TruncatedCompilers<'a>([Option<(usize, Compiler<'a>)>; 3]);

impl<'a> TruncatedCompilers<'a> {
    fn new(model: &Model, name: &'a str) -> Self {
        let compiler =
            |blocks| Some(Compiler::owning(model.with_repeated_layers(blocks)?, name).with_operator_limit(REMEMBERED_OPERATORS));
        Self([SHORT, LONG, PIPELINE_BLOCKS].map(|blocks| Some((blocks, compiler(blocks)?))))
    }

    fn of(&self, blocks: usize) -> Option<&Compiler<'a>> {
        self.0.iter().flatten().find(|(own, _)| *own == blocks).map(|(_, compiler)| compiler)
    }
}

/// Communication that a truncated model counts as taking no time, because it may differ from that
/// of the layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct LeftOut {
    /// Messages between stages: between unequal meshes, neither their sizes nor their ranks are
    /// those of the truncated model.
    pub(super) messages: bool,
    /// Gradient sums of a table that the first and the last stage share: they may lie nearer to
    /// each other than in the truncated model.
    pub(super) sums_over_stages: bool,
}

/// Costs of a layout's blocks, read from compiled truncated models.
#[derive(Clone, Debug)]
pub(super) struct TruncatedModel {
    /// The model's first block and an equal one.
    first: ChunkCost,
    /// The shorter stack; without a pipeline, with the model's first and last block.
    short: ChunkCost,
    /// The longer stack; likewise.
    long: ChunkCost,
    /// An equal block and the model's last.
    last: ChunkCost,
    /// Whether it is a pipeline.
    is_pipeline: bool,
    /// The same with full recomputation, for layouts that recompute part of the blocks.
    all_recomputed: Option<Arc<Self>>,
    /// Whether it runs several micro-batches. Then work that is done once a step is in no pass.
    pub(super) has_several_micro_batches: bool,
    /// Least extra time, in picoseconds, of a message between stages that share no node, over the
    /// time that this model gives messages.
    pub(super) extra_between_nodes: f64,
    /// Bytes of the largest message between stages.
    pub(super) message_bytes: f64,
}

impl TruncatedModel {
    /// Compiles and times the truncated models of a plan with 1 or [`TRUNCATED_STAGES`] stages of
    /// one chunk each. If `kind` is given, all devices are of that kind of the topology.
    fn new(
        compilers: &TruncatedCompilers<'_>,
        plan: &Plan,
        (topology, costs): (&Topology, &CostModel),
        rates: &MemoryRates,
        micro_batches: usize,
        kind: Option<usize>,
        left_out: LeftOut,
    ) -> Result<Self, Mistake> {
        let is_pipeline = plan.layout.pipeline == TRUNCATED_STAGES;
        let (extra_between_nodes, message_bytes) = (Cell::new(0.0), Cell::new(0.0));
        let costs_of_stages = |blocks: usize, cuts: Option<Vec<usize>>| -> Result<Vec<ChunkCost>, Mistake> {
            let Some(compiler) = compilers.of(blocks) else { return Ok(Vec::new()) };
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
            message_bytes.set(largest_message(&program));
            if left_out.messages {
                leave_out_messages(&program.lists, &mut times);
            } else {
                // With a given kind of device, the nodes are not known.
                let nodes = kind.is_none().then_some(topology);
                extra_between_nodes.set(equalise_messages(&program, &mut times, nodes));
            }
            let timed = program.lists.iter().zip(&times);
            Ok(timed.map(|(list, times)| ChunkCost::of(&TimedList { list, times, overlap: &plan.overlap }, rates)).collect())
        };
        let stages = if is_pipeline {
            costs_of_stages(PIPELINE_BLOCKS, Some(vec![2, SHORT, LONG, 2]))?
        } else {
            let (short, long) = (costs_of_stages(SHORT, None)?, costs_of_stages(LONG, None)?);
            short.into_iter().take(1).chain(long.into_iter().take(1)).collect()
        };
        let at = |index: usize| stages[index];
        let none = ChunkCost::default();
        let [first, short, long, last] = if is_pipeline { [at(0), at(1), at(2), at(3)] } else { [none, at(0), at(1), none] };
        Ok(Self {
            first,
            short,
            long,
            last,
            is_pipeline,
            all_recomputed: None,
            has_several_micro_batches: micro_batches > 1,
            extra_between_nodes: extra_between_nodes.get(),
            message_bytes: message_bytes.get(),
        })
    }

    /// Joins the models of a layout without recomputation and with full recomputation into one of
    /// layouts that recompute part of the blocks.
    fn partly_recomputed(none: &Self, all: Arc<Self>) -> Self {
        Self { all_recomputed: Some(all), ..none.clone() }
    }

    /// Returns the least cost of a chunk.
    pub(super) fn chunk(&self, chunk: Chunk) -> ChunkCost {
        let none = self.chunk_of_uniform_blocks(chunk);
        let Some(all) = self.all_recomputed.as_ref().filter(|_| chunk.recomputed > 0) else { return none };
        if chunk.recomputed >= chunk.equal_blocks {
            // If every block is recomputed, the last one's recomputation may precede the arrival
            // of the gradient, and is then in no chain. Extrapolation from `none` would count it.
            return all.chunk_of_uniform_blocks(chunk);
        }
        let per_block = |model: &Self| model.long.with(&model.short, |long, short| (long - short) / (LONG - SHORT) as f64);
        let extra = per_block(all).with(&per_block(self), |all, none| all - none);
        let count = chunk.recomputed as f64;
        // A zero means that no such chain exists here, so nothing is added to it.
        let add = |own: f64, extra: f64| if own > 0.0 { (own + count * extra).max(0.0) } else { own };
        let saved = add(none.micro_batch.saved, extra.micro_batch.saved);
        // While a recomputed block runs, it uses as much memory beyond `saved` as any other.
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
            // How much of the rest goes to the host depends on which blocks are recomputed.
            offloaded: OffloadedActivations::default(),
            ..none
        }
    }

    /// Returns the least cost of a chunk whose equal blocks are recomputed as in this model: all of
    /// them, or none.
    fn chunk_of_uniform_blocks(&self, chunk: Chunk) -> ChunkCost {
        let count = chunk.equal_blocks as f64;
        let cost = match (self.is_pipeline, chunk.has_first, chunk.has_last) {
            (false, ..) | (true, false, false) => self.extrapolate(&self.short, count - SHORT as f64),
            (true, true, false) => self.extrapolate(&self.first, count - 1.0),
            (true, false, true) => self.extrapolate(&self.last, count - 1.0),
            (true, true, true) => {
                // `first` and `last` have an equal block each, which the middle counts already.
                let (first, last) = (self.extrapolate(&self.first, -1.0), self.extrapolate(&self.last, -1.0));
                first.then(&self.extrapolate(&self.short, count - SHORT as f64)).then(&last)
            }
        };
        ChunkCost { offloaded: self.offloaded(chunk.equal_blocks), ..cost }
    }

    /// Returns the activations that `blocks` equal blocks move to the host.
    fn offloaded(&self, blocks: usize) -> OffloadedActivations {
        let per_block = |value: fn(&ChunkCost) -> f64| (value(&self.long) - value(&self.short)).max(0.0) / (LONG - SHORT) as f64;
        let bytes = per_block(|cost| cost.micro_batch.saved_activations);
        let certain = blocks.saturating_sub(BLOCKS_NOT_OFFLOADED) as f64;
        OffloadedActivations {
            bytes: bytes * certain,
            all_bytes: bytes * blocks as f64,
            forward: per_block(|cost| cost.kernels[0]) * certain,
            backward: per_block(|cost| cost.kernels[1]) * certain,
        }
    }

    /// Returns the cost of a chunk with `more` equal blocks than `from` has; `more` may be
    /// negative.
    fn extrapolate(&self, from: &ChunkCost, more: f64) -> ChunkCost {
        let steps = more / (LONG - SHORT) as f64;
        let slope = self.long.with(&self.short, |long, short| long - short);
        let mut cost = from.with(&slope, |own, slope| (own + steps * slope).max(0.0));
        // Work that comes in buckets may need fewer buckets per block in a longer stack. Each block
        // adds the least that a block takes on average or as an addition.
        let bucketed = |value: &dyn Fn(&ChunkCost) -> f64| {
            let (short, long) = (value(&self.short), value(&self.long));
            let average = (short / SHORT as f64).min(long / LONG as f64);
            (value(from) + more * average.min((long - short) / (LONG - SHORT) as f64)).max(0.0)
        };
        cost.shard_collectives = StreamTime {
            per_micro_batch: bucketed(&|cost| cost.shard_collectives.per_micro_batch),
            per_step: bucketed(&|cost| cost.shard_collectives.per_step),
        };
        cost.replica_collectives = StreamTime {
            per_micro_batch: bucketed(&|cost| cost.replica_collectives.per_micro_batch),
            per_step: bucketed(&|cost| cost.replica_collectives.per_step),
        };
        cost.tail.from_compute.end = bucketed(&|cost| cost.tail.from_compute.end);
        cost.tail.from_arrival.end = bucketed(&|cost| cost.tail.from_arrival.end);
        cost.update = bucketed(&|cost| cost.update);
        cost.gather_time = bucketed(&|cost| cost.gather_time);
        // A pass uses the memory beyond `saved` for one block at a time. With fewer blocks than
        // were compiled, that memory is not known.
        let beyond_saved = if more < 0.0 { 0.0 } else { 1.0 };
        let MicroBatchMemory { saved, forward_peak, backward_peak, .. } = from.micro_batch;
        cost.micro_batch.forward_peak = cost.micro_batch.saved + beyond_saved * (forward_peak - saved);
        cost.micro_batch.backward_peak = cost.micro_batch.saved + beyond_saved * (backward_peak - saved);
        cost
    }
}
