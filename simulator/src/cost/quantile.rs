//! The quantile of each duration that a simulation assumes.

/// Which of the durations that a thing can take is assumed, for all things at once: a bad day is
/// bad for every kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Quantile {
    /// One run in ten is faster.
    P10,
    /// Half of the runs are faster.
    #[default]
    Median,
    /// One run in ten is slower.
    P90,
}
