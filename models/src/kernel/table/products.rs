//! Products of matrices, in the precision of the run and in eight bits, and biases.

use super::{KernelFamily, KernelSpec, product, read, write};
use crate::kernel::sizes::{Activation, WeightLayout};

/// Operations of a GELU by its tanh approximation, or of its slope, for each element.
pub(super) const GELU_FLOPS: f64 = 12.0;

/// Operations of a fused GELU, or of its slope.
#[inline(always)]
fn gelu_flops(is_fused: bool, rows: usize, columns: usize) -> f64 {
    if is_fused { GELU_FLOPS * product(&[rows, columns]) } else { 0.0 }
}

#[inline(always)]
pub(in crate::kernel) fn matmul(
    [rows, columns, contracted]: [usize; 3],
    weight: WeightLayout,
    bias: bool,
    activation: Activation,
) -> KernelSpec {
    KernelSpec {
        // `Gelu` and `GeluKept` have the same flags. The traffic tells them apart.
        flags: [weight == WeightLayout::InOut, bias, activation == Activation::Relu, activation.is_gelu()],
        flops: Some(2.0 * product(&[rows, columns, contracted])),
        fused_flops: gelu_flops(activation.is_gelu(), rows, columns),
        ..KernelSpec::new("matmul", KernelFamily::Product, [rows, columns, contracted], [
            read("x", rows * contracted), read("w", columns * contracted), read("bias", columns).when(bias),
            write("y", rows * columns), write("argument", rows * columns).when(activation.keeps_argument()),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn matmul_input_gradient(
    [rows, columns, contracted]: [usize; 3],
    weight: WeightLayout,
    gelu: bool,
) -> KernelSpec {
    KernelSpec {
        flags: [weight == WeightLayout::InOut, gelu, false, false],
        flops: Some(2.0 * product(&[rows, columns, contracted])),
        fused_flops: gelu_flops(gelu, rows, contracted),
        ..KernelSpec::new("matmul_input_gradient", KernelFamily::Product, [rows, columns, contracted], [
            read("dy", rows * columns), read("w", columns * contracted),
            read("argument", rows * contracted).when(gelu),
            write("dx", rows * contracted),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn matmul_weight_gradient(
    [rows, columns, contracted]: [usize; 3],
    weight: WeightLayout,
    bias: bool,
) -> KernelSpec {
    KernelSpec {
        flags: [weight == WeightLayout::InOut, bias, false, false],
        flops: Some(2.0 * product(&[rows, columns, contracted])),
        fused_flops: if bias { product(&[rows, columns]) } else { 0.0 },
        ..KernelSpec::new("matmul_weight_gradient", KernelFamily::Product, [rows, columns, contracted], [
            read("dy", rows * columns), read("x", rows * contracted),
            write("dw", columns * contracted).single(), write("dbias", columns).single().when(bias),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn quantise(rows: usize, columns: usize, straight: bool, transposed: bool) -> KernelSpec {
    let elements = rows * columns;
    KernelSpec {
        flags: [straight, transposed, false, false],
        ..KernelSpec::new("quantise", KernelFamily::Other, [rows, columns], [
            // It is read once for the largest element and once to round.
            read("x", elements).moving(2 * elements),
            write("factor", 1).single(), write("quantised", elements).eight_bits().when(straight),
            write("transposed", elements).eight_bits().when(transposed),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn eight_bit_matmul(
    [rows, columns, contracted]: [usize; 3],
    bias: bool,
    activation: Activation,
) -> KernelSpec {
    KernelSpec {
        flags: [bias, activation == Activation::Relu, activation.is_gelu(), false],
        flops: Some(2.0 * product(&[rows, columns, contracted])),
        fused_flops: gelu_flops(activation.is_gelu(), rows, columns),
        ..KernelSpec::new("eight_bit_matmul", KernelFamily::Product, [rows, columns, contracted], [
            read("x", rows * contracted).eight_bits(), read("w", columns * contracted).eight_bits(),
            read("factor of x", 1).single(), read("factor of w", 1).single(), read("bias", columns).when(bias),
            write("y", rows * columns), write("argument", rows * columns).when(activation.keeps_argument()),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn eight_bit_matmul_input_gradient([rows, columns, contracted]: [usize; 3], gelu: bool) -> KernelSpec {
    KernelSpec {
        flags: [gelu, false, false, false],
        flops: Some(2.0 * product(&[rows, columns, contracted])),
        fused_flops: gelu_flops(gelu, rows, contracted),
        ..KernelSpec::new("eight_bit_matmul_input_gradient", KernelFamily::Product, [rows, columns, contracted], [
            read("dy", rows * columns).eight_bits(), read("w", columns * contracted).eight_bits(),
            read("factor of dy", 1).single(), read("factor of w", 1).single(),
            read("argument", rows * contracted).when(gelu),
            write("dx", rows * contracted),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn eight_bit_matmul_weight_gradient(
    [rows, columns, contracted]: [usize; 3],
    weight: WeightLayout,
) -> KernelSpec {
    KernelSpec {
        flags: [weight == WeightLayout::InOut, false, false, false],
        flops: Some(2.0 * product(&[rows, columns, contracted])),
        ..KernelSpec::new("eight_bit_matmul_weight_gradient", KernelFamily::Product, [rows, columns, contracted], [
            read("dy transposed", rows * columns).eight_bits(), read("x transposed", rows * contracted).eight_bits(),
            read("factor of dy", 1).single(), read("factor of x", 1).single(),
            write("dw", columns * contracted).single(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn bias_add(rows: usize, columns: usize) -> KernelSpec {
    KernelSpec {
        may_work_in_place: true,
        ..KernelSpec::new("bias_add", KernelFamily::Bias, [rows, columns], [
            read("x", rows * columns), read("bias", columns),
            write("y", rows * columns),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn bias_gradient(rows: usize, columns: usize) -> KernelSpec {
    KernelSpec::new("bias_gradient", KernelFamily::BiasGradient, [rows, columns], [
        read("dy", rows * columns),
        write("dbias", columns).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn expert_matmul([experts, rows, columns, contracted]: [usize; 4]) -> KernelSpec {
    KernelSpec {
        flops: Some(2.0 * product(&[experts, rows, columns, contracted])),
        ..KernelSpec::new("expert_matmul", KernelFamily::Product, [experts, rows, columns, contracted], [
            read("x", experts * rows * contracted), read("w", experts * columns * contracted),
            write("y", experts * rows * columns),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn expert_matmul_input_gradient([experts, rows, columns, contracted]: [usize; 4]) -> KernelSpec {
    KernelSpec {
        flops: Some(2.0 * product(&[experts, rows, columns, contracted])),
        ..KernelSpec::new("expert_matmul_input_gradient", KernelFamily::Product, [experts, rows, columns, contracted], [
            read("dy", experts * rows * columns), read("w", experts * columns * contracted),
            write("dx", experts * rows * contracted),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn expert_matmul_weight_gradient([experts, rows, columns, contracted]: [usize; 4]) -> KernelSpec {
    KernelSpec {
        flops: Some(2.0 * product(&[experts, rows, columns, contracted])),
        ..KernelSpec::new("expert_matmul_weight_gradient", KernelFamily::Product, [experts, rows, columns, contracted], [
            read("dy", experts * rows * columns), read("x", experts * rows * contracted),
            write("dw", experts * columns * contracted).single(),
        ])
    }
}
