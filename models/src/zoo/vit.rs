//! Vision transformers (Dosovitskiy et al. 2021) with torchvision's names. Dropout is of the embedding and of what goes
//! into the residual stream; not within the perceptron.

use crate::DropoutRate;
use crate::builder::{AttentionKind, GraphBuilder, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind, TensorId};
use crate::kernel::Epsilon;
use crate::specification::GraphOptions;

/// A vision transformer's sizes.
pub(crate) struct VitShape {
    pub(crate) layers: usize,
    pub(crate) hidden: usize,
    pub(crate) heads: usize,
    pub(crate) ffn: usize,
    pub(crate) patch: usize,
    pub(crate) image: usize,
    pub(crate) channels: usize,
    pub(crate) classes: usize,
    pub(crate) dropout: DropoutRate,
    pub(crate) attention_dropout: DropoutRate,
}

const EPSILON: Epsilon = Epsilon::new(6);

pub(crate) fn vit(name: &str, shape: &VitShape, options: &GraphOptions) -> Graph {
    let VitShape { patch, image, channels, classes, .. } = *shape;
    let mut builder = GraphBuilder::new(name, options);
    let batch = dimension(BATCH, options.batch);
    let hidden = dimension("hidden", shape.hidden);
    builder.block("embedding", false);
    let pixels = vec![batch, dimension("height", image), dimension("width", image), dimension("channels", channels)];
    let images = builder.input(InputKind::Images, pixels);
    let window = dimension("window", patch);
    let weight = builder.parameter_as(
        "conv_proj.weight".into(),
        vec![dimension("out_channels", shape.hidden), window, window, dimension("in_channels", channels)],
        Initialisation::Normal((1.0 / (channels * patch * patch) as f64).sqrt()),
        vec![0, 3, 1, 2],
        vec![shape.hidden, channels, patch, patch],
    );
    let patches = builder.convolution("conv_proj", images, weight, patch, 0);
    let out_channels = dimension("channels", shape.hidden);
    let bias = builder.parameter("conv_proj.bias".into(), vec![out_channels], vec![shape.hidden], Initialisation::Zeros);
    let patches = builder.bias_add("conv_proj.bias", patches, bias);
    let token = builder.parameter("class_token".into(), vec![hidden], vec![1, 1, shape.hidden], Initialisation::Zeros);
    let x = builder.prepend("class_token", patches, token);
    let sequence = (image / patch) * (image / patch) + 1;
    let positions = builder.parameter(
        "encoder.pos_embedding".into(),
        vec![dimension("sequence", sequence), hidden],
        vec![1, sequence, shape.hidden],
        Initialisation::Normal(0.02),
    );
    let x = builder.bias_add("encoder.pos_embedding", x, positions);
    let mut x = builder.dropout("encoder.dropout", x, shape.dropout);
    for index in 0..shape.layers {
        builder.block(format!("layer {index}"), true);
        x = layer(&mut builder, &format!("encoder.layers.encoder_layer_{index}"), shape, x);
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

fn layer(builder: &mut GraphBuilder, module: &str, shape: &VitShape, x: TensorId) -> TensorId {
    let VitShape { hidden, heads, ffn, .. } = *shape;
    let name = |part: &str| format!("{module}.{part}");
    // Xavier's uniform distribution, as torchvision starts products; biases of the perceptron are all but zero.
    let xavier = |inputs: usize, outputs: usize| Initialisation::Uniform((6.0 / (inputs + outputs) as f64).sqrt());
    let zeros = Some(Initialisation::Zeros);
    let slight = Some(Initialisation::Normal(1e-6));
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
        AttentionKind { causal: false, scaled: true, relative: None, dropout: shape.attention_dropout },
    );
    let out = Initialisation::Uniform(1.0 / (hidden as f64).sqrt());
    let y = builder.linear(&name("self_attention.out_proj"), y, 2, &hidden_dimension, out, zeros);
    let y = builder.dropout(&name("dropout"), y, shape.dropout);
    let x = builder.add(&name("self_attention.residual"), x, y);

    let y = builder.layer_norm(&name("ln_2"), x, EPSILON);
    let y = builder.linear(&name("mlp.0"), y, 1, &[dimension("ffn", ffn)], xavier(hidden, ffn), slight);
    let y = builder.gelu_exact(&name("mlp.1"), y);
    let y = builder.linear(&name("mlp.3"), y, 1, &hidden_dimension, xavier(ffn, hidden), slight);
    let y = builder.dropout(&name("mlp.4"), y, shape.dropout);
    builder.add(&name("mlp.residual"), x, y)
}
