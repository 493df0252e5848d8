//! Time of attention: as one fused kernel, or as products and softmax in separate kernels.

use super::costs::GpuCosts;
use super::format::ProductFormat;
use super::product::Product;
use super::stack::AttentionKind;
use foretell_models::{Attention, Kernel};
use foretell_units::{DataType, Seconds};

/// Queries in a tile that FlashAttention assigns to a multiprocessor.
const QUERY_TILE: usize = 128;

/// Number of waves of such tiles at which fused attention reaches half of its efficiency. Fitted on
/// `bf16_op_efficiency.csv` with 4 to 128 heads.
const HALF_WAVES: f64 = 1.2;

/// Exponent with which the efficiency of fused attention falls with the width of heads below 128:
/// at half the width it is 15 % lower (Dao 2023, figures 4 to 6).
const NARROW_HEADS: f64 = 0.23;

/// Number of additional kernels per pass where the softmax is not one fused kernel but five: cast,
/// scale, mask, softmax and cast (`forward_torch_softmax` in Megatron's fused_softmax.py).
const SOFTMAX_OPERATORS: f64 = 4.0;

/// Bytes per score that these kernels read and write in addition to the fused kernel: 2 + 4, 4 + 4,
/// 4 + 4, 4 + 4 and 4 + 2, in place of 2 + 2.
const SOFTMAX_BYTES: f64 = 32.0;

/// Direction of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    Backward,
}

/// Returns the device time of attention, and the number of its kernels. Attention that is not fused
/// computes all scores, also those that packed sequences mask.
pub(super) fn attention_time(
    costs: &GpuCosts<'_>,
    sizes: &Attention,
    direction: Direction,
    precision: DataType,
) -> (Seconds, f64) {
    let (forward_bytes, backward_bytes, single, fused_by) = match costs.stack.attention {
        AttentionKind::Fused { scale, for_ampere } => {
            let scale = fused_scale(costs, sizes, scale, for_ampere);
            let kernels = if direction == Direction::Forward { 1.0 } else { 2.0 };
            return (fused_time(costs, sizes, direction, scale, Saturation::BySize), kernels);
        }
        AttentionKind::Unfused { forward_bytes, backward_bytes, single, fused_by } => {
            (forward_bytes, backward_bytes, single, fused_by)
        }
    };
    let batch = sizes.batch * sizes.heads();
    // The backward pass has two products for each product of the forward pass.
    let (products, bytes) = match direction {
        Direction::Forward => (1.0, forward_bytes),
        Direction::Backward => (2.0, backward_bytes),
    };
    let element = precision.size().value();
    let product = |columns, contracted| Product {
        batch,
        rows: sizes.queries,
        columns,
        contracted,
        operand_bytes: element,
        // The stack's bytes per score include those of the output.
        output_bytes: 0.0,
    };
    let scores = costs.product_time(&product(sizes.keys, sizes.head_dimension));
    let values = costs.product_time(&product(sizes.value_features(), sizes.keys));
    let elements = batch as f64 * sizes.queries as f64 * sizes.keys as f64;
    let width = if precision.size().count() < 4 { 1.0 } else { single };
    let is_softmax_fused = batch.is_multiple_of(fused_by);
    let (more_kernels, more_bytes) = if is_softmax_fused { (0.0, 0.0) } else { (SOFTMAX_OPERATORS, SOFTMAX_BYTES) };
    let moved = costs.moving_time(elements * (bytes * width + more_bytes));
    ((scores + values) * products + moved, 4.0 * products + more_kernels)
}

/// Returns the time of a scan's products. No scan was measured, so their efficiency is assumed to
/// be that of fused attention.
pub(super) fn scan_products_time(costs: &GpuCosts<'_>, kernel: &Kernel, direction: Direction) -> Seconds {
    let gpu = &costs.cluster.gpu;
    let efficiency = match direction {
        Direction::Forward => gpu.attention[0],
        Direction::Backward => gpu.attention[1],
    };
    let format = if costs.format.is_cast() { ProductFormat::Bf16 } else { costs.format };
    Seconds::new(kernel.flops().value() / (gpu.peak(format).value() * efficiency))
}

/// Returns the efficiency of a fused kernel on these sizes, over that in the device's profile.
fn fused_scale(costs: &GpuCosts<'_>, sizes: &Attention, scale: f64, for_ampere: bool) -> f64 {
    let is_part = sizes.query_parts > 1 || sizes.ring.is_some() || (sizes.causal && sizes.queries < sizes.keys);
    match costs.stack.parted_attention.filter(|_| is_part) {
        Some(parted) => parted,
        None if for_ampere => scale * costs.cluster.gpu.ampere_attention,
        None => scale,
    }
}

/// How busy a fused kernel keeps the multiprocessors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Saturation {
    BySize,
    Full,
}

/// Returns a lower bound on the device time of all kernels that together compute attention of these
/// sizes, divided over batch, heads or sequence. Only unmasked scores count: ring attention runs no
/// kernel for a fully masked part.
pub(super) fn divided_attention_time(costs: &GpuCosts<'_>, sizes: &Attention, direction: Direction) -> Seconds {
    match costs.stack.attention {
        AttentionKind::Fused { scale, for_ampere } => {
            let scale = fused_scale(costs, sizes, scale, for_ampere);
            fused_time(costs, sizes, direction, scale, Saturation::Full)
        }
        AttentionKind::Unfused { .. } => {
            let kernel = match direction {
                Direction::Forward => Kernel::Attention(*sizes),
                Direction::Backward => Kernel::AttentionGradient(*sizes),
            };
            // The backward pass has twice the products, and reads the scores that the forward pass
            // kept.
            let passes = if direction == Direction::Forward { 1.0 } else { 2.0 };
            let least = kernel.flops().min(Kernel::Attention(*sizes).flops() * passes);
            Seconds::new(least.value() / costs.fastest_products().value())
        }
    }
}

fn fused_time(costs: &GpuCosts<'_>, sizes: &Attention, direction: Direction, scale: f64, saturation: Saturation) -> Seconds {
    let gpu = &costs.cluster.gpu;
    let (kernel, efficiency) = match direction {
        Direction::Forward => (Kernel::Attention(*sizes), gpu.attention[0]),
        Direction::Backward => (Kernel::AttentionGradient(*sizes), gpu.attention[1]),
    };
    let format = if costs.format.is_cast() { ProductFormat::Bf16 } else { costs.format };
    let tiles = (sizes.batch * sizes.heads() * sizes.queries.div_ceil(QUERY_TILE)) as f64;
    let (waves, half_waves) = match saturation {
        Saturation::BySize => (tiles / gpu.multiprocessors, HALF_WAVES),
        Saturation::Full => (1.0, 0.0),
    };
    let narrow = (sizes.head_dimension as f64 / 128.0).min(1.0).powf(NARROW_HEADS);
    let reached = efficiency * scale * narrow * waves / (waves + half_waves);
    // Kernels for packed sequences skip scores between different documents
    // (`flash_attn_varlen_func`).
    let attended = kernel.flops().value() * costs.workload.attended;
    Seconds::new(attended / (gpu.peak(format).value() * reached))
}
