//! Optimizer updates, and work on whole buckets of gradients. A control is left out of an update's
//! traffic, being a few numbers.

use super::{KernelFamily, KernelSpec, read, update, write};
use crate::compression::Compression;
use crate::kernel::control::Control;
use crate::kernel::sizes::NEWTON_SCHULZ_STEPS;

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
pub(in crate::kernel) fn lamb_direction(elements: usize, controlled: bool) -> KernelSpec {
    KernelSpec {
        flops: Some(16.0 * elements as f64),
        ..KernelSpec::new("lamb_direction", KernelFamily::Optimizer, [elements], [
            read("gradient", elements).single(),
            read("control", Control::LENGTH).single().when(controlled).uncounted(),
            read("parameter", elements).single(),
            write("direction", elements).single(), update("first moment", elements),
            update("second moment", elements), write("norms", 2).single().uncounted(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn lamb_step(elements: usize, controlled: bool) -> KernelSpec {
    KernelSpec {
        flops: Some(2.0 * elements as f64),
        ..KernelSpec::new("lamb_step", KernelFamily::Optimizer, [elements], [
            read("direction", elements).single(),
            read("control", Control::LENGTH).single().when(controlled).uncounted(),
            read("norms", 2).single().uncounted(),
            write("parameter", elements).updated(), write("master copy", elements).single().master_copy(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn muon_direction(elements: usize, controlled: bool) -> KernelSpec {
    KernelSpec {
        flops: Some(4.0 * elements as f64),
        ..KernelSpec::new("muon_direction", KernelFamily::Optimizer, [elements], [
            read("gradient", elements).single(),
            read("control", Control::LENGTH).single().when(controlled).uncounted(),
            write("direction", elements), update("momentum", elements),
        ])
    }
}

/// With `s` the shorter and `l` the longer side of a matrix, a step makes `A = X Xᵀ`, `A A` and
/// `B X`: `2 s s l + 2 s s s + 2 s s l` operations, with the traffic of these products.
#[inline(always)]
pub(in crate::kernel) fn orthogonalise([matrices, rows, columns]: [usize; 3]) -> KernelSpec {
    let (short, long) = (rows.min(columns), rows.max(columns));
    let (elements, square) = (matrices * rows * columns, matrices * short * short);
    let step = 4.0 * square as f64 * long as f64 + 2.0 * square as f64 * short as f64;
    KernelSpec {
        flops: Some(NEWTON_SCHULZ_STEPS as f64 * step),
        model_flops: Some(0.0),
        ..KernelSpec::new("orthogonalise", KernelFamily::Product, [matrices, rows, columns], [
            read("x", elements).moving(NEWTON_SCHULZ_STEPS * (2 * elements + 2 * square)),
            write("y", elements).moving(NEWTON_SCHULZ_STEPS * (elements + 2 * square)),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn muon_step(elements: usize, controlled: bool) -> KernelSpec {
    KernelSpec {
        flops: Some(3.0 * elements as f64),
        ..KernelSpec::new("muon_step", KernelFamily::Optimizer, [elements], [
            read("direction", elements),
            read("control", Control::LENGTH).single().when(controlled).uncounted(),
            write("parameter", elements).updated(), write("master copy", elements).single().master_copy(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn average(elements: usize) -> KernelSpec {
    KernelSpec::new("average", KernelFamily::Bucket, [elements], [update("y", elements)])
}

#[inline(always)]
pub(in crate::kernel) fn difference(elements: usize) -> KernelSpec {
    KernelSpec::new("difference", KernelFamily::Bucket, [elements], [
        read("a", elements).single(),
        read("b", elements).single(),
        write("y", elements).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn outer_step(elements: usize, momentum: bool, nesterov: bool, mixed: bool) -> KernelSpec {
    KernelSpec {
        flags: [momentum, nesterov, mixed, false],
        ..KernelSpec::new("outer_step", KernelFamily::Optimizer, [elements], [
            read("difference", elements).single(),
            // It is read too if it is mixed.
            write("parameter", elements).single().moving(if mixed { 2 * elements } else { elements }),
            update("outer parameter", elements), update("velocity", elements).when(momentum),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn compress(elements: usize, parts: usize, format: Compression, feedback: bool) -> KernelSpec {
    KernelSpec {
        flags: [feedback, format == Compression::Int8, format == Compression::Fp16, false],
        ..KernelSpec::new("compress", KernelFamily::Bucket, [elements], [
            // A chunk's largest number is found first, but a chunk stays in the cache.
            read("x", elements).single(),
            write("message", parts * format.bytes(format.part(elements, parts))).bytes_of_message(),
            update("error", elements).when(feedback),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn decompress(elements: usize, sources: usize, format: Compression) -> KernelSpec {
    KernelSpec {
        flags: [false, format == Compression::Int8, format == Compression::Fp16, false],
        ..KernelSpec::new("decompress", KernelFamily::Bucket, [elements, sources], [
            read("messages", sources * format.bytes(elements)).bytes_of_message(),
            write("y", elements).single(),
        ])
    }
}

#[inline(always)]
pub(in crate::kernel) fn update_control(weighted: bool) -> KernelSpec {
    KernelSpec::new("update_control", KernelFamily::Bucket, [], [
        read("sum of squares", 1).single(),
        read("weight", 1).single().when(weighted),
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
