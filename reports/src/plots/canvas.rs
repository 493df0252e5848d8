//! Drawing primitives of all plots: colours, text, shapes, and a frame with two axes. It must not
//! know training.

use crate::error::ReportError;
use plotters::coord::Shift;
use plotters::prelude::{Circle, DrawingArea, DrawingBackend, IntoFont, PathElement, Polygon, Rectangle};
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{Color, FontStyle, RGBColor, ShapeStyle, TextStyle, register_font};
use std::sync::OnceLock;

/// Colour of text and axes.
pub(crate) const INK: RGBColor = RGBColor(34, 34, 34);
/// Colour of secondary text.
pub(crate) const FAINT: RGBColor = RGBColor(102, 102, 102);
/// Colour of grid lines.
pub(crate) const GRID: RGBColor = RGBColor(225, 225, 225);
/// Colour of the background.
pub(crate) const PAPER: RGBColor = RGBColor(255, 255, 255);

/// Colours that colour-blind readers can distinguish (Okabe and Ito 2008), darker ones first.
pub(crate) const PALETTE: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(230, 159, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(213, 94, 0),
    RGBColor(86, 180, 233),
    RGBColor(160, 150, 20),
    RGBColor(110, 110, 110),
];

/// The embedded font; its source and licence are in `fonts/README.md`.
static FONT: &[u8] = include_bytes!("../../fonts/DejaVuSans-subset.ttf");
/// Font family: SVG asks the browser for it, and the embedded font is registered under this name.
const FAMILY: &str = "sans-serif";

/// Font size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Title,
    Normal,
    Small,
}

impl Size {
    const fn pixels(self) -> i32 {
        match self {
            Size::Title => 20,
            Size::Normal => 14,
            Size::Small => 12,
        }
    }
}

/// Which end of a text is at its position. Vertically, the middle of the text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Anchor {
    Start,
    Middle,
    End,
}

/// Whether a line is solid or dashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dash {
    Solid,
    Dashed,
}

/// How a legend entry is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mark {
    Block,
    Line,
    DashedLine,
    Dot,
}

/// A drawing area with text and shapes in our style.
pub(crate) struct Canvas<'a, Backend: DrawingBackend> {
    area: &'a DrawingArea<Backend, Shift>,
}

fn failed(error: impl std::fmt::Display) -> ReportError {
    ReportError::Draw(error.to_string())
}

impl<'a, Backend: DrawingBackend> Canvas<'a, Backend> {
    /// An empty page.
    pub(crate) fn new(area: &'a DrawingArea<Backend, Shift>) -> Result<Self, ReportError> {
        static REGISTERED: OnceLock<bool> = OnceLock::new();
        if !*REGISTERED.get_or_init(|| register_font(FAMILY, FontStyle::Normal, FONT).is_ok()) {
            return Err(ReportError::Draw("the embedded font is damaged".to_owned()));
        }
        area.fill(&PAPER).map_err(failed)?;
        Ok(Self { area })
    }

    /// Flushes the drawing to the backend.
    pub(crate) fn finish(&self) -> Result<(), ReportError> {
        self.area.present().map_err(failed)
    }

    pub(crate) fn size(&self) -> (i32, i32) {
        let (width, height) = self.area.dim_in_pixel();
        (width as i32, height as i32)
    }

    pub(crate) fn text(
        &self,
        text: &str,
        position: (i32, i32),
        size: Size,
        colour: RGBColor,
        anchor: Anchor,
    ) -> Result<(), ReportError> {
        let horizontal = match anchor {
            Anchor::Start => HPos::Left,
            Anchor::Middle => HPos::Center,
            Anchor::End => HPos::Right,
        };
        let style = style(size).color(&colour).pos(Pos::new(horizontal, VPos::Center));
        self.area.draw_text(text, &style, position).map_err(failed)
    }

    pub(crate) fn block(&self, corners: [(i32, i32); 2], colour: RGBColor) -> Result<(), ReportError> {
        self.area.draw(&Rectangle::new(corners, colour.filled())).map_err(failed)
    }

    pub(crate) fn polygon(&self, corners: Vec<(i32, i32)>, colour: RGBColor, opacity: f64) -> Result<(), ReportError> {
        self.area.draw(&Polygon::new(corners, colour.mix(opacity).filled())).map_err(failed)
    }

