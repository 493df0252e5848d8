//! Work without a kernel in any backend.

use super::{KernelFamily, KernelOperand, KernelSpec, read, write};
use crate::kernel::planned_work::{Planned, PlannedKind};

/// Operations of a softmax for each element: the maximum, a difference, an exponential, the sum and
/// the quotient.
const SOFTMAX_FLOPS: f64 = 5.0;

#[inline(always)]
fn name_and_family(kind: PlannedKind, gradient: bool) -> (&'static str, KernelFamily) {
    let (forward, backward, family) = match kind {
        PlannedKind::ShareAmongHeads => ("share_among_heads", "share_among_heads_gradient", KernelFamily::Rearrangement),
        PlannedKind::GateRows => ("gate_rows", "gate_rows_gradient", KernelFamily::Activation),
        PlannedKind::Function => ("function", "function_gradient", KernelFamily::Activation),
        PlannedKind::Softmax => ("softmax", "softmax_gradient", KernelFamily::Activation),
        PlannedKind::Sum => ("sum", "sum_gradient", KernelFamily::Residual),
        PlannedKind::Combination => ("combination", "combination_gradient", KernelFamily::Activation),
        PlannedKind::Rearrangement => ("rearrangement", "rearrangement_gradient", KernelFamily::Rearrangement),
        PlannedKind::Reshape => ("reshape", "reshape_gradient", KernelFamily::Rearrangement),
        PlannedKind::Slice => ("slice", "slice_gradient", KernelFamily::Rearrangement),
        PlannedKind::Normalisation | PlannedKind::FeatureNorm => ("normalisation", "normalisation_gradient", KernelFamily::Norm),
        PlannedKind::Pool => ("pool", "pool_gradient", KernelFamily::Other),
        PlannedKind::MatrixProduct => ("matrix_product", "matrix_product_gradient", KernelFamily::Product),
        PlannedKind::GroupedConvolution => {
            ("grouped_convolution", "grouped_convolution_gradient", KernelFamily::Convolution)
        }
    };
    (if gradient { backward } else { forward }, family)
}

#[inline(always)]
pub(in crate::kernel) fn planned(work: &Planned) -> KernelSpec {
    let (name, family) = name_and_family(work.kind, work.gradient);
    let [first, second, third] = work.reads;
    let moves = |operand: KernelOperand| match work.kind {
        // A change of shape moves nothing.
        PlannedKind::Reshape => operand.uncounted(),
        PlannedKind::Slice if !work.gradient => operand.uncounted(),
        // Where only some numbers are taken, only they are read.
        PlannedKind::Rearrangement => operand.moving(operand.elements.min(work.written)),
        _ => operand,
    };
    let result = moves(write("y", work.written));
    let flops = match work.kind {
        PlannedKind::MatrixProduct | PlannedKind::GroupedConvolution => Some(2.0 * work.steps as f64),
        PlannedKind::Softmax => Some(SOFTMAX_FLOPS * work.written as f64),
        _ => None,
    };
    KernelSpec {
        flops,
        may_work_in_place: work.kind == PlannedKind::Reshape,
        ..KernelSpec::new(name, family, [first, second, third, work.written, work.steps], [
            moves(read("a", first)), moves(read("b", second)).when(second > 0), moves(read("c", third)).when(third > 0),
            if work.summed { result.single() } else { result },
        ])
    }
}
