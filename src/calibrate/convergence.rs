//! `foretell calibrate --convergence`: the samples that training in each mode needs to reach a
//! loss, measured by short runs of one plan.
//!
//! The result is the table that `plan --mode any --objective time-to-loss` takes. Modes have
//! different best learning rates: an asynchronous push, for instance, is an update by the samples
//! of one worker. So each mode is run with several, and the best one counts. The order of modes by
//! time is not known here.

use crate::failure::{Failure, code};
use crate::input::cores_per_rank;
use crate::inputs;
use crate::launch::Hosts;
use crate::modes::{self, RefusedMode, SamplesNeeded};
use crate::output;
use crate::plan_file::LoadedPlan;
use clap::Args;
use foretell_executor::data::DataSource;
use foretell_executor::{Length, OnDivergence, Start, TrainingJob, TransportKind, execute, supported};
use foretell_program::{LearningRateSchedule, Mode, Plan, compile};
use foretell_topologies::Topology;
use foretell_units::diagnostic::{self, Mistake};
use schemars::JsonSchema;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// The modes without `--modes`.
const MODES: &str = include_str!("modes.yaml");

/// The factor by which runs in other modes may be longer than the synchronous runs.
const LONGEST: usize = 2;

/// A synchronous run is divided into this many parts. A loss is the mean over as many steps as one
/// part has.
const PARTS: usize = 10;

/// How convergence is measured.
#[derive(Debug, Clone, Args)]
pub struct ConvergenceArguments {
    /// Measure how many samples each mode needs to reach a loss, by short runs of the plan, in
    /// place of kernels: the table that `plan --samples-needed` takes
    #[arg(long, conflicts_with_all = ["model", "global_batch", "precision", "storage"])]
    pub convergence: bool,
    /// Steps of a synchronous run; other modes get up to twice as many
    #[arg(long, value_name = "N", requires = "convergence", default_value_t = 200, value_parser = clap::value_parser!(u32).range(10..=1_000_000))]
    steps: u32,
    /// The loss to reach, a mean over a tenth of a synchronous run [default: the lowest of the
    /// synchronous runs]
    #[arg(long, value_name = "LOSS", requires = "convergence")]
    target_loss: Option<f64>,
    /// The modes to measure: a table as `plan --samples-needed` takes it, whose numbers are
    /// measured [default: eleven modes]
    #[arg(long, value_name = "FILE", requires = "convergence")]
    modes: Option<PathBuf>,
    /// Factors on the plan's learning rate to try in each mode; the best one counts
    #[arg(long, value_name = "LIST", requires = "convergence", value_delimiter = ',', default_value = "0.5,1,2", value_parser = factor)]
    learning_rate_factors: Vec<f32>,
    /// Runs of each mode and learning rate, each with a seed of its own
    #[arg(long, value_name = "N", requires = "convergence", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=100))]
    seeds: u16,
}

fn factor(text: &str) -> Result<f32, Mistake> {
    let factor = text.trim().parse().ok().filter(|factor: &f32| *factor > 0.0 && factor.is_finite());
    factor.ok_or_else(|| Mistake::new(format!("`{text}` is no number above 0"), "write factors such as 0.5,1,2"))
}

/// The result of short runs in several modes.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ConvergenceAnswer {
    /// The table that was written.
    table: String,
    /// The loss to reach: a mean over `window_steps` steps.
    target_loss: f64,
    /// The number of steps over which losses are averaged.
    window_steps: usize,
    /// The modes that reached it, the synchronous one first.
    modes: Vec<MeasuredMode>,
    /// The modes that did not, with the reason.
    refused: Vec<RefusedMode>,
}

/// The result of short runs in one mode.
#[derive(Debug, Serialize, JsonSchema)]
struct MeasuredMode {
    /// The mode.
    mode: Mode,
    /// The samples that the mode needed to reach the loss, as a multiple of the synchronous mode's.
    /// Samples whose late gradients a server dropped do not count.
    samples_needed: f64,
    /// The same as a number of samples; null if the mode has the result of the synchronous one and
    /// was not run.
    samples: Option<usize>,
    /// The learning rate with which the mode needed the fewest samples; null in the same case.
    learning_rate: Option<f32>,
    /// The mean staleness of the pushes of that run.
    staleness: f64,
}

/// The mean of a mode's runs with one learning rate.
struct Curve {
    learning_rate: f32,
    /// Mean losses over a window, by the number of the window's last step.
    smoothed: Vec<f64>,
    staleness: f64,
}

