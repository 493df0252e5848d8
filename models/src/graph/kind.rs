//! What operators compute, apart from their sizes.

use super::loops::{Extent, Slots};
use crate::attention::RelativePositions;
use crate::dropout::DropoutSite;
use crate::kernel::{Activation, EightBits, Epsilon, WeightLayout, Window};

/// What an operator computes. The loops carry the sizes, this the rest.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs)] // Each is described at the kernel of the same name.
pub enum OperatorKind {
    /// `activation` is set by fusion only.
    Matmul {
        weight: WeightLayout,
        activation: Activation,
    },
    /// With a third input, which fusion gives it, that is a GELU's argument.
    MatmulInputGradient(WeightLayout),
    /// With a second output, which fusion gives it, that is a bias's gradient.
    MatmulWeightGradient(WeightLayout),
    Quantise {
        format: EightBits,
        straight: bool,
        transposed: bool,
    },
    EightBitMatmul {
        activation: Activation,
    },
    /// With a fifth input that is a GELU's argument.
    EightBitMatmulInputGradient,
    EightBitMatmulWeightGradient(WeightLayout),
    BiasAdd,
    BiasGradient,
    Relu,
    ReluGradient,
    Gelu,
    GeluGradient,
    GeluExact,
    GeluExactGradient,
    SiluMultiply,
    SiluMultiplyGradient,
    Add,
    /// The window's batch and channels are those of the loops.
    Convolution(Window),
    ConvolutionInputGradient(Window),
    ConvolutionWeightGradient(Window),
    BatchNorm,
    BatchNormInputGradient,
    BatchNormWeightGradient,
    BatchNormInference,
    MaxPool(Window),
    MaxPoolGradient(Window),
    GlobalAveragePool,
    GlobalAveragePoolGradient,
    LayerNorm(Epsilon),
    LayerNormInputGradient,
    LayerNormWeightGradient,
    RmsNorm(Epsilon),
    RmsNormInputGradient,
    RmsNormWeightGradient,
    /// The base of the frequencies.
    Rope {
        theta: usize,
    },
    RopeGradient {
        theta: usize,
    },
    /// Its own gradient.
    Dropout(DropoutSite),
    Prepend,
    PrependInputGradient,
    PrependWeightGradient,
    First,
    FirstGradient,
    Embedding,
    EmbeddingWeightGradient,
    /// `packed` is set by fusion only.
    Attention {
        causal: bool,
        scaled: bool,
        relative: Option<RelativePositions>,
        dropout: Option<DropoutSite>,
        packed: bool,
    },
    AttentionGradient {
        causal: bool,
        scaled: bool,
        relative: Option<RelativePositions>,
        dropout: Option<DropoutSite>,
        packed: bool,
    },
    Split,
    Join,
    CrossEntropy,
    LogitStatistics,
    CrossEntropyOfStatistics,
    /// The number of predictions in the global batch, over which the loss is a mean.
    CrossEntropyGradient {
        normalizer: usize,
    },
    /// Experts that a token is sent to.
    Route {
        top: usize,
    },
    RouteGradient {
        top: usize,
    },
    Dispatch(Slots),
    DispatchGradient(Slots),
    Combine(Slots),
    CombineInputGradient(Slots),
    CombineGateGradient(Slots),
    ExpertMatmul,
    ExpertMatmulInputGradient,
    ExpertMatmulWeightGradient,
    /// What the divisor is the root of.
    Scale {
        square: usize,
    },
    Multiply,
    Lstm {
        initial: bool,
    },
    LstmGradient {
        initial: bool,
        outputs: bool,
        last: bool,
    },
    LstmWeightGradient {
        initial: bool,
    },
}

impl OperatorKind {
    /// Whether it is attention itself, whose sequence is shared out by other means than that of operators that work position by position.
    pub fn is_attention(&self) -> bool {
        matches!(self, OperatorKind::Attention { .. } | OperatorKind::AttentionGradient { .. })
    }

    /// The role of the loop of which a kernel must know which part a rank has, if there is one.
    pub fn positional(&self) -> Option<Extent> {
        match self {
            OperatorKind::Embedding | OperatorKind::EmbeddingWeightGradient => Some(Extent::Vocabulary),
            OperatorKind::LogitStatistics | OperatorKind::CrossEntropyGradient { .. } => Some(Extent::Features),
            OperatorKind::Attention { .. }
            | OperatorKind::AttentionGradient { .. }
            | OperatorKind::Rope { .. }
            | OperatorKind::RopeGradient { .. }
            | OperatorKind::Dropout(_) => Some(Extent::Positions),
            _ => None,
        }
    }

    /// Whether the loop of [`OperatorKind::positional`] may be cut along several axes of the mesh at a time.
    pub fn is_positional_along_several_axes(&self) -> bool {
        matches!(self, OperatorKind::Dropout(_))
    }

    /// Whether a kernel must know which part of a loop of this role a rank has: of the role of [`OperatorKind::positional`], and where
    /// attention drops probabilities of the heads.
    pub fn knows_part_of(&self, role: Extent) -> bool {
        let of_heads = self.is_attention() && self.drops() && matches!(role, Extent::Heads | Extent::Group);
        self.positional() == Some(role) || of_heads
    }

    /// Whether it drops some of what it makes, by the numbers of its samples.
    pub fn drops(&self) -> bool {
        matches!(
            self,
            OperatorKind::Dropout(_)
                | OperatorKind::Attention { dropout: Some(_), .. }
                | OperatorKind::AttentionGradient { dropout: Some(_), .. }
        )
    }
}