    pub(crate) fn dot(&self, centre: (i32, i32), radius: i32, colour: RGBColor) -> Result<(), ReportError> {
        self.area.draw(&Circle::new(centre, radius, colour.filled())).map_err(failed)
    }

    pub(crate) fn line(&self, points: Vec<(i32, i32)>, colour: RGBColor, width: u32, dash: Dash) -> Result<(), ReportError> {
        let style: ShapeStyle = colour.stroke_width(width);
        match dash {
            Dash::Solid => self.area.draw(&PathElement::new(points, style)).map_err(failed),
            Dash::Dashed => points.windows(2).try_for_each(|ends| match *ends {
                [from, to] => {
                    dashes(from, to).try_for_each(|dash| self.area.draw(&PathElement::new(dash, style)).map_err(failed))
                }
                _ => unreachable!("invariant: a window of two has two ends"),
            }),
        }
    }

    /// Draws a legend as a row of marks and names that ends at `right`. Entries that would pass
    /// `left` continue in a second row.
    pub(crate) fn legend(
        &self,
        left: i32,
        right: i32,
        top: i32,
        entries: &[(String, RGBColor, Mark)],
    ) -> Result<(), ReportError> {
        let widths: Vec<i32> = entries.iter().map(|(name, ..)| 24 + text_width(name, Size::Normal) + 18).collect();
        let mut x = (right - widths.iter().sum::<i32>()).max(left);
        let mut y = top;
        for ((name, colour, mark), width) in entries.iter().zip(widths) {
            if x + width > right + 18 && x > left {
                (x, y) = (left, y + 20);
            }
            match mark {
                Mark::Block => self.block([(x, y - 6), (x + 16, y + 6)], *colour)?,
                Mark::Line => self.line(vec![(x, y), (x + 18, y)], *colour, 2, Dash::Solid)?,
                Mark::DashedLine => self.line(vec![(x, y), (x + 18, y)], *colour, 2, Dash::Dashed)?,
                Mark::Dot => self.dot((x + 9, y), 5, *colour)?,
            }
            self.text(name, (x + 24, y), Size::Normal, INK, Anchor::Start)?;
            x += width;
        }
        Ok(())
    }

    /// Draws a frame's grid lines, ticks and titles.
    pub(crate) fn axes(&self, frame: &Frame) -> Result<(), ReportError> {
        let Frame { left, top, right, bottom, .. } = *frame;
        for (value, label) in frame.horizontal.ticks((right - left) / 90) {
            let x = frame.x(value);
            self.line(vec![(x, top), (x, bottom)], GRID, 1, Dash::Solid)?;
            self.text(&label, (x, bottom + 14), Size::Small, INK, Anchor::Middle)?;
        }
        if let Some(vertical) = &frame.vertical {
            for (value, label) in vertical.ticks((bottom - top) / 50) {
                let y = frame.y(value);
                self.line(vec![(left, y), (right, y)], GRID, 1, Dash::Solid)?;
                self.text(&label, (left - 8, y), Size::Small, INK, Anchor::End)?;
            }
            self.line(vec![(left, top), (left, bottom)], INK, 1, Dash::Solid)?;
            self.text(&vertical.title, (24, top - 18), Size::Normal, INK, Anchor::Start)?;
        }
        self.line(vec![(left, bottom), (right, bottom)], INK, 1, Dash::Solid)?;
        self.text(&frame.horizontal.title, ((left + right) / 2, bottom + 36), Size::Normal, INK, Anchor::Middle)
    }

    /// Draws a sentence in place of an empty plot.
    pub(crate) fn nothing(&self, sentence: &str) -> Result<(), ReportError> {
        let (width, height) = self.size();
        self.text(sentence, (width / 2, height / 2), Size::Normal, FAINT, Anchor::Middle)
    }
}

fn style(size: Size) -> TextStyle<'static> {
    TextStyle::from((FAMILY, size.pixels()).into_font())
}

/// Width of a text in pixels in the embedded font.
pub(crate) fn text_width(text: &str, size: Size) -> i32 {
    match style(size).font.layout_box(text) {
        Ok(((left, _), (right, _))) => right - left,
        Err(_) => text.chars().count() as i32 * size.pixels() * 2 / 3,
    }
}

/// Shortens a text so that it fits into `width` pixels.
pub(crate) fn fitted(text: &str, width: i32, size: Size) -> String {
    if text_width(text, size) <= width {
        return text.to_owned();
    }
    let mut kept: Vec<char> = text.chars().collect();
    while let Some(_cut) = kept.pop() {
        let shorter: String = kept.iter().chain(&['…']).collect();
        if text_width(&shorter, size) <= width {
            return shorter;
        }
    }
    String::new()
}

