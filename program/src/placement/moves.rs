//! What a conversion along one axis does to a rank's part: a collective, and the rearrangements that it needs where it cuts or joins a dimension that
//! is not the first in memory.

use super::{Conversion, Placement, conversion};
use crate::collective::Collective;
use foretell_models::Kernel;

/// One thing that is done to a rank's part of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// A kernel puts the elements into another order, or takes the rank's own of them.
    Rearrange(Kernel),
    /// The ranks along the axis run a collective. An all-reduce works in place.
    Collective(Collective),
}

/// An action, and the shape of the part that it leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// What is done.
    pub action: Action,
    /// The shape afterwards.
    pub shape: Vec<usize>,
}

/// What turns a part of a shape that is placed as `from` among `parts` ranks into one that is placed as `to`, in order. `None` where nothing does.
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
    // The parts that ranks are to get lie one after the other only where no dimension comes before the one that is cut; so do those that are got.
    let ordered = |part: &[usize], dimension: usize, whole: &[usize]| {
        let (outer, inner) = around(part, dimension);
        (outer > 1).then(|| one(Action::Rearrange(Kernel::Deinterleave { outer, parts, inner }), whole.to_vec()))
    };
    let put_together = |part: &[usize], dimension: usize, whole: &[usize]| {
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
            [collective(kind, &whole)].into_iter().chain(put_together(shape, from, &whole)).collect()
        }
        Conversion::Collective { kind: kind @ Collective::ReduceScatter, to, .. } => {
            let part = cut(shape, to);
            ordered(&part, to, shape).into_iter().chain([collective(kind, &part)]).collect()
        }
        Conversion::Collective { kind: kind @ Collective::AllToAll, from, to } => {
            let scattered = cut(shape, to);
            let result = joined(&scattered, from);
            let last = put_together(&scattered, from, &result);
            ordered(&scattered, to, shape).into_iter().chain([collective(kind, &result)]).chain(last).collect()
        }
        Conversion::Collective { kind, .. } => vec![collective(kind, shape)],
    })
}

/// The product of the extents before a dimension, and of that dimension and those after it.
fn around(shape: &[usize], dimension: usize) -> (usize, usize) {
    (shape[..dimension].iter().product(), shape[dimension..].iter().product())
}
