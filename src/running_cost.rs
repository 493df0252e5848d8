//! `--cost`, `--steps`, `--goodput`: what a step and a run cost in money, energy, and time lost to
//! failures.

mod documents;

pub use documents::{CostAnswer, GoodputAnswer};

use crate::failure::{Failure, code};
use crate::output::note;
use crate::plan_file::LoadedPlan;
use clap::Args;
use foretell_planner::checkpoint_bytes;
use foretell_program::Stack;
use foretell_reports::{Column, table};
use foretell_simulator::{
    CheckpointCost, MissingFact, PlanPrediction, PostTrainingPrediction, PowerModel, Reliability, RunningCost, cost_of_devices,
    reliability, running_cost,
};
use foretell_topologies::{DeviceId, NodeId, Topology};
use foretell_units::{Bytes, Joules, Price, Seconds};
use std::collections::BTreeSet;

/// Options about the cost of a step and a run.
#[derive(Debug, Clone, Args)]
pub struct Questions {
    /// Price and energy of a step
    #[arg(long)]
    pub cost: bool,
    /// Price and energy of a run of N steps
    #[arg(long, value_name = "N", group = "length")]
    pub steps: Option<f64>,
    /// Price and energy of a run over N samples
    #[arg(long, value_name = "N", group = "length")]
    pub samples: Option<f64>,
    /// Price and energy of a run over N tokens, such as 300e9
    #[arg(long, value_name = "N", group = "length")]
    pub tokens: Option<f64>,
    /// Passes over the `--samples`, the `--tokens` or the samples in the file of `--lengths`
    #[arg(long, value_name = "N")]
    pub epochs: Option<f64>,
    /// Price of a device in use for an hour, such as `2.50` or `2.50USD`, in place of the
    /// topology's
    #[arg(long, value_name = "PRICE")]
    pub device_price: Option<Price>,
    /// Goodput of a long run when nodes fail, and the best checkpoint interval; on by default if
    /// the topology states a mean time between failures
    #[arg(long)]
    pub goodput: bool,
    /// Steps between checkpoints, in place of the best interval
    #[arg(long, value_name = "N")]
    pub checkpoint_every: Option<u64>,
    /// Seed of failures and jitter
    #[arg(long, value_name = "SEED", default_value_t = 0)]
    pub seed: u64,
}

/// The answer.
pub struct Answers {
    cost: RunningCost,
    /// Currency of the prices, if the topology names one.
    currency: Option<String>,
    step: Seconds,
    steps: Option<f64>,
    goodput: Option<Goodput>,
    is_asked: bool,
}

/// A step of the run: the simulated one, or the mean over samples of different lengths.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Its duration.
    pub step: Seconds,
    /// Samples of the data set in a step.
    pub samples: f64,
    /// Tokens of the data set in a step; `None` if samples are no sequences.
    pub tokens: Option<f64>,
    /// Samples of the data set, if a file lists them.
    pub data_set: Option<f64>,
}

/// A long run with node failures.
struct Goodput {
    reliability: Reliability,
    state: Bytes,
    /// Steps between checkpoints, and the goodput simulated with that interval.
    every: f64,
    goodput: f64,
    /// Goodput by Daly's closed form.
    expected: f64,
    /// Whether the interval is the best one found, or the user's.
    is_best: bool,
}

impl Pace {
    /// The predicted step.
    pub fn of(predicted: &PlanPrediction) -> Self {
        let program = predicted.program();
        Self {
            step: predicted.prediction.step_seconds,
            samples: program.samples as f64,
            tokens: program.tokens.map(|tokens| tokens as f64),
            data_set: None,
        }
    }
}

impl Questions {
    /// Whether an option asks for the cost of a step or a run.
    pub fn asks_for_cost(&self) -> bool {
        let has_length = [self.steps, self.samples, self.tokens, self.epochs].iter().any(Option::is_some);
        self.cost || has_length || self.device_price.is_some()
    }

    /// Whether any option asks for something.
    pub fn ask(&self) -> bool {
        self.asks_for_cost() || self.goodput || self.checkpoint_every.is_some()
    }
}

/// Computes the answer of a run of steps of RL post-training. A sample is a prompt, and tokens are
/// those of prompts and responses. The energy of such a step is not known.
pub fn answer_of_roles(
    questions: &Questions,
    prediction: &PostTrainingPrediction,
    prompts: usize,
    topology: &Topology,
) -> Result<Answers, Failure> {
    let step = Seconds::new(prediction.step_seconds);
    let tokens = Some(prediction.tokens_per_second * prediction.step_seconds);
    let pace = Pace { step, samples: prompts as f64, tokens, data_set: None };
    let devices = prediction.groups.iter().map(|group| group.devices).sum();
    if states_failures(topology, devices) {
        note("no goodput: a run of RL post-training is answered without failures, though `mean_time_between_failures` is stated");
    }
    let cost = RunningCost { unpowered: Vec::new(), ..cost_of_devices(topology, devices) };
    let (cost, currency) = priced(questions, cost, topology);
    Ok(Answers { cost, currency, step, steps: steps(questions, pace)?, goodput: None, is_asked: questions.asks_for_cost() })
}

