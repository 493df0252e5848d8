//! Kinds of operators: their computations, without sizes.

use super::loops::{Extent, Slots};
use crate::attention::RelativePositions;
use crate::dropout::DropoutSite;
use crate::kernel::{Activation, EightBits, Epsilon, PlannedKind, ScanRule, Smoothing, WeightLayout, Window};

/// The computation of an operator, except its sizes, which are those of its loops.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "each is described at the kernel of the same name")]
pub enum OperatorKind {
    /// Only fusion sets `activation`.
    Matmul {
        weight: WeightLayout,
        activation: Activation,
    },
    /// Fusion may add a third input: a GELU's argument.
    MatmulInputGradient(WeightLayout),
    /// Fusion may add a second output: a bias's gradient.
    MatmulWeightGradient(WeightLayout),
    Quantise {
        format: EightBits,
        straight: bool,
        transposed: bool,
    },
    EightBitMatmul {
        activation: Activation,
    },
    /// Fusion may add a fifth input: a GELU's argument.
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
    /// Batch and channels of the window are those of the loops. So it is for all windows.
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
    Rope {
        theta: usize,
        rotated: Option<usize>,
    },
    RopeGradient {
        theta: usize,
        rotated: Option<usize>,
    },
    /// Also its own gradient.
    Dropout(DropoutSite),
    Prepend,
    PrependInputGradient,
    PrependWeightGradient,
    First,
    FirstGradient,
    Embedding,
    EmbeddingWeightGradient,
    /// Only fusion sets `packed`.
    Attention {
        causal: bool,
        scaled: bool,
        window: Option<usize>,
        relative: Option<RelativePositions>,
        dropout: Option<DropoutSite>,
        packed: bool,
    },
    AttentionGradient {
        causal: bool,
        scaled: bool,
        window: Option<usize>,
        relative: Option<RelativePositions>,
        dropout: Option<DropoutSite>,
        packed: bool,
    },
    Split,
    Join,
    CrossEntropy,
    LogitStatistics,
    CrossEntropyOfStatistics,
    LabelRanks,
    TopLabels {
        /// Number of the best classes.
        top: usize,
    },
    ClassScores,
    WeightedCrossEntropy {
        /// Smoothing of the targets.
        smoothing: Smoothing,
    },
    WeightedCrossEntropyGradient {
        /// Smoothing of the targets.
        smoothing: Smoothing,
        /// Predictions of the global batch.
        normalizer: usize,
    },
    CrossEntropyGradient {
        normalizer: usize,
    },
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
    Scale {
        times: usize,
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
    Scan {
        rule: ScanRule,
        /// Positions of a chunk.
        chunk: usize,
    },
    ScanGradient {
        rule: ScanRule,
        /// Positions of a chunk.
        chunk: usize,
    },
    Planned {
        kind: PlannedKind,
        gradient: bool,
    },
}

impl OperatorKind {
    /// Whether it works on the part of the classes that a rank has, and must have that part.
    pub fn works_on_parts_of_classes(&self) -> bool {
        matches!(self, OperatorKind::LogitStatistics | OperatorKind::LabelRanks)
    }

    /// Whether it reads logits first, and makes a loss or a part of one.
    pub(super) fn is_loss(&self) -> bool {
        matches!(self, Self::CrossEntropy | Self::LogitStatistics | Self::WeightedCrossEntropy { .. })
    }

    /// Whether it is attention. Its sequence is sharded by other means than that of operators that
    /// work position by position.
    pub fn is_attention(&self) -> bool {
        matches!(self, OperatorKind::Attention { .. } | OperatorKind::AttentionGradient { .. })
    }

    /// Returns the role of the loop whose part a kernel must know, such as the positions of a
    /// rotary embedding. `None` if the work is the same on every part.
    pub fn positional_role(&self) -> Option<Extent> {
        match self {
            OperatorKind::Embedding | OperatorKind::EmbeddingWeightGradient => Some(Extent::Vocabulary),
            OperatorKind::LogitStatistics | OperatorKind::LabelRanks | OperatorKind::CrossEntropyGradient { .. } => {
                Some(Extent::Features)
            }
            OperatorKind::Attention { .. }
            | OperatorKind::AttentionGradient { .. }
            | OperatorKind::Rope { .. }
            | OperatorKind::RopeGradient { .. }
            | OperatorKind::Dropout(_) => Some(Extent::Positions),
            _ => None,
        }
    }

