//! Medians and quantiles of measured values. Each definition is in one place: they differ if there
//! are few values.
//!
//! The quantiles of a calibration's samples have another definition, that of `statrs` (Hyndman and
//! Fan's eighth), which estimates quantiles of the distribution.

use std::cmp::Ordering;

/// Returns the median; for an even number of values, the larger of the two in the middle. `None`
/// without values. `order` is a total order, such as `Ord::cmp` or `f64::total_cmp`.
pub fn median<T>(values: impl IntoIterator<Item = T>, order: impl FnMut(&T, &T) -> Ordering) -> Option<T> {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort_unstable_by(order);
    let place = quantile_place(values.len(), 0.5)?;
    Some(values.swap_remove(place))
}

/// Returns the index, among `count` ascending values, of the quantile at `share`: (`count` - 1) ·
/// `share`, rounded. `None` without values.
pub fn quantile_place(count: usize, share: f64) -> Option<usize> {
    Some((count.checked_sub(1)? as f64 * share).round() as usize)
}

/// Returns the quantile at `share` of ascending values, interpolated between the two nearest values
/// (Hyndman and Fan's seventh definition). `None` without values.
pub fn interpolated_quantile(ascending: &[f64], share: f64) -> Option<f64> {
    let place = share * ascending.len().checked_sub(1)? as f64;
    let [low, high] = [place.floor(), place.ceil()].map(|place| ascending[place as usize]);
    Some(low + (high - low) * (place - place.floor()))
}

/// Returns the quantile at `share` of ascending values with weights: the first value at which the
/// sum of the weights so far reaches that share of all weights. `None` without values.
pub fn weighted_quantile(ascending: &[(f64, f64)], share: f64) -> Option<f64> {
    let total: f64 = ascending.iter().map(|(_, weight)| weight).sum();
    let mut sum = 0.0;
    let reaches = |&&(_, weight): &&(f64, f64)| {
        sum += weight;
        sum >= share * total
    };
    ascending.iter().find(reaches).map(|(value, _)| *value)
}

/// Divides ascending values into `count` equal parts, and returns the value in the middle of each.
/// Empty without values.
pub fn middles<T: Copy>(ascending: &[T], count: usize) -> Vec<T> {
    (0..count).filter_map(|part| ascending.get((2 * part + 1) * ascending.len() / (2 * count)).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_occurred_and_interpolated_ones_lie_between() {
        assert_eq!(median([3, 1, 2], Ord::cmp), Some(2));
        assert_eq!(median([4.0, 1.0, 3.0, 2.0], f64::total_cmp), Some(3.0));
        assert_eq!(median(Vec::<u64>::new(), Ord::cmp), None);
        assert_eq!(
            [0.0, 0.1, 0.5, 0.9, 1.0].map(|share| quantile_place(6, share)),
            [Some(0), Some(1), Some(3), Some(5), Some(5)]
        );
        assert!((1..1000).all(|count| quantile_place(count, 0.5) == Some(count / 2)));
        assert_eq!(interpolated_quantile(&[1.0, 2.0, 4.0, 8.0], 0.5), Some(3.0));
        assert_eq!(interpolated_quantile(&[], 0.5), None);
        assert_eq!(weighted_quantile(&[(1.0, 1.0), (2.0, 3.0)], 0.5), Some(2.0));
        assert_eq!(middles(&[1, 2, 3, 4, 5, 6, 7, 8], 4), [2, 4, 6, 8]);
    }
}
