//! Defaults of fields in files, and whether a field has its default. Knows no models.

/// Whether a switch is off.
pub(crate) fn is_false(value: &bool) -> bool {
    !value
}

/// Whether a number is 0.
pub(crate) fn is_zero(value: &usize) -> bool {
    *value == 0
}

/// The number 1.
pub(crate) fn one() -> usize {
    1
}

/// Whether a number is 1.
pub(crate) fn is_one(value: &usize) -> bool {
    *value == 1
}