/// Computes the answers for a run of such steps.
pub fn answer(questions: &Questions, predicted: &PlanPrediction, pace: Pace, loaded: &LoadedPlan) -> Result<Answers, Failure> {
    let program = predicted.program();
    let of_program = running_cost(program, &loaded.topology, &predicted.timeline, &PowerModel::default());
    // A step of another duration is assumed to have the simulated step's mean power.
    let share = pace.step / predicted.prediction.step_seconds;
    let energy = predicted.traced_energy.or(of_program.step_energy).map(|energy| energy * share);
    let (cost, currency) = priced(questions, RunningCost { step_energy: energy, ..of_program }, &loaded.topology);
    let steps = steps(questions, pace)?;
    let goodput = goodput(questions, pace.step, loaded, predicted, cost.devices)?;
    let is_asked = questions.asks_for_cost();
    Ok(Answers { cost, currency, step: pace.step, steps, goodput, is_asked })
}

/// The cost at the stated price of a device, if there is one, and the currency.
fn priced(questions: &Questions, mut cost: RunningCost, topology: &Topology) -> (RunningCost, Option<String>) {
    let Some(Price { amount, currency }) = &questions.device_price else {
        return (cost, topology.currency().map(str::to_owned));
    };
    // If a node is only partly used, only the devices in use are paid.
    cost.price_per_hour = Some(amount * cost.devices as f64);
    cost.unpriced.clear();
    (cost, currency.clone())
}

/// The most steps, samples, tokens or epochs of a run: beyond all runs, and their times and prices
/// can be written.
const MOST: f64 = 1e18;

/// The run's length in steps.
fn steps(questions: &Questions, pace: Pace) -> Result<Option<f64>, Failure> {
    let wrong = |message: &str, hint: &str| Err(Failure::input(code::OPTION_VALUE, message).hint(hint));
    let Questions { steps, samples, tokens, epochs, .. } = *questions;
    for (name, stated) in [("--steps", steps), ("--samples", samples), ("--tokens", tokens), ("--epochs", epochs)] {
        if let Some(number) = stated.filter(|number| !(0.0..=MOST).contains(number)) {
            return wrong(&format!("`{name} {number:?}` is no length of a run"), "write a number up to 1e18, such as 300e9");
        }
    }
    if questions.tokens.is_some() && pace.tokens.is_none() {
        return wrong("the model's samples are no sequences", "use `--samples`");
    }
    let samples = questions.samples.or(pace.data_set.filter(|_| questions.tokens.is_none() && questions.epochs.is_some()));
    if questions.epochs.is_some() && (questions.steps.is_some() || samples.or(questions.tokens).is_none()) {
        return wrong("`--epochs` of what is not known", "add `--samples` or `--tokens` of the data set, or `--lengths FILE`");
    }
    // The samples of a step are a mean, whose rounding error must not add a step.
    let per_step = |amount: Option<f64>, each: f64| {
        amount.map(|amount| (amount * questions.epochs.unwrap_or(1.0) / each * (1.0 - 1e-9)).ceil())
    };
    let steps = questions
        .steps
        .or(per_step(samples, pace.samples.max(1.0)))
        .or(per_step(questions.tokens, pace.tokens.unwrap_or(1.0).max(1.0)));
    match steps {
        Some(steps) if steps < 1.0 => wrong("a run of 0 steps has no cost", "ask for at least 1"),
        steps => Ok(steps),
    }
}

/// Whether the topology says how often one of the nodes of these devices fails.
fn states_failures(topology: &Topology, devices: usize) -> bool {
    let nodes: BTreeSet<NodeId> = (0..devices).map(|device| topology.node_of(DeviceId(device))).collect();
    let groups = topology.node_groups();
    nodes.iter().any(|node| groups[topology.group_of(*node)].mean_time_between_failures.is_some())
}

fn goodput(
    questions: &Questions,
    step: Seconds,
    loaded: &LoadedPlan,
    predicted: &PlanPrediction,
    devices: usize,
) -> Result<Option<Goodput>, Failure> {
    let topology = &loaded.topology;
    let is_asked = questions.goodput || questions.checkpoint_every.is_some();
    if !is_asked && !states_failures(topology, devices) {
        return Ok(None);
    }
    let state = checkpoint_bytes(&loaded.model.model, &loaded.model.name, &loaded.plan)?;
    let reliability = match reliability(topology, devices, state, predicted.storage) {
        // Foretell's executor continues training while it writes a checkpoint.
        Ok(reliability) if loaded.plan.stack == Stack::default() => {
            let CheckpointCost { wait, written, .. } = predicted.checkpoint;
            Reliability { checkpoint: wait, write: written.unwrap_or(wait) - wait, ..reliability }
        }
        Ok(reliability) => reliability,
        Err(MissingFact { what, hint }) => {
            let failure = Failure::input(code::FACT_MISSING, format!("`{}` does not say {what}", topology.name()));
            let failure = failure.hint(format!("write `{hint}`"));
            if is_asked {
                return Err(failure);
            }
            note(&format!("no goodput: {}", failure.one_line()));
            return Ok(None);
        }
    };
    let (interval, goodput) = match questions.checkpoint_every {
        Some(0) => {
            return Err(
                Failure::input(code::OPTION_VALUE, "--checkpoint-every 0 would never write one").hint("ask for at least 1")
            );
        }
        Some(every) => (step * every as f64, reliability.long_run(step * every as f64, questions.seed).goodput()),
        None => reliability.best_interval(step, questions.seed),
    };
    Ok(Some(Goodput {
        reliability,
        state,
        every: (interval / step).round(),
        goodput,
        expected: reliability.expected_goodput(interval),
        is_best: questions.checkpoint_every.is_none(),
    }))
}

