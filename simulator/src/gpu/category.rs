//! Kinds of work that frameworks launch or fuse differently.

use foretell_models::Kernel;
use serde::{Deserialize, Serialize};

/// Kind of work of an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    /// Matrix products and convolutions.
    Product,
    /// Attention.
    Attention,
    /// Collectives and messages.
    #[serde(rename = "exchange")]
    Communication,
    /// Additions of a bias.
    Bias,
    /// Sums of a gradient over rows, for a bias.
    BiasGradient,
    /// GELU, SiLU, ReLU and their gradients.
    Activation,
    /// Residual additions and dropout.
    Residual,
    /// Norms and their gradients.
    Norm,
    /// Rotary embedding.
    Rope,
    /// Copies that change the arrangement: splits, joins, slices.
    Rearrange,
    /// Embedding look-ups.
    Embedding,
    /// Cross-entropy.
    Loss,
    /// Routing of tokens to experts and back.
    Routing,
    /// Optimizer steps.
    Optimizer,
    /// Work on whole buckets: the gradient's norm, zeroing, narrowing.
    Bucket,
    /// Pooling and everything else.
    Other,
}

impl Category {
    /// Returns the category of a kernel.
    pub(super) fn of(kernel: &Kernel) -> Self {
        match kernel {
            Kernel::Matmul { .. }
            | Kernel::MatmulInputGradient { .. }
            | Kernel::MatmulWeightGradient { .. }
            | Kernel::EightBitMatmul { .. }
            | Kernel::EightBitMatmulInputGradient { .. }
            | Kernel::EightBitMatmulWeightGradient { .. }
            | Kernel::ExpertMatmul { .. }
            | Kernel::ExpertMatmulInputGradient { .. }
            | Kernel::ExpertMatmulWeightGradient { .. }
            | Kernel::Convolution(_)
            | Kernel::ConvolutionInputGradient(_)
            | Kernel::ConvolutionWeightGradient(_)
            | Kernel::Lstm(_)
            | Kernel::LstmGradient { .. } => Category::Product,
            Kernel::Attention(_) | Kernel::AttentionGradient(_) => Category::Attention,
            Kernel::BiasAdd { .. } => Category::Bias,
            Kernel::BiasGradient { .. } => Category::BiasGradient,
            Kernel::Relu { .. }
            | Kernel::ReluGradient { .. }
            | Kernel::Gelu { .. }
            | Kernel::GeluGradient { .. }
            | Kernel::GeluExact { .. }
            | Kernel::GeluExactGradient { .. }
            | Kernel::SiluMultiply { .. }
            | Kernel::SiluMultiplyGradient { .. }
            | Kernel::Multiply { .. } => Category::Activation,
            Kernel::Add { .. } | Kernel::Dropout(_) => Category::Residual,
            Kernel::LayerNorm { .. }
            | Kernel::LayerNormInputGradient { .. }
            | Kernel::LayerNormWeightGradient { .. }
            | Kernel::RmsNorm { .. }
            | Kernel::RmsNormInputGradient { .. }
            | Kernel::RmsNormWeightGradient { .. }
            | Kernel::BatchNorm { .. }
            | Kernel::BatchNormInputGradient { .. }
            | Kernel::BatchNormWeightGradient { .. }
            | Kernel::BatchNormInference { .. }
            | Kernel::RunningStatistics { .. } => Category::Norm,
            Kernel::Rope(_) | Kernel::RopeGradient(_) => Category::Rope,
            Kernel::Split { .. }
            | Kernel::Join { .. }
            | Kernel::Slice { .. }
            | Kernel::Interleave { .. }
            | Kernel::Deinterleave { .. }
            | Kernel::Prepend { .. }
            | Kernel::PrependInputGradient { .. }
            | Kernel::PrependWeightGradient { .. }
            | Kernel::First { .. }
            | Kernel::FirstGradient { .. } => Category::Rearrange,
            Kernel::Embedding { .. } | Kernel::EmbeddingWeightGradient { .. } => Category::Embedding,
            Kernel::CrossEntropy { .. }
            | Kernel::LogitStatistics { .. }
            | Kernel::CrossEntropyOfStatistics { .. }
            | Kernel::CrossEntropyGradient { .. } => Category::Loss,
            Kernel::Route { .. }
            | Kernel::RouteGradient { .. }
            | Kernel::Dispatch(_)
            | Kernel::DispatchGradient(_)
            | Kernel::Combine(_)
            | Kernel::CombineInputGradient(_)
            | Kernel::CombineGateGradient(_) => Category::Routing,
            Kernel::Sgd { .. } | Kernel::AdamW { .. } => Category::Optimizer,
            Kernel::SumOfSquares { .. }
            | Kernel::Sum { .. }
            | Kernel::Zero { .. }
            | Kernel::Narrow { .. }
            | Kernel::Accumulate { .. }
            | Kernel::UpdateControl { .. } => Category::Bucket,
            _ => Category::Other,
        }
    }

    /// Whether a kernel only serves to update parameters: weight gradients, work on buckets, the optimizer.
    pub(super) fn updates_parameters(self, kernel: &Kernel) -> bool {
        matches!(self, Category::Optimizer | Category::Bucket | Category::BiasGradient)
            || matches!(
                kernel,
                Kernel::MatmulWeightGradient { .. }
                    | Kernel::EightBitMatmulWeightGradient { .. }
                    | Kernel::ExpertMatmulWeightGradient { .. }
                    | Kernel::ConvolutionWeightGradient(_)
                    | Kernel::EmbeddingWeightGradient { .. }
                    | Kernel::LayerNormWeightGradient { .. }
                    | Kernel::RmsNormWeightGradient { .. }
                    | Kernel::BatchNormWeightGradient { .. }
                    | Kernel::PrependWeightGradient { .. }
            )
    }
}
