//! Softmax cross-entropy over rows of logits, and its gradient. If the classes are sharded over
//! ranks, each rank computes the `statistics` of its shard, and the loss follows from the
//! statistics of all shards. The first pass over a row reads it from memory and finds the maximum.
//! The second pass reads it from the cache and sums exponentials.

use super::memory::{Number, check_indices, floats, floats_mut, integers, numbers, numbers_mut, same};
use super::vector::{LANES, exponential, maximum, multiversion, sum_lanes};
use crate::{BackendError, KernelCall};
use foretell_models::Control;

/// Label of an ignored row: no loss, no gradient, a log-sum-exp of zero.
pub(super) const IGNORED: i32 = -1;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, classes: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (logits, labels) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1])) };
    // SAFETY: as above.
    let (loss, correct, log_sums) =
        unsafe { (floats_mut(&call.writes[0]), floats_mut(&call.writes[1]), floats_mut(&call.writes[2])) };
    check_indices(call.kernel.name(), labels, classes, Some(IGNORED))?;
    let (mut losses, mut hits) = (0.0_f64, 0_usize);
    for ((row, &label), log_sum) in logits.chunks_exact(classes).zip(labels).zip(log_sums) {
        if label == IGNORED {
            *log_sum = 0.0;
            continue;
        }
        let (largest, sum) = largest_and_sum(row);
        *log_sum = largest + sum.ln();
        let label = label as usize;
        losses += f64::from(*log_sum - row[label]);
        hits += usize::from(is_first_maximum(row, label, largest));
    }
    let (earlier_loss, earlier_correct) = if call.accumulate { (loss[0], correct[0]) } else { (0.0, 0.0) };
    loss[0] = (f64::from(earlier_loss) + losses) as f32;
    correct[0] = earlier_correct + hits as f32;
    Ok(())
}

/// Returns `true` if the prediction is `label`. The prediction is the first class whose logit is
/// the row's `largest`, so a row of equal logits counts as correct only for class 0.
pub(super) fn is_first_maximum(row: &[f32], label: usize, largest: f32) -> bool {
    row[label] == largest && row[..label].iter().all(|&logit| logit < largest)
}

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
        unsafe { given::<f32>(call, classes, normalizer, parts, scaled) }?;
    let classes = classes.max(1);
    for (index, (row, (&label, &log_sum))) in dlogits.chunks_exact_mut(classes).zip(labels.iter().zip(log_sums)).enumerate() {
        if label == IGNORED {
            row.fill(0.0);
            continue;
        }
        match logits {
            None => probabilities_in_place(row, log_sum, factor),
            Some(logits) => probabilities(row, &logits[index * classes..][..classes], log_sum, factor),
        }
        if let Some(own) = (label as usize).checked_sub(first).and_then(|own| row.get_mut(own)) {
            *own -= factor;
        }
    }
    Ok(())
}

/// Operands of the gradient, with logits of format `N`.
pub(super) struct Given<'a, N> {
    pub(super) labels: &'a [i32],
    pub(super) log_sums: &'a [f32],
    /// `None` if the gradient overwrites the logits.
    pub(super) logits: Option<&'a [N]>,
    pub(super) dlogits: &'a mut [N],
    /// Factor on the gradient: the loss scale (1 if unscaled) over the normalizer.
    pub(super) factor: f32,
    /// First class of this rank's shard.
    pub(super) first: usize,
}

/// Reads the operands of a gradient and checks that the labels are classes.
///
/// # Safety
///
/// The call's operands are checked and valid; dlogits may be the logits.
pub(super) unsafe fn given<'a, N: Number>(
    call: &KernelCall<'_>,
    classes: usize,
    normalizer: usize,
    parts: usize,
    scaled: bool,
) -> Result<Given<'a, N>, BackendError> {
    // SAFETY: reads and writes are valid; if logits and dlogits are the same memory, only one slice
    // of it is made.
    let (labels, log_sums, dlogits) = unsafe { (integers(&call.reads[1]), floats(&call.reads[2]), numbers_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), labels, parts * classes, Some(IGNORED))?;
    // SAFETY: a scaled gradient reads the control, too.
    let scale = if scaled { (unsafe { floats(&call.reads[3]) })[Control::LossScale.place()] } else { 1.0 };
    // SAFETY: as above.
    let logits = (!same(&call.reads[0], &call.writes[0])).then(|| unsafe { numbers(&call.reads[0]) });
    let (factor, first) = (scale / normalizer as f32, first_class(call, classes, parts));
    Ok(Given { labels, log_sums, logits, dlogits, factor, first })
}

