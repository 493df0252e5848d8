//! `foretell import kineto`: traces of PyTorch's profiler as a profile of kernel times and, with
//! `--run`, as the measured side of a run's folder.

use super::Arguments;
use crate::failure::{Failure, code};
use crate::inputs;
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::predict;
use crate::run_folder::{Measured, Predicted, RunFolder};
use foretell_executor::{StepSpans, timeline_file};
use foretell_export::{KinetoTrace, MatchedStep, TracedMachine, Unmatched, traced_profile, unmatched};
use foretell_program::{Profile, Program, Rank};
use foretell_units::{SchemaVersion, median};
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The most operators that are listed.
const MOST_LISTED: usize = 8;

/// Runs the import.
pub(super) fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let plan = arguments.plan.as_deref().ok_or_else(|| {
        Failure::input(code::OPTION_MISSING, "a trace does not say the plan that was run")
            .hint("describe it in a plan file and add `--plan`")
    })?;
    let loaded = PlanFile::load(plan)?;
    let compiled = loaded.compile()?;
    let program = &compiled.training;
    let traces =
        output::with_spinner("traces", || arguments.files.iter().map(|file| trace(file)).collect::<Result<Vec<_>, _>>())?;
    let of_ranks = traces_of_ranks(&traces, program)?;
    let matched: Vec<Vec<MatchedStep>> = of_ranks
        .iter()
        .enumerate()
        .map(|(rank, trace)| trace.steps.iter().map(|step| step.matched(program.list_of(Rank(rank)))).collect())
        .collect();
    let left = of_ranks.first().map_or(Vec::new(), |trace| unmatched(&trace.steps, program.list_of(Rank(0))));
    let step_seconds = median_step(&of_ranks);
    list(&left, step_seconds);
    let profile = traced_profile(program, &matched, &machine(&of_ranks, &loaded));
    require_kernels(&profile, arguments)?;
    let yaml = serde_saphyr::to_string(&profile).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))?;
    if let Some(path) = &arguments.output {
        output::write(path, yaml.as_bytes())?;
    }
    if let Some(folder) = &arguments.run {
        let costs = inputs::profile(arguments.profile.as_deref())?;
        let measured = Measured {
            schema_version: SchemaVersion,
            step_seconds,
            steps: of_ranks.first().map_or(0, |rank| rank.steps.len()),
            peak_memory_bytes: Vec::new(),
            checkpoint_seconds: None,
            checkpoint_write_seconds: None,
            reference: None,
        };
        keep(
            &RunFolder::claim(Some(folder), false)?,
            loaded,
            costs.as_ref().unwrap_or(&profile),
            &measured,
            &of_ranks,
            &matched,
        )?;
    }
    report(arguments, &profile, &yaml, &left, step_seconds, json)
}

fn trace(file: &Path) -> Result<KinetoTrace, Failure> {
    let trace = KinetoTrace::parse(&inputs::read_trace(file)?).map_err(|error| Failure::of_input(error).in_file(file))?;
    if trace.steps.is_empty() {
        let hint = "profile whole steps, and call `prof.step()` after each";
        return Err(Failure::input(code::TRACE, "no step of the trace has operators").hint(hint).in_file(file));
    }
    Ok(trace)
}

/// The trace of each rank. A rank without a trace gets that of another rank that runs the same
/// instructions.
fn traces_of_ranks<'a>(traces: &'a [KinetoTrace], program: &Program) -> Result<Vec<&'a KinetoTrace>, Failure> {
    let ranks = program.mesh.world_size();
    if let Some(traced) = traces.iter().filter_map(|trace| trace.world_size).find(|&traced| traced != ranks) {
        let hint = "make the plan's layout that of the traced run";
        return Err(
            Failure::input(code::TRACE, format!("the traced run had {traced} ranks, and the plan has {ranks}")).hint(hint)
        );
    }
    let own = |index: usize| traces.get(index).map(|trace| trace.rank.unwrap_or(index));
    let known: Vec<(usize, &KinetoTrace)> =
        traces.iter().enumerate().filter_map(|(index, trace)| Some((own(index)?, trace))).collect();
    let mut seen = BTreeSet::new();
    if let Some((rank, _)) = known.iter().find(|(rank, _)| !seen.insert(*rank)) {
        return Err(Failure::input(code::TRACE, format!("two traces are of rank {rank}")).hint("give one trace of each rank"));
    }
    (0..ranks)
        .map(|rank| {
            let is_equivalent = |other: usize| other < ranks && program.list_index(Rank(other)) == program.list_index(Rank(rank));
            let exact = known.iter().find(|(other, _)| *other == rank);
            let found = exact.or_else(|| known.iter().find(|(other, _)| is_equivalent(*other)));
            found.map(|(_, trace)| *trace).ok_or_else(|| {
                let hint = "give a trace of one rank of each pipeline stage";
                Failure::input(code::TRACE, format!("there is no trace of rank {rank}, nor of one that runs the same")).hint(hint)
            })
        })
        .collect()
}

/// The median step of the slowest rank, in seconds.
fn median_step(traces: &[&KinetoTrace]) -> f64 {
    let of_trace = |trace: &&KinetoTrace| median(trace.steps.iter().map(|step| step.end.saturating_sub(step.start)), Ord::cmp);
    traces.iter().filter_map(of_trace).max().expect("invariant: a trace has a step") as f64 * 1e-9
}

