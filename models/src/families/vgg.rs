//! VGG networks (Simonyan and Zisserman 2015) with torchvision's names.

use super::images::{self, MOST_PIXELS, Stem};
use super::{Check, Family};
use crate::builder::{GraphBuilder, GraphOptions, Mode, dimension};
use crate::dropout::DropoutRate;
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind};
use crate::kernel::WeightLayout;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A VGG.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Vgg {
    /// Layers with weights: 11, 13, 16 or 19.
    pub depth: usize,
    /// Whether batch normalisation follows each convolution.
    #[serde(default)]
    pub batch_norm: bool,
    /// Form of the last layers.
    #[serde(default)]
    pub stem: Stem,
    /// Pixels on each side of the images.
    #[serde(default = "images::image")]
    pub image: usize,
    /// Channels of the images.
    #[serde(default = "images::channels")]
    pub channels: usize,
    /// Number of classes.
    #[serde(default = "images::classes")]
    pub classes: usize,
    /// Channels of the first stage.
    #[serde(default = "images::width")]
    pub width: usize,
    /// Width of the classifier's inner layers.
    #[serde(default = "classifier_width")]
    pub hidden: usize,
    /// Dropout rate of the classifier's inner layers (0.5 in torchvision). Only with
    /// `stem: imagenet`.
    #[serde(default, skip_serializing_if = "DropoutRate::is_none")]
    pub dropout: DropoutRate,
}

fn classifier_width() -> usize {
    4096
}

/// Pixels on each side of the image after five poolings, where the classifier begins. Torchvision
/// pools other sizes to this one; here they are refused.
const POOLED: usize = 7;

impl Family for Vgg {
    const NAME: &'static str = "vgg";
    const OPTIMIZER: Optimizer = Optimizer::Sgd;

    fn zoo() -> Vec<(&'static str, Self)> {
        let vgg = |depth, batch_norm| Self {
            depth,
            batch_norm,
            stem: Stem::Imagenet,
            image: 224,
            channels: 3,
            classes: 1000,
            width: 64,
            hidden: 4096,
            dropout: DropoutRate::NONE,
        };
        vec![
            ("vgg11", vgg(11, false)),
            ("vgg13", vgg(13, false)),
            ("vgg16", vgg(16, false)),
            ("vgg19", vgg(19, false)),
            ("vgg11_bn", vgg(11, true)),
            ("vgg13_bn", vgg(13, true)),
            ("vgg16_bn", vgg(16, true)),
            ("vgg19_bn", vgg(19, true)),
        ]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        let small = Self {
            depth: 11,
            batch_norm: false,
            stem: Stem::Small,
            image: 32,
            channels: 3,
            classes: 10,
            width: 32,
            hidden: 512,
            dropout: DropoutRate::NONE,
        };
        vec![("small-vgg", small)]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { depth, stem, image, channels, classes, width, hidden, dropout, .. } = *self;
        if ![11, 13, 16, 19].contains(&depth) {
            return check.refuse(format!("there is no VGG of depth {depth}"), "use depth 11, 13, 16 or 19");
        }
        check.sizes(&[("channels", channels), ("classes", classes), ("width", width), ("hidden", hidden)])?;
        if stem == Stem::Small && !dropout.is_none() {
            let hint = "it is of the classifier's inner layers, which `stem: small` does not have: leave it out";
            return check.refuse(format!("`dropout` is {}", dropout.value()), hint);
        }
        let refuse = |hint| check.refuse(format!("`image` is {image}"), hint);
        match stem {
            Stem::Imagenet if image / 32 != POOLED => refuse("images are 224 to 255 pixels wide, or any size with `stem: small`"),
            Stem::Small if !(32..=MOST_PIXELS).contains(&image) => refuse("with `stem: small` images are 32 to 8192 pixels wide"),
            _ => Ok(()),
        }
    }

    fn sample(&self) -> SampleShape {
        let Self { channels, image, classes, .. } = *self;
        SampleShape::Image { channels, height: image, width: image, classes }
    }

