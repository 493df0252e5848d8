//! Dimensions after the operators that move numbers or change shapes, with the batch as a mark.

use super::batch::{BATCH_MARK, BatchPlace, divided, is_batch, product};
use super::messages::Node;
use super::values::Known;

/// A dimension's place, counted from the end if negative.
pub(super) fn place(axis: i64, rank: usize) -> Option<usize> {
    let axis = if axis < 0 { axis.checked_add(rank as i64)? } else { axis };
    usize::try_from(axis).ok().filter(|&axis| axis < rank)
}

/// The places of the axes that a node lists as an attribute, or as its input `index`.
pub(super) fn axes(node: &Node, inputs: &[Known], index: usize, rank: usize) -> Option<Vec<usize>> {
    let listed = node.ints("axes").or_else(|| inputs.get(index).and_then(Known::numbers))?;
    listed.iter().map(|&axis| place(axis, rank)).collect()
}

/// The dimensions of a tensor without samples after a reshape to `target`, where 0 copies a
/// dimension and -1 takes what is left.
pub(super) fn reshaped(own: &[i64], target: &[i64]) -> Option<Vec<i64>> {
    let dimensions = filled(target, own, product(own)?)?;
    (product(&dimensions)? == product(own)?).then_some(dimensions)
}

/// The dimensions of a layer's result after a reshape to `target`. `sizes`: a sample's numbers in
/// front of and behind the batch. `batch` is the size that the file states for the batch.
///
/// A file that states the batch as a number does not say which dimension it is. The order of the
/// numbers decides, except among extents of 1. There the preference is: the batch alone, merged
/// with heads, merged with positions, and the last dimension only if no other fits.
pub(super) fn reshaped_layer(own: &[i64], target: &[i64], sizes: [i64; 2], batch: Option<i64>) -> Option<Vec<i64>> {
    let elements = sizes[0].checked_mul(sizes[1])?;
    let with_mark = || filled(target, own, elements.checked_mul(BATCH_MARK)?);
    let copied = |(index, &extent): (usize, &i64)| extent == 0 && own.get(index).is_some_and(|&own| is_batch(own));
    let is_marked = target.iter().any(|&extent| is_batch(extent)) || target.iter().enumerate().any(copied);
    let Some(stated) = batch.filter(|_| !is_marked) else {
        return with_mark().filter(|dimensions| BatchPlace::among(dimensions, sizes).is_some());
    };
    let dimensions = filled(target, own, elements.checked_mul(stated)?)?;
    let candidates = (0..dimensions.len()).filter_map(|axis| {
        let mut dimensions = dimensions.clone();
        dimensions[axis] = divided(dimensions[axis], stated)?.checked_mul(BATCH_MARK)?;
        let place = BatchPlace::among(&dimensions, sizes)?;
        let is_last = axis > 0 && axis + 1 == dimensions.len();
        Some(((is_last, place.before.saturating_mul(place.after) > 1, place.before > 1), dimensions))
    });
    candidates.min_by_key(|(order, _)| *order).map(|(_, dimensions)| dimensions)
}

/// `target` with 0 replaced by the own extent and -1 by what is left of `elements`.
fn filled(target: &[i64], own: &[i64], elements: i64) -> Option<Vec<i64>> {
    let copied = |(index, &extent): (usize, &i64)| if extent == 0 { own.get(index).copied() } else { Some(extent) };
    let mut dimensions: Vec<i64> = target.iter().enumerate().map(copied).collect::<Option<_>>()?;
    if let Some(open) = dimensions.iter().position(|&extent| extent == -1) {
        dimensions[open] = 1;
        dimensions[open] = divided(elements, product(&dimensions)?)?;
    }
    Some(dimensions)
}

/// The dimensions without those of extent 1 at `axes`, or without all of them.
pub(super) fn squeezed(own: &[i64], axes: Option<&[usize]>) -> Vec<i64> {
    let is_dropped = |index: usize, extent: i64| extent == 1 && axes.is_none_or(|axes| axes.contains(&index));
    own.iter().enumerate().filter(|&(index, &extent)| !is_dropped(index, extent)).map(|(_, &extent)| extent).collect()
}

/// The dimensions with new ones of extent 1 at `axes` of the result.
pub(super) fn unsqueezed(own: &[i64], axes: &[usize]) -> Option<Vec<i64>> {
    let mut rest = own.iter().copied();
    let rank = own.len() + axes.len();
    (0..rank).map(|index| if axes.contains(&index) { Some(1) } else { rest.next() }).collect()
}

/// The number of elements from `start` to `end` by `step` of an extent, as Python counts them.
pub(super) fn sliced(extent: i64, start: i64, end: i64, step: i64) -> Option<i64> {
    if extent <= 0 {
        return Some(0);
    }
    let bound = |index: i64| if index < 0 { index.saturating_add(extent) } else { index };
    let length = match step {
        1.. => bound(end).clamp(0, extent) - bound(start).clamp(0, extent),
        0 => return None,
        _ => bound(start).clamp(0, extent - 1) - bound(end).clamp(-1, extent - 1),
    };
    Some(u64::try_from(length.max(0)).ok()?.div_ceil(step.unsigned_abs()) as i64)
}

/// Extents of a weight or constant as combined with one sample of a layer's result, which has
/// `rank` dimensions and the batch at `place`. `None` if it differs between samples. `batch` is the
/// size that the file states for the batch.
pub(super) fn beside_sample(weight: &[usize], rank: usize, place: BatchPlace, batch: Option<i64>) -> Option<Vec<usize>> {
    // Dimensions are aligned from the last one (broadcasting).
    let Some(axis) = (place.axis + weight.len()).checked_sub(rank) else { return Some(weight.to_vec()) };
    let extent = weight.get(axis).copied()?;
    let is_same = extent == 1 || (place.merged() == 0 && batch.is_some_and(|batch| batch == extent as i64));
    let ones = vec![1; place.merged()];
    is_same.then(|| [&weight[..axis], &ones, &weight[axis + 1..]].concat())
}

