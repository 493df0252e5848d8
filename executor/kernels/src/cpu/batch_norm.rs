//! Batch normalisation (Ioffe and Szegedy 2015) of channels-last tensors, over groups of samples
//! that share statistics. Mean and variance take one pass over memory: each block is summed exactly
//! in the cache, and blocks are merged by Chan, Golub and LeVeque (1979). The mean of squares less
//! the squared mean would cancel if the mean is large.

use super::memory::{Scratch, floats, floats_mut};
use super::sums::column_sums_normalised;
use super::vector::{multiply_add, multiversion};
use crate::KernelCall;

const EPSILON: f32 = 1e-5;
/// Momentum of the running statistics (PyTorch's default): the weight of the newest step.
const FORGET: f32 = 0.1;
/// Elements per block of positions: 32 KiB, so that the second pass reads it from the L1 cache.
const BLOCK_ELEMENTS: usize = 8192;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, groups: usize, positions: usize, channels: usize, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, scale, shift) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats(&call.reads[2])) };
    // SAFETY: as above.
    let (y, saved) = unsafe { (floats_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    // SAFETY: as above.
    let mut statistics = call.writes.get(2).map(|operand| unsafe { floats_mut(operand) });
    if let Some(statistics) = &mut statistics
        && !call.accumulate
    {
        statistics.fill(0.0);
    }
    if groups * positions * channels == 0 {
        return;
    }
    let [partial, slope] = scratch.pieces([2 * channels, channels]);
    let group_elements = positions * channels;
    for ((x, y), saved) in
        x.chunks_exact(group_elements).zip(y.chunks_exact_mut(group_elements)).zip(saved.chunks_exact_mut(2 * channels))
    {
        let (mean, deviations) = saved.split_at_mut(channels);
        means_and_squared_deviations(x, mean, deviations, partial);
        normalising_factors(mean, deviations, slope, scale, statistics.as_deref_mut(), positions);
        affine(y, x, mean, slope, shift);
    }
}

/// Converts sums of squared deviations to reciprocal standard deviations, adds mean and unbiased
/// variance to the statistics, and computes the slope `scale / standard deviation`.
pub(super) fn normalising_factors(
    mean: &[f32],
    deviations: &mut [f32],
    slope: &mut [f32],
    scale: &[f32],
    statistics: Option<&mut [f32]>,
    positions: usize,
) {
    let channels = mean.len();
    if let Some(statistics) = statistics {
        let (means, variances) = statistics.split_at_mut(channels);
        // PyTorch divides by n - 1 here. A single position has no unbiased variance; it counts as
        // zero.
        let unbiased = 1.0 / (positions.max(2) - 1) as f32;
        for channel in 0..channels {
            means[channel] += mean[channel];
            variances[channel] += deviations[channel] * unbiased;
        }
    }
    for channel in 0..channels {
        let factor = 1.0 / (deviations[channel] / positions as f32 + EPSILON).sqrt();
        deviations[channel] = factor;
        slope[channel] = factor * scale[channel];
    }
}

/// Merges mean and squared deviations of `count` positions into those of `counted` earlier ones.
/// Returns the total count.
pub(super) fn merge_deviations(
    mean: &mut [f32],
    deviations: &mut [f32],
    block_mean: &[f32],
    block_deviations: &[f32],
    counted: f32,
    count: f32,
) -> f32 {
    let share = count / (counted + count);
    for channel in 0..mean.len() {
        let difference = block_mean[channel] - mean[channel];
        mean[channel] += difference * share;
        deviations[channel] += block_deviations[channel] + difference * difference * (counted * share);
    }
    counted + count
}

/// `dx = scale factor (dy - Σdy/n - x̂ Σ(dy x̂)/n)`, as `slope dy + tilt (x - mean) + offset`.
pub(super) fn gradient_factors(
    [slope, tilt, offset]: [&mut [f32]; 3],
    scale: &[f32],
    factor: &[f32],
    totals: &[f32],
    products: &[f32],
    positions: usize,
) {
    for channel in 0..scale.len() {
        slope[channel] = scale[channel] * factor[channel];
        tilt[channel] = -slope[channel] * factor[channel] * (products[channel] / positions as f32);
        offset[channel] = -slope[channel] * (totals[channel] / positions as f32);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn input_gradient(
    call: &KernelCall<'_>,
    groups: usize,
    positions: usize,
    channels: usize,
    scratch: &mut Scratch,
) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, x, scale, saved) =
        unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats(&call.reads[2]), floats(&call.reads[3])) };
    // SAFETY: as above.
    let (dx, sums) = unsafe { (floats_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    sums.fill(0.0);
    if groups * positions * channels == 0 {
        return;
    }
    let [partial, slope, tilt, offset] = scratch.pieces([2 * channels, channels, channels, channels]);
    let group_elements = positions * channels;
    for group in 0..groups {
        let elements = group * group_elements..(group + 1) * group_elements;
        let (dy, x, dx) = (&dy[elements.clone()], &x[elements.clone()], &mut dx[elements]);
        let (mean, factor) = saved[2 * group * channels..][..2 * channels].split_at(channels);
        let (totals, products) = sums[2 * group * channels..][..2 * channels].split_at_mut(channels);
        column_sums_normalised(dy, x, mean, factor, totals, products, partial);
        gradient_factors([slope, tilt, offset], scale, factor, totals, products, positions);
        combine(dx, dy, x, mean, slope, tilt, offset);
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn weight_gradient(call: &KernelCall<'_>, channels: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (sums, dscale, dshift) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    if !call.accumulate {
        dscale.fill(0.0);
        dshift.fill(0.0);
    }
    for group in sums.chunks_exact(2 * channels.max(1)) {
        for channel in 0..channels {
            dshift[channel] += group[channel];
            dscale[channel] += group[channels + channel];
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn inference(call: &KernelCall<'_>, channels: usize, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, scale, shift, running) =
        unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats(&call.reads[2]), floats(&call.reads[3])) };
    // SAFETY: as above.
    let y = unsafe { floats_mut(&call.writes[0]) };
    if channels == 0 {
        return;
    }
    let (mean, variance) = running.split_at(channels);
    let [slope] = scratch.pieces([channels]);
    for channel in 0..channels {
        slope[channel] = scale[channel] / (variance[channel] + EPSILON).sqrt();
    }
    affine(y, x, mean, slope, shift);
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn running_statistics(call: &KernelCall<'_>, contributions: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (statistics, running) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    let factor = FORGET / contributions as f32;
    for (running, &statistic) in running.iter_mut().zip(statistics) {
        *running = (1.0 - FORGET) * *running + factor * statistic;
    }
}

multiversion! {
    /// Computes each channel's mean and its sum of squared deviations. `partial` is scratch of two
    /// floats per channel.
    pub(super) fn means_and_squared_deviations(x: &[f32], mean: &mut [f32], deviations: &mut [f32], partial: &mut [f32]) {
        let channels = mean.len();
        let deviations = &mut deviations[..channels];
        let (block_mean, block_deviations) = partial[..2 * channels].split_at_mut(channels);
        mean.fill(0.0);
        deviations.fill(0.0);
        let mut counted = 0.0_f32;
        for block in x.chunks((BLOCK_ELEMENTS / channels).max(8) * channels) {
            let count = (block.len() / channels) as f32;
            // Sums are relative to the block's first position, so that they stay small if the mean
            // is large.
            let pivot = &block[..channels];
            block_mean.fill(0.0);
            block_deviations.fill(0.0);
            for row in block.chunks_exact(channels) {
                for channel in 0..channels {
                    block_mean[channel] += row[channel] - pivot[channel];
                }
            }
            for channel in 0..channels {
                block_mean[channel] = block_mean[channel] / count + pivot[channel];
            }
            for row in block.chunks_exact(channels) {
                for channel in 0..channels {
                    let deviation = row[channel] - block_mean[channel];
                    block_deviations[channel] = multiply_add::<FUSED>(deviation, deviation, block_deviations[channel]);
                }
            }
            let share = count / (counted + count);
            for channel in 0..channels {
                let difference = block_mean[channel] - mean[channel];
                mean[channel] = multiply_add::<FUSED>(difference, share, mean[channel]);
                deviations[channel] += block_deviations[channel] + difference * difference * (counted * share);
            }
            counted += count;
        }
    }

    /// `y = (x - mean) slope + offset`.
    pub(super) fn affine(y: &mut [f32], x: &[f32], mean: &[f32], slope: &[f32], offset: &[f32]) {
        let channels = mean.len();
        let (slope, offset) = (&slope[..channels], &offset[..channels]);
        for (y, x) in y.chunks_exact_mut(channels).zip(x.chunks_exact(channels)) {
            for channel in 0..channels {
                y[channel] = multiply_add::<FUSED>(x[channel] - mean[channel], slope[channel], offset[channel]);
            }
        }
    }

    /// `dx = slope dy + tilt (x - mean) + offset`.
    pub(super) fn combine(dx: &mut [f32], dy: &[f32], x: &[f32], mean: &[f32], slope: &[f32], tilt: &[f32], offset: &[f32]) {
        let channels = mean.len();
        let (slope, tilt, offset) = (&slope[..channels], &tilt[..channels], &offset[..channels]);
        for ((dx, dy), x) in dx.chunks_exact_mut(channels).zip(dy.chunks_exact(channels)).zip(x.chunks_exact(channels)) {
            for channel in 0..channels {
                let tilted = multiply_add::<FUSED>(x[channel] - mean[channel], tilt[channel], offset[channel]);
                dx[channel] = multiply_add::<FUSED>(dy[channel], slope[channel], tilted);
            }
        }
    }
}
