//! Whisper (Radford et al. 2022) with Hugging Face's names: two convolutions over the frames of a
//! spectrogram, an encoder of their output, and a decoder of text that attends to it. It must not
//! know how a graph is sharded or computed.

use super::pre_norm::{self, AttentionNames, LayerSizes, WEIGHTS};
use super::{Check, Family};
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, dimension};
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::{Epsilon, WeightLayout};
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A Whisper in any size. Planned and simulated, not executed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Whisper {
    /// Layers of the encoder.
    pub layers: usize,
    /// Layers of the decoder. `None`: as many as the encoder has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder_layers: Option<usize>,
    /// Features of a position.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of the feed-forward networks.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Frequency bins of a frame of the spectrogram.
    pub mel_bins: usize,
    /// Positions of the encoder: half the frames of a sample.
    #[serde(default = "source_positions")]
    pub source_positions: usize,
    /// Tokens of a sample's text.
    pub target_sequence: usize,
    /// Rows of the decoder's table of positions. `None`: `target_sequence`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_rows: Option<usize>,
    /// Dropout rate of the inputs and of what each layer adds to the residual streams.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub dropout: DropoutRate,
    /// Dropout rate of attention's probabilities.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub attention_dropout: DropoutRate,
}

/// 30 seconds in frames of 10 milliseconds, of which the second convolution takes every other.
fn source_positions() -> usize {
    1500
}

impl Whisper {
    /// Sets the tokens of a sample. The table of positions keeps its rows.
    pub(crate) fn set_target(&mut self, tokens: usize) {
        let rows = self.target_rows.unwrap_or(self.target_sequence);
        self.target_sequence = tokens;
        self.target_rows = Some(rows).filter(|&rows| rows != tokens);
    }
}

/// Epsilon of the norms.
const EPSILON: Epsilon = Epsilon::new(5);

/// Positions that a convolution reads for one of its results (Radford et al. 2022, section 2.2).
const WINDOW: usize = 3;

impl Family for Whisper {
    const NAME: &'static str = "whisper";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    fn examples() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, ffn, target_sequence, .. } = *self;
        let (decoder_layers, rows) = (self.decoder_layers.unwrap_or(layers), self.target_rows.unwrap_or(target_sequence));
        check.sizes(&[
            ("decoder_layers", decoder_layers),
            ("vocab", self.vocab),
            ("mel_bins", self.mel_bins),
            ("source_positions", self.source_positions),
            ("target_sequence", target_sequence),
            ("target_rows", rows),
        ])?;
        check.transformer([layers, hidden, heads, ffn])?;
        check.layers_of_each(layers.max(decoder_layers))?;
        if rows < target_sequence {
            let reason = format!("a table of {rows} positions for {target_sequence} tokens");
            return check.refuse(reason, "choose a shorter `target_sequence`, or more `target_rows`");
        }
        Ok(())
    }

    fn sample(&self) -> SampleShape {
        SampleShape::Tokens { sequence: self.target_sequence, vocabulary: self.vocab }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn planned_only(&self) -> Vec<&'static str> {
        vec!["`family: whisper`"]
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let mut layers = Layers { builder: GraphBuilder::new(name, options), sizes: self };
        let memory = layers.encoder(options.batch);
        layers.decoder(options.batch, memory);
        layers.builder.finish(self.target_sequence, Some(self.source_positions + self.target_sequence))
    }
}

/// A Whisper under construction.
struct Layers<'a> {
    builder: GraphBuilder,
    sizes: &'a Whisper,
}

