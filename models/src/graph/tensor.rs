//! Tensors: name, shape, purpose and storage. A tensor does not know the operators that use it.

use crate::storage::Storage;
use std::sync::Arc;

/// Index of a tensor in [`Graph::tensors`](super::Graph::tensors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// A named dimension of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimension {
    /// Name for people, such as `batch`, `hidden` or `heads`.
    pub name: &'static str,
    /// Size over all ranks.
    pub extent: usize,
}

/// A tensor that the training data supplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InputKind {
    /// Images `[batch, height, width, channels]`.
    Images,
    /// Feature vectors `[batch, features]`.
    Features,
    /// Token ids `[batch, sequence]`. For a target sequence, the id at each position is the
    /// previous token's.
    Tokens,
    /// Token ids `[batch, sequence]` of a source sequence.
    SourceTokens,
    /// A class for each sample, or for each position of a sequence.
    Labels,
    /// For each token, the text of the sample that it belongs to, `[batch, sequence]`. Here always
    /// the first.
    TokenTypes,
    /// The row of each position in a table of positions, `[batch, sequence]`.
    Positions {
        /// Row of the first position.
        first: usize,
    },
}

/// Initial values of a parameter, as the model's authors draw them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initialisation {
    /// All zero.
    Zeros,
    /// All one.
    Ones,
    /// Normal with this standard deviation.
    Normal(f64),
    /// Uniform between minus and plus this bound.
    Uniform(f64),
}

/// The public form of a parameter: that of published weights.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// Initial values.
    pub initialisation: Initialisation,
    /// Order of our dimensions in the public tensor. For example, torchvision keeps the weight of a
    /// convolution as `[out, in, r, s]`.
    pub permutation: Vec<usize>,
    /// Public shape. The public tensor has our elements, permuted.
    pub shape: Vec<usize>,
    /// Names of the public tensors if there are several, such as one for each expert of a mixture.
    /// Each holds one index of the first dimension of `shape`, and all of the other dimensions.
    /// Empty if the public form is one tensor with our tensor's name.
    pub parts: Vec<String>,
}

/// The purpose of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub enum Role {
    /// Read from the data set.
    Input(InputKind),
    /// Trained.
    Parameter(Parameter),
    /// Kept between steps but not trained: running mean and variance of batch norm.
    Running,
    /// Constant values that come with the graph and are never written.
    Constant(Arc<[f32]>),
    /// Made by an operator and read by others.
    Activation,
    /// Computed from this parameter alone, and thus equal in all micro-batches of a step.
    OfParameter(TensorId),
    /// Gradient of this parameter, summed over micro-batches.
    ParameterGradient(TensorId),
    /// Made by an operator, and kept for all micro-batches until the end of the step.
    Kept,
    /// A sum that a kernel computes together with others, and that nothing reads.
    UnreadSum,
    /// A sum over the batch, and over micro-batches: loss, correct predictions, batch statistics.
    Sum,
}

/// A tensor of the graph, in its size over all ranks.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Public name of a parameter (`transformer.h.0.attn.c_attn.weight`), else the name of the
    /// operator that makes it.
    pub name: String,
    /// Purpose.
    pub role: Role,
    /// Shape.
    pub dimensions: Vec<Dimension>,
    /// How the elements are stored.
    pub storage: Storage,
}

/// One tensor of the public form of a parameter or of running statistics, as a file of weights has
/// it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicTensor {
    /// Name.
    pub name: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// Range of its elements, counted in the order of [`Parameter::shape`].
    pub elements: std::ops::Range<usize>,
}

impl Tensor {
    /// Returns the tensors of the public form, in order: one of a parameter, except for stacked
    /// experts; mean and variance of running statistics. Empty for other tensors.
    pub fn public_tensors(&self) -> Vec<PublicTensor> {
        let (names, shape): (Vec<String>, Vec<usize>) = match &self.role {
            Role::Parameter(Parameter { shape, parts, .. }) if parts.is_empty() => {
                return vec![PublicTensor { name: self.name.clone(), shape: shape.clone(), elements: 0..self.elements() }];
            }
            Role::Parameter(Parameter { shape, parts, .. }) => (parts.clone(), shape[1..].to_vec()),
            Role::Running => {
                let channels = self.dimensions.iter().skip(1).map(|dimension| dimension.extent);
                (["mean", "var"].map(|moment| format!("{}_{moment}", self.name)).to_vec(), channels.collect())
            }
            _ => return Vec::new(),
        };
        let length: usize = shape.iter().product();
        let part = |(index, name)| PublicTensor { name, shape: shape.clone(), elements: index * length..(index + 1) * length };
        names.into_iter().enumerate().map(part).collect()
    }

    /// Returns our dimensions in the order of the public form.
    pub fn public_order(&self) -> Vec<usize> {
        match &self.role {
            Role::Parameter(parameter) => parameter.permutation.clone(),
            _ => (0..self.dimensions.len()).collect(),
        }
    }

    /// Returns the public name of the number of batches that running statistics have seen, which
    /// torchvision's files have beside them. `None` for other tensors.
    pub fn public_batch_count(&self) -> Option<String> {
        let module = self.name.strip_suffix(".running").filter(|_| self.role == Role::Running)?;
        Some(format!("{module}.num_batches_tracked"))
    }

    /// Whether it has a dimension of a vocabulary or of classes, as the weight of an output
    /// projection has.
    pub(crate) fn is_of_predictions(&self) -> bool {
        self.dimensions.iter().any(|dimension| matches!(dimension.name, "vocabulary" | "classes"))
    }

    /// Returns the number of elements over all ranks.
    pub fn elements(&self) -> usize {
        self.dimensions.iter().map(|dimension| dimension.extent).product()
    }

    /// Returns the number of elements over all ranks, or `None` if it exceeds a `usize`.
    pub(crate) fn checked_elements(&self) -> Option<usize> {
        self.dimensions.iter().try_fold(1usize, |product, dimension| product.checked_mul(dimension.extent))
    }
}
