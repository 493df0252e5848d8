//! The multi-layer perceptron, named as `torch.nn.Sequential(Linear, ReLU, Linear, ...)` names it.

use crate::builder::{GraphBuilder, dimension};
use crate::graph::{BATCH, Graph, Initialisation, InputKind};
use crate::kernel::WeightLayout;
use crate::specification::GraphOptions;

pub(crate) fn mlp(name: &str, widths: &[usize], options: &GraphOptions) -> Graph {
    let mut builder = GraphBuilder::new(name, options);
    let layers = widths.len().saturating_sub(1);
    let mut x = None;
    for (index, pair) in widths.windows(2).enumerate() {
        let [input, output] = [pair[0], pair[1]];
        // Sequential counts the ReLUs too.
        let module = format!("{}", 2 * index);
        builder.block(format!("layer {index}"), index + 1 < layers);
        let features = match x {
            Some(x) => x,
            None => builder.input(InputKind::Features, vec![dimension(BATCH, options.batch), dimension("features", input)]),
        };
        // PyTorch's default: uniform within 1/sqrt(inputs), for weight and bias alike.
        let initialisation = Initialisation::Uniform(1.0 / (input as f64).sqrt());
        let weight_dimensions = vec![dimension("features", output), dimension("features", input)];
        let weight = builder.parameter(format!("{module}.weight"), weight_dimensions, vec![output, input], initialisation);
        let bias = builder.parameter(format!("{module}.bias"), vec![dimension("features", output)], vec![output], initialisation);
        let product = builder.matmul(&module, features, weight, 1, WeightLayout::OutIn);
        let y = builder.bias_add(&format!("{module}.bias"), product, bias);
        x = Some(if index + 1 < layers { builder.relu(&format!("{}", 2 * index + 1), y) } else { y });
    }
    if let Some(logits) = x {
        let labels = builder.input(InputKind::Labels, vec![dimension(BATCH, options.batch)]);
        builder.cross_entropy("loss", logits, labels);
    }
    builder.finish(1, None)
}
