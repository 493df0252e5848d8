//! `foretell plan --table ROWS,COLUMNS`: what fits, and how fast, over two choices of the job.

use crate::best_of_job::{BestOfJob, best_of_job};
use crate::choices::Choices;
use crate::explain::RISKY;
use crate::failure::{Failure, code};
use crate::method::{Loss, Method};
use crate::usual_stack::Trainer;
use clap::ValueEnum;
use foretell_models::{GraphOptions, Model};
use foretell_program::Profile;
use foretell_reports::{Column, Section, page, table};
use foretell_units::Bytes;
use foretell_units::diagnostic::Mistake;
use schemars::JsonSchema;
use serde::Serialize;

/// A choice of the job that a table varies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Axis {
    /// Length of the sequences.
    Context,
    /// What is trained.
    Method,
    /// Samples per step.
    Batch,
    /// Nodes.
    Nodes,
    /// Devices of one node, then whole nodes of eight.
    Gpus,
    /// Models of one family, smaller and larger ones.
    Model,
    /// How the loss is computed.
    Loss,
}

/// Rows and columns of a table, such as `context,method`.
#[derive(Debug, Clone, Copy)]
pub struct Axes {
    rows: Axis,
    columns: Axis,
}

impl std::str::FromStr for Axes {
    type Err = Mistake;

    fn from_str(text: &str) -> Result<Self, Mistake> {
        let axis = |text: &str| Axis::from_str(text.trim(), true);
        let hint = "write two of context, method, batch, nodes, gpus, model and loss, such as context,method";
        let axes = text.split_once(',').and_then(|(rows, columns)| Some((axis(rows).ok()?, axis(columns).ok()?)));
        match axes {
            Some((rows, columns)) if rows != columns => Ok(Self { rows, columns }),
            _ => Err(Mistake::new(format!("`{text}` is no table"), hint)),
        }
    }
}

/// How a table is printed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// For a terminal.
    #[default]
    Text,
    /// Comma-separated values.
    Csv,
    /// A table in Markdown.
    Markdown,
}

/// The document of `plan --table --json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TableAnswer {
    /// The choice that rows vary: `context`, `method`, `batch`, `nodes`, `gpus`, `model` or `loss`.
    rows: String,
    /// The choice that columns vary.
    columns: String,
    /// The cells, row by row.
    cells: Vec<Cell>,
}

/// The best layout of one of the table's jobs.
#[derive(Debug, Serialize, JsonSchema)]
struct Cell {
    /// The row's value.
    row: String,
    /// The column's value.
    column: String,
    /// Whether the job fits.
    fits: bool,
    /// Peak memory of the fullest device; if no layout fits, the least that any layout needs.
    /// `None` if the job cannot be planned.
    memory_bytes: Option<u64>,
    /// The predicted step.
    step_seconds: Option<f64>,
    /// Tokens per second over all devices, or samples if they are no sequences.
    rate: Option<f64>,
    /// The chance of running out of memory, if it is known.
    chance_of_running_out: Option<f64>,
    /// The layout in words, or why there is none.
    layout: String,
}

const LEGEND: &str = "memory of the fullest device, at tokens (or samples) per second over all devices; `~`: it may run out; `*`: by the \
                      stack's profile; `-`: it does not fit, and the smallest layout needs so much; `?`: it cannot be planned";

/// Longest sequence of a table.
const LONGEST: usize = 1 << 17;
/// Shortest sequence of a table.
const SHORTEST: usize = 1 << 9;

/// Plans every job of a table.
pub fn answer(axes: Axes, choices: &Choices, profile: Option<&Profile>) -> Result<TableAnswer, Failure> {
    let is_varied = |axis: Axis| axes.rows == axis || axes.columns == axis;
    if choices.method.generates() && (is_varied(Axis::Method) || is_varied(Axis::Context)) {
        let message = "a table of a method that generates varies batch, nodes, gpus, model or loss";
        return Err(
            Failure::input(code::OPTION_VALUE, message).hint("state lengths in `--rollout`, and ask for a table of each method")
        );
    }
    let mut cells = Vec::new();
    let mut refusal = None;
    let columns = values(axes.columns, choices)?;
    for row in values(axes.rows, choices)? {
        for column in &columns {
            let mut job = choices.clone();
            set(&mut job, axes.rows, &row);
            set(&mut job, axes.columns, column);
            let (cell, failure) = cell(&job, &row, column, profile)?;
            cells.push(cell);
            refusal = refusal.or(failure);
        }
    }
    // If no job of the table can be planned, report why the first one cannot.
    if let Some(refusal) = refusal.filter(|_| cells.iter().all(|cell| cell.memory_bytes.is_none())) {
        return Err(refusal.into_input());
    }
    Ok(TableAnswer { rows: name(axes.rows), columns: name(axes.columns), cells })
}

