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
pub(in crate::kernel) fn label_ranks(rows: usize, classes: usize, parts: usize) -> KernelSpec {
    KernelSpec::new("label_ranks", KernelFamily::Loss, [rows, classes], [
        read("logits", rows * classes), indices("labels", rows, classes * parts),
        read("statistics", 4 * parts * rows).single().when(parts > 1),
        write("ranks", rows).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn top_labels(rows: usize) -> KernelSpec {
    KernelSpec::new("top_labels", KernelFamily::Loss, [rows], [
        // Only the sign matters, since -1 is ignored.
        read("ranks", rows).single(), indices("labels", rows, 0),
        write("count", 1).single().uncounted(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn class_scores(rows: usize, classes: usize) -> KernelSpec {
    KernelSpec::new("class_scores", KernelFamily::Loss, [rows, classes], [
        read("logits", rows * classes), indices("labels", rows, classes), read("log_sum_exp", rows).single(),
        write("scores", rows * (classes + 1)).single(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn weighted_cross_entropy(rows: usize, classes: usize) -> KernelSpec {
    KernelSpec::new("weighted_cross_entropy", KernelFamily::Loss, [rows, classes], [
        read("logits", rows * classes), indices("labels", rows, classes), read("weights", classes).single().uncounted(),
        write("loss", 1).single().uncounted(), write("correct", 1).single().uncounted(),
        write("log_sum_exp", rows).single(), write("weight", 1).single().uncounted(),
    ])
}

#[inline(always)]
pub(in crate::kernel) fn weighted_cross_entropy_gradient(rows: usize, classes: usize, scaled: bool) -> KernelSpec {
    KernelSpec {
        may_work_in_place: true,
        ..KernelSpec::new("weighted_cross_entropy_gradient", KernelFamily::Loss, [rows, classes], [
            read("logits", rows * classes), indices("labels", rows, classes), read("log_sum_exp", rows).single(),
            read("weights", classes).single().uncounted(),
            read("control", Control::LENGTH).single().when(scaled).uncounted(),
            write("dlogits", rows * classes),
        ])
    }
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
