//! `--lengths`: the effects of different sample lengths on a step: padding, ranks that wait for the
//! longest sample, and the longest batch, which decides memory.

mod data;

use crate::choices::{Choices, Setting};
use crate::failure::{Failure, code};
use crate::inputs::NamedModel;
use crate::predict;
use crate::running_cost::Pace;
use crate::usual_stack::Trainer;
use clap::{Args, ValueEnum};
use foretell_planner::{Candidate, SearchResult};
use foretell_program::{AttentionKernel, Plan, Profile, compile};
use foretell_reports::{Column, table};
use foretell_simulator::{
    BatchShape, LengthCourse, Options, Prediction, SampleLengths, SampleOrder, WaitsFor, memory_use, predict_cycle,
    traced_prediction,
};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Seconds};
use schemars::JsonSchema;
use serde::Serialize;
use std::path::PathBuf;

/// Command-line choices of the samples' lengths.
#[derive(Debug, Clone, Default, Args)]
pub struct LengthChoices {
    /// Lengths of the data set's samples in tokens, longer ones being cut at the model's sequence:
    /// mean and 95th percentile (`mean=512,p95=1536`), or a file with a number on each line, or
    /// JSON lines (with `length`, `input_ids`, or texts and `--tokenizer`)
    #[arg(long, value_name = "mean=512,p95=1536|FILE")]
    lengths: Option<String>,
    /// How samples of different lengths share batches
    #[arg(long, value_enum, default_value_t, requires = "lengths")]
    batching: Batching,
    /// The model's `tokenizer.json`, for texts in `--lengths`
    #[arg(long, value_name = "FILE", requires = "lengths")]
    tokenizer: Option<PathBuf>,
}

/// How samples of different lengths become the rows of a micro-batch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Batching {
    /// Each is padded to the longest of its micro-batch
    #[default]
    Pad,
    /// As `pad`, with samples of about one length in a micro-batch (`group_by_length`)
    Group,
    /// Samples are joined to rows of the model's sequence
    Pack,
}

impl Batching {
    fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// The sample lengths of a job's data set.
pub struct DataLengths {
    /// As stated.
    lengths: SampleLengths,
    /// The number of samples, if a file lists them.
    samples: Option<usize>,
    /// The model's positions. Longer samples are cut at this length.
    positions: usize,
    batching: Batching,
}

/// The effects of the samples' lengths on a step.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "Lengths")]
pub struct LengthsAnswer {
    /// Samples of the data set; absent if a distribution was stated.
    #[serde(skip_serializing_if = "Option::is_none")]
    samples: Option<usize>,
    /// Tokens of a sample in the mean, after cutting.
    mean_tokens: f64,
    /// The length that 95 % of the samples do not exceed, in tokens.
    p95_tokens: usize,
    /// The most tokens of a sample.
    longest_tokens: usize,
    /// Share of the samples that are cut at the model's sequence.
    cut_share: f64,
    /// The ways to make batches, the chosen one first.
    batching: Vec<BatchingAnswer>,
    /// Fast and slow end of the prediction's own 80 % interval, relative to each of these times.
    /// Taken from a step at about the mean length.
    interval: [f64; 2],
    /// The assumptions, a sentence each.
    assumptions: Vec<String>,
}

/// Steps with one way to make batches.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[schemars(rename = "Batching")]
struct BatchingAnswer {
    /// `pad`, `group` or `pack`.
    name: String,
    /// The mean step.
    step_seconds: f64,
    /// The 10th percentile of the step, over batches of different samples.
    step_seconds_p10: f64,
    /// The 90th percentile of the step, over batches of different samples.
    step_seconds_p90: f64,
    /// Samples of the data set per second.
    samples_per_second: f64,
    /// Tokens of the data set per second, without padding.
    tokens_per_second: f64,
    /// Share of the positions that hold no token.
    padding_share: f64,
    /// Peak memory of the fullest device, in the longest batch.
    memory_bytes: u64,
    /// Whether that memory fits.
    fits: bool,
}

/// Number of lengths at which steps are predicted. Steps between them are interpolated.
const GRID: usize = 7;

/// Predicted lengths are multiples of this many positions for each rank along `context`, so that
/// every layout can shard them.
const UNIT: usize = 64;

/// The seed for drawing steps.
const SEED: u64 = 0;

impl LengthChoices {
    /// Whether lengths are given.
    pub fn are_stated(&self) -> bool {
        self.lengths.is_some()
    }

