//! `foretell plan`: searches the fastest layouts of a model on a topology.

mod answer;
mod refused;

pub use answer::{PlanAnswer, PointsAnswer, document};

use crate::choices::{Choices, Objective, Setting};
use crate::failure::{Failure, code};
use crate::fit_table::{Axes, Format as TableFormat};
use crate::host::Instant;
use crate::lengths::{DataLengths, LengthChoices, LengthsAnswer};
use crate::modes::{ModeAnswers, ModeChoice};
use crate::objective_words::ObjectiveWords;
use crate::plan_file::{LoadedPlan, PlanFile};
use crate::search_progress::{ProgressFile, SearchMoment};
use crate::usual_stack::Trainer;
use crate::{
    breakeven, changes, explain, fit_table, gpus_needed, inputs, modes, output, post_training, predict, running_cost,
    search_report, sizes, what_fits,
};
use answer::ComparedAnswer;
use clap::Args;
use foretell_planner::{Candidate, PlannerError, Progress, SizePoints, enough_nodes, front, scaling};
use foretell_program::{MOST_RANKS, Profile};
use foretell_reports::GapPoint;
use foretell_units::diagnostic::{Mistake, one_line};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Find the fastest layouts of a model on a topology
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell plan --model resnet50 --topology dgx-a100-80g --global-batch 256 --precision bf16 --top 3"
)]
pub struct Arguments {
    #[command(flatten)]
    pub choices: Choices,
    #[command(flatten)]
    lengths: LengthChoices,
    #[command(flatten)]
    running: running_cost::Questions,
    /// Measured costs, from `foretell calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Number of layouts to show; up to 10 of them differ in more than details such as buckets
    #[arg(long, default_value_t = 5, value_name = "K")]
    top: usize,
    /// Explain the answer: what was searched, what binds, what the others lose, what would change
    /// it
    #[arg(long)]
    explain: bool,
    /// Find the best layout at each size; the number of devices doubles from the first to the
    /// second
    #[arg(long, value_name = "8..4096", value_parser = device_range, conflicts_with_all = ["output", "explain", "front", "lengths"])]
    scaling: Option<(usize, usize)>,
    /// Pareto front of step time, memory and devices
    #[arg(long, conflicts_with_all = ["output", "explain", "lengths"])]
    front: bool,
    /// Lay a plan of your own beside the answer: its prediction, and where the difference comes
    /// from
    #[arg(long, value_name = "FILE", conflicts_with_all = ["scaling", "front"])]
    compare: Option<PathBuf>,
    /// Find from which bandwidth or rate on which layout is the fastest: a quantity of `simulate
    /// --what-if`
    #[arg(long, value_name = "inter_node.bandwidth", value_parser = breakeven::quantity, conflicts_with_all = ["scaling", "front", "table", "gpus_needed", "mode", "lengths"])]
    breakeven: Option<String>,
    /// Write the plot of `--scaling` or `--front` into a folder (SVG and PNG)
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Plan a table of jobs and say which fit, how large and how fast: two of context, method,
    /// batch, nodes, gpus, model and loss
    #[arg(long, value_name = "context,method", conflicts_with_all = ["output", "explain", "front", "scaling", "compare", "progress", "lengths"])]
    table: Option<Axes>,
    /// Form of the table
    #[arg(long, value_enum, default_value_t, requires = "table")]
    table_format: TableFormat,
    /// Find the least number of each of these devices on which the job fits, in place of
    /// `--topology`
    #[arg(long, value_name = "rtx-4090,a100-80g,...", value_delimiter = ',', conflicts_with_all = ["topology", "nodes", "output", "explain", "front", "scaling", "compare", "report", "progress", "table", "lengths"])]
    gpus_needed: Vec<String>,
    /// Modes to search: how the replicas of a model stay together
    #[arg(long, value_enum, default_value_t, conflicts_with_all = ["scaling", "front", "lengths"])]
    mode: ModeChoice,
    /// A table of the samples that each mode needs to reach a loss, in place of the built-in one
    #[arg(long, value_name = "FILE", requires = "mode")]
    samples_needed: Option<PathBuf>,
    /// Write one self-contained HTML page: the answer, the best layout's step, and the search
    #[arg(long, value_name = "FILE", conflicts_with_all = ["scaling", "lengths"])]
    report: Option<PathBuf>,
    /// Write the search's progress into a file as it goes, for `foretell serve FILE`
    #[arg(long, value_name = "FILE", conflicts_with_all = ["scaling", "front"])]
    progress: Option<PathBuf>,
    /// Write the best plan to a file
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let started = Instant::now();
    let profile = inputs::profile(arguments.profile.as_deref())?;
    // A profile is measured on Foretell's own kernels, and only its own executor runs the other
    // modes.
    let is_ours = profile.is_some() || arguments.mode == ModeChoice::Any;
    let has_policy = arguments.choices.method.generates();
    if has_policy {
        arguments.refuse_of_policies()?;
    } else {
        arguments.refuse_running_costs()?;
    }
    arguments.refuse_plots_of_one_layout()?;
    if !arguments.gpus_needed.is_empty() {
        let find = || gpus_needed::answer(&arguments.gpus_needed, &arguments.choices, profile.as_ref());
        let answer = output::with_spinner("search", find)?;
        return if json { output::json(&answer) } else { output::line(&answer.text()) };
    }
    if let Some(axes) = arguments.table {
        let answer = output::with_spinner("search", || fit_table::answer(axes, &arguments.choices, profile.as_ref()))?;
        if let Some(path) = &arguments.report {
            output::write(path, answer.page(&arguments.choices)?.as_bytes())?;
        }
        return if json { output::json(&answer) } else { output::line(&answer.text(arguments.table_format)) };
    }
    if has_policy {
        let setting = arguments.choices.setting(Trainer::Framework)?;
        let files = (arguments.top, arguments.output.as_deref(), arguments.report.as_deref());
        return post_training::run_plan(&arguments.choices, &setting, profile.as_ref(), (files, &arguments.running), json);
    }
    let trainer = if is_ours { Trainer::Ours } else { Trainer::Framework };
    let (choices, lengths) = arguments.lengths.apply(&arguments.choices, trainer)?;
    let choices = &choices;
    let mut setting = choices.setting(trainer)?;
    if let Some(price) = &arguments.running.device_price {
        setting.topology = setting.topology.with_device_price(price);
    }
    let most = setting.topology.device_kinds().iter().map(|kind| kind.memory).max();
    let most = most.expect("invariant: a topology has a kind of device");
    if let Some(limit) = choices.memory_limit.filter(|limit| *limit > most) {
        output::note(&format!("`--memory-limit {limit}` is more than a device has: {most}, which is the limit"));
    }
    let compared = arguments.compare.as_deref().map(|path| compared(path, profile.as_ref(), choices, &setting)).transpose()?;
    if arguments.scaling.is_some() || arguments.front {
        return points(arguments, &setting, profile.as_ref(), started, json);
    }
    let history: Mutex<Vec<GapPoint>> = Mutex::new(Vec::new());
    let file = |path: &PathBuf| {
        let (model, topology) = (&setting.model.name, &setting.topology);
        ProgressFile::create(path, model, topology.name(), topology.device_count())
    };
    let file = Mutex::new(arguments.progress.as_ref().map(file).transpose()?);
    let bar = output::spinner("search");
    let watch = |seconds: f64, progress: Progress| {
        let moment = SearchMoment::new(seconds, progress);
        bar.set_message(format!("{} simulated, gap {:.1} %", progress.simulated, moment.gap()));
        if let Ok(mut history) = history.lock() {
            history.push(moment.point());
        }
        if let Ok(mut file) = file.lock()
            && let Some(file) = file.as_mut()
        {
            file.add(moment);
        }
    };
    let searched = choices.search_watched(&mut setting, profile.as_ref(), arguments.top, &watch);
    bar.finish_and_clear();
    let history = history.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    if let Some(file) = file.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner) {
        file.finish(started.elapsed().as_secs_f64())?;
    }
    let mut planned = match searched {
        Err(Failure::Unplanned(PlannerError::OutOfMemory { needed, device, limit, hint })) if !choices.oversubscribe => {
            if !setting.taken.is_empty() {
                output::note(&format!("defaults: {}", setting.taken.join(", ")));
            }
            let hint = match what_fits::in_words(choices, profile.as_ref())? {
                Some(changes) if choices.global_batch.is_some() => format!("it fits with {changes}"),
                Some(changes) => {
                    format!("it fits with {changes}; all with `--global-batch {}`", setting.base.global_batch)
                }
                None => {
                    let enough = enough_nodes(&choices.job(&setting, profile.as_ref(), started)).unwrap_or(None);
                    enough.map_or(hint.clone(), |nodes| format!("{hint}; it fits on {nodes} such nodes"))
                }
            };
            return Err(Failure::Unplanned(PlannerError::OutOfMemory { needed, device, limit, hint }));
        }
        planned => planned?,
    };
    let rank = |lengths: &DataLengths| output::with_spinner("lengths", || lengths.rank(&mut planned, &setting, profile.as_ref()));
    let lengths = lengths.as_ref().map(rank).transpose()?;
    let modes = (arguments.mode == ModeChoice::Any)
        .then(|| modes::compare(choices, &setting, profile.as_ref(), &planned, arguments.samples_needed.as_deref()))
        .transpose()?;
    let best_mode = modes.as_ref().and_then(ModeAnswers::best);
    let Some(best) = best_mode.or(planned.candidates.first()) else {
        return Err(Failure::undone(code::NOTHING_FITS, "the search returned nothing"));
    };
    if let Some(path) = &arguments.output {
        let mut file = choices.plan_file(&setting, &best.plan);
        file.relative_to(
            Path::new("."),
            path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new(".")),
        )?;
        output::write(path, file.to_yaml()?.as_bytes())?;
    }
    if let Some(path) = &arguments.report {
        let page = search_report::of_search(choices, &setting, profile.as_ref(), &planned, &history)?;
        output::write(path, page.as_bytes())?;
    }
    let remarks = predict::costs(profile.as_ref(), &setting.topology, &best.plan, &setting.model.model)?.remarks;
    predict::print_caveats(&setting.topology, &best.prediction, best.plan.mesh()?.world_size(), &remarks);
    let breakeven = arguments.breakeven.as_deref().map(|quantity| {
        let find = || breakeven::answer(quantity, &planned, &setting, choices, profile.as_ref());
        output::with_spinner("simulate", find)
    });
    let breakeven = breakeven.transpose()?;
    let running = arguments.running.ask().then(|| arguments.cost_of(best, &setting, choices, profile.as_ref(), lengths.as_ref()));
    let running = running.transpose()?;
    if json {
        let mut document = document(choices, &setting, &planned)?;
        if let Some(running) = &running {
            let (cost, goodput) = running.documents();
            (document.cost, document.goodput) = (Some(cost), goodput);
        }
        if let Some(modes) = &modes {
            document.plan = Some(choices.movable_plan_file(&setting, &best.plan)?);
            document.predicted = Some(best.prediction.clone());
            document.modes = Some(modes.document(choices, &setting)?);
        }
        (document.breakeven, document.lengths) = (breakeven, lengths);
        if let Some(compared) = &compared {
            document.compared =
                arguments.compare.clone().map(|plan| ComparedAnswer { plan, predicted: compared.prediction.clone() });
        }
        return output::json(&document);
    }
    let objective = ObjectiveWords::new(choices.objective, setting.topology.currency());
    if let Some(warning) = explain::cut_off(&planned, &objective) {
        output::line(&warning)?;
    }
    if let Some(line) = explain::fit(&best.prediction, &setting.topology, choices.method.is_fine_tuning()) {
        output::line(&line)?;
    }
    let chance = best.prediction.chance_of_running_out.unwrap_or(0.0);
    if (arguments.explain && chance > explain::RISKY || best.prediction.probably_runs_out())
        && let Some(changes) = what_fits::in_words(choices, profile.as_ref())?
    {
        let what = if best.prediction.probably_runs_out() { "it fits with" } else { "more memory stays free with" };
        output::line(&format!("{what} {changes}"))?;
    }
    output::line(&format!("{}\n{}", explain::title(&setting), predict::layouts(&planned.candidates, &objective)))?;
    if let Some(lengths) = &lengths {
        output::line("these steps have samples as long as the longest; over the data set:")?;
        output::line(&lengths.text())?;
    }
    if let Some(table) = running.as_ref().and_then(running_cost::Answers::table) {
        output::line(&format!("the run, by layout 1\n{table}"))?;
    }
    for line in modes.iter().flat_map(ModeAnswers::lines) {
        output::line(&line)?;
    }
    // Other objectives do not choose by time, and a search that was cut off has no time left.
    // Predicting traced steps again takes moments, so that is left to `--explain`.
    let asks_for_time =
        matches!(choices.objective, Objective::Time) && !planned.search.is_cut_off && !best.prediction.is_traced();
    let changes = (asks_for_time && !arguments.explain).then(|| changes::in_short(&planned, &setting, profile.as_ref()));
    let changes = changes.transpose()?;
    for line in explain::in_short(&planned, &setting, choices, changes)? {
        output::line(&line)?;
    }
    if let (Some(compared), Some(path)) = (&compared, &arguments.compare) {
        output::line(&explain::comparison(best, compared, &path.display().to_string()))?;
    }
    if let Some(breakeven) = &breakeven {
        output::line(&breakeven.text())?;
    }
    if !setting.taken.is_empty() {
        output::line(&format!("defaults: {}", setting.taken.join(", ")))?;
    }
    if arguments.explain {
        output::line(&explain::explanation(&planned, &setting, profile.as_ref(), choices)?)?;
    }
    match &arguments.output {
        Some(path) if modes.is_some() => output::line(&format!("the best mode, with its layout, is in {}", path.display())),
        Some(path) => output::line(&format!("layout 1 is in {}", path.display())),
        None => Ok(()),
    }
}

