//! The memory chart of a page: a curve for each shown rank, and the tensors in memory at its peak.

use crate::residency::Residency;
use crate::shown::shown_lists;
use foretell_program::{BufferRole, Program, Rank, Timeline};
use foretell_units::{Bytes, Picoseconds, Seconds};
use serde::Serialize;

/// The most curves of a chart.
const MOST_CURVES: usize = 8;
/// The most points of a curve: more than a screen has pixels.
const MOST_POINTS: usize = 6_000;
/// The most tensors that are listed by name.
const MOST_HOLDERS: usize = 14;

/// The document.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryChart {
    step_seconds: f64,
    /// The memory of a device.
    limit: Option<u64>,
    curves: Vec<Curve>,
    /// What the chart leaves out.
    note: String,
}

#[derive(Clone, Debug, Serialize)]
struct Curve {
    rank: usize,
    stage: usize,
    /// Allocated bytes.
    arena: u64,
    /// The time of each change in seconds.
    times: Vec<f64>,
    /// Bytes in use from each of these times on.
    bytes: Vec<u64>,
    peak_seconds: f64,
    peak_bytes: u64,
    /// Tensors in use at the peak: name, purpose, number and bytes.
    holders: Vec<(String, String, usize, u64)>,
}

impl MemoryChart {
    pub(super) fn of(program: &Program, timeline: &Timeline, limit: Option<Bytes>) -> Self {
        let all = program.lists.len();
        let curves: Vec<Curve> = shown_lists(program, timeline, MOST_CURVES)
            .map(|(rank, list, timeline)| Curve::of(rank, list.stage, list.arena, &Residency::of(list, timeline)))
            .collect();
        let note = if curves.len() < all { format!("{} of {all} kinds of ranks", curves.len()) } else { String::new() };
        Self { step_seconds: Seconds::from(timeline.step()).value(), limit: limit.map(Bytes::count), curves, note }
    }
}

impl Curve {
    fn of(rank: Rank, stage: usize, arena: Bytes, residency: &Residency<'_>) -> Self {
        let curve = residency.curve();
        // The first of equal peaks.
        let peak = curve.iter().copied().rev().max_by_key(|(_, bytes)| *bytes);
        let (time, most) = peak.unwrap_or((Picoseconds::ZERO, Bytes::ZERO));
        let mut holders = residency.holders(time);
        let others = holders.split_off(holders.len().min(MOST_HOLDERS));
        let mut holders: Vec<(String, String, usize, u64)> = holders
            .into_iter()
            .map(|holder| (holder.name, purpose(holder.role).to_owned(), holder.count, holder.bytes.count()))
            .collect();
        if !others.is_empty() {
            let bytes: Bytes = others.iter().map(|other| other.bytes).sum();
            holders.push((format!("{} others", others.len()), String::new(), others.len(), bytes.count()));
        }
        let points = thinned(&curve);
        Self {
            rank: rank.0,
            stage,
            arena: arena.count(),
            times: points.iter().map(|(time, _)| Seconds::from(*time).value()).collect(),
            bytes: points.iter().map(|(_, bytes)| bytes.count()).collect(),
            peak_seconds: Seconds::from(time).value(),
            peak_bytes: most.count(),
            holders,
        }
    }
}

/// A buffer's purpose in words.
const fn purpose(role: BufferRole) -> &'static str {
    match role {
        BufferRole::Parameter => "parameters",
        BufferRole::ParameterCopy => "copy of parameters",
        BufferRole::Gradient => "gradients",
        BufferRole::OptimizerState => "optimizer state",
        BufferRole::Running => "running statistics",
        BufferRole::Input => "samples",
        BufferRole::Activation => "activations",
        BufferRole::Sum => "sums",
        BufferRole::Workspace => "workspace",
    }
}

/// Keeps the largest of every few changes, so that the peak is kept.
fn thinned(curve: &[(Picoseconds, Bytes)]) -> Vec<(Picoseconds, Bytes)> {
    let every = curve.len().div_ceil(MOST_POINTS).max(1);
    curve.chunks(every).filter_map(|changes| changes.iter().copied().max_by_key(|(_, bytes)| *bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn tensors_explain_the_whole_peak() {
        let (program, predicted, _) = sample::pipeline();
        let chart = MemoryChart::of(&program, &predicted, None);
        assert_eq!(chart.curves.len(), program.lists.len());
        for curve in &chart.curves {
            assert_eq!(curve.holders.iter().map(|holder| holder.3).sum::<u64>(), curve.peak_bytes);
            assert_eq!(curve.bytes.iter().max(), Some(&curve.peak_bytes));
        }
    }

    #[test]
    fn thinning_keeps_the_peak() {
        let curve: Vec<(Picoseconds, Bytes)> =
            (0..50_000u64).map(|time| (Picoseconds(time), Bytes::new(if time == 31_234 { 9 } else { time % 7 }))).collect();
        let thin = thinned(&curve);
        assert!(thin.len() <= MOST_POINTS && thin.contains(&(Picoseconds(31_234), Bytes::new(9))));
    }
}
