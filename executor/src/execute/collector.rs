//! Combining what each rank reports of a step or an evaluation.

use super::classification::classification;
use super::{Evaluation, LossScaling, StepMetrics};
use crate::job::{Bits, EvaluationReport, ScoreReport, StepReport};
use foretell_program::MetricKind;
use std::collections::{BTreeMap, BTreeSet};

/// Collects the ranks' reports until those of a step or an evaluation are complete.
pub(super) struct Collector {
    /// The ranks that have not left.
    present: BTreeSet<usize>,
    world_size: usize,
    /// The ranks that train: all but servers.
    trainers: BTreeSet<usize>,
    /// The number of ranks that have the same samples: those of one worker.
    ranks_per_worker: usize,
    /// Predictions of a training step, over all samples.
    predictions: usize,
    /// Samples of a training step.
    samples: usize,
    /// The reports of incomplete steps with their ranks, by step.
    steps: BTreeMap<usize, Vec<(usize, StepReport)>>,
    /// The reports of all evaluations with their ranks, by the training step that they follow.
    evaluations: BTreeMap<usize, Vec<(usize, EvaluationReport)>>,
    /// The steps whose evaluations are complete.
    evaluated: BTreeSet<usize>,
    /// The samples that could not be used so far; `None` if such a sample ends the run.
    bad: Option<BadSamples>,
    /// The scores of evaluations that are not complete, by the training step that they follow.
    scores: BTreeMap<usize, Vec<Vec<f32>>>,
    /// The end of the last complete step, in nanoseconds of the machine's clock.
    last_end: Option<u64>,
}

/// Samples that could not be used. Several ranks may load the same one, and each counts once.
#[derive(Debug, Default)]
pub(super) struct BadSamples {
    /// Samples that were left out when the data was opened.
    left_out: usize,
    training: BTreeSet<usize>,
    evaluation: BTreeSet<usize>,
}

impl BadSamples {
    pub(super) fn new(left_out: usize) -> Self {
        Self { left_out, ..Self::default() }
    }

    fn count(&self) -> u64 {
        (self.left_out + self.training.len() + self.evaluation.len()) as u64
    }
}

impl Collector {
    /// A collector for `world_size` ranks, with `predictions` and `samples` in a step.
    pub(super) fn new(world_size: usize, predictions: usize, samples: usize, bad: Option<BadSamples>) -> Self {
        let (steps, evaluations, scores) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        let ranks: BTreeSet<usize> = (0..world_size).collect();
        let (present, trainers, ranks_per_worker) = (ranks.clone(), ranks, 1);
        Self {
            present,
            world_size,
            trainers,
            ranks_per_worker,
            predictions,
            samples,
            steps,
            evaluations,
            evaluated: BTreeSet::new(),
            scores,
            bad,
            last_end: None,
        }
    }

    /// Restricts the ranks that train to those of these workers.
    pub(super) fn with_workers(self, workers: &[Vec<usize>]) -> Self {
        let trainers = workers.iter().flatten().copied().collect();
        Self { trainers, ranks_per_worker: workers.first().map_or(1, |ranks| ranks.len().max(1)), ..self }
    }

    /// Adds one rank's report of a step. Returns the metrics once all ranks have reported it.
    pub(super) fn step(&mut self, rank: usize, report: StepReport) -> Option<StepMetrics> {
        let step = report.step;
        self.steps.entry(step).or_default().push((rank, report));
        self.finished_step(step)
    }

    /// Notes that some ranks have left. Returns the metrics of the steps that only these ranks had
    /// yet to report.
    pub(super) fn leave(&mut self, ranks: &[usize]) -> Vec<StepMetrics> {
        self.present.retain(|rank| !ranks.contains(rank));
        let steps: Vec<usize> = self.steps.keys().copied().collect();
        steps.into_iter().filter_map(|step| self.finished_step(step)).collect()
    }

