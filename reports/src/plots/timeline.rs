//! The timeline plot: each rank's work over time, one row per stream, predictions above
//! measurements.

use super::canvas::{
    Anchor, Canvas, Dash, FAINT, Frame, GRID, INK, Mark, PALETTE, PAPER, Scale, Size, fitted, text_width, time_unit,
};
use crate::activity::Activity;
use crate::error::ReportError;
use crate::shown::shown_ranks;
use crate::trace::{origin_name, stream_name};
use foretell_program::{Program, Rank, RankTimeline, StageProgram, Timeline};
use foretell_units::Seconds;
use plotters::prelude::DrawingBackend;
use plotters::style::RGBColor;

/// The most ranks that fit on a screen. If there are more, the first one of each stage is shown.
const MOST_RANKS: usize = 8;
/// Space between ranks, in pixels.
const RANK_GAP: i32 = 14;
/// Space above the first row for title and legend, in pixels.
const TOP: i32 = 90;
/// Space below the last row for ticks and the axis title, in pixels.
const FOOT: i32 = 62;

#[derive(Clone, Debug)]
pub(crate) struct TimelinePlot {
    ranks: Vec<RankRows>,
    /// The origin and the step time of each timeline.
    steps: Vec<(&'static str, Seconds)>,
    /// A note on ranks that are not shown.
    note: Option<String>,
}

#[derive(Clone, Debug)]
struct RankRows {
    label: String,
    rows: Vec<Row>,
}

#[derive(Clone, Debug)]
struct Row {
    label: String,
    origin: &'static str,
    blocks: Vec<Bar>,
}

#[derive(Clone, Copy, Debug)]
struct Bar {
    start: f64,
    end: f64,
    activity: Activity,
    micro_batch: Option<u32>,
}

/// The colour of a kind of work.
const fn fill(activity: Activity) -> RGBColor {
    match activity {
        Activity::Forward => PALETTE[0],
        Activity::Backward => PALETTE[1],
        Activity::Recompute => RGBColor(240, 228, 66),
        Activity::Update => PALETTE[2],
        Activity::Communication => PALETTE[3],
        Activity::Load => PALETTE[5],
    }
}

/// The colour of text on a block of that colour.
const fn text_colour(activity: Activity) -> RGBColor {
    if matches!(activity, Activity::Forward | Activity::Update) { PAPER } else { INK }
}

impl TimelinePlot {
    pub(crate) fn of(program: &Program, timelines: &[&Timeline]) -> Self {
        let known = timelines.iter().map(|timeline| timeline.ranks.len()).max().unwrap_or(0).min(program.mesh.world_size());
        let shown = shown_ranks(program, known, MOST_RANKS);
        let note = (shown.len() < known).then(|| format!("{} of {known} ranks: the first of each stage", shown.len()));
        let ranks = shown.iter().map(|&rank| RankRows { label: rank.to_string(), rows: rows(program, timelines, rank) });
        let steps = timelines.iter().map(|timeline| (origin_name(timeline.origin), timeline.step().into())).collect();
        Self { ranks: ranks.filter(|rank| !rank.rows.is_empty()).collect(), steps, note }
    }

    /// Height in pixels: as much as the rows need, at least one screen.
    pub(crate) fn height(&self) -> u32 {
        (TOP + FOOT + self.rows_height()).max(500) as u32
    }

    fn rows_height(&self) -> i32 {
        self.row_count() * self.row_height() + self.ranks.len() as i32 * RANK_GAP
    }

    fn row_count(&self) -> i32 {
        self.ranks.iter().map(|rank| rank.rows.len() as i32).sum()
    }

    /// Height of a row: less for many rows, but enough for a label.
    fn row_height(&self) -> i32 {
        (460 / self.row_count().max(1)).clamp(16, 30)
    }

    pub(crate) fn draw<Backend: DrawingBackend>(&self, canvas: &Canvas<'_, Backend>) -> Result<(), ReportError> {
        let longest = self.steps.iter().map(|(_, step)| step.value()).fold(0.0, f64::max);
        if self.ranks.is_empty() || longest <= 0.0 {
            return canvas.nothing("The timelines are empty.");
        }
        let (unit, per_second) = time_unit(longest);
        let frame = Frame {
            left: 250,
            top: TOP,
            right: canvas.size().0 - 30,
            bottom: TOP + self.rows_height(),
            horizontal: Scale::linear(format!("time ({unit})"), 0.0, longest * per_second),
            vertical: None,
        };
        canvas.axes(&frame)?;
        self.draw_head(canvas, &frame)?;
        let mut y = frame.top + RANK_GAP / 2;
        for (index, rank) in self.ranks.iter().enumerate() {
            let height = self.row_height() * rank.rows.len() as i32;
            canvas.text(&rank.label, (24, y + height / 2), Size::Normal, INK, Anchor::Start)?;
            for row in &rank.rows {
                self.draw_row(canvas, &frame, row, y, per_second)?;
                y += self.row_height();
            }
            y += RANK_GAP;
            if index + 1 < self.ranks.len() {
                canvas.line(vec![(24, y - RANK_GAP / 2), (frame.right, y - RANK_GAP / 2)], GRID, 1, Dash::Solid)?;
            }
        }
        Ok(())
    }

