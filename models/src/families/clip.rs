//! CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023) with Hugging Face's names: an encoder
//! of images, one of text, and a loss that compares each image of a micro-batch with each text.
//!
//! Ranks that shard the samples gather each other's features before they compare them, so the loss
//! is over the micro-batch of all ranks. SigLIP's loss, a sigmoid of each pair, is planned as the
//! softmax of each image over the texts: the same product, with one pass over the same logits.

use super::images::{self, MOST_PIXELS};
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

/// An encoder of images beside an encoder of text. Planned, and not executed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Clip {
    /// The model whose encoders and loss this is.
    #[serde(default)]
    pub form: ClipForm,
    /// The encoder of images.
    pub images: ImageEncoder,
    /// The encoder of text.
    pub text: TextEncoder,
    /// Features in which an image and a text are compared. SigLIP's are the `hidden` of the encoder
    /// of images.
    pub projection: usize,
}

/// The model that encoders and loss follow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClipForm {
    /// A position for the class before the patches, norms before and after the layers, text that
    /// sees what is before it, a projection of each encoder, and a softmax in both directions.
    #[default]
    Clip,
    /// Attention that pools the patches, text that sees all of itself, a projection of the text,
    /// and a sigmoid of each pair.
    Siglip,
}

/// Sizes of an encoder of images.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ImageEncoder {
    /// Transformer layers.
    pub layers: usize,
    /// Features of a patch.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of the feed-forward networks.
    pub ffn: usize,
    /// Pixels on each side of a patch. A rest of the image that fills no patch is not seen.
    pub patch: usize,
    /// Pixels on each side of the images.
    #[serde(default = "images::image")]
    pub image: usize,
    /// Channels of the images.
    #[serde(default = "images::channels")]
    pub channels: usize,
}

/// Sizes of an encoder of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TextEncoder {
    /// Transformer layers.
    pub layers: usize,
    /// Features of a position.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of the feed-forward networks.
    pub ffn: usize,
    /// Size of the vocabulary.
    pub vocab: usize,
    /// Tokens of a text.
    pub sequence: usize,
    /// Rows of the table of positions. `None`: `sequence`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub position_rows: Option<usize>,
}

impl ImageEncoder {
    fn patches(&self) -> usize {
        (self.image / self.patch) * (self.image / self.patch)
    }

    fn layer_sizes(&self, epsilon: Epsilon) -> LayerSizes {
        let Self { hidden, heads, ffn, .. } = *self;
        LayerSizes { hidden, heads, ffn, features: "vision", epsilon, dropout: DropoutRate::NONE }
    }
}

impl TextEncoder {
    fn layer_sizes(&self, epsilon: Epsilon) -> LayerSizes {
        let Self { hidden, heads, ffn, .. } = *self;
        LayerSizes { hidden, heads, ffn, features: "hidden", epsilon, dropout: DropoutRate::NONE }
    }
}

impl Family for Clip {
    const NAME: &'static str = "clip";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    fn examples() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { images, text, .. } = *self;
        let rows = text.position_rows.unwrap_or(text.sequence);
        check.sizes(&[
            ("projection", self.projection),
            ("images.patch", images.patch),
            ("images.image", images.image),
            ("images.channels", images.channels),
            ("text.vocab", text.vocab),
            ("text.sequence", text.sequence),
            ("text.position_rows", rows),
        ])?;
        check.transformer([images.layers, images.hidden, images.heads, images.ffn])?;
        check.transformer([text.layers, text.hidden, text.heads, text.ffn])?;
        check.layers_of_each(images.layers.max(text.layers))?;
        if images.image > MOST_PIXELS || images.patch > images.image {
            let hint = "images are 8192 pixels wide at most, and have at least one patch";
            return check.refuse(format!("`images.image` is {} and `images.patch` {}", images.image, images.patch), hint);
        }
        if rows < text.sequence {
            let reason = format!("a table of {rows} positions for {} tokens", text.sequence);
            return check.refuse(reason, "choose a shorter `text.sequence`, or more `text.position_rows`");
        }
        if self.form == ClipForm::Siglip && self.projection != images.hidden {
            let reason = format!("a text has {} features, and an image {}", self.projection, images.hidden);
            return check.refuse(reason, "with `form: siglip`, `projection` is the `hidden` of the encoder of images");
        }
        Ok(())
    }

    fn sample(&self) -> SampleShape {
        let ImageEncoder { channels, image, .. } = self.images;
        // A sample has no class. Its image is to be told from as many texts as there are samples.
        SampleShape::Image { channels, height: image, width: image, classes: 1 }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn planned_only(&self) -> Vec<&'static str> {
        vec!["`family: clip`"]
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let mut towers = Towers { builder: GraphBuilder::new(name, options), sizes: self, batch: options.batch };
        let image = towers.images();
        let text = towers.text();
        towers.builder.block("loss", false);
        let image = towers.builder.unit_rows("image_embeds", image);
        let text = towers.builder.unit_rows("text_embeds", text);
        let labels = towers.builder.input(InputKind::Labels, vec![dimension(BATCH, options.batch)]);
        let scale = towers.number("logit_scale");
        let logits = towers.logits("logits_per_image", image, text, scale);
        let predictions = match self.form {
            ClipForm::Clip => {
                towers.builder.cross_entropy("loss", logits, labels);
                let logits = towers.logits("logits_per_text", text, image, scale);
                towers.builder.cross_entropy("loss.text", logits, labels);
                2
            }
            ClipForm::Siglip => {
                let bias = towers.number("logit_bias");
                let logits = towers.builder.shifted("logits_per_image.bias", logits, bias);
                towers.builder.cross_entropy("loss", logits, labels);
                1
            }
        };
        towers.builder.finish(predictions, None)
    }
}

