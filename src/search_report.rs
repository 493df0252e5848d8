//! The pages of `foretell plan --report`: the answer with its step, and the results of the search.

use crate::binding;
use crate::choices::{Choices, Objective, Setting};
use crate::failure::{Failure, code};
use crate::predict;
use foretell_planner::{Candidate, SearchResult, SizePoint};
use foretell_program::{Profile, compile_training};
use foretell_reports::{Chart, GapPoint, LayoutPoint, Section, page};
use foretell_simulator::{Options, Prediction, Recording, simulate};
use foretell_units::{Bytes, Seconds};

/// Most moments of a search that a page shows: more than a screen has pixels.
const MOST_MOMENTS: usize = 2_000;

/// The page of a search: its best layout, how the search went, and the layouts it returned.
pub fn of_search(
    choices: &Choices,
    setting: &Setting,
    profile: Option<&Profile>,
    planned: &SearchResult,
    history: &[GapPoint],
) -> Result<String, Failure> {
    let Some(best) = planned.candidates.first() else {
        return Err(Failure::undone(code::NOTHING_FITS, "the search returned nothing"));
    };
    let program = compile_training(&setting.model.model, &setting.model.name, &best.plan)?;
    let costs = predict::costs(profile, &setting.topology, &best.plan, &setting.model.model)?;
    let options = Options {
        oversubscription: predict::oversubscription(choices.oversubscribe),
        recording: Recording::Spans,
        ..Options::default()
    };
    let timeline = simulate(&program, &setting.topology, &costs, &options)?.timeline;
    let limits = choices.limits(&best.plan.stack);
    let mut sections = vec![
        binding::answer(&best.plan, &best.prediction, &setting.topology, limits, None)?,
        chart(
            "Timeline",
            Chart::timeline(&program, &[&timeline]),
            "How each rank spends a step of the best layout. Communication counts as exposed while kernels wait for it.",
        ),
        chart(
            "Memory",
            Chart::memory(&program, &timeline, Some(binding::least_limit(&setting.topology, limits))),
            "Bytes in use over the step, and the tensors that hold them at the peak.",
        ),
    ];
    sections.extend(search(choices, setting, planned, history));
    let points = planned.candidates.iter().map(|candidate| layout(choices, setting, candidate)).collect::<Result<_, _>>()?;
    sections.push(chart(
        "Layouts",
        Chart::layouts(points),
        "The best layouts by memory and step time. Choose one for its figures and its plan; `--top` gives more.",
    ));
    let title = format!("{} on {}: the best layout", setting.model.name, setting.topology.name());
    Ok(page(&title, &sections)?)
}

/// The page of `--front`.
pub fn of_front(setting: &Setting, points: &[SizePoint]) -> Result<String, Failure> {
    let point = |point: &SizePoint| LayoutPoint {
        name: format!("{} devices, {}", point.devices, point.layout),
        plan: String::new(),
        step_seconds: point.step_seconds,
        memory_bytes: point.memory_bytes,
        facts: vec![
            ("devices".into(), point.devices.to_string()),
            ("step".into(), Seconds::new(point.step_seconds).to_string()),
            ("memory".into(), Bytes::new(point.memory_bytes).to_string()),
            ("samples per second".into(), format!("{:.1}", point.samples_per_second)),
            ("layout".into(), point.layout.clone()),
        ],
        is_on_front: false,
    };
    let sections = [chart(
        "Step time and memory",
        Chart::layouts(points.iter().map(point).collect()),
        "Layouts that none beats in step time, memory and number of devices together. The line joins those that none beats in \
         step time and memory.",
    )];
    Ok(page(&format!("{} on {}: the Pareto front", setting.model.name, setting.topology.name()), &sections)?)
}

/// How the search went: its progress over time if it was one search for the least time, and its
/// counts.
fn search(choices: &Choices, setting: &Setting, planned: &SearchResult, history: &[GapPoint]) -> Vec<Section> {
    let search = &planned.search;
    let mut sections = Vec::new();
    if choices.is_one_search(setting) && matches!(choices.objective, Objective::Time) {
        let every = history.len().div_ceil(MOST_MOMENTS).max(1);
        let mut points: Vec<GapPoint> = history.iter().step_by(every).copied().collect();
        let (best, bound) = (search.best_seconds, search.lower_bound_seconds);
        points.push(GapPoint { seconds: search.wall_seconds, best, bound });
        sections.push(chart(
            "Search",
            Chart::gap(&points),
            "The best layout so far, and the time below which no layout of the space can be.",
        ));
    }
    let rows = [
        ("layouts of the space", search.layouts),
        ("the same Program as another", search.alike),
        ("needless offload or recomputation", search.needless),
        ("do not divide the model or the batch", search.indivisible),
        ("do not fit", search.out_of_memory),
        ("ruled out by their lower bound", search.bounded_out),
        ("simulated", search.simulated),
        ("simulated for a first answer and around the best", search.probed),
    ];
    let columns = vec![
        ("layouts".to_owned(), foretell_reports::Alignment::Left),
        ("number".to_owned(), foretell_reports::Alignment::Right),
    ];
    let rows = rows.iter().map(|(name, count)| vec![(*name).to_owned(), count.to_string()]).collect();
    sections.push(Section::Table { heading: "Layouts of the search".into(), columns, rows });
    sections
}

fn layout(choices: &Choices, setting: &Setting, candidate: &Candidate) -> Result<LayoutPoint, Failure> {
    let Candidate { plan, prediction, .. } = candidate;
    let memory = prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default();
    Ok(LayoutPoint {
        name: plan.layout.in_words(),
        plan: choices.movable_plan_file(setting, plan)?.to_yaml()?,
        step_seconds: prediction.step_seconds.value(),
        memory_bytes: memory.count(),
        facts: facts(prediction, memory),
        is_on_front: false,
    })
}

fn facts(prediction: &Prediction, memory: Bytes) -> Vec<(String, String)> {
    let parts = &prediction.breakdown_seconds;
    let interval = format!("{} to {}", prediction.step_seconds_p10, prediction.step_seconds_p90);
    let facts = [
        ("step", prediction.step_seconds.to_string()),
        ("80 % interval", interval),
        ("memory of the fullest device", memory.to_string()),
        ("samples per second", format!("{:.1}", prediction.samples_per_second)),
        ("MFU", format!("{:.1} %", prediction.mfu * 100.0)),
        ("compute", parts.compute.to_string()),
        ("exposed communication", parts.exposed_communication.to_string()),
        ("bubble", parts.bubble.to_string()),
        ("update", parts.optimizer.to_string()),
    ];
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}

fn chart(heading: &str, chart: Chart, caption: &str) -> Section {
    Section::Chart { heading: heading.into(), chart: Box::new(chart), caption: caption.into() }
}