    fn draw_head<Backend: DrawingBackend>(&self, canvas: &Canvas<'_, Backend>, frame: &Frame) -> Result<(), ReportError> {
        let blocks = || self.ranks.iter().flat_map(|rank| &rank.rows).flat_map(|row| &row.blocks);
        let entries: Vec<(String, RGBColor, Mark)> = Activity::ALL
            .into_iter()
            .filter(|activity| blocks().any(|block| block.activity == *activity))
            .map(|activity| (activity.name().to_owned(), fill(activity), Mark::Block))
            .collect();
        let steps: Vec<String> = self.steps.iter().map(|(origin, step)| format!("{origin} {step}")).collect();
        let mut words = format!("step: {}", steps.join(", "));
        if let Some(note) = &self.note {
            words.push_str(&format!(" · {note}"));
        }
        let right_of_words = 24 + text_width(&words, Size::Normal) + 30;
        canvas.text(&words, (24, 62), Size::Normal, FAINT, Anchor::Start)?;
        canvas.legend(right_of_words, frame.right, 62, &entries)
    }

    fn draw_row<Backend: DrawingBackend>(
        &self,
        canvas: &Canvas<'_, Backend>,
        frame: &Frame,
        row: &Row,
        y: i32,
        per_second: f64,
    ) -> Result<(), ReportError> {
        let height = self.row_height();
        let middle = y + height / 2;
        let (top, bottom) = (y + 2, y + height - 2);
        canvas.text(row.origin, (98, middle), Size::Small, FAINT, Anchor::Start)?;
        let label = fitted(&row.label, frame.left - 8 - 168, Size::Small);
        canvas.text(&label, (frame.left - 8, middle), Size::Small, INK, Anchor::End)?;
        for (from, to, block) in pixels(&row.blocks, |seconds| frame.x(seconds * per_second)) {
            canvas.block([(from, top), (to, bottom)], fill(block.activity))?;
            let number = block.micro_batch.map(|index| index.to_string()).unwrap_or_default();
            if !number.is_empty() && text_width(&number, Size::Small) + 6 <= to - from {
                canvas.text(&number, ((from + to) / 2, middle), Size::Small, text_colour(block.activity), Anchor::Middle)?;
            }
        }
        Ok(())
    }
}

fn rows(program: &Program, timelines: &[&Timeline], rank: Rank) -> Vec<Row> {
    let stage = program.list_of(rank);
    let all: Vec<Vec<Vec<Bar>>> = timelines
        .iter()
        .map(|timeline| timeline.rank(rank).map_or_else(Vec::new, |spans| blocks_by_stream(stage, spans)))
        .collect();
    let mut rows = Vec::new();
    // Each stream's prediction is right above its measurement.
    for (index, stream) in stage.streams.iter().enumerate() {
        let used = all.iter().any(|streams| streams.get(index).is_some_and(|blocks| !blocks.is_empty()));
        for (timeline, streams) in timelines.iter().zip(&all).filter(|_| used) {
            let blocks = streams.get(index).cloned().unwrap_or_default();
            rows.push(Row { label: stream_name(stage, stream), origin: origin_name(timeline.origin), blocks });
        }
    }
    rows
}

fn blocks_by_stream(stage: &StageProgram, timeline: &RankTimeline) -> Vec<Vec<Bar>> {
    let mut streams = vec![Vec::new(); stage.streams.len()];
    for span in &timeline.spans {
        let Some(instruction) = stage.instructions.get(span.instruction.0 as usize) else { continue };
        let Some(stream) = streams.get_mut(instruction.stream.0 as usize) else { continue };
        stream.push(Bar {
            start: Seconds::from(span.start).value(),
            end: Seconds::from(span.end).value(),
            activity: Activity::of(instruction),
            micro_batch: instruction.micro_batch,
        });
    }
    for stream in &mut streams {
        stream.sort_by(|left, right| left.start.total_cmp(&right.start));
    }
    streams
}

/// Converts blocks to pixels. Merges neighbours of the same kind and micro-batch that touch on the
/// screen, so the size of a plot depends on the screen and not on the number of instructions.
fn pixels(blocks: &[Bar], x: impl Fn(f64) -> i32) -> Vec<(i32, i32, Bar)> {
    let mut result: Vec<(i32, i32, Bar)> = Vec::new();
    for block in blocks {
        let (from, to) = (x(block.start), x(block.end).max(x(block.start) + 1));
        match result.last_mut() {
            Some((_, last, same))
                if same.activity == block.activity && same.micro_batch == block.micro_batch && from <= *last =>
            {
                *last = to.max(*last);
            }
            // Of several kinds within one pixel the first is shown.
            Some((_, last, _)) if to <= *last => {}
            _ => result.push((from, to, *block)),
        }
    }
    for (from, to, _) in &mut result {
        // Leaves a hairline between neighbours that are wide enough.
        if *to - *from > 3 {
            *to -= 1;
        }
    }
    result
}
