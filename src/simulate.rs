//! `foretell simulate`: predicts a plan's step.

use crate::beside;
use crate::binding::{self, Limits};
use crate::explain;
use crate::failure::{Failure, code};
use crate::lengths::{DataLengths, LengthChoices, LengthsAnswer};
use crate::method::{Method, MethodChoices};
use crate::output;
use crate::plan_file::{LoadedPlan, PlanFile, PolicyTraining};
use crate::post_training;
use crate::predict;
use crate::replaced_method;
use crate::running_cost::{self, Pace};
use crate::trace_file::{self, TraceRanks};
use crate::what_if;
use crate::{input, inputs};
use clap::Args;
use foretell_program::{Profile, Rank};
use foretell_reports::{Chart, Column, Plot, Section, page, table};
use foretell_score::{CompiledRun, Refusal, Run};
use foretell_simulator::PlanPrediction;
use foretell_simulator::{Collectives, Disturbance, Folding, Options, Prediction, Recording, critical_path};
use foretell_units::Seconds;
use foretell_units::diagnostic::Mistake;
use schemars::JsonSchema;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// Predict a plan's step: time with an interval, memory, and where the time goes
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell simulate --plan plan.yaml --profile profile.yaml --trace trace.json.gz --plots plots",
    after_long_help = what_if::help()
)]
pub struct Arguments {
    /// The plan
    #[arg(long, value_name = "FILE")]
    plan: PathBuf,
    /// Recipe that replaces the plan's `training`
    #[arg(long, value_name = "FILE")]
    recipe: Option<PathBuf>,
    /// How evenly tokens choose experts, in place of what the plan says: balanced, lognormal:SIGMA,
    /// zipf:S, or a file of measured loads (one number an expert, or such a list a layer)
    #[arg(long, value_name = "balanced|lognormal:SIGMA|zipf:S|FILE")]
    routing: Option<String>,
    #[command(flatten, next_help_heading = "What is trained, in place of what the plan says")]
    method: MethodChoices,
    /// Measured costs, from `foretell calibrate`
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
    /// Write a Chrome/Perfetto trace, compressed if the name ends in `.gz`
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Ranks of the trace: `differing` (one of each set that does the same), `all`, or numbers such
    /// as 0,8..15
    #[arg(long, value_name = "RANKS", default_value = "differing", requires = "trace")]
    trace_ranks: TraceRanks,
    /// Write plots into a folder (SVG and PNG)
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Write one self-contained HTML page
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// Critical path: the chain of instructions, across ranks, that each waited for the one before
    #[arg(long)]
    critical_path: bool,
    /// Another job that runs a step on the same topology: on the nodes after the previous job's, or
    /// from NODE on
    #[arg(long, value_name = "PLAN[@NODE]")]
    beside: Vec<String>,
    /// Answer again for other devices or links, beside the step as it is: `inter_node.bandwidth*2`;
    /// each use is a question of its own
    #[arg(long, value_name = "CHANGE")]
    what_if: Vec<String>,
    #[command(flatten)]
    lengths: LengthChoices,
    #[command(flatten)]
    running: running_cost::Questions,
    /// Simulate equivalent ranks once: the same answer in less time
    #[arg(long, value_enum, default_value_t = Fold::On)]
    fold: Fold,
    /// Simulate a collective as one flow, or each step of each rank of its rings as a message
    #[arg(long, value_enum, default_value_t = CollectivesAs::Flow)]
    collectives: CollectivesAs,
    /// Random pace per rank: coefficient of variation of a log-normal distribution with mean 1,
    /// such as 0.02
    #[arg(long, value_name = "CV", default_value_t = 0.0, value_parser = jitter)]
    jitter: f64,
    /// A rank that is slower by a factor, such as 7=1.3; repeatable
    #[arg(long = "straggler", value_name = "RANK=TIMES", value_parser = straggler)]
    stragglers: Vec<(Rank, f64)>,
    /// Take the step time from all ranks, or from one rank per stage as `score` does, to the last
    /// digit. Breakdown and traces are of all ranks
    #[arg(long, value_enum, default_value_t = Ranks::All)]
    ranks: Ranks,
    /// Print the Program: every instruction of every stage, with its operands' offsets
    #[arg(long)]
    dump_program: bool,
    /// Let ranks share devices, to check a layout without timing it
    #[arg(long)]
    oversubscribe: bool,
}