    /// The choices of a search over samples of these lengths. Its sequences are as long as the
    /// longest batch, which decides memory.
    pub fn apply(&self, choices: &Choices, trainer: Trainer) -> Result<(Choices, Option<DataLengths>), Failure> {
        let mut choices = choices.clone();
        if self.lengths.is_none() {
            return Ok((choices, None));
        }
        let model = choices.setting(trainer)?.model;
        let lengths = self.of_model(&model)?;
        if let Some(lengths) = lengths.as_ref().filter(|lengths| lengths.batching != Batching::Pack) {
            choices.sequence = Some(lengths.longest(1));
        }
        Ok((choices, lengths))
    }

    /// The lengths of samples for a model.
    pub fn of_model(&self, model: &NamedModel) -> Result<Option<DataLengths>, Failure> {
        let Some(text) = &self.lengths else { return Ok(None) };
        let positions = model.model.sample().tokens().filter(|(positions, _)| model.model.with_sequence(*positions).is_some());
        let Some((positions, _)) = positions else {
            let message = format!("`--lengths`: `{}` has no one length of its samples", model.name);
            return Err(Failure::input(code::OPTION_VALUE, message).hint("leave it out"));
        };
        let (lengths, samples) = data::read(text, positions, self.tokenizer.as_deref())?;
        Ok(Some(DataLengths { lengths, samples, positions, batching: self.batching }))
    }
}

impl DataLengths {
    /// Positions of the longest padded batch.
    fn longest(&self, unit: usize) -> usize {
        let unit = UNIT * unit;
        self.lengths.longest().min(self.positions).next_multiple_of(unit).min(self.positions)
    }

    /// The lengths at which a padded step is predicted, the shortest first.
    fn grid(&self, unit: usize) -> Vec<usize> {
        let longest = self.longest(unit);
        let shortest = self.lengths.shortest().next_multiple_of(UNIT * unit).min(longest);
        let ratio = longest as f64 / shortest as f64;
        let at = |place: usize| {
            let length = shortest as f64 * ratio.powf(place as f64 / (GRID - 1) as f64);
            (length.round() as usize).next_multiple_of(UNIT * unit).min(longest)
        };
        let mut grid: Vec<usize> = (0..GRID).map(at).collect();
        grid.dedup();
        grid
    }

    /// Orders layouts by their mean step over these samples. Returns the answer of the best one.
    pub fn rank(
        &self,
        planned: &mut SearchResult,
        setting: &Setting,
        profile: Option<&Profile>,
    ) -> Result<LengthsAnswer, Failure> {
        let answer = |candidate: &Candidate| self.answer(&setting.model, &candidate.plan, &setting.topology, profile);
        let answers = planned.candidates.iter().map(answer).collect::<Result<Vec<_>, _>>()?;
        let mut ranked: Vec<(LengthsAnswer, Candidate)> = answers.into_iter().zip(planned.candidates.drain(..)).collect();
        ranked.sort_by(|(left, _), (right, _)| left.step().value().total_cmp(&right.step().value()));
        let best = ranked.first().map(|(answer, _)| answer.clone());
        planned.candidates =
            ranked.into_iter().map(|(answer, candidate)| Candidate { value: answer.step().value(), ..candidate }).collect();
        best.ok_or_else(|| Failure::undone(code::NOTHING_FITS, "the search returned nothing"))
    }