    /// Whether several axes of the mesh may cut the loop of [`OperatorKind::positional_role`]
    /// together.
    pub fn is_positional_along_several_axes(&self) -> bool {
        matches!(self, OperatorKind::Dropout(_))
    }

    /// Whether a kernel must know a rank's part of the loops of this role. Such is the role of
    /// [`OperatorKind::positional_role`], and the heads of attention with dropout.
    pub fn depends_on_part_of(&self, role: Extent) -> bool {
        let drops_by_head = self.is_attention() && self.has_dropout() && matches!(role, Extent::Heads | Extent::Group);
        self.positional_role() == Some(role) || drops_by_head
    }

    /// Whether it gives the same results where the positions of a sequence are stored in another
    /// order, if its kernel knows the order. A scan, a recurrence or a window of positions does
    /// not. Neither does attention to keys after the query, as its keys may be another sequence's.
    pub fn follows_order_of_positions(&self) -> bool {
        match self {
            Self::Attention { causal, relative, .. } | Self::AttentionGradient { causal, relative, .. } => {
                *causal && relative.is_none_or(|relative| relative == RelativePositions::SINKS)
            }
            Self::Planned { kind, .. } => kind.works_by_position(),
            Self::Convolution(_)
            | Self::ConvolutionInputGradient(_)
            | Self::ConvolutionWeightGradient(_)
            | Self::MaxPool(_)
            | Self::MaxPoolGradient(_)
            | Self::GlobalAveragePool
            | Self::GlobalAveragePoolGradient
            | Self::Prepend
            | Self::PrependInputGradient
            | Self::PrependWeightGradient
            | Self::First
            | Self::FirstGradient
            | Self::Lstm { .. }
            | Self::LstmGradient { .. }
            | Self::LstmWeightGradient { .. }
            | Self::Scan { .. }
            | Self::ScanGradient { .. } => false,
            Self::Matmul { .. }
            | Self::MatmulInputGradient(_)
            | Self::MatmulWeightGradient(_)
            | Self::Quantise { .. }
            | Self::EightBitMatmul { .. }
            | Self::EightBitMatmulInputGradient
            | Self::EightBitMatmulWeightGradient(_)
            | Self::BiasAdd
            | Self::BiasGradient
            | Self::Relu
            | Self::ReluGradient
            | Self::Gelu
            | Self::GeluGradient
            | Self::GeluExact
            | Self::GeluExactGradient
            | Self::SiluMultiply
            | Self::SiluMultiplyGradient
            | Self::Add
            | Self::BatchNorm
            | Self::BatchNormInputGradient
            | Self::BatchNormWeightGradient
            | Self::BatchNormInference
            | Self::LayerNorm(_)
            | Self::LayerNormInputGradient
            | Self::LayerNormWeightGradient
            | Self::RmsNorm(_)
            | Self::RmsNormInputGradient
            | Self::RmsNormWeightGradient
            | Self::Rope { .. }
            | Self::RopeGradient { .. }
            | Self::Dropout(_)
            | Self::Embedding
            | Self::EmbeddingWeightGradient
            | Self::Split
            | Self::Join
            | Self::CrossEntropy
            | Self::LogitStatistics
            | Self::CrossEntropyOfStatistics
            | Self::LabelRanks
            | Self::TopLabels { .. }
            | Self::ClassScores
            | Self::WeightedCrossEntropy { .. }
            | Self::WeightedCrossEntropyGradient { .. }
            | Self::CrossEntropyGradient { .. }
            | Self::Route { .. }
            | Self::RouteGradient { .. }
            | Self::Dispatch(_)
            | Self::DispatchGradient(_)
            | Self::Combine(_)
            | Self::CombineInputGradient(_)
            | Self::CombineGateGradient(_)
            | Self::ExpertMatmul
            | Self::ExpertMatmulInputGradient
            | Self::ExpertMatmulWeightGradient
            | Self::Scale { .. }
            | Self::Multiply => true,
        }
    }

    /// Whether it drops elements, which depends on the numbers of its samples in the global batch.
    pub fn has_dropout(&self) -> bool {
        matches!(
            self,
            OperatorKind::Dropout(_)
                | OperatorKind::Attention { dropout: Some(_), .. }
                | OperatorKind::AttentionGradient { dropout: Some(_), .. }
        )
    }
}
