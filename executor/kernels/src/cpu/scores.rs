//! Metrics of an evaluation beside the loss: the ranks of labels, and probabilities.

use super::cross_entropy::{IGNORED, first_class};
use super::memory::{check_indices, floats, floats_mut, integers};
use crate::{BackendError, KernelCall};

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn label_ranks(call: &KernelCall<'_>, rows: usize, classes: usize, parts: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (logits, labels, ranks) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), labels, parts * classes, Some(IGNORED))?;
    // SAFETY: as above; of several parts the statistics are read, too.
    let statistics = if parts > 1 { unsafe { floats(&call.reads[2]) } } else { &[] };
    let first = first_class(call, classes, parts);
    for (index, ((row, &label), rank)) in logits.chunks_exact(classes.max(1)).zip(labels).zip(ranks).enumerate() {
        if label == IGNORED {
            *rank = 0.0;
            continue;
        }
        let label = label as usize;
        // The statistics of the shard that has the label contain its logit; those of other shards
        // contain minus infinity.
        let logit = match parts > 1 {
            true => (0..parts).map(|part| statistics[4 * (part * rows + index) + 2]).fold(f32::NEG_INFINITY, f32::max),
            false => row[label],
        };
        let comes_before = |&(class, &other): &(usize, &f32)| other > logit || (other == logit && first + class < label);
        *rank = row.iter().enumerate().filter(comes_before).count() as f32;
    }
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn top_labels(call: &KernelCall<'_>, top: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (ranks, labels, count) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats_mut(&call.writes[0])) };
    let hits = ranks.iter().zip(labels).filter(|&(&rank, &label)| label != IGNORED && rank < top as f32).count();
    count[0] = if call.accumulate { count[0] } else { 0.0 } + hits as f32;
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn class_scores(call: &KernelCall<'_>, classes: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (logits, labels, log_sums) = unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats(&call.reads[2])) };
    check_indices(call.kernel.name(), labels, classes, Some(IGNORED))?;
    // SAFETY: as above.
    let scores = unsafe { floats_mut(&call.writes[0]) };
    let rows = logits.chunks_exact(classes.max(1)).zip(labels.iter().zip(log_sums));
    for ((row, (&label, &log_sum)), scores) in rows.zip(scores.chunks_exact_mut(classes + 1)) {
        scores.iter_mut().zip(row).for_each(|(score, logit)| *score = (logit - log_sum).exp());
        scores[classes] = label as f32;
    }
    Ok(())
}