    /// Predicts the steps of a plan over these samples.
    pub fn answer(
        &self,
        model: &NamedModel,
        plan: &Plan,
        topology: &Topology,
        profile: Option<&Profile>,
    ) -> Result<LengthsAnswer, Failure> {
        let job = Job { model, topology, profile };
        let layout = &plan.layout;
        let ranks = layout.data * layout.expert;
        let shape = BatchShape {
            rows: layout.micro_batch,
            micro_batches: plan.micro_batches()?,
            ranks,
            waits_for: if layout.zero >= 3 { WaitsFor::EveryMicroBatch } else { WaitsFor::EveryStep },
        };
        let cut = self.lengths.cut_at(self.positions);
        let grid = self.grid(layout.context);
        let padded = grid.iter().map(|length| job.step(plan, *length)).collect::<Result<Vec<_>, _>>()?;
        let steps: Vec<(f64, f64)> =
            grid.iter().zip(&padded).map(|(length, step)| (*length as f64, step.step_seconds.value())).collect();
        let at = |positions: f64| Seconds::new(between(&steps, positions));
        let longest = padded.last().expect("invariant: a grid has a length");
        let whole = job.step(plan, self.positions)?;
        let keeps_apart = plan.workload.attention == Some(AttentionKernel::Flash);
        let of_packed = if keeps_apart { job.packed_step(plan, self.positions, &cut)? } else { whole.step_seconds };
        let mut batching = vec![
            BatchingAnswer::new(Batching::Pad, &cut.padded_course(shape, SampleOrder::Shuffled, &at, SEED), longest),
            BatchingAnswer::new(Batching::Group, &cut.padded_course(shape, SampleOrder::ByLength, &at, SEED), longest),
            BatchingAnswer::new(Batching::Pack, &cut.packed_course(shape, self.positions, of_packed), &whole),
        ];
        let at_mean = grid.iter().position(|length| *length as f64 >= cut.mean()).map_or(longest, |place| &padded[place]);
        let interval = [at_mean.step_seconds_p10, at_mean.step_seconds_p90].map(|end| end / at_mean.step_seconds);
        let chosen = self.batching.name();
        batching.sort_by_key(|answer| answer.name != chosen);
        let packed = if keeps_apart {
            "packed samples do not attend to each other"
        } else {
            "packed samples attend to each other; with `--attention flash` they would not"
        };
        let waits = match shape.waits_for {
            WaitsFor::EveryMicroBatch => "ranks wait for each other in every micro-batch",
            WaitsFor::EveryStep => "ranks wait for each other once a step",
        };
        let mut assumptions = vec![packed.to_owned()];
        if ranks > 1 {
            assumptions.push(waits.into());
        }
        if !plan.stack.is_own() {
            assumptions.push("where lengths vary, an allocator can reserve more than the longest batch needs".into());
        }
        Ok(LengthsAnswer {
            samples: self.samples,
            mean_tokens: cut.mean(),
            p95_tokens: cut.quantile(0.95),
            longest_tokens: cut.longest(),
            cut_share: self.lengths.share_above(self.positions),
            batching,
            interval,
            assumptions,
        })
    }
}

/// The job whose step is predicted at several lengths.
struct Job<'a> {
    model: &'a NamedModel,
    topology: &'a Topology,
    profile: Option<&'a Profile>,
}

impl Job<'_> {
    /// Predicts a step whose rows have `positions` positions.
    fn step(&self, plan: &Plan, positions: usize) -> Result<Prediction, Failure> {
        let model = self.model.model.with_sequence(positions).expect("invariant: lengths are of models with one length");
        let costs = predict::costs(self.profile, self.topology, plan, &model)?;
        if let Ok(traced) = traced_prediction(plan, &model, self.topology, &costs) {
            return Ok(traced.prediction);
        }
        let compiled = compile(&model, &self.model.name, plan).map_err(Failure::of_input)?;
        let memory = memory_use(&compiled.training, Some(&compiled.evaluation), self.topology, &costs);
        Ok(predict_cycle(&compiled, &memory, self.topology, &costs, &Options::default())?.0)
    }

    /// The step of packed rows whose samples do not attend to each other. It equals the step of as
    /// many tokens in rows of one length, chosen such that attention has as much work.
    fn packed_step(&self, plan: &Plan, positions: usize, lengths: &SampleLengths) -> Result<Seconds, Failure> {
        let tokens = plan.layout.micro_batch * positions;
        let rows = (tokens as f64 / lengths.mean_of_tokens().min(positions as f64)).round().max(1.0) as usize;
        let unit = UNIT * plan.layout.context;
        let length = tokens.div_ceil(rows).next_multiple_of(unit).min(positions);
        let mut like = plan.clone();
        like.layout.micro_batch = rows;
        like.global_batch = plan.global_batch / plan.layout.micro_batch * rows;
        let step = self.step(&like, length)?.step_seconds;
        Ok(step * (tokens as f64 / (rows * length) as f64))
    }
}

