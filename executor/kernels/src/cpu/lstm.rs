//! The recurrence of an LSTM layer, forward and backward through time. Each position is one matrix
//! product for all sequences of the batch. The weight gradient is one product for all positions.

use foretell_models::Recurrence;

use super::memory::{Scratch, floats, floats_mut};
use super::product::multiply;
use super::vector::{exponential, multiversion};
use super::view::{Destination, View, ViewMut};
use crate::KernelCall;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn forward(call: &KernelCall<'_>, sizes: &Recurrence, scratch: &mut Scratch) {
    let Recurrence { batch, sequence, hidden, initial } = *sizes;
    // SAFETY: reads and writes are valid and do not overlap.
    let (projected, w) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1])) };
    // SAFETY: a third read is there when a state is given.
    let state = initial.then(|| unsafe { floats(&call.reads[2]) });
    // SAFETY: as above.
    let (y, gates) = unsafe { (floats_mut(&call.writes[0]), floats_mut(&call.writes[1])) };
    // SAFETY: as above.
    let (cells, last) = unsafe { (floats_mut(&call.writes[2]), floats_mut(&call.writes[3])) };
    gates.copy_from_slice(projected);
    let [zeros] = scratch.pieces([hidden]);
    zeros.fill(0.0);
    let weight = View::rows(w.as_ptr(), hidden).transposed();
    for position in 0..sequence {
        let before = match state {
            _ if position > 0 => Some(View::rows(y[(position - 1) * hidden..].as_ptr(), sequence * hidden)),
            Some(state) => Some(View::rows(state.as_ptr(), 2 * hidden)),
            None => None,
        };
        if let Some(before) = before {
            let destination = ViewMut::rows(gates[position * 4 * hidden..].as_mut_ptr(), sequence * 4 * hidden);
            // SAFETY: row b of the views is position `position` of sequence b, or the position
            // before it; both lie inside their slices.
            unsafe { multiply([batch, 4 * hidden, hidden], destination, before, weight, Destination::Add) };
        }
        for index in 0..batch {
            let row = index * sequence + position;
            let (earlier, later) = cells.split_at_mut(row * hidden);
            let previous = match state {
                _ if position > 0 => &earlier[(row - 1) * hidden..],
                Some(state) => &state[(2 * index + 1) * hidden..][..hidden],
                None => &*zeros,
            };
            step(&mut gates[row * 4 * hidden..][..4 * hidden], previous, &mut later[..hidden], &mut y[row * hidden..][..hidden]);
        }
    }
    for (index, last) in last.chunks_exact_mut((2 * hidden).max(1)).enumerate() {
        let (output, cell) = last.split_at_mut(hidden);
        if let Some(row) = ((index + 1) * sequence).checked_sub(1).filter(|_| sequence > 0) {
            output.copy_from_slice(&y[row * hidden..][..hidden]);
            cell.copy_from_slice(&cells[row * hidden..][..hidden]);
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn gradient(call: &KernelCall<'_>, sizes: &Recurrence, outputs: bool, last: bool, scratch: &mut Scratch) {
    let Recurrence { batch, sequence, hidden, initial } = *sizes;
    // SAFETY: reads are valid and overlap no write.
    let mut reads = call.reads.iter().map(|read| unsafe { floats(read) });
    let mut next = || reads.next().expect("invariant: the call's operands are checked");
    let dy = outputs.then(&mut next);
    let dlast = last.then(&mut next);
    let [w, gates, cells] = std::array::from_fn(|_| next());
    let state = initial.then(&mut next);
    // SAFETY: writes are valid and overlap nothing.
    let dgates = unsafe { floats_mut(&call.writes[0]) };
    let [douts, dcells, zeros] = scratch.pieces([batch * hidden, batch * hidden, hidden]);
    zeros.fill(0.0);
    match dlast {
        Some(dlast) => {
            let ends = dlast.chunks_exact((2 * hidden).max(1));
            let carries = douts.chunks_exact_mut(hidden.max(1)).zip(dcells.chunks_exact_mut(hidden.max(1)));
            for (end, (dout, dcell)) in ends.zip(carries) {
                dout.copy_from_slice(&end[..hidden]);
                dcell.copy_from_slice(&end[hidden..]);
            }
        }
        None => {
            douts.fill(0.0);
            dcells.fill(0.0);
        }
    }
    for position in (0..sequence).rev() {
        for index in 0..batch {
            let row = index * sequence + position;
            let previous = match state {
                _ if position > 0 => &cells[(row - 1) * hidden..][..hidden],
                Some(state) => &state[(2 * index + 1) * hidden..][..hidden],
                None => &*zeros,
            };
            let dout = &mut douts[index * hidden..][..hidden];
            if let Some(dy) = dy {
                dout.iter_mut().zip(&dy[row * hidden..][..hidden]).for_each(|(sum, &dy)| *sum += dy);
            }
            let dcell = &mut dcells[index * hidden..][..hidden];
            let (gates, cell) = (&gates[row * 4 * hidden..][..4 * hidden], &cells[row * hidden..][..hidden]);
            step_back(&mut dgates[row * 4 * hidden..][..4 * hidden], dcell, dout, gates, cell, previous);
        }
        // The gradient before the first position is needed only for a given initial state.
        if position > 0 || initial {
            let left = View::rows(dgates[position * 4 * hidden..].as_ptr(), sequence * 4 * hidden);
            let right = View::rows(w.as_ptr(), hidden);
            let destination = ViewMut::rows(douts.as_mut_ptr(), hidden);
            // SAFETY: row b of the left view is position `position` of sequence b, and the others
            // are whole matrices.
            unsafe { multiply([batch, hidden, 4 * hidden], destination, left, right, Destination::Overwrite) };
        }
    }
    if initial {
        // SAFETY: a second write is there when a state is given.
        let dstate = unsafe { floats_mut(&call.writes[1]) };
        let carries = douts.chunks_exact(hidden.max(1)).zip(dcells.chunks_exact(hidden.max(1)));
        for (begin, (dout, dcell)) in dstate.chunks_exact_mut((2 * hidden).max(1)).zip(carries) {
            begin[..hidden].copy_from_slice(dout);
            begin[hidden..].copy_from_slice(dcell);
        }
    }
}

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn weight_gradient(call: &KernelCall<'_>, sizes: &Recurrence, scratch: &mut Scratch) {
    let Recurrence { batch, sequence, hidden, initial } = *sizes;
    // SAFETY: reads and writes are valid and do not overlap.
    let (dgates, y) = unsafe { (floats(&call.reads[0]), floats(&call.reads[1])) };
    // SAFETY: a third read is there when a state is given.
    let state = initial.then(|| unsafe { floats(&call.reads[2]) });
    let [before] = scratch.pieces([batch * sequence * hidden]);
    let of_sequence = (sequence * hidden).max(1);
    for (index, (before, y)) in before.chunks_exact_mut(of_sequence).zip(y.chunks_exact(of_sequence)).enumerate() {
        let (first, others) = before.split_at_mut(hidden);
        match state {
            Some(state) => first.copy_from_slice(&state[2 * index * hidden..][..hidden]),
            None => first.fill(0.0),
        }
        others.copy_from_slice(&y[..others.len()]);
    }
    let left = View::rows(dgates.as_ptr(), 4 * hidden).transposed();
    let right = View::rows(before.as_ptr(), hidden);
    let destination = ViewMut::rows(call.writes[0].pointer.cast(), hidden);
    let mode = Destination::accumulating(call.accumulate);
    // SAFETY: the views are whole matrices of these sizes.
    unsafe { multiply([4 * hidden, hidden, batch * sequence], destination, left, right, mode) };
}

#[inline(always)]
fn sigmoid<const FUSED: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exponential::<FUSED>(-x))
}

