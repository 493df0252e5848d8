//! Optimizer updates, and work on whole buckets of gradients. A control is left out of an update's
//! traffic, being a few numbers.

use super::{KernelFamily, KernelSpec, read, update, write};
use crate::kernel::control::Control;

#[inline(always)]
pub(in crate::kernel) fn sgd(elements: usize, controlled: bool, momentum: bool, nesterov: bool) -> KernelSpec {
    KernelSpec {
        flags: [momentum, nesterov, false, false],
        ..KernelSpec::new("sgd", KernelFamily::Optimizer, [elements], [
            read("gradient", elements).single(),
            read("control", Control::LENGTH).single().when(controlled).uncounted(),
            write("parameter", elements).updated(), update("velocity", elements).when(momentum),
            write("master copy", elements).single().master_copy(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn adamw(elements: usize, controlled: bool) -> KernelSpec {
    KernelSpec {
        flops: Some(12.0 * elements as f64),
        ..KernelSpec::new("adamw", KernelFamily::Optimizer, [elements], [
            read("gradient", elements).single(),
            read("control", Control::LENGTH).single().when(controlled).uncounted(),
            write("parameter", elements).updated(), update("first moment", elements),
            update("second moment", elements), write("master copy", elements).single().master_copy(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn update_control() -> KernelSpec {
    KernelSpec::new("update_control", KernelFamily::Bucket, [], [
        read("sum of squares", 1).single(),
        update("control", Control::LENGTH),
    ])
}

/// Describes a sum of elements, or of their squares. The result of one element is left out of the
/// traffic.
#[inline(always)]
pub(in crate::kernel) fn sum(name: &'static str, elements: usize) -> KernelSpec {
    KernelSpec::new(name, KernelFamily::Bucket, [elements], [
        read("x", elements).single(),
        write("y", 1).single().uncounted(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn accumulate(elements: usize) -> KernelSpec {
    KernelSpec::new("accumulate", KernelFamily::Bucket, [elements], [
        read("x", elements).single(),
        update("y", elements),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn narrow(elements: usize) -> KernelSpec {
    KernelSpec::new("narrow", KernelFamily::Bucket, [elements], [
        read("x", elements).single(),
        write("y", elements),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn zero(elements: usize) -> KernelSpec {
    KernelSpec::new("zero", KernelFamily::Bucket, [elements], [write("y", elements).single()])
}