    /// The metrics of a step, once all ranks that have not left have reported it.
    fn finished_step(&mut self, step: usize) -> Option<StepMetrics> {
        let reports = self.steps.get(&step)?;
        if !self.present.iter().all(|present| reports.iter().any(|(rank, _)| rank == present)) {
            return None;
        }
        let reports = self.steps.remove(&step)?;
        // Workers have equal parts of the batch; the part of a worker that has left is missing.
        let share = self.share(reports.iter().map(|(rank, _)| rank));
        let reports: Vec<StepReport> = reports.into_iter().map(|(_, report)| report).collect();
        let first = reports.first().expect("invariant: a finished step has reports");
        let learning_rate = f64::from(first.learning_rate) as f32;
        let end = reports.iter().fold(first.end, |last, report| last.max(report.end));
        let start = reports.iter().fold(first.start, |last, report| last.max(report.start));
        // A step lasts from the end of the previous one, less the time of the reference kernel
        // between them. After an evaluation it lasts from its own start.
        let between = reports.iter().filter_map(|report| report.reference).map(|time| time.spent).max().unwrap_or(0);
        let start =
            self.last_end.map_or(start, |last| if self.follows_evaluation(step) { start } else { start.min(last + between) });
        let seconds = end.saturating_sub(start) as f64 * 1e-9;
        let metrics = reports.iter().map(|report| &report.metrics);
        // With weighted classes the loss is a mean by weight.
        let is_weighted = metrics.clone().flatten().any(|(kind, _)| *kind == MetricKind::Weight);
        let weight = if is_weighted { sum(metrics.clone(), MetricKind::Weight) } else { self.predictions as f64 * share };
        let loss = sum(metrics.clone(), MetricKind::Loss) / weight;
        let gradient_norm = sum(metrics.clone(), MetricKind::SquaredGradientNorm).sqrt();
        let has_mixtures = metrics.clone().flatten().any(|(kind, _)| *kind == MetricKind::Dropped);
        let dropped_tokens = has_mixtures.then(|| sum(metrics.clone(), MetricKind::Dropped) as u64);
        // Metrics that are the same on all ranks that report them.
        let shared = |kind| metrics.clone().flatten().find(|(known, _)| *known == kind).map(|&(_, value)| f64::from(value));
        let scaling = shared(MetricKind::LossScale)
            .zip(shared(MetricKind::SkippedSteps))
            .map(|(loss_scale, skipped_steps)| LossScaling { loss_scale, skipped_steps });
        if let Some(bad) = &mut self.bad {
            bad.training.extend(reports.iter().flat_map(|report| &report.bad_samples));
        }
        let bad_samples = self.bad.as_ref().map(BadSamples::count);
        self.last_end = Some(end);
        let samples_per_second = self.samples as f64 * share / seconds;
        Some(StepMetrics {
            step,
            loss,
            seconds,
            learning_rate,
            samples_per_second,
            gradient_norm,
            dropped_tokens,
            bad_samples,
            scaling,
        })
    }

    /// The share of a batch that these ranks have trained with.
    fn share<'a>(&self, ranks: impl Iterator<Item = &'a usize>) -> f64 {
        ranks.filter(|rank| self.trainers.contains(rank)).count() as f64 / self.trainers.len().max(1) as f64
    }

    fn follows_evaluation(&self, step: usize) -> bool {
        step.checked_sub(1).is_some_and(|before| self.evaluations.contains_key(&before))
    }

    /// Adds one rank's report of an evaluation. Returns the evaluation once all ranks have reported
    /// it.
    pub(super) fn evaluation(
        &mut self,
        rank: usize,
        report: EvaluationReport,
        predictions_per_sample: usize,
    ) -> Option<Evaluation> {
        let step = report.step;
        self.evaluations.entry(step).or_default().push((rank, report));
        self.finished_evaluation(step, predictions_per_sample)
    }

    /// The evaluations that only ranks that have left since had yet to report.
    pub(super) fn finished_evaluations(&mut self, predictions_per_sample: usize) -> Vec<Evaluation> {
        let steps: Vec<usize> = self.evaluations.keys().copied().filter(|step| !self.evaluated.contains(step)).collect();
        steps.into_iter().filter_map(|step| self.finished_evaluation(step, predictions_per_sample)).collect()
    }

    /// The evaluation after a step, once all ranks that have not left have reported it.
    fn finished_evaluation(&mut self, step: usize, predictions_per_sample: usize) -> Option<Evaluation> {
        let reports = self.evaluations.get(&step)?;
        if !self.present.iter().all(|present| reports.iter().any(|(rank, _)| rank == present)) {
            return None;
        }
        let &EvaluationReport { epoch, samples, .. } = &reports.first()?.1;
        // No rank has evaluated the samples of a worker that has left.
        let own = reports.iter().filter(|(rank, _)| self.trainers.contains(rank)).map(|(_, report)| report.own_samples);
        let own = own.sum::<usize>() / self.ranks_per_worker;
        let samples = if self.present.len() < self.world_size { own } else { samples };
        self.evaluated.insert(step);
        if let Some(bad) = &mut self.bad {
            bad.evaluation.extend(reports.iter().flat_map(|(_, report)| &report.bad_samples));
        }
        let predictions = (samples * predictions_per_sample) as f64;
        let metrics = reports.iter().map(|(_, report)| &report.metrics);
        let loss = sum(metrics.clone(), MetricKind::Loss) / predictions;
        let top1 = sum(metrics.clone(), MetricKind::Correct) / predictions;
        let top5 = sum(metrics, MetricKind::TopFive) / predictions;
        let classification = self.scores.remove(&step).and_then(|scores| classification(&scores));
        Some(Evaluation { step, epoch, loss, top1, top5, perplexity: loss.exp(), classification, samples })
    }

    /// Adds one rank's scores of an evaluation batch. A rank sends them before its report of the
    /// evaluation.
    pub(super) fn scores(&mut self, report: ScoreReport) {
        let samples = report.samples.into_iter().map(|sample| sample.into_iter().map(f32::from_bits).collect());
        self.scores.entry(report.step).or_default().extend(samples);
    }
}

