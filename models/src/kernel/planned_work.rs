//! Work that is planned and simulated, but that no backend has a kernel for.
//!
//! One variant of [`Kernel`](super::Kernel) stands for all of it: the kind of work, and how much it
//! reads, writes and multiplies. Its gradients have the same form.

use serde::{Deserialize, Serialize};

/// Kind of planned work.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlannedKind {
    /// Features that all heads share, put before each head's own: the rotary part of latent
    /// attention (DeepSeek-AI 2024).
    ShareAmongHeads,
    /// `y = σ(gate) · x`, with one gate for each row.
    GateRows,
    /// A function of each element.
    Function,
    /// A softmax over the last dimension.
    Softmax,
    /// A sum or a difference of two tensors, of which one may be repeated along dimensions.
    Sum,
    /// A product or a quotient of two tensors, element by element. One may be repeated.
    Combination,
    /// The same numbers in another order, or some of them: transposition, concatenation, slices.
    Rearrangement,
    /// The same numbers in the same order, in another shape. Nothing is moved.
    Reshape,
    /// Some of the numbers, where they are: nothing is moved. The gradient writes zeros and those.
    Slice,
    /// A norm over some of the dimensions. Its operands are, in order, the input, the scale and the
    /// shift.
    Normalisation,
    /// A norm of each position over its last dimension, with a scale and without a shift.
    FeatureNorm,
    /// Means or other statistics of windows, or of whole dimensions.
    Pool,
    /// Matrix products of two activations.
    MatrixProduct,
    /// A convolution in groups of channels, or with a window that is not square.
    GroupedConvolution,
}

/// What a gradient reads beside the gradient of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GradientReads {
    /// Nothing.
    Nothing,
    /// The operand that it is the gradient of.
    Itself,
    /// The other operands of the operator.
    Others,
    /// The input of the norm, and the scale.
    Normed,
}

impl PlannedKind {
    /// Whether each position of a sequence is computed independently.
    pub(crate) fn works_by_position(self) -> bool {
        match self {
            Self::ShareAmongHeads | Self::GateRows | Self::Function | Self::Sum | Self::Combination | Self::FeatureNorm => true,
            Self::Softmax
            | Self::Rearrangement
            | Self::Reshape
            | Self::Slice
            | Self::Normalisation
            | Self::Pool
            | Self::MatrixProduct
            | Self::GroupedConvolution => false,
        }
    }

    /// What the gradient of an operand reads.
    pub(crate) fn gradient_reads(self) -> GradientReads {
        match self {
            Self::Function | Self::Softmax => GradientReads::Itself,
            Self::GateRows | Self::Combination | Self::MatrixProduct | Self::GroupedConvolution => GradientReads::Others,
            Self::Normalisation | Self::FeatureNorm => GradientReads::Normed,
            Self::ShareAmongHeads | Self::Sum | Self::Rearrangement | Self::Reshape | Self::Slice | Self::Pool => {
                GradientReads::Nothing
            }
        }
    }
}

/// The most operands that planned work reads. Longer lists are joined in steps.
pub(crate) const MOST_PLANNED_READS: usize = 3;

/// An amount of planned work, on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Planned {
    /// Kind of work.
    pub kind: PlannedKind,
    /// Whether it is the gradient of one operand.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gradient: bool,
    /// Whether it writes the gradient of a parameter, in single precision.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub summed: bool,
    /// Elements of each operand that is read. 0 where there is none.
    pub reads: [usize; MOST_PLANNED_READS],
    /// Elements that are written.
    pub written: usize,
    /// Multiply-adds of products, and elements of other work.
    pub steps: usize,
}

impl Planned {
    /// Whether it is a matrix product or a convolution.
    pub fn is_product(&self) -> bool {
        matches!(self.kind, PlannedKind::MatrixProduct | PlannedKind::GroupedConvolution)
    }

    /// Whether it only views memory: no kernel runs.
    pub fn is_view(&self) -> bool {
        self.kind == PlannedKind::Reshape || (self.kind == PlannedKind::Slice && !self.gradient)
    }

    /// The sizes of a product: batch, rows, columns, and the dimension that it sums over. Each of
    /// its three operands lacks one of the last three. A convolution in groups counts as the
    /// product that reads its windows.
    pub fn product(&self) -> [usize; 4] {
        let [left, right] = [self.reads[0].max(1), self.reads[1].max(1)];
        let contracted = (self.steps / self.written.max(1)).max(1);
        let [columns, rows] = [self.steps / left, self.steps / right].map(|extent| extent.max(1));
        match self.kind {
            PlannedKind::MatrixProduct => [(left / (rows * contracted).max(1)).max(1), rows, columns, contracted],
            _ => [1, rows, (self.written / rows).max(1), contracted],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Planned, PlannedKind};

    #[test]
    fn the_sizes_of_a_product_follow_from_its_operands() {
        let [batch, rows, columns, contracted] = [6, 5, 7, 11];
        let work = Planned {
            kind: PlannedKind::MatrixProduct,
            gradient: false,
            summed: false,
            reads: [batch * rows * contracted, batch * contracted * columns, 0],
            written: batch * rows * columns,
            steps: batch * rows * columns * contracted,
        };
        assert_eq!(work.product(), [batch, rows, columns, contracted]);
    }
}
