//! `--what-if` and `--critical-path` of `foretell simulate`: the step with other devices or links,
//! and the chain of instructions that decides its duration.

use crate::failure::Failure;
use crate::input;
use crate::plan_file::LoadedPlan;
use crate::predict;
use foretell_program::{Profile, Program};
use foretell_reports::{Column, Section, table};
use foretell_simulator::PlanPrediction;
use foretell_simulator::{
    ChangeablePlan, CriticalPath, Options, PathTime, Prediction, Recording, WhatIf, memory_use, predict_cycle,
};
use foretell_units::Seconds;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;

/// A question and its answer.
pub struct Answer {
    what_if: WhatIf,
    prediction: Prediction,
}

/// Parses the questions.
pub fn read(questions: &[String]) -> Result<Vec<WhatIf>, Failure> {
    questions
        .iter()
        .map(|question| question.parse::<WhatIf>().map_err(|error| Failure::of_input(error).about("--what-if")))
        .collect()
}

/// The examples and the list of quantities for `--help`.
pub fn help() -> String {
    let lines = WhatIf::quantities().map(|(name, what)| format!("  {name:<26}{what}"));
    let lines: Vec<String> = lines.collect();
    format!(
        "Example:\n  foretell simulate --plan plan.yaml --what-if 'inter_node.bandwidth*2' --critical-path\n\n\
         Quantities for --what-if 'NAME*FACTOR' or 'NAME/DIVISOR' (commas join several):\n{}",
        lines.join("\n")
    )
}

/// Predicts the step again for each question, with the same jitter and stragglers.
pub fn answer(
    questions: Vec<WhatIf>,
    predicted: &PlanPrediction,
    loaded: &LoadedPlan,
    profile: Option<&Profile>,
    options: &Options,
) -> Result<Vec<Answer>, Failure> {
    let options = Options { recording: Recording::Ends, ..options.clone() };
    let costs = predict::costs(profile, &loaded.topology, &loaded.plan, &loaded.model.model)?;
    questions
        .into_iter()
        .map(|what_if| {
            if predicted.prediction.is_traced() {
                let model = (&loaded.model.model, loaded.model.name.as_str());
                let plan = ChangeablePlan::new(model, &loaded.plan, &loaded.topology, profile)?;
                return Ok(Answer { prediction: plan.predict(&what_if)?, what_if });
            }
            let topology = what_if.topology(&loaded.topology)?;
            let program = &predicted.compiled.training;
            let costs = what_if.costs(&costs);
            let memory = memory_use(program, Some(&predicted.compiled.evaluation), &topology, &costs);
            let (prediction, _) = predict_cycle(&predicted.compiled, &memory, &topology, &costs, &options)?;
            let prediction = match input::waiting(&LoadedPlan { topology, ..loaded.clone() }, profile, program, &prediction) {
                Some(waiting) => waiting.applied(prediction),
                None => prediction,
            };
            Ok(Answer { what_if, prediction })
        })
        .collect()
}

/// Formats the answers below the unchanged step.
pub fn answers_table(original: &Prediction, answers: &[Answer]) -> String {
    table(&columns(), &rows(original, answers))
}

/// The answers as a section of a report.
pub fn section(heading: &str, original: &Prediction, answers: &[Answer]) -> Section {
    let columns = columns().iter().map(|column| (column.title.to_owned(), column.alignment)).collect();
    Section::Table { heading: heading.to_owned(), columns, rows: rows(original, answers) }
}

fn columns() -> Vec<Column<'static>> {
    let titles = ["step", "change", "compute", "communication", "bubble", "data", "optimizer"];
    std::iter::once(Column::words("what if")).chain(titles.into_iter().map(Column::numbers)).collect()
}

fn rows(original: &Prediction, answers: &[Answer]) -> Vec<Vec<String>> {
    let row = |name: String, prediction: &Prediction, change: String| {
        let parts = &prediction.breakdown_seconds;
        let times =
            [prediction.step_seconds, parts.compute, parts.exposed_communication, parts.bubble, parts.data, parts.optimizer];
        let mut cells: Vec<String> = times.iter().map(Seconds::to_string).collect();
        cells.insert(1, change);
        cells.insert(0, name);
        cells
    };
    let mut rows = vec![row("unchanged".into(), original, String::new())];
    for answer in answers {
        let change = format!("{:+.1} %", change(original, answer) * 100.0);
        rows.push(row(answer.what_if.to_string(), &answer.prediction, change));
    }
    rows
}

/// The answers as JSON.
pub fn answers_document(original: &Prediction, answers: &[Answer]) -> Vec<WhatIfAnswer> {
    let documents = answers.iter().map(|answer| WhatIfAnswer {
        what_if: answer.what_if.to_string(),
        step_seconds: answer.prediction.step_seconds.value(),
        change: change(original, answer),
        predicted: answer.prediction.clone(),
    });
    documents.collect()
}

