//! The part of a decoder that sees images: an encoder over patches, and a projector that turns its
//! output into tokens. These tokens replace some of the text's.

use super::layers::{Layers, WEIGHTS};
use super::{Decoder, NormEpsilon, NormKind};
use crate::builder::dimension;
use crate::defaults::{is_false, is_one, is_zero, one};
use crate::error::ModelError;
use crate::families::Check;
use crate::graph::{BATCH, InputKind, TensorId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An encoder of images in front of a decoder, in its sizes. Planned, and not executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VisionTower {
    /// Transformer layers.
    pub layers: usize,
    /// Features of a patch.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Inner width of the feed-forward networks.
    pub ffn: usize,
    /// Numbers of a patch: pixels, colours, and frames.
    pub pixels: usize,
    /// Patches of an image.
    pub patches: usize,
    /// Images of a sample.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub images: usize,
    /// Patches that become one token.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub patches_of_token: usize,
    /// How patches become one token.
    #[serde(default)]
    pub joined: JoinedPatches,
    /// Kind of the norms.
    #[serde(default = "layer")]
    pub norm: NormKind,
    /// Whether a second product gates the feed-forward networks.
    #[serde(default, skip_serializing_if = "is_false")]
    pub gated: bool,
    /// Whether the product of patches has a bias.
    #[serde(default, skip_serializing_if = "is_false")]
    pub patch_bias: bool,
    /// Whether the products of layers have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Rows of a table of positions. 0: positions are rotated.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub position_rows: usize,
    /// Whether a further position comes before the patches, as in CLIP.
    #[serde(default, skip_serializing_if = "is_false")]
    pub class_position: bool,
    /// Whether patches are normed before the first layer.
    #[serde(default, skip_serializing_if = "is_false")]
    pub norm_before: bool,
    /// Whether patches are normed after the last layer.
    #[serde(default, skip_serializing_if = "is_false")]
    pub norm_after: bool,
    /// Patches of a window that attention is limited to, except in every eighth layer. 0: attention
    /// sees the whole image.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub window: usize,
    /// Products from joined patches to the decoder's features: one, or two with a GELU between.
    pub projector: Projector,
    /// Further projectors, whose results are added in lower layers of the decoder (Qwen3-VL).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub further_projectors: usize,
}

fn layer() -> NormKind {
    NormKind::Layer
}

/// How patches become one token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JoinedPatches {
    /// Their features lie side by side.
    #[default]
    SideBySide,
    /// Their features lie side by side, and a product without bias makes them as wide as those of
    /// one patch (Mistral 3).
    Merged,
    /// Their mean.
    Mean,
}

/// Where a projector's norm is. Those of Qwen3-VL's lower layers come after the patches are joined.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NormPlace {
    BeforeJoining,
    AfterJoining,
}

/// The products behind the encoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Projector {
    /// Features between two products. `None`: there is one product.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inner: Option<usize>,
    /// Whether they have biases.
    #[serde(default, skip_serializing_if = "is_false")]
    pub bias: bool,
    /// Kind of the norm before them; it is over the features of one patch. `None`: there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub norm: Option<NormKind>,
}

impl VisionTower {
    /// Tokens of all images of a sample.
    pub fn tokens(&self) -> usize {
        self.images.saturating_mul(self.patches / self.patches_of_token.max(1))
    }

    /// Refuses sizes that no graph can be built from.
    pub(super) fn validate(&self, decoder: &Decoder, check: &Check<'_>) -> Result<(), ModelError> {
        check.transformer([self.layers, self.hidden, self.heads, self.ffn])?;
        check.sizes(&[
            ("vision.pixels", self.pixels),
            ("vision.patches", self.patches),
            ("vision.images", self.images),
            ("vision.patches_of_token", self.patches_of_token),
            ("vision.projector.inner", self.projector.inner.unwrap_or(1)),
        ])?;
        if !self.patches.is_multiple_of(self.patches_of_token) || self.tokens() > decoder.sequence {
            let reason = format!(
                "{} images of {} patches, {} of which are a token, in a sequence of {}",
                self.images, self.patches, self.patches_of_token, decoder.sequence
            );
            return check.refuse(reason, "choose fewer `images` or `patches`, or a longer `sequence`");
        }
        let positions = self.patches + usize::from(self.class_position);
        if self.position_rows != 0 && self.position_rows < positions {
            let reason = format!("a table of {} positions for {positions} patches", self.position_rows);
            return check.refuse(reason, "give `position_rows` at least as many rows, or fewer `patches`");
        }
        Ok(())
    }
}

