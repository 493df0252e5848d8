//! The kernel that a rank runs for an operator, given the rank's extents of the loops.

use super::loops::Extent;
use super::operator::{Operand, Operator, Pass};
use crate::kernel::{Kernel, Planned};
use std::num::NonZeroU32;

impl Operator {
    /// Returns the kernel of a rank that has `extents` of the loops, one for each loop.
    ///
    /// The compiler sets samples before the rank's own, and the order of a sequence, when it emits
    /// the instruction.
    pub fn kernel(&self, extents: &[usize]) -> Kernel {
        use Extent::{Columns, Contracted, Experts, Features, Group, Heads, Keys, Parts, Positions, Rows, Vocabulary};
        let of_role = |role: Extent| self.loops.iter().zip(extents).filter(move |(walked, _)| walked.role == role);
        // A role without a loop has size 1.
        let size = |role: Extent| -> usize { of_role(role).map(|(_, &extent)| extent).product() };
        // Parts into which ranks have cut the loops of a role.
        let parts_of = |role: Extent| -> usize { of_role(role).map(|(walked, &extent)| walked.extent / extent.max(1)).product() };
        let mut kernel = self.kind;
        match &mut kernel {
            Kernel::Matmul { rows, columns, contracted, .. }
            | Kernel::MatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::MatmulWeightGradient { rows, columns, contracted, .. }
            | Kernel::EightBitMatmul { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                (*rows, *columns, *contracted) = (size(Rows), size(Columns), size(Contracted));
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                (*experts, *rows) = (size(Experts), size(Rows));
                (*columns, *contracted) = (size(Columns), size(Contracted));
            }
            Kernel::Quantise { rows, columns, .. }
            | Kernel::BiasAdd { rows, columns }
            | Kernel::BiasGradient { rows, columns } => {
                (*rows, *columns) = (size(Rows), size(Columns));
            }
            Kernel::Relu { elements }
            | Kernel::ReluGradient { elements }
            | Kernel::Gelu { elements }
            | Kernel::GeluGradient { elements }
            | Kernel::GeluExact { elements }
            | Kernel::GeluExactGradient { elements }
            | Kernel::SiluMultiply { elements }
            | Kernel::SiluMultiplyGradient { elements }
            | Kernel::Add { elements }
            | Kernel::Multiply { elements }
            | Kernel::Scale { elements, .. } => *elements = extents.iter().product(),
            Kernel::Convolution(window)
            | Kernel::ConvolutionInputGradient(window)
            | Kernel::ConvolutionWeightGradient(window) => {
                (window.batch, window.in_channels) = (size(Rows), size(Contracted));
                window.out_channels = size(Columns);
            }
            Kernel::MaxPool(window) | Kernel::MaxPoolGradient(window) => {
                (window.batch, window.in_channels, window.out_channels) = (size(Rows), size(Features), size(Features));
            }
            Kernel::BatchNorm { groups: batch, positions, channels }
            | Kernel::BatchNormInputGradient { groups: batch, positions, channels }
            | Kernel::GlobalAveragePool { batch, positions, channels }
            | Kernel::GlobalAveragePoolGradient { batch, positions, channels }
            | Kernel::Prepend { batch, positions, features: channels }
            | Kernel::PrependInputGradient { batch, positions, features: channels }
            | Kernel::PrependWeightGradient { batch, positions, features: channels }
            | Kernel::First { batch, positions, features: channels }
            | Kernel::FirstGradient { batch, positions, features: channels } => {
                (*batch, *positions, *channels) = (size(Rows), size(Positions), size(Features));
            }
            Kernel::BatchNormInference { positions, channels } => {
                (*positions, *channels) = (size(Rows) * size(Positions), size(Features));
            }
            Kernel::BatchNormWeightGradient { groups: rows, channels: columns }
            | Kernel::LayerNorm { rows, features: columns, .. }
            | Kernel::LayerNormInputGradient { rows, features: columns }
            | Kernel::LayerNormWeightGradient { rows, features: columns }
            | Kernel::RmsNorm { rows, features: columns, .. }
            | Kernel::RmsNormInputGradient { rows, features: columns }
            | Kernel::RmsNormWeightGradient { rows, features: columns }
            | Kernel::CrossEntropy { rows, classes: columns }
            | Kernel::ClassScores { rows, classes: columns }
            | Kernel::WeightedCrossEntropy { rows, classes: columns, .. }
            | Kernel::WeightedCrossEntropyGradient { rows, classes: columns, .. } => {
                (*rows, *columns) = (size(Rows), size(Features));
            }
            Kernel::LogitStatistics { rows, classes, parts }
            | Kernel::LabelRanks { rows, classes, parts }
            | Kernel::CrossEntropyGradient { rows, classes, parts, .. } => {
                (*rows, *classes, *parts) = (size(Rows), size(Features), parts_of(Features));
            }
            Kernel::CrossEntropyOfStatistics { rows, parts } => (*rows, *parts) = (size(Rows), size(Positions)),
            Kernel::TopLabels { rows, .. } => *rows = size(Rows),
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => {
                (sizes.batch, sizes.positions) = (size(Rows), size(Positions));
                (sizes.heads, sizes.head_dimension) = (size(Heads), size(Features));
                sizes.position_parts = parts_of(Positions);
            }
            Kernel::Dropout(sizes) => {
                (sizes.samples, sizes.positions, sizes.features) = (size(Rows), size(Positions), size(Features));
                sizes.parts = parts_of(Positions);
            }
            Kernel::Embedding { tokens, vocabulary, hidden, parts }
            | Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts } => {
                (*tokens, *vocabulary, *hidden) = (size(Rows), size(Vocabulary), size(Features));
                *parts = parts_of(Vocabulary);
            }
            Kernel::Attention(sizes) | Kernel::AttentionGradient(sizes) => {
                (sizes.batch, sizes.queries, sizes.keys) = (size(Rows), size(Positions), size(Keys));
                (sizes.key_heads, sizes.group) = (size(Heads), size(Group));
                sizes.head_dimension = size(Features);
                // Values have a loop of their own if their heads have other features.
                sizes.value_dimension = of_role(Columns).next().and_then(|(_, &extent)| {
                    NonZeroU32::new(u32::try_from(extent).expect("invariant: a head has less than 2^32 features"))
                });
                let depends_on_part = sizes.causal || sizes.relative.is_some();
                sizes.query_parts = if depends_on_part { parts_of(Positions) } else { 1 };
                if let Some(dropout) = &mut sizes.dropout {
                    dropout.position_parts = parts_of(Positions);
                    (dropout.head_parts, dropout.group_parts) = (parts_of(Heads), parts_of(Group));
                }
            }
            Kernel::Split { rows, parts, columns } | Kernel::Join { rows, parts, columns } => {
                (*rows, *parts, *columns) = (size(Rows), size(Parts), size(Features));
            }
            Kernel::Route { tokens, experts, .. } | Kernel::RouteGradient { tokens, experts, .. } => {
                (*tokens, *experts) = (size(Rows) * size(Positions), size(Experts));
            }
            Kernel::Dispatch(mixture)
            | Kernel::DispatchGradient(mixture)
            | Kernel::Combine(mixture)
            | Kernel::CombineInputGradient(mixture)
            | Kernel::CombineGateGradient(mixture) => {
                (mixture.tokens, mixture.experts) = (size(Rows) * size(Positions), size(Experts));
                // An operator states the slots for one sample of all ranks.
                mixture.capacity = size(Rows) * (mixture.capacity / parts_of(Positions));
                mixture.hidden = size(Features);
            }
            Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } | Kernel::LstmWeightGradient(sizes) => {
                (sizes.batch, sizes.sequence, sizes.hidden) = (size(Rows), size(Positions), size(Features));
            }
            Kernel::Scan(sizes) | Kernel::ScanGradient(sizes) => {
                (sizes.batch, sizes.positions) = (size(Rows), size(Positions));
                (sizes.key_heads, sizes.group) = (size(Heads), size(Group));
                (sizes.key_dimension, sizes.value_dimension) = (size(Features), size(Columns));
            }
            Kernel::Planned(work) => self.plan(work, extents),
            // The compiler emits these with their sizes. No graph has them.
            Kernel::RunningStatistics { .. }
            | Kernel::Sgd { .. }
            | Kernel::AdamW { .. }
            | Kernel::LambDirection { .. }
            | Kernel::LambStep { .. }
            | Kernel::MuonDirection { .. }
            | Kernel::Orthogonalise { .. }
            | Kernel::MuonStep { .. }
            | Kernel::Average { .. }
            | Kernel::Difference { .. }
            | Kernel::OuterStep { .. }
            | Kernel::Compress { .. }
            | Kernel::Decompress { .. }
            | Kernel::UpdateControl { .. }
            | Kernel::Sum { .. }
            | Kernel::Accumulate { .. }
            | Kernel::Narrow { .. }
            | Kernel::Zero { .. }
            | Kernel::SumOfSquares { .. }
            | Kernel::Slice { .. }
            | Kernel::Interleave { .. }
            | Kernel::Deinterleave { .. }
            | Kernel::TakeColumns { .. }
            | Kernel::PutColumns { .. } => unreachable!("invariant: an operator is no work of the compiler's own"),
        }
        kernel
    }

    /// Sets the amount of planned work of a rank that has `extents` of the loops. Every dimension
    /// of the operands has a loop.
    fn plan(&self, work: &mut Planned, extents: &[usize]) {
        let elements = |operand: &Operand| operand.axes.iter().flatten().map(|axis| extents[axis.0]).product();
        for (elements_read, operand) in work.reads.iter_mut().zip(&self.inputs) {
            *elements_read = elements(operand);
        }
        work.written = elements(self.outputs.first().expect("invariant: an operator has a result"));
        work.summed = self.pass == Pass::WeightGradient;
        let counted = self.loops.iter().zip(extents).filter(|(walked, _)| walked.role != Extent::Parts);
        // Products that are larger than this have no plan anyway.
        work.steps = counted.fold(1, |product, (_, &extent)| usize::saturating_mul(product, extent));
    }
}
