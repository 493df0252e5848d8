//! Defaults of fields in the profiles' files. Knows no profile.

/// A factor that changes nothing.
pub(super) fn one() -> f64 {
    1.0
}
