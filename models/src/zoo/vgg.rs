//! VGG networks (Simonyan and Zisserman 2015) with torchvision's names.

use crate::DropoutRate;
use crate::builder::{GraphBuilder, Mode, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind};
use crate::specification::{GraphOptions, Stem};

/// A VGG's sizes.
pub(crate) struct VggShape {
    pub(crate) depth: usize,
    pub(crate) batch_norm: bool,
    pub(crate) stem: Stem,
    pub(crate) image: usize,
    pub(crate) channels: usize,
    pub(crate) classes: usize,
    pub(crate) width: usize,
    pub(crate) hidden: usize,
    pub(crate) dropout: DropoutRate,
}

pub(crate) fn vgg(name: &str, shape: &VggShape, options: &GraphOptions) -> Graph {
    let counts = match shape.depth {
        11 => [1, 1, 2, 2, 2],
        13 => [2, 2, 2, 2, 2],
        16 => [2, 2, 3, 3, 3],
        _ => [2, 2, 4, 4, 4],
    };
    let mode = if options.inference { Mode::Inference } else { Mode::Training };
    let mut builder = GraphBuilder::new(name, options);
    let batch = dimension(BATCH, options.batch);
    let image =
        vec![batch, dimension("height", shape.image), dimension("width", shape.image), dimension("channels", shape.channels)];
    let mut x = builder.input(InputKind::Images, image);
    let mut channels = shape.channels;
    // torchvision numbers convolutions, norms, ReLUs and poolings alike.
    let mut place = 0;
    for (stage, count) in counts.into_iter().enumerate() {
        builder.block(format!("stage {stage}"), true);
        let width = shape.width << stage.min(3);
        for _ in 0..count {
            let module = format!("features.{place}");
            let window = dimension("window", 3);
            let dimensions = vec![dimension("out_channels", width), window, window, dimension("in_channels", channels)];
            // Kaiming normal over the outputs ("fan out"), as torchvision starts it.
            let initialisation = Initialisation::Normal((2.0 / (width * 9) as f64).sqrt());
            let public = vec![width, channels, 3, 3];
            let weight = builder.parameter_as(format!("{module}.weight"), dimensions, initialisation, vec![0, 3, 1, 2], public);
            x = builder.convolution(&module, x, weight, 1, 1);
            let name = format!("{module}.bias");
            let bias = builder.parameter(name.clone(), vec![dimension("channels", width)], vec![width], Initialisation::Zeros);
            x = builder.bias_add(&name, x, bias);
            place += 1;
            if shape.batch_norm {
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
    let classes = [dimension("classes", shape.classes)];
    let logits = match shape.stem {
        Stem::Small => {
            let x = builder.global_average_pool("avgpool", x);
            builder.linear("classifier", x, 1, &classes, weights, zeros)
        }
        Stem::Imagenet => {
            let hidden = shape.hidden;
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
            let y = builder.matmul("classifier.0", x, weight, 3, crate::kernel::WeightLayout::OutIn);
            let hidden = [dimension("hidden", hidden)];
            let bias = builder.parameter("classifier.0.bias".into(), hidden.to_vec(), vec![shape.hidden], Initialisation::Zeros);
            let y = builder.bias_add("classifier.0.bias", y, bias);
            let y = builder.relu("classifier.1", y);
            let y = builder.dropout("classifier.2", y, shape.dropout);
            let y = builder.linear("classifier.3", y, 1, &hidden, weights, zeros);
            let y = builder.relu("classifier.4", y);
            let y = builder.dropout("classifier.5", y, shape.dropout);
            builder.linear("classifier.6", y, 1, &classes, weights, zeros)
        }
    };
    let labels = builder.input(InputKind::Labels, vec![batch]);
    builder.cross_entropy("loss", logits, labels);
    builder.finish(1, None)
}

/// Side of the image that the classifier sees: images of another size would be pooled to it, which is refused instead.
const POOLED: usize = 7;
