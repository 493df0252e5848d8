//! Tables for the terminal: plain text of at most 100 columns, with the same bytes wherever it is
//! printed. It must not know where the numbers come from.

use crate::check_document::CheckDocument;
use crate::compare::Comparison;
use comfy_table::{Cell, CellAlignment, ContentArrangement, LineStyle, Table, TableStyle};
use foretell_program::LayoutDimension;
use foretell_units::{Bytes, FlopsPerSecond, Seconds};

/// Width of a table in columns. Longer cells wrap.
const WIDTH: u16 = 100;

/// Draws a line above the table, below it and under its head.
const LINES: TableStyle = TableStyle::new()
    .top_border(LineStyle::none().fill('─').junction('─'))
    .header_separator(LineStyle::none().fill('─').junction('─'))
    .bottom_border(LineStyle::none().fill('─').junction('─'));

/// How a column's text is aligned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Alignment {
    /// For words.
    #[default]
    Left,
    /// For numbers.
    Right,
}

/// A column's title and alignment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column<'a> {
    /// The title.
    pub title: &'a str,
    /// How its text is aligned.
    pub alignment: Alignment,
}

impl<'a> Column<'a> {
    /// A left-aligned column.
    pub const fn words(title: &'a str) -> Self {
        Self { title, alignment: Alignment::Left }
    }

    /// A right-aligned column.
    pub const fn numbers(title: &'a str) -> Self {
        Self { title, alignment: Alignment::Right }
    }
}

