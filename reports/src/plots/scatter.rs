//! Predicted over measured times.

use super::canvas::{Anchor, Canvas, Dash, FAINT, Frame, Growth, Mark, PALETTE, Scale, Size, time_unit};
use crate::error::ReportError;
use foretell_units::Seconds;
use plotters::prelude::DrawingBackend;

/// A predicted and a measured time.
#[derive(Clone, Debug, PartialEq)]
pub struct ScatterPoint {
    /// The series. Its points have one colour.
    pub series: String,
    /// The predicted time.
    pub predicted: Seconds,
    /// The measured time.
    pub measured: Seconds,
}

#[derive(Clone, Debug)]
pub(crate) struct ScatterPlot {
    points: Vec<ScatterPoint>,
    /// Names of the series, in order of appearance.
    series: Vec<String>,
}

/// Half the width of the band around the diagonal, as a share of the measured time.
const BAND: f64 = 0.1;

impl ScatterPlot {
    pub(crate) fn of(points: &[ScatterPoint]) -> Self {
        // A logarithmic axis cannot show zero.
        let shown = |time: Seconds| time.value().is_finite() && time > Seconds::ZERO;
        let points: Vec<ScatterPoint> =
            points.iter().filter(|point| shown(point.predicted) && shown(point.measured)).cloned().collect();
        let mut series: Vec<String> = Vec::new();
        for point in &points {
            if !series.contains(&point.series) {
                series.push(point.series.clone());
            }
        }
        Self { points, series }
    }

    pub(crate) fn draw<Backend: DrawingBackend>(&self, canvas: &Canvas<'_, Backend>) -> Result<(), ReportError> {
        if self.points.is_empty() {
            return canvas.nothing("There is nothing to compare.");
        }
        let times = || self.points.iter().flat_map(|point| [point.predicted.value(), point.measured.value()]);
        let longest = times().fold(f64::NEG_INFINITY, f64::max);
        let shortest = times().fold(f64::INFINITY, f64::min);
        let (unit, per_second) = time_unit(longest);
        let (from, to) = (shortest * per_second / 1.5, longest * per_second * 1.5);
        let scale = |what: &str| Scale { title: format!("{what} ({unit})"), from, to, growth: Growth::Logarithmic };
        let (width, height) = canvas.size();
        let frame = Frame {
            left: 90,
            top: 110,
            right: width - 30,
            bottom: height - 60,
            horizontal: scale("measured"),
            vertical: Some(scale("predicted")),
        };
        canvas.axes(&frame)?;
        let at = |measured: f64, factor: f64| (frame.x(measured), frame.y(measured * factor));
        // Each edge of the band is clipped where it leaves the frame.
        let upper = [at(from, 1.0 + BAND), at(to / (1.0 + BAND), 1.0 + BAND)];
        let lower = [at(from / (1.0 - BAND), 1.0 - BAND), at(to, 1.0 - BAND)];
        let corners = vec![at(from, 1.0), upper[0], upper[1], at(to, 1.0), lower[1], lower[0]];
        canvas.polygon(corners, PALETTE[5], 0.25)?;
        canvas.line(vec![at(from, 1.0), at(to, 1.0)], FAINT, 1, Dash::Dashed)?;
        let mut entries = vec![
            ("exact".to_owned(), FAINT, Mark::DashedLine),
            (format!("within {:.0} %", BAND * 100.0), plotters::style::RGBColor(213, 236, 250), Mark::Block),
        ];
        for (name, colour) in self.series.iter().zip(PALETTE.iter().cycle()) {
            for point in self.points.iter().filter(|point| &point.series == name) {
                let place = (frame.x(point.measured.value() * per_second), frame.y(point.predicted.value() * per_second));
                canvas.dot(place, 5, *colour)?;
            }
            entries.push((name.clone(), *colour, Mark::Dot));
        }
        canvas.legend(frame.left + 90, frame.right, 58, &entries)?;
        let inside = self.points.iter().filter(|point| (point.predicted / point.measured - 1.0).abs() <= BAND).count();
        let count = format!("{inside} of {} within {:.0} %", self.points.len(), BAND * 100.0);
        canvas.text(&count, (frame.right - 12, frame.bottom - 18), Size::Normal, FAINT, Anchor::End)
    }
}