/// The value at `place`, interpolated between points; beyond the last point in proportion to it.
fn between(points: &[(f64, f64)], place: f64) -> f64 {
    let above = points.partition_point(|(known, _)| *known < place);
    match (points[..above].last(), points.get(above)) {
        (Some((low, below)), Some((high, above))) => below + (above - below) * (place - low) / (high - low),
        (Some((last, value)), None) => value * place / last,
        (None, first) => first.expect("invariant: a grid has a length").1,
    }
}

impl BatchingAnswer {
    fn new(batching: Batching, course: &LengthCourse, fullest: &Prediction) -> Self {
        Self {
            name: batching.name(),
            step_seconds: course.mean.value(),
            step_seconds_p10: course.p10.value(),
            step_seconds_p90: course.p90.value(),
            samples_per_second: course.samples / course.mean.value(),
            tokens_per_second: course.tokens_per_second(),
            padding_share: course.padding,
            memory_bytes: fullest.peak_memory_bytes.iter().map(|bytes| bytes.count()).max().unwrap_or(0),
            fits: fullest.fits,
        }
    }
}

impl LengthsAnswer {
    /// The mean step of the chosen batching.
    pub fn step(&self) -> Seconds {
        Seconds::new(self.batching[0].step_seconds)
    }

    /// The mean step of the chosen batching, with the samples and tokens of the data set in it.
    pub fn pace(&self) -> Pace {
        let BatchingAnswer { samples_per_second, tokens_per_second, .. } = &self.batching[0];
        let step = self.step();
        Pace {
            step,
            samples: samples_per_second * step.value(),
            tokens: Some(tokens_per_second * step.value()),
            data_set: self.samples.map(|samples| samples as f64),
        }
    }

    /// The answer as text.
    pub fn text(&self) -> String {
        let cut = match self.cut_share {
            0.0 => String::new(),
            share => format!("; {:.1} % of them are cut there", share * 100.0),
        };
        let first = format!(
            "samples have {:.0} tokens in the mean, 95 % of them at most {}, the longest {}{cut}",
            self.mean_tokens, self.p95_tokens, self.longest_tokens
        );
        let columns = [
            Column::words("batching"),
            Column::numbers("mean step"),
            Column::numbers("8 of 10 steps"),
            Column::numbers("samples/s"),
            Column::numbers("tokens/s"),
            Column::numbers("padding"),
            Column::numbers("memory"),
        ];
        let row = |answer: &BatchingAnswer| {
            let memory = Bytes::new(answer.memory_bytes);
            let memory = if answer.fits { memory.to_string() } else { format!("{memory}, too much") };
            vec![
                answer.name.clone(),
                Seconds::new(answer.step_seconds).to_string(),
                format!("{} to {}", Seconds::new(answer.step_seconds_p10), Seconds::new(answer.step_seconds_p90)),
                format!("{:.1}", answer.samples_per_second),
                format!("{:.0}", answer.tokens_per_second),
                format!("{:.0} %", answer.padding_share * 100.0),
                memory,
            ]
        };
        let rows: Vec<Vec<String>> = self.batching.iter().map(row).collect();
        let [fast, slow] = self.interval;
        format!(
            "{first}\n{}\neach time may be {fast:.2} to {slow:.2} times what is predicted (80 % interval); {}",
            table(&columns, &rows),
            self.assumptions.join("; ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_between_lengths_are_interpolated() {
        let points = [(100.0, 1.0), (200.0, 3.0)];
        let at = |place| between(&points, place);
        assert_eq!((at(50.0), at(100.0), at(150.0), at(200.0), at(400.0)), (1.0, 1.0, 2.0, 3.0, 6.0));
    }

    #[test]
    fn the_grid_spans_the_lengths_in_units() {
        let lengths = SampleLengths::measured(vec![10, 300, 5000]).expect("they are lengths");
        let data = DataLengths { lengths, samples: None, positions: 2048, batching: Batching::Pad };
        let grid = data.grid(2);
        assert_eq!((grid.first(), grid.last()), (Some(&128), Some(&2048)));
        assert!(grid.iter().all(|length| length.is_multiple_of(128)) && grid.is_sorted(), "{grid:?}");
    }
}