/// Whether ranks are folded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Fold {
    On,
    Off,
}

impl From<Fold> for Folding {
    fn from(fold: Fold) -> Self {
        match fold {
            Fold::On => Folding::On,
            Fold::Off => Folding::Off,
        }
    }
}

/// Which ranks are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Ranks {
    All,
    OnePerStage,
}

/// How collectives are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum CollectivesAs {
    Flow,
    Steps,
}

impl From<CollectivesAs> for Collectives {
    fn from(collectives: CollectivesAs) -> Self {
        match collectives {
            CollectivesAs::Flow => Collectives::Flow,
            CollectivesAs::Steps => Collectives::Steps,
        }
    }
}

fn jitter(text: &str) -> Result<f64, Mistake> {
    // With more variation, the slowest of many ranks alone would decide the step.
    let most = 2.0;
    let jitter: f64 = text.parse().map_err(|_| Mistake::new("not a number", "0.02 means two per cent"))?;
    if (0.0..=most).contains(&jitter) {
        Ok(jitter)
    } else {
        Err(Mistake::new(format!("not between 0 and {most}"), "0.02 means two per cent"))
    }
}

fn straggler(text: &str) -> Result<(Rank, f64), Mistake> {
    let wrong = |message: String| Mistake::new(message, "7=1.3 makes rank 7 take 1.3 times as long");
    let (rank, times) = text.split_once('=').ok_or_else(|| wrong("no `=`".into()))?;
    let rank = rank.trim().parse().map_err(|_| wrong(format!("`{rank}` is not a rank")))?;
    let times: f64 = times.trim().parse().map_err(|_| wrong(format!("`{times}` is not a number")))?;
    if times.is_finite() && times > 0.0 {
        Ok((Rank(rank), times))
    } else {
        Err(wrong(format!("`{times}` is not a finite number above 0")))
    }
}

/// The document of `simulate`. Parts that were not asked for are left out.
#[derive(Debug, Serialize, JsonSchema)]
pub struct SimulateAnswer {
    #[serde(flatten)]
    prediction: Prediction,
    /// The step by kind of time along its critical path.
    #[serde(skip_serializing_if = "Option::is_none")]
    critical_path_seconds: Option<BTreeMap<String, f64>>,
    /// The critical path, with `--critical-path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    critical_path: Option<what_if::PathAnswer>,
    /// What the prediction assumes, a sentence each.
    remarks: Vec<String>,
    /// The price and energy.
    cost: running_cost::CostAnswer,
    /// The share of the time that makes progress, if failure rates are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    goodput: Option<running_cost::GoodputAnswer>,
    /// The input pipeline, if the plan has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    input: Option<input::InputAnswer>,
    /// The answers to `--what-if`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    what_if: Vec<what_if::WhatIfAnswer>,
    /// The cost of `--jitter` and `--straggler`.
    #[serde(skip_serializing_if = "Option::is_none")]
    disturbance: Option<DisturbanceAnswer>,
    /// This job and those of `--beside`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    jobs: Vec<beside::JobBesideAnswer>,
    /// The effect of the samples' lengths on the step, with `--lengths`.
    #[serde(skip_serializing_if = "Option::is_none")]
    lengths: Option<LengthsAnswer>,
}

/// The cost of jitter and stragglers.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Disturbance")]
struct DisturbanceAnswer {
    /// Coefficient of variation of the ranks' pace.
    jitter: f64,
    /// The seed of the jitter.
    seed: u64,
    /// Ranks that are slower.
    stragglers: Vec<StragglerAnswer>,
    /// The step without either.
    undisturbed_step_seconds: f64,
    /// The step less the undisturbed step.
    cost_seconds: f64,
}

