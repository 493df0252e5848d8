//! Tensors: name, shape, purpose and storage. A tensor does not know the operators that use it.

use crate::storage::Storage;

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
    /// Token ids `[batch, sequence]`. Of a target sequence each position's id is the token before.
    Tokens,
    /// Token ids `[batch, sequence]` of a source sequence.
    SourceTokens,
    /// A class for each sample, or for each position of a sequence.
    Labels,
    /// The text of a sample that each token belongs to, `[batch, sequence]`. All belong to the
    /// first.
    TokenTypes,
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
    /// Public shape. Its elements are ours, permuted.
    pub shape: Vec<usize>,
    /// Names of the public tensors if there are several, such as one for each expert of a mixture.
    /// Each is one index of the first dimension of `shape`, and has the other dimensions. Empty if
    /// the public form is one tensor with the name of ours.
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
    /// Made by an operator and read by others.
    Activation,
    /// Made from this parameter alone, and thus equal in all micro-batches of a step.
    OfParameter(TensorId),
    /// Gradient of this parameter, summed over micro-batches.
    ParameterGradient(TensorId),
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

/// One tensor of a parameter's public form, as a file of weights has it.
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
    /// Returns the tensors of a parameter's public form, in order: one, except for stacked experts.
    /// Empty for other tensors.
    pub fn public_tensors(&self) -> Vec<PublicTensor> {
        let Role::Parameter(Parameter { shape, parts, .. }) = &self.role else { return Vec::new() };
        if parts.is_empty() {
            return vec![PublicTensor { name: self.name.clone(), shape: shape.clone(), elements: 0..self.elements() }];
        }
        let shape = shape.get(1..).unwrap_or_default().to_vec();
        let length: usize = shape.iter().product();
        let part = |(index, name): (usize, &String)| PublicTensor {
            name: name.clone(),
            shape: shape.clone(),
            elements: index * length..(index + 1) * length,
        };
        parts.iter().enumerate().map(part).collect()
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
