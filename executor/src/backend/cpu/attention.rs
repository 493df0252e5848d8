//! Softmax attention and its gradient, a block of queries of one head at a time, so that the scores never leave the cache
//! (Dao et al. 2022). Rows of scores are whole, so that the softmax needs no running rescaling; what lies fully above the diagonal of
//! causal attention is never computed.

use super::head_products::{Block, Factor, mixture, plain_elements, scores, spread, transposed_elements};
use super::memory::{Scratch, floats, floats_mut};
use super::micro_kernel::MicroKernel;
use super::product::{Destination, View, ViewMut};
use super::vector::{exponential, fold_lanes, larger, multiversion, reduce_pairs, sum_lanes};
use crate::backend::KernelCall;

/// Numbers of a vector of AVX-512. Rows of causal scores have every length: they are treated up to a multiple of it, with [`UNSEEN`] where
/// they end, as the last numbers one by one would take longer than all others.
const VECTOR: usize = 16;

/// A score whose exponential is as good as nothing.
const UNSEEN: f32 = -1e30;

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
    /// blocks small enough that a causal block wastes little above its diagonal, and large enough for the product to be fast; whole tiles
    /// of the micro-kernel.
    fn block(&self) -> usize {
        ((1 << 17) / self.sequence.max(1)).clamp(14, 56)
    }

    fn block_at(&self, first: usize) -> Block {
        let count = self.block().min(self.sequence - first);
        Block { first, count, visible: self.visible(first + count), features: self.head_dimension, causal: self.causal }
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
pub(super) unsafe fn forward(call: &KernelCall<'_>, sizes: Sizes, kernel: Option<&MicroKernel>, scratch: &mut Scratch) {
    let Sizes { batch, sequence, heads, head_dimension, .. } = sizes;
    if sizes.is_empty() {
        return;
    }
    // SAFETY: reads and writes are valid and do not overlap.
    let (qkv, out, log_sums) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    let block = sizes.block();
    let (stride, hidden) = (sizes.qkv_stride(), heads * head_dimension);
    let extents = [sequence, head_dimension];
    let [block_scores, reciprocals, packed_keys, packed_values] = scratch.pieces([
        block * sequence,
        block,
        transposed_elements(kernel, sequence, head_dimension),
        plain_elements(kernel, sequence, head_dimension),
    ]);
    for image in 0..batch {
        for head in 0..heads {
            let query = image * sequence * stride + head * head_dimension;
            let keys = Factor::transposed(kernel, &qkv[query + hidden..], stride, extents, packed_keys);
            let values = Factor::plain(kernel, &qkv[query + 2 * hidden..], stride, extents, packed_values);
            for first in (0..sequence).step_by(block) {
                let block = sizes.block_at(first);
                let Block { count, visible, .. } = block;
                let queries = View::rows(qkv[query + first * stride..].as_ptr(), stride);
                // SAFETY: queries and keys are this head's rows.
                unsafe { scores(kernel, &block, block_scores, queries, keys) };
                let log_sums = &mut log_sums[(image * heads + head) * sequence + first..][..count];
                let diagonal = if sizes.causal { first + 1 } else { sequence };
                let step = usize::from(sizes.causal);
                softmax_rows(&mut block_scores[..count * visible], reciprocals, log_sums, diagonal, step, sizes.scale());
                let target = &mut out[(image * sequence + first) * hidden + head * head_dimension..];
                // SAFETY: the target's rows are this head's.
                unsafe { mixture(kernel, &block, ViewMut::rows(target.as_mut_ptr(), hidden), block_scores, values, sequence) };
                // The sums divide the few features of the output instead of the many probabilities.
                scale_rows(target, reciprocals, count, head_dimension, hidden);
            }
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn gradient(call: &KernelCall<'_>, sizes: Sizes, kernel: Option<&MicroKernel>, scratch: &mut Scratch) {
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
    let extents = [sequence, head_dimension];
    let transposed = transposed_elements(kernel, sequence, head_dimension);
    let (plain, block_plain) = (plain_elements(kernel, sequence, head_dimension), plain_elements(kernel, block, head_dimension));
    let [probabilities, slopes, dots, packed_keys, packed_values, packed_plain_keys, packed_queries, packed_outputs] =
        scratch.pieces([block * sequence, block * sequence, block, transposed, transposed, plain, block_plain, block_plain]);
    for image in 0..batch {
        for head in 0..heads {
            let query = image * sequence * stride + head * head_dimension;
            let [key, value] = [query + hidden, query + 2 * hidden];
            let keys = Factor::transposed(kernel, &qkv[key..], stride, extents, packed_keys);
            let values = Factor::transposed(kernel, &qkv[value..], stride, extents, packed_values);
            let plain_keys = Factor::plain(kernel, &qkv[key..], stride, extents, packed_plain_keys);
            // From the last block of queries, which sees every key: it overwrites the gradients of keys and values, and the
            // others add to them.
            for first in (0..sequence).step_by(block).rev() {
                let block = sizes.block_at(first);
                let Block { count, visible, .. } = block;
                let mode = Destination::accumulating(first + count < sequence);
                let output = (image * sequence + first) * hidden + head * head_dimension;
                let queries = &qkv[query + first * stride..];
                let outputs = &dout[output..];
                // SAFETY: all rows are this head's, and the scratch is apart.
                unsafe {
                    scores(kernel, &block, probabilities, View::rows(queries.as_ptr(), stride), keys);
                    scores(kernel, &block, slopes, View::rows(outputs.as_ptr(), hidden), values);
                }
                dot_rows(dots, outputs, &out[output..], count, head_dimension, hidden);
                let log_sums = &log_sums[(image * heads + head) * sequence + first..][..count];
                let diagonal = if sizes.causal { first + 1 } else { sequence };
                softmax_gradient_rows(
                    &mut probabilities[..count * visible],
                    &mut slopes[..count * visible],
                    log_sums,
                    dots,
                    diagonal,
                    usize::from(sizes.causal),
                    sizes.scale(),
                );
                let block_packed = plain_elements(kernel, count, head_dimension);
                let extents = [count, head_dimension];
                let queries = Factor::plain(kernel, queries, stride, extents, &mut packed_queries[..block_packed]);
                let outputs = Factor::plain(kernel, outputs, hidden, extents, &mut packed_outputs[..block_packed]);
                let [dqueries, dkeys, dvalues] =
                    [query + first * stride, key, value].map(|offset| ViewMut::rows(dqkv[offset..].as_mut_ptr(), stride));
                // SAFETY: as above; the three targets are three different columns of dqkv.
                unsafe {
                    spread(kernel, &block, dvalues, probabilities, outputs, mode);
                    spread(kernel, &block, dkeys, slopes, queries, mode);
                    mixture(kernel, &block, dqueries, slopes, plain_keys, sequence);
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
            let seen = (diagonal + row * step).min(columns);
            let whole = seen.next_multiple_of(VECTOR).min(columns);
            scores[seen..whole].fill(UNSEEN);
            let mut largest = [f32::NEG_INFINITY; VECTOR];
            let chunks = scores[..whole].chunks_exact(VECTOR);
            for (largest, &score) in largest.iter_mut().zip(chunks.remainder()) {
                *largest = score;
            }
            for chunk in chunks {
                for lane in 0..VECTOR {
                    largest[lane] = larger(largest[lane], chunk[lane]);
                }
            }
            let largest = fold_lanes(largest, larger) * scale;
            let mut lanes = [0.0; VECTOR];
            let mut chunks = scores[..whole].chunks_exact_mut(VECTOR);
            for chunk in &mut chunks {
                for lane in 0..VECTOR {
                    chunk[lane] = exponential::<FUSED>(chunk[lane] * scale - largest);
                    lanes[lane] += chunk[lane];
                }
            }
            for (score, lane) in chunks.into_remainder().iter_mut().zip(&mut lanes) {
                *score = exponential::<FUSED>(*score * scale - largest);
                *lane += *score;
            }
            scores[seen..].fill(0.0);
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
            let whole = seen.next_multiple_of(VECTOR).min(columns);
            scores[seen..whole].fill(UNSEEN);
            slopes[seen..whole].fill(0.0);
            for (score, slope) in scores[..whole].iter_mut().zip(&mut slopes[..whole]) {
                let probability = exponential::<FUSED>(*score * scale - log_sum);
                *score = probability;
                *slope = probability * (*slope - dot) * scale;
            }
            scores[seen..].fill(0.0);
            slopes[seen..].fill(0.0);
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