/// A rank that is slower.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Straggler")]
struct StragglerAnswer {
    /// The rank.
    rank: usize,
    /// The factor on its times.
    times: f64,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let questions = what_if::read(&arguments.what_if)?;
    let mut loaded = PlanFile::load_any(&arguments.plan)?;
    arguments.recipe.as_deref().map(|recipe| loaded.apply_recipe(recipe)).transpose()?;
    arguments.routing.as_deref().map(|routing| loaded.replace_routing(routing)).transpose()?;
    let profile = inputs::profile(arguments.profile.as_deref())?;
    replaced_method::replace(&mut loaded, &arguments.method)?;
    if let Some(policy) = arguments.policy(&mut loaded)? {
        let asked = (&arguments.running, arguments.report.as_deref());
        return post_training::run_simulate(&loaded, &policy, profile.as_ref(), asked, json);
    }
    let options = options(arguments, json);
    let mut predicted = output::with_spinner("simulate", || predict::predict_as(&loaded, profile.as_ref(), &options))?;
    if arguments.ranks == Ranks::OnePerStage {
        predicted.prediction = of_representatives(&loaded, predicted.prediction)?;
    }
    let waiting = input::waiting(&loaded, profile.as_ref(), predicted.program(), &predicted.prediction);
    if let Some(waiting) = &waiting {
        waiting.apply(&mut predicted);
    }
    let predicted = predicted;
    let program = predicted.program();
    predict::print_caveats(&loaded.topology, &predicted.prediction, program.mesh.world_size(), &predicted.remarks);
    if let Some(path) = &arguments.trace {
        let timelines = [&predicted.timeline];
        output::with_spinner("trace", || trace_file::write(path, program, &timelines, &arguments.trace_ranks))?;
    }
    if let Some(folder) = &arguments.plots {
        for (name, plot) in &plots(&predicted) {
            output::write(&folder.join(format!("{name}.svg")), plot.svg()?.as_bytes())?;
            output::write(&folder.join(format!("{name}.png")), &plot.png()?)?;
        }
    }
    let has_spans = options.recording == Recording::Spans;
    let path = has_spans.then(|| critical_path(&predicted.timeline, program)).transpose()?;
    let jobs = match arguments.beside.as_slice() {
        [] => Vec::new(),
        others => output::with_spinner("beside", || beside::predict(&loaded, others, profile.as_ref(), arguments.fold.into()))?,
    };
    let answers =
        output::with_spinner("what if", || what_if::answer(questions, &predicted, &loaded, profile.as_ref(), &options))?;
    if let Some(path) = &arguments.report {
        let page = output::with_spinner("report", || report(&loaded, &predicted, profile.as_ref(), arguments))?;
        output::write(path, page.as_bytes())?;
    }
    let lengths = arguments.lengths.of_model(&loaded.model)?;
    let over_lengths = |lengths: &DataLengths| {
        let answer = || lengths.answer(&loaded.model, &loaded.plan, &loaded.topology, profile.as_ref());
        output::with_spinner("lengths", answer)
    };
    let lengths = lengths.as_ref().map(over_lengths).transpose()?;
    let pace = lengths.as_ref().map_or_else(|| Pace::of(&predicted), LengthsAnswer::pace);
    let running = running_cost::answer(&arguments.running, &predicted, pace, &loaded)?;
    if json {
        let (cost, goodput) = running.documents();
        output::json(&SimulateAnswer {
            prediction: predicted.prediction.clone(),
            critical_path_seconds: path.as_ref().map(what_if::times_document),
            critical_path: path.as_ref().filter(|_| arguments.critical_path).map(|path| what_if::path_document(path, program)),
            remarks: predicted.remarks.clone(),
            cost,
            goodput,
            input: waiting.as_ref().map(input::Waiting::document),
            what_if: what_if::answers_document(&predicted.prediction, &answers),
            disturbance: predicted
                .undisturbed
                .map(|undisturbed| disturbance_document(&options.disturbance, undisturbed, predicted.prediction.step_seconds)),
            jobs: beside::document(&jobs),
            lengths,
        })?;
    } else if arguments.dump_program {
        output::line(&program.to_string())?;
    } else {
        let is_fine_tuning = loaded.plan.training.lora.is_some();
        if let Some(line) = explain::fit(&predicted.prediction, &loaded.topology, is_fine_tuning) {
            output::line(&line)?;
        }
        output::line(&predict::table(&predicted.prediction, &loaded.topology))?;
        if let Some(undisturbed) = predicted.undisturbed {
            output::line(&format!(
                "\n{}",
                disturbance_table(&options.disturbance, undisturbed, predicted.prediction.step_seconds)
            ))?;
        }
        match &path {
            Some(path) if arguments.critical_path => output::line(&format!("\n{}", what_if::path_table(path)))?,
            Some(path) => output::line(&what_if::path_line(path))?,
            None => {}
        }
        let lengths = lengths.as_ref().map(LengthsAnswer::text);
        let parts = [lengths, waiting.map(|waiting| waiting.table()), running.table()];
        for part in parts.into_iter().flatten() {
            output::line(&format!("\n{part}"))?;
        }
        if !answers.is_empty() {
            output::line(&format!("\n{}", what_if::answers_table(&predicted.prediction, &answers)))?;
        }
        if !jobs.is_empty() {
            output::line(&format!("\n{}", beside::listing(&jobs, &loaded.topology)))?;
        }
    }
    // The printed answer says so too, but the command must fail because the plan cannot run.
    predict::require_fit(&predicted, &loaded)
}

