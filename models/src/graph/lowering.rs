//! The kernel that a rank runs for an operator, given the rank's extents of the loops.

use super::kind::OperatorKind;
use super::loops::{Extent, Loop, Slots};
use super::operator::{Operand, Operator, Pass};
use crate::attention::{Attention, Rope};
use crate::dropout::{AttentionDropout, Dropout, DropoutSite};
use crate::kernel::{Kernel, MOST_PLANNED_READS, Mixture, Planned, PlannedKind, Recurrence, Scan, Window};
use std::num::NonZeroU32;

impl Operator {
    /// Returns the kernel of a rank that has `extents` of the loops, one for each loop.
    pub fn kernel(&self, extents: &[usize]) -> Kernel {
        let size = |role: Extent| -> usize {
            self.loops.iter().zip(extents).filter(|(one, _)| one.role == role).map(|(_, &extent)| extent).product()
        };
        let rows = size(Extent::Rows);
        let columns = size(Extent::Columns);
        let contracted = size(Extent::Contracted);
        let features = size(Extent::Features);
        let positions = size(Extent::Positions);
        let experts = size(Extent::Experts);
        let recurrence = |initial| Recurrence { batch: rows, sequence: positions, hidden: features, initial };
        let scan = |rule, chunk| Scan {
            rule,
            batch: rows,
            positions,
            key_heads: size(Extent::Heads),
            group: size(Extent::Group),
            key_dimension: features,
            value_dimension: columns,
            chunk,
        };
        // Parts into which ranks have cut the loops of a role.
        let parts = |role: Extent| -> usize {
            let cut = |(one, &extent): (&Loop, &usize)| if one.role == role { one.extent / extent.max(1) } else { 1 };
            self.loops.iter().zip(extents).map(cut).product()
        };
        let mixture = |Slots { top, per_sample }: Slots| Mixture {
            tokens: rows * positions,
            experts,
            capacity: rows * (per_sample / parts(Extent::Positions)),
            top,
            hidden: features,
        };
        // For element-wise operators only. The loops of a product may multiply to more than a
        // `usize`.
        let elements = || extents.iter().product();
        let window = |window: Window| Window { batch: rows, in_channels: contracted, out_channels: columns, ..window };
        let pooled = |window: Window| Window { batch: rows, in_channels: features, out_channels: features, ..window };
        let attention = |causal, scaled, window, relative, dropout: Option<DropoutSite>, packed| Attention {
            batch: rows,
            queries: positions,
            keys: size(Extent::Keys),
            key_heads: size(Extent::Heads),
            group: size(Extent::Group),
            head_dimension: features,
            // Values have a loop of their own if their heads have other features.
            value_dimension: NonZeroU32::new(u32::try_from(columns).expect("a head has less than 2^32 features"))
                .filter(|_| self.loops.iter().any(|one| one.role == Extent::Columns)),
            causal,
            scaled,
            window,
            relative,
            packed,
            query_parts: if causal || relative.is_some() { parts(Extent::Positions) } else { 1 },
            query_offset: 0,
            zigzag: None,
            ring: None,
            dropout: dropout.map(|site| AttentionDropout {
                site,
                first_sample: 0,
                position_parts: parts(Extent::Positions),
                head_parts: parts(Extent::Heads),
                group_parts: parts(Extent::Group),
                sample_parts: 1,
            }),
        };
        let rope = |theta, rotated| Rope {
            batch: rows,
            positions,
            heads: size(Extent::Heads),
            head_dimension: features,
            rotated,
            theta,
            position_parts: parts(Extent::Positions),
            position_offset: 0,
            zigzag: None,
        };
        match self.kind {
            OperatorKind::Matmul { weight, activation } => {
                Kernel::Matmul { rows, columns, contracted, weight, bias: self.inputs.len() > 2, activation }
            }
            OperatorKind::MatmulInputGradient(weight) => {
                Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: self.inputs.len() > 2 }
            }
            OperatorKind::MatmulWeightGradient(weight) => {
                Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: self.outputs.len() > 1 }
            }
            OperatorKind::Quantise { format, straight, transposed } => {
                Kernel::Quantise { rows, columns, format, straight, transposed }
            }
            OperatorKind::EightBitMatmul { activation } => {
                Kernel::EightBitMatmul { rows, columns, contracted, bias: self.inputs.len() > 4, activation }
            }
            OperatorKind::EightBitMatmulInputGradient => {
                Kernel::EightBitMatmulInputGradient { rows, columns, contracted, gelu: self.inputs.len() > 4 }
            }
            OperatorKind::EightBitMatmulWeightGradient(weight) => {
                Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, weight }
            }
            OperatorKind::BiasAdd => Kernel::BiasAdd { rows, columns },
            OperatorKind::BiasGradient => Kernel::BiasGradient { rows, columns },
            OperatorKind::Relu => Kernel::Relu { elements: elements() },
            OperatorKind::ReluGradient => Kernel::ReluGradient { elements: elements() },
            OperatorKind::Gelu => Kernel::Gelu { elements: elements() },
            OperatorKind::GeluGradient => Kernel::GeluGradient { elements: elements() },
            OperatorKind::GeluExact => Kernel::GeluExact { elements: elements() },
            OperatorKind::GeluExactGradient => Kernel::GeluExactGradient { elements: elements() },
            OperatorKind::SiluMultiply => Kernel::SiluMultiply { elements: elements() },
            OperatorKind::SiluMultiplyGradient => Kernel::SiluMultiplyGradient { elements: elements() },
            OperatorKind::Add => Kernel::Add { elements: elements() },
            OperatorKind::Convolution(shape) => Kernel::Convolution(window(shape)),
            OperatorKind::ConvolutionInputGradient(shape) => Kernel::ConvolutionInputGradient(window(shape)),
            OperatorKind::ConvolutionWeightGradient(shape) => Kernel::ConvolutionWeightGradient(window(shape)),
            OperatorKind::BatchNorm => Kernel::BatchNorm { groups: rows, positions, channels: features },
            OperatorKind::BatchNormInputGradient => {
                Kernel::BatchNormInputGradient { groups: rows, positions, channels: features }
            }
            OperatorKind::BatchNormWeightGradient => Kernel::BatchNormWeightGradient { groups: rows, channels: features },
            OperatorKind::BatchNormInference => Kernel::BatchNormInference { positions: rows * positions, channels: features },
            OperatorKind::MaxPool(shape) => Kernel::MaxPool(pooled(shape)),
            OperatorKind::MaxPoolGradient(shape) => Kernel::MaxPoolGradient(pooled(shape)),
            OperatorKind::GlobalAveragePool => Kernel::GlobalAveragePool { batch: rows, positions, channels: features },
            OperatorKind::GlobalAveragePoolGradient => {
                Kernel::GlobalAveragePoolGradient { batch: rows, positions, channels: features }
            }
            OperatorKind::LayerNorm(epsilon) => Kernel::LayerNorm { rows, features, epsilon },
            OperatorKind::LayerNormInputGradient => Kernel::LayerNormInputGradient { rows, features },
            OperatorKind::LayerNormWeightGradient => Kernel::LayerNormWeightGradient { rows, features },
            OperatorKind::RmsNorm(epsilon) => Kernel::RmsNorm { rows, features, epsilon },
            OperatorKind::RmsNormInputGradient => Kernel::RmsNormInputGradient { rows, features },
            OperatorKind::RmsNormWeightGradient => Kernel::RmsNormWeightGradient { rows, features },
            OperatorKind::Rope { theta, rotated } => Kernel::Rope(rope(theta, rotated)),
            OperatorKind::RopeGradient { theta, rotated } => Kernel::RopeGradient(rope(theta, rotated)),
            // The compiler sets the samples, and the order of a sequence, when it emits the
            // instruction.
            OperatorKind::Dropout(site) => Kernel::Dropout(Dropout {
                first_sample: 0,
                samples: rows,
                positions,
                features,
                parts: parts(Extent::Positions),
                sample_parts: 1,
                zigzag: None,
                site,
            }),
            OperatorKind::Prepend => Kernel::Prepend { batch: rows, positions, features },
            OperatorKind::PrependInputGradient => Kernel::PrependInputGradient { batch: rows, positions, features },
            OperatorKind::PrependWeightGradient => Kernel::PrependWeightGradient { batch: rows, positions, features },
            OperatorKind::First => Kernel::First { batch: rows, positions, features },
            OperatorKind::FirstGradient => Kernel::FirstGradient { batch: rows, positions, features },
            OperatorKind::Embedding => Kernel::Embedding {
                tokens: rows,
                vocabulary: size(Extent::Vocabulary),
                hidden: features,
                parts: parts(Extent::Vocabulary),
            },
            OperatorKind::EmbeddingWeightGradient => Kernel::EmbeddingWeightGradient {
                tokens: rows,
                vocabulary: size(Extent::Vocabulary),
                hidden: features,
                parts: parts(Extent::Vocabulary),
            },
            OperatorKind::Attention { causal, scaled, window, relative, dropout, packed } => {
                Kernel::Attention(attention(causal, scaled, window, relative, dropout, packed))
            }
            OperatorKind::AttentionGradient { causal, scaled, window, relative, dropout, packed } => {
                Kernel::AttentionGradient(attention(causal, scaled, window, relative, dropout, packed))
            }
            OperatorKind::Split => Kernel::Split { rows, parts: size(Extent::Parts), columns: features },
            OperatorKind::Join => Kernel::Join { rows, parts: size(Extent::Parts), columns: features },
            OperatorKind::CrossEntropy => Kernel::CrossEntropy { rows, classes: features },
            OperatorKind::LogitStatistics => Kernel::LogitStatistics { rows, classes: features, parts: parts(Extent::Features) },
            OperatorKind::CrossEntropyOfStatistics => Kernel::CrossEntropyOfStatistics { rows, parts: positions },
            OperatorKind::LabelRanks => Kernel::LabelRanks { rows, classes: features, parts: parts(Extent::Features) },
            OperatorKind::TopLabels { top } => Kernel::TopLabels { rows, top },
            OperatorKind::ClassScores => Kernel::ClassScores { rows, classes: features },
            OperatorKind::WeightedCrossEntropy { smoothing } => {
                Kernel::WeightedCrossEntropy { rows, classes: features, smoothing }
            }
            OperatorKind::WeightedCrossEntropyGradient { smoothing, normalizer } => {
                Kernel::WeightedCrossEntropyGradient { rows, classes: features, smoothing, normalizer, scaled: false }
            }
            OperatorKind::CrossEntropyGradient { normalizer } => Kernel::CrossEntropyGradient {
                rows,
                classes: features,
                normalizer,
                parts: parts(Extent::Features),
                scaled: false,
            },
            OperatorKind::Route { top } => Kernel::Route { tokens: rows * positions, experts, top },
            OperatorKind::RouteGradient { top } => Kernel::RouteGradient { tokens: rows * positions, experts, top },
            OperatorKind::Dispatch(slots) => Kernel::Dispatch(mixture(slots)),
            OperatorKind::DispatchGradient(slots) => Kernel::DispatchGradient(mixture(slots)),
            OperatorKind::Combine(slots) => Kernel::Combine(mixture(slots)),
            OperatorKind::CombineInputGradient(slots) => Kernel::CombineInputGradient(mixture(slots)),
            OperatorKind::CombineGateGradient(slots) => Kernel::CombineGateGradient(mixture(slots)),
            OperatorKind::Lstm { initial } => Kernel::Lstm(recurrence(initial)),
            OperatorKind::LstmGradient { initial, outputs, last } => {
                Kernel::LstmGradient { sizes: recurrence(initial), outputs, last }
            }
            OperatorKind::LstmWeightGradient { initial } => Kernel::LstmWeightGradient(recurrence(initial)),
            OperatorKind::Scan { rule, chunk } => Kernel::Scan(scan(rule, chunk)),
            OperatorKind::ScanGradient { rule, chunk } => Kernel::ScanGradient(scan(rule, chunk)),
            OperatorKind::Planned { kind, gradient } => Kernel::Planned(self.planned_work(kind, gradient, extents)),
            OperatorKind::Multiply => Kernel::Multiply { elements: elements() },
            OperatorKind::Scale { times, square } => Kernel::Scale { elements: elements(), times, square },
            OperatorKind::ExpertMatmul => Kernel::ExpertMatmul { experts, rows, columns, contracted },
            OperatorKind::ExpertMatmulInputGradient => Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted },
            OperatorKind::ExpertMatmulWeightGradient => Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted },
        }
    }

    /// Returns the planned work of a rank that has `extents` of the loops. Every dimension of the
    /// operands has a loop.
    fn planned_work(&self, kind: PlannedKind, gradient: bool, extents: &[usize]) -> Planned {
        let elements = |operand: &Operand| operand.axes.iter().flatten().map(|axis| extents[axis.0]).product();
        let mut reads = [0; MOST_PLANNED_READS];
        for (place, operand) in reads.iter_mut().zip(&self.inputs) {
            *place = elements(operand);
        }
        let counted = self.loops.iter().zip(extents).filter(|(one, _)| one.role != Extent::Parts);
        Planned {
            kind,
            gradient,
            summed: self.pass == Pass::WeightGradient,
            reads,
            written: elements(self.outputs.first().expect("invariant: an operator has a result")),
            // Products that are larger than this have no plan anyway.
            steps: counted.fold(1, |product, (_, &extent)| usize::saturating_mul(product, extent)),
        }
    }
}