/// The answer to one `--what-if`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "WhatIf")]
pub struct WhatIfAnswer {
    /// The question.
    what_if: String,
    /// The step.
    step_seconds: f64,
    /// Relative change of the step.
    change: f64,
    /// The complete prediction.
    predicted: Prediction,
}

/// The critical path, with every segment.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "CriticalPath")]
pub struct PathAnswer {
    /// Time on the path by category.
    by_time: PathTime,
    /// Time on the path by kind of instruction, longest first.
    by_kind: Vec<KindAnswer>,
    /// The step less all segments: handoffs and overheads.
    between_seconds: f64,
    /// The instructions on the path.
    segments: Vec<SegmentAnswer>,
}

/// Time of one kind of instruction.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "KindTime")]
struct KindAnswer {
    /// The kind.
    kind: String,
    /// Its time.
    seconds: f64,
}

/// An instruction on the critical path.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Segment")]
struct SegmentAnswer {
    /// The rank.
    rank: usize,
    /// The instruction in its list.
    instruction: usize,
    /// The name of its operator or tensor.
    name: Option<String>,
    /// Its kind.
    kind: String,
    /// When the path enters it.
    start_seconds: f64,
    /// When the path leaves it.
    end_seconds: f64,
}

/// Relative change of the step time.
fn change(original: &Prediction, answer: &Answer) -> f64 {
    let before = original.step_seconds.value();
    if before > 0.0 { answer.prediction.step_seconds.value() / before - 1.0 } else { 0.0 }
}

/// Kinds of time on the critical path. Together with the time between instructions they make the
/// step.
fn path_times(path: &CriticalPath) -> [(&'static str, Seconds); 5] {
    [
        ("compute", path.by_time.compute),
        ("communication", path.by_time.communication),
        ("data", path.by_time.data),
        ("optimizer", path.by_time.optimizer),
        ("between instructions", path.between),
    ]
}

/// Formats the critical path by kind of time and by kind of instruction.
pub fn path_table(path: &CriticalPath) -> String {
    let times = path_times(path);
    let step: f64 = times.iter().map(|(_, time)| time.value()).sum();
    let share = |time: Seconds| if step > 0.0 { time.value() / step * 100.0 } else { 0.0 };
    let rows = |parts: &mut dyn Iterator<Item = (&str, Seconds)>| -> Vec<Vec<String>> {
        parts.map(|(what, time)| vec![what.into(), time.to_string(), format!("{:.1} %", share(time))]).collect()
    };
    let columns = |title| [Column::words(title), Column::numbers("time"), Column::numbers("of the step")];
    let shown = times.iter().filter(|(_, time)| *time > Seconds::ZERO).copied();
    let by_time = table(&columns("on the critical path"), &rows(&mut { shown }));
    let kinds = path.by_kind.iter().map(|(kind, time)| (kind.as_str(), *time)).chain([("between instructions", path.between)]);
    format!("{by_time}\n\n{}", table(&columns("by instruction"), &rows(&mut { kinds })))
}

/// Makes the document of the times on a critical path.
pub fn times_document(path: &CriticalPath) -> BTreeMap<String, f64> {
    path_times(path).into_iter().map(|(name, time)| (name.replace(' ', "_"), time.value())).collect()
}

/// Formats the shares of the critical path as a line.
pub fn path_line(path: &CriticalPath) -> String {
    let times = path_times(path);
    let total: Seconds = times.iter().fold(Seconds::ZERO, |sum, (_, time)| sum + *time);
    let percent = |time: Seconds| if total > Seconds::ZERO { 100.0 * (time / total) } else { 0.0 };
    let shown = times.iter().filter(|(_, time)| percent(*time) >= 0.5);
    let shown: Vec<String> = shown.map(|(name, time)| format!("{name} {:.0} %", percent(*time))).collect();
    format!("of the critical path: {}", shown.join(", "))
}

/// The critical path as JSON, with every segment.
pub fn path_document(path: &CriticalPath, program: &Program) -> PathAnswer {
    let segments = path.segments.iter().map(|segment| {
        let stage = program.list_of(segment.rank);
        let instruction = stage.instruction(segment.instruction);
        let (start, end) = (Seconds::from(segment.start), Seconds::from(segment.end));
        SegmentAnswer {
            rank: segment.rank.0,
            instruction: segment.instruction.0 as usize,
            name: stage.names.get(instruction.name as usize).map(|name| name.to_string()),
            kind: instruction.operation.kind().to_string(),
            start_seconds: start.value(),
            end_seconds: end.value(),
        }
    });
    PathAnswer {
        by_time: path.by_time,
        by_kind: path.by_kind.iter().map(|(kind, time)| KindAnswer { kind: kind.clone(), seconds: time.value() }).collect(),
        between_seconds: path.between.value(),
        segments: segments.collect(),
    }
}
