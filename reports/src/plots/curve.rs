//! Curves on logarithmic axes; a line joins the points of a series.

use super::canvas::{Canvas, Dash, Frame, Growth, Mark, PALETTE, Scale};
use crate::error::ReportError;
use plotters::prelude::DrawingBackend;

/// A point of a curve.
#[derive(Clone, Debug, PartialEq)]
pub struct CurvePoint {
    /// The series. Its points have one colour, and a line joins them in order.
    pub series: String,
    /// Horizontal value. A point whose values are not positive and finite is left out.
    pub x: f64,
    /// Vertical value.
    pub y: f64,
}

#[derive(Clone, Debug)]
pub(crate) struct CurvePlot {
    points: Vec<CurvePoint>,
    axes: [String; 2],
}

impl CurvePlot {
    pub(crate) fn of(axes: [&str; 2], points: &[CurvePoint]) -> Self {
        let shown = |value: f64| value.is_finite() && value > 0.0;
        let points = points.iter().filter(|point| shown(point.x) && shown(point.y)).cloned().collect();
        Self { points, axes: axes.map(String::from) }
    }

    pub(crate) fn draw<Backend: DrawingBackend>(&self, canvas: &Canvas<'_, Backend>) -> Result<(), ReportError> {
        if self.points.is_empty() {
            return canvas.nothing("There is nothing to show.");
        }
        let scale = |title: &str, values: &dyn Fn(&CurvePoint) -> f64| {
            let least = self.points.iter().map(values).fold(f64::INFINITY, f64::min);
            let most = self.points.iter().map(values).fold(f64::NEG_INFINITY, f64::max);
            Scale { title: title.into(), from: least / 1.3, to: most * 1.3, growth: Growth::Logarithmic }
        };
        let (width, height) = canvas.size();
        let frame = Frame {
            left: 90,
            top: 110,
            right: width - 30,
            bottom: height - 60,
            horizontal: scale(&self.axes[0], &|point| point.x),
            vertical: Some(scale(&self.axes[1], &|point| point.y)),
        };
        canvas.axes(&frame)?;
        let mut series: Vec<&str> = Vec::new();
        for point in &self.points {
            if !series.contains(&point.series.as_str()) {
                series.push(&point.series);
            }
        }
        let mut entries = Vec::new();
        for (number, name) in series.into_iter().enumerate() {
            let colour = PALETTE[number % PALETTE.len()];
            let own = self.points.iter().filter(|point| point.series == name);
            let places: Vec<(i32, i32)> = own.map(|point| (frame.x(point.x), frame.y(point.y))).collect();
            for &place in &places {
                canvas.dot(place, 4, colour)?;
            }
            if places.len() > 1 {
                canvas.line(places, colour, 2, Dash::Solid)?;
            }
            entries.push((name.to_owned(), colour, Mark::Dot));
        }
        canvas.legend(frame.left, frame.right, 62, &entries)
    }
}