/// Everything that a run needs except its mode and learning rate.
struct Runner<'a> {
    loaded: &'a LoadedPlan,
    topology: &'a Topology,
    hosts: &'a Hosts,
    data: DataSource,
    arguments: &'a ConvergenceArguments,
}

/// Measures the modes, and writes their table.
///
/// # Errors
/// [`Failure`] if a table or a loss allows no conclusion, or if a run fails.
pub fn run(
    arguments: &ConvergenceArguments,
    loaded: &LoadedPlan,
    topology: &Topology,
    transport: TransportKind,
    data: Option<&DataSource>,
    table: &Path,
) -> Result<ConvergenceAnswer, Failure> {
    let wanted = match &arguments.modes {
        Some(path) => modes::table(path)?,
        None => inputs::parse_yaml(MODES, Path::new("modes.yaml"))?,
    };
    let hosts = Hosts::open(topology, transport, None, None)?;
    supported(&Plan { mode: Mode::Synchronous, ..loaded.plan.clone() }, hosts.options.backend)?;
    let data = data.cloned().unwrap_or_else(|| DataSource::default_for(&loaded.model.model.sample()));
    let runner = Runner { loaded, topology, hosts: &hosts, data, arguments };
    let answer = runner.measure(&wanted, table)?;
    output::write(table, runner.text(&answer)?.as_bytes())?;
    hosts.close()?;
    Ok(answer)
}

impl ConvergenceAnswer {
    /// The answer in text, a line for each mode.
    pub fn lines(&self) -> Vec<String> {
        let line = |mode: &MeasuredMode| {
            let source = self.source(mode);
            format!("mode {}: {:.2} times the samples ({source})", modes::name(&mode.mode), mode.samples_needed)
        };
        let refused = self.refused.iter().map(|refused| format!("mode {}: not measured: {}", refused.mode, refused.reason));
        let written = format!("the table is in {}; `foretell plan --samples-needed` takes it", self.table);
        self.modes.iter().map(line).chain(refused).chain([written]).collect()
    }

    /// How the number of a mode was found, for the table.
    fn source(&self, one: &MeasuredMode) -> String {
        let Some((samples, rate)) = one.samples.zip(one.learning_rate) else {
            return "not measured: it has the gradients of the synchronous mode".into();
        };
        let staleness = if one.staleness > 0.0 { format!(", mean staleness {:.2}", one.staleness) } else { String::new() };
        format!("measured: {samples} samples to a loss of {:.4} with the learning rate {rate}{staleness}", self.target_loss)
    }
}