impl Arguments {
    /// The costs of a run of the best layout.
    fn cost_of(
        &self,
        best: &Candidate,
        setting: &Setting,
        choices: &Choices,
        profile: Option<&Profile>,
        lengths: Option<&LengthsAnswer>,
    ) -> Result<running_cost::Answers, Failure> {
        let loaded = choices.loaded(setting, &best.plan, PathBuf::from("layout 1"))?;
        let predicted = predict::predict(&loaded, profile, choices.oversubscribe)?;
        let pace = lengths.map_or_else(|| running_cost::Pace::of(&predicted), LengthsAnswer::pace);
        running_cost::answer(&self.running, &predicted, pace, &loaded)
    }
}

/// The prediction of the plan file that is compared with the answer.
fn compared(path: &Path, profile: Option<&Profile>, choices: &Choices, setting: &Setting) -> Result<Candidate, Failure> {
    let loaded = PlanFile::load(path)?;
    if let Some(difference) = difference_of_jobs(&loaded, choices, setting)? {
        let message = format!("it is another job, whose step cannot be compared: {}", difference.message);
        return Err(Failure::input(code::PLAN_OTHER_JOB, message).hint(difference.hint).in_file(path));
    }
    let predicted = predict::predict(&loaded, profile, choices.oversubscribe)?;
    let value = predicted.prediction.step_seconds.value();
    Ok(Candidate { plan: loaded.plan, prediction: predicted.prediction, value })
}