impl Arguments {
    /// RL post-training, as the plan and the options state it. Adds the defaults that were used to
    /// the plan's remarks.
    fn policy(&self, loaded: &mut LoadedPlan) -> Result<Option<PolicyTraining>, Failure> {
        let rollout = &self.method.rollout;
        let policy = match (loaded.policy.clone(), self.method.method.and_then(Method::policy)) {
            (Some(policy), method) => {
                let mut policy = PolicyTraining { method: method.unwrap_or(policy.method), ..policy };
                rollout.iter().for_each(|choices| choices.apply(&mut policy.rollout));
                policy
            }
            (None, Some(method)) => {
                let mut taken = Vec::new();
                let rollout = rollout.clone().unwrap_or_default().rollout(method, &mut taken);
                loaded.remarks.extend(taken.iter().map(|taken| format!("taken by default: {taken}")));
                PolicyTraining { method, rollout: rollout.map_err(Failure::of_input)? }
            }
            (None, None) if rollout.is_some() => {
                let message = "`--rollout`: the plan has no `method` that generates";
                return Err(Failure::input(code::OPTION_VALUE, message).hint("add `--method grpo` or `--method ppo`"));
            }
            (None, None) => return Ok(None),
        };
        policy.rollout.validate(loaded.plan.global_batch).map_err(|error| Failure::of_input(error).about("the rollout"))?;
        let stated = [
            ("--trace", self.trace.is_some()),
            ("--plots", self.plots.is_some()),
            ("--critical-path", self.critical_path),
            ("--beside", !self.beside.is_empty()),
            ("--lengths", self.lengths.are_stated()),
            ("--what-if", !self.what_if.is_empty()),
            ("--goodput", self.running.goodput),
            ("--checkpoint-every", self.running.checkpoint_every.is_some()),
            ("--jitter", self.jitter > 0.0),
            ("--straggler", !self.stragglers.is_empty()),
            ("--ranks", self.ranks == Ranks::OnePerStage),
            ("--dump-program", self.dump_program),
            ("--oversubscribe", self.oversubscribe),
        ];
        match stated.into_iter().find(|(_, is_stated)| *is_stated) {
            None => Ok(Some(policy)),
            Some((name, _)) => {
                let message = format!("`{name}` has no answer for `method: {}`", policy.method.name());
                let hint = "leave it out, or ask about a plan without `method` and `rollout`";
                Err(Failure::input(code::OPTION_VALUE, message).hint(hint))
            }
        }
    }
}

/// Changes of hardware that the report asks about.
const REPORTED_QUESTIONS: [&str; 4] = ["peak*2", "memory_bandwidth*2", "intra_node.bandwidth*2", "inter_node.bandwidth*2"];

