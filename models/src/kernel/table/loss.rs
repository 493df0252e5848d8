//! Softmax cross-entropy. Results of one element are left out of the traffic.

use super::{KernelFamily, KernelSpec, indices, read, write};
use crate::kernel::control::Control;

#[inline(always)]
pub(in crate::kernel) fn cross_entropy(rows: usize, classes: usize) -> KernelSpec {
    KernelSpec::new("cross_entropy", KernelFamily::Loss, [rows, classes], [
        read("logits", rows * classes), indices("labels", rows, classes),
        write("loss", 1).single().uncounted(), write("correct", 1).single().uncounted(),
        write("log_sum_exp", rows).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn logit_statistics(rows: usize, classes: usize, parts: usize) -> KernelSpec {
    KernelSpec::new("logit_statistics", KernelFamily::Loss, [rows, classes], [
        read("logits", rows * classes), indices("labels", rows, classes * parts),
        write("statistics", 4 * rows).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn cross_entropy_of_statistics(rows: usize, parts: usize) -> KernelSpec {
    KernelSpec::new("cross_entropy_of_statistics", KernelFamily::Loss, [rows, parts], [
        read("statistics", 4 * parts * rows).single(),
        // Only the sign matters, since -1 is ignored.
        indices("labels", rows, 0),
        write("loss", 1).single().uncounted(), write("correct", 1).single().uncounted(),
        write("log_sum_exp", rows).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn cross_entropy_gradient(rows: usize, classes: usize, parts: usize, scaled: bool) -> KernelSpec {
    KernelSpec {
        may_work_in_place: true,
        ..KernelSpec::new("cross_entropy_gradient", KernelFamily::Loss, [rows, classes], [
            read("logits", rows * classes), indices("labels", rows, classes * parts),
            read("log_sum_exp", rows).single(), read("control", Control::LENGTH).single().when(scaled).uncounted(),
            write("dlogits", rows * classes),
        ])
    }
}