pub(super) fn without_mark(dimensions: &[i64]) -> Vec<i64> {
    dimensions.iter().map(|&extent| if extent == BATCH_MARK { 1 } else { extent }).collect()
}

/// Extents with 1 in place of the batch.
pub(super) fn without_batch(dimensions: &[i64]) -> Vec<usize> {
    without_mark(dimensions).into_iter().map(|extent| usize::try_from(extent).unwrap_or(0)).collect()
}

/// The dimensions for people.
pub(super) fn shown(dimensions: &[i64]) -> String {
    let one = |&extent: &i64| if extent == BATCH_MARK { "batch".into() } else { extent.to_string() };
    format!("[{}]", dimensions.iter().map(one).collect::<Vec<_>>().join(", "))
}

/// The dimensions of two tensors that are repeated to fit each other.
pub(super) fn broadcast(left: &[i64], right: &[i64]) -> Option<Vec<i64>> {
    let rank = left.len().max(right.len());
    let at = |shape: &[i64], axis: usize| (axis + shape.len()).checked_sub(rank).map_or(1, |axis| shape[axis]);
    let one = |axis| match (at(left, axis), at(right, axis)) {
        (one, other) if one == other || other == 1 => Some(one),
        (1, other) => Some(other),
        _ => None,
    };
    (0..rank).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::{BATCH_MARK, reshaped, reshaped_layer, sliced, squeezed, unsqueezed};

    #[test]
    fn a_batch_behind_positions_keeps_its_place() {
        // Positions, samples, features; then heads beside samples, and rows of all samples.
        let own = [6, BATCH_MARK, 8];
        for batch in [None, Some(1), Some(2), Some(6)] {
            let stated = batch.unwrap_or(BATCH_MARK);
            let with = |target: &[i64]| reshaped_layer(&own, target, [6, 8], batch);
            assert_eq!(with(&[6, stated, 2, 4]), Some(vec![6, BATCH_MARK, 2, 4]), "{batch:?}");
            assert_eq!(with(&[6, stated * 2, 4]), Some(vec![6, 2 * BATCH_MARK, 4]), "{batch:?}");
            assert_eq!(with(&[stated * 6, 8]), Some(vec![6 * BATCH_MARK, 8]), "{batch:?}");
            // That would change which numbers are one sample's.
            assert_eq!(with(&[stated, 48]).filter(|_| batch.is_none()), None, "{batch:?}");
            let heads = |target: &[i64]| reshaped_layer(&[2 * BATCH_MARK, 6, 4], target, [1, 48], batch);
            assert_eq!(heads(&[stated, 2, 6, 4]), Some(vec![BATCH_MARK, 2, 6, 4]), "{batch:?}");
            let rows = |target: &[i64]| reshaped_layer(&[6 * BATCH_MARK, 8], target, [6, 8], batch);
            assert_eq!(rows(&[6, stated, 8]), Some(vec![6, BATCH_MARK, 8]), "{batch:?}");
        }
    }

    #[test]
    fn the_batch_stays_first_in_every_shape() {
        let own = [BATCH_MARK, 6, 4];
        let with = |target: &[i64], batch| reshaped_layer(&own, target, [1, 24], batch);
        assert_eq!(with(&[0, 0, 2, 2], None), Some(vec![BATCH_MARK, 6, 2, 2]));
        assert_eq!(with(&[-1, 24], None), Some(vec![BATCH_MARK, 24]));
        assert_eq!(with(&[8, -1], Some(8)), Some(vec![BATCH_MARK, 24]));
        assert_eq!(with(&[1, -1], Some(1)), Some(vec![BATCH_MARK, 24]));
        assert_eq!(with(&[BATCH_MARK, -1, 3], None), Some(vec![BATCH_MARK, 8, 3]));
        // Rows of all samples together, and back.
        assert_eq!(with(&[-1, 4], None), Some(vec![6 * BATCH_MARK, 4]));
        let rows = |target: &[i64]| reshaped_layer(&[6 * BATCH_MARK, 4], target, [1, 24], None);
        assert_eq!(rows(&[-1, 6, 4]), Some(vec![BATCH_MARK, 6, 4]));
        assert_eq!(rows(&[BATCH_MARK, 6, -1]), Some(vec![BATCH_MARK, 6, 4]));
        assert_eq!(with(&[-1, 5], None), None);
        assert_eq!(with(&[6, -1], None), None);
        assert_eq!(reshaped(&[6, 4], &[-1, 8]), Some(vec![3, 8]));
        assert_eq!(squeezed(&[BATCH_MARK, 1, 3, 1], Some(&[1])), [BATCH_MARK, 3, 1]);
        assert_eq!(unsqueezed(&[BATCH_MARK, 3], &[1, 3]), Some(vec![BATCH_MARK, 1, 3, 1]));
    }

    #[test]
    fn slices_count_as_in_python() {
        assert_eq!(sliced(10, 2, 5, 1), Some(3));
        assert_eq!(sliced(10, 0, i64::MAX, 3), Some(4));
        assert_eq!(sliced(10, -3, -1, 1), Some(2));
        assert_eq!(sliced(10, -1, i64::MIN, -1), Some(10));
        assert_eq!(sliced(10, 8, 2, 1), Some(0));
        assert_eq!(sliced(10, 0, 1, 0), None);
    }
}
