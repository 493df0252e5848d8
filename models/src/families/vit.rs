//! Vision transformers (Dosovitskiy et al. 2021) with torchvision's names. Dropout is applied to
//! the embedding and to what each layer adds to the residual stream, but not within the perceptron.

use super::images::{self, MOST_PIXELS};
use super::{Check, Family};
use crate::builder::{AttentionKind, GraphBuilder, GraphOptions, dimension};
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::Epsilon;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A vision transformer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Vit {
    /// Transformer layers.
    pub layers: usize,
    /// Features of a position.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of the perceptron. `None`: four times `hidden`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ffn: Option<usize>,
    /// Pixels on each side of a patch. Divides `image`.
    pub patch: usize,
    /// Pixels on each side of the images.
    #[serde(default = "images::image")]
    pub image: usize,
    /// Channels of the images.
    #[serde(default = "images::channels")]
    pub channels: usize,
    /// Number of classes.
    #[serde(default = "images::classes")]
    pub classes: usize,
    /// Dropout rate of the embedding and of what each layer adds to the residual stream.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub dropout: DropoutRate,
    /// Dropout rate of attention's probabilities.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub attention_dropout: DropoutRate,
}

const EPSILON: Epsilon = Epsilon::new(6);

impl Family for Vit {
    const NAME: &'static str = "vit";
    const OPTIMIZER: Optimizer = Optimizer::AdamW;