#[inline(always)]
fn tangent<const FUSED: bool>(x: f32) -> f32 {
    1.0 - 2.0 / (1.0 + exponential::<FUSED>(2.0 * x))
}

multiversion! {
    /// Computes one position of one sequence. Overwrites the gates' inputs with their outputs.
    fn step(gates: &mut [f32], previous: &[f32], cell: &mut [f32], y: &mut [f32]) {
        let hidden = y.len();
        let (first, second) = gates.split_at_mut(2 * hidden);
        let (input, forget) = first.split_at_mut(hidden);
        let (candidate, output) = second.split_at_mut(hidden);
        let (previous, cell) = (&previous[..hidden], &mut cell[..hidden]);
        let (forget, candidate, output) = (&mut forget[..hidden], &mut candidate[..hidden], &mut output[..hidden]);
        for index in 0..hidden {
            let [i, f, o] = [input[index], forget[index], output[index]].map(sigmoid::<FUSED>);
            let g = tangent::<FUSED>(candidate[index]);
            let c = f * previous[index] + i * g;
            (input[index], forget[index], candidate[index], output[index]) = (i, f, g, o);
            cell[index] = c;
            y[index] = o * tangent::<FUSED>(c);
        }
    }

    /// The gradient of [`step`]. `dcell` is the gradient of this position's cell and becomes that
    /// of the previous one.
    fn step_back(dgates: &mut [f32], dcell: &mut [f32], dout: &[f32], gates: &[f32], cell: &[f32], previous: &[f32]) {
        let hidden = cell.len();
        let (first, second) = gates.split_at(2 * hidden);
        let ((input, forget), (candidate, output)) = (first.split_at(hidden), second.split_at(hidden));
        let (first, second) = dgates.split_at_mut(2 * hidden);
        let ((dinput, dforget), (dcandidate, doutput)) = (first.split_at_mut(hidden), second.split_at_mut(hidden));
        let (input, forget, candidate, output) = (&input[..hidden], &forget[..hidden], &candidate[..hidden], &output[..hidden]);
        let (dout, previous, dcell) = (&dout[..hidden], &previous[..hidden], &mut dcell[..hidden]);
        let (dinput, dforget) = (&mut dinput[..hidden], &mut dforget[..hidden]);
        let (dcandidate, doutput) = (&mut dcandidate[..hidden], &mut doutput[..hidden]);
        for index in 0..hidden {
            let (i, f, g, o) = (input[index], forget[index], candidate[index], output[index]);
            let t = tangent::<FUSED>(cell[index]);
            let dc = dcell[index] + dout[index] * o * (1.0 - t * t);
            doutput[index] = dout[index] * t * o * (1.0 - o);
            dinput[index] = dc * g * i * (1.0 - i);
            dforget[index] = dc * previous[index] * f * (1.0 - f);
            dcandidate[index] = dc * i * (1.0 - g * g);
            dcell[index] = dc * f;
        }
    }
}