/// Returns the reason why a plan file is not another layout of the same job, with a hint; `None` if
/// it is one.
fn difference_of_jobs(loaded: &LoadedPlan, choices: &Choices, setting: &Setting) -> Result<Option<Mistake>, Failure> {
    let (plan, base) = (&loaded.plan, &setting.base);
    if loaded.model.model != setting.model.model {
        let message = format!("its model is not `{}`", setting.model.name);
        return Ok(Some(Mistake::new(message, "give its model to `--model`")));
    }
    // The search may have chosen another order of the nodes.
    let first = setting.topology.node_groups().first().map(|group| group.name.as_str());
    let reordered = match first {
        Some(first) => loaded.topology.clone().beginning_with(first).ok(),
        None => Some(loaded.topology.clone()),
    };
    if reordered.as_ref() != Some(&setting.topology) {
        let hint = "give its topology and number of nodes to `--topology` and `--nodes`";
        return Ok(Some(Mistake::new(format!("its devices are not those of `{}`", setting.topology.name()), hint)));
    }
    let formats = choices.formats(setting);
    let fields = [
        ("global_batch", plan.global_batch.to_string(), base.global_batch.to_string(), plan.global_batch == base.global_batch),
        ("precision", plan.precision.to_string(), base.precision.to_string(), formats.contains(&plan.precision)),
        ("optimizer", plan.optimizer.name().into(), base.optimizer.name().into(), plan.optimizer == base.optimizer),
        (
            "routing",
            plan.workload.routing.to_string(),
            base.workload.routing.to_string(),
            plan.workload.routing == base.workload.routing,
        ),
        ("stack", plan.stack.name().into(), base.stack.name().into(), plan.stack == base.stack),
    ];
    let different = fields.into_iter().find(|(.., is_same)| !is_same);
    Ok(different.map(|(name, theirs, ours, _)| {
        let option = name.replace('_', "-");
        let message = format!("its `{name}` is {theirs}, that of the search {ours}");
        Mistake::new(message, format!("add `--{option} {theirs}`"))
    }))
}

