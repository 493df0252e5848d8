//! Routes tokens to the slots of their experts and back. The experts' products are in `experts`.

use foretell_models::Mixture;

use super::memory::{check_indices, floats, floats_mut, integers, integers_mut};
use super::vector::{multiply_add, multiversion, reduce_pairs};
use crate::{BackendError, KernelCall};

/// Slot of a choice whose expert was full.
const FULL: i32 = -1;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn route(call: &KernelCall<'_>, experts: usize, top: usize) {
    // SAFETY: reads and writes are valid and do not overlap.
    let (logits, gates, choices) =
        unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0]), integers_mut(&call.writes[1])) };
    for ((logits, gates), choices) in
        logits.chunks_exact(experts).zip(gates.chunks_exact_mut(top)).zip(choices.chunks_exact_mut(top))
    {
        for place in 0..top {
            let best = largest(logits, &choices[..place]);
            choices[place] = best as i32;
            gates[place] = logits[best];
        }
        let highest = gates[0];
        gates.iter_mut().for_each(|gate| *gate = (*gate - highest).exp());
        let sum: f32 = gates.iter().sum();
        gates.iter_mut().for_each(|gate| *gate /= sum);
    }
}

/// Index of the largest logit not in `taken`; the first among equals. If logits are NaN, some index
/// not in `taken`.
fn largest(logits: &[f32], taken: &[i32]) -> usize {
    let mut best: Option<(usize, f32)> = None;
    for (index, &logit) in logits.iter().enumerate() {
        if best.is_none_or(|(_, most)| logit > most) && !taken.contains(&(index as i32)) {
            best = Some((index, logit));
        }
    }
    best.expect("invariant: fewer experts are taken than there are").0
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn route_gradient(call: &KernelCall<'_>, experts: usize, top: usize) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dgates, gates, choices, dlogits) =
        unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), integers(&call.reads[2]), floats_mut(&call.writes[0])) };
    check_indices(call.kernel.name(), choices, experts, None)?;
    dlogits.fill(0.0);
    let top = top.max(1);
    let tokens = dgates.chunks_exact(top).zip(gates.chunks_exact(top)).zip(choices.chunks_exact(top));
    for (((dgates, gates), choices), dlogits) in tokens.zip(dlogits.chunks_exact_mut(experts.max(1))) {
        let mean: f32 = dgates.iter().zip(gates).map(|(&dgate, &gate)| dgate * gate).sum();
        for ((&dgate, &gate), &choice) in dgates.iter().zip(gates).zip(choices) {
            dlogits[choice as usize] = gate * (dgate - mean);
        }
    }
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn dispatch(call: &KernelCall<'_>, sizes: &Mixture) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, choices, dispatched, places) =
        unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), floats_mut(&call.writes[0]), integers_mut(&call.writes[1])) };
    check_indices(call.kernel.name(), choices, sizes.experts, None)?;
    let Mixture { capacity, top, hidden, experts, .. } = *sizes;
    let mut filled = vec![0; experts];
    let mut lost = 0_usize;
    for (index, (&choice, place)) in choices.iter().zip(places).enumerate() {
        let expert = choice as usize;
        if filled[expert] == capacity {
            *place = FULL;
            lost += 1;
            continue;
        }
        *place = filled[expert] as i32;
        let slot = expert * capacity + filled[expert];
        dispatched[slot * hidden..][..hidden].copy_from_slice(&x[index / top * hidden..][..hidden]);
        filled[expert] += 1;
    }
    for (expert, &filled) in filled.iter().enumerate() {
        dispatched[(expert * capacity + filled) * hidden..(expert + 1) * capacity * hidden].fill(0.0);
    }
    if let Some(dropped) = call.writes.get(2) {
        // SAFETY: as above.
        let dropped = unsafe { floats_mut(dropped) };
        dropped[0] = if call.accumulate { dropped[0] } else { 0.0 } + lost as f32;
    }
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn dispatch_gradient(call: &KernelCall<'_>, sizes: &Mixture) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dispatched, choices, places, dx) =
        unsafe { (floats(&call.reads[0]), integers(&call.reads[1]), integers(&call.reads[2]), floats_mut(&call.writes[0])) };
    check_slots(call, sizes, choices, places)?;
    gather(dx, dispatched, None, choices, places, sizes);
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn combine(call: &KernelCall<'_>, sizes: &Mixture) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (rows, gates, y) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    // SAFETY: as above.
    let (choices, places) = unsafe { (integers(&call.reads[2]), integers(&call.reads[3])) };
    check_slots(call, sizes, choices, places)?;
    gather(y, rows, Some(gates), choices, places, sizes);
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn combine_input_gradient(call: &KernelCall<'_>, sizes: &Mixture) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, gates, drows) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    // SAFETY: as above.
    let (choices, places) = unsafe { (integers(&call.reads[2]), integers(&call.reads[3])) };
    check_slots(call, sizes, choices, places)?;
    drows.fill(0.0);
    scatter(drows, dy, gates, choices, places, sizes);
    Ok(())
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn combine_gate_gradient(call: &KernelCall<'_>, sizes: &Mixture) -> Result<(), BackendError> {
    // SAFETY: reads and writes are valid and do not overlap.
    let (dy, rows, dgates) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1]), floats_mut(&call.writes[0])) };
    // SAFETY: as above.
    let (choices, places) = unsafe { (integers(&call.reads[2]), integers(&call.reads[3])) };
    check_slots(call, sizes, choices, places)?;
    dots(dgates, dy, rows, choices, places, sizes);
    Ok(())
}