impl Runner<'_> {
    fn steps(&self) -> usize {
        self.arguments.steps as usize
    }

    fn measure(&self, wanted: &[SamplesNeeded], table: &Path) -> Result<ConvergenceAnswer, Failure> {
        let measured =
            wanted.iter().filter(|wanted| wanted.mode != Mode::Synchronous && !wanted.mode.has_synchronous_result()).count();
        let runs = (measured + 1) * self.arguments.learning_rate_factors.len() * usize::from(self.arguments.seeds);
        let bar = output::progress(runs, "runs");
        let synchronous = self.curves(Mode::Synchronous, self.steps(), &|| bar.inc(1))?;
        let target_loss = self.target(&synchronous)?;
        let batch = self.loaded.plan.global_batch;
        let first = fewest(&synchronous, target_loss);
        let Some((least, curve)) = first else {
            return Err(Failure::undone(code::CONVERGENCE, "no synchronous run reached the loss").hint("use more `--steps`"));
        };
        let mut modes = vec![MeasuredMode {
            mode: Mode::Synchronous,
            samples_needed: 1.0,
            samples: Some(least * batch),
            learning_rate: Some(curve.learning_rate),
            staleness: 0.0,
        }];
        let mut refused = Vec::new();
        for &SamplesNeeded { mode, .. } in wanted.iter().filter(|wanted| wanted.mode != Mode::Synchronous) {
            let why_not = |reason: String| RefusedMode { mode: modes::name(&mode), reason };
            if let Err(reason) = self.possible(mode) {
                refused.push(why_not(diagnostic::one_line(&reason)));
                continue;
            }
            if mode.has_synchronous_result() {
                modes.push(MeasuredMode { mode, samples_needed: 1.0, samples: None, learning_rate: None, staleness: 0.0 });
                continue;
            }
            let curves = self.curves(mode, LONGEST * self.steps(), &|| bar.inc(1))?;
            let counted = self.plan(mode).counted_share();
            match fewest(&curves, target_loss) {
                Some((steps, curve)) => modes.push(MeasuredMode {
                    mode,
                    samples_needed: steps as f64 * counted / least as f64,
                    samples: Some(((steps * batch) as f64 * counted).round() as usize),
                    learning_rate: Some(curve.learning_rate),
                    staleness: curve.staleness,
                }),
                None => refused.push(why_not(format!(
                    "no learning rate reached a loss of {target_loss:.4} in {} steps",
                    LONGEST * self.steps()
                ))),
            }
        }
        bar.finish_and_clear();
        let table = table.display().to_string();
        Ok(ConvergenceAnswer { table, target_loss, window_steps: self.window(), modes, refused })
    }

    /// The loss to reach.
    fn target(&self, synchronous: &[Curve]) -> Result<f64, Failure> {
        let finite = synchronous.iter().flat_map(|curve| &curve.smoothed).copied().filter(|loss| loss.is_finite());
        let Some(lowest) = finite.min_by(f64::total_cmp) else {
            let hint = "use smaller `--learning-rate-factors`";
            return Err(Failure::undone(code::CONVERGENCE, "no synchronous run has a finite loss").hint(hint));
        };
        match self.arguments.target_loss {
            Some(wanted) if wanted.is_nan() || wanted < lowest => Err(Failure::input(
                code::OPTION_VALUE,
                format!("the synchronous runs reach a loss of {lowest:.4} in {} steps, and not {wanted}", self.steps()),
            )
            .hint(
                "use a higher \
                 `--target-loss`, or more `--steps`",
            )),
            wanted => Ok(wanted.unwrap_or(lowest)),
        }
    }

    /// The number of steps over which a loss is averaged.
    fn window(&self) -> usize {
        (self.steps() / PARTS).max(1)
    }

    /// Whether the plan can run in a mode; the error is the reason why not.
    fn possible(&self, mode: Mode) -> Result<(), Mistake> {
        let plan = self.plan(mode);
        let LoadedPlan { model, .. } = self.loaded;
        compile(&model.model, &model.name, &plan).map_err(|error| Mistake::of(&error))?;
        supported(&plan, self.hosts.options.backend).map_err(|error| Mistake::of(&error))?;
        let round = plan.cycle().round_steps();
        if round > self.steps() {
            return Err(Mistake::new(format!("a round of {round} steps is longer than a synchronous run"), "use more `--steps`"));
        }
        Ok(())
    }

    /// The plan in a mode, with the learning rate that it has after the warm-up: runs of modes
    /// differ in length, so their schedules would differ too.
    fn plan(&self, mode: Mode) -> Plan {
        let mut plan = Plan { mode, ..self.loaded.plan.clone() };
        plan.training.schedule = LearningRateSchedule::Constant;
        if mode != Mode::Synchronous {
            (plan.layout.zero, plan.layout.shard_group) = (0, None);
        }
        plan
    }

    /// The losses of a mode, a curve for each learning rate.
    fn curves(&self, mode: Mode, steps: usize, done: &dyn Fn()) -> Result<Vec<Curve>, Failure> {
        let of_factor = |&factor: &f32| {
            let mut plan = self.plan(mode);
            let learning_rate = plan.learning_rate() * factor;
            plan.training.learning_rate = Some(learning_rate);
            let steps = steps.next_multiple_of(plan.cycle().round_steps());
            let (mut mean, mut staleness) = (vec![0.0; steps], 0.0);
            let share = 1.0 / f64::from(self.arguments.seeds);
            for seed in 0..self.arguments.seeds {
                let outcome = execute(&self.job(plan.clone(), steps, seed.into()), None, &self.hosts.options, &mut |_| ())?;
                for step in &outcome.steps {
                    if let Some(loss) = mean.get_mut(step.step) {
                        *loss += share * step.loss;
                    }
                }
                staleness += share * outcome.paces.map_or(0.0, |paces| paces.staleness.mean);
                done();
            }
            Ok(Curve { learning_rate, smoothed: smoothed(&mean, self.window()), staleness })
        };
        self.arguments.learning_rate_factors.iter().map(of_factor).collect()
    }

    fn job(&self, plan: Plan, steps: usize, seed: u64) -> TrainingJob {
        let LoadedPlan { model, .. } = self.loaded;
        let ranks = plan.mesh().map_or(1, |mesh| mesh.world_size());
        TrainingJob {
            model: model.model.clone(),
            name: model.name.clone(),
            plan,
            data: self.data.clone(),
            input: Default::default(),
            cores_per_rank: cores_per_rank(self.topology, ranks),
            seed,
            length: Length::Steps(steps),
            evaluate: false,
            timeline: None,
            start: Start::Fresh,
            checkpoints: None,
            replay: None,
            on_divergence: OnDivergence::Continue,
        }
    }

    /// The table as a file, with comments on how its numbers were found.
    fn text(&self, answer: &ConvergenceAnswer) -> Result<String, Failure> {
        // Two more digits than runs with a few seeds reproduce.
        let rounded = |number: f64, digits: f64| (number * digits).round() / digits;
        let entry = |mode: &MeasuredMode| {
            let constant = SamplesNeeded::constant(mode.mode, rounded(mode.samples_needed, 1e3), answer.source(mode));
            // The excess grows with staleness, which differs between topologies.
            match mode.staleness > 0.0 && mode.samples_needed > 1.0 && self.plan(mode.mode).counted_share() == 1.0 {
                true => SamplesNeeded {
                    samples: 1.0,
                    per_staleness: rounded((mode.samples_needed - 1.0) / mode.staleness, 1e4),
                    ..constant
                },
                false => constant,
            }
        };
        let entries: Vec<SamplesNeeded> = answer.modes.iter().map(entry).collect();
        let table = serde_saphyr::to_string(&entries)
            .map_err(|error| Failure::undone(code::FILE_UNWRITABLE, format!("the table cannot be written: {error}")))?;
        let Plan { global_batch, layout, optimizer, .. } = &self.loaded.plan;
        let mut text = format!(
            "# Measured by `foretell calibrate --convergence`: {} with {}, {} replicas,\n\
             # a global batch of {global_batch}. Samples to a mean loss of {:.4} over {} steps;\n\
             # {} runs of each mode and learning rate.\n",
            one_line(&self.loaded.model.name),
            optimizer.name(),
            layout.data,
            answer.target_loss,
            answer.window_steps,
            self.arguments.seeds
        );
        for RefusedMode { mode, reason } in &answer.refused {
            text.push_str(&format!("# Not measured: {mode}: {}\n", one_line(reason)));
        }
        Ok(text + &table)
    }
}

