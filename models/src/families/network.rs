//! Networks of arbitrary operators in sequence: the form that a traced PyTorch step is converted
//! to.
//!
//! A layer reads the network's inputs, or earlier layers. Shapes are those of one sample, with
//! channels before rows and columns as in PyTorch. A layer that is `shared` is the same for all
//! samples: a parameter, or a view of one. The module must not know how a graph is sharded or
//! computed.

mod build;
mod operation;
mod shapes;

pub use operation::{NetworkOperation, NetworkWindow, NetworkWork};

use super::{Check, Family};
use crate::builder::GraphOptions;
use crate::error::ModelError;
use crate::graph::Graph;
use crate::optimizer::Optimizer;
use crate::sample::SampleShape;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A tensor that each sample has as input.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkInput {
    /// The shape of one sample.
    pub shape: Vec<usize>,
    /// For integers, such as tokens: the bound that each is below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocabulary: Option<usize>,
}

/// How the results of a layer are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkStorage {
    /// In the precision of the run.
    #[default]
    Precision,
    /// In single precision.
    Single,
    /// As integers.
    Integer,
}

impl NetworkStorage {
    fn is_usual(&self) -> bool {
        *self == Self::Precision
    }
}

/// A block of layers. A pipeline can be cut before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkBlock {
    /// The block's name.
    pub name: String,
    /// Whether its activations may be dropped and recomputed.
    #[serde(default, skip_serializing_if = "crate::defaults::is_false")]
    pub recomputable: bool,
}

/// A layer: an operation on the results of layers before it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkLayer {
    /// The layer's name; for a parameter, the parameter's name.
    pub name: String,
    /// Indices of the values that it reads: first the network's inputs, from 0 on, then its layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub reads: Vec<usize>,
    /// What it computes.
    pub operation: NetworkOperation,
    /// The shape of its result for one sample, or for all of them if it is `shared`.
    pub shape: Vec<usize>,
    /// Whether its result is the same for all samples.
    #[serde(default, skip_serializing_if = "crate::defaults::is_false")]
    pub shared: bool,
    /// How its result is stored.
    #[serde(default, skip_serializing_if = "NetworkStorage::is_usual")]
    pub storage: NetworkStorage,
    /// The block that begins with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<NetworkBlock>,
}

/// A network of operators, with at least one loss.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// The tensors that each sample provides.
    pub inputs: Vec<NetworkInput>,
    /// The optimizer that trains it.
    #[serde(default)]
    pub optimizer: Optimizer,
    /// Its layers, each after the layers that it reads.
    pub layers: Vec<NetworkLayer>,
}

/// The most layers of a network: ten times the operators of the deepest traced models.
const MOST_NETWORK_LAYERS: usize = 200_000;

/// The most elements of one sample of one layer.
const MOST_SAMPLE_ELEMENTS: usize = 1 << 40;

/// The most dimensions of a sample.
const MOST_DIMENSIONS: usize = 16;

impl Network {
    /// The loss of the network: the classes of each prediction, and the predictions of a sample.
    fn predictions(&self) -> (usize, usize) {
        let reads = |layer: &NetworkLayer| layer.reads.first().and_then(|&read| read.checked_sub(self.inputs.len()));
        let loss = self.layers.iter().find(|layer| layer.operation == NetworkOperation::Loss);
        let read = loss.and_then(reads).and_then(|place| self.layers.get(place));
        let shape = read.map_or(&[][..], |layer| &layer.shape);
        let classes = shape.last().copied().unwrap_or(1).max(1);
        (classes, shape.iter().fold(1usize, |product, &extent| product.saturating_mul(extent)) / classes)
    }