/// Answers `--scaling` or `--front`.
fn points(
    arguments: &Arguments,
    setting: &Setting,
    profile: Option<&Profile>,
    started: Instant,
    json: bool,
) -> Result<(), Failure> {
    let job = arguments.choices.job(setting, profile, started);
    let (name, SizePoints { points, left_out }) = output::with_spinner("search", || match arguments.scaling {
        Some(sizes) => scaling(&job, sizes).map(|found| ("scaling", found)),
        None => front(&job).map(|found| ("front", found)),
    })?;
    for (size, error) in &left_out {
        output::note(&format!("{size} are left out: {}", one_line(error)));
    }
    if let Some(folder) = &arguments.plots {
        let plot = sizes::plot(name, setting, &points);
        output::write(&folder.join(format!("{name}.svg")), plot.svg()?.as_bytes())?;
        output::write(&folder.join(format!("{name}.png")), &plot.png()?)?;
    }
    if let Some(path) = &arguments.report {
        output::write(path, search_report::of_front(setting, &points)?.as_bytes())?;
    }
    if json {
        let (scaling, front) = if arguments.front { (None, Some(points)) } else { (Some(points), None) };
        return output::json(&PointsAnswer { scaling, front });
    }
    let (model, topology, stack) = (&setting.model.name, setting.topology.name(), setting.base.stack.name());
    output::line(&format!("{model} on {topology}, trained by {stack}\n{}", sizes::points_table(&points)))
}

/// Parses a range of device counts, such as `8..4096`.
fn device_range(text: &str) -> Result<(usize, usize), Mistake> {
    let wrong = || Mistake::new(format!("`{text}` is not a range of device counts"), "write for example 8..4096");
    let (from, to) = text.split_once("..").ok_or_else(wrong)?;
    match (from.trim().parse(), to.trim().parse()) {
        (Ok(from), Ok(to)) if from > 0 && from <= to && to <= MOST_RANKS => Ok((from, to)),
        _ => Err(wrong()),
    }
}
