//! The part of the space that an engineer would try first.
//!
//! It is small enough to be listed before anything else is known: meshes that use more than half of
//! the devices, `tensor` inside the nodes, and schedules with the fewest surprises. A search takes
//! its first answer from this part, and may end with any other layout.

use super::families::ALWAYS_CONSIDERED;
use super::meshes::MeshSizes;
use super::{Family, Space};
use foretell_program::{ContextMethod, Layout, Recompute};

/// With at least this many positions of a sequence on each rank, context parallelism is usual.
const MANY_POSITIONS: usize = 16_384;

impl Space<'_> {
    /// Returns the families to try first, as far as they are listed before `is_over` returns
    /// `true`. Empty if the fixed fields leave none.
    pub(crate) fn usual_families(&self, is_over: &dyn Fn() -> bool) -> Vec<Family> {
        let fixed = self.fixed;
        if fixed.stages.is_some() || fixed.shares.is_some() || self.base.stages.is_some() {
            return Vec::new();
        }
        let mut families = Vec::new();
        for context in self.context_sizes().into_iter().filter(|&size| self.is_usual_context(size)) {
            for expert in self.expert_sizes() {
                let devices = context.checked_mul(expert).map_or(0, |ranks| self.devices.count / ranks);
                let usual = self.meshes(context, expert).into_iter().filter(|sizes| self.is_usual_mesh(*sizes, devices));
                for sizes in usual.take_while(|_| !is_over()) {
                    families
                        .extend(self.families_of_mesh(sizes, context, expert).into_iter().filter(|family| self.is_usual(family)));
                }
            }
        }
        let has_cuts = |family: &Family| fixed.cuts.as_ref().is_none_or(|cuts| cuts.len() == family.layout.pipeline);
        families.retain(has_cuts);
        families
    }

    /// Returns `true` if an expert would try a family first. Its micro-batches have up to four
    /// samples, or more if a replica is on one device. It recomputes nothing (the search adds
    /// recomputation until a layout fits), and each expert is whole on a rank.
    pub(crate) fn is_experts_choice(&self, family: &Family) -> bool {
        let Layout { tensor, pipeline, context, expert, micro_batch, ref recompute, .. } = family.layout;
        let is_alone = tensor * pipeline * context * expert == 1;
        let is_usual_size = micro_batch <= ALWAYS_CONSIDERED || is_alone;
        let is_small = is_usual_size || self.fixed.micro_batch.is_some();
        let keeps_all = *recompute == Recompute::None || self.fixed.recompute.is_some();
        is_small && keeps_all && Self::has_whole_experts(&family.layout)
    }

    fn is_usual_context(&self, size: usize) -> bool {
        let needed = self.model.sequence.unwrap_or(0) / MANY_POSITIONS;
        size == 1 || size <= needed || self.fixed.context.is_some()
    }

    fn is_usual_mesh(&self, sizes: MeshSizes, devices: usize) -> bool {
        let MeshSizes { data, tensor, pipeline } = sizes;
        let is_inside_node = tensor <= self.devices.per_node.max(1) || self.fixed.tensor.is_some();
        // The compiler replicates attention whose heads it cannot shard, which no framework runs.
        let divides_heads = self.model.heads.is_none_or(|heads| heads.is_multiple_of(tensor)) || self.fixed.tensor.is_some();
        let stages_have_layers = pipeline <= self.model.blocks.saturating_sub(2).max(1) || self.fixed.pipeline.is_some();
        let is_full = 2 * data * tensor * pipeline > devices || self.fixed.data.is_some();
        is_inside_node && divides_heads && stages_have_layers && is_full
    }

    fn is_usual(&self, family: &Family) -> bool {
        let layout = &family.layout;
        let is_usual_schedule = layout.schedule == self.base.schedule
            || layout.schedule.allows_any_chunks()
            || self.limits.is_some_and(|limits| !limits.has(self.base.schedule))
            || self.fixed.schedule.is_some();
        let is_usual_context = layout.context_method == ContextMethod::default() || self.fixed.context_method.is_some();
        is_usual_schedule && self.has_usual_sequence(layout) && is_usual_context && layout.shares.is_none()
    }

    /// Returns `true` if norms are sharded along the sequence whenever `tensor` shards products.
    pub(super) fn has_usual_sequence(&self, layout: &Layout) -> bool {
        layout.sequence_parallel
            || layout.tensor == 1
            || self.fixed.sequence_parallel.is_some()
            || self.sequence_parallel(layout.tensor).len() == 1
    }

    /// Returns `true` if each expert is whole on a rank.
    pub(super) fn has_whole_experts(layout: &Layout) -> bool {
        layout.expert == 1 || layout.tensor == 1 || layout.expert_tensor == Some(1)
    }
}