/// Returns the first class of a rank's shard.
pub(super) fn first_class(call: &KernelCall<'_>, classes: usize, parts: usize) -> usize {
    if parts > 1 { call.group_index * classes } else { 0 }
}

/// Writes four numbers for each row of a rank's shard of the classes, as `Kernel::LogitStatistics`
/// defines them.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn statistics(call: &KernelCall<'_>, classes: usize, parts: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (logits, labels, statistics) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), labels, parts * classes, Some(IGNORED))?;
    let first = first_class(call, classes, parts);
    for ((row, &label), statistics) in logits.chunks_exact(classes.max(1)).zip(labels).zip(statistics.chunks_exact_mut(4)) {
        let (largest, sum) = largest_and_sum(row);
        let own = usize::try_from(label).ok().and_then(|label| label.checked_sub(first)).filter(|&own| own < classes);
        let is_first = own.is_some_and(|own| is_first_maximum(row, own, largest));
        let logit = own.map_or(f32::NEG_INFINITY, |own| row[own]);
        statistics.copy_from_slice(&[largest, sum, logit, f32::from(u8::from(is_first))]);
    }
    Ok(())
}

/// Computes the outputs of [`forward`] from the statistics of all shards of the classes.
///
/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn of_statistics(call: &KernelCall<'_>, rows: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (statistics, labels) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1])) };
    // SAFETY: as above.
    let (loss, correct, log_sums) =
        unsafe { (floats_mut(&call.writes[0]), floats_mut(&call.writes[1]), floats_mut(&call.writes[2])) };
    let (mut losses, mut hits) = (0.0_f64, 0_usize);
    for (row, (&label, log_sum)) in labels.iter().zip(log_sums).enumerate() {
        if label == IGNORED {
            *log_sum = 0.0;
            continue;
        }
        let parts = statistics.chunks_exact(4 * rows.max(1)).map(|part| &part[4 * row..4 * row + 4]);
        let largest = parts.clone().map(|part| part[0]).fold(f32::NEG_INFINITY, f32::max);
        let sum: f32 = parts.clone().map(|part| part[1] * (part[0] - largest).exp()).sum();
        let logit = parts.clone().map(|part| part[2]).fold(f32::NEG_INFINITY, f32::max);
        *log_sum = largest + sum.ln();
        losses += f64::from(*log_sum - logit);
        // Among equal logits the prediction is the first class, so it lies in the first shard that
        // has the maximum.
        let prediction = parts.clone().find(|part| part[0] == largest);
        hits += usize::from(prediction.is_some_and(|part| part[3] == 1.0));
    }
    let (earlier_loss, earlier_correct) = if call.accumulate { (loss[0], correct[0]) } else { (0.0, 0.0) };
    loss[0] = (f64::from(earlier_loss) + losses) as f32;
    correct[0] = earlier_correct + hits as f32;
}

multiversion! {
    /// Returns the maximum logit and the sum of exponentials relative to it.
    pub(super) fn largest_and_sum(row: &[f32]) -> (f32, f32) {
        let largest = maximum(row);
        let mut lanes = [0.0; LANES];
        let chunks = row.chunks_exact(LANES);
        let rest = chunks.remainder();
        for chunk in chunks {
            for lane in 0..LANES {
                lanes[lane] += exponential::<FUSED>(chunk[lane] - largest);
            }
        }
        for (lane, &logit) in lanes.iter_mut().zip(rest) {
            *lane += exponential::<FUSED>(logit - largest);
        }
        (largest, sum_lanes(lanes))
    }

    pub(super) fn probabilities(row: &mut [f32], logits: &[f32], log_sum: f32, factor: f32) {
        for (gradient, &logit) in row.iter_mut().zip(logits) {
            *gradient = factor * exponential::<FUSED>(logit - log_sum);
        }
    }

    pub(super) fn probabilities_in_place(row: &mut [f32], log_sum: f32, factor: f32) {
        for logit in row {
            *logit = factor * exponential::<FUSED>(*logit - log_sum);
        }
    }
}
