//! Mixtral's mixtures of experts (Jiang et al. 2024) with Hugging Face's names; the rest of it is a Llama.
//! There is no auxiliary loss that balances the experts. Experts that every token goes to, and dense layers before the first mixture, are
//! DeepSeek's (2024).

use super::llama::{Llama, LlamaShape, WEIGHTS};
use crate::builder::{MixtureShape, dimension};
use crate::graph::TensorId;

/// Which layers are mixtures, and of what.
#[derive(Clone, Copy)]
pub(crate) struct Mixtures {
    pub(crate) shape: MixtureShape,
    /// Inner width of an expert.
    pub(crate) ffn: usize,
    /// Inner width of the experts that every token goes to, all together.
    pub(crate) shared_ffn: Option<usize>,
    /// Every so many layers one is a mixture, the last of them.
    pub(crate) every: usize,
    /// Layers before the first that may be one.
    pub(crate) first: usize,
}

impl Mixtures {
    /// Whether a layer is a mixture.
    pub(super) fn has(&self, layer: usize) -> bool {
        layer >= self.first && (layer - self.first + 1).is_multiple_of(self.every)
    }
}

impl Llama<'_> {
    /// What stands in a layer's feed-forward network's place.
    pub(super) fn mixture(&mut self, module: &str, x: TensorId, mixtures: Mixtures) -> TensorId {
        let LlamaShape { hidden, sequence, .. } = *self.shape;
        let Mixtures { shape, ffn, shared_ffn, .. } = mixtures;
        let name = |part: &str| format!("{module}.{part}");
        let [experts, inner, hidden] = [dimension("experts", shape.experts), dimension("ffn", ffn), dimension("hidden", hidden)];
        let public = vec![experts.extent, hidden.extent];
        let router = self.builder.parameter(name("gate.weight"), vec![experts, hidden], public, WEIGHTS);
        let (slots, routing) = self.builder.dispatch(module, x, router, &shape);
        let experts_name = name("experts");
        let [w1, w3, w2] = [("w1", [experts, inner, hidden]), ("w3", [experts, inner, hidden]), ("w2", [experts, hidden, inner])]
            .map(|(matrix, dimensions)| self.builder.expert_parameter(&experts_name, matrix, dimensions, WEIGHTS));
        let gate = self.builder.expert_matmul(&name("experts.w1"), slots, w1);
        let up = self.builder.expert_matmul(&name("experts.w3"), slots, w3);
        let y = self.builder.silu_multiply(&name("experts.act"), gate, up);
        let y = self.builder.expert_matmul(&name("experts.w2"), y, w2);
        let y = self.builder.combine(module, y, &routing, sequence, &shape);
        match shared_ffn {
            Some(shared) => {
                let always = self.dense(&name("shared_experts"), x, shared);
                self.builder.add(&name("shared_experts.sum"), y, always)
            }
            None => y,
        }
    }
}
