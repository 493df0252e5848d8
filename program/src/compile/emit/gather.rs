//! Gathering parameters that ranks keep as shards: before the block that reads them, and while the
//! block before it computes.

use super::list::ListBuilder;
use super::live::LiveTensors;
use super::persistent::PersistentBuffers;
use super::stage::Stage;
use crate::collective::Collective;
use crate::compile::cuts::ChunkPass;
use crate::compile::state::ParameterGathers;
use crate::program::{BufferId, BufferRole, Phase};
use crate::schedule::{StagePass, Task};
use foretell_models::{OperatorId, Role};
use rustc_hash::FxHashMap;
use std::collections::BTreeSet;
use std::rc::Rc;

/// The operators of one block within a task, and the sharded buckets of the parameters that they
/// read.
pub(super) struct BlockParameters {
    /// The position of the first of these operators among the task's operators.
    pub(super) start: usize,
    buckets: BTreeSet<usize>,
}

/// The parameters that are gathered at the moment.
#[derive(Default)]
pub(super) struct GatheredParameters {
    /// By bucket: the buffer of each parameter, by name.
    gathered: FxHashMap<usize, FxHashMap<String, BufferId>>,
    /// The blocks of each pass, found when first asked for.
    blocks: FxHashMap<ChunkPass, Rc<[BlockParameters]>>,
}

impl GatheredParameters {
    /// The buffer of a gathered parameter.
    pub(super) fn find(&self, bucket: usize, name: &str) -> Option<BufferId> {
        self.gathered.get(&bucket)?.get(name).copied()
    }

    /// The blocks of a task, in order; empty if every rank keeps whole parameters.
    pub(super) fn blocks_of(&mut self, stage: &Stage<'_>, task: &Task) -> Rc<[BlockParameters]> {
        if stage.state.gathers == ParameterGathers::Never {
            return Rc::from([]);
        }
        let blocks = self.blocks.entry((task.chunk, task.pass)).or_insert_with(|| find_blocks(stage, task).into());
        Rc::clone(blocks)
    }

    /// Prepares the parameters of `block`, just before its first operator. Gathers those that are
    /// missing, and begins to gather those of the `next` block. With ZeRO 3, first drops parameters
    /// that neither block reads.
    pub(super) fn prepare(
        &mut self,
        list: &mut ListBuilder,
        stage: &Stage<'_>,
        persistent: &PersistentBuffers,
        live: &mut LiveTensors,
        (block, next): (&BlockParameters, Option<&BlockParameters>),
        phase: Phase,
    ) {
        let none = BTreeSet::new();
        let next = next.map_or(&none, |next| &next.buckets);
        if stage.state.gathers == ParameterGathers::EveryPass {
            let is_near = |bucket: usize| block.buckets.contains(&bucket) || next.contains(&bucket);
            self.gathered.retain(|&bucket, _| is_near(bucket));
            // Tensors made from dropped parameters, such as eight-bit copies, are dropped too.
            live.forget_shared(|tensor| {
                let Role::OfParameter(parameter) = stage.lowering.graph.tensor(tensor).role else { return false };
                let bucket = stage.state.bucket_of_parameter(stage.name(parameter));
                bucket.is_some_and(|bucket| stage.state.buckets[bucket].shards > 1 && !is_near(bucket))
            });
        }
        for &bucket in block.buckets.iter().chain(next) {
            let shard = persistent.buckets[bucket].parameters;
            self.gathered.entry(bucket).or_insert_with(|| gather(list, stage, bucket, shard, phase));
        }
    }
}

/// Gathers the shards of a bucket. Returns the buffer of each parameter, by name.
fn gather(list: &mut ListBuilder, stage: &Stage<'_>, index: usize, shard: BufferId, phase: Phase) -> FxHashMap<String, BufferId> {
    let bucket = &stage.state.buckets[index];
    let name = format!("parameters {index}");
    let root = list.add_buffer(&name, BufferRole::Parameter, vec![bucket.elements], stage.state.precision);
    list.collective_of_step(&name, Collective::AllGather, bucket.shard_group(), [shard, root], phase);
    let views = bucket.members.iter().map(|member| {
        let view = list.add_view(&member.name, root, member.offset, member.shape.clone());
        (member.name.clone(), view)
    });
    views.collect()
}

fn find_blocks(stage: &Stage<'_>, task: &Task) -> Vec<BlockParameters> {
    let graph = &stage.lowering.graph;
    let buckets_read = |id: OperatorId| {
        let parameters = stage.operator(id).inputs.iter().map(|input| match graph.tensor(input.tensor).role {
            // A tensor made from a parameter may be made just before this operator, which then
            // reads the parameter.
            Role::OfParameter(parameter) => stage.name(parameter),
            _ => stage.name(input.tensor),
        });
        let buckets = parameters.filter_map(|name| stage.state.bucket_of_parameter(name));
        buckets.filter(|&bucket| stage.state.buckets[bucket].shards > 1)
    };
    let mut blocks: Vec<BlockParameters> = Vec::new();
    let mut last_block = None;
    for (position, &id) in stage.operators_of(task).iter().enumerate() {
        let block = stage.operator(id).block;
        if last_block != Some(block) {
            last_block = Some(block);
            // Recomputed operators read parameters in the backward pass, too.
            let recomputed = if task.pass == StagePass::Forward { &[] } else { stage.recomputation.of_block(block) };
            let buckets = recomputed.iter().flat_map(|&id| buckets_read(id)).collect();
            blocks.push(BlockParameters { start: position, buckets });
        }
        if let Some(block) = blocks.last_mut() {
            block.buckets.extend(buckets_read(id));
            block.buckets.extend(stage.lowering.tiling.again_for(id).iter().flat_map(|&id| buckets_read(id)));
        }
    }
    blocks
}
