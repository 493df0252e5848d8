//! Kinds of work that frameworks launch or fuse differently.

use foretell_models::{Kernel, KernelFamily};
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
    /// Copies that change the layout of data: splits, joins, slices.
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
        // The time of an LSTM's weight gradient is modelled from its memory traffic, like that of
        // other work.
        if let Kernel::LstmWeightGradient(_) = kernel {
            return Category::Other;
        }
        match kernel.family() {
            KernelFamily::Product | KernelFamily::Convolution => Category::Product,
            KernelFamily::Attention => Category::Attention,
            KernelFamily::Bias => Category::Bias,
            KernelFamily::BiasGradient => Category::BiasGradient,
            KernelFamily::Activation => Category::Activation,
            KernelFamily::Residual => Category::Residual,
            KernelFamily::Norm => Category::Norm,
            KernelFamily::Rope => Category::Rope,
            KernelFamily::Rearrangement => Category::Rearrange,
            KernelFamily::Embedding => Category::Embedding,
            KernelFamily::Loss => Category::Loss,
            KernelFamily::Routing => Category::Routing,
            KernelFamily::Optimizer => Category::Optimizer,
            KernelFamily::Bucket => Category::Bucket,
            KernelFamily::Other => Category::Other,
        }
    }

    /// Returns whether a kernel only serves to update parameters: weight gradients, work on
    /// buckets, the optimizer.
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