impl Layers<'_> {
    /// Adds the encoder and its projector in blocks of their own. Returns the tokens
    /// `[batch, tokens, hidden]`.
    pub(super) fn vision(&mut self, batch: usize, tower: &VisionTower) -> TensorId {
        let VisionTower { hidden, patches, images, pixels, .. } = *tower;
        self.builder.block("vision embedding", false);
        let all = dimension("patches", images * patches);
        let x = self.builder.input(InputKind::Features, vec![dimension(BATCH, batch), all, dimension("pixels", pixels)]);
        let features = [dimension("vision", hidden)];
        let mut x = self.linear("vision.patch_embed", x, 1, &features, tower.patch_bias);
        if tower.class_position {
            let row = self.builder.parameter("vision.class_embedding".into(), features.to_vec(), vec![hidden], WEIGHTS);
            x = self.builder.prepend_row("vision.class", x, row);
        }
        if tower.position_rows > 0 {
            x = self.vision_positions(x, tower);
        }
        if tower.norm_before {
            x = self.vision_norm("vision.norm_before", x, tower.norm);
        }
        for layer in 0..tower.layers {
            self.builder.block(format!("vision layer {layer}"), true);
            x = self.vision_layer(layer, x, tower);
        }
        self.builder.block("projector", false);
        if tower.norm_after {
            x = self.vision_norm("vision.norm_after", x, tower.norm);
        }
        if tower.class_position {
            x = self.builder.without_first("vision.patches", x);
        }
        let tokens = self.projected("projector", x, tower, NormPlace::BeforeJoining);
        (0..tower.further_projectors).fold(tokens, |tokens, index| {
            let more = self.projected(&format!("projector.{}", index + 1), x, tower, NormPlace::AfterJoining);
            // In the model, each result is added to the image's positions in one of the decoder's
            // lower layers. Planned as a sum of tokens.
            self.builder.add(&format!("projector.{}.sum", index + 1), tokens, more)
        })
    }

    fn vision_norm(&mut self, name: &str, x: TensorId, kind: NormKind) -> TensorId {
        let epsilon = NormEpsilon::MILLIONTH.epsilon();
        match kind {
            NormKind::Rms => self.builder.rms_norm(name, x, epsilon),
            NormKind::Layer => self.builder.layer_norm(name, x, epsilon),
            NormKind::LayerWithoutShift => self.builder.feature_norm(name, x, 1),
        }
    }

    /// Adds a table of positions to patches.
    fn vision_positions(&mut self, x: TensorId, tower: &VisionTower) -> TensorId {
        let shape = vec![tower.position_rows, tower.hidden];
        let extents = vec![dimension("positions", tower.position_rows), dimension("vision", tower.hidden)];
        let table = self.builder.parameter("vision.position_embedding".into(), extents, shape, WEIGHTS);
        self.builder.add_table("vision.positions", x, table)
    }

    fn vision_layer(&mut self, layer: usize, x: TensorId, tower: &VisionTower) -> TensorId {
        let name = |part: &str| format!("vision.layers.{layer}.{part}");
        let normed = self.vision_norm(&name("norm1"), x, tower.norm);
        let heads = [dimension("heads", tower.heads), dimension("head_dimension", tower.hidden / tower.heads)];
        let [q, k, v] = ["q", "k", "v"].map(|part| self.linear(&name(part), normed, 1, &heads, tower.bias));
        let q = self.builder.attention_over_parts(&name("attention"), [q, k, v], tower.attended(layer));
        let features = [dimension("vision", tower.hidden)];
        let y = self.linear(&name("proj"), q, 2, &features, tower.bias);
        let x = self.builder.add(&name("attention.residual"), x, y);
        let normed = self.vision_norm(&name("norm2"), x, tower.norm);
        let y = self.vision_feed_forward(&name("mlp"), normed, tower);
        self.builder.add(&name("mlp.residual"), x, y)
    }

    fn vision_feed_forward(&mut self, module: &str, x: TensorId, tower: &VisionTower) -> TensorId {
        let name = |part: &str| format!("{module}.{part}");
        let inner = [dimension("ffn", tower.ffn)];
        let up = self.linear(&name("up"), x, 1, &inner, tower.bias);
        let y = match tower.gated {
            true => {
                let gate = self.linear(&name("gate"), x, 1, &inner, tower.bias);
                self.builder.silu_multiply(&name("act"), gate, up)
            }
            false => self.builder.gelu(&name("act"), up),
        };
        self.linear(&name("down"), y, 1, &[dimension("vision", tower.hidden)], tower.bias)
    }

    /// Adds a projector: joined patches become tokens of the decoder.
    fn projected(&mut self, name: &str, x: TensorId, tower: &VisionTower, place: NormPlace) -> TensorId {
        let part = |part: &str| format!("{name}.{part}");
        let hidden = [dimension("hidden", self.sizes.hidden)];
        let Projector { inner, bias, norm } = tower.projector;
        let mut x = match norm.filter(|_| place == NormPlace::BeforeJoining) {
            Some(kind) => self.vision_norm(&part("norm"), x, kind),
            None => x,
        };
        let joins = tower.patches_of_token;
        if joins > 1 {
            x = match tower.joined {
                JoinedPatches::Mean => self.builder.mean_of_positions(&part("mean"), x, joins),
                JoinedPatches::SideBySide | JoinedPatches::Merged => self.builder.join_positions(&part("joined"), x, joins),
            };
        }
        if joins > 1 && tower.joined == JoinedPatches::Merged {
            x = self.linear(&part("merging_layer"), x, 1, &[dimension("vision", tower.hidden)], false);
        }
        if let Some(kind) = norm.filter(|_| place == NormPlace::AfterJoining) {
            x = self.vision_norm(&part("norm"), x, kind);
        }
        if let Some(inner) = inner {
            x = self.linear(&part("linear_1"), x, 1, &[dimension("projected", inner)], bias);
            x = self.builder.gelu(&part("act"), x);
        }
        self.linear(&part("linear_2"), x, 1, &hidden, bias)
    }
}

impl VisionTower {
    /// Patches that a patch sees in a layer: those of its window, or of its image.
    fn attended(&self, layer: usize) -> usize {
        let positions = self.patches + usize::from(self.class_position);
        if self.window == 0 || (layer + 1).is_multiple_of(8) { positions } else { self.window.min(positions) }
    }
}
