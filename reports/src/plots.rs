//! Plots of timelines, memory, loss curves, scaling curves and predictions against measurements, as
//! SVG text or PNG bytes.
//!
//! One function draws a plot on plotters' `DrawingArea`, for every backend. SVG keeps text as text
//! in the reader's sans-serif font; PNG uses the embedded DejaVu Sans. Both are laid out with the
//! widths of DejaVu Sans, the wider font. It must not know where the numbers come from.

mod canvas;
mod curve;
mod loss;
mod memory;
mod scatter;
mod timeline;

use crate::error::ReportError;
use canvas::{Canvas, INK};
pub use curve::CurvePoint;
use foretell_program::{Program, Timeline};
pub use loss::LossPoint;
use plotters::coord::Shift;
use plotters::prelude::{BitMapBackend, DrawingArea, DrawingBackend, IntoDrawingArea, SVGBackend};
pub use scatter::ScatterPoint;

/// A drawing that any backend can draw.
#[derive(Clone, Debug)]
pub struct Plot {
    title: String,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    Timeline(timeline::TimelinePlot),
    Memory(memory::MemoryPlot),
    Loss(loss::LossPlot),
    Scatter(scatter::ScatterPlot),
    Curve(curve::CurvePlot),
}

impl Plot {
    /// Plots what each rank did when, with the streams of all timelines below each other. If there
    /// are many ranks, the first one of each stage is shown.
    pub fn timeline(title: impl Into<String>, program: &Program, timelines: &[&Timeline]) -> Self {
        Self { title: title.into(), content: Content::Timeline(timeline::TimelinePlot::of(program, timelines)) }
    }

    /// Plots the bytes in use over a step on the first rank of each stage. Persistent buffers count
    /// throughout; any other buffer counts from the start of the first instruction that touches it
    /// to the end of the last. A dashed line shows the stage's arena.
    pub fn memory(title: impl Into<String>, program: &Program, timeline: &Timeline) -> Self {
        Self { title: title.into(), content: Content::Memory(memory::MemoryPlot::of(program, timeline)) }
    }

    /// Plots the training loss of each step as a line and evaluations as points.
    pub fn loss(title: impl Into<String>, training: &[LossPoint], evaluation: &[LossPoint]) -> Self {
        Self { title: title.into(), content: Content::Loss(loss::LossPlot::of(training, evaluation)) }
    }

    /// Plots predicted over measured times on logarithmic axes, with the diagonal and a band of 10
    /// % around it.
    pub fn scatter(title: impl Into<String>, points: &[ScatterPoint]) -> Self {
        Self { title: title.into(), content: Content::Scatter(scatter::ScatterPlot::of(points)) }
    }

    /// Plots curves on logarithmic axes with titles, such as a scaling curve or a Pareto front.
    pub fn curve(title: impl Into<String>, axes: [&str; 2], points: &[CurvePoint]) -> Self {
        Self { title: title.into(), content: Content::Curve(curve::CurvePlot::of(axes, points)) }
    }

    /// Width and height in pixels.
    pub fn size(&self) -> (u32, u32) {
        let height = match &self.content {
            Content::Timeline(plot) => plot.height(),
            Content::Memory(_) | Content::Loss(_) | Content::Curve(_) => 520,
            Content::Scatter(_) => 760,
        };
        (1200, height)
    }

    /// Returns the text of an SVG file.
    ///
    /// # Errors
    /// [`ReportError::Draw`] if a part of the plot cannot be drawn.
    pub fn svg(&self) -> Result<String, ReportError> {
        let mut text = String::new();
        self.draw(&SVGBackend::with_string(&mut text, self.size()).into_drawing_area())?;
        Ok(text)
    }

    /// Returns the bytes of a PNG file.
    ///
    /// # Errors
    /// [`ReportError::Draw`] if a part of the plot cannot be drawn, [`ReportError::Encode`] if the
    /// pixels cannot be encoded.
    pub fn png(&self) -> Result<Vec<u8>, ReportError> {
        let (width, height) = self.size();
        let mut pixels = vec![255; width as usize * height as usize * 3];
        self.draw(&BitMapBackend::with_buffer(&mut pixels, (width, height)).into_drawing_area())?;
        let mut bytes = Vec::new();
        let mut encoder = png::Encoder::new(&mut bytes, width, height);
        encoder.set_color(png::ColorType::Rgb);
        encoder.set_depth(png::BitDepth::Eight);
        // Plots have flat areas: the default compression makes files two to three times as large.
        encoder.set_compression(png::Compression::Best);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&pixels)?;
        writer.finish()?;
        Ok(bytes)
    }

    /// Draws the plot with any backend.
    fn draw<Backend: DrawingBackend>(&self, area: &DrawingArea<Backend, Shift>) -> Result<(), ReportError> {
        let canvas = Canvas::new(area)?;
        canvas.text(&self.title, (24, 26), canvas::Size::Title, INK, canvas::Anchor::Start)?;
        match &self.content {
            Content::Timeline(plot) => plot.draw(&canvas)?,
            Content::Memory(plot) => plot.draw(&canvas)?,
            Content::Loss(plot) => plot.draw(&canvas)?,
            Content::Curve(plot) => plot.draw(&canvas)?,
            Content::Scatter(plot) => plot.draw(&canvas)?,
        }
        canvas.finish()
    }
}

#[cfg(test)]
mod tests;