/// A text on a single line, for a comment.
fn one_line(text: &str) -> String {
    text.split(char::is_control).collect::<Vec<_>>().join(" ")
}

/// The means of all windows of losses, indexed by the window's last step. Steps before the end of
/// the first window are infinite.
fn smoothed(losses: &[f64], window: usize) -> Vec<f64> {
    let means = losses.windows(window).map(|losses| losses.iter().sum::<f64>() / window as f64);
    let before = window.saturating_sub(1).min(losses.len());
    std::iter::repeat_n(f64::INFINITY, before).chain(means).collect()
}

/// The fewest steps after which a curve has reached a loss, and the curve.
fn fewest(curves: &[Curve], target: f64) -> Option<(usize, &Curve)> {
    let reached = |curve: &Curve| curve.smoothed.iter().position(|&loss| loss <= target).map(|last| last + 1);
    curves.iter().filter_map(|curve| Some((reached(curve)?, curve))).min_by_key(|&(steps, _)| steps)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_learning_rate_counts_and_losses_are_means_of_windows() {
        let curve = |learning_rate, losses: &[f64]| Curve { learning_rate, smoothed: smoothed(losses, 2), staleness: 0.0 };
        // One low loss is luck: only a mean counts. A run that diverged reaches nothing.
        let curves =
            [curve(0.1, &[4.0, 1.0, 3.0, 1.0, 0.5]), curve(0.2, &[4.0, 2.0, 1.0, 0.9]), curve(0.4, &[3.0, f64::NAN, f64::NAN])];
        assert_eq!(fewest(&curves, 1.5).map(|(steps, curve)| (steps, curve.learning_rate)), Some((3, 0.2)));
        assert_eq!(fewest(&curves, 0.8).map(|(steps, curve)| (steps, curve.learning_rate)), Some((5, 0.1)));
        assert!(fewest(&curves, 0.5).is_none());
    }

    #[test]
    fn the_usual_modes_begin_with_the_synchronous_one() {
        let modes: Vec<SamplesNeeded> = inputs::parse_yaml(MODES, Path::new("modes.yaml")).expect("a table");
        assert!(modes.len() == 11 && modes[0].mode == Mode::Synchronous);
    }
}
