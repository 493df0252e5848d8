//! Softmax attention and its gradient, computed for one block of queries of one head at a time, so
//! that scores stay in the cache (Dao et al. 2022). Rows of scores are complete, so the softmax
//! needs no running rescaling. Blocks above the diagonal of causal attention are skipped.

use super::attention_plan::{AttentionPlan, QueryBlock};
use super::dropout::ProbabilityDropout;
use super::head_products::{Factor, HeadBlock, mixture, plain_elements, scores, spread, transposed_elements};
use super::memory::{Scratch, floats, floats_mut};
use super::micro_kernel::MicroKernel;
use super::ordered::store_in_order;
use super::vector::{exponential, fold_lanes, larger, multiply_add, multiversion, reduce_pairs, sum_lanes};
use super::view::{Destination, View, ViewMut};
use crate::KernelCall;
use foretell_models::{Attention, RingStep};

/// Floats of an AVX-512 vector. Rows of causal scores have every length. They are padded with
/// [`UNSEEN`] to a multiple of this, because a scalar remainder would take longer than the vector
/// part.
const VECTOR: usize = 16;

/// A score whose exponential is zero.
const UNSEEN: f32 = -1e30;

/// # Safety
///
/// The call's operands are checked and valid, and the sizes are those of its kernel.
pub(super) unsafe fn forward(
    call: &KernelCall<'_>,
    sizes: &Attention,
    dropout: Option<ProbabilityDropout>,
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    let Attention { batch, queries, keys, key_heads, group, head_dimension, packed, .. } = *sizes;
    let plan = AttentionPlan::new(sizes, dropout.as_ref());
    // A step of a ring whose keys no query sees adds nothing.
    if plan.is_empty() || sizes.ring.is_some_and(|ring| ring.unseen) {
        return;
    }
    let merges = sizes.ring.is_some_and(RingStep::merges);
    let (block, hidden, strides) = (plan.block(), plan.hidden, plan.strides);
    // SAFETY: reads and writes are valid and do not overlap.
    let (out, log_sums) = unsafe { (floats_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    // SAFETY: as above.
    let reads = |index: usize| unsafe { floats(&call.reads[index]) };
    let (q, k, v) =
        if packed { (reads(0), &reads(0)[hidden..], &reads(0)[2 * hidden..]) } else { (reads(0), reads(1), reads(2)) };
    let table = sizes.relative.map(|_| reads(if packed { 1 } else { 3 }));
    let extents = [keys, head_dimension];
    let [block_scores, reciprocals, packed_keys, packed_values, bias, block_out, block_log_sums, ordered_keys, ordered_values] =
        scratch.pieces([
            block * keys,
            block,
            transposed_elements(kernel, keys, head_dimension),
            plain_elements(kernel, keys, head_dimension),
            plan.bias_elements(),
            if merges { block * head_dimension } else { 0 },
            if merges { block } else { 0 },
            plan.ordered_elements(),
            plan.ordered_elements(),
        ]);
    for [image, key_head] in pairs(batch, key_heads) {
        let key = plan.key(image, key_head);
        let (key_rows, key_stride) = plan.keys_of(&k[key..], ordered_keys);
        let (value_rows, value_stride) = plan.keys_of(&v[key..], ordered_values);
        let factor_keys = Factor::transposed(kernel, key_rows, key_stride, extents, packed_keys);
        let values = Factor::plain(kernel, value_rows, value_stride, extents, packed_values);
        for head in key_head * group..(key_head + 1) * group {
            if let Some(table) = table {
                plan.fill_bias(bias, table, head);
            }
            for &QueryBlock { row: first, position, block } in &plan.blocks {
                let HeadBlock { count, visible, .. } = block;
                let query = plan.query(image, head) + first * strides.query;
                let rows = View::rows(q[query..].as_ptr(), strides.query);
                // SAFETY: queries and keys are this head's rows.
                unsafe { scores(kernel, &block, block_scores, rows, factor_keys) };
                let block_scores = &mut block_scores[..count * visible];
                let mut scale = plan.scale;
                if table.is_some() {
                    add_bias(block_scores, &bias[plan.bias_line(first + count - 1)..], count, scale);
                    scale = 1.0;
                }
                let log_sums = &mut log_sums[(image * sizes.heads() + head) * queries + first..][..count];
                let (diagonal, step) = plan.diagonal(&block);
                // A row's sum includes dropped probabilities.
                let drop_some = |probabilities: &mut [f32]| {
                    if let Some(dropout) = dropout {
                        dropout.drop_some(probabilities, visible, &plan.key_runs, [image, head, position]);
                    }
                };
                if merges {
                    let parts = &mut block_log_sums[..count];
                    softmax_rows(block_scores, reciprocals, parts, diagonal, step, scale);
                    drop_some(block_scores);
                    let rows = ViewMut::rows(block_out.as_mut_ptr(), head_dimension);
                    // SAFETY: the rows are this block's scratch.
                    unsafe { mixture(kernel, &block, rows, block_scores, values, keys, Destination::Overwrite) };
                    let target = &mut out[plan.output(image, first, head)..];
                    merge_rows(target, log_sums, block_out, parts, reciprocals, head_dimension, hidden);
                    continue;
                }
                softmax_rows(block_scores, reciprocals, log_sums, diagonal, step, scale);
                drop_some(block_scores);
                let target = &mut out[plan.output(image, first, head)..];
                // SAFETY: the target's rows are this head's.
                unsafe {
                    let rows = ViewMut::rows(target.as_mut_ptr(), hidden);
                    mixture(kernel, &block, rows, block_scores, values, keys, Destination::Overwrite);
                }
                // Dividing the output's few features is cheaper than dividing all probabilities.
                scale_rows(target, reciprocals, count, head_dimension, hidden);
            }
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid, and the sizes are those of its kernel.
pub(super) unsafe fn gradient(
    call: &KernelCall<'_>,
    sizes: &Attention,
    dropout: Option<ProbabilityDropout>,
    kernel: Option<&MicroKernel>,
    scratch: &mut Scratch,
) {
    let Attention { batch, queries, keys, key_heads, group, head_dimension, packed, .. } = *sizes;
    let plan = AttentionPlan::new(sizes, dropout.as_ref());
    let (block, hidden, strides) = (plan.block(), plan.hidden, plan.strides);
    // SAFETY: reads are valid, and overlap no write.
    let reads = |index: usize| unsafe { floats(&call.reads[index]) };
    let pointer = |index: usize| call.writes[index].pointer.cast::<f32>();
    let after = if packed { 2 } else { 4 };
    let (dout, out, log_sums) = (reads(0), reads(after), reads(after + 1));
    let (q, k, v) =
        if packed { (reads(1), &reads(1)[hidden..], &reads(1)[2 * hidden..]) } else { (reads(1), reads(2), reads(3)) };
    let targets = if packed {
        [pointer(0), pointer(0).wrapping_add(hidden), pointer(0).wrapping_add(2 * hidden)]
    } else {
        [pointer(0), pointer(1), pointer(2)]
    };
    let table = sizes.relative.map(|_| reads(after + 2));
    // SAFETY: the last write is valid, and apart from all others.
    let mut table_gradient = sizes.relative.map(|_| unsafe { floats_mut(&call.writes[call.writes.len() - 1]) });
    if let Some(gradient) = table_gradient.as_deref_mut().filter(|_| !call.accumulate) {
        gradient.fill(0.0);
    }
    let merges = sizes.ring.is_some_and(RingStep::merges);
    if sizes.ring.is_some_and(|ring| ring.unseen) {
        for write in &call.writes[1..] {
            // SAFETY: the write is valid, and no other thread uses it.
            unsafe { floats_mut(write) }.fill(0.0);
        }
        return;
    }
    if plan.is_empty() {
        for write in &call.writes[..call.writes.len() - usize::from(table.is_some())] {
            // SAFETY: the write is valid, and no other thread uses it.
            unsafe { floats_mut(write) }.fill(0.0);
        }
        return;
    }
    let extents = [keys, head_dimension];
    let transposed = transposed_elements(kernel, keys, head_dimension);
    let (plain, block_plain) = (plain_elements(kernel, keys, head_dimension), plain_elements(kernel, block, head_dimension));
    let [
        probabilities,
        slopes,
        dots,
        packed_keys,
        packed_values,
        packed_plain_keys,
        packed_queries,
        packed_outputs,
        bias,
        bias_gradient,
        ordered_keys,
        ordered_values,
        key_gradients,
        value_gradients,
    ] = scratch.pieces([
        block * keys,
        block * keys,
        block,
        transposed,
        transposed,
        plain,
        block_plain,
        block_plain,
        plan.bias_elements(),
        plan.bias_elements(),
        plan.ordered_elements(),
        plan.ordered_elements(),
        plan.ordered_elements(),
        plan.ordered_elements(),
    ]);
    for [image, key_head] in pairs(batch, key_heads) {
        let key = plan.key(image, key_head);
        let (key_rows, key_stride) = plan.keys_of(&k[key..], ordered_keys);
        let (value_rows, value_stride) = plan.keys_of(&v[key..], ordered_values);
        let factor_keys = Factor::transposed(kernel, key_rows, key_stride, extents, packed_keys);
        let values = Factor::transposed(kernel, value_rows, value_stride, extents, packed_values);
        let plain_keys = Factor::plain(kernel, key_rows, key_stride, extents, packed_plain_keys);
        let stored = [targets[1], targets[2]].map(|target| ViewMut::rows(target.wrapping_add(key), strides.key));
        let key_targets = match plan.order {
            None => stored,
            Some(_) => [&mut *key_gradients, &mut *value_gradients].map(|copy| ViewMut::rows(copy.as_mut_ptr(), head_dimension)),
        };
        for head in key_head * group..(key_head + 1) * group {
            if let Some(table) = table {
                plan.fill_bias(bias, table, head);
                bias_gradient.fill(0.0);
            }
            // Starts with the last block of queries, which sees the most keys. The first head's
            // block overwrites the gradients of keys and values; the others add.
            for &QueryBlock { row: first, position, block } in plan.blocks.iter().rev() {
                let HeadBlock { count, visible, .. } = block;
                let is_first = head == key_head * group && first + count == queries;
                if is_first {
                    for target in key_targets {
                        // SAFETY: the rows from `visible` on are this head's.
                        unsafe { clear_rows(target, visible..keys, head_dimension) };
                    }
                }
                let mode = Destination::accumulating(!is_first);
                let output = plan.output(image, first, head);
                let query = plan.query(image, head) + first * strides.query;
                let query_rows = &q[query..];
                let outputs = &dout[output..];
                // SAFETY: all rows are this head's, and the scratch is apart.
                unsafe {
                    scores(kernel, &block, probabilities, View::rows(query_rows.as_ptr(), strides.query), factor_keys);
                    scores(kernel, &block, slopes, View::rows(outputs.as_ptr(), hidden), values);
                }
                dot_rows(dots, outputs, &out[output..], count, head_dimension, hidden);
                let log_sums = &log_sums[(image * sizes.heads() + head) * queries + first..][..count];
                let (diagonal, step) = plan.diagonal(&block);
                let (probabilities, slopes) = (&mut probabilities[..count * visible], &mut slopes[..count * visible]);
                // A dropped probability has no gradient. The row's sum of probability times
                // gradient equals the product of its output and the output's gradient, with or
                // without dropout.
                if let Some(dropout) = dropout {
                    dropout.drop_some(slopes, visible, &plan.key_runs, [image, head, position]);
                }
                if table.is_some() {
                    let line = plan.bias_line(first + count - 1);
                    add_bias(probabilities, &bias[line..], count, plan.scale);
                    softmax_gradient_rows(probabilities, slopes, log_sums, dots, diagonal, step, 1.0);
                    add_diagonals(&mut bias_gradient[line..], slopes, count, plan.scale);
                } else {
                    softmax_gradient_rows(probabilities, slopes, log_sums, dots, diagonal, step, plan.scale);
                }
                // The values' gradients use the dropped probabilities.
                if let Some(dropout) = dropout {
                    dropout.drop_some(probabilities, visible, &plan.key_runs, [image, head, position]);
                }
                let block_packed = plain_elements(kernel, count, head_dimension);
                let extents = [count, head_dimension];
                let queries = Factor::plain(kernel, query_rows, strides.query, extents, &mut packed_queries[..block_packed]);
                let outputs = Factor::plain(kernel, outputs, hidden, extents, &mut packed_outputs[..block_packed]);
                let query_target = ViewMut::rows(targets[0].wrapping_add(query), strides.query);
                // SAFETY: as above; the three targets are three different tensors, or columns of
                // one.
                unsafe {
                    spread(kernel, &block, key_targets[1], probabilities, outputs, mode);
                    spread(kernel, &block, key_targets[0], slopes, queries, mode);
                    mixture(kernel, &block, query_target, slopes, plain_keys, keys, Destination::accumulating(merges));
                }
            }
            if let Some(gradient) = table_gradient.as_deref_mut() {
                plan.each_distance(head, |place, entry| gradient[entry] += bias_gradient[place]);
            }
        }
        if let Some(order) = plan.order {
            for (copy, stored) in [&*key_gradients, &*value_gradients].into_iter().zip(stored) {
                // SAFETY: the rows are this head's.
                unsafe { store_in_order(order, copy, head_dimension, stored) };
            }
        }
    }
}

/// All pairs of indices; the second varies fastest.
fn pairs(first: usize, second: usize) -> impl Iterator<Item = [usize; 2]> {
    (0..first).flat_map(move |first| (0..second).map(move |two| [first, two]))
}

/// # Safety
///
/// The rows are valid, and no other thread uses them.
unsafe fn clear_rows(target: ViewMut, rows: std::ops::Range<usize>, columns: usize) {
    for row in rows {
        // SAFETY: as this function's own contract.
        unsafe { std::slice::from_raw_parts_mut(target.pointer.add(row * target.row_stride), columns) }.fill(0.0);
    }
}

multiversion! {
    /// Replaces scores by exponentials relative to the row's maximum, and by zeros from column
    /// `diagonal + row · step` on. Writes each row's log-sum-exp and the reciprocal of its sum.
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

    /// Replaces scores by probabilities, and gradients of probabilities by gradients of unscaled
    /// scores.
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

    /// `scores = scale · scores + bias`. Each row's bias starts one element after the next row's.
    fn add_bias(scores: &mut [f32], bias: &[f32], rows: usize, scale: f32) {
        let columns = scores.len() / rows;
        for (row, scores) in scores.chunks_exact_mut(columns).enumerate() {
            for (score, &bias) in scores.iter_mut().zip(&bias[rows - 1 - row..][..columns]) {
                *score = multiply_add::<FUSED>(*score, scale, bias);
            }
        }
    }

    /// Adds the gradients of scores to those of the bias, and scales them to gradients of unscaled
    /// scores.
    fn add_diagonals(bias: &mut [f32], slopes: &mut [f32], rows: usize, scale: f32) {
        let columns = slopes.len() / rows;
        for (row, slopes) in slopes.chunks_exact_mut(columns).enumerate() {
            for (slope, bias) in slopes.iter_mut().zip(&mut bias[rows - 1 - row..][..columns]) {
                *bias += *slope;
                *slope *= scale;
            }
        }
    }

    /// Merges the outputs over two sets of keys, before division by their sums. Exponentials are
    /// relative to the larger of both log-sums, so that none overflows (as between FlashAttention's
    /// blocks).
    fn merge_rows(
        out: &mut [f32], log_sums: &mut [f32], parts: &[f32], part_log_sums: &[f32], reciprocals: &[f32], columns: usize, stride: usize,
    ) {
        for (row, log_sum) in log_sums.iter_mut().enumerate() {
            let largest = larger(*log_sum, part_log_sums[row]);
            let (old, new) = ((*log_sum - largest).exp(), (part_log_sums[row] - largest).exp());
            let sum = old + new;
            *log_sum = largest + sum.ln();
            let (old, new) = (old / sum, new / sum * reciprocals[row]);
            for (out, &part) in out[row * stride..][..columns].iter_mut().zip(&parts[row * columns..][..columns]) {
                *out = multiply_add::<FUSED>(*out, old, part * new);
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
