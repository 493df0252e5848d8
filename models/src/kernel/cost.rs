//! The arithmetic of kernels: what a device does, and what counts for model FLOPs utilisation. It must not know devices.

use super::Kernel;
use crate::attention::Attention;
use foretell_units::{DataType, Flops};

impl Kernel {
    /// Whether the time goes into matrix products, which run at a device's peak, rather than into moving memory.
    pub fn is_matrix_product(&self) -> bool {
        matches!(
            self,
            Kernel::Matmul { .. }
                | Kernel::MatmulInputGradient { .. }
                | Kernel::MatmulWeightGradient { .. }
                | Kernel::EightBitMatmul { .. }
                | Kernel::EightBitMatmulInputGradient { .. }
                | Kernel::EightBitMatmulWeightGradient { .. }
                | Kernel::Lstm(_)
                | Kernel::LstmGradient { .. }
                | Kernel::LstmWeightGradient(_)
                | Kernel::ExpertMatmul { .. }
                | Kernel::ExpertMatmulInputGradient { .. }
                | Kernel::ExpertMatmulWeightGradient { .. }
                | Kernel::Convolution(_)
                | Kernel::ConvolutionInputGradient(_)
                | Kernel::ConvolutionWeightGradient(_)
                | Kernel::Attention(_)
                | Kernel::AttentionGradient(_)
        )
    }

    /// The number format in which a kernel of a run in `precision` multiplies: that, but for operands of eight bits.
    pub fn format(&self, precision: DataType) -> DataType {
        match self {
            Kernel::EightBitMatmul { .. }
            | Kernel::EightBitMatmulInputGradient { .. }
            | Kernel::EightBitMatmulWeightGradient { .. } => DataType::Fp8,
            _ => precision,
        }
    }

    /// The arithmetic that it does: a multiply-add is two operations; causal attention does half of the scores.
    pub fn flops(&self) -> Flops {
        Flops::new(match *self {
            Kernel::Matmul { rows, columns, contracted, .. }
            | Kernel::MatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::MatmulWeightGradient { rows, columns, contracted, .. }
            | Kernel::EightBitMatmul { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulInputGradient { rows, columns, contracted, .. }
            | Kernel::EightBitMatmulWeightGradient { rows, columns, contracted, .. } => {
                2.0 * product(&[rows, columns, contracted])
            }
            Kernel::ExpertMatmul { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulInputGradient { experts, rows, columns, contracted }
            | Kernel::ExpertMatmulWeightGradient { experts, rows, columns, contracted } => {
                2.0 * product(&[experts, rows, columns, contracted])
            }
            Kernel::Lstm(sizes) | Kernel::LstmGradient { sizes, .. } | Kernel::LstmWeightGradient(sizes) => {
                2.0 * product(&[sizes.batch, sizes.sequence, sizes.weight_elements()])
            }
            Kernel::Combine(mixture) | Kernel::CombineGateGradient(mixture) => {
                2.0 * product(&[mixture.tokens, mixture.top, mixture.hidden])
            }
            Kernel::Convolution(window)
            | Kernel::ConvolutionInputGradient(window)
            | Kernel::ConvolutionWeightGradient(window) => {
                2.0 * window.output_elements() as f64 * product(&[window.size, window.size, window.in_channels])
            }
            Kernel::Attention(sizes) => 4.0 * product(&[sizes.batch, sizes.heads(), sizes.head_dimension]) * sizes.scores(),
            Kernel::AttentionGradient(sizes) => {
                // One product to recompute the scores and four for the gradients.
                10.0 * product(&[sizes.batch, sizes.heads(), sizes.head_dimension]) * sizes.scores()
            }
            Kernel::AdamW { elements, .. } => 12.0 * elements as f64,
            Kernel::Gelu { elements } | Kernel::GeluGradient { elements } => 12.0 * elements as f64,
            Kernel::GeluExact { elements } | Kernel::GeluExactGradient { elements } => 20.0 * elements as f64,
            Kernel::SiluMultiply { elements } => 10.0 * elements as f64,
            Kernel::SiluMultiplyGradient { elements } => 14.0 * elements as f64,
            Kernel::Rope(sizes) | Kernel::RopeGradient(sizes) => 3.0 * sizes.elements() as f64,
            // The hash of an element is four products and their mixing.
            Kernel::Dropout(sizes) => 20.0 * sizes.elements() as f64,
            _ => {
                let traffic = self.traffic();
                (traffic.read.max(traffic.written).max(traffic.single)) as f64
            }
        })
    }

    /// The arithmetic beside a product's own of what is fused with it: of a GELU, its slope, a bias's gradient. A bias and a ReLU are one operation
    /// for each of many sums, and not counted.
    pub fn fused_flops(&self) -> Flops {
        Flops::new(match *self {
            Kernel::Matmul { rows, columns, activation, .. } | Kernel::EightBitMatmul { rows, columns, activation, .. }
                if activation.is_gelu() =>
            {
                12.0 * product(&[rows, columns])
            }
            Kernel::MatmulInputGradient { rows, contracted, gelu: true, .. }
            | Kernel::EightBitMatmulInputGradient { rows, contracted, gelu: true, .. } => 12.0 * product(&[rows, contracted]),
            Kernel::MatmulWeightGradient { rows, columns, bias: true, .. } => product(&[rows, columns]),
            _ => 0.0,
        })
    }

    /// The arithmetic that counts for model FLOPs utilisation: matrix products only, attention in full and without recomputation,
    /// as Megatron-LM and PaLM count it (Chowdhery et al. 2022, appendix B).
    pub fn model_flops(&self) -> Flops {
        let full = |sizes: &Attention| product(&[sizes.batch, sizes.heads(), sizes.head_dimension, sizes.queries, sizes.keys]);
        match *self {
            Kernel::Attention(sizes) => Flops::new(4.0 * full(&sizes)),
            Kernel::AttentionGradient(sizes) => Flops::new(8.0 * full(&sizes)),
            kernel if kernel.is_matrix_product() => kernel.flops(),
            _ => Flops::ZERO,
        }
    }
}

fn product(extents: &[usize]) -> f64 {
    extents.iter().map(|&extent| extent as f64).product()
}