impl Answers {
    /// Duration of the run, including failures.
    fn run_time(&self) -> Option<Seconds> {
        let work = self.step * self.steps?;
        match &self.goodput {
            // A run without progress never ends.
            Some(failing) if failing.goodput <= 0.0 => None,
            Some(failing) => Some(work / failing.goodput),
            None => Some(work),
        }
    }

    /// Energy of the devices over the run. Repeated work, checkpoints and restarts count at the
    /// mean power of a step.
    fn run_energy(&self) -> Option<Joules> {
        Some(self.cost.step_energy? * (self.run_time()? / self.step))
    }

    /// Formats the answer as a table; `None` if nothing was asked.
    pub fn table(&self) -> Option<String> {
        let mut rows: Vec<Vec<String>> = Vec::new();
        let mut row = |what: &str, value: String| rows.push(vec![what.into(), value]);
        if self.is_asked {
            let RunningCost { nodes, devices, .. } = self.cost;
            row("nodes", format!("{nodes}, with {devices} devices in use"));
            let unpriced = format!("not known: no `price_per_hour` for {}", quoted(&self.cost.unpriced));
            let unpowered = format!("not known: no `power` for {}", quoted(&self.cost.unpowered));
            let money = |amount| money(amount, self.currency.as_deref());
            row("price of a step", self.cost.price(self.step).map_or_else(|| unpriced.clone(), money));
            let mean = |energy: Joules| energy.value() / self.step.value().max(f64::MIN_POSITIVE) / devices as f64;
            let has_energy = self.cost.step_energy.is_some() || !self.cost.unpowered.is_empty();
            if has_energy {
                row(
                    "energy of a step",
                    self.cost.step_energy.map_or_else(
                        || unpowered.clone(),
                        |energy| format!("{energy}, devices only ({:.0} W each on average)", mean(energy)),
                    ),
                );
            }
            if let Some(steps) = self.steps {
                row("the run", format!("{steps} steps"));
                // The run always fails before it reaches a checkpoint.
                let endless = || "never ends".to_string();
                row("  its time", self.run_time().map_or_else(endless, days));
                let price = |time| self.cost.price(time).map_or(unpriced, money);
                row("  its price", self.run_time().map_or_else(endless, price));
                if has_energy {
                    let energy = |_| self.run_energy().map_or(unpowered, kilowatt_hours);
                    row("  its energy", self.run_time().map_or_else(endless, energy));
                }
            }
        }
        if let Some(failing) = &self.goodput {
            let interval = self.step * failing.every;
            let Reliability { mean_time_between_failures, checkpoint, write, restart } = failing.reliability;
            row("time between failures", days(mean_time_between_failures));
            let later = if write > Seconds::ZERO { format!(", written {write} later") } else { String::new() };
            row("a checkpoint", format!("{}, training stops for {checkpoint}{later}", failing.state));
            row("a restart", format!("{restart}, including reading the checkpoint"));
            let which = if failing.is_best { "best checkpoint interval" } else { "checkpoint interval" };
            row(which, format!("{} steps, {}", failing.every, days(interval)));
            let (young, daly) = (failing.reliability.young(), failing.reliability.daly());
            row("  by Young's formula, by Daly's", format!("{}, {}", days(young), days(daly)));
            row("goodput", format!("{:.2} % (closed form {:.2} %)", failing.goodput * 100.0, failing.expected * 100.0));
        }
        (!rows.is_empty()).then(|| table(&[Column::words(""), Column::words("")], &rows))
    }
}

fn quoted(names: &[String]) -> String {
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

/// An amount of money, with its currency if that is known.
pub fn money(amount: f64, currency: Option<&str>) -> String {
    let number = if amount < 1.0 { format!("{amount:.3e}") } else { format!("{amount:.2}") };
    currency.map_or_else(|| number.clone(), |currency| format!("{number} {currency}"))
}

fn days(time: Seconds) -> String {
    const DAY: f64 = 86_400.0;
    if time.value() < 2.0 * DAY { time.to_string() } else { format!("{:.1} days", time.value() / DAY) }
}

fn kilowatt_hours(energy: Joules) -> String {
    const KILOWATT_HOUR: f64 = 3.6e6;
    format!("{energy} ({:.1} kWh), devices only", energy.value() / KILOWATT_HOUR)
}
