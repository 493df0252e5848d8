//! Element-wise kernels: activations, residual additions, dropout.

use super::products::GELU_FLOPS;
use super::{KernelFamily, KernelSpec, read, write};
use crate::dropout::Dropout;

/// Operations of a GELU by the error function, or of its slope, for each element.
const EXACT_GELU_FLOPS: f64 = 20.0;

/// Describes an operation on one operand.
#[inline(always)]
fn unary(name: &'static str, family: KernelFamily, elements: usize) -> KernelSpec {
    KernelSpec::new(name, family, [elements], [read("x", elements), write("y", elements)])
}

/// Describes an operation on two operands.
#[inline(always)]
fn binary(name: &'static str, family: KernelFamily, roles: [&'static str; 3], elements: usize) -> KernelSpec {
    let [left, right, result] = roles;
    KernelSpec::new(name, family, [elements], [
        read(left, elements), read(right, elements),
        write(result, elements),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn relu(elements: usize) -> KernelSpec {
    KernelSpec { may_work_in_place: true, ..unary("relu", KernelFamily::Activation, elements) }
}

#[inline(always)]
pub(in crate::kernel) fn relu_gradient(elements: usize) -> KernelSpec {
    KernelSpec { may_work_in_place: true, ..binary("relu_gradient", KernelFamily::Activation, ["dy", "y", "dx"], elements) }
}

#[inline(always)]
pub(in crate::kernel) fn gelu(elements: usize) -> KernelSpec {
    KernelSpec { flops: Some(GELU_FLOPS * elements as f64), ..unary("gelu", KernelFamily::Activation, elements) }
}

#[inline(always)]
pub(in crate::kernel) fn gelu_gradient(elements: usize) -> KernelSpec {
    KernelSpec {
        flops: Some(GELU_FLOPS * elements as f64),
        may_work_in_place: true,
        ..binary("gelu_gradient", KernelFamily::Activation, ["dy", "x", "dx"], elements)
    }
}

#[inline(always)]
pub(in crate::kernel) fn gelu_exact(elements: usize) -> KernelSpec {
    KernelSpec { flops: Some(EXACT_GELU_FLOPS * elements as f64), ..unary("gelu_exact", KernelFamily::Activation, elements) }
}

#[inline(always)]
pub(in crate::kernel) fn gelu_exact_gradient(elements: usize) -> KernelSpec {
    KernelSpec {
        flops: Some(EXACT_GELU_FLOPS * elements as f64),
        may_work_in_place: true,
        ..binary("gelu_exact_gradient", KernelFamily::Activation, ["dy", "x", "dx"], elements)
    }
}

#[inline(always)]
pub(in crate::kernel) fn silu_multiply(elements: usize) -> KernelSpec {
    KernelSpec {
        flops: Some(10.0 * elements as f64),
        ..binary("silu_multiply", KernelFamily::Activation, ["gate", "x", "y"], elements)
    }
}

#[inline(always)]
pub(in crate::kernel) fn silu_multiply_gradient(elements: usize) -> KernelSpec {
    KernelSpec {
        flops: Some(14.0 * elements as f64),
        may_work_in_place: true,
        ..KernelSpec::new("silu_multiply_gradient", KernelFamily::Activation, [elements], [
            read("dy", elements), read("gate", elements), read("x", elements),
            write("dgate", elements), write("dx", elements),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn add(elements: usize) -> KernelSpec {
    KernelSpec { may_work_in_place: true, ..binary("add", KernelFamily::Residual, ["a", "b", "y"], elements) }
}

#[inline(always)]
pub(in crate::kernel) fn multiply(elements: usize) -> KernelSpec {
    KernelSpec { may_work_in_place: true, ..binary("multiply", KernelFamily::Activation, ["a", "b", "y"], elements) }
}

#[inline(always)]
pub(in crate::kernel) fn scale(elements: usize) -> KernelSpec {
    KernelSpec { may_work_in_place: true, ..unary("scale", KernelFamily::Other, elements) }
}

#[inline(always)]
pub(in crate::kernel) fn dropout(sizes: &Dropout) -> KernelSpec {
    let extents = [sizes.samples, sizes.positions, sizes.features];
    let elements = sizes.elements();
    KernelSpec {
        // The hash of an element is four multiplications and their mixing.
        flops: Some(20.0 * elements as f64),
        may_work_in_place: true,
        ..KernelSpec::new("dropout", KernelFamily::Residual, extents, [
            read("x", elements),
            write("y", elements),
        ])
    }
}
