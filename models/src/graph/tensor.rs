//! Tensors: a name, a shape, what they are for and how their numbers are stored. They do not know who makes or reads them.

use crate::storage::Storage;

/// A tensor's place in [`Graph::tensors`](super::Graph::tensors).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TensorId(pub usize);

/// A named extent of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dimension {
    /// What a person calls it: `batch`, `hidden`, `heads`.
    pub name: &'static str,
    /// Its size over all ranks.
    pub extent: usize,
}

/// What the training data supplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum InputKind {
    /// Images `[batch, height, width, channels]`.
    Images,
    /// Feature vectors `[batch, features]`.
    Features,
    /// Token ids `[batch, sequence]`; of a sequence to be made from another, those that come before each of its own.
    Tokens,
    /// Token ids `[batch, sequence]` of the sequence from which another is made.
    SourceTokens,
    /// A class per sample, or per position of a sequence.
    Labels,
    /// To which of the texts of a sample a token belongs, `[batch, sequence]`: all to the first.
    TokenTypes,
}

/// How a parameter starts, as the model's authors start it.
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

/// A parameter as its users know it.
#[derive(Clone, Debug, PartialEq)]
pub struct Parameter {
    /// How it starts.
    pub initialisation: Initialisation,
    /// The order of our dimensions that gives the public tensor: torchvision keeps a convolution's weight as `[out, in, r, s]`.
    pub permutation: Vec<usize>,
    /// The public shape, whose elements are ours permuted.
    pub shape: Vec<usize>,
    /// Where the public form is several tensors, as the experts of a mixture are: their names. Each is one index of the first dimension of
    /// `shape` and has the shape of the others. Empty where it is one tensor, under the tensor's own name.
    pub parts: Vec<String>,
}

/// What a tensor is for.
#[derive(Clone, Debug, PartialEq)]
pub enum Role {
    /// Read from the data set.
    Input(InputKind),
    /// Trained.
    Parameter(Parameter),
    /// Kept between steps but not trained: batch norm's running mean and variance.
    Running,
    /// Made by an operator and used by others.
    Activation,
    /// Made of this parameter alone, and so the same for all micro-batches of a step.
    OfParameter(TensorId),
    /// The gradient of a parameter, summed over micro-batches.
    ParameterGradient(TensorId),
    /// A sum over the batch that the run reports or keeps: loss, correct predictions, batch statistics; summed over micro-batches.
    Sum,
}

/// A tensor of the graph, in its full size.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// The name under which its users know it (`transformer.h.0.attn.c_attn.weight`), or that of the operator that makes it.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Its shape.
    pub dimensions: Vec<Dimension>,
    /// How its elements are stored.
    pub storage: Storage,
}

/// A tensor of a parameter's public form: what a file of weights has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicTensor {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Its elements, counted in the order of [`Parameter::shape`].
    pub elements: std::ops::Range<usize>,
}

impl Tensor {
    /// The tensors under which a parameter is publicly known, in order: one, but for the stacked experts of a mixture. None of what is
    /// not a parameter.
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

    /// The number of elements over all ranks.
    pub fn elements(&self) -> usize {
        self.dimensions.iter().map(|dimension| dimension.extent).product()
    }

    /// The same where that is a number that can be counted with.
    pub(crate) fn checked_elements(&self) -> Option<usize> {
        self.dimensions.iter().try_fold(1usize, |product, dimension| product.checked_mul(dimension.extent))
    }
}
