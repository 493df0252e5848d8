//! Tables for the terminal: at most a hundred columns of text, without colours, the same to the byte wherever they are printed.

use crate::compare::{CheckDocument, Comparison};
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use foretell_units::{Bytes, Seconds};

/// Terminals are at least this wide where people read tables; longer cells are wrapped.
const WIDTH: u16 = 100;

/// A line above, below and under the head.
const LINES: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// Where a column's text stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alignment {
    /// Words.
    #[default]
    Left,
    /// Numbers.
    Right,
}

/// A column's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column<'a> {
    /// What it is called.
    pub title: &'a str,
    /// Where its text stands.
    pub alignment: Alignment,
}

impl<'a> Column<'a> {
    /// A column of words.
    pub const fn words(title: &'a str) -> Self {
        Self { title, alignment: Alignment::Left }
    }

    /// A column of numbers.
    pub const fn numbers(title: &'a str) -> Self {
        Self { title, alignment: Alignment::Right }
    }
}

/// A table with a head, without a line break at its end. No head line is printed where every title is empty.
pub fn table(columns: &[Column<'_>], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(LINES).set_width(WIDTH);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    let cell = |text: &str, alignment| {
        Cell::new(text).set_alignment(match alignment {
            Alignment::Left => CellAlignment::Left,
            Alignment::Right => CellAlignment::Right,
        })
    };
    if columns.iter().any(|column| !column.title.is_empty()) {
        table.set_header(columns.iter().map(|column| cell(column.title, column.alignment)));
    }
    for row in rows {
        table.add_row(columns.iter().zip(row).map(|(column, text)| cell(text, column.alignment)));
    }
    table.trim_fmt()
}

/// Where a step's time goes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Breakdown {
    /// Kernels.
    pub compute: Seconds,
    /// Communication that no kernel hides.
    pub exposed_communication: Seconds,
    /// Waiting for other ranks.
    pub bubble: Seconds,
    /// Reading samples.
    pub data: Seconds,
    /// Updating parameters.
    pub optimizer: Seconds,
}

/// A prediction in a few figures.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictionSummary {
    /// The step.
    pub step: Seconds,
    /// Its 10th and 90th percentile.
    pub interval: Option<(Seconds, Seconds)>,
    /// Samples over seconds.
    pub samples_per_second: f64,
    /// Tokens over seconds, if samples are sequences.
    pub tokens_per_second: Option<f64>,
    /// Model FLOPs utilisation, from 0 to 1; none where the device's peak is unknown.
    pub mfu: Option<f64>,
    /// The same with recomputation counted.
    pub hfu: Option<f64>,
    /// The arena of each stage.
    pub peak_memory: Vec<Bytes>,
    /// What the fullest of them is for.
    pub memory_parts: Vec<(&'static str, Bytes)>,
    /// What a device has.
    pub device_memory: Option<Bytes>,
    /// Where the step's time goes.
    pub breakdown: Breakdown,
    /// Whether measured costs stand behind it.
    pub calibrated: bool,
}

/// The summary of a prediction.
pub fn prediction_table(summary: &PredictionSummary) -> String {
    let mut rows: Vec<Vec<String>> = Vec::new();
    let mut row = |what: &str, value: String| rows.push(vec![what.to_owned(), value]);
    row("step time", summary.step.to_string());
    if let Some((p10, p90)) = summary.interval {
        row("  80 % interval", format!("{p10} to {p90}"));
    }
    row("samples per second", figures(summary.samples_per_second));
    if let Some(tokens) = summary.tokens_per_second {
        row("tokens per second", figures(tokens));
    }
    if let Some(mfu) = summary.mfu {
        row("model FLOPs utilisation (MFU)", percent(mfu));
    }
    if let Some(hfu) = summary.hfu {
        row("hardware FLOPs utilisation (HFU)", percent(hfu));
    }
    let fullest = summary.peak_memory.iter().copied().max().unwrap_or_default();
    let memory = match summary.device_memory {
        Some(device) if fullest > device => format!("{fullest} of {device}: does not fit"),
        Some(device) => format!("{fullest} of {device}"),
        None => fullest.to_string(),
    };
    row("peak memory of a device", memory);
    if summary.peak_memory.len() > 1 {
        let stages: Vec<String> = summary.peak_memory.iter().map(Bytes::to_string).collect();
        row("  by stage", stages.join(", "));
    }
    if !summary.memory_parts.is_empty() {
        let parts: Vec<String> = summary.memory_parts.iter().map(|(what, bytes)| format!("{what} {bytes}")).collect();
        row("  of the fullest", parts.join(", "));
    }
    let Breakdown { compute, exposed_communication, bubble, data, optimizer } = summary.breakdown;
    let parts = [
        ("compute", compute),
        ("exposed communication", exposed_communication),
        ("bubble", bubble),
        ("data", data),
        ("optimizer", optimizer),
    ];
    for (what, time) in parts {
        row(what, format!("{time} ({})", percent(share(time, summary.step))));
    }
    row("calibrated", if summary.calibrated { "yes" } else { "no: partly estimates, expect larger errors" }.to_owned());
    table(&[Column::words(""), Column::words("")], &rows)
}

