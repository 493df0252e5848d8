//! Softmax attention and its gradient, a block of queries of one head at a time, so that the scores never leave the cache
//! (Dao et al. 2022). Rows of scores are whole, so that the softmax needs no running rescaling; what lies fully above the diagonal of
//! causal attention is never computed.

use super::memory::{Scratch, floats, floats_mut};
use super::product::{Destination, View, ViewMut, multiply};
use super::vector::{LANES, exponential, maximum, multiversion, reduce_pairs, sum_lanes};
use crate::backend::KernelCall;

/// The extents of [`Kernel::Attention`](foretell_models::Kernel::Attention).
#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch: usize,
    pub(super) sequence: usize,
    pub(super) heads: usize,
    pub(super) head_dimension: usize,
    pub(super) causal: bool,
}

impl Sizes {
    /// Queries of a block: scores of 128 Ki elements at most (a quarter of a second-level cache, as the gradient has two), in
    /// blocks small enough that a causal block wastes little above its diagonal, and large enough for the product to be fast.
    fn block(&self) -> usize {
        ((1 << 17) / self.sequence.max(1)).clamp(16, 64)
    }

    /// Elements from a position of qkv to the next.
    fn qkv_stride(&self) -> usize {
        3 * self.heads * self.head_dimension
    }

    /// Keys that queries before `end` see.
    fn visible(&self, end: usize) -> usize {
        if self.causal { end } else { self.sequence }
    }

    fn scale(&self) -> f32 {
        1.0 / (self.head_dimension as f32).sqrt()
    }

