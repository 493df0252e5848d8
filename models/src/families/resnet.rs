//! ResNets (He et al. 2016) with torchvision's names. As in torchvision, the 3x3 convolution of a
//! bottleneck has the stride ("v1.5").

use super::images::{self, MOST_PIXELS, Stem};
use super::{Check, Family};
use crate::builder::{GraphBuilder, GraphOptions, Mode, dimension};
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::WeightLayout;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A ResNet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Resnet {
    /// Layers with weights: 18, 34, 50, 101 or 152.
    pub depth: usize,
    /// Form of the first layers.
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
    /// Channels after the stem. Basic blocks keep them in the first stage; bottlenecks put out four
    /// times as many.
    #[serde(default = "images::width")]
    pub width: usize,
}

impl Family for Resnet {
    const NAME: &'static str = "resnet";
    const OPTIMIZER: Optimizer = Optimizer::Sgd;

    fn zoo() -> Vec<(&'static str, Self)> {
        let resnet = |depth| Self { depth, stem: Stem::Imagenet, image: 224, channels: 3, classes: 1000, width: 64 };
        vec![
            ("resnet18", resnet(18)),
            ("resnet34", resnet(34)),
            ("resnet50", resnet(50)),
            ("resnet101", resnet(101)),
            ("resnet152", resnet(152)),
        ]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        vec![("small-resnet", Self { depth: 18, stem: Stem::Small, image: 16, channels: 3, classes: 10, width: 32 })]
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let Self { depth, stem, image, channels, classes, width } = *self;
        if ![18, 34, 50, 101, 152].contains(&depth) {
            return check.refuse(format!("there is no ResNet of depth {depth}"), "use depth 18, 34, 50, 101 or 152");
        }
        check.sizes(&[("channels", channels), ("classes", classes), ("width", width)])?;
        let smallest = if stem == Stem::Imagenet { 32 } else { 4 };
        if image < smallest || image > MOST_PIXELS {
            let hint = "images are 32 to 8192 pixels wide, or from 4 with `stem: small`";
            return check.refuse(format!("`image` is {image}"), hint);
        }
        Ok(())
    }

    fn sample(&self) -> SampleShape {
        let Self { channels, image, classes, .. } = *self;
        SampleShape::Image { channels, height: image, width: image, classes }
    }

    fn has_batch_norm(&self) -> bool {
        true
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let (layers, bottleneck) = match self.depth {
            18 => ([2, 2, 2, 2], false),
            34 => ([3, 4, 6, 3], false),
            50 => ([3, 4, 6, 3], true),
            101 => ([3, 4, 23, 3], true),
            152 => ([3, 8, 36, 3], true),
            depth => unreachable!("invariant: `validate` has refused depth {depth}"),
        };
        let mode = if options.inference { Mode::Inference } else { Mode::Training };
        let mut net = Layers { builder: GraphBuilder::new(name, options), mode };
        net.builder.block("stem", false);
        let image = vec![
            dimension(BATCH, options.batch),
            dimension("height", self.image),
            dimension("width", self.image),
            dimension("channels", self.channels),
        ];
        let mut x = net.builder.input(InputKind::Images, image);
        let mut channels = self.width;
        x = match self.stem {
            Stem::Imagenet => {
                let y = net.convolution_norm("conv1", "bn1", x, [self.channels, channels], 7, 2);
                let y = net.builder.relu("relu", y);
                net.builder.max_pool("maxpool", y, 3, 2, 1)
            }
            Stem::Small => {
                let y = net.convolution_norm("conv1", "bn1", x, [self.channels, channels], 3, 1);
                net.builder.relu("relu", y)
            }
        };
        for (stage, &count) in layers.iter().enumerate() {
            let width = self.width << stage;
            for index in 0..count {
                let stride = if index == 0 && stage > 0 { 2 } else { 1 };
                let module = format!("layer{}.{index}", stage + 1);
                net.builder.block(&module, true);
                (x, channels) = if bottleneck {
                    net.bottleneck(&module, x, channels, width, stride)
                } else {
                    net.basic(&module, x, channels, width, stride)
                };
            }
        }
        net.builder.block("head", false);
        let pooled = net.builder.global_average_pool("avgpool", x);
        let initialisation = Initialisation::Uniform(1.0 / (channels as f64).sqrt());
        let weight_dimensions = vec![dimension("classes", self.classes), dimension("channels", channels)];
        let weight = net.builder.parameter("fc.weight".into(), weight_dimensions, vec![self.classes, channels], initialisation);
        let bias =
            net.builder.parameter("fc.bias".into(), vec![dimension("classes", self.classes)], vec![self.classes], initialisation);
        let product = net.builder.matmul("fc", pooled, weight, 1, WeightLayout::OutIn);
        let logits = net.builder.bias_add("fc.bias", product, bias);
        let labels = net.builder.input(InputKind::Labels, vec![dimension(BATCH, options.batch)]);
        net.builder.cross_entropy("loss", logits, labels);
        net.builder.finish(1, None)
    }
}