/// Makes the page: the answer, what would change it, the timeline, memory and the plan.
fn report(
    loaded: &LoadedPlan,
    predicted: &PlanPrediction,
    profile: Option<&Profile>,
    arguments: &Arguments,
) -> Result<String, Failure> {
    let (program, timeline) = (predicted.program(), &predicted.timeline);
    let prediction = &predicted.prediction;
    let questions: Vec<String> = REPORTED_QUESTIONS.iter().map(|&question| question.to_owned()).collect();
    let answers = what_if::answer(what_if::read(&questions)?, predicted, loaded, profile, &options(arguments, false))?;
    let sections = [
        binding::answer(&loaded.plan, prediction, &loaded.topology, Limits::default(), None)?,
        Section::Chart {
            heading: "Timeline".into(),
            chart: Box::new(Chart::timeline(program, &[timeline])),
            caption: "How each rank spends the step. Communication counts as exposed while kernels wait for it.".into(),
        },
        Section::Chart {
            heading: "Memory".into(),
            chart: Box::new(Chart::memory(program, timeline, Some(loaded.topology.least_memory()))),
            caption: "Bytes in use over the step, and the tensors that hold them at the peak.".into(),
        },
        what_if::section("Other hardware", prediction, &answers),
        Section::Listing { heading: "Prediction".into(), text: predict::table(prediction, &loaded.topology) },
        Section::Listing { heading: "Plan".into(), text: loaded.file.to_yaml()? },
    ];
    Ok(page(&format!("{} on {}", loaded.model.name, loaded.topology.name()), &sections)?)
}

/// Returns the prediction with the step time of one rank per stage.
fn of_representatives(loaded: &LoadedPlan, prediction: Prediction) -> Result<Prediction, Failure> {
    loaded.require_equal_steps("a prediction of one rank per stage")?;
    let refused = |refusal: Refusal| Failure::undone(code::SYSTEM, format!("{}: {refusal}", loaded.path.display()));
    let run = Run::of_plan(&loaded.model.model, &loaded.plan, &loaded.topology).map_err(refused)?;
    let step = CompiledRun::new(&run).and_then(|compiled| compiled.predict(&run)).map_err(refused)?;
    Ok(prediction.with_step(step.step, [step.p10, step.p90]))
}

/// Options of the simulation. Records spans only if an output needs them.
fn options(arguments: &Arguments, json: bool) -> Options {
    let draws = arguments.trace.is_some() || arguments.plots.is_some() || arguments.report.is_some();
    // Energy depends on what each device does at each time.
    let needs_spans = draws || arguments.critical_path || json || arguments.running.asks_for_cost() || !arguments.dump_program;
    Options {
        oversubscription: predict::oversubscription(arguments.oversubscribe),
        folding: arguments.fold.into(),
        collectives: arguments.collectives.into(),
        recording: if needs_spans { Recording::Spans } else { Recording::Ends },
        disturbance: Disturbance {
            jitter: arguments.jitter,
            seed: arguments.running.seed,
            stragglers: arguments.stragglers.clone(),
        },
        ..Options::default()
    }
}

fn disturbance_table(disturbance: &Disturbance, undisturbed: Seconds, step: Seconds) -> String {
    let mut rows = Vec::new();
    if disturbance.jitter > 0.0 {
        let (jitter, seed) = (disturbance.jitter, disturbance.seed);
        rows.push(vec![format!("jitter, log-normal, seed {seed}"), format!("{:.1} % per rank", jitter * 100.0)]);
    }
    for (rank, times) in &disturbance.stragglers {
        rows.push(vec![format!("{rank} is slower"), format!("{times} times")]);
    }
    let cost = step - undisturbed;
    let share = if undisturbed > Seconds::ZERO { cost / undisturbed * 100.0 } else { 0.0 };
    rows.push(vec!["step without it".into(), undisturbed.to_string()]);
    rows.push(vec!["it costs".into(), format!("{cost} ({share:.1} %)")]);
    table(&[Column::words("disturbance"), Column::numbers("")], &rows)
}

fn disturbance_document(disturbance: &Disturbance, undisturbed: Seconds, step: Seconds) -> DisturbanceAnswer {
    let stragglers = disturbance.stragglers.iter().map(|(rank, times)| StragglerAnswer { rank: rank.0, times: *times });
    DisturbanceAnswer {
        jitter: disturbance.jitter,
        seed: disturbance.seed,
        stragglers: stragglers.collect(),
        undisturbed_step_seconds: undisturbed.value(),
        cost_seconds: (step - undisturbed).value(),
    }
}

fn plots(predicted: &PlanPrediction) -> Vec<(&'static str, Plot)> {
    let program = predicted.program();
    let timeline = &predicted.timeline;
    vec![
        ("timeline", Plot::timeline("One step, predicted", program, &[timeline])),
        ("memory", Plot::memory("Memory over the step", program, timeline)),
    ]
}
