//! The loss curve.

use super::canvas::{Canvas, Dash, Frame, Mark, PALETTE, Scale};
use crate::error::ReportError;
use plotters::prelude::DrawingBackend;

/// The loss at a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LossPoint {
    /// Number of steps trained.
    pub step: u64,
    /// The mean loss. A point that is not finite is left out.
    pub loss: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct LossPlot {
    training: Vec<LossPoint>,
    evaluation: Vec<LossPoint>,
}

impl LossPlot {
    pub(crate) fn of(training: &[LossPoint], evaluation: &[LossPoint]) -> Self {
        let finite = |points: &[LossPoint]| points.iter().copied().filter(|point| point.loss.is_finite()).collect();
        Self { training: finite(training), evaluation: finite(evaluation) }
    }

    pub(crate) fn draw<Backend: DrawingBackend>(&self, canvas: &Canvas<'_, Backend>) -> Result<(), ReportError> {
        let all = || self.training.iter().chain(&self.evaluation);
        if all().next().is_none() {
            return canvas.nothing("No loss was recorded.");
        }
        let (width, height) = canvas.size();
        let last = all().map(|point| point.step).max().unwrap_or(0) as f64;
        let first = all().map(|point| point.step).min().unwrap_or(0) as f64;
        let highest = all().map(|point| point.loss).fold(f64::NEG_INFINITY, f64::max);
        let lowest = all().map(|point| point.loss).fold(f64::INFINITY, f64::min);
        // The axis starts at zero if the curve comes near it; otherwise the curve fills the height.
        let floor = if lowest >= 0.0 && lowest < highest / 2.0 { 0.0 } else { lowest - (highest - lowest) * 0.05 };
        let frame = Frame {
            left: 80,
            top: 90,
            right: width - 30,
            bottom: height - 60,
            horizontal: Scale::linear("step", first, last),
            vertical: Some(Scale::linear("loss", floor, highest + (highest - floor) * 0.05)),
        };
        canvas.axes(&frame)?;
        let place = |point: &LossPoint| (frame.x(point.step as f64), frame.y(point.loss));
        let mut entries = Vec::new();
        if let [only] = self.training.as_slice() {
            canvas.dot(place(only), 3, PALETTE[0])?;
        }
        if !self.training.is_empty() {
            canvas.line(thinned(self.training.iter().map(place)), PALETTE[0], 2, Dash::Solid)?;
            entries.push(("training".to_owned(), PALETTE[0], Mark::Line));
        }
        for point in &self.evaluation {
            canvas.dot(place(point), 5, PALETTE[4])?;
        }
        if !self.evaluation.is_empty() {
            entries.push(("evaluation".to_owned(), PALETTE[4], Mark::Dot));
        }
        canvas.legend(frame.left, frame.right, 62, &entries)
    }
}

/// Thins a line to what the screen shows: of the points in one column of pixels, the first, the
/// highest, the lowest and the last.
fn thinned(points: impl Iterator<Item = (i32, i32)>) -> Vec<(i32, i32)> {
    let mut result: Vec<(i32, i32)> = Vec::new();
    let mut column: Option<[(i32, i32); 4]> = None;
    for point in points {
        match &mut column {
            Some([first, highest, lowest, last]) if first.0 == point.0 => {
                highest.1 = highest.1.min(point.1);
                lowest.1 = lowest.1.max(point.1);
                *last = point;
            }
            _ => {
                result.extend(column.replace([point; 4]).into_iter().flatten());
            }
        }
    }
    result.extend(column.into_iter().flatten());
    result.dedup();
    result
}
