//! The operations of a network's layers.

use crate::kernel::PlannedKind;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A square window over an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkWindow {
    /// Rows and columns of the window.
    pub size: usize,
    /// Distance between windows.
    #[serde(default = "crate::defaults::one")]
    pub stride: usize,
    /// Rows and columns added on each side.
    #[serde(default)]
    pub padding: usize,
}

impl NetworkWindow {
    /// The extent of the result along a dimension of the image. `None` if the window is larger.
    pub(crate) fn extent(&self, image: usize) -> Option<usize> {
        let free = image.checked_add(self.padding.checked_mul(2)?)?.checked_sub(self.size)?;
        Some(free.checked_div(self.stride)? + 1)
    }
}

/// Kinds of work that is planned and simulated by its operands alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkWork {
    /// A function of each element, whose gradient reads the element.
    Function,
    /// A softmax.
    Softmax,
    /// A sum, or a product with constants: its gradient reads nothing but the result's gradient.
    Sum,
    /// A product or a quotient, element by element.
    Combination,
    /// The same numbers in another order, or some of them.
    Move,
    /// Sums, means or maxima of dimensions or windows.
    Reduce,
    /// A norm over some of the dimensions, with or without weights.
    Norm,
    /// Matrix products of two results.
    MatrixProduct,
    /// A convolution that is not square, or in groups, or transposed, or of other dimensions.
    Convolution,
}

impl NetworkWork {
    /// The kind of planned work.
    pub(crate) fn kind(self) -> PlannedKind {
        match self {
            Self::Function => PlannedKind::Function,
            Self::Softmax => PlannedKind::Softmax,
            Self::Sum => PlannedKind::Sum,
            Self::Combination => PlannedKind::Combination,
            Self::Move => PlannedKind::Rearrangement,
            Self::Reduce => PlannedKind::Pool,
            Self::Norm => PlannedKind::Normalisation,
            Self::MatrixProduct => PlannedKind::MatrixProduct,
            Self::Convolution => PlannedKind::GroupedConvolution,
        }
    }

    /// Whether each element of the result belongs to one element of each operand.
    pub(super) fn is_elementwise(self) -> bool {
        matches!(self, Self::Function | Self::Sum | Self::Combination)
    }
}

/// What a layer computes. Shapes leave out the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NetworkOperation {
    /// A trained tensor. It reads nothing, and all samples share it.
    Parameter,
    /// The same numbers in another shape. Nothing is moved.
    View,
    /// Some of the numbers. Nothing is moved.
    Slice,
    /// A product of the last dimension with a parameter.
    Product {
        /// Whether the parameter is `[outputs, inputs]`, and not `[inputs, outputs]`.
        transposed: bool,
    },
    /// The sum with a parameter over the last dimension.
    Bias,
    /// A convolution of an image with a parameter `[outputs, inputs, size, size]`.
    Convolution(NetworkWindow),
    /// Attention of queries `[heads, positions, features]` over keys and values.
    Attention {
        /// Whether a position only attends to itself and to positions before it.
        causal: bool,
    },
    /// Layer normalisation of the last dimension, with two parameters.
    LayerNorm,
    /// Division of the last dimension by its root mean square, with one parameter.
    RmsNorm,
    /// Batch normalisation of an image's channels, with two parameters.
    BatchNorm,
    /// A look-up of integers in a parameter.
    Embedding,
    /// The maximum of each window.
    MaxPool(NetworkWindow),
    /// `max(0, x)`.
    Relu,
    /// GELU.
    Gelu,
    /// Work that no backend has a kernel for.
    Work {
        /// Its kind.
        kind: NetworkWork,
        /// Multiply-adds of products for one sample, or for all of them if it is `shared`.
        #[serde(default, skip_serializing_if = "crate::defaults::is_zero")]
        steps: usize,
    },
    /// The loss over the last dimension.
    Loss,
}

impl NetworkOperation {
    /// Whether the layer has weights that a pipeline should be able to place on another stage.
    pub(super) fn has_weights(self) -> bool {
        matches!(self, Self::Product { .. } | Self::Convolution(_) | Self::Embedding)
    }

    /// Whether the layer belongs to the previous one: an activation, a norm, a pooling.
    pub(super) fn follows(self) -> bool {
        !matches!(
            self,
            Self::Product { .. }
                | Self::Convolution(_)
                | Self::LayerNorm
                | Self::RmsNorm
                | Self::Work { kind: NetworkWork::MatrixProduct | NetworkWork::Convolution, .. }
        )
    }
}