/// Formats a table without a line break at its end. If every title is empty, the head is left out.
pub fn table(columns: &[Column<'_>], rows: &[Vec<String>]) -> String {
    padded_table(columns, rows, USUAL_PADDING)
}

/// Spaces left and right of a cell's text.
const USUAL_PADDING: (u16, u16) = (1, 1);

/// The padding for a table that would otherwise be wider than a terminal.
const NARROW_PADDING: (u16, u16) = (0, 1);

fn padded_table(columns: &[Column<'_>], rows: &[Vec<String>], padding: (u16, u16)) -> String {
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
    table.column_iter_mut().for_each(|column| {
        column.set_padding(padding);
    });
    table.trim_fmt()
}

/// A step's time by kind. The parts add up to the step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Breakdown {
    /// Kernels of the forward and backward passes.
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

/// The figures of a prediction that [`prediction_table`] prints.
#[derive(Clone, Debug, PartialEq)]
pub struct PredictionSummary {
    /// The step time.
    pub step: Seconds,
    /// Its 10th and 90th percentile.
    pub interval: Option<(Seconds, Seconds)>,
    /// Samples per second.
    pub samples_per_second: f64,
    /// Tokens per second, if samples are sequences.
    pub tokens_per_second: Option<f64>,
    /// Model FLOPs utilisation, from 0 to 1; `None` if the device's peak is unknown.
    pub mfu: Option<f64>,
    /// Hardware FLOPs utilisation: as `mfu`, with recomputation counted.
    pub hfu: Option<f64>,
    /// Peak memory of each stage.
    pub peak_memory: Vec<Bytes>,
    /// Memory of the fullest stage by purpose.
    pub memory_parts: Vec<(&'static str, Bytes)>,
    /// Memory of a device, if known.
    pub device_memory: Option<Bytes>,
    /// The step's time by kind.
    pub breakdown: Breakdown,
    /// Whether all costs were measured.
    pub calibrated: bool,
}

/// Formats a prediction as a table of names and values.
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
        // Models of sequences have attention. Other tools count half of it if it is causal.
        let convention = if summary.tokens_per_second.is_some() { ", attention counted in full" } else { "" };
        row("model FLOPs utilisation (MFU)", format!("{}{convention}", percent(mfu)));
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

/// A row of [`layouts_table`].
#[derive(Clone, Debug, PartialEq)]
pub struct LayoutRow {
    /// The dimensions of the layout. All rows have the same titles in the same order.
    pub dimensions: Vec<LayoutDimension>,
    /// The predicted step time.
    pub step: Seconds,
    /// The minimised quantity if that is not the time, with the title of its column.
    pub objective: Option<(&'static str, String)>,
    /// Tokens per second if samples are sequences, else samples per second, over all devices.
    pub rate: f64,
    /// FLOPs of the model per second and device.
    pub flops_of_device: FlopsPerSecond,
    /// Peak memory of the fullest device.
    pub memory: Bytes,
    /// Model FLOPs utilisation, from 0 to 1; `None` if the device's peak is unknown.
    pub mfu: Option<f64>,
}

/// Formats layouts in the given order, numbered from 1. Dimensions in which they differ are
/// columns; the others are listed in a line above the table. Values that do not fit into a cell are
/// listed below it. `rate` is the title of the rates' column.
pub fn layouts_table(layouts: &[LayoutRow], rate: &str) -> String {
    let Some(first) = layouts.first() else { return "no layout".into() };
    let is_column = |index: usize| {
        let cell = |layout: &LayoutRow| layout.dimensions.get(index).map(|dimension| dimension.cell.clone());
        layouts.iter().any(|layout| cell(layout) != cell(first))
    };
    let is_equal = |index: usize| layouts.iter().all(|layout| layout.dimensions.get(index) == first.dimensions.get(index));
    let varying: Vec<usize> = (0..first.dimensions.len()).filter(|index| is_column(*index)).collect();
    let shown = in_columns(layouts, &varying, rate);
    let same = first.dimensions.iter().enumerate().filter(|(index, _)| is_equal(*index));
    let same: Vec<&str> = same.filter_map(|(_, dimension)| dimension.words.as_deref()).collect();
    let (columns, rows) = columns_and_rows(layouts, &shown, rate);
    let padding = if width(&columns, &rows, USUAL_PADDING) > usize::from(WIDTH) { NARROW_PADDING } else { USUAL_PADDING };

    let head = (!same.is_empty()).then(|| {
        let which = if layouts.len() > 1 { "in all layouts" } else { "layout" };
        format!("{which}: {}\n", same.join(", "))
    });
    let below = layouts.iter().enumerate().filter_map(|(index, layout)| {
        let dimensions = layout.dimensions.iter().enumerate();
        let untold = dimensions.filter(|(index, dimension)| {
            !is_equal(*index) && (dimension.is_abridged || !shown.contains(index) && is_column(*index))
        });
        let words: Vec<&str> = untold.filter_map(|(_, dimension)| dimension.words.as_deref()).collect();
        (!words.is_empty()).then(|| format!("\n{}: {}", index + 1, words.join(", ")))
    });
    let below: String = below.collect();
    format!("{}{}{below}", head.unwrap_or_default(), padded_table(&columns, &rows, padding))
}

/// The dimensions that have a column: those of `varying` that fit, by the priority of
/// [`FIRST_COLUMNS`].
fn in_columns(layouts: &[LayoutRow], varying: &[usize], rate: &str) -> Vec<usize> {
    let title = |index: usize| layouts[0].dimensions[index].title;
    let rank = |index: &usize| FIRST_COLUMNS.iter().position(|first| *first == title(*index)).unwrap_or(FIRST_COLUMNS.len());
    let mut by_rank = varying.to_vec();
    by_rank.sort_by_key(rank);
    let mut shown = Vec::new();
    for index in by_rank {
        let mut with: Vec<usize> = shown.iter().copied().chain([index]).collect();
        with.sort_unstable();
        let (columns, rows) = columns_and_rows(layouts, &with, rate);
        if width(&columns, &rows, NARROW_PADDING) <= usize::from(WIDTH) {
            shown = with;
        }
    }
    shown
}

/// Titles of the dimensions that people ask for first.
const FIRST_COLUMNS: [&str; 10] =
    ["precision", "data", "tensor", "pipeline", "context", "expert", "ZeRO", "micro-batch", "recompute", "schedule"];

/// The table's columns and cells.
fn columns_and_rows<'a>(layouts: &'a [LayoutRow], shown: &[usize], rate: &'a str) -> (Vec<Column<'a>>, Vec<Vec<String>>) {
    let is_number = |index: usize| layouts.iter().all(|layout| layout.dimensions[index].cell.parse::<f64>().is_ok());
    let mut columns = vec![Column::numbers("#")];
    columns.extend(shown.iter().map(|&index| {
        let title = layouts[0].dimensions[index].title;
        if is_number(index) { Column::numbers(title) } else { Column::words(title) }
    }));
    columns.push(Column::numbers("step"));
    columns.extend(layouts[0].objective.iter().map(|(title, _)| Column::numbers(title)));
    columns.extend([rate, "TFLOP/s each", "memory", "MFU"].map(Column::numbers));
    let row = |(index, layout): (usize, &LayoutRow)| {
        let mut cells = vec![(index + 1).to_string()];
        cells.extend(shown.iter().map(|&index| layout.dimensions[index].cell.clone()));
        cells.push(layout.step.to_string());
        cells.extend(layout.objective.iter().map(|(_, cell)| cell.clone()));
        cells.extend([
            figures(layout.rate),
            figures(layout.flops_of_device.value() * 1e-12),
            layout.memory.to_string(),
            layout.mfu.map_or_else(|| "-".to_owned(), percent),
        ]);
        cells
    };
    (columns, layouts.iter().enumerate().map(row).collect())
}

/// The width of a table whose cells do not wrap.
fn width(columns: &[Column<'_>], rows: &[Vec<String>], padding: (u16, u16)) -> usize {
    let of_column = |(index, column): (usize, &Column<'_>)| {
        let cells = rows.iter().map(|row| row[index].chars().count());
        cells.chain([column.title.chars().count()]).max().unwrap_or_default() + usize::from(padding.0 + padding.1) + 1
    };
    columns.iter().enumerate().map(of_column).sum()
}

/// Formats the result of `foretell check`: the steps, the time by kind, and the largest
/// differences.
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

/// Summarises the result in one or two sentences.
pub(crate) fn headline(document: &CheckDocument) -> String {
    let comparison = &document.comparison;
    let inside = if document.inside_interval { "inside" } else { "outside" };
    let memory = document.memory_error.map_or_else(String::new, |error| format!("; memory error {}", signed_percent(error)));
    let input = document.input.as_ref().map_or_else(String::new, |input| format!("\n{}", input.sentence()));
    let pace = pace_sentence(document).map_or_else(String::new, |sentence| format!("\n{sentence}"));
    let checkpoint = document.checkpoint.map_or_else(String::new, |checkpoint| format!("\n{}", checkpoint.sentence()));
    format!(
        "predicted {}, measured {}: error {}, {inside} the 80 % interval{memory}{pace}{input}{checkpoint}",
        comparison.predicted_step,
        comparison.measured_step,
        signed_percent(comparison.error)
    )
}

/// States the machine's and the model's part of the error.
fn pace_sentence(document: &CheckDocument) -> Option<String> {
    let (at_pace, machine, model) = (document.at_pace.as_ref()?, document.machine_error?, document.model_error?);
    let pace = match at_pace.pace {
        pace if pace > 1.005 => format!("{} slower than", percent(pace - 1.0)),
        pace if pace < 0.995 => format!("{} faster than", percent(1.0 - pace)),
        _ => "as fast as".into(),
    };
    let inside = if at_pace.inside_interval { "inside" } else { "outside" };
    Some(format!(
        "the machine was {pace} at calibration: error {}\nat that pace predicted {}: model error {}, {inside} the 80 % interval",
        signed_percent(machine),
        at_pace.predicted_step,
        signed_percent(model),
    ))
}

/// Formats [`Comparison::by_kind`], with the sum as last row.
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

/// Formats [`Comparison::worst`].
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

/// Formats a rate with three significant digits; rates from 100 on as whole numbers.
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