/// The sum of one kind of metric over all ranks. Values are added in ascending order, so that the
/// order in which ranks report makes no difference.
fn sum<'a>(metrics: impl Iterator<Item = &'a Vec<(MetricKind, Bits)>>, kind: MetricKind) -> f64 {
    let mut values: Vec<f64> = metrics.flatten().filter(|(known, _)| *known == kind).map(|&(_, value)| value.into()).collect();
    values.sort_by(f64::total_cmp);
    values.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(step: usize, loss: f64) -> StepReport {
        let metrics = vec![(MetricKind::Loss, loss.into()), (MetricKind::SquaredGradientNorm, f64::INFINITY.into())];
        let (learning_rate, bad_samples) = (f64::from(0.1_f32).into(), BTreeSet::new());
        StepReport { step, start: 0, end: 1_000, learning_rate, metrics, bad_samples, reference: None }
    }

    #[test]
    fn a_step_is_complete_when_all_ranks_have_reported_it() {
        let mut collector = Collector::new(2, 4, 4, None);
        assert!(collector.step(0, report(0, 2.0)).is_none());
        assert!(collector.step(0, report(1, f64::NAN)).is_none());
        let first = collector.step(1, report(0, 6.0)).expect("both have reported it");
        assert_eq!((first.step, first.loss, first.learning_rate), (0, 2.0, 0.1));
        let second = collector.step(1, report(1, 1.0)).expect("both have reported it");
        assert!(second.loss.is_nan());
        assert!(collector.steps.is_empty());
    }

    #[test]
    fn steps_and_evaluations_go_on_without_a_worker_that_has_left() {
        // Two workers of one rank each, and a server.
        let mut collector = Collector::new(3, 4, 4, None).with_workers(&[vec![0], vec![1]]);
        let none = |step| StepReport { metrics: Vec::new(), ..report(step, 0.0) };
        for (rank, report) in [(0, report(0, 2.0)), (0, report(1, 2.0)), (2, none(0)), (1, report(0, 6.0))] {
            let whole = collector.step(rank, report).map(|metrics| metrics.loss);
            assert_eq!(whole, (rank == 1).then_some(2.0), "rank {rank}");
        }
        collector.step(2, none(1));
        let finished = collector.leave(&[1]);
        // Half the batch has half the predictions.
        assert_eq!(finished.iter().map(|finished| (finished.step, finished.loss)).collect::<Vec<_>>(), [(1, 1.0)]);
        let evaluated = |own_samples| EvaluationReport {
            step: 1,
            epoch: 0,
            samples: 10,
            own_samples,
            metrics: vec![(MetricKind::Loss, 12.0.into())],
            bad_samples: BTreeSet::new(),
        };
        assert!(collector.evaluation(0, evaluated(6), 1).is_none());
        let evaluation =
            collector.evaluation(2, EvaluationReport { metrics: Vec::new(), ..evaluated(0) }, 1).expect("all that are left");
        assert_eq!((evaluation.samples, evaluation.loss), (6, 2.0));
    }

    #[test]
    fn the_reference_kernel_between_two_steps_is_no_part_of_a_step() {
        let timed = |step, start, end, spent| {
            let reference = Some(crate::reference::ReferenceTime { processor: 1, wall: 1, spent });
            StepReport { start, end, reference, ..report(step, 1.0) }
        };
        let mut collector = Collector::new(2, 4, 4, None);
        collector.step(0, timed(0, 100, 1_000, 10));
        collector.step(1, timed(0, 110, 1_100, 20));
        collector.step(0, timed(1, 1_150, 2_000, 30));
        let second = collector.step(1, timed(1, 1_160, 2_050, 40)).expect("both have reported it");
        assert!((second.seconds - (2_050.0 - 1_100.0 - 40.0) * 1e-9).abs() < 1e-15, "{second:?}");
    }

    #[test]
    fn a_bad_sample_that_several_ranks_load_counts_once() {
        let mut collector = Collector::new(2, 4, 4, Some(BadSamples::new(3)));
        let with = |step, bad_samples| StepReport { bad_samples, ..report(step, 1.0) };
        collector.step(0, with(0, BTreeSet::from([7])));
        let first = collector.step(1, with(0, BTreeSet::from([7, 9]))).expect("both have reported it");
        collector.step(0, with(1, BTreeSet::from([7])));
        let second = collector.step(1, with(1, BTreeSet::new())).expect("both have reported it");
        assert_eq!((first.bad_samples, second.bad_samples), (Some(5), Some(5)));
        assert_eq!(Collector::new(1, 4, 4, None).step(0, report(0, 2.0)).expect("a step").bad_samples, None);
    }

    #[test]
    fn metrics_that_are_not_finite_are_written_as_null() {
        let metrics = Collector::new(1, 4, 4, None).step(0, report(0, 2.0)).expect("the only rank has reported it");
        let text = serde_json::to_string(&metrics).expect("it is written");
        assert!(text.contains(r#""gradient_norm":null"#), "{text}");
    }
}