    /// Refuses layers whose shapes do not fit what they read.
    fn check_layers(&self) -> Result<(), String> {
        let mut values: Vec<(&[usize], bool)> = self.inputs.iter().map(|input| (&input.shape[..], false)).collect();
        let mut operations: Vec<Option<&NetworkOperation>> = vec![None; values.len()];
        for layer in &self.layers {
            let name = &layer.name;
            check_shape(&layer.shape).map_err(|reason| format!("layer `{name}` {reason}"))?;
            let reads: Option<Vec<shapes::Read<'_>>> = layer
                .reads
                .iter()
                .map(|&read| {
                    let &(shape, shared) = values.get(read)?;
                    let is_parameter = operations.get(read) == Some(&Some(&NetworkOperation::Parameter));
                    Some(shapes::Read { shape, shared, is_parameter })
                })
                .collect();
            let reads = reads.ok_or_else(|| format!("layer `{name}` reads a layer that does not come before it"))?;
            let is_integer = layer.reads.first().is_some_and(|&read| self.is_integer(read));
            shapes::check(layer, &reads, is_integer).map_err(|reason| format!("layer `{name}`: {reason}"))?;
            values.push((&layer.shape, layer.shared));
            operations.push(Some(&layer.operation));
        }
        Ok(())
    }

    /// Whether the value with this index consists of integers.
    fn is_integer(&self, place: usize) -> bool {
        match self.inputs.get(place) {
            Some(input) => input.vocabulary.is_some(),
            None => self.layers.get(place - self.inputs.len()).is_some_and(|layer| layer.storage == NetworkStorage::Integer),
        }
    }
}

/// Refuses shapes that are empty or too large.
fn check_shape(shape: &[usize]) -> Result<(), String> {
    let elements = shape.iter().try_fold(1usize, |product, &extent| product.checked_mul(extent));
    if shape.len() > MOST_DIMENSIONS || elements.is_none_or(|elements| elements == 0 || elements > MOST_SAMPLE_ELEMENTS) {
        return Err(format!("has the shape {shape:?}, which is empty or too large, or has more than 16 dimensions"));
    }
    Ok(())
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
        let hint = "`foretell import torch` writes a network in the right form";
        if self.layers.is_empty() || self.layers.len() > MOST_NETWORK_LAYERS {
            return check.refuse(format!("it has {} layers", self.layers.len()), "a network has 1 to 200,000 layers");
        }
        if self.inputs.is_empty() || self.inputs.len() > MOST_DIMENSIONS {
            return check.refuse(format!("it has {} inputs", self.inputs.len()), "a network has 1 to 16 inputs");
        }
        for input in &self.inputs {
            check_shape(&input.shape).map_err(|reason| check.error(format!("an input {reason}"), hint))?;
            check.sizes(&[("vocabulary", input.vocabulary.unwrap_or(1))])?;
        }
        let mut names: Vec<&str> = self.layers.iter().map(|layer| layer.name.as_str()).collect();
        names.sort_unstable();
        if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            return check.refuse(format!("two layers have the name `{}`", twice[0]), "give each layer a name of its own");
        }
        self.check_layers().map_err(|reason| check.error(reason, hint))?;
        if !self.layers.iter().any(|layer| layer.operation == NetworkOperation::Loss) {
            return check.refuse("it has no loss".into(), hint);
        }
        Ok(())
    }

    fn sample(&self) -> SampleShape {
        let (classes, _) = self.predictions();
        let tokens = self.inputs.iter().find_map(|input| match (&input.shape[..], input.vocabulary) {
            (&[sequence], Some(vocabulary)) if sequence > 1 => Some(SampleShape::Tokens { sequence, vocabulary }),
            _ => None,
        });
        let image = self.inputs.iter().find_map(|input| match (&input.shape[..], input.vocabulary) {
            (&[channels, height, width], None) => Some(SampleShape::Image { channels, height, width, classes }),
            _ => None,
        });
        let width = || self.inputs.iter().map(|input| input.shape.iter().product::<usize>()).sum();
        tokens.or(image).unwrap_or_else(|| SampleShape::Features { width: width(), classes })
    }

    fn usual_optimizer(&self) -> Optimizer {
        self.optimizer
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