/// A ResNet under construction.
struct Layers {
    builder: GraphBuilder,
    mode: Mode,
}

impl Layers {
    fn convolution_norm(
        &mut self,
        convolution: &str,
        norm: &str,
        x: TensorId,
        [input, output]: [usize; 2],
        size: usize,
        stride: usize,
    ) -> TensorId {
        let dimensions = vec![
            dimension("out_channels", output),
            dimension("window", size),
            dimension("window", size),
            dimension("in_channels", input),
        ];
        // Kaiming normal over the outputs ("fan out"), as in torchvision.
        let initialisation = Initialisation::Normal((2.0 / (output * size * size) as f64).sqrt());
        let weight = self.builder.parameter_as(
            format!("{convolution}.weight"),
            dimensions,
            initialisation,
            vec![0, 3, 1, 2],
            vec![output, input, size, size],
        );
        let y = self.builder.convolution(convolution, x, weight, stride, size / 2);
        self.builder.batch_norm(norm, y, self.mode)
    }

    fn shortcut(&mut self, module: &str, x: TensorId, channels: [usize; 2], stride: usize) -> TensorId {
        if stride == 1 && channels[0] == channels[1] {
            return x;
        }
        self.convolution_norm(&format!("{module}.downsample.0"), &format!("{module}.downsample.1"), x, channels, 1, stride)
    }

    fn basic(&mut self, module: &str, x: TensorId, channels: usize, width: usize, stride: usize) -> (TensorId, usize) {
        let name = |part: &str| format!("{module}.{part}");
        let y = self.convolution_norm(&name("conv1"), &name("bn1"), x, [channels, width], 3, stride);
        let y = self.builder.relu(&name("relu1"), y);
        let y = self.convolution_norm(&name("conv2"), &name("bn2"), y, [width, width], 3, 1);
        let shortcut = self.shortcut(module, x, [channels, width], stride);
        let sum = self.builder.add(&name("add"), y, shortcut);
        (self.builder.relu(&name("relu2"), sum), width)
    }

    fn bottleneck(&mut self, module: &str, x: TensorId, channels: usize, width: usize, stride: usize) -> (TensorId, usize) {
        let name = |part: &str| format!("{module}.{part}");
        let out = 4 * width;
        let y = self.convolution_norm(&name("conv1"), &name("bn1"), x, [channels, width], 1, 1);
        let y = self.builder.relu(&name("relu1"), y);
        let y = self.convolution_norm(&name("conv2"), &name("bn2"), y, [width, width], 3, stride);
        let y = self.builder.relu(&name("relu2"), y);
        let y = self.convolution_norm(&name("conv3"), &name("bn3"), y, [width, out], 1, 1);
        let shortcut = self.shortcut(module, x, [channels, out], stride);
        let sum = self.builder.add(&name("add"), y, shortcut);
        (self.builder.relu(&name("relu3"), sum), out)
    }
}