/// A layout that the planner considered.
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutRow {
    /// Ranks that share out samples; several numbers where stages differ.
    pub data: Vec<usize>,
    /// Ranks that share out operators, likewise.
    pub tensor: Vec<usize>,
    /// Stages.
    pub pipeline: usize,
    /// The pipeline schedule's name, or a dash where it changes nothing.
    pub schedule: String,
    /// Samples of one micro-batch.
    pub micro_batch: usize,
    /// What is recomputed.
    pub recompute: String,
    /// The predicted step.
    pub step: Seconds,
    /// Samples over seconds.
    pub samples_per_second: f64,
    /// The memory of the fullest device.
    pub memory: Bytes,
    /// Model FLOPs utilisation, from 0 to 1; none where the device's peak is unknown.
    pub mfu: Option<f64>,
}

/// Layouts in the order given, the best first.
pub fn layouts_table(layouts: &[LayoutRow]) -> String {
    let columns = [
        Column::numbers("#"),
        Column::numbers("data"),
        Column::numbers("tensor"),
        Column::numbers("pipe"),
        Column::words("schedule"),
        Column::numbers("micro"),
        Column::words("recompute"),
        Column::numbers("step"),
        Column::numbers("samples/s"),
        Column::numbers("memory"),
        Column::numbers("MFU"),
    ];
    let row = |(index, layout): (usize, &LayoutRow)| {
        vec![
            (index + 1).to_string(),
            of_stages(&layout.data),
            of_stages(&layout.tensor),
            layout.pipeline.to_string(),
            layout.schedule.clone(),
            layout.micro_batch.to_string(),
            layout.recompute.clone(),
            layout.step.to_string(),
            figures(layout.samples_per_second),
            layout.memory.to_string(),
            layout.mfu.map_or_else(|| "-".to_owned(), percent),
        ]
    };
    table(&columns, &layouts.iter().enumerate().map(row).collect::<Vec<_>>())
}

/// Sizes of stages one after the other: `4/6`.
fn of_stages(sizes: &[usize]) -> String {
    sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("/")
}

/// What `foretell check` prints: the steps, where the time went, and what made the difference.
pub fn check_table(document: &CheckDocument) -> String {
    let comparison = &document.comparison;
    let mut text = headline(document);
    let (columns, rows) = kind_rows(comparison);
    text.push_str(&format!("\n\nwhere {}'s step went\n{}", comparison.rank, table(&columns, &rows)));
    if !comparison.worst.is_empty() {
        let (columns, rows) = worst_rows(comparison);
        text.push_str(&format!("\n\nlargest differences, mean over the ranks of a stage\n{}", table(&columns, &rows)));
    }
    text
}

/// The outcome in a sentence or two.
pub(crate) fn headline(document: &CheckDocument) -> String {
    let comparison = &document.comparison;
    let inside = if document.inside_interval { "inside" } else { "outside" };
    let memory = document.memory_error.map_or_else(String::new, |error| format!("; memory error {}", signed_percent(error)));
    format!(
        "predicted {}, measured {}: error {}, {inside} the 80 % interval{memory}",
        comparison.predicted_step,
        comparison.measured_step,
        signed_percent(comparison.error)
    )
}

/// [`Comparison::by_kind`] as text, with the sum as last row.
pub(crate) fn kind_rows(comparison: &Comparison) -> (Vec<Column<'static>>, Vec<Vec<String>>) {
    let columns = vec![
        Column::words("kind"),
        Column::numbers("count"),
        Column::numbers("predicted"),
        Column::numbers("measured"),
        Column::numbers("share of error"),
    ];
    let mut rows: Vec<Vec<String>> = comparison
        .by_kind
        .iter()
        .map(|row| {
            let times = [row.predicted.to_string(), row.measured.to_string(), signed_percent(row.error_share)];
            [row.kind.clone(), row.count.to_string()].into_iter().chain(times).collect()
        })
        .collect();
    let step = [comparison.predicted_step.to_string(), comparison.measured_step.to_string(), signed_percent(comparison.error)];
    rows.push(["step".to_owned(), String::new()].into_iter().chain(step).collect());
    (columns, rows)
}

/// [`Comparison::worst`] as text.
pub(crate) fn worst_rows(comparison: &Comparison) -> (Vec<Column<'static>>, Vec<Vec<String>>) {
    let columns = vec![
        Column::numbers("rank"),
        Column::words("instruction"),
        Column::numbers("micro"),
        Column::words("kind"),
        Column::numbers("predicted"),
        Column::numbers("measured"),
        Column::words("cause"),
    ];
    let row = |row: &crate::compare::WorstRow| {
        let number = row.instruction.map_or_else(String::new, |id| format!("{} ", id.0));
        vec![
            row.rank.0.to_string(),
            format!("{number}{}", row.name),
            row.micro_batch.map_or_else(|| "-".to_owned(), |index| index.to_string()),
            row.kind.clone(),
            row.predicted.to_string(),
            row.measured.to_string(),
            row.cause.to_string(),
        ]
    };
    (columns, comparison.worst.iter().map(row).collect())
}

fn share(part: Seconds, whole: Seconds) -> f64 {
    if whole > Seconds::ZERO { part / whole } else { 0.0 }
}

fn percent(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

fn signed_percent(share: f64) -> String {
    // Adding zero turns -0.0 into 0.0, which would print as `+-0.0`.
    format!("{:+.1} %", (share * 1000.0).round() / 10.0 + 0.0)
}

/// A rate in three figures, whole from a hundred on.
fn figures(value: f64) -> String {
    let digits = match value.abs() {
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        _ => 2,
    };
    format!("{value:.digits$}")
}

#[cfg(test)]
mod tests;