/// Two encoders under construction.
struct Towers<'a> {
    builder: GraphBuilder,
    sizes: &'a Clip,
    batch: usize,
}

impl Towers<'_> {
    /// Epsilon of the norms.
    fn epsilon(&self) -> Epsilon {
        match self.sizes.form {
            ClipForm::Clip => Epsilon::new(5),
            ClipForm::Siglip => Epsilon::new(6),
        }
    }

    /// Adds a trained number.
    fn number(&mut self, name: &str) -> TensorId {
        self.builder.parameter(name.into(), vec![dimension("number", 1)], vec![1], Initialisation::Zeros)
    }

    /// Adds the similarities of each row with each row of `others`.
    fn logits(&mut self, name: &str, rows: TensorId, others: TensorId, scale: TensorId) -> TensorId {
        let logits = self.builder.similarities(name, rows, others);
        self.builder.scaled(&format!("{name}.scale"), logits, scale)
    }

    fn layer(&mut self, module: &str, x: TensorId, sizes: LayerSizes, causal: bool) -> TensorId {
        let names =
            AttentionNames { module: format!("{module}.self_attn"), norm: format!("{module}.layer_norm1"), key_bias: true };
        let kind = AttentionKind { causal, scaled: true, window: None, relative: None, dropout: DropoutRate::NONE };
        let x = pre_norm::attention(&mut self.builder, &names, x, None, sizes, kind);
        pre_norm::feed_forward(&mut self.builder, &format!("{module}.mlp"), &format!("{module}.layer_norm2"), x, sizes)
    }

    /// Adds a table of `rows` positions to x.
    fn positions(&mut self, name: &str, x: TensorId, rows: usize) -> TensorId {
        let features = self.builder.dimensions(x)[2];
        let extents = vec![dimension("positions", rows), features];
        let table = self.builder.parameter(format!("{name}.weight"), extents, vec![rows, features.extent], WEIGHTS);
        self.builder.add_table(name, x, table)
    }

    /// Adds the encoder of images. Returns the features `[batch, projection]`.
    fn images(&mut self) -> TensorId {
        let sizes = self.sizes.images;
        let ImageEncoder { hidden, patch, channels, .. } = sizes;
        let is_clip = self.sizes.form == ClipForm::Clip;
        self.builder.block("image embedding", false);
        let pixels = dimension("pixels", channels * patch * patch);
        let features = dimension("vision", hidden);
        let patches = vec![dimension(BATCH, self.batch), dimension("patches", sizes.patches()), pixels];
        let x = self.builder.input(InputKind::Features, patches);
        let name = "vision_model.embeddings.patch_embedding";
        let shape = vec![hidden, channels, patch, patch];
        let weight = self.builder.parameter(format!("{name}.weight"), vec![features, pixels], shape, WEIGHTS);
        let mut x = self.builder.matmul(name, x, weight, 1, WeightLayout::OutIn);
        if is_clip {
            let name = "vision_model.embeddings.class_embedding";
            let row = self.builder.parameter(name.into(), vec![features], vec![hidden], WEIGHTS);
            x = self.builder.prepend_row(name, x, row);
        } else {
            let zeros = Initialisation::Zeros;
            let bias = self.builder.parameter(format!("{name}.bias"), vec![features], vec![hidden], zeros);
            x = self.builder.bias_add(&format!("{name}.bias"), x, bias);
        }
        let rows = sizes.patches() + usize::from(is_clip);
        x = self.positions("vision_model.embeddings.position_embedding", x, rows);
        if is_clip {
            x = self.builder.layer_norm("vision_model.pre_layrnorm", x, self.epsilon());
        }
        for layer in 0..sizes.layers {
            self.builder.block(format!("image layer {layer}"), true);
            x = self.layer(&format!("vision_model.encoder.layers.{layer}"), x, sizes.layer_sizes(self.epsilon()), false);
        }
        self.builder.block("image head", false);
        if !is_clip {
            let x = self.builder.layer_norm("vision_model.post_layernorm", x, self.epsilon());
            return self.pooled(x);
        }
        let x = self.builder.first("vision_model.class", x);
        let x = self.builder.layer_norm("vision_model.post_layernorm", x, self.epsilon());
        let projection = [dimension("projection", self.sizes.projection)];
        self.builder.linear("visual_projection", x, 1, &projection, WEIGHTS, None)
    }

    /// Adds attention of one learned position over the patches, and a feed-forward network.
    fn pooled(&mut self, x: TensorId) -> TensorId {
        let ImageEncoder { hidden, heads, .. } = self.sizes.images;
        let zeros = Some(Initialisation::Zeros);
        let features = dimension("vision", hidden);
        let name = |part: &str| format!("vision_model.head.{part}");
        let by_head = [dimension("heads", heads), dimension("head_dimension", hidden / heads)];
        let probe = self.builder.parameter(name("probe"), vec![features], vec![1, 1, hidden], WEIGHTS);
        let probe = self.builder.row_of_each_sample(&name("probe.expanded"), self.batch, probe);
        let [q, k, v] = [("q", probe), ("k", x), ("v", x)].map(|(part, x)| {
            let module = name(&format!("attention.{part}"));
            let weight = name(&format!("attention.in_proj_weight.{part}"));
            let bias = name(&format!("attention.in_proj_bias.{part}"));
            self.builder.linear_as([&module, &weight, &bias], x, 1, &by_head, WEIGHTS, zeros)
        });
        let kind = AttentionKind { causal: false, scaled: true, window: None, relative: None, dropout: DropoutRate::NONE };
        let y = self.builder.attention(&name("attention"), [q, k, v], kind);
        let y = self.builder.linear(&name("attention.out_proj"), y, 2, &[features], WEIGHTS, zeros);
        let sizes = self.sizes.images.layer_sizes(self.epsilon());
        let y = pre_norm::feed_forward(&mut self.builder, &name("mlp"), &name("layernorm"), y, sizes);
        self.builder.first(&name("first"), y)
    }

    /// Adds the encoder of text. Returns the features `[batch, projection]`.
    fn text(&mut self) -> TensorId {
        let sizes = self.sizes.text;
        let TextEncoder { hidden, vocab, sequence, .. } = sizes;
        let is_clip = self.sizes.form == ClipForm::Clip;
        self.builder.block("text embedding", false);
        let name = "text_model.embeddings.token_embedding";
        let extents = vec![dimension("vocabulary", vocab), dimension("hidden", hidden)];
        let table = self.builder.parameter(format!("{name}.weight"), extents, vec![vocab, hidden], WEIGHTS);
        let positions = vec![dimension(BATCH, self.batch), dimension("sequence", sequence)];
        let tokens = self.builder.input(InputKind::Tokens, positions);
        let x = self.builder.embedding(name, tokens, table);
        let rows = sizes.position_rows.unwrap_or(sequence);
        let mut x = self.positions("text_model.embeddings.position_embedding", x, rows);
        for layer in 0..sizes.layers {
            self.builder.block(format!("text layer {layer}"), true);
            x = self.layer(&format!("text_model.encoder.layers.{layer}"), x, sizes.layer_sizes(self.epsilon()), is_clip);
        }
        self.builder.block("text head", false);
        let x = self.builder.layer_norm("text_model.final_layer_norm", x, self.epsilon());
        // CLIP takes the position of the text's end, and SigLIP the last one. Here the first one
        // stands for it, at the same cost.
        let x = self.builder.first("text_model.pooled", x);
        let projection = [dimension("projection", self.sizes.projection)];
        match self.sizes.form {
            ClipForm::Clip => self.builder.linear("text_projection", x, 1, &projection, WEIGHTS, None),
            ClipForm::Siglip => self.builder.linear("text_model.head", x, 1, &projection, WEIGHTS, Some(Initialisation::Zeros)),
        }
    }
}
