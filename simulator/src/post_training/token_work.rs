//! The work of one token in generation, from a model's graph: the parameters that it reads, and the
//! keys and values that it adds to the cache.
//!
//! It must not know engines or devices.

use foretell_models::{Graph, GraphOptions, Kernel, Model, ModelError, Role, TensorId};
use std::collections::BTreeSet;

/// Name of the dimension over experts.
const EXPERTS: &str = "experts";

/// Name of the dimension over the features of a position.
const HIDDEN: &str = "hidden";

/// The work of one token in generation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TokenWork {
    /// All parameters of the model.
    pub parameters: f64,
    /// Parameters that every token reads: all except experts, and except tables of which a token
    /// reads only one row.
    pub dense: f64,
    /// Parameters of all experts.
    pub experts: f64,
    /// Share of the experts that a token is routed to; 1 without experts.
    pub expert_share: f64,
    /// Elements of a token's keys and values, over all layers.
    pub cached: f64,
    /// Number of heads over which ranks can shard the keys and values. 1 if all heads share one
    /// set.
    pub cache_heads: usize,
    /// Floating-point operations of attention per attended token.
    pub score_flops: f64,
    /// Number of layers with attention.
    pub layers: usize,
    /// Features of a position.
    pub hidden: usize,
    /// Size of the vocabulary.
    pub vocabulary: usize,
}

impl TokenWork {
    /// The work of a model's tokens.
    ///
    /// # Errors
    /// [`ModelError`] if the model's sizes contradict each other.
    pub fn of(model: &Model) -> Result<Self, ModelError> {
        let graph = model.graph("model", &GraphOptions::ONE)?;
        let tables = tables(&graph);
        let mut work = Self {
            vocabulary: model.sample().tokens().map_or(0, |(_, vocabulary)| vocabulary),
            expert_share: model.experts().map_or(1.0, |experts| model.experts_per_token() as f64 / experts as f64),
            ..Self::default()
        };
        for (id, tensor) in graph.parameters() {
            let elements = tensor.elements() as f64;
            work.parameters += elements;
            // The router, too, has a row for each expert, but every token reads all of it.
            let is_of_experts =
                tensor.dimensions.len() > 2 && tensor.dimensions.iter().any(|dimension| dimension.name == EXPERTS);
            match is_of_experts {
                true => work.experts += elements,
                false if tables.contains(&id) => {}
                false => work.dense += elements,
            }
            let hidden =
                tensor.dimensions.iter().filter(|dimension| dimension.name == HIDDEN).map(|dimension| dimension.extent).max();
            work.hidden = work.hidden.max(hidden.unwrap_or(0));
        }
        let latent = model.as_decoder().and_then(|sizes| Some(sizes.key_value_rank? + sizes.rotary_part.unwrap_or(0)));
        for operator in &graph.operators {
            let Kernel::Attention(sizes) = operator.kernel(&operator.extents()) else { continue };
            let values = sizes.value_dimension.map_or(sizes.head_dimension, |value| value.get() as usize);
            work.layers += 1;
            // With latent attention, engines cache the latent vector from which the keys and values
            // of all heads are computed (DeepSeek-AI 2024).
            work.cached += latent.unwrap_or(sizes.key_heads * (sizes.head_dimension + values)) as f64;
            work.cache_heads = if latent.is_some() { 1 } else { sizes.key_heads };
            work.score_flops += 2.0 * (sizes.key_heads * sizes.group * (sizes.head_dimension + values)) as f64;
        }
        Ok(work)
    }

    /// Floating-point operations of one token's products with parameters.
    pub fn product_flops(&self) -> f64 {
        2.0 * (self.dense + self.experts * self.expert_share)
    }

    /// Number of parameters that `tokens` tokens read together, if they choose experts uniformly.
    pub fn read_by(&self, tokens: f64) -> f64 {
        self.dense + self.experts * (1.0 - (1.0 - self.expert_share).powf(tokens))
    }
}

/// The parameters of which a token reads only one row: those that only embeddings read.
fn tables(graph: &Graph) -> BTreeSet<TensorId> {
    let is_parameter = |id: &TensorId| matches!(graph.tensor(*id).role, Role::Parameter(_));
    let read_by = |is_table: bool| -> BTreeSet<TensorId> {
        let operators = graph.operators.iter().filter(|operator| matches!(operator.kind, Kernel::Embedding { .. }) == is_table);
        operators.flat_map(|operator| operator.inputs.iter().map(|input| input.tensor)).filter(is_parameter).collect()
    };
    read_by(true).difference(&read_by(false)).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_of_llama_reads_all_but_the_embedding() {
        let work = TokenWork::of(&Model::named("llama3-8b").expect("in the zoo")).expect("sound");
        assert_eq!(work.parameters, 8_030_261_248.0);
        assert_eq!(work.parameters - work.dense, 128_256.0 * 4096.0);
        // 8 heads of 128 features, keys and values, in 32 layers.
        assert_eq!((work.cached, work.cache_heads, work.layers), (32.0 * 2.0 * 1024.0, 8, 32));
        assert_eq!((work.hidden, work.vocabulary), (4096, 128_256));
        assert_eq!(work.score_flops, 4.0 * 4096.0 * 32.0);
    }

    #[test]
    fn tokens_read_more_experts_together() {
        let work = TokenWork::of(&Model::named("mixtral-8x7b").expect("in the zoo")).expect("sound");
        assert_eq!(work.experts, 32.0 * 8.0 * 3.0 * 4096.0 * 14_336.0);
        assert_eq!(work.read_by(1.0), work.dense + work.experts / 4.0);
        assert!(work.read_by(64.0) > 0.999 * (work.dense + work.experts));
        assert!((work.product_flops() / 2.0 - 12.7e9).abs() < 0.2e9, "{}", work.product_flops());
    }

    #[test]
    fn a_head_that_shares_its_weights_reads_them() {
        let work = TokenWork::of(&Model::named("gpt2").expect("in the zoo")).expect("sound");
        assert!(work.dense > 123e6, "{}", work.dense);
    }
}
