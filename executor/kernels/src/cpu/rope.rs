//! Rotary position embedding (Su et al. 2021), pairing the halves of a head's features as Hugging
//! Face's Llama does.

use super::memory::{Scratch, floats, floats_mut, same};
use super::vector::{multiply_add, multiversion};
use crate::KernelCall;
use foretell_models::{PositionRun, Rope, position_runs};

/// Rotates forward, or backward with `direction` -1.
///
/// # Safety
///
/// The call's operands are checked and valid; y may be x.
pub(super) unsafe fn turn(call: &KernelCall<'_>, sizes: &Rope, direction: f64, scratch: &mut Scratch) {
    let Rope { positions, heads, head_dimension, theta, position_offset, zigzag, .. } = *sizes;
    let rotated = sizes.rotated_features();
    if sizes.elements() == 0 {
        return;
    }
    // SAFETY: reads and writes are valid; when y is x only y's slice is made.
    let y = unsafe { floats_mut(&call.writes[0]) };
    // SAFETY: as above.
    let x = (!same(&call.reads[0], &call.writes[0])).then(|| unsafe { floats(&call.reads[0]) });
    let half = rotated / 2;
    let [cosines, sines] = scratch.pieces([positions * half, positions * half]);
    if half == 0 {
        if let Some(x) = x {
            y.copy_from_slice(x);
        }
        return;
    }
    for PositionRun { start, position, length } in position_runs(zigzag, position_offset..position_offset + positions) {
        let of_run = start * half..(start + length) * half;
        let (cosines, sines) = (&mut cosines[of_run.clone()], &mut sines[of_run]);
        fill_angles(cosines, sines, half, theta as f64, position as f64, direction);
    }
    let row = heads * head_dimension;
    let angles = || cosines.chunks_exact(half).zip(sines.chunks_exact(half)).cycle();
    match x {
        None => {
            for (y, (cosines, sines)) in y.chunks_exact_mut(row).zip(angles()) {
                turn_in_place(y, head_dimension, cosines, sines);
            }
        }
        Some(x) => {
            for ((y, x), (cosines, sines)) in y.chunks_exact_mut(row).zip(x.chunks_exact(row)).zip(angles()) {
                turn_to(y, x, head_dimension, cosines, sines);
            }
        }
    }
}

/// Fills `[positions, half]` cosines and sines. Each position is rotated from the previous one in
/// double precision. Over a million positions the error stays below single precision.
fn fill_angles(cosines: &mut [f32], sines: &mut [f32], half: usize, theta: f64, offset: f64, direction: f64) {
    let frequency = |index: usize| direction * theta.powf(-(index as f64) / half as f64);
    let steps: Vec<(f64, f64)> = (0..half).map(|index| frequency(index).sin_cos()).collect();
    let mut now: Vec<(f64, f64)> = (0..half).map(|index| (offset * frequency(index)).sin_cos()).collect();
    for (cosines, sines) in cosines.chunks_exact_mut(half).zip(sines.chunks_exact_mut(half)) {
        for (((cosine, sine), now), &(step_sine, step_cosine)) in cosines.iter_mut().zip(sines).zip(&mut now).zip(&steps) {
            let (now_sine, now_cosine) = *now;
            (*cosine, *sine) = (now_cosine as f32, now_sine as f32);
            *now = (now_sine * step_cosine + now_cosine * step_sine, now_cosine * step_cosine - now_sine * step_sine);
        }
    }
}

multiversion! {
    /// Rotates the heads of one position.
    fn turn_to(y: &mut [f32], x: &[f32], features: usize, cosines: &[f32], sines: &[f32]) {
        let half = cosines.len();
        for (y, x) in y.chunks_exact_mut(features).zip(x.chunks_exact(features)) {
            y[2 * half..].copy_from_slice(&x[2 * half..]);
            let (y_first, y_second) = y[..2 * half].split_at_mut(half);
            let (x_first, x_second) = x[..2 * half].split_at(half);
            for index in 0..half {
                let (a, b, cosine, sine) = (x_first[index], x_second[index], cosines[index], sines[index]);
                y_first[index] = multiply_add::<FUSED>(a, cosine, -(b * sine));
                y_second[index] = multiply_add::<FUSED>(b, cosine, a * sine);
            }
        }
    }

    fn turn_in_place(x: &mut [f32], features: usize, cosines: &[f32], sines: &[f32]) {
        let half = cosines.len();
        for x in x.chunks_exact_mut(features) {
            let (first, second) = x[..2 * half].split_at_mut(half);
            for index in 0..half {
                let (a, b, cosine, sine) = (first[index], second[index], cosines[index], sines[index]);
                first[index] = multiply_add::<FUSED>(a, cosine, -(b * sine));
                second[index] = multiply_add::<FUSED>(b, cosine, a * sine);
            }
        }
    }
}
