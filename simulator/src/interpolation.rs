//! Interpolates between measured sizes of collectives, for all kinds of profiles.

/// Returns the value at size `bytes`, given points sorted by size. Between two points the value is
/// a power of the size (linear in the logarithm of the size if one of their values is not
/// positive). It is constant below the smallest point and proportional to the size above the
/// largest. `None` without points.
pub(crate) fn interpolate<T>(curve: &[T], bytes: f64, size: impl Fn(&T) -> f64, value: impl Fn(&T) -> f64) -> Option<f64> {
    let above = curve.partition_point(|point| size(point) < bytes);
    match (curve[..above].last(), curve.get(above)) {
        (Some(below), Some(above)) => {
            let (low, high) = (value(below), value(above));
            let position = (bytes / size(below)).ln() / (size(above) / size(below)).ln();
            Some(if low > 0.0 && high > 0.0 { low * (high / low).powf(position) } else { low + (high - low) * position })
        }
        (Some(last), None) => Some(value(last) * bytes / size(last)),
        (None, first) => first.map(value),
    }
}
