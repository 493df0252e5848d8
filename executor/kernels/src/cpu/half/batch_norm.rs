//! Batch normalisation in half precision: blocks of positions are widened in the cache and treated
//! as in single precision.

use crate::KernelCall;
use crate::cpu::batch_norm::{
    affine, combine, gradient_factors, means_and_squared_deviations, merge_deviations, normalising_factors,
};
use crate::cpu::memory::{Scratch, floats, floats_mut, halves, halves_mut};
use crate::cpu::sums::column_sums_normalised;
use crate::half::SixteenBits;

/// Elements per block of positions: two or three such blocks in single precision fit the L1 cache.
const BLOCK_ELEMENTS: usize = 4096;

fn block_elements(positions: usize, channels: usize) -> usize {
    (BLOCK_ELEMENTS / channels).max(8).min(positions) * channels
}

/// # Safety
///
/// The call's operands are checked and valid, and none is empty.
pub(super) unsafe fn forward(call: &KernelCall<'_>, positions: usize, channels: usize, half: SixteenBits, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, scale, shift) = unsafe { (halves(&call.reads[0]), halves(&call.reads[1]), halves(&call.reads[2])) };
    // SAFETY: as above.
    let (y, saved) = unsafe { (halves_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    // SAFETY: as above.
    let mut statistics = call.writes.get(2).map(|operand| unsafe { floats_mut(operand) });
    if let Some(statistics) = &mut statistics
        && !call.accumulate
    {
        statistics.fill(0.0);
    }
    let block = block_elements(positions, channels);
    let [wide, result, partial, of_block, slope, wide_scale, wide_shift] =
        scratch.pieces([block, block, 2 * channels, 2 * channels, channels, channels, channels]);
    half.widen(wide_scale, scale);
    half.widen(wide_shift, shift);
    let group = positions * channels;
    for ((x, y), saved) in x.chunks_exact(group).zip(y.chunks_exact_mut(group)).zip(saved.chunks_exact_mut(2 * channels)) {
        let (mean, deviations) = saved.split_at_mut(channels);
        mean.fill(0.0);
        deviations.fill(0.0);
        let mut counted = 0.0_f32;
        for x in x.chunks(block) {
            let wide = &mut wide[..x.len()];
            half.widen(wide, x);
            let (block_mean, block_deviations) = of_block.split_at_mut(channels);
            means_and_squared_deviations(wide, block_mean, block_deviations, partial);
            counted = merge_deviations(mean, deviations, block_mean, block_deviations, counted, (x.len() / channels) as f32);
        }
        normalising_factors(mean, deviations, slope, wide_scale, statistics.as_deref_mut(), positions);
        for (x, y) in x.chunks(block).zip(y.chunks_mut(block)) {
            let (wide, result) = (&mut wide[..x.len()], &mut result[..x.len()]);
            half.widen(wide, x);
            affine(result, wide, mean, slope, wide_shift);
            half.narrow(y, result);
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid, and none is empty.
pub(super) unsafe fn input_gradient(
    call: &KernelCall<'_>,
    positions: usize,
    channels: usize,
    half: SixteenBits,
    scratch: &mut Scratch,
) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, x, scale, saved) =
        unsafe { (halves(&call.reads[0]), halves(&call.reads[1]), halves(&call.reads[2]), floats(&call.reads[3])) };
    // SAFETY: as above.
    let (dx, sums) = unsafe { (halves_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    sums.fill(0.0);
    let block = block_elements(positions, channels);
    let [wide_dy, wide_x, result, partial, slope, tilt, offset, wide_scale] =
        scratch.pieces([block, block, block, 2 * channels, channels, channels, channels, channels]);
    half.widen(wide_scale, scale);
    let group = positions * channels;
    let tensors = dy.chunks_exact(group).zip(x.chunks_exact(group)).zip(dx.chunks_exact_mut(group));
    let statistics = saved.chunks_exact(2 * channels).zip(sums.chunks_exact_mut(2 * channels));
    for (((dy, x), dx), (saved, sums)) in tensors.zip(statistics) {
        let (mean, factor) = saved.split_at(channels);
        let (totals, products) = sums.split_at_mut(channels);
        for (dy, x) in dy.chunks(block).zip(x.chunks(block)) {
            let (wide_dy, wide_x) = (&mut wide_dy[..x.len()], &mut wide_x[..x.len()]);
            half.widen(wide_dy, dy);
            half.widen(wide_x, x);
            column_sums_normalised(wide_dy, wide_x, mean, factor, totals, products, partial);
        }
        gradient_factors([slope, tilt, offset], wide_scale, factor, totals, products, positions);
        for ((dy, x), dx) in dy.chunks(block).zip(x.chunks(block)).zip(dx.chunks_mut(block)) {
            let (wide_dy, wide_x) = (&mut wide_dy[..x.len()], &mut wide_x[..x.len()]);
            half.widen(wide_dy, dy);
            half.widen(wide_x, x);
            combine(&mut result[..x.len()], wide_dy, wide_x, mean, slope, tilt, offset);
            half.narrow(dx, result);
        }
    }
}
