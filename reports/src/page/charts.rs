//! The charts of a page, as the documents that the page's script draws. They have numbers and
//! names, and neither colours nor pixels; `assets/page.js` reads exactly these fields.

mod memory;
mod timeline;

use crate::plots::LossPoint;
use foretell_program::{Program, Timeline};
use foretell_units::Bytes;
use serde::Serialize;

/// A chart of a page.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "chart", rename_all = "snake_case")]
pub enum Chart {
    /// Each rank's work over time.
    Timeline(timeline::TimelineChart),
    /// The bytes in use over a step.
    Memory(memory::MemoryChart),
    /// The loss of steps and evaluations.
    Loss {
        /// Steps trained and mean loss of each training step.
        training: Vec<(u64, f64)>,
        /// Steps trained and mean loss of each evaluation.
        evaluation: Vec<(u64, f64)>,
    },
    /// How the best layout and the bound on all layouts approached each other.
    Gap {
        /// The moments, in order of time.
        points: Vec<GapPoint>,
    },
    /// Layouts by memory and step time, from which the reader chooses one.
    Layouts {
        /// The layouts.
        points: Vec<LayoutPoint>,
    },
}

/// A moment of a search.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct GapPoint {
    /// Time since the search began.
    pub seconds: f64,
    /// Step time of the best layout so far.
    pub best: f64,
    /// Lower bound on the step time of every layout.
    pub bound: f64,
}

/// A layout that a search evaluated.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LayoutPoint {
    /// The layout in words.
    pub name: String,
    /// The plan file, which the reader can copy.
    pub plan: String,
    /// Predicted step time.
    pub step_seconds: f64,
    /// Peak memory of the fullest device.
    pub memory_bytes: u64,
    /// Names and values that are shown when the layout is selected.
    pub facts: Vec<(String, String)>,
    /// Whether no other layout has both less time and less memory.
    pub is_on_front: bool,
}

impl Chart {
    /// Charts each rank's work over time, for one or two timelines of a Program: how the step's
    /// time was spent, and below that each stream. If there are many ranks, the first one of each
    /// stage is shown.
    pub fn timeline(program: &Program, timelines: &[&Timeline]) -> Self {
        Self::Timeline(timeline::TimelineChart::of(program, timelines))
    }

    /// Charts the bytes in use on the shown ranks, with the tensors in memory at the peak. `limit`
    /// is the memory of a device.
    pub fn memory(program: &Program, timeline: &Timeline, limit: Option<Bytes>) -> Self {
        Self::Memory(memory::MemoryChart::of(program, timeline, limit))
    }

    /// Charts losses. Points that are not finite are left out.
    pub fn loss(training: &[LossPoint], evaluation: &[LossPoint]) -> Self {
        let finite = |points: &[LossPoint]| {
            points.iter().filter(|point| point.loss.is_finite()).map(|point| (point.step, point.loss)).collect()
        };
        Self::Loss { training: finite(training), evaluation: finite(evaluation) }
    }

    /// Charts the progress of a search. Times that are not finite are left out.
    pub fn gap(points: &[GapPoint]) -> Self {
        let finite = |point: &&GapPoint| point.best.is_finite() && point.bound.is_finite();
        Self::Gap { points: points.iter().filter(finite).copied().collect() }
    }

    /// Charts layouts, and finds which of them are on the front of step time and memory.
    pub fn layouts(mut points: Vec<LayoutPoint>) -> Self {
        points.sort_by(|a, b| a.memory_bytes.cmp(&b.memory_bytes).then(a.step_seconds.total_cmp(&b.step_seconds)));
        let mut fastest = f64::INFINITY;
        for point in &mut points {
            point.is_on_front = point.step_seconds < fastest;
            fastest = fastest.min(point.step_seconds);
        }
        Self::Layouts { points }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_front_has_the_layouts_that_none_beats() {
        let point = |step_seconds: f64, memory_bytes: u64| LayoutPoint {
            name: String::new(),
            plan: String::new(),
            step_seconds,
            memory_bytes,
            facts: Vec::new(),
            is_on_front: false,
        };
        let Chart::Layouts { points } = Chart::layouts(vec![point(1.0, 9), point(3.0, 2), point(2.0, 9), point(2.0, 4)]) else {
            unreachable!("made as layouts")
        };
        let front: Vec<(f64, u64)> =
            points.iter().filter(|point| point.is_on_front).map(|point| (point.step_seconds, point.memory_bytes)).collect();
        assert_eq!(front, [(3.0, 2), (2.0, 4), (1.0, 9)]);
    }
}