    fn has_batch_norm(&self) -> bool {
        self.batch_norm
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let counts = match self.depth {
            11 => [1, 1, 2, 2, 2],
            13 => [2, 2, 2, 2, 2],
            16 => [2, 2, 3, 3, 3],
            19 => [2, 2, 4, 4, 4],
            depth => unreachable!("invariant: `validate` has refused depth {depth}"),
        };
        let mode = if options.inference { Mode::Inference } else { Mode::Training };
        let mut builder = GraphBuilder::new(name, options);
        let batch = dimension(BATCH, options.batch);
        let image =
            vec![batch, dimension("height", self.image), dimension("width", self.image), dimension("channels", self.channels)];
        let mut x = builder.input(InputKind::Images, image);
        let mut channels = self.channels;
        // torchvision numbers convolutions, norms, ReLUs and poolings together.
        let mut place = 0;
        for (stage, count) in counts.into_iter().enumerate() {
            builder.block(format!("stage {stage}"), true);
            let width = self.width << stage.min(3);
            for _ in 0..count {
                let module = format!("features.{place}");
                let window = dimension("window", 3);
                let dimensions = vec![dimension("out_channels", width), window, window, dimension("in_channels", channels)];
                // Kaiming normal over the outputs ("fan out"), as in torchvision.
                let initialisation = Initialisation::Normal((2.0 / (width * 9) as f64).sqrt());
                let public = vec![width, channels, 3, 3];
                let weight =
                    builder.parameter_as(format!("{module}.weight"), dimensions, initialisation, vec![0, 3, 1, 2], public);
                x = builder.convolution(&module, x, weight, 1, 1);
                let name = format!("{module}.bias");
                let bias =
                    builder.parameter(name.clone(), vec![dimension("channels", width)], vec![width], Initialisation::Zeros);
                x = builder.bias_add(&name, x, bias);
                place += 1;
                if self.batch_norm {
                    x = builder.batch_norm(&format!("features.{place}"), x, mode);
                    place += 1;
                }
                x = builder.relu(&format!("features.{place}"), x);
                place += 1;
                channels = width;
            }
            x = builder.max_pool(&format!("features.{place}"), x, 2, 2, 0);
            place += 1;
        }
        builder.block("classifier", false);
        let weights = Initialisation::Normal(0.01);
        let zeros = Some(Initialisation::Zeros);
        let classes = [dimension("classes", self.classes)];
        let logits = match self.stem {
            Stem::Small => {
                let x = builder.global_average_pool("avgpool", x);
                builder.linear("classifier", x, 1, &classes, weights, zeros)
            }
            Stem::Imagenet => {
                let hidden = self.hidden;
                let weight_dimensions = vec![
                    dimension("hidden", hidden),
                    dimension("height", POOLED),
                    dimension("width", POOLED),
                    dimension("channels", channels),
                ];
                // torchvision flattens `[channels, height, width]`.
                let weight = builder.parameter_as(
                    "classifier.0.weight".into(),
                    weight_dimensions,
                    weights,
                    vec![0, 3, 1, 2],
                    vec![hidden, channels * POOLED * POOLED],
                );
                let y = builder.matmul("classifier.0", x, weight, 3, WeightLayout::OutIn);
                let hidden = [dimension("hidden", hidden)];
                let bias =
                    builder.parameter("classifier.0.bias".into(), hidden.to_vec(), vec![self.hidden], Initialisation::Zeros);
                let y = builder.bias_add("classifier.0.bias", y, bias);
                let y = builder.relu("classifier.1", y);
                let y = builder.dropout("classifier.2", y, self.dropout);
                let y = builder.linear("classifier.3", y, 1, &hidden, weights, zeros);
                let y = builder.relu("classifier.4", y);
                let y = builder.dropout("classifier.5", y, self.dropout);
                builder.linear("classifier.6", y, 1, &classes, weights, zeros)
            }
        };
        let labels = builder.input(InputKind::Labels, vec![batch]);
        builder.cross_entropy("loss", logits, labels);
        builder.finish(1, None)
    }
}
