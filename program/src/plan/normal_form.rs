//! The normal form of a layout. A layout can be written in several ways: shares that are all equal,
//! the mesh of all stages repeated for each, a default stated in full. The normal form is the
//! shortest of these. Layouts that mean the same thing are equal in normal form, and compile to the
//! same Programs.

use super::{ContextOrder, Layout, Recompute, StageLayout};
use crate::mesh::Axis;

impl Layout {
    /// The layout in normal form. The meaning of an invalid layout may change.
    #[must_use]
    pub fn normalised(mut self) -> Self {
        if let Some(stages) = self.stages.take() {
            self.set_stages(stages);
        }
        if let Some(shares) = self.shares.take() {
            self.set_shares(shares);
        }
        if !self.cuts_sequences() {
            self.context_order = ContextOrder::default();
        }
        let usual_order = |order: &[Axis]| Axis::ALL.starts_with(order);
        self.placement = self.placement.filter(|order| !usual_order(order));
        self.stage_places = self.stage_places.filter(|places| !places.iter().copied().eq(0..self.pipeline));
        // Stages with their own meshes may differ in `data` and `tensor`, so no single number is
        // the default.
        if self.stages.is_none() {
            self.shard_group = self.shard_group.filter(|&ranks| ranks != self.data);
            self.expert_tensor = self.expert_tensor.filter(|&ranks| ranks != self.tensor);
        }
        if self.virtual_stages == 1 && self.schedule.allows_any_chunks() {
            self.schedule = self.schedule.of_one_chunk();
        }
        self.recompute = match self.recompute {
            Recompute::FullLayersOfStages(layers) if layers.len() == self.pipeline => Recompute::full_layers(layers),
            Recompute::FullLayers(0) => Recompute::None,
            other => other,
        };
        self
    }

    /// Sets the meshes of the stages: as one mesh for all if they are equal.
    fn set_stages(&mut self, stages: Vec<StageLayout>) {
        match stages.first() {
            Some(first) if stages.len() == self.pipeline && stages.iter().all(|stage| stage == first) => {
                let StageLayout { data, tensor, context, expert, shares } = first.clone();
                (self.data, self.tensor, self.context, self.expert, self.shares) = (data, tensor, context, expert, shares);
            }
            _ => self.stages = Some(stages),
        }
    }

    /// Sets the shares of the ranks along `data`: as a larger micro-batch if they are equal.
    fn set_shares(&mut self, shares: Vec<usize>) {
        let first = shares.first().copied().unwrap_or(0);
        let is_even = first > 0 && shares.len() == self.data && shares.iter().all(|&share| share == first);
        match self.micro_batch.checked_mul(first) {
            Some(micro_batch) if is_even => self.micro_batch = micro_batch,
            _ => self.shares = Some(shares),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn normalised(json: &str) -> Layout {
        serde_json::from_str::<Layout>(json).expect("a layout").normalised()
    }

    #[test]
    fn a_layout_has_one_normal_form_however_it_is_written() {
        let plain = normalised(r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 4, "zero": 1}"#);
        for written in [
            r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 2, "zero": 1, "shares": [2, 2]}"#,
            r#"{"pipeline": 2, "micro_batch": 4, "zero": 1, "stages": [{"data": 2, "tensor": 2}, {"data": 2, "tensor": 2}]}"#,
            r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 4, "zero": 1, "shard_group": 2, "expert_tensor": 2}"#,
            r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 4, "zero": 1, "placement": ["tensor", "context"]}"#,
            r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 4, "zero": 1, "stage_places": [0, 1]}"#,
            r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 4, "zero": 1, "schedule": "interleaved"}"#,
            r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 4, "zero": 1, "context_order": "contiguous"}"#,
            r#"{"data": 2, "tensor": 2, "pipeline": 2, "micro_batch": 4, "zero": 1, "recompute": {"full_layers_of_stages": [0, 0]}}"#,
        ] {
            assert_eq!(normalised(written), plain, "{written}");
        }
    }

    #[test]
    fn the_normal_form_keeps_choices_that_matter() {
        for written in [
            r#"{"data": 2, "shares": [1, 3]}"#,
            r#"{"context": 2, "context_order": "contiguous"}"#,
            r#"{"pipeline": 2, "micro_batch": 2, "stages": [{"data": 2}, {"tensor": 2}]}"#,
            r#"{"pipeline": 2, "stage_places": [1, 0], "placement": ["data"]}"#,
            r#"{"data": 4, "zero": 3, "shard_group": 2, "tensor": 4, "expert_tensor": 1}"#,
            r#"{"pipeline": 2, "recompute": {"full_layers_of_stages": [2, 0]}, "schedule": "interleaved", "virtual_stages": 2}"#,
        ] {
            let layout: Layout = serde_json::from_str(written).expect("a layout");
            assert_eq!(layout.clone().normalised(), layout, "{written}");
        }
    }
}
