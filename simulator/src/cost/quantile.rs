//! The quantile that a simulation assumes for each duration.

/// The quantile of all durations in one simulation. It applies to all durations together: at `P90`
/// every kernel is slow.
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