    fn zoo() -> Vec<(&'static str, Self)> {
        let vit = |patch, layers, hidden, heads| Self {
            layers,
            hidden,
            heads,
            ffn: None,
            patch,
            image: 224,
            channels: 3,
            classes: 1000,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        };
        vec![("vit_b_16", vit(16, 12, 768, 12)), ("vit_b_32", vit(32, 12, 768, 12)), ("vit_l_16", vit(16, 24, 1024, 16))]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            layers: 1,
            hidden: 256,
            heads: 4,
            ffn: None,
            patch: 4,
            image: 32,
            channels: 3,
            classes: 10,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        };
        vec![("small-vit", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { layers, hidden, heads, ffn, patch, image, channels, classes, .. } = *self;
        check.sizes(&[("patch", patch), ("image", image), ("channels", channels), ("classes", classes)])?;
        check.transformer([layers, hidden, heads, ffn.unwrap_or(1)])?;
        if image > MOST_PIXELS || !image.is_multiple_of(patch) {
            let hint = "images are 8192 pixels wide at most, and a whole number of patches";
            return check.refuse(format!("`image` is {image} and `patch` {patch}"), hint);
        }
        Ok(())
    }

    fn sample(&self) -> SampleShape {
        let Self { channels, image, classes, .. } = *self;
        SampleShape::Image { channels, height: image, width: image, classes }
    }

    fn is_transformer(&self) -> bool {
        true
    }

    fn repeated_layers(&self) -> Option<usize> {
        Some(self.layers)
    }

    fn layers_mut(&mut self) -> Option<&mut usize> {
        Some(&mut self.layers)
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let Self { patch, image, channels, classes, .. } = *self;
        let mut builder = GraphBuilder::new(name, options);
        let batch = dimension(BATCH, options.batch);
        let hidden = dimension("hidden", self.hidden);
        builder.block("embedding", false);
        let pixels = vec![batch, dimension("height", image), dimension("width", image), dimension("channels", channels)];
        let images = builder.input(InputKind::Images, pixels);
        let window = dimension("window", patch);
        let weight = builder.parameter_as(
            "conv_proj.weight".into(),
            vec![dimension("out_channels", self.hidden), window, window, dimension("in_channels", channels)],
            Initialisation::Normal((1.0 / (channels * patch * patch) as f64).sqrt()),
            vec![0, 3, 1, 2],
            vec![self.hidden, channels, patch, patch],
        );
        let patches = builder.convolution("conv_proj", images, weight, patch, 0);
        let out_channels = dimension("channels", self.hidden);
        let bias = builder.parameter("conv_proj.bias".into(), vec![out_channels], vec![self.hidden], Initialisation::Zeros);
        let patches = builder.bias_add("conv_proj.bias", patches, bias);
        let token = builder.parameter("class_token".into(), vec![hidden], vec![1, 1, self.hidden], Initialisation::Zeros);
        let x = builder.prepend("class_token", patches, token);
        let sequence = (image / patch) * (image / patch) + 1;
        let positions = builder.parameter(
            "encoder.pos_embedding".into(),
            vec![dimension("sequence", sequence), hidden],
            vec![1, sequence, self.hidden],
            Initialisation::Normal(0.02),
        );
        let x = builder.bias_add("encoder.pos_embedding", x, positions);
        let mut x = builder.dropout("encoder.dropout", x, self.dropout);
        for index in 0..self.layers {
            builder.block(format!("layer {index}"), true);
            x = layer(&mut builder, &format!("encoder.layers.encoder_layer_{index}"), self, x);
        }
        builder.block("head", false);
        let x = builder.layer_norm("encoder.ln", x, EPSILON);
        let x = builder.first("heads.class_token", x);
        let zeros = Initialisation::Zeros;
        let logits = builder.linear("heads.head", x, 1, &[dimension("classes", classes)], zeros, Some(zeros));
        let labels = builder.input(InputKind::Labels, vec![batch]);
        builder.cross_entropy("loss", logits, labels);
        builder.finish(1, None)
    }
}

fn layer(builder: &mut GraphBuilder, module: &str, sizes: &Vit, x: TensorId) -> TensorId {
    let Vit { hidden, heads, .. } = *sizes;
    let ffn = sizes.ffn.unwrap_or(4 * hidden);
    let name = |part: &str| format!("{module}.{part}");
    // Xavier's uniform distribution, as in torchvision. Biases of the perceptron begin near zero.
    let xavier = |inputs: usize, outputs: usize| Initialisation::Uniform((6.0 / (inputs + outputs) as f64).sqrt());
    let zeros = Some(Initialisation::Zeros);
    let nearly_zero = Some(Initialisation::Normal(1e-6));
    let head_dimensions = [dimension("heads", heads), dimension("head_dimension", hidden / heads)];
    let projections = [dimension("projections", 3), head_dimensions[0], head_dimensions[1]];
    let hidden_dimension = [dimension("hidden", hidden)];

    let y = builder.layer_norm(&name("ln_1"), x, EPSILON);
    let attention = name("self_attention");
    let names = [&attention, &format!("{attention}.in_proj_weight"), &format!("{attention}.in_proj_bias")];
    let qkv = builder.linear_as(names.map(|name| name.as_str()), y, 1, &projections, xavier(hidden, 3 * hidden), zeros);
    let qkv = builder.split(&format!("{attention}.split"), qkv);
    let y = builder.attention(
        &attention,
        qkv,
        AttentionKind { causal: false, scaled: true, window: None, relative: None, dropout: sizes.attention_dropout },
    );
    let out = Initialisation::Uniform(1.0 / (hidden as f64).sqrt());
    let y = builder.linear(&name("self_attention.out_proj"), y, 2, &hidden_dimension, out, zeros);
    let y = builder.dropout(&name("dropout"), y, sizes.dropout);
    let x = builder.add(&name("self_attention.residual"), x, y);

    let y = builder.layer_norm(&name("ln_2"), x, EPSILON);
    let y = builder.linear(&name("mlp.0"), y, 1, &[dimension("ffn", ffn)], xavier(hidden, ffn), nearly_zero);
    let y = builder.gelu_exact(&name("mlp.1"), y);
    let y = builder.linear(&name("mlp.3"), y, 1, &hidden_dimension, xavier(ffn, hidden), nearly_zero);
    let y = builder.dropout(&name("mlp.4"), y, sizes.dropout);
    builder.add(&name("mlp.residual"), x, y)
}