fn check_slots(call: &KernelCall<'_>, sizes: &Mixture, choices: &[i32], places: &[i32]) -> Result<(), BackendError> {
    check_indices(call.kernel.name(), choices, sizes.experts, None)?;
    check_indices(call.kernel.name(), places, sizes.capacity, Some(FULL))
}

/// Elements of a choice's slot, if it has one.
#[inline(always)]
fn slot(choice: i32, place: i32, sizes: &Mixture) -> Option<std::ops::Range<usize>> {
    (place != FULL).then(|| {
        let first = (choice as usize * sizes.capacity + place as usize) * sizes.hidden;
        first..first + sizes.hidden
    })
}

multiversion! {
    /// Sums the rows of each token's slots, weighted by the gates if given.
    fn gather(tokens: &mut [f32], rows: &[f32], gates: Option<&[f32]>, choices: &[i32], places: &[i32], sizes: &Mixture) {
        for (token, sum) in tokens.chunks_exact_mut(sizes.hidden.max(1)).enumerate() {
            let mut is_first = true;
            for index in token * sizes.top..(token + 1) * sizes.top {
                let Some(slot) = slot(choices[index], places[index], sizes) else { continue };
                let gate = gates.map_or(1.0, |gates| gates[index]);
                let row = &rows[slot];
                if is_first {
                    sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum = gate * x);
                } else {
                    sum.iter_mut().zip(row).for_each(|(sum, &x)| *sum = multiply_add::<FUSED>(gate, x, *sum));
                }
                is_first = false;
            }
            if is_first {
                sum.fill(0.0);
            }
        }
    }

    /// Writes each token's row times its gate into its slots. No two choices share a slot.
    fn scatter(rows: &mut [f32], tokens: &[f32], gates: &[f32], choices: &[i32], places: &[i32], sizes: &Mixture) {
        for (token, x) in tokens.chunks_exact(sizes.hidden.max(1)).enumerate() {
            for index in token * sizes.top..(token + 1) * sizes.top {
                let Some(slot) = slot(choices[index], places[index], sizes) else { continue };
                let gate = gates[index];
                rows[slot].iter_mut().zip(x).for_each(|(row, &x)| *row = gate * x);
            }
        }
    }

    /// Computes the dot product of each choice's token row and slot row.
    fn dots(products: &mut [f32], tokens: &[f32], rows: &[f32], choices: &[i32], places: &[i32], sizes: &Mixture) {
        for (index, product) in products.iter_mut().enumerate() {
            let token = &tokens[index / sizes.top * sizes.hidden..][..sizes.hidden];
            *product = match slot(choices[index], places[index], sizes) {
                Some(slot) => reduce_pairs(token, &rows[slot], |x, row| x * row),
                None => 0.0,
            };
        }
    }
}
