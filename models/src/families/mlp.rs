//! The multi-layer perceptron, with the names of `torch.nn.Sequential(Linear, ReLU, Linear, ...)`.

use super::check::MOST_LAYERS;
use super::{Check, Family};
use crate::builder::{GraphBuilder, GraphOptions, dimension};
use crate::error::ModelError;
use crate::graph::{BATCH, Graph, Initialisation, InputKind};
use crate::kernel::WeightLayout;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A multi-layer perceptron with ReLU between its layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Mlp {
    /// Input features, hidden widths, output classes.
    pub widths: Vec<usize>,
}

impl Family for Mlp {
    const NAME: &'static str = "mlp";
    const OPTIMIZER: Optimizer = Optimizer::Sgd;

    fn zoo() -> Vec<(&'static str, Self)> {
        vec![("mlp", Self { widths: vec![784, 512, 512, 10] })]
    }

    fn examples() -> Vec<(&'static str, Self)> {
        Self::zoo()
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let widths = &self.widths;
        if widths.len() < 2 {
            return check.refuse("`widths` needs an input and an output".into(), "write for example widths: [784, 512, 10]");
        }
        if widths.len() > MOST_LAYERS + 1 {
            return check.refuse(format!("`widths` has {} entries", widths.len()), "a model has 10,000 layers at most");
        }
        widths.iter().try_for_each(|&width| check.sizes(&[("widths", width)]))
    }

    fn sample(&self) -> SampleShape {
        let [width, classes] = [self.widths.first(), self.widths.last()].map(|width| width.copied().unwrap_or(0));
        SampleShape::Features { width, classes }
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        let mut builder = GraphBuilder::new(name, options);
        let layers = self.widths.len().saturating_sub(1);
        let mut x = None;
        for (index, pair) in self.widths.windows(2).enumerate() {
            let [input, output] = [pair[0], pair[1]];
            // `Sequential` numbers the ReLUs too.
            let module = format!("{}", 2 * index);
            builder.block(format!("layer {index}"), index + 1 < layers);
            let features = match x {
                Some(x) => x,
                None => builder.input(InputKind::Features, vec![dimension(BATCH, options.batch), dimension("features", input)]),
            };
            // PyTorch's default for both weight and bias: uniform within 1/√inputs.
            let initialisation = Initialisation::Uniform(1.0 / (input as f64).sqrt());
            let weight_dimensions = vec![dimension("features", output), dimension("features", input)];
            let weight = builder.parameter(format!("{module}.weight"), weight_dimensions, vec![output, input], initialisation);
            let bias =
                builder.parameter(format!("{module}.bias"), vec![dimension("features", output)], vec![output], initialisation);
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
}