fn dashes(from: (i32, i32), to: (i32, i32)) -> impl Iterator<Item = [(i32, i32); 2]> {
    let delta = (f64::from(to.0 - from.0), f64::from(to.1 - from.1));
    let length = delta.0.hypot(delta.1).max(1.0);
    let at = move |distance: f64| {
        let share = distance.min(length) / length;
        (from.0 + (delta.0 * share).round() as i32, from.1 + (delta.1 * share).round() as i32)
    };
    let count = (length / 8.0).ceil() as usize;
    (0..count).map(move |index| [at(index as f64 * 8.0), at(index as f64 * 8.0 + 5.0)])
}

/// A rectangle with a scale along each side.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) left: i32,
    pub(crate) top: i32,
    pub(crate) right: i32,
    pub(crate) bottom: i32,
    pub(crate) horizontal: Scale,
    /// `None` if rows are stacked instead of scaled.
    pub(crate) vertical: Option<Scale>,
}

impl Frame {
    pub(crate) fn x(&self, value: f64) -> i32 {
        self.left + (f64::from(self.right - self.left) * self.horizontal.share(value)).round() as i32
    }

    pub(crate) fn y(&self, value: f64) -> i32 {
        let share = self.vertical.as_ref().map_or(0.0, |vertical| vertical.share(value));
        self.bottom - (f64::from(self.bottom - self.top) * share).round() as i32
    }
}

/// The scale of an axis.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    pub(crate) title: String,
    pub(crate) from: f64,
    pub(crate) to: f64,
    pub(crate) growth: Growth,
}

/// The most ticks of an axis. Limits the count if a step is so small that adding it changes
/// nothing.
const MOST_TICKS: usize = 100;

/// Whether a scale is linear or logarithmic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Growth {
    Linear,
    Logarithmic,
}

impl Scale {
    pub(crate) fn linear(title: impl Into<String>, from: f64, to: f64) -> Self {
        // An empty range would divide by zero.
        let to = if to > from { to } else { from + 1.0 };
        Self { title: title.into(), from, to, growth: Growth::Linear }
    }

    /// Position of a value between the ends, from 0 to 1.
    fn share(&self, value: f64) -> f64 {
        let share = match self.growth {
            Growth::Linear => (value - self.from) / (self.to - self.from),
            Growth::Logarithmic => (value / self.from).ln() / (self.to / self.from).ln(),
        };
        if share.is_finite() { share.clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Round numbers with their labels; about `wanted` of them on a linear scale.
    fn ticks(&self, wanted: i32) -> Vec<(f64, String)> {
        let values: Vec<f64> = match self.growth {
            Growth::Linear => {
                let step = round_step((self.to - self.from) / f64::from(wanted.max(1)));
                let first = (self.from / step).ceil() as i64;
                let last = (self.to / step + 1e-9).floor() as i64;
                (first..=last).take(MOST_TICKS).map(|index| index as f64 * step).collect()
            }
            Growth::Logarithmic => {
                let decades = self.from.log10().floor() as i32..=self.to.log10().ceil() as i32;
                // Over many decades, labels at 2 and 5 would crowd the axis.
                let digits: &[f64] = if self.to / self.from > 1e4 { &[1.0] } else { &[1.0, 2.0, 5.0] };
                let all = decades.flat_map(|decade| digits.iter().map(move |digit| digit * 10f64.powi(decade)));
                all.filter(|value| (self.from..=self.to).contains(value)).collect()
            }
        };
        // Rounds away the multiplication's noise: 0.30000000000000004 becomes 0.3.
        values.into_iter().map(|value| (value, format!("{}", (value * 1e9).round() / 1e9))).collect()
    }
}

/// Returns the next of 1, 2 and 5 times a power of ten.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * power >= least * (1.0 - 1e-9)).unwrap_or(10.0);
    digit * power
}

/// Returns a readable unit for durations up to `longest_seconds`, and the number of these units in
/// a second.
pub(crate) fn time_unit(longest_seconds: f64) -> (&'static str, f64) {
    match longest_seconds {
        long if long >= 10.0 => ("s", 1.0),
        long if long >= 1e-3 => ("ms", 1e3),
        _ => ("µs", 1e6),
    }
}
