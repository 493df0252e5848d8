//! The bytes in use over a step.

use super::canvas::{Canvas, Dash, Frame, Mark, PALETTE, Scale, time_unit};
use crate::error::ReportError;
use crate::residency::Residency;
use crate::shown::shown_lists;
use foretell_program::{Program, RankTimeline, StageProgram, Timeline};
use foretell_units::{Bytes, Seconds};
use plotters::prelude::DrawingBackend;

/// The most lines in a plot: one per colour.
const MOST_STAGES: usize = PALETTE.len();

#[derive(Clone, Debug)]
pub(crate) struct MemoryPlot {
    stages: Vec<StageCurve>,
    step: Seconds,
    all_stages: usize,
}

#[derive(Clone, Debug)]
struct StageCurve {
    stage: usize,
    /// For each change, its time and the bytes in use from then on.
    live: Vec<(Seconds, Bytes)>,
    arena: Bytes,
}

impl MemoryPlot {
    pub(crate) fn of(program: &Program, timeline: &Timeline) -> Self {
        let stages = shown_lists(program, timeline, MOST_STAGES).map(|(_, list, timeline)| StageCurve {
            stage: list.stage,
            live: live(list, timeline),
            arena: list.arena,
        });
        Self { stages: stages.collect(), step: timeline.step().into(), all_stages: program.lists.len() }
    }

    pub(crate) fn draw<Backend: DrawingBackend>(&self, canvas: &Canvas<'_, Backend>) -> Result<(), ReportError> {
        let most = self.stages.iter().flat_map(|stage| stage.live.iter().map(|(_, bytes)| *bytes).chain([stage.arena])).max();
        let (Some(most), true) = (most.filter(|&most| most > Bytes::ZERO), self.step > Seconds::ZERO) else {
            return canvas.nothing("There is no memory to show.");
        };
        let (unit, per_second) = time_unit(self.step.value());
        let (memory_unit, bytes_each) = memory_unit(most);
        let (width, height) = canvas.size();
        let frame = Frame {
            left: 80,
            top: 100,
            right: width - 30,
            bottom: height - 60,
            horizontal: Scale::linear(format!("time ({unit})"), 0.0, self.step.value() * per_second),
            vertical: Some(Scale::linear(format!("memory ({memory_unit})"), 0.0, most.value() / bytes_each * 1.08)),
        };
        canvas.axes(&frame)?;
        let mut entries = Vec::new();
        for (curve, colour) in self.stages.iter().zip(PALETTE) {
            let arena = frame.y(curve.arena.value() / bytes_each);
            canvas.line(vec![(frame.left, arena), (frame.right, arena)], colour, 1, Dash::Dashed)?;
            let mut points: Vec<(i32, i32)> = Vec::new();
            for (time, bytes) in &curve.live {
                let (x, y) = (frame.x(time.value() * per_second), frame.y(bytes.value() / bytes_each));
                if let Some(&(_, before)) = points.last() {
                    points.push((x, before));
                }
                points.push((x, y));
            }
            if let Some(&(_, last)) = points.last() {
                points.push((frame.right, last));
            }
            points.dedup();
            canvas.line(points, colour, 2, Dash::Solid)?;
            entries.push((format!("stage {}", curve.stage), colour, Mark::Line));
        }
        entries.push(("arena".to_owned(), super::canvas::FAINT, Mark::DashedLine));
        if self.stages.len() < self.all_stages {
            let note = format!("{} of {} stages", self.stages.len(), self.all_stages);
            canvas.text(&note, (24, 54), super::canvas::Size::Small, super::canvas::FAINT, super::canvas::Anchor::Start)?;
        }
        canvas.legend(frame.left + 120, frame.right, 62, &entries)
    }
}

fn live(stage: &StageProgram, timeline: &RankTimeline) -> Vec<(Seconds, Bytes)> {
    Residency::of(stage, timeline).curve().into_iter().map(|(time, bytes)| (time.into(), bytes)).collect()
}

fn memory_unit(most: Bytes) -> (&'static str, f64) {
    let units = [("GiB", 1024f64.powi(3)), ("MiB", 1024f64.powi(2)), ("KiB", 1024.0)];
    units.into_iter().find(|(_, size)| most.value() >= *size).unwrap_or(("B", 1.0))
}
