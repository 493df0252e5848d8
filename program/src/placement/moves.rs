//! The steps of a conversion along one axis: a collective, and the rearrangements around it if it
//! cuts or joins a dimension that is not the first in memory.

use super::{Conversion, Placement, conversion};
use crate::collective::Collective;
use foretell_models::Kernel;

/// One step of a conversion, applied to a rank's part of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::large_enum_variant, reason = "few exist at a time, and a box would not be `Copy`")]
pub enum Action {
    /// A kernel reorders the elements, or takes the rank's part.
    Rearrange(Kernel),
    /// The ranks along the axis run a collective. An all-reduce works in place.
    Collective(Collective),
}

/// A step of a conversion, and the shape of the rank's part after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The step.
    pub action: Action,
    /// The shape of the rank's part afterwards.
    pub shape: Vec<usize>,
}

/// The steps that convert a rank's part of shape `shape` from placement `from` to `to` among
/// `parts` ranks. `None` if there is no conversion.
pub fn moves(shape: &[usize], from: Placement, to: Placement, parts: usize) -> Option<Vec<Move>> {
    let one = |action, shape| Move { action, shape };
    let collective = |kind, shape: &[usize]| one(Action::Collective(kind), shape.to_vec());
    let cut = |shape: &[usize], dimension: usize| {
        let mut shape = shape.to_vec();
        shape[dimension] /= parts;
        shape
    };
    let joined = |shape: &[usize], dimension: usize| {
        let mut shape = shape.to_vec();
        shape[dimension] *= parts;
        shape
    };
    // Collectives need the parts of all ranks to be contiguous. They are so only if no dimension
    // comes before the one that is cut. Otherwise the parts are deinterleaved before the collective
    // or interleaved after it.
    let deinterleave = |part: &[usize], dimension: usize, whole: &[usize]| {
        let (outer, inner) = around(part, dimension);
        (outer > 1).then(|| one(Action::Rearrange(Kernel::Deinterleave { outer, parts, inner }), whole.to_vec()))
    };
    let interleave = |part: &[usize], dimension: usize, whole: &[usize]| {
        let (outer, inner) = around(part, dimension);
        (outer > 1).then(|| one(Action::Rearrange(Kernel::Interleave { outer, parts, inner }), whole.to_vec()))
    };
    Some(match conversion(from, to) {
        Conversion::None => Vec::new(),
        Conversion::Impossible => return None,
        Conversion::Slice(dimension) => {
            let part = cut(shape, dimension);
            let (outer, inner) = around(&part, dimension);
            vec![one(Action::Rearrange(Kernel::Slice { outer, parts, inner }), part)]
        }
        Conversion::Collective { kind: kind @ Collective::AllGather, from, .. } => {
            let whole = joined(shape, from);
            [collective(kind, &whole)].into_iter().chain(interleave(shape, from, &whole)).collect()
        }
        Conversion::Collective { kind: kind @ Collective::ReduceScatter, to, .. } => {
            let part = cut(shape, to);
            deinterleave(&part, to, shape).into_iter().chain([collective(kind, &part)]).collect()
        }
        Conversion::Collective { kind: kind @ Collective::AllToAll, from, to } => {
            let scattered = cut(shape, to);
            let result = joined(&scattered, from);
            let last = interleave(&scattered, from, &result);
            deinterleave(&scattered, to, shape).into_iter().chain([collective(kind, &result)]).chain(last).collect()
        }
        Conversion::Collective { kind, .. } => vec![collective(kind, shape)],
    })
}

/// The product of the extents before a dimension, and that of the dimension and those after it.
fn around(shape: &[usize], dimension: usize) -> (usize, usize) {
    (shape[..dimension].iter().product(), shape[dimension..].iter().product())
}