    fn is_empty(&self) -> bool {
        self.batch * self.sequence * self.heads * self.head_dimension == 0
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, sizes: Sizes, scratch: &mut Scratch) {
    let Sizes { batch, sequence, heads, head_dimension, .. } = sizes;
    if sizes.is_empty() {
        return;
    }
    // SAFETY: reads and writes are valid and do not overlap.
    let (qkv, out, log_sums) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    let block = sizes.block();
    let (stride, hidden) = (sizes.qkv_stride(), heads * head_dimension);
    let [scores, reciprocals] = scratch.pieces([block * sequence, block]);
    for image in 0..batch {
        for head in 0..heads {
            let query = image * sequence * stride + head * head_dimension;
            let [query, key, value] = [0, hidden, 2 * hidden].map(|offset| qkv[query + offset..].as_ptr());
            for first in (0..sequence).step_by(block) {
                let count = block.min(sequence - first);
                let visible = sizes.visible(first + count);
                // SAFETY: query, key and value have `sequence` rows at this stride, the scores hold the block, and the rows of
                // out at `target` are this head's.
                unsafe {
                    let queries = View::rows(query.add(first * stride), stride);
                    let keys = View::rows(key, stride).transposed();
                    let destination = ViewMut::rows(scores.as_mut_ptr(), visible);
                    multiply([count, visible, head_dimension], destination, queries, keys, Destination::Overwrite);
                }
                let log_sums = &mut log_sums[(image * heads + head) * sequence + first..][..count];
                let diagonal = if sizes.causal { first + 1 } else { sequence };
                softmax_rows(
                    &mut scores[..count * visible],
                    reciprocals,
                    log_sums,
                    diagonal,
                    usize::from(sizes.causal),
                    sizes.scale(),
                );
                let target = (image * sequence + first) * hidden + head * head_dimension;
                // SAFETY: as above.
                unsafe {
                    let destination = ViewMut::rows(out[target..].as_mut_ptr(), hidden);
                    let left = View::rows(scores.as_ptr(), visible);
                    multiply(
                        [count, head_dimension, visible],
                        destination,
                        left,
                        View::rows(value, stride),
                        Destination::Overwrite,
                    );
                }
                // The sums divide the few features of the output instead of the many probabilities.
                scale_rows(&mut out[target..], reciprocals, count, head_dimension, hidden);
            }
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn gradient(call: &KernelCall<'_>, sizes: Sizes, scratch: &mut Scratch) {
    let Sizes { batch, sequence, heads, head_dimension, .. } = sizes;
    if sizes.is_empty() {
        return;
    }
    // SAFETY: reads and writes are valid and do not overlap.
    let (dout, qkv, out, log_sums) =
        unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats(&call.reads[2]), floats(&call.reads[3])) };
    // SAFETY: as above.
    let dqkv = unsafe { floats_mut(&call.writes[0]) };
    let block = sizes.block();
    let (stride, hidden) = (sizes.qkv_stride(), heads * head_dimension);
    let [probabilities, slopes, dots] = scratch.pieces([block * sequence, block * sequence, block]);
    for image in 0..batch {
        for head in 0..heads {
            let query = image * sequence * stride + head * head_dimension;
            let [key, value] = [query + hidden, query + 2 * hidden];
            // From the last block of queries, which sees every key: it overwrites the gradients of keys and values, and the
            // others add to them.
            for first in (0..sequence).step_by(block).rev() {
                let count = block.min(sequence - first);
                let visible = sizes.visible(first + count);
                let mode = Destination::accumulating(first + count < sequence);
                let output = (image * sequence + first) * hidden + head * head_dimension;
                let diagonal = if sizes.causal { first + 1 } else { sequence };
                let queries = View::rows(qkv[query + first * stride..].as_ptr(), stride);
                let keys = View::rows(qkv[key..].as_ptr(), stride);
                let values = View::rows(qkv[value..].as_ptr(), stride);
                let outputs = View::rows(dout[output..].as_ptr(), hidden);
                // SAFETY: the views are of this head's rows, the scratch holds the block, and the destination is apart.
                unsafe {
                    let destination = ViewMut::rows(probabilities.as_mut_ptr(), visible);
                    multiply([count, visible, head_dimension], destination, queries, keys.transposed(), Destination::Overwrite);
                    let destination = ViewMut::rows(slopes.as_mut_ptr(), visible);
                    multiply([count, visible, head_dimension], destination, outputs, values.transposed(), Destination::Overwrite);
                }
                dot_rows(dots, &dout[output..], &out[output..], count, head_dimension, hidden);
                let log_sums = &log_sums[(image * heads + head) * sequence + first..][..count];
                softmax_gradient_rows(
                    &mut probabilities[..count * visible],
                    &mut slopes[..count * visible],
                    log_sums,
                    dots,
                    diagonal,
                    usize::from(sizes.causal),
                    sizes.scale(),
                );
                let [dqueries, dkeys, dvalues] =
                    [query + first * stride, key, value].map(|offset| ViewMut::rows(dqkv[offset..].as_mut_ptr(), stride));
                // SAFETY: as above; the three destinations are three different columns of dqkv.
                unsafe {
                    let probabilities = View::rows(probabilities.as_ptr(), visible);
                    let slopes = View::rows(slopes.as_ptr(), visible);
                    multiply([visible, head_dimension, count], dvalues, probabilities.transposed(), outputs, mode);
                    multiply([visible, head_dimension, count], dkeys, slopes.transposed(), queries, mode);
                    multiply([count, head_dimension, visible], dqueries, slopes, keys, Destination::Overwrite);
                }
            }
        }
    }
}

multiversion! {
    /// Makes scores into exponentials relative to the row's largest, and zeros from column `diagonal + row · step` on.
    fn softmax_rows(
        scores: &mut [f32], reciprocals: &mut [f32], log_sums: &mut [f32], diagonal: usize, step: usize, scale: f32,
    ) {
        let columns = scores.len() / log_sums.len();
        for (row, ((scores, log_sum), reciprocal)) in scores.chunks_exact_mut(columns).zip(log_sums).zip(reciprocals).enumerate() {
            let (seen, hidden) = scores.split_at_mut((diagonal + row * step).min(columns));
            hidden.fill(0.0);
            let largest = maximum(seen) * scale;
            let mut lanes = [0.0; LANES];
            let mut chunks = seen.chunks_exact_mut(LANES);
            for chunk in &mut chunks {
                for lane in 0..LANES {
                    chunk[lane] = exponential::<FUSED>(chunk[lane] * scale - largest);
                    lanes[lane] += chunk[lane];
                }
            }
            for (score, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
                *score = exponential::<FUSED>(*score * scale - largest);
                *lane += *score;
            }
            let sum = sum_lanes(lanes);
            *reciprocal = 1.0 / sum;
            *log_sum = largest + sum.ln();
        }
    }

    /// Makes scores into probabilities, and gradients of probabilities into gradients of unscaled scores.
    fn softmax_gradient_rows(
        scores: &mut [f32], slopes: &mut [f32], log_sums: &[f32], dots: &[f32], diagonal: usize, step: usize, scale: f32,
    ) {
        let columns = scores.len() / log_sums.len();
        for (row, (scores, slopes)) in scores.chunks_exact_mut(columns).zip(slopes.chunks_exact_mut(columns)).enumerate() {
            let (log_sum, dot) = (log_sums[row], dots[row]);
            let seen = (diagonal + row * step).min(columns);
            let (scores, hidden_scores) = scores.split_at_mut(seen);
            let (slopes, hidden_slopes) = slopes.split_at_mut(seen);
            hidden_scores.fill(0.0);
            hidden_slopes.fill(0.0);
            for (score, slope) in scores.iter_mut().zip(slopes) {
                let probability = exponential::<FUSED>(*score * scale - log_sum);
                *score = probability;
                *slope = probability * (*slope - dot) * scale;
            }
        }
    }

    fn scale_rows(x: &mut [f32], factors: &[f32], rows: usize, columns: usize, stride: usize) {
        for (row, &factor) in factors.iter().enumerate().take(rows) {
            for x in &mut x[row * stride..][..columns] {
                *x *= factor;
            }
        }
    }

    fn dot_rows(dots: &mut [f32], a: &[f32], b: &[f32], rows: usize, columns: usize, stride: usize) {
        for (row, dot) in dots.iter_mut().enumerate().take(rows) {
            *dot = reduce_pairs(&a[row * stride..][..columns], &b[row * stride..][..columns], |a, b| a * b);
        }
    }
}
