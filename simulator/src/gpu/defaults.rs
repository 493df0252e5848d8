//! Defaults of fields in the profiles' files.

/// A factor that changes nothing.
pub(super) fn one() -> f64 {
    1.0
}