fn name(axis: Axis) -> String {
    axis.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The values of an axis, as they would be typed.
fn values(axis: Axis, choices: &Choices) -> Result<Vec<String>, Failure> {
    let doubling = |from: usize, to: usize| -> Vec<String> {
        std::iter::successors(Some(from.max(1)), |size| size.checked_mul(2))
            .take_while(|size| *size <= to)
            .map(|size| size.to_string())
            .collect()
    };
    Ok(match axis {
        Axis::Context => doubling(SHORTEST, LONGEST),
        Axis::Method => [Method::Full, Method::Lora, Method::Qlora].map(|method| method.name().to_owned()).into(),
        Axis::Loss => [Loss::Plain, Loss::Chunked, Loss::Liger].map(|loss| loss.name().to_owned()).into(),
        Axis::Batch => {
            let devices = choices.setting(Trainer::Framework)?.topology.device_count();
            doubling(devices, devices * 64)
        }
        Axis::Nodes => {
            let nodes = choices.setting(Trainer::Framework)?.topology.node_count();
            doubling(nodes, nodes * 16)
        }
        Axis::Gpus => {
            one_kind(choices)?;
            doubling(1, MOST_GPUS)
        }
        Axis::Model => {
            let models = relatives(&choices.model);
            if models.len() < 2 {
                let message = format!("no other sizes of `{}` are in the library", choices.model);
                return Err(Failure::input(code::OPTION_VALUE, message).hint("use another axis, or a model of `foretell models`"));
            }
            models
        }
    })
}

/// The library's name of the topology's only kind of device.
fn one_kind(choices: &Choices) -> Result<String, Failure> {
    let topology = choices.setting(Trainer::Framework)?.topology;
    match topology.device_kinds() {
        [kind] => Ok(kind.name.clone()),
        _ => Err(Failure::input(code::OPTION_VALUE, format!("`{}` has several kinds of device", topology.name()))
            .hint("use the axis `nodes`, or a topology of one kind")),
    }
}

/// The models of the library of the same family, that is, with the same first part of the name; the
/// smallest first.
fn relatives(name: &str) -> Vec<String> {
    let family = |name: &str| name.split('-').next().unwrap_or_default().to_owned();
    let mut found: Vec<(u64, &str)> = Model::zoo()
        .filter(|(known, model)| family(known) == family(name) && model.sample().is_sequence())
        .filter_map(|(known, model)| Some((model.graph(known, &GraphOptions::ONE).ok()?.parameter_count() as u64, known)))
        .collect();
    found.sort_unstable();
    found.into_iter().map(|(_, name)| name.to_owned()).collect()
}

/// Devices of a node. A topology of more devices has several nodes.
const GPUS_OF_NODE: usize = 8;
/// Most devices of a table.
const MOST_GPUS: usize = 64;

fn set(choices: &mut Choices, axis: Axis, value: &str) {
    let number = || Some(value.parse().expect("invariant: the axis has numbers"));
    match axis {
        Axis::Context => choices.sequence = number(),
        Axis::Batch => choices.global_batch = number(),
        Axis::Nodes => choices.nodes = number(),
        Axis::Model => choices.model = value.into(),
        Axis::Gpus => {
            let kind = one_kind(choices).expect("invariant: the axis has one kind");
            let gpus: usize = value.parse().expect("invariant: the axis has numbers");
            let of_node = gpus.min(GPUS_OF_NODE);
            (choices.topology, choices.nodes) = (format!("{}x{of_node}x{kind}", gpus / of_node), None);
        }
        Axis::Method => {
            choices.method.method = Some(Method::from_str(value, true).expect("invariant: the axis has methods"));
            // Adapters apply only to columns whose method has them, and bits only to columns that
            // leave them open.
            if choices.method.method == Some(Method::Full) {
                choices.method.adapter = None;
            }
            if choices.method.method != Some(Method::Lora) {
                choices.method.base_bits = None;
            }
        }
        Axis::Loss => choices.method.loss = Some(Loss::from_str(value, true).expect("invariant: the axis has losses")),
    }
}

/// A job of the table. The failure says why it cannot be planned, if so.
fn cell(job: &Choices, row: &str, column: &str, profile: Option<&Profile>) -> Result<(Cell, Option<Failure>), Failure> {
    let empty = |memory: Option<Bytes>, why: String| Cell {
        row: row.into(),
        column: column.into(),
        fits: false,
        memory_bytes: memory.map(Bytes::count),
        step_seconds: None,
        rate: None,
        chance_of_running_out: None,
        layout: why,
    };
    let best = match best_of_job(job, profile, 1)? {
        BestOfJob::Fits(best) => best,
        BestOfJob::DoesNotFit(needed) => return Ok((empty(needed, "no layout fits".into()), None)),
        BestOfJob::Refused(failure) => return Ok((empty(None, failure.one_line()), Some(failure))),
    };
    let cell = Cell {
        fits: true,
        memory_bytes: best.memory,
        step_seconds: Some(best.step_seconds),
        rate: Some(best.rate),
        chance_of_running_out: best.chance_of_running_out,
        layout: best.layout,
        ..empty(None, String::new())
    };
    Ok((cell, None))
}

impl TableAnswer {
    /// The page of `--report`.
    pub fn page(&self, choices: &Choices) -> Result<String, Failure> {
        let heading = format!("What fits, by {} and {}", self.rows, self.columns);
        let (model, topology) = (&choices.model, &choices.topology);
        Ok(page(&format!("{model} on {topology}"), &[Section::Listing { heading, text: self.text(Format::Text) }])?)
    }

    /// The table as text.
    pub fn text(&self, format: Format) -> String {
        let mut columns: Vec<&str> = Vec::new();
        let mut rows: Vec<&str> = Vec::new();
        for cell in &self.cells {
            for (list, value) in [(&mut columns, &cell.column), (&mut rows, &cell.row)] {
                if !list.contains(&value.as_str()) {
                    list.push(value);
                }
            }
        }
        let of_row = |row: &&str| -> Vec<String> {
            let cells = self.cells.iter().filter(|cell| cell.row == **row).map(Cell::in_short);
            std::iter::once((*row).to_owned()).chain(cells).collect()
        };
        let body: Vec<Vec<String>> = rows.iter().map(of_row).collect();
        let head: Vec<String> =
            std::iter::once(self.rows.clone()).chain(columns.iter().map(|&column| column.to_owned())).collect();
        let lines = |separator: &str, edge: &str, between: Option<String>| -> String {
            let line = |cells: &Vec<String>| format!("{edge}{}{edge}", cells.join(separator)).trim().to_owned();
            std::iter::once(line(&head)).chain(between).chain(body.iter().map(line)).collect::<Vec<_>>().join("\n")
        };
        match format {
            Format::Text => {
                let titles: Vec<Column<'_>> = head.iter().map(|title| Column::numbers(title)).collect();
                format!("{}\n{LEGEND}", table(&titles, &body))
            }
            Format::Csv => self.csv(),
            Format::Markdown => lines(" | ", " | ", Some(format!("|{}", " --- |".repeat(head.len())))),
        }
    }
}

impl TableAnswer {
    /// One line for each job, with each number in its own column.
    fn csv(&self) -> String {
        let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
        let head = format!("{},{},fits,memory_bytes,step_seconds,rate,chance_of_running_out", self.rows, self.columns);
        let line = |cell: &Cell| {
            let memory = cell.memory_bytes.map_or_else(String::new, |bytes| bytes.to_string());
            let numbers = [cell.step_seconds, cell.rate, cell.chance_of_running_out].map(number).join(",");
            format!("{},{},{},{memory},{numbers}", cell.row, cell.column, cell.fits)
        };
        std::iter::once(head).chain(self.cells.iter().map(line)).collect::<Vec<_>>().join("\n")
    }
}

impl Cell {
    fn in_short(&self) -> String {
        match (self.memory_bytes, self.rate) {
            (Some(memory), Some(rate)) => {
                let is_risky = self.chance_of_running_out.is_some_and(|chance| chance > RISKY);
                let by_profile = if self.chance_of_running_out.is_none() { "* " } else { "" };
                format!("{by_profile}{}{} at {rate:.0}/s", if is_risky { "~ " } else { "" }, Bytes::new(memory))
            }
            (Some(memory), None) => format!("- {}", Bytes::new(memory)),
            (None, _) => "?".into(),
        }
    }
}
