//! Families of layouts: every mesh, micro-batch, schedule and recomputation of a search space.

use super::divisors::{divisors, greatest_common_divisor};
use super::meshes::MeshSizes;
use super::schedules::schedules;
use super::stage_meshes::unequal_meshes;
use super::{Family, Space};
use foretell_program::{ContextMethod, Layout, Recompute, StageLayout};

/// Micro-batches of at most this many samples are in the space for nearly any number of
/// micro-batches: with few samples, activations need neither recomputation nor ZeRO 3, whatever the
/// global batch.
pub(super) const ALWAYS_CONSIDERED: usize = 4;

/// The most micro-batches of such a step: longer steps take too long to simulate.
pub(super) const MOST_SMALL_MICRO_BATCHES: usize = 4096;

/// The most micro-batches of a step with larger micro-batches, unless the user fixes the
/// micro-batch or the pipeline is long.
pub(super) const MOST_MICRO_BATCHES: usize = 128;

/// The most micro-batches for each stage of a long pipeline. At 32 the bubble is 3 % of the step
/// even with one chunk a stage.
pub(super) const MICRO_BATCHES_PER_STAGE: usize = 32;

/// Returns `true` if the search considers `micro_batches` micro-batches of `micro_batch` samples in
/// a step of `pipeline` stages.
pub(super) fn considers(micro_batch: usize, micro_batches: usize, pipeline: usize) -> bool {
    let most = MOST_MICRO_BATCHES.max(MICRO_BATCHES_PER_STAGE * pipeline);
    micro_batches <= most || micro_batch <= ALWAYS_CONSIDERED && micro_batches <= MOST_SMALL_MICRO_BATCHES
}