impl Layers<'_> {
    fn layer_sizes(&self) -> LayerSizes {
        let Whisper { hidden, heads, ffn, dropout, .. } = *self.sizes;
        LayerSizes { hidden, heads, ffn, features: "hidden", epsilon: EPSILON, dropout }
    }

    fn kind(&self, causal: bool) -> AttentionKind {
        AttentionKind { causal, scaled: true, window: None, relative: None, dropout: self.sizes.attention_dropout }
    }

    /// Adds a convolution over positions, its bias, and its GELU.
    fn convolution(&mut self, name: &str, x: TensorId, stride: usize) -> TensorId {
        let hidden = self.sizes.hidden;
        let inputs = self.builder.dimensions(x)[2].extent;
        let out = dimension("hidden", hidden);
        let dimensions = vec![out, dimension("in_channels", inputs), dimension("window", WINDOW)];
        let shape = vec![hidden, inputs, WINDOW];
        let weight = self.builder.parameter(format!("{name}.weight"), dimensions, shape, WEIGHTS);
        let y = self.builder.convolution_of_positions(name, x, weight, stride);
        let bias = self.builder.parameter(format!("{name}.bias"), vec![out], vec![hidden], Initialisation::Zeros);
        let y = self.builder.bias_add(&format!("{name}.bias"), y, bias);
        self.builder.gelu_exact(&format!("{name}.act"), y)
    }

    /// Adds a table of `rows` positions to x.
    fn positions(&mut self, module: &str, x: TensorId, rows: usize) -> TensorId {
        let hidden = self.sizes.hidden;
        let extents = vec![dimension("positions", rows), dimension("hidden", hidden)];
        let table = self.builder.parameter(format!("{module}.embed_positions.weight"), extents, vec![rows, hidden], WEIGHTS);
        let x = self.builder.add_table(&format!("{module}.embed_positions"), x, table);
        self.builder.dropout(&format!("{module}.dropout"), x, self.sizes.dropout)
    }

    fn self_attention(&mut self, module: &str, x: TensorId, causal: bool) -> TensorId {
        let names = AttentionNames {
            module: format!("{module}.self_attn"),
            norm: format!("{module}.self_attn_layer_norm"),
            key_bias: false,
        };
        let (sizes, kind) = (self.layer_sizes(), self.kind(causal));
        pre_norm::attention(&mut self.builder, &names, x, None, sizes, kind)
    }

    fn feed_forward(&mut self, module: &str, x: TensorId) -> TensorId {
        let sizes = self.layer_sizes();
        pre_norm::feed_forward(&mut self.builder, module, &format!("{module}.final_layer_norm"), x, sizes)
    }

    /// Adds the encoder. Returns its last layer's positions, before the final norm.
    fn encoder(&mut self, batch: usize) -> TensorId {
        let Whisper { layers, mel_bins, source_positions, .. } = *self.sizes;
        self.builder.block("encoder embedding", false);
        let frames = vec![dimension(BATCH, batch), dimension("frames", 2 * source_positions), dimension("mel", mel_bins)];
        let x = self.builder.input(InputKind::Features, frames);
        let x = self.convolution("model.encoder.conv1", x, 1);
        let x = self.convolution("model.encoder.conv2", x, 2);
        let mut x = self.positions("model.encoder", x, source_positions);
        for layer in 0..layers {
            self.builder.block(format!("encoder layer {layer}"), true);
            let module = format!("model.encoder.layers.{layer}");
            x = self.self_attention(&module, x, false);
            x = self.feed_forward(&module, x);
        }
        x
    }

    /// Adds the decoder of text, which attends to the encoder's positions, and the loss.
    fn decoder(&mut self, batch: usize, encoded: TensorId) {
        let Whisper { layers, hidden, vocab, target_sequence, target_rows, .. } = *self.sizes;
        self.builder.block("decoder embedding", false);
        let memory = self.builder.layer_norm("model.encoder.layer_norm", encoded, EPSILON);
        let extents = vec![dimension("vocabulary", vocab), dimension("hidden", hidden)];
        let table = self.builder.parameter("model.decoder.embed_tokens.weight".into(), extents, vec![vocab, hidden], WEIGHTS);
        let positions = vec![dimension(BATCH, batch), dimension("sequence", target_sequence)];
        let tokens = self.builder.input(InputKind::Tokens, positions.clone());
        let x = self.builder.embedding("model.decoder.embed_tokens", tokens, table);
        let mut x = self.positions("model.decoder", x, target_rows.unwrap_or(target_sequence));
        for layer in 0..self.sizes.decoder_layers.unwrap_or(layers) {
            self.builder.block(format!("decoder layer {layer}"), true);
            let module = format!("model.decoder.layers.{layer}");
            x = self.self_attention(&module, x, true);
            let names = AttentionNames {
                module: format!("{module}.encoder_attn"),
                norm: format!("{module}.encoder_attn_layer_norm"),
                key_bias: false,
            };
            let (sizes, kind) = (self.layer_sizes(), self.kind(false));
            x = pre_norm::attention(&mut self.builder, &names, x, Some(memory), sizes, kind);
            x = self.feed_forward(&module, x);
        }
        self.builder.block("head", false);
        let x = self.builder.layer_norm("model.decoder.layer_norm", x, EPSILON);
        // The logits share the words' embeddings.
        let logits = self.builder.matmul("proj_out", x, table, 1, WeightLayout::OutIn);
        let labels = self.builder.input(InputKind::Labels, positions);
        self.builder.cross_entropy("loss", logits, labels);
    }
}
