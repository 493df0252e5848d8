//! Gradient of softmax cross-entropy in bf16, widened and narrowed in registers, since rows of a
//! vocabulary exceed the L1 cache in single precision.

use crate::cpu::cross_entropy::{Given, IGNORED, given};
use crate::cpu::vector::{exponential, multiversion};
use crate::half::SixteenBits::Bf16;
use crate::{BackendError, KernelCall};

/// # Safety
///
/// The call's operands are checked and valid; dlogits may be the logits.
pub(super) unsafe fn gradient(
    call: &KernelCall<'_>,
    classes: usize,
    normalizer: usize,
    parts: usize,
    scaled: bool,
) -> Result<(), BackendError> {
    // SAFETY: this function's own contract.
    let Given { labels, log_sums, logits, dlogits, factor, first } =
        unsafe { given::<u16>(call, classes, normalizer, parts, scaled) }?;
    let classes = classes.max(1);
    for (index, (row, (&label, &log_sum))) in dlogits.chunks_exact_mut(classes).zip(labels.iter().zip(log_sums)).enumerate() {
        if label == IGNORED {
            row.fill(0);
            continue;
        }
        let logits = logits.map(|logits| &logits[index * classes..][..classes]);
        // Index of the label in this rank's shard of the classes, if it lies there.
        let own = (label as usize).checked_sub(first).filter(|&own| own < classes);
        let of_label = own.map(|own| logits.map_or(row[own], |logits| logits[own]));
        match logits {
            None => probabilities_in_place(row, log_sum, factor),
            Some(logits) => probabilities(row, logits, log_sum, factor),
        }
        // Computed again from the logit: if the probability is near one, subtracting one from its
        // rounded value would leave few digits.
        if let Some((own, logit)) = own.zip(of_label) {
            row[own] = Bf16.nearest(factor * exponential::<false>(Bf16.to_single(logit) - log_sum) - factor);
        }
    }
    Ok(())
}

multiversion! {
    fn probabilities(row: &mut [u16], logits: &[u16], log_sum: f32, factor: f32) {
        for (gradient, &logit) in row.iter_mut().zip(logits) {
            *gradient = Bf16.nearest(factor * exponential::<FUSED>(Bf16.to_single(logit) - log_sum));
        }
    }

    fn probabilities_in_place(row: &mut [u16], log_sum: f32, factor: f32) {
        for logit in row {
            *logit = Bf16.nearest(factor * exponential::<FUSED>(Bf16.to_single(*logit) - log_sum));
        }
    }
}
