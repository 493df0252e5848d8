//! Networks of any operators, one after the other: what an ONNX graph becomes.
//!
//! A layer reads the network's input, or layers before it. Shapes are those of one sample, with
//! channels before rows and columns as in ONNX. Blocks are cut where one tensor is all that later
//! layers need. It must not know how a graph is sharded or computed.

mod build;
mod operation;

pub use operation::{NetworkConvolution, NetworkOperation, NetworkPool};

use super::{Check, Family};
use crate::builder::GraphOptions;
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a network reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum NetworkInput {
    /// An image.
    Image {
        /// Channels of a pixel.
        channels: usize,
        /// Rows of pixels.
        height: usize,
        /// Columns of pixels.
        width: usize,
    },
    /// A vector.
    Features {
        /// Its length.
        width: usize,
    },
    /// A sequence of tokens.
    Tokens {
        /// Positions.
        sequence: usize,
        /// Size of the vocabulary: every token is below it.
        vocabulary: usize,
    },
}

impl NetworkInput {
    /// The shape of one sample.
    pub(crate) fn shape(&self) -> Vec<usize> {
        match *self {
            Self::Image { channels, height, width } => vec![channels, height, width],
            Self::Features { width } => vec![width],
            Self::Tokens { sequence, .. } => vec![sequence],
        }
    }
}

/// A layer: an operation on the results of layers before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkLayer {
    /// Its name, which its weights have too.
    pub name: String,
    /// What it reads: 0 for the network's input, and n for the n-th layer.
    pub reads: Vec<usize>,
    /// What it computes.
    pub operation: NetworkOperation,
}

/// A network of operators. The last layer gives the logits: a class for each sample or, if it has
/// several dimensions, for each place of a sample.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// What it reads.
    pub input: NetworkInput,
    /// Its layers, in an order in which each reads what comes before it.
    pub layers: Vec<NetworkLayer>,
}

/// The most layers of a network: ten times those of the deepest published ones.
const MOST_NETWORK_LAYERS: usize = 20_000;

/// The most elements of one sample of one layer.
const MOST_SAMPLE_ELEMENTS: usize = 1 << 40;

impl Network {
    /// The shape of one sample of the input and of each layer.
    ///
    /// # Errors
    /// A sentence, if a layer cannot have what it reads.
    pub(crate) fn shapes(&self) -> Result<Vec<Vec<usize>>, String> {
        let mut shapes = vec![self.input.shape()];
        for (index, layer) in self.layers.iter().enumerate() {
            let name = &layer.name;
            let reads: Option<Vec<&[usize]>> =
                layer.reads.iter().map(|&read| shapes.get(read).filter(|_| read <= index).map(Vec::as_slice)).collect();
            let reads = reads.ok_or_else(|| format!("layer `{name}` reads a layer that does not come before it"))?;
            let shape = layer.operation.shape(&reads).map_err(|reason| format!("layer `{name}`: {reason}"))?;
            let elements = shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
            if shape.is_empty()
                || shape.len() > build::MOST_AXES
                || elements.is_none_or(|elements| elements == 0 || elements > MOST_SAMPLE_ELEMENTS)
            {
                return Err(format!(
                    "layer `{name}` has the shape {shape:?}, which is empty or too large, or has more than six dimensions"
                ));
            }
            shapes.push(shape);
        }
        Ok(shapes)
    }

    /// The shape of the logits of one sample.
    fn output(&self) -> Vec<usize> {
        self.shapes().ok().and_then(|shapes| shapes.last().cloned()).unwrap_or_default()
    }

    /// The classes, and the predictions of a sample: logits of an image have their classes first.
    fn predictions(&self) -> (usize, usize) {
        let output = self.output();
        let classes = if output.len() == 3 { output.first() } else { output.last() };
        let classes = classes.copied().unwrap_or(1).max(1);
        (classes, output.iter().product::<usize>() / classes)
    }
}

impl Family for Network {
    const NAME: &'static str = "network";
    const OPTIMIZER: Optimizer = Optimizer::Sgd;

    fn zoo() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    fn examples() -> Vec<(&'static str, Self)> {
        Vec::new()
    }

    fn validate(&self, check: &Check<'_>) -> Result<(), ModelError> {
        let hint = "`foretell models show FILE.onnx` prints a network in the right form";
        if self.layers.is_empty() || self.layers.len() > MOST_NETWORK_LAYERS {
            return check.refuse(format!("it has {} layers", self.layers.len()), "a network has 1 to 20,000 layers");
        }
        let sizes = self.input.shape();
        let vocabulary = if let NetworkInput::Tokens { vocabulary, .. } = self.input { vocabulary } else { 1 };
        check.sizes(&sizes.iter().chain([&vocabulary]).map(|&size| ("input", size)).collect::<Vec<_>>())?;
        let mut names: Vec<&str> = self.layers.iter().map(|layer| layer.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return check.refuse(format!("two layers have the name `{}`", twice[0]), "give each layer a name of its own");
        }
        if let Err(reason) = self.layers.iter().try_for_each(|layer| layer.operation.validate()) {
            return check.refuse(reason, "every size is from 1 to 16,777,216");
        }
        self.shapes().map(|_| ()).map_err(|reason| check.error(reason, hint))
    }

    fn sample(&self) -> SampleShape {
        let (classes, _) = self.predictions();
        match self.input {
            NetworkInput::Image { channels, height, width } => SampleShape::Image { channels, height, width, classes },
            NetworkInput::Features { width } => SampleShape::Features { width, classes },
            NetworkInput::Tokens { sequence, vocabulary } => SampleShape::Tokens { sequence, vocabulary },
        }
    }

    fn has_batch_norm(&self) -> bool {
        self.layers.iter().any(|layer| layer.operation == NetworkOperation::BatchNorm)
    }

    fn planned_only(&self) -> Vec<&'static str> {
        vec!["`family: network`"]
    }

    fn graph(&self, name: &str, options: &GraphOptions) -> Graph {
        build::graph(self, name, options)
    }
}