fn machine(traces: &[&KinetoTrace], loaded: &LoadedPlan) -> TracedMachine {
    let first = traces.first();
    let device = first.and_then(|trace| trace.device.clone());
    let start = first.and_then(|trace| trace.steps.first()).map_or(0, |step| step.start);
    TracedMachine {
        kind: loaded.topology.device_kinds().first().map_or_else(String::new, |kind| kind.name.clone()),
        is_accelerator: device.is_some(),
        device: device.unwrap_or_else(|| "CPU".into()),
        transport: first.and_then(|trace| trace.transport.clone()).unwrap_or_else(|| "none".into()),
        measured_at: start / 1_000_000_000,
    }
}

/// Refuses traces that belong to another model, that is, in which no kernel of the plan was found.
fn require_kernels(profile: &Profile, arguments: &Arguments) -> Result<(), Failure> {
    if !profile.kernels.iter().any(|sample| sample.kernel.is_matrix_product()) {
        let file = arguments.files.first().map_or(Path::new(""), PathBuf::as_path);
        let hint = "check `model`, `micro_batch` and `sequence` of the plan";
        return Err(Failure::input(code::TRACE, "none of the plan's products is in the trace").hint(hint).in_file(file));
    }
    Ok(())
}

/// Names the operators that belong to no instruction, if they take a notable share of the step.
fn list(left: &[Unmatched], step_seconds: f64) {
    let total = left.iter().fold(0_u64, |total, kernel| total.saturating_add(kernel.nanoseconds));
    let share = |nanoseconds: u64| nanoseconds as f64 * 1e-9 / step_seconds.max(f64::MIN_POSITIVE);
    if share(total) < 0.001 {
        return;
    }
    output::note(&format!(
        "{:.1}% of a step is in operators that the plan has no instruction for, and counts as `host`:",
        100.0 * share(total)
    ));
    for one in left.iter().take(MOST_LISTED) {
        output::note(&format!("  {} x {}: {:.2}%", one.count, one.name, 100.0 * share(one.nanoseconds)));
    }
}

/// Writes a run's folder: the prediction, and the measured spans.
fn keep(
    folder: &RunFolder,
    loaded: LoadedPlan,
    profile: &Profile,
    measured: &Measured,
    traces: &[&KinetoTrace],
    matched: &[Vec<MatchedStep>],
) -> Result<(), Failure> {
    let predicted = predict::predict_own(&loaded, Some(profile), true)?;
    folder.keep_plan(&loaded)?;
    folder.keep_prediction(&Predicted {
        schema_version: SchemaVersion,
        name: loaded.model.name.clone(),
        prediction: predicted.prediction,
        timeline: predicted.timeline,
        input: None,
    })?;
    for (rank, (trace, steps)) in traces.iter().zip(matched).enumerate() {
        // Numbered from 1: step 0 would count as warming up.
        let spans = trace.steps.iter().zip(steps).zip(1..).map(|((step, matched), number)| StepSpans {
            step: number,
            start: step.start,
            end: step.end,
            spans: matched.spans.clone(),
        });
        output::write(&folder.file(&format!("timeline/{rank}.json")), &timeline_file(Rank(rank), 0, spans.collect())?)?;
    }
    // A trace has no losses.
    output::write(&folder.file("metrics.jsonl"), b"")?;
    output::write(&folder.file("evaluation.jsonl"), b"")?;
    folder.keep_measured(measured)
}

/// The document of `import kineto`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct KinetoAnswer {
    /// The text of the profile.
    profile: String,
    /// The file that it was written to.
    file: Option<PathBuf>,
    /// The folder of the measured run.
    run: Option<PathBuf>,
    /// The measured step.
    measured_step_seconds: f64,
    /// Kernels of the profile.
    kernels: usize,
    /// Collectives and messages of the profile.
    exchanges: usize,
    /// Kernels of the traces that no instruction explains.
    unread: Vec<UnreadKernel>,
}

/// A kernel of a trace that no instruction explains.
#[derive(Debug, Serialize, JsonSchema)]
pub struct UnreadKernel {
    /// The kernel's name.
    name: String,
    /// How often it ran.
    count: usize,
    /// The total time that it took.
    seconds: f64,
}

fn report(
    arguments: &Arguments,
    profile: &Profile,
    yaml: &str,
    left: &[Unmatched],
    step_seconds: f64,
    json: bool,
) -> Result<(), Failure> {
    if json {
        let left: Vec<_> = left
            .iter()
            .map(|kernel| UnreadKernel {
                name: kernel.name.clone(),
                count: kernel.count,
                seconds: kernel.nanoseconds as f64 * 1e-9,
            })
            .collect();
        return output::json(&KinetoAnswer {
            profile: yaml.into(),
            file: arguments.output.clone(),
            run: arguments.run.clone(),
            measured_step_seconds: step_seconds,
            kernels: profile.kernels.len(),
            exchanges: profile.exchanges.len(),
            unread: left,
        });
    }
    let (kernels, exchanges) = (profile.kernels.len(), profile.exchanges.len());
    match &arguments.output {
        Some(path) => output::line(&format!("times of {kernels} kernels and {exchanges} collectives are in {}", path.display()))?,
        None if arguments.run.is_none() => output::line(yaml.trim_end())?,
        None => {}
    }
    match &arguments.run {
        Some(run) => output::line(&format!(
            "the measured run is in {0}; `foretell check {0}` lays the prediction beside it",
            run.display()
        )),
        None => Ok(()),
    }
}
