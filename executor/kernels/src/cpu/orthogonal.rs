//! Orthogonalises matrices by Newton-Schulz iterations, for Muon.

use super::elementwise::squared_norm;
use super::memory::{Scratch, floats, floats_mut};
use super::product::multiply;
use super::view::{Destination, View, ViewMut};
use crate::KernelCall;
use foretell_models::{NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS};

/// Added to a norm, so that a matrix of zeros is not divided by zero.
const EPSILON: f32 = 1e-7;

/// # Safety
///
/// The call's operands are checked and valid.
pub(super) unsafe fn orthogonalise(call: &KernelCall<'_>, [rows, columns]: [usize; 2], scratch: &mut Scratch) {
    let (elements, short) = (rows * columns, rows.min(columns));
    if elements == 0 {
        return;
    }
    let [other, gram, polynomial] = scratch.pieces([elements, short * short, short * short]);
    // SAFETY: reads and writes are valid and do not overlap.
    let (x, y) = unsafe { (floats(&call.reads[0]), floats_mut(&call.writes[0])) };
    for (x, y) in x.chunks_exact(elements).zip(y.chunks_exact_mut(elements)) {
        let factor = 1.0 / (squared_norm(x).sqrt() + EPSILON);
        // The number of steps is odd, so that the last one writes y.
        other.iter_mut().zip(x).for_each(|(other, x)| *other = factor * x);
        let (mut from, mut to) = (&mut *other, &mut *y);
        for _ in 0..NEWTON_SCHULZ_STEPS {
            // SAFETY: each slice has the elements of its matrix, and no two overlap.
            unsafe { step(from, to, [rows, columns], [&mut *gram, &mut *polynomial]) };
            std::mem::swap(&mut from, &mut to);
        }
    }
}

/// Writes `(a + b A + c A A) X` with `A = X Xᵀ`, where X has at most as many rows as columns: the
/// matrix or its transpose.
///
/// # Safety
///
/// `from` and `to` have `rows · columns` elements; `gram` and `polynomial` have `short · short`,
/// with `short` the smaller of the two.
unsafe fn step(from: &[f32], to: &mut [f32], [rows, columns]: [usize; 2], [gram, polynomial]: [&mut [f32]; 2]) {
    let [a, b, c] = NEWTON_SCHULZ;
    let (short, long) = (rows.min(columns), rows.max(columns));
    let (x, y) = (View::rows(from.as_ptr(), columns), ViewMut::rows(to.as_mut_ptr(), columns));
    let (x, y) = if rows <= columns { (x, y) } else { (x.transposed(), y.transposed()) };
    let square = |pointer: *mut f32| (View::rows(pointer, short), ViewMut::rows(pointer, short));
    let ((grams, grams_mut), (polynomials, polynomials_mut)) = (square(gram.as_mut_ptr()), square(polynomial.as_mut_ptr()));
    // SAFETY: the caller's promise.
    unsafe {
        multiply([short, short, long], grams_mut, x, x.transposed(), Destination::Overwrite);
        multiply([short, short, short], polynomials_mut, grams, grams, Destination::Overwrite);
    }
    polynomial.iter_mut().zip(&*gram).for_each(|(polynomial, gram)| *polynomial = b * gram + c * *polynomial);
    polynomial.iter_mut().step_by(short + 1).for_each(|diagonal| *diagonal += a);
    // SAFETY: as above.
    unsafe { multiply([short, long, short], y, polynomials, x, Destination::Overwrite) };
}
