//! Softmax cross-entropy against smoothed targets, with a weight for each class.

use super::cross_entropy::{IGNORED, is_first_maximum, largest_and_sum, probabilities, probabilities_in_place};
use super::memory::{check_indices, floats, floats_mut, integers, same};
use crate::{BackendError, KernelCall};
use foretell_models::{Control, Smoothing};

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, classes: usize, smoothing: Smoothing) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (logits, labels, weights) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats(&call.reads[2])) };
    // SAFETY: as above.
    let [loss, correct, log_sums, weight] = [0, 1, 2, 3].map(|index| unsafe { floats_mut(&call.writes[index]) });
    check_indices(call.kernel.name(), labels, classes, Some(IGNORED))?;
    let targets = Targets::new(weights, smoothing);
    let (mut losses, mut hits, mut total) = (0.0_f64, 0_usize, 0.0_f64);
    for ((row, &label), log_sum) in logits.chunks_exact(classes).zip(labels).zip(log_sums) {
        if label == IGNORED {
            *log_sum = 0.0;
            continue;
        }
        let (largest, sum) = largest_and_sum(row);
        *log_sum = largest + sum.ln();
        let label = label as usize;
        // A class of weight 0 adds nothing, even if its logit is minus infinity.
        let weighed = row.iter().zip(weights).filter(|(_, weight)| **weight != 0.0);
        let spread: f64 = match targets.spread == 0.0 {
            true => 0.0,
            false => weighed.map(|(&logit, &weight)| f64::from(weight) * f64::from(*log_sum - logit)).sum(),
        };
        losses += targets.kept * f64::from(weights[label]) * f64::from(*log_sum - row[label]) + targets.spread * spread;
        hits += usize::from(is_first_maximum(row, label, largest));
        total += f64::from(weights[label]);
    }
    for (sum, added) in [(loss, losses), (correct, hits as f64), (weight, total)] {
        let earlier = if call.accumulate { f64::from(sum[0]) } else { 0.0 };
        sum[0] = (earlier + added) as f32;
    }
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid; dlogits may be the logits.
pub(super) unsafe fn gradient(
    call: &KernelCall<'_>,
    classes: usize,
    smoothing: Smoothing,
    normalizer: usize,
    scaled: bool,
) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid; if logits and dlogits are the same memory, only one slice
    // of it is made.
    let (labels, log_sums, weights) = unsafe { (integers(&call.reads[1]), floats(&call.reads[2]), floats(&call.reads[3])) };
    // SAFETY: as above.
    let dlogits = unsafe { floats_mut(&call.writes[0]) };
    check_indices(call.kernel.name(), labels, classes, Some(IGNORED))?;
    // SAFETY: a scaled gradient reads the control, too.
    let scale = if scaled { (unsafe { floats(&call.reads[4]) })[Control::LossScale.place()] } else { 1.0 };
    // SAFETY: as above.
    let logits = (!same(&call.reads[0], &call.writes[0])).then(|| unsafe { floats(&call.reads[0]) });
    let targets = Targets::new(weights, smoothing);
    let factor = scale / normalizer as f32;
    let spread = targets.spread as f32 * factor;
    let classes = classes.max(1);
    for (index, (row, (&label, &log_sum))) in dlogits.chunks_exact_mut(classes).zip(labels.iter().zip(log_sums)).enumerate() {
        if label == IGNORED {
            row.fill(0.0);
            continue;
        }
        let of_label = targets.kept * f64::from(weights[label as usize]);
        let sum = (of_label + targets.spread * targets.weight) as f32 * factor;
        match logits {
            None => probabilities_in_place(row, log_sum, sum),
            Some(logits) => probabilities(row, &logits[index * classes..][..classes], log_sum, sum),
        }
        if spread != 0.0 {
            row.iter_mut().zip(weights).for_each(|(gradient, weight)| *gradient -= spread * weight);
        }
        row[label as usize] -= of_label as f32 * factor;
    }
    Ok(())
}

/// How targets follow from labels: `weight · (kept [class = label] + spread)`.
struct Targets {
    kept: f64,
    spread: f64,
    /// The sum of the weights of all classes.
    weight: f64,
}

impl Targets {
    fn new(weights: &[f32], smoothing: Smoothing) -> Self {
        let weight = weights.iter().map(|&weight| f64::from(weight)).sum();
        let [kept, spread] = smoothing.parts(weights.len());
        Self { kept, spread, weight }
    }
}
