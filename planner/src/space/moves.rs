//! The families one move away from a layout: another micro-batch, or a factor of one axis moved to
//! another.

use super::divisors::divisors;
use super::meshes::MeshSizes;
use super::sizes::world_size;
use super::{Family, Space};
use foretell_program::Layout;

/// Sizes of a mesh: `data`, `tensor`, `pipeline`, `context` and `expert`.
type Sizes = [usize; 5];

impl Space<'_> {
    /// Returns the families of the meshes that differ from that of `layout` by one move: a factor
    /// of one axis goes to another, or to or from devices that stay idle. Families of the layout's
    /// own mesh come first. Micro-batches have the size of that of `layout`, or the next larger or
    /// smaller size of the mesh. Empty for layouts with stage meshes or unequal shares.
    pub(crate) fn families_near(&self, layout: &Layout) -> Vec<Family> {
        if layout.stages.is_some() || layout.shares.is_some() {
            return Vec::new();
        }
        // Another `context_method` is a move by itself, so it is combined with the layout's own
        // mesh only.
        let own = [layout.data, layout.tensor, layout.pipeline, layout.context, layout.expert];
        let has_usual_form = |family: &Family| {
            let Layout { data, tensor, pipeline, context, expert, context_method, ref shares, .. } = family.layout;
            let has_method = context_method == layout.context_method || [data, tensor, pipeline, context, expert] == own;
            let has_whole_experts =
                Self::has_whole_experts(&family.layout) || family.layout.expert_tensor == layout.expert_tensor;
            shares.is_none() && has_method && has_whole_experts && self.has_usual_sequence(&family.layout)
        };
        let meshes = self.meshes_near(layout).into_iter();
        let families = meshes.map(|[data, tensor, pipeline, context, expert]| {
            let mut families = self.families_of_mesh(MeshSizes { data, tensor, pipeline }, context, expert);
            families.retain(has_usual_form);
            let sizes = || families.iter().map(|family| family.layout.micro_batch);
            let own = layout.micro_batch;
            let larger = sizes().filter(|&size| size > own).min().unwrap_or(own);
            let smaller = sizes().filter(|&size| size < own).max().unwrap_or(own);
            families.retain(|family| [own, larger, smaller].contains(&family.layout.micro_batch));
            families
        });
        families.flatten().collect()
    }

    fn meshes_near(&self, layout: &Layout) -> Vec<Sizes> {
        let Layout { data, tensor, pipeline, context, expert, .. } = *layout;
        let own = [data, tensor, pipeline, context, expert];
        let mut found = vec![own];
        let mut add = |sizes: Sizes| {
            if !found.contains(&sizes) && self.has_mesh(sizes) {
                found.push(sizes);
            }
        };
        for from in 0..own.len() {
            for factor in divisors(own[from]).into_iter().skip(1) {
                let mut less = own;
                less[from] /= factor;
                for to in (0..own.len()).filter(|&to| to != from) {
                    let mut moved = less;
                    moved[to] *= factor;
                    add(moved);
                }
                add(less);
            }
        }
        let most = self.devices.count / world_size(layout).max(1);
        for factor in 2..=most {
            for to in 0..own.len() {
                let mut more = own;
                more[to] *= factor;
                add(more);
            }
        }
        found
    }

    /// Returns `true` if the space may have a mesh of these sizes.
    fn has_mesh(&self, [data, tensor, pipeline, context, expert]: Sizes) -> bool {
        let fixed = self.fixed;
        let ranks = [tensor, pipeline, context, expert].into_iter().try_fold(data, usize::checked_mul);
        let is_open = |fixed: Option<usize>, size: usize| fixed.is_none_or(|fixed| fixed == size);
        let has_cuts = fixed.cuts.as_ref().is_none_or(|cuts| cuts.len() == pipeline);
        ranks.is_some_and(|ranks| ranks <= self.devices.count)
            && is_open(fixed.data, data)
            && is_open(fixed.pipeline, pipeline)
            && has_cuts
            && self.allows_tensor_size(tensor)
            && (tensor == 1 || self.model.heads.is_none_or(|heads| heads.is_multiple_of(tensor)) || fixed.tensor.is_some())
            && self.context_sizes().contains(&context)
            && self.expert_sizes().contains(&expert)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::space::{DeviceFacts, Fixed, ModelFacts};

    fn near(layout: &Layout, devices: usize, global_batch: usize, fixed: &str) -> Vec<Layout> {
        let (base, fixed): (Layout, Fixed) = (Layout::default(), fixed.parse().expect("well formed"));
        let space = Space {
            base: &base,
            fixed: &fixed,
            limits: None,
            global_batch,
            model: ModelFacts { blocks: 10, work: vec![1.0; 10], ..ModelFacts::default() },
            devices: DeviceFacts { count: devices, per_node: devices, ..DeviceFacts::default() },
            bucket_sizes: vec![base.bucket],
            offloads: &[],
        };
        space.families_near(layout).into_iter().map(|family| family.layout).collect()
    }

    #[test]
    fn a_move_gives_a_factor_of_one_axis_to_another() {
        let found = near(&Layout { data: 4, tensor: 2, ..Layout::default() }, 8, 16, "schedule=1f1b");
        let meshes: std::collections::BTreeSet<_> =
            found.iter().map(|neighbour| (neighbour.data, neighbour.tensor, neighbour.pipeline)).collect();
        let expected =
            [(1, 2, 1), (1, 2, 4), (1, 8, 1), (2, 2, 1), (2, 2, 2), (2, 4, 1), (4, 1, 1), (4, 1, 2), (4, 2, 1), (8, 1, 1)];
        assert_eq!(meshes.into_iter().collect::<Vec<_>>(), expected);
        let fixed = near(&Layout { data: 4, tensor: 2, ..Layout::default() }, 8, 16, "tensor=2");
        assert!(!fixed.is_empty() && fixed.iter().all(|neighbour| neighbour.tensor == 2));
    }

    #[test]
    fn the_next_micro_batch_of_an_odd_batch_is_no_double() {
        let found = near(&Layout { data: 8, ..Layout::default() }, 8, 1000, "data=8,tensor=1,pipeline=1");
        let sizes: std::collections::BTreeSet<usize> = found.iter().map(|neighbour| neighbour.micro_batch).collect();
        assert_eq!(sizes.into_iter().collect::<Vec<_>>(), [1, 5]);
    }
}
