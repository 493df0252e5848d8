//! Dimensions after the operators that move numbers or change shapes, with the batch as a mark.

use super::messages::Node;
use super::values::{BATCH_MARK, Known};

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

/// The dimensions after a reshape to `target`, where 0 copies a dimension and -1 takes what is
/// left. `batch` is the size that the file states for the batch. The batch, or a multiple of it,
/// stays first.
pub(super) fn reshaped(own: &[i64], target: &[i64], batch: Option<i64>) -> Option<Vec<i64>> {
    let product = |extents: &[i64]| extents.iter().try_fold(1i64, |product, &extent| product.checked_mul(extent));
    let has_batch = own.first().is_some_and(|first| *first != 0 && first % BATCH_MARK == 0);
    let mut dimensions: Vec<i64> = Vec::new();
    for (index, &extent) in target.iter().enumerate() {
        dimensions.push(if extent == 0 { *own.get(index)? } else { extent });
    }
    // Elements of one sample, or of all.
    let elements = if has_batch { (own[0] / BATCH_MARK).checked_mul(product(&own[1..])?)? } else { product(own)? };
    if has_batch {
        // How often the batch is counted; -1 takes what is left.
        let times = match *dimensions.first()? {
            -1 => elements / product(&dimensions[1..])?.max(1),
            first if first % BATCH_MARK == 0 => first / BATCH_MARK,
            first => first.checked_div(batch?).filter(|_| batch.is_some_and(|batch| first % batch == 0))?,
        };
        dimensions[0] = times;
    }
    if let Some(open) = dimensions.iter().position(|&extent| extent == -1) {
        dimensions[open] = 1;
        dimensions[open] = elements / product(&dimensions)?.max(1);
    }
    if product(&dimensions)? != elements {
        return None;
    }
    if has_batch {
        dimensions[0] = dimensions[0].checked_mul(BATCH_MARK)?;
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

/// The place and the shape of a result.
pub(super) fn layer_of(value: &Known) -> Result<(usize, Vec<usize>), String> {
    match value {
        Known::Layer { place, shape, .. } => Ok((*place, shape.clone())),
        _ => Err("it does not work on the result of a layer".into()),
    }
}

/// The shape of a weight for one sample, whose shape has `rank` dimensions: without the dimension
/// of the batch, which is 1.
pub(super) fn of_one_sample(weight: &[usize], rank: usize) -> Vec<usize> {
    if weight.len() > rank { weight[weight.len() - rank..].to_vec() } else { weight.to_vec() }
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
    use super::{BATCH_MARK, reshaped, sliced, squeezed, unsqueezed};

    #[test]
    fn the_batch_stays_first_in_every_shape() {
        let own = [BATCH_MARK, 6, 4];
        assert_eq!(reshaped(&own, &[0, 0, 2, 2], None), Some(vec![BATCH_MARK, 6, 2, 2]));
        assert_eq!(reshaped(&own, &[-1, 24], None), Some(vec![BATCH_MARK, 24]));
        assert_eq!(reshaped(&own, &[8, -1], Some(8)), Some(vec![BATCH_MARK, 24]));
        assert_eq!(reshaped(&own, &[BATCH_MARK, -1, 3], None), Some(vec![BATCH_MARK, 8, 3]));
        // Rows of all samples together, and back.
        assert_eq!(reshaped(&own, &[-1, 4], None), Some(vec![6 * BATCH_MARK, 4]));
        assert_eq!(reshaped(&[6 * BATCH_MARK, 4], &[-1, 6, 4], None), Some(vec![BATCH_MARK, 6, 4]));
        assert_eq!(reshaped(&[6 * BATCH_MARK, 4], &[BATCH_MARK, 6, -1], None), Some(vec![BATCH_MARK, 6, 4]));
        assert_eq!(reshaped(&own, &[-1, 5], None), None);
        assert_eq!(reshaped(&own, &[6, -1], None), None);
        assert_eq!(reshaped(&[6, 4], &[-1, 8], None), Some(vec![3, 8]));
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