impl Space<'_> {
    /// Returns every family over at most as many ranks as there are devices.
    ///
    /// The ranks of a mesh are a divisor of the number of devices, or of the devices of the first
    /// nodes. Further meshes leave devices idle that the batch, the model or the fixed sizes cannot
    /// use. If `data`, `tensor` and `pipeline` are all fixed, there is only that mesh.
    pub(crate) fn families(&self) -> Vec<Family> {
        self.families_until(&|| false).expect("invariant: nothing interrupts it")
    }

    /// Returns the same families as [`Self::families`], or `None` if `is_over` returns `true`
    /// before all are listed: on very many devices that takes seconds.
    pub(crate) fn families_until(&self, is_over: &dyn Fn() -> bool) -> Option<Vec<Family>> {
        let mut families = self.families_with_stage_meshes();
        let has_cuts = |family: &Family| self.fixed.cuts.as_ref().is_none_or(|cuts| cuts.len() == family.layout.pipeline);
        families.retain(|family| self.fixed.shares.is_none() && has_cuts(family));
        if self.fixed.stages.is_some() {
            return Some(families);
        }
        for context in self.context_sizes() {
            for expert in self.expert_sizes() {
                for sizes in self.meshes(context, expert) {
                    if is_over() {
                        return None;
                    }
                    families.extend(self.families_of_mesh(sizes, context, expert));
                }
            }
        }
        Some(families)
    }

    /// Returns the families of one mesh: equal and unequal shares of the samples, with every way to
    /// use `expert`, `context` and sequence parallelism.
    pub(super) fn families_of_mesh(&self, sizes: MeshSizes, context: usize, expert: usize) -> Vec<Family> {
        let MeshSizes { data, tensor, pipeline } = sizes;
        let is_possible = pipeline <= self.model.blocks && tensor.checked_mul(context).is_some();
        let has_equal_shares = self.global_batch.is_multiple_of(data * expert) && self.fixed.shares.is_none();
        let unequal_shares = self.unequal_shares(sizes, context, expert);
        let mut families = Vec::new();
        if !is_possible || !has_equal_shares && unequal_shares.is_empty() {
            return families;
        }
        let has_experts = self.model.experts.is_some();
        let expert_tensors = [None, Some(1)].into_iter().filter(|split| split.is_none() || has_experts && tensor > 1);
        let usual: &[ContextMethod] = match (context, tensor) {
            (1, _) => &[ContextMethod::Gather],
            // Heads are sharded over one axis only.
            (_, 1) => &ContextMethod::ALL,
            _ => &[ContextMethod::Gather, ContextMethod::Ring],
        };
        let methods = self.fixed.context_method.as_ref().map_or(usual, std::slice::from_ref);
        for expert_tensor in expert_tensors {
            for sequence_parallel in self.sequence_parallel(tensor) {
                for &context_method in methods {
                    let axes = Layout { data, tensor, pipeline, context, expert, ..self.template() };
                    let mesh = Layout { expert_tensor, sequence_parallel, context_method, ..axes };
                    if has_equal_shares {
                        families.extend(self.with_micro_batches(&mesh, self.global_batch / data / expert));
                    }
                    for shares in &unequal_shares {
                        let unequal = Layout { shares: Some(shares.clone()), ..mesh.clone() };
                        families.extend(self.with_micro_batches(&unequal, self.global_batch / shares.iter().sum::<usize>()));
                    }
                }
            }
        }
        families
    }

    /// Returns a layout with the fixed or usual value of every field that no family varies.
    fn template(&self) -> Layout {
        Layout {
            zero: 0,
            shard_group: None,
            bucket: self.bucket_sizes[0],
            offload: self.fixed.offload.unwrap_or(self.base.offload),
            collective: self.fixed.collective.unwrap_or(self.base.collective),
            context_order: self.fixed.context_order.unwrap_or(self.base.context_order),
            loss_chunk: self.fixed.loss_chunk.or(self.base.loss_chunk),
            mlp_chunk: self.fixed.mlp_chunk.or(self.base.mlp_chunk),
            ..self.base.clone()
        }
    }

    /// Returns the families of pipelines whose stages have their own meshes.
    fn families_with_stage_meshes(&self) -> Vec<Family> {
        let fixed = self.fixed;
        if let Some(stages) = &fixed.stages {
            return self.families_of_stages(stages);
        }
        let is_open = fixed.data.is_none()
            && fixed.tensor.is_none()
            && [fixed.context, fixed.expert].iter().all(|size| size.is_none_or(|size| size == 1))
            && self.base.stages.is_none()
            && fixed.stage_places.is_none();
        if !is_open {
            return Vec::new();
        }
        unequal_meshes(&self.devices.runs).iter().flat_map(|stages| self.families_of_stages(stages)).collect()
    }

    /// Returns the families whose stages have exactly these meshes.
    fn families_of_stages(&self, stages: &[StageLayout]) -> Vec<Family> {
        let pipeline = stages.len();
        let (Some(first), Some(last)) = (stages.first(), stages.last()) else { return Vec::new() };
        let devices: usize = stages.iter().map(|stage| stage.data.saturating_mul(stage.tensor)).fold(0, usize::saturating_add);
        let contradicts = self.fixed.pipeline.is_some_and(|fixed| fixed != pipeline)
            || self.fixed.virtual_stages.is_some_and(|fixed| fixed != 1)
            || devices > self.devices.count
            || pipeline > self.model.blocks;
        // Gradients of parameters that the first and the last stage share are summed rank by rank,
        // so these two need equal meshes.
        let ends_match = !self.model.shares_parameters || (first.data, first.tensor) == (last.data, last.tensor);
        if contradicts || !ends_match {
            return Vec::new();
        }
        let multiple = |left: usize, right: usize| (left / greatest_common_divisor(left, right)).saturating_mul(right);
        // Every stage must be able to divide a micro-batch among its data-parallel ranks.
        let samples_unit = stages.iter().fold(1, |all, stage| multiple(all, stage.data));
        if !self.global_batch.is_multiple_of(samples_unit) {
            return Vec::new();
        }
        let mesh = Layout { stages: Some(stages.to_vec()), pipeline, ..self.template() };
        let unit = samples_unit / first.data;
        let families = self.with_micro_batches(&mesh, self.global_batch / first.data).into_iter();
        families.filter(|family| family.layout.micro_batch.is_multiple_of(unit) && family.layout.virtual_stages == 1).collect()
    }

    pub(super) fn sequence_parallel(&self, tensor: usize) -> Vec<bool> {
        match self.fixed.sequence_parallel {
            Some(fixed) => vec![fixed],
            None if tensor > 1 && self.model.sequence.is_some_and(|sequence| sequence.is_multiple_of(tensor)) => {
                vec![false, true]
            }
            None => vec![self.base.sequence_parallel && tensor > 1],
        }
    }

    /// Returns the families of a mesh whose ranks have `samples` samples of each step: every
    /// micro-batch, schedule and recomputation.
    fn with_micro_batches(&self, mesh: &Layout, samples: usize) -> Vec<Family> {
        let mut families = Vec::new();
        for micro_batch in divisors(samples) {
            let micro_batches = samples / micro_batch;
            let usual = considers(micro_batch, micro_batches, mesh.pipeline);
            let is_considered = self.fixed.micro_batch.map_or(usual, |fixed| fixed == micro_batch);
            if !is_considered {
                continue;
            }
            let selective = self.model.has_attention.then_some(Recompute::Selective);
            let full = self.model.is_recomputable.then_some(Recompute::Full);
            let usual: Vec<Recompute> = [Recompute::None].into_iter().chain(selective).chain(full).collect();
            for (schedule, virtual_stages) in schedules(mesh, self.model.blocks, micro_batches, self.fixed, self.limits) {
                for recompute in self.fixed.recompute.as_ref().map_or(&usual[..], std::slice::from_ref) {
                    let recompute = recompute.clone();
                    let layout = Layout { micro_batch, schedule, virtual_stages, recompute, ..mesh.clone() };
                    families.push(Family { layout, micro_batches });
                }
            }
        }
        families
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::{DeviceFacts, Fixed, ModelFacts};
    use foretell_program::Schedule;

    fn layouts(devices: usize, blocks: usize, global_batch: usize, fixed: &Fixed) -> Vec<Layout> {
        let base = Layout::default();
        let space = Space {
            base: &base,
            fixed,
            limits: None,
            global_batch,
            model: ModelFacts { blocks, work: vec![1.0; blocks], is_recomputable: true, ..ModelFacts::default() },
            devices: DeviceFacts { count: devices, per_node: devices, ..DeviceFacts::default() },
            bucket_sizes: vec![base.bucket],
            offloads: &[],
        };
        space.families().iter().flat_map(|family| space.variants(family)).collect()
    }

    #[test]
    fn fixed_fields_keep_their_values_and_the_others_are_enumerated() {
        let schedule = Schedule::ALL[0];
        let fixed = format!("tensor=2, schedule={schedule},recompute=none").parse().expect("it is well formed");
        let layouts = layouts(8, 10, 16, &fixed);
        assert!(layouts.iter().all(|layout| layout.tensor == 2 && layout.schedule == schedule));
        let meshes: std::collections::BTreeSet<_> = layouts.iter().map(|layout| (layout.data, layout.pipeline)).collect();
        assert_eq!(meshes.into_iter().collect::<Vec<_>>(), [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)]);
    }

    #[test]
    fn a_fixed_mesh_need_not_divide_the_devices() {
        let fixed = format!("data=3,tensor=1,pipeline=2,micro_batch=2,recompute=none,schedule={},zero=0", Schedule::default());
        let fixed = fixed.parse().expect("well formed");
        let found = layouts(8, 10, 12, &fixed);
        assert!(found.contains(&Layout { data: 3, pipeline: 2, micro_batch: 2, ..Layout::default() }), "{found:?}");
        assert!(layouts(5, 10, 12, &fixed).is_empty(), "there are too few devices");
        let enormous: Fixed = "data=4294967296,tensor=4294967296,pipeline=2".parse().expect("well formed");
        assert!(layouts(8, 10, 12, &enormous).is_empty());
    }
}
