//! GPT-2's architecture (Radford et al. 2019) with Hugging Face's names. Dropout is of the embedding and of what goes into the residual
//! stream, and of attention's probabilities.

use crate::DropoutRate;
use crate::builder::{AttentionKind, GraphBuilder, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::specification::GraphOptions;

/// A GPT's sizes.
pub(crate) struct GptShape {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) ffn: usize,
    pub(crate) vocabulary: usize,
    pub(crate) sequence: usize,
    pub(crate) tied_embeddings: bool,
    pub(crate) dropout: DropoutRate,
    pub(crate) attention_dropout: DropoutRate,
}

/// GPT-2's epsilon of its norms.
const EPSILON: Epsilon = Epsilon::new(5);

/// GPT-2's standard deviation of new weights.
const WEIGHTS: Initialisation = Initialisation::Normal(0.02);

pub(crate) fn gpt(name: &str, shape: &GptShape, options: &GraphOptions) -> Graph {
    let mut gpt = Gpt { builder: GraphBuilder::new(name, options), shape };
    let positions = vec![dimension(BATCH, options.batch), dimension("sequence", shape.sequence)];
    gpt.builder.block("embedding", false);
    let tokens = gpt.builder.input(InputKind::Tokens, positions.clone());
    let table = gpt.table("transformer.wte.weight");
    let words = gpt.builder.embedding("transformer.wte", tokens, table);
    let position_table = gpt.builder.parameter(
        "transformer.wpe.weight".into(),
        vec![dimension("sequence", shape.sequence), dimension("hidden", shape.hidden)],
        vec![shape.sequence, shape.hidden],
        WEIGHTS,
    );
    let x = gpt.builder.bias_add("transformer.wpe", words, position_table);
    let mut x = gpt.builder.dropout("transformer.drop", x, shape.dropout);
    for layer in 0..shape.layers {
        gpt.builder.block(format!("layer {layer}"), true);
        x = gpt.layer(&format!("transformer.h.{layer}"), x);
    }
    gpt.builder.block("head", false);
    let normed = gpt.builder.layer_norm("transformer.ln_f", x, EPSILON);
    let head = if shape.tied_embeddings { table } else { gpt.table("lm_head.weight") };
    let logits = gpt.builder.matmul("lm_head", normed, head, 1, WeightLayout::OutIn);
    let labels = gpt.builder.input(InputKind::Labels, positions);
    gpt.builder.cross_entropy("loss", logits, labels);
    gpt.builder.finish(shape.sequence, Some(shape.sequence))
}

struct Gpt<'a> {
    builder: GraphBuilder,
    shape: &'a GptShape,
}

impl Gpt<'_> {
    fn table(&mut self, name: &str) -> TensorId {
        let (vocabulary, hidden) = (self.shape.vocabulary, self.shape.hidden);
        let dimensions = vec![dimension("vocabulary", vocabulary), dimension("hidden", hidden)];
        self.builder.parameter(name.into(), dimensions, vec![vocabulary, hidden], WEIGHTS)
    }

    fn layer(&mut self, module: &str, x: TensorId) -> TensorId {
        let GptShape { layers, hidden, heads, ffn, .. } = *self.shape;
        let name = |part: &str| format!("{module}.{part}");
        let head_dimension = hidden / heads;
        let hidden_dimension = dimension("hidden", hidden);
        let head_dimensions = [dimension("heads", heads), dimension("head_dimension", head_dimension)];
        let projections = [dimension("projections", 3), head_dimensions[0], head_dimensions[1]];
        // Projections into the residual stream are scaled by its depth, as GPT-2 scales them.
        let residual = Initialisation::Normal(0.02 / (2.0 * layers as f64).sqrt());

        let y = self.builder.layer_norm(&name("ln_1"), x, EPSILON);
        let weight_dimensions = [&[hidden_dimension][..], &projections].concat();
        let y = self.linear(&name("attn.c_attn"), y, weight_dimensions, 1, [hidden, 3 * hidden], WEIGHTS);
        let qkv = self.builder.split(&name("attn.split"), y);
        let kind = AttentionKind { causal: true, scaled: true, relative: None, dropout: self.shape.attention_dropout };
        let y = self.builder.attention(&name("attn"), qkv, kind);
        let weight_dimensions = vec![head_dimensions[0], head_dimensions[1], hidden_dimension];
        let y = self.linear(&name("attn.c_proj"), y, weight_dimensions, 2, [hidden, hidden], residual);
        let y = self.builder.dropout(&name("attn.resid_dropout"), y, self.shape.dropout);
        let x = self.builder.add(&name("attn.residual"), x, y);

        let y = self.builder.layer_norm(&name("ln_2"), x, EPSILON);
        let inner = dimension("ffn", ffn);
        let y = self.linear(&name("mlp.c_fc"), y, vec![hidden_dimension, inner], 1, [hidden, ffn], WEIGHTS);
        let y = self.builder.gelu(&name("mlp.act"), y);
        let y = self.linear(&name("mlp.c_proj"), y, vec![inner, hidden_dimension], 1, [ffn, hidden], residual);
        let y = self.builder.dropout(&name("mlp.dropout"), y, self.shape.dropout);
        self.builder.add(&name("mlp.residual"), x, y)
    }

    /// A `Conv1D`: the weight is `[inputs.., outputs..]`, then a bias.
    fn linear(
        &mut self,
        name: &str,
        x: TensorId,
        weight_dimensions: Vec<crate::Dimension>,
        contracted: usize,
        shape: [usize; 2],
        initialisation: Initialisation,
    ) -> TensorId {
        let bias_dimensions = weight_dimensions[contracted..].to_vec();
        let weight = self.builder.parameter(format!("{name}.weight"), weight_dimensions, shape.to_vec(), initialisation);
        let bias = self.builder.parameter(format!("{name}.bias"), bias_dimensions, vec![shape[1]], Initialisation::Zeros);
        let y = self.builder.matmul(name, x, weight, contracted, WeightLayout::InOut);
        self.builder.bias_add(&format!("{name}.bias"), y, bias)
    }
}
